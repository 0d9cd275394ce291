//! The listening sockets of all data cores: bound, or taken over from the process before.

use std::io;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};

use socket2::{Domain, Socket, Type};
use tidegate_dhttp::driver::{BindError, Listener as DhttpListener};
use tidegate_dhttp::ports::ClientPorts;

use crate::data_core::{Bound, Transport, pacing};
use crate::engine::StartError;
use crate::http3;
use crate::settings::{Listener, Protocol, Settings};

/// How long the kernel keeps a new connection to itself while nothing has arrived on it. It is accepted after that as
/// well, so that it gets its answer to a head that never came.
const DEFER_ACCEPT_S: libc::c_int = 1;
/// Connections that the kernel completes and keeps for a core that is busy.
const LISTEN_BACKLOG: i32 = 4096;

/// The sockets of one listener, on their way from a process to the one that takes its place.
#[derive(Debug)]
pub struct Listening {
    /// The address as it was configured.
    pub address: SocketAddr,
    /// What the sockets are.
    pub whose: Whose,
    /// The sockets.
    pub sockets: Vec<OwnedFd>,
}

/// What the sockets of a listener are.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Whose {
    /// Of TCP, one for each data core.
    Cores,
    /// Of TCP, one for each priority class, the highest first; every core accepts from all of them.
    Classes,
    /// Of DHTTP, for each data core one of UDP and then one of TCP.
    Dhttp,
    /// Of UDP for HTTP/3, one for each data core.
    Http3,
}

/// What the data cores listen on.
pub(super) struct Sockets {
    /// A set for each core; the kernel spreads connections over the sets (SO_REUSEPORT).
    pub sets: Vec<Vec<Bound>>,
    /// Where each listener listens, with the real port where 0 was asked for.
    pub addresses: Vec<SocketAddr>,
    /// Duplicates of all of them.
    pub duplicates: Vec<Listening>,
}

/// `held`: sockets of other hands for the first HTTP listeners, which are every core's. `handed`: those of the process
/// before.
pub(super) fn bind_all(
    settings: &Settings,
    workers: usize,
    held: &[Vec<TcpListener>],
    mut handed: Vec<Listening>,
) -> Result<Sockets, StartError> {
    let sets = (0..workers).map(|_| Vec::new()).collect();
    let mut sockets = Sockets { sets, addresses: Vec::new(), duplicates: Vec::new() };
    let mut held = held.iter();
    for listener in &settings.listeners {
        let of_others = if listener.protocol.is_http() { held.next() } else { None };
        let mut of_before = |whose| {
            let at = handed.iter().position(|it| it.address == listener.address && it.whose == whose)?;
            Some(handed.swap_remove(at).sockets)
        };
        let failed = |source| StartError::Listen { address: listener.address, source };
        if let Some(of_others) = of_others.filter(|sockets| !sockets.is_empty()) {
            sockets.share(listener, of_others).map_err(failed)?;
        } else if listener.protocol == Protocol::Dhttp {
            let of_before = of_before(Whose::Dhttp).unwrap_or_default();
            sockets.listen_for_dhttp(listener, of_before)?;
        } else {
            let of_before = of_before(Whose::Cores).unwrap_or_default();
            sockets.listen(listener, of_before).map_err(failed)?;
        }
        if listener.http3 {
            let of_before = of_before(Whose::Http3).unwrap_or_default();
            sockets.listen_for_http3(listener, of_before).map_err(failed)?;
        }
    }
    Ok(sockets)
}

impl Sockets {
    /// Has every core accept from all of the sockets.
    fn share(&mut self, listener: &Listener, sockets: &[TcpListener]) -> io::Result<()> {
        let duplicates = || sockets.iter().map(TcpListener::try_clone).collect::<io::Result<Vec<_>>>();
        for set in &mut self.sets {
            set.push(Bound::Http(duplicates()?, transport(listener)));
        }
        let address = sockets.first().ok_or(io::ErrorKind::NotFound)?.local_addr()?;
        self.addresses.push(address);
        let sockets = duplicates()?.into_iter().map(OwnedFd::from).collect();
        self.duplicates.push(Listening { address: listener.address, whose: Whose::Classes, sockets });
        Ok(())
    }

