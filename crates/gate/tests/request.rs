//! URL and cookie control: what is asked for, and what becomes of the request and its connection.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

mod support;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use support::{
    ACK, CLIENT_PORT, Connection, Namespace, Pair, SERVER4, SERVER6, SYN, connect, explained, frame,
    is_dropped, needs_root, overflows, total,
};
use tidegate_core::Verdict;
use tidegate_gate::{Asked, Gate, Mechanism, Options, Why};
use tidegate_policy::{Action, CookiePattern, Policer, PortRange, Profile, RequestRule, RuleSet, When};

/// Rates so slow that no token comes back while a test runs.
const SLOW: f64 = 0.001;

fn rule(path: &str, action: Option<Action>) -> RequestRule {
    let path = path.parse().unwrap();
    RequestRule { path, cookie: None, limit: None, when: When::Always, action, class: None }
}

fn limited(path: &str, burst: u32, action: Action) -> RequestRule {
    RequestRule { limit: Some(Profile::new(SLOW, burst).unwrap()), ..rule(path, Some(action)) }
}

fn with_cookie(name: &str, value: &str, rule: RequestRule) -> RequestRule {
    RequestRule { cookie: Some(CookiePattern::new(name, value).unwrap()), ..rule }
}

fn set(requests: Vec<RequestRule>) -> RuleSet {
    RuleSet { requests, http_ports: vec![PortRange::one(80)], ..RuleSet::default() }
}

fn head(method: &str, target: &str, cookie: Option<&str>) -> String {
    let cookie = cookie.map(|value| format!("Cookie: {value}\r\n")).unwrap_or_default();
    format!("{method} {target} HTTP/1.1\r\nHost: a\r\n{cookie}User-Agent: x\r\n\r\n")
}

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

/// Listens like a server that sets TCP_DEFER_ACCEPT: it is woken by data.
fn deferring(address: &str) -> TcpListener {
    let listener = TcpListener::bind(address).unwrap();
    let seconds: libc::c_int = 30;
    // SAFETY: the option takes an int; the descriptor is open.
    let status = unsafe {
        libc::setsockopt(
            listener.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_DEFER_ACCEPT,
            (&raw const seconds).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    assert_eq!(status, 0);
    listener
}

fn is_reset(stream: &mut TcpStream) -> bool {
    matches!(stream.read(&mut [0; 64]), Err(error) if error.kind() == ErrorKind::ConnectionReset)
}

#[test]
fn violation_resets_the_client_and_never_wakes_the_server() {
    needs_root();
    let pair = Pair::new();
    let listener = deferring("[::]:80");
    listener.set_nonblocking(true).unwrap();
    let options = Options { reset_penalty: Duration::ZERO, ..Options::default() };
    let gate = pair.gate_with(&set(vec![rule("*noaccess*", Some(Action::Reset))]), &options);
    for (from, to) in [("10.77.0.2:0", format!("{SERVER4}:80")), ("[fd77::2]:0", format!("[{SERVER6}]:80"))] {
        for path in ["/noaccess/", &format!("/noaccess/{}", "y".repeat(1200)), "/x?noaccess", "/ok"] {
            let reset = pair.client.run(|| {
                let mut stream = connect(from, to.parse().unwrap());
                stream.write_all(head("GET", path, None).as_bytes()).unwrap();
                if !path.starts_with("/noaccess") {
                    return None;
                }
                Some(is_reset(&mut stream))
            });
            assert_eq!(reset, path.starts_with("/noaccess").then_some(true), "{from} {path}");
        }
    }
    // Of eight connections only those that complied are to be accepted, and nothing else was.
    let accepted = std::iter::from_fn(|| listener.accept().ok()).count();
    assert_eq!(accepted, 4);
    let report = explained(gate.show());
    assert_eq!(report.rules[0].refused, 4, "{report}");
    let total = |name: &str| report.totals.iter().find(|t| t.name == name).unwrap().value;
    assert_eq!((total("gate_requests_reset_total"), total("gate_resets_failed_total")), (4, 0));
}

#[test]
fn every_request_of_a_persistent_connection_is_policed() {
    needs_root();
    let pair = Pair::new();
    let listener = TcpListener::bind("[::]:80").unwrap();
    let options = Options { reset_penalty: Duration::ZERO, ..Options::default() };
    let _gate = pair.gate_with(&set(vec![limited("/cgi-bin/*", 3, Action::Reset)]), &options);
    std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            let mut served = 0;
            let mut buffer = [0; 4096];
            loop {
                match stream.read(&mut buffer) {
                    Ok(0) => panic!("closed without a reset"),
                    Ok(_) => {
                        served += 1;
                        stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").unwrap();
                    }
                    Err(error) => return (served, error.kind()),
                }
            }
        });
        let answered = pair.client.run(|| {
            let mut stream = connect("10.77.0.2:0", format!("{SERVER4}:80").parse().unwrap());
            let mut answered = 0;
            for path in ["/a", "/cgi-bin/1", "/b", "/cgi-bin/2", "/cgi-bin/3", "/c", "/cgi-bin/4"] {
                stream.write_all(head("GET", path, None).as_bytes()).unwrap();
                match stream.read(&mut [0; 64]) {
                    Ok(length) if length > 0 => answered += 1,
                    other => {
                        assert!(matches!(other, Err(error) if error.kind() == ErrorKind::ConnectionReset));
                        return answered;
                    }
                }
            }
            answered
        });
        assert_eq!(answered, 6);
        assert_eq!(server.join().unwrap(), (6, ErrorKind::ConnectionReset));
    });
}

