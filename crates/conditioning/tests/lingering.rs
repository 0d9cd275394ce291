//! Servers that keep connections for their clients' next requests (`--linger`).
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use common::{Chain, Client, Site, exercise, free_port, needs, strs, wait_until};

const CHAIN: &[&str] = &["package", "persist"];
/// With filters whose work the server does as it reads by itself.
const WHOLE_CHAIN: &[&str] = &["package", "persist", "normalize", "prior"];
/// Longer than any test: only what a test does ends a stay.
const LONG: &str = "600000";

fn start(filters: &[&str], linger_ms: &str, port: u16, command: &[String]) -> Chain {
    let addresses = [format!("127.0.0.1:{port}")];
    let command = Chain::with_options(&["--linger", linger_ms], &addresses, filters, &strs(command));
    Chain::once_it_serves(command, port)
}

fn nginx(site: &Site, filters: &[&str], linger_ms: &str) -> Chain {
    let port = free_port();
    start(filters, linger_ms, port, &site.nginx(port))
}

/// Ends of connections that nginx has seen: a client that is served without a chain's help ends once.
fn ends(site: &Site) -> usize {
    let log = std::fs::read_to_string(site.path().join("error.log")).unwrap();
    log.matches("closed keepalive connection").count()
}

#[test]
fn a_server_reads_the_next_requests_of_a_connection_itself() {
    for filters in [CHAIN, &["package"], WHOLE_CHAIN] {
        let site = Site::new();
        let chain = nginx(&site, filters, LONG);
        let mut client = chain.client();
        let mut requests = 0;
        // Where the filters are woken before the server has written down that its response is complete, the request is
        // theirs.
        wait_until("nginx has read 100 requests on connections that it had", || {
            assert_eq!(client.get("/small").body, b"small\n");
            assert!(client.get("/big").body == site.big);
            client.send(b"HEAD /big HTTP/1.1\r\nHost: test\r\n\r\n");
            assert_eq!(client.response(true).field("content-length").unwrap(), "3000000");
            requests += 3;
            requests >= ends(&site) + 100
        });
        chain.stop();
    }
}

#[test]
fn what_is_no_whole_small_request_goes_by_the_filters() {
    let site = Site::new();
    let chain = nginx(&site, &["package=timeout=300ms", "persist=timeout=300ms"], LONG);
    let one = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n");
    let mut client = chain.client();
    for _ in 0..5 {
        assert_eq!(client.get("/small").body, b"small\n");
        // Pipelined.
        client.send(["/small", "/big", "/missing", "/index.html"].map(one).concat().as_bytes());
        assert_eq!(client.response(false).body, b"small\n");
        assert!(client.response(false).body == site.big);
        assert_eq!(client.response(false).status, 404);
        assert_eq!(client.response(false).body, b"index\n");
        // Dripping.
        for byte in one("/small").as_bytes() {
            client.send(&[*byte]);
        }
        assert_eq!(client.response(false).body, b"small\n");
        // Long.
        let field = "x".repeat(6000);
        client.send(format!("GET /small HTTP/1.1\r\nHost: test\r\nX-Long: {field}\r\n\r\n").as_bytes());
        assert_eq!(client.response(false).body, b"small\n");
        client.send(b"POST /upload HTTP/1.1\r\nHost: test\r\nContent-Length: 16000\r\n\r\n");
        client.send(&site.big[..16_000]);
        assert_eq!(client.response(false).body, b"16000");
    }
    // Incomplete: it ends after the filters' time, and the server does not see it.
    assert_eq!(client.get("/small").body, b"small\n");
    client.send(b"GET /never HTTP/1.1\r\nHost:");
    assert!(client.is_ended());
    // Malformed.
    let mut client = chain.client();
    assert_eq!(client.get("/small").body, b"small\n");
    client.send(b"GET / HTTP/1.1\r\nBad Field: x\r\n\r\n");
    assert_eq!(client.response(false).status, 400);
    let log = std::fs::read_to_string(site.path().join("access.log")).unwrap();
    assert!(!log.contains("never") && !log.contains(" 400 "), "{log}");
    chain.stop();
}

