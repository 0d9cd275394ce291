//! Where a configuration file says what only a start finds to be wrong: addresses that are taken, servers that are not
//! there.

use std::borrow::Cow;
use std::net::SocketAddr;

use super::Finding;
use super::keys::FILE;
use super::kind::Kind;
use super::report::Report;
use super::walk::Values;

/// Values of a file that a start or a reload may fail by, each with its place.
#[derive(Clone, Debug, Default)]
pub(crate) struct Places(Vec<(Subject, Place)>);

/// A file, and a line and a column in it.
type Place = (String, (usize, usize));

/// What a value of the file stands for.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Subject {
    /// `listen.address`.
    Listener(SocketAddr),
    /// `upstream.servers` of the group with this name.
    Upstream(String),
    /// `upstream.tls.authority`, `upstream.tls.certificate` of the group with this name.
    UpstreamTls(String, &'static str),
    /// `certificate.chain`, `certificate.key`: the files of the certificate with this number.
    Certificate(usize, &'static str),
    /// What a Trickles listener at this address has under this key: another listener may have the same address.
    Trickles(SocketAddr, TricklesKey),
    /// What a section, or a key that is there once, says: `cache.memory`, `workers`, `gate`.
    Key(Cow<'static, str>),
}

/// Keys of a Trickles listener that a start may fail by.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum TricklesKey {
    Address,
    Keys,
    Format,
    Interface,
}

impl TricklesKey {
    const ALL: [Self; 4] = [Self::Address, Self::Keys, Self::Format, Self::Interface];

    /// Within its section.
    fn name(self) -> &'static str {
        match self {
            Self::Address => "address",
            Self::Keys => "keys",
            Self::Format => "format",
            Self::Interface => "interface",
        }
    }
}

impl Subject {
    /// `admin.address`.
    pub const ADMIN: Self = Self::Key(Cow::Borrowed("admin.address"));
    /// `cache.path`.
    pub const ACME_PATH: Self = Self::Key(Cow::Borrowed("acme.path"));
    /// Where the cache's file is.
    pub const CACHE: Self = Self::Key(Cow::Borrowed("cache.path"));
    /// `cache.memory`.
    pub const CACHE_MEMORY: Self = Self::Key(Cow::Borrowed("cache.memory"));
    /// `log.access`.
    pub const ACCESS_LOG: Self = Self::Key(Cow::Borrowed("log.access"));

    /// The key in the file.
    fn key(&self) -> String {
        match self {
            Self::Listener(_) => "listen.address".into(),
            Self::Upstream(_) => "upstream.servers".into(),
            Self::UpstreamTls(_, key) => format!("upstream.tls.{key}"),
            Self::Certificate(_, key) => format!("certificate.{key}"),
            Self::Trickles(_, key) => format!("listen.{}", key.name()),
            Self::Key(key) => key.clone().into_owned(),
        }
    }
}

impl Places {
    pub(super) fn of(file: &Values, report: &Report<'_>) -> Self {
        let mut of = Vec::new();
        let mut note = |subject, values: &Values, key| {
            if let Some(offset) = values.offset_of(key) {
                of.push((subject, (report.file().to_owned(), report.place(offset))));
            }
        };
        for section in file.tables("listen") {
            let Some(listen) = section.listen("address") else { continue };
            if section.text("protocol").as_deref() != Some("trickles") {
                note(Subject::Listener(listen.address), section, "address");
                continue;
            }
            for key in TricklesKey::ALL {
                note(Subject::Trickles(listen.address, key), section, key.name());
            }
        }
        for section in file.tables("upstream") {
            let Some(name) = section.text("name") else { continue };
            if let Some(tls) = section.table("tls") {
                for key in ["authority", "certificate"] {
                    note(Subject::UpstreamTls(name.clone(), key), tls, key);
                }
            }
            note(Subject::Upstream(name), section, "servers");
        }
        for (number, section) in file.tables("certificate").iter().enumerate() {
            for key in ["chain", "key"] {
                note(Subject::Certificate(number, key), section, key);
            }
        }
        for key in FILE.keys {
            note(Subject::Key(key.name.into()), file, key.name);
            if let (Kind::Table(below), Some(section)) = (key.kind, file.table(key.name)) {
                for inner in below.keys {
                    note(Subject::Key(format!("{}.{}", key.name, inner.name).into()), section, inner.name);
                }
            }
        }
        Self(of)
    }

    /// `FILE:LINE:COLUMN` of a subject that a file has.
    pub(crate) fn place(&self, subject: &Subject) -> Option<String> {
        let (_, (file, (line, column))) = self.0.iter().find(|(known, _)| known == subject)?;
        Some(format!("{file}:{line}:{column}"))
    }

    /// The command line has taken the place of what the file says of these.
    pub(crate) fn forget(&mut self, overridden: impl Fn(&Subject) -> bool) {
        self.0.retain(|(subject, _)| !overridden(subject));
    }

    /// What is wrong with `subject`, at its place in the file if it comes from there.
    pub(crate) fn say(&self, subject: &Subject, message: &str, hint: &str) -> String {
        match self.finding(subject, message, hint) {
            Some(finding) => finding.to_string(),
            None if hint.is_empty() => format!("error: {message}"),
            None => format!("error: {message}; {hint}"),
        }
    }

    /// The finding about `subject`, if it comes from a file.
    pub(crate) fn finding(&self, subject: &Subject, message: &str, hint: &str) -> Option<Finding> {
        let (_, (file, place)) = self.0.iter().find(|(known, _)| known == subject)?;
        let message = format!("{}: {message}", subject.key());
        let hint = Some(hint.to_owned()).filter(|hint| !hint.is_empty());
        Some(Finding { file: file.clone(), place: Some(*place), message, hint })
    }
}
