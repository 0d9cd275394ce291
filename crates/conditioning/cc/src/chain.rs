//! Starts the filters of a server in a process of their own that ends with the server.

use std::ffi::{CStr, OsString};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use libc::{c_char, c_int};
use rustix::io::Errno;
use tidegate_conditioning::ledger::Ledger;
use tidegate_conditioning::neighbours::{environment, word};
use tidegate_conditioning::{launcher, link, server};

/// Filters beyond this number are a mistake, such as an array without its end.
const MOST_FILTERS: usize = 256;

/// The names in an array that ends with NULL; `None` if it does not end.
///
/// # Safety
/// `array` is NULL or points to terminated strings, the last entry being NULL.
pub(crate) unsafe fn names(array: *const *const c_char) -> Option<Vec<OsString>> {
    let mut names = Vec::new();
    if array.is_null() {
        return Some(names);
    }
    for at in 0..MOST_FILTERS {
        // SAFETY: as the caller promises; no entry beyond NULL is read.
        let name = unsafe { *array.add(at) };
        if name.is_null() {
            return Some(names);
        }
        // SAFETY: as the caller promises.
        names.push(OsString::from_vec(unsafe { CStr::from_ptr(name) }.to_bytes().to_vec()));
    }
    None
}

/// A listening descriptor behind `filters`, the nearest to the server first.
pub(crate) fn create(address: SocketAddr, backlog: c_int, filters: Vec<OsString>) -> Result<c_int, Errno> {
    let errno = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
    let program = launcher::filter_program(None).map_err(|_| Errno::NOENT)?;
    let listener = launcher::listen(address, backlog).map_err(|error| match error {
        launcher::LaunchError::Listen { reason, .. } => errno(reason),
        _ => Errno::IO,
    })?;
    let (filter_end, server_end) = link::pair().map_err(errno)?;
    let (control, theirs) = link::pair().map_err(errno)?;
    let (_, ledger) = Ledger::create().map_err(errno)?;
    let mut command = Command::new(program);
    command.arg("serve").args(filters.into_iter().rev()).stdin(Stdio::null());
    let inherits: [(&str, &OwnedFd); 4] = [
        (environment::LISTEN, &listener),
        (environment::DOWNSTREAM, &filter_end),
        (environment::LEDGER, &ledger),
        (environment::CONTROL, &theirs),
    ];
    let numbers: Vec<RawFd> = inherits.iter().map(|(_, fd)| fd.as_raw_fd()).collect();
    for (name, fd) in inherits {
        command.env(name, fd.as_raw_fd().to_string());
    }
    command.env_remove("LD_PRELOAD");
    // SAFETY: only async-signal-safe calls between fork and exec, on the child's own descriptors.
    unsafe {
        command.pre_exec(move || {
            for &fd in &numbers {
                libc::fcntl(fd, libc::F_SETFD, 0);
            }
            Ok(())
        });
    }
    // It leaves a process behind that is nobody's child, so that the server's own waits never see it.
    let mut child = command.spawn().map_err(errno)?;
    let _ = child.wait();
    drop((theirs, listener, filter_end));
    let mut said = [0u8; 1];
    let ready = loop {
        match rustix::net::recv(&control, &mut said[..], rustix::net::RecvFlags::empty()) {
            Err(Errno::INTR) => {}
            other => break other.is_ok_and(|(got, _)| got == 1),
        }
    };
    match said[0] {
        word::READY if ready => {}
        2 if ready => return Err(Errno::INVAL),
        _ => return Err(Errno::CHILD),
    }
    let handle = rustix::io::fcntl_dupfd_cloexec(&server_end, 3)?;
    let chain = server::chain(handle, &ledger).map_err(errno)?;
    let fd = server_end.into_raw_fd();
    server::listen(fd, chain, address)?;
    Ok(fd)
}
