//! Clients, a lossy network with an attacker, and a server, all in virtual time. A failure prints its seed.
#![allow(clippy::unwrap_used, reason = "a test may end with a panic")]

mod faults;
mod world;

use std::time::Duration;

use faults::Faults;
use world::{Conditions, World};

const STEADY: Faults = Faults { bursts: (0.0, Duration::ZERO), blackouts: None, given_up: 0.0 };

const LOSSY: Conditions = Conditions {
    loss: 0.05,
    duplication: 0.03,
    reordering: 0.1,
    broken_connections: 0.02,
    slow: 0.02,
    attack: 0.2,
    faults: STEADY,
};

fn run(seed: u64, conditions: Conditions, clients: usize, requests: u64) -> World {
    let mut world = World::new(seed, conditions, clients);
    world.run(requests);
    world.check_outcome();
    world
}

#[test]
fn every_request_is_answered_once_whatever_the_seed() {
    for seed in 0..150 {
        run(seed, LOSSY, 5, 150);
    }
}

#[test]
fn every_request_is_answered_once_when_a_third_of_the_datagrams_is_lost() {
    let conditions = Conditions { loss: 0.33, duplication: 0.2, reordering: 0.5, ..LOSSY };
    for seed in 1000..1030 {
        run(seed, conditions, 3, 100);
    }
}

#[test]
fn every_request_is_answered_by_tcp_when_all_datagrams_are_lost() {
    let world = run(1, Conditions { loss: 1.0, attack: 0.0, ..LOSSY }, 2, 50);
    assert_eq!(world.server.metrics().dhttp_responses_udp_total.get(), 0);
}

#[test]
fn every_request_is_answered_once_when_losses_come_in_bursts() {
    let faults = Faults { bursts: (0.02, Duration::from_millis(700)), ..STEADY };
    for seed in 2000..2030 {
        let world = run(seed, Conditions { faults, ..LOSSY }, 4, 300);
        assert!(world.server.metrics().dhttp_requests_resent_total.get() > 0);
    }
}

#[test]
fn every_request_is_answered_once_through_blackouts_longer_than_the_timers() {
    let faults = Faults { blackouts: Some((Duration::from_secs(13), Duration::from_secs(9))), ..STEADY };
    for seed in 3000..3006 {
        let world = run(seed, Conditions { faults, ..LOSSY }, 4, 6000);
        assert!(world.server.metrics().dhttp_requests_resent_total.get() > 0);
    }
}

#[test]
fn users_who_give_up_early_do_no_harm_to_the_others() {
    let faults = Faults { given_up: 0.5, ..STEADY };
    for seed in 4000..4010 {
        let world = run(seed, Conditions { faults, slow: 0.3, ..LOSSY }, 4, 500);
        assert!(world.given_up > 50, "seed {seed}: {}", world.given_up);
    }
}

#[test]
fn a_storm_of_forged_and_malformed_datagrams_changes_no_answer() {
    for seed in 5000..5010 {
        let world = run(seed, Conditions { attack: 1.0, ..LOSSY }, 4, 500);
        let metrics = world.server.metrics();
        assert!(metrics.dhttp_requests_short_total.get() > 0);
        assert!(metrics.dhttp_requests_bad_header_total.get() > 0);
        assert!(metrics.dhttp_requests_bad_http_total.get() > 0);
        assert!(metrics.dhttp_tokens_refused_total.get() > 0);
    }
}

#[test]
fn a_hundred_thousand_requests_with_loss_duplication_and_reordering_are_answered_once() {
    let world = run(7, LOSSY, 20, 100_000);
    let metrics = world.server.metrics();
    // That the test exercised what it is for.
    assert!(metrics.dhttp_requests_answered_total.get() > 0);
    assert!(metrics.dhttp_requests_duplicate_total.get() > 0);
    assert!(metrics.dhttp_connections_failed_total.get() > 0);
    assert!(metrics.dhttp_responses_connection_total.get() > 10_000);
    assert!(metrics.dhttp_repairs_total.get() > 0 && world.in_pieces > 0);
}

#[test]
fn without_loss_nothing_is_resent_and_short_responses_go_by_udp() {
    let perfect = Conditions {
        loss: 0.0,
        duplication: 0.0,
        reordering: 0.0,
        broken_connections: 0.0,
        slow: 0.0,
        attack: 0.0,
        faults: STEADY,
    };
    let world = run(3, perfect, 5, 2000);
    let metrics = world.server.metrics();
    assert_eq!(metrics.dhttp_high_loss.get(), 0);
    assert_eq!(metrics.dhttp_requests_resent_total.get(), 0);
    assert_eq!(world.short_by_udp, world.short_asked);
    assert!(world.in_pieces > 0);
    assert_eq!(metrics.dhttp_repairs_total.get(), 0);
}

#[test]
fn what_must_not_be_repeated_goes_by_datagram_and_is_executed_once() {
    let world = run(9, LOSSY, 5, 5_000);
    let metrics = world.server.metrics();
    assert!(world.once_by_udp > 300, "{}", world.once_by_udp);
    assert!(metrics.dhttp_once_repeated_total.get() > 0, "responses were lost, and sent again");
    assert_eq!(world.outcomes_unknown, 0, "without a restart every outcome is known");
}

#[test]
fn across_restarts_nothing_is_executed_twice() {
    let mut unknown = 0;
    for seed in 0..40 {
        let mut world = World::new(seed, Conditions { loss: 0.2, duplication: 0.2, ..LOSSY }, 5);
        world.restart_at((1..20).map(|n| std::time::Duration::from_millis(n * 400)));
        world.run(1000);
        world.check_outcome();
        unknown += world.outcomes_unknown;
        assert!(world.once_by_udp > 10);
    }
    assert!(unknown > 0, "some requests were lost with the server that had them");
}

#[test]
fn a_seed_gives_the_same_run_twice() {
    let trace = || {
        let world = run(11, LOSSY, 3, 300);
        (world.steps, world.datagrams_to_server, world.server.metrics().dhttp_responses_udp_total.get())
    };
    assert_eq!(trace(), trace());
}
