//! A request that takes more than the cache: its body comes in, its answer goes out, both as a stream.

use std::cell::Cell;
use std::fs::File;
use std::future::poll_fn;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tidegate_core::Verdict;
use tidegate_core::hooks::{Decision, Reply, ResponseView, Slow};
use tidegate_http::forward::write_field;
use tidegate_http::{FieldId, RequestHead, Version, write_chunk_header, write_last_chunk};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::cache::fill::{self, Streamed};
use crate::cache::lookup::{Hit, label};
use crate::cache::transfer::ready;
use crate::data_core::client::ClientStream;
use crate::data_core::{Bytes, DataCore, millis};
use crate::defence::{CameFrom, Held, Hold};
use crate::service::answer::{self, Answer, Incoming};
use crate::service::client_info::ClientInfo;
use crate::session::body::ClientBody;
use crate::session::context::RequestContext;
use crate::session::deadlines::Waiting;
use crate::session::respond::{self, ClientFraming, FileForm, OfConnection};
use crate::session::transmit::{self, RateWatch, Source, Unsent};
use crate::session::{Connection, Request, cut_off};
use crate::static_files::serve::{self, OpenFile};
use crate::telemetry::access_log::{CLIENT_LEFT, CUT_OFF};
use crate::upstream::UpstreamError;

/// Bytes copied at once in either direction of a tunnel.
const TUNNEL_BYTES: usize = 16 * 1024;
/// How the log and the metrics name what goes by a tunnel.
const TUNNEL: &str = "tunnel";

/// What has been sent of a response, for the log if it ends early.
struct Progress {
    watch: RateWatch,
    status: u16,
    head_bytes: u64,
    cache: &'static str,
    /// Nothing but the connection's end tells the client that it has all.
    ends_with_connection: bool,
}

impl Progress {
    fn new(core: &DataCore) -> Self {
        Self {
            watch: RateWatch::new(core),
            status: CLIENT_LEFT,
            head_bytes: 0,
            cache: "none",
            ends_with_connection: false,
        }
    }

    /// A head of so many bytes is sent next.
    fn begin(&mut self, status: u16, head_bytes: u64, cache: &'static str) {
        (self.status, self.head_bytes, self.cache) = (status, self.watch.sent + head_bytes, cache);
    }

    fn bytes(&self) -> Bytes {
        let head = self.watch.sent.min(self.head_bytes);
        Bytes { head, body: self.watch.sent - head }
    }
}

/// How a response ended, for the log and the counters.
struct Delivered {
    status: u16,
    bytes: Bytes,
    keep_alive: bool,
    cache: &'static str,
}

