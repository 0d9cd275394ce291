//! Encrypted datagrams, in the manner of Oblivious HTTP (RFC 9458) over HPKE (RFC 9180): one message asks, one answers.
//!
//! ```text
//! sealed request   key id (1)  KEM (2)  KDF (2)  AEAD (2)  encapsulated key (32)  ciphertext
//! sealed response  "S"  nonce (16)  ciphertext
//! ```
//!
//! The id, the port, the flags, the token and the fields on pieces and tickets stay in the clear: servers need them
//! before they spend a key exchange. The id and the ticket field are authenticated with the request, so that a copy of
//! it cannot be given another number.

use std::fmt;
use std::sync::Arc;

use chacha20poly1305::aead::{Aead as _, KeyInit, Payload};
use hpke::aead::{AeadCtxR, AeadCtxS, ChaCha20Poly1305};
use hpke::kdf::HkdfSha256;
use hpke::kem::X25519HkdfSha256;
use hpke::{Deserializable, Kem, OpModeR, OpModeS, Serializable};
use rand::CryptoRng;

use crate::wire::{Once, RequestId};

/// Bytes that a sealed request has more than its HTTP.
pub const REQUEST_OVERHEAD_BYTES: usize = SUITE_BYTES + KEY_BYTES + TAG_BYTES;
/// Bytes that a sealed response has more than its HTTP.
pub const RESPONSE_OVERHEAD_BYTES: usize = 1 + NONCE_BYTES + TAG_BYTES;
/// The flag of sealed requests.
pub const SEALED_FLAG: u8 = 0x10;

const SUITE_BYTES: usize = 7;
const KEY_BYTES: usize = 32;
const TAG_BYTES: usize = 16;
const NONCE_BYTES: usize = 16;
/// DHKEM(X25519, HKDF-SHA256), HKDF-SHA256, ChaCha20Poly1305 (RFC 9180 §7).
const SUITE: [u8; 6] = [0, 0x20, 0, 1, 0, 3];
/// Length of one key configuration (RFC 9458 §3.1) with one suite.
const CONFIG_BYTES: usize = 1 + 2 + KEY_BYTES + 2 + 4;
/// What a sealed response starts with.
const RESPONSE_MARK: u8 = b'S';

type Suite = X25519HkdfSha256;

/// A server's public key (RFC 9458 §3.1).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct KeyConfig {
    id: u8,
    public: [u8; KEY_BYTES],
}

/// Why something sealed was refused; always the peer's fault, or that of whoever changed it on the way.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum SealError {
    /// Too short, or of a suite that is not spoken here.
    #[error("malformed or of another cipher suite")]
    Malformed,
    /// The key is out of date, or was never ours.
    #[error("unknown key")]
    UnknownKey,
    /// It was not sealed for this key, id and number.
    #[error("does not authenticate")]
    Forged,
}

impl KeyConfig {
    /// The list of one key configuration, as `application/ohttp-keys` (RFC 9458 §3.2).
    pub fn to_list(self) -> Vec<u8> {
        let mut out = Vec::with_capacity(2 + CONFIG_BYTES);
        out.extend_from_slice(&(CONFIG_BYTES as u16).to_be_bytes());
        out.push(self.id);
        out.extend_from_slice(&SUITE[..2]);
        out.extend_from_slice(&self.public);
        out.extend_from_slice(&4_u16.to_be_bytes());
        out.extend_from_slice(&SUITE[2..]);
        out
    }

    /// The first key of such a list that is of a suite spoken here.
    pub fn from_list(mut list: &[u8]) -> Option<Self> {
        while let Some((length, rest)) = list.split_first_chunk() {
            let (config, rest) = rest.split_at_checked(usize::from(u16::from_be_bytes(*length)))?;
            if let Some(config) = Self::from_bytes(config) {
                return Some(config);
            }
            list = rest;
        }
        None
    }

    fn from_bytes(config: &[u8]) -> Option<Self> {
        let (&id, rest) = config.split_first()?;
        let rest = rest.strip_prefix(&SUITE[..2])?;
        let (public, rest) = rest.split_first_chunk()?;
        let suites = rest.get(2..)?;
        suites.chunks_exact(4).any(|suite| suite == &SUITE[2..]).then_some(Self { id, public: *public })
    }

