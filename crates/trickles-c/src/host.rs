//! A listening descriptor: a UDP socket, the server's core, and the minisockets that have not ended.

use crate::system;
use libc::c_int;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::time::{SystemTime, UNIX_EPOCH};
use tidegate_trickles::keys::KeyRing;
use tidegate_trickles::server::{self, Config, Event, EventKind, Minisocket, Server, install};
use tidegate_trickles::udp;

/// Largest datagram that is received.
const DATAGRAM_BYTES: usize = 1 << 16;
/// Detached minisockets and installed events that are kept; more are refused.
const MAX_KEPT: usize = 1 << 16;

/// `msk_input` with its bytes.
pub(crate) struct OwnedInput {
    pub(crate) request: u32,
    pub(crate) consumed: u64,
    pub(crate) data: Vec<u8>,
    pub(crate) last: bool,
    pub(crate) opaque: Vec<u8>,
}

/// `msk_want` with its bytes.
pub(crate) struct OwnedWant {
    pub(crate) request: u32,
    pub(crate) offset: u64,
    pub(crate) length: u32,
    pub(crate) valid: Range<u64>,
    pub(crate) opaque: Vec<u8>,
}

/// `minisock` of the header.
pub struct MinisocketC {
    pub(crate) socket: Minisocket,
    pub(crate) inputs: Vec<OwnedInput>,
    pub(crate) wants: Vec<OwnedWant>,
    kind: EventKind,
    peer: SocketAddr,
    datagram: Vec<u8>,
}

/// See the module.
pub(crate) struct Host {
    socket: UdpSocket,
    server: Server,
    /// By address, which is what C programs hold; whether it is detached.
    live: HashMap<usize, (Owned, bool)>,
    installed: VecDeque<(Vec<u8>, SocketAddr)>,
    buffer: Vec<u8>,
}

/// A minisocket that C programs point to: allocated here, freed here.
struct Owned(*mut MinisocketC);

// SAFETY: it is the only owner of what it points to, which may be sent to another thread.
unsafe impl Send for Owned {}

impl Owned {
    fn new(msk: MinisocketC) -> Self {
        Self(Box::into_raw(Box::new(msk)))
    }

