//! Durations, sizes, rates and addresses as people write them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::time::Duration;

use tidegate_accelerator::settings::{HTTPS_PORT, ServerAddress, TlsServer};

/// `10s`, `500ms`, `10m`, `1h`, `2d`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    const UNITS: [(&str, u64); 5] =
        [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)];
    let (number, unit) = split(text);
    let expected = || format!("expected a duration such as \"10s\", \"500ms\" or \"10m\", not {text:?}");
    let (_, millis) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(expected)?;
    let number: u64 = number.parse().map_err(|_| expected())?;
    number.checked_mul(*millis).map(Duration::from_millis).ok_or_else(expected)
}

/// `256MiB`, `64KiB`, `1GB`, `500B`.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, u64); 7] = [
        ("B", 1),
        ("kB", 1000),
        ("MB", 1_000_000),
        ("GB", 1_000_000_000),
        ("KiB", 1 << 10),
        ("MiB", 1 << 20),
        ("GiB", 1 << 30),
    ];
    let (number, unit) = split(text);
    let expected = || format!("expected a size such as \"256MiB\" or \"64KiB\", not {text:?}");
    let (_, bytes) = UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)).ok_or_else(expected)?;
    let number: u64 = number.parse().map_err(|_| expected())?;
    number.checked_mul(*bytes).ok_or_else(expected)
}

/// `500B/s`, in bytes per second.
pub(crate) fn rate(text: &str) -> Result<u64, String> {
    let expected = || format!("expected a rate such as \"500B/s\", not {text:?}");
    size(text.strip_suffix("/s").ok_or_else(expected)?).map_err(|_| expected())
}

/// Where to listen, and how its writer put it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct ListenAddress {
    pub written: String,
    pub address: SocketAddr,
}

impl ListenAddress {
    /// Whether the two cannot be listened on both: one takes connections that are meant for the other.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        let (a, b) = (self.address, other.address);
        let takes = |wide: SocketAddr, narrow: SocketAddr| {
            wide.ip().is_unspecified() && (wide.is_ipv6() || narrow.is_ipv4())
        };
        a.port() == b.port() && a.port() != 0 && (a.ip() == b.ip() || takes(a, b) || takes(b, a))
    }
}

/// `127.0.0.1:8080`, `[::1]:8080`, or `:8080` for every address, IPv6 and IPv4.
pub(crate) fn listen_address(text: &str) -> Result<ListenAddress, String> {
    let expected = || format!("expected ADDRESS:PORT or :PORT, not {text:?}");
    let address = match text.strip_prefix(':') {
        Some(port) => SocketAddr::new(every_address(), port.parse().map_err(|_| expected())?),
        None => text.parse().map_err(|_| expected())?,
    };
    Ok(ListenAddress { written: text.to_owned(), address })
}

/// `::`, which takes IPv4 too, or `0.0.0.0` on a kernel without IPv6.
fn every_address() -> IpAddr {
    use rustix::net::{AddressFamily, SocketType, socket};
    match socket(AddressFamily::INET6, SocketType::STREAM, None) {
        Ok(_) => Ipv6Addr::UNSPECIFIED.into(),
        Err(_) => Ipv4Addr::UNSPECIFIED.into(),
    }
}

/// Why a text names no server.
#[derive(Debug, Eq, PartialEq)]
pub(crate) enum ServerError {
    /// It is not written as a server is.
    Syntax(String),
    /// The name service does not know it, or does not answer.
    Resolve(String),
}

impl std::fmt::Display for ServerError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (Self::Syntax(message) | Self::Resolve(message)) = self;
        f.write_str(message)
    }
}

/// What [`upstream`] reads.
pub(crate) const UPSTREAM: &str = "HOST:PORT, http://HOST:PORT, https://HOST:PORT or unix:/PATH";
const HTTP_PORT: u16 = 80;
/// Bytes of a socket's path (`sun_path`, unix(7)), without the zero that ends it.
const SOCKET_PATH_BYTES: usize = 107;

/// What [`server`] reads, the same with `https://`, or `unix:/run/app.sock`, a socket of the file system.
pub(crate) fn upstream(text: &str) -> Result<Vec<ServerAddress>, ServerError> {
    use ServerError::Syntax;
    if let Some(path) = text.strip_prefix("unix:") {
        return match path.len() {
            _ if !path.starts_with('/') || path.contains('\0') => {
                Err(Syntax(format!("expected unix:/PATH with a path from the root, not {text:?}")))
            }
            length if length > SOCKET_PATH_BYTES => Err(Syntax(format!(
                "the path of a socket has at most {SOCKET_PATH_BYTES} bytes, and {path:?} has {length}"
            ))),
            _ => Ok(vec![ServerAddress::Unix(path.into())]),
        };
    }
    let expected = || Syntax(format!("expected {UPSTREAM} without a path of a URL, not {text:?}"));
    let Some(encrypted) = text.strip_prefix("https://") else {
        return match server(text) {
            Ok(addresses) => Ok(addresses.into_iter().map(Into::into).collect()),
            Err(Syntax(_)) => Err(expected()),
            Err(error) => Err(error),
        };
    };
    let (host, port) = host_and_port(encrypted, HTTPS_PORT).ok_or_else(expected)?;
    let server = |address| TlsServer::new(address, host).map(ServerAddress::Tls).ok_or_else(expected);
    resolve(host, port)?.into_iter().map(server).collect()
}

