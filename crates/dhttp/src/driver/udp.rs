//! Datagrams in batches: one system call receives or sends up to [`BATCH`] messages. A message that is sent may be
//! several datagrams to one client.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::AsRawFd;

use nix::libc::{in_addr, in_pktinfo, in6_addr, in6_pktinfo};
use nix::sys::socket::sockopt::UdpGroSegment;
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, MultiHeaders, SockaddrIn, SockaddrIn6, SockaddrStorage,
    recvmmsg, recvmsg, sendmmsg, setsockopt,
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
    /// How many datagrams the kernel has dropped since the socket was opened, because nobody had read those before
    /// them.
    overflowed: u32,
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
            headers: MultiHeaders::preallocate(BATCH, Some(nix::cmsg_space!([u8; 28], u32))),
            buffers: (0..BATCH).map(|_| vec![0; BUFFER_BYTES]).collect(),
            received: Vec::with_capacity(BATCH),
            overflowed: 0,
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
        let (headers, received, overflowed) = (&mut self.headers, &mut self.received, &mut self.overflowed);
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
                        ControlMessageOwned::RxqOvfl(count) => *overflowed = count,
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

    /// How many datagrams the kernel has dropped for want of room, as far as it has said; wraps.
    pub fn overflowed(&self) -> u32 {
        self.overflowed
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

/// A client's receiving half: what a server sent as one message may arrive as one.
pub(super) struct SegmentReceiver {
    buffer: Vec<u8>,
    control: Vec<u8>,
}

impl SegmentReceiver {
    pub fn new() -> Self {
        Self { buffer: vec![0; BUFFER_BYTES], control: nix::cmsg_space!(i32) }
    }

    /// Lets the kernel hand over datagrams together (generic receive offload); one that cannot hands them over one by
    /// one.
    pub fn enable(socket: &UdpSocket) {
        if let Err(error) = setsockopt(socket, UdpGroSegment, &true) {
            tracing::debug!(%error, "datagrams are received one by one");
        }
    }

    /// Receives datagrams that came from one address, without waiting.
    ///
    /// # Errors
    /// `WouldBlock` if there is nothing; an ICMP report about what was sent.
    pub fn receive<'b>(
        &'b mut self,
        socket: &UdpSocket,
    ) -> io::Result<(SocketAddr, impl Iterator<Item = &'b [u8]> + use<'b>)> {
        let (buffer, control) = (&mut self.buffer, &mut self.control);
        let (from, bytes, segment_bytes) = socket.try_io(Interest::READABLE, || {
            let mut slices = [IoSliceMut::new(buffer)];
            let flags = MsgFlags::MSG_DONTWAIT;
            let message = recvmsg::<SockaddrStorage>(socket.as_raw_fd(), &mut slices, Some(control), flags)?;
            let segment_bytes = message.cmsgs()?.find_map(|control| match control {
                ControlMessageOwned::UdpGroSegments(bytes) => usize::try_from(bytes).ok(),
                _ => None,
            });
            let from = message.address.as_ref().and_then(address).ok_or(io::ErrorKind::InvalidData)?;
            Ok((from, message.bytes, segment_bytes))
        })?;
        let segment_bytes = segment_bytes.unwrap_or(bytes).max(1);
        let datagrams = self.buffer[..bytes].chunks(segment_bytes);
        // An empty datagram is one, too.
        let empty: Option<&[u8]> = (bytes == 0).then_some(&[]);
        Ok((from, empty.into_iter().chain(datagrams)))
    }
}

fn address(address: &SockaddrStorage) -> Option<SocketAddr> {
    match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
        (Some(v4), _) => Some(SocketAddr::V4(SocketAddrV4::from(*v4))),
        (_, Some(v6)) => Some(SocketAddr::V6(SocketAddrV6::from(*v6))),
        _ => None,
    }
}

/// Most datagrams that the kernel cuts out of one message, and most bytes of one (udp(7), UDP_SEGMENT).
const SEGMENTS: usize = 64;
const MESSAGE_BYTES: usize = 65_000;

/// A datagram, and where it goes.
pub(super) type Outgoing<'d> = (SocketAddr, &'d [u8]);

/// The sending half's buffers: the kernel wants exactly as much room for what is said of a message as is used.
pub(super) struct Sender {
    plain: Headers,
    from_v4: Headers,
    from_v6: Headers,
}

/// Those of messages of one datagram, and of messages that the kernel cuts into datagrams.
struct Headers {
    single: MultiHeaders<SockaddrStorage>,
    cut: MultiHeaders<SockaddrStorage>,
}

impl Sender {
    pub fn new() -> Self {
        let headers = |single, cut| Headers {
            single: MultiHeaders::preallocate(BATCH, single),
            cut: MultiHeaders::preallocate(BATCH, Some(cut)),
        };
        Self {
            plain: headers(None, nix::cmsg_space!(u16)),
            from_v4: headers(Some(nix::cmsg_space!(in_pktinfo)), nix::cmsg_space!(in_pktinfo, u16)),
            from_v6: headers(Some(nix::cmsg_space!(in6_pktinfo)), nix::cmsg_space!(in6_pktinfo, u16)),
        }
    }

