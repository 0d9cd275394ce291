//! HTTP/2 to clients: streams are requests like those of HTTP/1, and what costs the server much is ended.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::future::{Future, poll_fn};
use std::io::{self, Write};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use h2::{Reason, RecvStream};
use http::{HeaderMap, Request, Response};
use tidegate_e2e::{Certificate, Gate, Origin, PATIENCE, Reply, Site, Tidegate, content, eventually};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Larger than the buffers of both sockets, and of HTTP/2, together.
const LARGE: usize = 24 << 20;
/// More than any test sends.
const WIDE: u32 = 1 << 30;

/// Runs a test's future, for as long as anything may take.
fn run<F: Future>(test: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(PATIENCE, test).await.expect("the test's end") })
}

/// Waits, and lets the connections go on meanwhile.
async fn until(condition: impl Fn() -> bool) {
    while !condition() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A connection over TLS on which HTTP/2 is to be spoken.
async fn encrypted<S: AsyncRead + AsyncWrite + Unpin>(socket: S, certificate: &Certificate) -> TlsStream<S> {
    let connector = TlsConnector::from(Certificate::client_config(&[certificate], b"h2"));
    connector.connect("a.example".try_into().unwrap(), socket).await.unwrap()
}

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

/// One connection.
struct Client {
    requests: SendRequest<Bytes>,
    /// Ends with it.
    connection: JoinHandle<Result<(), h2::Error>>,
}

impl Client {
    async fn connect(site: &Site, certificate: &Certificate) -> Self {
        Self::with_window(site, certificate, WIDE).await
    }

    /// With streams of which the server may send so much before the client has taken any.
    async fn with_window(site: &Site, certificate: &Certificate, window_bytes: u32) -> Self {
        Self::connect_from([127, 0, 0, 1], site, certificate, window_bytes).await
    }

    async fn connect_from(
        address: [u8; 4],
        site: &Site,
        certificate: &Certificate,
        window_bytes: u32,
    ) -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((address, 0).into()).unwrap();
        let tls = encrypted(socket.connect(site.address).await.unwrap(), certificate).await;
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(window_bytes).initial_connection_window_size(WIDE);
        let (requests, connection) = builder.handshake(tls).await.unwrap();
        Self { requests, connection: tokio::spawn(connection) }
    }

    /// Sends a request without content.
    async fn send(&mut self, request: http::request::Builder) -> ResponseFuture {
        let mut requests = self.requests.clone().ready().await.unwrap();
        requests.send_request(request.body(()).unwrap(), true).unwrap().0
    }

    async fn get(&mut self, target: &str) -> (Response<()>, Vec<u8>, Option<HeaderMap>) {
        let response = self.send(get(target)).await.await.unwrap();
        whole(response).await.unwrap()
    }

    /// Sends a request with content; the response may come before all of it is taken.
    async fn upload(&mut self, target: &str, content: Vec<u8>) -> Result<Response<RecvStream>, h2::Error> {
        let mut requests = self.requests.clone().ready().await.unwrap();
        let request = Request::put(url(target)).body(()).unwrap();
        let (response, mut stream) = requests.send_request(request, false).unwrap();
        let mut content = Bytes::from(content);
        while !content.is_empty() {
            stream.reserve_capacity(content.len());
            let Some(Ok(room)) = std::future::poll_fn(|context| stream.poll_capacity(context)).await else {
                break;
            };
            let piece = content.split_to(room.min(content.len()));
            if stream.send_data(piece, content.is_empty()).is_err() {
                break;
            }
        }
        response.await
    }
}

fn url(target: &str) -> String {
    format!("https://a.example{target}")
}

fn get(target: &str) -> http::request::Builder {
    Request::get(url(target))
}

/// All of a response, with its trailers.
async fn whole(
    response: Response<RecvStream>,
) -> Result<(Response<()>, Vec<u8>, Option<HeaderMap>), h2::Error> {
    let (head, mut stream) = response.into_parts();
    let mut body = Vec::new();
    while let Some(piece) = stream.data().await {
        let piece = piece?;
        body.extend_from_slice(&piece);
        stream.flow_control().release_capacity(piece.len())?;
    }
    Ok((Response::from_parts(head, ()), body, stream.trailers().await?))
}

