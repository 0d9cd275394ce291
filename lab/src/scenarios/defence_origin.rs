//! A site behind the servers under attack: its pages may be kept, and one of its answers takes long, of which it can
//! work on a few at once.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, oneshot};

use crate::Error;
use crate::crowd::{COSTLY, GOOD};
use crate::server::pin_to_load_core;

/// How long the costly answer takes, and how many are worked on at once.
const COSTLY_TIME: Duration = Duration::from_millis(200);
const COSTLY_AT_ONCE: usize = 8;

/// How often it is looked at whether there is room for more costly work.
const LOOK: Duration = Duration::from_millis(20);
/// Seconds that are told apart.
const MAX_SECONDS: usize = 600;

/// What it saw in one second.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Second {
    /// Requests for pages that good clients ask for.
    pub good: u64,
    /// Looks at whether there was room for more costly work, and those that found none.
    pub looks: u64,
    pub saturated: u64,
}

/// Seconds since it began to count.
struct Counts {
    began: Instant,
    seconds: Vec<Second>,
}

impl Counts {
    fn new() -> Self {
        Self { began: Instant::now(), seconds: Vec::new() }
    }

    fn now(&mut self) -> &mut Second {
        let second = (self.began.elapsed().as_secs() as usize).min(MAX_SECONDS);
        if self.seconds.len() <= second {
            self.seconds.resize(second + 1, Second::default());
        }
        &mut self.seconds[second]
    }
}

/// Runs until it is dropped.
pub(super) struct Origin {
    address: SocketAddr,
    counts: Arc<Mutex<Counts>>,
    /// Its end ends the origin.
    _running: oneshot::Sender<()>,
}

impl Origin {
    pub(super) fn start(object_bytes: usize) -> Result<Self, Error> {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").map_err(Error::Load)?;
        listener.set_nonblocking(true).map_err(Error::Load)?;
        let address = listener.local_addr().map_err(Error::Load)?;
        let (running, ended) = oneshot::channel();
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Error::Load)?;
        let counts = Arc::new(Mutex::new(Counts::new()));
        let own = Arc::clone(&counts);
        let work = move || {
            // The core was looked for when the servers were started.
            let _ = pin_to_load_core();
            runtime.block_on(async {
                tokio::select! {
                    _ = serve(listener, object_bytes, &own) => {}
                    _ = ended => {}
                }
            });
        };
        std::thread::Builder::new().name("origin".into()).spawn(work).map_err(Error::Load)?;
        Ok(Self { address, counts, _running: running })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Counts from now on.
    pub(super) fn begin(&self) {
        *lock(&self.counts) = Counts::new();
    }

    /// What it saw since, second by second.
    pub(super) fn seconds(&self) -> Vec<Second> {
        lock(&self.counts).seconds.clone()
    }
}

fn lock(counts: &Mutex<Counts>) -> MutexGuard<'_, Counts> {
    counts.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn serve(
    listener: std::net::TcpListener,
    object_bytes: usize,
    counts: &Arc<Mutex<Counts>>,
) -> std::io::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    let costly = Arc::new(Semaphore::new(COSTLY_AT_ONCE));
    let mut look = tokio::time::interval(LOOK);
    loop {
        let stream = tokio::select! {
            accepted = listener.accept() => accepted?.0,
            _ = look.tick() => {
                let mut counts = lock(counts);
                let second = counts.now();
                second.looks += 1;
                second.saturated += u64::from(costly.available_permits() == 0);
                continue;
            }
        };
        let (costly, counts) = (Arc::clone(&costly), Arc::clone(counts));
        // A proxy that closes its connection is no failure of the site.
        tokio::spawn(async move {
            let _ = answer(stream, &costly, &counts, object_bytes).await;
        });
    }
}

async fn answer(
    mut stream: TcpStream,
    costly: &Semaphore,
    counts: &Mutex<Counts>,
    object_bytes: usize,
) -> std::io::Result<()> {
    let mut buffer = Vec::new();
    loop {
        let Some(end) = memchr::memmem::find(&buffer, b"\r\n\r\n") else {
            if buffer.len() > 64 * 1024 || stream.read_buf(&mut buffer).await? == 0 {
                return Ok(());
            }
            continue;
        };
        let is_costly = memchr::memmem::find(&buffer[..end], COSTLY.as_bytes()).is_some();
        if memchr::memmem::find(&buffer[..end], GOOD.as_bytes()).is_some() {
            lock(counts).now().good += 1;
        }
        buffer.drain(..end + 4);
        let control = if is_costly { "no-store" } else { "max-age=60" };
        if is_costly {
            let Ok(_turn) = costly.acquire().await else { return Ok(()) };
            tokio::time::sleep(COSTLY_TIME).await;
        }
        let head =
            format!("HTTP/1.1 200 OK\r\nContent-Length: {object_bytes}\r\nCache-Control: {control}\r\n\r\n");
        stream.write_all(&[head.as_bytes(), &vec![b'a'; object_bytes]].concat()).await?;
    }
}
