//! Content codings (RFC 9110 §8.4.1) given to what an upstream or a root has without one, for clients that accept them.
//!
//! What is compressed is another representation: its entity tag is a weak one, and which representation a client gets is
//! selected by what codings it accepts. Where it is this server alone that makes the difference, `Accept-Encoding` counts
//! in no other way than by which of [`Coding::ALL`] come into question, so that nobody gets past the cache by writing it
//! differently.

mod content;
mod encoder;
mod head;

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use tidegate_http::cache::Policy;
use tidegate_http::cache::vary::{MOST_WANTED, weight};
use tidegate_http::{BodyFraming, FieldId, Fields, Method, RequestHead, ResponseHead};

pub(crate) use content::CompressedContent;
pub(crate) use head::{restate_for_client, restate_not_modified};

use crate::data_core::DataCore;
use crate::settings::{Coding, Compression};
use crate::upstream::Response;
use encoder::Encoder;

/// Compressions under way at once on one data core: each keeps up to 2 MiB. What is beyond goes out as it is.
const MOST_AT_ONCE: usize = 64;
/// After so many bytes that have gone into encoders others have their turn: brotli takes some milliseconds for them.
const TURN_BYTES: usize = 64 * 1024;
/// So much of each second a core under stress compresses before what comes goes out as it is: who asks past the cache must
/// not have all of the core by asking for what is compressed.
const STRESSED: Duration = Duration::from_millis(250);

/// Fields that say something of the very bytes of the content.
const ABOUT_BYTES: [&[u8]; 4] = [b"content-md5", b"digest", b"content-digest", b"repr-digest"];

/// Which of [`Coding::ALL`] the client accepts (RFC 9110 §12.5.3), as a mask. Without those that would be preferred to one
/// that the client wants more, be that content without a coding. `*` stands for the codings that are not listed only where
/// such content is refused: who says nothing else has hardly all of them in mind.
pub(crate) fn accepted(fields: &Fields<'_>) -> u8 {
    let mut listed = [None; Coding::ALL.len()];
    let (mut identity, mut any) = (None, None);
    let members = fields.get_all(FieldId::AcceptEncoding).flat_map(|value| value.split(|byte| *byte == b','));
    for member in members {
        let mut parts = member.split(|byte| *byte == b';').map(<[u8]>::trim_ascii);
        let name = parts.next().unwrap_or(b"");
        let quality = parts.find(|parameter| matches!(parameter, [b'q' | b'Q', ..]));
        // A weight that cannot be read is none.
        let weight = Some(quality.map_or(MOST_WANTED, |quality| weight(quality).unwrap_or(0)));
        let is = |known: &str| name.eq_ignore_ascii_case(known.as_bytes());
        // RFC 9110 §8.4.1.3.
        let is_named = |coding: &Coding| is(coding.name()) || (*coding == Coding::Gzip && is("x-gzip"));
        if let Some(index) = Coding::ALL.iter().position(is_named) {
            listed[index] = weight;
        } else if is("identity") {
            identity = weight;
        } else if is("*") {
            any = weight;
        }
    }
    let unlisted = any.filter(|_| identity == Some(0)).unwrap_or(0);
    let (mut mask, mut most) = (0, identity.or(any).unwrap_or(0).max(1));
    for (coding, weight) in Coding::ALL.into_iter().zip(listed).rev() {
        let weight = weight.unwrap_or(unlisted);
        if weight >= most {
            (mask, most) = (mask | coding.bit(), weight);
        }
    }
    mask
}

/// The same for what another server has without a coding: none if the client wishes nobody on the way to change it (RFC
/// 9111 §5.2.1.6).
pub(crate) fn accepted_on_the_way(fields: &Fields<'_>) -> u8 {
    if head::forbids_change(fields) { 0 } else { accepted(fields) }
}

/// Whether a field says something of the very bytes of the content.
fn is_about_bytes(name: &[u8]) -> bool {
    ABOUT_BYTES.iter().any(|known| name.eq_ignore_ascii_case(known))
}

/// The names of a mask's codings, as a client would list them.
pub(crate) fn listed(mask: u8) -> String {
    let codings = Coding::ALL.into_iter().filter(|coding| mask & coding.bit() != 0);
    codings.map(Coding::name).collect::<Vec<_>>().join(", ")
}