fn field<T>(response: &Response<T>, name: &str) -> String {
    response.headers().get(name).map_or(String::new(), |value| value.to_str().unwrap().to_owned())
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

/// The client's stream stayed open, and was ended as that of a slow one.
#[test]
fn upload_that_is_answered_early_is_over() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = Site::start(
        Tidegate::builder().origin(&origin).tables("[[request]]\npath = \"/a\"\naction = \"refuse\""),
        &[("a", &certificate)],
    );
    run(async {
        let mut client = Client::connect(&site, &certificate).await;
        let mut requests = client.requests.clone().ready().await.unwrap();
        let (response, mut stream) =
            requests.send_request(Request::put(url("/a")).body(()).unwrap(), false).unwrap();
        assert_eq!(response.await.unwrap().status(), 503);
        let reason = std::future::poll_fn(|context| stream.poll_reset(context)).await.unwrap();
        assert_eq!(reason, Reason::NO_ERROR);
        assert_eq!(site.tidegate.metric("tidegate_slow_bodies_total"), 0.0);
        assert_eq!(client.get("/b").await.1, b"x");
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
}

#[test]
fn client_that_cancels_all_it_asks_for_is_told_to_calm_down() {
    let certificate = Certificate::of(&["a.example"]);
    let gate = Gate::default();
    let door = gate.clone();
    let origin = Origin::start(move |_| {
        door.pass();
        Reply::ok("x")
    });
    let site = site(&certificate, &origin);
    let reason = run(async {
        let client = Client::connect(&site, &certificate).await;
        while let Ok(mut requests) = client.requests.clone().ready().await {
            let Ok((response, mut stream)) = requests.send_request(get("/a").body(()).unwrap(), true) else {
                break;
            };
            stream.send_reset(Reason::CANCEL);
            drop(response);
            tokio::task::yield_now().await;
        }
        client.connection.await.unwrap().expect_err("it is ended").reason()
    });
    gate.open();
    assert_eq!(reason, Some(Reason::ENHANCE_YOUR_CALM));
    assert_eq!(site.tidegate.metric("tidegate_http2_floods_total"), 1.0);
}

/// The upstream works for them all the same.
#[test]
fn requests_that_are_given_up_are_logged_and_counted_against_their_client() {
    let certificate = Certificate::of(&["a.example"]);
    let gate = Gate::default();
    let door = gate.clone();
    let origin = Origin::start(move |request| match request.target.as_str() {
        "/free" => Reply::ok("x"),
        _ => {
            door.pass();
            Reply::ok("x")
        }
    });
    let tables = "[log]\naccess = \"@DIR@/access.log\"\n[[classifier]]\nname = \"errors\"\nlimit = 10\naction = \"refuse\"\n";
    let site = Site::start(Tidegate::builder().origin(&origin).tables(tables), &[("a", &certificate)]);
    let given_up = run(async {
        // The host's own address is exempt.
        let mut client = Client::connect_from([127, 0, 9, 9], &site, &certificate, WIDE).await;
        let mut given_up = 0;
        while client.get("/free").await.0.status() == 200 {
            let (asked, mut requests) = (origin.count(), client.requests.clone().ready().await.unwrap());
            let (response, mut stream) = requests.send_request(get("/slow").body(()).unwrap(), true).unwrap();
            until(|| origin.count() > asked).await;
            stream.send_reset(Reason::CANCEL);
            drop(response);
            given_up += 1;
            until(|| site.tidegate.metric("tidegate_clients_gone_total") == f64::from(given_up)).await;
        }
        assert_eq!(client.get("/free").await.0.status(), 429);
        given_up
    });
    gate.open();
    // Each counts as four errors; two windows may share them.
    assert!((2..=6).contains(&given_up), "{given_up}");
    eventually("all are logged", || {
        let text = std::fs::read_to_string(site.tidegate.directory().join("access.log")).unwrap_or_default();
        (text.matches("\"GET /slow HTTP/2.0\" 499 0 ").count() == given_up as usize).then_some(())
    });
}

/// Whoever finds a head to be malformed: HTTP/2's own rules, the parser, or what the target is made of.
#[test]
fn requests_that_cannot_be_read_are_logged_and_counted_against_their_client() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let tables = "[log]\naccess = \"@DIR@/access.log\"\n[[classifier]]\nname = \"errors\"\nlimit = 10\naction = \"refuse\"\n";
    let site = Site::start(Tidegate::builder().origin(&origin).tables(tables), &[("a", &certificate)]);
    let wrong = [
        || get("/a").header("host", "b.example"),
        || (0..101).fold(get("/a"), |request, number| request.header(format!("x-{number}"), "1")),
        || get("/%00"),
    ];
    let mut refused = 0;
    for (number, wrong) in wrong.into_iter().enumerate() {
        refused += run(async {
            let address = [127, 0, 9, 1 + number as u8];
            let mut client = Client::connect_from(address, &site, &certificate, WIDE).await;
            let mut refused = 0;
            while client.get("/free").await.0.status() == 200 {
                match client.send(wrong()).await.await {
                    Ok(response) => assert!([400, 431].contains(&response.status().as_u16()), "{response:?}"),
                    Err(error) => assert_eq!(error.reason(), Some(Reason::PROTOCOL_ERROR)),
                }
                refused += 1;
            }
            assert!((10..=22).contains(&refused), "{number}: {refused}");
            refused
        });
    }
    eventually("all are logged", || {
        let text = std::fs::read_to_string(site.tidegate.directory().join("access.log")).unwrap_or_default();
        let of = |status| text.matches(&format!("\"- - HTTP/2.0\" {status} ")).count();
        (of(400) + of(431) == refused && of(431) > 0).then_some(())
    });
}

#[test]
fn client_that_does_not_take_its_response_is_ended() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok(content(1, 1 << 20)));
    // Ten seconds are let pass in any case.
    let builder = Tidegate::builder().origin(&origin).limits("response_min_rate = \"1GiB/s\"");
    let site = Site::start(builder, &[("a", &certificate)]);
    run(async {
        let mut client = Client::with_window(&site, &certificate, 100).await;
        let response = client.send(get("/a")).await.await.unwrap();
        let _held = response;
        assert!(client.connection.await.unwrap().is_err());
    });
    assert_eq!(site.tidegate.metric("tidegate_slow_readers_total"), 1.0);
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

