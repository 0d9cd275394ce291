//! Many datagrams for one system call, in both directions.

use crate::tcp::{SegmentFrom, TcpSocket};
use quinn_udp::{RecvMeta, Transmit, UdpSocketState};
use std::io::{self, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use tokio::io::Interest;
use tokio::net::UdpSocket;

/// Bytes of one receive buffer: the kernel may coalesce datagrams of one sender up to this.
const BUFFER_BYTES: usize = 1 << 16;
/// Bytes of the part of a buffer that one segment of the TCP format takes.
const SEGMENT_BYTES: usize = 2048;
/// Most bytes of one coalesced send, IPv4's limit less its headers.
const MAX_SEND_BYTES: usize = 65_000;
/// Bytes asked for as buffers of a socket; the system's limit applies.
const SOCKET_BUFFER_BYTES: usize = 4 << 20;

/// What carries packets: UDP, with what the kernel can do for it, or the format of TCP.
#[derive(Debug)]
pub(super) enum BatchSocket {
    Udp { socket: UdpSocket, state: UdpSocketState },
    Tcp(TcpSocket),
}

/// Receive buffers.
pub(super) struct Received {
    buffers: Vec<u8>,
    meta: Vec<RecvMeta>,
    count: usize,
    /// Instead, of the TCP format: lengths, senders and addresses of the segments.
    segments: Vec<(usize, SegmentFrom)>,
}

impl std::fmt::Debug for Received {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Received").field("count", &self.count).finish_non_exhaustive()
    }
}

/// Packets to send, those of one size to one peer together.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    bytes: Vec<u8>,
    groups: Vec<Group>,
}

#[derive(Debug)]
struct Group {
    to: SocketAddr,
    from: Option<IpAddr>,
    start: usize,
    end: usize,
    segment: usize,
    count: usize,
    /// The last packet was shorter: nothing may follow it.
    closed: bool,
}

