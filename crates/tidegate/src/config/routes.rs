//! Routes: what answers which requests, and what is changed of them on the way.

use std::collections::{HashMap, HashSet};

use tidegate_accelerator::settings::{Route, Substitute, Target};
use tidegate_http::normalize::{Personality, normalize};
use tidegate_http::{
    FieldChange, FieldRuleError, FieldRules, HeadLimits, Progress, RequestParser, RuledMessage,
};

use super::report::{Report, nearest};
use super::settings::personality;
use super::walk::Values;

pub(super) fn routes(file: &Values, report: &mut Report<'_>) -> Vec<Route> {
    let upstreams = file.tables("upstream");
    let names: HashSet<String> = upstreams.iter().filter_map(|section| section.text("name")).collect();
    // A group whose name is wrong was reported; what routes to it is not wrong for that.
    let all_named = upstreams.iter().all(|section| section.text("name").is_some()) && !report.is_damaged();
    let mut lines: HashMap<(String, String), usize> = HashMap::new();
    let (mut routes, mut places) = (Vec::new(), Vec::new());
    for section in file.tables("route") {
        let target = target(section, &names, all_named, report);
        let host = section.text("host");
        let path = section.text("path");
        let (Some(target), Some(host), Some(path)) = (target, host, path) else { continue };
        let place = |key| section.offset_of(key).unwrap_or(section.offset);
        check_path(report, place("path"), "route.path", &path, personality(file));
        check_normal(report, place("host"), "route.host", &host, normal_host(&host));
        // The engine takes `/images/*` for `/images/`.
        let which = (host.clone(), path.trim_end_matches('*').to_owned());
        if let Some(line) = lines.get(&which) {
            let message =
                format!("route: {host}{path} is routed in line {line} already; this one is never used");
            report.error(section.offset, message, None);
        }
        lines.entry(which).or_insert(report.line_of(section.offset));
        let mut route = Route::new(host, path, target);
        changes(section, &mut route, report);
        routes.push(route);
        places.push(place("redirect"));
    }
    for (route, place) in routes.iter().zip(places) {
        if leads_back(route, &routes) {
            let message = "route.redirect: leads to this route again, and clients round and round".into();
            report.error(place, message, None);
        }
    }
    routes
}

/// Whether a redirect leads to where it is in force itself. Another host's URL may be answered elsewhere.
fn leads_back(route: &Route, routes: &[Route]) -> bool {
    let Target::Redirect { to, .. } = &route.target else { return false };
    let after_scheme = to.text.split_once("://").map(|(_, rest)| rest);
    let path = match after_scheme {
        None => to.text.as_str(),
        Some(rest) => {
            let host = rest.split(['/', '?', '#']).next().unwrap_or("");
            if host != route.host {
                return false;
            }
            rest.strip_prefix(host).filter(|path| !path.is_empty()).unwrap_or("/")
        }
    };
    let path = path.split(['?', '#']).next().unwrap_or(path);
    let answering = routes
        .iter()
        .filter(|other| other.host == route.host && path.starts_with(other.prefix()))
        .max_by_key(|other| other.prefix().len());
    answering.is_some_and(|answering| std::ptr::eq(answering, route))
}

/// Reports a path, which may end in a star, that no request's path in its normal form is equal to or begins with.
pub(super) fn check_path(
    report: &mut Report<'_>,
    offset: usize,
    key: &str,
    path: &str,
    personality: Personality,
) {
    let (bare, star) = path.strip_suffix('*').map_or((path, ""), |path| (path, "*"));
    let normal = normal_target(bare, "any", personality).map(|(path, _)| path + star);
    check_normal(report, offset, key, path, normal);
}

/// Reports what is not in its normal form, if it has one.
fn check_normal(report: &mut Report<'_>, offset: usize, key: &str, text: &str, normal: Option<String>) {
    if let Some(normal) = normal.filter(|normal| normal != text) {
        let what = if key.ends_with("host") { "hosts" } else { "paths" };
        let message = format!("{key}: {text:?} never matches: {what} are compared in their normal form");
        report.error(offset, message, Some(format!("write {normal:?}")));
    }
}

