//! Waits: epoll_wait, poll, select. A process that waits for a connection that lingers is woken for other clients too.

use std::time::{Duration, Instant};

use libc::{c_int, epoll_event, fd_set, nfds_t, pollfd, size_t, timespec, timeval};
use tidegate_conditioning::server::{self, WaitAlone, Waited};

use crate::fail;
use crate::next::next;

/// Waits by `real`, which is given where events go, for how many there is room, and whether it may wait: not if there
/// are events already.
fn wait(
    epoll: c_int,
    events: *mut epoll_event,
    most: c_int,
    real: impl Fn(*mut epoll_event, c_int, bool) -> c_int,
) -> c_int {
    let mut told = 0;
    let _wait = server::waits(epoll, |bits, data| {
        if told >= most || events.is_null() {
            return false;
        }
        // SAFETY: the caller passes room for `most` events.
        unsafe { events.add(told as usize).write_unaligned(epoll_event { events: bits, u64: data }) };
        told += 1;
        true
    });
    if told == 0 {
        return real(events, most, true);
    }
    if told == most {
        return told;
    }
    // SAFETY: as above, and there is room for more.
    told + real(unsafe { events.add(told as usize) }, most - told, false).max(0)
}

/// epoll_wait(2)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_wait(
    epoll: c_int,
    events: *mut epoll_event,
    most: c_int,
    timeout: c_int,
) -> c_int {
    wait(epoll, events, most, |events, most, may_wait| {
        let timeout = if may_wait { timeout } else { 0 };
        next!(epoll_wait(epoll: c_int, events: *mut epoll_event, most: c_int, timeout: c_int) -> c_int)
    })
}

/// epoll_pwait(2)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_pwait(
    epoll: c_int,
    events: *mut epoll_event,
    most: c_int,
    timeout: c_int,
    signals: *const libc::sigset_t,
) -> c_int {
    wait(epoll, events, most, |events, most, may_wait| {
        let timeout = if may_wait { timeout } else { 0 };
        next!(epoll_pwait(
            epoll: c_int, events: *mut epoll_event, most: c_int, timeout: c_int, signals: *const libc::sigset_t
        ) -> c_int)
    })
}

/// epoll_pwait2(2)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_pwait2(
    epoll: c_int,
    events: *mut epoll_event,
    most: c_int,
    timeout: *const libc::timespec,
    signals: *const libc::sigset_t,
) -> c_int {
    let none = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    wait(epoll, events, most, |events, most, may_wait| {
        let timeout = if may_wait { timeout } else { &raw const none };
        next!(epoll_pwait2(
            epoll: c_int, events: *mut epoll_event, most: c_int, timeout: *const libc::timespec,
            signals: *const libc::sigset_t
        ) -> c_int)
    })
}

/// The program is about to wait, for `fd` alone if that is one, at most `timeout`: what came of it, if it waited here.
fn waits_alone(fd: Option<c_int>, timeout: Option<Duration>) -> Result<Option<Waited>, rustix::io::Errno> {
    match fd.and_then(WaitAlone::of) {
        Some(wait) => wait.wait(timeout).map(Some),
        None => {
            server::expire();
            Ok(None)
        }
    }
}

/// The descriptor, if it is the only one, and waited for to be readable.
fn only(descriptors: *const pollfd, count: nfds_t) -> Option<c_int> {
    if count != 1 {
        return None;
    }
    // SAFETY: the caller passes `count` structures, as for the system call.
    let only = unsafe { descriptors.as_ref() }.filter(|only| only.events & libc::POLLIN != 0);
    only.map(|only| only.fd)
}

/// poll(2)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poll(descriptors: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
    let wanted = u64::try_from(timeout).ok().map(Duration::from_millis);
    unpark_among(descriptors, count);
    if ended(descriptors, count) {
        return answered(descriptors, Waited::Readable);
    }
    match waits_alone(only(descriptors, count), wanted) {
        Ok(None) => poll_hiding(descriptors, count, wanted, |limit| {
            let timeout = limit.map_or(timeout, milliseconds);
            next!(poll(descriptors: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int)
        }),
        Ok(Some(waited)) => answered(descriptors, waited),
        Err(error) => fail(error),
    }
}

