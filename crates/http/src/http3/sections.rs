//! Field sections of responses and of trailers, and what all sections have in common (RFC 9114 §4.2).

use super::HeadError;
use super::heads::max_field_section_size;
use super::qpack;
use crate::chars::{is_token, is_trimmed};
use crate::field::FieldId;
use crate::forward;
use crate::forward::is_hop_by_hop;
use crate::parser::HeadLimits;
use crate::simd::{self, Scan, Task};

/// Appends the field section of a response. Names may be in any case; fields about a connection are left out.
pub fn write_response<'f>(
    status: u16,
    fields: impl IntoIterator<Item = (FieldId, &'f [u8], &'f [u8])>,
    out: &mut Vec<u8>,
) {
    qpack::write_prefix(out);
    // Of which all have three digits (RFC 9110 §15).
    let digits = [status / 100 % 10, status / 10 % 10, status % 10].map(|digit| b'0' + digit as u8);
    qpack::write_field(b":status", &digits, out);
    write_fields(fields, out);
}

/// Appends a section of trailers, likewise.
pub fn write_trailers<'f>(
    fields: impl IntoIterator<Item = (FieldId, &'f [u8], &'f [u8])>,
    out: &mut Vec<u8>,
) {
    qpack::write_prefix(out);
    write_fields(fields, out);
}

fn write_fields<'f>(fields: impl IntoIterator<Item = (FieldId, &'f [u8], &'f [u8])>, out: &mut Vec<u8>) {
    for (id, name, value) in fields {
        // §4.2: what is about a connection of HTTP/1.1 is nothing here.
        if !is_hop_by_hop(id) {
            qpack::write_field(name, value, out);
        }
    }
}

/// Appends a request's trailers as lines of HTTP/1.1 (RFC 9112 §7.1.2), without an empty one. Which of them may be
/// believed is for whoever reads the lines.
///
/// # Errors
/// The section or a field is not sound, or they are beyond the limits. Some lines may have been appended.
pub fn read_trailers(section: &[u8], limits: &HeadLimits, out: &mut Vec<u8>) -> Result<(), HeadError> {
    let (before, mut lines) = (out.len(), 0);
    qpack::decode(section, max_field_section_size(limits), |name, value| {
        // §4.3: a pseudo-header field's name is no token.
        let id = checked_field(name, value)?;
        if lines >= limits.fields {
            return Err(HeadError::TooLarge);
        }
        lines += 1;
        if !is_hop_by_hop(id) {
            forward::write_field(name, value, out);
        }
        Ok(())
    })?;
    if out.len() - before > limits.head_bytes as usize { Err(HeadError::TooLarge) } else { Ok(()) }
}

/// By byte: whether it can be in a name, which is a token (RFC 9110 §5.1) in lower case (§4.2).
static IN_NAMES: [bool; 256] = {
    let mut in_names = [false; 256];
    let mut byte = 0;
    while byte < in_names.len() {
        in_names[byte] = is_token(byte as u8) && !(byte as u8).is_ascii_uppercase();
        byte += 1;
    }
    in_names
};

/// Which field this is, if it is one of HTTP/3.
pub(super) fn checked_field(name: &[u8], value: &[u8]) -> Result<FieldId, HeadError> {
    if name.is_empty() || !name.iter().all(|byte| IN_NAMES[usize::from(*byte)]) || !is_sound(value) {
        return Err(HeadError::Malformed);
    }
    let id = FieldId::from_name(name);
    match id {
        // §4.2.
        FieldId::Connection
        | FieldId::KeepAlive
        | FieldId::ProxyConnection
        | FieldId::TransferEncoding
        | FieldId::Upgrade => Err(HeadError::Malformed),
        FieldId::Te if !value.eq_ignore_ascii_case(b"trailers") => Err(HeadError::Malformed),
        _ => Ok(id),
    }
}

/// §10.3 and RFC 9110 §5.5: no controls, and no space at either end.
fn is_sound(value: &[u8]) -> bool {
    is_trimmed(value) && simd::run(ValueEnd(value)) == value.len()
}

/// Where a value ends.
struct ValueEnd<'v>(&'v [u8]);

impl Task for ValueEnd<'_> {
    type Output = usize;

    #[inline(always)]
    fn run<S: Scan>(self, scan: S) -> usize {
        scan.value_end(self.0, 0)
    }
}
