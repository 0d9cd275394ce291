//! Which requests go where, and what is changed of them and of their responses on the way.

use std::borrow::Cow;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use tidegate_http::normalize::{Normalized, read_as_applications};
use tidegate_http::{FieldRules, Method};

use crate::service::answer::{self, Answer};
use crate::settings::{Route, Substitute};

/// What answers a request. Routes whose destinations are equal do the same.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Destination {
    /// An upstream group.
    Upstream(Changed),
    /// A root directory.
    Root(Changed),
    /// The redirect with this index.
    Redirect(usize),
}

/// What has this index among its like, with what the route changes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Changed {
    pub index: usize,
    pub changes: ChangesIndex,
}

/// Of [`Routes`], which says what is behind it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct ChangesIndex(usize);

/// What a route changes of what goes through.
#[derive(Debug, Default, Eq, PartialEq)]
pub(crate) struct Changes {
    pub requests: FieldRules,
    pub responses: ResponseChanges,
    rewrite: Option<PathSubstitute>,
}

/// What a route changes of responses.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct ResponseChanges {
    pub fields: Arc<FieldRules>,
    /// By which files that are stored with these fields are told from the same files with others; 0: nothing is changed.
    pub tag: u64,
}

impl ResponseChanges {
    fn new(fields: &FieldRules) -> Self {
        let mut hasher = DefaultHasher::new();
        fields.hash(&mut hasher);
        let tag = if fields.is_empty() { 0 } else { hasher.finish() };
        Self { fields: Arc::new(fields.clone()), tag }
    }
}

impl Changes {
    /// The path that the upstream is asked for.
    pub(crate) fn rewritten<'p>(&self, path: &'p [u8]) -> Cow<'p, [u8]> {
        match &self.rewrite {
            // RFC 9110 §7.1: `OPTIONS *` is about the server as a whole.
            Some(rewrite) if path != b"*" => Cow::Owned(rewrite.of(path)),
            _ => Cow::Borrowed(path),
        }
    }

    /// Whether an application that reads `reading` in `path` finds it where it is put: what leaves the route's part of the
    /// paths by a dot segment of its own would leave what stands in its place, too.
    fn keeps_reading(&self, path: &[u8], reading: &[u8]) -> bool {
        self.rewrite.is_none() || read_as_applications(&self.rewritten(path)) == *self.rewritten(reading)
    }
}

/// A substitute for the start of paths.
#[derive(Clone, Debug, Eq, PartialEq)]
struct PathSubstitute {
    start: Box<[u8]>,
    substitute: Substitute,
}

impl PathSubstitute {
    fn new(route: &Route, substitute: &Substitute) -> Self {
        Self { start: route.prefix().as_bytes().into(), substitute: substitute.clone() }
    }

    fn of(&self, path: &[u8]) -> Vec<u8> {
        let text = self.substitute.text.as_bytes();
        let rest = path.get(self.start.len()..).unwrap_or(b"");
        match self.substitute.keeps_rest {
            // With these in front it would be the name of another host, or be taken for one.
            true if text == b"/" => [text, without_slashes(rest)].concat(),
            true => [text, rest].concat(),
            false => text.to_vec(),
        }
    }
}

/// Without the slashes of either kind at the start.
fn without_slashes(path: &[u8]) -> &[u8] {
    let start = path.iter().position(|byte| !b"/\\".contains(byte)).unwrap_or(path.len());
    path.get(start..).unwrap_or(b"")
}

/// Sends clients elsewhere.
struct Redirect {
    to: PathSubstitute,
    status: Option<u16>,
    responses: FieldRules,
}

/// All routes.
#[derive(Default)]
pub(crate) struct Routes {
    /// The most specific first, so that the first match is the answer.
    routes: Vec<(Pattern, Destination)>,
    /// What most routes change.
    nothing: Changes,
    /// What the others do, by their indices less one.
    changes: Vec<Changes>,
    redirects: Vec<Redirect>,
}

struct Pattern {
    host: HostPattern,
    path: Vec<u8>,
}

/// In the order of specificity.
#[derive(Eq, Ord, PartialEq, PartialOrd)]
enum HostPattern {
    Exact(Vec<u8>),
    /// `*.example.org`, kept as `.example.org`.
    Suffix(Vec<u8>),
    Any,
}

impl Routes {
    /// A route to the upstream group with this index.
    pub(crate) fn push_upstream(&mut self, route: &Route, index: usize) {
        let changes = self.changes_of(route);
        self.push(route, Destination::Upstream(Changed { index, changes }));
    }

    /// A route to the root directory with this index; returns what it changes.
    pub(crate) fn push_root(&mut self, route: &Route, index: usize) -> ResponseChanges {
        let changes = self.changes_of(route);
        self.push(route, Destination::Root(Changed { index, changes }));
        self.changes(changes).responses.clone()
    }

    /// A route to another URL.
    pub(crate) fn push_redirect(&mut self, route: &Route, to: &Substitute, status: Option<u16>) {
        let (to, responses) = (PathSubstitute::new(route, to), route.response_fields.clone());
        self.redirects.push(Redirect { to, status, responses });
        self.push(route, Destination::Redirect(self.redirects.len() - 1));
    }

