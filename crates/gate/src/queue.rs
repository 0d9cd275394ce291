//! Prioritized listen queues (the paper's section 3.2): one listening socket, and so one accept queue and one backlog,
//! per class; accepted strictly from the highest class.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use socket2::{Domain, Socket, Type};
use tidegate_core::Verdict;
use tidegate_policy::{Class, MAX_CLASSES};

use crate::GateError;
use crate::abi;
use crate::gate::{Gate, Queues};
use crate::maps::Maps;

/// A connection from a prioritized listen queue.
#[derive(Debug)]
pub struct Accepted {
    /// The connection.
    pub stream: TcpStream,
    /// The client.
    pub peer: SocketAddr,
    /// Its class; 0 is served first.
    pub class: Class,
}

/// The listening sockets of one address, the highest class first.
#[derive(Debug)]
pub struct ClassListeners {
    listeners: Vec<TcpListener>,
}

impl ClassListeners {
    /// Binds `classes` sockets to one address. Port 0 lets the kernel choose one port for all.
    pub fn bind(address: SocketAddr, classes: usize, backlog: u32) -> Result<Self, GateError> {
        if !(1..=MAX_CLASSES).contains(&classes) {
            return Err(GateError::Classes { classes, max: MAX_CLASSES });
        }
        let mut listeners: Vec<TcpListener> = Vec::with_capacity(classes);
        for _ in 0..classes {
            // The first may have been given its port by the kernel.
            let address = listeners.first().map_or(Ok(address), TcpListener::local_addr);
            let bound = address.and_then(|address| listen(address, backlog));
            listeners.push(bound.map_err(GateError::io("listening"))?);
        }
        Ok(Self { listeners })
    }

    /// Duplicates of the sockets.
    pub fn try_clone(&self) -> io::Result<Self> {
        let listeners: io::Result<_> = self.listeners.iter().map(TcpListener::try_clone).collect();
        Ok(Self { listeners: listeners? })
    }

    /// The sockets, the highest class first, for a server of its own.
    pub fn into_sockets(self) -> Vec<TcpListener> {
        self.listeners
    }

    /// The sockets, the highest class first: for readiness. They do not block.
    pub fn sockets(&self) -> &[TcpListener] {
        &self.listeners
    }

    /// The address of all of them.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listeners.first().ok_or(io::ErrorKind::NotFound)?.local_addr()
    }

    /// Accepts from the highest class that has a connection; `None`: nobody waits.
    pub fn try_accept(&self) -> io::Result<Option<Accepted>> {
        for (class, listener) in (0..).zip(&self.listeners) {
            match accept_now(listener)? {
                None => {}
                Some((stream, peer)) => return Ok(Some(Accepted { stream, peer, class })),
            }
        }
        Ok(None)
    }

    /// As [`Self::try_accept`], but waits for somebody. After `timeout`, `None`.
    pub fn accept(&self, timeout: Option<Duration>) -> io::Result<Option<Accepted>> {
        match self.try_accept()? {
            None => {
                wait(&self.listeners, timeout)?;
                self.try_accept()
            }
            some => Ok(some),
        }
    }

    /// Hands duplicates of the sockets to another process, which gets them by [`Self::receive`]. While this one keeps
    /// its own, clients that connect during a restart of the other wait instead of being refused.
    pub fn pass(&self, to: &UnixStream) -> io::Result<()> {
        let sockets: Vec<_> = self.listeners.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_CLASSES))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !ancillary.push(SendAncillaryMessage::ScmRights(&sockets)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // One byte carries them: with a stream, ancillary data needs a byte to ride on.
        let count = [sockets.len() as u8];
        sendmsg(to, &[IoSlice::new(&count)], &mut ancillary, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// Gets sockets from another process's [`Self::pass`].
    pub fn receive(from: &UnixStream) -> io::Result<Self> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_CLASSES))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut count = [0u8];
        let received =
            recvmsg(from, &mut [IoSliceMut::new(&mut count)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
        if received.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut sockets: Vec<OwnedFd> = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                sockets.extend(rights);
            }
        }
        if sockets.is_empty() || sockets.len() != usize::from(count[0]) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Self { listeners: sockets.into_iter().map(TcpListener::from).collect() })
    }
}

