//! Certificates that an authority issues while the engine runs, and what shows it that their names are ours (RFC 8555).

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use rcgen::{CertificateParams, CustomExtension, DistinguishedName, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::ClientHello;
use rustls::sign::CertifiedKey;
use webpki::EndEntityCert;

use super::certificates::{self, CertificateError, CertificateStatus};

/// What an authority names in the handshake by which it looks whether a name is ours (RFC 8737 §3).
pub(crate) const ALPN_CHALLENGE: &[u8] = b"acme-tls/1";
/// The longest key with its chain that is taken, in PEM, and the most certificates in one: every handshake sends them.
const MOST_PEM_BYTES: usize = 128 * 1024;
const MOST_CERTIFICATES: usize = 10;
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
    certificates: BTreeMap<String, IssuedCertificate>,
    proofs: HashMap<String, Proof>,
}

/// A certificate with its key that an authority has issued for a name.
#[derive(Clone, Debug)]
pub struct IssuedCertificate {
    name: String,
    certified: Arc<CertifiedKey>,
    status: CertificateStatus,
}

impl IssuedCertificate {
    /// Reads a key and its chain in PEM, and makes sure that they are of one pair and for `name`, a host in lower case.
    pub fn read(name: &str, pem: &[u8]) -> Result<Self, CertificateError> {
        let unusable =
            |why: &dyn fmt::Display| CertificateError::Issued { name: name.to_owned(), why: why.to_string() };
        if pem.len() > MOST_PEM_BYTES {
            return Err(unusable(&format_args!("it is longer than {} KiB", MOST_PEM_BYTES / 1024)));
        }
        let chain: Vec<_> = CertificateDer::pem_slice_iter(pem)
            .collect::<Result<_, _>>()
            .map_err(|error| unusable(&error))?;
        if chain.len() > MOST_CERTIFICATES {
            return Err(unusable(&format_args!("it comes with more than {MOST_CERTIFICATES} certificates")));
        }
        let key = PrivateKeyDer::from_pem_slice(pem).map_err(|error| unusable(&error))?;
        let certified = certificates::certified(chain, key)?;
        certified.keys_match().map_err(|error| unusable(&error))?;
        let leaf = certified.cert.first().ok_or_else(|| unusable(&"there is none"))?;
        let leaf = EndEntityCert::try_from(leaf).map_err(|error| unusable(&error))?;
        let host = ServerName::try_from(name).map_err(|error| unusable(&error))?;
        leaf.verify_is_valid_for_subject_name(&host).map_err(|_| unusable(&"it is for other names"))?;
        let status = certificates::status(name.to_owned(), &certified);
        let status = status.ok_or_else(|| unusable(&"it is no certificate"))?;
        if status.not_before_s >= status.not_after_s {
            return Err(unusable(&"it ends before it begins"));
        }
        Ok(Self { name: name.to_owned(), certified: Arc::new(certified), status })
    }

    /// What is known of it.
    pub fn status(&self) -> &CertificateStatus {
        &self.status
    }
}

/// What an authority signs, and the key that belongs to it.
#[derive(Debug)]
pub struct SigningRequest {
    /// In PEM; nobody else has it.
    pub key: String,
    /// RFC 2986, in DER.
    pub der: Vec<u8>,
}

impl SigningRequest {
    /// For a certificate for this host alone.
    pub fn new(name: &str) -> Result<Self, CertificateError> {
        let failed = |error: rcgen::Error| CertificateError::Make(error.to_string());
        let mut params = CertificateParams::new([name.to_owned()]).map_err(failed)?;
        params.distinguished_name = DistinguishedName::new();
        let key = KeyPair::generate().map_err(failed)?;
        let request = params.serialize_request(&key).map_err(failed)?;
        Ok(Self { key: key.serialize_pem(), der: request.der().to_vec() })
    }
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
    /// Shows it from now on to clients that ask for its name.
    pub fn install(&self, certificate: IssuedCertificate) {
        self.write().certificates.insert(certificate.name.clone(), certificate);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A key and a certificate for these names, between these years.
    fn pem(names: &[&str], years: (i32, i32), above: usize) -> String {
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        let mut params = CertificateParams::new(names).unwrap();
        (params.not_before, params.not_after) =
            (rcgen::date_time_ymd(years.0, 1, 1), rcgen::date_time_ymd(years.1, 1, 1));
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap().pem();
        key.serialize_pem() + &certificate.repeat(1 + above)
    }

    #[test]
    fn certificate_that_is_not_for_its_name_alone_and_short_is_refused() {
        let refused = |pem: &str| {
            IssuedCertificate::read("a.example", pem.as_bytes()).map(|_| ()).unwrap_err().to_string()
        };
        let years = (2020, 2040);
        for (pem, why) in [
            (pem(&["b.example"], years, 0), "it is for other names"),
            (pem(&[], years, 0), "it is for other names"),
            (pem(&["a.example"], years, 10), "it comes with more than 10 certificates"),
            (pem(&["a.example"], (2040, 2020), 0), "it ends before it begins"),
            (pem(&["a.example"], years, 0) + &"#".repeat(MOST_PEM_BYTES), "it is longer than 128 KiB"),
            (String::new(), "no items found"),
        ] {
            assert!(refused(&pem).contains(why), "{why}: {}", refused(&pem));
        }
        for names in [&["a.example"][..], &["b.example", "A.example"]] {
            let read = IssuedCertificate::read("a.example", pem(names, years, 9).as_bytes()).unwrap();
            assert_eq!(read.status().certificate, "a.example");
        }
        // Of two orders, the key of one and the certificate of the other.
        let [first, second] = [(); 2].map(|()| pem(&["a.example"], years, 0));
        let end = |pem: &str| pem.find("-----BEGIN CERTIFICATE").unwrap();
        let mixed = first[..end(&first)].to_owned() + &second[end(&second)..];
        assert!(IssuedCertificate::read("a.example", mixed.as_bytes()).is_err());
    }

    #[test]
    fn signing_request_is_for_the_name_and_its_key_is_new() {
        let [first, second] = [(); 2].map(|()| SigningRequest::new("a.example").unwrap());
        assert!(first.key != second.key && first.der.windows(9).any(|part| part == b"a.example"));
        assert!(SigningRequest::new("a.ex\u{e4}mple").is_err());
    }
}
