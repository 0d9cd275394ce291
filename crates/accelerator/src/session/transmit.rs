//! Getting bytes to the client: one vectored write for a hit, and what remains later.
//!
//! Bodies are copied out of the arena, not sent by sendfile: the kernel would go on reading the arena's pages until the
//! client has acknowledged them, long after the object was unpinned and its place given to another
//! (docs/decisions/0001-no-sendfile-from-the-arena.md). Large files are sent by sendfile from their own pages (decision
//! 0021).

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tidegate_http::RequestHead;
use tidegate_store::Object;

use crate::cache::lookup::{Form, Hit};
use crate::data_core::client::Client;
use crate::data_core::{Bytes, DataCore};
use crate::session::allowance::Allowance;
use crate::session::respond::{self, HitForm, OfConnection};
use crate::static_files::large_files::LargeFile;

/// What a write without waiting achieved.
pub(crate) enum Sent {
    All,
    Part(Unsent),
    /// The connection is gone, with so many bytes left.
    Broken(u64),
}

/// What the client has not taken yet.
pub(crate) struct Unsent {
    bytes: Vec<u8>,
    sent: usize,
    body: Option<(Source, u64, u64)>,
}

/// Where a body comes from.
pub(crate) enum Source {
    Stored(Object),
    /// From this file, of which what is stored is a copy.
    File(Arc<LargeFile>, Object),
}

impl Unsent {
    /// Everything is sent.
    pub(crate) fn nothing() -> Self {
        Self { bytes: Vec::new(), sent: 0, body: None }
    }

    /// `bytes`, then the body from `start` to `end`.
    pub(crate) fn new(bytes: Vec<u8>, body: Option<(Source, u64, u64)>) -> Self {
        Self { bytes, sent: 0, body }
    }
}

/// Up to here it takes less to put a response together than to tell the kernel of its pieces.
const ONE_PIECE_BYTES: u64 = 4 * 1024;

/// What one client gets before others have their turn: a client whose buffers take much would keep them waiting.
const TURN_BYTES: u64 = 512 * 1024;

/// What the fields take at most that are put together for a hit in [`write_whole`], but for those that tell of other
/// listeners.
const FIELDS_BYTES: u64 = 512;

/// Whether a hit can be put together in one piece, and nothing is left to do but to send it.
#[inline]
pub(super) fn is_short(hit: &Hit) -> bool {
    hit.status < 400
        && !matches!(hit.form, Form::PreconditionFailed | Form::Unsatisfiable)
        && hit.head().len() as u64 + hit.object.body_length() + FIELDS_BYTES <= ONE_PIECE_BYTES
}

/// Puts a short hit together for a connection that is kept; its status, and what is to be counted.
#[inline]
pub(super) fn write_whole(
    core: &DataCore,
    pseudonym: &str,
    head: &RequestHead<'_>,
    hit: &Hit,
    is_encrypted: bool,
    whole: &mut Vec<u8>,
) -> (u16, Bytes) {
    whole.clear();
    if hit.form == Form::Whole {
        whole.extend_from_slice(hit.head());
    }
    let connection = Some(OfConnection { keep_alive: true, is_encrypted });
    let form = respond::write_hit(core, pseudonym, head, hit, connection, whole);
    let head_bytes = whole.len() as u64;
    let (start, end) = form.body;
    extents(&hit.object, start, end).for_each(|extent| whole.extend_from_slice(extent));
    (form.status, Bytes { head: head_bytes, body: whole.len() as u64 - head_bytes })
}

/// Sends a hit with one system call if the socket takes it; tells how long the whole response is.
pub(crate) fn send_hit(
    client: &Client,
    object: &Object,
    form: &HitForm,
    out: &[u8],
    whole: &mut Vec<u8>,
) -> (Sent, u64) {
    let stored_head = if form.with_stored_head { object.head() } else { b"" };
    let (start, end) = form.body;
    let head_bytes = (stored_head.len() + out.len()) as u64;
    let total = head_bytes + (end - start);
    let in_one_piece = total <= ONE_PIECE_BYTES;
    let written = if in_one_piece {
        whole.clear();
        whole.extend_from_slice(stored_head);
        whole.extend_from_slice(out);
        extents(object, start, end).for_each(|extent| whole.extend_from_slice(extent));
        client.try_write(whole)
    } else {
        let mut slices = [IoSlice::new(stored_head), IoSlice::new(out), IoSlice::new(b""), IoSlice::new(b"")];
        let turn_end = end.min(start + TURN_BYTES);
        for (slice, extent) in slices[2..].iter_mut().zip(extents(object, start, turn_end)) {
            *slice = IoSlice::new(extent);
        }
        client.try_write_vectored(&slices)
    };
    let written = match written {
        Ok(written) => written as u64,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
        Err(_) => return (Sent::Broken(total), total),
    };
    if written == total {
        return (Sent::All, total);
    }
    let head_sent = written.min(head_bytes);
    let head = [stored_head, out].concat().split_off(head_sent as usize);
    let body_start = start + (written - head_sent);
    (Sent::Part(Unsent::new(head, Some((Source::Stored(object.clone()), body_start, end)))), total)
}

