//! DHTTP §VI-A: how many connections a trace needs under HTTP and under DHTTP.

use std::collections::VecDeque;

use crate::trace::Access;

/// Most connections of one client that are simulated.
const SLOTS: usize = 3;

/// What a server does.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    /// Responses shorter than this need no connection; 0: HTTP.
    pub by_udp_below_bytes: u64,
    /// How long an idle connection is kept.
    pub timeout_s: f64,
    /// Most connections of one client.
    pub per_client: usize,
}

/// What that took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Load {
    /// Most connections at one time.
    pub at_once: u64,
    /// Connections opened.
    pub in_all: u64,
    /// Bytes sent over them.
    pub bytes: u64,
    /// Responses sent by UDP.
    pub by_udp: u64,
}

impl Load {
    pub(super) fn bytes_per_connection(&self) -> f64 {
        self.bytes as f64 / self.in_all as f64
    }
}

/// The end of a connection, unless it is used again before.
struct Expiry {
    at_s: f64,
    client: u32,
    slot: usize,
}

/// Runs a trace, which is in the order of time.
///
/// As in the paper, a client opens a connection for each access until it has as many as it may; then the one that has
/// not been used for longest is used again. Generating a response takes no time.
pub(super) fn simulate(trace: &[Access], rules: Rules) -> Load {
    let clients = trace.iter().map(|access| access.client as usize + 1).max().unwrap_or(0);
    // When each connection of each client ends; it is open if that is in the future.
    let mut ends_s = vec![[f64::NEG_INFINITY; SLOTS]; clients];
    // All connections end the same time after their last use: in the order of last uses.
    let mut expiries: VecDeque<Expiry> = VecDeque::new();
    let (mut load, mut open) = (Load::default(), 0u64);
    for access in trace {
        while let Some(expiry) = expiries.front().filter(|expiry| expiry.at_s <= access.at_s) {
            // Used again meanwhile, it has a later end, and a later entry.
            if ends_s[expiry.client as usize][expiry.slot] == expiry.at_s {
                open -= 1;
            }
            expiries.pop_front();
        }
        if access.bytes < rules.by_udp_below_bytes {
            load.by_udp += 1;
            continue;
        }
        let own = &mut ends_s[access.client as usize][..rules.per_client.min(SLOTS)];
        let oldest =
            own.iter().enumerate().min_by(|(_, a), (_, b)| a.total_cmp(b)).map_or(0, |(slot, _)| slot);
        if own[oldest] <= access.at_s {
            load.in_all += 1;
            open += 1;
            load.at_once = load.at_once.max(open);
        }
        own[oldest] = access.at_s + rules.timeout_s;
        expiries.push_back(Expiry { at_s: own[oldest], client: access.client, slot: oldest });
        load.bytes += access.bytes;
    }
    load
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(at_s: f64, client: u32, bytes: u64) -> Access {
        Access { at_s, client, bytes }
    }

    const HTTP: Rules = Rules { by_udp_below_bytes: 0, timeout_s: 10.0, per_client: 3 };

    #[test]
    fn a_client_opens_connections_up_to_its_limit_and_then_uses_the_oldest_again() {
        let trace: Vec<Access> = (0..5).map(|second| access(f64::from(second), 0, 100)).collect();
        let load = simulate(&trace, HTTP);
        assert_eq!(load, Load { at_once: 3, in_all: 3, bytes: 500, by_udp: 0 });
        assert_eq!(simulate(&trace, Rules { per_client: 1, ..HTTP }).in_all, 1);
    }

    #[test]
    fn a_connection_ends_with_its_timeout_unless_it_is_used_before() {
        let one = Rules { per_client: 1, ..HTTP };
        let at = |times: &[f64]| {
            simulate(&times.iter().map(|at_s| access(*at_s, 0, 1)).collect::<Vec<_>>(), one).in_all
        };
        assert_eq!(at(&[0.0, 9.9, 19.8]), 1);
        assert_eq!(at(&[0.0, 10.0]), 2);
    }

    #[test]
    fn connections_at_once_are_those_of_all_clients_that_are_open() {
        let trace = [access(0.0, 0, 1), access(5.0, 1, 1), access(12.0, 2, 1), access(30.0, 0, 1)];
        let load = simulate(&trace, HTTP);
        assert_eq!((load.at_once, load.in_all), (2, 4));
    }

    #[test]
    fn short_responses_need_no_connection_under_dhttp() {
        let trace = [access(0.0, 0, 1459), access(1.0, 0, 1460), access(2.0, 0, 10)];
        let load = simulate(&trace, Rules { by_udp_below_bytes: 1460, ..HTTP });
        assert_eq!(load, Load { at_once: 1, in_all: 1, bytes: 1460, by_udp: 2 });
        assert_eq!(load.bytes_per_connection(), 1460.0);
    }
}
