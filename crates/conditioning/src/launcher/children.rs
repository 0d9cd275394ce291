//! The launcher's child processes and signals.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, Signal, WaitOptions};

use crate::launcher::{ConditionArgs, FilterSpec, LaunchError, PATIENCE, questions};
use crate::link;
use crate::neighbours::{self, environment, out_of_the_way, word};
use crate::server::Terms;

/// What the launcher does something about.
const SIGNALS: &[libc::c_int] =
    &[libc::SIGTERM, libc::SIGINT, libc::SIGQUIT, libc::SIGHUP, libc::SIGUSR1, libc::SIGUSR2];

/// [`SIGNALS`], read from a descriptor.
pub struct Signals(OwnedFd);

impl Signals {
    /// Blocks the signals and opens the descriptor.
    pub fn take() -> io::Result<Self> {
        let set = signal_set(SIGNALS);
        // SAFETY: the calls read an initialized set; the descriptor returned is ours alone.
        unsafe {
            // A server that does not wait for its children hands that down to who it starts, and this process waits.
            libc::signal(libc::SIGCHLD, libc::SIG_DFL);
            libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
            let fd = libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(Self(OwnedFd::from_raw_fd(fd))) }
        }
    }

    /// The next signal that came.
    pub fn next(&self) -> Option<Signal> {
        let mut info = [0u8; size_of::<libc::signalfd_siginfo>()];
        let got = rustix::io::read(&self.0, &mut info[..]).ok()?;
        let number = info[..got].first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))?;
        Signal::from_named_raw(number as i32)
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn signal_set(signals: &[libc::c_int]) -> libc::sigset_t {
    // SAFETY: a sigset_t is plain data, emptied before use.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        for &signal in signals {
            libc::sigaddset(&mut set, signal);
        }
        set
    }
}

/// A process that this one started.
pub struct Child {
    pid: Pid,
    pidfd: OwnedFd,
}

impl Child {
    fn spawn(mut command: Command, inherits: Vec<RawFd>, name: &str) -> Result<Self, LaunchError> {
        let started = |reason| LaunchError::Start { program: name.to_owned(), reason };
        let empty = signal_set(&[]);
        let parent = std::process::id();
        let preempts = PREEMPTS.load(Ordering::Relaxed);
        let files = FILES.get().copied();
        // SAFETY: only async-signal-safe calls between fork and exec; they touch the child alone.
        unsafe {
            command.pre_exec(move || {
                libc::pthread_sigmask(libc::SIG_SETMASK, &empty, std::ptr::null_mut());
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
                // A terminal's interrupt is the launcher's to pass on: filters serve until the server has ended. And
                // servers that signal their process group do not mean the launcher's.
                libc::setpgid(0, 0);
                // A wakeup does not interrupt who caused it: on one core, a filter that hands on a request and a server
                // that is done with one go on with the next instead of being switched from for each. What was set
                // otherwise by hand (chrt) is kept.
                if !preempts && libc::sched_getscheduler(0) == libc::SCHED_OTHER {
                    libc::sched_setscheduler(0, libc::SCHED_BATCH, &libc::sched_param { sched_priority: 0 });
                }
                if libc::getppid() as u32 != parent {
                    return Err(io::ErrorKind::BrokenPipe.into());
                }
                for &fd in &inherits {
                    libc::fcntl(fd, libc::F_SETFD, 0);
                }
                if let Some(files) = &files {
                    rustix::process::setrlimit(Resource::Nofile, *files)?;
                }
                Ok(())
            });
        }
        let child = command.spawn().map_err(started)?;
        let pid = Pid::from_child(&child);
        let pidfd =
            rustix::process::pidfd_open(pid, PidfdFlags::empty()).map_err(|error| started(error.into()))?;
        Ok(Self { pid, pidfd })
    }

    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    pub fn pid(&self) -> Pid {
        self.pid
    }

