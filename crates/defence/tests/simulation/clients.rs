//! Single clients: limits, filters, exemptions, and what operators say.

use std::net::IpAddr;
use std::time::Duration;

use tidegate_core::hooks::{Decision, Load, RequestLine, RequestView, Slow, Source};
use tidegate_core::{NodeId, Reason, Verdict};
use tidegate_defence::{Action, Exemption, Filter, Settings};

use crate::site::{SECOND_MS, STEP_MS, Site, calm};
use crate::support::{Sent, direct, get, host, response};

#[test]
fn password_guessing_is_blocked_and_a_typing_error_is_not() {
    let (mut site, ..) = calm(6);
    let (guesser, user) = (host([99, 4], 1), host([99, 4], 2));
    let tries = (0..).take_while(|_| site.ask(guesser, "/login", 5, 401).is_continue()).count();
    assert!(tries <= 30, "{tries}");
    assert!((0..5).all(|_| site.ask(user, "/login", 5, 401).is_continue()));
}

#[test]
fn load_test_from_one_address_is_nobodys_flood() {
    let mut site = Site::new(Settings::default(), 7);
    let tester = host([127, 0], 1);
    for _ in 0..200 {
        assert!((0..1_000).all(|_| site.ask(tester, "/page/0", 1, 200).is_continue()));
        site.now_ms += STEP_MS;
        site.chain.tick(&site.load, site.now_ms);
    }
    // Others come, and it is one.
    for other in 0..5 {
        site.ask(host([99, 5], other), "/page/1", 1, 200);
    }
    assert_eq!(site.ask(tester, "/page/0", 1, 200).reason, Reason::RequestRate);
}

#[test]
fn slow_clients_are_blocked_when_they_do_it_again_and_again() {
    let mut site = Site::new(Settings::default(), 8);
    let address = host([99, 6], 1);
    let client = site.client(address);
    let decisions: Vec<bool> =
        (0..12).map(|_| site.chain.slow(client, direct(address), Slow::Head, 0).is_continue()).collect();
    assert_eq!(decisions.iter().filter(|fine| **fine).count(), 10);
}

#[test]
fn connections_are_limited_at_once_and_refused_after_a_block() {
    let mut site = Site::new(Settings::default(), 9);
    for other in 0..5 {
        site.ask(host([99, 5], other), "/page/1", 1, 200);
    }
    let address = host([99, 6], 1);
    let mut open: Vec<(NodeId, Decision)> =
        (0..300).map(|_| site.chain.connect(direct(address), 0)).collect();
    let dropped = open.iter().filter(|(_, decision)| decision.verdict == Verdict::Drop).count();
    assert_eq!(dropped, 300 - 256);
    open.drain(..).for_each(|(client, _)| site.chain.close(client, direct(address), 0));
    assert!(site.chain.connect(direct(address), 0).1.is_continue());
    while site.ask(address, "/login", 1, 401).is_continue() {}
    let (_, decision) = site.chain.connect(direct(address), 1);
    assert_eq!((decision.verdict, decision.reason), (Verdict::Reset, Reason::Blocked));
    let (_, decision) = site.chain.connect(direct(address), 601 * SECOND_MS);
    assert!(decision.is_continue(), "a block has its time");
}

#[test]
fn dry_run_tells_and_does_nothing() {
    let settings = Settings { dry_run: true, ..Settings::default() };
    let mut site = Site::new(settings, 10);
    let notices = site.defence.take_notices().unwrap();
    let address = host([99, 6], 1);
    assert!((0..100).all(|_| site.ask(address, "/login", 1, 401).is_continue()));
    let notice = notices.try_recv().unwrap();
    assert!(notice.dry_run && notice.decision.reason == Reason::Errors);
    let count = site.defence.counts().into_iter().find(|count| count.reason == Reason::Errors).unwrap();
    assert_eq!((count.acted, count.dry_run > 0), (0, true));
}

