//! What one process hands the one that takes its place, seen from both.

use std::io;
use std::sync::Arc;

use tidegate_store::{Handed, Store, StoreError, Visit};

use crate::cache::fill;
use crate::cache::heir::{Outdated, Tidings};
use crate::data_core::Phase;
use crate::engine::listeners::{Listening, Whose};
use crate::engine::{Engine, lock};
use crate::http3;

/// What an engine takes over from that of another process; nothing by default.
#[derive(Debug, Default)]
pub struct Handover {
    /// Sockets that listen.
    pub listening: Vec<Listening>,
    /// The cache.
    pub store: Option<Handed>,
    /// What DHTTP's address tokens are made with, so that clients' stay good.
    pub dhttp_token_secret: Option<[u8; 16]>,
    /// The same of QUIC's.
    pub quic_token_secret: Option<[u8; 16]>,
}

impl Engine {
    /// Duplicates of the listening sockets, for another process that is to serve in the place of this one.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn listening(&self) -> io::Result<Vec<Listening>> {
        let duplicate = |listening: &Listening| -> io::Result<Listening> {
            let sockets = listening.sockets.iter().map(std::os::fd::OwnedFd::try_clone);
            Ok(Listening { sockets: sockets.collect::<io::Result<_>>()?, ..*listening })
        };
        lock(&self.shared.listening).iter().map(duplicate).collect()
    }

    /// What DHTTP's address tokens are made with.
    pub fn dhttp_token_secret(&self) -> [u8; 16] {
        self.shared.dhttp_token_secret
    }

    /// What QUIC's address tokens are made with.
    pub fn quic_token_secret(&self) -> [u8; 16] {
        self.shared.quic_token_secret
    }

    /// There is no way back for the process before: from here on the datagrams of HTTP/3 are this one's. Until then that one
    /// has read them alone, since of two processes with one socket each gets some.
    pub fn take_over(&self) {
        let listening = lock(&self.shared.listening);
        for Listening { address, sockets, .. } in listening.iter().filter(|it| it.whose == Whose::Http3) {
            if let Err(error) = http3::steer(sockets) {
                tracing::error!(%address, %error, "datagrams of HTTP/3 may come to the wrong cores");
            }
        }
        self.shared.phase.send_if_modified(|phase| {
            let waits = *phase == Phase::Waiting;
            if waits {
                *phase = Phase::Serving;
            }
            waits
        });
    }

    /// Stores nothing until [`Self::store_again`], and gives what another process needs to take the cache over; `None`
    /// if there is none. Requests are served as before.
    ///
    /// # Errors
    /// There are no descriptors left, or a process before this one still reads from the cache.
    pub fn freeze(&self) -> Result<Option<Handed>, StoreError> {
        self.store().map(|store| store.freeze()).transpose()
    }

    /// Stores again after [`Self::freeze`], when the other process has failed and ended; or for the first time what the
    /// process before has handed over, when that only finishes what it has begun.
    pub fn store_again(&self) {
        self.store().map(Arc::as_ref).map(Store::thaw);
    }

    /// What the other process is to be told, from now on until [`Self::tell_nobody`]: requests that this one still
    /// answers make outdated what that one has stored.
    pub fn tidings(&self) -> Tidings {
        self.shared.flights.heir.begin()
    }

    /// Ends [`Self::tidings`].
    pub fn tell_nobody(&self) {
        self.shared.flights.heir.forget();
    }

    /// The process before has told that something is outdated.
    pub fn forget(&self, outdated: &Outdated) {
        let flights = &self.shared.flights;
        match (outdated, self.store()) {
            (Outdated::Url(key), Some(store)) => fill::invalidate(store, flights, key),
            (Outdated::OnItsWay, _) | (_, None) => flights.new_epoch(None),
            (Outdated::Everything, Some(store)) => {
                flights.new_epoch(None);
                store.for_each(|_, _| Visit::Remove);
            }
        }
    }

    /// The process before has ended.
    pub fn is_alone(&self) {
        self.store().map(Arc::as_ref).map(Store::lift_quarantine);
    }

    /// Whether a drain has begun.
    pub fn is_draining(&self) -> bool {
        self.shared.phase.borrow().is_over()
    }
}
