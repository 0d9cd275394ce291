//! Servers of many processes that wait in accept(2): which of them is woken.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::HashSet;
use std::path::Path;

use common::{Chain, Client, Site, compile, free_port, needs, wait_until};

const PROCESSES: usize = 24;

/// Processes on one processor that wait for their clients in accept(2), each of which prepares an epoll set with the
/// listening socket, as Apache's prefork does, but waits for events where it is told to. They answer with their
/// numbers; `/block` is answered once there is a file `go`. Signals count how often accept(2) returns because of them.
const PREFORK: &str = "
import ctypes, os, select, signal, socket, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
libc = ctypes.CDLL(None, use_errno=True)
listener = socket.create_server(('127.0.0.1', PORT))
def serve():
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.siginterrupt(signal.SIGUSR1, False)
    signal.signal(signal.SIGUSR2, lambda *_: None)
    epoll = select.epoll()
    epoll.register(listener, select.EPOLLIN)
    open('DIR/serving', 'a').write('%d\\n' % os.getpid())
    while True:
        if sys.argv[1] == 'events':
            epoll.poll()
        fd = libc.accept(listener.fileno(), None, None)
        if fd < 0:
            open('DIR/interrupted', 'a').write('%d %d\\n' % (os.getpid(), ctypes.get_errno()))
            continue
        client = socket.socket(fileno=fd)
        if b'/block' in client.recv(65536):
            open('DIR/blocked', 'a').write('%d\\n' % os.getpid())
            while not os.path.exists('DIR/go'):
                time.sleep(0.01)
        body = b'%d' % os.getpid()
        client.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n' % len(body) + body)
        client.close()
for _ in range(COUNT):
    if os.fork() == 0:
        serve()
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
";

fn start(site: &Site, how: &str) -> Chain {
    start_behind(site, how, &["package"])
}

fn start_behind(site: &Site, how: &str, filters: &[&str]) -> Chain {
    needs("python3", "python3");
    let port = free_port();
    let text = PREFORK.replace("COUNT", &PROCESSES.to_string());
    let server = site.configuration("prefork.py", port, &text);
    let chain = Chain::start(port, filters, &["python3", &server, how]);
    wait_until("all processes are there", || serving(site).len() == PROCESSES);
    chain
}

fn serving(site: &Site) -> Vec<i32> {
    lines(&site.path().join("serving")).iter().map(|line| line.parse().unwrap()).collect()
}

fn served_by(client: &mut Client) -> i32 {
    String::from_utf8(client.get("/").body).unwrap().parse().unwrap()
}

/// The processes that serve clients that ask one after the other.
fn few(chain: &Chain) -> HashSet<i32> {
    // Processes that have only just begun are called, too.
    for _ in 0..PROCESSES {
        served_by(&mut chain.client());
    }
    (0..4 * PROCESSES).map(|_| served_by(&mut chain.client())).collect()
}

fn lines(file: &Path) -> Vec<String> {
    std::fs::read_to_string(file).unwrap_or_default().lines().map(str::to_owned).collect()
}

/// proc_pid_stat(5): what the process is doing.
fn state(process: i32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    stat.rsplit(") ").next()?.chars().next()
}

fn signal(process: i32, signal: i32) {
    // SAFETY: a signal to a process that the test started.
    unsafe { libc::kill(process, signal) };
}

#[test]
fn clients_in_turn_are_served_by_a_few_warm_processes() {
    let site = Site::new();
    let chain = start(&site, "accept");
    let few = few(&chain);
    assert!(few.len() < PROCESSES / 2, "{} of {PROCESSES} processes have served", few.len());
    chain.stop();
}

#[test]
fn requests_are_taken_by_every_process_while_others_block() {
    let site = Site::new();
    let chain = start(&site, "accept");
    let ask = |_| {
        let mut client = chain.client();
        client.send(b"GET /block HTTP/1.1\r\nHost: test\r\n\r\n");
        client
    };
    let mut clients: Vec<Client> = (0..PROCESSES + 3).map(ask).collect();
    let blocked = site.path().join("blocked");
    wait_until("every process has a request", || lines(&blocked).len() == PROCESSES);
    assert_eq!(lines(&blocked).into_iter().collect::<HashSet<_>>().len(), PROCESSES);
    std::fs::write(site.path().join("go"), "").unwrap();
    for client in &mut clients {
        assert_eq!(client.response(false).status, 200);
    }
    chain.stop();
}

