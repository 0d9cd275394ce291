//! A connection of the kernel's TCP, and segments that fit it: a request costs nobody anything before it does.

use std::io::{self, Read};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Socket, Type};

use super::packets::FRAME_PORT;
use super::{PORT, SERVER, Template, Testbed, frame};
use crate::Error;

const LIMIT: Duration = Duration::from_secs(10);

/// A connection from a client's host to the server's; both ends are held, and nothing is sent on it.
pub struct Established {
    from: Ipv4Addr,
    /// The sequence number that the server's end awaits.
    awaited: u32,
    _client: Socket,
    _server: TcpStream,
}

impl Established {
    /// Connects from an address of the clients' host.
    ///
    /// # Errors
    /// When the address is not there, or the server's port is taken.
    pub fn open(bed: &Testbed, from: Ipv4Addr) -> Result<Self, Error> {
        let failed = |error: io::Error| Error::Testbed(format!("cannot make a connection: {error}"));
        let prepared = bed.on_server(|| {
            let seen = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::TCP))?;
            seen.set_read_timeout(Some(LIMIT))?;
            Ok((TcpListener::bind((SERVER, PORT))?, seen))
        })?;
        let (listener, mut seen) = prepared.map_err(failed)?;
        let client = bed.on_client(|| connected(from))?.map_err(failed)?;
        let (server, _) = listener.accept().map_err(failed)?;
        let awaited = first_number(&mut seen, from).map_err(failed)?.wrapping_add(1);
        Ok(Self { from, awaited, _client: client, _server: server })
    }

    /// A frame with a segment that the server's end awaits.
    pub fn frame(&self, template: Template) -> Vec<u8> {
        frame(template, self.from, self.awaited)
    }
}

fn connected(from: Ipv4Addr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.bind(&SocketAddr::from((from, FRAME_PORT)).into())?;
    socket.connect_timeout(&SocketAddrV4::new(SERVER, PORT).into(), LIMIT)?;
    Ok(socket)
}

/// The sequence number of the SYN: a raw socket gets a copy of every segment with its IP header (raw(7)).
fn first_number(seen: &mut Socket, from: Ipv4Addr) -> io::Result<u32> {
    let deadline = Instant::now() + LIMIT;
    let mut packet = [0; 2048];
    while Instant::now() < deadline {
        let length = seen.read(&mut packet)?;
        if let Some(number) = number_of_syn(&packet[..length], from) {
            return Ok(number);
        }
    }
    Err(io::ErrorKind::TimedOut.into())
}

fn number_of_syn(packet: &[u8], from: Ipv4Addr) -> Option<u32> {
    const SYN_ALONE: u8 = 0x02;
    const ACK_AND_SYN: u8 = 0x12;
    let ip = packet.get(..20)?;
    let tcp = packet.get(usize::from(ip[0] & 0xf) * 4..)?.get(..20)?;
    let is_it = ip[12..16] == from.octets()
        && tcp[..2] == FRAME_PORT.to_be_bytes()
        && tcp[2..4] == PORT.to_be_bytes()
        && tcp[13] & ACK_AND_SYN == SYN_ALONE;
    is_it.then(|| u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_is_that_of_the_clients_syn_and_of_no_other_segment() {
        let from = Ipv4Addr::new(10, 77, 9, 9);
        let segment = |template, from| frame(template, from, 0xfedc_ba98)[14..].to_vec();
        assert_eq!(number_of_syn(&segment(Template::Syn, from), from), Some(0xfedc_ba98));
        assert_eq!(number_of_syn(&segment(Template::Acknowledgement, from), from), None);
        assert_eq!(number_of_syn(&segment(Template::Syn, SERVER), from), None);
        assert_eq!(number_of_syn(&segment(Template::Syn, from)[..39], from), None);
    }
}
