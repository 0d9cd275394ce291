//! HTTP/1.1 over Trickles: GET and HEAD with ranges and conditions, keep-alive and pipelining, without any memory of
//! the client (Trickles §6.2).
//!
//! A request of the transport carries a conversation: its input is what an HTTP/1.1 client writes to a connection, its
//! output what such a client reads. Where the conversation stands lies in the input continuation (`digest`), what a
//! response is made of in an output continuation (`response`).

mod digest;
mod refusal;
mod response;
mod root;

pub use refusal::refusal;
pub use response::MAX_URL_BYTES;
pub use root::{StaticRoot, StaticRootError};

use crate::files::{GONE, PATH_TOO_LONG};
use crate::server::{Application, Event, EventInput, EventKind, EventWant, Minisocket, Wait};
use crate::user::{LEAST_OPAQUE_BYTES, MAX_OPAQUE_BYTES, OVERHEAD_BYTES, REGION_BITS};
use crate::wire::FRAME_HEAD_BYTES;
use digest::{Digest, HttpRequest, Step};
use response::Response;
use std::net::SocketAddr;
use std::ops::Range;

/// Code of a reset: a continuation is not one of this service's.
pub const FOREIGN: u16 = 400;
/// Responses to one packet of requests that were sent ahead.
const MAX_PIPELINED: usize = 32;
/// The frame of an input continuation, besides its opaque bytes.
const INPUT_CONTINUATION_BYTES: usize = 16 + OVERHEAD_BYTES;
/// The frame that ends an output.
const END_BYTES: usize = FRAME_HEAD_BYTES + 8;
/// The frame of an output continuation, besides its opaque bytes.
const OUTPUT_CONTINUATION_BYTES: usize = 3 + OVERHEAD_BYTES;
/// What a request has beside the opaque bytes that it asks with, an account of 16 runs among it, less the head of an
/// answer.
const BESIDE_BYTES: usize = 255;

/// Opaque bytes that a continuation may have on a connection: more than the least where requests have room for them.
fn most_opaque_bytes(socket: &Minisocket) -> usize {
    socket.capacity().saturating_sub(BESIDE_BYTES).clamp(LEAST_OPAQUE_BYTES, MAX_OPAQUE_BYTES)
}

/// What a site has under a request target.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Resource {
    /// 200, or what else the site answers with; conditions and ranges are for 200.
    pub status: u16,
    /// Bytes of the representation.
    pub length: u64,
    /// Changes whenever anything here or a byte of the representation changes; the same on every replica.
    pub version: u64,
    /// Last modification in seconds since 1970.
    pub modified_s: Option<u64>,
    /// The entity tag with its quotes, or nothing.
    pub etag: Vec<u8>,
    /// Further field lines such as Content-Type, each with its CRLF. Date, Content-Length, Content-Range, ETag,
    /// Last-Modified, Accept-Ranges and Connection are not among them.
    pub fields: Vec<u8>,
}

/// Why a site has no resource to give; always about the request.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Missing {
    /// Nothing is there, or nothing that is served: 404.
    NotFound,
    /// The resource is elsewhere: 301 with the path, `/`-prefixed.
    MovedTo(Vec<u8>),
    /// It cannot be had now: 503.
    Unavailable,
    /// The client asks for too much: 429.
    Refused,
}

/// Why a response that was begun does not go on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Lost {
    /// The resource has changed or gone: the response is reset.
    Gone,
    /// It cannot be had now: the client asks again.
    NotNow,
}

/// Who asks a site for what.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// The client.
    pub peer: SocketAddr,
    /// Whether it is known to be where `peer` says: it has shown a continuation that was sent there.
    pub proved: bool,
    /// Number of the transport's request: together with the client it tells a repetition from another request.
    pub request: u32,
    /// In lower case and without port 80.
    pub host: &'a [u8],
    /// Normalized: a path, still percent-encoded, with its query.
    pub target: &'a [u8],
    /// The request head with its final empty line, in which fields may be missing that did not fit into a continuation.
    /// Empty where only host and target are known.
    pub head: &'a [u8],
    /// The request's content.
    pub body: &'a [u8],
}

/// Who asks.
#[derive(Clone, Copy, Debug)]
struct Client {
    peer: SocketAddr,
    proved: bool,
}

impl Client {
    /// Whoever opens a connection may name any source. What goes on with one was sent to that source (Trickles §6.1).
    fn of(event: &Event<'_>) -> Self {
        Self { peer: event.peer, proved: event.kind != EventKind::Open }
    }

