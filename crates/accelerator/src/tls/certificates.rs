//! Certificates with their keys, and which of them a client is shown.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::pem::{Error as PemError, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{InconsistentKeys, ServerConfig};
use webpki::EndEntityCert;
use x509_parser::certificate::Validity;
use x509_parser::parse_x509_certificate;

use crate::settings::Certificate;
use crate::tls::issued::{self, ALPN_CHALLENGE, Issued};
use crate::tls::{ALPN_HTTP1, ALPN_HTTP2};

/// Why a certificate cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CertificateError {
    /// A file cannot be read, or has none of what it should have.
    #[error("cannot read {what} from {}: {source}", path.display())]
    File {
        /// What was looked for in it.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        source: PemError,
    },
    /// The file has no certificate.
    #[error("there is no certificate in {}", .0.display())]
    Empty(PathBuf),
    /// Certificate or key cannot be used.
    #[error("{}: {source}", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: rustls::Error,
    },
    /// Certificate and key are not of one pair.
    #[error("the key in {} is not that of the certificate in {}", key.display(), chain.display())]
    Mismatch {
        /// The certificate's file.
        chain: PathBuf,
        /// The key's.
        key: PathBuf,
    },
    /// The certificate names no host.
    #[error("the certificate in {} names no host (subjectAltName)", .0.display())]
    Nameless(PathBuf),
    /// A certificate that was issued cannot be used.
    #[error("the certificate that was issued for {name}: {why}")]
    Issued {
        /// The name that it is for.
        name: String,
        /// Why not.
        why: String,
    },
    /// The system has no certificates of authorities that servers' could be signed with.
    #[error("this host trusts no certificate authority: there is none of its certificates here")]
    NoAuthorities,
    /// There is no certificate in the settings, and none could be made.
    #[error("cannot make a certificate: {0}")]
    Make(String),
}

impl CertificateError {
    /// The file that is to blame.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::File { path, .. } | Self::Unusable { path, .. } => Some(path),
            Self::Empty(path) | Self::Nameless(path) => Some(path),
            Self::Mismatch { key, .. } => Some(key),
            Self::Issued { .. } | Self::NoAuthorities | Self::Make(_) => None,
        }
    }

    /// Whether the file may be there, and readable, on another host.
    pub fn is_of_this_host(&self) -> bool {
        matches!(self, Self::File { source: PemError::Io(_), .. } | Self::NoAuthorities)
    }
}

/// Which of these certificates cannot be used, by their numbers, and why not.
pub fn check(certificates: &[Certificate]) -> Vec<(usize, CertificateError)> {
    let (mut shown, provider) = (Shown::default(), aws_lc_rs::default_provider());
    let mut add = |certificate| shown.add(load(certificate, &provider)?, &certificate.chain);
    let numbered = certificates.iter().enumerate();
    numbered.filter_map(|(number, certificate)| Some((number, add(certificate).err()?))).collect()
}

/// What is known of a certificate.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct CertificateStatus {
    /// Its file, or the name that it was issued for.
    pub certificate: String,
    /// When it begins to be valid, in seconds since 1970.
    pub not_before_s: i64,
    /// When it ends to be valid, in seconds since 1970.
    pub not_after_s: i64,
}

/// How long a certificate is valid, if it is one.
pub(super) fn status(certificate: String, certified: &CertifiedKey) -> Option<CertificateStatus> {
    let (_, parsed) = parse_x509_certificate(certified.cert.first()?).ok()?;
    let Validity { not_before, not_after } = &parsed.validity;
    let (not_before_s, not_after_s) = (not_before.timestamp(), not_after.timestamp());
    Some(CertificateStatus { certificate, not_before_s, not_after_s })
}

fn unreadable(path: &Path) -> CertificateError {
    let source = rustls::Error::InvalidCertificate(rustls::CertificateError::BadEncoding);
    CertificateError::Unusable { path: path.to_owned(), source }
}

/// What TLS listeners of these settings are served with, and what is known of their certificates. Without a certificate,
/// one is made that no client knows.
pub(crate) fn server_config(
    certificates: &[Certificate],
    issued: Arc<Issued>,
) -> Result<(Arc<ServerConfig>, Vec<CertificateStatus>), CertificateError> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let of_library = |error: rustls::Error| CertificateError::Make(error.to_string());
    let mut shown = Shown { issued, ..Shown::default() };
    let mut known = Vec::new();
    for certificate in certificates {
        let (certified, path) = (load(certificate, &provider)?, &certificate.chain);
        known.push(status(path.display().to_string(), &certified).ok_or_else(|| unreadable(path))?);
        shown.add(certified, path)?;
    }
    if certificates.is_empty() {
        shown.made = Some(Arc::new(make()?));
    }
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(of_library)?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(shown));
    // Who names the last one alone is shown what it looks for, and nothing else.
    config.alpn_protocols = vec![ALPN_HTTP2.to_vec(), ALPN_HTTP1.to_vec(), ALPN_CHALLENGE.to_vec()];
    // Resumption without state of ours, on whichever core the client comes to.
    config.ticketer = aws_lc_rs::Ticketer::new().map_err(of_library)?;
    Ok((Arc::new(config), known))
}

