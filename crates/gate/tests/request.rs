//! URL and cookie control: what becomes of a request that violates a rule, and of its connection.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

mod support;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use support::requests::*;
use support::*;
use tidegate_core::Verdict;
use tidegate_gate::{Asked, Gate, Mechanism, Options};
use tidegate_policy::{Action, Profile};

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
