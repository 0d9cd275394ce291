//! A directory served as a site.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::collections::HashMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tempfile::TempDir;
use tidegate_e2e::{Origin, Reply, Tidegate, content, eventually};

struct Site {
    directory: TempDir,
    tidegate: Tidegate,
}

/// A root with a secret beside it.
fn site(files: &[(&str, &[u8])]) -> Site {
    site_with_cache(files, "")
}

fn site_with_cache(files: &[(&str, &[u8])], cache: &str) -> Site {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("site");
    fs::create_dir(&root).unwrap();
    fs::write(directory.path().join("secret.txt"), "secret").unwrap();
    for (name, bytes) in files {
        let path = root.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    let route = format!("root = \"{}\"", root.display());
    let tidegate = Tidegate::builder().cache(cache).route("/", &route).start();
    Site { directory, tidegate }
}

impl Site {
    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join("site").join(name)
    }
}

#[test]
fn files_have_the_type_of_their_name() {
    let site = site(&[
        ("index.html", b"<p>home"),
        ("a.css", b"p{}"),
        ("a.js", b"1"),
        ("a.svg", b"<svg/>"),
        ("a.json", b"{}"),
        ("a.unknown", b"?"),
        ("sub/index.html", b"<p>sub"),
    ]);
    for (target, kind) in [
        ("/", "text/html"),
        ("/sub/", "text/html"),
        ("/a.css", "text/css"),
        ("/a.js", "text/javascript"),
        ("/a.svg", "image/svg+xml"),
        ("/a.json", "application/json"),
        ("/a.unknown", "application/octet-stream"),
    ] {
        let response = site.tidegate.get(target);
        assert_eq!(response.status, 200, "{target}");
        assert!(response.field("Content-Type").starts_with(kind), "{target}: {response:?}");
    }
    assert_eq!(site.tidegate.get("/nothing").status, 404);
    let post = site.tidegate.connect().request("POST", "/a.css", "Content-Length: 0\r\n");
    assert_eq!(post.status, 405);
    assert!(post.field("Allow").contains("GET"), "{post:?}");
}

#[test]
fn file_the_client_has_already_is_304_and_a_range_is_cut() {
    let bytes = content(5, 200_000);
    let site = site(&[("big.bin", &bytes)]);
    let whole = site.tidegate.get("/big.bin");
    assert!(whole.body == bytes);
    let tag = whole.field("ETag");
    assert!(!tag.is_empty(), "{whole:?}");
    assert_eq!(site.tidegate.get_with("/big.bin", &format!("If-None-Match: {tag}\r\n")).status, 304);
    let modified = whole.field("Last-Modified");
    assert_eq!(site.tidegate.get_with("/big.bin", &format!("If-Modified-Since: {modified}\r\n")).status, 304);
    let part = site.tidegate.get_with("/big.bin", "Range: bytes=100000-100099\r\n");
    assert_eq!((part.status, part.field("Content-Range").as_str()), (206, "bytes 100000-100099/200000"));
    assert!(part.body == bytes[100_000..100_100]);
}

#[test]
fn precompressed_sibling_is_served_to_who_takes_it() {
    let site = site(&[("a.css", b"plain"), ("a.css.gz", b"gzipped"), ("a.css.br", b"brotli")]);
    let plain = site.tidegate.get("/a.css");
    assert_eq!((plain.text().as_str(), plain.fields.get("Content-Encoding")), ("plain", None));
    assert!(plain.field("Vary").to_ascii_lowercase().contains("accept-encoding"), "{plain:?}");
    for (accepted, coding, text) in [("gzip", "gzip", "gzipped"), ("gzip, br", "br", "brotli")] {
        let response = site.tidegate.get_with("/a.css", &format!("Accept-Encoding: {accepted}\r\n"));
        assert_eq!((response.field("Content-Encoding").as_str(), response.text().as_str()), (coding, text));
        assert!(response.field("Content-Type").starts_with("text/css"), "{response:?}");
    }
    // RFC 9110 §12.4.2: what the client wants most, and only among equals what takes the fewest bytes.
    for (accepted, text) in [
        ("gzip;q=0, br;q=0", "plain"),
        ("gzip;q=0.000, br;Q=0.001", "brotli"),
        ("br;q=0.5, gzip", "gzipped"),
        ("br; q=0.4, gzip;q=0.5", "gzipped"),
        ("br;q=0.5, gzip;q=0.50", "brotli"),
        ("br, gzip;q=0.9", "brotli"),
        ("br;q=2, gzip;q=x", "plain"),
    ] {
        let response = site.tidegate.get_with("/a.css", &format!("Accept-Encoding: {accepted}\r\n"));
        assert_eq!(response.text(), text, "{accepted}");
    }
}

