//! Messages that an ICAP service looks at: one of Debian's c-icap, and a hand-made server that means no good.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};

use tempfile::TempDir;
use tidegate_e2e::{
    Builder, Certificate, Client, Gate, Origin, Process, Reply, Site, Tidegate, content, eventually,
    free_port, http2,
};

/// Debian's ICAP server on a port of its own, with three services: `echo` changes nothing, `url_check` refuses URLs
/// with `/forbidden`, `srv_content_filtering` refuses and changes responses.
struct CIcap {
    port: u16,
    directory: TempDir,
    _process: Process,
}

impl CIcap {
    fn start() -> Self {
        let modules = format!("/usr/lib/{}-linux-gnu/c_icap", std::env::consts::ARCH);
        for service in ["srv_echo.so", "srv_url_check.so", "srv_content_filtering.so"] {
            let path = Path::new(&modules).join(service);
            assert!(
                path.is_file(),
                "{} is missing: apt-get install c-icap libc-icap-mod-urlcheck libc-icap-mod-contentfiltering",
                path.display()
            );
        }
        let directory = tempfile::tempdir().unwrap();
        let (dir, port) = (directory.path().display(), free_port());
        std::fs::write(directory.path().join("denied.txt"), "example.org/forbidden\n").unwrap();
        let config = format!(
            "PidFile {dir}/c-icap.pid\nCommandsSocket {dir}/c-icap.ctl\nPort 127.0.0.1:{port}\nStartServers 1\n\
             MaxServers 1\nThreadsPerChild 20\nMinSpareThreads 1\nMaxSpareThreads 20\nTmpDir {dir}\n\
             ServerName test\nServerAdmin test@example.org\nModulesDir {modules}\nServicesDir {modules}\n\
             LoadMagicFile /etc/c-icap/c-icap.magic\nServerLog {dir}/server.log\nAccessLog {dir}/access.log\n\
             TemplateDir /usr/share/c_icap/templates/\nTemplateDefaultLanguage en\nDebugLevel 1\n\
             Service echo srv_echo.so\nService url_check srv_url_check.so\n\
             url_check.LookupTableDB denied url hash:{dir}/denied.txt\nurl_check.Profile default block denied\n\
             url_check.Profile default pass ALL\nService filter srv_content_filtering.so\n\
             srv_content_filtering.Match bad body /malware/i score=10\n\
             srv_content_filtering.Match rude body /darn/i score=5 info{{nice}}=****\n\
             srv_content_filtering.Profile default block score{{bad>1}}\n\
             srv_content_filtering.Profile default replace score{{rude>1}} replaceInfo=nice\n"
        );
        let file = directory.path().join("c-icap.conf");
        std::fs::write(&file, config).unwrap();
        let log = std::fs::File::create(directory.path().join("output.txt")).unwrap();
        let child = Command::new("c-icap")
            .args(["-N", "-f"])
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .expect("c-icap is missing: apt-get install c-icap");
        let mut process = Process(child);
        eventually("c-icap answers", || {
            let ended = process.0.try_wait().unwrap();
            let output = || std::fs::read_to_string(directory.path().join("output.txt")).unwrap_or_default();
            assert!(ended.is_none(), "c-icap ended with {ended:?}: {}", output());
            let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
            stream.write_all(b"OPTIONS icap://127.0.0.1/echo ICAP/1.0\r\nHost: test\r\n\r\n").ok()?;
            let mut start = [0; 12];
            stream.read_exact(&mut start).ok().filter(|()| start == *b"ICAP/1.0 200")
        });
        Self { port, directory, _process: process }
    }

    fn table(&self, service: &str, lines: &str) -> String {
        table(self.port, service, lines)
    }

    /// Lines of its access log that have `word` in them.
    fn logged(&self, word: &str) -> usize {
        let log = std::fs::read_to_string(self.directory.path().join("access.log")).unwrap_or_default();
        log.lines().filter(|line| line.contains(word)).count()
    }
}

fn table(port: u16, service: &str, lines: &str) -> String {
    format!("[[icap]]\nservice = \"icap://127.0.0.1:{port}/{service}\"\n{lines}\n")
}

fn one_core(origin: &Origin) -> Builder {
    Tidegate::builder().origin(origin).top("workers = 1")
}