impl Connection<'_> {
    fn of_connection(&self, keep_alive: bool) -> Option<OfConnection> {
        Some(OfConnection { keep_alive, is_encrypted: self.client.is_encrypted() })
    }

    /// Answers one request. Returns what the client sent after it, or `None` when the connection ends.
    pub(super) async fn exchange(self, mut request: Box<Request>) -> Option<Vec<u8>> {
        self.client.slot.clear();
        let rest = std::mem::take(&mut request.rest);
        let Request { buffer, parsed, context, is_absent, held, .. } = &*request;
        let (context, is_absent) = (*context, *is_absent);
        let head = parsed.head(buffer);
        if let Some(hold) = *held
            && !Box::pin(self.hold_back(hold, &head)).await
        {
            if self.core.is_cut_off() {
                self.log_ended(context, &head, &Progress { status: CUT_OFF, ..Progress::new(self.core) });
            }
            return None;
        }
        let plan = self.core.plan();
        let normalized = request.normalized.get();
        let mut body = ClientBody::new(self.client, self.core, &head, rest);
        let mut progress = Progress::new(self.core);
        if let Some((status, fields)) = answer::refusal(&head, plan.limits.body_bytes) {
            let delivered = self.deliver_local(&head, status, fields, false, &mut progress).await;
            return self.ended(context, &head, delivered, body, &progress).await;
        }
        let peer = context.peer.ip().to_canonical();
        let info = ClientInfo::of(&plan, &head, peer, self.client.is_encrypted());
        if let Some(answer) = plan.own_answer(head.method, &info, &normalized) {
            let delivered = Box::pin(self.deliver(&head, answer, &mut body, &mut progress)).await;
            return self.ended(context, &head, delivered, body, &progress).await;
        }
        let incoming = Incoming { head: &head, normalized: &normalized, buffer, peer, info, is_absent };
        let asked_ms = self.core.clock.elapsed_ms();
        self.client.has_upstream.set(true);
        let answer = tokio::select! {
            biased;
            answer = answer::answer(self.core, incoming, &mut body) => Some(answer),
            () = poll_fn(|context| self.poll_given_up(context)) => None,
        };
        let upstream_ms = self.core.clock.elapsed_ms().saturating_sub(asked_ms);
        let Some(answer) = answer else {
            if self.core.is_cut_off() {
                progress.status = CUT_OFF;
                self.log_ended(context, &head, &progress);
                return None;
            }
            self.core.metrics.clients_gone_total.add(1);
            // The upstream works all the same, on what may well be new to the cache.
            let from = CameFrom::given_up(&head, upstream_ms);
            context.responded(self.core, &info, &normalized, ResponseView::GIVEN_UP, from);
            self.log_ended(context, &head, &progress);
            return None;
        };
        self.client.has_upstream.set(matches!(answer, Answer::Streamed(_)));
        let (code, from) = (answer.code(), CameFrom::of(&head, &answer, upstream_ms));
        if body.has_late() && !self.send_late(&mut body).await {
            context.responded(self.core, &info, &normalized, code, from);
            self.log_ended(context, &head, &progress);
            return None;
        }
        if let Some((decision, reply)) = context.starts(self.core, &info, &head, &normalized, code, from) {
            self.client.has_upstream.set(false);
            return Box::pin(self.refuse_response(context, &head, decision, reply, body)).await;
        }
        let delivered = match answer {
            Answer::Streamed(streamed) if streamed.status == 101 => {
                self.core.count(101, Bytes::default(), TUNNEL, context.began);
                let carried = Cell::new(0);
                Box::pin(self.tunnel(*streamed, &body.into_rest(), &carried)).await;
                let bytes = Bytes { head: 0, body: carried.get() };
                self.core.log(peer, &head, 101, bytes, TUNNEL, context.began);
                return None;
            }
            answer => {
                let delivered = {
                    let delivering = pin!(self.deliver(&head, answer, &mut body, &mut progress));
                    self.unless_cut_off(delivering).await
                };
                delivered.unwrap_or_else(|| Err(cut_off()))
            }
        };
        if delivered.is_err() && progress.ends_with_connection {
            // Its end would say that it is all (RFC 9112 §8).
            self.client.reset();
        }
        // Whether or not the client has taken all of it: the upstream has done its part.
        let status = delivered.as_ref().map_or(code, |delivered| delivered.status);
        let may_go_on = context.responded(self.core, &info, &normalized, status, from);
        let delivered = delivered
            .map(|delivered| Delivered { keep_alive: delivered.keep_alive && may_go_on, ..delivered });
        self.ended(context, &head, delivered, body, &progress).await
    }

    /// Does to a request what the defence says before it is looked at; whether it may go on then.
    async fn hold_back(self, hold: Hold, head: &RequestHead<'_>) -> bool {
        let Some(defence) = &self.core.defence else { return true };
        match (hold, defence.hold(hold)) {
            (Hold::Tarpit, held) => {
                self.core.metrics.requests_policed_total.add(1);
                if let Some(held) = held {
                    self.tarpit(held).await;
                }
                false
            }
            (Hold::Delay, Some(held)) => self.unless_cut_off(pin!(held.wait())).await.is_some(),
            (Hold::Delay, None) => {
                let progress = &mut Progress::new(self.core);
                let _ = self.deliver_local(head, 429, b"Retry-After: 10\r\n", false, progress).await;
                false
            }
        }
    }

    /// Counts and logs a response that was delivered, or was not, and takes what is left of the request's body; what
    /// the client sent after it, if the connection goes on.
    async fn ended(
        self,
        context: RequestContext,
        head: &RequestHead<'_>,
        delivered: io::Result<Delivered>,
        mut body: ClientBody<'_>,
        progress: &Progress,
    ) -> Option<Vec<u8>> {
        self.client.has_upstream.set(false);
        self.watch_reading(&delivered);
        if self.client.slot.expired() == Some(Waiting::Body) {
            self.core.too_slow(self.client.place, self.client.peer(), Slow::Body);
        }
        let Ok(Delivered { status, bytes, keep_alive, cache }) = delivered else {
            self.core.metrics.responses_broken_total.add(1);
            self.log_ended(context, head, progress);
            return None;
        };
        self.core.account(context.peer.ip(), head, status, bytes, cache, context.began);
        (keep_alive && body.discard().await).then(|| body.into_rest())
    }

    /// Whether nobody waits for the upstream any more: the client is gone, or a drain is over.
    fn poll_given_up(self, context: &Context<'_>) -> Poll<()> {
        match self.core.is_cut_off() {
            true => Poll::Ready(()),
            false => self.client.poll_failed(context),
        }
    }

    /// The response, if there was one, ended before it was whole.
    fn log_ended(self, context: RequestContext, head: &RequestHead<'_>, progress: &Progress) {
        let Progress { status, cache, .. } = *progress;
        self.core.log(context.peer.ip(), head, status, progress.bytes(), cache, context.began);
    }

    /// Sends what is left of interim responses. False if the client does not take it: the connection ends.
    async fn send_late(self, body: &mut ClientBody<'_>) -> bool {
        let sent = Box::pin(body.send_late()).await;
        self.watch_reading(&sent);
        if sent.is_err() {
            self.client.has_upstream.set(false);
            self.core.metrics.responses_broken_total.add(1);
        }
        sent.is_ok()
    }

    /// Does to a response of which nothing was sent what the defence says; what the client sent after the request, if
    /// the connection goes on.
    async fn refuse_response(
        self,
        context: RequestContext,
        head: &RequestHead<'_>,
        decision: Decision,
        reply: Option<Reply>,
        mut body: ClientBody<'_>,
    ) -> Option<Vec<u8>> {
        self.core.metrics.requests_policed_total.add(1);
        let Some(reply) = reply else {
            if decision.verdict != Verdict::Drop {
                self.client.set_zero_linger();
                let _ = self.client.shutdown(std::net::Shutdown::Both);
            }
            return None;
        };
        let keep_alive = head.keep_alive && body.is_disposable() && !self.core.is_draining();
        let (out, bytes) = respond::reply(self.core, head, &reply, keep_alive);
        self.send(&mut RateWatch::new(self.core), &out).await.ok()?;
        self.core.account(context.peer.ip(), head, reply.status, bytes, "none", context.began);
        (keep_alive && body.discard().await).then(|| body.into_rest())
    }

    /// Holds the connection without an answer, until its client gives up or the server is to end.
    async fn tarpit(self, held: Held<'_>) {
        tokio::select! {
            () = held.wait() => {}
            () = poll_fn(|context| self.client.poll_failed(context)) => {}
            () = self.core.drained() => {}
        }
    }

    async fn deliver(
        self,
        head: &RequestHead<'_>,
        answer: Answer,
        body: &mut ClientBody<'_>,
        progress: &mut Progress,
    ) -> io::Result<Delivered> {
        let keep_alive = head.keep_alive && !self.core.is_draining();
        // A body that is not read to its end ends the connection, and the response says so (RFC 9112 §9.6).
        let goes_on = keep_alive && body.is_disposable();
        match answer {
            Answer::Stored(hit) => self.deliver_stored(head, hit, goes_on, progress).await,
            Answer::Streamed(streamed) => {
                self.deliver_streamed(head, streamed, keep_alive, body, progress).await
            }
            Answer::File(file) => Box::pin(self.deliver_file(head, file, goes_on, progress)).await,
            Answer::Local { status, fields } => {
                // After 400, 408 and 413 what the client sends next cannot be told from the rest of the body.
                let goes_on = goes_on && !matches!(status, 400 | 408 | 413);
                self.deliver_local(head, status, &fields, goes_on, progress).await
            }
            Answer::KeyAuthorization(text) => {
                let (out, bytes) = respond::key_authorization(self.core, head, &text, goes_on);
                self.deliver_whole(200, &out, bytes, goes_on, progress).await
            }
        }
    }

    async fn deliver_local(
        self,
        head: &RequestHead<'_>,
        status: u16,
        fields: &[u8],
        keep_alive: bool,
        progress: &mut Progress,
    ) -> io::Result<Delivered> {
        let (out, bytes) = respond::local_response(self.core, head, status, fields, keep_alive);
        self.deliver_whole(status, &out, bytes, keep_alive, progress).await
    }

    /// Sends a response that was made here.
    async fn deliver_whole(
        self,
        status: u16,
        out: &[u8],
        bytes: Bytes,
        keep_alive: bool,
        progress: &mut Progress,
    ) -> io::Result<Delivered> {
        progress.begin(status, bytes.head, "none");
        self.send(&mut progress.watch, out).await?;
        Ok(Delivered { status, bytes, keep_alive, cache: "none" })
    }

    async fn deliver_stored(
        self,
        head: &RequestHead<'_>,
        hit: Hit,
        keep_alive: bool,
        progress: &mut Progress,
    ) -> io::Result<Delivered> {
        let label = hit.label();
        let (bytes, form) = respond::stored_head(self.core, head, &hit, self.of_connection(keep_alive));
        let (start, end) = form.body;
        let sent = Bytes { head: bytes.len() as u64, body: end - start };
        let mut unsent = Unsent::new(bytes, Some((Source::Stored(hit.object), start, end)));
        progress.begin(form.status, sent.head, label);
        transmit::flush(self.client, self.core, &mut progress.watch, &mut unsent).await?;
        Ok(Delivered { status: form.status, bytes: sent, keep_alive, cache: label })
    }

    async fn deliver_streamed(
        self,
        head: &RequestHead<'_>,
        mut streamed: Box<Streamed>,
        keep_alive: bool,
        body: &mut ClientBody<'_>,
        progress: &mut Progress,
    ) -> io::Result<Delivered> {
        let framing = ClientFraming::of(head, &streamed);
        let may_go_on = keep_alive;
        // A refusal that comes before the end of the request's body mostly means that nobody wants the rest of it.
        let refused = !body.is_complete() && streamed.status >= 400;
        let keep_alive = keep_alive && framing != ClientFraming::UntilClose && !refused;
        // A client that was not told to continue gets its answer instead (RFC 9110 §10.1.1).
        let upload = streamed.take_upload().filter(|_| !body.awaits_continue());
        let may_go_on = may_go_on && upload.is_none() && body.is_disposable();
        let sent = match upload {
            Some(mut upload) => {
                let download = self.send_streamed(head, streamed, framing, keep_alive, progress);
                Box::pin(beside(upload.run(body), download)).await?
            }
            None => self.send_streamed(head, streamed, framing, keep_alive, progress).await?,
        };
        match sent {
            Ok(delivered) => Ok(delivered),
            Err(error) => self.deliver_local(head, error.status(), b"", may_go_on, progress).await,
        }
    }

    /// The inner error is that of an upstream that breaks off before anything of its response has been sent.
    async fn send_streamed(
        self,
        head: &RequestHead<'_>,
        mut streamed: Box<Streamed>,
        framing: ClientFraming,
        keep_alive: bool,
        progress: &mut Progress,
    ) -> io::Result<Result<Delivered, UpstreamError>> {
        let (status, label) = (streamed.status, label(streamed.forward.reason));
        self.send_interim(&mut streamed, head.version, &mut progress.watch).await?;
        let interim_bytes = progress.watch.sent;
        let mut out = std::mem::take(&mut streamed.head);
        respond::end_streamed_head(
            self.core,
            head.version,
            &streamed,
            framing,
            self.of_connection(keep_alive),
            &mut out,
        );
        progress.begin(status, out.len() as u64, label);
        progress.ends_with_connection = framing == ClientFraming::UntilClose;
        let watch = &mut progress.watch;
        let chunked = framing == ClientFraming::Chunked;
        loop {
            // The head waits for the first piece only if that piece is here already.
            let mut next = std::pin::pin!(streamed.chunk());
            let piece = match ready(next.as_mut()).await {
                Some(piece) => piece,
                None => {
                    self.send(watch, &out).await?;
                    out.clear();
                    tokio::select! {
                        biased;
                        piece = next => piece,
                        () = poll_fn(|context| self.client.poll_failed(context)) => {
                            return Err(io::ErrorKind::ConnectionReset.into());
                        }
                    }
                }
            };
            let piece = match piece {
                Ok(piece) => piece,
                Err(error) => {
                    self.core.upstream_broke_off(&error, head.target);
                    let is_unsent = watch.sent == interim_bytes;
                    return if is_unsent { Ok(Err(error)) } else { Err(io::Error::other(error)) };
                }
            };
            match piece {
                None => break,
                Some([]) => {}
                Some(_) if matches!(framing, ClientFraming::NoBody | ClientFraming::HeadOnly(_)) => {}
                Some(piece) => {
                    if chunked {
                        write_chunk_header(piece.len(), &mut out);
                    }
                    if piece.len() <= TUNNEL_BYTES {
                        out.extend_from_slice(piece);
                    } else {
                        self.send(watch, &out).await?;
                        out.clear();
                        self.send(watch, piece).await?;
                    }
                    if chunked {
                        out.extend_from_slice(b"\r\n");
                    }
                    self.send(watch, &out).await?;
                    out.clear();
                }
            }
        }
        if chunked {
            write_last_chunk(streamed.trailers(), &mut out);
        }
        self.send(watch, &out).await?;
        Ok(Ok(Delivered { status, bytes: progress.bytes(), keep_alive, cache: label }))
    }

    /// RFC 9110 §15.2: interim responses go on to clients that understand them.
    async fn send_interim(
        self,
        streamed: &mut Streamed,
        version: Version,
        watch: &mut RateWatch,
    ) -> io::Result<()> {
        while let Some(interim) = streamed.next_informational() {
            if version == Version::Http10 || interim.head().status == 100 {
                continue;
            }
            let mut out = Vec::with_capacity(256);
            fill::write_informational(&interim.head(), &mut out);
            self.core.metrics.responses_1xx_total.add(1);
            self.send(watch, &out).await?;
        }
        Ok(())
    }

    async fn deliver_file(
        self,
        head: &RequestHead<'_>,
        file: OpenFile,
        keep_alive: bool,
        progress: &mut Progress,
    ) -> io::Result<Delivered> {
        let (status, out, (start, end)) =
            match respond::file_form(self.core, head, &file, self.of_connection(keep_alive)) {
                FileForm::Sent { status, head, part } => (status, head, part),
                FileForm::Refused { status, fields } => {
                    return self.deliver_local(head, status, fields.as_bytes(), keep_alive, progress).await;
                }
            };
        progress.begin(status, out.len() as u64, "file");
        self.send(&mut progress.watch, &out).await?;
        if self.client.is_encrypted() {
            Box::pin(self.send_file_encrypted(file.file, start, end, &mut progress.watch)).await?;
        } else if start < end {
            let source = transmit::FileSource { file: file.file.as_fd(), start, end };
            transmit::send_file(self.client, self.core, &mut progress.watch, source).await?;
        }
        Ok(Delivered { status, bytes: progress.bytes(), keep_alive, cache: "file" })
    }

    async fn send_file_encrypted(
        self,
        file: Arc<File>,
        start: u64,
        end: u64,
        watch: &mut RateWatch,
    ) -> io::Result<()> {
        let mut at = start;
        while at < end {
            let piece = serve::read_piece(&file, at, end).await?;
            self.send(watch, &piece).await?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    /// RFC 9110 §7.8: from here on bytes go both ways until either side has ended or both are silent for too long.
    /// `carried`: how many the client has been sent.
    async fn tunnel(self, streamed: Streamed, rest: &[u8], carried: &Cell<u64>) {
        self.core.metrics.tunnels_total.add(1);
        let mut out = Vec::with_capacity(512);
        let Some(response) = streamed.into_response() else { return };
        fill::write_status_line(&response.head(), &mut out);
        for (id, name, value) in response.head().fields.iter() {
            // A tunnel has no content (RFC 9110 §8.6, RFC 9112 §6.1).
            if !matches!(id, FieldId::ContentLength | FieldId::TransferEncoding) {
                write_field(name, value, &mut out);
            }
        }
        out.extend_from_slice(b"\r\n");
        // The tunnel keeps its place among the server's connections.
        let Some((mut upstream, lease, early)) = response.into_tunnel() else { return };
        lease.becomes_tunnel(self.client.as_fd().as_raw_fd());
        let early_bytes = early.len();
        out.extend_from_slice(&early);
        let timeout_ms = self.core.with_plan(|plan| millis(plan.limits.tunnel_timeout));
        if self.send(&mut RateWatch::new(self.core), &out).await.is_err() {
            return;
        }
        let (core, slot) = (self.core, &self.client.slot);
        let alive = || slot.set(Waiting::Tunnel, core.deadline(timeout_ms));
        alive();
        let carry = |bytes: usize| carried.set(carried.get() + bytes as u64);
        carry(early_bytes);
        let stream = ClientStream { client: self.client, clients: &self.core.clients };
        let (mut from_client, mut to_client) = (stream, stream);
        let (mut from_upstream, mut to_upstream) = upstream.split();
        let up = async {
            to_upstream.write_all(rest).await?;
            copy(&mut from_client, &mut to_upstream, &alive, |_| {}).await
        };
        let down = copy(&mut from_upstream, &mut to_client, &alive, carry);
        // An error on either side ends both; an end of input on one side is passed on and the other goes on.
        let both = async { tokio::try_join!(up, down) };
        tokio::select! {
            _ = both => {}
            () = self.client.expired() => {}
        }
    }

    async fn send(self, watch: &mut RateWatch, bytes: &[u8]) -> io::Result<()> {
        transmit::send_all(self.client, self.core, watch, bytes).await
    }
}

async fn copy(
    from: &mut (impl AsyncReadExt + Unpin),
    to: &mut (impl AsyncWriteExt + Unpin),
    alive: &impl Fn(),
    carried: impl Fn(usize),
) -> io::Result<()> {
    let mut buffer = vec![0; TUNNEL_BYTES];
    loop {
        let length = from.read(&mut buffer).await?;
        alive();
        match buffer.get(..length).filter(|bytes| !bytes.is_empty()) {
            Some(bytes) => {
                to.write_all(bytes).await?;
                carried(length);
            }
            None => return to.shutdown().await,
        }
    }
}

/// Runs `upload` beside `download` until the download has ended.
async fn beside<T>(
    upload: impl Future<Output = Result<(), UpstreamError>>,
    download: impl Future<Output = io::Result<T>>,
) -> io::Result<T> {
    let mut download = std::pin::pin!(download);
    tokio::select! {
        biased;
        delivered = &mut download => delivered,
        sent = upload => match sent {
            Err(error @ UpstreamError::Client(_)) => Err(io::Error::other(error)),
            // A server that takes no more may still answer in full.
            _ => download.await,
        },
    }
}
