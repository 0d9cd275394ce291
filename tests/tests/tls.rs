//! TLS to clients: all of HTTP/1 goes over it, certificates are chosen by name and renewed by a reload.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::io::{Read, Write};
use std::net::TcpStream;

use rustls::crypto::aws_lc_rs::kx_group;
use rustls::{ClientConnection, NamedGroup};
use tidegate_e2e::{Certificate, Client, Origin, Reply, Site, Tidegate, content};

/// Larger than the buffers of both sockets together.
const LARGE: usize = 24 << 20;

#[test]
fn miss_hit_and_upload_go_over_tls_as_without_it() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|request| match request.method.as_str() {
        "GET" => Reply::cacheable(content(1, 100_000)),
        _ => Reply::ok(request.body.clone()),
    });
    let site = Site::start(Tidegate::builder().origin(&origin), &[("a", &certificate)]);
    let mut client = site.connect(&certificate);
    for is_hit in [false, true, true] {
        let response = client.get("/a");
        assert!(response.body == content(1, 100_000) && response.is_hit() == is_hit, "{response:?}");
    }
    assert_eq!((origin.count(), origin.last().field("X-Forwarded-Proto").as_str()), (1, "https"));
    let upload = content(2, LARGE);
    client.send(format!("PUT /b HTTP/1.1\r\nHost: a.example\r\nContent-Length: {LARGE}\r\n\r\n"));
    client.send(&upload);
    assert!(client.response().body == upload, "what was uploaded comes back");
}

/// Each response finds the socket full: what was encrypted but not sent whole must not be encrypted again.
#[test]
fn responses_that_wait_for_their_reader_arrive_byte_for_byte() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|request| match request.target.as_str() {
        "/stored" => Reply::cacheable(content(1, LARGE)),
        _ => Reply::ok(content(2, LARGE)),
    });
    let builder = Tidegate::builder().origin(&origin).cache("memory = \"256MiB\"\nmax_object = \"32MiB\"");
    let files = tempfile::tempdir().unwrap();
    std::fs::create_dir(files.path().join("files")).unwrap();
    std::fs::write(files.path().join("files/large"), content(3, 2 * LARGE)).unwrap();
    let root = format!("root = \"{}\"", files.path().display());
    let site = Site::start(builder.route("/files/", &root), &[("a", &certificate)]);
    let mut client = site.connect(&certificate);
    assert_eq!(client.get("/stored").body.len(), LARGE);
    // All at once, and each with its end in the same bytes as the next one's start.
    let targets = ["/stored", "/passed", "/files/large", "/stored", "/passed"];
    let requests = targets.map(|target| format!("GET {target} HTTP/1.1\r\nHost: example.org\r\n\r\n"));
    client.send(requests.concat());
    for target in targets {
        let expected = match target {
            "/stored" => content(1, LARGE),
            "/passed" => content(2, LARGE),
            _ => content(3, 2 * LARGE),
        };
        assert!(client.response().body == expected, "{target}");
    }
    let range = client.request("GET", "/stored", "Range: bytes=70000-9999999\r\n");
    assert!(range.status == 206 && range.body == content(1, LARGE)[70_000..10_000_000], "{range:?}");
}

#[test]
fn tunnel_over_tls_carries_large_messages_both_ways() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| {
        Reply::script(|stream| {
            stream.write_all(
                b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n",
            )?;
            let mut echo = stream.try_clone()?;
            std::io::copy(stream, &mut echo).map(drop)
        })
    });
    let site = Site::start(Tidegate::builder().origin(&origin), &[("a", &certificate)]);
    let mut client = site.connect(&certificate);
    client.send("GET /chat HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n");
    assert_eq!(client.head().0, 101);
    for size in [1, 16_384, 16_385, 1 << 20] {
        let message = content(size as u64, size);
        client.send(&message);
        assert!(client.read_bytes(size) == message, "{size} bytes");
    }
}

/// The request's end and that of the client's data are in the same record of TLS, and the same segment of TCP.
#[test]
fn client_that_says_it_is_done_gets_its_answer_and_the_end() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok(content(1, 100_000)));
    let site = Site::start(Tidegate::builder().origin(&origin), &[("a", &certificate)]);
    let mut socket = std::net::TcpStream::connect(site.address).unwrap();
    socket.set_read_timeout(Some(tidegate_e2e::PATIENCE)).unwrap();
    let config = Certificate::client_config(&[&certificate], b"http/1.1");
    let mut tls = rustls::ClientConnection::new(config, "a.example".try_into().unwrap()).unwrap();
    while tls.is_handshaking() {
        tls.complete_io(&mut socket).unwrap();
    }
    tls.writer().write_all(b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n").unwrap();
    tls.send_close_notify();
    let mut sent = Vec::new();
    tls.write_tls(&mut sent).unwrap();
    socket.write_all(&sent).unwrap();
    let mut received = Vec::new();
    // Without an announced end this is an error.
    rustls::Stream::new(&mut tls, &mut socket).read_to_end(&mut received).unwrap();
    assert!(received.ends_with(&content(1, 100_000)));
}