/// `127.0.0.1:9000`, `app.internal:9000` or `http://127.0.0.1:9000`, resolved: every address of the name, once.
pub(crate) fn server(text: &str) -> Result<Vec<SocketAddr>, ServerError> {
    use ServerError::Syntax;
    let expected = || Syntax(format!("expected HOST:PORT or http://HOST:PORT without a path, not {text:?}"));
    let (host, port) =
        host_and_port(text.strip_prefix("http://").unwrap_or(text), HTTP_PORT).ok_or_else(expected)?;
    resolve(host, port)
}

fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>, ServerError> {
    use ServerError::Resolve;
    let unresolved = |error| Resolve(format!("cannot resolve {host:?}: {error}"));
    let resolved = (host, port).to_socket_addrs().map_err(unresolved)?;
    let mut addresses: Vec<SocketAddr> = Vec::new();
    for address in resolved {
        if !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    if addresses.is_empty() { Err(Resolve(format!("{host:?} has no address"))) } else { Ok(addresses) }
}

/// `name`, `name:80`, `[::1]:80`, with or without a slash at the end.
fn host_and_port(text: &str, default_port: u16) -> Option<(&str, u16)> {
    let text = text.strip_suffix('/').unwrap_or(text);
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, after) = rest.split_once(']')?;
            host.parse::<Ipv6Addr>().ok()?;
            (host, if after.is_empty() { None } else { Some(after.strip_prefix(':')?) })
        }
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:".contains(&byte);
    if host.is_empty() || !host.bytes().all(is_name) {
        return None;
    }
    match port.map_or(Some(default_port), |port| port.parse().ok())? {
        0 => None,
        port => Some((host, port)),
    }
}

fn split(text: &str) -> (&str, &str) {
    let end = text.find(|character: char| !character.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    (number, unit.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_read_as_people_write_them() {
        assert_eq!(duration("10s"), Ok(Duration::from_secs(10)));
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(size("256MiB"), Ok(256 << 20));
        assert_eq!(size("1GB"), Ok(1_000_000_000));
        assert_eq!(rate("500B/s"), Ok(500));
        assert_eq!(listen_address("[::1]:80").unwrap().address, "[::1]:80".parse().unwrap());
        let socket = ServerAddress::Unix("/run/app.sock".into());
        assert_eq!(upstream("unix:/run/app.sock"), Ok(vec![socket]));
        for text in ["http://127.0.0.1:9000/", "127.0.0.1:9000"] {
            assert_eq!(
                upstream(text),
                Ok(vec![ServerAddress::Ip("127.0.0.1:9000".parse().unwrap())]),
                "{text}"
            );
            assert_eq!(server(text), Ok(vec!["127.0.0.1:9000".parse().unwrap()]), "{text}");
        }
        assert_eq!(server("[::1]"), Ok(vec!["[::1]:80".parse().unwrap()]));
        for (text, address, name) in [
            ("https://127.0.0.1", "127.0.0.1:443", "127.0.0.1"),
            ("https://[::1]:8443/", "[::1]:8443", "::1"),
        ] {
            let server = TlsServer::new(address.parse().unwrap(), name).unwrap();
            assert_eq!(upstream(text), Ok(vec![ServerAddress::Tls(server)]), "{text}");
        }
    }

    #[test]
    fn a_port_alone_is_every_address_of_the_host() {
        let listen = listen_address(":8080").unwrap();
        assert!(listen.address.ip().is_unspecified() && listen.address.port() == 8080, "{listen:?}");
        assert_eq!(listen.written, ":8080");
        let has_ipv6 = std::path::Path::new("/proc/net/if_inet6").exists();
        assert_eq!(listen.address.is_ipv6(), has_ipv6);
    }

    #[test]
    fn addresses_that_take_each_others_connections_overlap() {
        let overlap = |a, b| listen_address(a).unwrap().overlaps(&listen_address(b).unwrap());
        assert!(overlap("[::]:80", "0.0.0.0:80"));
        assert!(overlap("127.0.0.1:80", "0.0.0.0:80"));
        assert!(overlap("[::]:80", "127.0.0.1:80"));
        assert!(!overlap("0.0.0.0:80", "[::1]:80"));
        assert!(!overlap("127.0.0.1:80", "127.0.0.2:80"));
        assert!(!overlap("[::]:80", "[::]:81"));
        assert!(!overlap("[::]:0", "[::]:0"));
    }

    #[test]
    fn what_is_no_unit_says_what_was_expected() {
        for wrong in ["10", "s", "-1s", "10 parsecs", "99999999999999999999s"] {
            assert!(duration(wrong).unwrap_err().contains("\"10s\""), "{wrong}");
        }
        assert!(size("1 TiB").is_err());
        assert!(rate("500").is_err());
        assert!(listen_address("8080").is_err());
        assert!(server("https://127.0.0.1").is_err());
        for wrong in
            ["http://127.0.0.1/path", "::1:80", "ftp://h", "h:0", "h:65536", "h:80:80", "", "[::1", "u@h"]
        {
            assert!(matches!(server(wrong), Err(ServerError::Syntax(_))), "{wrong}");
        }
    }
}
