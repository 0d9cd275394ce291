//! `police`: token buckets and priorities per URL, cookie and address range, by the same rules, tables and buckets as the
//! gate: the `[[request]]` and `[[connection]]` tables of a configuration file.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Instant;

use serde::Deserialize;
use tidegate_core::metrics::{Kind, Sample};
use tidegate_core::{PrefixError, Verdict};
use tidegate_http::{FieldId, HeadLimits, Progress, RequestParser};
use tidegate_policy::{
    Action, Class, ConnectionRule, CookiePattern, Destination, DestinationError, MAX_CLASSES,
    PathPatternError, Policer, Profile, RequestRule, RuleSet, When,
};

use crate::arguments::{Argument, ArgumentError, Arguments};
use crate::host::{Disposition, Filter, WINDOW};
use crate::neighbours::FilterError;
use crate::wire::{Bundle, Id};

pub(super) const ARGUMENTS: &[Argument] = &[
    Argument {
        key: "rules",
        default: "",
        help: "configuration file with [[request]] and [[connection]] tables; without it, nothing is policed",
    },
    Argument {
        key: "port",
        default: "80",
        help: "port of the server, which `destination` in [[connection]] is compared with",
    },
    Argument {
        key: "overload",
        default: "256",
        help: "requests waiting from which on rules with `when = \"overload\"` act",
    },
    WINDOW,
];

/// One `[[request]]` or `[[connection]]` table.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    path: Option<String>,
    cookie: Option<BTreeMap<String, String>>,
    action: Option<Consequence>,
    destination: Option<String>,
    source: Option<String>,
    rate: Option<f64>,
    burst: Option<u32>,
    priority: Option<u8>,
    #[serde(default)]
    when: Moment,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Moment {
    #[default]
    Always,
    Overload,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Consequence {
    Drop,
    Reset,
    Refuse,
}

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    request: Vec<Entry>,
    #[serde(default)]
    connection: Vec<Entry>,
}

impl Entry {
    fn profile(&self) -> Result<Option<Profile>, String> {
        let Some(rate) = self.rate.filter(|&rate| rate != 0.0) else { return Ok(None) };
        // One second's worth.
        let burst = self.burst.unwrap_or((rate.ceil() as u32).max(1));
        Profile::new(rate, burst).map(Some).map_err(|error| error.to_string())
    }

    fn class(&self) -> Result<Option<Class>, String> {
        let most = MAX_CLASSES as Class;
        match self.priority {
            Some(priority) if !(1..=most).contains(&priority) => {
                Err(format!("priority {priority} is not between 1 and {most}"))
            }
            priority => Ok(priority.map(|priority| priority - 1)),
        }
    }

    fn when(&self) -> When {
        match self.when {
            Moment::Always => When::Always,
            Moment::Overload => When::Overload,
        }
    }

    fn request(&self) -> Result<RequestRule, String> {
        if self.source.is_some() || self.destination.is_some() {
            return Err("source and destination are for [[connection]] tables".to_owned());
        }
        let path = self.path.as_deref();
        if path.is_none() && self.cookie.is_none() {
            return Err("expected at least one of path and cookie".to_owned());
        }
        let cookie = match self.cookie.as_ref().map(|cookies| cookies.iter().collect::<Vec<_>>()).as_deref() {
            None => None,
            Some([(name, value)]) => {
                Some(CookiePattern::new(name, value).map_err(|error| error.to_string())?)
            }
            Some(_) => return Err("expected one cookie".to_owned()),
        };
        Ok(RequestRule {
            path: path.unwrap_or("*").parse().map_err(|error: PathPatternError| format!("path: {error}"))?,
            cookie,
            limit: self.profile()?,
            when: self.when(),
            action: self.action.map(|action| match action {
                Consequence::Drop => Action::Drop,
                Consequence::Reset => Action::Reset,
                Consequence::Refuse => Action::Refuse,
            }),
            class: self.class()?,
        })
    }

    fn connection(&self) -> Result<ConnectionRule, String> {
        if self.path.is_some() || self.cookie.is_some() || self.action.is_some() {
            return Err("path, cookie and action are for [[request]] tables".to_owned());
        }
        let destination = self.destination.as_deref().unwrap_or("*");
        let with_ports = if destination == "*" { "*:*" } else { destination };
        let destination: Destination =
            with_ports.parse().map_err(|error: DestinationError| format!("destination: {error}"))?;
        if destination.address.is_some() {
            return Err("destination: a filter knows the port only, such as *:80".to_owned());
        }
        let source = self.source.as_deref().map(str::parse).transpose();
        Ok(ConnectionRule {
            destination,
            source: source.map_err(|error: PrefixError| format!("source: {error}"))?,
            limit: self.profile()?,
            when: self.when(),
            class: self.class()?,
        })
    }
}

