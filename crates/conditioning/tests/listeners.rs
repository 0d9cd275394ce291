//! Servers with several listening sockets: each accepts the connections that the kernel would have given it.
#![allow(clippy::unwrap_used)]

mod common;

use std::net::{IpAddr, SocketAddr, TcpStream};

use common::{Chain, Client, Site, compile, free_port, needs};

const CHAIN: &[&str] = &["package", "persist", "prior"];

/// Of each client many requests, on connections of their own and several on one, beside the others'.
fn each_is_answered(port: u16, clients: &[&str], expected: impl Fn(IpAddr, IpAddr) -> String + Sync) {
    std::thread::scope(|scope| {
        for client in clients {
            let to: IpAddr = client.parse().unwrap();
            let expected = &expected;
            scope.spawn(move || {
                for round in 0..15 {
                    let stream = TcpStream::connect(SocketAddr::new(to, port)).unwrap();
                    let from = stream.local_addr().unwrap().ip();
                    let mut client = Client::over(stream);
                    for request in 0..3 {
                        let body = String::from_utf8(client.get("/").body).unwrap();
                        assert_eq!(body, expected(to, from), "to {to}, {request} of {round}");
                    }
                }
            });
        }
    });
}

/// Where a server listens, and to which of these addresses whose connections go.
type Case = (&'static [&'static str], &'static [(&'static str, &'static str)]);

fn accepts_its_own(way: &str) {
    let site = Site::new();
    let server = compile("programs/listens.c", &["-pthread"], &site);
    let cases: [Case; 4] = [
        (&["0.0.0.0", "::"], &[("127.0.0.1", "0.0.0.0"), ("::1", "::"), ("127.0.0.2", "0.0.0.0")]),
        (&["::", "0.0.0.0"], &[("127.0.0.1", "0.0.0.0"), ("::1", "::")]),
        (
            &["127.0.0.1", "127.0.0.2", "127.0.0.3"],
            &[("127.0.0.1", "127.0.0.1"), ("127.0.0.2", "127.0.0.2"), ("127.0.0.3", "127.0.0.3")],
        ),
        (&["127.0.0.1", "dual"], &[("127.0.0.1", "127.0.0.1"), ("127.0.0.2", "::"), ("::1", "::")]),
    ];
    for (addresses, clients) in cases {
        eprintln!("{way}, {addresses:?}");
        let port = free_port();
        let port_text = port.to_string();
        let command = [&[server.as_str(), &port_text, way], addresses].concat();
        let chain = Chain::once_it_serves(Chain::listening(&[format!(":{port}")], CHAIN, &command), port);
        let to: Vec<_> = clients.iter().map(|(to, _)| *to).collect();
        each_is_answered(port, &to, |to, from| {
            let (_, at) = clients.iter().find(|(client, _)| client.parse() == Ok(to)).unwrap();
            // On a socket of both families an IPv4 client is a mapped one.
            let is_mapped = at.contains(':') && from.is_ipv4();
            format!("{at} from {}{from}", if is_mapped { "::ffff:" } else { "" })
        });
        chain.stop();
    }
}

#[test]
fn a_server_that_polls_accepts_each_connection_on_its_socket() {
    accepts_its_own("poll");
}

#[test]
fn a_server_that_waits_for_events_accepts_each_connection_on_its_socket() {
    ["level", "edge"].into_iter().for_each(accepts_its_own);
}

#[test]
fn processes_of_which_one_is_told_accept_each_connection_on_its_socket() {
    accepts_its_own("exclusive");
}

#[test]
fn threads_that_wait_in_accept_get_the_connections_of_their_sockets() {
    accepts_its_own("threads");
}

#[test]
fn a_program_that_inherits_listening_sockets_accepts_each_connection_on_its_socket() {
    accepts_its_own("becomes");
}

/// Rules by address are worth nothing if a client's is another one on the socket that happens to accept it.
#[test]
fn nginx_knows_its_clients_on_sockets_of_both_families() {
    needs("nginx", "nginx-light");
    let site = Site::new();
    let port = free_port();
    let file = site.configuration("both.conf", port, NGINX);
    let command = ["nginx", "-e", "stderr", "-c", &file];
    let chain = Chain::once_it_serves(Chain::listening(&[format!(":{port}")], CHAIN, &command), port);
    for _ in 0..20 {
        for (to, status) in [("127.0.0.1", 200), ("::1", 403)] {
            let mut client = Client::try_connect(SocketAddr::new(to.parse().unwrap(), port)).unwrap();
            let response = client.get("/index.html");
            let peer = response.field("x-peer");
            assert_eq!((response.status, peer.as_deref()), (status, Some(to)));
        }
    }
    chain.stop();
}

const NGINX: &str = "
worker_processes 2; daemon off; pid DIR/nginx.pid; error_log DIR/error.log info; events { }
http {
  access_log off; root DIR/html; client_body_temp_path DIR/body; proxy_temp_path DIR/proxy;
  fastcgi_temp_path DIR/fastcgi; uwsgi_temp_path DIR/uwsgi; scgi_temp_path DIR/scgi;
  server { listen PORT; listen [::]:PORT; deny ::1; add_header X-Peer $remote_addr always; }
}
";
