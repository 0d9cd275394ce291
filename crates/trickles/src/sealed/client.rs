//! The client's end of an envelope.

use super::{
    ANSWER_HEAD_BYTES, Cipher, Encryption, HELLO_BYTES, KIND_ANSWER, KIND_EXPIRED, KIND_FIRST, KIND_HELLO,
    KIND_KEY, KIND_SEALED, Nonces, PLAIN, PUBLIC_BYTES, Pair, PublicBytes, SESSION_BYTES, SealError,
    TOKEN_BYTES, WITH_SESSION, exchange, hint_of,
};
use crate::mac::Block;
use crate::wire::VERSION;
use x25519_dalek::{PublicKey, StaticSecret};

/// Seals a client's datagrams and opens what answers them. It never sends anything in the clear, and takes nothing.
#[derive(Debug)]
pub struct ClientSeal {
    nonces: Nonces,
    server: Option<PublicBytes>,
    pinned: bool,
    handshake: Option<Handshake>,
    session: Option<Session>,
    /// The token of a hello under way.
    token: Option<[u8; TOKEN_BYTES]>,
    /// What was sent last, and how often it may be sent again: it waits for the server's key, or keys are gone. The
    /// transport, which does not know why there is no answer, would ask again so late that new keys may be gone by
    /// then, too.
    held: Option<(Vec<u8>, u8)>,
}

/// Where the session is gone and then the server's key, what is sent again is so twice. Replicas that each have a key of
/// their own must not keep a client busy for ever.
const SENT_AGAIN: u8 = 2;

/// Keys from an exchange with the server's key.
struct Handshake {
    share: PublicBytes,
    hint: [u8; 4],
    pair: Pair,
}

impl std::fmt::Debug for Handshake {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handshake").field("share", &self.share).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Session {
    epoch: u8,
    id: Block,
    pair: Pair,
}

/// What an answer turns out to be.
#[derive(Debug, Eq, PartialEq)]
pub enum Incoming {
    /// A packet for the transport.
    Packet(Vec<u8>),
    /// Something that waited can be sent.
    Send(Vec<u8>),
    /// Nothing to do.
    Nothing,
}

impl ClientSeal {
    /// `seed` makes keys and nonces: random and secret. `None` where encryption is off.
    #[must_use]
    pub fn new(encryption: Encryption, seed: &Block) -> Option<Self> {
        let (server, pinned) = match encryption {
            Encryption::Off => return None,
            Encryption::On => (None, false),
            Encryption::Pinned(key) => (Some(key), true),
        };
        let nonces = Nonces::new(seed);
        Some(Self { nonces, server, pinned, handshake: None, session: None, token: None, held: None })
    }

    /// The envelope to send in place of `datagram`, or a hello that has to come first.
    pub fn seal(&mut self, datagram: &[u8]) -> Vec<u8> {
        self.held = Some((datagram.to_vec(), SENT_AGAIN));
        self.envelope(datagram)
    }

    fn envelope(&mut self, datagram: &[u8]) -> Vec<u8> {
        if let Some(session) = &self.session {
            let mut out = vec![VERSION, KIND_SEALED, session.epoch];
            out.extend_from_slice(&session.id);
            session.pair.to_server.seal(&mut self.nonces, &mut out, &[datagram]);
            return out;
        }
        let Some(server) = self.server else {
            return self.hello();
        };
        let Self { nonces, handshake, .. } = self;
        let handshake = handshake.get_or_insert_with(|| Handshake::new(nonces, &server));
        let mut out = vec![VERSION, KIND_FIRST];
        out.extend_from_slice(&handshake.hint);
        out.extend_from_slice(&handshake.share);
        handshake.pair.to_server.seal(nonces, &mut out, &[datagram]);
        out
    }

    fn hello(&mut self) -> Vec<u8> {
        let token = *self.token.get_or_insert_with(|| {
            let [a, b, c, d, e, f, g, h, ..] = self.nonces.block();
            [a, b, c, d, e, f, g, h]
        });
        let mut out = vec![VERSION, KIND_HELLO];
        out.extend_from_slice(&token);
        out.resize(HELLO_BYTES, 0);
        out
    }

