//! Answers of the service as transports of messages take them: the whole of a short one, a long one piece by piece.

use std::net::IpAddr;
use std::rc::Rc;
use std::time::Instant;

use bytes::Bytes as Buffer;
use tidegate_core::hooks::Reply;
use tidegate_dhttp::driver::{Aborted, Body, BodySender, Request, Response};
use tidegate_http::normalize::Normalized;
use tidegate_http::{Progress, RequestHead, RequestParser, Version, write_chunk_header, write_last_chunk};
use tidegate_store::Object;

use crate::cache::fill::Streamed;
use crate::cache::lookup::{self, Hit};
use crate::data_core::{Bytes, DataCore};
use crate::message::body::UploadedBody;
use crate::message::{Answered, End, Refusal, Whose};
use crate::service::answer::{Answer, Incoming};
use crate::service::client_info::ClientInfo;
use crate::service::plan::Plan;
use crate::session::respond::{self as heads, ClientFraming, FileForm};
use crate::static_files::serve::{self, OpenFile};
use crate::upstream::UpstreamError;

/// Bytes of a stored object that are handed over at once.
const PIECE_BYTES: usize = 64 * 1024;

/// One request whose answer is on its way.
pub(crate) struct Exchange {
    pub core: Rc<DataCore>,
    pub peer: IpAddr,
    /// The request head's bytes, for the log.
    head: Buffer,
    /// What its client speaks.
    version: Version,
    pub began: Instant,
}

/// An error before the request could be read, and its bytes.
pub(crate) fn error_response(core: &DataCore, status: u16) -> (Response, Bytes) {
    let mut out = Vec::with_capacity(256);
    let body = heads::write_error(status, &core.clock.date(), true, &mut out);
    let total = out.len() as u64;
    core.metrics.count_response(status, total);
    (whole(out), Bytes { head: total - body, body })
}

fn whole(bytes: Vec<u8>) -> Response {
    let total = bytes.len() as u64;
    Response::from_wire(Body::full(bytes.into()), Some(total))
}

impl Exchange {
    pub(super) fn new(core: &Rc<DataCore>, whose: Whose, request: &Request, began: Instant) -> Self {
        let peer = request.arrival.client.ip().to_canonical();
        let version = whose.version(Version::Http11);
        Self { core: Rc::clone(core), peer, head: request.head.clone(), version, began }
    }

