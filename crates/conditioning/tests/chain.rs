//! The launcher: what it refuses, what it mends, and that it leaves nothing behind.
#![allow(clippy::unwrap_used)]

mod common;

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use common::{Chain, Client, Site, free_port, library, processes, program, strs};

/// Runs a chain that must fail: its exit code and what it wrote to standard error.
fn fails(port: u16, filters: &[&str], extra: &[&str], command: &[&str]) -> (i32, String) {
    let mut launcher = Chain::command(port, filters, command);
    let mut words: Vec<_> = launcher.get_args().map(ToOwned::to_owned).collect();
    words.splice(1..1, extra.iter().map(Into::into));
    launcher = {
        let mut with_extra = Command::new(program());
        with_extra.args(words).envs(launcher.get_envs().filter_map(|(name, value)| Some((name, value?))));
        // SAFETY: setsid is async-signal-safe.
        unsafe {
            with_extra.pre_exec(|| {
                libc::setsid();
                Ok(())
            })
        };
        with_extra
    };
    let child = launcher.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let session = child.id();
    let output = child.wait_with_output().unwrap();
    assert_eq!(processes(session, ""), [0i32; 0], "processes left behind");
    (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
}

fn one_line(text: &str, about: &str) {
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains(about), "{text}");
}

#[test]
fn an_unknown_filter_is_one_line_and_exit_code_2() {
    let (code, text) = fails(free_port(), &["persits"], &[], &["sleep", "60"]);
    assert_eq!(code, 2);
    one_line(&text, "unknown filter \"persits\"; known are package, persist");
    let (code, text) = fails(free_port(), &["persist=idle=never"], &[], &["sleep", "60"]);
    assert_eq!(code, 2);
    one_line(&text, "expected a duration");
}

#[test]
fn a_filter_that_exits_at_start_is_one_line_and_exit_code_1() {
    let (code, text) = fails(free_port(), &["/bin/false"], &[], &["sleep", "60"]);
    assert_eq!(code, 1);
    one_line(&text, "filter /bin/false exited at start (exit code 1)");
}

#[test]
fn what_cannot_be_meant_is_one_line_and_exit_code_2_before_anything_starts() {
    let again = free_port();
    let address = format!("127.0.0.1:{again}");
    for (filters, options, about) in [
        (&["/no/such/filter"][..], &[][..], "filter /no/such/filter: there is no such file"),
        (&["/etc/passwd"], &[], "filter /etc/passwd: it is no program that may be executed (chmod +x)"),
        (&["Cargo.toml"], &[], "a program is named by its path: ./Cargo.toml"),
        (&["package", "stats"], &["--linger", "5"], "stats would not see every request"),
        (&[], &["--listen", &address], "is given twice"),
    ] {
        let (code, text) = fails(again, filters, options, &["sleep", "60"]);
        assert_eq!(code, 2, "{text}");
        one_line(&text, about);
    }
}

#[test]
fn a_command_that_never_listens_is_one_line_and_exit_code_1() {
    let (code, text) = fails(free_port(), &[], &["--start-timeout", "1"], &["sleep", "60"]);
    assert_eq!(code, 1);
    one_line(&text, "sleep did not listen on port");
    one_line(&text, "statically linked programs do (--via seccomp), or use another port (--server-port)");
    let (_, text) = fails(free_port(), &[], &["--start-timeout", "1", "--via", "seccomp"], &["sleep", "60"]);
    one_line(&text, "it may take longer (--start-timeout), or use another port (--server-port)");
    let elsewhere = "import socket,time; s=socket.create_server(('127.0.0.1',0)); time.sleep(60)";
    let (code, text) = fails(free_port(), &[], &["--start-timeout", "10"], &["python3", "-c", elsewhere]);
    assert_eq!(code, 1);
    one_line(&text, "python3 listens on port");
    let (code, text) = fails(free_port(), &[], &[], &["/no/such/server"]);
    assert_eq!(code, 1);
    one_line(&text, "cannot start /no/such/server");
}

