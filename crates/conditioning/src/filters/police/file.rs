//! The rules of a configuration file: its `[[request]]` and `[[connection]]` tables, as far as a filter can enforce
//! them. Everything that is wrong is reported, each with its place, as `tidegate check` does.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::str::FromStr;

use tidegate_core::IpPrefix;
use tidegate_policy::{
    Action, Class, ConnectionRule, CookiePattern, Destination, MAX_CLASSES, PathPattern, Profile,
    RequestRule, RuleSet, When,
};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// The tables and keys that a configuration file may begin with: one file may be for `tidegate run` as well. A test of
/// that command's keys fails when there are others.
pub const TOP_LEVEL: &[&str] = &[
    "workers",
    "personality",
    "trusted_proxies",
    "pseudonym",
    "https_only",
    "listen",
    "certificate",
    "acme",
    "admin",
    "upstream",
    "route",
    "cache",
    "compression",
    "limits",
    "log",
    "connection",
    "request",
    "block",
    "defence",
    "classifier",
    "exempt",
    "filter",
    "icap",
    "gate",
    "adapt",
    "stress",
];
const REQUEST: &[&str] = &["path", "cookie", "rate", "burst", "priority", "action", "when"];
const CONNECTION: &[&str] = &["destination", "source", "rate", "burst", "priority", "when"];

/// Reads the `[[request]]` and `[[connection]]` tables of a configuration; what its other tables say is not looked at.
///
/// # Errors
/// What is wrong, a line each: `FILE:LINE:COLUMN: request.KEY: what was expected`.
pub fn rules(file: &str, text: &str) -> Result<RuleSet, String> {
    let mut report = Report { text, errors: Vec::new() };
    let (document, damage) = DeTable::parse_recoverable(text);
    // One is enough of what is no TOML: a file that is something else would have one in every line.
    if let Some(error) = damage.first() {
        let reason = error.message().split_whitespace().collect::<Vec<_>>().join(" ");
        report.error(error.span().map_or(0, |span| span.start), reason);
    }
    let mut rules = RuleSet::default();
    // What follows damage may not be what its writer meant.
    if damage.is_empty() {
        let document = document.get_ref();
        known_keys(document, TOP_LEVEL, "", "in the file", &mut report);
        rules.requests =
            tables(document, "request", REQUEST, &mut report, |table, report| table.request(report));
        rules.connections =
            tables(document, "connection", CONNECTION, &mut report, |table, report| table.connection(report));
        if report.errors.is_empty() && rules.requests.is_empty() && rules.connections.is_empty() {
            return Err(format!(
                "{file}: expected at least one [[request]] or [[connection]] table; there is no rule in it"
            ));
        }
    }
    if report.errors.is_empty() { Ok(rules) } else { Err(report.lines(file)) }
}

struct Report<'t> {
    text: &'t str,
    errors: Vec<(usize, String)>,
}

impl Report<'_> {
    fn error(&mut self, offset: usize, message: String) {
        self.errors.push((offset, message));
    }

    fn lines(mut self, file: &str) -> String {
        self.errors.sort();
        let lines = self.errors.iter().map(|(offset, message)| {
            let before = self.text.get(..*offset).unwrap_or(self.text);
            let line = before.bytes().filter(|&byte| byte == b'\n').count() + 1;
            let column = before.rsplit('\n').next().unwrap_or("").chars().count() + 1;
            format!("{file}:{line}:{column}: {message}")
        });
        lines.collect::<Vec<_>>().join("\n")
    }
}

/// Reports the keys that are none of `known`; `path` is what stands before a key's name in messages.
fn known_keys(table: &DeTable<'_>, known: &[&str], path: &str, whose: &str, report: &mut Report<'_>) {
    for (name, _) in table {
        let written = name.get_ref().as_ref();
        if !known.contains(&written) {
            let message =
                format!("{path}{written}: unknown key {whose}, expected one of {}", known.join(", "));
            report.error(name.span().start, message + &meant(written, known));
        }
    }
}

/// `; did you mean "path"?` for what is near enough to be meant.
fn meant(written: &str, known: &[&str]) -> String {
    let near = known.iter().map(|known| (strsim::damerau_levenshtein(written, known), known));
    let nearest = near.filter(|(distance, known)| *distance <= (known.len() / 3).max(2)).min();
    nearest.map_or(String::new(), |(_, known)| format!("; did you mean {known:?}?"))
}

