//! Certificates from an authority by ACME (RFC 8555): ordered where there is none, and again when a third of their life
//! is left.

mod account;
mod folder;
mod order;
mod wire;

use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use tidegate_accelerator::settings::{Protocol, Settings};
use tidegate_accelerator::tls::{CertificateStatus, Issued, IssuedCertificate};
use tidegate_core::metrics::{Kind, Sample};
use tokio::sync::Notify;
use tokio::task::{AbortHandle, Id, JoinError, JoinSet};

use self::account::SharedAccount;
use self::folder::Folder;
use self::order::{OrderError, Way};

/// The pause after a first failure; each further one doubles it. Authorities bound failures by the hour.
const FIRST_PAUSE: Duration = Duration::from_secs(5 * 60);
const LONGEST_PAUSE: Duration = Duration::from_secs(12 * 3600);
/// Between two certificates for one name: this part of a life at least, whatever the clock says.
const LEAST_PART_OF_LIFE: u32 = 10;
/// Sleep is cut into pieces of this length, because clocks are set and machines suspended.
const LONGEST_SLEEP: Duration = Duration::from_secs(3600);
/// A whole order.
const ORDER_TIMEOUT: Duration = Duration::from_secs(600);
/// Orders at the same time: one that an authority takes long for does not keep the other names waiting.
const ORDERS_AT_ONCE: usize = 4;
/// The longest reason that is logged and shown.
const MOST_REASON_BYTES: usize = 600;

/// What to do where certificates cannot be kept.
pub(crate) const PATH_HINT: &str = "acme.path has to be a directory that this user may make and write to";

/// What is asked of which authority.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct AcmeSettings {
    /// Each gets a certificate of its own. In lower case.
    pub names: Vec<String>,
    /// Where the authority writes to.
    pub email: Option<String>,
    /// The URL of the authority's directory.
    pub directory: String,
    /// Where account and certificates are kept.
    pub path: PathBuf,
    /// The certificate that the directory's own is signed with, if it is not one of the system's.
    pub authority: Option<PathBuf>,
}

/// What is wanted, and where it is kept.
#[derive(Debug)]
pub(crate) struct Wanted {
    settings: AcmeSettings,
    folder: Folder,
}

impl Wanted {
    /// Whether orders and certificates of one are as good for the other, if there are both.
    fn is_of_same_authority(one: Option<&Self>, other: Option<&Self>) -> bool {
        let (Some(one), Some(other)) = (one, other) else { return false };
        let AcmeSettings { names: _, email, directory, path, authority } = &one.settings;
        let others = &other.settings;
        (email, directory, path, authority)
            == (&others.email, &others.directory, &others.path, &others.authority)
    }
}

/// Has certificates issued, on a thread of its own.
pub(crate) struct Acme {
    issued: Arc<Issued>,
    /// The way that is tried first, and another one.
    ways: Vec<Way>,
    state: Mutex<State>,
    /// Something else is wanted.
    changed: Notify,
    orders: AtomicU64,
    failures: AtomicU64,
}

#[derive(Default)]
struct State {
    wanted: Option<Arc<Wanted>>,
    /// Another process is to order.
    is_paused: bool,
    names: BTreeMap<String, Name>,
}

impl State {
    /// Whether what was ordered for `name` is wanted still.
    fn wants(&self, name: &str, from: &Wanted) -> bool {
        self.names.contains_key(name) && Wanted::is_of_same_authority(self.wanted.as_deref(), Some(from))
    }
}

/// What is known of a name's certificate, and of the next.
#[derive(Debug, Default)]
struct Name {
    /// The one that clients are shown.
    current: Option<CertificateStatus>,
    /// Nothing is ordered before, whatever the clock says.
    pause_until: Option<Instant>,
    is_under_way: bool,
    failures: u32,
    /// The last failure since there was a success.
    error: Option<String>,
    /// A certificate that could not be written to its file.
    unkept: Option<Vec<u8>>,
}

impl Name {
    /// How long until the next certificate is ordered.
    fn due_in(&self, clock: SystemTime, now: Instant) -> Duration {
        let pause = self.pause_until.map_or(Duration::ZERO, |until| until.saturating_duration_since(now));
        let life = self.current.as_ref().and_then(|current| renewal(current).duration_since(clock).ok());
        pause.max(life.unwrap_or_default())
    }

