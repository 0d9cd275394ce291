//! HTTP/2 over one client connection (RFC 9113): frames are the library's, limits and streams are ours.
//!
//! What becomes of a stream is [`crate::streams`]' business.

mod frames;
mod heads;
mod line;
mod stream;

use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use h2::Reason;
use h2::server::{Builder, Connection};
use tidegate_core::hooks::Slow;
use tidegate_http::Version;

use crate::data_core::client::Client;
use crate::data_core::clients::Busy;
use crate::http2::line::{Line, Socket};
use crate::session::deadlines::Waiting;
use crate::session::transmit::{RateWatch, unacknowledged};
use crate::streams::{CONNECTION_WINDOW_BYTES, Carrier, End, STREAM_WINDOW_BYTES, STREAMS, Shared, Streams};

pub(crate) use heads::trailers;

/// Bytes of each response that wait for the connection.
const SEND_BUFFER_BYTES: usize = 64 * 1024;
/// Streams reset by either side that are remembered, so that what was under way for them is told from an error.
const RESET_STREAMS: usize = 32;
/// How long what ends a connection may take to be sent.
const GOODBYE: Duration = Duration::from_secs(1);
/// How often it is looked at how much the client has taken, once nobody else waits for that.
const LOOK_MS: u64 = 1000;

/// The connection has ended for what came on it, or is broken.
fn broken(shared: &Shared, error: &h2::Error) -> Result<(), CutOff> {
    let Shared { core, carrier, streams, .. } = shared;
    tracing::debug!(client = %carrier.peer(), %error, "HTTP/2 ends");
    if error.is_io() || error.is_remote() {
        return Ok(());
    }
    if error.reason() == Some(Reason::ENHANCE_YOUR_CALM) {
        core.metrics.http2_floods_total.add(1);
    }
    shared.refused();
    // Whoever is kept out is not waited for.
    if streams.why_end() == Some(End::Closed) { Err(CutOff) } else { Ok(()) }
}

/// Nothing more is sent, and nobody waits for the client to take what was.
pub(crate) struct CutOff;

/// Serves a connection on which the client chose HTTP/2, until there is nothing more to say on it.
pub(crate) async fn serve(busy: &Busy) -> Result<(), CutOff> {
    let Ok(local) = busy.client.local_addr() else { return Ok(()) };
    let line = Line::new(&busy.core, &busy.client);
    let limits = busy.core.with_plan(|plan| plan.limits.head);
    let mut builder = Builder::new();
    builder
        .max_concurrent_streams(STREAMS)
        .initial_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_header_list_size(limits.head_bytes)
        .max_send_buffer_size(SEND_BUFFER_BYTES)
        .max_concurrent_reset_streams(RESET_STREAMS);
    let shared = Rc::new(Shared {
        core: Rc::clone(&busy.core),
        carrier: Rc::clone(&busy.client) as Rc<dyn Carrier>,
        version: Version::Http2,
        local,
        streams: Streams::default(),
    });
    let socket = Socket(Rc::clone(&line));
    // The deadline of the first request's head is that of the preface too.
    let handshake = tokio::select! {
        // What a deadline ends looks like the client's end, too.
        biased;
        () = busy.client.expired() => {
            busy.core.metrics.header_timeouts_total.add(1);
            busy.core.too_slow(busy.client.place, busy.client.peer(), Slow::Head);
            return Ok(());
        }
        handshake = line.sending(builder.handshake::<_, Bytes>(socket)) => handshake,
    };
    match handshake {
        Ok(connection) => run(connection, &shared, &busy.client, &line).await,
        Err(error) => broken(&shared, &error),
    }
}

async fn run(
    mut connection: Connection<Socket, Bytes>,
    shared: &Rc<Shared>,
    client: &Client,
    line: &Line,
) -> Result<(), CutOff> {
    let Shared { core, streams, .. } = &**shared;
    let mut watch = RateWatch::new(core);
    let began_ms = core.clock.elapsed_ms();
    let reason = loop {
        let is_leaving = core.is_draining();
        match streams.why_end() {
            Some(End::TooSlow) => {
                core.too_slow(client.place, client.peer(), Slow::Reading);
                client.set_zero_linger();
                return Err(CutOff);
            }
            Some(End::Reset) => {
                client.set_zero_linger();
                return Err(CutOff);
            }
            Some(End::Closed) => return Err(CutOff),
            Some(End::LastStreams) => connection.graceful_shutdown(),
            None if is_leaving => connection.graceful_shutdown(),
            None => {}
        }
        if streams.is_rapid_reset(core.clock.elapsed_ms() - began_ms) || line.is_flood() {
            core.metrics.http2_floods_total.add(1);
            let _ = core.answers_malformed(client.place, client.peer());
            break Reason::ENHANCE_YOUR_CALM;
        }
        let is_first = streams.begun() == 0;
        // A response whose end the client has not taken yet keeps it from being idle.
        let is_taking =
            streams.open() == 0 && !is_first && (connection.has_streams() || unacknowledged(client) > 0);
        match streams.open() {
            0 if is_first => {}
            0 if is_taking => client.slot.clear(),
            0 => client.slot.set(Waiting::NextRequest, core.deadline(core.times().keep_alive_ms)),
            _ => client.slot.clear(),
        }
        tokio::select! {
            biased;
            () = client.expired() => {
                if client.slot.expired() == Some(Waiting::Nothing) {
                    // It is ended to make room: what it keeps waiting is what there is too little of.
                    streams.end(End::TooSlow);
                    continue;
                }
                if is_first {
                    core.metrics.header_timeouts_total.add(1);
                    core.too_slow(client.place, client.peer(), Slow::Head);
                } else {
                    core.metrics.idle_timeouts_total.add(1);
                }
                break Reason::NO_ERROR;
            }
            () = streams.changed() => {}
            // Clients learn at once that they are to go elsewhere, and at last what they may ask for again (RFC 9113 §6.8).
            () = core.drained(), if !is_leaving => {}
            () = core.drain_is_over() => break Reason::NO_ERROR,
            () = tokio::time::sleep(Duration::from_millis(LOOK_MS)), if is_taking => {
                watch.sent = line.sent_bytes();
                if !watch.keeps_up(client, LOOK_MS) {
                    core.metrics.slow_readers_total.add(1);
                    streams.end(End::TooSlow);
                }
            }
            accepted = line.sending(connection.accept()) => match accepted {
                Some(Ok((request, respond))) => {
                    line.accepted();
                    stream::begin(shared, request, respond);
                }
                Some(Err(error)) => return broken(shared, &error),
                None => return Ok(()),
            },
            refused = line.refused() => for _ in 0..refused {
                // Streams that come after the end was announced are ignored (RFC 9113 §6.8).
                if streams.why_end().is_some() || core.is_draining() {
                    break;
                }
                shared.refused();
            },
            () = line.flooded() => {}
        }
    };
    connection.abrupt_shutdown(reason);
    // A client that does not listen is not waited for.
    let goodbye = std::future::poll_fn(|context| connection.poll_closed(context));
    let _ = tokio::time::timeout(GOODBYE, line.sending(goodbye)).await;
    Ok(())
}