/// Waits by `real`, as [`poll_hiding`] does; with `looks`, a listening socket is among the descriptors that another thread
/// may shut down, and each wait begins anew by `again`.
fn wait_looking(
    looks: bool,
    wanted: Option<Duration>,
    again: impl Fn(),
    real: impl Fn(Option<Duration>) -> c_int,
) -> c_int {
    if !looks || wanted.is_some_and(|wanted| wanted <= server::LOOK) {
        return real(None);
    }
    let until = wanted.map(|wanted| Instant::now() + wanted);
    loop {
        let told = real(limit(until, false, true));
        if told != 0 || is_over(until) {
            return told;
        }
        again();
    }
}

/// For how long a wait goes on that hides something, until it looks whether to do so still: another thread may end the
/// response.
const HIDDEN: Duration = Duration::from_millis(20);

fn milliseconds(time: Duration) -> c_int {
    c_int::try_from(time.as_micros().div_ceil(1000)).unwrap_or(c_int::MAX)
}

/// How long to wait at most while something is hidden, or a listening socket is to be looked after, or neither.
fn limit(until: Option<Instant>, is_hiding: bool, looks: bool) -> Option<Duration> {
    let left = until.map(|until| until.saturating_duration_since(Instant::now()));
    let look = is_hiding.then_some(HIDDEN).or(looks.then_some(server::LOOK));
    left.into_iter().chain(look).min()
}

fn is_over(until: Option<Instant>) -> bool {
    until.is_some_and(|until| Instant::now() >= until)
}

/// Waits by `real`, which is given the longest time if that is another than the caller's, and tells of no request that
/// is not the server's turn to read: a client that has sent two would keep the server from waiting.
fn poll_hiding(
    descriptors: *mut pollfd,
    count: nfds_t,
    wanted: Option<Duration>,
    real: impl Fn(Option<Duration>) -> c_int,
) -> c_int {
    const READ: i16 = libc::POLLIN | libc::POLLRDNORM;
    if descriptors.is_null() {
        return real(None);
    }
    // SAFETY: the caller passes `count` structures, as for the system call.
    let mut numbers = (0..count as usize).map(|index| unsafe { (*descriptors.add(index)).fd });
    let looks = numbers.any(server::may_be_shut_down);
    let told = wait_looking(looks, wanted, || {}, &real);
    if told <= 0 {
        return told;
    }
    // SAFETY: as above; the system call has just written to them.
    let all = unsafe { std::slice::from_raw_parts_mut(descriptors, count as usize) };
    let tell = |all: &mut [pollfd]| {
        for one in &mut *all {
            if one.revents & READ != 0 && server::hides(one.fd) {
                one.revents &= !READ;
            }
        }
        all.iter().filter(|one| one.revents != 0).count() as c_int
    };
    let told = tell(all);
    if told > 0 {
        return told;
    }
    let until = wanted.map(|wanted| Instant::now() + wanted);
    let mut asked = Vec::with_capacity(all.len());
    while !is_over(until) {
        asked.clear();
        asked.extend(all.iter().map(|one| one.events));
        let mut is_hiding = false;
        for one in all.iter_mut().filter(|one| one.events & READ != 0) {
            if server::hides(one.fd) {
                // The end of a client that has sent requests before it comes behind them.
                let end = if server::is_left(one.fd) { 0 } else { libc::POLLRDHUP };
                one.events = one.events & !READ | end;
                is_hiding = true;
            }
        }
        let told = real(limit(until, is_hiding, looks));
        for (one, asked) in all.iter_mut().zip(&asked) {
            let is_hidden = one.events != *asked;
            one.events = *asked;
            if is_hidden && one.revents & libc::POLLRDHUP != 0 {
                one.revents = one.revents & (*asked | !libc::POLLRDHUP) | *asked & READ;
            }
        }
        if told < 0 {
            return told;
        }
        let told = tell(all);
        if told > 0 {
            return told;
        }
    }
    0
}

fn unpark_among(descriptors: *const pollfd, count: nfds_t) {
    let count = if descriptors.is_null() { 0 } else { count };
    // SAFETY: the caller passes `count` structures, as for the system call.
    server::unpark_for((0..count).map(|index| unsafe { descriptors.add(index as usize).read().fd }));
}

