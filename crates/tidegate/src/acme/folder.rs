//! What an authority gave: the account, and for each name a certificate with its key.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use instant_acme::AccountCredentials;
use serde::{Deserialize, Serialize};

const ACCOUNT: &str = "account.json";

/// An account with a directory.
#[derive(Deserialize, Serialize)]
pub(super) struct StoredAccount {
    pub email: Option<String>,
    pub credentials: AccountCredentials,
}

/// The folder of one directory: another one's certificates are not for its clients.
#[derive(Clone, Debug)]
pub(super) struct Folder(PathBuf);

impl Folder {
    /// Makes the folder, which nobody but this user may read, unless it is there.
    pub(super) fn open(path: &Path, directory: &str) -> io::Result<Self> {
        let authority = directory.trim_start_matches("https://").split('/').next().unwrap_or_default();
        let path = path.join(authority.replace(':', "_"));
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&path);
        // That a file can be written shows now, and not when a certificate is there to be kept.
        let probe = path.join(".writable");
        let written = made.and_then(|()| write(&probe, b"")).and_then(|()| fs::remove_file(&probe));
        written.map_err(|error| {
            io::Error::new(error.kind(), format!("cannot keep certificates in {}: {error}", path.display()))
        })?;
        Ok(Self(path))
    }

    /// The account, if there is one that can be read.
    pub(super) fn account(&self) -> io::Result<Option<StoredAccount>> {
        match fs::read(self.0.join(ACCOUNT)) {
            Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(super) fn keep_account(&self, account: &StoredAccount) -> io::Result<()> {
        write(&self.0.join(ACCOUNT), &serde_json::to_vec_pretty(account)?)
    }

    /// Puts an account aside that is of no use.
    pub(super) fn set_account_aside(&self) -> io::Result<()> {
        let path = self.0.join(ACCOUNT);
        fs::rename(&path, path.with_extension("json.unusable"))
    }

    /// The key and the certificate of a name, in PEM.
    pub(super) fn certificate(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        match fs::read(self.certificate_path(name)) {
            Ok(pem) => Ok(Some(pem)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(super) fn keep_certificate(&self, name: &str, pem: &[u8]) -> io::Result<()> {
        write(&self.certificate_path(name), pem)
    }

    fn certificate_path(&self, name: &str) -> PathBuf {
        self.0.join(format!("{name}.pem"))
    }
}

/// Writes a file whole or not at all, which nobody but this user may read.
fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let beside = path.with_extension("new");
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&beside, path)?;
    path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
}
