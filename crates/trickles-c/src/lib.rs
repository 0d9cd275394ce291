//! The minisocket calls of the paper's Figure 8 for C programs; `include/tidegate_trickles.h` is their documentation.
//!
//! A descriptor's driver and application run on one thread, so that nothing lies between them; the table of descriptors
//! is locked only to find one.

mod client;
mod host;

use host::{Host, MinisocketC};
use libc::{c_char, c_int, c_void};
use std::collections::HashMap;
use std::ffi::CStr;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Open descriptors. Each is locked by the one thread that uses it.
static HOSTS: Mutex<Option<HashMap<c_int, Arc<Mutex<Host>>>>> = Mutex::new(None);

/// `tiovec` of the header.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Tiovec {
    pkt: c_int,
    request: u32,
    offset: u64,
    data: *const c_void,
    length: usize,
}

/// `fiovec` of the header.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Fiovec {
    pkt: c_int,
    request: u32,
    offset: u64,
    file: c_int,
    file_offset: u64,
    length: usize,
}

/// `msk_want` of the header.
#[repr(C)]
pub struct Want {
    request: u32,
    length: u32,
    offset: u64,
    valid_start: u64,
    valid_end: u64,
    opaque: *const c_void,
    opaque_length: usize,
}

/// `msk_input` of the header.
#[repr(C)]
pub struct Input {
    request: u32,
    last: u32,
    consumed: u64,
    data: *const c_void,
    length: usize,
    opaque: *const c_void,
    opaque_length: usize,
}

/// `msk_ucont` of the header.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Ucont {
    kind: u32,
    request: u32,
    start: u64,
    end: u64,
}

/// `mskdesc` of the header.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Mskdesc {
    msk: *mut MinisocketC,
    vec: *const Tiovec,
    count: c_int,
}

/// `extract_mskdesc_in` of the header.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ExtractIn {
    msk: *mut MinisocketC,
}

/// `msk_collection` of the header.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Collection {
    data: *mut c_void,
    length: usize,
}

fn fail(error: c_int) -> c_int {
    // SAFETY: the pointer is to the calling thread's own error number.
    unsafe { *libc::__errno_location() = error };
    -1
}

fn answer(result: Result<c_int, c_int>) -> c_int {
    result.unwrap_or_else(fail)
}

