//! `tidegate intercept`: an interception cache for DHTTP on a router.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use clap::Args;
use tidegate_dhttp::driver::{
    BindError, ClientOptions, DhttpClient, Listener, ServerOptions, serve as serve_listener,
};
use tidegate_dhttp::intercept::{CacheOptions, InterceptionCache};
use tidegate_dhttp::ports::ClientPorts;

use crate::cli::{Failure, LogForm};
use crate::{run, units};

/// How long requests in progress may go on after a signal.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);

/// What `tidegate intercept` takes.
#[derive(Args)]
pub(crate) struct InterceptArgs {
    /// Where the router's TPROXY rule sends requests to: ADDRESS:PORT.
    #[arg(long, value_name = "ADDR")]
    listen: SocketAddr,
    /// This host's own ADDRESS:PORT, from which requests are answered; another port than --listen's.
    #[arg(long, value_name = "ADDR")]
    from: SocketAddr,
    /// Memory for responses.
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    memory: String,
    /// Longest body that is stored.
    #[arg(long, value_name = "SIZE", default_value = "1MiB")]
    max_object: String,
}

fn check_addresses(args: &InterceptArgs) -> Result<(), Failure> {
    let InterceptArgs { listen, from, .. } = args;
    let wrong = |why: &str| Err(Failure::usage(format!("error: {why}")));
    if listen.port() == 0 || from.port() == 0 {
        return wrong("--listen and --from: expected definite ports from 1 to 32767");
    }
    if listen.port() == from.port() {
        return wrong("--from: expected another port than --listen's");
    }
    if from.ip().is_unspecified() {
        return wrong(
            "--from: expected one address of this host, by which clients know the cache, such as 192.0.2.1:8054",
        );
    }
    if listen.is_ipv4() != from.is_ipv4() {
        return wrong("--from: expected an address of the same family as --listen's");
    }
    Ok(())
}

/// What helps against an error at the start.
fn remedy(error: &BindError) -> &'static str {
    let BindError::Io(error) = error else {
        return "clients of DHTTP use ports 32768 to 65535; choose a lower one";
    };
    match error.kind() {
        io::ErrorKind::PermissionDenied => "it needs root, or CAP_NET_ADMIN",
        io::ErrorKind::AddrInUse => "another program has the port: choose another one",
        io::ErrorKind::AddrNotAvailable => "expected addresses of this host: `ip address` shows them",
        _ => "see `tidegate intercept --help`",
    }
}

/// Serves until a signal ends it.
pub(crate) fn run(args: &InterceptArgs, log: LogForm) -> Result<(), Failure> {
    let size = |name: &str, text: &str| {
        let bytes = units::size(text).map_err(|error| Failure::usage(format!("error: --{name}: {error}")))?;
        usize::try_from(bytes).map_err(|_| Failure::usage(format!("error: --{name}: more than there can be")))
    };
    let options = CacheOptions {
        memory_bytes: size("memory", &args.memory)?,
        object_bytes: size("max-object", &args.max_object)?,
    };
    check_addresses(args)?;
    run::start_log(log);
    run::raise_descriptor_limit();
    let listener = Listener::intercept(args.listen, args.from, &ClientPorts::default()).map_err(|error| {
        Failure::runtime(format!(
            "error: cannot intercept at {} and answer from {}: {error}; {}",
            args.listen,
            args.from,
            remedy(&error)
        ))
    })?;
    let failed = |error: io::Error| Failure::runtime(format!("error: cannot start: {error}"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    runtime.block_on(async {
        let ended = run::end_signal().map_err(failed)?;
        let client = DhttpClient::new(ClientOptions::default()).map_err(failed)?;
        let cache = InterceptionCache::new(client, options);
        let metrics = cache.metrics();
        // What must not be repeated passes by, on a connection.
        let protocol = ServerOptions { window: None, ..ServerOptions::new().map_err(failed)? };
        let (handle, serving) = serve_listener(listener, cache, protocol).map_err(failed)?;
        tracing::info!("intercepting at {}, answering from {}", args.listen, args.from);
        let mut serving = std::pin::pin!(serving);
        tokio::select! {
            () = &mut serving => {}
            () = ended => handle.drain(),
        }
        let _ = tokio::time::timeout(DRAIN_TIMEOUT, serving).await;
        tracing::info!(
            hits = metrics.intercept_hits_total.get(),
            misses = metrics.intercept_misses_total.get(),
            "stopped"
        );
        Ok(())
    })
}
