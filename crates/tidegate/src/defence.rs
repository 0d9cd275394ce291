//! The defence of this process: built from the configuration, its notices written down, its blocks put on the block
//! list.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use tidegate_core::{Event, IpPrefix, Verdict};
use tidegate_defence::{Defence, Level, Notice};

use crate::config;
use crate::gate::Gatekeeper;

/// Blocks are put on the list in bundles, so that a flood of them costs the list one lock or a few system calls.
const BUNDLE: usize = 1_024;
/// How long a notice may wait for company.
const GATHER: Duration = Duration::from_millis(20);
/// Decisions that `block explain` knows of.
const REMEMBERED: usize = 10_000;
/// Lines about single decisions in the program's log, each second; the audit file has all that are told.
const LOGGED_PER_S: u32 = 20;
/// How long cores are waited for when somebody wants to see what they know: they look four times a second.
const VIEW_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug)]
struct Decided {
    time: SystemTime,
    notice: Notice,
    /// Whether somebody has lifted it since.
    is_lifted: bool,
}

/// What watches clients, and what it has decided lately.
#[derive(Debug)]
pub(crate) struct Guard {
    defence: Arc<Defence>,
    /// What challenges are made with.
    key: [u8; 32],
    cores: usize,
    decided: Mutex<VecDeque<Decided>>,
    reopen: AtomicBool,
}

impl Guard {
    /// Builds the defence, unless it is off.
    /// `key`: of the process before, so that whoever has passed a challenge need not pass it again.
    pub(crate) fn new(
        config: &config::Defence,
        cores: usize,
        key: Option<[u8; 32]>,
    ) -> io::Result<Option<Arc<Self>>> {
        if !config.enabled {
            return Ok(None);
        }
        let mut seed = [0; 8];
        let mut new_key = [0; 32];
        for secret in [&mut seed[..], &mut new_key[..]] {
            fill_random(secret)?;
        }
        let key = key.unwrap_or(new_key);
        let defence = Arc::new(Defence::new(config.settings.clone(), u64::from_le_bytes(seed), key));
        Ok(Some(Arc::new(Self {
            key,
            defence,
            cores,
            decided: Mutex::default(),
            reopen: AtomicBool::new(false),
        })))
    }

    /// What challenges are made with.
    pub(crate) fn key(&self) -> [u8; 32] {
        self.key
    }

    pub(crate) fn defence(&self) -> &Arc<Defence> {
        &self.defence
    }

    /// Writes decisions down and puts blocks on the list, on a thread of its own that lives as long as the process.
    pub(crate) fn start(
        self: &Arc<Self>,
        audit: Option<PathBuf>,
        gatekeeper: Arc<Gatekeeper>,
    ) -> io::Result<()> {
        let Some(notices) = self.defence.take_notices() else { return Ok(()) };
        let audit = audit.map(Audit::open).transpose()?;
        let guard = Arc::clone(self);
        std::thread::Builder::new().name("defence".into()).spawn(move || {
            Clerk { guard, gatekeeper, audit, logged: (Instant::now(), 0), stressed: false }.work(&notices)
        })?;
        Ok(())
    }

    /// Has the audit file opened anew, as after it was renamed.
    pub(crate) fn reopen_audit(&self) {
        self.reopen.store(true, Ordering::Relaxed);
    }

    /// What somebody lifted is forgotten; whether anybody within the prefix was blocked, on the list or above it.
    pub(crate) fn lift(&self, prefix: IpPrefix) -> bool {
        self.defence.lift(prefix);
        let now = SystemTime::now();
        let mut decided = self.decided.lock().unwrap_or_else(PoisonError::into_inner);
        let mut any = false;
        for decided in decided.iter_mut().filter(|decided| decided.holds(now)) {
            if prefix.contains(decided.notice.subject.address()) {
                decided.is_lifted = true;
                any = true;
            }
        }
        any
    }

    /// Those who do most, as a list of JSON objects.
    pub(crate) async fn top(&self, count: usize) -> Vec<Value> {
        let number = self.defence.ask_top(count);
        let mut rows = self.wait_for(number).await;
        rows.sort_unstable_by_key(|row| std::cmp::Reverse(row.count(Event::Request)));
        rows.truncate(count);
        rows.iter().map(level).collect()
    }