/// As [`send_hit`], with a body from the file of which the object is a copy.
pub(crate) fn send_large_file(
    client: &Client,
    file: Arc<LargeFile>,
    object: &Object,
    form: &HitForm,
    out: &[u8],
) -> (Sent, u64) {
    let stored_head = if form.with_stored_head { object.head() } else { b"" };
    let (start, end) = form.body;
    let source = Source::File(file, object.clone());
    let mut unsent = Unsent::new([stored_head, out].concat(), Some((source, start, end)));
    let total = unsent.left();
    let sent = match advance(client, &mut unsent) {
        Ok(true) => Sent::All,
        Ok(false) => Sent::Part(unsent),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Sent::Part(unsent),
        Err(_) => Sent::Broken(unsent.left()),
    };
    (sent, total)
}

/// The body from `start` to `end`, in the pieces in which it is stored.
pub(crate) fn extents(object: &Object, mut start: u64, end: u64) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let extent = (start < end).then(|| object.body_at(start)).filter(|extent| !extent.is_empty())?;
        let extent = &extent[..extent.len().min((end - start) as usize)];
        start += extent.len() as u64;
        Some(extent)
    })
}

/// Sends until nothing is left, the socket is full (`WouldBlock`) or others have to have their turn; whether all is
/// sent.
fn advance(client: &Client, unsent: &mut Unsent) -> io::Result<bool> {
    let turn_end = unsent.left().saturating_sub(TURN_BYTES);
    while unsent.left() > turn_end {
        let bytes = unsent.bytes.get(unsent.sent..).unwrap_or(&[]);
        let head_left = bytes.len();
        let written = match &mut unsent.body {
            Some((Source::File(..), ..)) if head_left > 0 => client.try_write_with_more(bytes)?,
            Some((source @ Source::File(..), start, end)) => {
                let Some(sent) = send_from_file(client, source, *start, *end)? else { continue };
                sent
            }
            Some((Source::Stored(object), start, end)) if *start < *end => {
                let extent = object.body_at(*start);
                let most = (*end - *start).min(TURN_BYTES) as usize;
                let extent = &extent[..extent.len().min(most)];
                client.try_write_vectored(&[IoSlice::new(bytes), IoSlice::new(extent)])?
            }
            _ => client.try_write(bytes)?,
        };
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        unsent.sent += written.min(head_left);
        if let Some((_, start, _)) = &mut unsent.body {
            *start += written.saturating_sub(head_left) as u64;
        }
    }
    Ok(unsent.left() == 0)
}

/// One sendfile from the file of a source, or none where the file is not what is stored any more or cannot be sent:
/// then its copy takes its place in `source`.
fn send_from_file(client: &Client, source: &mut Source, start: u64, end: u64) -> io::Result<Option<usize>> {
    let Source::File(file, object) = source else { return Ok(None) };
    if file.is_as_stored() {
        match send_extent(client, file.as_fd(), start, (end - start).min(TURN_BYTES)) {
            Ok(sent) => return Ok(Some(sent as usize)),
            Err(error) if is_of_file(&error) => file.give_up(),
            Err(error) => return Err(error),
        }
    }
    *source = Source::Stored(object.clone());
    Ok(None)
}

/// Whether sendfile failed for what it was to read, and not for whom it was to be sent to.
fn is_of_file(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidInput, UnexpectedEof, Unsupported};
    matches!(error.kind(), InvalidInput | UnexpectedEof | Unsupported)
        || error.raw_os_error() == Some(libc::EIO)
}

/// Waits for the client to take the rest, as long as it keeps up the minimum rate.
pub(crate) async fn flush(
    client: &Client,
    core: &Rc<DataCore>,
    watch: &mut RateWatch,
    unsent: &mut Unsent,
) -> io::Result<()> {
    watch.holds_room = matches!(unsent.body, Some((Source::Stored(_) | Source::File(..), ..)));
    loop {
        let before = unsent.left();
        let advanced = advance(client, unsent);
        watch.sent += before - unsent.left();
        let is_full = match advanced {
            Ok(true) => return Ok(()),
            Ok(false) => false,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => true,
            Err(error) => return Err(error),
        };
        match is_full {
            true => watch.writable(client, core).await?,
            false => tokio::task::yield_now().await,
        }
    }
}

impl Unsent {
    pub(super) fn left(&self) -> u64 {
        (self.bytes.len() - self.sent) as u64 + self.body.as_ref().map_or(0, |(_, start, end)| end - start)
    }
}

