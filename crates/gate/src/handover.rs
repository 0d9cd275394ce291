//! How a server gets its listening sockets from the process that holds them, over a socket of the network namespace.
//! Root's is in a directory that only root may enter, so that nobody else can take its place; where there can be no
//! such directory, and for other users, it has an abstract name, which vanishes with its holder and which any user may
//! take.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::sockopt::socket_peercred;

use crate::{ClassListeners, system};

/// Who may write here may take the place of a holder: root alone, as it is made.
const DIRECTORY: &str = "/run/tidegate/queues";

/// How long the holder is given to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Hands the sockets of one address to servers that ask, on a thread of its own, until it is dropped.
#[derive(Debug)]
pub struct Handover {
    door: Arc<UnixListener>,
    /// Where it is, if it is a file.
    path: Option<PathBuf>,
    thread: Option<JoinHandle<()>>,
}

impl Handover {
    /// Opens the door for the sockets of `address`, which are `listeners`; fails if another process holds them. Who
    /// asks gets duplicates, if it may: the user whose process this is, and root.
    pub fn open(address: SocketAddr, listeners: ClassListeners) -> io::Result<Self> {
        let (door, path) = match path_of(address, true).map(|path| (bind(&path), path)) {
            Some((Ok(door), path)) => (door, Some(path)),
            Some((Err(error), _)) if error.kind() == io::ErrorKind::AddrInUse => return Err(error),
            // Such as a file system that is only read.
            Some(_) | None => (UnixListener::bind_addr(&name_of(address)?)?, None),
        };
        let door = Arc::new(door);
        let waiting = Arc::clone(&door);
        let serve = move || {
            // Shut down, it gives an error.
            while let Ok((stream, _)) = waiting.accept() {
                // A server that asks and goes away harms only itself.
                if is_trusted(&stream).unwrap_or(false) {
                    let _ = listeners.pass(&stream);
                }
            }
        };
        let thread = std::thread::Builder::new().name("handover".into()).spawn(serve)?;
        Ok(Self { door, path, thread: Some(thread) })
    }
}

impl Drop for Handover {
    fn drop(&mut self) {
        // One that stays behind is replaced by the next holder.
        let _ = self.path.as_ref().map(fs::remove_file);
        // A door that is shut already is what is wanted.
        let _ = rustix::net::shutdown(&*self.door, rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            // A panic there has been printed; there is nothing to add.
            let _ = thread.join();
        }
    }
}

impl ClassListeners {
    /// Gets the sockets of `address` from the process that holds them; `None`: nobody does.
    pub fn from_holder(address: SocketAddr) -> io::Result<Option<Self>> {
        let path = path_of(address, false).and_then(|path| UnixAddr::from_pathname(path).ok());
        let stream = match path.as_ref().map_or(Ok(None), connect)? {
            Some(stream) => stream,
            None => match connect(&name_of(address)?)? {
                Some(stream) => stream,
                None => return Ok(None),
            },
        };
        if !is_trusted(&stream)? {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "another user holds its sockets"));
        }
        stream.set_read_timeout(Some(PATIENCE))?;
        Self::receive(&stream).map(Some)
    }
}

fn is_trusted(stream: &UnixStream) -> io::Result<bool> {
    let other = socket_peercred(stream)?.uid;
    Ok(other.is_root() || other == rustix::process::geteuid())
}

/// `None`: nobody is there.
fn connect(to: &UnixAddr) -> io::Result<Option<UnixStream>> {
    match UnixStream::connect_addr(to) {
        Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound) => {
            Ok(None)
        }
        other => other.map(Some),
    }
}

/// Takes the place of a holder that has gone without removing its file.
fn bind(path: &Path) -> io::Result<UnixListener> {
    match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            if connect(&UnixAddr::from_pathname(path)?)?.is_some() {
                return Err(error);
            }
            fs::remove_file(path)?;
            UnixListener::bind(path)
        }
        other => other,
    }
}

/// The path for an address of this network namespace, if this process is root's and nobody else can write there.
fn path_of(address: SocketAddr, make: bool) -> Option<PathBuf> {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    let directory = Path::new(DIRECTORY);
    if make {
        // What is there, or cannot be made, is looked at next.
        let _ = fs::DirBuilder::new().mode(0o755).create(directory.parent()?);
        let _ = fs::DirBuilder::new().mode(0o700).create(directory);
    }
    let of_root = |path: &Path, allowed: u32| {
        fs::symlink_metadata(path)
            .is_ok_and(|data| data.is_dir() && data.uid() == 0 && data.mode() & 0o777 & !allowed == 0)
    };
    if !of_root(directory.parent()?, 0o755) || !of_root(directory, 0o700) {
        return None;
    }
    let namespace = system::namespace_cookie().ok()?;
    Some(directory.join(format!("{namespace} {address}")))
}

fn name_of(address: SocketAddr) -> io::Result<UnixAddr> {
    UnixAddr::from_abstract_name(format!("tidegate-queue {address}"))
}
