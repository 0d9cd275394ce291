//! A share of a core: a server that may use so little is full before the load that shares the machine with it.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::Error;

const V1: &str = "/sys/fs/cgroup/cpu";
const V2: &str = "/sys/fs/cgroup";
/// Quotas of one process have different names.
static COUNT: AtomicU64 = AtomicU64::new(0);

/// A control group whose processes together get a share of one core. They end when this is dropped.
#[derive(Debug)]
pub struct Quota {
    group: PathBuf,
}

impl Quota {
    /// `share` of a core's time in each `period`.
    ///
    /// # Errors
    /// Without root or the cpu controller.
    pub fn new(share: f64, period: Duration) -> Result<Self, Error> {
        let name = format!("tidegate-lab-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let v1 = Path::new(V1).join("cpu.cfs_quota_us").exists();
        let group = Path::new(if v1 { V1 } else { V2 }).join(name);
        let failed = |error: std::io::Error| {
            Error::Link(format!(
                "cannot limit a server to a share of a core: {}: {error}; it needs root and the cpu controller of cgroups",
                group.display()
            ))
        };
        let (period_us, quota_us) = (period.as_micros(), (period.as_micros() as f64 * share) as u64);
        if !v1 {
            // It may be on already; if it cannot be, the file is missing below.
            let _ = std::fs::write(Path::new(V2).join("cgroup.subtree_control"), "+cpu");
        }
        std::fs::create_dir(&group).map_err(failed)?;
        let quota = Self { group: group.clone() };
        // What else runs on the core shall not make it less: as much weight as the kernel allows.
        let weight = if v1 { ("cpu.shares", "262144") } else { ("cpu.weight", "10000") };
        std::fs::write(group.join(weight.0), weight.1).map_err(failed)?;
        if v1 {
            std::fs::write(group.join("cpu.cfs_period_us"), period_us.to_string()).map_err(failed)?;
            std::fs::write(group.join("cpu.cfs_quota_us"), quota_us.to_string()).map_err(failed)?;
        } else {
            std::fs::write(group.join("cpu.max"), format!("{quota_us} {period_us}")).map_err(failed)?;
        }
        Ok(quota)
    }

    fn members(&self) -> PathBuf {
        self.group.join("cgroup.procs")
    }

    /// CPU time that the group's processes, which have not ended, have used.
    ///
    /// # Errors
    /// When the group is gone.
    pub fn used(&self) -> Result<Duration, Error> {
        let members =
            std::fs::read_to_string(self.members()).map_err(Error::file("read", &self.members()))?;
        let mut used = Duration::ZERO;
        for member in members.lines() {
            let tasks = std::fs::read_dir(format!("/proc/{member}/task")).into_iter().flatten().flatten();
            // Nanoseconds on a core come first; a thread may end meanwhile.
            let times = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("schedstat")).ok());
            let times = times.filter_map(|text| text.split(' ').next()?.parse().ok());
            used += times.map(Duration::from_nanos).sum::<Duration>();
        }
        Ok(used)
    }

    /// The same command within the group.
    pub fn limit(&self, command: &Command) -> Command {
        let mut limited = Command::new("sh");
        // The shell joins the group and becomes the program.
        limited.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]).arg(self.members());
        limited.arg(command.get_program()).args(command.get_args().collect::<Vec<&OsStr>>());
        limited
    }
}

impl Drop for Quota {
    fn drop(&mut self) {
        for _ in 0..100 {
            let members = std::fs::read_to_string(self.members()).unwrap_or_default();
            for member in members.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?)) {
                let _ = kill_process(member, Signal::KILL);
            }
            if std::fs::remove_dir(&self.group).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        eprintln!("warning: the control group {} stays behind", self.group.display());
    }
}
