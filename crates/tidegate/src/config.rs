//! The configuration file: TOML, unknown keys are errors, each error with its place and a hint.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use schemars::JsonSchema;
use serde::Deserialize;
use tidegate_accelerator::settings::{
    AccessLog, Balance, Cache, HealthCheck, Limits, Listener, LogFormat, Route, Settings, Target, Upstream,
};
use toml::Spanned;

use crate::units;

/// What a configuration file says, checked.
pub(crate) struct Loaded {
    pub settings: Settings,
    pub admin: Option<SocketAddr>,
    /// What the file asks for and this version does not do.
    pub warnings: Vec<String>,
}

/// One thing that is wrong in a configuration file.
#[derive(Debug, Eq, PartialEq)]
pub(crate) struct ConfigError {
    pub file: String,
    /// Line and column, from 1; `None` when the file as a whole is at fault.
    pub place: Option<(usize, usize)>,
    pub message: String,
    pub hint: Option<String>,
}

/// Errors as lines for people.
pub(crate) fn report(errors: &[ConfigError]) -> String {
    let lines: Vec<String> = errors
        .iter()
        .map(|error| {
            let place = error.place.map_or(String::new(), |(line, column)| format!(":{line}:{column}"));
            let hint = error.hint.as_ref().map_or(String::new(), |hint| format!("; {hint}"));
            format!("{}{place}: {}{hint}", error.file, error.message)
        })
        .collect();
    lines.join("\n")
}

/// The JSON Schema of configuration files.
pub(crate) fn schema() -> String {
    serde_json::to_string_pretty(&schemars::schema_for!(File)).unwrap_or_default()
}

type Text = Spanned<String>;

/// A tidegate configuration file.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct File {
    /// Number of data cores; all of the machine's by default.
    workers: Option<usize>,
    /// How request targets are normalized: strict, apache, nginx or iis.
    #[schemars(with = "Option<String>")]
    personality: Option<Text>,
    /// Proxies in front of this one whose X-Forwarded-For and Forwarded are believed.
    #[schemars(with = "Vec<String>")]
    trusted_proxies: Vec<Text>,
    /// The name of this proxy in Via and Cache-Status.
    #[schemars(with = "Option<String>")]
    pseudonym: Option<Text>,
    listen: Vec<ListenSection>,
    admin: AdminSection,
    upstream: Vec<UpstreamSection>,
    route: Vec<RouteSection>,
    cache: CacheSection,
    connection: Vec<ConnectionSection>,
    request: Vec<RequestSection>,
    limits: LimitsSection,
    block: BlockSection,
    stress: StressSection,
    log: LogSection,
}

/// Where clients connect.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ListenSection {
    /// ADDRESS:PORT, or :PORT for every address.
    #[schemars(with = "String")]
    address: Text,
    /// http; https, dhttp and trickles are not available in this version.
    #[schemars(with = "Option<String>")]
    protocol: Option<Text>,
}

/// The admin server.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct AdminSection {
    #[schemars(with = "Option<String>")]
    address: Option<Text>,
}

/// A group of servers that serve the same content.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct UpstreamSection {
    #[schemars(with = "String")]
    name: Text,
    #[schemars(with = "Vec<String>")]
    servers: Vec<Text>,
    /// round-robin, least-connections, hash-url or hash-host.
    #[schemars(with = "Option<String>")]
    balance: Option<Text>,
    #[schemars(with = "Option<String>")]
    connect_timeout: Option<Text>,
    #[schemars(with = "Option<String>")]
    response_timeout: Option<Text>,
    #[schemars(with = "Option<String>")]
    idle_timeout: Option<Text>,
    idle_connections: Option<usize>,
    max_connections: Option<usize>,
    max_failures: Option<u32>,
    #[schemars(with = "Option<String>")]
    fail_timeout: Option<Text>,
    health_check: Option<HealthSection>,
}

/// A periodic request that decides whether a server gets traffic.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct HealthSection {
    path: String,
    #[schemars(with = "Option<String>")]
    interval: Option<Text>,
    #[schemars(with = "Option<String>")]
    timeout: Option<Text>,
}

