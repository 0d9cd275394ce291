//! Users after SURGE: each asks for pages of popular files, all objects of a page at once, and thinks between pages.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tidegate_dhttp::driver::{ClientOptions, DhttpClient, DhttpUrl, FetchRequest};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;

use super::dhttp_site::runtime;
use crate::Error;
use crate::link::Random;
use crate::surge::{embedded, inactive_off_s, popular, popularity, size_bytes};

/// Longest response head that is read.
const HEAD_BYTES: usize = 16 * 1024;
/// Longest a request may take; then it counts as failed.
const PATIENCE: Duration = Duration::from_secs(30);

/// The files of a site.
pub(super) struct Catalog {
    sizes: Vec<u64>,
    cumulated: Vec<f64>,
}

impl Catalog {
    /// `count` files, the longest of `most` bytes.
    pub(super) fn new(count: usize, most: f64, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let sizes = (0..count).map(|_| size_bytes(&mut random, most)).collect();
        Self { sizes, cumulated: popularity(count) }
    }

    /// Bytes of a request's answer on average, as often as each file is asked for.
    pub(super) fn mean_bytes(&self) -> f64 {
        let shares = (1..=self.sizes.len()).map(|rank| 1.0 / rank as f64);
        let bytes: f64 = self.sizes.iter().zip(shares).map(|(size, share)| *size as f64 * share).sum();
        bytes / self.cumulated.last().copied().unwrap_or(1.0)
    }

    /// Makes the files, which are called by their numbers.
    pub(super) fn write(&self, directory: &Path) -> Result<(), Error> {
        for (number, size) in self.sizes.iter().enumerate() {
            let path = directory.join(number.to_string());
            // Written, so that the kernel has them in memory for every server alike.
            let content = vec![b'x'; usize::try_from(*size).unwrap_or(0)];
            std::fs::write(&path, content).map_err(Error::file("write", &path))?;
        }
        Ok(())
    }
}

/// Requests per second of one user who is answered at once.
pub(super) fn requests_per_s() -> f64 {
    const DRAWS: usize = 100_000;
    let mut random = Random::new(1);
    let (mut objects, mut off_s) = (0.0, 0.0);
    for _ in 0..DRAWS {
        objects += 1.0 + embedded(&mut random) as f64;
        off_s += inactive_off_s(&mut random);
    }
    objects / off_s
}

/// How users ask.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Protocol {
    /// All at once.
    Dhttp,
    /// Over at most so many connections, which the server closes, or the altruistic user when the page is there.
    Http { connections: usize, altruistic: bool },
    /// A connection for each page, opened with its first request in the SYN (RFC 7413); closed early.
    FastOpen,
}

/// Who asks whom, and how often.
#[derive(Clone, Copy, Debug)]
pub(super) struct Habits {
    pub server: SocketAddr,
    pub protocol: Protocol,
    pub users: usize,
    /// They think so many times as fast as SURGE's users; resend timers stay the paper's.
    pub pace: f64,
    /// Each user has an address of its own: the first one's.
    pub addresses: Ipv4Addr,
    /// Before anything is counted.
    pub warm_up: Duration,
    pub time: Duration,
}

/// What users had.
#[derive(Clone, Debug, Default)]
pub(super) struct Usage {
    pub requests: u64,
    pub bytes: u64,
    pub failed: u64,
    pub latencies_s: Vec<f64>,
}

impl Usage {
    /// 0 where nothing was answered, as in a quick run on a busy machine: a plot needs a figure.
    pub(super) fn mean_latency_s(&self) -> f64 {
        self.latencies_s.iter().sum::<f64>() / self.latencies_s.len().max(1) as f64
    }
}

/// Lets users use a site; `counting` is called when that begins and ends.
pub(super) fn use_site(
    catalog: &Arc<Catalog>,
    habits: Habits,
    mut counting: impl FnMut() -> Result<(), Error>,
) -> Result<Usage, Error> {
    let failed = |error| Error::Link(format!("no users: {error}"));
    runtime().map_err(failed)?.block_on(async {
        let usage = Arc::new(Mutex::new(None));
        let mut users = JoinSet::new();
        for index in 0..habits.users {
            let user = User::new(index, habits, Arc::clone(catalog), Arc::clone(&usage)).map_err(failed)?;
            users.spawn(user.live());
        }
        tokio::time::sleep(habits.warm_up).await;
        counting()?;
        *usage.lock().unwrap_or_else(PoisonError::into_inner) = Some(Usage::default());
        tokio::time::sleep(habits.time).await;
        let counted = usage.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default();
        counting()?;
        users.shutdown().await;
        Ok(counted)
    })
}