/// The line of a chain whose command listens, and never accepts when there is something to accept.
fn never_accepts(options: &[&str]) -> String {
    let port = free_port();
    let site = Site::new();
    let tried = site.path().join("tried");
    let listens = format!(
        "import socket, time\n\
         s = socket.create_server(('127.0.0.1', {port}))\n\
         s.setblocking(False)\n\
         try: s.accept()\n\
         except BlockingIOError: open('{}', 'w')\n\
         time.sleep(60)",
        tried.display()
    );
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Before the server listens, and after the chain has ended, nobody is there.
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                if tried.exists()
                    && let Ok(mut client) = Client::try_connect(([127, 0, 0, 1], port).into())
                {
                    client.send(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n");
                    assert!(client.is_ended());
                }
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
        });
        let options = [&["--start-timeout", "5"], options].concat();
        let (code, text) = fails(port, &[], &options, &["python3", "-c", &listens]);
        stop.store(true, Ordering::Relaxed);
        assert_eq!(code, 1);
        let (said, error) = text.split_once('\n').unwrap();
        assert!(said.contains("listening on"), "{text}");
        one_line(error, "did not accept its first client within 5 s");
        error.to_owned()
    })
}

#[test]
fn a_command_that_never_accepts_is_one_line_and_exit_code_1() {
    one_line(&never_accepts(&[]), "statically linked programs do (--via seccomp)");
}

/// It was recommended what was done already.
#[test]
fn a_command_that_never_accepts_by_seccomp_is_not_told_to_be_reached_by_it() {
    assert!(!never_accepts(&["--via", "seccomp"]).contains("seccomp"));
}

#[test]
fn an_address_in_use_is_one_line_and_exit_code_1() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (code, text) = fails(taken.local_addr().unwrap().port(), &[], &[], &["sleep", "60"]);
    assert_eq!(code, 1);
    one_line(&text, "Address already in use (os error 98); `ss -ltnp` shows which program has it");
}

/// It was said that the file of the installation cannot be found, and to name it.
#[test]
fn a_preload_library_that_is_not_there_is_named_as_it_was_given() {
    let (code, text) = fails(free_port(), &[], &["--preload", "/no/such.so"], &["sleep", "60"]);
    assert_eq!(code, 1);
    one_line(&text, "--preload or TIDEGATE_PRELOAD: there is no file \"/no/such.so\"; without it, ");
}

/// The questions of a command that has ended were waited for, as long as it may take to listen.
#[test]
fn a_command_that_ends_before_it_listens_is_one_line_however_it_is_reached() {
    for via in ["preload", "seccomp"] {
        let (code, text) = fails(free_port(), &[], &["--via", via], &["true"]);
        assert_eq!(code, 1, "{via}: {text}");
        one_line(&text, "true ended (exit code 0) before it listened on port");
        // What it left in the background has ended, too.
        let (code, text) = fails(free_port(), &[], &["--via", via], &["sh", "-c", "sleep 0.2 & exit 0"]);
        assert_eq!(code, 1, "{via}: {text}");
        one_line(&text, "sh ended (exit code 0) before it listened on port");
    }
}

#[test]
fn values_that_make_no_sense_are_refused() {
    for option in ["--server-port", "--start-timeout", "--backlog"] {
        let (code, text) = fails(free_port(), &[], &[option, "0"], &["true"]);
        assert_eq!(code, 2, "{text}");
        let first = format!("error: invalid value '0' for '{option} ");
        assert!(text.starts_with(&first) && text.contains("0 is not in 1.."), "{text}");
    }
    for (filters, about) in [
        (
            &["package=timeout=0s"][..],
            "filter package: timeout=0s: expected a duration such as 500ms, 10s or 2m",
        ),
        (&["persist=timeout=0ms"], "filter persist: timeout=0ms: expected a duration such as"),
        (&["package=content=65537"], "filter package: content=65537: expected at most 65536 bytes"),
        (&["prior=nodes=0"], "filter prior: nodes=0: expected a number from 1 on"),
        (&["police=port=0"], "filter police: port=0: expected a number from 1 on"),
        (&["persist", "normalize", "persist"], "filter persist: a chain has one at most"),
    ] {
        let (code, text) = fails(free_port(), filters, &[], &["true"]);
        assert_eq!(code, 2, "{text}");
        one_line(&text, about);
    }
    let (code, text) = fails(free_port(), &[], &[], &[""]);
    assert_eq!(code, 1);
    one_line(&text, "cannot start \"\": No such file or directory");
}