#[test]
fn nothing_outside_the_root_is_served() {
    let site = site(&[("index.html", b"home"), ("sub/a.txt", b"a")]);
    symlink(site.directory.path().join("secret.txt"), site.path("link.txt")).unwrap();
    symlink("../secret.txt", site.path("relative.txt")).unwrap();
    symlink(site.directory.path(), site.path("up")).unwrap();
    for target in [
        "/../secret.txt",
        "/sub/../../secret.txt",
        "/%2e%2e/secret.txt",
        "/..%2fsecret.txt",
        "/sub/..%2f..%2fsecret.txt",
        "/..%5csecret.txt",
        "/%252e%252e/secret.txt",
        "//../secret.txt",
        "/link.txt",
        "/relative.txt",
        "/up/secret.txt",
        "/up/site/../secret.txt",
    ] {
        let response = site.tidegate.get(target);
        assert!((400..500).contains(&response.status), "{target}: {response:?}");
        assert!(!response.text().contains("secret"), "{target}: {response:?}");
    }
}

#[test]
fn what_a_root_hides_stays_hidden_when_a_root_within_it_serves_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    for name in ["site/.preview/x.txt", "outside/y.txt", "site/shared/z.txt"] {
        fs::create_dir_all(path(name).parent().unwrap()).unwrap();
        fs::write(path(name), name).unwrap();
    }
    symlink(path("outside"), path("site/intranet")).unwrap();
    let root =
        |host: &str, name: &str| format!("[[route]]\nhost = \"{host}\"\nroot = \"{}\"", path(name).display());
    let tidegate = Tidegate::builder()
        .tables(&root("public.example", "site"))
        .tables(&root("preview.example", "site/.preview"))
        .tables(&root("intranet.example", "site/intranet"))
        .tables(&root("shared.example", "site/shared"))
        .start();
    let get = |host: &str, target: &str| {
        let mut client = tidegate.connect();
        client.send(format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
        client.response()
    };
    // All of it is in the cache, for those who may have it.
    assert_eq!(get("preview.example", "/x.txt").text(), "site/.preview/x.txt");
    assert_eq!(get("intranet.example", "/y.txt").text(), "outside/y.txt");
    for target in ["/.preview/x.txt", "/intranet/y.txt"] {
        assert_eq!(get("public.example", target).status, 404, "{target}");
    }
    // What both serve is one file to whoever edits or purges it.
    let both = [("public.example", "/shared/z.txt"), ("shared.example", "/z.txt")];
    for (host, target) in both {
        assert_eq!(get(host, target).text(), "site/shared/z.txt", "{host}");
    }
    let pattern = format!("file:{}", path("site/shared/z.txt").display());
    let listed = String::from_utf8(tidegate.command(&["cache", "list"]).stdout).unwrap();
    assert_eq!(listed.lines().filter(|line| line.contains(&pattern)).count(), 2, "{listed}");
    let purged = String::from_utf8(tidegate.command(&["cache", "purge", &pattern]).stdout).unwrap();
    assert!(purged.starts_with("2 "), "{purged}");
    fs::write(path("site/shared/z.txt"), "edited").unwrap();
    for (host, target) in both {
        eventually("the edited file is served", || (get(host, target).text() == "edited").then_some(()));
    }
}

