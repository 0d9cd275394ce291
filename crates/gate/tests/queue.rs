//! Prioritized listen queues: who waits, and who is accepted first.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

mod support;

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use support::{
    Namespace, Pair, SERVER4, SERVER6, connect, connection, connections, explained, is_answered, is_dropped,
    needs_root, overflows, until_waiting,
};
use tidegate_gate::{ClassListeners, Gate, GateError, ListenQueue, Mechanism, Options};
use tidegate_policy::{ConnectionRule, RuleSet};

/// The last octet of a client's address, by its class.
const HIGH: u8 = 2;
const MIDDLE: u8 = 3;
const LOW: u8 = 4;
const WAIT: Option<Duration> = Some(Duration::from_secs(5));

/// 10.77.0.2 and fd77::2 are served first, .3 second; all others have no rule and come last.
fn three_classes() -> RuleSet {
    let class =
        |source: &str, class: u8| ConnectionRule { class: Some(class), ..connection("*:*", source, 0.0, 0) };
    connections(vec![
        class("10.77.0.2", 0),
        class("fd77::2", 0),
        class("10.77.0.3", 1),
        class("fd77::3", 1),
        class("10.99.0.0/16", 2),
    ])
}

fn bind(gate: &Gate, address: &str) -> ListenQueue {
    let (queue, why) = explained(ListenQueue::bind(gate, address.parse().unwrap(), 3, 64));
    assert_eq!(why, None);
    queue
}

/// Classes in the order of acceptance.
fn classes(queue: &ListenQueue, gate: &Gate, count: usize) -> Vec<u8> {
    let mut seen = Vec::new();
    while seen.len() < count {
        match queue.try_accept(gate).unwrap() {
            Some(accepted) => seen.push(accepted.class),
            None => panic!("only {seen:?} wait"),
        }
    }
    assert!(queue.try_accept(gate).unwrap().is_none());
    seen
}

#[test]
fn highest_class_is_accepted_first_whoever_came_first() {
    needs_root();
    let pair = Pair::new();
    let gate = pair.gate(&three_classes());
    let queue = bind(&gate, "[::]:0");
    let port = queue.listeners().local_addr().unwrap().port();
    let to4: SocketAddr = format!("{SERVER4}:{port}").parse().unwrap();
    let to6: SocketAddr = format!("[{SERVER6}]:{port}").parse().unwrap();
    let _clients: Vec<TcpStream> = pair.client.run(|| {
        let order = [4, 3, 4, 2, 3, 2, 5];
        let v4 = order.iter().map(|host| connect(&format!("10.77.0.{host}:0"), to4));
        let v6 = order.iter().map(|host| connect(&format!("[fd77::{host}]:0"), to6));
        v4.chain(v6).collect()
    });
    until_waiting(port, 14);
    assert_eq!(classes(&queue, &gate, 14), [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2]);
    let steered =
        explained(gate.show()).totals.iter().find(|t| t.name == "gate_steered_total").unwrap().value;
    assert!(steered >= 14, "{steered}");
}

#[test]
fn full_queue_of_a_low_class_does_not_shut_out_the_high_one() {
    needs_root();
    let pair = Pair::new();
    let gate = pair.gate(&three_classes());
    let address = format!("{SERVER4}:0").parse().unwrap();
    let (queue, _) = explained(ListenQueue::bind(&gate, address, 3, 2));
    let to = queue.listeners().local_addr().unwrap();
    let full = (0..12).any(|_| {
        pair.client.run(|| is_answered("10.77.0.4:0", to));
        overflows() > 0
    });
    assert!(full, "the low class's queue is full");
    pair.client.run(|| connect("10.77.0.2:0", to));
    // Of the low class some are in the queue by now.
    while queue.listeners().accept(WAIT).unwrap().unwrap().class != 0 {}
}

#[test]
fn clients_that_connect_while_the_server_restarts_are_served() {
    needs_root();
    let pair = Pair::new();
    let gate = pair.gate(&three_classes());
    let queue = bind(&gate, &format!("{SERVER4}:0"));
    let to = queue.listeners().local_addr().unwrap();
    let (holder, server) = UnixStream::pair().unwrap();
    queue.listeners().pass(&holder).unwrap();
    let first = ClassListeners::receive(&server).unwrap();
    assert_eq!(first.sockets().len(), 3);
    let _one = pair.client.run(|| connect("10.77.0.4:0", to));
    assert_eq!(first.accept(WAIT).unwrap().unwrap().class, 2);
    drop(first);
    // No server: connections wait with the holder, each in the queue of its class.
    let _waiting = pair.client.run(|| [4, 3, 2].map(|host| connect(&format!("10.77.0.{host}:0"), to)));
    until_waiting(to.port(), 3);
    queue.listeners().pass(&holder).unwrap();
    let second = ClassListeners::receive(&server).unwrap();
    let order: Vec<u8> = (0..3).map(|_| second.accept(WAIT).unwrap().unwrap().class).collect();
    assert_eq!(order, [0, 1, 2]);
    // The rules may change under it.
    explained(gate.replace_rules(&RuleSet::default()));
    let _four = pair.client.run(|| connect("10.77.0.4:0", to));
    assert_eq!(second.accept(WAIT).unwrap().unwrap().class, 0, "one class is left");
    drop(holder);
    assert!(ClassListeners::receive(&server).is_err());
}

