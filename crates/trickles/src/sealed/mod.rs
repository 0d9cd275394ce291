//! Encryption: an envelope around each datagram, opened and closed without any memory of clients.
//!
//! A client that knows the server's X25519 key seals its first datagram for it. The answer brings a *session*: two keys
//! that the server computes again from the session's id in every later datagram, so that it keeps none. Envelopes are
//! sealed with AES-128-GCM-SIV (RFC 8452): servers without state cannot promise never to draw a nonce twice, and here a
//! nonce that is drawn twice gives away no more than that two plaintexts are equal.

mod client;
mod server;

pub use client::{ClientSeal, Incoming};
pub use server::{Reply, ServerSeal, Unsealed};

use crate::mac::{Aes128, Block, Cmac};
use crate::wire::VERSION;
use aes_gcm_siv::aead::{AeadInPlace, KeyInit};
use aes_gcm_siv::{Aes128GcmSiv, Key, Nonce};
use hkdf::Hkdf;
use sha2::{Digest, Sha256};
use x25519_dalek::{PublicKey, StaticSecret};

/// Asks for the server's key.
pub(crate) const KIND_HELLO: u8 = 0x41;
/// Sealed with keys from an exchange with the server's key.
pub(crate) const KIND_FIRST: u8 = 0x42;
const KIND_SEALED: u8 = 0x43;
const KIND_KEY: u8 = 0xc1;
const KIND_ANSWER: u8 = 0xc2;
const KIND_EXPIRED: u8 = 0xc3;

const NONCE_BYTES: usize = 12;
const TAG_BYTES: usize = 16;
const TOKEN_BYTES: usize = 8;
const HINT_BYTES: usize = 4;
const SESSION_BYTES: usize = 1 + 16 + 16 + 16;
const FIRST_HEAD_BYTES: usize = 2 + HINT_BYTES + PUBLIC_BYTES;
const SEALED_HEAD_BYTES: usize = 2 + 1 + 16;
const ANSWER_HEAD_BYTES: usize = 2;

/// Bytes of an X25519 public key.
pub const PUBLIC_BYTES: usize = 32;
/// Bytes that an envelope adds at most to a client's datagram.
pub const REQUEST_OVERHEAD_BYTES: usize = FIRST_HEAD_BYTES + NONCE_BYTES + TAG_BYTES;
/// Bytes that an envelope adds at most to a server's packet.
pub const ANSWER_OVERHEAD_BYTES: usize = ANSWER_HEAD_BYTES + NONCE_BYTES + 1 + SESSION_BYTES + TAG_BYTES;
/// Length of a hello: longer than its answer.
const HELLO_BYTES: usize = 64;
const KEY_BYTES: usize = 2 + TOKEN_BYTES + PUBLIC_BYTES;
const _: () =
    assert!(HELLO_BYTES > KEY_BYTES, "an unproved address must not be sent more than was received from it");

const PLAIN: u8 = 0;
const WITH_SESSION: u8 = 1;

/// Whether packets are encrypted, and for whom.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Encryption {
    /// Packets travel in the clear.
    #[default]
    Off,
    /// The server is asked for its key: nobody who only listens learns anything, somebody in the middle of the path may
    /// pose as the server. Nothing is ever sent in the clear.
    On,
    /// Only the owner of this key can answer; no more round trips than in the clear.
    Pinned(PublicBytes),
}

/// An X25519 public key.
pub type PublicBytes = [u8; PUBLIC_BYTES];

/// Reads a public key from 64 hexadecimal digits.
#[must_use]
pub fn public_from_hex(text: &str) -> Option<PublicBytes> {
    let digits = text.as_bytes();
    if digits.len() != 2 * PUBLIC_BYTES {
        return None;
    }
    let mut key = [0; PUBLIC_BYTES];
    for (byte, pair) in key.iter_mut().zip(digits.chunks(2)) {
        let digit = |digit: u8| char::from(digit).to_digit(16);
        *byte = (digit(pair[0])? * 16 + digit(pair[1])?) as u8;
    }
    Some(key)
}

/// Why an envelope is not opened; the sender's fault, or that of somebody on the way.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum SealError {
    /// Too short, or of an unknown kind.
    #[error("malformed envelope")]
    Malformed,
    /// Not sealed by who knows the key: forged, changed on the way, or for somebody else.
    #[error("envelope with a wrong tag")]
    Forged,
    /// Encryption is required, and this is a datagram in the clear.
    #[error("a datagram in the clear where encryption is required")]
    Plaintext,
    /// The server's key is not the one that is expected.
    #[error("the server's key is another one than expected")]
    WrongKey,
}

/// A server's key pair.
#[derive(Clone)]
pub struct Identity {
    secret: StaticSecret,
    public: PublicKey,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identity").field("public", &self.public.as_bytes()).finish_non_exhaustive()
    }
}

impl Identity {
    /// The pair of a secret of 32 random bytes.
    #[must_use]
    pub fn new(secret: [u8; 32]) -> Self {
        let secret = StaticSecret::from(secret);
        let public = PublicKey::from(&secret);
        Self { secret, public }
    }

