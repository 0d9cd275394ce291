//! Rules in force in front of this process's listeners: in kernel programs where they can be had, and in user space.

pub(crate) mod commands;
mod handover;
pub(crate) mod view;

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::Instant;

use tidegate_accelerator::settings::{Listener, Settings};
use tidegate_accelerator::{Admission, Asked, Engine};
use tidegate_core::{IpPrefix, Verdict};
use tidegate_gate::{
    ClassListeners, Gate, GateError, InterfaceChange, Keeper, KeeperNote, ListenQueue, Pilot, Running,
    ServerTotals, SlowReaders,
};
use tidegate_policy::{PortRange, RuleSet};

pub(crate) use self::handover::Handed;
use crate::config;

/// Connections that the kernel completes and keeps for each priority class.
const BACKLOG: u32 = 4096;

/// What decides on the connections and requests of this process.
#[derive(Debug)]
pub(crate) struct Gatekeeper {
    gate: RwLock<Arc<Gate>>,
    keeper: Mutex<Keeper>,
    settings: Mutex<config::Gate>,
    /// Where this process listens.
    ports: Mutex<Ports>,
    /// Says when there is overload, and adapts limits if that is wanted.
    pilot: Mutex<Option<Pilot>>,
    /// Held for as long as the process lives.
    queues: Mutex<Vec<ListenQueue>>,
    /// Accept queues of the listener that has most of them, if another process holds its sockets.
    held: usize,
    /// The block list's file and the kernel programs are another process's.
    has_handed_over: AtomicBool,
}

/// Where a process listens.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct Ports {
    own: Vec<u16>,
    /// Those of them at which a PROXY header names the clients.
    proxied: Vec<u16>,
    /// Those of them at which HTTP/2 is spoken in the clear.
    framed: Vec<u16>,
}

impl Ports {
    /// Of listeners that have got these addresses.
    pub(crate) fn of(listeners: &[Listener], addresses: impl IntoIterator<Item = SocketAddr>) -> Self {
        let mut ports = Self::default();
        for (listener, address) in listeners.iter().zip(addresses) {
            ports.own.push(address.port());
            if listener.proxy_protocol {
                ports.proxied.push(address.port());
            }
            if listener.http2 {
                ports.framed.push(address.port());
            }
        }
        ports
    }
}

/// Ends the thread that looks after the gate, when dropped.
pub(crate) struct Upkeep {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Gatekeeper {
    /// Puts the rules in force. Gives sockets for the listeners where the kernel sorts connections by class. While the
    /// process before serves too, they act in user space, on the sockets that it hands over.
    pub(crate) fn start(
        settings: &config::Gate,
        listeners: &[Listener],
        handed: Option<Handed>,
    ) -> Result<(Arc<Self>, Vec<Vec<TcpListener>>), GateError> {
        let listen: Vec<SocketAddr> = listeners.iter().map(|listener| listener.address).collect();
        let ports = Ports::of(listeners, listen.iter().copied());
        let listen = listen.as_slice();
        let rules = in_force(settings, &ports);
        let from_holder: Vec<Vec<TcpListener>> = listen.iter().map(|address| from_holder(*address)).collect();
        let held = from_holder.iter().map(Vec::len).max().unwrap_or_default();
        let gate = match &handed {
            None => attach(settings, &rules, listen, held > 0)?,
            Some(_) => Gate::user_space(&rules, &options(settings), "the process before has not let go yet")?,
        };
        gate.blocks().set_lifetime(settings.block_for)?;
        let (mut keeper, notes) = Keeper::start(&gate, &settings.blocks);
        log(notes);
        if let Some(handed) = &handed {
            log(keeper.take_over(&gate, &handed.blocks).into_iter().collect());
        }
        // Nothing can be bound beside the sockets of a holder.
        let queues = if held > 0 { Vec::new() } else { sorted_by_kernel(&gate, &rules, listen) };
        let sockets: std::io::Result<Vec<Vec<TcpListener>>> = queues
            .iter()
            .map(|queue| queue.listeners().sockets().iter().map(TcpListener::try_clone).collect())
            .collect();
        // Without its sockets a queue sorts nothing: the engine binds its own.
        let (queues, mut sockets) = sockets.map_or_else(|_| Default::default(), |sockets| (queues, sockets));
        if queues.is_empty() {
            sockets = from_holder;
        }
        if let Some(handed) = handed.filter(|_| held == 0) {
            sockets = handed.by_address(listen);
        }
        let keeper = Self {
            gate: RwLock::new(Arc::new(gate)),
            keeper: Mutex::new(keeper),
            settings: Mutex::new(settings.clone()),
            ports: Mutex::new(ports),
            pilot: Mutex::new(None),
            queues: Mutex::new(queues),
            held,
            has_handed_over: AtomicBool::new(false),
        };
        Ok((Arc::new(keeper), sockets))
    }

