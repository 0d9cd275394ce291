//! HTTP/2 to clients: streams are requests like those of HTTP/1, and what costs the server much is ended.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::future::poll_fn;
use std::io::{self, Write};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use h2::{Reason, SendStream};
use http::{HeaderMap, Request, Response};
use tidegate_e2e::http2::{Client, WIDE, encrypted, field, get, run, url, whole};
use tidegate_e2e::{Builder, Certificate, Gate, Origin, Reply, Site, Tidegate, content, eventually};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpSocket, TcpStream};

/// Larger than the buffers of both sockets, and of HTTP/2, together.
const LARGE: usize = 24 << 20;
/// A socket that counts the records of TLS which it reads.
struct Counted {
    socket: TcpStream,
    records: Arc<AtomicUsize>,
    /// What has come of a record's header (RFC 8446 §5.1).
    header: Vec<u8>,
    /// Bytes of a record that are to come.
    left: usize,
}

impl Counted {
    fn new(socket: TcpStream) -> Self {
        Self { socket, records: Arc::default(), header: Vec::new(), left: 0 }
    }

    fn count(&mut self, bytes: &[u8]) {
        for byte in bytes {
            if self.left > 0 {
                self.left -= 1;
                continue;
            }
            self.header.push(*byte);
            if let [_, _, _, high, low] = self.header[..] {
                self.left = u16::from_be_bytes([high, low]).into();
                self.header.clear();
                self.records.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

impl AsyncRead for Counted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.socket).poll_read(context, buffer);
        self.count(&buffer.filled()[before..]);
        read
    }
}

impl AsyncWrite for Counted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(context)
    }
}

fn is_hit<T>(response: &Response<T>) -> bool {
    field(response, "cache-status").contains("; hit")
}

fn site(certificate: &Certificate, origin: &Origin) -> Site {
    Site::start(Tidegate::builder().origin(origin), &[("a", certificate)])
}

#[test]
fn miss_and_hit_and_head_and_many_at_once() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::cacheable(content(1, LARGE)));
    let builder = Tidegate::builder().origin(&origin).cache("memory = \"256MiB\"\nmax_object = \"32MiB\"");
    let site = Site::start(builder, &[("a", &certificate)]);
    run(async {
        let mut client = Client::connect(&site, &certificate).await;
        for expected in [false, true] {
            let (response, body, _) = client.get("/a").await;
            assert_eq!((response.status().as_u16(), is_hit(&response)), (200, expected), "{response:?}");
            assert!(body == content(1, LARGE));
        }
        let head = client.send(Request::head(url("/a"))).await.await.unwrap();
        assert_eq!(field(&head, "content-length"), LARGE.to_string());
        assert!(whole(head).await.unwrap().1.is_empty());
        let range = client.send(get("/a").header("range", "bytes=70000-9999999")).await.await.unwrap();
        let (range, body, _) = whole(range).await.unwrap();
        assert!(range.status() == 206 && body == content(1, LARGE)[70_000..10_000_000]);
        let mut several = Vec::new();
        for _ in 0..4 {
            several.push(client.send(get("/a")).await);
        }
        for response in several {
            assert!(whole(response.await.unwrap()).await.unwrap().1 == content(1, LARGE));
        }
    });
    assert_eq!(origin.count(), 1);
}

/// Each frame was a record and a system call of its own.
#[test]
fn responses_to_requests_that_come_together_share_records() {
    const REQUESTS: usize = 50;
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::cacheable(content(1, 300)));
    let site = site(&certificate, &origin);
    run(async {
        let socket = Counted::new(TcpStream::connect(site.address).await.unwrap());
        let records = Arc::clone(&socket.records);
        let (requests, connection) =
            h2::client::handshake(encrypted(socket, &certificate).await).await.unwrap();
        let mut client = Client { requests, connection: tokio::spawn(connection) };
        client.get("/a").await;
        assert!(is_hit(&client.get("/a").await.0));
        let before = records.load(Ordering::Relaxed);
        let mut responses = Vec::new();
        for _ in 0..REQUESTS {
            responses.push(client.send(get("/a")).await);
        }
        for response in responses {
            assert_eq!(whole(response.await.unwrap()).await.unwrap().1, content(1, 300));
        }
        let records = records.load(Ordering::Relaxed) - before;
        // A head and content for each, 300 bytes and more: two of the largest records would hold them all.
        assert!((1..REQUESTS / 2).contains(&records), "{records}");
    });
}