    /// Sends a number of `datagrams` without waiting; how many were taken from their front. A datagram that cannot be
    /// sent is as good as lost on the way, and the client will ask again. They leave from `from`, an address of the
    /// socket's family. Pieces of one response pass the network stack as one message (generic segmentation offload).
    ///
    /// # Errors
    /// `WouldBlock` if the socket is full.
    pub fn send(
        &mut self,
        socket: &UdpSocket,
        from: Option<IpAddr>,
        datagrams: &[Outgoing<'_>],
    ) -> io::Result<usize> {
        let (messages, segment_bytes) = messages(datagrams);
        let first = messages.first().map_or(0, Vec::len);
        match self.send_messages(socket, from, &messages, segment_bytes) {
            Ok(sent) => Ok(messages.iter().take(sent).map(Vec::len).sum()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(error),
            // A path with smaller packets than its device's (udp(7)), or a device that cannot compute checksums.
            Err(_) if first > 1 => {
                let messages: Vec<Message<'_>> =
                    datagrams[..first.min(BATCH)].iter().map(|one| vec![*one]).collect();
                self.send_or_skip(socket, from, &messages)
            }
            Err(_) if segment_bytes.is_some() => {
                let messages = [vec![datagrams[0]]];
                self.send_or_skip(socket, from, &messages)
            }
            Err(error) => {
                // The kernel reports the first datagram's error and sends none: skip that one.
                tracing::debug!(%error, "a datagram was not sent");
                Ok(1)
            }
        }
    }

    fn send_or_skip(
        &mut self,
        socket: &UdpSocket,
        from: Option<IpAddr>,
        messages: &[Message<'_>],
    ) -> io::Result<usize> {
        match self.send_messages(socket, from, messages, None) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => {
                tracing::debug!(%error, "a datagram was not sent");
                Ok(1)
            }
            other => other,
        }
    }

    /// How many messages were sent.
    fn send_messages(
        &mut self,
        socket: &UdpSocket,
        from: Option<IpAddr>,
        messages: &[Message<'_>],
        segment_bytes: Option<u16>,
    ) -> io::Result<usize> {
        let addresses: Vec<_> = messages
            .iter()
            .map(|message| message.first().map(|(to, _)| SockaddrStorage::from(*to)))
            .collect();
        let slices: Vec<Vec<IoSlice<'_>>> = messages
            .iter()
            .map(|message| message.iter().map(|(_, payload)| IoSlice::new(payload)).collect())
            .collect();
        let (v4, v6);
        let mut control = Vec::with_capacity(2);
        let headers = match from {
            None => &mut self.plain,
            Some(IpAddr::V4(from)) => {
                let from = in_addr { s_addr: u32::from_ne_bytes(from.octets()) };
                v4 = in_pktinfo { ipi_ifindex: 0, ipi_spec_dst: from, ipi_addr: in_addr { s_addr: 0 } };
                control.push(ControlMessage::Ipv4PacketInfo(&v4));
                &mut self.from_v4
            }
            Some(IpAddr::V6(from)) => {
                v6 = in6_pktinfo { ipi6_addr: in6_addr { s6_addr: from.octets() }, ipi6_ifindex: 0 };
                control.push(ControlMessage::Ipv6PacketInfo(&v6));
                &mut self.from_v6
            }
        };
        let headers = match &segment_bytes {
            Some(bytes) => {
                control.push(ControlMessage::UdpGsoSegments(bytes));
                &mut headers.cut
            }
            None => &mut headers.single,
        };
        socket.try_io(Interest::WRITABLE, || {
            let flags = MsgFlags::MSG_DONTWAIT;
            Ok(sendmmsg(socket.as_raw_fd(), headers, slices.iter(), &addresses, control, flags)?.count())
        })
    }
}

/// Datagrams that one call to the kernel sends to one client.
type Message<'d> = Vec<Outgoing<'d>>;

/// Up to [`BATCH`] messages from the front of `datagrams`, and the length at which the kernel is to cut them if one of
/// them has several. In a message all have this length but the last, which may be shorter.
fn messages<'d>(datagrams: &[Outgoing<'d>]) -> (Vec<Message<'d>>, Option<u16>) {
    let mut messages: Vec<Message<'d>> = Vec::with_capacity(datagrams.len().min(BATCH));
    let (mut segment_bytes, mut longest) = (None, 0);
    let mut left = datagrams;
    while let Some(((to, first), rest)) = left.split_first()
        && messages.len() < BATCH
    {
        let mut count = 1;
        let mut ended = first.is_empty();
        let mut bytes = first.len();
        for (next, payload) in rest {
            bytes += payload.len();
            if ended || next != to || payload.len() > first.len() || payload.is_empty() {
                break;
            }
            if count == SEGMENTS || bytes > MESSAGE_BYTES {
                break;
            }
            ended = payload.len() < first.len();
            count += 1;
        }
        longest = longest.max(first.len());
        // The kernel is told one length for all messages of a call.
        if count > 1 && segment_bytes.is_some_and(|bytes| bytes != first.len()) {
            break;
        }
        let cut = if count > 1 { Some(first.len()) } else { segment_bytes };
        if cut.is_some_and(|bytes| longest > bytes) {
            break;
        }
        segment_bytes = cut;
        messages.push(left[..count].to_vec());
        left = &left[count..];
    }
    (messages, segment_bytes.and_then(|bytes| u16::try_from(bytes).ok()))
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
                let left: Vec<Outgoing<'_>> = payloads[sent..].iter().map(|p| (to, p.as_slice())).collect();
                sent += sender.send(&a, None, &left).unwrap();
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
        assert_eq!(Sender::new().send(&a, None, &datagrams).unwrap(), 1);
    }

