//! Classes of bytes.

const TOKEN: u8 = 1;
const TARGET: u8 = 2;
const VALUE: u8 = 4;

const CLASSES: [u8; 256] = {
    let mut classes = [0; 256];
    let mut i = 0;
    while i < 256 {
        let byte = i as u8;
        if byte.is_ascii_alphanumeric()
            || matches!(byte, b'!' | b'#'..=b'\'' | b'*' | b'+' | b'-' | b'.' | b'^'..=b'`' | b'|' | b'~')
        {
            classes[i] |= TOKEN;
        }
        if byte > b' ' && byte != 0x7f {
            classes[i] |= TARGET;
        }
        if (byte >= b' ' && byte != 0x7f) || byte == b'\t' {
            classes[i] |= VALUE;
        }
        i += 1;
    }
    classes
};

/// RFC 9110 §5.6.2.
#[inline(always)]
pub(crate) const fn is_token(byte: u8) -> bool {
    CLASSES[byte as usize] & TOKEN != 0
}

/// Any byte but controls and space. The normalizer encodes those that RFC 3986 does not allow in a target.
#[inline(always)]
pub(crate) const fn is_target(byte: u8) -> bool {
    CLASSES[byte as usize] & TARGET != 0
}

/// RFC 9110 §5.5: visible bytes, obs-text, space and HTAB.
#[inline(always)]
pub(crate) const fn is_value(byte: u8) -> bool {
    CLASSES[byte as usize] & VALUE != 0
}

/// Whether a field's value neither begins nor ends with a space (RFC 9113 §8.2.1, RFC 9114 §10.3).
pub fn is_trimmed(value: &[u8]) -> bool {
    let is_space = |byte: Option<&u8>| matches!(byte, Some(b' ' | b'\t'));
    !is_space(value.first()) && !is_space(value.last())
}