fn get(tidegate: &Tidegate, target: &str) -> tidegate_e2e::Response {
    let mut client = Client::connect(tidegate.address());
    client.send(format!("GET {target} HTTP/1.1\r\nHost: example.org\r\n\r\n"));
    client.response()
}

fn post(client: &mut Client, target: &str, body: &[u8]) -> tidegate_e2e::Response {
    let mut request =
        format!("POST {target} HTTP/1.1\r\nHost: example.org\r\nContent-Length: {}\r\n\r\n", body.len())
            .into_bytes();
    request.extend_from_slice(body);
    client.send(request);
    client.response_to("POST")
}

/// Answers with the body it was sent.
fn echoing_origin() -> Origin {
    Origin::start(|request| Reply::ok(request.body.clone()))
}

#[test]
fn bodies_of_every_size_pass_a_real_service_unchanged() {
    let service = CIcap::start();
    let origin = echoing_origin();
    let tidegate = one_core(&origin)
        .tables(&service.table("echo", "on = \"requests\""))
        .tables(&service.table("echo", "on = \"responses\""))
        .start();
    let mut client = Client::connect(tidegate.address());
    for size in [0, 1, 1023, 1024, 1025, 65_535, 65_537, 1 << 20] {
        let body = content(size as u64, size);
        let response = post(&mut client, "/x", &body);
        assert_eq!((response.status, response.body == body), (200, true), "{size} bytes");
    }
    assert_eq!(tidegate.metric("tidegate_icap_failures_total"), 0.0, "{}", tidegate.output());
    assert!(tidegate.metric("tidegate_icap_exchanges_total") >= 15.0);
    eventually("the service has logged requests and responses", || {
        (service.logged("REQMOD") >= 8 && service.logged("RESPMOD") >= 7).then_some(())
    });
}

#[test]
fn a_real_service_answers_in_the_place_of_the_origin() {
    let service = CIcap::start();
    let origin = Origin::start(|_| Reply::cacheable("here"));
    let tidegate = one_core(&origin).tables(&service.table("url_check", "on = \"requests\"")).start();
    assert_eq!(get(&tidegate, "/allowed").status, 200);
    let asked = origin.count();
    let refused = get(&tidegate, "/forbidden");
    assert_eq!(refused.status, 403, "{}", tidegate.output());
    assert_eq!(origin.count(), asked, "the origin was not asked");
    assert_eq!(get(&tidegate, "/allowed").status, 200);
    assert_eq!(tidegate.metric("tidegate_icap_modified_total"), 1.0);
}

#[test]
fn a_real_service_refuses_and_changes_responses_before_they_are_stored() {
    let service = CIcap::start();
    let origin = Origin::start(|request| match request.target.as_str() {
        "/bad" => Reply::cacheable("this is malware").with("Content-Type", "text/html"),
        "/rude" => Reply::cacheable("oh darn it").with("Content-Type", "text/html"),
        _ => Reply::cacheable("fine").with("Content-Type", "text/html"),
    });
    let tidegate = one_core(&origin).tables(&service.table("filter", "on = \"responses\"")).start();
    for _ in 0..2 {
        assert_eq!(get(&tidegate, "/fine").body, b"fine");
        let bad = get(&tidegate, "/bad");
        assert_ne!(bad.body, b"this is malware", "{}", tidegate.output());
        assert!(!bad.body.is_empty());
    }
    let rude = get(&tidegate, "/rude");
    assert_eq!((rude.status, rude.body.as_slice()), (200, &b"oh **** it"[..]), "{}", tidegate.output());
    let asked = origin.count();
    assert_eq!(get(&tidegate, "/rude").body, b"oh **** it");
    assert_eq!(origin.count(), asked, "what the service made of it is in the cache");
}

