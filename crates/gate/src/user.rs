//! The rules enforced without kernel programs, by the process that serves.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Mutex;

use tidegate_core::Verdict;
use tidegate_policy::{BlockList, Decision, Policer, RuleSet};

use crate::abi;
use crate::gate::lock;
use crate::pilot::ClassTotals;
use crate::report::{Mechanism, RuleKind, RuleReport, Why};
use crate::{GateError, system};

/// Rules, buckets, block list and penalties of one process.
#[derive(Debug)]
pub(crate) struct User {
    pub(crate) policer: Mutex<Policer>,
    pub(crate) blocked: Mutex<BlockList>,
    penalties: Mutex<Penalties>,
    overloaded: Mutex<bool>,
}

impl User {
    pub(crate) fn new(rules: &RuleSet) -> Result<Self, GateError> {
        let (addresses, prefixes) = (abi::TG_MAX_BLOCKED as usize, abi::TG_MAX_BLOCKED_PREFIXES as usize);
        Ok(Self {
            policer: Mutex::new(Policer::new(rules)?),
            blocked: Mutex::new(BlockList::new(addresses, prefixes)),
            penalties: Mutex::default(),
            overloaded: Mutex::new(false),
        })
    }

    pub(crate) fn set_overload(&self, overloaded: bool) {
        lock(&self.policer).set_overload(overloaded);
        *lock(&self.overloaded) = overloaded;
    }

    pub(crate) fn is_overloaded(&self) -> bool {
        *lock(&self.overloaded)
    }

    pub(crate) fn penalize(&self, client: IpAddr, until_ns: u64) {
        lock(&self.penalties).add(client, until_ns);
    }

    pub(crate) fn on_connect(&self, peer: SocketAddr, local: SocketAddr) -> Decision {
        let source = peer.ip();
        if self.ignores(source) {
            return Decision { verdict: Verdict::Drop, class: 0, rule: None };
        }
        lock(&self.policer).on_connect(source, local.ip(), local.port(), system::now_ns())
    }

    pub(crate) fn ignores(&self, source: IpAddr) -> bool {
        let now_ns = system::now_ns();
        lock(&self.blocked).hit(source, now_ns) || lock(&self.penalties).holds(source, now_ns)
    }

    pub(crate) fn ignores_any(&self) -> bool {
        !lock(&self.blocked).is_empty() || !lock(&self.penalties).until_ns.is_empty()
    }

    /// Whether there is anything to decide on connections just now.
    pub(crate) fn acts_on_connections(&self) -> bool {
        self.ignores_any() || !lock(&self.policer).connections().rules().is_empty()
    }

    /// Nobody measures latencies here.
    pub(crate) fn class_totals(&self) -> Vec<ClassTotals> {
        let counts = lock(&self.policer).class_counts();
        let of = |counts: &tidegate_policy::RuleCounts| ClassTotals {
            passed: counts.passed,
            refused: counts.refused,
            latencies: None,
        };
        counts.iter().map(of).collect()
    }

    pub(crate) fn rules(&self) -> Vec<RuleReport> {
        rule_reports(&lock(&self.policer))
    }
}

/// Clients that were just reset, until when.
#[derive(Debug, Default)]
struct Penalties {
    until_ns: HashMap<IpAddr, u64>,
}

impl Penalties {
    /// Where there are very many, the ones before are forgiven.
    fn add(&mut self, client: IpAddr, until_ns: u64) {
        if self.until_ns.len() >= abi::TG_MAX_PENALTIES as usize {
            self.until_ns.clear();
        }
        self.until_ns.insert(client, until_ns);
    }

    fn holds(&mut self, client: IpAddr, now_ns: u64) -> bool {
        let holds = self.until_ns.get(&client).map(|until_ns| *until_ns > now_ns);
        if holds == Some(false) {
            self.until_ns.remove(&client);
        }
        holds.unwrap_or(false)
    }
}

fn rule_reports(policer: &Policer) -> Vec<RuleReport> {
    let connections = policer.connections().rules().iter().zip(policer.connection_counts());
    let connections = connections.map(|(rule, counts)| RuleReport {
        kind: RuleKind::Connection,
        rule: rule.to_string(),
        mechanism: Mechanism::Accept,
        why: Why::NoKernelPrograms,
        passed: counts.passed,
        refused: counts.refused,
    });
    let requests = policer.requests().rules().iter().zip(policer.request_counts());
    let requests = requests.map(|(rule, counts)| RuleReport {
        kind: RuleKind::Request,
        rule: rule.to_string(),
        mechanism: Mechanism::Server,
        why: Why::NoKernelPrograms,
        passed: counts.passed,
        refused: counts.refused,
    });
    connections.chain(requests).collect()
}
