//! Good clients in any number, at their own pace or as fast as they are answered, in one epoll loop: more of them, and a
//! slower server, than threads that wait for each answer could bear.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::net::SocketFlags;
use rustix::time::Timespec;

use super::good::whole;
use super::{FIRST_GOOD, GOOD, PAGES, RETRY, open, request, spawn, spread};
use crate::Error;

/// A client that has no answer after that gives up, and tries again on a new connection.
const PATIENCE: Duration = Duration::from_secs(5);
const EVENTS: usize = 512;
const READ_BYTES: usize = 16 * 1024;

/// Clients that come together.
#[derive(Clone, Copy, Debug)]
pub struct Group {
    /// Each has an address of its own.
    pub clients: u32,
    /// When the first of them comes; all have come one `every` later.
    pub from: Duration,
    /// Time from one request of a client to its next; who is answered later asks at once. Zero: as soon as it is answered.
    pub every: Duration,
}

/// What one group got.
#[derive(Clone, Debug, Default)]
pub struct Served {
    /// Answers 200 to each client that came after the time that counts had begun.
    pub answers: Vec<u64>,
    /// How long each of them took, in milliseconds.
    pub latencies_ms: Vec<f64>,
    /// Clients that were refused, from the beginning on: by another answer, or by the end of their connection.
    pub refused: u64,
    /// Requests that had no answer in time.
    pub given_up: u64,
}

/// Lets groups of clients ask for `time`, and counts what comes after `counts_from`.
///
/// # Errors
/// When the load's core is missing, or the kernel gives no descriptors.
pub fn surge(
    server: SocketAddr,
    groups: &[Group],
    counts_from: Duration,
    time: Duration,
) -> Result<Vec<Served>, Error> {
    let groups = groups.to_vec();
    let thread = spawn(move || Surge::new(server, &groups, counts_from)?.run(time))?;
    let failed = || Error::Load(io::Error::other("a thread of the load has ended by a panic"));
    thread.join().map_err(|_| failed())?.map_err(Error::Load)
}

struct Client {
    group: usize,
    /// Which of its group it is, and of all.
    index: usize,
    number: u32,
    stream: Option<TcpStream>,
    answer: Vec<u8>,
    asked: Option<Instant>,
    /// The request has been sent.
    sent: bool,
    /// When it would ask next if it were answered by then.
    due: Instant,
    turn: usize,
    was_refused: bool,
}

struct Surge {
    server: SocketAddr,
    began: Instant,
    counts_from: Duration,
    every: Vec<Duration>,
    poll: std::os::fd::OwnedFd,
    clients: Vec<Client>,
    /// When something is to be done about a client: its next request, or the end of its patience.
    timers: BinaryHeap<Reverse<(Instant, usize)>>,
    served: Vec<Served>,
    buffer: Vec<u8>,
}

impl Surge {
    fn new(server: SocketAddr, groups: &[Group], counts_from: Duration) -> io::Result<Self> {
        let began = Instant::now();
        let mut clients = Vec::new();
        for (group, of) in groups.iter().enumerate() {
            for index in 0..of.clients {
                clients.push(Client {
                    group,
                    index: index as usize,
                    number: clients.len() as u32,
                    stream: None,
                    answer: Vec::new(),
                    asked: None,
                    sent: false,
                    due: began + of.from + of.every * index / of.clients.max(1),
                    turn: index as usize,
                    was_refused: false,
                });
            }
        }
        let timers = clients.iter().enumerate().map(|(at, client)| Reverse((client.due, at))).collect();
        let served =
            groups.iter().map(|of| Served { answers: vec![0; of.clients as usize], ..Served::default() });
        Ok(Self {
            server,
            began,
            counts_from,
            every: groups.iter().map(|of| of.every).collect(),
            poll: epoll::create(CreateFlags::CLOEXEC)?,
            clients,
            timers,
            served: served.collect(),
            buffer: vec![0; READ_BYTES],
        })
    }

    fn run(mut self, time: Duration) -> io::Result<Vec<Served>> {
        let end = self.began + time;
        let mut events: Vec<Event> = Vec::with_capacity(EVENTS);
        loop {
            let now = Instant::now();
            if now >= end {
                return Ok(self.served);
            }
            while let Some(Reverse((at, index))) = self.timers.peek().copied()
                && at <= now
            {
                self.timers.pop();
                self.due(index, now)?;
            }
            let next = self.timers.peek().map_or(end, |Reverse((at, _))| (*at).min(end));
            let wait = next.saturating_duration_since(Instant::now());
            let wait = Timespec { tv_sec: wait.as_secs().cast_signed(), tv_nsec: wait.subsec_nanos().into() };
            events.clear();
            epoll::wait(&self.poll, rustix::buffer::spare_capacity(&mut events), Some(&wait))?;
            for event in &events {
                self.go_on(usize::try_from(event.data.u64()).unwrap_or(usize::MAX))?;
            }
        }
    }

