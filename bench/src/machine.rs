//! What else the machine does during a run.

use std::collections::HashMap;

/// Shares of other programs above this make figures doubtful.
pub const BUSY_PERCENT: f64 = 5.0;

/// Watches what the machine does beside a run.
pub struct Watch {
    began: Option<Usage>,
}

/// Processor time so far, in ticks.
struct Usage {
    /// All that has passed, used or not.
    total: f64,
    /// What the hypervisor gave to others.
    stolen: f64,
    /// What each program but this one has used, the processes that it has awaited included.
    programs: HashMap<u32, f64>,
}

impl Watch {
    /// Begins to watch.
    pub fn start() -> Self {
        Self { began: usage() }
    }

    /// Share of the machine's processor time that went to other programs meanwhile; 100 if it cannot be told. Processes
    /// that the run started must have ended. To take what this program has not used of all that was used would count
    /// the kernel's work that is charged to nobody.
    pub fn others_percent(&self) -> f64 {
        match (&self.began, usage()) {
            (Some(began), Some(now)) if now.total > began.total => {
                let used_meanwhile = |(process, used): (&u32, &f64)| {
                    (used - began.programs.get(process).unwrap_or(&0.0)).max(0.0)
                };
                let used: f64 = now.programs.iter().map(used_meanwhile).sum();
                let others = used + now.stolen - began.stolen;
                (100.0 * others / (now.total - began.total)).clamp(0.0, 100.0)
            }
            // Over before the clock ticked.
            (Some(_), Some(_)) => 0.0,
            _ => 100.0,
        }
    }
}

fn usage() -> Option<Usage> {
    let (total, stolen) = machine_ticks(&std::fs::read_to_string("/proc/stat").ok()?)?;
    let numbers =
        std::fs::read_dir("/proc").ok()?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let ticks = |process: u32| {
        // It may have ended since.
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        Some((process, program_ticks(&stat)?))
    };
    let programs = numbers.filter(|&process| process != std::process::id()).filter_map(ticks).collect();
    Some(Usage { total, stolen, programs })
}

/// proc_stat(5): user, nice, system, idle, iowait, irq, softirq, steal. All of it, and the last.
fn machine_ticks(stat: &str) -> Option<(f64, f64)> {
    let ticks: Vec<f64> =
        stat.lines().next()?.split_whitespace().skip(1).take(8).map_while(|t| t.parse().ok()).collect();
    Some((ticks.iter().sum(), *ticks.get(7)?))
}

/// What this machine's processors are called, and how many they are.
pub fn processor() -> String {
    name_and_count(&std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default())
}

fn name_and_count(cpuinfo: &str) -> String {
    let model = cpuinfo.lines().find(|line| line.starts_with("model name"));
    let name = model.and_then(|line| line.split_once(": ")).map_or("unnamed processor", |(_, name)| name);
    let count = cpuinfo.lines().filter(|line| line.starts_with("processor")).count();
    format!("{name}, {count} cores")
}

/// A thread of the kernel (PF_KTHREAD, linux/sched.h): it works for whoever has it work, the run most of all.
const KERNEL_THREAD: u32 = 0x0020_0000;

/// proc_pid_stat(5): fields 14 to 17, user and system time of the process and of its awaited children; field 9 has the
/// flags.
fn program_ticks(stat: &str) -> Option<f64> {
    let fields = crate::peers::fields(stat);
    let flags: u32 = fields.get(6)?.parse().ok()?;
    if flags & KERNEL_THREAD != 0 {
        return None;
    }
    fields.get(11..15)?.iter().map(|field| field.parse::<f64>().ok()).sum()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn proc_files_are_read_as_documented() {
        assert_eq!(machine_ticks("cpu  10 1 5 80 2 1 1 7 0 0\ncpu0 1 2"), Some((107.0, 7.0)));
        assert_eq!(machine_ticks(""), None);
        let stat = "7 (a) b) S 1 1 1 0 -1 4194304 1 2 3 4 100 20 3 4 20 0";
        assert_eq!(program_ticks(stat), Some(127.0));
        assert_eq!(program_ticks(&stat.replace("4194304", "69238880")), None);
        assert_eq!(program_ticks("7 (short) S 1"), None);
    }

    #[test]
    fn the_processor_is_named_with_its_number_of_cores() {
        assert_eq!(name_and_count("processor : 0\nmodel name : X 1\nprocessor : 1\n"), "X 1, 2 cores");
    }

    #[test]
    fn what_another_program_uses_is_counted_and_what_this_one_uses_is_not() {
        let spin = "i=0; while [ $i -lt 600000 ]; do i=$((i+1)); done; echo; read end";
        let stdio = std::process::Stdio::piped;
        let watch = Watch::start();
        let mut other = std::process::Command::new("sh");
        let mut other = other.args(["-c", spin]).stdin(stdio()).stdout(stdio()).spawn().unwrap();
        std::io::Read::read_exact(other.stdout.as_mut().unwrap(), &mut [0]).unwrap();
        let now = usage().unwrap();
        let of_other = now.programs[&other.id()];
        assert!(of_other > 0.0 && !now.programs.contains_key(&std::process::id()));
        let least = 100.0 * of_other / (now.total - watch.began.as_ref().unwrap().total);
        // The clock has gone on since.
        assert!(watch.others_percent() > 0.5 * least, "{} of {least}", watch.others_percent());
        drop(other.stdin.take());
        other.wait().unwrap();
    }
}
