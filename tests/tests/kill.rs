//! `kill -9` at random instants under load: no wrong byte is ever served, and every start succeeds.
//!
//! `TIDEGATE_KILL_ROUNDS` sets the number of rounds (`make soak`).
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tidegate_e2e::{Client, Origin, Reply, Response, Tidegate, content};

const URLS: u64 = 1600;
/// Objects are up to 64 bytes shifted left by this, and a few more.
const LARGEST: u64 = 13;
const CLIENTS: u64 = 4;

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

/// Asks for random objects until told to end; what came whole must be right. Returns how many came whole.
fn load(address: std::net::SocketAddr, mut random: Random, ended: &AtomicBool) -> (u64, u64) {
    let (mut whole, mut hits) = (0, 0);
    while !ended.load(Ordering::SeqCst) {
        let Ok(mut client) = Client::try_connect(address) else { break };
        for _ in 0..50 {
            let url = random.below(URLS);
            let request = format!("GET /{url} HTTP/1.1\r\nHost: example.org\r\n\r\n");
            // An error is the kill, in the middle of a response or before it.
            let Ok(response) = client.try_send(request).and_then(|()| client.try_response("GET")) else {
                break;
            };
            assert_eq!(response.status, 200, "/{url}: {response:?}");
            let version = response.field("X-Version").parse().unwrap();
            let expected = object(url, version);
            assert!(
                response.body == expected,
                "/{url} at version {version}: {}",
                difference(&response, &expected)
            );
            assert_eq!(response.field("ETag"), format!("\"{url}-{version}\""));
            whole += 1;
            hits += u64::from(response.is_hit());
        }
    }
    (whole, hits)
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
        let lifetime = ["max-age=3600", "max-age=1", "no-cache"][url as usize % 3];
        let reply = Reply::ok(object(url, version)).with("X-Version", &version.to_string());
        reply.with("ETag", &format!("\"{url}-{version}\"")).with("Cache-Control", lifetime)
    });
    let cache = "memory = \"16MiB\"\npath = \"@DIR@/cache\"";
    let mut tidegate = Tidegate::builder().origin(&origin).cache(cache).start();
    let (mut whole, mut hits) = (0, 0);
    for round in 1..=rounds {
        version.store(round, Ordering::SeqCst);
        let ended = Arc::new(AtomicBool::new(false));
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| {
                let (ended, address) = (Arc::clone(&ended), tidegate.address());
                let random = Random(seed.wrapping_add(round * 1000 + client) | 1);
                std::thread::spawn(move || load(address, random, &ended))
            })
            .collect();
        std::thread::sleep(Duration::from_millis(20 + random.below(400)));
        tidegate.kill();
        ended.store(true, Ordering::SeqCst);
        for client in clients {
            let counts = client.join().expect("a client saw something wrong");
            whole += counts.0;
            hits += counts.1;
        }
        // Panics when it does not start.
        tidegate.start();
        if round % 10 == 0 {
            println!("{round} of {rounds} kills: {whole} responses checked, {hits} of them hits");
        }
    }
    assert!(whole > rounds && hits > 0, "the load was no load: {whole} responses, {hits} hits");
}