/// The parser's picture of the place took four lines more.
#[test]
fn a_file_of_rules_that_cannot_be_read_is_one_line_with_the_place() {
    let site = Site::new();
    for (text, about) in [
        (
            "[[request]]\npath = 5\n",
            "2:8: request.path: expected a path such as \"/a\", \"/a*\" or \"*.cgi\", not 5",
        ),
        ("root:x:0:0\n", "1:11: key with no value, expected `=`"),
        ("[[request]]\nmethod = \"\"\"\n", "3:1: invalid multi-line basic string"),
    ] {
        let rules = site.configuration("rules.toml", 0, text);
        let (code, text) = fails(free_port(), &[&format!("police=rules={rules}")], &[], &["true"]);
        assert_eq!(code, 2);
        one_line(&text, &format!("filter police: {rules}:{about}"));
    }
}

/// The filter said why in a line of its own.
#[test]
fn a_filter_that_cannot_start_is_one_line_that_says_why() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let stats = format!("stats=listen={}", taken.local_addr().unwrap());
    let (code, text) = fails(free_port(), &[&stats], &[], &["true"]);
    assert_eq!(code, 1);
    let address = taken.local_addr().unwrap();
    one_line(
        &text,
        &format!("filter stats exited at start (listen of stats: {address}: Address already in use"),
    );
    one_line(&text, "choose another address with stats=listen=ADDRESS:PORT");
}

/// One line says who serves where, once somebody does.
#[test]
fn a_chain_that_serves_says_where_through_what_and_for_which_command() {
    let (site, port, other) = (Site::new(), free_port(), free_port());
    let addresses = [format!("127.0.0.1:{port}"), format!("127.0.0.1:{other}")];
    let server = format!(
        "import socket; s = socket.create_server(('127.0.0.1', {port}))\nwhile True:\n s.accept()[0].close()"
    );
    let server = site.configuration("server.py", port, &server);
    let command =
        Chain::listening(&addresses, &["persist", "normalize", "+prior"], &["python3", &server, "a b", ""]);
    let chain = Chain::once_it_listens(command, port);
    common::wait_until("it has said so", || chain.errors().ends_with('\n'));
    let [first, second] = addresses;
    assert_eq!(
        chain.errors(),
        format!(
            "tidegate: listening on {first}, {second}, through package, persist, normalize+prior, for python3 {server} \"a b\" \"\"\n"
        )
    );
    chain.stop();
}

#[test]
fn the_commands_exit_code_is_the_launchers() {
    let (code, text) = fails(free_port(), &["package"], &[], &["sh", "-c", "exit 7"]);
    assert_eq!(code, 7);
    one_line(&text, "sh ended (exit code 7) before it listened on port");
    let (code, text) = fails(free_port(), &["package"], &[], &["true"]);
    assert_eq!(code, 1);
    one_line(&text, "true ended (exit code 0) before it listened on port");
}

/// Two that both wait for the next request would both present it, and a server may have taken the first one's.
#[test]
fn a_connection_that_was_idle_for_seconds_has_one_filter_that_waits_for_its_next_request() {
    let site = Site::new();
    let port = free_port();
    let chain = Chain::start(port, &["package", "persist"], &strs(&site.nginx(port)));
    let mut clients: Vec<Client> = (0..10).map(|_| chain.client()).collect();
    for _ in 0..2 {
        clients.iter_mut().for_each(|client| assert_eq!(client.get("/index.html").status, 200));
        // Longer than filters look for what no notice said.
        std::thread::sleep(Duration::from_millis(2_200));
    }
    let handed = |filter| chain.counted(filter, "handed_total");
    let (first, further) = (handed("package"), handed("persist"));
    assert_eq!(first, chain.counted("package", "accepted_total"), "each connection once");
    assert_eq!(further, first + 10);
    chain.stop();
}

