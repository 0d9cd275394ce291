//! Messages that an ICAP service looks at (RFC 3507) before they go on: a phase in which a request or a response stops where
//! it is, and goes on exactly there when the service has decided (Tempesta §4.3).
//!
//! What waits stays on its core as a suspended task that costs others nothing. How many may wait, and for how long, is
//! bounded; what happens when the service fails is the operator's choice. A message that may go on unchanged (204) goes on
//! with its own head and its own body; of that only what the service has seen so far was kept.

mod adapted;
mod exchange;
mod heads;
mod link;
mod review;
mod service;

pub(crate) use adapted::AdaptedBody;
pub(crate) use review::{AdaptedRequest, OriginBody, Review, review_request, review_response};
pub(crate) use service::Services;

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

/// Whether a service looks at messages about a request with this method for this path. What servers that take paths in any
/// case for the same read as one path must not come past a service as another: `folds_case` compares as they do.
pub(crate) fn concerns(
    service: &IcapService,
    on: IcapSubject,
    method: &[u8],
    normalized: &Normalized<'_>,
    folds_case: bool,
) -> bool {
    let matches_path = |patterns: &[String], path: &[u8]| match folds_case {
        true => {
            let path = path.to_ascii_lowercase();
            patterns.iter().any(|pattern| matches(pattern.to_ascii_lowercase().as_bytes(), &path))
        }
        false => patterns.iter().any(|pattern| matches(pattern.as_bytes(), path)),
    };
    // However the application reads it.
    let matches = |patterns: &[String]| {
        matches_path(patterns, normalized.path)
            || normalized.reading.is_some_and(|reading| matches_path(patterns, reading))
    };
    service.on == on
        && (service.methods.is_empty() || service.methods.iter().any(|known| known.as_bytes() == method))
        && (service.paths.is_empty() || matches(&service.paths))
        && !matches(&service.except)
}

/// A pattern with `*` at its start, its end, or both.
fn matches(pattern: &[u8], path: &[u8]) -> bool {
    match (pattern.strip_prefix(b"*"), pattern.strip_suffix(b"*")) {
        (None, None) => pattern == path,
        (Some(end), None) => path.ends_with(end),
        (None, Some(start)) => path.starts_with(start),
        (Some(_), Some(_)) => {
            let inner = pattern.get(1..pattern.len() - 1).unwrap_or(b"");
            inner.is_empty() || path.windows(inner.len()).any(|window| window == inner)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn patterns_of_paths() {
        for (pattern, path, expected) in [
            ("/a", "/a", true),
            ("/a", "/ab", false),
            ("/a/*", "/a/b", true),
            ("/a/*", "/b/a/", false),
            ("*.php", "/x.php", true),
            ("*.php", "/x.php5", false),
            ("*", "/", true),
            ("*upload*", "/my/upload/x", true),
            ("*upload*", "/my/up/load", false),
        ] {
            assert_eq!(matches(pattern.as_bytes(), path.as_bytes()), expected, "{pattern} {path}");
        }
    }
}
