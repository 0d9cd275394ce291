//! What is found in a configuration file: errors and warnings, each with its place.

use std::fmt;

use serde_json::{Value, json};

use super::keys::FILE;
use super::kind::Kind;

/// One thing that is wrong in a configuration file, or that its writer should know.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Finding {
    pub file: String,
    /// Line and column, from 1; `None` when the file as a whole is meant.
    pub place: Option<(usize, usize)>,
    pub message: String,
    pub hint: Option<String>,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if let Some((line, column)) = self.place {
            write!(f, ":{line}:{column}")?;
        }
        write!(f, ": {}", self.message)?;
        match &self.hint {
            Some(hint) => write!(f, "; {hint}"),
            None => Ok(()),
        }
    }
}

impl Finding {
    /// As `tidegate check --json` prints it.
    pub(crate) fn to_json(&self, severity: &str) -> Value {
        json!({
            "severity": severity,
            "file": self.file,
            "line": self.place.map(|(line, _)| line),
            "column": self.place.map(|(_, column)| column),
            "message": self.message,
            "hint": self.hint,
        })
    }
}

/// Findings as lines for people.
pub(crate) fn lines(findings: &[Finding]) -> String {
    findings.iter().map(Finding::to_string).collect::<Vec<_>>().join("\n")
}

/// Findings of a kind that are kept; of more there is only the number.
const MAX_FINDINGS: usize = 100;

/// Collects findings while a file is checked.
pub(super) struct Report<'t> {
    file: &'t str,
    text: &'t str,
    /// From here on the file's structure is not what its writer meant: only what stands before is judged.
    trusted_to: usize,
    /// Where each line begins.
    lines: Vec<usize>,
    errors: Vec<Finding>,
    warnings: Vec<Finding>,
    /// Errors and warnings that were too many to keep.
    more: (usize, usize),
}

