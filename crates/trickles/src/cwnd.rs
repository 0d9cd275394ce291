//! TCP Reno's congestion window as a function of the number of packets acknowledged (Trickles §2.5, Figure 5).
//!
//! A server without state cannot step a TCP state machine; it computes where the machine would be. Between two loss
//! events the window depends on nothing but how many packets were acknowledged since the first of them: one packet
//! more for each acknowledgement below the slow start threshold, one more for each full window at and above it
//! (RFC 5681 §3.1, counted in packets as RFC 3465 counts bytes, so that delayed acknowledgements do not slow it down).
//!
//! Figure 5 of the paper as printed does not agree with that machine in congestion avoidance: with N = k − A its
//! F(N) + 1 + ssthresh starts at about twice the threshold, and even F(N) + 1 grows one acknowledgement late. The
//! window c at N is the largest c with c(c−1)/2 − s(s−1)/2 ≤ N, s being the threshold, and that is what stands
//! here; the tests prove it equal to the machine.

/// Largest window in packets; also the threshold of a connection that has lost nothing yet.
pub const MAX_WINDOW: u16 = 32_767;
/// Largest window in packets of a connection's first flight.
pub const MAX_INITIAL_WINDOW: u16 = 64;

/// The window in packets after `acknowledged` packets of an era that began with the window `start` and the slow start
/// threshold `ssthresh`. Monotonic in `acknowledged`, at most [`MAX_WINDOW`].
#[must_use]
pub fn tcp_cwnd(start: u16, ssthresh: u16, acknowledged: u64) -> u16 {
    let (start, ssthresh) = (u64::from(start), u64::from(ssthresh));
    let slow_start = ssthresh.saturating_sub(start);
    let window = if acknowledged < slow_start {
        start + acknowledged
    } else {
        avoidance(ssthresh.max(start), acknowledged - slow_start)
    };
    u16::try_from(window).unwrap_or(MAX_WINDOW).min(MAX_WINDOW)
}

/// Largest c ≥ `s` with s + (s+1) + … + (c−1) ≤ `n`: growing from i to i+1 takes i acknowledgements.
fn avoidance(s: u64, n: u64) -> u64 {
    let max = u64::from(MAX_WINDOW);
    if n >= max * max {
        return max;
    }
    if s == 0 {
        return 0; // A window of nothing is never acknowledged.
    }
    // c(c−1) ≤ t  ⟺  c ≤ (1 + √(1+4t)) / 2, exact with the integer root because both sides are integers.
    let twice = s * (s - 1) + 2 * n;
    u64::midpoint(1, (1 + 4 * twice).isqrt())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// RFC 5681 §3.1 one acknowledgement at a time.
    struct Reno {
        cwnd: u64,
        ssthresh: u64,
        since_growth: u64,
    }

    impl Reno {
        fn acknowledge(&mut self) {
            if self.cwnd < self.ssthresh {
                self.cwnd += 1;
                return;
            }
            self.since_growth += 1;
            if self.since_growth == self.cwnd {
                self.cwnd += 1;
                self.since_growth = 0;
            }
        }
    }

    fn agrees(start: u16, ssthresh: u16, upto: u64) {
        let mut reno = Reno { cwnd: start.into(), ssthresh: ssthresh.into(), since_growth: 0 };
        for k in 0..=upto {
            let capped = reno.cwnd.min(u64::from(MAX_WINDOW)) as u16;
            assert_eq!(tcp_cwnd(start, ssthresh, k), capped, "start {start}, ssthresh {ssthresh}, k {k}");
            reno.acknowledge();
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn the_closed_form_is_reno_for_every_k_to_100_000(
            start in prop_oneof![1..=16_u16, 1..=MAX_WINDOW],
            ssthresh in prop_oneof![2..=64_u16, 2..=2000_u16, 2..=MAX_WINDOW],
        ) {
            agrees(start, ssthresh, 100_000);
        }

        #[test]
        fn a_far_acknowledgement_stays_within_bounds(start: u16, ssthresh: u16, k: u64) {
            let window = tcp_cwnd(start, ssthresh, k);
            prop_assert!(window <= MAX_WINDOW);
            prop_assert!(tcp_cwnd(start, ssthresh, k.saturating_add(1)) >= window);
        }
    }

    #[test]
    fn the_smallest_and_largest_parameters_are_reno_too() {
        for (start, ssthresh) in [(1, 1), (1, 2), (2, 2), (2, 1), (MAX_WINDOW, MAX_WINDOW), (1, MAX_WINDOW)] {
            agrees(start, ssthresh, 100_000);
        }
    }
}
