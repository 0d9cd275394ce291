//! Tasks for what takes waiting. One that has done its work is kept for the next: a task costs most where it begins and
//! ends.

use std::cell::RefCell;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use crate::data_core::DataCore;
use crate::data_core::clients::Busy;
use crate::session::{Step, wait};

/// Tasks of a core that wait for work. Each of them takes some KiB, and most cores never have as many requests on their
/// way.
const IDLE: usize = 256;

/// A core's tasks that wait for work, the one that has worked last at the end.
#[derive(Default)]
pub(crate) struct TaskPool(RefCell<Vec<Rc<PooledTask>>>);

#[derive(Default)]
struct PooledTask {
    work: RefCell<Option<(Busy, Step)>>,
    waker: RefCell<Option<Waker>>,
}

impl TaskPool {
    /// Has a task go on with a client.
    pub(super) fn take_on(&self, busy: Busy, step: Step) {
        let idle = self.0.borrow_mut().pop();
        let is_new = idle.is_none();
        let task = idle.unwrap_or_default();
        let core = Rc::clone(&busy.core);
        task.work.replace(Some((busy, step)));
        if is_new {
            // Boxed here, because the runtime moves what it is given several times.
            tokio::task::spawn_local(Box::pin(task.run(core)));
        } else if let Some(waker) = &*task.waker.borrow() {
            waker.wake_by_ref();
        }
    }
}

impl PooledTask {
    async fn run(self: Rc<Self>, core: Rc<DataCore>) {
        loop {
            let (busy, step) = poll_fn(|context| self.poll_work(context)).await;
            wait(busy, step).await;
            let mut idle = core.tasks.0.borrow_mut();
            if idle.len() >= IDLE {
                return;
            }
            idle.push(Rc::clone(&self));
        }
    }

    fn poll_work(&self, context: &Context<'_>) -> Poll<(Busy, Step)> {
        if let Some(work) = self.work.take() {
            return Poll::Ready(work);
        }
        let mut waker = self.waker.borrow_mut();
        if !waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
            *waker = Some(context.waker().clone());
        }
        Poll::Pending
    }
}
