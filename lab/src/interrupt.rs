//! An interrupted lab leaves neither processes nor namespaces behind.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::signal::unix::{SignalKind, signal};

use crate::link::remove_namespaces;

/// What starts while the rest is being ended is looked for again, so many times at most.
const ROUNDS: usize = 50;
/// How long a killed process may take to be gone before it is looked for again.
const STEP: Duration = Duration::from_millis(20);
/// A signal has come.
static CAME: AtomicBool = AtomicBool::new(false);

/// From now on SIGINT and SIGTERM end what the lab has started as well, and remove its namespaces.
///
/// # Errors
/// The system gives no signals or no thread.
pub fn watch() -> std::io::Result<()> {
    // What outlives who started it is this process's from now on, to be ended and to be counted.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let (mut interrupt, mut terminate) = {
        let _inside = runtime.enter();
        (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?)
    };
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        let by = runtime.block_on(async {
            tokio::select! {
                _ = interrupt.recv() => Signal::INT,
                _ = terminate.recv() => Signal::TERM,
            }
        });
        CAME.store(true, Ordering::SeqCst);
        let own = std::process::id();
        end_descendants(own);
        remove_namespaces(|process| process == own);
        // As a shell says that a signal ended a program.
        std::process::exit(128 + by.as_raw())
    })?;
    Ok(())
}

/// Does not return once a signal has come: the process is about to end, with that signal's exit code, and what fails
/// meanwhile fails because its server was killed.
pub fn stop_if_it_came() {
    while CAME.load(Ordering::SeqCst) {
        std::thread::park();
    }
}

/// Kills all that `process` has started, until none of it lives.
fn end_descendants(process: u32) {
    for _ in 0..ROUNDS {
        let found = living_descendants(process);
        if found.is_empty() {
            return;
        }
        for process in found {
            // It may have ended by itself.
            let _ = kill_process(process, Signal::KILL);
        }
        std::thread::sleep(STEP);
    }
}

/// Processes that `process` has started, and that those have started, but for those that have ended and are not yet waited for.
fn living_descendants(process: u32) -> Vec<Pid> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(child) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        if let Some(parent) = living_parent(&stat) {
            children.entry(parent).or_default().push(child);
        }
    }
    let mut found: Vec<u32> = children.remove(&process).unwrap_or_default();
    let mut at = 0;
    while let Some(next) = found.get(at) {
        let more = children.remove(next).unwrap_or_default();
        found.extend(more);
        at += 1;
    }
    found.into_iter().filter_map(|id| Pid::from_raw(i32::try_from(id).ok()?)).collect()
}

/// The parent of a process that lives, by `/proc/PID/stat`.
fn living_parent(stat: &str) -> Option<u32> {
    // The name may contain anything; after it come the state and the parent (proc_pid_stat(5)).
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace();
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(parent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parent_is_found_whatever_a_process_is_called() {
        assert_eq!(living_parent("7 (a) S 1) R 42 7 7"), Some(42));
        assert_eq!(living_parent("7 (ended) Z 42 7 7"), None);
        assert_eq!(living_parent(""), None);
    }

    #[test]
    fn children_of_children_are_ended_too() {
        let mut shell =
            std::process::Command::new("sh").args(["-c", "sh -c 'sleep 60; :'; :"]).spawn().unwrap();
        // The two shells inside one another, and what the inner one runs.
        while living_descendants(shell.id()).len() < 2 {
            assert!(shell.try_wait().unwrap().is_none(), "the shell has ended");
            std::thread::sleep(STEP);
        }
        let inside = living_descendants(shell.id());
        end_descendants(shell.id());
        assert!(living_descendants(shell.id()).is_empty());
        for process in inside {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.as_raw_nonzero()));
            assert_eq!(living_parent(&stat.unwrap_or_default()), None, "{process:?} lives");
        }
        shell.wait().unwrap();
    }
}
