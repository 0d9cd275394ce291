//! Groups of origin servers: who is asked, and what happens when one is dead, slow or has closed its connection.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tidegate_e2e::{Builder, Client, Gate, Origin, Reply, Tidegate, eventually, free_port};

fn named(name: &'static str) -> Origin {
    Origin::start(move |_| Reply::ok(name).with("Cache-Control", "no-store"))
}

fn group(origins: &[&Origin], lines: &str) -> Builder {
    let servers: Vec<SocketAddr> = origins.iter().map(|origin| origin.address()).collect();
    Tidegate::builder().group("app", &servers, lines).route("/", "upstream = \"app\"")
}

fn refusing() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], free_port()))
}

#[test]
fn dead_upstream_is_502() {
    let tidegate =
        Tidegate::builder().group("app", &[refusing()], "").route("/", "upstream = \"app\"").start();
    assert_eq!(tidegate.get("/").status, 502);
}

#[test]
fn connection_of_the_client_outlives_a_502() {
    let tidegate =
        Tidegate::builder().group("app", &[refusing()], "").route("/", "upstream = \"app\"").start();
    let mut client = tidegate.connect();
    for _ in 0..3 {
        assert_eq!(client.get("/").status, 502);
    }
    assert_eq!(client.request("PUT", "/", "Content-Length: 0\r\n").status, 502);
    assert_eq!(client.get("/").status, 502);
}

#[test]
fn every_server_fails_its_health_check_the_answer_is_503() {
    let healthy = Arc::new(AtomicBool::new(false));
    let state = Arc::clone(&healthy);
    let origin = Origin::start(move |request| match request.target.as_str() {
        "/health" => Reply::status(if state.load(Ordering::SeqCst) { 200 } else { 503 }, ""),
        _ => Reply::ok("up").with("Cache-Control", "no-store"),
    });
    let check = "health_check = { path = \"/health\", interval = \"100ms\", timeout = \"2s\" }";
    let tidegate = group(&[&origin], check).start();
    eventually("it is out", || {
        let response = tidegate.get("/");
        (response.status == 503 && !response.field("Retry-After").is_empty()).then_some(())
    });
    healthy.store(true, Ordering::SeqCst);
    eventually("it is back", || (tidegate.get("/").text() == "up").then_some(()));
}

#[test]
fn requests_that_come_at_once_share_a_connection_and_each_client_gets_its_own_answer() {
    let origin = Origin::start(|request| Reply::ok(request.target.clone()).with("Cache-Control", "no-store"));
    let tidegate = group(&[&origin], "pipeline = 32\npipeline_timeout = \"60s\"").top("workers = 1").start();
    assert_eq!(tidegate.get("/warm").text(), "/warm");
    let mut clients: Vec<Client> = (0..24).map(|_| tidegate.connect()).collect();
    for round in 0..3 {
        let target = |client: usize| format!("/{round}/{client}");
        // They are there at once when it goes on.
        tidegate.stop();
        for (number, client) in clients.iter_mut().enumerate() {
            client.send(format!("GET {} HTTP/1.1\r\nHost: a\r\n\r\n", target(number)));
        }
        tidegate.signal(Signal::CONT);
        for (number, client) in clients.iter_mut().enumerate() {
            assert_eq!(client.response().text(), target(number));
        }
    }
    assert_eq!(origin.count(), 1 + 3 * 24, "none is asked for twice");
    assert_eq!(origin.connections(), 1);
    let pipelined = tidegate.metric("tidegate_upstream_pipelined_total");
    assert!((2.0..=72.0).contains(&pipelined), "some of them shared a write: {pipelined}");
    assert_eq!(tidegate.metric("tidegate_upstream_pipeline_faults_total"), 0.0);
    let status = tidegate.command(&["status"]);
    let status = String::from_utf8(status.stdout).unwrap();
    let titles = status.lines().find(|line| line.starts_with("UPSTREAM")).unwrap().replace("LAST ERROR", "");
    let server = status.lines().find(|line| line.starts_with("app ")).unwrap();
    let row: Vec<_> = titles.split_whitespace().zip(server.split_whitespace()).collect();
    for shown in [("REQUESTS", "73"), ("PIPELINED", pipelined.to_string().as_str()), ("REPEATED", "0")] {
        assert!(row.contains(&shown), "{shown:?} in\n{status}");
    }
}

