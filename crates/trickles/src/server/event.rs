//! What a server tells its application, and what an application is (Trickles §3.2).

use std::future::Future;
use std::net::SocketAddr;
use std::ops::Range;
use std::pin::Pin;

use super::Minisocket;

/// Why an event was raised (Trickles §3.2).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum EventKind {
    /// A connection was opened; its first input may be there already.
    Open,
    /// A client's packet arrived.
    Request,
    /// The client is done. Not every client says so.
    Close,
}

/// Input of a request, its continuation verified.
#[derive(Clone, Copy, Debug)]
pub struct EventInput<'d> {
    /// Number of the request.
    pub request: u32,
    /// What was consumed before, by the continuation.
    pub consumed: u64,
    /// Input from `consumed` on; what was consumed already is cut off.
    pub data: &'d [u8],
    /// Whether the input ends here.
    pub last: bool,
    /// The application's bytes in the input continuation; empty before the first.
    pub opaque: &'d [u8],
}

/// Output that the client asks for, its continuation verified. The n-th goes into the n-th packet.
#[derive(Clone, Copy, Debug)]
pub struct EventWant<'d> {
    /// Number of the request.
    pub request: u32,
    /// First byte of its output.
    pub offset: u64,
    /// Bytes at most; the range lies within the continuation's. 0 at `valid_end` asks what follows, an end or another
    /// continuation; 0 elsewhere leaves the packet empty.
    pub length: u32,
    /// `validStart` of the continuation.
    pub valid_start: u64,
    /// `validEnd` of the continuation.
    pub valid_end: u64,
    /// The application's bytes in the output continuation.
    pub opaque: &'d [u8],
    /// Whether the continuation was signed in an older epoch, so that the application should send a new one.
    pub aged: bool,
}

impl EventWant<'_> {
    /// Whether `next` asks for what follows this range, by the same continuation: both can be read at once.
    #[must_use]
    pub fn is_continued_by(&self, next: &Self) -> bool {
        self.length > 0
            && self.request == next.request
            && self.offset + u64::from(self.length) == next.offset
            && self.valid_start == next.valid_start
            && self.opaque == next.opaque
    }
}

/// What the application is told of a client's packet.
#[derive(Clone, Debug)]
pub struct Event<'d> {
    /// Why.
    pub kind: EventKind,
    /// Who.
    pub peer: SocketAddr,
    /// Input frames.
    pub inputs: Vec<EventInput<'d>>,
    /// Output wanted, one for each packet from the first.
    pub wants: Vec<EventWant<'d>>,
}

impl<'d> Event<'d> {
    /// Each input with the packets, of `packets` in all, that are free for the first bytes of its answer: wants have
    /// theirs, the rest is shared out. The last packet serves everybody.
    pub fn inputs_with_packets(
        &self,
        packets: usize,
    ) -> impl Iterator<Item = (&EventInput<'d>, Range<usize>)> {
        let last = packets.saturating_sub(1);
        let mut next = self.wants.len().min(last);
        self.inputs.iter().enumerate().map(move |(index, input)| {
            let share = packets.saturating_sub(next).div_ceil(self.inputs.len() - index);
            let range = next..next + share;
            next = range.end.min(last);
            (input, range)
        })
    }
}

/// A service over Trickles: answers events, and should keep nothing between them that it cannot do without.
pub trait Application {
    /// Fills the packets of `socket`, at once.
    fn handle(&mut self, event: &Event<'_>, socket: &mut Minisocket);

    /// What the answer to an event has to wait for, such as an object on its way from somewhere else. The event is
    /// handled when that is ready, whatever came of it. Nothing by default.
    fn prepare(&mut self, _event: &Event<'_>) -> Option<Wait> {
        None
    }
}

/// Ready when an event can be answered.
pub type Wait = Pin<Box<dyn Future<Output = ()> + Send>>;

impl<A: Application + ?Sized> Application for Box<A> {
    fn handle(&mut self, event: &Event<'_>, socket: &mut Minisocket) {
        (**self).handle(event, socket);
    }

    fn prepare(&mut self, event: &Event<'_>) -> Option<Wait> {
        (**self).prepare(event)
    }
}
