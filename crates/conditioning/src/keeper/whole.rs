//! When is a request whole, and what does its bundle say? A pure function of the bytes seen so far.

use tidegate_http::{
    BodyFraming, ChunkLimits, ChunkedDecoder, HeadError, HeadLimits, Method, Progress, RequestParser,
};

use crate::wire::{INLINE_BYTES, UNKNOWN_END, flags};

/// A request that can be handed on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Whole {
    /// Length of the head in bytes.
    pub head_bytes: u32,
    /// Length of head and content on the socket, or [`UNKNOWN_END`].
    pub socket_bytes: u64,
    /// Bits of [`flags`].
    pub flags: u16,
}

/// What the bytes so far are.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Progression {
    /// A part of a request.
    Incomplete,
    /// A head, and the client waits for leave to send the content (RFC 9110 §10.1.1), all of which is waited for.
    Expects,
    /// A request, whole as far as it is waited for.
    Whole(Whole),
}

/// Looks at the bytes at the front of a socket.
#[derive(Debug)]
pub struct Reader {
    parser: RequestParser,
    content_bytes: u64,
}

/// The greatest head: what a peek of one block can see, and a bundle can carry without a memory file.
pub const HEAD_BYTES: u32 = INLINE_BYTES as u32;

impl Reader {
    /// Content of up to `content_bytes` is waited for; of more, the server reads the rest from the socket as it comes.
    pub fn new(content_bytes: u64) -> Self {
        let limits = HeadLimits { head_bytes: HEAD_BYTES, ..HeadLimits::default() };
        Self { parser: RequestParser::new(limits), content_bytes }
    }

    /// Judges `bytes`, all that is on the socket or as much as was peeked at.
    ///
    /// # Errors
    /// The head is malformed, or chunked content that is there.
    pub fn judge(&mut self, bytes: &[u8]) -> Result<Progression, HeadError> {
        self.parser.reset();
        let Progress::Complete { length } = self.parser.parse(bytes)? else {
            return Ok(Progression::Incomplete);
        };
        let head = self.parser.head(bytes);
        let (present, content) = bytes.split_at(length);
        let (expects, framing) = (head.expect_continue, head.framing);
        let mut flags = 0;
        if head.method == Method::Head {
            flags |= flags::HEAD_METHOD;
        }
        if head.keep_alive {
            flags |= flags::PERSISTENT;
        }
        if head.method == Method::Connect || head.upgrade {
            flags |= flags::FINAL;
        }
        let content_length = match framing {
            BodyFraming::None => Some(0),
            BodyFraming::Length(length) => Some(length),
            BodyFraming::Chunked if expects => None,
            BodyFraming::Chunked | BodyFraming::UntilClose => match chunked_end(content)? {
                Some(end) => Some(end),
                None if (content.len() as u64) < self.content_bytes => return Ok(Progression::Incomplete),
                None => None,
            },
        };
        let Some(content_length) = content_length else {
            let head_bytes = present.len() as u32;
            return Ok(Progression::Whole(Whole { head_bytes, socket_bytes: UNKNOWN_END, flags }));
        };
        // RFC 9110 §10.1.1: the client waits for a word before it sends the content. Of more than is waited for, the
        // server decides, because to refuse is worth most there.
        let is_the_servers = expects && content_length > self.content_bytes;
        if (content.len() as u64) < content_length.min(self.content_bytes) && !is_the_servers {
            let waits = expects && content.is_empty();
            return Ok(if waits { Progression::Expects } else { Progression::Incomplete });
        }
        Ok(Progression::Whole(Whole {
            head_bytes: present.len() as u32,
            socket_bytes: (present.len() as u64).saturating_add(content_length),
            flags,
        }))
    }
}

