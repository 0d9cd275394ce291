//! What all cores' chains have in common, and what the rest of the program sees of them.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use tidegate_core::hooks::{Chain, ChainSource, Classifier, Decision};
use tidegate_core::metrics::{Kind, Sample};
use tidegate_core::{IpPrefix, PrefixTree, Reason, TreeConfig, Verdict};

use crate::arbiter::Judge;
use crate::challenge::{Challenger, Passes};
use crate::elsewhere::Elsewhere;
use crate::external::Feed;
use crate::memory::{channel_bytes, list_bytes};
use crate::stress::{Cause, Upstreams};
use crate::view::{ClientRow, Level, Wanted};
use crate::{Settings, classifiers, memory};

/// Notices that may wait for whoever keeps the log; more are counted and lost.
const MAX_NOTICES: usize = 16_384;
/// Orders that cores may not have taken note of yet; of more, those before are lost, and blocks act on new connections
/// only.
const MAX_ORDERS: usize = 16_384;

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

/// What every core is to do, in the order in which it was said.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Order {
    /// An address is blocked: what one core has decided, or somebody outside.
    Block {
        address: IpAddr,
        time: Duration,
        reason: Reason,
        /// Whether it comes through trusted proxies: then no block list below HTTP meets it.
        forwarded: bool,
    },
    /// Blocks in a prefix are lifted.
    Lift(IpPrefix),
}

/// Builds the cores' chains and gathers what they find.
#[derive(Debug)]
pub struct Defence {
    shared: Arc<Shared>,
    notices: Mutex<Option<Receiver<Notice>>>,
}

/// What chains write to. Only notices and the seldom things take a lock, and never one that anybody holds for long.
#[derive(Debug)]
pub(crate) struct Shared {
    settings: RwLock<Settings>,
    version: AtomicU64,
    pub(crate) seed: u64,
    challenge_key: [u8; 32],
    /// From which addresses solutions came lately, on any core.
    pub(crate) passes: Passes,
    /// The host is under stress, as others have found.
    pub(crate) host_stressed: AtomicBool,
    /// For each core whether it is under stress, and why it was last.
    stress: Mutex<Vec<(bool, Option<Cause>)>>,
    stress_total: AtomicU64,
    elsewhere: Mutex<Elsewhere>,
    pub(crate) feed: Arc<Feed>,
    orders: Mutex<VecDeque<Order>>,
    orders_total: AtomicU64,
    counts: Vec<[AtomicU64; 2]>,
    notices: SyncSender<Notice>,
    lost: AtomicU64,
    wanted_total: AtomicU64,
    wanted: Mutex<Option<Wanted>>,
    shown: Mutex<Vec<(u64, Vec<Level>)>>,
}

impl Defence {
    /// `seed` and `challenge_key` are secrets of this process, or of all that share challenges.
    pub fn new(settings: Settings, seed: u64, challenge_key: [u8; 32]) -> Self {
        let (sender, receiver) = sync_channel(MAX_NOTICES);
        let shared = Shared {
            settings: RwLock::new(settings),
            version: AtomicU64::new(0),
            seed,
            challenge_key,
            passes: Passes::new(seed),
            host_stressed: AtomicBool::new(false),
            stress: Mutex::default(),
            stress_total: AtomicU64::new(0),
            elsewhere: Mutex::default(),
            feed: Arc::default(),
            orders: Mutex::default(),
            orders_total: AtomicU64::new(0),
            counts: Reason::ALL.iter().map(|_| Default::default()).collect(),
            notices: sender,
            lost: AtomicU64::new(0),
            wanted_total: AtomicU64::new(0),
            wanted: Mutex::default(),
            shown: Mutex::default(),
        };
        Self { shared: Arc::new(shared), notices: Mutex::new(Some(receiver)) }
    }

    /// The end of the queue at which notices come out; there is one.
    pub fn take_notices(&self) -> Option<Receiver<Notice>> {
        lock(&self.notices).take()
    }

    /// Every chain follows these from its next tick on; only the memory stays as it is. Blocks stay; what was learned
    /// of the site's usual traffic is learned anew.
    pub fn set_settings(&self, settings: Settings) {
        *self.shared.settings.write().unwrap_or_else(PoisonError::into_inner) = settings;
        self.shared.version.fetch_add(1, Ordering::Release);
    }

    /// The settings in force.
    pub fn settings(&self) -> Settings {
        self.shared.settings()
    }

    /// What classifiers outside of this process are told.
    pub fn feed(&self) -> &Feed {
        &self.shared.feed
    }

