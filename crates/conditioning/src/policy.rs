//! What the filters decide by, without sockets, processes or clocks: for a second host, such as an accelerator's own
//! request path.
//!
//! | filter | policy |
//! |---|---|
//! | `package` | [`Reader`]: when a request is whole; [`AddressTree::pop_heaviest`]: whose incomplete connection ends first |
//! | `persist` | [`List`]: connections in the order in which they became idle |
//! | `prior` | [`AddressTree::pop_least_recent`]: whose request is served next |
//! | `slowread` | [`Shares`]: whether an address range may have one more connection in service |
//! | `normalize` | [`Normalize::normal_head`]: the head in the one form that the server is to see |
//! | `police` | [`Policer`]: rates and priorities, by the same [`rules`] as the gate |
//! | `auth` | [`Credentials::admit`]: who may come in |
//!
//! ```
//! use tidegate_conditioning::policy::AddressTree;
//!
//! let mut waiting = AddressTree::new(1024);
//! for (address, request) in [("192.0.2.1", "a"), ("192.0.2.1", "b"), ("198.51.100.7", "c")] {
//!     waiting.insert(address.parse()?, request);
//! }
//! let order: Vec<_> = std::iter::from_fn(|| waiting.pop_least_recent()).map(|(_, request)| request).collect();
//! assert_eq!(order, ["a", "c", "b"]);
//! # Ok::<(), std::net::AddrParseError>(())
//! ```

pub use crate::filters::auth::{Credentials, Scheme};
pub use crate::filters::normalize::Normalize;
pub use crate::filters::police::{TOP_LEVEL, rules};
pub use crate::filters::slowread::Shares;
pub use crate::keeper::list::{List, Place, Places};
pub use crate::keeper::whole::{Progression, Reader, Whole};
pub use crate::tree::{AddressTree, Ticket};
pub use tidegate_policy::Policer;
