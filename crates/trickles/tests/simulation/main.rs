//! Client and servers on a simulated network and clock: whatever is lost, repeated, reordered, damaged or forgotten,
//! the bytes arrive exactly. A failure prints its seed; `TRICKLES_SEED=n` runs that one, `TRICKLES_RUNS=n` that many,
//! beside `TRICKLES_SEED=n` from that one on.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

#[path = "../support/mod.rs"]
mod support;
mod thinks;
mod world;

use std::time::Duration;
use support::way::{Bursts, Dark, Detour, Longest, Rate, Uneven, Way, patterns};
use support::{Random, byte_at, objects};
use tidegate_trickles::client::{self, Read};
use tidegate_trickles::http::HttpService;
use tidegate_trickles::server::{self, Server};
use world::{PATIENCE, Weather, World};

fn calm() -> Weather {
    over(Way { delay: Duration::from_millis(25), ..Way::default() })
}

/// A server at the end of a path that is the same both ways.
fn over(way: Way) -> Weather {
    Weather {
        up: way,
        down: way,
        wipe_every: None,
        outage: Duration::ZERO,
        rotate_every: None,
        rebind_every: None,
        servers: 1,
        spray: false,
        encrypted: false,
        datagram_bytes: client::LARGEST_DATAGRAM_BYTES,
        thinks: None,
    }
}

/// A link on which a packet of full length takes `each`, and so many wait.
fn link(each: Duration, packets: u64) -> Rate {
    Rate::of((1500.0 * 8.0 / each.as_secs_f64()) as u64, 1500 * packets)
}

fn random_weather(random: &mut Random) -> Weather {
    let sometimes = |random: &mut Random, chance: u64, from: u64, bound: u64| {
        random.chance(chance).then(|| Duration::from_millis(from + random.below(bound)))
    };
    let wipe_every = sometimes(random, 400, 50, 2000);
    let outage = if random.chance(500) { wipe_every.unwrap_or_default() / 4 } else { Duration::ZERO };
    let rebind_every = sometimes(random, 100, 5000, 20_000);
    let mut down = random_way(random);
    // Most faults of paths come both ways.
    let mut up = if random.chance(500) { Way { rate: None, ..down } } else { random_way(random) };
    if rebind_every.is_some() {
        // Timeouts tell that an address has changed. Of round trips of seconds they take minutes, and by then it has
        // changed again.
        for way in [&mut up, &mut down] {
            (way.late_by, way.detour) = (None, None);
        }
    }
    let encrypted = random.chance(300);
    // A key is accepted for four times as long. The wait for an open's answer, 16 s, must not outlast the key that the
    // server has told: where most packets are lost, no open would come in time.
    let from = if encrypted { 6000 } else { 2000 };
    let rotate_every = sometimes(random, 300, from, 5000);
    // Of a source of its own: weather without it stays what it was.
    let thinks = sometimes(&mut Random(random.0 ^ 0x7e57), 250, 0, 7000);
    Weather {
        up,
        down,
        wipe_every,
        outage,
        rotate_every,
        rebind_every,
        servers: 1 + random.below(4) as usize,
        spray: random.chance(500),
        encrypted,
        datagram_bytes: [1472, 1472, 1472, 1200, 900, 740][random.below(6) as usize],
        thinks,
    }
}

