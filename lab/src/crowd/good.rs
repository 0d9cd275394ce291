//! Good clients: each at its own pace, on a connection that it keeps while it can.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rustix::net::SocketFlags;

use super::{Counts, GOOD, PAGES, PATIENCE, Shared, count, open, request};

/// Each client asks at its rate, on a connection that it keeps while it can.
pub(super) fn ask_all(shared: &Shared, clients: &[Ipv4Addr], is_crowd: bool) -> Counts {
    let scene = shared.scene;
    let mut counts = Counts::default();
    let mut connections: Vec<Option<TcpStream>> = clients.iter().map(|_| None).collect();
    let pause = Duration::from_secs(1) / (scene.rate_per_s * clients.len() as u32).max(1);
    let mut turn = 0usize;
    let start = if is_crowd { scene.before } else { Duration::ZERO };
    while !shared.is_over() {
        let due = start + pause * turn as u32;
        let elapsed = shared.began.elapsed();
        if elapsed < due {
            std::thread::sleep((due - elapsed).min(Duration::from_millis(50)));
            continue;
        }
        let index = turn % clients.len();
        turn += 1;
        counts.asked += 1;
        let asked = Instant::now();
        let second = shared.began.elapsed().as_secs() as usize;
        // A page of the site, another one each time.
        let request = request(scene.server, &format!("{GOOD}{}", (turn * 7 + index) % PAGES), "");
        match ask(&mut connections[index], clients[index], scene.server, request.as_bytes()) {
            Ok(true) => {
                count(&mut counts.answered, second);
                if shared.attack_began() {
                    counts.latencies_ms.push(asked.elapsed().as_secs_f64() * 1e3);
                }
            }
            Ok(false) | Err(_) => {
                connections[index] = None;
                count(&mut counts.refused, second);
            }
        }
    }
    counts
}

/// One request on the client's connection, which is made if there is none; whether the answer is 200.
fn ask(
    connection: &mut Option<TcpStream>,
    source: Ipv4Addr,
    server: SocketAddr,
    request: &[u8],
) -> io::Result<bool> {
    let stream = match connection {
        Some(stream) => stream,
        None => {
            let stream = open(source, server, SocketFlags::CLOEXEC)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.set_write_timeout(Some(PATIENCE))?;
            connection.insert(stream)
        }
    };
    stream.write_all(request)?;
    let mut answer = Vec::with_capacity(4096);
    let mut buffer = [0; 4096];
    loop {
        let length = stream.read(&mut buffer)?;
        if length == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        answer.extend_from_slice(&buffer[..length]);
        if let Some(is_ok) = whole(&answer) {
            return Ok(is_ok);
        }
    }
}

/// Whether the answer is 200, once it is whole.
pub(super) fn whole(answer: &[u8]) -> Option<bool> {
    let head = memchr::memmem::find(answer, b"\r\n\r\n")? + 4;
    let text = std::str::from_utf8(&answer[..head]).ok()?.to_ascii_lowercase();
    let length =
        text.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse::<usize>().ok());
    (answer.len() >= head + length.unwrap_or(0)).then(|| text.starts_with("http/1.1 200"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_whole_with_its_last_byte() {
        let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc";
        assert!((0..answer.len()).all(|length| whole(&answer[..length]).is_none()));
        assert_eq!(whole(answer), Some(true));
        assert_eq!(whole(b"HTTP/1.1 429 No\r\nContent-Length: 0\r\n\r\n"), Some(false));
    }
}
