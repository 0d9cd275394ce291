//! A share of a core: a server that may use so little is full before the load that shares the machine with it.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::Error;

const V1: &str = "/sys/fs/cgroup/cpu";
const V2: &str = "/sys/fs/cgroup";
const SETTLE_STEP: Duration = Duration::from_millis(100);
const SETTLE_TIMEOUT: Duration = Duration::from_secs(20);
/// Quotas of one process have different names.
static COUNT: AtomicU64 = AtomicU64::new(0);

/// A control group whose processes together get a share of one core, once it is enforced. They end when this is dropped.
#[derive(Debug)]
pub struct Quota {
    group: PathBuf,
    is_v1: bool,
}

impl Quota {
    /// A group that gets as much as it wants, until [`Quota::enforce`].
    ///
    /// # Errors
    /// Without root or the cpu controller.
    pub fn new() -> Result<Self, Error> {
        let name = format!("tidegate-lab-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let v1 = Path::new(V1).join("cpu.cfs_quota_us").exists();
        let group = Path::new(if v1 { V1 } else { V2 }).join(name);
        let failed = |error: std::io::Error| {
            Error::Link(format!(
                "cannot limit a server to a share of a core: {}: {error}; it needs root and the cpu controller of cgroups",
                group.display()
            ))
        };
        if !v1 {
            // It may be on already; if it cannot be, the file is missing below.
            let _ = std::fs::write(Path::new(V2).join("cgroup.subtree_control"), "+cpu");
        }
        std::fs::create_dir(&group).map_err(failed)?;
        let quota = Self { group: group.clone(), is_v1: v1 };
        // What else runs on the core shall not make it less: as much weight as the kernel allows.
        let weight = if v1 { ("cpu.shares", "262144") } else { ("cpu.weight", "10000") };
        std::fs::write(group.join(weight.0), weight.1).map_err(failed)?;
        Ok(quota)
    }

    /// From now on the group gets `share` of a core's time in each `period`.
    ///
    /// # Errors
    /// When the group is gone, or the kernel limits no control groups.
    pub fn enforce(&self, share: f64, period: Duration) -> Result<(), Error> {
        let (period_us, quota_us) = (period.as_micros(), (period.as_micros() as f64 * share) as u64);
        let write = |file: &str, value: String| {
            let file = self.group.join(file);
            std::fs::write(&file, value).map_err(Error::file("write", &file))
        };
        if self.is_v1 {
            write("cpu.cfs_period_us", period_us.to_string())?;
            write("cpu.cfs_quota_us", quota_us.to_string())
        } else {
            write("cpu.max", format!("{quota_us} {period_us}"))
        }
    }

    /// Waits until the group has nothing left to do: less than a tenth of a core.
    ///
    /// # Errors
    /// When the group is gone.
    pub fn settle(&self) -> Result<(), Error> {
        let deadline = Instant::now() + SETTLE_TIMEOUT;
        let mut before = self.used()?;
        while Instant::now() < deadline {
            std::thread::sleep(SETTLE_STEP);
            let used = self.used()?;
            // A thread that has ended takes its time along.
            if used >= before && used - before < SETTLE_STEP / 10 {
                return Ok(());
            }
            before = used;
        }
        Err(Error::Server("a server that nobody asks for anything stays busy".into()))
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

    /// Takes a process that runs already, with all of its threads, into the group.
    ///
    /// # Errors
    /// When the process or the group is gone.
    pub fn take(&self, process: u32) -> Result<(), Error> {
        std::fs::write(self.members(), process.to_string()).map_err(Error::file("write", &self.members()))
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