#[test]
fn edited_sibling_is_served_anew_to_who_takes_it() {
    let site = site(&[("a.css", b"plain"), ("a.css.gz", b"old"), ("sub/index.html", b"plain")]);
    fs::write(site.path("sub/index.html.gz"), "old").unwrap();
    let gzipped = |target: &str| site.tidegate.get_with(target, "Accept-Encoding: gzip\r\n").text();
    for (target, sibling) in [("/a.css", "a.css.gz"), ("/sub/", "sub/index.html.gz")] {
        eventually("the sibling is served", || (gzipped(target) == "old").then_some(()));
        fs::write(site.path(sibling), "new").unwrap();
        eventually("the edited sibling is served", || (gzipped(target) == "new").then_some(()));
        assert_eq!(site.tidegate.get(target).text(), "plain");
    }
}

#[test]
fn edited_file_is_served_anew_whichever_way_it_is_saved() {
    let site = site(&[("page.html", b"old")]);
    assert_eq!(site.tidegate.get("/page.html").text(), "old");
    for round in 0..3 {
        let text = format!("new {round}");
        // Both ways in which editors save: in place, and by renaming.
        if round == 1 {
            fs::write(site.path(".page.tmp"), &text).unwrap();
            fs::rename(site.path(".page.tmp"), site.path("page.html")).unwrap();
        } else {
            fs::write(site.path("page.html"), &text).unwrap();
        }
        eventually("the edited file is served", || {
            (site.tidegate.get("/page.html").text() == text).then_some(())
        });
    }
    fs::remove_file(site.path("page.html")).unwrap();
    eventually("the removed file is gone", || (site.tidegate.get("/page.html").status == 404).then_some(()));
}

#[test]
fn requests_at_once_for_a_file_that_is_not_in_the_cache_read_it_once() {
    let site = site(&[("marker.txt", b"old")]);
    assert_eq!(site.tidegate.get("/marker.txt").text(), "old");
    let bytes = content(5, 3 << 20);
    // Whoever waits for another's reading does so for a while only, so that a slow disk may cost more than one.
    let read_by_sixteen = |attempt: u32| {
        let (large, new) = (format!("large-{attempt}.bin"), format!("new {attempt}"));
        // Made after the start, so that nothing has read it before.
        fs::write(site.path(&large), &bytes).unwrap();
        // Changes are seen in their order: once the later one is, the earlier one makes nobody read the file again.
        fs::write(site.path(".marker.tmp"), &new).unwrap();
        fs::rename(site.path(".marker.tmp"), site.path("marker.txt")).unwrap();
        eventually("the later change is seen", || {
            (site.tidegate.get("/marker.txt").text() == new).then_some(())
        });
        let before = site.tidegate.bytes_read();
        let barrier = Barrier::new(16);
        std::thread::scope(|scope| {
            for _ in 0..16 {
                scope.spawn(|| {
                    let mut client = site.tidegate.connect();
                    barrier.wait();
                    assert!(client.get(&format!("/{large}")).body == bytes);
                });
            }
        });
        site.tidegate.bytes_read() - before
    };
    let reads: Vec<u64> = (0..5).map(read_by_sixteen).collect();
    let least = reads.iter().min().unwrap();
    assert!(*least < 2 * bytes.len() as u64, "{reads:?} bytes were read for files of {}", bytes.len());
}

