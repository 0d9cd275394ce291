//! A web server inside a scenario: answers of any size, each with the number that was asked for, and a count of what was
//! executed.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

/// Longest request that is taken, head and body.
const REQUEST_BYTES: usize = 64 * 1024;

/// A proxy may open as many connections at once; beyond its queue the kernel resets some of them.
const BACKLOG: u32 = 4096;

/// How often each number was asked for by POST.
pub type Executed = Arc<Mutex<HashMap<u64, u32>>>;

/// The path of an answer of `size_bytes`, with `number` at its start.
pub fn path(size_bytes: usize, number: u64) -> String {
    format!("/o/{size_bytes}/{number}")
}

/// The answer's body.
pub fn body(size_bytes: usize, number: u64) -> Vec<u8> {
    let mut body = format!("{number}\n").into_bytes();
    body.resize(size_bytes.max(body.len()), b'.');
    body
}

/// Serves until the runtime ends. Nothing may be kept in a cache.
///
/// # Errors
/// When it cannot listen.
pub async fn serve(address: SocketAddr, executed: Executed) -> io::Result<()> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    let listener = socket.listen(BACKLOG)?;
    loop {
        let (stream, _) = listener.accept().await?;
        let executed = Arc::clone(&executed);
        tokio::spawn(async move {
            // A proxy that closes its connection is no failure of the site.
            let _ = answer_all(stream, &executed).await;
        });
    }
}

async fn answer_all(mut stream: TcpStream, executed: &Executed) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = Vec::new();
    loop {
        let Some((length, answer)) = answer(&buffer, executed)? else {
            if buffer.len() > REQUEST_BYTES || stream.read_buf(&mut buffer).await? == 0 {
                return Ok(());
            }
            continue;
        };
        buffer.drain(..length);
        stream.write_all(&answer).await?;
    }
}

/// The answer to the request at the front of `buffer` and that request's length; `None` if it is not whole yet.
fn answer(buffer: &[u8], executed: &Executed) -> io::Result<Option<(usize, Vec<u8>)>> {
    let mut fields = [httparse::EMPTY_HEADER; 64];
    let mut request = httparse::Request::new(&mut fields);
    let httparse::Status::Complete(head) = request.parse(buffer).map_err(io::Error::other)? else {
        return Ok(None);
    };
    let length = request.headers.iter().find(|field| field.name.eq_ignore_ascii_case("content-length"));
    let length: usize =
        length.and_then(|field| std::str::from_utf8(field.value).ok()?.parse().ok()).unwrap_or(0);
    if buffer.len() < head + length {
        return Ok(None);
    }
    let asked = request.path.and_then(|path| {
        let (size_bytes, number) = path.strip_prefix("/o/")?.split_once('/')?;
        Some((size_bytes.parse().ok()?, number.parse().ok()?))
    });
    let Some((size_bytes, number)) = asked else {
        let answer = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n".to_vec();
        return Ok(Some((head + length, answer)));
    };
    if request.method == Some("POST") {
        *executed.lock().unwrap_or_else(PoisonError::into_inner).entry(number).or_insert(0) += 1;
    }
    let body = body(size_bytes, number);
    let mut answer =
        format!("HTTP/1.1 200 OK\r\nCache-Control: no-store\r\nContent-Length: {}\r\n\r\n", body.len())
            .into_bytes();
    answer.extend_from_slice(&body);
    Ok(Some((head + length, answer)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_has_the_size_and_the_number_asked_for_and_a_post_is_counted() {
        let executed = Executed::default();
        let get = b"GET /o/100/7 HTTP/1.1\r\nHost: e\r\n\r\nrest";
        let (length, found) = answer(get, &executed).unwrap().unwrap();
        assert_eq!(length, get.len() - 4);
        assert!(found.ends_with(&body(100, 7)) && body(100, 7).len() == 100);
        assert!(executed.lock().unwrap().is_empty());
        let post = b"POST /o/1/8 HTTP/1.1\r\nHost: e\r\nContent-Length: 2\r\n\r\nab";
        assert_eq!(answer(&post[..post.len() - 1], &executed).unwrap(), None);
        assert_eq!(answer(post, &executed).unwrap().unwrap().0, post.len());
        assert_eq!(executed.lock().unwrap()[&8], 1);
    }

    #[test]
    fn another_path_is_not_found_and_no_request_is_an_error() {
        let (_, found) = answer(b"GET / HTTP/1.1\r\n\r\n", &Executed::default()).unwrap().unwrap();
        assert!(found.starts_with(b"HTTP/1.1 404"));
        assert!(answer(b"\0\0", &Executed::default()).is_err());
    }
}
