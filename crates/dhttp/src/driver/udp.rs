//! Datagrams in batches: one system call receives or sends up to [`BATCH`] of them.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::AsRawFd;

use nix::libc::{in_addr, in_pktinfo, in6_addr, in6_pktinfo};
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, MultiHeaders, SockaddrIn, SockaddrIn6, SockaddrStorage,
    recvmmsg, sendmmsg,
};
use tokio::io::Interest;
use tokio::net::UdpSocket;

use super::service::Arrival;

/// Most datagrams in one system call.
pub(super) const BATCH: usize = 32;

/// Longest datagram that is read whole: the longest there is.
const BUFFER_BYTES: usize = 65_536;

/// The receiving half's buffers, and what the last call put there.
pub(super) struct Receiver {
    headers: MultiHeaders<SockaddrStorage>,
    buffers: Vec<Vec<u8>>,
    received: Vec<Received>,
}

/// One datagram that was received.
#[derive(Clone, Copy)]
struct Received {
    from: SocketAddr,
    /// Which of this host's addresses it was sent to, if the socket has several.
    local: Option<IpAddr>,
    /// Where it was sent to, if the socket takes what is meant for others.
    to: Option<SocketAddr>,
    bytes: usize,
}

impl Receiver {
    pub fn new() -> Self {
        Self {
            headers: MultiHeaders::preallocate(BATCH, Some(nix::cmsg_space!([u8; 28]))),
            buffers: (0..BATCH).map(|_| vec![0; BUFFER_BYTES]).collect(),
            received: Vec::with_capacity(BATCH),
        }
    }

    /// Receives what is there, without waiting.
    ///
    /// # Errors
    /// `WouldBlock` if there is nothing.
    pub fn receive(&mut self, socket: &UdpSocket) -> io::Result<()> {
        self.received.clear();
        let mut slices: Vec<[IoSliceMut<'_>; 1]> =
            self.buffers.iter_mut().map(|buffer| [IoSliceMut::new(buffer)]).collect();
        let (headers, received) = (&mut self.headers, &mut self.received);
        socket.try_io(Interest::READABLE, || {
            let flags = MsgFlags::MSG_DONTWAIT;
            for message in recvmmsg(socket.as_raw_fd(), headers, slices.iter_mut(), flags, None)? {
                // An address of another family cannot be; its datagram counts as empty.
                let from = message.address.as_ref().and_then(address);
                let (mut to, mut local) = (None, None);
                for control in message.cmsgs()? {
                    match control {
                        ControlMessageOwned::Ipv4OrigDstAddr(asked) => {
                            to = Some(SocketAddr::V4(SocketAddrV4::from(SockaddrIn::from(asked))));
                        }
                        ControlMessageOwned::Ipv6OrigDstAddr(asked) => {
                            to = Some(SocketAddr::V6(SocketAddrV6::from(SockaddrIn6::from(asked))));
                        }
                        // ip(7): spec_dst is the address for an answer, also to what was sent to a broadcast address.
                        ControlMessageOwned::Ipv4PacketInfo(info) => {
                            local = Some(Ipv4Addr::from(info.ipi_spec_dst.s_addr.to_ne_bytes()).into());
                        }
                        ControlMessageOwned::Ipv6PacketInfo(info) => {
                            local = Some(Ipv6Addr::from(info.ipi6_addr.s6_addr).to_canonical());
                        }
                        _ => {}
                    }
                }
                let none = SocketAddr::from(([0, 0, 0, 0], 0));
                let bytes = if from.is_some() { message.bytes } else { 0 };
                received.push(Received { from: from.unwrap_or(none), local, to, bytes });
            }
            Ok(())
        })
    }

    /// How many datagrams the last call received.
    pub fn len(&self) -> usize {
        self.received.len()
    }

    /// One of them.
    pub fn datagram(&self, index: usize) -> (Arrival, &[u8]) {
        let Received { from, local, to, bytes } = self.received[index];
        (Arrival { client: from, local, server: to }, &self.buffers[index][..bytes])
    }
}

fn address(address: &SockaddrStorage) -> Option<SocketAddr> {
    match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
        (Some(v4), _) => Some(SocketAddr::V4(SocketAddrV4::from(*v4))),
        (_, Some(v6)) => Some(SocketAddr::V6(SocketAddrV6::from(*v6))),
        _ => None,
    }
}

