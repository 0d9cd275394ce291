//! Which URLs somebody has asked for lately: a Bloom filter of two generations, of fixed size.

/// Bits of a generation. At 100,000 URLs about one in ten new ones is taken for known.
const BITS: usize = 1 << 20;
/// After so many new URLs, or so much time, the older generation is forgotten.
const GENERATION_URLS: u32 = 100_000;
const GENERATION_MS: u64 = 300_000;

/// Remembers the URLs of the last minutes.
#[derive(Debug)]
pub(crate) struct Novelty {
    generations: [Box<[u64]>; 2],
    /// New URLs in the first generation, and when that began.
    urls: u32,
    since_ms: u64,
}

impl Novelty {
    /// The memory of one.
    pub(crate) const BYTES: usize = 2 * BITS / 8;

    pub(crate) fn new() -> Self {
        let empty = || vec![0; BITS / 64].into_boxed_slice();
        Self { generations: [empty(), empty()], urls: 0, since_ms: 0 }
    }

    /// Whether nobody has asked for what has this hash lately; from now on somebody has.
    pub(crate) fn is_new(&mut self, hash: u64, now_ms: u64) -> bool {
        if self.urls >= GENERATION_URLS || now_ms.saturating_sub(self.since_ms) >= GENERATION_MS {
            self.generations.swap(0, 1);
            self.generations[0].fill(0);
            (self.urls, self.since_ms) = (0, now_ms);
        }
        let places = [hash, hash >> 21, hash >> 42].map(|bits| bits as usize % BITS);
        let holds =
            |generation: &[u64]| places.iter().all(|place| generation[place / 64] >> (place % 64) & 1 == 1);
        let is_new = !self.generations.iter().any(|generation| holds(generation));
        if !holds(&self.generations[0]) {
            self.urls += 1;
            places.iter().for_each(|place| self.generations[0][place / 64] |= 1 << (place % 64));
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
        assert!(new > 270_000, "{new}");
    }
}
