//! Certificates that an authority issues while the engine runs, and what shows it that their names are ours (RFC 8555).

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use rcgen::{CertificateParams, CustomExtension, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::ClientHello;
use rustls::sign::CertifiedKey;

use super::certificates::{self, CertificateError, CertificateStatus};

/// What an authority names in the handshake by which it looks whether a name is ours (RFC 8737 §3).
pub(crate) const ALPN_CHALLENGE: &[u8] = b"acme-tls/1";
/// A SHA-256.
const DIGEST_BYTES: usize = 32;

/// Certificates that come and go while the engine runs, each for one name.
///
/// A name that a certificate of the settings is for is not looked for here. All methods take effect with the next
/// handshake or request, on every data core.
#[derive(Default)]
pub struct Issued {
    state: RwLock<State>,
}

#[derive(Default)]
struct State {
    certificates: BTreeMap<String, Issue>,
    proofs: HashMap<String, Proof>,
}

struct Issue {
    certified: Arc<CertifiedKey>,
    status: CertificateStatus,
}

struct Proof {
    token: String,
    key_authorization: String,
    certified: Arc<CertifiedKey>,
}

impl fmt::Debug for Issued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.read().certificates.keys()).finish()
    }
}

impl Issued {
    /// Shows clients that ask for `name`, in lower case, a certificate from now on. `pem` holds its key and its chain.
    pub fn install(&self, name: &str, pem: &[u8]) -> Result<CertificateStatus, CertificateError> {
        let unusable =
            |why: &dyn fmt::Display| CertificateError::Issued { name: name.to_owned(), why: why.to_string() };
        let chain: Vec<_> = CertificateDer::pem_slice_iter(pem)
            .collect::<Result<_, _>>()
            .map_err(|error| unusable(&error))?;
        let key = PrivateKeyDer::from_pem_slice(pem).map_err(|error| unusable(&error))?;
        let certified = certificates::certified(chain, key)?;
        certified.keys_match().map_err(|error| unusable(&error))?;
        let status = certificates::status(name.to_owned(), &certified);
        let status = status.ok_or_else(|| unusable(&"it is no certificate"))?;
        let issue = Issue { certified: Arc::new(certified), status: status.clone() };
        self.write().certificates.insert(name.to_owned(), issue);
        Ok(status)
    }

    /// Keeps the certificates of these names only.
    pub fn retain(&self, names: &[String]) {
        self.write().certificates.retain(|name, _| names.contains(name));
    }

    /// What is known of the certificates.
    pub fn status(&self) -> Vec<CertificateStatus> {
        self.read().certificates.values().map(|issue| issue.status.clone()).collect()
    }

    /// Shows an authority that `name` is ours, by either way in which it may look, until what is returned is dropped: a
    /// request for the token (RFC 8555 §8.3), or a handshake for whose certificate it wants the digest, a SHA-256 of
    /// the key authorization (RFC 8737 §3).
    pub fn prove(
        self: &Arc<Self>,
        name: &str,
        token: &str,
        key_authorization: &str,
        digest: &[u8],
    ) -> Result<Proving, CertificateError> {
        if digest.len() != DIGEST_BYTES {
            return Err(CertificateError::Make("the digest of a key authorization has 32 bytes".into()));
        }
        let certified = Arc::new(challenge_certificate(name, digest)?);
        let (token, key_authorization) = (token.to_owned(), key_authorization.to_owned());
        self.write().proofs.insert(name.to_owned(), Proof { token, key_authorization, certified });
        Ok(Proving { issued: Arc::clone(self), name: name.to_owned() })
    }

    /// The certificate for a client that asks for this name, in lower case, or for none.
    pub(super) fn certificate(&self, name: Option<&str>) -> Option<Arc<CertifiedKey>> {
        let state = self.read();
        let issue = match name {
            Some(name) => state.certificates.get(name),
            None => state.certificates.values().next(),
        };
        issue.map(|issue| Arc::clone(&issue.certified))
    }

    /// What an authority is shown that looks by a handshake.
    pub(super) fn proof(&self, name: &str) -> Option<Arc<CertifiedKey>> {
        self.read().proofs.get(name).map(|proof| Arc::clone(&proof.certified))
    }

    /// What an authority is answered that asks for this token.
    pub(crate) fn key_authorization(&self, token: &[u8]) -> Option<String> {
        let state = self.read();
        let mut proofs = state.proofs.values();
        proofs.find(|proof| proof.token.as_bytes() == token).map(|proof| proof.key_authorization.clone())
    }

    fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A name is shown to be ours as long as this is kept.
#[must_use]
pub struct Proving {
    issued: Arc<Issued>,
    name: String,
}

impl fmt::Debug for Proving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Proving").field(&self.name).finish()
    }
}

impl Drop for Proving {
    fn drop(&mut self) {
        self.issued.write().proofs.remove(&self.name);
    }
}

/// Whether it is an authority that looks by a handshake: it speaks nothing else (RFC 8737 §3).
pub(super) fn is_challenge(client: &ClientHello<'_>) -> bool {
    client
        .alpn()
        .is_some_and(|mut protocols| protocols.next() == Some(ALPN_CHALLENGE) && protocols.next().is_none())
}

/// RFC 8737 §3: it names the host and has the digest, and nobody has signed it.
fn challenge_certificate(name: &str, digest: &[u8]) -> Result<CertifiedKey, CertificateError> {
    let failed = |error: rcgen::Error| CertificateError::Make(error.to_string());
    let mut params = CertificateParams::new([name.to_owned()]).map_err(failed)?;
    params.custom_extensions = vec![CustomExtension::new_acme_identifier(digest)];
    let key = KeyPair::generate().map_err(failed)?;
    let certificate = params.self_signed(&key).map_err(failed)?;
    let key =
        PrivateKeyDer::try_from(key.serialize_der()).map_err(|why| CertificateError::Make(why.into()))?;
    certificates::certified(vec![certificate.der().clone()], key)
}
