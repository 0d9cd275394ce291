//! A directory of files as a site. Open files are kept as soft state that may be dropped at any time.

use super::{Asked, Lost, Missing, Resource, Site};
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tidegate_http::normalize::percent_decode;

/// Files that are kept open.
const MAX_OPEN: usize = 256;
/// After this time a file is looked up by its name again: another may have taken its place.
const NAME_LIFE: Duration = Duration::from_secs(1);

/// The directory cannot be served.
#[derive(Debug, thiserror::Error)]
#[error("cannot read root {}: {source}", path.display())]
pub struct StaticRootError {
    /// The directory.
    pub path: PathBuf,
    /// What the system said.
    pub source: io::Error,
}

/// Files below a directory, whatever the host. Replicas agree on versions if length and time of modification agree.
#[derive(Debug)]
pub struct StaticRoot {
    path: PathBuf,
    directory: OwnedFd,
    /// When it was looked whether the path still leads there.
    looked: Instant,
    media_type: fn(&[u8]) -> &'static str,
    open: HashMap<Vec<u8>, OpenFile>,
}

#[derive(Debug)]
struct OpenFile {
    file: File,
    media_type: &'static str,
    opened: Instant,
}

impl StaticRoot {
    /// Serves `path`; `media_type` tells a file's Content-Type from its name.
    ///
    /// # Errors
    /// It is no directory, or may not be read.
    pub fn open(path: &Path, media_type: fn(&[u8]) -> &'static str) -> Result<Self, StaticRootError> {
        let path = path.to_path_buf();
        match open_directory(&path) {
            Ok(directory) => {
                Ok(Self { path, directory, looked: Instant::now(), media_type, open: HashMap::new() })
            }
            Err(source) => Err(StaticRootError { path, source: source.into() }),
        }
    }

    /// Follows the path where it leads to another directory by now, as after a switch of a symbolic link. Where it
    /// leads nowhere the known directory is served.
    fn follow(&mut self) {
        if self.looked.elapsed() < NAME_LIFE {
            return;
        }
        self.looked = Instant::now();
        let identity =
            |directory: &OwnedFd| rustix::fs::fstat(directory).map(|stat| (stat.st_dev, stat.st_ino));
        if let Ok(directory) = open_directory(&self.path)
            && identity(&directory) != identity(&self.directory)
        {
            self.directory = directory;
            self.open.clear();
        }
    }

    fn lookup(&mut self, target: &[u8]) -> Result<&OpenFile, Missing> {
        self.follow();
        let path = target.split(|&byte| byte == b'?').next().unwrap_or(target);
        let known = self.open.get(path).is_some_and(|open| open.opened.elapsed() < NAME_LIFE);
        if !known {
            self.open.remove(path);
            let open = self.open_file(path)?;
            if self.open.len() == MAX_OPEN {
                self.open.clear();
            }
            self.open.insert(path.to_vec(), open);
        }
        self.open.get(path).ok_or(Missing::Unavailable)
    }

    /// Opens a regular file without leaving the directory, whatever symbolic links lie on the way.
    fn open_file(&self, path: &[u8]) -> Result<OpenFile, Missing> {
        // An encoded slash is no separator (RFC 3986 §2.2): a file has one path, whatever rules look at.
        let hides_separator =
            |escape: &[u8]| [b"%2f", b"%5c"].iter().any(|separator| escape.eq_ignore_ascii_case(*separator));
        if path.windows(3).any(hides_separator) {
            return Err(Missing::NotFound);
        }
        let mut name = Vec::with_capacity(path.len());
        percent_decode(path.strip_prefix(b"/").ok_or(Missing::NotFound)?, &mut name);
        // Names that begin with a dot are not for the public, but for RFC 8615's.
        let public = |part: &[u8]| !part.starts_with(b".") || part == b".well-known";
        if name.contains(&0) || !name.split(|&byte| byte == b'/').all(public) {
            return Err(Missing::NotFound);
        }
        if name.is_empty() || name.ends_with(b"/") {
            name.extend_from_slice(b"index.html");
        }
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        // Without NONBLOCK, opening a FIFO would wait for a writer.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = rustix::fs::openat2(
            &self.directory,
            Path::new(OsStr::from_bytes(&name)),
            flags,
            Mode::empty(),
            resolve,
        )
        .map_err(|error| match error {
            Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::IO => Missing::Unavailable,
            _ => Missing::NotFound,
        })?;
        let stat = rustix::fs::fstat(&file).map_err(|_| Missing::Unavailable)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {
                let media_type = (self.media_type)(&name);
                Ok(OpenFile { file: file.into(), media_type, opened: Instant::now() })
            }
            FileType::Directory => Err(Missing::MovedTo([path, b"/"].concat())),
            _ => Err(Missing::NotFound),
        }
    }
}

fn open_directory(path: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(CWD, path, flags, Mode::empty())
}

/// What a file's bytes are known by. Replicas have the same files under different inodes, so that these say nothing.
#[derive(Clone, Copy)]
struct Stamp {
    length: u64,
    /// Last modification, in seconds since 1970 and nanoseconds.
    modified: (i64, i64),
}

impl Stamp {
    fn version(self) -> u64 {
        let Self { length, modified: (seconds, nanoseconds) } = self;
        [length, seconds as u64, nanoseconds as u64]
            .iter()
            .fold(0, |hash: u64, part| (hash ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29))
    }
}

impl OpenFile {
    fn stamp(&self) -> io::Result<Stamp> {
        let stat = rustix::fs::fstat(&self.file)?;
        let length = u64::try_from(stat.st_size).unwrap_or(0);
        Ok(Stamp { length, modified: (stat.st_mtime, stat.st_mtime_nsec as i64) })
    }

    fn resource(&self) -> io::Result<Resource> {
        let stamp = self.stamp()?;
        let Stamp { length, modified: (seconds, nanoseconds) } = stamp;
        Ok(Resource {
            status: 200,
            length,
            version: stamp.version(),
            modified_s: u64::try_from(seconds).ok(),
            etag: format!("\"{length:x}-{seconds:x}.{nanoseconds:x}\"").into_bytes(),
            fields: format!("Content-Type: {}\r\n", self.media_type).into_bytes(),
        })
    }
}

impl Site for StaticRoot {
    fn find(&mut self, asked: &Asked<'_>) -> Result<Resource, Missing> {
        self.lookup(asked.target)?.resource().map_err(|_| Missing::Unavailable)
    }

    fn known(&mut self, _host: &[u8], target: &[u8], version: u64) -> Result<Resource, Lost> {
        let found = self.lookup(target).ok().and_then(|open| open.resource().ok());
        found.filter(|resource| resource.version == version).ok_or(Lost::Gone)
    }

    fn read(
        &mut self,
        _host: &[u8],
        target: &[u8],
        version: u64,
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<usize, Lost> {
        let open = self.lookup(target).map_err(|_| Lost::Gone)?;
        let mut read = 0;
        while read < buffer.len() {
            match open.file.read_at(&mut buffer[read..], offset + read as u64) {
                Ok(0) => break,
                Ok(count) => read += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Err(Lost::Gone),
            }
        }
        // After reading: a file that was written to meanwhile has another time by now.
        let same = open.stamp().is_ok_and(|stamp| stamp.version() == version);
        if same { Ok(read) } else { Err(Lost::Gone) }
    }
}
