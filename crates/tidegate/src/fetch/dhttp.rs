//! `tidegate fetch dhttp://…`.

use std::io;

use tidegate_dhttp::client::{CachePolicy, ClientConfig};
use tidegate_dhttp::driver::{Body, ClientOptions, DhttpClient, DhttpUrl, FetchError, FetchResponse, Via};

use super::{Answer, FetchArgs};
use crate::cli::Failure;

/// Longest response, head and body, that goes in one datagram.
const DATAGRAM_BYTES: usize = 1472;

pub(super) fn fetch(args: &FetchArgs) -> Result<Answer, Failure> {
    let url = DhttpUrl::parse(&args.url)
        .map_err(|error| Failure::usage(format!("error: {}: {error}", args.url)))?;
    let request = args.request.read()?.of_dhttp(&url)?;
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
        let fetched = client.fetch_named(&url, request, args.tls).await;
        let response = fetched.map_err(|error| args.failed(explain(&error, &url)))?;
        let FetchResponse { status, head, mut body, via, from, asked, .. } = response;
        let mut bytes = head.len();
        if via == Via::Datagram {
            // It is here, all of it.
            let whole = body.collect(usize::MAX).await.map_err(|error| args.failed(error))?;
            bytes += whole.len();
            body = Body::full(whole);
        }
        let who = if from.ip() == asked.ip() { "the server" } else { "the cache" };
        args.show(&match via {
            Via::Datagram if bytes > DATAGRAM_BYTES => format!("* from {from} in several datagrams"),
            Via::Datagram => format!("* from {from} in a datagram"),
            Via::ServerConnection => format!("* from {from} on a connection that {who} opened"),
            Via::ClientConnection => format!("* from {from} on a connection of our own"),
            Via::Http => format!("* from {from} by HTTP"),
        });
        let metrics = client.metrics();
        if metrics.dhttp_client_unreachable_total.get() > 0 {
            args.show("* UDP does not get to the server: ICMP says so");
        }
        if metrics.dhttp_client_silent_total.get() > 0 {
            args.show("* UDP does not get to the server, or back: no sign of life");
        }
        let resends = metrics.dhttp_client_resends_total.get();
        if resends > 0 {
            args.show(&format!("* asked again {resends} times"));
        }
        for line in String::from_utf8_lossy(&head).lines().filter(|line| !line.is_empty()) {
            args.show(&format!("< {line}"));
        }
        let mut sink = args.sink(status)?;
        while let Some(piece) = body.next().await {
            args.write(&mut *sink, &piece.map_err(|error| args.failed(error))?)?;
        }
        args.flush(&mut *sink)?;
        Ok(Answer { status, location: super::location(&head) })
    })
}

/// What went wrong, and what may help.
fn explain(error: &FetchError, url: &DhttpUrl) -> String {
    let host = if url.host.contains(':') { format!("[{}]", url.host) } else { url.host.clone() };
    let announced = format!("curl -sI http://{host}/ | grep -i alt-svc");
    match error {
        error if error.is_other_certificate() => {
            format!("{error}: it has a new one whenever it is started; ask which: {announced}")
        }
        FetchError::SpeaksHttp => format!("{error}: use http://, or the port that this shows: {announced}"),
        FetchError::NoAnswer { reason, .. } if reason.kind() == io::ErrorKind::ConnectionRefused => {
            format!(
                "{error}; is the server running, and is this its DHTTP port? It says so itself: {announced}"
            )
        }
        FetchError::NoAnswer { reason, .. } if reason.kind() == io::ErrorKind::TimedOut => {
            format!("{error}; is the host up, and do firewalls let UDP and TCP pass to port {}?", url.port)
        }
        _ => error.to_string(),
    }
}
