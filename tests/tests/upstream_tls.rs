//! Servers that are spoken to by TLS: everything goes over it, and only those that are known get requests.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::{Command, Stdio};

use tidegate_e2e::{
    Builder, Certificate, DoorManners, Origin, Reply, Tidegate, TlsDoor, content, eventually, free_port,
};

/// Larger than the buffers of both sockets together.
const LARGE: usize = 24 << 20;

/// With a group of these servers, and `tls` in it.
fn before(servers: &[String], tls: &str, lines: &str) -> Builder {
    let lines = format!("{lines}\ntls = {{ {tls} }}");
    Tidegate::builder().group("app", servers, &lines).route("/", "upstream = \"app\"")
}

/// A directory with `ca.crt`, what the door's certificate is signed with, and that certificate.
fn signed(names: &[&str]) -> (tempfile::TempDir, Certificate) {
    let directory = tempfile::tempdir().unwrap();
    let authority = Certificate::authority();
    authority.write(directory.path(), "ca");
    (directory, authority.sign(names))
}

fn authority(directory: &tempfile::TempDir) -> String {
    format!("authority = \"{}\"", directory.path().join("ca.crt").display())
}

fn echo() -> Origin {
    Origin::start(|request| match request.method.as_str() {
        "GET" => Reply::cacheable(content(1, 100_000)),
        _ => Reply::ok(request.body.clone()),
    })
}

#[test]
fn requests_and_responses_of_all_sizes_go_by_tls_on_one_connection() {
    let (directory, certificate) = signed(&["localhost"]);
    let origin = echo();
    let door = TlsDoor::before(&origin, &certificate);
    let tidegate = before(&[door.url("localhost")], &authority(&directory), "").top("workers = 1").start();
    let mut client = tidegate.connect();
    for is_hit in [false, true] {
        let response = client.get("/a");
        assert!(response.body == content(1, 100_000) && response.is_hit() == is_hit, "{response:?}");
    }
    assert_eq!(origin.last().field("X-Forwarded-Proto"), "http", "the client's");
    let upload = content(2, LARGE);
    client.send(format!("PUT /b HTTP/1.1\r\nHost: a\r\nContent-Length: {LARGE}\r\n\r\n"));
    client.send(&upload);
    assert!(client.response().body == upload, "what was uploaded comes back");
    client.send(
        "PUT /c HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
    );
    assert_eq!(client.response().text(), "abcde");
    assert_eq!(door.names(), [Some("localhost".into())], "one connection, and whom it was for");
    let status = tidegate.ask_admin("/status").text();
    assert!(status.contains(&format!("https://{}", door.address())), "{status}");
}

#[test]
fn keys_are_agreed_on_by_the_hybrid_with_servers_that_know_it() {
    let (directory, certificate) = signed(&["localhost"]);
    let (origin, manners) = (echo(), DoorManners { post_quantum: true, ..DoorManners::default() });
    let door = TlsDoor::with(&origin, &certificate, manners);
    let tidegate = before(&[door.url("localhost")], &authority(&directory), "").start();
    assert_eq!(tidegate.connect().get("/a").body, content(1, 100_000));
    assert_eq!(door.refused(), 0);
}

/// An end that nobody has announced may be anybody's on the way (RFC 9112 §9.8).
#[test]
fn response_that_is_cut_off_is_not_taken_for_whole() {
    let (directory, certificate) = signed(&["127.0.0.1"]);
    let head = "HTTP/1.1 200 OK\r\nConnection: close\r\nCache-Control: max-age=60\r\n\r\n";
    let origin = Origin::start(move |_| Reply::RawThenClose(format!("{head}all").into_bytes()));
    for cuts_off in [false, true] {
        let door = TlsDoor::with(&origin, &certificate, DoorManners { cuts_off, ..DoorManners::default() });
        let tidegate = before(&[door.url("127.0.0.1")], &authority(&directory), "").start();
        for _ in 0..2 {
            let mut client = tidegate.connect();
            client.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
            let response = client.try_response("GET");
            match cuts_off {
                false => assert_eq!(response.unwrap().text(), "all"),
                // Where the end is known before anything has gone to the client, that is told so.
                true => {
                    assert!(response.as_ref().map_or(true, |response| response.status == 502), "{response:?}")
                }
            }
        }
        assert_eq!(
            door.names(),
            vec![None; if cuts_off { 2 } else { 1 }],
            "no name, and what is whole is stored"
        );
    }
}

