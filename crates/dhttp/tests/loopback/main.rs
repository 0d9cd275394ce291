//! Server and client over the loopback interface: who asks, by which way the answer comes, what it is.
#![allow(clippy::unwrap_used, reason = "a test may end with a panic")]

mod hostile;
mod secured;
mod site;
mod unheard;

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use site::{Site, client_socket, get, pattern};
use tidegate_dhttp::client::{CachePolicy, ClientConfig};
use tidegate_dhttp::driver::{
    Body, ClientOptions, DhttpClient, FetchBody, FetchError, FetchRequest, ServerOptions, Via, method_of,
};
use tidegate_dhttp::wire::{Answer, Numbered, Once, Pieces, Request, RequestId, Response};
use tidegate_http::Method;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, UdpSocket};

fn client() -> DhttpClient {
    DhttpClient::new(ClientOptions::default()).unwrap()
}

fn request(site: &Site, head: &str, body: FetchBody) -> FetchRequest {
    let mut request = get(site, "/");
    request.head = Bytes::copy_from_slice(head.as_bytes());
    request.method = method_of(&request.head);
    request.body = body;
    request
}

#[tokio::test]
async fn a_short_response_comes_in_one_datagram() {
    let site = Site::start();
    let client = client();
    let response = client.get(&site.url("/bytes/100")).await.unwrap();
    assert_eq!((response.status, response.via, response.from), (200, Via::Datagram, site.address));
    assert_eq!(response.body.collect(1000).await.unwrap(), pattern(100));
    assert_eq!(site.handle.metrics().dhttp_connections_opened_total.get(), 0);
}

#[tokio::test]
async fn a_long_response_comes_on_a_connection_that_the_server_opens_and_uses_again() {
    let site = Site::start();
    let client = client();
    for _ in 0..3 {
        let response = client.get(&site.url("/bytes/3000000")).await.unwrap();
        assert_eq!((response.status, response.via), (200, Via::ServerConnection));
        assert_eq!(response.from.ip(), site.address.ip());
        assert!(response.body.collect(5_000_000).await.unwrap() == pattern(3_000_000));
    }
    let metrics = site.handle.metrics();
    assert_eq!(metrics.dhttp_responses_connection_total.get(), 3);
    assert_eq!(metrics.dhttp_connections_opened_total.get(), 1);
    assert_eq!(metrics.dhttp_tokens_asked_total.get(), 1, "the address is proved once");
}

#[tokio::test]
async fn a_middling_response_comes_in_several_datagrams() {
    let site = Site::start();
    let client = client();
    let response = client.get(&site.url("/bytes/10000")).await.unwrap();
    assert_eq!((response.status, response.via, response.from), (200, Via::Datagram, site.address));
    assert_eq!(response.body.collect(20_000).await.unwrap(), pattern(10_000));
    assert_eq!(site.handle.metrics().dhttp_pieces_total.get(), 7);
    assert_eq!(site.handle.metrics().dhttp_connections_opened_total.get(), 0);
}

#[tokio::test]
async fn the_connection_for_a_long_response_is_there_before_the_response_is_made() {
    let site = Site::start();
    let client = client();
    // The address is proved, so that the request is made once.
    client.get(&site.url("/bytes/10")).await.unwrap();
    // The head is here though the site makes no byte of the body before the gate opens.
    let mut response = client.get(&site.url("/gated/100000")).await.unwrap();
    assert_eq!(response.via, Via::ServerConnection);
    site.gate.notify_one();
    let mut length = 0;
    while let Some(piece) = response.body.next().await {
        length += piece.unwrap().len();
    }
    assert_eq!(length, 100_000);
}

#[tokio::test]
async fn a_response_that_is_made_bit_by_bit_is_not_held_back() {
    let site = Site::start();
    let client = client();
    // Its first bytes are here though the site does not end it before the gate opens.
    let mut response = client.get(&site.url("/trickle/10")).await.unwrap();
    assert_eq!(response.via, Via::ServerConnection);
    assert_eq!(response.body.next().await.unwrap().unwrap(), pattern(10));
    site.gate.notify_one();
    assert!(response.body.next().await.is_none());
}

#[tokio::test]
async fn a_response_of_unknown_length_is_short_or_long_as_it_turns_out() {
    let site = Site::start();
    let client = client();
    for (length, via) in [(10, Via::Datagram), (100_000, Via::ServerConnection)] {
        // So that the first is not asked for a proof that the second gets.
        let response = client.get(&site.url(&format!("/chunked/{length}"))).await.unwrap();
        assert_eq!(response.via, via);
        assert!(response.body.collect(1_000_000).await.unwrap() == pattern(length));
    }
}