fn tables<R>(
    document: &DeTable<'_>,
    name: &'static str,
    known: &[&str],
    report: &mut Report<'_>,
    read: fn(&Table<'_>, &mut Report<'_>) -> Option<R>,
) -> Vec<R> {
    let Some(value) = document.get(name) else { return Vec::new() };
    let wrong = || format!("{name}: expected [[{name}]] tables");
    let DeValue::Array(array) = value.get_ref() else {
        report.error(value.span().start, wrong());
        return Vec::new();
    };
    let mut rules = Vec::new();
    for item in array {
        let offset = item.span().start;
        let DeValue::Table(keys) = item.get_ref() else {
            report.error(offset, wrong());
            continue;
        };
        known_keys(keys, known, &format!("{name}."), &format!("in [[{name}]]"), report);
        let before = report.errors.len();
        let rule = read(&Table { name, keys, offset }, report);
        rules.extend(rule.filter(|_| report.errors.len() == before));
    }
    rules
}

/// One table, and where it begins.
struct Table<'d> {
    name: &'static str,
    keys: &'d DeTable<'d>,
    offset: usize,
}

impl Table<'_> {
    fn request(&self, report: &mut Report<'_>) -> Option<RequestRule> {
        if !["path", "cookie"].iter().any(|key| self.keys.contains_key(*key)) {
            report.error(self.offset, "request: expected at least one of path and cookie".to_owned());
            return None;
        }
        let path = match self.keys.contains_key("path") {
            true => self.parsed::<PathPattern>("path", "a path such as \"/a\", \"/a*\" or \"*.cgi\"", report),
            false => "*".parse().ok(),
        };
        let rule = RequestRule {
            path: path.clone().unwrap_or(PathPattern::Any),
            cookie: self.cookie(report),
            limit: self.limit(report),
            when: self.when(report),
            action: self.choice(
                "action",
                &[("drop", Action::Drop), ("reset", Action::Reset), ("refuse", Action::Refuse)],
                report,
            ),
            class: self.class(report),
        };
        path.map(|_| rule)
    }

    fn connection(&self, report: &mut Report<'_>) -> Option<ConnectionRule> {
        let expected = "a destination such as \"*:80\" or \"*:8000-8099\"";
        let every = self.text("destination", expected, report).is_none_or(|(_, text)| text == "*");
        let destination = match every {
            true => "*:*".parse().ok(),
            false => self.parsed::<Destination>("destination", expected, report),
        };
        if let (Some(value), Some(Destination { address: Some(_), .. })) =
            (self.keys.get("destination"), &destination)
        {
            let message =
                "connection.destination: expected a port only, such as \"*:80\"; a filter knows no address";
            report.error(value.span().start, message.to_owned());
        }
        Some(ConnectionRule {
            source: self.parsed::<IpPrefix>("source", "an address or a prefix", report),
            limit: self.limit(report),
            when: self.when(report),
            class: self.class(report),
            destination: destination?,
        })
    }

    /// `None` is unlimited.
    fn limit(&self, report: &mut Report<'_>) -> Option<Profile> {
        let burst = self.whole_number("burst", Profile::MAX_BURST, report);
        let rate = self.number("rate", 0.0, Profile::MAX_RATE_PER_S, report);
        let (offset, rate) = rate.filter(|(_, rate)| *rate > 0.0)?;
        // One second's worth.
        let burst = burst.unwrap_or(rate.ceil().max(1.0) as u32);
        Profile::new(rate, burst)
            .map_err(|error| report.error(offset, format!("{}.rate: {error}", self.name)))
            .ok()
    }

    fn class(&self, report: &mut Report<'_>) -> Option<Class> {
        self.whole_number("priority", MAX_CLASSES as u32, report).map(|priority| priority as Class - 1)
    }

    fn when(&self, report: &mut Report<'_>) -> When {
        let names = [("always", When::Always), ("overload", When::Overload)];
        self.choice("when", &names, report).unwrap_or(When::Always)
    }

    fn cookie(&self, report: &mut Report<'_>) -> Option<CookiePattern> {
        let value = self.keys.get("cookie")?;
        let expected = "one cookie, such as { tier = \"gold\" }";
        let words = match value.get_ref() {
            DeValue::Table(table) => table.iter().map(word).collect::<Option<BTreeMap<_, _>>>(),
            _ => None,
        };
        let words = words.unwrap_or_default().into_iter().collect::<Vec<_>>();
        let [(name, text)] = words.as_slice() else {
            self.wrong("cookie", value, expected, report);
            return None;
        };
        CookiePattern::new(name, text)
            .map_err(|error| report.error(value.span().start, format!("request.cookie: {error}")))
            .ok()
    }

    fn text(&self, key: &str, expected: &str, report: &mut Report<'_>) -> Option<(usize, String)> {
        let value = self.keys.get(key)?;
        let DeValue::String(text) = value.get_ref() else {
            self.wrong(key, value, expected, report);
            return None;
        };
        Some((value.span().start, text.to_string()))
    }

    fn parsed<T: FromStr<Err: Display>>(
        &self,
        key: &str,
        expected: &str,
        report: &mut Report<'_>,
    ) -> Option<T> {
        let (offset, text) = self.text(key, expected, report)?;
        let wrong = |error| format!("{}.{key}: expected {expected}, not {text:?}: {error}", self.name);
        text.parse().map_err(|error: T::Err| report.error(offset, wrong(error))).ok()
    }

    fn choice<T: Copy>(&self, key: &str, values: &[(&str, T)], report: &mut Report<'_>) -> Option<T> {
        let names: Vec<_> = values.iter().map(|(name, _)| *name).collect();
        let expected = names.iter().map(|name| format!("{name:?}")).collect::<Vec<_>>().join(" or ");
        let (offset, text) = self.text(key, &expected, report)?;
        let chosen = values.iter().find(|(name, _)| *name == text).map(|(_, value)| *value);
        if chosen.is_none() {
            let message = format!("{}.{key}: expected {expected}, not {text:?}", self.name);
            report.error(offset, message + &meant(&text, &names));
        }
        chosen
    }

    /// A number within these bounds.
    fn number(&self, key: &str, least: f64, most: u32, report: &mut Report<'_>) -> Option<(usize, f64)> {
        let value = self.keys.get(key)?;
        let number = match value.get_ref() {
            DeValue::Float(number) => number.as_str().parse().ok(),
            _ => whole(value).map(|number| number as f64),
        };
        let number = number.filter(|number| (least..=most.into()).contains(number));
        if number.is_none() {
            self.wrong(key, value, &format!("a number from {least} to {most}"), report);
        }
        number.map(|number| (value.span().start, number))
    }

    /// A whole number from 1 to `most`.
    fn whole_number(&self, key: &str, most: u32, report: &mut Report<'_>) -> Option<u32> {
        let value = self.keys.get(key)?;
        let number = whole(value).and_then(|number| u32::try_from(number).ok());
        let number = number.filter(|number| (1..=most).contains(number));
        if number.is_none() {
            self.wrong(key, value, &format!("a whole number from 1 to {most}"), report);
        }
        number
    }

    fn wrong(&self, key: &str, value: &Spanned<DeValue<'_>>, expected: &str, report: &mut Report<'_>) {
        let found = match value.get_ref() {
            DeValue::String(text) => format!("{text:?}"),
            DeValue::Integer(number) => number.to_string(),
            DeValue::Float(number) => number.as_str().to_owned(),
            DeValue::Boolean(flag) => flag.to_string(),
            DeValue::Datetime(date) => format!("the date {date}"),
            DeValue::Array(_) => "a list".to_owned(),
            DeValue::Table(_) => "a table".to_owned(),
        };
        report.error(value.span().start, format!("{}.{key}: expected {expected}, not {found}", self.name));
    }
}

fn whole(value: &Spanned<DeValue<'_>>) -> Option<i64> {
    let DeValue::Integer(number) = value.get_ref() else { return None };
    i64::from_str_radix(number.as_str(), number.radix()).ok()
}

fn word(
    (name, value): (&Spanned<std::borrow::Cow<'_, str>>, &Spanned<DeValue<'_>>),
) -> Option<(String, String)> {
    match value.get_ref() {
        DeValue::String(text) => Some((name.get_ref().to_string(), text.to_string())),
        _ => None,
    }
}
