//! Which connections go over Trickles, and for whom they are encrypted: `TIDEGATE_TRICKLES` and `TIDEGATE_TRICKLES_KEY`.

use std::net::{IpAddr, SocketAddr};
use tidegate_trickles::sealed::{Encryption, public_from_hex};

/// A destination, and who serves it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Rule {
    /// Any address if `None`.
    address: Option<IpAddr>,
    port: u16,
    /// Empty: the destination itself, by UDP.
    servers: Vec<SocketAddr>,
}

/// A rule that cannot be understood.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{rule:?}: expected ADDRESS:PORT or *:PORT, and after = servers ADDRESS:PORT joined by +")]
pub struct RuleError {
    rule: String,
}

/// Reads rules such as `*:8080,192.0.2.1:80=192.0.2.1:4000+192.0.2.2:4000`.
///
/// # Errors
/// The first rule that is wrong.
pub fn parse(text: &str) -> Result<Vec<Rule>, RuleError> {
    let rules = text.split(',').map(str::trim).filter(|rule| !rule.is_empty());
    rules.map(|rule| parse_one(rule).ok_or_else(|| RuleError { rule: rule.to_owned() })).collect()
}

fn parse_one(rule: &str) -> Option<Rule> {
    let (destination, servers) = match rule.split_once('=') {
        Some((destination, servers)) => {
            let servers: Vec<SocketAddr> =
                servers.split('+').map(str::parse).collect::<Result<_, _>>().ok()?;
            (destination, servers)
        }
        None => (rule, Vec::new()),
    };
    let (address, port) = match destination.strip_prefix("*:") {
        Some(port) => (None, port.parse().ok()?),
        None => {
            let destination: SocketAddr = destination.parse().ok()?;
            (Some(destination.ip()), destination.port())
        }
    };
    Some(Rule { address, port, servers })
}

/// Reads a server's key: nothing is whoever answers, `none` no encryption. `None` is no key.
#[must_use]
pub fn encryption(key: &str) -> Option<Encryption> {
    match key.trim() {
        "" => Some(Encryption::On),
        "none" => Some(Encryption::Off),
        key => public_from_hex(key).map(Encryption::Pinned),
    }
}

/// The servers for a connection to `destination`; `None` leaves it to TCP.
#[must_use]
pub fn servers(rules: &[Rule], destination: SocketAddr) -> Option<Vec<SocketAddr>> {
    let address = destination.ip().to_canonical();
    let rule = rules
        .iter()
        .find(|rule| rule.port == destination.port() && rule.address.is_none_or(|rule| rule == address))?;
    match rule.servers.is_empty() {
        true => Some(vec![SocketAddr::new(address, destination.port())]),
        false => Some(rule.servers.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_choose_destinations_and_servers() {
        let rules = parse("*:8080, 192.0.2.1:80=192.0.2.1:4000+192.0.2.2:4000,[::1]:81").unwrap();
        let found = |destination: &str| servers(&rules, destination.parse().unwrap());
        assert_eq!(found("10.0.0.1:8080"), Some(vec!["10.0.0.1:8080".parse().unwrap()]));
        assert_eq!(found("192.0.2.1:80").map(|servers| servers.len()), Some(2));
        assert_eq!(found("[::ffff:192.0.2.1]:80").map(|servers| servers.len()), Some(2));
        assert_eq!(found("[::1]:81"), Some(vec!["[::1]:81".parse().unwrap()]));
        assert_eq!(found("192.0.2.2:80"), None);
        for wrong in ["x", "*:", "*:99999", "1.2.3.4", "*:80=", "*:80=x", "*:80=1.2.3.4:5+"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        assert_eq!(parse(""), Ok(vec![]));
    }

    #[test]
    fn a_key_is_whoevers_nobodys_or_the_one_that_is_named() {
        assert_eq!(encryption(""), Some(Encryption::On));
        assert_eq!(encryption("none"), Some(Encryption::Off));
        assert_eq!(encryption(&"0a".repeat(32)), Some(Encryption::Pinned([10; 32])));
        for wrong in ["no", "0a", &"0g".repeat(32)] {
            assert_eq!(encryption(wrong), None, "{wrong}");
        }
    }
}
