//! Several clients' requests side by side: all are read, then all are answered, then all answers are sent.
//!
//! One client after the other, the kernel's code for reading and sending drives ours out of the processor's first
//! caches, so that each hit finds them cold. Side by side, all but the first find them warm. What takes more than a
//! short answer from the cache goes its own way at once.

use std::cell::RefCell;
use std::io::{self, ErrorKind};
use std::rc::Rc;

use tidegate_http::{HeadLimits, ParsedRequest, RequestHead, RequestParser};

use crate::data_core::client::Client;
use crate::data_core::{Bytes, DataCore};
use crate::session::context::RequestContext;
use crate::session::transmit::Unsent;
use crate::session::{self, Connection, Flush, Step};

/// Clients that are read from before the first of them is answered. More gain nothing, and keep those waiting that are
/// first.
pub(crate) const AT_ONCE: usize = 16;
/// Bytes read from each of them: more than most heads have.
const READ_BYTES: usize = 4 * 1024;

/// A core's places for clients whose requests are handled side by side.
pub(crate) struct Batch(RefCell<Vec<Slot>>);

struct Slot {
    client: Option<Rc<Client>>,
    parser: RequestParser,
    input: Box<[u8]>,
    length: usize,
    deferred: Deferred,
}

/// An answer that waits until those of others are ready too.
#[derive(Default)]
pub(super) struct Deferred {
    pub bytes: Vec<u8>,
    /// Where in what was read its request's head begins, which the parser knows from there on.
    pub head_at: usize,
    pub ready: Option<Ready>,
}

/// What is counted of an answer once it is sent.
pub(super) struct Ready {
    pub context: RequestContext,
    pub status: u16,
    pub sent: Bytes,
    pub cache: &'static str,
}

impl Ready {
    /// Counts and logs it: the kernel has all of it.
    pub(super) fn ended(&self, core: &DataCore, head: &RequestHead<'_>) {
        let Self { context, status, sent, cache } = *self;
        core.account(context.peer.ip(), head, status, sent, cache, context.began);
    }

    /// The client left, or was left, before it had the last `left` bytes.
    pub(super) fn broke_off(&self, core: &DataCore, head: &RequestHead<'_>, left: u64) {
        let Self { context, status, sent, cache } = *self;
        core.metrics.responses_broken_total.add(1);
        let taken = (sent.head + sent.body).saturating_sub(left);
        let sent = Bytes { head: taken.min(sent.head), body: taken.saturating_sub(sent.head) };
        core.log(context.peer.ip(), head, status, sent, cache, context.began);
    }
}

/// An answer that the client takes bit by bit, with the request's head.
pub(super) struct Sending {
    pub ready: Box<Ready>,
    pub buffer: Vec<u8>,
    pub parsed: ParsedRequest,
}

impl Sending {
    /// Counts and logs it when it has ended, well or not, with so many bytes `left`.
    pub(super) fn ended(&self, core: &DataCore, sent: &io::Result<()>, left: u64) {
        let head = self.parsed.head(&self.buffer);
        match sent {
            Ok(()) => self.ready.ended(core, &head),
            Err(_) => self.ready.broke_off(core, &head, left),
        }
    }
}

impl Batch {
    pub(crate) fn new(limits: HeadLimits) -> Self {
        let slot = || Slot {
            client: None,
            parser: RequestParser::new(limits),
            input: vec![0; READ_BYTES].into_boxed_slice(),
            length: 0,
            deferred: Deferred::default(),
        };
        Self(RefCell::new((0..AT_ONCE).map(|_| slot()).collect()))
    }

    /// From now on heads are limited to this.
    pub(crate) fn follow(&self, limits: HeadLimits) {
        self.0.borrow_mut().iter_mut().for_each(|slot| slot.parser = RequestParser::new(limits));
    }

    /// Goes on with clients that have something to say, at most [`AT_ONCE`] of them.
    pub(crate) fn run(&self, core: &Rc<DataCore>, clients: impl Iterator<Item = Rc<Client>>) {
        let mut slots = self.0.borrow_mut();
        let mut taken = 0;
        for client in clients {
            match slots.get_mut(taken) {
                Some(slot) => taken += usize::from(slot.read(core, client)),
                None => session::resume(core, &client),
            }
        }
        let slots = slots.get_mut(..taken).unwrap_or_default();
        slots.iter_mut().for_each(|slot| slot.answer(core));
        slots.iter_mut().for_each(|slot| slot.send(core));
    }
}

impl Slot {
    /// Reads what may be whole requests; whether there is something to be answered.
    fn read(&mut self, core: &Rc<DataCore>, client: Rc<Client>) -> bool {
        if client.pending.borrow().is_some() || !client.speaks_plain_http1() || !client.is_readable() {
            session::resume(core, &client);
            return false;
        }
        match client.try_read(&mut self.input) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => false,
            Ok(0) | Err(_) => {
                let connection = Connection { core, client: &client };
                connection.go_on(connection.caught(|| {
                    connection.input_ended();
                    Step::Close
                }));
                false
            }
            Ok(length) => {
                (self.client, self.length) = (Some(client), length);
                true
            }
        }
    }

    /// Answers what was read. The last answer stays here, if it is short and all that there is to do.
    fn answer(&mut self, core: &Rc<DataCore>) {
        let Some(client) = &self.client else { return };
        let connection = Connection { core, client };
        let (parser, deferred) = (&mut self.parser, &mut self.deferred);
        let bytes = self.input.get(..self.length).unwrap_or(&[]);
        let step = connection.caught(|| connection.process_with(parser, bytes, Some(deferred)));
        if self.deferred.ready.is_none() {
            connection.go_on_reading(step);
            self.client = None;
        }
    }

    fn send(&mut self, core: &Rc<DataCore>) {
        let (Some(client), Some(ready)) = (self.client.take(), self.deferred.ready.take()) else { return };
        let connection = Connection { core, client: &client };
        let step = connection.caught(|| {
            let (written, length) = (client.try_write(&self.deferred.bytes), self.deferred.bytes.len());
            let buffer = self.input.get(self.deferred.head_at..self.length).unwrap_or(&[]);
            let head = self.parser.head(buffer);
            match written {
                Ok(written) if written == length => {
                    ready.ended(core, &head);
                    connection.await_next();
                    Step::Read
                }
                written if is_broken(&written) => {
                    ready.broke_off(core, &head, length as u64);
                    connection.close(true, &[])
                }
                written => {
                    let unsent = Unsent::new(self.deferred.bytes.split_off(written.unwrap_or(0)), None);
                    let (buffer, parsed) = (buffer.to_vec(), self.parser.parsed());
                    let sending = Some(Sending { ready: Box::new(ready), buffer, parsed });
                    Step::Flush(Box::new(Flush { unsent, rest: Vec::new(), keep_alive: true, sending }))
                }
            }
        });
        connection.go_on_reading(step);
    }
}

/// Whether a write failed for another reason than that the socket is full.
fn is_broken(written: &io::Result<usize>) -> bool {
    written.as_ref().is_err_and(|error| error.kind() != ErrorKind::WouldBlock)
}
