//! What an operator can set, as checked values. The binary maps its configuration file and command line to these.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::ServerName;
use tidegate_core::IpPrefix;
use tidegate_core::hooks::ChainSource;
use tidegate_http::normalize::Personality;
use tidegate_http::{FieldRules, HeadLimits};

use crate::data_core::admission::Admission;
use crate::tls::{CertificateError, Issued, Trust};

/// What URLs with `https` mean without a port (RFC 9110 §4.2.2).
pub const HTTPS_PORT: u16 = 443;

/// Everything the engine is started with.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Number of data cores: each has its own thread, runtime and listening sockets (SO_REUSEPORT).
    pub workers: usize,
    /// Where clients connect.
    pub listeners: Vec<Listener>,
    /// Certificates of listeners with TLS. A client is shown the one for the name that it asks for, or else the first;
    /// without any, one that this process has made.
    pub certificates: Vec<Certificate>,
    /// Certificates for names that none of those is for; they come and go without new settings.
    pub issued: Arc<Issued>,
    /// Whether requests that come in the clear are sent to the same URL with https.
    pub https_only: bool,
    /// Named groups of origin servers.
    pub upstreams: Vec<Upstream>,
    /// Which host and path goes where; the most specific route wins.
    pub routes: Vec<Route>,
    /// The shared cache.
    pub cache: Cache,
    /// What is compressed for clients that accept it.
    pub compression: Compression,
    /// Whether a request's `Cache-Control` and `Pragma` can lead past a stored response (RFC 9111 §5.2.1).
    pub client_directives: bool,
    /// Sizes, times and counts that protect this server from its peers.
    pub limits: Limits,
    /// Proxies in front of this one whose `X-Forwarded-For` and `Forwarded` are believed.
    pub trusted_proxies: Vec<IpPrefix>,
    /// How request targets are normalized.
    pub personality: Personality,
    /// The name this proxy gives itself in `Via` and `Cache-Status`.
    pub pseudonym: String,
    /// Where requests are logged, if anywhere.
    pub access_log: Option<AccessLog>,
    /// ICAP services that look at messages; of those responsible for a message, the first.
    pub icap: Vec<IcapService>,
    /// Who decides on connections; `None` admits all.
    pub connections: Option<Arc<dyn Admission>>,
    /// Who decides on requests; `None` costs nothing.
    pub requests: Option<Arc<dyn Admission>>,
    /// Who watches clients and acts on those that abuse the site; `None` costs nothing. A change needs a restart.
    pub defence: Option<Arc<dyn ChainSource>>,
}

/// One listening address.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Listener {
    /// Address and port.
    pub address: SocketAddr,
    /// What is spoken there.
    pub protocol: Protocol,
    /// Whether connections, which are those of trusted proxies then, begin with a PROXY header that names their client.
    pub proxy_protocol: bool,
    /// Whether clients may speak HTTP/2 in the clear, without asking first (RFC 9113 §3.3).
    pub http2: bool,
    /// Whether HTTP/3 is spoken at the UDP port of the same number; with [`Protocol::Https`] alone.
    pub http3: bool,
}

/// What is spoken at a listening address.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Protocol {
    /// Cleartext HTTP/1.
    #[default]
    Http,
    /// HTTP/1 and HTTP/2 over TLS, and HTTP/3 if it is wished.
    Https,
    /// DHTTP: requests and short responses by UDP, long responses by connections that the server opens.
    Dhttp,
}

impl Protocol {
    /// Whether clients come by TCP connections with HTTP on them.
    pub fn is_http(self) -> bool {
        matches!(self, Self::Http | Self::Https)
    }

    /// The scheme of URLs there.
    #[must_use]
    pub fn scheme(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Https => "https",
            Self::Dhttp => "dhttp",
        }
    }
}

/// A certificate with its private key, in PEM files.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Certificate {
    /// The certificate, and those that it is signed with up to one that clients know.
    pub chain: PathBuf,
    /// The certificate's private key.
    pub key: PathBuf,
}

/// Where an origin server takes connections.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub enum ServerAddress {
    /// By TCP.
    Ip(SocketAddr),
    /// By TLS over TCP.
    Tls(TlsServer),
    /// By a socket of the file system.
    Unix(PathBuf),
}

/// A server that is spoken to by TLS (RFC 8446).
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct TlsServer {
    /// Where it is.
    pub address: SocketAddr,
    /// The name, or the address, that its certificate has to be for; a name is what it is asked for, too (RFC 6066 §3).
    pub name: ServerName<'static>,
}

