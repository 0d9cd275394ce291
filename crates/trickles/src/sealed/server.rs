//! The server's end of an envelope: keys, and a source of nonces; nothing about clients.

use super::{
    ANSWER_OVERHEAD_BYTES, Cipher, FIRST_HEAD_BYTES, HELLO_BYTES, HINT_BYTES, KIND_ANSWER, KIND_EXPIRED,
    KIND_FIRST, KIND_HELLO, KIND_KEY, KIND_SEALED, Nonces, PLAIN, PUBLIC_BYTES, REQUEST_OVERHEAD_BYTES,
    SEALED_HEAD_BYTES, SESSION_BYTES, SealError, TOKEN_BYTES, WITH_SESSION, exchange, session_keys,
};
use crate::keys::KeyRing;
use crate::mac::Block;
use crate::server::Counters;
use crate::wire::VERSION;
use x25519_dalek::PublicKey;

/// Opens requests and seals answers.
#[derive(Debug)]
pub struct ServerSeal {
    nonces: Nonces,
    required: bool,
}

/// What a datagram turns out to be.
#[derive(Debug)]
pub enum Unsealed {
    /// It was in the clear.
    Plain,
    /// A request, and how it is answered.
    Request(Vec<u8>, Reply),
    /// Nothing for the transport; this is sent back.
    Answer(Vec<u8>),
}

/// How the answers to one request are sealed.
#[derive(Debug)]
pub struct Reply {
    cipher: Cipher,
    /// A session for the client to go on with.
    session: Option<[u8; SESSION_BYTES]>,
}

impl Reply {
    /// Bytes that sealing adds to each answer at most.
    #[must_use]
    pub fn overhead_bytes() -> usize {
        ANSWER_OVERHEAD_BYTES
    }
}

impl ServerSeal {
    /// `seed` makes the nonces: random, and no other process's. With `required`, datagrams in the clear are refused.
    #[must_use]
    pub fn new(seed: &Block, required: bool) -> Self {
        Self { nonces: Nonces::new(seed), required }
    }

    /// Opens what a client has sent.
    ///
    /// # Errors
    /// The envelope is malformed or forged, or there is none although it is required.
    pub fn open(&self, datagram: &[u8], keys: &KeyRing, counters: &Counters) -> Result<Unsealed, SealError> {
        let result = self.unseal(datagram, keys);
        match &result {
            Ok(Unsealed::Plain) => {}
            Ok(Unsealed::Request(..)) => counters.trickles_sealed_total.add(1),
            Ok(Unsealed::Answer(answer)) => match answer[1] {
                KIND_KEY => counters.trickles_keys_told_total.add(1),
                _ => counters.trickles_sessions_expired_total.add(1),
            },
            Err(SealError::Plaintext) => counters.trickles_plaintext_refused_total.add(1),
            Err(SealError::Forged) => counters.trickles_seal_forged_total.add(1),
            Err(_) => counters.trickles_malformed_total.add(1),
        }
        result
    }

