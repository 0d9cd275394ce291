#![deny(unsafe_code)]
//! HTTP/1 without I/O: parsers, normalizer, serializer and cache arithmetic.
//!
//! Bytes and times come in as arguments; nothing here sees a socket, a clock or a random source.

mod chars;
mod error;
mod field;
mod head;
mod names;
mod parser;

pub use error::{BodyError, HeadError};
pub use field::{Field, FieldId, Fields, FieldsIter, Span};
pub use head::{BodyFraming, Method, RequestHead, ResponseHead, Version};
pub use parser::{HeadLimits, Progress, RequestParser, ResponseParser};
