//! Encryption: what a server needs to open datagrams and to speak TLS, and what a client knows of such servers.
//!
//! One thing has to be known of a server, the fingerprint of its certificate. TLS with that certificate brings the key
//! for sealed datagrams, which changes from time to time.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::version::TLS13;
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, ServerConfig, SignatureScheme};
use sha2::{Digest, Sha256};
use tidegate_http::Method;
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, server::TlsStream};

use super::handover::Handover;
use super::request::{FetchBody, FetchRequest, FetchResponse};
use super::service::Response;
use crate::sealed::{KeyConfig, ServerKeys};

/// The protocol's name in TLS (RFC 7301).
const ALPN: &[u8] = b"dhttp";
/// Where a server publishes its key, on connections with TLS.
const KEYS_PATH: &str = "/.well-known/dhttp-keys";
/// How long a key is published; it is good before and after, too.
const KEY_EPOCH: Duration = Duration::from_secs(86_400);
/// Most bytes of a list of keys.
const KEY_LIST_BYTES: usize = 4096;
/// Most servers of which a client remembers keys, and most certificates with TLS sessions.
const SERVERS: usize = 256;

/// The SHA-256 of a server's certificate, as 64 hexadecimal digits.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Fingerprint([u8; 32]);

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Not 64 hexadecimal digits.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("expected 64 hexadecimal digits")]
pub struct FingerprintError;

impl FromStr for Fingerprint {
    type Err = FingerprintError;

    fn from_str(text: &str) -> Result<Self, FingerprintError> {
        let mut fingerprint = [0; 32];
        if text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(FingerprintError);
        }
        for (byte, digits) in fingerprint.iter_mut().zip(text.as_bytes().chunks(2)) {
            let digits = std::str::from_utf8(digits).map_err(|_| FingerprintError)?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| FingerprintError)?;
        }
        Ok(Self(fingerprint))
    }
}

impl Fingerprint {
    fn of(certificate: &CertificateDer<'_>) -> Self {
        Self(Sha256::digest(certificate.as_ref()).into())
    }
}

/// A server's certificate and keys, to be given to each of its cores.
#[derive(Clone)]
pub struct Security {
    acceptor: TlsAcceptor,
    fingerprint: Fingerprint,
    keys: ServerKeys,
    handover: Handover,
}

impl fmt::Debug for Security {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Security").field("fingerprint", &self.fingerprint).finish_non_exhaustive()
    }
}

impl Security {
    /// A new certificate, signed by itself, and new keys.
    ///
    /// # Errors
    /// There are no random numbers.
    pub fn new() -> io::Result<Self> {
        let made =
            rcgen::generate_simple_self_signed(["dhttp.invalid".to_owned()]).map_err(io::Error::other)?;
        let certificate = made.cert.der().clone();
        let fingerprint = Fingerprint::of(&certificate);
        let private = PrivateKeyDer::try_from(made.signing_key.serialize_der()).map_err(io::Error::other)?;
        let mut config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_protocol_versions(&[&TLS13])
            .map_err(io::Error::other)?
            .with_no_client_auth()
            .with_single_cert(vec![certificate], private)
            .map_err(io::Error::other)?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        let keys = ServerKeys::new(super::server::random()?, KEY_EPOCH.as_secs());
        Ok(Self { acceptor: Arc::new(config).into(), fingerprint, keys, handover: Handover::default() })
    }

    /// What a client has to know of this server.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    pub(super) fn keys(&self) -> ServerKeys {
        self.keys.clone()
    }

    pub(super) fn handover(&self) -> &Handover {
        &self.handover
    }

    pub(super) async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        self.acceptor.accept(stream).await
    }

    /// The key for sealed datagrams, and how long it is good.
    pub(super) fn publish(&self) -> Response {
        let now_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs());
        let (key, good_s) = self.keys.clone().current(now_s);
        // A clock that goes otherwise makes no key too old.
        let lifetime = format!("max-age={}", good_s.saturating_sub(60).max(1));
        let fields = [("Content-Type", "application/ohttp-keys"), ("Cache-Control", lifetime.as_str())];
        Response::full(200, &fields, &key.to_list())
    }
}

/// Whether a request on a connection with TLS asks for the server's key.
pub(super) fn is_for_keys(head: &[u8]) -> bool {
    head.strip_prefix(b"GET ")
        .and_then(|rest| rest.strip_prefix(KEYS_PATH.as_bytes()))
        .is_some_and(|rest| rest.first() == Some(&b' '))
}

