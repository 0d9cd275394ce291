//! Requests that are sent together, and servers that answer them otherwise than hoped.

use std::net::TcpStream;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};

use tokio::task::{JoinHandle, LocalSet};

use super::*;

/// What a server does with one connection.
pub(super) type Script = fn(&mut Connection);

pub(super) struct Connection {
    pub(super) stream: TcpStream,
    /// Heads that have come with others and were not asked for yet.
    heads: Vec<Vec<u8>>,
}

impl Connection {
    /// The next head; empty at the end of the connection.
    fn head(&mut self) -> Vec<u8> {
        let mut head = Vec::new();
        let mut byte = [0; 1];
        while !head.ends_with(b"\r\n\r\n") && self.stream.read(&mut byte).is_ok_and(|length| length == 1) {
            head.push(byte[0]);
        }
        self.heads.push(head.clone());
        head
    }

    /// All that is here once the first head has come.
    pub(super) fn heads_in_one_read(&mut self) -> usize {
        let mut buffer = [0; 64 * 1024];
        let length = self.stream.read(&mut buffer).unwrap();
        buffer[..length].windows(4).filter(|window| *window == b"\r\n\r\n").count()
    }

    pub(super) fn write(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// Answers each request with its path until the client ends.
    fn echo(&mut self) {
        loop {
            let head = self.head();
            let Some(path) = head.split(|byte| *byte == b' ').nth(1) else { return };
            let path = String::from_utf8(path.to_vec()).unwrap();
            self.write(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{path}", path.len()).as_bytes());
        }
    }

    /// Answers the request that makes the connection one that is kept.
    fn warm(&mut self) {
        self.head();
        self.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    }
}

/// A server with a thread and a script for each connection, the last one for all that follow; says what heads each got.
pub(super) fn scripted(scripts: &'static [Script]) -> (SocketAddr, Receiver<Vec<Vec<u8>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let (first, last) = (scripts.iter(), scripts.last().unwrap());
        for (script, stream) in first.chain(std::iter::repeat(last)).zip(listener.incoming()) {
            let sender = sender.clone();
            std::thread::spawn(move || {
                let mut connection = Connection { stream: stream.unwrap(), heads: Vec::new() };
                script(&mut connection);
                // The test may have ended.
                let _ = sender.send(connection.heads);
            });
        }
    });
    (address, receiver)
}

/// What a client gets: the status and the body, or the status of an error.
pub(super) type Got = Result<(u16, String), u16>;

async fn ask(pools: Rc<Pools>, head: String, method: Method) -> Got {
    let request = OutgoingRequest { method, ..get(head.as_bytes()) };
    let mut response = pools.send(0, request, EmptyBody).await.map_err(|error| error.status())?;
    let status = response.head().status;
    let body = body_of(&mut response).await.map_err(|error| error.status())?;
    Ok((status, String::from_utf8(body).unwrap()))
}

pub(super) fn begin(pools: &Rc<Pools>, path: &str) -> JoinHandle<Got> {
    let head = format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n");
    tokio::task::spawn_local(ask(Rc::clone(pools), head, Method::Get))
}

/// Asks for `/warm`, and then for all of these in one turn.
pub(super) async fn together(pools: &Rc<Pools>, paths: &[&str]) -> Vec<Got> {
    assert_eq!(begin(pools, "/warm").await.unwrap().unwrap().0, 200);
    let begun: Vec<_> = paths.iter().map(|path| begin(pools, path)).collect();
    let mut got = Vec::new();
    for one in begun {
        got.push(one.await.unwrap());
    }
    got
}

/// Eight go together, and wait for each other for as long as it takes.
fn pipelined(address: SocketAddr) -> Rc<Pools> {
    let patient = Duration::from_secs(60);
    Rc::new(pools(vec![address], |settings| {
        (settings.pipeline, settings.pipeline_timeout, settings.response_timeout) = (8, patient, patient);
    }))
}

/// The same, but they do not wait.
pub(super) fn impatient(address: SocketAddr) -> Rc<Pools> {
    Rc::new(pools(vec![address], |settings| {
        (settings.pipeline, settings.pipeline_timeout) = (8, Duration::from_millis(20));
        settings.response_timeout = Duration::from_secs(60);
    }))
}

