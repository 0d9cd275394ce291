//! Clients that ask for far more than they may have, by the kernel's TCP: many requests at once on connections that stay.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, Type};

use super::{Sent, Testbed};
use crate::Error;

/// Pipelined requests on a few connections.
#[derive(Clone, Copy, Debug)]
pub struct Greedy {
    /// The first of the addresses, one for each connection.
    pub first: Ipv4Addr,
    /// Connections.
    pub connections: u8,
    /// What is asked for.
    pub path: &'static str,
    /// Requests per second, all together; fewer where the server does not take more.
    pub per_s: f64,
}

/// Between two writes on a connection.
const STEP: Duration = Duration::from_millis(2);
/// For a server that does not answer at all.
const PATIENCE: Duration = Duration::from_millis(500);

impl Greedy {
    /// Asks from the clients' host until `end`, and for at most `limit`. What counts is what the server's host took.
    ///
    /// # Errors
    /// When the clients' host cannot be entered.
    pub fn run(&self, bed: &Testbed, end: &AtomicBool, limit: Duration) -> Result<Sent, Error> {
        bed.on_client(|| self.ask(bed.address(), end, limit))
    }

    fn ask(&self, to: SocketAddr, end: &AtomicBool, limit: Duration) -> Sent {
        let begun = Instant::now();
        let request = format!("GET {} HTTP/1.1\r\nHost: {to}\r\n\r\n", self.path);
        let mut connections: Vec<Option<TcpStream>> = (0..self.connections).map(|_| None).collect();
        let mut sent = 0u64;
        let mut buffer = vec![0; 1 << 18];
        while !end.load(Ordering::Relaxed) && begun.elapsed() < limit {
            let due = (begun.elapsed().as_secs_f64() * self.per_s) as u64;
            let each = (due.saturating_sub(sent) / u64::from(self.connections.max(1))).min(1000);
            for (number, connection) in (0u8..).zip(&mut connections) {
                if connection.is_none() {
                    let from = Ipv4Addr::from(u32::from(self.first) + u32::from(number));
                    *connection = connect(from, to).ok();
                }
                let Some(stream) = connection else { continue };
                match exchange(stream, request.repeat(each as usize).as_bytes(), &mut buffer) {
                    Ok(bytes) => sent += (bytes / request.len()) as u64,
                    Err(_) => *connection = None,
                }
            }
            std::thread::sleep(STEP);
        }
        Sent { packets: sent, seconds: begun.elapsed().as_secs_f64() }
    }
}

fn connect(from: Ipv4Addr, to: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.bind(&SocketAddr::from((from, 0)).into())?;
    socket.connect_timeout(&to.into(), PATIENCE)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// Writes what the kernel takes, reads what has come; gives the bytes written. A request cut short goes on with the next
/// one's beginning, which no server takes for a request: then the connection ends, as it does when it is refused.
fn exchange(stream: &mut TcpStream, requests: &[u8], buffer: &mut [u8]) -> std::io::Result<usize> {
    loop {
        match stream.read(buffer) {
            Ok(0) => return Err(ErrorKind::ConnectionReset.into()),
            Ok(length) if length == buffer.len() => {}
            Ok(_) => break,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
        }
    }
    match stream.write(requests) {
        Ok(written) if written == requests.len() => Ok(written),
        Ok(_) => Err(ErrorKind::WriteZero.into()),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
        Err(error) => Err(error),
    }
}
