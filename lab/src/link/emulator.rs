//! A link in user space: rate, delay, loss, reordering, duplication and a queue, for packets between two devices.
//!
//! One thread reads both devices and hands every packet on when it is due. The queue is computed and not kept: a link of a
//! rate is busy until some time, and what waits for it is that time's distance.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tun_rs::SyncDevice;

/// Packets that may be on their way at once; more are lost. At 1500 bytes this is a second of 400 Mbit/s.
const MOST_PACKETS: usize = 1 << 15;
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
}

impl Profile {
    /// A link without faults whose queue holds what a round trip brings, at least 64 packets.
    pub fn clean(rate_bits_per_s: u64, round_trip: Duration) -> Self {
        let trip_bytes = rate_bits_per_s as f64 / 8.0 * round_trip.as_secs_f64();
        Self {
            rate_bits_per_s,
            delay: round_trip / 2,
            queue_bytes: (trip_bytes as u64).max(64 * 1500),
            loss_ppm: 0,
            reorder_ppm: 0,
            duplicate_ppm: 0,
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
    to_second: bool,
    packet: Vec<u8>,
}

/// The links between two devices, one for each client address, each with a profile of its own.
pub(super) struct Emulator {
    devices: [SyncDevice; 2],
    profiles: Vec<Profile>,
    busy_until: HashMap<(usize, bool), Instant>,
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
            // A device that takes no more has lost the packet, as a network card would.
            if self.devices[usize::from(due.to_second)].send(&due.packet).is_ok() {
                self.traffic.delivered.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn take(&mut self, packet: &[u8], to_second: bool) {
        let Some(link) = client_of(packet, to_second) else { return };
        let Some(profile) = self.profiles.get(link).or(self.profiles.last()).copied() else { return };
        let now = Instant::now();
        if self.random.chance(profile.loss_ppm) {
            self.traffic.lost.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let free = self.busy_until.entry((link.min(self.profiles.len() - 1), to_second)).or_insert(now);
        let begins = (*free).max(now);
        let waiting =
            begins.saturating_duration_since(now).as_secs_f64() * profile.rate_bits_per_s as f64 / 8.0;
        if waiting > profile.queue_bytes as f64 || self.due.len() >= MOST_PACKETS {
            self.traffic.overflowed.fetch_add(1, Ordering::Relaxed);
            return;
        }
        *free = begins + Duration::from_secs_f64(packet.len() as f64 * 8.0 / profile.rate_bits_per_s as f64);
        let mut at = *free + profile.delay;
        if self.random.chance(profile.reorder_ppm) {
            at += profile.delay / 4;
        }
        let copies = 1 + usize::from(self.random.chance(profile.duplicate_ppm));
        for _ in 0..copies {
            self.sequence += 1;
            let due = Due { at, sequence: self.sequence, to_second, packet: packet.to_vec() };
            self.due.push(Reverse(due));
        }
    }
}

/// The link that a packet goes over: what the client's IPv4 address says in its last two bytes, from 2 on.
fn client_of(packet: &[u8], from_client: bool) -> Option<usize> {
    let at = if from_client { 12 } else { 16 };
    let address = packet.get(at..at + 4).filter(|_| packet[0] >> 4 == 4)?;
    usize::from(u16::from_be_bytes([address[2], address[3]])).checked_sub(2)
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
        packet[0] = 0x60;
        assert_eq!(client_of(&packet, true), None);
    }

    #[test]
    fn chances_are_taken_as_often_as_they_should() {
        let mut random = Random::new(1);
        let taken = (0..100_000).filter(|_| random.chance(50_000)).count();
        assert!((4_700..5_300).contains(&taken), "{taken}");
        assert!(!random.chance(0));
    }
}
