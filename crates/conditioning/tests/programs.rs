//! Servers of styles that are not Debian's: libc's streams, and those of languages' own libraries.
#![allow(clippy::unwrap_used)]

mod common;

use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use common::{Chain, Client, Site, compile, free_port, needs, wait_until};

/// With a filter that rewrites: what it wrote is what a server must read, in whichever way it reads.
const CHAIN: &[&str] = &["package", "persist", "normalize", "prior"];

/// A server compiled from a C program, behind a chain.
fn compiled(program: &str, arguments: &[&str]) -> (Chain, Site) {
    let site = Site::new();
    let server = compile(&format!("programs/{program}"), &["-pthread"], &site);
    let port = free_port();
    let port_text = port.to_string();
    let command = [&[server.as_str(), &port_text], arguments].concat();
    (Chain::start(port, CHAIN, &command), site)
}

fn streams(style: &str) -> (Chain, Site) {
    compiled("streams.c", &[style])
}

/// Each thread has an epoll set of its own: while one closes, the others are told of ends that are theirs.
#[test]
fn a_server_with_an_event_loop_in_each_thread() {
    let (chain, _site) = compiled("loops.c", &[]);
    std::thread::scope(|scope| {
        for _ in 0..16 {
            let mut client = chain.client();
            scope.spawn(move || {
                for round in 0..1500 {
                    assert_eq!(client.get("/a").body, b"ok\n", "round {round}");
                }
            });
        }
    });
    let said = chain.errors();
    assert!(said.lines().count() == 1 && said.starts_with("tidegate: listening on "), "{said}");
    chain.stop();
}

/// What was registered was written down only once the call had returned: of a connection that had ended by then it stayed
/// registered, since filters have the socket as well, and the client's next request could not be.
#[test]
fn a_server_that_serves_a_connection_while_another_thread_registers_it() {
    let (site, library, port) = (Site::new(), Site::new(), free_port());
    let server = compile("programs/handsover.c", &["-pthread"], &site);
    let slow = compile("programs/slow_epoll.c", &["-shared", "-fPIC"], &library);
    let mut command = Chain::command(port, CHAIN, &[&server, &port.to_string()]);
    command.env("LD_PRELOAD", slow);
    let chain = Chain::once_it_serves(command, port);
    let mut client = chain.client();
    for round in 0..5 {
        assert_eq!(client.get("/a").body, b"ok\n", "round {round}");
    }
    chain.stop();
}

/// It waited for a lock that the code had which it had interrupted: the server never listened.
#[test]
fn a_server_whose_signal_handler_closes_descriptors() {
    let (chain, _site) = compiled("handler.c", &[]);
    assert_eq!(chain.get("/a").body, b"ok\n");
    chain.stop();
}

/// Its process in the background is no child of the launcher's before the first one has ended.
#[test]
fn a_signal_is_for_the_server_although_its_first_process_is_not_gone() {
    let (chain, _site) = compiled("late.c", &[]);
    assert_eq!(chain.get("/").body, b"hung  0\n");
    chain.signal(libc::SIGHUP);
    wait_until("it was told", || chain.get("/").body == b"hung  1\n");
    chain.stop();
}

/// What comes behind a request is none of the server's business until it has answered: it is not told of it all the
/// time.
fn waits_for_its_turn(way: &str) {
    // A client that ends its side at once is answered like one that does not: its end comes behind its requests.
    for ends in [false, true] {
        let (chain, _site) = compiled("polls.c", &[way]);
        let mut client = chain.client();
        client.send("GET /a HTTP/1.1\r\nHost: test\r\n\r\n".repeat(3).as_bytes());
        if ends {
            client.stream.shutdown(Shutdown::Write).unwrap();
        }
        for round in 0..if ends { 2 } else { 3 } {
            let body = String::from_utf8(client.response(false).body).unwrap();
            let woken: u32 = body.trim().strip_prefix("woken ").unwrap().parse().unwrap();
            assert!(woken < 50, "{way}, ends: {ends}, round {round}: {body}");
        }
        chain.stop();
    }
    let (chain, _site) = compiled("polls.c", &[way]);
    // A client that leaves meanwhile is noticed, and others are served.
    let mut leaving = chain.client();
    leaving.send("GET /a HTTP/1.1\r\nHost: test\r\n\r\n".repeat(2).as_bytes());
    drop(leaving);
    assert!(chain.client().get("/b").body.starts_with(b"woken "));
    chain.stop();
}