    /// Tells which ports the listeners have got, where the kernel was to choose.
    pub(crate) fn set_ports(&self, ports: Ports) -> Result<(), GateError> {
        if *lock(&self.ports) == ports {
            return Ok(());
        }
        let rules = in_force(&lock(&self.settings), &ports);
        *lock(&self.ports) = ports;
        self.gate().replace_rules(&rules)
    }

    /// Watches for overload, and has the agent adapt limits if that is wanted, from now on.
    pub(crate) fn start_watching(&self) -> Result<(), GateError> {
        let settings = self.settings();
        let ports = lock(&self.ports).clone();
        let rules = in_force(&settings, &ports);
        // Where each class has a queue of its own, a long one says nothing about the preferred class.
        let ports = if lock(&self.queues).is_empty() { ports.own } else { Vec::new() };
        *lock(&self.pilot) = Some(Pilot::start(&self.gate(), settings.wanted, &rules, &ports, BACKLOG)?);
        Ok(())
    }

    /// What the agent has limited, and its last explanations.
    pub(crate) fn explain(&self) -> Vec<String> {
        lock(&self.pilot).as_ref().map(Pilot::explain).unwrap_or_default()
    }

    /// Whether there is overload, by `[stress]` or by what the agent says.
    pub(crate) fn is_overloaded(&self) -> bool {
        lock(&self.pilot).as_ref().is_some_and(Pilot::is_overloaded)
    }

    /// The defence finds the server under stress, or no longer: rules with `when = "overload"` act then too.
    pub(crate) fn set_stressed(&self, stressed: bool) {
        if let Some(pilot) = &mut *lock(&self.pilot) {
            pilot.set_told(stressed);
        }
    }

    fn watch(&self, engine: &Engine) {
        let mut pilot = lock(&self.pilot);
        let Some(pilot) = &mut *pilot else { return };
        let rules = lock(&self.settings).rules.clone();
        match pilot.tick(&self.gate(), &rules, &totals(engine)) {
            Ok(lines) => lines.iter().for_each(|line| tracing::info!("agent: {line}")),
            Err(error) => tracing::warn!(%error, "the agent could not look or adjust"),
        }
        engine.set_stressed(pilot.is_overloaded());
    }

    /// Makes the engine ask about connections, and about requests if there is a rule for any.
    pub(crate) fn guard(self: &Arc<Self>, settings: &mut Settings, rules: &RuleSet) {
        let admission: Arc<dyn Admission> = Arc::clone(self) as _;
        settings.requests = (!rules.requests.is_empty()).then(|| Arc::clone(&admission));
        settings.connections = Some(admission);
    }

    /// Puts other rules and lists in force; on an error those before stay. What cannot change is the caller's to check.
    pub(crate) fn reload(&self, settings: &config::Gate) -> Result<(), GateError> {
        let gate = self.gate();
        gate.replace_rules(&in_force(settings, &lock(&self.ports)))?;
        gate.blocks().set_lifetime(settings.block_for)?;
        log(lock(&self.keeper).replace_sources(&gate, &settings.blocks));
        if let Some(pilot) = &mut *lock(&self.pilot) {
            pilot.set_stress(settings.wanted.stress);
        }
        *lock(&self.settings) = settings.clone();
        Ok(())
    }