impl ServerAddress {
    /// What `Host` says where nobody asks for anything else.
    pub(crate) fn host(&self) -> String {
        match self {
            Self::Ip(address) => address.to_string(),
            Self::Tls(server) => server.host(),
            Self::Unix(_) => "localhost".to_owned(),
        }
    }
}

impl TlsServer {
    /// A server at this address whose certificate is for `name`, a host or an address; `None`: it is neither.
    pub fn new(address: SocketAddr, name: &str) -> Option<Self> {
        let name = ServerName::try_from(name.to_ascii_lowercase()).ok()?;
        Some(Self { address, name })
    }

    fn host(&self) -> String {
        let name = match &self.name {
            ServerName::DnsName(name) => name.as_ref(),
            _ => return self.address.to_string(),
        };
        match self.address.port() {
            HTTPS_PORT => name.to_owned(),
            port => format!("{name}:{port}"),
        }
    }
}

impl From<SocketAddr> for ServerAddress {
    fn from(address: SocketAddr) -> Self {
        Self::Ip(address)
    }
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(address) => address.fmt(f),
            Self::Tls(server) => write!(f, "https://{}", server.address),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// A group of origin servers that serve the same content.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Upstream {
    /// The name routes use.
    pub name: String,
    /// Addresses of the servers, resolved.
    pub servers: Vec<ServerAddress>,
    /// How a server is chosen for a request.
    pub balance: Balance,
    /// How long a connection attempt may take.
    pub connect_timeout: Duration,
    /// How long a server may be silent before or within a response.
    pub response_timeout: Duration,
    /// Idle connections kept for reuse, per data core and server.
    pub idle_connections: usize,
    /// How long an idle connection is kept.
    pub idle_timeout: Duration,
    /// Connections open at once, per data core and server.
    pub max_connections: usize,
    /// Whether requests go by HTTP/2: by TLS if the server chooses it, in the clear in any case. Connections are then
    /// requests under way.
    pub http2: bool,
    /// Requests that may be under way on one connection (pipelining, RFC 9112 §9.3.2); 1 turns it off.
    pub pipeline: usize,
    /// How long requests wait for a response to one before them.
    pub pipeline_timeout: Duration,
    /// Consecutive failures after which a server is taken out (passive health check); 0 turns it off.
    pub max_failures: u32,
    /// How long a failed server stays out before one request probes it.
    pub fail_timeout: Duration,
    /// Active health check, if any.
    pub health_check: Option<HealthCheck>,
    /// How servers that are spoken to by TLS are known, and know us.
    pub tls: UpstreamTls,
}

/// How servers that are spoken to by TLS are known, and know us.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct UpstreamTls {
    /// Whether their certificates are looked at: without, whoever is on the way can be the server.
    pub verify: bool,
    /// A PEM file with certificates that theirs are signed with, or with theirs; `None`: those that the system trusts.
    pub authority: Option<PathBuf>,
    /// What we are known by, where servers want to know that.
    pub certificate: Option<Certificate>,
}

impl Default for UpstreamTls {
    fn default() -> Self {
        Self { verify: true, authority: None, certificate: None }
    }
}

/// A periodic request that decides whether a server gets traffic.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct HealthCheck {
    /// The path to ask for.
    pub path: String,
    /// The host to ask for; the server's address, or `localhost` by a socket of the file system, if none is given.
    pub host: Option<String>,
    /// The status of a healthy server; any below 400 if none is given.
    pub status: Option<u16>,
    /// Time between two checks.
    pub interval: Duration,
    /// How long a check may take.
    pub timeout: Duration,
    /// So many checks in a row fail before the server gets no requests any more, at least 1.
    pub fall: u32,
    /// So many checks in a row succeed before it gets requests again, at least 1.
    pub rise: u32,
}

/// How a server of a group is chosen.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Balance {
    /// Each in turn.
    #[default]
    RoundRobin,
    /// The one with the fewest requests in progress.
    LeastConnections,
    /// By the normalized URL's path and query, so that each server's own cache sees a share of the URLs.
    HashUrl,
    /// By the host name.
    HashHost,
}