#[test]
fn origin_learns_what_the_client_said_and_how_it_came() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = site(&certificate, &origin);
    run(async {
        let mut client = Client::connect(&site, &certificate).await;
        let request = get("/a?b").header("cookie", "c=1").header("cookie", "d=2").header("te", "trailers");
        assert_eq!(client.send(request).await.await.unwrap().status(), 200);
    });
    let request = origin.last();
    assert_eq!((request.target.as_str(), request.field("Host").as_str()), ("/a?b", "a.example"));
    assert_eq!(request.fields.all("Cookie"), ["c=1; d=2"]);
    assert_eq!(request.field("X-Forwarded-Proto"), "https");
    // RFC 9110 §7.6.3: the version that was received.
    assert_eq!(request.field("Via"), "2 tidegate");
    assert_eq!(request.field("TE"), "");
}

#[test]
fn access_log_names_the_protocol() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::cacheable("x"));
    let builder = Tidegate::builder().origin(&origin).tables("[log]\naccess = \"@DIR@/access.log\"");
    let site = Site::start(builder, &[("a", &certificate)]);
    run(async {
        let mut client = Client::connect(&site, &certificate).await;
        client.get("/a").await;
        client.get("/a").await;
    });
    let lines = eventually("both are logged", || {
        let text = std::fs::read_to_string(site.tidegate.directory().join("access.log")).unwrap_or_default();
        (text.lines().count() == 2).then_some(text)
    });
    assert_eq!(lines.matches("\"GET /a HTTP/2.0\" 200 1 ").count(), 2, "{lines}");
}

#[test]
fn upload_arrives_whole_and_trailers_come_back() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|request| {
        match request.method.as_str() {
        "PUT" => Reply::ok(request.body.len().to_string()),
        _ => Reply::Raw(
            b"HTTP/1.1 200 OK\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nX-Sum: 7\r\n\r\n".to_vec(),
        ),
    }
    });
    let site = site(&certificate, &origin);
    run(async {
        let mut client = Client::connect(&site, &certificate).await;
        let response = client.upload("/a", content(1, LARGE)).await.unwrap();
        assert_eq!(whole(response).await.unwrap().1, LARGE.to_string().as_bytes());
        let (_, body, trailers) = client.get("/b").await;
        assert_eq!(
            (body.as_slice(), trailers.unwrap().get("x-sum").unwrap().as_bytes()),
            (&b"x"[..], &b"7"[..])
        );
    });
    assert!(origin.requests()[0].body == content(1, LARGE));
}

#[test]
fn trailers_of_a_request_reach_the_origin() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = site(&certificate, &origin);
    run(async {
        let client = Client::connect(&site, &certificate).await;
        let mut requests = client.requests.clone().ready().await.unwrap();
        let request = Request::put(url("/a")).body(()).unwrap();
        let (response, mut stream) = requests.send_request(request, false).unwrap();
        stream.send_data("abc".into(), false).unwrap();
        let mut trailers = HeaderMap::new();
        for (name, value) in [("x-sum", "42"), ("content-length", "7"), ("x-sum", "43")] {
            trailers.append(name, value.parse().unwrap());
        }
        stream.send_trailers(trailers).unwrap();
        assert_eq!(response.await.unwrap().status(), 200);
    });
    let request = origin.last();
    assert_eq!(request.body, b"abc");
    assert_eq!(request.trailers.all("X-Sum"), ["42", "43"]);
    assert_eq!(request.trailers.get("Content-Length"), None, "framing is not for trailers (RFC 9110 §6.5.1)");
}

/// What nobody reads of refused uploads must not use up the connection's window.
#[test]
fn uploads_that_are_refused_leave_room_for_others() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|request| Reply::ok(request.body.len().to_string()));
    let builder = Tidegate::builder().origin(&origin).limits("body_size = \"1MiB\"");
    let site = Site::start(builder, &[("a", &certificate)]);
    run(async {
        let mut client = Client::connect(&site, &certificate).await;
        for _ in 0..20 {
            let response = client.upload("/a", content(1, 3 << 20)).await.unwrap();
            assert_eq!(response.status(), 413);
        }
        let response = client.upload("/a", content(1, 1 << 20)).await.unwrap();
        assert_eq!(whole(response).await.unwrap().1, (1 << 20).to_string().as_bytes());
    });
}

/// Refuses what is below `/a`.
fn refusing(origin: &Origin) -> Builder {
    Tidegate::builder().origin(origin).tables("[[request]]\npath = \"/a\"\naction = \"refuse\"")
}

/// Sends the head of an upload that is refused, and waits for the answer; what its content would be sent by.
async fn begin_refused_upload(client: &Client) -> SendStream<Bytes> {
    let mut requests = client.requests.clone().ready().await.unwrap();
    let request = Request::put(url("/a")).body(()).unwrap();
    let (response, stream) = requests.send_request(request, false).unwrap();
    assert_eq!(response.await.unwrap().status(), 503);
    stream
}

