//! What a client is told of its errors.

macro_rules! error_codes {
    ($($(#[$doc:meta])* $id:ident = $code:literal, $name:literal;)*) => {
        /// Why a stream or a connection ends (RFC 9114 §8.1, RFC 9204 §6).
        #[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
        #[repr(u64)]
        pub enum ErrorCode {
            $($(#[$doc])* $id = $code,)*
        }

        impl ErrorCode {
            /// Every code.
            pub const ALL: &'static [Self] = &[$(Self::$id,)*];

            /// The name that the RFC has for it.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$id => $name,)* }
            }
        }
    };
}

error_codes! {
    /// Nothing is wrong.
    NoError = 0x100, "H3_NO_ERROR";
    /// The peer breaks the protocol in a way that has no code of its own.
    GeneralProtocolError = 0x101, "H3_GENERAL_PROTOCOL_ERROR";
    /// Something is wrong on our side.
    InternalError = 0x102, "H3_INTERNAL_ERROR";
    /// The peer opened a stream that is not taken.
    StreamCreationError = 0x103, "H3_STREAM_CREATION_ERROR";
    /// A stream that the connection needs was closed.
    ClosedCriticalStream = 0x104, "H3_CLOSED_CRITICAL_STREAM";
    /// A frame that must not come here or now.
    FrameUnexpected = 0x105, "H3_FRAME_UNEXPECTED";
    /// A frame whose payload is not what it must be.
    FrameError = 0x106, "H3_FRAME_ERROR";
    /// The peer asks for more than is reasonable.
    ExcessiveLoad = 0x107, "H3_EXCESSIVE_LOAD";
    /// A stream or push id that is too great, too small or in use.
    IdError = 0x108, "H3_ID_ERROR";
    /// A setting that must not be, or not so.
    SettingsError = 0x109, "H3_SETTINGS_ERROR";
    /// The control stream does not begin with settings.
    MissingSettings = 0x10a, "H3_MISSING_SETTINGS";
    /// The request was not looked at.
    RequestRejected = 0x10b, "H3_REQUEST_REJECTED";
    /// Nobody wants the response any more.
    RequestCancelled = 0x10c, "H3_REQUEST_CANCELLED";
    /// The stream ended before the request did.
    RequestIncomplete = 0x10d, "H3_REQUEST_INCOMPLETE";
    /// A malformed message.
    MessageError = 0x10e, "H3_MESSAGE_ERROR";
    /// The connection that CONNECT asked for was reset or could not be had.
    ConnectError = 0x10f, "H3_CONNECT_ERROR";
    /// The request has to be made by HTTP/1.1.
    VersionFallback = 0x110, "H3_VERSION_FALLBACK";
    /// A field section that cannot be decoded.
    QpackDecompressionFailed = 0x200, "QPACK_DECOMPRESSION_FAILED";
    /// An instruction on the encoder stream that cannot be followed.
    QpackEncoderStreamError = 0x201, "QPACK_ENCODER_STREAM_ERROR";
    /// An instruction on the decoder stream that cannot be followed.
    QpackDecoderStreamError = 0x202, "QPACK_DECODER_STREAM_ERROR";
}

impl ErrorCode {
    /// The code as it is sent.
    pub const fn code(self) -> u64 {
        self as u64
    }
}

/// Why a field section was refused; always the client's fault.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum HeadError {
    /// RFC 9204 §2.2: it is none, or refers to a dynamic table. The connection ends.
    #[error("a field section that cannot be decoded")]
    Compression,
    /// RFC 9114 §4.2.2: larger than the limits allow. Answered 431, or the stream ends.
    #[error("a field section that is too large")]
    TooLarge,
    /// RFC 9110 §15.5.15: the request line would be longer than the limits allow. Answered 414, or the stream ends.
    #[error("a target that is too long")]
    LongTarget,
    /// RFC 9114 §4.1.2: the stream ends.
    #[error("a malformed message")]
    Malformed,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_those_of_the_registry() {
        let codes: Vec<_> = ErrorCode::ALL.iter().map(|code| code.code()).collect();
        assert_eq!(codes, (0x100..=0x110).chain(0x200..=0x202).collect::<Vec<_>>());
        assert_eq!(ErrorCode::MessageError.code(), 0x10e);
        assert_eq!(ErrorCode::MessageError.name(), "H3_MESSAGE_ERROR");
    }
}
