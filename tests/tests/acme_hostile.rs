//! Authorities that answer what they should not: failures like any other, bounded, and said so.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};
use tempfile::TempDir;
use tidegate_e2e::{Certificate, Gate, Origin, Reply, Request, Tidegate, TlsDoor, eventually, free_port};

const TOKEN: &str = "dG9rZW4tdGhhdC1ub2JvZHktZWxzZS1oYXM";

/// Knows no signatures and issues nothing: an order is pending for ever, unless a test answers something else.
struct Authority {
    origin: Origin,
    door: TlsDoor,
    files: TempDir,
}

impl Authority {
    /// `other` answers what it likes, in the place of what would be right.
    fn start(other: impl Fn(&Request) -> Option<Reply> + Send + Sync + 'static) -> Self {
        let files = tempfile::tempdir().unwrap();
        let certificate = Certificate::of(&["127.0.0.1"]);
        certificate.write(files.path(), "directory");
        let orders = AtomicUsize::new(0);
        let names = Arc::new(std::sync::Mutex::new(Vec::new()));
        let origin = Origin::start(move |request| {
            other(request).unwrap_or_else(|| {
                let base = format!("https://{}", request.field("Host"));
                let (path, number) = request.target.rsplit_once('/').unwrap();
                let reply = match (path, number) {
                    ("", "dir") => {
                        json!({ "newNonce": format!("{base}/nonce"), "newAccount": format!("{base}/account"),
                        "newOrder": format!("{base}/order"), "revokeCert": "", "keyChange": "" })
                    }
                    ("", "nonce") => json!({}),
                    ("", "account") => {
                        return created(&json!({ "status": "valid" }), &format!("{base}/accounts/1"));
                    }
                    ("", "order") => {
                        let name = payload(request)["identifiers"][0]["value"].as_str().unwrap().to_owned();
                        names.lock().unwrap().push(name);
                        let number = orders.fetch_add(1, Ordering::SeqCst);
                        return created(
                            &order(&base, &number.to_string()),
                            &format!("{base}/orders/{number}"),
                        );
                    }
                    ("/orders", number) => order(&base, number),
                    ("/authz", number) => {
                        let name = names.lock().unwrap()[number.parse::<usize>().unwrap()].clone();
                        authorization(&base, &name)
                    }
                    ("/challenge", kind) => challenge(&base, kind),
                    other => panic!("asked for {other:?}"),
                };
                answer(&reply)
            })
        });
        let door = TlsDoor::before(&origin, &certificate);
        Self { origin, door, files }
    }

    fn table(&self, names: &[&str], path: &std::path::Path) -> String {
        let (directory, authority) = (self.door.url("127.0.0.1"), self.files.path().join("directory.crt"));
        format!(
            "[acme]\nnames = {names:?}\ndirectory = \"{directory}/dir\"\npath = {path:?}\nauthority = {authority:?}\n"
        )
    }

    fn asked(&self, target: &str) -> usize {
        self.origin.requests().iter().filter(|request| request.target == target).count()
    }
}

fn order(base: &str, number: &str) -> Value {
    json!({ "status": "pending", "authorizations": [format!("{base}/authz/{number}")],
        "finalize": format!("{base}/finalize/{number}") })
}

fn authorization(base: &str, name: &str) -> Value {
    json!({ "status": "pending", "identifier": { "type": "dns", "value": name },
        "challenges": [challenge(base, "tls-alpn-01"), challenge(base, "http-01")] })
}

fn challenge(base: &str, kind: &str) -> Value {
    json!({ "type": kind, "url": format!("{base}/challenge/{kind}"), "token": TOKEN, "status": "pending" })
}

fn answer(value: &Value) -> Reply {
    Reply::ok(value.to_string()).with("Content-Type", "application/json").with("Replay-Nonce", "bm9uY2U")
}

fn created(value: &Value, location: &str) -> Reply {
    Reply::status(201, value.to_string()).with("Replay-Nonce", "bm9uY2U").with("Location", location)
}

fn problem(status: u16, detail: &str) -> Reply {
    let value = json!({ "type": "urn:ietf:params:acme:error:malformed", "detail": detail });
    Reply::status(status, value.to_string()).with("Content-Type", "application/problem+json")
}

