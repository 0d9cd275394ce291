//! Programs that this one becomes or starts. One that may serve the chain gets the variables by which this library
//! finds it, although it is started with an environment of its own, as by `env -i` or systemd-socket-activate(1).
//!
//! Much of this runs in a child of vfork(2), in its parent's memory: nothing here allocates or locks.

use std::ffi::{CStr, CString};
use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::{c_char, c_int, pid_t, posix_spawn_file_actions_t, posix_spawnattr_t};
use tidegate_conditioning::neighbours::environment;
use tidegate_conditioning::server;

use crate::next::next;

/// An environment of more variables is left as it is.
const MOST_VARIABLES: usize = 1024;
/// So is one with a longer `LD_PRELOAD`.
const MOST_BYTES: usize = 4096;

const LD_PRELOAD: &str = "LD_PRELOAD";
const OURS: [&str; 4] =
    [environment::UPSTREAM, environment::LEDGER, environment::SERVER_ADDRESS, environment::LINGER];

/// The chain's environment, each variable with its name.
struct Variables {
    /// `LD_PRELOAD` with this library alone.
    library: CString,
    others: Vec<CString>,
}

/// The variable that says which descriptors listen where, or null. One is never freed, because a child of vfork(2) may
/// have it in hand: a server listens at a few addresses.
static LISTENERS: AtomicPtr<c_char> = AtomicPtr::new(std::ptr::null_mut());

/// Writes down which descriptors listen where.
pub(crate) fn remember_listeners() {
    let variable = server::described_listeners()
        .and_then(|listeners| CString::new(format!("{}={listeners}", environment::LISTENERS)).ok());
    let before = LISTENERS.load(Ordering::Acquire);
    // SAFETY: a string that was made here, and is never freed.
    let is_known = (!before.is_null()).then(|| unsafe { CStr::from_ptr(before) }) == variable.as_deref();
    if !is_known {
        LISTENERS.store(variable.map_or(std::ptr::null_mut(), CString::into_raw), Ordering::Release);
    }
}

static VARIABLES: OnceLock<Option<Variables>> = OnceLock::new();

unsafe extern "C" {
    static environ: *const *const c_char;
}

/// Writes down the environment of this program, which was started behind a chain.
pub(crate) fn remember() {
    VARIABLES.get_or_init(|| {
        let variable = |name: &str, value: &str| CString::new(format!("{name}={value}")).ok();
        let others = OURS.into_iter().filter_map(|name| variable(name, &std::env::var(name).ok()?));
        Some(Variables { library: variable(LD_PRELOAD, &library()?)?, others: others.collect() })
    });
}

/// Where this library was loaded from.
fn library() -> Option<String> {
    // SAFETY: plain data, which is filled; the address is one within this library.
    unsafe {
        let mut information: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(remember as *const libc::c_void, &raw mut information) == 0 {
            return None;
        }
        Some(CStr::from_ptr(information.dli_fname).to_str().ok()?.to_owned())
    }
}

/// The value of a variable, if it has that name.
fn value_of<'v>(variable: &'v [u8], name: &str) -> Option<&'v [u8]> {
    variable.strip_prefix(name.as_bytes())?.strip_prefix(b"=")
}

/// What is to be done with an environment.
enum Outcome {
    /// Nothing: it has all of it, or it is another chain's, or it has no room.
    Leave,
    /// Add what it lacks.
    Complete(Lack),
}

/// What an environment of `count` variables lacks.
struct Lack {
    count: usize,
    /// This library in `LD_PRELOAD`.
    library: bool,
    /// Where `LD_PRELOAD` is.
    preload: Option<usize>,
    /// Where it says which descriptors listen where, as it was once.
    listeners: Option<usize>,
    /// A bit for each of the others that it has.
    has: u32,
}

impl Variables {
    fn name(variable: &CStr) -> &[u8] {
        let bytes = variable.to_bytes();
        &bytes[..bytes.iter().position(|&byte| byte == b'=').map_or(bytes.len(), |at| at + 1)]
    }

