//! What a person at a terminal meets: errors of one clear line, exit codes, help, completions, manual pages.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tidegate_e2e::{Client, Origin, Process, Reply, eventually, free_port};

const COMMANDS: [&[&str]; 23] = [
    &["run"],
    &["check"],
    &["status"],
    &["top"],
    &["reload"],
    &["drain"],
    &["cache", "list"],
    &["cache", "purge"],
    &["cache", "save"],
    &["block", "add"],
    &["block", "list"],
    &["block", "remove"],
    &["block", "explain"],
    &["gate", "attach"],
    &["gate", "check"],
    &["gate", "detach"],
    &["gate", "show"],
    &["completions"],
    &["man"],
    &["fetch"],
    &["gateway"],
    &["intercept"],
    &["condition"],
];

/// What an ended command left.
#[derive(Debug)]
struct Ended {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Ended {
    /// The only line on standard error.
    #[track_caller]
    fn line(&self) -> &str {
        assert_eq!(self.err.trim_end().lines().count(), 1, "{self:?}");
        self.err.trim_end()
    }
}

fn spawn(arguments: &[&str]) -> Process {
    let child = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    Process(child.unwrap())
}

/// Runs a command that must end by itself.
#[track_caller]
fn tidegate(arguments: &[&str]) -> Ended {
    let mut process = spawn(arguments);
    let read = |mut pipe: Box<dyn std::io::Read + Send>| {
        std::thread::spawn(move || {
            let mut text = String::new();
            pipe.read_to_string(&mut text).unwrap();
            text
        })
    };
    let out = read(Box::new(process.0.stdout.take().unwrap()));
    let err = read(Box::new(process.0.stderr.take().unwrap()));
    let status = eventually("it ends", || process.0.try_wait().unwrap());
    Ended { code: status.code(), out: out.join().unwrap(), err: err.join().unwrap() }
}

fn local(port: u16) -> String {
    format!("127.0.0.1:{port}")
}

fn write(folder: &Path, text: &str) -> String {
    let file = folder.join("tidegate.toml");
    std::fs::write(&file, text).unwrap();
    file.to_str().unwrap().to_owned()
}

/// A configuration in front of `server`.
fn config(listen: &str, server: &str, upstream_lines: &str) -> String {
    format!(
        "[[listen]]\naddress = \"{listen}\"\n[admin]\naddress = \"{}\"\n[cache]\nmemory = \"8MiB\"\n\
         [[upstream]]\nname = \"app\"\nservers = [\"{server}\"]\n{upstream_lines}\n[[route]]\nupstream = \"app\"\n",
        local(free_port())
    )
}

#[test]
fn wrong_configuration_each_error_is_a_line_with_its_place_and_the_exit_code_is_1() {
    let folder = tempfile::tempdir().unwrap();
    let file = write(folder.path(), "[cache]\nmemroy = \"1GiB\"\n\n[limits]\nfields = 0\n");
    let expected = [
        format!(
            "{file}:2:1: cache.memroy: unknown key in [cache], expected one of memory, path, max_object, client_directives; did you mean \"memory\"?"
        ),
        format!("{file}:5:10: limits.fields: expected an integer from 1 to 10000, not 0"),
    ];
    for arguments in [&["check", &file][..], &["run", "--config", &file]] {
        let ended = tidegate(arguments);
        assert_eq!(
            (ended.code, ended.err.lines().collect::<Vec<_>>()),
            (Some(1), expected.iter().map(String::as_str).collect())
        );
    }
    let ended = tidegate(&["check", "--json", &file]);
    let findings: Value = serde_json::from_str(&ended.out).unwrap();
    assert_eq!(ended.code, Some(1));
    assert_eq!(findings[0]["line"], 2);
    assert_eq!(findings[0]["hint"], "did you mean \"memory\"?");
    assert_eq!((&findings[1]["severity"], &findings[1]["column"]), (&"error".into(), &10.into()));
}

#[test]
fn hold_depth_is_bounded_as_in_the_configuration() {
    let ended = tidegate(&["gate", "attach", "none0", "--hold-depth", "99999"]);
    assert!(ended.code == Some(2) && ended.err.contains("0..=65535"), "{ended:?}");
}

#[test]
fn configuration_that_cannot_be_read_is_one_line_and_exit_code_1() {
    for arguments in [["check", "/does/not/exist.toml"], ["check", "/"]] {
        let ended = tidegate(&arguments);
        assert_eq!(ended.code, Some(1));
        assert!(
            ended.line().starts_with(&format!("{}: cannot read the configuration: ", arguments[1])),
            "{ended:?}"
        );
    }
}

#[test]
fn check_of_a_file_without_listener_or_route_names_both_and_run_takes_them_from_the_command_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = write(folder.path(), "[cache]\nmemory = \"8MiB\"\n");
    for arguments in [&["check", &file][..], &["run", "--config", &file]] {
        let ended = tidegate(arguments);
        assert_eq!(ended.code, Some(1));
        let lines: Vec<_> = ended.err.lines().collect();
        assert_eq!(
            lines[0],
            format!("{file}: nowhere to listen; add a [[listen]], or start with --listen ADDR")
        );
        assert!(lines[1].starts_with(&format!("{file}: nothing to serve; add a [[route]]")), "{lines:?}");
    }
    let (listen, admin) = (local(free_port()), local(free_port()));
    let root = folder.path().to_str().unwrap();
    let _running = spawn(&["run", "--config", &file, "--listen", &listen, "--admin", &admin, "--root", root]);
    eventually("it listens", || Client::try_connect(listen.parse().unwrap()).ok());
}

