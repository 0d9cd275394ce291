//! A server before clients that lie: forged, repeated, truncated requests and hidden losses gain nothing.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

mod support;

use std::net::SocketAddr;
use std::time::{Duration, Instant};
use support::{Generated, Random, objects};
use tidegate_trickles::client::{self, Client, LARGEST_DATAGRAM_BYTES, PeerError, Read};
use tidegate_trickles::continuation::ProvedRun;
use tidegate_trickles::files::FileService;
use tidegate_trickles::keys::KeyRing;
use tidegate_trickles::server::{self, Refusal, Server};
use tidegate_trickles::user::{Kind, UserContinuation, UserError, region_start};
use tidegate_trickles::wire::{self, Account, Ask, Input, Request};

const NOW_MS: u64 = 1_700_000_000_000;

fn peer() -> SocketAddr {
    "192.0.2.7:5000".parse().unwrap()
}

struct Host {
    server: Server,
    service: FileService<Generated>,
}

impl Host {
    fn new() -> Self {
        let config = server::Config { replay_entries: 1 << 14, ..server::Config::default() };
        let server = Server::new(config, KeyRing::new(1, &[42; 16]), NOW_MS);
        Self { server, service: FileService::new(objects(&[400_000])) }
    }

    fn ask(&mut self, datagram: &[u8], from: SocketAddr, now_ms: u64) -> (Result<(), Refusal>, Vec<Vec<u8>>) {
        let mut answers = Vec::new();
        let result = self.server.handle(datagram, from, now_ms, &mut self.service, &mut |packet: &[u8]| {
            answers.push(packet.to_vec());
        });
        (result, answers)
    }
}

/// Downloads the object on a network where every `lossy`-th packet to the client is lost; returns the client's
/// datagrams with the time at which each was sent.
fn transfer(host: &mut Host, lossy: usize) -> Vec<(Vec<u8>, u64)> {
    transfer_from(host, lossy, peer(), NOW_MS)
}

/// The same by a client at another address, which begins at another time.
fn transfer_from(host: &mut Host, lossy: usize, from: SocketAddr, start_ms: u64) -> Vec<(Vec<u8>, u64)> {
    let start = Instant::now();
    let mut elapsed = Duration::ZERO;
    let seed = [from.port() as u8; 16];
    let mut client = Client::new(client::Config::default(), &seed, start);
    let request = client.request(b"/object/0", start).unwrap();
    let (mut sent, mut count, mut got) = (Vec::new(), 0, 0);
    let mut buffer = vec![0; 1 << 16];
    loop {
        let now_ms = start_ms + elapsed.as_millis() as u64;
        let mut answers = Vec::new();
        while let Some(datagram) = client.poll_transmit(start + elapsed) {
            answers.extend(host.ask(&datagram, from, now_ms).1);
            sent.push((datagram, now_ms));
        }
        elapsed += Duration::from_millis(20);
        let mut progress = false;
        for answer in answers {
            count += 1;
            if lossy == 0 || count % lossy != 0 {
                progress = true;
                let result = client.handle_datagram(&answer, start + elapsed);
                assert!(matches!(result, Ok(()) | Err(PeerError::OtherConnection)), "{result:?}");
            }
        }
        if !progress {
            let at = client.poll_timeout().expect("a timer runs");
            elapsed = elapsed.max(at.saturating_duration_since(start));
            client.handle_timeout(start + elapsed);
        }
        loop {
            let readable = client.is_readable(request);
            let read = client.read(request, &mut buffer).unwrap();
            assert_eq!(readable, read != Read::Pending, "{read:?}");
            match read {
                Read::Data(count) => got += count,
                Read::Pending => break,
                Read::End => {
                    assert_eq!(got, 400_000);
                    return sent;
                }
                Read::Reset(code) => panic!("reset {code}"),
            }
        }
    }
}

fn account(datagram: &[u8]) -> Option<(Account, Option<u8>)> {
    match Request::decode(datagram).unwrap().ask {
        Ask::Open { .. } => None,
        Ask::Continue { account, group } => Some((account, Some(group))),
        Ask::Timeout { account, .. } | Ask::Close { account } => Some((account, None)),
    }
}

fn is_open(datagram: &[u8]) -> bool {
    account(datagram).is_none()
}

/// An open without its padding, which is its last frame.
fn unpadded(open: &[u8]) -> &[u8] {
    let mut at = 16;
    while open[at] != 0 {
        at += 3 + usize::from(u16::from_be_bytes([open[at + 1], open[at + 2]]));
    }
    &open[..at]
}