    /// What it is that is asked.
    pub(super) fn incoming<'i>(
        &self,
        plan: &Plan,
        head: &'i RequestHead<'i>,
        normalized: &'i Normalized<'i>,
        buffer: &'i Buffer,
        is_encrypted: bool,
    ) -> Incoming<'i> {
        let info = ClientInfo::of(plan, head, self.peer, is_encrypted);
        Incoming { head, normalized, buffer, peer: self.peer, info, is_absent: false }
    }

    pub(crate) fn respond(self, head: &RequestHead<'_>, answer: Answer, body: UploadedBody) -> Response {
        // A message's framing is HTTP/1.1's, whatever the request says.
        let head = RequestHead { version: Version::Http11, ..*head };
        match answer {
            Answer::Stored(hit) => self.stored(&head, &hit),
            Answer::Streamed(streamed) => self.streamed(&head, streamed, body),
            Answer::File(file) => self.file(&head, file),
            Answer::Local { status, fields } => self.local(&head, status, &fields),
            Answer::KeyAuthorization(text) => {
                let (out, bytes) = heads::key_authorization(&self.core, &head, &text, true);
                self.account(&head, 200, bytes, "none");
                whole(out)
            }
        }
    }

    /// Does to a request that may not go on what was decided.
    pub(super) fn turn_away(&self, head: &RequestHead<'_>, refusal: Refusal) -> Result<Answered, End> {
        self.core.metrics.requests_policed_total.add(1);
        match refusal {
            Refusal::Reply(reply) => Ok(Answered::with(self.refused(head, &reply))),
            Refusal::End(end) => Err(end),
        }
    }

    /// What a client is told that may not go on.
    fn refused(&self, head: &RequestHead<'_>, reply: &Reply) -> Response {
        let (out, bytes) = heads::reply(&self.core, head, reply, true);
        self.account(head, reply.status, bytes, "none");
        whole(out)
    }

    fn local(&self, head: &RequestHead<'_>, status: u16, fields: &[u8]) -> Response {
        let (out, bytes) = heads::local_response(&self.core, head, status, fields, true);
        self.account(head, status, bytes, "none");
        whole(out)
    }

    fn stored(&self, head: &RequestHead<'_>, hit: &Hit) -> Response {
        let (first, form) = heads::stored_head(&self.core, head, hit, None);
        let (start, end) = form.body;
        let bytes = Bytes { head: first.len() as u64, body: end - start };
        self.account(head, form.status, bytes, hit.label());
        let pieces = Extents { object: hit.object.clone(), at: start, end };
        Response::from_wire(Body::pieces(first.into(), pieces), Some(bytes.head + bytes.body))
    }

    fn streamed(self, head: &RequestHead<'_>, streamed: Box<Streamed>, body: UploadedBody) -> Response {
        let framing = ClientFraming::of(head, &streamed);
        let mut streamed = streamed;
        let mut first = std::mem::take(&mut streamed.head);
        heads::end_streamed_head(&self.core, head.version, &streamed, framing, None, &mut first);
        let total_bytes = match framing {
            ClientFraming::Length(length) => Some(first.len() as u64 + length),
            ClientFraming::NoBody | ClientFraming::HeadOnly(_) => Some(first.len() as u64),
            ClientFraming::Chunked | ClientFraming::UntilClose => None,
        };
        let head_bytes = first.len() as u64;
        let (sender, http) = Body::channel_after(first.into());
        tokio::task::spawn_local(async move { self.pump(streamed, body, head_bytes, framing, sender).await });
        Response::from_wire(http, total_bytes)
    }

    /// Hands a response on as it comes from the upstream, while the request's body may still be on its way there.
    async fn pump(
        self,
        mut streamed: Box<Streamed>,
        mut body: UploadedBody,
        head_bytes: u64,
        framing: ClientFraming,
        sender: BodySender,
    ) {
        let status = streamed.status;
        let label = lookup::label(streamed.forward.reason);
        let mut bytes = Bytes { head: head_bytes, body: 0 };
        let upload = streamed.take_upload();
        let ended = {
            // Frames of HTTP/2 and HTTP/3 take the place of chunks.
            let counts_framing = self.version <= Version::Http11;
            let sent_bytes = &mut bytes.body;
            let mut download =
                std::pin::pin!(download(&mut streamed, framing, sender, sent_bytes, counts_framing));
            match upload {
                Some(mut upload) => tokio::select! {
                    biased;
                    ended = &mut download => ended,
                    sent = upload.run(&mut body) => match sent {
                        // The server would wait for the rest, and the client for what it says to that.
                        Err(UpstreamError::Client(_)) => Err(Cut::Client),
                        // A server that takes no more may still answer in full.
                        _ => download.await,
                    },
                },
                None => download.await,
            }
        };
        match ended {
            Ok(()) => self.with_head(|head| self.account(head, status, bytes, label)),
            Err(cut) => {
                if let Cut::Upstream(error) = &cut {
                    self.with_head(|head| self.core.upstream_broke_off(error, head.target));
                }
                self.broke_off(status, bytes, label);
            }
        }
    }

    fn file(self, head: &RequestHead<'_>, file: OpenFile) -> Response {
        let (status, first, (start, end)) = match heads::file_form(&self.core, head, &file, None) {
            FileForm::Sent { status, head, part } => (status, head, part),
            FileForm::Refused { status, fields } => return self.local(head, status, fields.as_bytes()),
        };
        let bytes = Bytes { head: first.len() as u64, body: end - start };
        let (mut sender, http) = Body::channel_after(first.into());
        tokio::task::spawn_local(async move {
            let mut at = start;
            match send_file(file, &mut at, end, &mut sender).await {
                Ok(()) => {
                    sender.end();
                    self.with_head(|head| self.account(head, status, bytes, "file"));
                }
                Err(Aborted) => self.broke_off(status, Bytes { body: at - start, ..bytes }, "file"),
            }
        });
        Response::from_wire(http, Some(bytes.head + bytes.body))
    }

    /// Counts and logs a response. The head may have the version of the message; the log has the client's.
    fn account(&self, head: &RequestHead<'_>, status: u16, bytes: Bytes, cache: &'static str) {
        let head = RequestHead { version: self.version, ..*head };
        self.core.account(self.peer, &head, status, bytes, cache, self.began);
    }

    /// Counts and logs a response of which only so many bytes were handed on.
    fn broke_off(&self, status: u16, bytes: Bytes, cache: &'static str) {
        self.core.metrics.responses_broken_total.add(1);
        self.with_head(|head| self.core.log(self.peer, head, status, bytes, cache, self.began));
    }

    /// For what ends after its request is gone: reads the head again.
    fn with_head(&self, tell: impl FnOnce(&RequestHead<'_>)) {
        let mut parser = RequestParser::new(self.core.with_plan(|plan| plan.limits.head));
        if let Ok(Progress::Complete { .. }) = parser.parse(&self.head) {
            tell(&RequestHead { version: self.version, ..parser.head(&self.head) });
        }
    }
}