#[test]
fn idle_connections_are_closed_after_their_time() {
    let closed = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&closed);
    let origin = Origin::start(move |_| {
        let seen = Arc::clone(&seen);
        Reply::script(move |stream| {
            use std::io::{Read, Write};
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")?;
            seen.store(stream.read(&mut [0])? == 0, Ordering::SeqCst);
            Ok(())
        })
    });
    let tidegate = group(&[&origin], "idle_timeout = \"1s\"").start();
    assert_eq!(tidegate.get("/").status, 200);
    eventually("the idle connection is closed without another request", || {
        closed.load(Ordering::SeqCst).then_some(())
    });
}

#[test]
fn silent_upstream_is_504_after_the_configured_time() {
    let listener = TcpListener::bind(("127.0.0.1", free_port())).unwrap();
    let server = listener.local_addr().unwrap();
    let tidegate = Tidegate::builder()
        .group("app", &[server], "response_timeout = \"1s\"")
        .route("/", "upstream = \"app\"")
        .start();
    let started = Instant::now();
    assert_eq!(tidegate.get("/").status, 504);
    let waited = started.elapsed();
    assert!(waited >= Duration::from_millis(900), "gave up after {waited:?}");
}

#[test]
fn upstream_that_answers_nonsense_is_502() {
    for nonsense in [
        &b"nonsense\r\n\r\n"[..],
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nX y: z\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nTransfer-Encoding: gzip, chunked, chunked\r\n\r\n",
        b"",
    ] {
        let origin = Origin::start(move |_| Reply::RawThenClose(nonsense.to_vec()));
        let tidegate = Tidegate::before(&origin);
        assert_eq!(tidegate.get("/").status, 502, "{:?}", String::from_utf8_lossy(nonsense));
    }
}

/// RFC 9112 §5.1. What follows the whitespace is the field's value all the same, and the client sees none.
#[test]
fn whitespace_before_a_colon_is_taken_out_of_a_response() {
    let response = b"HTTP/1.1 200 OK\r\nX-Spaced \t: y\r\nContent-Length : 2\r\n\r\nok".to_vec();
    let origin = Origin::start(move |_| Reply::RawThenClose(response.clone()));
    let tidegate = Tidegate::before(&origin);
    let answer = tidegate.get("/");
    assert_eq!(
        (answer.status, answer.field("x-spaced"), &answer.body[..]),
        (200, "y".to_owned(), &b"ok"[..])
    );
}

#[test]
fn pooled_connection_serves_request_after_request() {
    let origin = named("a");
    let tidegate = Tidegate::before(&origin);
    let mut client = tidegate.connect();
    for _ in 0..20 {
        assert_eq!(client.get("/").text(), "a");
    }
    assert_eq!(origin.connections(), 1);
}

#[test]
fn pooled_connection_closed_by_the_origin_request_is_sent_again_on_a_new_one() {
    let origin = named("a");
    let tidegate = Tidegate::before(&origin);
    let mut client = tidegate.connect();
    for round in 0..10 {
        assert_eq!(client.get("/").status, 200, "round {round}");
        origin.close_connections();
    }
}

#[test]
fn connection_that_dies_under_a_post_it_is_not_sent_twice() {
    let origin = Origin::start(|request| match request.method.as_str() {
        "POST" => Reply::Close,
        _ => Reply::ok("a").with("Cache-Control", "no-store"),
    });
    let tidegate = Tidegate::before(&origin);
    let mut client = tidegate.connect();
    assert_eq!(client.get("/").status, 200);
    assert_eq!(client.request("POST", "/pay", "Content-Length: 0\r\n").status, 502);
    let posts = origin.requests().iter().filter(|request| request.method == "POST").count();
    assert_eq!(posts, 1);
}