#[test]
fn check_warns_of_what_has_no_effect_and_succeeds() {
    let folder = tempfile::tempdir().unwrap();
    let text = config(":0", "127.0.0.1:1", "") + "[log]\nformat = \"json\"\n";
    let file = write(folder.path(), &text);
    let ended = tidegate(&["check", &file]);
    assert_eq!((ended.code, ended.out), (Some(0), format!("{file}: no errors\n")));
    assert!(ended.err.starts_with(&format!("warning: {file}:")), "{}", ended.err);
    assert!(ended.err.contains("log.format has no effect without log.access"));
    let json: Value = serde_json::from_str(&tidegate(&["check", "--json", &file]).out).unwrap();
    assert_eq!(json[0]["severity"], "warning");
}

#[test]
fn check_of_a_file_whose_host_lacks_what_it_names_warns_of_each() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let text = config(":0", "127.0.0.1:1", "")
        + &format!("[log]\naccess = {:?}\n[gate]\ninterfaces = [\"none0\"]\n", at("logs/access.log"));
    let text = text.replace("[cache]\n", &format!("[cache]\npath = {:?}\n", at("cach")));
    let ended = tidegate(&["check", &write(folder.path(), &text)]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    for wanted in [
        "gate.interfaces: there is no network interface \"none0\" here",
        "log.access: there is no folder",
        "cache.path: there is no",
    ] {
        assert!(ended.err.contains(wanted), "{wanted}: {}", ended.err);
    }
}

/// A start with it used up memory or disk for as long as that took.
#[test]
fn cache_for_which_the_host_has_no_room_is_warned_of_with_its_place_and_refused_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let text = config(&local(free_port()), "127.0.0.1:1", "").replace("8MiB", "512GiB");
    let file = write(folder.path(), &text);
    let place = format!("{file}:{}: cache.memory: expected at most ", place_of(&file, "\"512GiB\""));
    let checked = tidegate(&["check", &file]);
    assert!(
        checked.code == Some(0) && checked.line().starts_with(&format!("warning: {place}")),
        "{checked:?}"
    );
    assert!(
        checked.line().ends_with(" MiB, the memory of this host; tidegate does not start with more"),
        "{checked:?}"
    );
    let started = tidegate(&["run", "--config", &file]);
    assert!(started.code == Some(1) && started.line().starts_with(&place), "{started:?}");
}