    /// What is known about an address, and what was decided about it.
    pub(crate) async fn explain(&self, address: IpAddr) -> Value {
        let number = self.defence.ask_about(address);
        let levels = self.wait_for(number).await;
        let decided = self.decided.lock().unwrap_or_else(PoisonError::into_inner);
        let about: Vec<Value> = decided
            .iter()
            .rev()
            .filter(|decided| decided.notice.subject.contains(address))
            .take(20)
            .map(|decided| entry(decided.time, &decided.notice))
            .collect();
        json!({
            "levels": levels.iter().map(level).collect::<Vec<_>>(),
            "decisions": about,
        })
    }

    async fn wait_for(&self, number: u64) -> Vec<Level> {
        let end = Instant::now() + VIEW_TIMEOUT;
        loop {
            let (answered, rows) = self.defence.seen(number);
            if answered >= self.cores || Instant::now() >= end {
                return rows;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Decided {
    /// Whether it is a block that is still in force.
    fn holds(&self, now: SystemTime) -> bool {
        let since = now.duration_since(self.time).unwrap_or_default();
        matches!(self.notice.decision.verdict, Verdict::Block(time) if since < time)
            && is_block(&self.notice)
            && !self.is_lifted
    }
}

/// Does the paperwork.
struct Clerk {
    guard: Arc<Guard>,
    gatekeeper: Arc<Gatekeeper>,
    audit: Option<Audit>,
    /// The second in progress and its lines.
    logged: (Instant, u32),
    /// Whether stress was the last thing said about it.
    stressed: bool,
}

impl Clerk {
    fn work(mut self, notices: &Receiver<Notice>) {
        loop {
            let mut bundle = Vec::new();
            match notices.recv_timeout(Duration::from_secs(1)) {
                Ok(notice) => bundle.push(notice),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            let end = Instant::now() + GATHER;
            while !bundle.is_empty() && bundle.len() < BUNDLE {
                let left = end.saturating_duration_since(Instant::now());
                let Ok(notice) = notices.recv_timeout(left) else { break };
                bundle.push(notice);
            }
            if self.guard.reopen.swap(false, Ordering::Relaxed)
                && let Some(audit) = &mut self.audit
            {
                audit.reopen();
            }
            self.block(&bundle);
            self.write_down(&bundle);
            self.note_stress();
        }
    }

    fn note_stress(&mut self) {
        self.guard.defence.set_host_stressed(self.gatekeeper.is_overloaded());
        let stress = self.guard.defence.stress();
        if stress.is_some() == self.stressed {
            return;
        }
        self.stressed = stress.is_some();
        self.gatekeeper.set_stressed(self.stressed);
        match stress {
            Some(cause) => tracing::warn!("defence: under stress: {}", cause.text()),
            None => tracing::info!("defence: the stress is over"),
        }
    }

    /// Packets of blocked addresses are refused where packets are: below HTTP. Not those of a trusted proxy's clients,
    /// whose packets are the proxy's, nor where somebody may be exempt.
    fn block(&self, bundle: &[Notice]) {
        let settings = self.guard.defence.settings();
        let acts_below_http = |notice: &&Notice| {
            is_block(notice) && !notice.forwarded && settings.may_block_below_http(notice.subject)
        };
        let mut of_time: BTreeMap<Duration, Vec<&Notice>> = BTreeMap::new();
        for notice in bundle.iter().filter(acts_below_http) {
            if let Verdict::Block(time) = notice.decision.verdict {
                of_time.entry(time).or_default().push(notice);
            }
        }
        let gate = self.gatekeeper.gate();
        for (time, blocks) in of_time {
            let prefixes: Vec<IpPrefix> = blocks.iter().map(|notice| notice.subject).collect();
            let added = gate.blocks().add_what_fits(&prefixes, Some(time));
            let reasons = blocks.iter().try_for_each(|notice| {
                gate.blocks().set_reason(notice.subject, notice.decision.reason.name())
            });
            if let Err(error) = added.and(reasons) {
                tracing::warn!(%error, "the block list did not take all blocks; they act above it");
            }
        }
    }

    fn write_down(&mut self, bundle: &[Notice]) {
        let now = SystemTime::now();
        if self.logged.0.elapsed() >= Duration::from_secs(1) {
            let left_out = self.logged.1.saturating_sub(LOGGED_PER_S);
            if left_out > 0 {
                tracing::warn!("defence: {left_out} more decisions in the second before");
            }
            self.logged = (Instant::now(), 0);
        }
        for notice in bundle {
            self.logged.1 += 1;
            if self.logged.1 <= LOGGED_PER_S {
                log(notice);
            }
            if let Some(audit) = &mut self.audit {
                audit.write(&entry(now, notice));
            }
        }
        if let Some(audit) = &mut self.audit {
            audit.flush();
        }
        let mut decided = self.guard.decided.lock().unwrap_or_else(PoisonError::into_inner);
        decided.extend(bundle.iter().map(|notice| Decided { time: now, notice: *notice, is_lifted: false }));
        let surplus = decided.len().saturating_sub(REMEMBERED);
        decided.drain(..surplus);
    }
}

/// The audit file: a JSON object a line.
struct Audit {
    path: PathBuf,
    file: BufWriter<File>,
}

impl Audit {
    fn open(path: PathBuf) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create(true).open(&path).map_err(|error| {
            io::Error::new(error.kind(), format!("cannot open the audit file {}: {error}", path.display()))
        })?;
        Ok(Self { path, file: BufWriter::new(file) })
    }

    fn reopen(&mut self) {
        match Self::open(self.path.clone()) {
            Ok(audit) => *self = audit,
            Err(error) => tracing::error!("{error}; the old file goes on"),
        }
    }

    fn write(&mut self, entry: &Value) {
        // A failure shows at the next flush.
        let _ = writeln!(self.file, "{entry}");
    }

    fn flush(&mut self) {
        if let Err(error) = self.file.flush() {
            tracing::error!(%error, "the audit file {} cannot be written", self.path.display());
        }
    }
}

fn fill_random(buffer: &mut [u8]) -> io::Result<()> {
    let mut filled = 0;
    while filled < buffer.len() {
        let flags = rustix::rand::GetRandomFlags::empty();
        filled += rustix::rand::getrandom(&mut buffer[filled..], flags)?;
    }
    Ok(())
}

fn is_block(notice: &Notice) -> bool {
    !notice.dry_run && matches!(notice.decision.verdict, Verdict::Block(_))
}

fn log(notice: &Notice) {
    tracing::info!(
        client = %notice.address,
        verdict = verdict(notice.decision.verdict),
        reason = notice.decision.reason.name(),
        filter = (notice.decision.filter > 0).then_some(notice.decision.filter),
        dry_run = notice.dry_run,
        requests = notice.requests,
        "defence: {}{}",
        if notice.dry_run { "would act: " } else { "" },
        notice.decision.reason.text()
    );
}

fn verdict(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Delay => "delay",
        Verdict::Tarpit => "tarpit",
        Verdict::Refuse => "refuse",
        Verdict::Challenge => "challenge",
        Verdict::Reset => "reset",
        Verdict::Drop => "drop",
        Verdict::Block(_) => "block",
        _ => "continue",
    }
}

fn entry(time: SystemTime, notice: &Notice) -> Value {
    let for_s = match notice.decision.verdict {
        Verdict::Block(time) => Some(time.as_secs()),
        _ => None,
    };
    json!({
        "time_unix_s": time.duration_since(UNIX_EPOCH).map_or(0.0, |time| (time.as_secs_f64() * 1e3).round() / 1e3),
        "address": notice.address,
        "subject": notice.subject.to_string(),
        "forwarded": notice.forwarded,
        "verdict": verdict(notice.decision.verdict),
        "for_s": for_s,
        "reason": notice.decision.reason.name(),
        "filter": (notice.decision.filter > 0).then_some(notice.decision.filter),
        "text": notice.decision.reason.text(),
        "dry_run": notice.dry_run,
        "requests": notice.requests,
        "violations": notice.violations,
    })
}

fn level(level: &Level) -> Value {
    json!({
        "prefix": level.prefix.map_or_else(|| "everybody".to_owned(), |prefix| prefix.to_string()),
        "requests": level.count(Event::Request),
        "connections": level.count(Event::Connection),
        "open": level.open,
        "addresses": level.count(Event::Address),
        "novel": level.count(Event::Novel),
        "errors": level.count(Event::Error),
        "upstream_ms": level.count(Event::UpstreamMs),
        "ranges": level.count(Event::Range),
        "slow": level.count(Event::Slow),
        "violations": level.count(Event::Violation),
        "blocked": level.blocked.map(|(reason, left_ms)| json!({
            "reason": reason.name(), "text": reason.text(), "left_s": left_ms / 1000,
        })),
        "suspect_s": level.suspect_ms.map(|left_ms| left_ms / 1000),
    })
}
