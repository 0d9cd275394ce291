//! What was answered already: the one thing that a server remembers, bounded in time and in number (Trickles §2.2).
//!
//! Two generations of fingerprints. Once the younger one has lasted for the horizon, or is full, the older one is
//! forgotten and the younger takes its place. Continuations from before the older generation began could be replayed
//! unseen, so they are refused as stale: under a flood the horizon shrinks, and no replay gets through.

use crate::congestion::{MAX_GROUP, MAX_SUCCESSORS};

/// Slots for each of those that remember an era's first loss.
const SLOTS_A_LOSS: usize = 8;

/// Remembers fingerprints, and where eras had their first loss, for between one and two horizons.
#[derive(Debug)]
pub struct ReplayTable {
    young: Generation,
    old: Generation,
    horizon_ms: u64,
    /// Oldest time from which everything answered is remembered.
    complete_since_ms: u64,
}

/// Open addressing with linear probing; 0 marks an empty slot.
#[derive(Debug)]
struct Generation {
    slots: Box<[u64]>,
    used: usize,
    /// Eras with their first losses, in the same way.
    losses: Box<[(u64, u64)]>,
    losses_used: usize,
    since_ms: u64,
}

impl ReplayTable {
    /// A table that holds `capacity` fingerprints a generation, rounded up to a power of two, at 20 bytes each.
    ///
    /// A server that has just started knows nothing of what its predecessor answered, and accepts each of those packets
    /// once more: that is what lets it go on with the connections.
    #[must_use]
    pub fn new(capacity: usize, horizon_ms: u64, now_ms: u64) -> Self {
        let least = 2 * (usize::from(MAX_GROUP) + MAX_SUCCESSORS);
        let slots = capacity.clamp(least, 1 << 28).next_power_of_two() * 2;
        // Written, so that its memory is taken now and not when the table has its first use for it.
        let empty = || std::iter::repeat_with(|| std::hint::black_box(0)).take(slots).collect();
        let without_losses =
            || std::iter::repeat_with(|| std::hint::black_box((0, 0))).take(slots / SLOTS_A_LOSS).collect();
        let generation = || Generation {
            slots: empty(),
            used: 0,
            losses: without_losses(),
            losses_used: 0,
            since_ms: now_ms,
        };
        Self { young: generation(), old: generation(), horizon_ms, complete_since_ms: 0 }
    }

    /// The oldest time, in milliseconds of the server's clock, of which every answer is remembered.
    #[must_use]
    pub fn complete_since_ms(&self) -> u64 {
        self.complete_since_ms
    }

    /// Fingerprints held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.young.used + self.old.used
    }

    /// Whether nothing is remembered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Turns now, if all that one request may add could make the table turn: the request's age has to be judged by what
    /// is still remembered when its fingerprints are looked for.
    pub fn make_room(&mut self, now_ms: u64) {
        let (fingerprints, losses) = (usize::from(MAX_GROUP) + MAX_SUCCESSORS, 2);
        if now_ms.saturating_sub(self.young.since_ms) >= self.horizon_ms
            || self.young.used + fingerprints > self.young.slots.len() / 2
            || self.young.losses_used + losses > self.young.losses.len() / 2
        {
            self.turn(now_ms);
        }
    }

    /// How many fingerprints of a request, from the first on, are not known. They are from now on; those from the first
    /// known one on stay as they are.
    pub fn take_fresh(&mut self, fingerprints: &[u64], now_ms: u64) -> usize {
        if now_ms.saturating_sub(self.young.since_ms) >= self.horizon_ms
            || self.young.used + fingerprints.len() > self.young.slots.len() / 2
        {
            self.turn(now_ms);
        }
        let known = |&fingerprint: &u64| self.young.contains(fingerprint) || self.old.contains(fingerprint);
        let fresh = fingerprints.iter().position(known).unwrap_or(fingerprints.len());
        for &fingerprint in &fingerprints[..fresh] {
            self.young.insert(fingerprint);
        }
        fresh
    }

    /// Whether an account of an era agrees with those before it: all that report a loss report the same first one, and
    /// none has received what was lost (the prefix property of Trickles §2.4). A client that told each acknowledgement
    /// of another loss would begin as many eras, each with half of the window.
    pub fn agrees(&mut self, era: u64, first_loss: Option<u64>, newest: u64, now_ms: u64) -> bool {
        match (self.keep_loss(era, now_ms), first_loss) {
            (Some(known), Some(loss)) => known == loss,
            (Some(known), None) => newest < known,
            (None, None) => true,
            (None, Some(loss)) => {
                self.remember_loss(era, loss, now_ms);
                true
            }
        }
    }

    /// The first loss of an era, if it is known, which is remembered as long as if it had been told of now: whoever is
    /// given another continuation of the era can go on with that for a horizon.
    pub fn keep_loss(&mut self, era: u64, now_ms: u64) -> Option<u64> {
        if let known @ Some(_) = self.young.loss_of(era) {
            return known;
        }
        let known = self.old.loss_of(era)?;
        self.remember_loss(era, known, now_ms);
        Some(known)
    }

    fn remember_loss(&mut self, era: u64, loss: u64, now_ms: u64) {
        let is_full = self.young.losses_used + 1 > self.young.losses.len() / 2;
        if is_full || now_ms.saturating_sub(self.young.since_ms) >= self.horizon_ms {
            self.turn(now_ms);
        }
        self.young.insert_loss(era, loss);
    }

    fn turn(&mut self, now_ms: u64) {
        if self.old.used + self.old.losses_used > 0 {
            // What the old generation held is forgotten now; the young one remembers everything since it began, which
            // it may have done in the middle of a millisecond.
            self.complete_since_ms = self.young.since_ms + 1;
        }
        std::mem::swap(&mut self.young, &mut self.old);
        if self.young.used > 0 {
            self.young.slots.fill(0);
        }
        if self.young.losses_used > 0 {
            self.young.losses.fill((0, 0));
        }
        (self.young.used, self.young.losses_used) = (0, 0);
        self.young.since_ms = now_ms;
    }
}