/// `datagram` with another account; its frames stay.
fn with_account(datagram: &[u8], account: Account, group: u8) -> Vec<u8> {
    let request = Request::decode(datagram).unwrap();
    let mut out = Vec::new();
    let ask = Ask::Continue { account, group };
    Request::encode_head(request.connection, request.timestamp_us, &ask, &mut out);
    for want in &request.wants {
        wire::write_wants(&[(want.sequence, want.length)], want.continuation, &mut out);
    }
    out
}

#[test]
fn forged_requests_when_sent_by_the_hundred_thousand_then_none_is_answered() {
    let sent = transfer(&mut Host::new(), 40);
    let requests: Vec<_> = sent.iter().filter(|(datagram, _)| !is_open(datagram)).collect();
    let mut random = Random(1);
    let mut host = Host::new();
    let count = std::env::var("TRICKLES_FORGED").ok().and_then(|text| text.parse().ok()).unwrap_or(100_000);
    for _ in 0..count {
        let (original, now_ms) = requests[random.below(requests.len() as u64) as usize];
        let mut datagram = original.clone();
        // Header (2), connection (8), timestamp (4) and the time held (2) are the client's own; the continuation and
        // the account up to the frames are not.
        let (account, _) = account(original).unwrap();
        let protected = 16 + 73 + 2 + account.runs.len() * 12;
        for _ in 0..=random.below(3) {
            let at = 16 + random.below(protected as u64 - 16) as usize;
            datagram[at] = datagram[at].wrapping_add(1 + random.below(255) as u8);
        }
        // The argument byte may be another valid one: a smaller group or another attempt is the client's right.
        if datagram[..16 + 74] == original[..16 + 74] && datagram[91..] == original[91..] {
            continue;
        }
        let (result, answers) = host.ask(&datagram, peer(), *now_ms);
        assert!(result.is_err(), "{datagram:02x?}");
        let answered: usize = answers.iter().map(Vec::len).sum();
        assert!(answered <= 11, "a notice at most");
    }
    assert_eq!(host.server.counters().trickles_packets_sent_total.get(), 0);
}

#[test]
fn a_continuation_when_sent_from_another_address_then_it_is_refused_and_told_once_in_a_millisecond() {
    let sent = transfer(&mut Host::new(), 0);
    let mut host = Host::new();
    let thief = "198.51.100.1:5000".parse().unwrap();
    for (datagram, now_ms) in sent.iter().filter(|(datagram, _)| !is_open(datagram)) {
        for later_ms in [1000, 1001] {
            let mut ask = || host.ask(datagram, thief, now_ms + later_ms);
            let (first, second) = (ask(), ask());
            let connection = Request::decode(datagram).unwrap().connection;
            assert_eq!(first.0, Err(Refusal::Forged { connection: Some(connection) }));
            assert_eq!(first.1.iter().map(Vec::len).sum::<usize>(), 11, "a notice");
            assert_eq!(second, (Err(Refusal::Forged { connection: None }), Vec::new()));
        }
    }
}

#[test]
fn a_continuation_when_dated_further_ahead_than_clocks_may_be_apart_then_it_is_refused() {
    let sent = transfer(&mut Host::new(), 0);
    // Its continuation came with the answer to the open, and is dated so.
    let (datagram, _) = sent.iter().find(|(datagram, _)| !is_open(datagram)).unwrap();
    let skew_ms = u64::from(server::Config::default().clock_skew_ms);
    for (ahead_ms, is_taken) in
        [(0, true), (1, true), (skew_ms, true), (skew_ms + 1, false), (5 * skew_ms, false)]
    {
        let (result, answers) = Host::new().ask(datagram, peer(), NOW_MS - ahead_ms);
        let is_stale = matches!(result, Err(Refusal::Stale { .. }));
        assert_eq!((result.is_ok(), is_stale), (is_taken, !is_taken), "{ahead_ms}: {result:?}");
        assert!(is_taken || answers.iter().map(Vec::len).sum::<usize>() == 11, "a notice");
    }
}

