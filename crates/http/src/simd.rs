//! Vector instructions that skip runs of bytes inside one state: the only module of this crate with unsafe code.
//!
//! A parser's loop is written once, generic over [`Scan`], and compiled once per instruction set; [`run`] asks the
//! processor and picks one for a whole call, so that no run pays for a call or a check of its own.
#![allow(unsafe_code)]

use crate::chars::{is_target, is_token, is_value};
use crate::names::{NAME_BLOCK, NamePattern};

/// Searches over runs of bytes; a value of such a type proves that the processor has its instructions.
pub(crate) trait Scan: Copy {
    /// Position at or after `at` of the first byte that may not stand in a field value, or the length of `text`.
    fn value_end(self, text: &[u8], at: usize) -> usize;
    /// Position at or after `at` of the first byte that may not stand in a request target, or the length of `text`.
    fn target_end(self, text: &[u8], at: usize) -> usize;
    /// Position at or after `at` of the first byte that is no token character, or the length of `text`.
    fn token_end(self, text: &[u8], at: usize) -> usize;
    /// Whether `input` starts with this name, in any case, and a colon.
    fn name_matches(self, input: &[u8; NAME_BLOCK], name: &NamePattern) -> bool;
}

/// Work that is compiled for each instruction set; `run` must be `#[inline(always)]`, like all that it calls.
pub(crate) trait Task {
    type Output;
    fn run<S: Scan>(self, scan: S) -> Self::Output;
}

