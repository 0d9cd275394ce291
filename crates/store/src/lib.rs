//! In-memory persistent store for cache objects (Tempesta §4.5).
//!
//! Objects live in one memory-mapped file of fixed size, the arena. A hit hands out slices of the mapping (or the
//! place in the file, for sendfile) and copies nothing. What is committed survives the process, however that ends:
//! the kernel owns the dirty pages. What a crash of the machine leaves half-written fails its checksum at the next
//! start and is dropped; what was removed shortly before such a crash may be found again unless [`Store::sync`] came
//! in between.
//!
//! ```
//! use tidegate_store::{Config, Store};
//! let (store, _) = Store::open(Config::new(4 << 20))?;
//! let mut writer = store.insert_sized(b"GET example.com/", b"", b"HTTP/1.1 200 OK\r\n", 5)?;
//! writer.write(b"hello")?;
//! writer.commit();
//! let object = store.get(b"GET example.com/").expect("just stored");
//! assert_eq!(object.body().next(), Some(&b"hello"[..]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod arena;
mod config;
mod control;
mod eviction;
mod handover;
mod index;
mod inner;
mod memory;
mod object;
mod open;
mod record;
mod recovery;
mod space;
mod store;
mod writer;

pub use config::{
    Config, InsertError, MAX_BUDGET_BYTES, MIN_BUDGET_BYTES, OpenReport, SetAside, StoreError, Unusable,
};
pub use handover::{Handed, Taken};
pub use memory::prefetch;
pub use object::{Follower, Object, Progress};
#[doc(hidden)]
pub use open::reseal;
pub use store::{ObjectInfo, Stats, Store, Visit};
pub use writer::Writer;