    pub fn kill(&self, signal: Signal) {
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, signal);
    }

    /// How it ended, if it has; collects it.
    fn status(&self) -> Option<rustix::process::WaitStatus> {
        rustix::process::waitpid(Some(self.pid), WaitOptions::NOHANG).ok().flatten().map(|(_, status)| status)
    }

    /// The code to exit with in its place, if it has ended.
    pub fn exit_code(&self) -> Option<u8> {
        let status = self.status()?;
        let signal = status.terminating_signal().map(|signal| 128 + signal);
        Some(status.exit_status().or(signal).and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
    }

    fn end(&self) {
        self.kill(Signal::TERM);
        let deadline = Instant::now() + Duration::from_secs(2);
        while self.status().is_none() {
            let mut watched = [rustix::event::PollFd::new(&self.pidfd, rustix::event::PollFlags::IN)];
            let pause = rustix::time::Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
            let polled = rustix::event::poll(&mut watched, Some(&pause));
            // Somebody else collected it, or it has nothing left to tell.
            if polled == Ok(1) && self.status().is_none() {
                return;
            }
            if Instant::now() >= deadline {
                self.kill(Signal::KILL);
            }
        }
    }
}

/// Messages that are heard of a filter at once, so that one that says more and more keeps the launcher from nothing
/// else.
const MOST_MESSAGES: usize = 8;

/// User and group.
static FILTER_USER: OnceLock<(libc::uid_t, libc::gid_t)> = OnceLock::new();
static PREEMPTS: AtomicBool = AtomicBool::new(false);
static FILES: OnceLock<Rlimit> = OnceLock::new();

/// By seccomp each connection takes two descriptors of the launcher's. Its children begin with the limit that it was
/// started with.
pub fn raise_descriptor_limit() {
    FILES.get_or_init(neighbours::raise_descriptor_limit);
}

/// Whether processes started from now on interrupt others when they wake.
pub fn let_preempt(preempts: bool) {
    PREEMPTS.store(preempts, Ordering::Relaxed);
}

/// Filters started from now on become this user if they are root.
///
/// # Errors
/// There is no such user, and it would be needed.
pub fn become_user(name: &str) -> Result<(), LaunchError> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let unknown = || LaunchError::UnknownUser(name.to_owned());
    let name = std::ffi::CString::new(name).map_err(|_| unknown())?;
    // SAFETY: a terminated string; the launcher has one thread, so that nobody else uses the static result.
    let numbers = unsafe { libc::getpwnam(name.as_ptr()).as_ref() }.map(|user| (user.pw_uid, user.pw_gid));
    let (user, group) = numbers.ok_or_else(unknown)?;
    let _ = FILTER_USER.set((user, group));
    Ok(())
}

/// Has a program that knows nothing of [`crate::confine`] begin without what filters give up by themselves: root,
/// unless the filters' user may not read or execute it, and the ability to gain privileges.
fn confine_program(command: &mut Command, program: &Path) {
    let user = FILTER_USER.get().copied();
    let path = std::ffi::CString::new(program.as_os_str().as_bytes()).unwrap_or_default();
    let kept =
        format!("tidegate: {} keeps root: --filter-user may not read and execute it\n", program.display());
    let become_user = move || {
        let Some((user, group)) = user else { return Ok(()) };
        let check = |result: libc::c_int| if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
        // SAFETY: system calls with numbers, an empty list and terminated strings, in a child that nobody shares memory
        // with.
        unsafe {
            check(libc::setgroups(0, std::ptr::null()))?;
            check(libc::setegid(group))?;
            check(libc::seteuid(user))?;
            let asked = libc::R_OK | libc::X_OK;
            let is_allowed = libc::faccessat(libc::AT_FDCWD, path.as_ptr(), asked, libc::AT_EACCESS) == 0;
            let is_refused =
                !is_allowed && io::Error::last_os_error().kind() == io::ErrorKind::PermissionDenied;
            check(libc::seteuid(0))?;
            if is_refused {
                libc::write(libc::STDERR_FILENO, kept.as_ptr().cast(), kept.len());
                return check(libc::setegid(0));
            }
            check(libc::setgid(group))?;
            check(libc::setuid(user))
        }
    };
    // SAFETY: async-signal-safe calls only, which touch the child alone.
    unsafe {
        command.pre_exec(move || {
            become_user()?;
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
            Ok(())
        });
    }
}

