//! What servers write, and how they end: each byte and each end reaches the client as it would without a chain.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::Read;

use common::{Chain, Client, Site, compile, free_port, needs};

const CHAIN: &[&str] = &["package", "persist", "normalize", "prior"];

/// Ways in which a server writes that are followed.
const WAYS: [&str; 11] = [
    "write", "send", "sendto", "writev", "words", "mixed", "alone", "sendmsg", "sendmmsg", "sendfile", "any",
];

/// What a client gets of a response that announces the end of its connection.
const HEAD: &str = "HTTP/1.1 200 OK\r\nContent-Length:                    3\r\n\r\n";

/// `heads.c`, whose writes `cuts.c` cuts short.
fn heads() -> (Chain, Site) {
    let (site, port) = (Site::new(), free_port());
    let cuts = site.path().join("cuts.so");
    std::fs::rename(compile("programs/cuts.c", &["-shared", "-fPIC"], &site), &cuts).unwrap();
    let flags = ["-Wl,--no-as-needed", cuts.to_str().unwrap()];
    let server = compile("programs/heads.c", &flags, &site);
    (Chain::start(port, CHAIN, &[&server, &port.to_string()]), site)
}

fn answers(client: &mut Client, path: &str) {
    client.send(format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n").as_bytes());
    let response = client.try_response(false).unwrap_or_else(|error| panic!("{path}: {error}"));
    assert_eq!((response.head.as_str(), &response.body[..]), (HEAD, &b"ok\n"[..]), "{path}");
}

#[test]
fn a_server_that_announces_its_end_keeps_its_clients_in_whichever_way_it_writes() {
    let (chain, _site) = heads();
    let mut client = chain.client();
    WAYS.into_iter().chain(["stream"]).for_each(|way| answers(&mut client, &format!("/{way}/100")));
    chain.stop();
}

/// The announcement is taken out by moving what follows; the rest was sent from the server's own buffer, where it had
/// not moved.
#[test]
fn a_head_whose_announcement_is_taken_out_is_whole_however_little_the_socket_takes() {
    let (chain, _site) = heads();
    let mut client = chain.client();
    for most in 1..HEAD.len() + 3 {
        for way in WAYS {
            answers(&mut client, &format!("/{way}/{most}/0"));
            answers(&mut client, &format!("/{way}/{most}/1"));
        }
        answers(&mut client, &format!("/stream/{most}/0"));
    }
    chain.stop();
}

/// The kernel reads what is sent so when it likes (MSG_ZEROCOPY): only the server knows how long the bytes stay what
/// they are.
#[test]
fn a_head_that_the_kernel_does_not_copy_is_sent_as_it_is() {
    let (chain, _site) = heads();
    let mut client = chain.client();
    let response = client.get("/zerocopy/100");
    assert_eq!(response.field("connection").as_deref(), Some("close"), "{}", response.head);
    assert_eq!(response.body, b"ok\n");
    assert!(client.is_ended());
    chain.stop();
}

/// It is looked at, and copied for that, up to a bound.
#[test]
fn a_head_of_many_bytes_in_several_vectors_is_sent_as_it_is() {
    let (chain, _site) = heads();
    let mut client = chain.client();
    let response = client.get("/long");
    assert_eq!(response.field("connection").as_deref(), Some("close"), "{}", response.head);
    assert_eq!(response.field("x").map(|field| field.len()), Some(9000));
    assert_eq!(response.body, b"ok\n");
    assert!(client.is_ended());
    chain.stop();
}

/// What is corked would wait for the next response.
#[test]
fn a_connection_that_a_server_corked_is_not_corked_for_the_next_one() {
    let (chain, _site) = heads();
    let mut client = chain.client();
    (0..3).for_each(|_| answers(&mut client, "/cork/100"));
    chain.stop();
}

/// `aborts.c`, which is linked as `flags` say.
fn aborts(flags: &[&str]) -> (Chain, Site) {
    let (site, port) = (Site::new(), free_port());
    let server = compile("programs/aborts.c", flags, &site);
    (Chain::start(port, CHAIN, &[&server, &port.to_string()]), site)
}

/// What comes until the connection ends, and whether it ends in order.
fn until_the_end(client: &mut Client, path: &str) -> (String, Result<(), std::io::ErrorKind>) {
    client.send(format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n").as_bytes());
    let mut got = Vec::new();
    let end = client.stream.read_to_end(&mut got).map_err(|error| error.kind());
    (String::from_utf8(got).unwrap(), end.map(|_| ()))
}

/// It ended like a response that is whole, which one without a length then is.
fn is_reset_for_the_client(flags: &[&str]) {
    let (chain, _site) = aborts(flags);
    for path in ["/close", "/length", "/chunked"] {
        let (got, end) = until_the_end(&mut chain.client(), path);
        assert_eq!(end, Err(std::io::ErrorKind::ConnectionReset), "{path}");
        assert!(got.ends_with("a part"), "{path}: {got}");
    }
    // One that only ends is none.
    let (got, end) = until_the_end(&mut chain.client(), "/");
    assert!(got.ends_with("a part") && end.is_ok(), "{got}, {end:?}");
    chain.stop();
}

#[test]
fn a_response_that_the_server_resets_is_reset_for_the_client() {
    is_reset_for_the_client(&[]);
}

#[test]
fn a_response_that_a_statically_linked_server_resets_is_reset_for_the_client() {
    is_reset_for_the_client(&["-static"]);
}

/// It is the server's end that it asked for: the client's connection goes on, with servers that did not.
fn what_close_does_is_one_servers(flags: &[&str]) {
    let (chain, _site) = aborts(flags);
    let mut client = chain.client();
    for path in ["/whole", "/whole", "/timed", "/timed", "/whole"] {
        assert_eq!(client.get(path).body, b"0\n", "{path}");
    }
    let (got, end) = until_the_end(&mut client, "/");
    assert!(got.ends_with("a part") && end.is_ok(), "{got}, {end:?}");
    chain.stop();
}

#[test]
fn what_a_servers_close_does_is_not_done_to_the_clients_next_request() {
    what_close_does_is_one_servers(&[]);
}

#[test]
fn what_a_statically_linked_servers_close_does_is_not_done_to_the_clients_next_request() {
    what_close_does_is_one_servers(&["-static"]);
}

/// Asks for its client's address by getpeername(2), as many do for their logs.
const NAMES: &str = "
import socket
listener = socket.create_server(('::', PORT), family=socket.AF_INET6)
while True:
    client, peer = listener.accept()
    client.recv(65536)
    body = repr((client.getpeername() == peer, client.getpeername()[0], client.getsockname()[0])).encode()
    client.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n' % len(body) + body)
    client.close()
";

/// A socket of IPv6 has no other addresses, so servers know no others.
#[test]
fn a_server_that_listens_for_ipv6_is_told_an_ipv4_clients_address_as_a_mapped_one() {
    needs("python3", "python3");
    let (site, port) = (Site::new(), free_port());
    let server = site.configuration("server.py", port, NAMES);
    let chain = Chain::start(port, CHAIN, &["python3", &server]);
    let named = String::from_utf8(chain.get("/").body).unwrap();
    assert_eq!(named, "(True, '::ffff:127.0.0.1', '::ffff:127.0.0.1')");
    chain.stop();
}
