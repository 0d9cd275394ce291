//! Overload control as an operator meets it: `tidegate gate`, `tidegate block`, and the rules of `tidegate run`.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

#[path = "../../gate/tests/support/mod.rs"]
mod support;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use support::{Pair, SERVER4, connect, ip, is_answered, needs_root};
use tidegate_e2e::{Process, within};

/// Programs take the verifier a second of a processor, which a busy machine gives in its own time.
const PATIENCE: Duration = Duration::from_secs(120);

fn eventually<T>(what: &str, probe: impl FnMut() -> Option<T>) -> T {
    within(PATIENCE, what, probe)
}

/// In the calling thread's network namespace.
fn spawn(arguments: &[&str]) -> Process {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    Process(command.args(arguments).stdin(Stdio::null()).spawn().unwrap())
}

fn tidegate(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tidegate")).args(arguments).stdin(Stdio::null()).output().unwrap()
}

#[track_caller]
fn json(arguments: &[&str]) -> Value {
    let output = tidegate(arguments);
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The only line on standard error of a command that failed.
#[track_caller]
fn error(arguments: &[&str]) -> String {
    let output = tidegate(arguments);
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && text.lines().count() == 1, "{arguments:?}: {text}");
    text.trim_end().to_owned()
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn with(name: &str, text: &str) -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        std::fs::write(folder.path(name), text).unwrap();
        folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn name(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }
}

fn gates() -> Vec<Value> {
    let output = tidegate(&["gate", "show", "--json"]);
    if !output.status.success() {
        return Vec::new();
    }
    serde_json::from_slice::<Value>(&output.stdout).unwrap().as_array().unwrap().clone()
}

/// What the kernel has on the server's interface.
fn attached() -> bool {
    let output = Command::new("ip").args(["-d", "link", "show", "gate0"]).output().unwrap();
    String::from_utf8_lossy(&output.stdout).contains("prog/xdp")
}

