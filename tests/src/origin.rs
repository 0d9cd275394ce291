//! An origin server that does what a test tells it to.

use std::io::{self, BufRead, BufReader, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use crate::message::{Fields, read_chunked, read_exactly, read_line};
use crate::{PATIENCE, free_port};

/// A request as the origin got it.
#[derive(Clone, Debug)]
pub struct Request {
    /// Method.
    pub method: String,
    /// Request target.
    pub target: String,
    /// The head's fields.
    pub fields: Fields,
    /// The content, without any transfer coding.
    pub body: Vec<u8>,
    /// What followed the last chunk.
    pub trailers: Fields,
    /// Which of the origin's connections it came on, from 0.
    pub connection: usize,
}

impl Request {
    /// A field's value, or an empty string.
    pub fn field(&self, name: &str) -> String {
        self.fields.get(name).unwrap_or_default()
    }
}

type Script = Box<dyn FnOnce(&mut TcpStream) -> io::Result<()> + Send>;

/// What the origin does with a request.
pub enum Reply {
    /// Sends a response with `Content-Length` and keeps the connection.
    Whole {
        /// Status code.
        status: u16,
        /// Field lines, each ended by CRLF.
        fields: String,
        /// The content.
        body: Vec<u8>,
    },
    /// Sends these bytes and keeps the connection.
    Raw(Vec<u8>),
    /// Sends these bytes and closes the connection.
    RawThenClose(Vec<u8>),
    /// Does this with the connection, then closes it.
    Script(Script),
    /// Closes the connection without a word.
    Close,
}

impl Reply {
    /// 200 with this content.
    pub fn ok(body: impl Into<Vec<u8>>) -> Self {
        Self::status(200, body)
    }

    /// This status with this content.
    pub fn status(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self::Whole { status, fields: String::new(), body: body.into() }
    }

    /// 200 that may be stored for a minute.
    pub fn cacheable(body: impl Into<Vec<u8>>) -> Self {
        Self::ok(body).with("Cache-Control", "max-age=60")
    }

    /// One more field.
    #[must_use]
    pub fn with(mut self, name: &str, value: &str) -> Self {
        let Self::Whole { fields, .. } = &mut self else { panic!("fields belong to a whole response") };
        fields.push_str(&format!("{name}: {value}\r\n"));
        self
    }

    /// Does this with the connection, then closes it.
    pub fn script(script: impl FnOnce(&mut TcpStream) -> io::Result<()> + Send + 'static) -> Self {
        Self::Script(Box::new(script))
    }
}

/// A door that holds replies back until the test opens it.
#[derive(Clone, Default)]
pub struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    /// Lets everything pass from now on.
    pub fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    /// Whether it is open.
    pub fn is_open(&self) -> bool {
        *self.0.0.lock().unwrap()
    }

    /// Waits until it is open.
    pub fn pass(&self) {
        let open = self.0.0.lock().unwrap();
        let (open, _) = self.0.1.wait_timeout_while(open, PATIENCE, |open| !*open).unwrap();
        assert!(*open, "the gate was never opened");
    }
}

type Handler = dyn Fn(&Request) -> Reply + Send + Sync;

struct Shared {
    handler: Box<Handler>,
    requests: Mutex<Vec<Request>>,
    connections: Mutex<Vec<TcpStream>>,
    stopped: AtomicBool,
}

/// A running origin; it ends with the value.
pub struct Origin {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl Origin {
    /// Starts an origin that answers each request as `handler` says.
    pub fn start(handler: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        Self::start_at(SocketAddr::from(([127, 0, 0, 1], free_port())), handler)
    }

    /// Starts an origin that answers `answer 1`, `answer 2` and so on, with these fields: a second answer differs from
    /// the first.
    pub fn counting(fields: &'static [(&'static str, &'static str)]) -> Self {
        let count = AtomicUsize::new(0);
        Self::start(move |_| {
            let number = count.fetch_add(1, Ordering::SeqCst) + 1;
            let reply = Reply::ok(format!("answer {number}"));
            fields.iter().fold(reply, |reply, (name, value)| reply.with(name, value))
        })
    }