#[test]
fn check_reads_the_key_file_of_a_trickles_listener_and_tells_who_else_can() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys");
    let text = format!("[[listen]]\naddress = \":4000\"\nprotocol = \"trickles\"\nkeys = {keys:?}\n");
    let file = write(folder.path(), &(text + "[[route]]\nroot = \"/\"\n"));
    let warned = || {
        let ended = tidegate(&["check", &file]);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        ended.err
    };
    assert!(warned().contains("listen.keys: cannot read the key file"));
    let refused = |said: &str| {
        let ended = tidegate(&["check", &file]);
        assert_eq!(ended.code, Some(1), "run would refuse it: {ended:?}");
        let error = format!("{file}:4:8: listen.keys: {}", said.replace("KEYS", &keys.display().to_string()));
        assert!(ended.err.lines().any(|line| line.starts_with(&error)), "{ended:?}");
    };
    rustix::fs::mknodat(rustix::fs::CWD, &keys, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    // Nothing waits for a pipe.
    refused("cannot read the key file KEYS: it is no regular file");
    std::fs::remove_file(&keys).unwrap();
    std::fs::write(&keys, [0xff; 33]).unwrap();
    refused("cannot read the key file KEYS: stream did not contain valid UTF-8");
    std::fs::write(&keys, "1 none\n").unwrap();
    refused("key file KEYS: line 1: expected an epoch");
    std::fs::write(&keys, format!("1 {}\n", "5f".repeat(16))).unwrap();
    for (mode, open) in [(0o644, true), (0o640, false), (0o600, false)] {
        std::fs::set_permissions(&keys, std::fs::Permissions::from_mode(mode)).unwrap();
        let warned = warned();
        assert_eq!(warned.contains("every user of this host can read the key file"), open, "{warned}");
        assert_eq!(warned.is_empty(), !open, "{warned}");
    }
}

#[test]
fn admin_server_on_a_listeners_address_is_refused_with_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let listen = local(free_port());
    let text = config(&listen, "127.0.0.1:1", "");
    let admin = text.lines().nth(3).unwrap();
    let file = write(folder.path(), &text.replace(admin, &format!("address = {listen:?}")));
    for arguments in [&["check", &file][..], &["run", "--config", &file, "--allow-unreachable"]] {
        let ended = tidegate(arguments);
        assert_eq!(ended.code, Some(1));
        assert!(ended.line().starts_with(&format!("{file}:4:11: admin.address: ")), "{ended:?}");
    }
}

#[test]
fn port_in_use_is_one_line_that_names_the_address_as_written_and_exit_code_1() {
    let port = free_port();
    let _taken = TcpListener::bind(local(port)).unwrap();
    let (admin, root) = (local(free_port()), "/");
    for written in [local(port), format!(":{port}"), format!("0.0.0.0:{port}")] {
        let ended = tidegate(&["run", "--listen", &written, "--root", root, "--admin", &admin]);
        assert_eq!(ended.code, Some(1));
        let last = ended.err.lines().last().unwrap();
        let wanted = format!(
            "error: cannot listen on {written}: Address already in use (os error 98); end the program"
        );
        assert!(last.starts_with(&wanted), "{ended:?}");
        assert_eq!(ended.line(), last);
    }
}

/// Line and column, from 1, at which a text stands in a file first.
fn place_of(file: &str, text: &str) -> String {
    let content = std::fs::read_to_string(file).unwrap();
    let (before, _) = content.split_once(text).unwrap();
    let line_start = before.rfind('\n').map_or(0, |at| at + 1);
    format!("{}:{}", before.matches('\n').count() + 1, before.len() - line_start + 1)
}

