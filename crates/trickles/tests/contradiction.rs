//! A server before a client that has received everything and invents losses: its accounts of an era have to agree.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use tidegate_trickles::congestion::{self, AccountError, Era, MAX_GROUP, Run};
use tidegate_trickles::continuation::{
    Continuation, ProvedRun, RawContinuation, apply_delta, apply_successor,
};
use tidegate_trickles::cubic;
use tidegate_trickles::keys::KeyRing;
use tidegate_trickles::server::{self, Application, Event, Minisocket, Refusal, Server};
use tidegate_trickles::wire::{self, Account, Answer, Ask, Request};

const NOW_MS: u64 = 1_700_000_000_000;
const CONNECTION: u64 = 7;

/// Packets come empty: their continuations are what counts.
struct Nothing;

impl Application for Nothing {
    fn handle(&mut self, _: &Event<'_>, _: &mut Minisocket) {}
}

struct Packet {
    raw: RawContinuation,
    nonce: u64,
    era: Era,
}

/// A client with all that it was sent.
struct Liar {
    server: Server,
    connection: u64,
    /// Other clients that have come so far.
    others: u64,
    got: BTreeMap<u64, Packet>,
    now_ms: u64,
}

impl Liar {
    /// Opens, and acknowledges one packet after the other until `packets` have come.
    fn with(packets: usize, replay_entries: usize) -> (Self, u64) {
        let mut liar = Self::open(replay_entries, 0);
        let mut acknowledged = 0;
        while liar.got.len() < packets {
            acknowledged += 1;
            let more = liar.acknowledge(&[(1, acknowledged)], 1).unwrap();
            liar.got.extend(more);
        }
        (liar, acknowledged)
    }

    /// Opens, with `flags` beside the limit of datagrams.
    fn open(replay_entries: usize, flags: u16) -> Self {
        let config = server::Config { replay_entries, ..server::Config::default() };
        let server = Server::new(config, KeyRing::new(1, &[42; 16]), NOW_MS);
        let mut liar =
            Self { server, connection: CONNECTION, others: 0, got: BTreeMap::new(), now_ms: NOW_MS };
        liar.got = liar.opened(flags);
        liar
    }

    fn opened(&mut self, flags: u16) -> BTreeMap<u64, Packet> {
        let mut open = Vec::new();
        let ask = Ask::Open { datagram_bytes: wire::MIN_DATAGRAM_BYTES | flags };
        Request::encode_head(self.connection, 0, &ask, &mut open);
        wire::pad(1472, &mut open);
        self.send(&open, None).unwrap().into_iter().collect()
    }

    /// The server answers someone else, whereby it may forget what is old.
    fn another_client_comes(&mut self) {
        self.others += 1;
        self.connection = CONNECTION + self.others;
        let opened = self.opened(0);
        let got = std::mem::replace(&mut self.got, opened);
        self.acknowledge(&[(1, 1)], 1).unwrap();
        self.got = got;
        self.connection = CONNECTION;
    }

    fn send(
        &mut self,
        datagram: &[u8],
        known: Option<(&RawContinuation, Era)>,
    ) -> Result<Vec<(u64, Packet)>, Refusal> {
        let peer: SocketAddr = "192.0.2.7:5000".parse().unwrap();
        let mut answers = Vec::new();
        let mut take = |answer: &[u8]| answers.push(answer.to_vec());
        self.server.handle(datagram, peer, self.now_ms, &mut Nothing, &mut take)?;
        let read = |answer: &Vec<u8>| {
            let (raw, nonce) = match Answer::decode(answer).unwrap() {
                Answer::Response { continuation, nonce, .. } => (continuation, nonce),
                Answer::Delta { delta, successor, nonce, .. } => {
                    let (known, era) = known.unwrap();
                    let told = if successor {
                        apply_successor(known, &era, &delta)
                    } else {
                        apply_delta(known, &delta)
                    };
                    (told.unwrap(), nonce)
                }
                Answer::Refused { .. } => panic!("refused"),
            };
            let Continuation { number, era, .. } = Continuation::decode(&raw).unwrap();
            (number, Packet { raw, nonce, era })
        };
        Ok(answers.iter().map(read).collect())
    }

