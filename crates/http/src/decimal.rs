use std::io::Write;
use std::net::IpAddr;

/// Appends a number in decimal without the formatting machinery, which a cache hit cannot afford.
#[inline]
pub fn write_decimal(number: u64, out: &mut Vec<u8>) {
    out.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
}

/// Appends an address as its `Display` does, an IPv4 address without the formatting machinery.
pub(crate) fn write_address(address: IpAddr, out: &mut Vec<u8>) {
    match address {
        IpAddr::V4(address) => {
            for (index, octet) in address.octets().into_iter().enumerate() {
                if index > 0 {
                    out.push(b'.');
                }
                write_decimal(octet.into(), out);
            }
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
        for address in ["0.0.0.0", "127.0.0.1", "255.10.200.9", "::1", "2001:db8::ff00:42:8329"] {
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