/// Which requests go where.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Route {
    /// A host name in lower case, `*.suffix`, or `*` for all.
    pub host: String,
    /// A path prefix that begins with `/`.
    pub path: String,
    /// What answers.
    pub target: Target,
    /// What an upstream is asked for in the place of the path.
    pub rewrite: Option<Substitute>,
    /// What is changed of the fields of requests to an upstream.
    pub request_fields: FieldRules,
    /// What is changed of the fields of responses of an upstream, of files, or of a redirect.
    pub response_fields: FieldRules,
}

impl Route {
    /// A route that changes nothing.
    pub fn new(host: impl Into<String>, path: impl Into<String>, target: Target) -> Self {
        Self {
            host: host.into(),
            path: path.into(),
            target,
            rewrite: None,
            request_fields: FieldRules::default(),
            response_fields: FieldRules::default(),
        }
    }

    /// The path that requests begin with; a `*` at its end says nothing more.
    pub fn prefix(&self) -> &str {
        self.path.trim_end_matches('*')
    }
}

/// What takes the place of the start of a path.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Substitute {
    /// A path, or a URL as far as its path.
    pub text: String,
    /// What follows the route's path, and the query, follow here too.
    pub keeps_rest: bool,
}

impl Substitute {
    /// `text` with `*` at its end for what follows.
    pub fn new(text: &str) -> Self {
        let before = text.strip_suffix('*');
        Self { text: before.unwrap_or(text).to_owned(), keeps_rest: before.is_some() }
    }
}

/// What answers a route's requests.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Target {
    /// The upstream group with this name.
    Upstream(String),
    /// Files below this directory.
    Root(PathBuf),
    /// Another URL.
    Redirect {
        /// The URL, or a path on the same host.
        to: Substitute,
        /// 301, 302, 303, 307 or 308; `None`: for good, with the method that was used (RFC 9110 §15.4.2, §15.4.9).
        status: Option<u16>,
    },
}

/// An ICAP service (RFC 3507), and the messages that it looks at.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct IcapService {
    /// As it is asked for: `icap://HOST:PORT/NAME`.
    pub url: String,
    /// Where it is, resolved.
    pub address: SocketAddr,
    /// What it looks at.
    pub on: IcapSubject,
    /// Methods of the requests that this is about; empty: all.
    pub methods: Vec<String>,
    /// Paths that this is about, in their normal form, with `*` at the start, the end or both; empty: all.
    pub paths: Vec<String>,
    /// Paths that it is not about, whatever `paths` says.
    pub except: Vec<String>,
    /// Exchanges at once, per data core; as many as 1,024 further messages wait for a turn.
    pub connections: usize,
    /// How long a message waits for its turn, the service for a connection, and a decision for the service.
    pub timeout: Duration,
    /// Whether messages go on without a decision when the service fails.
    pub fail_open: bool,
    /// Whether they do when it has no room for them, which clients can bring about.
    pub busy_open: bool,
}

/// What an ICAP service looks at.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum IcapSubject {
    /// Requests, before the cache is looked into.
    Requests,
    /// Upstreams' responses, before they are stored.
    Responses,
}

impl IcapService {
    /// `HOST:PORT`, as in `Host`.
    pub fn host(&self) -> String {
        let rest = self.url.split_once("://").map_or("", |(_, rest)| rest);
        rest.split('/').next().unwrap_or("").to_owned()
    }
}

/// A content coding (RFC 9110 §8.4.1).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Coding {
    /// Brotli (RFC 7932): the shortest, and the slowest to make.
    Br,
    /// Zstandard (RFC 8878): the fastest to make.
    Zstd,
    /// Known to every client (RFC 1952).
    Gzip,
}

impl Coding {
    /// All of them; of precompressed files, the first that a client accepts is the one that it gets.
    pub const ALL: [Self; 3] = [Self::Br, Self::Zstd, Self::Gzip];

    /// As `Content-Encoding` and `Accept-Encoding` have it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Br => "br",
            Self::Zstd => "zstd",
            Self::Gzip => "gzip",
        }
    }

    /// Its place in a mask of codings.
    pub(crate) fn bit(self) -> u8 {
        1 << self as u8
    }

    /// How the names of files end that are compressed with it.
    pub(crate) fn suffix(self) -> &'static str {
        match self {
            Self::Br => ".br",
            Self::Zstd => ".zst",
            Self::Gzip => ".gz",
        }
    }
}