#[test]
fn a_server_that_polls_is_not_told_of_the_next_request_before_its_turn() {
    ["poll", "ppoll"].into_iter().for_each(waits_for_its_turn);
}

#[test]
fn a_server_that_waits_for_events_is_not_told_of_the_next_request_before_its_turn() {
    waits_for_its_turn("epoll");
}

#[test]
fn a_server_that_selects_is_not_told_of_the_next_request_before_its_turn() {
    ["select", "pselect"].into_iter().for_each(waits_for_its_turn);
}

/// libuv, and so uvloop and Node, registers with epoll by an io_uring where there is one: the library never saw that,
/// and the server was told of a connection's end for ever, or aborted. Without one it does so by epoll_ctl(2).
#[test]
fn a_server_that_would_register_by_an_io_uring_does_without() {
    let (chain, _site) = compiled("rings.c", &[]);
    let mut client = chain.client();
    for _ in 0..5 {
        assert_eq!(String::from_utf8(client.get("/a").body).unwrap(), "no ring, calls\n");
        assert_eq!(chain.get("/a").status, 200);
    }
    chain.stop();
}

/// What a filter rewrote and what is on the socket are one request.
#[test]
fn a_server_that_waits_for_all_of_a_request_gets_all_of_it() {
    for way in ["recv", "recvfrom", "recvmsg"] {
        let (chain, _site) = compiled("waitall.c", &[way]);
        let mut client = chain.client();
        for length in [0, 10, 100_000] {
            let content: Vec<u8> = (0..length).map(|at| b'a' + (at % 23) as u8).collect();
            let head = format!("POST //a/../b HTTP/1.1\r\nHost: test\r\nContent-Length: {length}\r\n\r\n");
            client.send(&[head.as_bytes(), &content].concat());
            let response = client.response(false);
            assert_eq!(response.status, 200, "{way}: {}", response.head);
            assert!(response.body == content, "{way}, {length}");
        }
        chain.stop();
    }
}

/// A signal ends the wait (recv(2)): the server has a reason to look at something else.
#[test]
fn a_server_that_is_interrupted_while_it_waits_for_all_of_a_request_gets_what_there_is() {
    let (chain, _site) = compiled("waitall.c", &["interrupted"]);
    let mut client = chain.client();
    let head = "POST /a HTTP/1.1\r\nHost: test\r\nContent-Length: 100000\r\n\r\n";
    // As much as the filters wait for, and no more.
    client.send(&[head.as_bytes(), &[b'x'; 20_000]].concat());
    let response = client.response(false);
    let length = head.len() + common::TOLD;
    let (got, all) = (length + 20_000, length + 100_000);
    assert!(response.head.starts_with(&format!("HTTP/1.1 500 {got} of {all}\r\n")), "{}", response.head);
    chain.stop();
}

/// Languages' buffered readers ask what there is to read (Java's `available`).
#[test]
fn a_server_that_asks_how_much_there_is_to_read_hears_of_its_own_request_only() {
    let (chain, _site) = compiled("available.c", &[]);
    let mut client = chain.client();
    client.send("GET //a/../b HTTP/1.1\r\nHost: test\r\n\r\n".repeat(3).as_bytes());
    for _ in 0..3 {
        assert_eq!(client.response(false).body, b"ok\n");
    }
    chain.stop();
}

/// A child that was forked while another thread closed a descriptor waited for ever when it closed one itself.
#[test]
fn a_server_that_forks_while_its_threads_close_descriptors() {
    let (chain, _site) = compiled("forks.c", &[]);
    let mut client = chain.client();
    for round in 0..1000 {
        assert_eq!(client.get("/a").body, b"ok\n", "round {round}");
    }
    chain.stop();
}