/// The client's stream stayed open, and was ended as that of a slow one.
#[test]
fn upload_that_is_answered_early_is_over() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = Site::start(refusing(&origin), &[("a", &certificate)]);
    run(async {
        let mut client = Client::connect(&site, &certificate).await;
        let mut stream = begin_refused_upload(&client).await;
        let reason = std::future::poll_fn(|context| stream.poll_reset(context)).await.unwrap();
        assert_eq!(reason, Reason::NO_ERROR);
        assert_eq!(site.tidegate.metric("tidegate_slow_bodies_total"), 0.0);
        assert_eq!(client.get("/b").await.1, b"x");
    });
}

/// There are clients to which a stream that is reset after its response has failed.
#[test]
fn upload_that_nobody_wants_is_not_interrupted_when_little_of_it_is_left() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = Site::start(refusing(&origin), &[("a", &certificate)]);
    run(async {
        let mut client = Client::connect(&site, &certificate).await;
        let mut stream = begin_refused_upload(&client).await;
        stream.send_data(content(1, 10_000).into(), true).unwrap();
        assert_eq!(client.get("/b").await.1, b"x");
        let reset = poll_fn(|context| Poll::Ready(stream.poll_reset(context))).await;
        assert!(!matches!(reset, Poll::Ready(Ok(_))), "{reset:?}");
    });
}

#[test]
fn stream_is_reset_when_the_origin_breaks_off() {
    let certificate = Certificate::of(&["a.example"]);
    let gates = [Gate::default(), Gate::default()];
    let doors = gates.clone();
    let origin = Origin::start(move |request| {
        let (start, door): (&[u8], _) = match request.target.as_str() {
            "/length" => (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nstart", &doors[0]),
            "/chunks" => (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nstart\r\n", &doors[1]),
            _ => return Reply::ok("x"),
        };
        let door = door.clone();
        Reply::script(move |stream| {
            stream.write_all(start)?;
            door.pass();
            stream.shutdown(std::net::Shutdown::Both)
        })
    });
    let site = site(&certificate, &origin);
    run(async {
        let mut client = Client::connect(&site, &certificate).await;
        for (target, gate) in ["/length", "/chunks"].into_iter().zip(&gates) {
            let response = client.send(get(target)).await.await.unwrap();
            let (head, mut stream) = response.into_parts();
            let start = stream.data().await.unwrap().unwrap();
            assert_eq!((head.status.as_u16(), &start[..]), (200, &b"start"[..]), "{target}");
            gate.open();
            let error = stream.data().await.unwrap().expect_err(target);
            assert_eq!((error.is_reset(), error.reason()), (true, Some(Reason::INTERNAL_ERROR)), "{target}");
        }
        assert_eq!(client.get("/whole").await.1, b"x", "the others go on");
    });
    assert_eq!(site.tidegate.metric("tidegate_responses_broken_total"), 2.0);
    assert_eq!(site.tidegate.metric("tidegate_upstream_errors_total"), 2.0);
}

/// The time of an idle connection began when the last response was queued, not when the client had it.
#[test]
fn response_that_is_read_for_longer_than_idle_connections_are_kept_arrives_whole() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::cacheable(content(1, 60_000)));
    let builder = Tidegate::builder().origin(&origin).limits("keep_alive_timeout = \"1s\"");
    let site = Site::start(builder, &[("a", &certificate)]);
    let mut other = site.connect(&certificate);
    assert_eq!(other.get("/a").body.len(), 60_000);
    run(async {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(4096).unwrap();
        let tls = encrypted(socket.connect(site.address).await.unwrap(), &certificate).await;
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(WIDE).initial_connection_window_size(WIDE);
        let (requests, mut connection) = builder.handshake::<_, Bytes>(tls).await.unwrap();
        let mut responses = Vec::new();
        for _ in 0..90 {
            let mut requests = requests.clone();
            responses.push(requests.send_request(get("/a").body(()).unwrap(), true).unwrap().0);
        }
        // Sends them, and then takes nothing until another connection was idle for too long.
        for _ in 0..100 {
            let poll = std::future::poll_fn(|context| {
                std::task::Poll::Ready(std::pin::Pin::new(&mut connection).poll(context))
            });
            assert!(poll.await.is_pending());
            tokio::task::yield_now().await;
        }
        eventually("requests have come", || {
            (site.tidegate.metric("tidegate_requests_total") >= 91.0).then_some(())
        });
        assert!(other.is_closed());
        let mut later = site.connect(&certificate);
        later.get("/a");
        assert!(later.is_closed());
        drop(requests);
        let connection = tokio::spawn(connection);
        for response in responses {
            let (_, body, _) = whole(response.await.unwrap()).await.unwrap();
            assert!(body == content(1, 60_000));
        }
        let _ = connection.await;
    });
}

