//! A "socket" of the TCP format: AF_PACKET in, raw IP out, and a firewall rule between us and the kernel's TCP.

use super::PacketSource;
use super::segment::{ACK, PSH, RST, SYN, Segment};
use crate::sealed::{KIND_FIRST, KIND_HELLO};
use crate::wire::VERSION;
use socket2::{Domain, Protocol, SockAddr, SockFilter, Socket, Type};
use std::collections::HashMap;
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use tokio::io::unix::AsyncFd;
use tokio::net::UdpSocket;

/// Every IP packet, in the byte order that the kernel takes.
const ETH_P_ALL: i32 = 0x0003_u16.to_be() as i32;
/// IPPROTO_RAW: the IP header comes with the packet.
const RAW: i32 = 255;
/// Bytes asked for as receive buffer.
const RECEIVE_BYTES: usize = 8 << 20;
/// Segments taken at once.
const BATCH: usize = 64;
/// Second byte of a packet that opens a connection.
const KIND_OPEN: u8 = 1;

/// What the segments of one batch said about sequence numbers, to be answered in kind.
type Numbers = HashMap<SocketAddr, (u32, u32, bool)>;

/// The marked segments to one port.
#[derive(Debug)]
pub(crate) struct TcpSocket {
    packets: UdpSocket,
    /// Comes before `packets`.
    source: Option<AsyncFd<Polled>>,
    send_v4: Socket,
    send_v6: Socket,
    local: SocketAddr,
    is_client: bool,
    numbers: Mutex<Numbers>,
    /// Of a client: its next sequence number, and what it acknowledges.
    own: Mutex<(u32, u32)>,
    /// Of a client: whom it sends to.
    server: Mutex<Option<SocketAddr>>,
    _rule: Rule,
    _port: Socket,
}

/// A source as the runtime waits for it: with a descriptor of its own, which stays open.
#[derive(Debug)]
struct Polled {
    source: Box<dyn PacketSource>,
    poll: OwnedFd,
}

impl AsRawFd for Polled {
    fn as_raw_fd(&self) -> RawFd {
        self.poll.as_raw_fd()
    }
}

/// A received segment.
pub(crate) struct Received {
    pub(crate) from: SocketAddr,
    pub(crate) to: IpAddr,
}

impl TcpSocket {
    /// Takes the marked segments to `local`; the address may be unspecified, and the port 0 for one that is free.
    pub(crate) fn bind(local: SocketAddr, is_client: bool) -> io::Result<Self> {
        // Keeps the kernel from giving the port to somebody else; nothing is ever accepted on it. A server's port may
        // belong to a listener of the kernel's TCP: that is left alone.
        let port = Socket::new(Domain::for_address(local), Type::STREAM, Some(Protocol::TCP))?;
        let mut address = local;
        if local.port() == 0 {
            port.bind(&local.into())?;
            let bound = port.local_addr()?.as_socket().ok_or(io::ErrorKind::AddrNotAvailable)?;
            address.set_port(bound.port());
        }
        let rule = Rule::install(address.port(), is_client)?;
        let packets = Socket::new(Domain::PACKET, Type::DGRAM, Some(Protocol::from(ETH_P_ALL)))?;
        packets.attach_filter(&to_port(address.port()))?;
        let _ = packets.set_recv_buffer_size(RECEIVE_BYTES);
        packets.set_nonblocking(true)?;
        let raw = |domain| -> io::Result<Socket> {
            let socket = Socket::new(domain, Type::RAW, Some(Protocol::from(RAW)))?;
            socket.set_nonblocking(true)?;
            Ok(socket)
        };
        Ok(Self {
            // The runtime wants a type to wait with; only what every socket has is used.
            packets: UdpSocket::from_std(packets.into())?,
            source: None,
            send_v4: raw(Domain::IPV4)?,
            send_v6: raw(Domain::IPV6)?,
            local: address,
            is_client,
            numbers: Mutex::default(),
            server: Mutex::default(),
            own: Mutex::new((
                u32::from_be_bytes(crate::udp::random_block()?[..4].try_into().unwrap_or_default()),
                0,
            )),
            _rule: rule,
            _port: port,
        })
    }

