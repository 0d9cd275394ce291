//! Who looks like an attacker and is none, and who is one and looks like none; in virtual time.

use std::net::{IpAddr, Ipv4Addr};

use tidegate_core::hooks::{Chain, ChainSource, Decision, Load, ResponseView, Source};
use tidegate_core::{Event, Reason, Verdict};
use tidegate_defence::{Action, Defence, Filter, Rule, Settings};

use crate::support::{BUSY, Sent, direct, get, response};

const STEP_MS: u64 = 250;
const GIVEN_UP: u16 = ResponseView::GIVEN_UP;

fn v4(address: [u8; 4]) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from(address))
}

/// A request that is answered from the cache, if it may be.
fn ask(chain: &Chain, address: IpAddr, target: &str, now_ms: u64) -> Decision {
    let client = chain.locate(address, now_ms);
    chain.request(client, direct(address), &get(target, &Sent::PLAIN), now_ms)
}

/// A request for which an upstream works for `ms`; the decision about it, or if there is none about its response.
fn miss(chain: &Chain, address: IpAddr, target: &str, (status, ms): (u16, u32), now_ms: u64) -> Decision {
    let decision = ask(chain, address, target, now_ms);
    if !decision.is_continue() {
        return decision;
    }
    let response = response(target, status, Source::Missed, ms);
    chain.response(chain.locate(address, now_ms), direct(address), &response, now_ms)
}

fn defence() -> Defence {
    Defence::new(Settings::default(), 5, [5; 32])
}

/// Somebody is challenged on every page.
fn challenging(path: &str) -> Settings {
    let filter = Filter {
        source: None,
        user_agent: String::new(),
        path: path.into(),
        content_type: String::new(),
        methods: Vec::new(),
        action: Action::Challenge,
        dry_run: false,
    };
    Settings { filters: vec![filter], challenge_bits: 0, ..Settings::default() }
}

fn only(reason: Reason, limit: u32, action: Action) -> Settings {
    Settings { rules: vec![Rule { reason, limit, action, dry_run: false }], ..Settings::default() }
}

/// Calls `step` every quarter of a second from `from_ms` to `to_ms`, with a tick after it.
fn run(chain: &Chain, from_ms: u64, to_ms: u64, load: Load, mut step: impl FnMut(u64)) {
    for now_ms in (from_ms..to_ms).step_by(STEP_MS as usize) {
        step(now_ms);
        chain.tick(&load, now_ms + STEP_MS - 1);
    }
}

#[test]
fn visitors_of_an_upstream_that_becomes_slow_are_served_wherever_they_come_from() {
    // All of one network of eight bits; or of seven.
    for networks in [1u32, 7] {
        let chain = defence().chain(0, 1);
        let mut refused = 0;
        run(&chain, 0, 100_000, Load::default(), |now_ms| {
            let ms = if now_ms < 50_000 { 10 } else { 600 };
            // Each asks once a second for twenty seconds; four new ones come every second.
            for place in (0..80u32).filter(|place| u64::from(*place) % 4 == now_ms / STEP_MS % 4) {
                let visitor = (place + 80 * (now_ms as u32 / 20_000)) * 7_919;
                let address = v4([20 + (place % networks) as u8, (visitor >> 8) as u8, visitor as u8, 1]);
                let page = format!("/page/{}", (visitor + now_ms as u32 / 1_000) % 60);
                refused += u32::from(!miss(&chain, address, &page, (200, ms), now_ms).is_continue());
            }
        });
        assert_eq!(refused, 0, "from {networks} networks");
    }
}

#[test]
fn who_costs_many_times_what_others_do_is_asked_for_proof_before_it_is_blocked() {
    let chain = defence().chain(0, 1);
    let mut verdicts = Vec::new();
    run(&chain, 0, 60_000, Load::default(), |now_ms| {
        for reader in 0..20u8 {
            let decision = miss(&chain, v4([20 + reader, 1, 1, 1]), "/page", (200, 20), now_ms);
            assert!(decision.is_continue(), "{decision:?} after {now_ms} ms");
        }
        for bot in 0..if now_ms < 40_000 { 0 } else { 60u8 } {
            let page = format!("/search/{}", now_ms % 7_000);
            verdicts.push(miss(&chain, v4([99, 1, 1, bot]), &page, (203, 900), now_ms).verdict);
        }
    });
    assert!(verdicts.contains(&Verdict::Challenge));
    // Nothing else happens in the first three windows.
    assert!(verdicts.iter().all(|it| matches!(it, Verdict::Continue | Verdict::Challenge)));
    assert_eq!(verdicts.last(), Some(&Verdict::Challenge));
}

