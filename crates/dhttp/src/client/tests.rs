use super::*;
use crate::wire::{Answer, Numbered, Once, PieceRange, Response};

const GET: &[u8] = b"GET /a HTTP/1.1\r\nHost: example\r\n\r\n";
const OK: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab";
const TOKEN: &[u8] = b"twenty bytes of token";

fn server() -> SocketAddr {
    "192.0.2.1:8080".parse().unwrap()
}

fn get() -> NewRequest {
    NewRequest {
        server: server(),
        site: "example".into(),
        method: Method::Get,
        http: Bytes::from_static(GET),
        by_tcp: false,
    }
}

/// Waits for the paper's timers only.
fn unprobed() -> ClientConfig {
    ClientConfig { probe_after: Duration::ZERO, ..ClientConfig::default() }
}

struct Bench {
    client: Client,
    generation: Generation,
    now: Instant,
}

impl Bench {
    fn new(config: ClientConfig) -> Self {
        let mut client = Client::new(config, [3; 32]);
        let now = Instant::now();
        let generation = client.use_ports(41_000, now);
        Self { client, generation, now }
    }

    fn start(&mut self, request: NewRequest) -> RequestId {
        let id = self.client.start(request, self.now).unwrap();
        self.client.check_invariants();
        id
    }

    fn receive(&mut self, from: SocketAddr, id: RequestId, answer: Answer<'_>) {
        let mut datagram = Vec::new();
        Response { id, answer }.write(&mut datagram);
        self.client.handle_datagram(self.generation, from, &datagram, self.now);
        self.client.check_invariants();
    }

    fn http(&mut self, from: SocketAddr, id: RequestId, http: &[u8]) {
        self.receive(from, id, Answer::Http { token: None, http });
    }

    fn sent(&mut self) -> Option<Vec<u8>> {
        self.client.poll_transmit().map(|transmit| transmit.payload)
    }

    fn time_out(&mut self) {
        self.now = self.client.poll_timeout().expect("a timer runs");
        self.client.handle_timeout(self.now);
        self.client.check_invariants();
    }
}

#[test]
fn responses_in_any_order_are_matched_by_id() {
    let mut bench = Bench::new(ClientConfig::default());
    let ids: Vec<RequestId> = (0..3).map(|_| bench.start(get())).collect();
    for id in ids.iter().rev() {
        bench.http(server(), *id, OK);
        let event = bench.client.poll_event();
        assert!(matches!(event, Some(Event::Response { id: got, .. }) if got == *id), "{event:?}");
    }
}

#[test]
fn an_id_is_accepted_once_and_never_from_nowhere() {
    let mut bench = Bench::new(ClientConfig::default());
    let id = bench.start(get());
    bench.http(server(), RequestId([7; 8]), OK);
    assert_eq!(bench.client.poll_event(), None);
    let mut datagram = id.0.to_vec();
    datagram.extend_from_slice(OK);
    let elsewhere = bench.client.use_ports(42_000, bench.now);
    bench.client.handle_datagram(elsewhere, server(), &datagram, bench.now);
    assert_eq!(bench.client.poll_event(), None, "the request did not come from this port");
    bench.http(server(), id, OK);
    assert!(bench.client.poll_event().is_some());
    for _ in 0..2 {
        bench.http(server(), id, OK);
        assert_eq!(bench.client.claim(bench.generation, server().ip(), id), Err(ClaimError::Unmatched));
        assert_eq!(bench.client.poll_event(), None);
        bench.client.finish(id);
    }
    assert_eq!(bench.client.metrics.dhttp_client_late_total.get(), 2);
    assert_eq!(bench.client.metrics.dhttp_client_unmatched_total.get(), 4);
}

#[test]
fn a_request_without_an_answer_is_sent_again_with_the_flag_and_then_goes_by_tcp() {
    let mut bench = Bench::new(ClientConfig { jitter: 0.0, ..unprobed() });
    let start = bench.now;
    let id = bench.start(get());
    assert!(!Request::parse(&bench.sent().unwrap()).unwrap().resend);
    for seconds in [5, 15] {
        bench.time_out();
        assert_eq!(bench.now - start, Duration::from_secs(seconds));
        let payload = bench.sent().unwrap();
        let request = Request::parse(&payload).unwrap();
        assert!(request.resend && request.id == id && request.http == GET && request.other_port == 41_000);
    }
    bench.time_out();
    assert_eq!(bench.now - start, Duration::from_secs(25));
    assert_eq!(bench.sent(), None);
    assert_eq!(bench.client.poll_event(), Some(Event::UseTcp { id, reason: TcpReason::NoAnswer }));
    assert_eq!(bench.client.poll_timeout(), None);
}

