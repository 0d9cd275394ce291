//! One way of a simulated path, and what may happen to packets on it.

use super::Random;
use std::time::Duration;

/// Of 1000 packets of a burst so many are lost.
const BURST_LOSS: u64 = 700;
const BITS: f64 = 8.0;

/// What a way is like; chances in thousandths. By default it carries everything at once.
#[derive(Clone, Copy, Debug, Default)]
pub struct Way {
    pub delay: Duration,
    /// Up to so much more by chance, so that packets overtake each other.
    pub jitter: Duration,
    pub rate: Option<Rate>,
    pub loss: u64,
    pub bursts: Option<Bursts>,
    /// Of so many packets the last one is lost.
    pub periodic: Option<u64>,
    /// Packets that are lost by their place: from the first, counted from 0, as many as the second.
    pub lost: (u64, u64),
    pub dark: Option<Dark>,
    /// Come up to a round trip late, after several later ones, or by as much as this.
    pub late: u64,
    pub late_by: Option<Duration>,
    pub duplication: u64,
    /// How many more come of each that is duplicated, beyond the second; each may be as late as any packet is.
    pub storm: u64,
    /// What damage does is the caller's to say.
    pub damage: u64,
    pub longest: Option<Longest>,
    pub uneven: Option<Uneven>,
    pub detour: Option<Detour>,
    /// What comes within a period so long is delivered at its end, together: radio that aggregates frames, a mobile
    /// network's scheduler, or a virtual machine on the way that waits for its time slice.
    pub gathered: Option<Duration>,
}

/// Longer packets vanish, from some time on: for good, or in turns of so long.
#[derive(Clone, Copy, Debug)]
pub struct Longest {
    pub from: Duration,
    pub bytes: u64,
    pub turns: Option<Duration>,
}

impl Longest {
    pub fn from(from: Duration, bytes: u64) -> Self {
        Self { from, bytes, turns: None }
    }

    fn drops(&self, bytes: u64, now: Duration) -> bool {
        bytes > self.bytes && now.checked_sub(self.from).is_some_and(|since| !is_odd_turn(since, self.turns))
    }
}

/// Chances of loss that depend on length: of packets that are longer than so many bytes, and of all others.
#[derive(Clone, Copy, Debug)]
pub struct Uneven {
    pub bytes: u64,
    pub longer: u64,
    pub shorter: u64,
}

/// Another route that takes so much longer, in turns with the first one.
#[derive(Clone, Copy, Debug)]
pub struct Detour {
    pub more: Duration,
    pub turns: Duration,
}

/// Whether time falls into the second, fourth, … of turns of this length.
fn is_odd_turn(since: Duration, turns: Option<Duration>) -> bool {
    turns.is_some_and(|turns| !(since.as_nanos() / turns.as_nanos().max(1)).is_multiple_of(2))
}

/// A link of the way.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    pub bits_per_s: u64,
    /// What waits for it at most.
    pub queue_bytes: u64,
    /// Another rate takes the place of the first one for so long, then the first one again, and so on.
    pub other: Option<(u64, Duration)>,
}

/// Bursts of losses (Gilbert and Elliott): chances that one begins and that it ends with a packet; most packets of a
/// burst are lost.
#[derive(Clone, Copy, Debug)]
pub struct Bursts {
    pub begins: u64,
    pub ends: u64,
}

/// From some time on nothing passes for so long, and again after every so much time.
#[derive(Clone, Copy, Debug)]
pub struct Dark {
    pub from: Duration,
    pub lasts: Duration,
    pub every: Duration,
}

impl Dark {
    fn covers(&self, now: Duration) -> bool {
        now.checked_sub(self.from).is_some_and(|since| {
            since.as_nanos() % self.every.max(self.lasts).as_nanos().max(1) < self.lasts.as_nanos()
        })
    }
}

impl Rate {
    pub fn of(bits_per_s: u64, queue_bytes: u64) -> Self {
        Self { bits_per_s, queue_bytes, other: None }
    }

