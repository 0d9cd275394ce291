//! The settings of what protects a site: rules, the block list, the defence, the gate and its agent.

use super::Fallback::{Absent, Is, Required};
use super::{DAY, GIB, HOUR, MIB, MS, SECOND, Section, TIMEOUT, key};
use crate::config::kind::Kind;

const RULE_RATE: Kind = Kind::Number { max: tidegate_policy::Profile::MAX_RATE_PER_S };
const BURST: Kind = Kind::Integer { min: 1, max: tidegate_policy::Profile::MAX_BURST as u64 };
const PRIORITY: Kind = Kind::Integer { min: 1, max: tidegate_policy::MAX_CLASSES as u64 };
const WHEN: Kind = Kind::Choice(&["always", "overload"]);

pub(super) static CONNECTION: Section = Section {
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
        key("rate", RULE_RATE, Is("0"), "New connections per second, from 0.001 on; 0 is unlimited."),
        key("burst", BURST, Absent("one second's worth"), "Connections that may come at once."),
        key("priority", PRIORITY, Absent("the lowest"), "1 is served first."),
        key("when", WHEN, Is("always"), "Whether the rate holds always or only while there is overload."),
    ],
};

pub(super) static REQUEST: Section = Section {
    name: "request",
    doc: "A rule for requests: what is asked for. At least one of `path` and `cookie` says which requests it is for. \
          Of the rules that match a request the first governs: those with a cookie before those without, then the \
          longest literal path, then exact before `prefix*`, `*suffix` and `*infix*`. `tidegate gate show` says where \
          it acts.",
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
        key("rate", RULE_RATE, Is("0"), "Requests per second, from 0.001 on; 0 is unlimited."),
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

pub(super) static BLOCK: Section = Section {
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
            "How often a client may answer within ten seconds that it takes no more bytes, as slow readers do, before \
             it is blocked; 0 is as often as it likes. Needs kernel programs. A change needs a restart.",
        ),
    ],
};

pub(super) static DEFENCE: Section = Section {
    name: "defence",
    doc: "Clients are watched, each address and each network prefix around it, and those that abuse the site are \
          refused: see [the guide](defence.md). On by default. A change of `enabled`, `memory` or `audit` needs a \
          restart.",
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
            "A file to which every block, and of other decisions about a client the first, the second, the fourth and \
             so on, are appended with their reasons, one JSON object a line; opened anew on SIGUSR1 and SIGHUP.",
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
            "Work that the action `challenge` asks of a browser: about 2 to the power of this many hashes; 0 asks only \
             for a cookie.",
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

pub(super) static CLASSIFIER: Section = Section {
    name: "classifier",
    doc: "What one classifier allows, and what is done beyond that. All are on with their defaults; a table changes \
          one of them.",
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
            "Hold back for a second, answer 429, let a browser prove itself, hold the connection without an answer, \
             reset or end it, or keep the address out as long as `block.for` says. The last three are all that \
             `connection-rate` and `connections` can do.",
        ),
        key("dry_run", Kind::Flag, Is("false"), "Whether the classifier is only tried out."),
    ],
};

pub(super) static EXEMPT: Section = Section {
    name: "exempt",
    doc: "Clients that are counted but never acted on, such as monitoring and search engines' robots. Where there is no \
          such table, 127.0.0.1 and ::1 are exempt.",
    enforced: true,
    keys: &[
        key("source", Kind::Prefix, Required, "Their addresses."),
        key(
            "user_agent",
            Kind::Text,
            Absent("whatever"),
            "Only requests with this in User-Agent; nobody there is acted on before a request's head is here.",
        ),
    ],
};

pub(super) static FILTER: Section = Section {
    name: "filter",
    doc: "Requests that are refused by what they look like; all that a table says must hold, and the first that \
          matches decides. Nothing is done to those whom [[exempt]] names, nor without it to 127.0.0.1 and ::1: try a \
          filter from another address.",
    enforced: true,
    keys: &[
        key("source", Kind::Prefix, Absent("anywhere"), "Where they come from."),
        key("user_agent", Kind::Text, Absent("whatever"), "What User-Agent has in it, in any case."),
        key("path", Kind::UrlPath, Absent("whatever"), "How the path begins."),
        key("content_type", Kind::Text, Absent("whatever"), "What Content-Type begins with, in any case."),
        key(
            "methods",
            Kind::List { of: &Kind::Method, min: 1 },
            Absent("every method"),
            "Methods, one of which they have.",
        ),
        key("action", DEFENCE_ACTION, Is("refuse"), "What is done; `refuse` answers 403."),
        key("dry_run", Kind::Flag, Is("false"), "Whether the filter is only tried out."),
    ],
};

pub(super) static GATE: Section = Section {
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

pub(super) static ADAPT: Section = Section {
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

pub(super) static ICAP: Section = Section {
    name: "icap",
    doc: "A service that looks at messages before they go on (RFC 3507), such as a virus scanner; of those responsible \
          for a message, the first is asked. While it decides the message waits and everything else goes on.",
    enforced: true,
    keys: &[
        key("service", Kind::Text, Required, "`icap://HOST:PORT/NAME`; without a port, 1344."),
        key(
            "on",
            Kind::Choice(&["requests", "responses"]),
            Required,
            "What it looks at: requests before the cache is looked into, or the upstreams' responses before they are \
             stored. What is answered from the cache was looked at when it was stored.",
        ),
        key(
            "methods",
            Kind::List { of: &Kind::Method, min: 1 },
            Absent("every method"),
            "Methods of the requests that this is about.",
        ),
        key(
            "paths",
            Kind::List { of: &Kind::Pattern, min: 1 },
            Absent("every path"),
            "Paths that this is about, in their normal form; `*` at the start, the end or both stands for anything.",
        ),
        key(
            "except",
            Kind::List { of: &Kind::Pattern, min: 1 },
            Absent("none"),
            "Paths that this is not about, whatever `paths` says.",
        ),
        key(
            "connections",
            Kind::Integer { min: 1, max: 65_535 },
            Is("16"),
            "Exchanges at once, per data core, if the service takes as many. 1,024 further messages may wait for their \
             turn.",
        ),
        key("timeout", TIMEOUT, Is("5s"), "How long a turn, a connection and a decision may each take."),
        key(
            "failure",
            Kind::Choice(&["closed", "open"]),
            Is("closed"),
            "What becomes of a message when the service fails: it is answered with 503, or it goes on. One of which a \
             part that is not kept has gone to the service cannot go on.",
        ),
        key(
            "busy",
            Kind::Choice(&["closed", "open"]),
            Is("closed"),
            "The same when the service works and has no room: there is no turn in time, or it answers 503 itself. With \
             `open`, whoever keeps it busy gets messages past it.",
        ),
    ],
};

pub(super) static STRESS: Section = Section {
    name: "stress",
    doc: "Beyond what the host counts as overloaded, with or without `[adapt]`. While it is, rules with `when \
          = \"overload\"` act, the agent limits lower classes, DHTTP opens no connections, the classifier `stress` \
          acts, and stale responses that may answer in the place of an error do so.",
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
            "Clients' connections, as a share of `limits.connections`. From 0.95 on the heaviest are ended, whatever \
             this says.",
        ),
        key(
            "upstream_delay",
            Kind::Duration { min_ms: MS, max_ms: HOUR },
            Is("2s"),
            "How long the upstreams take to answer half of the clients, each in the mean of its answers.",
        ),
        key(
            "upstream_errors",
            Kind::Share,
            Is("0.5"),
            "Share of the clients for whom most of the upstreams' answers are failures.",
        ),
    ],
};
