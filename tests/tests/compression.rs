//! Content codings for clients that accept them (RFC 9110 §8.4.1).
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::fs;
use std::io::{Read, Write};

use tidegate_e2e::{Gate, Origin, Reply, Request, Response, Tidegate, content, eventually};

const ALL: &str = "[compression]\ncodings = [\"zstd\", \"br\", \"gzip\"]\n";

/// Without anybody who finds that compressing is stress.
const UNWATCHED: &str = "[defence]\nenabled = false\n";

fn before(origin: &Origin, tables: &str) -> Tidegate {
    Tidegate::builder().top("workers = 1").origin(origin).tables(&format!("{tables}{UNWATCHED}")).start()
}

/// Some page that is worth it.
fn page() -> String {
    (0..400).map(|line| format!("<li>line {line} of a page that is worth compressing\n")).collect()
}

fn html(body: impl Into<Vec<u8>>) -> Reply {
    Reply::cacheable(body).with("Content-Type", "text/html; charset=utf-8")
}

fn accepting(codings: &str) -> String {
    format!("Accept-Encoding: {codings}\r\n")
}

/// The content without its coding.
fn decoded(response: &Response) -> Vec<u8> {
    let (mut out, body) = (Vec::new(), &response.body[..]);
    match response.field("Content-Encoding").as_str() {
        "" => return body.to_vec(),
        "br" => brotli::Decompressor::new(body, 4096).read_to_end(&mut out),
        "zstd" => zstd::stream::read::Decoder::new(body).unwrap().read_to_end(&mut out),
        "gzip" => flate2::read::GzDecoder::new(body).read_to_end(&mut out),
        other => panic!("an unknown coding: {other}"),
    }
    .unwrap();
    out
}

#[test]
fn each_client_gets_a_coding_that_it_accepts_and_the_cache_keeps_one_of_each() {
    let origin = Origin::start(|_| html(page()).with("ETag", "\"v1\"").with("Accept-Ranges", "bytes"));
    let tidegate = before(&origin, ALL);
    for (number, (accepted, coding)) in
        [("gzip, deflate, br, zstd", "zstd"), ("gzip, deflate, br", "br"), ("gzip", "gzip"), ("identity", "")]
            .into_iter()
            .enumerate()
    {
        for round in 0..2 {
            let response = tidegate.get_with("/", &accepting(accepted));
            assert_eq!(response.field("Content-Encoding"), coding, "{response:?}");
            assert_eq!(response.fields.all("Vary"), ["Accept-Encoding"], "{response:?}");
            assert_eq!(String::from_utf8(decoded(&response)).unwrap(), page());
            assert_eq!(response.is_hit(), round == 1, "{response:?}");
            assert_eq!(response.field("ETag"), if coding.is_empty() { "\"v1\"" } else { "W/\"v1\"" });
            assert_eq!(response.field("Content-Length"), response.body.len().to_string());
            assert_eq!(response.body.len() < page().len() / 4, !coding.is_empty());
            assert_eq!(response.fields.get("Accept-Ranges").is_some(), coding.is_empty());
        }
        assert_eq!(origin.count(), number + 1);
    }
    assert!((tidegate.metric("tidegate_compressed_responses_total") - 3.0).abs() < 0.1);
    let bytes = |name: &str| tidegate.metric(&format!("tidegate_compressed_{name}"));
    assert!((bytes("input_bytes_total") - 3.0 * page().len() as f64).abs() < 0.1);
    assert!(bytes("bytes_total") > 100.0 && bytes("bytes_total") < bytes("input_bytes_total") / 4.0);
}