#[test]
fn what_the_file_says_and_a_start_finds_wrong_is_named_by_its_place_and_key() {
    let folder = tempfile::tempdir().unwrap();
    let (taken, free) = (TcpListener::bind("127.0.0.1:0").unwrap(), local(free_port()));
    let taken = taken.local_addr().unwrap().to_string();
    let root = folder.path().to_str().unwrap().to_owned();
    for (listen, admin, key) in [(&taken, &free, "listen.address"), (&free, &taken, "admin.address")] {
        let text = format!(
            "[[listen]]\naddress = {listen:?}\n[admin]\naddress = {admin:?}\n[[route]]\nhost = \"*\"\nroot = {root:?}\n"
        );
        let file = write(folder.path(), &text);
        let ended = tidegate(&["run", "--config", &file]);
        assert_eq!(ended.code, Some(1));
        let place = place_of(&file, &format!("{taken:?}"));
        assert!(
            ended.line().starts_with(&format!("{file}:{place}: {key}: cannot listen on {taken}")),
            "{ended:?}"
        );
    }
    // What the command line says is no fault of the file.
    let text = format!("[[listen]]\naddress = {free:?}\n[[route]]\nhost = \"*\"\nroot = {root:?}\n");
    let file = write(folder.path(), &text);
    let ended = tidegate(&["run", "--config", &file, "--listen", &taken, "--admin", &local(free_port())]);
    assert!(ended.line().starts_with(&format!("error: cannot listen on {taken}: ")), "{ended:?}");
}

#[test]
fn what_cannot_be_written_to_is_said_with_its_place_and_what_is_wanted() {
    let folder = tempfile::tempdir().unwrap();
    // Nobody makes anything in there, whatever user the tests run as.
    let nowhere = "/proc/nowhere";
    for (table, key, wanted, hint) in [
        (
            "cache",
            "path",
            "cannot open the cache: /proc/nowhere: ",
            "cache.path has to be a directory that this",
        ),
        ("log", "access", "cannot open the access log /proc/nowhere: ", "it has to be a file that this"),
    ] {
        let text = format!(
            "[[listen]]\naddress = {:?}\n[admin]\naddress = {:?}\n[[route]]\nroot = \"/\"\n[{table}]\n{key} = {nowhere:?}\n",
            local(free_port()),
            local(free_port()),
        );
        let file = write(folder.path(), &text);
        let ended = tidegate(&["run", "--config", &file]);
        assert_eq!(ended.code, Some(1), "{ended:?}");
        let last = ended.err.lines().last().unwrap();
        assert!(
            last.starts_with(&format!("{file}:8:{}: {table}.{key}: {wanted}", key.len() + 4)),
            "{ended:?}"
        );
        assert!(last.contains(&format!("; {hint}")), "{ended:?}");
    }
}

#[test]
fn admin_port_in_use_is_one_line_that_names_the_address_as_written_and_exit_code_1() {
    let port = free_port();
    let _taken = TcpListener::bind(local(port)).unwrap();
    for written in [local(port), format!(":{port}")] {
        let ended = tidegate(&["run", "--listen", &local(free_port()), "--root", "/", "--admin", &written]);
        assert_eq!(ended.code, Some(1));
        let wanted =
            format!("error: cannot listen on {written} for the admin server: Address already in use");
        assert!(ended.line().starts_with(&wanted), "{ended:?}");
    }
}

#[test]
fn unreadable_root_is_one_line_and_exit_code_1() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "no directory").unwrap();
    for root in [Path::new("/does/not/exist"), &file] {
        let ended = tidegate(&["run", "--listen", ":0", "--admin", ":0", "--root", root.to_str().unwrap()]);
        assert_eq!(ended.code, Some(1));
        let wanted = format!("error: cannot read root {}: ", root.display());
        assert!(ended.line().starts_with(&wanted), "{ended:?}");
    }
}