/// It had read-ahead and a descriptor for each of them.
#[test]
fn client_that_takes_nothing_of_a_large_file_holds_next_to_nothing() {
    let certificate = Certificate::of(&["a.example"]);
    let directory = tempfile::tempdir().unwrap();
    let file = content(3, 2 << 20);
    std::fs::write(directory.path().join("large.bin"), &file).unwrap();
    let route = format!("root = \"{}\"", directory.path().display());
    let builder = Tidegate::builder().top("workers = 1").cache("max_object = \"64KiB\"").route("/", &route);
    let site = Site::start(builder, &[("a", &certificate)]);
    run(async {
        let mut client = Client::with_window(&site, &certificate, 0).await;
        client.send(get("/large.bin")).await.await.unwrap();
        let before = site.tidegate.anonymous_bytes();
        let mut held = Vec::new();
        for _ in 0..60 {
            held.push(client.send(get("/large.bin")).await.await.unwrap());
        }
        let is_large = |path: &std::path::PathBuf| path.ends_with("large.bin");
        assert_eq!(site.tidegate.open_files().into_iter().filter(is_large).count(), 1);
        let more = site.tidegate.anonymous_bytes().saturating_sub(before);
        assert!(more < 60 * 64 * 1024, "{more} bytes for 60 responses of which nothing is taken");
        drop(held);
        let mut wide = Client::connect(&site, &certificate).await;
        assert!(wide.get("/large.bin").await.1 == file);
    });
}

#[test]
fn connections_that_are_idle_or_silent_end() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let builder =
        Tidegate::builder().origin(&origin).limits("keep_alive_timeout = \"1s\"\nheader_timeout = \"1s\"");
    let site = Site::start(builder, &[("a", &certificate)]);
    run(async {
        let mut client = Client::connect(&site, &certificate).await;
        client.get("/a").await;
        client.connection.await.unwrap().unwrap();
        assert_eq!(site.tidegate.metric("tidegate_idle_timeouts_total"), 1.0);
        let silent = Client::connect(&site, &certificate).await;
        let _held = silent.requests;
        silent.connection.await.unwrap().unwrap();
        assert_eq!(site.tidegate.metric("tidegate_header_timeouts_total"), 1.0);
    });
}

#[test]
fn drain_lets_streams_end() {
    let certificate = Certificate::of(&["a.example"]);
    let gate = Gate::default();
    let door = gate.clone();
    let origin = Origin::start(move |_| {
        let door = door.clone();
        Reply::script(move |stream| {
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nhalf")?;
            door.pass();
            stream.write_all(b"half")
        })
    });
    let mut site = site(&certificate, &origin);
    run(async {
        let mut client = Client::connect(&site, &certificate).await;
        let response = client.send(get("/a")).await.await.unwrap();
        site.tidegate.signal(rustix::process::Signal::TERM);
        eventually("it listens no more", || std::net::TcpStream::connect(site.address).err());
        // It is told to go elsewhere while what it has asked for goes on.
        while client.requests.clone().ready().await.is_ok() {
            tokio::task::yield_now().await;
        }
        gate.open();
        assert_eq!(whole(response).await.unwrap().1, b"halfhalf");
        client.connection.await.unwrap().unwrap();
    });
    assert!(site.tidegate.wait().success());
}

#[test]
fn early_hints_come_before_the_response() {
    let certificate = Certificate::of(&["a.example"]);
    let gate = Gate::default();
    let door = gate.clone();
    let origin = Origin::start(move |_| {
        let door = door.clone();
        Reply::script(move |stream| {
            stream
                .write_all(b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>\r\nConnection: x\r\nX: y\r\n\r\n")?;
            door.pass();
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx")
        })
    });
    let site = site(&certificate, &origin);
    run(async {
        let mut client = Client::connect(&site, &certificate).await;
        let mut response = client.send(get("/a")).await;
        let hints = poll_fn(|context| response.poll_informational(context)).await.unwrap().unwrap();
        assert_eq!((hints.status().as_u16(), field(&hints, "link").as_str()), (103, "</a.css>"));
        assert_eq!(hints.headers().len(), 1, "{hints:?}");
        gate.open();
        let (response, content, _) = whole(response.await.unwrap()).await.unwrap();
        assert_eq!((response.status().as_u16(), content.as_slice()), (200, &b"x"[..]));
    });
}
