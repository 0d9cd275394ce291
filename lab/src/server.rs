//! The servers that scenarios measure, on the server's core, and what the machine can hold.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;

use rustix::process::{Resource, getrlimit};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use tempfile::TempDir;
use tidegate_bench::peers::{Peer, Site, install, settle};
use tidegate_bench::{LOAD_CORE, SERVER_CORE};

use crate::table::thousands;
use crate::{Error, Lab};

/// Descriptors that a server needs beside its connections: listeners, files, an arena, a log.
const OTHER_DESCRIPTORS: u64 = 200;
/// Every default protection stays on; only the number of connections has to fit the scenario, and the load, which is far
/// beyond what clients may do, is watched like any client but never refused.
const TIDEGATE_CONFIG: &str = "[limits]\nconnections = 1000000\n[[exempt]]\nsource = \"127.0.0.0/8\"\n";

/// Servers that run until this is dropped, each serving `/object` with a body of the same size.
pub struct Servers {
    // Before the directory, which they serve from.
    peers: Vec<Peer>,
    versions: Vec<String>,
    _directory: TempDir,
}

/// Which servers a scenario compares.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    /// The limit: epoll, read, write, no parser.
    Bare,
    /// nginx at its best: one worker, sendfile, open files cached, no log.
    Nginx,
    /// Ours, with its default protections.
    Tidegate,
    /// Ours, without those that look at clients.
    Undefended,
}

impl Kind {
    /// As in figures and legends.
    pub fn label(self) -> &'static str {
        match self {
            Self::Bare => "bare epoll",
            Self::Nginx => "nginx",
            Self::Tidegate => "tidegate",
            Self::Undefended => "tidegate without defence",
        }
    }
}

impl Servers {
    /// Starts one server of each kind and asks each for the object once.
    ///
    /// # Errors
    /// When there are not two cores, a program is missing, or a server does not start or answers wrongly.
    pub fn start(lab: &Lab, kinds: &[Kind], size_bytes: usize) -> Result<Self, Error> {
        check_cores()?;
        let directory = tempfile::tempdir().map_err(Error::file("write", &std::env::temp_dir()))?;
        let site = Site::create(directory.path(), size_bytes).map_err(Error::Server)?;
        let mut peers = Vec::new();
        let mut versions = Vec::new();
        for kind in kinds {
            let peer = match kind {
                Kind::Bare => Peer::bare(size_bytes),
                Kind::Nginx => {
                    install("nginx", "nginx-light").map_err(Error::Server)?;
                    versions.extend(version("nginx", "-v"));
                    Peer::nginx(&site)
                }
                Kind::Tidegate => {
                    let binary = tidegate(lab)?;
                    versions.extend(version(&binary, "--version"));
                    Peer::tidegate(&binary, &site, TIDEGATE_CONFIG)
                }
                Kind::Undefended => {
                    let config = format!("{TIDEGATE_CONFIG}[defence]\nenabled = false\n");
                    Peer::tidegate(&tidegate(lab)?, &site, &config)
                }
            };
            let peer = peer.map_err(Error::Server)?;
            peer.verify(size_bytes).map_err(Error::Server)?;
            peers.push(peer);
        }
        Ok(Self { peers, versions, _directory: directory })
    }

    /// In the order in which they were asked for.
    pub fn peers(&self) -> &[Peer] {
        &self.peers
    }

    /// Names and versions of the programs, for the page.
    pub fn versions(&self) -> Vec<String> {
        self.versions.clone()
    }

    /// Waits until no server works any more, so that what one clears up is not charged to the next.
    ///
    /// # Errors
    /// When a server has ended.
    pub fn settle(&self) -> Result<(), Error> {
        settle(self.peers.iter()).map_err(Error::Server)
    }
}

