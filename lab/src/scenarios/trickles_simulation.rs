//! One transfer in virtual time: client and server without sockets, and a link that loses, delays, doubles and
//! reorders.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tidegate_trickles::client::{Client, Config, Read};
use tidegate_trickles::files::{FileService, Object, Objects};
use tidegate_trickles::keys::KeyRing;
use tidegate_trickles::server::{self, Server};

use crate::link::Random;
use crate::transfer::byte_at;

/// The server's wall clock at the start.
pub(super) const NOW_MS: u64 = 1_700_000_000_000;
/// Content that fits into each packet, whatever else is in it.
const PACKET_BYTES: u64 = 1_200;
/// The client's least timeout, its longest, and the longest before it opens anew another time.
const TIMEOUTS: (Duration, Duration, Duration) =
    (Duration::from_millis(200), Duration::from_secs(60), Duration::from_secs(16));
/// Timeouts in a row after which a client opens anew.
const TIMEOUTS_TO_OPEN: u32 = 7;
/// Of so many exchanges one is allowed to be the unluckiest.
const EXCHANGES: f64 = 1e6;

/// Any file: its name is its length.
#[derive(Debug)]
pub(super) struct Files;

impl Objects for Files {
    fn find(&mut self, path: &[u8]) -> Option<Object> {
        Some(Object { length: std::str::from_utf8(path).ok()?.parse().ok()?, version: 1 })
    }

    fn read(&mut self, path: &[u8], _: u64, offset: u64, buffer: &mut [u8]) -> Option<usize> {
        let length = self.find(path)?.length;
        let count = buffer.len().min(usize::try_from(length.saturating_sub(offset)).unwrap_or(usize::MAX));
        for (byte, at) in buffer[..count].iter_mut().zip(offset..) {
            *byte = byte_at(at);
        }
        Some(count)
    }
}

/// A server that remembers what the replay table of a small one would.
pub(super) fn small_server(now_ms: u64) -> Server {
    let config = server::Config { replay_entries: 1 << 10, ..server::Config::default() };
    Server::new(config, KeyRing::new(1, &[42; 16]), now_ms)
}

/// A server with the same keys that has answered nothing, as small as can be.
pub(super) fn fresh_server(now_ms: u64) -> Server {
    let config = server::Config { replay_entries: 16, ..server::Config::default() };
    Server::new(config, KeyRing::new(1, &[42; 16]), now_ms)
}

/// Where the client is.
pub(super) fn peer() -> SocketAddr {
    ([192, 0, 2, 7], 5000).into()
}

/// One packet on its way.
#[derive(Eq, Ord, PartialEq, PartialOrd)]
struct Flight {
    at: Duration,
    sequence: u64,
    to_server: bool,
    packet: Vec<u8>,
}

/// How a link loses, beside what its seed says.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Pattern {
    /// Each packet by itself, both ways alike.
    Uniform,
    /// A good and a bad state, of some 100 and 8 packets (Gilbert and Elliott): 2 % and 60 % of the packets are lost.
    Bursts,
    /// Only what the client sends: acknowledgements and requests.
    OnlyUp,
    /// Only what the server sends.
    OnlyDown,
    /// Nothing, but every tenth packet comes up to a round trip late, after several later ones.
    Reordering,
    /// A third of the packets arrive twice.
    Duplicates,
    /// Nothing arrives for 3 s, five times, some hundred ms apart.
    Blackouts,
    /// A good and a bad state again, every tenth packet late, a tenth twice.
    Mixed,
}

impl Pattern {
    /// All but the first, which [`transfer`] has, with a name for figures.
    pub(super) const OTHERS: [(Self, &str); 7] = [
        (Self::Bursts, "bursts of losses"),
        (Self::OnlyUp, "20 % lost on the way up"),
        (Self::OnlyDown, "20 % lost on the way down"),
        (Self::Reordering, "reordering by up to a round trip"),
        (Self::Duplicates, "a third duplicated"),
        (Self::Blackouts, "blackouts of 3 s"),
        (Self::Mixed, "bursts, reordering and duplicates at once"),
    ];
}

