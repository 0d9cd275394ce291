//! Which filters a chain has, and where the installation's files are.

use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use crate::filters;
use crate::launcher::LaunchError;
use crate::neighbours::FilterError;
use crate::server::Terms;

/// A filter as asked for: `NAME[=ARGS]`, or `+NAME[=ARGS]` to share the process of the one before it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct FilterSpec {
    /// A name from the table of filters, or the path of a program.
    pub name: String,
    /// Its arguments, `key=value,key=value`.
    pub arguments: String,
    /// Whether it is in the process of the filter before it.
    pub shares: bool,
}

impl FilterSpec {
    /// Whether the filter is a program of somebody else's.
    pub fn is_program(&self) -> bool {
        self.name.contains('/')
    }
}

impl FromStr for FilterSpec {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (text, shares) = text.strip_prefix('+').map_or((text, false), |text| (text, true));
        let (name, arguments) = text.split_once('=').unwrap_or((text, ""));
        // The paper's own names (§4.1).
        let name = match name.strip_prefix("flt_") {
            Some("request") => "package",
            Some(name) => name,
            None => name,
        };
        Ok(Self { name: name.to_owned(), arguments: arguments.to_owned(), shares })
    }
}

/// The chain to start: every chain begins with `package`.
///
/// # Errors
/// A filter is unknown, or its arguments are refused.
pub fn plan(asked: &[FilterSpec]) -> Result<Vec<FilterSpec>, LaunchError> {
    let default = ["package", "persist", "normalize", "prior"];
    let mut chain: Vec<FilterSpec> = if asked.is_empty() {
        default.iter().filter_map(|name| name.parse().ok()).collect()
    } else {
        asked.to_vec()
    };
    if chain.first().is_none_or(|first| first.name != "package") {
        chain.insert(0, FilterSpec { name: "package".to_owned(), arguments: String::new(), shares: false });
    }
    for (at, filter) in chain.iter().enumerate() {
        if filter.is_program() {
            continue;
        }
        let kind = filters::find(&filter.name).ok_or_else(|| LaunchError::UnknownFilter {
            name: filter.name.clone(),
            known: filters::names(),
        })?;
        let refused = |reason: String| LaunchError::FilterArguments { name: filter.name.clone(), reason };
        kind.check(&filter.arguments).map_err(|error| refused(error.to_string()))?;
        if at > 0 && filter.name == "package" {
            return Err(refused("only the first filter can own the listening socket".to_owned()));
        }
        if filter.name == "persist" && chain[..at].iter().any(|before| before.name == filter.name) {
            return Err(refused(
                "a chain has one at most: there is nothing left to do for another".to_owned(),
            ));
        }
    }
    for pair in chain.windows(2).filter(|pair| pair[1].shares) {
        let may_share = |filter: &FilterSpec| {
            filters::find(&filter.name).map_or((false, false), filters::Kind::may_share)
        };
        let (before, after) = (&pair[0], &pair[1]);
        let reason = match (may_share(before), may_share(after)) {
            ((_, true), (true, _)) => continue,
            ((true, false), (true, _)) => {
                format!("{} holds requests, and is the last of its process", before.name)
            }
            ((_, true), _) => format!("{} has a process of its own", after.name),
            _ => format!("{} has a process of its own", before.name),
        };
        return Err(LaunchError::FilterArguments { name: format!("+{}", after.name), reason });
    }
    Ok(chain)
}

/// On which terms the server may keep connections; `None`: not at all.
///
/// # Errors
/// A filter wants to see each request.
pub fn terms(chain: &[FilterSpec], linger: Duration) -> Result<Option<Terms>, LaunchError> {
    if linger.is_zero() {
        return Ok(None);
    }
    let mut terms = Terms { time: linger, ..Terms::default() };
    for filter in chain {
        match filter.name.as_str() {
            "package" | "persist" => {}
            "normalize" => {
                let refused = |error: FilterError| LaunchError::FilterArguments {
                    name: filter.name.clone(),
                    reason: error.to_string(),
                };
                terms.normal_to.push(filters::normalize::personality(&filter.arguments).map_err(refused)?);
            }
            "prior" => terms.in_order = true,
            _ => return Err(LaunchError::UnseenRequests(filter.name.clone())),
        }
    }
    Ok(Some(terms))
}

/// Looks for the programs of somebody else's before anything is started.
///
/// # Errors
/// One is not there, or cannot be executed.
pub fn check_programs(chain: &[FilterSpec]) -> Result<(), LaunchError> {
    use std::os::unix::fs::PermissionsExt;
    for filter in chain.iter().filter(|filter| filter.is_program()) {
        let no_program = |reason| LaunchError::NoProgram { program: filter.name.clone(), reason };
        let metadata = std::fs::metadata(&filter.name).map_err(|_| no_program("there is no such file"))?;
        if !metadata.is_file() || metadata.permissions().mode() & 0o111 == 0 {
            return Err(no_program("it is no program that may be executed (chmod +x)"));
        }
    }
    Ok(())
}