    /// Somebody outside wants an address blocked: every core that knows it does so at its next tick, and the notice
    /// goes the way of all notices. Exemptions and dry runs hold here too, and trusted proxies are exempt; whether
    /// anything was done.
    pub fn block(&self, address: IpAddr, time: Duration) -> bool {
        let settings = self.settings();
        let is_exempt = |exemption: &crate::Exemption| {
            exemption.source.contains(address) && exemption.user_agent.is_empty()
        };
        let is_proxy = settings.trusted_proxies.iter().any(|proxy| proxy.contains(address));
        if is_proxy || settings.exempt.iter().any(is_exempt) {
            return false;
        }
        self.shared.count(Reason::External, settings.dry_run);
        self.shared.tell(Notice {
            subject: crate::arbiter::whole(address),
            address,
            forwarded: false,
            decision: Decision::new(Verdict::Block(time), Reason::External),
            dry_run: settings.dry_run,
            requests: 0,
            violations: 0,
        });
        if settings.dry_run {
            return false;
        }
        self.shared.order(Order::Block { address, time, reason: Reason::External, forwarded: false });
        true
    }

    /// Says whether the host is under stress, by its memory or its accept queues.
    pub fn set_host_stressed(&self, stressed: bool) {
        self.shared.host_stressed.store(stressed, Ordering::Relaxed);
    }

    /// Why any core is under stress; `None`: none is.
    pub fn stress(&self) -> Option<Cause> {
        lock(&self.shared.stress).iter().find_map(|(stressed, cause)| cause.filter(|_| *stressed))
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
        samples.extend(self.counts().into_iter().map(|count| Sample {
            name: count.reason.dry_run_metric(),
            help: "The same of rules that are only tried out.",
            kind: Kind::Counter,
            value: count.dry_run,
        }));
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
        samples.push(Sample {
            name: "defence_external_lost_total",
            help: "Events that no external classifier had room for.",
            kind: Kind::Counter,
            value: self.shared.feed.lost(),
        });
        samples.push(Sample {
            name: "defence_stressed",
            help: "1 while a data core is under stress.",
            kind: Kind::Gauge,
            value: self.stress().is_some().into(),
        });
        samples.push(Sample {
            name: "defence_stress_total",
            help: "How often a data core came under stress.",
            kind: Kind::Counter,
            value: self.shared.stress_total.load(Ordering::Relaxed),
        });
        samples
    }

    /// Somebody lifted a block: the cores forget what addresses in the prefix were blocked for.
    pub fn lift(&self, prefix: IpPrefix) {
        self.shared.order(Order::Lift(prefix));
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
        self.chain_of(core, cores, |all| all)
    }
}

impl Defence {
    /// A core's chain with what `choose` makes of the classifiers that the settings ask for.
    fn chain_of(
        &self,
        core: usize,
        cores: usize,
        choose: impl Fn(Vec<Box<dyn Classifier>>) -> Vec<Box<dyn Classifier>>,
    ) -> Chain {
        let settings = self.settings();
        let tree = PrefixTree::new(TreeConfig {
            memory_bytes: memory::of_tree(&settings, cores),
            window_ms: Settings::WINDOW.as_millis() as u64,
            seed: self.shared.seed.wrapping_add(core as u64),
        });
        let challenger = self.shared.challenger(&settings);
        let upstreams = Arc::new(Upstreams::default());
        let classifiers = classifiers::all(&settings, self.shared.seed, &upstreams, &self.shared.feed);
        let judge = Judge::new(settings, challenger, core, Arc::clone(&self.shared), upstreams);
        Chain::new(tree, choose(classifiers), Box::new(judge), self.shared.seed)
    }
}

impl Shared {
    /// The memory of the queues of notices and orders.
    pub(crate) const fn queue_bytes() -> usize {
        channel_bytes::<Notice>(MAX_NOTICES) + list_bytes::<Order>(MAX_ORDERS)
    }

    /// The most memory of the orders that a core has taken and not carried out yet.
    pub(crate) const fn taken_bytes() -> usize {
        MAX_ORDERS * size_of::<Order>()
    }

