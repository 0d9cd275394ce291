//! The commands that ask a running tidegate, over its admin server.

use std::fmt::Write as _;
use std::io::Write as _;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::Value;

use crate::cli::{Failure, print};
use crate::fetch::printable;
use crate::gate::{commands, view};

const TIMEOUT: Duration = Duration::from_secs(30);
/// A new process reads a large cache first.
const UPGRADE_TIMEOUT: Duration = Duration::from_secs(15 * 60);

/// `tidegate status`
pub(crate) fn status(admin: SocketAddr, json: bool) -> Result<(), Failure> {
    let status = try_ask(admin, "GET", "/status", None).map_err(|error| match error {
        AskError::Absent(failure) if commands::is_any_attached() => Failure::runtime(format!(
            "{}; a gate is attached here: `tidegate gate show` tells of it",
            failure.message
        )),
        other => other.into(),
    })?;
    if json {
        return print_json(&status);
    }
    let mut out = String::new();
    let _ = writeln!(out, "tidegate {}, up {} s", text(&status["version"]), status["uptime_s"]);
    for listener in array(&status["listeners"]) {
        let listener = text(listener);
        let key = status["encryption_keys"][&listener].as_str();
        let key = key.map_or(String::new(), |key| format!(", key for encryption {key}"));
        let _ = writeln!(out, "listening on {listener}{key}");
    }
    write_certificates(&status, &mut out);
    view::text(&status["enforcement"], &mut out);
    let cache = &status["cache"];
    if cache.is_object() {
        let _ = writeln!(
            out,
            "cache: {} objects, {} of {} bytes, hit ratio {}",
            cache["objects"], cache["used_bytes"], cache["capacity_bytes"], status["hit_ratio"]
        );
    } else {
        out.push_str("cache: off\n");
    }
    write_upstreams(&status["upstreams"], &mut out);
    write_counters(&status["counters"], &mut out);
    print(&out)
}

fn write_certificates(status: &Value, out: &mut String) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let left = |at: &Value| at.as_i64().unwrap_or(0).saturating_sub_unsigned(now);
    for certificate in array(&status["certificates"]) {
        let left = left(&certificate["not_after"]);
        let valid = if left > 0 {
            format!("valid for {} days", left / (24 * 3600))
        } else {
            "not valid any more".into()
        };
        let _ = writeln!(out, "certificate {}: {valid}", text(&certificate["certificate"]));
    }
    for ordered in array(&status["acme"]).iter().filter(|ordered| ordered["under_way"] == true) {
        let _ = writeln!(out, "a certificate for {} is being ordered", text(&ordered["name"]));
    }
    for ordered in array(&status["acme"]).iter().filter(|ordered| ordered["last_error"].is_string()) {
        let (name, error) = (text(&ordered["name"]), text(&ordered["last_error"]));
        let minutes = left(&ordered["next_order"]).max(0) / 60;
        let _ = writeln!(out, "no new certificate for {name}: {error}; tried again in {minutes} min");
    }
}

fn write_upstreams(servers: &Value, out: &mut String) {
    const COLUMNS: [(&str, &str); 9] = [
        ("UPSTREAM", "group"),
        ("SERVER", "server"),
        ("HEALTHY", "healthy"),
        ("BUSY", "in_progress"),
        ("REQUESTS", "requests"),
        ("FAILURES", "failures"),
        ("PIPELINED", "pipelined"),
        ("REPEATED", "repeated"),
        ("LAST ERROR", "last_error"),
    ];
    let row = |server: &Value| COLUMNS.map(|(_, key)| text(&server[key])).into();
    let rows: Vec<Vec<String>> = array(servers).iter().map(row).collect();
    write_table(&COLUMNS.map(|(title, _)| title), &rows, out);
}

/// `tidegate cache list`
pub(crate) fn cache_list(admin: SocketAddr, limit: usize, json: bool) -> Result<(), Failure> {
    let entries = ask(admin, "GET", &format!("/api/cache?limit={limit}"))?;
    if json {
        return print_json(&entries);
    }
    let rows: Vec<Vec<String>> = array(&entries)
        .iter()
        .map(|row| {
            let of = |key: &str| text(&row[key]);
            let ttl = if row["ttl_s"].is_null() { "never".into() } else { of("ttl_s") };
            let selected_by = selection(&row["selected_by"]);
            vec![of("status"), of("size_bytes"), of("age_s"), ttl, of("url"), selected_by]
        })
        .collect();
    let mut out = String::new();
    write_table(&["STATUS", "BYTES", "AGE S", "TTL S", "URL", "SELECTED BY"], &rows, &mut out);
    print(&out)
}

/// The request fields that select a variant: `name: value`, or `no name`.
fn selection(fields: &Value) -> String {
    const SHOWN: usize = 60;
    let shown = |(name, value): (&String, &Value)| match value.as_str() {
        None => format!("no {name}"),
        Some(value) if value.chars().count() > SHOWN => {
            format!("{name}: {}…", printable(&value.chars().take(SHOWN).collect::<String>()))
        }
        Some(value) => format!("{name}: {}", printable(value)),
    };
    fields.as_object().into_iter().flatten().map(shown).collect::<Vec<_>>().join("; ")
}

/// `tidegate cache purge`
pub(crate) fn purge(admin: SocketAddr, pattern: &str, json: bool) -> Result<(), Failure> {
    post(admin, &format!("/api/cache/purge?pattern={}", percent_encode(pattern)), json)
}

