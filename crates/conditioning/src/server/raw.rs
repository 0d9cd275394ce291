//! System calls that no library sees: libc's syscall(2) is interposed by the preload library, which this is a part of.

use libc::c_long;
use rustix::io::Errno;

/// Makes the call.
///
/// # Safety
/// As of the call.
///
/// # Errors
/// As the call.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub unsafe fn call(number: c_long, arguments: [c_long; 6]) -> Result<c_long, Errno> {
    let result = by_kernel(number, arguments);
    // The kernel's errors are the last page of addresses (errno-base.h's greatest is 4095).
    match i32::try_from(result) {
        Ok(error @ -4095..0) => Err(Errno::from_raw_os_error(-error)),
        _ => Ok(result),
    }
}

/// On other machines by libc's own.
///
/// # Safety
/// As of the call.
///
/// # Errors
/// As the call.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub unsafe fn call(number: c_long, [a, b, c, d, e, f]: [c_long; 6]) -> Result<c_long, Errno> {
    // SAFETY: what the caller asked for, with its own arguments.
    let result = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    if result == -1 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
    }
    Ok(result)
}

#[cfg(target_arch = "x86_64")]
fn by_kernel(number: c_long, [a, b, c, d, e, f]: [c_long; 6]) -> c_long {
    let result;
    // SAFETY: what the caller asked for, with its own arguments; the kernel changes these three registers (syscall(2)).
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
        );
    }
    result
}

#[cfg(target_arch = "aarch64")]
fn by_kernel(number: c_long, [a, b, c, d, e, f]: [c_long; 6]) -> c_long {
    let result;
    // SAFETY: what the caller asked for, with its own arguments.
    unsafe {
        std::arch::asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") a => result,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x5") f,
        );
    }
    result
}
