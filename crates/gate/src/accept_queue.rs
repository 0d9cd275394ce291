//! How many connections wait to be accepted, by sock_diag(7): /proc/net/tcp would have the kernel walk the table of all
//! established connections for the few lines about listening ones.

use std::fs::File;
use std::io::{self, BufRead, BufReader};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with, sockopt,
};

/// An answer's `nlmsghdr`, and within the `inet_diag_msg` behind it the listening port and the length of its queue.
const HEADER_BYTES: usize = 16;
const PORT_AT: usize = HEADER_BYTES + 4;
const QUEUE_AT: usize = HEADER_BYTES + 56;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
/// `NLM_F_REQUEST` and `NLM_F_DUMP`.
const FLAGS: u16 = 0x301;
/// `TCP_LISTEN` as a bit.
const LISTENING: u32 = 1 << 10;
/// The kernel fills a buffer with whole messages.
const BUFFER_BYTES: usize = 32 * 1024;

/// Connections that wait to be accepted on these ports, in the calling thread's network namespace.
pub(crate) fn depth(ports: &[u16]) -> u32 {
    let families = [AddressFamily::INET, AddressFamily::INET6];
    let asked: io::Result<Vec<u32>> = families.into_iter().map(|family| asked(family, ports)).collect();
    match asked {
        Ok(depths) => depths.into_iter().sum(),
        // A kernel without inet_diag.
        Err(_) => ["/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"]
            .into_iter()
            .map(|path| listed(path, ports))
            .sum(),
    }
}

fn asked(family: AddressFamily, ports: &[u16]) -> io::Result<u32> {
    let kernel =
        socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, Some(netlink::SOCK_DIAG))?;
    sockopt::set_socket_timeout(&kernel, sockopt::Timeout::Recv, Some(std::time::Duration::from_secs(1)))?;
    send(&kernel, &request(family), SendFlags::empty())?;
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut depth = 0;
    loop {
        let (_, length) = recv(&kernel, &mut *buffer, RecvFlags::empty())?;
        let mut messages = &buffer[..length.min(BUFFER_BYTES)];
        if messages.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        while messages.len() >= HEADER_BYTES {
            let length = field(messages, 0).map_or(0, |length| length as usize);
            match messages.get(4..6) {
                Some(kind) if kind == NLMSG_DONE.to_ne_bytes() => return Ok(depth),
                Some(kind) if kind == NLMSG_ERROR.to_ne_bytes() => {
                    return Err(io::ErrorKind::Unsupported.into());
                }
                _ => {}
            }
            let port = messages.get(PORT_AT..PORT_AT + 2).map(|port| u16::from_be_bytes([port[0], port[1]]));
            if port.is_some_and(|port| ports.contains(&port)) {
                depth += field(messages, QUEUE_AT).unwrap_or(0);
            }
            // Messages are aligned to four bytes; one of no length would be the last for ever.
            messages = messages.get(length.max(HEADER_BYTES).next_multiple_of(4)..).unwrap_or(&[]);
        }
    }
}

/// Asks for every listening TCP socket: an `nlmsghdr` and an `inet_diag_req_v2`.
fn request(family: AddressFamily) -> [u8; 72] {
    let mut request = [0; 72];
    let length = (request.len() as u32).to_ne_bytes();
    request[..4].copy_from_slice(&length);
    request[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    request[6..8].copy_from_slice(&FLAGS.to_ne_bytes());
    // Families and protocols have small numbers.
    request[16] = family.as_raw() as u8;
    request[17] = libc::IPPROTO_TCP as u8;
    request[20..24].copy_from_slice(&LISTENING.to_ne_bytes());
    request
}

fn field(message: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(message.get(at..at + 4)?.try_into().ok()?))
}

/// Listening sockets come first in these files, so that the rest need not be read.
fn listed(path: &str, ports: &[u16]) -> u32 {
    const LISTENING: &str = "0A";
    let Ok(file) = File::open(path) else { return 0 };
    let mut depth = 0;
    for line in BufReader::new(file).lines().skip(1).map_while(Result::ok) {
        let words: Vec<&str> = line.split_ascii_whitespace().take(5).collect();
        let [_, local, _, state, queues] = words.as_slice() else { break };
        if *state != LISTENING {
            break;
        }
        let port = local.rsplit_once(':').and_then(|(_, port)| u16::from_str_radix(port, 16).ok());
        if port.is_some_and(|port| ports.contains(&port)) {
            let waiting =
                queues.rsplit_once(':').and_then(|(_, waiting)| u32::from_str_radix(waiting, 16).ok());
            depth += waiting.unwrap_or(0);
        }
    }
    depth
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depth_of_an_accept_queue_is_that_of_its_port_whoever_is_asked() {
        for (address, family, path) in [
            ("127.0.0.1:0", AddressFamily::INET, "/proc/thread-self/net/tcp"),
            ("[::1]:0", AddressFamily::INET6, "/proc/thread-self/net/tcp6"),
        ] {
            let listener = std::net::TcpListener::bind(address).unwrap();
            let address = listener.local_addr().unwrap();
            let _clients: Vec<_> = (0..3).map(|_| std::net::TcpStream::connect(address).unwrap()).collect();
            let ports = [address.port()];
            // Connections get there with the handshake's last packet, perhaps after `connect` has returned.
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
            while depth(&ports) != 3 {
                assert!(std::time::Instant::now() < deadline, "{} wait", depth(&ports));
                std::thread::yield_now();
            }
            for left in [3, 2] {
                assert_eq!(depth(&ports), left);
                assert_eq!(asked(family, &ports).unwrap(), left);
                assert_eq!(listed(path, &ports), left);
                listener.accept().unwrap();
            }
            assert_eq!(depth(&[]), 0);
        }
    }
}
