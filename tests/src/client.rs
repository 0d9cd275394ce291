//! A client that sends exactly the bytes it is given.

use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};

use rustls::{ClientConnection, StreamOwned};

use crate::message::{Fields, Response, invalid, read_chunked, read_exactly, read_line};
use crate::{Certificate, PATIENCE};

/// One connection to tidegate.
pub struct Client {
    input: BufReader<Stream>,
}

enum Stream {
    Plain(TcpStream),
    Tls(Box<StreamOwned<ClientConnection, TcpStream>>),
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.read(buffer),
            Self::Tls(stream) => stream.read(buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.write(bytes),
            Self::Tls(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(stream) => stream.flush(),
            Self::Tls(stream) => stream.flush(),
        }
    }
}

impl Client {
    /// Connects, or panics.
    pub fn connect(address: SocketAddr) -> Self {
        Self::try_connect(address).unwrap_or_else(|error| panic!("connect to {address}: {error}"))
    }

    /// Connects.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn try_connect(address: SocketAddr) -> io::Result<Self> {
        Ok(Self::over(Self::socket(address)?))
    }

    /// Connects from this address, such as another one of 127.0.0.0/8.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn try_connect_from(source: IpAddr, address: SocketAddr) -> io::Result<Self> {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};
        let family = if source.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
        let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        bind(&socket, &SocketAddr::new(source, 0))?;
        connect(&socket, &address)?;
        Ok(Self::over(patient(TcpStream::from(socket))?))
    }

    /// Connects with TLS for `name`, where the server has to show one of these certificates.
    ///
    /// # Errors
    /// What the kernel or the server says, or what is wrong with its certificate.
    pub fn try_connect_tls(address: SocketAddr, name: &str, trusted: &[&Certificate]) -> io::Result<Self> {
        Self::try_connect(address)?.encrypted(name, trusted)
    }

    /// Goes on with TLS, after what was sent in the clear.
    ///
    /// # Errors
    /// As with [`Client::try_connect_tls`].
    pub fn encrypted(self, name: &str, trusted: &[&Certificate]) -> io::Result<Self> {
        let Stream::Plain(mut socket) = self.input.into_inner() else { panic!("encrypted already") };
        let name = name.to_owned().try_into().map_err(io::Error::other)?;
        let mut tls = ClientConnection::new(Certificate::client_config(trusted, b"http/1.1"), name)
            .map_err(io::Error::other)?;
        while tls.is_handshaking() {
            tls.complete_io(&mut socket)?;
        }
        Ok(Self { input: BufReader::new(Stream::Tls(Box::new(StreamOwned::new(tls, socket)))) })
    }

    fn over(stream: TcpStream) -> Self {
        Self { input: BufReader::new(Stream::Plain(stream)) }
    }

    fn socket(address: SocketAddr) -> io::Result<TcpStream> {
        patient(TcpStream::connect_timeout(&address, PATIENCE)?)
    }

    /// The socket.
    pub fn stream(&self) -> &TcpStream {
        match self.input.get_ref() {
            Stream::Plain(stream) => stream,
            Stream::Tls(stream) => &stream.sock,
        }
    }

    /// Sends bytes as they are.
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.try_send(bytes).expect("send");
    }

    /// Sends bytes as they are; an error says that the other side has closed.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<()> {
        self.input.get_mut().write_all(bytes.as_ref())?;
        self.input.get_mut().flush()
    }

    /// Begins to encrypt with new keys, so many times one after the other (RFC 8446 §4.6.3).
    ///
    /// # Errors
    /// What the kernel says.
    pub fn change_keys(&mut self, times: usize) -> io::Result<()> {
        let Stream::Tls(stream) = self.input.get_mut() else { panic!("not encrypted") };
        for _ in 0..times {
            stream.conn.refresh_traffic_keys().map_err(io::Error::other)?;
        }
        stream.flush()
    }

    /// Ends the sending direction.
    pub fn finish(&mut self) {
        self.stream().shutdown(Shutdown::Write).expect("shutdown");
    }

    /// Sends a GET for example.org and reads the response.
    pub fn get(&mut self, target: &str) -> Response {
        self.request("GET", target, "")
    }

    /// Sends a request without content for example.org, with further field lines (each ended by CRLF).
    pub fn request(&mut self, method: &str, target: &str, fields: &str) -> Response {
        self.send(format!("{method} {target} HTTP/1.1\r\nHost: example.org\r\n{fields}\r\n"));
        self.response_to(method)
    }

    /// Reads the response to a request other than HEAD.
    pub fn response(&mut self) -> Response {
        self.response_to("GET")
    }

    /// Reads the final response to a request with this method.
    pub fn response_to(&mut self, method: &str) -> Response {
        self.try_response(method).expect("a whole response")
    }

    /// Reads the final response to a request with this method; interim ones are passed over.
    ///
    /// # Errors
    /// The connection ended early, or what came is no response.
    pub fn try_response(&mut self, method: &str) -> io::Result<Response> {
        loop {
            let (status, fields) = self.try_head()?;
            if (100..200).contains(&status) && status != 101 {
                continue;
            }
            let mut response = Response { status, fields, body: Vec::new(), trailers: Fields::default() };
            if method == "HEAD" || matches!(status, 101 | 204 | 304) {
                return Ok(response);
            }
            if response.field("Transfer-Encoding").eq_ignore_ascii_case("chunked") {
                response.trailers = read_chunked(&mut self.input, &mut response.body)?;
            } else if let Some(length) = response.fields.get("Content-Length") {
                let length = length.parse().map_err(|_| invalid(format!("Content-Length {length:?}")))?;
                read_exactly(&mut self.input, length, &mut response.body)?;
            } else {
                self.input.read_to_end(&mut response.body)?;
            }
            return Ok(response);
        }
    }

    /// Reads one head, interim or final.
    pub fn head(&mut self) -> (u16, Fields) {
        self.try_head().expect("a response head")
    }

    fn try_head(&mut self) -> io::Result<(u16, Fields)> {
        let line = read_line(&mut self.input)?;
        let status = line.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)?.parse().ok());
        let status = status.ok_or_else(|| invalid(format!("not a status line: {line:?}")))?;
        Ok((status, Fields::read(&mut self.input)?))
    }

    /// Reads exactly so many bytes, as they are.
    pub fn read_bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        read_exactly(&mut self.input, count as u64, &mut bytes).expect("more bytes");
        bytes
    }

    /// The data of one chunk of a body (RFC 9112 §7.1); of the last one none, and its trailers are passed over.
    pub fn chunk(&mut self) -> Vec<u8> {
        let line = read_line(&mut self.input).expect("a chunk");
        let size =
            u64::from_str_radix(line.split(';').next().unwrap_or_default(), 16).expect("a chunk's size");
        let mut data = Vec::new();
        if size == 0 {
            Fields::read(&mut self.input).expect("trailers");
        } else {
            read_exactly(&mut self.input, size, &mut data).expect("a whole chunk");
            assert_eq!(read_line(&mut self.input).expect("a chunk's end"), "");
        }
        data
    }

    /// Whether the server has read all that was sent to it: nothing waits in its socket (proc(5), `/proc/net/tcp`).
    pub fn is_read(&self) -> bool {
        let (Ok(SocketAddr::V4(own)), Ok(SocketAddr::V4(server))) =
            (self.stream().local_addr(), self.stream().peer_addr())
        else {
            panic!("only connections over IPv4 are looked up");
        };
        // Addresses stand there in the host's byte order, ports in order.
        let written = |address: std::net::SocketAddrV4| {
            format!("{:08X}:{:04X}", u32::from_ne_bytes(address.ip().octets()), address.port())
        };
        let ends = format!(" {} {} 01 ", written(server), written(own));
        let table = std::fs::read_to_string("/proc/net/tcp").expect("the table of connections");
        // The server's end, established: then come the send and the receive queue.
        let queues = table.lines().find_map(|line| line.split_once(&ends)?.1.split(' ').next());
        queues.is_some_and(|queues| queues.ends_with(":00000000"))
    }

    /// Bytes that have arrived and have not been read.
    pub fn unread(&self) -> usize {
        let waiting = rustix::io::ioctl_fionread(self.stream()).expect("the receive queue");
        usize::try_from(waiting).unwrap_or(usize::MAX) + self.input.buffer().len()
    }

    /// Whether the other side has ended the connection: waits for its end or for a byte.
    pub fn is_closed(&mut self) -> bool {
        match self.input.fill_buf() {
            Ok(bytes) => bytes.is_empty(),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => false,
            Err(_) => true,
        }
    }

    /// Everything until the other side closes, or panics if it does not.
    pub fn rest(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self.input.read_to_end(&mut bytes) {
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                panic!("the connection is still open after {:?}", String::from_utf8_lossy(&bytes))
            }
            // A reset after the last byte is an end too.
            _ => bytes,
        }
    }
}

fn patient(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}
