//! The settings of routes.

use super::Fallback::{Absent, Is};
use super::{Section, key};
use crate::config::kind::Kind;

pub(super) static ROUTE: Section = Section {
    name: "route",
    doc: "Which requests go where: to an `upstream`, to files below a `root`, or elsewhere by a `redirect`, exactly one of \
          the three. The most specific host wins, then the longest path. What a route changes of fields is changed \
          before anything else looks at them: to the cache, ICAP services and compression the application itself has \
          said so, and what is stored keeps what it was stored with.",
    enforced: true,
    keys: &[
        key("host", Kind::Host, Is("*"), "A host name, `*.suffix`, or `*` for every host."),
        key("path", Kind::UrlPath, Is("/"), "A path prefix, compared with the path's normal form."),
        key("upstream", Kind::Name, Absent("another key answers"), "The name of an [[upstream]]."),
        key("root", Kind::Path, Absent("another key answers"), "A directory of files."),
        key(
            "redirect",
            Kind::Text,
            Absent("another key answers"),
            "A URL, or a path on the same host, to which clients are sent. A `*` at its end stands for what follows `path` \
             in the request, its query included: `\"https://www.example.org/*\"`.",
        ),
        key(
            "redirect_status",
            Kind::Integer { min: 301, max: 308 },
            Absent("for good: 301 for GET and HEAD, 308 for others"),
            "301, 302, 303, 307 or 308 (RFC 9110 §15.4).",
        ),
        key(
            "rewrite",
            Kind::UrlPath,
            Absent("the path goes on in its normal form"),
            "The path that the upstream is asked for. A `*` at its end stands for what follows `path` in the request: with \
             `path = \"/api/\"` and `rewrite = \"/*\"`, `/api/users` is asked for as `/users`. The query stays, in its normal \
             form, and so does what responses say of paths (`Location`, cookies, links).",
        ),
        key(
            "request_fields",
            Kind::Table(&REQUEST_FIELDS),
            Absent("they go on as they came"),
            "What is changed of requests to the upstream: `{ set = { Host = \"app.internal\" } }`.",
        ),
        key(
            "response_fields",
            Kind::Table(&RESPONSE_FIELDS),
            Absent("they go on as they came"),
            "What is changed of responses: `{ remove = [\"Server\"] }`.",
        ),
    ],
};

const NAMES: Kind = Kind::List { of: &Kind::Text, min: 1 };

static REQUEST_FIELDS: Section = Section {
    name: "route.request_fields",
    doc: "Changes to the fields of requests to the upstream, in the order of this table. Names are compared in any case, and \
          an underscore counts as a hyphen. Requests go on without trailer fields then. The cache is asked with the request \
          as it came.",
    enforced: true,
    keys: &[
        key("remove", NAMES, Absent("nothing"), "Names of fields that are left out."),
        key(
            "set",
            Kind::Words,
            Absent("nothing"),
            "Fields with one value, in the place of what the client sent.",
        ),
        key("add", Kind::Words, Absent("nothing"), "Fields beside those that the client sent."),
        key("default", Kind::Words, Absent("nothing"), "Fields where the client sent none."),
    ],
};

static RESPONSE_FIELDS: Section = Section {
    name: "route.response_fields",
    doc: "Changes to the fields of an upstream's final responses, of files and of redirects, in the order of this table; not \
          of what tidegate itself says otherwise. `Cache-Control` is for this cache and for all after it, \
          `CDN-Cache-Control` for this one alone (RFC 9213). How long a response may be reused is not said of errors, of what \
          holds for the moment, nor beside a cookie that is set; as a default, nor where anything speaks against it: see \
          [operating](operating.md#redirects-paths-and-fields). Responses go on without trailer fields then.",
    enforced: true,
    keys: &[
        key("remove", NAMES, Absent("nothing"), "Names of fields that are left out."),
        key("set", Kind::Words, Absent("nothing"), "Fields with one value, in the place of what was said."),
        key("add", Kind::Words, Absent("nothing"), "Fields beside those that are there."),
        key("default", Kind::Words, Absent("nothing"), "Fields where there is none."),
    ],
};