#[test]
fn waits_differ_by_the_jitter_and_no_more() {
    let mut bench = Bench::new(ClientConfig::default());
    let waits: Vec<f64> = (0..200).map(|_| bench.client.wait(1).as_secs_f64()).collect();
    assert!(waits.iter().all(|wait| (4.5..=5.5).contains(wait)));
    assert!(waits.iter().any(|wait| *wait < 4.8) && waits.iter().any(|wait| *wait > 5.2));
    assert!(bench.client.wait(u32::MAX) <= Duration::from_secs(11));
}

#[test]
fn what_must_not_be_repeated_or_is_too_long_never_goes_by_udp() {
    let mut bench = Bench::new(ClientConfig { once: false, ..ClientConfig::default() });
    let long = Bytes::from(vec![b'x'; 1461]);
    for request in [
        NewRequest { method: Method::Post, ..get() },
        NewRequest { method: Method::Other, ..get() },
        NewRequest { by_tcp: true, ..get() },
        NewRequest { http: long.clone(), ..get() },
        NewRequest { server: "[2001:db8::1]:80".parse().unwrap(), http: long.slice(..1441), ..get() },
    ] {
        let id = bench.start(request);
        assert_eq!(bench.sent(), None);
        assert_eq!(bench.client.poll_event(), Some(Event::UseTcp { id, reason: TcpReason::Request }));
        assert_eq!(bench.client.poll_timeout(), None);
    }
    bench.start(NewRequest { http: long.slice(..1460), ..get() });
    assert_eq!(bench.sent().unwrap().len(), 1472);
}

fn post() -> NewRequest {
    NewRequest {
        method: Method::Post,
        http: Bytes::from_static(b"POST /a HTTP/1.1\r\nHost: example\r\n\r\n"),
        ..get()
    }
}

fn new_ticket(ticket: u8, refused: Once, age_s: u32) -> Answer<'static> {
    Answer::NewTicket { token: TOKEN, ticket: [ticket; 16], refused: refused.ticket_tail(), age_s }
}

fn once_of(datagram: Option<Vec<u8>>) -> Once {
    Request::parse(&datagram.expect("it was sent")).unwrap().once
}

fn numbered(ticket: u8, number: u32) -> Once {
    Once::Numbered(Numbered { ticket: [ticket; 16], number })
}

#[test]
fn what_must_not_be_repeated_is_numbered_within_the_servers_ticket() {
    let mut bench = Bench::new(unprobed());
    let first = bench.start(post());
    assert_eq!(once_of(bench.sent()), Once::Unnumbered);
    bench.receive(server(), first, new_ticket(7, Once::No, 0));
    assert_eq!(once_of(bench.sent()), numbered(7, 0));
    bench.start(post());
    assert_eq!(once_of(bench.sent()), numbered(7, 1));
    bench.time_out();
    assert_eq!(once_of(bench.sent()), numbered(7, 0), "sent again it is the same request");
    bench.start(get());
    while let Some(datagram) = bench.sent() {
        let once = Request::parse(&datagram).unwrap().once;
        assert!(once == Once::No || once == numbered(7, 1));
    }
}

#[test]
fn two_tickets_for_two_copies_of_a_request_do_not_make_two_requests_of_it() {
    let mut bench = Bench::new(ClientConfig::default());
    let id = bench.start(post());
    bench.sent();
    bench.receive(server(), id, new_ticket(7, Once::No, 100));
    assert_eq!(once_of(bench.sent()), numbered(7, 0));
    bench.receive(server(), id, new_ticket(8, Once::No, 100));
    bench.receive(server(), id, new_ticket(7, Once::No, 100));
    assert_eq!(bench.sent(), None);
}

#[test]
fn a_ticket_out_of_date_is_replaced_by_a_server_that_has_been_there_all_the_time() {
    let mut bench = Bench::new(ClientConfig::default());
    let id = bench.start(post());
    bench.sent();
    bench.receive(server(), id, new_ticket(7, Once::No, 100));
    bench.sent();
    bench.receive(server(), id, new_ticket(8, numbered(7, 0), 100));
    assert_eq!(once_of(bench.sent()), numbered(8, 0));
}

