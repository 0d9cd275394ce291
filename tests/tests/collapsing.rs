//! Requests for one object that is not there: one asks the origin, and the others wait for its answer (RFC 9111 §4),
//! whatever becomes of the one.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::io::Write;
use std::sync::{Arc, Barrier, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use tidegate_e2e::{Client, Gate, Origin, Reply, Tidegate, eventually};

/// Clients that ask for an object that another request is already on its way for, once all of them wait.
fn followers(tidegate: &Tidegate, count: usize) -> Vec<JoinHandle<String>> {
    let address = tidegate.address();
    let already = tidegate.metric("tidegate_cache_collapsed_total");
    let clients = (0..count).map(|_| std::thread::spawn(move || Client::connect(address).get("/").text()));
    let clients = clients.collect();
    eventually("all wait", || {
        (tidegate.metric("tidegate_cache_collapsed_total") >= already + count as f64).then_some(())
    });
    clients
}

/// A client with another address than those that has asked for the object with one field more.
fn leader(tidegate: &Tidegate, field: &str) -> Client {
    let mut client = Client::try_connect_from([127, 0, 0, 9].into(), tidegate.address()).unwrap();
    client.send(format!("GET / HTTP/1.1\r\nHost: example.org\r\n{field}\r\n\r\n"));
    client
}

fn all_shared(clients: Vec<JoinHandle<String>>) {
    for client in clients {
        assert_eq!(client.join().unwrap(), "shared");
    }
}

#[test]
fn fifty_clients_at_once_for_one_missing_object_ask_the_origin_once() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |_| {
        held.pass();
        Reply::cacheable("shared")
    });
    let tidegate = Tidegate::before(&origin);
    let barrier = Arc::new(Barrier::new(51));
    let clients: Vec<_> = (0..50)
        .map(|_| {
            let (barrier, mut client) = (Arc::clone(&barrier), tidegate.connect());
            std::thread::spawn(move || {
                client.send("GET /popular HTTP/1.1\r\nHost: example.org\r\n\r\n");
                barrier.wait();
                client.response()
            })
        })
        .collect();
    barrier.wait();
    eventually("the origin is asked", || (origin.count() > 0).then_some(()));
    gate.open();
    let mut collapsed = 0;
    for client in clients {
        let response = client.join().unwrap();
        assert_eq!(response.text(), "shared");
        collapsed += usize::from(response.field("Cache-Status").contains("; collapsed"));
    }
    assert_eq!(origin.count(), 1);
    // Those that came late found it stored.
    assert!((1..50).contains(&collapsed), "{collapsed} say that they waited for another request");
}

#[test]
fn one_request_that_is_not_stored_others_still_wait_for_each_other() {
    let gate = Gate::default();
    let door = gate.clone();
    let origin = Origin::start(move |request| {
        if request.field("Cache-Control") != "no-store" {
            door.pass();
        }
        Reply::cacheable("shared")
    });
    let tidegate = Tidegate::before(&origin);
    tidegate.get_with("/", "Cache-Control: no-store\r\n");
    let address = tidegate.address();
    let clients: Vec<_> =
        (0..8).map(|_| std::thread::spawn(move || Client::connect(address).get("/").text())).collect();
    eventually("seven wait", || (tidegate.metric("tidegate_cache_collapsed_total") >= 7.0).then_some(()));
    gate.open();
    for client in clients {
        assert_eq!(client.join().unwrap(), "shared");
    }
    assert_eq!(origin.count(), 2);
}

#[test]
fn an_answer_is_for_one_request_by_its_own_fault_those_who_wait_still_wait_for_each_other() {
    let long = format!("X-Long: {}", "x".repeat(3000));
    for (field, status) in [
        ("Cache-Control: no-store", 200),
        ("Authorization: Basic YTpi", 200),
        ("X-Bad: 1", 431),
        (&long, 400),
    ] {
        let (gate, next) = (Gate::default(), Gate::default());
        let (held, door) = (gate.clone(), next.clone());
        let name = field.split(':').next().unwrap().to_owned();
        let origin = Origin::start(move |request| {
            if request.field(&name).is_empty() {
                door.pass();
                return Reply::cacheable("shared");
            }
            held.pass();
            Reply::status(status, "own").with("Cache-Control", "max-age=60")
        });
        let tidegate = Tidegate::before(&origin);
        let mut own = leader(&tidegate, field);
        eventually("the origin is asked", || (origin.count() == 1).then_some(()));
        let clients = followers(&tidegate, 20);
        gate.open();
        let answer = own.response();
        assert_eq!((answer.status, answer.text().as_str()), (status, "own"), "{field}");
        eventually("one of them asks", || (origin.count() > 1).then_some(()));
        next.open();
        all_shared(clients);
        assert_eq!(origin.count(), 2, "{field}");
    }
}