    /// Whether a request may be carried out that changes something. An open can be forged, and sent again at any time:
    /// the client sends such a request again with its next packet, which cannot.
    fn may_change(self, request: &HttpRequest) -> bool {
        self.proved || request.refused.is_some()
    }
}

/// A part of a resource that is to be sent.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Of [`Resource::version`].
    pub version: u64,
    /// Whether the resource's fields are needed.
    pub head: bool,
    /// First byte of the representation, and how many.
    pub offset: u64,
    /// Bytes.
    pub length: usize,
}

/// What answers requests: a directory of files, or a cache. Bytes can be read at any offset, any number of times.
pub trait Site {
    /// Looks a resource up.
    fn find(&mut self, asked: &Asked<'_>) -> Result<Resource, Missing>;

    /// The resource of which a response has been begun, perhaps by another replica.
    fn known(&mut self, host: &[u8], target: &[u8], version: u64) -> Result<Resource, Lost>;

    /// Whether requests with other methods than GET and HEAD, and with content, are for this site.
    fn takes_content(&mut self, _host: &[u8], _target: &[u8]) -> bool {
        false
    }

    /// What [`Site::find`] has to wait for; nothing by default.
    fn prepare_find(&mut self, _asked: &Asked<'_>) -> Option<Wait> {
        None
    }

    /// What [`Site::known`] and [`Site::read`] have to wait for; nothing by default.
    fn prepare_read(&mut self, _peer: SocketAddr, _host: &[u8], _target: &[u8], _part: Part) -> Option<Wait> {
        None
    }

    /// Fills `buffer` from `offset` on; returns how many bytes there were.
    fn read(
        &mut self,
        host: &[u8],
        target: &[u8],
        version: u64,
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<usize, Lost>;
}

/// What becomes of an input once one of its requests was looked at.
enum Next {
    /// The next request is read.
    Read,
    /// No more requests are answered for now.
    Stop,
    /// Nothing of the input is consumed: the client sends it again, unless it is told that it need not.
    Nothing,
}

/// An input that is being read, and what has answered it.
struct Conversation<'a> {
    input: &'a EventInput<'a>,
    /// The packet for what has to come together.
    home: usize,
    digest: Digest,
    /// What has not been read.
    rest: &'a [u8],
    /// What follows the last request that is answered.
    unanswered: &'a [u8],
    /// Where each response begins in the output, and what its continuation holds.
    responses: Vec<(u64, Vec<u8>)>,
}

impl<'a> Conversation<'a> {
    fn new(input: &'a EventInput<'a>, home: usize, digest: Digest) -> Self {
        Self { input, home, digest, rest: input.data, unanswered: input.data, responses: Vec::new() }
    }

    /// Leaves the request that was read last with the client, to be sent again; `before` is what had not been read
    /// before it.
    fn put_off(&mut self, before: &'a [u8]) {
        self.digest.unread();
        self.rest = before;
    }

    /// Notes the response to the request that was read last.
    fn answered(&mut self, response: (u64, Vec<u8>), end: u64, closes: bool) {
        self.digest.answered(end, closes);
        self.responses.push(response);
        self.unanswered = self.rest;
    }

    /// Tells the client how much of its input was consumed and what to send the rest with, or where the output ends.
    fn tell_consumed(&mut self, socket: &mut Minisocket) {
        let Self { input, home, .. } = *self;
        if self.digest.closed || (input.last && self.rest.is_empty()) {
            if socket.holds(home, END_BYTES) {
                let _ = socket.end(home, input.request, self.digest.output);
            }
            return;
        }
        let bytes = |digest: &Digest| INPUT_CONTINUATION_BYTES + digest.encode().len();
        if !self.responses.is_empty() && !socket.holds(home, bytes(&self.digest)) {
            // The beginning of a request has no room beside the answers to those before it: the client sends it again.
            self.digest.forget_head();
            self.rest = self.unanswered;
        }
        let consumed = input.consumed + (input.data.len() - self.rest.len()) as u64;
        let first_bytes =
            self.responses.first().map_or(0, |(_, first)| OUTPUT_CONTINUATION_BYTES + first.len());
        if socket.holds(home, bytes(&self.digest)) {
            let _ = socket.set_input_continuation(home, input.request, consumed, &self.digest.encode());
        } else if bytes(&self.digest) + first_bytes > socket.capacity() {
            // Without room the client sends the input again, unless no packet holds what has to come together.
            let _ = socket.reset(home, input.request, PATH_TOO_LONG);
        }
    }
}

/// Serves a [`Site`]. Keeps nothing between events.
#[derive(Debug)]
pub struct HttpService<S> {
    site: S,
    clock_s: fn() -> u64,
    buffer: Vec<u8>,
}

impl<S: Site> HttpService<S> {
    /// A service over `site`; `clock_s` gives seconds since 1970 for Date.
    pub fn new(site: S, clock_s: fn() -> u64) -> Self {
        Self { site, clock_s, buffer: Vec::new() }
    }

