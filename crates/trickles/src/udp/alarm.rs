//! A timer that rings on time.
//!
//! The runtime's timers count whole milliseconds, and so does its wait for the next one: they ring up to 2 ms late,
//! which is long beside the round trip of a short path. A timer descriptor (timerfd_create(2)) rings within some ten
//! microseconds, but costs a descriptor: it is there for the last milliseconds only, of the few timers that come so
//! far.

use std::future::pending;
use std::io;
use std::time::{Duration, Instant};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::sleep_until;

/// How long before its time the runtime's timer hands over.
const EARLY: Duration = Duration::from_millis(3);

/// Waits until `at`, and no longer.
pub(super) async fn on_time(at: Instant) {
    if let Some(early) = at.checked_sub(EARLY) {
        sleep_until(early.into()).await;
    }
    let exact = async {
        // Out of descriptors, for one: the runtime's timer rings a little later.
        if let Err(error) = descriptor(at).await {
            tracing::trace!(%error, "a timer may be late");
            pending::<()>().await;
        }
    };
    tokio::select! {
        () = exact => {}
        // Also where the runtime's clock is not the system's, as in tests with a clock that is set by hand.
        () = sleep_until(at.into()) => {}
    }
}

async fn descriptor(at: Instant) -> io::Result<()> {
    let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
    let clock = timerfd_create(TimerfdClockId::Monotonic, flags)?;
    // Zero would switch the timer off.
    let left = at.saturating_duration_since(super::connection::now()).max(Duration::from_nanos(1));
    let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
    let none = Timespec { tv_sec: 0, tv_nsec: 0 };
    let once = Itimerspec { it_interval: none, it_value: left };
    timerfd_settime(&clock, TimerfdTimerFlags::empty(), &once)?;
    #[expect(unsafe_code, reason = "the runtime cannot know that a descriptor stays open")]
    // SAFETY: an `OwnedFd` is one and the same descriptor until it is dropped, which is here.
    let clock = unsafe { AsyncFd::register_with_interest(clock, Interest::READABLE) }?;
    clock.readable().await?.retain_ready();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn never_rings_early_with_and_without_time_left() {
        for wait in [0, 1, 2_999, 3_000, 3_700, 10_300].map(Duration::from_micros) {
            let at = Instant::now() + wait;
            on_time(at).await;
            assert!(Instant::now() >= at, "{wait:?}");
            // Not only the runtime's timer, which stands behind it.
            let at = Instant::now() + wait;
            descriptor(at).await.unwrap();
            assert!(Instant::now() >= at, "{wait:?} by the descriptor");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn rings_by_a_clock_that_is_set_by_hand() {
        let (began, real) = (tokio::time::Instant::now(), Instant::now());
        on_time((began + Duration::from_secs(3600)).into_std()).await;
        assert!(began.elapsed() >= Duration::from_secs(3600));
        assert!(real.elapsed() < Duration::from_secs(600), "nobody waited for an hour");
    }
}
