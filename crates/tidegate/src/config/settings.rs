//! From checked values to the engine's settings, and the checks that concern more than one value.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use tidegate_accelerator::settings::{
    AccessLog, Balance, Cache, Certificate, Coding, Compression, HealthCheck, Limits, Listener, LogFormat,
    Protocol, ServerAddress, Settings, TlsServer, Upstream, UpstreamTls,
};
use tidegate_dhttp::ports::ClientPorts;
use tidegate_http::HeadLimits;
use tidegate_http::normalize::Personality;
use tidegate_trickles::udp::Format;

use super::report::{Finding, Report};
use super::walk::Values;
use super::{Loaded, Places, defence, routes, rules};
use crate::trickles::TricklesListener;
use crate::units::ListenAddress;

/// Builds the settings. They are fit for use only if the report holds no error afterwards.
pub(super) fn build(file: &Values, report: &mut Report<'_>) -> Loaded {
    let (listen, trickles) = listeners(file, report);
    let upstreams = upstreams(file, report);
    let routes = routes::routes(file, report);
    let required = routes::required(file, &routes, report);
    let settings = Settings {
        workers: file.integer("workers").map_or_else(cores, to_usize),
        listeners: listen.iter().map(|(_, listener)| listener.clone()).collect(),
        certificates: certificates(file, report),
        issued: Arc::default(),
        https_only: https_only(file, report),
        upstreams,
        routes,
        cache: file.table("cache").map(|values| cache(values, report)).unwrap_or_default(),
        compression: file.table("compression").map(compression).unwrap_or_default(),
        client_directives: file.table("cache").and_then(|values| values.flag("client_directives"))
            != Some(false),
        limits: file.table("limits").map(|values| limits(values, report)).unwrap_or_default(),
        trusted_proxies: file.prefixes("trusted_proxies"),
        personality: personality(file),
        pseudonym: file.text("pseudonym").unwrap_or_default(),
        access_log: file.table("log").and_then(|values| access_log(values, report)),
        icap: super::icap::build(file, personality(file), report),
        connections: None,
        requests: None,
        defence: None,
    };
    let mut gate = rules::build(file, personality(file), report);
    let defence = defence::build(file, personality(file), report);
    let exempt = defence.settings.exempt.iter().map(|exemption| exemption.source);
    gate.spared = exempt.chain(defence.settings.trusted_proxies.iter().copied()).collect();
    let acme = super::acme::build(file, report);
    let admin = admin(file, report);
    meeting(&admin, &listen, file, report);
    let listen = listen.into_iter().map(|(listen, _)| listen).collect();
    let places = Places::of(file, report);
    Loaded { settings, listen, trickles, admin, places, required, gate, defence, acme, warnings: Vec::new() }
}

