//! What an HTTP client is told where the transport behind its connection fails.

use crate::udp::StreamError;
use std::io;
use tidegate_http::status_reason;

/// The response to a client that has none yet, where `error` ended the request of the transport that it was led to: a
/// reset's code where that is a status, otherwise what gateways say (RFC 9110 §15.6). The connection ends with it.
#[must_use]
pub fn refusal(error: &io::Error) -> Vec<u8> {
    let status = match StreamError::of(error) {
        Some(StreamError::Reset(code @ 400..=599)) => code,
        _ if error.kind() == io::ErrorKind::TimedOut => 504,
        _ => 502,
    };
    let reason = status_reason(status);
    let text = format!("{status} {reason}: {error}\n");
    let length = text.len();
    format!(
        "HTTP/1.1 {status} {reason}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {length}\r\n\
         Connection: close\r\n\r\n{text}"
    )
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::ClientError;

    #[test]
    fn a_reset_is_its_status_and_a_server_that_is_not_there_is_the_gateways() {
        let text = |error: StreamError| String::from_utf8(refusal(&error.into())).unwrap();
        let long = text(StreamError::Reset(414));
        assert!(
            long.starts_with("HTTP/1.1 414 URI Too Long\r\n") && long.contains("at most 729 bytes"),
            "{long}"
        );
        let (head, body) = long.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())), "{long}");
        assert!(text(StreamError::Reset(410)).starts_with("HTTP/1.1 410 Gone\r\n"));
        assert!(text(StreamError::Reset(1)).starts_with("HTTP/1.1 502 "));
        assert!(text(StreamError::Refused).starts_with("HTTP/1.1 502 "));
        assert!(text(ClientError::Unreachable { attempts: 14 }.into()).starts_with("HTTP/1.1 504 "));
    }
}
