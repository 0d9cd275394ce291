//! HTTP/3 from crates: a server of answers of any size and a client, to measure DHTTP beside it.

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::{Buf, Bytes};
use quinn::Endpoint;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use quinn::rustls::{ClientConfig, RootCertStore, ServerConfig};

/// The name in the certificate.
const NAME: &str = "lab.example";
/// RFC 9114 §3.1.
const ALPN: &[u8] = b"h3";

/// Any failure of the crates, which a scenario counts and does not tell apart.
pub type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// What servers and clients of one run share.
#[derive(Clone)]
pub struct Identity {
    server: quinn::ServerConfig,
    client: quinn::ClientConfig,
}

impl Identity {
    /// A certificate of its own, and clients that trust it alone.
    ///
    /// # Errors
    /// What the cryptography says.
    pub fn new() -> Result<Self, AnyError> {
        let made = rcgen::generate_simple_self_signed([NAME.to_owned()])?;
        let certificate = CertificateDer::from(made.cert.der().to_vec());
        let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
        let provider = Arc::new(quinn::rustls::crypto::aws_lc_rs::default_provider());
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(vec![certificate.clone()], key.into())?;
        server.alpn_protocols = vec![ALPN.to_vec()];
        let mut roots = RootCertStore::empty();
        roots.add(certificate)?;
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        client.alpn_protocols = vec![ALPN.to_vec()];
        Ok(Self {
            server: quinn::ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(server)?)),
            client: quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(client)?)),
        })
    }

    /// A server at `address`; [`serve`] answers.
    ///
    /// # Errors
    /// When it cannot be bound.
    pub fn listen(&self, address: SocketAddr) -> std::io::Result<Endpoint> {
        Endpoint::server(self.server.clone(), address)
    }

    /// A client's connection to `server`, newly made.
    ///
    /// # Errors
    /// When there is none.
    pub async fn connect(&self, server: SocketAddr) -> Result<Connection, AnyError> {
        let unspecified = SocketAddr::from(([0, 0, 0, 0], 0));
        let mut endpoint = Endpoint::client(unspecified)?;
        endpoint.set_default_client_config(self.client.clone());
        let connection = endpoint.connect(server, NAME)?.await?;
        let (mut driver, requests) = h3::client::new(h3_quinn::Connection::new(connection)).await?;
        let driving = tokio::spawn(async move {
            std::future::poll_fn(|context| driver.poll_close(context)).await;
        });
        Ok(Connection { requests, _driving: AbortOnDrop(driving), _endpoint: endpoint })
    }
}

struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A client's connection.
pub struct Connection {
    requests: h3::client::SendRequest<h3_quinn::OpenStreams, Bytes>,
    _driving: AbortOnDrop,
    _endpoint: Endpoint,
}

impl Connection {
    /// A handle with which to fetch beside others.
    pub fn requests(&self) -> h3::client::SendRequest<h3_quinn::OpenStreams, Bytes> {
        self.requests.clone()
    }
}

/// Fetches an answer of `size_bytes`; the bytes that came. `on_head` is called when the head has come.
///
/// # Errors
/// When it breaks off.
pub async fn fetch(
    mut requests: h3::client::SendRequest<h3_quinn::OpenStreams, Bytes>,
    size_bytes: usize,
    on_head: impl FnOnce(),
) -> Result<usize, AnyError> {
    let request = http::Request::get(format!("https://{NAME}/{size_bytes}")).body(())?;
    let mut stream = requests.send_request(request).await?;
    stream.finish().await?;
    let response = stream.recv_response().await?;
    on_head();
    let mut bytes = 0;
    while let Some(piece) = stream.recv_data().await? {
        bytes += piece.remaining();
    }
    Ok(if response.status() == 200 { bytes } else { 0 })
}

/// Answers `/SIZE` with so many bytes until the runtime ends.
pub async fn serve(endpoint: Endpoint) {
    while let Some(incoming) = endpoint.accept().await {
        tokio::spawn(async move {
            // A client that goes is no failure of the server.
            let _ = serve_connection(incoming).await;
        });
    }
}

async fn serve_connection(incoming: quinn::Incoming) -> Result<(), AnyError> {
    let connection = incoming.await?;
    let mut connection =
        h3::server::Connection::<_, Bytes>::new(h3_quinn::Connection::new(connection)).await?;
    while let Some(resolver) = connection.accept().await? {
        tokio::spawn(async move {
            let (request, mut stream) = resolver.resolve_request().await?;
            let size_bytes: usize = request.uri().path().trim_start_matches('/').parse()?;
            let response = http::Response::builder().status(200).body(())?;
            stream.send_response(response).await?;
            stream.send_data(Bytes::from(vec![b'.'; size_bytes])).await?;
            stream.finish().await?;
            Ok::<(), AnyError>(())
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_client_gets_the_size_that_it_asks_for() {
        let identity = Identity::new().unwrap();
        let endpoint = identity.listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = endpoint.local_addr().unwrap();
        tokio::spawn(serve(endpoint));
        let connection = identity.connect(address).await.unwrap();
        let mut headed = false;
        let bytes = fetch(connection.requests(), 100_000, || headed = true).await.unwrap();
        assert_eq!((bytes, headed), (100_000, true));
    }
}
