//! Clients that ask and do not take what they asked for: the kernel tells of shut windows (Tempesta §4.6), and who
//! shuts them again and again is blocked.

use std::net::IpAddr;
use std::time::Duration;

use tidegate_core::IpPrefix;
use tidegate_policy::Tally;

use crate::events::{TcpEventKind, TcpEvents};
use crate::{Gate, GateError};

const REASON: &str = "shuts its window again and again";

/// Watches for slow readers and blocks them.
#[derive(Debug)]
pub struct SlowReaders {
    events: TcpEvents,
    tally: Tally,
}

impl SlowReaders {
    /// Shut windows are counted for so long.
    pub const INTERVAL: Duration = Duration::from_secs(10);

    /// Begins to watch the ports where cleartext HTTP is spoken. A client is blocked at its `limit`th shut window
    /// within [`Self::INTERVAL`].
    pub fn start(gate: &Gate, limit: u32) -> Result<Self, GateError> {
        let interval_ns = Self::INTERVAL.as_nanos() as u64;
        Ok(Self { events: gate.tcp_events()?, tally: Tally::new(limit, interval_ns) })
    }

    /// Takes the events there are, without waiting, and blocks for the list's lifetime, but for who is to be spared;
    /// gives who was blocked.
    pub fn tick(&mut self, gate: &Gate, spared: &[IpPrefix]) -> Result<Vec<IpAddr>, GateError> {
        let mut blocked = Vec::new();
        self.events.poll(Duration::ZERO, |event| {
            let (client, at_ns) = (event.client.ip(), event.at.as_nanos() as u64);
            let is_spared = || spared.iter().any(|prefix| prefix.contains(client));
            if event.kind == TcpEventKind::ZeroWindow && !is_spared() && self.tally.see(client, at_ns) {
                blocked.push(client);
            }
        })?;
        let blocks = gate.blocks();
        for client in &blocked {
            let bits = if client.is_ipv4() { 32 } else { 128 };
            let Ok(prefix) = IpPrefix::new(*client, bits) else { continue };
            blocks.add(prefix, blocks.lifetime()?)?;
            blocks.set_reason(prefix, REASON)?;
        }
        Ok(blocked)
    }
}