#[test]
fn a_user_continuation_when_used_for_another_request_or_as_the_other_kind_then_it_is_refused() {
    let malformed = Err(Refusal::User(UserError::Malformed));
    for (kind, request, as_output, as_input) in [
        (Kind::Output, 7, Ok(()), malformed),
        (Kind::Input, 7, malformed, Ok(())),
        (Kind::Output, 8, malformed, malformed),
        (Kind::Input, 8, malformed, malformed),
    ] {
        let mut continuation = Vec::new();
        UserContinuation { kind, request, start: 100, end: 100, opaque: b"/object/0" }
            .sign(&KeyRing::new(1, &[42; 16]), &mut continuation);
        let ask = |write: &dyn Fn(&mut Vec<u8>)| {
            let mut datagram = Vec::new();
            let open = Ask::Open { datagram_bytes: wire::MIN_DATAGRAM_BYTES };
            Request::encode_head(1, 0, &open, &mut datagram);
            write(&mut datagram);
            wire::pad(wire::PADDED_BYTES, &mut datagram);
            let (result, answers) = Host::new().ask(&datagram, peer(), NOW_MS);
            assert_eq!(result.is_ok(), !answers.is_empty());
            result
        };
        let wants = [(region_start(7) + 100, 1)];
        let result = ask(&|out| wire::write_wants(&wants, &continuation, out));
        assert_eq!(result, as_output, "{kind:?} of {request} as output of 7");
        let input = Input { request: 7, offset: 100, last: true, continuation: &continuation, data: b"more" };
        let result = ask(&|out| wire::write_input(&input, out));
        assert_eq!(result, as_input, "{kind:?} of {request} as input of 7");
    }
}

#[test]
fn every_request_of_a_transfer_when_replayed_then_none_is_answered_twice() {
    let mut host = Host::new();
    let sent = transfer(&mut host, 30);
    let before = host.server.counters().trickles_packets_sent_total.get();
    let end_ms = sent.last().unwrap().1;
    let mut timeouts = 0;
    for _ in 0..10 {
        for (datagram, _) in sent.iter().filter(|(datagram, _)| !is_open(datagram)) {
            let (result, answers) = host.ask(datagram, peer(), end_ms);
            timeouts += usize::from(result.is_ok());
            assert!(result.is_err() || account(datagram).unwrap().1.is_none(), "{result:?}");
            assert!(result.is_err() || timeouts <= 1, "one timeout a time slot");
            assert!(answers.len() <= 2);
        }
    }
    let after = host.server.counters().trickles_packets_sent_total.get();
    assert!(after - before <= 2, "{} packets for replays", after - before);
    for (datagram, _) in sent.iter().filter(|(datagram, _)| !is_open(datagram)) {
        let (result, answers) = host.ask(datagram, peer(), end_ms + 61_000);
        assert!(matches!(result, Err(Refusal::Stale { .. })), "{result:?}");
        assert_eq!(answers.iter().map(Vec::len).sum::<usize>(), 11);
    }
}

#[test]
fn a_replay_when_the_table_overflows_then_it_is_refused_as_stale() {
    let config = server::Config { replay_entries: 16, ..server::Config::default() };
    let mut host = Host::new();
    host.server = Server::new(config, KeyRing::new(1, &[42; 16]), NOW_MS);
    let sent = transfer(&mut host, 0);
    // Others' transfers, which take two generations.
    let mut end_ms = sent.last().unwrap().1;
    for nth in 1..9 {
        let others = transfer_from(&mut host, 0, (peer().ip(), peer().port() + nth).into(), end_ms + 1);
        end_ms = others.last().unwrap().1;
    }
    let mut stale = 0;
    for (datagram, _) in sent.iter().filter(|(datagram, _)| !is_open(datagram)) {
        let (result, _) = host.ask(datagram, peer(), end_ms);
        assert!(matches!(result, Err(Refusal::Replayed | Refusal::Stale { .. })), "{result:?}");
        stale += usize::from(matches!(result, Err(Refusal::Stale { .. })));
    }
    assert!(stale > 0, "the table did not overflow");
}

#[test]
fn a_request_when_truncated_anywhere_then_it_is_an_error_or_asks_for_less() {
    let sent = transfer(&mut Host::new(), 40);
    for (datagram, now_ms) in sent.iter().step_by(7) {
        let whole = Request::decode(datagram).unwrap();
        for length in 0..datagram.len() {
            let mut host = Host::new();
            match host.ask(&datagram[..length], peer(), *now_ms) {
                (Err(_), answers) => assert!(answers.is_empty()),
                (Ok(()), answers) => {
                    let part = Request::decode(&datagram[..length]).unwrap();
                    assert!(
                        part.wants.len() <= whole.wants.len() && part.ask == whole.ask,
                        "cut between frames"
                    );
                    let answered: usize = answers.iter().map(Vec::len).sum();
                    assert!(!is_open(datagram) || answered <= 3 * length, "{answered} bytes for {length}");
                }
            }
        }
    }
}

