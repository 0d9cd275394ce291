use std::time::Duration;

use super::*;
use crate::pieces::tag_of;
use crate::wire::{ID_BYTES, Once, Pieces, Request};

const GET: &[u8] = b"GET /a HTTP/1.1\r\nHost: example\r\n\r\n";
const TCP_PORT: u16 = 41_000;

fn client() -> SocketAddr {
    "192.0.2.1:40000".parse().unwrap()
}

struct Bench {
    server: Server,
    now: Instant,
    next: u64,
    pieces: Pieces<'static>,
}

impl Bench {
    fn new(config: ServerConfig) -> Self {
        let now = Instant::now();
        Self {
            server: Server::new(config, [1; 16], [2; 32], now, 1_700_000_000),
            now,
            next: 0,
            pieces: Pieces::Unknown,
        }
    }

    fn token(&mut self) -> Vec<u8> {
        let now_s = self.server.unix_s(self.now);
        self.server.tokens.issue(client(), now_s).to_vec()
    }

    fn datagram(&mut self, token: Option<&[u8]>, resend: bool, http: &[u8]) -> Vec<u8> {
        self.next += 1;
        let id = RequestId(self.next.to_be_bytes());
        let mut datagram = Vec::new();
        Request { id, other_port: TCP_PORT, resend, token, pieces: self.pieces, once: Once::No, http }
            .write(&mut datagram);
        datagram
    }

    fn receive(&mut self, datagram: &[u8]) -> Option<Ticket> {
        let received = self.server.handle_datagram(client(), datagram, self.now);
        self.server.check_invariants();
        match received {
            Received::Request { ticket, .. } => Some(ticket),
            Received::Executed { .. } | Received::Done => None,
        }
    }

    /// A request from a proved client.
    fn request(&mut self, resend: bool) -> Ticket {
        let token = self.token();
        let datagram = self.datagram(Some(&token), resend, GET);
        self.receive(&datagram).expect("a request")
    }

    fn respond(&mut self, ticket: Ticket, bytes: usize) -> Route {
        let route = self.server.respond(ticket, &response(bytes), self.now);
        self.server.check_invariants();
        route
    }

    /// A proved client's request, answered by a connection that was opened for it.
    fn sent_by_connection(&mut self) -> ConnectionId {
        let ticket = self.request(false);
        let connection = self.opened(ticket);
        assert!(self.server.next_response(connection, self.now).is_some());
        assert_eq!(self.server.next_response(connection, self.now), None);
        connection
    }

    /// The connection that is opened for a long response.
    fn opened(&mut self, ticket: Ticket) -> ConnectionId {
        match self.respond(ticket, 5000) {
            Route::Connection(Carrier::New(connection, _)) => connection,
            other => panic!("no connection: {other:?}"),
        }
    }

    fn sent(&mut self) -> Option<Vec<u8>> {
        self.server.poll_transmit().map(|transmit| transmit.payload)
    }
}

fn response(bytes: usize) -> Vec<u8> {
    let mut http = b"HTTP/1.1 200 OK\r\n\r\n".to_vec();
    http.resize(bytes, b'x');
    http
}

fn answer(payload: &[u8]) -> Answer<'_> {
    Response::parse(payload).unwrap().answer
}

#[test]
fn a_response_of_the_threshold_goes_by_udp_and_one_byte_more_by_a_connection() {
    let mut bench = Bench::new(ServerConfig::default());
    let ticket = bench.request(false);
    assert_eq!(bench.respond(ticket, 1460), Route::Datagram);
    let payload = bench.sent().unwrap();
    assert_eq!(answer(&payload), Answer::Http { token: None, http: &response(1460) });
    let ticket = bench.request(false);
    let route = bench.respond(ticket, 1461);
    assert!(
        matches!(route, Route::Connection(Carrier::New(_, to)) if to == SocketAddr::new(client().ip(), TCP_PORT))
    );
    assert_eq!(bench.sent(), None);
}

