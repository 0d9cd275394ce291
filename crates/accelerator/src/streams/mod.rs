//! Connections with many streams, HTTP/2 and HTTP/3: what one asks for and is answered, whatever carries it.
//!
//! Each stream is a message: its request is written as a head of HTTP/1.1, answered as those of other transports are,
//! and the answer's head is read again. So there is one way to judge, route, cache and count requests, whatever brought
//! them.

mod exchange;
mod remaining;

use std::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;

use tidegate_core::NodeId;
use tidegate_http::Version;
use tokio::sync::Notify;

use crate::data_core::DataCore;
use crate::data_core::client::Introduced;

pub(crate) use exchange::{Ended, Fault, Gone, Incoming, Outgoing, Request, begin, of_responses};

/// Requests of a connection that are answered at once (RFC 9113 §5.1.2, RFC 9114 §6.1).
pub(crate) const STREAMS: u32 = 100;
/// What a client may send of a request's content before somebody wants it, and of all that are under way.
pub(crate) const STREAM_WINDOW_BYTES: u32 = 256 * 1024;
pub(crate) const CONNECTION_WINDOW_BYTES: u32 = 1024 * 1024;
/// Requests that a client may cancel before it is looked at how many of them it cancels (CVE-2023-44487).
const CANCELLED: u64 = 100;
/// For each so many milliseconds it may cancel one more.
const CANCELLED_MS: u64 = 1000;
/// Bytes of heads of requests that wait for an answer or for their end, on one connection. What a client has said once it can say again in a
/// few bytes (RFC 7541 §2.3), so that heads take much more than what comes over the line.
const HEADS_BYTES: usize = 1024 * 1024;

/// Frames that ask for nothing which a connection may bring: so many in any case, and more for each stream and for each KiB of
/// content. Those of browsers are a few for each stream, and one for some KiB.
const IDLE_FRAMES: u64 = 1000;
const IDLE_FRAMES_OF_A_STREAM: u64 = 20;
/// For each so many milliseconds it may bring one more: whoever stays for long asks now and then whether we are there.
const IDLE_FRAMES_MS: u64 = 100;

/// Frames that ask for nothing which a connection may have brought by now (RFC 9113 §10.5, RFC 9114 §10.5).
pub(crate) fn borne(streams: u64, content_bytes: u64, stayed_ms: u64) -> u64 {
    IDLE_FRAMES + streams * IDLE_FRAMES_OF_A_STREAM + content_bytes / 1024 + stayed_ms / IDLE_FRAMES_MS
}

/// Streams of one connection, as its task and theirs see them.
#[derive(Default)]
pub(crate) struct Streams {
    open: Cell<u32>,
    begun: Cell<u64>,
    /// Of requests that wait for an answer, or for the rest of their head.
    head_bytes: Cell<usize>,
    cancelled: Cell<u64>,
    /// Why the connection is to end.
    end: Cell<Option<End>>,
    ended: Notify,
}

impl Streams {
    /// How many there are.
    pub(crate) fn open(&self) -> u32 {
        self.open.get()
    }

    /// How many there have been.
    pub(crate) fn begun(&self) -> u64 {
        self.begun.get()
    }

    /// Why the connection is to end, if it is.
    pub(crate) fn why_end(&self) -> Option<End> {
        self.end.get()
    }

    /// The connection is to end.
    pub(crate) fn end(&self, end: End) {
        self.end.set(self.end.get().max(Some(end)));
        self.ended.notify_one();
    }

    /// Waits for a stream to end, or for a reason to end the connection.
    pub(crate) async fn changed(&self) {
        self.ended.notified().await;
    }

    /// Whether the client has cancelled most of what it has asked for in so many milliseconds, so that work is all that it
    /// wants.
    pub(crate) fn is_rapid_reset(&self, ms: u64) -> bool {
        let cancelled = self.cancelled.get();
        cancelled > CANCELLED + ms / CANCELLED_MS && cancelled > self.begun.get() / 2
    }

    /// The client has given a request up.
    pub(crate) fn cancelled(&self) {
        self.cancelled.set(self.cancelled.get() + 1);
    }

    /// Keeps account of a request's head for as long as it waits; `None` if there are too many.
    fn keep(&self, bytes: usize) -> Option<KeptHead<'_>> {
        self.take(bytes).then(|| KeptHead(self, bytes))
    }

    /// Keeps account of so many bytes of heads until they are given back; `false` if there are too many.
    pub(crate) fn take(&self, bytes: usize) -> bool {
        let all = self.head_bytes.get() + bytes;
        let are_borne = all <= HEADS_BYTES;
        if are_borne {
            self.head_bytes.set(all);
        }
        are_borne
    }

    pub(crate) fn give_back(&self, bytes: usize) {
        self.head_bytes.set(self.head_bytes.get() - bytes);
    }
}

