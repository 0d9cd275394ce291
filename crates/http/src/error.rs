//! Why bytes from a peer were refused, and the answer that each refusal deserves.

/// Why a message head was refused; always the fault of the peer that sent it. "Incomplete" is not an error.
///
/// After any of these the connection must be closed: where the next message starts is no longer certain. For a head
/// from an upstream [`HeadError::status`] does not apply; the client is answered 502.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum HeadError {
    /// RFC 9112 §2.2 lets a server skip "at least one" empty line before a request line; we skip a few.
    #[error("too many empty lines before the request line")]
    TooManyEmptyLines,
    /// RFC 9110 §9.1: a method is a token, followed by one space.
    #[error("malformed method")]
    BadMethod,
    /// RFC 9112 §3.2: none of the four forms of a request target, or a form this method may not have.
    #[error("malformed request target")]
    BadTarget,
    /// RFC 9112 §2.3: the version is not `HTTP/` digit `.` digit; also a request line without a version (HTTP/0.9).
    #[error("malformed HTTP version")]
    BadVersion,
    /// RFC 9110 §15.6.6: of another major version than HTTP/1.
    #[error("unsupported HTTP version")]
    UnsupportedVersion,
    /// RFC 9112 §4: the status code is not three digits from 100 to 999.
    #[error("malformed status code")]
    BadStatus,
    /// RFC 9112 §2.2: a carriage return that no line feed follows.
    #[error("bare carriage return")]
    BareCarriageReturn,
    /// RFC 9112 §2.2 allows to accept it; parsers that differ on it are how requests are smuggled.
    #[error("line feed without carriage return")]
    BareLineFeed,
    /// RFC 9110 §5.5: a control byte other than HTAB in a field value or reason phrase.
    #[error("control byte in a field value")]
    ControlByte,
    /// RFC 9112 §5.2: a line that starts with whitespace.
    #[error("folded field line")]
    ObsoleteFold,
    /// RFC 9112 §5.1: whitespace between field name and colon.
    #[error("whitespace before the colon of a field")]
    WhitespaceBeforeColon,
    /// RFC 9112 §5: a field line that starts with its colon.
    #[error("empty field name")]
    EmptyFieldName,
    /// RFC 9110 §5.1: a field name is a token; also a field line without a colon.
    #[error("malformed field name")]
    BadFieldName,
    /// RFC 9110 §15.5.15.
    #[error("request line exceeds {limit} bytes")]
    RequestLineTooLong {
        /// The limit in bytes.
        limit: u32,
    },
    /// RFC 6585 §5.
    #[error("head exceeds {limit} bytes")]
    HeadTooLarge {
        /// The limit in bytes.
        limit: u32,
    },
    /// RFC 6585 §5.
    #[error("more than {limit} fields")]
    TooManyFields {
        /// The greatest number of fields.
        limit: u16,
    },
    /// RFC 9112 §3.2: an HTTP/1.1 request must have a Host field.
    #[error("no Host field")]
    MissingHost,
    /// RFC 9112 §3.2: and only one.
    #[error("more than one Host field")]
    RepeatedHost,
    /// RFC 9110 §4.2: the host or port of the Host field or the target is empty or malformed.
    #[error("malformed host")]
    BadHost,
    /// RFC 9112 §6.3: two framings for one body is how requests are smuggled.
    #[error("both Content-Length and Transfer-Encoding")]
    AmbiguousFraming,
    /// RFC 9112 §6.3: refused even where the values agree.
    #[error("more than one Content-Length")]
    RepeatedContentLength,
    /// RFC 9110 §8.6: not a decimal number, or one that exceeds 64 bits.
    #[error("malformed Content-Length")]
    BadContentLength,
    /// RFC 9112 §6.1: chunked is not the final coding or is applied twice, the field is repeated or malformed, or the
    /// message may not have it.
    #[error("malformed Transfer-Encoding")]
    BadTransferEncoding,
    /// RFC 9112 §6.1: a coding other than chunked.
    #[error("unknown transfer coding")]
    UnknownTransferCoding,
    /// RFC 9112 §6.1: such a message "MUST be treated as if the framing is faulty".
    #[error("Transfer-Encoding on HTTP/1.0")]
    TransferEncodingOnHttp10,
    /// RFC 9110 §7.6.1: more than 16 options in `Connection`.
    #[error("too many connection options")]
    TooManyConnectionOptions,
    /// RFC 3986 §2.1: a percent sign that two hexadecimal digits do not follow, or an encoded byte that must not be.
    #[error("malformed percent-encoding")]
    BadEscape,
    /// `%00` ends the name early in servers written in C.
    #[error("encoded NUL")]
    EncodedNul,
    /// An encoded slash where the server behind would take it for a slash, or refuses it itself.
    #[error("encoded slash")]
    EncodedSlash,
    /// `.` or `..` with a parameter (`..;x`): servers that remove parameters first find a dot segment.
    #[error("dot segment with a parameter")]
    DotParameter,
    /// Dot segments that climb above the root, for servers that refuse them.
    #[error("path climbs above the root")]
    AboveRoot,
    /// RFC 9112 §3.2: a request target has no fragment.
    #[error("fragment in the request target")]
    Fragment,
}

