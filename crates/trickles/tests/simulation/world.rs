//! A client, servers, and the network between them, on a clock of their own.

use crate::support::way::{Traffic, Way};
use crate::support::{Generated, Random, byte_at};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tidegate_trickles::client::{self, Client, ClientError, Read};
use tidegate_trickles::files::FileService;
use tidegate_trickles::keys::KeyRing;
use tidegate_trickles::sealed::{
    ANSWER_OVERHEAD_BYTES, ClientSeal, Encryption, Incoming, REQUEST_OVERHEAD_BYTES, Reply, ServerSeal,
    Unsealed,
};
use tidegate_trickles::server::{self, Application, Event, Minisocket, Outer, Server};
use tidegate_trickles::wire::Answer;

/// One network and its faults.
#[derive(Clone, Debug)]
pub struct Weather {
    /// To the server.
    pub up: Way,
    /// To the client.
    pub down: Way,
    /// Time between the deaths of servers; another instance takes over each time.
    pub wipe_every: Option<Duration>,
    /// How long a server is away after its death.
    pub outage: Duration,
    pub rotate_every: Option<Duration>,
    pub rebind_every: Option<Duration>,
    pub servers: usize,
    pub spray: bool,
    pub encrypted: bool,
    /// What the client thinks that the path carries.
    pub datagram_bytes: u16,
    /// How long each answer to new input takes to begin: what it is made of comes from somewhere else. Another server
    /// that is asked for the same does not begin anew.
    pub thinks: Option<Duration>,
}

/// A request whose answer has not begun.
struct Waiting {
    server: usize,
    datagram: Vec<u8>,
    reply: Option<Reply>,
    socket: Minisocket,
    since: Duration,
}

/// IPv4 and UDP.
const HEADER_BYTES: u64 = 28;
/// What a path of 1500 bytes carries of UDP.
const MOST_BYTES: usize = 1472;

#[derive(Clone)]
enum Delivery {
    ToServer { peer: SocketAddr, datagram: Vec<u8> },
    ToClient { peer: SocketAddr, datagram: Vec<u8> },
}

pub struct World {
    pub seed: u64,
    pub random: Random,
    pub weather: Weather,
    start: Instant,
    pub now: Duration,
    queue: BinaryHeap<Reverse<(Duration, u64)>>,
    deliveries: BTreeMap<u64, Delivery>,
    waiting: BTreeMap<u64, Waiting>,
    /// From when on what a request has to be answered with is there, by what of its input was consumed before.
    begins: BTreeMap<(u32, u64), Duration>,
    sequence: u64,
    pub keys: KeyRing,
    pub epoch: u8,
    pub objects: Generated,
    service: fn(Generated) -> Box<dyn Application>,
    pub servers: Vec<(Server, Box<dyn Application>)>,
    /// Until when each server is away.
    pub away: Vec<Duration>,
    /// From when `away` counts.
    pub gone_from: Duration,
    turn: usize,
    peer: SocketAddr,
    pub client: Client,
    /// The ways up and down.
    ways: [Traffic; 2],
    seals: Option<(ClientSeal, ServerSeal)>,
    pub refused: u64,
    next_wipe: Duration,
    next_rotation: Duration,
    /// When the client's address changes for the next time, by the doing of somebody on the way.
    pub next_rebind: Duration,
}

/// Opens before a client gives up, of more than an hour. Bursts of losses end after so many packets, and few are sent while
/// nothing is answered.
pub const PATIENCE: u32 = 300;
const CLOCK_START_MS: u64 = 1_700_000_000_000;

impl World {
    pub fn new(seed: u64, weather: Weather, objects: Generated) -> Self {
        Self::with_service(seed, weather, objects, |objects| Box::new(FileService::new(objects)))
    }

