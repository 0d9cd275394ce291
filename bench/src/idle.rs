//! What an idle connection costs a server in memory of its own.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::peers::Peer;

/// How often, and for how long at most, it is looked whether the server has put its memory in order.
const STEP: Duration = Duration::from_millis(500);
const SETTLE: Duration = Duration::from_secs(10);
const ANSWER: Duration = Duration::from_secs(10);

/// Opens `connections` to a server that was just started, has one request answered on each, one after the other, and
/// leaves them open: by how many bytes the server's anonymous memory has grown for each. What the kernel needs for them
/// is not in it.
///
/// # Errors
/// A sentence that says which connection failed and why.
pub fn bytes_per_connection(peer: &Peer, connections: usize, size_bytes: usize) -> Result<f64, String> {
    let before = peer.anonymous_bytes()?;
    let request = format!("GET /object HTTP/1.1\r\nHost: {}\r\n\r\n", peer.address());
    let mut open = Vec::with_capacity(connections);
    for index in 0..connections {
        let stream = answered(peer, &request, size_bytes)
            .map_err(|error| format!("connection {} of {connections}: {error}", index + 1))?;
        open.push(stream);
    }
    let deadline = Instant::now() + SETTLE;
    let mut after = peer.anonymous_bytes()?;
    loop {
        std::thread::sleep(STEP);
        let now = peer.anonymous_bytes()?;
        if now == after || Instant::now() > deadline {
            break;
        }
        after = now;
    }
    // A server that had closed them would have saved the memory.
    let closed = open.iter().filter(|stream| is_closed(stream)).count();
    if closed > 0 {
        return Err(format!("the server closed {closed} of {connections} idle connections"));
    }
    Ok((after as f64 - before as f64) / connections as f64)
}

/// A new connection whose first request was answered.
fn answered(peer: &Peer, request: &str, size_bytes: usize) -> std::io::Result<TcpStream> {
    let mut stream = TcpStream::connect(peer.address())?;
    stream.set_read_timeout(Some(ANSWER))?;
    stream.write_all(request.as_bytes())?;
    let mut answer = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let length = stream.read(&mut buffer)?;
        if length == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        answer.extend_from_slice(&buffer[..length]);
        let head = answer.windows(4).position(|window| window == b"\r\n\r\n").map(|at| at + 4);
        if head.is_some_and(|head| answer.len() >= head + size_bytes) {
            return Ok(stream);
        }
    }
}

fn is_closed(stream: &TcpStream) -> bool {
    let quiet = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
    !matches!(quiet, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn an_open_connection_is_not_closed_and_one_that_the_other_end_has_left_is() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        assert!(!is_closed(&client));
        client.set_nonblocking(false).unwrap();
        server.write_all(b"x").unwrap();
        drop(server);
        // The byte that comes first ends the wait; then the end of the stream is there or near, and reading finds it.
        (&client).read_exact(&mut [0]).unwrap();
        assert_eq!((&client).read(&mut [0]).unwrap(), 0);
        assert!(is_closed(&client));
    }
}