/// `wanted` connections, or as many as one server process may hold here: a process cannot have more descriptors than its
/// hard limit.
pub fn connections(wanted: u32) -> u32 {
    let limit = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    let possible = limit.saturating_sub(OTHER_DESCRIPTORS).max(1);
    wanted.min(u32::try_from(possible).unwrap_or(u32::MAX))
}

/// Says what kept `count` connections below `wanted`, for the verdict; nothing if nothing did.
pub fn bound_on(count: u32, wanted: u32) -> String {
    if count >= wanted {
        return String::new();
    }
    format!(
        "{} connections instead of {}, because a server process may have only {} descriptors here",
        thousands(count.into()),
        thousands(wanted.into()),
        thousands(getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX))
    )
}

/// The request of the paper's 64-byte messages.
pub fn short_request(server: SocketAddr) -> String {
    let bare = format!("GET /object HTTP/1.1\r\nHost: {server}\r\nUser-Agent: \r\n\r\n");
    bare.replace("Agent: ", &format!("Agent: {}", "l".repeat(64usize.saturating_sub(bare.len()))))
}

/// Keeps the calling thread on one core, the first that it may run on.
///
/// # Errors
/// When the kernel refuses.
pub fn pin_to_one_core() -> Result<(), Error> {
    let failed = |error: rustix::io::Errno| Error::Core { core: 0, source: error.into() };
    let allowed = sched_getaffinity(None).map_err(failed)?;
    let mut one = CpuSet::new();
    one.set((0..CpuSet::MAX_CPU).find(|core| allowed.is_set(*core)).unwrap_or(0));
    sched_setaffinity(None, &one).map_err(failed)
}

/// Keeps the calling thread on the load's core.
///
/// # Errors
/// When there is no such core.
pub fn pin_to_load_core() -> Result<(), Error> {
    let failed = |error: rustix::io::Errno| Error::Core { core: LOAD_CORE, source: error.into() };
    let mut one = CpuSet::new();
    one.set(LOAD_CORE);
    sched_setaffinity(None, &one).map_err(failed)
}

pub(crate) fn check_cores() -> Result<(), Error> {
    let failed = |error: rustix::io::Errno| Error::Core { core: SERVER_CORE, source: error.into() };
    let cores = sched_getaffinity(None).map_err(failed)?;
    for core in [SERVER_CORE, LOAD_CORE] {
        if !cores.is_set(core) {
            return Err(Error::Core { core, source: std::io::ErrorKind::NotFound.into() });
        }
    }
    Ok(())
}

pub(crate) fn tidegate(lab: &Lab) -> Result<PathBuf, Error> {
    if lab.tidegate.is_file() {
        Ok(lab.tidegate.clone())
    } else {
        Err(Error::NoTidegate(lab.tidegate.clone()))
    }
}

/// What the program says of itself, in one line.
pub(crate) fn version(program: impl AsRef<std::ffi::OsStr>, flag: &str) -> Option<String> {
    let output = Command::new(program).arg(flag).output().ok()?;
    let text = [output.stdout, output.stderr].concat();
    String::from_utf8_lossy(&text).lines().next().map(|line| line.replace("nginx version: ", ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_64_bytes_whatever_the_port() {
        for port in ["80", "8080", "40000"] {
            let request = short_request(format!("127.0.0.1:{port}").parse().unwrap());
            assert_eq!(request.len(), 64, "{request:?}");
            assert!(request.ends_with("l\r\n\r\n"), "{request:?}");
        }
    }

    #[test]
    fn connections_leave_descriptors_for_other_files() {
        let limit = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
        assert!(u64::from(connections(u32::MAX)) < limit);
        assert_eq!(connections(1), 1);
    }

    #[test]
    fn fewer_connections_than_wanted_are_explained() {
        assert_eq!(bound_on(20_000, 20_000), "");
        let bound = bound_on(19_800, 20_000);
        assert!(
            bound.starts_with("19,800 connections instead of 20,000, because a server process may"),
            "{bound}"
        );
    }
}