#[tokio::test]
async fn many_requests_at_once_get_each_their_own_answer() {
    let site = Site::start();
    let client = client();
    let fetches: Vec<_> = (0..300)
        .map(|n| {
            let (client, url) = (client.clone(), site.url(&format!("/bytes/{}", n * 20)));
            tokio::spawn(async move {
                let response = client.get(&url).await.unwrap();
                response.body.collect(100_000).await.unwrap() == pattern(n * 20)
            })
        })
        .collect();
    for fetch in fetches {
        assert!(fetch.await.unwrap());
    }
    assert_eq!(client.metrics().dhttp_client_outstanding.get(), 0);
}

const POST: &str = "POST /count HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n";

#[tokio::test]
async fn what_must_not_be_repeated_goes_by_datagram_and_is_executed_once() {
    let site = Site::start_cores(2);
    let client = client();
    for n in 1..=3 {
        let hello = FetchBody::Full(Bytes::from_static(b"hello"));
        let response = client.fetch(request(&site, POST, hello)).await.unwrap();
        assert_eq!((response.status, response.via), (200, Via::Datagram));
        assert_eq!(response.body.collect(100).await.unwrap(), format!("{n} 5"));
    }
    assert_eq!(site.executed(), 3);
    assert_eq!(client.metrics().dhttp_client_proofs_total.get(), 1, "one round trip more, once");
}

#[tokio::test]
async fn what_must_not_be_repeated_goes_by_tcp_where_there_is_no_window() {
    let site = Site::start_with(ServerOptions { window: None, ..ServerOptions::new().unwrap() });
    let hello = FetchBody::Full(Bytes::from_static(b"hello"));
    let response = client().fetch(request(&site, POST, hello)).await.unwrap();
    assert_eq!((response.status, response.via), (200, Via::ClientConnection));
    assert_eq!(response.body.collect(100).await.unwrap(), "1 5");
    assert_eq!(site.executed(), 1);
}

/// The same request by UDP from several ports, which different cores have, and on connections.
#[tokio::test]
async fn copies_of_a_request_are_executed_once_whichever_core_and_channel_they_come_by() {
    let site = Site::start_cores(2);
    let http = [POST.as_bytes(), b"hello"].concat();
    let id = RequestId(*b"same one");
    let mut ticket = None;
    let mut answers = Vec::new();
    for _ in 0..12 {
        let socket = client_socket().await;
        let mut token = Vec::new();
        for _ in 0..3 {
            let once = match ticket {
                None => Once::Unnumbered,
                Some(ticket) => Once::Numbered(Numbered { ticket, number: 0 }),
            };
            let mut datagram = Vec::new();
            let request = Request {
                id,
                other_port: 40_000,
                resend: false,
                token: Some(&token),
                pieces: Pieces::Unknown,
                once,
                http: &http,
            };
            request.write(&mut datagram);
            socket.send_to(&datagram, site.address).await.unwrap();
            let mut buffer = [0; 2000];
            let length = socket.recv(&mut buffer).await.unwrap();
            match Response::parse(&buffer[..length]).unwrap().answer {
                Answer::NewTicket { token: given, ticket: issued, .. } => {
                    (token, ticket) = (given.to_vec(), Some(issued));
                }
                Answer::ProveAddress { token: given } => token = given.to_vec(),
                Answer::Http { http, .. } => {
                    answers.push(http.to_vec());
                    break;
                }
                answer => panic!("{answer:?}"),
            }
        }
    }
    let mut stream = tokio::net::TcpStream::connect(site.address).await.unwrap();
    let once = Once::Numbered(Numbered { ticket: ticket.unwrap(), number: 0 });
    let mut message = Vec::new();
    let (other_port, pieces) = (40_000, Pieces::Unknown);
    Request { id, other_port, resend: false, token: None, pieces, once, http: &http }.write(&mut message);
    stream.write_all(&message).await.unwrap();
    let mut answer = vec![0; 8 + answers[0].len()];
    stream.read_exact(&mut answer).await.unwrap();
    answers.push(answer[8..].to_vec());
    assert_eq!(answers.len(), 13);
    assert!(answers.iter().all(|answer| answer.ends_with(b"1 5") && *answer == answers[0]));
    assert_eq!(site.executed(), 1);
}