/// Of 1,000,000 packets so many begin a burst of losses, and end one.
const BURST_PPM: (u32, u32) = (10_000, 125_000);
const BLACKOUT: Duration = Duration::from_secs(3);

/// A link, and what is on its way there.
struct Link {
    random: Random,
    pattern: Pattern,
    /// Whether each direction is in its bad state.
    bad: [bool; 2],
    trip: Duration,
    loss_ppm: u32,
    reorder_ppm: u32,
    duplicate_ppm: u32,
    flights: BinaryHeap<Reverse<Flight>>,
    sequence: u64,
}

impl Link {
    /// A link of a kind; the rest follows from the seed.
    fn new(pattern: Pattern, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut link = Self {
            trip: Duration::from_millis(10 + random.draw() % 391),
            loss_ppm: (random.draw() % 50_001) as u32,
            reorder_ppm: (random.draw() % 20_000) as u32,
            duplicate_ppm: (random.draw() % 20_000) as u32,
            random,
            pattern,
            bad: [false; 2],
            flights: BinaryHeap::new(),
            sequence: 0,
        };
        match pattern {
            Pattern::Reordering => (link.reorder_ppm, link.duplicate_ppm) = (100_000, 0),
            Pattern::Duplicates => link.duplicate_ppm = 333_333,
            Pattern::Mixed => (link.reorder_ppm, link.duplicate_ppm) = (100_000, 100_000),
            _ => {}
        }
        link
    }

    /// Share of packets that are lost in each direction, to the server first, and among those after a lost one.
    fn losses(&self) -> ([f64; 2], f64) {
        let (each, one) = (f64::from(self.loss_ppm) / 1e6, 0.2);
        match self.pattern {
            Pattern::Uniform => ([each; 2], each),
            Pattern::OnlyUp => ([one, 0.0], one),
            Pattern::OnlyDown => ([0.0, one], one),
            Pattern::Reordering | Pattern::Duplicates => ([0.0; 2], 0.0),
            Pattern::Bursts | Pattern::Mixed => {
                let (begins, ends) = (f64::from(BURST_PPM.0), f64::from(BURST_PPM.1));
                let bad = begins / (begins + ends);
                ([0.6 * bad + 0.02 * (1.0 - bad); 2], 0.6)
            }
            Pattern::Blackouts => ([each / 10.0; 2], each / 10.0),
        }
    }

    /// A transfer of so many bytes that takes longer hangs; of 17,000 none needs more than two thirds of it. The path
    /// explains a round trip for each packet, as if the window were one packet; for each that is lost, or whose
    /// acknowledgement is, a timeout, which doubles where it is lost again; once, as many timeouts in a row as one
    /// exchange in a million has; and blackouts, each with a timer that has doubled for as long.
    fn most_time(&self, bytes: u64) -> Duration {
        let ([up, down], after) = self.losses();
        let lost = 1.0 - (1.0 - up) * (1.0 - down);
        let again = 1.0 - (1.0 - after) * (1.0 - up.min(down));
        let timeout = TIMEOUTS.0.max(self.trip * 3);
        let exchange = self.trip + timeout.mul_f64(lost / (1.0 - 2.0 * lost));
        let in_a_row = (EXCHANGES.ln() / -again.max(1.0 / EXCHANGES).ln()).ceil() as u32;
        let unlucky: Duration = (0..in_a_row)
            .map(|n| match n {
                ..TIMEOUTS_TO_OPEN => (timeout * (1 << n)).min(TIMEOUTS.1),
                _ => TIMEOUTS.2,
            })
            .sum();
        let dark = if self.pattern == Pattern::Blackouts { BLACKOUT * 5 * 3 } else { Duration::ZERO };
        // An open, and what tells the end.
        let packets = u32::try_from(bytes / PACKET_BYTES + 2).unwrap_or(u32::MAX);
        exchange * packets + unlucky + dark
    }