    fn header(self) -> [u8; SUITE_BYTES] {
        let mut header = [self.id; SUITE_BYTES];
        header[1..].copy_from_slice(&SUITE);
        header
    }
}

/// RFC 9458 §4.3.
fn info(header: &[u8]) -> Vec<u8> {
    [&b"message/dhttp request\0"[..], header].concat()
}

fn associated(id: RequestId, once: Once) -> Vec<u8> {
    let mut data = id.0.to_vec();
    once.write(&mut data);
    data
}

/// Seals a request.
///
/// # Errors
/// The key is not one.
pub fn seal_request(
    config: KeyConfig,
    id: RequestId,
    once: Once,
    http: &[u8],
    random: &mut impl CryptoRng,
) -> Result<(Vec<u8>, ResponseOpener), SealError> {
    let header = config.header();
    let key = <Suite as Kem>::PublicKey::from_bytes(&config.public).map_err(|_| SealError::UnknownKey)?;
    let (encapsulated, mut context) = hpke::setup_sender_with_rng::<ChaCha20Poly1305, HkdfSha256, Suite>(
        &OpModeS::Base,
        &key,
        &info(&header),
        random,
    )
    .map_err(|_| SealError::UnknownKey)?;
    let sealed = context.seal(http, &associated(id, once)).map_err(|_| SealError::Malformed)?;
    Ok(([&header[..], &encapsulated.to_bytes(), &sealed].concat(), ResponseOpener(Arc::new(context))))
}

/// Opens the response to a request.
#[derive(Clone)]
pub struct ResponseOpener(Arc<AeadCtxS<ChaCha20Poly1305, HkdfSha256, Suite>>);

/// Seals the response to a request.
#[derive(Clone)]
pub struct ResponseSealer(Arc<AeadCtxR<ChaCha20Poly1305, HkdfSha256, Suite>>);

impl fmt::Debug for ResponseOpener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ResponseOpener")
    }
}

impl fmt::Debug for ResponseSealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ResponseSealer")
    }
}

/// RFC 9458 §4.4: a key for each response, from the request's secret and a nonce.
fn response_cipher(
    export: impl Fn(&[u8], &mut [u8]) -> bool,
    nonce: &[u8],
) -> Option<chacha20poly1305::ChaCha20Poly1305> {
    let mut key = [0; 32];
    let context = [&b"message/dhttp response"[..], nonce].concat();
    export(&context, &mut key).then(|| chacha20poly1305::ChaCha20Poly1305::new(&key.into()))
}

impl ResponseSealer {
    /// Seals a response. The nonce follows from the response under the request's secret: the same response is sealed
    /// into the same bytes, of which pieces can be asked for again, and no key seals two responses.
    pub fn seal(&self, http: &[u8]) -> Vec<u8> {
        let export = |context: &[u8], out: &mut [u8]| self.0.export(context, out).is_ok();
        let mut nonce = [0; NONCE_BYTES];
        let context = [&b"message/dhttp nonce"[..], http].concat();
        let derived = export(&context, &mut nonce);
        let cipher = response_cipher(export, &nonce).filter(|_| derived);
        let sealed = cipher
            .and_then(|cipher| cipher.encrypt(&Default::default(), Payload { msg: http, aad: &[] }).ok());
        let mut out = Vec::with_capacity(RESPONSE_OVERHEAD_BYTES + http.len());
        out.push(RESPONSE_MARK);
        out.extend_from_slice(&nonce);
        // Sealing fails for no message that fits a datagram; without a ciphertext the client opens a connection.
        out.extend_from_slice(&sealed.unwrap_or_default());
        out
    }
}

impl ResponseOpener {
    /// Opens a response.
    ///
    /// # Errors
    /// It is not sealed, or not for this request.
    pub fn open(&self, sealed: &[u8]) -> Result<Vec<u8>, SealError> {
        let rest = sealed.strip_prefix(&[RESPONSE_MARK]).ok_or(SealError::Malformed)?;
        let (nonce, ciphertext) = rest.split_at_checked(NONCE_BYTES).ok_or(SealError::Malformed)?;
        let export = |context: &[u8], out: &mut [u8]| self.0.export(context, out).is_ok();
        let cipher = response_cipher(export, nonce).ok_or(SealError::Malformed)?;
        cipher
            .decrypt(&Default::default(), Payload { msg: ciphertext, aad: &[] })
            .map_err(|_| SealError::Forged)
    }
}

