//! Packets of those who want more than is theirs (Trickles §2.2).

use std::time::Instant;

use tidegate_trickles::continuation::{CONTINUATION_BYTES, ProvedRun};
use tidegate_trickles::files::FileService;
use tidegate_trickles::server::{Refusal, Server};
use tidegate_trickles::user::UserError;
use tidegate_trickles::wire::{self, Account, Ask, Request};

use super::trickles::{PAPER, plot};
use super::trickles_simulation::{Files, NOW_MS, fresh_server, peer, small_server, transfer_from};
use crate::link::Random;
use crate::plot::Point;
use crate::table::{Table, thousands};
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

const OBJECT_BYTES: u64 = 400_000;
/// Behind the header (10), the timestamp (4) and the time held (2).
const ACCOUNT_AT: usize = 16;
/// Of a run of packets in an account.
const RUN_BYTES: usize = 12;
/// A transfer whose link loses some percent of the packets.
const SEEDS: std::ops::Range<u64> = 1..9;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "trickles-forged",
    paper: &PAPER,
    figure: "§2.2",
    claim: "Of 1,000,000 forged, replayed, truncated and loss-hiding packets none is answered with data",
    published: "The paper argues that the MAC, the replay table and the nonces refuse such packets; it measures none.",
    method: "Real requests of transfers over lossy links, changed: a byte of the continuation or account overwritten; \
             sent again; cut off within a frame or before the first; or with an account in which lost packets count as \
             received, proved by the nonces that the client knows, by sums of them, and by guesses. What is sent again \
             goes to the server that answered it, at the time of the original, and last of all timeouts, up to 50 s \
             later. Everything else goes, at the time of the original, to a server with the same keys that has \
             answered nothing, one for each packet: there no replay table helps to refuse. As a control such servers \
             get the unchanged requests too, and those that hide a loss with the true account instead: all must be \
             answered. The cost is the time that the server takes for each packet, on one core; a server that is new \
             finds nothing of its own in the processor's caches.",
    run,
};

/// Of so many replayed packets one is a timeout, up to so much later.
const TIMEOUTS_SHARE: u64 = 10;
const LATER_MS: u64 = 50_000;

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

/// Why packets are refused, as in figures.
const REASONS: [&str; 8] = [
    "malformed",
    "unknown epoch",
    "wrong MAC",
    "stale",
    "impossible account",
    "not proved",
    "replayed",
    "user continuation",
];
const IMPOSSIBLE: usize = 4;
const UNPROVED: usize = 5;

fn reason(refusal: &Refusal) -> usize {
    match refusal {
        Refusal::Wire(_) | Refusal::Format(_) | Refusal::TooSmall | Refusal::User(UserError::Malformed) => 0,
        Refusal::UnknownEpoch { .. } => 1,
        Refusal::Forged { .. } => 2,
        Refusal::Stale { .. } => 3,
        Refusal::Account(_) => IMPOSSIBLE,
        Refusal::Unproved => UNPROVED,
        Refusal::Replayed => 6,
        Refusal::User(_) => 7,
    }
}

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let each = lab.choose(250_000_u64, 2_500);
    let mut victims = SEEDS.map(Victim::new).collect::<Result<Vec<_>, _>>()?;
    let mut attempts = Vec::new();
    for (step, (attack, name)) in ATTACKS.into_iter().enumerate() {
        lab.progress(step + 1, ATTACKS.len(), name);
        attempts.push(Attempt::make(attack, name, each, &mut victims)?);
    }
    let (raw, summary) = tables(&attempts);
    let costs =
        (1..).zip(&attempts).map(|(place, attempt)| Point::exact(f64::from(place), attempt.cost_ns()));
    let series = vec![("forged, replayed, truncated, loss hidden".to_owned(), costs.collect())];
    let checks: Vec<Check> = attempts.iter().flat_map(Attempt::checks).collect();
    Ok(Outcome {
        raw,
        summary,
        plots: vec![(None, plot("Cost of a refused packet", ("attack", false), "ns", series))],
        verdict: Verdict::of(&checks),
        servers: Vec::new(),
    })
}