/// A server that reads by a stream has what a filter rewrote, and reads no further than the request.
fn reads_and_writes_by_streams(style: &str) {
    let (chain, _site) = streams(style);
    let mut client = chain.client();
    for round in 0..5 {
        assert_eq!(client.get("//a/../b").body, b"GET /b 0\n", "round {round}");
        client.send(b"POST /c HTTP/1.1\r\nHost: test\r\nContent-Length: 100000\r\n\r\n");
        client.send(&[b'x'; 100_000]);
        assert_eq!(client.response(false).body, b"POST /c 100000\n");
    }
    client.send("GET //d HTTP/1.1\r\nHost: test\r\n\r\n".repeat(3).as_bytes());
    for _ in 0..3 {
        assert_eq!(client.response(false).body, b"GET /d 0\n");
    }
    chain.stop();
}

#[test]
fn a_server_with_one_stream_for_both_directions() {
    reads_and_writes_by_streams("one");
}

#[test]
fn a_server_with_a_stream_for_each_direction() {
    reads_and_writes_by_streams("two");
}

#[test]
fn a_server_that_reads_its_descriptor_and_writes_by_a_stream() {
    let (chain, _site) = streams("write");
    let mut client = chain.client();
    for _ in 0..5 {
        assert_eq!(client.get("//a").body, b"GET /a 0\n");
    }
    chain.stop();
}

/// What dprintf writes is seen by nobody: the server is not left waiting for a request that the filters have, and the
/// connection ends.
#[test]
fn a_server_that_writes_by_calls_that_nobody_sees() {
    let (chain, _site) = streams("dprintf");
    for _ in 0..5 {
        let mut client = chain.client();
        assert_eq!(client.get("//a").body, b"GET /a 0\n");
        assert!(client.is_ended());
    }
    chain.stop();
}

