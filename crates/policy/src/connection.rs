//! Rules about who connects: destination, ports, source.

use std::fmt;
use std::str::FromStr;

use tidegate_core::{IpPrefix, PrefixError};

use crate::{Class, Profile, When};

/// A range of ports, both ends included.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct PortRange {
    first: u16,
    last: u16,
}

impl PortRange {
    /// Every port.
    pub const ANY: Self = Self { first: 0, last: u16::MAX };

    /// One port.
    pub fn one(port: u16) -> Self {
        Self { first: port, last: port }
    }

    /// From `first` to `last`; `None` if that is empty.
    pub fn new(first: u16, last: u16) -> Option<Self> {
        (first <= last).then_some(Self { first, last })
    }

    /// The lowest port.
    pub fn first(&self) -> u16 {
        self.first
    }

    /// The highest port.
    pub fn last(&self) -> u16 {
        self.last
    }

    /// Whether `port` is within.
    pub fn contains(&self, port: u16) -> bool {
        (self.first..=self.last).contains(&port)
    }

    /// How many ports.
    pub fn width(&self) -> u32 {
        u32::from(self.last) - u32::from(self.first) + 1
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.first, self.last) {
            (0, u16::MAX) => f.write_str("*"),
            (first, last) if first == last => write!(f, "{first}"),
            (first, last) => write!(f, "{first}-{last}"),
        }
    }
}

impl FromStr for PortRange {
    type Err = DestinationError;

    /// `*`, `80` or `8000-8099`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "*" {
            return Ok(Self::ANY);
        }
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let port = |digits: &str| digits.parse().map_err(|_| DestinationError::Ports);
        Self::new(port(first)?, port(last)?).ok_or(DestinationError::Ports)
    }
}

/// Where a connection goes: an address prefix, or any, and a range of ports.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Destination {
    /// The local address; `None` is any.
    pub address: Option<IpPrefix>,
    /// The local port.
    pub ports: PortRange,
}

/// Why a text is not a destination.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum DestinationError {
    /// There is no colon before the ports.
    #[error("expected ADDRESS:PORT, such as *:80, 10.0.0.1:8000-8099 or [2001:db8::1]:443")]
    Shape,
    /// The address is not one.
    #[error("{0}")]
    Address(PrefixError),
    /// The ports are neither `*`, a number, nor a range.
    #[error("expected a port, a range such as 8000-8099, or *")]
    Ports,
}

impl FromStr for Destination {
    type Err = DestinationError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (address, ports) = text.rsplit_once(':').ok_or(DestinationError::Shape)?;
        let bracketed = address.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        let address = match bracketed {
            None if address == "*" => None,
            None if address.contains(':') => return Err(DestinationError::Shape),
            inner => Some(inner.unwrap_or(address).parse().map_err(DestinationError::Address)?),
        };
        Ok(Self { address, ports: ports.parse()? })
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.address {
            None => write!(f, "*:{}", self.ports),
            Some(prefix) if prefix.address().is_ipv6() => write!(f, "[{prefix}]:{}", self.ports),
            Some(prefix) => write!(f, "{prefix}:{}", self.ports),
        }
    }
}

/// A network-level rule (the paper's table 2).
///
/// Of the rules that match a connection, the one with the longest source prefix governs; among those the one with the
/// longest destination prefix, then the fewest ports, then the first in the configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct ConnectionRule {
    /// The local end.
    pub destination: Destination,
    /// The client; `None` is any.
    pub source: Option<IpPrefix>,
    /// New connections per second and at once; `None`: unlimited.
    pub limit: Option<Profile>,
    /// When the limit acts.
    pub when: When,
    /// The priority class; `None`: the lowest.
    pub class: Option<Class>,
}

impl ConnectionRule {
    /// Whether the rule governs connections from `source` to `destination`, as far as this rule alone can tell.
    pub fn matches(&self, source: std::net::IpAddr, destination: std::net::IpAddr, port: u16) -> bool {
        self.destination.ports.contains(port)
            && self.destination.address.is_none_or(|prefix| prefix.contains(destination))
            && self.source.is_none_or(|prefix| prefix.contains(source))
    }

    /// What decides between rules that match; the least governs.
    pub(crate) fn order(&self) -> (std::cmp::Reverse<u8>, std::cmp::Reverse<u8>, u32) {
        // A prefix of length 0 is one family only and so narrower than none.
        let bits = |prefix: Option<IpPrefix>| std::cmp::Reverse(prefix.map_or(0, |p| p.length_bits() + 1));
        (bits(self.source), bits(self.destination.address), self.destination.ports.width())
    }
}

impl fmt::Display for ConnectionRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} from ", self.destination)?;
        match self.source {
            None => f.write_str("*")?,
            Some(source) => write!(f, "{source}")?,
        }
        if let Some(limit) = self.limit {
            write!(f, " rate={} burst={}", limit.rate_per_s(), limit.burst())?;
            if self.when == When::Overload {
                f.write_str(" on overload")?;
            }
        }
        self.class.map_or(Ok(()), |class| write!(f, " priority={}", u16::from(class) + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn destinations_read_and_print_the_same() {
        for text in ["*:80", "*:*", "10.1.0.0/16:8000-8099", "[2001:db8::/32]:443", "[::1/128]:*"] {
            assert_eq!(text.parse::<Destination>().unwrap().to_string(), text);
        }
        assert_eq!("12.1.1.1:80".parse::<Destination>().unwrap().to_string(), "12.1.1.1/32:80");
    }

    #[test]
    fn malformed_destinations_say_what_was_expected() {
        assert_eq!("80".parse::<Destination>(), Err(DestinationError::Shape));
        assert_eq!("2001:db8::1:80".parse::<Destination>(), Err(DestinationError::Shape));
        assert_eq!("*:90-80".parse::<Destination>(), Err(DestinationError::Ports));
        assert_eq!("*:65536".parse::<Destination>(), Err(DestinationError::Ports));
        assert_eq!("host:80".parse::<Destination>(), Err(DestinationError::Address(PrefixError::Address)));
    }
}