#[test]
fn exempt_clients_are_never_acted_on() {
    let source = "99.6.0.0/16".parse().unwrap();
    let exempt = vec![Exemption { source, user_agent: String::new() }];
    let mut site = Site::new(Settings { exempt, ..Settings::default() }, 11);
    assert!((0..100).all(|_| site.ask(host([99, 6], 1), "/login", 1, 401).is_continue()));
    let blocked = (0..100).find(|_| !site.ask(host([99, 7], 1), "/login", 1, 401).is_continue());
    assert!(blocked.is_some());
}

#[test]
fn clients_that_are_exempt_by_their_user_agent_are_judged_when_it_is_known() {
    let exempt = vec![Exemption { source: "99.6.0.0/16".parse().unwrap(), user_agent: "goodbot".into() }];
    let methods = vec!["GET".into()];
    let filter = Filter {
        source: Some("99.6.9.0/24".parse().unwrap()),
        user_agent: String::new(),
        path: String::new(),
        content_type: String::new(),
        methods,
        action: Action::Reset,
        dry_run: false,
    };
    let site = Site::new(Settings { exempt, filters: vec![filter], ..Settings::default() }, 11);
    let (bot, impostor) = (host([99, 6], 1), host([99, 6], 2));
    for address in (1..9).map(|other| host([10, 7], other)).chain([bot, impostor]) {
        let client = site.chain.locate(address, 0);
        let _ = site.chain.request(client, direct(address), &get("/", &Sent::PLAIN), 0);
    }
    let ask = |address, user_agent| {
        let (client, peer) = (site.chain.locate(address, 0), direct(address));
        let fields = Sent { user_agent, ..Sent::PLAIN };
        site.chain.request(client, peer, &get("/login", &fields), 0)
    };
    let fail = |address| {
        let (client, peer) = (site.chain.locate(address, 0), direct(address));
        let response = response("/login", 401, Source::Here, 0);
        site.chain.response(client, peer, &response, 0)
    };
    // What was not asked yet and what was answered says nothing of the User-Agent: nobody there is acted on.
    for address in [bot, impostor] {
        for _ in 0..600 {
            let (client, decision) = site.chain.connect(direct(address), 0);
            assert!(decision.is_continue());
            site.chain.close(client, direct(address), 0);
        }
        assert!((0..300).all(|_| fail(address).is_continue()));
        let client = site.chain.locate(address, 0);
        assert!((0..20).all(|_| site.chain.slow(client, direct(address), Slow::Head, 0).is_continue()));
    }
    let filtered: IpAddr = "99.6.9.1".parse().unwrap();
    let client = site.chain.locate(filtered, 0);
    let line = RequestLine { method: b"GET", target: b"/" };
    assert!(site.chain.request_line(client, direct(filtered), &line, 0).is_continue());
    assert!(ask(filtered, "a GoodBot").is_continue());
    assert_eq!(
        ask(filtered, "curl").verdict,
        Verdict::Reset,
        "a filter about the line is a filter of the head too"
    );
    assert!((0..2_000).all(|_| ask(bot, "a GoodBot").is_continue()));
    let refused = (0..2_000).map(|_| ask(impostor, "curl")).find(|decision| !decision.is_continue());
    assert!(refused.is_some_and(|decision| matches!(decision.verdict, Verdict::Block(_))), "{refused:?}");
    // The mark is on the address, and is looked at when the head is here.
    let (client, decision) = site.chain.connect(direct(impostor), 1);
    assert!(decision.is_continue());
    site.chain.close(client, direct(impostor), 1);
    assert_eq!(ask(impostor, "curl").reason, Reason::Blocked);
    assert!(ask(impostor, "goodbot").is_continue());
    let settings = site.defence.settings();
    let may = |prefix: &str| settings.may_block_below_http(prefix.parse().unwrap());
    assert!(!may("99.6.0.2") && !may("99.6.0.0/24") && !may("99.0.0.0/8") && may("99.7.0.2"));
}

