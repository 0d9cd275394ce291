//! TLS in front of an origin that knows nothing of it.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use rustls::crypto::aws_lc_rs;
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio_rustls::{LazyConfigAcceptor, server::TlsStream};

use crate::{Certificate, Origin, free_port};

/// Takes connections with TLS and passes on what is in them; it ends with the value.
pub struct TlsDoor {
    address: SocketAddr,
    guests: Arc<Mutex<Guests>>,
    /// It ends with this.
    _open: oneshot::Sender<()>,
}

#[derive(Default)]
struct Guests {
    /// Whom each was asked for, if it was a name.
    names: Vec<Option<String>>,
    /// Handshakes that failed.
    refused: usize,
}

/// How a door behaves.
#[derive(Clone, Copy, Default)]
pub struct DoorManners<'c> {
    /// Ends connections without saying so (RFC 8446 §6.1).
    pub cuts_off: bool,
    /// Tickets that are given away after the handshake, if not as many as usual.
    pub tickets: Option<usize>,
    /// Lets in only who shows this certificate.
    pub admits: Option<&'c Certificate>,
    /// Agrees on keys by X25519MLKEM768 alone.
    pub post_quantum: bool,
}

impl TlsDoor {
    /// In front of `origin`, with this certificate.
    pub fn before(origin: &Origin, certificate: &Certificate) -> Self {
        Self::with(origin, certificate, DoorManners::default())
    }

    /// The same, with manners.
    pub fn with(origin: &Origin, certificate: &Certificate, manners: DoorManners<'_>) -> Self {
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let config = config(certificate, manners);
        let guests = Arc::<Mutex<Guests>>::default();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind(address)).expect("the door's address");
        let (inside, known, cuts_off) = (origin.address(), Arc::clone(&guests), manners.cuts_off);
        let receive = async move {
            while let Ok((socket, _)) = listener.accept().await {
                let (config, known) = (Arc::clone(&config), Arc::clone(&known));
                tokio::spawn(async move {
                    match admit(socket, config, &known).await {
                        Ok(tls) => drop(pass(tls, inside, cuts_off).await),
                        Err(_) => known.lock().unwrap().refused += 1,
                    }
                });
            }
        };
        let (open, closed) = oneshot::channel::<()>();
        std::thread::spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    () = receive => {}
                    _ = closed => {}
                }
            });
        });
        Self { address, guests, _open: open }
    }

    /// Where it takes connections.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// As an upstream's server, by this name.
    pub fn url(&self, name: &str) -> String {
        format!("https://{name}:{}", self.address.port())
    }

    /// Whom those that were let in have asked for.
    pub fn names(&self) -> Vec<Option<String>> {
        self.guests.lock().unwrap().names.clone()
    }

    /// Handshakes that have failed.
    pub fn refused(&self) -> usize {
        self.guests.lock().unwrap().refused
    }
}

fn config(certificate: &Certificate, manners: DoorManners<'_>) -> Arc<ServerConfig> {
    let mut provider = aws_lc_rs::default_provider();
    if manners.post_quantum {
        provider.kx_groups = vec![aws_lc_rs::kx_group::X25519MLKEM768];
    }
    let builder = ServerConfig::builder_with_provider(Arc::new(provider));
    let builder = builder.with_safe_default_protocol_versions().unwrap();
    let builder = match manners.admits {
        None => builder.with_no_client_auth(),
        Some(known) => {
            let mut roots = RootCertStore::empty();
            roots.add(known.der().clone()).unwrap();
            let provider = Arc::new(aws_lc_rs::default_provider());
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            builder.with_client_cert_verifier(verifier.build().unwrap())
        }
    };
    let (chain, key) = certificate.identity();
    let mut config = builder.with_single_cert(chain, key).unwrap();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    config.send_tls13_tickets = manners.tickets.unwrap_or(config.send_tls13_tickets);
    Arc::new(config)
}

async fn admit(
    socket: TcpStream,
    config: Arc<ServerConfig>,
    guests: &Mutex<Guests>,
) -> io::Result<TlsStream<TcpStream>> {
    socket.set_nodelay(true)?;
    let hello = LazyConfigAcceptor::new(rustls::server::Acceptor::default(), socket).await?;
    let name = hello.client_hello().server_name().map(str::to_owned);
    let tls = hello.into_stream(config).await?;
    guests.lock().unwrap().names.push(name);
    Ok(tls)
}

async fn pass(mut tls: TlsStream<TcpStream>, inside: SocketAddr, cuts_off: bool) -> io::Result<()> {
    let mut origin = TcpStream::connect(inside).await?;
    origin.set_nodelay(true)?;
    if !cuts_off {
        return tokio::io::copy_bidirectional(&mut tls, &mut origin).await.map(|_| ());
    }
    let (mut from_guest, mut to_guest) = tokio::io::split(tls);
    let (mut from_origin, mut to_origin) = origin.split();
    let answered = async {
        let mut buffer = vec![0; 16 * 1024];
        loop {
            match from_origin.read(&mut buffer).await? {
                0 => return io::Result::Ok(()),
                length => to_guest.write_all(&buffer[..length]).await?,
            }
            to_guest.flush().await?;
        }
    };
    tokio::select! {
        answered = answered => answered,
        asked = async { tokio::io::copy(&mut from_guest, &mut to_origin).await?; std::future::pending().await } => asked,
    }
}
