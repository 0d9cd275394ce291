//! A client's pair of ports: a UDP port and a TCP port, each the same number for IPv4 and IPv6.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::net::{TcpListener, UdpSocket};
use tokio::task::AbortHandle;

use super::icmp;
use super::udp::SegmentReceiver;
use crate::client::{Client, Generation};

/// How often another random port is tried when one is taken.
const ATTEMPTS: usize = 64;
/// Bytes of answers that wait in the kernel to be read: a page's worth of them comes at once.
const RECEIVE_BUFFER_BYTES: usize = 2 << 20;

/// A pair of ports with the tasks that read them; dropping it ends them.
#[derive(Debug)]
pub(super) struct Pair {
    pub generation: Generation,
    pub udp_port: u16,
    v4: Arc<UdpSocket>,
    /// Absent on hosts without IPv6.
    v6: Option<Arc<UdpSocket>>,
    pub tasks: Vec<AbortHandle>,
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
    }
}

impl Pair {
    pub fn sockets(&self) -> Vec<Arc<UdpSocket>> {
        [Some(&self.v4), self.v6.as_ref()].into_iter().flatten().cloned().collect()
    }

    /// Sends without waiting; what is not sent is as good as lost on the way, and will be sent again.
    pub fn send(&self, to: SocketAddr, payload: &[u8]) {
        let socket = if to.is_ipv4() { Some(&self.v4) } else { self.v6.as_ref() };
        let Some(socket) = socket else { return };
        // Past the runtime, which knows nothing of a new socket's readiness until it has waited for it.
        let socket = SockRef::from(&**socket);
        // Once more, because the first error may be an ICMP report about an earlier datagram.
        for _ in 0..2 {
            match socket.send_to(payload, &to.into()) {
                Ok(_) => return,
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
                Err(error) => return tracing::debug!(%error, %to, "a datagram was not sent"),
            }
        }
    }
}

/// Binds a new pair of random ports and makes it the core's current one.
pub(super) fn bind_pair(
    core: &mut Client,
    v4: Ipv4Addr,
    v6: Ipv6Addr,
    now: Instant,
) -> io::Result<(Pair, Vec<TcpListener>)> {
    let (udp_port, udp) = bind_random(core, v4, v6, Type::DGRAM)?;
    let (tcp_port, tcp) = bind_random(core, v4, v6, Type::STREAM)?;
    let mut sockets = Vec::new();
    for (socket, v4) in udp.into_iter().zip([true, false]) {
        let socket = UdpSocket::from_std(socket.into())?;
        icmp::enable(&socket, v4)?;
        SegmentReceiver::enable(&socket);
        sockets.push(Arc::new(socket));
    }
    let mut listeners = Vec::new();
    for socket in tcp {
        socket.listen(64)?;
        listeners.push(TcpListener::from_std(socket.into())?);
    }
    let v6 = if sockets.len() > 1 { sockets.pop() } else { None };
    let v4 = sockets.pop().ok_or(io::ErrorKind::AddrNotAvailable)?;
    let generation = core.use_ports(tcp_port, now);
    Ok((Pair { generation, udp_port, v4, v6, tasks: Vec::new() }, listeners))
}

/// Sockets for IPv4 and, where there is such a thing, IPv6 on one random port.
fn bind_random(core: &mut Client, v4: Ipv4Addr, v6: Ipv6Addr, kind: Type) -> io::Result<(u16, Vec<Socket>)> {
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for _ in 0..ATTEMPTS {
        let port = core.random_port();
        let first = match bind(v4.into(), port, kind) {
            Ok(socket) => socket,
            Err(error) => {
                last = error;
                continue;
            }
        };
        match bind(v6.into(), port, kind) {
            Ok(second) => return Ok((port, vec![first, second])),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => last = error,
            Err(_) => return Ok((port, vec![first])),
        }
    }
    Err(last)
}

fn bind(address: IpAddr, port: u16, kind: Type) -> io::Result<Socket> {
    let address = SocketAddr::new(address, port);
    let protocol = if kind == Type::DGRAM { Protocol::UDP } else { Protocol::TCP };
    let socket = Socket::new(Domain::for_address(address), kind, Some(protocol))?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    if kind == Type::DGRAM {
        // The kernel caps it at net.core.rmem_max: less is no error.
        socket.set_recv_buffer_size(RECEIVE_BUFFER_BYTES)?;
    }
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
}
