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
    let responses =
        Responses { open: response(size_bytes, ""), last: response(size_bytes, "Connection: close\r\n") };
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
                    clients[index] = Some(Client { stream: socket.into(), left: 0, close: false });
                }
            } else if let Some(place) = clients.get_mut(key as usize)
                && place.as_mut().is_some_and(|client| client.turn(&responses).is_err())
            {
                *place = None;
            }
        }
    }
}

/// What is answered; the last one on a connection says so.
struct Responses {
    open: Vec<u8>,
    last: Vec<u8>,
}

fn response(size_bytes: usize, connection: &str) -> Vec<u8> {
    let head = format!(
        "HTTP/1.1 200 OK\r\nServer: bare\r\nDate: Sun, 06 Nov 1994 08:49:37 GMT\r\n{connection}\
         Content-Length: {size_bytes}\r\n\r\n"
    );
    let mut response = head.into_bytes();
    response.resize(response.len() + size_bytes, b'a');
    response
}

struct Client {
    stream: TcpStream,
    /// Bytes of the responses that the socket has not taken yet.
    left: usize,
    /// The client has asked for the end of the connection.
    close: bool,
}

impl Client {
    fn turn(&mut self, responses: &Responses) -> io::Result<()> {
        self.send(responses)?;
        let mut buffer = [0; 16 * 1024];
        match self.stream.read(&mut buffer) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(length) => {
                let input = &buffer[..length];
                let heads = input.windows(4).filter(|window| *window == b"\r\n\r\n").count();
                if input.windows(17).any(|window| window.eq_ignore_ascii_case(b"connection: close")) {
                    self.close = true;
                    self.left = responses.last.len();
                } else {
                    self.left += heads * responses.open.len();
                }
                self.send(responses)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn send(&mut self, responses: &Responses) -> io::Result<()> {
        let response = if self.close { &responses.last } else { &responses.open };
        while self.left > 0 {
            let start = (response.len() - self.left % response.len()) % response.len();
            match self.stream.write(&response[start..]) {
                Ok(written) => self.left -= written,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        if self.close { Err(ErrorKind::ConnectionAborted.into()) } else { Ok(()) }
    }
}