/// What came of an attack.
struct Attempt {
    attack: Attack,
    name: &'static str,
    packets: Tally,
    /// How many of the honest requests new servers answered, and of how many; there are none where packets are
    /// replayed.
    control: (u64, u64),
}

impl Attempt {
    /// Sends so many packets to all victims together.
    fn make(attack: Attack, name: &'static str, count: u64, victims: &mut [Victim]) -> Result<Self, Error> {
        let mut attempt = Self { attack, name, packets: Tally::default(), control: (0, 0) };
        let each = count / victims.len() as u64;
        for victim in victims {
            attempt.packets.add(&victim.attack(attack, each)?);
            if attack != Attack::Replayed {
                let (answered, asked) = victim.control(attack)?;
                attempt.control = (attempt.control.0 + answered, attempt.control.1 + asked);
            }
        }
        Ok(attempt)
    }

    /// Nanoseconds that a packet takes its server.
    fn cost_ns(&self) -> f64 {
        self.packets.seconds * 1e9 / self.packets.count as f64
    }

    /// The reasons for which packets were refused, with their numbers.
    fn refused(&self) -> impl Iterator<Item = (&'static str, u64)> {
        REASONS.into_iter().zip(self.packets.refused).filter(|(_, packets)| *packets > 0)
    }

    /// That nothing was answered; that honest requests would have been; and that a hidden loss is what is refused.
    fn checks(&self) -> Vec<Check> {
        let (name, count) = (self.name, self.packets.count);
        let share =
            |what: String, part: u64, of: u64| Check { what, ratio: part as f64 / of as f64, at_least: 1.0 };
        let mut checks = vec![share(
            format!("share of {} {name} packets that got nothing", thousands(count)),
            count - self.packets.answered,
            count,
        )];
        if self.attack != Attack::Replayed {
            let what = format!("share of honest requests, not {name}, that new servers answer");
            checks.push(share(what, self.control.0, self.control.1));
        }
        if self.attack == Attack::HiddenLoss {
            let what = "share of hidden losses that are refused for their account or its proof".to_owned();
            let judged = self.packets.refused[IMPOSSIBLE] + self.packets.refused[UNPROVED];
            checks.push(share(what, judged, count));
        }
        checks
    }
}

fn tables(attempts: &[Attempt]) -> (Table, Table) {
    let mut raw = Table::new(["attack", "reason", "packets", "bytes_answered", "ns_per_packet"]);
    let mut summary = Table::new([
        "attack",
        "packets",
        "answered with data",
        "refused as",
        "honest ones that new servers answered",
        "bytes of notices",
        "ns a packet",
    ]);
    for attempt in attempts {
        let (name, all, cost) = (attempt.name, &attempt.packets, format!("{:.0}", attempt.cost_ns()));
        for (reason, packets) in [("none", all.answered)].into_iter().chain(attempt.refused()) {
            let (packets, bytes) = (packets.to_string(), all.bytes.to_string());
            raw.row([name.into(), reason.into(), packets, bytes, cost.clone()]);
        }
        let refused = attempt.refused().map(|(reason, packets)| format!("{reason}: {}", thousands(packets)));
        let control = match attempt.control {
            (_, 0) => "-".into(),
            (answered, asked) => format!("{} of {}", thousands(answered), thousands(asked)),
        };
        summary.row([
            name.into(),
            thousands(all.count),
            thousands(all.answered),
            refused.collect::<Vec<_>>().join(", "),
            control,
            thousands(all.bytes),
            cost,
        ]);
    }
    (raw, summary)
}

/// A server that has answered a transfer, and the client's requests.
struct Victim {
    server: Server,
    requests: Vec<(Vec<u8>, u64)>,
    timeouts: Vec<(Vec<u8>, u64)>,
    random: Random,
}

#[derive(Default)]
struct Tally {
    count: u64,
    answered: u64,
    /// By [`REASONS`].
    refused: [u64; REASONS.len()],
    bytes: u64,
    seconds: f64,
}

