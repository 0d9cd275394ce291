//! Packets of those who want more than is theirs (Trickles §2.2).

use std::time::Instant;

use tidegate_trickles::continuation::ProvedRun;
use tidegate_trickles::files::FileService;
use tidegate_trickles::server::Server;
use tidegate_trickles::wire::{self, Account, Ask, Request};

use super::trickles::{PAPER, plot};
use super::trickles_simulation::{Files, NOW_MS, peer, small_server, transfer_from};
use crate::link::Random;
use crate::plot::Point;
use crate::table::{Table, thousands};
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

const OBJECT_BYTES: u64 = 400_000;
/// A transfer whose link loses some percent of the packets.
const SEEDS: std::ops::Range<u64> = 1..9;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "trickles-forged",
    paper: &PAPER,
    figure: "§2.2",
    claim: "Of 1,000,000 forged, replayed, truncated and loss-hiding packets none is answered with data",
    published: "The paper argues that the MAC, the replay table and the nonces refuse such packets; it measures none.",
    method: "Real requests of transfers over lossy links, changed: bytes of the continuation and account overwritten; sent \
             again; cut off; or with an account in which lost packets count as received, proved by the nonces that the client \
             knows, by sums of them, and by guesses. All are given to the server that answered the originals, at the time \
             of the original. The cost is the time that the server takes for each, on one core.",
    run,
};

#[derive(Clone, Copy, PartialEq)]
enum Attack {
    Forged,
    Replayed,
    Truncated,
    HiddenLoss,
}

const ATTACKS: [(Attack, &str); 4] = [
    (Attack::Forged, "forged"),
    (Attack::Replayed, "replayed"),
    (Attack::Truncated, "truncated"),
    (Attack::HiddenLoss, "loss hidden"),
];

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let each = lab.choose(250_000_u64, 2_500);
    let mut raw = Table::new(["attack", "packets", "answered", "bytes_answered", "ns_per_packet"]);
    let mut summary =
        Table::new(["attack", "packets", "answered with data", "bytes of notices", "ns a packet"]);
    let (mut points, mut checks) = (Vec::new(), Vec::new());
    let mut victims = Vec::new();
    for seed in SEEDS {
        victims.push(Victim::new(seed)?);
    }
    for (step, (attack, name)) in ATTACKS.into_iter().enumerate() {
        lab.progress(step + 1, ATTACKS.len(), name);
        let (mut answered, mut bytes, mut count, mut spent) = (0, 0, 0, 0.0);
        for victim in &mut victims {
            let result = victim.attack(attack, each / SEEDS.count() as u64)?;
            answered += result.answered;
            bytes += result.bytes;
            count += result.count;
            spent += result.seconds;
        }
        let cost = spent * 1e9 / count as f64;
        raw.row([
            name.into(),
            count.to_string(),
            answered.to_string(),
            bytes.to_string(),
            format!("{cost:.0}"),
        ]);
        summary.row([
            name.into(),
            thousands(count),
            thousands(answered),
            thousands(bytes),
            format!("{cost:.0}"),
        ]);
        points.push(Point::exact((step + 1) as f64, cost));
        checks.push(Check {
            what: format!("share of {} {name} packets that got nothing", thousands(count)),
            ratio: (count - answered) as f64 / count as f64,
            at_least: 1.0,
        });
    }
    let series = vec![("forged, replayed, truncated, loss hidden".to_owned(), points)];
    Ok(Outcome {
        raw,
        summary,
        plots: vec![(None, plot("Cost of a refused packet", ("attack", false), "ns", series))],
        verdict: Verdict::of(&checks),
        servers: Vec::new(),
    })
}

/// A server that has answered a transfer, and the client's requests.
struct Victim {
    server: Server,
    requests: Vec<(Vec<u8>, u64)>,
    random: Random,
}

struct Tally {
    count: u64,
    answered: u64,
    bytes: u64,
    seconds: f64,
}

