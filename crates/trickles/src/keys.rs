//! Server keys in epochs: a new epoch signs at once, old ones are accepted for as long as they are in the ring.
//!
//! Replicas that hold the same ring continue each other's connections (Trickles §1, §6.2). A rotation is: add the new
//! epoch everywhere ([`KeyRing::accept`]), then make it current everywhere ([`KeyRing::rotate`]); no packet is lost.

use crate::mac::{self, Aes128, Block, Cmac};

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
    seal_key: Block,
}

impl EpochKeys {
    /// Derives the four keys: key n is CMAC(secret, "tidegate trickles" ‖ n).
    #[must_use]
    pub fn derive(epoch: u8, secret: &Block) -> Self {
        let root = Cmac::new(secret);
        let key = |purpose: u8| {
            let mut label = *b"tidegate trickles\0";
            label[17] = purpose;
            root.tag(&label)
        };
        let seal_key = key(3);
        Self {
            epoch,
            transport: Cmac::new(&key(1)),
            user: Cmac::new(&key(2)),
            seal: Aes128::new(&seal_key),
            open: Cmac::new(&key(4)),
            seal_key,
        }
    }

    /// The sealed value under which [`EpochKeys::seal`] gives `secret`: used when a connection moves to a new epoch.
    #[must_use]
    pub fn reseal(&self, secret: Block) -> Block {
        mac::decrypt(&self.seal_key, secret)
    }
}

/// Up to [`MAX_EPOCHS`] epochs, the current one first.
#[derive(Clone, Debug)]
pub struct KeyRing {
    epochs: Vec<EpochKeys>,
}

impl KeyRing {
    /// A ring of one epoch.
    #[must_use]
    pub fn new(epoch: u8, secret: &Block) -> Self {
        Self { epochs: vec![EpochKeys::derive(epoch, secret)] }
    }

    /// The epoch that signs.
    #[must_use]
    pub fn current(&self) -> &EpochKeys {
        &self.epochs[0]
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
    fn keys_of_different_purposes_differ() {
        let keys = EpochKeys::derive(1, &[1; 16]);
        assert_ne!(keys.transport.tag(b""), keys.user.tag(b""));
        assert_ne!(keys.open.tag(b""), keys.user.tag(b""));
    }
}
