//! Starting, stopping and reloading, and what is left of the cache afterwards.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::io::{Read, Write};
use std::time::Duration;

use rustix::process::Signal;
use tidegate_e2e::{Client, Gate, Origin, Reply, Tidegate, content, eventually};

const PERSISTENT: &str = "memory = \"32MiB\"\npath = \"@DIR@/cache\"";

#[test]
fn cache_over_a_file_survives_sigterm_and_kill_9() {
    let origin = Origin::start(|request| {
        let number = request.target[1..].parse().unwrap();
        Reply::ok(content(number, 20_000)).with("Cache-Control", "max-age=3600").with("ETag", "\"e\"")
    });
    let mut tidegate = Tidegate::builder().origin(&origin).cache(PERSISTENT).start();
    for number in 0..50_u64 {
        tidegate.get(&format!("/{number}"));
    }
    for (what, end) in [
        ("SIGTERM", Tidegate::terminate as fn(&mut Tidegate) -> _),
        ("kill -9", |tidegate| {
            tidegate.signal(Signal::KILL);
            tidegate.wait()
        }),
    ] {
        // Written back behind the requests; a hit says that the object is in the arena.
        for number in 0..50_u64 {
            eventually("stored", || tidegate.get(&format!("/{number}")).is_hit().then_some(()));
        }
        let asked = origin.count();
        end(&mut tidegate);
        tidegate.start();
        for number in 0..50_u64 {
            let response = tidegate.get(&format!("/{number}"));
            assert!(response.body == content(number, 20_000), "{what}: {response:?}");
            assert_eq!(response.field("ETag"), "\"e\"");
        }
        assert_eq!(origin.count(), asked, "{what}: objects were lost");
    }
}

#[test]
fn sigterm_requests_in_progress_are_finished_and_new_connections_refused() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |_| {
        held.pass();
        Reply::ok("finished")
    });
    let mut tidegate = Tidegate::before(&origin);
    let mut client = tidegate.connect();
    client.send("GET /slow HTTP/1.1\r\nHost: example.org\r\n\r\n");
    eventually("the request is with the origin", || (origin.count() == 1).then_some(()));

    tidegate.signal(Signal::TERM);
    eventually("no new connections", || Client::try_connect(tidegate.address()).is_err().then_some(()));
    gate.open();
    assert_eq!(client.response().text(), "finished");
    assert!(client.is_closed());
    assert!(tidegate.wait().success());
}

#[test]
fn sigterm_idle_connections_do_not_hold_it_up() {
    let origin = Origin::start(|_| Reply::ok("ok"));
    let mut tidegate = Tidegate::builder().origin(&origin).limits("drain_timeout = \"600s\"").start();
    let mut idle = tidegate.connect();
    assert_eq!(idle.get("/").status, 200);
    assert!(tidegate.terminate().success());
    assert!(idle.is_closed());
}

#[test]
fn sigterm_connection_on_which_nothing_has_come_is_not_waited_for() {
    let origin = Origin::start(|_| Reply::ok("x"));
    let limits = "header_timeout = \"600s\"\ndrain_timeout = \"600s\"";
    let mut tidegate = Tidegate::builder().origin(&origin).limits(limits).start();
    let mut silent = tidegate.connect();
    // Until then it is the kernel's. The first one has looked whether anybody listens.
    eventually("it is accepted", || {
        (tidegate.metric("tidegate_connections_accepted_total") >= 2.0).then_some(())
    });
    assert!(tidegate.terminate().success());
    assert!(silent.rest().is_empty());
}

#[test]
fn sigterm_request_that_never_ends_is_cut_off_after_the_drain_timeout() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |_| {
        held.pass();
        Reply::ok("too late")
    });
    let mut tidegate = Tidegate::builder().origin(&origin).limits("drain_timeout = \"1s\"").start();
    let mut client = tidegate.connect();
    client.send("GET / HTTP/1.1\r\nHost: example.org\r\n\r\n");
    eventually("the request is with the origin", || (origin.count() == 1).then_some(()));
    // The origin still holds the request when this returns.
    assert!(tidegate.terminate().success());
    let last_words = String::from_utf8_lossy(&client.rest()).into_owned();
    assert!(!last_words.starts_with("HTTP/1.1 200") && !last_words.contains("too late"), "{last_words}");
    gate.open();
}

