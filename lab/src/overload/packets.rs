//! Packets that no TCP of ours would send: SYNs of a flood, and requests of clients that care for no answer.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Socket, Type};

use super::{PORT, SERVER, Testbed};
use crate::Error;

/// What is sent.
#[derive(Clone, Copy, Debug)]
pub enum Template {
    /// A new connection.
    Syn,
    /// A request for this path, on a connection that only its sender believes in.
    Request(&'static str),
    /// A request for this path with a browser's fields and this cookie.
    Browser(&'static str, &'static str),
    /// A segment that says nothing.
    Acknowledgement,
}

/// A flood: `sources` addresses from `first` on take turns, `per_s` packets together.
#[derive(Clone, Copy, Debug)]
pub struct Flood {
    /// What is sent.
    pub template: Template,
    /// The first source address.
    pub first: Ipv4Addr,
    /// How many addresses.
    pub sources: u32,
    /// Packets per second, or what the machine sends if that is less.
    pub per_s: f64,
}

/// What was sent.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sent {
    /// Packets.
    pub packets: u64,
    /// In so long.
    pub seconds: f64,
}

impl Sent {
    /// Packets per second.
    pub fn rate(&self) -> f64 {
        self.packets as f64 / self.seconds.max(1e-9)
    }
}

/// The port that frames come from.
pub(super) const FRAME_PORT: u16 = 40_000;

/// A frame with such a packet and sequence number, for kernel programs that are run without a network.
pub fn frame(template: Template, from: Ipv4Addr, sequence: u32) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0];
    frame.extend_from_slice(Packet::new(template).from(from, FRAME_PORT, sequence));
    frame
}

/// Packets between two looks at the clock.
const BATCH: u64 = 64;

impl Flood {
    /// Sends from the clients' host until `end`, and for at most `limit`.
    ///
    /// # Errors
    /// When there can be no raw socket.
    pub fn run(&self, bed: &Testbed, end: &AtomicBool, limit: Duration) -> Result<Sent, Error> {
        let sent = bed.on_client(|| self.send(end, limit))?;
        sent.map_err(|error| Error::Testbed(format!("cannot send raw packets: {error}")))
    }

    fn send(&self, end: &AtomicBool, limit: Duration) -> io::Result<Sent> {
        // IPPROTO_RAW: the packet begins with its IP header (raw(7)).
        let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(255)))?;
        let to = SocketAddrV4::new(SERVER, PORT).into();
        let begun = Instant::now();
        let mut packets = 0u64;
        let mut packet = Packet::new(self.template);
        while !end.load(Ordering::Relaxed) && begun.elapsed() < limit {
            let due = (begun.elapsed().as_secs_f64() * self.per_s) as u64;
            if packets >= due {
                std::thread::sleep(Duration::from_micros(200));
                continue;
            }
            for _ in 0..BATCH.min(due - packets) {
                // A stride that meets every address before one comes again, and no neighbours one after the other.
                let turn = packets.wrapping_mul(7919) % u64::from(self.sources);
                let from = Ipv4Addr::from(u32::from(self.first) + turn as u32);
                let bytes = packet.from(from, 1024 + (packets % 60_000) as u16, packets as u32);
                // A full queue loses a packet, as a wire would.
                let _ = socket.send_to(bytes, &to);
                packets += 1;
            }
        }
        Ok(Sent { packets, seconds: begun.elapsed().as_secs_f64() })
    }
}

/// One packet, made again for each sender.
struct Packet {
    bytes: Vec<u8>,
    /// Sum of all that never changes.
    sum: u32,
}

const IP: usize = 20;
const TCP: usize = 20;

impl Packet {
    fn new(template: Template) -> Self {
        let (flags, payload) = match template {
            Template::Syn => (0x02, String::new()),
            Template::Acknowledgement => (0x10, String::new()),
            Template::Browser(path, cookie) => (
                0x18,
                format!(
                    "GET {path} HTTP/1.1\r\nHost: www.example.org\r\nUser-Agent: Mozilla/5.0 (X11; Linux x86_64) \
                     AppleWebKit/537.36\r\nAccept: text/html,application/xhtml+xml\r\nAccept-Language: en\r\n\
                     Cookie: session=0123456789abcdef; {cookie}; theme=dark\r\nConnection: keep-alive\r\n\r\n"
                ),
            ),
            Template::Request(path) => (0x18, format!("GET {path} HTTP/1.1\r\nHost: {SERVER}\r\n\r\n")),
        };
        let mut bytes = vec![0; IP + TCP];
        bytes.extend_from_slice(payload.as_bytes());
        let length = bytes.len() as u16;
        bytes[0] = 0x45;
        bytes[2..4].copy_from_slice(&length.to_be_bytes());
        bytes[8] = 64;
        bytes[9] = 6;
        bytes[16..20].copy_from_slice(&SERVER.octets());
        bytes[IP + 2..IP + 4].copy_from_slice(&PORT.to_be_bytes());
        bytes[IP + 12] = 5 << 4;
        bytes[IP + 13] = flags;
        bytes[IP + 14..IP + 16].copy_from_slice(&64_000u16.to_be_bytes());
        // The pseudo-header of RFC 9293 §3.1, without the source.
        let sum = words(&bytes[16..20]) + 6 + u32::from(length) - IP as u32 + words(&bytes[IP..]);
        Self { bytes, sum }
    }

    fn from(&mut self, source: Ipv4Addr, port: u16, seq: u32) -> &[u8] {
        let bytes = &mut self.bytes;
        bytes[12..16].copy_from_slice(&source.octets());
        bytes[IP..IP + 2].copy_from_slice(&port.to_be_bytes());
        bytes[IP + 4..IP + 8].copy_from_slice(&seq.to_be_bytes());
        let changing = words(&source.octets()) + u32::from(port) + words(&seq.to_be_bytes());
        bytes[IP + 16..IP + 18].copy_from_slice(&folded(self.sum + changing).to_be_bytes());
        bytes
    }
}

fn words(bytes: &[u8]) -> u32 {
    bytes.chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word.get(1).copied().unwrap_or(0))).sum()
}

/// RFC 1071.
fn folded(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_the_whole_segment() {
        for template in [Template::Syn, Template::Request("/cgi-bin/search"), Template::Acknowledgement] {
            let mut packet = Packet::new(template);
            let bytes = packet.from(Ipv4Addr::new(10, 128, 3, 4), 54_321, 0xfedc_ba98).to_vec();
            let length = (bytes.len() - IP) as u32;
            let pseudo = words(&bytes[12..20]) + 6 + length;
            assert_eq!(folded(pseudo + words(&bytes[IP..])), 0, "{template:?}");
        }
    }
}
