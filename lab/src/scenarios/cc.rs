//! What the scenarios of the connection conditioning paper have in common.

use crate::plot::{Point, Series};
use crate::stats::Spread;
use crate::verdict::Check;
use crate::{Error, Paper};

pub(super) static PAPER: Paper = Paper {
    name: "cc",
    title: "Connection Conditioning: Architecture-Independent Support for Simple, Robust Servers (its §4)",
    setting: "The paper's server was a PC with one slow core at the end of a gigabit network, its Apache 1.3 and its \
              filters linked with a modified library. Here the server and its whole chain are pinned to one core and \
              every client to another, joined by the loopback interface, and the servers are Debian's, unmodified: \
              `tidegate condition` is in front of them. So absolute figures are not comparable; what is compared is a \
              server with and without a chain, in the same run.\n\n\
              Requests per CPU-second are requests divided by the user and system time of all processes of the server \
              and its chain; they decide where a rate is compared, because they do not depend on which of the two \
              cores is full. Tables give the median of the rounds, and least to greatest in brackets.",
};

/// One measured figure: of which server or setting, where on the horizontal axis, in which round.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    pub(super) label: &'static str,
    pub(super) x: f64,
    pub(super) round: usize,
    pub(super) requests_per_s: f64,
    pub(super) requests_per_cpu_s: f64,
}

/// The figures of one label at one place.
pub(super) fn spread(
    samples: &[Sample],
    label: &str,
    x: f64,
    value: impl Fn(&Sample) -> f64,
) -> Option<Spread> {
    Spread::of(samples.iter().filter(|sample| sample.label == label && sample.x == x).map(value))
}

/// A line for each label.
pub(super) fn series(
    samples: &[Sample],
    labels: &[&'static str],
    value: impl Fn(&Sample) -> f64 + Copy,
) -> Vec<Series> {
    let mut places: Vec<f64> = samples.iter().map(|sample| sample.x).collect();
    places.sort_by(f64::total_cmp);
    places.dedup();
    let line = |label: &&'static str| Series {
        name: (*label).to_owned(),
        points: places
            .iter()
            .filter_map(|&x| Some(Point { x, y: spread(samples, label, x, value)? }))
            .collect(),
    };
    labels.iter().map(line).collect()
}

/// Checks that the figure of `label` at `x` is at least so many times that of `other` at `other_x`, each round by
/// itself.
pub(super) fn check(
    samples: &[Sample],
    (label, x): (&str, f64),
    (other, other_x): (&str, f64),
    at_least: f64,
    what: String,
    value: impl Fn(&Sample) -> f64,
) -> Result<Check, Error> {
    let find = |label: &str, x: f64, round: usize| {
        samples.iter().find(|sample| sample.label == label && sample.x == x && sample.round == round)
    };
    let ratios = samples.iter().filter(|sample| sample.label == label && sample.x == x);
    let ratios = ratios.filter_map(|own| Some(value(own) / value(find(other, other_x, own.round)?)));
    let ratio = Spread::of(ratios).ok_or(Error::Nothing("the load"))?;
    Ok(Check { what, ratio: ratio.median, at_least })
}

/// Slope of the line of least squares.
pub(super) fn slope(points: &[(f64, f64)]) -> f64 {
    let count = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let covariance: f64 = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
    covariance / points.iter().map(|point| (point.0 - x).powi(2)).sum::<f64>()
}

/// A bound from above as a [`Check`], in which more is better: the bound as a multiple of the figure.
pub(super) fn at_most(what: String, figure: f64, bound: f64) -> Check {
    Check { what, ratio: bound / figure.max(f64::MIN_POSITIVE), at_least: 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(label: &'static str, x: f64, round: usize, rate: f64) -> Sample {
        Sample { label, x, round, requests_per_s: rate, requests_per_cpu_s: rate }
    }

    #[test]
    fn ratios_are_taken_round_by_round() {
        let samples = [
            sample("a", 1.0, 0, 100.0),
            sample("b", 1.0, 0, 50.0),
            sample("a", 1.0, 1, 10.0),
            sample("b", 1.0, 1, 8.0),
            sample("a", 2.0, 1, 1.0),
        ];
        let check =
            check(&samples, ("b", 1.0), ("a", 1.0), 0.7, String::new(), |sample| sample.requests_per_s);
        assert_eq!(check.unwrap().ratio, 0.65);
        assert_eq!(series(&samples, &["a", "b"], |sample| sample.requests_per_s)[0].points.len(), 2);
    }

    #[test]
    fn a_line_has_its_slope_and_a_bound_from_above_holds_below_it() {
        assert_eq!(slope(&[(1.0, 5.0), (2.0, 8.0), (3.0, 11.0)]), 3.0);
        assert!(at_most(String::new(), 2.0, 3.0).holds() && !at_most(String::new(), 4.0, 3.0).holds());
        assert!(at_most(String::new(), 0.0, 3.0).holds());
    }
}
