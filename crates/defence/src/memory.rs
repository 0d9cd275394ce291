//! What the defence takes besides its trees: tables and queues of fixed size, told by the sizes of what is in them, so
//! that the trees get what is left of the memory that an operator has allowed.

use tidegate_core::PrefixTree;

use crate::challenge::Passes;
use crate::defence::Shared;
use crate::elsewhere::Elsewhere;
use crate::external::Feed;
use crate::stress::Upstreams;
use crate::{Settings, classifiers};

/// A core's tree is never smaller: some thousand addresses.
pub(crate) const LEAST_TREE_BYTES: usize = 1 << 20;

/// Memory for the nodes of one core's tree: an equal share of what the tables of all cores leave.
pub(crate) fn of_tree(settings: &Settings, cores: usize) -> usize {
    let cores = cores.max(1);
    let left = settings.memory_bytes.saturating_sub(shared_bytes(cores)) / cores;
    left.saturating_sub(core_bytes(cores)).max(LEAST_TREE_BYTES)
}

/// What all cores have in common.
const fn shared_bytes(cores: usize) -> usize {
    Passes::BYTES + Feed::BYTES + Shared::queue_bytes() + Elsewhere::most_bytes(cores)
}

/// What each core has of its own.
const fn core_bytes(cores: usize) -> usize {
    classifiers::BYTES
        + Upstreams::MOST_BYTES
        + Shared::taken_bytes()
        + PrefixTree::beside_bytes(Elsewhere::most_told(cores))
}

/// Of a list that grows to so many: its capacity is a power of two, and while it is moved there is half of it besides.
pub(crate) const fn list_bytes<T>(count: usize) -> usize {
    count.next_power_of_two() * size_of::<T>() * 3 / 2
}

/// Of a channel that holds so many, each with its turn.
pub(crate) const fn channel_bytes<T>(count: usize) -> usize {
    count * size_of::<(usize, T)>()
}

/// Of a hash table that holds so many: at most seven eighths of its places are taken, of each of which a byte tells.
pub(crate) const fn table_bytes<T>(count: usize) -> usize {
    (count * 8 / 7 + 1).next_power_of_two() * (size_of::<T>() + 1) * 3 / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_and_tables_are_all_of_the_memory_and_few_bytes_still_make_a_tree() {
        for cores in [1, 2, 8, 16] {
            let settings = Settings::default();
            let all = shared_bytes(cores) + cores * (core_bytes(cores) + of_tree(&settings, cores));
            let bound = settings.memory_bytes;
            assert!(all <= bound && all > bound - cores - 1, "{all} of {bound} bytes, {cores} cores");
        }
        assert_eq!(of_tree(&Settings { memory_bytes: 0, ..Settings::default() }, 4), LEAST_TREE_BYTES);
    }
}
