//! The list syntax that `Cache-Control` and its relatives share (RFC 9111 §5.2).

use crate::chars::is_token;

/// RFC 9111 §1.2.2: a number of seconds beyond this counts as this.
pub(crate) const MAX_SECONDS: u32 = 1 << 31;

/// One directive: its name and what follows the `=`, quotes included.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Directive<'a> {
    pub name: &'a [u8],
    pub argument: Option<&'a [u8]>,
}

impl<'a> Directive<'a> {
    fn of(member: &'a [u8]) -> Self {
        match member.iter().position(|&byte| byte == b'=') {
            Some(equals) => {
                // Whitespace around `=` is an error (RFC 9110 §5.6.6); it must spoil the argument, not hide the name.
                let name = &member[..equals];
                let trimmed = name.trim_ascii_end();
                let spoiled = trimmed.len() != name.len();
                Self { name: trimmed, argument: Some(if spoiled { b" " } else { &member[equals + 1..] }) }
            }
            None => Self { name: member, argument: None },
        }
    }

    pub(crate) fn is(&self, name: &[u8]) -> bool {
        self.name.eq_ignore_ascii_case(name)
    }

    /// The argument as delta-seconds, as a token or a quoted string (RFC 9111 §5.2 asks to accept both).
    pub(crate) fn seconds(&self) -> Option<u32> {
        let argument = self.argument?;
        let digits = match argument {
            [b'"', inner @ .., b'"'] => inner,
            other => other,
        };
        delta_seconds(digits)
    }
}

/// Digits as seconds, at most [`MAX_SECONDS`].
pub(crate) fn delta_seconds(digits: &[u8]) -> Option<u32> {
    if digits.is_empty() {
        return None;
    }
    let mut seconds = 0_u64;
    for &byte in digits {
        if !byte.is_ascii_digit() {
            return None;
        }
        seconds = (seconds * 10 + u64::from(byte - b'0')).min(u64::from(MAX_SECONDS));
    }
    Some(seconds as u32)
}

/// The non-empty members of a comma-separated list, without the whitespace around them. A comma within a quoted string
/// separates nothing; a string that does not end takes in the rest.
pub(crate) fn members(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    parts(value).filter(|member| !member.is_empty())
}

/// What the commas of a list separate, empty or not, without the whitespace around it; see [`members`].
pub(crate) fn parts(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    split_outside_quotes(value, b',').map(<[u8]>::trim_ascii)
}

/// Whether a member is no directive (RFC 9111 §5.2), so that what its writer meant cannot be told: a string that does
/// not end takes in what follows, and where a semicolon or a space separates, one directive hides another.
pub(crate) fn is_malformed(member: &[u8]) -> bool {
    let end = member.iter().position(|&byte| byte == b'=').unwrap_or(member.len());
    let is_name = |name: &[u8]| !name.is_empty() && name.iter().all(|&byte| is_token(byte));
    if !is_name(&member[..end]) {
        return true;
    }
    match &member[(end + 1).min(member.len())..] {
        [b'"', rest @ ..] => !ends_string(rest),
        argument => !argument.iter().all(|&byte| is_token(byte)),
    }
}

/// Whether `rest`, which follows a quotation mark, is the remainder of one quoted string (RFC 9110 §5.6.4).
fn ends_string(rest: &[u8]) -> bool {
    let mut escaped = false;
    for (i, &byte) in rest.iter().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return i + 1 == rest.len(),
            _ => {}
        }
    }
    false
}

/// The directives of one field line.
pub(crate) fn directives(value: &[u8]) -> impl Iterator<Item = Directive<'_>> {
    members(value).map(Directive::of)
}

/// The directives of one `Surrogate-Control` line with their parameters, which name whom they are for.
pub(crate) fn directives_with_targets(value: &[u8]) -> impl Iterator<Item = (Directive<'_>, Option<&[u8]>)> {
    members(value).map(|member| {
        let mut parts = split_outside_quotes(member, b';').map(<[u8]>::trim_ascii);
        let directive = Directive::of(parts.next().unwrap_or(b""));
        (directive, parts.next())
    })
}

fn split_outside_quotes(value: &[u8], separator: u8) -> impl Iterator<Item = &[u8]> {
    let mut rest = Some(value);
    std::iter::from_fn(move || {
        let value = rest?;
        let mut quoted = false;
        let mut escaped = false;
        for (i, &byte) in value.iter().enumerate() {
            if escaped {
                escaped = false;
            } else if quoted && byte == b'\\' {
                escaped = true;
            } else if byte == b'"' {
                quoted = !quoted;
            } else if byte == separator && !quoted {
                rest = Some(&value[i + 1..]);
                return Some(&value[..i]);
            }
        }
        rest = None;
        Some(value)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_in_quotes_separate_nothing() {
        let found: Vec<_> = members(br#" a , b="x, \", y" ,, c="open, d"#).collect();
        assert_eq!(found, [&b"a"[..], br#"b="x, \", y""#, br#"c="open, d"#]);
    }

    #[test]
    fn seconds_are_digits_alone() {
        let seconds = |text: &str| directives(text.as_bytes()).next().unwrap().seconds();
        assert_eq!(seconds("a=0"), Some(0));
        assert_eq!(seconds("a=003600"), Some(3600));
        assert_eq!(seconds("a=\"60\""), Some(60));
        assert_eq!(seconds("a=99999999999999999999999999"), Some(MAX_SECONDS));
        for wrong in ["a", "a=", "a=-1", "a=1.0", "a= 1", "a =1", "a='1'", "a=1x", "a=\"1", "a=\"\"", "a=+1"]
        {
            assert_eq!(seconds(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn what_is_no_directive_is_told_from_what_is_one() {
        for fine in ["a", "max-age=60", "x=\"y, z; \\\" a\"", "private=\"\"", "a="] {
            assert!(!is_malformed(fine.as_bytes()), "{fine}");
        }
        for wrong in ["a; b", "a b", "a=1; b", "a=\"b", "a=\"b\\\"", "a=\"b\"; c", "a = 1", "=1", "\"a\"", ""]
        {
            assert!(is_malformed(wrong.as_bytes()), "{wrong}");
        }
    }

    #[test]
    fn targets_follow_a_semicolon() {
        let found: Vec<_> = directives_with_targets(b"max-age=60;edge, no-store").collect();
        assert_eq!(found[0].0.seconds(), Some(60));
        assert_eq!(found[0].1, Some(&b"edge"[..]));
        assert!(found[1].0.is(b"No-Store") && found[1].1.is_none());
    }
}
