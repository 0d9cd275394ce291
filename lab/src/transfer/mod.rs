//! Transfers from tidegate over Trickles and over the kernel's TCP, from the same files by the same program.

mod server;

pub use server::{Replica, Site};

use std::cell::Cell;
use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::{Duration, Instant};

use tidegate_trickles::udp::{Connection, Options};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpSocket;

use crate::Error;

/// Bytes that are read at once.
const PIECE_BYTES: usize = 64 * 1024;
/// Longest response head.
const HEAD_BYTES: usize = 4096;

/// What carries a transfer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Carrier {
    /// Ours, encapsulated in UDP.
    Trickles,
    /// The kernel's.
    Tcp,
}

impl Carrier {
    /// Both, ours first.
    pub const BOTH: [Self; 2] = [Self::Trickles, Self::Tcp];

    /// As in figures and legends.
    pub fn label(self) -> &'static str {
        match self {
            Self::Trickles => "Trickles",
            Self::Tcp => "TCP Reno",
        }
    }

    /// What identifies it in raw figures.
    pub fn name(self) -> &'static str {
        match self {
            Self::Trickles => "trickles",
            Self::Tcp => "tcp",
        }
    }
}

/// Byte `offset` of every file of a [`Site`]: what arrives is compared with it.
pub fn byte_at(offset: u64) -> u8 {
    ((offset / 8).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (offset % 8 * 8)) as u8
}

/// A stream of either carrier.
pub trait Stream: AsyncRead + AsyncWrite + Unpin {}
impl<S: AsyncRead + AsyncWrite + Unpin> Stream for S {}

/// Opens a stream to a server from a local address; `servers` after the first are replicas, which TCP does not know.
///
/// # Errors
/// Nobody takes the connection.
pub async fn open(carrier: Carrier, servers: &[SocketAddr], from: IpAddr) -> Result<Box<dyn Stream>, Error> {
    let failed = |error: std::io::Error| Error::Load(error);
    match carrier {
        Carrier::Tcp => {
            let socket = TcpSocket::new_v4().map_err(failed)?;
            socket.bind(SocketAddr::new(from, 0)).map_err(failed)?;
            let server = servers.first().copied().ok_or(Error::Nothing("a load without servers"))?;
            Ok(Box::new(socket.connect(server).await.map_err(failed)?))
        }
        Carrier::Trickles => {
            let options = Options { local: Some(from), ..Options::to(servers.to_vec()) };
            let connection = Connection::new(&options).map_err(failed)?;
            Ok(Box::new(connection.open().map_err(|error| failed(error.into()))?))
        }
    }
}

/// A request for a file of the site.
pub fn request(bytes: u64, last: bool) -> String {
    let connection = if last { "Connection: close\r\n" } else { "" };
    format!("GET /{bytes} HTTP/1.1\r\nHost: lab\r\n{connection}\r\n")
}

/// Reads a response with `bytes` of content, which `progress` is told of, and checks every byte.
///
/// # Errors
/// The stream ends early, or something else arrives.
pub async fn read_response(
    stream: &mut (impl AsyncRead + Unpin),
    buffer: &mut Vec<u8>,
    bytes: u64,
    mut progress: impl FnMut(u64),
) -> Result<(), Error> {
    let early = || Error::Load(std::io::ErrorKind::UnexpectedEof.into());
    let head = loop {
        if let Some(at) = memchr::memmem::find(buffer, b"\r\n\r\n") {
            break at + 4;
        }
        if buffer.len() > HEAD_BYTES || stream.read_buf(buffer).await.map_err(Error::Load)? == 0 {
            return Err(early());
        }
    };
    if !buffer.starts_with(b"HTTP/1.1 200") {
        let line = String::from_utf8_lossy(buffer).lines().next().unwrap_or_default().to_owned();
        return Err(Error::Server(format!("a server answered {line:?}")));
    }
    buffer.drain(..head);
    let mut offset = 0;
    loop {
        let take = buffer.len().min(usize::try_from(bytes - offset).unwrap_or(usize::MAX));
        let wrong = (offset..).zip(&buffer[..take]).find(|(at, byte)| byte_at(*at) != **byte);
        if let Some((at, _)) = wrong {
            return Err(Error::Server(format!("byte {at} of {bytes} arrived wrong")));
        }
        offset += take as u64;
        progress(take as u64);
        buffer.drain(..take);
        if offset == bytes {
            return Ok(());
        }
        buffer.reserve(PIECE_BYTES);
        if stream.read_buf(buffer).await.map_err(Error::Load)? == 0 {
            return Err(early());
        }
    }
}

