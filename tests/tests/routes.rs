//! What routes change: fields of requests and responses, paths, and where clients are sent.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::fs;

use tidegate_e2e::http2::{field, run};
use tidegate_e2e::{Builder, Certificate, Client, Origin, Reply, Site, Tidegate, eventually, http2};

/// Routes to the group `app`, which is this origin.
fn before(origin: &Origin) -> Builder {
    Tidegate::builder().top("workers = 1").group("app", &[origin.address()], "")
}

fn to_app(lines: &str) -> String {
    format!("upstream = \"app\"\n{lines}")
}

/// The status, and where the client is sent.
fn sent(client: &mut Client, method: &str, host: &str, target: &str) -> (u16, String) {
    client.send(format!("{method} {target} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\n\r\n"));
    let response = client.response_to(method);
    (response.status, response.field("Location"))
}

#[test]
fn clients_are_sent_where_a_redirect_leads_with_what_they_asked_for() {
    let origin = Origin::start(|request| Reply::ok(request.target.clone()));
    let tidegate = before(&origin)
        .route("/", &to_app(""))
        .route("/old/", "redirect = \"/new/*\"")
        .route("/gone/", "redirect = \"/\"\nredirect_status = 302")
        .route("/up/", "redirect = \"/*\"\nredirect_status = 307")
        .tables(
            "[[route]]\nhost = \"www.example.org\"\nredirect = \"https://example.org/*\"\n\
             response_fields = { set = { Strict-Transport-Security = \"max-age=63072000\" } }\n",
        )
        .start();
    let mut client = tidegate.connect();
    for (method, host, target, expected) in [
        ("GET", "x", "/old/a/b?c=d", (301, "/new/a/b?c=d")),
        ("HEAD", "x", "/old/", (301, "/new/")),
        ("POST", "x", "/old/form", (308, "/new/form")),
        ("GET", "x", "/gone/a?b", (302, "/")),
        ("GET", "www.example.org", "/", (301, "https://example.org/")),
        ("GET", "WWW.example.org:80", "/a%20b?c", (301, "https://example.org/a%20b?c")),
        ("GET", "x", "/up/a", (307, "/a")),
        // Nothing of these names another host.
        ("GET", "x", "/up//evil.example/", (307, "/evil.example/")),
        ("GET", "x", "/up/%2F/evil.example/", (307, "/%2F/evil.example/")),
        ("GET", "www.example.org", "/@evil.example/", (301, "https://example.org/@evil.example/")),
    ] {
        let (status, location) = sent(&mut client, method, host, target);
        assert_eq!((status, location.as_str()), expected, "{method} {target}");
    }
    for target in [r"/up/\evil.example/", r"/up/\/evil.example", "/up/;/evil.example"] {
        let (status, location) = sent(&mut tidegate.connect(), "GET", "x", target);
        let leads_elsewhere = location.starts_with("//") || location.starts_with("/\\");
        assert!((status == 307 || status >= 400) && !leads_elsewhere, "{target}: {status} {location}");
    }
    client.send("GET / HTTP/1.1\r\nHost: www.example.org\r\n\r\n");
    assert_eq!(client.response().field("Strict-Transport-Security"), "max-age=63072000");
    assert_eq!(origin.count(), 0);
    assert_eq!(client.get("/older").text(), "/older");
}

#[test]
fn an_upstream_is_asked_for_another_path_and_the_cache_by_that_of_the_client() {
    let origin = Origin::start(|request| Reply::cacheable(request.target.clone()));
    let tidegate = before(&origin)
        .route("/api/", &to_app("rewrite = \"/*\""))
        .route("/one", &to_app("rewrite = \"/index.php\""))
        .route("/v1", &to_app("rewrite = \"/v2*\""))
        .route("/", &to_app("rewrite = \"/all/*\""))
        .start();
    for (target, asked) in [
        ("/api/users?page=2", "/users?page=2"),
        ("/api/", "/"),
        ("/users?page=2", "/all/users?page=2"),
        ("/one/two?three", "/index.php?three"),
        ("/v1/a", "/v2/a"),
        ("/v1", "/v2"),
        ("/api/a/../b//c", "/b/c"),
    ] {
        for is_hit in [false, true] {
            let response = tidegate.get(target);
            assert_eq!((response.text().as_str(), response.is_hit()), (asked, is_hit), "{target}");
        }
    }
    let mut client = tidegate.connect();
    client.send("OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n");
    assert_eq!(client.response().text(), "*");
}