    fn push(&mut self, route: &Route, destination: Destination) {
        self.routes.push((Pattern::new(route), destination));
    }

    /// Has the most specific go first; to be done once all are here.
    pub(crate) fn sort(&mut self) {
        self.routes.sort_by(|(a, _), (b, _)| {
            a.host.rank().cmp(&b.host.rank()).then_with(|| b.path.len().cmp(&a.path.len()))
        });
    }

    fn changes_of(&mut self, route: &Route) -> ChangesIndex {
        let changes = Changes {
            requests: route.request_fields.clone(),
            responses: ResponseChanges::new(&route.response_fields),
            rewrite: route.rewrite.as_ref().map(|rewrite| PathSubstitute::new(route, rewrite)),
        };
        if changes == self.nothing {
            return ChangesIndex(0);
        }
        let known = self.changes.iter().position(|known| *known == changes);
        ChangesIndex(
            1 + known.unwrap_or_else(|| {
                self.changes.push(changes);
                self.changes.len() - 1
            }),
        )
    }

    pub(crate) fn changes(&self, index: ChangesIndex) -> &Changes {
        index.0.checked_sub(1).and_then(|index| self.changes.get(index)).unwrap_or(&self.nothing)
    }

    /// What answers a request; nothing does where it depends on who reads the path, or where a root's file could be
    /// asked for by a path that rules and other routes take for another one.
    #[inline]
    pub(crate) fn find(&self, normalized: &Normalized<'_>, folds_case: bool) -> Option<Destination> {
        let found = self.find_path(normalized.authority, normalized.path, folds_case);
        match normalized.reading {
            None => found,
            Some(reading) => found.filter(|found| {
                let hides_slash = matches!(found, Destination::Root(_)) && hides_slash(normalized.path);
                let keeps_reading = match found {
                    Destination::Upstream(to) => {
                        self.changes(to.changes).keeps_reading(normalized.path, reading)
                    }
                    _ => true,
                };
                let again = || self.find_path(normalized.authority, reading, folds_case);
                !hides_slash && keeps_reading && again() == Some(*found)
            }),
        }
    }

    /// What answers a request for this normalized host and path.
    #[inline]
    pub(crate) fn find_path(&self, host: &[u8], path: &[u8], folds_case: bool) -> Option<Destination> {
        // RFC 9110 §7.1: `OPTIONS *` is about the server as a whole.
        let path = if path == b"*" { b"/" } else { path };
        self.routes
            .iter()
            .find(|(pattern, _)| pattern.matches(host, path, folds_case))
            .map(|(_, destination)| *destination)
    }

    /// Sends a client where the redirect with this index leads.
    pub(crate) fn redirect(&self, index: usize, method: Method, normalized: &Normalized<'_>) -> Answer {
        let Some(redirect) = self.redirects.get(index) else { return Answer::status(404) };
        let mut url = redirect.to.of(normalized.path);
        if redirect.to.substitute.keeps_rest
            && let Some(query) = normalized.query
        {
            url.push(b'?');
            url.extend_from_slice(query);
        }
        let mut answer = answer::redirect(method, Some(url));
        if let Answer::Local { status, fields } = &mut answer {
            *status = redirect.status.unwrap_or(*status);
            redirect.responses.write(|_| false, fields);
        }
        answer
    }
}

impl Pattern {
    fn new(route: &Route) -> Self {
        let host = route.host.to_ascii_lowercase();
        let host = match host.strip_prefix('*') {
            Some("") => HostPattern::Any,
            Some(suffix) => HostPattern::Suffix(suffix.as_bytes().to_vec()),
            None => HostPattern::Exact(host.into_bytes()),
        };
        Self { host, path: route.prefix().as_bytes().to_vec() }
    }

    #[inline]
    fn matches(&self, host: &[u8], path: &[u8], folds_case: bool) -> bool {
        let host_matches = match &self.host {
            HostPattern::Any => true,
            HostPattern::Suffix(suffix) => without_port(host).ends_with(suffix),
            HostPattern::Exact(exact) => host == exact.as_slice() || without_port(host) == exact.as_slice(),
        };
        let begins = || match path.get(..self.path.len()) {
            Some(start) if folds_case => start.eq_ignore_ascii_case(&self.path),
            Some(start) => start == self.path,
            None => false,
        };
        host_matches && begins()
    }
}

impl HostPattern {
    /// Sorts exact names first, then longer suffixes, then `*`.
    fn rank(&self) -> (u8, usize) {
        match self {
            Self::Exact(_) => (0, 0),
            Self::Suffix(suffix) => (1, usize::MAX - suffix.len()),
            Self::Any => (2, 0),
        }
    }
}

/// Whether a normalized path holds an encoded slash or backslash.
fn hides_slash(path: &[u8]) -> bool {
    path.windows(3).any(|escape| escape == b"%2F" || escape == b"%5C")
}

fn without_port(host: &[u8]) -> &[u8] {
    match host.iter().rposition(|byte| *byte == b':') {
        Some(colon) if !host[colon..].contains(&b']') => &host[..colon],
        _ => host,
    }
}
