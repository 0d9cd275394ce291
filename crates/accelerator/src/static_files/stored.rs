//! A file as an object of the cache: its content, compressed or not, and the head that clients get before it.

use std::borrow::Cow;
use std::io::{self, Read};

use tidegate_http::cache::Policy;
use tidegate_http::forward::write_field;
use tidegate_http::{FieldId, FieldRules, date};
use tidegate_store::{Object, Store, Writer};

use crate::cache::entries::{Entry, ResponseEntry};
use crate::compression;
use crate::icap::Reviewed;
use crate::settings::Coding;
use crate::static_files::StaticFile;

/// For how many seconds a file is served from the cache that can change unnoticed.
const LINKED_S: u32 = 1;

/// What is stored of a linked file, if the file is still the same: good for another second.
pub(super) fn confirm(store: &Store, key: &[u8], file: &StaticFile, rules: &FieldRules) -> Option<Object> {
    let stored = store.get(key).filter(|_| file.is_linked)?;
    let Some(Entry::Response(entry)) = Entry::decode(stored.meta()) else { return None };
    let coding = file.wanted.filter(|_| entry.is_by_coding);
    if entry.etag != Some(etag(file, coding).as_bytes()) {
        return None;
    }
    let (meta, head) = meta_and_head(file, coding, rules);
    store.replace_meta(key, &stored, &meta, &head).ok()
}

/// The date of a file's last change that clients are told: none to come (RFC 9110 §8.8.2.1).
pub(super) fn modified_s(file: &StaticFile, now_s: u64) -> u64 {
    file.stamp.modified_s().min(now_s)
}

/// The entity tag of a file that is compressed here with `coding`, if with any: a weak one then, since another version of
/// this program may make something else of it.
fn etag(file: &StaticFile, coding: Option<Coding>) -> Cow<'_, str> {
    match coding {
        None => Cow::Borrowed(&file.etag),
        Some(coding) => Cow::Owned(format!("W/{}", file.stamp.etag(Some(coding)))),
    }
}

/// What is stored with a file's content, which is compressed here with `coding`, if with any.
fn meta_and_head(file: &StaticFile, coding: Option<Coding>, rules: &FieldRules) -> (Vec<u8>, Vec<u8>) {
    let now_s = std::time::UNIX_EPOCH.elapsed().map_or(0, |now| now.as_secs());
    let modified_s = modified_s(file, now_s);
    (file_meta(file, coding, modified_s, now_s), file_head(file, coding, modified_s, rules))
}

fn file_meta(file: &StaticFile, coding: Option<Coding>, modified_s: u64, now_s: u64) -> Vec<u8> {
    let mut meta = Vec::with_capacity(128);
    let etag = etag(file, coding);
    let entry = ResponseEntry {
        status: 200,
        is_file: true,
        is_by_coding: coding.is_some(),
        policy: match file.is_linked {
            false => Policy::default(),
            true => Policy::fresh_for(LINKED_S, now_s),
        },
        reviewed: Reviewed::BY_NOBODY,
        last_modified_s: Some(modified_s),
        etag: Some(etag.as_bytes()),
        tags: b"",
    };
    entry.encode(&mut meta);
    meta
}

/// Reads a file into the cache, compressed if that is wanted and of use; it stays there only if nothing changed meanwhile.
pub(super) fn store_file(
    store: &Store,
    key: &[u8],
    mut file: StaticFile,
    rules: &FieldRules,
    is_current: impl Fn() -> bool,
) -> Option<Object> {
    let writer = match file.wanted {
        Some(coding) => write_compressed(store, key, &mut file, coding, rules)?,
        None => {
            let (meta, head) = meta_and_head(&file, None, rules);
            let mut writer = store.insert_sized(key, &meta, &head, file.stamp.length).ok()?;
            read(&mut file, |piece| writer.write(piece).is_ok())?;
            writer
        }
    };
    let object = writer.commit();
    if !is_current() {
        store.remove(key);
    }
    Some(object)
}

fn write_compressed(
    store: &Store,
    key: &[u8],
    file: &mut StaticFile,
    coding: Coding,
    rules: &FieldRules,
) -> Option<Writer> {
    let mut content = Vec::with_capacity(usize::try_from(file.stamp.length).ok()?);
    read(file, |piece| {
        content.extend_from_slice(piece);
        true
    })?;
    let compressed = compression::compress_whole(&content, coding);
    let (meta, head) = meta_and_head(file, compressed.is_some().then_some(coding), rules);
    let content = compressed.unwrap_or(content);
    let mut writer = store.insert_sized(key, &meta, &head, content.len() as u64).ok()?;
    writer.write(&content).ok()?;
    Some(writer)
}

/// Hands on all of a file, if that is as long as it was.
fn read(file: &mut StaticFile, mut take: impl FnMut(&[u8]) -> bool) -> Option<()> {
    let mut buffer = vec![0; 64 * 1024];
    let mut left = file.stamp.length;
    loop {
        match file.file.read(&mut buffer) {
            Ok(0) => return (left == 0).then_some(()),
            Ok(length) => {
                left = left.checked_sub(length as u64)?;
                take(&buffer[..length]).then_some(())?;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return None,
        }
    }
}

/// The head that clients get before a file, with what its route changes.
pub(super) fn file_head(
    file: &StaticFile,
    coding: Option<Coding>,
    modified_s: u64,
    rules: &FieldRules,
) -> Vec<u8> {
    const CHANGEABLE: [(FieldId, &[u8]); 3] = [
        (FieldId::ContentType, b"Content-Type"),
        (FieldId::Etag, b"ETag"),
        (FieldId::LastModified, b"Last-Modified"),
    ];
    let mut head = Vec::with_capacity(256);
    head.extend_from_slice(b"HTTP/1.1 200 OK\r\n");
    let (etag, modified) = (etag(file, coding), date::format(modified_s));
    let values = [file.content_type.as_bytes(), etag.as_bytes(), &modified];
    let removes = |id, name: &[u8]| rules.removes(id, name);
    for ((id, name), value) in CHANGEABLE.into_iter().zip(values) {
        if !removes(id, name) {
            write_field(name, value, &mut head);
        }
    }
    let has_kept = |is_named: &dyn Fn(_, &[u8]) -> bool| {
        CHANGEABLE.iter().any(|(id, name)| !removes(*id, name) && is_named(*id, name))
    };
    rules.write(has_kept, &mut head);
    write_field(b"Accept-Ranges", b"bytes", &mut head);
    if let Some(coding) = coding.or(file.content_encoding) {
        write_field(b"Content-Encoding", coding.name().as_bytes(), &mut head);
    }
    if file.vary {
        write_field(b"Vary", b"Accept-Encoding", &mut head);
    }
    head
}
