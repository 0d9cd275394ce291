//! What an operator can set, as checked values.

use std::time::Duration;

use tidegate_core::{IpPrefix, Reason};

use crate::arbiter::overlaps;
use crate::stress::StressLimits;

/// What the chains are built from.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Memory for all that the defence keeps: tables of fixed size, and with what they leave the prefix trees of all
    /// data cores. Each tree has at least 1 MiB.
    pub memory_bytes: usize,
    /// Who is counted but never acted on.
    pub exempt: Vec<Exemption>,
    /// Proxies that are believed: what one is blamed for, its clients have done.
    pub trusted_proxies: Vec<IpPrefix>,
    /// Whether every rule is only tried out: what it would have done is recorded, and nothing is done.
    pub dry_run: bool,
    /// How long a block lasts.
    pub block_for: Duration,
    /// A rule for each classifier that is on.
    pub rules: Vec<Rule>,
    /// What is refused by what it looks like, in this order.
    pub filters: Vec<Filter>,
    /// Whether the servers behind take paths in any case for the same, so that filters have to.
    pub folds_case: bool,
    /// Leading zero bits that a browser has to find for a challenge; 0: to come back with a cookie is enough.
    pub challenge_bits: u8,
    /// How long a solved challenge is good for.
    pub pass_for: Duration,
    /// Whether classifiers outside of this process are told what clients do.
    pub external: bool,
    /// What counts as stress.
    pub stress: StressLimits,
}

/// One classifier's limit, and what happens beyond it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Rule {
    /// Which classifier.
    pub reason: Reason,
    /// How many events of one client a sliding window of 10 s may hold; for `connections`, how many at once; for
    /// `swarm`, how many requests of one prefix make it worth a look; for `stress`, how many events of a newcomer while
    /// the server is under stress.
    pub limit: u32,
    /// What is done beyond that.
    pub action: Action,
    /// Whether the rule is only tried out.
    pub dry_run: bool,
}

/// What is done about somebody.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Action {
    /// Hold the request back for a moment.
    Delay,
    /// 429 with Retry-After.
    Refuse,
    /// A task that a browser solves.
    Challenge,
    /// Hold the connection without an answer, then end it.
    Tarpit,
    /// Reset the connection.
    Reset,
    /// End the connection without an answer.
    Drop,
    /// Refuse everything for as long as blocks last.
    Block,
}

/// Who is never acted on.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Exemption {
    /// From where.
    pub source: IpPrefix,
    /// Only with this in `User-Agent`; empty: always.
    pub user_agent: String,
}

/// Requests that are refused by what they look like: all that is said must hold.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Filter {
    /// From where; `None`: from anywhere.
    pub source: Option<IpPrefix>,
    /// What `User-Agent` has in it, without regard to case; empty: whatever.
    pub user_agent: String,
    /// How the path in its normal form begins; empty: whatever.
    pub path: String,
    /// What `Content-Type` begins with, without regard to case; empty: whatever.
    pub content_type: String,
    /// Methods, of which it has one; empty: whatever.
    pub methods: Vec<String>,
    /// What is done.
    pub action: Action,
    /// Whether the filter is only tried out.
    pub dry_run: bool,
}

impl Settings {
    /// The length of the sliding window in which events are counted.
    pub const WINDOW: Duration = Duration::from_secs(10);

    /// Whether packets and connections of this prefix may be refused: not where a trusted proxy is in it, whose
    /// connections are its clients', nor anybody exempt, if only by what the head of a request says.
    pub fn may_block_below_http(&self, prefix: IpPrefix) -> bool {
        let exempt = self.exempt.iter().map(|exemption| &exemption.source);
        !self.trusted_proxies.iter().chain(exempt).any(|spared| overlaps(*spared, prefix))
    }
}

impl Rule {
    /// The default of each classifier: generous to anybody behind one address together, far below what hurts.
    pub const DEFAULTS: &'static [Self] = &[
        Self::new(Reason::RequestRate, 1_000, Action::Block),
        Self::new(Reason::ConnectionRate, 500, Action::Block),
        Self::new(Reason::Connections, 256, Action::Drop),
        Self::new(Reason::Errors, 200, Action::Block),
        Self::new(Reason::UpstreamTime, 40_000, Action::Refuse),
        Self::new(Reason::CacheBusting, 200, Action::Block),
        Self::new(Reason::Ranges, 300, Action::Block),
        Self::new(Reason::Slow, 10, Action::Block),
        Self::new(Reason::Swarm, 300, Action::Block),
        Self::new(Reason::Stress, 100, Action::Refuse),
    ];

    const fn new(reason: Reason, limit: u32, action: Action) -> Self {
        Self { reason, limit, action, dry_run: false }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            memory_bytes: 256 << 20,
            exempt: Vec::new(),
            trusted_proxies: Vec::new(),
            dry_run: false,
            block_for: Duration::from_secs(600),
            rules: Rule::DEFAULTS.to_vec(),
            filters: Vec::new(),
            folds_case: false,
            challenge_bits: 16,
            pass_for: Duration::from_secs(3600),
            external: false,
            stress: StressLimits::default(),
        }
    }
}