#[test]
fn a_loss_when_hidden_by_any_sum_of_known_nonces_then_the_account_is_refused() {
    let sent = transfer(&mut Host::new(), 25);
    let lossy: Vec<_> = sent
        .iter()
        .filter_map(|(datagram, now_ms)| Some((datagram, now_ms, account(datagram)?)))
        .filter(|(_, _, (account, group))| group.is_some() && account.runs.iter().any(|run| run.run.gap > 0))
        .collect();
    assert!(lossy.len() > 10, "{} requests report a loss", lossy.len());
    let mut random = Random(3);
    for (datagram, now_ms, (honest, group)) in lossy {
        let mut host = Host::new();
        let refused = |host: &mut Host, runs: Vec<ProvedRun>| {
            let lie = Account { runs, ..honest.clone() };
            let (result, answers) = host.ask(&with_account(datagram, lie, group.unwrap()), peer(), *now_ms);
            assert!(matches!(result, Err(Refusal::Unproved | Refusal::Account(_))), "{result:?}");
            assert!(answers.is_empty());
        };
        let total: u32 = honest.runs.iter().map(|run| run.run.length + u32::from(run.run.gap)).sum();
        let sum = honest.runs.iter().fold(0, |sum, run| sum ^ run.nonces);
        let mut whole = honest.runs[0];
        (whole.run.gap, whole.run.length) = (0, total);
        // Nothing was lost: with all nonces that are known, with none, with each alone, with guesses.
        for nonces in [sum, 0].into_iter().chain(honest.runs.iter().map(|run| run.nonces)) {
            refused(&mut host, vec![ProvedRun { nonces, ..whole }]);
        }
        for _ in 0..50 {
            refused(&mut host, vec![ProvedRun { nonces: random.next() >> 16, ..whole }]);
        }
        // The loss was elsewhere.
        let mut moved = honest.runs.clone();
        let index = moved.iter().position(|run| run.run.gap > 0).unwrap();
        moved[index].run.length += 1;
        moved[index].run.gap -= 1;
        refused(&mut host, moved);
        // The honest account still works: nothing of the lies was remembered.
        let (result, _) = host.ask(datagram, peer(), *now_ms);
        assert_eq!(result, Ok(()));
    }
}

#[test]
fn an_open_when_of_any_size_then_the_answer_is_at_most_three_times_as_long() {
    let mut host = Host::new();
    let sent = transfer(&mut Host::new(), 0);
    let (open, _) = sent.iter().find(|(datagram, _)| is_open(datagram)).unwrap();
    let bare = unpadded(open);
    for limit in [wire::MIN_DATAGRAM_BYTES, 1200, 9000, u16::MAX] {
        for length in bare.len()..=usize::from(LARGEST_DATAGRAM_BYTES) {
            let mut datagram = bare.to_vec();
            datagram[14..16].copy_from_slice(&limit.to_be_bytes());
            wire::pad(length, &mut datagram);
            let (result, answers) = host.ask(&datagram, peer(), NOW_MS);
            assert!(matches!(result, Ok(()) | Err(Refusal::TooSmall)), "{length}: {result:?}");
            let answered: usize = answers.iter().map(Vec::len).sum();
            assert_eq!(answered > 0, result.is_ok(), "{length}");
            let factor = if datagram.len() >= wire::PADDED_BYTES { 3 } else { 1 };
            assert!(answered <= factor * datagram.len(), "{answered} bytes for {}", datagram.len());
        }
    }
}

#[test]
fn an_open_when_longer_than_a_server_takes_then_it_is_refused_and_counted() {
    let mut host = Host::new();
    let sent = transfer(&mut Host::new(), 0);
    let (open, _) = sent.iter().find(|(datagram, _)| is_open(datagram)).unwrap();
    let most = usize::from(LARGEST_DATAGRAM_BYTES);
    for (length, taken) in [(most, true), (most + 1, false), (60_000, false)] {
        let mut datagram = unpadded(open).to_vec();
        wire::pad(length, &mut datagram);
        assert_eq!(datagram.len(), length);
        let before = host.server.counters().trickles_malformed_total.get();
        let (result, answers) = host.ask(&datagram, peer(), NOW_MS);
        assert_eq!((result.is_ok(), !answers.is_empty()), (taken, taken), "{length}: {result:?}");
        let counted = host.server.counters().trickles_malformed_total.get() - before;
        assert_eq!(counted, u64::from(!taken), "{length}");
    }
}

