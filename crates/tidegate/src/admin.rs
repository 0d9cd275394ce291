//! The admin server: metrics, status, cache and the dashboard, on a thread of its own, never on a data core.

mod connections;

use std::fmt::Write;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, FromRequestParts, Query, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tidegate_accelerator::{Engine, Histogram};
use tidegate_core::IpPrefix;
use tidegate_core::metrics::{Kind, Sample};
use tidegate_gate::{GateError, RuleReport};
use tokio::sync::watch;

pub(crate) use self::connections::Prepared;
use crate::gate::{Gatekeeper, view};
use crate::notify;
use crate::run::Reloader;
use crate::upgrade::{Upgraded, Upgrader};

/// Entries that one answer may list.
const MAX_ENTRIES: usize = 10_000;
/// Blocks that one answer may list.
const MAX_BLOCKS: usize = 100_000;
/// Clients that one answer may list.
const MAX_TOP: usize = 256;
/// Rules with metrics of their own; `/api/gate` has all.
const MAX_RULE_METRICS: usize = 1000;
/// A list of blocks is sent in parts.
const MAX_BODY_BYTES: usize = 2 << 20;

#[derive(Clone)]
struct Admin {
    engine: Engine,
    reloader: Arc<Reloader>,
    gatekeeper: Arc<Gatekeeper>,
    upgrader: Arc<Upgrader>,
}

/// Serves `listener` until the process ends or `closed` says so; then the thread ends when those who have asked have
/// their answers.
pub(crate) fn spawn(
    prepared: Prepared,
    engine: Engine,
    reloader: Arc<Reloader>,
    gatekeeper: Arc<Gatekeeper>,
    upgrader: Arc<Upgrader>,
    closed: watch::Receiver<bool>,
) -> io::Result<JoinHandle<()>> {
    let Prepared { listener, runtime } = prepared;
    let router = Router::new()
        .route("/", get(dashboard))
        .route("/metrics", get(metrics))
        .route("/status", get(status))
        .route("/api/cache", get(cache_list))
        .route("/api/cache/purge", post(purge))
        .route("/api/cache/save", post(save))
        .route("/api/reload", post(reload))
        .route("/api/drain", post(drain))
        .route("/api/upgrade", post(upgrade))
        .route("/api/gate", get(gate))
        .route("/api/block", get(block_list).post(block_add))
        .route("/api/block/remove", post(block_remove))
        .route("/api/block/explain", get(block_explain))
        .route("/api/top", get(top))
        .layer(middleware::from_fn(guard))
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .with_state(Admin { engine, reloader, gatekeeper, upgrader });
    std::thread::Builder::new().name("admin".into()).spawn(move || {
        runtime.block_on(connections::accept(listener, router, closed));
    })
}