/// `tidegate upgrade`
pub(crate) fn upgrade(admin: SocketAddr, json: bool) -> Result<(), Failure> {
    said(try_ask_within(UPGRADE_TIMEOUT, admin, "POST", "/api/upgrade", None), json)
}

/// Commands that change something and answer with a sentence.
pub(crate) fn post(admin: SocketAddr, path: &str, json: bool) -> Result<(), Failure> {
    said(try_ask(admin, "POST", path, None), json)
}

/// Prints the sentence, and warnings.
fn said(answer: Result<Value, AskError>, json: bool) -> Result<(), Failure> {
    let answer = match answer {
        Ok(answer) => answer,
        Err(AskError::Refused(failure)) if json => {
            let error = failure.message.strip_prefix("error: ").unwrap_or(&failure.message);
            print_json(&serde_json::json!({ "error": error }))?;
            return Err(failure);
        }
        Err(error) => return Err(error.into()),
    };
    if json {
        return print_json(&answer);
    }
    let mut err = std::io::stderr();
    for warning in array(&answer["warnings"]) {
        let _ = writeln!(err, "warning: {}", text(warning));
    }
    print(&format!("{}\n", text(&answer["message"])))
}

/// Why a running tidegate gave no answer.
pub(crate) enum AskError {
    /// There is none.
    Absent(Failure),
    /// It says no.
    Refused(Failure),
}

impl From<AskError> for Failure {
    fn from(error: AskError) -> Self {
        let (AskError::Absent(failure) | AskError::Refused(failure)) = error;
        failure
    }
}

pub(crate) fn ask(admin: SocketAddr, method: &str, path: &str) -> Result<Value, Failure> {
    Ok(try_ask(admin, method, path, None)?)
}

/// Posts JSON.
pub(crate) fn send(admin: SocketAddr, path: &str, body: &Value) -> Result<Value, AskError> {
    try_ask(admin, "POST", path, Some(body))
}

fn try_ask(admin: SocketAddr, method: &str, path: &str, body: Option<&Value>) -> Result<Value, AskError> {
    try_ask_within(TIMEOUT, admin, method, path, body)
}

fn try_ask_within(
    timeout: Duration,
    admin: SocketAddr,
    method: &str,
    path: &str,
    body: Option<&Value>,
) -> Result<Value, AskError> {
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .http_status_as_error(false)
        .timeout_global(Some(timeout))
        .build()
        .into();
    let url = format!("http://{admin}{path}");
    let sent = match (method, body) {
        ("POST", Some(body)) => agent.post(&url).content_type("application/json").send(body.to_string()),
        ("POST", None) => agent.post(&url).send_empty(),
        _ => agent.get(&url).call(),
    };
    let mut response = sent.map_err(|error| {
        AskError::Absent(Failure::runtime(format!(
            "error: no tidegate answers at {admin}: {}; start one, or say where it is with --admin",
            in_words(&error)
        )))
    })?;
    let status = response.status();
    let body = response.body_mut().read_to_string().unwrap_or_default();
    let value: Value = serde_json::from_str(&body).map_err(|_| {
        AskError::Absent(Failure::runtime(format!(
            "error: {admin} is not a tidegate's admin server ({status})"
        )))
    })?;
    if status.is_success() {
        Ok(value)
    } else {
        Err(AskError::Refused(Failure::runtime(format!("error: {}", text(&value["error"])))))
    }
}

/// What went wrong, without the library's own word for its kind.
pub(crate) fn in_words(error: &ureq::Error) -> String {
    match error {
        ureq::Error::Io(error) => error.to_string(),
        other => other.to_string(),
    }
}

fn percent_encode(text: &str) -> String {
    text.bytes()
        .map(
            |byte| {
                if byte.is_ascii_alphanumeric() {
                    char::from(byte).to_string()
                } else {
                    format!("%{byte:02X}")
                }
            },
        )
        .collect()
}

pub(crate) fn array(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Clients and servers have had a say in some of it.
pub(crate) fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.split('\n').map(printable).collect::<Vec<_>>().join("\n"),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

pub(crate) fn print_json(value: &Value) -> Result<(), Failure> {
    print(&format!("{value:#}\n"))
}

/// The counters that are not 0.
pub(crate) fn write_counters(counters: &Value, out: &mut String) {
    let rows: Vec<Vec<String>> = counters
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(_, value)| value.as_u64() != Some(0))
        .map(|(name, value)| vec![name.clone(), value.to_string()])
        .collect();
    write_table(&["COUNTER", "VALUE"], &rows, out);
}

pub(crate) fn write_table(titles: &[&str], rows: &[Vec<String>], out: &mut String) {
    if rows.is_empty() {
        return;
    }
    let width = |column: usize| {
        rows.iter().map(|row| row[column].len()).chain([titles[column].len()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..titles.len()).map(width).collect();
    let titles: Vec<String> = titles.iter().map(|title| (*title).to_owned()).collect();
    for row in std::iter::once(&titles).chain(rows) {
        let padded: Vec<String> =
            row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        let _ = writeln!(out, "{}", padded.join("  ").trim_end());
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_others_have_said_does_not_move_the_cursor_and_lines_stay_lines() {
        assert_eq!(text(&json!("one\ntwo \u{1b}[2J\u{202e}")), "one\ntwo \\u{1b}[2J\\u{202e}");
        assert_eq!(selection(&json!({ "accept": "\u{9b}2J" })), "accept: \\u{9b}2J");
        assert_eq!(text(&json!(7)), "7");
    }
}
