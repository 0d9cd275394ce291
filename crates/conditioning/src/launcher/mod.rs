//! Starts a chain of filters and the command behind it, and keeps the chain whole.
//!
//! The launcher owns both ends of every link. A filter that dies is started anew on the same links, so that nothing
//! that was under way in them is lost and no neighbour has to connect again.

mod asker;
mod children;
mod error;
mod listeners;
mod notify;
mod plan;
mod questions;
mod relay;

use std::ffi::OsString;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::Signal;

use crate::keeper::MOST_LISTENERS;
use crate::ledger::{Ledger, Tended};
use crate::link;
use crate::neighbours::{environment, say, word};
use children::{Child, FilterProcess, Signals, reap_descendants};
pub use error::LaunchError;
pub use plan::{FilterSpec, filter_program, plan};

/// How many times in a row a filter may die before it is ready.
const FRUITLESS_STARTS: u32 = 5;
/// How long filters may take to become ready, and the command to end.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a command may serve already by a process in the background before it ends itself.
const GOING_TO_BACKGROUND: Duration = Duration::from_secs(1);

fn after_help() -> String {
    format!(
        "Example:\n  tidegate condition --listen 0.0.0.0:80 -- nginx -g 'daemon off;'\n\n\
         Filters: {}; `tidegate filter NAME --help` explains one.",
        crate::filters::names()
    )
}

/// The arguments of `tidegate condition`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = after_help())]
pub struct ConditionArgs {
    /// Address and port that clients connect to; `:80` listens on every address. May be given several times.
    #[arg(long, value_name = "ADDR", value_parser = parse_listen, required = true)]
    pub listen: Vec<SocketAddr>,
    /// A filter and its arguments, the nearest to the client first; a name with a slash is a program of your own, and
    /// one with a + before it shares the process of the filter before it: cheaper, and not kept apart from it. Without
    /// any: package, persist, normalize, prior.
    #[arg(long = "filter", value_name = "NAME[=ARGS]")]
    pub filters: Vec<FilterSpec>,
    /// Port that COMMAND listens on, if it is not the one of the first --listen.
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub server_port: Option<u16>,
    /// How COMMAND is reached; by default, what its program file calls for.
    #[arg(long, value_enum)]
    pub via: Option<Via>,
    /// How long COMMAND may take until it listens, and to accept its first client.
    #[arg(long, value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    pub start_timeout: u64,
    /// Connections that may wait to be accepted.
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(i32).range(1..))]
    pub backlog: i32,
    /// Leave scheduling as it is, instead of SCHED_BATCH: lower latency where cores are shared with other work, less
    /// throughput.
    #[arg(long)]
    pub preempt: bool,
    /// How long a server that waits for events (epoll), or has processes of one thread, may keep a connection after its
    /// response and read the next request itself: nearly as many requests as without a chain. For chains of package,
    /// persist, normalize and prior only; 0: not at all.
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 0)]
    pub linger: u64,
    /// User that filters become when they are started as root.
    #[arg(long, value_name = "NAME", default_value = "nobody")]
    pub filter_user: String,
    /// The preload library, if it is not where it was installed.
    #[arg(long, value_name = "FILE", env = "TIDEGATE_PRELOAD")]
    pub preload: Option<PathBuf>,
    /// The server and its arguments.
    #[arg(required = true, last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// How the command's listening and accepting are taken over.
#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
pub enum Via {
    /// By a library that is loaded before libc.
    Preload,
    /// By the kernel's questions to the launcher: for programs that make their system calls themselves.
    Seccomp,
}

/// Reads `ADDR:PORT`, or `:PORT`.
fn parse_listen(text: &str) -> Result<SocketAddr, String> {
    let every = if has_ipv6() { "[::]" } else { "0.0.0.0" };
    let full = if text.starts_with(':') { format!("{every}{text}") } else { text.to_owned() };
    let wrong = "expected an address and a port, such as 127.0.0.1:8080, [::]:80 or :80";
    full.parse().ok().filter(|address: &SocketAddr| address.port() != 0).ok_or_else(|| wrong.to_owned())
}

