//! Upstream servers that listen on sockets of the file system (unix(7)).
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::thread;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
use tidegate_e2e::{Client, Origin, Reply, Tidegate, content, eventually};

/// A socket of the file system that leads to a server by TCP.
fn lead(path: &Path, server: SocketAddr) {
    lead_from(UnixListener::bind(path).unwrap(), server);
}

fn lead_from(listener: UnixListener, server: SocketAddr) {
    thread::spawn(move || {
        while let Ok((client, _)) = listener.accept() {
            let Ok(server) = TcpStream::connect(server) else { continue };
            let (client, server) = (Arc::new(client), Arc::new(server));
            let (to_client, from_server) = (Arc::clone(&client), Arc::clone(&server));
            thread::spawn(move || {
                let _ = io::copy(&mut &*client, &mut &*server);
                let _ = server.shutdown(Shutdown::Write);
            });
            thread::spawn(move || {
                let _ = io::copy(&mut &*from_server, &mut &*to_client);
                let _ = to_client.shutdown(Shutdown::Both);
            });
        }
    });
}

/// Before the server at this path, with these lines in its table.
fn before(path: &Path, lines: &str) -> Tidegate {
    let server = format!("unix:{}", path.display());
    let builder = Tidegate::builder().top("workers = 1").group("app", &[server], lines);
    builder.route("/", "upstream = \"app\"").start()
}

#[test]
fn requests_uploads_and_tunnels_go_by_a_socket_of_the_file_system() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("app.sock");
    let large = content(3, 5 << 20);
    let body = large.clone();
    let origin = Origin::start(move |request| match request.target.as_str() {
        "/cached" => Reply::cacheable("kept"),
        "/large" => Reply::ok(body.clone()).with("Cache-Control", "no-store"),
        "/tunnel" => Reply::script(|stream| {
            stream.write_all(
                b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n",
            )?;
            let mut bytes = [0; 4];
            stream.read_exact(&mut bytes)?;
            stream.write_all(&bytes)
        }),
        _ => Reply::ok(request.body.clone()),
    });
    lead(&path, origin.address());
    let tidegate = before(&path, "");
    assert_eq!(tidegate.get("/cached").text(), "kept");
    assert!(tidegate.get("/cached").is_hit());
    assert!(tidegate.get("/large").body == large);
    let mut client = tidegate.connect();
    client.send(format!("PUT /up HTTP/1.1\r\nHost: a\r\nContent-Length: {}\r\n\r\n", large.len()));
    client.send(&large);
    assert!(client.response().body == large);
    client.send("PUT /up HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n");
    assert_eq!(client.response().text(), "abc");
    // One after the other, on one connection.
    assert_eq!(origin.connections(), 1);
    client.send("GET /tunnel HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n");
    assert_eq!(client.head().0, 101);
    client.send("here");
    assert_eq!(client.read_bytes(4), b"here");
    assert!(client.is_closed());
    let server = format!("server=\"unix:{}\"}} 5\n", path.display());
    let metrics = tidegate.ask_admin("/metrics").text();
    assert!(
        metrics.contains(&format!("tidegate_upstream_requests_total{{group=\"app\",{server}")),
        "{metrics}"
    );
}

#[test]
fn server_that_is_gone_is_a_bad_gateway_until_it_is_back() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("app.sock");
    let origin = Origin::start(|_| Reply::ok("x").with("Cache-Control", "no-store"));
    let tidegate = before(&path, "require = false\nmax_failures = 0");
    assert_eq!(tidegate.get("/").status, 502);
    // A file without a listener, as a server that was killed leaves it.
    drop(UnixListener::bind(&path).unwrap());
    assert_eq!(tidegate.get("/").status, 502);
    std::fs::remove_file(&path).unwrap();
    lead(&path, origin.address());
    assert_eq!(tidegate.get("/").text(), "x");
}

/// Unlike TCP, connect(2) gives up at once when the queue is full.
#[test]
fn full_queue_is_waited_for() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("app.sock");
    let origin = Origin::start(|_| Reply::ok("x").with("Cache-Control", "no-store"));
    let full = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    bind(&full, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    listen(&full, 0).unwrap();
    let _waiting = UnixStream::connect(&path).unwrap();
    let tidegate = before(&path, "");
    let mut client = Client::connect(tidegate.address());
    client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    eventually("the request goes to the server", || {
        let metrics = tidegate.ask_admin("/metrics").text();
        metrics
            .lines()
            .any(|line| line.starts_with("tidegate_upstream_in_progress{") && line.ends_with(" 1"))
            .then_some(())
    });
    lead_from(full.into(), origin.address());
    assert_eq!(client.response().text(), "x");
}

#[test]
fn start_without_the_server_and_paths_that_are_none_are_said() {
    let directory = tempfile::tempdir().unwrap();
    let run = |upstream: &str| {
        let output = std::process::Command::new(Tidegate::binary())
            .args(["run", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--upstream", upstream])
            .output()
            .unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let path = directory.path().join("app.sock");
    let (code, error) = run(&format!("unix:{}", path.display()));
    assert_eq!(code, Some(1));
    assert!(
        error.contains(&format!("the upstream is unreachable (unix:{}: No such file", path.display())),
        "{error}"
    );
    let (code, error) = run("unix:app.sock");
    assert_eq!(code, Some(2));
    assert!(
        error.contains("expected unix:/PATH with a path from the root, not \"unix:app.sock\""),
        "{error}"
    );
    let (code, error) = run(&format!("unix:/{}", "a".repeat(107)));
    assert_eq!(code, Some(2));
    assert!(error.contains("has at most 107 bytes, and") && error.contains("has 108"), "{error}");
}