    fn loses(&mut self, now: Duration, to_server: bool) -> bool {
        let loss_ppm = match self.pattern {
            Pattern::Uniform => self.loss_ppm,
            Pattern::OnlyUp => u32::from(to_server) * 200_000,
            Pattern::OnlyDown => u32::from(!to_server) * 200_000,
            Pattern::Reordering | Pattern::Duplicates => 0,
            Pattern::Bursts | Pattern::Mixed => {
                let bad = &mut self.bad[usize::from(to_server)];
                *bad ^= self.random.chance(if *bad { BURST_PPM.1 } else { BURST_PPM.0 });
                if *bad { 600_000 } else { 20_000 }
            }
            Pattern::Blackouts => {
                let period = BLACKOUT + self.trip * 3;
                let (count, within) =
                    (now.as_micros() / period.as_micros(), now.as_micros() % period.as_micros());
                let dark = count < 5 && within > (self.trip * 3).as_micros();
                return dark || self.random.chance(self.loss_ppm / 10);
            }
        };
        self.random.chance(loss_ppm)
    }

    fn send(&mut self, now: Duration, to_server: bool, packet: &[u8]) {
        if self.loses(now, to_server) {
            return;
        }
        for _ in 0..1 + usize::from(self.random.chance(self.duplicate_ppm)) {
            // A packet that is late by part of a round trip is overtaken by what a window sends meanwhile.
            let late = match self.random.chance(self.reorder_ppm) {
                true if matches!(self.pattern, Pattern::Reordering | Pattern::Mixed) => {
                    self.trip.mul_f64(self.random.draw() as f64 / u64::MAX as f64)
                }
                true => self.trip / 8,
                false => Duration::ZERO,
            };
            self.sequence += 1;
            let at = now + self.trip / 2 + late;
            self.flights.push(Reverse(Flight {
                at,
                sequence: self.sequence,
                to_server,
                packet: packet.to_vec(),
            }));
        }
    }
    /// The next packet that arrives, if it does so before a timer runs out.
    fn arrival_until(&mut self, timer: Option<Duration>) -> Option<Flight> {
        let Reverse(next) = self.flights.peek()?;
        if timer.is_some_and(|timer| next.at > timer) {
            return None;
        }
        self.flights.pop().map(|Reverse(flight)| flight)
    }
}

/// A transfer's time.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct Took {
    pub(super) time: Duration,
    /// The time in which it had to end.
    pub(super) most: Duration,
}

impl Took {
    /// The part of the time allowed that was needed.
    pub(super) fn share(self) -> f64 {
        self.time.as_secs_f64() / self.most.as_secs_f64()
    }
}

/// Fetches a file over a link, both of which follow from the seed.
///
/// # Errors
/// Says what went wrong: a byte that is not right, or no end in the time that the link explains.
pub(super) fn transfer(seed: u64) -> Result<Took, String> {
    let bytes = Random::new(seed ^ 0x5eed).draw() % 60_000;
    transfer_from(&mut small_server(NOW_MS), seed, bytes, &mut |_, _| ())
}

/// As [`transfer`], over a link of another kind.
///
/// # Errors
/// As [`transfer`].
pub(super) fn transfer_in(pattern: Pattern, seed: u64) -> Result<Took, String> {
    let bytes = Random::new(seed ^ 0x5eed).draw() % 200_000;
    fetch(&mut small_server(NOW_MS), pattern, seed, bytes, &mut |_, _| ())
}

/// Fetches a file of `bytes` over a link that follows from the seed; `observe` sees what reaches the server, and when.
///
/// # Errors
/// As [`transfer`].
pub(super) fn transfer_from(
    server: &mut Server,
    seed: u64,
    bytes: u64,
    observe: &mut dyn FnMut(&[u8], u64),
) -> Result<Took, String> {
    fetch(server, Pattern::Uniform, seed, bytes, observe)
}