/// The list was asked about clients of HTTP/1 alone.
#[test]
fn listed_client_of_a_trusted_proxy_is_refused() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let builder = Tidegate::builder().origin(&origin).top("trusted_proxies = [\"127.0.0.1\"]");
    let site = Site::start(builder, &[("a", &certificate)]);
    assert!(site.tidegate.command(&["block", "add", "192.0.2.0/24"]).status.success());
    run(async {
        let mut client = Client::connect(&site, &certificate).await;
        // What the list says acts a moment later (a quarter of a second).
        loop {
            let listed = client.send(get("/a").header("x-forwarded-for", "192.0.2.1")).await;
            if listed.await.unwrap().status() == 403 {
                break;
            }
        }
        let other = client.send(get("/a").header("x-forwarded-for", "198.51.100.1")).await;
        assert_eq!(other.await.unwrap().status(), 200);
    });
}

#[test]
fn idle_connection_is_told_that_it_ends() {
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
        gate.open();
        assert_eq!(whole(response).await.unwrap().1, b"halfhalf");
        client.connection.await.unwrap().unwrap();
    });
    assert!(site.tidegate.wait().success());
}

/// Any client could write what it liked, as often as it liked, into the program's log.
#[test]
fn what_clients_send_does_not_fill_the_log() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = site(&certificate, &origin);
    run(async {
        let mut tls = encrypted(TcpStream::connect(site.address).await.unwrap(), &certificate).await;
        let mut sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
        // An answer to a PING that nobody sent (RFC 9113 §6.7), again and again; then frames that end it.
        sent.extend(b"\0\0\x08\x06\x01\0\0\0\0whatever".repeat(100));
        sent.extend(b"\0\0\x01\x06\0\0\0\0\0w");
        tokio::io::AsyncWriteExt::write_all(&mut tls, &sent).await.unwrap();
        let mut answer = Vec::new();
        let _ = tokio::io::AsyncReadExt::read_to_end(&mut tls, &mut answer).await;
        // GOAWAY (§6.8): all of it was looked at.
        let goodbye = b"\0\0\x08\x07\0\0\0\0\0";
        assert!(answer.windows(goodbye.len()).any(|window| window == goodbye), "{answer:?}");
    });
    assert!(!site.tidegate.output().contains("PING"), "{}", site.tidegate.output());
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