/// A host as a request for it would be compared. What a name ends in is compared without a port.
fn normal_host(host: &str) -> Option<String> {
    let (star, name) = host.strip_prefix("*.").map_or(("", host), |name| ("*.", name));
    let (_, normal) = normal_target("/", name, Personality::Strict).filter(|_| host != "*")?;
    let without_port = normal.split(':').next().filter(|_| !star.is_empty());
    Some(format!("{star}{}", without_port.unwrap_or(&normal)))
}

/// Path and host of a request as they would be compared; `None` if no request can ask for that.
fn normal_target(path: &str, host: &str, personality: Personality) -> Option<(String, String)> {
    let bytes = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n").into_bytes();
    let mut parser = RequestParser::new(HeadLimits::default());
    let Ok(Progress::Complete { .. }) = parser.parse(&bytes) else { return None };
    let mut scratch = Vec::new();
    let normalized = normalize(&parser.head(&bytes), personality, &mut scratch).ok()?;
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    Some((text(normalized.path), text(normalized.authority)))
}

fn target(
    section: &Values,
    names: &HashSet<String>,
    all_named: bool,
    report: &mut Report<'_>,
) -> Option<Target> {
    const KEYS: [&str; 3] = ["upstream", "root", "redirect"];
    if KEYS.iter().any(|key| section.is_wrong(key)) {
        return None;
    }
    let given: Vec<&str> = KEYS.into_iter().filter(|key| section.has(key)).collect();
    if let [first, second, ..] = given[..] {
        let message = format!("route: has both {first} and {second}, expected one of them");
        report.error(section.offset_of(second).unwrap_or(section.offset), message, None);
        return None;
    }
    match (section.text("upstream"), section.path("root")) {
        (Some(name), _) => {
            if all_named && !names.contains(&name) {
                let hint = nearest(&name, names.iter().map(String::as_str))
                    .map(|name| format!("did you mean {name:?}?"));
                let message = format!("route.upstream: there is no [[upstream]] named {name:?}");
                report.error(section.offset_of("upstream").unwrap_or(section.offset), message, hint);
            }
            Some(Target::Upstream(name))
        }
        (None, Some(root)) => {
            if let Err(error) = std::fs::read_dir(&root) {
                let message =
                    format!("route.root: expected a readable directory, but {}: {error}", root.display());
                report.error(section.offset_of("root").unwrap_or(section.offset), message, None);
            }
            Some(Target::Root(root))
        }
        (None, None) if section.has("redirect") => redirect(section, report),
        (None, None) => {
            let message = "route: missing upstream, root or redirect, expected one of them".into();
            report.missing(section.offset, message, None);
            None
        }
    }
}

/// Where a route sends clients.
fn redirect(section: &Values, report: &mut Report<'_>) -> Option<Target> {
    let text = section.text("redirect")?;
    let to = Substitute::new(&text);
    let offset = section.offset_of("redirect").unwrap_or(section.offset);
    let mut wrong = |what: &str, hint: &str| {
        report.error(offset, format!("route.redirect: {what}, not {text:?}"), Some(hint.into()));
        None
    };
    const EXAMPLES: &str = "for example \"https://www.example.org/*\" or \"/new/*\"";
    let url = to.text.strip_prefix("https://").or_else(|| to.text.strip_prefix("http://"));
    let host = url.map(|url| url.split(['/', '?', '#']).next().unwrap_or(""));
    let is_path = to.text.starts_with('/') && !to.text.starts_with("//");
    let is_url =
        host.is_some_and(|host| !host.is_empty() && normal_target("/", host, Personality::Strict).is_some());
    let is_written = to.text.bytes().all(|byte| byte.is_ascii_graphic() && !b"\\\"<>^`{|}*".contains(&byte));
    if !is_written || !(is_path || is_url) {
        return wrong("expected a URL with http:// or https://, or a path", EXAMPLES);
    }
    if to.keeps_rest {
        // What follows would be part of the host's name.
        if url.is_some_and(|url| !url.contains('/')) {
            return wrong("expected a path before the `*`", EXAMPLES);
        }
        if to.text.contains(['?', '#']) {
            return wrong(
                "expected no query before the `*`, which stands for a path and its query",
                EXAMPLES,
            );
        }
        ends_alike(section, "redirect", &to, report);
    }
    let status = section.integer("redirect_status").and_then(|status| u16::try_from(status).ok());
    if let Some(status @ 304..=306) = status {
        let message = format!("route.redirect_status: expected 301, 302, 303, 307 or 308, not {status}");
        report.error(section.offset_of("redirect_status").unwrap_or(section.offset), message, None);
    }
    Some(Target::Redirect { to, status })
}

