//! Port ranges (DHTTP §IV-C): clients and servers never share a port number, so that a server is never told to open a
//! connection to another server, and no client uses a low port, where vital services listen.

use std::ops::RangeInclusive;

/// The ports that clients use for both channels. A server refuses to send or connect to any other.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ClientPorts(RangeInclusive<u16>);

/// Why a range of client ports is not usable.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum PortRangeError {
    /// DHTTP §IV-C: ports up to 1023 belong to services such as telnet.
    #[error("client ports must lie above 1023")]
    Low,
    /// With fewer ports to choose from, the port adds nothing to what an attacker has to guess.
    #[error("a range of client ports must hold at least {least} ports")]
    Narrow {
        /// The least number of ports.
        least: u16,
    },
    /// DHTTP §IV-C: the ranges of servers and clients must not overlap.
    #[error("the server's own port {port} lies in the range of client ports")]
    Overlap {
        /// The server's port.
        port: u16,
    },
}

impl ClientPorts {
    /// Fewest ports a range may hold.
    pub const LEAST: u16 = 256;

    /// A range of client ports.
    ///
    /// # Errors
    /// The range holds low ports, or too few.
    pub fn new(range: RangeInclusive<u16>) -> Result<Self, PortRangeError> {
        if *range.start() < 1024 {
            return Err(PortRangeError::Low);
        }
        if range.end().saturating_sub(*range.start()) < Self::LEAST - 1 {
            return Err(PortRangeError::Narrow { least: Self::LEAST });
        }
        Ok(Self(range))
    }

    /// Whether `port` may be a client's.
    pub fn contains(&self, port: u16) -> bool {
        self.0.contains(&port)
    }

    /// The range.
    pub fn range(&self) -> RangeInclusive<u16> {
        self.0.clone()
    }

    /// That a server may listen on `port`.
    ///
    /// # Errors
    /// The port is one of the clients'.
    pub fn allow_server(&self, port: u16) -> Result<(), PortRangeError> {
        if self.contains(port) { Err(PortRangeError::Overlap { port }) } else { Ok(()) }
    }
}

impl Default for ClientPorts {
    /// The upper half: 32,768 to 65,535.
    fn default() -> Self {
        Self(32_768..=65_535)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_with_low_ports_or_too_few_are_refused() {
        assert_eq!(ClientPorts::new(1023..=65_535), Err(PortRangeError::Low));
        assert_eq!(ClientPorts::new(2000..=2254), Err(PortRangeError::Narrow { least: 256 }));
        assert!(ClientPorts::new(2000..=2255).is_ok());
        #[expect(clippy::reversed_empty_ranges, reason = "an operator may write it")]
        let reversed = ClientPorts::new(3000..=2000);
        assert_eq!(reversed, Err(PortRangeError::Narrow { least: 256 }));
    }

    #[test]
    fn a_server_on_a_client_port_is_refused() {
        let ports = ClientPorts::default();
        assert_eq!(ports.allow_server(40_000), Err(PortRangeError::Overlap { port: 40_000 }));
        assert_eq!(ports.allow_server(8080), Ok(()));
    }
}
