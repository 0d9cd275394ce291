//! The settings in force, in the form in which requests use them.

use std::borrow::Cow;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use rustls::ServerConfig;
use tidegate_core::{IpPrefix, Verdict};
use tidegate_http::normalize::{Normalized, Personality};
use tidegate_http::{FieldId, Fields, Method, RequestHead};
use tidegate_store::Store;

use crate::cache::entries::PurgePattern;
use crate::data_core::admission::{Admission, Asked};
use crate::http3::Quic;
use crate::icap::{self, Reviewed, ServiceTag, ServiceTags};
use crate::service::answer::{self, Answer};
use crate::service::block_list::BlockListCache;
use crate::service::client_info::ClientInfo;
use crate::service::routes::{Destination, Routes};
use crate::settings::{
    Compression, IcapService, IcapSubject, Limits, Listener, Protocol, Route, Settings, Target,
};
use crate::static_files::serve::{Root, RootPlace};
use crate::tls::{self, CertificateError, CertificateStatus, Issued};
use crate::upstream::{GroupError, Groups};

/// All cookies of a request. Clients send one field of them (RFC 6265 §5.4); servers join several, and so must rules.
pub(crate) fn cookies<'a>(fields: &Fields<'a>) -> Option<Cow<'a, [u8]>> {
    let mut all = fields.get_all(FieldId::Cookie);
    let first = all.next()?;
    Some(match all.next() {
        None => Cow::Borrowed(first),
        Some(second) => {
            let values: Vec<&[u8]> = [first, second].into_iter().chain(all).collect();
            Cow::Owned(values.join(&b"; "[..]))
        }
    })
}

/// Where certificate authorities look (RFC 8555 §8.3).
const ACME_CHALLENGES: &[u8] = b"/.well-known/acme-challenge/";
/// The port that URLs with https need not name (RFC 9110 §4.2.2).
const HTTPS_PORT: u16 = 443;
/// How long clients may go by HTTP/3 without asking here again, in seconds (RFC 7838 §3.1).
const HTTP3_FRESH_S: u32 = 86_400;

