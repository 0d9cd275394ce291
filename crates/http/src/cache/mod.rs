//! Cache arithmetic (RFC 9111) of a shared cache: what may be stored, for how long, and how a stored response answers.
//!
//! Nothing here stores a byte or reads a clock. The order of use:
//!
//! 1. [`RequestDirectives::parse`] and [`Policy::reuse`] decide whether a stored response answers a request.
//! 2. [`conditional::evaluate`] and [`range::parse`] decide in which form.
//! 3. After the upstream answered, [`Policy::new`] decides whether the response is kept; [`vary`] makes its key;
//!    [`conditional::validators_match`] and [`update::merge`] take over what a 304 says.
//! 4. [`invalidation::targets`] names what an unsafe request made obsolete.
//! 5. [`CacheStatus`] tells the client what happened (RFC 9211).
//!
//! Where the RFCs leave a choice, the cache is cautious: invalid or conflicting freshness information means stale (RFC
//! 9111 §4.2.1), and `private` or `no-cache` with field names counts as if it had none (§5.2.2.4 and §5.2.2.7 say that
//! many caches do so). Of `Age` the first member counts, and one that is no number does not (§5.1).

pub mod conditional;
mod directives;
pub mod invalidation;
mod policy;
pub mod range;
mod status;
pub mod update;
pub mod vary;

pub use directives::{RequestDirectives, ResponseDirectives, SURROGATE_CAPABILITY};
pub use policy::{NotStorable, Policy, Reuse, Validation, identifies_client};
pub use status::{CacheStatus, Forwarded, Handling, write_name};

#[cfg(test)]
mod oracle_tests;
#[cfg(test)]
pub(crate) mod testing;
