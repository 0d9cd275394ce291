//! From checked values to rules and how they are enforced.

use std::time::Duration;

use tidegate_core::IpPrefix;
use tidegate_gate::{BlockSources, Options, Wanted};
use tidegate_http::normalize::Personality;
use tidegate_policy::{
    Action, Class, ConnectionRule, CookiePattern, Destination, Goals, PathPattern, Policer, PortRange,
    Profile, RequestRule, RequestTable, RuleSet, Stress, When,
};

use super::kind::destination;
use super::report::Report;
use super::routes::check_path;
use super::walk::{At, Values};

/// Rules, and how they are enforced.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Gate {
    /// Without ports: those are the listeners'.
    pub rules: RuleSet,
    /// Whether kernel programs are wanted where they can be had.
    pub kernel: bool,
    /// Where to attach them; `None`: to what the listeners' addresses are on.
    pub interfaces: Option<Vec<String>>,
    /// Where cleartext HTTP is spoken; `None`: on the listeners' ports.
    pub http_ports: Option<Vec<PortRange>>,
    pub options: Options,
    pub blocks: BlockSources,
    /// Shut windows of a client after which it is blocked; `None`: never.
    pub shut_windows: Option<u32>,
    /// Whom that does not hold for: trusted proxies, and who is exempt.
    pub spared: Vec<IpPrefix>,
    /// The life of a dynamic rule that does not say its own.
    pub block_for: Duration,
    /// What the adaptation agent is to achieve, if it is wanted, and what counts as overload by itself.
    pub wanted: Wanted,
    /// Whether the file asks for anything that has to be enforced.
    pub is_configured: bool,
}

/// Builds rules. They are fit for use only if the report holds no error afterwards.
pub(super) fn build(file: &Values, personality: Personality, report: &mut Report<'_>) -> Gate {
    let connections: Vec<ConnectionRule> =
        file.tables("connection").iter().filter_map(|section| connection(section, report)).collect();
    let mut requests: Vec<RequestRule> =
        file.tables("request").iter().filter_map(|section| request(section, personality, report)).collect();
    if personality.folds_case() {
        requests.iter_mut().for_each(|rule| rule.path = rule.path.to_ascii_lowercase());
    }
    let rules = RuleSet { connections, requests, ..RuleSet::default() };
    if let (Err(error), Some(first)) = (Policer::new(&rules), file.tables("connection").first()) {
        report.error(first.offset, format!("connection: {error}"), None);
    }
    if rules.requests.len() > RequestTable::MAX_RULES {
        let offset = file.tables("request").first().map_or(0, |section| section.offset);
        let message = format!("request: expected at most {} tables", RequestTable::MAX_RULES);
        report.error(offset, message, Some("join paths by prefixes".into()));
    }
    let mut gate = Gate { rules, ..Gate::default() };
    if let Some(section) = file.table("block") {
        let files = section.paths("files");
        for At { offset, value: path } in &files {
            // It is read again when it changes: neither a start nor a reload fails for it.
            if let Err(error) = tidegate_gate::check_list(path) {
                report.warn(*offset, format!("block.files: {}: {error}", path.display()));
            }
        }
        let files = files.into_iter().map(|at| at.value).collect();
        gate.blocks = BlockSources { directory: section.path("path"), files };
        let windows = section.integer("shut_windows").and_then(|windows| u32::try_from(windows).ok());
        gate.shut_windows = windows.filter(|windows| *windows > 0);
        gate.block_for = section.duration("for").unwrap_or_default();
    }
    if let Some(section) = file.table("gate") {
        gate.kernel = section.text("mechanism").as_deref() != Some("user-space");
        let names: Vec<String> = section.texts("interfaces").into_iter().map(|at| at.value).collect();
        gate.interfaces = section.has("interfaces").then_some(names);
        let ports = section.texts("http_ports").into_iter().filter_map(|at| at.value.parse().ok()).collect();
        gate.http_ports = section.has("http_ports").then_some(ports);
        gate.options.reset_penalty = section.duration("reset_penalty").unwrap_or_default();
        let depth = section.integer("hold_depth").and_then(|depth| u32::try_from(depth).ok());
        gate.options.hold_depth = depth.filter(|depth| *depth > 0);
    }
    gate.wanted.goals = file.table("adapt").and_then(|section| {
        let floor = section.number("floor").unwrap_or_default() / 100.0;
        Some(Goals { latency: section.duration("latency")?, floor })
    });
    if let Some(section) = file.table("stress") {
        let usual = Stress::default();
        gate.wanted.stress = Stress {
            memory: section.number("memory").unwrap_or(usual.memory),
            queue_delay: section.duration("queue_delay").unwrap_or(usual.queue_delay),
        };
    }
    gate.is_configured =
        ["connection", "request", "block", "gate", "adapt"].iter().any(|name| file.has(name));
    gate
}