    fn failed(&mut self, error: String, asked_to_wait: Option<Duration>) -> Duration {
        let pause = FIRST_PAUSE.saturating_mul(1 << self.failures.min(16)).min(LONGEST_PAUSE);
        let pause = pause.max(asked_to_wait.unwrap_or_default());
        self.pause_until = Some(Instant::now() + pause);
        self.failures += 1;
        self.error = Some(error);
        pause
    }
}

/// Orders that are under way.
#[derive(Default)]
struct Orders {
    tasks: JoinSet<Result<Vec<u8>, String>>,
    known: HashMap<Id, (String, Arc<Wanted>, AbortHandle)>,
    account: Arc<SharedAccount>,
    /// Whose account that is.
    authority: Option<Arc<Wanted>>,
}

impl Acme {
    /// Makes the folder, and shows clients the certificates that are in it already.
    pub(crate) fn new(wanted: Option<&AcmeSettings>, settings: &Settings) -> io::Result<Arc<Self>> {
        let has = |protocol| settings.listeners.iter().any(|listener| listener.protocol == protocol);
        let ways = [(Way::TlsAlpn, Protocol::Https), (Way::Http, Protocol::Http)];
        let ways = ways.into_iter().filter(|(_, protocol)| has(*protocol)).map(|(way, _)| way).collect();
        let acme = Arc::new(Self {
            issued: Arc::default(),
            ways,
            state: Mutex::default(),
            changed: Notify::new(),
            orders: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        });
        acme.apply(wanted.map(prepare).transpose()?);
        Ok(acme)
    }

    /// The certificates, for the accelerator.
    pub(crate) fn issued(&self) -> &Arc<Issued> {
        &self.issued
    }