/// Where chunked content ends within `bytes`.
fn chunked_end(mut bytes: &[u8]) -> Result<Option<u64>, HeadError> {
    let mut decoder = ChunkedDecoder::new(ChunkLimits::default());
    let mut end = 0;
    while !bytes.is_empty() {
        let decoded = decoder.decode(bytes).map_err(|_| HeadError::BadTransferEncoding)?;
        end += decoded.consumed as u64;
        if decoded.done {
            return Ok(Some(end));
        }
        bytes = &bytes[decoded.consumed..];
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTENT: u64 = 100;

    fn judge(bytes: &[u8]) -> Progression {
        Reader::new(CONTENT).judge(bytes).unwrap()
    }

    /// Incomplete before `whole` bytes are there, and the same from then on.
    fn whole_at(request: &[u8], whole: usize) -> Whole {
        for end in 0..whole {
            assert_eq!(judge(&request[..end]), Progression::Incomplete, "{end} bytes");
        }
        let Progression::Whole(result) = judge(&request[..whole]) else { panic!("not whole") };
        assert_eq!(judge(request), Progression::Whole(result));
        result
    }

    #[test]
    fn a_request_is_whole_with_its_content_and_not_before() {
        let get = b"GET / HTTP/1.1\r\nHost: a\r\n\r\nGET /next";
        assert_eq!(whole_at(get, 27), Whole { head_bytes: 27, socket_bytes: 27, flags: flags::PERSISTENT });
        let post = b"POST / HTTP/1.0\r\nContent-Length: 3\r\n\r\nabcGET";
        assert_eq!(whole_at(post, 41), Whole { head_bytes: 38, socket_bytes: 41, flags: 0 });
        let chunked =
            b"HEAD / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\nmore";
        let whole = whole_at(chunked, chunked.len() - 4);
        assert_eq!(whole.socket_bytes, chunked.len() as u64 - 4);
        assert_eq!(whole.flags, flags::PERSISTENT | flags::HEAD_METHOD);
    }

    #[test]
    fn long_content_is_not_waited_for() {
        let mut post = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5000\r\n\r\n".to_vec();
        let head = post.len();
        post.resize(head + CONTENT as usize, b'x');
        assert_eq!(whole_at(&post, post.len()).socket_bytes, head as u64 + 5000);
    }

    #[test]
    fn content_that_a_client_expects_leave_for_is_waited_for_unless_it_is_long() {
        let expects = |length: u64| {
            format!("PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\nExpect: 100-continue\r\n\r\n")
        };
        let mut request = expects(CONTENT).into_bytes();
        let head = request.len();
        for end in 0..head {
            assert_eq!(judge(&request[..end]), Progression::Incomplete, "{end} bytes");
        }
        assert_eq!(judge(&request), Progression::Expects);
        request.resize(head + CONTENT as usize, b'x');
        for end in head + 1..request.len() {
            assert_eq!(judge(&request[..end]), Progression::Incomplete, "{end} bytes");
        }
        assert!(matches!(judge(&request), Progression::Whole(_)));
        let long = expects(CONTENT + 1).into_bytes();
        assert_eq!(whole_at(&long, long.len()).socket_bytes, long.len() as u64 + CONTENT + 1);
        let chunked =
            b"PUT / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n";
        assert_eq!(whole_at(chunked, chunked.len()).socket_bytes, UNKNOWN_END);
    }

    #[test]
    fn what_may_be_another_protocol_and_what_has_no_known_end_is_handed_on_as_such() {
        let mut chunked = b"PUT / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nfff\r\n".to_vec();
        chunked.resize(chunked.len() + CONTENT as usize, b'x');
        let upgrade = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n";
        let tunnel = b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n";
        let length = |request: &[u8]| request.len() as u64;
        for (request, flags, socket_bytes) in [
            (&chunked[..], flags::PERSISTENT, UNKNOWN_END),
            (&upgrade[..], flags::PERSISTENT | flags::FINAL, length(upgrade)),
            (&tunnel[..], flags::PERSISTENT | flags::FINAL, length(tunnel)),
        ] {
            let Progression::Whole(whole) = judge(request) else { panic!("not whole") };
            assert_eq!((whole.flags, whole.socket_bytes), (flags, socket_bytes));
        }
    }

    #[test]
    fn a_malformed_head_is_an_error_with_an_answer() {
        let error = Reader::new(CONTENT).judge(b"GET / HTTP/1.1\r\nBad Field: 1\r\n").unwrap_err();
        assert_eq!(error.status(), 400);
    }

    /// It was waited for in vain, and ended without a word.
    #[test]
    fn so_is_malformed_content_that_is_there() {
        let head = "PUT / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
        for content in ["z\r\n", "1\r\nab", "5\r\nhello\r\n-1\r\n"] {
            let error = Reader::new(CONTENT).judge(format!("{head}{content}").as_bytes()).unwrap_err();
            assert_eq!(error.status(), 400, "{content}");
        }
    }
}
