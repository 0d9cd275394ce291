//! What goes on to the next hop: heads are written anew, never copied (RFC 9110 §7.6).

use std::borrow::Cow;
use std::io::Write;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use crate::chars::is_token;
use crate::decimal::write_address;
use crate::field::{FieldId, Fields};
use crate::field_rules::FieldRules;
use crate::head::{BodyFraming, Method, RequestHead, ResponseHead, Version};
use crate::normalize::Normalized;
use crate::write_decimal;

/// What [`write_upstream_request`] must know beside the request.
#[derive(Clone, Copy, Debug)]
pub struct ForwardContext<'c> {
    /// The client's address, for `X-Forwarded-For` and `Forwarded`.
    pub client: IpAddr,
    /// `http` or `https`: how the client reached us.
    pub scheme: &'c str,
    /// What `Host` says where the client has not said whom it asks, as it need not by HTTP/1.0; servers refuse an empty one.
    pub default_host: &'c [u8],
    /// Our name in `Via` (RFC 9110 §7.6.3); a token.
    pub via_pseudonym: &'c str,
    /// The client is a configured proxy, whose own `X-Forwarded-*` and `Forwarded` are believed and kept.
    pub trusted_client: bool,
    /// Pass `Upgrade` on: the connection becomes a tunnel if the upstream agrees.
    pub keep_upgrade: bool,
    /// How the body will be sent.
    pub framing: BodyFraming,
    /// Fields of the request to leave out, such as conditions that were meant for the cache.
    pub removed: &'c [FieldId],
    /// Fields to add, name and value; they must be well-formed.
    pub added: &'c [(&'c [u8], &'c [u8])],
    /// The name of a cookie of our own, which is no business of the next hop's; empty: none.
    pub own_cookie: &'c [u8],
    /// What the operator changes of the fields.
    pub rules: &'c FieldRules,
}

/// Whether a field concerns one connection only (RFC 9110 §7.6.1), whatever `Connection` says.
pub const fn is_hop_by_hop(id: FieldId) -> bool {
    matches!(
        id,
        FieldId::Connection
            | FieldId::KeepAlive
            | FieldId::ProxyAuthenticate
            | FieldId::ProxyAuthorization
            | FieldId::ProxyConnection
            | FieldId::Te
            | FieldId::Trailer
            | FieldId::TransferEncoding
            | FieldId::Upgrade
    )
}

/// A head with more options than this is refused by the parsers: comparing every field with thousands of options would
/// cost milliseconds, and no sound peer names more than a few.
pub(crate) const MOST_OPTIONS: usize = 16;

/// The options that the `Connection` fields of a head name.
#[derive(Clone, Debug)]
pub struct ConnectionOptions<'a>(Vec<&'a [u8]>);

impl<'a> ConnectionOptions<'a> {
    /// The options that `fields` name.
    pub fn of(fields: Fields<'a>) -> Self {
        if !fields.has(FieldId::Connection) {
            return Self(Vec::new());
        }
        let options = fields
            .get_all(FieldId::Connection)
            .flat_map(|value| value.split(|&byte| byte == b','))
            .map(<[u8]>::trim_ascii)
            .filter(|option| !option.is_empty());
        Self(options.take(MOST_OPTIONS).collect())
    }

    /// Each option as received.
    pub fn iter(&self) -> impl Iterator<Item = &'a [u8]> + use<'a, '_> {
        self.0.iter().copied()
    }

    /// Whether the field must not go on to the next hop: it is hop-by-hop by nature, or an option names it.
    ///
    /// RFC 9110 §7.6.1 forbids options that name end-to-end fields. A peer that names `Host`, `Cookie` or
    /// `Cache-Control` wants us to strip what the next hop relies on, so a known end-to-end field is never removed.
    pub fn removes(&self, id: FieldId, name: &[u8]) -> bool {
        match id {
            FieldId::Other => self.iter().any(|option| option.eq_ignore_ascii_case(name)),
            _ => is_hop_by_hop(id),
        }
    }
}

/// Appends `name: value` and CRLF.
#[inline]
pub fn write_field(name: &[u8], value: &[u8], out: &mut Vec<u8>) {
    out.reserve(name.len() + value.len() + 4);
    out.extend_from_slice(name);
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
}

