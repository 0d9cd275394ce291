//! What each mechanism costs a packet: `cargo bench -p tidegate-gate [-- syns|requests|blocks]` as root. Runs the
//! kernel programs on a frame (BPF_PROG_TEST_RUN) and prints the median of several runs with the least and the
//! greatest, in nanoseconds.
#![allow(clippy::unwrap_used, reason = "a failure ends the measurement")]

#[path = "../tests/support/mod.rs"]
mod support;

use std::net::Ipv4Addr;

use support::{ACK, Connection, Namespace, SYN, connections, explained, frame, needs_root};
use tidegate_core::IpPrefix;
use tidegate_gate::{Blocks, Gate, Mechanism, Options};
use tidegate_policy::{
    Action, ConnectionRule, CookiePattern, Destination, PortRange, Profile, RequestRule, RuleSet, When,
};

const ROUNDS: usize = 9;
const REPEAT: u32 = 300_000;
/// Frames from as many addresses, each once: nothing of the block list is in a cache.
const COLD: u32 = 20_000;

fn main() {
    needs_root();
    let _namespace = Namespace::enter_new();
    println!("{:<52} {:>8} {:>8} {:>8}  ns a packet", "", "median", "least", "most");
    let only = std::env::args().nth(1).filter(|argument| !argument.starts_with('-'));
    let groups: [(&str, fn()); 3] = [("syns", syns), ("requests", requests), ("blocks", blocks)];
    for (_, measure) in groups.iter().filter(|(name, _)| only.as_ref().is_none_or(|only| only == name)) {
        measure();
    }
}

fn row(name: &str, mut ns: Vec<u128>) {
    ns.sort_unstable();
    println!("{name:<52} {:>8} {:>8} {:>8}", ns[ns.len() / 2], ns[0], ns[ns.len() - 1]);
}

fn measure(name: &str, gate: &Gate, mechanism: Mechanism, frame: &[u8]) {
    let run = |_| explained(gate.try_frame(mechanism, frame, REPEAT)).mean.as_nanos();
    row(name, (0..ROUNDS).map(run).collect());
}

fn fast() -> Option<Profile> {
    Some(Profile::new(f64::from(Profile::MAX_RATE_PER_S), Profile::MAX_BURST).unwrap())
}

/// Each about another source; the first about the frame's.
fn sources(count: u32) -> RuleSet {
    let rule = |i: u32| ConnectionRule {
        destination: Destination { address: None, ports: PortRange::one(80) },
        source: Some(IpPrefix::new(Ipv4Addr::from(0x0a00_0009 + (i << 4)).into(), 32).unwrap()),
        limit: fast(),
        when: When::Always,
        class: None,
    };
    connections((0..count).map(rule).collect())
}

fn syns() {
    let (syn, ack) =
        (frame("10.0.0.9", "10.0.0.1", 80, SYN, b""), frame("10.0.0.9", "10.0.0.1", 80, ACK, b""));
    let gate = explained(Gate::load(&RuleSet::default(), &Options::default()));
    measure("segment that is no SYN", &gate, Mechanism::Xdp, &ack);
    measure("SYN, no rule", &gate, Mechanism::Xdp, &syn);
    for count in [1, 3, 4000] {
        explained(gate.replace_rules(&sources(count)));
        measure(&format!("SYN policed, {count} rules"), &gate, Mechanism::Xdp, &syn);
    }
}

fn request(path: &str, cookie: Option<(&str, &str)>) -> RequestRule {
    RequestRule {
        path: path.parse().unwrap(),
        cookie: cookie.map(|(name, value)| CookiePattern::new(name, value).unwrap()),
        limit: fast(),
        when: When::Always,
        action: Some(Action::Drop),
        class: None,
    }
}

/// First and second requests of many connections, one run each with its own cost; each round is about another rule.
fn first_requests(gate: &Gate) {
    let open = |i: u32| Connection::open(&format!("10.1.0.{i}"), &format!("10.2.0.{i}"));
    let connections: Vec<Connection> = (1..=200).map(open).collect();
    explained(gate.replace_rules(&set((0..ROUNDS).map(|i| request(&format!("/{i}/*"), None)).collect())));
    let mean = |path: &str| {
        let text = format!("GET {path} HTTP/1.1\r\nHost: www.example.org\r\n\r\n");
        let run = |connection: &Connection| {
            explained(gate.try_frame(Mechanism::Tc, &connection.frame(text.as_bytes()), 1)).mean.as_nanos()
        };
        connections.iter().map(run).sum::<u128>() / connections.len() as u128
    };
    for name in ["no rule", "first request matched by path", "second request matched by path"] {
        let path = |i| if name == "no rule" { "/x".to_owned() } else { format!("/{i}/x") };
        row(&format!("{name}, connection by connection"), (0..ROUNDS).map(|i| mean(&path(i))).collect());
    }
}

fn set(requests: Vec<RequestRule>) -> RuleSet {
    RuleSet { requests, http_ports: vec![PortRange::one(80)], ..RuleSet::default() }
}