/// Waiting, begun, and from the cache; and nobody is taken for a slow reader because of it.
#[test]
fn access_log_has_what_the_drain_timeout_cut_off() {
    // More than all socket buffers on the way hold.
    const STORED: usize = 14 << 20;
    const BEGUN: usize = 3;
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |request| {
        if request.target == "/stored" {
            return Reply::cacheable(vec![b'x'; STORED]);
        }
        let (door, has_begun) = (held.clone(), request.target == "/begun");
        Reply::script(move |stream| {
            if has_begun {
                let head = b"HTTP/1.1 200 OK\r\nCache-Control: no-store\r\nContent-Length: 100\r\n\r\nstart";
                stream.write_all(head)?;
            }
            door.pass();
            Ok(())
        })
    });
    // Loopback is exempt if nobody else is.
    let tables = "[log]\naccess = \"@DIR@/access.txt\"\nformat = \"combined\"\n\
                  [defence]\naudit = \"@DIR@/audit.txt\"\n[[classifier]]\nname = \"slow\"\nlimit = 1\n\
                  [[exempt]]\nsource = \"192.0.2.1\"";
    let mut tidegate = Tidegate::builder()
        .origin(&origin)
        .cache("memory = \"64MiB\"\nmax_object = \"16MiB\"")
        .limits("drain_timeout = \"1s\"")
        .tables(tables)
        .start();
    eventually("it is stored", || tidegate.get("/stored").is_hit().then_some(()));
    let ask = |target: &str| {
        let mut client = tidegate.connect();
        client.send(format!("GET {target} HTTP/1.1\r\nHost: example.org\r\nUser-Agent: cut off\r\n\r\n"));
        client
    };
    let mut clients: Vec<Client> = (0..BEGUN).map(|_| ask("/begun")).collect();
    for client in &mut clients {
        assert_eq!((client.head().0, client.read_bytes(5)), (200, b"start".to_vec()));
    }
    let mut reading = ask("/stored");
    assert_eq!(reading.head().0, 200);
    let asked = origin.count();
    clients.extend([reading, ask("/waiting")]);
    eventually("the last is with the origin", || (origin.count() > asked).then_some(()));
    assert!(tidegate.terminate().success());
    gate.open();
    let read = |name| std::fs::read_to_string(tidegate.directory().join(name)).unwrap_or_default();
    let log = read("access.txt");
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("\"cut off\"")).collect();
    let of = |start: &str| lines.iter().filter(|line| line.contains(start)).count();
    assert_eq!(of("\"GET /begun HTTP/1.1\" 200 5 "), BEGUN, "{log}");
    assert_eq!(of("\"GET /waiting HTTP/1.1\" 503 0 "), 1, "{log}");
    assert_eq!((of("\"GET /stored HTTP/1.1\" 200 "), of(&STORED.to_string())), (1, 0), "{log}");
    assert_eq!(lines.len(), BEGUN + 2, "{log}");
    assert_eq!(read("audit.txt"), "");
}

#[test]
fn sigterm_tunnel_that_is_idle_is_ended() {
    let origin = Origin::start(|_| {
        Reply::script(|stream| {
            stream.write_all(
                b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n",
            )?;
            while stream.read(&mut [0; 64])? > 0 {}
            Ok(())
        })
    });
    let mut tidegate = Tidegate::builder().origin(&origin).limits("drain_timeout = \"600s\"").start();
    let mut client = tidegate.connect();
    client.send("GET /chat HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n");
    assert_eq!(client.head().0, 101);
    assert!(tidegate.terminate().success());
    assert!(client.is_closed());
}

#[test]
fn sigterm_requests_of_connections_not_accepted_yet_are_answered() {
    let origin = Origin::start(|_| Reply::cacheable("ok"));
    let mut tidegate = Tidegate::before(&origin);
    assert_eq!(tidegate.get("/").text(), "ok");
    tidegate.stop();
    let mut clients: Vec<Client> = (0..20).map(|_| tidegate.connect()).collect();
    for client in &mut clients {
        client.send("GET / HTTP/1.1\r\nHost: example.org\r\n\r\n");
    }
    tidegate.signal(Signal::TERM);
    tidegate.signal(Signal::CONT);
    for client in &mut clients {
        assert_eq!(client.response().text(), "ok");
        assert!(client.is_closed());
    }
    assert!(tidegate.wait().success());
}