/// Appends the head of the request to an upstream, up to and including the empty line.
pub fn write_upstream_request(
    head: &RequestHead<'_>,
    normalized: &Normalized<'_>,
    context: &ForwardContext<'_>,
    out: &mut Vec<u8>,
) {
    write_request_line(head, normalized, out);
    let host = if normalized.authority.is_empty() { context.default_host } else { normalized.authority };
    write_field(b"Host", context.rules.host().unwrap_or(host), out);
    let options = ConnectionOptions::of(head.fields);
    let goes_on = |id, name: &[u8]| is_end_to_end(id, name, head, &options, context);
    for (id, name, value) in head.fields.iter() {
        if goes_on(id, name) {
            match id {
                FieldId::MaxForwards if matches!(head.method, Method::Options | Method::Trace) => {
                    write_max_forwards(value, out);
                }
                FieldId::Cookie => {
                    if let Some(value) = without_cookie(value, context.own_cookie) {
                        write_field(name, &value, out);
                    }
                }
                _ => write_field(name, value, out),
            }
        }
    }
    write_connection(head, context, out);
    write_framing(head.method, context.framing, out);
    write_provenance(head, normalized, context, out);
    for (name, value) in context.added {
        write_field(name, value, out);
    }
    if !context.rules.is_empty() {
        let kept = || head.fields.iter().filter(|(id, name, _)| goes_on(*id, name));
        context.rules.write(|is_named| kept().any(|(id, name, _)| is_named(id, name)), out);
    }
    out.extend_from_slice(b"\r\n");
}

/// The value of a `Cookie` field (RFC 6265 §4.2.1) without the cookies of this name; `None`: there are no others. An
/// empty name is no cookie's.
pub fn without_cookie<'v>(value: &'v [u8], name: &[u8]) -> Option<Cow<'v, [u8]>> {
    let has_name = |pair: &&[u8]| {
        let rest = pair.trim_ascii().strip_prefix(name);
        !name.is_empty() && rest.is_some_and(|rest| rest.starts_with(b"="))
    };
    let pairs = || value.split(|&byte| byte == b';');
    if !pairs().any(|pair| has_name(&pair)) {
        return Some(Cow::Borrowed(value));
    }
    let others = pairs().filter(|pair| !has_name(pair)).map(<[u8]>::trim_ascii);
    let kept: Vec<&[u8]> = others.filter(|pair| !pair.is_empty()).collect();
    (!kept.is_empty()).then(|| Cow::Owned(kept.join(&b"; "[..])))
}

fn write_request_line(head: &RequestHead<'_>, normalized: &Normalized<'_>, out: &mut Vec<u8>) {
    out.extend_from_slice(head.method_bytes);
    out.push(b' ');
    out.extend_from_slice(if head.method == Method::Connect {
        normalized.authority
    } else {
        normalized.path
    });
    if let Some(query) = normalized.query {
        out.push(b'?');
        out.extend_from_slice(query);
    }
    out.extend_from_slice(b" HTTP/1.1\r\n");
}

/// Whether a field of the request goes on as it is; the others are dropped or written by us.
fn is_end_to_end(
    id: FieldId,
    name: &[u8],
    head: &RequestHead<'_>,
    options: &ConnectionOptions<'_>,
    context: &ForwardContext<'_>,
) -> bool {
    match id {
        FieldId::Host
        | FieldId::ContentLength
        | FieldId::Forwarded
        | FieldId::XForwardedFor
        | FieldId::XForwardedHost
        | FieldId::XForwardedProto => false,
        FieldId::XRealIp if !context.trusted_client => false,
        FieldId::Other if is_proxy_field(name) || imitates_known_field(name) => false,
        FieldId::Other if !context.trusted_client && claims_provenance(name) => false,
        FieldId::Other if is_any_of(name, &[b"http2-settings", b"surrogate-capability"]) => false,
        FieldId::Other if context.rules.is_imitated_by(name) => false,
        // A request that is answered from the cache as a GET must be one to the origin too.
        FieldId::Other if head.method.is_safe() && is_method_override(name) => false,
        _ => !context.removed.contains(&id) && !options.removes(id, name) && !context.rules.removes(id, name),
    }
}