#[test]
fn a_short_response_carries_a_token_that_proves_the_address() {
    let mut bench = Bench::new(ServerConfig::default());
    let datagram = bench.datagram(Some(&[]), false, GET);
    let ticket = bench.receive(&datagram).unwrap();
    bench.respond(ticket, 60);
    let payload = bench.sent().unwrap();
    let Answer::Http { token: Some(token), .. } = answer(&payload) else { panic!("{payload:?}") };
    let datagram = bench.datagram(Some(token), false, GET);
    let ticket = bench.receive(&datagram).unwrap();
    assert!(matches!(bench.respond(ticket, 100_000), Route::Connection(Carrier::New(..))));
}

#[test]
fn an_unproved_address_gets_three_times_its_bytes_and_no_connection() {
    let mut bench = Bench::new(ServerConfig::default());
    let datagram = bench.datagram(Some(&[]), false, GET);
    let allowance = 3 * datagram.len();
    let ticket = bench.receive(&datagram).unwrap();
    bench.respond(ticket, allowance - ID_BYTES);
    assert_eq!(bench.sent().unwrap().len(), allowance);
    for (resend, bytes) in [(false, allowance - ID_BYTES + 1), (false, 2000)] {
        let datagram = bench.datagram(Some(&[]), resend, GET);
        let ticket = bench.receive(&datagram).unwrap();
        assert_eq!(bench.respond(ticket, bytes), Route::Datagram);
        let payload = bench.sent().unwrap();
        assert!(matches!(answer(&payload), Answer::ProveAddress { .. }), "{payload:?}");
        assert!(payload.len() <= allowance);
    }
    let datagram = bench.datagram(Some(b"forged token forged!"), true, GET);
    assert_eq!(bench.receive(&datagram), None, "a resend must go by a connection: it is not executed");
    assert!(matches!(answer(&bench.sent().unwrap()), Answer::ProveAddress { .. }));
    assert_eq!(bench.server.metrics.dhttp_tokens_refused_total.get(), 1);
}

#[test]
fn a_client_that_does_not_know_tokens_is_told_to_use_tcp() {
    let mut bench = Bench::new(ServerConfig::default());
    let datagram = bench.datagram(None, false, GET);
    let ticket = bench.receive(&datagram).unwrap();
    assert_eq!(bench.respond(ticket, 2000), Route::Datagram);
    assert_eq!(answer(&bench.sent().unwrap()), Answer::UseTcp);
}

#[test]
fn resent_requests_are_answered_by_connections_once() {
    let mut bench = Bench::new(ServerConfig::default());
    let token = bench.token();
    let datagram = bench.datagram(Some(&token), true, GET);
    let ticket = bench.receive(&datagram).unwrap();
    assert!(bench.server.must_use_connection(&ticket));
    assert!(matches!(bench.respond(ticket, 100), Route::Connection(Carrier::New(..))));
    assert_eq!(bench.receive(&datagram), None);
    assert_eq!(bench.server.metrics.dhttp_requests_answered_total.get(), 1);
}

#[test]
fn a_resend_of_a_request_in_flight_makes_its_answer_go_by_a_connection() {
    let mut bench = Bench::new(ServerConfig::default());
    let token = bench.token();
    let mut datagram = bench.datagram(Some(&token), false, GET);
    let ticket = bench.receive(&datagram).unwrap();
    datagram[10] |= 1;
    assert_eq!(bench.receive(&datagram), None);
    assert!(matches!(bench.respond(ticket, 100), Route::Connection(Carrier::New(..))));
}

