//! Clients that abuse the site are refused, and nobody else is.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::io;
use std::net::IpAddr;
use std::time::Duration;

use rustix::process::Signal;
use tidegate_e2e::{Builder, Client, Gate, Origin, Reply, Response, Tidegate, content, eventually};

fn origin() -> Origin {
    Origin::start(|request| match request.target.as_str() {
        "/login" => Reply::status(401, "no"),
        _ => Reply::cacheable("here"),
    })
}

fn source(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn connect(tidegate: &Tidegate, from: &str) -> io::Result<Client> {
    Client::try_connect_from(source(from), tidegate.address())
}

/// One GET on a connection of its own; an error is a refusal without an answer.
fn get(tidegate: &Tidegate, from: &str, target: &str, fields: &str) -> io::Result<Response> {
    let mut client = connect(tidegate, from)?;
    client.try_send(format!("GET {target} HTTP/1.1\r\nHost: example.org\r\n{fields}\r\n"))?;
    client.try_response("GET")
}

fn one_core(builder: Builder) -> Builder {
    builder.top("workers = 1")
}

/// Sends GETs on one connection until it is refused or `most` were answered with less than 400; how many were.
fn hammer(tidegate: &Tidegate, from: &str, target: &str, most: usize) -> usize {
    let Ok(mut client) = connect(tidegate, from) else { return 0 };
    let request = format!("GET {target} HTTP/1.1\r\nHost: example.org\r\n\r\n");
    (0..most)
        .take_while(|_| {
            client.try_send(&request).is_ok() && client.try_response("GET").is_ok_and(|it| it.status < 400)
        })
        .count()
}

#[test]
fn flood_by_default_settings_is_blocked_explained_and_lifted() {
    let origin = origin();
    let tidegate = one_core(Tidegate::builder().origin(&origin)).start();
    for good in 2..6 {
        assert_eq!(get(&tidegate, &format!("127.0.0.{good}"), "/", "").unwrap().status, 200);
    }
    let served = hammer(&tidegate, "127.0.9.9", "/", 3_000);
    assert_eq!(served, 1_000, "the limit of requests within 10 s");
    assert!(get(&tidegate, "127.0.9.9", "/", "").is_err(), "a new connection finds no ear");
    assert_eq!(get(&tidegate, "127.0.0.3", "/", "").unwrap().status, 200);

    let list = eventually("the block is on the list", || {
        let list = tidegate.command(&["block", "list"]);
        let text = String::from_utf8(list.stdout).unwrap();
        text.contains("127.0.9.9").then_some(text)
    });
    assert!(list.contains("request-rate"), "{list}");
    assert!(!list.contains("127.0.0."), "{list}");
    let explained = tidegate.command(&["block", "explain", "127.0.9.9"]);
    let explained = String::from_utf8(explained.stdout).unwrap();
    assert!(explained.contains("is kept out by 127.0.9.9/32: request-rate"), "{explained}");
    assert!(explained.contains("blocked: request-rate"), "{explained}");
    assert!(explained.contains("more requests than one client may make"), "{explained}");
    let top = String::from_utf8(tidegate.command(&["top"]).stdout).unwrap();
    assert!(top.lines().nth(2).unwrap().starts_with("127.0.9.9/32"), "{top}");
    assert!(tidegate.metric("tidegate_defence_request_rate_total") >= 1.0);

    assert!(tidegate.command(&["block", "remove", "127.0.9.9"]).status.success());
    eventually("the address is let in again", || {
        get(&tidegate, "127.0.9.9", "/", "").ok().filter(|response| response.status == 200)
    });
}

#[test]
fn load_test_from_one_address_alone_is_not_a_flood() {
    let origin = origin();
    let tidegate = one_core(Tidegate::builder().origin(&origin)).start();
    assert_eq!(hammer(&tidegate, "127.0.9.9", "/", 3_000), 3_000);
}

#[test]
fn password_guessing_is_blocked_and_the_block_survives_a_restart() {
    let origin = origin();
    let mut tidegate = one_core(Tidegate::builder().origin(&origin))
        .tables("[block]\npath = \"@DIR@/block\"\n[defence]\naudit = \"@DIR@/audit.log\"")
        .start();
    let tries = (0..100).take_while(|_| get(&tidegate, "127.0.9.9", "/login", "").is_ok()).count();
    assert!((10..50).contains(&tries), "{tries}");
    eventually("the block is on the list", || {
        let list = tidegate.command(&["block", "list"]);
        String::from_utf8_lossy(&list.stdout).contains("127.0.9.9").then_some(())
    });
    let audit = eventually("the decision is written down", || {
        let audit = std::fs::read_to_string(tidegate.directory().join("audit.log")).ok()?;
        (!audit.is_empty()).then_some(audit)
    });
    assert!(
        audit.contains("\"reason\":\"errors\"") && audit.contains("\"address\":\"127.0.9.9\""),
        "{audit}"
    );
    assert!(tidegate.terminate().success());
    tidegate.start();
    assert!(get(&tidegate, "127.0.9.9", "/", "").is_err());
    assert_eq!(get(&tidegate, "127.0.9.8", "/", "").unwrap().status, 200);
}

#[test]
fn audit_file_that_was_renamed_is_opened_anew_on_sigusr1_and_on_sighup() {
    let origin = origin();
    let tidegate =
        Tidegate::builder().origin(&origin).tables("[defence]\naudit = \"@DIR@/audit.log\"").start();
    let file = tidegate.directory().join("audit.log");
    for signal in [Signal::USR1, Signal::HUP] {
        std::fs::rename(&file, tidegate.directory().join("audit.log.1")).unwrap();
        tidegate.signal(signal);
        eventually("there is a new file", || file.exists().then_some(()));
    }
}

#[test]
fn forged_forwarding_field_gets_its_forger_blocked_and_not_its_victim() {
    let origin = origin();
    let tidegate = one_core(Tidegate::builder().origin(&origin)).start();
    let victim = "X-Forwarded-For: 127.0.9.1\r\nForwarded: for=127.0.9.1\r\n";
    let tries = (0..100).take_while(|_| get(&tidegate, "127.0.9.9", "/login", victim).is_ok()).count();
    assert!(tries < 50, "{tries}");
    assert_eq!(get(&tidegate, "127.0.9.1", "/", "").unwrap().status, 200);
}

#[test]
fn behind_a_trusted_proxy_the_forwarded_client_is_refused_and_the_proxy_is_not() {
    let origin = origin();
    let tidegate = one_core(Tidegate::builder().origin(&origin))
        .top("trusted_proxies = [\"127.0.7.7\"]")
        .tables("[defence]\naudit = \"@DIR@/audit.log\"")
        .start();
    let mut proxy = connect(&tidegate, "127.0.7.7").unwrap();
    let mut ask = |target: &str, client: &str| {
        proxy.request("GET", target, &format!("X-Forwarded-For: {client}\r\n")).status
    };
    let tries = (0..100).take_while(|_| ask("/login", "192.0.2.1") == 401).count();
    assert!((10..50).contains(&tries), "{tries}");
    assert_eq!(ask("/", "192.0.2.1"), 403, "an answer: the connection is the proxy's");
    assert_eq!(ask("/", "192.0.2.2"), 200);
    assert_eq!(get(&tidegate, "127.0.7.7", "/", "").unwrap().status, 200);
    let list = String::from_utf8(tidegate.command(&["block", "list"]).stdout).unwrap();
    assert!(!list.contains("192.0.2.1") && !list.contains("127.0.7.7"), "{list}");
    let explained = tidegate.command(&["block", "explain", "192.0.2.1", "--json"]);
    let explained = String::from_utf8(explained.stdout).unwrap();
    assert!(explained.contains("\"reason\": \"errors\""), "{explained}");

    assert!(tidegate.command(&["block", "remove", "192.0.2.1"]).status.success());
    eventually("the client is let in again", || (ask("/", "192.0.2.1") == 200).then_some(()));
    assert!(
        !tidegate.command(&["block", "remove", "192.0.2.1"]).status.success(),
        "nothing is left to remove"
    );
    assert!(tidegate.command(&["block", "add", "192.0.2.0/24"]).status.success());
    eventually("the list acts on clients of the proxy", || (ask("/", "192.0.2.1") == 403).then_some(()));
    assert_eq!(ask("/", "198.51.100.1"), 200);
    assert!(tidegate.command(&["block", "remove", "192.0.2.0/24"]).status.success());
    eventually("the list lets it in again", || (ask("/", "192.0.2.1") == 200).then_some(()));
    let line = eventually("the refusal is written down", || {
        let audit = std::fs::read_to_string(tidegate.directory().join("audit.log")).ok()?;
        audit.lines().find(|line| line.contains("\"reason\":\"listed\"")).map(str::to_owned)
    });
    assert!(line.contains("\"address\":\"192.0.2.1\"") && line.contains("\"verdict\":\"refuse\""), "{line}");
}

#[test]
fn guesses_over_four_cores_are_stopped_as_over_one_and_connections_that_are_open_with_them() {
    let origin = origin();
    let tidegate =
        Tidegate::builder().origin(&origin).top("workers = 4\ntrusted_proxies = [\"127.0.7.7\"]").start();
    let mut proxies: Vec<_> = (0..16).map(|_| connect(&tidegate, "127.0.7.7").unwrap()).collect();
    let mut open: Vec<_> = (0..16).map(|_| connect(&tidegate, "127.0.9.9").unwrap()).collect();
    for client in &mut open {
        assert_eq!(client.request("GET", "/", "").status, 200);
    }
    let tries = (0..200)
        .take_while(|_| {
            // What a person at a keyboard could not do; the cores tell each other four times a second.
            std::thread::sleep(std::time::Duration::from_millis(20));
            get(&tidegate, "127.0.9.9", "/login", "").is_ok()
        })
        .count();
    assert!((10..80).contains(&tries), "{tries}");
    eventually("open connections end", || {
        open.retain_mut(|client| {
            client.try_send("GET / HTTP/1.1\r\nHost: example.org\r\n\r\n").is_ok()
                && client.try_response("GET").is_ok_and(|response| response.status == 200)
        });
        open.is_empty().then_some(())
    });

    let forwarded = "X-Forwarded-For: 192.0.2.1\r\n";
    eventually("a forwarded client is refused on all cores", || {
        let refused = |proxy: &mut Client| proxy.request("GET", "/login", forwarded).status == 403;
        proxies.iter_mut().all(refused).then_some(())
    });
}

#[test]
fn dry_run_says_what_it_would_do_and_does_nothing() {
    let origin = origin();
    let tidegate = one_core(Tidegate::builder().origin(&origin))
        .tables("[[classifier]]\nname = \"errors\"\nlimit = 40\ndry_run = true")
        .start();
    assert!((0..20).all(|_| get(&tidegate, "127.0.9.9", "/login", "").is_ok()));
    eventually("it is logged", || tidegate.output().contains("would act").then_some(()));
    assert!(tidegate.metric("tidegate_defence_dry_run_total") >= 1.0);
    assert_eq!(tidegate.metric("tidegate_defence_errors_total"), 0.0);
}

#[test]
fn challenged_client_passes_with_the_cookie_that_it_was_given() {
    let origin = origin();
    let tidegate = one_core(Tidegate::builder().origin(&origin))
        .tables("[defence]\nchallenge_bits = 0\n[[filter]]\npath = \"/shop\"\naction = \"challenge\"")
        .start();
    let challenged = get(&tidegate, "127.0.9.9", "/shop?a=b", "").unwrap();
    assert_eq!((challenged.status, challenged.field("Location").as_str()), (307, "/shop?a=b"));
    let cookie = challenged.field("Set-Cookie").split(';').next().unwrap().to_owned();
    let passed = get(&tidegate, "127.0.9.9", "/shop?a=b", &format!("Cookie: x=y; {cookie}\r\n")).unwrap();
    assert_eq!(passed.status, 200);
    let stolen = get(&tidegate, "127.0.9.8", "/shop?a=b", &format!("Cookie: {cookie}\r\n")).unwrap();
    assert_eq!(stolen.status, 307);
    assert_eq!(get(&tidegate, "127.0.9.8", "/other", "").unwrap().status, 200);
}

#[test]
fn challenge_with_work_is_a_page_that_needs_no_other_host() {
    let origin = origin();
    let tidegate = one_core(Tidegate::builder().origin(&origin))
        .tables("[[filter]]\npath = \"/shop\"\naction = \"challenge\"")
        .start();
    let page = get(&tidegate, "127.0.9.9", "/shop", "").unwrap();
    assert_eq!((page.status, page.field("Content-Type").as_str()), (503, "text/html; charset=utf-8"));
    assert_eq!(page.field("Cache-Control"), "no-store");
    assert!(page.text().contains("tidegate_pass") && !page.text().contains("http"), "{}", page.text());
}

/// Runs the page's script as a browser would, with as much of a document as it needs; gives the cookie that it sets.
fn solve(page: &str) -> String {
    let script = page.split("<script>").nth(1).and_then(|rest| rest.split("</script>").next()).unwrap();
    let browser = "let jar = '';
        globalThis.document = {
            get cookie() { return jar; },
            set cookie(text) { jar = text.split(';')[0]; },
            getElementById() { throw new Error('the cookie was not taken'); },
        };
        globalThis.location = { reload() { console.log(jar); } };";
    let output = std::process::Command::new("node")
        .args(["-e", &format!("{browser}{script}")])
        .output()
        .expect("node runs the page's script: install it with apt install nodejs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
fn browser_solves_the_page_and_passes() {
    let origin = origin();
    let tidegate = one_core(Tidegate::builder().origin(&origin))
        .tables("[defence]\nchallenge_bits = 10\n[[filter]]\npath = \"/shop\"\naction = \"challenge\"")
        .start();
    let page = get(&tidegate, "127.0.9.9", "/shop", "").unwrap();
    let cookie = solve(&page.text());
    let passed = get(&tidegate, "127.0.9.9", "/shop", &format!("Cookie: {cookie}\r\n")).unwrap();
    assert_eq!((passed.status, passed.text().as_str()), (200, "here"));
    let unsolved = cookie.split('.').next().unwrap();
    let refused = get(&tidegate, "127.0.9.9", "/shop", &format!("Cookie: {unsolved}.no\r\n")).unwrap();
    assert_eq!(refused.status, 503);
}

#[test]
fn client_that_is_slow_again_and_again_is_blocked() {
    let origin = origin();
    let tidegate = one_core(Tidegate::builder().origin(&origin)).limits("header_timeout = \"500ms\"").start();
    let open: Vec<Client> = (0..20)
        .map(|_| {
            let mut client = connect(&tidegate, "127.0.9.9").unwrap();
            client.send("GET / HTTP/1.1\r\nX: ");
            client
        })
        .collect();
    eventually("new connections are refused", || get(&tidegate, "127.0.9.9", "/", "").is_err().then_some(()));
    assert_eq!(get(&tidegate, "127.0.9.8", "/", "").unwrap().status, 200);
    assert!(tidegate.metric("tidegate_defence_slow_total") >= 1.0);
    drop(open);
}

#[test]
fn delayed_request_is_answered_late_and_in_full() {
    let origin = origin();
    let tidegate = one_core(Tidegate::builder().origin(&origin))
        .tables("[[filter]]\nuser_agent = \"robot\"\naction = \"delay\"")
        .start();
    let began = std::time::Instant::now();
    let late = get(&tidegate, "127.0.9.9", "/", "User-Agent: a Robot\r\n").unwrap();
    assert_eq!((late.status, late.text().as_str()), (200, "here"));
    assert!(began.elapsed() >= Duration::from_secs(1));
}

#[test]
fn method_that_is_not_wanted_is_refused_before_the_head_is_whole() {
    let origin = origin();
    let filter = "[[filter]]\nmethods = [\"BREW\"]\n";
    let tidegate = one_core(Tidegate::builder().origin(&origin).tables(filter)).start();
    let mut slow = connect(&tidegate, "127.0.9.20").unwrap();
    slow.send("BREW /pot HTTP/1.1\r\nHost: exa");
    let answer = String::from_utf8(slow.rest()).unwrap();
    assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");
    assert_eq!(get(&tidegate, "127.0.9.20", "/", "").unwrap().status, 200);
    assert_eq!(tidegate.metric("tidegate_defence_form_total"), 1.0);
}

/// The defence with one core, and with several.
const CORES: [&str; 2] = ["workers = 1", "workers = 4"];

#[test]
fn who_is_delayed_meets_rules_and_limits_all_the_same() {
    let origin = origin();
    for cores in CORES {
        let tidegate = Tidegate::builder()
            .origin(&origin)
            .top(cores)
            .tables("[[request]]\npath = \"/admin*\"\naction = \"refuse\"\n")
            .tables("[[filter]]\nuser_agent = \"robot\"\naction = \"delay\"\n")
            .tables("[[classifier]]\nname = \"request-rate\"\nlimit = 5\naction = \"refuse\"\n")
            .start();
        for good in 2..12 {
            assert_eq!(get(&tidegate, &format!("127.0.0.{good}"), "/", "").unwrap().status, 200);
        }
        let ask = |target| get(&tidegate, "127.0.9.9", target, "User-Agent: robot\r\n").unwrap().status;
        assert_eq!(ask("/admin/x"), 503, "{cores}");
        assert_eq!(ask("/"), 200, "{cores}");
        let statuses: Vec<u16> = std::thread::scope(|scope| {
            let asked: Vec<_> = (0..60).map(|_| scope.spawn(|| ask("/"))).collect();
            asked.into_iter().map(|asked| asked.join().unwrap()).collect()
        });
        assert!(statuses.contains(&429), "{cores}: {statuses:?}");
    }
}

#[test]
fn behind_a_proxy_that_sends_forwarded_only_the_client_is_refused_and_the_proxy_is_not() {
    let origin = origin();
    let tidegate =
        one_core(Tidegate::builder().origin(&origin)).top("trusted_proxies = [\"127.0.7.7\"]").start();
    let mut proxy = connect(&tidegate, "127.0.7.7").unwrap();
    let mut ask = |target: &str, client: &str| {
        // What the client has sent stands before what the proxy says.
        let line = format!("Forwarded: for=192.0.2.99, for=\"{client}\";proto=http\r\n");
        proxy.request("GET", target, &line).status
    };
    let tries = (0..300).take_while(|_| ask("/login", "[2001:db8::1]:4711") == 401).count();
    assert!((10..300).contains(&tries), "{tries}");
    assert_eq!(ask("/", "192.0.2.2"), 200);
    assert_eq!(ask("/", "192.0.2.99"), 200);
    assert_eq!(get(&tidegate, "127.0.7.7", "/", "").unwrap().status, 200);
}

#[test]
fn welcome_robot_is_spared_by_name_and_address_and_its_impostors_are_not_blocked_below_http() {
    let origin = origin();
    for cores in CORES {
        let tidegate = Tidegate::builder()
            .origin(&origin)
            .top(cores)
            .tables("[[exempt]]\nsource = \"127.0.9.0/24\"\nuser_agent = \"goodbot\"\n")
            .tables("[[filter]]\nuser_agent = \"curl\"\naction = \"block\"\n")
            .tables("[[filter]]\nmethods = [\"OPTIONS\"]\naction = \"reset\"\n")
            .start();
        let ask = |method: &str, from: &str, agent: &str| {
            let mut client = connect(&tidegate, from).unwrap();
            client.send(format!("{method} / HTTP/1.1\r\nHost: a\r\n"));
            client.try_send(format!("User-Agent: {agent}\r\n\r\n"))?;
            client.try_response(method).map(|response| response.status)
        };
        assert_eq!(ask("OPTIONS", "127.0.9.9", "a GoodBot").unwrap(), 200, "{cores}");
        assert!(ask("OPTIONS", "127.0.9.9", "wget").is_err(), "{cores}");
        assert!(ask("GET", "127.0.9.9", "curl").is_err(), "{cores}");
        // What is put on the list is put there before it is logged.
        eventually("the block is logged", || {
            let is_it = |line: &str| line.contains("127.0.9.9") && line.contains("block");
            tidegate.output().lines().any(is_it).then_some(())
        });
        for _ in 0..20 {
            assert_eq!(ask("GET", "127.0.9.9", "goodbot").unwrap(), 200, "{cores}");
        }
        let list = String::from_utf8(tidegate.command(&["block", "list"]).stdout).unwrap();
        assert!(!list.contains("127.0.9.9"), "{list}");
    }
}

#[test]
fn cookie_of_a_passed_challenge_is_not_sent_to_the_application_and_no_response_varies_by_it() {
    let origin = Origin::start(|request| {
        Reply::cacheable(format!("cookies: {:?}", request.fields.get("Cookie"))).with("Vary", "Cookie")
    });
    let tidegate = one_core(Tidegate::builder().origin(&origin))
        .tables("[defence]\nchallenge_bits = 0\n[[filter]]\npath = \"/shop\"\naction = \"challenge\"")
        .start();
    for from in ["127.0.9.8", "127.0.9.9"] {
        let challenged = get(&tidegate, from, "/shop", "").unwrap();
        let cookie = challenged.field("Set-Cookie").split(';').next().unwrap().to_owned();
        let alone = get(&tidegate, from, "/shop", &format!("Cookie: {cookie}\r\n")).unwrap();
        assert_eq!(alone.text(), "cookies: None");
        let beside = get(&tidegate, from, "/shop", &format!("Cookie: x=y; {cookie}\r\n")).unwrap();
        assert_eq!(beside.text(), "cookies: Some(\"x=y\")");
    }
    assert_eq!(origin.count(), 2, "the second visitor is answered from the cache");
}

#[test]
fn first_visits_at_once_from_one_address_are_challenged_and_solved_on_one_core_and_on_several() {
    for workers in [1, 4] {
        let origin = origin();
        let tidegate = Tidegate::builder()
            .origin(&origin)
            .top(&format!("workers = {workers}"))
            .tables("[defence]\nchallenge_bits = 0\n[[filter]]\npath = \"/shop\"\naction = \"challenge\"")
            .start();
        let visits: Vec<Response> =
            (0..12).map(|_| get(&tidegate, "127.0.9.9", "/shop", "").unwrap()).collect();
        for visit in visits {
            assert_eq!(visit.status, 307, "{workers} workers");
            let cookie = visit.field("Set-Cookie").split(';').next().unwrap().to_owned();
            let passed = get(&tidegate, "127.0.9.9", "/shop", &format!("Cookie: {cookie}\r\n")).unwrap();
            assert_eq!(passed.status, 200, "{workers} workers");
        }
        let list = String::from_utf8(tidegate.command(&["block", "list"]).stdout).unwrap();
        assert!(!list.contains("127.0.9.9"), "{list}");
    }
}

#[test]
fn who_resets_before_the_answers_to_random_urls_is_blocked_as_if_it_had_waited() {
    let door = Gate::default();
    let behind = door.clone();
    let origin = Origin::start(move |request| {
        if request.target.starts_with("/random") {
            behind.pass();
        }
        Reply::cacheable("here")
    });
    let tidegate = one_core(Tidegate::builder().origin(&origin))
        .tables("[[classifier]]\nname = \"cache-busting\"\nlimit = 10")
        .start();
    for good in 2..6 {
        assert_eq!(get(&tidegate, &format!("127.0.0.{good}"), "/", "").unwrap().status, 200);
    }
    let give_up = |from: &str, times: u32| {
        for turn in 0..times {
            let (asked, gone) = (origin.count(), tidegate.metric("tidegate_clients_gone_total"));
            let mut client = connect(&tidegate, from).unwrap();
            client.send(format!("GET /random?{from}{turn} HTTP/1.1\r\nHost: example.org\r\n\r\n"));
            eventually("the origin has it", || (origin.count() > asked).then_some(()));
            rustix::net::sockopt::set_socket_linger(client.stream(), Some(Duration::ZERO)).unwrap();
            drop(client);
            eventually("the reset is noticed", || {
                (tidegate.metric("tidegate_clients_gone_total") > gone).then_some(())
            });
        }
    };
    give_up("127.0.9.8", 10);
    give_up("127.0.9.9", 11);
    eventually("one beyond the limit", || get(&tidegate, "127.0.9.9", "/", "").is_err().then_some(()));
    assert_eq!(get(&tidegate, "127.0.9.8", "/", "").unwrap().status, 200);
    door.open();
}

#[test]
fn refusal_for_errors_is_seen_by_who_makes_them() {
    let origin = origin();
    let tidegate = one_core(Tidegate::builder().origin(&origin))
        .tables("[[classifier]]\nname = \"errors\"\nlimit = 40\naction = \"refuse\"")
        .start();
    let mut client = connect(&tidegate, "127.0.9.9").unwrap();
    let statuses: Vec<u16> = (0..20).map(|_| client.get("/login").status).collect();
    let guesses = statuses.iter().take_while(|status| **status == 401).count();
    // Eight for each; two windows may share them.
    assert!((6..=12).contains(&guesses), "{statuses:?}");
    assert!(statuses[guesses..].iter().all(|status| *status == 429), "{statuses:?}");
    assert_eq!(origin.count(), guesses);
}

#[test]
fn rules_for_overload_act_while_the_defence_finds_stress_and_filters_are_told_apart() {
    let origin = origin();
    let tidegate = one_core(Tidegate::builder().origin(&origin))
        .limits("connections = 40")
        .tables(
            "[[request]]\npath = \"/search\"\nwhen = \"overload\"\naction = \"refuse\"\n\
             [[filter]]\npath = \"/a\"\n[[filter]]\npath = \"/b\"\n\
             [[exempt]]\nsource = \"127.0.9.10\"\n\
             [defence]\naudit = \"@DIR@/audit.log\"",
        )
        .start();
    assert_eq!(get(&tidegate, "127.0.9.9", "/search", "").unwrap().status, 200);
    assert_eq!(get(&tidegate, "127.0.9.9", "/b", "").unwrap().status, 403);
    let audit = eventually("the decision is written down", || {
        let audit = std::fs::read_to_string(tidegate.directory().join("audit.log")).ok()?;
        (!audit.is_empty()).then_some(audit)
    });
    assert!(audit.contains("\"filter\":2"), "{audit}");
    let explained = String::from_utf8(tidegate.command(&["block", "explain", "127.0.9.9"]).stdout).unwrap();
    assert!(explained.contains("filter 2"), "{explained}");

    // More than four fifths of the connections that there may be.
    let open: Vec<Client> = (1..36)
        .map(|last| {
            let mut client = connect(&tidegate, &format!("127.0.8.{last}")).unwrap();
            client.request("GET", "/", "");
            client
        })
        .collect();
    eventually("the rule acts", || {
        get(&tidegate, "127.0.9.10", "/search", "").is_ok_and(|response| response.status == 503).then_some(())
    });
    drop(open);
    eventually("the rule acts no longer", || {
        get(&tidegate, "127.0.9.10", "/search", "").is_ok_and(|response| response.status == 200).then_some(())
    });
}

/// An origin with one large file, and a site with some visitors.
fn site_with_a_file(body: &[u8]) -> (Origin, Tidegate) {
    let body = body.to_vec();
    let origin = Origin::start(move |request| match request.target.as_str() {
        "/file" => Reply::cacheable(body.clone()),
        _ => Reply::cacheable("here"),
    });
    let tidegate = one_core(Tidegate::builder().origin(&origin)).start();
    for visitor in 2..6 {
        assert_eq!(get(&tidegate, &format!("127.0.0.{visitor}"), "/file", "").unwrap().status, 200);
    }
    (origin, tidegate)
}

#[test]
fn who_asks_for_tiny_parts_again_and_again_is_blocked_and_a_download_manager_is_not() {
    const SEGMENTS: usize = 8;
    const PIECES: usize = 64;
    let file = content(5, SEGMENTS * PIECES * 2_048);
    let (_origin, tidegate) = site_with_a_file(&file);
    let mut segments: Vec<Client> = (0..SEGMENTS).map(|_| connect(&tidegate, "127.0.8.8").unwrap()).collect();
    for number in 0..SEGMENTS * PIECES {
        let (segment, piece) = (number % SEGMENTS, number / SEGMENTS);
        let start = (segment * PIECES + piece) * 2_048;
        let range = format!("Range: bytes={start}-{}\r\n", start + 2_047);
        let response = segments[segment].request("GET", "/file", &range);
        assert_eq!(
            (response.status, response.body == file[start..][..2_048]),
            (206, true),
            "{segment}/{piece}"
        );
    }
    let mut abuser = connect(&tidegate, "127.0.9.9").unwrap();
    let request = "GET /file HTTP/1.1\r\nHost: example.org\r\nRange: bytes=7-7\r\n\r\n";
    let served = (0..1_000)
        .take_while(|_| {
            abuser.try_send(request).is_ok() && abuser.try_response("GET").is_ok_and(|it| it.status == 206)
        })
        .count();
    assert_eq!(served, 300);
    assert!(get(&tidegate, "127.0.9.9", "/", "").is_err());
    assert_eq!(get(&tidegate, "127.0.8.8", "/file", "").unwrap().status, 200);
    let explained = String::from_utf8(tidegate.command(&["block", "explain", "127.0.9.9"]).stdout).unwrap();
    assert!(explained.contains("asked again and again for parts of responses that are tiny"), "{explained}");
    assert!(tidegate.metric("tidegate_defence_ranges_total") >= 1.0);
}

#[test]
fn ranges_that_only_an_attack_asks_for_are_rejected_whether_or_not_the_origin_would_do_it() {
    let (origin, tidegate) = site_with_a_file(b"some content");
    let asked = origin.count();
    let ranges = format!("Range: bytes=0-{}\r\n", ",0-".repeat(40));
    for target in ["/file", "/not-in-the-cache"] {
        assert_eq!(get(&tidegate, "127.0.0.2", target, &ranges).unwrap().status, 416, "{target}");
    }
    assert_eq!(origin.count(), asked);
    // Many that are in order mean no harm.
    let ranges: String = (0..40).map(|index| format!("{}-{},", 2 * index, 2 * index)).collect();
    let response = get(&tidegate, "127.0.0.2", "/file", &format!("Range: bytes={ranges}\r\n")).unwrap();
    assert_eq!((response.status, response.body.as_slice()), (200, &b"some content"[..]));
}

#[test]
fn another_host_or_variant_each_time_is_past_the_cache_as_another_url_is() {
    let origin = Origin::start(|_| Reply::cacheable("here").with("Vary", "Accept-Language"));
    let tidegate = one_core(Tidegate::builder().origin(&origin)).start();
    for visitor in 2..6 {
        assert_eq!(get(&tidegate, &format!("127.0.0.{visitor}"), "/", "").unwrap().status, 200);
    }
    type Fields = fn(usize) -> String;
    let ways: [(&str, Fields); 2] = [
        ("127.0.9.8", |turn| format!("Host: host{turn}.example\r\n")),
        ("127.0.9.9", |turn| format!("Host: example.org\r\nAccept-Language: x-{turn}\r\n")),
    ];
    for (from, fields) in ways {
        let mut client = connect(&tidegate, from).unwrap();
        let served = (0..900)
            .take_while(|turn| {
                let request = format!("GET / HTTP/1.1\r\n{}\r\n", fields(*turn));
                client.try_send(request).is_ok() && client.try_response("GET").is_ok()
            })
            .count();
        assert!((200..=210).contains(&served), "{from}: {served}");
        assert!(get(&tidegate, from, "/", "").is_err(), "{from}");
    }
    assert_eq!(get(&tidegate, "127.0.0.2", "/", "").unwrap().status, 200);
}

#[test]
fn who_gives_up_what_the_origin_works_on_again_and_again_is_blocked() {
    use std::io::Read;
    let origin = Origin::start(|_| Reply::script(|stream| stream.read(&mut [0]).map(drop)));
    let tidegate = one_core(Tidegate::builder().origin(&origin)).start();
    let give_up = |turn: usize| -> io::Result<()> {
        let mut client = connect(&tidegate, "127.0.9.9")?;
        client.try_send("GET /report HTTP/1.1\r\nHost: example.org\r\n\r\n")?;
        eventually("the origin has it, or the client is refused", || {
            (origin.count() > turn || tidegate.metric("tidegate_defence_errors_total") > 0.0).then_some(())
        });
        rustix::net::sockopt::set_socket_linger(client.stream(), Some(Duration::ZERO))?;
        if origin.count() > turn { Ok(()) } else { Err(io::ErrorKind::ConnectionReset.into()) }
    };
    let given_up = (0..200).take_while(|turn| give_up(*turn).is_ok()).count();
    assert!((50..70).contains(&given_up), "{given_up}");
    assert!(tidegate.metric("tidegate_defence_errors_total") >= 1.0);
}

#[test]
fn slow_bodies_do_not_keep_others_from_the_origin() {
    let origin = Origin::start(|_| Reply::ok("here"));
    let tidegate = one_core(Tidegate::builder())
        .group("app", &[origin.address()], "max_connections = 8")
        .route("/", "upstream = \"app\"")
        .start();
    let post = "POST / HTTP/1.1\r\nHost: example.org\r\nContent-Length: 100000\r\n\r\nsome of it";
    let slow: Vec<Client> = (0..12)
        .map(|number| {
            let mut client = connect(&tidegate, &format!("127.0.9.{}", number % 3)).unwrap();
            client.send(post);
            client
        })
        .collect();
    eventually("they have all connections to the origin", || (origin.connections() >= 8).then_some(()));
    assert_eq!(get(&tidegate, "127.0.0.2", "/", "").unwrap().status, 200);
    assert!(tidegate.metric("tidegate_connections_shed_total") >= 1.0);
    drop(slow);
}
