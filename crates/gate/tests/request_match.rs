//! Which rule governs a request: by what its segment shows, and by no more.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

mod support;

use support::requests::*;
use support::*;
use tidegate_core::Verdict;
use tidegate_gate::{Gate, Mechanism, Options, Why};
use tidegate_policy::{Action, Policer};

#[test]
fn kernel_and_user_space_give_the_same_verdicts() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let rules = set(vec![
        rule("*noaccess*", Some(Action::Drop)),
        rule("/shop.html", None),
        limited("/index.html", 2, Action::Drop),
        limited("/cgi-bin/*", 3, Action::Drop),
        limited("/cgi-bin/slow/*", 1, Action::Drop),
        rule("/cgi-bin/slow/never", None),
        limited("*.php", 2, Action::Drop),
        rule("/refused/*", Some(Action::Refuse)),
        with_cookie("tier", "gold", rule("/cgi-bin/*", None)),
        with_cookie("tier", "bad", rule("*", Some(Action::Drop))),
        with_cookie("bot", "1", limited("*.html", 1, Action::Drop)),
        limited("*", 9, Action::Drop),
    ]);
    let gate = explained(Gate::load(&rules, &Options::default()));
    let mut policer = Policer::new(&rules).unwrap();
    let connection = Connection::open("10.0.0.9", "10.0.0.1");
    let (mut asked, mut dropped) = (0, 0);
    for round in 0..3 {
        for path in [
            "/",
            "/shop.html",
            "/shop.html2",
            "/index.html",
            "/cgi-bin/",
            "/cgi-bin/a",
            "/cgi-bi",
            "/cgi-bin/slow/a",
            "/cgi-bin/slow/never",
            "/cgi-bin/slow/never2",
            "/a.php",
            "/a.php5",
            "/refused/a",
            "/a/noaccess/b.php",
            "/x/noacces",
        ] {
            for query in ["", "?a=b", "?x=/noaccess/", "?f=a.php"] {
                for cookie in [
                    None,
                    Some("tier=gold"),
                    Some("a=b; tier=gold"),
                    Some("tier=golden; x=tier=gold"),
                    Some("tier=bad; z=1"),
                    Some("bot=1"),
                    Some("xbot=1"),
                ] {
                    for method in ["GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH"] {
                        let text = head(method, &format!("{path}{query}"), cookie);
                        let segment = connection.frame(text.as_bytes());
                        let kernel = explained(gate.try_frame(Mechanism::Tc, &segment, 1)).passed;
                        let user = policer.on_request(path.as_bytes(), cookie.map(str::as_bytes), 0).verdict;
                        assert_eq!(kernel, user != Verdict::Drop, "round {round}: {text}");
                        asked += 1;
                        dropped += u32::from(!kernel);
                    }
                }
            }
        }
    }
    assert!(dropped > asked / 4 && dropped < asked, "{dropped} of {asked}");
    let report = explained(gate.show());
    for (row, counts) in report.rules.iter().zip(policer.request_counts()) {
        if row.mechanism == Mechanism::Tc {
            assert_eq!((row.passed, row.refused), (counts.passed, counts.refused), "{}", row.rule);
        }
    }
    let why: Vec<Why> = report.rules.iter().map(|row| row.why).collect();
    assert_eq!(why[1], Why::PriorityOnly);
    assert_eq!(why[7], Why::OnlyServerAnswers);
    assert_eq!(why.iter().filter(|why| **why == Why::Earliest).count(), 8);
}