    /// Tells that the packets of `ranges` were received, all proved, and acknowledges the last `group` of them.
    fn acknowledge(&mut self, ranges: &[(u64, u64)], group: u8) -> Result<Vec<(u64, Packet)>, Refusal> {
        let (account, era) = self.account(ranges);
        let plain: Vec<_> = account.runs.iter().map(|proved| proved.run).collect();
        let number = ranges[ranges.len() - 1].1;
        let release = congestion::acknowledge(&era, &plain, number, group).map_err(Refusal::Account)?;
        let raw = account.continuation;
        self.ask(&Ask::Continue { account, group }, Some((&raw, release.era)))
    }

    /// Tells that all packets up to `number` were received, and nothing since.
    fn time_out(&mut self, number: u64, attempt: u8) -> Result<Vec<(u64, Packet)>, Refusal> {
        let (account, era) = self.account(&[(1, number)]);
        let release = congestion::time_out(&era, &[account.runs[0].run], number, attempt).unwrap();
        let raw = account.continuation;
        self.ask(&Ask::Timeout { account, attempt }, Some((&raw, release.era)))
    }

    fn ask(
        &mut self,
        ask: &Ask,
        known: Option<(&RawContinuation, Era)>,
    ) -> Result<Vec<(u64, Packet)>, Refusal> {
        let mut datagram = Vec::new();
        Request::encode_head(self.connection, 0, ask, &mut datagram);
        self.send(&datagram, known)
    }