#[test]
fn connections_end_as_client_or_server_say() {
    let site = Site::new();
    let chain = nginx(&site, CHAIN, LONG);
    for _ in 0..20 {
        let mut client = chain.client();
        assert_eq!(client.get("/small").body, b"small\n");
        client.send(b"GET /small HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n");
        assert_eq!(client.response(false).body, b"small\n");
        assert!(client.is_ended());
        let mut client = chain.client();
        assert_eq!(client.get("/small").body, b"small\n");
        client.send(b"GET /small HTTP/1.0\r\n\r\n");
        assert_eq!(client.response(false).body, b"small\n");
        assert!(client.is_ended());
    }
    for _ in 0..20 {
        let mut client = chain.client();
        for _ in 0..3 {
            assert_eq!(client.get("/small").body, b"small\n");
        }
    }
    wait_until("the filters have let go of clients that left", || {
        CHAIN.iter().all(|filter| chain.counted(filter, "connections") == 0)
    });
    chain.stop();
}

/// Two workers with 64 connections each: connections that linger must make room.
#[test]
fn idle_clients_do_not_keep_others_out() {
    let site = Site::new();
    let chain = nginx(&site, CHAIN, "100");
    let mut clients: Vec<Client> = (0..300).map(|_| chain.client()).collect();
    for _ in 0..3 {
        for client in &mut clients {
            assert_eq!(client.get("/small").body, b"small\n");
        }
    }
    chain.stop();
}

/// What a server does not end by itself, the filters do: it sleeps, and its clients come back later.
#[test]
fn a_stay_ends_with_its_time() {
    let site = Site::new();
    let chain = nginx(&site, CHAIN, "50");
    let mut client = chain.client();
    for _ in 0..4 {
        assert_eq!(client.get("/small").body, b"small\n");
        // Longer than the stay, and than the filters wait for the server.
        std::thread::sleep(std::time::Duration::from_millis(1200));
    }
    assert_eq!(client.get("/small").body, b"small\n");
    chain.stop();
}

#[test]
fn a_server_that_forks_for_a_program_while_others_linger() {
    needs("lighttpd", "lighttpd");
    let (site, port) = (Site::with_cgi(), free_port());
    let file = site.configuration("lighttpd.conf", port, common::LIGHTTPD);
    let chain = start(CHAIN, LONG, port, &["lighttpd", "-D", "-f", &file].map(str::to_owned));
    exercise(&chain, &site);
    chain.stop();
}

#[test]
fn no_client_notices_a_filter_that_dies() {
    // `package` last: what it had handed on lives in `persist` alone afterwards.
    dies(CHAIN, &["cc-persist", "cc-persist", "cc-persist", "cc-package"]);
    dies(WHOLE_CHAIN, &["cc-prior", "cc-normalize", "cc-persist", "cc-prior", "cc-normalize", "cc-package"]);
}

fn dies(filters: &[&str], killed: &[&str]) {
    let site = Site::new();
    let chain = nginx(&site, filters, LONG);
    let (stop, answers) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let mut client = chain.client();
            assert_eq!(client.get("/small").body, b"small\n");
            let (stop, answers) = (&stop, &answers);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    assert_eq!(client.get("/small").body, b"small\n");
                    answers.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let more = |count: u64| {
            let from = answers.load(Ordering::Relaxed);
            wait_until("clients are answered", || answers.load(Ordering::Relaxed) >= from + count);
        };
        for filter in killed {
            more(200);
            // The server answers while the filter starts: what neither of two has when both die is lost.
            wait_until("the filter has been handed all clients", || {
                chain.counted("persist", "connections") >= 4
            });
            let process = chain.process(filter);
            // SAFETY: a signal to a process that this test started.
            unsafe { libc::kill(process, libc::SIGKILL) };
            wait_until("the filter is back", || {
                chain.processes(filter).first().is_some_and(|now| *now != process)
            });
        }
        more(200);
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(chain.get("/small").body, b"small\n");
    chain.stop();
}

#[test]
fn a_chain_whose_filters_want_to_see_each_request_is_refused() {
    let site = Site::new();
    let port = free_port();
    let words = site.nginx(port);
    let addresses = [format!("127.0.0.1:{port}")];
    let filters = ["package", "persist", "normalize", "pass", "prior"];
    let output =
        Chain::with_options(&["--linger", "1000"], &addresses, &filters, &strs(&words)).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("pass would not see every request"), "{said}");
}

