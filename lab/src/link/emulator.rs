//! A link in user space: rate, delay, loss, reordering, duplication and a queue, for packets between two devices.
//!
//! One thread reads both devices and hands every packet on when it is due. The queue is computed and not kept: a link of a
//! rate is busy until some time, and what waits for it is that time's distance.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tun_rs::SyncDevice;

/// Packets that may be on their way at once; more are lost. At 1500 bytes this is a second of 400 Mbit/s.
const MOST_PACKETS: usize = 1 << 15;
const NS_PER_S: u64 = 1_000_000_000;
/// Longest packet of a device.
const PACKET_BYTES: usize = 2048;
/// Packets that are read from a device before the other gets its turn.
const BATCH: usize = 64;
/// Longest wait without looking whether the link is to end.
const WAIT: Duration = Duration::from_millis(50);

/// What a link does to packets, the same in both directions.
#[derive(Clone, Copy, Debug)]
pub struct Profile {
    /// Bits per second, headers of IP included.
    pub rate_bits_per_s: u64,
    /// One way.
    pub delay: Duration,
    /// Bytes that may wait for the link; what comes then is lost.
    pub queue_bytes: u64,
    /// Of 1,000,000 packets as many are lost.
    pub loss_ppm: u32,
    /// Of 1,000,000 packets as many are overtaken: they take another quarter of the delay.
    pub reorder_ppm: u32,
    /// Of 1,000,000 packets as many arrive twice.
    pub duplicate_ppm: u32,
    /// For up to this time a packet waits by chance before it comes to the queue, in order within its flow. Without such a
    /// wait a flow keeps its distance to the moments at which a full queue has room again, and packets that a kernel sends at
    /// one moment lose what those get that a busy program sends one after the other. Floyd and Jacobson ask for this wait at
    /// the sender (On Traffic Phase Effects in Packet-Switched Gateways, §4).
    pub chance_wait: Duration,
}

/// Longest packet of the links, in bits.
const LONGEST_PACKET_BITS: u64 = 1500 * 8;

impl Profile {
    /// A link without faults whose queue holds what a round trip brings, at least 64 packets. The wait by chance is what the
    /// longest packet takes on the link.
    pub fn clean(rate_bits_per_s: u64, round_trip: Duration) -> Self {
        let trip_bytes = rate_bits_per_s as f64 / 8.0 * round_trip.as_secs_f64();
        Self {
            rate_bits_per_s,
            delay: round_trip / 2,
            queue_bytes: (trip_bytes as u64).max(64 * 1500),
            loss_ppm: 0,
            reorder_ppm: 0,
            duplicate_ppm: 0,
            chance_wait: Duration::from_nanos(LONGEST_PACKET_BITS * NS_PER_S / rate_bits_per_s.max(1)),
        }
    }
}

/// What happened on all links.
#[derive(Debug, Default)]
pub struct Traffic {
    /// Packets handed on.
    pub delivered: AtomicU64,
    /// Packets lost because the queue was full.
    pub overflowed: AtomicU64,
    /// Packets lost as the profile asks.
    pub lost: AtomicU64,
    /// The IPv4 address whose host is gone: what it sends, and what is sent to it, comes to no link. 0 for none.
    pub(super) gone: AtomicU32,
}

/// Seeded, so that a run can be repeated.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// A sequence of its own for each seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// SplitMix64.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Whether one of 1,000,000 chances, of which `ppm` are taken, is.
    pub fn chance(&mut self, ppm: u32) -> bool {
        ppm > 0 && self.draw() % 1_000_000 < u64::from(ppm)
    }
}

#[derive(Eq, Ord, PartialEq, PartialOrd)]
struct Due {
    at: Instant,
    /// Keeps the order of packets that are due together.
    sequence: u64,
    /// Whether it leaves the link then, or comes to its queue.
    leaves: bool,
    to_second: bool,
    packet: Vec<u8>,
}