#[test]
fn requests_reach_the_upstream_with_the_fields_that_their_route_says() {
    let origin = Origin::start(|_| Reply::ok("seen"));
    let rules = "[route.request_fields]\nremove = [\"Cookie\", \"X-Secret\"]\nset = { Host = \"app.internal\", X-User = \
                 \"nobody\", X-Forwarded-Prefix = \"/shop\" }\nadd = { X-Tag = \"b\" }\n\
                 default = { Accept-Language = \"en\", X-Kind = \"plain\" }\n";
    let tidegate = before(&origin).route("/shop/", &to_app(rules)).route("/", &to_app("")).start();
    let sent = "Cookie: a=b\r\nx-secret: 1\r\nX_Secret: 2\r\nX-User: root\r\nx_user: root\r\nX-User: admin\r\n\
                X-Tag: a\r\nX-Kind: special\r\nConnection: X-User, X-Kind\r\n";
    assert_eq!(tidegate.get_with("/shop/", sent).status, 200);
    let got = origin.last();
    for (name, values) in [
        ("Host", &["app.internal"][..]),
        ("Cookie", &[]),
        ("X-Secret", &[]),
        ("X_Secret", &[]),
        ("X-User", &["nobody"]),
        ("X_User", &[]),
        ("X-Tag", &["a", "b"]),
        ("Accept-Language", &["en"]),
        // The client has had its own taken out.
        ("X-Kind", &["plain"]),
        ("X-Forwarded-Prefix", &["/shop"]),
        ("X-Forwarded-Host", &["example.org"]),
    ] {
        assert_eq!(got.fields.all(name), values, "{name}: {got:?}");
    }
    let chunked = "Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX-User: root\r\nX-Other: 1\r\n\r\n";
    for (target, trailers) in [("/shop/", 0), ("/", 2)] {
        let mut client = tidegate.connect();
        client.send(format!("POST {target} HTTP/1.1\r\nHost: x\r\nTrailer: X-User\r\n{chunked}"));
        assert_eq!(client.response().status, 200);
        assert_eq!(origin.last().trailers.0.len(), trailers, "{target}");
        assert_eq!(origin.last().body, b"a");
    }
    assert_eq!(origin.last().field("Host"), "x");
}

const CHANGED: &str = "[route.response_fields]\nremove = [\"Server\", \"X-Powered-By\"]\n\
                       set = { X-Frame-Options = \"DENY\" }\nadd = { Vary = \"X-Tier\" }\n\
                       default = { Cache-Control = \"max-age=60\", Referrer-Policy = \"no-referrer\" }\n";

#[test]
fn a_response_is_what_its_route_makes_of_it_stored_or_not_and_whole_or_not() {
    let origin = Origin::start(|request| {
        let reply = match request.target.as_str() {
            "/missing" => Reply::status(404, "none"),
            "/private" => Reply::ok("mine").with("Cache-Control", "private"),
            "/chunked" => {
                return Reply::Raw(
                    b"HTTP/1.1 200 OK\r\nServer: a\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n\
                      3\r\nabc\r\n0\r\nX-Sum: 6\r\n\r\n"
                        .to_vec(),
                );
            }
            _ => Reply::ok(request.field("X-Tier")),
        };
        reply.with("server", "old/1.0").with("X-Powered-By", "a").with("x-frame-options", "ALLOWALL")
    });
    let tidegate = before(&origin).route("/", &to_app(CHANGED)).start();
    for (tier, is_hit) in [("gold", false), ("gold", true), ("tin", false), ("tin", true), ("gold", true)] {
        let response = tidegate.get_with("/", &format!("X-Tier: {tier}\r\n"));
        assert_eq!((response.text().as_str(), response.is_hit()), (tier, is_hit), "{response:?}");
        for (name, value) in [
            ("Server", ""),
            ("X-Powered-By", ""),
            ("X-Frame-Options", "DENY"),
            ("Vary", "X-Tier"),
            ("Cache-Control", "max-age=60"),
            ("Referrer-Policy", "no-referrer"),
        ] {
            assert_eq!(response.field(name), value, "{name}: {response:?}");
        }
    }
    let chunked = tidegate.get("/chunked");
    assert_eq!((chunked.text().as_str(), chunked.field("Server").as_str()), ("abc", ""));
    assert_eq!(tidegate.connect().request("HEAD", "/chunked", "").field("X-Frame-Options"), "DENY");
    let private = tidegate.get("/private");
    assert_eq!(private.field("Cache-Control"), "private");
    // How long a page may be reused is not said of its absence.
    for _ in 0..2 {
        let missing = tidegate.get("/missing");
        assert_eq!(
            (missing.status, missing.is_hit(), missing.field("Cache-Control").as_str()),
            (404, false, "")
        );
        assert_eq!(missing.field("X-Frame-Options"), "DENY");
    }
}