/// Fields by which proxies tell servers what the client asked for, beside `X-Forwarded-*`. Servers believe them: from
/// anybody but a trusted proxy they are lies at best, and poison for the cache at worst. A trusted proxy's are part of
/// the cache's key.
const URL_CLAIMS: [&[u8]; 15] = [
    b"front-end-https",
    b"x-envoy-original-host",
    b"x-envoy-original-path",
    b"x-host",
    b"x-http-host-override",
    b"x-original-host",
    b"x-original-method",
    b"x-original-proto",
    b"x-original-scheme",
    b"x-original-uri",
    b"x-original-url",
    b"x-rewrite-url",
    b"x-scheme",
    b"x-url-scheme",
    b"x-forwarded",
];

/// Fields by which proxies tell servers who the client is. Responses that depend on it are not for a cache.
const CLIENT_CLAIMS: [&[u8]; 14] = [
    b"cf-connecting-ip",
    b"client-ip",
    b"fastly-client-ip",
    b"forwarded-for",
    b"true-client-ip",
    b"x-client-ip",
    b"x-cluster-client-ip",
    b"x-envoy-external-address",
    b"x-forward-for",
    b"x-forwarded-client-cert",
    b"x-original-forwarded-for",
    b"x-originating-ip",
    b"x-remote-addr",
    b"x-remote-ip",
];

/// Fields that make some frameworks take a GET for another method.
const METHOD_OVERRIDES: [&[u8]; 3] = [b"x-http-method", b"x-http-method-override", b"x-method-override"];

/// Whether `name` begins with `start`, which is in lower case. An underscore counts as a hyphen: CGI and its
/// descendants write both so, and to them `X_Forwarded_For` is the field that we set, `Transfer_Encoding` the one that
/// we removed.
fn begins_like(name: &[u8], start: &[u8]) -> bool {
    let fold = |byte: u8| if byte == b'_' { b'-' } else { byte.to_ascii_lowercase() };
    name.get(..start.len())
        .is_some_and(|name| name.iter().zip(start).all(|(&byte, &known)| fold(byte) == known))
}

/// Whether `name` is one of `names`, which are in lower case; see [`begins_like`].
fn is_any_of(name: &[u8], names: &[&[u8]]) -> bool {
    names.iter().any(|known| name.len() == known.len() && begins_like(name, known))
}

/// Whether some framework takes a request with this field for one with another method.
pub(crate) fn is_method_override(name: &[u8]) -> bool {
    is_any_of(name, &METHOD_OVERRIDES)
}

/// The protocols of the `Upgrade` fields to which a connection may change (RFC 9110 §7.8). Not among them are those
/// that carry requests of their own, which would pass every check of ours: `h2c`, which RFC 9113 §3.1 has dropped,
/// other versions of HTTP, and TLS (RFC 2817); nor what is no protocol, in which a lax server may find one of those. Of
/// many, the first.
pub fn upgrade_protocols<'a>(fields: &Fields<'a>) -> impl Iterator<Item = &'a [u8]> + use<'a> {
    let fields = *fields;
    fields
        .get_all(FieldId::Upgrade)
        .flat_map(|value| value.split(|&byte| byte == b','))
        .map(<[u8]>::trim_ascii)
        .filter(|protocol| {
            let name = protocol.split(|&byte| byte == b'/').next().unwrap_or(b"");
            !name.is_empty()
                && protocol.iter().all(|&byte| is_token(byte) || byte == b'/')
                && ![&b"h2c"[..], b"h2", b"http", b"tls"].iter().any(|known| name.eq_ignore_ascii_case(known))
        })
        .take(MOST_OPTIONS)
}

/// Whether some server may take this unknown name for a field that only we, or a trusted proxy, may set.
pub(crate) fn is_deceptive(name: &[u8]) -> bool {
    is_proxy_field(name) || imitates_known_field(name) || claims_provenance(name)
}

fn claims_provenance(name: &[u8]) -> bool {
    begins_like(name, b"x-forwarded-") || is_any_of(name, &URL_CLAIMS) || is_any_of(name, &CLIENT_CLAIMS)
}

