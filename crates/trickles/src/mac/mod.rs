//! AES-128 and CMAC (RFC 4493): AES instructions where the processor has them, otherwise the crates `aes` and `cmac`.
//!
//! Every packet that a server handles costs it at least two MACs (Trickles §6.1 finds half of the processing time
//! there), which is why the instructions are used directly: the generic crates cost about ten times as much.

#[cfg(target_arch = "x86_64")]
mod aesni;

use aes::cipher::{BlockCipherDecrypt, BlockCipherEncrypt};
use cmac::{KeyInit, Mac};
use subtle::ConstantTimeEq;

/// Bytes of an AES block, an AES-128 key and a tag.
pub const BLOCK_BYTES: usize = 16;
/// One block, key or tag.
pub type Block = [u8; BLOCK_BYTES];

/// AES-128 with an expanded key, one block at a time.
#[derive(Clone)]
pub struct Aes128(Cipher);

#[derive(Clone)]
enum Cipher {
    #[cfg(target_arch = "x86_64")]
    Instructions(aesni::Schedule),
    Portable(Box<aes::Aes128>),
}

impl Aes128 {
    /// Expands `key` for the fastest implementation that this processor runs.
    #[must_use]
    pub fn new(key: &Block) -> Self {
        #[cfg(target_arch = "x86_64")]
        if let Some(schedule) = aesni::Schedule::new(key) {
            return Self(Cipher::Instructions(schedule));
        }
        Self::portable(key)
    }

    /// The implementation without AES instructions of our own, whatever the processor has.
    #[must_use]
    pub fn portable(key: &Block) -> Self {
        Self(Cipher::Portable(Box::new(aes::Aes128::new(&(*key).into()))))
    }

    /// Encrypts one block.
    #[inline]
    #[must_use]
    pub fn encrypt(&self, block: Block) -> Block {
        match &self.0 {
            #[cfg(target_arch = "x86_64")]
            Cipher::Instructions(schedule) => schedule.encrypt(block),
            Cipher::Portable(cipher) => {
                let mut block = block.into();
                cipher.encrypt_block(&mut block);
                block.into()
            }
        }
    }
}

/// Decrypts one block under `key`. Only key rotation needs it, so there is no fast version.
#[must_use]
pub fn decrypt(key: &Block, block: Block) -> Block {
    let mut block = block.into();
    aes::Aes128::new(&(*key).into()).decrypt_block(&mut block);
    block.into()
}

/// CMAC-AES-128 (RFC 4493) with an expanded key.
#[derive(Clone)]
pub struct Cmac(Authenticator);

#[derive(Clone)]
enum Authenticator {
    #[cfg(target_arch = "x86_64")]
    Instructions {
        schedule: aesni::Schedule,
        complete: Block,
        padded: Block,
    },
    Portable(Box<cmac::Cmac<aes::Aes128>>),
}

impl Cmac {
    /// Expands `key` for the fastest implementation that this processor runs.
    #[must_use]
    pub fn new(key: &Block) -> Self {
        #[cfg(target_arch = "x86_64")]
        if let Some(schedule) = aesni::Schedule::new(key) {
            let complete = double(schedule.encrypt([0; BLOCK_BYTES]));
            let padded = double(complete);
            return Self(Authenticator::Instructions { schedule, complete, padded });
        }
        Self::portable(key)
    }

    /// The implementation without AES instructions of our own, whatever the processor has.
    #[must_use]
    pub fn portable(key: &Block) -> Self {
        Self(Authenticator::Portable(Box::new(cmac::Cmac::new(&(*key).into()))))
    }

    /// The tag of `message`.
    #[inline]
    #[must_use]
    pub fn tag(&self, message: &[u8]) -> Block {
        match &self.0 {
            #[cfg(target_arch = "x86_64")]
            Authenticator::Instructions { schedule, complete, padded } => {
                schedule.cmac(complete, padded, message)
            }
            Authenticator::Portable(mac) => {
                mac.as_ref().clone().chain_update(message).finalize().into_bytes().into()
            }
        }
    }

