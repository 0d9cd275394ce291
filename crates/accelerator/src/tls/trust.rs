//! Which servers we believe to be the ones that we ask, and what we are known by to them.

use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{WebPkiSupportedAlgorithms, aws_lc_rs, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, ClientConnection, DigitallySignedStruct, RootCertStore, SignatureScheme};

use super::certificates::{self, CertificateError};
use super::{ALPN_HTTP1, ALPN_HTTP2, RECORD_BYTES};
use crate::settings::{TlsServer, UpstreamTls};

/// How the servers of a group are known, read from its files.
#[derive(Clone, Debug)]
pub struct Trust(Arc<ClientConfig>);

impl Trust {
    /// Reads the files; `http2` says whether the servers may choose that.
    pub fn new(settings: &UpstreamTls, http2: bool) -> Result<Self, CertificateError> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let of_library = |error: rustls::Error| CertificateError::Make(error.to_string());
        let known = Known::read(settings)?;
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(of_library)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(known));
        let mut config = match &settings.certificate {
            None => builder.with_no_client_auth(),
            Some(certificate) => {
                let certified = Arc::new(certificates::load(certificate, &provider)?);
                builder.with_client_cert_resolver(Arc::new(rustls::sign::SingleCertAndKey::from(certified)))
            }
        };
        let protocols: &[&[u8]] = if http2 { &[ALPN_HTTP2, ALPN_HTTP1] } else { &[ALPN_HTTP1] };
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        Ok(Self(Arc::new(config)))
    }

    /// For who connects by a library of its own.
    pub fn config(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.0)
    }

    /// Our side of a connection to this server.
    pub(crate) fn client(&self, server: &TlsServer) -> io::Result<ClientConnection> {
        let client = ClientConnection::new(Arc::clone(&self.0), server.name.clone());
        let mut client = client.map_err(io::Error::other)?;
        client.set_buffer_limit(Some(RECORD_BYTES));
        Ok(client)
    }

    /// Connects to a server, and waits until both sides know each other. Blocks.
    pub fn probe(&self, server: &TlsServer, timeout: Duration) -> io::Result<()> {
        let began = Instant::now();
        let mut socket = TcpStream::connect_timeout(&server.address, timeout)?;
        let mut client = self.client(server)?;
        while client.is_handshaking() || client.wants_write() {
            // A server that sends a byte now and then has no longer than one that is silent.
            let left = timeout.checked_sub(began.elapsed()).filter(|left| !left.is_zero());
            let left = left.ok_or(io::ErrorKind::TimedOut)?;
            if client.wants_write() {
                socket.set_write_timeout(Some(left))?;
                client.write_tls(&mut socket).map_err(timed_out)?;
                continue;
            }
            socket.set_read_timeout(Some(left))?;
            if client.read_tls(&mut socket).map_err(timed_out)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if let Err(error) = client.process_new_packets() {
                // An alert says what was wrong; it is no matter to us whether the server learns of it.
                let _ = client.write_tls(&mut socket);
                return Err(io::Error::new(io::ErrorKind::InvalidData, error));
            }
        }
        client.send_close_notify();
        let _ = client.write_tls(&mut socket);
        Ok(())
    }
}

/// A socket with a timeout says that it would block (socket(7)).
fn timed_out(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
        _ => error,
    }
}

/// The servers that are known: those with a certificate of an authority that is trusted, and those that are named
/// themselves.
#[derive(Debug)]
struct Known {
    /// `None`: whoever answers.
    authorities: Option<Arc<WebPkiServerVerifier>>,
    /// A server with one of these is known whoever has signed it: the operator has named it.
    named: Vec<CertificateDer<'static>>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl Known {
    fn read(settings: &UpstreamTls) -> Result<Self, CertificateError> {
        let provider = aws_lc_rs::default_provider();
        let algorithms = provider.signature_verification_algorithms;
        if !settings.verify {
            return Ok(Self { authorities: None, named: Vec::new(), algorithms });
        }
        let mut roots = RootCertStore::empty();
        let named = match &settings.authority {
            Some(path) => {
                let certificates = certificates::read(path)?;
                for certificate in &certificates {
                    roots
                        .add(certificate.clone())
                        .map_err(|source| CertificateError::Unusable { path: path.clone(), source })?;
                }
                certificates
            }
            None => {
                // Systems keep some that cannot be read.
                roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
                Vec::new()
            }
        };
        if roots.is_empty() {
            return Err(CertificateError::NoAuthorities);
        }
        let authorities = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::new(provider));
        let authorities = authorities.build().map_err(|error| CertificateError::Make(error.to_string()))?;
        Ok(Self { authorities: Some(authorities), named, algorithms })
    }
}

impl ServerCertVerifier for Known {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        above: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        match &self.authorities {
            Some(authorities) if !self.named.contains(leaf) => {
                authorities.verify_server_cert(leaf, above, name, ocsp, now)
            }
            _ => Ok(ServerCertVerified::assertion()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signature, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