#[test]
fn what_a_service_has_changed_or_let_pass_is_compressed_after_it() {
    let service = CIcap::start();
    let page = |word: &str| format!("<p>oh {word} it\n{}", "<li>the same again\n".repeat(400));
    let origin = Origin::start(move |request| {
        let word = if request.target == "/rude" { "darn" } else { "fine" };
        Reply::cacheable(page(word)).with("Content-Type", "text/html")
    });
    let builder = one_core(&origin).tables(&service.table("filter", "on = \"responses\""));
    let tidegate = builder.tables("[compression]\ncodings = [\"gzip\"]\n").start();
    for (target, word) in [("/rude", "****"), ("/fine", "fine")] {
        for is_hit in [false, true] {
            let response = tidegate.get_with(target, "Accept-Encoding: gzip\r\n");
            assert_eq!(response.field("Content-Encoding"), "gzip", "{response:?}");
            assert_eq!(response.is_hit(), is_hit, "{response:?}");
            let mut content = String::new();
            flate2::read::GzDecoder::new(&response.body[..]).read_to_string(&mut content).unwrap();
            assert_eq!(content, page(word));
        }
    }
    assert_eq!(origin.count(), 2);
}

/// Answers OPTIONS as a service would, and everything else with what it is given; counts connections.
struct Hostile {
    port: u16,
    connections: Arc<AtomicUsize>,
}

impl Hostile {
    /// `answers` are given in turn, the last again and again; `preview` is what it wants to see first.
    fn start(preview: &'static str, answers: &[&[u8]]) -> Self {
        let answers: Vec<Vec<u8>> = answers.iter().map(|answer| answer.to_vec()).collect();
        let turn = AtomicUsize::new(0);
        Self::serve(preview, move |_, stream| {
            let index = turn.fetch_add(1, Ordering::Relaxed).min(answers.len() - 1);
            let _ = stream.write_all(&answers[index]);
            // To close with something unread would reset the connection, and take the answer back.
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let _ = std::io::copy(stream, &mut std::io::sink());
        })
    }

    fn serve(preview: &'static str, answer: impl Fn(&str, &mut TcpStream) + Send + Sync + 'static) -> Self {
        Self::serve_in_states(&Arc::default(), preview, answer)
    }

    /// As [`Self::serve`], by a service that is in this state.
    fn serve_in_states(
        state: &Arc<AtomicUsize>,
        preview: &'static str,
        answer: impl Fn(&str, &mut TcpStream) + Send + Sync + 'static,
    ) -> Self {
        let state = Arc::clone(state);
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let connections = Arc::new(AtomicUsize::new(0));
        let (count, answer) = (Arc::clone(&connections), Arc::new(answer));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (Ok(mut stream), answer, state) = (stream, Arc::clone(&answer), Arc::clone(&state))
                else {
                    return;
                };
                count.fetch_add(1, Ordering::Relaxed);
                std::thread::spawn(move || {
                    while let Some(head) = head_of(&mut stream) {
                        if head.starts_with("OPTIONS") {
                            let state = state.load(Ordering::SeqCst);
                            let options = format!(
                                "ICAP/1.0 200 OK\r\nMethods: REQMOD, RESPMOD\r\nAllow: 204\r\n{preview}\
                                 ISTag: \"{state}\"\r\nEncapsulated: null-body=0\r\n\r\n"
                            );
                            if stream.write_all(options.as_bytes()).is_err() {
                                return;
                            }
                        } else {
                            answer(&head, &mut stream);
                            return;
                        }
                    }
                });
            }
        });
        Self { port, connections }
    }
}

/// An ICAP request's own head; `None` at the end.
fn head_of(stream: &mut TcpStream) -> Option<String> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).ok()?;
        head.push(byte[0]);
    }
    String::from_utf8(head).ok()
}

/// Three such requests had the service left out for a while, for everybody.
#[test]
fn service_may_answer_head_as_it_answers_get() {
    let denial: &[u8] = b"ICAP/1.0 200 OK\r\nEncapsulated: res-hdr=0, res-body=45\r\n\r\n\
        HTTP/1.1 403 Forbidden\r\nContent-Length: 5\r\n\r\n5\r\nnever\r\n0\r\n\r\n";
    for on in ["requests", "responses"] {
        let origin = Origin::start(|_| Reply::ok("here"));
        let service = Hostile::start("", &[denial]);
        let lines = format!("on = \"{on}\"\nfailure = \"open\"");
        let tidegate = one_core(&origin).tables(&table(service.port, "x", &lines)).start();
        let mut client = Client::connect(tidegate.address());
        for _ in 0..5 {
            assert_eq!(client.request("HEAD", "/", "").status, 403, "{on}");
            let answer = client.request("GET", "/", "");
            assert_eq!((answer.status, answer.text().as_str()), (403, "never"), "{on}");
        }
        assert_eq!(tidegate.metric("tidegate_icap_failures_total"), 0.0, "{on}");
    }
}