    fn at(&self, now: Duration) -> f64 {
        let first = self.bits_per_s as f64;
        self.other.map_or(
            first,
            |(other, lasts)| {
                if is_odd_turn(now, Some(lasts)) { other as f64 } else { first }
            },
        )
    }
}

/// A way with what has gone over it.
#[derive(Debug)]
pub struct Traffic {
    pub way: Way,
    in_burst: bool,
    carried: u64,
    /// Until when the link is busy.
    pub busy_until: Duration,
}

impl Traffic {
    pub fn over(way: Way) -> Self {
        Self { way, in_burst: false, carried: 0, busy_until: Duration::ZERO }
    }

    /// When a packet of `bytes` that comes to the way now arrives: each of its copies, none where it is lost.
    pub fn carry(&mut self, bytes: u64, now: Duration, random: &mut Random) -> Vec<Duration> {
        let Some(leaves) = self.pass_link(bytes, now) else { return Vec::new() };
        if self.loses(bytes, now, random) {
            return Vec::new();
        }
        let way = self.way;
        let copies = 1 + if random.chance(way.duplication) { 1 + way.storm } else { 0 };
        let detour = way.detour.filter(|detour| is_odd_turn(now, Some(detour.turns)));
        let delay = way.delay + detour.map_or(Duration::ZERO, |detour| detour.more);
        let share = |random: &mut Random, of: Duration| of.mul_f64(random.below(1000) as f64 / 1000.0);
        (0..copies)
            .map(|_| {
                let mut more = share(random, way.jitter);
                if random.chance(way.late) {
                    more += share(random, way.late_by.unwrap_or(2 * way.delay));
                }
                end_of_period(leaves + delay + more, way.gathered)
            })
            .collect()
    }

    /// When the packet has left the link; `None` where its queue is full.
    fn pass_link(&mut self, bytes: u64, now: Duration) -> Option<Duration> {
        let Some(rate) = self.way.rate else { return Some(now) };
        let begins = self.busy_until.max(now);
        let bits_per_s = rate.at(now).max(1.0);
        let waiting_bytes = (begins - now).as_secs_f64() * bits_per_s / BITS;
        if waiting_bytes > rate.queue_bytes as f64 {
            return None;
        }
        self.busy_until = begins + Duration::from_secs_f64(bytes as f64 * BITS / bits_per_s);
        Some(self.busy_until)
    }

    fn loses(&mut self, bytes: u64, now: Duration, random: &mut Random) -> bool {
        let way = self.way;
        let place = self.carried;
        self.carried += 1;
        if let Some(bursts) = way.bursts {
            self.in_burst ^= random.chance(if self.in_burst { bursts.ends } else { bursts.begins });
        }
        (self.in_burst && random.chance(BURST_LOSS))
            || random.chance(way.loss)
            || way.periodic.is_some_and(|period| place % period == period - 1)
            || (way.lost.0..way.lost.0 + way.lost.1).contains(&place)
            || way.dark.is_some_and(|dark| dark.covers(now))
            || way.longest.is_some_and(|longest| longest.drops(bytes, now))
            || way.uneven.is_some_and(|uneven| {
                random.chance(if bytes > uneven.bytes { uneven.longer } else { uneven.shorter })
            })
    }
}

/// The end of the period that a time falls into.
pub fn end_of_period(at: Duration, period: Option<Duration>) -> Duration {
    let period = period.map_or(1, |period| period.as_nanos().max(1));
    Duration::from_nanos((at.as_nanos().div_ceil(period) * period) as u64)
}

