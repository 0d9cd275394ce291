//! Integers of variable length (RFC 9000 §16).

/// The greatest integer that can be written.
pub const MAX: u64 = (1 << 62) - 1;

/// The greatest number of bytes of one.
pub const MOST_BYTES: usize = 8;

/// The integer that `bytes` begin with and how many of them it takes; `None` if some of those are still to come.
#[inline]
pub fn read(bytes: &[u8]) -> Option<(u64, usize)> {
    let first = *bytes.first()?;
    let length = 1 << (first >> 6);
    let rest = bytes.get(1..length)?;
    let value = rest.iter().fold(u64::from(first & 0x3f), |value, byte| value << 8 | u64::from(*byte));
    Some((value, length))
}

/// Appends `value` in as few bytes as it takes; one above [`MAX`] cannot be written, and [`MAX`] is in its place.
#[inline]
pub fn write(value: u64, out: &mut Vec<u8>) {
    match value {
        0..0x40 => out.push(value as u8),
        0x40..0x4000 => out.extend_from_slice(&(0x4000 | value as u16).to_be_bytes()),
        0x4000..0x4000_0000 => out.extend_from_slice(&(0x8000_0000 | value as u32).to_be_bytes()),
        _ => out.extend_from_slice(&(0xc000_0000_0000_0000 | value.min(MAX)).to_be_bytes()),
    }
}

/// The number of bytes that [`write()`] appends.
pub const fn written_len(value: u64) -> usize {
    match value {
        0..0x40 => 1,
        0x40..0x4000 => 2,
        0x4000..0x4000_0000 => 4,
        _ => 8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_of_rfc_9000_appendix_a_1_are_read() {
        let examples: [(&[u8], u64); 5] = [
            (&[0xc2, 0x19, 0x7c, 0x5e, 0xff, 0x14, 0xe8, 0x8c], 151_288_809_941_952_652),
            (&[0x9d, 0x7f, 0x3e, 0x7d], 494_878_333),
            (&[0x7b, 0xbd], 15_293),
            (&[0x25], 37),
            (&[0x40, 0x25], 37),
        ];
        for (bytes, value) in examples {
            assert_eq!(read(bytes), Some((value, bytes.len())));
            assert_eq!(read(&[bytes, b"more"].concat()), Some((value, bytes.len())));
            for cut in 0..bytes.len() {
                assert_eq!(read(&bytes[..cut]), None);
            }
        }
    }

    #[test]
    fn an_integer_takes_as_few_bytes_as_can_be() {
        for (value, length) in [
            (0, 1),
            (63, 1),
            (64, 2),
            (16_383, 2),
            (16_384, 4),
            ((1 << 30) - 1, 4),
            (1 << 30, 8),
            (MAX, 8),
            (u64::MAX, 8),
        ] {
            let mut out = Vec::new();
            write(value, &mut out);
            assert_eq!((out.len(), written_len(value)), (length, length), "{value}");
            assert_eq!(read(&out), Some((value.min(MAX), length)));
        }
    }
}
