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
        let now_s = self.unix_s(now);
        let tokens = &mut self.tokens;
        let proved = request.token.is_some_and(|token| tokens.check(token, path.client, now_s).is_ok());
        if !proved && !self.may_open_unproved(now_s) {
            // A key exchange is work that forged addresses must not cost now.
            if request.token.is_some() {
                let token = self.tokens.issue(path.client, now_s);
                self.metrics.dhttp_tokens_asked_total.add(1);
                self.transmit(path, id, Answer::ProveAddress { token: &token });
            } else {
                self.metrics.dhttp_responses_use_tcp_total.add(1);
                self.transmit(path, id, Answer::UseTcp);
            }
            return Unsealed::Done;
        }
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

    /// Whether one more datagram of an unproved address may be opened in this second.
    fn may_open_unproved(&mut self, now_s: u64) -> bool {
        if self.opened.0 != now_s {
            self.opened = (now_s, 0);
        }
        let may = !self.stressed && self.opened.1 < self.config.unproved_opened_per_s;
        self.opened.1 += u32::from(may);
        may
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    use super::*;
    use crate::sealed::{ResponseOpener, seal_request};
    use crate::server::{Received, ServerConfig};
    use crate::wire::{Once, Pieces, RequestId, Response};

    const UNIX_S: u64 = 1_700_000_000;

    fn client() -> std::net::SocketAddr {
        "192.0.2.1:40000".parse().unwrap()
    }

    fn server(config: ServerConfig) -> (Server, Instant) {
        let now = Instant::now();
        let mut server = Server::new(config, [1; 16], [2; 32], now, UNIX_S);
        server.share_keys(ServerKeys::new([3; 32], 86_400));
        (server, now)
    }

    fn sealed(id: u64, token: Option<&[u8]>, http: &[u8]) -> (Vec<u8>, ResponseOpener) {
        let key = ServerKeys::new([3; 32], 86_400).current(UNIX_S).0;
        let id = RequestId(id.to_be_bytes());
        let mut random = StdRng::from_seed([id.0[7]; 32]);
        let (http, opener) = seal_request(key, id, Once::No, http, &mut random).unwrap();
        let (other_port, pieces, once) = (41_000, Pieces::Unknown, Once::No);
        let mut datagram = Vec::new();
        Request { id, other_port, resend: false, token, pieces, once, http: &http }.write(&mut datagram);
        datagram[FLAGS_AT] |= SEALED_FLAG;
        (datagram, opener)
    }

    #[test]
    fn an_error_in_a_sealed_request_is_answered_sealed() {
        let (mut server, now) = server(ServerConfig::default());
        let (datagram, opener) = sealed(1, Some(&[]), b"GET /../%00 HTTP/1.1\r\nHost: x\r\n\r\n");
        let Unsealed::Opened(plain) = server.unseal(client(), &datagram, now) else { panic!("not opened") };
        assert_eq!(server.handle_datagram(client(), &plain, now), Received::Done);
        let payload = server.poll_transmit().unwrap().payload;
        assert!(payload.len() <= 3 * datagram.len());
        let Answer::Http { token: Some([]), http } = Response::parse(&payload).unwrap().answer else {
            panic!("{payload:?}")
        };
        assert!(opener.open(http).unwrap().starts_with(b"HTTP/1.1 400 "));
    }

    #[test]
    fn beyond_so_many_in_a_second_who_is_not_proved_is_asked_for_proof_before_anything_is_opened() {
        let (mut server, now) = server(ServerConfig { unproved_opened_per_s: 2, ..ServerConfig::default() });
        let http = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n";
        let opens = |server: &mut Server, token: Option<&[u8]>, now| {
            let (datagram, _) = sealed(1, token, http);
            server.unseal(client(), &datagram, now) != Unsealed::Done
        };
        assert!(opens(&mut server, Some(&[]), now) && opens(&mut server, None, now));
        assert!(!opens(&mut server, Some(b"forged"), now) && !opens(&mut server, None, now));
        let asked = server.poll_transmit().unwrap().payload;
        let Answer::ProveAddress { token } = Response::parse(&asked).unwrap().answer else {
            panic!("{asked:?}")
        };
        let told = server.poll_transmit().unwrap().payload;
        assert_eq!(Response::parse(&told).unwrap().answer, Answer::UseTcp);
        for _ in 0..10 {
            assert!(opens(&mut server, Some(token), now), "who is real is served");
        }
        assert!(opens(&mut server, Some(&[]), now + std::time::Duration::from_secs(1)));
    }
}
