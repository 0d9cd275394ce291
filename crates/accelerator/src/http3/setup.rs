//! What connections are accepted with: TLS, windows and times.

use std::sync::Arc;
use std::time::Duration;

use quinn::crypto::rustls::{NoInitialCipherSuite, QuicServerConfig};
use quinn::{IdleTimeout, ServerConfig, TransportConfig, VarInt};
use rustls::ServerConfig as TlsConfig;

use crate::settings::Limits;
use crate::streams::{CONNECTION_WINDOW_BYTES, STREAM_WINDOW_BYTES, STREAMS};

/// HTTP/3, as clients name it in the handshake (RFC 9114 §3.1).
const ALPN_HTTP3: &[u8] = b"h3";
/// Streams in one direction that a client may have: the three that it needs (RFC 9114 §6.2) and some that mean nothing.
const STREAMS_ONE_WAY: u32 = 8;
/// Connections that nobody has looked at yet, and bytes of each and of all that are kept meanwhile.
const UNSEEN: usize = 256;
const UNSEEN_BYTES: u64 = 16 * 1024;
const UNSEEN_BYTES_IN_ALL: u64 = 1024 * 1024;
/// How long before QUIC gives a silent client up it is told that its connection ends.
const NOTICE: Duration = Duration::from_secs(5);
/// Bytes of TLS that come out of order (RFC 9000 §7.5).
const CRYPTO_BYTES: usize = 16 * 1024;

/// What connections of these settings are accepted with.
#[derive(Clone)]
pub(crate) struct Quic(pub Arc<ServerConfig>);

impl Quic {
    /// `before` has what was used with earlier settings of this process.
    pub(crate) fn new(
        tls: &TlsConfig,
        limits: &Limits,
        before: Option<&Self>,
    ) -> Result<Self, NoInitialCipherSuite> {
        let mut tls = tls.clone();
        tls.alpn_protocols = vec![ALPN_HTTP3.to_vec()];
        // A first flight of data can be repeated by whoever has seen it (RFC 8446 §8).
        tls.max_early_data_size = 0;
        let crypto = Arc::new(QuicServerConfig::try_from(tls)?);
        let mut config = match before {
            Some(Self(before)) => {
                let mut config = ServerConfig::clone(before);
                config.crypto = crypto;
                config
            }
            None => ServerConfig::with_crypto(crypto),
        };
        config
            .transport_config(Arc::new(transport(limits)))
            .max_incoming(UNSEEN)
            .incoming_buffer_size(UNSEEN_BYTES)
            .incoming_buffer_size_total(UNSEEN_BYTES_IN_ALL);
        Ok(Self(Arc::new(config)))
    }
}

impl std::fmt::Debug for Quic {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Quic")
    }
}

fn transport(limits: &Limits) -> TransportConfig {
    let mut transport = TransportConfig::default();
    // Whoever says nothing at all is gone; what a connection is idle for is the connection's own affair.
    let silence = limits.keep_alive_timeout.max(limits.header_timeout) + NOTICE;
    transport
        .max_concurrent_bidi_streams(STREAMS.into())
        .max_concurrent_uni_streams(STREAMS_ONE_WAY.into())
        .stream_receive_window(STREAM_WINDOW_BYTES.into())
        .receive_window(CONNECTION_WINDOW_BYTES.into())
        .max_idle_timeout(Some(IdleTimeout::try_from(silence).unwrap_or(VarInt::MAX.into())))
        .crypto_buffer_size(CRYPTO_BYTES)
        .datagram_receive_buffer_size(None);
    transport
}