impl Tally {
    fn add(&mut self, other: &Self) {
        self.count += other.count;
        self.answered += other.answered;
        self.refused.iter_mut().zip(other.refused).for_each(|(all, one)| *all += one);
        self.bytes += other.bytes;
        self.seconds += other.seconds;
    }

    /// Gives a packet to a server and takes note of what it says.
    fn ask(&mut self, server: &mut Server, service: &mut FileService<Files>, packet: &[u8], now_ms: u64) {
        let mut bytes = 0;
        let outcome = server.handle(packet, peer(), now_ms, service, &mut |answer: &[u8]| {
            bytes += answer.len() as u64;
        });
        self.count += 1;
        self.bytes += bytes;
        match outcome {
            Ok(()) => self.answered += 1,
            Err(refusal) => self.refused[reason(&refusal)] += 1,
        }
    }
}

impl Victim {
    fn new(seed: u64) -> Result<Self, Error> {
        let mut server = small_server(NOW_MS);
        let (mut requests, mut timeouts) = (Vec::new(), Vec::new());
        transfer_from(&mut server, seed, OBJECT_BYTES, &mut |datagram, now_ms| {
            // Opens prove nothing.
            match Request::decode(datagram).map(|request| request.ask) {
                Ok(Ask::Continue { .. }) => requests.push((datagram.to_vec(), now_ms)),
                Ok(Ask::Timeout { .. }) => timeouts.push((datagram.to_vec(), now_ms)),
                _ => {}
            }
        })
        .map_err(|error| Error::Server(format!("seed {seed}: {error}")))?;
        Ok(Self { server, requests, timeouts, random: Random::new(seed) })
    }

    /// The requests that an attack changes: those that report a loss, where it is to be hidden.
    fn originals(&self, attack: Attack) -> Result<Vec<usize>, Error> {
        let reports = |index: &usize| {
            let account = account_of(&self.requests[*index].0);
            account.is_some_and(|(account, _)| account.runs.iter().any(|run| run.run.gap > 0))
        };
        let all = 0..self.requests.len();
        let originals: Vec<usize> =
            all.filter(|index| attack != Attack::HiddenLoss || reports(index)).collect();
        if originals.is_empty() { Err(Error::Nothing("an attack without requests")) } else { Ok(originals) }
    }

    fn attack(&mut self, attack: Attack, count: u64) -> Result<Tally, Error> {
        let mut service = FileService::new(Files);
        let mut result = Tally::default();
        let originals = self.originals(attack)?;
        // Made before they are sent, packets and servers: what the attacker's work costs is not the server's.
        const AT_ONCE: u64 = 1_000;
        while result.count < count {
            let mut packets = Vec::new();
            // At the end, as the table forgets what was before when time goes on.
            let is_timeouts_turn = attack == Attack::Replayed
                && result.count + count / TIMEOUTS_SHARE >= count
                && !self.timeouts.is_empty();
            for _ in 0..AT_ONCE.min(count - result.count) {
                if is_timeouts_turn {
                    let (timeout, sent_ms) =
                        &self.timeouts[self.random.draw() as usize % self.timeouts.len()];
                    // Each slot of time has room for a timeout of its own.
                    let now_ms = sent_ms + self.random.draw() % LATER_MS;
                    packets.push((timeout.clone(), now_ms, None));
                    continue;
                }
                let index = originals[self.random.draw() as usize % originals.len()];
                let server = (attack != Attack::Replayed).then(|| fresh_server(NOW_MS));
                packets.push((self.change(attack, index)?, self.requests[index].1, server));
            }
            let began = Instant::now();
            for (packet, now_ms, fresh) in &mut packets {
                result.ask(fresh.as_mut().unwrap_or(&mut self.server), &mut service, packet, *now_ms);
            }
            result.seconds += began.elapsed().as_secs_f64();
        }
        Ok(result)
    }