/// A page on another site can make a browser send requests here: it must neither change anything (CSRF) nor read
/// answers under a name of its own (DNS rebinding).
async fn guard(request: Request, next: Next) -> Response {
    let headers = request.headers();
    if !host_is_an_address(headers) {
        return refuse(StatusCode::MISDIRECTED_REQUEST, "Host must be an address or localhost");
    }
    let from_elsewhere = headers.contains_key(header::ORIGIN) && !origin_is_host(headers)
        || headers
            .get("sec-fetch-site")
            .is_some_and(|site| site != "same-origin" && site != "none" && request.method() != Method::GET);
    if request.method() != Method::GET && request.method() != Method::HEAD && from_elsewhere {
        return refuse(StatusCode::FORBIDDEN, "requests from other sites change nothing here");
    }
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    for (name, value) in [
        (
            "content-security-policy",
            "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'",
        ),
        ("x-content-type-options", "nosniff"),
        ("cache-control", "no-store"),
    ] {
        headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    response
}

fn host_is_an_address(headers: &HeaderMap) -> bool {
    let Some(host) = headers.get(header::HOST).and_then(|host| host.to_str().ok()) else { return false };
    let name =
        host.rsplit_once(':').filter(|(_, port)| port.parse::<u16>().is_ok()).map_or(host, |(name, _)| name);
    let bare = name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    match bare {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => name.eq_ignore_ascii_case("localhost") || name.parse::<std::net::Ipv4Addr>().is_ok(),
    }
}

fn origin_is_host(headers: &HeaderMap) -> bool {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    match (text(header::ORIGIN), text(header::HOST)) {
        (Some(origin), Some(host)) => origin.strip_prefix("http://") == Some(host),
        _ => false,
    }
}

fn refuse(status: StatusCode, error: &str) -> Response {
    (status, Json(json!({ "error": error }))).into_response()
}

fn done(message: impl Into<String>) -> Response {
    Json(json!({ "message": message.into() })).into_response()
}

/// The query of a request's target; one that does not fit is refused in the form of every other refusal.
struct Params<T>(T);

impl<S: Sync, T: DeserializeOwned> FromRequestParts<S> for Params<T> {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Response> {
        let query = Query::try_from_uri(&parts.uri);
        query.map(|Query(query)| Self(query)).map_err(|error| refuse(error.status(), &error.body_text()))
    }
}

async fn dashboard() -> Html<&'static str> {
    Html(include_str!("dashboard.html"))
}

