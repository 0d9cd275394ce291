//! Client and servers on a simulated network and clock: whatever is lost, repeated, reordered, damaged or forgotten, the
//! bytes arrive exactly. A failure prints its seed; `TRICKLES_SEED=n` runs that one, `TRICKLES_RUNS=n` that many.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

mod support;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use support::{Generated, Random, byte_at, objects};
use tidegate_trickles::client::{self, Client, Read};
use tidegate_trickles::files::FileService;
use tidegate_trickles::http::HttpService;
use tidegate_trickles::keys::KeyRing;
use tidegate_trickles::server::{self, Application, Server};

/// One network and its faults; chances in thousandths.
#[derive(Clone, Debug)]
struct Weather {
    delay: Duration,
    jitter: Duration,
    loss: u64,
    /// Lost beside those on the way to the server.
    loss_up: u64,
    /// Bursts of losses (Gilbert and Elliott), each way by itself: chances that one begins and that it ends; most packets of a
    /// burst are lost.
    bursts: Option<(u64, u64)>,
    /// Come up to a round trip late, after several later ones.
    late: u64,
    duplication: u64,
    damage: u64,
    /// Time between the deaths of servers; another instance takes over each time.
    wipe_every: Option<Duration>,
    /// How long a server is away after its death.
    outage: Duration,
    rotate_every: Option<Duration>,
    rebind_every: Option<Duration>,
    servers: usize,
    spray: bool,
    /// Bottleneck towards the client: time a packet takes, and packets that queue.
    bottleneck: Option<(Duration, u64)>,
}

enum Delivery {
    ToServer { peer: SocketAddr, datagram: Vec<u8> },
    ToClient { peer: SocketAddr, datagram: Vec<u8> },
}

struct World {
    seed: u64,
    random: Random,
    weather: Weather,
    start: Instant,
    now: Duration,
    queue: BinaryHeap<Reverse<(Duration, u64)>>,
    deliveries: BTreeMap<u64, Delivery>,
    sequence: u64,
    keys: KeyRing,
    epoch: u8,
    objects: Generated,
    service: fn(Generated) -> Box<dyn Application>,
    servers: Vec<(Server, Box<dyn Application>)>,
    /// Until when each server is away.
    away: Vec<Duration>,
    /// From when `away` counts.
    gone_from: Duration,
    turn: usize,
    peer: SocketAddr,
    client: Client,
    link_free: Duration,
    /// Whether a burst of losses is under way, to the server and to the client.
    in_burst: [bool; 2],
    sent: u64,
    refused: u64,
    next_wipe: Duration,
    next_rotation: Duration,
    next_rebind: Duration,
}

/// Of 1000 packets of a burst so many are lost.
const BURST_LOSS: u64 = 700;
/// Opens before a client gives up: no weather here lasts longer.
const PATIENCE: u32 = 100;
const CLOCK_START_MS: u64 = 1_700_000_000_000;

impl World {
    fn new(seed: u64, weather: Weather, objects: Generated) -> Self {
        Self::with_service(seed, weather, objects, |objects| Box::new(FileService::new(objects)))
    }

