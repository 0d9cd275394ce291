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
        [(0, None, "plain"), (0b100, Some(Coding::Gzip), "gzip"), (0b101, Some(Coding::Br), "brotli")]
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
    assert_eq!(root.lookup(b"/a b.css", 0b101).unwrap().content_encoding, Some(Coding::Br));
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

#[test]
fn a_tree_with_too_many_directories_is_refused_and_the_first_too_many_is_named() {
    let site = site();
    let path = site.path().join("root");
    let error = Watcher::with_limit(&path, 1, |_| {}).err().unwrap().to_string();
    assert_eq!(error, format!("{}: more than 1 directories", path.join("sub").display()));
}

#[test]
fn a_limit_that_is_reached_is_told_with_the_directory_and_the_setting() {
    let error = watch::unwatched(Path::new("/srv/www/a"), Errno::NOSPC);
    let text = error.to_string();
    assert!(text.starts_with("/srv/www/a: ") && text.contains("fs.inotify.max_user_watches"), "{text}");
}

/// Without a watch, a file in it would stay in the cache for ever.
#[test]
fn after_a_new_directory_that_cannot_be_watched_anything_may_have_changed_again_and_again() {
    let site = site();
    let path = site.path().join("root");
    let (sender, receiver) = channel();
    let _watcher = Watcher::with_limit(&path, 2, move |path| {
        let _ = sender.send(path.to_path_buf());
    })
    .unwrap();
    std::fs::create_dir(path.join("later")).unwrap();
    for _ in 0..3 {
        wait_for(&receiver, "");
    }
}

#[test]
fn a_directory_that_comes_with_the_next_release_and_cannot_be_watched_is_noticed() {
    let site = site();
    let link = site.path().join("current");
    symlink("root", &link).unwrap();
    let (sender, receiver) = channel();
    let _watcher = Watcher::with_limit(&link, 2, move |path| {
        let _ = sender.send(path.to_path_buf());
    })
    .unwrap();
    std::fs::create_dir_all(site.path().join("next/a/b")).unwrap();
    symlink("next", site.path().join("new")).unwrap();
    std::fs::rename(site.path().join("new"), &link).unwrap();
    for _ in 0..3 {
        wait_for(&receiver, "");
    }
}

/// As a user who may not read all directories, which root may: the user of this thread, and of those it starts, alone.
fn as_nobody(act: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            if rustix::process::geteuid().is_root() {
                let nobody = rustix::fs::Uid::from_raw(65_534);
                rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
            }
            act();
        });
    });
}

#[test]
fn directories_that_may_be_passed_but_not_read_have_linked_files_until_they_may_be_read() {
    use std::os::unix::fs::PermissionsExt;

    let site = site();
    let path = site.path().join("root");
    let mode = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    std::fs::create_dir(path.join("sub/deep")).unwrap();
    for file in ["sub/file", "sub/deep/file"] {
        std::fs::write(path.join(file), "x").unwrap();
        mode(&path.join(file), 0o666);
    }
    mode(site.path(), 0o755);
    // Without the bit for reading, whether its owner asks or somebody else.
    mode(&path.join("sub"), 0o311);
    let (sender, receiver) = channel();
    as_nobody(|| {
        let root = StaticRoot::open(&path).unwrap();
        let is_linked = |name: &[u8]| root.lookup(name, 0).unwrap().is_linked;
        assert_eq!([&b"/"[..], b"/sub/file", b"/sub/deep/file"].map(is_linked), [false, true, true]);
        let (watcher, changes) = watch(&path);
        sender.send((watcher, changes)).unwrap();
    });
    let (_watcher, changes) = receiver.recv().unwrap();
    mode(&path.join("sub"), 0o755);
    wait_for(&changes, "");
    std::fs::write(path.join("sub/deep/file"), "y").unwrap();
    wait_for(&changes, "sub/deep/file");
    as_nobody(|| {
        let root = StaticRoot::open(&path).unwrap();
        assert!(!root.lookup(b"/sub/file", 0).unwrap().is_linked);
    });
}
