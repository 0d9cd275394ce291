//! Tells a service manager how far this process is (sd_notify(3)): one datagram to the socket it names.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// A manager that does not read its socket is not waited for longer.
const TIMEOUT: Duration = Duration::from_secs(1);

/// A drain may begin during a reload, whose end would take that back.
static IS_STOPPING: AtomicBool = AtomicBool::new(false);

/// Clients are served, or a reload has ended in whatever way.
pub(crate) fn ready(status: &str) {
    if IS_STOPPING.load(Ordering::SeqCst) {
        return;
    }
    notify(&format!("READY=1\nSTATUS={}", status.replace('\n', "; ")));
}

/// The configuration is being read again. The time tells this reload's end from an earlier one's.
pub(crate) fn reloading() {
    if IS_STOPPING.load(Ordering::SeqCst) {
        return;
    }
    let now = clock_gettime(ClockId::Monotonic);
    let now_us = now.tv_sec.unsigned_abs() * 1_000_000 + now.tv_nsec.unsigned_abs() / 1_000;
    notify(&format!("RELOADING=1\nMONOTONIC_USEC={now_us}"));
}

/// Another process serves now, which speaks for the service from here on.
pub(crate) fn handed_over(pid: u32) {
    notify(&format!("MAINPID={pid}\nSTATUS=serving"));
    IS_STOPPING.store(true, Ordering::SeqCst);
}

/// A drain has begun.
pub(crate) fn stopping() {
    IS_STOPPING.store(true, Ordering::SeqCst);
    notify("STOPPING=1\nSTATUS=draining");
}

fn notify(state: &str) {
    let Some(socket) = std::env::var_os("NOTIFY_SOCKET").filter(|socket| !socket.is_empty()) else { return };
    if let Err(error) = send(&socket, state) {
        tracing::warn!(%error, socket = %socket.display(), "the service manager could not be told: {state:?}");
    }
}

fn send(socket: &OsStr, state: &str) -> io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    let sender = UnixDatagram::unbound()?;
    sender.set_write_timeout(Some(TIMEOUT))?;
    sender.send_to_addr(state.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manager_is_told_at_a_path_and_at_an_abstract_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let name = format!("tidegate-test-{}", path.display());
        for (address, written) in [
            (SocketAddr::from_pathname(&path).unwrap(), path.clone().into_os_string()),
            (SocketAddr::from_abstract_name(&name).unwrap(), format!("@{name}").into()),
        ] {
            let manager = UnixDatagram::bind_addr(&address).unwrap();
            send(&written, "READY=1").unwrap();
            let mut buffer = [0; 32];
            let length = manager.recv(&mut buffer).unwrap();
            assert_eq!(&buffer[..length], b"READY=1");
        }
        assert!(send(OsStr::new("/nowhere/at/all"), "READY=1").is_err());
    }
}