#[test]
fn unreachable_upstream_at_the_start_is_one_line_and_exit_code_1_unless_it_is_not_required() {
    let folder = tempfile::tempdir().unwrap();
    let nobody = local(free_port());
    let (listen, admin) = (local(free_port()), local(free_port()));
    let url = format!("http://{nobody}");
    let ended = tidegate(&["run", "--listen", &listen, "--admin", &admin, "--upstream", &url]);
    assert_eq!(ended.code, Some(1));
    let wanted = format!(
        "error: the upstream is unreachable ({nobody}: Connection refused (os error 111)); start it first"
    );
    assert!(ended.line().starts_with(&wanted), "{ended:?}");

    let file = write(folder.path(), &config(&listen, &nobody, ""));
    let ended = tidegate(&["run", "--config", &file]);
    assert_eq!(ended.code, Some(1));
    assert!(
        ended.line().starts_with(&format!(
            "{file}:{}: upstream.servers: upstream app is unreachable ({nobody}: ",
            place_of(&file, &format!("{nobody:?}"))
        )),
        "{ended:?}"
    );

    let root = folder.path().to_str().unwrap();
    for (lines, further) in [
        ("require = false", &[][..]),
        ("", &["--allow-unreachable"]),
        // The command line's root takes the place of the file's routes: nobody needs the upstream.
        ("", &["--root", root]),
    ] {
        let listen = local(free_port());
        let file = write(folder.path(), &config(&listen, &nobody, lines));
        let _running = spawn(&[&["run", "--config", &file], further].concat());
        eventually("it listens", || Client::try_connect(listen.parse().unwrap()).ok());
    }
}

#[test]
fn port_alone_listens_on_ipv4_and_ipv6() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("page.txt"), "served").unwrap();
    let (port, admin) = (free_port(), free_port());
    let root = folder.path().to_str().unwrap();
    let _running =
        spawn(&["run", "--listen", &format!(":{port}"), "--admin", &format!(":{admin}"), "--root", root]);
    let mut hosts = vec!["127.0.0.1"];
    if Path::new("/proc/net/if_inet6").exists() {
        hosts.push("[::1]");
    }
    for host in hosts {
        let address: SocketAddr = format!("{host}:{port}").parse().unwrap();
        let mut client = eventually("it listens", || Client::try_connect(address).ok());
        assert_eq!(client.get("/page.txt").text(), "served", "{host}");
        let admin: SocketAddr = format!("{host}:{admin}").parse().unwrap();
        let mut client = eventually("admin listens", || Client::try_connect(admin).ok());
        client.send(format!("GET /status HTTP/1.1\r\nHost: {host}\r\n\r\n"));
        assert_eq!(client.response().status, 200, "{host}");
    }
}

#[test]
fn port_alone_a_client_over_ipv4_is_known_by_its_ipv4_address() {
    let origin = Origin::start(|request| Reply::ok(request.field("X-Forwarded-For")));
    let (port, admin) = (free_port(), local(free_port()));
    let url = format!("http://{}", origin.address());
    let _running = spawn(&["run", "--listen", &format!(":{port}"), "--admin", &admin, "--upstream", &url]);
    let mut client = eventually("it listens", || Client::try_connect(local(port).parse().unwrap()).ok());
    assert_eq!(client.get("/").text(), "127.0.0.1");
}

#[test]
fn upstream_by_a_name_with_several_addresses_the_one_that_answers_is_used() {
    // On most hosts localhost is ::1 and 127.0.0.1, the origin is on the latter only.
    let origin = Origin::start(|_| Reply::ok("found"));
    let (listen, admin) = (local(free_port()), local(free_port()));
    let url = format!("http://localhost:{}", origin.address().port());
    let _running = spawn(&["run", "--listen", &listen, "--admin", &admin, "--upstream", &url]);
    let mut client = eventually("it listens", || Client::try_connect(listen.parse().unwrap()).ok());
    for _ in 0..4 {
        assert_eq!(client.get("/").text(), "found");
    }
}