/// Whether the program waits for nothing but the end of a connection that is over.
fn ended(descriptors: *const pollfd, count: nfds_t) -> bool {
    // SAFETY: the caller passes `count` structures, as for the system call.
    let only = unsafe { descriptors.as_ref() }.filter(|only| count == 1 && only.events == libc::POLLIN);
    only.is_some_and(|only| server::is_ended(only.fd))
}

/// What a wait for one descriptor returns. A read tells whether it is readable because the connection is broken.
fn answered(descriptors: *mut pollfd, waited: Waited) -> c_int {
    let is_readable = matches!(waited, Waited::Readable);
    // SAFETY: the caller's own structure, which was looked at before the wait.
    unsafe { (*descriptors).revents = if is_readable { libc::POLLIN } else { 0 } };
    c_int::from(is_readable)
}

/// poll(2) as fortified programs call it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __poll_chk(
    descriptors: *mut pollfd,
    count: nfds_t,
    timeout: c_int,
    room: size_t,
) -> c_int {
    if room / size_of::<pollfd>() < count as usize {
        std::process::abort();
    }
    // SAFETY: the caller's own arguments.
    unsafe { poll(descriptors, count, timeout) }
}

/// ppoll(2); with a mask of signals, it is the kernel's to change it and wait at once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ppoll(
    descriptors: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    signals: *const libc::sigset_t,
) -> c_int {
    // SAFETY: the caller passes a time or nothing.
    let wanted = unsafe { timeout.as_ref() }.map(|time| duration(time.tv_sec, time.tv_nsec));
    unpark_among(descriptors, count);
    match waits_alone(only(descriptors, count).filter(|_| signals.is_null()), wanted) {
        Ok(None) => poll_hiding(descriptors, count, wanted, |limit| {
            let limit = limit.map(|limit| timespec {
                tv_sec: limit.as_secs() as libc::time_t,
                tv_nsec: limit.subsec_nanos().into(),
            });
            let timeout = limit.as_ref().map_or(timeout, std::ptr::from_ref);
            next!(ppoll(
                descriptors: *mut pollfd, count: nfds_t, timeout: *const timespec, signals: *const libc::sigset_t
            ) -> c_int)
        }),
        Ok(Some(waited)) => answered(descriptors, waited),
        Err(error) => fail(error),
    }
}

fn duration(seconds: i64, nanoseconds: i64) -> Duration {
    Duration::new(seconds.try_into().unwrap_or(0), nanoseconds.clamp(0, 999_999_999) as u32)
}

/// The descriptor, if it is the only one, and waited for to be readable.
fn only_of_sets(
    most: c_int,
    read: *const fd_set,
    write: *const fd_set,
    except: *const fd_set,
) -> Option<c_int> {
    // SAFETY: the caller passes sets or nothing, as for the system call; bits below FD_SETSIZE are looked at.
    let is_in = |fd: &c_int, set: *const fd_set| !set.is_null() && unsafe { libc::FD_ISSET(*fd, set) };
    let all = 0..most.min(libc::FD_SETSIZE as c_int);
    let mut waited_for = all.filter(|fd| is_in(fd, read) || is_in(fd, write) || is_in(fd, except));
    let only = waited_for.next().filter(|fd| is_in(fd, read) && !is_in(fd, write))?;
    waited_for.next().is_none().then_some(only)
}

type Sets = [*mut fd_set; 3];

/// select(2)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn select(
    most: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    // SAFETY: the caller passes a time or nothing.
    let wanted = unsafe { timeout.as_ref() }.map(|time| duration(time.tv_sec, time.tv_usec * 1000));
    select_among(most, [read, write, except], wanted, true, |[read, write, except], limit| {
        let mut limit = limit.map(|limit| timeval {
            tv_sec: limit.as_secs() as libc::time_t,
            tv_usec: limit.subsec_micros().into(),
        });
        let timeout = limit.as_mut().map_or(timeout, std::ptr::from_mut);
        next!(select(
            most: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *mut timeval
        ) -> c_int)
    })
}