pub(super) fn ok(body: &str) -> Got {
    Ok((200, body.to_owned()))
}

/// Whatever came before, the next requests get their own responses.
async fn serves_on(pools: &Rc<Pools>) {
    for path in ["/c", "/d"] {
        assert_eq!(begin(pools, path).await.unwrap(), ok(path));
    }
}

pub(super) fn repeated(pools: &Pools) -> u64 {
    pools.groups().status()[0].repeated
}

/// Requests that shared a write, and writes that did not bring all the answers.
fn pipelined_and_faults(pools: &Pools) -> (u64, u64) {
    let server = &pools.groups().status()[0];
    (server.pipelined, server.pipeline_faults)
}

pub(super) fn failures(pools: &Pools) -> u64 {
    pools.groups().status()[0].failures
}

#[tokio::test(flavor = "current_thread")]
async fn requests_of_one_turn_are_one_write_and_each_gets_its_own_response() {
    let (address, heads) = scripted(&[|connection| {
        connection.warm();
        assert_eq!(connection.heads_in_one_read(), 4);
        // With every kind of framing, in pieces that are none of theirs.
        let answers =
            b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na\
            HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nb\r\n2\r\ncd\r\n0\r\nX: y\r\n\r\n\
            HTTP/1.1 204 No Content\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
        for piece in answers.chunks(7) {
            connection.write(piece);
        }
        connection.warm();
    }]);
    let pools = pipelined(address);
    LocalSet::new()
        .run_until(async {
            let got = together(&pools, &["/a", "/b", "/c", "/d"]).await;
            assert_eq!(got, [ok("a"), ok("bcd"), Ok((204, String::new())), ok("")]);
            assert_eq!(pipelined_and_faults(&pools), (4, 0), "all but the first");
            // The connection is kept.
            assert_eq!(begin(&pools, "/e").await.unwrap(), ok(""));
        })
        .await;
    assert_eq!(pipelined_and_faults(&pools), (4, 0), "what has a connection to itself is not counted");
    assert_eq!((repeated(&pools), failures(&pools)), (0, 0));
    assert_eq!(heads.recv().unwrap().len(), 2);
}

#[tokio::test(flavor = "current_thread")]
async fn a_response_to_head_has_no_body_between_the_others() {
    let (address, _heads) = scripted(&[|connection| {
        connection.warm();
        assert_eq!(connection.heads_in_one_read(), 2);
        connection.write(
            b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nb",
        );
    }]);
    let pools = pipelined(address);
    LocalSet::new()
        .run_until(async {
            begin(&pools, "/warm").await.unwrap().unwrap();
            let head = "HEAD / HTTP/1.1\r\nHost: a\r\n\r\n".to_owned();
            let first = tokio::task::spawn_local(ask(Rc::clone(&pools), head, Method::Head));
            let second = begin(&pools, "/b");
            assert_eq!((first.await.unwrap(), second.await.unwrap()), (ok(""), ok("b")));
        })
        .await;
}

#[tokio::test(flavor = "current_thread")]
async fn more_requests_than_go_together_are_several_batches() {
    let (address, heads) = scripted(&[Connection::echo]);
    let pools = pools(vec![address], |settings| {
        (settings.pipeline, settings.pipeline_timeout) = (2, Duration::from_secs(60));
    });
    let pools = Rc::new(pools);
    LocalSet::new()
        .run_until(async {
            let paths: Vec<String> = (0..9).map(|n| format!("/{n}")).collect();
            let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
            for _ in 0..3 {
                let got = together(&pools, &paths).await;
                assert_eq!(got, paths.iter().map(|path| ok(path)).collect::<Vec<_>>());
            }
        })
        .await;
    assert_eq!(repeated(&pools), 0);
    drop(pools);
    let most = std::iter::from_fn(|| heads.recv_timeout(Duration::from_secs(5)).ok()).take(5).count();
    assert!(most >= 5, "a batch has a connection of its own: {most}");
}

