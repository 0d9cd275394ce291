//! Files below a directory: finding one without ever leaving the directory, serving it, and noticing when one changes.

pub(crate) mod large_files;
pub(crate) mod serve;
mod stored;
mod types;
mod watch;

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use crate::settings::Coding;

pub use types::content_type;
pub(crate) use watch::Watcher;

/// Directories deeper than this are not loaded in advance.
const PRELOAD_DEPTH: usize = 64;

/// A directory whose files are served.
pub(crate) struct StaticRoot {
    directory: OwnedFd,
}

/// A file that answers a request.
pub(crate) struct StaticFile {
    pub file: File,
    pub stamp: Stamp,
    pub etag: String,
    pub content_type: &'static str,
    /// Of the content of `file`, which is a precompressed sibling then.
    pub content_encoding: Option<Coding>,
    /// What it is to be compressed with for the client.
    pub wanted: Option<Coding>,
    /// The answer depends on Accept-Encoding.
    pub vary: bool,
    /// It can change without its directory telling: it was reached by a symbolic link, has another name elsewhere, or
    /// lies below a directory that may not be read, which cannot be watched.
    pub is_linked: bool,
}

/// What a file's content is known by: size and time to the nanosecond change with every edit that is not made to
/// deceive, the inode with every replacement.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Stamp {
    pub length: u64,
    /// Last modification, in seconds since 1970 and nanoseconds.
    modified: (i64, i64),
    /// Last change of anything, which programs cannot set: an edit that sets the modification back shows here.
    changed: (i64, i64),
    inode: u64,
}

impl Stamp {
    /// # Errors
    /// The system does not tell.
    pub(crate) fn of(file: impl AsFd) -> io::Result<Self> {
        Ok(Self::from(&rustix::fs::fstat(file)?))
    }

    /// The last modification in seconds since 1970; of files from before, 0.
    pub(crate) fn modified_s(&self) -> u64 {
        u64::try_from(self.modified.0).unwrap_or(0)
    }

    /// An entity tag; different ones for the content codings.
    fn etag(&self, coding: Option<Coding>) -> String {
        let Self { length, modified: (s, ns), inode, .. } = self;
        let mark = coding.map_or("", |coding| &coding.name()[..1]);
        format!("\"{length:x}-{s:x}.{ns:x}-{inode:x}{mark}\"")
    }
}

impl From<&Stat> for Stamp {
    fn from(stat: &Stat) -> Self {
        Self {
            length: u64::try_from(stat.st_size).unwrap_or(0),
            modified: (stat.st_mtime, stat.st_mtime_nsec as i64),
            changed: (stat.st_ctime, stat.st_ctime_nsec as i64),
            inode: stat.st_ino,
        }
    }
}

/// A regular file below the root.
struct Opened {
    file: File,
    is_linked: bool,
    stamp: Stamp,
}

/// Why no file answers.
#[derive(Debug)]
pub(crate) enum StaticError {
    /// There is none, or it is not one that is served.
    NotFound,
    /// The path is a directory's, without the slash at its end.
    NeedsTrailingSlash,
    /// It could not be read.
    Io(io::Error),
}

