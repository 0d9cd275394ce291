//! `police`: token buckets and priorities per URL, cookie and address range, from the `[[request]]` tables of a
//! configuration file.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::time::Instant;

use serde::Deserialize;
use tidegate_core::IpPrefix;
use tidegate_core::metrics::{Kind, Sample};
use tidegate_http::{FieldId, HeadLimits, Progress, RequestParser};

use crate::arguments::{Argument, ArgumentError, Arguments};
use crate::host::{self, Disposition, Filter, WINDOW};
use crate::neighbours::FilterError;
use crate::wire::{Bundle, Id};

pub(super) const ARGUMENTS: &[Argument] = &[
    Argument {
        key: "rules",
        default: "",
        help: "configuration file with [[request]] tables; without it, nothing is policed",
    },
    WINDOW,
];

/// Priority of a request for which no rule says one; 1 is served first.
const USUAL: u8 = 2;

/// What happens to a request that exceeds its rule's rate, or matches a rule without one.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// 503 with Retry-After.
    #[default]
    Refuse,
    /// The connection ends without an answer.
    Reset,
    /// As [`Action::Reset`]: a request that arrived whole cannot be left unacknowledged.
    Drop,
}

/// One `[[request]]` table.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Path in which `*` stands for any bytes; absent: every path.
    pub path: Option<String>,
    /// Cookies that the request must bring.
    #[serde(default)]
    pub cookie: BTreeMap<String, String>,
    /// Range that the client's address must be in, as `ADDRESS/LENGTH`.
    pub source: Option<String>,
    /// Requests per second; absent: unlimited, or forbidden if there is an action.
    pub rate: Option<f64>,
    /// Requests that may come at once; absent: as many as come in a second.
    pub burst: Option<f64>,
    /// 1 is served first.
    pub priority: Option<u8>,
    /// What happens beyond the rate.
    pub action: Option<Action>,
}

/// A bucket from which each request takes a token; tokens come back with time. No clock.
#[derive(Clone, Copy, Debug)]
pub struct TokenBucket {
    rate_per_s: f64,
    burst: f64,
    tokens: f64,
    filled: Option<Instant>,
}

impl TokenBucket {
    /// A full bucket of `burst` tokens that fills at `rate_per_s`.
    pub fn new(rate_per_s: f64, burst: f64) -> Self {
        Self { rate_per_s, burst, tokens: burst, filled: None }
    }

    /// Takes a token if there is one.
    pub fn take(&mut self, now: Instant) -> bool {
        let passed = self.filled.map_or(0.0, |filled| now.saturating_duration_since(filled).as_secs_f64());
        self.filled = Some(now);
        self.tokens = (self.tokens + passed * self.rate_per_s).min(self.burst);
        let is_there = self.tokens >= 1.0;
        if is_there {
            self.tokens -= 1.0;
        }
        is_there
    }
}

#[derive(Debug)]
struct Policed {
    rule: Rule,
    source: Option<IpPrefix>,
    bucket: Option<TokenBucket>,
}

impl Policed {
    fn new(rule: Rule) -> Result<Self, String> {
        let source = rule.source.as_deref().map(str::parse::<IpPrefix>).transpose();
        let source =
            source.map_err(|error| format!("source {:?}: {error}", rule.source.as_deref().unwrap_or("")))?;
        let sound = |value: f64| value.is_finite() && value > 0.0;
        if !rule.rate.is_none_or(sound) || !rule.burst.is_none_or(|burst| sound(burst) && burst >= 1.0) {
            return Err("rate and burst are numbers above 0, burst at least 1".to_owned());
        }
        let bucket = rule.rate.map(|rate| TokenBucket::new(rate, rule.burst.unwrap_or(rate.max(1.0))));
        Ok(Self { rule, source, bucket })
    }

    fn matches(&self, asked: &Asked<'_>) -> bool {
        self.source.as_ref().is_none_or(|source| source.contains(asked.address))
            && self.rule.path.as_deref().is_none_or(|pattern| matches(pattern.as_bytes(), asked.path))
            && self.rule.cookie.iter().all(|(name, value)| asked.has_cookie(name, value))
    }
}

