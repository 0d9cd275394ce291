//! `tidegate fetch http://…`.

use std::io;
use std::time::Duration;

use super::{Answer, FetchArgs};
use crate::cli::Failure;
use crate::client::in_words;

/// How long an HTTP server may take to begin its response.
const HTTP_TIMEOUT: Duration = Duration::from_secs(60);

pub(super) fn fetch(args: &FetchArgs) -> Result<Answer, Failure> {
    fetch_from(args, &args.url, None)
}

/// Fetches `url`, which stands for that of `args`; Host says `host` where that is not the URL's.
pub(super) fn fetch_from(args: &FetchArgs, url: &str, host: Option<&str>) -> Result<Answer, Failure> {
    let asked = args.request.read()?;
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .http_status_as_error(false)
        .allow_non_standard_methods(true)
        .timeout_recv_response(Some(HTTP_TIMEOUT))
        .build()
        .into();
    let refused = |error: ureq::http::Error| Failure::usage(format!("error: {}: {error}", args.url));
    let mut request = ureq::http::Request::builder().method(asked.method.as_str()).uri(url);
    if let Some(host) = host {
        request = request.header("Host", host);
    }
    for (name, value) in &asked.fields {
        request = request.header(name, value);
    }
    let sent = match asked.content {
        Some(content) => agent.run(request.body(content).map_err(refused)?),
        None => agent.run(request.body(()).map_err(refused)?),
    };
    let mut response = sent.map_err(|error| args.failed(explain(&error)))?;
    args.show("* by HTTP");
    args.show(&format!("< {:?} {}", response.version(), response.status()));
    for (name, value) in response.headers() {
        args.show(&format!("< {name}: {}", String::from_utf8_lossy(value.as_bytes())));
    }
    let mut sink = args.sink(response.status().as_u16())?;
    let mut body = response.body_mut().as_reader();
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let length = io::Read::read(&mut body, &mut buffer).map_err(|error| args.failed(error))?;
        if length == 0 {
            break;
        }
        args.write(&mut *sink, buffer.get(..length).unwrap_or_default())?;
    }
    args.flush(&mut *sink)?;
    let location = response.headers().get("location");
    let location = location.map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
    Ok(Answer { status: response.status().as_u16(), location })
}

/// What went wrong, and what may help.
fn explain(error: &ureq::Error) -> String {
    let help = match error {
        ureq::Error::Protocol(_) => "what answers there speaks no HTTP; if it is a DHTTP port, use dhttp://",
        ureq::Error::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            "is the server running, and is it this port?"
        }
        ureq::Error::Io(error)
            if matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset) =>
        {
            "the server gave no answer; if it is a DHTTP port, use dhttp://"
        }
        _ => return in_words(error),
    };
    format!("{}; {help}", in_words(error))
}
