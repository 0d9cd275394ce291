//! One form for every request target, so that policy, cache and upstream cannot read it differently
//! (Tempesta §4.4.2, RFC 3986 §6.2).
//!
//! What all personalities do: the host in lower case without a trailing dot, port 80 (443 where the target says
//! `https`) dropped; encoded unreserved bytes decoded, other escapes in upper case; bytes that RFC 3986 does not allow
//! in a target encoded; dot segments removed; slash runs collapsed; a fragment, userinfo, `%00` or a broken escape in
//! the path refused. Escapes are decoded once: `%252e` stays `%252e`.
//!
//! Where they differ, each like the server it is named after, because a difference between us and the server behind us
//! is what evasion lives on:
//!
//! | | strict | apache | nginx | iis |
//! |---|---|---|---|---|
//! | `%2F` in the path | kept; refused beside a dot segment | refused | a slash | a slash |
//! | `\` and `%5C` in the path | `%5C`; refused beside a dot segment | `%5C` | `%5C` | a slash |
//! | `;` and `%3B` in the path | kept; refused behind `.` and `..` | kept | kept | kept |
//! | `..` above the root | dropped (RFC 3986 §5.2.4) | refused | refused | dropped |
//! | encoded control bytes in the path | refused | kept | kept | refused |
//! | `%25` before two hexadecimal digits in the path | kept | kept | kept | refused |
//! | `%` without two hexadecimal digits in the query | refused | `%25` | `%25` | `%25` |
//! | `%00` in the query | refused | kept | kept | kept |
//! | letters of the path | as sent | as sent | as sent | as sent, but see [`Personality::folds_case`] |
//!
//! Applications read further than the servers that carry them: Java containers remove `;parameters` before they look
//! for dot segments, WSGI decodes `%2F` before anybody asks which part of the site it is. What is decided by the path
//! therefore has to hold for [`Normalized::reading`] too.

mod authority;
mod target;

use std::fmt;
use std::str::FromStr;

use crate::error::HeadError;
use crate::field::FieldId;
use crate::head::{Method, RequestHead};

use target::TargetRest;

/// Whose reading of a request target is followed where servers differ.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub enum Personality {
    /// The RFCs, and refusal of what servers are known to read differently.
    #[default]
    Strict,
    /// Apache httpd with its default settings.
    Apache,
    /// nginx with its default settings.
    Nginx,
    /// Microsoft IIS with its default request filtering.
    Iis,
}

impl Personality {
    /// Every personality.
    pub const ALL: [Self; 4] = [Self::Strict, Self::Apache, Self::Nginx, Self::Iis];

    /// The name in configurations.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Strict => "strict",
            Self::Apache => "apache",
            Self::Nginx => "nginx",
            Self::Iis => "iis",
        }
    }

    /// Whether the server takes `/Admin` and `/admin` for the same file, so that rules must match in any case. The path
    /// itself keeps its letters: applications behind IIS may tell them apart.
    pub const fn folds_case(self) -> bool {
        matches!(self, Self::Iis)
    }
}

impl fmt::Display for Personality {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The text names no personality.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("expected one of strict, apache, nginx, iis")]
pub struct UnknownPersonality;

impl FromStr for Personality {
    type Err = UnknownPersonality;

    fn from_str(text: &str) -> Result<Self, UnknownPersonality> {
        Self::ALL.into_iter().find(|personality| personality.name() == text).ok_or(UnknownPersonality)
    }
}

/// The normal form of a request target.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Normalized<'a> {
    /// Host, and port unless it is the default one; empty only for an HTTP/1.0 request without Host.
    pub authority: &'a [u8],
    /// Starts with `/`; or is `*` (OPTIONS), or empty (CONNECT).
    pub path: &'a [u8],
    /// What follows the first `?`, which may be nothing.
    pub query: Option<&'a [u8]>,
    /// The path as an application may read it, where that is another one: `%2F` and `%5C` are slashes, what follows a
    /// `;` or `%3B` within a segment is left out, and dot segments that this brings about are removed.
    pub reading: Option<&'a [u8]>,
}

/// A part of the result: as received, or how many bytes of it were written to the scratch buffer.
#[derive(Clone, Copy)]
enum Part<'a> {
    Borrowed(&'a [u8]),
    Written(usize),
}

impl<'a> Part<'a> {
    /// Takes this part off the front of `written` if it lies there.
    fn take(self, written: &mut &'a [u8]) -> &'a [u8] {
        match self {
            Self::Borrowed(bytes) => bytes,
            Self::Written(length) => {
                let (part, rest) = written.split_at(length);
                *written = rest;
                part
            }
        }
    }
}

/// A normal form with bytes of its own, which outlives the head that it was made of.
#[derive(Clone, Debug)]
pub struct Kept {
    /// Authority, path, query and reading, one after the other.
    bytes: Vec<u8>,
    path_at: usize,
    query_at: Option<usize>,
    reading_at: Option<usize>,
}

impl Normalized<'_> {
    /// A copy, for what goes on after the head's bytes are gone.
    pub fn keep(&self) -> Kept {
        let (query, reading) = (self.query.unwrap_or(b""), self.reading.unwrap_or(b""));
        let length = self.authority.len() + self.path.len() + query.len() + reading.len();
        let mut bytes = Vec::with_capacity(length);
        bytes.extend_from_slice(self.authority);
        let path_at = bytes.len();
        bytes.extend_from_slice(self.path);
        let query_at = self.query.map(|_| bytes.len());
        bytes.extend_from_slice(query);
        let reading_at = self.reading.map(|_| bytes.len());
        bytes.extend_from_slice(reading);
        Kept { bytes, path_at, query_at, reading_at }
    }
}