#[tokio::test]
async fn a_request_of_before_a_restart_is_refused_on_a_connection_too() {
    let site = Site::start();
    let once = Once::Numbered(Numbered { ticket: [9; 16], number: 0 });
    let mut message = Vec::new();
    let (id, http) = (RequestId(*b"long ago"), [POST.as_bytes(), b"hello"].concat());
    let (other_port, pieces) = (40_000, Pieces::Unknown);
    Request { id, other_port, resend: false, token: None, pieces, once, http: &http }.write(&mut message);
    let mut stream = tokio::net::TcpStream::connect(site.address).await.unwrap();
    stream.write_all(&message).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    assert_eq!((answer.len(), site.executed()), (0, 0));
}

#[tokio::test]
async fn a_dhttpt_url_goes_by_tcp() {
    let site = Site::start();
    let url = site.url("/bytes/10").replace("dhttp:", "dhttpt:");
    let response = client().get(&url).await.unwrap();
    assert_eq!(response.via, Via::ClientConnection);
    assert_eq!(response.body.collect(100).await.unwrap(), pattern(10));
}

#[tokio::test]
async fn a_body_that_is_still_being_made_is_uploaded_as_it_comes() {
    let site = Site::start();
    let (mut sender, body) = Body::channel();
    let head = "PUT /count HTTP/1.1\r\nHost: x\r\nContent-Length: 300000\r\n\r\n";
    let client = client();
    let fetch = client.fetch(request(&site, head, FetchBody::Streamed(body.into())));
    let feed = async {
        for _ in 0..30 {
            sender.send(vec![7; 10_000].into()).await.unwrap();
        }
        sender.end();
    };
    let (response, ()) = tokio::join!(fetch, feed);
    let response = response.unwrap();
    assert_eq!(response.via, Via::ClientConnection);
    assert_eq!(response.body.collect(100).await.unwrap(), "1 300000");
}

#[tokio::test]
async fn a_head_request_has_no_body_to_wait_for() {
    let site = Site::start();
    let head = "HEAD /bytes/500000 HTTP/1.1\r\nHost: x\r\n\r\n";
    let response = client().fetch(request(&site, head, FetchBody::Full(Bytes::new()))).await.unwrap();
    assert_eq!((response.status, response.via), (200, Via::Datagram));
    assert!(response.head.windows(22).any(|part| part == b"Content-Length: 500000"));
    assert_eq!(response.body.collect(0).await.unwrap(), "");
}

#[tokio::test]
async fn a_client_that_cannot_be_connected_to_gets_its_answer_on_its_own_connection() {
    let site = Site::start();
    // As behind a firewall: whatever connects is closed at once.
    let client = DhttpClient::new(ClientOptions { accepted: 0, ..ClientOptions::default() }).unwrap();
    let response = client.get(&site.url("/bytes/100000")).await.unwrap();
    assert_eq!(response.via, Via::ClientConnection);
    assert!(response.body.collect(200_000).await.unwrap() == pattern(100_000));
    assert_eq!(client.metrics().dhttp_client_resends_total.get(), 0, "no timer was needed");
}

#[tokio::test]
async fn a_connection_of_the_clients_is_used_again() {
    let site = Site::start();
    let client = client();
    let url = site.url("/bytes/100000").replace("dhttp:", "dhttpt:");
    for _ in 0..3 {
        let response = client.get(&url).await.unwrap();
        assert_eq!(response.via, Via::ClientConnection);
        assert!(response.body.collect(200_000).await.unwrap() == pattern(100_000));
    }
    assert_eq!(client.metrics().dhttp_client_connections_reused_total.get(), 2);
    let metrics = site.handle.driver_metrics();
    assert_eq!((metrics.dhttp_accepted_total.get(), metrics.dhttp_stream_requests_total.get()), (1, 3));
    // What must not be repeated is not trusted to a connection that may just be ending.
    let head = "POST /count HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n";
    let mut post = request(&site, head, FetchBody::Full(Bytes::from_static(b"hello")));
    post.by_tcp = true;
    assert_eq!(client.fetch(post).await.unwrap().via, Via::ClientConnection);
    assert_eq!(client.metrics().dhttp_client_connections_reused_total.get(), 2);
}