/// Reads the `[[request]]` and `[[connection]]` tables of a configuration; its other tables are not looked at.
///
/// # Errors
/// What is wrong, with its place: one line.
pub fn rules(text: &str) -> Result<RuleSet, String> {
    let file: File = toml::from_str(text).map_err(|error| in_one_line(&error, text))?;
    let numbered = |table: &str, at: usize, error: String| format!("[[{table}]] number {}: {error}", at + 1);
    let requests = file.request.iter().enumerate();
    let requests =
        requests.map(|(at, entry)| entry.request().map_err(|error| numbered("request", at, error)));
    let connections = file.connection.iter().enumerate();
    let connections =
        connections.map(|(at, entry)| entry.connection().map_err(|error| numbered("connection", at, error)));
    Ok(RuleSet {
        requests: requests.collect::<Result<_, _>>()?,
        connections: connections.collect::<Result<_, _>>()?,
        ..RuleSet::default()
    })
}

/// What is wrong, without the picture of the place.
fn in_one_line(error: &toml::de::Error, text: &str) -> String {
    let before = text.get(..error.span().map_or(0, |span| span.start)).unwrap_or(text);
    let line = before.bytes().filter(|&byte| byte == b'\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or("").chars().count() + 1;
    let reason = error.message().split_whitespace().collect::<Vec<_>>().join(" ");
    format!("line {line}, column {column}: {reason}")
}

/// The filter around a [`Policer`].
pub struct PoliceFilter {
    policer: Policer,
    port: u16,
    /// Requests waiting from which on there is overload.
    overload: usize,
    /// Zero of the policer's clock.
    start: Instant,
    parser: RequestParser,
    waiting: Vec<VecDeque<Id>>,
    waiting_count: usize,
    denied: u64,
}

impl PoliceFilter {
    /// Polices requests to `port` by these rules.
    ///
    /// # Errors
    /// The rules contradict each other.
    pub fn new(rules: &RuleSet, port: u16, overload: usize) -> Result<Self, String> {
        let policer = Policer::new(rules).map_err(|error| error.to_string())?;
        let waiting = (0..policer.classes()).map(|_| VecDeque::new()).collect();
        Ok(Self {
            policer,
            port,
            overload,
            start: Instant::now(),
            parser: RequestParser::new(HeadLimits::default()),
            waiting,
            waiting_count: 0,
            denied: 0,
        })
    }

    /// What the rules say of a request, and its class: the better one of those that its client and its URL have.
    fn decide(&mut self, request: &Bundle, now: Instant) -> Option<(Verdict, Class)> {
        let bytes = request.head();
        self.parser.reset();
        let Ok(Progress::Complete { .. }) = self.parser.parse(bytes) else { return None };
        let head = self.parser.head(bytes);
        let path = head.target.split(|&byte| byte == b'?').next().unwrap_or_default();
        let source = request.peer.ip().to_canonical();
        // Only the port of the destination is known; rules with an address are refused at the start.
        let destination: IpAddr = match source {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let now_ns = u64::try_from(now.saturating_duration_since(self.start).as_nanos()).unwrap_or(u64::MAX);
        self.policer.set_overload(self.waiting_count >= self.overload);
        let connection = self.policer.on_connect(source, destination, self.port, now_ns);
        if connection.verdict != Verdict::Continue {
            return Some((connection.verdict, connection.class));
        }
        let asked = self.policer.on_request(path, head.fields.get(FieldId::Cookie), now_ns);
        Some((asked.verdict, asked.class.min(connection.class)))
    }
}

impl Filter for PoliceFilter {
    fn name(&self) -> &'static str {
        "police"
    }

    fn arrive(&mut self, request: &mut Bundle, now: Instant) -> Disposition {
        let Some((verdict, class)) = self.decide(request, now) else { return Disposition::Refuse(400, "") };
        match verdict {
            Verdict::Continue => {
                let lowest = self.waiting.len().saturating_sub(1);
                self.waiting[usize::from(class).min(lowest)].push_back(request.id);
                self.waiting_count += 1;
                return Disposition::Hold;
            }
            Verdict::Refuse => self.denied += 1,
            // A request that arrived whole cannot be left unacknowledged: what is to be dropped is reset.
            _ => {
                self.denied += 1;
                return Disposition::Reset;
            }
        }
        Disposition::Refuse(503, "Retry-After: 1\r\n")
    }

    fn pick(&mut self, _now: Instant) -> Option<Id> {
        let id = self.waiting.iter_mut().find_map(VecDeque::pop_front)?;
        self.waiting_count -= 1;
        Some(id)
    }

    fn holds(&self) -> bool {
        true
    }

    fn samples(&self) -> Vec<Sample> {
        let help = "Requests refused or reset: over a rule's rate, or forbidden by it.";
        vec![Sample { name: "denied_total", help, kind: Kind::Counter, value: self.denied }]
    }
}

pub(super) fn check(arguments: &Arguments) -> Result<PoliceFilter, FilterError> {
    arguments.number::<usize>("window")?;
    let (port, overload) = (arguments.positive("port")?, arguments.number("overload")?);
    let file = arguments.text("rules");
    let text = if file.is_empty() { String::new() } else { super::read_file("rules", file)? };
    let filter = rules(&text).and_then(|rules| PoliceFilter::new(&rules, port, overload));
    Ok(filter.map_err(|reason| ArgumentError::File { file: file.to_owned(), reason })?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::filters::testing::request;
    use std::time::Duration;

    const RULES: &str = r#"
[[listen]]
address = "0.0.0.0:80"
[[request]]
path = "/cgi-bin/*"
rate = 2
burst = 3
priority = 3
action = "refuse"
[[request]]
cookie = { tier = "gold" }
priority = 1
[[request]]
path = "*noaccess*"
action = "reset"
[[request]]
path = "/busy"
rate = 0.001
burst = 1
when = "overload"
priority = 2
[[connection]]
source = "192.0.2.0/24"
rate = 1
"#;

    fn filter(overload: usize) -> PoliceFilter {
        PoliceFilter::new(&rules(RULES).unwrap(), 80, overload).unwrap()
    }

    fn arrive(
        filter: &mut PoliceFilter,
        slot: u32,
        peer: &str,
        path: &str,
        cookie: &str,
        now: Instant,
    ) -> Disposition {
        let head = format!("GET {path} HTTP/1.1\r\nHost: a\r\nCookie: {cookie}\r\n\r\n");
        filter.arrive(&mut request(slot, peer, &head), now)
    }

    #[test]
    fn a_rate_admits_its_burst_and_then_what_comes_back_with_time() {
        let mut filter = filter(1000);
        let now = Instant::now();
        let mut cgi = |now| arrive(&mut filter, 1, "10.0.0.1", "/cgi-bin/a?b=c", "", now);
        let refused = Disposition::Refuse(503, "Retry-After: 1\r\n");
        assert_eq!(
            [(); 4].map(|()| cgi(now)),
            [Disposition::Hold, Disposition::Hold, Disposition::Hold, refused.clone()]
        );
        assert_eq!(cgi(now + Duration::from_millis(400)), refused);
        assert_eq!(cgi(now + Duration::from_millis(600)), Disposition::Hold);
        let mut ranged = |peer| arrive(&mut filter, 1, peer, "/", "", now);
        assert_eq!(
            [ranged("192.0.2.1"), ranged("192.0.2.77"), ranged("192.0.3.1")],
            [Disposition::Hold, Disposition::Reset, Disposition::Hold]
        );
    }

    #[test]
    fn the_highest_priority_is_served_first_and_equals_in_order() {
        let mut filter = filter(1000);
        let now = Instant::now();
        let asked = [
            ("/cgi-bin/x", ""),
            ("/busy", ""),
            ("/b", ""),
            ("/c", "x=y; tier=gold"),
            ("/cgi-bin/y", "tier=gold"),
        ];
        for (slot, (path, cookie)) in (0..).zip(asked) {
            assert_eq!(arrive(&mut filter, slot, "10.0.0.1", path, cookie, now), Disposition::Hold);
        }
        // What no rule gives a priority is in the lowest class, with `/cgi-bin/x`.
        let order: Vec<u32> = std::iter::from_fn(|| filter.pick(now)).map(|id| id.slot).collect();
        assert_eq!(order, [3, 4, 1, 0, 2]);
        assert_eq!(arrive(&mut filter, 9, "10.0.0.1", "/a/noaccess.html", "", now), Disposition::Reset);
    }

    #[test]
    fn a_rule_for_overload_acts_while_many_wait() {
        let mut filter = filter(2);
        let now = Instant::now();
        let mut busy = |slot| arrive(&mut filter, slot, "10.0.0.1", "/busy", "", now);
        let got = [busy(1), busy(2), busy(3), busy(4)];
        assert_eq!(got, [Disposition::Hold, Disposition::Hold, Disposition::Hold, Disposition::Reset]);
        while filter.pick(now).is_some() {}
        assert_eq!(arrive(&mut filter, 5, "10.0.0.1", "/busy", "", now), Disposition::Hold);
    }

    #[test]
    fn rules_that_cannot_be_meant_are_refused_with_their_place() {
        let wrong = |text: &str| rules(text).unwrap_err();
        assert!(wrong("[[request]]\npaht = \"/\"\n").contains("paht"));
        assert!(wrong("[[request]]\npath = \"/\"\nrate = -1\n").starts_with("[[request]] number 1: rate"));
        assert!(wrong("[[request]]\nrate = 1\n").contains("at least one of path and cookie"));
        assert!(
            wrong("[[connection]]\nsource = \"10.0.0.0/33\"\n").contains("[[connection]] number 1: source")
        );
        assert!(wrong("[[connection]]\ndestination = \"10.0.0.1:80\"\n").contains("port only"));
        assert!(wrong("[[request]]\npath = \"/\"\npriority = 9\n").contains("between 1 and 8"));
    }
}
