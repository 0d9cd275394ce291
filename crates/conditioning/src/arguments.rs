//! A filter's arguments: `NAME=key=value,key=value`.

use std::str::FromStr;
use std::time::Duration;

/// One argument that a filter takes: a row of its `--help`.
#[derive(Clone, Copy, Debug)]
pub struct Argument {
    /// Its key.
    pub key: &'static str,
    /// Its default, as one would write it.
    pub default: &'static str,
    /// What it does, with unit.
    pub help: &'static str,
}

/// Why an argument was refused.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum ArgumentError {
    /// There is no such key.
    #[error("unknown argument {key:?}; known are {known}")]
    Unknown {
        /// The key as written.
        key: String,
        /// What there is.
        known: String,
    },
    /// A file that an argument names cannot be used.
    #[error("{file}: {reason}")]
    File {
        /// The file.
        file: String,
        /// Why.
        reason: String,
    },
    /// What a file says that an argument names cannot be meant; a line each, with file, line and column.
    #[error("{0}")]
    Places(String),
    /// The value is not of the kind that the key takes.
    #[error("{key}={value}: expected {expected}")]
    Value {
        /// The key.
        key: &'static str,
        /// The value as written.
        value: String,
        /// What was expected.
        expected: &'static str,
    },
}

const A_DURATION: &str = "a duration such as 500ms, 10s or 2m";

/// The arguments of one filter.
#[derive(Clone, Debug)]
pub struct Arguments {
    values: Vec<(&'static Argument, String)>,
}

impl Arguments {
    /// Reads `key=value,key=value` against the table of what there is.
    ///
    /// # Errors
    /// A key is unknown.
    pub fn parse(text: &str, known: &'static [Argument]) -> Result<Self, ArgumentError> {
        let mut values: Vec<_> =
            known.iter().map(|argument| (argument, argument.default.to_owned())).collect();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (key, value) = part.split_once('=').unwrap_or((part, "yes"));
            let Some(place) = values.iter_mut().find(|(argument, _)| argument.key == key) else {
                let known: Vec<_> = known.iter().map(|argument| argument.key).collect();
                return Err(ArgumentError::Unknown { key: key.to_owned(), known: known.join(", ") });
            };
            place.1 = value.to_owned();
        }
        Ok(Self { values })
    }

    /// The value as written.
    pub fn text(&self, key: &str) -> &str {
        self.values.iter().find(|(argument, _)| argument.key == key).map_or("", |(_, value)| value)
    }

    /// What is wrong with a value that was not what was expected.
    pub(crate) fn wrong(&self, key: &'static str, expected: &'static str) -> ArgumentError {
        ArgumentError::Value { key, value: self.text(key).to_owned(), expected }
    }

    /// A value that std can read.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn number<N: FromStr>(&self, key: &'static str) -> Result<N, ArgumentError> {
        self.text(key).parse().map_err(|_| self.wrong(key, "a number"))
    }

    /// A number of which 0 makes no sense.
    ///
    /// # Errors
    /// It cannot be read, or is 0.
    pub fn positive<N: FromStr + Default + PartialEq>(&self, key: &'static str) -> Result<N, ArgumentError> {
        match self.number(key)? {
            zero if zero == N::default() => Err(self.wrong(key, "a number from 1 on")),
            number => Ok(number),
        }
    }

    /// `yes` or `no`.
    ///
    /// # Errors
    /// It is neither.
    pub fn flag(&self, key: &'static str) -> Result<bool, ArgumentError> {
        match self.text(key) {
            "yes" | "true" => Ok(true),
            "no" | "false" => Ok(false),
            _ => Err(self.wrong(key, "yes or no")),
        }
    }

    /// A duration: `500ms`, `10s`, `2m`.
    ///
    /// # Errors
    /// It is no duration.
    pub fn duration(&self, key: &'static str) -> Result<Duration, ArgumentError> {
        let value = self.text(key);
        let wrong = || self.wrong(key, A_DURATION);
        let digits = value.find(|c: char| !c.is_ascii_digit()).unwrap_or(value.len());
        let number: u64 = value[..digits].parse().map_err(|_| wrong())?;
        let unit_ms = match &value[digits..] {
            "ms" => 1,
            "s" => 1000,
            "m" => 60_000,
            _ => return Err(wrong()),
        };
        number.checked_mul(unit_ms).map(Duration::from_millis).ok_or_else(wrong)
    }

    /// A duration that is to take a while.
    ///
    /// # Errors
    /// It is no duration, or none at all.
    pub fn some_duration(&self, key: &'static str) -> Result<Duration, ArgumentError> {
        let some = Some(self.duration(key)?).filter(|duration| !duration.is_zero());
        some.ok_or_else(|| self.wrong(key, A_DURATION))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: &[Argument] = &[
        Argument { key: "timeout", default: "10s", help: "" },
        Argument { key: "keep", default: "no", help: "" },
    ];

    #[test]
    fn arguments_have_defaults_and_errors_name_what_was_expected() {
        let arguments = Arguments::parse("keep,timeout=250ms", KNOWN).unwrap();
        assert_eq!(arguments.duration("timeout"), Ok(Duration::from_millis(250)));
        assert_eq!(arguments.flag("keep"), Ok(true));
        let arguments = Arguments::parse("", KNOWN).unwrap();
        assert_eq!(arguments.duration("timeout"), Ok(Duration::from_secs(10)));
        let error = Arguments::parse("tiemout=1s", KNOWN).unwrap_err();
        assert_eq!(error.to_string(), "unknown argument \"tiemout\"; known are timeout, keep");
        let arguments = Arguments::parse("timeout=5 parsecs", KNOWN).unwrap();
        assert!(arguments.duration("timeout").is_err());
    }
}