/// One row per refusal: variant, status of the answer, name in metrics.
macro_rules! answers {
    ($($variant:pat => $status:literal, $name:literal;)*) => {
        impl HeadError {
            /// The status code of the answer to the client.
            pub const fn status(self) -> u16 {
                match self { $($variant => $status,)* }
            }

            /// A stable lower-case name for metrics and logs.
            pub const fn name(self) -> &'static str {
                match self { $($variant => $name,)* }
            }

            /// Every name that [`HeadError::name`] can return.
            pub const NAMES: &'static [&'static str] = &[$($name,)*];
        }
    };
}

answers! {
    Self::TooManyEmptyLines => 400, "too_many_empty_lines";
    Self::BadMethod => 400, "bad_method";
    Self::BadTarget => 400, "bad_target";
    Self::BadVersion => 400, "bad_version";
    Self::UnsupportedVersion => 505, "unsupported_version";
    Self::BadStatus => 400, "bad_status";
    Self::BareCarriageReturn => 400, "bare_carriage_return";
    Self::BareLineFeed => 400, "bare_line_feed";
    Self::ControlByte => 400, "control_byte";
    Self::ObsoleteFold => 400, "obsolete_fold";
    Self::WhitespaceBeforeColon => 400, "whitespace_before_colon";
    Self::EmptyFieldName => 400, "empty_field_name";
    Self::BadFieldName => 400, "bad_field_name";
    Self::RequestLineTooLong { .. } => 414, "request_line_too_long";
    Self::HeadTooLarge { .. } => 431, "head_too_large";
    Self::TooManyFields { .. } => 431, "too_many_fields";
    Self::TooManyConnectionOptions => 431, "too_many_connection_options";
    Self::MissingHost => 400, "missing_host";
    Self::RepeatedHost => 400, "repeated_host";
    Self::BadHost => 400, "bad_host";
    Self::AmbiguousFraming => 400, "ambiguous_framing";
    Self::RepeatedContentLength => 400, "repeated_content_length";
    Self::BadContentLength => 400, "bad_content_length";
    Self::BadTransferEncoding => 400, "bad_transfer_encoding";
    Self::UnknownTransferCoding => 501, "unknown_transfer_coding";
    Self::TransferEncodingOnHttp10 => 400, "transfer_encoding_on_http10";
    Self::BadEscape => 400, "bad_escape";
    Self::EncodedNul => 400, "encoded_nul";
    Self::EncodedSlash => 400, "encoded_slash";
    Self::DotParameter => 400, "dot_parameter";
    Self::AboveRoot => 400, "above_root";
    Self::Fragment => 400, "fragment";
}

/// Why a chunked body was refused; always the fault of the peer that sent it. The connection must be closed.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BodyError {
    /// RFC 9112 §7.1: the size is not one to sixteen hexadecimal digits, or does not fit.
    #[error("malformed chunk size")]
    BadChunkSize,
    /// RFC 9112 §7.1.1: a control byte, or no semicolon, between chunk size and the end of its line.
    #[error("malformed chunk extension")]
    BadChunkExtension,
    /// RFC 9112 §7.1.1: a server ought to limit the total of chunk extensions.
    #[error("chunk extensions exceed {limit} bytes")]
    ExtensionsTooLarge {
        /// The limit in bytes over the whole body.
        limit: u32,
    },
    /// RFC 9112 §7.1: chunk data is not followed by CRLF, or a line of the framing does not end in CRLF.
    #[error("missing CRLF")]
    MissingLineEnd,
    /// RFC 9112 §7.1.2: a malformed line in the trailer section.
    #[error("malformed trailer: {0}")]
    BadTrailer(HeadError),
}

impl BodyError {
    /// The status code of the answer, where one can still be sent.
    pub const fn status(self) -> u16 {
        match self {
            Self::BadTrailer(error) => error.status(),
            Self::ExtensionsTooLarge { .. } => 413,
            Self::BadChunkSize | Self::BadChunkExtension | Self::MissingLineEnd => 400,
        }
    }

    /// A stable lower-case name for metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::BadChunkSize => "bad_chunk_size",
            Self::BadChunkExtension => "bad_chunk_extension",
            Self::ExtensionsTooLarge { .. } => "chunk_extensions_too_large",
            Self::MissingLineEnd => "missing_line_end",
            Self::BadTrailer(_) => "bad_trailer",
        }
    }
}
