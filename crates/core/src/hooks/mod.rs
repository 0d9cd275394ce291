//! Hooks: where classifiers look at traffic, in the order of a connection's life.
//!
//! A data core owns one [`Chain`]: the prefix tree, the classifiers that it asks, and an arbiter that has the last
//! word. Nothing here blocks, does I/O or reads a clock; nothing is shared between cores.

mod chain;

use std::fmt;
use std::net::IpAddr;

use crate::{Event, NodeId, PrefixTree, Reason, Verdict, Visit};

pub use chain::Chain;

/// What was decided, and why.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Decision {
    /// What to do.
    pub verdict: Verdict,
    /// Why; of no meaning for [`Verdict::Continue`].
    pub reason: Reason,
    /// Which of the operator's filters decided, in their order from 1 on; 0: none of them.
    pub filter: u16,
}

impl Decision {
    /// No objection.
    pub const CONTINUE: Self = Self::new(Verdict::Continue, Reason::Blocked);

    /// A verdict for a reason.
    pub const fn new(verdict: Verdict, reason: Reason) -> Self {
        Self { verdict, reason, filter: 0 }
    }

    /// Whether there is no objection.
    #[inline]
    pub fn is_continue(&self) -> bool {
        self.verdict == Verdict::Continue
    }

    /// Whether the client's connection ends after the response that this was decided on.
    #[inline]
    pub fn ends_connection(&self) -> bool {
        matches!(self.verdict, Verdict::Block(_) | Verdict::Reset | Verdict::Drop)
    }

    /// This decision, or where there is no objection, the other.
    #[inline]
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        if self.is_continue() { other } else { self }
    }
}

/// Who a connection or a request comes from.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Peer {
    /// The client: of a request that a trusted proxy passes on, the address that the proxy names.
    pub address: IpAddr,
    /// How it is connected.
    pub via: Via,
}

/// How a client is connected.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Via {
    /// The connection is the client's own.
    Direct,
    /// The connection is a trusted proxy's, with many clients behind it: nothing may be done to it for one of them.
    Proxy,
}

/// A field of a request's head that classifiers may ask for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Field {
    /// `User-Agent`.
    UserAgent,
    /// `Cookie`, the first line.
    Cookie,
    /// `Content-Type`.
    ContentType,
    /// `Host`.
    Host,
}

/// A request whose head is complete.
pub struct RequestView<'r> {
    /// As sent, such as `GET`.
    pub method: &'r [u8],
    /// The path in its normal form.
    pub path: &'r [u8],
    /// The path as an application may read it, where that is another one.
    pub reading: Option<&'r [u8]>,
    /// The query, if there is one.
    pub query: Option<&'r [u8]>,
    /// Whether a body follows.
    pub has_body: bool,
    /// Its fields.
    pub fields: &'r dyn Fields,
}

/// Finds fields of a request's head; none is looked for unless a classifier asks.
pub trait Fields {
    /// The value of the first field of this name.
    fn get(&self, field: Field) -> Option<&[u8]>;

    /// What part of the response the request asks for; `None`: not for a part.
    fn part(&self) -> Option<Part> {
        None
    }
}

/// What a request for a part of a response asks for (RFC 9110 §14.2).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Part {
    /// Bytes `start..end`, of an open end up to [`u64::MAX`].
    Bytes {
        /// Offset of the first byte.
        start: u64,
        /// Offset after the last byte.
        end: u64,
    },
    /// Ranges of which so many overlap, or that are so many, that they are rejected.
    Excessive,
}

impl ResponseView<'_> {
    /// The status of a response that the client did not wait for: it reset the connection.
    pub const GIVEN_UP: u16 = 0;
}

impl<'r> RequestView<'r> {
    /// The value of a field, if it is there.
    pub fn field(&self, field: Field) -> Option<&'r [u8]> {
        self.fields.get(field)
    }
}

/// The first line of a request, whose fields need not be here yet.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RequestLine<'r> {
    /// As sent, such as `GET`.
    pub method: &'r [u8],
    /// The target as sent: not in the normal form, which takes the fields.
    pub target: &'r [u8],
}

/// What a response came from.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Source {
    /// The cache, a file, or an answer of our own.
    Here,
    /// An upstream, for a request that the cache could have answered.
    Missed,
    /// An upstream, for a request that never is answered from the cache.
    Passed,
}

