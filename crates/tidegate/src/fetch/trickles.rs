//! `tidegate fetch trickles://…`.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::time::Duration;

use tidegate_trickles::fetch::{FetchError, Sink, Url};
use tidegate_trickles::http::MAX_URL_BYTES;
use tidegate_trickles::sealed::Encryption;
use tidegate_trickles::udp::{Connection, Format, Options, StreamError};
use tokio::net::TcpStream;

use super::{Answer, http};
use crate::cli::Failure;
use crate::fetch::FetchArgs;

/// How long servers may be silent before HTTP over TCP takes the place of Trickles, where it can be had: four opens.
const FALLBACK_AFTER: Duration = Duration::from_secs(10);
/// How long a TCP connection may take that finds out whether it can be had.
const TCP_TIMEOUT: Duration = Duration::from_secs(3);

/// Head to standard error, content to the output.
struct Output<'a> {
    args: &'a FetchArgs,
    connection: &'a Connection,
    content: Option<Box<dyn Write>>,
    /// Who has answered last.
    server: Option<SocketAddr>,
    location: Option<String>,
}

impl Sink for Output<'_> {
    fn head(&mut self, status: u16, head: &[u8]) -> io::Result<()> {
        let way = if self.args.tcp_format { "the format of TCP" } else { "UDP" };
        let secrecy = match self.args.trickles.encryption() {
            Encryption::Off => "not encrypted",
            Encryption::On => "encrypted",
            Encryption::Pinned(_) => "encrypted for the given key",
        };
        let server = self.connection.server();
        self.server = Some(server);
        self.location = super::location(head);
        self.args.show(&format!("* by Trickles in {way}, from {server}, {secrecy}"));
        for line in String::from_utf8_lossy(head).lines().filter(|line| !line.is_empty()) {
            self.args.show(&format!("< {line}"));
        }
        self.content = Some(self.args.open_sink(status)?);
        Ok(())
    }

    fn content(&mut self, bytes: &[u8]) -> io::Result<()> {
        let server = self.connection.server();
        if self.server.replace(server) != Some(server) {
            self.args.show(&format!("* {server} goes on"));
        }
        self.content.as_mut().map_or(Ok(()), |content| content.write_all(bytes))
    }
}

/// What an attempt over Trickles came to.
enum Ended {
    Answer(Answer),
    /// Nobody speaks it; this server takes TCP.
    ByTcp(SocketAddr),
}

/// Fetches a URL over Trickles, or over TCP where only that is spoken (Trickles §2.6).
pub(super) fn fetch(args: &FetchArgs) -> Result<Answer, Failure> {
    let url =
        Url::parse(&args.url).map_err(|error| Failure::usage(format!("error: {}: {error}", args.url)))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::runtime(format!("error: cannot start: {error}")))?;
    let ended = runtime.block_on(over_trickles(args, &url))?;
    drop(runtime);
    match ended {
        Ended::Answer(Answer { status: 414, .. }) if url.host.len() + url.target.len() > MAX_URL_BYTES => {
            Err(args.failed(format!(
                "the URL is too long for a Trickles request: host, path and query have at most {MAX_URL_BYTES} bytes (code 414)"
            )))
        }
        Ended::Answer(answer) => Ok(answer),
        Ended::ByTcp(server) => {
            tell(&format!("no Trickles server answers at {}: asking {server} by HTTP over TCP", args.url));
            http::fetch_from(args, &format!("http://{server}{}", url.target), Some(&url.host))
        }
    }
}

async fn over_trickles(args: &FetchArgs, url: &Url) -> Result<Ended, Failure> {
    let (servers, unknown) = url.resolve().await.map_err(|error| args.failed(error))?;
    for error in unknown {
        tell(&format!("{error}: the other replicas are asked"));
    }
    let format = if args.tcp_format { Format::Tcp } else { Format::Udp };
    let (config, encryption) = (args.trickles.config(), args.trickles.encryption());
    let options = Options { config, format, encryption, ..Options::to(servers.clone()) };
    let connection = Connection::new(&options).map_err(|error| args.failed(error))?;
    let mut output = Output { args, connection: &connection, content: None, server: None, location: None };
    // Who names a key wants nobody else's answer.
    let may_fall_back = !matches!(encryption, Encryption::Pinned(_));
    let silent = async {
        tokio::time::sleep(FALLBACK_AFTER).await;
        match first_by_tcp(&servers).await {
            _ if connection.is_answered() => {}
            Some(server) if may_fall_back => return server,
            _ => {
                let hint = match encryption {
                    Encryption::Off => "; it may require encryption: do without --no-encryption",
                    _ => "",
                };
                tell(&format!("no answer from {} yet, still asking{hint}", args.url));
            }
        }
        std::future::pending().await
    };
    let fetched = tokio::select! {
        fetched = tidegate_trickles::fetch::fetch(url, &connection, &mut output) => fetched,
        server = silent => return Ok(Ended::ByTcp(server)),
    };
    let status = match fetched {
        // A reader that went away has seen enough.
        Err(FetchError::Sink(error)) if error.kind() == io::ErrorKind::BrokenPipe => {
            return Ok(Ended::Answer(Answer { status: 200, location: None }));
        }
        Err(error) => {
            if may_fall_back
                && is_refused(&error)
                && let Some(server) = first_by_tcp(&servers).await
            {
                return Ok(Ended::ByTcp(server));
            }
            return Err(args.failed(error));
        }
        Ok(status) => status,
    };
    let flushed = output.content.as_mut().map_or(Ok(()), |content| content.flush());
    flushed.map_err(|error| Failure::runtime(format!("error: cannot write the content: {error}")))?;
    Ok(Ended::Answer(Answer { status, location: output.location }))
}

fn tell(what: &str) {
    // Nobody reads it: that is no reason to fail.
    let _ = writeln!(io::stderr(), "{what}");
}

/// Whether nothing speaks Trickles at any of the servers' ports.
fn is_refused(error: &FetchError) -> bool {
    matches!(error, FetchError::Transport(error) if StreamError::of(error) == Some(StreamError::Refused))
}

/// The first server that takes a TCP connection.
async fn first_by_tcp(servers: &[SocketAddr]) -> Option<SocketAddr> {
    for &server in servers {
        if let Ok(Ok(_)) = tokio::time::timeout(TCP_TIMEOUT, TcpStream::connect(server)).await {
            return Some(server);
        }
    }
    None
}
