//! `kill -9` at random instants under load: no wrong byte is ever served, nothing comes back that was replaced, and
//! every start succeeds and finds what was stored.
//!
//! `TIDEGATE_KILL_ROUNDS` sets the number of rounds (`make soak`).
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tidegate_e2e::{Client, Origin, Reply, Response, Tidegate, content, eventually};

const URLS: u64 = 1600;
/// Objects are up to 64 bytes shifted left by this, and a few more.
const LARGEST: u64 = 13;
const CLIENTS: u64 = 4;
/// What responses may be stored for, by the URL.
const LIFETIMES: [&str; 3] = ["max-age=3600", "max-age=1", "no-cache"];
/// How many responses that stay fresh come whole before each kill, at the least: the last of them are in the cache.
const FRESH_BEFORE_KILL: u64 = 20;

/// The version a URL is at changes all the time; a version's bytes follow from the URL and the version.
fn object(url: u64, version: u64) -> Vec<u8> {
    let seed = url << 32 | version;
    // From tens of bytes to hundreds of kibibytes: more than the cache can hold all at once.
    let size = 64 << (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 61 << 1).min(LARGEST);
    content(seed, size as usize + url as usize)
}

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// Where the content is wrong, and what the head said.
fn difference(response: &Response, expected: &[u8]) -> String {
    let same = response.body.iter().zip(expected).take_while(|(got, wanted)| got == wanted).count();
    let wrong = response.body.iter().zip(expected).filter(|(got, wanted)| got != wanted).count();
    let (got, wanted) = (response.body.len(), expected.len());
    format!("{wrong} bytes differ, from offset {same}; {got} bytes of {wanted}; {:?}", response.fields)
}

/// What the clients have seen, over all kills.
struct Seen {
    /// The latest version of each URL that came whole.
    versions: Vec<AtomicU64>,
    /// Responses that came whole, hits among them, and those in this round that stay fresh.
    whole: AtomicU64,
    hits: AtomicU64,
    fresh: AtomicU64,
}

impl Seen {
    fn new() -> Self {
        let versions = std::iter::repeat_with(AtomicU64::default).take(URLS as usize).collect();
        Self {
            versions,
            whole: AtomicU64::default(),
            hits: AtomicU64::default(),
            fresh: AtomicU64::default(),
        }
    }

    /// Asks for an object and checks it; `None` when the connection ends first, as a kill ends it.
    fn ask(&self, client: &mut Client, url: u64) -> Option<Response> {
        let latest = &self.versions[url as usize];
        let before = latest.load(Ordering::SeqCst);
        let request = format!("GET /{url} HTTP/1.1\r\nHost: example.org\r\n\r\n");
        let response = client.try_send(request).and_then(|()| client.try_response("GET")).ok()?;
        assert_eq!(response.status, 200, "/{url}: {response:?}");
        let version = response.field("X-Version").parse().unwrap();
        let expected = object(url, version);
        assert!(
            response.body == expected,
            "/{url} at version {version}: {}",
            difference(&response, &expected)
        );
        assert_eq!(response.field("ETag"), format!("\"{url}-{version}\""));
        assert!(version >= before, "/{url}: version {version} after version {before}: {:?}", response.fields);
        latest.fetch_max(version, Ordering::SeqCst);
        self.whole.fetch_add(1, Ordering::SeqCst);
        self.hits.fetch_add(u64::from(response.is_hit()), Ordering::SeqCst);
        Some(response)
    }
}

fn stays_fresh(url: u64) -> bool {
    LIFETIMES[url as usize % LIFETIMES.len()] == "max-age=3600"
}

/// Asks for random objects until told to end. Returns what came whole and stays fresh, the latest last.
fn load(address: SocketAddr, mut random: Random, seen: &Seen, ended: &AtomicBool) -> Vec<u64> {
    let mut fresh = Vec::new();
    while !ended.load(Ordering::SeqCst) {
        let Ok(mut client) = Client::try_connect(address) else { break };
        for _ in 0..50 {
            let url = random.below(URLS);
            if seen.ask(&mut client, url).is_none() {
                break;
            }
            if stays_fresh(url) {
                fresh.push(url);
                seen.fresh.fetch_add(1, Ordering::SeqCst);
            }
        }
    }
    fresh
}