/// Paths with one kind of fault each, made of a path without: a name, the way up and the way down.
pub fn patterns(clean: Way) -> Vec<(&'static str, Way, Way)> {
    let ms = Duration::from_millis;
    let with = |change: &dyn Fn(&mut Way)| {
        let mut way = clean;
        change(&mut way);
        way
    };
    let lossy = with(&|way| way.loss = 20);
    let heavy = |loss| with(&|way| way.loss = loss);
    let bursts = with(&|way| way.bursts = Some(Bursts { begins: 10, ends: 125 }));
    let long_bursts = with(&|way| way.bursts = Some(Bursts { begins: 5, ends: 20 }));
    let every = |period| with(&|way| way.periodic = Some(period));
    let without = |from, count| with(&|way| way.lost = (from, count));
    let dark = |from, lasts, every| {
        with(&|way| way.dark = Some(Dark { from: ms(from), lasts: ms(lasts), every: ms(every) }))
    };
    let late = with(&|way| way.late = 100);
    let seconds_late = with(&|way| (way.late, way.late_by) = (100, Some(ms(3000))));
    let storm =
        with(&|way| (way.duplication, way.storm, way.late, way.late_by) = (50, 20, 100, Some(ms(2000))));
    let uneven = |longer, shorter| with(&|way| way.uneven = Some(Uneven { bytes: 600, longer, shorter }));
    let detour = with(&|way| way.detour = Some(Detour { more: ms(400), turns: ms(300) }));
    let jittery = with(&|way| way.jitter = 2 * way.delay);
    let twice = with(&|way| way.duplication = 1000);
    let damaged = with(&|way| way.damage = 20);
    let changing = with(&|way| {
        way.rate = way.rate.map(|rate| Rate { other: Some((rate.bits_per_s / 10, ms(300))), ..rate });
    });
    let narrow = with(&|way| {
        way.rate = way.rate.map(|rate| Rate::of(rate.bits_per_s / 40, rate.queue_bytes / 4));
    });
    let far = with(&|way| way.delay *= 4);
    let short = |from| with(&|way| way.longest = Some(Longest::from(ms(from), 1300)));
    let at_times = with(&|way| {
        way.longest = Some(Longest { turns: Some(ms(2000)), ..Longest::from(ms(200), 1300) });
    });
    vec![
        ("clean", clean, clean),
        ("2 % lost", lossy, lossy),
        ("2 % lost up", lossy, clean),
        ("2 % lost down", clean, lossy),
        ("30 % lost up", heavy(300), clean),
        ("30 % lost down", clean, heavy(300)),
        ("40 % lost up, 20 % down", heavy(400), heavy(200)),
        ("30 % of long packets lost", uneven(300, 0), uneven(300, 0)),
        ("30 % of short packets lost", uneven(0, 300), uneven(0, 300)),
        ("bursts", bursts, bursts),
        ("long bursts", long_bursts, long_bursts),
        ("every 2nd lost up", every(2), clean),
        ("every 3rd lost down", clean, every(3)),
        ("every 2nd lost down", clean, every(2)),
        ("every 2nd lost", every(2), every(2)),
        ("every 4th lost up, 3rd down", every(4), every(3)),
        ("every 50th lost", every(50), every(50)),
        ("first two lost up", without(0, 2), clean),
        ("first four lost down", clean, without(0, 4)),
        ("twenty in a row lost down", clean, without(100, 20)),
        ("dark up", dark(200, 2000, 6000), clean),
        ("dark down", clean, dark(200, 3000, 9000)),
        ("dark", dark(200, 5000, 15_000), dark(200, 5000, 15_000)),
        ("late", late, late),
        ("seconds late", seconds_late, seconds_late),
        ("a long way now and then", detour, detour),
        ("a long way down now and then", clean, detour),
        ("jitter of a round trip", jittery, jittery),
        ("everything twice", twice, twice),
        ("storms of copies", storm, storm),
        ("2 % damaged", damaged, damaged),
        ("a tenth of the rate now and then", changing, changing),
        ("a fortieth of the rate up", narrow, clean),
        ("a long way up", far, clean),
        ("no long packets down", clean, short(0)),
        ("no long packets", short(0), short(0)),
        ("no long packets down after a while", clean, short(200)),
        ("no long packets after a while", short(200), short(200)),
        ("no long packets at times", at_times, at_times),
        ("no long packets up at times", at_times, clean),
    ]
}