impl Kept {
    /// The normal form that was kept.
    pub fn get(&self) -> Normalized<'_> {
        let (rest, reading) = split(&self.bytes, self.reading_at);
        let (rest, query) = split(rest, self.query_at);
        let (authority, path) = rest.split_at(self.path_at);
        Normalized { authority, path, query, reading }
    }
}

fn split(bytes: &[u8], at: Option<usize>) -> (&[u8], Option<&[u8]>) {
    match at {
        Some(at) => {
            let (before, after) = bytes.split_at(at);
            (before, Some(after))
        }
        None => (bytes, None),
    }
}

/// The normal form of what `head` asks for. What is normal already is borrowed from the head; the rest is written to
/// `scratch`, which is cleared first and never grows beyond six times the target and the host.
///
/// # Errors
/// The target or the host is malformed, or of a kind that servers read differently.
pub fn normalize<'a>(
    head: &RequestHead<'a>,
    personality: Personality,
    scratch: &'a mut Vec<u8>,
) -> Result<Normalized<'a>, HeadError> {
    scratch.clear();
    let target = Target::of(head)?;
    let authority = match (target.authority, head.fields.get(FieldId::Host)) {
        // RFC 9112 §3.2.2: the target wins, but §3.2 still refuses a malformed Host.
        (Some(authority), host) => {
            if let Some(host) = host.filter(|host| !host.is_empty()) {
                authority::normalize(host, 80, scratch)?;
                scratch.clear();
            }
            authority::normalize(authority, target.default_port, scratch)?
        }
        (None, Some(host)) => authority::normalize(host, 80, scratch)?,
        (None, None) => Part::Borrowed(&b""[..]),
    };
    let TargetRest { path, query, reading } = match target.rest {
        Rest::Asterisk => TargetRest::of_path(b"*"),
        Rest::Nothing => TargetRest::of_path(b""),
        Rest::Path(rest) => target::normalize(rest, personality, scratch)?,
    };
    let mut written = scratch.as_slice();
    Ok(Normalized {
        authority: authority.take(&mut written),
        path: path.take(&mut written),
        query: query.map(|query| query.take(&mut written)),
        reading: reading.map(|reading| reading.take(&mut written)),
    })
}

/// Whether this can be the value of a `Host` field, and names somebody.
pub(crate) fn is_authority(text: &[u8]) -> bool {
    !text.is_empty() && authority::normalize(text, 80, &mut Vec::new()).is_ok()
}

/// What applications may read in a path that is in its normal form, as [`Normalized::reading`] has it; empty where it is
/// nothing that they can read.
pub fn read_as_applications(path: &[u8]) -> Vec<u8> {
    target::reading_of(path)
}

/// Appends `path` to `out` with its escapes decoded once (RFC 3986 §2.1), for a file system. What is no escape stays as
/// it is: [`normalize`] has refused it.
pub fn percent_decode(path: &[u8], out: &mut Vec<u8>) {
    let mut rest = path;
    while let Some(at) = rest.iter().position(|byte| *byte == b'%') {
        out.extend_from_slice(&rest[..at]);
        let digit = |at: usize| rest.get(at).and_then(|byte| char::from(*byte).to_digit(16));
        match (digit(at + 1), digit(at + 2)) {
            (Some(high), Some(low)) => {
                out.push((high << 4 | low) as u8);
                rest = &rest[at + 3..];
            }
            _ => {
                out.push(b'%');
                rest = &rest[at + 1..];
            }
        }
    }
    out.extend_from_slice(rest);
}

/// The target taken apart by its form (RFC 9112 §3.2).
struct Target<'a> {
    authority: Option<&'a [u8]>,
    default_port: u16,
    rest: Rest<'a>,
}

enum Rest<'a> {
    /// Path and query; the path may be empty in absolute-form.
    Path(&'a [u8]),
    Asterisk,
    Nothing,
}

impl<'a> Target<'a> {
    fn of(head: &RequestHead<'a>) -> Result<Self, HeadError> {
        let target = head.target;
        if head.method == Method::Connect {
            // Authority-form must name a port: there is no default for a tunnel.
            let port = target.rsplit(|&byte| byte == b':').next().unwrap_or(b"");
            if port.len() == target.len() || port.is_empty() || !port.iter().all(u8::is_ascii_digit) {
                return Err(HeadError::BadTarget);
            }
            return Ok(Self { authority: Some(target), default_port: 0, rest: Rest::Nothing });
        }
        match target {
            [b'/', ..] => Ok(Self { authority: None, default_port: 80, rest: Rest::Path(target) }),
            b"*" if head.method == Method::Options => {
                Ok(Self { authority: None, default_port: 80, rest: Rest::Asterisk })
            }
            _ => Self::absolute(head.method, target),
        }
    }

    fn absolute(method: Method, target: &'a [u8]) -> Result<Self, HeadError> {
        let has_scheme =
            |scheme: &[u8]| target.get(..scheme.len()).is_some_and(|t| t.eq_ignore_ascii_case(scheme));
        let (after_scheme, default_port) = if has_scheme(b"http://") {
            (&target[7..], 80)
        } else if has_scheme(b"https://") {
            (&target[8..], 443)
        } else {
            return Err(HeadError::BadTarget);
        };
        let end = after_scheme
            .iter()
            .position(|byte| matches!(byte, b'/' | b'?' | b'#' | b'\\'))
            .unwrap_or(after_scheme.len());
        let (authority, rest) = after_scheme.split_at(end);
        // RFC 9112 §3.2.4: OPTIONS with an empty path and no query asks about the server.
        let rest = match rest {
            [] if method == Method::Options => Rest::Asterisk,
            rest => Rest::Path(rest),
        };
        Ok(Self { authority: Some(authority), default_port, rest })
    }
}
