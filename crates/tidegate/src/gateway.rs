//! `tidegate gateway`: a local HTTP proxy in front of servers that may speak DHTTP, or a door to a service over
//! Trickles.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use tidegate_core::IpPrefix;
use tidegate_dhttp::client::{CachePolicy, ClientConfig};
use tidegate_dhttp::driver::{ClientOptions, DhttpClient};
use tidegate_dhttp::gateway::{GatewayOptions, serve};
use tidegate_trickles::fetch::Url;
use tidegate_trickles::http::refusal;
use tidegate_trickles::udp::{Connection, Options, carry};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use crate::cli::{Failure, LogForm};
use crate::fetch::TricklesArgs;
use crate::{run, units};

/// Connections that are led over Trickles at once; more wait.
const MAX_LED: usize = 1024;
/// How long a client may take to read the end of what it was sent.
const LINGER: Duration = Duration::from_secs(2);
/// After a failed accept, as for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

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
    /// Lead every connection to this service instead: trickles://HOST:PORT,HOST:PORT,…, whose hosts are replicas. The
    /// port is 80 where none is given.
    #[arg(long, value_name = "URL", conflicts_with_all = ["no_caches", "refuse_cache", "refuse_caches_for"])]
    to: Option<String>,
    /// Refuse answers of caches for this site and those below it. May be given more than once.
    #[arg(long, value_name = "HOST")]
    refuse_caches_for: Vec<String>,
    #[command(flatten)]
    trickles: TricklesArgs,
}

/// Serves until a signal ends it.
pub(crate) fn run(args: &GatewayArgs, log: LogForm) -> Result<(), Failure> {
    let listen = units::listen_address(&args.listen)
        .map_err(|error| Failure::usage(format!("error: --listen: {error}")))?;
    let service = args.to.as_deref().map(Url::parse).transpose();
    let service = service.map_err(|error| Failure::usage(format!("error: --to: {error}")))?;
    match (&service, args.trickles.given()) {
        (Some(url), _) if url.target != "/" => {
            return Err(Failure::usage(format!(
                "error: --to: expected trickles://HOST[:PORT] without {}: clients say which path they want",
                url.target
            )));
        }
        (None, Some(option)) => {
            return Err(Failure::usage(format!(
                "error: {option} is for a service over Trickles: name one with --to"
            )));
        }
        _ => {}
    }
    run::start_log(log);
    run::raise_descriptor_limit();
    let failed = |error: io::Error| Failure::runtime(format!("error: cannot start: {error}"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    runtime.block_on(async {
        let ended = run::end_signal().map_err(failed)?;
        let listener = bind(listen.address).await?;
        if let Some(url) = service {
            let resolved = url.resolve().await;
            let (servers, unknown) = resolved.map_err(|error| Failure::runtime(format!("error: {error}")))?;
            for error in unknown {
                tracing::warn!("{error}: the other replicas are asked");
            }
            let options = Options {
                encryption: args.trickles.encryption(),
                config: args.trickles.config(),
                ..Options::to(servers)
            };
            // What is wrong here would be wrong for each client.
            Connection::new(&options).map_err(|error| Failure::runtime(format!("error: --to: {error}")))?;
            if let Ok(address) = listener.local_addr() {
                tracing::info!("listening on http://{address}");
            }
            tokio::select! {
                () = lead(listener, options, args.allow.clone()) => {}
                () = ended => {}
            }
            tracing::info!("stopped");
            return Ok(());
        }
        let client = DhttpClient::new(client_options(args)).map_err(failed)?;
        let mut options = GatewayOptions::default();
        options.allow.extend(args.allow.iter().copied());
        if let Ok(address) = listener.local_addr() {
            tracing::info!("listening on http://{address}");
        }
        tokio::select! {
            () = serve(listener, client, options, Arc::default()) => {}
            () = ended => {}
        }
        tracing::info!("stopped");
        Ok(())
    })
}

/// Leads each connection to a request of the transport, in which HTTP/1.1 is spoken as on a connection.
async fn lead(listener: TcpListener, options: Options, allow: Vec<IpPrefix>) {
    let free = Arc::new(Semaphore::new(MAX_LED));
    loop {
        let Ok(place) = Arc::clone(&free).acquire_owned().await else { return };
        let (mut client, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let address = peer.ip().to_canonical();
        if !address.is_loopback() && !allow.iter().any(|prefix| prefix.contains(address)) {
            continue;
        }
        let options = options.clone();
        tokio::spawn(async move {
            let _place = place;
            let mut answered = false;
            let opened = Connection::new(&options).and_then(|connection| Ok(connection.open()?));
            let led = match opened {
                Ok(stream) => {
                    let (reader, writer) = client.split();
                    carry(stream, reader, writer, || answered = true).await
                }
                Err(error) => Err(error),
            };
            if let Err(error) = led {
                tracing::debug!(%error, %peer, "a connection to the service failed");
                // In the middle of a response the client sees its connection end.
                if !answered {
                    let _ = client.write_all(&refusal(&error)).await;
                }
            }
            let _ = client.shutdown().await;
            // What it still sends would reset the connection before it has read.
            let rest = async { tokio::io::copy(&mut client, &mut tokio::io::sink()).await };
            let _ = tokio::time::timeout(LINGER, rest).await;
        });
    }
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
