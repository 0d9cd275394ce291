//! The Huffman code of field names and values (RFC 7541 §5.2 and Appendix B, by RFC 9204 §4.1.2).
//!
//! The code is canonical: the codes of one length are consecutive and in the order of their symbols. All tables are
//! made of the lengths when this is compiled.

/// Lengths of the codes in bits, by symbol; the last is that of EOS, which is never sent.
const LENGTHS: [u8; 257] = [
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 30, 28, //
    28, 28, 28, 28, 28, 28, 28, 28, 6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6, //
    5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12, 10, 13, 6, 7, 7, 7, 7, 7, 7, //
    7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6, //
    15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5, 6, 7, 6, 5, 5, 6, 7, 7, //
    7, 7, 7, 15, 11, 14, 13, 28, 20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23, //
    24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24, 22, 21, 20, 22, 22, 23, 23, 21, //
    23, 22, 22, 24, 21, 22, 23, 23, 21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23, //
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25, 19, 21, 26, 27, 27, 26, 27, 24, //
    21, 21, 26, 26, 28, 27, 27, 27, 20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23, //
    26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26, 30,
];

const EOS: u16 = 256;
const LONGEST: usize = 30;
/// Codes of up to so many bits are looked up, and two at a time where they fit; they are those of all common bytes.
const WINDOW: usize = 12;
/// So many of them are looked up before more bits are needed: a window of 64 bits is filled to 56 or more.
const CODES_A_FILL: usize = 4;

/// Codes by symbol, in the lowest bits.
const CODES: [u32; 257] = {
    let mut codes = [0; 257];
    let (mut code, mut length) = (0, 1);
    while length <= LONGEST {
        code <<= 1;
        let mut symbol = 0;
        while symbol < LENGTHS.len() {
            if LENGTHS[symbol] as usize == length {
                codes[symbol] = code;
                code += 1;
            }
            symbol += 1;
        }
        length += 1;
    }
    assert!(code == 1 << LONGEST, "a code without gaps");
    codes
};

/// The codes of one length, as [`long_symbol`] needs them.
#[derive(Clone, Copy)]
struct Codes {
    /// The first that is greater than all of them, in the highest of 32 bits.
    end: u32,
    /// The first of them.
    first: u32,
    /// Where the first one's symbol is in [`BY_CODE`].
    at: u16,
}

/// By length.
static BY_LENGTH: [Codes; LONGEST + 1] = {
    let mut by_length = [Codes { end: 0, first: 0, at: 0 }; LONGEST + 1];
    let (mut code, mut length, mut at) = (0u32, 1, 0);
    while length <= LONGEST {
        code <<= 1;
        by_length[length].first = code;
        by_length[length].at = at;
        let mut symbol = 0;
        while symbol < LENGTHS.len() {
            if LENGTHS[symbol] as usize == length {
                code += 1;
                at += 1;
            }
            symbol += 1;
        }
        // The last one's end is 2^32; EOS has no use, and is left out by being beyond the end.
        by_length[length].end = if length == LONGEST { u32::MAX << 2 } else { code << (32 - length) };
        length += 1;
    }
    by_length
};

/// The symbols in the order of their codes, without EOS, which has the last.
static BY_CODE: [u8; 256] = {
    let mut symbols = [0; 256];
    let (mut length, mut at) = (1, 0);
    while length <= LONGEST {
        let mut symbol = 0;
        while symbol < EOS as usize {
            if LENGTHS[symbol] as usize == length {
                symbols[at] = symbol as u8;
                at += 1;
            }
            symbol += 1;
        }
        length += 1;
    }
    symbols
};

/// What the next [`WINDOW`] bits begin with: one code, or two. All zero if a longer one begins there.
#[derive(Clone, Copy)]
struct Entry {
    symbols: [u8; 2],
    /// Length of the first code in bits.
    first: u8,
    /// Length of both codes in bits; of the first, if there is no room for a second.
    both: u8,
}

