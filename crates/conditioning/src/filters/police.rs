//! `police`: token buckets and priorities per URL, cookie and address range, by the same rules, tables and buckets as
//! the gate: the `[[request]]` and `[[connection]]` tables of a configuration file.

mod file;

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Instant;

use tidegate_core::Verdict;
use tidegate_core::metrics::{Kind, Sample};
use tidegate_http::{FieldId, HeadLimits, Progress, RequestParser};
use tidegate_policy::{Class, Policer, RuleSet};

use crate::arguments::{Argument, ArgumentError, Arguments};
use crate::host::{Disposition, Filter, WINDOW};
use crate::neighbours::FilterError;
use crate::wire::{Bundle, Id};

pub use file::{TOP_LEVEL, rules};

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
    let rules = match file {
        "" => RuleSet::default(),
        file => rules(file, &super::read_file("rules", file)?).map_err(ArgumentError::Places)?,
    };
    let filter = PoliceFilter::new(&rules, port, overload);
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
        PoliceFilter::new(&rules("t.toml", RULES).unwrap(), 80, overload).unwrap()
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
    fn rules_that_cannot_be_meant_are_refused_with_their_places_all_at_once() {
        let text = r#"
[[request]]
path = "/"
acton = "reset"
rate = -2

[[request]]
rate = 1

[[request]]
path = "/a*b"
when = "overlaod"
rate = 0.0001
burst = 0
priority = 9
cookie = { a = "b", c = "d" }

[[connection]]
path = "/"
source = "10.0.0.0/33"

[[connection]]
destination = "10.0.0.1:80"
"#;
        let wanted = [
            "t.toml:4:1: request.acton: unknown key in [[request]], expected one of path, cookie, rate, burst, priority, \
             action, when; did you mean \"action\"?",
            "t.toml:5:8: request.rate: expected a number from 0 to 1000000, not -2",
            "t.toml:7:1: request: expected at least one of path and cookie",
            "t.toml:11:8: request.path: expected a path",
            "t.toml:12:8: request.when: expected \"always\" or \"overload\", not \"overlaod\"; did you mean \"overload\"?",
            "t.toml:13:8: request.rate: rate 0.0001 is not between 0.001 and 1000000 per second",
            "t.toml:14:9: request.burst: expected a whole number from 1 to 1000000, not 0",
            "t.toml:15:12: request.priority: expected a whole number from 1 to 8, not 9",
            "t.toml:16:10: request.cookie: expected one cookie",
            "t.toml:19:1: connection.path: unknown key in [[connection]]",
            "t.toml:20:10: connection.source: expected an address or a prefix, not \"10.0.0.0/33\"",
            "t.toml:23:15: connection.destination: expected a port only",
        ];
        let errors = rules("t.toml", text).unwrap_err();
        let lines: Vec<_> = errors.lines().collect();
        assert_eq!(lines.len(), wanted.len(), "{errors}");
        for (line, wanted) in lines.iter().zip(wanted) {
            assert!(line.starts_with(wanted), "{line}");
        }
    }

    #[test]
    fn a_file_without_a_rule_or_with_a_misspelt_table_is_refused() {
        let wrong = |text: &str| rules("t.toml", text).unwrap_err();
        let misspelt = wrong("[cache]\nmemory = \"1GiB\"\n[[requst]]\npath = \"/\"\n");
        assert!(misspelt.starts_with("t.toml:3:3: requst: unknown key in the file"), "{misspelt}");
        assert!(misspelt.ends_with("did you mean \"request\"?"), "{misspelt}");
        assert!(
            wrong("[[listen]]\naddress = \":80\"\n").starts_with("t.toml: expected at least one [[request]]")
        );
        assert!(wrong("[request]\npath = \"/\"\n").contains("expected [[request]] tables"));
        assert!(wrong("[[request]]\npath = /\n").starts_with("t.toml:2:"));
    }

    #[test]
    fn a_rate_of_0_is_no_limit() {
        let rules = rules("t.toml", "[[request]]\npath = \"/\"\nrate = 0\npriority = 0x2\n").unwrap();
        assert_eq!((rules.requests[0].limit, rules.requests[0].class), (None, Some(1)));
    }
}
