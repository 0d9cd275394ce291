//! Every scenario of the conditioning paper runs, small, to its verdict. What has to be so on any machine is asked here:
//! that every server answers behind every chain, at every place of the figure, and that nothing is lost or let through.
//! How fast is not: the tests share the machine, and are built without optimization.
//!
//! Needs the binaries and libraries of the workspace: `cargo build --workspace --bins --tests`, as `make test` does.

#![allow(clippy::unwrap_used)] // clippy takes helpers of tests for no tests.

use std::path::{Path, PathBuf};

use assert_cmd::Command;

/// Servers without and with a chain of one filter.
const SERVERS: [&str; 7] = [
    "ccserver",
    "nginx",
    "conditioned nginx",
    "conditioned nginx, lingering",
    "Apache",
    "conditioned Apache",
    "conditioned Apache, lingering",
];
/// Servers behind the chain that there is without being asked for.
const BY_DEFAULT: [&str; 4] = [
    "nginx, default chain",
    "nginx, default chain, lingering",
    "Apache, default chain",
    "Apache, default chain, lingering",
];

fn tidegate() -> PathBuf {
    let beside = Path::new(env!("CARGO_BIN_EXE_tidegate-lab")).with_file_name("tidegate");
    let binary = std::env::var_os("TIDEGATE_BIN").map_or(beside, PathBuf::from);
    assert!(binary.is_file(), "{} is missing: cargo build --workspace --bins", binary.display());
    binary
}

/// What a run has left.
struct Run {
    verdict: String,
    columns: String,
    /// The raw figures: what each row is of, and its numbers.
    rows: Vec<(String, Vec<f64>)>,
}

impl Run {
    /// Runs a scenario, whose raw figures have these columns: a name, then numbers.
    fn of(name: &str, columns: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut lab = Command::new(env!("CARGO_BIN_EXE_tidegate-lab"));
        lab.args(["run", name, "--quick", "--out"]).arg(directory.path()).arg("--tidegate").arg(tidegate());
        let output = lab.output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (verdict, errors) = (text(&output.stdout), text(&output.stderr));
        let holds = verdict.starts_with(&format!("{name}: holds: "));
        assert!(holds || verdict.starts_with(&format!("{name}: does not hold: ")), "{verdict}{errors}");
        assert_eq!(output.status.code(), Some(i32::from(!holds)), "{verdict}{errors}");
        let file =
            |ending| std::fs::read_to_string(directory.path().join(format!("{name}.{ending}"))).unwrap();
        assert!(file("svg").contains("</svg>") && file("json").contains(name));
        let csv = file("csv");
        let (head, rows) = csv.split_once('\n').unwrap();
        assert_eq!(head, columns);
        let rows = rows.lines().map(|line| read(line, columns.split(',').count())).collect();
        Self { verdict, columns: columns.to_owned(), rows }
    }

    /// That `server` was measured at each of these places, and that there all figures behind `from` are above 0.
    fn measures(&self, server: &str, places: &[f64], from: &str) {
        let from = self.columns.split(',').position(|column| column == from).unwrap() - 1;
        for place in places {
            let of_place = |(name, numbers): &&(String, Vec<f64>)| name == server && numbers[0] == *place;
            let mut measured = self.rows.iter().filter(of_place).peekable();
            assert!(measured.peek().is_some(), "{server} at {place} was not measured: {:?}", self.rows);
            for (_, numbers) in measured {
                let are_positive = numbers[from..].iter().all(|figure| *figure > 0.0);
                assert!(are_positive, "{server} at {place}, {}: {numbers:?}", self.columns);
            }
        }
    }
}

/// A row of so many cells, all but the first of which are numbers.
fn read(line: &str, cells: usize) -> (String, Vec<f64>) {
    // The name may have commas.
    let mut cells: Vec<&str> = line.rsplitn(cells, ',').collect();
    let name = cells.pop().unwrap().trim_matches('"').to_owned();
    (name, cells.into_iter().rev().map(|cell| cell.parse().unwrap()).collect())
}

/// The columns of rates, over `x`.
fn rates(x: &str) -> String {
    format!("server,{x},round,requests_per_s,requests_per_cpu_s")
}

fn filters() -> Vec<f64> {
    (1..=10).map(f64::from).collect()
}

#[test]
fn one_file_and_a_mix_are_served_bare_and_conditioned() {
    let run = Run::of("cc-fig4", &rates("kbytes"));
    for server in SERVERS {
        run.measures(server, &[1.0, 100.0], "requests_per_s");
    }
    let run = Run::of("cc-fig6", &rates("mbytes"));
    for server in SERVERS.into_iter().chain(BY_DEFAULT) {
        run.measures(server, &[50.0], "requests_per_s");
    }
}

#[test]
fn chains_of_one_to_ten_filters_serve() {
    let run = Run::of("cc-fig8", "process,filters,latency_us,cpu_us_of_filters");
    for process in ["own", "shared"] {
        run.measures(process, &filters(), "latency_us");
    }
    Run::of("cc-fig9", &rates("filters")).measures("ccserver", &filters(), "requests_per_s");
}

#[test]
fn attackers_hold_their_connections_while_others_are_served() {
    let run = Run::of("cc-fig10", &rates("incomplete_connections"));
    for server in ["ccserver", "conditioned nginx", "conditioned Apache"] {
        run.measures(server, &[0.0, 400.0], "requests_per_s");
    }
    run.measures("Apache", &[0.0], "requests_per_s");
    assert!(run.verdict.contains("at most 400 of them were established at a time"), "{}", run.verdict);

    let run = Run::of("cc-fig12", &rates("slow_connections"));
    run.measures("conditioned Apache", &[0.0, 400.0], "requests_per_s");
    run.measures("Apache", &[0.0], "requests_per_s");
}

#[test]
fn an_infrequent_client_is_served_beside_downloads() {
    let run = Run::of("cc-fig11", "chain,downloads,latency_ms");
    for chain in ["with prior", "without prior"] {
        run.measures(chain, &[20.0, 60.0], "latency_ms");
    }
}

#[test]
fn a_url_of_many_slashes_comes_to_the_server_with_one() {
    let run = Run::of("cc-beck", "slashes,cpu_us,latency_us");
    assert!(run.rows.iter().all(|(_, numbers)| numbers.iter().all(|us| *us > 0.0)), "{:?}", run.rows);
    // Whether their time is linear is not for a debug build to say; whether one came through is.
    assert!(
        run.verdict.contains(" requests in the server's log 0 have consecutive slashes"),
        "{}",
        run.verdict
    );
}

#[test]
fn filters_that_are_killed_under_load_lose_nothing_that_is_in_others() {
    let run = Run::of("cc-kill", "filter,kills,responses,wrong,lost,lost_new_connections");
    assert!(run.verdict.starts_with("cc-kill: holds: "), "{}", run.verdict);
    for filter in ["package", "persist", "normalize", "police", "stats", "slowread", "pass", "prior"] {
        let of_filter = run.rows.iter().find(|(name, _)| name == filter).unwrap();
        let [kills, responses, ..] = of_filter.1[..] else { panic!("{of_filter:?}") };
        assert!(kills == 3.0 && responses > 0.0, "{of_filter:?}");
    }
}

#[test]
fn no_filter_is_longer_than_it_may_be() {
    let run = Run::of("cc-table1", "filter,lines,semicolons");
    assert!(run.verdict.starts_with("cc-table1: holds: "), "{}", run.verdict);
}
