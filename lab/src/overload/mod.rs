//! What scenarios of overload need: two hosts joined by a cable, a server with few workers, clients of several
//! priorities, and senders of more packets than anybody asked for.

mod clients;
mod established;
mod greedy;
mod guard;
mod packets;
mod server;
mod testbed;

pub use clients::{Asked, Clients, Group, Pace, load};
pub use established::Established;
pub use greedy::Greedy;
pub use guard::{Guard, by_source, by_url, only, rules};
pub use packets::{Flood, Sent, Template, frame};
pub use server::{Costs, Server};
pub use testbed::{PORT, Program, SERVER, Testbed};