#[test]
fn round_robin_each_server_gets_its_share() {
    let (a, b) = (named("a"), named("b"));
    let tidegate = group(&[&a, &b], "balance = \"round-robin\"").start();
    let mut client = tidegate.connect();
    for _ in 0..20 {
        assert_eq!(client.get("/").status, 200);
    }
    assert_eq!((a.count(), b.count()), (10, 10));
}

#[test]
fn hash_by_url_one_url_stays_with_one_server() {
    let origins = [named("a"), named("b"), named("c")];
    let tidegate = group(&origins.each_ref(), "balance = \"hash-url\"").start();
    let mut client = tidegate.connect();
    for number in 0..30 {
        let target = format!("/{number}");
        let first = client.get(&target).text();
        for _ in 0..3 {
            assert_eq!(tidegate.get(&target).text(), first, "{target}");
        }
    }
    assert!(origins.iter().all(|origin| origin.count() > 0), "{:?}", origins.each_ref().map(Origin::count));
}

#[test]
fn hash_by_host_one_host_stays_with_one_server() {
    let origins = [named("a"), named("b"), named("c")];
    let tidegate = group(&origins.each_ref(), "balance = \"hash-host\"").start();
    let ask = |host: &str, target: &str| {
        let mut client = tidegate.connect();
        client.send(format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
        client.response().text()
    };
    for number in 0..20 {
        let host = format!("h{number}.example");
        assert_eq!(ask(&host, "/a"), ask(&host, "/b"), "{host}");
    }
    assert!(origins.iter().filter(|origin| origin.count() > 0).count() > 1);
}

#[test]
fn one_of_two_servers_dead_every_request_is_answered_by_the_other() {
    let alive = named("alive");
    let servers = [refusing(), alive.address()];
    let tidegate = Tidegate::builder().group("app", &servers, "").route("/", "upstream = \"app\"").start();
    for _ in 0..20 {
        assert_eq!(tidegate.get("/").text(), "alive");
    }
}

#[test]
fn server_that_fails_its_health_check_gets_no_requests_until_it_passes_again() {
    let healthy = Arc::new(AtomicBool::new(true));
    let state = Arc::clone(&healthy);
    let checked = Origin::start(move |request| match request.target.as_str() {
        "/health" => Reply::status(if state.load(Ordering::SeqCst) { 200 } else { 503 }, ""),
        _ => Reply::ok("checked").with("Cache-Control", "no-store"),
    });
    let other = named("other");
    let check = "health_check = { path = \"/health\", interval = \"100ms\", timeout = \"2s\" }";
    let tidegate = group(&[&checked, &other], check).start();
    let answers = || -> Vec<String> { (0..6).map(|_| tidegate.get("/").text()).collect() };

    eventually("both are asked", || answers().contains(&"checked".to_owned()).then_some(()));
    healthy.store(false, Ordering::SeqCst);
    eventually("it is left out", || (!answers().contains(&"checked".to_owned())).then_some(()));
    healthy.store(true, Ordering::SeqCst);
    eventually("it is back", || answers().contains(&"checked".to_owned()).then_some(()));
}

#[test]
fn server_goes_out_after_so_many_failed_checks_in_a_row_and_no_sooner() {
    let (checks, fails) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let (count, for_good) = (Arc::clone(&checks), Arc::clone(&fails));
    let origin = Origin::start(move |request| match request.target.as_str() {
        // Every second one fails.
        "/health" => match count.fetch_add(1, Ordering::SeqCst) % 2 == 1 || for_good.load(Ordering::SeqCst) {
            true => Reply::status(503, ""),
            false => Reply::status(200, ""),
        },
        _ => Reply::ok("here").with("Cache-Control", "no-store"),
    });
    let check = "health_check = { path = \"/health\", interval = \"50ms\", timeout = \"5s\", fall = 2 }";
    let tidegate = group(&[&origin], check).start();
    eventually("it is checked ten times", || {
        assert_eq!(tidegate.get("/").status, 200);
        (checks.load(Ordering::SeqCst) >= 10).then_some(())
    });
    fails.store(true, Ordering::SeqCst);
    eventually("it is out", || (tidegate.get("/").status == 503).then_some(()));
}

/// Such a page took all servers out, with all that else they had to say.
#[test]
fn response_heads_beyond_the_limit_take_no_server_out() {
    let origin = Origin::start(|request| match request.target.as_str() {
        "/large" => Reply::ok("x").with("X-Large", &"x".repeat(70_000)),
        _ => Reply::ok("here").with("Cache-Control", "no-store"),
    });
    let tidegate = group(&[&origin], "max_failures = 1\nfail_timeout = \"1h\"").start();
    for _ in 0..3 {
        assert_eq!(tidegate.get("/large").status, 502);
    }
    let status = tidegate.ask_admin("/status").text();
    assert!(status.contains("\"healthy\":true"), "{status}");
}

#[test]
fn routes_by_path_each_prefix_has_its_own_group() {
    let (a, b) = (named("a"), named("b"));
    let tidegate = Tidegate::builder()
        .group("a", &[a.address()], "")
        .group("b", &[b.address()], "")
        .route("/", "upstream = \"a\"")
        .route("/api/", "upstream = \"b\"")
        .start();
    assert_eq!(tidegate.get("/").text(), "a");
    assert_eq!(tidegate.get("/api/x").text(), "b");
    assert_eq!(tidegate.get("/x/../api/x").text(), "b");
}

#[test]
fn server_does_not_answer_all_who_wait_learn_it_at_once() {
    let origin = Origin::start(|_| {
        Reply::script(|_| {
            std::thread::sleep(Duration::from_secs(3));
            Ok(())
        })
    });
    let tidegate = group(&[&origin], "response_timeout = \"1s\"").start();
    let address = tidegate.address();
    let clients: Vec<_> = (0..6)
        .map(|_| std::thread::spawn(move || tidegate_e2e::Client::connect(address).get("/hung").status))
        .collect();
    for client in clients {
        assert_eq!(client.join().unwrap(), 504);
    }
    // Had they asked one after the other, each would have been a request.
    assert_eq!(origin.count(), 1);
}

#[test]
fn bytes_after_a_response_are_not_the_next_one() {
    let written = Gate::default();
    let done = written.clone();
    let origin = Origin::start(move |_| {
        let done = done.clone();
        Reply::script(move |stream| {
            use std::io::{Read, Write};
            stream
                .write_all(b"HTTP/1.1 200 OK\r\nCache-Control: no-store\r\nContent-Length: 5\r\n\r\nfirst")?;
            // The answer to nothing.
            stream.write_all(
                b"HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: 6\r\n\r\npoison",
            )?;
            done.open();
            let _ = stream.read(&mut [0; 4096]);
            Ok(())
        })
    });
    let tidegate = group(&[&origin], "").start();
    let mut client = tidegate.connect();
    assert_eq!(client.get("/one").text(), "first");
    written.pass();
    assert_eq!(client.get("/two").text(), "first");
}

/// What comes on a connection that is kept for the next request is no answer to it, and the server will do so again.
#[test]
fn bytes_on_an_idle_connection_are_not_the_next_response() {
    let (gate, written) = (Gate::default(), Gate::default());
    let (may_go, done) = (gate.clone(), written.clone());
    let origin = Origin::start(move |request| {
        if request.target != "/surplus" {
            return Reply::ok("fine").with("Cache-Control", "no-store");
        }
        let (may_go, done) = (may_go.clone(), done.clone());
        Reply::script(move |stream| {
            stream.write_all(b"HTTP/1.1 200 OK\r\nCache-Control: no-store\r\nContent-Length: 2\r\n\r\nok")?;
            may_go.pass();
            stream.write_all(
                b"HTTP/1.1 200 OK\r\nCache-Control: no-store\r\nContent-Length: 6\r\n\r\npoison",
            )?;
            done.open();
            let mut buffer = [0; 64];
            while stream.read(&mut buffer)? > 0 {}
            Ok(())
        })
    });
    let tidegate = Tidegate::builder().origin(&origin).top("workers = 1").start();
    assert_eq!(tidegate.get("/surplus").text(), "ok");
    gate.open();
    written.pass();
    let before = origin.connections();
    for _ in 0..3 {
        assert_eq!(tidegate.get("/").text(), "fine");
    }
    assert_eq!(origin.connections(), before + 3);
}

#[test]
fn reload_while_a_request_waits_it_stays_with_its_upstream() {
    let gate = Gate::default();
    let door = gate.clone();
    let a = Origin::start(move |_| {
        door.pass();
        Reply::status(503, "from A").with("Cache-Control", "no-store")
    });
    let b = named("from B");
    let tables = |first: (&str, &Origin), second: (&str, &Origin)| {
        format!(
            "[[upstream]]\nname = \"{}\"\nservers = [\"{}\"]\n[[upstream]]\nname = \"{}\"\nservers = [\"{}\"]\n",
            first.0,
            first.1.address(),
            second.0,
            second.1.address()
        )
    };
    let tidegate =
        Tidegate::builder().tables(&tables(("a", &a), ("b", &b))).route("/", "upstream = \"a\"").start();
    let address = tidegate.address();
    let clients: Vec<_> = (0..2)
        .map(|_| std::thread::spawn(move || tidegate_e2e::Client::connect(address).get("/w").text()))
        .collect();
    eventually("one waits for the other", || {
        (tidegate.metric("tidegate_cache_collapsed_total") >= 1.0).then_some(())
    });
    let text = std::fs::read_to_string(tidegate.config()).unwrap();
    let swapped = text.replace(&tables(("a", &a), ("b", &b)), &tables(("b", &b), ("a", &a)));
    assert_ne!(text, swapped);
    tidegate.write_config(&swapped);
    assert!(tidegate.command(&["reload"]).status.success());
    gate.open();
    for client in clients {
        assert_eq!(client.join().unwrap(), "from A");
    }
}

#[test]
fn connection_that_dies_under_a_post_no_other_server_gets_it() {
    let origins: Vec<Origin> = (0..3).map(|_| Origin::start(|_| Reply::Close)).collect();
    let tidegate = group(&origins.iter().collect::<Vec<_>>(), "").start();
    assert_eq!(tidegate.connect().request("POST", "/pay", "Content-Length: 0\r\n").status, 502);
    assert_eq!(origins.iter().map(Origin::count).sum::<usize>(), 1);
}

#[test]
fn health_check_asks_for_the_host_and_wants_the_status() {
    let origin = Origin::start(|request| match request.target.as_str() {
        "/health" if request.field("Host") == "app.example" => Reply::status(204, ""),
        "/health" => Reply::status(200, ""),
        _ => Reply::ok("up").with("Cache-Control", "no-store"),
    });
    let check = |host: &str| {
        format!(
            "health_check = {{ path = \"/health\", host = \"{host}\", status = 204, interval = \"100ms\" }}"
        )
    };
    let tidegate = group(&[&origin], &check("other.example")).start();
    eventually("it is out", || (tidegate.get("/").status == 503).then_some(()));
    let tidegate = group(&[&origin], &check("app.example")).start();
    eventually("it was asked", || (origin.count() > 10).then_some(()));
    assert_eq!(tidegate.get("/").text(), "up");
}

#[test]
fn no_more_connections_than_allowed_are_open_at_once() {
    let open = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let most = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let (now, highest) = (Arc::clone(&open), Arc::clone(&most));
    let origin = Origin::start(move |_| {
        highest.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(30));
        now.fetch_sub(1, Ordering::SeqCst);
        Reply::ok("x").with("Cache-Control", "no-store")
    });
    // Per data core, so that there is one.
    let tidegate = group(&[&origin], "max_connections = 2").top("workers = 1").start();
    let address = tidegate.address();
    let clients: Vec<_> = (0..8)
        .map(|number| {
            std::thread::spawn(move || {
                tidegate_e2e::Client::connect(address).get(&format!("/{number}")).status
            })
        })
        .collect();
    for client in clients {
        assert_eq!(client.join().unwrap(), 200);
    }
    assert_eq!(most.load(Ordering::SeqCst), 2);
}