/// The end of what nobody sees is known all the same, where the head says how long it is: the client's next request does not
/// wait for the server to give up this connection. While the server works, its client has not left.
fn waits_for_events_and_writes_unseen(way: &str, paths: &[&str]) {
    let (chain, _site) = compiled("unseen.c", &[way]);
    let mut client = chain.client();
    for path in paths {
        for round in 0..3 {
            assert_eq!(client.get(path).body, b"first\nthere\n", "{way}, {path}, round {round}");
        }
        client.send(format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n").repeat(3).as_bytes());
        for round in 0..3 {
            assert_eq!(
                client.response(false).body,
                b"first\nthere\n",
                "{way}, {path} at once, round {round}"
            );
        }
    }
    chain.stop();
}

#[test]
fn a_server_that_waits_for_events_and_writes_by_calls_that_nobody_sees() {
    for way in ["level", "edge", "poll"] {
        waits_for_events_and_writes_unseen(way, &["/a", "/slow"]);
    }
}

#[test]
fn a_server_that_writes_whole_responses_by_splice() {
    waits_for_events_and_writes_unseen("splice", &["/a"]);
}

/// As some do for which libc had no accept4 once: such a server was refused its clients.
#[test]
fn a_server_that_accepts_by_syscall() {
    let (chain, _site) = compiled("asks_itself.c", &[]);
    let mut client = chain.client();
    for round in 0..5 {
        assert_eq!(client.get("//a").body, b"ok\n", "round {round}");
    }
    client.send("GET /a HTTP/1.1\r\nHost: test\r\n\r\n".repeat(3).as_bytes());
    for round in 0..3 {
        assert_eq!(client.response(false).body, b"ok\n", "at once, round {round}");
    }
    chain.stop();
}

/// accept(2) is a point of cancellation (pthreads(7)): who joined the thread waited for the next client.
#[test]
fn a_server_that_cancels_a_thread_that_waits_for_clients() {
    let (site, port) = (Site::new(), free_port());
    let server = compile("programs/cancels.c", &["-pthread"], &site);
    // No client comes before.
    let chain = Chain::once_it_listens(Chain::command(port, CHAIN, &[&server, &port.to_string()]), port);
    wait_until("the thread has ended", || chain.errors().contains("it was cancelled"));
    assert_eq!(chain.get("/").body, b"ok\n");
    chain.stop();
}

/// What a connection has from the listening socket, as far as the kernel says so of a server without a chain.
#[test]
fn connections_have_the_options_that_were_set_on_the_listening_socket() {
    let (site, port) = (Site::new(), free_port());
    let server = compile("programs/inherits.c", &[], &site);
    let ask = |address: std::net::SocketAddr| {
        let mut said = String::new();
        wait_until("it answers", || {
            let Ok(mut client) = Client::try_connect(address) else { return false };
            said = String::from_utf8(client.get("/").body).unwrap();
            true
        });
        said
    };
    let mut bare = std::process::Command::new(&server).arg(port.to_string()).spawn().unwrap();
    let expected = ask(([127, 0, 0, 1], port).into());
    bare.kill().unwrap();
    bare.wait().unwrap();
    let port = free_port();
    let chain = Chain::start(port, CHAIN, &[&server, &port.to_string()]);
    assert!(expected.contains("connection keepalive: 1\n") && expected.contains("connection ttl: 33\n"));
    assert_eq!(ask(chain.address), expected);
    // So do those that its client brings later.
    let mut client = chain.client();
    for _ in 0..3 {
        assert_eq!(String::from_utf8(client.get("/").body).unwrap(), expected);
    }
    chain.stop();
}

#[test]
fn a_process_that_ends_with_its_response_in_the_buffer_of_its_standard_output() {
    let (chain, _site) = streams("standard");
    for _ in 0..5 {
        let mut client = chain.client();
        assert_eq!(client.get("/a").body, b"GET /a 0\n");
        assert!(client.is_ended());
    }
    chain.stop();
}

/// A number that was closed by the program's own system call is not taken for the connection that it was.
#[test]
fn a_server_that_closes_in_a_way_that_nobody_sees_reads_its_files() {
    let ways = [("0", "unseen"), ("3", "unseen"), ("100", "range"), ("100", "dup2"), ("100", "child")];
    for (seen, way) in ways {
        let (site, port) = (Site::new(), free_port());
        let server = compile("programs/closes.c", &[], &site);
        // What is asked for by HTTP/1.0 would end with the server's close, which nobody sees.
        let chain = Chain::once_it_listens(
            Chain::command(port, CHAIN, &[&server, &port.to_string(), seen, way]),
            port,
        );
        let mut client = chain.client();
        for round in 0..200 {
            let expected = if round == 0 { &b"nothing yet"[..] } else { b"server\n" };
            assert_eq!(client.get("/").body, expected, "{seen} seen, then {way}, round {round}");
        }
        chain.stop();
    }
}

/// Wrappers such as `env -i`, and systemd-socket-activate(1), start servers with an environment of their own.
fn is_started_with_another_environment(way: &str) {
    let (chain, _site) = compiled("starts.c", &[way]);
    let mut client = chain.client();
    for _ in 0..3 {
        // Programs that the server starts for its own purposes have the environment that they are given.
        assert_eq!(String::from_utf8(client.get("/a").body).unwrap(), "A=b\n", "{way}");
    }
    chain.stop();
}

#[test]
fn a_server_that_is_started_with_another_environment() {
    let ways = ["execve", "null", "other", "execvpe", "fexecve", "execveat", "execv", "execvp", "vfork"];
    ways.into_iter().chain(["posix_spawn", "posix_spawnp"]).for_each(is_started_with_another_environment);
}

#[test]
fn a_server_that_is_handed_its_socket_by_a_program_that_listened() {
    is_started_with_another_environment("socket");
}

/// There is no room to complete it in: the server finds its port taken, as it did before.
#[test]
fn a_server_that_is_started_with_an_environment_beyond_the_bounds() {
    for way in ["many", "long"] {
        let (site, port) = (Site::new(), free_port());
        let server = compile("programs/starts.c", &["-pthread"], &site);
        let mut command = Chain::command(port, CHAIN, &[&server, &port.to_string(), way]);
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("Address already in use"), "{way}: {said}");
        assert_eq!(output.status.code(), Some(3), "{way}: {said}");
    }
}

/// `Expect: 100-continue`: the server's word to go on reaches the client before the content has to.
fn awaits_leave_to_send(client: &mut Client) {
    client
        .send(b"POST /echo HTTP/1.1\r\nHost: test\r\nContent-Length: 200000\r\nExpect: 100-continue\r\n\r\n");
    assert_eq!(client.response(false).status, 100);
    client.send(&[b'x'; 200_000]);
    assert_eq!(client.response(false).body, b"POST 200000\n");
}