#[test]
fn reload_to_an_upstream_that_is_down_warns_and_is_in_force() {
    let origin = Origin::start(|_| Reply::ok("ok").with("Cache-Control", "no-store"));
    let tidegate = Tidegate::before(&origin);
    let config = std::fs::read_to_string(tidegate.config()).unwrap();
    let down = format!("127.0.0.1:{}", tidegate_e2e::free_port());
    tidegate.write_config(&config.replace(&origin.address().to_string(), &down));
    let reload = tidegate.command(&["reload"]);
    assert!(reload.status.success());
    let warning = String::from_utf8_lossy(&reload.stderr).into_owned();
    assert!(warning.contains("is unreachable") && warning.contains(&down), "{warning}");
    assert_eq!(tidegate.get("/").status, 502);
}

/// Each reload gave a server as many connections again.
#[test]
fn reload_what_a_server_is_still_doing_counts() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |_| {
        held.pass();
        Reply::ok("ok").with("Cache-Control", "no-store")
    });
    let tidegate = Tidegate::builder()
        .group("app", &[origin.address()], "max_connections = 1")
        .route("/", "upstream = \"app\"")
        .top("workers = 1")
        .start();
    let mut clients: Vec<Client> = Vec::new();
    for number in 0..4 {
        let mut client = tidegate.connect();
        client.send(format!("GET /{number} HTTP/1.1\r\nHost: example.org\r\n\r\n"));
        eventually("it is read", || client.is_read().then_some(()));
        eventually("the first is asked for", || (origin.count() > 0).then_some(()));
        clients.push(client);
        assert!(tidegate.command(&["reload"]).status.success());
    }
    assert_eq!(origin.count(), 1);
    gate.open();
    for client in &mut clients {
        assert_eq!(client.response().text(), "ok");
    }
}

#[test]
fn reload_of_a_broken_file_as_json_tells_the_error_as_json() {
    let origin = Origin::start(|_| Reply::ok("ok"));
    let tidegate = Tidegate::before(&origin);
    tidegate.write_config("[cache]\nmemroy = \"1MiB\"\n");
    let reload = tidegate.command(&["reload", "--json"]);
    assert_eq!(reload.status.code(), Some(1));
    let answer = String::from_utf8_lossy(&reload.stdout).into_owned();
    assert!(answer.starts_with('{') && answer.contains("\"error\"") && answer.contains("memroy"), "{answer}");
}

#[test]
fn sighup_new_routes_are_used_and_open_connections_kept() {
    let old = Origin::start(|_| Reply::ok("old").with("Cache-Control", "no-store"));
    let new = Origin::start(|_| Reply::ok("new").with("Cache-Control", "no-store"));
    let tidegate = Tidegate::before(&old);
    let mut client = tidegate.connect();
    assert_eq!(client.get("/").text(), "old");

    let config = std::fs::read_to_string(tidegate.config()).unwrap();
    tidegate.write_config(&config.replace(&old.address().to_string(), &new.address().to_string()));
    tidegate.signal(Signal::HUP);
    eventually("the new origin answers", || (client.get("/").text() == "new").then_some(()));
}

/// A reload looks whether servers are there, and each may take as long as it is given.
#[test]
fn sigterm_during_a_reload_drains_at_once() {
    use rustix::net::{AddressFamily, SocketType, bind, connect, listen, socket, socket_with};
    let origin = Origin::start(|_| Reply::ok("ok").with("Cache-Control", "no-store"));
    let mut tidegate = Tidegate::before(&origin);
    // Its accept queue is full: more that want to connect are not answered.
    let mute = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    let address = std::net::SocketAddr::from(([0, 0, 0, 0], tidegate_e2e::free_port()));
    bind(&mute, &address).unwrap();
    listen(&mute, 0).unwrap();
    let place = std::net::SocketAddr::from(([127, 0, 0, 1], address.port()));
    let _queued = std::net::TcpStream::connect(place).unwrap();
    let waiting =
        socket_with(AddressFamily::INET, SocketType::STREAM, rustix::net::SocketFlags::NONBLOCK, None);
    let waiting = waiting.unwrap();
    let _ = connect(&waiting, &place);
    // So many that all of them take a minute: a few are asked at the same time.
    let servers: Vec<String> =
        (0..1000).map(|n| format!("\"127.1.{}.{}:{}\"", n / 250, n % 250 + 1, address.port())).collect();
    let config = std::fs::read_to_string(tidegate.config()).unwrap();
    let own = format!("\"{}\"", origin.address());
    assert!(config.contains(&own), "{config}");
    tidegate.write_config(&config.replace(&own, &servers.join(", ")));
    tidegate.signal(Signal::HUP);
    let probe = format!(":{:04X} 02 ", address.port());
    eventually("the servers are asked", || {
        std::fs::read_to_string("/proc/net/tcp").unwrap().contains(&probe).then_some(())
    });
    assert!(tidegate.terminate().success());
    assert!(!tidegate.output().contains("was read again"), "it waited for the reload");
}