fn has_ipv6() -> bool {
    let socket =
        rustix::net::socket(rustix::net::AddressFamily::INET6, rustix::net::SocketType::STREAM, None);
    socket.is_ok_and(|socket| {
        rustix::net::bind(&socket, &SocketAddr::from((std::net::Ipv6Addr::UNSPECIFIED, 0))).is_ok()
    })
}

/// Runs `tidegate condition` to its end and returns the command's exit code.
///
/// Call it on the main thread of a process that does nothing else: it takes over signals and child processes.
///
/// # Errors
/// See [`LaunchError`]; every process that was started has ended by then.
pub fn condition(args: &ConditionArgs) -> Result<u8, LaunchError> {
    let filters = plan(&args.filters)?;
    plan::check_programs(&filters)?;
    let terms = plan::terms(&filters, Duration::from_millis(args.linger))?;
    children::become_user(&args.filter_user)?;
    children::let_preempt(args.preempt);
    children::raise_descriptor_limit();
    // Whoever offers `condition` offers `filter` too.
    let program = std::env::current_exe().map_err(|error| LaunchError::System("program", error))?;
    let bypasses_libc = args.command.first().is_some_and(|program| notify::bypasses_libc(program.as_ref()));
    let via = args.via.unwrap_or(if bypasses_libc { Via::Seccomp } else { Via::Preload });
    let is_static = via == Via::Seccomp;
    let preload = if is_static { PathBuf::new() } else { plan::preload_library(args.preload.as_deref())? };
    let Some(first) = args.listen.first().filter(|_| args.listen.len() <= MOST_LISTENERS) else {
        return Err(LaunchError::Listeners(args.listen.len()));
    };
    let is_repeated = |&(at, address): &(usize, &SocketAddr)| args.listen[..at].contains(address);
    if let Some((_, &address)) = args.listen.iter().enumerate().find(is_repeated) {
        return Err(LaunchError::ListensTwice(address));
    }
    let listeners = args.listen.iter().map(|&address| listen(address, args.backlog));
    let mut chain = RunningChain::start(&filters, &program, listeners.collect::<Result<_, _>>()?)?;
    let server_port = args.server_port.unwrap_or(first.port());
    let address = SocketAddr::new(first.ip(), server_port);
    let server_end = chain.take_server_end();
    let command = if is_static {
        let (command, questions) = children::start_static_command(&args.command)?;
        let watched = questions.try_clone().map_err(|error| LaunchError::System("seccomp", error))?;
        chain.questions = Some(watched);
        let link = server_end.ok_or(LaunchError::System("link", io::ErrorKind::NotFound.into()))?;
        let supervisor = notify::Supervisor::new(questions, link, &chain.ledger_file, address)
            .map_err(|error| LaunchError::System("seccomp", error))?;
        // It ends with the server; should it not, then with this process.
        std::thread::spawn(move || supervisor.run());
        command
    } else {
        let keeps = terms.as_ref();
        let started =
            children::start_command(args, keeps, &preload, address, &server_end, &chain.ledger_file)?;
        // Only the server's processes hold this end: its hang-up says that they have ended.
        drop(server_end);
        started
    };
    let limit = Duration::from_secs(args.start_timeout);
    let served = Served {
        child: command,
        port: server_port,
        via,
        limit,
        command: &args.command,
        addresses: &args.listen,
    };
    chain.supervise(Some(served))
}