/// Whoever writes the field differently each time must not get past the cache by it.
#[test]
fn what_is_said_of_codings_that_come_into_question_nowhere_selects_nothing() {
    let origin = Origin::start(|_| html(page()));
    let tidegate = before(&origin, "[compression]\ncodings = [\"gzip\"]\n");
    for weight in 1..20 {
        let accepted = accepting(&format!("x-{weight}, gzip;q=0.{weight:02}, deflate;q=0.{weight}"));
        let response = tidegate.get_with("/", &accepted);
        assert_eq!(response.field("Content-Encoding"), "gzip", "{response:?}");
    }
    assert_eq!(origin.count(), 1);
    let listed = tidegate.command(&["cache", "list"]);
    assert!(String::from_utf8_lossy(&listed.stdout).contains("accept-encoding: gzip"), "{listed:?}");
    // Where the origin has made a difference itself, it is the origin's that counts.
    let origin = Origin::start(|_| html(page()).with("Vary", "Accept-Encoding"));
    let tidegate = before(&origin, "[compression]\ncodings = [\"gzip\"]\n");
    for weight in 1..4 {
        let response = tidegate.get_with("/", &accepting(&format!("gzip;q=0.{weight}")));
        assert_eq!(response.field("Content-Encoding"), "gzip", "{response:?}");
        assert_eq!(response.fields.all("Vary"), ["Accept-Encoding"], "{response:?}");
    }
    assert_eq!(origin.count(), 3);
}

#[test]
fn nothing_is_compressed_that_nobody_has_asked_for() {
    let origin = Origin::start(|_| html(page()));
    let tidegate = before(&origin, "");
    let response = tidegate.get_with("/", &accepting("gzip, br, zstd"));
    assert_eq!(response.fields.get("Content-Encoding"), None);
    assert_eq!(response.fields.get("Vary"), None);
}

#[test]
fn what_must_stay_as_it_is_stays_as_it_is() {
    let origin = Origin::start(|request| match request.target.as_str() {
        "/coded" => html("already").with("Content-Encoding", "br"),
        "/no-transform" => html(page()).with("Cache-Control", "no-transform"),
        "/md5" => html(page()).with("Content-MD5", "abc"),
        "/old-digest" => html(page()).with("Digest", "sha-256=abc"),
        "/digest" => html(page()).with("Content-Digest", "sha-256=:abc=:"),
        "/whole-digest" => html(page()).with("Repr-Digest", "sha-256=:abc=:"),
        "/digest-to-come" => html(page()).with("Trailer", "X-Sum, repr-digest"),
        "/picture" => Reply::cacheable(page()).with("Content-Type", "image/png"),
        "/untyped" => Reply::cacheable(page()),
        "/short" => html("short"),
        "/part" => {
            let part = Reply::status(206, &page()[..2000]).with("Content-Type", "text/html");
            part.with("Content-Range", &format!("bytes 0-1999/{}", page().len()))
        }
        _ => html(page()).with("Content-Encoding", "identity"),
    });
    let tidegate = before(&origin, ALL);
    let digests = ["/md5", "/old-digest", "/digest", "/whole-digest", "/digest-to-come"];
    for target in
        ["/coded", "/no-transform", "/picture", "/untyped", "/short", "/part"].iter().chain(&digests)
    {
        let target = *target;
        let ranges = if target == "/part" { "Range: bytes=0-1999\r\n" } else { "" };
        let response = tidegate.get_with(target, &format!("{ranges}{}", accepting("gzip, br, zstd")));
        let coding = response.fields.get("Content-Encoding");
        assert_eq!(coding.as_deref(), (target == "/coded").then_some("br"), "{response:?}");
        assert_eq!(response.fields.get("Vary"), None, "{response:?}");
    }
    let response = tidegate.get_with("/", &accepting("gzip"));
    assert_eq!(response.fields.all("Content-Encoding"), ["gzip"], "{response:?}");
    assert_eq!(String::from_utf8(decoded(&response)).unwrap(), page());
}

#[test]
fn answer_to_head_is_like_one_to_get() {
    let origin = Origin::start(|_| Reply::ok(page()).with("Content-Type", "text/css").with("ETag", "\"v1\""));
    let tidegate = before(&origin, ALL);
    let head = tidegate.connect().request("HEAD", "/", &accepting("gzip"));
    assert_eq!(head.field("Content-Encoding"), "gzip");
    assert_eq!(head.field("ETag"), "W/\"v1\"");
    assert_eq!(head.field("Vary"), "Accept-Encoding");
    assert_eq!(head.fields.get("Content-Length"), None, "{head:?}");
    let origin = Origin::start(|_| html(page()).with("ETag", "\"v1\""));
    let tidegate = before(&origin, ALL);
    tidegate.get_with("/", &accepting("zstd"));
    let get = tidegate.get_with("/", &accepting("zstd"));
    let head = tidegate.connect().request("HEAD", "/", &accepting("zstd"));
    for name in ["Content-Encoding", "Content-Length", "Content-Type", "ETag", "Vary", "Accept-Ranges"] {
        assert_eq!(head.fields.all(name), get.fields.all(name), "{name}");
    }
    assert_eq!(get.field("Content-Length"), get.body.len().to_string());
}

