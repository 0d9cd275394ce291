//! The settings as one table: what a configuration file may say, in the words of whoever writes one.
//!
//! The walker checks files against it, and the reference page and the JSON Schema are written from it; a key is added
//! here and read in `settings`.

use super::kind::Kind;

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
            "Number of data cores: each is a thread that accepts and serves its own connections. A change needs a restart.",
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
            "Proxies in front of this one whose X-Forwarded-For and Forwarded are believed.",
        ),
        key("pseudonym", Kind::Name, Is("tidegate"), "The name of this proxy in Via and Cache-Status."),
        key("listen", Kind::Tables(&LISTEN), Absent("--listen must say where"), "Where clients connect."),
        key("admin", Kind::Table(&ADMIN), Absent("as below"), "The admin server."),
        key("upstream", Kind::Tables(&UPSTREAM), Absent("none"), "Groups of origin servers."),
        key(
            "route",
            Kind::Tables(&ROUTE),
            Absent("--upstream or --root must say what to serve"),
            "Which requests go where.",
        ),
        key("cache", Kind::Table(&CACHE), Absent("as below"), "The shared cache."),
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
            Kind::Protocol,
            Is("http"),
            "What is spoken there. dhttp takes a UDP and a TCP port below 32768; trickles takes a UDP port. This \
             version refuses to start with https.",
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
            "For trickles, connections and continuations that each worker remembers to save work. They may be lost at any \
             time, and a connection needs none.",
        ),
        key(
            "interface",
            Kind::Name,
            Absent("none"),
            "For trickles with format = \"tcp\", the network interface whose segments AF_XDP takes before the kernel's TCP \
             sees them. Where that cannot be had, AF_PACKET takes them as it does without.",
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
            "HOST:PORT or http://HOST:PORT; every address that a name resolves to becomes a server.",
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
            "How a server is chosen for a request.",
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
            "Connections open at once, per data core and server.",
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
            Absent("the server's address"),
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
    ],
};

static ROUTE: Section = Section {
    name: "route",
    doc: "Which requests go where: to an `upstream` or to files below a `root`, exactly one of the two. The most \
          specific host wins, then the longest path.",
    enforced: true,
    keys: &[
        key("host", Kind::Host, Is("*"), "A host name, `*.suffix`, or `*` for every host."),
        key("path", Kind::UrlPath, Is("/"), "A path prefix."),
        key("upstream", Kind::Name, Absent("`root` answers"), "The name of an [[upstream]]."),
        key("root", Kind::Path, Absent("`upstream` answers"), "A directory of files."),
    ],
};

static CACHE: Section = Section {
    name: "cache",
    doc: "The shared cache. A change needs a restart.",
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
    ],
};

const MIN_RATE: Kind = Kind::Rate { max: GIB };
const HEAD_SIZE: Kind = Kind::Size { min: 256, max: MIB, zero_is_off: false };