#[tokio::test]
async fn a_connection_that_ends_as_it_is_used_again_is_replaced() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    // Answers one request on each connection, and reads the next one before it closes.
    let serve = tokio::spawn(async move {
        for _ in 0..2 {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut head = vec![0; 1000];
            assert_ne!(stream.read(&mut head).await.unwrap(), 0);
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nhttp").await.unwrap();
            let _ = stream.read(&mut head).await;
        }
    });
    let site = Site::start();
    let client = client();
    for _ in 0..2 {
        let mut wanted = get(&site, "/");
        wanted.http = Some(address);
        let response = client.fetch_http(wanted).await.unwrap();
        assert_eq!(response.body.collect(10).await.unwrap(), "http");
    }
    assert_eq!(client.metrics().dhttp_client_connections_reused_total.get(), 1);
    drop(client);
    serve.await.unwrap();
}

#[tokio::test]
async fn under_stress_long_responses_go_over_connections_of_the_client() {
    let site = Site::start();
    let client = client();
    site.handle.set_stressed(true);
    // The first request makes the server look.
    client.get(&site.url("/bytes/1")).await.unwrap();
    let response = client.get(&site.url("/bytes/100000")).await.unwrap();
    assert_eq!(response.via, Via::ClientConnection);
    assert_eq!(site.handle.metrics().dhttp_connections_opened_total.get(), 0);
}

#[tokio::test]
async fn a_server_without_dhttp_is_asked_by_http_at_once() {
    let http = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let http_address = http.local_addr().unwrap();
    let serve = tokio::spawn(async move {
        let (mut stream, _) = http.accept().await.unwrap();
        let mut head = vec![0; 1000];
        let length = stream.read(&mut head).await.unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nhttp").await.unwrap();
        head[..length].to_vec()
    });
    let site = Site::start();
    let mut request = get(&site, "/_dhttp_/x");
    // A port where nobody listens.
    let unused = tidegate_ports::free_address().unwrap();
    request.server = unused;
    request.http = Some(http_address);
    let client = client();
    let response = client.fetch(request).await.unwrap();
    assert_eq!((response.via, response.from), (Via::Http, http_address));
    assert_eq!(response.body.collect(10).await.unwrap(), "http");
    assert!(serve.await.unwrap().starts_with(b"GET /_dhttp_/x HTTP/1.1\r\n"));
    assert_eq!(client.metrics().dhttp_client_resends_total.get(), 0, "no timer was needed");
}

#[tokio::test]
async fn a_server_that_is_not_there_at_all_is_an_error() {
    let unused = tidegate_ports::free_address().unwrap();
    let error = client().get(&format!("dhttp://{unused}/")).await.unwrap_err();
    assert!(matches!(error, FetchError::NoAnswer { sent: false, .. }), "{error}");
}

#[tokio::test]
async fn an_unproved_client_is_sent_three_times_its_bytes_at_most_no_syn_and_makes_the_site_work_for_nothing()
{
    let site = Site::start();
    let listener = site::client_listener().await;
    let other_port = listener.local_addr().unwrap().port();
    let socket = site::client_socket().await;
    let mut id = 0_u64;
    for http in [
        "GET /bytes/1 HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET /bytes/100000 HTTP/1.1\r\nHost: x\r\n\r\n",
        "PUT /count HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx",
    ] {
        for token in [None, Some(&[][..]), Some(b"some forged token...")] {
            id += 1;
            let of = RequestId(id.to_be_bytes());
            let mut datagram = Vec::new();
            let (pieces, once, http) = (Pieces::Unknown, Once::No, http.as_bytes());
            Request { id: of, other_port, resend: false, token, pieces, once, http }.write(&mut datagram);
            socket.send_to(&datagram, site.address).await.unwrap();
            let mut buffer = vec![0; 2000];
            let (length, _) = socket.recv_from(&mut buffer).await.unwrap();
            assert!(length <= 3 * datagram.len());
            let answer = Response::parse(&buffer[..length]).unwrap();
            // Nothing more came for the one before.
            assert_eq!(answer.id, of);
            match token {
                None => assert_eq!(answer.answer, Answer::UseTcp),
                Some(_) => assert!(matches!(answer.answer, Answer::ProveAddress { .. })),
            }
        }
    }
    assert_eq!(site.handle.metrics().dhttp_connections_opened_total.get(), 0);
    assert_eq!(site.executed(), 0);
}