    /// Opens what has come from the server.
    ///
    /// # Errors
    /// It is not for us, or not from the server; [`SealError::WrongKey`] where the server has another key than the
    /// pinned one.
    pub fn open(&mut self, datagram: &[u8]) -> Result<Incoming, SealError> {
        match datagram {
            [VERSION, KIND_ANSWER, ..] => self.open_answer(datagram),
            [VERSION, KIND_KEY, rest @ ..] => self.take_key(rest),
            [VERSION, KIND_EXPIRED, id @ ..] => {
                if self.session.as_ref().is_none_or(|session| session.id != id) {
                    return Ok(Incoming::Nothing);
                }
                // The next datagram begins another one. Its keys are new: nothing is sealed with old ones again.
                (self.session, self.handshake) = (None, None);
                Ok(self.send_again())
            }
            _ => Err(SealError::Plaintext),
        }
    }

    fn open_answer(&mut self, datagram: &[u8]) -> Result<Incoming, SealError> {
        let session = self.session.as_ref().map(|session| &session.pair);
        let handshake = self.handshake.as_ref().map(|handshake| &handshake.pair);
        let inner = session
            .into_iter()
            .chain(handshake)
            .find_map(|pair| pair.to_client.open(datagram, ANSWER_HEAD_BYTES).ok())
            .ok_or(SealError::Forged)?;
        match inner.split_first() {
            Some((&PLAIN, packet)) => Ok(Incoming::Packet(packet.to_vec())),
            Some((&WITH_SESSION, rest)) => {
                let (session, packet) =
                    rest.split_first_chunk::<SESSION_BYTES>().ok_or(SealError::Malformed)?;
                self.session = Some(Session::from_bytes(session));
                Ok(Incoming::Packet(packet.to_vec()))
            }
            _ => Err(SealError::Malformed),
        }
    }

    fn take_key(&mut self, told: &[u8]) -> Result<Incoming, SealError> {
        let (token, key) = told.split_first_chunk::<TOKEN_BYTES>().ok_or(SealError::Malformed)?;
        let key: PublicBytes = key.try_into().map_err(|_| SealError::Malformed)?;
        let asked = self.token.as_ref() == Some(token);
        let refused =
            self.handshake.as_ref().is_some_and(|handshake| handshake.share[..TOKEN_BYTES] == token[..]);
        if !(asked || refused && self.session.is_none()) {
            return Err(SealError::Forged);
        }
        if self.pinned {
            return Err(SealError::WrongKey);
        }
        self.token = None;
        (self.server, self.handshake) = (Some(key), None);
        Ok(self.send_again())
    }

    fn send_again(&mut self) -> Incoming {
        let Some((datagram, left @ 1..)) = self.held.take() else { return Incoming::Nothing };
        let envelope = self.envelope(&datagram);
        self.held = Some((datagram, left - 1));
        Incoming::Send(envelope)
    }
}

impl Handshake {
    fn new(nonces: &mut Nonces, server: &PublicBytes) -> Self {
        let mut secret = [0; PUBLIC_BYTES];
        secret[..16].copy_from_slice(&nonces.block());
        secret[16..].copy_from_slice(&nonces.block());
        let secret = StaticSecret::from(secret);
        let share = *PublicKey::from(&secret).as_bytes();
        // A server's key of small order is the server's own loss: it gives away what it could publish anyway.
        let shared = secret.diffie_hellman(&PublicKey::from(*server));
        let (pair, _) = exchange(shared.as_bytes(), &share, server);
        Self { share, hint: hint_of(server), pair }
    }
}

impl Session {
    fn from_bytes(bytes: &[u8; SESSION_BYTES]) -> Self {
        let block = |at: usize| {
            let mut block = [0; 16];
            block.copy_from_slice(&bytes[at..at + 16]);
            block
        };
        let pair = Pair { to_server: Cipher::new(&block(17)), to_client: Cipher::new(&block(33)) };
        Self { epoch: bytes[0], id: block(1), pair }
    }
}
