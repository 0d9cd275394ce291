//! In which PID namespace this process is (pid_namespaces(7)): the number by which it knows itself is nobody's, or
//! another's, elsewhere.

use std::sync::atomic::{AtomicU32, Ordering};

static OWN: AtomicU32 = AtomicU32::new(0);

/// The number of this process's namespace; 0: not known.
pub fn own() -> u32 {
    match OWN.load(Ordering::Relaxed) {
        0 => look(),
        known => known,
    }
}

/// Looks for it: a child may be in another one than its parent. Where there is no /proc, such as in a directory that
/// has become the root, it is taken for the parent's.
pub fn look() -> u32 {
    if let Ok(file) = rustix::fs::stat(c"/proc/self/ns/pid") {
        OWN.store(file.st_ino as u32, Ordering::Relaxed);
    }
    OWN.load(Ordering::Relaxed)
}