/// A server's keys: one for each epoch, derived from a secret, so that cores and servers that share it share them. A
/// key is published in its epoch, and good in the one before and the one after it too.
#[derive(Clone)]
pub struct ServerKeys {
    secret: [u8; 32],
    epoch_s: u64,
    recent: [Option<(u64, <Suite as Kem>::PrivateKey, KeyConfig)>; 3],
}

impl fmt::Debug for ServerKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerKeys").field("epoch_s", &self.epoch_s).finish_non_exhaustive()
    }
}

impl ServerKeys {
    /// Keys that change every `epoch_s` seconds.
    pub fn new(secret: [u8; 32], epoch_s: u64) -> Self {
        Self { secret, epoch_s: epoch_s.max(1), recent: [None, None, None] }
    }

    /// What to publish, and for how many seconds a client may use it.
    pub fn current(&mut self, now_s: u64) -> (KeyConfig, u64) {
        let epoch = now_s / self.epoch_s;
        // To the end of the next epoch.
        (self.key(epoch).1, (epoch + 2) * self.epoch_s - now_s)
    }

    fn key(&mut self, epoch: u64) -> (<Suite as Kem>::PrivateKey, KeyConfig) {
        let slot = (epoch % 3) as usize;
        if let Some((_, private, config)) = self.recent[slot].as_ref().filter(|(of, ..)| *of == epoch) {
            return (private.clone(), *config);
        }
        let material = [&self.secret[..], b"tidegate dhttp hpke key", &epoch.to_be_bytes()].concat();
        let (private, public) = Suite::derive_keypair(&material);
        let mut config = KeyConfig { id: epoch as u8, public: [0; KEY_BYTES] };
        config.public.copy_from_slice(&public.to_bytes());
        self.recent[slot] = Some((epoch, private.clone(), config));
        (private, config)
    }