impl Entry {
    /// Puts what it stands for where `text` has `at`, and returns how many bytes that are.
    #[inline(always)]
    fn put(self, text: &mut [u8], at: usize) -> usize {
        // Two that are written, one of which may not count, cost less than a branch that nobody can foresee.
        text[at..at + 2].copy_from_slice(&self.symbols);
        1 + usize::from(self.first != self.both)
    }
}

static ENTRIES: [Entry; 1 << WINDOW] = {
    let mut entries = [Entry { symbols: [0; 2], first: 0, both: 0 }; 1 << WINDOW];
    let mut symbol = 0;
    while symbol < EOS as usize {
        let length = LENGTHS[symbol] as usize;
        if length <= WINDOW {
            let start = (CODES[symbol] as usize) << (WINDOW - length);
            let mut at = start;
            while at < start + (1 << (WINDOW - length)) {
                entries[at] = Entry { symbols: [symbol as u8, 0], first: length as u8, both: length as u8 };
                at += 1;
            }
        }
        symbol += 1;
    }
    let mut at = 0;
    while at < entries.len() {
        let first = entries[at].first as usize;
        let second = entries[(at << first) & ((1 << WINDOW) - 1)];
        if first > 0 && second.first > 0 && first + second.first as usize <= WINDOW {
            entries[at].symbols[1] = second.symbols[0];
            entries[at].both = (first + second.first as usize) as u8;
        }
        at += 1;
    }
    entries
};

/// Why there is no text of these bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum HuffmanError {
    /// RFC 7541 §5.2: they hold EOS, or end with more than seven bits, or others than ones, that are no code.
    #[error("no Huffman code")]
    Invalid,
    /// The text is longer than is allowed.
    #[error("the text is too long")]
    TooLong,
}

/// Bits that are read, the next of them highest.
struct Bits<'c> {
    window: u64,
    /// How many of the window's bits are there; what is below them are bits that follow, or zeros.
    count: u32,
    rest: &'c [u8],
}

impl Bits<'_> {
    /// Fills the window up: to 56 bits or more, unless there are no more.
    #[inline(always)]
    fn fill(&mut self) {
        if let Some(next) = self.rest.first_chunk() {
            self.window |= u64::from_be_bytes(*next) >> self.count;
            let bytes = (63 - self.count) / 8;
            self.rest = &self.rest[bytes as usize..];
            self.count += bytes * 8;
        } else {
            while let (true, Some((byte, rest))) = (self.count < 56, self.rest.split_first()) {
                self.window |= u64::from(*byte) << (56 - self.count);
                self.count += 8;
                self.rest = rest;
            }
        }
    }

    /// The index of the next entry.
    #[inline(always)]
    fn next(&self) -> usize {
        (self.window >> (u64::BITS as usize - WINDOW)) as usize
    }

    #[inline(always)]
    fn take(&mut self, count: u8) {
        self.window <<= count;
        self.count -= u32::from(count);
    }
}

/// The symbol of the code that the highest bits of `window` are, and the length of the code; `None`: EOS.
fn long_symbol(window: u64) -> Option<(u8, u8)> {
    let bits = (window >> 32) as u32;
    let length = (WINDOW + 1..=LONGEST).find(|length| bits < BY_LENGTH[*length].end)?;
    let codes = BY_LENGTH[length];
    let nth = (bits >> (32 - length)) - codes.first;
    Some((BY_CODE[usize::from(codes.at) + nth as usize], length as u8))
}

/// Appends the text that `coded` stands for, if it has no more than `most` bytes; nothing after an error.
///
/// # Errors
/// See [`HuffmanError`].
pub fn decode(coded: &[u8], most: usize, out: &mut Vec<u8>) -> Result<(), HuffmanError> {
    let start = out.len();
    // The shortest code has 5 bits. What one look at the window gives has room beyond what is allowed.
    let room = most.min(coded.len().saturating_mul(8) / 5).saturating_add(2 * CODES_A_FILL);
    out.resize(start + room, 0);
    let result = decode_into(coded, most, out.get_mut(start..).unwrap_or(&mut []));
    out.truncate(start + result.unwrap_or(0));
    result.map(|_| ())
}

