//! Field sections (RFC 9204 §4.5) without a dynamic table: all that they refer to is in the static one.

use super::HeadError;
use super::huffman::{self, HuffmanError};
use super::static_table::{FIELDS, Found, find};
use super::varint;

/// What a field counts for beside its name and value (RFC 9114 §4.2.2), in bytes.
pub const FIELD_OVERHEAD: u64 = 32;

/// Calls `field` with the name and the value of each field of a section, in order.
///
/// `max_size` is the greatest size of the section by the measure of RFC 9114 §4.2.2; a field that is beyond it is not
/// made, and those before it have been given to `field`.
///
/// # Errors
/// [`HeadError::Compression`] and [`HeadError::TooLarge`], or what `field` says.
pub fn decode<E: From<HeadError>>(
    section: &[u8],
    max_size: u64,
    mut field: impl FnMut(&[u8], &[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let mut input = Input { rest: section };
    input.prefix()?;
    let (mut scratch, mut left) = (Vec::with_capacity(256), max_size);
    while let Some(first) = input.rest.first().copied() {
        left = left.checked_sub(FIELD_OVERHEAD).ok_or(HeadError::TooLarge)?;
        // Whatever does not refer to the static table refers to the dynamic one, before or after the base.
        let (name, value) = match first {
            // §4.5.2: indexed field line.
            0b1100_0000.. => {
                let (name, value) = input.static_field(6)?;
                (Text::Plain(name), Text::Plain(value))
            }
            // §4.5.4: literal field line with name reference.
            0b0101_0000..=0b0101_1111 | 0b0111_0000..=0b0111_1111 => {
                let (name, _) = input.static_field(4)?;
                (Text::Plain(name), input.string(7)?)
            }
            // §4.5.6: literal field line with literal name.
            0b0010_0000..=0b0011_1111 => (input.string(3)?, input.string(7)?),
            _ => return Err(HeadError::Compression.into()),
        };
        scratch.clear();
        let name_end = name.unfold(&mut left, &mut scratch)?;
        value.unfold(&mut left, &mut scratch)?;
        let (of_name, of_value) = scratch.split_at(name_end);
        field(name.text(of_name), value.text(of_value))?;
    }
    Ok(())
}

/// A name or a value, as it is in a section.
#[derive(Clone, Copy)]
enum Text<'s> {
    Plain(&'s [u8]),
    Coded(&'s [u8]),
}

impl<'s> Text<'s> {
    /// Appends what is coded to `scratch`, and returns where it ends. The text is taken off the bytes that are `left`.
    fn unfold(self, left: &mut u64, scratch: &mut Vec<u8>) -> Result<usize, HeadError> {
        let before = scratch.len();
        let length = match self {
            Self::Plain(text) => text.len(),
            Self::Coded(coded) => {
                let most = usize::try_from(*left).unwrap_or(usize::MAX);
                huffman::decode(coded, most, scratch).map_err(|error| match error {
                    HuffmanError::Invalid => HeadError::Compression,
                    HuffmanError::TooLong => HeadError::TooLarge,
                })?;
                scratch.len() - before
            }
        };
        *left = left.checked_sub(length as u64).ok_or(HeadError::TooLarge)?;
        Ok(scratch.len())
    }

    fn text<'t>(self, unfolded: &'t [u8]) -> &'t [u8]
    where
        's: 't,
    {
        match self {
            Self::Plain(text) => text,
            Self::Coded(_) => unfolded,
        }
    }
}

/// What is left of a section.
struct Input<'s> {
    rest: &'s [u8],
}

impl<'s> Input<'s> {
    fn byte(&mut self) -> Result<u8, HeadError> {
        let (byte, rest) = self.rest.split_first().ok_or(HeadError::Compression)?;
        self.rest = rest;
        Ok(*byte)
    }

    /// RFC 7541 §5.1, by RFC 9204 §4.1.1: an integer in the lowest `bits` of a byte and in those that follow. None that
    /// means anything has more than 62 bits.
    #[inline]
    fn integer(&mut self, bits: u32) -> Result<u64, HeadError> {
        let mask = u8::MAX >> (8 - bits);
        let mut value = u64::from(self.byte()? & mask);
        if value < u64::from(mask) {
            return Ok(value);
        }
        for shift in (0..=56).step_by(7) {
            let byte = self.byte()?;
            value += u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 && value <= varint::MAX {
                return Ok(value);
            }
        }
        Err(HeadError::Compression)
    }

    /// RFC 7541 §5.2, by RFC 9204 §4.1.2: a string whose length is in the lowest `bits` of a byte; the next bit says
    /// that it is coded.
    #[inline]
    fn string(&mut self, bits: u32) -> Result<Text<'s>, HeadError> {
        let is_coded = self.rest.first().is_some_and(|first| first >> bits & 1 == 1);
        let length = self.integer(bits)?;
        let length = usize::try_from(length).map_err(|_| HeadError::Compression)?;
        let (text, rest) = self.rest.split_at_checked(length).ok_or(HeadError::Compression)?;
        self.rest = rest;
        Ok(if is_coded { Text::Coded(text) } else { Text::Plain(text) })
    }

    #[inline]
    fn static_field(&mut self, bits: u32) -> Result<(&'static [u8], &'static [u8]), HeadError> {
        let index = self.integer(bits)?;
        usize::try_from(index).ok().and_then(|index| FIELDS.get(index)).copied().ok_or(HeadError::Compression)
    }

    /// §4.5.1: no insertion is required. The base may be any from there on: nothing refers to it.
    fn prefix(&mut self) -> Result<(), HeadError> {
        if self.integer(8)? != 0 {
            return Err(HeadError::Compression);
        }
        let is_negative = self.rest.first().is_some_and(|first| first & 0x80 != 0);
        self.integer(7)?;
        if is_negative { Err(HeadError::Compression) } else { Ok(()) }
    }
}

