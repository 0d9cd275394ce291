//! Servers with several listening sockets on the chain's port: each gets what the kernel would have given it.
#![allow(clippy::unwrap_used)]

mod common;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::Command;

use common::{Chain, Client, Site, compile, compiled, free_port, needs, strs};

const CHAIN: &[&str] = &["package", "persist", "normalize", "prior"];
const ONE: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 1));
const TWO: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));
const THREE: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 3));
const SIX: IpAddr = IpAddr::V6(Ipv6Addr::LOCALHOST);

/// By the preload library, and by seccomp.
const REACHES: [&[&str]; 2] = [DYNAMIC, STATIC];
const DYNAMIC: &[&str] = &["-pthread"];
const STATIC: &[&str] = &["-static", "-pthread"];

/// `listeners.c` behind a chain that listens on every address.
struct Server {
    chain: Chain,
    port: u16,
    _site: Site,
}

fn serve(flags: &[&str], how: &str, addresses: &[&str]) -> Server {
    eprintln!("{flags:?}, {how}, {addresses:?}");
    let (site, port) = (Site::new(), free_port());
    let server = compile("programs/listeners.c", flags, &site);
    let port_text = port.to_string();
    let command = [&[server.as_str(), &port_text, how], addresses].concat();
    let command = Chain::listening(&[format!(":{port}")], CHAIN, &command);
    Server { chain: Chain::once_it_serves(command, port), port, _site: site }
}

impl Server {
    fn client(&self, to: IpAddr) -> Client {
        Client::try_connect(SocketAddr::new(to, self.port)).unwrap()
    }

    /// Asks at an address, more than once on a connection: the listener given answers, and sees the client's address.
    fn asks(&self, to: IpAddr, listener: &str) {
        let mut client = self.client(to);
        for _ in 0..2 {
            let body = String::from_utf8(client.get("/").body).unwrap();
            assert_eq!(body, expected(&client, listener));
        }
    }

    /// As above, of clients side by side, each many times.
    fn ask(&self, clients: &[(IpAddr, &str)]) {
        std::thread::scope(|scope| {
            for &(to, listener) in clients {
                scope.spawn(move || (0..20).for_each(|_| self.asks(to, listener)));
            }
        });
    }
}

/// The answer of a listener to a client.
fn expected(client: &Client, listener: &str) -> String {
    let address = client.stream.local_addr().unwrap();
    let is_v6 = listener.contains(':');
    let ip = match address.ip() {
        IpAddr::V4(v4) if is_v6 => v4.to_ipv6_mapped().into(),
        ip => ip,
    };
    let peer = format!("{ip} {}", address.port());
    format!("{listener}, {peer}, {peer}, {}", if is_v6 { 6 } else { 4 })
}

/// Debian's nginx, asyncio and many others listen so: for each family in either order. And sites by address: the wrong
/// one answered, past the other's rules.
fn accepts_its_own(how: &str) {
    for flags in REACHES {
        for addresses in [["0.0.0.0", "::"], ["::", "0.0.0.0"]] {
            let server = serve(flags, how, &addresses);
            server.ask(&[(ONE, "0.0.0.0"), (SIX, "::"), (TWO, "0.0.0.0")]);
            server.chain.stop();
        }
        let server = serve(flags, how, &["127.0.0.1", "127.0.0.2", "127.0.0.3"]);
        server.ask(&[(ONE, "127.0.0.1"), (TWO, "127.0.0.2"), (THREE, "127.0.0.3"), (TWO, "127.0.0.2")]);
        server.chain.stop();
        let server = serve(flags, how, &["127.0.0.1", "both=::"]);
        server.ask(&[(ONE, "127.0.0.1"), (TWO, "both=::"), (SIX, "both=::")]);
        server.chain.stop();
    }
}

#[test]
fn a_server_that_polls_accepts_each_connection_on_its_socket() {
    accepts_its_own("poll");
}

/// Debian's mini_httpd does so: told of a connection for another socket, it would wait at the wrong one for good.
#[test]
fn a_server_that_polls_and_whose_sockets_block_accepts_each_connection_on_its_socket() {
    accepts_its_own("blocking");
}