/// A prioritized listen queue: owns the listening sockets and has new connections steered to the one of their class.
/// Where that cannot be had, there is one socket, and connections are put in order after they are accepted.
#[derive(Debug)]
pub struct ListenQueue {
    listeners: ClassListeners,
    mode: Mode,
}

#[derive(Debug)]
enum Mode {
    Steered { registration: Registration },
    Ordered(Box<Mutex<Ordered>>),
}

/// An entry of the map `queues`, for as long as it lives.
#[derive(Debug)]
struct Registration {
    queues: Arc<Queues>,
    number: u32,
    endpoint: abi::tg_endpoint,
}

impl Drop for Registration {
    fn drop(&mut self) {
        // Without its listeners the entry has no effect; there is nobody to tell about a failure.
        let _ = self.queues.maps().remove("queues", &self.endpoint);
        self.queues.release(self.number);
    }
}

/// Accepted connections by class.
#[derive(Debug)]
struct Ordered {
    waiting: [VecDeque<(TcpStream, SocketAddr)>; MAX_CLASSES],
    bound: usize,
    refused: u64,
    shed: u64,
}

/// What a queue without steering has refused.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct QueueCounts {
    /// Connections that violated a rule or came from a blocked address.
    pub refused: u64,
    /// Connections of the lowest class closed because the queue was full.
    pub shed: u64,
}

impl ListenQueue {
    /// Listens on `address` with `classes` accept queues of `backlog` connections each. Returns with the queue why
    /// connections are not steered by the kernel, if they are not.
    pub fn bind(
        gate: &Gate,
        address: SocketAddr,
        classes: usize,
        backlog: u32,
    ) -> Result<(Self, Option<String>), GateError> {
        let why = match gate.queues() {
            Ok(queues) => {
                let listeners = ClassListeners::bind(address, classes, backlog)?;
                let registration = register(&queues, &listeners)?;
                return Ok((Self { listeners, mode: Mode::Steered { registration } }, None));
            }
            Err(why) => why,
        };
        let ordered =
            Ordered { waiting: Default::default(), bound: backlog.max(1) as usize, refused: 0, shed: 0 };
        let listeners = ClassListeners::bind(address, 1, backlog)?;
        Ok((Self { listeners, mode: Mode::Ordered(Box::new(Mutex::new(ordered))) }, Some(why)))
    }

    /// As [`Self::bind`], of sockets that listen already, the highest class first; `None`: the kernel cannot steer
    /// connections to them.
    pub fn adopt(gate: &Gate, sockets: Vec<TcpListener>) -> Result<Option<Self>, GateError> {
        let Ok(queues) = gate.queues() else { return Ok(None) };
        let listeners = ClassListeners { listeners: sockets };
        let registration = register(&queues, &listeners)?;
        Ok(Some(Self { listeners, mode: Mode::Steered { registration } }))
    }

    /// The listening sockets: to wait on, or to pass to a server.
    pub fn listeners(&self) -> &ClassListeners {
        &self.listeners
    }

    /// Whether the kernel puts connections into the queues of their classes now.
    pub fn is_steered(&self) -> bool {
        matches!(&self.mode, Mode::Steered { registration } if registration.queues.is_attached())
    }

    /// Accepts from the highest class that has a connection; `None`: nobody waits.
    pub fn try_accept(&self, gate: &Gate) -> io::Result<Option<Accepted>> {
        match &self.mode {
            Mode::Steered { .. } => self.listeners.try_accept(),
            Mode::Ordered(ordered) => {
                let mut ordered = ordered.lock().unwrap_or_else(PoisonError::into_inner);
                ordered.fill(&self.listeners.listeners[0], gate)?;
                Ok(ordered.take())
            }
        }
    }