fn requests() {
    let text = "GET /cgi-bin/search?q=x HTTP/1.1\r\nHost: www.example.org\r\nUser-Agent: Mozilla/5.0 (X11; Linux x86_64) \
                AppleWebKit/537.36\r\nAccept: text/html,application/xhtml+xml\r\nAccept-Language: en\r\nCookie: session=0123456789abcdef; \
                tier=gold; theme=dark\r\nConnection: keep-alive\r\n\r\n";
    let connection = Connection::open("10.0.0.9", "10.0.0.1");
    let segment = connection.frame(text.as_bytes());
    let elsewhere = frame("10.0.0.9", "10.0.0.1", 81, ACK, text.as_bytes());
    let gate = explained(Gate::load(&set(Vec::new()), &Options::default()));
    measure("segment of a port without HTTP", &gate, Mechanism::Tc, &elsewhere);
    measure("request, no rule", &gate, Mechanism::Tc, &segment);
    for count in [1, 3, 4000] {
        let others = (1..count).map(|i| request(&format!("/path-{i}/*"), None));
        explained(
            gate.replace_rules(&set([request("/cgi-bin/*", None)].into_iter().chain(others).collect())),
        );
        measure(&format!("request matched by path, {count} rules"), &gate, Mechanism::Tc, &segment);
    }
    // Of the frames above, all the same, only the first needs the socket; of those that are refused, each.
    let rare = RequestRule { limit: Some(Profile::new(0.001, 1).unwrap()), ..request("/cgi-bin/*", None) };
    explained(gate.replace_rules(&set(vec![rare])));
    measure("... and refused", &gate, Mechanism::Tc, &segment);
    let received = connection.frame_at(-(text.len() as i64), text.as_bytes());
    explained(gate.replace_rules(&set(vec![request("/cgi-bin/*", None)])));
    measure("... and received before", &gate, Mechanism::Tc, &received);
    // One connection's requests one after the other; each run counts its own cost.
    explained(gate.replace_rules(&set(Vec::new())));
    let frames: Vec<Vec<u8>> = (0..COLD).map(|_| connection.frame(text.as_bytes())).collect();
    let one_by_one = |_| {
        let taken =
            frames.iter().map(|frame| explained(gate.try_frame(Mechanism::Tc, frame, 1)).mean.as_nanos());
        taken.sum::<u128>() / u128::from(COLD)
    };
    row("request, no rule, run by run", (0..ROUNDS).map(one_by_one).collect());
    explained(gate.replace_rules(&set(vec![request("/cgi-bin/*", None)])));
    row("next request matched by path, run by run", (0..ROUNDS).map(one_by_one).collect());
    first_requests(&gate);
    explained(gate.replace_rules(&set(vec![request("*bin/search*", None)])));
    measure("request matched by infix", &gate, Mechanism::Tc, &segment);
    for count in [1, 3, 4000] {
        let others = (1..count).map(|i| request("*", Some(("tier", &format!("t{i}")))));
        let rules = others.chain([request("*", Some(("tier", "gold")))]).collect();
        explained(gate.replace_rules(&set(rules)));
        measure(
            &format!("request matched by cookie, the last of {count} rules"),
            &gate,
            Mechanism::Tc,
            &segment,
        );
    }
}

fn blocks() {
    let gate = explained(Gate::load(&RuleSet::default(), &Options::default()));
    let address = |i: u32| Ipv4Addr::from(0x0b00_0000 + i.wrapping_mul(7_919) % Blocks::MAX_ADDRESSES);
    let all: Vec<IpPrefix> =
        (0..Blocks::MAX_ADDRESSES).map(|i| IpPrefix::new(address(i).into(), 32).unwrap()).collect();
    let begun = std::time::Instant::now();
    explained(gate.blocks().add_many(&all, None));
    let loaded = begun.elapsed();
    let blocked = frame(&address(5).to_string(), "10.0.0.1", 80, ACK, b"");
    measure("packet of a blocked address, of 1,000,000", &gate, Mechanism::Xdp, &blocked);
    let cold = |round: usize| {
        let frames =
            (0..COLD).map(|i| frame(&address(i * 47 + round as u32).to_string(), "10.0.0.1", 80, ACK, b""));
        frames.map(|frame| explained(gate.try_frame(Mechanism::Xdp, &frame, 1)).mean.as_nanos()).sum::<u128>()
            / u128::from(COLD)
    };
    row("the same, each address once (with the run's own cost)", (0..3).map(cold).collect());
    let none = |_| {
        let frame = frame("12.0.0.1", "10.0.0.1", 80, ACK, b"");
        (0..COLD).map(|_| explained(gate.try_frame(Mechanism::Xdp, &frame, 1)).mean.as_nanos()).sum::<u128>()
            / u128::from(COLD)
    };
    row("one address that is not blocked, run by run", (0..3).map(none).collect());
    println!("1,000,000 addresses loaded in {:.2} s", loaded.as_secs_f64());
}
