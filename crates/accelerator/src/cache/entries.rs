//! What the cache keeps beside a response's bytes, and the keys under which it keeps it.
//!
//! A response is stored under its URL. When it varies (RFC 9111 §4.1), the URL's entry names the request fields that
//! matter, and the response lies under the URL, a generation and those fields' values. A new generation makes every
//! variant of the older ones unreachable, so that an invalidation of the URL reaches all of them.

use std::net::{IpAddr, Ipv4Addr};
use std::str::FromStr;

use tidegate_http::cache::{Policy, vary};
use tidegate_http::normalize::{Normalized, Personality, normalize};
use tidegate_http::{HeadLimits, Progress, RequestParser};
use tidegate_store::{ObjectInfo, Store, Visit};

use crate::compression;
use crate::icap::Reviewed;
use crate::service::client_info::ClientInfo;

// 0 and 2 were an earlier form of responses and files.
const VARIANTS: u8 = 1;
const RESPONSE: u8 = 3;
const FILE: u8 = 4;
// The same by the codings that clients accept, because of the compression here.
const RESPONSE_BY_CODING: u8 = 5;
const FILE_BY_CODING: u8 = 6;

/// Separates a URL from what distinguishes its variants, and the parts of a file's key; cannot occur in a URL or in a
/// path.
pub(crate) const KEY_SEPARATOR: u8 = 0;
/// Stands in the place of `Accept-Encoding` among the fields that select a variant, where it is the compression here that
/// makes the difference.
const BY_CODING: &[u8] = b":coding";

/// How a file's key begins.
const FILE_SCHEME: &[u8] = b"file:";

/// Precedes a host that only the origin is told of.
pub(super) const OTHER_HOST: u8 = 1;
/// Precedes what else the origin is told about the URL.
pub(super) const OTHER_CLAIMS: u8 = 2;

/// What is stored with an object.
pub(crate) enum Entry<'a> {
    Response(ResponseEntry<'a>),
    /// The fields that select a variant, comma-separated, and the generation of the variants.
    Variants {
        generation: u64,
        names: &'a [u8],
    },
}

/// What is stored with a response.
#[derive(Clone, Copy)]
pub(crate) struct ResponseEntry<'a> {
    pub status: u16,
    pub is_file: bool,
    /// The compression here alone makes the codings that clients accept select a response; of a file, it is compressed.
    pub is_by_coding: bool,
    pub policy: Policy,
    /// By which ICAP service, and in which state of it.
    pub reviewed: Reviewed,
    /// Seconds since 1970.
    pub last_modified_s: Option<u64>,
    pub etag: Option<&'a [u8]>,
    /// Cache tags, separated by spaces or commas.
    pub tags: &'a [u8],
}

impl<'a> Entry<'a> {
    /// Reads what [`ResponseEntry::encode`] or [`encode_variants`] wrote; `None` if it is anything else.
    #[inline]
    pub(crate) fn decode(meta: &'a [u8]) -> Option<Self> {
        let (&kind, meta) = meta.split_first()?;
        if kind == VARIANTS {
            let (generation, names) = meta.split_first_chunk::<8>()?;
            return Some(Self::Variants { generation: u64::from_le_bytes(*generation), names });
        }
        if !matches!(kind, RESPONSE | FILE | RESPONSE_BY_CODING | FILE_BY_CODING) {
            return None;
        }
        let (status, meta) = meta.split_first_chunk::<2>()?;
        let (last_modified, meta) = meta.split_first_chunk::<8>()?;
        let (policy, meta) = meta.split_first_chunk::<{ Policy::ENCODED_BYTES }>()?;
        let (reviewed, meta) = meta.split_first_chunk::<8>()?;
        let (etag_length, meta) = meta.split_first_chunk::<2>()?;
        let (etag, tags) = meta.split_at_checked(usize::from(u16::from_le_bytes(*etag_length)))?;
        Some(Self::Response(ResponseEntry {
            status: u16::from_le_bytes(*status),
            is_file: matches!(kind, FILE | FILE_BY_CODING),
            is_by_coding: matches!(kind, RESPONSE_BY_CODING | FILE_BY_CODING),
            policy: Policy::from_bytes(policy)?,
            reviewed: Reviewed::from_bytes(*reviewed),
            last_modified_s: Some(u64::from_le_bytes(*last_modified)).filter(|seconds| *seconds != u64::MAX),
            etag: Some(etag).filter(|etag| !etag.is_empty()),
            tags,
        }))
    }
}

