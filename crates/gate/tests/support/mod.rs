//! Network namespaces without names: they vanish with the test, however it ends.
#![allow(dead_code, reason = "each test file uses a part")]
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

pub mod requests;

use std::fs::File;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tidegate_gate::{Gate, GateError, Options};
use tidegate_policy::{ConnectionRule, Profile, RuleSet, When};

/// Ends the test with one line if it cannot run here: what is not tested must not look as if it were.
#[track_caller]
pub fn needs_root() {
    let root = rustix::process::geteuid().is_root();
    assert!(root, "kernel programs and network namespaces need root: run the tests with sudo");
}

/// A network namespace.
pub struct Namespace(File);

impl Namespace {
    /// Moves the calling thread into a new namespace with loopback up.
    pub fn enter_new() -> Self {
        // SAFETY: affects only the calling thread, which shares no namespace-dependent state.
        let status = unsafe { libc::unshare(libc::CLONE_NEWNET) };
        assert_eq!(status, 0, "unshare: {}", std::io::Error::last_os_error());
        ip("link set lo up");
        // Duplicate address detection would keep addresses tentative for a second.
        std::fs::write("/proc/sys/net/ipv6/conf/default/accept_dad", "0").unwrap();
        Self(File::open("/proc/thread-self/ns/net").unwrap())
    }

    /// Makes a namespace without entering it.
    pub fn new() -> Self {
        thread::spawn(Self::enter_new).join().unwrap()
    }

    /// Runs `body` on a thread within.
    pub fn run<R: Send>(&self, body: impl FnOnce() -> R + Send) -> R {
        let fd = self.0.as_raw_fd();
        thread::scope(|scope| {
            let within = scope.spawn(move || {
                // SAFETY: affects only this new thread; the descriptor is open.
                let status = unsafe { libc::setns(fd, libc::CLONE_NEWNET) };
                assert_eq!(status, 0, "setns: {}", std::io::Error::last_os_error());
                body()
            });
            within.join().unwrap()
        })
    }

    /// A path by which `ip` finds it.
    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }
}

/// Runs `ip` in the calling thread's namespace.
pub fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split_whitespace()).output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A server's namespace, which the calling thread is in, and a client's, joined by a pair of interfaces.
pub struct Pair {
    pub server: Namespace,
    pub client: Namespace,
}

pub const SERVER4: &str = "10.77.0.1";
pub const SERVER6: &str = "fd77::1";
/// The client has 10.77.0.2 to 10.77.0.9 and fd77::2 to fd77::9.
pub const CLIENT4: &str = "10.77.0.2";

impl Pair {
    pub fn new() -> Self {
        let server = Namespace::enter_new();
        let client = Namespace::new();
        ip(&format!("link add gate0 type veth peer name gate1 netns {}", client.path()));
        ip(&format!("addr add {SERVER4}/24 dev gate0"));
        ip(&format!("addr add {SERVER6}/64 dev gate0 nodad"));
        ip("link set gate0 up");
        client.run(|| {
            for host in 2..10 {
                ip(&format!("addr add 10.77.0.{host}/24 dev gate1"));
                ip(&format!("addr add fd77::{host}/64 dev gate1 nodad"));
            }
            ip("link set gate1 up");
        });
        Self { server, client }
    }

    pub fn gate(&self, rules: &RuleSet) -> Gate {
        self.gate_with(rules, &Options::default())
    }

    pub fn gate_with(&self, rules: &RuleSet, options: &Options) -> Gate {
        explained(Gate::attach("gate0", rules, options))
    }
}

/// The value, or a panic with the whole text of the error.
pub fn explained<T>(result: Result<T, GateError>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

/// A connection rule; `rate` 0 for no limit.
pub fn connection(destination: &str, source: &str, rate: f64, burst: u32) -> ConnectionRule {
    ConnectionRule {
        destination: destination.parse().unwrap(),
        source: (source != "*").then(|| source.parse().unwrap()),
        limit: (rate > 0.0).then(|| Profile::new(rate, burst).unwrap()),
        when: When::Always,
        class: None,
    }
}

pub fn connections(rules: Vec<ConnectionRule>) -> RuleSet {
    RuleSet { connections: rules, ..RuleSet::default() }
}

/// TCP flags.
pub const SYN: u8 = 0x02;
pub const ACK: u8 = 0x10;

/// The port that frames come from.
pub const CLIENT_PORT: u16 = 40_000;

/// An Ethernet frame with a TCP segment; no two have the same sequence number.
pub fn frame(source: &str, destination: &str, port: u16, flags: u8, payload: &[u8]) -> Vec<u8> {
    let (source, destination): (IpAddr, IpAddr) = (source.parse().unwrap(), destination.parse().unwrap());
    let mut tcp = [0u8; 20];
    tcp[..2].copy_from_slice(&CLIENT_PORT.to_be_bytes());
    tcp[2..4].copy_from_slice(&port.to_be_bytes());
    static SEQUENCE: AtomicU32 = AtomicU32::new(1000);
    let sequence = SEQUENCE.fetch_add(payload.len() as u32 + 1, Ordering::Relaxed);
    tcp[4..8].copy_from_slice(&sequence.to_be_bytes());
    tcp[12] = 5 << 4;
    tcp[13] = flags;
    let length = (tcp.len() + payload.len()) as u16;
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            frame.extend([0x08, 0x00, 0x45, 0]);
            frame.extend((20 + length).to_be_bytes());
            frame.extend([0, 0, 0x40, 0, 64, 6, 0, 0]);
            frame.extend(source.octets());
            frame.extend(destination.octets());
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            frame.extend(length.to_be_bytes());
            frame.extend([6, 64]);
            frame.extend(source.octets());
            frame.extend(destination.octets());
        }
        _ => panic!("two families"),
    }
    frame.extend(tcp);
    frame.extend(payload);
    frame
}

