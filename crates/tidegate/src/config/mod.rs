//! The configuration file: TOML, checked against one table of keys, every error with its place and a hint.
//!
//! `keys` is the table, `kind` reads single values, `walk` goes along both, `settings` turns the result into what the
//! engine takes and checks what only makes sense together. `reference` and `schema` write the table down for people
//! and for editors.

mod acme;
mod defence;
mod icap;
mod keys;
mod kind;
mod places;
#[cfg(test)]
mod reference;
mod report;
mod room;
mod routes;
mod rules;
mod schema;
mod settings;
#[cfg(test)]
mod tests;
mod walk;

use std::io::Read;
use std::path::Path;

use tidegate_accelerator::settings::Settings;
use tidegate_accelerator::tls::{self, CertificateError};
use toml::de::DeTable;

pub(crate) use defence::Defence;
pub(crate) use places::{Places, Subject, TricklesKey};
pub(crate) use report::{Finding, lines};
pub(crate) use rules::Gate;
pub(crate) use schema::schema;

use crate::acme::AcmeSettings;
use crate::trickles::{self, TricklesListener};
use crate::units::ListenAddress;
use report::Report;

/// Far beyond any file that a person writes; a device or a log given by mistake ends here.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// What a configuration file says, checked.
#[derive(Clone, Debug)]
pub(crate) struct Loaded {
    pub settings: Settings,
    /// The listeners' addresses as written, in the order of the settings.
    pub listen: Vec<ListenAddress>,
    /// Listeners of the Trickles transport; they are not among the settings'.
    pub trickles: Vec<TricklesListener>,
    pub admin: ListenAddress,
    /// Where the file says what only a start finds to be wrong.
    pub places: Places,
    /// The groups without which the start fails: used by a route, and not `require = false`.
    pub required: Vec<String>,
    /// Rules, and how they are enforced.
    pub gate: Gate,
    /// How clients that abuse the site are found, and what is done about them.
    pub defence: Defence,
    /// Which certificates are ordered of whom.
    pub acme: Option<AcmeSettings>,
    /// What the file asks for and does not get.
    pub warnings: Vec<Finding>,
}

/// What to do about a certificate that cannot be used.
pub(crate) fn certificate_hint(error: &CertificateError) -> &'static str {
    match error {
        CertificateError::Mismatch { .. } => "chain and key have to be of one issue",
        CertificateError::NoAuthorities => {
            "install those of the system (ca-certificates), or name one in `authority`"
        }
        CertificateError::Nameless(_) => "no client would be shown it: only the first may be without one",
        _ => "it has to be a PEM file, not encrypted, that this user may read",
    }
}

/// Reads and checks a configuration file.
pub(crate) fn load(path: &Path) -> Result<Loaded, Vec<Finding>> {
    let file = path.display().to_string();
    let failed = |message: String| vec![Finding { file: file.clone(), place: None, message, hint: None }];
    let mut bytes = Vec::new();
    std::fs::File::open(path)
        .and_then(|opened| opened.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes))
        .map_err(|error| failed(format!("cannot read the configuration: {error}")))?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(failed(format!("larger than {} MiB: this is no configuration", MAX_FILE_BYTES >> 20)));
    }
    match String::from_utf8(bytes) {
        Ok(text) => parse(&file, &text),
        Err(error) => {
            let valid = String::from_utf8_lossy(&error.as_bytes()[..error.utf8_error().valid_up_to()]);
            let mut report = Report::new(&file, &valid);
            report.error(valid.len(), "expected UTF-8 text".into(), None);
            Err(report.into_findings().0)
        }
    }
}

/// Checks the text of a configuration file.
pub(crate) fn parse(file: &str, text: &str) -> Result<Loaded, Vec<Finding>> {
    let mut report = Report::new(file, text);
    let (table, syntax_errors) = DeTable::parse_recoverable(text);
    for error in &syntax_errors {
        report.syntax(error);
    }
    let values = walk::walk(&keys::FILE, table.get_ref(), 0, &mut report);
    let mut loaded = settings::build(&values, &mut report);
    let (errors, warnings) = report.into_findings();
    loaded.warnings = warnings;
    if errors.is_empty() { Ok(loaded) } else { Err(errors) }
}

/// What settings lack for a start: somewhere to listen, something to serve. `run` can be told on its command line.
pub(crate) fn still_missing(loaded: &Loaded, file: Option<&Path>) -> Vec<Finding> {
    settings::missing(loaded, &file.map_or(String::new(), |file| file.display().to_string()))
}

/// What is wrong in the files of keys and certificates that are on this host.
pub(crate) fn wrong_keys(loaded: &Loaded) -> Vec<Finding> {
    let wrong = loaded.trickles.iter().filter_map(|listener| {
        let error = trickles::read_keys(listener.keys.as_deref()?).err()?;
        let place = Subject::Trickles(listener.listen.address, TricklesKey::Keys);
        (!error.is_of_this_host())
            .then(|| loaded.places.finding(&place, &error.to_string(), trickles::KEY_FILE_HINT))?
    });
    let unusable = loaded.unusable_certificates().chain(loaded.unusable_trust());
    let unusable = unusable.filter(|(error, _)| !error.is_of_this_host());
    wrong.chain(unusable.filter_map(|(_, finding)| finding)).collect()
}