fn class(section: &Values) -> Option<Class> {
    section.integer("priority").and_then(|priority| Class::try_from(priority - 1).ok())
}

fn when(section: &Values) -> When {
    if section.text("when").as_deref() == Some("overload") { When::Overload } else { When::Always }
}

/// `None` is unlimited.
fn limit(section: &Values, name: &str, report: &mut Report<'_>) -> Option<Profile> {
    let rate = section.number("rate").filter(|rate| *rate > 0.0);
    let burst = section.integer("burst").and_then(|burst| u32::try_from(burst).ok());
    let Some(rate) = rate else {
        if let Some(offset) = section.offset_of("burst") {
            report.warn(offset, format!("{name}.burst has no effect without {name}.rate"));
        }
        return None;
    };
    // One second's worth.
    let burst = burst.unwrap_or((rate.ceil() as u32).max(1));
    match Profile::new(rate, burst) {
        Ok(profile) => Some(profile),
        Err(error) => {
            let offset = section.offset_of("rate").unwrap_or(section.offset);
            report.error(offset, format!("{name}.rate: {error}"), None);
            None
        }
    }
}

fn connection(section: &Values, report: &mut Report<'_>) -> Option<ConnectionRule> {
    let text = section.text("destination")?;
    let destination: Destination = destination(&text)?;
    // "fd44::1:80" is an address too.
    if let Some((address, port)) = text.rsplit_once(':')
        && let (Ok(address), Ok(port)) = (address.parse::<std::net::Ipv6Addr>(), port.parse::<u16>())
    {
        let offset = section.offset_of("destination").unwrap_or(section.offset);
        report.warn(
            offset,
            format!(
                "connection.destination: {text:?} is an address, and means its every port: \
                 write \"[{address}]:{port}\" for port {port}, or \"[{text}]:*\""
            ),
        );
    }
    Some(ConnectionRule {
        destination,
        source: section.prefix("source"),
        limit: limit(section, "connection", report),
        when: when(section),
        class: class(section),
    })
}

fn request(section: &Values, personality: Personality, report: &mut Report<'_>) -> Option<RequestRule> {
    if !["path", "cookie"].iter().any(|key| section.has(key)) {
        report.missing(section.offset, "request: expected at least one of path and cookie".into(), None);
        return None;
    }
    let text = section.text("path").unwrap_or_else(|| "*".into());
    let path: PathPattern = match text.parse() {
        Ok(path) => path,
        Err(error) => {
            let offset = section.offset_of("path").unwrap_or(section.offset);
            report.error(offset, format!("request.path: {error}, not {text:?}"), None);
            return None;
        }
    };
    let begins = matches!(path, PathPattern::Exact(_) | PathPattern::Prefix(_));
    if begins {
        let offset = section.offset_of("path").unwrap_or(section.offset);
        check_path(report, offset, "request.path", &text, personality);
    }
    let action = section.text("action").map(|action| match action.as_str() {
        "drop" => Action::Drop,
        "reset" => Action::Reset,
        _ => Action::Refuse,
    });
    Some(RequestRule {
        path,
        cookie: cookie(section, report),
        limit: limit(section, "request", report),
        when: when(section),
        action,
        class: class(section),
    })
}

fn cookie(section: &Values, report: &mut Report<'_>) -> Option<CookiePattern> {
    let words = section.words("cookie")?;
    let offset = section.offset_of("cookie").unwrap_or(section.offset);
    let [(name, value)] = words.as_slice() else {
        report.error(offset, "request.cookie: expected one cookie".into(), None);
        return None;
    };
    match CookiePattern::new(name, value) {
        Ok(pattern) => Some(pattern),
        Err(error) => {
            report.error(offset, format!("request.cookie: {error}"), None);
            None
        }
    }
}
