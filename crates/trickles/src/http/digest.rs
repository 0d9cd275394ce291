//! What a server needs to remember of the input it has consumed: where the output stands, and of a head that is not
//! complete the lines that matter (Trickles §4.2: "a digest of the data seen thus far").

use super::response;
use super::{Asked, Client};
use tidegate_http::normalize::{Personality, normalize};
use tidegate_http::{BodyFraming, HeadLimits, Method, Progress, RequestParser};

/// Bytes of a digest without the beginning of a head.
pub(super) const FIXED_BYTES: usize = 9;
const FLAG_DROPS_LINE: u8 = 1;
/// Lines of a head that a response depends on; all others are forgotten when a head does not fit.
const KEPT: [&[u8]; 11] = [
    b"host",
    b"range",
    b"if-range",
    b"if-match",
    b"if-none-match",
    b"if-modified-since",
    b"if-unmodified-since",
    b"connection",
    b"content-length",
    b"transfer-encoding",
    b"expect",
];

/// A request read from the input, or why it cannot be answered as asked.
#[derive(Debug)]
pub(super) struct HttpRequest {
    /// The whole head, to be parsed again for its fields.
    pub(super) head: Vec<u8>,
    pub(super) body: Vec<u8>,
    pub(super) host: Vec<u8>,
    /// Normalized path and query.
    pub(super) target: Vec<u8>,
    pub(super) head_only: bool,
    pub(super) keep_alive: bool,
    /// GET or HEAD without content.
    safe: bool,
    pub(super) http_10: bool,
    /// A status that answers whatever was asked for.
    pub(super) refused: Option<u16>,
}

/// What input gave.
#[derive(Debug)]
pub(super) enum Step {
    Request(Box<HttpRequest>),
    /// All input is digested and a head is not complete.
    More,
}

/// State of a conversation between two packets.
#[derive(Debug, Default)]
pub(super) struct Digest {
    /// Where the next response begins in the output.
    pub(super) output: u64,
    /// Nothing is read any more.
    pub(super) closed: bool,
    /// The line that is being read is of no interest, and forgotten.
    drops_line: bool,
    partial: Vec<u8>,
    /// Most bytes that a continuation may have on this connection, of this digest or of a response.
    most_bytes: usize,
    /// What `partial` was before the last request was taken from it.
    before: Option<(bool, Vec<u8>)>,
}

impl Digest {
    pub(super) fn decode(opaque: &[u8], most_bytes: usize) -> Option<Self> {
        if opaque.is_empty() {
            return Some(Self { most_bytes, ..Self::default() });
        }
        let (fixed, partial) = opaque.split_first_chunk::<FIXED_BYTES>()?;
        let (output, [flags]) = fixed.split_first_chunk::<8>().map(|(output, flags)| (*output, flags))?
        else {
            return None;
        };
        Some(Self {
            output: u64::from_be_bytes(output),
            drops_line: flags & FLAG_DROPS_LINE != 0,
            partial: partial.to_vec(),
            most_bytes,
            ..Self::default()
        })
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut opaque = self.output.to_be_bytes().to_vec();
        opaque.push(if self.drops_line { FLAG_DROPS_LINE } else { 0 });
        opaque.extend_from_slice(&self.partial);
        opaque
    }

    /// Notes that a request has a response that ends at `output`.
    pub(super) fn answered(&mut self, output: u64, closes: bool) {
        self.output = output;
        self.closed |= closes;
        self.before = None;
    }

    /// Takes back the last request: it will be read again.
    pub(super) fn unread(&mut self) {
        if let Some((drops_line, partial)) = self.before.take() {
            (self.drops_line, self.partial) = (drops_line, partial);
        }
    }

    /// Forgets the head that is being read: it will be read again from its start.
    pub(super) fn forget_head(&mut self) {
        self.partial.clear();
        self.drops_line = false;
    }