#[test]
fn client_that_wishes_nobody_to_change_the_content_gets_it_as_it_is() {
    let origin = Origin::start(|_| html(page()));
    let tidegate = before(&origin, ALL);
    let unchanged = format!("Cache-Control: no-transform\r\n{}", accepting("gzip"));
    for _ in 0..2 {
        let response = tidegate.get_with("/", &unchanged);
        assert_eq!(response.fields.get("Content-Encoding"), None, "{response:?}");
        assert_eq!(response.body, page().as_bytes());
        assert_eq!(tidegate.get_with("/", &accepting("gzip")).field("Content-Encoding"), "gzip");
    }
    assert!(tidegate.get_with("/", &unchanged).is_hit());
    assert_eq!(origin.count(), 2);
}

/// The date is the same, the bytes of what is compressed anew are perhaps not (RFC 9110 §13.1.5).
#[test]
fn part_of_what_is_compressed_is_not_continued_by_its_date() {
    const MODIFIED: &str = "Sun, 06 Nov 1994 08:49:37 GMT";
    let origin = Origin::start(|request| {
        let reply = html(page()).with("Last-Modified", MODIFIED);
        if request.target == "/tagged" { reply.with("ETag", "\"v1\"") } else { reply }
    });
    let tidegate = before(&origin, ALL);
    for target in ["/", "/tagged"] {
        let whole = tidegate.get_with(target, &accepting("br"));
        for condition in [MODIFIED, "\"v1\"", "W/\"v1\""] {
            let range = format!("Range: bytes=10-\r\nIf-Range: {condition}\r\n{}", accepting("br"));
            let response = tidegate.get_with(target, &range);
            assert_eq!((response.status, &response.body), (200, &whole.body), "{target} {condition}");
        }
    }
    tidegate.get_with("/tagged", &accepting("identity"));
    for condition in [MODIFIED, "\"v1\""] {
        let range = format!("Range: bytes=10-19\r\nIf-Range: {condition}\r\n{}", accepting("identity"));
        let response = tidegate.get_with("/tagged", &range);
        assert_eq!((response.status, &response.body[..]), (206, &page().as_bytes()[10..20]), "{condition}");
    }
}

#[test]
fn trailers_say_nothing_of_bytes_that_are_others_now() {
    let origin = Origin::start(|_| {
        Reply::script(|stream| {
            let head = "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nTransfer-Encoding: chunked\r\n\r\n";
            let trailers =
                "Content-MD5: a\r\nX-Sum: 7\r\nDigest: a\r\nContent-Digest: a\r\nrepr-digest: a\r\n";
            write!(stream, "{head}{:x}\r\n{}\r\n0\r\n{trailers}\r\n", page().len(), page())
        })
    });
    let tidegate = before(&origin, ALL);
    for (accepted, expected) in [("gzip", 1), ("identity", 5)] {
        let mut client = tidegate.connect();
        client.send(format!(
            "GET / HTTP/1.1\r\nHost: example.org\r\nTE: trailers\r\nConnection: close, TE\r\n{}\r\n",
            accepting(accepted)
        ));
        let all = client.rest();
        let end = all.windows(5).rposition(|window| window == b"\r\n0\r\n").unwrap();
        let trailers = String::from_utf8(all[end + 5..].to_vec()).unwrap();
        assert!(trailers.contains("X-Sum: 7\r\n"), "{trailers}");
        assert_eq!(trailers.trim_end().lines().count(), expected, "{trailers}");
    }
}