/// The processes of a chain: each filter, with those that share its process.
pub fn processes(chain: &[FilterSpec]) -> impl Iterator<Item = &[FilterSpec]> {
    chain.chunk_by(|_, next| next.shares)
}

/// Directories where an installation may have put what belongs to it, seen from the running program.
fn places(relative: &[&str]) -> Vec<PathBuf> {
    let program = std::env::current_exe().ok();
    let beside = program.as_deref().and_then(Path::parent);
    relative.iter().filter_map(|place| Some(beside?.join(place))).collect()
}

/// The program that is the filters for a server that was written with the C library.
///
/// # Errors
/// It is nowhere.
pub fn filter_program(asked: Option<&Path>) -> Result<PathBuf, LaunchError> {
    let named = std::env::var_os("TIDEGATE_CC").map(PathBuf::from);
    let asked = asked.or(named.as_deref());
    let mut places = places(&[".", "..", "../libexec/tidegate"]);
    places.extend(library_directory().map(|library| library.join("tidegate")));
    find("tidegate-cc", "TIDEGATE_CC", asked, &places)
}

/// Where the library lies that this code is in, if it is in one.
fn library_directory() -> Option<PathBuf> {
    // SAFETY: plain data, which is filled; the address is one within this code, and the name lives as long as it.
    let name = unsafe {
        let mut information: libc::Dl_info = std::mem::zeroed();
        let is_known = libc::dladdr(library_directory as *const libc::c_void, &raw mut information) != 0;
        (is_known && !information.dli_fname.is_null()).then(|| CStr::from_ptr(information.dli_fname))?
    };
    Some(Path::new(OsStr::from_bytes(name.to_bytes())).canonicalize().ok()?.parent()?.to_owned())
}

/// The preload library.
///
/// # Errors
/// It is nowhere.
pub fn preload_library(asked: Option<&Path>) -> Result<PathBuf, LaunchError> {
    let places = places(&["deps", ".", "../deps", "..", "../lib/tidegate", "../lib"]);
    find("libtidegate_preload.so", "--preload or TIDEGATE_PRELOAD", asked, &places)
}

/// A file of the installation, or the one that `given` names in its place.
fn find(
    name: &'static str,
    given: &'static str,
    asked: Option<&Path>,
    places: &[PathBuf],
) -> Result<PathBuf, LaunchError> {
    if let Some(asked) = asked {
        let file = asked.canonicalize().ok().filter(|file| file.is_file());
        return file.ok_or_else(|| LaunchError::NoFile { given, path: asked.to_owned(), file: name });
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let installed = ["/usr/local/lib/tidegate", "/usr/lib/tidegate"].map(PathBuf::from);
    let path: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let mut candidates = places.iter().chain(&installed).chain(&path).map(|directory| directory.join(name));
    let file = candidates.find(|file| file.is_file()).and_then(|file| file.canonicalize().ok());
    file.ok_or(LaunchError::Missing(name, given))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(asked: &[&str]) -> Result<Vec<String>, String> {
        let asked: Vec<FilterSpec> = asked.iter().map(|text| text.parse().unwrap()).collect();
        plan(&asked)
            .map(|chain| {
                let name = |f: &FilterSpec| format!("{}={}", f.name, f.arguments);
                processes(&chain).map(|row| row.iter().map(name).collect::<Vec<_>>().join("+")).collect()
            })
            .map_err(|error| error.to_string())
    }

    #[test]
    fn a_chain_begins_with_package() {
        assert_eq!(names(&["persist=idle=5s"]).unwrap(), ["package=", "persist=idle=5s"]);
        assert_eq!(names(&["package=timeout=1s"]).unwrap(), ["package=timeout=1s"]);
        assert_eq!(names(&["./own=x"]).unwrap(), ["package=", "./own=x"]);
    }

    #[test]
    fn what_cannot_be_started_is_refused_by_name() {
        assert!(names(&["prsist"]).unwrap_err().starts_with("unknown filter \"prsist\"; known are package,"));
        let error = names(&["persist=idle=soon"]).unwrap_err();
        assert_eq!(error, "filter persist: idle=soon: expected a duration such as 500ms, 10s or 2m");
        assert!(names(&["persist", "package"]).unwrap_err().contains("listening socket"));
    }

    #[test]
    fn filters_share_a_process_where_they_can() {
        assert_eq!(
            names(&["package", "persist", "normalize=server=nginx", "+pass", "+prior", "pass"]).unwrap(),
            ["package=", "persist=", "normalize=server=nginx+pass=+prior=", "pass="]
        );
        for (asked, reason) in [
            (&["persist", "+normalize"][..], "filter +normalize: persist has a process of its own"),
            (&["+normalize"], "filter +normalize: package has a process of its own"),
            (&["normalize", "+persist"], "filter +persist: persist has a process of its own"),
            (&["./own", "+pass"], "filter +pass: ./own has a process of its own"),
            (&["pass", "+./own"], "filter +./own: ./own has a process of its own"),
            (&["prior", "+pass"], "filter +pass: prior holds requests, and is the last of its process"),
        ] {
            assert_eq!(names(asked).unwrap_err(), reason);
        }
    }
}
