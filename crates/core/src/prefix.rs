use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

/// How many bits stand before the IPv4 address in an IPv4-mapped one.
const MAPPED_BITS: u8 = 96;

/// An address prefix such as `10.1.0.0/16` or `2001:db8::/32`; a bare address is a prefix of full length.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct IpPrefix {
    address: IpAddr,
    length_bits: u8,
}

/// Why a text is not an address prefix.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum PrefixError {
    /// The part before the slash is not an IPv4 or IPv6 address.
    Address,
    /// The part after the slash is not a number within the address's length.
    Length {
        /// The greatest length in bits for this address family: 32 or 128.
        max_bits: u8,
    },
    /// An IPv4-mapped address with a length that covers more than IPv4's addresses.
    Mapped,
}

impl fmt::Display for PrefixError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address => f.write_str("not an IPv4 or IPv6 address"),
            Self::Length { max_bits } => write!(f, "prefix length is not a number from 0 to {max_bits}"),
            Self::Mapped => f.write_str(
                "prefix length of an IPv4-mapped address is less than 96: write IPv4 prefixes as 192.0.2.0/24",
            ),
        }
    }
}

impl std::error::Error for PrefixError {}

impl IpPrefix {
    /// Builds a prefix; bits beyond `length_bits` are cleared. An IPv4-mapped one (RFC 4291 §2.5.5.2) becomes the IPv4
    /// prefix that it means: packets carry IPv4 addresses, and nothing else would match it.
    pub fn new(address: IpAddr, length_bits: u8) -> Result<Self, PrefixError> {
        let max_bits = if address.is_ipv4() { 32 } else { 128 };
        if length_bits > max_bits {
            return Err(PrefixError::Length { max_bits });
        }
        let canonical = address.to_canonical();
        if canonical.is_ipv4() && address.is_ipv6() {
            let length_bits = length_bits.checked_sub(MAPPED_BITS).ok_or(PrefixError::Mapped)?;
            return Ok(Self { address: mask(canonical, length_bits), length_bits });
        }
        Ok(Self { address: mask(address, length_bits), length_bits })
    }

    /// The first address of the prefix.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// The number of leading bits that are fixed.
    pub fn length_bits(&self) -> u8 {
        self.length_bits
    }

    /// Whether `address` lies in this prefix. An IPv4-mapped IPv6 address counts as its IPv4 address.
    pub fn contains(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        address.is_ipv4() == self.address.is_ipv4() && mask(address, self.length_bits) == self.address
    }
}

/// Who counts as one client: an IPv4 address, or the network of 64 bits that IPv6 gives to one (RFC 6177), all of whose
/// addresses it can use. Its first address stands for it.
pub fn network_of(client: IpAddr) -> IpAddr {
    match client.to_canonical() {
        v6 @ IpAddr::V6(_) => mask(v6, 64),
        v4 => v4,
    }
}

fn mask(address: IpAddr, length_bits: u8) -> IpAddr {
    match address {
        IpAddr::V4(v4) => {
            let keep = u32::MAX.checked_shl(32 - u32::from(length_bits)).unwrap_or(0);
            IpAddr::V4((u32::from(v4) & keep).into())
        }
        IpAddr::V6(v6) => {
            let keep = u128::MAX.checked_shl(128 - u32::from(length_bits)).unwrap_or(0);
            IpAddr::V6(Ipv6Addr::from(u128::from(v6) & keep))
        }
    }
}

impl From<IpAddr> for IpPrefix {
    /// The prefix of one address.
    fn from(address: IpAddr) -> Self {
        let address = address.to_canonical();
        Self { address, length_bits: if address.is_ipv4() { 32 } else { 128 } }
    }
}

impl FromStr for IpPrefix {
    type Err = PrefixError;

    fn from_str(text: &str) -> Result<Self, PrefixError> {
        let (address, length) = match text.split_once('/') {
            Some((address, length)) => (address, Some(length)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| PrefixError::Address)?;
        let max_bits = if address.is_ipv4() { 32 } else { 128 };
        let length_bits = match length {
            None => max_bits,
            Some(digits) => digits.parse().map_err(|_| PrefixError::Length { max_bits })?,
        };
        Self::new(address, length_bits)
    }
}

impl fmt::Display for IpPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.length_bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_contain_their_addresses_and_no_others() {
        let prefix: IpPrefix = "10.1.2.3/16".parse().unwrap();
        assert_eq!(prefix.to_string(), "10.1.0.0/16");
        assert!(prefix.contains("10.1.255.255".parse().unwrap()));
        assert!(prefix.contains("::ffff:10.1.0.9".parse().unwrap()));
        assert!(!prefix.contains("10.2.0.0".parse().unwrap()));
        let everything: IpPrefix = "::/0".parse().unwrap();
        assert!(everything.contains("2001:db8::1".parse().unwrap()));
        assert!(!everything.contains("127.0.0.1".parse().unwrap()));
    }

    #[test]
    fn a_client_is_an_ipv4_address_or_64_bits_of_an_ipv6_address() {
        for (client, network) in [
            ("192.0.2.7", "192.0.2.7"),
            ("::ffff:192.0.2.7", "192.0.2.7"),
            ("2001:db8:0:1:2:3:4:5", "2001:db8:0:1::"),
        ] {
            assert_eq!(network_of(client.parse().unwrap()), network.parse::<IpAddr>().unwrap(), "{client}");
        }
    }

    #[test]
    fn ipv4_mapped_prefix_is_the_ipv4_prefix_and_a_shorter_one_is_refused() {
        for (text, meant) in [
            ("::ffff:10.94.0.7/112", "10.94.0.0/16"),
            ("::ffff:10.94.0.7", "10.94.0.7/32"),
            ("::ffff:0:0/96", "0.0.0.0/0"),
            ("::/0", "::/0"),
            ("::fffe:10.94.0.0/112", "::fffe:a5e:0/112"),
        ] {
            assert_eq!(text.parse::<IpPrefix>().unwrap().to_string(), meant, "{text}");
        }
        let mapped: IpAddr = "::ffff:10.94.0.7".parse().unwrap();
        assert_eq!(IpPrefix::from(mapped).to_string(), "10.94.0.7/32");
        let error = "::ffff:10.94.0.0/95".parse::<IpPrefix>().unwrap_err();
        assert_eq!(error, PrefixError::Mapped);
        assert!(error.to_string().contains("write IPv4 prefixes as"), "{error}");
    }

    #[test]
    fn malformed_prefixes_say_what_is_wrong() {
        assert_eq!("10.0.0.0/33".parse::<IpPrefix>(), Err(PrefixError::Length { max_bits: 32 }));
        assert_eq!("::/x".parse::<IpPrefix>(), Err(PrefixError::Length { max_bits: 128 }));
        assert_eq!("ten/8".parse::<IpPrefix>(), Err(PrefixError::Address));
    }
}