#[test]
fn newcomer_in_a_wide_prefix_with_a_few_attackers_is_not_blocked_for_asking_for_the_same() {
    let chain = defence().chain(0, 1);
    let (mut bots, mut pollers) = (Vec::new(), Vec::new());
    run(&chain, 0, 60_000, Load::default(), |now_ms| {
        let step = (now_ms / STEP_MS) as u32;
        for reader in 0..6 {
            let place = (step * 6 + reader) % 40;
            ask(
                &chain,
                v4([20 + (place % 8) as u8, place as u8, 1, 1]),
                &format!("/{}", (step * 7 + reader) % 40),
                now_ms,
            );
        }
        for bot in 0..if now_ms < 25_000 { 0 } else { 12u8 } {
            bots.push(ask(&chain, v4([27, bot * 9, 9, 9]), "/7", now_ms).verdict);
        }
        for poller in 0..if now_ms < 37_000 || !step.is_multiple_of(4) { 0 } else { 10u8 } {
            pollers.push(ask(&chain, v4([27, 100 + poller, 77, 5]), "/7", now_ms).verdict);
        }
    });
    assert!(bots.contains(&Verdict::Challenge));
    assert!(pollers.iter().all(|it| matches!(it, Verdict::Continue | Verdict::Challenge)), "{pollers:?}");
}

/// The cookie that a challenge gives.
fn cookie_of(chain: &Chain, address: IpAddr, decision: Decision, now_ms: u64) -> String {
    let reply = chain.reply(direct(address), &get("/shop", &Sent::PLAIN), decision, now_ms);
    let fields = String::from_utf8(reply.fields).expect("fields are text");
    let (_, rest) = fields.split_once("Set-Cookie: ").expect("a cookie is set");
    rest.split(';').next().unwrap_or_default().to_owned()
}

fn ask_with(chain: &Chain, address: IpAddr, cookie: &str, now_ms: u64) -> Verdict {
    let client = chain.locate(address, now_ms);
    chain.request(client, direct(address), &get("/shop", &Sent { cookie, ..Sent::PLAIN }), now_ms).verdict
}

#[test]
fn first_visits_at_once_from_one_address_are_each_given_a_challenge_and_may_solve_it() {
    let chain = Defence::new(challenging("/shop"), 5, [5; 32]).chain(0, 1);
    let office = v4([25, 1, 1, 1]);
    let decisions: Vec<Decision> = (0..30).map(|_| ask(&chain, office, "/shop", 500)).collect();
    assert!(decisions.iter().all(|decision| decision.verdict == Verdict::Challenge), "{decisions:?}");
    for decision in decisions {
        let cookie = cookie_of(&chain, office, decision, 500);
        assert_eq!(ask_with(&chain, office, &cookie, 700), Verdict::Continue);
    }
}

#[test]
fn who_leaves_challenges_unsolved_in_window_after_window_is_blocked() {
    let chain = Defence::new(challenging("/shop"), 5, [5; 32]).chain(0, 1);
    let program = v4([25, 1, 1, 1]);
    let mut blocked_ms = None;
    run(&chain, 0, 60_000, Load::default(), |now_ms| match ask(&chain, program, "/shop", now_ms).verdict {
        Verdict::Challenge => assert_eq!(blocked_ms, None),
        Verdict::Block(_) => blocked_ms = Some(now_ms),
        verdict => assert_eq!(verdict, Verdict::Reset, "after {now_ms} ms"),
    });
    assert_eq!(blocked_ms, Some(30_000), "in the fourth window");
}

#[test]
fn holder_of_a_pass_is_not_blocked_for_what_a_program_behind_its_address_leaves_unsolved() {
    let defence = Defence::new(challenging("/shop"), 5, [5; 32]);
    let chains = [defence.chain(0, 2), defence.chain(1, 2)];
    let office = v4([25, 1, 1, 1]);
    let challenge = ask(&chains[0], office, "/shop", 0);
    let cookie = cookie_of(&chains[0], office, challenge, 0);
    for now_ms in (0..120_000).step_by(STEP_MS as usize) {
        // The program is on another core than the browser.
        assert_eq!(ask_with(&chains[0], office, &cookie, now_ms), Verdict::Continue, "after {now_ms} ms");
        assert_eq!(ask(&chains[1], office, "/shop", now_ms).verdict, Verdict::Challenge);
        chains.iter().for_each(|chain| chain.tick(&Load::default(), now_ms));
    }
}

