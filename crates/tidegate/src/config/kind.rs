//! The kinds of values a key can have: how each is read, and how each is described.

use std::path::PathBuf;
use std::time::Duration;

use tidegate_accelerator::settings::ServerAddress;
use tidegate_core::IpPrefix;
use tidegate_policy::{Destination, PortRange};
use toml::de::DeValue;

use super::keys::Section;
use crate::units::{self, ListenAddress, ServerError};

/// What a value must be, with its bounds.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    Flag,
    Integer {
        min: u64,
        max: u64,
    },
    /// A number above 0 and at most 1.
    Share,
    /// A number from 0 on, whole or not.
    Number {
        max: u32,
    },
    Duration {
        min_ms: u64,
        max_ms: u64,
    },
    /// Bytes.
    Size {
        min: u64,
        max: u64,
        zero_is_off: bool,
    },
    /// Bytes per second; 0 is off.
    Rate {
        max: u64,
    },
    Choice(&'static [&'static str]),
    /// Any text that is not empty.
    Text,
    /// Letters, digits, `-`, `.` and `_`.
    Name,
    /// A method of HTTP: a name in capitals.
    Method,
    /// `type/subtype` of content, with `*` at the end for all that begin so.
    MediaType,
    Listen,
    Server,
    Prefix,
    /// `*:80`, `10.0.0.1:80`, `[::1]:80`, `10.0.0.1` or `*`.
    Destination,
    /// `80` or `8000-8099`.
    Ports,
    Host,
    UrlPath,
    /// A path of a URL with `*`.
    Pattern,
    /// A file or directory.
    Path,
    /// Texts by name, such as cookies.
    Words,
    List {
        of: &'static Kind,
        min: usize,
    },
    /// `[name]`.
    Table(&'static Section),
    /// `[[name]]`.
    Tables(&'static Section),
}

/// A value that was read and is within its bounds.
#[derive(Clone, Debug)]
pub(super) enum Value {
    Flag(bool),
    /// An integer, or bytes, or bytes per second.
    Integer(u64),
    Duration(Duration),
    Text(String),
    Path(PathBuf),
    Listen(ListenAddress),
    Server(Vec<ServerAddress>),
    /// A server whose name cannot be resolved, and why.
    Unresolved(String),
    Prefix(IpPrefix),
    Number(f64),
    /// Names and texts, in the order of the names.
    Words(Vec<(String, String)>),
}

impl Kind {
    /// Whether values are written in quotes.
    pub fn is_text(self) -> bool {
        !matches!(
            self,
            Self::Flag
                | Self::Integer { .. }
                | Self::Share
                | Self::Number { .. }
                | Self::Words
                | Self::List { .. }
                | Self::Table(_)
                | Self::Tables(_)
        )
    }

    /// Reads one value that is neither list nor table. The error says what was expected and what was found.
    pub fn read(self, value: &DeValue<'_>) -> Result<Value, String> {
        let wrong = || format!("expected {}, not {}", self.expected(), describe(value));
        match (self, value) {
            (Self::Flag, DeValue::Boolean(flag)) => Ok(Value::Flag(*flag)),
            (Self::Integer { min, max }, DeValue::Integer(integer)) => {
                let number = u64::from_str_radix(integer.as_str(), integer.radix()).map_err(|_| wrong())?;
                if (min..=max).contains(&number) { Ok(Value::Integer(number)) } else { Err(wrong()) }
            }
            (Self::Share, DeValue::Float(float)) => match float.as_str().parse::<f64>() {
                Ok(share) if share > 0.0 && share <= 1.0 => Ok(Value::Number(share)),
                _ => Err(wrong()),
            },
            (Self::Share, DeValue::Integer(integer)) if integer.as_str() == "1" => Ok(Value::Number(1.0)),
            (Self::Number { max }, DeValue::Float(_) | DeValue::Integer(_)) => {
                let number = match value {
                    DeValue::Float(float) => float.as_str().parse().map_err(|_| wrong())?,
                    _ => describe(value).parse::<f64>().map_err(|_| wrong())?,
                };
                if (0.0..=f64::from(max)).contains(&number) {
                    Ok(Value::Number(number))
                } else {
                    Err(wrong())
                }
            }
            (Self::Words, DeValue::Table(table)) if !table.is_empty() => {
                let text = |name: &str, value: &DeValue<'_>| match value {
                    DeValue::String(text) => Ok(text.to_string()),
                    other => Err(format!("expected a text for {name}, not {}", describe(other))),
                };
                let words = table.iter().map(|(name, value)| {
                    Ok((name.get_ref().to_string(), text(name.get_ref(), value.get_ref())?))
                });
                words.collect::<Result<_, String>>().map(Value::Words)
            }
            (kind, DeValue::String(text)) if kind.is_text() => kind.read_text(text),
            _ => Err(wrong()),
        }
    }

    /// Reads a default, which is written as in a file but without quotes.
    pub fn read_default(self, text: &'static str) -> Result<Value, String> {
        if self.is_text() {
            return self.read_text(text);
        }
        let value = DeValue::parse(text).map_err(|error| error.message().to_owned())?;
        self.read(value.get_ref())
    }

    fn read_text(self, text: &str) -> Result<Value, String> {
        let wrong = || format!("expected {}, not {text:?}", self.expected());
        let check = |holds: bool| if holds { Ok(Value::Text(text.to_owned())) } else { Err(wrong()) };
        match self {
            Self::Duration { min_ms, max_ms } => match units::duration(text) {
                Ok(duration) if (u128::from(min_ms)..=u128::from(max_ms)).contains(&duration.as_millis()) => {
                    Ok(Value::Duration(duration))
                }
                _ => Err(wrong()),
            },
            Self::Size { min, max, zero_is_off } => match units::size(text) {
                Ok(bytes) if (min..=max).contains(&bytes) || (bytes == 0 && zero_is_off) => {
                    Ok(Value::Integer(bytes))
                }
                _ => Err(wrong()),
            },
            Self::Rate { max } => match units::rate(text) {
                Ok(rate) if rate <= max => Ok(Value::Integer(rate)),
                _ => Err(wrong()),
            },
            Self::Choice(names) => check(names.contains(&text)),
            Self::Text => check(!text.is_empty() && !text.contains(char::is_control)),
            Self::Name => check(is_name(text)),
            // RFC 9110 §9.1: all known methods are in capitals, and case counts.
            Self::Method if is_name(text) && text.bytes().any(|byte| byte.is_ascii_lowercase()) => {
                Err(format!("{}: case counts, write {:?}", wrong(), text.to_ascii_uppercase()))
            }
            Self::Method => check(is_name(text)),
            Self::MediaType => check(is_media_type(text)),
            Self::Listen => units::listen_address(text).map(Value::Listen).map_err(|_| wrong()),
            Self::Server => match units::upstream(text) {
                Ok(addresses) => Ok(Value::Server(addresses)),
                Err(ServerError::Resolve(message)) => Ok(Value::Unresolved(message)),
                Err(ServerError::Syntax(message)) => Err(message),
            },
            Self::Prefix => match text.parse() {
                Ok(prefix) => Ok(Value::Prefix(prefix)),
                Err(error) => Err(format!("{}: {error}", wrong())),
            },
            Self::Destination => match destination(text) {
                None => Err(wrong()),
                Some(found) if found.ports.last() == 0 => {
                    Err(format!("{}: no connection comes to port 0", wrong()))
                }
                Some(_) => check(true),
            },
            Self::Ports => check(text.parse::<PortRange>().is_ok()),
            Self::Host => check(is_host(text)).map(|_| Value::Text(text.to_ascii_lowercase())),
            Self::UrlPath if text.starts_with('/') => {
                is_url_path(text).then(|| Value::Text(text.to_owned())).ok_or_else(|| no_path(text))
            }
            Self::Pattern if text.starts_with(['/', '*']) => {
                let holds = is_url_path(&format!("/{text}"));
                holds.then(|| Value::Text(text.to_owned())).ok_or_else(|| no_path(text))
            }
            Self::UrlPath | Self::Pattern => Err(wrong()),
            Self::Path if text.is_empty() || text.contains('\0') => Err(wrong()),
            Self::Path => Ok(Value::Path(text.into())),
            Self::Flag | Self::Integer { .. } | Self::Share | Self::Number { .. } | Self::Words => {
                Err(wrong())
            }
            Self::List { .. } | Self::Table(_) | Self::Tables(_) => Err(wrong()),
        }
    }

    /// What is expected, as an error says it after "expected".
    pub fn expected(self) -> String {
        let examples = match self {
            Self::Share => ", such as 0.9",
            Self::Ports => " such as \"80\" or \"8000-8099\"",
            Self::Duration { .. } => ", such as \"10s\", \"500ms\" or \"10m\"",
            Self::Size { .. } => ", such as \"64KiB\" or \"256MiB\"",
            Self::Rate { .. } => ", such as \"500B/s\" or \"64KiB/s\"",
            Self::Prefix => " such as \"10.1.0.0/16\"",
            Self::Destination => " such as \"*:80\"",
            Self::Words => " such as { tier = \"gold\" }",
            _ => "",
        };
        format!("{}{examples}", self.bounds())
    }

    /// What values there are, without examples.
    pub fn bounds(self) -> String {
        match self {
            Self::Flag => "true or false".into(),
            Self::Integer { min, max } => format!("an integer from {min} to {max}"),
            Self::Share => "a number above 0 and at most 1".into(),
            Self::Number { max } => format!("a number from 0 to {max}"),
            Self::Duration { min_ms, max_ms } => {
                let (min, max) = (show_duration(min_ms), show_duration(max_ms));
                format!("a duration from {min} to {max}")
            }
            Self::Size { min, max, zero_is_off } => {
                let off = if zero_is_off { "0B or " } else { "" };
                format!("{off}a size from {} to {}", show_size(min), show_size(max))
            }
            Self::Rate { max } => format!("a rate of at most {}/s", show_size(max)),
            Self::Choice(names) => match names.split_last() {
                Some((last, [])) => format!("{last:?}"),
                Some((last, rest)) => {
                    let rest: Vec<_> = rest.iter().map(|name| format!("{name:?}")).collect();
                    format!("{} or {last:?}", rest.join(", "))
                }
                None => "nothing".into(),
            },
            Self::Text => "a text of at least one character".into(),
            Self::Name => "a name of letters, digits, '-', '.' and '_'".into(),
            Self::Method => "a method in capitals, such as \"GET\"".into(),
            Self::MediaType => "a media type such as \"text/html\" or \"text/*\"".into(),
            Self::Listen => "ADDRESS:PORT or :PORT".into(),
            Self::Server => units::UPSTREAM.into(),
            Self::Prefix => "an address or a prefix".into(),
            Self::Destination => "ADDRESS:PORT".into(),
            Self::Ports => "a port or a range of ports".into(),
            Self::Host => "a host name, \"*.suffix\" or \"*\"".into(),
            Self::UrlPath => "a path that begins with \"/\"".into(),
            Self::Pattern => "a path that begins with \"/\" or \"*\"".into(),
            Self::Path => "the path of a file or directory".into(),
            Self::Words => "a table of texts".into(),
            Self::List { of, .. } => format!("a list, each of its values {}", of.bounds()),
            Self::Table(section) => format!("a table: write [{}]", section.name),
            Self::Tables(section) => format!("a list of tables: write [[{}]]", section.name),
        }
    }
}