    /// One socket for each core. Of the process before all are kept, also where there are fewer cores now: to close one
    /// would reset those who wait in its queue.
    fn listen(&mut self, listener: &Listener, of_before: Vec<OwnedFd>) -> io::Result<()> {
        let mut sockets: Vec<TcpListener> = of_before.into_iter().map(TcpListener::from).collect();
        let mut address = match sockets.first() {
            Some(socket) => socket.local_addr()?,
            None => listener.address,
        };
        if sockets.is_empty() {
            is_free(address, Type::STREAM)?;
        }
        while sockets.len() < self.sets.len() {
            let socket = bind(address, Type::STREAM, true)?;
            socket.listen(LISTEN_BACKLOG)?;
            let local = socket.local_addr().ok().and_then(|address| address.as_socket());
            address = local.unwrap_or(address);
            sockets.push(socket.into());
        }
        let mut duplicates = Vec::new();
        for (index, socket) in sockets.into_iter().enumerate() {
            duplicates.push(socket.try_clone()?.into());
            self.of_core(index).push(Bound::Http(vec![socket], transport(listener)));
        }
        self.addresses.push(address);
        let (address, whose) = (listener.address, Whose::Cores);
        self.duplicates.push(Listening { address, whose, sockets: duplicates });
        Ok(())
    }

    fn listen_for_dhttp(&mut self, listener: &Listener, of_before: Vec<OwnedFd>) -> Result<(), StartError> {
        let address = listener.address;
        let failed = |source| StartError::Listen { address, source };
        let mut listeners = Vec::new();
        let mut of_before = of_before.into_iter();
        while let (Some(udp), Some(tcp)) = (of_before.next(), of_before.next()) {
            listeners.push(
                DhttpListener::of_sockets(UdpSocket::from(udp), TcpListener::from(tcp)).map_err(failed)?,
            );
        }
        if listeners.is_empty() {
            is_free(address, Type::STREAM).and_then(|()| is_free(address, Type::DGRAM)).map_err(failed)?;
        }
        while listeners.len() < self.sets.len() {
            listeners.push(DhttpListener::bind(address, &ClientPorts::default()).map_err(
                |error| match error {
                    BindError::Io(source) => failed(source),
                    BindError::Port(source) => StartError::DhttpPort { address, source },
                },
            )?);
        }
        let mut duplicates = Vec::new();
        for (index, listener) in listeners.into_iter().enumerate() {
            if let Some((udp, tcp)) = listener.sockets().map_err(failed)? {
                duplicates.extend([OwnedFd::from(udp), OwnedFd::from(tcp)]);
            }
            self.of_core(index).push(Bound::Dhttp(listener));
        }
        self.addresses.push(address);
        self.duplicates.push(Listening { address, whose: Whose::Dhttp, sockets: duplicates });
        Ok(())
    }

    /// One socket for each core at the UDP port of the listener's last address.
    fn listen_for_http3(&mut self, listener: &Listener, of_before: Vec<OwnedFd>) -> io::Result<()> {
        let mut sockets: Vec<UdpSocket> = of_before.into_iter().map(UdpSocket::from).collect();
        let address = match (sockets.first(), self.addresses.last()) {
            (Some(socket), _) => socket.local_addr()?,
            (None, Some(address)) => *address,
            (None, None) => listener.address,
        };
        // To those of the process before its own datagrams still come.
        let is_taken_over = !sockets.is_empty();
        if !is_taken_over {
            is_free(address, Type::DGRAM)?;
        }
        while sockets.len() < self.sets.len() {
            sockets.push(bind(address, Type::DGRAM, true)?.into());
        }
        if !is_taken_over {
            http3::steer(&sockets)?;
        }
        let count = sockets.len();
        let mut duplicates = Vec::new();
        for (index, socket) in sockets.into_iter().enumerate() {
            duplicates.push(socket.try_clone()?.into());
            self.of_core(index).push(Bound::Http3(socket, (index, count)));
        }
        let (address, whose) = (listener.address, Whose::Http3);
        self.duplicates.push(Listening { address, whose, sockets: duplicates });
        Ok(())
    }

