//! Walks a parsed file along the table of keys. Everything that is wrong is reported, not only the first of it.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use tidegate_accelerator::settings::ServerAddress;
use tidegate_core::IpPrefix;
use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue};

use super::keys::{FILE, Fallback, Key, Section};
use super::kind::{Kind, Value, describe};
use super::report::{Report, nearest};
use crate::units::ListenAddress;

/// The values of one table of a file; where a key is absent, its default.
pub(super) struct Values {
    /// Where the table begins, in bytes from the file's start.
    pub offset: usize,
    /// Whether the file has this table.
    pub given: bool,
    entries: BTreeMap<&'static str, Entry>,
}

/// A value and where it stands.
#[derive(Clone, Debug)]
pub(super) struct At<T> {
    pub offset: usize,
    pub value: T,
}

enum Entry {
    /// `None` for a default.
    One(Option<usize>, Value),
    List(Vec<At<Value>>),
    Table(Values),
    Tables(Vec<Values>),
    /// Given, and reported as wrong.
    Wrong,
}

/// Checks `table` against the keys of `section`.
pub(super) fn walk(
    section: &'static Section,
    table: &DeTable<'_>,
    offset: usize,
    report: &mut Report<'_>,
) -> Values {
    let mut values = Values { offset, given: true, entries: BTreeMap::new() };
    for (name, value) in table.iter() {
        let Some(key) = section.keys.iter().find(|key| key.name == name.get_ref()) else {
            unknown_key(section, name, report);
            continue;
        };
        let entry = read(section, key, name.span().start, value, report);
        values.entries.insert(key.name, entry);
    }
    for key in section.keys {
        if !values.entries.contains_key(key.name) {
            absent(section, key, &mut values, report);
        }
    }
    values
}

/// The defaults of a section that the file does not have.
fn defaults(section: &'static Section) -> Values {
    let mut values = Values { offset: 0, given: false, entries: BTreeMap::new() };
    for key in section.keys {
        if let Some(entry) = default_of(key) {
            values.entries.insert(key.name, entry);
        }
    }
    values
}

fn default_of(key: &Key) -> Option<Entry> {
    match (key.kind, key.default) {
        // A default that cannot be read is a fault of the table; `every_default_is_valid` tests for it.
        (kind, Fallback::Is(text)) => kind.read_default(text).ok().map(|value| Entry::One(None, value)),
        // `upstream.health_check` has required keys: absent means that there is none.
        (Kind::Table(section), _) if !has_required_key(section) => Some(Entry::Table(defaults(section))),
        _ => None,
    }
}

fn has_required_key(section: &Section) -> bool {
    section.keys.iter().any(|key| matches!(key.default, Fallback::Required))
}

fn absent(section: &'static Section, key: &Key, values: &mut Values, report: &mut Report<'_>) {
    if matches!(key.default, Fallback::Required) {
        let message = format!("{}: missing; expected {}", section.path_of(key.name), key.kind.expected());
        report.missing(values.offset, message, None);
    }
    if let Some(entry) = default_of(key) {
        values.entries.insert(key.name, entry);
    }
}

