//! The first request of a connection, when it is here by the time the connection is accepted.
//!
//! It is answered from the cache, if that is all it takes, before anything waits for the socket. A client that closes
//! after one request then costs no task, no place among the deadlines, and no entry of the reactor that would have to be
//! made, waited for and taken out again.

use std::io::{ErrorKind, Read};
use std::net::{SocketAddr, TcpStream};
use std::rc::Rc;

use tidegate_http::Progress;

use crate::data_core::DataCore;
use crate::session::transmit::Unsent;
use crate::session::{Asker, Handled};

/// Where a new connection stands.
pub(crate) enum First {
    /// Nothing is left to do but to close it.
    Done,
    /// Nothing has arrived yet.
    Awaited,
    /// Its first request is answered.
    Answered,
    /// Something is to be done. On the heap, since most connections have no part in it.
    Begun(Box<Begun>),
}

/// What is left of a first look.
pub(crate) enum Begun {
    /// Bytes that have arrived.
    Arrived(Vec<u8>),
    /// The request is answered as far as the socket took it.
    Unsent { unsent: Unsent, keep_alive: bool },
}

impl First {
    /// Looks for a request on a socket that was just accepted.
    pub(crate) fn of(core: &Rc<DataCore>, stream: &TcpStream, peer: SocketAddr) -> Self {
        // Rules count what they see, and are to see each request once.
        if core.with_plan(|plan| plan.requests.is_some()) {
            return Self::Awaited;
        }
        let mut buffer = core.read_buffer.borrow_mut();
        let bytes = match (&*stream).read(&mut buffer) {
            Ok(0) => return Self::Done,
            Ok(length) => buffer.get(..length).unwrap_or(&[]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                return Self::Awaited;
            }
            Err(_) => return Self::Done,
        };
        let mut parser = core.parser.borrow_mut();
        parser.reset();
        let is_one =
            matches!(parser.parse(bytes), Ok(Progress::Complete { length }) if length == bytes.len());
        // Whatever is not one whole request takes the long way, where nothing of it has happened yet.
        if !is_one {
            return Self::Begun(Box::new(Begun::Arrived(bytes.to_vec())));
        }
        match Asker::new(core, peer).answer(core, stream, &parser.head(bytes)) {
            Ok(Handled::Answered { keep_alive }) => {
                core.metrics.requests_total.add(1);
                if keep_alive { Self::Answered } else { Self::Done }
            }
            Ok(Handled::Unsent { unsent, keep_alive }) => {
                core.metrics.requests_total.add(1);
                Self::Begun(Box::new(Begun::Unsent { unsent, keep_alive }))
            }
            _ => Self::Begun(Box::new(Begun::Arrived(bytes.to_vec()))),
        }
    }
}
