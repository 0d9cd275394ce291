//! The next definition of an interposed function: libc's, or that of another preload library.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// Where one function's next definition is, looked up at its first call.
pub(crate) struct Next {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Next {
    pub(crate) const fn new(name: &'static CStr) -> Self {
        Self { name, address: AtomicPtr::new(std::ptr::null_mut()) }
    }

    pub(crate) fn address(&self) -> *mut c_void {
        let known = self.address.load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        // SAFETY: a terminated name; dlsym is thread-safe.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        if found.is_null() {
            // A libc without the function cannot have called it through us.
            std::process::abort();
        }
        self.address.store(found, Ordering::Relaxed);
        found
    }
}

/// Calls the next definition of a C function: `next!(read(fd: c_int, ...) -> ssize_t)`.
macro_rules! next {
    ($name:ident($($argument:ident: $kind:ty),*) -> $result:ty) => {{
        static NEXT: $crate::next::Next = match ::std::ffi::CStr::from_bytes_with_nul(
            concat!(stringify!($name), "\0").as_bytes(),
        ) {
            Ok(name) => $crate::next::Next::new(name),
            Err(_) => panic!("a name with a NUL"),
        };
        type Function = unsafe extern "C" fn($($kind),*) -> $result;
        // SAFETY: the symbol of this name has this type in every libc for Linux; the arguments are the caller's own.
        unsafe { ::std::mem::transmute::<*mut ::std::ffi::c_void, Function>(NEXT.address())($($argument),*) }
    }};
}
pub(crate) use next;