    /// Opens a request.
    ///
    /// # Errors
    /// See [`SealError`].
    pub fn open_request(
        &mut self,
        sealed: &[u8],
        id: RequestId,
        once: Once,
        now_s: u64,
    ) -> Result<(Vec<u8>, ResponseSealer), SealError> {
        let (header, rest) = sealed.split_at_checked(SUITE_BYTES).ok_or(SealError::Malformed)?;
        let (encapsulated, ciphertext) = rest.split_at_checked(KEY_BYTES).ok_or(SealError::Malformed)?;
        if header[1..] != SUITE {
            return Err(SealError::Malformed);
        }
        let current = now_s / self.epoch_s;
        let epochs = [current, current.wrapping_sub(1), current + 1];
        let epoch =
            epochs.into_iter().find(|epoch| *epoch as u8 == header[0]).ok_or(SealError::UnknownKey)?;
        let (private, _) = self.key(epoch);
        let encapsulated =
            <Suite as Kem>::EncappedKey::from_bytes(encapsulated).map_err(|_| SealError::Malformed)?;
        let mut context = hpke::setup_receiver::<ChaCha20Poly1305, HkdfSha256, Suite>(
            &OpModeR::Base,
            &private,
            &encapsulated,
            &info(header),
        )
        .map_err(|_| SealError::Forged)?;
        let http = context.open(ciphertext, &associated(id, once)).map_err(|_| SealError::Forged)?;
        Ok((http, ResponseSealer(Arc::new(context))))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    use super::*;
    use crate::wire::Numbered;

    const ID: RequestId = RequestId(*b"idididid");
    const DAY_S: u64 = 86_400;

    fn sealed(keys: &mut ServerKeys, now_s: u64) -> (Vec<u8>, ResponseOpener) {
        let config = keys.current(now_s).0;
        seal_request(config, ID, Once::No, b"GET /", &mut StdRng::from_seed([1; 32])).unwrap()
    }

    #[test]
    fn a_request_and_its_response_are_sealed_and_opened() {
        let mut keys = ServerKeys::new([1; 32], DAY_S);
        let (request, opener) = sealed(&mut keys, 1_000_000);
        assert_eq!(request.len(), 5 + REQUEST_OVERHEAD_BYTES);
        let (http, sealer) = keys.open_request(&request, ID, Once::No, 1_000_000).unwrap();
        assert_eq!(http, b"GET /");
        let response = sealer.seal(b"HTTP/1.1 200 OK");
        assert_eq!(response.len(), 15 + RESPONSE_OVERHEAD_BYTES);
        assert_eq!(opener.open(&response).unwrap(), b"HTTP/1.1 200 OK");
        assert_eq!(sealer.seal(b"HTTP/1.1 200 OK"), response, "pieces of it can be asked for again");
        assert_ne!(sealer.seal(b"HTTP/1.1 200 OQ")[..17], response[..17], "another nonce");
        assert_eq!(opener.open(b"HTTP/1.1 200 OK"), Err(SealError::Malformed));
    }

    #[test]
    fn keys_overlap_by_an_epoch_and_are_refused_later() {
        let mut keys = ServerKeys::new([1; 32], DAY_S);
        let now_s = 100 * DAY_S + 10;
        let (_, good_s) = keys.current(now_s);
        assert_eq!(good_s, 2 * DAY_S - 10);
        let (request, _) = sealed(&mut keys, now_s);
        for (later_s, opens) in [(0, true), (DAY_S, true), (good_s - 1, true), (good_s, false)] {
            let opened =
                ServerKeys::new([1; 32], DAY_S).open_request(&request, ID, Once::No, now_s + later_s);
            assert_eq!(opened.is_ok(), opens, "after {later_s} s");
        }
        let other = ServerKeys::new([2; 32], DAY_S).open_request(&request, ID, Once::No, now_s);
        assert_eq!(other.err(), Some(SealError::Forged));
    }

    #[test]
    fn a_sealed_request_cannot_be_given_another_id_or_number() {
        let mut keys = ServerKeys::new([1; 32], DAY_S);
        let once = |number| Once::Numbered(Numbered { ticket: [5; 16], number });
        let config = keys.current(0).0;
        let random = &mut StdRng::from_seed([1; 32]);
        let (request, _) = seal_request(config, ID, once(1), b"POST /", random).unwrap();
        assert!(keys.open_request(&request, ID, once(1), 0).is_ok());
        assert_eq!(keys.open_request(&request, ID, once(2), 0).err(), Some(SealError::Forged));
        let other = RequestId(*b"otherone");
        assert_eq!(keys.open_request(&request, other, once(1), 0).err(), Some(SealError::Forged));
    }

    #[test]
    fn a_key_configuration_is_that_of_oblivious_http() {
        let (config, _) = ServerKeys::new([1; 32], DAY_S).current(0);
        let list = config.to_list();
        assert_eq!(list.len(), 43);
        assert_eq!(KeyConfig::from_list(&list), Some(config));
        let unknown = [&[0, 3, 9, 9, 9][..], &list].concat();
        assert_eq!(KeyConfig::from_list(&unknown), Some(config), "others are passed over");
    }

    proptest! {
        #[test]
        fn a_request_with_any_bit_changed_is_refused(bit in 0..(5 + REQUEST_OVERHEAD_BYTES) * 8) {
            let mut keys = ServerKeys::new([1; 32], DAY_S);
            let (mut request, _) = sealed(&mut keys, 1_000_000);
            request[bit / 8] ^= 1 << (bit % 8);
            // X25519 ignores the last bit of a key (RFC 7748 §5), but the key schedule does not.
            prop_assert!(keys.open_request(&request, ID, Once::No, 1_000_000).is_err());
        }

        #[test]
        fn any_bytes_are_refused(bytes: Vec<u8>) {
            let mut keys = ServerKeys::new([1; 32], DAY_S);
            let (_, opener) = sealed(&mut keys, 0);
            prop_assert!(keys.open_request(&bytes, ID, Once::No, 0).is_err());
            prop_assert!(opener.open(&bytes).is_err());
            let _ = KeyConfig::from_list(&bytes);
        }
    }
}
