//! Connections that a balancer passes on: a PROXY header names the client of each.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::process::{Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;
use tidegate_e2e::http2::{self, WIDE, encrypted, get, run, whole};
use tidegate_e2e::{
    Builder, Certificate, Client, Origin, Process, Reply, Response, Tidegate, eventually, free_port,
};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpSocket;

/// Who may name clients.
const BALANCER: [u8; 4] = [127, 0, 7, 7];
const SIGNATURE: &[u8] = b"\r\n\r\n\0\r\nQUIT\n";

/// A site with listeners that take PROXY headers, beside its other one.
struct Site {
    tidegate: Tidegate,
    http: SocketAddr,
    https: SocketAddr,
    certificate: Certificate,
    _files: TempDir,
}

impl Site {
    fn start(builder: Builder) -> Self {
        let [http, https] = [(); 2].map(|()| SocketAddr::from(([127, 0, 0, 1], free_port())));
        let (files, certificate) = (tempfile::tempdir().unwrap(), Certificate::of(&["a.example"]));
        certificate.write(files.path(), "a");
        let path = files.path().join("a");
        let path = path.display();
        let tables = format!(
            "[[listen]]\naddress = \"{http}\"\nproxy_protocol = true\n\
             [[listen]]\naddress = \"{https}\"\nprotocol = \"https\"\nproxy_protocol = true\n\
             [[certificate]]\nchain = \"{path}.crt\"\nkey = \"{path}.key\"\n\
             [log]\naccess = \"@DIR@/access.log\"\n"
        );
        let trusted = format!("trusted_proxies = [\"{}\"]", IpAddr::from(BALANCER));
        let tidegate = builder.top(&trusted).top("workers = 1").tables(&tables).start();
        Self { tidegate, http, https, certificate, _files: files }
    }

    /// From the balancer, with this before everything else.
    fn connect(&self, header: impl AsRef<[u8]>) -> Client {
        self.try_connect(BALANCER, header).unwrap()
    }

    fn try_connect(&self, from: [u8; 4], header: impl AsRef<[u8]>) -> io::Result<Client> {
        let mut client = Client::try_connect_from(from.into(), self.http)?;
        client.try_send(header)?;
        Ok(client)
    }

    /// The same, and TLS behind it.
    fn connect_tls(&self, header: impl AsRef<[u8]>) -> Client {
        let mut client = Client::try_connect_from(BALANCER.into(), self.https).unwrap();
        client.send(header);
        client.encrypted("a.example", &[&self.certificate]).unwrap()
    }

    /// The same with HTTP/2.
    async fn connect_http2(&self, header: &[u8]) -> http2::Client {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((BALANCER, 0).into()).unwrap();
        let mut socket = socket.connect(self.https).await.unwrap();
        socket.write_all(header).await.unwrap();
        let tls = encrypted(socket, &self.certificate).await;
        let mut builder = h2::client::Builder::new();
        builder.initial_connection_window_size(WIDE);
        let (requests, connection) = builder.handshake(tls).await.unwrap();
        http2::Client { requests, connection: tokio::spawn(connection) }
    }

    /// Waits for a line of the access log about this target that begins with this client.
    fn logs(&self, client: &str, target: &str) {
        eventually("the access log names the client", || {
            let log = std::fs::read_to_string(self.tidegate.directory().join("access.log")).ok()?;
            let (begin, asked) = (format!("{client} "), format!(" {target} "));
            log.lines().any(|line| line.starts_with(&begin) && line.contains(&asked)).then_some(())
        });
    }

    fn refused(&self) -> f64 {
        self.tidegate.metric("tidegate_proxy_headers_refused_total")
    }
}

fn origin() -> Origin {
    Origin::start(|request| match request.target.as_str() {
        "/login" => Reply::status(401, "no"),
        _ => Reply::ok("here"),
    })
}

fn v1(client: &str) -> Vec<u8> {
    let (family, own) = if client.contains(':') { ("TCP6", "2001:db8::1") } else { ("TCP4", "198.51.100.1") };
    format!("PROXY {family} {client} {own} 4567 80\r\n").into_bytes()
}

/// With a TLV behind the addresses.
fn v2(client: &str) -> Vec<u8> {
    let octets = |address: &str| match address.parse().unwrap() {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    };
    let (family, own) = if client.contains(':') { (0x21, "2001:db8::1") } else { (0x11, "198.51.100.1") };
    let block = [octets(client), octets(own), vec![17, 215, 0, 80], b"\xea\0\x05\x01vpce".to_vec()].concat();
    v2_of(0x21, family, &block)
}

