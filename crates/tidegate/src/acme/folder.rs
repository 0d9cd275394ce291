//! What an authority gave: the account, and for each name a certificate with its key.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use instant_acme::AccountCredentials;
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

const ACCOUNT: &str = "account.json";
/// The longest file that is read, and what has to fit when the folder is opened.
const MOST_BYTES: u64 = 256 * 1024;
const PROBE_BYTES: usize = 16 * 1024;
/// Longer names have a file with a name of its own: with what follows it, a file's name has at most 255 bytes.
const MOST_NAME_BYTES: usize = 180;

/// An account with a directory.
#[derive(Deserialize, Serialize)]
pub(super) struct StoredAccount {
    pub email: Option<String>,
    /// The URL of the directory.
    pub directory: String,
    pub credentials: AccountCredentials,
}

/// The folder of one directory: another one's certificates are not for its clients.
#[derive(Clone, Debug)]
pub(super) struct Folder(PathBuf);

impl Folder {
    /// Makes the folder, which nobody but this user may read, unless it is there.
    pub(super) fn open(path: &Path, directory: &str) -> io::Result<Self> {
        let path = path.join(name_of(directory));
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&path);
        // That a file can be written shows now, and not when a certificate is there to be kept.
        let probe = path.join(format!(".writable.{}", std::process::id()));
        let written =
            made.and_then(|()| write(&probe, &[b' '; PROBE_BYTES])).and_then(|()| fs::remove_file(&probe));
        written.map_err(|error| {
            io::Error::new(error.kind(), format!("cannot keep certificates in {}: {error}", path.display()))
        })?;
        Ok(Self(path))
    }

    /// The account, if there is one that can be read.
    pub(super) fn account(&self) -> io::Result<Option<StoredAccount>> {
        read(&self.account_path())?.map(|bytes| Ok(serde_json::from_slice(&bytes)?)).transpose()
    }

    pub(super) fn keep_account(&self, account: &StoredAccount) -> io::Result<()> {
        write(&self.account_path(), &serde_json::to_vec_pretty(account)?)
    }

    /// Puts an account aside that is of no use, if there is one.
    pub(super) fn set_account_aside(&self) -> io::Result<()> {
        let path = self.account_path();
        match fs::rename(&path, path.with_extension("json.unusable")) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            moved => moved,
        }
    }

    pub(super) fn account_path(&self) -> PathBuf {
        self.0.join(ACCOUNT)
    }

    /// The key and the certificate of a name, in PEM.
    pub(super) fn certificate(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        read(&self.certificate_path(name))
    }

    pub(super) fn keep_certificate(&self, name: &str, pem: &[u8]) -> io::Result<()> {
        write(&self.certificate_path(name), pem)
    }

    fn certificate_path(&self, name: &str) -> PathBuf {
        let file = match name.get(..MOST_NAME_BYTES) {
            Some(start) if name.len() > MOST_NAME_BYTES => {
                format!("{start}-{:016x}.pem", xxh3_64(name.as_bytes()))
            }
            _ => format!("{name}.pem"),
        };
        self.0.join(file)
    }
}

/// A name for the folder of a directory, that nobody else's has.
fn name_of(directory: &str) -> String {
    let rest = directory.trim_start_matches("https://");
    let authority = rest.split('/').next().unwrap_or_default();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
    let plain = |c: char| if is_plain(c) { c } else { '_' };
    let readable: String = authority.trim_matches('.').chars().take(MOST_NAME_BYTES).map(plain).collect();
    format!("{readable}-{:016x}", xxh3_64(directory.as_bytes()))
}

/// Reads a file, and nothing else that may be in its place: a pipe would keep its reader waiting.
fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let mut options = OpenOptions::new();
    let flags = i32::try_from((OFlags::NONBLOCK | OFlags::NOCTTY).bits()).unwrap_or(0);
    let file = match options.read(true).custom_flags(flags).open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(ErrorKind::InvalidInput, format!("{} is no file", path.display())));
    }
    let mut bytes = Vec::new();
    file.take(MOST_BYTES).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

/// Writes a file whole or not at all, which nobody but this user may read.
fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    // Another process may write the same file.
    let beside = path.with_file_name(format!("{name}.{}.new", std::process::id()));
    match fs::remove_file(&beside) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        removed => removed?,
    }
    let written = write_new(&beside, bytes).and_then(|()| fs::rename(&beside, path));
    if written.is_err() {
        // What is left of it would only be in the way.
        let _ = fs::remove_file(&beside);
    }
    written?;
    path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
}

/// Nobody else's file is taken for it, nor a link followed.
fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn folders_of_directories_are_their_own_and_below_the_path() {
        let urls =
            ["https://h/dir", "https://h/dir2", "https://h:443/dir", "https://../dir", "https://h_443/dir"];
        let names: std::collections::BTreeSet<String> = urls.iter().map(|url| name_of(url)).collect();
        assert_eq!(names.len(), urls.len(), "{names:?}");
        assert!(names.iter().all(|name| !name.contains('/') && !name.starts_with('.')), "{names:?}");
    }

    #[test]
    fn names_of_any_length_have_files_of_their_own() {
        let directory = tempfile::tempdir().unwrap();
        let folder = Folder::open(directory.path(), "https://h/dir").unwrap();
        let long = |end: char| format!("{}{end}", "a.".repeat(126));
        for name in ["account", "a.new", &long('b'), &long('c')] {
            folder.keep_certificate(name, name.as_bytes()).unwrap();
        }
        for name in ["account", "a.new", &long('b'), &long('c')] {
            assert_eq!(folder.certificate(name).unwrap().unwrap(), name.as_bytes());
        }
        assert!(folder.account().unwrap().is_none());
    }

    #[test]
    fn what_is_written_is_nobody_elses_whatever_was_there() {
        let directory = tempfile::tempdir().unwrap();
        let folder = Folder::open(directory.path(), "https://h/dir").unwrap();
        let elsewhere = directory.path().join("elsewhere");
        fs::write(&elsewhere, "mine").unwrap();
        let path = folder.certificate_path("a.example");
        let beside = path.with_file_name(format!("a.example.pem.{}.new", std::process::id()));
        std::os::unix::fs::symlink(&elsewhere, &beside).unwrap();
        folder.keep_certificate("a.example", b"key").unwrap();
        assert_eq!(fs::read(&elsewhere).unwrap(), b"mine");
        assert_eq!(fs::symlink_metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        fs::remove_file(&path).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, 0o600.into()).unwrap();
        assert!(folder.certificate("a.example").unwrap_err().to_string().contains("is no file"));
    }
}
