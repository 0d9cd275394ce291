//! What connections are accepted with: TLS, windows and times.

use std::sync::Arc;
use std::time::Duration;

use aws_lc_rs::hkdf;
use quinn::crypto::rustls::{NoInitialCipherSuite, QuicServerConfig};
use quinn::{ServerConfig, TransportConfig, VarInt};
use rustls::ServerConfig as TlsConfig;

use crate::streams::{CONNECTION_WINDOW_BYTES, STREAM_WINDOW_BYTES, STREAMS};

/// HTTP/3, as clients name it in the handshake (RFC 9114 §3.1).
const ALPN_HTTP3: &[u8] = b"h3";
/// Streams in one direction that a client may have: the three that it needs (RFC 9114 §6.2) and some that mean nothing.
const STREAMS_ONE_WAY: u32 = 8;
/// Connections that nobody has looked at yet, and bytes of each and of all that are kept meanwhile.
const UNSEEN: usize = 256;
const UNSEEN_BYTES: u64 = 16 * 1024;
const UNSEEN_BYTES_IN_ALL: u64 = 1024 * 1024;
/// For how long nothing may come on a connection (RFC 9000 §10.1). A client that waits for its response in silence (RFC 9114 §5.1)
/// is asked meanwhile whether it is there; connections without requests end by deadlines of their own.
const SILENCE_MS: VarInt = VarInt::from_u32(60_000);
const SIGN_OF_LIFE: Duration = Duration::from_secs(25);
/// Bytes of TLS that come out of order (RFC 9000 §7.5).
const CRYPTO_BYTES: usize = 16 * 1024;

/// What connections of these settings are accepted with.
#[derive(Clone)]
pub(crate) struct Quic(pub Arc<ServerConfig>);

impl Quic {
    pub(crate) fn new(tls: &TlsConfig) -> Result<Self, NoInitialCipherSuite> {
        let mut tls = tls.clone();
        tls.alpn_protocols = vec![ALPN_HTTP3.to_vec()];
        // A first flight of data can be repeated by whoever has seen it (RFC 8446 §8).
        tls.max_early_data_size = 0;
        let crypto = Arc::new(QuicServerConfig::try_from(tls)?);
        let mut config = ServerConfig::with_crypto(crypto);
        config
            .transport_config(Arc::new(transport()))
            .max_incoming(UNSEEN)
            .incoming_buffer_size(UNSEEN_BYTES)
            .incoming_buffer_size_total(UNSEEN_BYTES_IN_ALL);
        Ok(Self(Arc::new(config)))
    }

    /// The same for an endpoint that proves clients' addresses by tokens (RFC 9000 §8.1) made with this secret, as those of
    /// other cores and processes do: a client that has been asked for one by another of them is not asked again.
    pub(super) fn with_tokens(&self, secret: &TokenSecret) -> ServerConfig {
        let mut config = ServerConfig::clone(&self.0);
        config.token_key(Arc::new(hkdf::Salt::new(hkdf::HKDF_SHA256, &[]).extract(secret)));
        config
    }
}

/// What tokens are made with by which clients prove their address.
pub(crate) type TokenSecret = [u8; 16];

impl std::fmt::Debug for Quic {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Quic")
    }
}

fn transport() -> TransportConfig {
    let mut transport = TransportConfig::default();
    transport
        .max_concurrent_bidi_streams(STREAMS.into())
        .max_concurrent_uni_streams(STREAMS_ONE_WAY.into())
        .stream_receive_window(STREAM_WINDOW_BYTES.into())
        .receive_window(CONNECTION_WINDOW_BYTES.into())
        .max_idle_timeout(Some(SILENCE_MS.into()))
        .keep_alive_interval(Some(SIGN_OF_LIFE))
        .crypto_buffer_size(CRYPTO_BYTES)
        .datagram_receive_buffer_size(None);
    transport
}
