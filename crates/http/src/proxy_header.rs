//! What a proxy that passes connections on says of a client before it passes the client's bytes on: the header of
//! HAProxy's *The PROXY protocol, versions 1 & 2*, whose sections are named here.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// A header of either version is at most this long.
pub const MOST_BYTES: usize = V2_START + MOST_V2_BYTES;

/// Section 2.1: the longest line of version 1, with its end.
const MOST_V1_BYTES: usize = 107;
const V1_SIGNATURE: &[u8] = b"PROXY ";
/// Section 2.2.
const V2_SIGNATURE: &[u8] = b"\r\n\r\n\0\r\nQUIT\n";
/// Signature, version and command, family and transport, length of the rest.
const V2_START: usize = 16;
/// What may follow that: addresses and a few hundred bytes of TLVs, with room for what is still to be invented.
const MOST_V2_BYTES: usize = 4096;
/// Two addresses and two ports.
const V4_BYTES: usize = 12;
const V6_BYTES: usize = 36;
/// Two paths.
const UNIX_BYTES: usize = 216;

/// How far a header has got.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ProxyProgress {
    /// More bytes are needed.
    Incomplete,
    /// It is whole.
    Complete {
        /// Its bytes; what follows is the client's.
        length: usize,
        /// The client; `None`: the connection is the proxy's own, or the client has no address that could be told, and
        /// the connection's counts. IPv4-mapped addresses are given as IPv4.
        client: Option<SocketAddr>,
    },
}

/// Why a header was refused; always the fault of whoever sent it.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ProxyHeaderError {
    /// The connection begins with something else.
    #[error("no PROXY header")]
    NoHeader,
    /// Section 2.1: another form of a line of version 1.
    #[error("malformed PROXY header of version 1")]
    BadLine,
    /// Section 2.2: a version, command, family or transport that there is not.
    #[error("PROXY header of an unknown kind")]
    UnknownKind,
    /// Section 2.2: addresses or TLVs that end beyond the header.
    #[error("PROXY header whose parts do not fit its length")]
    BadLength,
    /// More than a line of version 1 may have, or than is taken of version 2.
    #[error("PROXY header too long")]
    TooLong,
}

/// Reads the header at the start of `bytes`. What is refused is refused with the first byte that shows it.
///
/// # Errors
/// There is none, or none that could be read.
pub fn parse_proxy_header(bytes: &[u8]) -> Result<ProxyProgress, ProxyHeaderError> {
    if begins(bytes, V2_SIGNATURE) {
        return parse_v2(bytes);
    }
    if begins(bytes, V1_SIGNATURE) {
        return parse_v1(bytes);
    }
    Err(ProxyHeaderError::NoHeader)
}

/// Whether `bytes` begin with a signature, as far as they go.
fn begins(bytes: &[u8], signature: &[u8]) -> bool {
    bytes.iter().zip(signature).all(|(byte, expected)| byte == expected)
}

fn parse_v1(bytes: &[u8]) -> Result<ProxyProgress, ProxyHeaderError> {
    let within = bytes.get(..MOST_V1_BYTES).unwrap_or(bytes);
    let Some(end) = within.windows(2).position(|pair| pair == b"\r\n") else {
        let is_whole = within.len() == MOST_V1_BYTES;
        return if is_whole { Err(ProxyHeaderError::TooLong) } else { Ok(ProxyProgress::Incomplete) };
    };
    let line = within.get(V1_SIGNATURE.len()..end).ok_or(ProxyHeaderError::BadLine)?;
    let client = client_of_line(line).ok_or(ProxyHeaderError::BadLine)?;
    Ok(ProxyProgress::Complete { length: end + 2, client })
}

/// Family, addresses and ports, each after one space; `None`: malformed.
fn client_of_line(line: &[u8]) -> Option<Option<SocketAddr>> {
    // Whatever follows that word means nothing.
    if line.strip_prefix(b"UNKNOWN").is_some_and(|rest| matches!(rest, [] | [b' ', ..])) {
        return Some(None);
    }
    let mut words = std::str::from_utf8(line).ok()?.split(' ');
    let is_v4 = match words.next()? {
        "TCP4" => true,
        "TCP6" => false,
        _ => return None,
    };
    let mut address = || {
        let word = words.next()?;
        match is_v4 {
            true => word.parse::<Ipv4Addr>().ok().map(IpAddr::V4),
            false => word.parse::<Ipv6Addr>().ok().map(IpAddr::V6),
        }
    };
    let (source, _destination) = (address()?, address()?);
    let mut port = || {
        let word = words.next()?;
        // A number takes a sign elsewhere.
        word.bytes().all(|byte| byte.is_ascii_digit()).then(|| word.parse::<u16>().ok())?
    };
    let (source_port, _destination_port) = (port()?, port()?);
    words.next().is_none().then_some(Some(SocketAddr::new(source.to_canonical(), source_port)))
}