    /// Begins to order, if there is a listener to show certificates.
    pub(crate) fn start(self: &Arc<Self>) -> io::Result<()> {
        if !self.ways.contains(&Way::TlsAlpn) {
            return Ok(());
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let acme = Arc::clone(self);
        std::thread::Builder::new().name("acme".into()).spawn(move || runtime.block_on(acme.follow()))?;
        Ok(())
    }

    /// Puts in force what [`prepare`] has made possible. Orders that are under way and wanted still go on; what has failed
    /// is tried again at once.
    pub(crate) fn apply(&self, wanted: Option<Wanted>) {
        let wanted = wanted.map(Arc::new);
        let mut state = self.state();
        let is_same = Wanted::is_of_same_authority(wanted.as_deref(), state.wanted.as_deref());
        let mut known = std::mem::take(&mut state.names);
        self.issued.retain(wanted.as_ref().map_or(&[][..], |wanted| &wanted.settings.names));
        if let Some(wanted) = &wanted {
            for name in &wanted.settings.names {
                let entry = match known.remove(name).filter(|_| is_same) {
                    Some(entry) if entry.failures > 0 => Name { pause_until: None, ..entry },
                    Some(entry) => entry,
                    None => self.begin(wanted, name),
                };
                state.names.insert(name.clone(), entry);
            }
        }
        state.wanted = wanted;
        drop(state);
        self.changed.notify_one();
    }

    /// Orders nothing, and gives up what is under way, until told otherwise: two processes would order the same, and an
    /// authority asks either of them for the proof.
    pub(crate) fn pause(&self, is_paused: bool) {
        self.state().is_paused = is_paused;
        self.changed.notify_one();
    }

    /// Shows clients the certificate that is kept for a name, if there is one.
    fn begin(&self, wanted: &Wanted, name: &str) -> Name {
        let kept = wanted.folder.certificate(name).map_err(|error| error.to_string());
        let read = |pem: Vec<u8>| IssuedCertificate::read(name, &pem).map_err(|error| error.to_string());
        let current = match kept.and_then(|pem| pem.map(read).transpose()) {
            Ok(certificate) => certificate.map(|certificate| self.show(certificate)),
            Err(error) => {
                tracing::warn!("acme: the certificate for {name} that was kept cannot be used: {error}");
                None
            }
        };
        Name { current, ..Name::default() }
    }

    fn show(&self, certificate: IssuedCertificate) -> CertificateStatus {
        let status = certificate.status().clone();
        self.issued.install(certificate);
        status
    }

    /// Orders what is due, for ever.
    async fn follow(self: Arc<Self>) {
        let mut orders = Orders::default();
        loop {
            self.give_up_unwanted(&mut orders);
            let wake = self.order_what_is_due(&mut orders);
            self.keep_unkept();
            tokio::select! {
                () = self.changed.notified() => {}
                Some(ended) = orders.tasks.join_next_with_id() => self.ended(&mut orders, ended).await,
                () = tokio::time::sleep(wake) => {}
            }
        }
    }

    /// Ends the orders that nobody wants any more.
    fn give_up_unwanted(&self, orders: &mut Orders) {
        let mut state = self.state();
        orders.known.retain(|_, (name, from, task)| {
            let is_wanted = !state.is_paused && state.wants(name, from);
            if !is_wanted {
                task.abort();
                if let Some(entry) = state.names.get_mut(name) {
                    entry.is_under_way = false;
                }
            }
            is_wanted
        });
        if !Wanted::is_of_same_authority(state.wanted.as_deref(), orders.authority.as_deref()) {
            orders.account = Arc::default();
            orders.authority.clone_from(&state.wanted);
        }
    }

    /// Begins as many orders as may be under way. Returns when to look again.
    fn order_what_is_due(self: &Arc<Self>, orders: &mut Orders) -> Duration {
        let mut state = self.state();
        let Some(wanted) = state.wanted.clone().filter(|_| !state.is_paused) else { return LONGEST_SLEEP };
        let (clock, now) = (SystemTime::now(), Instant::now());
        let mut wake = LONGEST_SLEEP;
        for (name, entry) in state.names.iter_mut().filter(|(_, entry)| !entry.is_under_way) {
            let left = entry.due_in(clock, now);
            if !left.is_zero() {
                wake = wake.min(left);
                continue;
            }
            if orders.known.len() >= ORDERS_AT_ONCE {
                // The end of one of them comes first.
                continue;
            }
            entry.is_under_way = true;
            let order =
                obtain(Arc::clone(self), Arc::clone(&wanted), Arc::clone(&orders.account), name.clone());
            let task = orders.tasks.spawn(order);
            orders.known.insert(task.id(), (name.clone(), Arc::clone(&wanted), task));
        }
        wake
    }

    /// An order has ended: by itself, because it was given up, or by a fault of ours.
    async fn ended(&self, orders: &mut Orders, ended: Result<(Id, Result<Vec<u8>, String>), JoinError>) {
        let id = ended.as_ref().map_or_else(JoinError::id, |(id, _)| *id);
        let outcome = ended.map_or_else(
            |error| Err(plain(&format!("the order broke off: {error}"))),
            |(_, outcome)| outcome,
        );
        let Some((name, from, _)) = orders.known.remove(&id) else { return };
        if outcome.is_err() {
            // What the authority says of itself may have changed.
            orders.account.read_again().await;
        }
        self.note(&name, &from, outcome, orders.account.asked_to_wait());
    }

    fn note(
        &self,
        name: &str,
        from: &Wanted,
        outcome: Result<Vec<u8>, String>,
        asked_to_wait: Option<Duration>,
    ) {
        let mut state = self.state();
        if !state.wants(name, from) {
            return;
        }
        let Some(entry) = state.names.get_mut(name) else { return };
        entry.is_under_way = false;
        if let Err(error) = outcome.and_then(|pem| self.take(name, from, entry, pem)) {
            self.failures.fetch_add(1, Ordering::Relaxed);
            let pause = entry.failed(error.clone(), asked_to_wait);
            tracing::warn!(
                "acme: no certificate for {name}: {error}; tried again in {} min, or after `tidegate reload`",
                pause.as_secs() / 60
            );
        }
    }

    /// Shows clients what was issued, and keeps it; one that is not as good as it should be only where there is none.
    fn take(&self, name: &str, from: &Wanted, entry: &mut Name, pem: Vec<u8>) -> Result<(), String> {
        let certificate = IssuedCertificate::read(name, &pem).map_err(|error| plain(&error.to_string()))?;
        let status = certificate.status().clone();
        let clock = seconds(SystemTime::now());
        let is_fresh = (status.not_before_s..=seconds(renewal(&status))).contains(&clock);
        if is_fresh || entry.current.is_none() {
            entry.current = Some(self.show(certificate));
            entry.unkept = from.folder.keep_certificate(name, &pem).err().map(|error| {
                let said = format!("the certificate that was issued cannot be kept: {error}");
                tracing::warn!("acme: {name}: {said}");
                entry.error = Some(said);
                pem
            });
        }
        if !is_fresh {
            let days = |at: i64| (at - clock) / (24 * 3600);
            let (begins, ends) = (days(status.not_before_s), days(status.not_after_s));
            return Err(format!(
                "what was issued is valid from {begins} to {ends} days from now by the clock of this host: is that right?"
            ));
        }
        self.orders.fetch_add(1, Ordering::Relaxed);
        let life = Duration::from_secs(u64::try_from(status.not_after_s - status.not_before_s).unwrap_or(0));
        entry.pause_until = Some(Instant::now() + life / LEAST_PART_OF_LIFE);
        entry.failures = 0;
        if entry.unkept.is_none() {
            entry.error = None;
        }
        let days = (status.not_after_s - clock) / (24 * 3600);
        tracing::info!("acme: a certificate for {name} was issued; it is valid for {days} days");
        Ok(())
    }

    /// Writes what there was no room for.
    fn keep_unkept(&self) {
        let mut state = self.state();
        let Some(wanted) = state.wanted.clone() else { return };
        for (name, entry) in &mut state.names {
            let Some(pem) = &entry.unkept else { continue };
            if wanted.folder.keep_certificate(name, pem).is_ok() {
                tracing::info!("acme: the certificate for {name} is kept now");
                entry.unkept = None;
                entry.error = entry.error.take().filter(|_| entry.failures > 0);
            }
        }
    }

    /// What `/metrics` says.
    pub(crate) fn samples(&self) -> Vec<Sample> {
        let counter = |name, help, value: &AtomicU64| Sample {
            name,
            help,
            kind: Kind::Counter,
            value: value.load(Ordering::Relaxed),
        };
        vec![
            counter("acme_orders_total", "Certificates that an authority has issued.", &self.orders),
            counter("acme_failures_total", "Orders of certificates that have failed.", &self.failures),
        ]
    }

    /// What `/status` says: for each name when the next certificate is ordered, and why the last order failed.
    pub(crate) fn status(&self) -> Value {
        let (clock, now) = (SystemTime::now(), Instant::now());
        let state = self.state();
        let names = state.names.iter().map(|(name, entry)| {
            json!({
                "name": name, "next_order": seconds(clock + entry.due_in(clock, now)), "under_way": entry.is_under_way,
                "failures": entry.failures, "last_error": entry.error,
            })
        });
        names.collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Orders a certificate for a name, by one way or the other. Returns its key and its chain, in PEM.
async fn obtain(
    acme: Arc<Acme>,
    wanted: Arc<Wanted>,
    account: Arc<SharedAccount>,
    name: String,
) -> Result<Vec<u8>, String> {
    let obtained = tokio::time::timeout(ORDER_TIMEOUT, obtain_in_time(&acme, &wanted, &account, &name)).await;
    obtained.unwrap_or_else(|_| Err(format!("there was none after {} s", ORDER_TIMEOUT.as_secs())))
}

async fn obtain_in_time(
    acme: &Acme,
    wanted: &Wanted,
    shared: &SharedAccount,
    name: &str,
) -> Result<Vec<u8>, String> {
    let said = |error: OrderError| error.to_string();
    let mut failures = Vec::new();
    let mut ways = acme.ways.iter().copied();
    let mut next = ways.next();
    while let Some(way) = next {
        let account = shared.get(wanted).await.map_err(said)?;
        match order::order(&account, name, way, &acme.issued).await {
            Ok(pem) => return Ok(pem),
            Err(error) if error.is_no_account() => {
                if !shared.forget(wanted, &account).await.map_err(said)? {
                    return Err(said(OrderError::NoAccount));
                }
            }
            Err(error) => {
                next = if error.is_of_the_way() { ways.next() } else { None };
                failures.push(said(error));
            }
        }
    }
    Err(failures.join("; "))
}

/// Makes sure that what is wanted can be kept.
pub(crate) fn prepare(settings: &AcmeSettings) -> io::Result<Wanted> {
    let folder = Folder::open(&settings.path, &settings.directory)?;
    Ok(Wanted { settings: settings.clone(), folder })
}

/// When the next certificate is ordered: with a third of this one's life left, whatever its length.
fn renewal(status: &CertificateStatus) -> SystemTime {
    let life = status.not_after_s.saturating_sub(status.not_before_s).max(0);
    let at = status.not_after_s.saturating_sub(life / 3);
    UNIX_EPOCH + Duration::from_secs(u64::try_from(at).unwrap_or(0))
}

fn seconds(time: SystemTime) -> i64 {
    time.duration_since(UNIX_EPOCH).ok().and_then(|since| i64::try_from(since.as_secs()).ok()).unwrap_or(0)
}

/// An error with those that it comes from, each said once: the libraries say of many no more than that there was one.
fn with_sources(error: &dyn Error) -> String {
    let mut said = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        let inner_said = inner.to_string();
        if !said.ends_with(&inner_said) {
            said = format!("{said}: {inner_said}");
        }
        source = inner.source();
    }
    said
}

/// What somebody else has said, fit for a log and a terminal: one line, and not a long one.
fn plain(text: &str) -> String {
    let mut out = String::new();
    for character in text.chars() {
        if out.len() > MOST_REASON_BYTES {
            return out + "...";
        }
        match character.is_control() {
            true => out.extend(character.escape_default()),
            false => out.push(character),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_third_of_the_life_is_left_when_the_next_certificate_is_ordered() {
        let status = |not_before_s, not_after_s| CertificateStatus {
            certificate: "example.org".into(),
            not_before_s,
            not_after_s,
        };
        let day = 24 * 3600;
        assert_eq!(seconds(renewal(&status(1000 * day, 1090 * day))), 1060 * day);
        assert_eq!(seconds(renewal(&status(1000 * day, 1006 * day))), 1004 * day);
        // Of one that has ended, and one that never began: at once.
        assert!(renewal(&status(0, 1)) < SystemTime::now());
        assert!(renewal(&status(day, 0)) < SystemTime::now());
        assert_eq!(renewal(&status(0, -1)), UNIX_EPOCH);
    }

    #[test]
    fn pauses_do_not_follow_a_clock_that_is_set() {
        let now = Instant::now();
        let day = Duration::from_secs(24 * 3600);
        let clock = SystemTime::now();
        let mut name = Name::default();
        assert!(name.due_in(clock, now).is_zero());
        assert_eq!(name.failed("no".into(), None), FIRST_PAUSE);
        for clock in [clock, clock + 3650 * day, UNIX_EPOCH] {
            let left = name.due_in(clock, now);
            assert!(left <= FIRST_PAUSE + Duration::from_secs(60) && left >= FIRST_PAUSE / 2, "{left:?}");
        }
        assert_eq!(name.failed("no".into(), None), 2 * FIRST_PAUSE);
        assert_eq!(name.failed("no".into(), Some(2 * day)), 2 * day, "as the authority has asked");
        name.failures = 1000;
        assert_eq!(name.failed("no".into(), None), LONGEST_PAUSE);
        // A certificate's end is the clock's.
        let not_before_s = seconds(clock);
        let certificate = "a.example".into();
        name = Name {
            current: Some(CertificateStatus {
                certificate,
                not_before_s,
                not_after_s: not_before_s + 90 * 86_400,
            }),
            ..Name::default()
        };
        assert_eq!(name.due_in(clock, now).as_secs() / 86_400, 59);
        assert!(name.due_in(clock + 61 * day, now).is_zero());
    }

    #[test]
    fn what_others_say_is_one_line_and_short() {
        assert_eq!(plain("a\nb\u{1b}[31m"), "a\\nb\\u{1b}[31m");
        let long = plain(&"\u{e4}".repeat(1 << 20));
        assert!(long.len() < MOST_REASON_BYTES + 10 && long.ends_with("..."));
    }
}
