//! Requests to an authority: bounded in time and in size, and errors that say what was asked.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{CONTENT_TYPE, HOST, HeaderValue, RETRY_AFTER};
use http::{HeaderMap, Method, Request, Response, StatusCode, Uri};
use hyper::body::{Body, Incoming};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use instant_acme::{BodyWrapper, BytesResponse, Error, HttpClient};
use serde_json::Value;
use tidegate_accelerator::tls::Trust;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

/// From the connection to the last byte of the answer.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The longest answer: certificates and problems are of a few KiB.
const MOST_BYTES: usize = 1 << 20;
const MOST_HEAD_BYTES: usize = 64 * 1024;
const HTTPS_PORT: u16 = 443;
/// The longest pause that an authority may ask for.
const LONGEST_WAIT: Duration = Duration::from_secs(24 * 3600);

/// How long an authority has asked to be left alone, if it has (RFC 8555 §6.6).
#[derive(Clone, Default)]
pub(super) struct AskedToWait(Arc<Mutex<Option<Duration>>>);

impl AskedToWait {
    /// Since this was asked last.
    pub(super) fn take(&self) -> Option<Duration> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn note(&self, wait: Duration) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(wait);
    }
}

/// A connection for each request: an order has a dozen.
pub(super) struct Wire {
    trust: Trust,
    asked_to_wait: AskedToWait,
}

/// What was wrong with an answer, or that there was none.
#[derive(Debug, thiserror::Error)]
#[error("{url}: {why}")]
struct WireError {
    url: String,
    why: String,
}

impl Wire {
    /// To an authority that is known by `trust`.
    pub(super) fn new(trust: Trust, asked_to_wait: AskedToWait) -> Self {
        Self { trust, asked_to_wait }
    }
}

impl HttpClient for Wire {
    fn request(
        &self,
        request: Request<BodyWrapper<Bytes>>,
    ) -> Pin<Box<dyn Future<Output = Result<BytesResponse, Error>> + Send>> {
        let (trust, asked_to_wait) = (self.trust.clone(), self.asked_to_wait.clone());
        Box::pin(async move {
            let (url, is_directory) = (request.uri().to_string(), request.method() == Method::GET);
            let answer = tokio::time::timeout(TIMEOUT, ask(request, &trust)).await;
            let answer = answer.unwrap_or_else(|_| Err(format!("no answer within {} s", TIMEOUT.as_secs())));
            let checked = answer.and_then(|answer| {
                let answer = checked(answer, &asked_to_wait)?;
                if is_directory {
                    check_directory(answer.body())?;
                }
                Ok(answer)
            });
            let (parts, body) =
                checked.map_err(|why| Error::Other(Box::new(WireError { url, why })))?.into_parts();
            Ok(BytesResponse { parts, body: Box::new(body) })
        })
    }
}

async fn ask(mut request: Request<BodyWrapper<Bytes>>, trust: &Trust) -> Result<Response<Bytes>, String> {
    let authority = authority(request.uri()).ok_or("it is no URL with https")?;
    let (host, port) = (authority.host(), authority.port_u16().unwrap_or(HTTPS_PORT));
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let name = ServerName::try_from(host.to_owned()).map_err(|error| error.to_string())?;
    let socket =
        TcpStream::connect((host, port)).await.map_err(|error| format!("cannot connect: {error}"))?;
    let tls = TlsConnector::from(trust.config()).connect(name, socket).await;
    let tls = tls.map_err(|error| format!("cannot connect: {error}"))?;
    let value = HeaderValue::from_str(authority.as_str()).map_err(|error| error.to_string())?;
    request.headers_mut().insert(HOST, value);
    let target = request.uri().path_and_query().map_or("/", |target| target.as_str());
    *request.uri_mut() = target.parse().map_err(|_| "it has no path")?;
    let broken = |error: hyper::Error| super::plain(&super::with_sources(&error));
    let mut builder = http1::Builder::new();
    let (mut sender, connection) =
        builder.max_buf_size(MOST_HEAD_BYTES).handshake(TokioIo::new(tls)).await.map_err(broken)?;
    // It ends with the request, whatever becomes of that.
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    let (parts, body) = sender.send_request(request).await.map_err(broken)?.into_parts();
    Ok(Response::from_parts(parts, whole(body).await?))
}

fn authority(uri: &Uri) -> Option<http::uri::Authority> {
    uri.authority()
        .filter(|authority| uri.scheme_str() == Some("https") && !authority.host().is_empty())
        .cloned()
}