/// What the file leaves to the command line.
pub(super) fn missing(loaded: &Loaded, file: &str) -> Vec<Finding> {
    let finding = |message: &str, hint: &str| Finding {
        file: file.to_owned(),
        place: None,
        message: message.into(),
        hint: Some(hint.into()),
    };
    let mut missing = Vec::new();
    if loaded.settings.listeners.is_empty() && loaded.trickles.is_empty() {
        missing.push(finding("nowhere to listen", "add a [[listen]], or start with --listen ADDR"));
    }
    if loaded.settings.routes.is_empty() {
        missing
            .push(finding("nothing to serve", "add a [[route]], or start with --upstream URL or --root DIR"));
    }
    missing
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn to_usize(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

pub(super) fn personality(file: &Values) -> Personality {
    file.text("personality").and_then(|text| text.parse().ok()).unwrap_or(Personality::Strict)
}

fn admin(file: &Values, report: &mut Report<'_>) -> ListenAddress {
    let section = file.table("admin");
    let address = section
        .and_then(|values| values.listen("address"))
        .unwrap_or_else(|| ListenAddress { written: String::new(), address: ([127, 0, 0, 1], 0).into() });
    if let Some(offset) = section.and_then(|values| values.offset_of("address"))
        && !address.address.ip().is_loopback()
    {
        report.warn(
            offset,
            "admin.address is not a loopback address: whoever reaches it can purge, reload and drain".into(),
        );
    }
    address
}

/// Two servers cannot take the same connections. (A Trickles listener takes none of TCP's.)
fn meeting(
    admin: &ListenAddress,
    listen: &[(ListenAddress, Listener)],
    file: &Values,
    report: &mut Report<'_>,
) {
    let Some((met, _)) = listen.iter().find(|(listen, _)| listen.overlaps(admin)) else { return };
    match file.table("admin").and_then(|section| section.offset_of("address")) {
        Some(offset) => {
            let message = format!(
                "admin.address: {:?} is where the [[listen]] {:?} listens",
                admin.written, met.written
            );
            report.error(offset, message, Some("choose another port".into()));
        }
        // `run --admin` may still choose another.
        None => report.warn(
            file.tables("listen").first().map_or(0, |section| section.offset),
            format!(
                "listen.address: {:?} is where the admin server listens; choose another with admin.address",
                met.written
            ),
        ),
    }
}

/// Those of HTTP and DHTTP, and those of Trickles. A TCP and a UDP port of one number do not meet.
fn listeners(
    file: &Values,
    report: &mut Report<'_>,
) -> (Vec<(ListenAddress, Listener)>, Vec<TricklesListener>) {
    let mut tcp: Vec<(ListenAddress, Listener)> = Vec::new();
    let mut trickles: Vec<TricklesListener> = Vec::new();
    for section in file.tables("listen") {
        let proxy_protocol = proxy_protocol(section, file, report);
        let http3 = http3(section, report);
        let Some(listen) = section.listen("address") else { continue };
        if section.text("protocol").as_deref() == Some("trickles") {
            let known = trickles.iter().map(|listener| &listener.listen);
            if is_free(&listen, known, section, report) {
                trickles.push(trickles_listener(listen, section, report));
            }
        } else {
            let known = tcp.iter().map(|(listen, _)| listen);
            if is_free(&listen, known, section, report) {
                let protocol = protocol(&listen, section, report);
                let http2 = http2(section, report);
                let listener = Listener { address: listen.address, protocol, proxy_protocol, http2, http3 };
                tcp.push((listen, listener));
            }
        }
    }
    for (listen, _) in tcp.iter().filter(|(_, listener)| listener.http3) {
        let Some(met) = trickles.iter().map(|listener| &listener.listen).find(|known| known.overlaps(listen))
        else {
            continue;
        };
        let mut sections = file.tables("listen").iter();
        let of_listener = |section: &&Values| {
            let is_at = |it: ListenAddress| it.address == listen.address;
            section.offset_of("http3").is_some() && section.listen("address").is_some_and(is_at)
        };
        let offset = sections.find(of_listener).and_then(|section| section.offset_of("http3"));
        let message = format!("listen.http3: at this UDP port listens the [[listen]] {:?}", met.written);
        report.error(offset.unwrap_or(0), message, Some("choose another port for one of them".into()));
    }
    (tcp, trickles)
}

/// Whether connections begin with a PROXY header: from whoever may send one, which has to be somebody.
fn proxy_protocol(section: &Values, file: &Values, report: &mut Report<'_>) -> bool {
    let is_wished = section.flag("proxy_protocol") == Some(true);
    let Some(offset) = section.offset_of("proxy_protocol").filter(|_| is_wished) else { return is_wished };
    if matches!(section.text("protocol").as_deref(), Some("dhttp" | "trickles")) {
        let message = "listen.proxy_protocol: only protocol = \"http\" and \"https\" have it".to_owned();
        report.error(offset, message, None);
    } else if file.prefixes("trusted_proxies").is_empty() && !file.is_wrong("trusted_proxies") {
        report.error(
            offset,
            "listen.proxy_protocol: nobody may send a PROXY header".to_owned(),
            Some("name the balancer in trusted_proxies".to_owned()),
        );
    }
    is_wished
}

/// Whether HTTP/2 is spoken in the clear; over TLS it is anyway.
fn http2(section: &Values, report: &mut Report<'_>) -> bool {
    let is_wished = section.flag("http2") == Some(true);
    let is_http = section.text("protocol").is_none_or(|protocol| protocol == "http");
    if let Some(offset) = section.offset_of("http2").filter(|_| is_wished && !is_http) {
        let message =
            "listen.http2: only protocol = \"http\" has it; \"https\" always speaks HTTP/2".to_owned();
        report.error(offset, message, None);
    }
    is_wished
}

/// Whether HTTP/3 is spoken beside HTTP over TLS.
fn http3(section: &Values, report: &mut Report<'_>) -> bool {
    let is_wished = section.flag("http3") == Some(true);
    let Some(offset) = section.offset_of("http3").filter(|_| is_wished) else { return false };
    if section.text("protocol").as_deref() != Some("https") {
        let message = "listen.http3: only protocol = \"https\" has it".to_owned();
        report.error(offset, message, None);
    } else if section.flag("proxy_protocol") == Some(true) {
        let message = "listen.http3: a balancer's PROXY header comes by TCP alone".to_owned();
        let hint = "leave out `http3`, or `proxy_protocol`".to_owned();
        report.error(offset, message, Some(hint));
    }
    true
}

/// With nobody who speaks TLS, clients would be sent to where nothing is.
fn https_only(file: &Values, report: &mut Report<'_>) -> bool {
    let is_wished = file.flag("https_only") == Some(true);
    let speaks_tls =
        file.tables("listen").iter().any(|section| section.text("protocol").as_deref() == Some("https"));
    if is_wished && !speaks_tls && file.prefixes("trusted_proxies").is_empty() {
        report.error(
            file.offset_of("https_only").unwrap_or(0),
            "https_only: nothing here speaks https".to_owned(),
            Some(
                "add a [[listen]] with protocol = \"https\", or name the proxy that does in trusted_proxies"
                    .to_owned(),
            ),
        );
    }
    is_wished
}

/// Whether none of the `known` listeners takes what this one would; otherwise that is reported.
fn is_free<'a>(
    listen: &ListenAddress,
    mut known: impl Iterator<Item = &'a ListenAddress>,
    section: &Values,
    report: &mut Report<'_>,
) -> bool {
    let Some(known) = known.find(|known| known.overlaps(listen)) else { return true };
    let offset = section.offset_of("address").unwrap_or(section.offset);
    if known.address == listen.address {
        let message = format!("listen.address: {:?} is listed twice", listen.written);
        report.error(offset, message, None);
    } else {
        let message = format!("listen.address: {:?} overlaps {:?}", listen.written, known.written);
        let hint = ":PORT and [::]:PORT take IPv4 too, and 0.0.0.0:PORT every IPv4 address".to_owned();
        report.error(offset, message, Some(hint));
    }
    false
}

fn trickles_listener(listen: ListenAddress, section: &Values, report: &mut Report<'_>) -> TricklesListener {
    let format = match section.text("format").as_deref() {
        Some("tcp") => Format::Tcp,
        _ => Format::Udp,
    };
    if let (Some(offset), Format::Udp) = (section.offset_of("interface"), format) {
        report.error(offset, "listen.interface: only format = \"tcp\" has it".to_owned(), None);
    }
    let count = |key| section.integer(key).map_or(0, |entries| entries as usize);
    TricklesListener {
        listen,
        keys: section.path("keys"),
        format,
        interface: section.text("interface"),
        cache_entries: count("cache_entries"),
        replay_entries: count("replay_entries"),
        require_encryption: section.text("encryption").as_deref() == Some("required"),
    }
}

/// What a listener other than those of Trickles speaks.
fn protocol(listen: &ListenAddress, section: &Values, report: &mut Report<'_>) -> Protocol {
    for key in ["format", "interface", "cache_entries", "replay_entries", "keys", "encryption"] {
        if let Some(offset) = section.offset_of(key) {
            report.error(offset, format!("listen.{key}: only protocol = \"trickles\" has it"), None);
        }
    }
    let protocol = match section.text("protocol").as_deref() {
        Some("dhttp") => Protocol::Dhttp,
        Some("https") => Protocol::Https,
        _ => Protocol::Http,
    };
    if protocol == Protocol::Dhttp
        && let Err((why, hint)) = dhttp_port(listen.address.port())
    {
        let offset = section.offset_of("address").unwrap_or(section.offset);
        let message = format!("listen.address: {:?}: {why}", listen.written);
        report.error(offset, message, Some(hint.to_owned()));
    }
    protocol
}

fn certificates(file: &Values, report: &mut Report<'_>) -> Vec<Certificate> {
    let sections = file.tables("certificate");
    let mut tls =
        file.tables("listen").iter().filter(|section| section.text("protocol").as_deref() == Some("https"));
    let is_ordered = file.table("acme").is_some_and(|acme| !acme.texts("names").is_empty());
    match (sections.first(), tls.next()) {
        (None, Some(_)) if is_ordered => {}
        (None, Some(listen)) => report.warn(
            listen.offset_of("protocol").unwrap_or(listen.offset),
            "listen.protocol: https without a [[certificate]]: clients are shown one that this process makes, \
             and warn of it"
                .into(),
        ),
        (Some(section), None) => {
            report.warn(section.offset, "certificate: no [[listen]] has protocol = \"https\"".into());
        }
        _ => {}
    }
    sections.iter().filter_map(certificate).collect()
}

fn certificate(section: &Values) -> Option<Certificate> {
    Some(Certificate { chain: section.path("chain")?, key: section.path("key")? })
}

/// DHTTP §IV-C: servers and clients share no port. An error has a hint.
fn dhttp_port(port: u16) -> Result<(), (String, &'static str)> {
    if port == 0 {
        return Err(("DHTTP needs a definite port".into(), "name one from 1 to 32767, such as 8081"));
    }
    ClientPorts::default()
        .allow_server(port)
        .map_err(|error| (error.to_string(), "clients of DHTTP use these ports; choose a lower one"))
}

fn upstreams(file: &Values, report: &mut Report<'_>) -> Vec<Upstream> {
    let mut lines: HashMap<String, usize> = HashMap::new();
    let mut upstreams = Vec::new();
    for section in file.tables("upstream") {
        let Some(name) = section.text("name") else { continue };
        let offset = section.offset_of("name").unwrap_or(section.offset);
        if let Some(line) = lines.get(&name) {
            let message =
                format!("upstream.name: {name:?} is the name of the [[upstream]] in line {line} already");
            report.error(offset, message, None);
            continue;
        }
        lines.insert(name.clone(), report.line_of(offset));
        upstreams.push(upstream(name, section, report));
    }
    upstreams
}

fn upstream(name: String, section: &Values, report: &mut Report<'_>) -> Upstream {
    let is_required = section.flag("require") != Some(false);
    let mut servers = Vec::new();
    for at in section.servers("servers") {
        match at.value {
            Ok(addresses) => servers.extend(addresses),
            Err(message) if is_required => {
                report.error(at.offset, format!("upstream.servers: {message}"), None);
            }
            Err(message) => {
                let message = format!("upstream.servers: {message}; it gets no requests before a reload");
                report.warn(at.offset, message);
            }
        }
    }
    let tls =
        section.table("tls").map_or_else(UpstreamTls::default, |tls| upstream_tls(tls, &mut servers, report));
    let mut known = HashSet::new();
    if let Some(twice) = servers.iter().find(|server| !known.insert(*server)) {
        let offset = section.offset_of("servers").unwrap_or(section.offset);
        report.warn(offset, format!("upstream.servers: {twice} is listed twice, and is two servers then"));
    }
    let defaults = Upstream::new(name, servers);
    let idle_connections = section.integer("idle_connections").map(to_usize);
    let max_connections = section.integer("max_connections").map(to_usize);
    if let (Some(idle), Some(max), Some(offset)) =
        (idle_connections, max_connections, section.offset_of("idle_connections"))
        && idle > max
    {
        let message =
            format!("upstream.idle_connections: expected at most max_connections, {max}, not {idle}");
        report.error(offset, message, None);
    }
    let http2 = section.flag("http2") == Some(true);
    if http2
        && section.integer("pipeline").is_some_and(|requests| requests > 1)
        && let Some(offset) = section.offset_of("pipeline")
    {
        let message = "upstream.pipeline: by HTTP/2 no request waits for another, and is not sent behind it";
        report.error(offset, message.to_owned(), Some("leave out `pipeline`, or `http2`".into()));
    }
    Upstream {
        balance: match section.text("balance").as_deref() {
            Some("least-connections") => Balance::LeastConnections,
            Some("hash-url") => Balance::HashUrl,
            Some("hash-host") => Balance::HashHost,
            _ => Balance::RoundRobin,
        },
        connect_timeout: section.duration("connect_timeout").unwrap_or(defaults.connect_timeout),
        response_timeout: section.duration("response_timeout").unwrap_or(defaults.response_timeout),
        idle_timeout: section.duration("idle_timeout").unwrap_or(defaults.idle_timeout),
        idle_connections: idle_connections.unwrap_or(defaults.idle_connections),
        max_connections: max_connections.unwrap_or(defaults.max_connections),
        http2,
        pipeline: section.integer("pipeline").map(to_usize).unwrap_or(defaults.pipeline),
        pipeline_timeout: section.duration("pipeline_timeout").unwrap_or(defaults.pipeline_timeout),
        max_failures: section
            .integer("max_failures")
            .and_then(|failures| u32::try_from(failures).ok())
            .unwrap_or(defaults.max_failures),
        fail_timeout: section.duration("fail_timeout").unwrap_or(defaults.fail_timeout),
        health_check: section.table("health_check").and_then(health_check),
        tls,
        ..defaults
    }
}

/// A name that is wished for takes the place of the servers' own.
fn upstream_tls(section: &Values, servers: &mut [ServerAddress], report: &mut Report<'_>) -> UpstreamTls {
    let is_tls = |server: &ServerAddress| matches!(server, ServerAddress::Tls(_));
    let has_any = ["name", "authority", "certificate"].iter().any(|key| section.has(key));
    if (has_any || section.flag("verify") == Some(false)) && !servers.iter().any(is_tls) {
        report.warn(section.offset, "upstream.tls: none of the servers has `https://`".into());
    }
    if let (Some(name), Some(offset)) = (section.text("name"), section.offset_of("name")) {
        for server in servers {
            let ServerAddress::Tls(known) = server else { continue };
            match TlsServer::new(known.address, &name) {
                Some(named) => *known = named,
                None => {
                    let message = format!("upstream.tls.name: expected a host or an address, not {name:?}");
                    report.error(offset, message, Some("for example \"app.example.org\"".into()));
                    break;
                }
            }
        }
    }
    let certificate = section.table("certificate").and_then(certificate);
    UpstreamTls {
        verify: section.flag("verify") != Some(false),
        authority: section.path("authority"),
        certificate,
    }
}

fn health_check(section: &Values) -> Option<HealthCheck> {
    Some(HealthCheck {
        path: section.text("path")?,
        host: section.text("host"),
        status: section.integer("status").and_then(|status| u16::try_from(status).ok()),
        interval: section.duration("interval")?,
        timeout: section.duration("timeout")?,
        fall: section.integer("fall").and_then(|checks| u32::try_from(checks).ok())?,
        rise: section.integer("rise").and_then(|checks| u32::try_from(checks).ok())?,
    })
}

fn cache(section: &Values, report: &mut Report<'_>) -> Cache {
    let defaults = Cache::default();
    let memory_bytes = section.integer("memory").unwrap_or(defaults.memory_bytes);
    let max_object_bytes = section.integer("max_object").unwrap_or(defaults.max_object_bytes);
    if memory_bytes == 0 {
        for (key, offset) in ["path", "max_object"].map(|key| (key, section.offset_of(key))) {
            if let Some(offset) = offset {
                report.warn(offset, format!("cache.{key} has no effect: the cache is off"));
            }
        }
    } else if max_object_bytes > memory_bytes
        && let Some(offset) = section.offset_of("max_object")
    {
        report.error(offset, "cache.max_object: expected at most cache.memory".into(), None);
    }
    let path = section.path("path");
    if let (Some(path), Some(offset)) = (&path, section.offset_of("path"))
        && path.exists()
        && !path.is_dir()
    {
        let message = format!("cache.path: expected a directory, but {} is a file", path.display());
        report.error(offset, message, None);
    }
    Cache { memory_bytes, path, max_object_bytes }
}

fn compression(section: &Values) -> Compression {
    let defaults = Compression::default();
    let texts = |name| section.texts(name).into_iter().map(|at| at.value);
    let codings =
        texts("codings").filter_map(|name| Coding::ALL.into_iter().find(|it| it.name() == name)).collect();
    let types: Vec<String> = texts("types").collect();
    Compression {
        codings,
        types: if types.is_empty() { defaults.types } else { types },
        min_bytes: section.integer("min_size").unwrap_or(defaults.min_bytes),
    }
}

fn limits(section: &Values, report: &mut Report<'_>) -> Limits {
    let defaults = Limits::default();
    let head_size = |key| section.integer(key).and_then(|bytes| u32::try_from(bytes).ok());
    let head = HeadLimits {
        request_line_bytes: head_size("request_line_size").unwrap_or(defaults.head.request_line_bytes),
        head_bytes: head_size("head_size").unwrap_or(defaults.head.head_bytes),
        fields: section
            .integer("fields")
            .and_then(|fields| u16::try_from(fields).ok())
            .unwrap_or(defaults.head.fields),
    };
    if let Some(offset) = section.offset_of("request_line_size")
        && head.request_line_bytes > head.head_bytes
    {
        report.error(offset, "limits.request_line_size: expected at most limits.head_size".into(), None);
    }
    let duration = |key, default| section.duration(key).unwrap_or(default);
    let integer = |key, default| section.integer(key).unwrap_or(default);
    Limits {
        head,
        header_timeout: duration("header_timeout", defaults.header_timeout),
        keep_alive_timeout: duration("keep_alive_timeout", defaults.keep_alive_timeout),
        body_min_rate_bytes_per_s: integer("body_min_rate", defaults.body_min_rate_bytes_per_s),
        response_min_rate_bytes_per_s: integer("response_min_rate", defaults.response_min_rate_bytes_per_s),
        body_bytes: integer("body_size", defaults.body_bytes),
        connections: section.integer("connections").map_or(defaults.connections, to_usize),
        tunnel_timeout: duration("tunnel_timeout", defaults.tunnel_timeout),
        drain_timeout: duration("drain_timeout", defaults.drain_timeout),
    }
}

fn access_log(section: &Values, report: &mut Report<'_>) -> Option<AccessLog> {
    let format = match section.text("format").as_deref() {
        Some("json") => LogFormat::Json,
        _ => LogFormat::Combined,
    };
    let Some(path) = section.path("access") else {
        if let Some(offset) = section.offset_of("format") {
            report.warn(offset, "log.format has no effect without log.access".into());
        }
        return None;
    };
    if let Some(offset) = section.offset_of("access").filter(|_| path.is_dir()) {
        let message = format!("log.access: expected a file, but {} is a directory", path.display());
        report.error(offset, message, Some("name a file in it".into()));
    }
    Some(AccessLog { path: (path.as_os_str() != "-").then_some(path), format })
}
