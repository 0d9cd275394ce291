//! The account with an authority (RFC 8555 §7.1.2): kept, opened where there is none, and opened anew where it is of no
//! use.

use std::time::{Duration, Instant};

use instant_acme::{Account, NewAccount};
use tidegate_accelerator::settings::UpstreamTls;
use tidegate_accelerator::tls::Trust;
use tokio::sync::Mutex;

use super::Wanted;
use super::folder::StoredAccount;
use super::order::OrderError;
use super::wire::{AskedToWait, Wire};

/// An authority that does not know an account that is younger would not know the next one either.
const LEAST_AGE: Duration = Duration::from_secs(3600);

/// The account of all orders with one authority.
#[derive(Default)]
pub(super) struct SharedAccount {
    current: Mutex<Current>,
    asked_to_wait: AskedToWait,
}

#[derive(Default)]
struct Current {
    account: Option<Account>,
    opened: Option<Instant>,
}

impl SharedAccount {
    /// The account that is kept, or a new one.
    pub(super) async fn get(&self, wanted: &Wanted) -> Result<Account, OrderError> {
        let mut current = self.current.lock().await;
        if let Some(account) = &current.account {
            return Ok(account.clone());
        }
        let account = match self.kept(wanted).await? {
            Some(account) => account,
            None => {
                let account = self.open(wanted).await?;
                current.opened = Some(Instant::now());
                account
            }
        };
        Ok(current.account.insert(account).clone())
    }

    /// The authority's directory, and what it is known by, are read again for the next order.
    pub(super) async fn read_again(&self) {
        self.current.lock().await.account = None;
    }

    /// The authority does not know this account. Whether another one may help.
    pub(super) async fn forget(&self, wanted: &Wanted, unknown: &Account) -> Result<bool, OrderError> {
        let mut current = self.current.lock().await;
        if current.account.as_ref().is_some_and(|account| account.id() != unknown.id()) {
            return Ok(true);
        }
        if current.opened.is_some_and(|opened| opened.elapsed() < LEAST_AGE) {
            return Ok(false);
        }
        tracing::warn!("acme: the authority does not know the account; another one is opened");
        current.account = None;
        set_aside(wanted)?;
        Ok(true)
    }

    /// How long the authority has asked to be left alone, since this was asked last.
    pub(super) fn asked_to_wait(&self) -> Option<Duration> {
        self.asked_to_wait.take()
    }

    fn wire(&self, wanted: &Wanted) -> Result<Box<Wire>, OrderError> {
        let tls = UpstreamTls { authority: wanted.settings.authority.clone(), ..UpstreamTls::default() };
        Ok(Box::new(Wire::new(Trust::new(&tls, false)?, self.asked_to_wait.clone())))
    }

    async fn kept(&self, wanted: &Wanted) -> Result<Option<Account>, OrderError> {
        let (settings, folder) = (&wanted.settings, &wanted.folder);
        let stored = match folder.account() {
            Ok(Some(stored)) if stored.directory == settings.directory => stored,
            Ok(None) => return Ok(None),
            Ok(Some(_)) => return unusable(wanted, "it is another directory's"),
            Err(error) => return unusable(wanted, &error.to_string()),
        };
        let known = stored.email == settings.email;
        let account =
            Account::builder_with_http(self.wire(wanted)?).from_credentials(stored.credentials).await;
        let account = match account {
            Err(error @ (instant_acme::Error::KeyRejected | instant_acme::Error::Crypto)) => {
                return unusable(wanted, &error.to_string());
            }
            account => account?,
        };
        if !known {
            let contacts = contacts(wanted);
            account.update_contacts(&contacts.iter().map(String::as_str).collect::<Vec<_>>()).await?;
            // The library gives credentials away whole: they are read again to be kept with the other address.
            let stored = folder.account().ok().flatten();
            let stored = stored.map(|stored| StoredAccount { email: settings.email.clone(), ..stored });
            stored.map_or(Ok(()), |stored| keep(wanted, &stored))?;
        }
        Ok(Some(account))
    }

    async fn open(&self, wanted: &Wanted) -> Result<Account, OrderError> {
        let settings = &wanted.settings;
        let contacts = contacts(wanted);
        let contact: Vec<&str> = contacts.iter().map(String::as_str).collect();
        let new =
            NewAccount { contact: &contact, terms_of_service_agreed: true, only_return_existing: false };
        let builder = Account::builder_with_http(self.wire(wanted)?);
        let (account, credentials) = builder.create(&new, settings.directory.clone(), None).await?;
        let (email, directory) = (settings.email.clone(), settings.directory.clone());
        keep(wanted, &StoredAccount { email, directory, credentials })?;
        Ok(account)
    }
}

fn contacts(wanted: &Wanted) -> Vec<String> {
    wanted.settings.email.iter().map(|email| format!("mailto:{email}")).collect()
}

fn keep(wanted: &Wanted, account: &StoredAccount) -> Result<(), OrderError> {
    let path = wanted.folder.account_path();
    wanted.folder.keep_account(account).map_err(|source| OrderError::Keep { path, source })
}

fn unusable(wanted: &Wanted, why: &str) -> Result<Option<Account>, OrderError> {
    let path = wanted.folder.account_path();
    tracing::warn!("acme: the account in {} cannot be used ({why}); another one is opened", path.display());
    set_aside(wanted)?;
    Ok(None)
}

fn set_aside(wanted: &Wanted) -> Result<(), OrderError> {
    let path = wanted.folder.account_path();
    wanted.folder.set_account_aside().map_err(|source| OrderError::Keep { path, source })
}
