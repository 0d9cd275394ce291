//! `tidegate top` and `tidegate block explain`: who is there, what it costs, and why it was decided on.

use std::fmt::Write as _;
use std::io::IsTerminal;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use serde_json::Value;

use crate::cli::{Failure, print};
use crate::client::{array, ask, print_json, text, write_table};

const REFRESH: Duration = Duration::from_secs(2);
/// Clears the terminal and goes to its upper left corner.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// Shows who does most: once, or again and again on a terminal until it is interrupted.
pub(crate) fn top(admin: SocketAddr, limit: u16, once: bool, json: bool) -> Result<(), Failure> {
    let path = format!("/api/top?limit={limit}");
    if json {
        return print_json(&ask(admin, "GET", &path)?);
    }
    let is_live = !once && std::io::stdout().is_terminal();
    loop {
        let rows = table(&ask(admin, "GET", &path)?);
        print(&if is_live { format!("{CLEAR}{rows}") } else { rows })?;
        if !is_live {
            return Ok(());
        }
        std::thread::sleep(REFRESH);
    }
}

fn table(clients: &Value) -> String {
    let rows: Vec<Vec<String>> = array(clients).iter().map(row).collect();
    let mut out = "What clients have done within 10 s\n".to_owned();
    write_table(&TITLES, &rows, &mut out);
    if rows.is_empty() {
        out.push_str("nobody\n");
    }
    out
}

const TITLES: [&str; 8] =
    ["FROM", "REQUESTS", "OPEN", "UPSTREAM MS", "NEW URLS", "ERRORS", "SLOW", "DECIDED"];

fn row(level: &Value) -> Vec<String> {
    let decided = match (&level["blocked"], &level["suspect_s"]) {
        (Value::Null, Value::Null) => match level["violations"].as_u64().unwrap_or(0) {
            0 => String::new(),
            count => format!("{count} times"),
        },
        (Value::Null, left_s) => format!("suspect, {left_s} s more"),
        (blocked, _) => format!("blocked: {}, {} s more", text(&blocked["reason"]), blocked["left_s"]),
    };
    ["prefix", "requests", "open", "upstream_ms", "novel", "errors", "slow"]
        .iter()
        .map(|key| text(&level[*key]))
        .chain([decided])
        .collect()
}

/// Says all that is known about one address.
pub(crate) fn explain(admin: SocketAddr, address: IpAddr, json: bool) -> Result<(), Failure> {
    let known = ask(admin, "GET", &format!("/api/block/explain?address={address}"))?;
    if json {
        return print_json(&known);
    }
    let mut out = String::new();
    if array(&known["blocks"]).is_empty() {
        let _ = writeln!(out, "{address} is not on the block list");
    }
    for block in array(&known["blocks"]) {
        let _ = writeln!(
            out,
            "{address} is kept out by {}: {}",
            text(&block["prefix"]),
            match text(&block["reason"]) {
                _ if block["listed"] == Value::Bool(true) => "it stands in a file of block.files".to_owned(),
                reason if reason.is_empty() => "nobody said why".to_owned(),
                reason => reason,
            }
        );
    }
    if known["defence"] == Value::Bool(false) {
        out.push_str("clients are not watched: defence.enabled is false\n");
        return print(&out);
    }
    let rows: Vec<Vec<String>> = array(&known["levels"]).iter().map(row).collect();
    if rows.is_empty() {
        out.push_str("it has not been seen lately\n");
    } else {
        out.push_str("\nWhat it and the networks around it have done within 10 s\n");
        write_table(&TITLES, &rows, &mut out);
    }
    let decisions: Vec<Vec<String>> = array(&known["decisions"])
        .iter()
        .map(|decision| {
            let what = match decision["dry_run"] {
                Value::Bool(true) => format!("would {}", text(&decision["verdict"])),
                _ => text(&decision["verdict"]),
            };
            vec![
                utc(&decision["time_unix_s"]),
                what,
                match decision["filter"].as_u64() {
                    Some(number) => format!("filter {number}"),
                    None => text(&decision["reason"]),
                },
                text(&decision["requests"]),
                text(&decision["text"]),
            ]
        })
        .collect();
    if !decisions.is_empty() {
        out.push_str("\nWhat was decided about it, the latest first\n");
        write_table(&["TIME", "VERDICT", "REASON", "REQUESTS", "WHY"], &decisions, &mut out);
    }
    print(&out)
}

/// A time in seconds since 1970 as people read it.
fn utc(time_unix_s: &Value) -> String {
    let time_s = time_unix_s.as_f64().unwrap_or(0.0) as u64;
    String::from_utf8_lossy(&tidegate_http::date::format(time_s)).into_owned()
}