#[test]
fn what_a_validation_says_is_changed_too_and_what_was_added_stays() {
    let origin = Origin::start(|request| match request.field("If-None-Match").as_str() {
        "\"1\"" => Reply::status(304, "").with("ETag", "\"1\"").with("X-Round", "2").with("Server", "new"),
        _ => Reply::ok("page").with("ETag", "\"1\"").with("X-Round", "1").with("Link", "</a>"),
    });
    let rules = "[route.response_fields]\nremove = [\"Server\"]\nadd = { Link = \"</b>\" }\n\
                 set = { CDN-Cache-Control = \"max-age=0\" }\ndefault = { X-Round = \"0\", X-Once = \"1\" }\n";
    let tidegate = before(&origin).route("/", &to_app(rules)).start();
    for round in ["1", "2", "2"] {
        let response = tidegate.get("/");
        assert_eq!(response.text(), "page");
        assert_eq!(response.fields.all("Link"), ["</a>", "</b>"], "{response:?}");
        assert_eq!((response.field("X-Round").as_str(), response.field("X-Once").as_str()), (round, "1"));
        assert_eq!(response.field("Server"), "");
    }
    assert_eq!(origin.count(), 3);
    let own = tidegate.get_with("/", "If-None-Match: \"1\"\r\n");
    assert_eq!((own.status, own.field("Server").as_str()), (304, ""));
}

#[test]
fn a_route_says_what_is_cached() {
    let origin = Origin::start(|_| Reply::cacheable("page"));
    let kept =
        "response_fields = { set = { CDN-Cache-Control = \"max-age=60\", Cache-Control = \"no-cache\" } }";
    let tidegate = before(&origin)
        .route("/", &to_app("response_fields = { set = { Cache-Control = \"no-store\" } }"))
        .route("/kept/", &to_app(kept))
        .start();
    for (target, is_hit) in [("/", false), ("/kept/", true)] {
        tidegate.get(target);
        assert_eq!(tidegate.get(target).is_hit(), is_hit, "{target}");
    }
    assert_eq!(tidegate.get("/kept/").field("Cache-Control"), "no-cache");
}

#[test]
fn no_rule_makes_a_page_of_one_client_one_of_all() {
    let origin = Origin::start(|request| {
        let page = Reply::ok(request.field("Cookie"));
        match request.target.rsplit('/').next().unwrap() {
            "private" => page.with("Cache-Control", "private, no-store"),
            "session" => page.with("Set-Cookie", "session=1"),
            "php" => page.with("Expires", "Thu, 19 Nov 1981 08:52:00 GMT").with("Pragma", "no-cache"),
            "login" => Reply::status(302, "").with("Location", "/login").with("Set-Cookie", "sid=1"),
            _ => page,
        }
    });
    let lasting = "response_fields = { set = { Cache-Control = \"max-age=600, immutable\" } }";
    let tidegate = before(&origin)
        .route("/", &to_app("response_fields = { default = { CDN-Cache-Control = \"max-age=600\" } }"))
        .route("/lasting/", &to_app(lasting))
        .start();
    for target in ["/private", "/session", "/php", "/page", "/lasting/login", "/lasting/session"] {
        tidegate.get_with(target, "Cookie: who=alice\r\n");
        let other = tidegate.get(target);
        assert!(!other.is_hit() && !other.text().contains("alice"), "{target}: {other:?}");
    }
    assert_eq!(tidegate.get("/lasting/login").field("Cache-Control"), "");
    // What nobody's request has shaped is for all.
    assert!(tidegate.get("/page").is_hit());
}

