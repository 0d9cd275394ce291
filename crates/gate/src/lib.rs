//! Overload control in front of a host's servers, in the kernel where that is possible: block list, SYN policing,
//! prioritized listen queues, URL and cookie control, after *Kernel Mechanisms for Service Differentiation in
//! Overloaded Web Servers* (section 3), on an unpatched kernel. Where programs cannot load, the same rules act in user
//! space; [`Gate::show`] says which mechanism enforces which rule and why.
//!
//! A gate belongs to the process that attached it: its programs and maps vanish with it. Another process finds them by
//! [`Running::find`].

mod abi;
mod accept_queue;
mod block;
mod block_maps;
mod error;
mod events;
mod gate;
mod handover;
mod interfaces;
mod keeper;
mod kernel;
mod maps;
mod pilot;
mod queue;
mod report;
mod rules;
mod running;
mod singles;
mod slow_readers;
mod system;
mod user;

pub use block::{BlockStats, Blocked, Blocks};
pub use error::GateError;
pub use events::{TcpEvent, TcpEventKind, TcpEvents};
pub use gate::{Asked, Gate, Options, Trial};
pub use handover::Handover;
pub use interfaces::InterfaceChange;
pub use keeper::{BlockSources, Keeper, KeeperNote, check_list};
pub use kernel::ProgramCost;
pub use pilot::{Pilot, ServerTotals, Wanted};
pub use queue::{Accepted, ClassListeners, ListenQueue, QueueCounts};
pub use report::{Mechanism, Report, RuleKind, RuleReport, Unavailable, Why};
pub use running::Running;
pub use slow_readers::SlowReaders;
pub use system::{check_interface, interfaces_of};