/// Runs a chain for a server that was started by somebody else and holds the other end of the last link: what
/// cc_createlsock starts. What belongs to the chain is inherited, as by a filter that is first and last at once.
/// Returns when that server is gone.
///
/// # Errors
/// See [`LaunchError`].
pub fn serve(filters: &[FilterSpec]) -> Result<u8, LaunchError> {
    let missing = || LaunchError::System("place", io::ErrorKind::NotFound.into());
    let need = |name| link::inherited(name).ok_or_else(missing);
    let (listener, filter_end) = (need(environment::LISTEN)?, need(environment::DOWNSTREAM)?);
    let (control, ledger_file) = (need(environment::CONTROL)?, need(environment::LEDGER)?);
    // The server waits for this process, and learns from the descriptor what came of its child.
    // SAFETY: this process has one thread; the parent ends without running anything of ours.
    match unsafe { libc::fork() } {
        -1 => return Err(LaunchError::System("fork", io::Error::last_os_error())),
        0 => {}
        // SAFETY: ends the process, which nothing waits for but the server.
        _ => unsafe { libc::_exit(0) },
    }
    let say = |byte: u8| {
        let _ = rustix::net::send(&control, &[byte], rustix::net::SendFlags::NOSIGNAL);
    };
    let _ = rustix::process::setsid();
    let outcome = start_serving(filters, listener, filter_end, ledger_file);
    match outcome {
        Ok(mut chain) => {
            say(word::READY);
            chain.supervise(None)
        }
        Err(error) => {
            say(error.exit_code());
            Err(error)
        }
    }
}

fn start_serving(
    filters: &[FilterSpec],
    listener: OwnedFd,
    filter_end: OwnedFd,
    ledger_file: OwnedFd,
) -> Result<RunningChain, LaunchError> {
    let filters = plan(filters)?;
    children::become_user("nobody")?;
    let program = std::env::current_exe().map_err(|error| LaunchError::System("program", error))?;
    let ledger = Ledger::open(ledger_file.as_fd()).map_err(|error| LaunchError::System("ledger", error))?;
    RunningChain::start_with(&filters, &program, vec![listener], filter_end, None, (ledger, ledger_file))
}

/// A listening socket whose connections are reported once data has arrived.
///
/// # Errors
/// The address is in use, or not ours, or a privileged port.
pub fn listen(address: SocketAddr, backlog: i32) -> Result<OwnedFd, LaunchError> {
    let failed = |error: rustix::io::Errno| LaunchError::Listen { address, reason: error.into() };
    let family =
        if address.is_ipv4() { rustix::net::AddressFamily::INET } else { rustix::net::AddressFamily::INET6 };
    let socket = rustix::net::socket_with(
        family,
        rustix::net::SocketType::STREAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
    .map_err(failed)?;
    rustix::net::sockopt::set_socket_reuseaddr(&socket, true).map_err(failed)?;
    if address.ip() == std::net::IpAddr::from(std::net::Ipv6Addr::UNSPECIFIED) {
        rustix::net::sockopt::set_ipv6_v6only(&socket, false).map_err(failed)?;
    }
    rustix::net::bind(&socket, &address).map_err(failed)?;
    rustix::net::listen(&socket, backlog).map_err(failed)?;
    let flags = rustix::fs::fcntl_getfl(&socket).map_err(failed)? | rustix::fs::OFlags::NONBLOCK;
    rustix::fs::fcntl_setfl(&socket, flags).map_err(failed)?;
    Ok(socket)
}

/// Whether a signal asks the server to end; the others are passed on for what they mean to the server.
fn ends(signal: Signal) -> bool {
    matches!(signal, Signal::TERM | Signal::INT | Signal::QUIT)
}

struct Served<'c> {
    child: Child,
    port: u16,
    via: Via,
    limit: Duration,
    command: &'c [OsString],
    addresses: &'c [SocketAddr],
}

impl Served<'_> {
    fn name(&self) -> String {
        self.command.first().map_or_else(String::new, |command| command.to_string_lossy().into_owned())
    }
}

/// A word of a command as one would type it.
fn shown(word: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "-_./:=,+@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) { word.to_owned() } else { format!("{word:?}") }
}

fn never_accepted(served: &Served<'_>) -> LaunchError {
    let (port, seconds, via) = (served.port, served.limit.as_secs(), served.via);
    LaunchError::NeverAccepted { command: served.name(), port, seconds, via }
}

/// The chain while it runs.
struct RunningChain {
    filters: Vec<FilterProcess>,
    signals: Signals,
    ledger: Ledger,
    ledger_file: OwnedFd,
    server_end: Option<OwnedFd>,
    /// What the server's processes ask, if they are reached so.
    questions: Option<OwnedFd>,
}

