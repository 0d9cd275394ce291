//! How a client reached the site: what the connection says, or what a trusted proxy says of it.

use std::net::IpAddr;

use tidegate_http::{FieldId, RequestHead};

use crate::service::plan::Plan;

/// Where a request comes from and under which name it was made.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Seen<'a> {
    /// The client, not the proxies before us.
    pub client: IpAddr,
    /// Whether the connection is a trusted proxy's.
    pub via_proxy: bool,
    /// Whether the client's own connection is encrypted.
    pub https: bool,
    /// The host that the client asked for, where a trusted proxy names another one than `Host`.
    pub host: Option<&'a [u8]>,
}

impl<'a> Seen<'a> {
    /// What is believed of a request from `peer`.
    #[inline]
    pub(crate) fn of(plan: &Plan, head: &RequestHead<'a>, peer: IpAddr) -> Self {
        if !plan.is_trusted(peer) {
            return Self { client: peer, via_proxy: false, https: false, host: None };
        }
        let last =
            |id| head.fields.get_all(id).last().and_then(|value| value.rsplit(|&byte| byte == b',').next());
        let scheme = last(FieldId::XForwardedProto).map(<[u8]>::trim_ascii);
        Self {
            client: client(plan, head).unwrap_or(peer),
            via_proxy: true,
            https: scheme.is_some_and(|scheme| scheme.eq_ignore_ascii_case(b"https")),
            host: last(FieldId::XForwardedHost).map(<[u8]>::trim_ascii).filter(|host| !host.is_empty()),
        }
    }
}

/// The last address of `X-Forwarded-For` that is no trusted proxy: what stands before it was written by that client.
fn client(plan: &Plan, head: &RequestHead<'_>) -> Option<IpAddr> {
    let lines: Vec<&[u8]> = head.fields.get_all(FieldId::XForwardedFor).collect();
    let mut first = None;
    for address in lines.iter().rev().flat_map(|line| line.rsplit(|&byte| byte == b',')) {
        let address = std::str::from_utf8(address.trim_ascii()).ok()?.parse::<IpAddr>().ok()?.to_canonical();
        first = Some(address);
        if !plan.is_trusted(address) {
            break;
        }
    }
    first
}
