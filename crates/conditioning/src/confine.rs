//! Gives up what a filter does not need once it has its descriptors: its user, the file system, most system calls.
//!
//! Each step is best effort, because kernels and containers differ in what they allow; what could not be given up is
//! said once on standard error.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use landlock::{ABI, Access, AccessFs, Ruleset, RulesetAttr, RulesetStatus};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

use crate::neighbours::{environment, say};

/// What a filter does after its start: messages on sockets that it has, time, memory. Nothing opens, connects or
/// executes anything.
const SYSTEM_CALLS: &[libc::c_long] = &[
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_futex,
    libc::SYS_getpeername,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_gettid,
    libc::SYS_ioctl,
    libc::SYS_lseek,
    libc::SYS_madvise,
    libc::SYS_memfd_create,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    // Whether the process that serves a request is alive.
    libc::SYS_pidfd_open,
    libc::SYS_ppoll,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    libc::SYS_prctl,
    libc::SYS_pread64,
    libc::SYS_prlimit64,
    libc::SYS_pwrite64,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_yield,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_sigaltstack,
    libc::SYS_tgkill,
    libc::SYS_write,
    libc::SYS_writev,
];

/// Confines this process, all its threads included, for good. Later calls do nothing.
pub fn confine(name: &str) {
    static DONE: OnceLock<()> = OnceLock::new();
    DONE.get_or_init(|| {
        for (what, result) in
            [("user", give_up_user()), ("file system", give_up_files()), ("system calls", give_up_calls())]
        {
            if let Err(reason) = result {
                say(&format!("{name}: cannot give up its {what}: {reason}"));
            }
        }
    });
}

/// From root to the user that the launcher names.
fn give_up_user() -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let Ok(named) = std::env::var(environment::USER) else { return Ok(()) };
    let (user, group) = named.split_once(':').ok_or("not USER:GROUP")?;
    let number = |text: &str| text.parse::<u32>().map_err(|error| error.to_string());
    let (user, group) = (number(user)?, number(group)?);
    let check = |result: libc::c_int| match result {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error().to_string()),
    };
    // libc's wrappers change every thread, which the bare system calls do not.
    // SAFETY: numbers and an empty list; nothing in this process depends on its user. A change of user clears the
    // parent-death signal, which is set again.
    unsafe {
        check(libc::setgroups(0, std::ptr::null()))?;
        check(libc::setgid(group))?;
        check(libc::setuid(user))?;
        check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM))
    }
}

fn give_up_files() -> Result<(), String> {
    let restrict = || {
        let ruleset = Ruleset::default().handle_access(AccessFs::from_all(ABI::V3))?.create()?;
        ruleset.restrict_self()
    };
    match restrict() {
        Ok(status) if status.ruleset == RulesetStatus::NotEnforced => {
            Err("this kernel has no Landlock".to_owned())
        }
        Ok(_) => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

fn give_up_calls() -> Result<(), String> {
    let rules: BTreeMap<_, _> = SYSTEM_CALLS.iter().map(|&call| (call, Vec::new())).collect();
    let architecture = std::env::consts::ARCH.try_into().map_err(|_| "unknown architecture")?;
    let refuse = SeccompAction::Errno(libc::EPERM as u32);
    let program: Result<BpfProgram, _> =
        SeccompFilter::new(rules, refuse, SeccompAction::Allow, architecture)
            .and_then(SeccompFilter::try_into);
    let program = program.map_err(|error| error.to_string())?;
    seccompiler::apply_filter_all_threads(&program).map_err(|error| error.to_string())
}