#[test]
fn resends_of_what_is_still_being_made_are_no_sign_of_loss_and_those_of_what_was_sent_are() {
    let mut bench = Bench::new(ServerConfig::default());
    let token = bench.token();
    let is_high = |bench: &mut Bench| bench.server.loss.is_high_for(client().ip(), bench.now);
    let mut datagrams = Vec::new();
    for _ in 0..10 {
        let mut datagram = bench.datagram(Some(&token), false, GET);
        let ticket = bench.receive(&datagram).unwrap();
        datagram[10] |= 1;
        assert_eq!(bench.receive(&datagram), None);
        bench.server.abandon(ticket);
        datagrams.push(datagram);
    }
    assert!(!is_high(&mut bench));
    for datagram in &datagrams {
        let ticket = bench.receive(datagram).unwrap();
        bench.server.abandon(ticket);
    }
    assert!(is_high(&mut bench));
}

#[test]
fn in_high_loss_one_short_response_in_a_hundred_goes_by_udp() {
    let config = ServerConfig {
        connections: ConnectionLimits { pending: 100_000, ..ConnectionLimits::default() },
        ..ServerConfig::default()
    };
    let mut bench = Bench::new(config);
    for _ in 0..2000 {
        let ticket = bench.request(true);
        bench.server.abandon(ticket);
    }
    assert!(bench.server.loss.is_high_for(client().ip(), bench.now));
    let mut by_udp = 0;
    for _ in 0..10_000 {
        let ticket = bench.request(false);
        match bench.respond(ticket, 100) {
            Route::Datagram => by_udp += 1,
            Route::Connection(Carrier::New(connection, _)) => {
                assert!(bench.server.next_response(connection, bench.now).is_some());
                bench.server.on_connection_closed(connection, bench.now);
                while bench.sent().is_some() {}
            }
            other => panic!("{other:?}"),
        }
    }
    assert!((50..200).contains(&by_udp), "{by_udp}");
}

#[test]
fn unproved_resends_do_not_cause_the_high_loss_mode() {
    let mut bench = Bench::new(ServerConfig::default());
    for _ in 0..1000 {
        let datagram = bench.datagram(Some(&[]), true, GET);
        assert_eq!(bench.receive(&datagram), None);
        bench.sent().unwrap();
    }
    assert!(!bench.server.loss.is_high_for(client().ip(), bench.now));
}

#[test]
fn a_refused_connection_tells_every_client_it_owed_to_use_tcp() {
    let mut bench = Bench::new(ServerConfig {
        connections: ConnectionLimits { per_client: 1, ..ConnectionLimits::default() },
        ..ServerConfig::default()
    });
    let (first, second) = (bench.request(false), bench.request(false));
    let ids = [first.id(), second.id()];
    let connection = bench.opened(first);
    assert_eq!(bench.respond(second, 5000), Route::Connection(Carrier::Busy));
    bench.server.on_connection_closed(connection, bench.now);
    bench.server.check_invariants();
    for id in ids {
        assert_eq!(bench.server.poll_given_up(), Some((client().ip(), id)));
        let payload = bench.sent().unwrap();
        assert_eq!(Response::parse(&payload), Ok(Response { id, answer: Answer::UseTcp }));
    }
    // It was not answered after all, so it may ask again.
    let token = bench.token();
    let mut datagram = Vec::new();
    Request {
        id: ids[0],
        other_port: TCP_PORT,
        resend: true,
        token: Some(&token),
        pieces: Pieces::Unknown,
        once: Once::No,
        http: GET,
    }
    .write(&mut datagram);
    assert!(bench.receive(&datagram).is_some());
}

#[test]
fn a_response_written_to_a_connection_that_broke_is_sent_again_when_asked_for() {
    let mut bench = Bench::new(ServerConfig::default());
    let token = bench.token();
    let mut datagram = bench.datagram(Some(&token), false, GET);
    let ticket = bench.receive(&datagram).unwrap();
    let id = ticket.id();
    let connection = bench.opened(ticket);
    assert_eq!(bench.server.next_response(connection, bench.now), Some((client().ip(), id)));
    assert_eq!(bench.server.next_response(connection, bench.now), None);
    datagram[10] |= 1;
    assert_eq!(bench.receive(&datagram), None, "it is on its way");
    bench.now += Duration::from_secs(5);
    bench.server.on_connection_closed(connection, bench.now);
    assert_eq!(bench.sent(), None);
    assert!(bench.receive(&datagram).is_some());
}