fn parse_v2(bytes: &[u8]) -> Result<ProxyProgress, ProxyHeaderError> {
    use ProxyHeaderError::{TooLong, UnknownKind};
    let rest = bytes.get(V2_SIGNATURE.len()..).unwrap_or(&[]);
    let is_local = match rest.first() {
        None => return Ok(ProxyProgress::Incomplete),
        Some(0x20) => true,
        Some(0x21) => false,
        Some(_) => return Err(UnknownKind),
    };
    let family = match rest.get(1) {
        None => return Ok(ProxyProgress::Incomplete),
        // What the proxy says of its own connection is ignored, the family too.
        Some(_) if is_local => Family::Unknown,
        Some(family) => Family::of(*family).ok_or(UnknownKind)?,
    };
    let Some(&[high, low]) = rest.get(2..4) else { return Ok(ProxyProgress::Incomplete) };
    let length = usize::from(u16::from_be_bytes([high, low]));
    if length > MOST_V2_BYTES {
        return Err(TooLong);
    }
    if length < family.bytes() {
        return Err(ProxyHeaderError::BadLength);
    }
    let Some(block) = rest.get(4..4 + length) else { return Ok(ProxyProgress::Incomplete) };
    let (addresses, tlvs) = block.split_at_checked(family.bytes()).unwrap_or((block, &[]));
    if family != Family::Unknown && !are_tlvs(tlvs) {
        return Err(ProxyHeaderError::BadLength);
    }
    let client = family.client(addresses);
    Ok(ProxyProgress::Complete { length: V2_START + length, client })
}

/// What the addresses of a header of version 2 are. It is taken for a client's whichever transport the client had.
#[derive(Clone, Copy, Eq, PartialEq)]
enum Family {
    Unknown,
    V4,
    V6,
    Unix,
}

impl Family {
    fn of(byte: u8) -> Option<Self> {
        match byte {
            0x00 => Some(Self::Unknown),
            0x11 | 0x12 => Some(Self::V4),
            0x21 | 0x22 => Some(Self::V6),
            0x31 | 0x32 => Some(Self::Unix),
            _ => None,
        }
    }

    fn bytes(self) -> usize {
        match self {
            Self::Unknown => 0,
            Self::V4 => V4_BYTES,
            Self::V6 => V6_BYTES,
            Self::Unix => UNIX_BYTES,
        }
    }

    /// Source address, destination address, source port, destination port.
    fn client(self, addresses: &[u8]) -> Option<SocketAddr> {
        let (address, port_at): (IpAddr, usize) = match self {
            Self::Unknown | Self::Unix => return None,
            Self::V4 => (Ipv4Addr::from(*addresses.first_chunk::<4>()?).into(), 8),
            Self::V6 => (Ipv6Addr::from(*addresses.first_chunk::<16>()?).into(), 32),
        };
        let port = u16::from_be_bytes(*addresses.get(port_at..)?.first_chunk()?);
        Some(SocketAddr::new(address.to_canonical(), port))
    }
}