    /// The gate that acts now.
    pub(crate) fn gate(&self) -> Arc<Gate> {
        Arc::clone(&self.gate.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// The settings in force.
    pub(crate) fn settings(&self) -> config::Gate {
        lock(&self.settings).clone()
    }

    /// How connections are put into the order of their classes.
    pub(crate) fn classes(&self) -> Vec<String> {
        let classes = lock(&self.settings).rules.classes();
        if self.held > 1 {
            let held = self.held;
            return vec![format!(
                "{held} accept queues from the process that holds the sockets (`tidegate gate attach --listen`), whose \
                 rules say which connections the kernel steers to which"
            )];
        }
        let how = match lock(&self.queues).first() {
            _ if classes < 2 => return Vec::new(),
            Some(queue) if queue.is_steered() => {
                "steered by the kernel, each class to an accept queue of its own"
            }
            _ => "sorted after they are accepted",
        };
        vec![format!("{classes} priority classes of connections, {how}")]
    }

    /// Looks after the gate on a thread of its own until the result is dropped.
    pub(crate) fn look_after(self: &Arc<Self>, engine: &Engine) -> std::io::Result<Upkeep> {
        let (gatekeeper, engine) = (Arc::clone(self), engine.clone());
        let (end, ended) = channel();
        let thread = std::thread::Builder::new().name("gate".into()).spawn(move || {
            let mut ticked = Instant::now();
            let mut slow = slow_readers(&gatekeeper.gate(), gatekeeper.settings().shut_windows);
            while ended.recv_timeout(Pilot::INTERVAL) == Err(RecvTimeoutError::Timeout) {
                gatekeeper.watch(&engine);
                block_slow_readers(&mut slow, &gatekeeper.gate(), &lock(&gatekeeper.settings).spared);
                if ticked.elapsed() >= Keeper::INTERVAL {
                    ticked = Instant::now();
                    gatekeeper.tick();
                }
            }
            // What was blocked since the last time is kept too.
            gatekeeper.tick();
        })?;
        Ok(Upkeep { end: Some(end), thread: Some(thread) })
    }

    fn tick(&self) {
        if self.has_handed_over.load(Ordering::Relaxed) {
            return;
        }
        let gate = self.gate();
        log_interfaces(&gate.look_at_interfaces());
        if gate.is_in_kernel() && !gate.is_attached() {
            let why = if gate.misses_an_interface() {
                "no interface is left with kernel programs"
            } else {
                "the kernel programs were detached (`tidegate gate detach`)"
            };
            let why = format!("{why}; restart to attach them again");
            match self.leave_the_kernel(&gate, &why) {
                Ok(()) => tracing::warn!("{why}: the rules act in user space now"),
                Err(error) => tracing::error!(%error, "{why} and no rule acts"),
            }
        }
        log(lock(&self.keeper).tick(&self.gate()));
    }

    /// The rules go on in user space, with the same blocks.
    fn leave_the_kernel(&self, before: &Gate, why: &str) -> Result<(), GateError> {
        let settings = self.settings();
        let rules = in_force(&settings, &lock(&self.ports));
        let gate = Gate::user_space(&rules, &settings.options, why)?;
        self.go_on_with(gate, before)
    }

    /// Another gate takes the place of this one, with the same blocks.
    fn go_on_with(&self, gate: Gate, before: &Gate) -> Result<(), GateError> {
        gate.blocks().set_lifetime(self.settings().block_for)?;
        gate.blocks().take_over(&before.blocks())?;
        *self.gate.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(gate);
        if lock(&self.pilot).is_some() {
            self.start_watching()?;
        }
        Ok(())
    }
}

impl Admission for Gatekeeper {
    fn acts_on_connections(&self) -> bool {
        self.gate().has_connection_rules()
    }

    fn on_connect(&self, peer: SocketAddr, local: SocketAddr) -> (Verdict, u8) {
        let decision = self.gate().on_connect(peer, local);
        (decision.verdict, decision.class)
    }

    fn ignores_any(&self) -> bool {
        self.gate().ignores_any()
    }

    fn ignores(&self, source: IpAddr) -> bool {
        self.gate().ignores(source)
    }

    fn on_request(&self, request: &Asked<'_>) -> Verdict {
        let Asked { peer, local, path, reading, cookie } = *request;
        let gate = self.gate();
        let asked = tidegate_gate::Asked { peer, port: local.port(), path, cookie };
        let decision = gate.on_request(&asked);
        match reading {
            // A request is counted once under one rule.
            Some(path)
                if decision.verdict == Verdict::Continue
                    && gate.rule_of_request(path, cookie) != decision.rule =>
            {
                gate.on_request(&tidegate_gate::Asked { path, ..asked }).verdict
            }
            _ => decision.verdict,
        }
    }

    fn class_of_request(&self, path: &[u8], cookie: Option<&[u8]>) -> u8 {
        self.gate().class_of_request(path, cookie)
    }
}

impl Drop for Upkeep {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            // A panic there has been printed; there is nothing to add.
            let _ = thread.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change is one assignment, so that a panic elsewhere leaves nothing half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What tells how the server fares.
fn totals(engine: &Engine) -> ServerTotals {
    let upstreams = engine.upstream_status();
    ServerTotals {
        accepted: engine.accepted(),
        upstream_requests: upstreams.iter().map(|server| server.requests).sum(),
        upstream_failures: upstreams.iter().map(|server| server.failures).sum(),
    }
}

/// The rules, for the ports of these listeners and no others of the host.
fn in_force(settings: &config::Gate, ports: &Ports) -> RuleSet {
    let mut rules = settings.rules.clone();
    let [own, proxied, framed]: [Vec<PortRange>; 3] = [&ports.own, &ports.proxied, &ports.framed]
        .map(|ports| ports.iter().copied().map(PortRange::one).collect());
    rules.http_ports = settings.http_ports.clone().unwrap_or_else(|| own.clone());
    rules.only_ports = own;
    rules.proxied_ports = proxied;
    rules.framed_ports = framed;
    rules
}

fn options(settings: &config::Gate) -> tidegate_gate::Options {
    tidegate_gate::Options { for_server: true, ..settings.options }
}

/// `held`: the listeners' sockets come from another process.
fn attach(
    settings: &config::Gate,
    rules: &RuleSet,
    listen: &[SocketAddr],
    held: bool,
) -> Result<Gate, GateError> {
    let options = options(settings);
    let user_space = |why: &str| Gate::user_space(rules, &options, why);
    if !settings.is_configured {
        return user_space("no rule is configured that the kernel could enforce");
    }
    if !settings.kernel {
        return user_space("gate.mechanism is \"user-space\"");
    }
    let interfaces = match &settings.interfaces {
        Some(names) => names.clone(),
        None => match tidegate_gate::interfaces_of(listen) {
            Ok(names) => names,
            Err(error) => return user_space(&format!("programs do not fit the interfaces: {error}")),
        },
    };
    if interfaces.is_empty() {
        return user_space("every listener is on loopback; gate.interfaces = [\"lo\"] attaches them there");
    }
    // To detach that gate, so that this one can attach, would end the holder.
    let has_gate = |name: &String| Running::all(Some(name)).is_ok_and(|gates| !gates.is_empty());
    if let (true, Some(name)) = (held, interfaces.iter().find(|name| has_gate(name))) {
        return user_space(&format!(
            "the gate that holds the sockets (`tidegate gate attach --listen`) is on `{name}`: rules for the kernel \
             belong into its configuration"
        ));
    }
    Gate::attach_or_fall_back(&interfaces, rules, &options)
}

/// The sockets of an address that `tidegate gate attach --listen` holds; none where nobody does.
fn from_holder(address: SocketAddr) -> Vec<TcpListener> {
    match ClassListeners::from_holder(address) {
        Ok(Some(listeners)) => {
            tracing::info!(
                classes = listeners.sockets().len(),
                "the sockets of {address} come from their holder"
            );
            listeners.into_sockets()
        }
        Ok(None) => Vec::new(),
        Err(error) => {
            tracing::warn!("the sockets of {address} cannot be had from their holder: {error}");
            Vec::new()
        }
    }
}

/// A socket per priority class for every listener, or for none: then connections are sorted after they are accepted.
fn sorted_by_kernel(gate: &Gate, rules: &RuleSet, listen: &[SocketAddr]) -> Vec<ListenQueue> {
    if !gate.is_in_kernel() || rules.classes() < 2 {
        return Vec::new();
    }
    let mut queues = Vec::new();
    for address in listen {
        // Another server's SO_REUSEPORT socket would let ours bind beside it: the engine says so, and better.
        if address.port() != 0 && TcpListener::bind(address).is_err() {
            return Vec::new();
        }
        match ListenQueue::bind(gate, *address, rules.classes(), BACKLOG) {
            Ok((queue, None)) => queues.push(queue),
            Ok((_, Some(why))) => {
                tracing::warn!("connections are sorted by priority after they are accepted: {why}");
                return Vec::new();
            }
            Err(error) => {
                tracing::warn!("connections are sorted by priority after they are accepted: {error}");
                return Vec::new();
            }
        }
    }
    queues
}

/// Watches for slow readers, if that is wanted and possible.
fn slow_readers(gate: &Gate, limit: Option<u32>) -> Option<SlowReaders> {
    SlowReaders::start(gate, limit?)
        .inspect_err(|error| tracing::warn!(%error, "block.shut_windows cannot be watched: nobody is blocked for them"))
        .ok()
}

fn block_slow_readers(slow: &mut Option<SlowReaders>, gate: &Gate, spared: &[IpPrefix]) {
    match slow.as_mut().map(|slow| slow.tick(gate, spared)) {
        Some(Ok(blocked)) => {
            blocked
                .iter()
                .for_each(|client| tracing::info!(%client, "blocked: it shuts its window again and again"));
        }
        Some(Err(error)) => tracing::warn!(%error, "slow readers could not be looked for"),
        None => {}
    }
}

fn log_interfaces(changes: &[InterfaceChange]) {
    for change in changes {
        if change.is_fault() {
            tracing::warn!("{change}");
        } else {
            tracing::info!("{change}");
        }
    }
}

fn log(notes: Vec<KeeperNote>) {
    for note in notes {
        if note.is_fault() {
            tracing::error!("block list: {note}");
        } else {
            tracing::info!("block list: {note}");
        }
    }
}