impl BatchSocket {
    pub(super) fn new(socket: std::net::UdpSocket) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        let options = socket2::SockRef::from(&socket);
        // What the system grants is enough to start with; a smaller buffer only means more lost packets.
        let _ = options.set_recv_buffer_size(SOCKET_BUFFER_BYTES);
        let _ = options.set_send_buffer_size(SOCKET_BUFFER_BYTES);
        let state = UdpSocketState::new((&socket).into())?;
        Ok(Self::Udp { socket: UdpSocket::from_std(socket)?, state })
    }

    pub(super) fn local_addr(&self) -> io::Result<SocketAddr> {
        match self {
            Self::Udp { socket, .. } => socket.local_addr(),
            Self::Tcp(socket) => Ok(socket.local_addr()),
        }
    }

    /// Turns a client's socket to another server.
    pub(super) fn turn_to(&self, server: SocketAddr) -> io::Result<()> {
        let Self::Udp { socket, .. } = self else { return Ok(()) };
        // What the old server refused is no news of the new one.
        let _ = socket.take_error();
        socket2::SockRef::from(socket).connect(&server.into())
    }

    /// Waits for datagrams.
    pub(super) async fn readable(&self) -> io::Result<()> {
        match self {
            Self::Udp { socket, .. } => socket.readable().await,
            Self::Tcp(socket) => socket.readable().await,
        }
    }

    /// Waits for the network's answer to an earlier datagram: that nobody takes it, for example.
    pub(super) async fn error(&self) -> Option<io::Error> {
        let Self::Udp { socket, .. } = self else { return std::future::pending().await };
        if let Err(error) = socket.ready(Interest::ERROR).await {
            return Some(error);
        }
        let mut found = None;
        // "Would block" makes the runtime wait for the next error; the error itself is taken off the socket.
        let _: io::Result<()> = socket.try_io(Interest::ERROR, || {
            found = socket.take_error()?;
            Err(io::ErrorKind::WouldBlock.into())
        });
        found
    }

    /// Takes what is there; `Ok(false)` where nothing is.
    pub(super) fn receive(&self, into: &mut Received) -> io::Result<bool> {
        into.count = 0;
        let (socket, state) = match self {
            Self::Udp { socket, state } => (socket, state),
            Self::Tcp(socket) => {
                into.segments.clear();
                socket.receive(&mut into.buffers, SEGMENT_BYTES, &mut into.segments)?;
                return Ok(!into.segments.is_empty());
            }
        };
        let result = socket.try_io(Interest::READABLE, || {
            let mut slices: Vec<_> = into.buffers.chunks_mut(BUFFER_BYTES).map(IoSliceMut::new).collect();
            state.recv(socket.into(), &mut slices, &mut into.meta)
        });
        match result {
            Ok(count) => {
                into.count = count;
                Ok(count > 0)
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Sends everything, waiting where the socket's buffer is full. Returns the number of sends that failed, and the
    /// last error.
    pub(super) async fn send(&self, outgoing: &mut Outgoing) -> (u64, Option<io::Error>) {
        let (mut failures, mut last) = (0, None);
        for group in &outgoing.groups {
            if let Err(error) = self.send_group(group, &outgoing.bytes[group.start..group.end]).await {
                failures += 1;
                last = Some(error);
            }
        }
        outgoing.bytes.clear();
        outgoing.groups.clear();
        (failures, last)
    }

    async fn send_group(&self, group: &Group, contents: &[u8]) -> io::Result<()> {
        let (socket, state) = match self {
            Self::Udp { socket, state } => (socket, state),
            Self::Tcp(socket) => {
                // A full queue of the interface is a lost packet like any other.
                let mut packets = contents.chunks(group.segment.max(1));
                return packets.try_for_each(|packet| socket.send(packet, group.to, group.from));
            }
        };
        let (mut rest, mut refused) = (contents, None);
        while !rest.is_empty() {
            // The kernel may have turned out to have less than it said.
            let together = (state.max_gso_segments().max(1) * group.segment).min(rest.len());
            let part = Transmit {
                destination: group.to,
                ecn: None,
                contents: &rest[..together],
                segment_size: Some(group.segment),
                src_ip: group.from,
            };
            let send = || state.try_send(socket.into(), &part);
            match socket.try_io(Interest::WRITABLE, send) {
                Ok(()) => rest = &rest[together..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => socket.writable().await?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The answer to an earlier datagram; this one has not been sent.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused && refused.is_none() => {
                    refused = Some(error);
                }
                Err(error) => return Err(error),
            }
        }
        refused.map_or(Ok(()), Err)
    }
}

impl Received {
    pub(super) fn new(buffers: usize) -> Self {
        Self {
            buffers: vec![0; buffers * BUFFER_BYTES],
            meta: vec![RecvMeta::default(); buffers],
            count: 0,
            segments: Vec::new(),
        }
    }

    /// Whether more may be waiting: every buffer was used.
    pub(super) fn is_full(&self) -> bool {
        self.count.max(self.segments.len()) >= self.meta.len()
    }

    /// The datagrams with their sender and the address that they were sent to.
    pub(super) fn datagrams(&self) -> impl Iterator<Item = (&[u8], SocketAddr, Option<IpAddr>)> {
        let coalesced = self.buffers.chunks(BUFFER_BYTES).zip(&self.meta).take(self.count);
        let datagrams = coalesced.flat_map(|(buffer, meta)| {
            let bytes = &buffer[..meta.len.min(buffer.len())];
            bytes.chunks(meta.stride.max(1)).map(|datagram| (datagram, meta.addr, meta.dst_ip))
        });
        let segments = self.buffers.chunks(SEGMENT_BYTES).zip(&self.segments);
        datagrams.chain(segments.map(|(buffer, (length, of))| (&buffer[..*length], of.from, Some(of.to))))
    }
}

impl Outgoing {
    pub(super) fn push(&mut self, packet: &[u8], to: SocketAddr, from: Option<IpAddr>) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(packet);
        let end = self.bytes.len();
        if let Some(group) = self.groups.last_mut()
            && !group.closed
            && (group.to, group.from) == (to, from)
            && packet.len() <= group.segment
            && end - group.start <= MAX_SEND_BYTES
            && group.count < 64
        {
            group.end = end;
            group.count += 1;
            group.closed = packet.len() < group.segment;
            return;
        }
        self.groups.push(Group { to, from, start, end, segment: packet.len(), count: 1, closed: false });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }
}
