//! The least that a server can do: wait, read, write the same bytes. One thread, epoll, no parser, no limits.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};

/// Answers everything with one response of `size_bytes`, until it is killed.
pub(crate) fn serve(address: SocketAddr, size_bytes: usize) -> io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    let mut response = format!(
        "HTTP/1.1 200 OK\r\nServer: bare\r\nDate: Sun, 06 Nov 1994 08:49:37 GMT\r\nContent-Length: {size_bytes}\r\n\r\n"
    )
    .into_bytes();
    response.extend(std::iter::repeat_n(b'a', size_bytes));
    let poll = epoll::create(CreateFlags::CLOEXEC)?;
    epoll::add(&poll, &listener, EventData::new_u64(u64::MAX), EventFlags::IN)?;
    let mut clients: HashMap<u64, Client> = HashMap::new();
    let mut events: Vec<Event> = Vec::with_capacity(512);
    loop {
        events.clear();
        epoll::wait(&poll, rustix::buffer::spare_capacity(&mut events), None)?;
        for event in &events {
            let key = event.data.u64();
            if key == u64::MAX {
                while let Ok((stream, _)) = listener.accept() {
                    stream.set_nonblocking(true)?;
                    stream.set_nodelay(true)?;
                    let key = stream.as_raw_fd() as u64;
                    epoll::add(
                        &poll,
                        &stream,
                        EventData::new_u64(key),
                        EventFlags::IN | EventFlags::OUT | EventFlags::ET,
                    )?;
                    clients.insert(key, Client { stream, left: 0 });
                }
            } else if clients.get_mut(&key).is_some_and(|client| client.turn(&response).is_err()) {
                clients.remove(&key);
            }
        }
    }
}

struct Client {
    stream: TcpStream,
    /// Bytes of the response that the socket has not taken yet.
    left: usize,
}

impl Client {
    fn turn(&mut self, response: &[u8]) -> io::Result<()> {
        self.send(response)?;
        let mut buffer = [0; 16 * 1024];
        match self.stream.read(&mut buffer) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(length) => {
                let input = &buffer[..length];
                let heads = input.windows(4).filter(|window| *window == b"\r\n\r\n").count();
                self.left += heads * response.len();
                self.send(response)?;
                let close = input.windows(17).any(|window| window.eq_ignore_ascii_case(b"connection: close"));
                if close && self.left == 0 { Err(ErrorKind::ConnectionAborted.into()) } else { Ok(()) }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn send(&mut self, response: &[u8]) -> io::Result<()> {
        while self.left > 0 {
            let start = (response.len() - self.left % response.len()) % response.len();
            match self.stream.write(&response[start..]) {
                Ok(written) => self.left -= written,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