    /// Takes input off `rest` until a request is complete or nothing is left.
    /// `takes_content` says whether the request for a host and target may have another method than GET and HEAD, and
    /// content: as much as a digest holds, or as came with the end of the head.
    pub(super) fn feed(
        &mut self,
        rest: &mut &[u8],
        last: bool,
        takes_content: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Step {
        if self.closed {
            *rest = &[];
            return Step::More;
        }
        self.before = Some((self.drops_line, self.partial.clone()));
        let known = self.partial.len();
        if self.drops_line {
            let line = rest.iter().position(|&byte| byte == b'\n').map_or(rest.len(), |at| at + 1);
            self.drops_line = line == 0 || rest[line - 1] != b'\n';
            *rest = &rest[line..];
        }
        self.partial.extend_from_slice(rest);
        let mut parser = RequestParser::new(HeadLimits::default());
        match parser.parse(&self.partial) {
            Ok(Progress::Complete { length }) => {
                let head = self.partial[..length].to_vec();
                let (mut request, content) = read_head(&parser, head, self.most_name_bytes(), takes_content);
                let end = length + usize::try_from(content).unwrap_or(usize::MAX - length);
                if self.partial.len() < end {
                    // Of a request with content, all is kept until it is complete.
                    *rest = &[];
                    return match !last && end <= self.most_partial_bytes() {
                        true => Step::More,
                        false => Step::Request(Box::new(HttpRequest::refused(if last { 400 } else { 413 }))),
                    };
                }
                // The digest so far has no complete request, so that it ends in the new bytes.
                *rest = &rest[end.saturating_sub(known).min(rest.len())..];
                request.body = self.partial[length..end].to_vec();
                self.partial.clear();
                Step::Request(Box::new(request))
            }
            Ok(Progress::Incomplete) => {
                *rest = &[];
                if last && !self.partial.iter().all(u8::is_ascii_whitespace) {
                    return Step::Request(Box::new(HttpRequest::refused(400)));
                }
                match self.shrink() {
                    true => Step::More,
                    false => {
                        let line = self.partial.iter().position(|&byte| byte == b'\n');
                        let too_long = line.unwrap_or(self.partial.len()) > self.most_name_bytes();
                        Step::Request(Box::new(HttpRequest::refused(if too_long { 414 } else { 431 })))
                    }
                }
            }
            Err(_) => {
                *rest = &[];
                Step::Request(Box::new(HttpRequest::refused(400)))
            }
        }
    }

    fn most_partial_bytes(&self) -> usize {
        self.most_bytes.saturating_sub(FIXED_BYTES)
    }

    /// Most bytes of host and target together that the continuation of a response has room for.
    fn most_name_bytes(&self) -> usize {
        self.most_bytes.saturating_sub(response::FIXED_BYTES)
    }

    /// Forgets lines that do not matter where the head does not fit. `false` if it still does not.
    fn shrink(&mut self) -> bool {
        let limit = self.most_partial_bytes();
        if self.partial.len() <= limit {
            return true;
        }
        let mut kept = Vec::with_capacity(limit);
        for (index, line) in self.partial.split_inclusive(|&byte| byte == b'\n').enumerate() {
            let name = line.split(|&byte| byte == b':').next().unwrap_or(line);
            let matters = index == 0 || KEPT.iter().any(|kept| kept.eq_ignore_ascii_case(name));
            if matters {
                kept.extend_from_slice(line);
            } else if !line.ends_with(b"\n") {
                if name.len() == line.len() {
                    // A name that is not complete.
                    kept.extend_from_slice(line);
                } else {
                    self.drops_line = true;
                }
            }
        }
        self.partial = kept;
        self.partial.len() <= limit
    }
}

impl HttpRequest {
    /// Whether it may be answered beside others, and again (RFC 9110 §9.2.1). What is refused does nothing.
    pub(super) fn is_safe(&self) -> bool {
        self.safe || self.refused.is_some()
    }

    /// As the site is asked.
    pub(super) fn asked(&self, Client { peer, proved }: Client, request: u32) -> Asked<'_> {
        let (host, target, head, body) = (&self.host, &self.target, &self.head, &self.body);
        Asked { peer, proved, request, host, target, head, body }
    }

    fn refused(status: u16) -> Self {
        Self {
            head: Vec::new(),
            body: Vec::new(),
            host: Vec::new(),
            target: Vec::new(),
            head_only: false,
            keep_alive: false,
            safe: true,
            http_10: false,
            refused: Some(status),
        }
    }
}

