//! The load against servers that behave and servers that do not.

#![allow(clippy::unwrap_used)] // clippy takes helpers of tests for no tests.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate_lab::load::{Order, Plan, Report, follow};

const REQUEST: &str = "GET / HTTP/1.1\r\nHost: x\r\n\r\n";

fn plan(server: SocketAddr, connections: u32) -> Plan {
    let first_source = Ipv4Addr::new(127, 65, 0, 1);
    Plan { server, connections, first_source, request: REQUEST.to_owned(), opening: 16 }
}

/// What a load process answers to these orders.
fn reports(plan: &Plan, orders: &[Order]) -> Vec<Report> {
    let mut input = serde_json::to_string(plan).unwrap();
    for order in orders {
        input.push('\n');
        input.push_str(&serde_json::to_string(order).unwrap());
    }
    let mut output = Vec::new();
    follow(input.as_bytes(), &mut output).unwrap();
    String::from_utf8(output).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn establish(messages: u32) -> Order {
    Order::Establish { messages, timeout_ms: 20_000 }
}

/// A listener whose connections are given to `serve`, each on a thread of its own.
fn server(serve: impl Fn(TcpStream) + Clone + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let serve = serve.clone();
            std::thread::spawn(move || serve(stream));
        }
    });
    address
}

/// The bare responder, once it listens.
fn bare() -> SocketAddr {
    let address = tidegate_ports::free_address().unwrap();
    std::thread::spawn(move || tidegate_bench::bare::serve(address, 100));
    while TcpStream::connect(address).is_err() {
        std::thread::sleep(Duration::from_millis(5));
    }
    address
}

#[test]
fn every_connection_gets_its_answers_before_it_falls_silent_and_after() {
    let reports = reports(&plan(bare(), 300), &[establish(3), Order::Send { for_ms: 50 }]);
    assert_eq!((reports[0].answers, reports[0].failed), (900, 0));
    assert_eq!(reports[0].established_at_ns.len(), 300);
    assert!(reports[0].established_at_ns.iter().all(|at_ns| *at_ns >= reports[0].began_at_ns));
    assert_eq!(reports[1].failed, 0);
    assert!(reports[1].answers >= 300, "each connection sends at least once: {}", reports[1].answers);
    assert!(reports[1].established_at_ns.is_empty(), "nothing is established a second time");
}

#[test]
fn connections_come_from_several_addresses() {
    let clients = Arc::new(Mutex::new(BTreeSet::new()));
    let seen = Arc::clone(&clients);
    let address = server(move |mut stream| {
        seen.lock().unwrap().insert(stream.peer_addr().unwrap().ip());
        let _ = stream.read(&mut [0; 256]);
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
        let _ = stream.read(&mut [0; 256]);
    });
    let reports = reports(&plan(address, 260), &[establish(1)]);
    assert_eq!((reports[0].answers, reports[0].failed), (260, 0));
    let expected = [1, 2].map(|last| IpAddr::from([127, 65, 0, last]));
    assert_eq!(*clients.lock().unwrap(), BTreeSet::from(expected));
}

#[test]
fn a_server_that_closes_fails_every_connection() {
    let reports = reports(&plan(server(drop), 40), &[establish(1)]);
    assert_eq!((reports[0].answers, reports[0].failed), (0, 40));
}

#[test]
fn a_port_that_nobody_listens_on_fails_every_connection() {
    let address = tidegate_ports::free_address().unwrap();
    let reports = reports(&plan(address, 40), &[establish(1)]);
    assert_eq!((reports[0].answers, reports[0].failed), (0, 40));
}

#[test]
fn a_server_that_refuses_and_one_that_says_too_much_fail_their_connections() {
    let refuses = server(|mut stream| {
        let _ = stream.read(&mut [0; 256]);
        let _ = stream.write_all(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n");
        let _ = stream.read(&mut [0; 256]);
    });
    assert_eq!(reports(&plan(refuses, 5), &[establish(1)])[0].failed, 5);
    let repeats = server(|mut stream| {
        let _ = stream.read(&mut [0; 256]);
        let _ = stream.write_all(&b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n".repeat(2));
        let _ = stream.read(&mut [0; 256]);
    });
    assert_eq!(reports(&plan(repeats, 5), &[establish(1)])[0].failed, 5);
}

#[test]
fn a_server_that_says_nothing_fails_every_connection_at_the_timeout() {
    let silent = server(|mut stream| {
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let order = Order::Establish { messages: 1, timeout_ms: 100 };
    let reports = reports(&plan(silent, 40), &[order]);
    assert_eq!((reports[0].answers, reports[0].failed), (0, 40), "16 under way and 24 not begun");
}

#[test]
fn an_order_that_is_none_ends_the_process_with_an_error() {
    assert!(follow(&b"{}"[..], Vec::new()).is_err());
    assert!(follow(&b""[..], Vec::new()).is_ok(), "no plan, nothing to do");
}