#[test]
fn client_that_was_reset_is_silenced_for_the_time_configured() {
    needs_root();
    let pair = Pair::new();
    let _listener = TcpListener::bind("[::]:80").unwrap();
    let to: SocketAddr = format!("{SERVER4}:80").parse().unwrap();
    let reset_under = |penalty: Duration| {
        let options = Options { reset_penalty: penalty, ..Options::default() };
        let gate = pair.gate_with(&set(vec![rule("/bad", Some(Action::Reset))]), &options);
        pair.client.run(|| {
            let mut stream = connect("10.77.0.2:0", to);
            stream.write_all(head("GET", "/bad", None).as_bytes()).unwrap();
            assert!(is_reset(&mut stream));
        });
        gate
    };
    let gate = reset_under(Duration::from_secs(3600));
    pair.client.run(|| {
        assert!(is_dropped(&gate, "gate_penalty_syns_total", "10.77.0.2:0", to));
        connect("10.77.0.3:0", to);
    });
    gate.detach();
    // Until the time is over.
    let _gate = reset_under(Duration::from_millis(100));
    pair.client.run(|| connect("10.77.0.2:0", to));
}

#[test]
fn server_polices_what_no_segment_showed_and_nothing_twice() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let rules = set(vec![
        limited("/cgi-bin/*", 3, Action::Drop),
        limited("/refused/*", 1, Action::Refuse),
        rule("/never/*", Some(Action::Drop)),
    ]);
    let options = Options { for_server: true, ..Options::default() };
    let gate = explained(Gate::load(&rules, &options));
    let ask = |port: u16, path: &str| {
        let peer = SocketAddr::new("10.0.0.9".parse().unwrap(), port);
        gate.on_request(&Asked { peer, port: 80, path: path.as_bytes(), cookie: None }).verdict
    };
    // What the segment shows takes a token; the server that parses it takes none.
    let connection = Connection::open("10.0.0.9", "10.0.0.1");
    let segment = || connection.frame(head("GET", "/cgi-bin/a", None).as_bytes());
    assert!(explained(gate.try_frame(Mechanism::Tc, &segment(), 1)).passed);
    assert_eq!(ask(CLIENT_PORT, "/cgi-bin/a"), Verdict::Continue);
    let counts = |row: usize| {
        let report = explained(gate.show());
        (report.rules[row].passed, report.rules[row].refused)
    };
    assert_eq!(counts(0), (1, 0));
    // Hidden from the segment (in pieces, encoded, pipelined): the server takes the tokens, of the same bucket.
    assert_eq!(ask(CLIENT_PORT, "/cgi-bin/a"), Verdict::Continue);
    assert_eq!(ask(CLIENT_PORT, "/cgi-bin/a"), Verdict::Continue);
    assert_eq!(ask(CLIENT_PORT, "/cgi-bin/a"), Verdict::Drop);
    assert!(!explained(gate.try_frame(Mechanism::Tc, &segment(), 1)).passed);
    assert_eq!(counts(0), (3, 2));
    // A credit is one connection's and one rule's.
    assert_eq!(ask(CLIENT_PORT + 1, "/refused/a"), Verdict::Continue);
    assert_eq!(ask(CLIENT_PORT + 1, "/refused/a"), Verdict::Refuse);
    assert_eq!(ask(CLIENT_PORT, "/never/a"), Verdict::Drop);
    assert_eq!(ask(CLIENT_PORT, "/other"), Verdict::Continue);
    let server = explained(gate.show()).totals;
    let server = server.iter().find(|t| t.name == "gate_requests_refused_by_server_total").unwrap();
    assert_eq!(server.value, 3);
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
fn segment_that_comes_again_costs_no_second_token() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let connection = Connection::open("10.0.0.9", "10.0.0.1");
    for for_server in [false, true] {
        let options = Options { for_server, ..Options::default() };
        let gate = explained(Gate::load(&set(vec![limited("/cgi-bin/*", 3, Action::Drop)]), &options));
        let segment = || connection.frame(head("GET", "/cgi-bin/a", None).as_bytes());
        let passes = |segment: &[u8]| explained(gate.try_frame(Mechanism::Tc, segment, 1)).passed;
        let state = || {
            let report = explained(gate.show());
            let repeated =
                report.totals.iter().find(|t| t.name == "gate_requests_repeated_total").unwrap().value;
            (report.rules[0].passed, report.rules[0].refused, repeated)
        };
        let first = segment();
        assert!(passes(&first) && passes(&first) && passes(&first));
        assert_eq!(state(), (1, 0, 2));
        assert!(passes(&segment()), "the next request of the connection");
        assert_eq!(state(), (2, 0, 2));
        // It is no retransmission if the server has answered meanwhile.
        let mut later = first.clone();
        later[14 + 20 + 8] ^= 1;
        assert!(passes(&later));
        assert_eq!(state(), (3, 0, 2));
        assert!(passes(&later), "not even with an empty bucket is the repeated segment a new request");
        assert!(!passes(&segment()) && !passes(&first));
        assert_eq!(state(), (3, 2, 3));
        // The server that parses the requests takes none of those that were on a segment, however often they came.
        let peer = SocketAddr::new("10.0.0.9".parse().unwrap(), CLIENT_PORT);
        let ask = || gate.on_request(&Asked { peer, port: 80, path: b"/cgi-bin/a", cookie: None }).verdict;
        let parsed = (0..4).filter(|_| ask() == Verdict::Continue).count();
        assert_eq!(parsed, if for_server { 3 } else { 0 });
    }
}

