//! Stored responses as an operator sees them.

use std::borrow::Cow;

use tidegate_store::{ObjectInfo, Store, Visit};
use xxhash_rust::xxh3::xxh3_64;

use crate::cache::entries::{Entry, FileKey, KEY_SEPARATOR, OTHER_CLAIMS, OTHER_HOST, read_variant, url_of};
use crate::compression;

/// Request fields that let their bearer in somewhere: of their values only a hash is shown.
const SECRET: [&str; 3] = ["authorization", "cookie", "proxy-authorization"];

/// A request field and its value, `None` if the request must not have it.
pub type SelectingField = (String, Option<String>);

/// A stored response as `tidegate cache list` shows it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct CacheEntry {
    /// The normalized URL, or `file:` and the path for a static file.
    pub url: String,
    /// The status code.
    pub status: u16,
    /// Bytes of the body.
    pub size_bytes: u64,
    /// RFC 9111 §4.2.3, in seconds.
    pub age_s: u64,
    /// Seconds of freshness left; negative when stale, `None` for what does not expire.
    pub ttl_s: Option<i64>,
    /// Cache tags, separated by spaces or commas.
    pub tags: String,
    /// The request fields that tell it from other responses of its URL; `key` with a hash where they are not known any
    /// more.
    pub selected_by: Vec<SelectingField>,
}

impl CacheEntry {
    /// At most `limit` stored responses.
    pub(crate) fn list(store: &Store, limit: usize) -> Vec<Self> {
        let now_s = std::time::UNIX_EPOCH.elapsed().map_or(0, |elapsed| elapsed.as_secs());
        let mut entries = Vec::new();
        store.for_each(|key, info: &ObjectInfo<'_>| {
            if entries.len() >= limit {
                return Visit::Stop;
            }
            if let Some(Entry::Response(entry)) = Entry::decode(info.meta) {
                let ttl_s = (!entry.policy.never_expires()).then(|| entry.policy.ttl_s(now_s));
                let listed = Self {
                    url: String::from_utf8_lossy(&shown(key)).into_owned(),
                    status: entry.status,
                    size_bytes: info.body_length,
                    age_s: entry.policy.age_s(now_s),
                    ttl_s,
                    tags: String::from_utf8_lossy(entry.tags).into_owned(),
                    selected_by: Vec::new(),
                };
                entries.push((key.to_vec(), listed));
            }
            Visit::Keep
        });
        // What is in the store can be looked up only now.
        let with_fields =
            |(key, entry): (Vec<u8>, Self)| Self { selected_by: selected_by(store, &key), ..entry };
        entries.into_iter().map(with_fields).collect()
    }
}

/// What a key is shown as: as a pattern it means what is stored there.
fn shown(key: &[u8]) -> Cow<'_, [u8]> {
    match FileKey::read(key) {
        Some(file) => [b"file:", file.absolute().as_slice()].concat().into(),
        None => url_of(key).into(),
    }
}

/// What follows the URL in a key, as request fields.
fn selected_by(store: &Store, key: &[u8]) -> Vec<SelectingField> {
    if let Some(FileKey { codings: mask, .. }) = FileKey::read(key) {
        return match mask {
            0 => Vec::new(),
            mask => vec![("accept-encoding".into(), Some(compression::listed(mask)))],
        };
    }
    let url_bytes = url_of(key).len();
    let variant = memchr::memchr_iter(KEY_SEPARATOR, key).find_map(|at| variant(store, key, at));
    let (url_key, fields) = variant.unwrap_or((key, Vec::new()));
    match claims(url_key.get(url_bytes..).unwrap_or(b"")) {
        Some(claims) => claims.into_iter().chain(fields).collect(),
        None => vec![("key".into(), Some(hash(&key[url_bytes..])))],
    }
}

/// The key of the URL that ends `at`, and the fields by which a variant of it is selected, if `key` is that of one.
fn variant<'k>(store: &Store, key: &'k [u8], at: usize) -> Option<(&'k [u8], Vec<SelectingField>)> {
    let (url_key, rest) = key.split_at_checked(at)?;
    let (own, secondary) = rest.get(1..)?.split_first_chunk::<8>()?;
    let object = store.get(url_key)?;
    let Some(Entry::Variants { generation, names }) = Entry::decode(object.meta()) else { return None };
    if generation != u64::from_le_bytes(*own) {
        return None;
    }
    let (mask, fields) = read_variant(names, secondary)?;
    let fields = fields.iter().map(|(name, value)| field(name, value.as_deref()));
    let coded = mask.map(|mask| ("accept-encoding".into(), (mask > 0).then(|| compression::listed(mask))));
    Some((url_key, coded.into_iter().chain(fields).collect()))
}

/// What a trusted proxy said of the URL, as [`crate::cache::entries::write_url_key`] wrote it.
fn claims(mut rest: &[u8]) -> Option<Vec<SelectingField>> {
    let mut fields = Vec::new();
    while let [KEY_SEPARATOR, kind, after @ ..] = rest {
        let (value, others) = after.split_at(url_of(after).len());
        match *kind {
            OTHER_HOST => fields.push(field(b"x-forwarded-host", Some(value))),
            OTHER_CLAIMS => {
                for line in value.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
                    let colon = memchr::memchr(b':', line)?;
                    fields.push(field(&line[..colon], Some(&line[colon + 1..])));
                }
            }
            _ => return None,
        }
        rest = others;
    }
    rest.is_empty().then_some(fields)
}

fn field(name: &[u8], value: Option<&[u8]>) -> SelectingField {
    let name = String::from_utf8_lossy(name).into_owned();
    let shown = |value: &[u8]| match SECRET.contains(&name.as_str()) {
        true => hash(value),
        // A terminal may show it.
        false => String::from_utf8_lossy(value).replace(char::is_control, "\u{fffd}"),
    };
    let value = value.map(shown);
    (name, value)
}

fn hash(bytes: &[u8]) -> String {
    format!("#{:08x}", xxh3_64(bytes) as u32)
}
