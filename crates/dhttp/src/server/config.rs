use std::time::Duration;

use tidegate_http::HeadLimits;
use tidegate_http::normalize::Personality;

use super::connections::ConnectionLimits;
use crate::ports::ClientPorts;

/// Settings of one server core.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Longest HTTP response sent by UDP, in bytes: `s` of DHTTP §III-C.
    pub size_threshold_bytes: usize,
    /// Longest HTTP response sent in several datagrams to clients that take them, in bytes, while nothing is known of
    /// the way to them: what TCP would send before it hears of the first of them (RFC 6928). With 0 there are none.
    pub pieces_bytes: usize,
    /// The same to a network on the way to which nothing has been lost for a while. A few of them fit the receive
    /// buffer that a client gets from a kernel as it is by default.
    pub most_pieces_bytes: usize,
    /// Longest datagram payload to an IPv4 client, in bytes; beyond 1,472 Ethernet fragments it.
    pub datagram_v4_bytes: usize,
    /// Longest datagram payload to an IPv6 client, in bytes; beyond 1,452 Ethernet fragments it.
    pub datagram_v6_bytes: usize,
    /// Resent requests per response sent by UDP that count as high loss, 0 to 1: `L` of DHTTP §III-C.
    pub loss_threshold: f64,
    /// Time in which what is known about loss counts half.
    pub loss_half_life: Duration,
    /// Most networks whose loss is told apart.
    pub networks: usize,
    /// How many requests answered by connections are remembered (DHTTP §III-C).
    pub answered_ids: usize,
    /// Most requests being answered at one time; more are told to use TCP.
    pub in_flight: usize,
    /// Most requests of one client network (an IPv4 address, 64 bits of an IPv6 address) that the site works for, or
    /// whose responses still come from it; more are told to use TCP.
    pub per_client: usize,
    /// Most sealed datagrams opened in a second for addresses that are not proved: each costs a key exchange, some 50
    /// microseconds. More are asked for proof first.
    pub unproved_opened_per_s: u32,
    /// Most bytes sent for each byte received until a token proves the client's address (RFC 9000 §8.1).
    pub amplification: usize,
    /// How long a token is good.
    pub token_lifetime: Duration,
    /// The ports of clients.
    pub client_ports: ClientPorts,
    /// Bounds of the connections to clients.
    pub connections: ConnectionLimits,
    /// How request targets are read.
    pub personality: Personality,
    /// Sizes of a request head.
    pub head_limits: HeadLimits,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            size_threshold_bytes: 1460,
            pieces_bytes: 14_600,
            most_pieces_bytes: 29_200,
            datagram_v4_bytes: 1472,
            datagram_v6_bytes: 1452,
            loss_threshold: 0.01,
            loss_half_life: Duration::from_secs(30),
            networks: 4096,
            answered_ids: 10_000,
            in_flight: 10_000,
            per_client: 64,
            unproved_opened_per_s: 1000,
            amplification: 3,
            token_lifetime: Duration::from_secs(600),
            client_ports: ClientPorts::default(),
            connections: ConnectionLimits::default(),
            personality: Personality::Strict,
            head_limits: HeadLimits::default(),
        }
    }
}