/// What is compressed for clients that accept it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Compression {
    /// In the order of preference; empty: nothing is compressed.
    pub codings: Vec<Coding>,
    /// Media types without parameters; with `*` at the end, all that begin so.
    pub types: Vec<String>,
    /// Content that is known to be shorter stays as it is.
    pub min_bytes: u64,
}

impl Compression {
    /// Media types that become much shorter, and are no stream of events.
    pub const TYPES: [&str; 22] = [
        "text/html",
        "text/css",
        "text/plain",
        "text/javascript",
        "text/xml",
        "text/csv",
        "text/markdown",
        "text/calendar",
        "application/javascript",
        "application/json",
        "application/ld+json",
        "application/manifest+json",
        "application/xml",
        "application/xhtml+xml",
        "application/rss+xml",
        "application/atom+xml",
        "application/wasm",
        "image/svg+xml",
        "image/vnd.microsoft.icon",
        "image/bmp",
        "font/otf",
        "font/ttf",
    ];
}

impl Default for Compression {
    fn default() -> Self {
        Self { codings: Vec::new(), types: Self::TYPES.map(str::to_owned).to_vec(), min_bytes: 1024 }
    }
}

/// The shared cache's budget and place.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Cache {
    /// Bytes of memory for objects; 0 turns the cache off.
    pub memory_bytes: u64,
    /// Directory of the arena file; without one the cache does not survive a restart.
    pub path: Option<PathBuf>,
    /// Objects larger than this are passed on uncached; 0 means an eighth of `memory_bytes`.
    pub max_object_bytes: u64,
}

/// Limits on what a client may cost. All are on by default.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Sizes of a request head.
    pub head: HeadLimits,
    /// From the first byte of a head (or from the connection's start) to its end.
    pub header_timeout: Duration,
    /// How long an idle persistent connection is kept.
    pub keep_alive_timeout: Duration,
    /// Slowest average at which a request body may arrive, in bytes per second; 0 turns it off.
    pub body_min_rate_bytes_per_s: u64,
    /// Slowest average at which a client may take a response, in bytes per second; 0 turns it off.
    pub response_min_rate_bytes_per_s: u64,
    /// Largest request body; more is answered with 413.
    pub body_bytes: u64,
    /// Client connections open at once, over all data cores.
    pub connections: usize,
    /// How long an upgraded connection (WebSocket) may be silent.
    pub tunnel_timeout: Duration,
    /// How long requests in progress may go on after SIGTERM.
    pub drain_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            head: HeadLimits::default(),
            header_timeout: Duration::from_secs(10),
            keep_alive_timeout: Duration::from_secs(75),
            body_min_rate_bytes_per_s: 500,
            response_min_rate_bytes_per_s: 500,
            body_bytes: 1 << 30,
            connections: 16_000,
            tunnel_timeout: Duration::from_secs(300),
            drain_timeout: Duration::from_secs(30),
        }
    }
}

/// Where and how requests are logged.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct AccessLog {
    /// A file to append to; `None` is standard output.
    pub path: Option<PathBuf>,
    /// The form of a line.
    pub format: LogFormat,
}

/// The form of an access log line.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum LogFormat {
    /// The combined log format of Apache and nginx.
    #[default]
    Combined,
    /// One JSON object a line.
    Json,
}

impl Default for Cache {
    fn default() -> Self {
        Self { memory_bytes: 256 << 20, path: None, max_object_bytes: 0 }
    }
}

impl Upstream {
    /// A group with default times and limits.
    pub fn new(name: impl Into<String>, servers: Vec<impl Into<ServerAddress>>) -> Self {
        Self {
            name: name.into(),
            servers: servers.into_iter().map(Into::into).collect(),
            balance: Balance::default(),
            connect_timeout: Duration::from_secs(5),
            response_timeout: Duration::from_secs(60),
            idle_connections: 64,
            idle_timeout: Duration::from_secs(60),
            max_connections: 1024,
            http2: false,
            pipeline: 1,
            pipeline_timeout: Duration::from_millis(20),
            max_failures: 3,
            fail_timeout: Duration::from_secs(10),
            health_check: None,
            tls: UpstreamTls::default(),
        }
    }

    /// Reads how servers with TLS are known, if there are any.
    pub fn trust(&self) -> Result<Option<Trust>, CertificateError> {
        let is_wanted = self.servers.iter().any(|server| matches!(server, ServerAddress::Tls(_)));
        is_wanted.then(|| Trust::new(&self.tls, self.http2)).transpose()
    }
}
