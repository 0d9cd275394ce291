//! How a client reached the site: what the connection says, or what a trusted proxy says of it.

use std::net::IpAddr;

use tidegate_http::forward::{claims_https, forwarded_for, last_claim, other_claims, parse_address};
use tidegate_http::{FieldId, Fields, RequestHead};

use crate::service::plan::Plan;

/// Where a request comes from and under which name it was made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClientInfo<'a> {
    /// The client, not the proxies before us.
    pub client: IpAddr,
    /// Whether the connection is a trusted proxy's.
    pub via_proxy: bool,
    /// Whether the connection is encrypted.
    pub is_encrypted: bool,
    /// Whether the client's own connection is: the same one, or the one to a trusted proxy.
    pub https: bool,
    /// The host that the client asked for, where a trusted proxy names another one than `Host`.
    pub host: Option<&'a [u8]>,
    /// The fields of a request in which a trusted proxy says still more about the URL.
    pub claims: Option<Claims<'a>>,
}

/// Fields among which there are claims of a trusted proxy about the URL.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claims<'a>(Fields<'a>);

impl<'a> Claims<'a> {
    fn among(fields: &Fields<'a>) -> Option<Self> {
        let mut any = false;
        other_claims(fields, |_, _| any = true);
        any.then_some(Self(*fields))
    }

    /// Appends them so that different ones do not look the same.
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        other_claims(&self.0, |name, value| {
            out.extend(name.iter().map(u8::to_ascii_lowercase));
            out.push(b':');
            out.extend_from_slice(value);
            out.push(b'\n');
        });
    }
}

impl<'a> ClientInfo<'a> {
    /// What is believed of a request from `peer`, whose own connection may be encrypted.
    #[inline]
    pub(crate) fn of(plan: &Plan, head: &RequestHead<'a>, peer: IpAddr, is_encrypted: bool) -> Self {
        if !plan.is_trusted(peer) {
            return Self {
                client: peer,
                via_proxy: false,
                is_encrypted,
                https: is_encrypted,
                host: None,
                claims: None,
            };
        }
        Self {
            client: client(plan, head).unwrap_or(peer),
            via_proxy: true,
            is_encrypted,
            https: match head.fields.has(FieldId::XForwardedProto) {
                true => claims_https(&head.fields),
                false => is_encrypted,
            },
            host: last_claim(&head.fields, FieldId::XForwardedHost),
            claims: Claims::among(&head.fields),
        }
    }
}

/// The last address that is no trusted proxy: what stands before it was written by that client. `X-Forwarded-For` is
/// asked first, `Forwarded` (RFC 7239) where there is none.
fn client(plan: &Plan, head: &RequestHead<'_>) -> Option<IpAddr> {
    let lines: Vec<&[u8]> = head.fields.get_all(FieldId::XForwardedFor).collect();
    if !lines.is_empty() {
        let members = lines.iter().rev().flat_map(|line| line.rsplit(|&byte| byte == b','));
        return first_beyond_proxies(plan, members.map(parse_address));
    }
    let lines: Vec<&[u8]> = head.fields.get_all(FieldId::Forwarded).collect();
    first_beyond_proxies(plan, lines.iter().rev().flat_map(|line| forwarded_for(line)))
}

/// Of addresses, the nearest first; the farthest if all are trusted proxies. `None` among them is one that cannot be
/// read.
fn first_beyond_proxies(plan: &Plan, addresses: impl Iterator<Item = Option<IpAddr>>) -> Option<IpAddr> {
    let mut first = None;
    for address in addresses {
        let address = address?;
        first = Some(address);
        if !plan.is_trusted(address) {
            break;
        }
    }
    first
}
