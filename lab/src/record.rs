//! The files of one run: raw figures, plots, and a record from which the pages are made.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tidegate_bench::machine::{self, BUSY_PERCENT};

use crate::table::Table;
use crate::verdict::Verdict;
use crate::{Error, Outcome, Scenario};

/// What the page says of one scenario's run; `NAME.json` in the output directory.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Record {
    /// Its name.
    pub scenario: String,
    /// What was found.
    pub verdict: Verdict,
    /// Medians and spreads.
    pub summary: Table,
    /// File names of the plots, in order.
    pub plots: Vec<String>,
    /// Under which circumstances.
    pub conditions: Conditions,
}

/// The circumstances that figures depend on.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Conditions {
    /// Release of the kernel.
    pub kernel: String,
    /// The processor, as it names itself.
    pub processor: String,
    /// Servers with their versions.
    pub servers: Vec<String>,
    /// Whether it was a `--quick` run.
    pub quick: bool,
    /// Whether the lab itself was built with optimization.
    pub optimized: bool,
    /// Share of the machine's processor time that went to programs outside the run.
    pub others_percent: f64,
}

impl Conditions {
    /// Why the figures are not to be trusted, if there is a reason.
    pub fn doubts(&self) -> Option<String> {
        let mut doubts = Vec::new();
        if !self.optimized {
            doubts.push("the lab was built without optimization".to_owned());
        }
        if self.quick {
            doubts.push("the run was a quick one".to_owned());
        }
        if self.others_percent > BUSY_PERCENT {
            doubts.push(format!("other programs used {:.0} % of the machine meanwhile", self.others_percent));
        }
        (!doubts.is_empty()).then(|| doubts.join("; "))
    }
}

impl Record {
    /// Writes `NAME.csv`, the plots and `NAME.json` to `directory`, which is made if it is not there.
    ///
    /// # Errors
    /// When a plot cannot be drawn or a file not be written.
    pub fn write(
        directory: &Path,
        scenario: &Scenario,
        outcome: &Outcome,
        conditions: Conditions,
    ) -> Result<Self, Error> {
        std::fs::create_dir_all(directory).map_err(Error::file("write", directory))?;
        let name = scenario.name;
        save(&directory.join(format!("{name}.csv")), &outcome.raw.csv())?;
        let mut plots = Vec::new();
        for (suffix, plot) in &outcome.plots {
            let file = suffix.map_or(format!("{name}.svg"), |suffix| format!("{name}-{suffix}.svg"));
            save(&directory.join(&file), &plot.svg()?)?;
            plots.push(file);
        }
        let (verdict, summary) = (outcome.verdict.clone(), outcome.summary.clone());
        let record = Self { scenario: name.to_owned(), verdict, summary, plots, conditions };
        let path = path(directory, name);
        let text = serde_json::to_string_pretty(&record)
            .map_err(|source| Error::Record { path: path.clone(), source })?;
        save(&path, &text)?;
        Ok(record)
    }

    /// The record of the scenario's last run; `None` if it has not been run.
    ///
    /// # Errors
    /// When there is one that cannot be read.
    pub fn read(directory: &Path, name: &str) -> Result<Option<Self>, Error> {
        let path = path(directory, name);
        match std::fs::read_to_string(&path) {
            Ok(text) => {
                serde_json::from_str(&text).map(Some).map_err(|source| Error::Record { path, source })
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::file("read", &path)(error)),
        }
    }
}

fn path(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!("{name}.json"))
}

pub(crate) fn save(path: &Path, text: &str) -> Result<(), Error> {
    std::fs::write(path, text).map_err(Error::file("write", path))
}

/// Watches the circumstances of a run.
pub struct Watch {
    machine: machine::Watch,
}

impl Watch {
    /// Begins to watch.
    pub fn start() -> Self {
        Self { machine: machine::Watch::start() }
    }

    /// The circumstances of what ran meanwhile. Processes that it started must have ended and been awaited.
    pub fn conditions(&self, servers: Vec<String>, quick: bool) -> Conditions {
        Conditions {
            kernel: read("/proc/sys/kernel/osrelease"),
            processor: machine::processor(),
            servers,
            quick,
            optimized: !cfg!(debug_assertions),
            others_percent: self.machine.others_percent(),
        }
    }
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conditions() -> Conditions {
        Conditions {
            kernel: "6.1".into(),
            processor: "P, 2 cores".into(),
            servers: Vec::new(),
            quick: false,
            optimized: true,
            others_percent: 0.4,
        }
    }

    #[test]
    fn a_busy_machine_a_quick_run_and_a_debug_build_raise_doubts() {
        assert_eq!(conditions().doubts(), None);
        let doubts = Conditions { quick: true, others_percent: 30.4, ..conditions() }.doubts().unwrap();
        assert_eq!(doubts, "the run was a quick one; other programs used 30 % of the machine meanwhile");
        assert!(Conditions { optimized: false, ..conditions() }.doubts().unwrap().contains("optimization"));
    }

    #[test]
    fn a_record_without_a_run_is_none_and_a_damaged_one_an_error() {
        let directory = tempfile::tempdir().unwrap();
        assert!(Record::read(directory.path(), "x-fig1").unwrap().is_none());
        std::fs::write(directory.path().join("x-fig1.json"), "{").unwrap();
        let error = Record::read(directory.path(), "x-fig1").unwrap_err().to_string();
        assert!(error.contains("x-fig1.json is no record of results"), "{error}");
    }
}