/// A cache on the way: it takes the server's place on the UDP port, and answers from an address of its own.
async fn cache(site: &str) -> (SocketAddr, tokio::task::JoinHandle<()>) {
    let (server, origin) = unheard::port_pair().await;
    let address = server.local_addr().unwrap();
    let cache = UdpSocket::bind("127.0.0.77:0").await.unwrap();
    let body = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{site}", site.len());
    let task = tokio::spawn(async move {
        let mut buffer = vec![0; 2000];
        let (length, client) = server.recv_from(&mut buffer).await.unwrap();
        let id = Request::parse(&buffer[..length]).unwrap().id;
        let mut answer = Vec::new();
        Response { id, answer: Answer::Http { token: None, http: body.as_bytes() } }.write(&mut answer);
        cache.send_to(&answer, client).await.unwrap();
        // TCP passes the cache by.
        let (mut stream, _) = origin.accept().await.unwrap();
        let length = stream.read(&mut buffer).await.unwrap();
        let id = Request::parse(&buffer[..length]).unwrap().id;
        stream.write_all(&id.0).await.unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\norigin").await.unwrap();
    });
    (address, task)
}

#[tokio::test]
async fn a_cache_answers_from_its_own_address_unless_the_client_refuses_it() {
    let (server, task) = cache("cache").await;
    let response = client().get(&format!("dhttp://{server}/")).await.unwrap();
    assert_eq!(response.from.ip().to_string(), "127.0.0.77");
    assert_eq!(response.body.collect(10).await.unwrap(), "cache");
    task.abort();

    let (server, task) = cache("cache").await;
    let caches = CachePolicy { except: vec!["127.0.0.64/27".parse().unwrap()], ..CachePolicy::default() };
    let protocol = ClientConfig { caches, ..ClientConfig::default() };
    let client = DhttpClient::new(ClientOptions { protocol, ..ClientOptions::default() }).unwrap();
    let response = client.get(&format!("dhttp://{server}/")).await.unwrap();
    assert_eq!((response.via, response.from), (Via::ClientConnection, server));
    assert_eq!(response.body.collect(10).await.unwrap(), "origin");
    task.await.unwrap();
}

#[tokio::test]
async fn a_lost_request_is_resent_and_answered_by_tcp() {
    // The server's UDP port loses the first datagram; a relay passes the rest.
    let site = Site::start();
    let relay = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let relay_address = relay.local_addr().unwrap();
    let backward = site::client_socket().await;
    let upstream = site.address;
    let passing = tokio::spawn(async move {
        let (mut buffer, mut back, mut client, mut seen) = (vec![0; 2000], vec![0; 2000], None, 0);
        loop {
            tokio::select! {
                Ok((length, from)) = relay.recv_from(&mut buffer) => {
                    client = Some(from);
                    seen += 1;
                    if seen > 1 {
                        backward.send_to(&buffer[..length], upstream).await.unwrap();
                    }
                }
                Ok((length, _)) = backward.recv_from(&mut back) => {
                    relay.send_to(&back[..length], client.unwrap()).await.unwrap();
                }
            }
        }
    });
    // However slow the machine is, it does not come to a connection of the client's.
    let first_timeout = Duration::from_millis(50);
    let protocol = ClientConfig { first_timeout, resends: 20, ..ClientConfig::default() };
    let client = DhttpClient::new(ClientOptions { protocol, ..ClientOptions::default() }).unwrap();
    let response = client.get(&format!("dhttp://{relay_address}/bytes/10")).await.unwrap();
    assert_eq!((response.status, response.via), (200, Via::ServerConnection));
    assert_eq!(response.body.collect(10).await.unwrap(), pattern(10));
    assert!(client.metrics().dhttp_client_resends_total.get() >= 1);
    passing.abort();
}

#[tokio::test]
async fn malformed_requests_on_a_connection_are_answered_with_an_error() {
    let site = Site::start();
    for (bytes, status) in [
        (&b"12345678\xa0\x00\0GET /a HTTP/1.1\r\n\r\n"[..], "400"),
        (b"12345678\xa0\x00\xf0GET /a HTTP/1.1\r\nHost: x\r\n\r\n", "400"),
        (b"12345678\xa0\x00\0GET /%00 HTTP/1.1\r\nHost: x\r\n\r\n", "400"),
        (b"12345678\xa0\x00\0GET /a HTTP/3.1\r\nHost: x\r\n\r\n", "505"),
    ] {
        let mut stream = tokio::net::TcpStream::connect(site.address).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        assert!(answer.starts_with(format!("12345678HTTP/1.1 {status} ").as_bytes()), "{answer:?}");
    }
    assert_eq!(site.executed(), 0);
}

#[tokio::test]
async fn a_response_that_breaks_off_is_an_error_and_not_a_short_body() {
    let site = Site::start();
    let response = client().get(&site.url("/broken/100000")).await.unwrap();
    assert!(response.body.collect(200_000).await.is_err());
}

