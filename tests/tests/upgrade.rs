//! `tidegate upgrade` and SIGUSR2: another process takes the place of the one that runs, and no client notices.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::cell::Cell;
use std::io::Write;
use std::net::{SocketAddr, UdpSocket};
use std::os::unix::net::UnixDatagram;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use quinn::crypto::rustls::QuicClientConfig;
use quinn::{ClientConfig, Endpoint};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use serde_json::Value;
use tidegate_e2e::{
    Builder, Certificate, Client, Gate, Origin, Process, Reply, Response, Site, Tidegate, content,
    eventually, http3,
};

/// A process that is started in the place of tidegate, and speaks as far as the script goes on.
const SPEAKS: &str = "#!/usr/bin/env python3
import json, os, signal, socket, sys, time
link = socket.socket(fileno=os.dup(0))
def say(what, **more): link.send(json.dumps({'say': what, **more}).encode())
def hear(what):
    while True:
        data, descriptors, _, _ = socket.recv_fds(link, 200000, 64)
        if not data: sys.exit(9)
        if json.loads(data)['say'] == what: return descriptors
def here(): say('here', protocol=1, version='9.9'); hear('offer')
def inherit(): here(); say('prepared'); return hear('yours')
";

fn body_of(target: &str) -> Vec<u8> {
    let seed = target.bytes().fold(7_u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)));
    content(seed, 1000 + (seed % 20_000) as usize)
}

fn origin() -> Origin {
    Origin::start(|request| Reply::cacheable(body_of(&request.target)))
}

fn builder(origin: &Origin) -> Builder {
    Tidegate::builder().own_program().origin(origin).top("workers = 2").cache("path = \"@DIR@/cache\"")
}

/// Asks for an upgrade that must succeed, and waits until the old process has ended as it should.
fn upgrade(tidegate: &mut Tidegate) {
    let before = tidegate.pid();
    let answer = tidegate.command(&["upgrade", "--json"]);
    assert!(answer.status.success(), "{answer:?}");
    let answer: Value = serde_json::from_slice(&answer.stdout).unwrap();
    let pid = answer["pid"].as_u64().unwrap() as u32;
    assert_ne!(pid, before);
    assert_eq!(answer["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(tidegate.follow(pid).code(), Some(0));
    is_alone(tidegate);
}

/// Waits until the process that serves knows that the one before has ended.
fn is_alone(tidegate: &Tidegate) {
    let pid = tidegate.pid();
    eventually("the process before has ended", || {
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
        let names =
            threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("comm")).ok());
        names.into_iter().all(|name| name.trim() != "predecessor").then_some(())
    });
}

/// Asks for an upgrade that must fail; returns why.
fn refused(tidegate: &Tidegate) -> String {
    let Output { status, stdout, stderr } = tidegate.command(&["upgrade"]);
    assert_eq!(status.code(), Some(1), "{}", String::from_utf8_lossy(&stdout));
    let why = String::from_utf8(stderr).unwrap();
    assert_eq!(why.lines().count(), 1, "{why}");
    why
}

/// That it serves from its cache, and stores.
fn is_in_force(tidegate: &Tidegate, stored: &str, new: &str) {
    assert!(tidegate.get(stored).is_hit(), "{stored}");
    assert!(!tidegate.get(new).is_hit());
    let again = tidegate.get(new);
    assert!(again.is_hit(), "{:?}", again.fields);
    assert_eq!(again.body, body_of(new));
}