#[test]
fn client_that_repeats_its_sequence_numbers_gains_little() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let gate = explained(Gate::load(&set(vec![limited("/cgi-bin/*", 2, Action::Drop)]), &Options::default()));
    let connection = Connection::open("10.0.0.9", "10.0.0.1");
    let segment = connection.frame(head("GET", "/cgi-bin/a", None).as_bytes());
    let passed = (0..100).filter(|_| explained(gate.try_frame(Mechanism::Tc, &segment, 1)).passed).count();
    // Two tokens, and of each the segments that the stack may have lost.
    assert_eq!(passed, 2 * (1 + 4));
}

#[test]
fn requests_that_a_full_accept_queue_throws_away_cost_one_token_each() {
    needs_root();
    const CLIENTS: usize = 8;
    let pair = Pair::new();
    let listener = deferring(&format!("{SERVER4}:80"));
    // Less than all, so that some wait for their handshake's end and find the accept queue full.
    socket2::SockRef::from(&listener).listen(CLIENTS as i32 / 2).unwrap();
    let options = Options { for_server: true, ..Options::default() };
    let gate = pair.gate_with(&set(vec![limited("/cgi-bin/*", CLIENTS as u32, Action::Reset)]), &options);
    let to: SocketAddr = format!("{SERVER4}:80").parse().unwrap();
    let mut clients: Vec<TcpStream> =
        pair.client.run(|| (0..CLIENTS).map(|_| connect("10.77.0.2:0", to)).collect());
    for client in &mut clients {
        client.write_all(head("GET", "/cgi-bin/a", None).as_bytes()).unwrap();
    }
    let deadline = Instant::now() + Duration::from_secs(10);
    while overflows() == 0 {
        assert!(Instant::now() < deadline, "nothing was thrown away");
        std::thread::sleep(Duration::from_millis(1));
    }
    for _ in 0..CLIENTS {
        let (mut served, peer) = listener.accept().unwrap();
        serve(&gate, &mut served, peer);
    }
    for client in &mut clients {
        assert!(matches!(client.read(&mut [0; 64]), Ok(1..)));
    }
    let report = explained(gate.show());
    assert_eq!((report.rules[0].passed, report.rules[0].refused), (CLIENTS as u64, 0), "{report}");
}

