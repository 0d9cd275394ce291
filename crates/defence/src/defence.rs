//! What all cores' chains have in common, and what the rest of the program sees of them.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use tidegate_core::hooks::{Chain, ChainSource, Decision};
use tidegate_core::metrics::{Kind, Sample};
use tidegate_core::{IpPrefix, PrefixTree, Reason, TreeConfig};

use crate::arbiter::Judge;
use crate::challenge::Challenger;
use crate::view::{ClientRow, Level, Wanted};
use crate::{Settings, classifiers};

/// Notices that may wait for whoever keeps the log; more are counted and lost.
const MAX_NOTICES: usize = 16_384;
/// Lifted blocks that cores may not have taken note of yet.
const MAX_LIFTED: usize = 1_024;

/// A decision worth a line in the audit log.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Notice {
    /// What a block is about: the address, or of IPv6 the network that counts as one.
    pub subject: IpPrefix,
    /// The client.
    pub address: IpAddr,
    /// Whether it came through a trusted proxy: then nothing below HTTP may be done about it.
    pub forwarded: bool,
    /// What was decided, and why.
    pub decision: Decision,
    /// Whether it was only tried out.
    pub dry_run: bool,
    /// The client's requests within the sliding window.
    pub requests: u32,
    /// The verdicts against it within the sliding window, this one included.
    pub violations: u32,
}

/// How often a reason was decided for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RuleCount {
    /// The reason.
    pub reason: Reason,
    /// Decisions that were carried out.
    pub acted: u64,
    /// Decisions of rules that are only tried out.
    pub dry_run: u64,
}

/// Builds the cores' chains and gathers what they find.
#[derive(Debug)]
pub struct Defence {
    settings: RwLock<Settings>,
    shared: Arc<Shared>,
    seed: u64,
    challenge_key: [u8; 32],
    notices: Mutex<Option<Receiver<Notice>>>,
}

/// What chains write to. Only notices and the seldom things take a lock, and never one that anybody holds for long.
#[derive(Debug)]
pub(crate) struct Shared {
    counts: Vec<[AtomicU64; 2]>,
    notices: SyncSender<Notice>,
    lost: AtomicU64,
    lifted_total: AtomicU64,
    lifted: Mutex<VecDeque<IpPrefix>>,
    wanted_total: AtomicU64,
    wanted: Mutex<Option<Wanted>>,
    shown: Mutex<Vec<(u64, Vec<Level>)>>,
}

impl Defence {
    /// `seed` and `challenge_key` are secrets of this process, or of all that share challenges.
    pub fn new(settings: Settings, seed: u64, challenge_key: [u8; 32]) -> Self {
        let (sender, receiver) = sync_channel(MAX_NOTICES);
        let shared = Shared {
            counts: Reason::ALL.iter().map(|_| Default::default()).collect(),
            notices: sender,
            lost: AtomicU64::new(0),
            lifted_total: AtomicU64::new(0),
            lifted: Mutex::default(),
            wanted_total: AtomicU64::new(0),
            wanted: Mutex::default(),
            shown: Mutex::default(),
        };
        Self {
            settings: RwLock::new(settings),
            shared: Arc::new(shared),
            seed,
            challenge_key,
            notices: Mutex::new(Some(receiver)),
        }
    }

    /// The end of the queue at which notices come out; there is one.
    pub fn take_notices(&self) -> Option<Receiver<Notice>> {
        lock(&self.notices).take()
    }

    /// Chains that are built from now on follow these.
    pub fn set_settings(&self, settings: Settings) {
        *self.settings.write().unwrap_or_else(PoisonError::into_inner) = settings;
    }

