//! Server keys in epochs: a new epoch signs at once, old ones are accepted for as long as they are in the ring.
//!
//! Replicas that hold the same ring continue each other's connections (Trickles §1, §6.2). A rotation is: add the new
//! epoch everywhere ([`KeyRing::accept`]), then make it current everywhere ([`KeyRing::rotate`]); no packet is lost.

use crate::mac::{self, Aes128, Block, Cmac};
use crate::sealed::Identity;

/// Epochs that are accepted at once, the current one included.
pub const MAX_EPOCHS: usize = 4;

/// The keys of one epoch, derived from one secret of 16 bytes.
#[derive(Clone, Debug)]
pub struct EpochKeys {
    /// The epoch's number; travels in the clear.
    pub epoch: u8,
    /// Authenticates transport continuations.
    pub transport: Cmac,
    /// Authenticates user continuations (Trickles §2.2: a key of their own).
    pub user: Cmac,
    /// Turns a continuation's sealed value into the connection's nonce secret.
    pub seal: Aes128,
    /// Makes the sealed value of a new connection.
    pub open: Cmac,
    /// Makes the keys of encrypted sessions.
    pub ticket: Cmac,
    /// The key pair for encryption where the ring names none.
    identity: Identity,
    seal_key: Block,
}

impl EpochKeys {
    /// Derives the keys: key n is CMAC(secret, "tidegate trickles" ‖ n).
    #[must_use]
    pub fn derive(epoch: u8, secret: &Block) -> Self {
        let root = Cmac::new(secret);
        let key = |purpose: u8| {
            let mut label = *b"tidegate trickles\0";
            label[17] = purpose;
            root.tag(&label)
        };
        let seal_key = key(3);
        let mut identity = [0; 32];
        identity[..16].copy_from_slice(&key(6));
        identity[16..].copy_from_slice(&key(7));
        Self {
            epoch,
            transport: Cmac::new(&key(1)),
            user: Cmac::new(&key(2)),
            seal: Aes128::new(&seal_key),
            open: Cmac::new(&key(4)),
            ticket: Cmac::new(&key(5)),
            identity: Identity::new(identity),
            seal_key,
        }
    }

    /// The sealed value under which [`EpochKeys::seal`] gives `secret`: used when a connection moves to a new epoch.
    #[must_use]
    pub fn reseal(&self, secret: Block) -> Block {
        mac::decrypt(&self.seal_key, secret)
    }
}

/// Why the text of a key file is no key ring.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum KeyFileError {
    /// A line is not a key.
    #[error(
        "line {line}: expected an epoch from 0 to 255, a space and 32 hexadecimal digits, or `identity` and 64 of them"
    )]
    Malformed {
        /// Its number, from 1.
        line: usize,
    },
    /// An epoch is there twice.
    #[error("line {line}: epoch {epoch} is listed twice")]
    Repeated {
        /// The second line's number, from 1.
        line: usize,
        /// The epoch.
        epoch: u8,
    },
    /// A second identity.
    #[error("line {line}: a second identity")]
    SecondIdentity {
        /// Its line, from 1.
        line: usize,
    },
    /// More epochs than are accepted at once.
    #[error("more than {MAX_EPOCHS} keys")]
    TooMany,
    /// No line has a key.
    #[error("no key")]
    Empty,
}

/// Up to [`MAX_EPOCHS`] epochs, the current one first.
#[derive(Clone, Debug)]
pub struct KeyRing {
    epochs: Vec<EpochKeys>,
    /// The key pair that clients pin: it outlives the epochs.
    identity: Option<Identity>,
}

impl KeyRing {
    /// A ring of one epoch.
    #[must_use]
    pub fn new(epoch: u8, secret: &Block) -> Self {
        Self { epochs: vec![EpochKeys::derive(epoch, secret)], identity: None }
    }

