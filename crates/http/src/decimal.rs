use std::io::Write;
use std::net::IpAddr;

/// `255.255.255.255`
const MAX_IPV4_BYTES: usize = 15;

/// Appends a number in decimal without the formatting machinery, which a cache hit cannot afford.
#[inline]
pub fn write_decimal(number: u64, out: &mut Vec<u8>) {
    out.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
}

/// Appends an address as its `Display` does, an IPv4 address without the formatting machinery.
pub(crate) fn write_address(address: IpAddr, out: &mut Vec<u8>) {
    match address {
        IpAddr::V4(address) => {
            let (mut text, mut length) = ([0; MAX_IPV4_BYTES], 0);
            let mut put = |byte| {
                text[length] = byte;
                length += 1;
            };
            for (index, octet) in address.octets().into_iter().enumerate() {
                if index > 0 {
                    put(b'.');
                }
                if octet >= 100 {
                    put(b'0' + octet / 100);
                }
                if octet >= 10 {
                    put(b'0' + octet / 10 % 10);
                }
                put(b'0' + octet % 10);
            }
            out.extend_from_slice(text.get(..length).unwrap_or(b""));
        }
        // Writing to a Vec cannot fail.
        IpAddr::V6(address) => drop(write!(out, "{address}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_written_as_they_are_displayed() {
        for address in [
            "0.0.0.0",
            "127.0.0.1",
            "255.10.200.9",
            "255.255.255.255",
            "100.109.110.99",
            "::1",
            "2001:db8::ff00:42:8329",
        ] {
            let mut out = Vec::new();
            write_address(address.parse().unwrap(), &mut out);
            assert_eq!(out, address.as_bytes());
        }
    }

    #[test]
    fn decimals_are_written_as_they_are_read() {
        for number in [0, 1, 9, 10, 612, 99_999, u64::MAX] {
            let mut out = Vec::new();
            write_decimal(number, &mut out);
            assert_eq!(out, number.to_string().into_bytes());
        }
    }
}