impl StaticRoot {
    /// Opens the directory.
    ///
    /// # Errors
    /// It is not there, is no directory, or may not be read.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let directory = rustix::fs::openat(
            CWD,
            path,
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        // Reading it proves that it may be read, which opening does not.
        Dir::read_from(&directory)?.next().transpose()?;
        Ok(Self { directory })
    }

    /// Finds the file for a percent-decoded path that begins with `/`. `accepted` says which of [`Coding::ALL`] the client
    /// takes, as a mask. Blocks: not for a data core.
    pub(crate) fn lookup(&self, path: &[u8], accepted: u8) -> Result<StaticFile, StaticError> {
        let relative = path.strip_prefix(b"/").ok_or(StaticError::NotFound)?;
        if !is_served(relative) {
            return Err(StaticError::NotFound);
        }
        let mut name = relative.to_vec();
        if name.is_empty() || name.ends_with(b"/") {
            name.extend_from_slice(b"index.html");
        }
        let plain = self.open_file(&name)?;
        let mut is_linked = plain.is_linked || !self.may_be_watched(&name);
        let mut vary = false;
        let mut chosen = None;
        for coding in Coding::ALL {
            let sibling = [&name, coding.suffix().as_bytes()].concat();
            let Ok(found) = self.open_file(&sibling) else { continue };
            // Compressed from an earlier version of the file.
            if found.stamp.modified < plain.stamp.modified {
                continue;
            }
            vary = true;
            is_linked |= found.is_linked;
            if chosen.is_none() && accepted & coding.bit() != 0 {
                chosen = Some((found, coding));
            }
        }
        let (Opened { file, stamp, .. }, content_encoding) = match chosen {
            Some((found, coding)) => (found, Some(coding)),
            None => (plain, None),
        };
        let content_type = types::content_type(&name);
        let etag = stamp.etag(content_encoding);
        Ok(StaticFile { file, stamp, etag, content_type, content_encoding, wanted: None, vary, is_linked })
    }

    /// Whether every directory on the way to a file may be read, and not only be passed.
    fn may_be_watched(&self, name: &[u8]) -> bool {
        name.iter().enumerate().filter(|(_, byte)| **byte == b'/').all(|(at, _)| {
            let directory = Path::new(OsStr::from_bytes(&name[..at]));
            rustix::fs::accessat(&self.directory, directory, Access::READ_OK, AtFlags::EACCESS).is_ok()
        })
    }

    /// Opens a regular file without leaving the directory, whatever symbolic links lie on the way.
    fn open_file(&self, name: &[u8]) -> Result<Opened, StaticError> {
        let name = Path::new(OsStr::from_bytes(name));
        let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        // Without NONBLOCK, opening a FIFO would wait for a writer.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let open = |resolve| rustix::fs::openat2(&self.directory, name, flags, Mode::empty(), resolve);
        let mut is_linked = false;
        let opened = open(beneath | ResolveFlags::NO_SYMLINKS).or_else(|error| match error {
            Errno::LOOP => {
                is_linked = true;
                open(beneath)
            }
            error => Err(error),
        });
        let file = match opened {
            Ok(file) => file,
            Err(
                Errno::NOENT | Errno::NOTDIR | Errno::XDEV | Errno::LOOP | Errno::NAMETOOLONG | Errno::INVAL,
            ) => {
                return Err(StaticError::NotFound);
            }
            Err(Errno::NXIO) => return Err(StaticError::NotFound),
            Err(error) => return Err(StaticError::Io(error.into())),
        };
        let stat = rustix::fs::fstat(&file).map_err(|error| StaticError::Io(error.into()))?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {
                let is_linked = is_linked || stat.st_nlink > 1;
                Ok(Opened { file: File::from(file), is_linked, stamp: Stamp::from(&stat) })
            }
            FileType::Directory => Err(StaticError::NeedsTrailingSlash),
            _ => Err(StaticError::NotFound),
        }
    }
}

/// Names that begin with a dot are not for the public, but for RFC 8615's.
fn is_served(relative: &[u8]) -> bool {
    !relative.contains(&0)
        && relative.split(|byte| *byte == b'/').all(|part| !part.starts_with(b".") || part == b".well-known")
}

/// Calls `f` for every file that would be served without a content coding, with its path below the root.
///
/// # Errors
/// A directory could not be read.
pub(crate) fn preload(root: &StaticRoot, mut f: impl FnMut(&Path, StaticFile)) -> io::Result<()> {
    let mut directories = vec![PathBuf::new()];
    while let Some(directory) = directories.pop() {
        let handle = if directory.as_os_str().is_empty() {
            Dir::read_from(root.directory.as_fd())?
        } else {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            match rustix::fs::openat2(
                &root.directory,
                &directory,
                flags,
                Mode::empty(),
                ResolveFlags::BENEATH,
            ) {
                Ok(opened) => Dir::read_from(opened)?,
                Err(_) => continue,
            }
        };
        for entry in handle {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if !is_served(name) || name == b".well-known" {
                continue;
            }
            let path = directory.join(OsStr::from_bytes(name));
            let is_directory = rustix::fs::statat(&root.directory, &path, AtFlags::SYMLINK_NOFOLLOW)
                .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory);
            if is_directory {
                if path.components().count() < PRELOAD_DEPTH {
                    directories.push(path);
                }
                continue;
            }
            let request = [b"/", path.as_os_str().as_bytes()].concat();
            if let Ok(file) = root.lookup(&request, 0) {
                f(&path, file);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
