//! What a server may remember to save work (Trickles §5.1): nothing of it is needed, and all of it may be dropped at
//! any time.
//!
//! Two tables of fixed size, in which a newer entry takes the place of an older one with the same hash: the expanded
//! secrets of connections, and user continuations that were found authentic.

use crate::keys::KeyRing;
use crate::mac::Block;
use crate::nonce::Secret;
use crate::user::{MAX_OPAQUE_BYTES, OVERHEAD_BYTES, UserContinuation, UserError};
use subtle::ConstantTimeEq;

/// The cache; without entries it is off.
#[derive(Debug, Default)]
pub(super) struct SoftState {
    connections: Vec<Option<Connection>>,
    users: Vec<User>,
    /// Lookups that were answered, and that were not.
    pub(super) hits: u64,
    pub(super) misses: u64,
}

#[derive(Clone, Debug)]
struct Connection {
    epoch: u8,
    sealed: Block,
    plain: Block,
    secret: Secret,
}

/// Bytes of an authentic user continuation, or none.
type User = Vec<u8>;

/// Where an entry goes. Both keys are outputs of a cipher: whoever chooses one that collides evicts an entry, no more.
fn slot(key: &[u8], entries: usize) -> usize {
    let mut word = [0; 8];
    word.copy_from_slice(&key[..8]);
    (u64::from_be_bytes(word) % entries as u64) as usize
}

impl SoftState {
    pub(super) fn new(entries: usize) -> Self {
        Self { connections: vec![None; entries], users: vec![User::new(); entries], ..Self::default() }
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        self.connections.fill(None);
        self.users.fill(User::new());
    }

    /// The secret of a connection and its expanded form.
    pub(super) fn secret(
        &mut self,
        epoch: u8,
        sealed: Block,
        unseal: impl FnOnce() -> Block,
    ) -> (Block, Secret) {
        if self.connections.is_empty() {
            let plain = unseal();
            return (plain, Secret::new(&plain));
        }
        let at = slot(&sealed, self.connections.len());
        if let Some(known) = &self.connections[at]
            && (known.epoch, known.sealed) == (epoch, sealed)
        {
            self.hits += 1;
            return (known.plain, known.secret.clone());
        }
        self.misses += 1;
        let plain = unseal();
        let secret = Secret::new(&plain);
        self.connections[at] = Some(Connection { epoch, sealed, plain, secret: secret.clone() });
        (plain, secret)
    }

    /// [`UserContinuation::open`]; what was authentic once is so for as long as its epoch is accepted.
    pub(super) fn open<'a>(
        &mut self,
        bytes: &'a [u8],
        keys: &KeyRing,
    ) -> Result<(UserContinuation<'a>, bool), UserError> {
        if self.users.is_empty()
            || !(OVERHEAD_BYTES..=OVERHEAD_BYTES + MAX_OPAQUE_BYTES).contains(&bytes.len())
        {
            return UserContinuation::open(bytes, keys);
        }
        let at = slot(&bytes[OVERHEAD_BYTES - 16..], self.users.len());
        // How far a forgery agrees must not show in the time.
        if bool::from(self.users[at].as_slice().ct_eq(bytes)) {
            self.hits += 1;
            return Ok((UserContinuation::decode(bytes)?, bytes[1] == keys.current().epoch));
        }
        self.misses += 1;
        let opened = UserContinuation::open(bytes, keys)?;
        self.users[at].clear();
        self.users[at].extend_from_slice(bytes);
        Ok(opened)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::user::Kind;

    fn signed(keys: &KeyRing, request: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        UserContinuation { kind: Kind::Output, request, start: 0, end: 9, opaque: b"o" }
            .sign(keys, &mut bytes);
        bytes
    }

    #[test]
    fn an_authentic_continuation_is_remembered_and_no_forgery_is() {
        let keys = KeyRing::new(1, &[1; 16]);
        let mut soft = SoftState::new(64);
        let bytes = signed(&keys, 1);
        for _ in 0..2 {
            assert_eq!(soft.open(&bytes, &keys), UserContinuation::open(&bytes, &keys));
        }
        assert_eq!((soft.hits, soft.misses), (1, 1));
        for bit in 0..bytes.len() * 8 {
            let mut forged = bytes.clone();
            forged[bit / 8] ^= 1 << (bit % 8);
            for _ in 0..2 {
                assert!(soft.open(&forged, &keys).is_err(), "bit {bit}");
            }
        }
        assert!(soft.open(&bytes[..20], &keys).is_err());
    }

    #[test]
    fn the_tables_are_bounded_and_an_evicted_entry_is_made_again() {
        let keys = KeyRing::new(1, &[1; 16]);
        let mut soft = SoftState::new(2);
        for request in (0..100).chain(0..100) {
            let bytes = signed(&keys, request);
            assert_eq!(soft.open(&bytes, &keys), UserContinuation::open(&bytes, &keys));
            let sealed = [request as u8; 16];
            let (plain, _) = soft.secret(1, sealed, || [request as u8 + 1; 16]);
            assert_eq!(plain, [request as u8 + 1; 16]);
        }
        assert_eq!((soft.connections.len(), soft.users.len()), (2, 2));
        soft.clear();
        assert!(soft.connections.iter().all(Option::is_none) && soft.users.iter().all(Vec::is_empty));
    }

    #[test]
    fn a_secret_of_another_epoch_is_not_taken_for_it() {
        let mut soft = SoftState::new(1);
        assert_eq!(soft.secret(1, [7; 16], || [1; 16]).0, [1; 16]);
        assert_eq!(soft.secret(1, [7; 16], || unreachable!()).0, [1; 16]);
        assert_eq!(soft.secret(2, [7; 16], || [2; 16]).0, [2; 16]);
    }
}
