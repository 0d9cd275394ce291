//! What a load process is told and what it answers: one line of JSON each, on its standard input and output.

use std::net::{Ipv4Addr, SocketAddr};

use serde::{Deserialize, Serialize};

/// Connections that share a source address: far below the ephemeral ports of one, and few enough that a limit for each
/// client address meets many clients.
const CONNECTIONS_PER_SOURCE: u32 = 250;

/// What one load process does; the first line that it reads.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Plan {
    /// The server.
    pub server: SocketAddr,
    /// Connections that this process holds.
    pub connections: u32,
    /// The first source address, within 127.0.0.0/8; the following ones are counted up from it.
    pub first_source: Ipv4Addr,
    /// The request that every connection sends.
    pub request: String,
    /// Connections at once that wait for their first answer. It bounds what the server's accept queue must hold.
    pub opening: u32,
}

impl Plan {
    /// The source address of connection `index`.
    pub fn source(&self, index: u32) -> Ipv4Addr {
        Ipv4Addr::from(u32::from(self.first_source) + index / CONNECTIONS_PER_SOURCE)
    }

    /// How many source addresses the connections take.
    pub fn sources(&self) -> u32 {
        self.connections.div_ceil(CONNECTIONS_PER_SOURCE)
    }
}

/// A further line that a load process reads; it answers each with one [`Report`]. It ends at the end of its input.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Open every connection; each sends `messages` requests, one after the other, from the moment it is open.
    Establish {
        /// Requests on each connection, at least 1.
        messages: u32,
        /// After so long, connections that have not finished count as failed.
        timeout_ms: u64,
    },
    /// Every open connection sends requests, one after the other, for so long.
    Send {
        /// Then the last answers are awaited.
        for_ms: u64,
    },
}

/// What came of an [`Order`].
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Report {
    /// Answers with status 200 that came whole.
    pub answers: u64,
    /// Connections that were refused, reset, closed, answered otherwise or not in time.
    pub failed: u64,
    /// From the order to the last answer.
    pub elapsed_ns: u64,
    /// Of `Establish`: for each connection whose first answer came, when; on the clock that all processes share.
    pub established_at_ns: Vec<u64>,
    /// When the order began, on the same clock.
    pub began_at_ns: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_beyond_one_source_take_the_next_address() {
        let plan = Plan {
            server: "127.0.0.1:80".parse().unwrap(),
            connections: 501,
            first_source: Ipv4Addr::new(127, 1, 0, 255),
            request: String::new(),
            opening: 1,
        };
        assert_eq!(plan.source(249), Ipv4Addr::new(127, 1, 0, 255));
        assert_eq!(plan.source(250), Ipv4Addr::new(127, 1, 1, 0));
        assert_eq!(plan.sources(), 3);
    }
}
