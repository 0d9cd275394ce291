//! A gate before the server's host, and its rules.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use tidegate_core::IpPrefix;
use tidegate_gate::{Gate, GateError, ListenQueue, Options};
use tidegate_policy::{
    Action, Class, ConnectionRule, Destination, PortRange, Profile, RequestRule, RuleSet, When,
};

use super::{PORT, Testbed};
use crate::Error;

/// Connections that wait to be accepted, of each class.
const BACKLOG: u32 = 1024;

/// A gate on the server's interface; detached when this is dropped.
pub struct Guard {
    /// The gate.
    pub gate: Gate,
}

impl Guard {
    /// Attaches kernel programs with these rules. A client that was reset may try again at once: all clients of a group
    /// have one address, and would be kept out together.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn attach(bed: &Testbed, rules: &RuleSet) -> Result<Self, Error> {
        let options = Options { reset_penalty: Duration::ZERO, ..Options::default() };
        let gate = bed.on_server(|| Gate::attach(bed.interface(), rules, &options))?;
        Ok(Self { gate: gate.map_err(failed)? })
    }

    /// Other rules from now on.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn replace(&self, rules: &RuleSet) -> Result<(), Error> {
        self.gate.replace_rules(rules).map_err(failed)
    }

    /// An accept queue for each of `classes` classes.
    ///
    /// # Errors
    /// When the sockets cannot be had, or connections not be steered to them.
    pub fn listen(&self, bed: &Testbed, at: SocketAddr, classes: usize) -> Result<ListenQueue, Error> {
        let bound = bed.on_server(|| ListenQueue::bind(&self.gate, at, classes, BACKLOG))?;
        match bound.map_err(failed)? {
            (queue, None) => Ok(queue),
            (_, Some(why)) => Err(Error::Testbed(format!("connections cannot be sorted by class: {why}"))),
        }
    }
}

pub(crate) fn failed(error: GateError) -> Error {
    Error::Testbed(error.to_string())
}

/// A rate in connections or requests per second, and how many at once.
pub fn only(rate: f64, burst: u32) -> Option<Profile> {
    Profile::new(rate, burst).ok()
}

/// A rule for the clients of 10.77.`network`.0/24.
pub fn by_source(network: u8, limit: Option<Profile>, class: Option<Class>) -> ConnectionRule {
    ConnectionRule {
        destination: Destination { address: None, ports: PortRange::one(PORT) },
        source: IpPrefix::new(Ipv4Addr::new(10, 77, network, 0).into(), 24).ok(),
        limit,
        when: When::Always,
        class,
    }
}

/// A rule for requests below a path.
///
/// # Errors
/// When it is no pattern.
pub fn by_url(
    path: &str,
    limit: Option<Profile>,
    class: Option<Class>,
    action: Option<Action>,
) -> Result<RequestRule, Error> {
    let path = path.parse().map_err(|error| Error::Testbed(format!("{path}: {error}")))?;
    Ok(RequestRule { path, cookie: None, limit, when: When::Always, action, class })
}

/// Rules of both kinds for the server's port.
pub fn rules(connections: Vec<ConnectionRule>, requests: Vec<RequestRule>) -> RuleSet {
    RuleSet { connections, requests, http_ports: vec![PortRange::one(PORT)], ..RuleSet::default() }
}