async fn metrics(State(admin): State<Admin>) -> Response {
    let mut text = String::new();
    let defence = admin.reloader.guard.as_ref().map(|guard| guard.defence().samples()).unwrap_or_default();
    let others = admin.reloader.trickles.samples().into_iter().chain(admin.reloader.acme.samples());
    let others = others.chain(admin.upgrader.samples());
    for sample in admin.engine.samples().into_iter().chain(others).chain(defence) {
        write_metric(&sample, &mut text);
    }
    write_latencies(&admin.engine.latencies(), &mut text);
    write_build(&mut text);
    write_upstreams(&admin.engine, &mut text);
    write_certificates(&admin.engine, &mut text);
    write_store(&admin.engine, &mut text);
    write_gate(&admin.gatekeeper, &mut text);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

fn write_metric(sample: &Sample, text: &mut String) {
    let kind = if sample.kind == Kind::Counter { "counter" } else { "gauge" };
    let name = sample.name;
    let _ = writeln!(
        text,
        "# HELP tidegate_{name} {}\n# TYPE tidegate_{name} {kind}\ntidegate_{name} {}",
        sample.help, sample.value
    );
}

fn write_latencies(histograms: &[Histogram], text: &mut String) {
    let name = "tidegate_request_duration_seconds";
    let _ = writeln!(
        text,
        "# HELP {name} Time from a request's head to the end of its response, by the cache's part in it.\n# TYPE {name} histogram"
    );
    for Histogram { source, at_most, sum_us } in histograms {
        let mut count = 0;
        for (bound_us, so_far) in at_most {
            let bound = bound_us.map_or("+Inf".to_owned(), |bound| (bound as f64 / 1e6).to_string());
            let _ = writeln!(text, "{name}_bucket{{cache=\"{source}\",le=\"{bound}\"}} {so_far}");
            count = *so_far;
        }
        let sum = *sum_us as f64 / 1e6;
        let _ = writeln!(
            text,
            "{name}_sum{{cache=\"{source}\"}} {sum}\n{name}_count{{cache=\"{source}\"}} {count}"
        );
    }
}

fn write_build(text: &mut String) {
    let _ = writeln!(
        text,
        "# HELP tidegate_build_info The version of this process, as a label.\n# TYPE tidegate_build_info gauge\ntidegate_build_info{{version=\"{}\"}} 1",
        env!("CARGO_PKG_VERSION")
    );
}

/// A label's value as the text format of Prometheus has it.
fn escape_label(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn write_upstreams(engine: &Engine, text: &mut String) {
    let servers = engine.upstream_status();
    let mut family = |name: &str,
                      kind: &str,
                      help: &str,
                      value: &dyn Fn(&tidegate_accelerator::UpstreamStatus) -> u64| {
        let _ =
            writeln!(text, "# HELP tidegate_upstream_{name} {help}\n# TYPE tidegate_upstream_{name} {kind}");
        for server in &servers {
            let _ = writeln!(
                text,
                "tidegate_upstream_{name}{{group=\"{}\",server=\"{}\"}} {}",
                escape_label(&server.group),
                escape_label(&server.server.to_string()),
                value(server)
            );
        }
    };
    family("healthy", "gauge", "Whether the server gets requests.", &|server| u64::from(server.healthy));
    family("in_progress", "gauge", "Requests in progress at the server.", &|server| server.in_progress);
    family("requests_total", "counter", "Requests sent to the server.", &|server| server.requests);
    family("failures_total", "counter", "Requests that the server failed.", &|server| server.failures);
    let help = "Requests sent to the server in one write with others, on a connection that they share.";
    family("pipelined_total", "counter", help, &|server| server.pipelined);
    let help = "Writes with several requests of which some had to be sent again.";
    family("pipeline_faults_total", "counter", help, &|server| server.pipeline_faults);
    let help = "Requests that had to be sent again because a connection for several did not answer them.";
    family("repeated_total", "counter", help, &|server| server.repeated);
}

fn write_certificates(engine: &Engine, text: &mut String) {
    let name = "tidegate_certificate_not_after_seconds";
    let _ = writeln!(
        text,
        "# HELP {name} When a certificate ends to be valid, in seconds since 1970.\n# TYPE {name} gauge"
    );
    for certificate in engine.certificates() {
        let label = escape_label(&certificate.certificate);
        let _ = writeln!(text, "{name}{{certificate=\"{label}\"}} {}", certificate.not_after_s);
    }
}

fn write_gate(gatekeeper: &Gatekeeper, text: &mut String) {
    let Ok(report) = gatekeeper.gate().show() else { return };
    for (name, help, value) in [
        ("gate_blocked_addresses", "Addresses on the block list.", report.blocked.addresses),
        ("gate_blocked_prefixes", "Prefixes on the block list.", report.blocked.prefixes),
        ("gate_interfaces", "Network interfaces with kernel programs.", report.interfaces.len()),
    ] {
        write_metric(&Sample { name, help, kind: Kind::Gauge, value: value as u64 }, text);
    }
    let evicted = Sample {
        name: "gate_blocks_evicted_total",
        help: "Blocked addresses that had to make room for others before their time.",
        kind: Kind::Counter,
        value: report.blocked.evicted,
    };
    for sample in std::iter::once(&evicted).chain(&report.totals) {
        write_metric(sample, text);
    }
    if report.rules.is_empty() {
        return;
    }
    for (name, help, of) in [
        (
            "passed",
            "Connections or requests that a rule let pass.",
            (|rule| rule.passed) as fn(&RuleReport) -> u64,
        ),
        ("refused", "Connections or requests that a rule refused.", |rule| rule.refused),
    ] {
        let _ = writeln!(
            text,
            "# HELP tidegate_gate_rule_{name}_total {help}\n# TYPE tidegate_gate_rule_{name}_total counter"
        );
        for rule in report.rules.iter().take(MAX_RULE_METRICS) {
            let label = escape_label(&rule.rule);
            let _ = writeln!(
                text,
                "tidegate_gate_rule_{name}_total{{rule=\"{label}\",mechanism=\"{}\"}} {}",
                rule.mechanism,
                of(rule)
            );
        }
    }
}

fn write_store(engine: &Engine, text: &mut String) {
    let Some(store) = engine.store() else { return };
    let stats = store.stats();
    for (name, kind, help, value) in [
        ("store_objects", Kind::Gauge, "Objects in the cache.", stats.objects),
        ("store_capacity_bytes", Kind::Gauge, "The cache's budget.", stats.capacity_bytes),
        ("store_used_bytes", Kind::Gauge, "Bytes of the cache in use.", stats.used_bytes),
        ("store_evictions_total", Kind::Counter, "Objects evicted to make room.", stats.evictions),
        (
            "store_insert_failures_total",
            Kind::Counter,
            "Objects for which there was no room.",
            stats.insert_failures,
        ),
        (
            "store_torn_dropped_total",
            Kind::Counter,
            "Damaged objects dropped, never served.",
            stats.torn_dropped,
        ),
    ] {
        write_metric(&Sample { name, help, kind, value }, text);
    }
}

async fn status(State(admin): State<Admin>) -> Json<Value> {
    let engine = &admin.engine;
    let counters: serde_json::Map<String, Value> = engine
        .samples()
        .iter()
        .chain(&admin.reloader.trickles.samples())
        .chain(&admin.reloader.acme.samples())
        .chain(&admin.upgrader.samples())
        .chain(&admin.reloader.guard.as_ref().map(|guard| guard.defence().samples()).unwrap_or_default())
        .map(|sample| (sample.name.to_owned(), sample.value.into()))
        .collect();
    let counter = |name: &str| counters.get(name).and_then(Value::as_u64).unwrap_or(0);
    let hits = counter("cache_hits_total") + counter("cache_stale_total");
    let lookups = hits + counter("cache_misses_total");
    let hit_ratio = if lookups == 0 { 0.0 } else { (hits as f64 / lookups as f64 * 1000.0).round() / 1000.0 };
    let cache = engine.store().map(|store| {
        let stats = store.stats();
        json!({
            "objects": stats.objects,
            "capacity_bytes": stats.capacity_bytes,
            "used_bytes": stats.used_bytes,
            "evictions": stats.evictions,
            "insert_failures": stats.insert_failures,
        })
    });
    let upstreams: Vec<Value> = engine
        .upstream_status()
        .iter()
        .map(|server| {
            json!({
                "group": server.group, "server": server.server.to_string(), "healthy": server.healthy,
                "in_progress": server.in_progress, "requests": server.requests, "failures": server.failures,
                "pipelined": server.pipelined, "pipeline_faults": server.pipeline_faults,
                "repeated": server.repeated, "last_error": server.last_error,
            })
        })
        .collect();
    let (trickles, keys): (Vec<String>, Vec<String>) =
        admin.reloader.trickles.listeners().into_iter().unzip();
    let keys: serde_json::Map<String, Value> =
        trickles.iter().cloned().zip(keys.into_iter().map(Value::from)).collect();
    let listeners: Vec<String> = admin.reloader.listeners().chain(trickles).collect();
    Json(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "uptime_s": engine.uptime().as_secs(),
        "listeners": listeners,
        "encryption_keys": keys,
        "certificates": certificates(engine),
        "acme": admin.reloader.acme.status(),
        "enforcement": enforcement(&admin.gatekeeper),
        "hit_ratio": hit_ratio,
        "cache": cache,
        "upstreams": upstreams,
        "counters": counters,
    }))
}

