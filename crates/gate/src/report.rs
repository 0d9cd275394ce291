//! What enforces which rule, and why not something better.

use std::fmt;

use tidegate_core::metrics::{Kind, Sample};

use crate::abi;
use crate::maps::Maps;
use crate::{BlockStats, GateError};

/// Where a rule is enforced, the earliest first.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub enum Mechanism {
    /// At the network interface, before the stack sees the packet.
    Xdp = 0,
    /// Where a segment enters the stack, before the server wakes.
    Tc = 1,
    /// When tidegate accepts the connection.
    Accept = 2,
    /// When tidegate has parsed the request.
    Server = 3,
    /// Nowhere: only a server could, and the one behind these programs does not ask.
    Nobody = 4,
}

impl Mechanism {
    const ALL: [Self; 5] = [Self::Xdp, Self::Tc, Self::Accept, Self::Server, Self::Nobody];

    pub(crate) fn from_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|mechanism| *mechanism as u32 == code)
    }
}

impl fmt::Display for Mechanism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Xdp => "xdp",
            Self::Tc => "tc",
            Self::Accept => "accept",
            Self::Server => "server",
            Self::Nobody => "nobody",
        })
    }
}

macro_rules! reasons {
    ($($(#[$meta:meta])* $name:ident = $code:literal $text:literal,)*) => {
        /// Why a rule is enforced where it is.
        #[derive(Clone, Copy, Debug, Eq, PartialEq)]
        #[non_exhaustive]
        #[repr(u32)]
        pub enum Why { $($(#[$meta])* #[doc = $text] $name = $code,)* }

        impl Why {
            pub(crate) fn from_code(code: u32) -> Option<Self> {
                match code { $($code => Some(Self::$name),)* _ => None }
            }
        }

        impl fmt::Display for Why {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $(Self::$name => $text,)* })
            }
        }
    };
}

reasons! {
    Earliest = 0 "the earliest place that can know it",
    NoKernelPrograms = 1 "no kernel program is loaded",
    NoTc = 2 "the program for segments is not attached",
    NoHttpPort = 3 "no port is declared as cleartext HTTP",
    OnlyServerAnswers = 4 "only a server can answer 503",
    PriorityOnly = 5 "it refuses nothing: it exempts from other rules, or gives a priority",
    TooLong = 6 "its path or cookie is longer than the kernel program compares",
    TooManyPatterns = 7 "there are more suffixes, infixes and cookies than the kernel program searches for",
    NoStringSearch = 8 "this kernel has no bpf_strnstr (Linux 6.17)",
    AfterServerRule = 9 "a rule that is asked before it is recognized in the server only",
}

/// Whether a rule is about connections or requests.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum RuleKind {
    /// Who connects.
    Connection,
    /// What is asked for.
    Request,
}

/// One rule.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct RuleReport {
    /// Which table it is of.
    pub kind: RuleKind,
    /// The rule as text, shortened.
    pub rule: String,
    /// Where it is enforced.
    pub mechanism: Mechanism,
    /// Why there.
    pub why: Why,
    /// Connections or requests that complied there.
    pub passed: u64,
    /// Violations there.
    pub refused: u64,
}

/// Something this host cannot do.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Unavailable {
    /// What would be better.
    pub what: &'static str,
    /// Why it is not to be had, as the kernel puts it.
    pub why: String,
}

/// What `tidegate gate show` prints.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Interfaces with programs.
    pub interfaces: Vec<String>,
    /// Every rule in force, connection rules first, in the order of the configuration.
    pub rules: Vec<RuleReport>,
    /// What cannot be had, and why.
    pub unavailable: Vec<Unavailable>,
    /// Totals; empty without kernel programs.
    pub totals: Vec<Sample>,
    /// The block list.
    pub blocked: BlockStats,
    /// Whether overload is signalled.
    pub overloaded: bool,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.interfaces.as_slice() {
            [] => writeln!(f, "interfaces: none")?,
            names => writeln!(f, "interfaces: {}", names.join(", "))?,
        }
        writeln!(f, "overload: {}", if self.overloaded { "signalled" } else { "no" })?;
        let BlockStats { addresses, prefixes, evicted } = self.blocked;
        writeln!(f, "blocked: {addresses} addresses, {prefixes} prefixes, {evicted} addresses evicted")?;
        for Unavailable { what, why } in &self.unavailable {
            writeln!(f, "not available: {what}: {why}")?;
        }
        for rule in &self.rules {
            let RuleReport { rule, mechanism, why, passed, refused, .. } = rule;
            writeln!(f, "{mechanism:<7} passed {passed:<10} refused {refused:<10} {rule}   ({why})")?;
        }
        for sample in &self.totals {
            writeln!(f, "{:<28} {}", sample.name, sample.value)?;
        }
        Ok(())
    }
}

