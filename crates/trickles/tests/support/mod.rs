//! What the tests of the core share: objects whose bytes follow from their names, and a seeded random source.
#![allow(dead_code, unreachable_pub, reason = "each test uses a part")]

pub mod way;

use std::collections::BTreeMap;
use tidegate_trickles::files::{Object, Objects};
use tidegate_trickles::http::{Asked, Lost, Missing, Resource, Site};

/// Bytes of an object follow from its path, so that every replica has them.
#[derive(Clone)]
pub struct Generated(pub BTreeMap<Vec<u8>, u64>);

pub fn byte_at(path: &[u8], offset: u64) -> u8 {
    let word = (offset / 8 + path.len() as u64 * 1_000_003).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (word >> (offset % 8 * 8)) as u8 ^ path[path.len() - 1]
}

impl Objects for Generated {
    fn find(&mut self, path: &[u8]) -> Option<Object> {
        Some(Object { length: *self.0.get(path)?, version: 7 })
    }

    fn read(&mut self, path: &[u8], version: u64, offset: u64, buffer: &mut [u8]) -> Option<usize> {
        let length = *self.0.get(path).filter(|_| version == 7)?;
        let count = buffer.len().min(length.saturating_sub(offset) as usize);
        for (n, byte) in buffer[..count].iter_mut().enumerate() {
            *byte = byte_at(path, offset + n as u64);
        }
        Some(count)
    }
}

impl Site for Generated {
    fn find(&mut self, asked: &Asked<'_>) -> Result<Resource, Missing> {
        let object = Objects::find(self, asked.target).ok_or(Missing::NotFound)?;
        Ok(Resource {
            status: 200,
            length: object.length,
            version: object.version,
            modified_s: Some(1_600_000_000),
            etag: b"\"seven\"".to_vec(),
            fields: b"Content-Type: text/plain\r\n".to_vec(),
        })
    }

    fn known(&mut self, _: &[u8], target: &[u8], version: u64) -> Result<Resource, Lost> {
        let (peer, host, head, body) = (([192, 0, 2, 1], 1).into(), &b""[..], &b""[..], &b""[..]);
        let asked = Asked { peer, proved: false, request: 1, host, target, head, body };
        Site::find(self, &asked).ok().filter(|found| found.version == version).ok_or(Lost::Gone)
    }

    fn read(
        &mut self,
        _: &[u8],
        target: &[u8],
        version: u64,
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<usize, Lost> {
        Objects::read(self, target, version, offset, buffer).ok_or(Lost::Gone)
    }
}

pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    pub fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1000) < per_mille
    }
}

pub fn objects(lengths: &[u64]) -> Generated {
    Generated(
        lengths
            .iter()
            .enumerate()
            .map(|(n, &length)| (format!("/object/{n}").into_bytes(), length))
            .collect(),
    )
}
