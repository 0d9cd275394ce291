//! What tidegate answers by itself is what docs/guide/troubleshooting.md says that it does.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::collections::BTreeSet;
use std::net::SocketAddr;

use tidegate_e2e::{Client, Origin, Reply, Tidegate, free_port, pages};

/// The statuses in the first column of the table of answers.
fn statuses_in_the_guide() -> BTreeSet<u16> {
    let page = pages().into_iter().find(|page| page.name == "docs/guide/troubleshooting.md").unwrap();
    let cells = page.text.lines().filter_map(|line| line.strip_prefix("| ")?.split('|').next());
    cells
        .flat_map(|cell| cell.split(',').filter_map(|status| status.trim().parse().ok()).collect::<Vec<_>>())
        .collect()
}

/// With a bound, a rule or a fault for each of its own answers; what is below /app/ has an origin, and /files/ a
/// folder.
fn site(origin: &Origin) -> Tidegate {
    let nobody = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let tidegate = Tidegate::builder()
        .top("workers = 1")
        .group("app", &[origin.address()], "")
        .group("gone", &[nobody], "")
        .route("/app/", "upstream = \"app\"")
        .route("/gone/", "upstream = \"gone\"")
        .route("/files/", "root = \"@DIR@\"")
        .limits("body_size = \"1KiB\"\nrequest_line_size = \"256B\"\nfields = 10\nheader_timeout = \"500ms\"")
        .tables("[defence]\nchallenge_bits = 0\n[[classifier]]\nname = \"errors\"\nlimit = 20\naction = \"refuse\"")
        .tables("[[filter]]\npath = \"/app/forbidden\"\n[[filter]]\npath = \"/app/new\"\naction = \"challenge\"")
        .tables("[[request]]\npath = \"/app/later\"\naction = \"refuse\"")
        .start();
    std::fs::create_dir_all(tidegate.directory().join("files/below")).unwrap();
    std::fs::write(tidegate.directory().join("files/page.txt"), "hello").unwrap();
    tidegate
}

/// The status of the answer to a request from that address, whose head is sent as it is.
fn answer(tidegate: &Tidegate, from: [u8; 4], head: &str) -> u16 {
    let mut client = Client::try_connect_from(from.into(), tidegate.address()).unwrap();
    let _ = client.try_send(head);
    let method = head.split(' ').next().unwrap();
    let response = client.try_response(method).unwrap_or_else(|error| panic!("{head}: {error}"));
    assert_eq!(response.fields.get("cache-status"), None, "{head}");
    response.status
}

#[test]
fn every_answer_of_its_own_is_in_the_guide() {
    let origin = Origin::start(|_| Reply::ok("hello"));
    let tidegate = site(&origin);
    let fields = "F: a\r\n".repeat(20);
    let by_here = "Via: 1.1 tidegate\r\n".repeat(5);
    let get = |target: &str, fields: &str| format!("GET {target} HTTP/1.1\r\nHost: a\r\n{fields}\r\n");
    let post = |fields: &str| format!("POST /app/ HTTP/1.1\r\nHost: a\r\n{fields}\r\n");
    let mut given = BTreeSet::new();
    for (status, head) in [
        (301, get("/files/below", "")),
        (307, get("/app/new", "")),
        (400, "GET /app/ HTTP/1.1\r\n\r\n".into()),
        (403, get("/app/forbidden", "")),
        (404, get("/elsewhere", "")),
        (404, get("/files/none", "")),
        (405, "TRACE /app/ HTTP/1.1\r\nHost: a\r\n\r\n".into()),
        (405, "DELETE /files/page.txt HTTP/1.1\r\nHost: a\r\n\r\n".into()),
        (408, "GET /app/ HTTP/1.1\r\nHost: a\r\n".into()),
        (412, get("/files/page.txt", "If-Match: \"another\"\r\n")),
        (413, post("Content-Length: 2000\r\n")),
        (414, get(&format!("/app/{}", "a".repeat(300)), "")),
        (416, get("/files/page.txt", "Range: bytes=100-\r\n")),
        (431, get("/app/", &fields)),
        (501, post("Transfer-Encoding: gzip\r\n")),
        (502, get("/gone/", "")),
        (503, get("/app/later", "")),
        (504, get("/app/", "Cache-Control: only-if-cached\r\n")),
        (505, "GET /app/ HTTP/2.0\r\nHost: a\r\n\r\n".into()),
        (508, get("/app/", &by_here)),
    ] {
        // 127.0.0.1 is exempt from what the defence does.
        let own = answer(&tidegate, [127, 0, 9, (status % 250) as u8], &head);
        assert_eq!(own, status, "{head}");
        given.insert(own);
    }
    let bad = get("/elsewhere", "");
    let refused = (0..100).find(|_| answer(&tidegate, [127, 0, 8, 1], &bad) == 429);
    assert!(refused.is_some(), "errors are never refused");
    // Those take TLS, a client that leaves, and a disk that fails.
    given.extend([429, 308, 499, 500]);
    assert_eq!(statuses_in_the_guide(), given);
}