const TOTALS: [(abi::tg_counter, &str, &str); 19] = [
    (abi::TG_COUNT_BLOCKED, "gate_blocked_packets_total", "Packets from blocked addresses."),
    (abi::TG_COUNT_PENALTY, "gate_penalty_syns_total", "SYNs dropped because their client was just reset."),
    (abi::TG_COUNT_SYN_PASSED, "gate_syns_passed_total", "SYNs that were let pass."),
    (abi::TG_COUNT_SYN_POLICED, "gate_syns_policed_total", "SYNs dropped for want of a token."),
    (abi::TG_COUNT_SYN_HELD, "gate_syns_held_total", "SYNs held back while a higher class waited."),
    (
        abi::TG_COUNT_MALFORMED,
        "gate_malformed_packets_total",
        "Packets that hid their TCP ports: in fragments, behind more than four IPv6 extension headers or two VLAN tags.",
    ),
    (
        abi::TG_COUNT_CLASS_POLICED,
        "gate_class_policed_total",
        "SYNs and requests beyond the limit that the agent has set for their class.",
    ),
    (abi::TG_COUNT_STEERED, "gate_steered_total", "Connections given to the queue of their class."),
    (abi::TG_COUNT_STEER_FAILED, "gate_steer_failed_total", "Connections whose class's queue was gone."),
    (abi::TG_COUNT_REQUEST_PASSED, "gate_requests_passed_total", "Requests under a rule that were let pass."),
    (
        abi::TG_COUNT_REQUEST_REPEATED,
        "gate_requests_repeated_total",
        "Requests whose segment was lost behind the gate and came again, at no second token.",
    ),
    (abi::TG_COUNT_REQUEST_DROPPED, "gate_requests_dropped_total", "Requests whose segment was dropped."),
    (abi::TG_COUNT_REQUEST_RESET, "gate_requests_reset_total", "Requests whose connection was reset."),
    (
        abi::TG_COUNT_REQUEST_PARTIAL,
        "gate_requests_partial_total",
        "Requests whose head no segment showed whole.",
    ),
    (
        abi::TG_COUNT_REQUEST_SERVER,
        "gate_requests_refused_by_server_total",
        "Requests that the server refused by a rule.",
    ),
    (abi::TG_COUNT_EVENT, "gate_tcp_events_total", "TCP events offered to classifiers."),
    (
        abi::TG_COUNT_EVENT_LOST,
        "gate_tcp_events_lost_total",
        "TCP events lost because nobody took them in time.",
    ),
    (
        abi::TG_COUNT_REQUEST_STRAY,
        "gate_requests_stray_total",
        "Requests in segments that fit no connection of this host: no token, no penalty, no reset.",
    ),
    (abi::TG_COUNT_RESET_FAILED, "gate_resets_failed_total", "Resets that did not reach the client."),
];

/// Totals over all processors.
pub(crate) fn totals(maps: &Maps) -> Result<Vec<Sample>, GateError> {
    let one = |&(key, name, help)| Ok(Sample { name, help, kind: Kind::Counter, value: maps.counter(key)? });
    TOTALS.iter().map(one).collect()
}

/// Every rule of the set in force, read from the maps, so that any process can.
pub(crate) fn rules(maps: &Maps) -> Result<Vec<RuleReport>, GateError> {
    let mut found = Vec::new();
    // Programs before another server have nobody to leave a rule to. Of priorities the agent's limits, at TC, know.
    let server_asks = maps.control(abi::TG_CONTROL_CREDITS)? != 0;
    let agent_limits = maps.control(abi::TG_CONTROL_CLASSES)? & u64::from(abi::TG_CLASSES_REQUESTS) != 0;
    for slot in 0..abi::TG_MAX_SLOTS {
        let Some(label) = maps.read::<abi::tg_label>("labels", &slot)? else { break };
        let kind = match label.kind {
            abi::TG_LABEL_CONNECTION => RuleKind::Connection,
            abi::TG_LABEL_REQUEST => RuleKind::Request,
            _ => continue,
        };
        let state: Option<abi::tg_state> = maps.read("states", &slot)?;
        let why = Why::from_code(label.why).unwrap_or(Why::Earliest);
        let mechanism = match Mechanism::from_code(label.mechanism).unwrap_or(Mechanism::Server) {
            Mechanism::Server if server_asks => Mechanism::Server,
            Mechanism::Server if agent_limits && why == Why::PriorityOnly => Mechanism::Tc,
            Mechanism::Server => Mechanism::Nobody,
            mechanism => mechanism,
        };
        let end = label.text.iter().position(|byte| *byte == 0).unwrap_or(label.text.len());
        let report = RuleReport {
            kind,
            rule: String::from_utf8_lossy(&label.text[..end]).into_owned(),
            mechanism,
            why,
            passed: state.map_or(0, |state| state.passed),
            refused: state.map_or(0, |state| state.refused),
        };
        found.push(((label.kind, label.order), report));
    }
    found.sort_by_key(|(place, _)| *place);
    Ok(found.into_iter().map(|(_, report)| report).collect())
}