#[tokio::test(flavor = "current_thread")]
async fn a_server_that_answers_the_first_only_is_asked_again_for_the_others() {
    let (address, _heads) = scripted(&[
        |connection| {
            connection.warm();
            assert_eq!(connection.heads_in_one_read(), 3);
            connection.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nfirst");
        },
        Connection::echo,
    ]);
    let pools = pipelined(address);
    LocalSet::new()
        .run_until(async {
            let got = together(&pools, &["/a", "/b", "/c"]).await;
            assert_eq!(got, [ok("first"), ok("/b"), ok("/c")]);
        })
        .await;
    assert_eq!(pipelined_and_faults(&pools), (3, 1));
    assert_eq!((repeated(&pools), failures(&pools)), (2, 0));
}

#[tokio::test(flavor = "current_thread")]
async fn a_connection_that_ends_in_a_response_is_replaced_for_all() {
    let (address, _heads) = scripted(&[
        |connection| {
            connection.warm();
            assert_eq!(connection.heads_in_one_read(), 2);
            connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nfi");
        },
        Connection::echo,
    ]);
    let pools = pipelined(address);
    LocalSet::new()
        .run_until(async { assert_eq!(together(&pools, &["/a", "/b"]).await, [ok("/a"), ok("/b")]) })
        .await;
    assert_eq!((repeated(&pools), failures(&pools)), (2, 0));
}

#[tokio::test(flavor = "current_thread")]
async fn a_long_body_takes_the_connection_and_the_others_go_elsewhere() {
    let (address, heads) = scripted(&[
        |connection| {
            connection.warm();
            assert_eq!(connection.heads_in_one_read(), 2);
            connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 70000\r\n\r\n");
            connection.write(&[b'x'; 70_000]);
            connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nnever");
            assert_eq!(connection.head(), b"", "a connection with an answer too many is not used again");
        },
        Connection::echo,
    ]);
    let pools = pipelined(address);
    LocalSet::new()
        .run_until(async {
            let got = together(&pools, &["/a", "/b"]).await;
            assert_eq!(got, [ok(&"x".repeat(70_000)), ok("/b")]);
            assert_eq!(begin(&pools, "/c").await.unwrap(), ok("/c"));
        })
        .await;
    assert_eq!((repeated(&pools), failures(&pools)), (1, 0));
    drop(pools);
    assert!(heads.iter().take(2).all(|heads| heads.len() >= 2));
}

#[tokio::test(flavor = "current_thread")]
async fn a_long_chunked_body_is_not_waited_for() {
    let (address, _heads) = scripted(&[
        |connection| {
            connection.warm();
            assert_eq!(connection.heads_in_one_read(), 2);
            connection.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n11170\r\n");
            connection.write(&[b'x'; 70_000]);
            connection.write(b"\r\n0\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nnever");
        },
        Connection::echo,
    ]);
    let pools = pipelined(address);
    LocalSet::new()
        .run_until(async {
            let got = together(&pools, &["/a", "/b"]).await;
            assert_eq!(got, [ok(&"x".repeat(70_000)), ok("/b")]);
        })
        .await;
}

#[tokio::test(flavor = "current_thread")]
async fn an_extension_in_each_of_many_chunks_does_not_end_a_connection_that_is_shared() {
    let (address, _heads) = scripted(&[|connection| {
        connection.warm();
        assert_eq!(connection.heads_in_one_read(), 2);
        connection.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
        connection.write(&b"1;signature=0123456789abcdef\r\nx\r\n".repeat(500));
        connection.write(b"0\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nb");
    }]);
    let pools = pipelined(address);
    LocalSet::new()
        .run_until(async {
            let got = together(&pools, &["/a", "/b"]).await;
            assert_eq!(got, [ok(&"x".repeat(500)), ok("b")]);
        })
        .await;
    assert_eq!(pipelined_and_faults(&pools), (2, 0));
}

