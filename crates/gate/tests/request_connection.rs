//! To whom a request counts: segments that fit no connection, that come again, that the stack throws away.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

mod support;

use std::net::SocketAddr;
use support::requests::*;
use support::*;
use tidegate_core::Verdict;
use tidegate_gate::{Asked, Gate, Mechanism, Options};
use tidegate_policy::{Action, Profile};

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
