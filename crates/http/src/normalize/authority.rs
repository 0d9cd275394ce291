use std::io::Write;
use std::net::Ipv6Addr;

use super::Part;
use crate::decimal::write_decimal;
use crate::error::HeadError;

/// Host and port (RFC 3986 §3.2.2 and §3.2.3), appended to `scratch` unless they are normal as they stand.
///
/// A registered name may hold letters, digits, `-`, `.`, `_` and `~`: what else RFC 3986 allows (escapes and
/// sub-delimiters) is no name of a host and is refused, as are empty labels.
pub(super) fn normalize<'a>(
    authority: &'a [u8],
    default_port: u16,
    scratch: &mut Vec<u8>,
) -> Result<Part<'a>, HeadError> {
    if is_normal(authority, default_port) {
        return Ok(Part::Borrowed(authority));
    }
    let start = scratch.len();
    let (host, port) = split_port(authority)?;
    let port = port.filter(|&port| port != default_port);
    match host {
        [b'[', address @ .., b']'] => {
            let address = std::str::from_utf8(address).map_err(|_| HeadError::BadHost)?;
            let address: Ipv6Addr = address.parse().map_err(|_| HeadError::BadHost)?;
            // RFC 5952: one text for one address. Writing to a Vec cannot fail.
            let _ = write!(scratch, "[{address}]");
        }
        _ => {
            let name = host.strip_suffix(b".").unwrap_or(host);
            scratch.extend(name.iter().map(u8::to_ascii_lowercase));
            let name = &scratch[start..];
            if name_length(name) != Some(name.len()) {
                return Err(HeadError::BadHost);
            }
        }
    }
    if let Some(port) = port {
        scratch.push(b':');
        write_decimal(port.into(), scratch);
    }
    Ok(Part::Written(scratch.len() - start))
}

/// The common case: a lower-case name without a dot at its end, and no port or one that says something, as it is
/// written.
fn is_normal(authority: &[u8], default_port: u16) -> bool {
    match name_length(authority).map(|length| &authority[length..]) {
        None => false,
        Some([]) => true,
        Some(rest) => {
            let says_something = |port| port != default_port && rest.get(1) != Some(&b'0');
            port(rest).is_ok_and(|port| port.is_some_and(says_something))
        }
    }
}

/// Length of the lower-case name at the start; `None` if one of its labels is empty.
fn name_length(authority: &[u8]) -> Option<usize> {
    let (mut before, mut has_empty_label, mut length) = (DOT, 0, 0);
    for &byte in authority {
        let class = CLASSES[usize::from(byte)];
        if class == 0 {
            break;
        }
        has_empty_label |= class & before & DOT;
        before = class;
        length += 1;
    }
    ((has_empty_label | (before & DOT)) == 0).then_some(length)
}

const IN_LABELS: u8 = 1;
const DOT: u8 = 2;

/// What a byte is in a name in lower case; 0 where it cannot be in one.
const CLASSES: [u8; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < table.len() {
        table[byte] = match byte as u8 {
            b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'~' => IN_LABELS,
            b'.' => DOT,
            _ => 0,
        };
        byte += 1;
    }
    table
};

/// Splits off the port; an empty one counts as absent (RFC 3986 §6.2.3).
fn split_port(authority: &[u8]) -> Result<(&[u8], Option<u16>), HeadError> {
    let host_end = match authority {
        [b'[', ..] => authority.iter().position(|&byte| byte == b']').ok_or(HeadError::BadHost)? + 1,
        _ => authority.iter().position(|&byte| byte == b':').unwrap_or(authority.len()),
    };
    let (host, rest) = authority.split_at(host_end);
    Ok((host, port(rest)?))
}

/// The port in what follows the host.
fn port(rest: &[u8]) -> Result<Option<u16>, HeadError> {
    let digits = match rest {
        [] | [b':'] => return Ok(None),
        [b':', digits @ ..] => digits,
        _ => return Err(HeadError::BadHost),
    };
    let port = digits.iter().try_fold(0u16, |port, byte| {
        let digit = byte.is_ascii_digit().then(|| u16::from(byte - b'0'))?;
        port.checked_mul(10)?.checked_add(digit)
    });
    match port {
        Some(port) if port > 0 => Ok(Some(port)),
        _ => Err(HeadError::BadHost),
    }
}