#[test]
fn a_server_that_waits_for_events_accepts_each_connection_on_its_socket() {
    ["level", "edges"].into_iter().for_each(accepts_its_own);
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

/// As servers do of which each worker has a socket of its own (SO_REUSEPORT).
#[test]
fn sockets_of_one_address_share_its_connections() {
    for flags in REACHES {
        for how in ["poll", "edges", "threads"] {
            let server = serve(flags, how, &["127.0.0.1", "127.0.0.2", "127.0.0.1", "127.0.0.2"]);
            server.ask(&[(ONE, "127.0.0.1"), (TWO, "127.0.0.2")]);
            server.chain.stop();
        }
    }
}

/// What waits for it is out of the others' way.
#[test]
fn one_of_which_nobody_accepts_keeps_nothing_from_the_others() {
    let server = serve(STATIC, "poll", &["127.0.0.1", "127.0.0.2", "idle=127.0.0.3"]);
    let mut waiting: Vec<_> = (0..60).map(|_| server.client(THREE)).collect();
    for client in &mut waiting {
        client.send(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n");
    }
    for _ in 0..10 {
        server.asks(ONE, "127.0.0.1");
        server.asks(TWO, "127.0.0.2");
    }
    server.chain.stop();
}

/// It looks like one that accepts from no socket any more: more clients waited than are set aside, and the others were
/// ended.
#[test]
fn clients_of_a_server_that_is_busy_are_all_answered() {
    for flags in REACHES {
        let server = serve(flags, "poll", &["127.0.0.1", "127.0.0.2"]);
        let mut busy = server.client(ONE);
        busy.send(b"GET /busy HTTP/1.1\r\nHost: test\r\n\r\n");
        let mut waiting: Vec<_> = (0..150).map(|_| server.client(TWO)).collect();
        for client in &mut waiting {
            client.send(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n");
        }
        assert_eq!(busy.response(false).status, 200);
        for client in &mut waiting {
            assert_eq!(client.response(false).status, 200);
        }
        server.chain.stop();
    }
}

/// What waited for it ends, and what comes afterwards is for the others.
#[test]
fn one_that_is_closed_gets_no_more() {
    let server = serve(STATIC, "poll", &["127.0.0.1", "idle=127.0.0.2"]);
    let mut waiting = server.client(TWO);
    waiting.send(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n");
    // Behind it: when this is answered, that one waits for its listener alone.
    server.asks(ONE, "127.0.0.1");
    assert_eq!(server.client(ONE).get("/close").status, 200);
    assert!(waiting.is_ended());
    server.asks(TWO, "127.0.0.1");
    server.asks(ONE, "127.0.0.1");
    server.chain.stop();
}

const NGINX: &str = "
worker_processes 2; daemon off; pid DIR/nginx.pid; error_log DIR/error.log info;
events { worker_connections 64; }
http {
  access_log off;
  client_body_temp_path DIR/body; proxy_temp_path DIR/proxy; fastcgi_temp_path DIR/fastcgi;
  uwsgi_temp_path DIR/uwsgi; scgi_temp_path DIR/scgi;
  server { LISTEN return 200 $remote_addr; }
  server { listen 127.0.0.2:PORT bind; return 200 other; }
}
";

/// As Debian configures it; and with a site of an address of its own. Rules by address are worth nothing if a client's
/// is another one on the socket that happens to accept it.
#[test]
fn nginx_knows_its_clients_on_sockets_of_both_families() {
    needs("nginx", "nginx-light");
    let both = [
        "listen PORT; listen [::]:PORT;",
        "listen [::]:PORT; listen PORT;",
        "listen PORT reuseport; listen [::]:PORT reuseport;",
        "listen [::]:PORT ipv6only=off;",
    ];
    for (listen, via) in both.iter().flat_map(|listen| [(listen, "preload"), (listen, "seccomp")]) {
        let (site, port) = (Site::new(), free_port());
        let text = NGINX.replace("LISTEN", listen);
        let file = site.configuration("nginx.conf", port, &text);
        let command = ["nginx", "-e", "stderr", "-c", &file].map(str::to_owned);
        let addresses = [format!(":{port}")];
        let command = Chain::with_options(&["--via", via], &addresses, CHAIN, &strs(&command));
        let chain = Chain::once_it_serves(command, port);
        for _ in 0..20 {
            for (to, seen) in [(ONE, "127.0.0.1"), (SIX, "::1"), (TWO, "other")] {
                let mut client = Client::try_connect(SocketAddr::new(to, port)).unwrap();
                let body = String::from_utf8(client.get("/").body).unwrap();
                let is_mapped = listen.contains("ipv6only=off") && seen == "127.0.0.1";
                let seen = if is_mapped { "::ffff:127.0.0.1" } else { seen };
                assert_eq!(body, seen, "{listen}, {via}");
            }
        }
        chain.stop();
    }
}

/// It was handed the same request until it had been so too often, and its client got 503.
#[test]
fn a_server_that_has_no_descriptor_left_and_tries_again_at_once_keeps_its_clients() {
    for flags in [&[][..], &["-static"]] {
        let (chain, _site) = compiled("full.c", flags, "1000", &["package", "persist", "prior"]);
        let response = chain.get("/");
        assert_eq!((response.status, &response.body[..]), (200, &b"EMFILE"[..]), "{flags:?}");
        assert_eq!(chain.get("/").status, 200);
        chain.stop();
    }
}

/// Asio registers a socket when it opens it: what took the socket's place when it listened was not registered, and the
/// server heard of nobody.
#[test]
fn a_server_that_registers_its_socket_with_epoll_before_it_listens_hears_of_clients() {
    for (flags, way) in [(DYNAMIC, "level"), (DYNAMIC, "edge"), (STATIC, "level"), (STATIC, "edge")] {
        let (chain, _site) = compiled("early.c", flags, way, CHAIN);
        for _ in 0..3 {
            assert_eq!(chain.get("/").body, b"fedcba9876543210", "{flags:?}, {way}");
        }
        chain.stop();
    }
}

/// Nobody was woken, and the server had to be killed.
#[test]
fn a_server_that_shuts_its_listening_socket_down_ends_its_threads_that_wait() {
    for way in ["accept", "poll", "select", "epoll"] {
        let (chain, _site) = compiled("shuts.c", DYNAMIC, way, CHAIN);
        let mut client = chain.client();
        for _ in 0..3 {
            assert_eq!(client.get("/").body, b"ok\n", "{way}");
        }
        assert_eq!(chain.stop().code(), Some(7), "{way}");
    }
}

/// A length of 4 bytes left the rest of the structure as it was: uWSGI took that for a full queue.
#[test]
fn a_server_that_asks_for_the_state_of_its_listening_socket_is_told_of_one_that_listens() {
    for flags in REACHES {
        let (chain, _site) = compiled("asks.c", flags, "options", CHAIN);
        let said = String::from_utf8(chain.get("/").body).unwrap();
        assert_eq!(said, "0, all: 1, listens: 1, waiting: 0 of 0, peer: ENOTCONN", "{flags:?}");
        chain.stop();
    }
}

/// They went into the link, to the filters.
#[test]
fn reads_and_writes_of_a_listening_socket_fail_as_without_a_chain() {
    let (chain, _site) = compiled("asks.c", DYNAMIC, "calls", CHAIN);
    assert_eq!(String::from_utf8(chain.get("/").body).unwrap(), "-1 EPIPE, -1 ENOTCONN");
    chain.stop();
}

/// Two programs for one port shared its clients.
#[test]
fn an_address_at_which_a_server_listens_is_taken_as_without_a_chain() {
    for flags in REACHES {
        let (chain, site) = compiled("twice.c", flags, "serves", CHAIN);
        let behind_chain = String::from_utf8(chain.get("/").body).unwrap();
        chain.stop();
        let mut bare = Command::new(site.path().join("server"));
        let bare = bare.args([&free_port().to_string(), "says"]).output().unwrap();
        assert_eq!(behind_chain, String::from_utf8(bare.stdout).unwrap().trim_end(), "{flags:?}");
        assert!(
            behind_chain.contains("program: EADDRINUSE") && behind_chain.contains("renewed: 0"),
            "{behind_chain}"
        );
    }
}
