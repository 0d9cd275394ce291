//! How often something was seen of each client within a while.

use std::collections::HashMap;
use std::net::IpAddr;

/// Clients that are counted at once.
const MAX_CLIENTS: usize = 65_536;

/// Counts per client, anew after each interval.
#[derive(Clone, Debug)]
pub struct Tally {
    limit: u32,
    interval_ns: u64,
    clients: HashMap<IpAddr, Count>,
}

#[derive(Clone, Copy, Debug)]
struct Count {
    since_ns: u64,
    seen: u32,
}

impl Tally {
    /// Counts up to `limit` per client and interval.
    pub fn new(limit: u32, interval_ns: u64) -> Self {
        Self { limit: limit.max(1), interval_ns, clients: HashMap::new() }
    }

    /// Counts one more of a client; whether it has just reached the limit. Where there are very many clients, those
    /// whose interval is over are forgotten, and if that is not enough, all.
    pub fn see(&mut self, client: IpAddr, now_ns: u64) -> bool {
        let interval_ns = self.interval_ns;
        let is_over = |count: &Count| now_ns.saturating_sub(count.since_ns) >= interval_ns;
        if self.clients.len() >= MAX_CLIENTS && !self.clients.contains_key(&client) {
            self.clients.retain(|_, count| !is_over(count));
            if self.clients.len() >= MAX_CLIENTS {
                self.clients.clear();
            }
        }
        let count = self.clients.entry(client).or_insert(Count { since_ns: now_ns, seen: 0 });
        if is_over(count) {
            *count = Count { since_ns: now_ns, seen: 0 };
        }
        count.seen = count.seen.saturating_add(1);
        count.seen == self.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(number: u32) -> IpAddr {
        std::net::Ipv4Addr::from(number).into()
    }

    #[test]
    fn a_client_reaches_its_limit_once_in_an_interval_and_by_itself() {
        let mut tally = Tally::new(3, 1000);
        let reached: Vec<bool> = (0..5).map(|now_ns| tally.see(client(1), now_ns)).collect();
        assert_eq!(reached, [false, false, true, false, false]);
        assert!(!tally.see(client(2), 5) && !tally.see(client(2), 6));
        // A new interval, which the last one's are not counted to.
        assert!(!tally.see(client(2), 1005) && !tally.see(client(2), 1006) && tally.see(client(2), 1007));
    }

    #[test]
    fn very_many_clients_take_no_more_room() {
        let mut tally = Tally::new(2, 1000);
        for number in 0..3 * MAX_CLIENTS as u32 {
            tally.see(client(number), 0);
            assert!(tally.clients.len() <= MAX_CLIENTS);
        }
    }
}
