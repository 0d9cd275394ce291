//! Which URLs somebody has asked for lately: a Bloom filter of two generations, of fixed size.

/// A line of the processor's cache with all that is known of a URL: one look, one access to memory.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Block([Generation; 2]);

type Generation = [u64; 4];

/// At 100,000 URLs in each generation fewer than one in twenty new ones are taken for known.
const BLOCKS: usize = 1 << 12;
/// After so many new URLs, or so much time, the older generation is forgotten.
const GENERATION_URLS: u32 = 100_000;
const GENERATION_MS: u64 = 300_000;

/// Remembers the URLs of the last minutes.
#[derive(Debug)]
pub(crate) struct Novelty {
    blocks: Box<[Block]>,
    /// Which half of each block is the younger generation.
    young: usize,
    /// New URLs in that, and when it began.
    urls: u32,
    since_ms: u64,
}

impl Novelty {
    /// The memory of one.
    pub(crate) const BYTES: usize = BLOCKS * size_of::<Block>();

    pub(crate) fn new() -> Self {
        let blocks = vec![Block([[0; 4]; 2]); BLOCKS].into_boxed_slice();
        Self { blocks, young: 0, urls: 0, since_ms: 0 }
    }

    /// Whether nobody has asked for what has this hash lately; from now on somebody has.
    pub(crate) fn is_new(&mut self, hash: u64, now_ms: u64) -> bool {
        if self.urls >= GENERATION_URLS || now_ms.saturating_sub(self.since_ms) >= GENERATION_MS {
            self.young ^= 1;
            self.blocks.iter_mut().for_each(|block| block.0[self.young] = [0; 4]);
            (self.urls, self.since_ms) = (0, now_ms);
        }
        let block = &mut self.blocks[hash as usize % BLOCKS];
        let mut bits: Generation = [0; 4];
        for byte in hash.to_le_bytes()[2..5].iter().copied() {
            bits[usize::from(byte / 64)] |= 1 << (byte % 64);
        }
        let holds = |known: &Generation| known.iter().zip(&bits).all(|(known, bits)| known & bits == *bits);
        let is_new = !block.0.iter().any(holds);
        if !holds(&block.0[self.young]) {
            self.urls += 1;
            block.0[self.young].iter_mut().zip(&bits).for_each(|(known, bits)| *known |= bits);
        }
        is_new
    }
}

#[cfg(test)]
mod tests {
    use tidegate_core::hooks::hash;

    use super::*;

    #[test]
    fn url_is_new_once_and_again_after_two_generations() {
        let mut novelty = Novelty::new();
        assert!(novelty.is_new(hash(1, b"/a"), 0));
        assert!(!novelty.is_new(hash(1, b"/a"), GENERATION_MS), "remembered over one change of generations");
        assert!(
            !novelty.is_new(hash(1, b"/a"), 2 * GENERATION_MS),
            "and longer, since it was asked for again"
        );
        assert!(novelty.is_new(hash(1, b"/b"), 2 * GENERATION_MS));
        assert!(!novelty.is_new(hash(1, b"/b"), 3 * GENERATION_MS - 1));
        assert!(novelty.is_new(hash(1, b"/c"), 3 * GENERATION_MS));
        assert!(!novelty.is_new(hash(1, b"/b"), 3 * GENERATION_MS));
        for generation in 4..7 {
            novelty.is_new(hash(1, b"/x"), generation * GENERATION_MS);
        }
        assert!(novelty.is_new(hash(1, b"/b"), 7 * GENERATION_MS));
    }

    #[test]
    fn nearly_every_one_of_very_many_is_seen_to_be_new() {
        let mut novelty = Novelty::new();
        let new = (0..300_000u32).filter(|i| novelty.is_new(hash(9, &i.to_le_bytes()), 0)).count();
        assert!(new > 285_000, "{new}");
    }
}