fn read(
    section: &'static Section,
    key: &Key,
    key_offset: usize,
    value: &Spanned<DeValue<'_>>,
    report: &mut Report<'_>,
) -> Entry {
    let path = section.path_of(key.name);
    let offset = value.span().start;
    match (key.kind, value.get_ref()) {
        (Kind::Table(below), DeValue::Table(table)) => Entry::Table(read_table(below, table, offset, report)),
        (Kind::Tables(below), DeValue::Array(array)) => {
            Entry::Tables(read_tables(&path, below, array, report))
        }
        (Kind::List { of, min }, DeValue::Array(array)) => {
            if array.len() < min {
                report.error(offset, format!("{path}: expected at least {min} of {}", of.expected()), None);
            }
            Entry::List(read_list(&path, *of, array, report))
        }
        // What takes no place in the file is the parser's guess, and the line has been reported.
        _ if value.span().is_empty() => Entry::Wrong,
        (Kind::Table(_) | Kind::Tables(_) | Kind::List { .. }, other) => {
            // The header of a table stands before its value; for `key = value` the value is what is wrong.
            let at = if matches!(other, DeValue::Table(_) | DeValue::Array(_)) { key_offset } else { offset };
            let message = format!("{path}: expected {}, not {}", key.kind.expected(), describe(other));
            report.error(at, message, None);
            Entry::Wrong
        }
        (kind, other) => match kind.read(other) {
            Ok(value) => Entry::One(Some(offset), value),
            Err(message) => {
                let hint = choice_hint(kind, other);
                report.error(offset, format!("{path}: {message}"), hint);
                Entry::Wrong
            }
        },
    }
}

fn read_table(
    below: &'static Section,
    table: &DeTable<'_>,
    offset: usize,
    report: &mut Report<'_>,
) -> Values {
    if !below.enforced {
        let title = below.title();
        report.warn(offset, format!("{title} is accepted and checked, but this version does not enforce it"));
    }
    walk(below, table, offset, report)
}

/// The tables of a list that are tables; others are reported.
fn read_tables(
    path: &str,
    below: &'static Section,
    array: &DeArray<'_>,
    report: &mut Report<'_>,
) -> Vec<Values> {
    let mut all = Vec::new();
    for item in array.iter() {
        let offset = item.span().start;
        match item.get_ref() {
            DeValue::Table(table) => all.push(read_table(below, table, offset, report)),
            other => {
                let expected = Kind::Tables(below).expected();
                report.error(offset, format!("{path}: expected {expected}, not {}", describe(other)), None);
            }
        }
    }
    all
}

/// The values of a list that are right; others are reported.
fn read_list(path: &str, of: Kind, array: &DeArray<'_>, report: &mut Report<'_>) -> Vec<At<Value>> {
    let mut all = Vec::new();
    for item in array.iter() {
        let offset = item.span().start;
        match of.read(item.get_ref()) {
            Ok(value) => {
                if let Some(meant) = prefix_meant(&value, item.get_ref()) {
                    report.warn(offset, format!("{path}: {meant}"));
                }
                all.push(At { offset, value });
            }
            Err(message) => report.error(offset, format!("{path}: {message}"), None),
        }
    }
    all
}

/// What a prefix means whose address has bits beyond its length.
fn prefix_meant(value: &Value, written: &DeValue<'_>) -> Option<String> {
    let (Value::Prefix(prefix), DeValue::String(text)) = (value, written) else { return None };
    let address: IpAddr = text.split('/').next()?.parse().ok()?;
    let differs = address.to_canonical() != prefix.address();
    differs.then(|| format!("{text:?} means {prefix}, all of it"))
}

fn choice_hint(kind: Kind, value: &DeValue<'_>) -> Option<String> {
    match (kind, value) {
        (Kind::Choice(names), DeValue::String(text)) => {
            nearest(text, names.iter().copied()).map(|name| format!("did you mean {name:?}?"))
        }
        _ => None,
    }
}

fn unknown_key(
    section: &'static Section,
    name: &Spanned<std::borrow::Cow<'_, str>>,
    report: &mut Report<'_>,
) {
    let (unknown, offset) = (name.get_ref().as_ref(), name.span().start);
    let names: Vec<&str> = section.keys.iter().map(|key| key.name).collect();
    let hint =
        nearest(unknown, names.iter().copied()).map(|name| format!("did you mean {name:?}?")).or_else(|| {
            let homes = FILE.walk().into_iter().filter(|other| !std::ptr::eq(*other, section));
            let home = homes.into_iter().find(|other| other.keys.iter().any(|key| key.name == unknown))?;
            Some(format!("it is a key of {}", home.title()))
        });
    let message = format!(
        "{}: unknown key in {}, expected one of {}",
        section.path_of(unknown),
        section.title(),
        names.join(", ")
    );
    report.error(offset, message, hint);
}

