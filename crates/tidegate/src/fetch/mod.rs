//! `tidegate fetch`: one URL, by the transport that its scheme names.

mod trickles;

use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use tidegate_dhttp::client::{CachePolicy, ClientConfig};
use tidegate_dhttp::driver::{ClientOptions, DhttpClient, FetchError, Fingerprint, Via};
use tidegate_trickles::sealed::{Encryption, PublicBytes, public_from_hex};

use crate::cli::Failure;

/// How long an HTTP server may take to begin its response.
const HTTP_TIMEOUT: Duration = Duration::from_secs(60);

/// What `tidegate fetch` takes.
#[derive(Args)]
pub(crate) struct FetchArgs {
    /// What to fetch: http://…, dhttp://…, dhttpt://… for DHTTP without UDP, or
    /// trickles://HOST:PORT,HOST:PORT,…/PATH, whose hosts are replicas of one service.
    url: String,
    /// Where to write the content; standard output by default.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Show the response's head, and which way it came, on standard error.
    #[arg(short, long)]
    verbose: bool,
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
    /// Trickles: the server's key, 64 hexadecimal digits as it logs them at its start. Only its owner can answer then; without
    /// it the server is asked for its key, which somebody in the middle of the path may forge.
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

    /// The transport's limits.
    pub(crate) fn config(&self) -> tidegate_trickles::client::Config {
        tidegate_trickles::client::Config { cubic: self.cubic, ..Default::default() }
    }
}

/// Fetches the URL; an error status is a failure, but its content is written all the same.
pub(crate) fn fetch(args: &FetchArgs) -> Result<(), Failure> {
    let scheme = args.url.split("://").next().unwrap_or_default().to_ascii_lowercase();
    let status = match scheme.as_str() {
        "http" => http(args),
        "dhttp" | "dhttpt" => dhttp(args),
        "trickles" => trickles::fetch(args),
        "https" => Err(Failure::usage(format!("error: {scheme}:// is not available in this version"))),
        _ => Err(Failure::usage(format!(
            "error: expected a URL that starts with http://, dhttp://, dhttpt:// or trickles://, not {:?}",
            args.url
        ))),
    }?;
    if status >= 400 {
        let reason = tidegate_http::status_reason(status);
        return Err(Failure::runtime(format!("error: {}: {status} {reason}", args.url)));
    }
    Ok(())
}

impl FetchArgs {
    /// Where the content goes. A file is made only once there is something to write.
    fn sink(&self) -> Result<Box<dyn Write>, Failure> {
        self.open_sink().map_err(|error| Failure::runtime(format!("error: {error}")))
    }

    fn open_sink(&self) -> io::Result<Box<dyn Write>> {
        match &self.output {
            None => Ok(Box::new(io::stdout().lock())),
            Some(path) => Ok(Box::new(File::create(path).map_err(|error| {
                io::Error::new(error.kind(), format!("cannot write {}: {error}", path.display()))
            })?)),
        }
    }

    fn failed(&self, error: impl std::fmt::Display) -> Failure {
        Failure::runtime(format!("error: {}: {error}", self.url))
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
            let _ = writeln!(io::stderr(), "{line}");
        }
    }
}

fn http(args: &FetchArgs) -> Result<u16, Failure> {
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .http_status_as_error(false)
        .timeout_recv_response(Some(HTTP_TIMEOUT))
        .build()
        .into();
    let mut response = agent.get(&args.url).call().map_err(|error| args.failed(error))?;
    args.show("* by HTTP");
    args.show(&format!("< {:?} {}", response.version(), response.status()));
    for (name, value) in response.headers() {
        args.show(&format!("< {name}: {}", String::from_utf8_lossy(value.as_bytes())));
    }
    let mut sink = args.sink()?;
    let mut body = response.body_mut().as_reader();
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let length = io::Read::read(&mut body, &mut buffer).map_err(|error| args.failed(error))?;
        if length == 0 {
            break;
        }
        args.write(&mut *sink, buffer.get(..length).unwrap_or_default())?;
    }
    args.flush(&mut *sink)?;
    Ok(response.status().as_u16())
}

fn dhttp(args: &FetchArgs) -> Result<u16, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::runtime(format!("error: cannot start: {error}")))?;
    runtime.block_on(async {
        let caches = CachePolicy { accept: !args.no_caches, ..CachePolicy::default() };
        let options = ClientOptions {
            protocol: ClientConfig { caches, ..ClientConfig::default() },
            ..ClientOptions::default()
        };
        let client = DhttpClient::new(options).map_err(|error| args.failed(error))?;
        let fetched = match args.tls {
            Some(server) => client.get_secured(&args.url, server).await,
            None => client.get(&args.url).await,
        };
        let mut response = fetched.map_err(|error| match error {
            FetchError::Url(_) => Failure::usage(format!("error: {}: {error}", args.url)),
            error => args.failed(error),
        })?;
        let way = match response.via {
            Via::Datagram => "in a datagram",
            Via::ServerConnection => "on a connection that the server opened",
            Via::ClientConnection => "on a connection of our own",
            Via::Http => "by HTTP",
        };
        args.show(&format!("* from {} {way}", response.from));
        let resends = client.metrics().dhttp_client_resends_total.get();
        if resends > 0 {
            args.show(&format!("* asked again {resends} times"));
        }
        for line in String::from_utf8_lossy(&response.head).lines().filter(|line| !line.is_empty()) {
            args.show(&format!("< {line}"));
        }
        let mut sink = args.sink()?;
        while let Some(piece) = response.body.next().await {
            args.write(&mut *sink, &piece.map_err(|error| args.failed(error))?)?;
        }
        args.flush(&mut *sink)?;
        Ok(response.status)
    })
}