/// Which certificates clients are shown, and how long.
fn certificates(engine: &Engine) -> Value {
    let known = engine.certificates();
    let certificates = known.iter().map(|known| {
        json!({ "certificate": known.certificate, "not_before": known.not_before_s, "not_after": known.not_after_s })
    });
    certificates.collect()
}

/// What enforces which rule.
fn enforcement(gatekeeper: &Gatekeeper) -> Value {
    match gatekeeper.gate().show() {
        Ok(report) => {
            let mut shown = view::report("tidegate run", &report);
            shown["classes"] = json!(gatekeeper.classes());
            shown["agent"] = json!(gatekeeper.explain());
            shown
        }
        Err(error) => {
            json!({ "holder": "tidegate run", "mechanism": "unknown", "reason": error.to_string() })
        }
    }
}

async fn gate(State(admin): State<Admin>) -> Json<Value> {
    Json(enforcement(&admin.gatekeeper))
}

async fn block_list(State(admin): State<Admin>, Params(query): Params<ListQuery>) -> Response {
    let limit = query.limit.unwrap_or(1000).min(MAX_BLOCKS);
    match admin.gatekeeper.gate().blocks().list() {
        Ok(blocks) => {
            Json(Value::Array(blocks.iter().take(limit).map(view::block).collect())).into_response()
        }
        Err(error) => refuse(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}

#[derive(Deserialize)]
struct Block {
    prefixes: Vec<String>,
    /// Absent: as configured; 0: for ever.
    for_ms: Option<u64>,
    reason: Option<String>,
}

async fn block_add(State(admin): State<Admin>, Json(block): Json<Block>) -> Response {
    let prefixes: Result<Vec<IpPrefix>, String> = block
        .prefixes
        .iter()
        .map(|text| text.parse().map_err(|error| format!("{text:?}: {error}")))
        .collect();
    let prefixes = match prefixes {
        Ok(prefixes) => prefixes,
        Err(error) => return refuse(StatusCode::BAD_REQUEST, &error),
    };
    let lifetime = block.for_ms.map_or_else(|| admin.gatekeeper.settings().block_for, Duration::from_millis);
    let gate = admin.gatekeeper.gate();
    let blocks = gate.blocks();
    let add = || {
        let before = blocks.evicted()?;
        blocks.add_many(&prefixes, Some(lifetime).filter(|time| !time.is_zero()))?;
        let evicted = blocks.evicted()?.saturating_sub(before);
        let reason = block.reason.as_deref().unwrap_or_default();
        if !reason.is_empty() {
            prefixes.iter().try_for_each(|prefix| blocks.set_reason(*prefix, reason))?;
        }
        Ok(evicted)
    };
    match add() {
        Ok(evicted) => {
            let message = match prefixes.as_slice() {
                [one] => format!("{one} is blocked"),
                all => format!("{} addresses and prefixes are blocked", all.len()),
            };
            Json(json!({ "message": message, "evicted": evicted })).into_response()
        }
        Err(error @ GateError::Full { .. }) => refuse(StatusCode::INSUFFICIENT_STORAGE, &error.to_string()),
        Err(error) => refuse(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}

#[derive(Deserialize)]
struct Unblock {
    prefix: String,
}

async fn block_remove(State(admin): State<Admin>, Json(unblock): Json<Unblock>) -> Response {
    let prefix: IpPrefix = match unblock.prefix.parse() {
        Ok(prefix) => prefix,
        Err(error) => return refuse(StatusCode::BAD_REQUEST, &format!("{:?}: {error}", unblock.prefix)),
    };
    let lifted = admin.reloader.guard.as_ref().is_some_and(|guard| guard.lift(prefix));
    match admin.gatekeeper.gate().blocks().remove(&prefix) {
        Ok(removed) => Json(json!({ "removed": removed || lifted })).into_response(),
        Err(error) => refuse(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}

#[derive(Deserialize)]
struct ExplainQuery {
    address: IpAddr,
}

/// Everything that is known about one address: whether it is blocked, what it and the prefixes around it do, and what
/// was decided about it.
async fn block_explain(State(admin): State<Admin>, Params(query): Params<ExplainQuery>) -> Response {
    let address = query.address.to_canonical();
    let blocks = match admin.gatekeeper.gate().blocks().list() {
        Ok(blocks) => blocks,
        Err(error) => return refuse(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    };
    let blocks: Vec<Value> =
        blocks.iter().filter(|blocked| blocked.prefix.contains(address)).map(view::block).collect();
    let known = match &admin.reloader.guard {
        Some(guard) => guard.explain(address).await,
        None => json!({ "levels": [], "decisions": [] }),
    };
    Json(json!({
        "address": address,
        "defence": admin.reloader.guard.is_some(),
        "blocks": blocks,
        "levels": known["levels"],
        "decisions": known["decisions"],
    }))
    .into_response()
}

async fn top(State(admin): State<Admin>, Params(query): Params<ListQuery>) -> Response {
    let Some(guard) = &admin.reloader.guard else {
        return refuse(StatusCode::CONFLICT, "nobody watches clients: defence.enabled is false");
    };
    Json(Value::Array(guard.top(query.limit.unwrap_or(20).min(MAX_TOP)).await)).into_response()
}

#[derive(Deserialize)]
struct ListQuery {
    limit: Option<usize>,
}

async fn cache_list(State(admin): State<Admin>, Params(query): Params<ListQuery>) -> Json<Value> {
    let limit = query.limit.unwrap_or(100).min(MAX_ENTRIES);
    let entries: Vec<Value> = admin
        .engine
        .cache_entries(limit)
        .into_iter()
        .map(|entry| {
            let selected_by: serde_json::Map<String, Value> =
                entry.selected_by.into_iter().map(|(name, value)| (name, value.into())).collect();
            json!({
                "url": entry.url, "status": entry.status, "size_bytes": entry.size_bytes,
                "age_s": entry.age_s, "ttl_s": entry.ttl_s, "tags": entry.tags,
                "selected_by": selected_by,
            })
        })
        .collect();
    Json(Value::Array(entries))
}

#[derive(Deserialize)]
struct PurgeQuery {
    pattern: String,
}

async fn purge(State(admin): State<Admin>, Params(query): Params<PurgeQuery>) -> Response {
    match query.pattern.parse().and_then(|pattern| admin.engine.purge(&pattern)) {
        Ok(removed) => {
            let message = if removed == 1 {
                "1 response removed".into()
            } else {
                format!("{removed} responses removed")
            };
            Json(json!({ "message": message, "removed": removed })).into_response()
        }
        Err(error) => refuse(StatusCode::BAD_REQUEST, &format!("pattern: {error}")),
    }
}

async fn save(State(admin): State<Admin>) -> Response {
    let Some(store) = admin.engine.store().cloned() else { return done("the cache is off") };
    if !admin.reloader.keeps_the_cache() {
        return done("the cache is in memory only and ends with the process: cache.path gives it a file");
    }
    match tokio::task::spawn_blocking(move || store.sync()).await {
        Ok(Ok(())) => done("the cache is written to its file"),
        Ok(Err(error)) => refuse(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
        Err(error) => refuse(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}

async fn reload(State(admin): State<Admin>) -> Response {
    let reloader = Arc::clone(&admin.reloader);
    match tokio::task::spawn_blocking(move || reloader.reload()).await {
        Ok(Ok(warnings)) => {
            let warnings: Vec<String> = warnings.iter().map(ToString::to_string).collect();
            Json(json!({ "message": admin.reloader.done(), "warnings": warnings })).into_response()
        }
        Ok(Err(error)) => {
            refuse(StatusCode::CONFLICT, &format!("the old configuration stays in force: {error}"))
        }
        Err(error) => refuse(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}

async fn upgrade(State(admin): State<Admin>) -> Response {
    let upgrader = Arc::clone(&admin.upgrader);
    match tokio::task::spawn_blocking(move || upgrader.upgrade()).await {
        Ok(Ok(Upgraded { pid, version })) => {
            let message = format!("tidegate {version} serves now, as process {pid}");
            Json(json!({ "message": message, "pid": pid, "version": version })).into_response()
        }
        Ok(Err(error)) => refuse(StatusCode::CONFLICT, &format!("no upgrade: {error}")),
        Err(error) => refuse(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}

async fn drain(State(admin): State<Admin>) -> Response {
    notify::stopping();
    admin.engine.drain();
    done("draining: no new connections, requests in progress finish")
}
