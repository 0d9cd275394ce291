//! Deterministic bodies and numbers for the tests.
#![allow(dead_code, reason = "each test binary uses its own part")]

use tidegate_store::{InsertError, Object, Store};

/// SplitMix64: a small generator whose whole state is the seed that a failure prints.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// The body that belongs to `key` in its `version`: any wrong byte shows.
pub fn body_of(key: &[u8], version: u64, length: usize) -> Vec<u8> {
    let seed = key.iter().fold(version, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte)));
    let mut random = Random(seed);
    let mut body = Vec::with_capacity(length + 8);
    while body.len() < length {
        body.extend_from_slice(&random.next().to_le_bytes());
    }
    body.truncate(length);
    body
}

/// Stores version `version` of `key`; meta carries version and length.
pub fn put(
    store: &Store,
    key: &[u8],
    version: u64,
    length: usize,
    sized: bool,
) -> Result<Object, InsertError> {
    let meta = [version.to_le_bytes(), (length as u64).to_le_bytes()].concat();
    let mut writer = match sized {
        true => store.insert_sized(key, &meta, b"HTTP/1.1 200 OK\r\n", length as u64)?,
        false => store.insert(key, &meta, b"HTTP/1.1 200 OK\r\n")?,
    };
    for piece in body_of(key, version, length).chunks(7001) {
        writer.write(piece)?;
    }
    Ok(writer.commit())
}

/// Panics unless every byte of `object` is what [`put`] stored; returns its version.
pub fn verify(object: &Object) -> u64 {
    let number = |at: usize| u64::from_le_bytes(object.meta()[at..at + 8].try_into().unwrap());
    let (version, length) = (number(0), number(8) as usize);
    assert_eq!(object.head(), b"HTTP/1.1 200 OK\r\n");
    assert_eq!(object.body_length(), length as u64);
    let body: Vec<u8> = object.body().flatten().copied().collect();
    assert!(body == body_of(object.key(), version, length), "wrong bytes under {:?}", object.key());
    version
}
