mod streams;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tidegate_dhttp::client::{Client, ClientConfig, Event, Generation, NewRequest};
use tidegate_dhttp::once::{Admission, Channel, Content, ReplayWindow, WindowConfig};
use tidegate_dhttp::server::{
    Carrier, ConnectionId, ConnectionLimits, GlobalId, Received, Route, Server, ServerConfig, SharedWindow,
    Ticket,
};
use tidegate_dhttp::wire::{Once, Request, RequestId};
use tidegate_http::Method;

use crate::faults::{Faults, Network, malformed};

/// Probabilities of what the network does, of responses slower than the client's timers, and of an attack with each
/// request.
#[derive(Clone, Copy)]
pub struct Conditions {
    pub loss: f64,
    pub duplication: f64,
    pub reordering: f64,
    pub broken_connections: f64,
    pub slow: f64,
    pub attack: f64,
    pub faults: Faults,
}

/// What one request asks for, and what became of it.
struct Job {
    size: usize,
    idempotent: bool,
    /// Until the service has the response.
    takes: Duration,
    executed: u32,
    answers: u32,
    failures: u32,
    given_up: bool,
}

struct SimClient {
    core: Client,
    ip: IpAddr,
    /// Connections to it are refused, or get no answer.
    firewall: Option<bool>,
    udp_ports: BTreeMap<u16, Generation>,
    tcp_ports: BTreeMap<u16, Generation>,
    port_of: HashMap<Generation, u16>,
    jobs: HashMap<RequestId, u64>,
}

struct Connection {
    to: SocketAddr,
    carrying: Option<GlobalId>,
    /// Bytes of the response are on their way.
    started: bool,
}

/// A response that a connection is to carry.
struct ToCarry {
    job: u64,
    made: bool,
}

enum Step {
    Begin(u64),
    GiveUp { client: usize, id: RequestId },
    ToServer { from: SocketAddr, datagram: Vec<u8> },
    ToClient { client: usize, port: u16, from: SocketAddr, datagram: Vec<u8> },
    Executed { ticket: Ticket, job: u64 },
    Made { id: GlobalId },
    Accepted { connection: ConnectionId, refused: bool },
    Carried { connection: ConnectionId },
    TcpRequest { client: usize, id: RequestId },
    TcpResponse { client: usize, id: RequestId },
    ClientTimer(usize),
    ServerTimer,
    Restart,
}

pub struct World {
    seed: u64,
    rng: StdRng,
    conditions: Conditions,
    network: Network,
    start: Instant,
    now: Instant,
    pub server: Server,
    window: SharedWindow,
    server_address: SocketAddr,
    clients: Vec<SimClient>,
    jobs: Vec<Job>,
    connections: HashMap<ConnectionId, Connection>,
    to_carry: HashMap<GlobalId, ToCarry>,
    agenda: BinaryHeap<Reverse<(Instant, u64)>>,
    pending: HashMap<u64, Step>,
    pub steps: u64,
    next: u64,
    /// Datagrams an attacker has seen, a sample.
    captured: Vec<(SocketAddr, Vec<u8>)>,
    /// Bytes that were sent in a victim's name, and bytes the victim got.
    victims: HashMap<SocketAddr, (usize, usize)>,
    victim_hosts: HashSet<IpAddr>,
    pub datagrams_to_server: u64,
    pub short_asked: u64,
    pub short_by_udp: u64,
    pub in_pieces: u64,
    pub given_up: u64,
    /// Requests that must not be repeated and were executed by UDP.
    pub once_by_udp: u64,
    pub outcomes_unknown: u64,
}

const ONE_WAY: Duration = Duration::from_millis(20);