#[tokio::test(flavor = "current_thread")]
async fn nobody_waits_for_a_slow_response_to_another_request() {
    let (address, _heads) = scripted(&[
        |connection| {
            connection.warm();
            assert_eq!(connection.heads_in_one_read(), 3);
            // Until a client comes that could only come because nobody waits for this answer.
            connection.stream.set_read_timeout(Some(Duration::from_millis(400))).unwrap();
            connection.head();
            connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nslow");
        },
        Connection::echo,
    ]);
    let pools = impatient(address);
    LocalSet::new()
        .run_until(async {
            begin(&pools, "/warm").await.unwrap().unwrap();
            let (mut slow, b, c) = (begin(&pools, "/a"), begin(&pools, "/b"), begin(&pools, "/c"));
            let others = async { (b.await.unwrap(), c.await.unwrap()) };
            tokio::select! {
                others = others => assert_eq!(others, (ok("/b"), ok("/c"))),
                _ = &mut slow => panic!("the others have waited"),
            }
            assert_eq!(slow.await.unwrap(), ok("slow"));
        })
        .await;
    assert_eq!((repeated(&pools), failures(&pools)), (2, 0));
}

#[tokio::test(flavor = "current_thread")]
async fn a_malformed_response_is_one_requests_error() {
    let (address, _heads) = scripted(&[
        |connection| {
            connection.warm();
            assert_eq!(connection.heads_in_one_read(), 3);
            connection
                .write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\naHTTP/1.1 200 OK\r\nBad x\r\n\r\n");
        },
        Connection::echo,
    ]);
    let pools = pipelined(address);
    LocalSet::new()
        .run_until(async {
            assert_eq!(together(&pools, &["/a", "/b", "/c"]).await, [ok("a"), Err(502), ok("/c")]);
        })
        .await;
    assert_eq!((repeated(&pools), failures(&pools)), (1, 1));
}

#[tokio::test(flavor = "current_thread")]
async fn a_change_of_protocol_ends_the_connection() {
    let (address, _heads) = scripted(&[
        |connection| {
            connection.warm();
            assert_eq!(connection.heads_in_one_read(), 2);
            connection
                .write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n");
        },
        Connection::echo,
    ]);
    let pools = pipelined(address);
    LocalSet::new()
        .run_until(async { assert_eq!(together(&pools, &["/a", "/b"]).await, [Err(502), ok("/b")]) })
        .await;
}

#[tokio::test(flavor = "current_thread")]
async fn one_response_too_many_and_the_server_is_not_trusted_with_connections() {
    let (address, heads) = scripted(&[
        |connection| {
            connection.warm();
            assert_eq!(connection.heads_in_one_read(), 2);
            connection.write(&b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na".repeat(3));
            assert_eq!(connection.head(), b"");
        },
        Connection::echo,
    ]);
    let pools = pipelined(address);
    LocalSet::new()
        .run_until(async {
            assert_eq!(together(&pools, &["/a", "/b"]).await, [ok("a"), ok("a")]);
            serves_on(&pools).await;
        })
        .await;
    drop(pools);
    // One for each request: what the server ended with, and the head.
    assert!(heads.iter().take(3).all(|heads| heads.len() == 2));
}

#[tokio::test(flavor = "current_thread")]
async fn an_interim_response_does_not_wait_for_the_final_one() {
    static ALONE: AtomicBool = AtomicBool::new(false);
    static BEFORE_OTHERS: AtomicBool = AtomicBool::new(false);
    fn hint(connection: &mut Connection, is_heard: &AtomicBool) -> bool {
        connection.write(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n");
        (0..2000).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            is_heard.load(Ordering::SeqCst)
        })
    }
    let (address, _heads) = scripted(&[
        |connection| {
            connection.warm();
            connection.head();
            let is_heard = hint(connection, &ALONE);
            let status = if is_heard { "200 OK" } else { "500 Late" };
            connection.write(format!("HTTP/1.1 {status}\r\nContent-Length: 5\r\n\r\nalone").as_bytes());
            assert_eq!(connection.heads_in_one_read(), 2);
            if hint(connection, &BEFORE_OTHERS) {
                connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nbefore");
            }
            connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nnever");
        },
        Connection::echo,
    ]);
    let pools = impatient(address);
    let ask = |is_heard: &'static AtomicBool, pools: &Rc<Pools>| {
        let pools = Rc::clone(pools);
        tokio::task::spawn_local(async move {
            let hear = |status| is_heard.store(status == 103, Ordering::SeqCst);
            let mut response = pools.send(0, get(GET), Noting(hear)).await.unwrap();
            let (status, body) = (response.head().status, body_of(&mut response).await.unwrap());
            (status, String::from_utf8(body).unwrap())
        })
    };
    LocalSet::new()
        .run_until(async {
            begin(&pools, "/warm").await.unwrap().unwrap();
            assert_eq!(ask(&ALONE, &pools).await.unwrap(), (200, "alone".to_owned()));
            let (before, behind) = (ask(&BEFORE_OTHERS, &pools), begin(&pools, "/behind"));
            assert_eq!(behind.await.unwrap(), ok("/behind"));
            assert_eq!(before.await.unwrap(), (200, "before".to_owned()));
            // The connection has another's answer on it.
            assert_eq!(begin(&pools, "/next").await.unwrap(), ok("/next"));
        })
        .await;
    assert_eq!((repeated(&pools), failures(&pools)), (1, 0));
}