#[test]
fn a_launcher_that_is_killed_takes_its_filters_and_the_server_with_it() {
    let site = Site::new();
    let port = free_port();
    let chain = Chain::start(port, &["package", "persist"], &strs(&site.nginx(port)));
    let session = chain.child.id();
    chain.signal(libc::SIGKILL);
    common::wait_until("everything has ended", || {
        processes(session, "").iter().all(|&pid| pid == session as i32)
    });
}

/// Keep-alive clients that count what they get; `kill -9` in between, of every filter but the first, so many times
/// each. `TIDEGATE_KILL_ROUNDS=100` is the whole run.
#[test]
fn filters_that_are_killed_under_load_cost_no_response() {
    let site = Site::new();
    let port = free_port();
    let chain = Chain::start(port, &strs(&every_filter(&site)), &strs(&site.nginx(port)));
    kill_under_load(&chain, &NAMES[1..]);
    chain.stop();
}

fn kill_under_load(chain: &Chain, names: &[&str]) {
    let rounds = std::env::var("TIDEGATE_KILL_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(2);
    let (stop, answered) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut kills = 0;
    std::thread::scope(|scope| {
        // Whatever happens below, the clients stop.
        let guard = StopOnDrop(&stop);
        for worker in 0..8 {
            let (stop, answered) = (&stop, &answered);
            scope.spawn(move || {
                let mut client = chain.client();
                let mut count = 0;
                while !stop.load(Ordering::Relaxed) {
                    count += 1;
                    // Half of the clients also come anew now and then.
                    if worker % 2 == 0 && count % 10 == 0 {
                        client = chain.client();
                    }
                    client.send(
                        b"GET /small HTTP/1.1\r\nHost: test\r\nAuthorization: Basic YWxpY2U6c2VjcmV0\r\n\r\n",
                    );
                    assert_eq!(client.response(false).body, b"small\n");
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for round in 0..rounds {
            for name in names {
                let pid = chain.process(&format!("cc-{name} "));
                // SAFETY: a signal to a process of this test's own chain.
                unsafe { libc::kill(pid, libc::SIGKILL) };
                kills += 1;
                common::wait_until("the filter runs again", || {
                    chain.processes(&format!("cc-{name} ")).iter().any(|&other| other != pid)
                });
                let before = answered.load(Ordering::Relaxed);
                common::wait_until(&format!("{name} serves again in round {round}"), || {
                    answered.load(Ordering::Relaxed) > before + 50
                });
            }
        }
        drop(guard);
    });
    let answered = answered.load(Ordering::Relaxed);
    eprintln!("{kills} filters killed, {answered} responses, none lost or wrong");
    assert!(answered > 50 * kills);
}

#[test]
fn filters_that_share_a_process_do_what_they_do_alone_and_may_be_killed_together() {
    let site = Site::new();
    let port = free_port();
    let of = |name: &str| {
        let filter = every_filter(&site).into_iter().find(|filter| filter.split('=').next() == Some(name));
        filter.unwrap_or_else(|| panic!("no filter {name}"))
    };
    let shares = |name: &str| format!("+{}", of(name));
    let filters = [
        of("persist"),
        of("normalize"),
        shares("auth"),
        shares("stats"),
        shares("police"),
        of("pass"),
        shares("prior"),
    ];
    let chain = Chain::start(port, &strs(&filters), &strs(&site.nginx(port)));
    let names = ["normalize+auth+stats+police", "pass+prior"];
    for name in ["package", "persist"].iter().chain(&names) {
        chain.process(&format!("cc-{name} "));
    }
    assert_eq!(chain.processes("cc-").len(), 4);
    every_filter_does_its_part(&chain);
    kill_under_load(&chain, &names);
    every_filter_does_its_part(&chain);
    chain.stop();
}

/// Of the first filter, only clients whose request had not arrived whole may notice: those are told by their
/// connection's end, and none gets a wrong answer.
#[test]
fn the_first_filter_killed_under_load_loses_only_what_had_not_arrived() {
    let site = Site::new();
    let port = free_port();
    let chain = Chain::start(port, &["package", "persist", "prior"], &strs(&site.nginx(port)));
    let (stop, answered, reconnected) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let guard = StopOnDrop(&stop);
        for _ in 0..8 {
            let (stop, answered, reconnected, chain) = (&stop, &answered, &reconnected, &chain);
            scope.spawn(move || {
                let mut client = chain.client();
                let mut served = false;
                while !stop.load(Ordering::Relaxed) {
                    client.send(b"GET /small HTTP/1.1\r\nHost: test\r\n\r\n");
                    match client.try_response(false) {
                        Ok(response) => {
                            assert_eq!(response.body, b"small\n");
                            served = true;
                            answered.fetch_add(1, Ordering::Relaxed);
                        }
                        // A connection that was handed on before lives in `persist`, and is never lost.
                        Err(error) => {
                            assert!(!served, "{error}");
                            reconnected.fetch_add(1, Ordering::Relaxed);
                            client = chain.client();
                        }
                    }
                }
            });
        }
        for _ in 0..5 {
            let pid = chain.process("cc-package ");
            // SAFETY: a signal to a process of this test's own chain.
            unsafe { libc::kill(pid, libc::SIGKILL) };
            common::wait_until("the filter runs again", || {
                chain.processes("cc-package ").iter().any(|&other| other != pid)
            });
            let before = answered.load(Ordering::Relaxed);
            common::wait_until("clients are served again", || answered.load(Ordering::Relaxed) > before + 50);
            assert_eq!(chain.get("/small").body, b"small\n");
        }
        drop(guard);
    });
    chain.stop();
}

struct StopOnDrop<'s>(&'s AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn the_first_filter_may_die_and_connections_that_it_handed_on_live() {
    let site = Site::new();
    let port = free_port();
    let chain = Chain::start(port, &["package", "persist"], &strs(&site.nginx(port)));
    let mut client = chain.client();
    assert_eq!(client.get("/small").status, 200);
    let pid = chain.process("cc-package ");
    // SAFETY: a signal to a process of this test's own chain.
    unsafe { libc::kill(pid, libc::SIGKILL) };
    assert_eq!(client.get("/small").body, b"small\n");
    let mut another = Client::try_connect(chain.address).unwrap();
    assert_eq!(another.get("/small").body, b"small\n");
    assert_eq!(client.get("/small").body, b"small\n");
}

/// Every filter that there is, each with what it cannot do without.
fn every_filter(site: &Site) -> Vec<String> {
    let secrets = site.path().join("secrets");
    std::fs::write(&secrets, "alice:secret\n").unwrap();
    let rules = site.path().join("rules.toml");
    std::fs::write(&rules, "[[request]]\npath = \"/forbidden*\"\naction = \"refuse\"\n").unwrap();
    vec![
        "package".to_owned(),
        "persist".to_owned(),
        "normalize".to_owned(),
        format!("auth=file={}", secrets.display()),
        format!("police=rules={}", rules.display()),
        "stats=listen=127.0.0.1:0".to_owned(),
        "slowread=exempt=100".to_owned(),
        "pass".to_owned(),
        "prior".to_owned(),
    ]
}

const NAMES: [&str; 9] =
    ["package", "persist", "normalize", "auth", "police", "stats", "slowread", "pass", "prior"];

/// This test needs root to see that filters give it up.
#[test]
fn each_filter_has_its_own_name_and_has_given_up_its_privileges() {
    let site = Site::new();
    let port = free_port();
    let filters = every_filter(&site);
    let chain = Chain::start(port, &strs(&filters), &strs(&site.nginx(port)));
    for name in NAMES {
        let pid = chain.process(&format!("cc-{name} "));
        let comm = || std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap();
        common::wait_until(&format!("{name} has its name"), || comm().trim() == format!("cc-{name}"));
        // It says that it serves, and is asked here, while it may still be giving something up.
        for line in ["NoNewPrivs:\t1", "Seccomp:\t2", "Uid:\t65534\t65534", "CapEff:\t0000000000000000"] {
            let has_it = || std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap().contains(line);
            common::wait_until(&format!("{name} has {line}"), has_it);
        }
    }
    every_filter_does_its_part(&chain);
}

fn every_filter_does_its_part(chain: &Chain) {
    let mut client = chain.client();
    assert_eq!(client.get("/small").status, 401);
    assert!(client.is_ended());
    let mut client = chain.client();
    for (path, status) in [("/small", 200), ("//small", 200), ("/big", 200), ("/forbidden/x", 503)] {
        let fields = "Host: test\r\nAuthorization: Basic YWxpY2U6c2VjcmV0";
        client.send(format!("GET {path} HTTP/1.1\r\n{fields}\r\n\r\n").as_bytes());
        assert_eq!(client.response(false).status, status, "{path}");
    }
}

#[test]
fn every_filter_explains_itself() {
    let list = Command::new(program()).arg("filter").output().unwrap();
    let list = String::from_utf8(list.stdout).unwrap();
    for line in list.lines() {
        let name = line.split_whitespace().next().unwrap();
        let help = Command::new(program()).args(["filter", name, "--help"]).output().unwrap();
        assert!(help.status.success() && String::from_utf8(help.stdout).unwrap().contains(name));
    }
    assert!(list.lines().count() >= 7);
    let help = Command::new(program()).args(["filter", "--help"]).output().unwrap();
    assert!(help.status.success());
    assert_eq!(String::from_utf8(help.stdout).unwrap(), list);
}

#[test]
fn a_program_of_somebody_elses_gets_its_arguments_and_without_any_none() {
    let folder = tempfile::tempdir().unwrap();
    let (program, says) = (folder.path().join("filter.sh"), folder.path().join("says"));
    std::fs::write(&program, format!("#!/bin/sh\necho \"$# $*\" >{}\n", says.display())).unwrap();
    std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::write(&says, "").unwrap();
    std::fs::set_permissions(&says, std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
    for (arguments, wanted) in [("", "0 \n"), ("=a=b,c=d", "1 a=b,c=d\n")] {
        let filter = format!("{}{arguments}", program.display());
        fails(free_port(), &[&filter], &[], &["sleep", "60"]);
        assert_eq!(std::fs::read_to_string(&says).unwrap(), wanted);
    }
}

/// A filter in another language (docs/protocol/filter.md).
#[test]
fn a_filter_in_python_rewrites_and_refuses_and_may_be_killed() {
    let site = Site::new();
    let port = free_port();
    let filter = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/filters/tag.py");
    let filter = format!("{filter}=value=seen,forbid=/private");
    let chain = Chain::start(port, &["persist", &filter, "prior"], &strs(&site.nginx(port)));
    let mut client = chain.client();
    for _ in 0..5 {
        let response = client.get("/small");
        assert_eq!((&response.body[..], response.field("x-tag").as_deref()), (&b"small\n"[..], Some("seen")));
    }
    let long = "y".repeat(3000);
    client.send(format!("GET /small HTTP/1.1\r\nHost: test\r\nX: {long}\r\n\r\n").as_bytes());
    assert_eq!(client.response(false).field("x-tag").as_deref(), Some("seen"));
    let pid = chain.process("python3 ");
    // SAFETY: a signal to a process of this test's own chain.
    unsafe { libc::kill(pid, libc::SIGKILL) };
    assert_eq!(client.get("/small").field("x-tag").as_deref(), Some("seen"));
    assert_eq!(client.get("/private/x").status, 403);
    assert!(client.is_ended());
    assert_eq!(chain.get("/small").status, 200);
    chain.stop();
}

/// A program of somebody's own gives up root before it begins, unless it would not begin then. This test needs root.
#[test]
fn a_filter_of_ones_own_is_not_root_where_the_filters_user_may_execute_it() {
    use std::os::unix::fs::PermissionsExt;
    let site = Site::new();
    let directory = tempfile::tempdir_in("/tmp").unwrap();
    let filter = directory.path().join("tag.py");
    let source =
        include_str!("../../../examples/filters/tag.py").replace("/usr/bin/env python3", "/usr/bin/python3");
    std::fs::write(&filter, source).unwrap();
    // The modes of its directory and its own; `chmod u+x` alone left it unable to begin.
    for (around, mode, user) in [(0o755, 0o755, 65534), (0o700, 0o755, 0), (0o755, 0o744, 0)] {
        std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(around)).unwrap();
        std::fs::set_permissions(&filter, PermissionsExt::from_mode(mode)).unwrap();
        let port = free_port();
        let chain =
            Chain::start(port, &[&format!("{}=value=seen", filter.display())], &strs(&site.nginx(port)));
        assert_eq!(chain.get("/small").field("x-tag").as_deref(), Some("seen"));
        let pid = chain.process("tag.py value=seen");
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        for line in [format!("Uid:\t{user}\t{user}\t{user}\t{user}"), "NoNewPrivs:\t1".to_owned()] {
            assert!(status.contains(&line), "{line}: {status}");
        }
        assert_eq!(
            chain.errors().contains("keeps root: --filter-user may not read and execute it"),
            user == 0
        );
        chain.stop();
    }
}

/// The document's table of bytes is the one that the code writes.
#[test]
fn the_protocol_document_names_the_sizes_that_the_code_has() {
    use tidegate_conditioning::{ledger, neighbours::word, wire};
    let text = include_str!("../../../docs/protocol/filter.md");
    for size in [wire::INLINE_BYTES, wire::REQUEST_BYTES, ledger::SLOTS as usize, wire::NOTICE_BYTES] {
        assert!(text.contains(&size.to_string()), "{size}");
    }
    assert!(text.contains(&format!("| {} | … |", wire::HEADER_BYTES)));
    assert!(text.contains(&format!("up to {} bytes of UTF-8", word::REASON_BYTES - 1)));
}

#[test]
fn a_chain_that_listens_twice_serves_both_addresses() {
    let site = Site::new();
    let (port, other) = (free_port(), free_port());
    let addresses = [format!("127.0.0.1:{port}"), format!("[::1]:{other}")];
    let command = Chain::listening(&addresses, &["package", "persist", "prior"], &strs(&site.nginx(port)));
    let chain = Chain::once_it_serves(command, port);
    assert_eq!(chain.get("/small").body, b"small\n");
    let mut client = Client::try_connect(([0, 0, 0, 0, 0, 0, 0, 1], other).into()).unwrap();
    for _ in 0..3 {
        assert_eq!(client.get("/small").body, b"small\n");
    }
    // nginx listens for IPv4 only.
    assert_eq!(client.get("/small").field("x-peer").unwrap(), "0.0.0.0");
    chain.stop();
}

/// Its clients see nothing but an error of their own.
#[test]
fn that_clients_speak_tls_is_said_once() {
    let site = Site::new();
    let port = free_port();
    let chain = Chain::start(port, &["package", "persist"], &strs(&site.nginx(port)));
    for _ in 0..3 {
        let mut client = chain.client();
        client.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03");
        assert_eq!(client.response(false).status, 400);
    }
    assert_eq!(chain.errors().matches("speaks TLS").count(), 1);
    assert_eq!(chain.get("/index.html").status, 200);
    chain.stop();
}

#[test]
fn filters_and_server_run_in_batches_unless_told_to_preempt() {
    let site = Site::new();
    // proc_pid_stat(5): field 41 is the policy.
    let policy = |pid: i32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let fields = stat.rsplit(')').next().unwrap().split_whitespace().map(str::to_owned);
        fields.collect::<Vec<_>>()[38].clone()
    };
    for (option, expected) in [("--backlog=100", "3"), ("--preempt", "0")] {
        let port = free_port();
        let mut command = Command::new(program());
        let listen = format!("127.0.0.1:{port}");
        command.args(["condition", "--listen", &listen, option, "--"]).args(site.nginx(port));
        command.env("TIDEGATE_PRELOAD", library("libtidegate_preload.so")).stdin(Stdio::null());
        // SAFETY: setsid is async-signal-safe.
        unsafe {
            command.pre_exec(|| {
                libc::setsid();
                Ok(())
            })
        };
        let chain = Chain::once_it_serves(command, port);
        for process in ["cc-package ", "nginx: worker"] {
            assert_eq!(policy(chain.process(process)), expected, "{process} with {option}");
        }
        chain.stop();
    }
}
