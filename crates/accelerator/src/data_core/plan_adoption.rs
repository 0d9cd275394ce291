//! Which settings each data core follows: a reload ends when every core has taken the new ones over.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::service::plan::Plan;

/// One entry per data core.
pub(crate) struct PlanAdoption {
    plans: Mutex<Vec<Option<Arc<Plan>>>>,
    changed: Condvar,
}

impl PlanAdoption {
    pub(crate) fn new(cores: usize) -> Self {
        Self { plans: Mutex::new(vec![None; cores]), changed: Condvar::new() }
    }

    /// Core `index` follows `plan` from its next request on.
    pub(crate) fn adopted(&self, index: usize, plan: Arc<Plan>) {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        plans[index] = Some(plan);
        self.changed.notify_all();
    }

    /// Blocks until every core follows `plan`, at most for `limit`; says whether they do.
    pub(crate) fn wait(&self, plan: &Arc<Plan>, limit: Duration) -> bool {
        let elsewhere = |plans: &mut Vec<Option<Arc<Plan>>>| {
            !plans.iter().all(|of_core| of_core.as_ref().is_some_and(|of_core| Arc::ptr_eq(of_core, plan)))
        };
        let plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(plans, limit, elsewhere);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}