/// `Proxy` becomes HTTP_PROXY in CGI programs ("httpoxy").
pub(crate) fn is_proxy_field(name: &[u8]) -> bool {
    begins_like(name, b"proxy") && matches!(name.get(5), None | Some(b'-' | b'_'))
}

/// Whether only an underscore tells the name from one that is known here.
pub(crate) fn imitates_known_field(name: &[u8]) -> bool {
    let mut hyphened = [0; crate::names::NAME_BLOCK];
    let Some(hyphened) = hyphened.get_mut(..name.len()).filter(|_| name.contains(&b'_')) else {
        return false;
    };
    for (to, &from) in hyphened.iter_mut().zip(name) {
        *to = if from == b'_' { b'-' } else { from };
    }
    FieldId::from_name(hyphened) != FieldId::Other
}

/// What a trusted proxy says last in a list field: its own word, where it appends to what it was sent. The cache's key
/// and the origin have to be given the same.
pub fn last_claim<'a>(fields: &Fields<'a>, id: FieldId) -> Option<&'a [u8]> {
    let line = fields.get_all(id).last()?;
    let last = line.rsplit(|&byte| byte == b',').next()?.trim_ascii();
    (!last.is_empty()).then_some(last)
}

/// Whether a trusted proxy says that the client came by HTTPS, or by WebSocket over TLS.
pub fn claims_https(fields: &Fields<'_>) -> bool {
    last_claim(fields, FieldId::XForwardedProto)
        .is_some_and(|scheme| scheme.eq_ignore_ascii_case(b"https") || scheme.eq_ignore_ascii_case(b"wss"))
}

/// Calls `f` for whatever else a trusted proxy tells the origin about the URL: the fields' names and values, and of
/// `Forwarded` (RFC 7239) what is about neither the client nor the proxy.
pub fn other_claims<'a>(fields: &Fields<'a>, mut f: impl FnMut(&'a [u8], &'a [u8])) {
    for (id, name, value) in fields.iter() {
        match id {
            // Split even within quotes: what some parser may read as another parameter counts as one.
            FieldId::Forwarded => value
                .split(|byte| matches!(byte, b',' | b';'))
                .map(<[u8]>::trim_ascii)
                .filter(|pair| !pair.is_empty() && !begins_like(pair, b"for=") && !begins_like(pair, b"by="))
                .for_each(|pair| f(name, pair)),
            FieldId::Other
                if (begins_like(name, b"x-forwarded-") || is_any_of(name, &URL_CLAIMS))
                    && !is_any_of(name, &CLIENT_CLAIMS) =>
            {
                f(name, value);
            }
            _ => {}
        }
    }
}

/// Whether a request says anything of who it comes from, or of the URL that was asked for.
pub fn has_claims(fields: &Fields<'_>) -> bool {
    const KNOWN: [FieldId; 4] =
        [FieldId::Forwarded, FieldId::XForwardedFor, FieldId::XForwardedHost, FieldId::XForwardedProto];
    let mut any = KNOWN.iter().any(|id| fields.has(*id));
    other_claims(fields, |_, _| any = true);
    any
}

/// A member of `X-Forwarded-For`: an address, with brackets and a port as some proxies write it.
pub fn parse_address(member: &[u8]) -> Option<IpAddr> {
    let text = std::str::from_utf8(member).ok()?.trim_ascii();
    let bracketed = || text.strip_prefix('[')?.strip_suffix(']')?.parse::<Ipv6Addr>().ok().map(IpAddr::V6);
    let address = text
        .parse::<IpAddr>()
        .ok()
        .or_else(|| text.parse::<SocketAddr>().ok().map(|address| address.ip()))
        .or_else(bracketed)?;
    Some(address.to_canonical())
}