/// The request for the key of the server of `request`.
pub(super) fn ask_for_key(request: &FetchRequest) -> FetchRequest {
    let head = format!("GET {KEYS_PATH} HTTP/1.1\r\nHost: {}\r\n\r\n", request.site);
    FetchRequest {
        server: request.server,
        site: request.site.clone(),
        method: Method::Get,
        head: head.into(),
        body: FetchBody::Full(Bytes::new()),
        by_tcp: true,
        http: None,
    }
}

/// A key as it was published, and how long it is good.
pub(super) async fn published(response: FetchResponse) -> Option<(KeyConfig, Duration)> {
    if response.status != 200 {
        return None;
    }
    let head = std::str::from_utf8(&response.head).ok()?;
    let good_s = head.split("max-age=").nth(1)?.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()?;
    let list = response.body.collect(KEY_LIST_BYTES).await.ok()?;
    let good_for = Duration::from_secs(good_s).min(2 * KEY_EPOCH);
    Some((KeyConfig::from_list(&list)?, good_for))
}

/// Names say nothing here: the certificate is known by its fingerprint.
pub(super) fn server_name() -> ServerName<'static> {
    ServerName::try_from("dhttp.invalid")
        .unwrap_or(ServerName::IpAddress(std::net::Ipv4Addr::UNSPECIFIED.into()))
}

/// What a client knows of servers; the oldest makes room for the newest.
#[derive(Default)]
pub(super) struct Secured {
    tls: VecDeque<(Fingerprint, TlsConnector)>,
    keys: VecDeque<(SocketAddr, Fingerprint, KeyConfig, Instant)>,
}

impl fmt::Debug for Secured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secured").field("keys", &self.keys.len()).finish_non_exhaustive()
    }
}

impl Secured {
    /// TLS to the server with this certificate.
    pub fn tls(&mut self, server: Fingerprint) -> TlsConnector {
        if let Some((_, known)) = self.tls.iter().find(|(known, _)| *known == server) {
            return known.clone();
        }
        let connector = connector(server);
        if self.tls.len() >= SERVERS {
            self.tls.pop_front();
        }
        self.tls.push_back((server, connector.clone()));
        connector
    }

    /// The key of a server, if it is known and good.
    pub fn key(&self, address: SocketAddr, server: Fingerprint, now: Instant) -> Option<KeyConfig> {
        let known = self.keys.iter().find(|(at, of, ..)| *at == address && *of == server);
        known.filter(|(.., until)| *until > now).map(|(_, _, key, _)| *key)
    }

    pub fn learn(&mut self, address: SocketAddr, server: Fingerprint, key: KeyConfig, until: Instant) {
        self.keys.retain(|(at, ..)| *at != address);
        if self.keys.len() >= SERVERS {
            self.keys.pop_front();
        }
        self.keys.push_back((address, server, key, until));
    }
}

/// The server's certificate is not the one that the client was told.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the server has another certificate than the one announced")]
pub(super) struct OtherCertificate;

/// Why TLS was not agreed on, in words for who asked for it.
pub(super) fn tls_failure(error: io::Error) -> io::Error {
    let reason = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    let is_no_tls = |reason: &rustls::Error| {
        matches!(reason, rustls::Error::InvalidMessage(_) | rustls::Error::AlertReceived(_))
    };
    match reason {
        Some(rustls::Error::InvalidCertificate(_)) => {
            io::Error::new(io::ErrorKind::InvalidData, OtherCertificate)
        }
        Some(reason) if is_no_tls(reason) => io::Error::new(
            io::ErrorKind::InvalidData,
            format!("the server does not take encrypted DHTTP there: {reason}"),
        ),
        None if error.kind() == io::ErrorKind::UnexpectedEof => io::Error::new(
            error.kind(),
            "the server closed the connection: it does not take encrypted DHTTP there",
        ),
        _ => error,
    }
}

fn connector(server: Fingerprint) -> TlsConnector {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let verifier = Arc::new(ByFingerprint { server, provider: Arc::clone(&provider) });
    let builder = ClientConfig::builder_with_provider(provider);
    // The provider has suites of TLS 1.3: there is nothing that could fail.
    let builder = builder.with_protocol_versions(&[&TLS13]).unwrap_or_else(|_| ClientConfig::builder());
    let mut config = builder.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth();
    config.alpn_protocols = vec![ALPN.to_vec()];
    Arc::new(config).into()
}

/// Accepts one certificate.
#[derive(Debug)]
struct ByFingerprint {
    server: Fingerprint,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for ByFingerprint {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        if Fingerprint::of(end_entity) == self.server {
            Ok(ServerCertVerified::assertion())
        } else {
            Err(CertificateError::ApplicationVerificationFailure.into())
        }
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::PeerIncompatible::Tls12NotOffered.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
