//! CUBIC's congestion window (RFC 9438) in the discipline of [`crate::cwnd`]: a function of the packets acknowledged.
//!
//! CUBIC's window is a function of the time since the last loss. A server without state has no clock of the connection,
//! but acknowledgements are one: in a round trip as many arrive as the window has packets. So with W(t) as window and R
//! as round-trip time, N(t) = ∫ W/R packets are acknowledged by time t after the loss, and the window after n packets
//! is W(N⁻¹(n)). W is the larger of two polynomials (RFC 9438 §4.2 and §4.3), whose integrals are known in closed
//! form; N grows, and is inverted by bisection. R is that of the era's start, and stays: client and servers compute the
//! same.
//!
//! Only the four basic operations and the square root of IEEE 754 are used, which round alike everywhere.

use crate::cwnd::MAX_WINDOW;

/// RFC 9438 §5: C in packets per cubic second.
const C: f64 = 0.4;
/// RFC 9438 §4.6: what is left of the window after a loss.
const BETA: f64 = 0.7;
/// RFC 9438 §4.3: packets a round trip by which Reno would have to grow, with that β, to get the same on average.
const ALPHA: f64 = 3.0 * (1.0 - BETA) / (1.0 + BETA);
/// Codes of round-trip times.
pub const RTT_CODES: u8 = 32;
/// Steps of the bisection: more bits than windows and packet numbers have.
const STEPS: usize = 52;

/// What an era of CUBIC has besides base, start and threshold.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Cubic {
    /// The round-trip time at its start, see [`rtt_s`].
    pub rtt: u8,
    /// Whether the loss before it came below the window of the one before that, so that others need room: fast
    /// convergence (RFC 9438 §4.7).
    pub fast: bool,
}

/// The round-trip time of a code in seconds: 0.25 ms · √2^code, to 11 s.
#[must_use]
pub fn rtt_s(code: u8) -> f64 {
    let code = code.min(RTT_CODES - 1);
    let octave = f64::from(1_u32 << (code / 2)) * 0.000_25;
    if code % 2 == 1 { octave * std::f64::consts::SQRT_2 } else { octave }
}

/// The code of the longest round-trip time that is not above `us` microseconds.
#[must_use]
pub fn rtt_code(us: u32) -> u8 {
    let seconds = f64::from(us) / 1e6;
    (0..RTT_CODES).rev().find(|&code| rtt_s(code) <= seconds).unwrap_or(0)
}

/// The threshold after a loss with `window` packets in flight (RFC 9438 §4.6).
#[must_use]
pub fn threshold(window: u64) -> u64 {
    window * 7 / 10
}

impl Cubic {
    /// The era after a loss with `window` packets in flight, this one having begun avoidance at `from`.
    #[must_use]
    pub fn after_loss(&self, from: u16, window: u64, rtt: u8) -> Self {
        // An era that never left slow start has no plateau to compare with.
        let fast = from < MAX_WINDOW && (window as f64) < self.plateau(f64::from(from));
        Self { rtt: rtt.min(RTT_CODES - 1), fast }
    }

    /// `W_max` of avoidance that begins with the window `from`.
    fn plateau(&self, from: f64) -> f64 {
        if self.fast { from / BETA * (1.0 + BETA) / 2.0 } else { from / BETA }
    }

    /// The window after `acknowledged` packets of an era that began with `start` and `ssthresh`; slow start as of
    /// [`crate::cwnd::tcp_cwnd`].
    #[must_use]
    pub fn cwnd(&self, start: u16, ssthresh: u16, acknowledged: u64) -> u16 {
        let slow_start = u64::from(ssthresh.saturating_sub(start));
        if acknowledged < slow_start {
            return (u64::from(start) + acknowledged).min(MAX_WINDOW.into()) as u16;
        }
        let from = ssthresh.max(start).min(MAX_WINDOW);
        self.avoidance(from, acknowledged - slow_start)
    }

