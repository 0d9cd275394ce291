//! Counts the records that a client sends (RFC 8446 §5.1) beside the content that they bring.
//!
//! Records without content are work all the same: new keys (§4.6.3), what is encrypted and empty. The library bears any
//! number of them as long as some other record comes now and then.

use std::time::Instant;

const HEADER_BYTES: usize = 5;
/// Records beyond those that their content accounts for: so many at once, and as many more each second.
const MOST: u64 = 1000;
const MOST_EACH_SECOND: f64 = 20.0;
/// Bytes of content that account for a record: those of the shortest message that clients send by itself, a WebSocket frame
/// without content (RFC 6455 §5.2).
const CONTENT_BYTES: u64 = 6;

pub(super) struct Records {
    /// Bytes until the next record's header.
    left: usize,
    header: [u8; HEADER_BYTES],
    header_bytes: usize,
    /// Records that no content accounts for, and since when.
    idle: u64,
    since: Option<Instant>,
    /// Content that does not account for a record yet.
    content_bytes: u64,
}

impl Records {
    pub(super) fn new() -> Self {
        Self { left: 0, header: [0; HEADER_BYTES], header_bytes: 0, idle: 0, since: None, content_bytes: 0 }
    }

    /// The handshake is done: what it consisted of counts for nothing.
    pub(super) fn begin(&mut self, now: Instant) {
        self.idle = 0;
        self.since = Some(now);
    }

    /// Takes note of what has come.
    pub(super) fn follow(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.left > 0 {
                let taken = bytes.len().min(self.left);
                (self.left, bytes) = (self.left - taken, &bytes[taken..]);
                continue;
            }
            let (taken, rest) = bytes.split_at(bytes.len().min(HEADER_BYTES - self.header_bytes));
            let end = self.header_bytes + taken.len();
            self.header[self.header_bytes..end].copy_from_slice(taken);
            (self.header_bytes, bytes) = (end, rest);
            if end == HEADER_BYTES {
                let [_, _, _, high, low] = self.header;
                self.left = usize::from(u16::from_be_bytes([high, low]));
                self.header_bytes = 0;
                self.idle += 1;
            }
        }
    }

    /// So much content has come.
    pub(super) fn brought(&mut self, bytes: usize) {
        self.content_bytes += bytes as u64;
        self.idle = self.idle.saturating_sub(self.content_bytes / CONTENT_BYTES);
        self.content_bytes %= CONTENT_BYTES;
    }

    /// Whether there are more without content than a client has use for.
    pub(super) fn is_flood(&mut self, now: impl FnOnce() -> Instant) -> bool {
        if self.idle <= MOST {
            return false;
        }
        let now = now();
        let since = *self.since.get_or_insert(now);
        let borne = (now.saturating_duration_since(since).as_secs_f64() * MOST_EACH_SECOND) as u64;
        self.since = Some(now);
        // What is borne is not borne again.
        self.idle = self.idle.saturating_sub(borne);
        self.idle > MOST
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn record(length: usize) -> Vec<u8> {
        let mut out = vec![23, 3, 3];
        out.extend((length as u16).to_be_bytes());
        out.resize(HEADER_BYTES + length, 0);
        out
    }

    #[test]
    fn records_are_counted_in_whatever_pieces_they_come() {
        let bytes = [record(22), record(0), record(300), record(1)].concat();
        for size in 1..=bytes.len() {
            let mut records = Records::new();
            bytes.chunks(size).for_each(|piece| records.follow(piece));
            assert_eq!((records.idle, records.left, records.header_bytes), (4, 0, 0), "{size}");
        }
    }

    /// What is left of a client that sends `count` records a second with this much content, after an hour.
    fn is_borne(count: u64, content_bytes: usize) -> bool {
        let begin = Instant::now();
        let mut records = Records::new();
        records.begin(begin);
        (0..3600).all(|second| {
            (0..count).all(|_| {
                records.follow(&record(content_bytes + 17));
                records.brought(content_bytes);
                !records.is_flood(|| begin + Duration::from_secs(second))
            })
        })
    }

    #[test]
    fn keys_that_are_changed_without_end_are_a_flood_and_small_messages_are_not() {
        assert!(is_borne(15, 0), "new keys now and then");
        assert!(is_borne(2000, 6));
        assert!(is_borne(20, 1), "what is typed");
        assert!(!is_borne(100, 0));
        assert!(!is_borne(2000, 1));
    }
}
