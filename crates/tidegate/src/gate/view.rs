//! What enforces which rule, as JSON and for people.

use std::fmt::Write;

use serde_json::{Value, json};
use tidegate_gate::{Blocked, Report, RuleKind};

/// What one gate enforces; `holder` says whose it is.
pub(crate) fn report(holder: &str, report: &Report) -> Value {
    let in_kernel = !report.totals.is_empty();
    let rules: Vec<Value> = report
        .rules
        .iter()
        .map(|rule| {
            let kind = match rule.kind {
                RuleKind::Connection => "connection",
                RuleKind::Request => "request",
            };
            json!({
                "kind": kind, "rule": rule.rule, "mechanism": rule.mechanism.to_string(),
                "why": rule.why.to_string(), "passed": rule.passed, "refused": rule.refused,
            })
        })
        .collect();
    let unavailable: Vec<Value> =
        report.unavailable.iter().map(|item| json!({ "what": item.what, "why": item.why })).collect();
    let totals: serde_json::Map<String, Value> =
        report.totals.iter().map(|sample| (sample.name.to_owned(), sample.value.into())).collect();
    let reason = match report.unavailable.first() {
        Some(item) if !in_kernel => item.why.clone(),
        _ if report.interfaces.is_empty() => "no interface is left".to_owned(),
        _ => format!("kernel programs on {}", report.interfaces.join(", ")),
    };
    json!({
        "holder": holder,
        "mechanism": if in_kernel { "kernel" } else { "user space" },
        "reason": reason,
        "interfaces": report.interfaces,
        "overload": report.overloaded,
        "rules": rules,
        "unavailable": unavailable,
        "blocked": { "addresses": report.blocked.addresses, "prefixes": report.blocked.prefixes },
        "totals": totals,
    })
}

/// One block.
pub(crate) fn block(blocked: &Blocked) -> Value {
    json!({
        "prefix": blocked.prefix.to_string(),
        "remaining_s": blocked.remaining.map(|time| time.as_secs()),
        "idle_s": blocked.since_hit.as_secs(),
        "hits": blocked.hits,
        "reason": blocked.reason,
        "listed": blocked.listed,
    })
}

/// A report for people: the table of rules, what cannot be had, the totals that are not 0.
pub(crate) fn text(gate: &Value, out: &mut String) {
    let of = crate::client::text;
    let _ = writeln!(
        out,
        "{}: enforced in {}: {}",
        of(&gate["holder"]),
        of(&gate["mechanism"]),
        of(&gate["reason"])
    );
    let overload = if gate["overload"] == true { "signalled" } else { "no" };
    let _ = writeln!(
        out,
        "overload: {overload}; blocked: {} addresses, {} prefixes",
        gate["blocked"]["addresses"], gate["blocked"]["prefixes"]
    );
    for item in crate::client::array(&gate["unavailable"]) {
        let _ = writeln!(out, "not available: {}: {}", of(&item["what"]), of(&item["why"]));
    }
    for (title, key) in [("agent", "agent"), ("classes", "classes")] {
        for line in crate::client::array(&gate[key]) {
            let _ = writeln!(out, "{title}: {}", of(line));
        }
    }
    let rows: Vec<Vec<String>> = crate::client::array(&gate["rules"])
        .iter()
        .map(|row| ["mechanism", "passed", "refused", "kind", "rule", "why"].map(|key| of(&row[key])).into())
        .collect();
    crate::client::write_table(&["WHERE", "PASSED", "REFUSED", "KIND", "RULE", "WHY THERE"], &rows, out);
    crate::client::write_counters(&gate["totals"], out);
}