#[test]
fn certificate_is_the_one_for_the_name_that_is_asked_for() {
    let [first, wild, two] =
        [&["a.example"][..], &["*.Wild.example"], &["b.example", "c.example"]].map(Certificate::of);
    let origin = Origin::start(|_| Reply::ok("x"));
    let certificates = [("first", &first), ("wild", &wild), ("two", &two)];
    let site = Site::start(Tidegate::builder().origin(&origin), &certificates);
    for (name, certificate) in [
        ("a.example", &first),
        ("x.wild.example", &wild),
        ("X.WILD.example", &wild),
        ("b.example", &two),
        ("C.Example", &two),
    ] {
        let client = site.try_connect(name, &[certificate]);
        assert_eq!(client.unwrap_or_else(|error| panic!("{name}: {error}")).get("/").status, 200, "{name}");
    }
    // For others it is the first, which is not theirs.
    for name in ["d.example", "wild.example", "x.y.wild.example"] {
        let error = site.try_connect(name, &[&first, &wild, &two]).err().expect(name).to_string();
        assert!(error.contains("not valid for name"), "{name}: {error}");
    }
}

/// Who records connections today to read them with a quantum computer gets nothing of clients that know the hybrid
/// (draft-ietf-tls-ecdhe-mlkem), which is what those that know both agree on.
#[test]
fn keys_are_agreed_on_by_the_hybrid_with_clients_that_know_it() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = Site::start(Tidegate::builder().origin(&origin), &[("a", &certificate)]);
    for (config, agreed) in [
        (Certificate::client_config(&[&certificate], b"http/1.1"), NamedGroup::X25519MLKEM768),
        (certificate.client_config_of_group(kx_group::X25519MLKEM768), NamedGroup::X25519MLKEM768),
        (certificate.client_config_of_group(kx_group::X25519), NamedGroup::X25519),
        (certificate.client_config_of_group(kx_group::SECP256R1), NamedGroup::secp256r1),
    ] {
        let mut tls = ClientConnection::new(config, "a.example".try_into().unwrap()).unwrap();
        let mut socket = TcpStream::connect(site.address).unwrap();
        let mut stream = rustls::Stream::new(&mut tls, &mut socket);
        stream.write_all(b"GET / HTTP/1.1\r\nHost: a.example\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        assert!(answer.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&answer));
        assert_eq!(tls.negotiated_key_exchange_group().map(|group| group.name()), Some(agreed));
    }
}

#[test]
fn renewed_certificate_is_shown_after_a_reload_and_a_broken_one_is_refused() {
    let [old, new, other] = [(); 3].map(|()| Certificate::of(&["a.example"]));
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = Site::start(Tidegate::builder().origin(&origin), &[("a", &old)]);
    let mut before = site.connect(&old);
    new.write(site.files.path(), "a");
    assert!(site.tidegate.command(&["reload"]).status.success());
    assert_eq!(site.connect(&new).get("/").status, 200);
    assert_eq!(before.get("/").status, 200, "connections stay as they are");
    // The key is another one's now.
    other.write(site.files.path(), "other");
    std::fs::copy(site.files.path().join("other.key"), site.files.path().join("a.key")).unwrap();
    let reload = site.tidegate.command(&["reload"]);
    let said = String::from_utf8_lossy(&reload.stderr).into_owned();
    assert_eq!(reload.status.code(), Some(1), "{said}");
    let text = std::fs::read_to_string(site.tidegate.config()).unwrap();
    let line = 1 + text.lines().position(|line| line.starts_with("key = ")).unwrap();
    assert!(said.contains(&format!("tidegate.toml:{line}:7: certificate.key: ")), "{said}");
    assert_eq!(site.connect(&new).get("/").status, 200, "the last one that was good is in force");
}

#[test]
fn second_certificate_with_the_firsts_key_is_refused_at_its_own_place() {
    let [first, second] = [&["a.example"][..], &["b.example"]].map(Certificate::of);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = Site::start(Tidegate::builder().origin(&origin), &[("a", &first), ("b", &second)]);
    let text = std::fs::read_to_string(site.tidegate.config()).unwrap();
    site.tidegate.write_config(&text.replace("b.key", "a.key"));
    let line = 1 + text.lines().position(|line| line.contains("b.key")).unwrap();
    let check =
        std::process::Command::new(Tidegate::binary()).arg("check").arg(site.tidegate.config()).output();
    let check = check.unwrap();
    let said = String::from_utf8_lossy(&check.stderr).into_owned();
    assert_eq!(check.status.code(), Some(1), "{said}");
    assert!(said.contains(&format!("tidegate.toml:{line}:7: certificate.key: ")), "{said}");
}

/// `run` refused it, and `check` said that there were no errors.
#[test]
fn later_certificate_without_a_name_is_refused_by_check_too() {
    let [first, second] = [&["a.example"][..], &["127.0.0.1"]].map(Certificate::of);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = Site::start(Tidegate::builder().origin(&origin), &[("a", &first), ("b", &first)]);
    second.write(site.files.path(), "b");
    let check =
        std::process::Command::new(Tidegate::binary()).arg("check").arg(site.tidegate.config()).output();
    let said = String::from_utf8_lossy(&check.unwrap().stderr).into_owned();
    assert!(said.contains(": certificate.chain: ") && said.contains("names no host"), "{said}");
}