/// Why settings do not fit together.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A route names an upstream that is not there.
    #[error("route {host}{path}: there is no upstream named {name:?}")]
    UnknownUpstream {
        /// The route's host.
        host: String,
        /// The route's path.
        path: String,
        /// The name it gives.
        name: String,
    },
    /// A root directory cannot be read.
    #[error("cannot read root {}: {source}", path.display())]
    Root {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A certificate cannot be used.
    #[error(transparent)]
    Certificate(#[from] CertificateError),
    /// How the servers of an upstream are known cannot be used.
    #[error(transparent)]
    Upstream(#[from] GroupError),
}

/// The settings in force.
pub(crate) struct Plan {
    pub limits: Limits,
    pub client_directives: bool,
    /// `None`: nothing is compressed.
    pub compression: Option<Arc<Compression>>,
    pub trusted_proxies: Vec<IpPrefix>,
    pub personality: Personality,
    pub pseudonym: String,
    pub connections: Option<Arc<dyn Admission>>,
    pub requests: Option<Arc<dyn Admission>>,
    /// ICAP services, and the state of each.
    pub icap: Vec<(IcapService, Arc<ServiceTag>)>,
    /// What tells HTTP clients of the site's other listeners.
    pub alternatives: Alternatives,
    /// What connections to listeners with TLS begin with, if there are any.
    pub tls: Option<Arc<ServerConfig>>,
    /// What connections by HTTP/3 are accepted with, if there is a listener for them.
    pub quic: Option<Quic>,
    /// Of the settings' certificates.
    certificates: Vec<CertificateStatus>,
    issued: Arc<Issued>,
    /// The port to which requests in the clear are sent, if they are.
    secure_port: Option<u16>,
    groups: Arc<Groups>,
    pub roots: Vec<Arc<Root>>,
    /// Whether the servers behind take paths in any case for the same.
    pub folds_case: bool,
    pub routes: Routes,
}

impl Plan {
    /// Opens roots and joins routes to what answers them.
    /// `before` is that of the settings that these take the place of.
    pub(crate) fn new(
        settings: &Settings,
        store: Option<Arc<Store>>,
        tags: &ServiceTags,
        before: Option<&Self>,
    ) -> Result<Self, PlanError> {
        let mut places: Vec<RootPlace> = Vec::new();
        let mut routes = Routes::default();
        for route in &settings.routes {
            match &route.target {
                Target::Upstream(name) => {
                    let index = settings.upstreams.iter().position(|upstream| upstream.name == *name);
                    routes.push_upstream(route, index.ok_or_else(|| unknown_upstream(route, name))?);
                }
                Target::Root(path) => {
                    let index = places.iter().position(|known| known.path == *path).unwrap_or_else(|| {
                        places.push(RootPlace { path: path.clone(), routes: Vec::new() });
                        places.len() - 1
                    });
                    let below = route.prefix().trim_start_matches('/').as_bytes().to_vec();
                    places[index].routes.push((below, routes.push_root(route, index)));
                }
                Target::Redirect { to, status } => routes.push_redirect(route, to, *status),
            }
        }
        routes.sort();
        let has_tls = settings.listeners.iter().any(|listener| listener.protocol == Protocol::Https);
        let (tls, certificates) = has_tls
            .then(|| tls::server_config(&settings.certificates, Arc::clone(&settings.issued)))
            .transpose()?
            .unzip();
        let has_http3 = settings.listeners.iter().any(|listener| listener.http3);
        let quic = tls
            .as_deref()
            .filter(|_| has_http3)
            .map(Quic::new)
            .transpose()
            .map_err(|error| CertificateError::Make(error.to_string()))?;
        let compression =
            (!settings.compression.codings.is_empty()).then(|| Arc::new(settings.compression.clone()));
        Ok(Self {
            limits: settings.limits,
            client_directives: settings.client_directives,
            trusted_proxies: settings.trusted_proxies.clone(),
            personality: settings.personality,
            pseudonym: settings.pseudonym.clone(),
            connections: settings.connections.clone(),
            requests: settings.requests.clone(),
            icap: settings.icap.iter().map(|service| (service.clone(), tags.of(&service.url))).collect(),
            alternatives: Alternatives::of_listeners(&settings.listeners),
            tls,
            quic,
            certificates: certificates.unwrap_or_default(),
            issued: Arc::clone(&settings.issued),
            secure_port: settings.https_only.then(|| secure_port(&settings.listeners)),
            groups: Arc::new(Groups::new(&settings.upstreams, before.map(|before| &*before.groups))?),
            folds_case: settings.personality.folds_case(),
            roots: Root::open_all(&places, store, compression.as_ref())?,
            compression,
            routes,
        })
    }

    /// Whether an ICAP service looks at such requests, before the cache is looked into.
    #[inline]
    pub(crate) fn reviews_request(&self, method: &[u8], normalized: &Normalized<'_>) -> bool {
        let on = IcapSubject::Requests;
        self.icap.iter().any(|(service, _)| icap::concerns(service, on, method, normalized, self.folds_case))
    }

    /// What is answered without asking anyone further: the URL with https, or what shows a certificate authority that the
    /// host is ours.
    #[inline]
    pub(crate) fn own_answer(
        &self,
        method: Method,
        info: &ClientInfo<'_>,
        normalized: &Normalized<'_>,
    ) -> Option<Answer> {
        if self.is_in_clear(info, normalized) {
            return Some(answer::redirect(method, self.secure_url(info, normalized)));
        }
        self.key_authorization(method, normalized).map(Answer::KeyAuthorization)
    }

    /// Whether there is such an answer.
    #[inline]
    pub(crate) fn has_own_answer(
        &self,
        method: Method,
        info: &ClientInfo<'_>,
        normalized: &Normalized<'_>,
    ) -> bool {
        self.is_in_clear(info, normalized) || self.key_authorization(method, normalized).is_some()
    }

    /// RFC 8555 §8.3. What another program has been asked for goes to the upstream.
    #[inline]
    fn key_authorization(&self, method: Method, normalized: &Normalized<'_>) -> Option<String> {
        let token = normalized.path.strip_prefix(ACME_CHALLENGES)?;
        let is_read = matches!(method, Method::Get | Method::Head) && normalized.reading.is_none();
        is_read.then(|| self.issued.key_authorization(token))?
    }

    /// Of the certificates of the settings, and of those that were issued.
    pub(crate) fn certificates(&self) -> Vec<CertificateStatus> {
        self.certificates.iter().cloned().chain(self.issued.status()).collect()
    }

    /// Whether a request has to come again with https. What proves to a certificate authority that the host is its owner's is
    /// asked for in the clear (RFC 8555 §8.3).
    #[inline]
    fn is_in_clear(&self, info: &ClientInfo<'_>, normalized: &Normalized<'_>) -> bool {
        let is_challenge = |path: &[u8]| path.starts_with(ACME_CHALLENGES);
        let is_exempt = is_challenge(normalized.path) && normalized.reading.is_none_or(is_challenge);
        self.secure_port.is_some() && !info.https && !is_exempt
    }

    /// The URL by which to come again; `None` where the client does not say which host it wants.
    fn secure_url(&self, info: &ClientInfo<'_>, normalized: &Normalized<'_>) -> Option<Vec<u8>> {
        let authority = info.host.unwrap_or(normalized.authority);
        let colon = authority.iter().rposition(|byte| *byte == b':');
        let host = match colon {
            // One in brackets belongs to an IPv6 address.
            Some(colon) if !authority[colon..].contains(&b']') => &authority[..colon],
            _ => authority,
        };
        let port = self.secure_port?;
        if host.is_empty() {
            return None;
        }
        let mut url = [b"https://", host].concat();
        if port != HTTPS_PORT {
            url.extend_from_slice(format!(":{port}").as_bytes());
        }
        // RFC 9110 §7.1: `OPTIONS *` is about the server as a whole.
        url.extend_from_slice(if normalized.path == b"*" { b"/" } else { normalized.path });
        if let Some(query) = normalized.query {
            url.push(b'?');
            url.extend_from_slice(query);
        }
        Some(url)
    }

    /// Whether the ICAP service that let a response pass is in another state by now.
    #[inline]
    pub(crate) fn is_outdated(&self, reviewed: Reviewed) -> bool {
        reviewed != Reviewed::BY_NOBODY && self.icap.iter().any(|(_, tag)| tag.outdates(reviewed))
    }

    /// What answers a request.
    #[inline]
    pub(crate) fn route(&self, normalized: &Normalized<'_>) -> Option<Destination> {
        self.routes.find(normalized, self.folds_case)
    }

    /// A pattern of URLs, and with it those of the static files that they lead to.
    pub(crate) fn with_files(&self, pattern: PurgePattern) -> Vec<PurgePattern> {
        let files = match pattern.of_url() {
            Some((b"", path, is_prefix)) => {
                self.roots.iter().map(|root| root.purge_pattern(path, is_prefix)).collect()
            }
            Some((host, path, is_prefix)) => match self.routes.find_path(host, path, self.folds_case) {
                Some(Destination::Root(root)) => self
                    .roots
                    .get(root.index)
                    .map(|root| root.purge_pattern(path, is_prefix))
                    .into_iter()
                    .collect(),
                _ => Vec::new(),
            },
            None => Vec::new(),
        };
        std::iter::once(pattern).chain(files).collect()
    }

    /// Whether a client that a trusted proxy names, for one request or for all of a connection, is on the block list, which
    /// below HTTP meets only the proxy.
    #[inline]
    pub(crate) fn keeps_out(
        &self,
        info: &ClientInfo<'_>,
        is_named: bool,
        block_list: &BlockListCache,
        now_ms: impl FnOnce() -> u64,
    ) -> bool {
        let Some(admission) = self.connections.as_ref().filter(|_| info.via_proxy || is_named) else {
            return false;
        };
        block_list.is_listed(info.client, now_ms(), || admission.ignores(info.client))
    }

    /// What the rules say of a request, whichever transport brought it. `local` is only asked for where there are
    /// rules; who cannot be told from where a request came to is not served.
    #[inline]
    pub(crate) fn police(
        &self,
        peer: SocketAddr,
        local: impl FnOnce() -> io::Result<SocketAddr>,
        head: &RequestHead<'_>,
        normalized: &Normalized<'_>,
    ) -> Verdict {
        let Some(rules) = &self.requests else { return Verdict::Continue };
        let Ok(local) = local() else { return Verdict::Drop };
        let cookie = cookies(&head.fields);
        let fold = |path| match self.folds_case {
            true => Cow::Owned(<[u8]>::to_ascii_lowercase(path)),
            false => Cow::Borrowed(path),
        };
        let (path, reading) = (fold(normalized.path), normalized.reading.map(fold));
        let (reading, cookie) = (reading.as_deref(), cookie.as_deref());
        rules.on_request(&Asked { peer, local, path: &path, reading, cookie })
    }

    /// The priority class of a request, of which 0 goes first; without rules all requests are equal. However it is
    /// read: of two classes the one that is served later, so that no spelling of a path is a way to the front.
    pub(crate) fn class_of(&self, head: &RequestHead<'_>, normalized: &Normalized<'_>) -> u8 {
        let Some(rules) = &self.requests else { return 0 };
        let cookies = cookies(&head.fields);
        let class_of = |path: &[u8]| match self.folds_case {
            true => rules.class_of_request(&path.to_ascii_lowercase(), cookies.as_deref()),
            false => rules.class_of_request(path, cookies.as_deref()),
        };
        let class = class_of(normalized.path);
        normalized.reading.map_or(class, |reading| class.max(class_of(reading)))
    }

    /// The upstream groups, in the order of the settings.
    pub(crate) fn groups(&self) -> &Arc<Groups> {
        &self.groups
    }

    /// Whether `client` is a proxy whose forwarding fields are believed.
    pub(crate) fn is_trusted(&self, client: std::net::IpAddr) -> bool {
        self.trusted_proxies.iter().any(|prefix| prefix.contains(client))
    }
}

/// The port of the first listener with TLS. Where there is none, a proxy in front has it.
fn secure_port(listeners: &[Listener]) -> u16 {
    let secure = listeners.iter().find(|listener| listener.protocol == Protocol::Https);
    secure.map_or(HTTPS_PORT, |listener| listener.address.port())
}

/// By which other protocols this site can be had, on this host (RFC 7838 §3); each is empty if there are none.
#[derive(Debug, Default)]
pub(crate) struct Alternatives {
    /// The field line for clients without TLS.
    in_clear: Vec<u8>,
    /// The field line for those with it, who alone may go over to HTTP/3 (RFC 9114 §3.1.1).
    encrypted: Vec<u8>,
    /// The field's value for those that speak HTTP/2.
    pub http3: String,
}

impl Alternatives {
    fn of_listeners(listeners: &[Listener]) -> Self {
        let ports = |chosen: &dyn Fn(&Listener) -> bool| {
            let chosen = listeners.iter().filter(|listener| chosen(listener));
            let mut ports: Vec<u16> = chosen.map(|listener| listener.address.port()).collect();
            ports.sort_unstable();
            ports.dedup();
            ports
        };
        let http3 = ports(&|listener| listener.http3);
        let dhttp = ports(&|listener| listener.protocol == Protocol::Dhttp);
        let certificate =
            Some(&dhttp).filter(|ports| !ports.is_empty()).and_then(|_| crate::dhttp::security());
        let tls = certificate.map(|it| format!("; tls=\"{}\"", it.fingerprint())).unwrap_or_default();
        let http3: Vec<_> = http3.iter().map(|port| format!("h3=\":{port}\"; ma={HTTP3_FRESH_S}")).collect();
        let dhttp: Vec<_> = dhttp.iter().map(|port| format!("dhttp=\":{port}\"{tls}")).collect();
        let line = |offers: &[String]| match offers {
            [] => Vec::new(),
            offers => format!("Alt-Svc: {}\r\n", offers.join(", ")).into_bytes(),
        };
        let encrypted = line(&[http3.as_slice(), &dhttp].concat());
        Self { in_clear: line(&dhttp), encrypted, http3: http3.join(", ") }
    }

    /// The field line for responses by HTTP/1.
    pub(crate) fn of(&self, is_encrypted: bool) -> &[u8] {
        if is_encrypted { &self.encrypted } else { &self.in_clear }
    }
}

fn unknown_upstream(route: &Route, name: &str) -> PlanError {
    PlanError::UnknownUpstream { host: route.host.clone(), path: route.path.clone(), name: name.to_owned() }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use crate::settings::Upstream;

    fn plan(routes: &[(&str, &str, &str)]) -> Plan {
        let server = SocketAddr::from(([127, 0, 0, 1], 9));
        let settings = Settings {
            workers: 1,
            listeners: Vec::new(),
            https_only: false,
            compression: crate::settings::Compression::default(),
            certificates: Vec::new(),
            issued: Arc::default(),
            upstreams: ["a", "b", "c"].map(|name| Upstream::new(name, vec![server])).to_vec(),
            routes: routes
                .iter()
                .map(|(host, path, upstream)| Route::new(*host, *path, Target::Upstream((*upstream).into())))
                .collect(),
            cache: crate::settings::Cache::default(),
            client_directives: true,
            limits: Limits::default(),
            trusted_proxies: vec!["10.0.0.0/8".parse().unwrap()],
            personality: Personality::Strict,
            pseudonym: "test".into(),
            access_log: None,
            connections: None,
            icap: Vec::new(),
            requests: None,
            defence: None,
        };
        Plan::new(&settings, None, &ServiceTags::default(), None).unwrap()
    }

    /// The group to which a request for this goes.
    fn upstream_of(plan: &Plan, host: &str, path: &str) -> Option<usize> {
        let (authority, path) = (host.as_bytes(), path.as_bytes());
        group(plan.route(&Normalized { authority, path, query: None, reading: None }))
    }

    fn group(destination: Option<Destination>) -> Option<usize> {
        match destination? {
            Destination::Upstream(upstream) => Some(upstream.index),
            _ => None,
        }
    }

    #[test]
    fn the_most_specific_route_wins_whatever_the_order() {
        let plan = plan(&[("*", "/", "a"), ("*.example.org", "/", "b"), ("www.example.org", "/api/", "c")]);
        let route = |host: &str, path: &str| upstream_of(&plan, host, path);
        assert_eq!(route("other", "/x"), Some(0));
        assert_eq!(route("www.example.org", "/x"), Some(1));
        assert_eq!(route("www.example.org:8080", "/api/1"), Some(2));
        assert_eq!(route("[::1]:80", "/"), Some(0));
    }

    #[test]
    fn for_servers_that_fold_case_routes_do_so_too() {
        let mut plan = plan(&[("*", "/", "a"), ("*", "/private/", "b")]);
        assert_eq!(upstream_of(&plan, "x", "/Private/y"), Some(0));
        plan.folds_case = true;
        assert_eq!(upstream_of(&plan, "x", "/Private/y"), Some(1));
    }

    #[test]
    fn a_path_that_is_routed_elsewhere_when_an_application_reads_it_has_no_destination() {
        let plan = plan(&[("*", "/", "a"), ("*", "/private/", "b")]);
        let route = |path: &str, reading: Option<&str>| {
            let reading = reading.map(str::as_bytes);
            group(plan.route(&Normalized { authority: b"x", path: path.as_bytes(), query: None, reading }))
        };
        assert_eq!(route("/private%2Fx", Some("/private/x")), None);
        assert_eq!(route("/;a/private/x", Some("/private/x")), None);
        assert_eq!(route("/other%2Fx", Some("/other/x")), Some(0));
        assert_eq!(route("/private/x;a", Some("/private/x")), Some(1));
    }

    /// Rules by which what is below `/first/` goes first.
    #[derive(Debug)]
    struct FirstFirst;

    impl Admission for FirstFirst {
        fn acts_on_connections(&self) -> bool {
            false
        }

        fn on_connect(&self, _: SocketAddr, _: SocketAddr) -> (Verdict, u8) {
            (Verdict::Continue, 0)
        }

        fn ignores_any(&self) -> bool {
            false
        }

        fn ignores(&self, _: std::net::IpAddr) -> bool {
            false
        }

        fn on_request(&self, _: &Asked<'_>) -> Verdict {
            Verdict::Continue
        }

        fn class_of_request(&self, path: &[u8], _: Option<&[u8]>) -> u8 {
            if path.starts_with(b"/first/") { 0 } else { 2 }
        }
    }

    #[test]
    fn a_request_has_the_later_class_of_those_it_has_however_it_is_read() {
        let mut plan = plan(&[("*", "/", "a")]);
        let bytes = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n";
        let mut parser = tidegate_http::RequestParser::new(tidegate_http::HeadLimits::default());
        parser.parse(bytes).unwrap();
        let class = |plan: &Plan, path: &str, reading: Option<&str>| {
            let (path, reading) = (path.as_bytes(), reading.map(str::as_bytes));
            let normalized = Normalized { authority: b"x", path, query: None, reading };
            plan.class_of(&parser.head(bytes), &normalized)
        };
        assert_eq!(class(&plan, "/last/x", None), 0, "without rules");
        plan.requests = Some(Arc::new(FirstFirst));
        assert_eq!(class(&plan, "/first/x", None), 0);
        assert_eq!(class(&plan, "/last/x", None), 2);
        assert_eq!(class(&plan, "/first/..;/last/x", Some("/last/x")), 2);
        assert_eq!(class(&plan, "/last/..;/first/x", Some("/first/x")), 2);
        assert_eq!(class(&plan, "/first/x;y", Some("/first/x")), 0);
        assert_eq!(class(&plan, "/First/x", None), 2);
        plan.folds_case = true;
        assert_eq!(class(&plan, "/First/x", Some("/FIRST/x")), 0);
    }

    #[test]
    fn a_request_outside_every_route_has_no_destination() {
        let plan = plan(&[("example.org", "/", "a")]);
        assert_eq!(upstream_of(&plan, "example.net", "/"), None);
    }

    #[test]
    fn only_configured_proxies_are_trusted() {
        let plan = plan(&[]);
        assert!(plan.is_trusted("10.2.3.4".parse().unwrap()));
        assert!(!plan.is_trusted("192.0.2.1".parse().unwrap()));
    }
}