    /// As [`Origin::start`], on an address of the test's choice.
    pub fn start_at(
        address: SocketAddr,
        handler: impl Fn(&Request) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind(address).expect("the origin's address");
        let shared = Arc::new(Shared {
            handler: Box::new(handler),
            requests: Mutex::default(),
            connections: Mutex::default(),
            stopped: AtomicBool::new(false),
        });
        let accepting = Arc::clone(&shared);
        std::thread::spawn(move || accept(&listener, &accepting));
        Self { address, shared }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Every request so far, in the order of arrival.
    pub fn requests(&self) -> Vec<Request> {
        self.shared.requests.lock().unwrap().clone()
    }

    /// How many requests have come.
    pub fn count(&self) -> usize {
        self.shared.requests.lock().unwrap().len()
    }

    /// The latest request.
    pub fn last(&self) -> Request {
        self.shared.requests.lock().unwrap().last().expect("a request at the origin").clone()
    }

    /// Connections accepted so far.
    pub fn connections(&self) -> usize {
        self.shared.connections.lock().unwrap().len()
    }

    /// Closes every connection and listens no more: from now on connections are refused.
    pub fn stop(&self) {
        if self.shared.stopped.swap(true, Ordering::SeqCst) {
            return;
        }
        // Wakes the accepting thread, which then drops the listener.
        let _ = TcpStream::connect(self.address);
        self.close_connections();
        let deadline = Instant::now() + PATIENCE;
        while TcpStream::connect(self.address).is_ok() && Instant::now() < deadline {
            std::thread::yield_now();
        }
    }

    /// Closes every open connection, as an origin does that finds them idle for too long.
    pub fn close_connections(&self) {
        for connection in self.shared.connections.lock().unwrap().iter() {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Origin {
    fn drop(&mut self) {
        self.stop();
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    while let Ok((stream, _)) = listener.accept() {
        if shared.stopped.load(Ordering::SeqCst) {
            return;
        }
        let number = {
            let mut connections = shared.connections.lock().unwrap();
            connections.push(stream.try_clone().unwrap());
            connections.len() - 1
        };
        let shared = Arc::clone(shared);
        std::thread::spawn(move || {
            // A broken connection is what many tests are about; what is no request is answered as servers do.
            if let Err(error) = stream.try_clone().and_then(|own| converse(own, number, &shared)) {
                if error.kind() == io::ErrorKind::InvalidData {
                    let _ = (&stream).write_all(b"HTTP/1.1 400 Text\r\nConnection: close\r\n\r\n");
                }
                // Clones of it are open still.
                let _ = stream.shutdown(Shutdown::Both);
            }
        });
    }
}

fn converse(stream: TcpStream, connection: usize, shared: &Shared) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut output = stream.try_clone()?;
    let mut input = BufReader::new(stream);
    while !input.fill_buf()?.is_empty() {
        let request = read_request(&mut input, connection, &mut output)?;
        shared.requests.lock().unwrap().push(request.clone());
        let keep = match (shared.handler)(&request) {
            Reply::Whole { status, fields, body } => {
                let length = if matches!(status, 204 | 304) {
                    String::new()
                } else {
                    format!("Content-Length: {}\r\n", body.len())
                };
                let mut message = format!("HTTP/1.1 {status} Text\r\n{fields}{length}\r\n").into_bytes();
                if request.method != "HEAD" {
                    message.extend_from_slice(&body);
                }
                output.write_all(&message)?;
                true
            }
            Reply::Raw(bytes) => output.write_all(&bytes).map(|()| true)?,
            Reply::RawThenClose(bytes) => output.write_all(&bytes).map(|()| false)?,
            Reply::Script(script) => script(&mut output).map(|()| false)?,
            Reply::Close => false,
        };
        if !keep {
            break;
        }
    }
    output.shutdown(Shutdown::Both)
}

fn read_request(input: &mut impl BufRead, connection: usize, output: &mut TcpStream) -> io::Result<Request> {
    let line = read_line(input)?;
    let mut parts = line.split(' ').map(str::to_owned);
    let fields = Fields::read(input)?;
    let mut request = Request {
        method: parts.next().unwrap_or_default(),
        target: parts.next().unwrap_or_default(),
        fields,
        body: Vec::new(),
        trailers: Fields::default(),
        connection,
    };
    if request.field("Expect").eq_ignore_ascii_case("100-continue") {
        output.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
    }
    if request.field("Transfer-Encoding").eq_ignore_ascii_case("chunked") {
        request.trailers = read_chunked(input, &mut request.body)?;
    } else if let Some(length) = request.fields.get("Content-Length").and_then(|length| length.parse().ok()) {
        read_exactly(input, length, &mut request.body)?;
    }
    Ok(request)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn what_is_no_request_is_answered_and_ends_the_connection() {
        let origin = Origin::start(|_| Reply::ok("here"));
        let mut client = TcpStream::connect(origin.address()).unwrap();
        // As the header of another protocol may begin.
        client.write_all(b"\x01\n\x02GET / HTTP/1.1\r\n\r\n").unwrap();
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
        assert_eq!(origin.count(), 0);
    }
}
