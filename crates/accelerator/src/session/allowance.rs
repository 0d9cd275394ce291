//! How long a peer that has to keep up a minimum rate is still waited for.

/// What a peer may be behind at first.
const GRACE_MS: u64 = 10_000;
/// What a peer can have saved up by being faster than it had to be; the longest silence that is borne.
const MOST_MS: u64 = 60_000;

/// A bucket of time: each byte adds what it may take at the minimum rate, waiting takes out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allowance {
    /// 0: there is no minimum.
    rate_bytes_per_s: u64,
    left_ms: u64,
}

impl Allowance {
    pub(crate) fn new(rate_bytes_per_s: u64) -> Self {
        Self { rate_bytes_per_s, left_ms: GRACE_MS }
    }

    /// The peer has moved `bytes`.
    pub(crate) fn earn(&mut self, bytes: u64) {
        if let Some(earned_ms) = bytes.saturating_mul(1000).checked_div(self.rate_bytes_per_s) {
            self.left_ms = self.left_ms.saturating_add(earned_ms).min(MOST_MS);
        }
    }

    /// The peer was waited for.
    pub(crate) fn spend(&mut self, waited_ms: u64) {
        self.left_ms = self.left_ms.saturating_sub(waited_ms);
    }

    /// Milliseconds for which the peer may be waited for; `None` without a limit.
    pub(crate) fn left_ms(&self) -> Option<u64> {
        (self.rate_bytes_per_s > 0).then_some(self.left_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fast_start_buys_a_minute_of_silence_at_most() {
        let mut allowance = Allowance::new(500);
        allowance.earn(1 << 40);
        assert_eq!(allowance.left_ms(), Some(MOST_MS));
        allowance.spend(MOST_MS);
        assert_eq!(allowance.left_ms(), Some(0));
    }

    #[test]
    fn a_peer_at_the_minimum_rate_is_borne_for_ever_and_a_slower_one_is_not() {
        let lasts = |bytes_per_s: u64| {
            let mut allowance = Allowance::new(500);
            (0..3600).all(|_| {
                let waited_ms = allowance.left_ms().unwrap().min(1000);
                allowance.spend(waited_ms);
                allowance.earn(bytes_per_s * waited_ms / 1000);
                allowance.left_ms() != Some(0)
            })
        };
        assert!(lasts(500));
        assert!(!lasts(490));
    }

    #[test]
    fn without_a_rate_there_is_no_limit() {
        let mut allowance = Allowance::new(0);
        allowance.spend(u64::MAX);
        assert_eq!(allowance.left_ms(), None);
    }
}