    fn with_service(
        seed: u64,
        weather: Weather,
        objects: Generated,
        service: fn(Generated) -> Box<dyn Application>,
    ) -> Self {
        let start = Instant::now();
        let keys = KeyRing::new(1, &[42; 16]);
        let mut world = Self {
            seed,
            random: Random(seed),
            start,
            now: Duration::ZERO,
            queue: BinaryHeap::new(),
            deliveries: BTreeMap::new(),
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
            client: Client::new(
                client::Config { max_attempts: PATIENCE, cubic: seed % 2 == 1, ..client::Config::default() },
                &[seed as u8; 16],
                start,
            ),
            link_free: Duration::ZERO,
            in_burst: [false; 2],
            sent: 0,
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

    fn wall_ms(&self) -> u64 {
        CLOCK_START_MS + self.now.as_millis() as u64
    }

    fn instant(&self) -> Instant {
        self.start + self.now
    }

    fn send(&mut self, mut delivery: Delivery) {
        let mut at = self.now;
        if let (Some((each, room)), Delivery::ToClient { .. }) = (self.weather.bottleneck, &delivery) {
            let waiting = self.link_free.saturating_sub(self.now).as_nanos() / each.as_nanos().max(1);
            if waiting as u64 >= room {
                return;
            }
            self.link_free = self.link_free.max(self.now) + each;
            at = self.link_free;
        }
        if self.loses(matches!(delivery, Delivery::ToServer { .. })) {
            return;
        }
        if self.random.chance(self.weather.damage) {
            let (Delivery::ToServer { datagram, .. } | Delivery::ToClient { datagram, .. }) = &mut delivery;
            // UDP's checksum would catch this; the protocol must bear it all the same where it is authenticated.
            if matches!(self.random.below(2), 0) {
                datagram.truncate(self.random.below(datagram.len() as u64) as usize);
            } else {
                datagram[0] ^= 0x10;
            }
        }
        let copies = if self.random.chance(self.weather.duplication) { 2 } else { 1 };
        for _ in 0..copies {
            let mut jitter = self.weather.jitter.mul_f64(self.random.below(1000) as f64 / 1000.0);
            if self.random.chance(self.weather.late) {
                jitter += 2 * self.weather.delay.mul_f64(self.random.below(1000) as f64 / 1000.0);
            }
            self.sequence += 1;
            self.queue.push(Reverse((at + self.weather.delay + jitter, self.sequence)));
            let copy = match &delivery {
                Delivery::ToServer { peer, datagram } => {
                    Delivery::ToServer { peer: *peer, datagram: datagram.clone() }
                }
                Delivery::ToClient { peer, datagram } => {
                    Delivery::ToClient { peer: *peer, datagram: datagram.clone() }
                }
            };
            self.deliveries.insert(self.sequence, copy);
        }
    }

    fn loses(&mut self, up: bool) -> bool {
        if let Some((begins, ends)) = self.weather.bursts {
            let turns = self.random.chance(if self.in_burst[usize::from(up)] { ends } else { begins });
            self.in_burst[usize::from(up)] ^= turns;
            if self.in_burst[usize::from(up)] && self.random.chance(BURST_LOSS) {
                return true;
            }
        }
        self.random.chance(self.weather.loss) || (up && self.random.chance(self.weather.loss_up))
    }

    fn transmit(&mut self) {
        while let Some(datagram) = self.client.poll_transmit(self.instant()) {
            assert!(datagram.len() <= 1472, "seed {}: a datagram of {} bytes", self.seed, datagram.len());
            self.sent += 1;
            self.send(Delivery::ToServer { peer: self.peer, datagram });
        }
        self.client.check_invariants();
    }

    fn misfortunes(&mut self) {
        while let Some(every) = self.weather.wipe_every.filter(|_| self.now >= self.next_wipe) {
            let victim = self.random.below(self.servers.len() as u64) as usize;
            self.servers[victim] = self.fresh_server();
            self.away[victim] = self.next_wipe + self.weather.outage;
            self.next_wipe += every / 2 + every.mul_f64(self.random.below(1000) as f64 / 1000.0);
        }
        if self.now >= self.next_rotation {
            self.epoch = self.epoch.wrapping_add(1);
            self.keys.rotate(self.epoch, &[self.epoch; 16]);
            for (server, _) in &mut self.servers {
                server.set_keys(self.keys.clone());
            }
            self.next_rotation = self.now + self.weather.rotate_every.unwrap_or(Duration::MAX);
        }
        if self.now >= self.next_rebind {
            self.peer.set_port(self.peer.port() + 1);
            self.next_rebind = self.now + self.weather.rebind_every.unwrap_or(Duration::MAX);
        }
    }

    /// Advances to the next event. `false` when nothing is left to happen.
    fn step(&mut self) -> bool {
        self.transmit();
        let timer = self.client.poll_timeout().map(|at| at.saturating_duration_since(self.start));
        let packet = self.queue.peek().map(|Reverse((at, _))| *at);
        let Some(next) = [timer, packet].into_iter().flatten().min() else { return false };
        self.now = self.now.max(next);
        self.misfortunes();
        if packet.is_some_and(|at| at <= self.now) {
            let Some(Reverse((_, id))) = self.queue.pop() else { return true };
            match self.deliveries.remove(&id) {
                Some(Delivery::ToServer { peer, datagram }) => self.serve(peer, &datagram),
                Some(Delivery::ToClient { peer, datagram }) if peer == self.peer => {
                    // An error is a damaged datagram or one of an old connection.
                    let _ = self.client.handle_datagram(&datagram, self.instant());
                }
                _ => {}
            }
        } else {
            self.client.handle_timeout(self.instant());
        }
        true
    }

    fn serve(&mut self, peer: SocketAddr, datagram: &[u8]) {
        self.turn += usize::from(self.weather.spray);
        let index = self.turn % self.servers.len();
        if (self.gone_from..self.away[index]).contains(&self.now) {
            return;
        }
        let now_ms = self.wall_ms();
        let mut answers: Vec<Vec<u8>> = Vec::new();
        let (server, service) = &mut self.servers[index];
        let result =
            server.handle(datagram, peer, now_ms, service, &mut |packet| answers.push(packet.to_vec()));
        self.refused += u64::from(result.is_err());
        let opens = datagram.get(1) == Some(&1);
        let answered: usize = answers.iter().map(Vec::len).sum();
        assert!(!opens || answered <= 3 * datagram.len(), "seed {}: amplification", self.seed);
        for datagram in answers {
            assert!(datagram.len() <= 1472, "seed {}: a packet of {} bytes", self.seed, datagram.len());
            self.send(Delivery::ToClient { peer, datagram });
        }
    }

    /// Fetches all objects at once and compares every byte.
    fn fetch_all(&mut self) -> Duration {
        let paths: Vec<(Vec<u8>, u64)> = self.objects.0.clone().into_iter().collect();
        let mut open: BTreeMap<u32, (Vec<u8>, u64, u64)> = BTreeMap::new();
        for (path, length) in paths {
            let request = self.client.request(&path, self.instant()).unwrap();
            open.insert(request, (path, length, 0));
        }
        let began = self.now;
        let mut buffer = [0; 4000];
        let mut steps = 0_u64;
        while !open.is_empty() {
            steps += 1;
            assert!(steps < 5_000_000, "seed {}: endless: {:?}", self.seed, self.client);
            for request in open.keys().copied().collect::<Vec<_>>() {
                loop {
                    let (path, length, position) = open.get_mut(&request).unwrap();
                    match self.client.read(request, &mut buffer) {
                        Ok(Read::Data(count)) => {
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
                let limit = Duration::from_secs(3600);
                assert!(self.now < limit, "seed {}: too slow in {:?}", self.seed, self.weather);
            }
        }
        self.now - began
    }
}

fn calm() -> Weather {
    Weather {
        delay: Duration::from_millis(25),
        jitter: Duration::ZERO,
        loss: 0,
        loss_up: 0,
        bursts: None,
        late: 0,
        duplication: 0,
        damage: 0,
        wipe_every: None,
        outage: Duration::ZERO,
        rotate_every: None,
        rebind_every: None,
        servers: 1,
        spray: false,
        bottleneck: None,
    }
}

fn random_weather(random: &mut Random) -> Weather {
    let milliseconds = |random: &mut Random, bound| Duration::from_millis(random.below(bound));
    let sometimes = |random: &mut Random, chance: u64, from: u64, bound: u64| {
        random.chance(chance).then(|| Duration::from_millis(from + random.below(bound)))
    };
    let wipe_every = sometimes(random, 400, 50, 2000);
    let outage = if random.chance(500) { wipe_every.unwrap_or_default() / 4 } else { Duration::ZERO };
    Weather {
        delay: milliseconds(random, 150),
        jitter: if random.chance(500) { milliseconds(random, 40) } else { Duration::ZERO },
        loss: if random.chance(700) { random.below(200) } else { 0 },
        loss_up: if random.chance(300) { random.below(250) } else { 0 },
        bursts: random.chance(300).then(|| (1 + random.below(20), 50 + random.below(300))),
        late: if random.chance(300) { random.below(200) } else { 0 },
        duplication: if random.chance(300) { random.below(400) } else { 0 },
        damage: if random.chance(200) { random.below(50) } else { 0 },
        wipe_every,
        outage,
        rotate_every: sometimes(random, 300, 2000, 5000),
        rebind_every: sometimes(random, 100, 5000, 20_000),
        servers: 1 + random.below(4) as usize,
        spray: random.chance(500),
        bottleneck: random
            .chance(400)
            .then(|| (Duration::from_micros(100 + random.below(3000)), 5 + random.below(60))),
    }
}

fn seeds(default: u64) -> std::ops::Range<u64> {
    let variable = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    match variable("TRICKLES_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..variable("TRICKLES_RUNS").unwrap_or(default),
    }
}

#[test]
fn every_byte_arrives_in_any_weather() {
    for seed in seeds(5000) {
        let mut random = Random(seed ^ 0x5eed);
        let weather = random_weather(&mut random);
        let lengths: Vec<u64> = (0..1 + random.below(4))
            .map(|_| match random.below(4) {
                0 => random.below(3),
                1 => random.below(3000),
                _ => random.below(200_000),
            })
            .collect();
        World::new(seed, weather, objects(&lengths)).fetch_all();
    }
}

/// One HTTP conversation: all objects asked for in turn, some requests sent ahead; every byte of body is compared.
fn converse(world: &mut World) {
    let paths: Vec<(Vec<u8>, u64)> = world.objects.0.clone().into_iter().collect();
    let mut ahead = 1 + world.random.below(5) as usize;
    let stream = world.client.start(world.instant()).unwrap();
    let (mut asked, mut answered, mut received) = (0, 0, Vec::new());
    let mut buffer = [0; 4000];
    loop {
        while asked < paths.len() && asked < answered + ahead {
            let cookie = "c".repeat(world.random.below(1500) as usize);
            let path = String::from_utf8_lossy(&paths[asked].0);
            let head = format!("GET {path} HTTP/1.1\r\nHost: sim\r\nCookie: {cookie}\r\n\r\n");
            asked += 1;
            let last = asked == paths.len() && world.random.chance(500);
            world.client.write(stream, head.as_bytes(), last, world.instant()).unwrap();
        }
        match world.client.read(stream, &mut buffer) {
            Ok(Read::Data(count)) => received.extend_from_slice(&buffer[..count]),
            Ok(Read::Pending) if answered < paths.len() => {
                assert!(world.step(), "seed {}: hangs: {:?}", world.seed, world.client);
                assert!(world.now < Duration::from_secs(3600), "seed {}: too slow", world.seed);
            }
            Ok(Read::Pending) => break,
            Ok(Read::End) => break assert_eq!(answered, paths.len(), "seed {}: ended early", world.seed),
            // All the keys that the conversation began with are gone.
            Ok(Read::Reset(code)) => {
                assert!(code == 1 && world.epoch > 4, "seed {}: reset {code}", world.seed);
                return;
            }
            Err(error) => panic!("seed {}: {error} in {:?}", world.seed, world.weather),
        }
        while let Some(end) = received.windows(4).position(|window| window == b"\r\n\r\n") {
            let (path, length) = &paths[answered];
            if received.len() < end + 4 + *length as usize {
                break;
            }
            assert!(received.starts_with(b"HTTP/1.1 200 OK\r\n"), "seed {}", world.seed);
            let body = received[end + 4..].iter().take(*length as usize);
            let wrong = body.enumerate().find(|&(at, &byte)| byte != byte_at(path, at as u64));
            assert_eq!(wrong, None, "seed {}: object {answered}", world.seed);
            received.drain(..end + 4 + *length as usize);
            answered += 1;
            ahead = 1 + world.random.below(5) as usize;
        }
    }
    assert!(received.is_empty(), "seed {}: {} bytes too many", world.seed, received.len());
}

#[test]
fn every_conversation_goes_on_in_any_weather() {
    for seed in seeds(1000) {
        let mut random = Random(seed ^ 0xc0de);
        let weather = random_weather(&mut random);
        let lengths: Vec<u64> = (0..1 + random.below(12)).map(|_| random.below(20_000)).collect();
        converse(&mut World::with_service(seed, weather, objects(&lengths), |objects| {
            Box::new(HttpService::new(objects, || 1_700_000_000))
        }));
    }
}

#[test]
fn on_a_calm_network_nothing_is_refused_or_sent_twice() {
    let mut world = World::new(1, calm(), objects(&[1_000_000]));
    let took = world.fetch_all();
    assert_eq!(world.refused, 0);
    let counters = world.servers[0].0.counters();
    assert_eq!(counters.trickles_timeouts_total.get(), 0);
    assert_eq!(counters.trickles_recoveries_total.get(), 0);
    let packets = counters.trickles_packets_sent_total.get();
    assert!((712..760).contains(&packets), "{packets} packets for 1 MB");
    // 3, 10+, 20+, … packets in each round trip of 50 ms: slow start takes seven of them.
    assert!(took < Duration::from_millis(500), "{took:?}");
}

#[test]
fn a_small_object_takes_one_round_trip() {
    let mut world = World::new(1, calm(), objects(&[2500]));
    assert_eq!(world.fetch_all(), Duration::from_millis(50));
}

#[test]
fn a_server_that_dies_in_mid_transfer_is_replaced_unnoticed() {
    for seed in 0..20 {
        let weather = Weather { wipe_every: Some(Duration::from_millis(100)), ..calm() };
        let mut world = World::new(seed, weather, objects(&[500_000]));
        let took = world.fetch_all();
        assert_eq!(world.refused, 0);
        assert!(took < Duration::from_millis(500), "no packet is lost with the memory: {took:?}");
    }
}

#[test]
fn an_outage_of_all_servers_costs_its_length_and_a_timeout() {
    for seed in 0..20 {
        let outage = Duration::from_millis(300);
        let mut world = World::new(seed, calm(), objects(&[500_000]));
        world.away[0] = Duration::from_millis(150) + outage;
        world.gone_from = Duration::from_millis(150);
        let took = world.fetch_all();
        // Two timeouts, of 200 and 400 ms: the first falls into the outage. Then slow start begins anew.
        assert!(took < Duration::from_millis(500 + 200 + 400 + 550), "{took:?}");
    }
}

#[test]
fn a_server_that_never_comes_back_is_an_error_not_a_hang() {
    let mut world = World::new(1, calm(), objects(&[500_000]));
    let request = world.client.request(b"/object/0", world.instant()).unwrap();
    world.away[0] = Duration::MAX;
    while world.step() {
        assert!(world.now < Duration::from_secs(3600));
    }
    assert_eq!(world.client.failure(), Some(client::ClientError::Unreachable { attempts: PATIENCE }));
    assert!(world.client.read(request, &mut [0; 10]).is_err());
}

#[test]
fn packets_sprayed_over_eight_servers_make_one_transfer() {
    let mut world = World::new(1, Weather { servers: 8, spray: true, ..calm() }, objects(&[1_000_000]));
    let took = world.fetch_all();
    assert!(took < Duration::from_millis(500), "{took:?}");
    let shares: Vec<f64> = world
        .servers
        .iter()
        .map(|(server, _)| server.counters().trickles_packets_sent_total.get() as f64)
        .collect();
    let (sum, squares) = (shares.iter().sum::<f64>(), shares.iter().map(|share| share * share).sum::<f64>());
    let jain = sum * sum / (shares.len() as f64 * squares);
    assert!(jain > 0.99, "{jain}: {shares:?}");
}

#[test]
fn a_bottleneck_is_filled_and_shared_without_timeouts() {
    // A packet each ms, a queue of one bandwidth-delay product.
    let weather = Weather { bottleneck: Some((Duration::from_millis(1), 50)), ..calm() };
    // Even seeds are clients of Reno, odd ones of CUBIC.
    for seed in [0, 1] {
        let mut world = World::new(seed, weather.clone(), objects(&[5_000_000]));
        let took = world.fetch_all();
        let ideal = Duration::from_millis(5_000_000 / 1368);
        let counters = world.servers[0].0.counters();
        assert!(counters.trickles_recoveries_total.get() > 0, "losses are repaired by recovery");
        assert_eq!(counters.trickles_bad_account_total.get(), 0, "client and server agree on every window");
        assert!(
            took < ideal.mul_f64([1.2, 1.35][seed as usize]),
            "seed {seed}: {took:?} where the link needs {ideal:?}"
        );
    }
}

/// A pipe that Reno cannot fill again after a loss within the transfer.
#[test]
fn a_long_fat_pipe_is_filled_by_cubic_before_reno_does() {
    let pipe = |seed| {
        // 0.05 ms a packet at 2 · 100 ms: 4,000 packets on their way, and a queue of a tenth of that.
        let weather = Weather {
            delay: Duration::from_millis(100),
            bottleneck: Some((Duration::from_micros(50), 400)),
            ..calm()
        };
        let mut world = World::new(seed, weather, objects(&[60_000_000]));
        let took = world.fetch_all();
        assert!(world.servers[0].0.counters().trickles_recoveries_total.get() > 0);
        took
    };
    let (reno, cubic) = (pipe(0), pipe(1));
    assert!(cubic < reno.mul_f64(0.8), "{cubic:?} by CUBIC, {reno:?} by Reno");
}

#[test]
fn a_server_without_cubic_when_asked_for_it_then_answers_with_reno() {
    let mut world = World::new(1, calm(), objects(&[300_000]));
    let config = server::Config { cubic: false, ..server::Config::default() };
    world.servers[0].0 = Server::new(config, world.keys.clone(), world.wall_ms());
    world.fetch_all();
    assert_eq!(world.servers[0].0.counters().trickles_malformed_total.get(), 0);
}