/// A value as an error names it.
pub(super) fn describe(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(text) => format!("{:?}", text.as_ref()),
        DeValue::Integer(integer) => integer.to_string(),
        DeValue::Float(float) => float.as_str().to_owned(),
        DeValue::Boolean(flag) => flag.to_string(),
        DeValue::Datetime(datetime) => format!("the date {datetime}"),
        DeValue::Array(_) => "a list".into(),
        DeValue::Table(_) => "a table".into(),
    }
}

fn is_name(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
}

/// RFC 9110 §8.3.1, without parameters.
fn is_media_type(text: &str) -> bool {
    let is_token = |text: &str| {
        !text.is_empty()
            && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"!#$&-^_.+".contains(&byte))
    };
    let subtype_of = |rest: &str| is_token(rest.strip_suffix('*').unwrap_or(rest)) || rest == "*";
    text.split_once('/').is_some_and(|(kind, rest)| is_token(kind) && subtype_of(rest))
}

/// A host name or address, perhaps with a port; `*` or `*.suffix`.
fn is_host(text: &str) -> bool {
    if text == "*" {
        return true;
    }
    let host = text.strip_prefix("*.").unwrap_or(text);
    !host.is_empty() && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._:[]".contains(&byte))
}

fn is_url_path(text: &str) -> bool {
    text.starts_with('/') && text.bytes().all(|byte| byte.is_ascii_graphic() && !b"?#".contains(&byte))
}

/// What is wrong with a text that begins like a path.
fn no_path(text: &str) -> String {
    format!("expected a path of visible ASCII characters, without a query (\"?\") and \"#\", not {text:?}")
}

/// `*:80`, `10.0.0.0/8:8000-8099`, `[2001:db8::1]:443`, or an address, a prefix or `*` for every port.
pub(super) fn destination(text: &str) -> Option<Destination> {
    let address = match text {
        "*" => None,
        _ => match text.parse::<IpPrefix>() {
            Ok(prefix) => Some(prefix),
            Err(_) => return text.parse().ok(),
        },
    };
    Some(Destination { address, ports: PortRange::ANY })
}

fn show_duration(ms: u64) -> String {
    let (unit, name) = [(86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1000, "s")]
        .into_iter()
        .find(|(unit, _)| ms >= *unit && ms.is_multiple_of(*unit))
        .unwrap_or((1, "ms"));
    format!("{}{name}", ms / unit)
}

fn show_size(bytes: u64) -> String {
    let (unit, name) = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")]
        .into_iter()
        .find(|(unit, _)| bytes >= *unit && bytes.is_multiple_of(*unit))
        .unwrap_or((1, "B"));
    format!("{}{name}", bytes / unit)
}