fn random_way(random: &mut Random) -> Way {
    let ms = |random: &mut Random, bound| Duration::from_millis(random.below(bound));
    let some =
        |random: &mut Random, chance, bound| if random.chance(chance) { random.below(bound) } else { 0 };
    let mut way = Way {
        delay: ms(random, 150),
        jitter: if random.chance(500) { ms(random, 40) } else { Duration::ZERO },
        rate: random.chance(400).then(|| {
            let rate = link(Duration::from_micros(100 + random.below(3000)), 5 + random.below(60));
            let other = random.chance(200);
            let other = other.then(|| (rate.bits_per_s / (1 + random.below(20)), ms(random, 3000)));
            Rate { other, ..rate }
        }),
        loss: some(random, 700, 300),
        bursts: random
            .chance(300)
            .then(|| Bursts { begins: 1 + random.below(20), ends: 20 + random.below(300) }),
        periodic: random.chance(150).then(|| 2 + random.below(60)),
        lost: if random.chance(200) { (random.below(60), 1 + random.below(20)) } else { (0, 0) },
        dark: random.chance(100).then(|| {
            let (from, lasts) = (ms(random, 3000), ms(random, 6000));
            Dark { from, lasts, every: 2 * lasts + Duration::from_millis(1000) + ms(random, 5000) }
        }),
        late: some(random, 300, 200),
        duplication: if random.chance(100) { 1000 } else { some(random, 300, 400) },
        damage: some(random, 200, 50),
        longest: random.chance(100).then(|| Longest {
            from: ms(random, 3000),
            bytes: 1228 + random.below(270),
            turns: random.chance(300).then(|| ms(random, 4000)),
        }),
        ..rare_faults(random)
    };
    // One kind of heavy loss at a time: where hardly one packet in ten is answered, hours are no sign of a fault.
    if way.periodic.is_some_and(|period| period < 5) {
        (way.loss, way.bursts, way.uneven) = (0, None, None);
    } else if way.uneven.is_some() {
        (way.loss, way.bursts) = (0, None);
    }
    way
}

fn rare_faults(random: &mut Random) -> Way {
    let ms = |random: &mut Random, bound| Duration::from_millis(random.below(bound));
    Way {
        late_by: random.chance(300).then(|| ms(random, 4000)),
        storm: if random.chance(100) { random.below(30) } else { 0 },
        uneven: random.chance(100).then(|| Uneven {
            bytes: 60 + random.below(1400),
            longer: random.below(400),
            shorter: random.below(400),
        }),
        detour: random.chance(100).then(|| Detour { more: ms(random, 1000), turns: ms(random, 4000) }),
        ..Way::default()
    }
}

