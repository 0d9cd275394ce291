//! `tidegate gate` and `tidegate block`: kernel mechanisms in front of any server of the host, and who is kept out.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::io::Write as _;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use tidegate_core::IpPrefix;
use tidegate_gate::{
    Blocks, Gate, GateError, Handover, Keeper, ListenQueue, Mechanism, Options, Pilot, Report, RuleKind,
    RuleReport, Running, ServerTotals, Why,
};
use tidegate_policy::{PortRange, RuleSet};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::MissedTickBehavior;

use crate::cli::{Failure, print};
use crate::client::AskError;
use crate::gate::{BACKLOG, block_slow_readers, log, log_interfaces, slow_readers, view};
use crate::units::ListenAddress;
use crate::{client, config};

/// What `tidegate gate attach` is given.
pub(crate) struct Attach<'a> {
    pub interfaces: &'a [String],
    pub config: Option<&'a Path>,
    pub http: &'a [PortRange],
    pub listen: &'a [ListenAddress],
    pub hold_depth: Option<u32>,
}

/// What servers mostly ask for; only where the accept queue is looked at, not set.
const OTHERS_BACKLOG: u32 = 511;

fn failed(error: GateError) -> Failure {
    Failure::runtime(format!("error: {error}"))
}

/// `tidegate gate attach`: holds the programs until a signal or `tidegate gate detach` ends it.
pub(crate) fn attach(attach: &Attach<'_>) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::runtime(format!("error: cannot start: {error}")))?;
    runtime.block_on(hold(attach))
}

