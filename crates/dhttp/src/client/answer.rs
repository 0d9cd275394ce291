//! What may be in the HTTP part of an answer by UDP.

use tidegate_http::{BodyFraming, ChunkLimits, ChunkedDecoder, HeadLimits, Method, Progress, ResponseParser};

/// Length in bytes of the head of a datagram's HTTP response, or `None` if the response is malformed or not complete:
/// a datagram holds one final response, all of it, and nothing else.
pub(super) fn complete_response(http: &[u8], method: Method) -> Option<usize> {
    let mut parser = ResponseParser::new(HeadLimits::default());
    parser.reset(method);
    let Ok(Progress::Complete { length }) = parser.parse(http) else { return None };
    let head = parser.head(http);
    let body = &http[length..];
    let complete = head.status >= 200
        && match head.framing {
            BodyFraming::None => body.is_empty(),
            BodyFraming::Length(stated) => stated == body.len() as u64,
            BodyFraming::Chunked => is_complete_chunked(body),
            BodyFraming::UntilClose => true,
        };
    complete.then_some(length)
}

fn is_complete_chunked(mut body: &[u8]) -> bool {
    let mut decoder = ChunkedDecoder::new(ChunkLimits::default());
    while !body.is_empty() {
        let Ok(decoded) = decoder.decode(body) else { return false };
        body = &body[decoded.consumed..];
        if decoded.done {
            return body.is_empty();
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_whole_final_response_is_complete_and_nothing_else() {
        for (http, method, complete) in [
            (&b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab"[..], Method::Get, true),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\na", Method::Get, false),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabc", Method::Get, false),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n", Method::Head, true),
            (b"HTTP/1.1 200 OK\r\n\r\nwhat there is", Method::Get, true),
            (b"HTTP/1.1 304 Not Modified\r\n\r\n", Method::Get, true),
            (b"HTTP/1.1 100 Continue\r\n\r\n", Method::Get, false),
            (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", Method::Get, true),
            (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n", Method::Get, false),
            (b"HTTP/1.1 200 OK\r\nContent", Method::Get, false),
            (b"HTTP", Method::Get, false),
        ] {
            assert_eq!(complete_response(http, method).is_some(), complete, "{}", http.escape_ascii());
        }
    }
}
