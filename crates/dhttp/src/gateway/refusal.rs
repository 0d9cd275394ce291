//! Why the gateway has no response to give: in the body for people, in `Proxy-Status` for programs (RFC 9209).

use std::io::ErrorKind;
use std::net::IpAddr;

use bytes::Bytes;
use tidegate_http::{HeadError, Method, status_reason};

use super::PSEUDONYM;
use crate::driver::FetchError;

/// An answer of the gateway's own.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Refusal {
    pub status: u16,
    /// Of the registry in RFC 9209 §2.3.
    error: &'static str,
    /// A sentence, printable ASCII.
    pub details: String,
}

impl Refusal {
    pub fn new(status: u16, error: &'static str, details: impl Into<String>) -> Self {
        let printable = |c: char| if matches!(c, ' '..='~') { c } else { '?' };
        Self { status, error, details: details.into().chars().map(printable).collect() }
    }

    pub fn request(details: impl Into<String>) -> Self {
        Self::new(400, "http_request_error", details)
    }

    pub fn of_head(error: HeadError) -> Self {
        Self::new(error.status(), "http_request_error", error.to_string())
    }

    pub fn stranger(peer: IpAddr) -> Self {
        let details =
            format!("{peer} may not use this proxy; start the gateway with --allow {peer} to let it");
        Self::new(403, "http_request_denied", details)
    }

    pub fn too_many() -> Self {
        Self::new(
            503,
            "connection_limit_reached",
            "too many connections to this proxy; try again when some are closed",
        )
    }

    pub fn unresolved(host: &str) -> Self {
        Self::new(502, "dns_error", format!("cannot find the address of {host}"))
    }

    /// Why a server gave no response.
    pub fn of_fetch(error: &FetchError, whom: &str) -> Self {
        let (status, kind) = match error {
            FetchError::Resolve(_) => (502, "dns_error"),
            FetchError::Start(_) => (503, "connection_limit_reached"),
            FetchError::Ports(_) | FetchError::Ended => (503, "proxy_internal_error"),
            FetchError::Url(_) | FetchError::Request(_) | FetchError::IncompleteRequest => {
                (400, "http_request_error")
            }
            FetchError::BadAnswer | FetchError::SpeaksHttp => (502, "http_protocol_error"),
            FetchError::Aborted(_) => (502, "http_response_incomplete"),
            _ if error.is_other_certificate() => (502, "tls_certificate_error"),
            FetchError::NoAnswer { reason, sent } => match (reason.kind(), sent) {
                (ErrorKind::ConnectionRefused, _) => (502, "connection_refused"),
                (ErrorKind::TimedOut, false) => (504, "connection_timeout"),
                (ErrorKind::TimedOut, true) => (504, "connection_read_timeout"),
                (ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable, _) => {
                    (502, "destination_ip_unroutable")
                }
                (ErrorKind::InvalidData, _) => (502, "tls_protocol_error"),
                _ => (502, "connection_terminated"),
            },
        };
        Self::new(status, kind, format!("{whom}: {error}"))
    }

    /// The whole response, after which the connection ends.
    pub fn response(&self, method: Method) -> Bytes {
        let Self { status, error, details } = self;
        let reason = status_reason(*status);
        let text = format!("{status} {reason}: {details}\n");
        // RFC 8941 §3.3.3.
        let quoted = details.replace('\\', "\\\\").replace('"', "\\\"");
        let length = text.len();
        let mut http = format!(
            "HTTP/1.1 {status} {reason}\r\nContent-Type: text/plain\r\nContent-Length: {length}\r\n\
             Cache-Control: no-store\r\nProxy-Status: {PSEUDONYM}; error={error}; details=\"{quoted}\"\r\n\
             Connection: close\r\n\r\n"
        );
        if method != Method::Head {
            http.push_str(&text);
        }
        http.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_said_to_people_and_to_programs_and_breaks_out_of_no_field() {
        let refusal = Refusal::new(502, "dns_error", "no \"a\\b\"\r\nX: y\u{e9}");
        let http = String::from_utf8(refusal.response(Method::Get).to_vec()).unwrap();
        let (head, body) = http.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(
            "\r\nProxy-Status: tidegate-gateway; error=dns_error; details=\"no \\\"a\\\\b\\\"??X: y?\"\r\n"
        ));
        assert_eq!(body, "502 Bad Gateway: no \"a\\b\"??X: y?\n");
        assert!(refusal.response(Method::Head).ends_with(b"\r\n\r\n"));
    }

    #[test]
    fn each_way_to_fail_has_its_status_and_its_name() {
        let no_answer = |kind: ErrorKind, sent| FetchError::NoAnswer { reason: kind.into(), sent };
        for (error, status, name) in [
            (no_answer(ErrorKind::ConnectionRefused, false), 502, "connection_refused"),
            (no_answer(ErrorKind::TimedOut, false), 504, "connection_timeout"),
            (no_answer(ErrorKind::TimedOut, true), 504, "connection_read_timeout"),
            (no_answer(ErrorKind::HostUnreachable, false), 502, "destination_ip_unroutable"),
            (no_answer(ErrorKind::UnexpectedEof, true), 502, "connection_terminated"),
            (FetchError::Resolve("a".into()), 502, "dns_error"),
            (FetchError::SpeaksHttp, 502, "http_protocol_error"),
            (FetchError::Ended, 503, "proxy_internal_error"),
        ] {
            let refusal = Refusal::of_fetch(&error, "a:80");
            assert_eq!((refusal.status, refusal.error), (status, name), "{error}");
            assert!(refusal.details.starts_with("a:80: "), "{}", refusal.details);
        }
    }
}