/// Which requests go where: to an upstream, or to files below a root.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct RouteSection {
    /// A host name, `*.suffix`, or `*`.
    host: Option<String>,
    /// A path prefix.
    #[schemars(with = "Option<String>")]
    path: Option<Text>,
    #[schemars(with = "Option<String>")]
    upstream: Option<Text>,
    #[schemars(with = "Option<String>")]
    root: Option<Text>,
}

/// The shared cache.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct CacheSection {
    /// Such as 256MiB; 0B turns the cache off.
    #[schemars(with = "Option<String>")]
    memory: Option<Text>,
    /// A directory; the cache then survives restarts.
    path: Option<PathBuf>,
    #[schemars(with = "Option<String>")]
    max_object: Option<Text>,
}

/// A network-level rule; not enforced by this version.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "checked, but not enforced yet")]
struct ConnectionSection {
    destination: Option<String>,
    source: Option<String>,
    rate: Option<u64>,
    burst: Option<u64>,
    priority: Option<u8>,
}

/// A URL action; not enforced by this version.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "checked, but not enforced yet")]
struct RequestSection {
    path: Option<String>,
    cookie: Option<BTreeMap<String, String>>,
    source: Option<String>,
    rate: Option<u64>,
    burst: Option<u64>,
    priority: Option<u8>,
    action: Option<Action>,
}

/// What a rule does.
#[derive(Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Action {
    Drop,
    Reset,
    Refuse,
}

/// Limits on what a client may cost.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct LimitsSection {
    #[schemars(with = "Option<String>")]
    header_timeout: Option<Text>,
    #[schemars(with = "Option<String>")]
    keep_alive_timeout: Option<Text>,
    #[schemars(with = "Option<String>")]
    body_min_rate: Option<Text>,
    #[schemars(with = "Option<String>")]
    response_min_rate: Option<Text>,
    #[schemars(with = "Option<String>")]
    body_size: Option<Text>,
    #[schemars(with = "Option<String>")]
    request_line_size: Option<Text>,
    #[schemars(with = "Option<String>")]
    head_size: Option<Text>,
    fields: Option<u16>,
    connections: Option<usize>,
    #[schemars(with = "Option<String>")]
    tunnel_timeout: Option<Text>,
    #[schemars(with = "Option<String>")]
    drain_timeout: Option<Text>,
}

/// Dynamic block rules; not enforced by this version.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct BlockSection {
    #[serde(rename = "for")]
    #[schemars(with = "Option<String>")]
    life: Option<Text>,
    path: Option<PathBuf>,
}

/// Limits beyond which the system counts as overloaded; not enforced by this version.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct StressSection {
    memory: Option<f64>,
    #[schemars(with = "Option<String>")]
    queue_delay: Option<Text>,
}

/// Logs.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct LogSection {
    /// A file, or `-` for standard output.
    access: Option<String>,
    /// combined or json.
    #[schemars(with = "Option<String>")]
    format: Option<Text>,
}

/// Reads and checks a configuration file.
pub(crate) fn load(path: &Path) -> Result<Loaded, Vec<ConfigError>> {
    let file = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|error| {
        let message = format!("cannot read the configuration: {error}");
        vec![ConfigError { file: file.clone(), place: None, message, hint: None }]
    })?;
    parse(&file, &text)
}

/// Checks the text of a configuration file.
pub(crate) fn parse(file: &str, text: &str) -> Result<Loaded, Vec<ConfigError>> {
    let mut checker = Checker { file, text, errors: Vec::new() };
    match toml::from_str::<File>(text) {
        Ok(parsed) => {
            let loaded = checker.settings(parsed);
            if checker.errors.is_empty() { Ok(loaded) } else { Err(checker.errors) }
        }
        Err(error) => {
            checker.syntax(&error);
            Err(checker.errors)
        }
    }
}