impl RunningChain {
    fn start(
        filters: &[FilterSpec],
        program: &std::path::Path,
        listeners: Vec<OwnedFd>,
    ) -> Result<Self, LaunchError> {
        let system = |error| LaunchError::System("socketpair", error);
        let (filter_end, server_end) = link::pair().map_err(system)?;
        let ledger = Ledger::create().map_err(|error| LaunchError::System("ledger", error))?;
        Self::start_with(filters, program, listeners, filter_end, Some(server_end), ledger)
    }

    fn start_with(
        filters: &[FilterSpec],
        program: &std::path::Path,
        mut listeners: Vec<OwnedFd>,
        filter_end: OwnedFd,
        server_end: Option<OwnedFd>,
        (ledger, ledger_file): (Ledger, OwnedFd),
    ) -> Result<Self, LaunchError> {
        let signals = Signals::take().map_err(|error| LaunchError::System("signalfd", error))?;
        let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
        let mut chain =
            Self { filters: Vec::new(), signals, ledger, ledger_file, server_end, questions: None };
        let mut upstream: Option<OwnedFd> = None;
        let mut last = Some(filter_end);
        let processes: Vec<_> = plan::processes(filters).collect();
        for (at, specs) in processes.iter().enumerate() {
            let (downstream, next) = if at + 1 == processes.len() {
                (last.take(), None)
            } else {
                let (up, down) = link::pair().map_err(|error| LaunchError::System("socketpair", error))?;
                (Some(up), Some(down))
            };
            let Some(downstream) = downstream else { break };
            let upstream = std::mem::replace(&mut upstream, next);
            let filter = FilterProcess::new(
                specs.to_vec(),
                program,
                upstream,
                downstream,
                std::mem::take(&mut listeners),
            );
            chain.filters.push(filter);
        }
        let keeper = |filter: &FilterProcess| matches!(filter.name().as_str(), "package" | "persist");
        if let Some(last) = chain.filters.iter_mut().rfind(|filter| keeper(filter)) {
            last.keeps = true;
        }
        if let Some(last) = chain.filters.last_mut() {
            last.is_last = true;
        }
        for at in 0..chain.filters.len() {
            chain.filters[at].start(&chain.ledger_file)?;
        }
        chain.await_ready()?;
        Ok(chain)
    }

    fn await_ready(&mut self) -> Result<(), LaunchError> {
        let deadline = Instant::now() + PATIENCE;
        while let Some(waiting) = self.filters.iter().find(|filter| !filter.is_ready) {
            if Instant::now() >= deadline {
                return Err(LaunchError::FilterSilent { name: waiting.name() });
            }
            self.wait(None, Duration::from_millis(100));
            for filter in &mut self.filters {
                filter.hear();
                if !filter.is_ready
                    && let Some(status) = filter.has_ended()
                {
                    return Err(LaunchError::FilterExited { name: filter.name(), status });
                }
            }
            if self.signals.next().is_some_and(ends) {
                return Err(LaunchError::System("start", io::ErrorKind::Interrupted.into()));
            }
        }
        Ok(())
    }

    fn take_server_end(&mut self) -> Option<OwnedFd> {
        self.server_end.take()
    }