/// As a server: reads the request, asks whether it may be answered, answers.
fn serve(gate: &Gate, stream: &mut TcpStream, peer: SocketAddr) {
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    assert!(matches!(stream.read(&mut [0; 512]), Ok(1..)));
    let asked = Asked { peer, port: 80, path: b"/cgi-bin/a", cookie: None };
    assert_eq!(gate.on_request(&asked).verdict, Verdict::Continue);
    stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").unwrap();
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

#[test]
fn request_beyond_the_limit_of_its_class_is_reset_and_its_client_let_in_again() {
    needs_root();
    let pair = Pair::new();
    let listener = TcpListener::bind("[::]:80").unwrap();
    let mut rules = set(vec![rule("/high/*", None), rule("/low/*", None)]);
    rules.requests[0].class = Some(0);
    rules.requests[1].class = Some(1);
    let gate = pair.gate_with(&rules, &Options::default());
    explained(gate.limit_classes(&rules, &[None, Some(Profile::new(SLOW, 1).unwrap())]));
    let to: SocketAddr = format!("{SERVER4}:80").parse().unwrap();
    let ask = |path: &str| {
        let mut stream = pair.client.run(|| connect("10.77.0.2:0", to));
        stream.write_all(head("GET", path, None).as_bytes()).unwrap();
        let (mut served, _) = listener.accept().unwrap();
        served.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        served.read(&mut [0; 512]).map_err(|error| error.kind())
    };
    assert!(ask("/low/1").is_ok_and(|length| length > 0));
    // No worker waits for a segment that was dropped.
    assert_eq!(ask("/low/2"), Err(ErrorKind::ConnectionReset));
    assert!(ask("/high/1").is_ok_and(|length| length > 0), "no penalty");
}

#[test]
fn segment_that_fits_no_connection_takes_no_token_and_brings_no_penalty() {
    needs_root();
    for (client, server, other) in [("10.0.0.9", "10.0.0.1", "10.0.0.8"), ("fd00::9", "fd00::1", "fd00::8")] {
        let _namespace = Namespace::enter_new();
        let mut rules = set(vec![
            rule("/bad", Some(Action::Reset)),
            limited("/slow", 1, Action::Reset),
            rule("/low", None),
        ]);
        rules.requests[1].class = Some(0);
        rules.requests[2].class = Some(1);
        let gate = explained(Gate::load(&rules, &Options::default()));
        explained(gate.limit_classes(&rules, &[None, Some(Profile::new(SLOW, 1).unwrap())]));
        let connection = Connection::open(client, server);
        let passes = |frame: &[u8]| explained(gate.try_frame(Mechanism::Tc, frame, 1)).passed;
        for path in ["/bad", "/slow", "/low", "/slow", "/low"] {
            let text = head("GET", path, None);
            let text = text.as_bytes();
            // One that finds the listener alone, and two behind the window: what the stack does not take.
            assert_eq!(passes(&frame(other, server, 80, ACK, text)), path != "/bad");
            for offset in [1 << 24, 1 << 30] {
                assert!(!passes(&connection.frame_at(offset, text)), "{path} {offset}");
            }
            // All of it came before: the stack is to acknowledge it.
            for offset in [-(text.len() as i64), -(1 << 30)] {
                assert!(passes(&connection.frame_at(offset, text)), "{path} {offset}");
            }
        }
        let report = explained(gate.show());
        assert!(report.rules.iter().all(|rule| (rule.passed, rule.refused) == (0, 0)), "{report}");
        assert_eq!(total(&gate, "gate_requests_stray_total"), 5 * 3);
        assert_eq!(total(&gate, "gate_requests_reset_total"), 0);
        let may_connect = |client: &str| {
            explained(gate.try_frame(Mechanism::Xdp, &frame(client, server, 80, SYN, b""), 1)).passed
        };
        assert!(may_connect(client) && may_connect(other), "no penalty");
        // The tokens are all there for the connection, and its violation is one.
        for path in ["/low", "/slow"] {
            assert!(passes(&connection.frame(head("GET", path, None).as_bytes())), "{path}");
        }
        assert_eq!(total(&gate, "gate_class_policed_total"), 0);
        passes(&connection.frame(head("GET", "/low", None).as_bytes()));
        assert_eq!(total(&gate, "gate_class_policed_total"), 1);
        passes(&connection.frame(head("GET", "/bad", None).as_bytes()));
        assert!(!may_connect(client) && may_connect(other));
    }
}

#[test]
fn ipv6_segment_from_a_mapped_address_is_not_taken_for_the_ipv4_client() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let rules = set(vec![rule("/bad", Some(Action::Reset)), limited("/slow", 1, Action::Drop)]);
    let gate = explained(Gate::load(&rules, &Options::default()));
    let connection = Connection::open("10.0.0.9", "10.0.0.1");
    for path in ["/bad", "/slow", "/slow"] {
        let mut mapped = frame("fd00::9", "fd00::1", 80, ACK, head("GET", path, None).as_bytes());
        for (at, address) in [(22, [10, 0, 0, 9]), (38, [10, 0, 0, 1])] {
            mapped[at..at + 16].copy_from_slice(&[[0; 4], [0; 4], [0, 0, 255, 255], address].concat());
        }
        mapped[58..62].copy_from_slice(&connection.awaited().to_be_bytes());
        explained(gate.try_frame(Mechanism::Tc, &mapped, 1));
    }
    let syn = frame("10.0.0.9", "10.0.0.1", 80, SYN, b"");
    assert!(explained(gate.try_frame(Mechanism::Xdp, &syn, 1)).passed, "no penalty");
    let slow = connection.frame(head("GET", "/slow", None).as_bytes());
    assert!(explained(gate.try_frame(Mechanism::Tc, &slow, 1)).passed, "its token is there");
    assert_eq!(total(&gate, "gate_requests_passed_total"), 1);
}