/// A connection of the calling thread's namespace over loopback, and segments that fit it: what costs tokens must.
pub struct Connection {
    client: SocketAddr,
    server: SocketAddr,
    accepted: Option<TcpStream>,
    _connected: TcpStream,
    _listener: TcpListener,
}

impl Connection {
    /// Connects from `CLIENT_PORT` of `client` to port 80 of `server`, both of which loopback gets first.
    pub fn open(client: &str, server: &str) -> Self {
        for address in [client, server] {
            ip(&format!("addr replace {address} dev lo"));
        }
        let to = SocketAddr::new(server.parse().unwrap(), 80);
        let client = SocketAddr::new(client.parse().unwrap(), CLIENT_PORT);
        let listener = once_there(|| TcpListener::bind(to));
        let connected = once_there(|| connect_within(&client.to_string(), to, Duration::from_secs(10)));
        let (accepted, _) = listener.accept().unwrap();
        Self { client, server: to, accepted: Some(accepted), _connected: connected, _listener: listener }
    }

    /// A segment of the client with this payload: the next one that the server awaits. No two have the same
    /// acknowledgement number.
    pub fn frame(&self, payload: &[u8]) -> Vec<u8> {
        self.frame_at(0, payload)
    }

    /// The same, so many bytes of the sequence space away.
    pub fn frame_at(&self, offset: i64, payload: &[u8]) -> Vec<u8> {
        static ACKNOWLEDGEMENT: AtomicU32 = AtomicU32::new(1000);
        let sequence = self.awaited().wrapping_add(offset as u32);
        self.frame_with(sequence, ACKNOWLEDGEMENT.fetch_add(1, Ordering::Relaxed), payload)
    }

    /// A segment of the client with these numbers.
    pub fn frame_with(&self, sequence: u32, acknowledgement: u32, payload: &[u8]) -> Vec<u8> {
        let (client, server) = (self.client.ip().to_string(), self.server.ip().to_string());
        let mut frame = frame(&client, &server, 80, ACK, payload);
        let at = frame.len() - payload.len() - 20;
        frame[at + 4..at + 8].copy_from_slice(&sequence.to_be_bytes());
        frame[at + 8..at + 12].copy_from_slice(&acknowledgement.to_be_bytes());
        frame
    }

    /// The sequence number that the server's end awaits.
    pub fn awaited(&self) -> u32 {
        const TCP_RECV_QUEUE: libc::c_int = 1;
        self.sequence_of(TCP_RECV_QUEUE)
    }

    /// The sequence number of the first byte that the server sends.
    pub fn first_sent(&self) -> u32 {
        const TCP_SEND_QUEUE: libc::c_int = 2;
        self.sequence_of(TCP_SEND_QUEUE)
    }

    fn accepted(&self) -> &TcpStream {
        self.accepted.as_ref().unwrap()
    }

    /// Ends the connection by a reset from the server; the listener stays.
    pub fn abort(&mut self) {
        socket2::SockRef::from(self.accepted()).set_linger(Some(Duration::ZERO)).unwrap();
        self.accepted = None;
    }

    /// Only a socket under repair tells.
    fn sequence_of(&self, queue: libc::c_int) -> u32 {
        const TCP_REPAIR_OFF_NO_WP: libc::c_int = -1;
        self.set(libc::TCP_REPAIR, 1);
        self.set(libc::TCP_REPAIR_QUEUE, queue);
        let mut sequence: u32 = 0;
        let mut length = size_of::<u32>() as libc::socklen_t;
        // SAFETY: the option gives an unsigned int; the descriptor is open.
        let status = unsafe {
            libc::getsockopt(
                self.accepted().as_raw_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_QUEUE_SEQ,
                (&raw mut sequence).cast(),
                &raw mut length,
            )
        };
        assert_eq!(status, 0, "TCP_QUEUE_SEQ: {}", std::io::Error::last_os_error());
        self.set(libc::TCP_REPAIR, TCP_REPAIR_OFF_NO_WP);
        sequence
    }

