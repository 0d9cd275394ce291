//! `auth`: Basic (RFC 7617) or bearer (RFC 6750) authentication in a process of its own, so that the file of secrets is
//! unreadable to the server.

use std::collections::HashMap;
use std::time::Instant;

use base64::Engine;
use sha2::{Digest, Sha256};
use tidegate_core::metrics::{Kind, Sample};
use tidegate_http::{HeadLimits, Progress, RequestParser};

use crate::arguments::{Argument, ArgumentError, Arguments};
use crate::host::{Disposition, Filter, WINDOW};
use crate::neighbours::FilterError;
use crate::wire::Bundle;

pub(super) const ARGUMENTS: &[Argument] = &[
    Argument {
        key: "file",
        default: "",
        help: "lines NAME:SECRET, or NAME:sha256:DIGEST in hexadecimal; required",
    },
    Argument { key: "scheme", default: "basic", help: "basic: name and secret; bearer: one of the secrets" },
    WINDOW,
];

/// How clients prove who they are.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Scheme {
    /// Name and secret.
    Basic,
    /// A secret alone.
    Bearer,
}

type Secret = [u8; 32];

/// Who may come in. Only digests are kept, and only digests are compared: how long that takes tells nothing.
pub struct Credentials {
    scheme: Scheme,
    by_name: HashMap<Vec<u8>, Secret>,
    secrets: HashMap<Secret, ()>,
}

impl Credentials {
    /// Reads lines `NAME:SECRET` and `NAME:sha256:DIGEST`; empty ones and those with `#` in front count for nothing.
    ///
    /// # Errors
    /// The number of the first line that is neither.
    pub fn read(scheme: Scheme, text: &str) -> Result<Self, String> {
        let mut by_name = HashMap::new();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let wrong = || format!("line {number}: expected NAME:SECRET or NAME:sha256:DIGEST");
            let (name, secret) =
                line.split_once(':').filter(|(_, secret)| !secret.is_empty()).ok_or_else(wrong)?;
            let secret = match secret.strip_prefix("sha256:") {
                Some(digest) => from_hex(digest).ok_or_else(wrong)?,
                // Taken for a secret, the hash itself would let in whoever has seen the file.
                None if is_crypt(secret) => {
                    return Err(format!(
                        "line {number}: a hash of crypt(3) or htpasswd; NAME:sha256:DIGEST is known"
                    ));
                }
                None => Sha256::digest(secret).into(),
            };
            by_name.insert(name.as_bytes().to_vec(), secret);
        }
        let secrets = by_name.values().map(|&secret| (secret, ())).collect();
        Ok(Self { scheme, by_name, secrets })
    }

    /// Whether the value of an `Authorization` field proves that the client may come in.
    pub fn admit(&self, authorization: &[u8]) -> bool {
        let Some(space) = authorization.iter().position(|&byte| byte == b' ') else { return false };
        let (scheme, proof) = (&authorization[..space], authorization[space..].trim_ascii());
        match self.scheme {
            Scheme::Basic if scheme.eq_ignore_ascii_case(b"basic") => {
                let Ok(pair) = base64::engine::general_purpose::STANDARD.decode(proof) else { return false };
                let Some(colon) = pair.iter().position(|&byte| byte == b':') else { return false };
                let digest: Secret = Sha256::digest(&pair[colon + 1..]).into();
                self.by_name.get(&pair[..colon]) == Some(&digest)
            }
            Scheme::Bearer if scheme.eq_ignore_ascii_case(b"bearer") => {
                let digest: Secret = Sha256::digest(proof).into();
                self.secrets.contains_key(&digest)
            }
            _ => false,
        }
    }
}

/// What htpasswd(1) and mkpasswd(1) write: `$apr1$…`, `$2y$…`, `$6$…`, `{SHA}…`.
fn is_crypt(secret: &str) -> bool {
    let scheme = secret.strip_prefix('$').and_then(|rest| rest.split_once('$'));
    scheme.is_some_and(|(scheme, hash)| matches!(scheme.len(), 1..=8) && !hash.is_empty())
        || secret.starts_with("{SHA}")
}

fn from_hex(text: &str) -> Option<Secret> {
    let mut digest = [0; 32];
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    for (at, byte) in digest.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(digest)
}

/// The filter around [`Credentials`].
pub struct Auth {
    credentials: Credentials,
    parser: RequestParser,
    admitted: u64,
    refused: u64,
}

impl Auth {
    /// Admits who has these credentials.
    pub fn new(credentials: Credentials) -> Self {
        Self { credentials, parser: RequestParser::new(HeadLimits::default()), admitted: 0, refused: 0 }
    }
}

