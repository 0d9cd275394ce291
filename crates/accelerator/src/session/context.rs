//! One request as far as it takes no waiting: the rules' and the defence's say in it, and the answer from the cache.

use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::time::Instant;

use tidegate_core::hooks::{Decision, Reply};
use tidegate_core::{NodeId, Reason, Verdict};
use tidegate_http::forward::has_claims;
use tidegate_http::normalize::{Kept, Normalized, normalize};
use tidegate_http::{BodyFraming, HeadError, Method, RequestHead};

use crate::cache::lookup::{self, Hit, Lookup};
use crate::data_core::client::{Client, Introduced};
use crate::data_core::{Bytes, DataCore, Scratch};
use crate::defence::{CameFrom, Hold};
use crate::service::client_info::ClientInfo;
use crate::service::plan::Plan;
use crate::session::batch::{Deferred, Ready};
use crate::session::respond::{self, OfConnection};
use crate::session::transmit::{self, Unsent};
use crate::static_files::serve;

/// What is asked, and by whom.
type Asked<'a> = (&'a RequestHead<'a>, &'a Normalized<'a>, &'a ClientInfo<'a>);

/// Who asks, for rules and logs.
#[derive(Clone, Copy)]
pub(crate) struct RequestContext {
    pub peer: SocketAddr,
    /// When the request in progress began.
    pub began: Instant,
    /// Its connection's place in the prefix tree, if anybody watches.
    place: Option<NodeId>,
    /// The request's first line was judged when it came.
    is_line_judged: bool,
}

/// What became of one request.
pub(super) enum Handled {
    Answered {
        keep_alive: bool,
    },
    /// The answer is ready, and sent with those of others.
    Deferred,
    /// The client has not taken all of it yet; it is counted when it has ended.
    Unsent {
        unsent: Unsent,
        keep_alive: bool,
        ready: Box<Ready>,
    },
    /// `held`: the defence lets the request wait first. `is_absent`: the cache has been looked into, and has nothing.
    NeedsExchange {
        normalized: Kept,
        held: Option<Hold>,
        is_absent: bool,
    },
    /// A rule says no.
    Refused(Verdict),
    /// The defence says no, and how to say it; `None`: by the end of the connection.
    TurnedAway(Decision, Option<Box<Reply>>),
}

impl RequestContext {
    pub(crate) fn new(client: &Client, is_line_judged: bool, began: Instant) -> Self {
        Self { peer: client.peer(), began, place: client.place, is_line_judged }
    }

    /// Answers from the cache if that is all it takes; where the answer can wait for others, in `deferred`.
    pub(super) fn answer(
        self,
        core: &DataCore,
        client: &Client,
        head: &RequestHead<'_>,
        deferred: Option<&mut Deferred>,
    ) -> Result<Handled, HeadError> {
        let plan = core.plan_ref();
        let mut scratch = core.scratch.borrow_mut();
        let Scratch { target, key, out, whole } = &mut *scratch;
        let normalized = normalize(head, plan.personality, target)?;
        if client.introduced() == Introduced::Unnamed && has_claims(&head.fields) {
            // They would be believed as the proxy's own, which knows nothing of HTTP.
            let decision = Decision::new(Verdict::Refuse, Reason::Form);
            let reply = Box::new(Reply { status: 400, ..Reply::default() });
            return Ok(Handled::TurnedAway(decision, Some(reply)));
        }
        let info = ClientInfo::of(&plan, head, self.peer.ip().to_canonical(), client.is_encrypted());
        if plan.keeps_out(&info, client.is_named(), &core.block_list, || core.clock.elapsed_ms()) {
            let decision = Decision::new(Verdict::Refuse, Reason::Listed);
            core.note_refused(self.peer.ip(), &info, decision.reason);
            // A connection that is the client's alone ends.
            let reply = info.via_proxy.then(|| Box::new(Reply { status: 403, ..Reply::default() }));
            return Ok(Handled::TurnedAway(decision, reply));
        }
        let exchange =
            |held, is_absent| Ok(Handled::NeedsExchange { normalized: normalized.keep(), held, is_absent });
        let may_be_stored = head.framing == BodyFraming::None
            && !head.upgrade
            && matches!(head.method, Method::Get | Method::Head)
            && !plan.has_own_answer(head.method, &info, &normalized)
            && !plan.reviews_request(head.method_bytes, &normalized);
        let asked = (head, &normalized, &info);
        let store = may_be_stored.then(|| lookup::locate(core, &plan, asked, key)).flatten();
        if let Some(store) = store {
            // The memory answers while the defence looks at the request.
            store.prefetch(key);
        }
        let held = match self.judge(core, client, &plan, asked) {
            ControlFlow::Continue(held) => held,
            ControlFlow::Break(handled) => return Ok(handled),
        };
        let Some(store) = store.filter(|_| held.is_none()) else { return exchange(held, false) };
        let hit = match lookup::look(core, store, head, key) {
            Lookup::Hit(hit) => hit,
            Lookup::Absent => {
                core.flights.prefetch(key);
                return exchange(None, true);
            }
            Lookup::Miss => return exchange(None, false),
        };
        if let Some((decision, reply)) =
            self.starts(core, &info, head, &normalized, hit.status, CameFrom::HERE)
        {
            return Ok(Handled::TurnedAway(decision, reply.map(Box::new)));
        }
        lookup::count_hit(core, &hit);
        if let Some(deferred) = deferred.filter(|_| keeps_alive(core, head) && transmit::is_short(&hit)) {
            let (is_encrypted, whole) = (client.is_encrypted(), &mut deferred.bytes);
            let (status, sent) =
                transmit::write_whole(core, &plan.pseudonym, head, &hit, is_encrypted, whole);
            deferred.ready = Some(Ready { context: self, status, sent, cache: hit.label() });
            return Ok(Handled::Deferred);
        }
        Ok(self.send(core, client, &plan, asked, &hit, (out, whole)))
    }