    fn into_inner(self) -> MinisocketC {
        let pointer = self.0;
        std::mem::forget(self);
        // SAFETY: from `Box::into_raw`, and not freed by a drop of `self`.
        *unsafe { Box::from_raw(pointer) }
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: from `Box::into_raw`, and freed only here or in `into_inner`, which forgets `self`.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

fn now_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

impl MinisocketC {
    fn new(event: &Event<'_>, socket: Minisocket, datagram: &[u8]) -> Self {
        Self {
            socket,
            inputs: event
                .inputs
                .iter()
                .map(|input| OwnedInput {
                    request: input.request,
                    consumed: input.consumed,
                    data: input.data.to_vec(),
                    last: input.last,
                    opaque: input.opaque.to_vec(),
                })
                .collect(),
            wants: event
                .wants
                .iter()
                .map(|want| OwnedWant {
                    request: want.request,
                    offset: want.offset,
                    length: want.length,
                    valid: want.valid_start..want.valid_end,
                    opaque: want.opaque.to_vec(),
                })
                .collect(),
            kind: event.kind,
            peer: event.peer,
            datagram: datagram.to_vec(),
        }
    }

    pub(crate) fn kind(&self) -> c_int {
        match self.kind {
            EventKind::Open => 1,
            EventKind::Request => 2,
            EventKind::Close => 3,
        }
    }

    pub(crate) fn packet(&self, pkt: c_int) -> Result<usize, c_int> {
        usize::try_from(pkt).ok().filter(|&pkt| pkt < self.socket.packets()).ok_or(libc::EINVAL)
    }

    /// Puts `data` into the wants' packets in order; returns how much of it.
    pub(crate) fn fill_wants(&mut self, data: &[u8]) -> usize {
        let mut sent = 0;
        for (packet, want) in self.wants.iter().enumerate().take(self.socket.packets()) {
            let rest = &data[sent..];
            let part = &rest[..rest.len().min(want.length as usize)];
            let taken = self.socket.send(packet, want.request, want.offset, part);
            sent += taken;
            if taken < part.len() {
                break;
            }
        }
        sent
    }

    pub(crate) fn set_continuation(
        &mut self,
        pkt: c_int,
        kind: u32,
        request: u32,
        (start, end): (u64, u64),
        opaque: &[u8],
    ) -> Result<(), c_int> {
        let packet = self.packet(pkt)?;
        let sound = start <= end && opaque.len() <= tidegate_trickles::user::MAX_OPAQUE_BYTES;
        let set = match kind {
            1 if sound => self.socket.set_output_continuation(packet, request, (start, end), opaque),
            2 if opaque.len() <= tidegate_trickles::user::MAX_OPAQUE_BYTES => {
                self.socket.set_input_continuation(packet, request, start, opaque)
            }
            _ => return Err(libc::EINVAL),
        };
        set.map_err(|_| libc::ENOSPC)
    }
}

impl Host {
    pub(crate) fn listen(address: &str, key_file: &str, shared: bool) -> Result<Self, c_int> {
        let address = address.parse().map_err(|_| libc::EINVAL)?;
        let text = std::fs::read_to_string(key_file).map_err(|error| system(&error))?;
        let keys = KeyRing::from_text(&text).map_err(|_| libc::EINVAL)?;
        let socket = udp::bind(address, shared).map_err(|error| system(&error))?;
        socket.set_nonblocking(true).map_err(|error| system(&error))?;
        Ok(Self {
            socket,
            server: Server::new(Config::default(), keys, now_ms()),
            live: HashMap::new(),
            installed: VecDeque::new(),
            buffer: vec![0; DATAGRAM_BYTES],
        })
    }

    pub(crate) fn descriptor(&self) -> c_int {
        self.socket.as_raw_fd()
    }

    pub(crate) fn port(&self) -> Result<u16, c_int> {
        self.socket.local_addr().map(|address| address.port()).map_err(|error| system(&error))
    }

    /// Drops what was neither answered nor detached, and takes up to `max` new events.
    pub(crate) fn events(&mut self, max: usize, timeout_ms: c_int) -> Result<Vec<*mut MinisocketC>, c_int> {
        self.live.retain(|_, (_, detached)| *detached);
        let mut events = Vec::new();
        while events.len() < max {
            let Some((datagram, peer)) = self.installed.pop_front() else { break };
            events.extend(self.receive(&datagram, peer));
        }
        if events.is_empty() {
            self.wait(timeout_ms)?;
        }
        // A flood of refused datagrams must not keep the caller for ever.
        for _ in 0..max.saturating_mul(4) {
            if events.len() == max {
                break;
            }
            let mut buffer = std::mem::take(&mut self.buffer);
            let received = self.socket.recv_from(&mut buffer);
            if let Ok((length, peer)) = received {
                events.extend(self.receive(&buffer[..length], peer));
            }
            self.buffer = buffer;
            match received {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Events that were taken off the socket are given out before its error is.
                Err(error) if events.is_empty() => return Err(system(&error)),
                Err(_) => break,
                Ok(_) => {}
            }
        }
        Ok(events)
    }

    fn wait(&self, timeout_ms: c_int) -> Result<(), c_int> {
        let mut poll = libc::pollfd { fd: self.descriptor(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one element, valid for reads and writes.
        match unsafe { libc::poll(&raw mut poll, 1, timeout_ms) } {
            0.. => Ok(()),
            _ => Err(system(&io::Error::last_os_error())),
        }
    }

    fn receive(&mut self, datagram: &[u8], peer: SocketAddr) -> Option<*mut MinisocketC> {
        match self.server.receive(datagram, peer, now_ms()) {
            Ok(event) => {
                let (event, socket) = event?;
                let msk = Owned::new(MinisocketC::new(&event, socket, datagram));
                let pointer = msk.0;
                self.live.insert(pointer.addr(), (msk, false));
                Some(pointer)
            }
            Err(refusal) => {
                if let Some((connection, code)) = refusal.answer() {
                    let mut notice = Vec::new();
                    tidegate_trickles::wire::Answer::encode_refused(connection, code, &mut notice);
                    // A lost notice is asked for again.
                    let _ = self.socket.send_to(&notice, peer);
                }
                None
            }
        }
    }

    /// A minisocket that has not ended. What is not one of this descriptor's is never followed.
    pub(crate) fn minisocket(&mut self, msk: *mut MinisocketC) -> Result<&mut MinisocketC, c_int> {
        let (owned, _) = self.live.get_mut(&msk.addr()).ok_or(libc::EINVAL)?;
        // SAFETY: from `Box::into_raw` and alive while it is in the table, which is borrowed for as long.
        Ok(unsafe { &mut *owned.0 })
    }

    /// Ends a minisocket without an answer.
    pub(crate) fn take(&mut self, msk: *mut MinisocketC) -> Result<MinisocketC, c_int> {
        self.live.remove(&msk.addr()).map(|(msk, _)| msk.into_inner()).ok_or(libc::EINVAL)
    }

    /// Sends the packets of a minisocket, which ends.
    pub(crate) fn finish(&mut self, msk: *mut MinisocketC) -> Result<(), c_int> {
        let msk = self.take(msk)?;
        let (socket, peer) = (&self.socket, msk.peer);
        msk.socket.finish(&mut |packet: &[u8]| {
            // A full buffer is a lost packet like any other.
            let _ = socket.send_to(packet, peer);
        });
        Ok(())
    }

    pub(crate) fn detach(&mut self, msk: *mut MinisocketC) -> Result<(), c_int> {
        if self.live.values().filter(|(_, detached)| *detached).count() >= MAX_KEPT {
            return Err(libc::ENOSPC);
        }
        self.live.get_mut(&msk.addr()).map(|(_, detached)| *detached = true).ok_or(libc::EINVAL)
    }

    pub(crate) fn extract(&mut self, msk: *mut MinisocketC) -> Result<Vec<u8>, c_int> {
        let msk = self.take(msk)?;
        Ok(server::extract(&msk.datagram, msk.peer, self.server.keys()))
    }

    pub(crate) fn install(&mut self, event: &[u8]) -> Result<(), c_int> {
        let (datagram, peer) = install(event, self.server.keys()).map_err(|_| libc::EBADMSG)?;
        if self.installed.len() == MAX_KEPT {
            return Err(libc::ENOSPC);
        }
        self.installed.push_back((datagram.to_vec(), peer));
        Ok(())
    }
}