impl<'t> Report<'t> {
    pub fn new(file: &'t str, text: &'t str) -> Self {
        let breaks = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(at, _)| at + 1);
        Self {
            file,
            text,
            trusted_to: usize::MAX,
            lines: std::iter::once(0).chain(breaks).collect(),
            errors: Vec::new(),
            warnings: Vec::new(),
            more: (0, 0),
        }
    }

    /// Something is wrong at `offset`, in bytes from the file's start.
    pub fn error(&mut self, offset: usize, message: String, hint: Option<String>) {
        // A line that is no TOML has been reported already.
        if offset < self.trusted_to && !(self.is_damaged() && self.has_error_in_line_of(offset)) {
            self.keep_error(offset, message, hint);
        }
    }

    fn keep_error(&mut self, offset: usize, message: String, hint: Option<String>) {
        if self.errors.len() < MAX_FINDINGS {
            let finding = self.finding(offset, message, hint);
            self.errors.push(finding);
        } else {
            self.more.0 += 1;
        }
    }

    fn has_error_in_line_of(&self, offset: usize) -> bool {
        let line = self.line_of(offset);
        self.errors.iter().any(|known| known.place.is_some_and(|(known, _)| known == line))
    }

    /// Something that must be in the file is not there; where the file is damaged, it may well be meant to be.
    pub fn missing(&mut self, offset: usize, message: String, hint: Option<String>) {
        if !self.is_damaged() {
            self.error(offset, message, hint);
        }
    }

    pub fn warn(&mut self, offset: usize, message: String) {
        if self.warnings.len() < MAX_FINDINGS {
            let finding = self.finding(offset, message, None);
            self.warnings.push(finding);
        } else {
            self.more.1 += 1;
        }
    }

    /// A place where the file is not TOML.
    pub fn syntax(&mut self, error: &toml::de::Error) {
        let offset = error.span().map_or(0, |span| span.start);
        // The parser goes on with a guess; one error a line is enough.
        if !self.has_error_in_line_of(offset) {
            // What is only counted needs no words.
            let (message, hint) = match self.errors.len() < MAX_FINDINGS {
                true => self.in_words(error, offset),
                false => (String::new(), None),
            };
            self.keep_error(offset, message, hint);
        }
        // A value that is no TOML ends with its line.
        let is_about_a_value = error.message() == "duplicate key"
            || error.message().starts_with("string values must be quoted")
            || self.key_at(offset).is_some_and(|(_, value)| is_bare(value));
        self.trusted_to = self.trusted_to.min(if is_about_a_value { usize::MAX - 1 } else { offset });
    }

    /// What is wrong with the TOML at a place, by the name of the key that it is about; and what can be done.
    fn in_words(&self, error: &toml::de::Error, offset: usize) -> (String, Option<String>) {
        let message = error.message();
        let hint = syntax_hint(message);
        if message == "duplicate key"
            && let Some(key) = error.span().and_then(|span| self.text.get(span))
        {
            let first = self.line_of_key(key, offset).map(|line| format!(", first in line {line}"));
            return (
                format!("{}{key}: {message}{}", self.section_at(offset), first.unwrap_or_default()),
                hint,
            );
        }
        let Some((key, value)) = self.key_at(offset) else {
            // A list that is open takes the header of the next table for one of its values.
            let is_header = self.line_at(offset).is_some_and(|(_, line)| header(line.trim()).is_some());
            let is_open = is_header && message.starts_with("missing comma");
            return (message.to_owned(), if is_open { Some(OPEN_LIST.to_owned()) } else { hint });
        };
        let mut path = format!("{}{key}", self.section_at(offset));
        let mut value = value;
        if let Some((inner, written)) = value.starts_with('{').then(|| self.inner_key_at(offset)).flatten() {
            path = format!("{path}.{inner}");
            value = written;
        }
        let kind = FILE.kind_of(&path);
        if let Some(Kind::List { of, .. }) = kind
            && value.starts_with('[')
            && let Some(item) = self.bare_item_at(offset)
        {
            return (format!("{path}: expected {}, not {item}", of.expected()), how_to_write(*of, item));
        }
        match kind {
            Some(kind) if is_bare(value) => {
                let found = if value.is_empty() { "found nothing".into() } else { format!("not {value}") };
                (format!("{path}: expected {}, {found}", kind.expected()), how_to_write(kind, value))
            }
            None if value.is_empty() => (format!("{path}: expected a value, found nothing"), None),
            _ => {
                let is_open = value.starts_with('"') && value.matches('"').count() == 1;
                let hint = match value {
                    _ if is_open => Some(OPEN_TEXT.to_owned()),
                    value if is_bare_text(value) => Some(QUOTES.to_owned()),
                    _ => hint,
                };
                (format!("{path}: {message}"), hint)
            }
        }
    }

    /// The lines before the one of a place, the last first, each with its number.
    fn lines_before(&self, offset: usize) -> impl Iterator<Item = (usize, &'t str)> {
        let line = self.line_of(offset);
        let text = self.text.lines().take(line - 1).collect::<Vec<_>>();
        text.into_iter().enumerate().rev().map(|(index, text)| (index + 1, text.trim()))
    }

    /// `listen.` within `[[listen]]`: what stands before a key's name in other messages.
    fn section_at(&self, offset: usize) -> String {
        let header = self.lines_before(offset).find_map(|(_, line)| header(line));
        header.map_or(String::new(), |name| format!("{name}."))
    }

    /// The line of the first key of this name in the table of a place.
    fn line_of_key(&self, key: &str, offset: usize) -> Option<usize> {
        let table = self.lines_before(offset).take_while(|(_, line)| header(line).is_none());
        table
            .filter(|(_, line)| key_and_value(line).is_some_and(|(known, _)| known == key))
            .last()
            .map(|(line, _)| line)
    }

    /// Where the line of a place begins, and the line.
    fn line_at(&self, offset: usize) -> Option<(usize, &'t str)> {
        let start = *self.lines.get(self.line_of(offset) - 1)?;
        Some((start, self.text.get(start..)?.lines().next()?))
    }

    /// The key, and what is written for it, if a place lies behind a key's `=` in its line.
    fn key_at(&self, offset: usize) -> Option<(&'t str, &'t str)> {
        let (start, line) = self.line_at(offset)?;
        let (key, value) = key_and_value(line)?;
        (offset > start + line.find('=')?).then_some((key, value))
    }

    /// The same for a place within `{ key = value }`.
    fn inner_key_at(&self, offset: usize) -> Option<(&'t str, &'t str)> {
        let (start, line) = self.line_at(offset)?;
        let before = line.get(..offset - start)?;
        let is_in_a_text = before.matches('"').count() % 2 == 1;
        let after_sign = before.rfind(['{', ','])? + 1;
        let inner = line.get(after_sign..)?.split([',', '}']).next()?;
        key_and_value(inner).filter(|_| !is_in_a_text)
    }

    /// The value of a list that a place lies in, if it looks like a text without its quotes.
    fn bare_item_at(&self, offset: usize) -> Option<&'t str> {
        let (start, line) = self.line_at(offset)?;
        let begin = line.get(..offset - start)?.rfind(['[', ','])? + 1;
        let item = line.get(begin..)?.split([',', ']']).next()?.trim();
        is_bare_text(item).then_some(item)
    }

    /// The file's name.
    pub fn file(&self) -> &str {
        self.file
    }

    /// Whether the file is not TOML somewhere.
    pub fn is_damaged(&self) -> bool {
        self.trusted_to != usize::MAX
    }

    /// The line of a place in the file, from 1.
    pub fn line_of(&self, offset: usize) -> usize {
        self.lines.partition_point(|start| *start <= offset)
    }

    /// Errors and warnings in the order of the file.
    pub fn into_findings(mut self) -> (Vec<Finding>, Vec<Finding>) {
        self.errors.sort_by_key(|finding| finding.place);
        self.warnings.sort_by_key(|finding| finding.place);
        let (more_errors, more_warnings) = self.more;
        for (findings, more, what) in
            [(&mut self.errors, more_errors, "errors"), (&mut self.warnings, more_warnings, "warnings")]
        {
            if more > 0 {
                let message = format!("and {more} more {what}");
                findings.push(Finding { file: self.file.to_owned(), place: None, message, hint: None });
            }
        }
        (self.errors, self.warnings)
    }

    fn finding(&self, offset: usize, message: String, hint: Option<String>) -> Finding {
        Finding { file: self.file.to_owned(), place: Some(self.place(offset)), message, hint }
    }

    /// The line and column of a place in the file, from 1.
    pub fn place(&self, offset: usize) -> (usize, usize) {
        let line = self.line_of(offset);
        let start = self.lines.get(line - 1).copied().unwrap_or(0);
        let before = self.text.get(start..offset).unwrap_or("");
        (line, before.chars().count() + 1)
    }
}