    /// Reads a key file: a line for each epoch, its number and 32 hexadecimal digits. The first key signs, the others
    /// are accepted. A line of `identity` and 64 digits is the secret key for encryption; without it each epoch has one
    /// of its own, which rotates away with it. Empty lines and lines that begin with `#` are skipped.
    ///
    /// # Errors
    /// The first line that is wrong; never a digit of a key.
    pub fn from_text(text: &str) -> Result<Self, KeyFileError> {
        let mut epochs: Vec<EpochKeys> = Vec::new();
        let mut identity = None;
        for (index, content) in text.lines().enumerate() {
            let (content, line) = (content.trim(), index + 1);
            if content.is_empty() || content.starts_with('#') {
                continue;
            }
            let malformed = KeyFileError::Malformed { line };
            let (epoch, digits) = content.split_once(char::is_whitespace).ok_or(malformed)?;
            if epoch == "identity" {
                if identity.is_some() {
                    return Err(KeyFileError::SecondIdentity { line });
                }
                let secret = crate::sealed::public_from_hex(digits.trim()).ok_or(malformed)?;
                identity = Some(Identity::new(secret));
                continue;
            }
            let epoch = epoch.parse().map_err(|_| malformed)?;
            let digits = digits.trim();
            if digits.len() != 32 || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                return Err(malformed);
            }
            if epochs.iter().any(|keys| keys.epoch == epoch) {
                return Err(KeyFileError::Repeated { line, epoch });
            }
            let secret = u128::from_str_radix(digits, 16).map_err(|_| malformed)?;
            epochs.push(EpochKeys::derive(epoch, &secret.to_be_bytes()));
        }
        match epochs.len() {
            0 => Err(KeyFileError::Empty),
            1..=MAX_EPOCHS => Ok(Self { epochs, identity }),
            _ => Err(KeyFileError::TooMany),
        }
    }

    /// The epoch that signs.
    #[must_use]
    pub fn current(&self) -> &EpochKeys {
        &self.epochs[0]
    }

    /// The key pair for encryption.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        self.identity.as_ref().unwrap_or(&self.current().identity)
    }

    /// The key pair that a client names, of any accepted epoch.
    pub(crate) fn identity_by_hint(&self, hint: &[u8]) -> Option<&Identity> {
        let of_epochs = self.epochs.iter().map(|keys| &keys.identity);
        self.identity.iter().chain(of_epochs).find(|identity| identity.hint() == *hint)
    }

    /// The keys of `epoch` if it is accepted.
    #[inline]
    #[must_use]
    pub fn get(&self, epoch: u8) -> Option<&EpochKeys> {
        self.epochs.iter().find(|keys| keys.epoch == epoch)
    }

    /// Accepts `epoch` beside the others without signing with it: another replica may rotate first.
    pub fn accept(&mut self, epoch: u8, secret: &Block) {
        if self.current().epoch != epoch {
            self.epochs.retain(|keys| keys.epoch != epoch);
            self.epochs.insert(1, EpochKeys::derive(epoch, secret));
            self.epochs.truncate(MAX_EPOCHS);
        }
    }

    /// Signs with `epoch` from now on. The previous ones stay accepted until the ring is full or they are retired.
    pub fn rotate(&mut self, epoch: u8, secret: &Block) {
        self.epochs.retain(|keys| keys.epoch != epoch);
        self.epochs.insert(0, EpochKeys::derive(epoch, secret));
        self.epochs.truncate(MAX_EPOCHS);
    }

    /// Refuses `epoch` from now on; the current epoch cannot be retired. Returns whether it was there.
    pub fn retire(&mut self, epoch: u8) -> bool {
        let before = self.epochs.len();
        let current = self.current().epoch;
        self.epochs.retain(|keys| keys.epoch == current || keys.epoch != epoch);
        self.epochs.len() != before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_rotation_the_old_epoch_is_accepted_until_it_is_retired() {
        let mut ring = KeyRing::new(1, &[1; 16]);
        let tag = ring.current().transport.tag(b"x");
        ring.rotate(2, &[2; 16]);
        assert_eq!(ring.current().epoch, 2);
        assert!(!ring.current().transport.verify(b"x", &tag));
        assert!(ring.get(1).is_some_and(|keys| keys.transport.verify(b"x", &tag)));
        assert!(ring.retire(1));
        assert!(ring.get(1).is_none());
        assert!(!ring.retire(2), "the current epoch stays");
    }

    #[test]
    fn an_epoch_announced_ahead_is_accepted_but_does_not_sign() {
        let mut ring = KeyRing::new(1, &[1; 16]);
        ring.accept(2, &[2; 16]);
        assert_eq!(ring.current().epoch, 1);
        assert!(ring.get(2).is_some());
        ring.accept(1, &[9; 16]);
        assert_eq!(
            ring.current().transport.tag(b"x"),
            KeyRing::new(1, &[1; 16]).current().transport.tag(b"x")
        );
    }

    #[test]
    fn a_full_ring_forgets_its_oldest_epoch() {
        let mut ring = KeyRing::new(0, &[0; 16]);
        for epoch in 1..=MAX_EPOCHS as u8 {
            ring.rotate(epoch, &[epoch; 16]);
        }
        assert!(ring.get(0).is_none());
        assert!(ring.get(1).is_some());
    }

    #[test]
    fn a_secret_resealed_for_another_epoch_is_the_same_secret() {
        let (old, new) = (EpochKeys::derive(1, &[1; 16]), EpochKeys::derive(2, &[2; 16]));
        let secret = old.seal.encrypt([7; 16]);
        assert_eq!(new.seal.encrypt(new.reseal(secret)), secret);
    }

    #[test]
    fn a_key_file_is_a_ring_whose_first_key_signs() {
        let text = "# comment\n\n2 02020202020202020202020202020202\n 1  01010101010101010101010101010101 \n";
        let ring = KeyRing::from_text(text).unwrap();
        assert_eq!(ring.current().epoch, 2);
        let same = KeyRing::new(2, &[2; 16]);
        assert_eq!(ring.current().transport.tag(b"x"), same.current().transport.tag(b"x"));
        assert!(ring.get(1).is_some());
        let key = "00".repeat(16);
        for (text, error) in [
            (String::new(), KeyFileError::Empty),
            ("1 00".into(), KeyFileError::Malformed { line: 1 }),
            (format!("#\n256 {key}"), KeyFileError::Malformed { line: 2 }),
            (format!("1 +{}", &key[1..]), KeyFileError::Malformed { line: 1 }),
            (format!("1 {key}\n1 {key}"), KeyFileError::Repeated { line: 2, epoch: 1 }),
            ((0..5).map(|n| format!("{n} {key}\n")).collect(), KeyFileError::TooMany),
        ] {
            assert_eq!(KeyRing::from_text(&text).map(|_| ()), Err(error), "{text}");
        }
    }

    #[test]
    fn keys_of_different_purposes_differ() {
        let keys = EpochKeys::derive(1, &[1; 16]);
        assert_ne!(keys.transport.tag(b""), keys.user.tag(b""));
        assert_ne!(keys.open.tag(b""), keys.user.tag(b""));
    }
}
