//! `normalize`: one form per URL; what is malformed or ambiguous is refused, the slashes of the "beck" attack (§3.1)
//! go. CONNECT goes with them: an origin server makes no tunnels, and what a tunnel carries is seen by no filter.

use std::time::Instant;

use tidegate_core::metrics::{Kind, Sample};
use tidegate_http::normalize::{Personality, normalize};
use tidegate_http::{FieldId, HeadError, HeadLimits, Method, Progress, RequestHead, RequestParser, Version};

use crate::arguments::{Argument, Arguments};
use crate::host::{Disposition, Filter, WINDOW};
use crate::neighbours::FilterError;
use crate::wire::Bundle;

pub(super) const ARGUMENTS: &[Argument] = &[
    Argument {
        key: "server",
        default: "strict",
        help: "whose reading of URLs applies: strict, apache, nginx or iis",
    },
    Argument {
        key: "connect",
        default: "no",
        help: "whether CONNECT is passed on, for a proxy behind the chain: no filter sees what a tunnel carries; no: refused with 501",
    },
    WINDOW,
];

/// Rewrites what is not in normal form, and refuses what has none.
pub struct Normalize {
    personality: Personality,
    parser: RequestParser,
    scratch: Vec<u8>,
    passes_connect: bool,
    rewritten: u64,
    refused: u64,
    tunnels_refused: u64,
}

/// What becomes of a request.
#[derive(Debug)]
pub enum Form {
    /// It is in normal form.
    Normal,
    /// This is its head in normal form.
    Rewritten(Vec<u8>),
    /// It asks for a tunnel (RFC 9110 §9.3.6).
    Tunnel,
}

impl Normalize {
    /// Reads URLs as the server behind does.
    pub fn new(personality: Personality) -> Self {
        Self {
            personality,
            parser: RequestParser::new(HeadLimits::default()),
            scratch: Vec::new(),
            passes_connect: false,
            rewritten: 0,
            refused: 0,
            tunnels_refused: 0,
        }
    }

    /// The head in normal form.
    ///
    /// # Errors
    /// It is malformed, incomplete, or has no normal form; the error knows the status to answer.
    pub fn normal_head(&mut self, bytes: &[u8]) -> Result<Form, HeadError> {
        self.parser.reset();
        let Progress::Complete { length } = self.parser.parse(bytes)? else {
            return Err(HeadError::BadTarget);
        };
        let head = self.parser.head(bytes);
        let normal = normalize(&head, self.personality, &mut self.scratch)?;
        if head.method == Method::Connect {
            return Ok(Form::Tunnel);
        }
        let host = head.fields.get(FieldId::Host);
        let same_host = host.is_none() && normal.authority.is_empty() || host == Some(normal.authority);
        let after_path = head.target.strip_prefix(normal.path);
        let same_target = match normal.query {
            None => after_path == Some(b""),
            Some(query) => after_path.and_then(|rest| rest.strip_prefix(b"?")) == Some(query),
        };
        if same_target && same_host {
            return Ok(Form::Normal);
        }
        let query = normal.query.map(|query| [b"?", query].concat()).unwrap_or_default();
        let target = [normal.path, &query].concat();
        Ok(Form::Rewritten(write_head(&head, &target, normal.authority, &bytes[..length])))
    }
}

fn write_head(head: &RequestHead<'_>, target: &[u8], host: &[u8], original: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(original.len());
    out.extend_from_slice(head.method_bytes);
    out.push(b' ');
    out.extend_from_slice(target);
    out.extend_from_slice(match head.version {
        Version::Http10 => b" HTTP/1.0\r\n",
        Version::Http11 | Version::Http2 | Version::Http3 => b" HTTP/1.1\r\n",
    });
    if !host.is_empty() {
        out.extend_from_slice(b"Host: ");
        out.extend_from_slice(host);
        out.extend_from_slice(b"\r\n");
    }
    for (id, name, value) in head.fields.iter() {
        if id != FieldId::Host {
            out.extend_from_slice(name);
            out.extend_from_slice(b": ");
            out.extend_from_slice(value);
            out.extend_from_slice(b"\r\n");
        }
    }
    out.extend_from_slice(b"\r\n");
    out
}

