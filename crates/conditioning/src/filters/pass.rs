//! `pass`: hands on everything unchanged; the dummy filter of §4.3.4, and the shortest example of a per-request filter.

use std::time::Instant;

use crate::arguments::{Argument, Arguments};
use crate::host::{Disposition, Filter, WINDOW};
use crate::neighbours::FilterError;
use crate::wire::Bundle;

pub(super) const ARGUMENTS: &[Argument] = &[WINDOW];

/// Has no opinion.
pub struct Pass;

impl Filter for Pass {
    fn name(&self) -> &'static str {
        "pass"
    }

    fn arrive(&mut self, _request: &mut Bundle, _now: Instant) -> Disposition {
        Disposition::Pass
    }
}

pub(super) fn check(arguments: &Arguments) -> Result<Pass, FilterError> {
    arguments.number::<usize>("window")?;
    Ok(Pass)
}