impl Compression {
    /// The coding for a client that accepts those of `mask`.
    pub(crate) fn choose(&self, mask: u8) -> Option<Coding> {
        self.codings.iter().copied().find(|coding| mask & coding.bit() != 0)
    }

    /// Whether content of this media type and length is worth it.
    pub(crate) fn takes(&self, content_type: &[u8], length: Option<u64>) -> bool {
        let media_type = content_type.split(|byte| *byte == b';').next().unwrap_or(b"").trim_ascii();
        let is_one = |pattern: &str| match pattern.strip_suffix('*') {
            Some(start) => media_type
                .get(..start.len())
                .is_some_and(|found| found.eq_ignore_ascii_case(start.as_bytes())),
            None => media_type.eq_ignore_ascii_case(pattern.as_bytes()),
        };
        length.is_none_or(|length| length >= self.min_bytes) && self.types.iter().any(|it| is_one(it))
    }

    /// Whether a response may be compressed for those who accept it.
    fn suits(&self, response: &ResponseHead<'_>) -> bool {
        let fields = &response.fields;
        let length = match response.framing {
            BodyFraming::Length(length) => Some(length),
            // An answer to HEAD, or one of unknown length.
            _ => fields
                .get(FieldId::ContentLength)
                .and_then(|value| std::str::from_utf8(value).ok()?.trim().parse().ok()),
        };
        let is_plain = |value: &[u8]| value.trim_ascii().eq_ignore_ascii_case(b"identity");
        let has_content = !matches!(response.status, 100..=199 | 204 | 205 | 206 | 304 | 416);
        has_content
            && fields.get(FieldId::ContentType).is_some_and(|value| self.takes(value, length))
            && fields.get_all(FieldId::ContentEncoding).all(is_plain)
            && !fields.has(FieldId::ContentRange)
            && !head::forbids_change(fields)
            && ABOUT_BYTES
                .iter()
                .all(|name| fields.named(name).next().is_none() && !head::announces(fields, name))
    }
}

/// The content of a file in a coding; `None` if that is no shorter. Takes its time: not for a data core.
pub(crate) fn compress_whole(content: &[u8], coding: Coding) -> Option<Vec<u8>> {
    let mut encoder = Encoder::new(coding, Some(content.len() as u64)).ok()?;
    encoder.write(content).ok()?;
    let compressed = encoder.finish().ok()?;
    (compressed.len() < content.len()).then_some(compressed)
}

/// Compresses an upstream's response if the client accepts that and the operator wishes it. Under stress those that cannot be
/// stored stay as they are, and so do all while [`STRESSED`] is used up, or where too many are being compressed.
pub(crate) fn apply(
    core: &DataCore,
    compression: &Compression,
    request: &RequestHead<'_>,
    mut response: Box<Response>,
) -> Box<Response> {
    if !compression.suits(&response.head()) {
        return response;
    }
    let is_own_choice = !head::varies_by_coding(&response.head().fields);
    let is_empty = matches!(response.head().framing, BodyFraming::None | BodyFraming::Length(0));
    let chosen = compression.choose(accepted_on_the_way(&request.fields));
    let encoding = match chosen {
        None => None,
        // An answer to HEAD is like one to GET.
        Some(coding) if is_empty => (request.method == Method::Head).then_some((coding, None)),
        Some(coding) => {
            let is_affordable = !core.is_stressed()
                || (core.compressing.has_time(Instant::now())
                    && is_storable(core, request, &response.head()));
            let started = is_affordable.then(|| begin(core, coding)).flatten();
            if started.is_none() {
                core.metrics.compressions_skipped_total.add(1);
            }
            started.map(|started| (coding, Some(started)))
        }
    };
    let coding = encoding.as_ref().map(|(coding, _)| *coding);
    let Some(head) = head::rewritten(&response.head(), coding, request.method) else { return response };
    let mut response = match encoding {
        Some((_, Some((encoder, slot)))) => {
            let (reviewed, interim, upload) =
                (response.reviewed, response.take_interim(), response.take_upload());
            let content =
                CompressedContent::new(response, encoder, slot, std::sync::Arc::clone(&core.metrics));
            let mut compressed = Response::compressed(head, content);
            compressed.restore(interim, upload);
            compressed.reviewed = reviewed;
            compressed
        }
        _ => {
            response.set_head(head);
            response
        }
    };
    response.is_by_coding = is_own_choice;
    response
}

