//! How a server gets its listening sockets from the process that holds them, over a socket with an abstract name: that
//! belongs to the network namespace, and vanishes with its holder.

use std::io;
use std::net::SocketAddr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::sockopt::socket_peercred;

use crate::ClassListeners;

/// How long the holder is given to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Hands the sockets of one address to servers that ask, on a thread of its own, until it is dropped.
#[derive(Debug)]
pub struct Handover {
    door: Arc<UnixListener>,
    thread: Option<JoinHandle<()>>,
}

impl Handover {
    /// Opens the door for the sockets of `address`, which are `listeners`; fails if another process holds them. Who asks
    /// gets duplicates, if it may: the user whose process this is, and root.
    pub fn open(address: SocketAddr, listeners: ClassListeners) -> io::Result<Self> {
        let door = Arc::new(UnixListener::bind_addr(&name_of(address)?)?);
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
        Ok(Self { door, thread: Some(thread) })
    }
}

impl Drop for Handover {
    fn drop(&mut self) {
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
        let stream = match UnixStream::connect_addr(&name_of(address)?) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => return Ok(None),
            other => other?,
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

fn name_of(address: SocketAddr) -> io::Result<UnixAddr> {
    UnixAddr::from_abstract_name(format!("tidegate-queue {address}"))
}