/// A filter's process and everything that it is started with, again and again if need be.
pub struct FilterProcess {
    /// The filters in it, in order.
    specs: Vec<FilterSpec>,
    pub is_ready: bool,
    /// Starts in a row that ended before the filter was ready.
    pub fruitless: u32,
    program: PathBuf,
    upstream: Option<OwnedFd>,
    downstream: OwnedFd,
    listeners: Vec<OwnedFd>,
    /// Whether it keeps connections between requests.
    pub keeps: bool,
    /// Whether the server is its downstream neighbour.
    pub is_last: bool,
    /// Why the process cannot run, in its own words.
    reason: Option<String>,
    /// Until when it is to be ready.
    deadline: Instant,
    /// It has closed its end: nothing more is heard of it.
    is_silent: bool,
    running: Option<(Child, OwnedFd)>,
}

impl FilterProcess {
    pub fn new(
        specs: Vec<FilterSpec>,
        program: &Path,
        upstream: Option<OwnedFd>,
        downstream: OwnedFd,
        listeners: Vec<OwnedFd>,
    ) -> Self {
        Self {
            specs,
            is_ready: false,
            fruitless: 0,
            program: program.to_owned(),
            upstream,
            downstream,
            listeners,
            keeps: false,
            is_last: false,
            reason: None,
            deadline: Instant::now(),
            is_silent: false,
            running: None,
        }
    }