impl ResponseEntry<'_> {
    /// The form in which an object carries it.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        let etag = self.etag.filter(|etag| etag.len() <= usize::from(u16::MAX)).unwrap_or(b"");
        out.push(match (self.is_file, self.is_by_coding) {
            (false, false) => RESPONSE,
            (false, true) => RESPONSE_BY_CODING,
            (true, false) => FILE,
            (true, true) => FILE_BY_CODING,
        });
        out.extend_from_slice(&self.status.to_le_bytes());
        out.extend_from_slice(&self.last_modified_s.unwrap_or(u64::MAX).to_le_bytes());
        out.extend_from_slice(&self.policy.to_bytes());
        out.extend_from_slice(&self.reviewed.to_bytes());
        out.extend_from_slice(&(etag.len() as u16).to_le_bytes());
        out.extend_from_slice(etag);
        out.extend_from_slice(self.tags);
    }
}

/// The entry of a URL whose responses vary.
pub(crate) fn encode_variants(generation: u64, names: &[u8], out: &mut Vec<u8>) {
    out.push(VARIANTS);
    out.extend_from_slice(&generation.to_le_bytes());
    out.extend_from_slice(names);
}

/// Writes the key of a URL. The scheme, the host and whatever else a trusted proxy says about the URL are part of it as
/// the origin is told them.
#[inline]
pub(crate) fn write_url_key(normalized: &Normalized<'_>, info: &ClientInfo<'_>, out: &mut Vec<u8>) {
    out.clear();
    // At once, and not piece by piece.
    let query_bytes = normalized.query.map_or(0, <[u8]>::len);
    out.reserve(b"https://?".len() + normalized.authority.len() + normalized.path.len() + query_bytes);
    out.extend_from_slice(if info.https { b"https://" } else { b"http://" });
    out.extend_from_slice(normalized.authority);
    out.extend_from_slice(normalized.path);
    if let Some(query) = normalized.query {
        out.push(b'?');
        out.extend_from_slice(query);
    }
    if let Some(host) = info.host.filter(|host| *host != normalized.authority) {
        out.extend_from_slice(&[KEY_SEPARATOR, OTHER_HOST]);
        out.extend_from_slice(host);
    }
    if let Some(claims) = &info.claims {
        out.extend_from_slice(&[KEY_SEPARATOR, OTHER_CLAIMS]);
        claims.write(out);
    }
}

/// Turns a URL's key into that of the variant that these request fields select.
pub(crate) fn append_variant(
    generation: u64,
    names: &[u8],
    fields: tidegate_http::Fields<'_>,
    own_cookie: &[u8],
    key: &mut Vec<u8>,
) {
    key.push(KEY_SEPARATOR);
    key.extend_from_slice(&generation.to_le_bytes());
    let (by_coding, names) = split_by_coding(names);
    if by_coding {
        key.push(b'0' + compression::accepted_on_the_way(&fields));
    }
    vary::write_secondary_key(names, &fields, own_cookie, key);
}

/// Makes `names`, which have `accept-encoding`, those of a response that varies by codings because of the compression here.
pub(crate) fn name_by_coding(names: &[u8]) -> Vec<u8> {
    let others = names.split(|byte| *byte == b',').filter(|name| *name != b"accept-encoding");
    std::iter::once(BY_CODING).chain(others).collect::<Vec<_>>().join(&b","[..])
}

/// Whether names are such, and what else is among them.
fn split_by_coding(names: &[u8]) -> (bool, &[u8]) {
    match names.strip_prefix(BY_CODING) {
        Some(others) => (true, others.strip_prefix(b",").unwrap_or(others)),
        None => (false, names),
    }
}

/// What [`append_variant`] wrote after the generation, to be shown: the codings accepted, if they select, and the fields.
pub(crate) fn read_variant<'n>(
    names: &'n [u8],
    secondary: &[u8],
) -> Option<(Option<u8>, Vec<vary::Selecting<'n>>)> {
    let (by_coding, names) = split_by_coding(names);
    let (mask, secondary) = match by_coding {
        true => secondary.split_first().map(|(mask, rest)| (Some(mask.wrapping_sub(b'0')), rest))?,
        false => (None, secondary),
    };
    Some((mask, vary::read_secondary_key(names, secondary)?))
}

