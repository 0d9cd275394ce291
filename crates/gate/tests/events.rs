//! What TCP goes through, told connection by connection.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

mod support;

use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use support::{Pair, SERVER4, SERVER6, connect, explained, needs_root};
use tidegate_gate::{Options, SlowReaders, TcpEvent, TcpEventKind};
use tidegate_policy::{PortRange, RuleSet};

const PATIENCE: Duration = Duration::from_millis(100);

#[test]
fn states_resets_and_shut_windows_are_told_of_the_connection_they_concern() {
    needs_root();
    let pair = Pair::new();
    let listener = TcpListener::bind("[::]:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let other = TcpListener::bind("[::]:0").unwrap();
    let rules = RuleSet { http_ports: vec![PortRange::one(port)], ..RuleSet::default() };
    let gate = pair.gate_with(&rules, &Options::default());
    let events = explained(gate.tcp_events());
    let mut seen: Vec<TcpEvent> = Vec::new();
    let mut wait_for = |wanted: &dyn Fn(&TcpEvent) -> bool| -> TcpEvent {
        for _ in 0..100 {
            if let Some(event) = seen.iter().find(|event| wanted(event)) {
                return *event;
            }
            explained(events.poll(PATIENCE, |event| seen.push(event)));
        }
        panic!("not among {seen:#?}");
    };
    for to in [format!("{SERVER4}:{port}"), format!("[{SERVER6}]:{port}")] {
        let to: SocketAddr = to.parse().unwrap();
        let from = if to.is_ipv4() { "10.77.0.2:0" } else { "[fd77::2]:0" };
        let client = pair.client.run(|| connect(from, to));
        let peer = client.local_addr().unwrap();
        let (mut server, _) = listener.accept().unwrap();
        let established = wait_for(&|event| {
            event.client == peer && matches!(event.kind, TcpEventKind::State { to: 1, .. })
        });
        assert_eq!((established.server_port, established.retransmits), (port, 0));
        // A client that reads nothing shuts its window.
        server.set_nonblocking(true).unwrap();
        let is_shut = |event: &TcpEvent| event.client == peer && event.kind == TcpEventKind::ZeroWindow;
        while server.write(&[0; 65_536]).is_ok() {}
        let shut = wait_for(&is_shut);
        assert!(shut.round_trip > Duration::ZERO, "{shut:?}");
        // And one that goes away with unread bytes resets.
        drop(client);
        wait_for(&|event| event.client == peer && event.kind == TcpEventKind::ResetReceived);
        wait_for(&|event| event.client == peer && matches!(event.kind, TcpEventKind::State { to: 7, .. }));
    }
    // A port where no HTTP is spoken, and another namespace, are nobody's business.
    let elsewhere: SocketAddr = format!("{SERVER4}:{}", other.local_addr().unwrap().port()).parse().unwrap();
    drop(pair.client.run(|| connect("10.77.0.2:0", elsewhere)));
    explained(events.poll(PATIENCE, |event| seen.push(event)));
    assert!(seen.iter().all(|event| event.server_port == port), "{seen:#?}");
}

#[test]
fn events_that_nobody_takes_are_counted_as_lost() {
    needs_root();
    let pair = Pair::new();
    let listener = TcpListener::bind(format!("{SERVER4}:0")).unwrap();
    let to = listener.local_addr().unwrap();
    let rules = RuleSet { http_ports: vec![PortRange::one(to.port())], ..RuleSet::default() };
    let gate = pair.gate_with(&rules, &Options::default());
    let events = explained(gate.tcp_events());
    let total = |name: &str| explained(gate.show()).totals.iter().find(|t| t.name == name).unwrap().value;
    // Some 3,600 events fit.
    for _ in 0..40 {
        let clients: Vec<_> = pair.client.run(|| (0..50).map(|_| connect("10.77.0.2:0", to)).collect());
        for _ in &clients {
            drop(listener.accept().unwrap());
        }
        drop(clients);
        if total("gate_tcp_events_lost_total") > 0 {
            break;
        }
    }
    assert!(total("gate_tcp_events_lost_total") > 0);
    let kept = explained(events.poll(PATIENCE, |_| {}));
    assert!(kept > 1000, "{kept}");
    drop(events);
    let before = total("gate_tcp_events_total");
    drop(pair.client.run(|| connect("10.77.0.2:0", to)));
    assert_eq!(total("gate_tcp_events_total"), before, "nothing is attached any more");
}

#[test]
fn client_that_shuts_its_window_again_and_again_is_blocked_and_others_are_not() {
    needs_root();
    let pair = Pair::new();
    let listener = TcpListener::bind(format!("{SERVER4}:0")).unwrap();
    let to = listener.local_addr().unwrap();
    let rules = RuleSet { http_ports: vec![PortRange::one(to.port())], ..RuleSet::default() };
    let gate = pair.gate_with(&rules, &Options::default());
    explained(gate.blocks().set_lifetime(Duration::from_secs(600)));
    let mut watch = explained(SlowReaders::start(&gate, 3));
    let _other = pair.client.run(|| connect("10.77.0.3:0", to));
    // It reads nothing; the server's probes are answered by a shut window each time.
    let _slow = pair.client.run(|| connect("10.77.0.2:0", to));
    let mut servers = [listener.accept().unwrap().0, listener.accept().unwrap().0];
    servers[1].set_nonblocking(true).unwrap();
    while servers[1].write(&[0; 65_536]).is_ok() {}
    servers[0].write_all(b"x").unwrap();
    let blocked = (0..400).find_map(|_| {
        std::thread::sleep(Duration::from_millis(25));
        explained(watch.tick(&gate, &[])).into_iter().next()
    });
    assert_eq!(blocked, Some("10.77.0.2".parse().unwrap()));
    let list = explained(gate.blocks().list());
    assert_eq!(list.len(), 1);
    assert_eq!(list[0].reason.as_deref(), Some("shuts its window again and again"));
    assert!(list[0].remaining.is_some());
}