    pub fn downstream(&self) -> BorrowedFd<'_> {
        self.downstream.as_fd()
    }

    /// What it is called in messages and in `ps`.
    pub fn name(&self) -> String {
        self.specs.iter().map(|spec| spec.name.as_str()).collect::<Vec<_>>().join("+")
    }

    /// Whether it is a program of somebody else's.
    pub fn is_program(&self) -> bool {
        self.specs.iter().any(FilterSpec::is_program)
    }

    pub fn start(&mut self, ledger: &OwnedFd) -> Result<(), LaunchError> {
        let (ours, theirs) = link::pair().map_err(|error| LaunchError::System("socketpair", error))?;
        let name = self.name();
        let mut command = if self.is_program() {
            let mut command = Command::new(&name);
            // Where there are none, a program that counts its arguments sees none.
            command.args(self.specs.iter().map(|spec| &spec.arguments).filter(|text| !text.is_empty()));
            confine_program(&mut command, Path::new(&name));
            command
        } else {
            let mut command = Command::new(&self.program);
            command.arg0(format!("tidegate-cc-{name}")).arg("filter");
            command.args(self.specs.iter().flat_map(|spec| [&spec.name, &spec.arguments]));
            command
        };
        command.stdin(std::process::Stdio::null());
        let mut inherits = Vec::new();
        let named = [
            (environment::UPSTREAM, self.upstream.as_ref()),
            (environment::DOWNSTREAM, Some(&self.downstream)),
            (environment::LEDGER, Some(ledger)),
            (environment::CONTROL, Some(&theirs)),
        ];
        for (name, fd) in named {
            command.env_remove(name);
            if let Some(fd) = fd {
                command.env(name, fd.as_raw_fd().to_string());
                inherits.push(fd.as_raw_fd());
            }
        }
        let listeners: Vec<RawFd> = self.listeners.iter().map(AsRawFd::as_raw_fd).collect();
        let numbers: Vec<String> = listeners.iter().map(RawFd::to_string).collect();
        command.env(environment::LISTEN, numbers.join(","));
        for (name, is_so) in [(environment::KEEPS, self.keeps), (environment::LAST, self.is_last)] {
            command.env_remove(name);
            if is_so {
                command.env(name, "1");
            }
        }
        inherits.extend(listeners);
        if let Some((user, group)) = FILTER_USER.get() {
            command.env(environment::USER, format!("{user}:{group}"));
        }
        if tracing::dispatcher::has_been_set() {
            command.env(environment::LOG_FORM, "json");
        }
        command.env_remove("LD_PRELOAD");
        self.is_ready = false;
        self.reason = None;
        self.deadline = Instant::now() + PATIENCE;
        self.is_silent = false;
        self.running = Some((Child::spawn(command, inherits, &name)?, ours));
        Ok(())
    }

    pub fn pid(&self) -> Option<Pid> {
        self.running.as_ref().map(|(child, _)| child.pid())
    }

    /// What to watch: the process's end and its word.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        // A filter that is ready says nothing more; its closed end would only wake the launcher.
        let is_heard = !self.is_ready && !self.is_silent;
        let word = self.running.as_ref().filter(|_| is_heard).map(|(_, control)| control.as_fd());
        self.running.as_ref().map(|(child, _)| child.pidfd()).into_iter().chain(word)
    }

    /// Takes note of what the filter said.
    pub fn hear(&mut self) {
        if let Some((_, control)) = &self.running {
            let mut message = [0; word::REASON_BYTES];
            for _ in 0..MOST_MESSAGES {
                let received = rustix::net::recv(control, &mut message[..], RecvFlags::DONTWAIT);
                let length = match received {
                    Ok((length @ 1.., _)) => length,
                    Err(Errno::AGAIN | Errno::INTR) => break,
                    Ok(_) | Err(_) => {
                        self.is_silent = true;
                        break;
                    }
                };
                match message[0] {
                    word::READY => self.is_ready = true,
                    word::FAILED => {
                        self.reason = Some(String::from_utf8_lossy(&message[1..length]).into_owned());
                    }
                    _ => {}
                }
            }
        }
    }

    pub fn say(&self, word: u8) {
        if let Some((_, control)) = &self.running {
            let _ = rustix::net::send(control, &[word], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
    }

    /// Ends a process that should be ready by `now`, and is not.
    pub fn end_if_late(&mut self, now: Instant) {
        if let Some((child, _)) = self.running.as_ref().filter(|_| !self.is_ready && now >= self.deadline) {
            child.kill(Signal::KILL);
            let why = || format!("not ready after {} s", PATIENCE.as_secs());
            self.reason.get_or_insert_with(why);
        }
    }

    /// How the process ended, if it has, or why.
    pub fn has_ended(&mut self) -> Option<String> {
        let status = self.running.as_ref()?.0.status()?;
        // What it said last.
        self.hear();
        self.running = None;
        if let Some(reason) = self.reason.take() {
            return Some(reason);
        }
        Some(match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => format!("exit code {code}"),
            (None, Some(signal)) => format!("signal {signal}"),
            (None, None) => "unknown status".to_owned(),
        })
    }

    pub fn end(&mut self) {
        if let Some((child, _)) = self.running.take() {
            child.end();
        }
    }
}

/// Starts the command with the preload library, which finds the chain through the environment.
pub fn start_command(
    args: &ConditionArgs,
    terms: Option<&Terms>,
    preload: &Path,
    address: std::net::SocketAddr,
    link: &Option<OwnedFd>,
    ledger: &OwnedFd,
) -> Result<Child, LaunchError> {
    let (program, arguments) = args.command.split_first().ok_or(LaunchError::Start {
        program: "nothing".to_owned(),
        reason: io::ErrorKind::InvalidInput.into(),
    })?;
    let name = program.to_string_lossy().into_owned();
    let mut process = Command::new(program);
    let mut preloads = preload.as_os_str().to_owned();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preloads.push(" ");
        preloads.push(others);
    }
    let high =
        |fd: &OwnedFd| out_of_the_way(fd.as_fd()).map_err(|error| LaunchError::System("fcntl", error.into()));
    let ledger = high(ledger)?;
    let mut inherits = vec![ledger.as_raw_fd()];
    process.args(arguments).env("LD_PRELOAD", preloads).env(environment::SERVER_ADDRESS, address.to_string());
    process.env(environment::LEDGER, ledger.as_raw_fd().to_string());
    if let Some(terms) = terms {
        process.env(environment::LINGER, terms.to_string());
    }
    let link = link.as_ref().map(high).transpose()?;
    if let Some(link) = &link {
        process.env(environment::UPSTREAM, link.as_raw_fd().to_string());
        inherits.push(link.as_raw_fd());
    }
    Child::spawn(process, inherits, &name)
}