/// Writes the key of the file that has this path, which begins with a slash, below a root; the codings that its readers
/// accept are the last byte, and before them is what routes change of its head. Of roots one of which lies in the other
/// each has its own: what one of them hides is nothing to be found under the key of the other.
#[inline]
pub(crate) fn write_file_key(
    root: &[u8],
    path: impl FnOnce(&mut Vec<u8>),
    changes: u64,
    codings: u8,
    out: &mut Vec<u8>,
) {
    out.clear();
    out.extend_from_slice(FILE_SCHEME);
    out.extend_from_slice(root);
    out.push(KEY_SEPARATOR);
    path(out);
    out.push(KEY_SEPARATOR);
    out.extend_from_slice(&changes.to_le_bytes());
    out.push(codings);
}

/// What [`write_file_key`] wrote a key of.
pub(crate) struct FileKey<'k> {
    pub root: &'k [u8],
    pub path: &'k [u8],
    pub codings: u8,
}

impl<'k> FileKey<'k> {
    /// `None` if it is the key of something else.
    pub(crate) fn read(key: &'k [u8]) -> Option<Self> {
        let (&codings, rest) = key.strip_prefix(FILE_SCHEME)?.split_last()?;
        let (rest, _changes) = rest.split_last_chunk::<8>()?;
        let rest = rest.strip_suffix(&[KEY_SEPARATOR])?;
        let root = url_of(rest);
        Some(Self { root, path: rest.get(root.len() + 1..)?, codings })
    }

    /// Its path in the file system.
    pub(crate) fn absolute(&self) -> Vec<u8> {
        [self.root, self.path].concat()
    }
}

/// Whether `tag` is among `tags`.
fn has_tag(tags: &[u8], tag: &[u8]) -> bool {
    tags.split(|byte| matches!(byte, b' ' | b',' | b'\t')).any(|known| known == tag)
}

/// The URL's part of a key.
pub(crate) fn url_of(key: &[u8]) -> &[u8] {
    let end = memchr::memchr(KEY_SEPARATOR, key).unwrap_or(key.len());
    key.get(..end).unwrap_or(key)
}

/// What a purge removes.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum PurgePattern {
    /// Everything.
    All,
    /// The URL with all its variants.
    Url(String),
    /// Every URL that begins like this.
    Prefix(String),
    /// Every response that carries this tag.
    Tag(String),
    /// A static file by its path in the file system.
    File(Vec<u8>),
    /// Every static file whose path begins like this.
    Files(Vec<u8>),
}

/// Why a text is not a purge pattern.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "expected http[s]://HOST/PATH, http[s]://HOST/PATH*, /PATH, /PATH*, file:/PATH, file:/PATH*, tag:NAME or *"
)]
pub struct PurgePatternError;

impl FromStr for PurgePattern {
    type Err = PurgePatternError;

    fn from_str(text: &str) -> Result<Self, PurgePatternError> {
        if text == "*" {
            return Ok(Self::All);
        }
        if let Some(tag) = text.strip_prefix("tag:") {
            return if tag.is_empty() { Err(PurgePatternError) } else { Ok(Self::Tag(tag.into())) };
        }
        if let Some(path) = text.strip_prefix("file:") {
            return match path.strip_suffix('*') {
                _ if !path.starts_with('/') => Err(PurgePatternError),
                Some(prefix) => Ok(Self::Files(prefix.into())),
                None => Ok(Self::File(path.into())),
            };
        }
        if without_scheme(text).is_none() && !text.starts_with('/') {
            return Err(PurgePatternError);
        }
        Ok(match text.strip_suffix('*') {
            Some(prefix) => Self::Prefix(prefix.into()),
            None => Self::Url(text.into()),
        })
    }
}

impl PurgePattern {
    /// The pattern with its URL in the form in which URLs are stored.
    ///
    /// # Errors
    /// No request can have such a URL.
    pub(crate) fn normalized(&self, personality: Personality) -> Result<Self, PurgePatternError> {
        Ok(match self {
            Self::Url(url) => Self::Url(normalized_url(url, personality)?),
            Self::Prefix(prefix) => Self::Prefix(normalized_url(prefix, personality)?),
            other => other.clone(),
        })
    }

    /// Host, or nothing for any, and path of a normalized pattern of URLs, without the query; and whether more may
    /// follow.
    pub(crate) fn of_url(&self) -> Option<(&[u8], &[u8], bool)> {
        let (url, is_prefix) = match self {
            Self::Url(url) => (url, false),
            Self::Prefix(prefix) => (prefix, true),
            _ => return None,
        };
        let after_scheme = without_scheme(url).unwrap_or(url).as_bytes();
        let (host, path) = after_scheme.split_at(after_scheme.iter().position(|byte| *byte == b'/')?);
        // No file has a query: what asks for one means responses of upstreams.
        (!path.contains(&b'?')).then_some((host, path, is_prefix))
    }

