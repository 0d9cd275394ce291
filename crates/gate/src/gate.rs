//! A gate: kernel programs where they can be had, the same rules in user space where not.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use libbpf_rs::{Link, MapHandle};
use tidegate_core::Verdict;
use tidegate_policy::{Class, Decision, Policer, PortRange, Profile, RuleSet, When};
use zerocopy::FromZeros;

use crate::abi;
use crate::block::{BlockStats, Blocks};
use crate::events::TcpEvents;
use crate::interfaces::{InterfaceChange, Interfaces};
use crate::kernel::{ProgramCost, Programs};
use crate::maps::Maps;
use crate::pilot::{ClassTotals, no_latencies};
use crate::report::{self, Mechanism, Report, Unavailable, Why};
use crate::rules::{Abilities, Entries, Slots, keep_tokens, kernel_rule};
use crate::user::User;
use crate::{GateError, system};

/// How a gate behaves besides its rules.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Options {
    /// How long a client's SYNs are dropped after its connection was reset (the paper's section 4.5.1); zero: not at
    /// all. The default is Linux's first retransmission of a SYN.
    pub reset_penalty: Duration,
    /// Accept queue depth from which SYNs of lower classes are held back; `None`: never.
    pub hold_depth: Option<u32>,
    /// Whether a server in this process asks [`Gate::on_request`]: then the kernel programs note which requests they
    /// have policed, so that none is policed twice and none escapes.
    pub for_server: bool,
}

/// A request as a server has parsed it.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'r> {
    /// The client.
    pub peer: SocketAddr,
    /// The port it connected to.
    pub port: u16,
    /// The path in its normal form, without the query.
    pub path: &'r [u8],
    /// The value of its `Cookie` field.
    pub cookie: Option<&'r [u8]>,
}

impl Default for Options {
    fn default() -> Self {
        Self { reset_penalty: Duration::from_secs(1), hold_depth: None, for_server: false }
    }
}

/// What became of a frame.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Trial {
    /// Whether the program let it pass.
    pub passed: bool,
    /// Mean time of one run.
    pub mean: Duration,
}

const XDP_PASS: u32 = 2;
const TC_ACT_OK: u32 = 0;

/// Overload control in front of this host's servers. Detaches when dropped, and when the process ends in any way.
#[derive(Debug)]
pub struct Gate {
    engine: Engine,
    unavailable: Vec<Unavailable>,
    reset_penalty: Duration,
}

#[derive(Debug)]
enum Engine {
    Kernel(Box<Kernel>),
    User(Box<User>),
}

#[derive(Debug)]
struct Kernel {
    programs: Programs,
    interfaces: Mutex<Interfaces>,
    /// Whether one of them is loopback: each accept asks, and what changes or shows interfaces takes long.
    covers_loopback: AtomicBool,
    queues: Mutex<Option<Arc<Queues>>>,
    rules: Mutex<Arc<InForce>>,
    replacing: Mutex<Replacing>,
    /// How full the block list was, and when it had last been changed: a million entries are not counted for nothing.
    block_stats: Mutex<Option<(u64, BlockStats)>>,
}

/// A rule set as requests and connections are asked about: what is decided of one is decided by one set.
#[derive(Debug)]
struct InForce {
    /// Only asked for classes: the kernel has policed.
    policer: Policer,
    /// Where packets are those of a proxy, so that the kernel has not policed.
    proxied_ports: Vec<PortRange>,
    entries: Entries,
}

impl InForce {
    fn is_proxied(&self, port: u16) -> bool {
        self.proxied_ports.iter().any(|range| range.contains(port))
    }
}

/// What the next rule set needs of those before.
#[derive(Debug, Default)]
struct Replacing {
    slots: Slots,
    /// The set that was in force before this one.
    before: Weak<InForce>,
}

/// The prioritized listen queues of a gate; the last of them, or the gate, keeps the steering attached.
#[derive(Debug)]
pub(crate) struct Queues {
    maps: Maps,
    link: Link,
    used: Mutex<[bool; abi::TG_MAX_QUEUES as usize]>,
}

impl Queues {
    pub(crate) fn maps(&self) -> &Maps {
        &self.maps
    }

    /// A number for one more queue, if there is one left.
    pub(crate) fn reserve(&self) -> Option<u32> {
        let mut used = lock(&self.used);
        let free = used.iter().position(|used| !used)?;
        used[free] = true;
        u32::try_from(free).ok()
    }

