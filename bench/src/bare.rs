//! The least that a server can do: wait, read, write the same bytes. One thread, epoll, no parser, no limits.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::net::{SocketFlags, accept_with, sockopt};

/// Marks the listener's events; no descriptor has this number.
const LISTENER: u64 = u64::MAX;

/// Answers everything with one response whose body has `size_bytes`, until it is killed.
///
/// # Errors
/// When it cannot listen on `address` or wait for events.
pub fn serve(address: SocketAddr, size_bytes: usize) -> io::Result<()> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    // Accepted sockets inherit it, which saves a system call for each.
    sockopt::set_tcp_nodelay(&listener, true)?;
    let mut response = format!(
        "HTTP/1.1 200 OK\r\nServer: bare\r\nDate: Sun, 06 Nov 1994 08:49:37 GMT\r\nContent-Length: {size_bytes}\r\n\r\n"
    )
    .into_bytes();
    response.extend(std::iter::repeat_n(b'a', size_bytes));
    let poll = epoll::create(CreateFlags::CLOEXEC)?;
    epoll::add(&poll, &listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
    // By descriptor, which the kernel numbers from the lowest that is free.
    let mut clients: Vec<Option<Client>> = Vec::new();
    let mut events: Vec<Event> = Vec::with_capacity(512);
    loop {
        events.clear();
        epoll::wait(&poll, rustix::buffer::spare_capacity(&mut events), None)?;
        for event in &events {
            let key = event.data.u64();
            if key == LISTENER {
                while let Ok(socket) = accept_with(&listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
                    let index = socket.as_raw_fd() as usize;
                    let interest = EventFlags::IN | EventFlags::OUT | EventFlags::ET;
                    epoll::add(&poll, &socket, EventData::new_u64(index as u64), interest)?;
                    if clients.len() <= index {
                        clients.resize_with(index + 1, || None);
                    }
                    clients[index] = Some(Client { stream: socket.into(), left: 0 });
                }
            } else if let Some(place) = clients.get_mut(key as usize)
                && place.as_mut().is_some_and(|client| client.turn(&response).is_err())
            {
                *place = None;
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