#[test]
fn a_client_that_closes_at_once_is_told_to_use_tcp_for_what_it_may_not_have_read() {
    let mut bench = Bench::new(ServerConfig::default());
    let connection = bench.sent_by_connection();
    bench.server.on_connection_closed(connection, bench.now);
    assert_eq!(answer(&bench.sent().unwrap()), Answer::UseTcp);
    bench.server.check_invariants();
}

#[test]
fn a_client_that_does_not_accept_in_time_is_told_to_use_tcp() {
    let mut bench = Bench::new(ServerConfig::default());
    let ticket = bench.request(false);
    let connection = bench.opened(ticket);
    let deadline = bench.server.poll_timeout().unwrap();
    assert_eq!(deadline, bench.now + Duration::from_secs(3));
    bench.server.handle_timeout(deadline);
    assert_eq!(answer(&bench.sent().unwrap()), Answer::UseTcp);
    assert_eq!(bench.server.poll_close(), Some(connection));
    bench.server.check_invariants();
}

#[test]
fn under_stress_long_responses_are_answered_use_tcp_and_short_ones_as_ever() {
    let mut bench = Bench::new(ServerConfig::default());
    bench.server.set_stressed(true);
    let ticket = bench.request(false);
    assert_eq!(bench.respond(ticket, 5000), Route::UseTcp);
    assert_eq!(answer(&bench.sent().unwrap()), Answer::UseTcp);
    let ticket = bench.request(false);
    bench.respond(ticket, 100);
    assert!(matches!(answer(&bench.sent().unwrap()), Answer::Http { .. }));
    assert_eq!(bench.server.metrics.dhttp_connections_opened_total.get(), 0);
}

#[test]
fn more_requests_than_may_be_in_flight_are_told_to_use_tcp() {
    let mut bench = Bench::new(ServerConfig { in_flight: 1, ..ServerConfig::default() });
    let first = bench.request(false);
    let datagram = bench.datagram(None, false, GET);
    assert_eq!(bench.receive(&datagram), None);
    assert_eq!(answer(&bench.sent().unwrap()), Answer::UseTcp);
    bench.server.abandon(first);
    let datagram = bench.datagram(None, false, GET);
    assert!(bench.receive(&datagram).is_some());
}

#[test]
fn requests_that_must_not_be_repeated_are_told_to_use_tcp() {
    let mut bench = Bench::new(ServerConfig::default());
    for http in [
        &b"POST /a HTTP/1.1\r\nHost: example\r\nContent-Length: 2\r\n\r\nab"[..],
        b"PATCH /a HTTP/1.1\r\nHost: example\r\nContent-Length: 0\r\n\r\n",
        b"CONNECT example:443 HTTP/1.1\r\nHost: example\r\n\r\n",
        b"BREW /a HTTP/1.1\r\nHost: example\r\n\r\n",
    ] {
        let datagram = bench.datagram(Some(&[]), false, http);
        assert_eq!(bench.receive(&datagram), None);
        assert_eq!(answer(&bench.sent().unwrap()), Answer::UseTcp, "{}", http.escape_ascii());
    }
}