/// The certificates in a file, of which there is at least one.
pub(super) fn read(path: &Path) -> Result<Vec<CertificateDer<'static>>, CertificateError> {
    let failed = || unreadable_file("a certificate", path);
    let certificates: Vec<_> =
        CertificateDer::pem_file_iter(path).map_err(failed())?.collect::<Result<_, _>>().map_err(failed())?;
    if certificates.is_empty() { Err(CertificateError::Empty(path.to_owned())) } else { Ok(certificates) }
}

fn unreadable_file(what: &'static str, path: &Path) -> impl FnOnce(PemError) -> CertificateError {
    let path = path.to_owned();
    move |source| CertificateError::File { what, path, source }
}

pub(super) fn load(
    certificate: &Certificate,
    provider: &CryptoProvider,
) -> Result<CertifiedKey, CertificateError> {
    let Certificate { chain: chain_path, key: key_path } = certificate;
    let chain = read(chain_path)?;
    let key = PrivateKeyDer::from_pem_file(key_path).map_err(unreadable_file("a private key", key_path))?;
    let unusable = |path: &Path| {
        let path = path.to_owned();
        move |source| CertificateError::Unusable { path, source }
    };
    let key = provider.key_provider.load_private_key(key).map_err(unusable(key_path))?;
    let certified = CertifiedKey::new(chain, key);
    match certified.keys_match() {
        // Of a key that does not tell, the first handshake will.
        Ok(()) | Err(rustls::Error::InconsistentKeys(InconsistentKeys::Unknown)) => Ok(certified),
        Err(rustls::Error::InconsistentKeys(_)) => {
            Err(CertificateError::Mismatch { chain: chain_path.clone(), key: key_path.clone() })
        }
        Err(source) => Err(unusable(chain_path)(source)),
    }
}

/// A certificate for this host that it has signed itself.
fn make() -> Result<CertifiedKey, CertificateError> {
    let names = ["localhost", "127.0.0.1", "::1"].map(str::to_owned);
    let made = rcgen::generate_simple_self_signed(names)
        .map_err(|error| CertificateError::Make(error.to_string()))?;
    let key = PrivateKeyDer::try_from(made.signing_key.serialize_der())
        .map_err(|why| CertificateError::Make(why.into()))?;
    certified(vec![made.cert.der().clone()], key)
}

/// A certificate that came from elsewhere than the settings, with its key.
pub(super) fn certified(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<CertifiedKey, CertificateError> {
    let key = aws_lc_rs::default_provider().key_provider.load_private_key(key);
    let key = key.map_err(|error| CertificateError::Make(error.to_string()))?;
    Ok(CertifiedKey::new(chain, key))
}

/// Certificates by the names that they are for.
#[derive(Debug, Default)]
struct Shown {
    /// In lower case; `*.` begins one that is for all names with one more label. Several for one name have different
    /// keys.
    by_name: HashMap<String, Vec<Arc<CertifiedKey>>>,
    /// For clients that ask for no name, or for one that no certificate is for.
    default: Option<Arc<CertifiedKey>>,
    issued: Arc<Issued>,
    /// For want of any other.
    made: Option<Arc<CertifiedKey>>,
}

impl Shown {
    fn add(&mut self, certified: CertifiedKey, path: &Path) -> Result<(), CertificateError> {
        let certified = Arc::new(certified);
        let leaf = certified.cert.first().map(EndEntityCert::try_from);
        let Some(Ok(leaf)) = leaf else { return Err(unreadable(path)) };
        let mut is_nameless = true;
        for name in leaf.valid_dns_names() {
            is_nameless = false;
            self.by_name.entry(name.to_ascii_lowercase()).or_default().push(Arc::clone(&certified));
        }
        if is_nameless && self.default.is_some() {
            return Err(CertificateError::Nameless(path.to_owned()));
        }
        self.default.get_or_insert(certified);
        Ok(())
    }

    fn of(&self, name: &str) -> Option<&[Arc<CertifiedKey>]> {
        let above = || name.split_once('.').map(|(_, rest)| format!("*.{rest}"));
        let found = self.by_name.get(name);
        found.or_else(|| self.by_name.get(&above()?)).map(Vec::as_slice)
    }
}

impl ResolvesServerCert for Shown {
    fn resolve(&self, client: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let name =
            client.server_name().map(|name| name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase());
        let name = name.as_deref();
        if issued::is_challenge(&client) {
            return self.issued.proof(name?);
        }
        let suits = |certified: &&Arc<CertifiedKey>| {
            certified.key.choose_scheme(client.signature_schemes()).is_some()
        };
        let named = name.and_then(|name| self.of(name)).unwrap_or(&[]);
        let named = named.iter().find(suits).or_else(|| named.first()).cloned();
        named
            .or_else(|| self.issued.certificate(Some(name?)))
            .or_else(|| self.default.clone())
            .or_else(|| self.issued.certificate(None))
            .or_else(|| self.made.clone())
    }
}