/// What rules look at.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'r> {
    /// The client's address.
    pub address: IpAddr,
    /// The target without its query.
    pub path: &'r [u8],
    /// The `Cookie` field.
    pub cookies: &'r [u8],
}

impl Asked<'_> {
    fn has_cookie(&self, name: &str, value: &str) -> bool {
        self.cookies.split(|&byte| byte == b';').any(|pair| {
            let pair = pair.trim_ascii();
            pair.strip_prefix(name.as_bytes()).and_then(|rest| rest.strip_prefix(b"="))
                == Some(value.as_bytes())
        })
    }
}

/// Whether `pattern`, in which `*` stands for any bytes, describes all of `text`. Linear in the text for each `*`.
fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        if pattern.get(p) == Some(&b'*') {
            star = Some((p, t));
            p += 1;
        } else if pattern.get(p) == Some(&text[t]) {
            p += 1;
            t += 1;
        } else if let Some((at, from)) = star {
            star = Some((at, from + 1));
            p = at + 1;
            t = from + 1;
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|&byte| byte == b'*')
}

/// What the rules say of a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Decision {
    /// Serve it; requests with lower numbers come first.
    Serve(u8),
    /// It exceeds its rate, or is forbidden.
    Deny(Action),
}

/// The rules with their buckets. No I/O, no clock.
#[derive(Debug, Default)]
pub struct Police {
    rules: Vec<Policed>,
}

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    request: Vec<Rule>,
}

impl Police {
    /// Reads the `[[request]]` tables of a configuration; its other tables are not looked at.
    ///
    /// # Errors
    /// What is wrong, with its place.
    pub fn from_toml(text: &str) -> Result<Self, String> {
        let file: File = toml::from_str(text).map_err(|error| error.to_string())?;
        let rules = file.request.into_iter().enumerate().map(|(at, rule)| {
            Policed::new(rule).map_err(|error| format!("[[request]] number {}: {error}", at + 1))
        });
        Ok(Self { rules: rules.collect::<Result<_, _>>()? })
    }

    /// Every rule that matches must admit the request; the first that says a priority decides on that.
    pub fn decide(&mut self, asked: &Asked<'_>, now: Instant) -> Decision {
        let mut priority = None;
        for policed in self.rules.iter_mut().filter(|policed| policed.matches(asked)) {
            let denied = match &mut policed.bucket {
                Some(bucket) => !bucket.take(now),
                None => policed.rule.action.is_some(),
            };
            if denied {
                return Decision::Deny(policed.rule.action.unwrap_or_default());
            }
            priority = priority.or(policed.rule.priority);
        }
        Decision::Serve(priority.unwrap_or(USUAL))
    }
}

/// The filter around [`Police`].
pub struct PoliceFilter {
    police: Police,
    parser: RequestParser,
    waiting: BTreeMap<u8, VecDeque<Id>>,
    denied: u64,
}

impl PoliceFilter {
    /// Polices by these rules.
    pub fn new(police: Police) -> Self {
        Self {
            police,
            parser: RequestParser::new(HeadLimits::default()),
            waiting: BTreeMap::new(),
            denied: 0,
        }
    }

    fn decide(&mut self, request: &Bundle, now: Instant) -> Option<Decision> {
        let bytes = request.head();
        self.parser.reset();
        let Ok(Progress::Complete { .. }) = self.parser.parse(bytes) else { return None };
        let head = self.parser.head(bytes);
        let path = head.target.split(|&byte| byte == b'?').next().unwrap_or_default();
        let cookies = head.fields.get(FieldId::Cookie).unwrap_or_default();
        let address = request.peer.ip().to_canonical();
        Some(self.police.decide(&Asked { address, path, cookies }, now))
    }
}