fn v2_of(command: u8, family: u8, block: &[u8]) -> Vec<u8> {
    [SIGNATURE, &[command, family], &(block.len() as u16).to_be_bytes(), block].concat()
}

/// What clients are named by, and what is made of it.
fn headers() -> [(Vec<u8>, &'static str); 6] {
    [
        (v1("192.0.2.1"), "192.0.2.1"),
        (v2("192.0.2.2"), "192.0.2.2"),
        (v1("2001:db8::3"), "2001:db8::3"),
        (v2("2001:db8::4"), "2001:db8::4"),
        (v1("::ffff:192.0.2.5"), "192.0.2.5"),
        (v2("::ffff:192.0.2.6"), "192.0.2.6"),
    ]
}

/// What a client that sends no header gets at a listener that wants one, or one that goes on after it.
fn ask(client: &mut Client, target: &str) -> io::Result<Response> {
    client.try_send(format!("GET {target} HTTP/1.1\r\nHost: a.example\r\n\r\n"))?;
    client.try_response("GET")
}

#[test]
fn client_that_a_header_names_is_the_client_of_log_and_upstream() {
    let origin = origin();
    let site = Site::start(Tidegate::builder().origin(&origin));
    for (header, name) in headers() {
        for (client, target) in [(site.connect(&header), "/clear"), (site.connect_tls(&header), "/encrypted")]
        {
            let mut client = client;
            // What it writes itself is not believed, and its second request is its own, too.
            for _ in 0..2 {
                let response = client.request("GET", target, "X-Forwarded-For: 203.0.113.9\r\n");
                assert_eq!(response.text(), "here");
                let request = origin.last();
                assert_eq!(request.field("X-Forwarded-For"), name);
                assert!(!request.field("Forwarded").contains("203.0.113.9"), "{request:?}");
            }
            site.logs(name, target);
        }
    }
    assert_eq!(site.refused(), 0.0);
    // The other listener knows nothing of headers.
    assert_eq!(site.tidegate.refusal(&v1("192.0.2.1")).0, 400);
    assert_eq!(site.tidegate.get("/plain").status, 200);
    assert_eq!(origin.last().field("X-Forwarded-For"), "127.0.0.1");
}

#[test]
fn client_that_a_header_names_is_the_client_of_http2() {
    let origin = origin();
    let site = Site::start(Tidegate::builder().origin(&origin));
    run(async {
        for (header, name) in headers() {
            let mut client = site.connect_http2(&header).await;
            assert_eq!(client.get("/two").await.1, b"here");
            assert_eq!(origin.last().field("X-Forwarded-For"), name);
        }
    });
    for (_, name) in headers() {
        site.logs(name, "/two");
    }
}

#[test]
fn connection_of_the_balancer_itself_keeps_its_address() {
    let origin = origin();
    let site = Site::start(Tidegate::builder().origin(&origin));
    let unix = v2_of(0x21, 0x31, &[b'/'; 216]);
    for header in [&b"PROXY UNKNOWN\r\n"[..], &v2_of(0x20, 0, b""), &v2_of(0x20, 0x11, &[1; 12]), &unix] {
        for mut client in [site.connect(header), site.connect_tls(header)] {
            assert_eq!(client.get("/health").status, 200);
            assert_eq!(origin.last().field("X-Forwarded-For"), "127.0.7.7");
        }
    }
    site.logs("127.0.7.7", "/health");
    // Whoever is behind it may say what he likes of himself.
    let asked = origin.count();
    for field in ["X-Forwarded-For: 192.0.2.9", "Forwarded: for=192.0.2.9", "X-Forwarded-Proto: https"] {
        for mut client in [site.connect(b"PROXY UNKNOWN\r\n"), site.connect_tls(b"PROXY UNKNOWN\r\n")] {
            assert_eq!(client.request("GET", "/health", &format!("{field}\r\n")).status, 400, "{field}");
        }
    }
    run(async {
        let mut client = site.connect_http2(b"PROXY UNKNOWN\r\n").await;
        let request = http::Request::get("https://a.example/health").header("x-forwarded-for", "192.0.2.9");
        assert_eq!(client.send(request).await.await.unwrap().status(), 400);
        assert_eq!(client.get("/health").await.0.status(), 200);
    });
    assert_eq!(origin.count(), asked + 1, "no claim has gone on");
}

#[test]
fn sender_that_is_no_trusted_proxy_is_refused() {
    let origin = origin();
    let site = Site::start(Tidegate::builder().origin(&origin));
    for (sent, header) in [v1("192.0.2.1"), v2("192.0.2.1"), Vec::new()].iter().enumerate() {
        // The end of the connection may be there before the request is sent.
        if let Ok(mut client) = site.try_connect([127, 0, 9, 9], header) {
            assert!(ask(&mut client, "/").is_err());
        }
        eventually("the sender is counted", || {
            let refused = site.tidegate.metric("tidegate_proxy_senders_refused_total");
            (refused == sent as f64 + 1.0).then_some(())
        });
    }
    assert_eq!(origin.count(), 0);
    assert!(site.tidegate.output().contains("trusted_proxies alone"), "{}", site.tidegate.output());
}

#[test]
fn what_begins_with_no_valid_header_ends_without_an_answer() {
    let origin = origin();
    let site = Site::start(Tidegate::builder().origin(&origin));
    let request = b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n";
    let endless = [b"PROXY TCP4 ", &[b'1'; 200][..]].concat();
    let wrong = [
        request.to_vec(),
        b"\x16\x03\x01\x02\0".to_vec(),
        b"PROXY TCP4 192.0.2.256 198.51.100.1 4567 80\r\n".to_vec(),
        b"PROXY UDP4 192.0.2.1 198.51.100.1 4567 80\r\n".to_vec(),
        endless,
        v2_of(0x22, 0x11, &[0; 12]),
        v2_of(0x21, 0x41, &[0; 12]),
        v2_of(0x21, 0x11, &[0; 11]),
        v2_of(0x21, 0x11, &[&[0; 12][..], &[4, 0, 2, 0]].concat()),
        // More than is waited for.
        [SIGNATURE, &[0x21, 0x11, 0xff, 0xff]].concat(),
    ];
    let mut counted = 0.0;
    for bytes in &wrong {
        let mut client = site.connect(bytes);
        assert_eq!(client.rest(), b"", "{bytes:?}");
        counted += 1.0;
        assert_eq!(site.refused(), counted, "{bytes:?}");
    }
    for header in [v1("192.0.2.1"), v2("192.0.2.1")] {
        let mut client = site.connect(&header[..header.len() - 1]);
        client.finish();
        assert_eq!(client.rest(), b"", "a header that is cut off");
        counted += 1.0;
        assert_eq!(site.refused(), counted);
    }
    assert_eq!(origin.count(), 0);
    assert_eq!(site.connect(v2("192.0.2.1")).get("/").status, 200);
}

#[test]
fn header_that_comes_byte_by_byte_is_served_and_so_is_what_comes_with_its_last() {
    let origin = origin();
    let site = Site::start(Tidegate::builder().origin(&origin));
    let requests = b"GET /a HTTP/1.1\r\nHost: a.example\r\n\r\nGET /b HTTP/1.1\r\nHost: a.example\r\n\r\n";
    for (header, name) in headers() {
        let (last, first) = header.split_last().unwrap();
        let mut client = site.connect(b"");
        for byte in first {
            client.send([*byte]);
            // Each is likely to find the one before looked at.
            std::thread::sleep(Duration::from_millis(2));
        }
        client.send([&[*last][..], requests].concat());
        assert_eq!([client.response().status, client.response().status], [200, 200]);
        assert_eq!(origin.last().field("X-Forwarded-For"), name);

        let mut client = Client::try_connect_from(BALANCER.into(), site.https).unwrap();
        for half in [first, &[*last]] {
            client.send(half);
            std::thread::sleep(Duration::from_millis(20));
        }
        let mut client = client.encrypted("a.example", &[&site.certificate]).unwrap();
        assert_eq!(client.get("/c").status, 200);
        assert_eq!(origin.last().field("X-Forwarded-For"), name);
    }
}

#[test]
fn header_that_does_not_come_is_not_waited_for_longer_than_a_head() {
    let origin = origin();
    let site = Site::start(Tidegate::builder().origin(&origin).limits("header_timeout = \"1s\""));
    // One that says nothing, too.
    let header = v2("192.0.2.1");
    let mut waiting = [&b""[..], b"PROXY", &header[..20]].map(|part| site.connect(part));
    for client in &mut waiting {
        assert_eq!(client.rest(), b"");
    }
    assert_eq!(site.refused(), 3.0);
    // With a header and no more, it is a client that sends no head.
    let mut client = site.connect(&header);
    let answer = String::from_utf8(client.rest()).unwrap();
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    assert_eq!(site.refused(), 3.0);
}

#[test]
fn connections_without_a_header_are_among_those_that_there_may_be() {
    let origin = origin();
    let site =
        Site::start(Tidegate::builder().origin(&origin).limits("connections = 4\nheader_timeout = \"10m\""));
    // Those that looked whether the server listens are gone.
    eventually("no connection is open", || {
        (site.tidegate.metric("tidegate_connections_open") == 0.0).then_some(())
    });
    let waiting: Vec<Client> = (0..4).map(|_| site.connect(b"PROXY")).collect();
    eventually("there may be no more", || {
        let mut client = site.tidegate.connect();
        ask(&mut client, "/").is_err().then_some(())
    });
    drop(waiting);
    eventually("there may be others again", || {
        let mut client = site.tidegate.connect();
        ask(&mut client, "/").is_ok_and(|response| response.status == 200).then_some(())
    });
}

fn block_list(site: &Site) -> String {
    String::from_utf8(site.tidegate.command(&["block", "list"]).stdout).unwrap()
}

#[test]
fn client_that_abuses_the_site_is_cut_off_and_others_of_its_balancer_are_not() {
    let origin = origin();
    let site = Site::start(Tidegate::builder().origin(&origin));
    let mut other = site.connect(v2("192.0.2.2"));
    assert_eq!(other.get("/").status, 200);
    let mut open = site.connect(v2("192.0.2.1"));
    assert_eq!(open.get("/").status, 200);
    let try_once = || ask(&mut site.connect(v2("192.0.2.1")), "/login");
    let tries = (0..100).take_while(|_| try_once().is_ok_and(|response| response.status == 401)).count();
    assert!((10..50).contains(&tries), "{tries}");
    assert!(ask(&mut open, "/").is_err(), "a connection that was open");
    assert!(ask(&mut site.connect(v1("192.0.2.1")), "/").is_err(), "a new one");
    assert_eq!(other.get("/").status, 200);
    assert_eq!(site.connect(v2("192.0.2.3")).get("/").status, 200);
    eventually("the client is on the list", || block_list(&site).contains("192.0.2.1").then_some(()));
    assert!(!block_list(&site).contains("127.0.7.7"), "{}", block_list(&site));

    assert!(site.tidegate.command(&["block", "remove", "192.0.2.1"]).status.success());
    eventually("the client is let in again", || {
        ask(&mut site.connect(v2("192.0.2.1")), "/")
            .is_ok_and(|response| response.status == 200)
            .then_some(())
    });
}

/// The defence has no part in this.
#[test]
fn client_that_somebody_blocks_is_cut_off_and_others_of_its_balancer_are_not() {
    let origin = origin();
    for defence in ["", "[defence]\nenabled = false"] {
        let site = Site::start(Tidegate::builder().origin(&origin).tables(defence));
        let mut clients = [site.connect(v2("192.0.2.1")), site.connect_tls(v2("192.0.2.1"))];
        let mut others = [site.connect(v2("198.51.100.1")), site.connect_tls(v2("198.51.100.1"))];
        assert!(clients.iter_mut().chain(&mut others).all(|client| client.get("/").status == 200));
        assert!(site.tidegate.command(&["block", "add", "192.0.2.0/24"]).status.success());
        for client in &mut clients {
            // What the list says acts a moment later (a quarter of a second), and is no answer.
            eventually("an open connection is cut off", || ask(client, "/").is_err().then_some(()));
        }
        assert!(ask(&mut site.connect(v1("192.0.2.9")), "/").is_err(), "a new connection");
        assert!(others.iter_mut().all(|client| client.get("/").status == 200));
        assert_eq!(site.connect(v1("198.51.100.2")).get("/").status, 200);
        assert!(site.tidegate.metric("tidegate_connections_policed_total") >= 1.0);
    }
}

#[test]
fn client_of_http2_that_somebody_blocks_is_cut_off_and_others_are_not() {
    let origin = origin();
    // It would cut off whoever asks as often as this.
    let site = Site::start(Tidegate::builder().origin(&origin).tables("[defence]\nenabled = false"));
    run(async {
        let mut client = site.connect_http2(&v2("192.0.2.1")).await;
        let mut other = site.connect_http2(&v2("198.51.100.1")).await;
        assert_eq!(client.get("/").await.0.status(), 200);
        assert_eq!(other.get("/").await.0.status(), 200);
        assert!(site.tidegate.command(&["block", "add", "192.0.2.1"]).status.success());
        loop {
            let Ok(mut requests) = client.requests.clone().ready().await else { break };
            let request = get("/").body(()).unwrap();
            let Ok((response, _)) = requests.send_request(request, true) else { break };
            match response.await {
                Ok(response) => {
                    assert_eq!(response.status(), 200, "no answer says that it is listed");
                    // What is not taken is cancelled, which ends a connection too.
                    if whole(response).await.is_err() {
                        break;
                    }
                }
                Err(_) => break,
            }
        }
        assert_eq!(other.get("/").await.0.status(), 200);
    });
}

/// Debian's haproxy, which passes connections on.
struct Haproxy {
    clear: SocketAddr,
    encrypted: SocketAddr,
    _directory: TempDir,
    _process: Process,
}

impl Haproxy {
    /// In front of the site's listeners, with this keyword for its headers.
    fn start(site: &Site, send: &str) -> Self {
        let [clear, encrypted] = [(); 2].map(|()| SocketAddr::from(([127, 0, 0, 1], free_port())));
        let directory = tempfile::tempdir().unwrap();
        let source = IpAddr::from(BALANCER);
        let line = format!("{send} check-send-proxy source {source}");
        let (http, https) = (site.http, site.https);
        let config = format!(
            "defaults\nmode tcp\ntimeout connect 10s\ntimeout client 1m\ntimeout server 1m\n\
             listen clear\nbind {clear}\noption httpchk GET /health\n\
             server site {http} check inter 100ms {line}\n\
             listen encrypted\nbind {encrypted}\nserver site {https} {line}\n"
        );
        let file = directory.path().join("haproxy.cfg");
        std::fs::write(&file, config).unwrap();
        let log = std::fs::File::create(directory.path().join("output.txt")).unwrap();
        // Debian has it where only root looks.
        let program =
            if Command::new("haproxy").arg("-v").output().is_ok() { "haproxy" } else { "/usr/sbin/haproxy" };
        let child = Command::new(program)
            .args(["-db", "-f"])
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .expect("haproxy is missing: apt-get install haproxy");
        let mut process = Process(child);
        eventually("haproxy listens", || {
            let ended = process.0.try_wait().unwrap();
            let output = || std::fs::read_to_string(directory.path().join("output.txt")).unwrap_or_default();
            assert!(ended.is_none(), "haproxy ended with {ended:?}: {}", output());
            Client::try_connect(encrypted).ok()
        });
        Self { clear, encrypted, _directory: directory, _process: process }
    }
}

#[test]
fn clients_of_a_real_balancer_are_told_apart() {
    for send in ["send-proxy", "send-proxy-v2"] {
        let origin = origin();
        let site = Site::start(Tidegate::builder().origin(&origin));
        let haproxy = Haproxy::start(&site, send);
        eventually("its health checks are served", || {
            let requests = origin.requests();
            requests.iter().any(|request| request.target == "/health").then_some(())
        });
        let asked = |target: &str| {
            origin
                .requests()
                .into_iter()
                .find(|request| request.target == target)
                .unwrap()
                .field("X-Forwarded-For")
        };
        assert_eq!(asked("/health"), "127.0.7.7", "its own requests");
        for client in ["127.0.9.1", "127.0.9.2"] {
            let connect = |address| Client::try_connect_from(client.parse().unwrap(), address).unwrap();
            let (clear, encrypted) = (format!("/clear/{client}"), format!("/encrypted/{client}"));
            assert_eq!(connect(haproxy.clear).get(&clear).status, 200);
            let mut secure = connect(haproxy.encrypted).encrypted("a.example", &[&site.certificate]).unwrap();
            assert_eq!(secure.get(&encrypted).status, 200);
            assert_eq!([asked(&clear), asked(&encrypted)], [client, client]);
            site.logs(client, &clear);
        }
        // From behind it, too, a client that goes too far loses what is its own.
        let from = |client: &str| Client::try_connect_from(client.parse().unwrap(), haproxy.clear);
        let served = |client: &str| from(client).and_then(|mut client| ask(&mut client, "/login"));
        let tries = (0..100).take_while(|_| served("127.0.9.1").is_ok()).count();
        assert!((10..50).contains(&tries), "{tries}");
        assert_eq!(served("127.0.9.2").unwrap().status, 401);
    }
}