impl Victim {
    fn new(seed: u64) -> Result<Self, Error> {
        let mut server = small_server(NOW_MS);
        let mut requests = Vec::new();
        transfer_from(&mut server, seed, OBJECT_BYTES, &mut |datagram, now_ms| {
            // Opens prove nothing, and a timeout may be repeated once in each slot of time.
            if account_of(datagram).is_some() {
                requests.push((datagram.to_vec(), now_ms));
            }
        })
        .map_err(|error| Error::Server(format!("seed {seed}: {error}")))?;
        Ok(Self { server, requests, random: Random::new(seed) })
    }

    fn attack(&mut self, attack: Attack, count: u64) -> Result<Tally, Error> {
        let mut service = FileService::new(Files);
        let mut result = Tally { count: 0, answered: 0, bytes: 0, seconds: 0.0 };
        let lossy: Vec<usize> = (0..self.requests.len())
            .filter(|index| {
                let account = account_of(&self.requests[*index].0);
                account.is_some_and(|(account, _)| account.runs.iter().any(|run| run.run.gap > 0))
            })
            .collect();
        if attack == Attack::HiddenLoss && lossy.is_empty() {
            return Ok(result);
        }
        // Made before they are sent: what the attacker's work costs is not the server's.
        const AT_ONCE: u64 = 1_000;
        while result.count < count {
            let mut packets = Vec::new();
            for _ in 0..AT_ONCE.min(count - result.count) {
                let index = if attack == Attack::HiddenLoss {
                    lossy[self.random.draw() as usize % lossy.len()]
                } else {
                    self.random.draw() as usize % self.requests.len()
                };
                packets.push((self.change(attack, index), self.requests[index].1));
            }
            let began = Instant::now();
            for (packet, now_ms) in &packets {
                let mut answers = 0;
                // A refusal is what is wanted; what is answered all the same is counted.
                let outcome =
                    self.server.handle(packet, peer(), *now_ms, &mut service, &mut |answer: &[u8]| {
                        answers += answer.len() as u64;
                    });
                result.answered += u64::from(outcome.is_ok());
                result.bytes += answers;
            }
            result.seconds += began.elapsed().as_secs_f64();
            result.count += packets.len() as u64;
        }
        Ok(result)
    }

    fn change(&mut self, attack: Attack, index: usize) -> Vec<u8> {
        let mut packet = self.requests[index].0.clone();
        match attack {
            Attack::Replayed => {}
            Attack::Truncated => packet.truncate(self.random.draw() as usize % packet.len()),
            Attack::Forged => {
                // The continuation, behind the header (10), the timestamp (4) and the time held (2).
                let at = 16 + self.random.draw() as usize % 73;
                packet[at] = packet[at].wrapping_add(1 + (self.random.draw() % 255) as u8);
            }
            Attack::HiddenLoss => {
                if let Some(lie) = self.hide_loss(&packet) {
                    packet = lie;
                }
            }
        }
        packet
    }

    /// The request as if nothing had been lost.
    fn hide_loss(&mut self, packet: &[u8]) -> Option<Vec<u8>> {
        let request = Request::decode(packet).ok()?;
        let (honest, group) = account_of(packet)?;
        let total = honest.runs.iter().map(|run| run.run.length + u32::from(run.run.gap)).sum();
        let nonces = match self.random.draw() % 3 {
            0 => honest.runs.iter().fold(0, |sum, run| sum ^ run.nonces),
            1 => honest.runs[self.random.draw() as usize % honest.runs.len()].nonces,
            _ => self.random.draw() >> 16,
        };
        let mut whole: ProvedRun = *honest.runs.first()?;
        (whole.run.gap, whole.run.length, whole.nonces) = (0, total, nonces);
        let ask = Ask::Continue { account: Account { runs: vec![whole], ..honest }, group };
        let mut out = Vec::new();
        Request::encode_head(request.connection, request.timestamp_us, &ask, &mut out);
        for want in &request.wants {
            wire::write_wants(&[(want.sequence, want.length)], want.continuation, &mut out);
        }
        Some(out)
    }
}

/// The account of a request that acknowledges packets, and how many.
fn account_of(datagram: &[u8]) -> Option<(Account, u8)> {
    match Request::decode(datagram).ok()?.ask {
        Ask::Continue { account, group } => Some((account, group)),
        _ => None,
    }
}