fn serves_everything(chain: &Chain) {
    let mut client = chain.client();
    for _ in 0..5 {
        assert_eq!(client.get("/").body, b"GET 0\n");
        awaits_leave_to_send(&mut client);
    }
    client.send(b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: 8000000\r\n\r\n");
    client.send(&vec![b'x'; 8_000_000]);
    assert_eq!(client.response(false).body, b"POST 8000000\n");
    client.send(b"GET / HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n");
    assert_eq!(client.response(false).body, b"GET 0\n");
    assert!(client.is_ended());
}

const PYTHON: &str = "
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def do_GET(self):
        length = int(self.headers.get('Content-Length') or 0)
        body = b'%s %d\\n' % (self.command.encode(), len(self.rfile.read(length)))
        self.send_response(200)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_POST = do_GET
http.server.ThreadingHTTPServer(('127.0.0.1', PORT), Handler).serve_forever()
";

#[test]
fn pythons_own_server() {
    needs("python3", "python3");
    let (site, port) = (Site::new(), free_port());
    let server = site.configuration("server.py", port, PYTHON);
    let chain = Chain::start(port, CHAIN, &["python3", &server]);
    serves_everything(&chain);
    chain.stop();
}

/// Content longer than what filters wait for, and than a datagram of theirs, is under way when a filter dies.
#[test]
fn no_upload_notices_the_death_of_a_filter_beyond_the_first() {
    needs("python3", "python3");
    let (site, port) = (Site::new(), free_port());
    let server = site.configuration("server.py", port, PYTHON);
    let chain = Chain::start(port, CHAIN, &["python3", &server]);
    let (stop, answers) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for length in [10_000, 100_000, 2_000_000] {
            let mut client = chain.client();
            let (stop, answers, content) = (&stop, &answers, &site.big[..length]);
            let head = format!("POST / HTTP/1.1\r\nHost: test\r\nContent-Length: {length}\r\n\r\n");
            // `package` alone has a connection until its first request was handed on.
            assert_eq!(client.get("/").body, b"GET 0\n");
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    client.send(head.as_bytes());
                    content.chunks(50_000).for_each(|part| client.send(part));
                    assert_eq!(client.response(false).body, format!("POST {length}\n").as_bytes());
                    answers.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for filter in ["cc-persist", "cc-normalize", "cc-prior"].repeat(3) {
            let process = chain.process(filter);
            // SAFETY: a signal to a process that this test started.
            unsafe { libc::kill(process, libc::SIGKILL) };
            let before = answers.load(Ordering::Relaxed);
            wait_until("uploads are answered", || answers.load(Ordering::Relaxed) >= before + 6);
            wait_until("the filter is back", || {
                chain.processes(filter).first().is_some_and(|now| *now != process)
            });
        }
        stop.store(true, Ordering::Relaxed);
    });
    chain.stop();
}

/// Speaks another protocol after the upgrade: what comes goes back.
const UPGRADES: &str = "
import socket, threading
def serve(client):
    with client:
        stream = client.makefile('rb')
        while stream.readline().strip():
            pass
        client.sendall(b'HTTP/1.1 101 Switching Protocols\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\n\\r\\n')
        while (data := client.recv(65536)):
            client.sendall(data)
listener = socket.create_server(('127.0.0.1', PORT))
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
";

#[test]
fn a_connection_that_is_upgraded_is_the_servers() {
    needs("python3", "python3");
    let (site, port) = (Site::new(), free_port());
    let server = site.configuration("server.py", port, UPGRADES);
    let chain = Chain::start(port, CHAIN, &["python3", &server]);
    let mut client = chain.client();
    let fields = "Host: test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
                  Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
    client.send(format!("GET / HTTP/1.1\r\n{fields}\r\n").as_bytes());
    assert_eq!(client.response(true).status, 101);
    for message in [&b"\x81\x05hello"[..], b"GET / HTTP/1.1\r\nHost: test\r\n\r\n", b"\0\xff"] {
        client.send(message);
        let mut echo = vec![0; message.len()];
        std::io::Read::read_exact(&mut client.stream, &mut echo).unwrap();
        assert_eq!(echo, message);
    }
    client.stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(client.is_ended());
    chain.stop();
}