#[test]
fn garbage_when_sent_by_the_hundred_thousand_then_nothing_answers() {
    let mut host = Host::new();
    let mut random = Random(9);
    for _ in 0..100_000 {
        let length = random.below(300) as usize;
        let mut datagram: Vec<u8> = (0..length).map(|_| random.next() as u8).collect();
        for (at, value) in [wire::VERSION, 2 + random.below(3) as u8].into_iter().enumerate() {
            if random.chance(900) && length > at {
                datagram[at] = value;
            }
        }
        let (result, answers) = host.ask(&datagram, peer(), NOW_MS);
        assert!(result.is_err() || is_open(&datagram));
        assert!(answers.iter().map(Vec::len).sum::<usize>() <= datagram.len());
    }
}

#[test]
fn a_client_when_fed_damaged_answers_then_its_invariants_hold() {
    let start = Instant::now();
    let mut host = Host::new();
    let mut random = Random(4);
    let mut client = Client::new(client::Config::default(), &[5; 16], start);
    client.request(b"/object/0", start).unwrap();
    let open = client.poll_transmit(start).unwrap();
    let (_, answers) = host.ask(&open, peer(), NOW_MS);
    let now = start + Duration::from_millis(10);
    for _ in 0..50_000 {
        let mut answer = answers[random.below(answers.len() as u64) as usize].clone();
        // Behind the connection id, which a stranger cannot know.
        for _ in 0..=random.below(4) {
            let at = 10 + random.below(answer.len() as u64 - 10) as usize;
            answer[at] = random.next() as u8;
        }
        answer.truncate(10 + random.below(answer.len() as u64) as usize);
        let _ = client.handle_datagram(&answer, now);
        client.check_invariants();
        while let Some(datagram) = client.poll_transmit(now) {
            assert!(datagram.len() <= 1472);
        }
    }
}

#[test]
fn a_client_when_told_of_a_far_era_before_it_enters_the_next_then_its_eras_stay_in_order() {
    let start = Instant::now();
    let mut host = Host::new();
    let mut client = Client::new(client::Config::default(), &[5; 16], start);
    client.request(b"/object/0", start).unwrap();
    let open = client.poll_transmit(start).unwrap();
    let (_, mut answers) = host.ask(&open, peer(), NOW_MS);
    let mut far = answers[2].clone();
    // The era counter of its continuation. Such an era has all of its window sent.
    far[33..37].copy_from_slice(&7_u32.to_be_bytes());
    assert_ne!(far[32], 0, "the flight of an open");
    assert!(client.handle_datagram(&far, start).is_err(), "a later era cut short");
    far[32] = 0;
    let (mut now, mut recovers) = (start, false);
    for round in 0..6 {
        now += Duration::from_millis(10);
        if round == 3 {
            answers[1].clone_from(&far);
        }
        for answer in std::mem::take(&mut answers) {
            client.handle_datagram(&answer, now).unwrap();
        }
        while let Some(datagram) = client.poll_transmit(now) {
            client.check_invariants();
            recovers |= account(&datagram).is_some_and(|(account, _)| account.runs.len() > 1);
            answers.extend(host.ask(&datagram, peer(), NOW_MS).1);
        }
    }
    assert!(recovers, "a packet of the first era is lost");
}

#[test]
fn a_client_when_told_of_a_first_window_beyond_the_greatest_then_it_waits_for_another_answer() {
    let start = Instant::now();
    for (window, is_taken) in [(10, true), (64, true), (65, false), (32767, false)] {
        let mut host = Host::new();
        let mut client = Client::new(client::Config::default(), &[5; 16], start);
        client.request(b"/object/0", start).unwrap();
        let open = client.poll_transmit(start).unwrap();
        let mut answer = host.ask(&open, peer(), NOW_MS).1.swap_remove(0);
        // The window at the start of its era.
        answer[28..30].copy_from_slice(&u16::to_be_bytes(window));
        assert_eq!(client.handle_datagram(&answer, start), Ok(()));
        assert_eq!(client.is_established(), is_taken, "{window}");
    }
}

