//! The connections of the admin server: so many at once, for so long each, and to another process in the end.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, watch};

/// Clients served at once; others wait.
const CONNECTIONS: usize = 64;
/// How long a client may take for a request's head.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a client may take nothing of an answer (tcp(7), `TCP_USER_TIMEOUT`).
const WRITE_TIMEOUT_MS: u32 = 5_000;
/// How long a connection lasts at most: as long as whoever asks for an upgrade waits for its answer.
const CONNECTION_TIME: Duration = Duration::from_secs(15 * 60);
/// How long those who have asked are waited for when another process has the server.
const CLOSE_TIME: Duration = Duration::from_secs(5);
/// Pause after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Everything of the admin server that takes descriptors.
pub(crate) struct Prepared {
    pub(super) listener: tokio::net::TcpListener,
    pub(super) runtime: tokio::runtime::Runtime,
}

impl Prepared {
    /// To be called before clients are served, who may use up the descriptors.
    pub(crate) fn new(listener: TcpListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let inside = runtime.enter();
        let listener = tokio::net::TcpListener::from_std(listener)?;
        drop(inside);
        Ok(Self { listener, runtime })
    }

    pub(crate) fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// Until another process has the server.
async fn end(mut closed: watch::Receiver<bool>) {
    // The sender lives as long as the process.
    let _ = closed.wait_for(|closed| *closed).await;
}

/// Serves clients: so many at once and so long each that they cannot use up the process's descriptors.
pub(super) async fn accept(listener: tokio::net::TcpListener, router: Router, closed: watch::Receiver<bool>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    // The semaphore is never closed.
    while let Ok(place) = Arc::clone(&places).acquire_owned().await {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = end(closed.clone()) => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::debug!(%error, "an admin connection could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        // Without, a client that reads nothing keeps its place from others. Where the kernel does not know it, nothing is lost.
        let _ = rustix::net::sockopt::set_tcp_user_timeout(&stream, WRITE_TIMEOUT_MS);
        let service = TowerToHyperService::new(router.clone());
        let closed = closed.clone();
        tokio::spawn(async move {
            let mut http = hyper::server::conn::http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
            let connection = http.serve_connection(TokioIo::new(stream), service);
            // Whatever ends it concerns that client alone.
            let _ = tokio::time::timeout(CONNECTION_TIME, until_closed(connection, closed)).await;
            drop(place);
        });
    }
    drop(listener);
    let all = u32::try_from(CONNECTIONS).unwrap_or(u32::MAX);
    // Who takes an answer so slowly goes without.
    let _ = tokio::time::timeout(CLOSE_TIME, places.acquire_many(all)).await;
}

/// Serves a connection, and no more than the request in progress once the server is closed.
async fn until_closed<S>(
    connection: hyper::server::conn::http1::Connection<TokioIo<TcpStream>, S>,
    closed: watch::Receiver<bool>,
) where
    S: hyper::service::HttpService<hyper::body::Incoming>,
    S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    S::ResBody: 'static,
    <S::ResBody as hyper::body::Body>::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        _ = connection.as_mut() => return,
        () = end(closed) => connection.as_mut().graceful_shutdown(),
    }
    // Whatever ends it concerns that client alone.
    let _ = connection.await;
}
