//! One load process: many connections in one epoll loop, each with one request under way.

use std::io::{self, BufRead, Read, Write};
use std::net::{SocketAddr, SocketAddrV4, TcpStream};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use rustix::time::{ClockId, Timespec};

use super::answer::Answers;
use super::plan::{Order, Plan, Report};

/// Events taken from the kernel at once.
const EVENTS: usize = 512;
const READ_BYTES: usize = 64 * 1024;
/// How long the last answers of [`Order::Send`] may take.
const LAST_ANSWERS: Duration = Duration::from_secs(10);

/// Follows the orders on `input` until it ends.
///
/// # Errors
/// When the plan or an order cannot be read, or the kernel gives no epoll instance.
pub fn follow(input: impl BufRead, mut output: impl Write) -> io::Result<()> {
    let mut lines = input.lines();
    let Some(plan) = lines.next() else { return Ok(()) };
    let mut worker = Worker::new(serde_json::from_str(&plan?)?)?;
    for line in lines {
        let report = worker.obey(serde_json::from_str(&line?)?)?;
        serde_json::to_writer(&mut output, &report)?;
        output.write_all(b"\n")?;
        output.flush()?;
    }
    Ok(())
}

struct Worker {
    plan: Plan,
    poll: OwnedFd,
    connections: Vec<Option<Connection>>,
    events: Vec<Event>,
    buffer: Vec<u8>,
    state: Progress,
}

/// What the current order has brought so far.
#[derive(Default)]
struct Progress {
    report: Report,
    /// Requests sent on a connection before it falls silent; `None` while time alone ends them.
    messages: Option<u32>,
    /// No request is sent any more, answers are still read.
    closing: bool,
    /// Connections without their first answer.
    opening: u32,
    /// Requests, first ones included, whose answers have not come.
    outstanding: u32,
}

struct Connection {
    stream: TcpStream,
    answers: Answers,
    /// Bytes of the current request that the socket has taken; `None` without a request under way.
    sent: Option<usize>,
    /// Requests that were answered under the current order.
    answered: u32,
    established: bool,
}

impl Worker {
    fn new(plan: Plan) -> io::Result<Self> {
        Ok(Self {
            plan,
            poll: epoll::create(CreateFlags::CLOEXEC)?,
            connections: Vec::new(),
            events: Vec::with_capacity(EVENTS),
            buffer: vec![0; READ_BYTES],
            state: Progress::default(),
        })
    }

    fn obey(&mut self, order: Order) -> io::Result<Report> {
        let began = Instant::now();
        self.state = Progress::default();
        self.state.report.began_at_ns = monotonic_ns();
        match order {
            Order::Establish { messages, timeout_ms } => {
                self.establish(messages, began + Duration::from_millis(timeout_ms))?;
            }
            Order::Send { for_ms } => self.send(began + Duration::from_millis(for_ms))?,
        }
        self.state.report.elapsed_ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        Ok(std::mem::take(&mut self.state.report))
    }

    fn establish(&mut self, messages: u32, deadline: Instant) -> io::Result<()> {
        self.state.messages = Some(messages);
        self.connections = Vec::with_capacity(self.plan.connections as usize);
        while Instant::now() < deadline {
            while self.state.opening < self.plan.opening
                && self.connections.len() < self.plan.connections as usize
            {
                self.open()?;
            }
            if self.state.outstanding == 0 && self.connections.len() == self.plan.connections as usize {
                return Ok(());
            }
            self.turn(deadline)?;
        }
        let unopened = self.plan.connections as usize - self.connections.len();
        self.state.report.failed += u64::from(self.state.outstanding) + unopened as u64;
        Ok(())
    }

    fn send(&mut self, end: Instant) -> io::Result<()> {
        for index in 0..self.connections.len() {
            if let Some(connection) = &mut self.connections[index] {
                connection.answered = 0;
                connection.sent = Some(0);
                self.state.outstanding += 1;
                let result = connection.push(self.plan.request.as_bytes());
                self.settle(index, result);
            }
        }
        while Instant::now() < end && self.state.outstanding > 0 {
            self.turn(end)?;
        }
        self.state.closing = true;
        let deadline = Instant::now() + LAST_ANSWERS;
        while Instant::now() < deadline && self.state.outstanding > 0 {
            self.turn(deadline)?;
        }
        self.state.report.failed += u64::from(self.state.outstanding);
        Ok(())
    }