/// What ends a response before it is whole.
enum Cut {
    /// Its client wants no more of it, or does not send what it was asked about.
    Client,
    Upstream(UpstreamError),
}

impl From<Aborted> for Cut {
    fn from(_: Aborted) -> Self {
        Self::Client
    }
}

async fn download(
    streamed: &mut Streamed,
    framing: ClientFraming,
    mut sender: BodySender,
    sent_bytes: &mut u64,
    counts_framing: bool,
) -> Result<(), Cut> {
    let chunked = framing == ClientFraming::Chunked;
    let wanted = !matches!(framing, ClientFraming::NoBody | ClientFraming::HeadOnly(_));
    let announced = match framing {
        ClientFraming::Length(length) => Some(length),
        _ => None,
    };
    loop {
        // Who has all of a known length asks for no more, and may be gone before its source has ended.
        let lacks_some = wanted && announced.is_none_or(|length| *sent_bytes < length);
        if lacks_some {
            sender.wanted().await?;
        }
        let piece = tokio::select! {
            biased;
            piece = streamed.chunk() => piece.map_err(Cut::Upstream)?,
            // An upstream that says nothing for long is not kept for nobody.
            () = sender.unwanted(), if lacks_some => return Err(Cut::Client),
        };
        let Some(piece) = piece else { break };
        if piece.is_empty() || !wanted {
            continue;
        }
        let mut out = Vec::with_capacity(piece.len() + 24);
        if chunked {
            write_chunk_header(piece.len(), &mut out);
        }
        out.extend_from_slice(piece);
        if chunked {
            out.extend_from_slice(b"\r\n");
        }
        let length = if counts_framing { out.len() } else { piece.len() };
        sender.send(out.into()).await?;
        *sent_bytes += length as u64;
    }
    if chunked {
        let mut out = Vec::new();
        write_last_chunk(streamed.trailers(), &mut out);
        *sent_bytes += if counts_framing { out.len() as u64 } else { 0 };
        sender.send(out.into()).await?;
    }
    sender.end();
    Ok(())
}

/// Sends what is between `at`, which says how far it got, and `end`.
async fn send_file(file: OpenFile, at: &mut u64, end: u64, sender: &mut BodySender) -> Result<(), Aborted> {
    while *at < end {
        sender.wanted().await?;
        let piece = serve::read_piece(&file.file, *at, end).await.map_err(|_| Aborted)?;
        let length = piece.len() as u64;
        sender.send(piece.into()).await?;
        *at += length;
    }
    Ok(())
}

/// A part of a stored object's body, piece by piece, out of the arena: nothing is copied.
pub(crate) struct Extents {
    pub object: Object,
    pub at: u64,
    pub end: u64,
}

impl Iterator for Extents {
    type Item = Buffer;

    fn next(&mut self) -> Option<Buffer> {
        if self.at >= self.end {
            return None;
        }
        let start = self.at;
        let left = usize::try_from(self.end - start).unwrap_or(usize::MAX);
        let length = self.object.body_at(start).len().min(PIECE_BYTES).min(left);
        if length == 0 {
            return None;
        }
        self.at += length as u64;
        Some(Buffer::from_owner(Extent { object: self.object.clone(), start, length }))
    }
}

/// Keeps its object in its place for as long as the bytes are in use.
struct Extent {
    object: Object,
    start: u64,
    length: usize,
}

impl AsRef<[u8]> for Extent {
    fn as_ref(&self) -> &[u8] {
        let extent = self.object.body_at(self.start);
        &extent[..self.length.min(extent.len())]
    }
}
