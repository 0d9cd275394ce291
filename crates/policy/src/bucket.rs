//! Token buckets in integer arithmetic. Those of the kernel programs round the time of a token up to a nanosecond, and
//! are the same otherwise.

/// A token is this many units, so that a rate in thousandths of a token per second is a number of units per nanosecond.
pub const TOKEN_UNITS: u64 = 1_000_000_000_000;

/// A rate and a burst: the paper's `<rate, burst>` (section 3.1).
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Profile {
    milli_rate_per_s: u64,
    burst: u32,
}

/// Why a rate or a burst cannot be enforced.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LimitError {
    /// Zero would mean "none at all", which is said by an action or the block list.
    #[error("rate {rate_per_s} is not between 0.001 and {} per second", Profile::MAX_RATE_PER_S)]
    Rate {
        /// The rate asked for.
        rate_per_s: f64,
    },
    /// A bucket that holds no token lets nothing pass.
    #[error("burst {burst} is not between 1 and {}", Profile::MAX_BURST)]
    Burst {
        /// The burst asked for.
        burst: u32,
    },
}

impl Profile {
    /// The greatest rate.
    pub const MAX_RATE_PER_S: u32 = 1_000_000;
    /// The greatest burst.
    pub const MAX_BURST: u32 = 1_000_000;

    /// A limit of `rate_per_s` tokens per second, rounded to thousandths, and at most `burst` at once.
    pub fn new(rate_per_s: f64, burst: u32) -> Result<Self, LimitError> {
        let milli = (rate_per_s * 1000.0).round();
        if !(1.0..=f64::from(Self::MAX_RATE_PER_S) * 1000.0).contains(&milli) {
            return Err(LimitError::Rate { rate_per_s });
        }
        if !(1..=Self::MAX_BURST).contains(&burst) {
            return Err(LimitError::Burst { burst });
        }
        // In range, so exact.
        Ok(Self { milli_rate_per_s: milli as u64, burst })
    }

    /// Tokens per second.
    pub fn rate_per_s(&self) -> f64 {
        self.milli_rate_per_s as f64 / 1000.0
    }

    /// The most tokens a bucket holds.
    pub fn burst(&self) -> u32 {
        self.burst
    }

    /// Units that are added per nanosecond.
    pub fn units_per_ns(&self) -> u64 {
        self.milli_rate_per_s
    }

    /// Units that a full bucket holds.
    pub fn capacity_units(&self) -> u64 {
        u64::from(self.burst) * TOKEN_UNITS
    }

    /// The time of one token, rounded up.
    pub fn token_ns(&self) -> u64 {
        TOKEN_UNITS.div_ceil(self.milli_rate_per_s)
    }

    /// The time after which an empty bucket is full.
    pub fn fill_ns(&self) -> u64 {
        self.capacity_units().div_ceil(self.milli_rate_per_s)
    }
}

/// The state of one bucket.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct TokenBucket {
    units: u64,
    last_ns: u64,
}

impl TokenBucket {
    /// A full bucket.
    pub fn full(profile: &Profile, now_ns: u64) -> Self {
        Self { units: profile.capacity_units(), last_ns: now_ns }
    }

    /// Puts back a token that was taken for nothing; a full bucket holds no more.
    pub fn give_back(&mut self, profile: &Profile) {
        self.units = (self.units + TOKEN_UNITS).min(profile.capacity_units());
    }

    /// Takes a token if there is one. Profiles may change between calls; a smaller burst takes effect at once.
    pub fn take(&mut self, profile: &Profile, now_ns: u64) -> bool {
        let elapsed_ns = now_ns.saturating_sub(self.last_ns);
        // Below `fill_ns` the product is below the capacity, so it cannot overflow.
        self.units = if elapsed_ns >= profile.fill_ns() {
            profile.capacity_units()
        } else {
            (self.units + elapsed_ns * profile.units_per_ns()).min(profile.capacity_units())
        };
        self.last_ns = self.last_ns.max(now_ns);
        let compliant = self.units >= TOKEN_UNITS;
        if compliant {
            self.units -= TOKEN_UNITS;
        }
        compliant
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND_NS: u64 = 1_000_000_000;

    #[test]
    fn full_bucket_gives_its_burst_and_then_its_rate() {
        let profile = Profile::new(10.0, 5).unwrap();
        let mut bucket = TokenBucket::full(&profile, 0);
        assert_eq!((0..20).filter(|_| bucket.take(&profile, 0)).count(), 5);
        // 2,000 attempts within 10 s: 10 per second.
        let taken = (0..2000u64).filter(|i| bucket.take(&profile, (i + 1) * SECOND_NS / 200)).count();
        assert_eq!(taken, 100);
    }

    #[test]
    fn slow_rate_is_kept_over_long_pauses() {
        let profile = Profile::new(0.01, 1).unwrap();
        let mut bucket = TokenBucket::full(&profile, 0);
        assert!(bucket.take(&profile, 0));
        assert!(!bucket.take(&profile, 50 * SECOND_NS));
        assert!(!bucket.take(&profile, 99 * SECOND_NS));
        assert!(bucket.take(&profile, 100 * SECOND_NS));
    }

    #[test]
    fn profiles_out_of_range_say_which_bound() {
        assert_eq!(Profile::new(0.0, 1), Err(LimitError::Rate { rate_per_s: 0.0 }));
        assert!(Profile::new(f64::NAN, 1).is_err());
        assert!(Profile::new(1e9, 1).is_err());
        assert_eq!(Profile::new(1.0, 0), Err(LimitError::Burst { burst: 0 }));
        assert!(Profile::new(1_000_000.0, 1_000_000).is_ok());
    }

    proptest! {
        /// Over any times, clock readings that go backwards included, never more than burst + rate × time.
        #[test]
        fn bucket_never_gives_more_than_its_profile(
            milli in 1u64..=1_000_000_000, burst in 1u32..=1_000_000,
            steps in prop::collection::vec((0u64..5 * SECOND_NS, any::<bool>()), 1..200),
        ) {
            let profile = Profile::new(milli as f64 / 1000.0, burst).unwrap();
            let mut bucket = TokenBucket::full(&profile, 0);
            let (mut now_ns, mut latest_ns, mut taken) = (0u64, 0u64, 0u128);
            for (step_ns, back) in steps {
                now_ns = if back { now_ns.saturating_sub(step_ns) } else { now_ns + step_ns };
                latest_ns = latest_ns.max(now_ns);
                taken += u128::from(bucket.take(&profile, now_ns));
                let allowed = u128::from(profile.capacity_units())
                    + u128::from(latest_ns) * u128::from(profile.units_per_ns());
                prop_assert!(taken * u128::from(TOKEN_UNITS) <= allowed);
            }
        }
    }
}