/// Whether a response pays for its compression more than once.
fn is_storable(core: &DataCore, request: &RequestHead<'_>, response: &ResponseHead<'_>) -> bool {
    let now_s = core.clock.unix_s();
    core.store.is_some() && Policy::new(request, response, now_s, now_s).is_ok()
}

/// An encoder and the right to use it, if there is room for one more.
fn begin(core: &DataCore, coding: Coding) -> Option<(Encoder, Slot)> {
    let slot = Slot::take(&core.compressing)?;
    let encoder = Encoder::new(coding, None).ok()?;
    core.metrics.compressed_responses_total.add(1);
    Some((encoder, slot))
}

/// What one data core compresses.
#[derive(Default)]
pub(crate) struct Compressing {
    /// Responses under way.
    responses: Cell<usize>,
    /// Bytes that have gone into encoders since others had their turn.
    bytes: Cell<usize>,
    /// Held while others have it.
    turn: tokio::sync::Mutex<()>,
    time: Cell<Time>,
}

/// What was spent on encoders.
#[derive(Clone, Copy, Default)]
struct Time {
    /// In the second that began then.
    since: Option<Instant>,
    spent: Duration,
}

impl Time {
    fn at(self, now: Instant) -> Self {
        let is_current = self.since.is_some_and(|since| now.duration_since(since) < Duration::from_secs(1));
        if is_current { self } else { Self { since: Some(now), spent: Duration::ZERO } }
    }
}

impl Compressing {
    /// Whether less than [`STRESSED`] has been spent in the second that is at `now`.
    fn has_time(&self, now: Instant) -> bool {
        self.time.get().at(now).spent < STRESSED
    }

    fn spend(&self, spent: Duration, now: Instant) {
        let time = self.time.get().at(now);
        self.time.set(Time { spent: time.spent + spent, ..time });
    }
}

/// One compression under way.
pub(crate) struct Slot(Rc<Compressing>);

impl Slot {
    fn take(core: &Rc<Compressing>) -> Option<Self> {
        let taken = core.responses.get();
        (taken < MOST_AT_ONCE).then(|| {
            core.responses.set(taken + 1);
            Self(Rc::clone(core))
        })
    }

    /// Waits for this response's turn. After [`TURN_BYTES`] of all responses together everything else on the core has its
    /// own, however many are being compressed. A call that is dropped while it waits changes nothing.
    async fn turn(&self) {
        let _held = self.0.turn.lock().await;
        while self.0.bytes.get() >= TURN_BYTES {
            tokio::task::yield_now().await;
        }
    }

    /// So many bytes have gone into the encoder.
    fn took(&self, bytes: usize) {
        let before = self.0.bytes.replace(self.0.bytes.get() + bytes);
        if before == 0 && bytes > 0 {
            let core = Rc::clone(&self.0);
            tokio::task::spawn_local(async move {
                tokio::task::yield_now().await;
                core.bytes.set(0);
            });
        }
    }

