//! Messages that an ICAP service looks at (RFC 3507) before they go on: a phase in which a request or a response stops
//! where it is, and goes on exactly there when the service has decided (Tempesta §4.3).
//!
//! What waits stays on its core as a suspended task that costs others nothing. How many may wait, and for how long, is
//! bounded; what happens when the service fails is the operator's choice. A message that may go on unchanged (204) goes
//! on with its own head and its own body; of that only what the service has seen so far was kept.

mod adapted;
mod exchange;
mod heads;
mod link;
mod review;
mod service;
mod tags;

pub(crate) use adapted::AdaptedBody;
pub(crate) use review::{AdaptedRequest, OriginBody, Review, review_request, review_response};
pub(crate) use service::Services;
pub(crate) use tags::{Reviewed, ServiceTag, ServiceTags};

use tidegate_http::normalize::Normalized;

use crate::settings::{IcapService, IcapSubject};

/// Why no decision came; the ICAP server is to blame, or nobody.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// Its connection could not be made, broke, or was silent for too long.
    #[error("{0}")]
    Connection(crate::upstream::UpstreamError),
    /// It does not speak ICAP as the RFC has it.
    #[error("{0}")]
    Protocol(#[from] tidegate_icap::IcapError),
    /// It answered with this status, which is no decision.
    #[error("status {0}")]
    Status(u16),
    /// What it sent in the place of the HTTP message cannot be one.
    #[error("what it made of the message is malformed")]
    Message,
    /// It does not offer what it is asked for.
    #[error("the service does not adapt these messages")]
    Unsupported,
    /// It has failed several times, and is not asked for a while.
    #[error("the service is out")]
    Down,
    /// As many messages wait for it as may.
    #[error("too many messages wait for the service")]
    Busy,
}

impl Failure {
    /// Whether the service works and has no room, of its own or ours: who sends much can bring that about. Its 503 says
    /// that it is overloaded (RFC 3507 §4.3.3).
    fn is_busy(&self) -> bool {
        matches!(self, Self::Busy | Self::Status(503))
    }
}

/// Whether a service looks at messages about a request with this method for this path. What servers that take paths in
/// any case for the same read as one path must not come past a service as another: `folds_case` compares as they do.
/// Nor must what an application reads as another path: the service looks at what it concerns in either form, and leaves
/// out only what is left out in both.
pub(crate) fn concerns(
    service: &IcapService,
    on: IcapSubject,
    method: &[u8],
    normalized: &Normalized<'_>,
    folds_case: bool,
) -> bool {
    let is_one_of =
        |patterns: &[String], path: &[u8]| patterns.iter().any(|it| matches(it.as_bytes(), path, folds_case));
    let concerns_path = |path: &[u8]| {
        (service.paths.is_empty() || is_one_of(&service.paths, path)) && !is_one_of(&service.except, path)
    };
    service.on == on
        && (service.methods.is_empty() || service.methods.iter().any(|known| known.as_bytes() == method))
        && (concerns_path(normalized.path) || normalized.reading.is_some_and(concerns_path))
}

/// A pattern with `*` at its start, its end, or both.
fn matches(pattern: &[u8], path: &[u8], folds_case: bool) -> bool {
    let is_same = |one: &[u8], other: &[u8]| match folds_case {
        true => one.eq_ignore_ascii_case(other),
        false => one == other,
    };
    match (pattern.strip_prefix(b"*"), pattern.strip_suffix(b"*")) {
        (None, None) => is_same(pattern, path),
        (Some(end), None) => path.len() >= end.len() && is_same(&path[path.len() - end.len()..], end),
        (None, Some(start)) => path.get(..start.len()).is_some_and(|begin| is_same(begin, start)),
        (Some(_), Some(_)) => {
            let inner = pattern.get(1..pattern.len() - 1).unwrap_or(b"");
            inner.is_empty() || path.windows(inner.len()).any(|window| is_same(window, inner))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::time::Duration;

    use super::*;

    #[test]
    fn patterns_of_paths() {
        for (pattern, path, expected) in [
            ("/a", "/a", true),
            ("/a", "/ab", false),
            ("/a/*", "/a/b", true),
            ("/a/*", "/b/a/", false),
            ("*.php", "/x.php", true),
            ("*.php", "/x.php5", false),
            ("*.php", "php", false),
            ("*", "/", true),
            ("*upload*", "/my/upload/x", true),
            ("*upload*", "/my/up/load", false),
        ] {
            assert_eq!(matches(pattern.as_bytes(), path.as_bytes(), false), expected, "{pattern} {path}");
            let capitals = path.to_ascii_uppercase();
            assert_eq!(
                matches(pattern.as_bytes(), capitals.as_bytes(), true),
                expected,
                "{pattern} {capitals}"
            );
        }
        assert!(!matches(b"/a/*", b"/A/b", false));
    }

    #[test]
    fn what_an_application_may_read_as_another_path_does_not_come_past_a_service() {
        let concerned = |paths: &[&str], except: &[&str], path: &str, reading: Option<&str>| {
            let owned = |patterns: &[&str]| patterns.iter().map(|&pattern| pattern.to_owned()).collect();
            let service = IcapService {
                url: "icap://127.0.0.1/x".to_owned(),
                address: (Ipv4Addr::LOCALHOST, 1344).into(),
                on: IcapSubject::Requests,
                methods: Vec::new(),
                paths: owned(paths),
                except: owned(except),
                connections: 1,
                timeout: Duration::from_secs(1),
                fail_open: false,
                busy_open: false,
            };
            let reading = reading.map(str::as_bytes);
            let normalized = Normalized { authority: b"h", path: path.as_bytes(), query: None, reading };
            concerns(&service, IcapSubject::Requests, b"POST", &normalized, false)
        };
        assert!(concerned(&["/upload/*"], &[], "/x%2F..%2Fupload/a", Some("/upload/a")));
        assert!(!concerned(&["/upload/*"], &[], "/x%2Fa", Some("/x/a")));
        let except = &["/static/*"];
        assert!(concerned(&[], except, "/static/%2F..%2F..%2Fupload", Some("/upload")));
        assert!(concerned(&[], except, "/x%2F..%2Fstatic/a", Some("/static/a")));
        assert!(!concerned(&[], except, "/static/a%2Fb", Some("/static/a/b")));
        assert!(!concerned(&[], except, "/static/a", None));
    }
}