#[test]
fn what_a_segment_does_not_show_is_left_to_the_server() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let long = format!("/{}", "x".repeat(300));
    let gate = explained(Gate::load(
        &set(vec![
            rule(&long, Some(Action::Drop)),
            rule(&format!("/{}*", "x".repeat(50)), Some(Action::Drop)),
            with_cookie("tier", "bad", rule("*", Some(Action::Drop))),
        ]),
        &Options::default(),
    ));
    let passes = |port: u16, text: &str| {
        let segment = frame("10.0.0.9", "10.0.0.1", port, ACK, text.as_bytes());
        explained(gate.try_frame(Mechanism::Tc, &segment, 1)).passed
    };
    // The long path is not told apart from its beginning; a shorter one is.
    assert!(passes(80, &head("GET", &long, None)));
    assert!(!passes(80, &head("GET", &long[..100], None)));
    assert!(!passes(80, &head("GET", "/", Some("tier=bad"))));
    assert!(passes(443, &head("GET", "/", Some("tier=bad"))), "not a port with cleartext HTTP");
    // A head that goes on in the next segment may yet have the cookie.
    assert!(passes(80, "GET / HTTP/1.1\r\nHost: a\r\n"));
    // A cookie in a body is none.
    assert!(passes(80, "POST / HTTP/1.1\r\nHost: a\r\n\r\n\r\nCookie: tier=bad\r\n\r\n"));
    // Whatever else a segment begins with, and wherever it is cut.
    let whole = head("GET", "/", Some("tier=bad"));
    let shown = whole.find("bad\r").unwrap() + "bad\r".len();
    for cut in 1..whole.len() {
        assert_eq!(passes(80, &whole[..cut]), cut < shown, "{:?}", &whole[..cut]);
        assert!(passes(80, &whole[cut..]), "{:?}", &whole[cut..]);
    }
    assert!(
        explained(gate.show()).totals.iter().any(|t| t.name == "gate_requests_partial_total" && t.value > 0)
    );
}

#[test]
fn path_that_goes_on_in_the_next_segment_or_beyond_what_is_searched_has_no_end() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let rules = set(vec![
        rule("*.php", Some(Action::Drop)),
        rule("*noaccess*", Some(Action::Drop)),
        with_cookie("tier", "bad", rule("/a", Some(Action::Drop))),
    ]);
    let gate = explained(Gate::load(&rules, &Options::default()));
    let passes = |text: &str| {
        let segment = frame("10.0.0.9", "10.0.0.1", 80, ACK, text.as_bytes());
        explained(gate.try_frame(Mechanism::Tc, &segment, 1)).passed
    };
    let long = |length: usize| "x".repeat(length);
    for violates in ["/a.php", "/a.php?b", "/noaccess/"] {
        assert!(!passes(&head("GET", violates, None)), "{violates}");
    }
    assert!(!passes(&head("GET", "/a", Some("tier=bad"))) && passes(&head("GET", "/ab", Some("tier=bad"))));
    // Rules about cookies leave all heads without an end to the server; without them paths are seen nevertheless.
    let gate = explained(Gate::load(&set(rules.requests[..2].to_vec()), &Options::default()));
    let passes = |text: &str| {
        let segment = frame("10.0.0.9", "10.0.0.1", 80, ACK, text.as_bytes());
        explained(gate.try_frame(Mechanism::Tc, &segment, 1)).passed
    };
    assert!(passes("GET /a.php") && passes("GET /a.ph"));
    // The first 2,048 bytes end as a rule says, the path does not.
    for complies in [format!("/{}.php{}", long(2043), long(9)), format!("/{}/noaccess", long(2500))] {
        assert!(passes(&head("GET", &complies, None)), "{complies}");
    }
    assert!(!passes(&head("GET", &format!("/noaccess/{}", long(2500)), None)));
    assert!(!passes("GET /a.php ") && !passes("GET /a.php?") && !passes("GET /noaccess"));
}

#[test]
fn shortest_requests_are_seen_and_nothing_of_the_segment_before() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let gate = explained(Gate::load(&set(vec![rule("/0*", Some(Action::Drop))]), &Options::default()));
    let passes = |text: &str| {
        let segment = frame("10.0.0.9", "10.0.0.1", 80, ACK, text.as_bytes());
        explained(gate.try_frame(Mechanism::Tc, &segment, 1)).passed
    };
    for method in ["GET", "PUT", "POST", "HEAD", "PATCH", "DELETE", "OPTIONS"] {
        // Without a version, as some servers answer it (HTTP/0.9).
        let short = format!("{method} /0");
        assert!(!passes(&short) && !passes(&format!("{short}\n")) && !passes(&head(method, "/0", None)));
        for cut in 1..short.len() {
            assert!(passes(&short[..cut]), "{:?}", &short[..cut]);
        }
        assert!(passes(&format!("{method} /1")) && passes(&format!("{method}/0")), "{method}");
    }
}

