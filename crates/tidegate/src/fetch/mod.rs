//! `tidegate fetch`: one URL, by the transport that its scheme names.

mod dhttp;
mod http;
mod request;
mod trickles;

use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use tidegate_dhttp::driver::Fingerprint;
use tidegate_trickles::sealed::{Encryption, PublicBytes, public_from_hex};

use self::request::RequestArgs;
use crate::cli::Failure;

/// What `tidegate fetch` takes.
#[derive(Args)]
pub(crate) struct FetchArgs {
    /// What to fetch: http://…, dhttp://…, dhttpt://… for DHTTP without UDP, or trickles://HOST:PORT,HOST:PORT,…/PATH,
    /// whose hosts are replicas of one service. The port is 80 where none is given.
    url: String,
    /// Where to write the content; standard output by default. What came before a failure stays there; of an error or a
    /// redirect nothing is written to it.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Show the response's head, which way it came and from where, on standard error.
    #[arg(short, long)]
    verbose: bool,
    #[command(flatten)]
    request: RequestArgs,
    /// DHTTP: take answers from the server only, not from caches on the way.
    #[arg(long)]
    no_caches: bool,
    /// DHTTP: encrypt, for the server with this fingerprint, which its HTTP responses announce: curl -sI
    /// http://HOST/ | grep -i alt-svc
    #[arg(long, value_name = "FINGERPRINT")]
    tls: Option<Fingerprint>,
    /// Trickles: send TCP segments with a mark instead of UDP datagrams; needs root and nft.
    #[arg(long)]
    tcp_format: bool,
    #[command(flatten)]
    trickles: TricklesArgs,
}

/// What `fetch` and `gateway` take for Trickles.
#[derive(Args)]
pub(crate) struct TricklesArgs {
    /// Trickles: the server's key, 64 hexadecimal digits as it logs them at its start. Only its owner can answer then;
    /// without it the server is asked for its key, which somebody in the middle of the path may forge.
    #[arg(long, value_name = "KEY", value_parser = server_key)]
    server_key: Option<PublicBytes>,
    /// Trickles: send and receive in the clear.
    #[arg(long, conflicts_with = "server_key")]
    no_encryption: bool,
    /// Trickles: CUBIC as congestion control, where the server has it, in place of Reno; for long fat pipes.
    #[arg(long)]
    cubic: bool,
}

fn server_key(text: &str) -> Result<PublicBytes, &'static str> {
    public_from_hex(text).ok_or("expected 64 hexadecimal digits")
}

impl TricklesArgs {
    /// What the options ask for; without any, encryption for whoever answers.
    pub(crate) fn encryption(&self) -> Encryption {
        match self.server_key {
            Some(key) => Encryption::Pinned(key),
            None if self.no_encryption => Encryption::Off,
            None => Encryption::On,
        }
    }

    /// The options given, for what does not use Trickles.
    pub(crate) fn given(&self) -> Option<&'static str> {
        match self {
            Self { server_key: Some(_), .. } => Some("--server-key"),
            Self { no_encryption: true, .. } => Some("--no-encryption"),
            Self { cubic: true, .. } => Some("--cubic"),
            _ => None,
        }
    }

    /// The transport's limits.
    pub(crate) fn config(&self) -> tidegate_trickles::client::Config {
        tidegate_trickles::client::Config { cubic: self.cubic, ..Default::default() }
    }
}

/// What a response says about the URL.
struct Answer {
    status: u16,
    /// Where else it says to look.
    location: Option<String>,
}

/// Fetches the URL; an error status or a redirect is a failure, but its content is written to standard output all the
/// same.
pub(crate) fn fetch(args: &FetchArgs) -> Result<(), Failure> {
    let scheme = args.url.split("://").next().unwrap_or_default().to_ascii_lowercase();
    args.check_options(&scheme)?;
    let Answer { status, location } = match scheme.as_str() {
        "http" => http::fetch(args),
        "dhttp" | "dhttpt" => dhttp::fetch(args),
        "trickles" => trickles::fetch(args),
        "https" => Err(Failure::usage(format!("error: {scheme}:// is not available in this version"))),
        _ => Err(Failure::usage(format!(
            "error: expected a URL that starts with http://, dhttp://, dhttpt:// or trickles://, not {:?}",
            args.url
        ))),
    }?;
    let reason = tidegate_http::status_reason(status);
    match location.filter(|_| (300..400).contains(&status)) {
        Some(location) => Err(Failure::runtime(format!(
            "error: {}: {status} {reason}: it is at {}; fetch does not follow by itself",
            args.url,
            printable(&location)
        ))),
        None if status >= 400 => Err(Failure::runtime(format!("error: {}: {status} {reason}", args.url))),
        None => Ok(()),
    }
}