#[test]
fn sighup_with_a_broken_file_what_runs_goes_on() {
    let origin = Origin::start(|_| Reply::ok("ok").with("Cache-Control", "no-store"));
    let tidegate = Tidegate::before(&origin);
    tidegate.write_config("[[listen]\nnonsense");
    tidegate.signal(Signal::HUP);
    eventually("the error is reported", || tidegate.output().contains("tidegate.toml").then_some(()));
    assert_eq!(tidegate.get("/").text(), "ok");
}

#[test]
fn access_log_is_a_pipe_that_is_full_whole_lines_are_lost_and_counted() {
    use rustix::fs::{CWD, FileType, Mode, OFlags};
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    rustix::fs::mknodat(CWD, &path, FileType::Fifo, 0o600.into(), 0).unwrap();
    let pipe = rustix::fs::open(&path, OFlags::RDONLY | OFlags::NONBLOCK, Mode::empty()).unwrap();
    let origin = Origin::start(|_| Reply::cacheable("hello"));
    let table = format!("[log]\naccess = {path:?}\nformat = \"combined\"");
    let tidegate = Tidegate::builder().origin(&origin).top("workers = 1").tables(&table).start();
    let lost = || tidegate.metric("tidegate_access_log_dropped_total") as usize;
    let mut text = Vec::new();
    let mut read = || {
        let mut buffer = vec![0; 65536];
        while let Ok(length @ 1..) = rustix::io::read(&pipe, &mut buffer) {
            text.extend_from_slice(&buffer[..length]);
        }
        String::from_utf8_lossy(&text).into_owned()
    };
    let mut client = tidegate.connect();
    let query = "q".repeat(1000);
    for number in 0..200 {
        client.get(&format!("/{number}?{query}"));
    }
    eventually("lines are lost", || (lost() > 0).then_some(()));
    // From here on there is room.
    let mut requests = 200;
    eventually("a line is there again", || {
        client.get("/last");
        requests += 1;
        read().contains("/last").then_some(())
    });
    let lines = eventually("every line is there or counted as lost", || {
        let lines = read();
        (lines.ends_with('\n') && lines.lines().count() + lost() == requests).then_some(lines)
    });
    for line in lines.lines() {
        assert!(line.starts_with("127.0.0.1 - - [") && line.ends_with('"'), "{line}");
    }
}

#[test]
fn access_log_has_a_line_for_each_request() {
    let origin = Origin::start(|_| Reply::cacheable("hello"));
    let table = "[log]\naccess = \"@DIR@/access.txt\"\nformat = \"combined\"";
    let tidegate = Tidegate::builder().origin(&origin).tables(table).start();
    tidegate.get_with("/logged?q=1", "User-Agent: test \"agent\"\r\nReferer: http://r.example/\r\n");
    tidegate.get("/logged?q=1");
    let lines = eventually("two lines", || {
        let text = std::fs::read_to_string(tidegate.directory().join("access.txt")).ok()?;
        (text.lines().count() >= 2).then_some(text)
    });
    // Each data core writes its own lines, so that their order is not the requests'.
    let (first, second): (Vec<&str>, Vec<&str>) = lines.lines().partition(|line| line.contains("r.example"));
    let (first, second) = (first[0], second[0]);
    assert!(first.starts_with("127.0.0.1 - - ["), "{first}");
    assert!(
        first.contains("\"GET /logged?q=1 HTTP/1.1\" 200 5 "),
        "content bytes alone are counted: {first}"
    );
    assert!(second.contains("\" 200 5 "), "{second}");
    assert!(first.contains("\"http://r.example/\""), "{first}");
    assert!(!first.contains("test \"agent\""), "a quote that a client sent is not escaped: {first}");
}