async fn whole(body: Incoming) -> Result<Bytes, String> {
    let mut body = pin!(body);
    let mut all = BytesMut::new();
    while let Some(frame) = poll_fn(|context| body.as_mut().poll_frame(context)).await {
        let frame = frame.map_err(|error| super::plain(&super::with_sources(&error)))?;
        let Ok(data) = frame.into_data() else { continue };
        if all.len() + data.len() > MOST_BYTES {
            return Err(format!("the answer is longer than {} KiB", MOST_BYTES / 1024));
        }
        all.extend_from_slice(&data);
    }
    Ok(all.freeze())
}

/// Errors that are no problem documents say only their status (RFC 8555 §6.7).
fn checked(mut answer: Response<Bytes>, asked_to_wait: &AskedToWait) -> Result<Response<Bytes>, String> {
    let status = answer.status();
    let kind =
        answer.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or("").to_owned();
    let wait = bounded_wait(answer.headers_mut());
    if let Some(wait) =
        wait.filter(|_| matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE))
    {
        asked_to_wait.note(wait);
    }
    match status.as_u16() {
        300..400 => Err(format!("status {status}: redirects are not followed")),
        400.. if !kind.contains("json") => Err(format!("status {status}")),
        _ if kind.contains("html") => {
            Err(format!("status {status} with a page for people: this is no authority's"))
        }
        _ => Ok(answer),
    }
}

/// What is asked for by `Retry-After` in seconds, which is bounded for whoever reads it next.
fn bounded_wait(headers: &mut HeaderMap) -> Option<Duration> {
    let seconds: u64 = headers.get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    let wait = Duration::from_secs(seconds).min(LONGEST_WAIT);
    headers.insert(RETRY_AFTER, wait.as_secs().into());
    Some(wait)
}

/// The library takes for granted that these are URLs.
fn check_directory(body: &[u8]) -> Result<(), String> {
    let directory: Value =
        serde_json::from_slice(body).map_err(|error| format!("it is no directory: {error}"))?;
    for key in ["newNonce", "newAccount", "newOrder"] {
        let uri = directory[key].as_str().and_then(|text| text.parse::<Uri>().ok());
        if uri.as_ref().and_then(authority).is_none() {
            return Err(format!("it is no directory: {key} is no URL with https"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: u16, kind: &str, retry_after: &str) -> Response<Bytes> {
        let builder =
            Response::builder().status(status).header(CONTENT_TYPE, kind).header(RETRY_AFTER, retry_after);
        builder.body(Bytes::new()).unwrap()
    }

    #[test]
    fn pauses_that_are_asked_for_are_bounded_for_everybody() {
        for (text, seconds) in
            [("17", Some(17)), ("18446744073709551615", Some(86_400)), ("-1", None), ("soon", None)]
        {
            let asked = AskedToWait::default();
            let passed = checked(answer(429, "application/problem+json", text), &asked).unwrap();
            assert_eq!(asked.take(), seconds.map(Duration::from_secs), "{text}");
            let expected = seconds.map_or(text.to_owned(), |seconds| seconds.to_string());
            assert_eq!(passed.headers()[RETRY_AFTER], expected.as_str());
            assert_eq!(asked.take(), None, "once");
        }
        let asked = AskedToWait::default();
        assert!(checked(answer(200, "application/json", "17"), &asked).is_ok() && asked.take().is_none());
    }

    #[test]
    fn answers_that_are_not_of_an_authority_say_their_status() {
        let said = |status, kind| checked(answer(status, kind, ""), &AskedToWait::default()).err();
        assert_eq!(said(200, "application/json"), None);
        assert_eq!(said(400, "application/problem+json"), None);
        assert_eq!(said(503, "text/html").unwrap(), "status 503 Service Unavailable");
        assert_eq!(said(302, "").unwrap(), "status 302 Found: redirects are not followed");
        assert!(said(200, "text/html").unwrap().contains("for people"));
    }

    #[test]
    fn directory_without_urls_is_none() {
        let directory = |nonce: &str| {
            let text =
                format!(r#"{{"newNonce":{nonce},"newAccount":"https://a/b","newOrder":"https://a/c"}}"#);
            check_directory(text.as_bytes())
        };
        assert_eq!(directory(r#""https://a/n""#), Ok(()));
        for wrong in [r#""""#, r#""not a uri""#, r#""http://a/n""#, r#""/n""#, "7", "null"] {
            assert!(directory(wrong).unwrap_err().contains("newNonce"), "{wrong}");
        }
        assert!(check_directory(b"<html>").is_err() && check_directory(b"[]").is_err());
    }
}