    /// A client's time has come: to ask, or to give up.
    fn due(&mut self, index: usize, now: Instant) -> io::Result<()> {
        let client = &mut self.clients[index];
        match client.asked {
            None if client.due <= now => self.ask(index),
            Some(asked) if now >= asked + PATIENCE => {
                self.served[client.group].given_up += 1;
                client.stream = None;
                self.rest(index)
            }
            // The timer of something that is over.
            _ => Ok(()),
        }
    }

    fn ask(&mut self, index: usize) -> io::Result<()> {
        let now = Instant::now();
        let client = &mut self.clients[index];
        (client.asked, client.sent) = (Some(now), false);
        client.answer.clear();
        self.timers.push(Reverse((now + PATIENCE, index)));
        if client.stream.is_some() {
            return self.go_on(index);
        }
        let source = spread(FIRST_GOOD, client.number);
        let stream = open(source, self.server, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
        // It tells when it is connected, and then whenever there is something to read.
        let interest = EventFlags::IN | EventFlags::OUT | EventFlags::ET;
        epoll::add(&self.poll, &stream, EventData::new_u64(index as u64), interest)?;
        client.stream = Some(stream);
        Ok(())
    }

    /// Sends what is to be sent and reads what has come.
    fn go_on(&mut self, index: usize) -> io::Result<()> {
        let Some(client) = self.clients.get_mut(index) else { return Ok(()) };
        let Some(stream) = client.stream.as_mut() else { return Ok(()) };
        if client.asked.is_some() && !client.sent {
            client.turn += 1;
            let text = request(self.server, &format!("{GOOD}{}", client.turn * 7 % PAGES), "");
            // So few bytes are taken whole or not at all.
            match stream.write_all(text.as_bytes()) {
                Ok(()) => client.sent = true,
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected) => {
                    return Ok(());
                }
                Err(_) => return self.refused(index),
            }
        }
        loop {
            match stream.read(&mut self.buffer) {
                Ok(0) => return self.refused(index),
                Ok(length) => client.answer.extend_from_slice(&self.buffer[..length]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => return self.refused(index),
            }
        }
        match whole(&client.answer) {
            Some(true) => self.answered(index),
            Some(false) => self.refused(index),
            None => Ok(()),
        }
    }

    fn answered(&mut self, index: usize) -> io::Result<()> {
        let client = &mut self.clients[index];
        let Some(asked) = client.asked else { return Ok(()) };
        if self.began.elapsed() >= self.counts_from {
            let served = &mut self.served[client.group];
            served.answers[client.index] += 1;
            served.latencies_ms.push(asked.elapsed().as_secs_f64() * 1e3);
        }
        self.rest(index)
    }

    fn refused(&mut self, index: usize) -> io::Result<()> {
        let client = &mut self.clients[index];
        client.stream = None;
        if client.asked.is_none() {
            // The end of a connection on which nothing was asked; the next request opens another.
            return Ok(());
        }
        if !client.was_refused {
            client.was_refused = true;
            self.served[client.group].refused += 1;
        }
        self.rest(index)
    }

    /// Nothing more is expected until the next request is due.
    fn rest(&mut self, index: usize) -> io::Result<()> {
        let now = Instant::now();
        let client = &mut self.clients[index];
        client.asked = None;
        client.answer.clear();
        // Who is late does not make up for what it could not ask; who was refused comes again at its usual pace.
        client.due = (client.due + self.every[client.group]).max(now);
        if client.stream.is_none() {
            client.due = client.due.max(now + RETRY);
        }
        self.timers.push(Reverse((client.due, index)));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// Answers every request on every connection in the same way, or ends the connection.
    fn server(answer: &'static [u8]) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                std::thread::spawn(move || {
                    let mut buffer = [0; 4096];
                    while let Ok(1..) = stream.read(&mut buffer) {
                        if answer.is_empty() || stream.write_all(answer).is_err() {
                            return;
                        }
                    }
                });
            }
        });
        address
    }

    fn visited(answer: &'static [u8]) -> Served {
        let group = Group { clients: 3, from: Duration::ZERO, every: Duration::from_millis(20) };
        let time = Duration::from_secs(4);
        surge(server(answer), &[group], Duration::ZERO, time).unwrap().remove(0)
    }

    #[test]
    fn clients_of_a_server_that_answers_are_served_at_their_own_pace() {
        let served = visited(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na");
        // At most one each 20 ms, and one more at the start.
        assert!(served.answers.iter().all(|answers| (1..=201).contains(answers)), "{served:?}");
        assert_eq!((served.refused, served.given_up), (0, 0));
        assert_eq!(served.latencies_ms.len() as u64, served.answers.iter().sum::<u64>());
    }

    #[test]
    fn clients_that_are_answered_otherwise_or_not_at_all_count_as_refused_once() {
        for answer in [&b"HTTP/1.1 429 No\r\nContent-Length: 0\r\n\r\n"[..], b""] {
            let served = visited(answer);
            assert_eq!((served.refused, served.answers.iter().sum::<u64>()), (3, 0));
        }
    }
}
