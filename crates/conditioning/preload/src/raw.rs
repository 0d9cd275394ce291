//! System calls as libc's syscall(2) makes them, for those that it is asked for: no lookup of another definition, so
//! that signal handlers and children of vfork(2) may call it, and nothing that could come back here.

use libc::c_long;

/// Makes the call; errno is set as libc does.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) fn call(number: c_long, arguments: [c_long; 6]) -> c_long {
    let result = by_kernel(number, arguments);
    // The kernel's errors are the last page of addresses (errno-base.h's greatest is 4095).
    match i32::try_from(result) {
        Ok(error @ -4095..0) => crate::fail(rustix::io::Errno::from_raw_os_error(-error)).into(),
        _ => result,
    }
}

/// On other machines by libc's own.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) fn call(number: c_long, [a, b, c, d, e, f]: [c_long; 6]) -> c_long {
    crate::next::next!(
        syscall(number: c_long, a: c_long, b: c_long, c: c_long, d: c_long, e: c_long, f: c_long) -> c_long
    )
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
