//! Which system calls of a statically linked server are questions (seccomp_unotify(2)).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// What is asked about. Everything else runs at full speed.
const CALLS: [libc::c_long; 6] = [
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
];

/// So are getsockopt and setsockopt, of every level but SOL_SOCKET, and of these there: what stands in a TCP socket's
/// place has the others itself.
const OF_SOCKETS: [libc::c_int; 5] =
    [libc::SO_TYPE, libc::SO_PROTOCOL, libc::SO_DOMAIN, libc::SO_ACCEPTCONN, libc::SO_LINGER];

#[cfg(target_arch = "x86_64")]
const AUDIT_ARCH: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const AUDIT_ARCH: u32 = 0xc000_00b7;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const AUDIT_ARCH: u32 = 0;

const CALLS_AT: usize = 3;
const OPTIONS_AT: usize = CALLS_AT + CALLS.len() + 2;
const NAMES_AT: usize = OPTIONS_AT + 3;
const ALLOW_AT: usize = NAMES_AT + OF_SOCKETS.len();
const ASK_AT: usize = ALLOW_AT + 1;

/// The filter, for bpf(4)'s old machine. A jump counts from the step after it.
fn program() -> [libc::sock_filter; ASK_AT + 1] {
    // struct seccomp_data: the call's number at 0, the architecture at 4, arguments of 64 bits from 16 on, of which
    // these machines have the lower half first.
    const NUMBER: u32 = 0;
    const ARCH: u32 = 4;
    const LEVEL: u32 = 24;
    const NAME: u32 = 32;
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let load = |at| step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, at);
    let equal = |from: usize, value: u32, yes: usize, no: usize| {
        let by = |to: usize| (to - from - 1) as u8;
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, by(yes), by(no), value)
    };
    let answer = |with| step(libc::BPF_RET | libc::BPF_K, 0, 0, with);
    let mut program = [answer(libc::SECCOMP_RET_ALLOW); ASK_AT + 1];
    program[0] = load(ARCH);
    program[1] = equal(1, AUDIT_ARCH, 2, ALLOW_AT);
    program[2] = load(NUMBER);
    for (at, &call) in (CALLS_AT..).zip(&CALLS) {
        program[at] = equal(at, call as u32, ASK_AT, at + 1);
    }
    program[OPTIONS_AT - 2] = equal(OPTIONS_AT - 2, libc::SYS_getsockopt as u32, OPTIONS_AT, OPTIONS_AT - 1);
    program[OPTIONS_AT - 1] = equal(OPTIONS_AT - 1, libc::SYS_setsockopt as u32, OPTIONS_AT, ALLOW_AT);
    program[OPTIONS_AT] = load(LEVEL);
    program[OPTIONS_AT + 1] = equal(OPTIONS_AT + 1, libc::SOL_SOCKET as u32, OPTIONS_AT + 2, ASK_AT);
    program[OPTIONS_AT + 2] = load(NAME);
    for (at, &name) in (NAMES_AT..).zip(&OF_SOCKETS) {
        program[at] = equal(at, name as u32, ASK_AT, at + 1);
    }
    program[ASK_AT] = answer(libc::SECCOMP_RET_USER_NOTIF);
    program
}

/// Makes [`CALLS`], and those about options of sockets that a relay has not, of this process and its descendants
/// questions to whoever holds the descriptor, which is sent over `to`. For the time between fork and exec: nothing here
/// allocates.
pub fn install(to: BorrowedFd<'_>) -> io::Result<()> {
    let mut program = program();
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    let set = || {
        let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
        // SAFETY: the program outlives the call, which copies it.
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program) }
    };
    let mut listener = set();
    if listener < 0 {
        // Without privileges, a filter is allowed to those who cannot gain any.
        rustix::thread::set_no_new_privs(true)?;
        listener = set();
    }
    if listener < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just opened it for us.
    let listener = unsafe { OwnedFd::from_raw_fd(listener as RawFd) };
    crate::link::send_descriptor(to, listener.as_fd())
}