#[test]
fn file_behind_a_link_is_served_anew_when_it_changes() {
    let site = tempfile::tempdir().unwrap();
    let path = |name: &str| site.path().join(name);
    for release in ["one", "two"] {
        std::fs::create_dir_all(path(&format!("releases/{release}"))).unwrap();
        std::fs::write(path(&format!("releases/{release}/page.txt")), release).unwrap();
    }
    std::fs::create_dir(path("root")).unwrap();
    std::fs::rename(path("releases"), path("root/releases")).unwrap();
    std::os::unix::fs::symlink("releases/one", path("root/current")).unwrap();
    std::fs::write(path("root/target.txt"), "old").unwrap();
    std::os::unix::fs::symlink("target.txt", path("root/link.txt")).unwrap();
    let target = format!("root = \"{}\"", path("root").display());
    let tidegate = Tidegate::builder().route("/", &target).start();
    assert_eq!(tidegate.get("/current/page.txt").text(), "one");
    assert_eq!(tidegate.get("/link.txt").text(), "old");
    std::os::unix::fs::symlink("releases/two", path("root/next")).unwrap();
    std::fs::rename(path("root/next"), path("root/current")).unwrap();
    std::fs::write(path("root/target.txt"), "new").unwrap();
    eventually("the switch is seen", || (tidegate.get("/current/page.txt").text() == "two").then_some(()));
    eventually("the edit is seen", || (tidegate.get("/link.txt").text() == "new").then_some(()));
}

#[test]
fn root_that_is_a_link_is_followed_when_it_points_elsewhere() {
    let site = tempfile::tempdir().unwrap();
    let path = |name: &str| site.path().join(name);
    for release in ["one", "two"] {
        std::fs::create_dir(path(release)).unwrap();
        std::fs::write(path(release).join("page.txt"), release).unwrap();
    }
    std::os::unix::fs::symlink("one", path("current")).unwrap();
    let target = format!("root = \"{}\"", path("current").display());
    let tidegate = Tidegate::builder().route("/", &target).start();
    assert_eq!(tidegate.get("/page.txt").text(), "one");
    // There is always something to notice in the directory that it has pointed to.
    let (done, log) = (AtomicBool::new(false), path("one/log"));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                fs::write(&log, "a line").unwrap();
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        std::os::unix::fs::symlink("two", path("next")).unwrap();
        std::fs::rename(path("next"), path("current")).unwrap();
        let switched = std::panic::catch_unwind(|| {
            eventually("the switch is seen", || (tidegate.get("/page.txt").text() == "two").then_some(()));
        });
        done.store(true, Ordering::Relaxed);
        switched.unwrap();
    });
    std::fs::write(path("two/page.txt"), "edited").unwrap();
    eventually("the new directory is watched", || {
        (tidegate.get("/page.txt").text() == "edited").then_some(())
    });
}

