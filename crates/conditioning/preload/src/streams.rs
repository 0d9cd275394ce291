//! Streams on conditioned descriptors (fdopen(3)): libc reads and writes a stream of its own by calls that nobody sees,
//! so one is made that goes through this library, request by request.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use libc::{FILE, c_char, c_int, c_void, off64_t, size_t, ssize_t};
use rustix::io::Errno;
use tidegate_conditioning::server;

use crate::next::next;
use crate::{fail, reads, sockets, writes};

/// cookie_io_functions_t of fopencookie(3).
#[repr(C)]
#[derive(Clone, Copy)]
struct Functions {
    read: Option<extern "C" fn(*mut c_void, *mut c_char, size_t) -> ssize_t>,
    write: Option<extern "C" fn(*mut c_void, *const c_char, size_t) -> ssize_t>,
    seek: Option<extern "C" fn(*mut c_void, *mut off64_t, c_int) -> c_int>,
    close: Option<extern "C" fn(*mut c_void) -> c_int>,
}

unsafe extern "C" {
    fn fopencookie(cookie: *mut c_void, mode: *const c_char, functions: Functions) -> *mut FILE;
    fn ftrylockfile(stream: *mut FILE) -> c_int;
    fn funlockfile(stream: *mut FILE);
    fn fflush_unlocked(stream: *mut FILE) -> c_int;
    static stdout: *mut FILE;
}

/// A socket has no position: `seek` fails as it does there.
const FUNCTIONS: Functions =
    Functions { read: Some(read), write: Some(write), seek: None, close: Some(close) };

/// One of our streams; its address, as a number, is the stream's cookie.
struct Stream {
    file: usize,
    fd: c_int,
    cookie: usize,
}

/// As many as there can be conditioned descriptors; a program that exceeds this gets none.
const MOST: usize = server::table::DESCRIPTORS;

static STREAMS: Mutex<Vec<Stream>> = Mutex::new(Vec::new());
/// Length of [`STREAMS`], so that a program without any pays one load.
static COUNT: AtomicUsize = AtomicUsize::new(0);
static NEXT_COOKIE: AtomicUsize = AtomicUsize::new(1);

fn streams() -> MutexGuard<'static, Vec<Stream>> {
    STREAMS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn descriptor_of(cookie: *mut c_void) -> Option<c_int> {
    let _in_use = server::in_use();
    streams().iter().find(|stream| stream.cookie == cookie as usize).map(|stream| stream.fd)
}

extern "C" fn read(cookie: *mut c_void, buffer: *mut c_char, length: size_t) -> ssize_t {
    match descriptor_of(cookie) {
        // SAFETY: libc passes room for `length` bytes.
        Some(fd) => unsafe { reads::read(fd, buffer.cast(), length) },
        None => fail(Errno::BADF) as ssize_t,
    }
}

/// Returns 0, not −1, for an error (fopencookie(3)).
extern "C" fn write(cookie: *mut c_void, buffer: *const c_char, length: size_t) -> ssize_t {
    let Some(fd) = descriptor_of(cookie) else { return 0 };
    let mut done = 0;
    // A stream's own writes go on until everything is written.
    while done < length {
        // SAFETY: libc passes `length` readable bytes, of which `done` were written.
        let written = unsafe { writes::write(fd, buffer.add(done).cast(), length - done) };
        match usize::try_from(written) {
            Ok(written) if written > 0 => done += written,
            _ => break,
        }
    }
    done as ssize_t
}

extern "C" fn close(cookie: *mut c_void) -> c_int {
    let _in_use = server::in_use();
    let mut streams = streams();
    let Some(at) = streams.iter().position(|stream| stream.cookie == cookie as usize) else { return 0 };
    let fd = streams.swap_remove(at).fd;
    COUNT.store(streams.len(), Ordering::Release);
    drop(streams);
    // SAFETY: the descriptor was given to the stream, which is ending.
    unsafe { sockets::close(fd) }
}

/// The descriptor of a stream that this library made.
pub(crate) fn descriptor(file: *mut FILE) -> Option<c_int> {
    if COUNT.load(Ordering::Acquire) == 0 {
        return None;
    }
    let _in_use = server::in_use();
    streams().iter().find(|stream| stream.file == file as usize).map(|stream| stream.fd)
}

/// The program ends: what is still buffered goes out before its connections end, which libc would do after. A stream
/// that another thread is using is left to it.
pub(crate) fn flush_all() {
    // Most programs have none, and end as they would without.
    if COUNT.load(Ordering::Acquire) == 0 && !server::is_ours(libc::STDOUT_FILENO) {
        return;
    }
    let mut files: Vec<usize> = {
        let _in_use = server::in_use();
        streams().iter().map(|stream| stream.file).collect()
    };
    // A connection in its place, as a program in the style of inetd(8) has it that does all by itself.
    if server::is_ours(libc::STDOUT_FILENO) {
        // SAFETY: libc's own variable, which programs rarely change, and not while they end.
        files.push(unsafe { stdout } as usize);
    }
    for file in files {
        let file = file as *mut FILE;
        // SAFETY: a stream that was not closed; libc's own functions for it.
        unsafe {
            if ftrylockfile(file) == 0 {
                fflush_unlocked(file);
                funlockfile(file);
            }
        }
    }
}

/// fdopen(3)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
    if !server::is_ours(fd) {
        return next!(fdopen(fd: c_int, mode: *const c_char) -> *mut FILE);
    }
    let cookie = NEXT_COOKIE.fetch_add(1, Ordering::Relaxed);
    let _in_use = server::in_use();
    let mut streams = streams();
    if streams.len() >= MOST {
        fail(Errno::MFILE);
        return std::ptr::null_mut();
    }
    // SAFETY: the caller's own mode; the functions live as long as the program, and a cookie is a number only.
    let file = unsafe { fopencookie(cookie as *mut c_void, mode, FUNCTIONS) };
    if !file.is_null() {
        streams.push(Stream { file: file as usize, fd, cookie });
        COUNT.store(streams.len(), Ordering::Release);
    }
    file
}

/// fileno(3)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fileno(file: *mut FILE) -> c_int {
    match descriptor(file) {
        Some(fd) => fd,
        None => next!(fileno(file: *mut FILE) -> c_int),
    }
}

/// fileno(3) of a stream that the caller has locked.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fileno_unlocked(file: *mut FILE) -> c_int {
    match descriptor(file) {
        Some(fd) => fd,
        None => next!(fileno_unlocked(file: *mut FILE) -> c_int),
    }
}