/// The client's stream is over by then, and its client has not left.
#[test]
fn service_that_ends_its_answer_after_the_last_byte_has_delivered_it() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("here").with("Cache-Control", "no-store"));
    let gate = Gate::default();
    let door = gate.clone();
    let service = Hostile::serve("", move |_, stream| {
        let head = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nCache-Control: no-store\r\n\r\n";
        let own = format!("ICAP/1.0 200 OK\r\nEncapsulated: res-hdr=0, res-body={}\r\n\r\n", head.len());
        let _ = stream.write_all(&[own.as_bytes(), head, b"5\r\nhello\r\n"].concat());
        door.pass();
        let _ = stream.write_all(b"0\r\n\r\n");
    });
    let builder = one_core(&origin).tables(&table(service.port, "x", "on = \"responses\""));
    let site = Site::start(builder, &[("a", &certificate)]);
    http2::run(async {
        let mut client = http2::Client::connect(&site, &certificate).await;
        assert_eq!(client.get("/").await.1, b"hello");
    });
    gate.open();
    eventually("it is counted", || {
        (site.tidegate.metric("tidegate_responses_2xx_total") == 1.0).then_some(())
    });
    assert_eq!(site.tidegate.metric("tidegate_responses_broken_total"), 0.0);
}

/// A server's answers that are no decision.
const NONSENSE: &[&[u8]] = &[
    b"",
    b"\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n\r\n",
    b"ICAP/1.0 500 Error\r\n\r\n",
    b"ICAP/1.0 100 Continue\r\n\r\n",
    b"ICAP/1.0 200 OK\r\n\r\n",
    b"ICAP/1.0 200 OK\r\nEncapsulated: null-body=0\r\n\r\n",
    b"ICAP/1.0 200 OK\r\nEncapsulated: req-hdr=0, null-body=9999999\r\n\r\n",
    b"ICAP/1.0 200 OK\r\nEncapsulated: req-hdr=0, null-body=5\r\n\r\nGET /",
    b"ICAP/1.0 200 OK\r\nEncapsulated: res-hdr=0, null-body=5\r\n\r\nHTTP/",
    b"ICAP/1.0 200 OK\r\nEncapsulated: req-hdr=0, null-body=62\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\nGET /two HTTP/1.1\r\nHost: a\r\n\r\n    ",
    b"ICAP/1.0 200 OK\r\nEncapsulated: res-hdr=0, null-body=25\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n",
    b"ICAP/1.0 200 OK\r\nEncapsulated: res-hdr=0, null-body=1000\r\n\r\nHTTP/1.1 200 OK\r\n",
    b"\x00\xff\xfe\x01 not a protocol at all",
];

#[test]
fn after_nonsense_messages_go_on_or_not_as_the_operator_wants() {
    for (failure, status) in [("open", 200), ("closed", 503)] {
        for answer in NONSENSE {
            let origin = Origin::start(|_| Reply::ok("here"));
            let hostile = Hostile::start("", &[answer]);
            let lines = format!("on = \"requests\"\ntimeout = \"2s\"\nfailure = \"{failure}\"");
            let tidegate = one_core(&origin).tables(&table(hostile.port, "x", &lines)).start();
            let text = String::from_utf8_lossy(answer);
            assert_eq!(get(&tidegate, "/").status, status, "{failure} after {text:?}");
            assert_eq!(tidegate.metric("tidegate_icap_failures_total"), 1.0, "{text:?}");
            assert_eq!(tidegate.metric("tidegate_icap_waiting"), 0.0, "{text:?}");
            assert_eq!(origin.count(), usize::from(status == 200), "{failure} after {text:?}");
        }
    }
}

#[test]
fn a_body_that_was_looked_at_in_vain_goes_on_whole() {
    let origin = echoing_origin();
    let hostile = Hostile::start("Preview: 10\r\n", &[b"ICAP/1.0 500 Error\r\n\r\n"]);
    let lines = "on = \"requests\"\nfailure = \"open\"";
    let tidegate = one_core(&origin).tables(&table(hostile.port, "x", lines)).start();
    let body = content(7, 300_000);
    let response = post(&mut Client::connect(tidegate.address()), "/", &body);
    assert_eq!((response.status, response.body == body), (200, true));
    assert_eq!(tidegate.metric("tidegate_icap_bypassed_total"), 1.0);
}

