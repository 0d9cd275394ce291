//! In-memory persistent store for cache objects (Tempesta §4.5).

mod config;
mod provisional;

pub use config::{
    Config, InsertError, MAX_BUDGET_BYTES, MIN_BUDGET_BYTES, OpenReport, SetAside, StoreError, Unusable,
};
pub use provisional::{Follower, Object, ObjectInfo, Progress, Stats, Store, Visit, Writer};
