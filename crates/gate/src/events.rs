//! What TCP goes through, connection by connection, for whoever classifies clients.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use libbpf_rs::{Link, MapHandle, RingBufferBuilder};
use zerocopy::FromBytes;

use crate::GateError;
use crate::abi;

/// Something that happened to a connection on a port where cleartext HTTP is spoken.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct TcpEvent {
    /// When, on the clock that counts from the start of the host.
    pub at: Duration,
    /// The other end.
    pub client: SocketAddr,
    /// The local port.
    pub server_port: u16,
    /// What happened.
    pub kind: TcpEventKind,
    /// The smoothed round-trip time; zero before it is known.
    pub round_trip: Duration,
    /// Bytes that the other end is ready to take.
    pub window: u32,
    /// Segments that were sent again, since the connection began.
    pub retransmits: u32,
}

/// What happened to a connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum TcpEventKind {
    /// A segment was sent again.
    Retransmit,
    /// The connection went from one state to another; numbers as in RFC 9293 §3.3.2, in the kernel's order.
    State {
        /// Before.
        from: u8,
        /// Now: 1 is established, 7 closed.
        to: u8,
    },
    /// A reset was sent.
    ResetSent,
    /// A reset came.
    ResetReceived,
    /// The other end takes no more bytes.
    ZeroWindow,
}

/// Events as they come, for as long as it lives.
#[derive(Debug)]
pub struct TcpEvents {
    ring: MapHandle,
    _links: Vec<Link>,
}

impl TcpEvents {
    pub(crate) fn new(ring: MapHandle, links: Vec<Link>) -> Self {
        Self { ring, _links: links }
    }

    /// Calls `take` with each event there is, waiting at most `timeout` for the first; gives their number. Events that
    /// nobody takes in time are lost, and counted (`gate_tcp_events_lost_total`).
    pub fn poll(&self, timeout: Duration, mut take: impl FnMut(TcpEvent)) -> Result<usize, GateError> {
        let mut count = 0;
        let mut builder = RingBufferBuilder::new();
        let on_bytes = |bytes: &[u8]| {
            if let Some(event) =
                abi::tg_event::read_from_prefix(bytes).ok().and_then(|(event, _)| describe(&event))
            {
                count += 1;
                take(event);
            }
            0
        };
        builder.add(&self.ring, on_bytes).map_err(GateError::kernel("opening the events"))?;
        let ring = builder.build().map_err(GateError::kernel("opening the events"))?;
        match ring.poll(timeout) {
            Err(error) if error.kind() != libbpf_rs::ErrorKind::Interrupted => {
                return Err(GateError::kernel("waiting for events")(error));
            }
            _ => {}
        }
        drop(ring);
        Ok(count)
    }
}

fn describe(event: &abi::tg_event) -> Option<TcpEvent> {
    let kind = match event.kind {
        abi::TG_EVENT_RETRANSMIT => TcpEventKind::Retransmit,
        abi::TG_EVENT_STATE => TcpEventKind::State {
            from: event.old_state.try_into().ok()?,
            to: event.new_state.try_into().ok()?,
        },
        abi::TG_EVENT_RESET_SENT => TcpEventKind::ResetSent,
        abi::TG_EVENT_RESET_RECEIVED => TcpEventKind::ResetReceived,
        abi::TG_EVENT_ZERO_WINDOW => TcpEventKind::ZeroWindow,
        _ => return None,
    };
    let client = IpAddr::V6(Ipv6Addr::from(event.client)).to_canonical();
    Some(TcpEvent {
        at: Duration::from_nanos(event.at_ns),
        client: SocketAddr::new(client, event.client_port),
        server_port: event.server_port,
        kind,
        round_trip: Duration::from_micros(event.srtt_us.into()),
        window: event.window,
        retransmits: event.retransmits,
    })
}