#[test]
fn a_body_that_goes_unchanged_after_all_of_it_was_seen_goes_on_whole() {
    let origin = echoing_origin();
    let service = Hostile::serve("Preview: 10\r\n", |_, stream| {
        let _ = stream.write_all(b"ICAP/1.0 100 Continue\r\n\r\n");
        let mut seen = Vec::new();
        let mut buffer = [0; 4096];
        while seen.len() < 5_000 || !seen.ends_with(b"\r\n0\r\n\r\n") {
            match stream.read(&mut buffer) {
                Ok(length @ 1..) => seen.extend_from_slice(&buffer[..length]),
                _ => return,
            }
        }
        let _ = stream.write_all(b"ICAP/1.0 204 No Content\r\n\r\n");
    });
    let lines = "on = \"requests\"\nfailure = \"closed\"";
    let tidegate = one_core(&origin).tables(&table(service.port, "x", lines)).start();
    let body = content(7, 5_000);
    let response = post(&mut Client::connect(tidegate.address()), "/", &body);
    assert_eq!((response.status, response.body == body), (200, true));
    assert_eq!(tidegate.metric("tidegate_icap_exchanges_total"), 1.0, "the service was asked");
    assert_eq!(tidegate.metric("tidegate_icap_failures_total"), 0.0);
    assert_eq!(tidegate.metric("tidegate_icap_modified_total"), 0.0);
}

#[test]
fn what_is_longer_than_announced_is_no_second_response() {
    let origin = Origin::start(|_| Reply::ok("here"));
    let hostile = Hostile::start(
        "",
        &[b"ICAP/1.0 200 OK\r\nEncapsulated: res-hdr=0, res-body=38\r\n\r\n\
           HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n28\r\nhelloHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n\r\n0\r\n\r\n"],
    );
    let tidegate = one_core(&origin).tables(&table(hostile.port, "x", "on = \"responses\"")).start();
    let mut client = Client::connect(tidegate.address());
    client.send("GET / HTTP/1.1\r\nHost: example.org\r\nConnection: close\r\n\r\n");
    let all = client.rest();
    let text = String::from_utf8_lossy(&all);
    assert!(text.matches("HTTP/1.1").count() <= 1, "one response at most: {text}");
    assert!(!text.contains("here"), "the service's response takes the place of the origin's: {text}");
    assert_eq!(tidegate.metric("tidegate_icap_exchanges_total"), 1.0, "the service was asked");
    assert_eq!(origin.count(), 1);
}

#[test]
fn while_a_service_is_kept_busy_others_messages_go_past_it_only_if_the_operator_says_so() {
    for (busy, status) in [("", 503), ("busy = \"open\"", 200)] {
        let origin = Origin::start(|_| Reply::ok("here"));
        let (release, released) = mpsc::channel::<()>();
        let released = std::sync::Mutex::new(released);
        let service = Hostile::serve("", move |_, stream| {
            let _ = released.lock().unwrap().recv();
            let _ = stream.write_all(b"ICAP/1.0 204 No Content\r\n\r\n");
        });
        let lines = format!(
            "on = \"requests\"\nconnections = 1\npaths = [\"/up*\"]\ntimeout = \"3s\"\nfailure = \"open\"\n{busy}"
        );
        let tidegate = one_core(&origin).tables(&table(service.port, "x", &lines)).start();
        let mut first = Client::connect(tidegate.address());
        // What it asks for holds the only turn: its body never comes to an end.
        let head = "POST /up HTTP/1.1\r\nHost: example.org\r\nContent-Length: 1000000\r\n\r\n";
        first.send([head.as_bytes(), &content(1, 200_000)].concat());
        eventually("the first is parked", || (tidegate.metric("tidegate_icap_waiting") == 1.0).then_some(()));
        let second = Client::connect(tidegate.address()).request("GET", "/up", "");
        assert_eq!(second.status, status, "{busy}");
        assert_eq!(origin.count(), usize::from(status == 200));
        drop(release);
    }
}

