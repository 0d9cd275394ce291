//! What a content coding changes about a response's head.

use tidegate_http::cache::conditional::entity_tags;
use tidegate_http::cache::vary;
use tidegate_http::forward::write_response_fields;
use tidegate_http::{BodyFraming, FieldId, Fields, Method, ResponseHead};

use crate::cache::fill::write_status_line;
use crate::settings::Coding;
use crate::upstream::{Head, Response};

const VARY_LINE: &[u8] = b"Vary: Accept-Encoding\r\n";

/// RFC 9111 §5.2.1.6, §5.2.2.6.
pub(super) fn forbids_change(fields: &Fields<'_>) -> bool {
    fields.lists(FieldId::CacheControl, b"no-transform")
}

/// Whether a field of this name may follow the content (RFC 9110 §6.6.2).
pub(super) fn announces(fields: &Fields<'_>, name: &[u8]) -> bool {
    fields.lists(FieldId::Trailer, name)
}

/// Whether the origin itself says that codings select the response, or that nothing tells what does.
pub(super) fn varies_by_coding(fields: &Fields<'_>) -> bool {
    vary::is_any(fields) || fields.lists(FieldId::Vary, b"accept-encoding")
}

/// The head of a response that is compressed if `coding` is given, and could be for other clients.
pub(super) fn rewritten(response: &ResponseHead<'_>, coding: Option<Coding>, method: Method) -> Option<Head> {
    let mut out = Vec::with_capacity(512);
    write_status_line(response, &mut out);
    let is_rewritten = |id| match coding {
        Some(_) => matches!(
            id,
            FieldId::ContentLength
                | FieldId::TransferEncoding
                | FieldId::ContentEncoding
                | FieldId::AcceptRanges
                | FieldId::Etag
        ),
        None => id == FieldId::TransferEncoding,
    };
    write_response_fields(response, |id, _| is_rewritten(id), &mut out);
    let mut is_chunked = response.framing == BodyFraming::Chunked;
    if let Some(coding) = coding {
        for part in ["Content-Encoding: ", coding.name(), "\r\n"] {
            out.extend_from_slice(part.as_bytes());
        }
        if let Some(etag) = response.fields.get(FieldId::Etag) {
            write_weak_etag(etag, &mut out);
        }
        is_chunked = method != Method::Head;
    }
    if is_chunked {
        out.extend_from_slice(b"Transfer-Encoding: chunked\r\n");
    }
    if !varies_by_coding(&response.fields) {
        out.extend_from_slice(VARY_LINE);
    }
    Head::read(out, method)
}

/// RFC 9110 §8.8.1: what is compressed anew need not be the same byte for byte.
fn write_weak_etag(etag: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(b"ETag: ");
    if !etag.starts_with(b"W/") {
        out.extend_from_slice(b"W/");
    }
    out.extend_from_slice(etag);
    out.extend_from_slice(b"\r\n");
}

/// A 304 about a stored response whose head was rewritten here: what the origin says of its own is said of that.
pub(crate) fn restate_not_modified(response: &mut Response, stored_etag: Option<&[u8]>) {
    let is_weakened = |etag: &[u8]| stored_etag.and_then(|stored| stored.strip_prefix(b"W/")) == Some(etag);
    restate(response, is_weakened, true);
}

/// A 304 to a client that has asked for what it got under a weakened entity tag.
pub(crate) fn restate_for_client(response: &mut Response, asked: &Fields<'_>) {
    let asks =
        |tag: &[u8]| asked.get_all(FieldId::IfNoneMatch).flat_map(entity_tags).any(|asked| asked == tag);
    let is_weakened = |etag: &[u8]| asks(&[b"W/", etag].concat()) && !asks(etag);
    restate(response, is_weakened, false);
}

fn restate(response: &mut Response, is_weakened: impl Fn(&[u8]) -> bool, selects: bool) {
    let head = response.head();
    let weakened = head.fields.get(FieldId::Etag).filter(|etag| is_weakened(etag));
    // Without the field the stored one stands as it is.
    let varies = selects && head.fields.has(FieldId::Vary) && !varies_by_coding(&head.fields);
    if weakened.is_none() && !varies {
        return;
    }
    let mut out = Vec::with_capacity(256);
    write_status_line(&head, &mut out);
    write_response_fields(&head, |id, _| id == FieldId::Etag && weakened.is_some(), &mut out);
    if let Some(etag) = weakened {
        write_weak_etag(etag, &mut out);
    }
    if varies {
        out.extend_from_slice(VARY_LINE);
    }
    if let Some(head) = Head::read(out, Method::Get) {
        response.set_head(head);
    }
}