/// A request's head, for as long as it waits.
struct KeptHead<'s>(&'s Streams, usize);

impl Drop for KeptHead<'_> {
    fn drop(&mut self) {
        self.0.give_back(self.1);
    }
}

/// Counts a stream among those of its connection.
struct Open(Rc<Shared>);

impl Open {
    fn new(shared: &Rc<Shared>) -> Self {
        let streams = &shared.streams;
        streams.open.set(streams.open.get() + 1);
        streams.begun.set(streams.begun.get() + 1);
        Self(Rc::clone(shared))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let streams = &self.0.streams;
        streams.open.set(streams.open.get() - 1);
        streams.ended.notify_one();
    }
}

/// How a connection ends; of two ways, the later in this list.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) enum End {
    /// After the streams that are open.
    LastStreams,
    /// At once.
    Closed,
    /// At once, and the client learns that it did not get all.
    Reset,
    /// The same, because it did not take a response.
    TooSlow,
}

/// Of a connection's streams, those that wait for its client.
#[derive(Default)]
pub(crate) struct Debts {
    /// Those by which it keeps an upstream waiting.
    stalled: Cell<u16>,
    /// Those that wait for it and for nobody else.
    owing: Cell<u16>,
}

impl Debts {
    /// How many keep an upstream waiting.
    pub(crate) fn stalled(&self) -> u16 {
        self.stalled.get()
    }

    /// How many wait for the client.
    pub(crate) fn owing(&self) -> u16 {
        self.owing.get()
    }

    /// Until the result is dropped, a stream waits for the client.
    pub(crate) fn owes(&self) -> Counted<'_> {
        Counted::one_of(&self.owing)
    }

    /// Until the result is dropped, a stream waits for the client while an upstream waits for the stream.
    pub(crate) fn stalls(&self) -> Counted<'_> {
        Counted::one_of(&self.stalled)
    }
}

/// One of a client's streams, for as long as it is counted.
pub(crate) struct Counted<'c>(&'c Cell<u16>);

impl<'c> Counted<'c> {
    fn one_of(streams: &'c Cell<u16>) -> Self {
        streams.set(streams.get() + 1);
        Self(streams)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// A client's connection, as its streams see it.
pub(crate) trait Carrier {
    /// The other end, or whom the proxy there has named as its client.
    fn peer(&self) -> SocketAddr;
    /// Its address's place in the prefix tree, if anybody watches.
    fn place(&self) -> Option<NodeId>;
    /// Whether a PROXY header names the client.
    fn introduced(&self) -> Introduced;
    /// Whether it is encrypted.
    fn is_encrypted(&self) -> bool;
    /// Streams that wait for the client.
    fn debts(&self) -> &Debts;
}

/// What all streams of a connection know of it.
pub(crate) struct Shared {
    pub core: Rc<DataCore>,
    pub carrier: Rc<dyn Carrier>,
    /// What is spoken.
    pub version: Version,
    pub local: SocketAddr,
    pub streams: Streams,
}

impl Shared {
    /// What bytes that a stream has moved count for.
    fn share(&self, bytes: usize) -> u64 {
        share(bytes, self.carrier.debts().owing())
    }

    /// Counts, logs and charges to the client a request that has no answer, because its stream is ended.
    pub(crate) fn refused(&self) {
        let Self { core, carrier, streams, .. } = self;
        core.metrics.requests_refused_total.add(1);
        core.log_unreadable(carrier.peer(), self.version, 400, Default::default());
        if !core.answers_malformed(carrier.place(), carrier.peer()) {
            core.metrics.requests_policed_total.add(1);
            streams.end(End::Closed);
        }
    }
}

/// What a stream's bytes count for: it and all the others that wait for the client share its line, and the minimum rate is that
/// of the line.
fn share(bytes: usize, others: u16) -> u64 {
    bytes as u64 * (u64::from(others) + 1)
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

    #[test]
    fn what_clients_bring_with_what_they_ask_for_and_while_they_stay_is_borne() {
        assert_eq!(borne(0, 0, 0), 1000);
        assert!(borne(0, 0, 24 * 3_600_000) > 24 * 3600, "a sign of life each second");
        assert!(borne(0, 1 << 30, 0) > (1 << 30) / 1024, "room for each KiB");
        assert!(borne(500, 0, 0) >= 10_000);
    }
}
