//! How long requests take: a histogram for each way in which they are answered.

use std::time::Duration;

use tidegate_core::metrics::Counter;

/// The upper bounds of the buckets in microseconds; what takes longer is in one more bucket.
const BOUNDS_US: [u64; 16] = [
    100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000,
    2_500_000, 5_000_000, 10_000_000,
];
/// The ways in which requests are answered.
const SOURCES: [&str; 7] = ["hit", "stale", "revalidated", "miss", "pass", "file", "none"];

/// One data core's histograms. The core is the only writer.
#[derive(Default)]
pub(crate) struct Latencies([Row; SOURCES.len()]);

#[derive(Default)]
struct Row {
    buckets: [Counter; BOUNDS_US.len() + 1],
    sum_us: Counter,
}

/// How long the requests took that were answered in one way, from the head's end to the response's.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Histogram {
    /// `hit`, `stale`, `revalidated`, `miss`, `pass` (never from the cache, such as POST), `file` (too large for the
    /// cache) or `none` (answered by tidegate itself).
    pub source: &'static str,
    /// For each bucket its upper bound in microseconds, `None` for the last, and the requests that took at most that
    /// long.
    pub at_most: Vec<(Option<u64>, u64)>,
    /// The times of all of them, in microseconds.
    pub sum_us: u64,
}

impl Latencies {
    /// Counts a request by the word that the access log has for the cache's part in it.
    #[inline]
    pub(crate) fn count(&self, cache: &str, took: Duration) {
        let row = &self.0[source(cache)];
        let took_us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        row.buckets[BOUNDS_US.partition_point(|bound| *bound < took_us)].add(1);
        row.sum_us.add(took_us);
    }

    /// The sums over all cores.
    pub(crate) fn sum<'l>(cores: impl Iterator<Item = &'l Self> + Clone) -> Vec<Histogram> {
        let histogram = |index: usize| {
            let rows = || cores.clone().map(|core| &core.0[index]);
            let mut so_far = 0;
            let bounds = BOUNDS_US.iter().copied().map(Some).chain([None]);
            let at_most = bounds.enumerate().map(|(bucket, bound)| {
                so_far += rows().map(|row| row.buckets[bucket].get()).sum::<u64>();
                (bound, so_far)
            });
            Histogram {
                source: SOURCES[index],
                at_most: at_most.collect(),
                sum_us: rows().map(|row| row.sum_us.get()).fold(0, u64::wrapping_add),
            }
        };
        (0..SOURCES.len()).map(histogram).collect()
    }
}

fn source(cache: &str) -> usize {
    match cache {
        "hit" => 0,
        "stale" => 1,
        "revalidated" => 2,
        "method" | "bypass" | "tunnel" => 4,
        "file" => 5,
        "none" => 6,
        _ => 3,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_two_cores_are_in_one_histogram_each_in_the_buckets_from_its_time_on() {
        let cores = [Latencies::default(), Latencies::default()];
        cores[0].count("hit", Duration::from_micros(7));
        cores[1].count("hit", Duration::from_micros(100));
        cores[1].count("hit", Duration::from_micros(101));
        cores[0].count("uri-miss", Duration::from_secs(60));
        let histograms = Latencies::sum(cores.iter());
        let of = |source: &str| histograms.iter().find(|histogram| histogram.source == source).unwrap();
        assert_eq!(of("hit").at_most[..2], [(Some(100), 2), (Some(250), 3)]);
        assert_eq!((of("hit").at_most.last(), of("hit").sum_us), (Some(&(None, 3)), 208));
        assert_eq!(of("miss").at_most[15..], [(Some(10_000_000), 0), (None, 1)]);
        assert_eq!(of("none").at_most.last(), Some(&(None, 0)));
    }
}
