//! Servers that misbehave, on loopback.

mod pauses;
mod pipeline;

use std::cell::RefCell;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::rc::Rc;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use tidegate_http::{BodyFraming, HeadLimits, Method, RequestParser, ResponseHead};

use super::{BodyReadError, EmptyBody, Groups, OutgoingRequest, Pools, RequestBody, Response, UpstreamError};
use crate::settings::{Balance, HealthCheck, Upstream};

/// A server that plays one script a connection: reads a head, writes the bytes, closes.
fn server(scripts: Vec<Vec<&'static [u8]>>) -> (SocketAddr, JoinHandle<usize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let thread = std::thread::spawn(move || {
        let mut requests = 0;
        for script in scripts {
            let (mut stream, _) = listener.accept().unwrap();
            for answer in script {
                let mut seen = Vec::new();
                let mut byte = [0; 1];
                while !seen.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap() == 1 {
                    seen.push(byte[0]);
                }
                requests += 1;
                stream.write_all(answer).unwrap();
            }
        }
        requests
    });
    (address, thread)
}

/// An address at which nobody listens.
fn nobody() -> SocketAddr {
    tidegate_ports::free_address().unwrap()
}

fn pools(servers: Vec<SocketAddr>, change: impl FnOnce(&mut Upstream)) -> Pools {
    let mut settings = Upstream::new("app", servers);
    settings.connect_timeout = Duration::from_secs(2);
    settings.response_timeout = Duration::from_secs(2);
    change(&mut settings);
    Pools::new(Arc::new(Groups::new(&[settings], None).unwrap()), None)
}

fn get(head: &[u8]) -> OutgoingRequest<'_> {
    OutgoingRequest {
        head,
        method: Method::Get,
        client: Some(Ipv4Addr::LOCALHOST.into()),
        class: 0,
        framing: BodyFraming::None,
        hash: 1,
        upgrade: None,
        passes_trailers: true,
    }
}

const GET: &[u8] = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n";

async fn body_of(response: &mut Response) -> Result<Vec<u8>, UpstreamError> {
    let mut body = Vec::new();
    while let Some(piece) = response.chunk().await? {
        body.extend_from_slice(piece);
    }
    Ok(body)
}

#[tokio::test(flavor = "current_thread")]
async fn a_connection_to_a_server_on_this_host_is_not_paced() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = super::stream::connect_tcp(listener.local_addr().unwrap()).await.unwrap();
    let control = socket2::SockRef::from(&stream).tcp_congestion().unwrap();
    assert!(control.starts_with(b"reno\0"), "{control:?}");
}

#[tokio::test(flavor = "current_thread")]
async fn a_connection_is_used_again_after_a_whole_response() {
    let answer: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi";
    let (address, thread) = server(vec![vec![answer, answer]]);
    let pools = pools(vec![address], |_| {});
    for _ in 0..2 {
        let mut response = pools.send(0, get(GET), EmptyBody).await.unwrap();
        assert_eq!(response.head().status, 200);
        assert_eq!(body_of(&mut response).await.unwrap(), b"hi");
    }
    assert_eq!(thread.join().unwrap(), 2, "both requests came on the one connection");
}

#[tokio::test(flavor = "current_thread")]
async fn an_idle_connection_that_the_server_closed_is_replaced() {
    let answer: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi";
    let (address, thread) = server(vec![vec![answer], vec![answer]]);
    let pools = pools(vec![address], |_| {});
    for _ in 0..2 {
        let mut response = pools.send(0, get(GET), EmptyBody).await.unwrap();
        assert_eq!(body_of(&mut response).await.unwrap(), b"hi");
    }
    assert_eq!(thread.join().unwrap(), 2);
}

#[tokio::test(flavor = "current_thread")]
async fn a_server_that_cannot_be_reached_is_replaced_by_another() {
    let (address, thread) = server(vec![vec![b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]]);
    let pools = pools(vec![nobody(), address], |settings| settings.balance = Balance::LeastConnections);
    let response = pools.send(0, get(GET), EmptyBody).await.unwrap();
    assert_eq!(response.head().status, 200);
    assert_eq!(thread.join().unwrap(), 1);
}