#[tokio::test(flavor = "current_thread")]
async fn interim_responses_begin_the_time_anew_where_requests_may_share_a_connection() {
    let (address, _heads) = scripted(&[|connection| {
        connection.warm();
        connection.head();
        for _ in 0..6 {
            std::thread::sleep(Duration::from_millis(700));
            connection.write(b"HTTP/1.1 102 Processing\r\n\r\n");
        }
        connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nslow");
    }]);
    let pools = Rc::new(pools(vec![address], |settings| {
        (settings.pipeline, settings.response_timeout) = (8, Duration::from_secs(3));
    }));
    let got = LocalSet::new().run_until(together(&pools, &["/slow"])).await;
    assert_eq!(got, [ok("slow")]);
}

#[tokio::test(flavor = "current_thread")]
async fn a_body_that_trickles_reaches_its_client_and_holds_up_nobody() {
    let (address, _heads) = scripted(&[
        |connection| {
            connection.warm();
            assert_eq!(connection.heads_in_one_read(), 2);
            connection.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
            for _ in 0..100 {
                // A client that took the rest for its own has closed by now, which other tests are about.
                connection.write(b"1\r\na\r\n");
                std::thread::sleep(Duration::from_millis(5));
            }
            connection.write(b"0\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nnever");
        },
        Connection::echo,
    ]);
    let pools = impatient(address);
    LocalSet::new()
        .run_until(async {
            begin(&pools, "/warm").await.unwrap().unwrap();
            let (mut slow, b) = (begin(&pools, "/a"), begin(&pools, "/b"));
            tokio::select! {
                b = b => assert_eq!(b.unwrap(), ok("/b")),
                _ = &mut slow => panic!("the other one has waited"),
            }
            assert_eq!(slow.await.unwrap(), ok(&"a".repeat(100)));
            assert_eq!(begin(&pools, "/c").await.unwrap(), ok("/c"));
        })
        .await;
    assert_eq!((repeated(&pools), failures(&pools)), (1, 0));
}

#[tokio::test(flavor = "current_thread")]
async fn a_body_that_takes_longer_than_a_response_may_be_silent_is_no_failure() {
    let (address, _heads) = scripted(&[|connection| {
        connection.warm();
        assert_eq!(connection.heads_in_one_read(), 1);
        connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 40\r\n\r\n");
        for _ in 0..40 {
            connection.write(b"a");
            std::thread::sleep(Duration::from_millis(50));
        }
    }]);
    let pools = pools(vec![address], |settings| {
        (settings.pipeline, settings.response_timeout) = (8, Duration::from_secs(1));
    });
    let pools = Rc::new(pools);
    LocalSet::new()
        .run_until(async { assert_eq!(together(&pools, &["/a"]).await, [ok(&"a".repeat(40))]) })
        .await;
    assert_eq!((repeated(&pools), failures(&pools)), (0, 0));
}

