//! `tidegate gateway`: a local HTTP proxy in front of servers that may speak DHTTP.

use std::io;
use std::net::SocketAddr;

use clap::Args;
use tidegate_core::IpPrefix;
use tidegate_dhttp::client::{CachePolicy, ClientConfig};
use tidegate_dhttp::driver::{ClientOptions, DhttpClient};
use tidegate_dhttp::gateway::{GatewayOptions, serve};
use tokio::net::TcpListener;

use crate::cli::{Failure, LogForm};
use crate::{run, units};

/// What `tidegate gateway` takes.
#[derive(Args)]
pub(crate) struct GatewayArgs {
    /// Where HTTP clients connect: ADDRESS:PORT.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:3128")]
    listen: String,
    /// Clients that may use it, besides this host: an address or a prefix. May be given more than once.
    #[arg(long, value_name = "PREFIX")]
    allow: Vec<IpPrefix>,
    /// Take answers from servers only, not from caches on the way.
    #[arg(long)]
    no_caches: bool,
    /// Refuse answers of caches in this subnet. May be given more than once.
    #[arg(long, value_name = "PREFIX", conflicts_with = "no_caches")]
    refuse_cache: Vec<IpPrefix>,
    /// Refuse answers of caches for this site and those below it. May be given more than once.
    #[arg(long, value_name = "HOST")]
    refuse_caches_for: Vec<String>,
}

/// Serves until a signal ends it.
pub(crate) fn run(args: &GatewayArgs, log: LogForm) -> Result<(), Failure> {
    let listen = units::listen_address(&args.listen)
        .map_err(|error| Failure::usage(format!("error: --listen: {error}")))?;
    run::start_log(log);
    run::raise_descriptor_limit();
    let failed = |error: io::Error| Failure::runtime(format!("error: cannot start: {error}"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    runtime.block_on(async {
        let ended = run::end_signal().map_err(failed)?;
        let listener = bind(listen.address).await?;
        let client = DhttpClient::new(client_options(args)).map_err(failed)?;
        let mut options = GatewayOptions::default();
        options.allow.extend(args.allow.iter().copied());
        if let Ok(address) = listener.local_addr() {
            tracing::info!("listening on http://{address}");
        }
        tokio::select! {
            () = serve(listener, client, options, std::sync::Arc::default()) => {}
            () = ended => {}
        }
        tracing::info!("stopped");
        Ok(())
    })
}

fn client_options(args: &GatewayArgs) -> ClientOptions {
    let caches = CachePolicy {
        accept: !args.no_caches,
        except: args.refuse_cache.clone(),
        refuse_for_sites: args.refuse_caches_for.clone(),
    };
    ClientOptions { protocol: ClientConfig { caches, ..ClientConfig::default() }, ..ClientOptions::default() }
}

async fn bind(address: SocketAddr) -> Result<TcpListener, Failure> {
    TcpListener::bind(address).await.map_err(|error| {
        Failure::runtime(format!("error: cannot listen on {address}: {error}; choose another --listen"))
    })
}