#[test]
fn what_a_server_may_have_executed_before_it_was_started_again_is_not_sent_again() {
    let mut bench = Bench::new(unprobed());
    let id = bench.start(post());
    bench.sent();
    bench.receive(server(), id, new_ticket(7, Once::No, 100));
    bench.sent();
    bench.time_out();
    bench.sent();
    bench.receive(server(), id, new_ticket(8, numbered(7, 0), 3));
    assert_eq!((bench.sent(), bench.client.poll_event()), (None, Some(Event::OutcomeUnknown { id })));
    bench.start(post());
    assert_eq!(once_of(bench.sent()), Once::Unnumbered, "the old ticket is forgotten");
}

#[test]
fn what_was_numbered_goes_nowhere_else_when_the_server_is_gone() {
    let mut bench = Bench::new(ClientConfig::default());
    let unnumbered = bench.start(post());
    bench.client.handle_unreachable(server(), bench.now);
    assert_eq!(bench.client.poll_event(), Some(Event::UseHttp { id: unnumbered }));
    let mut bench = Bench::new(ClientConfig::default());
    let id = bench.start(post());
    bench.receive(server(), id, new_ticket(7, Once::No, 100));
    bench.client.handle_unreachable(server(), bench.now);
    assert_eq!(bench.client.poll_event(), Some(Event::OutcomeUnknown { id }));
}

#[test]
fn a_request_told_to_use_tcp_says_there_which_one_it_is() {
    let mut bench = Bench::new(ClientConfig::default());
    let id = bench.start(post());
    bench.receive(server(), id, new_ticket(7, Once::No, 100));
    bench.receive(server(), id, Answer::UseTcp);
    let header = bench.client.tcp_header(id, 40_000);
    assert_eq!(Request::parse_prefix(&header).unwrap().unwrap().once, numbered(7, 0));
}

#[test]
fn numbers_under_way_lie_within_the_servers_window() {
    let mut bench = Bench::new(ClientConfig::default());
    let first = bench.start(post());
    bench.receive(server(), first, new_ticket(7, Once::No, 100));
    for _ in 1..128 {
        bench.start(post());
        assert_eq!(bench.client.poll_event(), None);
    }
    let beyond = bench.start(post());
    let expected = Event::UseTcp { id: beyond, reason: TcpReason::Request };
    assert_eq!(bench.client.poll_event(), Some(expected));
    assert!(!bench.client.is_numbered(beyond));
    bench.client.finish(first);
    bench.start(post());
    assert_eq!(bench.client.poll_event(), None);
}

#[test]
fn a_server_that_asks_for_tcp_gets_it_once() {
    let mut bench = Bench::new(ClientConfig::default());
    let id = bench.start(get());
    for expected in [Some(Event::UseTcp { id, reason: TcpReason::Asked }), None] {
        bench.receive(server(), id, Answer::UseTcp);
        assert_eq!(bench.client.poll_event(), expected);
    }
    let header = bench.client.tcp_header(id, 40_123);
    let request = Request::parse(&header).unwrap();
    assert_eq!((request.id, request.other_port, request.http), (id, 40_123, &b""[..]));
}

#[test]
fn a_token_is_sent_at_once_when_asked_for_and_with_requests_to_come() {
    let mut bench = Bench::new(ClientConfig::default());
    let id = bench.start(get());
    assert_eq!(Request::parse(&bench.sent().unwrap()).unwrap().token, Some(&[][..]));
    for _ in 0..2 {
        bench.receive(server(), id, Answer::ProveAddress { token: TOKEN });
    }
    let payload = bench.sent().unwrap();
    let request = Request::parse(&payload).unwrap();
    assert_eq!((request.token, request.resend, request.id), (Some(TOKEN), false, id));
    assert_eq!(bench.sent(), None, "a duplicate of the question is not answered");
    bench.start(get());
    assert_eq!(Request::parse(&bench.sent().unwrap()).unwrap().token, Some(TOKEN));
    bench.start(NewRequest { server: "192.0.2.1:8081".parse().unwrap(), ..get() });
    assert_eq!(Request::parse(&bench.sent().unwrap()).unwrap().token, Some(&[][..]));
}