fn fetch(
    server: &mut Server,
    pattern: Pattern,
    seed: u64,
    bytes: u64,
    observe: &mut dyn FnMut(&[u8], u64),
) -> Result<Took, String> {
    let mut link = Link::new(pattern, seed);
    let most = link.most_time(bytes);
    let start = Instant::now();
    let mut service = FileService::new(Files);
    let mut download = Download::start(seed, bytes, start)?;
    let mut now = Duration::ZERO;
    while now < most {
        while let Some(datagram) = download.client.poll_transmit(start + now) {
            link.send(now, true, &datagram);
        }
        let timer = download.client.poll_timeout().map(|at| at.saturating_duration_since(start));
        match (link.arrival_until(timer), timer) {
            (Some(flight), _) => {
                now = now.max(flight.at);
                if flight.to_server {
                    let now_ms = NOW_MS + now.as_millis() as u64;
                    observe(&flight.packet, now_ms);
                    let mut answer = |packet: &[u8]| link.send(now, false, packet);
                    // What is refused is a copy, or late.
                    let _ = server.handle(&flight.packet, peer(), now_ms, &mut service, &mut answer);
                } else {
                    let _ = download.client.handle_datagram(&flight.packet, start + now);
                }
            }
            (None, Some(timer)) => {
                now = now.max(timer);
                download.client.handle_timeout(start + now);
            }
            (None, None) => return Err("nothing is on its way, and no timer runs".into()),
        }
        if download.read_to_end()? {
            return Ok(Took { time: now, most });
        }
    }
    let offset = download.offset;
    Err(format!("{offset} of {bytes} bytes in {most:?}, with a round trip of {:?}", link.trip))
}

/// A client and what it has read of its file.
struct Download {
    client: Client,
    request: u32,
    bytes: u64,
    offset: u64,
    buffer: [u8; 4096],
}

impl Download {
    fn start(seed: u64, bytes: u64, start: Instant) -> Result<Self, String> {
        let mut key = [7; 16];
        key[..8].copy_from_slice(&seed.to_be_bytes());
        let mut client = Client::new(Config::default(), &key, start);
        let request =
            client.request(bytes.to_string().as_bytes(), start).map_err(|error| error.to_string())?;
        Ok(Self { client, request, bytes, offset: 0, buffer: [0; 4096] })
    }

    /// Reads what is there and compares every byte; whether it was the last.
    fn read_to_end(&mut self) -> Result<bool, String> {
        let bytes = self.bytes;
        loop {
            match self.client.read(self.request, &mut self.buffer).map_err(|error| error.to_string())? {
                Read::Data(count) => {
                    let mut read = (self.offset..).zip(&self.buffer[..count]);
                    if let Some((at, _)) = read.find(|(at, byte)| byte_at(*at) != **byte) {
                        return Err(format!("byte {at} of {bytes} is wrong"));
                    }
                    self.offset += count as u64;
                }
                Read::Pending => return Ok(false),
                Read::End if self.offset == bytes => return Ok(true),
                Read::End => return Err(format!("{} of {bytes} bytes arrived", self.offset)),
                Read::Reset(code) => return Err(format!("reset with code {code}")),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_of_any_seed_end_with_every_byte_right() {
        for seed in 0..20 {
            let took = transfer(seed);
            assert!(took.is_ok(), "seed {seed}: {took:?}");
        }
    }

    #[test]
    fn transfers_over_links_of_any_kind_end_with_every_byte_right() {
        for (pattern, name) in Pattern::OTHERS {
            for seed in 0..20 {
                let took = transfer_in(pattern, seed);
                assert!(took.is_ok(), "{name}, seed {seed}: {took:?}");
            }
        }
    }
}