    /// Takes packets of `source` too, and first.
    pub(crate) fn add_source(&mut self, source: Box<dyn PacketSource>) -> io::Result<()> {
        let poll = source.poll_fd().try_clone_to_owned()?;
        #[expect(unsafe_code, reason = "the runtime cannot know that a descriptor stays open")]
        // SAFETY: `Polled` owns the descriptor, and nothing closes or replaces it before `Polled` is dropped.
        let source = unsafe { AsyncFd::register(Polled { source, poll }) }?;
        self.source = Some(source);
        Ok(())
    }

    pub(crate) fn local_addr(&self) -> SocketAddr {
        self.local
    }

    pub(crate) async fn readable(&self) -> io::Result<()> {
        let Some(source) = &self.source else { return self.packets.readable().await };
        tokio::select! {
            ready = source.readable() => ready.map(|mut ready| ready.retain_ready()),
            ready = self.packets.readable() => ready,
        }
    }

    /// Takes segments, each with its payload at the start of a chunk of `buffers`. `ConnectionRefused` where a plain
    /// TCP server answers in ours' stead.
    pub(crate) fn receive(
        &self,
        buffers: &mut [u8],
        chunk: usize,
        each: &mut Vec<(usize, Received)>,
    ) -> io::Result<()> {
        let mut numbers = lock(&self.numbers);
        numbers.clear();
        let mut packet = [0; 2048];
        for buffer in buffers.chunks_mut(chunk).take(BATCH) {
            let (length, received) = loop {
                let read = self.next(&mut packet);
                let length = match read {
                    Ok(length) => length,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                    Err(error) => return Err(error),
                };
                let Ok(segment) = Segment::decode(&packet[..length]) else { continue };
                let ours = segment.to.port() == self.local.port()
                    && (self.local.ip().is_unspecified() || self.local.ip() == segment.to.ip());
                if !ours || segment.payload.len() > buffer.len() {
                    continue;
                }
                if !segment.marked {
                    let of_server = self.is_client && *lock(&self.server) == Some(segment.from);
                    if !of_server || segment.flags & (RST | SYN) == 0 {
                        continue;
                    }
                    // What came before it is not lost: the server answers the next packet in the same way.
                    return if each.is_empty() {
                        Err(io::ErrorKind::ConnectionRefused.into())
                    } else {
                        Ok(())
                    };
                }
                buffer[..segment.payload.len()].copy_from_slice(segment.payload);
                let end = segment.sequence.wrapping_add(segment.payload.len() as u32).wrapping_add(1);
                let opens = segment.flags & SYN != 0;
                numbers.insert(segment.from, (end, segment.acknowledgement, opens));
                lock(&self.own).1 = end;
                break (segment.payload.len(), Received { from: segment.from, to: segment.to.ip() });
            };
            each.push((length, received));
        }
        Ok(())
    }

    fn next(&self, packet: &mut [u8]) -> io::Result<usize> {
        if let Some(source) = &self.source {
            // "Would block" makes the runtime wait for what comes from now on.
            let taken = source.try_io(tokio::io::Interest::READABLE, |polled| {
                polled.source.next(packet).ok_or_else(|| io::ErrorKind::WouldBlock.into())
            });
            if taken.is_ok() {
                return taken;
            }
        }
        self.packets.try_recv(packet)
    }

    /// Sends one packet to `to`.
    pub(crate) fn send(&self, payload: &[u8], to: SocketAddr, from: Option<IpAddr>) -> io::Result<()> {
        let from = SocketAddr::new(from.unwrap_or(self.local.ip()), self.local.port());
        let (sequence, acknowledgement, flags) = self.numbers_for(payload, to);
        let segment = Segment { from, to, sequence, acknowledgement, flags, marked: true, payload };
        let mut packet = Vec::with_capacity(payload.len() + 64);
        if !segment.encode(&mut packet) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let socket = if to.is_ipv6() { &self.send_v6 } else { &self.send_v4 };
        socket.send_to(&packet, &SockAddr::from(SocketAddr::new(to.ip(), 0))).map(drop)
    }

