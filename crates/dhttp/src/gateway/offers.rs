//! Which servers have said that they speak DHTTP, and on which port (RFC 7838).

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use crate::driver::Fingerprint;
use crate::ports::ClientPorts;

/// How long an offer holds that names no time (RFC 7838 §3.1).
const DEFAULT_AGE: Duration = Duration::from_secs(86_400);
/// Longer promises are not believed.
const MOST_AGE: Duration = Duration::from_secs(7 * 86_400);

/// Whether a server may speak DHTTP at `port`: none does at a client's port, and below 1024, where other services
/// listen, it is HTTP's or the one at which the site, `origin`, has answered. Who may choose another port could have
/// datagrams sent to such a service.
pub(super) fn may_be_a_servers(port: u16, origin: Option<u16>) -> bool {
    let is_webs = matches!(port, 80 | 443) || origin == Some(port);
    (port >= 1024 || is_webs) && !ClientPorts::default().contains(port)
}

/// Where a server speaks DHTTP.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Offered {
    pub port: u16,
    /// Of its certificate, if it takes encrypted requests.
    pub tls: Option<Fingerprint>,
}

/// The offers known. The oldest makes room for the newest.
#[derive(Debug)]
pub(super) struct Offers {
    capacity: usize,
    known: HashMap<(String, u16), (Offered, Instant)>,
    order: VecDeque<(String, u16)>,
}

impl Offers {
    pub fn new(capacity: usize) -> Self {
        Self { capacity: capacity.max(1), known: HashMap::new(), order: VecDeque::new() }
    }

    /// What `host` offers, whose port for HTTP is `port`.
    pub fn of(&mut self, host: &str, port: u16, now: Instant) -> Option<Offered> {
        let (offered, until) = self.known.get(&(host.to_ascii_lowercase(), port))?;
        (*until > now).then_some(*offered)
    }

    /// An offer that did not hold.
    pub fn forget(&mut self, host: &str, port: u16) {
        let origin = (host.to_ascii_lowercase(), port);
        self.known.remove(&origin);
        self.order.retain(|known| *known != origin);
    }

    /// Takes over what a response's `Alt-Svc` says. It speaks for its own host only: for another one, nothing proves
    /// that it may (RFC 7838 §2.1).
    pub fn learn(&mut self, host: &str, port: u16, field: &[u8], now: Instant) {
        let origin = (host.to_ascii_lowercase(), port);
        let Some(offer) = parse(field, host, port) else { return };
        self.order.retain(|known| *known != origin);
        match offer {
            Offer::Clear => {
                self.known.remove(&origin);
            }
            Offer::At(offered, age) => {
                if self.order.len() >= self.capacity
                    && let Some(oldest) = self.order.pop_front()
                {
                    self.known.remove(&oldest);
                }
                self.known.insert(origin.clone(), (offered, now + age));
                self.order.push_back(origin);
            }
        }
    }
}

#[derive(Debug, Eq, PartialEq)]
enum Offer {
    /// `clear`: nothing is offered any more.
    Clear,
    At(Offered, Duration),
}

/// The first alternative that is DHTTP on the same host, which has answered at `origin`; `None` if there is none.
fn parse(field: &[u8], host: &str, origin: u16) -> Option<Offer> {
    let field = std::str::from_utf8(field).ok()?;
    if field.trim() == "clear" {
        return Some(Offer::Clear);
    }
    // A quoted authority holds no comma and no semicolon.
    field.split(',').find_map(|alternative| {
        let mut parts = alternative.split(';').map(str::trim);
        let authority = parts.next()?.strip_prefix("dhttp=")?.strip_prefix('"')?.strip_suffix('"')?;
        let (name, port) = authority.rsplit_once(':')?;
        if !name.is_empty() && !name.eq_ignore_ascii_case(host) {
            return None;
        }
        let port = port.parse().ok().filter(|port| may_be_a_servers(*port, Some(origin)))?;
        let (mut age, mut tls) = (DEFAULT_AGE, None);
        for parameter in parts {
            if let Some(seconds) = parameter.strip_prefix("ma=") {
                age = seconds.parse().ok().map(Duration::from_secs)?;
            } else if let Some(fingerprint) = parameter.strip_prefix("tls=") {
                tls = fingerprint.trim_matches('"').parse().ok();
            }
        }
        Some(Offer::At(Offered { port, tls }, age.min(MOST_AGE)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_names_a_port_of_its_own_host() {
        let day = DEFAULT_AGE;
        let at = |port, age| Some(Offer::At(Offered { port, tls: None }, age));
        let fingerprint = "ab".repeat(32);
        let secured = format!("dhttp=\":8081\"; tls=\"{fingerprint}\"; ma=60");
        let tls = Some(fingerprint.parse().unwrap());
        let expected = Some(Offer::At(Offered { port: 8081, tls }, Duration::from_secs(60)));
        assert_eq!(parse(secured.as_bytes(), "a.example", 80), expected);
        for (field, offer) in [
            ("dhttp=\":8080\"", at(8080, day)),
            ("h2=\":443\", dhttp=\":8081\"; ma=60", at(8081, Duration::from_secs(60))),
            ("dhttp=\"a.example:8081\";persist=1", at(8081, day)),
            ("dhttp=\":8081\"; ma=99999999", at(8081, MOST_AGE)),
            ("clear", Some(Offer::Clear)),
            ("dhttp=\"other.example:8081\"", None),
            ("dhttp=\":0\"", None),
            ("dhttp=\":53\"", None),
            ("dhttp=\":40000\"", None),
            ("dhttp=\":953\", dhttp=\":443\"", at(443, day)),
            ("dhttp=\":82\"", at(82, day)),
            ("dhttp=\":8081\"; tls=\"abc\"", at(8081, day)),
            ("dhttp=\":8081\"; ma=x", None),
            ("dhttp=:8081", None),
            ("h3=\":443\"", None),
            ("", None),
        ] {
            assert_eq!(parse(field.as_bytes(), "a.example", 82), offer, "{field}");
        }
    }

    #[test]
    fn offers_expire_are_withdrawn_and_are_bounded() {
        let now = Instant::now();
        let mut offers = Offers::new(2);
        offers.learn("A.example", 80, b"dhttp=\":8081\"; ma=60", now);
        assert_eq!(offers.of("a.EXAMPLE", 80, now).map(|offer| offer.port), Some(8081));
        assert_eq!(offers.of("a.example", 8080, now).map(|offer| offer.port), None);
        assert_eq!(offers.of("a.example", 80, now + Duration::from_secs(60)).map(|offer| offer.port), None);
        offers.learn("a.example", 80, b"clear", now);
        assert_eq!(offers.of("a.example", 80, now).map(|offer| offer.port), None);
        for host in ["a", "b", "c"] {
            offers.learn(host, 80, b"dhttp=\":8081\"", now);
        }
        assert_eq!(offers.of("a", 80, now).map(|offer| offer.port), None);
        assert_eq!((offers.known.len(), offers.order.len()), (2, 2));
    }
}