#[test]
fn gate_is_attached_before_any_server_shown_fed_and_detached() {
    needs_root();
    let pair = Pair::new();
    let folder = Folder::with(
        "gate.toml",
        "[[connection]]\ndestination = \"*:80\"\nsource = \"10.77.0.4\"\nrate = 0.001\nburst = 2\n\
         [[request]]\npath = \"*noaccess*\"\naction = \"reset\"\n\
         [[request]]\npath = \"/busy\"\naction = \"refuse\"\n[[request]]\npath = \"/shop/*\"\npriority = 1\n\
         [[request]]\npath = \"/a/b\"\n",
    );
    // Any server: it knows nothing of tidegate.
    let server = TcpListener::bind("0.0.0.0:80").unwrap();
    let to: SocketAddr = format!("{SERVER4}:80").parse().unwrap();
    let mut holder = spawn(&["gate", "attach", "gate0", "--config", &folder.name("gate.toml")]);
    let shown = eventually("it is attached", || gates().into_iter().next());
    assert_eq!(shown["interfaces"][0], "gate0");
    assert!(error(&["status"]).contains("`tidegate gate show`"), "there is no server to ask");
    let mechanisms = [0, 1, 2, 3, 4].map(|rule| shown["rules"][rule]["mechanism"].as_str().unwrap());
    // That server would not know of a 503 to be answered, nor of a priority; to be exempt takes no server.
    assert_eq!(mechanisms, ["xdp", "tc", "nobody", "nobody", "tc"]);
    let reset = pair.client.run(|| {
        let _two = [connect("10.77.0.4:0", to), connect("10.77.0.4:0", to)];
        assert!(!is_answered("10.77.0.4:0", to), "beyond its burst");
        let mut stream = connect("10.77.0.2:0", to);
        stream.write_all(b"GET /a/noaccess HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
        stream.read(&mut [0; 16])
    });
    assert_eq!(reset.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);

    json(&["block", "add", "10.77.0.3", "10.99.0.0/16", "--for", "1h", "--reason", "guessing", "--json"]);
    let list = json(&["block", "list", "--json"]);
    let row = list.as_array().unwrap().iter().find(|row| row["prefix"] == "10.77.0.3/32").unwrap();
    assert_eq!(row["reason"], "guessing");
    assert!(row["remaining_s"].as_u64().is_some_and(|left| (3500..=3600).contains(&left)), "{row}");
    assert!(!pair.client.run(|| is_answered("10.77.0.3:0", to)));
    json(&["block", "remove", "10.77.0.3", "--json"]);
    drop(pair.client.run(|| connect("10.77.0.3:0", to)));
    assert!(error(&["block", "remove", "10.77.0.3"]).contains("10.77.0.3/32 is not blocked"));

    assert!(error(&["gate", "attach", "gate0"]).contains("`gate0` already runs an XDP program"));
    assert!(error(&["gate", "attach", "none0"]).contains("no network interface `none0`"));
    assert!(tidegate(&["gate", "detach"]).status.success());
    assert!(eventually("the holder ends", || holder.0.try_wait().unwrap()).success());
    assert!(!attached());
    assert!(error(&["gate", "detach", "gate0"]).contains("no gate is attached to `gate0`"));
    assert!(error(&["gate", "show"]).contains("no gate is attached"));
    drop(server);
}

#[test]
fn a_file_is_checked_without_attaching_anything() {
    needs_root();
    let _pair = Pair::new();
    let folder = Folder::with(
        "gate.toml",
        "[[connection]]\ndestination = \"*:80\"\nrate = 5\nburst = 2\n[[request]]\npath = \"/busy\"\n\
         action = \"refuse\"\n[[request]]\npath = \"/cgi-bin/*\"\naction = \"reset\"\n",
    );
    let file = folder.name("gate.toml");
    let places = |arguments: &[&str]| {
        let checked = json(&[&["gate", "check", "gate0", "--config", &file, "--json"], arguments].concat());
        assert_eq!((checked["loaded"].as_bool(), &checked["reason"]), (Some(true), &Value::Null));
        [0, 1, 2].map(|rule| checked["rules"][rule]["mechanism"].as_str().unwrap().to_owned())
    };
    assert_eq!(places(&[]), ["xdp", "nobody", "tc"]);
    assert_eq!(places(&["--run"]), ["xdp", "server", "tc"]);
    let output = tidegate(&["gate", "check", "--config", &file]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.starts_with("This kernel takes the programs"), "{text}");
    assert!(text.contains("*:80 from * rate=5 burst=2") && text.contains("only a server can answer 503"));
    assert!(!attached() && gates().is_empty());
    assert!(error(&["gate", "check", "none0", "--config", &file]).contains("no network interface `none0`"));
    std::fs::write(folder.path("bad.toml"), "[[connection]]\ndestination = \"ten\"\nrate = 1\nburst = 2\n")
        .unwrap();
    assert!(error(&["gate", "check", "--config", &folder.name("bad.toml")]).contains("bad.toml:2:"));
}

#[test]
fn lists_that_do_not_fit_are_told_of_by_name_or_by_what_was_evicted() {
    needs_root();
    let _pair = Pair::new();
    let folder = Folder::with("file", "");
    let _holder = spawn(&["gate", "attach", "gate0"]);
    eventually("it is attached", || (interfaces() == ["gate0"]).then_some(()));
    let add = |name: &str, lines: &mut dyn Iterator<Item = String>| {
        std::fs::write(folder.path(name), lines.collect::<String>()).unwrap();
        tidegate(&["block", "add", "--file", &folder.name(name)])
    };
    let line = |number: u32, length: u32| format!("{}/{length}\n", std::net::Ipv4Addr::from(number));
    let refused = add("nets.list", &mut (0..65_537).map(|net| line((20 << 24) + (net << 8), 24)));
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && said.contains("nets.list: the list of blocked prefixes"), "{said}");
    let taken = add("hosts.list", &mut (0..1_000_000).map(|host| line((20 << 24) + host, 32)));
    assert!(taken.status.success() && taken.stderr.is_empty(), "{taken:?}");
    let taken = tidegate(&["block", "add", "10.9.0.1"]);
    let said = String::from_utf8(taken.stderr).unwrap();
    assert!(taken.status.success() && said.contains("full, at 1000000"), "{said}");
    assert!(said.contains(": 10000 that had not been heard of"), "{said}");
}

