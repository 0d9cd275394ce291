//! The adaptation agent with real sensors, before a server that is too slow for what comes.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

mod support;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use support::{Pair, SERVER4, connect, connection, connections, explained, needs_root, total};
use tidegate_core::Verdict;
use tidegate_gate::{Gate, Options, Pilot, ServerTotals, Wanted};
use tidegate_policy::{ConnectionRule, Goals, PortRange, RuleSet, Stress, When};

const GOALS: Goals = Goals { latency: Duration::from_millis(50), floor: 0.1 };
/// Nothing of the host's counts.
const NO_STRESS: Stress = Stress { memory: 1e9, queue_delay: Duration::from_secs(3600) };

fn rules(port: u16) -> RuleSet {
    let class =
        |source: &str, class: u8| ConnectionRule { class: Some(class), ..connection("*:*", source, 0.0, 0) };
    let http_ports = vec![PortRange::one(port)];
    RuleSet { http_ports, ..connections(vec![class("10.77.0.2", 0), class("10.77.0.4", 1)]) }
}

/// Answers one connection at a time, each after ten milliseconds, as a program that computes does.
fn serve(listener: &TcpListener, end: &AtomicBool) {
    while !end.load(Ordering::Relaxed) {
        let Ok((mut stream, _)) = listener.accept() else { continue };
        stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        if stream.read(&mut [0; 512]).is_ok_and(|length| length > 0) {
            std::thread::sleep(Duration::from_millis(10));
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        }
    }
}

/// Asks again and again; gives up soon, as greedy clients do.
fn ask(from: &str, to: SocketAddr, end: &AtomicBool) {
    while !end.load(Ordering::Relaxed) {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.bind(&from.parse::<SocketAddr>().unwrap().into()).unwrap();
        if socket.connect_timeout(&to.into(), Duration::from_millis(300)).is_ok() {
            let mut stream: TcpStream = socket.into();
            stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
            let _ = stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n");
            let _ = stream.read(&mut [0; 512]);
        }
    }
}

#[test]
fn agent_limits_the_greedy_class_before_a_slow_server_and_says_why() {
    needs_root();
    let pair = Pair::new();
    let listener = TcpListener::bind(format!("{SERVER4}:0")).unwrap();
    let to = listener.local_addr().unwrap();
    let rules = rules(to.port());
    let gate = pair.gate_with(&rules, &Options::default());
    let wanted = Wanted { goals: Some(GOALS), stress: NO_STRESS };
    let mut pilot = explained(Pilot::start(&gate, wanted, &rules, &[to.port()], 128));
    let end = AtomicBool::new(false);
    let lines = std::thread::scope(|scope| {
        scope.spawn(|| serve(&listener, &end));
        scope.spawn(|| {
            pair.client.run(|| {
                std::thread::scope(|clients| {
                    (0..40).for_each(|_| drop(clients.spawn(|| ask("10.77.0.4:0", to, &end))));
                    clients.spawn(|| ask("10.77.0.2:0", to, &end));
                });
            });
        });
        let mut lines = Vec::new();
        let deadline = Instant::now() + Duration::from_secs(120);
        // Until both the agent has decided and its limit has kept somebody out, however long that takes here.
        let limits = |pilot: &Pilot| pilot.is_overloaded() && total(&gate, "gate_class_policed_total") > 0;
        while !limits(&pilot) && Instant::now() < deadline {
            std::thread::sleep(Pilot::INTERVAL / 2);
            lines.extend(explained(pilot.tick(&gate, &rules, &ServerTotals::default())));
        }
        end.store(true, Ordering::Relaxed);
        // The server waits for one more.
        drop(connect(&format!("{SERVER4}:0"), to));
        lines
    });
    assert!(total(&gate, "gate_class_policed_total") > 0, "nobody was limited: {lines:#?}");
    // The greedy class is the first that is limited.
    let first = lines.iter().find(|line| line.starts_with("priority "));
    assert!(first.is_some_and(|line| line.starts_with("priority 2: unlimited -> ")), "{lines:#?}");
    assert!(pilot.explain().iter().any(|line| line.contains("overload: ")), "{:?}", pilot.explain());
    assert!(explained(gate.show()).overloaded);
}