fn system(error: &io::Error) -> c_int {
    match (error.raw_os_error(), error.kind()) {
        (Some(number), _) => number,
        (None, io::ErrorKind::TimedOut) => libc::ETIMEDOUT,
        (None, io::ErrorKind::ConnectionReset) => libc::ECONNRESET,
        (None, io::ErrorKind::ConnectionRefused) => libc::ECONNREFUSED,
        (None, io::ErrorKind::InvalidInput) => libc::EINVAL,
        (None, io::ErrorKind::NotFound) => libc::ENOENT,
        _ => libc::EIO,
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn with_host<T>(fd: c_int, f: impl FnOnce(&mut Host) -> Result<T, c_int>) -> Result<T, c_int> {
    let host = lock(&HOSTS).as_ref().and_then(|hosts| hosts.get(&fd).cloned()).ok_or(libc::EBADF)?;
    let mut host = lock(&host);
    f(&mut host)
}

/// # Safety
/// `text` is null or a C string.
unsafe fn text<'t>(text: *const c_char) -> Result<&'t str, c_int> {
    if text.is_null() {
        return Err(libc::EINVAL);
    }
    // SAFETY: a C string by the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| libc::EINVAL)
}

/// # Safety
/// `data` is readable for `length` elements, or `length` is 0 or negative.
unsafe fn slice<'s, T>(data: *const T, length: c_int) -> Result<&'s [T], c_int> {
    match usize::try_from(length) {
        Ok(0) => Ok(&[]),
        // SAFETY: readable by the caller's promise.
        Ok(length) if !data.is_null() => Ok(unsafe { std::slice::from_raw_parts(data, length) }),
        _ => Err(libc::EINVAL),
    }
}

/// No object is larger: a negative number that became a length is.
const MAX_BYTES: usize = isize::MAX as usize;

/// # Safety
/// `data` is readable for `length` bytes, or `length` is 0 or exceeds [`MAX_BYTES`].
unsafe fn bytes<'s>(data: *const c_void, length: usize) -> Result<&'s [u8], c_int> {
    match length {
        0 => Ok(&[]),
        // SAFETY: readable by the caller's promise.
        1..=MAX_BYTES if !data.is_null() => Ok(unsafe { std::slice::from_raw_parts(data.cast(), length) }),
        _ => Err(libc::EINVAL),
    }
}

/// # Safety
/// `msk` is null or a minisocket that has not ended.
unsafe fn minisocket<'m>(msk: *const MinisocketC) -> Result<&'m MinisocketC, c_int> {
    // SAFETY: valid by the caller's promise.
    unsafe { msk.as_ref() }.ok_or(libc::EINVAL)
}

fn count(number: usize) -> c_int {
    c_int::try_from(number).unwrap_or(c_int::MAX)
}

/// See the header.
///
/// # Safety
/// Both arguments are C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msk_listen(address: *const c_char, key_file: *const c_char, flags: c_int) -> c_int {
    // SAFETY: the caller's promise.
    let (address, key_file) = match unsafe { (text(address), text(key_file)) } {
        (Ok(address), Ok(key_file)) => (address, key_file),
        _ => return fail(libc::EINVAL),
    };
    answer(Host::listen(address, key_file, flags & 1 != 0).map(|host| {
        let fd = host.descriptor();
        lock(&HOSTS).get_or_insert_with(HashMap::new).insert(fd, Arc::new(Mutex::new(host)));
        fd
    }))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn msk_port(fd: c_int) -> c_int {
    answer(with_host(fd, |host| host.port().map(c_int::from)))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn msk_close(fd: c_int) -> c_int {
    let known = lock(&HOSTS).as_mut().and_then(|hosts| hosts.remove(&fd)).is_some();
    if known || client::close(fd) { 0 } else { fail(libc::EBADF) }
}

/// See the header.
///
/// # Safety
/// `events` has room for `max` pointers; minisockets of earlier calls that were not detached are not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msk_events(
    fd: c_int,
    events: *mut *mut MinisocketC,
    max: c_int,
    timeout_ms: c_int,
) -> c_int {
    let Some(max) = usize::try_from(max).ok().filter(|&max| max > 0 && !events.is_null()) else {
        return fail(libc::EINVAL);
    };
    answer(with_host(fd, |host| {
        let arrived = host.events(max, timeout_ms)?;
        for (index, &event) in arrived.iter().enumerate() {
            // SAFETY: there is room for `max` pointers, and no more events than that.
            unsafe { events.add(index).write(event) };
        }
        Ok(count(arrived.len()))
    }))
}

/// See the header.
///
/// # Safety
/// `msk` is a minisocket that has not ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msk_kind(msk: *const MinisocketC) -> c_int {
    // SAFETY: the caller's promise.
    answer(unsafe { minisocket(msk) }.map(MinisocketC::kind))
}

/// See the header.
///
/// # Safety
/// `msk` is a minisocket that has not ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msk_packets(msk: *const MinisocketC) -> c_int {
    // SAFETY: the caller's promise.
    answer(unsafe { minisocket(msk) }.map(|msk| count(msk.socket.packets())))
}

/// See the header.
///
/// # Safety
/// `msk` is a minisocket that has not ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msk_room(msk: *const MinisocketC, pkt: c_int) -> c_int {
    // SAFETY: the caller's promise.
    let msk = unsafe { minisocket(msk) };
    answer(msk.and_then(|msk| Ok(count(msk.socket.room(msk.packet(pkt)?)))))
}

/// See the header.
///
/// # Safety
/// `msk` is a minisocket that has not ended, `input` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msk_get_input(msk: *const MinisocketC, n: c_int, input: *mut Input) -> c_int {
    // SAFETY: the caller's promise.
    let found = unsafe { minisocket(msk) }.map(|msk| usize::try_from(n).ok().and_then(|n| msk.inputs.get(n)));
    let (Ok(Some(found)), false) = (found, input.is_null()) else { return fail(libc::EINVAL) };
    let value = Input {
        request: found.request,
        last: found.last.into(),
        consumed: found.consumed,
        data: found.data.as_ptr().cast(),
        length: found.data.len(),
        opaque: found.opaque.as_ptr().cast(),
        opaque_length: found.opaque.len(),
    };
    // SAFETY: writable by the caller's promise.
    unsafe { input.write(value) };
    0
}

/// See the header.
///
/// # Safety
/// `msk` is a minisocket that has not ended, `want` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msk_get_want(msk: *const MinisocketC, n: c_int, want: *mut Want) -> c_int {
    // SAFETY: the caller's promise.
    let found = unsafe { minisocket(msk) }.map(|msk| usize::try_from(n).ok().and_then(|n| msk.wants.get(n)));
    let (Ok(Some(found)), false) = (found, want.is_null()) else { return fail(libc::EINVAL) };
    let value = Want {
        request: found.request,
        length: found.length,
        offset: found.offset,
        valid_start: found.valid.start,
        valid_end: found.valid.end,
        opaque: found.opaque.as_ptr().cast(),
        opaque_length: found.opaque.len(),
    };
    // SAFETY: writable by the caller's promise.
    unsafe { want.write(value) };
    0
}