#[test]
fn requests_at_once_for_several_codings_each_get_theirs() {
    let gate = Gate::default();
    let opened = gate.clone();
    let origin = Origin::start(move |_| {
        opened.pass();
        html(page())
    });
    let tidegate = before(&origin, ALL);
    let codings = ["gzip", "br", "zstd", "", "gzip", "br", "zstd", "identity"];
    let mut clients: Vec<_> = codings
        .iter()
        .map(|coding| {
            let mut client = tidegate.connect();
            client.send(format!("GET / HTTP/1.1\r\nHost: example.org\r\n{}\r\n", accepting(coding)));
            client
        })
        .collect();
    eventually("they wait", || (tidegate.metric("tidegate_cache_collapsed_total") >= 7.0).then_some(()));
    gate.open();
    for (client, coding) in clients.iter_mut().zip(codings) {
        let response = client.response();
        assert_eq!(response.field("Content-Encoding"), if coding == "identity" { "" } else { coding });
        assert_eq!(decoded(&response), page().as_bytes(), "{coding}");
    }
    assert_eq!(origin.count(), 4, "one for each coding, and one for none");
}

#[test]
fn a_reload_and_a_restart_leave_what_is_stored_and_answer_by_it() {
    let origin = Origin::start(|_| html(page()).with("ETag", "\"v1\""));
    let builder = Tidegate::builder().top("workers = 1").origin(&origin).cache("path = \"@DIR@/cache\"");
    let mut tidegate = builder.tables(&format!("{ALL}{UNWATCHED}")).start();
    let ask = |tidegate: &Tidegate, target: &str, accepted: &str| {
        let response = tidegate.get_with(target, &accepting(accepted));
        assert_eq!(decoded(&response), page().as_bytes(), "{response:?}");
        (response.field("Content-Encoding"), response.is_hit())
    };
    let coded = |coding: &str, is_hit| (coding.to_owned(), is_hit);
    for accepted in ["gzip", "identity"] {
        ask(&tidegate, "/", accepted);
    }
    assert!(tidegate.terminate().success());
    tidegate.start();
    assert_eq!(ask(&tidegate, "/", "gzip"), coded("gzip", true));
    assert_eq!(ask(&tidegate, "/", "identity"), coded("", true));
    let text = fs::read_to_string(tidegate.config()).unwrap();
    let reload_with = |tidegate: &Tidegate, codings: &str| {
        tidegate.write_config(&text.replace("codings = [\"zstd\", \"br\", \"gzip\"]", codings));
        let reloaded = tidegate.command(&["reload"]);
        assert!(reloaded.status.success(), "{reloaded:?}");
    };
    reload_with(&tidegate, "codings = []");
    eventually("nothing is compressed any more", || {
        (ask(&tidegate, "/off", "br") == coded("", true)).then_some(())
    });
    assert_eq!(ask(&tidegate, "/", "gzip"), coded("gzip", true), "the client accepts it");
    assert_eq!(ask(&tidegate, "/", "identity"), coded("", true));
    reload_with(&tidegate, "codings = [\"br\"]");
    eventually("another coding is used", || {
        (ask(&tidegate, &format!("/{}", origin.count()), "gzip, br") == coded("br", false)).then_some(())
    });
    assert_eq!(ask(&tidegate, "/", "gzip"), coded("gzip", true), "the client accepts it");
}

/// Whether the request asks whether the representation with this tag is still good; weakly, as RFC 9110 §13.1.2 has it.
fn validates(request: &Request) -> bool {
    request.field("If-None-Match").trim_start_matches("W/") == "\"v1\""
}