/// What a signed request says (RFC 7515 §7.2.2).
fn payload(request: &Request) -> Value {
    let signed: Value = serde_json::from_slice(&request.body).unwrap();
    let alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let (mut bits, mut count, mut bytes) = (0_u32, 0, Vec::new());
    for character in signed["payload"].as_str().unwrap().chars() {
        bits = (bits << 6) | alphabet.find(character).unwrap() as u32;
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    serde_json::from_slice(&bytes).unwrap()
}

/// A tidegate that orders certificates for these names.
fn start(authority: &Authority, names: &[&str], origin: &Origin) -> (Tidegate, TempDir) {
    let (tls, kept) = (SocketAddr::from(([127, 0, 0, 1], free_port())), tempfile::tempdir().unwrap());
    let listener = format!("[[listen]]\naddress = \"{tls}\"\nprotocol = \"https\"\n");
    let builder =
        Tidegate::builder().origin(origin).tables(&(listener + &authority.table(names, kept.path())));
    (builder.start(), kept)
}

fn last_error(tidegate: &Tidegate) -> String {
    let status: Value = serde_json::from_slice(&tidegate.ask_admin("/status").body).unwrap();
    status["acme"][0]["last_error"].as_str().unwrap_or_default().to_owned()
}

#[track_caller]
fn failure(
    wrong: impl Fn(&Request) -> Option<Reply> + Send + Sync + 'static,
    expected: &str,
) -> (Authority, Tidegate, TempDir) {
    let authority = Authority::start(wrong);
    let origin = Origin::start(|_| Reply::ok("served"));
    let (tidegate, kept) = start(&authority, &["a.example"], &origin);
    let failed = |times: f64| (tidegate.metric("tidegate_acme_failures_total") >= times).then_some(());
    eventually("a failure", || failed(1.0));
    let said = last_error(&tidegate);
    assert!(said.contains(expected), "{expected}: {said}");
    assert!(said.len() < 2000 && !said.contains(char::is_control), "{said:?}");
    assert!(
        tidegate.output().len() < 10_000 && !tidegate.output().contains("panicked"),
        "{}",
        tidegate.output()
    );
    assert_eq!(tidegate.get("/").text(), "served");
    // It is still there to order.
    assert!(tidegate.command(&["reload"]).status.success());
    eventually("another failure", || failed(2.0));
    (authority, tidegate, kept)
}

#[test]
fn directory_that_is_none_is_said_with_its_url() {
    let directory = |reply: fn() -> Reply| move |request: &Request| (request.target == "/dir").then(reply);
    failure(directory(|| Reply::status(503, "<html>").with("Content-Type", "text/html")), "/dir: status 503");
    failure(directory(|| Reply::status(302, "").with("Location", "/other")), "redirects are not followed");
    failure(
        directory(|| Reply::ok("<html>").with("Content-Type", "text/html; charset=utf-8")),
        "a page for people",
    );
    for nonce in ["", "no url", "http://127.0.0.1/nonce"] {
        let reply = move |request: &Request| {
            let urls = json!({ "newNonce": nonce, "newAccount": "https://127.0.0.1/a", "newOrder": "https://127.0.0.1/o" });
            (request.target == "/dir").then(|| answer(&urls))
        };
        failure(reply, "newNonce is no URL with https");
    }
}

#[test]
fn answers_without_measure_are_not_taken() {
    failure(
        |request| (request.target == "/dir").then(|| Reply::ok(vec![b' '; 4 << 20])),
        "longer than 1024 KiB",
    );
    let long = |request: &Request| {
        (request.target == "/order")
            .then(|| problem(400, &("\u{1b}[31mone\ntwo".to_owned() + &"x".repeat(500_000))))
    };
    failure(long, "\\u{1b}[31mone\\ntwo");
    let (_, tidegate, _kept) = failure(
        |request| {
            let poll = request.target.starts_with("/orders/");
            let order = order(&format!("https://{}", request.field("Host")), "0");
            poll.then(|| answer(&order).with("Retry-After", "18446744073709551615"))
        },
        "timed out",
    );
    assert!(tidegate.resident_bytes() < 200 << 20);
}

#[test]
fn authority_that_asks_for_another_name_is_shown_none() {
    let other = |request: &Request| {
        let base = format!("https://{}", request.field("Host"));
        request.target.starts_with("/authz/").then(|| answer(&authorization(&base, "evil.example")))
    };
    let (authority, ..) = failure(other, "evil.example looked at that was not asked for");
    assert_eq!(authority.asked("/challenge/tls-alpn-01"), 0);
}

/// Some authorities look while the challenge is answered (RFC 8555 §7.5.1 leaves it to them).
#[test]
fn challenge_that_fails_at_once_leads_to_the_other_way() {
    let refused = |request: &Request| {
        request.target.starts_with("/challenge/").then(|| problem(400, "cannot connect to port 443"))
    };
    let (authority, tidegate, _kept) = failure(refused, "by http-01");
    assert!(last_error(&tidegate).contains("by tls-alpn-01"));
    assert!(authority.asked("/challenge/http-01") > 0);
}

#[test]
fn token_is_answered_as_long_as_it_is_asked_for() {
    let (asked, looked) = (Gate::default(), Gate::default());
    let (began, done) = (asked.clone(), looked.clone());
    let authority = Authority::start(move |request| {
        if !request.target.starts_with("/orders/") {
            return None;
        }
        // The proof is there: the test looks before it is refused.
        began.open();
        done.pass();
        Some(problem(403, "no"))
    });
    let origin = Origin::start(|_| Reply::status(404, "no such token"));
    let (tidegate, _kept) = start(&authority, &["a.example"], &origin);
    asked.pass();
    let path = format!("/.well-known/acme-challenge/{TOKEN}");
    let answered = tidegate.get(&path).text();
    assert!(answered.starts_with(&format!("{TOKEN}.")) && answered.len() > TOKEN.len() + 40, "{answered}");
    assert_eq!(tidegate.get(&format!("{path}x")).text(), "no such token");
    looked.open();
    eventually("the order is refused", || (tidegate.get(&path).text() == "no such token").then_some(()));
}

#[test]
fn order_that_takes_long_keeps_no_other_name_waiting_and_survives_reloads() {
    let authority = Authority::start(|_| None);
    let origin = Origin::start(|_| Reply::ok("x"));
    let (tidegate, kept) = start(&authority, &["a.example", "b.example"], &origin);
    eventually("both are ordered", || (authority.asked("/order") == 2).then_some(()));
    let polled = || authority.asked("/orders/0").min(authority.asked("/orders/1"));
    eventually("both are waited for", || (polled() > 0).then_some(()));
    let text = String::from_utf8(tidegate.command(&["status"]).stdout).unwrap();
    assert!(text.contains("a certificate for b.example is being ordered"), "{text}");
    for _ in 0..3 {
        assert!(tidegate.command(&["reload"]).status.success());
    }
    let before = polled();
    eventually("both are waited for still", || (polled() > before).then_some(()));
    assert_eq!((authority.asked("/order"), authority.asked("/account")), (2, 1), "nothing was begun anew");
    // A name that is wanted no more, and one that is new.
    let config = std::fs::read_to_string(tidegate.config()).unwrap();
    let table = authority.table(&["a.example", "b.example"], kept.path());
    tidegate
        .write_config(&config.replace(&table, &authority.table(&["a.example", "c.example"], kept.path())));
    assert!(tidegate.command(&["reload"]).status.success());
    eventually("the new one is ordered", || (authority.asked("/order") == 3).then_some(()));
    assert_eq!(authority.asked("/account"), 1);
}

#[test]
fn account_that_cannot_be_read_is_set_aside() {
    let (authority, tidegate, kept) =
        failure(|request| (request.target == "/order").then(|| problem(403, "not today")), "not today");
    assert_eq!(authority.asked("/account"), 1);
    let folder = std::fs::read_dir(kept.path()).unwrap().next().unwrap().unwrap().path();
    std::fs::write(folder.join("account.json"), "{ \"email\": nu").unwrap();
    assert!(tidegate.command(&["reload"]).status.success());
    eventually("another account", || (authority.asked("/account") == 2).then_some(()));
    assert!(folder.join("account.json.unusable").exists());
}