    /// What clients may pin.
    #[must_use]
    pub fn public(&self) -> PublicBytes {
        *self.public.as_bytes()
    }

    /// What a client's first datagram names the key by.
    pub(crate) fn hint(&self) -> [u8; HINT_BYTES] {
        hint_of(self.public.as_bytes())
    }
}

fn hint_of(public: &PublicBytes) -> [u8; HINT_BYTES] {
    let digest = Sha256::digest(public);
    [digest[0], digest[1], digest[2], digest[3]]
}

/// One direction's cipher.
#[derive(Clone)]
struct Cipher(Box<Aes128GcmSiv>);

impl std::fmt::Debug for Cipher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Cipher")
    }
}

impl Cipher {
    fn new(key: &Block) -> Self {
        Self(Box::new(Aes128GcmSiv::new(Key::<Aes128GcmSiv>::from_slice(key))))
    }

    /// Appends nonce and ciphertext of `plaintext` to `out`, whose bytes so far are authenticated with it.
    fn seal(&self, nonces: &mut Nonces, out: &mut Vec<u8>, plaintext: &[&[u8]]) {
        let nonce = nonces.next();
        let head = out.len();
        let mut text = Vec::with_capacity(plaintext.iter().map(|part| part.len()).sum());
        for part in plaintext {
            text.extend_from_slice(part);
        }
        // It fails for texts of 2³⁶ bytes only; an empty envelope is refused by its receiver.
        let tag = self.0.encrypt_in_place_detached(Nonce::from_slice(&nonce), &out[..head], &mut text);
        if let Ok(tag) = tag {
            out.extend_from_slice(&nonce);
            out.extend_from_slice(&text);
            out.extend_from_slice(&tag);
        }
    }

    /// The plaintext of an envelope whose first `head` bytes are in the clear.
    fn open(&self, envelope: &[u8], head: usize) -> Result<Vec<u8>, SealError> {
        let (clear, rest) = envelope.split_at_checked(head).ok_or(SealError::Malformed)?;
        let (nonce, rest) = rest.split_at_checked(NONCE_BYTES).ok_or(SealError::Malformed)?;
        let length = rest.len().checked_sub(TAG_BYTES).ok_or(SealError::Malformed)?;
        let (text, tag) = rest.split_at(length);
        let mut text = text.to_vec();
        self.0
            .decrypt_in_place_detached(Nonce::from_slice(nonce), clear, &mut text, tag.into())
            .map_err(|_| SealError::Forged)?;
        Ok(text)
    }
}

/// Keys of both directions.
#[derive(Clone, Debug)]
struct Pair {
    to_server: Cipher,
    to_client: Cipher,
}

/// What a first datagram is sealed with, and the id of the session that it leads to.
fn exchange(shared: &[u8; 32], share: &PublicBytes, server: &PublicBytes) -> (Pair, Block) {
    let derived = Hkdf::<Sha256>::new(Some(b"tidegate trickles 1"), shared);
    let mut info = [0; 2 * PUBLIC_BYTES];
    info[..PUBLIC_BYTES].copy_from_slice(share);
    info[PUBLIC_BYTES..].copy_from_slice(server);
    let mut okm = [0; 48];
    // 48 bytes are within HKDF's limit of 255 · 32.
    let _ = derived.expand(&info, &mut okm);
    let block = |at: usize| {
        let mut block = [0; 16];
        block.copy_from_slice(&okm[at..at + 16]);
        block
    };
    let pair = Pair { to_server: Cipher::new(&block(0)), to_client: Cipher::new(&block(16)) };
    (pair, block(32))
}

/// The two keys of session `id`: what the server computes again for each datagram.
fn session_keys(ticket: &Cmac, id: &Block) -> (Block, Block) {
    let key = |direction: u8| {
        let mut message = [0; 17];
        message[..16].copy_from_slice(id);
        message[16] = direction;
        ticket.tag(&message)
    };
    (key(1), key(2))
}

/// Nonces that nobody else draws: the encryption of a counter under a random key of this process.
#[derive(Debug)]
struct Nonces {
    random: Aes128,
    drawn: u64,
}

impl Nonces {
    fn new(seed: &Block) -> Self {
        Self { random: Aes128::new(seed), drawn: 0 }
    }

    fn block(&mut self) -> Block {
        self.drawn += 1;
        let mut block = [0; 16];
        block[..8].copy_from_slice(&self.drawn.to_be_bytes());
        self.random.encrypt(block)
    }

    fn next(&mut self) -> [u8; NONCE_BYTES] {
        let mut nonce = [0; NONCE_BYTES];
        nonce.copy_from_slice(&self.block()[..NONCE_BYTES]);
        nonce
    }
}

/// Whether `datagram` is of a kind that this module makes.
#[must_use]
pub fn is_envelope(datagram: &[u8]) -> bool {
    matches!(
        datagram,
        [VERSION, KIND_HELLO | KIND_FIRST | KIND_SEALED | KIND_KEY | KIND_ANSWER | KIND_EXPIRED, ..]
    )
}