/// The addresses that a line of `Forwarded` names as those of clients, the last first; `None` for an element that hides
/// its client or says nothing of it (RFC 7239 §6). Split even within quotes, as [`other_claims`] does: the last element
/// is the last proxy's whatever stands before it.
pub fn forwarded_for(line: &[u8]) -> impl Iterator<Item = Option<IpAddr>> + use<'_> {
    let elements = line.rsplit(|&byte| byte == b',').map(<[u8]>::trim_ascii);
    elements.filter(|element| !element.is_empty()).map(|element| {
        let mut pairs = element.split(|&byte| byte == b';').map(<[u8]>::trim_ascii);
        let node = pairs.find_map(|pair| {
            let (name, node) = pair.split_at_checked(4)?;
            name.eq_ignore_ascii_case(b"for=").then_some(node)
        })?;
        let quoted = |node| <[u8]>::strip_suffix(<[u8]>::strip_prefix(node, b"\"")?, b"\"");
        parse_address(quoted(node).unwrap_or(node))
    })
}

/// How many of the gateways that a request has passed are named `pseudonym` (RFC 9110 §7.6.3).
pub fn times_seen(fields: &Fields<'_>, pseudonym: &str) -> usize {
    let members = fields.get_all(FieldId::Via).flat_map(|value| value.split(|&byte| byte == b','));
    let names = members.filter_map(|member| member.trim_ascii().split(|&byte| byte == b' ').nth(1));
    names.filter(|name| name.eq_ignore_ascii_case(pseudonym.as_bytes())).count()
}

/// The hops that `Max-Forwards` leaves (RFC 9110 §7.6.2); a malformed field is none.
pub fn hops_left(fields: &Fields<'_>) -> Option<u64> {
    crate::parser::content_length(fields.get(FieldId::MaxForwards)?).ok()
}

/// RFC 9110 §7.6.2; a request with 0 must not reach this point.
fn write_max_forwards(value: &[u8], out: &mut Vec<u8>) {
    if let Ok(hops) = crate::parser::content_length(value) {
        // Writing to a Vec cannot fail.
        let _ = write!(out, "Max-Forwards: {}\r\n", hops.saturating_sub(1));
    }
}

/// `Connection` for the next hop, and the hop-by-hop fields that it announces.
fn write_connection(head: &RequestHead<'_>, context: &ForwardContext<'_>, out: &mut Vec<u8>) {
    let upgrade = context.keep_upgrade && head.upgrade;
    // RFC 9110 §10.1.4.
    let trailers = head.fields.lists(FieldId::Te, b"trailers");
    match (upgrade, trailers) {
        (false, false) => return,
        (true, false) => out.extend_from_slice(b"Connection: upgrade\r\n"),
        (false, true) => out.extend_from_slice(b"Connection: TE\r\n"),
        (true, true) => out.extend_from_slice(b"Connection: upgrade, TE\r\n"),
    }
    if trailers {
        out.extend_from_slice(b"TE: trailers\r\n");
    }
    if upgrade {
        let protocols: Vec<&[u8]> = upgrade_protocols(&head.fields).collect();
        write_field(b"Upgrade", &protocols.join(&b", "[..]), out);
    }
}

fn write_framing(method: Method, framing: BodyFraming, out: &mut Vec<u8>) {
    match framing {
        // RFC 9110 §8.6: said even when it is 0, where the method lets a server expect content.
        BodyFraming::None if matches!(method, Method::Post | Method::Put | Method::Patch) => {
            out.extend_from_slice(b"Content-Length: 0\r\n");
        }
        BodyFraming::None => {}
        BodyFraming::Length(length) => {
            out.extend_from_slice(b"Content-Length: ");
            write_decimal(length, out);
            out.extend_from_slice(b"\r\n");
        }
        // A request cannot end with its connection; a body of unknown length is sent in chunks.
        BodyFraming::Chunked | BodyFraming::UntilClose => {
            out.extend_from_slice(b"Transfer-Encoding: chunked\r\n")
        }
    }
}