/// The sending half's buffers: the kernel wants exactly as much room for what is said of a datagram as is used.
pub(super) struct Sender {
    plain: MultiHeaders<SockaddrStorage>,
    from_v4: MultiHeaders<SockaddrStorage>,
    from_v6: MultiHeaders<SockaddrStorage>,
}

impl Sender {
    pub fn new() -> Self {
        Self {
            plain: MultiHeaders::preallocate(BATCH, None),
            from_v4: MultiHeaders::preallocate(BATCH, Some(nix::cmsg_space!(in_pktinfo))),
            from_v6: MultiHeaders::preallocate(BATCH, Some(nix::cmsg_space!(in6_pktinfo))),
        }
    }

    /// Sends up to [`BATCH`] of `datagrams` without waiting; how many were taken from its front. A datagram that cannot
    /// be sent is as good as lost on the way, and the client will ask again. They leave from `from`, an address of the
    /// socket's family.
    ///
    /// # Errors
    /// `WouldBlock` if the socket is full.
    pub fn send<'d>(
        &mut self,
        socket: &UdpSocket,
        from: Option<IpAddr>,
        datagrams: impl Iterator<Item = (SocketAddr, &'d [u8])>,
    ) -> io::Result<usize> {
        let (addresses, slices): (Vec<_>, Vec<_>) = datagrams
            .take(BATCH)
            .map(|(to, payload)| (Some(SockaddrStorage::from(to)), [IoSlice::new(payload)]))
            .unzip();
        let fd = socket.as_raw_fd();
        let flags = MsgFlags::MSG_DONTWAIT;
        let sent = socket.try_io(Interest::WRITABLE, || {
            let sent = match from {
                None => sendmmsg(fd, &mut self.plain, slices.iter(), &addresses, [], flags)?.count(),
                Some(IpAddr::V4(from)) => {
                    let from = in_addr { s_addr: u32::from_ne_bytes(from.octets()) };
                    let from =
                        in_pktinfo { ipi_ifindex: 0, ipi_spec_dst: from, ipi_addr: in_addr { s_addr: 0 } };
                    let control = [ControlMessage::Ipv4PacketInfo(&from)];
                    sendmmsg(fd, &mut self.from_v4, slices.iter(), &addresses, control, flags)?.count()
                }
                Some(IpAddr::V6(from)) => {
                    let from = in6_addr { s6_addr: from.octets() };
                    let from = in6_pktinfo { ipi6_addr: from, ipi6_ifindex: 0 };
                    let control = [ControlMessage::Ipv6PacketInfo(&from)];
                    sendmmsg(fd, &mut self.from_v6, slices.iter(), &addresses, control, flags)?.count()
                }
            };
            Ok(sent)
        });
        match sent {
            // The kernel reports the first datagram's error and sends none: skip that one.
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => {
                tracing::debug!(%error, "a datagram was not sent");
                Ok(1)
            }
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_batch_is_sent_and_received_in_order_with_its_addresses() {
        for local in ["127.0.0.1:0", "[::1]:0"] {
            let a = UdpSocket::bind(local).await.unwrap();
            let b = UdpSocket::bind(local).await.unwrap();
            let payloads: Vec<Vec<u8>> = (0..40u8).map(|n| vec![n; usize::from(n)]).collect();
            let to = b.local_addr().unwrap();
            let mut sender = Sender::new();
            let mut sent = 0;
            while sent < payloads.len() {
                a.writable().await.unwrap();
                sent += sender.send(&a, None, payloads[sent..].iter().map(|p| (to, p.as_slice()))).unwrap();
            }
            let mut receiver = Receiver::new();
            let mut received = Vec::new();
            while received.len() < payloads.len() {
                b.readable().await.unwrap();
                if receiver.receive(&b).is_ok() {
                    for n in 0..receiver.len() {
                        let (arrival, payload) = receiver.datagram(n);
                        assert_eq!(
                            arrival,
                            Arrival { client: a.local_addr().unwrap(), local: None, server: None }
                        );
                        received.push(payload.to_vec());
                    }
                }
            }
            assert_eq!(received, payloads);
        }
    }

    #[tokio::test]
    async fn a_datagram_that_cannot_be_sent_is_skipped() {
        let a = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        a.writable().await.unwrap();
        let datagrams = [("[::1]:9".parse().unwrap(), &b"x"[..])];
        assert_eq!(Sender::new().send(&a, None, datagrams.into_iter()).unwrap(), 1);
    }
}