/// A URL as messages name it.
fn shortened(url: &str) -> String {
    const SHOWN: usize = 200;
    match url.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &url[..end]),
        None => url.to_owned(),
    }
}

/// A peer's text, with what would move a terminal's cursor, or the order of letters, escaped.
pub(crate) fn printable(text: &str) -> String {
    let is_harmful = |letter: char| {
        let reorders = matches!(letter, '\u{61c}' | '\u{200e}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        reorders || (letter.is_control() && letter != '\t')
    };
    let mut shown = String::with_capacity(text.len());
    for letter in text.chars() {
        match is_harmful(letter) {
            true => shown.extend(letter.escape_unicode()),
            false => shown.push(letter),
        }
    }
    shown
}

/// The field Location of a response's head.
fn location(head: &[u8]) -> Option<String> {
    let mut fields = head.split(|&byte| byte == b'\n').map(<[u8]>::trim_ascii);
    fields.find_map(|field| {
        let (name, value) = field.split_at_checked("location:".len())?;
        name.eq_ignore_ascii_case(b"location:")
            .then(|| String::from_utf8_lossy(value.trim_ascii()).into_owned())
    })
}

impl FetchArgs {
    /// That no option is given which the URL's scheme would ignore: who asks for encryption shall not believe to have
    /// it.
    fn check_options(&self, scheme: &str) -> Result<(), Failure> {
        let trickles = &self.trickles;
        let help =
            "use dhttp://HOST:PORT/ with the port that this shows: curl -sI http://HOST/ | grep -i alt-svc";
        let given = [
            (self.tls.is_some(), "--tls", "dhttp", help),
            (self.no_caches, "--no-caches", "dhttp", help),
            (self.tcp_format, "--tcp-format", "trickles", "use trickles://"),
            (trickles.given().is_some(), trickles.given().unwrap_or_default(), "trickles", "use trickles://"),
        ];
        let is_dhttp = scheme == "dhttpt";
        for (is_given, option, of, help) in given {
            if is_given && scheme != of && !(is_dhttp && of == "dhttp") {
                return Err(Failure::usage(format!(
                    "error: {option} is for {of}:// URLs, not for {scheme}://: {help}"
                )));
            }
        }
        match self.request.given() {
            Some(option) if scheme == "trickles" => Err(Failure::usage(format!(
                "error: {option} is for http:// and dhttp:// URLs, not for trickles://"
            ))),
            _ => Ok(()),
        }
    }

    /// Where the content of a response with `status` goes. A file is made only once there is something to write; what
    /// it had is not lost to a page that says why there is nothing.
    fn sink(&self, status: u16) -> Result<Box<dyn Write>, Failure> {
        self.open_sink(status).map_err(|error| Failure::runtime(format!("error: {error}")))
    }

    fn open_sink(&self, status: u16) -> io::Result<Box<dyn Write>> {
        match &self.output {
            None => Ok(Box::new(io::stdout().lock())),
            Some(_) if status >= 300 => Ok(Box::new(io::sink())),
            Some(path) => Ok(Box::new(File::create(path).map_err(|error| {
                io::Error::new(error.kind(), format!("cannot write {}: {error}", path.display()))
            })?)),
        }
    }

    fn failed(&self, error: impl std::fmt::Display) -> Failure {
        Failure::runtime(format!("error: {}: {error}", shortened(&self.url)))
    }

    /// What was read of a response that broke off has been written.
    fn write(&self, sink: &mut dyn Write, bytes: &[u8]) -> Result<(), Failure> {
        sink.write_all(bytes)
            .map_err(|error| Failure::runtime(format!("error: cannot write the content: {error}")))
    }

    fn flush(&self, sink: &mut dyn Write) -> Result<(), Failure> {
        sink.flush().map_err(|error| Failure::runtime(format!("error: cannot write the content: {error}")))
    }

    fn show(&self, line: &str) {
        if self.verbose {
            let _ = writeln!(io::stderr(), "{}", printable(line));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_escaped() {
        assert_eq!(
            printable("a\tb \u{e9}\u{1b}[1m\u{9b}2J\u{202e}z"),
            "a\tb \u{e9}\\u{1b}[1m\\u{9b}2J\\u{202e}z"
        );
    }

    #[test]
    fn location_is_found_in_any_case() {
        assert_eq!(location(b"HTTP/1.1 301 x\r\nlocation:  /a \r\n\r\n").as_deref(), Some("/a"));
        assert_eq!(location(b"HTTP/1.1 200 OK\r\nX-Location: /a\r\n\r\n"), None);
    }
}