impl Generation {
    fn slot_of(&self, fingerprint: u64) -> usize {
        let mask = self.slots.len() - 1;
        let mut slot = fingerprint as usize & mask;
        while self.slots[slot] != 0 && self.slots[slot] != fingerprint {
            slot = (slot + 1) & mask;
        }
        slot
    }

    fn contains(&self, fingerprint: u64) -> bool {
        let fingerprint = fingerprint.max(1);
        self.slots[self.slot_of(fingerprint)] == fingerprint
    }

    fn loss_slot_of(&self, era: u64) -> usize {
        let mask = self.losses.len() - 1;
        let mut slot = era as usize & mask;
        while self.losses[slot].0 != 0 && self.losses[slot].0 != era {
            slot = (slot + 1) & mask;
        }
        slot
    }

    fn loss_of(&self, era: u64) -> Option<u64> {
        let (of, loss) = self.losses[self.loss_slot_of(era.max(1))];
        (of != 0).then_some(loss)
    }

    fn insert_loss(&mut self, era: u64, loss: u64) {
        let slot = self.loss_slot_of(era.max(1));
        self.losses[slot] = (era.max(1), loss);
        self.losses_used += 1;
    }

    /// The table is at most half full, so there is always an empty slot.
    fn insert(&mut self, fingerprint: u64) {
        let fingerprint = fingerprint.max(1);
        let slot = self.slot_of(fingerprint);
        if self.slots[slot] == 0 {
            self.slots[slot] = fingerprint;
            self.used += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_table_takes_the_largest_groups_without_end() {
        let mut table = ReplayTable::new(1, 1000, 0);
        let most = MAX_SUCCESSORS as u64;
        for round in 1..1000 {
            let group: Vec<u64> = (1..=most).map(|which| round * 1_000_003 + which).collect();
            assert_eq!(table.take_fresh(&group, 0), group.len());
            assert_eq!(table.take_fresh(&group, 0), 0);
            assert!(table.agrees(round, Some(7), 9, 0));
            assert!(!table.agrees(round, Some(8), 9, 0));
        }
    }

    #[test]
    fn accounts_of_an_era_agree_on_its_first_loss() {
        let mut table = ReplayTable::new(64, 1000, 0);
        assert!(table.agrees(5, None, 100, 0), "nothing was lost yet");
        assert!(table.agrees(5, Some(90), 95, 0), "what comes late may have been sent before");
        assert!(table.agrees(5, Some(90), 120, 0));
        assert!(!table.agrees(5, Some(91), 120, 0));
        assert!(table.agrees(5, None, 89, 0));
        assert!(!table.agrees(5, None, 90, 0), "it was lost");
        assert!(table.agrees(6, Some(91), 120, 0), "another era");
        for era in 100..100 + 9 {
            table.agrees(era, Some(1), 2, 0);
        }
        assert!(!table.agrees(5, Some(91), 120, 0), "the older generation knows");
    }

    #[test]
    fn a_fingerprint_is_fresh_once() {
        let mut table = ReplayTable::new(64, 1000, 0);
        assert_eq!(table.take_fresh(&[7, 8], 0), 2);
        assert_eq!(table.take_fresh(&[8], 999), 0);
        assert_eq!(table.take_fresh(&[8, 9], 999), 0);
        assert_eq!(table.take_fresh(&[9, 8, 10], 999), 1, "what is behind a known one was not taken before");
        assert_eq!(table.take_fresh(&[10], 999), 1, "nor now");
    }

    #[test]
    fn a_fingerprint_is_remembered_for_a_horizon_at_least() {
        let mut table = ReplayTable::new(64, 1000, 0);
        assert_eq!(table.take_fresh(&[7], 900), 1);
        assert_eq!(table.take_fresh(&[8], 1000), 1);
        assert_eq!(table.take_fresh(&[7], 1900), 0);
        assert_eq!(table.take_fresh(&[9], 2000), 1);
        assert_eq!(table.take_fresh(&[7], 2000), 1, "after two generations it is forgotten");
        assert_eq!(table.complete_since_ms(), 1001);
    }

    #[test]
    fn a_flood_shortens_the_horizon_instead_of_letting_replays_through() {
        let mut table = ReplayTable::new(16, 1_000_000, 0);
        let mut now = 0;
        for fingerprint in 1..=5000 {
            now += 10;
            assert_eq!(table.take_fresh(&[fingerprint], now), 1);
            assert!(table.len() <= 1024, "bounded");
        }
        let since = table.complete_since_ms();
        assert!(since > 0 && since < now);
        for fingerprint in 1..=5000 {
            let answered_ms = fingerprint * 10;
            if answered_ms >= since {
                assert_eq!(table.take_fresh(&[fingerprint], now), 0, "{fingerprint}");
            }
        }
    }

    #[test]
    fn fingerprints_that_share_a_slot_are_told_apart() {
        let mut table = ReplayTable::new(16, 1000, 0);
        let size = 32;
        assert_eq!(table.take_fresh(&[5, 5 + size, 5 + 2 * size], 0), 3);
        assert_eq!(table.take_fresh(&[5 + 3 * size], 0), 1);
        for n in 0..4 {
            assert_eq!(table.take_fresh(&[5 + n * size], 0), 0);
        }
        assert_eq!(table.take_fresh(&[0], 0), 1);
        assert_eq!(table.take_fresh(&[0], 0), 0);
    }
}