    pub fn with_service(
        seed: u64,
        weather: Weather,
        objects: Generated,
        service: fn(Generated) -> Box<dyn Application>,
    ) -> Self {
        let start = Instant::now();
        let keys = KeyRing::new(1, &[42; 16]);
        let mut config =
            client::Config { max_attempts: PATIENCE, cubic: seed % 2 == 1, ..client::Config::default() };
        config.datagram_bytes = weather.datagram_bytes;
        let seals = weather.encrypted.then(|| {
            config.datagram_bytes -= ANSWER_OVERHEAD_BYTES as u16;
            config.padded_bytes -= REQUEST_OVERHEAD_BYTES;
            config.short_datagram_bytes -= ANSWER_OVERHEAD_BYTES as u16;
            let client = ClientSeal::new(Encryption::On, &[seed as u8; 16]);
            (client.expect("it is on"), ServerSeal::new(&[!seed as u8; 16], true))
        });
        config.padded_bytes = config.padded_bytes.min(config.datagram_bytes.into());
        let mut world = Self {
            seed,
            random: Random(seed),
            start,
            now: Duration::ZERO,
            queue: BinaryHeap::new(),
            deliveries: BTreeMap::new(),
            waiting: BTreeMap::new(),
            begins: BTreeMap::new(),
            sequence: 0,
            keys,
            epoch: 1,
            objects,
            service,
            servers: Vec::new(),
            away: vec![Duration::ZERO; weather.servers],
            gone_from: Duration::ZERO,
            turn: 0,
            peer: "192.0.2.1:4000".parse().unwrap(),
            client: Client::new(config, &[seed as u8; 16], start),
            ways: [Traffic::over(weather.up), Traffic::over(weather.down)],
            seals,
            refused: 0,
            next_wipe: weather.wipe_every.unwrap_or(Duration::MAX),
            next_rotation: weather.rotate_every.unwrap_or(Duration::MAX),
            next_rebind: weather.rebind_every.unwrap_or(Duration::MAX),
            weather,
        };
        for _ in 0..world.weather.servers {
            let server = world.fresh_server();
            world.servers.push(server);
        }
        world
    }

    fn fresh_server(&self) -> (Server, Box<dyn Application>) {
        let config = server::Config {
            replay_entries: 1 << 10,
            // Off, far too small, and large enough.
            cache_entries: [0, 3, 1 << 10][self.weather.servers % 3],
            ..server::Config::default()
        };
        (Server::new(config, self.keys.clone(), self.wall_ms()), (self.service)(self.objects.clone()))
    }

    pub fn wall_ms(&self) -> u64 {
        CLOCK_START_MS + self.now.as_millis() as u64
    }

    pub fn instant(&self) -> Instant {
        self.start + self.now
    }

    fn send(&mut self, mut delivery: Delivery) {
        let up = matches!(delivery, Delivery::ToServer { .. });
        let (Delivery::ToServer { datagram, .. } | Delivery::ToClient { datagram, .. }) = &mut delivery;
        assert!(datagram.len() <= MOST_BYTES, "seed {}: a datagram of {} bytes", self.seed, datagram.len());
        let way = &mut self.ways[usize::from(!up)];
        let arrivals = way.carry(datagram.len() as u64 + HEADER_BYTES, self.now, &mut self.random);
        if self.random.chance(way.way.damage) {
            // UDP's checksum would catch this; the protocol must bear it all the same where it is authenticated.
            let place = self.random.below(datagram.len() as u64) as usize;
            match self.random.below(2) {
                0 => datagram.truncate(place),
                _ if self.seals.is_some() => datagram[place] ^= 1 << self.random.below(8),
                _ => datagram[0] ^= 0x10,
            }
        }
        for at in arrivals {
            self.sequence += 1;
            self.queue.push(Reverse((at, self.sequence)));
            self.deliveries.insert(self.sequence, delivery.clone());
        }
    }

    fn transmit(&mut self) {
        while let Some(datagram) = self.client.poll_transmit(self.instant()) {
            let datagram = match &mut self.seals {
                Some((seal, _)) => seal.seal(&datagram),
                None => datagram,
            };
            self.send(Delivery::ToServer { peer: self.peer, datagram });
        }
        self.client.check_invariants();
    }

    fn misfortunes(&mut self) {
        while let Some(every) = self.weather.wipe_every.filter(|_| self.now >= self.next_wipe) {
            let victim = self.random.below(self.servers.len() as u64) as usize;
            self.servers[victim] = self.fresh_server();
            self.waiting.retain(|_, waiting| waiting.server != victim);
            self.away[victim] = self.next_wipe + self.weather.outage;
            self.next_wipe += every / 2 + every.mul_f64(self.random.below(1000) as f64 / 1000.0);
        }
        // Keys rotate in silence, too.
        while let Some(every) = self.weather.rotate_every.filter(|_| self.now >= self.next_rotation) {
            self.epoch = self.epoch.wrapping_add(1);
            self.keys.rotate(self.epoch, &[self.epoch; 16]);
            for (server, _) in &mut self.servers {
                server.set_keys(self.keys.clone());
            }
            self.next_rotation += every;
        }
        if self.now >= self.next_rebind {
            self.peer.set_port(self.peer.port() + 1);
            self.next_rebind = self.now.saturating_add(self.weather.rebind_every.unwrap_or(Duration::MAX));
        }
    }

