//! What a scenario is, and what it is run with.

use std::path::PathBuf;

use crate::Error;
use crate::plot::Plot;
use crate::table::Table;
use crate::verdict::Verdict;

/// One figure or table that is reproduced. Its texts appear on the page of its paper.
#[derive(Debug)]
pub struct Scenario {
    /// As on the command line: the paper's short name and the figure, such as `tempesta-fig3`.
    pub name: &'static str,
    /// Where it was published.
    pub paper: &'static Paper,
    /// The figure or table of the paper, as it is called there.
    pub figure: &'static str,
    /// The claim that the verdict is about, in one line.
    pub claim: &'static str,
    /// What the paper's figure shows.
    pub published: &'static str,
    /// How it is measured here, and where that departs from the paper.
    pub method: &'static str,
    /// Measures.
    pub run: fn(&Lab) -> Result<Outcome, Error>,
}

/// A paper, or our own experiments, with a page in docs/papers.
#[derive(Debug)]
pub struct Paper {
    /// Before the first hyphen of its scenarios' names, and the folder of its plots.
    pub name: &'static str,
    /// As published.
    pub title: &'static str,
    /// What all its scenarios have in common here.
    pub setting: &'static str,
}

impl Paper {
    /// The name of its page: some papers' scenarios are named more briefly than one would look for, and the attacks that
    /// Tempesta is made for stand with what it measured.
    pub fn page(&self) -> &'static str {
        match self.name {
            "cc" => "connection-conditioning",
            "defence" => "tempesta",
            "ksd" => "kernel-service-differentiation",
            name => name,
        }
    }
}

/// What a scenario gives back.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Raw figures, a row for each measurement: the CSV file.
    pub raw: Table,
    /// Medians and spreads, for the page.
    pub summary: Table,
    /// The first is `NAME.svg`; further ones have a suffix: `NAME-SUFFIX.svg`.
    pub plots: Vec<(Option<&'static str>, Plot)>,
    /// Whether the claim holds.
    pub verdict: Verdict,
    /// Servers that were measured, with their versions.
    pub servers: Vec<String>,
}

/// What a scenario is run with.
#[derive(Debug)]
pub struct Lab {
    /// Shorter: ends within 60 s, at the cost of the figures' certainty.
    pub quick: bool,
    /// The tidegate binary.
    pub tidegate: PathBuf,
    /// A log of accesses to use where a scenario would make a trace.
    pub trace: Option<PathBuf>,
    /// The name that progress is reported under.
    pub name: &'static str,
}

impl Lab {
    /// One value for a full run and one for `--quick`.
    pub fn choose<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }

    /// A line of progress on standard error: step `step` of `of`.
    pub fn progress(&self, step: usize, of: usize, what: &str) {
        eprintln!("{} [{step}/{of}] {what}", self.name);
    }
}
