//! Which core's socket a datagram comes to: that of its connection, wherever the client sends it from.
//!
//! The kernel would choose a socket by the addresses of both ends, which change when a client moves to another network.
//! A connection's own ids begin with a byte that says where it is, and the kernel is told to look at that byte; a first
//! datagram has what the client has made up in its place, which spreads new connections over the cores.

use std::io;
use std::os::fd::AsRawFd;

use quinn::{ConnectionId, ConnectionIdGenerator};

/// Bytes of a connection's id, as few as others have (RFC 9000 §7.2).
const ID_BYTES: usize = 8;

// Classic BPF, as bpf(4) has it. Offsets are those in the datagram.
const LOAD_BYTE: u16 = (libc::BPF_LD | libc::BPF_B | libc::BPF_ABS) as u16;
const JUMP_IF_ANY: u16 = (libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K) as u16;
const JUMP: u16 = (libc::BPF_JMP | libc::BPF_JA) as u16;
const REMAINDER: u16 = (libc::BPF_ALU | libc::BPF_MOD | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_A) as u16;
/// A datagram's first byte has this bit where its header is a long one (RFC 8999 §5.1).
const LONG_HEADER: u32 = 0x80;
/// Where the destination's id begins: behind version and length in a long header, and at once in a short one.
const ID_OF_LONG: u32 = 6;
const ID_OF_SHORT: u32 = 1;

/// Has the kernel hand each datagram to that of `sockets`, all of one address, which its connection's id names. They are
/// in the order in which they were bound.
pub(crate) fn steer(sockets: &[impl AsRawFd]) -> io::Result<()> {
    let Some(first) = sockets.first() else { return Ok(()) };
    let count = u32::try_from(sockets.len()).unwrap_or(u32::MAX);
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let program = [
        step(LOAD_BYTE, 0, 0, 0),
        step(JUMP_IF_ANY, 0, 2, LONG_HEADER),
        step(LOAD_BYTE, 0, 0, ID_OF_LONG),
        step(JUMP, 0, 0, 1),
        step(LOAD_BYTE, 0, 0, ID_OF_SHORT),
        step(REMAINDER, 0, 0, count),
        step(RETURN, 0, 0, 0),
    ];
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_ptr().cast_mut() };
    // SAFETY: the program lives until the call returns, and its length is the one given; the kernel copies it.
    let result = unsafe {
        libc::setsockopt(
            first.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_REUSEPORT_CBPF,
            (&raw const program).cast(),
            size_of::<libc::sock_fprog>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Makes ids of connections whose datagrams are to come to the socket with the number `socket` of so many.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ids {
    socket: u8,
    sockets: u8,
}

impl Ids {
    /// Of more sockets than a byte can tell apart, those beyond get none.
    pub(super) fn new(socket: usize, sockets: usize) -> Self {
        let sockets = u8::try_from(sockets.max(1)).unwrap_or(u8::MAX);
        Self { socket: u8::try_from(socket).unwrap_or(u8::MAX).min(sockets - 1), sockets }
    }
}

impl ConnectionIdGenerator for Ids {
    fn generate_cid(&mut self) -> ConnectionId {
        let mut bytes = [0; ID_BYTES];
        // Without randomness there is no TLS either, and no connection that could have an id.
        let _ = aws_lc_rs::rand::fill(&mut bytes);
        let begin = bytes[0] - bytes[0] % self.sockets;
        bytes[0] = begin.checked_add(self.socket).unwrap_or(self.socket);
        ConnectionId::new(&bytes)
    }

    fn cid_len(&self) -> usize {
        ID_BYTES
    }

    fn cid_lifetime(&self) -> Option<std::time::Duration> {
        None
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::time::Duration;

    use socket2::{Domain, Socket, Type};

    use super::*;

    fn sockets(count: usize) -> Vec<UdpSocket> {
        let mut address: std::net::SocketAddr = "127.0.0.1:0".parse().unwrap();
        let bind = || {
            let socket = Socket::new(Domain::IPV4, Type::DGRAM, None).unwrap();
            socket.set_reuse_port(true).unwrap();
            socket.bind(&address.into()).unwrap();
            let socket = UdpSocket::from(socket);
            socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            address = socket.local_addr().unwrap();
            socket
        };
        std::iter::repeat_with(bind).take(count).collect()
    }

    /// Which of the sockets has the datagram.
    fn comes_to(sockets: &[UdpSocket], datagram: &[u8]) -> usize {
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        sender.send_to(datagram, sockets[0].local_addr().unwrap()).unwrap();
        for _ in 0..1000 {
            for (index, socket) in sockets.iter().enumerate() {
                socket.set_nonblocking(true).unwrap();
                if socket.recv(&mut [0; 2000]).is_ok() {
                    return index;
                }
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        panic!("nobody has it");
    }

    #[test]
    fn ids_name_a_socket_and_datagrams_with_them_come_to_it_wherever_they_are_from() {
        let sockets = sockets(3);
        steer(&sockets).unwrap();
        for index in 0..3 {
            for _ in 0..20 {
                let mut ids = Ids::new(index, 3);
                let id = ids.generate_cid();
                let short = [&[0x40], &id[..], &[7; 30]].concat();
                assert_eq!(comes_to(&sockets, &short), index);
                let long = [&[0xc0, 0, 0, 0, 1, 8], &id[..], &[7; 30]].concat();
                assert_eq!(comes_to(&sockets, &long), index);
            }
        }
    }

    #[test]
    fn datagrams_too_short_for_an_id_come_to_somebody() {
        let sockets = sockets(2);
        steer(&sockets).unwrap();
        comes_to(&sockets, &[0x40]);
        comes_to(&sockets, &[0xc0, 0]);
    }

    #[test]
    fn ids_of_the_last_of_many_sockets_are_its_own() {
        for (socket, sockets) in [(254, 255), (0, 255), (199, 200)] {
            let mut ids = Ids::new(socket, sockets);
            for _ in 0..1000 {
                let id = ids.generate_cid();
                assert_eq!(usize::from(id[0]) % sockets, socket);
            }
        }
    }
}
