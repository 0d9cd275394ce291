#![forbid(unsafe_code)]
//! Rules about connections and requests, and what they decide: the part that the kernel's gate and its user-space
//! fallback share, so that both give the same verdicts.
//!
//! The mechanisms are those of *Kernel Mechanisms for Service Differentiation in Overloaded Web Servers* (sections 3.1,
//! 3.3 and 3.4). Nothing here reads a clock or sees a socket: time comes in as nanoseconds of one monotonic clock.

mod agent;
mod block;
mod bucket;
mod connection;
mod policer;
mod request;
mod stress;
mod table;
mod tally;

pub use agent::{Adjustment, Agent, ClassObservation, Goals, Observation};
pub use block::{
    BlockEntry, BlockList, BlockListError, ListFileError, SavedBlock, SavedBlockError, gives_way, parse_list,
};
pub use bucket::{LimitError, Profile, TOKEN_UNITS, TokenBucket};
pub use connection::{ConnectionRule, Destination, DestinationError, PortRange};
pub use policer::{Decision, Policer, RuleCounts};
pub use request::{
    Action, CookiePattern, CookiePatternError, PathPattern, PathPatternError, RequestRule, RequestTable,
};
pub use stress::{Stress, StressLevel, StressWatch};
pub use table::{ConnectionTable, FamilyTable, SourceEntry, TableError};
pub use tally::Tally;

/// When a rule's rate limit acts. The paper's section 3.1 enforces it only while overload is detected.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub enum When {
    /// At all times.
    #[default]
    Always,
    /// Only while overload is signalled.
    Overload,
}

/// A priority class; 0 is served first. The configuration's `priority = 1` is class 0.
pub type Class = u8;

/// The greatest number of classes.
pub const MAX_CLASSES: usize = 8;

/// Everything an operator has written down for the gate.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RuleSet {
    /// Rules about who connects, in the order of the configuration.
    pub connections: Vec<ConnectionRule>,
    /// Rules about what is asked for, in the order of the configuration.
    pub requests: Vec<RequestRule>,
    /// Ports on which cleartext HTTP is spoken: only there are requests recognized in segments.
    pub http_ports: Vec<PortRange>,
    /// Ports that connection rules are about at all, a rule for every port included; empty: every port. A server that
    /// polices its own listeners must not police the rest of the host.
    pub only_ports: Vec<PortRange>,
    /// Ports at which a proxy names the client of each connection. Packets there are the proxy's: rules act once the
    /// client is known, and not on them.
    pub proxied_ports: Vec<PortRange>,
    /// Ports at which requests may come in frames of HTTP/2, in which no segment shows them: rules for them act where the
    /// frames are read.
    pub framed_ports: Vec<PortRange>,
}

impl RuleSet {
    /// Whether connection rules are about this port.
    pub fn covers(&self, port: u16) -> bool {
        self.only_ports.is_empty() || self.only_ports.iter().any(|range| range.contains(port))
    }

    /// Whether a proxy names the clients at this port.
    pub fn is_proxied(&self, port: u16) -> bool {
        self.proxied_ports.iter().any(|range| range.contains(port))
    }

    /// Ports at which requests are recognized in segments.
    pub fn ports_with_requests_in_segments(&self) -> impl Iterator<Item = u16> {
        let ports = self.http_ports.iter().flat_map(|range| range.first()..=range.last());
        let is_framed = |port| self.framed_ports.iter().any(|range| range.contains(port));
        ports.filter(move |port| !self.is_proxied(*port) && !is_framed(*port))
    }

    /// The number of classes: one more than the lowest class a rule names. What no rule names is in the last one.
    pub fn classes(&self) -> usize {
        let named = self.connections.iter().filter_map(|rule| rule.class);
        let lowest = named.chain(self.requests.iter().filter_map(|rule| rule.class)).max().unwrap_or(0);
        usize::from(lowest) + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_looked_for_in_segments_where_segments_are_the_clients_and_show_them() {
        let rules = RuleSet {
            http_ports: vec![PortRange::one(80), "8000-8003".parse().unwrap()],
            proxied_ports: vec![PortRange::one(8001)],
            framed_ports: vec![PortRange::one(80), PortRange::one(8002)],
            ..RuleSet::default()
        };
        assert_eq!(rules.ports_with_requests_in_segments().collect::<Vec<_>>(), [8000, 8003]);
    }
}