/// Nothing while nothing is counted.
type Shared = Arc<Mutex<Option<Usage>>>;

struct User {
    habits: Habits,
    catalog: Arc<Catalog>,
    usage: Shared,
    random: Random,
    address: Ipv4Addr,
    dhttp: Option<DhttpClient>,
    /// Those that are open between pages.
    connections: Vec<HttpConnection>,
}

impl User {
    fn new(index: usize, habits: Habits, catalog: Arc<Catalog>, usage: Shared) -> std::io::Result<Self> {
        let address =
            Ipv4Addr::from(u32::from(habits.addresses).wrapping_add(u32::try_from(index).unwrap_or(0)));
        let dhttp = match habits.protocol {
            Protocol::Dhttp => {
                Some(DhttpClient::new(ClientOptions { bind_v4: address, ..ClientOptions::default() })?)
            }
            _ => None,
        };
        let random = Random::new(index as u64 + 1000);
        Ok(Self { habits, catalog, usage, random, address, dhttp, connections: Vec::new() })
    }

    async fn live(mut self) {
        // Not all at once.
        let first = crate::surge::unit(&mut self.random) * 2.0 / self.habits.pace;
        tokio::time::sleep(Duration::from_secs_f64(first)).await;
        loop {
            let files: Vec<usize> = (0..=embedded(&mut self.random))
                .map(|_| popular(&mut self.random, &self.catalog.cumulated))
                .collect();
            match self.habits.protocol {
                Protocol::Dhttp => self.page_by_dhttp(files).await,
                Protocol::Http { connections, altruistic } => {
                    self.page_by_http(files, connections).await;
                    if altruistic {
                        self.connections.clear();
                    }
                }
                Protocol::FastOpen => self.page_by_fast_open(&files).await,
            }
            let off_s = inactive_off_s(&mut self.random) / self.habits.pace;
            tokio::time::sleep(Duration::from_secs_f64(off_s)).await;
        }
    }

    async fn page_by_dhttp(&self, files: Vec<usize>) {
        let Some(client) = &self.dhttp else { return };
        let mut objects = JoinSet::new();
        for file in files {
            let (client, server, usage) = (client.clone(), self.habits.server, Arc::clone(&self.usage));
            let size = self.catalog.sizes[file];
            objects.spawn(async move {
                let began = Instant::now();
                let fetched = tokio::time::timeout(PATIENCE, fetch_dhttp(&client, server, file)).await;
                report(&usage, began, size, fetched.ok().flatten());
            });
        }
        while objects.join_next().await.is_some() {}
    }

    /// Objects are shared out among the connections, each of which takes one after another.
    async fn page_by_http(&mut self, files: Vec<usize>, most: usize) {
        let queue = Arc::new(Mutex::new(files));
        let mut tasks = JoinSet::new();
        let parallel = most.min(queue.lock().map_or(1, |queue| queue.len()));
        for _ in 0..parallel {
            let mut connection = self.connections.pop();
            let (queue, usage, catalog) =
                (Arc::clone(&queue), Arc::clone(&self.usage), Arc::clone(&self.catalog));
            let (server, address) = (self.habits.server, self.address);
            tasks.spawn(async move {
                loop {
                    let Some(file) = queue.lock().unwrap_or_else(PoisonError::into_inner).pop() else {
                        return connection;
                    };
                    let began = Instant::now();
                    let fetched =
                        tokio::time::timeout(PATIENCE, fetch_http(connection.take(), server, address, file));
                    let (kept, bytes) = match fetched.await {
                        Ok(Ok((kept, bytes))) => (kept, Some(bytes)),
                        _ => (None, None),
                    };
                    connection = kept;
                    report(&usage, began, catalog.sizes[file], bytes);
                }
            });
        }
        while let Some(kept) = tasks.join_next().await {
            self.connections.extend(kept.ok().flatten());
        }
        self.connections.truncate(most);
    }

    /// All requests of the page in the SYN, as DHTTP §VI-B3 lets T/TCP's clients do.
    async fn page_by_fast_open(&self, files: &[usize]) {
        let began = Instant::now();
        let whole =
            tokio::time::timeout(PATIENCE, fetch_fast_open(self.habits.server, self.address, files)).await;
        let mut bytes = whole.ok().and_then(Result::ok).unwrap_or_default().into_iter();
        for file in files {
            report(&self.usage, began, self.catalog.sizes[*file], bytes.next());
        }
    }
}

fn report(usage: &Shared, began: Instant, expected: u64, bytes: Option<u64>) {
    let mut usage = usage.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(usage) = usage.as_mut() else { return };
    if bytes == Some(expected) {
        usage.requests += 1;
        usage.bytes += expected;
        usage.latencies_s.push(began.elapsed().as_secs_f64());
    } else {
        usage.failed += 1;
    }
}

