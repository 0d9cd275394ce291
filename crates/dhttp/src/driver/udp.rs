//! Datagrams in batches: one system call receives or sends up to [`BATCH`] of them.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::AsRawFd;

use nix::sys::socket::{
    ControlMessageOwned, MsgFlags, MultiHeaders, SockaddrIn, SockaddrIn6, SockaddrStorage, recvmmsg, sendmmsg,
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
                let to = message.cmsgs()?.find_map(|control| match control {
                    ControlMessageOwned::Ipv4OrigDstAddr(to) => {
                        Some(SocketAddr::V4(SocketAddrV4::from(SockaddrIn::from(to))))
                    }
                    ControlMessageOwned::Ipv6OrigDstAddr(to) => {
                        Some(SocketAddr::V6(SocketAddrV6::from(SockaddrIn6::from(to))))
                    }
                    _ => None,
                });
                let none = SocketAddr::from(([0, 0, 0, 0], 0));
                let bytes = if from.is_some() { message.bytes } else { 0 };
                received.push(Received { from: from.unwrap_or(none), to, bytes });
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
        let Received { from, to, bytes } = self.received[index];
        (Arrival { client: from, server: to }, &self.buffers[index][..bytes])
    }
}

fn address(address: &SockaddrStorage) -> Option<SocketAddr> {
    match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
        (Some(v4), _) => Some(SocketAddr::V4(SocketAddrV4::from(*v4))),
        (_, Some(v6)) => Some(SocketAddr::V6(SocketAddrV6::from(*v6))),
        _ => None,
    }
}

/// The sending half's buffers.
pub(super) struct Sender {
    headers: MultiHeaders<SockaddrStorage>,
}

impl Sender {
    pub fn new() -> Self {
        Self { headers: MultiHeaders::preallocate(BATCH, None) }
    }

    /// Sends up to [`BATCH`] of `datagrams` without waiting; how many were taken from its front. A datagram that cannot
    /// be sent is as good as lost on the way, and the client will ask again.
    ///
    /// # Errors
    /// `WouldBlock` if the socket is full.
    pub fn send<'d>(
        &mut self,
        socket: &UdpSocket,
        datagrams: impl Iterator<Item = (SocketAddr, &'d [u8])>,
    ) -> io::Result<usize> {
        let (addresses, slices): (Vec<_>, Vec<_>) = datagrams
            .take(BATCH)
            .map(|(to, payload)| (Some(SockaddrStorage::from(to)), [IoSlice::new(payload)]))
            .unzip();
        let headers = &mut self.headers;
        let sent = socket.try_io(Interest::WRITABLE, || {
            let flags = MsgFlags::MSG_DONTWAIT;
            let sent = sendmmsg(socket.as_raw_fd(), headers, slices.iter(), &addresses, [], flags)?;
            Ok(sent.count())
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
                sent += sender.send(&a, payloads[sent..].iter().map(|p| (to, p.as_slice()))).unwrap();
            }
            let mut receiver = Receiver::new();
            let mut received = Vec::new();
            while received.len() < payloads.len() {
                b.readable().await.unwrap();
                if receiver.receive(&b).is_ok() {
                    for n in 0..receiver.len() {
                        let (arrival, payload) = receiver.datagram(n);
                        assert_eq!(arrival, Arrival { client: a.local_addr().unwrap(), server: None });
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
        assert_eq!(Sender::new().send(&a, datagrams.into_iter()).unwrap(), 1);
    }
}