    /// Removes what matches any of the patterns; says how many responses went.
    pub(crate) fn purge(patterns: &[Self], store: &Store) -> u64 {
        let mut removed = 0;
        store.for_each(|key, info: &ObjectInfo<'_>| {
            if !patterns.iter().any(|pattern| pattern.matches(key, info.meta)) {
                return Visit::Keep;
            }
            removed += u64::from(matches!(Entry::decode(info.meta), Some(Entry::Response(_))));
            Visit::Remove
        });
        removed
    }

    fn matches(&self, key: &[u8], meta: &[u8]) -> bool {
        // A pattern without a host means that path on every host.
        let comparable = |pattern: &str| {
            let url = url_of(key);
            if pattern.starts_with('/') { path_of(url).to_vec() } else { url.to_vec() }
        };
        if let Some(file) = FileKey::read(key) {
            return match self {
                Self::All => true,
                Self::File(path) => file.absolute() == *path,
                Self::Files(prefix) => file.absolute().starts_with(prefix),
                // Which URLs lead to it depends on the routes.
                Self::Url(_) | Self::Prefix(_) | Self::Tag(_) => false,
            };
        }
        match self {
            Self::All => true,
            Self::File(_) | Self::Files(_) => false,
            Self::Url(url) => comparable(url) == url.as_bytes(),
            Self::Prefix(prefix) => comparable(prefix).starts_with(prefix.as_bytes()),
            Self::Tag(tag) => {
                matches!(Entry::decode(meta), Some(Entry::Response(entry)) if has_tag(entry.tags, tag.as_bytes()))
            }
        }
    }
}

/// A URL, or a path, as a request for it is stored: it is read as part of a request.
fn normalized_url(url: &str, personality: Personality) -> Result<String, PurgePatternError> {
    let (host, target) = match without_scheme(url) {
        None => (None, url),
        Some(rest) => match rest.find('/') {
            Some(slash) => (Some(&rest[..slash]), &rest[slash..]),
            // The start of a host, or a host alone: there is no path to normalize.
            None => return Ok(url.to_ascii_lowercase()),
        },
    };
    let info = ClientInfo {
        client: IpAddr::V4(Ipv4Addr::LOCALHOST),
        via_proxy: false,
        is_encrypted: false,
        https: url.starts_with("https://"),
        host: None,
        claims: None,
    };
    let mut bytes = b"GET ".to_vec();
    for byte in target.bytes() {
        match byte {
            b'!'..=b'~' => bytes.push(byte),
            _ => bytes.extend_from_slice(format!("%{byte:02X}").as_bytes()),
        }
    }
    let host_field = host.unwrap_or("any");
    let host_field = host_field.strip_suffix(":443").filter(|_| info.https).unwrap_or(host_field);
    bytes.extend_from_slice(format!(" HTTP/1.1\r\nHost: {host_field}\r\n\r\n").as_bytes());
    let mut parser = RequestParser::new(HeadLimits::default());
    let Ok(Progress::Complete { .. }) = parser.parse(&bytes) else { return Err(PurgePatternError) };
    let mut scratch = Vec::new();
    let normalized =
        normalize(&parser.head(&bytes), personality, &mut scratch).map_err(|_| PurgePatternError)?;
    let mut key = Vec::new();
    write_url_key(&normalized, &info, &mut key);
    let key = String::from_utf8(key).map_err(|_| PurgePatternError)?;
    Ok(if host.is_some() { key } else { String::from_utf8_lossy(path_of(key.as_bytes())).into_owned() })
}

fn without_scheme(url: &str) -> Option<&str> {
    url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"))
}

