//! What a service says of itself in its answer to OPTIONS (RFC 3507 §4.10).

use std::time::Duration;

use crate::head::{decimal, list};

/// File name extensions that a service names; more are left out.
const EXTENSIONS: usize = 200;
/// How long an answer holds where the server does not say.
const USUAL_LIFE: Duration = Duration::from_secs(3600);
/// The longest that one is believed.
const LONGEST_LIFE: Duration = Duration::from_secs(24 * 3600);
/// The longest preview that is sent, whatever the server would take.
const PREVIEW_BYTES: u64 = 64 * 1024;

/// A service's properties.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Options {
    /// It adapts requests.
    pub reqmod: bool,
    /// It adapts responses.
    pub respmod: bool,
    /// It may answer 204 outside of previews too.
    pub allow_204: bool,
    /// Bytes of a body that it wants to see first; `None`: it takes no previews.
    pub preview_bytes: Option<usize>,
    /// Connections that it takes from one client.
    pub max_connections: Option<usize>,
    /// For how long all this holds, in seconds, as the server said.
    pub ttl_s: Option<u64>,
    /// Extensions of file names, in lower case, and what is done with each.
    pub extensions: Vec<(Transfer, String)>,
}

/// How messages about a file go to a service, by the file's extension (`*`: every other).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Transfer {
    /// With a preview.
    Preview,
    /// Not at all.
    Ignore,
    /// Whole, without a preview.
    Complete,
}

impl Options {
    /// For how long this holds.
    pub fn life(&self) -> Duration {
        self.ttl_s.map_or(USUAL_LIFE, Duration::from_secs).min(LONGEST_LIFE)
    }

    /// How a message about the file at this path goes to the service.
    pub fn transfer(&self, path: &[u8]) -> Transfer {
        let file = path.rsplit(|&byte| byte == b'/').next().unwrap_or(b"");
        let dot = file.iter().rposition(|&byte| byte == b'.');
        let extension = dot.map_or(&b""[..], |dot| &file[dot + 1..]);
        let find = |wanted: &[u8]| {
            let mut known = self.extensions.iter();
            known.find(|(_, known)| known.as_bytes().eq_ignore_ascii_case(wanted)).map(|(how, _)| *how)
        };
        let named = if extension.is_empty() { None } else { find(extension) };
        named.or_else(|| find(b"*")).unwrap_or(Transfer::Preview)
    }

    pub(crate) fn field(&mut self, name: &[u8], value: &[u8]) {
        let is = |known: &str| name.eq_ignore_ascii_case(known.as_bytes());
        let has = |wanted: &[u8]| list(value).any(|part| part.eq_ignore_ascii_case(wanted));
        if is("methods") {
            self.reqmod |= has(b"REQMOD");
            self.respmod |= has(b"RESPMOD");
        } else if is("allow") {
            self.allow_204 |= has(b"204");
        } else if is("preview") {
            self.preview_bytes = decimal(value).map(|bytes| bytes.min(PREVIEW_BYTES) as usize);
        } else if is("max-connections") {
            self.max_connections = decimal(value).and_then(|count| usize::try_from(count).ok());
        } else if is("options-ttl") {
            self.ttl_s = decimal(value);
        } else if is("transfer-preview") {
            self.extend(Transfer::Preview, value);
        } else if is("transfer-ignore") {
            self.extend(Transfer::Ignore, value);
        } else if is("transfer-complete") {
            self.extend(Transfer::Complete, value);
        }
    }

    fn extend(&mut self, how: Transfer, value: &[u8]) {
        for extension in list(value) {
            if self.extensions.len() == EXTENSIONS {
                return;
            }
            let text = String::from_utf8_lossy(extension);
            self.extensions.push((how, text.trim_start_matches('.').to_ascii_lowercase()));
        }
    }
}