#[test]
fn tunnel_goes_by_tls_in_both_directions() {
    let (directory, certificate) = signed(&["127.0.0.1"]);
    let origin = Origin::start(|_| {
        Reply::script(|stream| {
            stream.write_all(
                b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\nearly",
            )?;
            let mut all = Vec::new();
            // Its end comes by the end of what the client sends.
            stream.read_to_end(&mut all)?;
            all.reverse();
            stream.write_all(&all)
        })
    });
    let door = TlsDoor::before(&origin, &certificate);
    let tidegate = before(&[door.url("127.0.0.1")], &authority(&directory), "").start();
    let mut client = tidegate.connect();
    client.send("GET /chat HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n");
    assert_eq!(client.head().0, 101);
    let sent = content(3, 1 << 20);
    client.send(&sent);
    client.stream().shutdown(std::net::Shutdown::Write).unwrap();
    let mut expected: Vec<u8> = b"early".to_vec();
    expected.extend(sent.iter().rev());
    assert!(client.rest() == expected);
}

#[test]
fn server_that_is_not_known_gets_no_request() {
    let (directory, certificate) = signed(&["app.example"]);
    let (other, _) = signed(&["app.example"]);
    let alone = Certificate::alone(&["elsewhere.example"]);
    alone.write(directory.path(), "alone");
    let origin = Origin::start(|_| Reply::ok("here"));
    let door = TlsDoor::before(&origin, &certificate);
    let own = TlsDoor::before(&origin, &alone);
    let named = format!("authority = \"{}\"", directory.path().join("alone.crt").display());
    for (door, tls, status) in [
        (&door, authority(&directory), 502),
        (&door, authority(&directory) + ", name = \"app.example\"", 200),
        (&door, authority(&directory) + ", name = \"APP.example\"", 200),
        (&door, authority(&other) + ", name = \"app.example\"", 502),
        (&door, "name = \"app.example\"".to_owned(), 502),
        (&door, "verify = false".to_owned(), 200),
        (&own, named.clone(), 200),
        (&own, authority(&directory), 502),
        (&door, named, 502),
    ] {
        let before_it = origin.count();
        let tidegate = before(&[door.url("127.0.0.1")], &tls, "").start();
        assert_eq!(tidegate.get("/").status, status, "{tls}");
        assert_eq!(origin.count() - before_it, usize::from(status == 200), "{tls}");
        let said = tidegate.output().contains("invalid peer certificate");
        assert_eq!(said, status != 200, "{tls}: {}", tidegate.output());
        // Where servers have to be there, the start finds out.
        let mut run = Command::new(Tidegate::binary());
        run.args(["run", "--config"]).arg(tidegate.config()).env("TIDEGATE_LOG", "warn");
        if status != 200 {
            let output = run.output().unwrap();
            let why = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(1), "{why}");
            assert!(why.contains("upstream.servers: upstream app is unreachable"), "{why}");
            assert!(why.contains("invalid peer certificate"), "{why}");
        }
    }
}

#[test]
fn request_goes_to_the_server_that_is_known() {
    let (directory, certificate) = signed(&["127.0.0.1"]);
    let (_, unknown) = signed(&["127.0.0.1"]);
    let origin = Origin::start(|_| Reply::ok("here"));
    let doors = [&unknown, &certificate].map(|certificate| TlsDoor::before(&origin, certificate));
    let servers = doors.each_ref().map(|door| door.url("127.0.0.1"));
    let tidegate = before(
        &servers,
        &authority(&directory),
        "health_check = { path = \"/health\", interval = \"100ms\" }",
    );
    let tidegate = tidegate.start();
    for _ in 0..4 {
        assert_eq!(tidegate.get("/").status, 200);
    }
    assert!(doors[0].names().is_empty() && doors[0].refused() > 0);
    let healthy = |wanted: f64| (tidegate.metric("tidegate_upstream_healthy") == wanted).then_some(());
    eventually("the health check goes by TLS, too", || healthy(1.0));
    eventually("checks come in", || {
        origin.requests().iter().any(|request| request.target == "/health").then_some(())
    });
}