    fn set(&self, option: libc::c_int, value: libc::c_int) {
        // SAFETY: the option takes an int; the descriptor is open.
        let status = unsafe {
            libc::setsockopt(
                self.accepted().as_raw_fd(),
                libc::IPPROTO_TCP,
                option,
                (&raw const value).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        };
        assert_eq!(status, 0, "option {option}: {}", std::io::Error::last_os_error());
    }
}

/// The kernel makes the route of a new IPv6 address in its own time.
fn once_there<R>(attempt: impl Fn() -> std::io::Result<R>) -> R {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        match attempt() {
            Ok(done) => return done,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        thread::sleep(Duration::from_millis(1));
    }
}

fn connect_within(from: &str, to: SocketAddr, limit: Duration) -> std::io::Result<TcpStream> {
    let from: SocketAddr = from.parse().unwrap();
    let socket = socket2::Socket::new(socket2::Domain::for_address(to), socket2::Type::STREAM, None)?;
    socket.bind(&from.into())?;
    socket.connect_timeout(&to.into(), limit)?;
    socket.set_read_timeout(Some(Duration::from_secs(5)))?;
    Ok(socket.into())
}

/// Connects from an address of the client; it must succeed, perhaps after a retransmission.
pub fn connect(from: &str, to: SocketAddr) -> TcpStream {
    connect_within(from, to, Duration::from_secs(10))
        .unwrap_or_else(|error| panic!("{from} to {to}: {error}"))
}

/// Waits until so many connections wait to be accepted on a port of the calling thread's namespace: they get there with
/// the last packet of the handshake, which may be under way when `connect` has returned.
#[track_caller]
pub fn until_waiting(port: u16, count: u32) {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let found: u32 = ["tcp", "tcp6"].into_iter().map(|table| waiting(table, port)).sum();
        if found == count {
            return;
        }
        assert!(Instant::now() < deadline, "{found} and not {count} connections wait on port {port}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Connections in the accept queues of a port, by one of the kernel's tables: `…:PORT … 0A SENT:WAITING`.
fn waiting(table: &str, port: u16) -> u32 {
    let text = std::fs::read_to_string(format!("/proc/thread-self/net/{table}")).unwrap();
    let rows = text.lines().skip(1).map(|line| line.split_ascii_whitespace().collect::<Vec<_>>());
    let listens = |row: &Vec<&str>| row[1].ends_with(&format!(":{port:04X}")) && row[3] == "0A";
    let depth = |row: Vec<&str>| u32::from_str_radix(row[4].split_once(':').unwrap().1, 16).unwrap();
    rows.filter(listens).map(depth).sum()
}

/// Whether a SYN, sent once, is answered. Silence can only be seen by waiting: less than the retransmission takes.
pub fn is_answered(from: &str, to: SocketAddr) -> bool {
    connect_within(from, to, Duration::from_millis(800)).is_ok()
}

/// What the gate has counted under a name.
pub fn total(gate: &Gate, name: &str) -> u64 {
    explained(gate.show()).totals.iter().find(|total| total.name == name).unwrap().value
}

/// Whether the gate drops a SYN: connects and waits, however long it takes, until the gate has counted one more under
/// this name, or the connection is there.
pub fn is_dropped(gate: &Gate, name: &str, from: &str, to: SocketAddr) -> bool {
    let before = total(gate, name);
    let socket = socket2::Socket::new(socket2::Domain::for_address(to), socket2::Type::STREAM, None).unwrap();
    socket.bind(&from.parse::<SocketAddr>().unwrap().into()).unwrap();
    socket.set_nonblocking(true).unwrap();
    let error = socket.connect(&to.into()).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EINPROGRESS), "{from} to {to}: {error}");
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        if socket.peer_addr().is_ok() {
            return false;
        }
        if total(gate, name) > before {
            return true;
        }
        assert!(Instant::now() < deadline, "{from} to {to}: neither dropped nor connected");
        thread::sleep(Duration::from_millis(1));
    }
}

/// How often the stack of the calling thread's namespace has thrown something away because an accept queue was full.
pub fn overflows() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/net/netstat").unwrap();
    let mut lines = text.lines().map(|line| line.split(' '));
    let column = lines.next().unwrap().position(|name| name == "ListenOverflows").unwrap();
    lines.next().unwrap().nth(column).unwrap().parse().unwrap()
}
