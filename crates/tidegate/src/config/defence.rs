//! From checked values to what the defence is built from.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;

use tidegate_core::{IpPrefix, Reason};
use tidegate_defence::{Action, Exemption, Filter, Rule, Settings, StressLimits};
use tidegate_http::normalize::Personality;

use super::report::Report;
use super::routes::check_path;
use super::walk::Values;

/// Whether and how clients are watched.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Defence {
    pub enabled: bool,
    pub settings: Settings,
    /// Where each decision is written down, besides the log.
    pub audit: Option<PathBuf>,
    /// Where classifiers outside of this process connect, and one of how many events they are told.
    pub external: Option<(PathBuf, u32)>,
}

/// Builds the settings. They are fit for use only if the report holds no error afterwards.
pub(super) fn build(file: &Values, personality: Personality, report: &mut Report<'_>) -> Defence {
    let defaults = Settings::default();
    let section = file.table("defence");
    let flag = |name: &str, default| section.and_then(|section| section.flag(name)).unwrap_or(default);
    let integer = |name: &str| section.and_then(|section| section.integer(name));
    let memory_bytes = integer("memory").and_then(|bytes| usize::try_from(bytes).ok());
    let bits = integer("challenge_bits").and_then(|bits| u8::try_from(bits).ok());
    for section in file.tables("exempt").iter().filter(|section| section.has("user_agent")) {
        if section.prefix("source").is_some_and(|source| source.length_bits() == 0) {
            let message = "exempt.source: whoever claims this User-Agent is exempt, and before a request's head is \
                           here nobody is acted on: name the addresses that it is good for";
            report.warn(section.offset_of("source").unwrap_or(section.offset), message.into());
        }
    }
    let exempt = |section: &Values| {
        Some(Exemption {
            source: section.prefix("source")?,
            user_agent: section.text("user_agent").unwrap_or_default(),
        })
    };
    let one_of = integer("sample").and_then(|one_of| u32::try_from(one_of).ok()).unwrap_or(1);
    let external = section.and_then(|section| section.path("external")).map(|path| (path, one_of));
    let settings = Settings {
        memory_bytes: memory_bytes.unwrap_or(defaults.memory_bytes),
        exempt: match file.tables("exempt") {
            [] => vec![only_from(Ipv4Addr::LOCALHOST.into()), only_from(Ipv6Addr::LOCALHOST.into())],
            tables => tables.iter().filter_map(exempt).collect(),
        },
        trusted_proxies: file.prefixes("trusted_proxies"),
        dry_run: flag("dry_run", false),
        block_for: file.table("block").and_then(|block| block.duration("for")).unwrap_or(defaults.block_for),
        rules: rules(file, report),
        filters: file
            .tables("filter")
            .iter()
            .filter_map(|section| filter(section, personality, report))
            .collect(),
        folds_case: personality.folds_case(),
        challenge_bits: bits.unwrap_or(defaults.challenge_bits),
        pass_for: section.and_then(|section| section.duration("pass_for")).unwrap_or(defaults.pass_for),
        external: external.is_some(),
        stress: stress(file),
    };
    Defence {
        enabled: flag("enabled", true),
        settings,
        audit: section.and_then(|section| section.path("audit")),
        external,
    }
}

fn stress(file: &Values) -> StressLimits {
    let usual = StressLimits::default();
    let Some(section) = file.table("stress") else { return usual };
    let share = |name, usual| section.number(name).map_or(usual, |share| share as f32);
    StressLimits {
        busy: share("busy", usual.busy),
        lag: section.duration("lag").unwrap_or(usual.lag),
        connections: share("connections", usual.connections),
        upstream_delay: section.duration("upstream_delay").unwrap_or(usual.upstream_delay),
        upstream_errors: share("upstream_errors", usual.upstream_errors),
    }
}

/// Whatever one address does: the host's own programs, such as a proxy or a monitor, if nobody else is named.
fn only_from(address: IpAddr) -> Exemption {
    Exemption { source: IpPrefix::from(address), user_agent: String::new() }
}

/// The defaults, with what the file says of some of them.
fn rules(file: &Values, report: &mut Report<'_>) -> Vec<Rule> {
    let mut rules = Rule::DEFAULTS.to_vec();
    let mut named: Vec<Reason> = Vec::new();
    for section in file.tables("classifier") {
        let name = section.text("name");
        let rule = rules.iter_mut().find(|rule| Some(rule.reason.name()) == name.as_deref());
        let Some(rule) = rule else { continue };
        if named.contains(&rule.reason) {
            let offset = section.offset_of("name").unwrap_or(section.offset);
            report.error(offset, format!("classifier.name: {:?} is listed twice", rule.reason.name()), None);
        }
        named.push(rule.reason);
        let limit = section.integer("limit").and_then(|limit| u32::try_from(limit).ok());
        rule.limit = limit.unwrap_or(rule.limit);
        if let Some(text) = section.text("action") {
            rule.action = action(&text);
            let offset = section.offset_of("action").unwrap_or(section.offset);
            check_action(rule, &text, offset, report);
        }
        rule.dry_run = section.flag("dry_run").unwrap_or(rule.dry_run);
    }
    rules
}

/// Not everything can be done at every moment of a connection's life.
fn check_action(rule: &Rule, text: &str, offset: usize, report: &mut Report<'_>) {
    let name = rule.reason.name();
    let is_possible = |actions: &[Action]| actions.contains(&rule.action);
    match rule.reason {
        Reason::ConnectionRate | Reason::Connections
            if !is_possible(&[Action::Reset, Action::Drop, Action::Block]) =>
        {
            let message = format!(
                "classifier.action: {text:?} takes a request, and {name} looks at connections before there is one"
            );
            report.error(offset, message, Some("use \"reset\", \"drop\" or \"block\"".into()));
        }
        Reason::Slow if !is_possible(&[Action::Block]) => {
            let message = format!(
                "classifier.action: {text:?} has no effect: a slow client's connection is ended anyway, and only \
                 \"block\" keeps the client out"
            );
            report.warn(offset, message);
        }
        _ => {}
    }
}

fn filter(section: &Values, personality: Personality, report: &mut Report<'_>) -> Option<Filter> {
    if !["source", "user_agent", "path", "content_type", "methods"].iter().any(|key| section.has(key)) {
        let message = "filter: expected at least one of source, user_agent, path, content_type and methods";
        report.missing(section.offset, message.into(), None);
        return None;
    }
    let text = |name| section.text(name).unwrap_or_default();
    if let Some(path) = section.text("path") {
        let offset = section.offset_of("path").unwrap_or(section.offset);
        check_path(report, offset, "filter.path", &path, personality);
    }
    Some(Filter {
        source: section.prefix("source"),
        user_agent: text("user_agent"),
        path: text("path"),
        content_type: text("content_type"),
        methods: section.texts("methods").into_iter().map(|at| at.value).collect(),
        action: action(&text("action")),
        dry_run: section.flag("dry_run").unwrap_or(false),
    })
}

fn action(text: &str) -> Action {
    match text {
        "delay" => Action::Delay,
        "tarpit" => Action::Tarpit,
        "challenge" => Action::Challenge,
        "reset" => Action::Reset,
        "drop" => Action::Drop,
        "block" => Action::Block,
        _ => Action::Refuse,
    }
}
