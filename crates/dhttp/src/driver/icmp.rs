//! Destinations that ICMP reports as unreachable (DHTTP §IV-E). A socket that is not connected learns of them only
//! from its error queue, which also says which datagram the report is about.

use std::io::{self, IoSliceMut};
use std::net::{SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::AsRawFd;

use nix::sys::socket::sockopt::{Ipv4RecvErr, Ipv6RecvErr};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, setsockopt};
use tokio::io::Interest;
use tokio::net::UdpSocket;

/// Whether ICMP destination unreachable with this code says that UDP does not get there: nobody listens at the protocol
/// or port (RFC 792), or a firewall forbids it (RFC 1122 §3.2.2.1, RFC 1812 §5.2.7.1).
fn is_final_v4((kind, code): (u8, u8)) -> bool {
    kind == 3 && matches!(code, 2 | 3 | 9 | 10 | 13)
}

/// The same of ICMPv6: forbidden, nobody there, refused by a policy or a route (RFC 4443 §3.1).
fn is_final_v6((kind, code): (u8, u8)) -> bool {
    kind == 1 && matches!(code, 1 | 4 | 5 | 6)
}

/// Asks the kernel to keep reports.
pub(super) fn enable(socket: &UdpSocket, v4: bool) -> io::Result<()> {
    let set =
        if v4 { setsockopt(socket, Ipv4RecvErr, &true) } else { setsockopt(socket, Ipv6RecvErr, &true) };
    Ok(set?)
}

/// The next destination that UDP does not reach; `None` when there are no more reports.
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
                ControlMessageOwned::Ipv4RecvErr(error, _) => is_final_v4((error.ee_type, error.ee_code)),
                ControlMessageOwned::Ipv6RecvErr(error, _) => is_final_v6((error.ee_type, error.ee_code)),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn firewalls_and_closed_ports_are_final_and_a_missing_route_is_not() {
        assert!([2, 3, 9, 10, 13].iter().all(|code| is_final_v4((3, *code))));
        assert!([0, 1, 4, 5].iter().all(|code| !is_final_v4((3, *code))) && !is_final_v4((11, 3)));
        assert!([1, 4, 5, 6].iter().all(|code| is_final_v6((1, *code))));
        assert!([0, 2, 3].iter().all(|code| !is_final_v6((1, *code))) && !is_final_v6((3, 1)));
    }
}