/// Does `task` with the best instructions that this processor has.
#[inline]
pub(crate) fn run<T: Task>(task: T) -> T::Output {
    #[cfg(target_arch = "x86_64")]
    {
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2, as was just detected.
            unsafe { x86::run_avx2(task) }
        } else {
            task.run(x86::Sse2)
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    task.run(Scalar)
}

/// Does the same task with every instruction set in turn.
#[cfg(test)]
pub(crate) fn run_with_each<T: Task>(task: impl Fn() -> T) -> Vec<T::Output> {
    vec![
        task().run(Scalar),
        run(task()),
        #[cfg(target_arch = "x86_64")]
        task().run(x86::Sse2),
    ]
}

/// Without vectors; also the reference that tests hold the others against.
#[derive(Clone, Copy)]
pub(crate) struct Scalar;

impl Scan for Scalar {
    #[inline(always)]
    fn value_end(self, text: &[u8], at: usize) -> usize {
        end_of(text, at, is_value)
    }

    #[inline(always)]
    fn target_end(self, text: &[u8], at: usize) -> usize {
        end_of(text, at, is_target)
    }

    #[inline(always)]
    fn token_end(self, text: &[u8], at: usize) -> usize {
        end_of(text, at, is_token)
    }

    #[inline(always)]
    fn name_matches(self, input: &[u8; NAME_BLOCK], name: &NamePattern) -> bool {
        name.matches(input)
    }
}

#[inline(always)]
fn end_of(text: &[u8], mut at: usize, belongs: impl Fn(u8) -> bool) -> usize {
    while at < text.len() && belongs(text[at]) {
        at += 1;
    }
    at
}

/// The search shared by all vector widths. `$stops` gives, for a block of `$width` bytes, a bit for each byte that ends
/// the run. A macro and not a function of closures: what holds vector instructions must be inlined into the function
/// that enables them, and closures need not be.
#[cfg(target_arch = "x86_64")]
macro_rules! search {
    ($text:expr, $at:expr, $belongs:expr, $width:literal, $scan:ident.$stops:ident) => {{
        let (text, mut at): (&[u8], usize) = ($text, $at);
        loop {
            let Some(block) = text.get(at..).and_then(<[u8]>::first_chunk::<$width>) else { break };
            let stops: u32 = $scan.$stops(block);
            if stops != 0 {
                return at + stops.trailing_zeros() as usize;
            }
            at += $width;
        }
        // Fewer bytes are left than fill a block: look at the last block again and ignore what was before `at`.
        match text.last_chunk::<$width>() {
            Some(block) if at < text.len() => {
                let stops: u32 = $scan.$stops(block) >> ($width - (text.len() - at));
                if stops == 0 { text.len() } else { at + stops.trailing_zeros() as usize }
            }
            _ => end_of(text, at, $belongs),
        }
    }};
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{NAME_BLOCK, NamePattern, Scan, Task, end_of, is_target, is_token, is_value};

    /// By the low half of a byte: bit `h` says that the byte with high half `h` is a token character. Twice, because a
    /// shuffle works on halves of a register.
    static TOKEN_ROWS: [u8; 32] = {
        let mut rows = [0; 32];
        let mut byte = 0;
        while byte < 128 {
            if is_token(byte) {
                rows[(byte & 15) as usize] |= 1 << (byte >> 4);
                rows[(byte & 15) as usize + 16] |= 1 << (byte >> 4);
            }
            byte += 1;
        }
        rows
    };

    /// `1 << h` by the high half of a byte. Bytes from 0x80 on need a bit as well, so that no bit means "belongs".
    static ROW_BITS: [u8; 32] = {
        let mut bits = [0x80; 32];
        let mut high = 0;
        while high < 8 {
            bits[high] = 1 << high;
            bits[high + 16] = 1 << high;
            high += 1;
        }
        bits
    };

    /// # Safety
    /// The processor must have AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn run_avx2<T: Task>(task: T) -> T::Output {
        task.run(Avx2(()))
    }

    /// Proves AVX2; made only by [`run_avx2`].
    #[derive(Clone, Copy)]
    pub(super) struct Avx2(());

    impl Avx2 {
        #[inline(always)]
        fn value_stops(self, block: &[u8; 32]) -> u32 {
            // SAFETY: `self` proves AVX2; the load reads the 32 bytes of `block` and needs no alignment.
            unsafe {
                let bytes = _mm256_loadu_si256(block.as_ptr().cast());
                let printable = _mm256_cmpeq_epi8(_mm256_max_epu8(bytes, _mm256_set1_epi8(0x20)), bytes);
                let tab = _mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(0x09));
                let delete = _mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(0x7f));
                let belongs = _mm256_andnot_si256(delete, _mm256_or_si256(printable, tab));
                !(_mm256_movemask_epi8(belongs) as u32)
            }
        }

        #[inline(always)]
        fn target_stops(self, block: &[u8; 32]) -> u32 {
            // SAFETY: `self` proves AVX2; the load reads the 32 bytes of `block` and needs no alignment.
            unsafe {
                let bytes = _mm256_loadu_si256(block.as_ptr().cast());
                let visible = _mm256_cmpeq_epi8(_mm256_max_epu8(bytes, _mm256_set1_epi8(0x21)), bytes);
                let delete = _mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(0x7f));
                !(_mm256_movemask_epi8(_mm256_andnot_si256(delete, visible)) as u32)
            }
        }

        #[inline(always)]
        fn token_stops(self, block: &[u8; 32]) -> u32 {
            // SAFETY: `self` proves AVX2; each load reads the 32 bytes of one array and needs no alignment.
            unsafe {
                let bytes = _mm256_loadu_si256(block.as_ptr().cast());
                let rows = _mm256_loadu_si256(TOKEN_ROWS.as_ptr().cast());
                let bits = _mm256_loadu_si256(ROW_BITS.as_ptr().cast());
                // A byte from 0x80 on gives an empty row.
                let row = _mm256_shuffle_epi8(rows, bytes);
                let high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), _mm256_set1_epi8(0x0f));
                let bit = _mm256_shuffle_epi8(bits, high);
                let belongs = _mm256_cmpeq_epi8(_mm256_and_si256(row, bit), bit);
                !(_mm256_movemask_epi8(belongs) as u32)
            }
        }
    }

    impl Scan for Avx2 {
        #[inline(always)]
        fn value_end(self, text: &[u8], at: usize) -> usize {
            search!(text, at, is_value, 32, self.value_stops)
        }

        #[inline(always)]
        fn target_end(self, text: &[u8], at: usize) -> usize {
            search!(text, at, is_target, 32, self.target_stops)
        }

        #[inline(always)]
        fn token_end(self, text: &[u8], at: usize) -> usize {
            search!(text, at, is_token, 32, self.token_stops)
        }

        #[inline(always)]
        fn name_matches(self, input: &[u8; NAME_BLOCK], name: &NamePattern) -> bool {
            // SAFETY: `self` proves AVX2; each load reads the 32 bytes of one array and needs no alignment.
            unsafe {
                let input = _mm256_loadu_si256(input.as_ptr().cast());
                let fold = _mm256_loadu_si256(name.fold.as_ptr().cast());
                let pattern = _mm256_loadu_si256(name.pattern.as_ptr().cast());
                let difference = _mm256_xor_si256(_mm256_or_si256(input, fold), pattern);
                _mm256_testz_si256(difference, difference) == 1
            }
        }
    }

    /// SSE2 is part of x86-64: nothing to prove.
    #[derive(Clone, Copy)]
    pub(super) struct Sse2;

    impl Sse2 {
        #[inline(always)]
        fn value_stops(self, block: &[u8; 16]) -> u32 {
            // SAFETY: x86-64 has SSE2; the load reads the 16 bytes of `block` and needs no alignment.
            unsafe {
                let bytes = _mm_loadu_si128(block.as_ptr().cast());
                let printable = _mm_cmpeq_epi8(_mm_max_epu8(bytes, _mm_set1_epi8(0x20)), bytes);
                let tab = _mm_cmpeq_epi8(bytes, _mm_set1_epi8(0x09));
                let delete = _mm_cmpeq_epi8(bytes, _mm_set1_epi8(0x7f));
                let belongs = _mm_andnot_si128(delete, _mm_or_si128(printable, tab));
                !(_mm_movemask_epi8(belongs) as u32) & 0xffff
            }
        }

        #[inline(always)]
        fn target_stops(self, block: &[u8; 16]) -> u32 {
            // SAFETY: x86-64 has SSE2; the load reads the 16 bytes of `block` and needs no alignment.
            unsafe {
                let bytes = _mm_loadu_si128(block.as_ptr().cast());
                let visible = _mm_cmpeq_epi8(_mm_max_epu8(bytes, _mm_set1_epi8(0x21)), bytes);
                let delete = _mm_cmpeq_epi8(bytes, _mm_set1_epi8(0x7f));
                !(_mm_movemask_epi8(_mm_andnot_si128(delete, visible)) as u32) & 0xffff
            }
        }
    }

    impl Scan for Sse2 {
        #[inline(always)]
        fn value_end(self, text: &[u8], at: usize) -> usize {
            search!(text, at, is_value, 16, self.value_stops)
        }

        #[inline(always)]
        fn target_end(self, text: &[u8], at: usize) -> usize {
            search!(text, at, is_target, 16, self.target_stops)
        }

        #[inline(always)]
        fn token_end(self, text: &[u8], at: usize) -> usize {
            end_of(text, at, is_token)
        }

        #[inline(always)]
        fn name_matches(self, input: &[u8; NAME_BLOCK], name: &NamePattern) -> bool {
            name.matches(input)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All searches of one instruction set over one text, from every start.
    struct EndsOf<'t>(&'t [u8]);

    impl Task for EndsOf<'_> {
        type Output = Vec<[usize; 3]>;

        #[inline(always)]
        fn run<S: Scan>(self, scan: S) -> Self::Output {
            let text = self.0;
            let ends = |at| [scan.value_end(text, at), scan.target_end(text, at), scan.token_end(text, at)];
            (0..=text.len()).map(ends).collect()
        }
    }

    #[test]
    fn every_instruction_set_stops_at_the_same_byte_of_a_slice_that_ends_exactly() {
        for length in 0..80 {
            for place in 0..length {
                for byte in (0..=255).step_by(if length == 40 { 1 } else { 9 }) {
                    // A boxed slice has no spare capacity: a load beyond it is seen by sanitizers and valgrind.
                    let mut text = vec![b'a'; length].into_boxed_slice();
                    text[place] = byte;
                    let ends = run_with_each(|| EndsOf(&text));
                    assert!(ends.iter().all(|other| *other == ends[0]), "byte {byte} at {place} of {length}");
                }
            }
        }
    }
}
