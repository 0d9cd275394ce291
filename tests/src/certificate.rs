//! Certificates that sign themselves or each other, and clients that trust them.

use std::path::Path;
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::ClientConfig;
use rustls::RootCertStore;
use rustls::crypto::{CryptoProvider, SupportedKxGroup, aws_lc_rs};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// A certificate with its key.
pub struct Certificate {
    chain: String,
    key: String,
    der: CertificateDer<'static>,
}

impl Certificate {
    /// One for these names.
    pub fn of(names: &[&str]) -> Self {
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        let made = rcgen::generate_simple_self_signed(names).unwrap();
        Self { chain: made.cert.pem(), key: made.signing_key.serialize_pem(), der: made.cert.der().clone() }
    }

    /// One that may sign others.
    pub fn authority() -> Self {
        Self::alone(&[])
    }

    /// One for these names that says of itself, as many tools write it, that it may sign others.
    pub fn alone(names: &[&str]) -> Self {
        let key = KeyPair::generate().unwrap();
        let made = params(names, true).self_signed(&key).unwrap();
        Self { chain: made.pem(), key: key.serialize_pem(), der: made.der().clone() }
    }

    /// One for these names that this one has signed.
    pub fn sign(&self, names: &[&str]) -> Self {
        let issuer = Issuer::new(params(&[], true), KeyPair::from_pem(&self.key).unwrap());
        let key = KeyPair::generate().unwrap();
        let made = params(names, false).signed_by(&key, &issuer).unwrap();
        Self { chain: made.pem(), key: key.serialize_pem(), der: made.der().clone() }
    }

    pub(crate) fn der(&self) -> &CertificateDer<'static> {
        &self.der
    }

    /// Writes `NAME.crt` and `NAME.key` into a directory.
    pub fn write(&self, directory: &Path, name: &str) {
        std::fs::write(directory.join(format!("{name}.crt")), &self.chain).unwrap();
        std::fs::write(directory.join(format!("{name}.key")), &self.key).unwrap();
    }

    /// What a server shows of it, and proves that it is its own by.
    pub(crate) fn identity(&self) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
        let chain = CertificateDer::pem_slice_iter(self.chain.as_bytes()).map(Result::unwrap).collect();
        (chain, PrivateKeyDer::from_pem_slice(self.key.as_bytes()).unwrap())
    }

    /// What a client that trusts these, and speaks this protocol, begins with.
    pub fn client_config(trusted: &[&Self], protocol: &[u8]) -> Arc<ClientConfig> {
        let mut config = client(aws_lc_rs::default_provider(), trusted);
        config.alpn_protocols = vec![protocol.to_vec()];
        Arc::new(config)
    }

    /// What a client that trusts this one begins with, if it knows no other way to agree on keys.
    pub fn client_config_of_group(&self, group: &'static dyn SupportedKxGroup) -> Arc<ClientConfig> {
        let provider = CryptoProvider { kx_groups: vec![group], ..aws_lc_rs::default_provider() };
        Arc::new(client(provider, &[self]))
    }
}

fn client(provider: CryptoProvider, trusted: &[&Certificate]) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    trusted.iter().for_each(|certificate| roots.add(certificate.der.clone()).unwrap());
    ClientConfig::builder_with_provider(Arc::new(provider))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth()
}

fn params(names: &[&str], may_sign: bool) -> CertificateParams {
    let mut params =
        CertificateParams::new(names.iter().map(ToString::to_string).collect::<Vec<_>>()).unwrap();
    params.is_ca = if may_sign { IsCa::Ca(BasicConstraints::Unconstrained) } else { IsCa::NoCa };
    params
}