#[test]
fn first_segment_with_a_valid_syn_cookie_is_of_a_connection() {
    needs_root();
    let _namespace = Namespace::enter_new();
    // Each SYN is answered with a cookie.
    std::fs::write("/proc/sys/net/ipv4/tcp_syncookies", "2").unwrap();
    let gate = explained(Gate::load(&set(vec![limited("/slow", 9, Action::Drop)]), &Options::default()));
    for (client, server) in [("10.0.0.9", "10.0.0.1"), ("fd00::9", "fd00::1")] {
        let mut connection = Connection::open(client, server);
        let (sequence, acknowledgement) = (connection.awaited(), connection.first_sent());
        connection.abort();
        let before = total(&gate, "gate_requests_stray_total");
        let text = head("GET", "/slow", None);
        let ask = |acknowledgement| {
            let segment = connection.frame_with(sequence, acknowledgement, text.as_bytes());
            explained(gate.try_frame(Mechanism::Tc, &segment, 1));
            (explained(gate.show()).rules[0].passed, total(&gate, "gate_requests_stray_total") - before)
        };
        let (passed, _) = ask(acknowledgement.wrapping_add(77));
        assert_eq!(ask(acknowledgement.wrapping_add(99)), (passed, 2), "{client}: no cookie");
        assert_eq!(ask(acknowledgement), (passed + 1, 2), "{client}: the cookie");
    }
}

#[test]
fn credits_for_segments_that_the_stack_threw_away_cannot_be_hoarded() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let options = Options { for_server: true, ..Options::default() };
    let gate = explained(Gate::load(&set(vec![limited("/cgi-bin/*", 100, Action::Drop)]), &options));
    let connection = Connection::open("10.0.0.9", "10.0.0.1");
    // In-window segments that never reach the server take their tokens.
    for _ in 0..60 {
        let segment = connection.frame(head("GET", "/cgi-bin/a", None).as_bytes());
        assert!(explained(gate.try_frame(Mechanism::Tc, &segment, 1)).passed);
    }
    assert_eq!(explained(gate.show()).rules[0].passed, 60);
    let peer = SocketAddr::new("10.0.0.9".parse().unwrap(), CLIENT_PORT);
    let ask = || gate.on_request(&Asked { peer, port: 80, path: b"/cgi-bin/a", cookie: None }).verdict;
    // What hides from the segments then has the tokens that are left, and a few credits.
    let served = (0..100).filter(|_| ask() == Verdict::Continue).count();
    assert_eq!(served, 40 + 8);
}

#[test]
fn next_requests_of_a_connection_are_policed_wherever_they_are_in_the_window() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let gate = explained(Gate::load(&set(vec![limited("/slow", 2, Action::Drop)]), &Options::default()));
    let connection = Connection::open("10.0.0.9", "10.0.0.1");
    let text = head("GET", "/slow", None);
    let passes = |offset| {
        let segment = connection.frame_at(offset, text.as_bytes());
        explained(gate.try_frame(Mechanism::Tc, &segment, 1)).passed
    };
    assert!(passes(0) && passes(1000) && !passes(2000), "two tokens");
    let counts = |gate: &Gate| {
        let report = explained(gate.show());
        (report.rules[0].passed, report.rules[0].refused)
    };
    assert_eq!(counts(&gate), (2, 1));
    // Not what only the number of another connection, or none, would explain.
    assert!(!passes(1 << 28) && passes(-(1 << 28)));
    assert_eq!(counts(&gate), (2, 1));
}