#[test]
fn what_counts_as_stress_signals_overload_without_an_agent_and_limits_nothing() {
    let mut rules = rules(80);
    rules.http_ports.clear();
    rules.connections[1] =
        ConnectionRule { when: When::Overload, ..connection("*:*", "10.77.0.4", 0.001, 1) };
    let gate = Gate::user_space(&rules, &Options::default(), "test").unwrap();
    let mut wanted = Wanted { goals: None, stress: NO_STRESS };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap();
    let mut pilot = Pilot::start(&gate, wanted, &rules, &[to.port()], 128).unwrap();
    let look = |pilot: &mut Pilot| {
        // What an interval has to be longer than.
        std::thread::sleep(Duration::from_millis(1));
        pilot.tick(&gate, &rules, &ServerTotals::default()).unwrap()
    };
    let overloaded = || gate.show().unwrap().overloaded;
    let waiting: Vec<_> = (0..3).map(|_| TcpStream::connect(to).unwrap()).collect();
    assert!((0..3).all(|_| look(&mut pilot).is_empty()) && !overloaded());

    wanted.stress.queue_delay = Duration::from_micros(1);
    pilot.set_stress(wanted.stress);
    assert!(look(&mut pilot).is_empty(), "one look is no overload");
    let said = look(&mut pilot);
    assert!(said[0].starts_with("overload: connections wait "), "{said:?}");
    assert!(overloaded() && pilot.is_overloaded());
    let connect = || gate.on_connect("10.77.0.4:1".parse().unwrap(), to).verdict;
    assert_eq!([connect(), connect()], [Verdict::Continue, Verdict::Drop], "the rule on overload acts");

    waiting.iter().for_each(|_| drop(listener.accept().unwrap()));
    let said: Vec<String> = (0..20).flat_map(|_| look(&mut pilot)).collect();
    assert_eq!(said, ["what [stress] bounds is within its bounds again"]);
    assert!(!overloaded());
}

#[test]
fn upstream_errors_are_overload_to_the_agent() {
    let mut rules = rules(80);
    rules.http_ports.clear();
    let gate = Gate::user_space(&rules, &Options::default(), "test").unwrap();
    let wanted = Wanted { goals: Some(GOALS), stress: NO_STRESS };
    let mut pilot = Pilot::start(&gate, wanted, &rules, &[], 128).unwrap();
    let mut totals = ServerTotals::default();
    let mut said = Vec::new();
    for _ in 0..8 {
        std::thread::sleep(Duration::from_millis(1));
        totals.upstream_requests += 100;
        totals.upstream_failures += 40;
        said.extend(pilot.tick(&gate, &rules, &totals).unwrap());
    }
    assert!(said.iter().any(|line| line == "overload: the upstream fails 40 % of requests"), "{said:?}");
}

#[test]
fn agent_in_user_space_puts_the_same_limits_in_force() {
    let mut rules = rules(80);
    rules.http_ports.clear();
    let gate = Gate::user_space(&rules, &Options::default(), "test").unwrap();
    let limit = tidegate_policy::Profile::new(0.001, 2).unwrap();
    gate.limit_classes(&rules, &[None, Some(limit)]).unwrap();
    let passed = |source: &str| {
        let peer = format!("{source}:1").parse().unwrap();
        let decide =
            |_: &i32| gate.on_connect(peer, "10.77.0.1:80".parse().unwrap()).verdict == Verdict::Continue;
        (0..10).filter(decide).count()
    };
    assert_eq!((passed("10.77.0.2"), passed("10.77.0.4")), (10, 2));
    gate.limit_classes(&rules, &[]).unwrap();
    assert_eq!(passed("10.77.0.4"), 10);
}