/// The value of `name`, or what stands for "nothing" where it was reported as wrong: the settings are then not used.
macro_rules! accessors {
    ($($accessor:ident: $type:ty = $variant:path;)*) => {$(
        pub fn $accessor(&self, name: &str) -> Option<$type> {
            match self.entries.get(name) {
                Some(Entry::One(_, $variant(value))) => Some(value.clone()),
                _ => None,
            }
        }
    )*};
}

impl Values {
    accessors! {
        flag: bool = Value::Flag;
        integer: u64 = Value::Integer;
        duration: Duration = Value::Duration;
        text: String = Value::Text;
        path: PathBuf = Value::Path;
        listen: ListenAddress = Value::Listen;
        number: f64 = Value::Number;
        prefix: IpPrefix = Value::Prefix;
        words: Vec<(String, String)> = Value::Words;
    }

    /// Where the value of `name` stands, if the file has it.
    pub fn offset_of(&self, name: &str) -> Option<usize> {
        match self.entries.get(name)? {
            Entry::One(offset, _) => *offset,
            Entry::List(list) => list.first().map(|at| at.offset),
            Entry::Table(table) => table.given.then_some(table.offset),
            Entry::Tables(tables) => tables.first().map(|table| table.offset),
            Entry::Wrong => None,
        }
    }

    /// Whether the file has `name`, right or wrong.
    pub fn has(&self, name: &str) -> bool {
        self.is_wrong(name) || self.offset_of(name).is_some()
    }

    /// Whether `name` was given and is wrong.
    pub fn is_wrong(&self, name: &str) -> bool {
        matches!(self.entries.get(name), Some(Entry::Wrong))
    }

    /// The server addresses of a list, or why there are none, each with the place of its text.
    pub fn servers(&self, name: &str) -> Vec<At<Result<Vec<ServerAddress>, String>>> {
        self.list(name, |value| match value {
            Value::Server(addresses) => Some(Ok(addresses.clone())),
            Value::Unresolved(message) => Some(Err(message.clone())),
            _ => None,
        })
    }

    /// The prefixes of a list.
    pub fn prefixes(&self, name: &str) -> Vec<IpPrefix> {
        let prefixes = self.list(name, |value| match value {
            Value::Prefix(prefix) => Some(*prefix),
            _ => None,
        });
        prefixes.into_iter().map(|at| at.value).collect()
    }

    /// The texts of a list, each with its place.
    pub fn texts(&self, name: &str) -> Vec<At<String>> {
        self.list(name, |value| match value {
            Value::Text(text) => Some(text.clone()),
            _ => None,
        })
    }

    /// The paths of a list, each with its place.
    pub fn paths(&self, name: &str) -> Vec<At<PathBuf>> {
        self.list(name, |value| match value {
            Value::Path(path) => Some(path.clone()),
            _ => None,
        })
    }

    fn list<T>(&self, name: &str, pick: impl Fn(&Value) -> Option<T>) -> Vec<At<T>> {
        match self.entries.get(name) {
            Some(Entry::List(list)) => list
                .iter()
                .filter_map(|at| pick(&at.value).map(|value| At { offset: at.offset, value }))
                .collect(),
            _ => Vec::new(),
        }
    }

    /// The table `name`, if it is there or has defaults only.
    pub fn table(&self, name: &str) -> Option<&Values> {
        match self.entries.get(name) {
            Some(Entry::Table(table)) => Some(table),
            _ => None,
        }
    }

    /// The tables `[[name]]`.
    pub fn tables(&self, name: &str) -> &[Values] {
        match self.entries.get(name) {
            Some(Entry::Tables(tables)) => tables,
            _ => &[],
        }
    }
}
