//! What the fields of a complete head say about its body and its connection (RFC 9112 §6 and §9).

use crate::error::HeadError;
use crate::field::{FieldId, Fields};
use crate::forward::MOST_OPTIONS;
use crate::head::{BodyFraming, Method, Version};

/// What the `Connection` fields say.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ConnectionSays {
    pub close: bool,
    pub keep_alive: bool,
    pub upgrade: bool,
}

impl ConnectionSays {
    /// # Errors
    /// There are more options than sound peers name, which would make fields expensive to sort out.
    #[inline]
    pub(super) fn of(fields: &Fields<'_>) -> Result<Self, HeadError> {
        let mut says = Self::default();
        if !fields.has(FieldId::Connection) {
            return Ok(says);
        }
        let mut count = 0;
        for value in fields.get_all(FieldId::Connection) {
            // What nearly all clients say, and how they spell it.
            if value == b"keep-alive" {
                says.keep_alive = true;
                count += 1;
                continue;
            }
            for option in value.split(|&byte| byte == b',').map(<[u8]>::trim_ascii) {
                count += usize::from(!option.is_empty());
                says.close |= option.eq_ignore_ascii_case(b"close");
                says.keep_alive |= option.eq_ignore_ascii_case(b"keep-alive");
                says.upgrade |= option.eq_ignore_ascii_case(b"upgrade");
            }
        }
        if count > MOST_OPTIONS {
            return Err(HeadError::TooManyConnectionOptions);
        }
        Ok(says)
    }

    /// RFC 9112 §9.3.
    pub(super) fn persists(self, version: Version) -> bool {
        !self.close && (version == Version::Http11 || self.keep_alive)
    }
}

/// The framing that the fields state, if any. `repeated` has bit `id as u8` for every field seen twice.
#[inline]
pub(super) fn stated(
    version: Version,
    fields: &Fields<'_>,
    repeated: u128,
) -> Result<Option<BodyFraming>, HeadError> {
    let has_length = fields.has(FieldId::ContentLength);
    if let Some(codings) = fields.get(FieldId::TransferEncoding) {
        if has_length {
            return Err(HeadError::AmbiguousFraming);
        }
        if version == Version::Http10 {
            return Err(HeadError::TransferEncodingOnHttp10);
        }
        if repeated & (1 << FieldId::TransferEncoding as u8) != 0 {
            return Err(HeadError::BadTransferEncoding);
        }
        return transfer_encoding(codings).map(Some);
    }
    if !has_length {
        return Ok(None);
    }
    if repeated & (1 << FieldId::ContentLength as u8) != 0 {
        return Err(HeadError::RepeatedContentLength);
    }
    content_length(fields.get(FieldId::ContentLength).unwrap_or(b""))
        .map(|length| Some(BodyFraming::Length(length)))
}

fn transfer_encoding(codings: &[u8]) -> Result<BodyFraming, HeadError> {
    if codings.eq_ignore_ascii_case(b"chunked") {
        return Ok(BodyFraming::Chunked);
    }
    let mut verdict = HeadError::UnknownTransferCoding;
    for coding in codings.split(|&byte| byte == b',').map(<[u8]>::trim_ascii) {
        let name = coding.split(|&byte| byte == b';').next().unwrap_or(b"").trim_ascii();
        // Chunked beside anything else: not final, applied twice, or after a coding we cannot undo. The last is the
        // one case where the body's end is certain, and only that one is a 501.
        if name.is_empty() || !name.iter().all(|&byte| crate::chars::is_token(byte)) {
            verdict = HeadError::BadTransferEncoding;
        }
    }
    let mut chunked = codings
        .split(|&byte| byte == b',')
        .map(|coding| {
            coding.trim_ascii().get(..7).is_some_and(|start| start.eq_ignore_ascii_case(b"chunked"))
        })
        .rev();
    let final_is_chunked = chunked.next().unwrap_or(false);
    if chunked.any(|is_chunked| is_chunked) || (final_is_chunked && !codings.contains(&b',')) {
        verdict = HeadError::BadTransferEncoding;
    }
    Err(verdict)
}

/// RFC 9110 §8.6: `1*DIGIT`, nothing else; a sign, a list or whitespace inside is refused.
pub(crate) fn content_length(value: &[u8]) -> Result<u64, HeadError> {
    if value.is_empty() {
        return Err(HeadError::BadContentLength);
    }
    value.iter().try_fold(0u64, |length, &byte| {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return Err(HeadError::BadContentLength);
        }
        length
            .checked_mul(10)
            .and_then(|length| length.checked_add(u64::from(digit)))
            .ok_or(HeadError::BadContentLength)
    })
}

/// RFC 9112 §6.3 for responses: `(framing, whether the connection may be used again)`.
pub(super) fn of_response(
    status: u16,
    request_method: Method,
    stated: Option<BodyFraming>,
) -> Result<(BodyFraming, bool), HeadError> {
    let informational = status < 200;
    if (informational || status == 204) && stated == Some(BodyFraming::Chunked) {
        // RFC 9112 §6.1: "MUST NOT send Transfer-Encoding" there; a reader that honours it sees another body than we.
        return Err(HeadError::BadTransferEncoding);
    }
    let tunnel = status == 101 || (request_method == Method::Connect && (200..300).contains(&status));
    if tunnel {
        return Ok((BodyFraming::None, false));
    }
    if informational || status == 204 {
        // A length above zero promises bytes that must not come; whether they do is not for us to guess.
        let sound = matches!(stated, None | Some(BodyFraming::Length(0)));
        return Ok((BodyFraming::None, sound));
    }
    if status == 304 || request_method == Method::Head {
        return Ok((BodyFraming::None, true));
    }
    Ok(match stated {
        Some(framing) => (framing, true),
        None => (BodyFraming::UntilClose, false),
    })
}