async fn hold(attach: &Attach<'_>) -> Result<(), Failure> {
    let no_signals = |error| Failure::runtime(format!("error: cannot watch for signals: {error}"));
    let mut terminate = signal(SignalKind::terminate()).map_err(no_signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(no_signals)?;
    let mut hangup = signal(SignalKind::hangup()).map_err(no_signals)?;
    let Asked { settings, mut rules, warnings } = rules_of(attach)?;
    warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    let Some((first, rest)) = attach.interfaces.split_first() else { return Ok(()) };
    let mut gate = Gate::attach(first, &rules, &settings.options).map_err(failed)?;
    for interface in rest {
        gate.attach_also(interface).map_err(failed)?;
    }
    gate.blocks().set_lifetime(settings.block_for).map_err(failed)?;
    let _held = listen_for_servers(attach, &gate, &rules)?;
    let (mut keeper, notes) = Keeper::start(&gate, &settings.blocks);
    log(notes);
    let ports: Vec<u16> = rules.http_ports.iter().map(PortRange::first).collect();
    let mut pilot = Pilot::start(&gate, settings.wanted, &rules, &ports, OTHERS_BACKLOG).map_err(failed)?;
    let report = gate.show().map_err(failed)?;
    tracing::info!(rules = report.rules.len(), "attached to {}", report.interfaces.join(", "));
    warn_of_the_unenforced(&report);
    for item in &report.unavailable {
        tracing::warn!("not available: {}: {}", item.what, item.why);
    }
    let mut slow = slow_readers(&gate, settings.shut_windows);
    let mut spared = settings.spared.clone();
    let every = |period| {
        let mut ticks = tokio::time::interval(period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks
    };
    let (mut ticks, mut looks) = (every(Keeper::INTERVAL), every(Pilot::INTERVAL));
    loop {
        tokio::select! {
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
            _ = hangup.recv() => match read_again(attach, &settings, &gate) {
                Ok(asked) => {
                    rules = asked.rules;
                    spared.clone_from(&asked.settings.spared);
                    pilot.set_stress(asked.settings.wanted.stress);
                    log(keeper.replace_sources(&gate, &asked.settings.blocks));
                    gate.show().iter().for_each(warn_of_the_unenforced);
                    tracing::info!(rules = rules.connections.len() + rules.requests.len(), "the rules were read again and are in force");
                }
                Err(why) => tracing::error!("the old rules stay in force: {why}"),
            },
            _ = looks.tick() => {
                block_slow_readers(&mut slow, &gate, &spared);
                match pilot.tick(&gate, &rules, &ServerTotals::default()) {
                    Ok(lines) => lines.iter().for_each(|line| tracing::info!("agent: {line}")),
                    Err(error) => tracing::warn!(%error, "the agent could not look or adjust"),
                }
            }
            _ = ticks.tick() => {
                log_interfaces(&gate.look_at_interfaces());
                log(keeper.tick(&gate));
                if !gate.is_attached() {
                    return no_interface_left(&gate);
                }
            }
        }
    }
    log(keeper.tick(&gate));
    gate.detach();
    tracing::info!("detached");
    Ok(())
}

/// Puts what the file says now in force, all or nothing.
fn read_again(attach: &Attach<'_>, started: &config::Gate, gate: &Gate) -> Result<Asked, String> {
    let asked = rules_of(attach).map_err(|failure| failure.message)?;
    asked.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    let new = &asked.settings;
    let needs_restart = [
        ("[gate]", started.options != new.options),
        ("[adapt]", started.wanted.goals != new.wanted.goals),
        ("block.shut_windows", started.shut_windows != new.shut_windows),
        ("block.path", started.blocks.directory != new.blocks.directory),
    ];
    let changed: Vec<&str> =
        needs_restart.iter().filter(|(_, changed)| *changed).map(|(name, _)| *name).collect();
    if !changed.is_empty() {
        return Err(format!("{} cannot change while attached; attach again to apply it", changed.join(", ")));
    }
    gate.replace_rules(&asked.rules).map_err(|error| error.to_string())?;
    gate.blocks().set_lifetime(new.block_for).map_err(|error| error.to_string())?;
    Ok(asked)
}

/// Whoever has detached all of them wanted that; otherwise nothing is enforced that should be.
fn no_interface_left(gate: &Gate) -> Result<(), Failure> {
    if gate.misses_an_interface() {
        return Err(Failure::runtime("error: no interface is left that the gate is attached to".to_owned()));
    }
    tracing::info!("detached by another process");
    Ok(())
}

/// Rules of which more than that are not enforced are not all named.
const NAMED: usize = 10;

/// Other servers ask nobody about what no segment can decide.
fn warn_of_the_unenforced(report: &Report) {
    let unenforced: Vec<_> = report.rules.iter().filter(|rule| rule.mechanism == Mechanism::Nobody).collect();
    for rule in unenforced.iter().take(NAMED) {
        if rule.why == Why::PriorityOnly {
            let rule = &rule.rule;
            tracing::warn!("nobody goes by the priority of `{rule}`: only [adapt] or `tidegate run` would");
            continue;
        }
        tracing::warn!("nobody enforces `{}`: {}; only `tidegate run` would", rule.rule, rule.why);
    }
    if unenforced.len() > NAMED {
        let more = unenforced.len() - NAMED;
        tracing::warn!("nobody enforces {more} more: `tidegate gate show` lists them");
    }
}

/// Sockets that wait for a server, and the door at which it asks for them.
struct Held {
    _queue: ListenQueue,
    _door: Handover,
}

fn listen_for_servers(attach: &Attach<'_>, gate: &Gate, rules: &RuleSet) -> Result<Vec<Held>, Failure> {
    let hold = |listen: &ListenAddress| {
        let failed =
            |why: String| Failure::runtime(format!("error: cannot listen on {}: {why}", listen.written));
        // Whoever listens there already would share the clients, or lose them.
        drop(TcpListener::bind(listen.address).map_err(|error| failed(error.to_string()))?);
        let (queue, why) = ListenQueue::bind(gate, listen.address, rules.classes(), BACKLOG)
            .map_err(|error| failed(error.to_string()))?;
        if let Some(why) = why {
            return Err(failed(format!("connections cannot be sorted by priority: {why}")));
        }
        let door = queue.listeners().try_clone().and_then(|sockets| Handover::open(listen.address, sockets));
        let door = door.map_err(|error| failed(format!("no server can ask for it: {error}")))?;
        tracing::info!(classes = rules.classes(), "holding {} for a server", listen.written);
        Ok(Held { _queue: queue, _door: door })
    };
    attach.listen.iter().map(hold).collect()
}

/// What the file and the command line ask for.
struct Asked {
    settings: config::Gate,
    rules: RuleSet,
    warnings: Vec<config::Finding>,
}

fn rules_of(attach: &Attach<'_>) -> Result<Asked, Failure> {
    let loaded = match attach.config {
        Some(path) => config::load(path).map_err(|findings| Failure::runtime(config::lines(&findings)))?,
        None => config::defaults(),
    };
    let mut settings = loaded.gate;
    if attach.hold_depth.is_some() {
        settings.options.hold_depth = attach.hold_depth.filter(|depth| *depth > 0);
    }
    let mut rules = settings.rules.clone();
    let listeners: Vec<PortRange> =
        loaded.listen.iter().map(|listen| PortRange::one(listen.address.port())).collect();
    rules.http_ports = match (&settings.http_ports, attach.http) {
        (_, given @ [_, ..]) => given.to_vec(),
        (Some(ports), _) => ports.clone(),
        _ if listeners.is_empty() => vec![PortRange::one(80)],
        _ => listeners,
    };
    let ports_where = |holds: fn(&tidegate_accelerator::settings::Listener) -> bool| {
        let listeners = loaded.settings.listeners.iter().filter(|listener| holds(listener));
        listeners.map(|listener| PortRange::one(listener.address.port())).collect()
    };
    rules.proxied_ports = ports_where(|listener| listener.proxy_protocol);
    rules.framed_ports = ports_where(|listener| listener.http2);
    Ok(Asked { settings, rules, warnings: loaded.warnings })
}

/// `tidegate gate check`: what the rules of a file would become here. Nothing is attached.
pub(crate) fn check(attach: &Attach<'_>, for_server: bool, json: bool) -> Result<(), Failure> {
    let Asked { settings, rules, warnings } = rules_of(attach)?;
    for interface in attach.interfaces {
        tidegate_gate::check_interface(interface).map_err(failed)?;
    }
    let options = Options { for_server, ..settings.options };
    let (gate, why) = match Gate::load(&rules, &options) {
        Ok(gate) => (gate, None),
        Err(why @ GateError::NotPermitted) => {
            (Gate::user_space(&rules, &options, why.to_string()).map_err(failed)?, Some(why.to_string()))
        }
        Err(error) => return Err(failed(error)),
    };
    let report = gate.show().map_err(failed)?;
    if json {
        let rules = view::report("tidegate gate check", &report)["rules"].take();
        let warnings: Vec<Value> = warnings.iter().map(|warning| warning.to_json("warning")).collect();
        return client::print_json(
            &json!({ "loaded": why.is_none(), "reason": why, "rules": rules, "warnings": warnings }),
        );
    }
    for warning in &warnings {
        let _ = writeln!(std::io::stderr(), "warning: {warning}");
    }
    let mut out = match why {
        None => "This kernel takes the programs with these rules; nothing was attached.\n".to_owned(),
        Some(why) => format!("The rules compile; this kernel was not asked: {why}\n"),
    };
    for item in &report.unavailable {
        let _ = writeln!(out, "not available: {}: {}", item.what, item.why);
    }
    let kind = |kind| if kind == RuleKind::Connection { "connection" } else { "request" };
    let row = |rule: &RuleReport| {
        vec![rule.mechanism.to_string(), kind(rule.kind).into(), rule.rule.clone(), rule.why.to_string()]
    };
    let rows: Vec<Vec<String>> = report.rules.iter().map(row).collect();
    client::write_table(&["WHERE", "KIND", "RULE", "WHY"], &rows, &mut out);
    print(&out)
}

/// `tidegate gate detach`
pub(crate) fn detach(interface: Option<&str>, json: bool) -> Result<(), Failure> {
    let running = Running::all(interface).map_err(failed)?;
    if running.is_empty() {
        return Err(failed(GateError::NotAttached { interface: interface.map(str::to_owned) }));
    }
    let mut interfaces: Vec<String> = Vec::new();
    for gate in running {
        match interface {
            Some(name) => {
                interfaces.push(name.to_owned());
                gate.detach_from(name).map_err(failed)?;
            }
            None => {
                interfaces.extend(gate.interfaces().iter().cloned());
                gate.detach().map_err(failed)?;
            }
        }
    }
    if json {
        return client::print_json(&json!({ "detached": interfaces }));
    }
    print(&format!("detached from {}\n", interfaces.join(", ")))
}

/// The gates of other processes; none where looking for them is not allowed or not possible.
fn running() -> Result<Vec<Running>, GateError> {
    Running::all(None)
}

/// Whether there is a gate in this network namespace, as far as this process may know.
pub(crate) fn is_any_attached() -> bool {
    running().is_ok_and(|gates| !gates.is_empty())
}

/// `tidegate gate show`: what enforces which rule, in every process of this network namespace.
pub(crate) fn show(admin: SocketAddr, json: bool) -> Result<(), Failure> {
    let server = client::ask(admin, "GET", "/api/gate");
    let kernel = running();
    let mut gates: Vec<Value> = server.iter().cloned().collect();
    for gate in kernel.iter().flatten() {
        let shown = view::report("tidegate gate attach", &gate.show().map_err(failed)?);
        // A server tells more of its own programs than the kernel does.
        if !gates.iter().any(|known| known["interfaces"] == shown["interfaces"]) {
            gates.push(shown);
        }
    }
    if gates.is_empty() {
        return Err(nobody(server.err(), kernel.err()));
    }
    if json {
        return client::print_json(&Value::Array(gates));
    }
    let mut out = String::new();
    for gate in &gates {
        view::text(gate, &mut out);
    }
    print(&out)
}

/// Why there is no gate to talk to.
fn nobody(server: Option<Failure>, kernel: Option<GateError>) -> Failure {
    let kernel = kernel.unwrap_or(GateError::NotAttached { interface: None });
    match server {
        Some(failure) => Failure::runtime(format!("{}; {kernel}", failure.message)),
        None => failed(kernel),
    }
}

/// What `tidegate block add` is given.
pub(crate) struct Add<'a> {
    pub prefixes: &'a [IpPrefix],
    pub file: Option<&'a PathBuf>,
    /// `None`: as configured; zero: for ever.
    pub lifetime: Option<Duration>,
    pub reason: Option<&'a str>,
}

/// Addresses that one request to the admin server carries.
const PER_REQUEST: usize = 20_000;

/// `tidegate block add`
pub(crate) fn block_add(admin: SocketAddr, add: &Add<'_>, json: bool) -> Result<(), Failure> {
    let mut prefixes = add.prefixes.to_vec();
    if let Some(path) = add.file {
        let failed = |why: String| Failure::runtime(format!("error: {}: {why}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
        prefixes.extend(tidegate_policy::parse_list(&text).map_err(|error| failed(error.to_string()))?);
    }
    // A list that does not fit is named: of several, one is meant.
    let not_taken = |error: GateError| match add.file {
        Some(path) => Failure::runtime(format!("error: {}: {error}", path.display())),
        None => failed(error),
    };
    let gates = running();
    let (mut done, mut evicted) = (false, 0);
    for gate in gates.iter().flatten() {
        let blocks = gate.blocks();
        let lifetime = match add.lifetime {
            None => blocks.lifetime().map_err(failed)?,
            some => some,
        };
        let before = blocks.evicted().map_err(failed)?;
        blocks.add_many(&prefixes, lifetime.filter(|time| !time.is_zero())).map_err(not_taken)?;
        evicted += blocks.evicted().map_err(failed)?.saturating_sub(before);
        if let Some(reason) = add.reason {
            prefixes.iter().try_for_each(|prefix| blocks.set_reason(*prefix, reason)).map_err(failed)?;
        }
        done = true;
    }
    for some in prefixes.chunks(PER_REQUEST) {
        let prefixes: Vec<String> = some.iter().map(ToString::to_string).collect();
        let body = json!({
            "prefixes": prefixes, "for_ms": add.lifetime.map(|time| time.as_millis() as u64), "reason": add.reason,
        });
        match client::send(admin, "/api/block", &body) {
            Ok(answer) => {
                done = true;
                // Of a gate that was found above the server has the same list, and there is room for what is in it.
                evicted += answer["evicted"].as_u64().unwrap_or_default();
            }
            Err(AskError::Absent(_)) if done => break,
            Err(AskError::Absent(failure)) => return Err(nobody(Some(failure), gates.err())),
            Err(AskError::Refused(failure)) => return Err(failure),
        }
    }
    if json {
        return client::print_json(&json!({ "blocked": prefixes.len(), "evicted": evicted }));
    }
    if evicted > 0 {
        let max = Blocks::MAX_ADDRESSES;
        let _ = writeln!(
            std::io::stderr(),
            "warning: the list of addresses is full, at {max} of each family: {evicted} that had not been heard of for \
             longest are blocked no more; block prefixes that join them instead"
        );
    }
    print(&match prefixes.as_slice() {
        [one] => format!("{one} is blocked\n"),
        many => format!("{} addresses and prefixes are blocked\n", many.len()),
    })
}

/// `tidegate block remove`
pub(crate) fn block_remove(admin: SocketAddr, prefixes: &[IpPrefix], json: bool) -> Result<(), Failure> {
    let gates = running();
    let mut removed: Vec<&IpPrefix> = Vec::new();
    for prefix in prefixes {
        let mut was_there = false;
        for gate in gates.iter().flatten() {
            was_there |= gate.blocks().remove(prefix).map_err(failed)?;
        }
        match client::send(admin, "/api/block/remove", &json!({ "prefix": prefix.to_string() })) {
            Ok(answer) => was_there |= answer["removed"] == true,
            Err(AskError::Absent(failure)) if gates.as_ref().map_or(true, Vec::is_empty) => {
                return Err(nobody(Some(failure), gates.err()));
            }
            Err(AskError::Absent(_)) => {}
            Err(AskError::Refused(failure)) => return Err(failure),
        }
        if was_there {
            removed.push(prefix);
        }
    }
    if let Some(missing) = prefixes.iter().find(|prefix| !removed.contains(prefix)) {
        return Err(Failure::runtime(format!(
            "error: {missing} is not blocked; `tidegate block list` shows what is"
        )));
    }
    if json {
        return client::print_json(&json!({ "removed": removed.len() }));
    }
    print(&format!("{} removed\n", removed.len()))
}

/// `tidegate block list`
pub(crate) fn block_list(admin: SocketAddr, limit: usize, json: bool) -> Result<(), Failure> {
    let gates = running();
    let server = client::ask(admin, "GET", &format!("/api/block?limit={limit}"));
    if server.is_err() && gates.as_ref().map_or(true, Vec::is_empty) {
        return Err(nobody(server.err(), gates.err()));
    }
    let mut blocks: Vec<Value> = server.iter().flat_map(|list| client::array(list).to_vec()).collect();
    let mut known: HashSet<String> = blocks.iter().map(|block| client::text(&block["prefix"])).collect();
    for gate in gates.iter().flatten() {
        for blocked in gate.blocks().list().map_err(failed)? {
            if blocks.len() >= limit {
                break;
            }
            if known.insert(blocked.prefix.to_string()) {
                blocks.push(view::block(&blocked));
            }
        }
    }
    if json {
        return client::print_json(&Value::Array(blocks));
    }
    let rows: Vec<Vec<String>> = blocks
        .iter()
        .map(|row| {
            let remaining = if row["remaining_s"].is_null() {
                "for ever".into()
            } else {
                client::text(&row["remaining_s"])
            };
            vec![
                client::text(&row["prefix"]),
                remaining,
                client::text(&row["hits"]),
                client::text(&row["idle_s"]),
                client::text(&row["reason"]),
            ]
        })
        .collect();
    let mut out = String::new();
    client::write_table(&["BLOCKED", "REMAINING S", "HITS", "IDLE S", "REASON"], &rows, &mut out);
    print(if out.is_empty() { "nothing is blocked\n" } else { &out })
}
