//! Servers that make their system calls themselves: the launcher answers some of them (seccomp user notification).
#![allow(clippy::unwrap_used)]

mod common;

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Chain, Site, compile, exercise, free_port, needs, strs};

const CHAIN: &[&str] = &["package", "persist", "normalize", "prior"];

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/static").join(name)
}

fn go() -> PathBuf {
    let usual = PathBuf::from("/usr/local/go/bin/go");
    if usual.is_file() {
        return usual;
    }
    needs("go", "golang-go");
    "go".into()
}

/// `main.go`, and what it is started with.
fn in_go(port: u16) -> ([String; 3], Site) {
    let site = Site::new();
    let server = site.path().join("server");
    let mut build = Command::new(go());
    build.args(["build", "-o"]).arg(&server).arg(source("main.go"));
    // What was compiled of Go's own library is kept for the next run.
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("go-cache");
    build.envs([("CGO_ENABLED", "0"), ("GO111MODULE", "off"), ("GOFLAGS", "")]).env("GOCACHE", cache);
    assert!(build.env("HOME", site.path()).status().unwrap().success());
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    ([text(&server), format!(":{port}"), text(&site.path().join("html"))], site)
}

#[test]
fn a_server_in_go() {
    let port = free_port();
    let (command, site) = in_go(port);
    let chain = Chain::start(port, CHAIN, &strs(&command));
    let mut client = chain.client();
    let address = client.stream.local_addr().unwrap();
    assert_eq!(String::from_utf8(client.get("/peer").body).unwrap(), address.to_string());
    exercise(&chain, &site);
    chain.stop();
}

/// It ended when accept gave it a connection without an address, as it did of a launcher that was out of descriptors.
/// Go takes all that the administrator allows, and so must the launcher; the server begins with what the launcher began
/// with.
#[test]
fn a_server_in_go_gets_more_connections_than_the_launcher_was_started_with_room_for() {
    const SOFT: u64 = 64;
    let port = free_port();
    let (command, _site) = in_go(port);
    let mut launcher = Chain::command(port, CHAIN, &strs(&command));
    // SAFETY: setrlimit is async-signal-safe.
    unsafe {
        launcher.pre_exec(|| {
            let mut files = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut files);
            files.rlim_cur = SOFT;
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const files);
            Ok(())
        });
    }
    let chain = Chain::once_it_serves(launcher, port);
    let mut clients: Vec<_> = (0..2 * SOFT).map(|_| chain.client()).collect();
    clients.iter_mut().for_each(|client| client.send(b"GET /cgi/slow HTTP/1.1\r\nHost: test\r\n\r\n"));
    for client in &mut clients {
        assert_eq!(client.response(false).body, b"done\n");
    }
    chain.stop();
}

/// `blocking.c` behind a chain.
fn blocking(arguments: &[&str]) -> (Chain, Site) {
    let site = Site::new();
    let server = compile("static/blocking.c", &["-static"], &site);
    let port = free_port();
    let port_text = port.to_string();
    let command = [&[server.as_str(), &port_text], arguments].concat();
    (Chain::start(port, CHAIN, &command), site)
}

#[test]
fn a_server_that_waits_in_accept() {
    let (chain, _site) = blocking(&[]);
    let mut client = chain.client();
    for _ in 0..20 {
        let response = client.get("/");
        assert_eq!(response.body, b"127.0.0.1");
        assert_ne!(response.field("connection").as_deref(), Some("close"));
    }
    chain.stop();
}

/// An accept that a signal interrupts begins anew: the connection that it was to have is the next one's.
#[test]
fn a_server_whose_calls_are_interrupted_loses_no_connection() {
    let (chain, _site) = blocking(&["signals"]);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            let mut client = chain.client();
            scope.spawn(move || {
                for round in 0..150 {
                    assert_eq!(client.get("/").body, b"127.0.0.1", "round {round}");
                }
            });
        }
    });
    chain.stop();
}

/// Options of TCP failed on what the server has in the place of a client's socket.
#[test]
fn a_server_for_which_a_failing_option_is_fatal() {
    let site = Site::new();
    let server = compile("static/options.c", &["-static"], &site);
    let port = free_port();
    let chain = Chain::start(port, CHAIN, &[&server, &port.to_string()]);
    let mut client = chain.client();
    for round in 0..5 {
        assert_eq!(String::from_utf8(client.get("/").body).unwrap(), "ok\n", "round {round}");
    }
    assert_eq!(chain.get("/").body, b"ok\n");
    chain.stop();
}

