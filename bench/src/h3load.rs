//! Load by HTTP/3, of the shape of h2load's: so many connections, each with so many requests at once.

use std::future::poll_fn;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes};
use h3::client::SendRequest;
use h3_quinn::OpenStreams;
use http::{Request, StatusCode};
use quinn::crypto::rustls::QuicClientConfig;
use quinn::{ClientConfig, Endpoint};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use tokio::task::JoinSet;

use crate::LOAD_CORE;
use crate::peers::{Peer, pinned};
use crate::wrk::Figure;

const ALPN: &[u8] = b"h3";
/// The name in the servers' certificates.
const HOST: &str = "localhost";

/// What is asked for, and of whom.
#[derive(clap::Args, Clone, Debug)]
pub struct Load {
    /// Where the server listens.
    address: SocketAddr,
    /// The server's certificate, in PEM.
    certificate: PathBuf,
    /// Bytes of the object.
    size_bytes: usize,
    /// Connections at once.
    connections: usize,
    /// Requests at once on each connection.
    streams: usize,
    /// How long, in seconds.
    seconds: u32,
}

/// Loads `peer` with requests for one URL, over so many connections with so many streams each.
///
/// # Errors
/// A sentence that says what went wrong, wrong answers and broken connections included.
pub fn run(
    peer: &Peer,
    size_bytes: usize,
    connections: usize,
    streams: usize,
    seconds: u32,
) -> Result<Figure, String> {
    let certificate = peer.certificate().ok_or("HTTP/3 needs a certificate")?;
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut load = Command::new(program);
    load.args(["http3", &peer.address().to_string()]).arg(certificate);
    load.args([size_bytes, connections, streams].map(|number| number.to_string())).arg(seconds.to_string());
    let before = peer.cpu_s()?;
    let output = pinned(LOAD_CORE, &load)
        .output()
        .map_err(|error| format!("cannot start the load by HTTP/3: {error}"))?;
    let cpu_s = peer.cpu_s()? - before;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(said.trim().trim_start_matches("error: ").to_owned());
    }
    let text = String::from_utf8_lossy(&output.stdout);
    match text.trim().parse::<f64>() {
        Ok(requests) if requests > 0.0 => Ok(Figure {
            requests_per_s: requests / f64::from(seconds),
            cpu_us_per_request: cpu_s * 1e6 / requests,
            late: 0,
        }),
        _ => Err("the load by HTTP/3 got no answer".to_owned()),
    }
}

impl Load {
    /// Keeps all streams busy for the time; prints how many right answers came.
    ///
    /// # Errors
    /// A sentence that says what went wrong: any answer but 200 with a body of the right length is an error.
    pub fn print(self) -> Result<(), String> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| format!("no runtime: {error}"))?;
        println!("{}", runtime.block_on(self.answers())?);
        Ok(())
    }

    async fn answers(self) -> Result<u64, String> {
        let config = trusting(&self.certificate)?;
        let mut opened = Vec::new();
        for _ in 0..self.connections {
            opened.push(connect(self.address, config.clone()).await?);
        }
        let end = Instant::now() + Duration::from_secs(self.seconds.into());
        let mut streams = JoinSet::new();
        for (_, requests) in &opened {
            for _ in 0..self.streams {
                streams.spawn(ask_until(end, requests.clone(), self.size_bytes));
            }
        }
        let mut answers = 0;
        while let Some(stream) = streams.join_next().await {
            answers += stream.map_err(|error| error.to_string())??;
        }
        Ok(answers)
    }
}

/// Trusts this certificate and no other.
fn trusting(certificate: &Path) -> Result<ClientConfig, String> {
    let read = CertificateDer::from_pem_file(certificate)
        .map_err(|error| format!("cannot read {}: {error}", certificate.display()))?;
    let mut roots = rustls::RootCertStore::empty();
    roots.add(read).map_err(|error| format!("{}: {error}", certificate.display()))?;
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots)
        .with_no_client_auth();
    tls.alpn_protocols = vec![ALPN.to_vec()];
    let quic = QuicClientConfig::try_from(tls).map_err(|error| error.to_string())?;
    Ok(ClientConfig::new(Arc::new(quic)))
}

/// A connection from a port of its own, as each browser has one.
async fn connect(
    server: SocketAddr,
    config: ClientConfig,
) -> Result<(Endpoint, SendRequest<OpenStreams, Bytes>), String> {
    let endpoint = Endpoint::client((Ipv4Addr::LOCALHOST, 0).into())
        .map_err(|error| format!("no socket for the load: {error}"))?;
    let connecting = endpoint.connect_with(config, server, HOST).map_err(|error| error.to_string())?;
    let connection = connecting.await.map_err(|error| format!("no connection by HTTP/3: {error}"))?;
    let (mut driver, requests) =
        h3::client::new(h3_quinn::Connection::new(connection)).await.map_err(|error| error.to_string())?;
    // It ends with the connection, of which the requests tell.
    tokio::spawn(async move { poll_fn(|context| driver.poll_close(context)).await });
    Ok((endpoint, requests))
}

/// One request after the other; how many were answered.
async fn ask_until(
    end: Instant,
    mut requests: SendRequest<OpenStreams, Bytes>,
    size_bytes: usize,
) -> Result<u64, String> {
    let mut answers = 0;
    while Instant::now() < end {
        let request =
            Request::get(format!("https://{HOST}/object")).body(()).map_err(|error| error.to_string())?;
        let broken = |error: h3::error::StreamError| format!("a request by HTTP/3 failed: {error}");
        let mut stream = requests.send_request(request).await.map_err(broken)?;
        stream.finish().await.map_err(broken)?;
        let status = stream.recv_response().await.map_err(broken)?.status();
        let mut received = 0;
        while let Some(piece) = stream.recv_data().await.map_err(broken)? {
            received += piece.remaining();
        }
        if status != StatusCode::OK || received != size_bytes {
            return Err(format!("an answer by HTTP/3 had status {status} and {received} bytes"));
        }
        answers += 1;
    }
    Ok(answers)
}
