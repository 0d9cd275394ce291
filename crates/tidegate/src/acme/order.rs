//! One order of a certificate, from the account to the chain (RFC 8555 §7).

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use instant_acme::{
    Account, AuthorizationStatus, AuthorizedIdentifier, ChallengeType, Error, Identifier, NewOrder, Order,
    OrderStatus, Problem, RetryPolicy,
};
use tidegate_accelerator::tls::{CertificateError, Issued, SigningRequest};

use super::{plain, with_sources};

/// How long an authority may take to look, and then to issue. The pauses between questions grow little: the library gives up
/// when the next one would not fit.
const PATIENCE: RetryPolicy = RetryPolicy::new().backoff(1.2).timeout(Duration::from_secs(120));
/// RFC 8555 §6.7.
const NO_ACCOUNT: &str = "urn:ietf:params:acme:error:accountDoesNotExist";

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
pub(super) enum OrderError {
    #[error("{}", plain(&with_sources(.0)))]
    Authority(#[from] Error),
    #[error("{0}")]
    Unusable(#[from] CertificateError),
    #[error("the account cannot be kept in {}: {source}", path.display())]
    Keep { path: PathBuf, source: std::io::Error },
    #[error("the authority does not know the account that it has opened")]
    NoAccount,
    #[error("the authority has {} looked at that was not asked for", plain(.0))]
    OtherName(String),
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
        let asked = authorization.identifier();
        if !is_name(&asked, name) {
            return Err(OrderError::OtherName(asked.to_string()));
        }
        if authorization.status == AuthorizationStatus::Valid {
            continue;
        }
        let Some(mut challenge) = authorization.challenge(kind.clone()) else {
            return Err(OrderError::NoWay { name: name.to_owned(), way });
        };
        let key_authorization = challenge.key_authorization();
        let digest = key_authorization.digest();
        proving.push(issued.prove(name, &challenge.token, key_authorization.as_str(), digest.as_ref())?);
        // Some authorities look at once, and answer with what they have found.
        challenge.set_ready().await.map_err(|error| match error {
            Error::Api(problem) if problem.r#type.as_deref() != Some(NO_ACCOUNT) => {
                not_ours(plain(&problem.to_string()))
            }
            error => error.into(),
        })?;
    }
    match order.poll_ready(&PATIENCE).await {
        Ok(OrderStatus::Ready) => {}
        Ok(_) => return Err(not_ours(refusal(&mut order).await)),
        Err(Error::Api(problem)) => return Err(not_ours(plain(&problem.to_string()))),
        Err(error) => return Err(error.into()),
    }
    drop(proving);
    let SigningRequest { key, der } = SigningRequest::new(name)?;
    order.finalize_csr(&der).await?;
    let chain = order.poll_certificate(&PATIENCE).await?;
    Ok([key, chain].concat().into_bytes())
}

/// An authority may not have us show that other names are ours.
fn is_name(asked: &AuthorizedIdentifier<'_>, name: &str) -> bool {
    !asked.wildcard && matches!(asked.identifier, Identifier::Dns(asked) if asked.eq_ignore_ascii_case(name))
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
    if said.is_empty() { "it does not say why".to_owned() } else { plain(&said.join("; ")) }
}
