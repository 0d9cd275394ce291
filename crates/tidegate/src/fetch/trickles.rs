//! `tidegate fetch trickles://…`.

use std::io::{self, Write};

use tidegate_trickles::fetch::{FetchError, Sink, Url};
use tidegate_trickles::udp::Format;

use crate::cli::Failure;
use crate::fetch::FetchArgs;

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
        self.content = Some(self.args.open_sink()?);
        Ok(())
    }

    fn content(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.content.as_mut().map_or(Ok(()), |content| content.write_all(bytes))
    }
}

/// Fetches a URL over Trickles.
pub(super) fn fetch(args: &FetchArgs) -> Result<u16, Failure> {
    let url =
        Url::parse(&args.url).map_err(|error| Failure::usage(format!("error: {}: {error}", args.url)))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::runtime(format!("error: cannot start: {error}")))?;
    let format = if args.tcp_format { Format::Tcp } else { Format::Udp };
    runtime.block_on(async {
        let mut output = Output { args, content: None };
        let (config, encryption) = (args.trickles.config(), args.trickles.encryption());
        let fetched = tidegate_trickles::fetch::fetch(&url, config, format, encryption, &mut output).await;
        let status = match fetched {
            // A reader that went away has seen enough.
            Err(FetchError::Sink(error)) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(200),
            result => result.map_err(|error| args.failed(error))?,
        };
        let flushed = output.content.as_mut().map_or(Ok(()), |content| content.flush());
        flushed.map_err(|error| Failure::runtime(format!("error: cannot write the content: {error}")))?;
        Ok(status)
    })
}