    /// The result of `work`, whose time counts as spent.
    fn spend<T>(&self, work: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let result = work();
        let now = Instant::now();
        self.0.spend(now.duration_since(began), now);
        result
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.responses.set(self.0.responses.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use tidegate_http::{HeadLimits, Progress, RequestParser};

    use super::*;

    fn mask(value: &str) -> String {
        let bytes = format!("GET / HTTP/1.1\r\nHost: h\r\nAccept-Encoding: {value}\r\n\r\n").into_bytes();
        let mut parser = RequestParser::new(HeadLimits::default());
        assert!(matches!(parser.parse(&bytes), Ok(Progress::Complete { .. })));
        listed(accepted(&parser.head(&bytes).fields))
    }

    #[test]
    fn what_a_client_accepts() {
        for (value, expected) in [
            ("gzip, deflate, br, zstd", "br, zstd, gzip"),
            ("GZIP;q=1.0", "gzip"),
            ("gzip;q=0, br", "br"),
            ("br;q=0.5, gzip", "gzip"),
            ("gzip;q=oops", ""),
            ("identity", ""),
            ("*", ""),
            ("", ""),
            ("x-gzip", "gzip"),
            ("gzip;q =0", ""),
            ("gzip;q=\"1\"", ""),
            ("gzip;q=0.5, identity", ""),
            ("gzip;q=0.5, br, identity;q=0.7", "br"),
            ("gzip, identity", "gzip"),
            ("gzip;q=0.5, *;q=0", "gzip"),
            ("gzip;q=0.5, *", ""),
            ("*;q=0", ""),
            ("identity;q=0", ""),
            ("identity;q=0, *", "br, zstd, gzip"),
            ("identity;q=0, br;q=0, *;q=0.1", "zstd, gzip"),
        ] {
            assert_eq!(mask(value), expected, "{value}");
        }
    }

    #[test]
    fn the_operators_order_decides() {
        let of = |codings: &[Coding]| Compression { codings: codings.to_vec(), ..Compression::default() };
        let all = 0b111;
        assert_eq!(of(&[]).choose(all), None);
        assert_eq!(of(&[Coding::Gzip, Coding::Br]).choose(all), Some(Coding::Gzip));
        assert_eq!(of(&[Coding::Zstd, Coding::Br]).choose(0b001), Some(Coding::Br));
        assert_eq!(of(&[Coding::Zstd]).choose(0b101), None);
    }

    #[test]
    fn media_types_and_lengths() {
        let compression =
            Compression { types: vec!["text/*".into(), "image/svg+xml".into()], ..Compression::default() };
        for (content_type, length, expected) in [
            ("text/html; charset=utf-8", None, true),
            ("TEXT/CSS", Some(compression.min_bytes), true),
            ("text/css", Some(compression.min_bytes - 1), false),
            ("image/svg+xml", None, true),
            ("image/png", None, false),
            ("tex", None, false),
        ] {
            assert_eq!(compression.takes(content_type.as_bytes(), length), expected, "{content_type}");
        }
        assert!(Compression::default().takes(b"application/json", None));
        assert!(!Compression::default().takes(b"text/event-stream", None), "it lasts, and is for one client");
    }

    #[test]
    fn no_more_than_so_many_at_once() {
        let core = Rc::default();
        let mut slots: Vec<Slot> = (0..MOST_AT_ONCE).filter_map(|_| Slot::take(&core)).collect();
        assert_eq!(slots.len(), MOST_AT_ONCE);
        assert!(Slot::take(&core).is_none());
        slots.pop();
        assert!(Slot::take(&core).is_some());
    }

    #[test]
    fn a_second_has_so_much_time_for_compression_and_the_next_has_it_again() {
        let (core, now) = (Compressing::default(), Instant::now());
        assert!(core.has_time(now));
        core.spend(STRESSED / 2, now);
        assert!(core.has_time(now));
        core.spend(STRESSED / 2, now + Duration::from_millis(900));
        assert!(!core.has_time(now + Duration::from_millis(999)));
        assert!(core.has_time(now + Duration::from_secs(1)));
        core.spend(STRESSED, now + Duration::from_secs(1));
        assert!(!core.has_time(now + Duration::from_millis(1999)));
    }

    #[test]
    fn nobody_waits_for_a_turn_that_is_over() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let slot = Slot::take(&Rc::default()).unwrap();
        let ready = crate::cache::transfer::ready;
        runtime.block_on(tokio::task::LocalSet::new().run_until(async {
            slot.took(TURN_BYTES);
            assert!(ready(slot.turn()).await.is_none());
            for _ in 0..3 {
                tokio::task::yield_now().await;
            }
            assert!(ready(slot.turn()).await.is_some());
        }));
    }

    #[test]
    fn others_have_their_turn_after_each_however_many_are_compressed() {
        const TURNS: usize = 5;
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let (core, seen) = (Rc::default(), Rc::new(std::cell::RefCell::new(String::new())));
        let tasks = tokio::task::LocalSet::new();
        let others = Rc::clone(&seen);
        tasks.spawn_local(async move {
            while others.borrow().matches('c').count() < TURNS * MOST_AT_ONCE {
                others.borrow_mut().push('o');
                tokio::task::yield_now().await;
            }
        });
        for _ in 0..MOST_AT_ONCE {
            let (slot, seen) = (Slot::take(&core).unwrap(), Rc::clone(&seen));
            tasks.spawn_local(async move {
                for _ in 0..TURNS {
                    slot.turn().await;
                    slot.took(TURN_BYTES);
                    seen.borrow_mut().push('c');
                }
            });
        }
        runtime.block_on(tasks);
        let seen = seen.borrow();
        assert_eq!(seen.matches('c').count(), TURNS * MOST_AT_ONCE);
        assert!(!seen.contains("cc"), "{seen}");
    }
}
