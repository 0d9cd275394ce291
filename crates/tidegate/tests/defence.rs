//! The defence of a running process: an external classifier, and settings that change on a reload.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tidegate_e2e::free_port;

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Site {
    _process: Running,
    address: SocketAddr,
    admin: SocketAddr,
    directory: tempfile::TempDir,
}

impl Site {
    fn start(config: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("object"), "hello").unwrap();
        let (address, admin) = (free_port(), free_port());
        let site = Self::write(directory.path(), config);
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.args(["run", "--workers", "1", "--config"]).arg(site);
        command.args(["--listen", &format!("127.0.0.1:{address}"), "--admin", &format!("127.0.0.1:{admin}")]);
        command.arg("--root").arg(directory.path()).stderr(Stdio::null());
        let process = Running(command.spawn().unwrap());
        let local = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let site = Self { _process: process, address: local(address), admin: local(admin), directory };
        wait_for("the server listens", || TcpStream::connect(site.address).is_ok());
        site
    }

    fn write(directory: &Path, config: &str) -> std::path::PathBuf {
        let path = directory.join("site.toml");
        fs::write(&path, config.replace("DIR", directory.to_str().unwrap())).unwrap();
        path
    }

    fn connect(&self, from: [u8; 4]) -> Option<TcpStream> {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).ok()?;
        let from = SocketAddr::new(IpAddr::V4(Ipv4Addr::from(from)), 0);
        socket.bind(&from.into()).ok()?;
        socket.connect(&self.address.into()).ok()?;
        let stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
        Some(stream)
    }

    /// Eighty requests at once.
    fn flood(&self, from: [u8; 4]) {
        let Some(mut stream) = self.connect(from) else { return };
        let one = "GET /object HTTP/1.1\r\nHost: a\r\n\r\n";
        let last = "GET /object HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
        // Who is blocked is reset.
        let _ = stream.write_all((one.repeat(79) + last).as_bytes());
        let _ = stream.read_to_end(&mut Vec::new());
    }

    /// The status of a request from this address of the loopback network; `None`: the connection ended without one.
    fn ask(&self, from: [u8; 4]) -> Option<u16> {
        let mut stream = self.connect(from)?;
        stream.write_all(b"GET /object HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").ok()?;
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).get(9..12)?.parse().ok()
    }

    fn reload(&self) -> bool {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.args(["reload", "--admin", &self.admin.to_string()]);
        command.stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap().success()
    }
}

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !is_so() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn classifier_in_python_learns_what_is_usual_and_blocks_who_floods() {
    // On a busy machine the classifier `stress` could come first.
    let alone = "[[classifier]]\nname = \"stress\"\nlimit = 0\n";
    let site = Site::start(&format!("[defence]\nexternal = \"DIR/classifier.sock\"\n{alone}"));
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/classifier/learn.py");
    let mut command = Command::new("python3");
    command.arg(script).arg(site.directory.path().join("classifier.sock")).stdout(Stdio::piped());
    let mut classifier = Running(command.spawn().expect("python3 is missing: apt-get install python3"));
    // Sixty people ask now and then, until enough is known of them.
    let mut people = (1u8..=60).cycle().map(|number| [127, 20, 0, number]);
    let end = Instant::now() + Duration::from_secs(4);
    while Instant::now() < end {
        assert_eq!(site.ask(people.next().unwrap()), Some(200));
        std::thread::sleep(Duration::from_millis(15));
    }
    let attacker = [127, 30, 0, 1];
    wait_for("the attacker is blocked", || {
        site.flood(attacker);
        site.ask(attacker) != Some(200)
    });
    assert_eq!(site.ask(people.next().unwrap()), Some(200));
    let mut said = String::new();
    BufReader::new(classifier.0.stdout.take().unwrap()).read_line(&mut said).unwrap();
    assert!(said.starts_with("blocked 127.30.0.1: "), "{said}");
}

#[test]
fn client_whose_requests_cannot_be_read_is_blocked_as_one_whose_requests_fail() {
    // On a busy machine the classifier `stress` could come first.
    let alone = "[[classifier]]\nname = \"stress\"\nlimit = 0\n";
    let site = Site::start(&format!("[[classifier]]\nname = \"errors\"\nlimit = 20\n{alone}"));
    let (client, other) = ([127, 42, 0, 1], [127, 42, 0, 2]);
    let garble = || {
        let Some(mut stream) = site.connect(client) else { return };
        // Who is blocked is reset.
        let _ = stream.write_all(b"GARBAGE\r\n\r\n");
        let _ = stream.read_to_end(&mut Vec::new());
    };
    wait_for("the client is blocked", || {
        (0..25).for_each(|_| garble());
        site.ask(client) != Some(200)
    });
    assert!(metric(&site, "tidegate_defence_errors_total") >= Some(1));
    assert_eq!(site.ask(other), Some(200));
}