#[test]
fn every_request_that_is_asked_for_a_token_is_sent_again_though_they_are_given_the_same() {
    let mut bench = Bench::new(ClientConfig::default());
    let ids = [bench.start(get()), bench.start(get())];
    while bench.sent().is_some() {}
    for id in ids {
        bench.receive(server(), id, Answer::ProveAddress { token: TOKEN });
        let payload = bench.sent().unwrap();
        let request = Request::parse(&payload).unwrap();
        assert_eq!((request.id, request.token), (id, Some(TOKEN)));
    }
}

#[test]
fn a_server_that_never_believes_a_token_is_not_asked_for_ever() {
    let mut bench = Bench::new(ClientConfig::default());
    let id = bench.start(get());
    let mut sent = 0;
    for n in 0..100 {
        bench.receive(server(), id, Answer::ProveAddress { token: &[n; 20] });
        while bench.sent().is_some() {
            sent += 1;
        }
    }
    assert_eq!(sent, 1 + MOST_PROOFS);
}

#[test]
fn a_connection_claims_a_response_once() {
    let mut bench = Bench::new(ClientConfig::default());
    let id = bench.start(get());
    assert_eq!(bench.client.claim(bench.generation, server().ip(), id), Ok(Method::Get));
    assert_eq!(bench.client.claim(bench.generation, server().ip(), id), Err(ClaimError::Unmatched));
    bench.http(server(), id, OK);
    assert_eq!(bench.client.poll_event(), None);
    bench.client.on_claim_broken(id);
    assert_eq!(bench.client.poll_event(), Some(Event::UseTcp { id, reason: TcpReason::BadAnswer }));
    bench.client.on_claim_broken(id);
    assert_eq!(bench.client.poll_event(), None);
}

#[test]
fn a_refused_cache_makes_the_request_go_past_it() {
    let caches = CachePolicy { accept: false, ..CachePolicy::default() };
    let cache: SocketAddr = "198.51.100.1:8080".parse().unwrap();
    let mut bench = Bench::new(ClientConfig { caches, ..ClientConfig::default() });
    let id = bench.start(get());
    bench.http(cache, id, OK);
    assert_eq!(bench.client.poll_event(), Some(Event::UseTcp { id, reason: TcpReason::CacheRefused }));
    let id = bench.start(get());
    assert_eq!(bench.client.claim(bench.generation, cache.ip(), id), Err(ClaimError::CacheRefused));
    assert_eq!(bench.client.poll_event(), Some(Event::UseTcp { id, reason: TcpReason::CacheRefused }));
    let mut accepting = Bench::new(ClientConfig::default());
    let id = accepting.start(get());
    accepting.http(cache, id, OK);
    assert!(matches!(accepting.client.poll_event(), Some(Event::Response { from, .. }) if from == cache));
}

#[test]
fn an_unreachable_server_is_spoken_to_by_http_for_a_while() {
    let mut bench = Bench::new(ClientConfig::default());
    bench.client.handle_unreachable(server(), bench.now);
    let ids = [bench.start(get()), bench.start(get())];
    assert!(bench.sent().is_some(), "ICMP about nothing that was sent is not believed");
    let other = bench.start(NewRequest { server: "192.0.2.9:80".parse().unwrap(), ..get() });
    bench.client.handle_unreachable(server(), bench.now);
    let mut events = vec![bench.client.poll_event(), bench.client.poll_event()];
    for id in ids {
        let expected = Some(Event::UseHttp { id });
        assert!(events.contains(&expected));
        events.retain(|event| *event != expected);
    }
    assert_eq!(bench.client.poll_event(), None);
    bench.client.finish(other);
    let id = bench.start(get());
    assert_eq!(bench.client.poll_event(), Some(Event::UseHttp { id }));
    bench.now += Duration::from_secs(301);
    while bench.sent().is_some() {}
    bench.start(get());
    assert!(bench.sent().is_some());
}