#[test]
fn few_clients_who_ask_for_what_fails_or_takes_long_put_nobody_under_stress() {
    for answer in [(500, 5), (200, 60_000)] {
        // The upstream is asked by nobody else; or by three more, whose answers are good.
        for others in [0, 4u8] {
            let defence = defence();
            let chain = defence.chain(0, 1);
            run(&chain, 0, 20_000, Load::default(), |now_ms| {
                for request in 0..9u8 {
                    miss(&chain, v4([11 + request % 3, 9, 9, 9]), "/err", answer, now_ms);
                }
                for reader in 0..others {
                    miss(&chain, v4([20 + reader, 1, 1, 1]), "/page", (200, 20), now_ms);
                }
                assert_eq!(defence.stress(), None, "{answer:?} beside {others}, after {now_ms} ms");
            });
        }
    }
}

#[test]
fn upstream_that_fails_most_clients_is_stress_however_seldom_each_of_them_asks() {
    let defence = defence();
    let chain = defence.chain(0, 1);
    run(&chain, 0, 10_000, Load::default(), |now_ms| {
        // One answer in half a second: no two looks in a row see any.
        let reader = (now_ms / STEP_MS % 12) as u8;
        if reader.is_multiple_of(2) {
            miss(&chain, v4([20 + reader, 1, 1, 1]), "/page", (503, 5), now_ms);
        }
    });
    assert_eq!(defence.stress(), Some(tidegate_defence::Cause::UpstreamErrors));
}

#[test]
fn newcomer_with_a_page_of_many_parts_is_refused_some_of_them_under_stress_and_not_blocked() {
    let chain = defence().chain(0, 1);
    let newcomer = v4([30, 7, 7, 7]);
    let mut decisions = Vec::new();
    run(&chain, 0, 20_000, BUSY, |now_ms| {
        for reader in 0..6u8 {
            ask(&chain, v4([20 + reader, 1, 1, 1]), "/page", now_ms);
        }
        for part in 0..if now_ms == 10_000 { 130 } else { 0 } {
            decisions.push(ask(&chain, newcomer, &format!("/part/{part}"), now_ms));
        }
    });
    let refused = decisions.iter().filter(|decision| decision.verdict == Verdict::Refuse).count();
    assert_eq!((decisions.len(), refused), (130, 30));
    let refusal = decisions[129];
    let reply = chain.reply(direct(newcomer), &get("/", &Sent::PLAIN), refusal, 20_000);
    assert_eq!((refusal.reason, reply.status), (Reason::Stress, 503));
    assert!(ask(&chain, newcomer, "/page", 30_000).is_continue());
}

/// Of ten readers and some others who ask an upstream that takes ten seconds for everything: how many requests of each
/// kind were refused. Each of the others asks `times` as often as a reader does.
fn refused_at_a_slow_upstream(others: u8, times: u32) -> (u32, u32) {
    let chain = defence().chain(0, 1);
    let (mut of_readers, mut of_others) = (0, 0);
    run(&chain, 0, 30_000, Load::default(), |now_ms| {
        let step = now_ms / STEP_MS;
        for reader in (0..10u8).filter(|reader| u64::from(*reader) % 8 == step % 8) {
            let answer = miss(&chain, v4([20 + reader, 1, 1, 1]), "/page", (200, 10_000), now_ms);
            of_readers += u32::from(!answer.is_continue());
        }
        for other in (0..others).filter(|other| u64::from(*other) % 8 == step % 8) {
            for _ in 0..times {
                let answer = miss(&chain, v4([50 + other, 9, 9, 9]), "/heavy", (200, 10_000), now_ms);
                of_others += u32::from(!answer.is_continue());
            }
        }
    });
    (of_readers, of_others)
}

#[test]
fn a_few_who_take_equally_much_of_the_upstreams_time_do_not_excuse_each_other() {
    for attackers in [1, 3, 6] {
        let (of_readers, of_attackers) = refused_at_a_slow_upstream(attackers, 16);
        let asked = u32::from(attackers) * 16 * 15;
        assert_eq!(of_readers, 0, "{attackers} attackers");
        assert!(of_attackers > asked / 2, "{of_attackers} of {asked} by {attackers}");
    }
}

#[test]
fn slow_upstream_is_nobodys_fault_who_asks_as_others_do() {
    for others in [0, 3, 6, 30] {
        assert_eq!(refused_at_a_slow_upstream(others, 1), (0, 0), "{others} more");
        assert_eq!(refused_at_a_slow_upstream(others.min(6), 4), (0, 0), "{others} offices");
    }
}

/// Six readers who are served from the cache.
fn readers(chain: &Chain, now_ms: u64) {
    for reader in 0..6u8 {
        assert!(ask(chain, v4([20 + reader, 1, 1, 1]), "/page", now_ms).is_continue());
    }
}

