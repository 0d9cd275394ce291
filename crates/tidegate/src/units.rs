//! Durations, sizes, rates and addresses as people write them.

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

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

/// `127.0.0.1:8080`, `[::1]:8080`, or `:8080` for every address.
pub(crate) fn listen_address(text: &str) -> Result<SocketAddr, String> {
    let expected = || format!("expected ADDRESS:PORT or :PORT, not {text:?}");
    if let Some(port) = text.strip_prefix(':') {
        return Ok(SocketAddr::from(([0, 0, 0, 0], port.parse().map_err(|_| expected())?)));
    }
    text.parse().map_err(|_| expected())
}

/// `127.0.0.1:9000`, `app.internal:9000` or `http://127.0.0.1:9000`, resolved.
pub(crate) fn server(text: &str) -> Result<Vec<SocketAddr>, String> {
    if text.starts_with("https://") {
        return Err(format!("{text:?}: upstreams are reached by http only"));
    }
    let host = text.strip_prefix("http://").unwrap_or(text).trim_end_matches('/');
    if host.contains('/') || host.is_empty() {
        return Err(format!("expected http://HOST:PORT without a path, not {text:?}"));
    }
    let with_port = if host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok()) {
        host.to_owned()
    } else {
        format!("{host}:80")
    };
    let addresses =
        with_port.to_socket_addrs().map_err(|error| format!("cannot resolve {host:?}: {error}"))?;
    let addresses: Vec<_> = addresses.collect();
    if addresses.is_empty() { Err(format!("{host:?} has no address")) } else { Ok(addresses) }
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
        assert_eq!(listen_address(":8080"), Ok("0.0.0.0:8080".parse().unwrap()));
        assert_eq!(server("http://127.0.0.1:9000/"), Ok(vec!["127.0.0.1:9000".parse().unwrap()]));
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
        assert!(server("http://127.0.0.1/path").is_err());
    }
}