    /// Whether the kernel still asks: `tidegate gate detach` may have taken the steering away.
    pub(crate) fn is_attached(&self) -> bool {
        match self.link.info().map(|link| link.info) {
            Ok(libbpf_rs::query::LinkTypeInfo::NetNs(netns)) => netns.ino != 0,
            _ => false,
        }
    }

    pub(crate) fn release(&self, number: u32) {
        if let Some(used) = lock(&self.used).get_mut(number as usize) {
            *used = false;
        }
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change is made whole by one assignment, so that a panic elsewhere leaves nothing half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gate {
    /// Loads the kernel programs, puts `rules` in force and attaches to an interface of the calling thread's network
    /// namespace. An error leaves nothing attached.
    pub fn attach(interface: &str, rules: &RuleSet, options: &Options) -> Result<Self, GateError> {
        let mut gate = Self::load(rules, options)?;
        gate.attach_also(interface)?;
        Ok(gate)
    }

    /// Attaches to all of the interfaces if that is possible, and enforces the same rules in user space otherwise;
    /// [`Gate::show`] says why.
    pub fn attach_or_fall_back(
        interfaces: &[String],
        rules: &RuleSet,
        options: &Options,
    ) -> Result<Self, GateError> {
        let attach = || {
            let mut gate = Self::load(rules, options)?;
            interfaces.iter().try_for_each(|interface| gate.attach_also(interface)).map(|()| gate)
        };
        match attach() {
            Err(
                error @ (GateError::NotPermitted
                | GateError::Kernel { .. }
                | GateError::Io { .. }
                | GateError::InUse { .. }
                | GateError::NotTaken { .. }),
            ) => Self::user_space(rules, options, error.to_string()),
            other => other,
        }
    }

    /// Loads the kernel programs and puts `rules` in force without attaching to an interface yet.
    pub fn load(rules: &RuleSet, options: &Options) -> Result<Self, GateError> {
        // Before anything is loaded: an error in a rule is found without privileges too.
        let policer = Policer::new(rules)?;
        let programs = Programs::load()?;
        let mut unavailable = Vec::new();
        let mut note = |what, object: Result<_, &GateError>| {
            if let Err(error) = object {
                unavailable.push(Unavailable { what, why: error.to_string() });
            }
        };
        note("prioritized listen queues by steering", programs.steer());
        note("request rules on segments", programs.request());
        let maps = &programs.maps;
        maps.set_control(abi::TG_CONTROL_NETNS, system::namespace_cookie()?)?;
        maps.set_control(abi::TG_CONTROL_PENALTY_NS, system::saturated_ns(options.reset_penalty))?;
        maps.set_control(abi::TG_CONTROL_HOLD_DEPTH, options.hold_depth.map_or(0, u64::from))?;
        maps.set_control(abi::TG_CONTROL_CREDITS, u64::from(options.for_server))?;
        // Were another process to make the table, this one could not open it.
        if !system::may_open_by_number() {
            maps.singles_to_fill()?;
        }
        let kernel = Kernel {
            programs,
            interfaces: Mutex::default(),
            covers_loopback: AtomicBool::new(false),
            queues: Mutex::new(None),
            rules: Mutex::new(Arc::new(InForce {
                policer,
                proxied_ports: Vec::new(),
                entries: Entries::default(),
            })),
            replacing: Mutex::default(),
            block_stats: Mutex::new(None),
        };
        let gate = Self {
            engine: Engine::Kernel(Box::new(kernel)),
            unavailable,
            reset_penalty: options.reset_penalty,
        };
        gate.replace_rules(rules)?;
        Ok(gate)
    }

    /// A gate without kernel programs; `why` is for [`Gate::show`].
    pub fn user_space(rules: &RuleSet, options: &Options, why: impl Into<String>) -> Result<Self, GateError> {
        let user = User::new(rules)?;
        let unavailable = vec![Unavailable { what: "kernel programs", why: why.into() }];
        Ok(Self { engine: Engine::User(Box::new(user)), unavailable, reset_penalty: options.reset_penalty })
    }

    /// Attaches to one more interface, under the same rules, buckets and block list. Naming one twice changes nothing.
    pub fn attach_also(&mut self, interface: &str) -> Result<(), GateError> {
        let Engine::Kernel(kernel) = &mut self.engine else { return Ok(()) };
        let interfaces = kernel.interfaces.get_mut().unwrap_or_else(PoisonError::into_inner);
        let attached = interfaces.attach(&kernel.programs, interface);
        *kernel.covers_loopback.get_mut() = interfaces.include_loopback();
        attached
    }

    /// Puts other rules in force at once, for every packet the old ones or the new ones. A rule that matches what one
    /// before matched keeps its tokens and counters. On error the rules before stay in force.
    pub fn replace_rules(&self, rules: &RuleSet) -> Result<(), GateError> {
        match &self.engine {
            Engine::User(user) => Ok(lock(&user.policer).replace(rules)?),
            Engine::Kernel(kernel) => {
                let mut replacing = lock(&kernel.replacing);
                let policer = Policer::new(rules)?;
                let abilities = Abilities {
                    segments: kernel.programs.request().is_ok(),
                    string_search: system::kernel_has("bpf_strnstr") && system::kernel_has("bpf_strcspn"),
                    server_asks: kernel.programs.maps.control(abi::TG_CONTROL_CREDITS)? != 0,
                };
                // Its slots become other rules': nobody may ask by it any more. A question takes some microseconds.
                while replacing.before.strong_count() > 0 {
                    std::thread::yield_now();
                }
                let maps = &kernel.programs.maps;
                let prepared = replacing.slots.prepare(maps, rules, abilities)?;
                // First here, so that what the kernel has let pass by the new rules is not asked about by the old ones.
                let proxied_ports = rules.proxied_ports.clone();
                let next = Arc::new(InForce { policer, proxied_ports, entries: prepared.entries.clone() });
                let before = std::mem::replace(&mut *lock(&kernel.rules), next);
                if let Err(error) = prepared.switch(maps) {
                    *lock(&kernel.rules) = before;
                    return Err(error);
                }
                replacing.before = Arc::downgrade(&before);
                replacing.slots.settle(maps, prepared)
            }
        }
    }

    /// Signals that overload has begun or ended, for the rules that act only then.
    pub fn set_overload(&self, overloaded: bool) -> Result<(), GateError> {
        match &self.engine {
            Engine::Kernel(kernel) => {
                kernel.programs.maps.set_control(abi::TG_CONTROL_OVERLOAD, u64::from(overloaded))
            }
            Engine::User(user) => {
                user.set_overload(overloaded);
                Ok(())
            }
        }
    }

    /// Sets from which accept queue depth SYNs of lower classes are held back; `None`: never.
    pub fn set_hold_depth(&self, depth: Option<u32>) -> Result<(), GateError> {
        match &self.engine {
            Engine::Kernel(kernel) => {
                kernel.programs.maps.set_control(abi::TG_CONTROL_HOLD_DEPTH, depth.map_or(0, u64::from))
            }
            Engine::User(_) => Ok(()),
        }
    }

    /// The block list.
    pub fn blocks(&self) -> Blocks<'_> {
        match &self.engine {
            Engine::Kernel(kernel) => Blocks::kernel(&kernel.programs.maps),
            Engine::User(user) => Blocks::user(&user.blocked),
        }
    }

    /// Decides on an accepted connection. Where the kernel has policed its SYN this only tells its class.
    pub fn on_connect(&self, peer: SocketAddr, local: SocketAddr) -> Decision {
        let (source, destination, port): (IpAddr, IpAddr, u16) = (peer.ip(), local.ip(), local.port());
        let refused = Decision { verdict: Verdict::Drop, class: 0, rule: None };
        match &self.engine {
            // What a host sends to itself passes no interface but loopback; and what a proxy names is in no packet.
            Engine::Kernel(kernel)
                if kernel.in_force().is_proxied(port)
                    || kernel.misses_loopback() && is_from_here(source, destination) =>
            {
                if self.blocks().blocks(source).unwrap_or(false) {
                    refused
                } else {
                    kernel.on_connect(peer, local)
                }
            }
            Engine::Kernel(kernel) => kernel.in_force().policer.classify(source, destination, port),
            Engine::User(user) => user.on_connect(peer, local),
        }
    }

    /// Decides on a request that a server has parsed: by the same rules in the same order, with the same tokens and
    /// counters as on segments. A request that was policed on its segment is not policed again.
    pub fn on_request(&self, asked: &Asked<'_>) -> Decision {
        let decision = match &self.engine {
            Engine::Kernel(kernel) => kernel.on_request(asked),
            Engine::User(user) => {
                let now_ns = system::now_ns();
                lock(&user.policer).on_request(asked.path, asked.cookie, now_ns)
            }
        };
        if decision.verdict == Verdict::Reset {
            self.penalize(asked.peer.ip());
        }
        decision
    }

    /// Index of the rule that governs a request; counts nothing.
    pub fn rule_of_request(&self, path: &[u8], cookie: Option<&[u8]>) -> Option<usize> {
        match &self.engine {
            Engine::Kernel(kernel) => kernel.in_force().policer.classify_request(path, cookie).rule,
            Engine::User(user) => lock(&user.policer).classify_request(path, cookie).rule,
        }
    }

    /// The priority class of a request that a server has parsed; counts nothing.
    pub fn class_of_request(&self, path: &[u8], cookie: Option<&[u8]>) -> Class {
        match &self.engine {
            Engine::Kernel(kernel) => kernel.in_force().policer.classify_request(path, cookie).class,
            Engine::User(user) => lock(&user.policer).classify_request(path, cookie).class,
        }
    }

    /// The paper's section 4.5.1: who was reset does not get in again for a while.
    fn penalize(&self, client: IpAddr) {
        if self.reset_penalty.is_zero() {
            return;
        }
        let until_ns = system::now_ns().saturating_add(system::saturated_ns(self.reset_penalty));
        match &self.engine {
            Engine::Kernel(kernel) => {
                // A client that gets in again too soon is policed again.
                let maps = &kernel.programs.maps;
                let _ = maps.write("penalties", &abi::tg_client { address: mapped(client) }, &until_ns);
                let _ = maps.set_control(abi::TG_CONTROL_PENALIZED_NS, until_ns);
            }
            Engine::User(user) => user.penalize(client, until_ns),
        }
    }

    /// Whether there is anything to ask [`Gate::on_request`] about.
    pub fn has_request_rules(&self) -> bool {
        match &self.engine {
            Engine::Kernel(kernel) => !kernel.in_force().policer.requests().rules().is_empty(),
            Engine::User(user) => !lock(&user.policer).requests().rules().is_empty(),
        }
    }

    /// Whether there are sources of which [`Gate::ignores`] datagrams.
    pub fn ignores_any(&self) -> bool {
        match &self.engine {
            Engine::Kernel(_) => self.blocks().may_hold_any(),
            Engine::User(user) => user.ignores_any(),
        }
    }

    /// Whether datagrams of this source are to be ignored. Where programs run they never arrive; not every interface
    /// needs to have them.
    pub fn ignores(&self, source: IpAddr) -> bool {
        match &self.engine {
            Engine::Kernel(_) => self.blocks().blocks(source).unwrap_or(false),
            Engine::User(user) => user.ignores(source),
        }
    }

    /// Whether [`Gate::on_connect`] has anything to say just now besides that all go on in one class.
    pub fn has_connection_rules(&self) -> bool {
        match &self.engine {
            Engine::Kernel(_) => true,
            Engine::User(user) => user.acts_on_connections(),
        }
    }

    /// Whether kernel programs are loaded.
    pub fn is_in_kernel(&self) -> bool {
        matches!(self.engine, Engine::Kernel(_))
    }

    /// Whether an interface still runs the programs: all may have vanished, or `tidegate gate detach` have taken the
    /// programs away.
    pub fn is_attached(&self) -> bool {
        matches!(&self.engine, Engine::Kernel(kernel) if lock(&kernel.interfaces).any_attached())
    }

    /// Looks what has become of the interfaces, tells each change once, and attaches again to those that have vanished
    /// and come back. To be called now and then from the network namespace that the gate was attached in.
    pub fn look_at_interfaces(&self) -> Vec<InterfaceChange> {
        match &self.engine {
            Engine::Kernel(kernel) => {
                let mut interfaces = lock(&kernel.interfaces);
                let changes = interfaces.look(&kernel.programs);
                kernel.covers_loopback.store(interfaces.include_loopback(), Ordering::Relaxed);
                changes
            }
            Engine::User(_) => Vec::new(),
        }
    }

    /// Whether an interface has vanished and is not back, as [`Gate::look_at_interfaces`] has found.
    pub fn misses_an_interface(&self) -> bool {
        matches!(&self.engine, Engine::Kernel(kernel) if lock(&kernel.interfaces).any_gone())
    }

    /// Which mechanism enforces which rule and why, with counters.
    pub fn show(&self) -> Result<Report, GateError> {
        match &self.engine {
            Engine::Kernel(kernel) => {
                let maps = &kernel.programs.maps;
                let (interfaces, unavailable): (_, Vec<Unavailable>) = {
                    let interfaces = lock(&kernel.interfaces);
                    (interfaces.names(), interfaces.unavailable().collect())
                };
                Ok(Report {
                    interfaces,
                    rules: report::rules(maps)?,
                    unavailable: self.unavailable.iter().cloned().chain(unavailable).collect(),
                    totals: report::totals(maps)?,
                    blocked: kernel.block_stats()?,
                    overloaded: maps.control(abi::TG_CONTROL_OVERLOAD)? != 0,
                })
            }
            Engine::User(user) => Ok(Report {
                interfaces: Vec::new(),
                rules: user.rules(),
                unavailable: self.unavailable.clone(),
                totals: Vec::new(),
                blocked: self.blocks().stats()?,
                overloaded: user.is_overloaded(),
            }),
        }
    }

    /// Runs the kernel program on a frame without any network (BPF_PROG_TEST_RUN), for tests and measurements.
    /// Counters and tokens change as if the frame had arrived.
    pub fn try_frame(&self, mechanism: Mechanism, frame: &[u8], repeat: u32) -> Result<Trial, GateError> {
        let Engine::Kernel(kernel) = &self.engine else {
            return Err(GateError::NotAttached { interface: None });
        };
        let (action, mean) = kernel.programs.run(mechanism, frame, repeat)?;
        let passed = match mechanism {
            Mechanism::Xdp => action == XDP_PASS,
            _ => action == TC_ACT_OK,
        };
        Ok(Trial { passed, mean })
    }

    /// Puts a limit on each priority class, besides those of rules, and has the gate measure how long requests of each
    /// class take; `None` and classes beyond `limits` are unlimited.
    pub fn limit_classes(&self, rules: &RuleSet, limits: &[Option<Profile>]) -> Result<(), GateError> {
        let by_connection = rules.connections.iter().any(|rule| rule.class.is_some());
        let by_request = rules.requests.iter().any(|rule| rule.class.is_some());
        let kernel = match &self.engine {
            Engine::Kernel(kernel) => kernel,
            Engine::User(user) => {
                lock(&user.policer).limit_classes(limits, by_connection, by_request, system::now_ns());
                return Ok(());
            }
        };
        let maps = &kernel.programs.maps;
        for class in 0..abi::TG_MAX_CLASSES {
            let limit = limits.get(class as usize).copied().flatten();
            let rule = kernel_rule(abi::TG_MAX_SLOTS + class, limit, When::Always, None);
            if let Some(before) = maps.read("class_limits", &class)? {
                keep_tokens(maps, &before, &rule, system::now_ns())?;
            }
            maps.write("class_limits", &class, &rule)?;
        }
        // Without classes all is in one: then what is asked for is what can be counted.
        let flags = match (by_connection, by_request) {
            (false, _) => abi::TG_CLASSES_REQUESTS,
            (true, false) => abi::TG_CLASSES_SYNS,
            (true, true) => abi::TG_CLASSES_SYNS | abi::TG_CLASSES_REQUESTS,
        };
        maps.set_control(abi::TG_CONTROL_CLASSES, flags.into())
    }

    /// What happened in each class since classes are limited.
    pub(crate) fn class_totals(&self) -> Result<Vec<ClassTotals>, GateError> {
        let kernel = match &self.engine {
            Engine::Kernel(kernel) => kernel,
            Engine::User(user) => return Ok(user.class_totals()),
        };
        let maps = &kernel.programs.maps;
        // Interfaces without the program that sees answers measure nothing.
        let measured = lock(&kernel.interfaces).attached().iter().any(|one| one.answer.is_ok());
        let one = |class: u32| {
            let state: Option<abi::tg_state> = maps.read("states", &(abi::TG_MAX_SLOTS + class))?;
            let mut latencies = no_latencies();
            if measured {
                for (bucket, count) in (0..).zip(&mut latencies) {
                    *count = maps.per_cpu("latencies", &(class * abi::TG_LATENCY_BUCKETS + bucket))?;
                }
            }
            Ok(ClassTotals {
                passed: state.map_or(0, |state| state.passed),
                refused: state.map_or(0, |state| state.refused),
                latencies: measured.then_some(latencies),
            })
        };
        let classes = kernel.in_force().policer.classes();
        (0..classes).map(one).collect()
    }

    /// What each kernel program that is loaded cost the verifier.
    pub fn program_costs(&self) -> Result<Vec<ProgramCost>, GateError> {
        match &self.engine {
            Engine::Kernel(kernel) => kernel.programs.costs(),
            Engine::User(_) => Ok(Vec::new()),
        }
    }

    /// Begins to tell of TCP events on the ports where cleartext HTTP is spoken.
    pub fn tcp_events(&self) -> Result<TcpEvents, GateError> {
        let Engine::Kernel(kernel) = &self.engine else {
            let why = Why::NoKernelPrograms.to_string();
            return Err(GateError::Unavailable { what: "the telling of TCP events", why });
        };
        let ring = MapHandle::try_from(kernel.programs.maps.get("events")?);
        Ok(TcpEvents::new(
            ring.map_err(GateError::kernel("opening the events"))?,
            kernel.programs.attach_events()?,
        ))
    }

    /// Steering of new connections, attached when first asked for; or why it cannot be had.
    pub(crate) fn queues(&self) -> Result<Arc<Queues>, String> {
        let Engine::Kernel(kernel) = &self.engine else {
            return Err(Why::NoKernelPrograms.to_string());
        };
        let mut queues = lock(&kernel.queues);
        if let Some(queues) = &*queues {
            return Ok(Arc::clone(queues));
        }
        let link = kernel.programs.attach_steering()?;
        let maps = kernel.programs.maps.only(&["queues", "listeners"]).map_err(|error| error.to_string())?;
        let made = Arc::new(Queues { maps, link, used: Mutex::new([false; abi::TG_MAX_QUEUES as usize]) });
        Ok(Arc::clone(queues.insert(made)))
    }

    /// Detaches; dropping the gate does the same.
    pub fn detach(self) {}
}

/// Whether a connection comes from this host.
fn is_from_here(source: IpAddr, destination: IpAddr) -> bool {
    let source = source.to_canonical();
    source.is_loopback() || source == destination.to_canonical()
}

/// An address as the kernel programs compare it.
pub(crate) fn mapped(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

impl Kernel {
    fn block_stats(&self) -> Result<BlockStats, GateError> {
        let blocks = Blocks::kernel(&self.programs.maps);
        let changed_ns = blocks.changed_ns()?;
        let mut known = lock(&self.block_stats);
        match *known {
            Some((then, stats)) if then == changed_ns => Ok(stats),
            _ => Ok(known.insert((changed_ns, blocks.stats()?)).1),
        }
    }

    fn misses_loopback(&self) -> bool {
        !self.covers_loopback.load(Ordering::Relaxed)
    }

    /// For one decision: a reload waits for those who hold one of the set before the last.
    fn in_force(&self) -> Arc<InForce> {
        Arc::clone(&lock(&self.rules))
    }

    /// Polices a connection whose SYN passed no interface with a program.
    fn on_connect(&self, peer: SocketAddr, local: SocketAddr) -> Decision {
        let in_force = self.in_force();
        let mut decision = in_force.policer.classify(peer.ip(), local.ip(), local.port());
        if let Some(entry) = decision.rule.and_then(|index| in_force.entries.connections.get(index)) {
            let question = abi::tg_question { rule: *entry, ..abi::tg_question::new_zeroed() };
            // The kernel refusing to run a program it has loaded is no fault of the client's.
            if !self.programs.ask(&question).unwrap_or(true) {
                decision.verdict = Verdict::Drop;
            }
        }
        decision
    }

    fn on_request(&self, asked: &Asked<'_>) -> Decision {
        let in_force = self.in_force();
        let mut decision = in_force.policer.classify_request(asked.path, asked.cookie);
        let Some((index, entry)) =
            decision.rule.and_then(|index| Some((index, *in_force.entries.requests.get(index)?)))
        else {
            return decision;
        };
        let mut question = abi::tg_question { rule: entry, ..abi::tg_question::new_zeroed() };
        if entry.flags & abi::TG_RULE_ELSEWHERE == 0 {
            question.credit = abi::tg_credit {
                client: mapped(asked.peer.ip()),
                client_port: asked.peer.port(),
                server_port: asked.port,
                slot: entry.slot,
            };
        }
        // The kernel refusing to run a program it has loaded is no fault of the client's.
        let compliant = self.programs.ask(&question).unwrap_or(true);
        decision.verdict = in_force.policer.requests().rules()[index].verdict(compliant);
        decision
    }
}