#[test]
fn an_error_that_is_validated_lasts_no_longer_for_it() {
    let origin = Origin::start(|request| match request.field("If-None-Match").as_str() {
        "" => Reply::status(404, "none").with("ETag", "\"1\"").with("Cache-Control", "max-age=0"),
        _ => Reply::status(304, "").with("ETag", "\"1\""),
    });
    let lasting = "response_fields = { set = { Cache-Control = \"max-age=600\" } }";
    let tidegate = before(&origin).route("/", &to_app(lasting)).start();
    for asked in 1..4 {
        let response = tidegate.get("/");
        assert_eq!((response.status, response.field("Cache-Control").as_str()), (404, "max-age=0"));
        assert_eq!(origin.count(), asked);
    }
}

#[test]
fn what_is_added_stays_added_however_the_upstream_validates() {
    let origin = Origin::start(|request| {
        let reply = match request.field("If-None-Match").as_str() {
            "" => Reply::ok("page"),
            _ => Reply::status(304, ""),
        };
        reply
            .with("ETag", "\"1\"")
            .with("Content-Security-Policy", "default-src 'self'")
            .with("Vary", "Origin")
    });
    let added = "[route.response_fields]\nset = { Cache-Control = \"max-age=0\" }\n\
                 add = { Content-Security-Policy = \"frame-ancestors 'none'\", Vary = \"X-Tier\" }\n";
    let tidegate = before(&origin).route("/", &to_app(added)).start();
    for _ in 0..3 {
        let response = tidegate.get("/");
        assert_eq!(
            response.fields.all("Content-Security-Policy"),
            ["default-src 'self'", "frame-ancestors 'none'"]
        );
        assert_eq!(response.fields.all("Vary"), ["Origin", "X-Tier"]);
    }
    let validated =
        origin.requests().iter().filter(|request| !request.field("If-None-Match").is_empty()).count();
    assert_eq!((origin.count(), validated), (3, 2));
}

#[test]
fn a_path_leaves_what_stands_in_its_place_by_no_reading() {
    let origin = Origin::start(|request| Reply::ok(request.target.clone()));
    for personality in ["strict", "apache", "nginx", "iis"] {
        let tidegate = before(&origin)
            .top(&format!("personality = \"{personality}\""))
            .route("/", &to_app("rewrite = \"/app/*\""))
            .route("/a/", &to_app("rewrite = \"/x/*\""))
            .route("/b/", &to_app("rewrite = \"/x/*\""))
            .start();
        for target in [
            "/..;/secret",
            "/%2e%2e;/secret",
            "/x/..;/..;/secret",
            "/..%5Csecret",
            "/a/..;/b/c",
            "/a/..%5c..%5cc",
            "/a/..%2fb/c",
        ] {
            let response = tidegate.get(target);
            let asked = response.text();
            let stays = response.status == 200 && !asked.contains("..");
            assert!(stays || matches!(response.status, 400 | 404), "{personality} {target}: {asked}");
        }
        // What reads the same in its new place goes on.
        assert_eq!(tidegate.get("/a/b;v=1/c").text(), "/x/b;v=1/c", "{personality}");
    }
    let folding = before(&origin)
        .top("personality = \"iis\"")
        .route("/", &to_app(""))
        .route("/Api/", &to_app("rewrite = \"/v2/*\""))
        .start();
    assert_eq!(folding.get("/aPI/x").text(), "/v2/x");
}

#[test]
fn trailers_do_not_go_past_rules() {
    let origin = Origin::start(|_| {
        Reply::Raw(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: X-Hop\r\n\r\n\
              1\r\na\r\n0\r\nX-Powered-By: a\r\nX-Hop: 1\r\nX-Sum: 1\r\n\r\n"
                .to_vec(),
        )
    });
    let rules = "response_fields = { remove = [\"X-Powered-By\"] }";
    let tidegate = before(&origin).route("/", &to_app("")).route("/ruled/", &to_app(rules)).start();
    for (target, trailers) in [("/", 2), ("/ruled/", 0)] {
        let response = tidegate.get_with(target, "TE: trailers\r\nConnection: TE\r\n");
        assert_eq!((response.text().as_str(), response.trailers.0.len()), ("a", trailers), "{target}");
    }
}