    /// Advances to the next event. `false` when nothing is left to happen.
    pub fn step(&mut self) -> bool {
        self.transmit();
        let timer = self.client.poll_timeout().map(|at| at.saturating_duration_since(self.start));
        let packet = self.queue.peek().map(|Reverse((at, _))| *at);
        let Some(next) = [timer, packet].into_iter().flatten().min() else { return false };
        self.now = self.now.max(next);
        self.misfortunes();
        if packet.is_some_and(|at| at <= self.now) {
            let Some(Reverse((_, id))) = self.queue.pop() else { return true };
            if let Some(waiting) = self.waiting.remove(&id) {
                self.resume(waiting);
            }
            match self.deliveries.remove(&id) {
                Some(Delivery::ToServer { peer, datagram }) => self.serve(peer, &datagram),
                Some(Delivery::ToClient { peer, datagram }) if peer == self.peer => self.take(&datagram),
                _ => {}
            }
        } else {
            self.client.handle_timeout(self.instant());
        }
        true
    }

    fn take(&mut self, datagram: &[u8]) {
        let opened = self.seals.as_mut().map(|(seal, _)| seal.open(datagram));
        // An error is a damaged datagram or one of an old connection.
        let _ = match opened {
            None => self.client.handle_datagram(datagram, self.instant()),
            Some(Ok(Incoming::Packet(packet))) => self.client.handle_datagram(&packet, self.instant()),
            Some(Ok(Incoming::Send(datagram))) => {
                self.client.handle_sign_of_life(self.instant());
                return self.send(Delivery::ToServer { peer: self.peer, datagram });
            }
            Some(_) => return,
        };
    }

    fn serve(&mut self, peer: SocketAddr, datagram: &[u8]) {
        self.turn += usize::from(self.weather.spray);
        let index = self.turn % self.servers.len();
        if (self.gone_from..self.away[index]).contains(&self.now) {
            return;
        }
        let mut answers: Vec<Vec<u8>> = Vec::new();
        let unsealed = match &self.seals {
            None => Ok(Unsealed::Plain),
            Some((_, seal)) => seal.open(datagram, &self.keys, self.servers[index].0.counters()),
        };
        match unsealed {
            Ok(Unsealed::Plain) => self.answer(index, peer, datagram, None, datagram.len(), &mut answers),
            Ok(Unsealed::Request(inner, reply)) => {
                self.answer(index, peer, &inner, Some(reply), datagram.len(), &mut answers);
            }
            Ok(Unsealed::Answer(answer)) => answers.push(answer),
            Err(_) => self.refused += 1,
        }
        for datagram in answers {
            self.send(Delivery::ToClient { peer, datagram });
        }
    }

    fn answer(
        &mut self,
        index: usize,
        peer: SocketAddr,
        datagram: &[u8],
        reply: Option<Reply>,
        received_bytes: usize,
        answers: &mut Vec<Vec<u8>>,
    ) {
        let now_ms = self.wall_ms();
        let (server, service) = &mut self.servers[index];
        let seals = &mut self.seals;
        let mut transmit = |packet: &[u8]| answers.push(enclose(seals, reply.as_ref(), packet));
        let answer_bytes = if reply.is_some() { ANSWER_OVERHEAD_BYTES } else { 0 };
        let outer = Outer { received_bytes, answer_bytes };
        match server.receive_within(datagram, outer, peer, now_ms) {
            Ok(Some((event, mut socket))) => {
                let begins =
                    self.weather.thinks.map(|takes| begins(&mut self.begins, &event, self.now, takes));
                if let Some(begins) = begins.filter(|&begins| begins > self.now) {
                    server.answer_meanwhile(&event, &mut socket, service, &mut transmit);
                    self.sequence += 1;
                    self.queue.push(Reverse((begins, self.sequence)));
                    let (datagram, since) = (datagram.to_vec(), self.now);
                    self.waiting
                        .insert(self.sequence, Waiting { server: index, datagram, reply, socket, since });
                    return;
                }
                server.answer(&event, socket, service, &mut transmit);
            }
            Ok(None) => {}
            Err(refusal) => {
                self.refused += 1;
                if let Some((connection, code)) = refusal.answer() {
                    let mut notice = Vec::new();
                    Answer::encode_refused(connection, code, &mut notice);
                    transmit(&notice);
                }
            }
        }
        let opens = datagram.get(1) == Some(&1);
        let answered: usize = answers.iter().map(Vec::len).sum();
        assert!(!opens || answered <= 3 * received_bytes, "seed {}: amplification", self.seed);
    }