impl Filter for Auth {
    fn name(&self) -> &'static str {
        "auth"
    }

    fn arrive(&mut self, request: &mut Bundle, _now: Instant) -> Disposition {
        let bytes = request.head();
        self.parser.reset();
        let Ok(Progress::Complete { .. }) = self.parser.parse(bytes) else {
            return Disposition::Refuse(400, "");
        };
        let head = self.parser.head(bytes);
        // Two fields would leave it to the server which one counts: neither does.
        let mut fields =
            head.fields.iter().filter(|(_, name, _)| name.eq_ignore_ascii_case(b"authorization"));
        let authorization = fields.next().filter(|_| fields.next().is_none());
        if authorization.is_some_and(|(_, _, value)| self.credentials.admit(value)) {
            self.admitted += 1;
            return Disposition::Pass;
        }
        self.refused += 1;
        Disposition::Refuse(
            401,
            match self.credentials.scheme {
                Scheme::Basic => "WWW-Authenticate: Basic realm=\"tidegate\", charset=\"UTF-8\"\r\n",
                Scheme::Bearer => "WWW-Authenticate: Bearer realm=\"tidegate\"\r\n",
            },
        )
    }

    fn samples(&self) -> Vec<Sample> {
        let counter = |name, help, value| Sample { name, help, kind: Kind::Counter, value };
        vec![
            counter("admitted_total", "Requests with valid credentials.", self.admitted),
            counter("unauthorized_total", "Requests answered 401.", self.refused),
        ]
    }
}

pub(super) fn load(arguments: &Arguments) -> Result<Auth, FilterError> {
    arguments.number::<usize>("window")?;
    let scheme = match arguments.text("scheme") {
        "basic" => Scheme::Basic,
        "bearer" => Scheme::Bearer,
        value => {
            let (value, expected) = (value.to_owned(), "basic or bearer");
            return Err(ArgumentError::Value { key: "scheme", value, expected }.into());
        }
    };
    let file = arguments.text("file");
    let text = super::read_file("file", file)?;
    let wrong = |reason| ArgumentError::File { file: file.to_owned(), reason };
    Ok(Auth::new(Credentials::read(scheme, &text).map_err(wrong)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::filters::testing::request;

    // The digest is that of "open sesame".
    const FILE: &str = "# who may come in\n\nalice:secret:with:colons\nbob:sha256:41ef4bb0b23661e66301aac36066912dac037827b4ae63a7b1165a5aa93ed4eb\n";

    fn arrive(scheme: Scheme, fields: &str) -> Disposition {
        let mut auth = Auth::new(Credentials::read(scheme, FILE).unwrap());
        auth.arrive(
            &mut request(1, "192.0.2.1", &format!("GET / HTTP/1.1\r\nHost: a\r\n{fields}\r\n")),
            Instant::now(),
        )
    }

    fn basic(pair: &str) -> String {
        format!("Authorization: Basic {}\r\n", base64::engine::general_purpose::STANDARD.encode(pair))
    }

    #[test]
    fn hashes_that_are_not_known_are_no_secrets() {
        for hash in [
            "$apr1$Zf3.$0k1/",
            "$2y$05$c4WoMPo3SXsafkva.HHa6u",
            "$6$salt$hash",
            "$y$j9T$a$b",
            "{SHA}W6ph5Mm5Pz8=",
        ] {
            let text = format!("alice:secret\nbob:{hash}\n");
            let error = Credentials::read(Scheme::Basic, &text).err();
            let expected = "line 2: a hash of crypt(3) or htpasswd; NAME:sha256:DIGEST is known";
            assert_eq!(error.as_deref(), Some(expected), "{hash}");
        }
        for secret in ["$ecret", "$", "5$ or 6$", "$much longer than any scheme$x", "$a$"] {
            assert!(Credentials::read(Scheme::Basic, &format!("alice:{secret}")).is_ok(), "{secret}");
        }
    }

    #[test]
    fn a_name_with_its_secret_passes_and_nothing_else_does() {
        for good in ["alice:secret:with:colons", "bob:open sesame"] {
            assert_eq!(arrive(Scheme::Basic, &basic(good)), Disposition::Pass);
        }
        let twice = basic("alice:secret:with:colons") + &basic("mallory:x");
        for bad in [basic("alice:wrong"), basic("carol:secret"), basic("alice"), String::new(), twice] {
            assert!(matches!(arrive(Scheme::Basic, &bad), Disposition::Refuse(401, _)), "{bad}");
        }
        let bearer = "Authorization: Bearer open sesame\r\n";
        assert_eq!(arrive(Scheme::Bearer, bearer), Disposition::Pass);
        assert!(matches!(arrive(Scheme::Basic, bearer), Disposition::Refuse(401, _)));
        assert!(matches!(arrive(Scheme::Bearer, "Authorization: Bearer x\r\n"), Disposition::Refuse(401, _)));
    }

    #[test]
    fn a_line_that_is_no_credential_is_named() {
        let error = Credentials::read(Scheme::Basic, "a:b\nbroken\n").err().unwrap();
        assert!(error.starts_with("line 2:"), "{error}");
        assert!(Credentials::read(Scheme::Basic, "a:sha256:12\n").is_err());
    }
}
