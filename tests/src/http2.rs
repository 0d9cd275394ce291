//! A client of HTTP/2 over TLS.

use std::future::{Future, poll_fn};
use std::time::Duration;

use bytes::Bytes;
use h2::RecvStream;
use h2::client::{ResponseFuture, SendRequest};
use http::{HeaderMap, Request, Response};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpSocket;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::{Certificate, PATIENCE, Site};

/// A window of more than any test sends.
pub const WIDE: u32 = 1 << 30;

/// Runs a test's future, for as long as anything may take.
pub fn run<F: Future>(test: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(PATIENCE, test).await.expect("the test's end") })
}

/// Waits, and lets the connections go on meanwhile.
pub async fn until(mut condition: impl FnMut() -> bool) {
    while !condition() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A connection over TLS on which HTTP/2 is to be spoken.
pub async fn encrypted<S: AsyncRead + AsyncWrite + Unpin>(
    socket: S,
    certificate: &Certificate,
) -> TlsStream<S> {
    let connector = TlsConnector::from(Certificate::client_config(&[certificate], b"h2"));
    connector.connect("a.example".try_into().unwrap(), socket).await.unwrap()
}

/// One connection.
pub struct Client {
    /// Where requests are sent.
    pub requests: SendRequest<Bytes>,
    /// Ends with it.
    pub connection: JoinHandle<Result<(), h2::Error>>,
}

impl Client {
    /// From the host's own address, which is exempt from being judged.
    pub async fn connect(site: &Site, certificate: &Certificate) -> Self {
        Self::with_window(site, certificate, WIDE).await
    }

    /// With streams of which the server may send so much before the client has taken any.
    pub async fn with_window(site: &Site, certificate: &Certificate, window_bytes: u32) -> Self {
        Self::connect_from([127, 0, 0, 1], site, certificate, window_bytes).await
    }

    /// From this address of the host's.
    pub async fn connect_from(
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
    pub async fn send(&mut self, request: http::request::Builder) -> ResponseFuture {
        let mut requests = self.requests.clone().ready().await.unwrap();
        requests.send_request(request.body(()).unwrap(), true).unwrap().0
    }

    /// Sends a GET; its response with content and trailers.
    pub async fn get(&mut self, target: &str) -> (Response<()>, Vec<u8>, Option<HeaderMap>) {
        let response = self.send(get(target)).await.await.unwrap();
        whole(response).await.unwrap()
    }

    /// Sends a request with content; the response may come before all of it is taken.
    pub async fn upload(
        &mut self,
        target: &str,
        content: Vec<u8>,
    ) -> Result<Response<RecvStream>, h2::Error> {
        let mut requests = self.requests.clone().ready().await.unwrap();
        let request = Request::put(url(target)).body(()).unwrap();
        let (response, mut stream) = requests.send_request(request, false).unwrap();
        let mut content = Bytes::from(content);
        while !content.is_empty() {
            stream.reserve_capacity(content.len());
            let Some(Ok(room)) = poll_fn(|context| stream.poll_capacity(context)).await else {
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

/// Of the site that tests have.
pub fn url(target: &str) -> String {
    format!("https://a.example{target}")
}

/// A GET for [`url`].
pub fn get(target: &str) -> http::request::Builder {
    Request::get(url(target))
}

/// All of a response, with its trailers.
pub async fn whole(
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

/// A field of a response; empty if there is none.
pub fn field<T>(response: &Response<T>, name: &str) -> String {
    response.headers().get(name).map_or(String::new(), |value| value.to_str().unwrap().to_owned())
}
