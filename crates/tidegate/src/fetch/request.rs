//! What is asked for besides a URL: method, header fields and content, given as curl's users expect it.

use std::fs::File;
use std::io::{self, Read};

use clap::Args;
use tidegate_dhttp::driver::{DhttpUrl, FetchBody, FetchRequest, method_of};
use tidegate_http::{HeadLimits, Progress, RequestParser};

use crate::cli::Failure;

/// Longest content, which is held in memory.
const MOST_BYTES: u64 = 256 << 20;

/// How a request is made, and with what.
#[derive(Args)]
pub(crate) struct RequestArgs {
    /// Content to send, by POST unless -X says otherwise; @FILE: of a file, @-: of standard input, byte by byte.
    /// Several are joined with '&'. Not for Trickles.
    #[arg(short, long, value_name = "DATA")]
    data: Vec<String>,
    /// The method. Not for Trickles.
    #[arg(short = 'X', long = "request", value_name = "METHOD")]
    method: Option<String>,
    /// A header field, 'Name: value'. May be given more than once. Not for Trickles.
    #[arg(short = 'H', long = "header", value_name = "FIELD")]
    headers: Vec<String>,
}

/// A request that is complete but for its URL.
pub(super) struct Asked {
    pub method: String,
    pub fields: Vec<(String, String)>,
    pub content: Option<Vec<u8>>,
}

impl RequestArgs {
    /// The options given, for schemes that do not know them.
    pub(super) fn given(&self) -> Option<&'static str> {
        match (self.data.is_empty(), &self.method, self.headers.is_empty()) {
            (false, ..) => Some("--data"),
            (_, Some(_), _) => Some("--request"),
            (_, _, false) => Some("--header"),
            _ => None,
        }
    }

    pub(super) fn read(&self) -> Result<Asked, Failure> {
        let content = self.content()?;
        let default = if content.is_some() { "POST" } else { "GET" };
        let method = self.method.clone().unwrap_or_else(|| default.to_owned());
        if method == "CONNECT" || !is_token(&method) {
            return Err(Failure::usage(format!(
                "error: --request: {method:?} is no method of a request for a URL"
            )));
        }
        let mut fields = Vec::new();
        for field in &self.headers {
            fields.push(header(field)?);
        }
        let has_type = fields.iter().any(|(name, _)| name.eq_ignore_ascii_case("content-type"));
        if content.is_some() && !has_type {
            fields.push(("Content-Type".to_owned(), "application/x-www-form-urlencoded".to_owned()));
        }
        Ok(Asked { method, fields, content })
    }

    fn content(&self) -> Result<Option<Vec<u8>>, Failure> {
        let mut content: Option<Vec<u8>> = None;
        for data in &self.data {
            let bytes = match data.strip_prefix('@') {
                None => data.clone().into_bytes(),
                Some("-") => read_all(io::stdin().lock(), "standard input")?,
                Some(path) => {
                    let file = File::open(path)
                        .map_err(|error| Failure::runtime(format!("error: cannot read {path}: {error}")))?;
                    read_all(file, path)?
                }
            };
            match &mut content {
                None => content = Some(bytes),
                Some(content) => {
                    content.push(b'&');
                    content.extend_from_slice(&bytes);
                }
            }
        }
        Ok(content)
    }
}

fn read_all(from: impl Read, name: &str) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    let read = from.take(MOST_BYTES + 1).read_to_end(&mut bytes);
    read.map_err(|error| Failure::runtime(format!("error: cannot read {name}: {error}")))?;
    if bytes.len() as u64 > MOST_BYTES {
        return Err(Failure::runtime(format!("error: {name} is longer than {} MiB", MOST_BYTES >> 20)));
    }
    Ok(bytes)
}

fn is_token(text: &str) -> bool {
    let is_sign = |byte| b"!#$%&'*+-.^_`|~".contains(&byte);
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || is_sign(byte))
}

fn header(field: &str) -> Result<(String, String), Failure> {
    let refused = |why: &str| Failure::usage(format!("error: --header: {field:?}: {why}"));
    let (name, value) = field.split_once(':').ok_or_else(|| refused("expected 'Name: value'"))?;
    let is_text = value.bytes().all(|byte| byte == b'\t' || (byte >= b' ' && byte != 0x7f));
    if !is_token(name) || !is_text {
        return Err(refused("expected a name without spaces, and a value in one line"));
    }
    let framing = ["content-length", "transfer-encoding", "connection", "expect"];
    if framing.iter().any(|own| name.eq_ignore_ascii_case(own)) {
        return Err(refused("fetch says this itself"));
    }
    Ok((name.to_owned(), value.trim().to_owned()))
}

impl Asked {
    /// For a DHTTP server, whose address is found later.
    pub fn of_dhttp(self, url: &DhttpUrl) -> Result<FetchRequest, Failure> {
        let nowhere = ([0, 0, 0, 0], url.port).into();
        let mut request = FetchRequest::get(url, nowhere);
        let mut head = format!("{} {} HTTP/1.1\r\n", self.method, url.target);
        let has_host = self.fields.iter().any(|(name, _)| name.eq_ignore_ascii_case("host"));
        if !has_host {
            head.push_str(&format!("Host: {}\r\n", url.authority()));
        }
        for (name, value) in &self.fields {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if let Some(content) = &self.content {
            head.push_str(&format!("Content-Length: {}\r\n", content.len()));
        }
        head.push_str("\r\n");
        request.method = method_of(head.as_bytes());
        request.head = head.into();
        request.body = FetchBody::Full(self.content.unwrap_or_default().into());
        let mut parser = RequestParser::new(HeadLimits::default());
        match parser.parse(&request.head) {
            Ok(Progress::Complete { .. }) => Ok(request),
            Ok(Progress::Incomplete) => Err(Failure::usage("error: the request is not complete")),
            Err(error) => Err(Failure::usage(format!("error: the request is refused: {error}"))),
        }
    }
}