#[test]
fn one_client_sends_its_bodies_slowly_others_still_get_connections() {
    // A quarter of a second later its connections are ended; what is seen until then counts.
    let is_in_time = |_: u32| {
        let origin = Origin::start(|_| Reply::ok("x").with("Cache-Control", "no-store"));
        let tidegate = group(&[&origin], "max_connections = 4").top("workers = 1").start();
        let slow = |number: u8| {
            let mut client = Client::try_connect_from([127, 0, 0, 9].into(), tidegate.address()).unwrap();
            client.send(format!("POST /{number} HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\nx"));
            client
        };
        let _slow: Vec<Client> = (0..8).map(slow).collect();
        eventually("three have their connections", || (origin.connections() >= 3).then_some(()));
        for number in 0..3 {
            assert_eq!(tidegate.get(&format!("/{number}")).status, 200);
        }
        let connections = origin.connections();
        let is_in_time = tidegate.metric("tidegate_connections_shed_total") == 0.0;
        assert!(!is_in_time || connections == 4, "{connections}");
        is_in_time
    };
    assert!((0..20).any(is_in_time), "the machine is too slow for this");
}

#[test]
fn idle_tunnels_have_all_connections_a_request_still_gets_one() {
    let origin = Origin::start(|request| match request.field("Upgrade").as_str() {
        "" => Reply::ok("x").with("Cache-Control", "no-store"),
        _ => Reply::script(|stream| {
            stream.write_all(
                b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n",
            )?;
            let mut bytes = [0; 64];
            loop {
                let count = stream.read(&mut bytes)?;
                if count == 0 {
                    return Ok(());
                }
                stream.write_all(&bytes[..count])?;
            }
        }),
    });
    let tidegate = group(&[&origin], "max_connections = 4").top("workers = 1").start();
    let tunnel = |last: u8| {
        let mut client = Client::try_connect_from([127, 0, 0, last].into(), tidegate.address()).unwrap();
        client.send("GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n");
        assert_eq!(client.head().0, 101);
        client
    };
    let mut of_one: Vec<Client> = (0..3).map(|_| tunnel(9)).collect();
    let mut of_another = tunnel(10);
    assert_eq!(tidegate.get("/").status, 200);
    // Whose address has most of them loses one, and nobody else does.
    assert!(of_one.remove(0).is_closed());
    for client in of_one.iter_mut().chain([&mut of_another]) {
        client.send("here");
        assert_eq!(client.read_bytes(4), b"here");
    }
    assert_eq!(tidegate.metric("tidegate_connections_shed_total"), 1.0);
}

#[test]
fn server_that_sends_more_than_it_announces_gets_one_request_a_connection() {
    let origin = Origin::start(|request| match request.target.as_str() {
        "/surplus" => Reply::script(|stream| {
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n\r\n")?;
            let mut buffer = [0; 64];
            while stream.read(&mut buffer)? > 0 {}
            Ok(())
        }),
        _ => Reply::ok("fine").with("Cache-Control", "no-store"),
    });
    let tidegate = Tidegate::builder().origin(&origin).top("workers = 1").start();
    for _ in 0..3 {
        assert_eq!(tidegate.get("/").text(), "fine");
    }
    let before = origin.connections();
    assert_eq!(tidegate.get("/surplus").text(), "ok");
    for _ in 0..3 {
        assert_eq!(tidegate.get("/").text(), "fine");
    }
    assert_eq!(origin.connections(), before + 3);
}