impl Filter for Normalize {
    fn name(&self) -> &'static str {
        "normalize"
    }

    fn arrive(&mut self, request: &mut Bundle, _now: Instant) -> Disposition {
        match self.normal_head(request.head()) {
            Ok(Form::Normal) => {}
            Ok(Form::Tunnel) if self.passes_connect => {}
            Ok(Form::Tunnel) => {
                self.tunnels_refused += 1;
                return Disposition::Refuse(501, "");
            }
            Ok(Form::Rewritten(head)) => {
                self.rewritten += 1;
                request.rewrite_head(&head);
            }
            Err(error) => {
                self.refused += 1;
                return Disposition::Refuse(error.status(), "");
            }
        }
        Disposition::Pass
    }

    fn samples(&self) -> Vec<Sample> {
        let counter = |name, help, value| Sample { name, help, kind: Kind::Counter, value };
        vec![
            counter("rewritten_total", "Requests brought into normal form.", self.rewritten),
            counter("without_normal_form_total", "Requests refused: malformed or ambiguous.", self.refused),
            counter("tunnels_refused_total", "CONNECT, refused.", self.tunnels_refused),
        ]
    }
}

/// Whose reading of URLs applies with these arguments.
///
/// # Errors
/// One is refused.
pub fn personality(arguments: &str) -> Result<Personality, FilterError> {
    Ok(check(&Arguments::parse(arguments, ARGUMENTS)?)?.personality)
}

pub(super) fn check(arguments: &Arguments) -> Result<Normalize, FilterError> {
    arguments.number::<usize>("window")?;
    let wrong = |_| arguments.wrong("server", "strict, apache, nginx or iis");
    let mut normalize = Normalize::new(arguments.text("server").parse().map_err(wrong)?);
    normalize.passes_connect = arguments.flag("connect")?;
    Ok(normalize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::filters::testing::request;
    use crate::wire::flags;

    fn arrive(head: &str) -> (Disposition, Bundle) {
        let mut request = request(1, "192.0.2.1", head);
        let disposition = Normalize::new(Personality::Strict).arrive(&mut request, Instant::now());
        (disposition, request)
    }

    #[test]
    fn the_slashes_of_the_beck_attack_never_reach_the_server() {
        let attack = format!("GET {} HTTP/1.1\r\nHost: a\r\nX: y\r\n\r\n", "/".repeat(8000));
        let (disposition, request) = arrive(&attack);
        assert_eq!(disposition, Disposition::Pass);
        assert_eq!(request.head(), b"GET / HTTP/1.1\r\nHost: a\r\nX: y\r\n\r\n");
        assert!(request.has(flags::REWRITTEN));
        assert_eq!(request.replaces as usize, attack.len());
    }

    #[test]
    fn a_normal_request_is_left_in_the_sockets_buffer() {
        let (disposition, request) = arrive("GET /a/b?c=d HTTP/1.1\r\nHost: example\r\n\r\n");
        assert_eq!((disposition, request.flags & flags::REWRITTEN), (Disposition::Pass, 0));
    }

    #[test]
    fn an_absolute_target_becomes_path_and_host() {
        let (_, request) = arrive("GET http://Example.org/%7ea/../b HTTP/1.1\r\nHost: other\r\n\r\n");
        assert_eq!(request.head(), b"GET /b HTTP/1.1\r\nHost: example.org\r\n\r\n");
    }

    #[test]
    fn a_request_without_normal_form_is_refused() {
        assert_eq!(arrive("GET /%00 HTTP/1.1\r\nHost: a\r\n\r\n").0, Disposition::Refuse(400, ""));
        assert_eq!(arrive("GET /a%zz HTTP/1.1\r\nHost: a\r\n\r\n").0, Disposition::Refuse(400, ""));
    }

    /// Servers that are no proxies take it for a request like any other, and what comes behind it for further ones.
    #[test]
    fn connect_is_refused_unless_a_proxy_is_to_have_it() {
        let tunnel = "CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n";
        for head in [tunnel.to_owned(), format!("\r\n{tunnel}")] {
            assert_eq!(arrive(&head).0, Disposition::Refuse(501, ""));
            let mut to_a_proxy = Normalize::new(Personality::Strict);
            to_a_proxy.passes_connect = true;
            let mut request = request(1, "192.0.2.1", &head);
            assert_eq!(to_a_proxy.arrive(&mut request, Instant::now()), Disposition::Pass);
            assert!(!request.has(flags::REWRITTEN));
        }
    }
}