    pub(crate) fn settings(&self) -> Settings {
        self.settings.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes with every change of the settings.
    pub(crate) fn settings_version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    pub(crate) fn challenger(&self, settings: &Settings) -> Challenger {
        let pass_ms = u64::try_from(settings.pass_for.as_millis()).unwrap_or(u64::MAX / 2);
        Challenger::new(self.challenge_key, settings.challenge_bits, pass_ms)
    }

    /// Makes known whether a core is under stress, and what is beyond its limit just now.
    pub(crate) fn note_stress(&self, core: usize, stressed: bool, cause: Option<Cause>) {
        let mut stress = lock(&self.stress);
        if stress.len() <= core {
            stress.resize(core + 1, (false, None));
        }
        if stressed && !stress[core].0 {
            self.stress_total.fetch_add(1, Ordering::Relaxed);
        }
        stress[core] = (stressed, cause.or(stress[core].1));
    }

    /// Tells other cores who does most here, and the tree what they do elsewhere.
    pub(crate) fn exchange(&self, core: usize, tree: &mut PrefixTree, now_ms: u64) {
        lock(&self.elsewhere).exchange(core, tree, now_ms);
    }

    pub(crate) fn count(&self, reason: Reason, dry_run: bool) {
        self.counts[reason as usize][usize::from(dry_run)].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn tell(&self, notice: Notice) {
        if self.notices.try_send(notice).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Has every core do something at its next tick.
    pub(crate) fn order(&self, order: Order) {
        let mut orders = lock(&self.orders);
        if orders.len() >= MAX_ORDERS {
            orders.pop_front();
        }
        orders.push_back(order);
        self.orders_total.fetch_add(1, Ordering::Release);
    }

    /// How many orders there were in all.
    pub(crate) fn orders_count(&self) -> u64 {
        self.orders_total.load(Ordering::Acquire)
    }

    /// How many there were in all, and those after the first `known`, as far as they are kept.
    pub(crate) fn orders_since(&self, known: u64) -> (u64, Vec<Order>) {
        if self.orders_count() == known {
            return (known, Vec::new());
        }
        let orders = lock(&self.orders);
        let total = self.orders_count();
        let new = usize::try_from(total - known).unwrap_or(usize::MAX).min(orders.len());
        (total, orders.iter().skip(orders.len() - new).copied().collect())
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tidegate_core::Visit;
    use tidegate_core::hooks::{
        Field, Fields, Interest, Load, Part, Peer, RequestView, ResponseView, Scene, Source, Via,
    };

    use super::*;
    use crate::settings::{Action, Rule};

    /// Asks a classifier about every request, whatever it says that it looks at.
    #[derive(Debug)]
    struct Always(Box<dyn Classifier>);

    impl Classifier for Always {
        fn name(&self) -> &'static str {
            self.0.name()
        }

        fn on_connect(&self, scene: &mut Scene<'_>, open: u32) -> Decision {
            self.0.on_connect(scene, open)
        }

        fn interest(&self) -> Interest {
            match self.0.interest() {
                Interest::Never => Interest::Never,
                _ => Interest::Always,
            }
        }

        fn on_request(&self, scene: &mut Scene<'_>, request: &RequestView<'_>, visit: &Visit) -> Decision {
            self.0.on_request(scene, request, visit)
        }

        fn looks_at_responses(&self) -> bool {
            true
        }

        fn on_response(&self, scene: &mut Scene<'_>, response: &ResponseView<'_>) -> Decision {
            self.0.on_response(scene, response)
        }

        fn on_tick(&self, tree: &mut PrefixTree, now_ms: u64) {
            self.0.on_tick(tree, now_ms);
        }
    }

    struct Asked(Option<Part>);

    impl Fields for Asked {
        fn get(&self, _: Field) -> Option<&[u8]> {
            None
        }

        fn part(&self) -> Option<Part> {
            self.0
        }
    }

    /// Rules of few events, none of which ends a client's history.
    fn strict() -> Settings {
        let rule = |rule: &Rule| Rule { limit: (rule.limit / 50).max(2), action: Action::Refuse, ..*rule };
        Settings { rules: Rule::DEFAULTS.iter().map(rule).collect(), ..Settings::default() }
    }

    proptest! {
        #[test]
        fn classifiers_decide_the_same_whether_or_not_they_are_asked_about_what_they_do_not_look_at(
            steps in prop::collection::vec((0..20u8, 0..6u8, 0..40u32, 0..1_500u64), 200..800),
        ) {
            let defence = || Defence::new(strict(), 7, [1; 32]);
            let (one, other) = (defence(), defence());
            let every = |all: Vec<Box<dyn Classifier>>| {
                all.into_iter().map(|classifier| Box::new(Always(classifier)) as Box<dyn Classifier>).collect()
            };
            let chains = [one.chain(0, 1), other.chain_of(0, 1, every)];
            let mut now_ms = 0;
            let mut decided = 0;
            for (client, what, value, later_ms) in steps {
                now_ms += later_ms / 40;
                let peer = Peer { address: IpAddr::from([10, 0, client / 8, client]), via: Via::Direct };
                let path = format!("/{value}");
                let start = u64::from(value) * 2_000;
                let part = (what == 1).then_some(Part::Bytes { start, end: start + 500 });
                let fields = &Asked(part.or((what == 2).then_some(Part::Excessive)));
                let (path, query) = (path.as_bytes(), None);
                let request = RequestView { method: b"GET", path, reading: None, query, has_body: false, fields };
                let (source, upstream_ms) = (Source::Missed, 20 * value);
                let status = if value % 5 == 0 { 404 } else { 200 };
                let response =
                    ResponseView { path, query, authority: b"a", variant: 0, status, source, upstream_ms };
                let busy = if value > 20 { 1.0 } else { 0.1 };
                let load = Load { busy, ..Load::default() };
                let [seen, expected] = chains.each_ref().map(|chain| {
                    let id = chain.locate(peer.address, now_ms);
                    let of_request = chain.request(id, peer, &request, now_ms);
                    let of_response = (what == 3).then(|| chain.response(id, peer, &response, now_ms));
                    if what == 4 {
                        chain.tick(&load, now_ms);
                    }
                    (of_request, of_response)
                });
                prop_assert_eq!(seen, expected);
                decided += u32::from(!seen.0.is_continue());
            }
            prop_assert!(decided > 0, "nobody was refused");
            prop_assert_eq!(one.counts(), other.counts());
        }
    }
}
