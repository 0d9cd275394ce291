//! Certificates from an authority by ACME (RFC 8555): ordered where there is none, and again when a third of their life
//! is left.

mod folder;
mod order;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use instant_acme::Account;
use serde_json::{Value, json};
use tidegate_accelerator::settings::{Protocol, Settings};
use tidegate_accelerator::tls::{CertificateStatus, Issued};
use tidegate_core::metrics::{Kind, Sample};
use tokio::sync::watch;

use self::folder::Folder;
use self::order::{OrderError, Way};

/// The pause after a first failure; each further one doubles it. Authorities bound failures by the hour.
const FIRST_PAUSE: Duration = Duration::from_secs(5 * 60);
const LONGEST_PAUSE: Duration = Duration::from_secs(12 * 3600);
/// Between two certificates for one name, whatever their life.
const LEAST_LIFE: Duration = Duration::from_secs(10);
/// Sleep is cut into pieces of this length, because clocks are set and machines suspended.
const LONGEST_SLEEP: Duration = Duration::from_secs(3600);
/// A whole order.
const ORDER_TIMEOUT: Duration = Duration::from_secs(600);

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
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    settings: AcmeSettings,
    folder: Folder,
}

/// Has certificates issued, on a thread of its own.
pub(crate) struct Acme {
    issued: Arc<Issued>,
    /// The way that is tried first, and another one.
    ways: Vec<Way>,
    wanted: watch::Sender<Option<Wanted>>,
    /// By name, what comes next.
    plans: Mutex<BTreeMap<String, Plan>>,
    orders: AtomicU64,
    failures: AtomicU64,
}

/// What comes next for a name.
#[derive(Clone, Debug)]
struct Plan {
    at: SystemTime,
    failures: u32,
    /// The last failure since there was a success.
    error: Option<String>,
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
            wanted: watch::channel(None).0,
            plans: Mutex::default(),
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
        let (acme, wanted) = (Arc::clone(self), self.wanted.subscribe());
        std::thread::Builder::new()
            .name("acme".into())
            .spawn(move || runtime.block_on(acme.follow(wanted)))?;
        Ok(())
    }

    /// Puts in force what [`prepare`] has made possible. What has failed is tried again at once.
    pub(crate) fn apply(&self, wanted: Option<Wanted>) {
        let names = wanted.as_ref().map_or(&[][..], |wanted| &wanted.settings.names);
        self.issued.retain(names);
        let now = SystemTime::now();
        let plans = wanted.iter().flat_map(|wanted| {
            wanted.settings.names.iter().map(move |name| (name.clone(), self.plan(wanted, name, now)))
        });
        let plans = plans.collect();
        *self.plans() = plans;
        self.wanted.send_replace(wanted);
    }

    /// Shows clients the certificate that is kept for a name. Returns when the next one is ordered.
    fn plan(&self, wanted: &Wanted, name: &str, now: SystemTime) -> Plan {
        let due = match wanted.folder.certificate(name) {
            Ok(Some(pem)) => {
                self.issued.install(name, &pem).map(|status| renewal(&status)).map_err(|e| e.to_string())
            }
            Ok(None) => Ok(now),
            Err(error) => Err(error.to_string()),
        };
        let at = due.unwrap_or_else(|error| {
            tracing::warn!("acme: the certificate for {name} that was kept cannot be used: {error}");
            now
        });
        Plan { at, failures: 0, error: None }
    }

    async fn follow(self: Arc<Self>, mut wanted: watch::Receiver<Option<Wanted>>) {
        loop {
            let now = wanted.borrow_and_update().clone();
            let keep = async {
                match now {
                    Some(wanted) => self.keep(&wanted).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                never = keep => match never {},
                changed = wanted.changed() => if changed.is_err() { return },
            }
        }
    }

    /// Orders what is due, one after the other, for ever.
    async fn keep(&self, wanted: &Wanted) -> Infallible {
        let mut account = None;
        loop {
            let next = self
                .plans()
                .iter()
                .min_by_key(|(_, plan)| plan.at)
                .map(|(name, plan)| (name.clone(), plan.at));
            let Some((name, at)) = next else { return std::future::pending().await };
            while let Ok(left) = at.duration_since(SystemTime::now()) {
                tokio::time::sleep(left.min(LONGEST_SLEEP)).await;
            }
            let order = tokio::time::timeout(ORDER_TIMEOUT, self.order(wanted, &mut account, &name));
            let outcome = order
                .await
                .unwrap_or_else(|_| Err(format!("there was none after {} s", ORDER_TIMEOUT.as_secs())));
            self.note(&name, outcome);
        }
    }

    /// Orders a certificate, shows it to clients and keeps it.
    async fn order(
        &self,
        wanted: &Wanted,
        account: &mut Option<Account>,
        name: &str,
    ) -> Result<CertificateStatus, String> {
        let Wanted { settings, folder } = wanted;
        let mut failures = Vec::new();
        let mut is_account_new = false;
        let mut ways = self.ways.iter().copied();
        let mut next = ways.next();
        while let Some(way) = next {
            let outcome = async {
                let account = match account {
                    Some(account) => account,
                    None => account.insert(order::account(settings, folder).await?),
                };
                let pem = order::order(account, name, way, &self.issued).await?;
                Ok::<_, OrderError>((self.issued.install(name, &pem)?, pem))
            };
            match outcome.await {
                Ok((status, pem)) => {
                    if let Err(error) = folder.keep_certificate(name, &pem) {
                        // It is shown all the same; after a restart another one is ordered.
                        tracing::warn!("acme: the certificate for {name} cannot be kept: {error}");
                    }
                    return Ok(status);
                }
                Err(error) if error.is_no_account() && !is_account_new => {
                    is_account_new = true;
                    *account = None;
                    tracing::warn!("acme: the authority does not know the account; another one is opened");
                    folder.set_account_aside().map_err(|error| error.to_string())?;
                }
                Err(error) => {
                    next = if error.is_of_the_way() { ways.next() } else { None };
                    failures.push(error.to_string());
                }
            }
        }
        Err(failures.join("; "))
    }

    fn note(&self, name: &str, outcome: Result<CertificateStatus, String>) {
        let now = SystemTime::now();
        let mut plans = self.plans();
        let Some(plan) = plans.get_mut(name) else { return };
        match outcome {
            Ok(status) => {
                self.orders.fetch_add(1, Ordering::Relaxed);
                *plan = Plan { at: renewal(&status).max(now + LEAST_LIFE), failures: 0, error: None };
                let days = status.not_after_s.saturating_sub(seconds(now)) / (24 * 3600);
                tracing::info!("acme: a certificate for {name} was issued; it is valid for {days} days");
            }
            Err(error) => {
                self.failures.fetch_add(1, Ordering::Relaxed);
                let pause = FIRST_PAUSE.saturating_mul(1 << plan.failures.min(16)).min(LONGEST_PAUSE);
                tracing::warn!(
                    "acme: no certificate for {name}: {error}; tried again in {} min, or after `tidegate reload`",
                    pause.as_secs() / 60
                );
                *plan = Plan { at: now + pause, failures: plan.failures + 1, error: Some(error) };
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
        let plans = self.plans();
        let names = plans.iter().map(|(name, plan)| {
            json!({ "name": name, "next_order": seconds(plan.at), "failures": plan.failures, "last_error": plan.error })
        });
        names.collect()
    }

    fn plans(&self) -> MutexGuard<'_, BTreeMap<String, Plan>> {
        self.plans.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
}