/// An origin that answers the request with X-First once the gate is open, and others only if four of them are there at
/// once.
fn of_four_at_once(reply: impl Fn() -> Reply + Send + Sync + 'static) -> (Origin, Gate) {
    let (gate, all_ask) = (Gate::default(), Barrier::new(4));
    let held = gate.clone();
    let origin = Origin::start(move |request| {
        match request.field("X-First").is_empty() {
            true => drop(all_ask.wait()),
            false => held.pass(),
        }
        reply()
    });
    (origin, gate)
}

#[test]
fn who_asks_for_itself_waits_for_no_second_one_that_does() {
    let (origin, gate) = of_four_at_once(|| Reply::cacheable("own"));
    let tidegate = Tidegate::before(&origin);
    let credentials = "Authorization: Basic YTpi\r\n";
    let mut first = leader(&tidegate, format!("X-First: 1\r\n{credentials}").trim_end());
    eventually("the origin is asked", || (origin.count() == 1).then_some(()));
    let address = tidegate.address();
    let clients: Vec<_> = (0..4)
        .map(|_| std::thread::spawn(move || Client::connect(address).request("GET", "/", credentials).text()))
        .collect();
    eventually("all wait", || (tidegate.metric("tidegate_cache_collapsed_total") >= 4.0).then_some(()));
    gate.open();
    for client in clients {
        assert_eq!(client.join().unwrap(), "own");
    }
    assert_eq!(first.response().text(), "own");
}

#[test]
fn the_origin_fails_those_who_wait_ask_side_by_side() {
    let (origin, gate) = of_four_at_once(|| Reply::status(503, "busy"));
    let tidegate = Tidegate::before(&origin);
    let mut first = leader(&tidegate, "X-First: 1");
    eventually("the origin is asked", || (origin.count() == 1).then_some(()));
    let clients = followers(&tidegate, 4);
    gate.open();
    for client in clients {
        assert_eq!(client.join().unwrap(), "busy");
    }
    assert_eq!(first.response().status, 503);
    assert_eq!(origin.count(), 5);
}

#[test]
fn the_origin_gives_up_on_one_request_those_who_wait_for_it_are_answered() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |request| {
        if request.field("X-Bad").is_empty() {
            return Reply::cacheable("shared");
        }
        held.pass();
        Reply::Close
    });
    let tidegate = Tidegate::before(&origin);
    let mut bad = leader(&tidegate, "X-Bad: 1");
    eventually("the origin is asked", || (origin.count() == 1).then_some(()));
    let clients = followers(&tidegate, 5);
    gate.open();
    all_shared(clients);
    assert_eq!(bad.response().status, 502);
    // A connection that was kept may have been tried before a new one.
    let asked = origin.count();
    assert!((2..=3).contains(&asked), "{asked}");
}

/// It would for the next one as well: not each has to find that out.
#[test]
fn the_origin_gives_up_on_the_requests_of_three_clients_the_others_are_not_asked_for() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |_| {
        held.pass();
        Reply::Close
    });
    // With one worker all who wait have joined the next request before that is answered.
    let tidegate = Tidegate::builder().origin(&origin).top("workers = 1").start();
    let ask = |last: u8| {
        let mut client = Client::try_connect_from([127, 0, 0, last].into(), tidegate.address()).unwrap();
        client.send("GET / HTTP/1.1\r\nHost: example.org\r\n\r\n");
        client
    };
    let mut clients = vec![ask(10)];
    eventually("the origin is asked", || (origin.count() == 1).then_some(()));
    clients.extend((11..20).map(ask));
    eventually("the others wait", || {
        (tidegate.metric("tidegate_cache_collapsed_total") == 9.0).then_some(())
    });
    gate.open();
    for client in &mut clients {
        assert_eq!(client.response().status, 502);
    }
    assert_eq!(origin.count(), 3);
}

