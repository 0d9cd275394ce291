//! A site behind the servers under attack: its pages may be kept, and one of its answers takes long, of which it can work
//! on a few at once.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, oneshot};

use crate::Error;
use crate::crowd::COSTLY;
use crate::server::pin_to_load_core;

/// How long the costly answer takes, and how many are worked on at once.
const COSTLY_TIME: Duration = Duration::from_millis(200);
const COSTLY_AT_ONCE: usize = 8;

/// Runs until it is dropped.
pub(super) struct Origin {
    address: SocketAddr,
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
        let work = move || {
            // The core was looked for when the servers were started.
            let _ = pin_to_load_core();
            runtime.block_on(async {
                tokio::select! {
                    _ = serve(listener, object_bytes) => {}
                    _ = ended => {}
                }
            });
        };
        std::thread::Builder::new().name("origin".into()).spawn(work).map_err(Error::Load)?;
        Ok(Self { address, _running: running })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }
}

async fn serve(listener: std::net::TcpListener, object_bytes: usize) -> std::io::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    let costly = Arc::new(Semaphore::new(COSTLY_AT_ONCE));
    loop {
        let (stream, _) = listener.accept().await?;
        let costly = Arc::clone(&costly);
        // A proxy that closes its connection is no failure of the site.
        tokio::spawn(async move {
            let _ = answer(stream, &costly, object_bytes).await;
        });
    }
}

async fn answer(mut stream: TcpStream, costly: &Semaphore, object_bytes: usize) -> std::io::Result<()> {
    let mut buffer = Vec::new();
    loop {
        let Some(end) = memchr::memmem::find(&buffer, b"\r\n\r\n") else {
            if buffer.len() > 64 * 1024 || stream.read_buf(&mut buffer).await? == 0 {
                return Ok(());
            }
            continue;
        };
        let is_costly = memchr::memmem::find(&buffer[..end], COSTLY.as_bytes()).is_some();
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