/// Section 2.2.1: each a type, a length and as many bytes. None means anything here.
fn are_tlvs(mut bytes: &[u8]) -> bool {
    while let [_, high, low, rest @ ..] = bytes {
        let length = usize::from(u16::from_be_bytes([*high, *low]));
        let Some(next) = rest.get(length..) else { return false };
        bytes = next;
    }
    bytes.is_empty()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const V4: &str = "192.0.2.7:4567";
    const V6: &str = "[2001:db8::7]:4567";

    fn v2(command: u8, family: u8, block: &[u8]) -> Vec<u8> {
        let length = (block.len() as u16).to_be_bytes();
        [V2_SIGNATURE, &[0x20 | command, family], &length, block].concat()
    }

    /// Source, destination and ports of a header of version 2.
    fn block(source: &str, destination: &str) -> Vec<u8> {
        let [source, destination]: [SocketAddr; 2] = [source, destination].map(|text| text.parse().unwrap());
        let octets = |address: IpAddr| match address {
            IpAddr::V4(address) => address.octets().to_vec(),
            IpAddr::V6(address) => address.octets().to_vec(),
        };
        let ports = [source.port().to_be_bytes(), destination.port().to_be_bytes()].concat();
        [octets(source.ip()), octets(destination.ip()), ports].concat()
    }

    fn tlv(kind: u8, value: &[u8]) -> Vec<u8> {
        [&[kind][..], &(value.len() as u16).to_be_bytes(), value].concat()
    }

    /// What a header says when the client's bytes follow it, and that nothing but all of it says so.
    fn said(header: &[u8]) -> Result<Option<SocketAddr>, ProxyHeaderError> {
        for length in 0..header.len() {
            let progress = parse_proxy_header(&header[..length]);
            assert_ne!(progress.map(|progress| progress == ProxyProgress::Incomplete), Ok(false), "{length}");
        }
        let followed = [header, b"GET / HTTP/1.1\r\n"].concat();
        match parse_proxy_header(&followed)? {
            ProxyProgress::Complete { length, client } => {
                assert_eq!(length, header.len());
                assert_eq!(parse_proxy_header(header), Ok(ProxyProgress::Complete { length, client }));
                Ok(client)
            }
            ProxyProgress::Incomplete => panic!("{header:?} is whole"),
        }
    }

    /// The same where it names somebody.
    fn named(header: impl AsRef<[u8]>) -> String {
        said(header.as_ref()).unwrap().unwrap().to_string()
    }

    #[test]
    fn a_header_is_whole_with_its_last_byte_and_names_its_client() {
        assert_eq!(named("PROXY TCP4 192.0.2.7 198.51.100.1 4567 80\r\n"), V4);
        assert_eq!(named("PROXY TCP6 2001:db8::7 2001:db8::1 4567 443\r\n"), V6);
        assert_eq!(named("PROXY TCP6 ::ffff:192.0.2.7 ::ffff:198.51.100.1 4567 443\r\n"), V4);
        let (v4, v6) = (block(V4, "198.51.100.1:80"), block(V6, "[2001:db8::1]:80"));
        let mapped = block("[::ffff:192.0.2.7]:4567", "[::ffff:198.51.100.1]:80");
        for transport in [1, 2] {
            assert_eq!(named(v2(1, 0x10 | transport, &v4)), V4);
            assert_eq!(named(v2(1, 0x20 | transport, &v6)), V6);
            assert_eq!(named(v2(1, 0x20 | transport, &mapped)), V4);
        }
        // An address of a VPC endpoint, a checksum and padding, as AWS sends them.
        let tlvs =
            [tlv(0xea, b"\x01vpce-08d2bf15fac5001c9"), tlv(3, &[1, 2, 3, 4]), tlv(4, &[0; 64])].concat();
        assert_eq!(named(v2(1, 0x11, &[v4, tlvs.clone()].concat())), V4);
        assert_eq!(named(v2(1, 0x21, &[v6, tlvs].concat())), V6);
    }

    #[test]
    fn who_has_no_address_keeps_that_of_the_connection() {
        assert_eq!(said(b"PROXY UNKNOWN\r\n"), Ok(None));
        assert_eq!(said(b"PROXY UNKNOWN ffff::1 \xff 1 2 3\0\r\n"), Ok(None));
        assert_eq!(said(&v2(1, 0x31, &[b'/'; UNIX_BYTES])), Ok(None));
        assert_eq!(said(&v2(1, 0x00, b"")), Ok(None));
        assert_eq!(said(&v2(1, 0x00, b"ignored")), Ok(None));
        // Whatever the proxy says of its own connection.
        for family in 0..=u8::MAX {
            assert_eq!(said(&v2(0, family, b"")), Ok(None));
            assert_eq!(said(&v2(0, family, &block(V4, V4))), Ok(None));
        }
    }

    #[test]
    fn a_line_of_another_form_is_refused() {
        for line in [
            "PROXY \r\n",
            "PROXY TCP4\r\n",
            "PROXY tcp4 192.0.2.7 198.51.100.1 4567 80\r\n",
            "PROXY TCP5 192.0.2.7 198.51.100.1 4567 80\r\n",
            "PROXY UDP4 192.0.2.7 198.51.100.1 4567 80\r\n",
            "PROXY UNKNOWNS\r\n",
            "PROXY  TCP4 192.0.2.7 198.51.100.1 4567 80\r\n",
            "PROXY TCP4 192.0.2.7  198.51.100.1 4567 80\r\n",
            "PROXY TCP4\t192.0.2.7 198.51.100.1 4567 80\r\n",
            "PROXY TCP4 192.0.2.7 198.51.100.1 4567\r\n",
            "PROXY TCP4 192.0.2.7 198.51.100.1 4567 80 \r\n",
            "PROXY TCP4 192.0.2.7 198.51.100.1 4567 80 81\r\n",
            "PROXY TCP4 192.0.2.7 198.51.100.1 4567 80\n\r\n",
            "PROXY TCP4 192.0.2.7 198.51.100.1 +4567 80\r\n",
            "PROXY TCP4 192.0.2.7 198.51.100.1 -1 80\r\n",
            "PROXY TCP4 192.0.2.7 198.51.100.1 65536 80\r\n",
            "PROXY TCP4 192.0.2.7 198.51.100.1 4567 \r\n",
            "PROXY TCP4 192.0.2.07 198.51.100.1 4567 80\r\n",
            "PROXY TCP4 192.0.2.256 198.51.100.1 4567 80\r\n",
            "PROXY TCP4 192.0.2 198.51.100.1 4567 80\r\n",
            "PROXY TCP4 2001:db8::7 2001:db8::1 4567 443\r\n",
            "PROXY TCP6 192.0.2.7 198.51.100.1 4567 80\r\n",
            "PROXY TCP6 2001:db8:::7 2001:db8::1 4567 443\r\n",
            "PROXY TCP6 [2001:db8::7] [2001:db8::1] 4567 443\r\n",
            "PROXY TCP6 fe80::1%1 fe80::2%1 4567 443\r\n",
        ] {
            assert_eq!(said(line.as_bytes()), Err(ProxyHeaderError::BadLine), "{line:?}");
        }
    }

    #[test]
    fn what_begins_otherwise_is_refused_with_the_first_byte_that_shows_it() {
        for (bytes, length) in [
            (&b"GET / HTTP/1.1\r\n"[..], 1),
            (b"PRI * HTTP/2.0\r\n", 3),
            (b"PROXY\r\n", 6),
            (b"\r\nGET / HTTP/1.1\r\n", 3),
            (b"\x16\x03\x01", 1),
            (b"\r\n\r\n\0\r\nQUIt\n", 11),
            (b"", 0),
        ] {
            for short in 0..length {
                assert_eq!(parse_proxy_header(&bytes[..short]), Ok(ProxyProgress::Incomplete), "{bytes:?}");
            }
            let expected =
                if length == 0 { Ok(ProxyProgress::Incomplete) } else { Err(ProxyHeaderError::NoHeader) };
            assert_eq!(parse_proxy_header(&bytes[..length]), expected, "{bytes:?}");
        }
    }

    #[test]
    fn a_line_that_does_not_end_is_refused_at_its_bound() {
        // The longest there is.
        let address = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff";
        let longest = format!("PROXY UNKNOWN {address} {address} 65535 65535\r\n");
        assert_eq!(longest.len(), MOST_V1_BYTES);
        assert_eq!(said(longest.as_bytes()), Ok(None));
        let endless = format!("PROXY UNKNOWN {}", "f".repeat(200));
        for length in 0..MOST_V1_BYTES {
            assert_eq!(parse_proxy_header(&endless.as_bytes()[..length]), Ok(ProxyProgress::Incomplete));
        }
        for length in MOST_V1_BYTES..endless.len() {
            assert_eq!(parse_proxy_header(&endless.as_bytes()[..length]), Err(ProxyHeaderError::TooLong));
        }
        let one_more = format!("PROXY UNKNOWN {address} {address} 65535 65535 \r\n");
        assert_eq!(parse_proxy_header(one_more.as_bytes()), Err(ProxyHeaderError::TooLong));
    }

    #[test]
    fn kinds_that_there_are_not_are_refused_with_their_byte() {
        for byte in (0..=u8::MAX).filter(|byte| !matches!(byte, 0x20 | 0x21)) {
            let bytes = [V2_SIGNATURE, &[byte]].concat();
            assert_eq!(parse_proxy_header(&bytes), Err(ProxyHeaderError::UnknownKind), "{byte:#x}");
        }
        let known = [0x00, 0x11, 0x12, 0x21, 0x22, 0x31, 0x32];
        for byte in (0..=u8::MAX).filter(|byte| !known.contains(byte)) {
            let bytes = [V2_SIGNATURE, &[0x21, byte]].concat();
            assert_eq!(parse_proxy_header(&bytes), Err(ProxyHeaderError::UnknownKind), "{byte:#x}");
        }
    }

    #[test]
    fn lengths_are_refused_before_anything_is_waited_for() {
        let start = |family: u8, length: u16| {
            parse_proxy_header(&[V2_SIGNATURE, &[0x21, family], &length.to_be_bytes()].concat())
        };
        for (family, bytes) in [(0x11, V4_BYTES), (0x21, V6_BYTES), (0x31, UNIX_BYTES), (0x00, 0)] {
            for length in 0..=u16::MAX {
                let expected = match usize::from(length) {
                    length if length > MOST_V2_BYTES => Err(ProxyHeaderError::TooLong),
                    length if length < bytes => Err(ProxyHeaderError::BadLength),
                    0 => Ok(ProxyProgress::Complete { length: V2_START, client: None }),
                    _ => Ok(ProxyProgress::Incomplete),
                };
                assert_eq!(start(family, length), expected, "{family:#x} {length}");
            }
        }
        let longest = v2(0, 0, &[0; MOST_V2_BYTES]);
        assert_eq!((longest.len(), said(&longest)), (MOST_BYTES, Ok(None)));
    }

    #[test]
    fn tlvs_that_end_beyond_the_header_are_refused() {
        let with = |tlvs: &[u8]| said(&v2(1, 0x11, &[&block(V4, V4)[..], tlvs].concat()));
        for tlvs in
            [&[1][..], &[1, 0], &[1, 0, 1], &[1, 0xff, 0xff, 0], &[4, 0, 0, 4, 0], &[4, 0, 1, 0, 9, 0, 2, 0]]
        {
            assert_eq!(with(tlvs), Err(ProxyHeaderError::BadLength), "{tlvs:?}");
        }
        for tlvs in [&[][..], &[1, 0, 0], &[1, 0, 1, 7], &[4, 0, 0, 4, 0, 2, 0, 0]] {
            assert_eq!(with(tlvs), Ok(Some(V4.parse().unwrap())), "{tlvs:?}");
        }
    }

    fn bytes_near_a_header() -> impl Strategy<Value = Vec<u8>> {
        let tail = proptest::collection::vec(any::<u8>(), 0..80);
        let line = "PROXY (TCP4|TCP6|UNKNOWN)( [0-9a-f:.]{1,20}){0,5} ?\r?\n?".prop_map(String::into_bytes);
        let kind = (0x1f..0x23u8, 0..0x34u8, 0..90u16);
        let binary = (kind, tail.clone()).prop_map(|((command, family, length), tail)| {
            [V2_SIGNATURE, &[command, family], &length.to_be_bytes(), &tail].concat()
        });
        prop_oneof![line, binary, tail]
    }

    proptest! {
        /// More bytes never change what is known of those before.
        #[test]
        fn what_is_decided_stays_decided(bytes in bytes_near_a_header()) {
            let mut decided = None;
            for length in 0..=bytes.len() {
                let progress = parse_proxy_header(&bytes[..length]);
                if let Ok(ProxyProgress::Complete { length: header, .. }) = progress {
                    prop_assert!(header <= length && header <= MOST_BYTES);
                }
                match decided {
                    Some(decided) => prop_assert_eq!(progress, decided),
                    None if progress == Ok(ProxyProgress::Incomplete) => {}
                    None => decided = Some(progress),
                }
            }
        }

        /// A client that is written is the client that is read.
        #[test]
        fn clients_come_out_as_they_went_in(address in any::<std::net::IpAddr>(), port in any::<u16>()) {
            let client = SocketAddr::new(address, port);
            let expected = SocketAddr::new(address.to_canonical(), port);
            let (word, family) = if address.is_ipv4() { ("TCP4", 0x11) } else { ("TCP6", 0x21) };
            let line = format!("PROXY {word} {address} {address} {port} 80\r\n");
            prop_assert_eq!(said(line.as_bytes()), Ok(Some(expected)));
            let text = client.to_string();
            prop_assert_eq!(said(&v2(1, family, &block(&text, &text))), Ok(Some(expected)));
        }
    }
}