    fn of_core(&mut self, index: usize) -> &mut Vec<Bound> {
        let cores = self.sets.len();
        &mut self.sets[index % cores]
    }
}

fn transport(listener: &Listener) -> Transport {
    Transport {
        has_tls: listener.protocol == Protocol::Https,
        is_proxied: listener.proxy_protocol,
        has_http2_in_clear: listener.http2 && listener.protocol == Protocol::Http,
    }
}

/// Another server's SO_REUSEPORT socket would let ours bind beside it, and each would get a share of the clients: an
/// exclusive bind first finds that out.
fn is_free(address: SocketAddr, kind: Type) -> io::Result<()> {
    bind(address, kind, false).map(drop)
}

fn bind(address: SocketAddr, kind: Type, shared: bool) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), kind.nonblocking(), None)?;
    if kind == Type::STREAM {
        socket.set_reuse_address(true)?;
    }
    if shared {
        socket.set_reuse_port(true)?;
    }
    if address.is_ipv6() {
        socket.set_only_v6(!address.ip().is_unspecified())?;
    }
    if kind == Type::STREAM {
        // Accepted sockets inherit this, which saves a system call for each.
        socket.set_tcp_nodelay(true)?;
        defer_accept(&socket)?;
        limit_unsent(&socket)?;
        // Accepted sockets inherit this too.
        pacing::leave_out_within_host(&socket, address.ip());
    }
    socket.bind(&address.into())?;
    Ok(socket)
}

/// A UDP socket at the address of others, for what comes from one client.
pub(crate) fn connected(local: SocketAddr, peer: SocketAddr) -> io::Result<UdpSocket> {
    let socket = bind(local, Type::DGRAM, true)?;
    socket.connect(&peer.into())?;
    Ok(socket.into())
}

/// Bytes that the kernel takes for a client beyond those on their way. Without a bound it takes megabytes, which
/// clients that read nothing make it hold until no connection has memory any more.
const UNSENT_BYTES: libc::c_int = 64 * 1024;

/// Bounds what the kernel holds unsent for each client (`TCP_NOTSENT_LOWAT`, tcp(7)); what is on its way is not bounded
/// by it, so that a fast client is served as fast as before. Accepted sockets inherit it.
fn limit_unsent(socket: &Socket) -> io::Result<()> {
    set_tcp_option(socket, libc::TCP_NOTSENT_LOWAT, UNSENT_BYTES)
}

/// Lets the kernel keep new connections until something has arrived on them (`TCP_DEFER_ACCEPT`, tcp(7)): a first
/// request is then answered as its connection is accepted, and a client that says nothing wakes nobody.
fn defer_accept(socket: &Socket) -> io::Result<()> {
    set_tcp_option(socket, libc::TCP_DEFER_ACCEPT, DEFER_ACCEPT_S)
}

fn set_tcp_option(socket: &Socket, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    // SAFETY: the option's value is an int, which is what the pointer and the length say.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            option,
            (&raw const value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use super::*;

    /// The congestion control of a connection to a listener at this address.
    fn congestion_control(address: &str) -> Vec<u8> {
        let socket = bind(address.parse().unwrap(), Type::STREAM, true).unwrap();
        socket.set_nonblocking(false).unwrap();
        socket.listen(1).unwrap();
        let port = socket.local_addr().unwrap().as_socket().unwrap().port();
        let mut client = TcpStream::connect(("127.0.0.1", port)).unwrap();
        io::Write::write_all(&mut client, b"x").unwrap();
        socket.accept().unwrap().0.tcp_congestion().unwrap()
    }

    #[test]
    fn connections_within_the_host_are_not_paced_and_others_are_as_the_system_has_them() {
        let of_system = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap().tcp_congestion().unwrap();
        assert!(congestion_control("127.0.0.1:0").starts_with(b"reno\0"));
        assert_eq!(congestion_control("0.0.0.0:0"), of_system);
    }
}
