//! An attacker: a process that holds many connections, each of which sends something once and then nothing.
//!
//! Unlike [`crate::load`] it takes what it gets: connections that are refused or ended are part of what is measured.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use rustix::time::Timespec;
use tidegate_bench::LOAD_CORE;
use tidegate_bench::peers::pinned;

use crate::Error;

/// Connections of one process, below the least hard limit on descriptors in use.
const PER_PROCESS: u32 = 16_000;
const PER_SOURCE: u32 = 250;
/// Connections opened in a second, and opened again in a second after they ended.
const OPENED_PER_S: f64 = 8_000.0;
const REOPENED_PER_S: f64 = 200.0;
const TURN: Duration = Duration::from_millis(5);
/// A connection whose first packet was dropped is tried again after one second and after three.
const SETTLED: Duration = Duration::from_millis(1_500);
const SETTLES_WITHIN: Duration = Duration::from_secs(15);

/// Processes that attack until this is dropped.
pub(super) struct Attack {
    workers: Vec<(Child, Option<ChildStdin>, BufReader<ChildStdout>)>,
}

impl Attack {
    /// Attempts `connections`, each sending `text` once; returns when all were attempted. With `reopen`, one that ends
    /// is opened again.
    ///
    /// # Errors
    /// When a process cannot be started.
    pub(super) fn start(
        server: SocketAddr,
        connections: u32,
        reopen: bool,
        text: &str,
    ) -> Result<Self, Error> {
        let processes = connections.div_ceil(PER_PROCESS);
        let mut attack = Self { workers: Vec::new() };
        for index in 0..processes {
            let share = connections / processes + u32::from(index < connections % processes);
            // 127.128.0.1 and on, 64 addresses a process.
            let source = Ipv4Addr::from(0x7f80_0001 + (index << 8));
            let mut command = Command::new(std::env::current_exe().map_err(Error::Load)?);
            command.args(["attack", &server.to_string(), &share.to_string(), &source.to_string(), text]);
            if reopen {
                command.arg("--reopen");
            }
            let mut process = pinned(LOAD_CORE, &command)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .map_err(Error::Load)?;
            let missing = || Error::Load(std::io::ErrorKind::BrokenPipe.into());
            let (input, output) = (process.stdin.take(), process.stdout.take().ok_or_else(missing)?);
            attack.workers.push((process, input, BufReader::new(output)));
        }
        // One line each when all were attempted.
        attack.heard()?;
        Ok(attack)
    }

    fn heard(&mut self) -> Result<u64, Error> {
        let mut sum = 0;
        for (_, _, output) in &mut self.workers {
            let mut line = String::new();
            output.read_line(&mut line).map_err(Error::Load)?;
            let wrong = |_| Error::Load(std::io::ErrorKind::InvalidData.into());
            sum += line.trim().parse::<u64>().map_err(wrong)?;
        }
        Ok(sum)
    }

    /// Waits until as many are established as ever will be: what is measured is a server beside them, not their coming.
    ///
    /// # Errors
    /// When a process has ended.
    pub(super) fn settle(&mut self, connections: u32) -> Result<(), Error> {
        let deadline = Instant::now() + SETTLES_WITHIN;
        let (mut held, mut since) = (self.held()?, Instant::now());
        while held < u64::from(connections) && since.elapsed() < SETTLED && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(100));
            let now = self.held()?;
            if now != held {
                (held, since) = (now, Instant::now());
            }
        }
        Ok(())
    }

    /// Connections that are established now.
    ///
    /// # Errors
    /// When a process has ended.
    pub(super) fn held(&mut self) -> Result<u64, Error> {
        for (_, input, _) in &mut self.workers {
            if let Some(input) = input {
                input.write_all(b"\n").map_err(Error::Load)?;
            }
        }
        self.heard()
    }
}