/// Appends what a section begins with (§4.5.1): no insertion is required, and the base is there.
pub fn write_prefix(out: &mut Vec<u8>) {
    out.extend_from_slice(&[0, 0]);
}

/// Appends a field line, its name in lower case.
pub fn write_field(name: &[u8], value: &[u8], out: &mut Vec<u8>) {
    match find(name, value) {
        // §4.5.2.
        Found::Field(index) => write_integer(0b1100_0000, 6, index.into(), out),
        // §4.5.4.
        Found::Name(index) => {
            let never_indexed = if is_secret(index) { 0b0010_0000 } else { 0 };
            write_integer(0b0101_0000 | never_indexed, 4, index.into(), out);
            write_string(0, 7, value.iter().copied(), out);
        }
        // §4.5.6.
        Found::Nothing => {
            write_string(0b0010_0000, 3, name.iter().map(u8::to_ascii_lowercase), out);
            write_string(0, 7, value.iter().copied(), out);
        }
    }
}

/// §7.1.3: whoever passes these names' values on keeps them out of tables, too, where they could be found by guessing:
/// `cookie`, `set-cookie` and `authorization`.
const fn is_secret(index: u8) -> bool {
    matches!(index, 5 | 14 | 84)
}

/// Appends an integer (RFC 7541 §5.1) to what the bits of `first` above its lowest `bits` say.
fn write_integer(first: u8, bits: u32, value: u64, out: &mut Vec<u8>) {
    let mask = u8::MAX >> (8 - bits);
    if value < u64::from(mask) {
        out.push(first | value as u8);
        return;
    }
    out.push(first | mask);
    let mut rest = value - u64::from(mask);
    while rest >= 0x80 {
        out.push(rest as u8 | 0x80);
        rest >>= 7;
    }
    out.push(rest as u8);
}