#[test]
fn a_malformed_answer_makes_the_request_go_by_tcp() {
    let mut bench = Bench::new(ClientConfig::default());
    let id = bench.start(get());
    bench.http(server(), id, b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab");
    assert_eq!(bench.client.poll_event(), Some(Event::UseTcp { id, reason: TcpReason::BadAnswer }));
}

#[test]
fn ports_change_after_so_many_requests_and_so_much_time() {
    let mut bench = Bench::new(ClientConfig { port_requests: 2, ..ClientConfig::default() });
    let first = bench.start(get());
    assert!(!bench.client.wants_ports(bench.now));
    assert!(bench.client.wants_ports(bench.now + Duration::from_secs(331)));
    let second = bench.start(get());
    assert!(bench.client.wants_ports(bench.now));
    let next = bench.client.use_ports(42_000, bench.now);
    assert!(bench.client.is_in_use(bench.generation));
    bench.client.finish(first);
    bench.client.finish(second);
    assert!(!bench.client.is_in_use(bench.generation) && bench.client.is_in_use(next));
    bench.client.check_invariants();
    let ports: std::collections::HashSet<u16> = (0..100).map(|_| bench.client.random_port()).collect();
    assert!(ports.len() > 90 && ports.iter().all(|port| *port >= 32_768));
}

#[test]
fn more_requests_than_may_be_outstanding_are_refused() {
    let mut bench = Bench::new(ClientConfig { outstanding: 1, ..ClientConfig::default() });
    let id = bench.start(get());
    assert_eq!(bench.client.start(get(), bench.now), Err(StartError::TooMany { limit: 1 }));
    bench.client.finish(id);
    bench.start(get());
}

proptest::proptest! {
    #[test]
    fn any_datagrams_leave_a_waiting_request_alone(datagrams: Vec<Vec<u8>>) {
        let mut bench = Bench::new(ClientConfig::default());
        bench.start(get());
        for datagram in datagrams {
            bench.client.handle_datagram(bench.generation, server(), &datagram, bench.now);
            bench.client.check_invariants();
        }
        assert_eq!(bench.client.poll_event(), None);
    }
}

/// A response in pieces of 1,000 bytes.
fn pieces(http: &[u8]) -> Vec<Answer<'_>> {
    let (tag, total) = (crate::pieces::tag_of(http), http.len() as u32);
    let offsets = (0..total).step_by(1000);
    http.chunks(1000)
        .zip(offsets)
        .map(|(piece, offset)| Answer::Piece { tag, total, offset, piece })
        .collect()
}