#[test]
fn processes_that_are_killed_while_they_wait_cost_no_request() {
    let site = Site::new();
    let chain = start(&site, "accept");
    for _ in 0..2 {
        let few = few(&chain);
        few.iter().for_each(|&process| signal(process, libc::SIGKILL));
        for _ in 0..20 {
            assert!(!few.contains(&served_by(&mut chain.client())));
        }
    }
    chain.stop();
}

#[test]
fn processes_that_are_stopped_while_they_wait_do_not_hold_up_the_others() {
    let site = Site::new();
    let chain = start(&site, "accept");
    let few = few(&chain);
    few.iter().for_each(|&process| signal(process, libc::SIGSTOP));
    wait_until("they have stopped", || few.iter().all(|process| state(*process) == Some('T')));
    for _ in 0..40 {
        assert!(!few.contains(&served_by(&mut chain.client())));
    }
    few.iter().for_each(|&process| signal(process, libc::SIGCONT));
    assert_eq!(chain.get("/").status, 200);
    chain.stop();
}

/// signal(7): a handler says whether accept(2) begins again.
#[test]
fn a_signal_ends_a_wait_as_its_handler_says() {
    let site = Site::new();
    let chain = start(&site, "accept");
    few(&chain);
    let interrupted = site.path().join("interrupted");
    let waits = |process: &i32| state(*process) == Some('S');
    let children = serving(&site);
    wait_until("all wait", || children.iter().all(waits));
    children.iter().for_each(|&process| signal(process, libc::SIGUSR1));
    wait_until("all wait again", || children.iter().all(waits));
    children.iter().for_each(|&process| signal(process, libc::SIGUSR2));
    wait_until("all were interrupted", || lines(&interrupted).len() >= PROCESSES);
    let once: HashSet<String> = lines(&interrupted).into_iter().collect();
    assert_eq!((once.len(), lines(&interrupted).len()), (PROCESSES, PROCESSES), "{once:?}");
    assert!(once.iter().all(|line| line.ends_with(&format!(" {}", libc::EINTR))), "{once:?}");
    assert_eq!(chain.get("/").status, 200);
    chain.stop();
}

/// Descriptors that are registered with any epoll set of a process.
fn registered(process: i32) -> usize {
    let files = std::fs::read_dir(format!("/proc/{process}/fdinfo")).unwrap();
    let texts = files.flatten().map(|file| std::fs::read_to_string(file.path()).unwrap_or_default());
    texts.map(|text| text.matches("tfd:").count()).sum()
}

#[test]
fn listening_sockets_are_registered_with_epoll_where_somebody_waits_for_events_only() {
    for (how, each) in [("accept", 0), ("events", 1)] {
        let site = Site::new();
        let chain = start(&site, how);
        for _ in 0..4 * PROCESSES {
            assert_eq!(chain.get("/").status, 200);
        }
        for process in serving(&site) {
            wait_until("it has begun to wait", || registered(process) == each);
        }
        chain.stop();
    }
}

/// Waits with poll(2) for an epoll set that has the one of the listening socket in it, or for a duplicate of that one;
/// both are there before the listening socket is registered.
const NESTED: &str = "
import os, select, socket, sys
listener = socket.create_server(('127.0.0.1', PORT))
inner = select.epoll()
if sys.argv[1] == 'nested':
    outer = select.epoll()
    outer.register(inner.fileno(), select.EPOLLIN)
    waited = outer.fileno()
else:
    waited = os.dup(inner.fileno())
inner.register(listener, select.EPOLLIN)
poll = select.poll()
poll.register(waited, select.POLLIN)
while True:
    if sys.argv[2] == 'poll':
        poll.poll()
    else:
        select.select([waited], [], [])
    client, _ = listener.accept()
    client.recv(65536)
    client.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: 1\\r\\n\\r\\n1')
    client.close()
";

#[test]
fn a_wait_for_an_epoll_set_by_another_number_or_within_another_set_is_told_of_requests() {
    needs("python3", "python3");
    for (how, by) in
        [("nested", "poll"), ("nested", "select"), ("duplicate", "poll"), ("duplicate", "select")]
    {
        let site = Site::new();
        let port = free_port();
        let server = site.configuration("nested.py", port, NESTED);
        let chain = Chain::start(port, &["package"], &["python3", &server, how, by]);
        for _ in 0..3 {
            assert_eq!(served_by(&mut chain.client()), 1, "{how} {by}");
        }
    }
}