    /// What the defence and the rules say of a request: whether it is held before it goes on, or what became of it.
    #[inline]
    fn judge(
        self,
        core: &DataCore,
        client: &Client,
        plan: &Plan,
        (head, normalized, info): Asked<'_>,
    ) -> ControlFlow<Handled, Option<Hold>> {
        let mut held = None;
        if let (Some(defence), Some(place)) = (&core.defence, self.place) {
            let now_ms = core.clock.elapsed_ms();
            let client = defence.client(Some(place), self.peer.ip(), info, now_ms);
            let decision = defence.judge(client, head, normalized, self.is_line_judged, now_ms);
            match decision.verdict {
                Verdict::Continue => {}
                Verdict::Delay => held = Some(Hold::Delay),
                // A trusted proxy's connection has other clients' requests on it.
                Verdict::Tarpit if !info.via_proxy => return ControlFlow::Continue(Some(Hold::Tarpit)),
                _ => {
                    let reply = defence.reply(client, head, normalized, decision, now_ms);
                    return ControlFlow::Break(Handled::TurnedAway(decision, reply.map(Box::new)));
                }
            }
        }
        match plan.police(self.peer, || client.local_addr(), head, normalized) {
            Verdict::Continue => ControlFlow::Continue(held),
            verdict => ControlFlow::Break(Handled::Refused(verdict)),
        }
    }

    /// Sends what was found, as far as the client takes it now. The head is put together in the first buffer; in the
    /// second, with the body, where it is short.
    #[inline]
    fn send(
        self,
        core: &DataCore,
        client: &Client,
        plan: &Plan,
        (head, normalized, info): Asked<'_>,
        hit: &Hit,
        (out, whole): (&mut Vec<u8>, &mut Vec<u8>),
    ) -> Handled {
        let keep_alive = keeps_alive(core, head);
        out.clear();
        let connection = Some(OfConnection { keep_alive, is_encrypted: client.is_encrypted() });
        let form = respond::write_hit(core, &plan.pseudonym, head, hit, connection, out);
        let body = form.body.1 - form.body.0;
        let file = match client.is_encrypted() {
            // The kernel cannot encrypt what it reads.
            true => None,
            false => serve::large_file(core, plan, normalized, hit, body),
        };
        let (sent, total) = match file {
            Some(file) => transmit::send_large_file(client, file, &hit.object, &form, out),
            None => transmit::send_hit(client, &hit.object, &form, out, whole),
        };
        let bytes = Bytes { head: total.saturating_sub(body), body };
        let ready = Ready { context: self, status: form.status, sent: bytes, cache: hit.label() };
        if form.status >= 400 {
            self.responded(core, info, normalized, form.status, CameFrom::HERE);
        }
        match sent {
            transmit::Sent::All => {
                ready.ended(core, head);
                Handled::Answered { keep_alive }
            }
            transmit::Sent::Broken(left) => {
                ready.broke_off(core, head, left);
                Handled::Answered { keep_alive: false }
            }
            transmit::Sent::Part(unsent) => Handled::Unsent { unsent, keep_alive, ready: Box::new(ready) },
        }
    }

    /// Asks the defence about a response of which nothing was sent: what it decides, and says in the response's place.
    #[inline]
    pub(super) fn starts(
        self,
        core: &DataCore,
        info: &ClientInfo<'_>,
        head: &RequestHead<'_>,
        normalized: &Normalized<'_>,
        status: u16,
        from: CameFrom,
    ) -> Option<(Decision, Option<Reply>)> {
        let defence = core.defence.as_ref().filter(|defence| defence.looks_at_starts())?;
        let (place, now_ms) = (self.place?, core.clock.elapsed_ms());
        let client = defence.client(Some(place), self.peer.ip(), info, now_ms);
        defence.judge_start(client, head, normalized, status, from, now_ms)
    }

    /// Tells the defence of a response; whether the connection may go on.
    pub(super) fn responded(
        self,
        core: &DataCore,
        info: &ClientInfo<'_>,
        normalized: &Normalized<'_>,
        status: u16,
        from: CameFrom,
    ) -> bool {
        let (Some(defence), Some(place)) = (&core.defence, self.place) else { return true };
        let now_ms = core.clock.elapsed_ms();
        let client = defence.client(Some(place), self.peer.ip(), info, now_ms);
        let decision = defence.responded(client, normalized, status, from, now_ms);
        info.via_proxy || !decision.ends_connection()
    }
}

/// Whether the connection goes on after the response, as far as this end is concerned.
#[inline]
fn keeps_alive(core: &DataCore, head: &RequestHead<'_>) -> bool {
    head.keep_alive && !core.is_draining()
}
