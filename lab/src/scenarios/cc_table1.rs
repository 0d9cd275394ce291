//! How long the filters are (paper Table 1).

use std::path::Path;

use super::cc::{PAPER, at_most};
use crate::plot::{Plot, Point, Series};
use crate::table::Table;
use crate::verdict::Verdict;
use crate::{Error, Lab, Outcome, Scenario};

const BOUND: usize = 600;
const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/conditioning/src");
/// Each filter with its files and folders; `package` and `persist` are one state machine with and without a listening
/// socket. The framework is common to all and not counted with them, as in the paper's table the library is not.
const FILTERS: [(&str, &[&str], Option<usize>); 9] = [
    ("package and persist", &["keeper"], Some(687 + 76)),
    ("prior", &["filters/prior.rs", "tree.rs"], Some(531)),
    ("slowread", &["filters/slowread.rs"], Some(587)),
    ("normalize", &["filters/normalize.rs"], None),
    ("police", &["filters/police.rs", "filters/police"], None),
    ("auth", &["filters/auth.rs"], None),
    ("stats", &["filters/stats.rs"], None),
    ("pass", &["filters/pass.rs"], None),
    (
        "framework",
        &["host.rs", "link.rs", "wire.rs", "ledger", "neighbours.rs", "draining.rs", "arguments.rs"],
        None,
    ),
];

pub(super) const SCENARIO: Scenario = Scenario {
    name: "cc-table1",
    paper: &PAPER,
    figure: "Table 1",
    claim: "Each filter is below 600 lines of source with the framework at hand",
    published: "Lines (semicolons) of each filter: packaging 687 (248), persistence 76 (26) more, priority 531 (211), \
                slow read 587 (212).",
    method: "Lines of code in the files of each filter: without blank lines, comments and tests. `package` and \
             `persist` are one state machine: they are counted together, and have twice the room.",
    run,
};

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let mut counts = Vec::new();
    for (name, files, published) in FILTERS {
        let mut lines = Lines::default();
        for file in files {
            lines.add(&Path::new(SOURCES).join(file))?;
        }
        counts.push((name, lines, published));
        lab.progress(counts.len(), FILTERS.len(), &format!("{name}: {} lines", lines.code));
    }
    Ok(outcome(&counts))
}

fn outcome(counts: &[(&str, Lines, Option<usize>)]) -> Outcome {
    let filters = counts.iter().filter(|(name, ..)| *name != "framework");
    let checks: Vec<_> = filters
        .map(|(name, lines, _)| {
            // Two filters that are one state machine have the room of two.
            let room = name.split(" and ").count() * (BOUND - 1);
            at_most(format!("{room} lines to those of {name}"), lines.code as f64, room as f64)
        })
        .collect();
    let mut raw = Table::new(["filter", "lines", "semicolons"]);
    let mut summary = Table::new(["filter", "lines of code", "semicolons", "the paper's lines"]);
    let mut points = Vec::new();
    for (index, (name, lines, published)) in counts.iter().enumerate() {
        raw.row([(*name).to_owned(), lines.code.to_string(), lines.semicolons.to_string()]);
        let published = published.map_or(String::new(), |lines| lines.to_string());
        summary.row([(*name).to_owned(), lines.code.to_string(), lines.semicolons.to_string(), published]);
        points.push(Point::exact((index + 1) as f64, lines.code as f64));
    }
    let plot = Plot {
        title: "Lines of code, in the order of the table".to_owned(),
        x: "row of the table".to_owned(),
        x_log: false,
        y: "lines of code".to_owned(),
        series: vec![Series { name: "lines".to_owned(), points }],
    };
    let verdict = Verdict::of(&checks);
    Outcome { raw, summary, plots: vec![(None, plot)], verdict, servers: Vec::new() }
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Lines {
    code: usize,
    semicolons: usize,
}

impl Lines {
    /// Those of a file, or of every file in a folder.
    fn add(&mut self, path: &Path) -> Result<(), Error> {
        let unreadable = || Error::file("read", path);
        if path.is_dir() {
            for entry in std::fs::read_dir(path).map_err(unreadable())? {
                self.add(&entry.map_err(unreadable())?.path())?;
            }
            return Ok(());
        }
        let of_file = Self::of(&std::fs::read_to_string(path).map_err(unreadable())?);
        self.code += of_file.code;
        self.semicolons += of_file.semicolons;
        Ok(())
    }

    /// Tests are at the end of every file.
    fn of(text: &str) -> Self {
        let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
        let code = code.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//"));
        code.fold(Self::default(), |sum, line| Self {
            code: sum.code + 1,
            semicolons: sum.semicolons + usize::from(line.ends_with(';')),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blank_lines_comments_and_tests_are_not_counted() {
        let text =
            "//! A.\n\nuse b;\n    // why\nfn c() {\n    d();\n}\n\n#[cfg(test)]\nmod tests {\n    e();\n}\n";
        assert_eq!(Lines::of(text), Lines { code: 4, semicolons: 2 });
    }

    #[test]
    fn a_filter_of_600_lines_is_too_long() {
        let count = |code| [("prior", Lines { code, semicolons: 0 }, None)];
        assert!(outcome(&count(599)).verdict.holds && !outcome(&count(600)).verdict.holds);
    }
}
