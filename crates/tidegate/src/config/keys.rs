//! The settings as one table: what a configuration file may say, in the words of whoever writes one.
//!
//! The walker checks files against it, and the reference page and the JSON Schema are written from it; a key is added
//! here and read in `settings`.

mod protection;
mod route;

use super::kind::Kind;
use protection::{
    ADAPT, BLOCK, CLASSIFIER, CONNECTION, DEFENCE, EXEMPT, FILTER, GATE, ICAP, REQUEST, STRESS,
};
use route::ROUTE;

/// The file, or a table of it.
pub(super) struct Section {
    /// As written between the brackets; empty for the file itself.
    pub name: &'static str,
    /// A sentence or two for the reference page.
    pub doc: &'static str,
    /// Whether anything acts on it yet. What is not enforced is checked, and warned of.
    pub enforced: bool,
    pub keys: &'static [Key],
}

/// One key of a section.
pub(super) struct Key {
    pub name: &'static str,
    pub kind: Kind,
    pub default: Fallback,
    /// One line for the reference page.
    pub doc: &'static str,
}

/// What holds when a key is absent.
#[derive(Clone, Copy)]
pub(super) enum Fallback {
    /// The key must be there.
    Required,
    /// This value, as a file would say it but without quotes.
    Is(&'static str),
    /// No value; the words say what that means.
    Absent(&'static str),
}

use Fallback::{Absent, Is, Required};

const MS: u64 = 1;
const SECOND: u64 = 1000 * MS;
const HOUR: u64 = 3600 * SECOND;
const DAY: u64 = 24 * HOUR;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

const fn key(name: &'static str, kind: Kind, default: Fallback, doc: &'static str) -> Key {
    Key { name, kind, default, doc }
}

/// A time that a peer is given: long enough to be met at all, short enough to be a limit.
const TIMEOUT: Kind = Kind::Duration { min_ms: 10 * MS, max_ms: DAY };

/// The whole file.
pub(super) static FILE: Section = Section {
    name: "",
    doc: "These keys stand before the first table.",
    enforced: true,
    keys: &[
        key(
            "workers",
            Kind::Integer { min: 1, max: 1024 },
            Absent("one for each core of the machine"),
            "Number of data cores: each is a thread that accepts and serves its own connections. A change needs a \
             restart.",
        ),
        key(
            "personality",
            Kind::Choice(&["strict", "apache", "nginx", "iis"]),
            Is("strict"),
            "How request targets are normalized: as the server behind would read them.",
        ),
        key(
            "trusted_proxies",
            Kind::List { of: &Kind::Prefix, min: 0 },
            Absent("none"),
            "Proxies in front of this one whose X-Forwarded-For, or else Forwarded, is believed, and whose PROXY headers are.",
        ),
        key("pseudonym", Kind::Name, Is("tidegate"), "The name of this proxy in Via and Cache-Status."),
        key(
            "https_only",
            Kind::Flag,
            Is("false"),
            "Whether requests in the clear are sent to the same URL with https, at the port of the first listener with it: 301 \
             for GET and HEAD, 308 for others. What is below /.well-known/acme-challenge/ is still answered. Listeners with \
             dhttp or trickles are not meant.",
        ),
        key("listen", Kind::Tables(&LISTEN), Absent("--listen must say where"), "Where clients connect."),
        key(
            "certificate",
            Kind::Tables(&CERTIFICATE),
            Absent("for https, one that this process makes and no client knows"),
            "Certificates of listeners with https.",
        ),
        key(
            "acme",
            Kind::Table(&ACME),
            Absent("none is ordered"),
            "Certificates that are ordered and renewed.",
        ),
        key("admin", Kind::Table(&ADMIN), Absent("as below"), "The admin server."),
        key("upstream", Kind::Tables(&UPSTREAM), Absent("none"), "Groups of origin servers."),
        key(
            "route",
            Kind::Tables(&ROUTE),
            Absent("--upstream or --root must say what to serve"),
            "Which requests go where.",
        ),
        key("cache", Kind::Table(&CACHE), Absent("as below"), "The shared cache."),
        key("compression", Kind::Table(&COMPRESSION), Absent("as below"), "What is compressed for clients."),
        key("limits", Kind::Table(&LIMITS), Absent("as below"), "What a client may cost."),
        key("log", Kind::Table(&LOG), Absent("as below"), "The access log."),
        key("connection", Kind::Tables(&CONNECTION), Absent("none"), "Rules for connections."),
        key("request", Kind::Tables(&REQUEST), Absent("none"), "Rules for requests."),
        key("block", Kind::Table(&BLOCK), Absent("as below"), "Who is kept out."),
        key("defence", Kind::Table(&DEFENCE), Absent("as below"), "Who watches clients, and with what."),
        key(
            "classifier",
            Kind::Tables(&CLASSIFIER),
            Absent("all classifiers, as below"),
            "Limits of single classifiers.",
        ),
        key("exempt", Kind::Tables(&EXEMPT), Absent("127.0.0.1 and ::1"), "Clients that are never acted on."),
        key("filter", Kind::Tables(&FILTER), Absent("none"), "What is refused by what it looks like."),
        key("icap", Kind::Tables(&ICAP), Absent("none"), "Services that look at messages."),
        key("gate", Kind::Table(&GATE), Absent("as below"), "Where rules are enforced."),
        key(
            "adapt",
            Kind::Table(&ADAPT),
            Absent("nothing adapts"),
            "What the adaptation agent is to achieve.",
        ),
        key("stress", Kind::Table(&STRESS), Absent("as below"), "What counts as overload."),
    ],
};

static LISTEN: Section = Section {
    name: "listen",
    doc: "Where clients connect; one table for each address. A change needs a restart.",
    enforced: true,
    keys: &[
        key(
            "address",
            Kind::Listen,
            Required,
            "ADDRESS:PORT, or :PORT for every address of the host, IPv6 and IPv4.",
        ),
        key(
            "protocol",
            Kind::Choice(&["http", "https", "dhttp", "trickles"]),
            Is("http"),
            "What is spoken there. https is HTTP/1 and HTTP/2 over TLS, with a [[certificate]] or [acme]; dhttp takes a UDP and \
             a TCP port below 32768; trickles takes a UDP port.",
        ),
        key(
            "proxy_protocol",
            Kind::Flag,
            Is("false"),
            "For http and https, whether each connection begins with a header of the PROXY protocol, version 1 or 2, which \
             names its client. It is taken from trusted_proxies alone; connections of others, and those without a whole \
             one within limits.header_timeout, are closed.",
        ),
        key(
            "http2",
            Kind::Flag,
            Is("false"),
            "For http, whether clients may speak HTTP/2 in the clear, without asking first (RFC 9113 §3.3), as a proxy in front \
             or a gRPC client does; browsers do not. Rules for requests act there once they are read, not in segments.",
        ),
        key(
            "http3",
            Kind::Flag,
            Is("false"),
            "For https, whether HTTP/3 is spoken too, at the UDP port of the same number (RFC 9114). Clients with TLS learn of \
             it by the field Alt-Svc; where UDP does not get through they stay with TCP.",
        ),
        key(
            "format",
            Kind::Choice(&["udp", "tcp"]),
            Is("udp"),
            "For trickles, what packets look like on the way: UDP datagrams, or TCP segments with a mark, which needs \
             root and nft and leaves other TCP at the port alone.",
        ),
        key(
            "cache_entries",
            Kind::Integer { min: 0, max: 1 << 20 },
            Is("0"),
            "For trickles, connections and continuations that each worker remembers to save work. They may be lost at \
             any time, and a connection needs none.",
        ),
        key(
            "replay_entries",
            Kind::Integer { min: 1024, max: 1 << 24 },
            Is("131072"),
            "For trickles, packets that each worker remembers to have answered, twice, at 20 bytes each time. Once \
             they are too few for a minute's, connections are refused as stale the sooner: clients that were silent \
             for longer begin again.",
        ),
        key(
            "interface",
            Kind::Name,
            Absent("none"),
            "For trickles with format = \"tcp\", the network interface whose segments AF_XDP takes before the kernel's \
             TCP sees them. Where that cannot be had, AF_PACKET takes them as it does without.",
        ),
        key(
            "keys",
            Kind::Path,
            Absent("a key of its own"),
            "For trickles, the file of the keys that replicas share: a line for each, an epoch from 0 to 255 and 32 \
             hexadecimal digits. The first signs, the others are accepted; `tidegate reload` reads it again. A line of \
             `identity` and 64 digits is the secret key for encryption, which clients may pin.",
        ),
        key(
            "encryption",
            Kind::Choice(&["offered", "required"]),
            Is("offered"),
            "For trickles, whether clients may, or have to, encrypt.",
        ),
    ],
};

static CERTIFICATE: Section = Section {
    name: "certificate",
    doc: "A certificate for listeners with https; one table for each. A client is shown the one for the name that it \
          asks for, with a key that it understands, and otherwise the first. `tidegate reload` reads the files again.",
    enforced: true,
    keys: &[
        key(
            "chain",
            Kind::Path,
            Required,
            "A PEM file: the certificate for the site's names (subjectAltName), then those that it is signed with, as \
             `fullchain.pem` of ACME clients.",
        ),
        key("key", Kind::Path, Required, "A PEM file: the certificate's private key, as `privkey.pem`."),
    ],
};

static ACME: Section = Section {
    name: "acme",
    doc: "Certificates for listeners with https that are ordered of an authority by ACME (RFC 8555), one for each name, and \
          again when a third of their life is left. The authority looks at port 443 of each name (tls-alpn-01), and then at port \
          80 (http-01): the first has to lead to a listener with https, or the second to one with http. Whoever orders agrees to the \
          authority's terms. What has failed is tried again after 5 min, then after twice as long each time, up to 12 h, and at \
          `tidegate reload`.",
    enforced: true,
    keys: &[
        key(
            "names",
            Kind::List { of: &Kind::Host, min: 1 },
            Required,
            "Names of hosts, without `*`; others than of Latin letters in the form `xn--...`. A [[certificate]] for one of them goes \
             before: leave such a name out here.",
        ),
        key("email", Kind::Text, Absent("none"), "Where the authority writes to about the account."),
        key(
            "directory",
            Kind::Text,
            Is("https://acme-v02.api.letsencrypt.org/directory"),
            "The URL of the authority's directory. Let's Encrypt's for tests is \
             `https://acme-staging-v02.api.letsencrypt.org/directory`.",
        ),
        key(
            "path",
            Kind::Path,
            Is("/var/lib/tidegate/acme"),
            "A directory for the account and for certificates with their keys, in a folder for each directory. It is made if it \
             is not there; only this user can read what is in it.",
        ),
        key(
            "authority",
            Kind::Path,
            Absent("those that the system knows"),
            "A PEM file: the certificate that the directory's own is signed with, for authorities of one's own.",
        ),
    ],
};

static ADMIN: Section = Section {
    name: "admin",
    doc: "The admin server: `/metrics`, `/status`, the API and a dashboard. It asks for no password: keep it on \
          loopback. A change needs a restart.",
    enforced: true,
    keys: &[key("address", Kind::Listen, Is("127.0.0.1:9090"), "Where the admin server listens.")],
};

static UPSTREAM: Section = Section {
    name: "upstream",
    doc: "A group of servers that serve the same content; one table for each group.",
    enforced: true,
    keys: &[
        key("name", Kind::Name, Required, "The name by which routes mean this group."),
        key(
            "servers",
            Kind::List { of: &Kind::Server, min: 1 },
            Required,
            "HOST:PORT or http://HOST:PORT, port 80 if there is none; every address that a name resolves to, at the \
             start and at a reload, becomes a server. https://HOST:PORT, port 443 if there is none, is spoken to by TLS. Or \
             `unix:/PATH`, a socket of the file system.",
        ),
        key(
            "require",
            Kind::Flag,
            Is("true"),
            "Whether the start fails when none of the servers accepts a connection; `run --allow-unreachable` is the \
             same as `false` for all groups.",
        ),
        key(
            "balance",
            Kind::Choice(&["round-robin", "least-connections", "hash-url", "hash-host"]),
            Is("round-robin"),
            "How a server is chosen for a request: each in turn, the one with the fewest requests in progress (in \
             turn, if several have equally few), or one for each URL (path and query) or host.",
        ),
        key("connect_timeout", TIMEOUT, Is("5s"), "How long a connection attempt may take."),
        key(
            "response_timeout",
            TIMEOUT,
            Is("60s"),
            "How long a server may be silent before or within a response.",
        ),
        key("idle_timeout", TIMEOUT, Is("60s"), "How long an idle connection is kept for reuse."),
        key(
            "idle_connections",
            Kind::Integer { min: 0, max: 65_535 },
            Is("64"),
            "Idle connections kept for reuse, per data core and server.",
        ),
        key(
            "max_connections",
            Kind::Integer { min: 1, max: 65_535 },
            Is("1024"),
            "Connections open at once, per data core and server. One client's requests get at most three quarters of \
             them.",
        ),
        key(
            "http2",
            Kind::Flag,
            Is("false"),
            "Requests go by HTTP/2, as gRPC wants it: with `https://` if the server chooses it, in the clear (\"h2c\", by prior \
             knowledge) in any case. Up to 100 of them share a connection, and `max_connections` is how many are under \
             way. What asks for another protocol, such as WebSocket, is not.",
        ),
        key(
            "pipeline",
            Kind::Integer { min: 1, max: 64 },
            Is("1"),
            "GET and HEAD requests that go to a server in one write and are answered on one connection in their order, \
             if they come at once (pipelining, RFC 9112 §9.3.2). For servers that answer fast and count requests and \
             responses rightly. 1: each has a connection of its own.",
        ),
        key(
            "pipeline_timeout",
            TIMEOUT,
            Is("20ms"),
            "How long each of their responses may take while others wait behind it, before those are sent again on \
             connections of their own.",
        ),
        key(
            "max_failures",
            Kind::Integer { min: 0, max: 1_000_000 },
            Is("3"),
            "Consecutive failures after which a server gets no requests; 0 never takes one out.",
        ),
        key(
            "fail_timeout",
            TIMEOUT,
            Is("10s"),
            "How long a failed server stays out before one request tries it again.",
        ),
        key(
            "health_check",
            Kind::Table(&HEALTH_CHECK),
            Absent("no checks"),
            "Requests that decide whether a server gets traffic: `{ path = \"/health\" }`.",
        ),
        key(
            "tls",
            Kind::Table(&UPSTREAM_TLS),
            Absent("as its keys say"),
            "How servers with `https://` are known: `{ authority = \"/etc/tidegate/internal-ca.pem\" }`.",
        ),
    ],
};

static UPSTREAM_TLS: Section = Section {
    name: "upstream.tls",
    doc: "How the servers of the group that are spoken to by TLS are known, and what they know us by. One that is not known \
          gets no requests. TLS 1.2 and 1.3; certificates that were withdrawn are not asked about.",
    enforced: true,
    keys: &[
        key(
            "name",
            Kind::Text,
            Absent("that of the server's URL"),
            "The host, or the address, that their certificates have to be for; a host is what they are asked for, too \
             (RFC 6066 §3).",
        ),
        key(
            "authority",
            Kind::Path,
            Absent("those that the system trusts"),
            "A PEM file: certificates that the servers' are signed with. Or the servers' own, if they have signed them \
             themselves: those are known whatever they say.",
        ),
        key(
            "verify",
            Kind::Flag,
            Is("true"),
            "Whether their certificates are looked at. If not, whoever is on the way can read and change everything.",
        ),
        key(
            "certificate",
            Kind::Table(&UPSTREAM_CERTIFICATE),
            Absent("none is shown"),
            "What servers know us by that ask for that: `{ chain = \"/etc/tidegate/client.pem\", key = \
             \"/etc/tidegate/client.key\" }`.",
        ),
    ],
};

static UPSTREAM_CERTIFICATE: Section = Section {
    name: "upstream.tls.certificate",
    doc: "What the servers of the group know us by. Read again at a reload.",
    enforced: true,
    keys: &[
        key("chain", Kind::Path, Required, "A PEM file: the certificate, then those that it is signed with."),
        key("key", Kind::Path, Required, "A PEM file: the certificate's private key."),
    ],
};

static HEALTH_CHECK: Section = Section {
    name: "upstream.health_check",
    doc: "A periodic request to each server of the group.",
    enforced: true,
    keys: &[
        key("path", Kind::UrlPath, Required, "The path to ask for."),
        key(
            "host",
            Kind::Host,
            Absent("the server's address; `localhost` by `unix:`"),
            "The host to ask for, where the application knows only its own.",
        ),
        key(
            "status",
            Kind::Integer { min: 100, max: 599 },
            Absent("any below 400"),
            "The status of a healthy server.",
        ),
        key("interval", TIMEOUT, Is("5s"), "Time between two checks."),
        key("timeout", TIMEOUT, Is("2s"), "How long a check may take."),
        key(
            "fall",
            Kind::Integer { min: 1, max: 100 },
            Is("1"),
            "Checks in a row that have to fail before the server gets no requests.",
        ),
        key(
            "rise",
            Kind::Integer { min: 1, max: 100 },
            Is("1"),
            "Checks in a row that have to succeed before it gets requests again.",
        ),
    ],
};

static CACHE: Section = Section {
    name: "cache",
    doc: "The shared cache. A change of `memory`, `path` or `max_object` needs a restart. A response with `Set-Cookie` \
          is stored if it says how long it is fresh, as RFC 9111 §7.3 has it, and is then sent to everybody with its \
          cookie; nginx and Varnish store none. An application that sets one client's cookies has to say \
          `Cache-Control: private`, `no-store` or nothing at all.",
    enforced: true,
    keys: &[
        key(
            "memory",
            Kind::Size {
                min: tidegate_store::MIN_BUDGET_BYTES,
                max: tidegate_store::MAX_BUDGET_BYTES,
                zero_is_off: true,
            },
            Is("256MiB"),
            "Memory for responses; 0B turns the cache off.",
        ),
        key(
            "path",
            Kind::Path,
            Absent("the cache ends with the process"),
            "The directory of the cache's file; the cache then survives restarts.",
        ),
        key(
            "max_object",
            Kind::Size { min: KIB, max: tidegate_store::MAX_BUDGET_BYTES, zero_is_off: false },
            Absent("an eighth of `memory`"),
            "Larger responses are passed on uncached.",
        ),
        key(
            "client_directives",
            Kind::Flag,
            Is("true"),
            "Whether a request's `Cache-Control` and `Pragma` count: with them any client can have its request sent to \
             the upstream (`no-cache`, `max-age=0`), each by itself. With `false` what is stored and fresh answers all \
             the same.",
        ),
    ],
};

const MIN_RATE: Kind = Kind::Rate { max: GIB };
const HEAD_SIZE: Kind = Kind::Size { min: 256, max: MIB, zero_is_off: false };

static COMPRESSION: Section = Section {
    name: "compression",
    doc: "Content that has no content coding is compressed for clients that accept one: an upstream's on its way into the \
          cache, a file's when it is first asked for. What `Cache-Control: no-transform` forbids stays as it is, and so \
          does, while there is stress, what is not stored, and what comes when a core has spent a quarter of the second \
          on it. A compressed response has a weak entity tag.",
    enforced: true,
    keys: &[
        key(
            "codings",
            Kind::List { of: &Kind::Choice(&["zstd", "br", "gzip"]), min: 0 },
            Absent("nothing is compressed"),
            "Content codings in the order of preference. zstd costs the least, br makes the least bytes, and gzip is known \
             to every client: [\"zstd\", \"br\", \"gzip\"]. A page that shows a secret beside what a request says should \
             not be compressed with it over TLS (BREACH).",
        ),
        key(
            "types",
            Kind::List { of: &Kind::MediaType, min: 1 },
            Absent("text, scripts, data and drawings"),
            "Media types of content that is compressed; `*` at the end stands for anything: [\"text/*\"].",
        ),
        key(
            "min_size",
            Kind::Size { min: 1, max: GIB, zero_is_off: false },
            Is("1KiB"),
            "Content that is known to be shorter stays as it is.",
        ),
    ],
};

static LIMITS: Section = Section {
    name: "limits",
    doc: "What a client may cost. All are on by default.",
    enforced: true,
    keys: &[
        key(
            "header_timeout",
            TIMEOUT,
            Is("10s"),
            "From the start of a connection or of a request to the end of its head. A connection on which nothing \
             arrives is the kernel's for a second or so before its time begins (TCP_DEFER_ACCEPT).",
        ),
        key("keep_alive_timeout", TIMEOUT, Is("75s"), "How long an idle connection is kept."),
        key(
            "body_min_rate",
            MIN_RATE,
            Is("500B/s"),
            "Slowest average at which a request body may arrive; 0B/s turns it off.",
        ),
        key(
            "response_min_rate",
            MIN_RATE,
            Is("500B/s"),
            "Slowest average at which a client may take a response; 0B/s turns it off. Where the cache has no room \
             because of what clients read, those have to be 20 times as fast.",
        ),
        key(
            "body_size",
            Kind::Size { min: 1, max: 1024 * GIB, zero_is_off: false },
            Is("1GiB"),
            "Largest request body; more is answered with 413.",
        ),
        key("request_line_size", HEAD_SIZE, Is("16KiB"), "Longest request line; more is answered with 414."),
        key("head_size", HEAD_SIZE, Is("64KiB"), "Largest request head; more is answered with 431."),
        key(
            "fields",
            Kind::Integer { min: 1, max: 10_000 },
            Is("100"),
            "Most header fields of a request; more are answered with 431.",
        ),
        key(
            "connections",
            Kind::Integer { min: 1, max: 10_000_000 },
            Is("16000"),
            "Client connections open at once; more are closed at once.",
        ),
        key(
            "tunnel_timeout",
            TIMEOUT,
            Is("5m"),
            "How long an upgraded connection (WebSocket) may be silent.",
        ),
        key(
            "drain_timeout",
            TIMEOUT,
            Is("30s"),
            "How long requests in progress may go on after SIGTERM or `tidegate drain`.",
        ),
    ],
};

static LOG: Section = Section {
    name: "log",
    doc: "The access log. What the program says of itself goes to standard error, in the form that `--log` names. A \
          change needs a restart.",
    enforced: true,
    keys: &[
        key(
            "access",
            Kind::Path,
            Absent("no access log"),
            "A file to append to, or `-` for standard output.",
        ),
        key(
            "format",
            Kind::Choice(&["combined", "json"]),
            Is("combined"),
            "The combined log format of Apache and nginx, or one JSON object a line.",
        ),
    ],
};

impl Section {
    /// `[cache]`, `[[route]]` or "the file", for people.
    pub fn title(&self) -> String {
        let is_list = FILE
            .keys
            .iter()
            .any(|key| matches!(key.kind, Kind::Tables(section) if section.name == self.name));
        match self.name {
            "" => "the file".into(),
            name if is_list => format!("[[{name}]]"),
            name => format!("[{name}]"),
        }
    }

    /// The key as a path from the file's root.
    pub fn path_of(&self, key: &str) -> String {
        if self.name.is_empty() { key.to_owned() } else { format!("{}.{key}", self.name) }
    }

    /// The kind of the key that a path from this section leads to.
    pub fn kind_of(&self, path: &str) -> Option<Kind> {
        let (name, rest) = path.split_once('.').map_or((path, None), |(name, rest)| (name, Some(rest)));
        let kind = self.keys.iter().find(|key| key.name == name)?.kind;
        match (kind, rest) {
            (kind, None) => Some(kind),
            (Kind::Table(below) | Kind::Tables(below), Some(rest)) => below.kind_of(rest),
            _ => None,
        }
    }

    /// This section and all below it, in the order of the table.
    pub fn walk(&'static self) -> Vec<&'static Section> {
        let below = self.keys.iter().filter_map(|key| match key.kind {
            Kind::Table(section) | Kind::Tables(section) => Some(section),
            _ => None,
        });
        std::iter::once(self).chain(below.flat_map(Section::walk)).collect()
    }
}