    fn avoidance(&self, from: u16, n: u64) -> u16 {
        if from == 0 {
            return 0;
        }
        let n = n.min(1 << 40) as f64;
        let curve = Curve::new(f64::from(from), self.plateau(f64::from(from)), rtt_s(self.rtt));
        // RFC 9438 §4.4: half as much again in a round trip at most.
        let most = f64::from(from) + n / 2.0;
        (curve.window_after(n).min(most) as u64).clamp(from.into(), MAX_WINDOW.into()) as u16
    }
}

/// W(t), and its integral.
struct Curve {
    from: f64,
    plateau: f64,
    k: f64,
    rtt: f64,
    /// Where Reno's line is above the cubic: RFC 9438 §4.3.
    friendly: (f64, f64),
}

impl Curve {
    fn new(from: f64, plateau: f64, rtt: f64) -> Self {
        let k = cube_root((plateau - from) / C);
        // cubic − line = t · (C·t² − 3·C·K·t + 3·C·K² − α/R): the line is above it between the roots.
        let discriminant = 4.0 * C * ALPHA / rtt - 3.0 * C * C * k * k;
        let friendly = if discriminant > 0.0 {
            let half = discriminant.sqrt();
            (((3.0 * C * k - half) / (2.0 * C)).max(0.0), (3.0 * C * k + half) / (2.0 * C))
        } else {
            (0.0, 0.0)
        };
        Self { from, plateau, k, rtt, friendly }
    }

    fn window(&self, t: f64) -> f64 {
        let d = t - self.k;
        (C * d * d * d + self.plateau).max(self.from + ALPHA * t / self.rtt)
    }

    /// ∫ of the cubic from 0 to `t`.
    fn cubic(&self, t: f64) -> f64 {
        let (d, k) = (t - self.k, self.k);
        C / 4.0 * (d * d * d * d - k * k * k * k) + self.plateau * t
    }

    /// ∫ of Reno's line from 0 to `t`.
    fn line(&self, t: f64) -> f64 {
        self.from * t + ALPHA * t * t / (2.0 * self.rtt)
    }

    /// Packets acknowledged by `t`.
    fn acknowledged(&self, t: f64) -> f64 {
        let (a, b) = (t.min(self.friendly.0), t.min(self.friendly.1));
        (self.cubic(a) + self.line(b) - self.line(a) + self.cubic(t) - self.cubic(b)) / self.rtt
    }

    fn window_after(&self, n: f64) -> f64 {
        // The window is never below its start.
        let (mut low, mut high) = (0.0, n * self.rtt / self.from);
        for _ in 0..STEPS {
            let middle = (low + high) / 2.0;
            if self.acknowledged(middle) <= n {
                low = middle;
            } else {
                high = middle;
            }
        }
        self.window(low)
    }
}