#[tokio::test(flavor = "current_thread")]
async fn answers_to_requests_that_went_elsewhere_are_nobodys() {
    let (address, _heads) = scripted(&[
        |connection| {
            connection.warm();
            assert_eq!(connection.heads_in_one_read(), 2);
            connection.stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
            connection.head();
            connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nslow");
            // The next request, or the end of the connection.
            connection.stream.set_read_timeout(None).unwrap();
            connection.head();
            // Nobody is to be there to take it.
            let _ = connection.stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nothers");
        },
        Connection::echo,
    ]);
    let pools = impatient(address);
    LocalSet::new()
        .run_until(async {
            assert_eq!(together(&pools, &["/a", "/b"]).await, [ok("slow"), ok("/b")]);
            serves_on(&pools).await;
        })
        .await;
}

#[tokio::test(flavor = "current_thread")]
async fn the_next_requests_do_not_wait_for_a_slow_one() {
    static HAS_COME: AtomicBool = AtomicBool::new(false);
    let (address, _heads) = scripted(&[
        |connection| {
            connection.warm();
            assert_eq!(connection.heads_in_one_read(), 1);
            HAS_COME.store(true, Ordering::SeqCst);
            connection.stream.set_read_timeout(Some(Duration::from_millis(400))).unwrap();
            connection.head();
            connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nslow");
        },
        Connection::echo,
    ]);
    let pools = impatient(address);
    LocalSet::new()
        .run_until(async {
            begin(&pools, "/warm").await.unwrap().unwrap();
            let mut slow = begin(&pools, "/a");
            while !HAS_COME.load(Ordering::SeqCst) {
                tokio::task::yield_now().await;
            }
            tokio::select! {
                next = begin(&pools, "/b") => assert_eq!(next.unwrap(), ok("/b")),
                _ = &mut slow => panic!("the next one has waited"),
            }
            assert_eq!(slow.await.unwrap(), ok("slow"));
        })
        .await;
}

#[tokio::test(flavor = "current_thread")]
async fn a_client_that_leaves_takes_nothing_from_the_others() {
    static HAVE_COME: AtomicBool = AtomicBool::new(false);
    static HAS_LEFT: AtomicBool = AtomicBool::new(false);
    let (address, _heads) = scripted(&[|connection| {
        connection.warm();
        assert_eq!(connection.heads_in_one_read(), 2);
        HAVE_COME.store(true, Ordering::SeqCst);
        while !HAS_LEFT.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        connection.write(
            b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ngoneHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nstays",
        );
        connection.echo();
    }]);
    let pools = pipelined(address);
    LocalSet::new()
        .run_until(async {
            begin(&pools, "/warm").await.unwrap().unwrap();
            let (gone, stays) = (begin(&pools, "/gone"), begin(&pools, "/stays"));
            while !HAVE_COME.load(Ordering::SeqCst) {
                tokio::task::yield_now().await;
            }
            gone.abort();
            assert!(gone.await.unwrap_err().is_cancelled());
            HAS_LEFT.store(true, Ordering::SeqCst);
            assert_eq!(stays.await.unwrap(), ok("stays"));
            assert_eq!(begin(&pools, "/next").await.unwrap(), ok("/next"));
        })
        .await;
    assert_eq!(repeated(&pools), 0);
}

#[tokio::test(flavor = "current_thread")]
async fn what_changes_something_goes_alone() {
    let (address, _heads) = scripted(&[|connection| {
        let head = connection.head();
        connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
        if head.starts_with(b"GET") {
            assert_eq!(connection.heads_in_one_read(), 1);
        }
        connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nalone");
    }]);
    let pools = pipelined(address);
    LocalSet::new()
        .run_until(async {
            begin(&pools, "/warm").await.unwrap().unwrap();
            let delete = |path: &str| {
                let head = format!("DELETE {path} HTTP/1.1\r\nHost: a\r\n\r\n");
                tokio::task::spawn_local(ask(Rc::clone(&pools), head, Method::Delete))
            };
            let (first, second) = (delete("/a"), delete("/b"));
            assert_eq!(first.await.unwrap(), ok("alone"));
            assert_eq!(second.await.unwrap(), ok(""));
        })
        .await;
}
