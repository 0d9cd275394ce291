//! Programs that a scenario runs on its hosts, and what they say.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::Error;

const START_TIMEOUT: Duration = Duration::from_secs(20);
const STEP: Duration = Duration::from_millis(20);

/// A program that runs until this is dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
    said: PathBuf,
    _directory: TempDir,
}

impl Process {
    /// Starts a program and waits until it has said `ready`.
    ///
    /// # Errors
    /// When it cannot be started, ends or is silent; with its last words.
    pub fn start(command: &mut Command, ready: &str) -> Result<Self, Error> {
        Self::start_until(command, ready, |said| said.contains(ready))
    }

    /// Starts a program and waits for `awaited`, which `is_ready` tells from everything that it has said so far. It ends
    /// with the thread that starts it, if its command says so.
    ///
    /// # Errors
    /// When it cannot be started, ends or does not become ready; with its last words.
    pub fn start_until(
        command: &mut Command,
        awaited: &str,
        mut is_ready: impl FnMut(&str) -> bool,
    ) -> Result<Self, Error> {
        let directory = tempfile::tempdir().map_err(Error::file("write", &std::env::temp_dir()))?;
        let said = directory.path().join("said");
        let name = format!("{:?}", command.get_program());
        let failed = |what: String| Error::Server(format!("{name} {what}"));
        let file = File::create(&said).map_err(Error::file("write", &said))?;
        let again = file.try_clone().map_err(Error::file("write", &said))?;
        command.stdin(Stdio::null()).stdout(file).stderr(again);
        let child = command.spawn().map_err(|error| failed(format!("does not start: {error}")))?;
        let mut process = Self { child, said, _directory: directory };
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            let said = process.said();
            if is_ready(&said) {
                return Ok(process);
            }
            if let Ok(Some(status)) = process.child.try_wait() {
                return Err(failed(format!("ended at its start ({status}): {}", last_line(&said))));
            }
            if Instant::now() > deadline {
                return Err(failed(format!("is not ready: {awaited:?} is awaited: {}", last_line(&said))));
            }
            std::thread::sleep(STEP);
        }
    }

    /// Everything it has said so far.
    pub fn said(&self) -> String {
        std::fs::read_to_string(&self.said).unwrap_or_default()
    }
}

fn last_line(said: &str) -> &str {
    said.lines().last().unwrap_or("it said nothing")
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_program_has_started_when_it_has_said_so() {
        let process =
            Process::start(&mut shell("echo begin; echo here we are; exec sleep 60"), "we are").unwrap();
        assert!(process.said().starts_with("begin\n"));
    }

    #[test]
    fn a_program_that_ends_at_its_start_is_an_error_with_its_last_words() {
        let error =
            Process::start(&mut shell("echo no such thing >&2; exit 3"), "ready").unwrap_err().to_string();
        assert!(error.contains("ended at its start") && error.ends_with("no such thing"), "{error}");
    }
}