#[test]
fn compressed_response_is_validated_by_its_weak_tag_and_stays() {
    let origin = Origin::start(|request| match (validates(request), request.target.as_str()) {
        // It says again what selects, as far as it knows.
        (true, "/varies") => Reply::status(304, "").with("ETag", "\"v1\"").with("Vary", "Cookie"),
        (true, _) => Reply::status(304, "").with("ETag", "\"v1\""),
        (false, target) => {
            let reply = html(page()).with("ETag", "\"v1\"").with("Age", "60");
            if target == "/varies" { reply.with("Vary", "Cookie") } else { reply }
        }
    });
    let tidegate = before(&origin, ALL);
    for target in ["/", "/varies"] {
        let before = origin.count();
        for accepted in ["br", "identity"] {
            tidegate.get_with(target, &accepting(accepted));
            let again = tidegate.get_with(target, &accepting(accepted));
            assert_eq!(String::from_utf8(decoded(&again)).unwrap(), page(), "{target} {accepted}");
            let coded = accepted == "br";
            assert_eq!(again.field("Content-Encoding"), if coded { "br" } else { "" });
            assert_eq!(again.field("ETag"), if coded { "W/\"v1\"" } else { "\"v1\"" });
            assert!(again.field("Vary").contains("Accept-Encoding"), "{again:?}");
            let asked = origin.last().field("If-None-Match");
            assert_eq!(asked, if coded { "W/\"v1\"" } else { "\"v1\"" });
            assert!(again.field("Cache-Status").contains("fwd-status=304"), "{again:?}");
        }
        assert_eq!(origin.count() - before, 4, "each was fetched once and validated once");
        let has_it = tidegate.get_with(target, &format!("If-None-Match: W/\"v1\"\r\n{}", accepting("br")));
        assert_eq!((has_it.status, has_it.field("ETag").as_str()), (304, "W/\"v1\""), "{has_it:?}");
    }
}

#[test]
fn client_that_has_what_is_not_stored_is_told_so_by_the_tag_it_knows() {
    let origin = Origin::start(|request| match request.field("If-None-Match").ends_with("\"v1, 2\"") {
        true => Reply::status(304, "").with("ETag", "\"v1, 2\"").with("Cache-Control", "private"),
        false => {
            let reply = Reply::ok(page()).with("Content-Type", "text/html").with("ETag", "\"v1, 2\"");
            reply.with("Cache-Control", "private")
        }
    });
    let tidegate = before(&origin, ALL);
    let first = tidegate.get_with("/", &accepting("gzip"));
    assert_eq!(first.field("ETag"), "W/\"v1, 2\"");
    for tag in ["W/\"v1, 2\"", "\"v1, 2\""] {
        let again = tidegate.get_with("/", &format!("If-None-Match: {tag}\r\n{}", accepting("gzip")));
        assert_eq!((again.status, again.field("ETag").as_str()), (304, tag), "{again:?}");
    }
}

#[test]
fn what_the_server_pauses_after_goes_on_at_once() {
    let gate = Gate::default();
    let opened = gate.clone();
    let origin = Origin::start(move |_| {
        let gate = opened.clone();
        Reply::script(move |stream| {
            stream.write_all(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-store\r\n\
                  Transfer-Encoding: chunked\r\n\r\nb\r\ndata: one\n\n\r\n",
            )?;
            gate.pass();
            stream.write_all(b"b\r\ndata: two\n\n\r\n0\r\nX-End: yes\r\n\r\n")
        })
    });
    let types = "[compression]\ncodings = [\"gzip\"]\ntypes = [\"text/*\"]\nmin_size = \"1B\"\n";
    let tidegate = before(&origin, types);
    let mut client = tidegate.connect();
    client.send("GET / HTTP/1.1\r\nHost: example.org\r\nTE: trailers\r\nAccept-Encoding: gzip\r\n\r\n");
    let (status, fields) = client.head();
    assert_eq!((status, fields.get("Content-Encoding").as_deref()), (200, Some("gzip")));
    let (mut received, mut seen) = (Vec::new(), Vec::new());
    while seen.len() < 11 {
        received.extend(client.chunk());
        seen.clear();
        // What there is so far: the end is not there yet.
        let mut decoder = flate2::read::GzDecoder::new(&received[..]);
        let mut byte = [0];
        while decoder.read(&mut byte).is_ok_and(|count| count == 1) {
            seen.push(byte[0]);
        }
    }
    assert_eq!(seen, b"data: one\n\n");
    assert!(!gate.is_open());
    gate.open();
    loop {
        let chunk = client.chunk();
        if chunk.is_empty() {
            break;
        }
        received.extend(chunk);
    }
    let mut all = String::new();
    flate2::read::GzDecoder::new(&received[..]).read_to_string(&mut all).unwrap();
    assert_eq!(all, "data: one\n\ndata: two\n\n");
}