    /// Whether `tag` is the tag of `message`; takes the same time wherever they differ.
    #[inline]
    #[must_use]
    pub fn verify(&self, message: &[u8], tag: &Block) -> bool {
        self.tag(message).ct_eq(tag).into()
    }
}

/// Doubling in GF(2^128), RFC 4493 §2.3, without a branch on the secret.
#[cfg(target_arch = "x86_64")]
fn double(block: Block) -> Block {
    let value = u128::from_be_bytes(block);
    ((value << 1) ^ (0x87 * (value >> 127))).to_be_bytes()
}

impl std::fmt::Debug for Aes128 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Aes128(secret)")
    }
}

impl std::fmt::Debug for Cmac {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Cmac(secret)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KEY: Block = hex("2b7e151628aed2a6abf7158809cf4f3c");
    const MESSAGE: [u8; 64] = hex(concat!(
        "6bc1bee22e409f96e93d7e117393172a",
        "ae2d8a571e03ac9c9eb76fac45af8e51",
        "30c81c46a35ce411e5fbc1191a0a52ef",
        "f69f2445df4f9b17ad2b417be66c3710"
    ));

    const fn hex<const N: usize>(text: &str) -> [u8; N] {
        const fn digit(c: u8) -> u8 {
            if c >= b'a' { c - b'a' + 10 } else { c - b'0' }
        }
        let text = text.as_bytes();
        assert!(text.len() == 2 * N);
        let mut bytes = [0; N];
        let mut i = 0;
        while i < N {
            bytes[i] = digit(text[2 * i]) << 4 | digit(text[2 * i + 1]);
            i += 1;
        }
        bytes
    }

    #[test]
    fn rfc_4493_vectors_hold_for_every_implementation() {
        let vectors: [(usize, Block); 4] = [
            (0, hex("bb1d6929e95937287fa37d129b756746")),
            (16, hex("070a16b46b4d4144f79bdd9dd04a287c")),
            (40, hex("dfa66747de9ae63030ca32611497c827")),
            (64, hex("51f0bebf7e3b9d92fc49741779363cfe")),
        ];
        for mac in [Cmac::new(&KEY), Cmac::portable(&KEY)] {
            for (length, tag) in vectors {
                assert_eq!(mac.tag(&MESSAGE[..length]), tag, "{length} bytes");
                assert!(mac.verify(&MESSAGE[..length], &tag));
            }
        }
    }

    #[test]
    fn rfc_4493_block_encryption_holds_for_every_implementation() {
        for cipher in [Aes128::new(&KEY), Aes128::portable(&KEY)] {
            assert_eq!(cipher.encrypt([0; 16]), hex("7df76b0c1ab899b33e42f047b91b546f"));
        }
        assert_eq!(decrypt(&KEY, hex("7df76b0c1ab899b33e42f047b91b546f")), [0; 16]);
    }

    #[test]
    fn a_tag_with_any_bit_flipped_is_refused() {
        let mac = Cmac::new(&KEY);
        let tag = mac.tag(&MESSAGE);
        for bit in 0..128 {
            let mut forged = tag;
            forged[bit / 8] ^= 1 << (bit % 8);
            assert!(!mac.verify(&MESSAGE, &forged), "bit {bit}");
        }
    }

    proptest! {
        #[test]
        fn instructions_and_crates_agree(
            key: Block,
            block: Block,
            message in prop::collection::vec(any::<u8>(), 0..300),
        ) {
            prop_assert_eq!(Cmac::new(&key).tag(&message), Cmac::portable(&key).tag(&message));
            prop_assert_eq!(Aes128::new(&key).encrypt(block), Aes128::portable(&key).encrypt(block));
            prop_assert_eq!(decrypt(&key, Aes128::new(&key).encrypt(block)), block);
        }
    }
}