#[test]
fn options_and_extension_headers_do_not_hide_a_request() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let gate = explained(Gate::load(&set(vec![rule("/bad", Some(Action::Drop))]), &Options::default()));
    let passes = |segment: &[u8]| explained(gate.try_frame(Mechanism::Tc, segment, 1)).passed;
    for (path, expected) in [("/bad", false), ("/good", true)] {
        let text = head("GET", path, None);
        let mut v4 = frame("10.0.0.9", "10.0.0.1", 80, ACK, text.as_bytes());
        assert_eq!(passes(&v4), expected);
        v4[14] = 0x46;
        v4.splice(34..34, [1, 1, 1, 1]);
        let length = (v4.len() - 14) as u16;
        v4[16..18].copy_from_slice(&length.to_be_bytes());
        assert_eq!(passes(&v4), expected, "IPv4 options");
        let mut v6 = frame("fd00::9", "fd00::1", 80, ACK, text.as_bytes());
        assert_eq!(passes(&v6), expected);
        // As many tags as pass before; at TC the stack has taken off the outermost.
        for tags in 1..=2 {
            for untagged in [&v4, &v6] {
                let mut tagged = untagged.clone();
                tagged.splice(12..12, [0x81, 0, 0, 0].repeat(tags));
                assert_eq!(passes(&tagged), expected, "{tags} tags");
            }
        }
        // Hop-by-hop options, destination options, a fragment that is the whole packet, then TCP.
        v6[20] = 0;
        let headers = [[60, 0, 1, 4, 0, 0, 0, 0], [44, 0, 1, 4, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0, 0, 7]];
        v6.splice(54..54, headers.concat());
        let length = (v6.len() - 54) as u16;
        v6[18..20].copy_from_slice(&length.to_be_bytes());
        assert_eq!(passes(&v6), expected, "IPv6 extension headers");
    }
}

#[test]
fn cookies_are_found_wherever_they_stand_however_many_rules_there_are() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let rules =
        (0..300).map(|i| with_cookie("tier", &format!("t{i}"), rule("*", Some(Action::Drop)))).collect();
    let gate = explained(Gate::load(&set(rules), &Options::default()));
    let report = explained(gate.show());
    assert!(report.rules.iter().all(|rule| rule.mechanism == Mechanism::Tc), "{report}");
    let passes = |text: &str| {
        let segment = frame("10.0.0.9", "10.0.0.1", 80, ACK, text.as_bytes());
        explained(gate.try_frame(Mechanism::Tc, &segment, 1)).passed
    };
    let long = "x".repeat(900);
    // At every place within the words that are compared at once.
    for path in (1..=17).map(|length| format!("/{}", "p".repeat(length))) {
        let get = |fields: &str| format!("GET {path} HTTP/1.1\r\nHost: a\r\n{fields}\r\n");
        for violates in [
            "Cookie: tier=t299\r\n",
            "cookie: tier=t0; b=c\r\n",
            "COOKIE:tier=t7\r\nAccept: x\r\n",
            "CooKie: a=b; tier=t12; c=d\r\n",
            "Cookie: a=b;tier=t12\r\n",
            "Cookie: a;;b; ; tier=t12;\r\n",
            &format!("Accept: {long}\r\nCookie: a={long}; tier=t33\r\n"),
        ] {
            assert!(!passes(&get(violates)), "{path} {violates:?}");
        }
        for complies in [
            "Cookie: tier=t300\r\n",
            "Cookie: tier=t29x; xtier=t1; a=tier=t1\r\n",
            "X-Cookie: tier=t1\r\n",
            "Accept: Cookie: tier=t1\r\n",
            "Cookie:\r\n",
            &format!("Cookie: {long}\r\n"),
            "",
        ] {
            assert!(passes(&get(complies)), "{path} {complies:?}");
        }
    }
    // What follows the head is none of its fields, and what goes on beyond the segment is the server's.
    assert!(passes("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 30\r\n\r\nx\r\nCookie: tier=t1\r\n\r\n"));
    let partial = || {
        let totals = explained(gate.show()).totals;
        totals.iter().find(|total| total.name.contains("partial")).unwrap().value
    };
    assert_eq!(partial(), 0);
    assert!(passes("GET / HTTP/1.1\r\nHost: a\r\nCookie: tier=t"));
    assert!(passes(&format!("GET / HTTP/1.1\r\nHost: {long}{long}{long}\r\nCookie: tier=t1\r\n\r\n")));
    assert_eq!(partial(), 2);
}
