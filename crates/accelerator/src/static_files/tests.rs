use std::io::Read;
use std::os::unix::fs::symlink;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use super::*;

fn site() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("root");
    std::fs::create_dir_all(root.join("sub")).unwrap();
    std::fs::write(root.join("index.html"), "home").unwrap();
    std::fs::write(root.join("a b.css"), "plain").unwrap();
    std::fs::write(root.join("a b.css.br"), "brotli").unwrap();
    std::fs::write(root.join("a b.css.gz"), "gzip").unwrap();
    std::fs::write(root.join(".secret"), "secret").unwrap();
    std::fs::write(directory.path().join("outside"), "outside").unwrap();
    symlink("../outside", root.join("escape")).unwrap();
    symlink(directory.path().join("outside"), root.join("absolute")).unwrap();
    symlink("index.html", root.join("inside")).unwrap();
    symlink("/proc/self/root/etc/passwd", root.join("magic")).unwrap();
    rustix::fs::mknodat(CWD, root.join("fifo"), FileType::Fifo, Mode::RUSR, 0).unwrap();
    directory
}

fn text(file: StaticFile) -> String {
    let mut text = String::new();
    let mut file = file.file;
    file.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn files_are_found_with_their_types() {
    let site = site();
    let root = StaticRoot::open(&site.path().join("root")).unwrap();
    let file = root.lookup(b"/", 0).unwrap();
    assert_eq!((file.stamp.length, file.content_type, file.vary), (4, "text/html; charset=utf-8", false));
    assert_eq!(text(file), "home");
    assert_eq!(text(root.lookup(b"/inside", 0).unwrap()), "home");
}

#[test]
fn precompressed_siblings_go_to_those_who_accept_them() {
    let site = site();
    let root = StaticRoot::open(&site.path().join("root")).unwrap();
    for (mask, coding, content) in
        [(0, None, "plain"), (0b100, Some("gzip"), "gzip"), (0b101, Some("br"), "brotli")]
    {
        let file = root.lookup(b"/a b.css", mask).unwrap();
        assert_eq!((file.content_encoding, file.vary), (coding, true));
        assert_eq!(file.content_type, "text/css; charset=utf-8");
        assert_eq!(text(file), content);
    }
    let etags: std::collections::BTreeSet<_> =
        [0, 0b100, 0b001].map(|mask| root.lookup(b"/a b.css", mask).unwrap().etag).into();
    assert_eq!(etags.len(), 3, "each coding has an entity tag of its own");
}

#[test]
fn sibling_older_than_its_file_is_left_alone() {
    let site = site();
    let root = StaticRoot::open(&site.path().join("root")).unwrap();
    let gzip = File::options().write(true).open(site.path().join("root/a b.css.gz")).unwrap();
    gzip.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    assert_eq!(root.lookup(b"/a b.css", 0b100).unwrap().content_encoding, None);
    assert_eq!(root.lookup(b"/a b.css", 0b101).unwrap().content_encoding, Some("br"));
}

#[test]
fn nothing_outside_the_root_is_served() {
    let site = site();
    let root = StaticRoot::open(&site.path().join("root")).unwrap();
    for path in [
        &b"/escape"[..],
        b"/absolute",
        b"/magic",
        b"/../outside",
        b"/sub/../../outside",
        b"//etc/passwd",
        b"/.secret",
        b"/fifo",
        b"/none",
        b"/index.html/x",
        b"index.html",
        b"/a\0b",
    ] {
        let result = root.lookup(path, 0);
        assert!(matches!(result, Err(StaticError::NotFound)), "{}", String::from_utf8_lossy(path));
    }
    assert!(matches!(root.lookup(b"/sub", 0), Err(StaticError::NeedsTrailingSlash)));
}

#[test]
fn an_edit_changes_the_entity_tag() {
    let site = site();
    let path = site.path().join("root");
    let root = StaticRoot::open(&path).unwrap();
    let before = root.lookup(b"/index.html", 0).unwrap().etag;
    std::fs::write(path.join("new"), "HOME").unwrap();
    std::fs::rename(path.join("new"), path.join("index.html")).unwrap();
    assert_ne!(root.lookup(b"/index.html", 0).unwrap().etag, before);
}

#[test]
fn preloading_visits_what_would_be_served() {
    let site = site();
    let root = StaticRoot::open(&site.path().join("root")).unwrap();
    std::fs::write(site.path().join("root/sub/deep.js"), "1").unwrap();
    let mut seen = Vec::new();
    preload(&root, |path, _| seen.push(path.to_string_lossy().into_owned())).unwrap();
    seen.sort();
    assert_eq!(seen, ["a b.css", "a b.css.br", "a b.css.gz", "index.html", "inside", "sub/deep.js"]);
}

fn watch(root: &Path) -> (Watcher, Receiver<PathBuf>) {
    let (sender, receiver) = channel();
    let watcher = Watcher::spawn(root, move |path| {
        let _ = sender.send(path.to_path_buf());
    });
    (watcher.unwrap(), receiver)
}

fn wait_for(receiver: &Receiver<PathBuf>, wanted: &str) {
    loop {
        let path = receiver.recv_timeout(Duration::from_secs(20)).expect("the change is noticed");
        if path == Path::new(wanted) {
            return;
        }
    }
}

#[test]
fn edits_replacements_and_new_directories_are_noticed() {
    let site = site();
    let path = site.path().join("root");
    let (_watcher, receiver) = watch(&path);
    std::fs::write(path.join("index.html"), "in place").unwrap();
    wait_for(&receiver, "index.html");
    std::fs::write(path.join("sub/new"), "x").unwrap();
    std::fs::rename(path.join("sub/new"), path.join("sub/final")).unwrap();
    wait_for(&receiver, "sub/final");
    std::fs::create_dir(path.join("later")).unwrap();
    wait_for(&receiver, "");
    std::fs::write(path.join("later/page.html"), "x").unwrap();
    wait_for(&receiver, "later/page.html");
}
