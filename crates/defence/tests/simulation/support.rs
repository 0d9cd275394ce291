//! What all simulations have in common: requests, and the addresses that they come from.

use std::net::{IpAddr, Ipv4Addr};

use tidegate_core::hooks::{Field, Fields, Load, Part, Peer, RequestView, ResponseView, Source, Via};

/// A server that can do no more.
pub(crate) const BUSY: Load = Load { busy: 1.0, lag_ms: 0, connections: 0.1, tcp_memory: 0.0 };

/// The fields of a simulated request; what is empty is not there.
#[derive(Clone, Copy, Default)]
pub(crate) struct Sent<'s> {
    pub(crate) user_agent: &'s str,
    pub(crate) cookie: &'s str,
    pub(crate) part: Option<Part>,
}

impl Sent<'_> {
    /// No fields that anybody looks at.
    pub(crate) const PLAIN: Sent<'static> = Sent { user_agent: "", cookie: "", part: None };
}

impl Fields for Sent<'_> {
    fn get(&self, field: Field) -> Option<&[u8]> {
        let value = match field {
            Field::UserAgent => self.user_agent,
            Field::Cookie => self.cookie,
            _ => "",
        };
        (!value.is_empty()).then_some(value.as_bytes())
    }

    fn part(&self) -> Option<Part> {
        self.part
    }
}

pub(crate) fn get<'r>(target: &'r str, fields: &'r Sent<'_>) -> RequestView<'r> {
    let (path, query) = target.split_once('?').map_or((target, None), |(path, query)| (path, Some(query)));
    let (path, query) = (path.as_bytes(), query.map(str::as_bytes));
    RequestView { method: b"GET", path, reading: None, query, has_body: false, fields }
}

/// What answers a request for `target`; it took `upstream_ms`.
pub(crate) fn response(target: &str, status: u16, source: Source, upstream_ms: u32) -> ResponseView<'_> {
    let RequestView { path, query, .. } = get(target, &Sent::PLAIN);
    ResponseView { path, query, authority: b"example.org", variant: 0, status, source, upstream_ms }
}

pub(crate) fn direct(address: IpAddr) -> Peer {
    Peer { address, via: Via::Direct }
}

/// An address in a network of 16 bits, or beyond its end in those after it.
pub(crate) fn host([a, b]: [u8; 2], host: u32) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from(u32::from_be_bytes([a, b, 0, 0]) + host))
}