#[test]
fn usage_errors_are_one_line_with_a_hint_and_exit_code_2() {
    for (arguments, wanted) in [
        (&["--nope"][..], "error: unexpected argument '--nope' found; see 'tidegate --help'"),
        (
            &["run", "--lsiten", ":1"],
            "error: unexpected argument '--lsiten' found; a similar argument exists: '--listen'; see 'tidegate run --help'",
        ),
        (
            &["cach"],
            "error: unrecognized subcommand 'cach'; a similar subcommand exists: 'cache'; see 'tidegate --help'",
        ),
        (
            &["cache", "purge"],
            "error: the following required arguments were not provided: <PATTERN>; see 'tidegate cache purge --help'",
        ),
        (
            &["run", "--workers", "0"],
            "error: invalid value '0' for '--workers <N>': 0 is not in 1..=1024; see 'tidegate run --help'",
        ),
        (
            &["run", "--upstream", "http://a", "--root", "b"],
            "error: the argument '--upstream <URL>' cannot be used with '--root <DIR>'; see 'tidegate run --help'",
        ),
        (
            &["run"],
            "error: nowhere to listen and nothing to serve; give --listen ADDR and --upstream URL or --root DIR, or --config FILE",
        ),
        (
            &["run", "--root", "/"],
            "error: nowhere to listen; give --listen ADDR and --upstream URL or --root DIR, or --config FILE",
        ),
        (&["run", "--listen", "8080"], "error: --listen: expected ADDRESS:PORT or :PORT, not \"8080\""),
        (
            &["run", "--listen", ":0", "--upstream", "https://a/b"],
            "error: --upstream: expected HOST:PORT, http://HOST:PORT, https://HOST:PORT or unix:/PATH without a path of a URL, not \"https://a/b\"",
        ),
        (
            &["cache", "purge", "nonsense"],
            "error: pattern \"nonsense\": expected http[s]://HOST/PATH, http[s]://HOST/PATH*, /PATH, /PATH*, file:/PATH, file:/PATH*, tag:NAME or *",
        ),
    ] {
        let ended = tidegate(arguments);
        assert_eq!((ended.code, ended.line()), (Some(2), wanted), "{arguments:?}");
    }
    // Without a command the commands are listed.
    let ended = tidegate(&[]);
    assert!(ended.code == Some(2) && ended.err.contains("Commands:"), "{ended:?}");
}

#[test]
fn every_command_has_help_with_an_example() {
    for command in COMMANDS {
        let ended = tidegate(&[command, &["--help"]].concat());
        assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""), "{command:?}");
        let example = format!("tidegate {}", command.join(" "));
        assert!(ended.out.contains("Example") && ended.out.contains(&example), "{command:?}: {}", ended.out);
    }
    assert!(tidegate(&["--version"]).out.starts_with("tidegate "));
}

#[test]
fn commands_that_ask_a_server_without_one_are_one_line_and_exit_code_1() {
    let nobody = local(free_port());
    // Not a tidegate: an origin that answers everything with a text.
    let origin = Origin::start(|_| Reply::ok("hello"));
    let other = origin.address().to_string();
    for command in [
        &["status"][..],
        &["reload"],
        &["drain"],
        &["cache", "list"],
        &["cache", "save"],
        &["cache", "purge", "*"],
    ] {
        let ended = tidegate(&[command, &["--admin", &nobody]].concat());
        assert_eq!(ended.code, Some(1), "{ended:?}");
        assert!(
            ended.line().starts_with(&format!(
                "error: no tidegate answers at {nobody}: Connection refused (os error "
            )),
            "{ended:?}"
        );
        let ended = tidegate(&[command, &["--admin", &other]].concat());
        assert_eq!(ended.code, Some(1), "{ended:?}");
        assert!(
            ended.line().starts_with(&format!("error: {other} is not a tidegate's admin server")),
            "{ended:?}"
        );
    }
}

#[test]
fn completions_know_every_command() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let ended = tidegate(&["completions", shell]);
        assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""));
        for command in COMMANDS {
            assert!(ended.out.contains(command[0]), "{shell}: {command:?}");
        }
    }
    assert_eq!(tidegate(&["completions", "tcsh"]).code, Some(2));
}

#[test]
fn manual_pages_are_written_for_every_command() {
    let folder = tempfile::tempdir().unwrap();
    // It is not there yet.
    let pages = folder.path().join("man1");
    let ended = tidegate(&["man", "--out", pages.to_str().unwrap()]);
    let written = std::fs::read_dir(&pages).unwrap().count();
    assert_eq!(
        (ended.code, ended.out),
        (Some(0), format!("{written} manual pages written to {}\n", pages.display()))
    );
    for command in COMMANDS {
        let page = pages.join(format!("tidegate-{}.1", command.join("-")));
        let text =
            std::fs::read_to_string(&page).unwrap_or_else(|error| panic!("{}: {error}", page.display()));
        for wanted in [".SH SYNOPSIS\ntidegate", ".SH EXAMPLES", ".SH \"SEE ALSO\""] {
            assert!(text.contains(wanted), "{}: {wanted}: {text}", page.display());
        }
    }
    let ended = tidegate(&["man", "--out", "/does/not/exist"]);
    assert_eq!(ended.code, Some(1));
    assert!(ended.line().starts_with("error: cannot write manual pages to /does/not/exist: "), "{ended:?}");
}