/// The links between two devices, one for each client address, each with a profile of its own.
pub(super) struct Emulator {
    devices: [SyncDevice; 2],
    profiles: Vec<Profile>,
    busy_until: HashMap<(usize, bool), Instant>,
    /// When the last packet of each flow comes to the queue, by direction and the client's port: what waits by chance stays in
    /// order. Flows with the same port share an entry, and wait for each other.
    last_at: [Vec<Instant>; 2],
    due: BinaryHeap<Reverse<Due>>,
    sequence: u64,
    random: Random,
    traffic: Arc<Traffic>,
}

impl Emulator {
    /// Links between clients on the first device and servers on the second.
    pub(super) fn new(
        devices: [SyncDevice; 2],
        profiles: Vec<Profile>,
        seed: u64,
        traffic: Arc<Traffic>,
    ) -> Self {
        Self {
            devices,
            profiles,
            busy_until: HashMap::new(),
            last_at: [(); 2].map(|()| vec![Instant::now(); 1 << 16]),
            due: BinaryHeap::new(),
            sequence: 0,
            random: Random::new(seed),
            traffic,
        }
    }

    /// Hands packets on until `stop`.
    pub(super) fn run(mut self, stop: &AtomicBool) {
        let mut buffer = [0; PACKET_BYTES];
        while !stop.load(Ordering::Relaxed) {
            let now = Instant::now();
            self.deliver(now);
            let wait = self.due.peek().map_or(WAIT, |Reverse(due)| due.at.saturating_duration_since(now));
            let wait = wait.min(WAIT);
            let timeout =
                Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) as _ };
            let mut watched = [
                PollFd::from_borrowed_fd(self.devices[0].as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.devices[1].as_fd(), PollFlags::IN),
            ];
            if poll(&mut watched, Some(&timeout)).is_err() {
                continue;
            }
            let ready = [!watched[0].revents().is_empty(), !watched[1].revents().is_empty()];
            for (side, _) in ready.into_iter().enumerate().filter(|(_, ready)| *ready) {
                for _ in 0..BATCH {
                    let Ok(length) = self.devices[side].recv(&mut buffer) else { break };
                    self.take(&buffer[..length], side == 0);
                }
            }
        }
    }

    fn deliver(&mut self, now: Instant) {
        while let Some(Reverse(due)) = self.due.peek()
            && due.at <= now
        {
            let Some(Reverse(due)) = self.due.pop() else { return };
            if !due.leaves {
                self.queue(due);
                continue;
            }
            // A device that takes no more has lost the packet, as a network card would.
            if self.devices[usize::from(due.to_second)].send(&due.packet).is_ok() {
                self.traffic.delivered.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// The index of a packet's link, and what it is like.
    fn link_of(&self, packet: &[u8], to_second: bool) -> Option<(usize, Profile)> {
        let link = client_of(packet, to_second)?.min(self.profiles.len().checked_sub(1)?);
        Some((link, *self.profiles.get(link)?))
    }

    /// Takes a packet from a device.
    fn take(&mut self, packet: &[u8], to_second: bool) {
        let Some((_, profile)) = self.link_of(packet, to_second) else { return };
        let gone = self.traffic.gone.load(Ordering::Relaxed);
        if gone != 0 && server_of(packet, to_second) == Some(gone) {
            return;
        }
        if self.due.len() >= MOST_PACKETS {
            self.traffic.overflowed.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let most_ns = u64::try_from(profile.chance_wait.as_nanos()).unwrap_or(u64::MAX);
        let at = Instant::now() + Duration::from_nanos(self.random.draw() % most_ns.max(1));
        let last_at = &mut self.last_at[usize::from(to_second)][usize::from(port_of(packet, to_second))];
        let at = at.max(*last_at);
        *last_at = at;
        self.push(Due { at, sequence: 0, leaves: false, to_second, packet: packet.to_vec() });
    }

    fn push(&mut self, due: Due) {
        self.sequence += 1;
        self.due.push(Reverse(Due { sequence: self.sequence, ..due }));
    }

    /// Has a packet wait for its link, unless too many do.
    fn queue(&mut self, packet: Due) {
        let Some((link, profile)) = self.link_of(&packet.packet, packet.to_second) else { return };
        if self.random.chance(profile.loss_ppm) {
            self.traffic.lost.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let comes = packet.at;
        let free = self.busy_until.entry((link, packet.to_second)).or_insert(comes);
        let begins = (*free).max(comes);
        let waiting =
            begins.saturating_duration_since(comes).as_secs_f64() * profile.rate_bits_per_s as f64 / 8.0;
        if waiting > profile.queue_bytes as f64 {
            self.traffic.overflowed.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let bits = packet.packet.len() as f64 * 8.0;
        *free = begins + Duration::from_secs_f64(bits / profile.rate_bits_per_s as f64);
        let mut at = *free + profile.delay;
        if self.random.chance(profile.reorder_ppm) {
            at += profile.delay / 4;
        }
        if self.random.chance(profile.duplicate_ppm) {
            let Due { sequence, to_second, ref packet, .. } = packet;
            self.push(Due { at, sequence, leaves: true, to_second, packet: packet.clone() });
        }
        self.push(Due { at, leaves: true, ..packet });
    }
}

/// The link that a packet goes over: what the client's IPv4 address says in its last two bytes, from 2 on.
fn client_of(packet: &[u8], from_client: bool) -> Option<usize> {
    let at = if from_client { 12 } else { 16 };
    let address = packet.get(at..at + 4).filter(|_| packet[0] >> 4 == 4)?;
    usize::from(u16::from_be_bytes([address[2], address[3]])).checked_sub(2)
}

/// The server's IPv4 address.
fn server_of(packet: &[u8], from_client: bool) -> Option<u32> {
    let at = if from_client { 16 } else { 12 };
    let address = packet.get(at..at + 4).filter(|_| packet[0] >> 4 == 4)?;
    Some(u32::from_be_bytes([address[0], address[1], address[2], address[3]]))
}

/// The client's port; 0 where there is none.
fn port_of(packet: &[u8], from_client: bool) -> u16 {
    let header = usize::from(packet.first().unwrap_or(&0) & 0xf) * 4;
    let at = if from_client { header } else { header + 2 };
    packet.get(at..at + 2).map_or(0, |port| u16::from_be_bytes([port[0], port[1]]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_belongs_to_the_link_of_its_client() {
        let mut packet = vec![0; 40];
        packet[0] = 0x45;
        packet[12..20].copy_from_slice(&[10, 98, 1, 2, 10, 98, 0, 1]);
        assert_eq!(client_of(&packet, true), Some(256));
        assert_eq!(client_of(&packet, false), None);
        assert_eq!(client_of(&packet[..10], true), None);
        assert_eq!(server_of(&packet, true), Some(0x0a62_0001));
        assert_eq!(server_of(&packet, false), Some(0x0a62_0102));
        packet[0] = 0x60;
        assert_eq!(client_of(&packet, true), None);
    }

    #[test]
    fn a_flow_goes_by_the_port_of_its_client() {
        let mut packet = vec![0; 28];
        packet[0] = 0x45;
        packet[20..24].copy_from_slice(&[0x12, 0x34, 0x56, 0x78]);
        assert_eq!((port_of(&packet, true), port_of(&packet, false)), (0x1234, 0x5678));
        assert_eq!((port_of(&packet[..23], true), port_of(&packet[..23], false)), (0x1234, 0));
        assert_eq!(port_of(&[], true), 0);
    }

    #[test]
    fn chances_are_taken_as_often_as_they_should() {
        let mut random = Random::new(1);
        let taken = (0..100_000).filter(|_| random.chance(50_000)).count();
        assert!((4_700..5_300).contains(&taken), "{taken}");
        assert!(!random.chance(0));
    }
}