#[test]
fn a_tunnel_is_refused_with_one_line_by_the_holder_and_by_a_server() {
    needs_root();
    let _pair = Pair::new();
    ip("tuntap add dev tun9 mode tun");
    let folder = Folder::with("file", "x");
    let rules = RULES.replace("ROOT", &folder.name(""));
    std::fs::write(folder.path("t.toml"), rules.replace("[gate]\n", "[gate]\ninterfaces = [\"tun9\"]\n"))
        .unwrap();
    let config = folder.name("t.toml");
    for arguments in [["gate", "attach", "tun9"], ["run", "--config", &config]] {
        let refused = error(&arguments);
        assert!(refused.contains("`tun9` carries no Ethernet frames"), "{arguments:?}: {refused}");
    }
}

fn make_second_interface() {
    ip("link add gate2 type veth peer name gate3");
    ip("link set gate2 up");
}

/// On which interfaces there are gates.
fn interfaces() -> Vec<String> {
    let names = |gate: &Value| gate["interfaces"].as_array().unwrap().clone();
    gates().iter().flat_map(names).map(|name| name.as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_gate_outlives_an_interface_that_vanishes_and_fails_when_none_is_left() {
    needs_root();
    let _pair = Pair::new();
    make_second_interface();
    let mut holder = spawn(&["gate", "attach", "gate0", "gate2"]);
    eventually("both are attached", || (interfaces().len() == 2).then_some(()));
    ip("link del gate2");
    eventually("one is left", || (interfaces() == ["gate0"]).then_some(()));
    make_second_interface();
    eventually("it is attached again", || (interfaces().len() == 2).then_some(()));
    assert!(attached() && holder.0.try_wait().unwrap().is_none());
    ip("link del gate2");
    ip("link del gate0");
    // So that a service manager starts it again.
    assert_eq!(eventually("the holder ends", || holder.0.try_wait().unwrap()).code(), Some(1));
}

#[test]
fn a_holder_that_is_told_to_read_again_takes_what_can_change_and_refuses_the_rest() {
    needs_root();
    let _pair = Pair::new();
    let rules = "[[connection]]\ndestination = \"*:80\"\nburst = 3\n[block]\nfor = ";
    let folder = Folder::with("gate.toml", &format!("{rules}\"1h\"\n"));
    let file = folder.name("gate.toml");
    let log = std::fs::File::create(folder.path("log")).unwrap();
    let holder = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["gate", "attach", "gate0", "--config", &file])
        .stdin(Stdio::null())
        .stderr(log)
        .spawn();
    let mut holder = Process(holder.unwrap());
    let logged = |text: &str| {
        let read = || std::fs::read_to_string(folder.path("log")).unwrap().contains(text).then_some(());
        eventually(text, read);
    };
    logged("connection.burst has no effect without connection.rate");
    logged("attached to gate0");
    let read_again = |text: &str| {
        std::fs::write(&file, text).unwrap();
        let pid = rustix::process::Pid::from_child(&holder.0);
        rustix::process::kill_process(pid, rustix::process::Signal::HUP).unwrap();
    };
    let remaining_s = |address: &str| {
        json(&["block", "add", address, "--json"]);
        let list = json(&["block", "list", "--json"]);
        let prefix = format!("{address}/32");
        list.as_array().unwrap().iter().find(|row| row["prefix"] == prefix).unwrap()["remaining_s"]
            .as_u64()
            .unwrap()
    };
    assert!(remaining_s("10.99.0.1") > 1800);
    read_again(&format!("{rules}\"10m\"\n"));
    logged("the rules were read again and are in force");
    assert!(remaining_s("10.99.0.2") <= 600);
    read_again(&format!("{rules}\"1h\"\nshut_windows = 9\n[gate]\nreset_penalty = \"9s\"\n"));
    logged("the old rules stay in force: [gate], block.shut_windows cannot change while attached");
    assert!(remaining_s("10.99.0.3") <= 600);
    assert!(tidegate(&["gate", "detach"]).status.success());
    assert!(eventually("the holder ends", || holder.0.try_wait().unwrap()).success());

    let checked = tidegate(&["gate", "check", "gate0", "--config", &file]);
    let said = String::from_utf8(checked.stderr).unwrap();
    assert!(checked.status.success() && said.starts_with("warning: "), "{said}");
    assert_eq!(
        json(&["gate", "check", "gate0", "--config", &file, "--json"])["warnings"][0]["severity"],
        "warning"
    );
}

#[test]
fn detaching_one_interface_by_name_leaves_the_gate_on_the_others() {
    needs_root();
    let _pair = Pair::new();
    // Twice the same is no conflict with another gate.
    let mut holder = spawn(&["gate", "attach", "gate0", "lo", "gate0"]);
    eventually("both are attached", || (interfaces().len() == 2).then_some(()));
    assert_eq!(json(&["gate", "detach", "lo", "--json"])["detached"], Value::from(vec!["lo"]));
    assert_eq!(interfaces(), ["gate0"]);
    assert!(error(&["gate", "detach", "lo"]).contains("no gate is attached to `lo`"));
    assert!(attached() && holder.0.try_wait().unwrap().is_none());
    assert_eq!(json(&["gate", "detach", "--json"])["detached"], Value::from(vec!["gate0"]));
    assert!(eventually("the holder ends", || holder.0.try_wait().unwrap()).success());
}

#[test]
fn nothing_is_attached_after_the_holder_is_killed() {
    needs_root();
    let _pair = Pair::new();
    for signal in [libc::SIGKILL, libc::SIGTERM] {
        let mut holder = spawn(&["gate", "attach", "gate0"]);
        eventually("it is attached", || attached().then_some(()));
        let pid = rustix::process::Pid::from_child(&holder.0);
        let signal = rustix::process::Signal::from_named_raw(signal).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
        holder.0.wait().unwrap();
        eventually("it is detached", || (!attached()).then_some(()));
        assert_eq!(gates(), [] as [Value; 0]);
    }
}

const RULES: &str = "[[listen]]\naddress = \":8080\"\n[[route]]\nroot = \"ROOT\"\n[gate]\nreset_penalty = \"0s\"\n\
    [[connection]]\nsource = \"10.77.0.2\"\npriority = 1\n\
    [[connection]]\nsource = \"10.77.0.4\"\nrate = 0.001\nburst = 2\npriority = 2\n\
    [[request]]\npath = \"/cgi-bin/*\"\nrate = 0.001\nburst = 2\n\
    [[request]]\npath = \"/busy*\"\naction = \"refuse\"\n\
    [[request]]\ncookie = { tier = \"bad\" }\naction = \"refuse\"\n";

/// The status line of an answer, or what became of the connection instead.
fn ask(from: &str, to: SocketAddr, requests: &[&str]) -> Vec<String> {
    let mut stream = connect(from, to);
    let mut answers = Vec::new();
    for request in requests {
        let sent = stream.write_all(request.as_bytes());
        let mut bytes = [0; 4096];
        answers.push(match sent.and_then(|()| stream.read(&mut bytes)) {
            Ok(0) => "closed".into(),
            Ok(length) => {
                String::from_utf8_lossy(&bytes[..length]).lines().next().unwrap_or_default().to_owned()
            }
            Err(error) => error.kind().to_string(),
        });
    }
    answers
}

fn get(target: &str) -> String {
    format!("GET {target} HTTP/1.1\r\nHost: a\r\n\r\n")
}

#[test]
fn rules_of_a_server_act_in_the_kernel_and_in_user_space_when_that_is_taken_away() {
    needs_root();
    let pair = Pair::new();
    let folder = Folder::with("file", "x");
    std::fs::write(folder.path("t.toml"), RULES.replace("ROOT", &folder.name(""))).unwrap();
    let to: SocketAddr = format!("{SERVER4}:8080").parse().unwrap();
    let server = spawn(&["run", "--config", &folder.name("t.toml"), "--workers", "2"]);
    let shown = eventually("it serves", || gates().into_iter().next());
    assert_eq!(
        (&shown["mechanism"], &shown["interfaces"][0]),
        (&"kernel".into(), &"gate0".into()),
        "{shown}"
    );
    let by = |row: usize| shown["rules"][row]["mechanism"].as_str().unwrap().to_owned();
    assert_eq!([by(0), by(1), by(2), by(3)], ["xdp", "xdp", "tc", "server"]);
    assert!(shown["classes"][0].as_str().unwrap().contains("steered by the kernel"), "{shown}");
    let asked =
        |host: u8, requests: &[&str]| pair.client.run(|| ask(&format!("10.77.0.{host}:0"), to, requests));
    let (plain, encoded) = (get("/cgi-bin/a"), get("/cgi%2Dbin/a"));
    // One token on the segment, one in the server, from one bucket; none twice.
    let answers = asked(2, &[&get("/file"), &plain, &get("/busy"), &encoded, &get("/file"), &encoded]);
    let ok = "HTTP/1.1 200 OK";
    let (missing, busy) = ("HTTP/1.1 404 Not Found", "HTTP/1.1 503 Service Unavailable");
    assert_eq!(answers, [ok, missing, busy, missing, ok, "connection reset"]);
    assert_eq!(asked(2, &[&plain]), ["connection reset"]);
    pair.client.run(|| {
        let _two = [connect("10.77.0.4:0", to), connect("10.77.0.4:0", to)];
        assert!(!is_answered("10.77.0.4:0", to), "beyond its burst");
    });
    // The host's own connections pass no interface with a program: they are policed when accepted.
    assert_eq!(ask("127.0.0.1:0", "127.0.0.1:8080".parse().unwrap(), &[&get("/file")]), [ok]);
    // Another port of the host is nobody's business.
    let other = TcpListener::bind("0.0.0.0:81").unwrap();
    let elsewhere: SocketAddr = format!("{SERVER4}:81").parse().unwrap();
    pair.client.run(|| (0..4).for_each(|_| drop(connect("10.77.0.4:0", elsewhere))));

    json(&["block", "add", "10.77.0.5", "--reason", "x", "--json"]);
    assert!(!pair.client.run(|| is_answered("10.77.0.5:0", to)));
    assert!(tidegate(&["gate", "detach", "gate0"]).status.success());
    let shown = eventually("the rules act in user space", || {
        gates().into_iter().find(|gate| gate["mechanism"] == "user space")
    });
    assert!(shown["reason"].as_str().unwrap().contains("detached"), "{shown}");
    assert!(shown["classes"][0].as_str().unwrap().contains("sorted after they are accepted"), "{shown}");
    let answers = asked(2, &[&get("/file"), &plain, &encoded, &plain]);
    assert_eq!(answers, [ok, missing, missing, "connection reset"]);
    assert_ne!(asked(5, &[&get("/file")])[0], ok, "the block goes on");
    drop((server, other));
}

/// A process that was started by another one.
struct Successor(rustix::process::Pid);

impl Drop for Successor {
    fn drop(&mut self) {
        use rustix::process::{Signal, WaitOptions, kill_process, waitpid};
        // One that has ended is what is wanted.
        let _ = kill_process(self.0, Signal::KILL);
        let _ = waitpid(Some(self.0), WaitOptions::empty());
    }
}

#[test]
fn upgraded_server_has_its_rules_blocks_and_queues_in_the_kernel_again() {
    needs_root();
    let pair = Pair::new();
    let folder = Folder::with("file", "x");
    let rules = RULES.replace("ROOT", &folder.name(""));
    std::fs::write(folder.path("t.toml"), &rules).unwrap();
    let to: SocketAddr = format!("{SERVER4}:8080").parse().unwrap();
    // The new process is this one's child when the old one has ended.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).unwrap();
    let mut server = spawn(&["run", "--config", &folder.name("t.toml"), "--workers", "2"]);
    let in_kernel = || gates().into_iter().find(|gate| gate["mechanism"] == "kernel");
    eventually("it serves", in_kernel);
    json(&["block", "add", "10.77.0.5", "--reason", "guessing", "--json"]);
    let asked = |host: u8| pair.client.run(|| ask(&format!("10.77.0.{host}:0"), to, &[&get("/file")]));
    let ok = "HTTP/1.1 200 OK";
    assert_eq!(asked(2), [ok]);

    // One that fails changes nothing in the kernel.
    std::fs::write(folder.path("t.toml"), "nonsense = 1\n").unwrap();
    assert!(error(&["upgrade"]).contains("nonsense"));
    let shown = in_kernel().unwrap();
    assert!(shown["classes"][0].as_str().unwrap().contains("steered by the kernel"), "{shown}");
    assert!(attached() && !pair.client.run(|| is_answered("10.77.0.5:0", to)));

    std::fs::write(folder.path("t.toml"), &rules).unwrap();
    let pid = json(&["upgrade", "--json"])["pid"].as_i64().unwrap();
    let _new = Successor(rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap());
    assert!(server.0.wait().unwrap().success());
    let shown = eventually("the new one is attached", in_kernel);
    assert!(attached());
    assert_eq!(shown["interfaces"][0], "gate0", "{shown}");
    assert!(shown["classes"][0].as_str().unwrap().contains("steered by the kernel"), "{shown}");
    assert!(!pair.client.run(|| is_answered("10.77.0.5:0", to)));
    let list = json(&["block", "list", "--json"]);
    assert_eq!(list[0]["reason"], "guessing", "{list}");
    assert_eq!(asked(2), [ok]);
    let shown = in_kernel().unwrap();
    assert!(shown["totals"]["gate_steered_total"].as_u64() >= Some(1), "{shown}");
}

#[test]
fn each_request_costs_one_token_whatever_connection_brings_it() {
    needs_root();
    const EACH: usize = 12;
    let pair = Pair::new();
    let folder = Folder::with("file", "x");
    let burst = "path = \"/cgi-bin/*\"\nrate = 0.001\nburst = 2";
    assert!(RULES.contains(burst));
    let rules = RULES.replace("ROOT", &folder.name(""));
    let rules = rules.replace(burst, &burst.replace("= 2", &format!("= {}", 3 * EACH)));
    std::fs::write(folder.path("t.toml"), rules).unwrap();
    let to: SocketAddr = format!("{SERVER4}:8080").parse().unwrap();
    let _server = spawn(&["run", "--config", &folder.name("t.toml")]);
    eventually("it serves", || gates().into_iter().next());
    let request = get("/cgi-bin/a");
    // Reads until so many answers have come.
    let answered = |requests: &str, expected: usize| {
        let mut stream = connect("10.77.0.2:0", to);
        stream.write_all(requests.as_bytes()).unwrap();
        let (mut text, mut bytes) = (Vec::new(), [0; 4096]);
        let answers = |text: &[u8]| text.windows(8).filter(|window| window == b"HTTP/1.1").count();
        while answers(&text) < expected {
            let length = stream.read(&mut bytes).unwrap();
            assert!(length > 0, "{} of {expected}", answers(&text));
            text.extend_from_slice(&bytes[..length]);
        }
    };
    pair.client.run(|| {
        (0..EACH).for_each(|_| answered(&request, 1));
        // All of them in one segment, of which the kernel sees the first.
        answered(&request.repeat(EACH), EACH);
    });
    let one_by_one = pair.client.run(|| ask("10.77.0.2:0", to, &[request.as_str(); EACH]));
    assert!(one_by_one.iter().all(|answer| answer == "HTTP/1.1 404 Not Found"), "{one_by_one:?}");
    let rule = &gates()[0]["rules"][2];
    assert_eq!(
        (rule["passed"].as_u64(), rule["refused"].as_u64()),
        (Some(3 * EACH as u64), Some(0)),
        "{rule}"
    );
    assert_eq!(pair.client.run(|| ask("10.77.0.2:0", to, &[&request])), ["connection reset"]);
}

#[test]
fn clients_that_a_balancer_names_are_policed_and_kept_out_and_the_balancer_is_not() {
    needs_root();
    let pair = Pair::new();
    let folder = Folder::with("file", "x");
    let config = "trusted_proxies = [\"10.77.0.2\"]\n\
        [[listen]]\naddress = \":8080\"\nproxy_protocol = true\n[[route]]\nroot = \"ROOT\"\n\
        [gate]\nreset_penalty = \"1m\"\n\
        [[connection]]\nrate = 0.001\nburst = 3\n\
        [[connection]]\nsource = \"192.0.2.0/24\"\nrate = 0.001\nburst = 100\n\
        [[connection]]\nsource = \"192.0.2.4\"\nrate = 0.001\nburst = 2\n\
        [[request]]\npath = \"/bad\"\naction = \"reset\"\n";
    std::fs::write(folder.path("t.toml"), config.replace("ROOT", &folder.name(""))).unwrap();
    let to: SocketAddr = format!("{SERVER4}:8080").parse().unwrap();
    let _server = spawn(&["run", "--config", &folder.name("t.toml")]);
    let shown = eventually("it serves", || gates().into_iter().next());
    assert_eq!(shown["mechanism"], "kernel", "{shown}");
    let asked = |client: u8, target: &str| {
        let first = format!("PROXY TCP4 192.0.2.{client} {SERVER4} 1 8080\r\n{}", get("/file"));
        // The second has a segment of its own.
        pair.client.run(|| ask("10.77.0.2:0", to, &[&first, &get(target)]))
    };
    let ok = "HTTP/1.1 200 OK";
    assert_eq!(asked(1, "/bad"), [ok, "connection reset"]);
    assert_eq!(asked(2, "/file"), [ok, ok], "the balancer has no penalty");
    assert_eq!([asked(4, "/file"), asked(4, "/file")], [[ok, ok], [ok, ok]]);
    assert_ne!(asked(4, "/file")[0], ok, "beyond its burst");
    json(&["block", "add", "192.0.2.5", "--json"]);
    assert_ne!(asked(5, "/file")[0], ok);
    // Far more than the rule for all others lets the balancer have.
    for client in 6..12 {
        assert_eq!(asked(client, "/file"), [ok, ok]);
    }
}

#[test]
fn rules_act_without_privilege_on_loopback_and_change_with_a_reload() {
    let folder = Folder::with("file", "x");
    let (port, admin) = (tidegate_e2e::free_port(), tidegate_e2e::free_port());
    let (address, admin) = (format!("127.0.0.1:{port}"), format!("127.0.0.1:{admin}"));
    let text = RULES.replace("ROOT", &folder.name("")).replace(":8080", &address);
    let text =
        text.replace("[gate]", "[block]\npath = \"KEPT\"\n[gate]").replace("KEPT", &folder.name("kept"));
    std::fs::write(folder.path("t.toml"), &text).unwrap();
    let run = || spawn(&["run", "--config", &folder.name("t.toml"), "--admin", &admin]);
    let server = run();
    let status = || {
        let output = tidegate(&["status", "--json", "--admin", &admin]);
        output.status.success().then(|| serde_json::from_slice::<Value>(&output.stdout).unwrap())
    };
    let shown = eventually("it serves", status)["enforcement"].clone();
    assert_eq!(shown["mechanism"], "user space");
    assert!(shown["reason"].as_str().unwrap().contains("on loopback"), "{shown}");
    let to: SocketAddr = address.parse().unwrap();
    let plain = get("/cgi-bin/a");
    // Servers join several fields with cookies: a rule sees all of them.
    let two_fields = "GET /file HTTP/1.1\r\nHost: a\r\nCookie: a=b\r\nCookie: tier=bad; c=d\r\n\r\n";
    let answers =
        ask("127.0.0.1:0", to, &[&plain, &plain, &get("/busy/a"), two_fields, &get("/file"), &plain]);
    let ok = "HTTP/1.1 200 OK";
    let (missing, busy) = ("HTTP/1.1 404 Not Found", "HTTP/1.1 503 Service Unavailable");
    assert_eq!(answers, [missing, missing, busy, busy, ok, "connection reset"]);
    let rows = eventually("it is counted", status)["enforcement"]["rules"].clone();
    assert_eq!((&rows[2]["passed"], &rows[2]["refused"]), (&2.into(), &1.into()), "{rows}");

    let other =
        text.replace("/cgi-bin/*", "/fil*").replace("burst = 2\n[[request]]", "burst = 1\n[[request]]");
    std::fs::write(folder.path("t.toml"), &other).unwrap();
    assert!(tidegate(&["reload", "--admin", &admin]).status.success());
    assert_eq!(ask("127.0.0.1:0", to, &[&plain, &get("/file"), &get("/file")])[..2], [missing, ok]);
    std::fs::write(folder.path("t.toml"), other.replace("mechanism", "x").replace("\"0s\"", "\"5s\""))
        .unwrap();
    assert!(error(&["reload", "--admin", &admin]).contains("[gate] cannot change while running"));

    std::fs::write(folder.path("t.toml"), &text).unwrap();
    let add = ["block", "add", "127.0.0.9", "--for", "1h", "--reason", "a b", "--admin", &admin];
    assert!(tidegate(&add).status.success());
    assert_eq!(ask("127.0.0.9:0", to, &[&get("/file")]).len(), 1);
    eventually("it is kept", || {
        let kept = std::fs::read_to_string(folder.path("kept/blocked")).unwrap_or_default();
        kept.contains("127.0.0.9/32 ").then_some(())
    });
    drop(server);
    let _server = run();
    eventually("it serves again", status);
    let list = json(&["block", "list", "--json", "--admin", &admin]);
    assert_eq!((&list[0]["prefix"], &list[0]["reason"]), (&"127.0.0.9/32".into(), &"a b".into()), "{list}");
    assert_ne!(ask("127.0.0.9:0", to, &[&get("/file")])[0], ok);
}

#[test]
fn clients_that_connect_while_the_server_restarts_wait_with_the_holder() {
    needs_root();
    let pair = Pair::new();
    let folder = Folder::with("file", "x");
    std::fs::write(
        folder.path("gate.toml"),
        "[[connection]]\nsource = \"10.77.0.2\"\npriority = 1\n[[connection]]\nsource = \"10.77.0.4\"\npriority = 2\n",
    )
    .unwrap();
    let _holder =
        spawn(&["gate", "attach", "gate0", "--config", &folder.name("gate.toml"), "--listen", ":8080"]);
    // The door at which servers ask comes last, after the programs and the sockets.
    let has_door =
        || std::fs::read_to_string("/proc/thread-self/net/unix").ok()?.contains(" [::]:8080\n").then_some(());
    eventually("it holds the port", has_door);
    let to: SocketAddr = format!("{SERVER4}:8080").parse().unwrap();
    let run = || spawn(&["run", "--listen", ":8080", "--root", &folder.name(""), "--workers", "2"]);
    let status = || {
        let output = tidegate(&["status", "--json"]);
        output.status.success().then_some(())
    };
    let server = run();
    eventually("it serves", status);
    let ok = "HTTP/1.1 200 OK";
    assert_eq!(pair.client.run(|| ask("10.77.0.4:0", to, &[&get("/file")])), [ok]);
    drop(server);
    // Nobody serves, and nobody is refused.
    let mut waiting: Vec<_> =
        pair.client.run(|| [4, 3, 2].map(|host| connect(&format!("10.77.0.{host}:0"), to)).into());
    waiting.iter_mut().for_each(|stream| stream.write_all(get("/file").as_bytes()).unwrap());
    // Rules of its own change nothing about that, and do not ask for the holder's end.
    std::fs::write(folder.path("t.toml"), RULES.replace("ROOT", &folder.name(""))).unwrap();
    let _server = spawn(&["run", "--config", &folder.name("t.toml"), "--workers", "2"]);
    for stream in &mut waiting {
        let mut bytes = [0; 512];
        let length = stream.read(&mut bytes).unwrap();
        assert!(bytes[..length].starts_with(ok.as_bytes()));
    }
    let shown = gates();
    let holder = shown.iter().find(|gate| gate["mechanism"] == "kernel").unwrap();
    let server = shown.iter().find(|gate| gate["mechanism"] == "user space").unwrap();
    assert!(server["classes"][0].as_str().unwrap().starts_with("2 accept queues from"), "{server}");
    let reason = server["reason"].as_str().unwrap();
    assert!(reason.contains("holds the sockets") && !reason.contains("detach"), "{reason}");
    assert!(holder["totals"]["gate_steered_total"].as_u64() >= Some(4), "{holder}");
    assert!(error(&["gate", "attach", "lo", "--listen", ":8080"]).contains("cannot listen on :8080"));
}
