//! The commands that ask a running tidegate, over its admin server.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;

use crate::cli::Failure;

const TIMEOUT: Duration = Duration::from_secs(30);

/// `tidegate status`
pub(crate) fn status(admin: SocketAddr, json: bool) -> Result<(), Failure> {
    let status = ask(admin, "GET", "/status")?;
    if json {
        return print_json(&status);
    }
    println!("tidegate {}, up {} s", text(&status["version"]), status["uptime_s"]);
    for listener in array(&status["listeners"]) {
        println!("listening on {}", text(listener));
    }
    println!("enforced in user space: {}", text(&status["enforcement"]["reason"]));
    let cache = &status["cache"];
    println!(
        "cache: {} objects, {} of {} bytes, hit ratio {}",
        cache["objects"], cache["used_bytes"], cache["capacity_bytes"], status["hit_ratio"]
    );
    let rows: Vec<Vec<String>> = array(&status["upstreams"])
        .iter()
        .map(|row| {
            ["group", "server", "healthy", "in_progress", "requests", "failures", "last_error"]
                .map(|key| text(&row[key]))
                .into()
        })
        .collect();
    print_table(&["UPSTREAM", "SERVER", "HEALTHY", "BUSY", "REQUESTS", "FAILURES", "LAST ERROR"], &rows);
    let rows: Vec<Vec<String>> = status["counters"]
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(_, value)| value.as_u64() != Some(0))
        .map(|(name, value)| vec![name.clone(), value.to_string()])
        .collect();
    print_table(&["COUNTER", "VALUE"], &rows);
    Ok(())
}

/// `tidegate cache list`
pub(crate) fn cache_list(admin: SocketAddr, limit: usize, json: bool) -> Result<(), Failure> {
    let entries = ask(admin, "GET", &format!("/api/cache?limit={limit}"))?;
    if json {
        return print_json(&entries);
    }
    let rows: Vec<Vec<String>> = array(&entries)
        .iter()
        .map(|row| ["status", "size_bytes", "age_s", "ttl_s", "url"].map(|key| text(&row[key])).into())
        .collect();
    print_table(&["STATUS", "BYTES", "AGE S", "TTL S", "URL"], &rows);
    Ok(())
}

/// `tidegate cache purge`
pub(crate) fn purge(admin: SocketAddr, pattern: &str, json: bool) -> Result<(), Failure> {
    post(admin, &format!("/api/cache/purge?pattern={}", percent_encode(pattern)), json)
}

/// Commands that change something and answer with a sentence.
pub(crate) fn post(admin: SocketAddr, path: &str, json: bool) -> Result<(), Failure> {
    let answer = ask(admin, "POST", path)?;
    if json {
        return print_json(&answer);
    }
    println!("{}", text(&answer["message"]));
    Ok(())
}

fn ask(admin: SocketAddr, method: &str, path: &str) -> Result<Value, Failure> {
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .http_status_as_error(false)
        .timeout_global(Some(TIMEOUT))
        .build()
        .into();
    let url = format!("http://{admin}{path}");
    let sent = if method == "POST" { agent.post(&url).send_empty() } else { agent.get(&url).call() };
    let mut response = sent.map_err(|error| {
        Failure::runtime(format!(
            "error: no tidegate answers at {admin}: {error}; start one, or say where it is with --admin"
        ))
    })?;
    let status = response.status();
    let body = response.body_mut().read_to_string().unwrap_or_default();
    let value: Value = serde_json::from_str(&body).map_err(|_| {
        Failure::runtime(format!("error: {admin} is not a tidegate's admin server ({status})"))
    })?;
    if status.is_success() {
        Ok(value)
    } else {
        Err(Failure::runtime(format!("error: {}", text(&value["error"]))))
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

fn array(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

fn print_json(value: &Value) -> Result<(), Failure> {
    println!("{}", serde_json::to_string_pretty(value).unwrap_or_default());
    Ok(())
}

fn print_table(titles: &[&str], rows: &[Vec<String>]) {
    if rows.is_empty() {
        return;
    }
    let width = |column: usize| {
        rows.iter().map(|row| row[column].len()).chain([titles[column].len()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..titles.len()).map(width).collect();
    let line = |cells: &[String]| {
        let padded: Vec<String> =
            cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        println!("{}", padded.join("  ").trim_end());
    };
    line(&titles.iter().map(|title| (*title).to_owned()).collect::<Vec<_>>());
    for row in rows {
        line(row);
    }
}