#[test]
fn who_asks_past_the_cache_is_not_excused_by_what_it_asks_for_beside() {
    for (misses, hits, is_stopped) in [(10, 12, true), (10, 100, true), (4, 10, false)] {
        let settings =
            Settings { rules: only(Reason::CacheBusting, 200, Action::Block).rules, ..Settings::default() };
        let chain = Defence::new(settings, 5, [5; 32]).chain(0, 1);
        let address = v4([11, 9, 9, 9]);
        let mut served = 0;
        run(&chain, 0, 30_000, Load::default(), |now_ms| {
            readers(&chain, now_ms);
            for _ in 0..hits {
                let _ = ask(&chain, address, "/page", now_ms);
            }
            for miss_number in 0..misses {
                let target = format!("/search?{now_ms}.{miss_number}");
                served += u32::from(miss(&chain, address, &target, (200, 20), now_ms).is_continue());
            }
        });
        assert_eq!(served < 330, is_stopped, "{misses} misses and {hits} hits: {served} served");
    }
}

#[test]
fn every_action_of_a_limit_on_responses_acts() {
    type Kind = (Reason, u16);
    let kinds: [Kind; 2] = [(Reason::Errors, 404), (Reason::CacheBusting, 200)];
    let actions = [
        (Action::Delay, Verdict::Delay),
        (Action::Refuse, Verdict::Refuse),
        (Action::Challenge, Verdict::Challenge),
        (Action::Tarpit, Verdict::Tarpit),
        (Action::Reset, Verdict::Reset),
        (Action::Drop, Verdict::Drop),
    ];
    for (reason, status) in kinds {
        for (action, verdict) in actions {
            let chain = Defence::new(only(reason, 40, action), 5, [5; 32]).chain(0, 1);
            readers(&chain, 0);
            let address = v4([11, 1, 1, 1]);
            let verdicts: Vec<Verdict> = (0..60)
                .map(|page| miss(&chain, address, &format!("/no?{page}"), (status, 5), 0).verdict)
                .collect();
            let (before, after) = verdicts.split_at(41);
            assert!(before.iter().all(|it| *it == Verdict::Continue), "{reason:?} {action:?}: {before:?}");
            assert!(after.iter().all(|it| *it == verdict), "{reason:?} {action:?}: {after:?}");
        }
    }
}

#[test]
fn who_gives_up_before_the_answer_is_charged_for_what_the_upstream_does() {
    let chain = defence().chain(0, 1);
    run(&chain, 0, 10_000, Load::default(), |now_ms| {
        for reader in 0..6u8 {
            miss(&chain, v4([20 + reader, 1, 1, 1]), "/page", (200, 400), now_ms);
        }
    });
    let count =
        |address, event| chain.with_tree(|tree| tree.count(tree.find(address).unwrap(), event, 10_000));
    let (hasty, patient) = (v4([11, 9, 9, 9]), v4([12, 9, 9, 9]));
    miss(&chain, hasty, "/search?1", (GIVEN_UP, 30), 10_000);
    assert_eq!(count(hasty, Event::Novel), 1);
    assert!((350..=400).contains(&count(hasty, Event::UpstreamMs)), "{}", count(hasty, Event::UpstreamMs));
    miss(&chain, patient, "/search?2", (GIVEN_UP, 5_000), 10_000);
    assert_eq!(count(patient, Event::UpstreamMs), 5_000);
}

#[test]
fn random_urls_are_seen_for_what_they_are_when_nobody_waits_for_the_answers() {
    let chain = Defence::new(only(Reason::CacheBusting, 200, Action::Block), 5, [5; 32]).chain(0, 1);
    let address = v4([11, 9, 9, 9]);
    let mut asked = 0;
    run(&chain, 0, 10_000, Load::default(), |now_ms| {
        readers(&chain, now_ms);
        for turn in 0..11 {
            let target = format!("/rand?{now_ms}.{turn}");
            asked += u32::from(miss(&chain, address, &target, (GIVEN_UP, 30), now_ms).is_continue());
        }
    });
    assert_eq!(asked, 200);
}

#[test]
fn requests_that_are_given_up_do_not_hide_that_the_upstreams_are_slow() {
    let defence = Defence::new(Settings { rules: Vec::new(), ..Settings::default() }, 5, [5; 32]);
    let chain = defence.chain(0, 1);
    run(&chain, 0, 10_000, Load::default(), |now_ms| {
        for request in 0..5u8 {
            miss(&chain, v4([20 + request, 9, 9, 9]), "/slow", (200, 2_500), now_ms);
        }
        for request in 0..10u8 {
            let target = format!("/rand?{now_ms}.{request}");
            miss(&chain, v4([60 + request, 9, 9, 9]), &target, (GIVEN_UP, 20), now_ms);
        }
    });
    assert_eq!(defence.stress(), Some(tidegate_defence::Cause::UpstreamDelay));
}