/// Clients that ask without a pause until they are told to end. Any failure ends the test.
struct Clients {
    ended: Arc<AtomicBool>,
    served: Arc<AtomicU64>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Clients {
    fn start(address: SocketAddr, new: usize, keeping: usize) -> Self {
        let (ended, served) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let threads = (0..new + keeping).map(|index| {
            let (ended, served) = (Arc::clone(&ended), Arc::clone(&served));
            std::thread::spawn(move || {
                let mut kept: Option<Client> = None;
                let mut turn = index as u64;
                while !ended.load(Ordering::Relaxed) {
                    turn += 7;
                    let target = format!("/stored/{}", turn % 40);
                    let response = ask(&mut kept, address, &target);
                    assert_eq!((response.status, response.is_hit()), (200, true), "{:?}", response.fields);
                    assert!(response.body == body_of(&target), "wrong bytes of {target}");
                    if index < new || response.field("Connection") == "close" {
                        kept = None;
                    }
                    served.fetch_add(1, Ordering::Relaxed);
                }
            })
        });
        let threads = threads.collect();
        Self { ended, served, threads }
    }

    /// Waits until so many more are served.
    fn serve(&self, more: u64) {
        let goal = self.served.load(Ordering::Relaxed) + more;
        eventually("clients are served", || {
            assert!(!self.threads.iter().any(std::thread::JoinHandle::is_finished), "a client has failed");
            (self.served.load(Ordering::Relaxed) >= goal).then_some(())
        });
    }

    fn end(self) {
        self.ended.store(true, Ordering::Relaxed);
        self.threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}

/// One request, on the connection that is there. One that was kept may be closed by the server while it is idle, which
/// is no failure (RFC 9112 §9.5): the request goes on another.
fn ask(kept: &mut Option<Client>, address: SocketAddr, target: &str) -> Response {
    let head = format!("GET {target} HTTP/1.1\r\nHost: example.org\r\n\r\n");
    if let Some(mut client) = kept.take()
        && client.try_send(&head).is_ok()
        && let Ok(response) = client.try_response("GET")
    {
        *kept = Some(client);
        return response;
    }
    let mut client = Client::connect(address);
    client.send(&head);
    let response = client.response();
    *kept = Some(client);
    response
}

#[test]
fn upgrades_under_load_refuse_nobody_and_lose_nothing() {
    let origin = origin();
    for path in ["path = \"@DIR@/cache\"", ""] {
        let builder = Tidegate::builder().own_program().origin(&origin).top("workers = 2").cache(path);
        let mut tidegate = builder.start();
        (0..40).for_each(|n| assert_eq!(tidegate.get(&format!("/stored/{n}")).status, 200));
        let asked = origin.count();
        let clients = Clients::start(tidegate.address(), 3, 2);
        for _ in 0..5 {
            clients.serve(200);
            upgrade(&mut tidegate);
        }
        clients.serve(200);
        clients.end();
        assert_eq!(origin.count(), asked, "hits have become misses");
        is_in_force(&tidegate, "/stored/1", &format!("/new{}", path.len()));
        assert_eq!(tidegate.metric("tidegate_upgrades_total"), 0.0, "each process counts its own");
        assert_eq!(tidegate.terminate().code(), Some(0));
    }
}

#[test]
fn connection_that_waited_to_be_accepted_is_served_by_somebody() {
    let origin = origin();
    let mut tidegate = builder(&origin).start();
    tidegate.get("/a");
    // The kernel keeps silent ones for a second or so, and an upgrade mostly takes less. Those that the old process has
    // accepted by then it may close as idle: without a request none is lost.
    let is_served = (0..5).any(|_| {
        let mut silent: Vec<Client> = (0..50).map(|_| tidegate.connect()).collect();
        upgrade(&mut tidegate);
        let mut answers = silent.iter_mut().filter_map(|client| {
            client.try_send("GET /a HTTP/1.1\r\nHost: example.org\r\n\r\n").ok()?;
            client.try_response("GET").ok()
        });
        answers.next().is_some_and(|first| first.is_hit() && answers.all(|other| other.is_hit()))
    });
    assert!(is_served);
    assert!(tidegate.get("/a").is_hit());
}

#[test]
fn connection_that_has_just_agreed_on_tls_gets_its_answer() {
    let (origin, certificate) = (origin(), Certificate::of(&["a.example"]));
    let mut site = Site::start(builder(&origin), &[("a", &certificate)]);
    let mut fresh: Vec<Client> = (0..20).map(|_| site.connect(&certificate)).collect();
    let answer = site.tidegate.command(&["upgrade", "--json"]);
    assert!(answer.status.success(), "{answer:?}");
    for client in &mut fresh {
        assert_eq!(client.get("/a").body, body_of("/a"));
    }
    let answer: Value = serde_json::from_slice(&answer.stdout).unwrap();
    assert_eq!(site.tidegate.follow(answer["pid"].as_u64().unwrap() as u32).code(), Some(0));
}

/// Of two processes with one UDP socket each gets some of the datagrams.
#[test]
fn downloads_by_http3_over_an_upgrade_arrive_whole_and_new_clients_are_the_new_processs() {
    let (large, certificate) = (content(98, 6 << 20), Certificate::of(&["a.example"]));
    let body = large.clone();
    let origin = Origin::start(move |request| match request.target.as_str() {
        "/large" => Reply::cacheable(body.clone()),
        target => Reply::cacheable(body_of(target)),
    });
    let builder = builder(&origin).cache("max_object = \"8MiB\"");
    let mut site = Site::with_http3(builder, &[("a", &certificate)]);
    let old = site.tidegate.pid();
    let new = http3::run(async {
        let mut downloads = Vec::new();
        for _ in 0..4 {
            // The client has to ask for each piece.
            let client = http3::Client::connect_from([127, 0, 0, 1], &site, &certificate, 64 * 1024).await;
            let mut stream = client.send(http3::get("/large")).await;
            assert_eq!(stream.recv_response().await.unwrap().status(), 200);
            let begun = http3::piece(&mut stream).await.unwrap().unwrap();
            downloads.push((client, stream, begun.to_vec()));
        }
        let idle = http3::Client::connect(&site, &certificate).await;
        assert_eq!(idle.get("/a").await.body, body_of("/a"));
        let admin = site.tidegate.admin().to_string();
        let upgrade = move || {
            let mut command = Command::new(Tidegate::binary());
            command.args(["upgrade", "--json", "--admin", &admin]).output().unwrap()
        };
        let answer = tokio::task::spawn_blocking(upgrade).await.unwrap();
        assert!(answer.status.success(), "{answer:?}");
        for number in 1..=8 {
            let client = http3::Client::connect(&site, &certificate).await;
            assert_eq!(client.get("/a").await.body, body_of("/a"));
            assert_eq!(site.tidegate.metric("tidegate_http3_connections_total"), f64::from(number));
        }
        assert_eq!(http3::end(&idle.quic).await, http3::code::NO_ERROR, "it can go elsewhere");
        assert!(std::fs::exists(format!("/proc/{old}")).unwrap());
        for (_, stream, body) in &mut downloads {
            assert!(body.len() < large.len());
            body.extend(http3::rest(stream).await.unwrap());
            assert!(*body == large, "the download is not what was stored");
        }
        serde_json::from_slice::<Value>(&answer.stdout).unwrap()
    });
    assert_eq!(site.tidegate.follow(new["pid"].as_u64().unwrap() as u32).code(), Some(0));
    is_alone(&site.tidegate);
    http3::run(async {
        let client = http3::Client::connect(&site, &certificate).await;
        assert!(client.get("/large").await.body == large);
    });
}

/// The new process had the kernel hand datagrams to as many cores as it would have had, also when nothing came of it.
#[test]
fn upgrade_that_fails_leaves_datagrams_of_http3_where_they_were() {
    let (certificate, origin) = (Certificate::of(&["a.example"]), origin());
    let site = Site::with_http3(builder(&origin), &[("a", &certificate)]);
    let good = std::fs::read_to_string(site.tidegate.config()).unwrap();
    let elsewhere = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let in_use = elsewhere.local_addr().unwrap();
    let more = good.replace("workers = 2", "workers = 5");
    site.tidegate.write_config(&format!("{more}\n[[listen]]\naddress = \"{in_use}\"\n"));
    assert!(refused(&site.tidegate).contains("cannot listen"));
    http3::run(async {
        for _ in 0..20 {
            let client = http3::Client::connect(&site, &certificate).await;
            assert_eq!(client.get("/a").await.body, body_of("/a"));
        }
    });
}

/// Passes on what comes between a client and `server`, from where the first word is; what the client has to say after it has
/// been asked to prove its address waits for the gate.
fn relay(server: SocketAddr, gate: Gate) -> SocketAddr {
    let [inside, outside] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
    outside.connect(server).unwrap();
    let address = inside.local_addr().unwrap();
    std::thread::spawn(move || -> std::io::Result<()> {
        let mut buffer = [0; 2000];
        let (length, client) = inside.recv_from(&mut buffer)?;
        outside.send(&buffer[..length])?;
        let length = outside.recv(&mut buffer)?;
        let (back, from) = (inside.try_clone()?, outside.try_clone()?);
        back.send_to(&buffer[..length], client)?;
        gate.pass();
        std::thread::spawn(move || -> std::io::Result<()> {
            let mut buffer = [0; 2000];
            loop {
                let length = from.recv(&mut buffer)?;
                back.send_to(&buffer[..length], client)?;
            }
        });
        loop {
            let length = inside.recv(&mut buffer)?;
            outside.send(&buffer[..length])?;
        }
    });
    address
}

/// It was asked again, which clients take no notice of (RFC 9000 §17.2.5.2).
#[test]
fn client_that_the_old_process_has_asked_to_prove_its_address_is_let_in_by_the_new_one() {
    let (certificate, origin) = (Certificate::of(&["a.example"]), origin());
    let rule = "[[connection]]\nsource = \"127.0.9.7\"\nrate = 1\n";
    let mut site = Site::with_http3(builder(&origin).tables(rule), &[("a", &certificate)]);
    let gate = Gate::default();
    let through = relay(site.address, gate.clone());
    let tls = QuicClientConfig::try_from(Certificate::client_config(&[&certificate], b"h3")).unwrap();
    let client = async move {
        let endpoint = Endpoint::client(([127, 0, 0, 1], 0).into()).unwrap();
        let config = ClientConfig::new(Arc::new(tls));
        let connecting = endpoint.connect_with(config, through, "a.example").unwrap();
        let quic = connecting.await.unwrap();
        http3::Client::over(endpoint, quic).await.get("/a").await
    };
    let answer = http3::run(async {
        let client = tokio::spawn(client);
        http3::until(|| site.tidegate.metric("tidegate_quic_retries_total") == 1.0).await;
        upgrade(&mut site.tidegate);
        gate.open();
        client.await.unwrap()
    });
    assert_eq!(answer.body, body_of("/a"));
}

/// Asks without a pause until it is told to end; what is not answered is asked again on another connection, as whoever
/// was told that the connection ends may do (RFC 9114 §5.2).
async fn ask_by_http3(site: &Site, certificate: &Certificate, ended: &Cell<bool>, served: &Cell<u64>) {
    let mut client = http3::Client::connect(site, certificate).await;
    while !ended.get() {
        let target = format!("/stored/{}", served.get() % 40);
        if let Ok(answer) = client.ask(http3::get(&target)).await {
            assert_eq!(answer.status(), 200);
            assert!(answer.body == body_of(&target), "wrong bytes of {target}");
            served.set(served.get() + 1);
        } else {
            assert_eq!(http3::end(&client.quic).await, http3::code::NO_ERROR);
            client = http3::Client::connect(site, certificate).await;
        }
    }
}

#[test]
fn clients_by_http3_that_ask_without_a_pause_notice_no_more_than_the_end_of_their_connections() {
    let (origin, certificate) = (origin(), Certificate::of(&["a.example"]));
    let mut site = Site::with_http3(builder(&origin), &[("a", &certificate)]);
    for _ in 0..3 {
        let (ended, served) = (Cell::new(false), [const { Cell::new(0) }; 3]);
        let pid = http3::run(async {
            let admin = site.tidegate.admin().to_string();
            let upgrade = async {
                http3::until(|| served.iter().all(|count| count.get() > 20)).await;
                let upgrade = move || {
                    let mut command = Command::new(Tidegate::binary());
                    command.args(["upgrade", "--json", "--admin", &admin]).output().unwrap()
                };
                let answer = tokio::task::spawn_blocking(upgrade).await.unwrap();
                assert!(answer.status.success(), "{answer:?}");
                let before = served.each_ref().map(Cell::get);
                http3::until(|| served.iter().zip(before).all(|(count, before)| count.get() > before + 20))
                    .await;
                ended.set(true);
                let answer: Value = serde_json::from_slice(&answer.stdout).unwrap();
                answer["pid"].as_u64().unwrap() as u32
            };
            let [first, second, third] =
                served.each_ref().map(|count| ask_by_http3(&site, &certificate, &ended, count));
            tokio::join!(upgrade, first, second, third).0
        });
        assert_eq!(site.tidegate.follow(pid).code(), Some(0));
        is_alone(&site.tidegate);
    }
}

#[test]
fn cache_of_another_size_in_the_same_place_is_no_upgrades_business() {
    let origin = origin();
    let mut tidegate = builder(&origin).start();
    tidegate.get("/a");
    let text = std::fs::read_to_string(tidegate.config()).unwrap();
    tidegate.write_config(&text.replace("memory = \"32MiB\"", "memory = \"16MiB\""));
    for _ in 0..3 {
        assert!(refused(&tidegate).contains("restart instead of an upgrade"));
    }
    is_in_force(&tidegate, "/a", "/b");
    tidegate.write_config(&text);
    upgrade(&mut tidegate);
    assert!(tidegate.get("/a").is_hit());
    assert!(tidegate.terminate().success());
    tidegate.start();
    assert!(tidegate.get("/a").is_hit());
}

#[test]
fn slow_download_over_an_upgrade_arrives_whole_while_its_space_is_wanted() {
    let large = content(99, 6 << 20);
    let body = large.clone();
    let origin = Origin::start(move |request| match request.target.as_str() {
        "/large" => Reply::cacheable(body.clone()),
        target => Reply::cacheable(body_of(target)),
    });
    let mut tidegate = builder(&origin).cache("memory = \"16MiB\"\nmax_object = \"8MiB\"").start();
    assert_eq!(tidegate.get("/large").body.len(), large.len());
    assert!(tidegate.get("/large").is_hit());
    let mut slow = tidegate.connect();
    slow.send("GET /large HTTP/1.1\r\nHost: example.org\r\n\r\n");
    let (status, _) = slow.head();
    assert_eq!(status, 200);
    let mut read = slow.read_bytes(100_000);
    let old = tidegate.pid();
    let answer = tidegate.command(&["upgrade", "--json"]);
    assert!(answer.status.success(), "{answer:?}");
    // One at a time: the old process has not ended.
    let why = refused(&tidegate);
    assert!(why.contains("still finishes its requests"), "{why}");
    // The new one removes the object and stores far more than there is room for.
    let purged = tidegate.command(&["cache", "purge", "http://example.org/large"]);
    assert!(purged.status.success());
    for n in 0..2_500 {
        assert_eq!(tidegate.get(&format!("/other/{n}")).status, 200);
    }
    assert!(tidegate.metric("tidegate_store_evictions_total") > 0.0, "space was never short");
    assert!(std::fs::exists(format!("/proc/{old}")).unwrap());
    read.extend(slow.read_bytes(large.len() - read.len()));
    assert!(read == large, "the download is not what was stored");
    let answer: Value = serde_json::from_slice(&answer.stdout).unwrap();
    assert_eq!(tidegate.follow(answer["pid"].as_u64().unwrap() as u32).code(), Some(0));
    is_alone(&tidegate);
    // All of the arena is the new process's now, and the object is not what it was.
    for n in 0..1_500 {
        let target = format!("/more/{n}");
        assert_eq!(tidegate.get(&target).body, body_of(&target));
    }
    assert!(!tidegate.get("/large").is_hit());
}

#[test]
fn response_that_several_read_while_it_comes_arrives_whole_over_an_upgrade() {
    let body = content(3, 3 << 20);
    let (door, sent) = (Gate::default(), body.clone());
    let held = door.clone();
    let origin = Origin::start(move |request| {
        if request.target != "/coming" {
            return Reply::cacheable(body_of(&request.target));
        }
        let (held, sent) = (held.clone(), sent.clone());
        Reply::script(move |stream| {
            let head = format!(
                "HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: {}\r\n\r\n",
                sent.len()
            );
            let (first, second) = sent.split_at(sent.len() / 3);
            stream.write_all(head.as_bytes())?;
            stream.write_all(first)?;
            held.pass();
            stream.write_all(second)
        })
    });
    let mut tidegate = builder(&origin).start();
    let mut readers: Vec<(Client, Vec<u8>)> = Vec::new();
    for _ in 0..3 {
        let mut client = tidegate.connect();
        client.send("GET /coming HTTP/1.1\r\nHost: example.org\r\n\r\n");
        assert_eq!(client.head().0, 200);
        let begun = client.read_bytes(100_000);
        readers.push((client, begun));
    }
    assert_eq!(origin.count(), 1, "they do not read along");
    let answer = tidegate.command(&["upgrade", "--json"]);
    assert!(answer.status.success(), "{answer:?}");
    door.open();
    for (client, begun) in &mut readers {
        begun.extend(client.read_bytes(body.len() - begun.len()));
        assert!(*begun == body, "not what the origin sent");
    }
    let answer: Value = serde_json::from_slice(&answer.stdout).unwrap();
    assert_eq!(tidegate.follow(answer["pid"].as_u64().unwrap() as u32).code(), Some(0));
    is_alone(&tidegate);
    tidegate.get("/a");
    is_in_force(&tidegate, "/a", "/b");
}

#[test]
fn what_the_old_process_makes_outdated_the_new_one_asks_for_again() {
    let (door, origin_door) = (Gate::default(), Gate::default());
    let (held, opened) = (door.clone(), origin_door.clone());
    let origin = Origin::start(move |request| match request.method.as_str() {
        "POST" => {
            opened.open();
            held.pass();
            Reply::ok("changed")
        }
        _ => Reply::cacheable(body_of(&request.target)),
    });
    let mut tidegate = builder(&origin).start();
    assert!(!tidegate.get("/old").is_hit());
    let mut poster = tidegate.connect();
    poster.send("POST /old HTTP/1.1\r\nHost: example.org\r\nContent-Length: 0\r\n\r\n");
    origin_door.pass();
    let mut other = tidegate.connect();
    other.send("POST /new HTTP/1.1\r\nHost: example.org\r\nContent-Length: 0\r\n\r\n");
    eventually("both wait", || {
        (origin.requests().iter().filter(|r| r.method == "POST").count() == 2).then_some(())
    });
    let answer = tidegate.command(&["upgrade", "--json"]);
    assert!(answer.status.success(), "{answer:?}");
    assert!(tidegate.get("/old").is_hit());
    tidegate.get("/new");
    assert!(tidegate.get("/new").is_hit());
    door.open();
    assert_eq!((poster.response_to("POST").status, other.response_to("POST").status), (200, 200));
    let answer: Value = serde_json::from_slice(&answer.stdout).unwrap();
    assert_eq!(tidegate.follow(answer["pid"].as_u64().unwrap() as u32).code(), Some(0));
    is_alone(&tidegate);
    // What was stored before the upgrade, and what the new process has stored itself.
    assert!(!tidegate.get("/old").is_hit());
    assert!(!tidegate.get("/new").is_hit());
}

#[test]
fn program_that_is_none_leaves_the_old_process_in_force() {
    let origin = origin();
    let tidegate = builder(&origin).start();
    tidegate.get("/a");
    let ended = |code| format!("ended before it served (exit status: {code})");
    let descriptors = tidegate.directory().join("descriptors");
    let cases = [
        (format!("#!/bin/sh\nls -l /proc/self/fd > {}\nexit 2\n", descriptors.display()), ended(2)),
        ("#!/bin/sh\nexec sleep 1000\n".to_owned(), "said nothing for 10 s".to_owned()),
        (String::new(), "cannot start".to_owned()),
        ("#!/no/such/program\n".to_owned(), "cannot start".to_owned()),
        ("#!/bin/sh\nexit 3\n".to_owned(), ended(3)),
        (
            "#!/bin/sh\necho garbage >&0; exec sleep 1000\n".to_owned(),
            "no message of this protocol".to_owned(),
        ),
        ("#!/bin/sh\nkill -9 $$\n".to_owned(), "signal: 9".to_owned()),
        (
            format!("{SPEAKS}link.send(b'x' * 170000)\ntime.sleep(1000)\n"),
            "no message of this protocol".to_owned(),
        ),
        (format!("{SPEAKS}say('here', protocol=2, version='9')\ntime.sleep(1000)\n"), "version 2".to_owned()),
        (format!("{SPEAKS}say('serving')\ntime.sleep(1000)\n"), "what it should not".to_owned()),
        (
            format!("{SPEAKS}here(); say('failed', why='error: not today\\nnor tomorrow')\n"),
            "not today nor tomorrow".to_owned(),
        ),
        (format!("{SPEAKS}here(); sys.exit(4)\n"), ended(4)),
    ];
    let mut failed = 0.0;
    for (at, (script, expected)) in cases.into_iter().enumerate() {
        tidegate.replace_program(Some(&script));
        let why = refused(&tidegate);
        assert!(why.contains(&expected), "{why}, not {expected}");
        is_in_force(&tidegate, "/a", &format!("/{at}"));
        failed += 1.0;
        assert_eq!(tidegate.metric("tidegate_upgrades_failed_total"), failed);
        assert_eq!(children_of(tidegate.pid()), Vec::<String>::new());
    }
    assert!(tidegate.output().contains("this process goes on as before"));
    // Whatever is started there gets one end of the conversation, and nothing else.
    let descriptors = std::fs::read_to_string(descriptors).unwrap();
    assert_eq!(descriptors.matches("socket:").count(), 1, "{descriptors}");
    assert!(!descriptors.contains("memfd:") && !descriptors.contains("/cache/"), "{descriptors}");
}

#[test]
fn program_that_fails_with_the_cache_in_its_hands_gives_it_back() {
    let origin = origin();
    let tidegate = builder(&origin).start();
    tidegate.get("/a");
    let cases = [
        ("inherit(); sys.exit(5)\n", "exit status: 5"),
        ("inherit(); say('failed', why='no room')\n", "no room"),
        ("inherit(); link.send(b'{')\ntime.sleep(1000)\n", "no message of this protocol"),
        ("inherit(); say('succeeded')\ntime.sleep(1000)\n", "what it should not"),
        ("inherit(); say('serving'); os.kill(os.getpid(), 9)\n", "signal: 9"),
        ("inherit(); say('serving'); hear('go'); sys.exit(6)\n", "exit status: 6"),
        ("inherit(); say('serving'); hear('go'); say('failed', why='too late')\n", "too late"),
        // It says that it serves, hands its end to nobody, and stays.
        ("inherit(); say('serving'); os.close(0); link.close()\ntime.sleep(1000)\n", "left the conversation"),
    ];
    for (at, (script, expected)) in cases.into_iter().enumerate() {
        tidegate.replace_program(Some(&format!("{SPEAKS}{script}")));
        let why = refused(&tidegate);
        assert!(why.contains(expected), "{why}, not {expected}");
        is_in_force(&tidegate, "/a", &format!("/{at}"));
        assert_eq!(children_of(tidegate.pid()), Vec::<String>::new());
    }
    // A request in the middle of all that is told of, and the next program is as good as ever.
    let mut tidegate = tidegate;
    tidegate.replace_program(None);
    upgrade(&mut tidegate);
    is_in_force(&tidegate, "/a", "/after");
}

#[test]
fn configuration_that_cannot_be_used_leaves_the_old_one_in_force() {
    let origin = origin();
    let mut tidegate = builder(&origin).start();
    tidegate.get("/a");
    let good = std::fs::read_to_string(tidegate.config()).unwrap();
    let taken = Client::connect(tidegate.address());
    let elsewhere = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let in_use = elsewhere.local_addr().unwrap();
    for (bad, expected) in [
        (format!("{good}\nnonsense = 1\n"), "nonsense"),
        (format!("{good}\n[[listen]]\naddress = \"{in_use}\"\n"), "cannot listen"),
        (good.replace("/cache\"", "/output.txt\""), "cache.path"),
    ] {
        tidegate.write_config(&bad);
        let why = refused(&tidegate);
        assert!(why.contains(expected), "{why}, not {expected}");
        is_in_force(&tidegate, "/a", &format!("/{}", bad.len()));
    }
    drop(taken);
    tidegate.write_config(&good);
    upgrade(&mut tidegate);
    is_in_force(&tidegate, "/a", "/after");
}

#[test]
fn changed_configuration_that_needs_a_restart_comes_into_force() {
    let origin = origin();
    let mut tidegate = builder(&origin).start();
    tidegate.get("/a");
    let clients = {
        (0..40).for_each(|n| _ = tidegate.get(&format!("/stored/{n}")));
        Clients::start(tidegate.address(), 2, 1)
    };
    let good = std::fs::read_to_string(tidegate.config()).unwrap();
    let second = SocketAddr::from(([127, 0, 0, 1], tidegate_e2e::free_port()));
    for workers in [3, 1, 2] {
        clients.serve(100);
        let other = format!("[[listen]]\naddress = \"{second}\"\n");
        let text = good.replace("workers = 2", &format!("workers = {workers}"));
        tidegate.write_config(&if workers == 2 { text } else { format!("{text}\n{other}") });
        upgrade(&mut tidegate);
        assert_eq!(Client::try_connect(second).is_ok(), workers != 2);
    }
    clients.serve(100);
    clients.end();
    // Another place is another cache.
    tidegate.write_config(&good.replace("/cache\"", "/other\""));
    upgrade(&mut tidegate);
    assert!(!tidegate.get("/a").is_hit());
    is_in_force(&tidegate, "/a", "/b");
}

#[test]
fn signal_upgrades_and_blocks_go_on() {
    let origin = origin();
    for path in ["", "[block]\npath = \"@DIR@/block\"\n"] {
        let mut tidegate = builder(&origin).tables(path).start();
        tidegate.get("/a");
        assert!(tidegate.command(&["block", "add", "127.0.7.9", "--reason", "a test"]).status.success());
        tidegate.signal(Signal::USR2);
        let new = eventually("another process serves", || {
            let output = tidegate.output();
            let (_, rest) = output.split_once("serves as process ")?;
            rest.split_once("; this one drains")?.0.parse().ok()
        });
        assert_eq!(tidegate.follow(new).code(), Some(0));
        is_alone(&tidegate);
        is_in_force(&tidegate, "/a", &format!("/{}", path.len()));
        let list = tidegate.command(&["block", "list"]).stdout;
        assert!(String::from_utf8_lossy(&list).contains("a test"), "{list:?}");
        let mut blocked = Client::try_connect_from([127, 0, 7, 9].into(), tidegate.address()).unwrap();
        let _ = blocked.try_send("GET /a HTTP/1.1\r\nHost: example.org\r\n\r\n");
        assert!(blocked.try_response("GET").is_err());
        assert_eq!(tidegate.terminate().code(), Some(0));
    }
}

#[test]
fn draining_process_is_not_upgraded_and_takes_one_under_way_with_it() {
    let door = Gate::default();
    let held = door.clone();
    let origin = Origin::start(move |_| {
        held.pass();
        Reply::ok("late")
    });
    let mut tidegate = builder(&origin).start();
    let mut client = tidegate.connect();
    client.send("GET /slow HTTP/1.1\r\nHost: example.org\r\n\r\n");
    eventually("it is asked for", || (origin.count() == 1).then_some(()));
    // A program that never gets as far as to serve.
    tidegate
        .replace_program(Some(&format!("{SPEAKS}here()\nprint('waits', flush=True)\ntime.sleep(1000)\n")));
    tidegate.signal(Signal::USR2);
    eventually("the new process waits", || tidegate.output().contains("waits").then_some(()));
    let child = children_of(tidegate.pid()).pop().unwrap();
    assert!(refused(&tidegate).contains("under way already"));
    tidegate.signal(Signal::TERM);
    eventually("it drains", || tidegate.output().contains("draining").then_some(()));
    assert!(refused(&tidegate).contains("under way already"));
    door.open();
    assert_eq!(client.response().text(), "late");
    assert_eq!(tidegate.wait().code(), Some(0));
    eventually("the new process has ended too", || {
        let stat = std::fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
        (stat.is_empty() || stat.contains(") Z ")).then_some(())
    });
}

#[test]
fn transports_by_datagrams_go_on_over_upgrades() {
    let body = content(5, 400_000);
    let stored = body.clone();
    // A response that cannot be told from another one is no replica's to go on with.
    let origin = Origin::start(move |_| Reply::cacheable(stored.clone()).with("ETag", "\"1\""));
    let [trickles, dhttp] = [(); 2].map(|()| SocketAddr::from(([127, 0, 0, 1], tidegate_e2e::free_port())));
    let tables = format!(
        "[[listen]]\naddress = \"{trickles}\"\nprotocol = \"trickles\"\n\
         [[listen]]\naddress = \"{dhttp}\"\nprotocol = \"dhttp\"\n"
    );
    let mut tidegate = builder(&origin).tables(&tables).start();
    // Its answer comes when everything listens.
    assert_eq!(tidegate.ask_admin("/status").status, 200);
    let ended = Arc::new(AtomicBool::new(false));
    let fetching = [format!("trickles://{trickles}/a"), format!("dhttp://{dhttp}/a")].map(|url| {
        let (ended, body, count) = (Arc::clone(&ended), body.clone(), Arc::new(AtomicU64::new(0)));
        let counted = Arc::clone(&count);
        let thread = std::thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                let fetched = Command::new(Tidegate::binary()).args(["fetch", &url]).output().unwrap();
                assert!(fetched.stdout == body, "{url}: {}", String::from_utf8_lossy(&fetched.stderr));
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
        (thread, count)
    });
    for _ in 0..3 {
        let before = [0, 1].map(|at: usize| fetching[at].1.load(Ordering::Relaxed));
        eventually("both are fetched", || {
            assert!(!fetching.iter().any(|(thread, _)| thread.is_finished()), "a fetch has failed");
            fetching
                .iter()
                .zip(before)
                .all(|((_, count), before)| count.load(Ordering::Relaxed) > before)
                .then_some(())
        });
        upgrade(&mut tidegate);
    }
    ended.store(true, Ordering::Relaxed);
    fetching.into_iter().for_each(|(thread, _)| thread.join().unwrap());
}

#[test]
fn service_manager_is_told_of_the_new_main_process_before_that_speaks() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("notify");
    let manager = UnixDatagram::bind(&socket).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let told = || {
        let mut buffer = [0; 4096];
        let length = manager.recv(&mut buffer).unwrap();
        String::from_utf8(buffer[..length].to_vec()).unwrap()
    };
    let [address, admin] =
        [(); 2].map(|()| SocketAddr::from(([127, 0, 0, 1], tidegate_e2e::free_port())).to_string());
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).unwrap();
    let mut command = Command::new(Tidegate::binary());
    command.args(["run", "--listen", &address, "--admin", &admin, "--root"]).arg(folder.path());
    command.env("NOTIFY_SOCKET", &socket).stdin(Stdio::null()).stderr(Stdio::null());
    let mut old = Process(command.spawn().unwrap());
    assert!(told().starts_with("READY=1\n"));
    let answer =
        Command::new(Tidegate::binary()).args(["upgrade", "--json", "--admin", &admin]).output().unwrap();
    let answer: Value = serde_json::from_slice(&answer.stdout).unwrap();
    let pid = answer["pid"].as_i64().unwrap() as i32;
    assert_eq!(told(), format!("MAINPID={pid}\nSTATUS=serving"));
    assert_eq!(told(), "READY=1\nSTATUS=serving");
    assert!(old.0.wait().unwrap().success());
    let new = Pid::from_raw(pid).unwrap();
    kill_process(new, Signal::TERM).unwrap();
    // The old one has said nothing since.
    assert!(told().starts_with("STOPPING=1\n"));
    let ended = || waitpid(Some(new), WaitOptions::NOHANG).unwrap();
    let (_, status) = eventually("the new process ends", ended);
    assert_eq!(status.exit_status(), Some(0));
}

/// Numbers of the processes that this one has started and that it has not seen end.
fn children_of(pid: u32) -> Vec<String> {
    let processes =
        std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().into_string().ok());
    let is_child = |number: &String| {
        let stat = std::fs::read_to_string(format!("/proc/{number}/stat")).unwrap_or_default();
        // proc_pid_stat(5): the state and the parent follow the name, which may hold anything.
        let rest = stat.rsplit(") ").next().unwrap_or_default();
        rest.split(' ').nth(1).is_some_and(|parent| parent == pid.to_string())
    };
    processes.filter(is_child).collect()
}
