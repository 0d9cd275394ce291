//! AES-128 encryption and CMAC with the AES instructions of x86-64.
#![allow(unsafe_code, reason = "functions with target features are called after detection")]

use super::{BLOCK_BYTES, Block};
use std::arch::x86_64::{
    __m128i, _mm_aesenc_si128, _mm_aesenclast_si128, _mm_aeskeygenassist_si128, _mm_cvtsi128_si64,
    _mm_set_epi64x, _mm_setzero_si128, _mm_shuffle_epi32, _mm_slli_si128, _mm_unpackhi_epi64, _mm_xor_si128,
};

/// An expanded key. Only exists where the processor has the instructions.
#[derive(Clone, Copy)]
pub(super) struct Schedule([__m128i; 11]);

impl Schedule {
    /// `None` where the processor lacks the instructions.
    #[inline]
    pub(super) fn new(key: &Block) -> Option<Self> {
        if is_x86_feature_detected!("aes") && is_x86_feature_detected!("sse2") {
            // SAFETY: both features were detected on this processor just now.
            Some(Self(unsafe { expand(key) }))
        } else {
            None
        }
    }

    #[inline]
    pub(super) fn encrypt(&self, block: Block) -> Block {
        // SAFETY: a `Schedule` is only made by `new`, after it has detected the features.
        unsafe { store(encrypt(&self.0, load(&block))) }
    }

    /// RFC 4493 §2.4 with the subkeys K1 (`complete`) and K2 (`padded`).
    #[inline]
    pub(super) fn cmac(&self, complete: &Block, padded: &Block, message: &[u8]) -> Block {
        // SAFETY: a `Schedule` is only made by `new`, after it has detected the features.
        unsafe { cmac(&self.0, complete, padded, message) }
    }
}

#[inline]
#[target_feature(enable = "aes,sse2")]
fn load(block: &Block) -> __m128i {
    let value = u128::from_le_bytes(*block);
    _mm_set_epi64x((value >> 64) as i64, value as i64)
}

#[inline]
#[target_feature(enable = "aes,sse2")]
fn store(value: __m128i) -> Block {
    let low = _mm_cvtsi128_si64(value) as u64;
    let high = _mm_cvtsi128_si64(_mm_unpackhi_epi64(value, value)) as u64;
    (u128::from(high) << 64 | u128::from(low)).to_le_bytes()
}

/// FIPS 197 §5.2.
#[target_feature(enable = "aes,sse2")]
fn expand(key: &Block) -> [__m128i; 11] {
    #[inline]
    #[target_feature(enable = "aes,sse2")]
    fn next<const ROUND_CONSTANT: i32>(key: __m128i) -> __m128i {
        let assist = _mm_shuffle_epi32(_mm_aeskeygenassist_si128(key, ROUND_CONSTANT), 0xff);
        let key = _mm_xor_si128(key, _mm_slli_si128(key, 4));
        let key = _mm_xor_si128(key, _mm_slli_si128(key, 8));
        _mm_xor_si128(key, assist)
    }
    let mut keys = [load(key); 11];
    keys[1] = next::<0x01>(keys[0]);
    keys[2] = next::<0x02>(keys[1]);
    keys[3] = next::<0x04>(keys[2]);
    keys[4] = next::<0x08>(keys[3]);
    keys[5] = next::<0x10>(keys[4]);
    keys[6] = next::<0x20>(keys[5]);
    keys[7] = next::<0x40>(keys[6]);
    keys[8] = next::<0x80>(keys[7]);
    keys[9] = next::<0x1b>(keys[8]);
    keys[10] = next::<0x36>(keys[9]);
    keys
}

#[inline]
#[target_feature(enable = "aes,sse2")]
fn encrypt(keys: &[__m128i; 11], block: __m128i) -> __m128i {
    let mut state = _mm_xor_si128(block, keys[0]);
    for key in &keys[1..10] {
        state = _mm_aesenc_si128(state, *key);
    }
    _mm_aesenclast_si128(state, keys[10])
}

#[target_feature(enable = "aes,sse2")]
fn cmac(keys: &[__m128i; 11], complete: &Block, padded: &Block, message: &[u8]) -> Block {
    // The last block is masked; all before it are not, so a message of whole blocks keeps one back.
    let last_start = message.len().saturating_sub(1) / BLOCK_BYTES * BLOCK_BYTES;
    let (body, last) = message.split_at(last_start);
    let mut state = _mm_setzero_si128();
    let (blocks, _) = body.as_chunks::<BLOCK_BYTES>();
    for block in blocks {
        state = encrypt(keys, _mm_xor_si128(state, load(block)));
    }
    let mut block = [0; BLOCK_BYTES];
    block[..last.len()].copy_from_slice(last);
    let mask = if last.len() == BLOCK_BYTES {
        complete
    } else {
        block[last.len()] = 0x80;
        padded
    };
    state = _mm_xor_si128(state, _mm_xor_si128(load(&block), load(mask)));
    store(encrypt(keys, state))
}