#[test]
fn server_that_asks_who_we_are_is_told() {
    let (directory, certificate) = signed(&["127.0.0.1"]);
    let ours = Certificate::of(&["tidegate.example"]);
    ours.write(directory.path(), "ours");
    let origin = Origin::start(|_| Reply::ok("here"));
    let manners = DoorManners { admits: Some(&ours), ..DoorManners::default() };
    let door = TlsDoor::with(&origin, &certificate, manners);
    let path = directory.path().display();
    let shown = format!("certificate = {{ chain = \"{path}/ours.crt\", key = \"{path}/ours.key\" }}");
    for (tls, status) in [(authority(&directory), 502), (format!("{}, {shown}", authority(&directory)), 200)]
    {
        let tidegate = before(&[door.url("127.0.0.1")], &tls, "").start();
        assert_eq!(tidegate.get("/").status, status, "{tls}");
    }
}

#[test]
fn reload_brings_other_authorities_into_force() {
    let (directory, certificate) = signed(&["127.0.0.1"]);
    let origin = Origin::start(|_| Reply::ok("here"));
    let door = TlsDoor::before(&origin, &certificate);
    let tidegate = before(&[door.url("127.0.0.1")], &authority(&directory), "").start();
    assert_eq!(tidegate.get("/").status, 200);
    let config = std::fs::read_to_string(tidegate.config()).unwrap();
    let (other, _) = signed(&["127.0.0.1"]);
    tidegate.write_config(&config.replace(&authority(&directory), &authority(&other)));
    assert!(tidegate.command(&["reload"]).status.success());
    assert_eq!(tidegate.get("/").status, 502, "kept connections are of a server that was known then");
    // What cannot be read changes nothing, and says where.
    tidegate.write_config(&config.replace("ca.crt", "nothing.crt"));
    let reload = tidegate.command(&["reload"]);
    let why = String::from_utf8_lossy(&reload.stderr).into_owned();
    assert!(
        !reload.status.success() && why.contains("upstream.tls.authority: cannot read a certificate"),
        "{why}"
    );
    tidegate.write_config(&config);
    assert!(tidegate.command(&["reload"]).status.success());
    eventually("the server is in again", || (tidegate.get("/").status == 200).then_some(()));
}

#[test]
fn connection_that_the_server_ends_while_idle_costs_no_request() {
    let (directory, certificate) = signed(&["127.0.0.1"]);
    let origin = Origin::start(|request| Reply::ok(request.target.clone()));
    let door = TlsDoor::before(&origin, &certificate);
    let tidegate = before(&[door.url("127.0.0.1")], &authority(&directory), "").top("workers = 1").start();
    for round in 0..3 {
        let target = format!("/{round}");
        assert_eq!(tidegate.get(&target).text(), target);
        origin.close_connections();
    }
    assert_eq!(tidegate.metric("tidegate_upstream_errors_total"), 0.0);
}

#[test]
fn requests_of_many_clients_share_connections_by_tls() {
    let (directory, certificate) = signed(&["127.0.0.1"]);
    let origin = Origin::start(|request| Reply::ok(request.target.clone()));
    let door = TlsDoor::before(&origin, &certificate);
    let servers = [door.url("127.0.0.1")];
    let lines = "pipeline = 8\npipeline_timeout = \"60s\"";
    let tidegate = before(&servers, &authority(&directory), lines).top("workers = 1").start();
    std::thread::scope(|scope| {
        for client in 0..8 {
            let tidegate = &tidegate;
            scope.spawn(move || {
                let mut connection = tidegate.connect();
                for round in 0..50 {
                    let target = format!("/{client}/{round}");
                    assert_eq!(connection.get(&target).text(), target);
                }
            });
        }
    });
    assert_eq!(origin.count(), 400);
}

