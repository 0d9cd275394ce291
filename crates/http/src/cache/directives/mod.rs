//! Cache directives of requests and responses.

mod list;
mod request;
mod response;
mod structured;

pub use request::RequestDirectives;
pub use response::{ResponseDirectives, SURROGATE_CAPABILITY};

pub(super) use list::{members, parts};
