//! Who gets the next connection to a server, when more requests want one than it may have: the highest priority class
//! first, and within a class who came first.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use tokio::sync::oneshot::{self, Receiver, Sender};

use crate::admission::CLASSES;

/// Requests that may wait for a connection to one server, on one core.
const QUEUE: usize = 1024;

/// Connections in use, and who waits for one.
#[derive(Default)]
pub(crate) struct Turns {
    in_use: Cell<usize>,
    waiting: RefCell<Waiting>,
}

/// The right to one connection; dropped, it goes to whoever is next.
pub(crate) struct Turn(Rc<Turns>);

#[derive(Default)]
struct Waiting {
    classes: [VecDeque<Sender<Turn>>; CLASSES],
}

impl Turns {
    /// A turn, if fewer than `most` are taken. Nobody waits then: a turn that ends goes to who waits.
    pub(crate) fn take(self: &Rc<Self>, most: usize) -> Option<Turn> {
        if self.in_use.get() >= most {
            return None;
        }
        self.in_use.set(self.in_use.get() + 1);
        Some(Turn(Rc::clone(self)))
    }

    /// A place in the queue of a class (0 goes first). `None` where too many wait that are not of a lower class; of
    /// those the youngest makes room, and learns of it by the end of its channel.
    pub(crate) fn wait(&self, class: u8) -> Option<Receiver<Turn>> {
        let class = usize::from(class).min(CLASSES - 1);
        let mut waiting = self.waiting.borrow_mut();
        if waiting.count() >= QUEUE {
            waiting.forget_the_gone();
        }
        if waiting.count() >= QUEUE {
            waiting.classes[class + 1..].iter_mut().rev().find_map(VecDeque::pop_back)?;
        }
        let (sender, receiver) = oneshot::channel();
        waiting.classes[class].push_back(sender);
        Some(receiver)
    }

    fn next(&self) -> Option<Sender<Turn>> {
        let mut waiting = self.waiting.borrow_mut();
        std::iter::from_fn(|| waiting.classes.iter_mut().find_map(VecDeque::pop_front))
            .find(|sender| !sender.is_closed())
    }
}

impl Waiting {
    fn count(&self) -> usize {
        self.classes.iter().map(VecDeque::len).sum()
    }

    /// Requests whose client left, or whose patience ended.
    fn forget_the_gone(&mut self) {
        self.classes.iter_mut().for_each(|class| class.retain(|sender| !sender.is_closed()));
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let turns = &self.0;
        match turns.next() {
            // Its receiver is there, and this thread is the only one that could drop it.
            Some(sender) => drop(sender.send(Self(Rc::clone(turns)))),
            None => turns.in_use.set(turns.in_use.get() - 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns() -> Rc<Turns> {
        Rc::default()
    }

    #[test]
    fn the_highest_class_goes_first_and_within_it_who_came_first() {
        let turns = turns();
        let taken = turns.take(1).unwrap();
        let mut low = turns.wait(2).unwrap();
        let (mut first, mut second) = (turns.wait(0).unwrap(), turns.wait(0).unwrap());
        drop(taken);
        assert!(second.try_recv().is_err() && low.try_recv().is_err());
        drop(first.try_recv().unwrap());
        drop(second.try_recv().unwrap());
        assert!(turns.take(1).is_none(), "the turn is the low class's");
        drop(low.try_recv().unwrap());
        assert!(turns.take(1).is_some());
    }

    #[test]
    fn a_turn_of_one_that_has_gone_is_passed_on() {
        let turns = turns();
        let taken = turns.take(1).unwrap();
        let (gone, mut granted, mut last) =
            (turns.wait(0).unwrap(), turns.wait(0).unwrap(), turns.wait(1).unwrap());
        drop(gone);
        drop(taken);
        let turn = granted.try_recv().unwrap();
        drop(granted);
        assert!(last.try_recv().is_err());
        drop(turn);
        // Granted, and gone before it looked.
        drop(last.try_recv().unwrap());
        let taken = turns.take(1).unwrap();
        let unseen = turns.wait(0).unwrap();
        drop(taken);
        drop(unseen);
        assert!(turns.take(1).is_some());
    }

    #[test]
    fn a_full_queue_refuses_unless_a_lower_class_waits() {
        let turns = turns();
        let _taken = turns.take(1).unwrap();
        let mut low: Vec<_> = (0..QUEUE).map(|_| turns.wait(3).unwrap()).collect();
        assert!(turns.wait(3).is_none() && turns.wait(7).is_none());
        let _high = turns.wait(0).unwrap();
        let crowded_out = low.pop().unwrap();
        assert!(crowded_out.blocking_recv().is_err());
        drop(low);
        assert!(turns.wait(7).is_some(), "those that have gone make room");
    }
}