/// `Via`, `X-Forwarded-*` and `Forwarded` (RFC 9110 §7.6.3, RFC 7239).
fn write_provenance(
    head: &RequestHead<'_>,
    normalized: &Normalized<'_>,
    context: &ForwardContext<'_>,
    out: &mut Vec<u8>,
) {
    let received = match head.version {
        Version::Http10 => "1.0",
        Version::Http11 => "1.1",
        Version::Http2 => "2",
        Version::Http3 => "3",
    };
    let client = context.client.to_canonical();
    for part in ["Via: ", received, " ", context.via_pseudonym, "\r\n"] {
        out.extend_from_slice(part.as_bytes());
    }
    write_kept(head, FieldId::XForwardedFor, b"X-Forwarded-For: ", context, out);
    let address = out.len();
    write_address(client, out);
    let address = address..out.len();
    out.extend_from_slice(b"\r\n");
    let scheme = claimed_scheme(head, context).unwrap_or(context.scheme);
    write_field(b"X-Forwarded-Proto", scheme.as_bytes(), out);
    let host = last_claim(&head.fields, FieldId::XForwardedHost).filter(|_| context.trusted_client);
    let host = host.unwrap_or(normalized.authority);
    if !host.is_empty() {
        write_field(b"X-Forwarded-Host", host, out);
    }
    write_kept(head, FieldId::Forwarded, b"Forwarded: ", context, out);
    if context.trusted_client && !head.fields.has(FieldId::Forwarded) {
        write_forwarded_of(head, context, out);
    }
    let (before, after) = around_node(client);
    out.extend_from_slice(before);
    out.extend_from_within(address);
    out.extend_from_slice(after);
    if !normalized.authority.is_empty() {
        // RFC 7239 §4: a value that is no token, as one with a port, is quoted. No authority holds a quote.
        let quote: &[u8] = if normalized.authority.iter().all(|&byte| is_token(byte)) { b"" } else { b"\"" };
        out.extend_from_slice(b";host=");
        out.extend_from_slice(quote);
        out.extend_from_slice(normalized.authority);
        out.extend_from_slice(quote);
    }
    for part in [";proto=", context.scheme, "\r\n"] {
        out.extend_from_slice(part.as_bytes());
    }
}

/// How the client reached the trusted proxy, in the form in which the cache's key has it.
fn claimed_scheme(head: &RequestHead<'_>, context: &ForwardContext<'_>) -> Option<&'static str> {
    let scheme = if claims_https(&head.fields) { "https" } else { "http" };
    (context.trusted_client && head.fields.has(FieldId::XForwardedProto)).then_some(scheme)
}

/// What a proxy that knows only `X-Forwarded-*` would have said in `Forwarded`, so that the two do not contradict.
fn write_forwarded_of(head: &RequestHead<'_>, context: &ForwardContext<'_>, out: &mut Vec<u8>) {
    let addresses =
        head.fields.get_all(FieldId::XForwardedFor).flat_map(|value| value.split(|&byte| byte == b','));
    let mut proto = claimed_scheme(head, context);
    for address in addresses.filter_map(parse_address) {
        write_node(address, out);
        // It is what the first proxy saw.
        if let Some(proto) = proto.take() {
            let _ = write!(out, ";proto={proto}");
        }
        out.extend_from_slice(b", ");
    }
}

/// RFC 7239 §6: an IPv6 address is in brackets and quotes.
fn around_node(address: IpAddr) -> (&'static [u8], &'static [u8]) {
    if address.is_ipv6() { (b"for=\"[", b"]\"") } else { (b"for=", b"") }
}

fn write_node(address: IpAddr, out: &mut Vec<u8>) {
    let (before, after) = around_node(address);
    out.extend_from_slice(before);
    write_address(address, out);
    out.extend_from_slice(after);
}

/// Starts a list field with what a trusted client sent in it.
fn write_kept(
    head: &RequestHead<'_>,
    id: FieldId,
    start: &[u8],
    context: &ForwardContext<'_>,
    out: &mut Vec<u8>,
) {
    out.extend_from_slice(start);
    if context.trusted_client {
        for value in head.fields.get_all(id).filter(|value| !value.is_empty()) {
            out.extend_from_slice(value);
            out.extend_from_slice(b", ");
        }
    }
}

/// Appends the field lines of an upstream's response that may go on to the client; neither status line nor empty line.
/// Hop-by-hop fields are dropped, and every field for which `skip` (given id and name) is true.
pub fn write_response_fields(
    head: &ResponseHead<'_>,
    skip: impl Fn(FieldId, &[u8]) -> bool,
    out: &mut Vec<u8>,
) {
    let options = ConnectionOptions::of(head.fields);
    for (id, name, value) in head.fields.iter() {
        if !options.removes(id, name) && !skip(id, name) {
            write_field(name, value, out);
        }
    }
}