/// See the header.
///
/// # Safety
/// `msk` has not ended, `buf` is readable for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msk_send(fd: c_int, msk: *mut MinisocketC, buf: *mut c_char, len: usize) -> c_int {
    answer(with_host(fd, |host| {
        // SAFETY: the caller's promise.
        let data = unsafe { bytes(buf.cast(), len)? };
        let sent = host.minisocket(msk)?.fill_wants(data);
        host.finish(msk)?;
        Ok(count(sent))
    }))
}

/// See the header.
///
/// # Safety
/// `msk` has not ended, `vec` is readable for `length` elements, each readable as it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msk_sendv(
    fd: c_int,
    msk: *mut MinisocketC,
    vec: *const Tiovec,
    length: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    answer(with_host(fd, |host| unsafe { send_vector(host, msk, vec, length) }))
}

/// # Safety
/// As for [`msk_sendv`].
unsafe fn send_vector(
    host: &mut Host,
    msk: *mut MinisocketC,
    vec: *const Tiovec,
    length: c_int,
) -> Result<c_int, c_int> {
    // SAFETY: the caller's promise.
    let vec = unsafe { slice(vec, length)? };
    let msk_ref = host.minisocket(msk)?;
    let mut sent = 0;
    for part in vec {
        let packet = msk_ref.packet(part.pkt)?;
        // SAFETY: the caller's promise.
        let data = unsafe { bytes(part.data, part.length) }?;
        sent += msk_ref.socket.send(packet, part.request, part.offset, data);
    }
    host.finish(msk)?;
    Ok(count(sent))
}

/// See the header.
///
/// # Safety
/// `msk` has not ended, `vec` is readable for `length` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msk_sendfilev(
    fd: c_int,
    msk: *mut MinisocketC,
    vec: *const Fiovec,
    length: c_int,
) -> c_int {
    answer(with_host(fd, |host| {
        // SAFETY: the caller's promise.
        let vec = unsafe { slice(vec, length)? };
        let msk_ref = host.minisocket(msk)?;
        let mut sent = 0;
        for part in vec {
            let packet = msk_ref.packet(part.pkt)?;
            let mut data = vec![0; part.length.min(msk_ref.socket.room(packet))];
            let offset = libc::off_t::try_from(part.file_offset).map_err(|_| libc::EINVAL)?;
            // SAFETY: the buffer is writable for its length; a wrong descriptor is an error of pread's.
            let read = unsafe { libc::pread(part.file, data.as_mut_ptr().cast(), data.len(), offset) };
            let read = usize::try_from(read).map_err(|_| system(&io::Error::last_os_error()))?;
            sent += msk_ref.socket.send(packet, part.request, part.offset, &data[..read]);
        }
        host.finish(msk)?;
        Ok(count(sent))
    }))
}

/// See the header.
///
/// # Safety
/// `msk` has not ended, `buf` is readable for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msk_setucont(
    fd: c_int,
    msk: *mut MinisocketC,
    pkt: c_int,
    buf: *mut c_char,
    len: usize,
) -> c_int {
    let set = |host: &mut Host| {
        // SAFETY: the caller's promise.
        let buffer = unsafe { bytes(buf.cast(), len)? };
        let msk = host.minisocket(msk)?;
        let (head, opaque) = buffer.split_at_checked(size_of::<Ucont>()).ok_or(libc::EINVAL)?;
        // SAFETY: `head` is as long as the structure; every bit pattern is a value, and no alignment is assumed.
        let ucont = unsafe { head.as_ptr().cast::<Ucont>().read_unaligned() };
        msk.set_continuation(pkt, ucont.kind, ucont.request, (ucont.start, ucont.end), opaque)
    };
    answer(with_host(fd, set).map(|()| 0))
}

/// See the header.
///
/// # Safety
/// `descs` is readable for `len` elements, each as for [`msk_sendv`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msk_sendbulk(fd: c_int, descs: *mut Mskdesc, len: c_int) -> c_int {
    answer(with_host(fd, |host| {
        let mut sent: c_int = 0;
        // SAFETY: the caller's promise.
        for desc in unsafe { slice(descs, len) }? {
            // SAFETY: the caller's promise.
            sent = sent.saturating_add(unsafe { send_vector(host, desc.msk, desc.vec, desc.count) }?);
        }
        Ok(sent)
    }))
}