/// The request, and how many bytes of content follow its head.
fn read_head(
    parser: &RequestParser,
    bytes: Vec<u8>,
    most_name_bytes: usize,
    takes_content: &mut dyn FnMut(&[u8], &[u8]) -> bool,
) -> (HttpRequest, u64) {
    let mut scratch = Vec::new();
    let head = parser.head(&bytes);
    let Ok(normalized) = normalize(&head, Personality::Strict, &mut scratch) else {
        return (HttpRequest::refused(400), 0);
    };
    let mut target = normalized.path.to_vec();
    if let Some(query) = normalized.query {
        target.push(b'?');
        target.extend_from_slice(query);
    }
    let mut host = normalized.authority.to_vec();
    let (refused, content) = match (head.method, head.framing) {
        _ if host.len() + target.len() > most_name_bytes => {
            (host, target) = (Vec::new(), Vec::new());
            (Some(414), 0)
        }
        (Method::Get | Method::Head, BodyFraming::None | BodyFraming::Length(0)) => (None, 0),
        (Method::Connect, _) => (Some(405), 0),
        (_, framing) if takes_content(&host, &target) => match framing {
            BodyFraming::None => (None, 0),
            BodyFraming::Length(length) => (None, length),
            // Its end would have to be looked for in what is kept.
            _ => (Some(411), 0),
        },
        // A body would have to be read, and remembered how much of it is.
        (Method::Get | Method::Head, _) => (Some(413), 0),
        _ => (Some(405), 0),
    };
    let request = HttpRequest {
        host,
        target,
        body: Vec::new(),
        head_only: head.method == Method::Head,
        keep_alive: head.keep_alive && refused.is_none(),
        safe: matches!(head.method, Method::Get | Method::Head) && content == 0,
        http_10: head.version == tidegate_http::Version::Http10,
        refused,
        head: bytes,
    };
    (request, content)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::user::MAX_OPAQUE_BYTES;

    /// Feeds `input` in pieces that end at each of `splits`, with the digest written and read in between.
    fn feed(input: &[u8], splits: &[usize]) -> Vec<HttpRequest> {
        let (mut opaque, mut requests, mut from) = (Vec::new(), Vec::new(), 0);
        for &to in splits.iter().chain(&[input.len()]) {
            let mut rest = &input[from..to];
            loop {
                let mut digest = Digest::decode(&opaque, MAX_OPAQUE_BYTES).unwrap();
                let step = digest.feed(&mut rest, false, &mut |_, _| false);
                if let Step::Request(request) = step {
                    digest.answered(digest.output + 1, request.refused.is_some());
                    let closed = digest.closed;
                    opaque = digest.encode();
                    requests.push(*request);
                    if closed {
                        return requests;
                    }
                } else {
                    opaque = digest.encode();
                    assert!(rest.is_empty() && opaque.len() <= MAX_OPAQUE_BYTES);
                    break;
                }
            }
            from = to;
        }
        requests
    }

    #[test]
    fn heads_split_at_every_byte_are_read_as_whole_ones() {
        let input = b"GET /a?b HTTP/1.1\r\nHost: H.example:80\r\n\r\nHEAD /c HTTP/1.0\r\nHost: h\r\n\r\n";
        for split in 0..input.len() {
            let requests = feed(input, &[split]);
            assert_eq!(requests.len(), 2, "split at {split}");
            assert_eq!((&requests[0].host[..], &requests[0].target[..]), (&b"h.example"[..], &b"/a?b"[..]));
            assert!(requests[0].keep_alive && !requests[0].head_only);
            assert!(!requests[1].keep_alive && requests[1].head_only && requests[1].http_10);
        }
    }

    #[test]
    fn a_head_with_long_lines_that_do_not_matter_is_digested() {
        let cookie = "x".repeat(3000);
        let input = format!(
            "GET / HTTP/1.1\r\nHost: h\r\nCookie: {cookie}\r\nRange: bytes=1-2\r\nAccept: */*\r\n\r\n"
        );
        let splits: Vec<usize> =
            (1..input.len() / 700 + 1).map(|n| n * 700).filter(|&at| at < input.len()).collect();
        let requests = feed(input.as_bytes(), &splits);
        assert_eq!(requests.len(), 1);
        assert!(requests[0].refused.is_none());
        assert!(String::from_utf8_lossy(&requests[0].head).contains("Range: bytes=1-2"));
    }

    #[test]
    fn a_url_as_long_as_a_continuation_holds_is_taken_and_a_longer_one_refused_whether_whole_or_split() {
        let most = MAX_OPAQUE_BYTES - response::FIXED_BYTES;
        let get = |bytes: usize| format!("GET /{} HTTP/1.1\r\nHost: h\r\n\r\n", "x".repeat(bytes - 2));
        for splits in [&[][..], &[300]] {
            let taken = feed(get(most).as_bytes(), splits);
            assert_eq!((taken[0].refused, taken[0].target.len()), (None, most - 1));
            let refused = feed(get(most + 1).as_bytes(), splits);
            // What says so has to fit.
            assert_eq!((refused[0].refused, refused[0].target.len()), (Some(414), 0));
        }
    }

    #[test]
    fn a_head_that_cannot_be_digested_is_refused() {
        let input = format!("GET /{} HTTP/1.1\r\nHost: h\r\n\r\n", "x".repeat(3000));
        let requests = feed(input.as_bytes(), &[1000]);
        assert_eq!(requests[0].refused, Some(414));
        let input = format!("GET / HTTP/1.1\r\nHost: h\r\nRange: bytes={}\r\n\r\n", "1".repeat(3000));
        assert_eq!(feed(input.as_bytes(), &[1000])[0].refused, Some(431));
        assert_eq!(feed(b"GET\x01 / HTTP/1.1\r\n\r\n", &[])[0].refused, Some(400));
        assert_eq!(
            feed(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n", &[])[0].refused,
            Some(405)
        );
    }

    #[test]
    fn content_is_waited_for_where_the_site_takes_it_and_refused_where_it_is_long() {
        let whole = b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhelloGET";
        for split in 1..whole.len() {
            let (mut opaque, mut found) = (Vec::new(), Vec::new());
            for mut piece in [&whole[..split], &whole[split..]] {
                while !piece.is_empty() {
                    let mut digest = Digest::decode(&opaque, MAX_OPAQUE_BYTES).unwrap();
                    if let Step::Request(request) = digest.feed(&mut piece, false, &mut |_, _| true) {
                        digest.answered(1, false);
                        found.push(*request);
                    }
                    opaque = digest.encode();
                }
            }
            assert_eq!(found.len(), 1, "split at {split}");
            assert_eq!((&found[0].body[..], found[0].refused), (&b"hello"[..], None), "split at {split}");
        }
        let mut long = &b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 5000\r\n\r\n"[..];
        let mut digest = Digest::decode(b"", MAX_OPAQUE_BYTES).unwrap();
        let step = digest.feed(&mut long, false, &mut |_, _| true);
        assert!(matches!(step, Step::Request(request) if request.refused == Some(413)));
    }
}