impl Loaded {
    /// The certificates that cannot be used: why not, and how that is said at its place in the file.
    pub(crate) fn unusable_certificates(&self) -> impl Iterator<Item = (CertificateError, Option<Finding>)> {
        let certificates = &self.settings.certificates;
        tls::check(certificates).into_iter().map(|(number, error)| {
            let is_chain =
                error.file() == certificates.get(number).map(|certificate| certificate.chain.as_path());
            let place = Subject::Certificate(number, if is_chain { "chain" } else { "key" });
            let finding = self.places.finding(&place, &error.to_string(), certificate_hint(&error));
            (error, finding)
        })
    }

    /// The groups whose servers cannot be told from others, in the same way.
    pub(crate) fn unusable_trust(&self) -> impl Iterator<Item = (CertificateError, Option<Finding>)> {
        self.settings.upstreams.iter().filter_map(|upstream| {
            let error = upstream.trust().err()?;
            let finding = self.unusable_trust_of(&upstream.name, &error);
            Some((error, finding))
        })
    }

    /// Why the servers of this group cannot be told from others, at its place in the file.
    pub(crate) fn unusable_trust_of(&self, name: &str, error: &CertificateError) -> Option<Finding> {
        let tls =
            self.settings.upstreams.iter().find(|upstream| upstream.name == name).map(|known| &known.tls)?;
        let subject = match (error, error.file()) {
            (CertificateError::NoAuthorities, _) => Subject::Upstream(name.to_owned()),
            (_, Some(file)) if tls.authority.as_deref() == Some(file) => {
                Subject::UpstreamTls(name.to_owned(), "authority")
            }
            _ => Subject::UpstreamTls(name.to_owned(), "certificate"),
        };
        self.places.finding(&subject, &error.to_string(), certificate_hint(error))
    }
}

/// What the file needs of the host and would not find on this one. The file may be meant for another.
pub(crate) fn not_on_this_host(loaded: &Loaded, file: &Path) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut find = |message: String, hint: &str| {
        let (file, hint) = (file.display().to_string(), Some(hint.to_owned()));
        findings.push(Finding { file, place: None, message, hint });
    };
    for name in loaded.gate.interfaces.iter().flatten() {
        if !Path::new("/sys/class/net").join(name).exists() {
            let hint = "`ip link` lists them; tidegate does not start without it";
            find(format!("gate.interfaces: there is no network interface {name:?} here"), hint);
        }
    }
    if let Some(path) = &loaded.settings.cache.path
        && !path.exists()
    {
        find(format!("cache.path: there is no {} yet", path.display()), "it is made at the start");
    }
    for path in loaded.trickles.iter().filter_map(|listener| listener.keys.as_deref()) {
        if let Err(error) = trickles::read_keys(path)
            && error.is_of_this_host()
        {
            find(format!("listen.keys: {error}"), trickles::KEY_FILE_HINT);
        } else if let Some(warning) = trickles::key_file_is_open(path) {
            find(format!("listen.keys: {warning}"), trickles::KEY_FILE_MODE);
        }
    }
    for (error, _) in loaded.unusable_certificates().filter(|(error, _)| error.is_of_this_host()) {
        find(format!("certificate: {error}"), certificate_hint(&error));
    }
    for (error, _) in loaded.unusable_trust().filter(|(error, _)| error.is_of_this_host()) {
        find(format!("upstream.tls: {error}"), certificate_hint(&error));
    }
    let log = loaded.settings.access_log.as_ref().and_then(|log| log.path.as_deref());
    if let Some(folder) = log.and_then(Path::parent).filter(|folder| !folder.as_os_str().is_empty())
        && !folder.is_dir()
    {
        let hint = "make it; tidegate does not start without it";
        find(format!("log.access: there is no folder {} here", folder.display()), hint);
    }
    if let Some(expected) = room::expected(&loaded.settings.cache) {
        let hint = "tidegate does not start with more";
        match loaded.places.finding(&Subject::CACHE_MEMORY, &expected, hint) {
            Some(finding) => findings.push(finding),
            None => find(default_cache(loaded, &expected), hint),
        }
    }
    findings
}

/// What is said of a cache whose size nobody chose.
fn default_cache(loaded: &Loaded, expected: &str) -> String {
    let default = loaded.settings.cache.memory_bytes >> 20;
    format!("cache.memory: it is {default} MiB if a file does not say otherwise: {expected}")
}

/// Why a start with this cache would use up the memory or the disk.
pub(crate) fn oversized_cache(loaded: &Loaded) -> Option<String> {
    let expected = room::expected(&loaded.settings.cache)?;
    let chosen = loaded.places.finding(&Subject::CACHE_MEMORY, &expected, "make it smaller");
    Some(chosen.map_or_else(
        || format!("error: {}; set it in a file for --config", default_cache(loaded, &expected)),
        |finding| finding.to_string(),
    ))
}

/// What holds without a configuration file.
pub(crate) fn defaults() -> Loaded {
    let mut report = Report::new("", "");
    let values = walk::walk(&keys::FILE, &DeTable::new(), 0, &mut report);
    settings::build(&values, &mut report)
}
