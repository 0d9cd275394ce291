//! What is found in a configuration file: errors and warnings, each with its place.

use std::fmt;

use serde_json::{Value, json};

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
        let message = match (error.message(), error.span().and_then(|span| self.text.get(span))) {
            (about @ "duplicate key", Some(key)) => format!("{key}: {about}"),
            (message, _) => message.to_owned(),
        };
        // The parser goes on with a guess; one error a line is enough.
        if !self.has_error_in_line_of(offset) {
            self.keep_error(offset, message, syntax_hint(error.message()));
        }
        let is_about_a_value = ["duplicate key", "string values must be quoted"]
            .iter()
            .any(|about| error.message().starts_with(about));
        self.trusted_to = self.trusted_to.min(if is_about_a_value { usize::MAX - 1 } else { offset });
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

    fn place(&self, offset: usize) -> (usize, usize) {
        let line = self.line_of(offset);
        let start = self.lines.get(line - 1).copied().unwrap_or(0);
        let before = self.text.get(start..offset).unwrap_or("");
        (line, before.chars().count() + 1)
    }
}

fn syntax_hint(message: &str) -> Option<String> {
    message.starts_with("string values must be quoted").then(|| "put the value in \"quotes\"".to_owned())
}

/// The candidate with the fewest edits, if it is near enough to be meant.
pub(super) fn nearest<'c>(wanted: &str, candidates: impl Iterator<Item = &'c str>) -> Option<&'c str> {
    candidates
        .map(|candidate| (strsim::damerau_levenshtein(wanted, candidate), candidate))
        .filter(|(distance, candidate)| *distance <= (candidate.len() / 3).max(2))
        .min()
        .map(|(_, candidate)| candidate)
}