#[test]
fn large_responses_come_whole_stored_or_not() {
    // Half of it is noise, which no coding makes shorter.
    let large: Vec<u8> = content(7, 3 << 20).into_iter().chain(page().repeat(100).into_bytes()).collect();
    let body = large.clone();
    let origin = Origin::start(move |request| {
        let reply = Reply::ok(body.clone()).with("Content-Type", "application/wasm");
        reply.with("Cache-Control", if request.target == "/kept" { "max-age=60" } else { "no-store" })
    });
    let tidegate = before(&origin, ALL);
    for coding in ["gzip", "br", "zstd"] {
        for target in ["/kept", "/passed", "/kept"] {
            let response = tidegate.get_with(target, &accepting(coding));
            assert_eq!(response.field("Content-Encoding"), coding);
            assert!(decoded(&response) == large, "{coding} {target}");
        }
    }
    assert_eq!(origin.count(), 6, "what is kept is fetched once for each coding");
}

#[test]
fn server_that_breaks_off_leaves_no_response_that_looks_whole() {
    let noise: Vec<u8> = content(3, 300_000);
    let origin = Origin::start(move |request| {
        let (length, storing) = (request.target.contains("length"), request.target.contains("kept"));
        let control = if storing { "max-age=60" } else { "no-store" };
        let body = if request.target.contains("long") { noise.clone() } else { page().into_bytes() };
        Reply::script(move |stream| {
            let framing = if length { "Content-Length: 900000" } else { "Transfer-Encoding: chunked" };
            let head = "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n";
            write!(stream, "{head}Cache-Control: {control}\r\n{framing}\r\n\r\n")?;
            match length {
                true => stream.write_all(&body),
                false => {
                    write!(stream, "{:x}\r\n", body.len())?;
                    stream.write_all(&body)?;
                    stream.write_all(b"\r\n")
                }
            }
        })
    });
    let tidegate = before(&origin, ALL);
    for coding in ["gzip", "br", "zstd"] {
        for target in ["/length-kept", "/length", "/kept", "/", "/long-length-kept", "/long-kept", "/long"] {
            let before = origin.count();
            for _ in 0..2 {
                let mut client = tidegate.connect();
                let fields = accepting(coding);
                client.send(format!(
                    "GET {target} HTTP/1.1\r\nHost: example.org\r\nConnection: close\r\n{fields}\r\n"
                ));
                let all = client.rest();
                let has_begun = all.starts_with(b"HTTP/1.1 200 ");
                assert!(has_begun || all.starts_with(b"HTTP/1.1 502 "), "{target} {coding}");
                assert!(has_begun || !target.contains("long"), "more than what is waited for came");
                assert!(!has_begun || !all.ends_with(b"0\r\n\r\n"), "{target} {coding}");
            }
            assert_eq!(origin.count() - before, 2, "nothing was stored: {target} {coding}");
        }
    }
}

/// A directory with these files as a site.
fn site(files: &[(&str, &[u8])], tables: &str) -> (tempfile::TempDir, Tidegate) {
    let directory = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        fs::write(directory.path().join(name), bytes).unwrap();
    }
    let root = format!("root = \"{}\"", directory.path().display());
    let tidegate = Tidegate::builder().top("workers = 1").route("/", &root).tables(tables).start();
    (directory, tidegate)
}