    /// Sequence numbers that those on the way find plausible. A byte is left out after each segment, so that receive
    /// offload does not join them: each is a packet by itself.
    fn numbers_for(&self, payload: &[u8], to: SocketAddr) -> (u32, u32, u8) {
        let next = |sequence: u32| sequence.wrapping_add(payload.len() as u32).wrapping_add(1);
        if self.is_client {
            *lock(&self.server) = Some(to);
            let mut own = lock(&self.own);
            let (sequence, acknowledgement) = *own;
            own.0 = next(sequence);
            let opens = match payload {
                [VERSION, KIND_OPEN, ..] => true,
                [VERSION, KIND_HELLO | KIND_FIRST, ..] => acknowledgement == 0,
                _ => false,
            };
            return (sequence, if opens { 0 } else { acknowledgement }, if opens { SYN } else { PSH | ACK });
        }
        let mut numbers = lock(&self.numbers);
        let Some((acknowledgement, sequence, opens)) = numbers.get_mut(&to) else { return (0, 0, PSH | ACK) };
        let flags = if std::mem::take(opens) { SYN | ACK } else { PSH | ACK };
        let answer = (*sequence, *acknowledgement, flags);
        *sequence = next(*sequence);
        answer
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// A classic filter program: TCP to `port` over IPv4 or IPv6.
fn to_port(port: u16) -> Vec<SockFilter> {
    const LOAD_BYTE: u16 = 0x30;
    const LOAD_HALF: u16 = 0x28;
    const LOAD_HALF_AT_X: u16 = 0x48;
    const LOAD_X_HEADER: u16 = 0xb1;
    const SHIFT_RIGHT: u16 = 0x74;
    const EQUAL: u16 = 0x15;
    const JUMP: u16 = 0x05;
    const RETURN: u16 = 0x06;
    let statement = |code, k| SockFilter::new(code, 0, 0, k);
    let port = port.into();
    vec![
        statement(LOAD_BYTE, 0),
        statement(SHIFT_RIGHT, 4),
        SockFilter::new(EQUAL, 5, 0, 6),
        SockFilter::new(EQUAL, 0, 8, 4),
        statement(LOAD_BYTE, 9),
        SockFilter::new(EQUAL, 0, 6, 6),
        statement(LOAD_X_HEADER, 0),
        statement(JUMP, 5),
        // IPv6
        statement(LOAD_BYTE, 6),
        SockFilter::new(EQUAL, 0, 2, 6),
        statement(LOAD_HALF, 42),
        SockFilter::new(EQUAL, 3, 0, port),
        statement(RETURN, 0),
        // IPv4's port
        statement(LOAD_HALF_AT_X, 2),
        SockFilter::new(EQUAL, 0, 1, port),
        statement(RETURN, 0x4_0000),
        statement(RETURN, 0),
    ]
}

/// Keeps marked segments from the kernel's TCP for as long as it lives.
#[derive(Debug)]
struct Rule {
    table: String,
}

impl Rule {
    fn install(port: u16, is_client: bool) -> io::Result<Self> {
        let side = if is_client { "client" } else { "server" };
        let table = format!("tidegate_trickles_{side}_{port}");
        // Before anything tracks connections; AF_PACKET has seen the packet by then. A rule that a killed process left
        // is replaced.
        let text = format!(
            "table inet {table} {{\n}}\ndelete table inet {table}\ntable inet {table} {{\nchain input {{\n\
             type filter hook prerouting priority -400; policy accept;\n\
             tcp dport {port} tcp option {} exists drop\n}}\n}}\n",
            super::segment::OPTION_KIND
        );
        nft(&text)?;
        Ok(Self { table })
    }
}

impl Drop for Rule {
    fn drop(&mut self) {
        if let Err(error) = nft(&format!("delete table inet {}\n", self.table)) {
            tracing::debug!(%error, table = self.table, "the firewall rule stays behind");
        }
    }
}

fn nft(text: &str) -> io::Result<()> {
    let mut nft = Command::new("nft")
        .args(["-f", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| {
            io::Error::new(error.kind(), format!("the TCP format needs nft ({error}); UDP does not"))
        })?;
    if let Some(mut input) = nft.stdin.take() {
        input.write_all(text.as_bytes())?;
    }
    let output = nft.wait_with_output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let line = said.lines().next().unwrap_or("no reason given").to_owned();
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!("the TCP format needs a firewall rule, which nft refused ({line}); UDP needs none"),
    ))
}