#[test]
fn files_of_one_root_have_the_fields_of_the_route_that_they_were_asked_by() {
    let origin = Origin::start(|_| Reply::ok(""));
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    fs::create_dir(at("assets")).unwrap();
    for name in ["a.html", "assets/a.html", "assets/large.bin"] {
        fs::write(at(name), name).unwrap();
    }
    fs::write(at("assets/large.bin"), vec![7; 200_000]).unwrap();
    let files = |lines: &str| format!("root = \"{}\"\n{lines}", root.path().display());
    let immutable = "max-age=31536000, immutable";
    let long = format!("response_fields = {{ set = {{ Cache-Control = \"{immutable}\" }} }}");
    let html =
        "response_fields = { set = { Content-Type = \"text/html; charset=latin1\" }, remove = [\"ETag\"] }";
    let site = |long: &str| {
        before(&origin).route("/", &files("")).route("/assets/", &files(long)).tables(&format!(
            "[[route]]\nhost = \"latin.example\"\n{}\n[compression]\ncodings = [\"gzip\"]\nmin_size = \"1B\"\n",
            files(html)
        ))
    };
    let mut tidegate = site(&long).start();
    let asked = |tidegate: &Tidegate, host: &str, target: &str, fields: &str| {
        let mut client = tidegate.connect();
        client.send(format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n{fields}\r\n"));
        client.response()
    };
    for _ in 0..3 {
        assert_eq!(asked(&tidegate, "x", "/a.html", "").field("Cache-Control"), "");
        let asset = asked(&tidegate, "x", "/assets/a.html", "");
        assert_eq!(
            (asset.text().as_str(), asset.field("Cache-Control").as_str()),
            ("assets/a.html", immutable)
        );
        let latin = asked(&tidegate, "latin.example", "/assets/a.html", "Accept-Encoding: gzip\r\n");
        assert_eq!(latin.field("Content-Type"), "text/html; charset=latin1");
        assert_eq!((latin.field("ETag").as_str(), latin.field("Cache-Control").as_str()), ("", ""));
        assert_eq!(latin.fields.all("Vary"), ["Accept-Encoding"]);
        let large = asked(&tidegate, "x", "/assets/large.bin", "Range: bytes=5-9\r\n");
        assert_eq!((large.status, large.body.len()), (206, 5));
        assert_eq!(large.field("Cache-Control"), immutable);
    }
    let etag = asked(&tidegate, "x", "/assets/a.html", "").field("ETag");
    let unchanged = asked(&tidegate, "x", "/assets/a.html", &format!("If-None-Match: {etag}\r\n"));
    assert_eq!((unchanged.status, unchanged.field("Cache-Control").as_str()), (304, immutable));
    assert_eq!(asked(&tidegate, "x", "/assets/none", "").field("Cache-Control"), "");
    // By whichever route it was asked for, a file that changes is served anew.
    fs::write(at("assets/a.html"), "edited").unwrap();
    for host in ["x", "latin.example"] {
        eventually("the edited file is served", || {
            (asked(&tidegate, host, "/assets/a.html", "").text() == "edited").then_some(())
        });
    }
    let text = fs::read_to_string(tidegate.config()).unwrap();
    tidegate.write_config(&text.replace(immutable, "max-age=5"));
    assert!(tidegate.command(&["reload"]).status.success());
    assert_eq!(asked(&tidegate, "x", "/assets/a.html", "").field("Cache-Control"), "max-age=5");
    assert!(tidegate.terminate().success());
}

#[test]
fn routes_change_the_same_for_every_transport() {
    let origin = Origin::start(|request| Reply::ok(request.target.clone()).with("Server", "old"));
    let certificate = Certificate::of(&["a.example"]);
    let builder = before(&origin)
        .route("/", &to_app(&format!("rewrite = \"/all/*\"\n{CHANGED}")))
        .route("/old/", "redirect = \"/new/*\"");
    let site = Site::start(builder, &[("a", &certificate)]);
    run(async {
        let mut client = http2::Client::connect(&site, &certificate).await;
        for _ in 0..2 {
            let (response, content, _) = client.get("/x").await;
            assert_eq!(["server", "x-frame-options"].map(|name| field(&response, name)), ["", "DENY"]);
            assert_eq!(content, b"/all/x");
        }
        let (response, ..) = client.get("/old/a?b").await;
        assert_eq!((response.status().as_u16(), field(&response, "location").as_str()), (301, "/new/a?b"));
    });
}
