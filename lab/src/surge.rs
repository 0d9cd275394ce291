//! Workloads after published distributions: SURGE's (Barford and Crovella, "Generating Representative Web Workloads for
//! Network and Server Performance Evaluation", 1998, Table 1) and what a trace needs beyond them.

use crate::link::Random;

/// SURGE: sizes below this are lognormal, the rest has a Pareto tail.
const TAIL_BYTES: f64 = 133_000.0;
/// SURGE: the share of files in the body of the distribution of sizes.
const BODY_SHARE: f64 = 0.93;

/// A number in 0..1, never 0.
pub fn unit(random: &mut Random) -> f64 {
    ((random.draw() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
}

/// Pareto: at least `least`, the heavier the tail the smaller `alpha`.
pub fn pareto(random: &mut Random, least: f64, alpha: f64) -> f64 {
    least * unit(random).powf(-1.0 / alpha)
}

/// Exponential with this mean.
pub fn exponential(random: &mut Random, mean: f64) -> f64 {
    -mean * unit(random).ln()
}

/// SURGE: seconds between the requests for the objects of one page.
pub fn active_off_s(random: &mut Random) -> f64 {
    // Weibull, alpha 1.46, beta 0.382.
    0.382 * (-unit(random).ln()).powf(1.0 / 1.46)
}

/// SURGE: seconds between pages.
pub fn inactive_off_s(random: &mut Random) -> f64 {
    pareto(random, 1.0, 1.5)
}

/// SURGE: objects of a page besides the page itself; bounded, because the tail of one page is not the subject.
pub fn embedded(random: &mut Random) -> usize {
    (pareto(random, 1.0, 2.43) - 1.0).min(50.0).round() as usize
}

/// SURGE: bytes of a file; the tail is cut off at `most`.
pub fn size_bytes(random: &mut Random, most: f64) -> u64 {
    let size = if unit(random) < BODY_SHARE {
        let (u, v) = (unit(random), unit(random));
        let normal = (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos();
        (9.357 + 1.318 * normal).exp().min(TAIL_BYTES)
    } else {
        pareto(random, TAIL_BYTES, 1.1)
    };
    size.clamp(1.0, most) as u64
}

/// Zipf: of `count` files the first is asked for most; an index below `count`. `cumulated` is [`popularity`]'s.
pub fn popular(random: &mut Random, cumulated: &[f64]) -> usize {
    let wanted = unit(random) * cumulated.last().copied().unwrap_or(0.0);
    cumulated.partition_point(|sum| *sum < wanted).min(cumulated.len().saturating_sub(1))
}

/// SURGE: how often each of `count` files is asked for (Zipf's law), summed up to each.
pub fn popularity(count: usize) -> Vec<f64> {
    let mut sum = 0.0;
    (1..=count)
        .map(|rank| {
            sum += 1.0 / rank as f64;
            sum
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mean(count: usize, mut draw: impl FnMut() -> f64) -> f64 {
        (0..count).map(|_| draw()).sum::<f64>() / count as f64
    }

    #[test]
    fn draws_have_the_means_of_their_distributions() {
        let mut random = Random::new(1);
        let near = |found: f64, expected: f64| assert!((found / expected - 1.0).abs() < 0.05, "{found}");
        near(mean(50_000, || exponential(&mut random, 3.0)), 3.0);
        // 0.382 times the gamma function of 1 + 1/1.46.
        near(mean(50_000, || active_off_s(&mut random)), 0.346);
        // Of a Pareto distribution with alpha 3.
        near(mean(50_000, || pareto(&mut random, 2.0, 3.0)), 3.0);
    }

    #[test]
    fn sizes_have_the_median_of_the_body_and_stay_below_their_bound() {
        let mut random = Random::new(2);
        let mut sizes: Vec<u64> = (0..20_000).map(|_| size_bytes(&mut random, 1e6)).collect();
        sizes.sort_unstable();
        // The median of all is the body's 0.5 / 0.93 quantile.
        assert!((11_000..14_500).contains(&sizes[10_000]), "{}", sizes[10_000]);
        assert!(sizes[19_999] <= 1_000_000);
    }

    #[test]
    fn the_first_file_is_asked_for_about_twice_as_often_as_the_second() {
        let (mut random, cumulated) = (Random::new(3), popularity(100));
        let mut counts = [0; 100];
        for _ in 0..100_000 {
            counts[popular(&mut random, &cumulated)] += 1;
        }
        let ratio = f64::from(counts[0]) / f64::from(counts[1]);
        assert!((1.8..2.2).contains(&ratio), "{ratio}");
        assert!(counts[99] > 0);
    }
}