fn seeds(default: u64) -> std::ops::Range<u64> {
    let variable = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let (seed, runs) = (variable("TRICKLES_SEED"), variable("TRICKLES_RUNS"));
    let first = seed.unwrap_or(0);
    first..first + runs.unwrap_or(if seed.is_some() { 1 } else { default })
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

/// Whichever packet is lost, or several in a row, first and last ones among them: the transfer goes on within a timeout
/// or two.
#[test]
fn a_transfer_when_any_one_packet_is_lost_or_some_in_a_row_then_it_takes_a_timeout_more_at_most() {
    let clean = calm().down;
    for length in [0, 3000, 40_000] {
        let took = |weather| World::new(0, weather, objects(&[length])).fetch_all();
        let usual = took(calm());
        for (from, count) in (0..40).flat_map(|from| [1, 2, 5].map(|count| (from, count))) {
            let faulty = Way { lost: (from, count), ..clean };
            for weather in [Weather { up: faulty, ..calm() }, Weather { down: faulty, ..calm() }] {
                let took = took(weather.clone());
                // Timers double: a second and more for an open, 200 ms for all others.
                let most = if from < 3 { 1100 } else { 250 } * ((1 << count) - 1) + 300;
                assert!(
                    took <= usual + Duration::from_millis(most),
                    "{length} bytes, lost {:?} up and {:?} down: {took:?} for {usual:?}",
                    weather.up.lost,
                    weather.down.lost
                );
            }
        }
    }
}

#[test]
fn every_byte_arrives_on_paths_with_one_kind_of_fault() {
    let clean =
        Way { delay: Duration::from_millis(30), rate: Some(Rate::of(10_000_000, 75_000)), ..Way::default() };
    for (name, up, down) in patterns(clean) {
        let mut longest = Duration::ZERO;
        for seed in seeds(10) {
            let weather = Weather { up, down, encrypted: seed % 4 > 1, ..calm() };
            let took = World::new(seed, weather, objects(&[300_000, 0, 20_000])).fetch_all();
            longest = longest.max(took);
        }
        println!("{name}: {longest:?} at most");
    }
}

/// Twenty-two timeouts of the shortest length: three times an answer is short enough only at the third attempt, then
/// the client opens anew. Without short answers it would be seven timeouts that double, 25 s.
#[test]
fn a_transfer_whose_path_begins_to_lose_long_packets_in_silence_goes_on_within_seconds() {
    let clean = calm().down;
    let sunk = Way { longest: Some(Longest::from(Duration::from_millis(200), 1300)), ..clean };
    let took = |weather| World::new(0, weather, objects(&[2_000_000])).fetch_all();
    let usual = took(calm());
    for (up, down) in [(clean, sunk), (sunk, sunk)] {
        let took = took(Weather { up, down, ..calm() });
        assert!(took > usual && took < usual + Duration::from_secs(7), "{took:?} for {usual:?}");
    }
}

/// Opens without an answer are 16 s apart at last. So are the dark times, and the fifth open falls into one.
#[test]
fn a_path_that_is_dark_whenever_an_open_is_due_then_an_open_comes_at_another_time() {
    let second = Duration::from_secs(1);
    // 1, 2, 4 and 8 s after each other: the fifth open is sent after 15 s, all others would be after 31, 47, …
    let dark = Some(Dark { from: 13 * second, lasts: 4 * second, every: 16 * second });
    let before = Way { lost: (0, 4), dark, ..calm().up };
    World::new(0, Weather { up: before, ..calm() }, objects(&[3000])).fetch_all();
}

/// Nobody tells the client: a translator on the way has forgotten it, and lets its packets leave from another port.
#[test]
fn a_client_whose_address_changes_in_mid_transfer_then_the_transfer_goes_on_within_some_round_trips() {
    for encrypted in [false, true] {
        let weather = Weather { encrypted, ..calm() };
        let usual = World::new(0, weather.clone(), objects(&[2_000_000])).fetch_all();
        // From the first answer to the last.
        for at in (105..usual.as_millis() as u64).step_by(5).map(Duration::from_millis) {
            let mut world = World::new(0, weather.clone(), objects(&[2_000_000]));
            world.next_rebind = at;
            let took = world.fetch_all();
            // A timeout, a round trip to be told and one to open, and slow start from its begin.
            let most = usual + Duration::from_millis(200 + 50 + 50 + 400);
            assert!(took < most, "encrypted {encrypted}, from {at:?} on: {took:?} for {usual:?}");
        }
    }
}

/// Keys last for at most 12 s, and the client knows the server's. What it sends next comes when that is gone, and so
/// would all that it sends 12 to 16 s after learning another one.
#[test]
fn a_server_whose_keys_are_gone_before_the_next_open_when_it_says_so_then_the_client_opens_at_once() {
    let up = Way { lost: (1, 6), ..calm().up };
    let rotate_every = Some(Duration::from_secs(3));
    let mut world = World::new(0, Weather { up, rotate_every, encrypted: true, ..calm() }, objects(&[3000]));
    world.fetch_all();
}

/// One long packet is left to come, or one of the server's own accord, and a short one goes beside it: since that
/// passes, no timeout follows the other.
#[test]
fn a_path_that_loses_long_packets_when_short_ones_pass_beside_them_then_what_is_long_is_asked_for_in_short_ones()
 {
    for length in (1200..9000).step_by(390) {
        for from in [0, 30, 60, 90, 120, 150] {
            let longest = Some(Longest::from(Duration::from_millis(from), 1300));
            let weather = Weather { down: Way { longest, ..calm().down }, ..calm() };
            for (seed, encrypted) in [(0, false), (1, true)] {
                let weather = Weather { encrypted, ..weather.clone() };
                let took = World::new(seed, weather.clone(), objects(&[length])).fetch_all();
                let most = Duration::from_secs(7);
                assert!(took < most, "{took:?} for {length} bytes, without long packets from {from} ms on");
                let mut world = World::with_service(seed, weather, objects(&[length; 3]), |objects| {
                    Box::new(HttpService::new(objects, || 1_700_000_000))
                });
                converse(&mut world);
                let took = world.now;
                assert!(
                    took < most,
                    "{took:?} for 3 times {length} bytes, without long packets from {from} ms on"
                );
            }
        }
    }
}

/// The answer that keys are gone comes again and again, also after that of the request which was sent anew.
#[test]
fn keys_that_are_gone_when_late_copies_say_so_then_the_request_goes_on() {
    for seed in 0..20 {
        let copies = Way {
            duplication: 1000,
            storm: 27,
            late: 1000,
            late_by: Some(Duration::from_millis(2000)),
            loss: 200,
            rate: Some(Rate::of(10_000_000, 75_000)),
            dark: Some(Dark {
                from: Duration::from_millis(900),
                lasts: Duration::from_secs(14),
                every: Duration::from_secs(20),
            }),
            ..calm().down
        };
        let rotate_every = Some(Duration::from_secs(3));
        let weather = Weather { down: copies, rotate_every, ..calm() };
        World::new(seed, weather, objects(&[150_000; 6])).fetch_all();
    }
}

/// One HTTP conversation: all objects asked for in turn, some requests sent ahead; every byte of body is compared.
fn converse(world: &mut World) {
    let paths: Vec<(Vec<u8>, u64)> = world.objects.0.clone().into_iter().collect();
    let mut ahead = 1 + world.random.below(5) as usize;
    let stream = world.client.start(world.instant()).unwrap();
    let (mut asked, mut answered, mut received) = (0, 0, Vec::new());
    let began = world.now;
    let mut progress_at = began;
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
        match world.read(stream, &mut buffer) {
            Ok(Read::Data(count)) => {
                progress_at = world.now;
                received.extend_from_slice(&buffer[..count]);
            }
            Ok(Read::Pending) if answered < paths.len() => {
                assert!(world.step(), "seed {}: hangs: {:?}", world.seed, world.client);
                world.assert_goes_on(began, progress_at);
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

/// What is needed first could be the packet that is lost each time.
#[test]
fn a_path_that_loses_every_second_packet_when_fetched_from_or_conversed_over_then_no_loss_repeats_for_ever() {
    let clean = Way { jitter: Duration::from_millis(5), ..calm().down };
    let half = Way { periodic: Some(2), ..clean };
    for (up, down) in [(clean, half), (half, half)] {
        for seed in 0..30 {
            let weather = Weather { up, down, encrypted: seed % 4 > 1, ..calm() };
            let long = World::new(seed, weather.clone(), objects(&[1_000_000])).read_for(60);
            assert!(long > 100_000, "seed {seed}: {long} bytes in a minute");
            let lengths: Vec<u64> = (0..8).map(|number| 500 * number * (seed % 5)).collect();
            converse(&mut World::with_service(seed, weather, objects(&lengths), |objects| {
                Box::new(HttpService::new(objects, || 1_700_000_000))
            }));
        }
    }
}

/// That the keys of a continuation are gone could be said in the packet that is lost each time.
#[test]
fn a_path_that_loses_every_second_packet_when_keys_are_gone_then_the_client_gets_to_know() {
    let dark = Some(Dark {
        from: Duration::from_millis(1700),
        lasts: Duration::from_millis(1900),
        every: Duration::from_millis(8500),
    });
    let half = Way {
        delay: Duration::from_millis(100),
        jitter: Duration::from_millis(13),
        periodic: Some(2),
        dark,
        ..Way::default()
    };
    let rotate_every = Some(Duration::from_millis(2585));
    for seed in 0..40 {
        let weather = Weather { rotate_every, datagram_bytes: 900, ..over(half) };
        let took = World::new(seed, weather, objects(&[130_000, 10_000])).fetch_all();
        assert!(took < Duration::from_secs(1000), "seed {seed}: {took:?}");
    }
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
        assert!(world.now < Duration::from_secs(2 * 3600));
    }
    assert_eq!(world.client.failure(), Some(client::ClientError::Unreachable { attempts: PATIENCE }));
    assert!(world.read(request, &mut [0; 10]).is_err());
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
    let weather =
        Weather { down: Way { rate: Some(link(Duration::from_millis(1), 50)), ..calm().down }, ..calm() };
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
        let way = Way { delay: Duration::from_millis(100), ..Way::default() };
        let rate = Some(link(Duration::from_micros(50), 400));
        let weather = Weather { down: Way { rate, ..way }, ..over(way) };
        let mut world = World::new(seed, weather, objects(&[60_000_000]));
        // Of 20,000 packets a second the others' tables forget in less than a round trip.
        world.servers[0].0 = Server::new(server::Config::default(), world.keys.clone(), world.wall_ms());
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
