//! Applications that take their time before an answer begins.

use crate::support::objects;
use crate::support::way::{Rate, Way};
use crate::world::{Weather, World};
use crate::{calm, over};
use std::time::Duration;
use tidegate_trickles::client::Read;

/// Opens that ask for long packets and such as ask for short ones wait for the same, and are answered at once: their
/// answers are no continuations of each other.
#[test]
fn an_answer_that_takes_seconds_to_begin_when_opens_were_repeated_then_the_transfer_goes_on_at_once() {
    let way = Way { delay: Duration::from_millis(1), ..Way::default() };
    for thinks in (0..60).step_by(2).map(|tenths| Duration::from_millis(100 * tenths)) {
        for (seed, lost) in (0..4).flat_map(|seed| (0..12).map(move |lost| (seed, lost))) {
            let (encrypted, down) = (seed > 1, Way { lost: (lost, 1), ..way });
            let weather = Weather { down, thinks: Some(thinks), encrypted, ..over(way) };
            let mut world = World::new(seed, weather, objects(&[300_000]));
            let took = world.fetch_all();
            let what = format!("seed {seed}, {thinks:?}, without packet {lost}: {took:?}");
            assert_eq!(world.servers[0].0.counters().trickles_forged_total.get(), 0, "{what}");
            // What tells the key is waited for as long as an open's answer.
            let most = if encrypted && lost == 0 { 1100 } else { 400 };
            assert!(took < thinks + Duration::from_millis(most), "{what}");
        }
    }
}

/// On a path of 2 ms a timeout is 200 ms, however long the application takes.
#[test]
fn an_answer_that_takes_long_to_begin_when_packets_are_lost_after_it_then_that_costs_no_more_than_elsewhere()
{
    let way = Way { delay: Duration::from_millis(1), ..Way::default() };
    for thinks in [0, 150, 950, 2900, 5000].map(Duration::from_millis) {
        for (seed, lost) in (0..2).flat_map(|seed| (0..40).map(move |lost| (seed, lost))) {
            let weather = Weather { down: Way { lost: (lost, 8), ..way }, thinks: Some(thinks), ..over(way) };
            let mut world = World::new(seed, weather, objects(&[60_000]));
            for turn in 0..4 {
                let took = world.fetch_all();
                // Without a first answer, opens are 1 and 2 s apart.
                let most = Duration::from_millis(if lost == 0 { 3100 } else { 300 });
                let what = format!("seed {seed}, {thinks:?}, without packet {lost} and more, turn {turn}");
                assert!(took < thinks + most, "{what}: {took:?}");
            }
        }
    }
}

/// Reads a request to its end; a second one is made once so many bytes are here.
fn read_and_ask_beside(world: &mut World, request: u32, bytes: usize) -> Option<(u32, Duration)> {
    let (mut buffer, mut received, mut second) = ([0; 4000], 0, None);
    loop {
        match world.read(request, &mut buffer) {
            Ok(Read::Data(count)) => received += count,
            Ok(Read::End) => return second,
            Ok(Read::Pending) => assert!(world.step(), "hangs: {:?}", world.client),
            other => panic!("{other:?}"),
        }
        if received >= bytes && second.is_none() {
            second = Some((world.client.request(b"/object/1", world.instant()).unwrap(), world.now));
        }
    }
}

/// Packets that waited for an answer looked lost: the window was cut to two packets, and everything else that the client
/// had asked for waited, too.
#[test]
fn a_request_whose_answer_takes_seconds_to_begin_when_another_is_under_way_then_that_goes_on_and_nothing_is_lost()
 {
    let rate = Some(Rate::of(20_000_000, 125_000));
    let way = Way { rate, ..calm().down };
    let of = |thinks_ms| {
        let thinks = Duration::from_millis(thinks_ms);
        let weather = Weather { thinks: Some(thinks), ..over(way) };
        let mut world = World::new(0, weather, objects(&[8_000_000, 8_000]));
        let first = world.client.request(b"/object/0", world.instant()).unwrap();
        let (second, asked) = read_and_ask_beside(&mut world, first, 2_000_000).unwrap();
        let took = world.now - asked;
        assert_eq!(world.client.loss_events(), 0, "{thinks:?}");
        // The open's are another matter.
        let timeouts = world.servers[0].0.counters().trickles_timeouts_total.get();
        assert_eq!(timeouts, 0, "{thinks:?}");
        read_and_ask_beside(&mut world, second, usize::MAX);
        let all = world.now - asked;
        assert!(all <= took.max(thinks + Duration::from_millis(200)), "{thinks:?}: {all:?}");
        (took, world.servers[0].0.counters().trickles_requests_total.get())
    };
    let (usual, thinks) = (of(0), of(5000));
    assert!(thinks.0 < usual.0.mul_f64(1.02), "{thinks:?} for {usual:?}");
    // It is sent again after 0.2, 0.4, 0.8 s and so on.
    assert!(thinks.1 < usual.1 + 20, "{thinks:?} for {usual:?}");
}

/// With nothing else under way the client repeats itself less and less, and starts nothing over.
#[test]
fn a_later_request_whose_answer_takes_seconds_to_begin_then_it_is_repeated_a_few_times_and_costs_no_window() {
    for thinks in [1, 5, 15].map(Duration::from_secs) {
        let mut world = World::new(0, Weather { thinks: Some(thinks), ..calm() }, objects(&[60_000]));
        world.fetch_all();
        let asked = |world: &World| world.servers[0].0.counters().trickles_requests_total.get();
        let before = (asked(&world), world.client.timeouts());
        let took = world.fetch_all();
        assert!(took < thinks + Duration::from_millis(150), "{took:?}");
        assert_eq!((world.client.timeouts(), world.client.loss_events()), (before.1, 0), "{thinks:?}");
        // 200 ms, and then twice as long each time; and the acknowledgements of the answer.
        let repeated = (thinks.as_secs_f64() / 0.2).log2().ceil() as u64;
        assert!(asked(&world) - before.0 < 8 + repeated, "{thinks:?}: {} requests", asked(&world) - before.0);
    }
}
