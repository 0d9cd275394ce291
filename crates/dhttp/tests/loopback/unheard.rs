//! Servers that UDP does not reach, and peers that were not asked.

use std::net::SocketAddr;
use std::time::Duration;

use tidegate_dhttp::client::ClientConfig;
use tidegate_dhttp::driver::{ClientOptions, DhttpClient, DhttpUrl, FetchError, FetchRequest, Via};
use tidegate_dhttp::wire::Request;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, UdpSocket};

/// UDP and TCP of one port, at which nobody has listened for DHTTP yet.
pub async fn port_pair() -> (UdpSocket, TcpListener) {
    loop {
        let udp = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        if let Ok(tcp) = TcpListener::bind(udp.local_addr().unwrap()).await {
            return (udp, tcp);
        }
    }
}

fn get(server: SocketAddr, http: Option<SocketAddr>) -> FetchRequest {
    let url = DhttpUrl::parse(&format!("dhttp://{server}/x")).unwrap();
    FetchRequest { http, ..FetchRequest::get(&url, server) }
}

/// A client whose resend timers cannot be what helps.
fn patient_client() -> DhttpClient {
    client(ClientConfig::default())
}

fn client(config: ClientConfig) -> DhttpClient {
    let protocol = ClientConfig { first_timeout: Duration::from_secs(86_400), ..config };
    DhttpClient::new(ClientOptions { protocol, ..ClientOptions::default() }).unwrap()
}

#[tokio::test]
async fn a_server_that_udp_does_not_reach_answers_by_tcp_and_the_next_time_without_delay() {
    let (udp, tcp) = port_pair().await;
    let server = udp.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = tcp.accept().await.unwrap();
            assert!(stream.read(&mut [0; 4000]).await.unwrap() > 0);
            stream.write_all(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n").await.unwrap();
        }
    });
    let client = patient_client();
    let datagrams = || {
        let mut count = 0;
        while udp.try_recv(&mut [0; 2000]).is_ok() {
            count += 1;
        }
        count
    };
    let response = client.fetch(get(server, Some(server))).await.unwrap();
    assert_eq!((response.status, response.via), (204, Via::Http));
    udp.readable().await.unwrap();
    assert_eq!(datagrams(), 3, "the request and two signs of life asked for");
    for _ in 0..3 {
        let response = client.fetch(get(server, Some(server))).await.unwrap();
        assert_eq!((response.status, response.via), (204, Via::Http));
    }
    assert_eq!(datagrams(), 0);
    let metrics = client.metrics();
    assert_eq!((metrics.dhttp_client_silent_total.get(), metrics.dhttp_client_probes_total.get()), (1, 2));
}

#[tokio::test]
async fn a_server_that_speaks_http_where_dhttp_is_asked_for_is_named_as_such() {
    let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = tcp.local_addr().unwrap();
    tokio::spawn(async move {
        let (mut stream, _) = tcp.accept().await.unwrap();
        assert!(stream.read(&mut [0; 4000]).await.unwrap() > 0);
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n").await.unwrap();
    });
    let outcome = patient_client().fetch(get(server, None)).await;
    assert!(matches!(outcome, Err(FetchError::SpeaksHttp)), "{outcome:?}");
}

#[tokio::test]
async fn strangers_cannot_take_the_places_of_a_server_that_was_asked() {
    let udp = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let server = udp.local_addr().unwrap();
    let client = client(ClientConfig { probe_after: Duration::ZERO, ..ClientConfig::default() });
    let fetching = tokio::spawn({
        let client = client.clone();
        async move { client.fetch(get(server, None)).await }
    });
    let mut datagram = [0; 2000];
    let (length, from) = udp.recv_from(&mut datagram).await.unwrap();
    let request = Request::parse(&datagram[..length]).unwrap();
    let client_port = SocketAddr::new(from.ip(), request.other_port);
    let mut strangers = Vec::new();
    for n in 0..8 {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.9:0".parse().unwrap()).unwrap();
        let mut stranger = socket.connect(client_port).await.unwrap();
        if n >= 4 {
            let read = stranger.read(&mut [0; 1]).await;
            assert!(!matches!(read, Ok(1..)), "{read:?}");
        }
        strangers.push(stranger);
    }
    assert_eq!(client.metrics().dhttp_client_connections_refused_total.get(), 4);
    let mut answering = tokio::net::TcpStream::connect(client_port).await.unwrap();
    answering.write_all(&request.id.0).await.unwrap();
    answering.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi").await.unwrap();
    let response = fetching.await.unwrap().unwrap();
    assert_eq!((response.status, response.via), (200, Via::ServerConnection));
}
