//! Which processes, of a server's, have not ended yet.

use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, PidfdFlags};

/// Whether a process has not ended yet. Its parent need not have collected it: until then its number is taken, and
/// signals to it lead nowhere without an error.
pub fn is_alive(process: u32) -> bool {
    let Some(pid) = i32::try_from(process).ok().and_then(Pid::from_raw) else { return false };
    match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => {
            let mut watched = [PollFd::new(&pidfd, PollFlags::IN)];
            rustix::event::poll(&mut watched, Some(&rustix::time::Timespec::default())) != Ok(1)
        }
        Err(error) => error != rustix::io::Errno::SRCH,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_has_ended_is_dead_before_its_parent_has_collected_it() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        assert!(is_alive(child.id()));
        let pid = Pid::from_raw(child.id() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        let options = rustix::process::WaitIdOptions::EXITED | rustix::process::WaitIdOptions::NOWAIT;
        rustix::process::waitid(rustix::process::WaitId::Pid(pid), options).unwrap();
        assert!(!is_alive(child.id()));
        child.wait().unwrap();
        assert!(!is_alive(child.id()));
    }
}
