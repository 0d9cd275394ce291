//! Keeps what happens to many requests at once from filling the log.

use std::cell::Cell;

/// Lines of one kind that a data core logs in a window of time.
const LINES: u32 = 5;
const WINDOW_MS: u64 = 10_000;

/// Counts the lines of one kind.
#[derive(Default)]
pub(crate) struct LogLimiter {
    window_end_ms: Cell<u64>,
    logged: Cell<u32>,
    kept_back: Cell<u64>,
}

impl LogLimiter {
    /// Whether there may be another line; if not, it is counted.
    pub(crate) fn may_log(&self, now_ms: u64) -> bool {
        if now_ms >= self.window_end_ms.get() {
            self.window_end_ms.set(now_ms.saturating_add(WINDOW_MS));
            self.logged.set(0);
        }
        let may_log = self.logged.get() < LINES;
        match may_log {
            true => self.logged.set(self.logged.get() + 1),
            false => self.kept_back.set(self.kept_back.get() + 1),
        }
        may_log
    }

    /// How many lines were kept back, once the window is over in which they were.
    pub(crate) fn kept_back(&self, now_ms: u64) -> Option<u64> {
        let is_over = now_ms >= self.window_end_ms.get();
        Some(self.kept_back.get()).filter(|count| *count > 0 && is_over).inspect(|_| self.kept_back.set(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_lines_a_few_are_logged_and_the_others_told_by_their_number_once() {
        let quiet = LogLimiter::default();
        let logged = |now_ms| (0..100).filter(|_| quiet.may_log(now_ms)).count();
        assert_eq!((logged(5), logged(9_000)), (5, 0));
        assert_eq!(quiet.kept_back(9_000), None, "the window is not over");
        assert_eq!((quiet.kept_back(10_005), quiet.kept_back(10_005)), (Some(195), None));
        assert_eq!(logged(10_005), 5);
        assert_eq!(quiet.kept_back(u64::MAX), Some(95));
    }
}