/// Newton's method with a fixed number of steps; enough for 0 to 10⁶.
fn cube_root(y: f64) -> f64 {
    if y <= 0.0 {
        return 0.0;
    }
    let mut x = y.max(1.0);
    for _ in 0..48 {
        x = (2.0 * x + y / (x * x)) / 3.0;
    }
    x
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// RFC 9438 one acknowledgement at a time: time passes by the window's share of a round trip.
    struct Machine {
        cwnd: f64,
        estimate: f64,
        t: f64,
        k: f64,
        plateau: f64,
        rtt: f64,
        from: f64,
        n: f64,
    }

    impl Machine {
        fn acknowledge(&mut self) {
            // The window grows within the acknowledgement's own time: what counts is that of the middle of the step
            // (the midpoint method), as windows of a few packets grow by a quarter in one.
            let middle = self.after(0.5 / self.cwnd).2;
            (self.t, self.estimate, self.cwnd) = self.after(1.0 / middle);
            self.n += 1.0;
        }

        /// Time, Reno's estimate and the window, `share` of a round trip later.
        fn after(&self, share: f64) -> (f64, f64, f64) {
            let (t, estimate) = (self.t + share * self.rtt, self.estimate + share * ALPHA);
            (t, estimate, estimate.max(C * (t - self.k).powi(3) + self.plateau))
        }

        fn window(&self) -> f64 {
            self.cwnd.min(self.from + self.n / 2.0).min(MAX_WINDOW.into())
        }
    }

    fn agrees(cubic: Cubic, start: u16, ssthresh: u16, upto: u64) -> Result<(), TestCaseError> {
        let from = f64::from(start.max(ssthresh));
        let plateau = cubic.plateau(from);
        let k = ((plateau - from) / C).cbrt();
        let rtt = rtt_s(cubic.rtt);
        let mut machine = Machine { cwnd: from, estimate: from, t: 0.0, k, plateau, rtt, from, n: 0.0 };
        let slow = u64::from(ssthresh.saturating_sub(start));
        let mut last = 0;
        for n in 0..upto {
            let window = cubic.cwnd(start, ssthresh, n);
            prop_assert!(window >= last, "it never shrinks");
            last = window;
            if n < slow {
                prop_assert_eq!(u64::from(window), (u64::from(start) + n).min(MAX_WINDOW.into()));
                continue;
            }
            let expected = machine.window();
            prop_assert!(
                (f64::from(window) - expected).abs() <= 1.0 + expected / 1000.0,
                "{cubic:?} from {from} after {n}: {window}, the machine has {expected}"
            );
            machine.acknowledge();
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn the_closed_form_is_cubic_step_by_step(
            start in prop_oneof![2..=16_u16, 2..=4000_u16],
            ssthresh in 2..=4000_u16,
            rtt in 0..RTT_CODES,
            fast: bool,
        ) {
            agrees(Cubic { rtt, fast }, start, ssthresh, 20_000)?;
        }

        #[test]
        fn a_far_acknowledgement_stays_within_bounds(start: u16, ssthresh: u16, rtt: u8, fast: bool, k: u64) {
            let cubic = Cubic { rtt, fast };
            let window = cubic.cwnd(start, ssthresh, k);
            prop_assert!(window <= MAX_WINDOW);
            prop_assert!(cubic.cwnd(start, ssthresh, k.saturating_add(1)) >= window);
        }
    }

    #[test]
    fn windows_of_a_few_packets_agree_at_every_round_trip_time() -> Result<(), TestCaseError> {
        for (rtt, start) in (0..RTT_CODES).flat_map(|rtt| (2..=8).map(move |start| (rtt, start))) {
            for fast in [false, true] {
                agrees(Cubic { rtt, fast }, start, start, 500)?;
            }
        }
        Ok(())
    }

    #[test]
    fn a_long_fat_pipe_is_filled_sooner_than_by_reno() {
        // 1 Gbit/s at 100 ms: 8,333 packets; after a loss there Reno needs 4,166 round trips to return.
        let threshold = threshold(8333) as u16;
        let cubic = Cubic { rtt: rtt_code(100_000), fast: false };
        let packets = (0..).step_by(1000).find(|&n| cubic.cwnd(threshold, threshold, n) >= 8300).unwrap();
        let reno = (0..).step_by(1000).find(|&n| crate::cwnd::tcp_cwnd(4166, 4166, n) >= 8300).unwrap();
        assert!(packets * 10 < reno, "{packets} against {reno} packets");
    }

    #[test]
    fn on_a_short_path_it_grows_as_reno_would() {
        // RFC 9438 §4.3: by α packets in a round trip, from the start on.
        let cubic = Cubic { rtt: rtt_code(1000), fast: false };
        let mut n = 0;
        for _ in 0..100 {
            n += u64::from(cubic.cwnd(100, 100, n));
        }
        let window = cubic.cwnd(100, 100, n);
        assert!((152..=154).contains(&window), "{window}");
    }

    #[test]
    fn a_loss_below_the_last_plateau_makes_room() {
        let cubic = Cubic::default().after_loss(MAX_WINDOW, 100, 3);
        assert_eq!(cubic, Cubic { rtt: 3, fast: false });
        assert!(cubic.after_loss(70, 90, 3).fast, "90 is below 100");
        assert!(!cubic.after_loss(70, 101, 3).fast);
    }

    #[test]
    fn codes_of_round_trip_times_are_in_order() {
        assert!((1..RTT_CODES).all(|code| rtt_s(code) > rtt_s(code - 1)));
        assert_eq!((rtt_code(0), rtt_code(250), rtt_code(u32::MAX)), (0, 0, RTT_CODES - 1));
        assert_eq!(rtt_code(100_000), 17);
    }
}
