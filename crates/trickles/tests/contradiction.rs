//! A server before a client that has received everything and invents losses: its accounts of an era have to agree.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use tidegate_trickles::congestion::{self, AccountError, Era, MAX_GROUP, Run};
use tidegate_trickles::continuation::{
    Continuation, ProvedRun, RawContinuation, apply_delta, apply_successor,
};
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

/// A client with all that it was sent in the first era.
struct Liar {
    server: Server,
    got: BTreeMap<u64, Packet>,
}

impl Liar {
    /// Opens, and acknowledges one packet after the other until `packets` have come.
    fn with(packets: usize, replay_entries: usize) -> (Self, u64) {
        let config = server::Config { replay_entries, ..server::Config::default() };
        let server = Server::new(config, KeyRing::new(1, &[42; 16]), NOW_MS);
        let mut liar = Self { server, got: BTreeMap::new() };
        let mut open = Vec::new();
        let ask = Ask::Open { datagram_bytes: wire::MIN_DATAGRAM_BYTES };
        Request::encode_head(CONNECTION, 0, &ask, &mut open);
        wire::pad(1472, &mut open);
        let opened = liar.send(&open, None).unwrap();
        liar.got.extend(opened);
        let mut acknowledged = 0;
        while liar.got.len() < packets {
            acknowledged += 1;
            let more = liar.acknowledge(&[(1, acknowledged)], 1).unwrap();
            liar.got.extend(more);
        }
        (liar, acknowledged)
    }

    fn send(
        &mut self,
        datagram: &[u8],
        known: Option<(&RawContinuation, Era)>,
    ) -> Result<Vec<(u64, Packet)>, Refusal> {
        let peer: SocketAddr = "192.0.2.7:5000".parse().unwrap();
        let mut answers = Vec::new();
        let mut take = |answer: &[u8]| answers.push(answer.to_vec());
        self.server.handle(datagram, peer, NOW_MS, &mut Nothing, &mut take)?;
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
        let mut before = 0;
        let run = |&(first, last): &(u64, u64)| {
            let nonces = (first..=last).fold(0, |sum, number| sum ^ self.got[&number].nonce);
            let run = Run { gap: (first - before - 1) as u16, length: (last - first + 1) as u32 };
            before = last;
            ProvedRun { run, nonces }
        };
        let runs: Vec<_> = ranges.iter().map(run).collect();
        let number = ranges[ranges.len() - 1].1;
        let Packet { raw, era, .. } = &self.got[&number];
        let (raw, era) = (*raw, *era);
        let plain: Vec<_> = runs.iter().map(|proved| proved.run).collect();
        let release = congestion::acknowledge(&era, &plain, number, group).map_err(Refusal::Account)?;
        let mut datagram = Vec::new();
        let account = Account { continuation: raw, held_ms: 0, runs };
        Request::encode_head(CONNECTION, 0, &Ask::Continue { account, group }, &mut datagram);
        self.send(&datagram, Some((&raw, release.era)))
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
