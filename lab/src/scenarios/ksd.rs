//! What the scenarios of the paper on kernel mechanisms have in common.

use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::overload::{Asked, Clients, Group, PORT, Pace, SERVER};
use crate::plot::{Plot, Point, Series};
use crate::{Error, Lab, Paper};

pub(super) static PAPER: Paper = Paper {
    name: "ksd",
    title: "Kernel Mechanisms for Service Differentiation in Overloaded Web Servers (its §4 and §5)",
    setting: "The paper's server and clients were seven machines and a switch, its mechanisms a module of AIX. Here \
              two network namespaces of one unpatched Linux are joined by a pair of virtual interfaces: the server's, \
              with tidegate's kernel programs on its interface, and the clients'. Where the server is to be the \
              bottleneck it has a few workers, each of which is occupied by a request for a fixed time without using a \
              processor: so its capacity is known and depends on nothing else that runs. Clients open a connection for \
              each request.\n\n\
              Bounds are checked as ratios in which more is better; where a claim says \"at most\", the ratio is the \
              bound divided by what was measured.",
};

/// A client of 10.77.`network`.0/24.
pub(super) fn client(network: u8, host: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, network, host)
}

/// Clients that ask as soon as they have their answers.
pub(super) fn closed(network: u8, clients: usize, path: &'static str, patience_ms: u64) -> Group {
    let patience = Duration::from_millis(patience_ms);
    Group { from: client(network, 1), clients, path, pace: Pace::Closed, patience }
}

/// How long is measured, in milliseconds, in a full and in a quick run.
pub(super) fn time(lab: &Lab, settle_ms: u64, full_ms: u64, quick_ms: u64) -> Clients {
    Clients {
        settle: Duration::from_millis(lab.choose(settle_ms, settle_ms.min(quick_ms))),
        measure: Duration::from_millis(lab.choose(full_ms, quick_ms)),
    }
}

/// A curve for each name: of every row its `x` and one value.
pub(super) fn curves<R>(
    rows: &[R],
    names: &[&str],
    x: impl Fn(&R) -> f64,
    y: impl Fn(&R, usize) -> f64,
) -> Vec<Series> {
    let series = |(index, name): (usize, &&str)| Series {
        name: (*name).to_owned(),
        // What nothing was measured of is no point.
        points: rows
            .iter()
            .map(|row| Point::exact(x(row), y(row, index)))
            .filter(|point| point.y.median.is_finite())
            .collect(),
    };
    names.iter().enumerate().map(series).collect()
}

/// A plot with linear axes.
pub(super) fn plot(title: &str, x: &str, y: &str, series: Vec<Series>) -> Plot {
    Plot { title: title.to_owned(), x: x.to_owned(), x_log: false, y: y.to_owned(), series }
}

/// "12.3", and nothing for what was not measured.
pub(super) fn text(value: f64) -> String {
    if value.is_finite() { format!("{value:.1}") } else { String::new() }
}

/// Answers per second of every group.
pub(super) fn rates(asked: &[Asked]) -> Vec<f64> {
    asked.iter().map(Asked::rate).collect()
}

/// tidegate at the server's address before the workers on loopback, with these rules and nothing else that refuses: to
/// the defence, many greedy clients of one address are an attacker.
pub(super) fn behind_tidegate(
    lab: &Lab,
    folder: &Path,
    at_once: usize,
    rules: &str,
) -> Result<Command, Error> {
    if !lab.tidegate.is_file() {
        return Err(Error::NoTidegate(lab.tidegate.clone()));
    }
    let gate = if rules.contains("[gate]") { "" } else { "[gate]\nmechanism = \"user-space\"\n" };
    let config = format!(
        "workers = 1\n[admin]\naddress = \"127.0.0.1:9001\"\n[[listen]]\naddress = \"{SERVER}:{PORT}\"\n\
         [[upstream]]\nname = \"app\"\nservers = [\"127.0.0.1:9000\"]\nmax_connections = {at_once}\n\
         connect_timeout = \"30s\"\nmax_failures = 0\n[[route]]\nupstream = \"app\"\n[cache]\nmemory = \"0B\"\n\
         [defence]\nenabled = false\n{rules}{gate}"
    );
    let path = folder.join("tidegate.toml");
    std::fs::write(&path, config).map_err(Error::file("write", &path))?;
    let mut command = Command::new(&lab.tidegate);
    command.arg("run").arg("--config").arg(path);
    Ok(command)
}