/// A response that is to be sent, or has been sent or given up.
#[derive(Clone, Copy, Debug)]
pub struct ResponseView<'r> {
    /// As in [`RequestView::path`].
    pub path: &'r [u8],
    /// As in [`RequestView::query`].
    pub query: Option<&'r [u8]>,
    /// The host that was asked for, in its normal form.
    pub authority: &'r [u8],
    /// Tells the variants of one URL apart that `Vary` makes; 0 where that was not what the cache had none for.
    pub variant: u64,
    /// Its status, or [`Self::GIVEN_UP`].
    pub status: u16,
    /// Where it came from.
    pub source: Source,
    /// How long the upstream worked on it, in milliseconds.
    pub upstream_ms: u32,
}

/// How a client was too slow.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Slow {
    /// A request head was not complete in time.
    Head,
    /// A request body came below the minimum rate.
    Body,
    /// A response was taken below the minimum rate.
    Reading,
}

/// What a classifier may look at besides the event itself.
pub struct Scene<'s> {
    /// What every address and prefix has done lately; the event is counted there already.
    pub tree: &'s mut PrefixTree,
    /// The client in the tree.
    pub client: NodeId,
    /// Who it is.
    pub peer: Peer,
    /// The request that it is about, if it is about one whose head is at hand.
    pub request: Option<&'s RequestView<'s>>,
    /// Since when the server is under stress; `None`: it is not.
    pub stressed_ms: Option<u64>,
    /// Milliseconds of one monotonic clock.
    pub now_ms: u64,
}

/// What a data core has to bear: what stress is told by.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Share of the time since the last tick in which the core's thread was running.
    pub busy: f32,
    /// How much later than it was due the tick came, in milliseconds.
    pub lag_ms: u32,
    /// Connections open now, as a share of those that there may be.
    pub connections: f32,
    /// Memory of the host's TCP sockets, as a share of what the kernel begins to save at (`tcp_mem`, tcp(7)).
    pub tcp_memory: f32,
}

impl Scene<'_> {
    /// How often the client did something within the sliding window, on all cores.
    #[inline]
    pub fn count(&self, event: Event) -> u32 {
        self.tree.count_everywhere(self.client, event, self.now_ms)
    }
}

/// Which requests a classifier has anything to say of: about all others it neither objects nor changes anything.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Interest {
    /// None: it looks at something else.
    Never,
    /// Those of clients that have done something more often than this within the sliding window, on all cores.
    Beyond(Event, u32),
    /// Those that bring up a prefix in [`Visit::due`] or [`Visit::suspect`].
    Prefixes,
    /// Those for a part of a response: see [`Fields::part`].
    Parts,
    /// Those that come while the server is under stress.
    Stress,
    /// All.
    Always,
}

/// Looks at one kind of abuse. Never blocks, does no I/O, reads no clock. Methods are in the order of a connection's
/// life; the first decision other than [`Decision::CONTINUE`] ends the chain for that event. Only a delay does not: who
/// is let in later has to come past the others all the same.
pub trait Classifier: fmt::Debug + Send {
    /// Stable lower-case name: the same in the configuration, logs and metrics.
    fn name(&self) -> &'static str;

    /// A connection was accepted; nothing was read. Not asked about connections of trusted proxies.
    fn on_connect(&self, _scene: &mut Scene<'_>, _open: u32) -> Decision {
        Decision::CONTINUE
    }

    /// Whether [`Self::on_request_line`] is to be asked: what nobody asks for costs nothing.
    fn looks_at_lines(&self) -> bool {
        false
    }

    /// A request's first line is here, long before the end of the head if the client is slow. Nothing is counted yet.
    /// Of a request that a trusted proxy passes on it is asked when the head is complete, which names the client.
    fn on_request_line(&self, _scene: &mut Scene<'_>, _line: &RequestLine<'_>) -> Decision {
        Decision::CONTINUE
    }

    /// About which requests [`Self::on_request`] is to be asked. Every cached hit pays for those that are asked, so
    /// that who looks at few of them, or at something else, had better say so.
    fn interest(&self) -> Interest {
        Interest::Always
    }

    /// A request's head is complete and well formed; nothing was answered. `visit` is what counting it brought up.
    /// Asked only of what [`Self::interest`] says, or of a little more.
    fn on_request(&self, _scene: &mut Scene<'_>, _request: &RequestView<'_>, _visit: &Visit) -> Decision {
        Decision::CONTINUE
    }

    /// A piece of a request's body has arrived; `received` counts bytes from the body's start to the piece's end.
    fn on_body(&self, _scene: &mut Scene<'_>, _piece: &[u8], _received: u64) -> Decision {
        Decision::CONTINUE
    }

    /// Whether [`Self::on_response_start`] is to be asked.
    fn looks_at_starts(&self) -> bool {
        false
    }