#[test]
fn files_are_compressed_once_and_anew_when_they_change() {
    let noise = content(9, 5000);
    let page = page();
    let large = page.repeat(40).into_bytes();
    let files: [(&str, &[u8]); 6] = [
        ("page.html", page.as_bytes()),
        ("large.css", &large),
        ("noise.txt", &noise),
        ("picture.png", page.as_bytes()),
        ("made.js", page.as_bytes()),
        ("short.html", b"<p>short"),
    ];
    let (directory, tidegate) = site(&files, ALL);
    fs::write(directory.path().join("made.js.gz"), b"made before").unwrap();
    for (target, bytes) in [("/page.html", page.as_bytes()), ("/large.css", &large)] {
        for coding in ["gzip", "br", "zstd", "identity"] {
            for _ in 0..3 {
                let response = tidegate.get_with(target, &accepting(coding));
                let expected = if coding == "identity" { "" } else { coding };
                assert_eq!(response.field("Content-Encoding"), expected, "{response:?}");
                assert_eq!(response.fields.all("Vary"), ["Accept-Encoding"], "{response:?}");
                assert_eq!(response.field("ETag").starts_with("W/"), coding != "identity", "{response:?}");
                assert!(decoded(&response) == bytes, "{target} {coding}");
                let condition = format!("If-None-Match: {}\r\n{}", response.field("ETag"), accepting(coding));
                assert_eq!(tidegate.get_with(target, &condition).status, 304, "{response:?}");
            }
        }
    }
    // What nobody has to wait for was read beforehand, or is being read.
    let misses = tidegate.metric("tidegate_cache_misses_total");
    assert!((6.0..=8.0).contains(&misses), "each coding of each file is made once: {misses}");
    let coding_of = |target: &str| tidegate.get_with(target, &accepting("gzip")).field("Content-Encoding");
    assert_eq!(coding_of("/noise.txt"), "", "it would be longer");
    assert!(tidegate.get_with("/noise.txt", &accepting("gzip")).body == noise);
    assert_eq!(coding_of("/picture.png"), "");
    assert_eq!(coding_of("/short.html"), "");
    eventually("the file that was made before is found", || {
        (tidegate.get_with("/made.js", &accepting("gzip")).body == b"made before").then_some(())
    });
    let changed = page.replace("line", "another line");
    fs::write(directory.path().join("page.html"), &changed).unwrap();
    eventually("the change is seen", || {
        let response = tidegate.get_with("/page.html", &accepting("br"));
        (response.field("Content-Encoding") == "br" && decoded(&response) == changed.as_bytes()).then_some(())
    });
}

#[test]
fn file_reached_by_a_link_is_compressed_and_followed() {
    let (directory, tidegate) = site(&[("a.html", page().as_bytes())], ALL);
    std::os::unix::fs::symlink("a.html", directory.path().join("link.html")).unwrap();
    for _ in 0..3 {
        let response = tidegate.get_with("/link.html", &accepting("gzip"));
        assert_eq!(response.field("Content-Encoding"), "gzip", "{response:?}");
        assert_eq!(decoded(&response), page().as_bytes());
        // Longer than such a file is taken for unchanged.
        std::thread::sleep(std::time::Duration::from_millis(700));
    }
}

#[test]
fn a_purge_removes_a_page_in_every_coding() {
    let origin = Origin::start(|_| html(page()).with("Cache-Tag", "news"));
    let tidegate = before(&origin, ALL);
    for pattern in ["http://example.org/", "http://example.org/*", "tag:news"] {
        for coding in ["gzip", "br", "zstd", "identity"] {
            tidegate.get_with("/", &accepting(coding));
            assert!(tidegate.get_with("/", &accepting(coding)).is_hit());
        }
        let purged = tidegate.command(&["cache", "purge", pattern]);
        assert!(purged.status.success(), "{purged:?}");
        for coding in ["gzip", "br", "zstd", "identity"] {
            assert!(!tidegate.get_with("/", &accepting(coding)).is_hit(), "{pattern} {coding}");
        }
    }
}

#[test]
fn under_stress_only_what_is_stored_is_compressed() {
    let origin = Origin::start(|request| {
        let reply = Reply::ok(page()).with("Content-Type", "text/html");
        reply.with("Cache-Control", if request.target == "/passed" { "no-store" } else { "max-age=60" })
    });
    let builder = Tidegate::builder().top("workers = 1").origin(&origin).limits("connections = 40");
    let tidegate = builder.tables(ALL).start();
    let coding_of = |target: &str| tidegate.get_with(target, &accepting("br")).field("Content-Encoding");
    assert_eq!(coding_of("/passed"), "br");
    // More than four fifths of the connections that there may be.
    let open: Vec<_> = (0..35)
        .map(|number| {
            let mut client = tidegate.connect();
            client.get(&format!("/{number}"));
            client
        })
        .collect();
    eventually("it is not worth the time", || (coding_of("/passed").is_empty()).then_some(()));
    assert_eq!(coding_of("/kept"), "br");
    assert!(tidegate.metric("tidegate_compressions_skipped_total") >= 1.0);
    drop(open);
    eventually("it is again", || (coding_of("/passed") == "br").then_some(()));
}