/// `how` is a way of `programs/epolls.c`; the file is what it writes.
fn epolls(how: &str, site: &Site) -> (Chain, std::path::PathBuf) {
    let server = compile("programs/epolls.c", &[], site);
    let (port, file) = (free_port(), site.path().join(how));
    let command = [&server, &port.to_string(), how, file.to_str().unwrap()];
    (Chain::once_it_listens(Chain::command(port, &["package"], &command), port), file)
}

/// Another process may wait in a set of before a fork: the listening socket stays registered there.
#[test]
fn whoever_waits_in_an_epoll_set_that_a_fork_shared_is_told_of_requests() {
    for (how, data) in [("made-before", 2), ("child-registers", 2), ("waits-in-child", 1)] {
        let site = Site::new();
        let (chain, done) = epolls(how, &site);
        wait_until("the other process has done its part", || done.exists());
        for _ in 0..3 {
            assert_eq!(served_by(&mut chain.client()), data, "{how}");
        }
        chain.stop();
    }
}

#[test]
fn registrations_that_nobody_waits_for_are_changed_as_epoll_ctl_says() {
    let site = Site::new();
    let (chain, conditioned) = epolls("changes", &site);
    assert_eq!(served_by(&mut chain.client()), 8);
    chain.stop();
    let (port, bare) = (free_port().to_string(), site.path().join("bare"));
    let server = site.path().join("server");
    let mut alone = std::process::Command::new(server).args([&port, "changes"]).arg(&bare).spawn().unwrap();
    let last = |file| lines(file).pop().unwrap_or_default();
    wait_until("it has changed everything", || last(&bare) == "change it: done");
    alone.kill().unwrap();
    alone.wait().unwrap();
    assert_eq!(lines(&conditioned), lines(&bare));
}

/// Two processes: the first receives a request from the link, as accept(2) does, and never claims it; from then on, the
/// second accepts. By then the first has been killed, or it is stopped.
const RECEIVES: &str = "
import os, signal, socket, sys
listener = socket.create_server(('127.0.0.1', PORT))
first = os.fork()
if first == 0:
    socket.recv_fds(socket.socket(fileno=int(os.environ['TIDEGATE_CC_UPSTREAM'])), 65536, 4)
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
os.waitpid(first, os.WUNTRACED)
while True:
    client, _ = listener.accept()
    client.recv(65536)
    client.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: 1\\r\\n\\r\\n1')
    client.close()
";

#[test]
fn what_a_process_received_and_never_claimed_is_served_by_another() {
    needs("python3", "python3");
    for filters in [&["package"][..], &["package", "pass"], &["package", "persist"]] {
        for signal in ["SIGKILL", "SIGSTOP"] {
            let site = Site::new();
            let port = free_port();
            let server = site.configuration("receives.py", port, RECEIVES);
            let command = Chain::command(port, filters, &["python3", &server, signal]);
            let chain = Chain::once_it_listens(command, port);
            assert_eq!(chain.get("/").body, b"1", "{filters:?} {signal}");
            let last = filters[filters.len() - 1];
            assert!(chain.counted(last, "handed_again_total") > 0, "{filters:?} {signal}");
            assert_eq!(chain.get("/").body, b"1", "{filters:?} {signal}");
            chain.stop();
        }
    }
}

#[test]
fn a_client_of_a_killed_process_is_told_so_although_the_first_filter_was_started_anew() {
    let site = Site::new();
    let chain = start_behind(&site, "accept", &["package", "persist"]);
    let mut client = chain.client();
    client.send(b"GET /block HTTP/1.1\r\nHost: test\r\n\r\n");
    let blocked = || lines(&site.path().join("blocked"));
    wait_until("a process works on it", || blocked().len() == 1);
    let first = chain.process("cc-package ");
    signal(first, libc::SIGKILL);
    wait_until("the first filter is another", || {
        chain.processes("cc-package ").iter().any(|process| *process != first)
    });
    signal(blocked()[0].parse().unwrap(), libc::SIGKILL);
    let error = client.try_response(false).expect_err("nobody is left to answer");
    assert_eq!(error.kind(), std::io::ErrorKind::UnexpectedEof, "{error}");
    assert_eq!(served_by(&mut chain.client()).signum(), 1);
}