/// Appends a string (RFC 7541 §5.2), by the Huffman code where that is shorter.
#[inline]
fn write_string(first: u8, bits: u32, text: impl ExactSizeIterator<Item = u8> + Clone, out: &mut Vec<u8>) {
    let (length, coded) = (text.len(), huffman::encoded_len(text.clone()));
    if coded < length {
        write_integer(first | 1 << bits, bits, coded as u64, out);
        huffman::encode(text, out);
    } else {
        write_integer(first, bits, length as u64, out);
        out.extend(text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Decoded = Vec<(String, String)>;

    fn decode_within(section: &[u8], max_size: u64) -> Result<Decoded, HeadError> {
        let mut fields = Vec::new();
        decode(section, max_size, |name, value| {
            let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
            fields.push((text(name), text(value)));
            Ok(())
        })
        .map(|()| fields)
    }

    fn decoded(section: &[u8]) -> Result<Decoded, HeadError> {
        decode_within(section, u64::MAX)
    }

    fn fields(fields: &[(&str, &str)]) -> Decoded {
        fields.iter().map(|(name, value)| (String::from(*name), String::from(*value))).collect()
    }

    fn written(fields: &[(&str, &str)]) -> Vec<u8> {
        let mut out = Vec::new();
        write_prefix(&mut out);
        fields.iter().for_each(|(name, value)| write_field(name.as_bytes(), value.as_bytes(), &mut out));
        out
    }

    #[test]
    fn the_example_of_rfc_9204_appendix_b_1_is_read() {
        let section = [&[0x00, 0x00, 0x51, 0x0b][..], b"/index.html"].concat();
        assert_eq!(decoded(&section).unwrap(), fields(&[(":path", "/index.html")]));
    }

    #[test]
    fn each_form_of_a_line_is_read() {
        let section = [
            &[0, 0][..],
            &[0xd1],                               // 17
            &[0xff, 98 - 63],                      // 98
            &[0x5f, 92 - 15, 3, b'a', b'b', b'c'], // 92
            &[0x7f, 84 - 15, 0x82, 0x9c, 0x1f],    // 84, never indexed, coded
            &[0x23, b'x', b'-', b'y', 1, b'z'],
            &[0x3f, 0x00, 0xf2, 0xb4, 0xa7, 0xff, 0xff, 0xff, 0xff, 0],
        ];
        // The last has no code for its name: seven bytes that end in EOS.
        assert_eq!(decoded(&section.concat()), Err(HeadError::Compression));
        assert_eq!(
            decoded(&section[..6].concat()).unwrap(),
            fields(&[
                (":method", "GET"),
                ("x-frame-options", "sameorigin"),
                ("server", "abc"),
                ("authorization", "h0"),
                ("x-y", "z"),
            ])
        );
        assert_eq!(decoded(&[0, 0]), Ok(Vec::new()));
    }

    #[test]
    fn what_refers_to_a_dynamic_table_is_refused() {
        for line in [
            &[0x80][..],      // indexed
            &[0x10],          // indexed after the base
            &[0x40, 0],       // name
            &[0x60, 0],       // name, never indexed
            &[0x00, 0],       // name after the base
            &[0x08, 0],       // name after the base, never indexed
            &[0xff, 99 - 63], // beyond the static table
            &[0x5f, 99 - 15, 0],
        ] {
            let section = [&[0, 0], line].concat();
            assert_eq!(decoded(&section), Err(HeadError::Compression), "{line:?}");
        }
        for prefix in [&[1, 0][..], &[0xff, 0, 0], &[0, 0x80], &[0, 0x81], &[0], &[]] {
            assert_eq!(decoded(prefix), Err(HeadError::Compression), "{prefix:?}");
        }
        // A base that nothing refers to.
        assert_eq!(decoded(&[0, 0x05, 0xd1]).unwrap(), fields(&[(":method", "GET")]));
    }

    #[test]
    fn integers_and_strings_that_do_not_end_are_refused() {
        let whole = written(&[(":path", "/a/path"), ("x-name", "and a value")]);
        let ends: Vec<_> = (0..whole.len()).filter(|cut| decoded(&whole[..*cut]).is_ok()).collect();
        // After the prefix, and after the first line.
        assert_eq!(ends.len(), 2, "{ends:?}");
        for integer in [&[0xff; 12][..], &[0xff, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x00]]
        {
            assert_eq!(decoded(&[&[0, 0], integer].concat()), Err(HeadError::Compression));
        }
        let endless = [&[0, 0, 0x51, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x3f][..], b"/"];
        assert_eq!(decoded(&endless.concat()), Err(HeadError::Compression));
        // 17, in more bytes than it takes.
        assert_eq!(decoded(&[0, 0, 0xff, 0x80, 0x80, 0x00]).unwrap().len(), 1);
    }

    #[test]
    fn a_section_is_as_large_as_its_names_its_values_and_32_bytes_for_each_field() {
        let section = written(&[(":method", "GET"), ("x-name", "a value of some length"), ("age", "!!!!")]);
        let size = (7 + 3 + 32) + (6 + 22 + 32) + (3 + 4 + 32);
        assert_eq!(decode_within(&section, size).unwrap().len(), 3);
        for less in 0..size {
            assert_eq!(decode_within(&section, less), Err(HeadError::TooLarge), "{less}");
        }
    }

    #[test]
    fn fields_are_written_by_reference_where_there_is_one() {
        assert_eq!(
            written(&[("Content-Type", "text/css"), (":status", "200")]),
            [0, 0, 0xc0 | 51, 0xc0 | 25]
        );
        assert_eq!(written(&[("X-Frame-Options", "sameorigin")]), [0, 0, 0xff, 98 - 63]);
        assert_eq!(written(&[("Age", "17")]), [0, 0, 0x50 | 2, 2, b'1', b'7']);
        assert_eq!(written(&[("Set-Cookie", "!=!")])[..3], [0, 0, 0x70 | 14]);
        assert_eq!(written(&[("~", "~")]), [0, 0, 0x21, b'~', 1, b'~']);
    }

    #[test]
    fn names_are_written_in_lower_case() {
        let section = written(&[("X-Names-That-Nobody-KNOWS", "A Value"), ("ETag", "\"A\""), ("~X", "")]);
        assert_eq!(
            decoded(&section).unwrap(),
            fields(&[("x-names-that-nobody-knows", "A Value"), ("etag", "\"A\""), ("~x", "")])
        );
    }

    #[test]
    fn lengths_beyond_the_prefix_of_an_integer_go_both_ways() {
        for length in [0, 6, 7, 8, 126, 127, 128, 255, 16_510, 70_000] {
            let long = "~".repeat(length);
            let section = written(&[(&long, &long), ("x", &"a".repeat(length))]);
            assert_eq!(
                decoded(&section).unwrap(),
                fields(&[(&long, &long), ("x", &"a".repeat(length))]),
                "{length}"
            );
        }
    }
}
