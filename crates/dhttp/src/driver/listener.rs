//! The sockets that a server listens on.

use std::io;
use std::net::{SocketAddr, TcpListener, UdpSocket};

use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::{
    IpTransparent, Ipv4OrigDstAddr, Ipv4PacketInfo, Ipv6OrigDstAddr, Ipv6RecvPacketInfo, RcvBufForce, RxqOvfl,
};
use socket2::{Domain, Protocol, Socket, Type};

use crate::ports::{ClientPorts, PortRangeError};

/// Bytes of datagrams that wait in the kernel to be read: what comes while a core is busy is lost beyond it.
const RECEIVE_BUFFER_BYTES: usize = 4 << 20;

/// Why a server cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// DHTTP §IV-C.
    #[error("{0}")]
    Port(#[from] PortRangeError),
    /// The system refused.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// The sockets of one core. Bind one for each core to the same address: the kernel spreads clients over them, and a
/// client's datagrams always reach the same core.
#[derive(Debug)]
pub struct Listener {
    pub(super) udp: UdpSocket,
    /// Whence answers leave, if not from `udp`.
    pub(super) answers: Option<UdpSocket>,
    pub(super) tcp: Option<TcpListener>,
    pub(super) local: SocketAddr,
}

impl Listener {
    /// Listens on `address`, whose port must not be 0. If the address is unspecified, responses leave from the address
    /// that was asked.
    ///
    /// # Errors
    /// The port is one of the clients', or the system refuses.
    pub fn bind(address: SocketAddr, client_ports: &ClientPorts) -> Result<Self, BindError> {
        client_ports.allow_server(address.port())?;
        let open = |kind, protocol| -> io::Result<Socket> {
            let socket = Socket::new(Domain::for_address(address), kind, Some(protocol))?;
            if address.is_ipv6() {
                // The unspecified address stands for every address of the host, IPv4 too.
                socket.set_only_v6(!address.ip().is_unspecified())?;
            }
            socket.set_reuse_port(true)?;
            if kind == Type::STREAM {
                socket.set_reuse_address(true)?;
            }
            socket.set_nonblocking(true)?;
            socket.bind(&address.into())?;
            Ok(socket)
        };
        let udp = open(Type::DGRAM, Protocol::UDP)?;
        enlarge(&udp)?;
        if address.ip().is_unspecified() {
            match address {
                SocketAddr::V4(_) => setsockopt(&udp, Ipv4PacketInfo, &true),
                // For IPv4 too, in its mapped form.
                SocketAddr::V6(_) => setsockopt(&udp, Ipv6RecvPacketInfo, &true),
            }
            .map_err(io::Error::from)?;
        }
        let tcp = open(Type::STREAM, Protocol::TCP)?;
        tcp.listen(1024)?;
        Ok(Self { udp: udp.into(), answers: None, tcp: Some(tcp.into()), local: address })
    }

    /// Takes over sockets that listen on one address, as [`Self::sockets`] gives them.
    ///
    /// # Errors
    /// The system does not say where.
    pub fn of_sockets(udp: UdpSocket, tcp: TcpListener) -> io::Result<Self> {
        let local = udp.local_addr()?;
        Ok(Self { udp, answers: None, tcp: Some(tcp), local })
    }

    /// Duplicates of its sockets, for another process that is to answer in its place; none of an interception cache.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn sockets(&self) -> io::Result<Option<(UdpSocket, TcpListener)>> {
        let Some(tcp) = &self.tcp else { return Ok(None) };
        Ok(Some((self.udp.try_clone()?, tcp.try_clone()?)))
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Takes datagrams on their way to other hosts, which the router's rules send to `address` (TPROXY), and answers
    /// from `from`, an address of this host. There is no TCP: it passes by (DHTTP §IV-A). Needs CAP_NET_ADMIN.
    ///
    /// # Errors
    /// A port is one of the clients', the addresses are not of one family, or the system refuses.
    pub fn intercept(
        address: SocketAddr,
        from: SocketAddr,
        client_ports: &ClientPorts,
    ) -> Result<Self, BindError> {
        client_ports.allow_server(address.port())?;
        client_ports.allow_server(from.port())?;
        if address.is_ipv4() != from.is_ipv4() {
            return Err(BindError::Io(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the two addresses must be of one family",
            )));
        }
        let open = |address: SocketAddr| -> io::Result<Socket> {
            let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
            if address.is_ipv6() {
                socket.set_only_v6(true)?;
            }
            socket.set_nonblocking(true)?;
            Ok(socket)
        };
        let udp = open(address)?;
        enlarge(&udp)?;
        // ip(7)'s option is the same flag for both families.
        setsockopt(&udp, IpTransparent, &true).map_err(io::Error::from)?;
        match address {
            SocketAddr::V4(_) => setsockopt(&udp, Ipv4OrigDstAddr, &true),
            SocketAddr::V6(_) => setsockopt(&udp, Ipv6OrigDstAddr, &true),
        }
        .map_err(io::Error::from)?;
        udp.bind(&address.into())?;
        let answers = open(from)?;
        answers.bind(&from.into())?;
        Ok(Self { udp: udp.into(), answers: Some(answers.into()), tcp: None, local: from })
    }
}

/// Gives a socket room for what comes while its core is busy, and has the kernel say how much it had to drop all the
/// same.
fn enlarge(udp: &Socket) -> io::Result<()> {
    if setsockopt(udp, RcvBufForce, &RECEIVE_BUFFER_BYTES).is_err() {
        // Without CAP_NET_ADMIN the kernel caps it at net.core.rmem_max: more is better, less is no error.
        udp.set_recv_buffer_size(RECEIVE_BUFFER_BYTES)?;
    }
    Ok(setsockopt(udp, RxqOvfl, &1)?)
}