#[test]
fn one_client_has_its_share_of_the_connections_those_who_wait_for_it_are_answered() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |request| {
        if request.target != "/" {
            held.pass();
        }
        Reply::cacheable("shared")
    });
    let tidegate = Tidegate::builder()
        .group("app", &[origin.address()], "max_connections = 4\nconnect_timeout = \"2s\"")
        .route("/", "upstream = \"app\"")
        .top("workers = 1")
        .start();
    let from = [127, 0, 0, 9].into();
    let holders: Vec<_> = (0..3)
        .map(|number| {
            let mut holder = Client::try_connect_from(from, tidegate.address()).unwrap();
            holder.send(format!("GET /{number} HTTP/1.1\r\nHost: example.org\r\n\r\n"));
            holder
        })
        .collect();
    eventually("it has its share", || (origin.count() == 3).then_some(()));
    let mut first = leader(&tidegate, "X-First: 1");
    let clients = followers(&tidegate, 5);
    assert_eq!(first.response().status, 503);
    all_shared(clients);
    assert_eq!(origin.count(), 4);
    gate.open();
    drop(holders);
}

#[test]
fn the_origin_hangs_on_one_request_those_who_wait_for_it_are_answered() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |request| {
        if !request.field("X-Bad").is_empty() {
            held.pass();
        }
        Reply::cacheable("shared")
    });
    let tidegate = Tidegate::before(&origin);
    let mut bad = leader(&tidegate, "X-Bad: 1");
    eventually("the origin is asked", || (origin.count() == 1).then_some(()));
    all_shared(followers(&tidegate, 5));
    let asked = origin.count();
    assert!((2..5).contains(&asked), "{asked}");
    gate.open();
    assert_eq!(bad.response().text(), "shared");
}

#[test]
fn an_answer_that_others_have_overtaken_does_not_take_the_place_of_theirs() {
    let (gate, date) = (Gate::default(), Arc::new(OnceLock::<String>::new()));
    let (held, early) = (gate.clone(), Arc::clone(&date));
    let origin = Origin::start(move |request| match request.field("X-Slow").is_empty() {
        // Without a date, that of its reception counts.
        true => Reply::cacheable("newer"),
        false => {
            held.pass();
            Reply::cacheable("older").with("Date", early.get().unwrap())
        }
    });
    let tidegate = Tidegate::before(&origin);
    date.set(tidegate.get("/date").field("Date")).unwrap();
    let mut slow = leader(&tidegate, "X-Slow: 1\r\n");
    eventually("the leader is on its way", || (origin.count() == 2).then_some(()));
    assert_eq!(tidegate.get("/").text(), "newer");
    gate.open();
    assert_eq!(slow.response().text(), "older");
    assert_eq!((tidegate.get("/").text().as_str(), origin.count()), ("newer", 3));
}

#[test]
fn clients_leave_one_after_the_other_the_rest_do_not_all_ask_the_origin() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |_| {
        held.pass();
        Reply::cacheable("shared")
    });
    let tidegate = Tidegate::builder().origin(&origin).top("workers = 1").start();
    let mut leaving = Vec::new();
    for waiting in 0..4 {
        leaving.push(leader(&tidegate, "X-Leaves: 1"));
        eventually("it asks or waits", || {
            let waits = tidegate.metric("tidegate_cache_collapsed_total");
            (origin.count() == 1 && waits == f64::from(waiting)).then_some(())
        });
    }
    let clients = followers(&tidegate, 30);
    for (number, client) in leaving.into_iter().enumerate() {
        // With a reset, not a mere end of what it sends.
        rustix::net::sockopt::set_socket_linger(client.stream(), Some(Duration::ZERO)).unwrap();
        drop(client);
        // Of those who came first, the next one asks.
        eventually("another one asks", || (origin.count() >= number + 2).then_some(()));
    }
    gate.open();
    all_shared(clients);
    // One for each who left and one for all the others; a machine that stands still for seconds adds a few.
    let asked = origin.count();
    assert!((5..20).contains(&asked), "{asked}");
}