#[test]
fn a_file_has_one_path_whatever_stands_encoded_in_it() {
    let directory = tempfile::tempdir().unwrap();
    for (name, text) in [("dir/f.txt", "v1"), ("private/x", "secret"), ("pub/a", "a"), ("a;b.txt", "c")] {
        let path = directory.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    let origin = Origin::start(|request| {
        Reply::ok(format!("from the origin: {}", request.target)).with("Cache-Control", "no-store")
    });
    let tidegate = Tidegate::builder()
        .group("app", &[origin.address()], "")
        .route("/", &format!("root = \"{}\"", directory.path().display()))
        .route("/private/", "upstream = \"app\"")
        .route("/app/", "upstream = \"app\"")
        .tables("[[request]]\npath = \"/pub/*\"\naction = \"refuse\"")
        .tables("[[filter]]\npath = \"/app/admin\"")
        .tables("[[exempt]]\nsource = \"192.0.2.1\"")
        .start();
    let status = |target: &str| tidegate.get(target).status;
    assert_eq!(tidegate.get("/dir/f.txt").text(), "v1");
    assert_eq!(tidegate.get("/a;b.txt").text(), "c");
    for alias in ["/dir%2Ff.txt", "/dir%2f%2Ff.txt", "/dir%5Cf.txt", "/private%2Fx", "/;y/private/x"] {
        assert_eq!(status(alias), 404, "{alias}");
    }
    assert!(tidegate.get("/private/x").text().starts_with("from the origin"));
    for refused in ["/pub/a", "/pub%2Fa", "/pub;x/a", "/%3B/pub/a"] {
        assert_eq!(status(refused), 503, "{refused}");
    }
    assert_eq!(status("/app/other;x"), 200);
    for refused in ["/app/admin", "/app/;x/admin", "/app/%2Fadmin/x", "/app//admin"] {
        assert_eq!(status(refused), 403, "{refused}");
    }
    assert_eq!(status("/app/..;/x"), 400);
    // What was asked for by its right name stays right.
    fs::write(directory.path().join("dir/f.txt"), "v2").unwrap();
    eventually("the edited file is served", || (tidegate.get("/dir/f.txt").text() == "v2").then_some(()));
    assert_eq!(status("/dir%2Ff.txt"), 404);
}

/// Has room for files of an eighth of it.
const LARGE_CACHE: &str = "memory = \"512MiB\"\n";

/// Requests a large file until it is sent from its own pages. What sendfile takes from a file counts as read, a copy of
/// the cache's does not; but what is read into the cache does, so that several in a row count.
fn open(site: &Site, name: &str) {
    let length = fs::metadata(site.path(name)).unwrap().len();
    let is_sent_from_file = || {
        let before = site.tidegate.bytes_read();
        let response = site.tidegate.get(&format!("/{name}"));
        assert_eq!(response.body.len() as u64, length);
        site.tidegate.open_files().contains(&site.path(name)) && site.tidegate.bytes_read() - before >= length
    };
    eventually("it is sent by sendfile", || (0..4).all(|_| is_sent_from_file()).then_some(()));
}

#[test]
fn a_large_file_is_sent_from_its_own_pages_whole_in_part_and_to_slow_readers() {
    let bytes = content(11, 9_000_001);
    let site = site_with_cache(&[("large.bin", &bytes), ("small.bin", b"small")], LARGE_CACHE);
    open(&site, "large.bin");
    let mut slow = site.tidegate.connect();
    slow.send("GET /large.bin HTTP/1.1\r\nHost: a\r\n\r\nGET /small.bin HTTP/1.1\r\nHost: a\r\n\r\n");
    for (range, part) in
        [("0-0", &bytes[..1]), ("4000000-", &bytes[4_000_000..]), ("-100000", &bytes[8_900_001..])]
    {
        let response = site.tidegate.get_with("/large.bin", &format!("Range: bytes={range}\r\n"));
        assert_eq!(response.status, 206, "{range}");
        assert!(response.body == part, "{range}");
    }
    assert!(site.tidegate.connect().request("HEAD", "/large.bin", "").body.is_empty());
    assert!(slow.response().body == bytes);
    assert_eq!(slow.response().body, b"small");
}

#[test]
fn a_large_file_that_is_edited_while_it_is_sent_goes_on_as_it_was() {
    const LENGTH: usize = 40_000_000;
    /// More than what the sockets of both sides hold.
    const REST: usize = 20_000_000;
    let bytes = content(1, LENGTH);
    let site = site_with_cache(&[("large.bin", &bytes)], LARGE_CACHE);
    open(&site, "large.bin");
    let mut slow = site.tidegate.connect();
    slow.send("GET /large.bin HTTP/1.1\r\nHost: a\r\n\r\n");
    // Some of it is on its way.
    std::thread::sleep(Duration::from_millis(200));
    fs::write(site.path("large.bin"), content(2, LENGTH)).unwrap();
    let body = slow.response().body;
    assert_eq!(body.len(), LENGTH);
    assert!(body[LENGTH - REST..] == bytes[LENGTH - REST..], "the end is another version's");
}

#[test]
fn a_client_that_ends_in_mid_download_changes_nothing_for_the_others() {
    let bytes = content(1, 40_000_000);
    let site = site_with_cache(&[("large.bin", &bytes)], LARGE_CACHE);
    open(&site, "large.bin");
    for _ in 0..3 {
        let mut gone = site.tidegate.connect();
        gone.send("GET /large.bin HTTP/1.1\r\nHost: a\r\n\r\n");
        gone.read_bytes(1000);
        drop(gone);
    }
    // Still from its own pages.
    open(&site, "large.bin");
}

#[test]
fn a_large_file_that_is_replaced_over_and_over_always_has_the_bytes_of_its_entity_tag() {
    let site = site(&[("large.bin", &content(0, 300_000))]);
    open(&site, "large.bin");
    let mut known: HashMap<String, Vec<u8>> = HashMap::new();
    for version in 1..60 {
        fs::write(site.path(".next"), content(version, 300_000)).unwrap();
        fs::rename(site.path(".next"), site.path("large.bin")).unwrap();
        for _ in 0..5 {
            let response = site.tidegate.get("/large.bin");
            let versions = 0..=version;
            assert!(versions.rev().any(|version| response.body == content(version, 300_000)), "mixed");
            let known = known.entry(response.field("ETag")).or_insert_with(|| response.body.clone());
            assert!(*known == response.body, "an entity tag of two versions");
        }
    }
    eventually("the last version", || {
        (site.tidegate.get("/large.bin").body == content(59, 300_000)).then_some(())
    });
}

#[test]
fn a_large_file_that_was_edited_or_removed_is_not_kept_open_as_it_was() {
    let site = site(&[("large.bin", &content(1, 300_000))]);
    open(&site, "large.bin");
    // Edited where it lies, to the same length.
    fs::write(site.path("large.bin"), content(2, 300_000)).unwrap();
    eventually("the edited file", || {
        (site.tidegate.get("/large.bin").body == content(2, 300_000)).then_some(())
    });
    open(&site, "large.bin");
    // Edited, and the time of its modification set back.
    let modified = fs::metadata(site.path("large.bin")).unwrap().modified().unwrap();
    let mut file = fs::OpenOptions::new().write(true).open(site.path("large.bin")).unwrap();
    file.write_all(&content(3, 300_000)).unwrap();
    file.set_modified(modified).unwrap();
    drop(file);
    eventually("the file edited again", || {
        (site.tidegate.get("/large.bin").body == content(3, 300_000)).then_some(())
    });
    open(&site, "large.bin");
    fs::remove_file(site.path("large.bin")).unwrap();
    eventually("it is closed", || {
        let open = site.tidegate.open_files();
        (!open.iter().any(|path| path.to_string_lossy().contains("large.bin"))).then_some(())
    });
    eventually("it is gone", || (site.tidegate.get("/large.bin").status == 404).then_some(()));
}

#[test]
fn more_large_files_than_are_kept_open_are_all_served() {
    let files: Vec<(String, Vec<u8>)> = (0..300).map(|n| (format!("{n}.bin"), content(n, 50_000))).collect();
    let named: Vec<(&str, &[u8])> = files.iter().map(|(name, bytes)| (&name[..], &bytes[..])).collect();
    let site = site(&named);
    for _ in 0..3 {
        for (name, bytes) in &files {
            assert!(site.tidegate.get(&format!("/{name}")).body == *bytes, "{name}");
        }
    }
    let open = site
        .tidegate
        .open_files()
        .iter()
        .filter(|path| path.extension().is_some_and(|it| it == "bin"))
        .count();
    assert!((1..=256).contains(&open), "{open}");
}

#[test]
fn a_file_from_the_future_was_not_modified_after_it_is_sent() {
    let site = site(&[("tomorrow.txt", b"0123456789")]);
    let tomorrow = std::time::SystemTime::now() + Duration::from_secs(86_400);
    fs::File::options().write(true).open(site.path("tomorrow.txt")).unwrap().set_modified(tomorrow).unwrap();
    let date = site.tidegate.get("/tomorrow.txt").field("Date");
    let response = site.tidegate.get_with("/tomorrow.txt", &format!("If-Unmodified-Since: {date}\r\n"));
    assert_eq!(response.status, 200, "{date}: {response:?}");
}
