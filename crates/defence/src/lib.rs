#![forbid(unsafe_code)]
//! Defence: who among a site's clients abuses it, and what is done about them.
//!
//! Each data core has a chain of its own, built by [`Defence`]: a prefix tree, the classifiers of this crate, and an
//! arbiter that knows who is exempt and which rules are only tried out. Nothing on the way of a request waits, takes a
//! lock or allocates; what was decided goes through a bounded queue to whoever keeps the audit log and the block list.
//! Nothing here reads a clock or sees a socket.

mod arbiter;
pub mod challenge;
mod classifiers;
mod defence;
mod elsewhere;
mod external;
mod memory;
mod novelty;
mod parts;
mod settings;
mod stress;
mod view;

pub use defence::{Defence, Notice, RuleCount};
pub use external::{Feed, Told, What};
pub use settings::{Action, Exemption, Filter, Rule, Settings};
pub use stress::{Cause, StressLimits};
pub use view::{ClientRow, Level};
