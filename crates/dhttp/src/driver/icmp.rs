//! Destinations that ICMP reports as unreachable (DHTTP §IV-E). A socket that is not connected learns of them only
//! from its error queue, which also says which datagram the report is about.

use std::io::{self, IoSliceMut};
use std::net::{SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::AsRawFd;

use nix::sys::socket::sockopt::{Ipv4RecvErr, Ipv6RecvErr};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, setsockopt};
use tokio::io::Interest;
use tokio::net::UdpSocket;

/// ICMP destination unreachable, and its code for ports (RFC 792).
const V4_UNREACHABLE: (u8, u8) = (3, 3);
/// ICMPv6 destination unreachable, and its code for ports (RFC 4443 §3.1).
const V6_UNREACHABLE: (u8, u8) = (1, 4);

/// Asks the kernel to keep reports.
pub(super) fn enable(socket: &UdpSocket, v4: bool) -> io::Result<()> {
    let set =
        if v4 { setsockopt(socket, Ipv4RecvErr, &true) } else { setsockopt(socket, Ipv6RecvErr, &true) };
    Ok(set?)
}

/// The next destination whose port is unreachable; `None` when there are no more reports.
pub(super) fn next_unreachable(socket: &UdpSocket) -> Option<SocketAddr> {
    let mut control = nix::cmsg_space!([u8; 128]);
    // Other reports, such as of a network without a route, do not say that nobody speaks DHTTP there.
    for _ in 0..64 {
        let read = socket.try_io(Interest::ERROR, || {
            let mut nothing = [0; 64];
            let mut slices = [IoSliceMut::new(&mut nothing)];
            let flags = MsgFlags::MSG_ERRQUEUE | MsgFlags::MSG_DONTWAIT;
            let message =
                recvmsg::<SockaddrStorage>(socket.as_raw_fd(), &mut slices, Some(&mut control), flags)?;
            let unreachable = message.cmsgs()?.any(|message| match message {
                ControlMessageOwned::Ipv4RecvErr(error, _) => {
                    (error.ee_type, error.ee_code) == V4_UNREACHABLE
                }
                ControlMessageOwned::Ipv6RecvErr(error, _) => {
                    (error.ee_type, error.ee_code) == V6_UNREACHABLE
                }
                _ => false,
            });
            Ok(message.address.filter(|_| unreachable))
        });
        let address = read.ok()?;
        let v4 = address.as_ref().and_then(SockaddrStorage::as_sockaddr_in);
        let v6 = address.as_ref().and_then(SockaddrStorage::as_sockaddr_in6);
        match (v4, v6) {
            (Some(v4), _) => return Some(SocketAddr::V4(SocketAddrV4::from(*v4))),
            (_, Some(v6)) => return Some(SocketAddr::V6(SocketAddrV6::from(*v6))),
            _ => {}
        }
    }
    None
}