/// Asks for a short response, with a token if there is one.
async fn ask(socket: &UdpSocket, server: SocketAddr, token: &[u8], buffer: &mut [u8]) -> usize {
    let (id, http) = (RequestId([7; 8]), b"GET /bytes/10 HTTP/1.1\r\nHost: x\r\n\r\n");
    let (other_port, pieces, once) = (40_000, Pieces::Unknown, Once::No);
    let mut datagram = Vec::new();
    Request { id, other_port, resend: false, token: Some(token), pieces, once, http }.write(&mut datagram);
    socket.send_to(&datagram, server).await.unwrap();
    let (length, from) = socket.recv_from(buffer).await.unwrap();
    assert_eq!(from, server);
    length
}

#[tokio::test]
async fn cores_share_a_port_and_the_clients() {
    let site = Site::start_cores(2);
    let mut buffer = vec![0; 2000];
    for _ in 0..250 {
        // Which core has a client is the kernel's choice.
        let socket = client_socket().await;
        let length = ask(&socket, site.address, &[], &mut buffer).await;
        let Answer::ProveAddress { token } = Response::parse(&buffer[..length]).unwrap().answer else {
            panic!("not asked for a proof")
        };
        let token = token.to_vec();
        let length = ask(&socket, site.address, &token, &mut buffer).await;
        assert!(matches!(Response::parse(&buffer[..length]).unwrap().answer, Answer::Http { .. }));
        if site.asked_of_cores().iter().all(|asked| *asked > 0) {
            return;
        }
    }
    panic!("one core has everything: {:?}", site.asked_of_cores());
}

#[tokio::test]
async fn servers_with_one_secret_accept_each_others_tokens_and_no_others_do() {
    let options = ServerOptions::new().unwrap();
    let (one, other) = (Site::start_with(options.clone()), Site::start_with(options));
    let stranger = Site::start();
    let socket = client_socket().await;
    let mut buffer = vec![0; 2000];
    let length = ask(&socket, one.address, &[], &mut buffer).await;
    let Answer::ProveAddress { token } = Response::parse(&buffer[..length]).unwrap().answer else {
        panic!("not asked for a proof")
    };
    let token = token.to_vec();
    for (site, is_proof) in [(&one, true), (&other, true), (&stranger, false)] {
        let length = ask(&socket, site.address, &token, &mut buffer).await;
        let answer = Response::parse(&buffer[..length]).unwrap().answer;
        assert_eq!(matches!(answer, Answer::Http { .. }), is_proof, "{answer:?}");
    }
}

#[tokio::test]
async fn a_client_over_ipv6_is_served_alike() {
    let site = Site::start_at("::1".parse().unwrap(), 1);
    let client = client();
    for (n, via) in [(10, Via::Datagram), (100_000, Via::ServerConnection)] {
        let response = client.get(&site.url(&format!("/bytes/{n}"))).await.unwrap();
        assert_eq!((response.via, response.from.ip()), (via, site.address.ip()));
        assert!(response.body.collect(200_000).await.unwrap() == pattern(n));
    }
}

#[test]
fn methods_are_read_from_heads() {
    assert_eq!(method_of(b"GET / HTTP/1.1\r\n\r\n"), Method::Get);
    assert_eq!(method_of(b""), Method::Other);
}

#[tokio::test]
async fn a_server_on_all_addresses_answers_from_the_one_that_was_asked() {
    for (everywhere, asked) in
        [("0.0.0.0", "127.0.0.2"), ("::", "127.0.0.3"), ("::", "::1"), ("0.0.0.0", "127.0.0.1")]
    {
        let site = Site::start_at(everywhere.parse().unwrap(), 1);
        // No cache's answer would do: it must come from that very address.
        let caches = CachePolicy { accept: false, ..CachePolicy::default() };
        let protocol = ClientConfig { caches, ..ClientConfig::default() };
        let client = DhttpClient::new(ClientOptions { protocol, ..ClientOptions::default() }).unwrap();
        let server = SocketAddr::new(asked.parse().unwrap(), site.address.port());
        for (bytes, via) in [(100, Via::Datagram), (10_000, Via::Datagram), (100_000, Via::ServerConnection)]
        {
            let response = client.get(&format!("dhttp://{server}/bytes/{bytes}")).await.unwrap();
            assert_eq!(
                (response.via, response.from.ip()),
                (via, server.ip()),
                "{everywhere} {asked} {bytes}"
            );
            assert_eq!(response.body.collect(200_000).await.unwrap(), pattern(bytes));
        }
    }
}