/// What a route changes of messages.
fn changes(section: &Values, route: &mut Route, report: &mut Report<'_>) {
    let mut only_for = |key: &str, target: &str, is_so: bool| {
        if section.has(key) && !is_so {
            let message = format!("route.{key}: is for a route with {target}");
            report.error(section.offset_of(key).unwrap_or(section.offset), message, None);
        }
    };
    let is_upstream = matches!(route.target, Target::Upstream(_));
    only_for("rewrite", "upstream", is_upstream);
    only_for("request_fields", "upstream", is_upstream);
    let is_redirect = matches!(route.target, Target::Redirect { .. });
    only_for("redirect_status", "redirect", is_redirect);
    if let Some(text) = section.text("rewrite") {
        let to = Substitute::new(&text);
        let offset = section.offset_of("rewrite").unwrap_or(section.offset);
        match normal_target(&to.text, "any", Personality::Strict) {
            Some((normal, _)) if normal == to.text && !to.text.contains('*') => {}
            _ => {
                let message = format!("route.rewrite: expected a path in its normal form, not {text:?}");
                report.error(offset, message, Some("for example \"/v2/*\"".into()));
            }
        }
        if to.keeps_rest {
            ends_alike(section, "rewrite", &to, report);
        }
        route.rewrite = Some(to);
    }
    if let Some(rules) = section.table("request_fields") {
        route.request_fields = fields(rules, "route.request_fields", RuledMessage::Request, report);
    }
    if let Some(rules) = section.table("response_fields") {
        let message = if is_redirect { RuledMessage::Redirect } else { RuledMessage::Response };
        route.response_fields = fields(rules, "route.response_fields", message, report);
    }
}

/// What follows a path that ends in a slash begins a segment, and has to do so in its new place.
fn ends_alike(section: &Values, key: &str, to: &Substitute, report: &mut Report<'_>) {
    let Some(path) = section.text("path") else { return };
    if path.trim_end_matches('*').ends_with('/') != to.text.ends_with('/') {
        let message = format!(
            "route.{key}: `*` stands for what follows the route's path, {path:?}: both end in a slash, or neither does"
        );
        report.error(section.offset_of(key).unwrap_or(section.offset), message, None);
    }
}

fn fields(section: &Values, path: &str, message: RuledMessage, report: &mut Report<'_>) -> FieldRules {
    let mut rules = FieldRules::default();
    let mut report_wrong = |offset, key: &str, name: &str, error: FieldRuleError| {
        report.error(offset, format!("{path}.{key}: {name:?}: {error}"), None);
    };
    for at in section.texts("remove") {
        if let Err(error) = rules.change(message, FieldChange::Remove, &at.value, "") {
            report_wrong(at.offset, "remove", &at.value, error);
        }
    }
    let changes = [("set", FieldChange::Set), ("add", FieldChange::Add), ("default", FieldChange::Default)];
    for (key, change) in changes {
        let offset = section.offset_of(key).unwrap_or(section.offset);
        for (name, value) in section.words(key).unwrap_or_default() {
            if let Err(error) = rules.change(message, change, &name, &value) {
                report_wrong(offset, key, &name, error);
            }
        }
    }
    rules
}

/// The groups that a start needs; warns of those that no route uses.
pub(super) fn required(file: &Values, routes: &[Route], report: &mut Report<'_>) -> Vec<String> {
    let used: HashSet<&str> = routes
        .iter()
        .filter_map(|route| match &route.target {
            Target::Upstream(name) => Some(name.as_str()),
            Target::Root(_) | Target::Redirect { .. } => None,
        })
        .collect();
    let mut required = Vec::new();
    for section in file.tables("upstream") {
        let Some(name) = section.text("name") else { continue };
        if !used.contains(name.as_str()) {
            let offset = section.offset_of("name").unwrap_or(section.offset);
            report.warn(offset, format!("no [[route]] uses the upstream {name:?}"));
        } else if section.flag("require") == Some(true) {
            required.push(name);
        }
    }
    required
}
