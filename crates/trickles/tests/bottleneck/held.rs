//! Paths that hold what comes and deliver it together.

use crate::support::way::{Rate, Way};
use crate::{Setting, paper, rates};
use std::time::Duration;

/// A path that holds what comes and delivers it together: radio that aggregates frames, a mobile network's scheduler, a
/// virtual machine that waits for its time slice.
#[derive(Clone, Copy)]
struct Held {
    mbit: u64,
    round_trip_ms: u64,
    period_ms: u64,
    up: bool,
    down: bool,
    /// In thousandths, on the way down.
    loss: u64,
}

impl Held {
    /// The queue holds what arrives in a round trip, or in a period if that is longer.
    fn setting(&self) -> Setting {
        let delay = Duration::from_millis(self.round_trip_ms) / 2;
        let queue_bytes = self.mbit * 125 * self.round_trip_ms.max(self.period_ms);
        let way = Way { delay, rate: Some(Rate::of(self.mbit * 1_000_000, queue_bytes)), ..Way::default() };
        let held = |held: bool| held.then(|| Duration::from_millis(self.period_ms));
        let up = Way { gathered: held(self.up), ..way };
        let down = Way { gathered: held(self.down), loss: self.loss, ..way };
        Setting { object: 1_000_000_000, round_trip: 2 * delay, ways: Some((up, down)), ..paper() }
    }

    /// Mbit/s of one flow alone in the first seconds, and of Reno's.
    fn rates(&self) -> (f64, f64) {
        let of = |setting| rates(setting, 0, 4000);
        let (ours, _) = of(Setting { trickles: 1, ..self.setting() });
        let (_, tcp) = of(Setting { tcp: 1, ..self.setting() });
        let Self { mbit, round_trip_ms, period_ms, up, down, loss } = self;
        let ways = ["", "up", "down", "both ways"][usize::from(*up) + 2 * usize::from(*down)];
        println!(
            "{mbit} Mbit/s, {round_trip_ms} ms, held for {period_ms} ms {ways}, {loss} in 1000 lost: \
             {ours:.2}, Reno {tcp:.2}, {:.2}",
            ours / tcp
        );
        (ours, tcp)
    }
}

/// Round trips longer than the shortest look like a queue, and what comes at once like a full path. Where slow start
/// ended with that, a flow had a window of 20 packets, and a tenth to a third of what Reno gets.
#[test]
fn a_path_that_holds_packets_and_delivers_them_together_is_filled() {
    let up = Held { mbit: 50, round_trip_ms: 50, period_ms: 10, up: true, down: false, loss: 0 };
    let fast = Held { mbit: 100, round_trip_ms: 40, period_ms: 20, ..up };
    let near = Held { round_trip_ms: 10, period_ms: 30, ..fast };
    let (down, both) = (Held { up: false, down: true, ..fast }, Held { down: true, ..fast });
    for (path, at_least) in [
        (up, 0.95),
        (Held { period_ms: 20, ..up }, 0.95),
        (Held { loss: 1, ..up }, 0.6),
        (fast, 0.6),
        (down, 0.6),
        (Held { period_ms: 30, ..down }, 0.6),
        (Held { loss: 1, ..down }, 0.6),
        (both, 0.5),
        (near, 0.9),
        (Held { down: true, ..near }, 0.9),
        (Held { mbit: 50, round_trip_ms: 20, period_ms: 30, ..both }, 0.6),
    ] {
        let (ours, tcp) = path.rates();
        assert!(ours >= at_least * tcp, "{ours} Mbit/s, Reno {tcp}");
    }
}
