//! The load: processes that hold many connections from many source addresses, pinned to the load's core.
//!
//! wrk binds no source addresses and cannot open connections while it sends; a process has too few descriptors for every
//! connection of some scenarios.

mod answer;
mod plan;
mod worker;

use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use tidegate_bench::LOAD_CORE;
use tidegate_bench::peers::pinned;

pub use plan::{Order, Plan, Report};
pub use worker::follow;

use crate::Error;

/// Connections of one load process; half of what the least hard limit on descriptors in use allows.
const CONNECTIONS_PER_PROCESS: u32 = 10_000;
/// Sources start here, far from 127.0.0.1, from where everything else on the machine connects.
const FIRST_SOURCE: Ipv4Addr = Ipv4Addr::new(127, 64, 0, 1);
/// Connections, over all processes, that wait for their first answer: well below the accept queue of the servers.
const OPENING: u32 = 256;

/// Load processes that hold connections to one server. They end when this is dropped.
pub struct Load {
    workers: Vec<Worker>,
    connections: u32,
}

struct Worker {
    process: Child,
    orders: Option<ChildStdin>,
    reports: BufReader<ChildStdout>,
}

impl Load {
    /// Starts the processes; no connection is opened yet.
    ///
    /// # Errors
    /// When a process cannot be started.
    pub fn start(server: SocketAddr, connections: u32, request: &str) -> Result<Self, Error> {
        let processes = connections.div_ceil(CONNECTIONS_PER_PROCESS).max(1);
        let mut first_source = FIRST_SOURCE;
        let mut workers = Vec::new();
        for index in 0..processes {
            let plan = Plan {
                server,
                connections: connections / processes + u32::from(index < connections % processes),
                first_source,
                request: request.to_owned(),
                opening: (OPENING / processes).max(1),
            };
            first_source = Ipv4Addr::from(u32::from(first_source) + plan.sources());
            workers.push(Worker::start(&plan)?);
        }
        Ok(Self { workers, connections })
    }

    /// Opens every connection while each sends `messages` requests; returns when all have their answers.
    ///
    /// # Errors
    /// When a load process ends, or a connection fails: figures of what is left would not be comparable.
    pub fn establish(&mut self, messages: u32, timeout: Duration) -> Result<Report, Error> {
        let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        self.order(Order::Establish { messages, timeout_ms })
    }

    /// Sends on every connection for some time.
    ///
    /// # Errors
    /// As [`Load::establish`].
    pub fn send(&mut self, time: Duration) -> Result<Report, Error> {
        self.order(Order::Send { for_ms: u64::try_from(time.as_millis()).unwrap_or(u64::MAX) })
    }

    /// All processes at once; the sum of their reports.
    fn order(&mut self, order: Order) -> Result<Report, Error> {
        for worker in &mut self.workers {
            worker.tell(&order)?;
        }
        let mut sum = Report { began_at_ns: u64::MAX, ..Report::default() };
        for worker in &mut self.workers {
            let report = worker.hear()?;
            sum.answers += report.answers;
            sum.failed += report.failed;
            sum.elapsed_ns = sum.elapsed_ns.max(report.elapsed_ns);
            sum.began_at_ns = sum.began_at_ns.min(report.began_at_ns);
            sum.established_at_ns.extend(report.established_at_ns);
        }
        sum.established_at_ns.sort_unstable();
        if sum.failed > 0 {
            return Err(Error::Connections { failed: sum.failed, of: self.connections });
        }
        Ok(sum)
    }
}

impl Worker {
    fn start(plan: &Plan) -> Result<Self, Error> {
        let program = std::env::current_exe().map_err(Error::Load)?;
        let mut command = Command::new(program);
        command.arg("load");
        let mut process = pinned(LOAD_CORE, &command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(Error::Load)?;
        let missing = || Error::Load(std::io::ErrorKind::BrokenPipe.into());
        let orders = process.stdin.take();
        let reports = BufReader::new(process.stdout.take().ok_or_else(missing)?);
        let mut worker = Self { process, orders, reports };
        worker.tell(plan)?;
        Ok(worker)
    }

    fn tell(&mut self, message: &impl serde::Serialize) -> Result<(), Error> {
        let mut line = serde_json::to_vec(message).map_err(|error| Error::Load(error.into()))?;
        line.push(b'\n');
        let closed = || Error::Load(std::io::ErrorKind::BrokenPipe.into());
        self.orders.as_mut().ok_or_else(closed)?.write_all(&line).map_err(Error::Load)
    }

    fn hear(&mut self) -> Result<Report, Error> {
        let mut line = String::new();
        self.reports.read_line(&mut line).map_err(Error::Load)?;
        serde_json::from_str(&line).map_err(|error| Error::Load(error.into()))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // The end of its input ends it; a process that is stuck is ended by force.
        self.orders = None;
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
