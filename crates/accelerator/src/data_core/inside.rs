//! Requests of the process's own transports: they pass cache, routes, upstreams, rules, limits, counters and log as if
//! they had come from a client.
//!
//! A transport that has answers of its own tells of every request whose client's address is proved, and asks who is
//! refused: that way its clients are classified as others are, and nothing waits for it.

use std::collections::HashMap;
use std::hash::BuildHasher;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tidegate_core::Verdict;
use tidegate_dhttp::driver::{Arrival, Body, Request};
use tokio::sync::{mpsc, oneshot};

/// Requests that wait for a core; more are refused.
const WAITING: usize = 1024;
/// Clients that are refused at once; of more nobody takes note until some are refused no longer and were swept out.
const MAX_REFUSED: usize = 65_536;
/// How long a client is refused after what it asked last: whoever is blocked, and whoever is over a limit.
const BLOCKED: Duration = Duration::from_secs(10);
const OVER_LIMIT: Duration = Duration::from_secs(2);

/// What a core is asked or told.
pub(crate) enum Inner {
    Request(Box<InnerRequest>),
    Told(Told),
}

/// A request on its way to a core.
pub(crate) struct InnerRequest {
    pub request: Request,
    pub local: SocketAddr,
    /// Whether its client's address is proved.
    pub proved: bool,
    pub answer: oneshot::Sender<Body>,
}

/// A request of a client whose address is proved, which its transport answers.
pub(crate) struct Told {
    pub head: Bytes,
    pub client: IpAddr,
}

/// Asks the data cores, each in its turn; the default has none.
#[derive(Clone, Debug, Default)]
pub struct Inside {
    cores: Arc<[mpsc::Sender<Inner>]>,
    turn: Arc<AtomicUsize>,
    /// Whether anybody judges.
    judged: bool,
    refused: Arc<Refused>,
}

/// Who is refused, as the cores have decided.
#[derive(Debug, Default)]
pub(crate) struct Refused {
    /// How many there are, so that nobody waits for the lock while there is none.
    count: AtomicUsize,
    clients: Mutex<Clients>,
    /// Where a client's requests are counted must not be foreseen.
    spread: std::hash::RandomState,
    untold: AtomicU64,
}

/// Until when each client is refused.
#[derive(Debug, Default)]
struct Clients {
    until: HashMap<IpAddr, Instant>,
    /// When those were forgotten last who are refused no longer.
    swept: Option<Instant>,
}

/// The cores have too much to do, or have ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("no core takes the request")]
pub struct Unavailable;

impl Inside {
    /// For so many cores, which have a defence or none, and what each of them receives from.
    pub(crate) fn new(cores: usize, judged: bool) -> (Self, Vec<mpsc::Receiver<Inner>>) {
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..cores).map(|_| mpsc::channel(WAITING)).unzip();
        let inside = Self { cores: senders.into(), turn: Arc::default(), judged, refused: Arc::default() };
        (inside, receivers)
    }

    /// The response to a request of `client`, which came to `local`: head and body as an HTTP/1.1 client would read
    /// them. `head` is a well-formed request head with its final empty line. `proved` says whether the client is known
    /// to be where its address says.
    ///
    /// # Errors
    /// There is no core to answer.
    pub async fn ask(
        &self,
        head: Bytes,
        body: Bytes,
        (client, proved): (SocketAddr, bool),
        local: SocketAddr,
    ) -> Result<Body, Unavailable> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let core = self.cores.get(turn % self.cores.len().max(1)).ok_or(Unavailable)?;
        let (answer, answered) = oneshot::channel();
        let arrival = Arrival { client, local: None, server: None };
        let request = Request { arrival, head, body: Body::full(body) };
        let request = InnerRequest { request, local, proved, answer };
        core.try_send(Inner::Request(Box::new(request))).map_err(|_| Unavailable)?;
        answered.await.map_err(|_| Unavailable)
    }

    /// Tells of a request of a client whose address is proved, for the defence to judge; its decision acts on what
    /// [`Inside::refuses`] says from then on. `head` makes what [`Inside::ask`] takes, if there is a defence. What no
    /// core has room for is counted.
    pub fn tell(&self, head: impl FnOnce() -> Bytes, client: IpAddr) {
        if !self.judged {
            return;
        }
        // All requests of a client are counted by one core.
        let place = self.refused.spread.hash_one(client) as usize % self.cores.len().max(1);
        let Some(core) = self.cores.get(place) else { return };
        if core.try_send(Inner::Told(Told { head: head(), client })).is_err() {
            self.refused.untold.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether a client is to be refused just now.
    pub fn refuses(&self, client: IpAddr) -> bool {
        self.refused.holds(client.to_canonical())
    }

    /// Requests that [`Inside::tell`] found no room for.
    pub fn untold(&self) -> u64 {
        self.refused.untold.load(Ordering::Relaxed)
    }

    pub(crate) fn refused(&self) -> &Arc<Refused> {
        &self.refused
    }
}

impl Refused {
    fn lock(&self) -> MutexGuard<'_, Clients> {
        // Every change is one step, so that a panic elsewhere leaves nothing half done.
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn holds(&self, client: IpAddr) -> bool {
        self.count.load(Ordering::Acquire) > 0
            && self.lock().until.get(&client).is_some_and(|until| Instant::now() < *until)
    }

    /// Takes note of what was decided about a client; whether it is refused from now on.
    pub(crate) fn note(&self, client: IpAddr, verdict: Verdict) -> bool {
        let time = match verdict {
            Verdict::Continue => return false,
            Verdict::Block(_) | Verdict::Reset | Verdict::Drop => BLOCKED,
            _ => OVER_LIMIT,
        };
        let now = Instant::now();
        let mut clients = self.lock();
        if clients.swept.is_none_or(|swept| now >= swept + BLOCKED) {
            clients.until.retain(|_, until| now < *until);
            clients.swept = Some(now);
        }
        let is_taken = clients.until.len() < MAX_REFUSED || clients.until.contains_key(&client);
        if is_taken {
            clients.until.insert(client, now + time);
        }
        self.count.store(clients.until.len(), Ordering::Release);
        is_taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));

    #[test]
    fn a_client_that_may_not_go_on_is_refused_and_others_are_not() {
        let (inside, _receivers) = Inside::new(1, true);
        assert!(!inside.refused.note(CLIENT, Verdict::Continue) && !inside.refuses(CLIENT));
        assert!(inside.refused.note(CLIENT, Verdict::Block(Duration::from_secs(600))));
        assert!(inside.refuses(CLIENT) && inside.refuses("::ffff:192.0.2.1".parse().unwrap()));
        assert!(!inside.refuses([192, 0, 2, 2].into()));
    }

    #[test]
    fn what_no_core_has_room_for_is_counted_and_nothing_more_is_kept_when_full() {
        let (inside, _receivers) = Inside::new(2, true);
        for _ in 0..=WAITING {
            inside.tell(Bytes::new, CLIENT);
        }
        assert_eq!(inside.untold(), 1);
        for number in 0..=MAX_REFUSED as u32 {
            inside.refused.note(IpAddr::from(std::net::Ipv4Addr::from(number)), Verdict::Reset);
        }
        assert_eq!(inside.refused.lock().until.len(), MAX_REFUSED);
    }
}
