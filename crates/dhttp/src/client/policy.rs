//! Whose answers a client takes (DHTTP §IV-A): an interception cache answers from its own address, so that a client
//! sees that it is one and may refuse it.

use std::net::IpAddr;

use tidegate_core::IpPrefix;

/// Which interception caches may answer.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct CachePolicy {
    /// Whether caches are accepted that nothing below names.
    pub accept: bool,
    /// Caches to which the opposite of `accept` applies: single ones or subnets.
    pub except: Vec<IpPrefix>,
    /// Sites for which no cache is accepted: host names, each with the names below it.
    pub refuse_for_sites: Vec<String>,
}

impl Default for CachePolicy {
    fn default() -> Self {
        Self { accept: true, except: Vec::new(), refuse_for_sites: Vec::new() }
    }
}

impl CachePolicy {
    /// Whether an answer from `from` is acceptable for a request to `server`, which is of the site `site`.
    pub fn allows(&self, server: IpAddr, from: IpAddr, site: &str) -> bool {
        if server.to_canonical() == from.to_canonical() {
            return true;
        }
        if self.refuse_for_sites.iter().any(|refused| is_within(site, refused)) {
            return false;
        }
        self.accept != self.except.iter().any(|prefix| prefix.contains(from))
    }
}

/// Whether `site` is `domain` or below it.
fn is_within(site: &str, domain: &str) -> bool {
    let (site, domain) = (site.as_bytes(), domain.as_bytes());
    let Some(start) = site.len().checked_sub(domain.len()) else { return false };
    site[start..].eq_ignore_ascii_case(domain) && (start == 0 || site[start - 1] == b'.')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allows(policy: &CachePolicy, from: &str, site: &str) -> bool {
        policy.allows("192.0.2.1".parse().unwrap(), from.parse().unwrap(), site)
    }

    #[test]
    fn the_server_itself_is_always_heard() {
        let policy = CachePolicy { accept: false, ..CachePolicy::default() };
        assert!(allows(&policy, "192.0.2.1", "example.org"));
        assert!(allows(&policy, "::ffff:192.0.2.1", "example.org"));
        assert!(!allows(&policy, "192.0.2.2", "example.org"));
    }

    #[test]
    fn subnets_are_exceptions_either_way() {
        let except: Vec<IpPrefix> = vec!["10.0.0.0/8".parse().unwrap()];
        let accepting = CachePolicy { accept: true, except: except.clone(), ..CachePolicy::default() };
        assert!(!allows(&accepting, "10.1.2.3", "example.org"));
        assert!(allows(&accepting, "11.1.2.3", "example.org"));
        let refusing = CachePolicy { accept: false, except, ..CachePolicy::default() };
        assert!(allows(&refusing, "10.1.2.3", "example.org"));
        assert!(!allows(&refusing, "11.1.2.3", "example.org"));
    }

    #[test]
    fn sites_are_refused_with_the_names_below_them() {
        let policy = CachePolicy { refuse_for_sites: vec!["bank.example".into()], ..CachePolicy::default() };
        for (site, accepted) in [
            ("bank.example", false),
            ("www.BANK.example", false),
            ("notbank.example", true),
            ("example", true),
        ] {
            assert_eq!(allows(&policy, "10.1.2.3", site), accepted, "{site}");
        }
    }
}