#[test]
fn malformed_http_is_answered_with_an_error_and_never_executed() {
    let mut bench = Bench::new(ServerConfig::default());
    for (http, status) in [
        (&b"GET /a HTTP/1.1\r\nHost: example\r\n"[..], "400"),
        (b"GET /a HTTP/1.1\r\nHost: example\r\n\r\nx", "400"),
        (b"GET /%zz HTTP/1.1\r\nHost: example\r\n\r\n", "400"),
        (b"PUT /a HTTP/1.1\r\nHost: example\r\nContent-Length: 3\r\n\r\nab", "400"),
        (b"PUT /a HTTP/1.1\r\nHost: example\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "411"),
        (b"GET /a HTTP/3.0\r\nHost: example\r\n\r\n", "505"),
    ] {
        let datagram = bench.datagram(Some(&[]), false, http);
        assert_eq!(bench.receive(&datagram), None);
        let payload = bench.sent().unwrap();
        assert!(payload[ID_BYTES..].starts_with(format!("HTTP/1.1 {status} ").as_bytes()), "{payload:?}");
        assert!(payload.len() <= 3 * datagram.len());
    }
}

#[test]
fn what_is_too_short_for_any_answer_is_met_with_silence() {
    let mut bench = Bench::new(ServerConfig::default());
    for datagram in
        [&b""[..], b"12345678", b"12345678\xa0\x28", b"12345678\xa0\x28\0", b"12345678\xa0\x28\xff"]
    {
        assert_eq!(bench.receive(datagram), None);
        assert_eq!(bench.sent(), None, "{datagram:?}");
    }
    assert_eq!(bench.server.metrics.dhttp_requests_short_total.get(), 3);
    assert_eq!(bench.server.metrics.dhttp_answers_suppressed_total.get(), 2);
}

#[test]
fn ports_of_servers_and_low_ports_get_nothing() {
    let mut bench = Bench::new(ServerConfig::default());
    for port in [0, 22, 1023, 8080, 32_767] {
        let id = RequestId([9; 8]);
        let mut datagram = Vec::new();
        Request {
            id,
            other_port: TCP_PORT,
            resend: false,
            token: None,
            pieces: Pieces::Unknown,
            once: Once::No,
            http: GET,
        }
        .write(&mut datagram);
        let from = SocketAddr::new(client().ip(), port);
        assert_eq!(bench.server.handle_datagram(from, &datagram, bench.now), Received::Done);
        datagram[8..10].copy_from_slice(&port.to_be_bytes());
        assert_eq!(bench.server.handle_datagram(client(), &datagram, bench.now), Received::Done);
        assert_eq!(bench.server.poll_transmit(), None);
    }
    assert!(bench.server.metrics.dhttp_requests_bad_port_total.get() >= 5);
}

#[test]
fn a_response_sent_to_a_server_is_not_answered() {
    let mut bench = Bench::new(ServerConfig::default());
    let ticket = bench.request(false);
    bench.respond(ticket, 100);
    let mut response = bench.sent().unwrap();
    assert_eq!(bench.receive(&response), None);
    response.truncate(9);
    response[8] = 1;
    assert_eq!(bench.receive(&response), None);
    assert_eq!(bench.sent(), None);
}

#[test]
fn connections_are_used_again_and_closed_when_idle() {
    let mut bench = Bench::new(ServerConfig::default());
    let connection = bench.sent_by_connection();
    let ticket = bench.request(false);
    let id = ticket.global_id();
    assert_eq!(bench.respond(ticket, 5000), Route::Connection(Carrier::Idle(connection)));
    assert_eq!(bench.server.next_response(connection, bench.now), Some(id));
    assert_eq!(bench.server.next_response(connection, bench.now), None);
    bench.server.handle_timeout(bench.now + Duration::from_secs(15));
    assert_eq!(bench.server.poll_close(), Some(connection));
    assert_eq!(bench.server.poll_timeout(), None);
    assert_eq!(bench.sent(), None);
    bench.server.check_invariants();
}

fn piece_lengths(bench: &mut Bench) -> Vec<(u32, usize)> {
    std::iter::from_fn(|| bench.sent())
        .map(|payload| match answer(&payload) {
            Answer::Piece { offset, piece, .. } => {
                assert!(payload.len() <= 1472);
                (offset, piece.len())
            }
            other => panic!("{other:?}"),
        })
        .collect()
}

#[test]
fn a_proved_client_that_takes_pieces_gets_a_middling_response_in_several_datagrams() {
    let mut bench = Bench::new(ServerConfig::default());
    bench.pieces = Pieces::Accepted;
    let ticket = bench.request(false);
    assert_eq!(bench.server.room_bytes(&ticket), 14_600);
    assert_eq!(bench.respond(ticket, 4000), Route::Datagram);
    assert_eq!(piece_lengths(&mut bench), [(0, 1451), (1451, 1451), (2902, 1098)]);
    let ticket = bench.request(false);
    assert!(
        matches!(bench.respond(ticket, 15_000), Route::Connection(Carrier::New(..))),
        "too long for pieces"
    );
    let ticket = bench.request(true);
    assert_ne!(bench.respond(ticket, 4000), Route::Datagram, "a resend goes by TCP");
}

#[test]
fn a_network_on_the_way_to_which_nothing_is_lost_gets_longer_responses_in_pieces_until_something_is() {
    let mut bench = Bench::new(ServerConfig::default());
    bench.pieces = Pieces::Accepted;
    for _ in 0..10 {
        let ticket = bench.request(false);
        assert_eq!(bench.respond(ticket, 14_600), Route::Datagram);
    }
    assert_eq!(piece_lengths(&mut bench).len(), 110);
    let ticket = bench.request(false);
    assert_eq!(bench.server.room_bytes(&ticket), 14_600, "a repair may still come");
    bench.server.abandon(ticket);
    bench.now += Duration::from_secs(1);
    let ticket = bench.request(false);
    assert_eq!(bench.server.room_bytes(&ticket), 29_200);
    assert_eq!(bench.respond(ticket, 29_200), Route::Datagram);
    assert_eq!(piece_lengths(&mut bench).len(), 21);
    // What was lost of it comes in a piece, too.
    let mut range = Vec::new();
    PieceRange { offset: 1451, length: 1451 }.write(&mut range);
    bench.pieces = Pieces::Repair { tag: tag_of(&response(29_200)), ranges: range.leak() };
    let ticket = bench.request(false);
    assert_eq!(bench.respond(ticket, 29_200), Route::Datagram);
    assert_eq!(piece_lengths(&mut bench), [(1451, 1451)]);
    bench.pieces = Pieces::Accepted;
    let ticket = bench.request(false);
    assert_eq!(bench.server.room_bytes(&ticket), 14_600);
    bench.server.abandon(ticket);
}

#[test]
fn a_client_that_is_not_proved_gets_no_pieces() {
    let mut bench = Bench::new(ServerConfig::default());
    bench.pieces = Pieces::Accepted;
    let datagram = bench.datagram(Some(&[]), false, GET);
    let ticket = bench.receive(&datagram).unwrap();
    assert_eq!(bench.respond(ticket, 4000), Route::Datagram);
    assert!(matches!(answer(&bench.sent().unwrap()), Answer::ProveAddress { .. }));
}

#[test]
fn a_repair_brings_the_ranges_that_were_asked_for_and_never_more_than_the_response() {
    // Repairs count as loss, which is not what this is about.
    let mut bench = Bench::new(ServerConfig { loss_threshold: 0.9, ..ServerConfig::default() });
    let mut repair = |ranges: &[(u32, u32)], tag: u32| {
        let mut written = Vec::new();
        ranges.iter().for_each(|&(offset, length)| PieceRange { offset, length }.write(&mut written));
        bench.pieces = Pieces::Repair { tag, ranges: written.leak() };
        let ticket = bench.request(false);
        assert_eq!(bench.respond(ticket, 4000), Route::Datagram);
        piece_lengths(&mut bench)
    };
    let tag = tag_of(&response(4000));
    assert_eq!(repair(&[(100, 50), (3990, 500), (9999, 1)], tag), [(100, 50), (3990, 10)]);
    let all: usize = repair(&[(0, u32::MAX); 16], tag).iter().map(|(_, length)| length).sum();
    assert_eq!(all, 4000);
    assert_eq!(repair(&[(100, 50)], tag ^ 1).len(), 3, "the response has changed: all of it");
}

proptest::proptest! {
    #[test]
    fn any_datagrams_from_an_unproved_address_are_answered_with_three_times_their_bytes_at_most(
        datagrams in proptest::collection::vec(
            proptest::collection::vec(proptest::prelude::any::<u8>(), 0..200),
            1..20,
        ),
        wellformed: bool, bytes in 20usize..3000,
    ) {
        let mut bench = Bench::new(ServerConfig::default());
        let (mut received, mut sent) = (0, 0);
        for noise in datagrams {
            let datagram = match wellformed {
                true => bench.datagram(Some(&noise[..noise.len().min(32)]), false, GET),
                false => noise,
            };
            received += datagram.len();
            if let Some(ticket) = bench.receive(&datagram) {
                assert_eq!(bench.respond(ticket, bytes), Route::Datagram);
            }
            while let Some(payload) = bench.sent() {
                sent += payload.len();
            }
        }
        assert!(sent <= 3 * received);
    }
}

#[test]
fn a_sealed_request_of_an_unproved_address_brings_three_times_its_bytes_at_most() {
    for (bytes, stressed) in [(100, false), (1000, false), (9000, false), (100, true)] {
        let mut bench = Bench::new(ServerConfig::default());
        let mut keys = crate::sealed::ServerKeys::new([4; 32], 86_400);
        let key = keys.current(1_700_000_000).0;
        bench.server.share_keys(keys);
        bench.server.set_stressed(stressed);
        let id = RequestId(*b"idididid");
        let mut random = StdRng::from_seed([5; 32]);
        let (sealed, _) = crate::sealed::seal_request(key, id, Once::No, GET, &mut random).unwrap();
        let mut datagram = Vec::new();
        let (other_port, pieces) = (TCP_PORT, Pieces::Accepted);
        Request { id, other_port, resend: false, token: Some(&[]), pieces, once: Once::No, http: &sealed }
            .write(&mut datagram);
        datagram[10] |= crate::sealed::SEALED_FLAG;
        if let Unsealed::Opened(plain) = bench.server.unseal(client(), &datagram, bench.now) {
            assert!(!stressed, "no key exchange for an address that is not proved");
            let ticket = bench.receive(&plain).expect("a request");
            let http = response(bytes);
            let _ = bench.server.respond(ticket, &http, bench.now);
        }
        let sent: usize = std::iter::from_fn(|| bench.server.poll_transmit()).map(|t| t.payload.len()).sum();
        assert!(sent > 0 && sent <= 3 * datagram.len(), "{sent} for {}", datagram.len());
    }
}

#[test]
fn what_was_sealed_for_a_key_of_long_ago_is_told_to_use_tcp() {
    let mut bench = Bench::new(ServerConfig::default());
    let mut keys = crate::sealed::ServerKeys::new([4; 32], 86_400);
    let key = keys.current(1_600_000_000).0;
    bench.server.share_keys(keys);
    let id = RequestId(*b"idididid");
    let mut random = StdRng::from_seed([5; 32]);
    let (sealed, _) = crate::sealed::seal_request(key, id, Once::No, GET, &mut random).unwrap();
    let mut datagram = bench.datagram(Some(&[]), false, &sealed);
    datagram[10] |= crate::sealed::SEALED_FLAG;
    assert_eq!(bench.server.unseal(client(), &datagram, bench.now), Unsealed::Done);
    let answer = bench.server.poll_transmit().unwrap().payload;
    assert_eq!(Response::parse(&answer).unwrap().answer, Answer::UseTcp);
    // Nor does who has no keys let the client wait.
    let mut cache = Bench::new(ServerConfig::default());
    assert_eq!(cache.server.unseal(client(), &datagram, cache.now), Unsealed::Done);
    let answer = cache.server.poll_transmit().unwrap().payload;
    assert_eq!(Response::parse(&answer).unwrap().answer, Answer::UseTcp);
}