/// Settings with defaults only: what `run` without a file starts from.
pub(crate) fn defaults() -> Settings {
    Settings {
        workers: std::thread::available_parallelism().map_or(1, usize::from),
        listeners: Vec::new(),
        upstreams: Vec::new(),
        routes: Vec::new(),
        cache: Cache::default(),
        limits: Limits::default(),
        trusted_proxies: Vec::new(),
        personality: tidegate_http::normalize::Personality::Strict,
        pseudonym: "tidegate".into(),
        access_log: None,
    }
}

struct Checker<'t> {
    file: &'t str,
    text: &'t str,
    errors: Vec<ConfigError>,
}

impl Checker<'_> {
    fn place(&self, offset: usize) -> (usize, usize) {
        let before = self.text.get(..offset).unwrap_or(self.text);
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().map_or(0, |last| last.chars().count()) + 1;
        (line, column)
    }

    fn error(&mut self, offset: usize, message: String, hint: Option<String>) {
        let place = Some(self.place(offset));
        self.errors.push(ConfigError { file: self.file.to_owned(), place, message, hint });
    }

    fn syntax(&mut self, error: &toml::de::Error) {
        let message = error.message().to_owned();
        let hint = unknown_key_hint(&message);
        self.error(error.span().map_or(0, |span| span.start), message, hint);
    }

    /// Reads a value with `read`; its error is reported at the value, with the key that it belongs to.
    fn value<T>(
        &mut self,
        key: &str,
        value: Option<Text>,
        default: T,
        read: impl Fn(&str) -> Result<T, String>,
    ) -> T {
        let Some(value) = value else { return default };
        match read(value.get_ref()) {
            Ok(value) => value,
            Err(message) => {
                self.error(value.span().start, format!("{key}: {message}"), None);
                default
            }
        }
    }

    fn duration(&mut self, key: &str, value: Option<Text>, default: Duration) -> Duration {
        self.value(key, value, default, |text| match units::duration(text) {
            Ok(Duration::ZERO) => Err("expected more than zero".to_owned()),
            other => other,
        })
    }

    fn settings(&mut self, file: File) -> Loaded {
        let mut settings = defaults();
        let warnings = not_enforced(&file);
        match file.workers {
            Some(0) => self.error(0, "workers: expected at least 1".into(), None),
            Some(workers) => settings.workers = workers,
            None => {}
        }
        settings.personality = self.value("personality", file.personality, settings.personality, |text| {
            text.parse().map_err(|_| format!("expected strict, apache, nginx or iis, not {text:?}"))
        });
        settings.pseudonym = self.value("pseudonym", file.pseudonym, settings.pseudonym, |text| {
            let is_token = !text.is_empty()
                && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte));
            if is_token {
                Ok(text.to_owned())
            } else {
                Err("expected letters, digits, '-', '.' or '_'".into())
            }
        });
        for proxy in file.trusted_proxies {
            match proxy.get_ref().parse() {
                Ok(prefix) => settings.trusted_proxies.push(prefix),
                Err(error) => self.error(proxy.span().start, format!("trusted_proxies: {error}"), None),
            }
        }
        let admin = self
            .value("admin.address", file.admin.address, None, |text| units::listen_address(text).map(Some));
        for section in file.listen {
            self.listener(section, &mut settings.listeners);
        }
        for section in file.upstream {
            if settings.upstreams.iter().any(|known: &Upstream| known.name == *section.name.get_ref()) {
                let message = format!("name: there are two [[upstream]] named {:?}", section.name.get_ref());
                self.error(section.name.span().start, message, None);
            }
            let upstream = self.upstream(section);
            settings.upstreams.push(upstream);
        }
        for section in file.route {
            self.route(section, &settings.upstreams, &mut settings.routes);
        }
        settings.cache = self.cache(file.cache);
        settings.limits = self.limits(file.limits);
        self.duration("block.for", file.block.life, Duration::from_secs(600));
        self.duration("stress.queue_delay", file.stress.queue_delay, Duration::from_millis(50));
        settings.access_log = self.access_log(file.log);
        Loaded { settings, admin, warnings }
    }

    fn listener(&mut self, section: ListenSection, listeners: &mut Vec<Listener>) {
        if let Some(protocol) = &section.protocol
            && protocol.get_ref() != "http"
        {
            let message = match protocol.get_ref().as_str() {
                known @ ("https" | "dhttp" | "trickles") => {
                    format!("protocol: {known} is not available in this version")
                }
                other => format!("protocol: expected http, not {other:?}"),
            };
            self.error(protocol.span().start, message, Some("use protocol = \"http\"".into()));
        }
        match units::listen_address(section.address.get_ref()) {
            Ok(address) if listeners.iter().any(|known| known.address == address) => {
                self.error(section.address.span().start, format!("address: {address} is listed twice"), None);
            }
            Ok(address) => listeners.push(Listener { address }),
            Err(message) => self.error(section.address.span().start, format!("address: {message}"), None),
        }
    }

    fn upstream(&mut self, section: UpstreamSection) -> Upstream {
        let mut servers = Vec::new();
        if section.servers.is_empty() {
            self.error(section.name.span().start, "servers: expected at least one".into(), None);
        }
        for server in &section.servers {
            match units::server(server.get_ref()) {
                Ok(addresses) => servers.extend(addresses.into_iter().take(1)),
                Err(message) => self.error(server.span().start, format!("servers: {message}"), None),
            }
        }
        let defaults = Upstream::new(section.name.get_ref().clone(), servers);
        let balance = self.value("balance", section.balance, Balance::RoundRobin, |text| match text {
            "round-robin" => Ok(Balance::RoundRobin),
            "least-connections" => Ok(Balance::LeastConnections),
            "hash-url" => Ok(Balance::HashUrl),
            "hash-host" => Ok(Balance::HashHost),
            other => {
                Err(format!("expected round-robin, least-connections, hash-url or hash-host, not {other:?}"))
            }
        });
        let health_check = section.health_check.map(|check| HealthCheck {
            path: check.path,
            interval: self.duration("health_check.interval", check.interval, Duration::from_secs(5)),
            timeout: self.duration("health_check.timeout", check.timeout, Duration::from_secs(2)),
        });
        Upstream {
            balance,
            connect_timeout: self.duration(
                "connect_timeout",
                section.connect_timeout,
                defaults.connect_timeout,
            ),
            response_timeout: self.duration(
                "response_timeout",
                section.response_timeout,
                defaults.response_timeout,
            ),
            idle_timeout: self.duration("idle_timeout", section.idle_timeout, defaults.idle_timeout),
            idle_connections: section.idle_connections.unwrap_or(defaults.idle_connections),
            max_connections: section.max_connections.unwrap_or(defaults.max_connections).max(1),
            max_failures: section.max_failures.unwrap_or(defaults.max_failures),
            fail_timeout: self.duration("fail_timeout", section.fail_timeout, defaults.fail_timeout),
            health_check,
            ..defaults
        }
    }

    fn route(&mut self, section: RouteSection, upstreams: &[Upstream], routes: &mut Vec<Route>) {
        let path = self.value("path", section.path, "/".to_owned(), |text| {
            if text.starts_with('/') {
                Ok(text.to_owned())
            } else {
                Err("expected a path that begins with \"/\"".into())
            }
        });
        let target = match (section.upstream, section.root) {
            (Some(name), None) => {
                if !upstreams.iter().any(|upstream| upstream.name == *name.get_ref()) {
                    let names = upstreams.iter().map(|upstream| upstream.name.as_str());
                    let hint = nearest(name.get_ref(), names).map(|name| format!("did you mean {name:?}?"));
                    let message = format!("upstream: there is no [[upstream]] named {:?}", name.get_ref());
                    self.error(name.span().start, message, hint);
                }
                Target::Upstream(name.into_inner())
            }
            (None, Some(root)) => {
                let path = PathBuf::from(root.get_ref());
                if let Err(error) = std::fs::read_dir(&path) {
                    self.error(
                        root.span().start,
                        format!("root: cannot read {}: {error}", path.display()),
                        None,
                    );
                }
                Target::Root(path)
            }
            (Some(both), Some(_)) => {
                return self.error(
                    both.span().start,
                    "a [[route]] has either upstream or root, not both".into(),
                    None,
                );
            }
            (None, None) => return self.error(0, "a [[route]] needs upstream or root".into(), None),
        };
        routes.push(Route { host: section.host.unwrap_or_else(|| "*".into()), path, target });
    }

    fn cache(&mut self, section: CacheSection) -> Cache {
        let defaults = Cache::default();
        let memory_bytes = self.value("cache.memory", section.memory, defaults.memory_bytes, |text| {
            match units::size(text)? {
                0 => Ok(0),
                bytes if bytes < tidegate_store::MIN_BUDGET_BYTES => {
                    Err(format!("expected 0B or at least {} KiB", tidegate_store::MIN_BUDGET_BYTES >> 10))
                }
                bytes if bytes > tidegate_store::MAX_BUDGET_BYTES => {
                    Err(format!("expected at most {} GiB", tidegate_store::MAX_BUDGET_BYTES >> 30))
                }
                bytes => Ok(bytes),
            }
        });
        let max_object_bytes = self.value("cache.max_object", section.max_object, 0, units::size);
        Cache { memory_bytes, path: section.path, max_object_bytes }
    }

    fn limits(&mut self, section: LimitsSection) -> Limits {
        let mut limits = Limits::default();
        limits.header_timeout =
            self.duration("header_timeout", section.header_timeout, limits.header_timeout);
        limits.keep_alive_timeout =
            self.duration("keep_alive_timeout", section.keep_alive_timeout, limits.keep_alive_timeout);
        limits.tunnel_timeout =
            self.duration("tunnel_timeout", section.tunnel_timeout, limits.tunnel_timeout);
        limits.drain_timeout = self.duration("drain_timeout", section.drain_timeout, limits.drain_timeout);
        limits.body_min_rate_bytes_per_s =
            self.value("body_min_rate", section.body_min_rate, limits.body_min_rate_bytes_per_s, units::rate);
        limits.response_min_rate_bytes_per_s = self.value(
            "response_min_rate",
            section.response_min_rate,
            limits.response_min_rate_bytes_per_s,
            units::rate,
        );
        limits.body_bytes = self.value("body_size", section.body_size, limits.body_bytes, units::size);
        let head_size = |text: &str| {
            units::size(text).and_then(|bytes| match u32::try_from(bytes) {
                Ok(bytes @ 256..=0x10_0000) => Ok(bytes),
                _ => Err("expected 256B to 1MiB".to_owned()),
            })
        };
        limits.head.request_line_bytes = self.value(
            "request_line_size",
            section.request_line_size,
            limits.head.request_line_bytes,
            head_size,
        );
        limits.head.head_bytes =
            self.value("head_size", section.head_size, limits.head.head_bytes, head_size);
        limits.head.fields = section.fields.unwrap_or(limits.head.fields);
        limits.connections = section.connections.unwrap_or(limits.connections);
        limits
    }

    fn access_log(&mut self, section: LogSection) -> Option<AccessLog> {
        let format = self.value("log.format", section.format, LogFormat::Combined, |text| match text {
            "combined" => Ok(LogFormat::Combined),
            "json" => Ok(LogFormat::Json),
            other => Err(format!("expected combined or json, not {other:?}")),
        });
        let access = section.access?;
        Some(AccessLog { path: (access != "-").then(|| PathBuf::from(access)), format })
    }
}