/// See the header.
///
/// # Safety
/// `msk` has not ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msk_drop(fd: c_int, msk: *mut MinisocketC) -> c_int {
    answer(with_host(fd, |host| host.take(msk).map(|_| 0)))
}

/// See the header.
///
/// # Safety
/// `msk` has not ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msk_detach(fd: c_int, msk: *mut MinisocketC) -> c_int {
    answer(with_host(fd, |host| host.detach(msk).map(|()| 0)))
}

/// See the header.
///
/// # Safety
/// `input` is readable for `length` elements, `out` writable for `*outlen`, and `outlen` for itself.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msk_extract_events(
    fd: c_int,
    input: *mut ExtractIn,
    length: c_int,
    out: *mut Collection,
    outlen: *mut c_int,
) -> c_int {
    answer(with_host(fd, |host| {
        // SAFETY: the caller's promise.
        let events = unsafe { slice(input, length) }?;
        if outlen.is_null() || (out.is_null() && !events.is_empty()) {
            return Err(libc::EINVAL);
        }
        // SAFETY: readable by the caller's promise.
        if usize::try_from(unsafe { *outlen }).map_or(true, |room| room < events.len()) {
            return Err(libc::ENOSPC);
        }
        for (index, event) in events.iter().enumerate() {
            // What was extracted before an error is the caller's to free.
            // SAFETY: writable by the caller's promise.
            unsafe { *outlen = count(index) };
            let extracted = host.extract(event.msk)?;
            // SAFETY: malloc takes any size.
            let data = unsafe { libc::malloc(extracted.len()) };
            if data.is_null() {
                return Err(libc::ENOMEM);
            }
            // SAFETY: as large as what is copied; the two do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(extracted.as_ptr(), data.cast(), extracted.len()) };
            // SAFETY: there is room for as many as there are events.
            unsafe { out.add(index).write(Collection { data, length: extracted.len() }) };
        }
        // SAFETY: writable by the caller's promise.
        unsafe { *outlen = length };
        Ok(0)
    }))
}

/// See the header.
///
/// # Safety
/// `events` is readable for `length` elements, each readable as it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msk_install_events(fd: c_int, events: *mut Collection, length: c_int) -> c_int {
    answer(with_host(fd, |host| {
        // SAFETY: the caller's promise.
        for event in unsafe { slice(events, length) }? {
            // SAFETY: the caller's promise.
            host.install(unsafe { bytes(event.data, event.length) }?)?;
        }
        Ok(0)
    }))
}

/// See the header.
///
/// # Safety
/// `msk` has not ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msk_end(
    fd: c_int,
    msk: *mut MinisocketC,
    pkt: c_int,
    request: u32,
    length: u64,
) -> c_int {
    answer(with_host(fd, |host| {
        let msk = host.minisocket(msk)?;
        let packet = msk.packet(pkt)?;
        msk.socket.end(packet, request, length).map(|()| 0).map_err(|_| libc::ENOSPC)
    }))
}

/// See the header.
///
/// # Safety
/// `msk` has not ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msk_reset(
    fd: c_int,
    msk: *mut MinisocketC,
    pkt: c_int,
    request: u32,
    code: u16,
) -> c_int {
    answer(with_host(fd, |host| {
        let msk = host.minisocket(msk)?;
        let packet = msk.packet(pkt)?;
        msk.socket.reset(packet, request, code).map(|()| 0).map_err(|_| libc::ENOSPC)
    }))
}

/// See the header.
///
/// # Safety
/// `address` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msk_connect(address: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    answer(unsafe { text(address) }.and_then(client::connect))
}

/// See the header.
///
/// # Safety
/// `req` is readable for `reqlen` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msk_request(fd: c_int, req: *mut c_char, reqlen: c_int, reservelen: c_int) -> c_int {
    let Ok(reserve) = usize::try_from(reservelen) else { return fail(libc::EINVAL) };
    // SAFETY: the caller's promise.
    let request = unsafe { slice(req.cast::<u8>().cast_const(), reqlen) };
    answer(request.and_then(|request| client::request(fd, request, reserve).map(count)))
}

/// See the header.
///
/// # Safety
/// `buf` is writable for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msk_response(fd: c_int, buf: *mut c_void, len: usize) -> c_int {
    if buf.is_null() {
        return fail(libc::EINVAL);
    }
    answer(client::response(fd, len).map(|data| {
        // SAFETY: no more than `len` bytes, for which `buf` is writable.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), buf.cast(), data.len()) };
        count(data.len())
    }))
}
