//! The path to a server: a socket for it, and the longest packet that it carries.

use super::batch::BatchSocket;
use super::connection::{Format, Options};
use crate::sealed::{ANSWER_OVERHEAD_BYTES, Encryption};
use crate::tcp::TcpSocket;
use crate::wire::MIN_DATAGRAM_BYTES;
use rustix::net::sockopt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

/// Longest packet that is sent, its headers included: what Ethernet carries.
const MOST_MTU: u32 = 1500;

/// Bytes of the headers before a datagram: IP, and UDP or TCP with the option that marks a segment.
fn header_bytes(format: Format, is_ipv6: bool) -> u32 {
    let ip = if is_ipv6 { 40 } else { 20 };
    match format {
        Format::Udp => ip + 8,
        Format::Tcp => ip + 24,
    }
}

/// The longest packet in bytes, headers included, that a path or an interface has to carry at least.
#[must_use]
pub fn least_mtu(format: Format, is_ipv6: bool) -> u32 {
    u32::from(MIN_DATAGRAM_BYTES) + header_bytes(format, is_ipv6)
}

/// The way to the server carries no packets as long as the transport needs; the source of an [`io::Error`].
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "packets to {server} have at most {mtu} bytes, and Trickles needs {least}; raise the MTU of the interface"
)]
pub struct TooNarrow {
    /// The server.
    pub server: SocketAddr,
    /// Bytes of the longest packet, headers included.
    pub mtu: u32,
    /// What it has to be.
    pub least: u32,
}

/// A socket for the first server that one can be had for.
pub(super) struct Path {
    pub(super) socket: BatchSocket,
    /// Index of the server.
    pub(super) turn: usize,
    /// Bytes of the longest datagram to it, and to servers of the other family where there are any.
    pub(super) datagram_bytes: u16,
}

/// Passes over servers that there is no path to. An error is that of the first server.
pub(super) fn open(options: &Options) -> io::Result<Path> {
    let mut why = None;
    for (turn, &server) in options.servers.iter().enumerate() {
        match open_to(server, options) {
            Ok((socket, mtu)) => {
                let any_ipv6 = options.servers.iter().any(SocketAddr::is_ipv6);
                let room = mtu.min(MOST_MTU).saturating_sub(header_bytes(options.format, any_ipv6));
                let datagram_bytes = u16::try_from(room).unwrap_or(u16::MAX);
                return Ok(Path { socket, turn, datagram_bytes });
            }
            Err(error) => {
                tracing::debug!(%error, %server, "no path to a server");
                why.get_or_insert(error);
            }
        }
    }
    Err(why.unwrap_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "no server to connect to")))
}

fn open_to(server: SocketAddr, options: &Options) -> io::Result<(BatchSocket, u32)> {
    let (socket, mtu) = socket_to(server, options.format, options.local)?;
    let envelope = if options.encryption == Encryption::Off { 0 } else { ANSWER_OVERHEAD_BYTES as u32 };
    let least = least_mtu(options.format, server.is_ipv6()) + envelope;
    match mtu < least {
        true => Err(io::Error::new(io::ErrorKind::NetworkUnreachable, TooNarrow { server, mtu, least })),
        false => Ok((socket, mtu)),
    }
}

/// A UDP socket that leads to `server` and to nobody else.
fn connected(server: SocketAddr, local: Option<IpAddr>) -> io::Result<UdpSocket> {
    let any = match server {
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((local.unwrap_or(any), 0))?;
    // A connected socket learns from ICMP that its server is gone, and which of our addresses leads there.
    socket.connect(server)?;
    Ok(socket)
}

/// A socket for datagrams to `server`, and the longest packet that the way there is known to carry, its headers
/// included.
fn socket_to(server: SocketAddr, format: Format, local: Option<IpAddr>) -> io::Result<(BatchSocket, u32)> {
    let socket = connected(server, local)?;
    let mtu = match server {
        SocketAddr::V6(_) => sockopt::ipv6_mtu(&socket),
        SocketAddr::V4(_) => sockopt::ip_mtu(&socket),
    };
    // Where the system does not say, losses will.
    let mtu = mtu.unwrap_or(u32::MAX);
    let socket = match format {
        Format::Udp => BatchSocket::new(socket)?,
        Format::Tcp => {
            let local = SocketAddr::new(socket.local_addr()?.ip(), 0);
            BatchSocket::Tcp(TcpSocket::bind(local, true)?)
        }
    };
    Ok((socket, mtu))
}

/// Turns `socket` to another server, or puts another in its place where it does not lead there: the server is of
/// another address family, or reached from another address. Whether the client's address has changed.
pub(super) fn turn(
    socket: &mut BatchSocket,
    server: SocketAddr,
    format: Format,
    local: Option<IpAddr>,
) -> io::Result<bool> {
    let own = socket.local_addr()?.ip();
    let leads = own.is_ipv6() == server.is_ipv6()
        && match socket {
            BatchSocket::Udp { .. } => socket.turn_to(server).is_ok(),
            BatchSocket::Tcp(_) => connected(server, local)?.local_addr()?.ip() == own,
        };
    if !leads {
        *socket = socket_to(server, format, local)?.0;
    }
    Ok(!leads)
}

/// Whether a datagram was longer than what the way to the server carries: told by our own interface, or by ICMP.
pub(super) fn is_too_long(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::MSGSIZE.raw_os_error())
}

/// Whether no path leads to the server now.
pub(super) fn is_unreachable(error: &io::Error) -> bool {
    use io::ErrorKind::{AddrNotAvailable, HostUnreachable, NetworkDown, NetworkUnreachable};
    matches!(error.kind(), AddrNotAvailable | HostUnreachable | NetworkDown | NetworkUnreachable)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without an interface it is of no use (RFC 4291 §2.5.6), on any host.
    const NOWHERE: &str = "[fe80::1]:4000";

    fn to(servers: &[&str]) -> Options {
        Options::to(servers.iter().map(|server| server.parse().unwrap()).collect())
    }

    #[tokio::test]
    async fn servers_without_a_path_when_others_have_one_then_the_first_of_those_is_taken() {
        let path = open(&to(&[NOWHERE, "127.0.0.1:9", "127.0.0.1:10"])).unwrap();
        assert_eq!(path.turn, 1);
        // As long as the headers of either family allow.
        assert_eq!(path.datagram_bytes, 1500 - 40 - 8);
        assert_eq!(open(&to(&["127.0.0.1:9"])).unwrap().datagram_bytes, 1500 - 20 - 8);
    }

    #[tokio::test]
    async fn servers_when_none_has_a_path_then_it_is_an_error() {
        for servers in [&[NOWHERE][..], &[NOWHERE, NOWHERE], &[]] {
            assert!(open(&to(servers)).is_err(), "{servers:?}");
        }
    }

    #[tokio::test]
    async fn a_socket_when_turned_then_it_leads_there_or_is_what_it_was() {
        let mut socket = open(&to(&["127.0.0.1:9"])).unwrap().socket;
        let before = socket.local_addr().unwrap();
        let turned = |socket: &mut BatchSocket, server: &str| {
            turn(socket, server.parse().unwrap(), Format::Udp, None).ok()
        };
        assert_eq!(turned(&mut socket, "127.0.0.1:10"), Some(false));
        assert_eq!(turned(&mut socket, NOWHERE), None);
        assert_eq!(socket.local_addr().unwrap(), before);
    }
}
