#![deny(unsafe_code)]
//! HTTP without I/O: parsers, normalizer and serializer of HTTP/1, codec of HTTP/3, and cache arithmetic.
//!
//! Bytes and times come in as arguments; nothing here sees a socket, a clock or a random source.

pub mod cache;
mod chars;
mod chunked;
pub mod date;
mod decimal;
mod error;
mod field;
mod field_rules;
pub mod forward;
mod head;
pub mod http3;
mod machine;
mod names;
pub mod normalize;
mod parser;
mod proxy_header;
mod simd;
mod status;

pub use chars::is_trimmed;
pub use chunked::{
    ChunkLimits, ChunkedDecoder, Decoded, ExtensionScope, write_chunk, write_chunk_header, write_last_chunk,
};
pub use decimal::write_decimal;
pub use error::{BodyError, HeadError};
pub use field::{Field, FieldId, FieldSet, Fields, FieldsIter, Span};
pub use field_rules::{FieldChange, FieldRuleError, FieldRules, RuledMessage, RuledResponse};
pub use head::{BodyFraming, Method, RequestHead, ResponseHead, Version};
pub use parser::{HeadLimits, ParsedRequest, ParsedResponse, Progress, RequestParser, ResponseParser};
pub use proxy_header::{
    MOST_BYTES as MOST_PROXY_HEADER_BYTES, ProxyHeaderError, ProxyProgress, parse_proxy_header,
};
pub use status::status_reason;