#[test]
fn one_request_gets_an_error_of_its_own_the_next_ones_still_wait_for_each_other() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |request| {
        if !request.field("X-Bad").is_empty() {
            return Reply::status(431, "too large");
        }
        held.pass();
        Reply::cacheable("shared")
    });
    let tidegate = Tidegate::before(&origin);
    assert_eq!(tidegate.get_with("/", "X-Bad: 1\r\n").status, 431);
    let first = leader(&tidegate, "X-Good: 1");
    eventually("the origin is asked", || (origin.count() == 2).then_some(()));
    let clients = followers(&tidegate, 5);
    gate.open();
    all_shared(clients);
    drop(first);
    assert_eq!(origin.count(), 2);
}

#[test]
fn what_takes_longer_than_it_is_fresh_is_not_read_along_and_its_age_is_told() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |request| {
        if !request.field("X-First").is_empty() {
            let door = held.clone();
            return Reply::script(move |stream| {
                stream.write_all(
                    b"HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nAge: 58\r\nContent-Length: 4\r\n\r\nol",
                )?;
                door.pass();
                stream.write_all(b"d!")
            });
        }
        Reply::cacheable("new")
    });
    let tidegate = Tidegate::before(&origin);
    let mut first = leader(&tidegate, "X-First: 1");
    eventually("the origin is asked", || (origin.count() == 1).then_some(()));
    let mut ages = Vec::new();
    // Whoever comes while it is fresh reads along, and is told how old it is by then; the next one asks again.
    let address = tidegate.address();
    let ages = eventually("it is fresh no longer", || {
        let mut client = Client::connect(address);
        client.send("GET / HTTP/1.1\r\nHost: example.org\r\n\r\n");
        let (_, fields) = client.head();
        let length = fields.get("Content-Length").unwrap();
        ages.push(fields.get("Age").filter(|_| length == "4"));
        (length == "3").then(|| std::mem::take(&mut ages))
    });
    let (last, along) = ages.split_last().unwrap();
    assert_eq!(*last, None);
    assert!(along.iter().all(|age| matches!(age.as_deref(), Some("58" | "59"))), "{along:?}");
    assert!(along.iter().any(|age| age.as_deref() == Some("59")), "{along:?}");
    assert_eq!(origin.count(), 2);
    gate.open();
    assert_eq!(first.response().text(), "old!");
}

#[test]
fn who_asks_for_more_than_others_get_does_not_read_along() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |request| {
        if request.field("X-First").is_empty() {
            return Reply::cacheable("mine");
        }
        let door = held.clone();
        Reply::script(move |stream| {
            stream
                .write_all(b"HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: 6\r\n\r\nsha")?;
            door.pass();
            stream.write_all(b"red")
        })
    });
    let tidegate = Tidegate::before(&origin);
    let mut first = leader(&tidegate, "X-First: 1");
    assert_eq!(first.head().0, 200);
    for field in ["Cache-Control: no-cache\r\n", "If-None-Match: \"x\"\r\n"] {
        assert_eq!(tidegate.get_with("/", field).text(), "mine", "{field}");
    }
    gate.open();
    assert_eq!(first.read_bytes(6), b"shared");
}

/// Each waited for the one before: what is to hide an outage made one.
#[test]
fn who_waits_takes_what_stands_in_for_a_failing_upstream_as_the_leader_does() {
    for answers in [true, false] {
        let (primed, gate) = (std::sync::atomic::AtomicBool::new(false), Gate::default());
        let held = gate.clone();
        let origin = Origin::start(move |_| {
            if !primed.swap(true, std::sync::atomic::Ordering::SeqCst) {
                return Reply::ok("shared").with("Cache-Control", "max-age=1, stale-if-error=600");
            }
            held.pass();
            match answers {
                true => Reply::status(503, ""),
                // The head that never comes.
                false => Reply::script(|_| Ok(())),
            }
        });
        let tidegate = Tidegate::before(&origin);
        assert_eq!(tidegate.get("/").text(), "shared");
        eventually("it is stale", || {
            let stored = tidegate.get_with("/", "Cache-Control: only-if-cached\r\n");
            (stored.status == 504).then_some(())
        });
        let first = leader(&tidegate, "X: y");
        eventually("it is asked for", || (origin.count() > 1).then_some(()));
        let clients = followers(&tidegate, 10);
        gate.open();
        all_shared(clients);
        drop(first);
        // An upstream that has hung up is asked once more.
        assert!(origin.count() <= if answers { 2 } else { 3 }, "{} requests", origin.count());
    }
}