#[test]
fn service_that_says_it_is_overloaded_is_no_way_past_it() {
    for (busy, status) in [("", 503), ("busy = \"open\"", 200)] {
        let origin = Origin::start(|_| Reply::ok("here"));
        let service = Hostile::start("", &[b"ICAP/1.0 503 Service Overloaded\r\n\r\n"]);
        let lines = format!("on = \"requests\"\nfailure = \"open\"\n{busy}");
        let tidegate = one_core(&origin).tables(&table(service.port, "x", &lines)).start();
        // It is no failure that would take the service out, and open the way after three of them.
        for _ in 0..5 {
            assert_eq!(get(&tidegate, "/").status, status, "{busy}");
        }
        assert_eq!(origin.count(), if status == 200 { 5 } else { 0 });
    }
}

#[test]
fn while_one_request_waits_others_are_answered() {
    let origin = Origin::start(|_| Reply::ok("here"));
    let (release, released) = mpsc::channel::<()>();
    let released = std::sync::Mutex::new(released);
    let service = Hostile::serve("", move |_, stream| {
        let _ = released.lock().unwrap().recv();
        let _ = stream.write_all(b"ICAP/1.0 204 No Content\r\n\r\n");
    });
    let lines = "on = \"requests\"\npaths = [\"/slow*\"]\nexcept = [\"/slow/but/fine\"]\ntimeout = \"60s\"";
    let tidegate = one_core(&origin).tables(&table(service.port, "x", lines)).start();
    let mut parked = Client::connect(tidegate.address());
    parked.send("GET /slow HTTP/1.1\r\nHost: example.org\r\n\r\n");
    eventually("the request is parked", || (tidegate.metric("tidegate_icap_waiting") == 1.0).then_some(()));
    for _ in 0..20 {
        assert_eq!(get(&tidegate, "/fast").status, 200);
        assert_eq!(get(&tidegate, "/slow/but/fine").status, 200);
    }
    assert_eq!(tidegate.metric("tidegate_icap_waiting"), 1.0);
    release.send(()).unwrap();
    assert_eq!(parked.response().status, 200);
    eventually("nobody waits", || (tidegate.metric("tidegate_icap_waiting") == 0.0).then_some(()));
}

#[test]
fn a_service_that_is_silent_is_given_up_and_left_out_for_a_while() {
    let origin = Origin::start(|_| Reply::ok("here"));
    let (_hold, held) = mpsc::channel::<()>();
    let held = std::sync::Mutex::new(held);
    let service = Hostile::serve("", move |_, _| {
        let _ = held.lock().unwrap().recv();
    });
    let lines = "on = \"requests\"\ntimeout = \"100ms\"";
    let tidegate = one_core(&origin).tables(&table(service.port, "x", lines)).start();
    for _ in 0..3 {
        assert_eq!(get(&tidegate, "/").status, 503);
    }
    // Each time for its options, and for the message.
    let asked = || service.connections.load(Ordering::Relaxed);
    eventually("the service has seen all connections", || (asked() == 6).then_some(()));
    assert_eq!(get(&tidegate, "/").status, 503);
    assert_eq!(asked(), 6, "it is not asked again");
    assert_eq!(origin.count(), 0);
}

#[test]
fn connections_to_a_real_service_are_used_again_and_are_as_many_as_allowed() {
    let service = CIcap::start();
    let origin = Origin::start(|_| Reply::ok("here"));
    let lines = "on = \"requests\"\nconnections = 2";
    let tidegate = one_core(&origin).tables(&service.table("echo", lines)).start();
    let clients: Vec<_> = (0..16)
        .map(|_| {
            let address: SocketAddr = tidegate.address();
            std::thread::spawn(move || {
                let mut client = Client::connect(address);
                (0..20).all(|_| post(&mut client, "/", b"hello").status == 200)
            })
        })
        .collect();
    assert!(clients.into_iter().all(|client| client.join().unwrap()), "{}", tidegate.output());
    assert_eq!(tidegate.metric("tidegate_icap_exchanges_total"), 320.0);
    assert_eq!(tidegate.metric("tidegate_icap_failures_total"), 0.0, "{}", tidegate.output());
}