const QUOTES: &str = "put the value in \"quotes\"";
const OPEN_TEXT: &str = "the text has no closing quote";
const OPEN_LIST: &str = "is the ] of the list before it missing?";

fn syntax_hint(message: &str) -> Option<String> {
    message.starts_with("string values must be quoted").then(|| QUOTES.to_owned())
}

/// How a value that is no TOML is written rightly, if it lacks no more than quotes.
fn how_to_write(kind: Kind, value: &str) -> Option<String> {
    match kind {
        _ if !value.is_empty() && !is_bare_text(value) => None,
        Kind::List { of, .. } if of.is_text() && !value.is_empty() => Some(format!("write [\"{value}\"]")),
        kind if kind.is_text() => Some(QUOTES.to_owned()),
        _ => None,
    }
}

/// The name in `[name]` or `[[name]]`.
fn header(line: &str) -> Option<&str> {
    let name = line.strip_prefix('[')?.trim_start_matches('[').split(']').next()?.trim();
    (!name.is_empty() && name.bytes().all(is_key_byte)).then_some(name)
}

/// `key = value`, for a key that needs no quotes.
fn key_and_value(line: &str) -> Option<(&str, &str)> {
    let (key, value) = line.split_once('=')?;
    let (key, value) = (key.trim(), value.trim());
    // Without quotes and brackets around it, a `#` begins a comment.
    let value = if is_bare(value) { value.split('#').next().unwrap_or(value).trim() } else { value };
    (!key.is_empty() && key.bytes().all(is_key_byte)).then_some((key, value))
}

fn is_key_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-_.".contains(&byte)
}

/// Whether a value is, or was to be, neither quoted nor a list or a table: it ends with its line.
fn is_bare(value: &str) -> bool {
    !value.starts_with(['"', '\'', '[', '{'])
}

/// Whether a value looks like a text that lacks its quotes: an address, a duration or a name.
fn is_bare_text(value: &str) -> bool {
    is_bare(value)
        && value.bytes().any(|byte| byte.is_ascii_alphanumeric())
        && value.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".:/-_*@".contains(&byte))
}

/// The candidate with the fewest edits, if it is near enough to be meant.
pub(super) fn nearest<'c>(wanted: &str, candidates: impl Iterator<Item = &'c str>) -> Option<&'c str> {
    candidates
        .map(|candidate| (strsim::damerau_levenshtein(wanted, candidate), candidate))
        .filter(|(distance, candidate)| *distance <= (candidate.len() / 3).max(2))
        .min()
        .map(|(_, candidate)| candidate)
}