const ASYNCIO: &str = "
import asyncio
async def serve(reader, writer):
    while head := await reader.readuntil(b'\\r\\n\\r\\n'):
        assert writer.get_extra_info('peername')[0] == '127.0.0.1'
        writer.write(b'HTTP/1.1 200 OK\\r\\nContent-Length: 3\\r\\n\\r\\nok\\n')
        await writer.drain()
async def main():
    async with await asyncio.start_server(serve, '127.0.0.1', PORT) as server:
        await server.serve_forever()
asyncio.run(main())
";

/// As servers of asyncio are started that no preload library reaches. Each set TCP_NODELAY, failed, and never closed.
#[test]
fn a_server_with_an_event_loop_of_pythons() {
    needs("python3", "python3");
    let (site, port) = (Site::new(), free_port());
    let server = site.configuration("server.py", port, ASYNCIO);
    let addresses = [format!("127.0.0.1:{port}")];
    let command = Chain::with_options(&["--via", "seccomp"], &addresses, CHAIN, &["python3", &server]);
    let chain = Chain::once_it_serves(command, port);
    let mut client = chain.client();
    for _ in 0..20 {
        assert_eq!(client.get("/").body, b"ok\n");
    }
    chain.stop();
}

const EARLY: &str = "
import socket
listener = socket.create_server(('127.0.0.1', PORT))
before = 0
while True:
    client, _ = listener.accept()
    got = b''
    while b'\\r\\n\\r\\n' not in got:
        got += client.recv(65536)
    body = str(before).encode()
    close = b'Connection: close\\r\\n' if b'/closes' in got else b''
    client.sendall(b'HTTP/1.1 200 OK\\r\\n%sContent-Length: %d\\r\\n\\r\\n%s' % (close, len(body), body))
    before = len(got) - got.index(b'\\r\\n\\r\\n') - 4
    while more := client.recv(65536):
        before += len(more)
    client.close()
";

/// Servers answer what they refuse before all of it has come, and read on. The connection stayed with such a server,
/// which waited for its end, and the next request with the filters. One that does not say that it reads no further
/// request gets nothing of what it might take for one.
#[test]
fn a_server_that_answers_before_it_has_the_whole_request() {
    needs("python3", "python3");
    let (site, port) = (Site::new(), free_port());
    let server = site.configuration("server.py", port, EARLY);
    let addresses = [format!("127.0.0.1:{port}")];
    let command = Chain::with_options(&["--via", "seccomp"], &addresses, CHAIN, &["python3", &server]);
    let chain = Chain::once_it_serves(command, port);
    const LENGTHS: [usize; 3] = [20_000, 300_000, 2_000_000];
    let mut client = chain.client();
    for (path, length) in
        ["/closes", "/goes-on"].into_iter().flat_map(|path| LENGTHS.map(|length| (path, length)))
    {
        client.send(
            format!("POST {path} HTTP/1.1\r\nHost: test\r\nContent-Length: {length}\r\n\r\n").as_bytes(),
        );
        client.send(&vec![b'x'; length - 3500]);
        assert_eq!(client.response(false).status, 200, "{length}");
        client.send(&[b'x'; 3500]);
        if path == "/closes" {
            client = chain.client();
        }
        let read: usize = String::from_utf8(client.get("/").body).unwrap().parse().unwrap();
        assert!(
            if path == "/closes" { read == length } else { read <= length - 3500 },
            "{path} {length} {read}"
        );
    }
    chain.stop();
}

/// The next client's address was written to where an accept had wanted it that was over by then.
#[test]
fn a_server_whose_accept_was_interrupted_has_its_memory_to_itself() {
    let site = Site::new();
    let server = compile("static/interrupted.c", &["-static"], &site);
    let port = free_port();
    let chain = Chain::start(port, CHAIN, &[&server, &port.to_string()]);
    common::wait_until("accept was interrupted", || chain.errors().contains("interrupted\n"));
    assert_eq!(chain.get("/").body, b"ok\n");
    assert!(!chain.errors().contains("overwritten"), "{}", chain.errors());
    chain.stop();
}

/// The preload library is of another C library, and could not be loaded: the server ended before it began.
#[test]
fn a_server_that_is_linked_dynamically_with_another_c_library() {
    needs("musl-gcc", "musl-tools");
    let (site, port) = (Site::new(), free_port());
    let server = site.path().join("server");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/asks_itself.c");
    let built = Command::new("musl-gcc").args(["-O1", "-o"]).arg(&server).arg(source).status().unwrap();
    assert!(built.success());
    let chain = Chain::start(port, CHAIN, &[server.to_str().unwrap(), &port.to_string()]);
    let mut client = chain.client();
    for round in 0..5 {
        assert_eq!(client.get("//a").body, b"ok\n", "round {round}");
    }
    chain.stop();
}