    /// That the packets of `ranges` were received, all proved.
    fn account(&self, ranges: &[(u64, u64)]) -> (Account, Era) {
        let mut before = self.got[&ranges[0].0].era.base;
        let run = |&(first, last): &(u64, u64)| {
            let nonces = (first..=last).fold(0, |sum, number| sum ^ self.got[&number].nonce);
            let run = Run { gap: (first - before - 1) as u16, length: (last - first + 1) as u32 };
            before = last;
            ProvedRun { run, nonces }
        };
        let runs: Vec<_> = ranges.iter().map(run).collect();
        let number = ranges[ranges.len() - 1].1;
        let Packet { raw, era, .. } = &self.got[&number];
        (Account { continuation: *raw, held_ms: 0, runs }, *era)
    }
}

#[test]
fn losses_that_are_told_of_one_acknowledgement_and_not_of_another_then_one_era_follows() {
    let (mut liar, acknowledged) = Liar::with(80, 1 << 12);
    let (before, first_loss) = (acknowledged, acknowledged + 1);
    let contradicts = |result: Result<Vec<_>, Refusal>| {
        assert_eq!(result.map(|answers| answers.len()), Err(Refusal::Account(AccountError::Contradiction)));
    };
    // An honest recovery: the first packet after those is lost.
    let newest = first_loss + 10;
    let recovered = liar.acknowledge(&[(1, before), (first_loss + 1, newest)], 10).unwrap();
    assert!(!recovered.is_empty() && recovered.iter().all(|(_, packet)| packet.era.counter == 1));
    // Each of the others with a loss of its own would begin an era of its own.
    for number in newest + 1..newest + 20 {
        contradicts(liar.acknowledge(&[(1, number - 2), (number, number)], 1));
        contradicts(liar.acknowledge(&[(1, before - 1), (before + 1, number)], 1));
    }
    // Nor does the era go on as if nothing had been lost.
    contradicts(liar.acknowledge(&[(1, newest + 1)], 1));
    // The recovery itself goes on.
    assert!(liar.acknowledge(&[(1, before), (first_loss + 1, newest + 1)], 1).is_ok());
}

#[test]
fn a_flight_of_which_each_acknowledgement_tells_of_other_losses_then_no_packet_comes_twice() {
    for skipped in [0, 1, 3] {
        let (mut liar, before) = Liar::with(200, 1 << 12);
        let first_loss = before + 1;
        let end = liar.got.keys().last().copied().unwrap();
        let half = (end - before) / 2;
        let (mut sent, mut contradicted) = (Vec::new(), 0);
        for number in first_loss + 1..=end {
            // The last packets that came are told of, and what was before them is said to be lost.
            let from = number.saturating_sub(skipped).max(first_loss + 1);
            match liar.acknowledge(&[(1, before), (from, number)], 1) {
                Ok(packets) => sent.extend(packets.into_iter().map(|(number, _)| number)),
                Err(Refusal::Account(AccountError::Contradiction)) => contradicted += 1,
                Err(refusal) => panic!("{refusal}"),
            }
        }
        let distinct = std::collections::BTreeSet::from_iter(sent.iter().copied());
        assert_eq!(distinct.len(), sent.len(), "a packet of the next era is sent once");
        assert!(sent.len() as u64 <= half, "{} packets, half of the flight is {half}", sent.len());
        assert!(contradicted > 0, "{skipped}");
    }
}

#[test]
fn a_timeout_when_sent_again_in_another_slot_of_time_then_it_is_refused() {
    let (mut liar, before) = Liar::with(80, 1 << 12);
    let ask = |liar: &mut Liar, attempt: u8, after_ms: u64| {
        liar.now_ms = NOW_MS + after_ms;
        liar.time_out(before, attempt).map(|packets| packets.len())
    };
    assert_eq!(ask(&mut liar, 1, 1_000), Ok(2));
    assert_eq!(ask(&mut liar, 2, 1_000), Err(Refusal::Replayed), "one in a slot");
    for again_ms in (2_000..50_000).step_by(1_000) {
        assert_eq!(ask(&mut liar, 1, again_ms), Err(Refusal::Replayed), "{again_ms}");
    }
    assert_eq!(ask(&mut liar, 2, 50_000), Ok(2), "the next attempt");
}

#[test]
fn timeouts_when_one_comes_after_the_other_then_one_is_answered_in_each_slot_of_time() {
    const SLOT_MS: u64 = 256;
    let (mut liar, before) = Liar::with(80, 1 << 12);
    let time_out_at = |liar: &mut Liar, attempt: u8, now_ms: u64| {
        liar.now_ms = now_ms;
        liar.time_out(before, attempt).map(|packets| packets.len())
    };
    let slots = (NOW_MS.next_multiple_of(SLOT_MS)..).step_by(SLOT_MS as usize);
    for (attempt, slot_ms) in (1..5).zip(slots) {
        assert_eq!(time_out_at(&mut liar, attempt, slot_ms), Ok(2), "{attempt}");
        for after_ms in 0..SLOT_MS {
            let result = time_out_at(&mut liar, attempt + 1, slot_ms + after_ms);
            assert_eq!(result, Err(Refusal::Replayed), "{attempt} {after_ms}");
        }
    }
}

#[test]
fn a_request_when_it_comes_again_as_the_table_turns_then_it_is_refused() {
    let (mut liar, acknowledged) = Liar::with(30, 1);
    let again = |liar: &mut Liar| liar.acknowledge(&[(1, acknowledged)], 1).map(|sent| sent.len());
    assert_eq!(again(&mut liar), Err(Refusal::Replayed));
    // Another client acknowledges one packet after the other; after each the request comes once more.
    liar.connection += 1;
    let mut of_other = liar.opened(0);
    liar.connection -= 1;
    for number in 1.. {
        liar.now_ms += 1;
        liar.connection += 1;
        let own = std::mem::replace(&mut liar.got, of_other);
        let more = liar.acknowledge(&[(1, number)], 1).unwrap();
        liar.got.extend(more);
        of_other = std::mem::replace(&mut liar.got, own);
        liar.connection -= 1;
        match again(&mut liar) {
            Err(Refusal::Replayed) => {}
            Err(Refusal::Stale { .. }) => break,
            answered => panic!("{answered:?} after {number} requests of another client"),
        }
    }
}

#[test]
fn a_group_when_a_part_of_it_is_answered_already_then_only_the_rest_sets_packets_free() {
    let (mut liar, before) = Liar::with(400, 1 << 12);
    let next = liar.got.keys().last().unwrap() + 1;
    let acknowledge = |liar: &mut Liar, ranges: &[(u64, u64)]| {
        let packets = liar.acknowledge(ranges, 8).unwrap();
        packets.into_iter().map(|(number, _)| number).collect::<Vec<_>>()
    };
    // Of each eight, three were acknowledged with those before.
    let newest = (before + 8..before + 50).step_by(5);
    let sent: Vec<_> = newest.clone().flat_map(|newest| acknowledge(&mut liar, &[(1, newest)])).collect();
    assert_eq!(sent, Vec::from_iter(next..next + 2 * (newest.clone().count() as u64 * 5 + 3)));
    // So it is in a recovery.
    let lost = newest.last().unwrap() + 1;
    let newest = (lost + 8..lost + 50).step_by(5);
    let recovered: Vec<_> =
        newest.flat_map(|newest| acknowledge(&mut liar, &[(1, lost - 1), (lost + 1, newest)])).collect();
    let first = recovered[0];
    assert_eq!(recovered, Vec::from_iter(first..first + recovered.len() as u64));
    assert!(recovered.len() > 20, "half of what is acknowledged");
}

#[test]
fn a_loss_when_told_of_long_ago_then_its_era_is_remembered_as_long_as_it_goes_on() {
    let (mut liar, before) = Liar::with(80, 1 << 12);
    let acknowledge_at = |liar: &mut Liar, after_ms: u64, number: u64| {
        liar.now_ms = NOW_MS + after_ms;
        let more = liar.acknowledge(&[(1, number)], 1).unwrap();
        liar.got.extend(more);
        *liar.got.keys().last().unwrap()
    };
    // Packets of half a minute later.
    let young = *liar.got.keys().last().unwrap() + 1;
    for number in before + 1..young {
        acknowledge_at(&mut liar, 30_000, number);
    }
    let first_loss = young + 10;
    liar.now_ms = NOW_MS + 59_000;
    assert!(liar.acknowledge(&[(1, first_loss - 1), (first_loss + 1, first_loss + 1)], 1).is_ok());
    // Some before the loss are acknowledged late, and bring continuations of the era that are good for another minute.
    let mut newest = 0;
    for (number, after_ms) in (young..young + 8).zip((61_000..).step_by(3_000)) {
        newest = acknowledge_at(&mut liar, after_ms, number);
    }
    liar.now_ms = NOW_MS + 121_000;
    liar.another_client_comes();
    assert_eq!(
        liar.acknowledge(&[(1, newest)], 1).map(|packets| packets.len()),
        Err(Refusal::Account(AccountError::Contradiction))
    );
}

#[test]
fn a_loss_of_an_era_that_a_recovery_still_sends_then_it_is_remembered_as_long_as_what_is_sent() {
    let (mut liar, before) = Liar::with(80, 1 << 12);
    liar.now_ms = NOW_MS + 30_000;
    for number in before + 1..=80 {
        let more = liar.acknowledge(&[(1, number)], 1).unwrap();
        liar.got.extend(more);
    }
    let recover_at = |liar: &mut Liar, after_ms: u64, newest: u64, group: u8| {
        liar.now_ms = NOW_MS + after_ms;
        let more = liar.acknowledge(&[(1, 89), (91, newest)], group).unwrap();
        let last = more.last().unwrap().0;
        liar.got.extend(more);
        last
    };
    let newest = recover_at(&mut liar, 59_000, 100, 10);
    let first = liar.got[&newest].era.base + 1;
    assert!(liar.got[&newest].era.counter == 1 && newest >= first + 2);
    // In the era that begins with the recovery a packet is lost as well.
    assert!(liar.acknowledge(&[(first, first), (first + 2, first + 2)], 1).is_ok());
    // Another acknowledgement of the flight before brings a continuation of it that is good for another minute.
    liar.now_ms = NOW_MS + 60_500;
    liar.another_client_comes();
    let newest = recover_at(&mut liar, 61_000, 102, 2);
    liar.now_ms = NOW_MS + 121_000;
    liar.another_client_comes();
    assert_eq!(
        liar.acknowledge(&[(first, newest)], 1).map(|packets| packets.len()),
        Err(Refusal::Account(AccountError::Contradiction))
    );
}

#[test]
fn a_round_trip_when_it_was_long_only_once_then_cubic_does_not_grow_by_it() {
    let mut liar = Liar::open(1 << 12, wire::CUBIC_WANTED);
    let era = liar.got[&1].era;
    let argument = |rtt| era.join_argument(1, rtt).unwrap();
    // The first packets are held for 12 s, which the client does not tell.
    liar.now_ms += 12_000;
    let flight = liar.got.len() as u64;
    for number in 1..flight {
        let more = liar.acknowledge(&[(1, number)], 1).unwrap();
        liar.got.extend(more);
    }
    let (lost, longest) = (flight + 1, cubic::rtt_code(12_000_000));
    let told = |liar: &mut Liar, number, rtt| {
        let received = [(1, lost - 1), (lost + 1, number)];
        liar.acknowledge(&received, argument(rtt)).map(|packets| packets.len())
    };
    // 10 ms later the round trip is 20 ms at most; the code may be that of twice as long a one.
    liar.now_ms += 10;
    let most = cubic::rtt_code(20_000) + 2;
    for rtt in [longest, most + 1] {
        assert_eq!(told(&mut liar, lost + 3, rtt), Err(Refusal::Account(AccountError::BadGroup)), "{rtt}");
    }
    assert!(told(&mut liar, lost + 3, most).is_ok());
    // Whoever is slow again has what it says, as long as it is.
    liar.now_ms += 12_000;
    let begun = (lost + 4..).find_map(|number| {
        let begun = liar.acknowledge(&[(1, lost - 1), (lost + 1, number)], argument(longest)).unwrap();
        begun.into_iter().next()
    });
    let (first, packet) = begun.unwrap();
    assert_eq!(packet.era.cubic.unwrap().rtt, longest);
    let base = packet.era.base;
    liar.got.insert(first, packet);
    liar.now_ms += 10;
    // What came of the era before is not told of: a loss.
    assert!(first > base + 1);
    let told = liar.acknowledge(&[(first, first)], argument(longest)).map(|packets| packets.len());
    assert_eq!(told, Err(Refusal::Account(AccountError::BadGroup)), "all through the era");
    liar.now_ms += 12_000;
    assert!(liar.acknowledge(&[(first, first)], argument(longest)).is_ok());
}

#[test]
fn groups_of_any_size_with_the_smallest_replay_table_then_each_packet_is_answered_once() {
    let (mut liar, acknowledged) = Liar::with(400, 1);
    let mut answered = 0;
    let mut newest = acknowledged;
    while newest + u64::from(MAX_GROUP) <= 400 {
        newest += u64::from(MAX_GROUP);
        answered += liar.acknowledge(&[(1, newest)], MAX_GROUP).unwrap().len();
        let again = liar.acknowledge(&[(1, newest)], MAX_GROUP);
        assert!(matches!(again, Err(Refusal::Replayed | Refusal::Stale { .. })));
    }
    assert_eq!(answered as u64, 2 * (newest - acknowledged), "slow start");
}