/// Right after a start: the store has kept what came last before the kill, and no file of it was set aside.
fn check_start(tidegate: &Tidegate, seen: &Seen, last: &[Vec<u64>]) {
    let mut client = tidegate.connect();
    // Each of them once: what is asked for twice is a hit by that.
    let mut asked = HashSet::new();
    let mut latest = last.iter().flat_map(|urls| urls.iter().rev().take(FRESH_BEFORE_KILL as usize));
    let hit =
        latest.any(|url| asked.insert(*url) && seen.ask(&mut client, *url).expect("no kill now").is_hit());
    assert!(hit, "nothing of what came before the kill is in the cache: {asked:?}");
    let names = std::fs::read_dir(tidegate.directory().join("cache")).unwrap();
    let names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
    assert!(!names.iter().any(|name| name.to_string_lossy().contains("set-aside")), "{names:?}");
}

#[test]
fn kill_9_under_load_no_wrong_byte_and_no_failed_start() {
    let rounds: u64 = std::env::var("TIDEGATE_KILL_ROUNDS").map_or(10, |text| text.parse().unwrap());
    let seed: u64 = std::env::var("TIDEGATE_KILL_SEED").map_or_else(
        |_| SystemTime::now().duration_since(UNIX_EPOCH).unwrap().subsec_nanos().into(),
        |text| text.parse().unwrap(),
    );
    println!("TIDEGATE_KILL_SEED={seed}");
    let mut random = Random(seed | 1);

    let version = Arc::new(AtomicU64::new(0));
    let current = Arc::clone(&version);
    let origin = Origin::start(move |request| {
        let url = request.target[1..].parse().unwrap();
        let version = current.load(Ordering::SeqCst);
        let lifetime = LIFETIMES[url as usize % LIFETIMES.len()];
        let reply = Reply::ok(object(url, version)).with("X-Version", &version.to_string());
        reply.with("ETag", &format!("\"{url}-{version}\"")).with("Cache-Control", lifetime)
    });
    let cache = "memory = \"16MiB\"\npath = \"@DIR@/cache\"";
    let mut tidegate = Tidegate::builder().origin(&origin).cache(cache).start();
    let seen = Arc::new(Seen::new());
    for round in 1..=rounds {
        version.store(round, Ordering::SeqCst);
        seen.fresh.store(0, Ordering::SeqCst);
        let ended = Arc::new(AtomicBool::new(false));
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| {
                let (ended, seen, address) = (Arc::clone(&ended), Arc::clone(&seen), tidegate.address());
                let random = Random(seed.wrapping_add(round * 1000 + client) | 1);
                std::thread::spawn(move || load(address, random, &seen, &ended))
            })
            .collect();
        eventually("the clients get responses", || {
            let wrong = clients.iter().any(std::thread::JoinHandle::is_finished);
            (wrong || seen.fresh.load(Ordering::SeqCst) >= FRESH_BEFORE_KILL).then_some(())
        });
        // The instant of the kill is what is random here; nothing waits for it.
        std::thread::sleep(Duration::from_millis(random.below(400)));
        tidegate.kill();
        ended.store(true, Ordering::SeqCst);
        let last: Vec<_> =
            clients.into_iter().map(|client| client.join().expect("a client saw something wrong")).collect();
        // Panics when it does not start.
        tidegate.start();
        check_start(&tidegate, &seen, &last);
        if round % 10 == 0 {
            let [whole, hits] = [&seen.whole, &seen.hits].map(|count| count.load(Ordering::SeqCst));
            println!("{round} of {rounds} kills: {whole} responses checked, {hits} of them hits");
        }
    }
}
