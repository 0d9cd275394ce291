//! The adaptation agent with real sensors, before a server that is too slow for what comes.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

mod support;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use support::{Pair, SERVER4, connect, connection, connections, explained, is_root};
use tidegate_gate::{Gate, Options, Pilot};
use tidegate_policy::{ConnectionRule, Goals, PortRange, RuleSet};

const GOALS: Goals = Goals { latency: Duration::from_millis(50), floor: 0.1 };

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
    if !is_root() {
        return;
    }
    let pair = Pair::new();
    let listener = TcpListener::bind(format!("{SERVER4}:0")).unwrap();
    let to = listener.local_addr().unwrap();
    let rules = rules(to.port());
    let gate = pair.gate_with(&rules, &Options::default());
    let mut pilot = explained(Pilot::start(&gate, GOALS, &rules, &[to.port()], 128));
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
        for _ in 0..80 {
            std::thread::sleep(Pilot::INTERVAL / 2);
            lines.extend(explained(pilot.tick(&gate, &rules)));
            let policed = explained(gate.show())
                .totals
                .iter()
                .any(|t| t.name == "gate_class_policed_total" && t.value > 0);
            if policed {
                break;
            }
        }
        end.store(true, Ordering::Relaxed);
        // The server waits for one more.
        drop(connect(&format!("{SERVER4}:0"), to));
        lines
    });
    assert!(lines.iter().any(|line| line.starts_with("priority 2: unlimited -> ")), "{lines:#?}");
    assert!(!lines.iter().any(|line| line.starts_with("priority 1: ")), "{lines:#?}");
    assert!(pilot.explain().iter().any(|line| line.contains("overload: ")), "{:?}", pilot.explain());
    assert!(explained(gate.show()).overloaded);
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
        let decide = |_: &i32| {
            gate.on_connect(peer, "10.77.0.1:80".parse().unwrap()).verdict == tidegate_core::Verdict::Continue
        };
        (0..10).filter(decide).count()
    };
    assert_eq!((passed("10.77.0.2"), passed("10.77.0.4")), (10, 2));
    gate.limit_classes(&rules, &[]).unwrap();
    assert_eq!(passed("10.77.0.4"), 10);
}
