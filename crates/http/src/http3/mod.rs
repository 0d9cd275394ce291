//! HTTP/3 (RFC 9114) as a server speaks it, with field sections by QPACK (RFC 9204) without a dynamic table.
//!
//! Frames and instructions are read as their bytes come in, and no more of them is kept than a bound that stands beside
//! it. A request's field section becomes a head of HTTP/1.1, which everything behind understands.

mod control;
mod error;
mod frames;
mod heads;
pub mod huffman;
mod instructions;
pub mod qpack;
mod sections;
mod static_table;
pub mod varint;

pub use control::{ControlReader, MOST_SETTINGS_BYTES};
pub use error::{ErrorCode, HeadError};
pub use frames::{
    FrameHeader, frame_type, is_reserved_frame_type, stream_type, write_goaway, write_settings,
};
pub use heads::{Content, Request, RequestFacts, max_field_section_size};
pub use instructions::{DecoderStream, EncoderStream};
pub use sections::{read_trailers, write_response, write_trailers};