/// pselect(2); with a mask of signals, it is the kernel's to change it and wait at once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pselect(
    most: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *const timespec,
    signals: *const libc::sigset_t,
) -> c_int {
    // SAFETY: the caller passes a time or nothing.
    let wanted = unsafe { timeout.as_ref() }.map(|time| duration(time.tv_sec, time.tv_nsec));
    select_among(most, [read, write, except], wanted, signals.is_null(), |[read, write, except], limit| {
        let limit = limit.map(|limit| timespec {
            tv_sec: limit.as_secs() as libc::time_t,
            tv_nsec: limit.subsec_nanos().into(),
        });
        let timeout = limit.as_ref().map_or(timeout, std::ptr::from_ref);
        next!(pselect(
            most: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set,
            timeout: *const timespec, signals: *const libc::sigset_t
        ) -> c_int)
    })
}

/// Waits for what the sets say by `real`, which is given the longest time if that is another than the caller's.
fn select_among(
    most: c_int,
    sets: Sets,
    wanted: Option<Duration>,
    may_wait_alone: bool,
    real: impl Fn(Sets, Option<Duration>) -> c_int,
) -> c_int {
    let [read, write, except] = sets;
    // SAFETY: the caller passes sets or nothing, as for the system call.
    let is_in = |fd: c_int, set: *const fd_set| !set.is_null() && unsafe { libc::FD_ISSET(fd, set) };
    server::unpark_for(
        (0..most.min(libc::FD_SETSIZE as c_int))
            .filter(|fd| [read, write, except].into_iter().any(|set| is_in(*fd, set))),
    );
    let only = || only_of_sets(most, read, write, except);
    match waits_alone((may_wait_alone && server::lingers()).then(only).flatten(), wanted) {
        Ok(Some(Waited::TimedOut)) => {
            let at_once = Some(Duration::ZERO);
            select_hiding(most, sets, at_once, |sets, limit| real(sets, limit.or(at_once)))
        }
        Ok(_) => select_hiding(most, sets, wanted, real),
        Err(error) => fail(error),
    }
}

/// As [`poll_hiding`], for sets of descriptors.
fn select_hiding(
    most: c_int,
    sets: Sets,
    wanted: Option<Duration>,
    real: impl Fn(Sets, Option<Duration>) -> c_int,
) -> c_int {
    let read = sets[0];
    if read.is_null() || most > libc::FD_SETSIZE as c_int {
        return real(sets, None);
    }
    // SAFETY: the caller passes sets of FD_SETSIZE bits or nothing, as for the system call.
    let asked = unsafe { sets.map(|set| set.as_ref().copied()) };
    let until = wanted.map(|wanted| Instant::now() + wanted);
    let hide = |set: *mut fd_set| {
        // SAFETY: as above; bits below FD_SETSIZE are looked at.
        let is_in = |fd: c_int| unsafe { libc::FD_ISSET(fd, set) };
        let mut hidden = 0;
        for fd in (0..most).filter(|&fd| is_in(fd) && server::hides(fd)) {
            // SAFETY: as above.
            unsafe { libc::FD_CLR(fd, set) };
            hidden += 1;
        }
        hidden
    };
    let ask_again = || {
        for (set, asked) in sets.iter().zip(&asked) {
            if let Some(asked) = asked {
                // SAFETY: the caller's own set, of which the copy was made.
                unsafe { set.write(*asked) };
            }
        }
    };
    // SAFETY: as above; bits below FD_SETSIZE are looked at.
    let looks = (0..most).any(|fd| unsafe { libc::FD_ISSET(fd, read) } && server::may_be_shut_down(fd));
    let told = wait_looking(looks, wanted, ask_again, |limit| real(sets, limit));
    if told <= 0 {
        return told;
    }
    let told = told - hide(read);
    if told > 0 {
        return told;
    }
    while !is_over(until) {
        ask_again();
        let is_hiding = hide(read) > 0;
        let told = real(sets, limit(until, is_hiding, looks));
        if told < 0 {
            return told;
        }
        let told = if told > 0 { told - hide(read) } else { 0 };
        if told > 0 {
            return told;
        }
    }
    0
}