fn long(body: u8) -> Vec<u8> {
    [&b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n"[..], &[body; 5000]].concat()
}

#[test]
fn pieces_in_any_order_give_the_response_and_missing_ones_are_asked_for() {
    let mut bench = Bench::new(ClientConfig::default());
    let id = bench.start(get());
    let first = bench.sent().unwrap();
    assert_eq!(Request::parse(&first).unwrap().pieces, Pieces::Accepted);
    let http = long(b'a');
    let all = pieces(&http);
    for piece in [5, 0, 3, 3] {
        bench.receive(server(), id, all[piece]);
    }
    let start = bench.now;
    bench.time_out();
    assert_eq!(bench.now - start, ClientConfig::default().repair_timeout);
    let repair = bench.sent().unwrap();
    let repair = Request::parse(&repair).unwrap();
    let Pieces::Repair { tag, ranges } = repair.pieces else { panic!("{repair:?}") };
    let ranges: Vec<_> = PieceRange::read_all(ranges).map(|range| (range.offset, range.length)).collect();
    assert_eq!((tag, ranges), (crate::pieces::tag_of(&http), vec![(1000, 2000), (4000, 1000)]));
    assert!(!repair.resend && repair.id == id);
    for piece in [4, 2, 1] {
        bench.receive(server(), id, all[piece]);
    }
    let event = bench.client.poll_event();
    assert!(matches!(&event, Some(Event::Response { http: got, .. }) if *got == http), "{event:?}");
    bench.receive(server(), id, all[0]);
    assert_eq!(bench.client.poll_event(), None);
}

#[test]
fn pieces_of_two_responses_are_not_mixed() {
    let mut bench = Bench::new(ClientConfig::default());
    let id = bench.start(get());
    let (old, new) = (long(b'a'), long(b'b'));
    bench.receive(server(), id, pieces(&old)[0]);
    pieces(&new).iter().skip(1).for_each(|piece| bench.receive(server(), id, *piece));
    assert_eq!(bench.client.poll_event(), None);
    bench.receive(server(), id, pieces(&new)[0]);
    let event = bench.client.poll_event();
    assert!(matches!(&event, Some(Event::Response { http, .. }) if *http == new), "{event:?}");
}

#[test]
fn pieces_that_never_come_end_in_a_connection_and_too_long_responses_are_ignored() {
    let mut bench = Bench::new(ClientConfig::default());
    let id = bench.start(get());
    bench.receive(server(), id, Answer::Piece { tag: 1, total: u32::MAX, offset: 0, piece: b"x" });
    assert_eq!(bench.client.metrics.dhttp_client_malformed_total.get(), 1);
    bench.receive(server(), id, pieces(&long(b'a'))[2]);
    (0..=MOST_REPAIRS).for_each(|_| bench.time_out());
    assert_eq!(bench.client.poll_event(), Some(Event::UseTcp { id, reason: TcpReason::NoAnswer }));
    assert_eq!(bench.client.metrics.dhttp_client_repairs_total.get(), u64::from(MOST_REPAIRS));
    assert_eq!(bench.client.poll_timeout(), None);
}

#[test]
fn a_sealed_request_is_answered_by_whom_has_the_key_only() {
    let mut bench = Bench::new(ClientConfig::default());
    let mut keys = crate::sealed::ServerKeys::new([4; 32], 1000);
    let key = keys.current(0).0;
    let id = bench.client.start_sealed(get(), Some(key), bench.now).unwrap();
    let mut datagram = bench.sent().unwrap();
    assert!(!datagram.windows(4).any(|part| part == b"HTTP"));
    datagram[10] &= !SEALED_FLAG;
    let request = Request::parse(&datagram).unwrap();
    let (http, sealer) = keys.open_request(request.http, id, Once::No, 0).unwrap();
    assert_eq!(http, GET);
    bench.http(server(), id, OK);
    let forged = [&b"S"[..], OK].concat();
    bench.receive(server(), id, Answer::Http { token: Some(b""), http: &forged });
    assert_eq!(bench.client.claim(bench.generation, server().ip(), id), Err(ClaimError::Unmatched));
    bench.client.handle_unreachable("192.0.2.9:1".parse().unwrap(), bench.now);
    assert_eq!(bench.client.poll_event(), None);
    bench.receive(server(), id, Answer::Http { token: Some(b""), http: &sealer.seal(OK) });
    assert!(matches!(bench.client.poll_event(), Some(Event::Response { http, .. }) if http == OK));
}

#[test]
fn a_sealed_request_never_goes_by_http() {
    let mut bench = Bench::new(ClientConfig::default());
    let key = crate::sealed::ServerKeys::new([4; 32], 1000).current(0).0;
    let id = bench.client.start_sealed(get(), Some(key), bench.now).unwrap();
    bench.client.handle_unreachable(server(), bench.now);
    assert_eq!(bench.client.poll_event(), Some(Event::UseTcp { id, reason: TcpReason::NoAnswer }));
}

/// The probe that is sent next, after `wait`.
fn next_probe(bench: &mut Bench, wait: Duration) -> RequestId {
    let before = bench.now;
    bench.time_out();
    assert_eq!(bench.now - before, wait);
    let payload = bench.sent().expect("a probe is sent");
    let probe = Request::parse(&payload).unwrap();
    assert!(probe.http.starts_with(b"OPTIONS * ") && probe.token == Some(b"") && !probe.resend);
    assert!(bench.sent().is_none());
    probe.id
}

#[test]
fn a_server_that_udp_does_not_reach_is_asked_by_tcp_after_a_moment_and_at_once_the_next_time() {
    let mut bench = Bench::new(ClientConfig::default());
    let config = ClientConfig::default();
    let ids = [bench.start(get()), bench.start(get())];
    while bench.sent().is_some() {}
    let other = bench.start(NewRequest { server: "192.0.2.9:80".parse().unwrap(), ..get() });
    bench.http("192.0.2.9:80".parse().unwrap(), other, OK);
    assert!(bench.client.poll_event().is_some() && bench.sent().is_some());
    let probes = [next_probe(&mut bench, config.probe_after), next_probe(&mut bench, config.probe_after)];
    bench.time_out();
    let gone: Vec<_> = std::iter::from_fn(|| bench.client.poll_event()).collect();
    assert!(ids.iter().all(|id| gone.contains(&Event::UseTcp { id: *id, reason: TcpReason::NoAnswer })));
    assert_eq!(gone.len(), 2);
    assert_eq!(bench.client.metrics.dhttp_client_silent_total.get(), 1);
    // That it is so is believed for longer once TCP has brought an answer.
    bench.client.on_tcp_answered(ids[0], bench.now);
    bench.now += config.max_timeout * 2;
    let id = bench.start(get());
    assert_eq!(bench.client.poll_event(), Some(Event::UseTcp { id, reason: TcpReason::NoAnswer }));
    assert!(bench.sent().is_none());
    bench.now += config.unreachable_for;
    bench.start(get());
    assert!(bench.sent().is_some(), "it is tried again");
    // Answers to probes that nobody waits for any more change nothing.
    for probe in probes {
        bench.receive(server(), probe, Answer::ProveAddress { token: TOKEN });
    }
}

#[test]
fn a_server_that_answers_neither_by_tcp_is_tried_by_udp_again_soon() {
    let mut bench = Bench::new(ClientConfig::default());
    bench.start(get());
    bench.sent();
    (0..3).for_each(|_| bench.time_out());
    bench.now += ClientConfig::default().max_timeout;
    while bench.sent().is_some() {}
    bench.start(get());
    assert!(bench.sent().is_some());
}

#[test]
fn a_server_that_takes_its_time_shows_that_it_is_there_and_is_waited_for() {
    let mut bench = Bench::new(ClientConfig { jitter: 0.0, ..ClientConfig::default() });
    let start = bench.now;
    let id = bench.start(get());
    bench.sent();
    let probe = next_probe(&mut bench, ClientConfig::default().probe_after);
    bench.receive(server(), probe, Answer::ProveAddress { token: TOKEN });
    assert_eq!((bench.sent(), bench.client.poll_event()), (None, None));
    bench.time_out();
    assert_eq!(bench.now - start, Duration::from_secs(5));
    let resent = bench.sent().unwrap();
    let resent = Request::parse(&resent).unwrap();
    assert!(resent.resend && resent.id == id && resent.token == Some(TOKEN), "the token is of use");
}

#[test]
fn a_server_that_was_there_a_moment_ago_is_waited_for_longer_and_then_known_no_more() {
    let mut bench = Bench::new(ClientConfig::default());
    let probe_after = ClientConfig::default().probe_after;
    let id = bench.start(get());
    bench.receive(server(), id, Answer::Http { token: Some(TOKEN), http: OK });
    assert!(bench.client.poll_event().is_some());
    let id = bench.start(get());
    while bench.sent().is_some() {}
    next_probe(&mut bench, probe_after * 4);
    // The request itself is due meanwhile.
    for _ in 0..10 {
        if bench.client.metrics.dhttp_client_silent_total.get() == 0 {
            bench.time_out();
        }
    }
    assert_eq!(bench.client.poll_event(), Some(Event::UseTcp { id, reason: TcpReason::NoAnswer }));
    while bench.sent().is_some() {}
    bench.now += ClientConfig::default().max_timeout;
    bench.start(get());
    assert_eq!(Request::parse(&bench.sent().unwrap()).unwrap().token, Some(&[][..]));
    next_probe(&mut bench, probe_after);
}

#[test]
fn a_late_answer_takes_back_that_udp_does_not_pass() {
    let mut bench = Bench::new(ClientConfig::default());
    let id = bench.start(get());
    bench.sent();
    (0..3).for_each(|_| bench.time_out());
    while bench.sent().is_some() {}
    assert!(matches!(bench.client.poll_event(), Some(Event::UseTcp { .. })));
    bench.http(server(), id, OK);
    assert_eq!(bench.client.poll_event(), None, "TCP has it");
    bench.start(get());
    assert!(bench.sent().is_some());
}

#[test]
fn nobody_but_who_has_seen_the_probe_can_answer_it() {
    let mut bench = Bench::new(ClientConfig::default());
    let id = bench.start(get());
    bench.sent();
    for _ in 0..2 {
        next_probe(&mut bench, ClientConfig::default().probe_after);
        bench.receive(server(), RequestId([9; 8]), Answer::ProveAddress { token: TOKEN });
    }
    bench.time_out();
    assert_eq!(bench.client.poll_event(), Some(Event::UseTcp { id, reason: TcpReason::NoAnswer }));
}