    /// What was refused after the handshake; zero with steering, where the kernel refuses before it.
    pub fn counts(&self) -> QueueCounts {
        match &self.mode {
            Mode::Steered { .. } => QueueCounts::default(),
            Mode::Ordered(ordered) => {
                let ordered = ordered.lock().unwrap_or_else(PoisonError::into_inner);
                QueueCounts { refused: ordered.refused, shed: ordered.shed }
            }
        }
    }
}

impl Ordered {
    /// Takes every connection that waits in the kernel, so that a high class never stands behind a low one there.
    fn fill(&mut self, listener: &TcpListener, gate: &Gate) -> io::Result<()> {
        // Bounded: a flood of connections must not keep the caller here.
        for _ in 0..self.bound {
            let Some((stream, peer)) = accept_now(listener)? else { break };
            let decision = gate.on_connect(peer, stream.local_addr()?);
            if decision.verdict != Verdict::Continue {
                self.refused += 1;
                continue;
            }
            let class = usize::from(decision.class).min(MAX_CLASSES - 1);
            self.waiting[class].push_back((stream, peer));
            if self.waiting.iter().map(VecDeque::len).sum::<usize>() > self.bound {
                // The youngest of the lowest class: it has waited least.
                if let Some(lowest) = self.waiting.iter_mut().rev().find(|queue| !queue.is_empty()) {
                    lowest.pop_back();
                    self.shed += 1;
                }
            }
        }
        Ok(())
    }

    fn take(&mut self) -> Option<Accepted> {
        let (class, (stream, peer)) =
            (0..).zip(&mut self.waiting).find_map(|(class, queue)| Some((class, queue.pop_front()?)))?;
        Some(Accepted { stream, peer, class })
    }
}

fn listen(address: SocketAddr, backlog: u32) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    // All classes are bound to one address; which of them gets a connection is the program's choice.
    socket.set_reuse_port(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    socket.set_nonblocking(true)?;
    // Accepted sockets inherit this, which saves a system call for each.
    socket.set_tcp_nodelay(true)?;
    socket.bind(&address.into())?;
    socket.listen(i32::try_from(backlog).unwrap_or(i32::MAX))?;
    Ok(socket.into())
}

/// Errors of a connection that ended while it waited are not the listener's.
fn accept_now(listener: &TcpListener) -> io::Result<Option<(TcpStream, SocketAddr)>> {
    loop {
        match listener.accept() {
            Ok(accepted) => return Ok(Some(accepted)),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock => return Ok(None),
                io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted => {}
                _ => return Err(error),
            },
        }
    }
}

fn wait(listeners: &[TcpListener], timeout: Option<Duration>) -> io::Result<()> {
    let mut waited: Vec<PollFd<'_>> =
        listeners.iter().map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
    let timeout = timeout.map(Timespec::try_from).transpose().map_err(|_| io::ErrorKind::InvalidInput)?;
    match poll(&mut waited, timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn register(queues: &Arc<Queues>, listeners: &ClassListeners) -> Result<Registration, GateError> {
    let address = listeners.local_addr().map_err(GateError::io("listening"))?;
    let number = queues.reserve().ok_or(GateError::Full {
        what: "table of prioritized listen queues",
        max: abi::TG_MAX_QUEUES,
        remedy: "listen on a wildcard address instead of many single ones",
    })?;
    let registration = Registration { queues: Arc::clone(queues), number, endpoint: endpoint(address) };
    let maps: &Maps = queues.maps();
    for class in 0..MAX_CLASSES {
        // Rules may name more classes than there are queues: those wait in the last.
        let listener = &listeners.listeners[class.min(listeners.listeners.len() - 1)];
        let key = number * abi::TG_MAX_CLASSES + class as u32;
        maps.write("listeners", &key, &(listener.as_raw_fd() as u64))?;
    }
    maps.write("queues", &registration.endpoint, &number)?;
    Ok(registration)
}

fn endpoint(address: SocketAddr) -> abi::tg_endpoint {
    let octets = match address.ip() {
        ip if ip.is_unspecified() => Ipv6Addr::UNSPECIFIED.octets(),
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    abi::tg_endpoint { address: octets, port: address.port(), reserved: 0 }
}
