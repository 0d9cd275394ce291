//! What a server is told by a request's head, and how it is told that the request is its last.

use crate::wire::Bundle;

/// Fields that say whether the connection persists (RFC 9110 §7.6.1, and those of before).
const PERSISTENCE_FIELDS: [&[u8]; 3] = [b"connection", b"keep-alive", b"proxy-connection"];

/// A server that answers without reading a request's content, and keeps the connection, takes the content for its next
/// request: one that no filter has seen. So a request with content is the last that a server is to read from its end of
/// the connection (RFC 9112 §9.6), as it would be the only one; the client's connection goes on all the same.
/// The head says so in one way, whatever the client said: servers differ in what they take for `close`.
///
/// Returns whether it has content.
pub(super) fn ask_for_the_end(bundle: &mut Bundle) -> bool {
    let has_content = bundle.has_content();
    if has_content && let Some(head) = with_close(bundle.head()) {
        bundle.rewrite_head(&head);
    }
    has_content
}

/// The head with `Connection: close` in the place of all that it says of the connection. `None` for what is no whole
/// head.
fn with_close(head: &[u8]) -> Option<Vec<u8>> {
    const CLOSE: &[u8] = b"Connection: close\r\n";
    let mut told = Vec::with_capacity(head.len() + CLOSE.len());
    let (mut has_request_line, mut is_left_out) = (false, false);
    for line in head.split_inclusive(|&byte| byte == b'\n') {
        let is_empty = matches!(line, b"\r\n" | b"\n");
        if is_empty && has_request_line {
            told.extend_from_slice(CLOSE);
            told.extend_from_slice(line);
            return Some(told);
        }
        // What begins with a space goes on with the line before (RFC 9112 §5.2).
        let goes_on = line.starts_with(b" ") || line.starts_with(b"\t");
        if has_request_line && !goes_on {
            let name = &line[..memchr::memchr(b':', line).unwrap_or(0)];
            let name = name.trim_ascii_end();
            is_left_out = PERSISTENCE_FIELDS.iter().any(|field| name.eq_ignore_ascii_case(field));
        }
        has_request_line |= !is_empty;
        if !is_left_out {
            told.extend_from_slice(line);
        }
    }
    None
}

/// Empty lines may stand before it (RFC 9112 §2.2).
fn request_line(head: &[u8]) -> &[u8] {
    let start = head.iter().position(|byte| !b"\r\n".contains(byte)).unwrap_or(head.len());
    let line = &head[start..];
    &line[..memchr::memchr(b'\n', line).unwrap_or(line.len())]
}

pub(super) fn asks_for_a_tunnel(head: &[u8]) -> bool {
    request_line(head).starts_with(b"CONNECT ")
}

pub(super) fn speaks_http_1_1(head: &[u8]) -> bool {
    request_line(head).trim_ascii_end().ends_with(b"HTTP/1.1")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Id, UNKNOWN_END, flags};

    #[test]
    fn a_head_says_that_the_request_is_the_last_whatever_it_said_before() {
        let close = "Connection: close\r\n";
        for (head, told) in [
            ("POST / HTTP/1.1\r\nHost: a\r\n", "POST / HTTP/1.1\r\nHost: a\r\n"),
            ("POST / HTTP/1.1\r\nConnection: keep-alive\r\nHost: a\r\n", "POST / HTTP/1.1\r\nHost: a\r\n"),
            ("\r\nPOST / HTTP/1.0\r\nCONNECTION : upgrade\r\nA: b\r\n", "\r\nPOST / HTTP/1.0\r\nA: b\r\n"),
            (
                "POST / HTTP/1.1\r\nA: b\r\nConnection: x,\r\n\tkeep-alive\r\nC: d\r\n e\r\n",
                "POST / HTTP/1.1\r\nA: b\r\nC: d\r\n e\r\n",
            ),
            ("POST / HTTP/1.1\nKeep-Alive: 5\nProxy-Connection: keep-alive\n", "POST / HTTP/1.1\n"),
            (
                "POST / HTTP/1.1\r\nConnections: 1\r\nX-Connection: 2\r\n",
                "POST / HTTP/1.1\r\nConnections: 1\r\nX-Connection: 2\r\n",
            ),
        ] {
            let end = if head.contains("\r\n") { "\r\n" } else { "\n" };
            let expected = format!("{told}{close}{end}").into_bytes();
            assert_eq!(with_close(format!("{head}{end}").as_bytes()), Some(expected), "{head}");
            assert_eq!(with_close(head.as_bytes()), None);
        }
        assert_eq!(with_close(b"\r\n\r\n"), None);
    }

    #[test]
    fn only_a_request_with_content_is_told_to_be_the_last() {
        const HEAD: &[u8] = b"POST / HTTP/1.1\r\n\r\n";
        let (length, persistent) = (HEAD.len() as u32, flags::PERSISTENT);
        // The flags, how much is on the socket, what the copy has behind the head, and what it stands for.
        for (flags, socket_bytes, copied, replaces, is_last) in [
            (persistent, length, 0, 0, false),
            (persistent, length + 1, 0, 0, true),
            (persistent, length + 1, 1, 0, true),
            (flags::FINAL, length + 1, 0, 0, true),
            (0, length + 1, 0, 0, true),
            (0, length, 0, 0, false),
            (persistent | flags::REWRITTEN, length + 5, 0, length + 5, false),
            (persistent | flags::REWRITTEN, length + 5, 0, length + 4, true),
            (persistent | flags::REWRITTEN, length + 5, 1, length + 5, true),
        ] {
            let mut request = HEAD.to_vec();
            request.resize(HEAD.len() + copied, b'x');
            let before = Bundle {
                flags,
                socket_bytes: socket_bytes.into(),
                replaces,
                head_bytes: length,
                ..presented(&request)
            };
            let mut after = before.clone();
            ask_for_the_end(&mut after);
            assert_eq!(after.head().ends_with(b"Connection: close\r\n\r\n"), is_last, "{before:?}");
            assert_eq!(after == before, !is_last);
            let copied_after = after.request.len() as u32 - after.head_bytes;
            assert_eq!(copied_after as usize, copied);
            if flags & flags::REWRITTEN == 0 && is_last {
                assert_eq!(u64::from(after.replaces), before.request.len() as u64);
            }
        }
        let chunked = Bundle { socket_bytes: UNKNOWN_END, ..presented(HEAD) };
        let mut after = chunked.clone();
        ask_for_the_end(&mut after);
        assert_ne!(after, chunked);
    }

    fn presented(head: &[u8]) -> Bundle {
        let peer = std::net::SocketAddr::from(([127, 0, 0, 1], 1));
        Bundle {
            id: Id { slot: 0, generation: 0 },
            flags: flags::PERSISTENT,
            peer,
            socket_bytes: head.len() as u64,
            arrived_ns: 0,
            replaces: 0,
            head_bytes: head.len() as u32,
            request: head.to_vec(),
        }
    }
}