/// The path and query of a key's URL.
fn path_of(url: &[u8]) -> &[u8] {
    let https = url.strip_prefix(b"https://");
    let after_scheme = https.or_else(|| url.strip_prefix(b"http://")).unwrap_or(url);
    let start = after_scheme.iter().position(|byte| *byte == b'/').unwrap_or(after_scheme.len());
    after_scheme.get(start..).unwrap_or(b"")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_read() {
        assert_eq!("*".parse(), Ok(PurgePattern::All));
        assert_eq!("tag:news".parse(), Ok(PurgePattern::Tag("news".into())));
        assert_eq!("http://a/b".parse(), Ok(PurgePattern::Url("http://a/b".into())));
        assert_eq!("/b/*".parse(), Ok(PurgePattern::Prefix("/b/".into())));
        for wrong in ["", "tag:", "news", "ftp://a/", "file:", "file:a"] {
            assert_eq!(wrong.parse::<PurgePattern>(), Err(PurgePatternError), "{wrong:?}");
        }
    }

    #[test]
    fn patterns_are_read_as_requests_are() {
        for (pattern, stored) in [
            ("http://A.example:80/%7Ex/../y", "http://a.example/y"),
            ("http://a.example/%7ex", "http://a.example/~x"),
            ("/d//e?q=1", "/d/e?q=1"),
            ("https://A.example:443/%7Ex", "https://a.example/~x"),
            ("/sp x", "/sp%20x"),
            ("/ü*", "/%C3%BC"),
            ("http://A.exa*", "http://a.exa"),
        ] {
            let pattern: PurgePattern = pattern.parse().unwrap();
            let (PurgePattern::Url(url) | PurgePattern::Prefix(url)) =
                pattern.normalized(Personality::Strict).unwrap()
            else {
                panic!("{pattern:?}")
            };
            assert_eq!(url, stored);
        }
        let wrong: PurgePattern = "http://a/%zz".parse().unwrap();
        assert_eq!(wrong.normalized(Personality::Strict), Err(PurgePatternError));
    }

    #[test]
    fn patterns_match_urls_and_their_variants() {
        let matches = |pattern: &str, key: &[u8]| pattern.parse::<PurgePattern>().unwrap().matches(key, b"");
        assert!(matches("http://a/b", b"http://a/b"));
        assert!(matches("http://a/b", b"http://a/b\0variant"));
        assert!(!matches("http://a/b", b"http://a/bc"));
        assert!(matches("http://a/b*", b"http://a/bc"));
        assert!(matches("/b?q=1", b"http://any.example:81/b?q=1"));
        assert!(!matches("/b", b"http://b/c"));
    }

    #[test]
    fn patterns_match_files_in_whichever_root_they_lie() {
        let matches = |pattern: &str, root: &str, path: &str| {
            let mut key = Vec::new();
            write_file_key(root.as_bytes(), |key| key.extend_from_slice(path.as_bytes()), 7, 3, &mut key);
            pattern.parse::<PurgePattern>().unwrap().matches(&key, b"")
        };
        for (root, path) in [("/srv", "/a/b"), ("/srv/a", "/b")] {
            assert!(matches("file:/srv/a/b", root, path));
            assert!(matches("file:/srv/*", root, path));
            assert!(matches("*", root, path));
            for other in
                ["file:/srv/a", "file:/srv/a/bc", "file:/srv/b*", "/srv", "/srv*", "/srv/a/b", "tag:x"]
            {
                assert!(!matches(other, root, path), "{other}");
            }
        }
        assert!(!"file:/srv/*".parse::<PurgePattern>().unwrap().matches(b"http://a/srv/b", b""));
    }

    #[test]
    fn a_file_below_two_roots_has_two_keys_and_each_is_read_as_it_was_written() {
        let key = |root: &[u8], path: &[u8], changes, codings| {
            let mut key = Vec::new();
            write_file_key(root, |key| key.extend_from_slice(path), changes, codings, &mut key);
            key
        };
        assert_ne!(key(b"/srv", b"/.hidden/x", 0, 0), key(b"/srv/.hidden", b"/x", 0, 0));
        assert_ne!(key(b"/srv", b"/x", 1, 0), key(b"/srv", b"/x", 2, 0));
        for (codings, changes) in [(0, 0), (1, 1), (2, u64::MAX), (3, 0x0100)] {
            let key = key(b"/srv/a", b"/b", changes, codings);
            let read = FileKey::read(&key).unwrap();
            assert_eq!((read.root, read.path, read.codings), (&b"/srv/a"[..], &b"/b"[..], codings));
        }
        for other in [
            &b"http://a/b"[..],
            b"file:",
            b"file:/srv",
            b"file:/srv/b\0\x03",
            b"file:/srv/b\0\0\0\0\0\0\0\0\0",
        ] {
            assert!(FileKey::read(other).is_none(), "{other:?}");
        }
    }

    #[test]
    fn damaged_entries_are_no_entries() {
        for meta in [&b""[..], &[RESPONSE], &[RESPONSE, 0, 0, 1], &[VARIANTS, 1], &[9; 200]] {
            assert!(Entry::decode(meta).is_none(), "{meta:?}");
        }
    }
}
