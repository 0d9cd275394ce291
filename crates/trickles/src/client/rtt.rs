//! Round-trip time and retransmission timeout (RFC 6298), from timestamps that the server echoes.

use std::time::{Duration, Instant};

const MAX_RTO: Duration = Duration::from_secs(60);
/// Longest wait before an open is repeated. It is a single packet, and the path may be back long before a minute is
/// over.
const MAX_OPEN_RTO: Duration = Duration::from_secs(16);
const INITIAL_RTO: Duration = Duration::from_secs(1);
const MAX_REORDERING: Duration = Duration::from_millis(100);
const GRANULARITY: Duration = Duration::from_millis(1);

/// First samples of a round trip that must all show a queue (RFC 9406 §4.2): later ones wait for each other.
const QUEUE_SAMPLES: u32 = 8;
/// Least and greatest delay that shows one (RFC 9406 §4.2).
const QUEUE_DELAY: (Duration, Duration) = (Duration::from_millis(4), Duration::from_millis(16));

/// Packets that arrive closer together than this are one train, sent by the path as fast as it can: what
/// Linux's HyStart has.
const TRAIN_GAP: Duration = Duration::from_millis(2);

/// The path is not full where nothing comes for such a part of the shortest round trip.
const IDLE_PART: u32 = 4;

/// Estimator of one client.
#[derive(Clone, Debug)]
pub(super) struct RoundTrip {
    min_rto: Duration,
    smoothed: Option<(Duration, Duration)>,
    least: Duration,
    /// The last packet of the round trip under way, the shortest of its first samples, and how many there were.
    round: (u64, Duration, u32),
    /// When the first and the last packet of the latest train arrived.
    train: Option<(Instant, Instant)>,
    /// The same of the packets since the path was idle for the last time.
    busy: Option<(Instant, Instant)>,
}

/// Adds an arrival to packets that are at most `gap` apart.
fn join(packets: Option<(Instant, Instant)>, gap: Duration, now: Instant) -> Option<(Instant, Instant)> {
    let first = packets.filter(|(_, last)| now <= *last + gap).map_or(now, |(first, _)| first);
    Some((first, now))
}

impl RoundTrip {
    pub(super) fn new(min_rto: Duration) -> Self {
        let round = (0, Duration::MAX, 0);
        Self { min_rto, smoothed: None, least: Duration::MAX, round, train: None, busy: None }
    }

    /// A sample by packet `number`, which arrived at `now` and before whose acknowledgement packets up to `sent` were
    /// sent.
    pub(super) fn sample(&mut self, sample: Duration, number: u64, sent: u64, now: Instant) {
        if number > self.round.0 {
            self.round = (sent, Duration::MAX, 0);
        }
        if self.round.2 < QUEUE_SAMPLES {
            self.round = (self.round.0, self.round.1.min(sample), self.round.2 + 1);
        }
        self.least = self.least.min(sample);
        self.train = join(self.train, TRAIN_GAP, now);
        self.busy = join(self.busy, TRAIN_GAP.max(self.least / IDLE_PART), now);
        self.smoothed = Some(match self.smoothed {
            None => (sample, sample / 2),
            Some((srtt, rttvar)) => (srtt * 7 / 8 + sample / 8, rttvar * 3 / 4 + srtt.abs_diff(sample) / 4),
        });
    }

    /// Whether the window holds what the path does, so that slow start has done its work: by either sign of HyStart.
    pub(super) fn path_is_full(&self) -> bool {
        self.shows_a_queue() || self.train_is_long()
    }

    /// Packets wait in a queue on the way: the first samples of a round trip are all longer than the shortest ever by
    /// an eighth of it (RFC 9406 §4.2). They are so, too, where radio, or a machine that waits for its turn, holds
    /// packets to deliver them together; but then the path is idle at times. One with a queue never is, for a round
    /// trip at least.
    fn shows_a_queue(&self) -> bool {
        let delay = (self.least / 8).clamp(QUEUE_DELAY.0, QUEUE_DELAY.1);
        let busy = self.busy.is_some_and(|(first, last)| last - first >= self.round.1);
        busy && self.round.2 == QUEUE_SAMPLES && self.round.1 >= self.least + delay
    }

    /// Packets come for half a round trip as fast as the path gives them: slow start, which sends two for each, has
    /// filled it. This is seen a round trip before a queue is (Ha and Rhee, Taming the Elephants, §4.1). The round trip
    /// is one of now: where packets are held on the way, the shortest ever is of one that was not.
    fn train_is_long(&self) -> bool {
        let half = self.round.1.max(self.least) / 2;
        self.train.is_some_and(|(first, last)| last - first >= half && last - first >= TRAIN_GAP)
    }

    /// The shortest sample.
    pub(super) fn least(&self) -> Duration {
        self.least
    }

    /// RFC 6298 (2.3), before backing off.
    pub(super) fn timeout(&self) -> Duration {
        let rto = self.smoothed.map_or(INITIAL_RTO, |(srtt, rttvar)| srtt + GRANULARITY.max(rttvar * 4));
        rto.clamp(self.min_rto, MAX_RTO)
    }

