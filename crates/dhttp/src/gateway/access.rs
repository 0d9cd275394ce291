//! Where the gateway goes for whom.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use tokio::time::timeout;

use super::refusal::Refusal;

/// How long a name may take to be resolved.
const RESOLVE_TIME: Duration = Duration::from_secs(30);

/// The addresses of `host` that `peer` may reach.
///
/// What listens on this host's own addresses often trusts whoever reaches it, such as an admin server: other hosts are
/// not led there.
pub(super) async fn addresses(host: &str, port: u16, peer: IpAddr) -> Result<Vec<SocketAddr>, Refusal> {
    let found = timeout(RESOLVE_TIME, tokio::net::lookup_host((host, port)));
    let found: Vec<SocketAddr> = match found.await {
        Ok(Ok(found)) => found.collect(),
        Ok(Err(_)) => return Err(Refusal::unresolved(host)),
        Err(_) => {
            return Err(Refusal::new(
                504,
                "dns_timeout",
                format!("the address of {host} was not found in time"),
            ));
        }
    };
    let any_found = !found.is_empty();
    let allowed: Vec<SocketAddr> =
        found.into_iter().filter(|address| may_reach(peer, address.ip())).collect();
    match (allowed.is_empty(), any_found) {
        (false, _) => Ok(allowed),
        (true, true) => Err(Refusal::new(
            403,
            "destination_ip_prohibited",
            format!(
                "{host} is an address of the proxy's own host, or of a group: other hosts are not led there"
            ),
        )),
        (true, false) => Err(Refusal::unresolved(host)),
    }
}

fn may_reach(peer: IpAddr, target: IpAddr) -> bool {
    let target = target.to_canonical();
    !target.is_multicast()
        && target != IpAddr::V4(Ipv4Addr::BROADCAST)
        && (peer.to_canonical().is_loopback() || !is_of_this_host(target))
}

/// Whether packets to `address` stay on this host.
fn is_of_this_host(address: IpAddr) -> bool {
    if address.is_loopback() || address.is_unspecified() {
        return true;
    }
    // Nothing is sent: the kernel says from which address it would be, which for its own addresses is the same.
    let any: IpAddr =
        if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let source = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect((address, 9))?;
        socket.local_addr()
    });
    // Without a route there is no harm in trying, and the error says more.
    source.is_ok_and(|source| source.ip() == address || source.ip().is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_hosts_are_not_led_to_addresses_of_this_one() {
        let (near, far): (IpAddr, IpAddr) = ("127.0.0.1".parse().unwrap(), "192.0.2.7".parse().unwrap());
        for target in ["127.0.0.1", "127.8.8.8", "::1", "0.0.0.0", "::", "::ffff:127.0.0.1"] {
            let target = target.parse().unwrap();
            assert!(may_reach(near, target) && !may_reach(far, target), "{target}");
        }
        for target in ["224.0.0.1", "255.255.255.255", "ff02::1"] {
            assert!(!may_reach(near, target.parse().unwrap()), "{target}");
        }
        assert!(may_reach(far, "198.51.100.1".parse().unwrap()));
        // The addresses of interfaces, where there are any.
        let interfaces = nix::ifaddrs::getifaddrs().unwrap().filter_map(|interface| interface.address);
        for address in interfaces.filter_map(|address| address.as_sockaddr_in().map(|v4| v4.ip())) {
            assert!(!may_reach(far, address.into()), "{address}");
        }
    }

    #[tokio::test]
    async fn other_hosts_are_told_that_an_address_is_not_for_them() {
        let far: IpAddr = "192.0.2.7".parse().unwrap();
        let refusal = addresses("127.0.0.1", 9090, far).await.unwrap_err();
        assert_eq!(refusal.status, 403);
        let near = addresses("127.0.0.1", 9090, "127.0.0.1".parse().unwrap()).await.unwrap();
        assert_eq!(near, ["127.0.0.1:9090".parse().unwrap()]);
    }
}