#[test]
fn plain_http_on_the_port_of_tls_is_told_so() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = Site::start(Tidegate::builder().origin(&origin), &[("a", &certificate)]);
    let mut client = Client::connect(site.address);
    assert_eq!(client.get("/").status, 400);
    assert!(client.is_closed());
    assert_eq!((site.tidegate.metric("tidegate_tls_handshakes_failed_total"), origin.count()), (1.0, 0));
    assert_eq!(site.tidegate.metric("tidegate_requests_refused_total"), 1.0);
    assert_eq!(site.tidegate.metric("tidegate_responses_4xx_total"), 1.0);
}

#[test]
fn handshake_that_does_not_go_on_is_ended_by_the_heads_deadline() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let builder = Tidegate::builder().origin(&origin).limits("header_timeout = \"1s\"");
    let site = Site::start(builder, &[("a", &certificate)]);
    let mut client = Client::connect(site.address);
    // A record that is announced, and does not come.
    client.send(b"\x16\x03\x01\x02\x00\x01");
    assert!(client.is_closed());
    assert_eq!(site.tidegate.metric("tidegate_header_timeouts_total"), 1.0);
}

#[test]
fn with_https_only_requests_in_the_clear_are_sent_to_the_same_url_with_tls() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::cacheable(content(1, 100)));
    let builder = Tidegate::builder().origin(&origin).top("https_only = true");
    let site = Site::start(builder.top("trusted_proxies = [\"127.0.0.2\"]"), &[("a", &certificate)]);
    let port = site.address.port();
    assert_eq!(site.connect(&certificate).get("/a?b=1").status, 200);
    let mut clear = site.tidegate.connect();
    for (method, target, status, url) in [
        ("GET", "/a?b=1", 301, "/a?b=1"),
        ("HEAD", "/x/../%61", 301, "/a"),
        ("DELETE", "//evil.example/", 308, "/evil.example/"),
        ("OPTIONS", "*", 308, "/"),
    ] {
        clear.send(format!("{method} {target} HTTP/1.1\r\nHost: a.example:8080\r\n\r\n"));
        let response = clear.response_to(method);
        let expected = format!("https://a.example:{port}{url}");
        assert_eq!((response.status, response.field("Location").as_str()), (status, expected.as_str()));
    }
    clear.send("POST /a HTTP/1.1\r\nHost: [2001:db8::1]\r\nContent-Length: 3\r\n\r\nabc");
    assert_eq!(clear.response().field("Location"), format!("https://[2001:db8::1]:{port}/a"));
    clear.send("GET / HTTP/1.0\r\n\r\n");
    assert_eq!(clear.response().status, 400, "nobody knows which host is meant");
    assert_eq!(origin.count(), 1, "nothing in the clear reaches the origin");
    let challenge = "/.well-known/acme-challenge/token";
    assert_eq!(site.tidegate.connect().get(challenge).status, 200);
    let mut proxy = Client::try_connect_from([127, 0, 0, 2].into(), site.tidegate.address()).unwrap();
    assert_eq!(proxy.request("GET", "/a?b=1", "X-Forwarded-Proto: https\r\n").status, 200);
    assert_eq!(proxy.request("GET", "/a?b=1", "X-Forwarded-Proto: http\r\n").status, 301);
}

/// One whose other records are enough for the library to begin to count anew.
#[test]
fn client_that_changes_its_keys_without_end_is_ended() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::cacheable("x"));
    let site = Site::start(Tidegate::builder().origin(&origin), &[("a", &certificate)]);
    let mut usual = site.connect(&certificate);
    for _ in 0..10 {
        usual.change_keys(20).unwrap();
        assert_eq!(usual.get("/").status, 200);
    }
    let mut client = site.connect(&certificate);
    client.send("GET /");
    let goes_on = (0..500).all(|_| client.change_keys(20).and_then(|()| client.try_send("a")).is_ok());
    assert!(!goes_on || client.is_closed());
    assert_eq!(site.tidegate.metric("tidegate_tls_floods_total"), 1.0);
    assert_eq!(usual.get("/").status, 200);
}

/// What has one spelling that is exempt, and another that is not.
#[test]
fn with_https_only_a_challenge_is_what_is_one_in_every_reading() {
    let origin = Origin::start(|_| Reply::ok("x"));
    let certificate = Certificate::of(&["a.example"]);
    let builder = Tidegate::builder().origin(&origin).top("https_only = true\npersonality = \"nginx\"");
    let site = Site::start(builder, &[("a", &certificate)]);
    for target in ["/.well-known/acme-challenge/..;/..;/login", "/.well-known/acme-challenge/..%5c..%5clogin"]
    {
        let response = site.tidegate.connect().get(target);
        assert!(matches!(response.status, 301 | 400), "{target}: {response:?}");
    }
    assert_eq!(origin.count(), 0);
}