/// One transfer on a connection of its own; how long it took, the connection's opening included.
///
/// # Errors
/// See [`read_response`].
pub async fn fetch(
    carrier: Carrier,
    servers: &[SocketAddr],
    from: IpAddr,
    bytes: u64,
    progress: impl FnMut(u64),
) -> Result<Duration, Error> {
    let began = Instant::now();
    let mut stream = open(carrier, servers, from).await?;
    stream.write_all(request(bytes, true).as_bytes()).await.map_err(Error::Load)?;
    if carrier == Carrier::Trickles {
        stream.shutdown().await.map_err(Error::Load)?;
    }
    read_response(&mut stream, &mut Vec::new(), bytes, progress).await?;
    Ok(began.elapsed())
}

/// What a load of one kind of flows received while it was measured.
#[derive(Clone, Debug, Default)]
pub struct Received {
    /// Content of each flow.
    pub bytes: Vec<u64>,
    /// Transfers that ended, over all flows.
    pub completed: u64,
    /// Transfers that failed, while the load warmed up too.
    pub failed: u64,
}

/// Flows of one kind: each fetches the same file again and again, on a connection of its own each time.
#[derive(Clone, Debug)]
pub struct Flows {
    /// What carries them.
    pub carrier: Carrier,
    /// The server.
    pub server: SocketAddr,
    /// Bytes of the file.
    pub bytes: u64,
    /// The local address of each flow.
    pub from: Vec<IpAddr>,
}

/// Runs flows side by side: for `warm_up` unmeasured, then for `time`. To be called on the client's host.
///
/// # Errors
/// No runtime can be had.
pub fn load(kinds: &[Flows], warm_up: Duration, time: Duration) -> Result<Vec<Received>, Error> {
    block_on(async {
        let measuring = Rc::new(Cell::new(false));
        let mut cells = Vec::new();
        let mut tasks = Vec::new();
        for flows in kinds {
            let ends = Rc::new((Cell::new(0_u64), Cell::new(0_u64)));
            let mut counts = Vec::new();
            for &from in &flows.from {
                let count = Rc::new(Cell::new(0_u64));
                counts.push(Rc::clone(&count));
                let (carrier, server, bytes) = (flows.carrier, flows.server, flows.bytes);
                let (measuring, ends) = (Rc::clone(&measuring), Rc::clone(&ends));
                tasks.push(tokio::task::spawn_local(async move {
                    loop {
                        let seen = |bytes| {
                            if measuring.get() {
                                count.set(count.get() + bytes);
                            }
                        };
                        match fetch(carrier, &[server], from, bytes, seen).await {
                            Ok(_) => ends.0.set(ends.0.get() + u64::from(measuring.get())),
                            Err(_) => {
                                ends.1.set(ends.1.get() + 1);
                                tokio::time::sleep(Duration::from_millis(100)).await;
                            }
                        }
                    }
                }));
            }
            cells.push((counts, ends));
        }
        tokio::time::sleep(warm_up).await;
        measuring.set(true);
        tokio::time::sleep(time).await;
        measuring.set(false);
        tasks.iter().for_each(tokio::task::JoinHandle::abort);
        Ok(cells
            .into_iter()
            .map(|(counts, ends)| Received {
                bytes: counts.iter().map(|count| count.get()).collect(),
                completed: ends.0.get(),
                failed: ends.1.get(),
            })
            .collect())
    })
}

/// Runs `work` on a runtime of this thread alone, which sees the thread's network namespace.
///
/// # Errors
/// No runtime can be had, or what `work` gives.
pub fn block_on<T>(work: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Error::Load)?;
    tokio::task::LocalSet::new().block_on(&runtime, work)
}
