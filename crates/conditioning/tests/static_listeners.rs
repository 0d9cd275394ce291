//! Servers with several listening sockets on the chain's port, which the launcher answers (seccomp user notification): each
//! gets what the kernel would have given it.
#![allow(clippy::unwrap_used)]

mod common;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use common::{Chain, Client, Site, compile, free_port, needs, strs};

const CHAIN: &[&str] = &["package", "persist", "normalize", "prior"];
const ONE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 1);
const TWO: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const THREE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 3);
const SIX: Ipv6Addr = Ipv6Addr::LOCALHOST;

/// `listeners.c` behind a chain that listens on every address.
struct Server {
    chain: Chain,
    port: u16,
    _site: Site,
}

fn serve(how: &str, addresses: &[&str]) -> Server {
    let (site, port) = (Site::new(), free_port());
    let server = compile("static/listeners.c", &["-static", "-pthread"], &site);
    let port_text = port.to_string();
    let command = [&[server.as_str(), &port_text, how], addresses].concat();
    let command = Chain::listening(&[format!(":{port}")], CHAIN, &command);
    Server { chain: Chain::once_it_serves(command, port), port, _site: site }
}

impl Server {
    fn client(&self, to: impl Into<IpAddr>) -> Client {
        Client::try_connect(SocketAddr::new(to.into(), self.port)).unwrap()
    }

    /// Asks at an address: the listener given answers, and sees the client's address.
    fn asks(&self, to: impl Into<IpAddr>, listener: &str) {
        let mut client = self.client(to);
        let body = String::from_utf8(client.get("/").body).unwrap();
        assert_eq!(body, expected(&client, listener));
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

/// Debian's nginx, asyncio and many others listen so. Whichever listened first got nothing.
#[test]
fn one_for_each_family_in_either_order() {
    for how in ["poll", "edges", "threads"] {
        for addresses in [["0.0.0.0", "::"], ["::", "0.0.0.0"]] {
            let server = serve(how, &addresses);
            for _ in 0..10 {
                server.asks(ONE, "0.0.0.0");
                server.asks(SIX, "::");
            }
            server.chain.stop();
        }
    }
}

#[test]
fn one_for_both_families_leaves_to_others_what_is_theirs() {
    let server = serve("poll", &["both=::", "127.0.0.2"]);
    for _ in 0..5 {
        server.asks(ONE, "both=::");
        server.asks(TWO, "127.0.0.2");
        server.asks(SIX, "both=::");
    }
    server.chain.stop();
}

/// Sites by address: the wrong one answered, past the other's rules.
#[test]
fn one_for_each_address() {
    for how in ["poll", "edges"] {
        let server = serve(how, &["127.0.0.1", "127.0.0.2"]);
        std::thread::scope(|scope| {
            for (to, listener) in
                [(ONE, "127.0.0.1"), (TWO, "127.0.0.2"), (ONE, "127.0.0.1"), (TWO, "127.0.0.2")]
            {
                let server = &server;
                scope.spawn(move || (0..50).for_each(|_| server.asks(to, listener)));
            }
        });
        server.chain.stop();
    }
}

#[test]
fn threads_that_wait_in_accept_each_get_theirs() {
    let server = serve("threads", &["127.0.0.1", "127.0.0.2"]);
    std::thread::scope(|scope| {
        for (to, listener) in [(ONE, "127.0.0.1"), (TWO, "127.0.0.2")] {
            let server = &server;
            scope.spawn(move || (0..50).for_each(|_| server.asks(to, listener)));
        }
    });
    server.chain.stop();
}

/// As servers do of which each worker has a socket of its own (SO_REUSEPORT).
#[test]
fn sockets_of_one_address_share_its_connections() {
    for how in ["poll", "edges", "threads"] {
        let server = serve(how, &["127.0.0.1", "127.0.0.2", "127.0.0.1", "127.0.0.2"]);
        for _ in 0..20 {
            server.asks(ONE, "127.0.0.1");
            server.asks(TWO, "127.0.0.2");
        }
        server.chain.stop();
    }
}

/// What waits for it is out of the others' way.
#[test]
fn one_of_which_nobody_accepts_keeps_nothing_from_the_others() {
    let server = serve("poll", &["127.0.0.1", "127.0.0.2", "idle=127.0.0.3"]);
    let mut waiting: Vec<_> = (0..200).map(|_| server.client(THREE)).collect();
    for client in &mut waiting {
        client.send(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n");
    }
    for _ in 0..10 {
        server.asks(ONE, "127.0.0.1");
        server.asks(TWO, "127.0.0.2");
    }
    server.chain.stop();
}

/// What waited for it ends, and what comes afterwards is for the others.
#[test]
fn one_that_is_closed_gets_no_more() {
    let server = serve("poll", &["127.0.0.1", "idle=127.0.0.2"]);
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

/// As Debian configures it, which answered nobody; and with a site of an address of its own.
#[test]
fn nginx_for_both_families() {
    needs("nginx", "nginx-light");
    let both = [
        "listen PORT; listen [::]:PORT;",
        "listen [::]:PORT; listen PORT;",
        "listen PORT reuseport; listen [::]:PORT reuseport;",
        "listen [::]:PORT ipv6only=off;",
    ];
    for listen in both {
        let (site, port) = (Site::new(), free_port());
        let text = NGINX.replace("LISTEN", listen);
        let file = site.configuration("nginx.conf", port, &text);
        let command = ["nginx", "-e", "stderr", "-c", &file].map(str::to_owned);
        let addresses = [format!(":{port}")];
        let command = Chain::with_options(&["--via", "seccomp"], &addresses, CHAIN, &strs(&command));
        let chain = Chain::once_it_serves(command, port);
        for _ in 0..20 {
            for (to, seen) in [(ONE.into(), "127.0.0.1"), (IpAddr::from(SIX), "::1"), (TWO.into(), "other")] {
                let mut client = Client::try_connect(SocketAddr::new(to, port)).unwrap();
                let body = String::from_utf8(client.get("/").body).unwrap();
                let is_mapped = listen.contains("ipv6only=off") && seen == "127.0.0.1";
                let seen = if is_mapped { "::ffff:127.0.0.1" } else { seen };
                assert_eq!(body, seen, "{listen}");
            }
        }
        chain.stop();
    }
}