/// It takes what filters would hand on as it is, and nothing else.
#[test]
fn what_a_filter_would_rewrite_or_refuse_goes_by_the_filters() {
    let site = Site::new();
    let chain = nginx(&site, WHOLE_CHAIN, LONG);
    let mut client = chain.client();
    let mut requests = 0;
    wait_until("nginx has read 20 requests on connections that it had", || {
        assert_eq!(client.get("/small").body, b"small\n");
        assert_eq!(client.get("//small").body, b"small\n");
        assert_eq!(client.get("/%73mall").body, b"small\n");
        assert_eq!(client.get("/a/../small").body, b"small\n");
        requests += 4;
        requests >= ends(&site) + 20
    });
    client.send(b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n");
    assert_eq!(client.response(false).status, 501);
    let log = std::fs::read_to_string(site.path().join("access.log")).unwrap();
    let others: Vec<_> = log.lines().filter(|line| !line.contains("GET /small ")).collect();
    assert!(others.len() <= 1 && others.iter().all(|line| line.contains("GET / ")), "{others:?}");
    assert!(chain.counted("normalize", "rewritten_total") >= 3 * requests as u64 / 4);
    chain.stop();
}

/// A server reads content together with the head, and may ignore it: then it must know that no further request follows.
#[test]
fn content_goes_by_the_filters_which_say_that_it_is_the_last() {
    for filters in [CHAIN, WHOLE_CHAIN] {
        let (site, port) = (Site::new(), free_port());
        let server = common::compile("programs/ignores.c", &[], &site);
        let chain = start(filters, LONG, port, &[server, port.to_string(), "polite".to_owned()]);
        let mut client = chain.client();
        for _ in 0..10 {
            for _ in 0..3 {
                assert_eq!(client.get("/outer").body, b"GET /outer HTTP/1.1");
            }
            let content = "GET /inner HTTP/1.1\r\nHost: test\r\n\r\n";
            let length = content.len();
            let head = format!("GET /outer HTTP/1.1\r\nHost: test\r\nContent-Length: {length}\r\n\r\n");
            client.send([head.as_bytes(), content.as_bytes()].concat().as_slice());
            assert_eq!(client.response(false).body, b"GET /outer HTTP/1.1");
        }
        let seen = chain.errors();
        assert!(!seen.contains("/inner") && seen.matches("/outer").count() == 40, "{seen}");
        chain.stop();
    }
}

/// Serves the clients that it has before it accepts another, for 20 ms each. The answer says which request of its
/// connection it was.
const PREFERS_ITS_OWN: &str = "
import select, socket, time
listener = socket.create_server(('127.0.0.1', PORT))
listener.setblocking(False)
clients, counts, epoll = {}, {}, select.epoll()
epoll.register(listener, select.EPOLLIN)
while True:
    ready = [fd for fd, _ in epoll.poll()]
    known = [fd for fd in ready if fd in clients]
    for fd in known:
        try:
            head = clients[fd].recv(4096)
        except BlockingIOError:
            continue
        if not head:
            clients.pop(fd).close()
            continue
        time.sleep(0.02)
        counts[fd] += 1
        body = b'%d' % counts[fd]
        clients[fd].sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n' % len(body) + body)
    if ready and not known:
        try:
            client, _ = listener.accept()
        except BlockingIOError:
            continue
        client.setblocking(False)
        clients[client.fileno()], counts[client.fileno()] = client, 0
        epoll.register(client, select.EPOLLIN)
";

/// Two such clients always have a request for it: a third would wait for ever.
#[test]
fn nobody_is_served_out_of_turn_for_long_where_there_is_an_order() {
    needs("python3", "python3");
    let (site, port) = (Site::new(), free_port());
    let server = site.configuration("server.py", port, PREFERS_ITS_OWN);
    let chain = start(WHOLE_CHAIN, LONG, port, &["python3".to_owned(), server]);
    let count =
        |client: &mut Client| -> u32 { String::from_utf8(client.get("/").body).unwrap().parse().unwrap() };
    let mut first = chain.client();
    wait_until("the server reads further requests of a connection itself", || count(&mut first) >= 3);
    let (stop, answers) = (AtomicBool::new(false), [AtomicU64::new(0), AtomicU64::new(0)]);
    std::thread::scope(|scope| {
        for (mut client, answers) in [first, chain.client()].into_iter().zip(&answers) {
            let stop = &stop;
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    count(&mut client);
                    answers.fetch_add(1, Ordering::Relaxed);
                    // So that the server has written down that its response is complete.
                    std::thread::sleep(std::time::Duration::from_millis(2));
                }
            });
        }
        wait_until("both are served", || answers.iter().all(|answers| answers.load(Ordering::Relaxed) >= 10));
        let third: Vec<u32> = (0..10).map(|_| count(&mut chain.client())).collect();
        stop.store(true, Ordering::Relaxed);
        assert_eq!(third, [1; 10]);
    });
    chain.stop();
}

