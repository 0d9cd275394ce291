//! The responses of an interception cache: the least recently used make room.

use std::collections::{BTreeMap, HashMap};

use bytes::Bytes;
use tidegate_http::cache::{Policy, RequestDirectives, Reuse, vary};
use tidegate_http::{Fields, RequestHead};

/// A stored response.
#[derive(Debug)]
pub(super) struct Stored {
    pub policy: Policy,
    /// The fields that the response varies by, and what the request had in them (RFC 9111 §4.1).
    pub varies_by: Vec<u8>,
    pub selected_by: Vec<u8>,
    /// Status line and field lines, without Age and framing.
    pub head: Bytes,
    pub body: Bytes,
}

impl Stored {
    fn bytes(&self, key: &[u8]) -> usize {
        // What the tables take beside it, roughly.
        const OVERHEAD: usize = 256;
        2 * key.len()
            + self.varies_by.len()
            + self.selected_by.len()
            + self.head.len()
            + self.body.len()
            + OVERHEAD
    }
}

/// A response that answers a request.
pub(super) struct Found {
    pub head: Bytes,
    pub body: Bytes,
    pub age_s: u64,
}

#[derive(Debug)]
pub(super) struct Store {
    budget_bytes: usize,
    used_bytes: usize,
    entries: HashMap<Vec<u8>, (Stored, u64)>,
    /// The keys by their last use.
    order: BTreeMap<u64, Vec<u8>>,
    next: u64,
}

impl Store {
    pub fn new(budget_bytes: usize) -> Self {
        Self { budget_bytes, used_bytes: 0, entries: HashMap::new(), order: BTreeMap::new(), next: 0 }
    }

    pub fn used_bytes(&self) -> usize {
        self.used_bytes
    }

    /// A response that may be sent as it is.
    pub fn find(&mut self, key: &[u8], request: &RequestHead<'_>, now_s: u64) -> Option<Found> {
        let (stored, used) = self.entries.get_mut(key)?;
        if secondary_key(&stored.varies_by, &request.fields) != stored.selected_by {
            return None;
        }
        match stored.policy.reuse(&RequestDirectives::parse(&request.fields), now_s) {
            Reuse::Fresh { .. } => {}
            _ => return None,
        }
        if let Some(key) = self.order.remove(used) {
            self.order.insert(self.next, key);
            *used = self.next;
            self.next += 1;
        }
        Some(Found {
            head: stored.head.clone(),
            body: stored.body.clone(),
            age_s: stored.policy.age_s(now_s),
        })
    }

    pub fn insert(&mut self, key: Vec<u8>, stored: Stored) {
        self.remove(&key);
        let bytes = stored.bytes(&key);
        if bytes > self.budget_bytes {
            return;
        }
        while self.used_bytes + bytes > self.budget_bytes
            && let Some((_, oldest)) = self.order.first_key_value()
        {
            let oldest = oldest.clone();
            self.remove(&oldest);
        }
        self.used_bytes += bytes;
        self.order.insert(self.next, key.clone());
        self.entries.insert(key, (stored, self.next));
        self.next += 1;
    }

    pub fn remove(&mut self, key: &[u8]) {
        if let Some((stored, used)) = self.entries.remove(key) {
            self.order.remove(&used);
            self.used_bytes -= stored.bytes(key);
        }
    }
}

/// What a request has in the fields that a response varies by.
pub(super) fn secondary_key(names: &[u8], request: &Fields<'_>) -> Vec<u8> {
    let mut key = Vec::new();
    if !names.is_empty() {
        vary::write_secondary_key(names, request, b"", &mut key);
    }
    key
}

#[cfg(test)]
mod tests {
    use tidegate_http::{HeadLimits, Method, Progress, RequestParser, ResponseParser};

    use super::*;

    fn stored(response: &str, request: &RequestHead<'_>) -> Stored {
        let text = format!("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n{response}\r\n");
        let mut parser = ResponseParser::new(HeadLimits::default());
        parser.reset(Method::Get);
        assert!(matches!(parser.parse(text.as_bytes()), Ok(Progress::Complete { .. })));
        let head = parser.head(text.as_bytes());
        let mut varies_by = Vec::new();
        vary::write_names(&head.fields, &mut varies_by);
        Stored {
            policy: Policy::new(request, &head, 1000, 1000).unwrap(),
            selected_by: secondary_key(&varies_by, &request.fields),
            varies_by,
            head: Bytes::from_static(b"HTTP/1.1 200 OK\r\n"),
            body: vec![b'x'; 1000].into(),
        }
    }

    fn with_request<T>(fields: &str, f: impl FnOnce(&RequestHead<'_>) -> T) -> T {
        let text = format!("GET / HTTP/1.1\r\nHost: a\r\n{fields}\r\n");
        let mut parser = RequestParser::new(HeadLimits::default());
        assert!(matches!(parser.parse(text.as_bytes()), Ok(Progress::Complete { .. })));
        f(&parser.head(text.as_bytes()))
    }

    #[test]
    fn fresh_responses_are_found_and_stale_ones_and_other_variants_are_not() {
        let mut store = Store::new(100_000);
        with_request("Accept-Language: de\r\n", |request| {
            store.insert(
                b"k".to_vec(),
                stored("Cache-Control: max-age=60\r\nVary: Accept-Language\r\n", request),
            );
            assert_eq!(store.find(b"k", request, 1010).unwrap().age_s, 10);
            assert!(store.find(b"k", request, 1060).is_none());
            assert!(store.find(b"l", request, 1010).is_none());
        });
        with_request("Accept-Language: fr\r\n", |request| assert!(store.find(b"k", request, 1010).is_none()));
        with_request("Accept-Language: de\r\nCache-Control: no-cache\r\n", |request| {
            assert!(store.find(b"k", request, 1010).is_none());
        });
    }

    #[test]
    fn a_full_store_drops_what_was_not_used_for_longest() {
        let mut store = Store::new(4_000);
        with_request("", |request| {
            for key in [b"a", b"b", b"c"] {
                store.insert(key.to_vec(), stored("Cache-Control: max-age=60\r\n", request));
                assert!(store.find(b"a", request, 1010).is_some());
            }
            store.insert(b"d".to_vec(), stored("Cache-Control: max-age=60\r\n", request));
            assert!(store.find(b"a", request, 1010).is_some());
            assert!(store.find(b"b", request, 1010).is_none());
            assert!(store.used_bytes() <= 4_000);
            for key in [b"a", b"c", b"d"] {
                store.remove(key);
            }
            assert_eq!((store.used_bytes(), store.order.len()), (0, 0));
        });
    }
}
