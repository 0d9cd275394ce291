use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

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
}

impl fmt::Display for PrefixError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address => f.write_str("not an IPv4 or IPv6 address"),
            Self::Length { max_bits } => write!(f, "prefix length is not a number from 0 to {max_bits}"),
        }
    }
}

impl std::error::Error for PrefixError {}

impl IpPrefix {
    /// Builds a prefix; bits beyond `length_bits` are cleared.
    pub fn new(address: IpAddr, length_bits: u8) -> Result<Self, PrefixError> {
        let max_bits = if address.is_ipv4() { 32 } else { 128 };
        if length_bits > max_bits {
            return Err(PrefixError::Length { max_bits });
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
    fn malformed_prefixes_say_what_is_wrong() {
        assert_eq!("10.0.0.0/33".parse::<IpPrefix>(), Err(PrefixError::Length { max_bits: 32 }));
        assert_eq!("::/x".parse::<IpPrefix>(), Err(PrefixError::Length { max_bits: 128 }));
        assert_eq!("ten/8".parse::<IpPrefix>(), Err(PrefixError::Address));
    }
}
