//! `tidegate fetch`: one URL, by the transport that its scheme names.

use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use tidegate_trickles::client::Config;
use tidegate_trickles::fetch::{FetchError, Sink, Url};
use tidegate_trickles::udp::Format;

use crate::cli::Failure;

/// What `tidegate fetch` takes.
#[derive(Args)]
pub(crate) struct FetchArgs {
    /// What to fetch: trickles://HOST[:PORT][,HOST[:PORT]…]/PATH; all hosts are replicas of one service.
    url: String,
    /// Where to write the content; standard output by default.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Show the response's head on standard error.
    #[arg(short, long)]
    verbose: bool,
    /// Trickles: send TCP segments with a mark instead of UDP datagrams; needs root and nft.
    #[arg(long)]
    tcp_format: bool,
}

/// Fetches the URL; an error status is a failure, but its content is written all the same.
pub(crate) fn fetch(args: &FetchArgs) -> Result<(), Failure> {
    let scheme = args.url.split("://").next().unwrap_or_default().to_ascii_lowercase();
    let status = match scheme.as_str() {
        "trickles" => trickles(args),
        "http" | "https" | "dhttp" => {
            Err(Failure::usage(format!("error: {scheme}:// is not available in this version")))
        }
        _ => Err(Failure::usage(format!(
            "error: expected a URL that starts with trickles://, not {:?}",
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
    fn sink(&self) -> io::Result<Box<dyn Write>> {
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

    fn show(&self, line: &str) {
        if self.verbose {
            let _ = writeln!(io::stderr(), "{line}");
        }
    }
}

/// Head to standard error, content to the output.
struct Output<'a> {
    args: &'a FetchArgs,
    content: Option<Box<dyn Write>>,
}

impl Sink for Output<'_> {
    fn head(&mut self, _status: u16, head: &[u8]) -> io::Result<()> {
        for line in String::from_utf8_lossy(head).lines().filter(|line| !line.is_empty()) {
            self.args.show(&format!("< {line}"));
        }
        self.content = Some(self.args.sink()?);
        Ok(())
    }

    fn content(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.content.as_mut().map_or(Ok(()), |content| content.write_all(bytes))
    }
}

fn trickles(args: &FetchArgs) -> Result<u16, Failure> {
    let url =
        Url::parse(&args.url).map_err(|error| Failure::usage(format!("error: {}: {error}", args.url)))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::runtime(format!("error: cannot start: {error}")))?;
    let format = if args.tcp_format { Format::Tcp } else { Format::Udp };
    runtime.block_on(async {
        let mut output = Output { args, content: None };
        let status = match tidegate_trickles::fetch::fetch(&url, Config::default(), format, &mut output).await
        {
            // A reader that went away has seen enough.
            Err(FetchError::Sink(error)) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(200),
            result => result.map_err(|error| args.failed(error))?,
        };
        let flushed = output.content.as_mut().map_or(Ok(()), |content| content.flush());
        flushed.map_err(|error| Failure::runtime(format!("error: cannot write the content: {error}")))?;
        Ok(status)
    })
}