static LIMITS: Section = Section {
    name: "limits",
    doc: "What a client may cost. All are on by default.",
    enforced: true,
    keys: &[
        key(
            "header_timeout",
            TIMEOUT,
            Is("10s"),
            "From the start of a connection or of a request to the end of its head.",
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
            "Slowest average at which a client may take a response; 0B/s turns it off.",
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

const RULE_RATE: Kind = Kind::Number { max: tidegate_policy::Profile::MAX_RATE_PER_S };
const BURST: Kind = Kind::Integer { min: 1, max: tidegate_policy::Profile::MAX_BURST as u64 };
const PRIORITY: Kind = Kind::Integer { min: 1, max: tidegate_policy::MAX_CLASSES as u64 };
const WHEN: Kind = Kind::Choice(&["always", "overload"]);

static CONNECTION: Section = Section {
    name: "connection",
    doc: "A network-level rule: who connects. Of the rules that match a connection the one with the longest source \
          prefix governs; among those the one with the longest destination prefix, then the one with the fewest ports, \
          then the first. What violates it is dropped without an answer. `tidegate gate show` says where it acts.",
    enforced: true,
    keys: &[
        key(
            "destination",
            Kind::Destination,
            Is("*"),
            "ADDRESS:PORT; `*` stands for every address or port, and both may be ranges: 10.0.0.0/8:8000-8099.",
        ),
        key("source", Kind::Prefix, Absent("every client"), "The clients it is for: an address or a prefix."),
        key("rate", RULE_RATE, Is("0"), "New connections per second; 0 is unlimited."),
        key("burst", BURST, Absent("one second's worth"), "Connections that may come at once."),
        key("priority", PRIORITY, Absent("the lowest"), "1 is served first."),
        key("when", WHEN, Is("always"), "Whether the rate holds always or only while there is overload."),
    ],
};

static REQUEST: Section = Section {
    name: "request",
    doc: "A rule for requests: what is asked for. At least one of `path` and `cookie` says which requests it is for. Of \
          the rules that match a request the first governs: those with a cookie before those without, then the longest \
          literal path, then exact before `prefix*`, `*suffix` and `*infix*`. `tidegate gate show` says where it acts.",
    enforced: true,
    keys: &[
        key(
            "path",
            Kind::Pattern,
            Absent("every path"),
            "A path without its query; `*` at its beginning or end stands for anything.",
        ),
        key(
            "cookie",
            Kind::Words,
            Absent("any cookie"),
            "A cookie that must be there: `{ tier = \"gold\" }`.",
        ),
        key("rate", RULE_RATE, Is("0"), "Requests per second; 0 is unlimited."),
        key("burst", BURST, Absent("one second's worth"), "Requests that may come at once."),
        key("priority", PRIORITY, Absent("the lowest"), "1 is served first."),
        key(
            "action",
            Kind::Choice(&["drop", "reset", "refuse"]),
            Absent("what exceeds `rate` is reset"),
            "What is done to requests that exceed `rate`, or without one to all: ignored, reset, or answered with 503 \
             and Retry-After.",
        ),
        key("when", WHEN, Is("always"), "Whether the rule acts always or only while there is overload."),
    ],
};

static BLOCK: Section = Section {
    name: "block",
    doc: "Addresses and prefixes that are kept out, packet by packet where kernel programs are attached. \
          `tidegate block` adds, lists and removes them.",
    enforced: true,
    keys: &[
        key(
            "for",
            Kind::Duration { min_ms: SECOND, max_ms: 366 * DAY },
            Is("10m"),
            "The life of a dynamic rule.",
        ),
        key(
            "path",
            Kind::Path,
            Absent("rules end with the process"),
            "A directory in which dynamic rules survive restarts. A change needs a restart.",
        ),
        key(
            "files",
            Kind::List { of: &Kind::Path, min: 0 },
            Absent("none"),
            "Lists of addresses and prefixes, one a line; read again when they change.",
        ),
        key(
            "shut_windows",
            Kind::Integer { min: 0, max: 1_000_000 },
            Is("0"),
            "How often a client may answer within ten seconds that it takes no more bytes, as slow readers do, before it is \
             blocked; 0 is as often as it likes. Needs kernel programs. A change needs a restart.",
        ),
    ],
};

static DEFENCE: Section = Section {
    name: "defence",
    doc: "Clients are watched, each address and each network prefix around it, and those that abuse the site are refused: \
          see [the guide](defence.md). On by default. A change of `enabled`, `memory` or `audit` needs a restart.",
    enforced: true,
    keys: &[
        key("enabled", Kind::Flag, Is("true"), "Whether clients are watched at all."),
        key(
            "memory",
            Kind::Size { min: MIB, max: 64 * GIB, zero_is_off: false },
            Is("256MiB"),
            "The most memory for what is known of clients, over all data cores; whoever does least is forgotten first.",
        ),
        key(
            "dry_run",
            Kind::Flag,
            Is("false"),
            "Whether all rules are only tried out: what they would do is logged and counted, and not done.",
        ),
        key(
            "audit",
            Kind::Path,
            Absent("only the program's log"),
            "A file to which each decision and its reason is appended, one JSON object a line; opened anew on SIGHUP.",
        ),
        key(
            "external",
            Kind::Path,
            Absent("nobody is told"),
            "A Unix socket at which classifiers of your own are told what clients do and say whom to block \
             ([protocol](../protocol/classifier.md)). A change needs a restart.",
        ),
        key(
            "sample",
            Kind::Integer { min: 1, max: 1_000_000 },
            Is("1"),
            "One of how many events `external` is told. A change needs a restart.",
        ),
        key(
            "challenge_bits",
            Kind::Integer { min: 0, max: 24 },
            Is("16"),
            "Work that the action `challenge` asks of a browser: about 2 to the power of this many hashes; 0 asks only for \
             a cookie.",
        ),
        key(
            "pass_for",
            Kind::Duration { min_ms: SECOND, max_ms: 30 * DAY },
            Is("1h"),
            "How long a solved challenge is good for.",
        ),
    ],
};

const DEFENCE_ACTION: Kind =
    Kind::Choice(&["delay", "refuse", "challenge", "tarpit", "reset", "drop", "block"]);

static CLASSIFIER: Section = Section {
    name: "classifier",
    doc: "What one classifier allows, and what is done beyond that. All are on with their defaults; a table changes one of \
          them.",
    enforced: true,
    keys: &[
        key(
            "name",
            Kind::Choice(&[
                "request-rate",
                "connection-rate",
                "connections",
                "errors",
                "upstream-time",
                "cache-busting",
                "ranges",
                "slow",
                "swarm",
                "stress",
            ]),
            Required,
            "Which classifier; [the guide](defence.md) says what each looks at.",
        ),
        key(
            "limit",
            Kind::Integer { min: 0, max: 100_000_000 },
            Absent("the classifier's default"),
            "What one address may do within 10 s, in the classifier's unit; 0 turns the classifier off.",
        ),
        key(
            "action",
            DEFENCE_ACTION,
            Absent("the classifier's default"),
            "Hold back for a second, answer 429, let a browser prove itself, hold the connection without an answer, reset \
             or end it, or keep the address out as long as `block.for` says.",
        ),
        key("dry_run", Kind::Flag, Is("false"), "Whether the classifier is only tried out."),
    ],
};

static EXEMPT: Section = Section {
    name: "exempt",
    doc: "Clients that are counted but never acted on, such as monitoring and search engines' robots.",
    enforced: true,
    keys: &[
        key("source", Kind::Prefix, Required, "Their addresses."),
        key("user_agent", Kind::Text, Absent("whatever"), "Only requests with this in User-Agent."),
    ],
};

static FILTER: Section = Section {
    name: "filter",
    doc: "Requests that are refused by what they look like; all that a table says must hold, and the first that matches \
          decides.",
    enforced: true,
    keys: &[
        key("source", Kind::Prefix, Absent("anywhere"), "Where they come from."),
        key("user_agent", Kind::Text, Absent("whatever"), "What User-Agent has in it, in any case."),
        key("path", Kind::UrlPath, Absent("whatever"), "How the path begins, in its normal form."),
        key("content_type", Kind::Text, Absent("whatever"), "What Content-Type begins with, in any case."),
        key(
            "methods",
            Kind::List { of: &Kind::Name, min: 1 },
            Absent("every method"),
            "Methods, one of which they have.",
        ),
        key("action", DEFENCE_ACTION, Is("refuse"), "What is done; `refuse` answers 403."),
        key("dry_run", Kind::Flag, Is("false"), "Whether the filter is only tried out."),
    ],
};

static GATE: Section = Section {
    name: "gate",
    doc: "Where rules are enforced. Kernel programs on network interfaces refuse before the server wakes; they need \
          CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON. Where they cannot be had, the same rules act in user space, and \
          `tidegate gate show` says why. A change needs a restart.",
    enforced: true,
    keys: &[
        key(
            "mechanism",
            Kind::Choice(&["auto", "user-space"]),
            Is("auto"),
            "`auto` uses kernel programs where they can be had.",
        ),
        key(
            "interfaces",
            Kind::List { of: &Kind::Name, min: 1 },
            Absent("those with the listeners' addresses, loopback aside"),
            "Network interfaces to attach to.",
        ),
        key(
            "http_ports",
            Kind::List { of: &Kind::Ports, min: 1 },
            Absent("the listeners'; for `gate attach` without listeners 80"),
            "Ports on which cleartext HTTP is spoken: there requests are policed before they reach the server.",
        ),
        key(
            "reset_penalty",
            Kind::Duration { min_ms: 0, max_ms: HOUR },
            Is("1s"),
            "How long a client that was reset cannot connect again.",
        ),
        key(
            "hold_depth",
            Kind::Integer { min: 0, max: 65_535 },
            Is("0"),
            "Accept queue depth from which new connections of lower classes are held back; 0 is never.",
        ),
    ],
};

static ADAPT: Section = Section {
    name: "adapt",
    doc: "What the adaptation agent is to achieve. It watches how long requests of each priority class take, accept \
          queues, and memory and processor pressure, and limits the lower classes when there is overload: the lowest \
          first, as much as it takes and no more. It says why in the log and in `tidegate gate show`. A change needs a \
          restart.",
    enforced: true,
    keys: &[
        key(
            "latency",
            Kind::Duration { min_ms: MS, max_ms: HOUR },
            Required,
            "How long nine in ten requests of the highest class may take.",
        ),
        key(
            "floor",
            Kind::Number { max: 50 },
            Is("5"),
            "Per cent of the rate at which a class was served without limits that it is let have in any case.",
        ),
    ],
};

static STRESS: Section = Section {
    name: "stress",
    doc: "Beyond what the host counts as overloaded, with or without `[adapt]`. While it is, rules with `when = \"overload\"` \
          act, the agent limits lower classes, DHTTP opens no connections, the classifier `stress` acts, and stale responses that \
          may answer in the place of an error do so.",
    enforced: true,
    keys: &[
        key(
            "memory",
            Kind::Share,
            Is("0.9"),
            "Share of the memory in use: of the control group's if that is limited, otherwise of the host's.",
        ),
        key(
            "queue_delay",
            Kind::Duration { min_ms: MS, max_ms: HOUR },
            Is("50ms"),
            "How long connections wait to be accepted.",
        ),
        key(
            "busy",
            Kind::Share,
            Is("0.9"),
            "Share of the time in which a data core runs, or waits for a processor.",
        ),
        key(
            "lag",
            Kind::Duration { min_ms: MS, max_ms: HOUR },
            Is("100ms"),
            "How late a data core's event loop does what is due.",
        ),
        key(
            "connections",
            Kind::Share,
            Is("0.8"),
            "Clients' connections, as a share of `limits.connections`. From 0.95 on the heaviest are ended, whatever this says.",
        ),
        key(
            "upstream_delay",
            Kind::Duration { min_ms: MS, max_ms: HOUR },
            Is("2s"),
            "How long the upstreams take to answer, in the mean of a quarter of a second.",
        ),
        key("upstream_errors", Kind::Share, Is("0.5"), "Share of the upstreams' answers that are failures."),
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

    /// This section and all below it, in the order of the table.
    pub fn walk(&'static self) -> Vec<&'static Section> {
        let below = self.keys.iter().filter_map(|key| match key.kind {
            Kind::Table(section) | Kind::Tables(section) => Some(section),
            _ => None,
        });
        std::iter::once(self).chain(below.flat_map(Section::walk)).collect()
    }
}