/// How often the filter nearest to the server has gone to sleep: once for each time that it was woken.
fn sleeps(process: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.unwrap().trim().parse().unwrap()
}

#[test]
fn filters_sleep_while_the_server_reads_by_itself() {
    let site = Site::new();
    let chain = nginx(&site, &["package"], LONG);
    let filter = chain.process("cc-package");
    let mut client = chain.client();
    let before = sleeps(filter);
    const REQUESTS: u64 = 1000;
    for _ in 0..REQUESTS {
        assert_eq!(client.get("/small").body, b"small\n");
    }
    // A request that arrives before the server has written down that its response is complete wakes the filter.
    let woken = sleeps(filter) - before;
    assert!(woken < REQUESTS / 2, "woken {woken} times for {REQUESTS} requests");
    chain.stop();
}

#[test]
fn a_connection_outlives_the_process_that_it_lingers_with() {
    let site = Site::new();
    let chain = nginx(&site, CHAIN, LONG);
    let mut client = chain.client();
    for _ in 0..3 {
        for _ in 0..10 {
            assert_eq!(client.get("/small").body, b"small\n");
        }
        for worker in chain.processes("worker process") {
            // SAFETY: a signal to a process that this test started.
            unsafe { libc::kill(worker, libc::SIGKILL) };
        }
        wait_until("nginx has workers", || chain.processes("worker process").len() == 2);
    }
    assert_eq!(client.get("/small").body, b"small\n");
    chain.stop();
}

/// Two processes, and a log of how many requests each request's connection had before, as Apache sees it.
const PREFORK: &str = "
ServerRoot DIR
ServerName localhost
PidFile DIR/apache.pid
DefaultRuntimeDir DIR
Listen PORT
LoadModule mpm_prefork_module /usr/lib/apache2/modules/mod_mpm_prefork.so
LoadModule authz_core_module /usr/lib/apache2/modules/mod_authz_core.so
LoadModule alias_module /usr/lib/apache2/modules/mod_alias.so
LoadModule cgi_module /usr/lib/apache2/modules/mod_cgi.so
ErrorLog DIR/apache.log
CustomLog DIR/requests \"%k\"
DocumentRoot DIR/html
ServerLimit 2
MaxRequestWorkers 2
StartServers 2
MaxConnectionsPerChild 40
KeepAlive On
KeepAliveTimeout 60
User www-data
Group www-data
ScriptAlias /cgi/ DIR/html/cgi/
<Directory DIR/html>
  Require all granted
  Options +ExecCGI
</Directory>
";

#[test]
fn processes_that_wait_for_one_connection_read_its_next_requests_and_have_time_for_others() {
    needs("apache2", "apache2");
    let (site, port) = (Site::with_cgi(), free_port());
    let file = site.configuration("apache.conf", port, PREFORK);
    let command = ["apache2", "-DFOREGROUND", "-f", &file].map(str::to_owned);
    let chain = start(CHAIN, LONG, port, &command);
    let mut client = chain.client();
    wait_until("Apache has read requests on a connection that it had", || {
        assert_eq!(client.get("/small").body, b"small\n");
        let log = std::fs::read_to_string(site.path().join("requests")).unwrap();
        log.lines().any(|before| before.parse::<u32>().unwrap() >= 3)
    });
    // Many more clients than processes, while this one is idle.
    exercise(&chain, &site);
    assert_eq!(client.get("/small").body, b"small\n");
    let log = std::fs::read_to_string(site.path().join("apache.log")).unwrap();
    assert!(!log.contains("exit signal"), "a process of Apache's died: {log}");
    chain.stop();
}

/// A process for each connection, which answers once. Asked for `/announces` it says that the connection ends, and
/// reads what the client still sends without a look, until that has closed it; otherwise it says nothing, and shuts it
/// down.
const ANSWERS_ONCE: &str = "
import os, signal, socket
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
listener = socket.create_server(('127.0.0.1', PORT))
while True:
    client, _ = listener.accept()
    if os.fork() == 0:
        head = b''
        while not head.endswith(b'\\r\\n\\r\\n'):
            head += client.recv(4096)
        announces = b'/announces' in head
        field, body = (b'Connection: close\\r\\n', b'announces') if announces else (b'', b'shuts-down')
        client.sendall(b'HTTP/1.1 200 OK\\r\\n%sContent-Length: %d\\r\\n\\r\\n' % (field, len(body)) + body)
        if not announces:
            client.shutdown(socket.SHUT_WR)
        while announces and client.recv(4096):
            pass
        os._exit(0)
    client.close()
