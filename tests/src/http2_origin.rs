//! An origin server that speaks HTTP/2 and does what a test tells it to.

use std::future::Future;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use h2::RecvStream;
use h2::server::{Builder, SendResponse};
use http::{HeaderMap, Request, Response};
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, oneshot};
use tokio_rustls::TlsAcceptor;

use crate::{Certificate, free_port};

/// A request, and where its response goes.
pub struct Exchange {
    /// Its head, and its content.
    pub request: Request<RecvStream>,
    /// Takes the response.
    pub respond: SendResponse<Bytes>,
    /// Which of the origin's connections it came on, from 0.
    pub connection: usize,
    /// That connection is to end after what is under way on it.
    pub goodbye: Arc<Notify>,
}

impl Exchange {
    /// The path and query.
    pub fn target(&self) -> String {
        self.request.uri().path_and_query().unwrap().to_string()
    }

    /// All of the content, with its trailers.
    pub async fn content(&mut self) -> Result<(Vec<u8>, Option<HeaderMap>), h2::Error> {
        let stream = self.request.body_mut();
        let mut content = Vec::new();
        while let Some(piece) = stream.data().await {
            let piece = piece?;
            content.extend_from_slice(&piece);
            stream.flow_control().release_capacity(piece.len())?;
        }
        Ok((content, stream.trailers().await?))
    }

    /// Responds with this, without saying how long it is.
    pub fn ok(mut self, content: impl Into<Bytes>) {
        let response = Response::builder().header("cache-control", "no-store").body(()).unwrap();
        // Whoever is gone needs no answer.
        if let Ok(mut stream) = self.respond.send_response(response, false) {
            let _ = stream.send_data(content.into(), true);
        }
    }
}

/// Who takes part in HTTP/2, and how.
#[derive(Clone, Default)]
pub struct Manners {
    /// The settings that it announces.
    pub builder: Builder,
    /// It speaks TLS.
    tls: Option<Arc<ServerConfig>>,
}

impl Manners {
    /// By TLS, with this certificate.
    pub fn encrypted(certificate: &Certificate) -> Self {
        let builder =
            ServerConfig::builder_with_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()));
        let builder = builder.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
        let (chain, key) = certificate.identity();
        let mut config = builder.with_single_cert(chain, key).unwrap();
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Self { tls: Some(Arc::new(config)), ..Self::default() }
    }
}

/// A running origin; it ends with the value.
pub struct Http2Origin {
    address: SocketAddr,
    connections: Arc<AtomicUsize>,
    open: Arc<AtomicUsize>,
    heads: Arc<Mutex<Vec<Request<()>>>>,
    _running: oneshot::Sender<()>,
}

impl Http2Origin {
    /// In the clear; each request is answered as `handler` says, in a task of its own.
    pub fn start<F: Future<Output = ()> + 'static>(
        handler: impl Fn(Exchange) -> F + Send + Sync + 'static,
    ) -> Self {
        Self::with(Manners::default(), handler)
    }

    /// The same, with manners.
    pub fn with<F: Future<Output = ()> + 'static>(
        manners: Manners,
        handler: impl Fn(Exchange) -> F + Send + Sync + 'static,
    ) -> Self {
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let (connections, open) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let heads = Arc::<Mutex<Vec<_>>>::default();
        let (running, ended) = oneshot::channel::<()>();
        let listener = std::net::TcpListener::bind(address).expect("the origin's address");
        let (counted, now_open, known) = (Arc::clone(&connections), Arc::clone(&open), Arc::clone(&heads));
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let local = tokio::task::LocalSet::new();
            local.block_on(&runtime, async {
                listener.set_nonblocking(true).unwrap();
                let listener = TcpListener::from_std(listener).unwrap();
                let handler = Rc::new(handler);
                let receive = async {
                    while let Ok((socket, _)) = listener.accept().await {
                        let number = counted.fetch_add(1, Ordering::SeqCst);
                        now_open.fetch_add(1, Ordering::SeqCst);
                        let (manners, handler) = (manners.clone(), Rc::clone(&handler));
                        let (known, now_open) = (Arc::clone(&known), Arc::clone(&now_open));
                        tokio::task::spawn_local(async move {
                            converse(socket, manners, number, &known, |exchange| handler(exchange)).await;
                            now_open.fetch_sub(1, Ordering::SeqCst);
                        });
                    }
                };
                tokio::select! {
                    () = receive => {}
                    _ = ended => {}
                }
            });
        });
        Self { address, connections, open, heads, _running: running }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Connections accepted so far.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    /// Of those, how many have not ended.
    pub fn open(&self) -> usize {
        self.open.load(Ordering::SeqCst)
    }

    /// How many requests have come.
    pub fn count(&self) -> usize {
        self.heads.lock().unwrap().len()
    }

    /// The latest request's head.
    pub fn last(&self) -> Request<()> {
        self.heads.lock().unwrap().last().expect("a request at the origin").clone()
    }
}

async fn converse<F: Future<Output = ()> + 'static>(
    socket: TcpStream,
    manners: Manners,
    number: usize,
    heads: &Mutex<Vec<Request<()>>>,
    handler: impl Fn(Exchange) -> F,
) {
    socket.set_nodelay(true).unwrap();
    match &manners.tls {
        None => exchanges(socket, &manners, number, heads, handler).await,
        Some(config) => {
            let Ok(tls) = TlsAcceptor::from(Arc::clone(config)).accept(socket).await else { return };
            assert_eq!(tls.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
            exchanges(tls, &manners, number, heads, handler).await;
        }
    }
}

async fn exchanges<F: Future<Output = ()> + 'static>(
    socket: impl AsyncRead + AsyncWrite + Unpin,
    manners: &Manners,
    connection: usize,
    heads: &Mutex<Vec<Request<()>>>,
    handler: impl Fn(Exchange) -> F,
) {
    let Ok(mut http2) = manners.builder.handshake::<_, Bytes>(socket).await else { return };
    let goodbye = Arc::new(Notify::new());
    loop {
        tokio::select! {
            accepted = http2.accept() => {
                let Some(Ok((request, respond))) = accepted else { return };
                let mut head = Request::new(());
                *head.method_mut() = request.method().clone();
                *head.uri_mut() = request.uri().clone();
                *head.headers_mut() = request.headers().clone();
                heads.lock().unwrap().push(head);
                let goodbye = Arc::clone(&goodbye);
                tokio::task::spawn_local(handler(Exchange { request, respond, connection, goodbye }));
            }
            () = goodbye.notified() => http2.graceful_shutdown(),
        }
    }
}