#[test]
fn low_class_is_held_back_while_the_high_one_waits() {
    needs_root();
    let pair = Pair::new();
    let gate = pair.gate_with(&three_classes(), &Options { hold_depth: Some(2), ..Options::default() });
    let queue = bind(&gate, &format!("{SERVER4}:0"));
    let to = queue.listeners().local_addr().unwrap();
    let held = |host: u8| {
        pair.client.run(|| is_dropped(&gate, "gate_syns_held_total", &format!("10.77.0.{host}:0"), to))
    };
    let connected = |host: u8| drop(pair.client.run(|| connect(&format!("10.77.0.{host}:0"), to)));
    // One does not make a queue.
    [LOW, HIGH, LOW, HIGH].into_iter().for_each(connected);
    until_waiting(to.port(), 4);
    assert!(held(LOW) && held(MIDDLE), "while two of the high class wait");
    connected(HIGH);
    until_waiting(to.port(), 5);
    for _ in 0..3 {
        assert_eq!(queue.try_accept(&gate).unwrap().unwrap().class, 0);
    }
    [MIDDLE, MIDDLE].into_iter().for_each(connected);
    until_waiting(to.port(), 4);
    assert!(held(LOW), "the middle class holds back the low one too");
    explained(gate.set_hold_depth(None));
    connected(LOW);
}

#[test]
fn low_class_is_held_back_from_a_server_with_one_accept_queue() {
    needs_root();
    let pair = Pair::new();
    let gate = pair.gate_with(&three_classes(), &Options { hold_depth: Some(2), ..Options::default() });
    for (listen, low, high) in [
        (format!("{SERVER4}:0"), "10.77.0.4:0", "10.77.0.2:0"),
        (format!("[{SERVER6}]:0"), "[fd77::4]:0", "[fd77::2]:0"),
    ] {
        // Any server: it knows nothing of the gate.
        let server = TcpListener::bind(&listen).unwrap();
        let to = server.local_addr().unwrap();
        let held = |from: &str| pair.client.run(|| is_dropped(&gate, "gate_syns_held_total", from, to));
        let connected = |from: &str| drop(pair.client.run(|| connect(from, to)));
        connected(high);
        connected(low);
        until_waiting(to.port(), 2);
        assert!(held(low), "two wait");
        connected(high);
        for _ in 0..3 {
            server.accept().unwrap();
        }
        // Nobody waits.
        connected(low);
    }
    let held = explained(gate.show()).totals.iter().find(|t| t.name == "gate_syns_held_total").unwrap().value;
    assert!(held >= 2, "{held}");
}

#[test]
fn without_kernel_programs_connections_are_policed_and_ordered_after_accept() {
    needs_root();
    let pair = Pair::new();
    let mut rules = three_classes();
    rules.connections.push(connection("*:*", "10.77.0.9", 0.001, 1));
    let gate = Gate::user_space(&rules, &Options::default(), "test").unwrap();
    gate.blocks().add("10.77.0.8".parse().unwrap(), None).unwrap();
    let (queue, why) = ListenQueue::bind(&gate, format!("{SERVER4}:0").parse().unwrap(), 3, 6).unwrap();
    assert_eq!(why.as_deref(), Some("no kernel program is loaded"));
    let to = queue.listeners().local_addr().unwrap();
    let connect_all = |hosts: &[u8]| -> Vec<TcpStream> {
        let one = |host: &u8| connect(&format!("10.77.0.{host}:0"), to);
        pair.client.run(|| hosts.iter().map(one).collect())
    };
    let _clients = connect_all(&[4, 3, 9, 9, 8, 2]);
    until_waiting(to.port(), 6);
    assert_eq!(classes(&queue, &gate, 4), [0, 1, 2, 2]);
    assert_eq!(queue.counts().refused, 2, "one beyond its burst, one blocked");
    // Full: the youngest of the lowest class makes room.
    let _more = connect_all(&[4, 4, 4, 4, 4]);
    until_waiting(to.port(), 5);
    assert!(queue.try_accept(&gate).unwrap().is_some());
    let _high = connect_all(&[2, 2, 2, 2]);
    until_waiting(to.port(), 4);
    assert_eq!(classes(&queue, &gate, 6), [0, 0, 0, 0, 2, 2]);
    assert_eq!(queue.counts().shed, 2);
    let rows = gate.show().unwrap().rules;
    assert!(rows.iter().all(|row| row.mechanism == Mechanism::Accept));
    assert_eq!((rows[5].passed, rows[5].refused), (1, 1));
}

#[test]
fn impossible_numbers_of_classes_and_queues_are_refused() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let gate = explained(Gate::load(&RuleSet::default(), &Options::default()));
    let address: SocketAddr = "127.0.0.1:0".parse().unwrap();
    assert!(matches!(ListenQueue::bind(&gate, address, 0, 1), Err(GateError::Classes { .. })));
    assert!(matches!(ListenQueue::bind(&gate, address, 9, 1), Err(GateError::Classes { .. })));
    let mut queues: Vec<ListenQueue> =
        (0..64).map(|_| explained(ListenQueue::bind(&gate, address, 1, 1)).0).collect();
    assert!(matches!(ListenQueue::bind(&gate, address, 1, 1), Err(GateError::Full { .. })));
    queues.pop();
    assert!(ListenQueue::bind(&gate, address, 1, 1).is_ok());
}