    #[test]
    fn datagrams_to_one_client_are_one_message_until_a_shorter_one_ends_it() {
        let (a, b): (SocketAddr, SocketAddr) =
            ("192.0.2.1:1".parse().unwrap(), "192.0.2.2:1".parse().unwrap());
        let of = |to, bytes: usize| (to, &[0; 2000][..bytes]);
        let shape = |datagrams: &[Outgoing<'_>]| {
            let (messages, segment) = messages(datagrams);
            (messages.iter().map(Vec::len).collect::<Vec<_>>(), segment)
        };
        assert_eq!(shape(&[of(a, 10), of(b, 10), of(b, 20)]), (vec![1, 1, 1], None));
        assert_eq!(shape(&[of(b, 7), of(a, 10), of(a, 10), of(a, 4), of(a, 9)]), (vec![1, 3, 1], Some(10)));
        // Another length for the kernel to cut at, or a datagram that it would cut, is for the next call.
        assert_eq!(shape(&[of(a, 10), of(a, 10), of(b, 9), of(b, 9)]), (vec![2], Some(10)));
        assert_eq!(shape(&[of(a, 10), of(a, 10), of(b, 11)]), (vec![2], Some(10)));
        assert_eq!(shape(&[of(b, 11), of(a, 10), of(a, 10)]), (vec![1], None));
        assert_eq!(shape(&vec![of(a, 1400); 70]).0, [46, 24]);
        assert_eq!(shape(&[of(a, 0), of(a, 0)]), (vec![1, 1], None));
    }

    #[tokio::test]
    async fn a_message_arrives_as_the_datagrams_it_is_made_of() {
        for local in ["127.0.0.1:0", "[::1]:0"] {
            let a = UdpSocket::bind(local).await.unwrap();
            let b = UdpSocket::bind(local).await.unwrap();
            let to = b.local_addr().unwrap();
            let payloads = [vec![1; 1400], vec![2; 1400], vec![3; 1400], vec![4; 7], vec![5; 9]];
            let datagrams: Vec<Outgoing<'_>> = payloads.iter().map(|p| (to, p.as_slice())).collect();
            a.writable().await.unwrap();
            let sent = Sender::new().send(&a, Some(a.local_addr().unwrap().ip()), &datagrams).unwrap();
            assert_eq!(sent, payloads.len());
            // With and without a receiver that takes them together.
            let mut segments = SegmentReceiver::new();
            let mut received: Vec<Vec<u8>> = Vec::new();
            while received.len() < payloads.len() {
                b.readable().await.unwrap();
                if let Ok((from, datagrams)) = segments.receive(&b) {
                    assert_eq!(from, a.local_addr().unwrap());
                    received.extend(datagrams.map(<[u8]>::to_vec));
                }
            }
            assert_eq!(received, payloads);
        }
    }

    #[tokio::test]
    async fn a_receiver_of_segments_takes_single_datagrams_and_empty_ones() {
        let a = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let b = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        SegmentReceiver::enable(&b);
        let to = b.local_addr().unwrap();
        let mut segments = SegmentReceiver::new();
        for payloads in [vec![vec![1; 5]], vec![vec![]], vec![vec![2; 1000], vec![3; 1000], vec![4; 1]]] {
            let datagrams: Vec<Outgoing<'_>> = payloads.iter().map(|p| (to, p.as_slice())).collect();
            a.writable().await.unwrap();
            assert_eq!(Sender::new().send(&a, None, &datagrams).unwrap(), payloads.len());
            let mut received: Vec<Vec<u8>> = Vec::new();
            while received.len() < payloads.len() {
                b.readable().await.unwrap();
                if let Ok((_, datagrams)) = segments.receive(&b) {
                    received.extend(datagrams.map(<[u8]>::to_vec));
                }
            }
            assert_eq!(received, payloads);
        }
    }
}