/// What the file asks for and this version does not do: said at every start, so that nobody relies on it.
fn not_enforced(file: &File) -> Vec<String> {
    let mut warnings = Vec::new();
    let mut warn = |present: bool, section: &str| {
        if present {
            warnings.push(format!("{section} is not enforced by this version"));
        }
    };
    warn(!file.connection.is_empty(), "[[connection]]");
    warn(!file.request.is_empty(), "[[request]]");
    warn(file.block.life.is_some() || file.block.path.is_some(), "[block]");
    warn(file.stress.memory.is_some() || file.stress.queue_delay.is_some(), "[stress]");
    warnings
}

/// From "unknown field `a`, expected one of `b`, `c`": the nearest of the expected ones.
fn unknown_key_hint(message: &str) -> Option<String> {
    let mut quoted = message.strip_prefix("unknown field ")?.split('`').skip(1).step_by(2);
    let unknown = quoted.next()?;
    nearest(unknown, quoted).map(|key| format!("did you mean {key:?}?"))
}

/// The candidate with the fewest edits, if it is near enough to be meant.
fn nearest<'c>(wanted: &str, candidates: impl Iterator<Item = &'c str>) -> Option<&'c str> {
    candidates
        .map(|candidate| (strsim::damerau_levenshtein(wanted, candidate), candidate))
        .filter(|(distance, candidate)| *distance <= (candidate.len() / 3).max(2))
        .min()
        .map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errors(text: &str) -> Vec<String> {
        match parse("t.toml", text) {
            Ok(_) => Vec::new(),
            Err(errors) => errors.iter().map(|error| report(std::slice::from_ref(error))).collect(),
        }
    }

    #[test]
    fn the_example_of_the_guide_is_accepted() {
        let loaded = parse("t.toml", include_str!("../../../examples/tidegate.toml"))
            .map_err(|errors| report(&errors))
            .unwrap();
        assert_eq!(loaded.settings.listeners.len(), 1);
        assert_eq!(loaded.settings.upstreams[0].servers.len(), 2);
        assert_eq!(loaded.admin, Some("127.0.0.1:9090".parse().unwrap()));
    }

    #[test]
    fn rules_of_later_versions_are_checked_and_warned_of() {
        let text = "[[request]]\npath = \"/cgi-bin/*\"\nrate = 10\nburst = 2\npriority = 3\n[[request]]\ncookie = { tier = \"gold\" }\n\
                    [[connection]]\ndestination = \"*:80\"\nsource = \"10.1.1.0/24\"\nrate = 100\n[stress]\nmemory = 0.9\n";
        let loaded = parse("t.toml", text).map_err(|errors| report(&errors)).unwrap();
        assert_eq!(loaded.warnings.len(), 3);
        assert_eq!(
            errors("[[request]]\npath = \"/\"\naction = \"explode\"\n"),
            ["t.toml:3:10: unknown variant `explode`, expected one of `drop`, `reset`, `refuse`"]
        );
    }

    #[test]
    fn errors_say_where_what_and_what_was_meant() {
        for (text, wanted) in [
            (
                "[cache]\nmemroy = \"1MiB\"\n",
                "t.toml:2:1: unknown field `memroy`, expected one of `memory`, `path`, `max_object`; did you mean \"memory\"?",
            ),
            (
                "[[listen]]\naddress = \"8080\"\n",
                "t.toml:2:11: address: expected ADDRESS:PORT or :PORT, not \"8080\"",
            ),
            (
                "[[listen]]\naddress = \":1\"\nprotocol = \"https\"\n",
                "t.toml:3:12: protocol: https is not available in this version; use protocol = \"http\"",
            ),
            (
                "[[upstream]]\nname = \"app\"\nservers = [\"127.0.0.1:1\"]\n[[route]]\nupstream = \"apq\"\n",
                "t.toml:5:12: upstream: there is no [[upstream]] named \"apq\"; did you mean \"app\"?",
            ),
            (
                "[limits]\nheader_timeout = \"10\"\n",
                "t.toml:2:18: header_timeout: expected a duration such as \"10s\", \"500ms\" or \"10m\", not \"10\"",
            ),
        ] {
            assert_eq!(errors(text), [wanted]);
        }
    }

    #[test]
    fn all_errors_are_reported_at_once() {
        let text = "personality = \"iss\"\n[limits]\nheader_timeout = \"x\"\nbody_size = \"y\"\n";
        assert_eq!(errors(text).len(), 3);
    }
}