";

#[test]
fn a_server_that_ends_a_connection_ends_neither_the_clients_nor_reads_its_next_request() {
    needs("python3", "python3");
    let (site, port) = (Site::new(), free_port());
    let server = site.configuration("server.py", port, ANSWERS_ONCE);
    let chain = start(CHAIN, LONG, port, &["python3".to_owned(), server]);
    let mut client = chain.client();
    for _ in 0..10 {
        for body in ["announces", "shuts-down"] {
            let response = client.get(&format!("/{body}"));
            assert_eq!((response.status, &response.body[..]), (200, body.as_bytes()));
            assert!(response.field("connection").is_none_or(|field| field != "close"), "{body}");
        }
    }
    chain.stop();
}

/// Looks whether its client has left while it works, and waits until that has sent its next request, for `/look`. The
/// answer says which request of its connection it was, and what it found.
const LOOKS: &str = "
import os, select, socket, time
listener = socket.create_server(('127.0.0.1', PORT))
while True:
    client, _ = listener.accept()
    count = 0
    while True:
        head, found = b'', b'there'
        while not head.endswith(b'\\r\\n\\r\\n'):
            got = client.recv(4096)
            if not got:
                break
            head += got
        if not head:
            break
        count += 1
        if b'/look' in head:
            open('DIR/works', 'w').close()
            while not os.path.exists('DIR/sent'):
                time.sleep(0.001)
            os.remove('DIR/sent')
            if select.select([client], [], [], 0.1)[0] and not client.recv(1, socket.MSG_PEEK):
                found = b'left'
        body = b'%d %s' % (count, found)
        client.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n' % len(body) + body)
    client.close()
";

/// What it wrote in answer to the first request was taken for an answer to the next, by calls that nobody saw.
#[test]
fn a_server_is_not_told_that_its_client_has_left_while_it_works_on_a_further_request() {
    needs("python3", "python3");
    let (site, port) = (Site::new(), free_port());
    let server = site.configuration("server.py", port, LOOKS);
    let chain = start(CHAIN, LONG, port, &["python3".to_owned(), server]);
    let mut client = chain.client();
    let mut further = 0;
    wait_until("the server has looked while it worked on further requests of a connection", || {
        client.send(b"GET /look HTTP/1.1\r\nHost: test\r\n\r\n");
        wait_until("the server works", || std::fs::remove_file(site.path().join("works")).is_ok());
        client.send(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n");
        std::fs::write(site.path().join("sent"), "").unwrap();
        let said = String::from_utf8(client.response(false).body).unwrap();
        let (count, found) = said.split_once(' ').unwrap();
        assert_eq!(found, "there", "request {count}");
        assert_eq!(client.response(false).status, 200);
        further += usize::from(count != "1");
        further >= 5
    });
    chain.stop();
}

/// One process; the answer says how many requests its connection had, this one included.
const ONE_AT_A_TIME: &str = "
import select, socket
listener = socket.create_server(('127.0.0.1', PORT))
while True:
    client, _ = listener.accept()
    stream, count = client.makefile('rb'), 0
    client.settimeout(TIMEOUT)
    while True:
        if 'WAIT' == 'select':
            select.select([client], [], [], 60)
        line = stream.readline()
        if not line:
            break
        while stream.readline().strip():
            pass
        count += 1
        body = b'%d' % count
        client.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n' % len(body) + body)
    stream.close()
    client.close()
";

/// A server that has one process and waits for its client's next request as `wait` says.
fn one_at_a_time(wait: &str) {
    needs("python3", "python3");
    let (site, port) = (Site::new(), free_port());
    let timeout = if wait == "poll" { "60" } else { "None" };
    let text = ONE_AT_A_TIME.replace("TIMEOUT", timeout).replace("WAIT", wait);
    let server = site.configuration("server.py", port, &text);
    let chain = start(CHAIN, LONG, port, &["python3".to_owned(), server]);
    let mut busy = chain.client();
    let mut most = 0;
    wait_until("the server has read requests on a connection that it had", || {
        let body = busy.get("/").body;
        most = most.max(std::str::from_utf8(&body).unwrap().parse().unwrap());
        most >= 5
    });
    // The server waits for this client, and another comes.
    for _ in 0..3 {
        assert_eq!(chain.get("/").status, 200);
        assert_eq!(busy.get("/").status, 200);
    }
    // One that never lets the server wait for long does not keep another out.
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let _ = busy.get("/");
            }
        });
        for _ in 0..3 {
            assert_eq!(chain.get("/").status, 200);
        }
        stop.store(true, Ordering::Relaxed);
    });
    chain.stop();
}