    /// The timeout after `backoff` expirations in a row.
    pub(super) fn backed_off(&self, backoff: u32) -> Duration {
        (self.timeout() * (1 << backoff.min(8))).min(MAX_RTO)
    }

    /// The same of an open. Once it grows no more, `haste` of 255 takes up to a quarter off, and is to be another one
    /// each time: a path that is dark in turn could else be so at every attempt.
    pub(super) fn backed_off_open(&self, backoff: u32, haste: u8) -> Duration {
        let wait = self.backed_off(backoff);
        if wait < MAX_OPEN_RTO { wait } else { MAX_OPEN_RTO - MAX_OPEN_RTO / 4 * haste.into() / 255 }
    }

    /// How long a packet may lag behind a later one before it counts as lost (RFC 8985 §6.2: a quarter round trip).
    pub(super) fn reordering(&self) -> Duration {
        self.smoothed.map_or(MAX_REORDERING, |(srtt, _)| (srtt / 4).clamp(GRANULARITY, MAX_REORDERING))
    }

    /// How long to wait for a last packet before asking for its data again (RFC 8985 §7.2).
    pub(super) fn probe(&self, delayed_ack: Duration) -> Duration {
        self.smoothed.map_or(INITIAL_RTO, |(srtt, _)| srtt * 2 + delayed_ack)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timeout_follows_the_samples_and_backs_off() {
        let (mut round_trip, now) = (RoundTrip::new(Duration::from_millis(200)), Instant::now());
        assert_eq!(round_trip.timeout(), INITIAL_RTO);
        for _ in 0..100 {
            round_trip.sample(Duration::from_millis(400), 1, 1, now);
        }
        let rto = round_trip.timeout();
        assert!(rto > Duration::from_millis(399) && rto < Duration::from_millis(420), "{rto:?}");
        assert_eq!(round_trip.backed_off(1), rto * 2);
        assert_eq!(round_trip.backed_off(1000), MAX_RTO);
        assert_eq!(round_trip.backed_off_open(1000, 0), MAX_OPEN_RTO);
        assert_eq!(round_trip.backed_off_open(1000, 255), MAX_OPEN_RTO * 3 / 4);
        assert_eq!(round_trip.backed_off_open(1, 255), rto * 2, "doubled waits differ as they are");
        for _ in 0..100 {
            round_trip.sample(Duration::from_millis(1), 1, 1, now);
        }
        assert_eq!(round_trip.timeout(), Duration::from_millis(200), "the floor");
    }

    #[test]
    fn a_queue_shows_once_every_one_of_the_first_samples_of_a_round_is_longer() {
        let (mut round_trip, mut now) = (RoundTrip::new(Duration::from_millis(200)), Instant::now());
        let ms = Duration::from_millis;
        round_trip.sample(ms(40), 1, 20, now);
        for number in 2..=20 {
            now += ms(3);
            round_trip.sample(ms(46), number, 40, now);
        }
        assert!(!round_trip.shows_a_queue(), "the round's first was as short as ever");
        for number in 21..=28 {
            assert!(!round_trip.shows_a_queue());
            now += ms(3);
            round_trip.sample(ms(46), number, 60, now);
        }
        assert!(round_trip.shows_a_queue());
    }

    #[test]
    fn longer_round_trips_with_idle_times_in_between_are_those_of_a_path_that_holds_packets() {
        let (mut round_trip, mut now) = (RoundTrip::new(Duration::from_millis(200)), Instant::now());
        let ms = Duration::from_millis;
        round_trip.sample(ms(40), 1, 1, now);
        for round in 0..5 {
            now += ms(12);
            for number in 2 + round * 20..22 + round * 20 {
                // 38 ms pass, and then 12 without a packet.
                now += ms(2);
                round_trip.sample(ms(50), number, 21 + round * 20, now);
                assert!(!round_trip.shows_a_queue());
            }
        }
    }

    #[test]
    fn a_train_is_measured_by_a_round_trip_of_now() {
        let (mut round_trip, mut now) = (RoundTrip::new(Duration::from_millis(200)), Instant::now());
        let ms = Duration::from_millis;
        round_trip.sample(ms(10), 1, 1, now);
        for number in 2..=20 {
            now += ms(1);
            round_trip.sample(ms(40), number, 40, now);
            assert!(!round_trip.path_is_full(), "18 of 40 ms");
        }
        for number in 21..=22 {
            now += ms(1);
            round_trip.sample(ms(40), number, 40, now);
        }
        assert!(round_trip.path_is_full(), "20 of 40 ms");
    }

    #[test]
    fn a_train_of_half_a_round_trip_fills_the_path_unless_it_has_gaps() {
        let full = |gap: Duration| {
            let (mut round_trip, mut now) = (RoundTrip::new(Duration::from_millis(200)), Instant::now());
            (1..=20).any(|number| {
                round_trip.sample(Duration::from_millis(40), number, 40, now);
                now += gap;
                round_trip.path_is_full()
            })
        };
        assert!(full(Duration::from_micros(1100)), "20 ms");
        assert!(!full(Duration::from_micros(900)), "shorter");
        assert!(!full(Duration::from_millis(3)), "the path is idle in between");
    }
}