    /// Waits for a signal, a filter's word or end, or the command's end.
    fn wait(&self, command: Option<&Child>, timeout: Duration) -> bool {
        let mut watched = vec![PollFd::new(&self.signals, PollFlags::IN)];
        for filter in &self.filters {
            watched.extend(filter.descriptors().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        }
        if let Some(command) = command {
            watched.push(PollFd::from_borrowed_fd(command.pidfd(), PollFlags::IN));
        }
        // Only its hang-up is of interest: the server's processes are gone. Where they ask, this process has the other
        // end of the link, and the last of them takes its questions with it once it has been collected.
        let last_link = self.filters.last().map(FilterProcess::downstream);
        let last_link = self.questions.as_ref().map(AsFd::as_fd).or(last_link);
        if let Some(link) = last_link {
            watched.push(PollFd::from_borrowed_fd(link, PollFlags::empty()));
        }
        let timeout = rustix::time::Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        let _ = poll(&mut watched, Some(&timeout));
        last_link.is_some() && watched.last().is_some_and(|link| link.revents().contains(PollFlags::HUP))
    }

    fn supervise(&mut self, served: Option<Served<'_>>) -> Result<u8, LaunchError> {
        let started = Instant::now();
        let mut ending: Option<Instant> = None;
        let mut in_vain_since: Option<Instant> = None;
        let mut is_in_background = false;
        let mut passed_on: Vec<(Signal, Instant)> = Vec::new();
        let mut tended = None;
        let mut is_announced = false;
        loop {
            let listening = self.ledger.is_listening();
            if let Some(served) = served.as_ref().filter(|_| listening && !is_announced) {
                self.announce(served);
                is_announced = true;
            }
            let pause = if listening || served.is_none() {
                Duration::from_secs(1)
            } else {
                Duration::from_millis(50)
            };
            let foreground = served.as_ref().filter(|_| !is_in_background);
            let hung_up = self.wait(foreground.map(|served| &served.child), pause);
            match foreground.map(|served| served.child.exit_code()) {
                // It left its work to processes of its own that have the server's end of the chain.
                Some(Some(0)) if ending.is_none() && !self.wait(None, Duration::ZERO) => {
                    is_in_background = true;
                    // Whom they were meant for was not this process's child then, and who got them was about to end.
                    let late = passed_on.drain(..).filter(|(_, when)| when.elapsed() < GOING_TO_BACKGROUND);
                    late.for_each(|(signal, _)| self.tell_server(signal));
                }
                Some(Some(code)) if ending.is_some() || self.ledger.is_listening() => return Ok(code),
                Some(Some(code)) => return Err(self.ended_early(served.as_ref(), code)),
                Some(None) => {}
                None if hung_up && served.is_some() && ending.is_none() && !self.ledger.is_listening() => {
                    return Err(self.ended_early(served.as_ref(), 0));
                }
                None if hung_up => return Ok(0),
                None => {}
            }
            if let Some(served) = served.as_ref().filter(|served| started.elapsed() >= served.limit)
                && !self.ledger.is_listening()
            {
                self.tell_server(Signal::KILL);
                return Err(self.never_listened(served));
            }
            if let Some(served) = served.as_ref().filter(|_| !self.ledger.accepts() && ending.is_none()) {
                if !self.has_unread() {
                    in_vain_since = None;
                } else if in_vain_since.get_or_insert_with(Instant::now).elapsed() >= served.limit {
                    self.tell_server(Signal::KILL);
                    return Err(never_accepted(served));
                }
            }
            while let Some(signal) = self.signals.next() {
                if signal == Signal::USR1 {
                    self.filters.iter().for_each(|filter| filter.say(word::COUNTERS));
                    continue;
                }
                if served.is_none() {
                    if ends(signal) {
                        return Ok(0);
                    }
                    continue;
                }
                // A second signal does not wait for the command.
                let again = ending.is_some() && ends(signal);
                self.tell_server(if again { Signal::KILL } else { signal });
                if ends(signal) {
                    ending.get_or_insert_with(Instant::now);
                } else if !is_in_background {
                    passed_on.retain(|(_, when)| when.elapsed() < GOING_TO_BACKGROUND);
                    passed_on.push((signal, Instant::now()));
                }
            }
            if ending.is_some_and(|since| since.elapsed() > PATIENCE) {
                self.tell_server(Signal::KILL);
            }
            self.mend(hung_up)?;
            self.tend_turns(&mut tended, Instant::now());
            self.collect_orphans(served.as_ref().filter(|_| !is_in_background));
        }
    }

    /// Says who serves where. Not before the server does: what keeps it from that is the one line that is to be seen
    /// then.
    fn announce(&self, served: &Served<'_>) {
        let addresses: Vec<_> = served.addresses.iter().map(SocketAddr::to_string).collect();
        let filters: Vec<_> = self.filters.iter().map(FilterProcess::name).collect();
        let command: Vec<_> = served.command.iter().map(|word| shown(&word.to_string_lossy())).collect();
        let (addresses, filters, command) = (addresses.join(", "), filters.join(", "), command.join(" "));
        say(&format!("tidegate: listening on {addresses}, through {filters}, for {command}"));
    }

    /// Collects processes of the server's whose parents have ended.
    fn collect_orphans(&self, foreground: Option<&Served<'_>>) {
        let command = foreground.map(|served| served.child.pid());
        let own = |pid| Some(pid) == command || self.filters.iter().any(|filter| filter.pid() == Some(pid));
        for pid in children::children().into_iter().filter(|&pid| !own(pid)) {
            let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::NOHANG);
        }
    }