    /// A response is known, and nothing of it was sent. The decision takes its place.
    fn on_response_start(&self, _scene: &mut Scene<'_>, _response: &ResponseView<'_>) -> Decision {
        Decision::CONTINUE
    }

    /// Whether [`Self::on_response`] is to be asked.
    fn looks_at_responses(&self) -> bool {
        false
    }

    /// A response ended. The decision is about what comes next from the client.
    fn on_response(&self, _scene: &mut Scene<'_>, _response: &ResponseView<'_>) -> Decision {
        Decision::CONTINUE
    }

    /// The connection is being ended because its client was too slow.
    fn on_slow(&self, _scene: &mut Scene<'_>, _slow: Slow) -> Decision {
        Decision::CONTINUE
    }

    /// A connection was closed.
    fn on_close(&self, _scene: &mut Scene<'_>) {}

    /// Several times a second, for what is due from time to time.
    fn on_tick(&self, _tree: &mut PrefixTree, _now_ms: u64) {}
}

/// Has the last word on a classifier's decision, and makes it known.
pub trait Arbiter: fmt::Debug + Send {
    /// What is done in the end: where an address is exempt or the rule is only tried out, nothing.
    fn decide(&self, scene: &mut Scene<'_>, classifier: &'static str, decision: Decision) -> Decision;

    /// What is done about a client with a mark on its own address, which was blocked before.
    fn marked(&self, scene: &mut Scene<'_>) -> Decision;

    /// Makes known what others than classifiers have decided, such as a list of blocked addresses.
    fn note(&self, _scene: &mut Scene<'_>, _decision: Decision) {}

    /// The response that carries a decision to the client; only asked for verdicts that are answered.
    fn reply(&self, peer: Peer, request: &RequestView<'_>, decision: Decision, now_ms: u64) -> Reply;

    /// Several times a second, for what is due from time to time. Tells since when the server is under stress, if it
    /// is.
    fn on_tick(&self, _tree: &mut PrefixTree, _load: &Load, _now_ms: u64) -> Option<u64> {
        None
    }

    /// The classifiers that take the place of those before, where the settings have changed since it was last asked.
    fn renewed(&self) -> Option<Vec<Box<dyn Classifier>>> {
        None
    }
}

/// The name of the cookie by which a client shows that it has passed a challenge. It is the defence's own: applications
/// are not sent it, and no response depends on it.
pub const PASS_COOKIE: &str = "tidegate_pass";

/// A response of the defence's own.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Reply {
    /// Its status.
    pub status: u16,
    /// Field lines, each with CR LF, besides those that every response has.
    pub fields: Vec<u8>,
    /// An HTML page; empty: a short text that names the status.
    pub page: Vec<u8>,
}

/// Makes a chain for each data core.
pub trait ChainSource: fmt::Debug + Send + Sync {
    /// The chain of the core with this index.
    fn chain(&self, core: usize, cores: usize) -> Chain;
}

/// Tells what requests ask for apart: see [`hash`].
pub fn hash_target(seed: u64, path: &[u8], query: Option<&[u8]>) -> u64 {
    let of_path = hash(seed, path);
    query.map_or(of_path, |query| hash(of_path, query))
}

/// A fast keyed hash of bytes, for telling targets apart: not for anything that must withstand a chosen collision.
pub fn hash(seed: u64, bytes: &[u8]) -> u64 {
    const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |state: u64, word: u64| {
        let product = u128::from(state ^ word) * u128::from(MULTIPLIER ^ seed.rotate_left(17) | 1);
        (product as u64) ^ (product >> 64) as u64
    };
    let mut state = seed ^ bytes.len() as u64;
    let mut words = bytes.chunks_exact(8);
    for word in &mut words {
        state = mix(state, u64::from_le_bytes(word.try_into().unwrap_or_default()));
    }
    let mut last = [0; 8];
    last[..words.remainder().len()].copy_from_slice(words.remainder());
    mix(mix(state, u64::from_le_bytes(last)), MULTIPLIER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_that_differ_hash_differently() {
        let all =
            [("/a", None), ("/a", Some("")), ("/a", Some("b")), ("/ab", None), ("/a\0", None), ("", None)];
        let hash =
            |(path, query): (&str, Option<&str>)| hash_target(7, path.as_bytes(), query.map(str::as_bytes));
        let hashes: std::collections::HashSet<u64> = all.into_iter().map(hash).collect();
        assert_eq!(hashes.len(), all.len());
        assert_ne!(hash_target(7, b"/a", None), hash_target(8, b"/a", None));
    }
}