/// The last of several hits was logged as what stood at the place of its head in the first one's bytes.
#[test]
fn hits_that_come_in_one_write_are_logged_each_as_itself() {
    let origin = Origin::start(|_| Reply::cacheable("hello"));
    let table = "[log]\naccess = \"@DIR@/access.txt\"\nformat = \"combined\"";
    let tidegate = Tidegate::builder().origin(&origin).top("workers = 1").tables(table).start();
    for target in ["/first", "/second-of-them"] {
        tidegate.get(target);
        eventually("it is a hit", || tidegate.get(target).is_hit().then_some(()));
    }
    let mut client = tidegate.connect();
    client.send(
        "GET /first HTTP/1.1\r\nHost: example.org\r\nUser-Agent: one\r\n\r\n\
         GET /second-of-them HTTP/1.1\r\nHost: example.org\r\nUser-Agent: two\r\nReferer: http://r.example/\r\n\r\n",
    );
    assert!((client.response().is_hit(), client.response().is_hit()) == (true, true));
    let lines = eventually("their lines", || {
        let text = std::fs::read_to_string(tidegate.directory().join("access.txt")).ok()?;
        (text.lines().filter(|line| line.contains("\"one\"") || line.contains("\"two\"")).count() == 2)
            .then_some(text)
    });
    let of = |agent: &str| lines.lines().find(|line| line.contains(agent)).unwrap().to_owned();
    assert!(of("\"one\"").contains("\"GET /first HTTP/1.1\" 200 5 \"-\" \"one\""), "{lines}");
    let second = "\"GET /second-of-them HTTP/1.1\" 200 5 \"http://r.example/\" \"two\"";
    assert!(of("\"two\"").contains(second), "{lines}");
}

#[test]
fn access_log_in_json_is_an_object_a_line() {
    let origin = Origin::start(|_| Reply::cacheable("hello"));
    let table = "[log]\naccess = \"@DIR@/access.txt\"\nformat = \"json\"";
    let tidegate = Tidegate::builder().origin(&origin).tables(table).start();
    tidegate.get("/logged");
    let line = eventually("a line", || {
        let text = std::fs::read_to_string(tidegate.directory().join("access.txt")).ok()?;
        text.lines().next().map(str::to_owned)
    });
    assert!(line.starts_with('{') && line.ends_with('}') && line.contains("\"/logged\""), "{line}");
}

#[test]
fn access_log_escapes_what_is_not_ascii_as_other_servers_do() {
    let origin = Origin::start(|_| Reply::cacheable("hello"));
    let table = "[log]\naccess = \"@DIR@/access.txt\"\nformat = \"combined\"";
    let tidegate = Tidegate::builder().origin(&origin).tables(table).start();
    tidegate.get_with("/", "User-Agent: é \\x41 \"\r\n");
    let line = eventually("a line", || {
        let text = std::fs::read_to_string(tidegate.directory().join("access.txt")).ok()?;
        text.lines().next().map(str::to_owned)
    });
    assert!(line.ends_with("\"\\xc3\\xa9 \\\\x41 \\\"\""), "{line}");
}

#[test]
fn access_log_has_the_size_of_what_answered_a_refused_head() {
    let origin = Origin::start(|_| Reply::cacheable("hello"));
    let table = "[log]\naccess = \"@DIR@/access.txt\"\nformat = \"combined\"";
    let tidegate = Tidegate::builder().origin(&origin).tables(table).start();
    let mut client = tidegate.connect();
    client.send("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n");
    let response = client.response();
    assert_eq!(response.status, 400);
    assert!(!response.body.is_empty());
    let line = eventually("a line", || {
        let text = std::fs::read_to_string(tidegate.directory().join("access.txt")).ok()?;
        text.lines().next().map(str::to_owned)
    });
    assert!(line.contains(&format!("\" 400 {} \"", response.body.len())), "{line}");
}