impl Filter for PoliceFilter {
    fn name(&self) -> &'static str {
        "police"
    }

    fn arrive(&mut self, request: &mut Bundle, now: Instant) -> Disposition {
        match self.decide(request, now) {
            Some(Decision::Serve(priority)) => {
                self.waiting.entry(priority).or_default().push_back(request.id);
                Disposition::Hold
            }
            Some(Decision::Deny(action)) => {
                self.denied += 1;
                match action {
                    Action::Refuse => Disposition::Refuse(503, "Retry-After: 1\r\n"),
                    Action::Reset | Action::Drop => Disposition::Reset,
                }
            }
            None => Disposition::Refuse(400, ""),
        }
    }

    fn pick(&mut self, _now: Instant) -> Option<Id> {
        let mut first = self.waiting.first_entry()?;
        let id = first.get_mut().pop_front();
        if first.get().is_empty() {
            first.remove();
        }
        id
    }

    fn holds(&self) -> bool {
        true
    }

    fn samples(&self) -> Vec<Sample> {
        let help = "Requests refused or reset: over a rule's rate, or forbidden by it.";
        vec![Sample { name: "denied_total", help, kind: Kind::Counter, value: self.denied }]
    }
}

pub(super) fn run(arguments: &Arguments) -> Result<(), FilterError> {
    host::run(check(arguments)?, arguments)
}

pub(super) fn check(arguments: &Arguments) -> Result<PoliceFilter, FilterError> {
    arguments.number::<usize>("window")?;
    let file = arguments.text("rules");
    let text = if file.is_empty() { String::new() } else { super::read_file("rules", file)? };
    let police =
        Police::from_toml(&text).map_err(|reason| ArgumentError::File { file: file.to_owned(), reason })?;
    Ok(PoliceFilter::new(police))
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
[[request]]
cookie = { tier = "gold" }
priority = 1
[[request]]
path = "*noaccess*"
action = "reset"
[[request]]
source = "192.0.2.0/24"
rate = 1
"#;

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
        let mut filter = PoliceFilter::new(Police::from_toml(RULES).unwrap());
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
            [Disposition::Hold, refused, Disposition::Hold]
        );
    }

    #[test]
    fn the_highest_priority_is_served_first_and_equals_in_order() {
        let mut filter = PoliceFilter::new(Police::from_toml(RULES).unwrap());
        let now = Instant::now();
        let asked = [
            ("/cgi-bin/x", ""),
            ("/a", ""),
            ("/b", ""),
            ("/c", "x=y; tier=gold"),
            ("/cgi-bin/y", "tier=gold"),
        ];
        for (slot, (path, cookie)) in (0..).zip(asked) {
            assert_eq!(arrive(&mut filter, slot, "10.0.0.1", path, cookie, now), Disposition::Hold);
        }
        let order: Vec<u32> = std::iter::from_fn(|| filter.pick(now)).map(|id| id.slot).collect();
        assert_eq!(order, [3, 1, 2, 0, 4]);
        assert_eq!(arrive(&mut filter, 9, "10.0.0.1", "/a/noaccess.html", "", now), Disposition::Reset);
    }

    #[test]
    fn rules_that_cannot_be_meant_are_refused_with_their_place() {
        let wrong = |text: &str| Police::from_toml(text).unwrap_err();
        assert!(wrong("[[request]]\npaht = \"/\"\n").contains("paht"));
        assert!(wrong("[[request]]\nrate = 0\n").starts_with("[[request]] number 1:"));
        assert!(wrong("[[request]]\nsource = \"10.0.0.0/33\"\n").contains("10.0.0.0/33"));
    }

    #[test]
    fn a_star_stands_for_any_bytes() {
        for (pattern, text, expected) in [
            ("*noaccess*", "/a/noaccess/b", true),
            ("/a*c", "/abcbc", true),
            ("/a*c", "/abcb", false),
            ("*", "", true),
            ("/a", "/ab", false),
        ] {
            assert_eq!(matches(pattern.as_bytes(), text.as_bytes()), expected, "{pattern} {text}");
        }
    }
}