    /// Looks through an environment.
    ///
    /// # Safety
    /// As for execve(2).
    unsafe fn look(&self, given: *const *const c_char) -> Outcome {
        let (mut count, mut preload, mut has, mut has_library) = (0, None, 0, false);
        let mut listeners = None;
        // SAFETY: as the caller promises, there are strings up to a null pointer.
        while let Some(variable) = unsafe { at(given, count) } {
            if count >= MOST_VARIABLES {
                return Outcome::Leave;
            }
            let bytes = variable.to_bytes();
            if let Some(value) = value_of(bytes, LD_PRELOAD) {
                preload = Some(count);
                let path = value_of(self.library.to_bytes(), LD_PRELOAD);
                has_library = value.split(|byte| b" :".contains(byte)).any(|one| Some(one) == path);
            }
            if value_of(bytes, environment::LISTENERS).is_some() {
                listeners = Some(count);
            }
            for (index, ours) in self.others.iter().enumerate() {
                if bytes.starts_with(Self::name(ours)) {
                    if bytes != ours.to_bytes() {
                        return Outcome::Leave;
                    }
                    has |= 1 << index;
                }
            }
            count += 1;
        }
        let has_all = has_library && has == (1 << self.others.len()) - 1;
        if has_all && listeners.is_none() && LISTENERS.load(Ordering::Acquire).is_null() {
            return Outcome::Leave;
        }
        Outcome::Complete(Lack { count, library: !has_library, preload, listeners, has })
    }
}

/// The variable at `index` of an environment that has so many.
///
/// # Safety
/// As for execve(2).
unsafe fn at<'v>(given: *const *const c_char, index: usize) -> Option<&'v CStr> {
    // Linux takes no environment for an empty one.
    if given.is_null() {
        return None;
    }
    // SAFETY: as the caller promises.
    unsafe {
        let variable = given.add(index).read();
        (!variable.is_null()).then(|| CStr::from_ptr(variable))
    }
}

/// `LD_PRELOAD` with this library before what it has already; `None`: it has it, or there is no room.
fn joined<'r>(library: &CStr, given: &CStr, room: &'r mut [u8; MOST_BYTES]) -> Option<&'r CStr> {
    let others = value_of(given.to_bytes(), LD_PRELOAD)?;
    let length = library.count_bytes();
    let end = length + 1 + others.len();
    room.get_mut(..length)?.copy_from_slice(library.to_bytes());
    *room.get_mut(length)? = b' ';
    room.get_mut(length + 1..end)?.copy_from_slice(others);
    *room.get_mut(end)? = 0;
    CStr::from_bytes_with_nul(&room[..=end]).ok()
}

/// Has `run` start a program with the environment `given`, and with the chain's if the program may serve it.
///
/// # Safety
/// As for execve(2).
unsafe fn with_chain<R>(
    given: *const *const c_char,
    may_serve: bool,
    run: impl FnOnce(*const *const c_char) -> R,
) -> R {
    let Some(Some(ours)) = VARIABLES.get().filter(|_| may_serve) else { return run(given) };
    // SAFETY: as the caller promises.
    let Outcome::Complete(lack) = (unsafe { ours.look(given) }) else { return run(given) };
    let mut bytes = [0; MOST_BYTES];
    let mut variables = [MaybeUninit::<*const c_char>::uninit(); MOST_VARIABLES + OURS.len() + 3];
    let mut length = 0;
    let mut put = |variable: *const c_char| {
        variables[length].write(variable);
        length += 1;
    };
    let replaced = lack.preload.filter(|_| lack.library);
    for index in (0..lack.count).filter(|&index| ![replaced, lack.listeners].contains(&Some(index))) {
        // SAFETY: as above, there are `count`.
        put(unsafe { given.add(index).read() });
    }
    // SAFETY: as above.
    match replaced.and_then(|index| unsafe { at(given, index) }) {
        None if lack.library => put(ours.library.as_ptr()),
        None => {}
        Some(others) => match joined(&ours.library, others, &mut bytes) {
            Some(all) => put(all.as_ptr()),
            None => return run(given),
        },
    }
    for (_, variable) in ours.others.iter().enumerate().filter(|(index, _)| lack.has & 1 << index == 0) {
        put(variable.as_ptr());
    }
    let listeners = LISTENERS.load(Ordering::Acquire);
    if !listeners.is_null() {
        put(listeners);
    }
    put(std::ptr::null());
    run(variables.as_ptr().cast())
}

