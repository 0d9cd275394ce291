use std::time::Duration;

use super::policy::CachePolicy;
use crate::ports::ClientPorts;

/// Settings of one client.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// Longest HTTP request sent by UDP, in bytes (DHTTP §III).
    pub request_bytes: usize,
    /// Longest datagram payload to an IPv4 server, in bytes.
    pub datagram_v4_bytes: usize,
    /// Longest datagram payload to an IPv6 server, in bytes.
    pub datagram_v6_bytes: usize,
    /// How long the first answer is waited for (DHTTP §III-A: 5 s).
    pub first_timeout: Duration,
    /// How long an answer is waited for at most (DHTTP §III-A: 10 s).
    pub max_timeout: Duration,
    /// By how much each wait is longer than the one before.
    pub backoff: f64,
    /// The part of each wait that is random, 0 to 1, so that clients that lost together do not send together.
    pub jitter: f64,
    /// Longest response taken in several datagrams, in bytes; with 0 there are none.
    pub pieces_bytes: usize,
    /// How long a missing piece is waited for after the last one that came; doubled each time it is asked for.
    pub repair_timeout: Duration,
    /// Whether requests that must not be repeated go by UDP too, where the server sees to it that each is executed
    /// once.
    pub once: bool,
    /// How often a request is sent again before the client opens a connection for it.
    pub resends: u32,
    /// Most requests that wait for their response at one time.
    pub outstanding: usize,
    /// Whose answers are taken.
    pub caches: CachePolicy,
    /// The ports to choose from.
    pub ports: ClientPorts,
    /// How long a pair of ports is used (DHTTP §IV-C).
    pub port_lifetime: Duration,
    /// For how many requests a pair of ports is used.
    pub port_requests: u32,
    /// Most tokens kept; the oldest goes first.
    pub tokens: usize,
    /// After how long without a datagram from a server it is asked for a sign of life, four times as long if it has
    /// given a token; zero: never.
    pub probe_after: Duration,
    /// How often it is asked, as far apart, before its requests go over connections, and others to it for some time.
    pub probes: usize,
    /// How long a server that could not be reached by UDP is spoken to by other means.
    pub unreachable_for: Duration,
    /// Most such servers remembered; the oldest goes first.
    pub unreachable: usize,
}

impl Default for ClientConfig {
    fn default() -> Self {
        Self {
            request_bytes: 1460,
            datagram_v4_bytes: 1472,
            datagram_v6_bytes: 1452,
            first_timeout: Duration::from_secs(5),
            max_timeout: Duration::from_secs(10),
            backoff: 2.0,
            jitter: 0.1,
            pieces_bytes: 65_536,
            repair_timeout: Duration::from_millis(200),
            once: true,
            resends: 2,
            outstanding: 1024,
            caches: CachePolicy::default(),
            ports: ClientPorts::default(),
            port_lifetime: Duration::from_secs(300),
            port_requests: 1000,
            tokens: 1024,
            probe_after: Duration::from_millis(500),
            probes: 2,
            unreachable_for: Duration::from_secs(300),
            unreachable: 1024,
        }
    }
}
