use tidegate_http::BodyError;

/// Why a server's message is refused; always the ICAP server's fault. "Incomplete" is not an error.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum IcapError {
    /// RFC 3507 §4.3.3: `ICAP/1.0 200 OK`.
    #[error("malformed status line")]
    StatusLine,
    /// RFC 3507 §4.3.1, with RFC 9110's field lines.
    #[error("malformed field line")]
    FieldLine,
    /// The head exceeds [`crate::HEAD_BYTES`].
    #[error("the head is too large")]
    HeadTooLarge,
    /// RFC 3507 §4.4.1: sections in their order, each from where the one before it ends.
    #[error("malformed or contradictory Encapsulated")]
    Encapsulated,
    /// The encapsulated heads exceed [`crate::SECTIONS_BYTES`].
    #[error("the encapsulated heads are too large")]
    SectionsTooLarge,
    /// The encapsulated body's chunked coding is malformed.
    #[error("malformed body: {0}")]
    Body(BodyError),
}
