//! A counting semaphore: the standard library has none.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// A fixed number of places.
pub struct Slots {
    free: Mutex<usize>,
    returned: Condvar,
}

/// One place taken; dropping it gives it back.
pub struct Slot(Arc<Slots>);

impl Slots {
    /// `count` free places.
    pub fn new(count: usize) -> Self {
        Self { free: Mutex::new(count), returned: Condvar::new() }
    }

    /// Waits for a place.
    pub fn take(slots: &Arc<Self>) -> Slot {
        let mut free = slots.free.lock().unwrap_or_else(PoisonError::into_inner);
        while *free == 0 {
            free = slots.returned.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
        *free -= 1;
        Slot(Arc::clone(slots))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        *self.0.free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.returned.notify_one();
    }
}