/// Returns the length of the text; see [`decode`].
fn decode_into(coded: &[u8], most: usize, text: &mut [u8]) -> Result<usize, HuffmanError> {
    let mut bits = Bits { window: 0, count: 0, rest: coded };
    let mut length = 0;
    loop {
        bits.fill();
        if (bits.count as usize) < CODES_A_FILL * WINDOW {
            break;
        }
        if ENTRIES[bits.next()].first == 0 {
            let (symbol, taken) = long_symbol(bits.window).ok_or(HuffmanError::Invalid)?;
            text[length] = symbol;
            length += 1;
            bits.take(taken);
        } else {
            for _ in 0..CODES_A_FILL {
                let entry = ENTRIES[bits.next()];
                if entry.first == 0 {
                    break;
                }
                length += entry.put(text, length);
                bits.take(entry.both);
            }
        }
        if length > most {
            return Err(HuffmanError::TooLong);
        }
    }
    while bits.count > 0 {
        // What is not there is ones: no code of less than eight bits consists of them, and EOS begins with them.
        let window = bits.window | u64::MAX >> bits.count;
        if window == u64::MAX {
            return if bits.count < 8 { Ok(length) } else { Err(HuffmanError::Invalid) };
        }
        let entry = ENTRIES[(window >> (u64::BITS as usize - WINDOW)) as usize];
        if entry.first > 0 && u32::from(entry.both) <= bits.count {
            length += entry.put(text, length);
            bits.take(entry.both);
        } else {
            let (symbol, taken) = match entry.first {
                0 => long_symbol(window).ok_or(HuffmanError::Invalid)?,
                taken => (entry.symbols[0], taken),
            };
            if u32::from(taken) > bits.count {
                return Err(HuffmanError::Invalid);
            }
            text[length] = symbol;
            length += 1;
            bits.take(taken);
        }
        if length > most {
            return Err(HuffmanError::TooLong);
        }
    }
    Ok(length)
}

/// The number of bytes that [`encode`] makes of `text`.
pub fn encoded_len(text: impl Iterator<Item = u8>) -> usize {
    text.map(|byte| usize::from(LENGTHS[usize::from(byte)])).sum::<usize>().div_ceil(8)
}