#[test]
fn limit_that_is_changed_acts_after_a_reload_without_a_restart() {
    let site = Site::start("[[classifier]]\nname = \"connection-rate\"\nlimit = 1000\n");
    let (client, other) = ([127, 21, 0, 1], [127, 21, 0, 2]);
    for _ in 0..20 {
        assert_eq!((site.ask(client), site.ask(other)), (Some(200), Some(200)));
    }
    Site::write(site.directory.path(), "[[classifier]]\nname = \"connection-rate\"\nlimit = 5\n");
    assert!(site.reload());
    wait_for("the new limit acts", || site.ask(client) != Some(200));
    Site::write(site.directory.path(), "[defence]\nmemory = \"16MiB\"\n");
    assert!(!site.reload(), "memory needs a restart");
}

#[test]
fn request_in_the_tarpit_is_held_without_an_answer_until_the_server_ends() {
    let mut site = Site::start("[[filter]]\nuser_agent = \"scraper\"\naction = \"tarpit\"\n");
    let mut held = site.connect([127, 40, 0, 1]).unwrap();
    held.write_all(b"GET /object HTTP/1.1\r\nHost: a\r\nUser-Agent: a scraper\r\n\r\n").unwrap();
    let metric = || metric(&site, "tidegate_defence_form_total");
    wait_for("the request is judged", || metric() == Some(1));
    // Others are served meanwhile, also from the same address.
    assert_eq!(site.ask([127, 40, 0, 1]), Some(200));
    assert_eq!(site.ask([127, 40, 0, 2]), Some(200));
    held.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let error = held.read(&mut [0; 64]).expect_err("nothing comes, and the connection stays");
    assert!(matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut), "{error}");
    let id = i32::try_from(site._process.0.id()).unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_raw(id).unwrap(), rustix::process::Signal::TERM)
        .unwrap();
    held.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut answer = Vec::new();
    let _ = held.read_to_end(&mut answer);
    assert_eq!(String::from_utf8_lossy(&answer), "");
    site._process.0.wait().unwrap();
}

#[test]
fn client_that_reads_nothing_makes_the_kernel_hold_little() {
    let site = Site::start("");
    fs::write(site.directory.path().join("large"), vec![b'a'; 16 << 20]).unwrap();
    let mut stream = site.connect([127, 41, 0, 1]).unwrap();
    stream.write_all(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    let own = stream.local_addr().unwrap().port();
    let mut before = 0;
    wait_for("the server has sent what fits", || {
        std::thread::sleep(Duration::from_millis(100));
        let now = send_queue_bytes(site.address.port(), own);
        now > 0 && now == std::mem::replace(&mut before, now)
    });
    assert!(before < 512 << 10, "{before} bytes wait for a client that reads nothing");
    // Whoever does read gets all of it.
    let mut all = Vec::new();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    while all.len() < 16 << 20 {
        let length = Read::by_ref(&mut stream).take(1 << 20).read_to_end(&mut all);
        assert!(length.unwrap() > 0, "ended after {} bytes", all.len());
    }
}

/// What the server's kernel holds for the client at this port (proc_pid_net(5), `tcp`).
fn send_queue_bytes(server: u16, client: u16) -> u64 {
    let table = fs::read_to_string("/proc/self/net/tcp").unwrap();
    let (server, client) = (format!(":{server:04X}"), format!(":{client:04X}"));
    let of_server = |line: &&str| {
        let mut words = line.split_whitespace().skip(1);
        words.next().is_some_and(|local| local.ends_with(&server))
            && words.next().is_some_and(|remote| remote.ends_with(&client))
    };
    let line = table.lines().find(of_server);
    let queue = line.and_then(|line| line.split_whitespace().nth(4)?.split(':').next());
    queue.map_or(0, |queue| u64::from_str_radix(queue, 16).unwrap())
}

/// A counter of the running process.
fn metric(site: &Site, name: &str) -> Option<u64> {
    let mut stream = TcpStream::connect(site.admin).ok()?;
    let request = format!("GET /metrics HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", site.admin);
    stream.write_all(request.as_bytes()).ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line?.trim().parse().ok()
}