    fn ended_early(&self, served: Option<&Served<'_>>, code: u8) -> LaunchError {
        let command = served.map_or_else(String::new, Served::name);
        LaunchError::CommandEnded { command, code, port: served.map_or(0, |served| served.port) }
    }

    /// Whether a request waits for the server.
    fn has_unread(&self) -> bool {
        self.filters.last().is_some_and(|last| link::unread_bytes(last.downstream()) > 0)
    }

    /// Looks after the turns of the server's processes, if it is time to: signals, and what ends, come in between.
    /// `last` is what was found the last time.
    fn tend_turns(&self, last: &mut Option<Tended>, now: Instant) {
        if last.is_some_and(|last| !last.is_due(now)) {
            return;
        }
        let tended = self.ledger.turns().tend(self.has_unread(), crate::alive::is_alive, *last, now);
        if tended.has_died {
            self.hand_again(self.filters.len());
        }
        *last = Some(tended);
    }

    /// Has the filters before the one at `at` hand again what nobody has claimed. One of another origin may not keep
    /// what it handed on: those before it do it, too.
    fn hand_again(&self, at: usize) {
        for before in self.filters[..at].iter().rev() {
            before.say(word::HAND_AGAIN);
            if !before.is_program() {
                break;
            }
        }
    }

    fn never_listened(&self, served: &Served<'_>) -> LaunchError {
        let command = served.name();
        let (port, seconds) = (served.port, served.limit.as_secs());
        match self.ledger.other_port() {
            Some(other) => LaunchError::ListensElsewhere { command, port, other },
            None => LaunchError::NeverListened { command, port, seconds, via: served.via },
        }
    }

    /// Sends a signal to the command, or to what it left in the background.
    fn tell_server(&self, signal: Signal) {
        let filters: Vec<_> = self.filters.iter().filter_map(FilterProcess::pid).collect();
        for pid in children::children().into_iter().filter(|pid| !filters.contains(pid)) {
            let _ = rustix::process::kill_process(pid, signal);
        }
    }

    /// Starts anew what died, and has the neighbours hand again what it held.
    fn mend(&mut self, hung_up: bool) -> Result<(), LaunchError> {
        for at in 0..self.filters.len() {
            self.filters[at].hear();
            // The last filter ends when the server has: so will the chain, in a moment.
            if hung_up && at + 1 == self.filters.len() {
                continue;
            }
            self.filters[at].end_if_late(Instant::now());
            if let Some(status) = self.filters[at].has_ended() {
                let filter = &mut self.filters[at];
                filter.fruitless = if filter.is_ready { 0 } else { filter.fruitless + 1 };
                if filter.fruitless >= FRUITLESS_STARTS {
                    return Err(LaunchError::FilterExited { name: filter.name(), status });
                }
                say(&format!("tidegate: filter {} ended ({status}), starting it again", filter.name()));
                filter.start(&self.ledger_file)?;
                self.hand_again(at);
            }
        }
        Ok(())
    }
}

impl Drop for RunningChain {
    fn drop(&mut self) {
        for filter in &mut self.filters {
            filter.end();
        }
        reap_descendants();
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.fd()
    }
}