#[test]
fn access_log_has_responses_that_ended_early_and_clients_that_left() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |request| match request.target.as_str() {
        "/cut" => {
            let door = held.clone();
            Reply::script(move |stream| {
                stream.write_all(
                    b"HTTP/1.1 200 OK\r\nCache-Control: no-store\r\nContent-Length: 100\r\n\r\nstart",
                )?;
                door.pass();
                Ok(())
            })
        }
        _ => Reply::script(|stream| stream.read(&mut [0; 1]).map(drop)),
    });
    let table = "[log]\naccess = \"@DIR@/access.txt\"\nformat = \"combined\"";
    let tidegate = Tidegate::builder().origin(&origin).tables(table).start();
    let mut client = tidegate.connect();
    client.send("GET /cut HTTP/1.1\r\nHost: example.org\r\n\r\n");
    assert_eq!(client.head().0, 200);
    assert_eq!(client.read_bytes(5), b"start");
    gate.open();
    assert!(client.is_closed());
    let mut client = tidegate.connect();
    client.send("GET /left HTTP/1.1\r\nHost: example.org\r\n\r\n");
    eventually("the origin is asked", || (origin.count() == 2).then_some(()));
    rustix::net::sockopt::set_socket_linger(client.stream(), Some(Duration::ZERO)).unwrap();
    drop(client);
    let lines = eventually("both lines", || {
        let lines = std::fs::read_to_string(tidegate.directory().join("access.txt")).ok()?;
        (lines.lines().count() == 2).then_some(lines)
    });
    assert!(lines.contains("\"GET /cut HTTP/1.1\" 200 5 "), "{lines}");
    assert!(lines.contains("\"GET /left HTTP/1.1\" 499 0 "), "{lines}");
}

#[test]
fn stored_response_whose_client_leaves_is_counted_as_broken_and_logged_with_what_was_sent() {
    // More than all socket buffers on the way hold.
    const BODY: usize = 14 << 20;
    let origin = Origin::start(|_| Reply::cacheable(vec![b'x'; BODY]));
    let table = "[log]\naccess = \"@DIR@/access.txt\"\nformat = \"combined\"";
    let cache = "memory = \"64MiB\"\nmax_object = \"16MiB\"";
    let tidegate = Tidegate::builder().origin(&origin).cache(cache).tables(table).start();
    eventually("it is stored", || tidegate.get("/large").is_hit().then_some(()));
    let broken = || tidegate.metric("tidegate_responses_broken_total");
    assert_eq!(broken(), 0.0);
    let mut client = tidegate.connect();
    client.send("GET /large HTTP/1.1\r\nHost: example.org\r\nUser-Agent: leaves\r\n\r\n");
    assert_eq!(client.head().0, 200);
    client.read_bytes(1000);
    rustix::net::sockopt::set_socket_linger(client.stream(), Some(Duration::ZERO)).unwrap();
    drop(client);
    eventually("it is counted", || (broken() == 1.0).then_some(()));
    let mut client = tidegate.connect();
    client.send("GET /large HTTP/1.1\r\nHost: example.org\r\nUser-Agent: stays\r\n\r\n");
    assert_eq!(client.response().body.len(), BODY);
    let lines = eventually("both lines", || {
        let text = std::fs::read_to_string(tidegate.directory().join("access.txt")).ok()?;
        (text.contains("\"leaves\"") && text.contains("\"stays\"")).then_some(text)
    });
    let bytes = |agent: &str| -> usize {
        let line = lines.lines().find(|line| line.contains(agent)).unwrap();
        line.split("\" 200 ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap()
    };
    assert!((1000..BODY).contains(&bytes("leaves")), "{lines}");
    assert_eq!(bytes("stays"), BODY);
    assert_eq!(broken(), 1.0);
}

#[test]
fn more_connections_than_allowed_the_rest_is_turned_away_and_room_is_made_again() {
    let origin = Origin::start(|_| Reply::ok("ok"));
    let tidegate = Tidegate::builder().origin(&origin).limits("connections = 8").start();
    let mut kept: Vec<Client> = Vec::new();
    // The harness's own probes may still be counted for a moment.
    eventually("eight connections are served", || {
        let mut client = tidegate.connect();
        client.stream().set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        client.try_send("GET / HTTP/1.1\r\nHost: example.org\r\n\r\n").ok()?;
        if client.try_response("GET").is_ok_and(|response| response.status == 200) {
            kept.push(client);
        }
        (kept.len() == 8).then_some(())
    });
    let refused = tidegate.metric("tidegate_connections_refused_total");
    let mut ninth = tidegate.connect();
    let _ = ninth.try_send("GET / HTTP/1.1\r\nHost: example.org\r\n\r\n");
    assert!(ninth.is_closed(), "the ninth is closed without a word");
    assert_eq!(tidegate.metric("tidegate_connections_refused_total"), refused + 1.0);
    for client in &mut kept {
        assert_eq!(client.get("/").status, 200);
    }
    kept.clear();
    eventually("there is room again", || {
        let mut client = tidegate.connect();
        client.try_send("GET / HTTP/1.1\r\nHost: example.org\r\n\r\n").ok()?;
        (client.try_response("GET").ok()?.status == 200).then_some(())
    });
}
