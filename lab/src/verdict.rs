//! Whether a claim holds, and by how much.

use serde::{Deserialize, Serialize};

/// One figure and the bound that it must keep.
#[derive(Clone, Debug)]
pub struct Check {
    /// What was measured, as the start of a sentence.
    pub what: String,
    /// The figure: a ratio, in which 1 is parity and more is better.
    pub ratio: f64,
    /// The least ratio with which the claim holds.
    pub at_least: f64,
}

impl Check {
    /// A figure that is no number keeps no bound.
    pub fn holds(&self) -> bool {
        self.ratio >= self.at_least
    }
}

/// The one line that a scenario ends with.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Verdict {
    /// Whether every bound is kept.
    pub holds: bool,
    /// What was found, without a final full stop.
    pub text: String,
}

impl Verdict {
    /// Holds if every check does; names the one that is farthest below, or least above, its bound. Nothing measured
    /// holds nothing.
    pub fn of(checks: &[Check]) -> Self {
        let margin = |check: &Check| {
            if check.ratio.is_nan() { f64::NEG_INFINITY } else { check.ratio / check.at_least }
        };
        let Some(worst) = checks.iter().min_by(|a, b| margin(a).total_cmp(&margin(b))) else {
            return Self { holds: false, text: "nothing was measured".into() };
        };
        let kept = checks.iter().filter(|check| check.holds()).count();
        let text = format!(
            "{kept} of {} bounds kept; the tightest: {}: {:.3} times, at least {:.2} claimed",
            checks.len(),
            worst.what,
            worst.ratio,
            worst.at_least
        );
        Self { holds: kept == checks.len(), text }
    }

    /// Adds a further finding that decides nothing; an empty one is none.
    #[must_use]
    pub fn noting(mut self, finding: &str) -> Self {
        if finding.is_empty() {
            return self;
        }
        self.text.push_str("; ");
        self.text.push_str(finding);
        self
    }

    /// `NAME: holds: …` or `NAME: does not hold: …`.
    pub fn line(&self, name: &str) -> String {
        format!("{name}: {}: {}", self.word(), self.text)
    }

    /// "holds" or "does not hold".
    pub fn word(&self) -> &'static str {
        if self.holds { "holds" } else { "does not hold" }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(what: &str, ratio: f64) -> Check {
        Check { what: what.into(), ratio, at_least: 0.85 }
    }

    #[test]
    fn a_figure_on_its_bound_keeps_it() {
        let verdict = Verdict::of(&[check("a", 0.85), check("b", 0.9)]);
        assert_eq!(
            verdict.line("x"),
            "x: holds: 2 of 2 bounds kept; the tightest: a: 0.850 times, at least 0.85 claimed"
        );
    }

    #[test]
    fn one_figure_below_its_bound_breaks_the_claim() {
        let verdict = Verdict::of(&[check("a", 2.0), check("b", 0.849)]);
        assert!(!verdict.holds);
        assert!(
            verdict.text.starts_with("1 of 2 bounds kept; the tightest: b: 0.849 times,"),
            "{}",
            verdict.text
        );
    }

    #[test]
    fn no_figure_and_figures_that_are_no_numbers_hold_nothing() {
        assert!(!Verdict::of(&[]).holds);
        let verdict = Verdict::of(&[check("a", 1.0), check("b", f64::NAN)]);
        assert!(!verdict.holds && verdict.text.contains("b: NaN"), "{}", verdict.text);
    }
}