    /// The settings in force.
    pub fn settings(&self) -> Settings {
        self.settings.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How often each reason was decided for.
    pub fn counts(&self) -> Vec<RuleCount> {
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let count = |(reason, [acted, dry_run]): (&Reason, &[AtomicU64; 2])| RuleCount {
            reason: *reason,
            acted: value(acted),
            dry_run: value(dry_run),
        };
        Reason::ALL.iter().zip(&self.shared.counts).map(count).collect()
    }

    /// The counts as metrics.
    pub fn samples(&self) -> Vec<Sample> {
        let sample = |count: RuleCount| Sample {
            name: count.reason.metric(),
            help: count.reason.help(),
            kind: Kind::Counter,
            value: count.acted,
        };
        let mut samples: Vec<Sample> = self.counts().into_iter().map(sample).collect();
        samples.push(Sample {
            name: "defence_dry_run_total",
            help: "Decisions of rules that are only tried out.",
            kind: Kind::Counter,
            value: self.counts().iter().map(|count| count.dry_run).sum(),
        });
        samples.push(Sample {
            name: "defence_notices_lost_total",
            help: "Decisions that could not be logged because too many came at once.",
            kind: Kind::Counter,
            value: self.shared.lost.load(Ordering::Relaxed),
        });
        samples
    }

    /// Somebody lifted a block: the cores forget what addresses in the prefix were blocked for.
    pub fn lift(&self, prefix: IpPrefix) {
        let mut lifted = lock(&self.shared.lifted);
        lifted.push_back(prefix);
        if lifted.len() > MAX_LIFTED {
            lifted.pop_front();
        }
        self.shared.lifted_total.fetch_add(1, Ordering::Release);
    }

    /// Asks every core for those who do most. The answer is there after the cores' next ticks: [`Self::seen`].
    pub fn ask_top(&self, count: usize) -> u64 {
        self.ask(Wanted::Top(count))
    }

    /// Asks every core what it knows about an address and the prefixes around it.
    pub fn ask_about(&self, address: IpAddr) -> u64 {
        self.ask(Wanted::Address(address))
    }

    fn ask(&self, wanted: Wanted) -> u64 {
        *lock(&self.shared.wanted) = Some(wanted);
        self.shared.wanted_total.fetch_add(1, Ordering::Release) + 1
    }

    /// What the cores have answered to the question with this number, or a later one; and how many have.
    pub fn seen(&self, number: u64) -> (usize, Vec<ClientRow>) {
        let shown = lock(&self.shared.shown);
        let answers: Vec<&Vec<Level>> =
            shown.iter().filter(|(answered, _)| *answered >= number).map(|(_, levels)| levels).collect();
        let mut rows: Vec<Level> = Vec::new();
        for level in answers.iter().flat_map(|levels| levels.iter()) {
            match rows.iter_mut().find(|row| row.prefix == level.prefix) {
                Some(row) => row.merge(level),
                None => rows.push(*level),
            }
        }
        (answers.len(), rows)
    }
}

impl ChainSource for Defence {
    fn chain(&self, core: usize, cores: usize) -> Chain {
        let settings = self.settings();
        let tree = PrefixTree::new(TreeConfig {
            memory_bytes: settings.memory_bytes / cores.max(1),
            window_ms: Settings::WINDOW.as_millis() as u64,
            seed: self.seed.wrapping_add(core as u64),
        });
        let pass_ms = u64::try_from(settings.pass_for.as_millis()).unwrap_or(u64::MAX / 2);
        let challenger = Challenger::new(self.challenge_key, settings.challenge_bits, pass_ms);
        let classifiers = classifiers::all(&settings, self.seed);
        let judge = Judge::new(settings, challenger, core, Arc::clone(&self.shared));
        Chain::new(tree, classifiers, Box::new(judge), self.seed)
    }
}

impl Shared {
    pub(crate) fn count(&self, reason: Reason, dry_run: bool) {
        self.counts[reason as usize][usize::from(dry_run)].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn tell(&self, notice: Notice) {
        if self.notices.try_send(notice).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn lifted_count(&self) -> u64 {
        self.lifted_total.load(Ordering::Acquire)
    }

    /// How many blocks were lifted in all, and the prefixes of those after the first `known`, as far as they are kept.
    pub(crate) fn lifted_since(&self, known: u64) -> (u64, Vec<IpPrefix>) {
        let lifted = lock(&self.lifted);
        let total = self.lifted_count();
        let new = usize::try_from(total - known).unwrap_or(usize::MAX).min(lifted.len());
        (total, lifted.iter().skip(lifted.len() - new).copied().collect())
    }

    /// What somebody wants to see, unless question `answered` was the last.
    pub(crate) fn wanted(&self, answered: u64) -> Option<(u64, Wanted)> {
        let number = self.wanted_total.load(Ordering::Acquire);
        if number == answered {
            return None;
        }
        lock(&self.wanted).map(|wanted| (number, wanted))
    }

    pub(crate) fn show(&self, core: usize, number: u64, levels: Vec<Level>) {
        let mut shown = lock(&self.shown);
        if shown.len() <= core {
            shown.resize(core + 1, (0, Vec::new()));
        }
        shown[core] = (number, levels);
    }
}

/// Every change under these locks is one step, so that a panic elsewhere leaves nothing half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