#[test]
fn what_a_service_let_pass_in_another_state_is_shown_to_it_again() {
    let origin = Origin::start(|request| Reply::cacheable(request.target.clone()).with("ETag", "\"same\""));
    let (state, shown) = (Arc::new(AtomicUsize::new(1)), Arc::new(AtomicUsize::new(0)));
    let service = Hostile::serve_in_states(&state, "Preview: 1024\r\n", {
        let (state, shown) = (Arc::clone(&state), Arc::clone(&shown));
        move |_, stream| {
            let mut seen = Vec::new();
            let mut byte = [0];
            while !seen.ends_with(b"\r\n0; ieof\r\n\r\n") && matches!(stream.read(&mut byte), Ok(1)) {
                seen.push(byte[0]);
            }
            shown.fetch_add(1, Ordering::SeqCst);
            let state = state.load(Ordering::SeqCst);
            let _ =
                stream.write_all(format!("ICAP/1.0 204 No Content\r\nISTag: \"{state}\"\r\n\r\n").as_bytes());
        }
    });
    let mut tidegate = one_core(&origin)
        .tables(&table(service.port, "x", "on = \"responses\"\nfailure = \"closed\""))
        .cache("path = \"@DIR@/cache\"")
        .start();
    let counts = || (origin.count(), shown.load(Ordering::SeqCst));
    for _ in 0..2 {
        assert_eq!(get(&tidegate, "/a").body, b"/a");
        assert_eq!(counts(), (1, 1), "{}", tidegate.output());
    }
    // By its answer about another one it is known that it has changed.
    state.store(2, Ordering::SeqCst);
    assert_eq!(get(&tidegate, "/b").body, b"/b");
    for _ in 0..2 {
        assert_eq!(get(&tidegate, "/a").body, b"/a");
        assert_eq!(counts(), (3, 3));
    }
    assert!(origin.requests().iter().all(|request| request.fields.get("If-None-Match").is_none()));
    assert_eq!(get(&tidegate, "/b").body, b"/b");
    assert_eq!(counts(), (3, 3), "what it let pass since then is good");

    // It changes while nobody asks it: what it says of itself at the start tells.
    assert!(tidegate.terminate().success());
    state.store(3, Ordering::SeqCst);
    tidegate.start();
    eventually("it is shown again", || {
        assert_eq!(get(&tidegate, "/a").body, b"/a");
        (counts() == (4, 4)).then_some(())
    });
}

#[test]
fn who_is_refused_by_a_service_again_and_again_is_blocked() {
    let origin = Origin::start(|_| Reply::ok("here"));
    let refusal = "HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n";
    let answer =
        format!("ICAP/1.0 200 OK\r\nEncapsulated: res-hdr=0, null-body={}\r\n\r\n{refusal}", refusal.len());
    let service = Hostile::start("", &[answer.as_bytes()]);
    let lines = "on = \"requests\"\npaths = [\"/upload\"]";
    let tidegate = one_core(&origin)
        .tables(&table(service.port, "x", lines))
        .tables("[defence]\naudit = \"@DIR@/audit.log\"")
        .start();
    let from = |address: &str| Client::try_connect_from(address.parse().unwrap(), tidegate.address());
    let refused = (0..100)
        .take_while(|_| {
            let Ok(mut client) = from("127.0.9.9") else { return false };
            let sent = client.try_send("GET /upload HTTP/1.1\r\nHost: example.org\r\n\r\n");
            sent.is_ok() && client.try_response("GET").is_ok_and(|response| response.status == 403)
        })
        .count();
    assert_eq!(refused, 26, "each weighs as much as a failed login");
    assert_eq!(tidegate.metric("tidegate_defence_errors_total"), 1.0);
    assert_eq!(tidegate.metric("tidegate_defence_content_total"), 26.0);
    let line = eventually("the service's refusal is written down", || {
        let audit = std::fs::read_to_string(tidegate.directory().join("audit.log")).ok()?;
        audit.lines().find(|line| line.contains("\"reason\":\"content\"")).map(str::to_owned)
    });
    assert!(line.contains("\"address\":\"127.0.9.9\""), "{line}");
    let mut other = from("127.0.9.8").unwrap();
    assert_eq!(other.get("/").status, 200);
    assert_eq!(origin.count(), 1);
}