#[test]
fn schema_is_the_one_of_the_guide() {
    let committed = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide/tidegate.schema.json");
    let ended = tidegate(&["check", "--schema"]);
    assert_eq!(ended.out, std::fs::read_to_string(committed).unwrap());
    assert!(serde_json::from_str::<Value>(&ended.out).unwrap()["properties"]["cache"].is_object());
}

#[test]
fn standard_output_whose_reader_is_gone_is_no_error() {
    let mut process = spawn(&["check", "--schema"]);
    drop(process.0.stdout.take());
    let status = eventually("it ends", || process.0.try_wait().unwrap());
    let mut err = String::new();
    std::io::Read::read_to_string(process.0.stderr.as_mut().unwrap(), &mut err).unwrap();
    assert_eq!((status.code(), err.as_str()), (Some(0), ""));
}

/// The launcher's lines and the filters' own.
#[test]
fn a_chain_says_its_lines_in_the_form_that_was_asked_for() {
    let (address, port) = (local(free_port()), free_port().to_string());
    let server =
        "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(60)";
    let mut chain = spawn(
        &[
            &[
                "condition",
                "--log",
                "json",
                "--filter",
                "package",
                "--listen",
                &address,
                "--server-port",
                &port,
            ],
            &["--via", "seccomp", "--", "python3", "-c", server, &port][..],
        ]
        .concat(),
    );
    let mut lines = BufReader::new(chain.0.stderr.take().unwrap()).lines();
    let mut message = || {
        let line: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        line["fields"]["message"].as_str().unwrap().to_owned()
    };
    let said = message();
    assert!(
        said.starts_with(&format!("tidegate: listening on {address}, through package, for python3 ")),
        "{said}"
    );
    let signal = |signal| kill_process(Pid::from_child(&chain.0), signal).unwrap();
    signal(Signal::USR1);
    let said = message();
    assert!(said.starts_with("package: "), "{said}");
    signal(Signal::TERM);
    assert_eq!(eventually("it ends", || chain.0.try_wait().unwrap()).code(), Some(128 + 15));
}

#[test]
fn interception_that_cannot_start_says_what_helps() {
    let (here, free) = (local(8054), local(free_port()));
    for (listen, from, code, said) in [
        ("0.0.0.0:8053", "0.0.0.0:8054", 2, "expected one address of this host"),
        ("0.0.0.0:8053", "127.0.0.1:8053", 2, "expected another port"),
        ("0.0.0.0:0", here.as_str(), 2, "expected definite ports"),
        ("[::]:8053", here.as_str(), 2, "the same family"),
        ("0.0.0.0:40000", here.as_str(), 1, "choose a lower one"),
        (free.as_str(), "198.51.100.77:8054", 1, "expected addresses of this host"),
    ] {
        let ended = tidegate(&["intercept", "--listen", listen, "--from", from]);
        assert_eq!(ended.code, Some(code), "{ended:?}");
        assert!(ended.line().contains(said), "{listen} {from}: {ended:?}");
    }
}

#[test]
fn dhttp_listener_with_port_0_is_told_which_ports_there_are() {
    let folder = tempfile::tempdir().unwrap();
    let config = "[[listen]]\naddress = \"127.0.0.1:0\"\nprotocol = \"dhttp\"\n[[upstream]]\nname = \"a\"\nservers = [\"http://127.0.0.1:1\"]\n";
    let ended = tidegate(&["check", &write(folder.path(), config)]);
    assert!(
        ended.err.contains("name one from 1 to 32767") && !ended.err.contains("choose a lower one"),
        "{ended:?}"
    );
}