    /// Answers a request that has waited for what it is answered with.
    fn resume(&mut self, waiting: Waiting) {
        let Waiting { server, datagram, reply, mut socket, since } = waiting;
        let peer = socket.peer();
        socket.waited(self.now - since);
        let (server, service) = &mut self.servers[server];
        let mut answers: Vec<Vec<u8>> = Vec::new();
        let seals = &mut self.seals;
        // An error is a key that is gone by now.
        let _ = server.resume(&datagram, socket, service, &mut |packet: &[u8]| {
            answers.push(enclose(seals, reply.as_ref(), packet));
        });
        for datagram in answers {
            self.send(Delivery::ToClient { peer, datagram });
        }
    }

    /// Reads output of a request; that something can be read is known before, and nothing else is.
    pub fn read(&mut self, request: u32, buffer: &mut [u8]) -> Result<Read, ClientError> {
        let readable = self.client.is_readable(request);
        let read = self.client.read(request, buffer);
        assert_eq!(readable, read != Ok(Read::Pending), "seed {}: {read:?}", self.seed);
        read
    }

    /// Where one packet in ten is answered before keys are gone, 200 kB take half a day. What tells a transfer that stands
    /// still from one that is slow is that nothing comes.
    pub fn assert_goes_on(&self, began: Duration, progress_at: Duration) {
        let hour = Duration::from_secs(3600);
        let limit = (progress_at + hour).min(began + 24 * hour);
        let (seed, weather, client) = (self.seed, &self.weather, &self.client);
        assert!(self.now < limit, "seed {seed}: too slow in {weather:?}: {client:?}");
    }

    /// Bytes of the first object that can be read within so many seconds.
    pub fn read_for(&mut self, seconds: u64) -> u64 {
        let path = self.objects.0.keys().next().unwrap().clone();
        let request = self.client.request(&path, self.instant()).unwrap();
        let (mut buffer, mut position) = ([0; 4000], 0);
        while self.now < Duration::from_secs(seconds) {
            match self.read(request, &mut buffer) {
                Ok(Read::Data(count)) => position += count as u64,
                Ok(Read::Pending) => assert!(self.step(), "seed {}: hangs: {:?}", self.seed, self.client),
                Ok(Read::End) => break,
                other => panic!("seed {}: {other:?}", self.seed),
            }
        }
        position
    }

    /// Fetches all objects at once and compares every byte.
    pub fn fetch_all(&mut self) -> Duration {
        let paths: Vec<(Vec<u8>, u64)> = self.objects.0.clone().into_iter().collect();
        let mut open: BTreeMap<u32, (Vec<u8>, u64, u64)> = BTreeMap::new();
        for (path, length) in paths {
            let request = self.client.request(&path, self.instant()).unwrap();
            open.insert(request, (path, length, 0));
        }
        let began = self.now;
        let mut progress_at = began;
        let mut buffer = [0; 4000];
        let mut steps = 0_u64;
        while !open.is_empty() {
            steps += 1;
            assert!(steps < 5_000_000, "seed {}: endless: {:?}", self.seed, self.client);
            for request in open.keys().copied().collect::<Vec<_>>() {
                loop {
                    let (path, length, position) = open.get_mut(&request).unwrap();
                    match self.read(request, &mut buffer) {
                        Ok(Read::Data(count)) => {
                            progress_at = self.now;
                            for byte in &buffer[..count] {
                                assert_eq!(
                                    *byte,
                                    byte_at(path, *position),
                                    "seed {}: at {position}",
                                    self.seed
                                );
                                *position += 1;
                            }
                        }
                        Ok(Read::Pending) => break,
                        Ok(Read::End) => {
                            assert_eq!(position, length, "seed {}", self.seed);
                            progress_at = self.now;
                            open.remove(&request);
                            self.client.discard(request);
                            break;
                        }
                        other => {
                            panic!("seed {}: request {request}: {other:?} in {:?}", self.seed, self.weather)
                        }
                    }
                }
            }
            if !open.is_empty() {
                assert!(self.step(), "seed {}: hangs: {:?}", self.seed, self.client);
                self.assert_goes_on(began, progress_at);
            }
        }
        self.now - began
    }
}

fn enclose(seals: &mut Option<(ClientSeal, ServerSeal)>, reply: Option<&Reply>, packet: &[u8]) -> Vec<u8> {
    match (reply, seals) {
        (Some(reply), Some((_, seal))) => seal.seal(reply, packet),
        _ => packet.to_vec(),
    }
}

/// When what answers all inputs of an event is there.
fn begins(
    known: &mut BTreeMap<(u32, u64), Duration>,
    event: &Event<'_>,
    now: Duration,
    takes: Duration,
) -> Duration {
    let of_inputs =
        event.inputs.iter().map(|input| *known.entry((input.request, input.consumed)).or_insert(now + takes));
    of_inputs.max().unwrap_or(now)
}
