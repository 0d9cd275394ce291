//! HTTP/2 over one client connection (RFC 9113): frames are the library's, limits and streams are ours.
//!
//! Each stream is a message: its request is written as a head of HTTP/1.1, answered as those of other transports are,
//! and the answer's head is read again. So there is one way to judge, route, cache and count requests, whatever brought
//! them.

mod frames;
mod heads;
mod line;
mod stream;

use std::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use h2::Reason;
use h2::server::{Builder, Connection};
use tidegate_core::hooks::Slow;
use tidegate_http::Version;
use tokio::sync::Notify;

use crate::data_core::DataCore;
use crate::data_core::client::Client;
use crate::data_core::clients::Busy;
use crate::http2::line::{Line, Socket};
use crate::session::deadlines::Waiting;
use crate::session::transmit::{RateWatch, unacknowledged};

pub(crate) use heads::trailers;

/// Requests of a connection that are answered at once (RFC 9113 §5.1.2).
const STREAMS: u32 = 100;
/// What a client may send of a request's content before somebody wants it, and of all that are under way.
const STREAM_WINDOW_BYTES: u32 = 256 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 1024 * 1024;
/// Bytes of each response that wait for the connection.
const SEND_BUFFER_BYTES: usize = 64 * 1024;
/// Streams reset by either side that are remembered, so that what was under way for them is told from an error.
const RESET_STREAMS: usize = 32;
/// Requests that a client may cancel before it is looked at how many of them it cancels (CVE-2023-44487).
const CANCELLED: u64 = 100;
/// For each so many milliseconds it may cancel one more.
const CANCELLED_MS: u64 = 1000;
/// How long what ends a connection may take to be sent.
const GOODBYE: Duration = Duration::from_secs(1);
/// How often it is looked at how much the client has taken, once nobody else waits for that.
const LOOK_MS: u64 = 1000;

/// Streams of one connection, as its task and theirs see them.
#[derive(Default)]
struct Streams {
    open: Cell<u32>,
    begun: Cell<u64>,
    /// Of requests that wait for an answer.
    head_bytes: Cell<usize>,
    cancelled: Cell<u64>,
    /// Why the connection is to end.
    end: Cell<Option<End>>,
    ended: Notify,
}

impl Streams {
    /// The connection is to end.
    fn end(&self, end: End) {
        self.end.set(self.end.get().max(Some(end)));
        self.ended.notify_one();
    }

    /// Whether the client has cancelled most of what it has asked for in so many milliseconds, so that work is all that it
    /// wants.
    fn is_rapid_reset(&self, ms: u64) -> bool {
        let cancelled = self.cancelled.get();
        cancelled > CANCELLED + ms / CANCELLED_MS && cancelled > self.begun.get() / 2
    }
}

/// What a stream's bytes count for: it and all the others that wait for the client share its line, and the minimum rate is that
/// of the line.
fn share(bytes: usize, others: u16) -> u64 {
    bytes as u64 * (u64::from(others) + 1)
}

/// How a connection ends; of two ways, the later in this list.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum End {
    /// After the streams that are open.
    LastStreams,
    /// At once.
    Closed,
    /// At once, and the client learns that it did not get all.
    Reset,
    /// The same, because it did not take a response.
    TooSlow,
}

/// What all streams of a connection know of it.
struct Shared {
    core: Rc<DataCore>,
    client: Rc<Client>,
    local: SocketAddr,
    streams: Streams,
}

impl Shared {
    /// What bytes that a stream has moved count for.
    fn share(&self, bytes: usize) -> u64 {
        share(bytes, self.client.owing_streams())
    }

    /// Counts, logs and charges to the client a request that has no answer, because its stream is ended.
    fn refused(&self) {
        let Self { core, client, streams, .. } = self;
        core.metrics.requests_refused_total.add(1);
        core.log_unreadable(client.peer(), Version::Http2, 400, Default::default());
        if !core.answers_malformed(client.place, client.peer()) {
            core.metrics.requests_policed_total.add(1);
            streams.end(End::Closed);
        }
    }

    /// The connection has ended for what came on it, or is broken.
    fn broken(&self, error: &h2::Error) -> Result<(), CutOff> {
        let Self { core, client, streams, .. } = self;
        tracing::debug!(client = %client.peer(), %error, "HTTP/2 ends");
        if error.is_io() || error.is_remote() {
            return Ok(());
        }
        if error.reason() == Some(Reason::ENHANCE_YOUR_CALM) {
            core.metrics.http2_floods_total.add(1);
        }
        self.refused();
        // Whoever is kept out is not waited for.
        if streams.end.get() == Some(End::Closed) { Err(CutOff) } else { Ok(()) }
    }
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
        client: Rc::clone(&busy.client),
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
        Ok(connection) => run(connection, &shared, &line).await,
        Err(error) => shared.broken(&error),
    }
}

async fn run(
    mut connection: Connection<Socket, Bytes>,
    shared: &Rc<Shared>,
    line: &Line,
) -> Result<(), CutOff> {
    let Shared { core, client, streams, .. } = &**shared;
    let mut watch = RateWatch::new(core);
    let began_ms = core.clock.elapsed_ms();
    let reason = loop {
        let is_leaving = core.is_draining();
        match streams.end.get() {
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
        let is_first = streams.begun.get() == 0;
        // A response whose end the client has not taken yet keeps it from being idle.
        let is_taking =
            streams.open.get() == 0 && !is_first && (connection.has_streams() || unacknowledged(client) > 0);
        match streams.open.get() {
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
            () = streams.ended.notified() => {}
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
                Some(Err(error)) => return shared.broken(&error),
                None => return Ok(()),
            },
            refused = line.refused() => for _ in 0..refused {
                // Streams that come after the end was announced are ignored (RFC 9113 §6.8).
                if streams.end.get().is_some() || core.is_draining() {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::allowance::Allowance;

    /// Whether one of so many streams that wait is borne for an hour by a client that moves 5 bytes a second of it.
    fn is_borne(waiting: u16) -> bool {
        let mut allowance = Allowance::new(500);
        (0..3600).all(|_| {
            allowance.spend(1000);
            let is_borne = allowance.left_ms() != Some(0);
            allowance.earn(share(5, waiting - 1));
            is_borne
        })
    }

    /// Each of them had to keep up the minimum rate alone, so that many responses at once were too many for a slow line.
    #[test]
    fn streams_that_share_a_line_of_the_minimum_rate_are_borne_and_those_that_do_not_are_not() {
        assert!(is_borne(100));
        assert!(!is_borne(98));
        assert!(!is_borne(1));
    }

    #[test]
    fn client_that_cancels_now_and_then_is_no_flood_however_long_it_stays() {
        let streams = Streams::default();
        streams.begun.set(200);
        streams.cancelled.set(CANCELLED);
        assert!(!streams.is_rapid_reset(0));
        streams.cancelled.set(CANCELLED + 1);
        assert!(streams.is_rapid_reset(0));
        assert!(!streams.is_rapid_reset(2000), "as who looks for a place in a film");
        streams.begun.set(2 * CANCELLED + 2);
        assert!(!streams.is_rapid_reset(0), "most are wanted");
    }
}
