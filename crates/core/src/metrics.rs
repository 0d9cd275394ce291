//! Counters that one core writes and any thread may read.
//!
//! A data core owns one set and is its only writer, so an increment is a plain load and store, not a locked
//! instruction; a scrape sums the sets of all cores.

use std::sync::atomic::{AtomicU64, Ordering};

/// A counter with one writer and any number of readers.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`. Only the core that owns the counter may call this; two writers would lose increments.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    /// Subtracts `n`: for gauges such as open connections.
    #[inline]
    pub fn sub(&self, n: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_sub(n), Ordering::Relaxed);
    }

    /// Sets the value: for gauges of what is counted elsewhere.
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// The value as last written.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Whether a metric only grows.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
}

/// One metric's declaration and its value at the time of a scrape.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// The metric's name without the `tidegate_` prefix.
    pub name: &'static str,
    /// One sentence for people.
    pub help: &'static str,
    /// Counter or gauge.
    pub kind: Kind,
    /// The value in the unit that ends the name.
    pub value: u64,
}

/// Declares a set of per-core metrics: a struct of [`Counter`]s with `samples()`, each metric with its help text.
#[macro_export]
macro_rules! metric_set {
    ($(#[$meta:meta])* $vis:vis struct $set:ident { $($kind:ident $field:ident: $help:literal,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Default)]
        $vis struct $set { $(#[doc = $help] pub $field: $crate::metrics::Counter,)* }

        impl $set {
            /// Every metric of the set in the order of its declaration.
            $vis fn samples(&self) -> Vec<$crate::metrics::Sample> {
                vec![$($crate::metrics::Sample {
                    name: stringify!($field),
                    help: $help,
                    kind: $crate::metrics::Kind::$kind,
                    value: self.$field.get(),
                },)*]
            }
        }
    };
}

#[cfg(test)]
mod tests {
    metric_set! {
        /// Two metrics.
        struct Pair {
            Counter seen_total: "Things seen.",
            Gauge open: "Things open.",
        }
    }

    #[test]
    fn a_set_lists_its_metrics_in_order() {
        let pair = Pair::default();
        pair.seen_total.add(3);
        pair.open.add(2);
        pair.open.sub(1);
        let samples = pair.samples();
        assert_eq!(
            samples.iter().map(|s| (s.name, s.value)).collect::<Vec<_>>(),
            [("seen_total", 3), ("open", 1)]
        );
        assert_eq!(samples[1].kind, crate::metrics::Kind::Gauge);
        assert_eq!(samples[0].help, "Things seen.");
    }
}
