//! System calls as libc's syscall(2) makes them, for those that it is asked for: no lookup of another definition, so
//! that signal handlers and children of vfork(2) may call it, and nothing that could come back here.

use libc::c_long;

/// Makes the call; errno is set as libc does.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) fn call(number: c_long, arguments: [c_long; 6]) -> c_long {
    // SAFETY: what the caller asked for, with its own arguments.
    let result = unsafe { tidegate_conditioning::server::raw::call(number, arguments) };
    result.unwrap_or_else(|error| crate::fail(error).into())
}

/// On other machines by libc's own.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) fn call(number: c_long, [a, b, c, d, e, f]: [c_long; 6]) -> c_long {
    crate::next::next!(
        syscall(number: c_long, a: c_long, b: c_long, c: c_long, d: c_long, e: c_long, f: c_long) -> c_long
    )
}