/// What a server gives away after the handshake is work without content. As many as come in one flight the library bounds;
/// those that come by and by, the stream does.
#[test]
fn server_that_floods_its_proxy_with_tickets_is_given_up() {
    let (directory, certificate) = signed(&["127.0.0.1"]);
    let origin = Origin::start(|_| Reply::ok("here"));
    for (tickets, status) in [(100, 200), (20_000, 502)] {
        let door = TlsDoor::with(
            &origin,
            &certificate,
            DoorManners { tickets: Some(tickets), ..DoorManners::default() },
        );
        let tidegate = before(&[door.url("127.0.0.1")], &authority(&directory), "").start();
        assert_eq!(tidegate.get("/").status, status, "{tickets}");
        let said = tidegate.output().contains("the connection to the server broke");
        assert_eq!(said, status != 200, "{}", tidegate.output());
    }
}

/// A server that takes connections and says nothing.
#[test]
fn handshake_that_does_not_end_is_given_up_in_time() {
    let address = format!("127.0.0.1:{}", free_port());
    let _listener = TcpListener::bind(&address).unwrap();
    let tidegate =
        before(&[format!("https://{address}")], "verify = false", "connect_timeout = \"200ms\"").start();
    assert_eq!(tidegate.get("/").status, 504);
}

/// A server that sends a byte of a message now and then would keep the start waiting for hours.
#[test]
fn start_does_not_wait_for_a_handshake_that_drips() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            // The header of a record with 16 KiB of a handshake.
            let _ = stream.write_all(&[22, 3, 3, 0x40, 0]);
            while stream.write_all(&[2]).is_ok() {
                std::thread::sleep(std::time::Duration::from_millis(200));
            }
        }
    });
    let upstream = format!("https://{address}");
    let arguments = ["run", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--upstream", &upstream];
    let mut run = Command::new(Tidegate::binary()).args(arguments).stderr(Stdio::piped()).spawn().unwrap();
    let ended = eventually("the start is given up", || run.try_wait().unwrap());
    let why = std::io::read_to_string(run.stderr.take().unwrap()).unwrap();
    assert_eq!(ended.code(), Some(1), "{why}");
    assert!(why.contains("upstream is unreachable") && why.contains("timed out"), "{why}");
}

#[test]
fn files_that_are_wrong_are_named_by_check() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    std::fs::write(path("empty.pem"), "nothing").unwrap();
    let config = path("tidegate.toml");
    let check = |servers: &str, tls: &str| {
        let text = format!(
            "[[listen]]\naddress = \"127.0.0.1:1\"\n[[upstream]]\nname = \"app\"\nservers = [\"{servers}\"]\n\
             tls = {{ {tls} }}\n[[route]]\nupstream = \"app\"\n"
        );
        std::fs::write(&config, text).unwrap();
        let output = Command::new(Tidegate::binary()).arg("check").arg(&config).output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8_lossy(&said).into_owned())
    };
    let empty = format!("authority = \"{}\"", path("empty.pem").display());
    let (code, said) = check("https://127.0.0.1:1", &empty);
    assert!(
        code == Some(1) && said.contains(":6:21: upstream.tls.authority: there is no certificate in"),
        "{said}"
    );
    // The file may be there on the host that it is meant for.
    let (code, said) = check("https://127.0.0.1:1", "authority = \"/nowhere/ca.pem\"");
    assert!(
        code == Some(0) && said.contains("upstream.tls: cannot read a certificate from /nowhere/ca.pem"),
        "{said}"
    );
    let (code, said) = check("https://127.0.0.1:1", "name = \"a b\"");
    assert!(code == Some(1) && said.contains("upstream.tls.name: expected a host or an address"), "{said}");
    let (code, said) = check("127.0.0.1:1", "verify = false");
    assert!(code == Some(0) && said.contains("upstream.tls: none of the servers has `https://`"), "{said}");
}