/// A cookie and the origin's answer to it had all others ask side by side for a minute.
#[test]
fn an_answer_for_one_client_has_others_without_a_cookie_wait_for_each_other_still() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |request| {
        if !request.field("Cookie").is_empty() {
            return Reply::ok("for one").with("Set-Cookie", "a=c");
        }
        held.pass();
        Reply::cacheable("shared")
    });
    let tidegate = Tidegate::before(&origin);
    for _ in 0..3 {
        assert_eq!(tidegate.get_with("/", "Cookie: a=b\r\nCache-Control: no-cache\r\n").text(), "for one");
        assert_eq!(tidegate.get_with("/", "Cookie: a=b\r\n").text(), "for one");
    }
    let asked = origin.count();
    let first = leader(&tidegate, "X: y");
    eventually("it is asked for", || (origin.count() > asked).then_some(()));
    let clients = followers(&tidegate, 10);
    gate.open();
    all_shared(clients);
    drop(first);
    assert_eq!(origin.count(), asked + 1);
}

/// What a refresh finds out is of those who are identified like the client for whom it was begun.
#[test]
fn a_refresh_for_one_client_has_others_without_a_cookie_wait_for_each_other_still() {
    let (primed, gate) = (Gate::default(), Gate::default());
    let (is_primed, held) = (primed.clone(), gate.clone());
    let origin = Origin::start(move |request| {
        if !request.field("Cookie").is_empty() {
            return Reply::ok("for one").with("Set-Cookie", "a=c");
        }
        if !is_primed.is_open() {
            return Reply::ok("old").with("Cache-Control", "max-age=1, stale-while-revalidate=600");
        }
        held.pass();
        Reply::cacheable("shared")
    });
    let tidegate = Tidegate::before(&origin);
    assert_eq!(tidegate.get("/").text(), "old");
    primed.open();
    eventually("it is refreshed", || {
        assert_eq!(tidegate.get_with("/", "Cookie: a=b\r\n").text(), "old");
        (origin.count() > 1).then_some(())
    });
    // Whatever the refresh has found out is known when the next one is begun.
    eventually("it is refreshed again", || {
        assert_eq!(tidegate.get_with("/", "Cookie: a=b\r\n").text(), "old");
        (origin.count() > 2).then_some(())
    });
    assert!(tidegate.command(&["cache", "purge", "/"]).status.success());
    let asked = |origin: &Origin| {
        origin.requests().iter().filter(|request| request.field("Cookie").is_empty()).count()
    };
    let first = leader(&tidegate, "X: y");
    eventually("it is asked for", || (asked(&origin) > 1).then_some(()));
    let clients = followers(&tidegate, 10);
    gate.open();
    all_shared(clients);
    drop(first);
    assert_eq!(asked(&origin), 2);
}

/// They waited for answers of which they could use none.
#[test]
fn who_asks_for_the_origins_own_word_waits_for_nobody() {
    let barrier = Arc::new(Barrier::new(4));
    let all_here = Arc::clone(&barrier);
    let origin = Origin::start(move |_| {
        // Passes only if four requests are here at once.
        all_here.wait();
        Reply::cacheable("page")
    });
    let tidegate = Tidegate::before(&origin);
    let address = tidegate.address();
    let ask = move || Client::connect(address).request("GET", "/", "Cache-Control: no-cache\r\n").text();
    let clients: Vec<_> = (0..4).map(|_| std::thread::spawn(ask)).collect();
    for client in clients {
        assert_eq!(client.join().unwrap(), "page");
    }
    assert_eq!(origin.count(), 4);
    assert_eq!(tidegate.metric("tidegate_cache_collapsed_total"), 0.0);
    assert!(tidegate.get("/").is_hit());
}