/// Starts the command so that its listening and accepting are questions to the descriptor that is returned.
pub fn start_static_command(command: &[OsString]) -> Result<(Child, OwnedFd), LaunchError> {
    let (program, arguments) = command.split_first().ok_or(LaunchError::Start {
        program: "nothing".to_owned(),
        reason: io::ErrorKind::InvalidInput.into(),
    })?;
    let name = program.to_string_lossy().into_owned();
    let (ours, theirs) = link::pair().map_err(|error| LaunchError::System("socketpair", error))?;
    let mut process = Command::new(program);
    process.args(arguments);
    // SAFETY: system calls only, which touch the child alone.
    unsafe { process.pre_exec(move || questions::install(theirs.as_fd())) };
    let child = Child::spawn(process, Vec::new(), &name)?;
    let questions = link::receive_descriptor(ours.as_fd());
    Ok((child, questions.map_err(|error| LaunchError::System("seccomp", error))?))
}

/// The launcher's children: those that it started, and descendants whose parents have ended, because it is a subreaper.
pub fn children() -> Vec<Pid> {
    let me = std::process::id();
    let children = std::fs::read_to_string(format!("/proc/{me}/task/{me}/children")).unwrap_or_default();
    children.split_whitespace().filter_map(|pid| pid.parse().ok()).filter_map(Pid::from_raw).collect()
}

/// Ends what the command left behind: as the subreaper, the launcher inherits it.
pub fn reap_descendants() {
    let deadline = Instant::now() + Duration::from_secs(2);
    loop {
        let signal = if Instant::now() < deadline { Signal::TERM } else { Signal::KILL };
        for pid in children() {
            let _ = rustix::process::kill_process(pid, signal);
        }
        // The list may lack some while others are ending (proc_pid_task(5)); that nobody is left is said here.
        loop {
            match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(_) => return,
            }
        }
        if Instant::now() > deadline + Duration::from_secs(2) {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It kept the launcher awake, and its place in the chain for ever.
    #[test]
    fn a_filter_that_will_not_be_ready_is_not_watched_and_is_ended() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("silent.py");
        let text = "#!/usr/bin/python3\nimport os, signal\nos.close(int(os.environ['TIDEGATE_CC_CONTROL']))\nsignal.pause()\n";
        std::fs::write(&program, text).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let (_, ledger) = crate::ledger::Ledger::create().unwrap();
        let (_up, downstream) = link::pair().unwrap();
        let spec = program.to_str().unwrap().parse().unwrap();
        let mut filter = FilterProcess::new(vec![spec], Path::new("none"), None, downstream, Vec::new());
        filter.start(&ledger).unwrap();
        let watched = |filter: &FilterProcess| -> Vec<OwnedFd> {
            filter.descriptors().map(|fd| fd.try_clone_to_owned().unwrap()).collect()
        };
        // The process's end and its word; then only its end.
        for descriptors in [2, 1] {
            assert_eq!(watched(&filter).len(), descriptors);
            let last = watched(&filter).pop().unwrap();
            let mut news = [rustix::event::PollFd::new(&last, rustix::event::PollFlags::IN)];
            let patience =
                rustix::time::Timespec { tv_sec: if descriptors == 2 { 20 } else { 0 }, tv_nsec: 0 };
            assert_eq!(rustix::event::poll(&mut news, Some(&patience)), Ok(descriptors - 1));
            filter.hear();
        }
        filter.end_if_late(Instant::now());
        assert!(filter.has_ended().is_none());
        filter.end_if_late(Instant::now() + PATIENCE);
        let last = watched(&filter).pop().unwrap();
        let mut ended = [rustix::event::PollFd::new(&last, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut ended, None).unwrap();
        assert_eq!(filter.has_ended().unwrap(), "not ready after 10 s");
        assert!(!filter.is_ready);
    }
}