#[test]
fn an_open_that_is_too_long_for_the_way_when_the_client_hears_of_it_then_a_shorter_one_follows_at_once() {
    let start = Instant::now();
    let mut client = Client::new(client::Config::default(), &[5; 16], start);
    client.request(b"/object/0", start).unwrap();
    assert_eq!(client.poll_transmit(start).unwrap().len(), usize::from(client::LARGEST_DATAGRAM_BYTES));
    assert_eq!(client.poll_transmit(start), None);
    client.handle_datagram_too_long();
    let open = client.poll_transmit(start).unwrap();
    assert_eq!(open.len(), wire::PADDED_BYTES);
    client.handle_datagram_too_long();
    assert_eq!(client.poll_transmit(start), None, "said twice");
    let (result, answers) = Host::new().ask(&open, peer(), NOW_MS);
    assert_eq!(result, Ok(()));
    assert!(!answers.is_empty() && answers.iter().all(|answer| answer.len() <= wire::PADDED_BYTES));
}

/// Fetches objects with continuations of `path_bytes` side by side, on a network that loses nothing and takes 20 ms;
/// packets that the server sent, and how many of them brought no data.
fn fetched_by(limit: u16, path_bytes: usize, requests: usize, object: u64) -> (usize, usize) {
    let path = "p".repeat(path_bytes).into_bytes();
    let mut host =
        Host { service: FileService::new(Generated([(path.clone(), object)].into())), ..Host::new() };
    let start = Instant::now();
    let mut elapsed = Duration::ZERO;
    let config = client::Config { datagram_bytes: limit, ..client::Config::default() };
    let mut client = Client::new(config, &[6; 16], start);
    let mut open: Vec<u32> = (0..requests).map(|_| client.request(&path, start).unwrap()).collect();
    let mut buffer = vec![0; 1 << 16];
    let (mut packets, mut empty) = (0, 0);
    while !open.is_empty() {
        assert!(
            elapsed < Duration::from_secs(120),
            "{limit} {path_bytes} {requests}: {packets} packets, {empty} empty"
        );
        let mut answers = Vec::new();
        while let Some(datagram) = client.poll_transmit(start + elapsed) {
            assert!(datagram.len() <= limit.max(wire::PADDED_BYTES as u16).into());
            let now_ms = NOW_MS + elapsed.as_millis() as u64;
            answers.extend(host.ask(&datagram, peer(), now_ms).1);
        }
        let timer = client.poll_timeout().map(|at| at.saturating_duration_since(start));
        elapsed = match answers.is_empty() {
            true => timer.expect("a timer runs").max(elapsed),
            false => elapsed + Duration::from_millis(20),
        };
        packets += answers.len();
        empty += answers.iter().filter(|answer| answer.len() <= wire::RESPONSE_HEAD_BYTES).count();
        for answer in answers {
            let _ = client.handle_datagram(&answer, start + elapsed);
        }
        client.handle_timeout(start + elapsed);
        open.retain(|&request| {
            while let Read::Data(_) = client.read(request, &mut buffer).unwrap() {}
            client.read(request, &mut buffer).unwrap() != Read::End
        });
    }
    (packets, empty)
}

/// What a request has no room to ask for would come as empty packets, each of which is asked with again.
#[test]
fn packets_are_set_free_only_as_there_is_room_to_ask_for_them() {
    for limit in [LARGEST_DATAGRAM_BYTES, 1200, 900, wire::MIN_DATAGRAM_BYTES] {
        for path_bytes in [10, 100, 300, 450] {
            for requests in [1, 2, 20] {
                let (packets, empty) = fetched_by(limit, path_bytes, requests, 1_500_000 / requests as u64);
                println!("{limit} {path_bytes} {requests}: {packets} packets, {empty} empty");
                // At the start a request for one packet sets two free, of which the shortest ones have room to ask for
                // one.
                assert!(
                    empty <= 2 + packets / 2,
                    "{limit} {path_bytes} {requests}: {empty} of {packets} empty"
                );
                let roomy = usize::from(limit) > path_bytes + 600;
                assert!(
                    !roomy || empty <= 3 + packets / 10,
                    "{limit} {path_bytes} {requests}: {empty} of {packets}"
                );
            }
        }
    }
}

/// A service that makes longer continuations than the connection's datagrams have room for gets no storm of requests.
#[test]
fn a_range_that_no_request_has_room_for_is_asked_for_with_an_open() {
    let (packets, empty) = fetched_by(wire::MIN_DATAGRAM_BYTES, 560, 3, 20_000);
    assert!(empty < packets && packets < 500, "{empty} of {packets}");
}