    /// Ranges of a response, one after the other (Trickles §4.3), from packet `index` on.
    fn answer_wants(&mut self, index: usize, wants: &[EventWant<'_>], socket: &mut Minisocket) {
        let (Some(first), Some(last)) = (wants.first(), wants.last()) else { return };
        if first.opaque.is_empty() {
            return; // Of an epoch that is gone; the transport says so.
        }
        let packets = (index..).zip(wants);
        let response = Response::decode(first.opaque);
        for (index, want) in packets.clone() {
            if response.is_none() {
                // Without room the client asks again; so it does below.
                let _ = socket.reset(index, want.request, FOREIGN);
            } else if want.aged {
                let valid = (want.valid_start, want.valid_end);
                let _ = socket.set_output_continuation(index, want.request, valid, want.opaque);
            }
        }
        let Some(response) = response else { return };
        // What a packet has no room for, as beside a new continuation, is read in vain.
        let length = (last.offset - first.offset) as usize + last.length as usize;
        let read = self.read(first.valid_start, first.offset, length, &response);
        for (index, want) in packets {
            if read == Err(Lost::Gone) {
                let _ = socket.reset(index, want.request, GONE);
            } else if read.is_ok() {
                let rest = self.buffer.get((want.offset - first.offset) as usize..).unwrap_or_default();
                let bytes = &rest[..rest.len().min(want.length as usize)];
                socket.send(index, want.request, want.offset, bytes);
            }
        }
    }

    /// Reads up to `length` bytes from `offset` on, of a response that starts at `start`.
    fn read(&mut self, start: u64, offset: u64, length: usize, response: &Response<'_>) -> Result<(), Lost> {
        let within = offset.checked_sub(start).ok_or(Lost::NotNow)?;
        let left = response.total_bytes().saturating_sub(within);
        self.buffer.resize(length.min(usize::try_from(left).unwrap_or(usize::MAX)), 0);
        response.read(&mut self.site, within, &mut self.buffer)
    }

    /// Input (Trickles §4.2): heads of HTTP requests, whole or in part. `packets` are free for the continuations of
    /// the responses, which are what follows, and for their first bytes.
    fn answer_input(
        &mut self,
        client: Client,
        input: &EventInput<'_>,
        packets: Range<usize>,
        socket: &mut Minisocket,
    ) -> Vec<(u64, Vec<u8>)> {
        // What is consumed has to come together with the means to ask for all that answers it: whichever packets are
        // lost, the client either knows both or sends the input again.
        let by_room = packets.rev().max_by_key(|&index| socket.room(index));
        let Some(home) = by_room else { return Vec::new() };
        let Some(digest) = Digest::decode(input.opaque, most_opaque_bytes(socket)) else {
            let _ = socket.reset(home, input.request, FOREIGN);
            return Vec::new();
        };
        let mut conversation = Conversation::new(input, home, digest);
        while conversation.responses.len() < MAX_PIPELINED {
            match self.answer_next(client, &mut conversation, socket) {
                Next::Read => {}
                Next::Stop => break,
                Next::Nothing => return Vec::new(),
            }
        }
        conversation.tell_consumed(socket);
        conversation.responses
    }

    /// Reads the next request of the input and gives the client the means to ask for the response.
    fn answer_next(
        &mut self,
        client: Client,
        conversation: &mut Conversation<'_>,
        socket: &mut Minisocket,
    ) -> Next {
        let Conversation { input, home, .. } = *conversation;
        let before = conversation.rest;
        let site = &mut self.site;
        let mut takes_content = |host: &[u8], target: &[u8]| site.takes_content(host, target);
        let step = conversation.digest.feed(&mut conversation.rest, input.last, &mut takes_content);
        let Step::Request(request) = step else { return Next::Stop };
        let is_first = conversation.responses.is_empty();
        // RFC 9112 §9.3.2: what follows may depend on what it does.
        let alone = !request.is_safe();
        if alone && (!is_first || !client.may_change(&request)) {
            conversation.put_off(before);
            return Next::Stop;
        }
        let start = conversation.digest.output;
        let asked = request.asked(client, input.request);
        let response = Response::to(&request, &asked, &mut self.site, (self.clock_s)());
        let Some(opaque) = response.encode().filter(|_| start < 1 << REGION_BITS) else {
            let _ = socket.reset(home, input.request, PATH_TOO_LONG);
            return Next::Nothing;
        };
        let bytes = OUTPUT_CONTINUATION_BYTES + opaque.len();
        let with_input = bytes + INPUT_CONTINUATION_BYTES + digest::FIXED_BYTES;
        if !socket.holds(home, if is_first { bytes } else { with_input }) {
            // No packet of this connection holds it. Where others only were before it, the client sends it again.
            if !is_first {
                conversation.put_off(before);
                return Next::Stop;
            }
            if bytes > socket.capacity() {
                let _ = socket.reset(home, input.request, PATH_TOO_LONG);
            }
            return Next::Nothing;
        }
        let end = (start + response.total_bytes()).min(1 << REGION_BITS);
        let _ = socket.set_output_continuation(home, input.request, (start, end), &opaque);
        conversation.answered((start, opaque), end, response.closes());
        if alone { Next::Stop } else { Next::Read }
    }

    /// What the requests in `input` need.
    fn prepare_input(&mut self, client: Client, input: &EventInput<'_>, waits: &mut Vec<Wait>) {
        let Some(mut digest) = Digest::decode(input.opaque, MAX_OPAQUE_BYTES) else { return };
        let mut rest = input.data;
        for before in 0..MAX_PIPELINED {
            let site = &mut self.site;
            let mut takes_content = |host: &[u8], target: &[u8]| site.takes_content(host, target);
            match digest.feed(&mut rest, input.last, &mut takes_content) {
                Step::Request(request) if request.refused.is_none() => {
                    // As it will be answered: alone.
                    if !request.is_safe() && (before > 0 || !client.may_change(&request)) {
                        return;
                    }
                    waits.extend(self.site.prepare_find(&request.asked(client, input.request)));
                    digest.answered(digest.output, !request.keep_alive);
                    if !request.is_safe() {
                        return;
                    }
                }
                _ => return,
            }
        }
    }

    /// The first bytes of responses of their own accord, as many as fit.
    fn send_first(
        &mut self,
        request: u32,
        responses: &[(u64, Vec<u8>)],
        mut packets: Range<usize>,
        socket: &mut Minisocket,
    ) {
        for (start, opaque) in responses {
            let Some(response) = Response::decode(opaque) else { return };
            let (mut offset, end) = (*start, start + response.total_bytes());
            while offset < end && !packets.is_empty() {
                if let Err(lost) = self.read(*start, offset, socket.room(packets.start), &response) {
                    if lost == Lost::Gone {
                        let _ = socket.reset(packets.start, request, GONE);
                    }
                    return;
                }
                match socket.send(packets.start, request, offset, &self.buffer) {
                    0 => packets.start += 1,
                    sent => offset += sent as u64,
                }
            }
        }
    }
}

impl<S: Site> Application for HttpService<S> {
    fn handle(&mut self, event: &Event<'_>, socket: &mut Minisocket) {
        if event.kind == EventKind::Close {
            return;
        }
        let mut index = 0;
        for wants in event.wants.chunk_by(|want, next| want.is_continued_by(next)) {
            self.answer_wants(index, wants, socket);
            index += wants.len();
        }
        // What is asked for is told for all requests before the first bytes of any take up the room.
        let mut begun = Vec::new();
        for (input, packets) in event.inputs_with_packets(socket.packets()) {
            let responses = self.answer_input(Client::of(event), input, packets.clone(), socket);
            begun.push((input.request, responses, packets));
        }
        for (request, responses, packets) in begun {
            self.send_first(request, &responses, packets, socket);
        }
    }

    fn prepare(&mut self, event: &Event<'_>) -> Option<Wait> {
        let mut waits = Vec::new();
        for want in &event.wants {
            if let Some(response) = Response::decode(want.opaque)
                && let Some(within) = want.offset.checked_sub(want.valid_start)
            {
                waits.extend(response.prepare(&mut self.site, event.peer, within, want.length as usize));
            }
        }
        for input in &event.inputs {
            self.prepare_input(Client::of(event), input, &mut waits);
        }
        if waits.is_empty() {
            return None;
        }
        Some(Box::pin(async move {
            for wait in waits {
                wait.await;
            }
        }))
    }
}