impl Drop for Attack {
    fn drop(&mut self) {
        for (process, input, _) in &mut self.workers {
            *input = None;
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

struct Attacker {
    server: SocketAddr,
    first_source: u32,
    text: Vec<u8>,
    poll: rustix::fd::OwnedFd,
    /// `true` once established.
    connections: Vec<Option<(TcpStream, bool)>>,
    ended: Vec<usize>,
    attempted: usize,
}

/// Attacks until the input ends: what an attacking process does. Answers each line of input, and the end of its
/// attempts, with a line that has the number of connections established.
///
/// # Errors
/// When the kernel gives no epoll instance.
pub fn attack(
    server: SocketAddr,
    connections: usize,
    first_source: Ipv4Addr,
    text: &str,
    reopen: bool,
) -> std::io::Result<()> {
    let mut attacker = Attacker {
        server,
        first_source: first_source.into(),
        text: text.as_bytes().to_vec(),
        poll: epoll::create(CreateFlags::CLOEXEC)?,
        connections: (0..connections).map(|_| None).collect(),
        ended: Vec::new(),
        attempted: 0,
    };
    let input = std::io::stdin();
    epoll::add(&attacker.poll, &input, EventData::new_u64(u64::MAX), EventFlags::IN)?;
    let began = Instant::now();
    let (mut reopened, mut reopens_from) = (0.0, began);
    loop {
        while attacker.attempted < connections
            && (attacker.attempted as f64) < began.elapsed().as_secs_f64() * OPENED_PER_S
        {
            attacker.open(attacker.attempted);
            attacker.attempted += 1;
            if attacker.attempted == connections {
                // The last ones get a moment to be accepted.
                attacker.turn(Duration::from_millis(300))?;
                attacker.say()?;
                reopens_from = Instant::now();
            }
        }
        while reopen
            && attacker.attempted == connections
            && reopened < reopens_from.elapsed().as_secs_f64() * REOPENED_PER_S
            && let Some(index) = attacker.ended.pop()
        {
            attacker.open(index);
            reopened += 1.0;
        }
        if attacker.turn(TURN)? {
            let mut line = [0; 64];
            if input.lock().read(&mut line)? == 0 {
                return Ok(());
            }
            attacker.say()?;
        }
    }
}

impl Attacker {
    fn say(&self) -> std::io::Result<()> {
        let held = self.connections.iter().flatten().filter(|(_, established)| *established).count();
        let mut output = std::io::stdout().lock();
        writeln!(output, "{held}")?;
        output.flush()
    }

    fn open(&mut self, index: usize) {
        let source = Ipv4Addr::from(self.first_source + u32::try_from(index).unwrap_or(0) / PER_SOURCE);
        let opened = || -> std::io::Result<TcpStream> {
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
            sockopt::set_socket_linger(&socket, Some(Duration::ZERO))?;
            rustix::net::bind(&socket, &SocketAddr::from(SocketAddrV4::new(source, 0)))?;
            match rustix::net::connect(&socket, &self.server) {
                Ok(()) | Err(rustix::io::Errno::INPROGRESS) => {}
                Err(error) => return Err(error.into()),
            }
            let stream = TcpStream::from(socket);
            let interest = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
            epoll::add(&self.poll, &stream, EventData::new_u64(index as u64), interest)?;
            Ok(stream)
        };
        match opened() {
            Ok(stream) => self.connections[index] = Some((stream, false)),
            Err(_) => self.ended.push(index),
        }
    }

    /// Follows events for so long; whether there is a line to read.
    fn turn(&mut self, time: Duration) -> std::io::Result<bool> {
        let deadline = Instant::now() + time;
        let mut asked = false;
        let mut events: Vec<Event> = Vec::with_capacity(512);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = Timespec { tv_sec: 0, tv_nsec: left.subsec_nanos().into() };
            events.clear();
            epoll::wait(&self.poll, rustix::buffer::spare_capacity(&mut events), Some(&timeout))?;
            for event in &events {
                if event.data.u64() == u64::MAX {
                    return Ok(true);
                }
                self.follow(event.data.u64() as usize);
            }
            asked |= events.is_empty();
            if left.is_zero() || asked {
                return Ok(false);
            }
        }
    }

    fn follow(&mut self, index: usize) {
        let Some(Some((stream, established))) = self.connections.get_mut(index) else { return };
        let mut lives = true;
        if !*established {
            match rustix::io::write(&*stream, &self.text) {
                // A new socket's buffer takes a short text whole.
                Ok(_) => *established = true,
                Err(error) => lives = matches!(error, rustix::io::Errno::AGAIN | rustix::io::Errno::NOTCONN),
            }
        }
        let mut sink = [0; 16 * 1024];
        while lives {
            match stream.read(&mut sink) {
                Ok(0) => lives = false,
                Ok(_) => {}
                Err(error) => {
                    use std::io::ErrorKind::{NotConnected, WouldBlock};
                    lives = matches!(error.kind(), WouldBlock | NotConnected);
                    break;
                }
            }
        }
        if !lives {
            self.connections[index] = None;
            self.ended.push(index);
        }
    }
}