/// This process is about to become another program. Says whether that may serve the chain.
fn becomes_another() -> bool {
    let may_serve = server::programs_may_serve(true);
    server::before_exit(true);
    may_serve
}

/// execve(2): connections that the new program does not inherit are let go.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execve(
    path: *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) -> c_int {
    let run = |environment: *const *const c_char| {
        next!(execve(
            path: *const c_char, arguments: *const *const c_char, environment: *const *const c_char
        ) -> c_int)
    };
    // SAFETY: the caller's own arguments.
    unsafe { with_chain(environment, becomes_another(), run) }
}

/// execv(3)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execv(path: *const c_char, arguments: *const *const c_char) -> c_int {
    // SAFETY: the caller's own arguments, and the environment as libc has it.
    unsafe { execve(path, arguments, environ) }
}

/// execvpe(3)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execvpe(
    path: *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) -> c_int {
    let run = |environment: *const *const c_char| {
        next!(execvpe(
            path: *const c_char, arguments: *const *const c_char, environment: *const *const c_char
        ) -> c_int)
    };
    // SAFETY: the caller's own arguments.
    unsafe { with_chain(environment, becomes_another(), run) }
}

/// execvp(3)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execvp(path: *const c_char, arguments: *const *const c_char) -> c_int {
    // SAFETY: the caller's own arguments, and the environment as libc has it.
    unsafe { execvpe(path, arguments, environ) }
}

/// fexecve(3)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fexecve(
    fd: c_int,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) -> c_int {
    let run = |environment: *const *const c_char| {
        next!(fexecve(
            fd: c_int, arguments: *const *const c_char, environment: *const *const c_char
        ) -> c_int)
    };
    // SAFETY: the caller's own arguments.
    unsafe { with_chain(environment, becomes_another(), run) }
}

/// execveat(2)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execveat(
    directory: c_int,
    path: *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
    flags: c_int,
) -> c_int {
    let run = |environment: *const *const c_char| {
        next!(execveat(
            directory: c_int, path: *const c_char, arguments: *const *const c_char,
            environment: *const *const c_char, flags: c_int
        ) -> c_int)
    };
    // SAFETY: the caller's own arguments.
    unsafe { with_chain(environment, becomes_another(), run) }
}

/// posix_spawn(3)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_spawn(
    process: *mut pid_t,
    path: *const c_char,
    actions: *const posix_spawn_file_actions_t,
    attributes: *const posix_spawnattr_t,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) -> c_int {
    let run = |environment: *const *const c_char| {
        next!(posix_spawn(
            process: *mut pid_t, path: *const c_char, actions: *const posix_spawn_file_actions_t,
            attributes: *const posix_spawnattr_t, arguments: *const *const c_char,
            environment: *const *const c_char
        ) -> c_int)
    };
    // SAFETY: the caller's own arguments.
    unsafe { with_chain(environment, server::programs_may_serve(false), run) }
}

/// posix_spawnp(3)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_spawnp(
    process: *mut pid_t,
    file: *const c_char,
    actions: *const posix_spawn_file_actions_t,
    attributes: *const posix_spawnattr_t,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) -> c_int {
    let run = |environment: *const *const c_char| {
        next!(posix_spawnp(
            process: *mut pid_t, file: *const c_char, actions: *const posix_spawn_file_actions_t,
            attributes: *const posix_spawnattr_t, arguments: *const *const c_char,
            environment: *const *const c_char
        ) -> c_int)
    };
    // SAFETY: the caller's own arguments.
    unsafe { with_chain(environment, server::programs_may_serve(false), run) }
}
