//! One order of a certificate, from the account to the chain (RFC 8555 §7).

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use instant_acme::{
    Account, AuthorizationStatus, ChallengeType, Error, Identifier, NewAccount, NewOrder, Order, OrderStatus,
    Problem, RetryPolicy,
};
use tidegate_accelerator::tls::{CertificateError, Issued};

use super::AcmeSettings;
use super::folder::{Folder, StoredAccount};

/// How long an authority may take to look, and then to issue.
const PATIENCE: RetryPolicy = RetryPolicy::new().timeout(Duration::from_secs(120));
/// RFC 8555 §6.7.
const NO_ACCOUNT: &str = "urn:ietf:params:acme:error:accountDoesNotExist";

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
pub(super) enum OrderError {
    #[error("{}", reason(.0))]
    Authority(#[from] Error),
    #[error("{0}")]
    Unusable(#[from] CertificateError),
    #[error("{} has no certificate of an authority: {why}", path.display())]
    Trust { path: PathBuf, why: String },
    #[error("the account cannot be kept: {0}")]
    Account(std::io::Error),
    #[error("the authority does not look at {name} by {way}")]
    NoWay { name: String, way: &'static str },
    #[error("the authority has not found {name} to be ours by {way}: {why}")]
    NotOurs { name: String, way: &'static str, why: String },
}

impl OrderError {
    /// Whether the authority does not know the account.
    pub(super) fn is_no_account(&self) -> bool {
        matches!(self, Self::Authority(Error::Api(problem)) if problem.r#type.as_deref() == Some(NO_ACCOUNT))
    }

    /// Whether another way to show that a name is ours may lead further.
    pub(super) fn is_of_the_way(&self) -> bool {
        matches!(self, Self::NoWay { .. } | Self::NotOurs { .. })
    }
}

/// An error with those that it comes from: the libraries say of many no more than that there was one.
fn reason(error: &Error) -> String {
    let mut said = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        said = format!("{said}: {inner}");
        source = inner.source();
    }
    said
}

/// How an authority looks whether a name is ours.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Way {
    /// By a handshake of TLS at port 443 (RFC 8737).
    TlsAlpn,
    /// By a request in the clear at port 80 (RFC 8555 §8.3).
    Http,
}

impl Way {
    fn challenge(self) -> (ChallengeType, &'static str) {
        match self {
            Self::TlsAlpn => (ChallengeType::TlsAlpn01, "tls-alpn-01"),
            Self::Http => (ChallengeType::Http01, "http-01"),
        }
    }
}

/// The account that is kept, or a new one.
pub(super) async fn account(settings: &AcmeSettings, folder: &Folder) -> Result<Account, OrderError> {
    let builder = match &settings.authority {
        Some(path) => Account::builder_with_root(path)
            .map_err(|error| OrderError::Trust { path: path.clone(), why: reason(&error) })?,
        None => Account::builder()?,
    };
    let contacts: Vec<String> = settings.email.iter().map(|email| format!("mailto:{email}")).collect();
    let contacts: Vec<&str> = contacts.iter().map(String::as_str).collect();
    let email = settings.email.clone();
    if let Some(stored) = folder.account().map_err(OrderError::Account)? {
        let known = stored.email == email;
        let account = builder.from_credentials(stored.credentials).await?;
        if !known {
            account.update_contacts(&contacts).await?;
            // The library gives credentials away whole: they are read again to be kept with the other address.
            if let Some(stored) = folder.account().map_err(OrderError::Account)? {
                let stored = StoredAccount { email, ..stored };
                folder.keep_account(&stored).map_err(OrderError::Account)?;
            }
        }
        return Ok(account);
    }
    let new = NewAccount { contact: &contacts, terms_of_service_agreed: true, only_return_existing: false };
    let (account, credentials) = builder.create(&new, settings.directory.clone(), None).await?;
    folder.keep_account(&StoredAccount { email, credentials }).map_err(OrderError::Account)?;
    Ok(account)
}

/// Orders a certificate for this name. Returns its key and its chain, in PEM.
pub(super) async fn order(
    account: &Account,
    name: &str,
    way: Way,
    issued: &Arc<Issued>,
) -> Result<Vec<u8>, OrderError> {
    let identifiers = [Identifier::Dns(name.to_owned())];
    let mut order = account.new_order(&NewOrder::new(&identifiers)).await?;
    let (kind, way) = way.challenge();
    let not_ours = |why| OrderError::NotOurs { name: name.to_owned(), way, why };
    let mut proving = Vec::new();
    let mut authorizations = order.authorizations();
    while let Some(authorization) = authorizations.next().await {
        let mut authorization = authorization?;
        if authorization.status == AuthorizationStatus::Valid {
            continue;
        }
        let Some(mut challenge) = authorization.challenge(kind.clone()) else {
            return Err(OrderError::NoWay { name: name.to_owned(), way });
        };
        let key_authorization = challenge.key_authorization();
        let digest = key_authorization.digest();
        proving.push(issued.prove(name, &challenge.token, key_authorization.as_str(), digest.as_ref())?);
        challenge.set_ready().await?;
    }
    match order.poll_ready(&PATIENCE).await {
        Ok(OrderStatus::Ready) => {}
        Ok(_) => return Err(not_ours(refusal(&mut order).await)),
        Err(Error::Api(problem)) => return Err(not_ours(problem.to_string())),
        Err(error) => return Err(error.into()),
    }
    drop(proving);
    let key = order.finalize().await?;
    let chain = order.poll_certificate(&PATIENCE).await?;
    Ok([key, chain].concat().into_bytes())
}

/// What the authority says of the name that it does not take for ours.
async fn refusal(order: &mut Order) -> String {
    let mut authorizations = order.authorizations();
    let mut said = Vec::new();
    while let Some(Ok(mut authorization)) = authorizations.next().await {
        let Ok(state) = authorization.refresh().await else { continue };
        let problems = state.challenges.iter().filter_map(|challenge| challenge.error.as_ref());
        said.extend(problems.map(Problem::to_string));
    }
    if said.is_empty() { "it does not say why".to_owned() } else { said.join("; ") }
}