#[tokio::test(flavor = "current_thread")]
async fn a_response_that_ends_early_is_an_error() {
    let (address, _thread) = server(vec![vec![b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi"]]);
    let pools = pools(vec![address], |_| {});
    let mut response = pools.send(0, get(GET), EmptyBody).await.unwrap();
    assert!(matches!(body_of(&mut response).await, Err(UpstreamError::Incomplete)));
}

#[tokio::test(flavor = "current_thread")]
async fn chunked_responses_come_with_their_trailers() {
    let (address, _thread) = server(vec![vec![
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nX-Sum: 7\r\n\r\n",
    ]]);
    let pools = pools(vec![address], |_| {});
    let mut response = pools.send(0, get(GET), EmptyBody).await.unwrap();
    assert_eq!(body_of(&mut response).await.unwrap(), b"hi");
    let trailers: Vec<_> = response.trailers().collect();
    assert_eq!(trailers, [(&b"X-Sum"[..], &b"7"[..])]);
}

#[tokio::test(flavor = "current_thread")]
async fn a_malformed_head_is_a_bad_gateway() {
    let (address, _thread) =
        server(vec![vec![b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"]]);
    let pools = pools(vec![address], |_| {});
    let error = pools.send(0, get(GET), EmptyBody).await.err().unwrap();
    assert!(matches!(error, UpstreamError::Head(_)), "{error}");
    assert_eq!(error.status(), 502);
}

/// A body without content that says which interim responses come.
struct Noting<F>(F);

impl<F: FnMut(u16)> RequestBody for Noting<F> {
    async fn chunk(&mut self) -> Result<Option<&[u8]>, BodyReadError> {
        Ok(None)
    }

    fn informational(&mut self, head: &ResponseHead<'_>) {
        self.0(head.status);
    }

    fn put_back(&mut self, _: Vec<u8>) {
        unreachable!("nobody reads ahead");
    }

    fn is_replayable(&self) -> bool {
        true
    }
}

#[tokio::test(flavor = "current_thread")]
async fn interim_responses_are_told_as_they_come() {
    let (address, _thread) =
        server(vec![vec![b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n"]]);
    let pools = pools(vec![address], |_| {});
    let mut seen = Vec::new();
    let response = pools.send(0, get(GET), Noting(|status| seen.push(status))).await.unwrap();
    assert_eq!(response.head().status, 204);
    assert_eq!(seen, [103]);
}

#[tokio::test(flavor = "current_thread")]
async fn a_server_may_say_many_times_that_it_is_at_work() {
    let many: &'static [u8] =
        [b"HTTP/1.1 102 Processing\r\n\r\n".repeat(40), b"HTTP/1.1 204 No Content\r\n\r\n".to_vec()]
            .concat()
            .leak();
    let whole: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
    for pipeline in [1, 8] {
        let (address, _thread) = server(vec![vec![whole, many]]);
        let pools = pools(vec![address], |settings| settings.pipeline = pipeline);
        tokio::task::LocalSet::new()
            .run_until(async {
                pools.send(0, get(GET), EmptyBody).await.unwrap();
                let mut seen = 0;
                let response = pools.send(0, get(GET), Noting(|_| seen += 1)).await.unwrap();
                assert_eq!((response.head().status, seen), (204, 40));
            })
            .await;
    }
}

#[tokio::test(flavor = "current_thread")]
async fn a_server_that_goes_on_with_interim_responses_is_not_asked_again() {
    let many: &'static [u8] = b"HTTP/1.1 102 Processing\r\n\r\n".repeat(1001).leak();
    let whole: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
    for pipeline in [1, 8] {
        let (address, _thread) = server(vec![vec![whole, many], vec![whole]]);
        let pools = pools(vec![address], |settings| settings.pipeline = pipeline);
        tokio::task::LocalSet::new()
            .run_until(async {
                // The second goes on a connection that was used before.
                pools.send(0, get(GET), EmptyBody).await.unwrap();
                let mut seen = 0;
                let error = pools.send(0, get(GET), Noting(|_| seen += 1)).await.err().unwrap();
                assert!(matches!(error, UpstreamError::TooManyInterim), "{error}");
                assert!(seen <= 1000, "{seen}");
            })
            .await;
    }
}

#[tokio::test(flavor = "current_thread")]
async fn a_change_of_protocol_is_taken_only_when_it_was_asked_for() {
    let answer: &[u8] = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nearly";
    let (address, _thread) = server(vec![vec![answer], vec![answer]]);
    let pools = pools(vec![address], |_| {});
    let error = pools.send(0, get(GET), EmptyBody).await.err().unwrap();
    assert!(matches!(error, UpstreamError::UnexpectedUpgrade), "{error}");
    assert_eq!(error.status(), 502);
    let asked = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: y, x\r\n\r\n";
    let mut parser = RequestParser::new(HeadLimits::default());
    parser.parse(asked).unwrap();
    let upgrade = Some(parser.head(asked).fields);
    let response = pools.send(0, OutgoingRequest { upgrade, ..get(GET) }, EmptyBody).await.unwrap();
    assert_eq!(response.head().status, 101);
    assert!(response.into_tunnel().is_some());
}

/// A body of which one piece comes and then nothing more.
struct Stalled(Option<&'static [u8]>);

impl RequestBody for Stalled {
    async fn chunk(&mut self) -> Result<Option<&[u8]>, BodyReadError> {
        match self.0.take() {
            Some(piece) => Ok(Some(piece)),
            None => std::future::pending().await,
        }
    }

    fn put_back(&mut self, _: Vec<u8>) {
        unreachable!("nobody reads ahead");
    }

    fn is_replayable(&self) -> bool {
        false
    }
}

#[tokio::test(flavor = "current_thread")]
async fn a_change_of_protocol_in_the_middle_of_a_requests_body_is_a_bad_gateway() {
    let answer: &[u8] = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n";
    let asked = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n";
    for framing in [BodyFraming::Length(9), BodyFraming::Chunked] {
        let (address, _thread) = server(vec![vec![answer]]);
        let mut parser = RequestParser::new(HeadLimits::default());
        parser.parse(asked).unwrap();
        let upgrade = Some(parser.head(asked).fields);
        let request = OutgoingRequest { method: Method::Post, framing, upgrade, ..get(asked) };
        let sent = pools(vec![address], |_| {}).send(0, request, Stalled(Some(b"half"))).await;
        // What the client still sends of its body would be taken for the other protocol.
        let error = sent.err().unwrap();
        assert!(matches!(error, UpstreamError::UnexpectedUpgrade), "{error}");
        assert_eq!(error.status(), 502);
    }
}

#[tokio::test(flavor = "current_thread")]
async fn failures_in_a_row_take_a_server_out() {
    let address = nobody();
    let pools = pools(vec![address], |settings| settings.max_failures = 2);
    for _ in 0..2 {
        assert_eq!(pools.send(0, get(GET), EmptyBody).await.err().unwrap().status(), 502);
    }
    let status = pools.groups().status();
    assert!(!status[0].healthy);
    assert_eq!(status[0].failures, 2);
    assert!(status[0].last_error.as_ref().unwrap().starts_with("cannot connect"));
}

struct Failing;

impl RequestBody for Failing {
    async fn chunk(&mut self) -> Result<Option<&[u8]>, BodyReadError> {
        Err(BodyReadError::TooLarge)
    }

    fn put_back(&mut self, _: Vec<u8>) {
        unreachable!("nobody reads ahead");
    }

    fn is_replayable(&self) -> bool {
        false
    }
}

#[tokio::test(flavor = "current_thread")]
async fn a_body_that_fails_is_the_clients_fault() {
    let (address, _thread) = server(vec![vec![b""]]);
    let pools = pools(vec![address], |_| {});
    let request = OutgoingRequest { method: Method::Post, framing: BodyFraming::Chunked, ..get(GET) };
    let error = pools.send(0, request, Failing).await.err().unwrap();
    assert_eq!(error.status(), 413);
    assert_eq!(pools.groups().status()[0].failures, 0);
}

/// A body that ends only when the server's thread says so.
struct Waiting(tokio::sync::oneshot::Receiver<()>, bool);

impl RequestBody for Waiting {
    async fn chunk(&mut self) -> Result<Option<&[u8]>, BodyReadError> {
        if !std::mem::replace(&mut self.1, true) {
            return Ok(Some(b"a"));
        }
        (&mut self.0).await.map_err(|_| BodyReadError::ClientGone)?;
        Ok(None)
    }

    fn put_back(&mut self, _: Vec<u8>) {
        unreachable!("nobody reads ahead");
    }

    fn is_replayable(&self) -> bool {
        false
    }
}

#[tokio::test(flavor = "current_thread")]
async fn half_a_head_that_came_during_the_upload_is_not_lost() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (finish, finished) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Le").unwrap();
        // Long enough for the half to be read while the upload waits; the order is all that matters.
        std::thread::sleep(Duration::from_millis(50));
        finish.send(()).unwrap();
        let mut seen = Vec::new();
        let mut byte = [0; 1];
        while !seen.ends_with(b"0\r\n\r\n") && stream.read(&mut byte).unwrap() == 1 {
            seen.push(byte[0]);
        }
        stream.write_all(b"ngth: 2\r\n\r\nhi").unwrap();
    });
    let pools = pools(vec![address], |_| {});
    let head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
    let request = OutgoingRequest { method: Method::Post, framing: BodyFraming::Chunked, ..get(head) };
    let mut response = pools.send(0, request, Waiting(finished, false)).await.unwrap();
    assert_eq!(body_of(&mut response).await.unwrap(), b"hi");
}

#[test]
fn round_robin_takes_turns_and_hashing_stays() {
    let addresses: Vec<SocketAddr> = (1..=3).map(|port| SocketAddr::from(([127, 0, 0, 1], port))).collect();
    let picks = |balance, hash| {
        let settings = Upstream { balance, ..Upstream::new("app", addresses.clone()) };
        let groups = Groups::new(&[settings], None).unwrap();
        let group = groups.get(0).unwrap();
        let request = OutgoingRequest { hash, ..get(GET) };
        (0..6).map(|_| group.pick(&request, &[], 0).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(picks(Balance::RoundRobin, 0), [0, 1, 2, 0, 1, 2]);
    // All have equally few.
    assert_eq!(picks(Balance::LeastConnections, 0), [0, 1, 2, 0, 1, 2]);
    let stays = picks(Balance::HashUrl, 7);
    assert!(stays.iter().all(|server| *server == stays[0]));
    let spread: std::collections::BTreeSet<_> =
        (0..64).map(|hash| picks(Balance::HashUrl, hash)[0]).collect();
    assert_eq!(spread.len(), 3);
}

/// A server that was taken out, or at its limit, had a fresh start with each reload.
#[test]
fn a_server_that_stays_is_what_it_was_after_a_reload() {
    let address = |host| SocketAddr::from(([127, 0, 0, host], 1));
    let checked = HealthCheck {
        path: "/".into(),
        host: None,
        status: None,
        interval: Duration::from_secs(60),
        timeout: Duration::from_secs(1),
        fall: 1,
        rise: 1,
    };
    let group = |name: &str, hosts: &[u8], health_check| {
        let addresses = hosts.iter().map(|host| address(*host)).collect();
        Upstream { health_check, ..Upstream::new(name, addresses) }
    };
    let first = group("app", &[1, 2, 3], Some(checked.clone()));
    let groups = Groups::new(std::slice::from_ref(&first), None).unwrap();
    let server = |groups: &Groups, index: usize| Arc::clone(&groups.get(0).unwrap().servers[index]);
    for _ in 0..first.max_failures {
        server(&groups, 0).failed(&UpstreamError::NoServer, &first, groups.now_ms());
    }
    server(&groups, 1).checked("app", Some("it is not well".into()));
    server(&groups, 2).request_began();
    let healthy = |groups: &Groups| {
        groups
            .status()
            .iter()
            .map(|server| (server.server.clone(), server.healthy, server.in_progress))
            .collect::<Vec<_>>()
    };
    let next = [group("app", &[3, 4, 2, 1], Some(checked)), group("other", &[1], None)];
    let (again, pools) =
        (Groups::new(&next, Some(&groups)).unwrap(), groups.carry_over(None, || Rc::new(())));
    let expected = [(3, true, 1), (4, true, 0), (2, false, 0), (1, false, 0), (1, true, 0)]
        .map(|(host, is, n)| (address(host).into(), is, n));
    assert_eq!(healthy(&again), expected);
    // What there was for each of them stays its own.
    let carried = again.carry_over(Some((&groups, &pools)), || Rc::new(()));
    let is_same = |new: &Rc<()>, old: usize| Rc::ptr_eq(new, &pools[0][old]);
    assert!(is_same(&carried[0][0], 2) && is_same(&carried[0][2], 1) && is_same(&carried[0][3], 0));
    assert!(!pools[0].iter().any(|old| Rc::ptr_eq(old, &carried[0][1]) || Rc::ptr_eq(old, &carried[1][0])));
    // Without a check nobody would find out that it is well again.
    let unchecked = Groups::new(&[group("app", &[1, 2], None)], Some(&again)).unwrap();
    assert_eq!(healthy(&unchecked), [(address(1).into(), false, 0), (address(2).into(), true, 0)]);
}

#[test]
fn hashing_moves_only_the_share_of_a_lost_server() {
    let addresses: Vec<SocketAddr> = (1..=4).map(|port| SocketAddr::from(([127, 0, 0, 1], port))).collect();
    let settings = Upstream { balance: Balance::HashUrl, ..Upstream::new("app", addresses) };
    let groups = Groups::new(&[settings], None).unwrap();
    let group = groups.get(0).unwrap();
    for hash in 0..200 {
        let request = OutgoingRequest { hash, ..get(GET) };
        let before = group.pick(&request, &[], 0).unwrap();
        let after = group.pick(&request, &[2], 0).unwrap();
        assert!(before == after || before == 2, "hash {hash} moved from {before} to {after}");
    }
}

#[tokio::test(flavor = "current_thread")]
async fn requests_that_wait_for_a_connection_are_sent_in_the_order_of_their_classes() {
    let answer: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi";
    let (address, _thread) = server(vec![vec![answer; 4]]);
    let pools = pools(vec![address], |settings| settings.max_connections = 1);
    let answered = RefCell::new(Vec::new());
    let one = async |name, class| {
        let mut response = pools.send(0, OutgoingRequest { class, ..get(GET) }, EmptyBody).await.unwrap();
        assert_eq!(body_of(&mut response).await.unwrap(), b"hi");
        answered.borrow_mut().push(name);
    };
    // Polled in this order: the first has the only connection while the others begin to wait.
    tokio::join!(biased; one("busy", 0), one("low", 2), one("middle", 1), one("high", 0));
    assert_eq!(*answered.borrow(), ["busy", "high", "middle", "low"]);
}

#[test]
fn what_this_host_lacks_is_no_fault_of_a_server() {
    let of = |code| UpstreamError::of_connecting(std::io::Error::from_raw_os_error(code));
    for code in [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::EADDRNOTAVAIL] {
        assert!(!of(code).is_servers_fault() && of(code).status() == 503, "{}", of(code));
    }
    assert!(of(libc::ECONNREFUSED).is_servers_fault() && of(libc::ECONNREFUSED).status() == 502);
}