#[test]
fn block_from_outside_spares_the_exempt_and_trusted_proxies() {
    let exempt = ["99.6.0.0/16", "99.7.0.0/16"].map(|source| Exemption {
        source: source.parse().unwrap(),
        user_agent: if source == "99.7.0.0/16" { "goodbot".into() } else { String::new() },
    });
    let trusted_proxies = vec!["99.8.0.1".parse().unwrap()];
    let site = Site::new(Settings { exempt: exempt.to_vec(), trusted_proxies, ..Settings::default() }, 15);
    let block = |address: &str| site.defence.block(address.parse().unwrap(), Duration::from_secs(60));
    assert!(!block("99.6.0.1") && !block("99.8.0.1"));
    assert!(block("99.7.0.1") && block("99.8.0.2"));
    let settings = site.defence.settings();
    let may = |prefix: &str| settings.may_block_below_http(prefix.parse().unwrap());
    assert!(!may("99.7.0.1") && !may("99.8.0.1") && may("99.8.0.2"));
}

#[test]
fn lifted_block_is_forgotten_by_the_tree() {
    let mut site = Site::new(Settings::default(), 12);
    let address = host([99, 6], 1);
    while site.ask(address, "/login", 1, 401).is_continue() {}
    let number = site.defence.ask_about(address);
    site.chain.tick(&Load::default(), 0);
    let (cores, rows) = site.defence.seen(number);
    assert_eq!((cores, rows.len()), (1, 7), "the address, five prefixes around it and everybody: {rows:?}");
    assert!(matches!(rows[0].blocked, Some((Reason::Errors, _))), "{rows:?}");
    site.defence.lift("99.6.0.0/24".parse().unwrap());
    site.chain.tick(&Load::default(), 0);
    assert!(site.ask(address, "/page/0", 1, 200).is_continue());
}

#[test]
fn filters_match_across_layers() {
    let filter = Filter {
        source: Some("99.6.0.0/16".parse().unwrap()),
        user_agent: "badbot".into(),
        path: "/api/".into(),
        content_type: String::new(),
        methods: vec!["GET".into()],
        action: Action::Refuse,
        dry_run: false,
    };
    let mut site = Site::new(Settings { filters: vec![filter], ..Settings::default() }, 13);
    let mut ask = |address, target: &str, user_agent| {
        let client = site.client(address);
        let fields = Sent { user_agent, ..Sent::PLAIN };
        let request = get(target, &fields);
        site.chain.request(client, direct(address), &request, 0).verdict
    };
    assert_eq!(ask(host([99, 6], 1), "/api/x", "Mozilla BadBot/1"), Verdict::Refuse);
    assert_eq!(ask(host([99, 7], 1), "/api/x", "Mozilla BadBot/1"), Verdict::Continue);
    assert_eq!(ask(host([99, 6], 1), "/x", "Mozilla BadBot/1"), Verdict::Continue);
    assert_eq!(ask(host([99, 6], 1), "/api/x", "Mozilla"), Verdict::Continue);
    assert_eq!(ask(host([99, 6], 1), "/API/x", "Mozilla BadBot/1"), Verdict::Continue);
}

#[test]
fn a_filter_matches_what_the_server_behind_takes_for_its_path() {
    let filter = Filter {
        source: None,
        user_agent: String::new(),
        path: "/Admin".into(),
        content_type: String::new(),
        methods: Vec::new(),
        action: Action::Refuse,
        dry_run: false,
    };
    let settings = Settings { filters: vec![filter], folds_case: true, ..Settings::default() };
    let mut site = Site::new(settings, 13);
    let mut ask = |path: &str, reading: Option<&str>| {
        let client = site.client(host([99, 6], 1));
        let fields = Sent::PLAIN;
        let request = RequestView { reading: reading.map(str::as_bytes), ..get(path, &fields) };
        site.chain.request(client, direct(host([99, 6], 1)), &request, 0).verdict
    };
    for path in ["/Admin/x", "/ADMIN/x", "/admin"] {
        assert_eq!(ask(path, None), Verdict::Refuse, "{path}");
    }
    assert_eq!(ask("/;x/admin", None), Verdict::Continue);
    assert_eq!(ask("/;x/admin", Some("/admin")), Verdict::Refuse);
    assert_eq!(ask("/other;x", Some("/other")), Verdict::Continue);
}