/// Appends the code of `text`.
pub fn encode(text: impl Iterator<Item = u8>, out: &mut Vec<u8>) {
    // Below the `count` lowest bits nothing is left to be written; what is above them has been.
    let (mut bits, mut count) = (0u64, 0u32);
    for byte in text {
        let length = LENGTHS[usize::from(byte)];
        bits = bits << length | u64::from(CODES[usize::from(byte)]);
        count += u32::from(length);
        if count >= 32 {
            count -= 32;
            out.extend_from_slice(&((bits >> count) as u32).to_be_bytes());
        }
    }
    // §5.2: the rest of the last byte are the first bits of EOS, which are ones.
    let padding = (8 - count % 8) % 8;
    bits = bits << padding | ((1 << padding) - 1);
    count += padding;
    while count > 0 {
        count -= 8;
        out.push((bits >> count) as u8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(coded: &[u8]) -> Result<Vec<u8>, HuffmanError> {
        let mut out = b"before".to_vec();
        decode(coded, usize::MAX, &mut out).map(|()| out.split_off(6))
    }

    fn encoded(text: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        encode(text.iter().copied(), &mut out);
        assert_eq!(out.len(), encoded_len(text.iter().copied()));
        out
    }

    fn bytes(hexadecimal: &str) -> Vec<u8> {
        let digits: Vec<_> = hexadecimal.bytes().filter(|byte| *byte != b' ').collect();
        let pair = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
        digits.chunks(2).map(pair).collect()
    }

    #[test]
    fn examples_of_rfc_7541_appendix_c_go_both_ways() {
        for (text, coded) in [
            ("www.example.com", "f1e3 c2e5 f23a 6ba0 ab90 f4ff"),
            ("no-cache", "a8eb 1064 9cbf"),
            ("custom-key", "25a8 49e9 5ba9 7d7f"),
            ("custom-value", "25a8 49e9 5bb8 e8b4 bf"),
            ("302", "6402"),
            ("private", "aec3 771a 4b"),
            ("Mon, 21 Oct 2013 20:13:21 GMT", "d07a be94 1054 d444 a820 0595 040b 8166 e082 a62d 1bff"),
            ("https://www.example.com", "9d29 ad17 1863 c78f 0b97 c8e9 ae82 ae43 d3"),
            ("307", "640e ff"),
            ("Mon, 21 Oct 2013 20:13:22 GMT", "d07a be94 1054 d444 a820 0595 040b 8166 e084 a62d 1bff"),
            ("gzip", "9bd9 ab"),
            (
                "foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1",
                "94e7 821d d7f2 e6c7 b335 dfdf cd5b 3960 d5af 2708 7f36 72c1 ab27 0fb5 291f 9587 3160 65c0 03ed \
                 4ee5 b106 3d50 07",
            ),
        ] {
            assert_eq!(encoded(text.as_bytes()), bytes(coded), "{text}");
            assert_eq!(decoded(&bytes(coded)), Ok(text.as_bytes().to_vec()), "{text}");
        }
    }

    #[test]
    fn every_pair_of_bytes_goes_both_ways() {
        for one in 0..=255 {
            for other in 0..=255 {
                let text = [one, other, one, b'a', other];
                assert_eq!(decoded(&encoded(&text)), Ok(text.to_vec()));
            }
        }
        assert_eq!((encoded(b""), decoded(b"")), (vec![], Ok(vec![])));
    }

    #[test]
    fn padding_is_less_than_a_byte_of_ones() {
        // "0" has five zeros.
        assert_eq!(decoded(&[0b0000_0111]), Ok(b"0".to_vec()));
        for coded in [&[0b0000_0000][..], &[0b0000_0110], &[0b0000_0011], &[0b0000_0111, 0xff], &[0xff]] {
            assert_eq!(decoded(coded), Err(HuffmanError::Invalid), "{coded:?}");
            assert_eq!(decoded(&[&[0; 5], coded].concat()), Err(HuffmanError::Invalid), "{coded:?}");
        }
        // A code that is cut off: that of a NUL has 13 bits.
        assert_eq!(decoded(&[0xff, 0b1100_0111]), Ok(vec![0]));
        assert_eq!(decoded(&[0xff]), Err(HuffmanError::Invalid));
        assert_eq!(decoded(&[0x07, 0xff, 0xff, 0xff]), Err(HuffmanError::Invalid));
    }

    #[test]
    fn eos_is_no_text() {
        for coded in [&[0xff; 4][..], &[0xff; 5], &[0xff; 40], &[0xff, 0xff, 0xff, 0xfc, 0, 0, 0, 0, 0x07]] {
            assert_eq!(decoded(coded), Err(HuffmanError::Invalid), "{coded:?}");
        }
        // What comes right before it is.
        assert_eq!(decoded(&[0xff, 0xff, 0xff, 0xfb]), Ok(vec![22]));
        assert_eq!(decoded(&[0xff, 0xff, 0xff, 0xf3]), Ok(vec![10]));
    }

    #[test]
    fn text_beyond_the_bound_is_not_made() {
        let coded = encoded(&[b'a'; 1000]);
        for most in [0, 1, 10, 998, 999] {
            let mut out = Vec::new();
            assert_eq!(decode(&coded, most, &mut out), Err(HuffmanError::TooLong));
            assert_eq!(out, b"");
        }
        assert_eq!(decode(&coded, 1000, &mut Vec::new()), Ok(()));
    }
}
