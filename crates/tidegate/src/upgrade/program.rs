//! The program that this process was started from, as it can be started again.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Says to a process whose place it is to take: the number of the process that started it.
pub(super) const PREDECESSOR: &str = "TIDEGATE_PREDECESSOR";

/// Where the program lies, and what it was called with.
#[derive(Debug)]
pub(crate) struct Program {
    pub(super) path: PathBuf,
    arguments: Vec<OsString>,
}

impl Program {
    /// To be called at the start: once another file has taken its place, the system no longer says where it lay.
    pub(crate) fn of_this_process() -> Self {
        let arguments: Vec<OsString> = std::env::args_os().collect();
        let called = arguments.first().cloned().unwrap_or_default();
        // Without /proc there is only what it was called by.
        let running = std::env::current_exe().unwrap_or_else(|_| PathBuf::from(&called));
        let path = as_called(&called, &running).unwrap_or(running);
        Self { path, arguments }
    }

    /// Starts what lies there now, with the same arguments and environment, and with `link` as its standard input.
    pub(super) fn start(&self, link: OwnedFd) -> io::Result<Child> {
        let mut command = Command::new(&self.path);
        if let Some((called, arguments)) = self.arguments.split_first() {
            command.arg0(called).args(arguments);
        }
        command.env(PREDECESSOR, std::process::id().to_string()).stdin(Stdio::from(link)).spawn()
    }
}

/// The path as it was called, links and all, so that it is seen when a link leads to another version; `None`: that is
/// not what runs.
fn as_called(called: &OsStr, running: &Path) -> Option<PathBuf> {
    let is_running = |path: &Path| {
        let (Ok(one), Ok(other)) = (fs::metadata(path), fs::metadata(running)) else { return false };
        (one.dev(), one.ino()) == (other.dev(), other.ino())
    };
    if called.as_bytes().contains(&b'/') {
        return std::path::absolute(called).ok().filter(|path| is_running(path));
    }
    let directories = std::env::var_os("PATH")?;
    std::env::split_paths(&directories)
        .filter_map(|directory| std::path::absolute(directory.join(called)).ok())
        .find(|path| is_running(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_is_found_by_the_link_that_it_was_called_by() {
        let running = std::env::current_exe().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("tidegate");
        std::os::unix::fs::symlink(&running, &link).unwrap();
        assert_eq!(as_called(link.as_os_str(), &running), Some(link.clone()));
        assert_eq!(as_called(OsStr::new("/bin/sh"), &running), None);
        assert_eq!(as_called(OsStr::new("/not/there"), &running), None);
        assert_eq!(as_called(OsStr::new("no-such-program"), &running), None);
    }
}