    fn unseal(&self, datagram: &[u8], keys: &KeyRing) -> Result<Unsealed, SealError> {
        match datagram {
            [VERSION, KIND_HELLO, rest @ ..] => {
                if datagram.len() < HELLO_BYTES {
                    return Err(SealError::Malformed);
                }
                Ok(tell_key(&rest[..TOKEN_BYTES], keys))
            }
            [VERSION, KIND_FIRST, rest @ ..] => {
                // Shorter ones are not worth a multiplication.
                if datagram.len() < REQUEST_OVERHEAD_BYTES {
                    return Err(SealError::Malformed);
                }
                let (hint, rest) = rest.split_at_checked(HINT_BYTES).ok_or(SealError::Malformed)?;
                let (share, _) = rest.split_first_chunk::<PUBLIC_BYTES>().ok_or(SealError::Malformed)?;
                let Some(identity) = keys.identity_by_hint(hint) else {
                    if datagram.len() < HELLO_BYTES {
                        return Err(SealError::Malformed);
                    }
                    return Ok(tell_key(&share[..TOKEN_BYTES], keys));
                };
                let shared = identity.secret.diffie_hellman(&PublicKey::from(*share));
                // RFC 7748 §6.1: a share of small order would make keys that everybody knows.
                if !shared.was_contributory() {
                    return Err(SealError::Forged);
                }
                let (pair, id) = exchange(shared.as_bytes(), share, &identity.public());
                let inner = pair.to_server.open(datagram, FIRST_HEAD_BYTES)?;
                let reply = Reply { cipher: pair.to_client, session: Some(session(keys, &id)) };
                Ok(Unsealed::Request(inner, reply))
            }
            [VERSION, KIND_SEALED, rest @ ..] => {
                let (epoch, rest) = rest.split_first().ok_or(SealError::Malformed)?;
                let (id, _) = rest.split_first_chunk::<16>().ok_or(SealError::Malformed)?;
                let Some(of_epoch) = keys.get(*epoch) else {
                    let mut answer = vec![VERSION, KIND_EXPIRED];
                    answer.extend_from_slice(id);
                    return Ok(Unsealed::Answer(answer));
                };
                let (to_server, to_client) = session_keys(&of_epoch.ticket, id);
                let inner = Cipher::new(&to_server).open(datagram, SEALED_HEAD_BYTES)?;
                // The session moves on with the keys, before its epoch is retired.
                let session = (*epoch != keys.current().epoch).then(|| session(keys, id));
                Ok(Unsealed::Request(inner, Reply { cipher: Cipher::new(&to_client), session }))
            }
            _ if self.required => Err(SealError::Plaintext),
            _ => Ok(Unsealed::Plain),
        }
    }

    /// The envelope of an answer.
    pub fn seal(&mut self, reply: &Reply, packet: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(packet.len() + ANSWER_OVERHEAD_BYTES);
        out.extend_from_slice(&[VERSION, KIND_ANSWER]);
        match &reply.session {
            None => reply.cipher.seal(&mut self.nonces, &mut out, &[&[PLAIN], packet]),
            Some(session) => {
                reply.cipher.seal(&mut self.nonces, &mut out, &[&[WITH_SESSION], session, packet]);
            }
        }
        out
    }
}

fn tell_key(token: &[u8], keys: &KeyRing) -> Unsealed {
    let mut answer = vec![VERSION, KIND_KEY];
    answer.extend_from_slice(token);
    answer.extend_from_slice(&keys.identity().public());
    Unsealed::Answer(answer)
}

fn session(keys: &KeyRing, id: &Block) -> [u8; SESSION_BYTES] {
    let current = keys.current();
    let (to_server, to_client) = session_keys(&current.ticket, id);
    let mut session = [0; SESSION_BYTES];
    session[0] = current.epoch;
    session[1..17].copy_from_slice(id);
    session[17..33].copy_from_slice(&to_server);
    session[33..].copy_from_slice(&to_client);
    session
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_small_order_when_sent_then_it_is_refused() {
        let ring = KeyRing::new(1, &[7; 16]);
        let public = ring.identity().public();
        let server = ServerSeal::new(&[1; 16], false);
        let mut one = [0; PUBLIC_BYTES];
        one[0] = 1;
        for share in [[0; PUBLIC_BYTES], one] {
            // With such a share everybody knows what is shared: nothing but zeros (RFC 7748 §6.1).
            let (pair, _) = exchange(&[0; 32], &share, &public);
            let mut first = vec![VERSION, KIND_FIRST];
            first.extend_from_slice(&ring.identity().hint());
            first.extend_from_slice(&share);
            pair.to_server.seal(&mut Nonces::new(&[2; 16]), &mut first, &[b"the first datagram"]);
            let opened = server.open(&first, &ring, &Counters::default());
            assert_eq!(opened.err(), Some(SealError::Forged));
        }
    }
}