async fn fetch_dhttp(client: &DhttpClient, server: SocketAddr, file: usize) -> Option<u64> {
    let url = DhttpUrl {
        by_tcp: false,
        host: server.ip().to_string(),
        port: server.port(),
        target: format!("/{file}"),
    };
    let mut fetched = client.fetch(FetchRequest::get(&url, server)).await.ok()?;
    let mut bytes = 0;
    while let Some(piece) = fetched.body.next().await {
        bytes += piece.ok()?.len() as u64;
    }
    (fetched.status == 200).then_some(bytes)
}

/// A connection that is kept.
struct HttpConnection {
    stream: TcpStream,
    /// What was read beyond the last response.
    rest: Vec<u8>,
}

/// Bytes of the body, and the connection if it may be used again. One that the server has closed meanwhile is replaced.
async fn fetch_http(
    kept: Option<HttpConnection>,
    server: SocketAddr,
    address: Ipv4Addr,
    file: usize,
) -> std::io::Result<(Option<HttpConnection>, u64)> {
    let request = format!("GET /{file} HTTP/1.1\r\nHost: {}\r\n\r\n", server.ip());
    if let Some(mut kept) = kept
        && kept.stream.write_all(request.as_bytes()).await.is_ok()
        && let Ok((keep, bytes)) = kept.response().await
    {
        return Ok((keep.then_some(kept), bytes));
    }
    let socket = TcpSocket::new_v4()?;
    socket.bind(SocketAddr::new(address.into(), 0))?;
    let stream = socket.connect(server).await?;
    stream.set_nodelay(true)?;
    let mut connection = HttpConnection { stream, rest: Vec::new() };
    connection.stream.write_all(request.as_bytes()).await?;
    let (keep, bytes) = connection.response().await?;
    Ok((keep.then_some(connection), bytes))
}

/// Bytes of each body, in order.
async fn fetch_fast_open(
    server: SocketAddr,
    address: Ipv4Addr,
    files: &[usize],
) -> std::io::Result<Vec<u64>> {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.bind(&SocketAddr::new(address.into(), 0).into())?;
    // The connection is made by the first write, which the SYN carries once the server's cookie is known.
    nix::sys::socket::setsockopt(&socket, nix::sys::socket::sockopt::TcpFastOpenConnect, &true)?;
    let stream = TcpSocket::from_std_stream(socket.into()).connect(server).await?;
    let mut requests = String::new();
    for (index, file) in files.iter().enumerate() {
        let close = if index + 1 == files.len() { "Connection: close\r\n" } else { "" };
        requests.push_str(&format!("GET /{file} HTTP/1.1\r\nHost: {}\r\n{close}\r\n", server.ip()));
    }
    let mut connection = HttpConnection { stream, rest: Vec::new() };
    connection.stream.write_all(requests.as_bytes()).await?;
    let mut all = Vec::with_capacity(files.len());
    for _ in files {
        all.push(connection.response().await?.1);
    }
    Ok(all)
}

impl HttpConnection {
    /// Whether the connection may be used again, and the bytes of the body of a response with status 200.
    async fn response(&mut self) -> std::io::Result<(bool, u64)> {
        let (keep, length, mut body);
        loop {
            let mut fields = [httparse::EMPTY_HEADER; 64];
            let mut response = httparse::Response::new(&mut fields);
            let parsed = response.parse(&self.rest).map_err(std::io::Error::other)?;
            if let httparse::Status::Complete(head) = parsed {
                let field = |name: &str| {
                    let field =
                        response.headers.iter().find(|field| field.name.eq_ignore_ascii_case(name))?;
                    std::str::from_utf8(field.value).ok()
                };
                keep = !field("connection").is_some_and(|value| value.eq_ignore_ascii_case("close"));
                let stated = field("content-length").and_then(|value| value.parse::<u64>().ok());
                length =
                    stated.filter(|_| response.code == Some(200)).ok_or(std::io::ErrorKind::InvalidData)?;
                body = (self.rest.len() - head) as u64;
                let taken = head + usize::try_from(body.min(length)).unwrap_or(0);
                self.rest.drain(..taken);
                break;
            }
            if self.rest.len() > HEAD_BYTES || self.stream.read_buf(&mut self.rest).await? == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
        }
        while body < length {
            self.rest.clear();
            let read = self.stream.read_buf(&mut self.rest).await? as u64;
            if read == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            let left = length - body;
            body += read;
            let taken = usize::try_from(read.min(left)).unwrap_or(0);
            self.rest.drain(..taken);
        }
        Ok((keep, length))
    }
}
