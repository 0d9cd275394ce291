//! Requests by UDP that are sealed (RFC 9458): opened before they are read, and answered sealed.

use std::time::Instant;

use super::{Path, Server};
use crate::sealed::{SEALED_FLAG, SealError, ServerKeys};
use crate::wire::{Answer, Request};

/// Where the flags are in a request.
const FLAGS_AT: usize = 10;

/// What became of a datagram that may be sealed.
#[derive(Debug, Eq, PartialEq)]
pub enum Unsealed {
    /// It is not: hand it to [`Server::handle_datagram`] as it is.
    Plain,
    /// Hand this to [`Server::handle_datagram`], at once: the response will be sealed.
    Opened(Vec<u8>),
    /// It was refused.
    Done,
}

impl Server {
    /// From now on requests are taken that are sealed for these keys.
    pub fn share_keys(&mut self, keys: ServerKeys) {
        self.keys = Some(keys);
    }

    /// Opens a datagram that is sealed.
    pub fn unseal(&mut self, path: impl Into<Path>, datagram: &[u8], now: Instant) -> Unsealed {
        self.unsealed = None;
        let Path { client, local } = path.into();
        let flags = datagram.get(FLAGS_AT).copied().unwrap_or_default();
        if flags & SEALED_FLAG == 0 || !self.config.client_ports.contains(client.port()) {
            return Unsealed::Plain;
        }
        let mut plain = datagram.to_vec();
        if let Some(flags) = plain.get_mut(FLAGS_AT) {
            *flags &= !SEALED_FLAG;
        }
        // What cannot be read is refused where every datagram is.
        let Ok(request) = Request::parse(&plain) else { return Unsealed::Plain };
        if !self.config.client_ports.contains(request.other_port) {
            return Unsealed::Plain;
        }
        let (id, once) = (request.id, request.once);
        let path = Path { client: (client.ip().to_canonical(), client.port()).into(), local };
        if self.keys.is_none() {
            // Such as a cache on the way: connections pass it by.
            self.metrics.dhttp_sealed_refused_total.add(1);
            self.transmit(path, id, Answer::UseTcp);
            return Unsealed::Done;
        }
        if self.stressed && self.proves(request.token, path.client, now).is_none() {
            // A key exchange is work that a forged address must not cost now.
            let token = self.tokens.issue(path.client, self.unix_s(now));
            self.metrics.dhttp_tokens_asked_total.add(1);
            self.transmit(path, id, Answer::ProveAddress { token: &token });
            return Unsealed::Done;
        }
        let now_s = self.unix_s(now);
        let Some(keys) = self.keys.as_mut() else { return Unsealed::Done };
        match keys.open_request(request.http, id, once, now_s) {
            Ok((http, sealer)) => {
                let header_bytes = request.header_bytes();
                plain.truncate(header_bytes);
                plain.extend_from_slice(&http);
                self.unsealed = Some(sealer);
                self.metrics.dhttp_sealed_opened_total.add(1);
                Unsealed::Opened(plain)
            }
            Err(error) => {
                self.metrics.dhttp_sealed_refused_total.add(1);
                if error == SealError::UnknownKey {
                    // Connections have keys of their own, and bring the new one.
                    self.transmit(path, id, Answer::UseTcp);
                }
                Unsealed::Done
            }
        }
    }
}