    /// Starts one connection. The kernel tells by an event when it is open.
    fn open(&mut self) -> io::Result<()> {
        let index = self.connections.len();
        self.state.opening += 1;
        self.state.outstanding += 1;
        let source = self.plan.source(u32::try_from(index).unwrap_or(u32::MAX));
        let opened = connect(SocketAddrV4::new(source, 0).into(), self.plan.server).and_then(|stream| {
            let interest = EventFlags::IN | EventFlags::OUT | EventFlags::ET;
            epoll::add(&self.poll, &stream, EventData::new_u64(index as u64), interest)?;
            Ok(stream)
        });
        match opened {
            Ok(stream) => self.connections.push(Some(Connection {
                stream,
                answers: Answers::default(),
                sent: Some(0),
                answered: 0,
                established: false,
            })),
            Err(error) => {
                self.connections.push(None);
                self.lose(index, false, &error);
            }
        }
        Ok(())
    }

    /// Waits for events, at the latest until `deadline`, and follows them.
    fn turn(&mut self, deadline: Instant) -> io::Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        let mut events = std::mem::take(&mut self.events);
        events.clear();
        epoll::wait(&self.poll, rustix::buffer::spare_capacity(&mut events), Some(&timeout))?;
        for event in &events {
            let index = usize::try_from(event.data.u64()).unwrap_or(usize::MAX);
            let Some(Some(connection)) = self.connections.get_mut(index) else { continue };
            let result = connection.advance(&self.plan.request, &mut self.buffer, &mut self.state);
            self.settle(index, result);
        }
        self.events = events;
        Ok(())
    }

    /// Drops the connection if its step has failed.
    fn settle(&mut self, index: usize, result: io::Result<()>) {
        if let Err(error) = result
            && let Some(connection) = self.connections[index].take()
        {
            if connection.sent.is_none() {
                // It had nothing under way: closed by an idle timeout between two orders, say.
                self.state.outstanding += 1;
            }
            self.lose(index, connection.established, &error);
        }
    }

    fn lose(&mut self, index: usize, established: bool, error: &io::Error) {
        if self.state.report.failed == 0 {
            eprintln!("load: connection {index}: {error}");
        }
        self.state.report.failed += 1;
        self.state.outstanding -= 1;
        if !established {
            self.state.opening -= 1;
        }
    }
}

impl Connection {
    /// Sends and reads as far as the socket allows.
    fn advance(&mut self, request: &str, buffer: &mut [u8], state: &mut Progress) -> io::Result<()> {
        self.push(request.as_bytes())?;
        loop {
            let length = match self.stream.read(buffer) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(length) => length,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            };
            let whole = self.answers.take(&buffer[..length]).map_err(io::Error::other)?;
            if whole > 0 {
                self.answered(whole, state)?;
                self.push(request.as_bytes())?;
            }
            if length < buffer.len() {
                return Ok(());
            }
        }
    }

    /// Counts an answer and decides whether a further request follows.
    fn answered(&mut self, whole: u64, state: &mut Progress) -> io::Result<()> {
        if whole != 1 || self.sent.is_none() {
            return Err(io::Error::other("more answers than requests"));
        }
        state.report.answers += 1;
        self.answered += 1;
        if !self.established {
            self.established = true;
            state.opening -= 1;
            state.report.established_at_ns.push(monotonic_ns());
        }
        let silent = state.closing || state.messages.is_some_and(|messages| self.answered >= messages);
        self.sent = if silent { None } else { Some(0) };
        state.outstanding -= u32::from(silent);
        Ok(())
    }

    /// Writes what is left of the request.
    fn push(&mut self, request: &[u8]) -> io::Result<()> {
        while let Some(sent) = &mut self.sent
            && *sent < request.len()
        {
            match self.stream.write(&request[*sent..]) {
                Ok(written) => *sent += written,
                // A socket that is not connected yet says so in two ways; the event comes in both.
                Err(error)
                    if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::NotConnected) =>
                {
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn connect(source: SocketAddr, server: SocketAddr) -> io::Result<TcpStream> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
    // Closed by a reset: 20,000 connections in TIME_WAIT would take the ports of the next round.
    sockopt::set_socket_linger(&socket, Some(Duration::ZERO))?;
    sockopt::set_tcp_nodelay(&socket, true)?;
    rustix::net::bind(&socket, &source)?;
    match rustix::net::connect(&socket, &server) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(socket.into()),
        Err(error) => Err(error.into()),
    }
}

/// CLOCK_MONOTONIC, which all processes share.
pub(super) fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}