/// A part of a file.
pub(crate) struct FileSource<'f> {
    pub file: BorrowedFd<'f>,
    pub start: u64,
    pub end: u64,
}

/// Sends a part of a file, waiting for the client.
pub(crate) async fn send_file(
    client: &Client,
    core: &Rc<DataCore>,
    watch: &mut RateWatch,
    mut source: FileSource<'_>,
) -> io::Result<()> {
    while source.start < source.end {
        match send_extent(client, source.file, source.start, (source.end - source.start).min(TURN_BYTES)) {
            Ok(sent) => {
                source.start += sent;
                watch.sent += sent;
                if sent == TURN_BYTES {
                    tokio::task::yield_now().await;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => watch.writable(client, core).await?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// One sendfile; a file that has become shorter is an error, since its length has been announced.
fn send_extent(client: &Client, file: BorrowedFd<'_>, offset: u64, length: u64) -> io::Result<u64> {
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    let sent = client.try_send_file(file, offset, length)?;
    if sent == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(sent as u64) }
}

/// Sends all of `bytes`, waiting for the client; `watch` spans the whole response.
pub(crate) async fn send_all(
    client: &Client,
    core: &Rc<DataCore>,
    watch: &mut RateWatch,
    mut bytes: &[u8],
) -> io::Result<()> {
    while !bytes.is_empty() {
        match client.try_write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => {
                watch.sent += written as u64;
                bytes = bytes.get(written..).unwrap_or(&[]);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => watch.writable(client, core).await?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// By this factor the minimum rate is greater, where the cache has no room, for clients that hold some.
const HASTE: u64 = 20;
/// Whether it has is looked at this often.
const LOOK_MS: u64 = 1000;

/// Holds a client to the minimum rate at which it takes a response. Only time spent waiting for the client counts: a
/// slow upstream is not the client's fault. What counts as taken is what the client has acknowledged, not what the
/// kernel holds for it, which may be megabytes.
pub(crate) struct RateWatch {
    allowance: Allowance,
    /// The response is in the cache, and stays there while the client reads it.
    holds_room: bool,
    /// What had been sent, and what of it had not been acknowledged, when the client was last waited for.
    mark: Option<(u64, u64)>,
    pub sent: u64,
}

impl RateWatch {
    pub(crate) fn new(core: &DataCore) -> Self {
        let rate_bytes_per_s = core.with_plan(|plan| plan.limits.response_min_rate_bytes_per_s);
        Self { allowance: Allowance::new(rate_bytes_per_s), holds_room: false, mark: None, sent: 0 }
    }

    /// Waits until the socket takes more, at most until the client has fallen behind the minimum rate.
    pub(super) async fn writable(&mut self, client: &Client, core: &DataCore) -> io::Result<()> {
        loop {
            self.earn(client);
            let Some(left_ms) = self.allowance.left_ms() else { return client.writable(&core.clients).await };
            if left_ms == 0 {
                core.metrics.slow_readers_total.add(1);
                // Nothing of what the kernel holds for this client is worth keeping.
                client.set_zero_linger();
                return Err(io::ErrorKind::TimedOut.into());
            }
            let haste = if self.holds_room && core.lacks_room() { HASTE } else { 1 };
            let look_ms = if self.holds_room { LOOK_MS } else { u64::MAX };
            let wait_ms = left_ms.div_ceil(haste).min(look_ms);
            let start_ms = core.clock.elapsed_ms();
            let ready =
                tokio::time::timeout(Duration::from_millis(wait_ms), client.writable(&core.clients)).await;
            match ready {
                Ok(ready) => {
                    self.allowance.spend((core.clock.elapsed_ms() - start_ms) * haste);
                    return ready;
                }
                Err(_) => self.allowance.spend(wait_ms * haste),
            }
        }
    }

    /// Whether the client, whom nobody has sent more for `ms`, has not fallen behind the minimum rate.
    pub(crate) fn keeps_up(&mut self, client: &Client, ms: u64) -> bool {
        self.earn(client);
        self.allowance.spend(ms);
        self.allowance.left_ms() != Some(0)
    }

    fn earn(&mut self, client: &Client) {
        let waiting = unacknowledged(client);
        if let Some((sent, waited)) = self.mark {
            self.allowance.earn((self.sent - sent + waited).saturating_sub(waiting));
        }
        self.mark = Some((self.sent, waiting));
    }
}

/// Bytes in the socket's send queue that the client has not acknowledged (`SIOCOUTQ`, tcp(7)).
pub(crate) fn unacknowledged(client: &Client) -> u64 {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the request stores an int at the address given, which is that of one.
    let result = unsafe { libc::ioctl(client.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if result == 0 { u64::try_from(bytes).unwrap_or(0) } else { 0 }
}