impl World {
    pub fn new(seed: u64, conditions: Conditions, clients: usize) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let now = Instant::now();
        let (server, window) = new_server(&mut rng, now);
        let clients = (0..clients)
            .map(|n| SimClient {
                // Half of them are the paper's, which wait for their timers only.
                core: Client::new(
                    ClientConfig {
                        port_requests: 50,
                        probe_after: Duration::from_millis(if n % 2 == 0 { 500 } else { 0 }),
                        ..ClientConfig::default()
                    },
                    rng.random(),
                ),
                ip: IpAddr::from([10, 0, 0, n as u8]),
                firewall: (n % 4 == 3).then(|| rng.random()),
                udp_ports: BTreeMap::new(),
                tcp_ports: BTreeMap::new(),
                port_of: HashMap::new(),
                jobs: HashMap::new(),
            })
            .collect();
        Self {
            seed,
            rng,
            conditions,
            network: Network::new(conditions.faults, now),
            start: now,
            now,
            server,
            window,
            server_address: "192.0.2.1:8080".parse().unwrap(),
            clients,
            jobs: Vec::new(),
            connections: HashMap::new(),
            to_carry: HashMap::new(),
            agenda: BinaryHeap::new(),
            pending: HashMap::new(),
            steps: 0,
            next: 0,
            captured: Vec::new(),
            victims: HashMap::new(),
            victim_hosts: HashSet::new(),
            datagrams_to_server: 0,
            short_asked: 0,
            short_by_udp: 0,
            in_pieces: 0,
            given_up: 0,
            once_by_udp: 0,
            outcomes_unknown: 0,
        }
    }

    /// Has the server start anew, and forget everything, at these times of the run.
    pub fn restart_at(&mut self, times: impl Iterator<Item = Duration>) {
        for time in times {
            self.at(self.start + time, Step::Restart);
        }
    }

    fn restart(&mut self) {
        (self.server, self.window) = new_server(&mut self.rng, self.now);
        self.connections.clear();
        self.to_carry.clear();
    }

    pub fn run(&mut self, requests: u64) {
        for n in 0..requests {
            let at = self.now + Duration::from_millis(5) * n as u32;
            self.at(at, Step::Begin(n));
        }
        while let Some(Reverse((at, number))) = self.agenda.pop() {
            let step = self.pending.remove(&number).expect("each step is there once");
            self.now = self.now.max(at);
            self.steps += 1;
            self.step(step);
            if self.steps.is_multiple_of(256) {
                self.server.check_invariants();
                self.window.lock().unwrap().check_invariants();
                self.clients.iter().for_each(|client| client.core.check_invariants());
            }
            assert!(self.now - self.start < Duration::from_secs(7200), "seed {}: no end", self.seed);
        }
    }

    /// Every request was answered exactly once, and executed once if it must not be repeated.
    pub fn check_outcome(&self) {
        let seed = self.seed;
        for (n, job) in self.jobs.iter().enumerate() {
            if job.given_up {
                assert_eq!((job.answers, job.failures), (0, 0), "seed {seed}, request {n}");
                assert!(job.idempotent || job.executed <= 1, "seed {seed}, request {n} was executed twice");
            } else if job.idempotent {
                assert_eq!((job.answers, job.failures), (1, 0), "seed {seed}, request {n}");
            } else {
                assert_eq!(job.answers + job.failures, 1, "seed {seed}, request {n}");
                assert!(job.executed <= 1, "seed {seed}, request {n} was executed twice");
            }
            assert!(job.executed >= job.answers, "seed {seed}, request {n}: an answer without execution");
        }
        for (victim, (received, sent)) in &self.victims {
            assert!(*sent <= 3 * received, "seed {seed}: {victim} got {sent} bytes for {received}");
        }
        self.server.check_invariants();
        assert_eq!(self.server.metrics().dhttp_requests_in_flight.get(), 0, "seed {seed}");
        assert!(self.to_carry.is_empty(), "seed {seed}: responses that nobody will carry are kept");
        for client in &self.clients {
            assert!(client.jobs.is_empty(), "seed {seed}: requests still wait");
            assert_eq!(client.core.poll_timeout(), None);
        }
    }

    fn at(&mut self, at: Instant, step: Step) {
        self.next += 1;
        self.agenda.push(Reverse((at, self.next)));
        self.pending.insert(self.next, step);
    }

    fn after(&mut self, delay: Duration, step: Step) {
        self.at(self.now + delay, step);
    }

    fn chance(&mut self, probability: f64) -> bool {
        self.rng.random_bool(probability)
    }

    /// Once, twice or not at all, sooner or later.
    fn deliver(&mut self, make: impl Fn() -> Step) {
        let copies = if self.chance(self.conditions.duplication) { 2 } else { 1 };
        for _ in 0..copies {
            if !self.network.loses(self.now, &mut self.rng) && !self.chance(self.conditions.loss) {
                let late =
                    if self.chance(self.conditions.reordering) { self.rng.random_range(0..200) } else { 0 };
                self.after(ONE_WAY + Duration::from_millis(late), make());
            }
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Begin(n) => self.begin(n),
            Step::GiveUp { client, id } => self.give_up(client, id),
            Step::Restart => self.restart(),
            Step::ToServer { from, datagram } => self.server_receives(from, &datagram),
            Step::ToClient { client, port, from, datagram } => {
                let now = self.now;
                let sim = &mut self.clients[client];
                if let Some(generation) = sim.udp_ports.get(&port) {
                    sim.core.handle_datagram(*generation, from, &datagram, now);
                    self.drain_client(client);
                }
            }
            Step::Executed { ticket, job } => self.executed(ticket, job),
            Step::Made { id } => {
                if let Some(response) = self.to_carry.get_mut(&id) {
                    response.made = true;
                }
                let carrier = self.connections.iter().find(|(_, carrier)| carrier.carrying == Some(id));
                if let Some(connection) = carrier.map(|(connection, _)| *connection) {
                    self.carry(connection);
                }
            }
            Step::Accepted { connection, refused } => self.accepted(connection, refused),
            Step::Carried { connection } => self.carried(connection),
            Step::TcpRequest { client, id } => self.tcp_request(client, id),
            Step::TcpResponse { client, id } => self.tcp_response(client, id),
            Step::ClientTimer(client) => {
                let due = self.clients[client].core.poll_timeout().is_some_and(|at| at <= self.now);
                if due {
                    self.clients[client].core.handle_timeout(self.now);
                    self.drain_client(client);
                }
            }
            Step::ServerTimer => {
                if self.server.poll_timeout().is_some_and(|at| at <= self.now) {
                    self.server.handle_timeout(self.now);
                    self.drain_server();
                }
            }
        }
    }

    fn begin(&mut self, n: u64) {
        let idempotent = !self.chance(0.1);
        let size = match self.rng.random_range(0..10) {
            0..7 => self.rng.random_range(60..1460),
            // In several datagrams, if the client has proved its address.
            7 => self.rng.random_range(1461..14_600),
            _ => 20_000,
        };
        let takes = if self.chance(self.conditions.slow) { 7_000 } else { self.rng.random_range(0..30) };
        self.jobs.push(Job {
            size,
            idempotent,
            takes: Duration::from_millis(takes),
            executed: 0,
            answers: 0,
            failures: 0,
            given_up: false,
        });
        let client = self.rng.random_range(0..self.clients.len());
        if self.clients[client].core.wants_ports(self.now) {
            self.bind(client);
        }
        let (method, name) = if idempotent { (Method::Get, "GET") } else { (Method::Post, "POST") };
        let http = Bytes::from(http_of(name, n));
        let request =
            NewRequest { server: self.server_address, site: "example".into(), method, http, by_tcp: false };
        self.short_asked += u64::from(idempotent && size <= 1460);
        let sim = &mut self.clients[client];
        let id = sim.core.start(request, self.now).expect("far below the limit");
        sim.jobs.insert(id, n);
        if let Some(patience) = self.network.patience(&mut self.rng) {
            self.after(patience, Step::GiveUp { client, id });
        }
        self.drain_client(client);
        if self.chance(self.conditions.attack) {
            self.attack();
        }
    }

    /// The user has left: a server's connection that still brings the response is closed.
    fn give_up(&mut self, client: usize, id: RequestId) {
        if let Some(job) = self.clients[client].jobs.remove(&id) {
            self.jobs[job as usize].given_up = true;
            self.given_up += 1;
            self.clients[client].core.finish(id);
            self.drain_client(client);
        }
    }

    fn bind(&mut self, client: usize) {
        let now = self.now;
        let sim = &mut self.clients[client];
        let free = |core: &mut Client, taken: &BTreeMap<u16, Generation>| {
            std::iter::repeat_with(|| core.random_port()).find(|port| !taken.contains_key(port)).unwrap()
        };
        let (udp, tcp) = (free(&mut sim.core, &sim.udp_ports), free(&mut sim.core, &sim.tcp_ports));
        let generation = sim.core.use_ports(tcp, now);
        sim.udp_ports.insert(udp, generation);
        sim.tcp_ports.insert(tcp, generation);
        sim.port_of.insert(generation, udp);
        let core = &sim.core;
        sim.udp_ports.retain(|_, generation| core.is_in_use(*generation));
        sim.tcp_ports.retain(|_, generation| core.is_in_use(*generation));
    }

    /// Forged answers with guessed ids, replays of anything, requests in a victim's name with stolen tokens.
    fn attack(&mut self) {
        let noise = RequestId(self.rng.random());
        let client = self.rng.random_range(0..self.clients.len());
        let ports: Vec<u16> = self.clients[client].udp_ports.keys().copied().collect();
        let from = self.server_address;
        for port in ports {
            for tail in [&b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"[..], b"\x01", b"\x02\x01x"] {
                let datagram = [&noise.0[..], tail].concat();
                self.after(ONE_WAY, Step::ToClient { client, port, from, datagram });
            }
        }
        if self.captured.is_empty() {
            return;
        }
        for _ in 0..3 {
            let (from, datagram) = self.captured[self.rng.random_range(0..self.captured.len())].clone();
            if from == self.server_address {
                let port = self.clients[client].udp_ports.keys().next().copied().unwrap_or(0);
                self.after(ONE_WAY, Step::ToClient { client, port, from, datagram });
            } else {
                let victim = SocketAddr::from(([198, 51, 100, self.rng.random_range(0..4)], from.port()));
                self.victim_hosts.insert(victim.ip());
                self.victims.entry(victim).or_default().0 += datagram.len();
                let bad = malformed(&datagram, &mut self.rng);
                self.victims.entry(victim).or_default().0 += bad.len();
                self.after(ONE_WAY, Step::ToServer { from: victim, datagram: bad });
                self.after(ONE_WAY, Step::ToServer { from: victim, datagram: datagram.clone() });
                self.after(ONE_WAY, Step::ToServer { from, datagram });
            }
        }
    }

    fn capture(&mut self, from: SocketAddr, datagram: &[u8]) {
        if self.captured.len() < 100 {
            self.captured.push((from, datagram.to_vec()));
        } else if self.chance(0.05) {
            let place = self.rng.random_range(0..100);
            self.captured[place] = (from, datagram.to_vec());
        }
    }

    fn server_receives(&mut self, from: SocketAddr, datagram: &[u8]) {
        self.datagrams_to_server += 1;
        match self.server.handle_datagram(from, datagram, self.now) {
            Received::Request { ticket, http, .. } if http.starts_with(b"OPTIONS * ") => {
                // A client asks for a sign of life, without a token: it is asked for one before anything is made for
                // it.
                let route = self.server.respond_long(ticket, self.now);
                assert_eq!(route, Route::Datagram, "seed {}", self.seed);
            }
            Received::Request { ticket, http, .. } => {
                let target = http.split(|byte| *byte == b' ').nth(1).unwrap();
                let job: u64 = std::str::from_utf8(&target[1..]).unwrap().parse().unwrap();
                let once = self.server.numbered(&ticket).is_some();
                assert_eq!(self.jobs[job as usize].idempotent, !once, "seed {}", self.seed);
                self.once_by_udp += u64::from(once);
                self.jobs[job as usize].executed += 1;
                let takes = self.jobs[job as usize].takes;
                if self.server.must_use_connection(&ticket) && !once {
                    self.route_long(ticket, job, takes);
                } else {
                    self.after(takes, Step::Executed { ticket, job });
                }
            }
            Received::Executed { ticket, response } => {
                let (id, job) = (ticket.global_id(), job_of(&response));
                let route = self.server.respond(ticket, &response, self.now);
                self.route(route, id, job, Duration::ZERO);
            }
            Received::Done => {}
        }
        self.drain_server();
    }

    fn executed(&mut self, ticket: Ticket, job: u64) {
        let Job { size, idempotent, .. } = self.jobs[job as usize];
        if size > 14_600 && idempotent {
            self.route_long(ticket, job, Duration::ZERO);
        } else {
            let id = ticket.global_id();
            let route = self.server.respond(ticket, &response(job, size), self.now);
            self.route(route, id, job, Duration::ZERO);
        }
        self.drain_server();
    }

    fn route_long(&mut self, ticket: Ticket, job: u64, takes: Duration) {
        let id = ticket.global_id();
        let route = self.server.respond_long(ticket, self.now);
        self.route(route, id, job, takes);
    }

    fn route(&mut self, route: Route, id: GlobalId, job: u64, takes: Duration) {
        let Route::Connection(carrier) = route else { return };
        self.to_carry.insert(id, ToCarry { job, made: false });
        self.after(takes, Step::Made { id });
        match carrier {
            Carrier::Busy => {}
            Carrier::Idle(connection) => self.next_response(connection),
            Carrier::New(connection, to) => {
                assert!(!self.victim_hosts.contains(&to.ip()), "seed {}: a SYN to {to}", self.seed);
                self.connections.insert(connection, Connection { to, carrying: None, started: false });
                let client = self.clients.iter().find(|client| client.ip == to.ip());
                let listening = client.is_some_and(|client| client.tcp_ports.contains_key(&to.port()));
                match client.and_then(|client| client.firewall) {
                    Some(true) => {}
                    // SYNs are lost until the server gives up.
                    _ if self.network.dark_until(self.now).is_some() => {}
                    firewall => {
                        let refused = firewall.is_some() || !listening;
                        self.after(2 * ONE_WAY, Step::Accepted { connection, refused });
                    }
                }
            }
        }
    }

    fn answered(&mut self, client: usize, id: RequestId, job: u64) {
        let expected = self.clients[client].jobs.remove(&id);
        assert_eq!(expected, Some(job), "seed {}: the answer to another request", self.seed);
        self.jobs[job as usize].answers += 1;
        self.clients[client].core.finish(id);
    }

    fn drain_client(&mut self, client: usize) {
        let ip = self.clients[client].ip;
        while let Some(transmit) = self.clients[client].core.poll_transmit() {
            let from = SocketAddr::new(ip, self.clients[client].port_of[&transmit.generation]);
            assert!(Request::parse(&transmit.payload).is_ok() && transmit.payload.len() <= 1472);
            self.capture(from, &transmit.payload);
            self.deliver(|| Step::ToServer { from, datagram: transmit.payload.clone() });
        }
        while let Some(event) = self.clients[client].core.poll_event() {
            match event {
                Event::Response { id, http, .. } => {
                    let job = self.clients[client].jobs[&id];
                    let size = self.jobs[job as usize].size;
                    assert_eq!(http, response(job, size), "seed {}", self.seed);
                    let counts = self.jobs[job as usize].idempotent;
                    self.short_by_udp += u64::from(counts && size <= 1460);
                    self.in_pieces += u64::from(counts && size > 1460);
                    self.answered(client, id, job);
                }
                Event::OutcomeUnknown { id } => {
                    self.outcomes_unknown += 1;
                    let job = self.clients[client].jobs.remove(&id).unwrap();
                    self.jobs[job as usize].failures += 1;
                    self.clients[client].core.finish(id);
                }
                Event::UseTcp { id, .. } | Event::UseHttp { id } => {
                    self.after(3 * ONE_WAY, Step::TcpRequest { client, id });
                }
            }
        }
        if let Some(at) = self.clients[client].core.poll_timeout() {
            self.at(at, Step::ClientTimer(client));
        }
    }

    fn drain_server(&mut self) {
        let from = self.server_address;
        while let Some(transmit) = self.server.poll_transmit() {
            if let Some((_, sent)) = self.victims.get_mut(&transmit.to) {
                *sent += transmit.payload.len();
                continue;
            }
            self.capture(from, &transmit.payload);
            let Some(client) = self.clients.iter().position(|client| client.ip == transmit.to.ip()) else {
                continue;
            };
            let port = transmit.to.port();
            self.deliver(|| Step::ToClient { client, port, from, datagram: transmit.payload.clone() });
        }
        while let Some(id) = self.server.poll_given_up() {
            self.to_carry.remove(&id);
        }
        while let Some(connection) = self.server.poll_close() {
            self.connections.remove(&connection);
        }
        if let Some(at) = self.server.poll_timeout() {
            self.at(at, Step::ServerTimer);
        }
    }
}

fn response(job: u64, size: usize) -> Vec<u8> {
    let head = format!("HTTP/1.1 200 OK\r\nX-Job: {job}\r\n\r\n");
    let mut http = head.into_bytes();
    http.resize(size.max(http.len()), b'x');
    http
}

fn job_of(response: &[u8]) -> u64 {
    let text = std::str::from_utf8(response).unwrap();
    text.split("X-Job: ").nth(1).unwrap().split("\r\n").next().unwrap().parse().unwrap()
}

fn http_of(method: &str, job: u64) -> String {
    format!("{method} /{job} HTTP/1.1\r\nHost: example\r\n\r\n")
}

fn new_server(rng: &mut StdRng, now: Instant) -> (Server, SharedWindow) {
    let config = ServerConfig {
        connections: ConnectionLimits { total: 8, per_client: 3, ..ConnectionLimits::default() },
        ..ServerConfig::default()
    };
    let mut server = Server::new(config, rng.random(), rng.random(), now, 1_700_000_000);
    let window = Arc::new(Mutex::new(ReplayWindow::new(WindowConfig::default(), rng.random(), now)));
    server.share_window(Arc::clone(&window));
    (server, window)
}
