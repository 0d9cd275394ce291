//! Connections in the order in which they entered a phase: the first is the next whose time is up.

/// An index that is none.
pub const NONE: u32 = u32::MAX;

/// A connection's place in the one list that it is in.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    previous: u32,
    next: u32,
}

impl Default for Place {
    fn default() -> Self {
        Self { previous: NONE, next: NONE }
    }
}

/// A doubly linked list through connections that live elsewhere.
#[derive(Debug)]
pub struct List {
    first: u32,
    last: u32,
}

impl Default for List {
    fn default() -> Self {
        Self { first: NONE, last: NONE }
    }
}

/// Where the connections live.
pub trait Places {
    /// The place of connection `index`.
    fn place(&mut self, index: u32) -> &mut Place;
}

impl List {
    /// The one that entered first.
    pub fn first(&self) -> Option<u32> {
        (self.first != NONE).then_some(self.first)
    }

    /// Appends a connection that is in no list.
    pub fn push(&mut self, places: &mut impl Places, index: u32) {
        *places.place(index) = Place { previous: self.last, next: NONE };
        if self.last == NONE {
            self.first = index;
        } else {
            places.place(self.last).next = index;
        }
        self.last = index;
    }

    /// Takes a connection that is in this list out of it.
    pub fn remove(&mut self, places: &mut impl Places, index: u32) {
        let Place { previous, next } = std::mem::take(places.place(index));
        if previous == NONE {
            self.first = next;
        } else {
            places.place(previous).next = next;
        }
        if next == NONE {
            self.last = previous;
        } else {
            places.place(next).previous = previous;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    impl Places for Vec<Place> {
        fn place(&mut self, index: u32) -> &mut Place {
            &mut self[index as usize]
        }
    }

    proptest! {
        #[test]
        fn a_list_keeps_the_order_of_entry(operations in proptest::collection::vec(0u32..8, 0..200)) {
            let mut places = vec![Place::default(); 8];
            let mut list = List::default();
            let mut model: Vec<u32> = Vec::new();
            for index in operations {
                if let Some(at) = model.iter().position(|&other| other == index) {
                    list.remove(&mut places, index);
                    model.remove(at);
                } else {
                    list.push(&mut places, index);
                    model.push(index);
                }
                prop_assert_eq!(list.first(), model.first().copied());
            }
            while let Some(first) = list.first() {
                prop_assert_eq!(first, model.remove(0));
                list.remove(&mut places, first);
            }
            prop_assert!(model.is_empty());
        }
    }
}