    /// Gives new servers what the attack was made from: how many of the requests they answer, and of how many.
    fn control(&self, attack: Attack) -> Result<(u64, u64), Error> {
        let mut service = FileService::new(Files);
        let mut result = Tally::default();
        for index in self.originals(attack)? {
            let (request, now_ms) = &self.requests[index];
            result.ask(&mut fresh_server(NOW_MS), &mut service, request, *now_ms);
            if attack == Attack::HiddenLoss {
                // Written anew as the lies are.
                let (account, _) =
                    account_of(request).ok_or(Error::Nothing("a request without an account"))?;
                let told =
                    with_account(request, account).ok_or(Error::Nothing("a request without an account"))?;
                result.ask(&mut fresh_server(NOW_MS), &mut service, &told, *now_ms);
            }
        }
        Ok((result.answered, result.count))
    }

    fn change(&mut self, attack: Attack, index: usize) -> Result<Vec<u8>, Error> {
        let mut packet = self.requests[index].0.clone();
        match attack {
            Attack::Replayed => {}
            Attack::Truncated => {
                let ends = frame_ends(&packet).ok_or(Error::Nothing("a request without frames"))?;
                let length = loop {
                    // What ends with a frame is a request too, which asks for less.
                    let length = self.random.draw() as usize % packet.len();
                    if !ends.contains(&length) {
                        break length;
                    }
                };
                packet.truncate(length);
            }
            Attack::Forged => {
                let (account, _) =
                    account_of(&packet).ok_or(Error::Nothing("a request without an account"))?;
                let protected = CONTINUATION_BYTES + 1 + account.runs.len() * RUN_BYTES;
                let mut at = self.random.draw() as usize % protected;
                // Behind the number of runs comes how many packets the request answers for: that is the client's
                // choice.
                at += usize::from(at > CONTINUATION_BYTES);
                let at = ACCOUNT_AT + at;
                packet[at] = packet[at].wrapping_add(1 + (self.random.draw() % 255) as u8);
            }
            Attack::HiddenLoss => {
                packet = self.hide_loss(&packet).ok_or(Error::Nothing("a loss that cannot be hidden"))?;
            }
        }
        Ok(packet)
    }

    /// The request as if nothing had been lost.
    fn hide_loss(&mut self, packet: &[u8]) -> Option<Vec<u8>> {
        let (honest, _) = account_of(packet)?;
        let total = honest.runs.iter().map(|run| run.run.length + u32::from(run.run.gap)).sum();
        let nonces = match self.random.draw() % 3 {
            0 => honest.runs.iter().fold(0, |sum, run| sum ^ run.nonces),
            1 => honest.runs[self.random.draw() as usize % honest.runs.len()].nonces,
            _ => self.random.draw() >> 16,
        };
        let mut whole: ProvedRun = *honest.runs.first()?;
        (whole.run.gap, whole.run.length, whole.nonces) = (0, total, nonces);
        with_account(packet, Account { runs: vec![whole], ..honest })
    }
}

/// The request with another account.
fn with_account(packet: &[u8], account: Account) -> Option<Vec<u8>> {
    let request = Request::decode(packet).ok()?;
    let (_, group) = account_of(packet)?;
    let mut out = Vec::new();
    Request::encode_head(
        request.connection,
        request.timestamp_us,
        &Ask::Continue { account, group },
        &mut out,
    );
    for want in &request.wants {
        wire::write_wants(&[(want.sequence, want.length)], want.continuation, &mut out);
    }
    Some(out)
}

/// Where the head of a request and each of its frames end.
fn frame_ends(packet: &[u8]) -> Option<Vec<usize>> {
    let (account, _) = account_of(packet)?;
    let mut at = ACCOUNT_AT + CONTINUATION_BYTES + 2 + account.runs.len() * RUN_BYTES;
    let mut ends = vec![at];
    while let Some([_, high, low]) = packet.get(at..at + 3) {
        at += 3 + usize::from(u16::from_be_bytes([*high, *low]));
        ends.push(at);
    }
    Some(ends)
}

/// The account of a request that acknowledges packets, and how many.
fn account_of(datagram: &[u8]) -> Option<(Account, u8)> {
    match Request::decode(datagram).ok()?.ask {
        Ask::Continue { account, group } => Some((account, group)),
        _ => None,
    }
}