#[test]
fn a_process_that_waits_in_read() {
    one_at_a_time("read");
}

#[test]
fn a_process_that_waits_in_poll() {
    one_at_a_time("poll");
}

#[test]
fn a_process_that_waits_in_select() {
    one_at_a_time("select");
}

/// Two processes: the first ends with its first connection, the second accepts when it is told to.
const ENDS_WHEN_NEEDED: &str = "
import os, socket, time
listener = socket.create_server(('127.0.0.1', PORT))
is_second = os.fork() > 0
name = 'second' if is_second else 'first'
open('DIR/' + name, 'w').write(str(os.getpid()))
while is_second and not os.path.exists('DIR/go'):
    pass
while True:
    client, _ = listener.accept()
    while client.recv(65536):
        client.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n')
    client.close()
    if not is_second:
        os._exit(0)
";

/// Whoever was woken for a request and ends instead of accepting leaves it to another.
#[test]
fn a_request_is_not_lost_with_the_process_that_was_woken_for_it() {
    needs("python3", "python3");
    let (site, port) = (Site::new(), free_port());
    let server = site.configuration("server.py", port, ENDS_WHEN_NEEDED);
    let addresses = [format!("127.0.0.1:{port}")];
    let command = Chain::with_options(&["--linger", LONG], &addresses, CHAIN, &["python3", &server]);
    let chain = Chain::once_it_listens(command, port);
    let process = |name: &str| std::fs::read_to_string(site.path().join(name)).unwrap_or_default();
    wait_until("both processes are there", || !process("first").is_empty() && !process("second").is_empty());
    let (first, second) = (process("first"), process("second"));
    let mut client = chain.client();
    assert_eq!(client.get("/").status, 200);
    let waits_with_others = || {
        let descriptors = std::fs::read_dir(format!("/proc/{first}/fd")).unwrap().flatten();
        let is_epoll = |path: &std::path::Path| {
            std::fs::read_link(path).is_ok_and(|to| to.ends_with("anon_inode:[eventpoll]"))
        };
        descriptors.into_iter().any(|entry| is_epoll(&entry.path()))
    };
    wait_until("the first waits for its client, and for others", waits_with_others);
    std::fs::write(site.path().join("go"), "").unwrap();
    let sleeps = || {
        let stat = std::fs::read_to_string(format!("/proc/{second}/stat")).unwrap();
        stat.rsplit(')').next().unwrap().trim_start().starts_with('S')
    };
    wait_until("the second waits to accept", sleeps);
    assert_eq!(chain.get("/").status, 200);
    wait_until("the first has ended", || !std::path::Path::new(&format!("/proc/{first}/fd/0")).exists());
    assert_eq!(client.get("/").status, 200);
    chain.stop();
}

const ANSWERS_HEAD_WITH_CONTENT: &str = "
import socket
listener = socket.create_server(('127.0.0.1', PORT))
while True:
    client, _ = listener.accept()
    try:
        while (head := client.recv(65536)):
            client.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: 7\\r\\n\\r\\n')
            client.sendall(b'content')
    except OSError:
        pass
    client.close()
";

/// What a server writes behind its response is not the beginning of the next one.
#[test]
fn content_that_a_response_does_not_have_is_not_sent() {
    needs("python3", "python3");
    let (site, port) = (Site::new(), free_port());
    let server = site.configuration("server.py", port, ANSWERS_HEAD_WITH_CONTENT);
    let chain = start(CHAIN, LONG, port, &["python3".to_owned(), server]);
    let mut client = chain.client();
    for _ in 0..10 {
        client.send(b"HEAD / HTTP/1.1\r\nHost: test\r\n\r\n");
        assert_eq!(client.response(true).status, 200);
        assert_eq!(client.get("/").body, b"content");
    }
    chain.stop();
}
