//! The few system calls that no crate wraps.

use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use libbpf_rs::query::LinkInfo;
use libbpf_rs::{MapCore, MapHandle, libbpf_sys};
use rustix::thread::CapabilitySet;

use crate::GateError;

/// The clock that the kernel programs read, in nanoseconds.
pub(crate) fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let seconds = Duration::from_secs(u64::try_from(now.tv_sec).unwrap_or(0));
    // Over 500 years after boot this would not fit.
    (seconds.as_nanos() as u64).saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
}

/// A time in nanoseconds; 584 years and more are as good as for ever.
pub(crate) fn saturated_ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The index of an interface of the calling thread's network namespace.
pub(crate) fn interface_index(name: &str) -> Result<i32, GateError> {
    let missing = || GateError::NoInterface { name: name.to_owned() };
    let text = CString::new(name).map_err(|_| missing())?;
    // SAFETY: `text` is a terminated string that outlives the call.
    let index = unsafe { libc::if_nametoindex(text.as_ptr()) };
    if index == 0 { Err(missing()) } else { i32::try_from(index).map_err(|_| missing()) }
}

/// The name of an interface of the calling thread's network namespace.
pub(crate) fn interface_name(index: u32) -> Option<String> {
    let mut name = [0u8; libc::IF_NAMESIZE];
    // SAFETY: the buffer has the size that the call asks for.
    let found = unsafe { libc::if_indextoname(index, name.as_mut_ptr().cast()) };
    if found.is_null() {
        return None;
    }
    let end = name.iter().position(|byte| *byte == 0)?;
    String::from_utf8(name[..end].to_vec()).ok()
}

/// Fails for an interface that is not there, or that no program fits because it carries no Ethernet frames (a tunnel).
pub fn check_interface(name: &str) -> Result<(), GateError> {
    interface_index(name)?;
    if carries_ethernet(name)? { Ok(()) } else { Err(GateError::NotEthernet { name: name.to_owned() }) }
}

/// Whether what passes an interface of the calling thread's network namespace are Ethernet frames, by the hardware type
/// (ARPHRD) that the kernel gives it.
fn carries_ethernet(name: &str) -> Result<bool, GateError> {
    let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::DGRAM, None)
        .map_err(GateError::io("opening a socket"))?;
    // SAFETY: the structure is plain numbers, for which zero is a value.
    let mut request: libc::ifreq = unsafe { MaybeUninit::zeroed().assume_init() };
    let room = request.ifr_name.len() - 1;
    for (to, from) in request.ifr_name[..room].iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    // SAFETY: the call reads the terminated name and writes an address, both in `request`.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFHWADDR as _, &mut request) } != 0 {
        return Err(GateError::io("asking for the kind of the interface")(io::Error::last_os_error()));
    }
    // SAFETY: the call succeeded and wrote this one of the union's members.
    let kind = unsafe { request.ifr_ifru.ifru_hwaddr.sa_family };
    Ok(matches!(kind, libc::ARPHRD_ETHER | libc::ARPHRD_LOOPBACK))
}

/// Interfaces through which connections to these addresses come, loopback aside: a host's own connections are policed
/// when they are accepted. Fails if one of them carries no Ethernet frames (a tunnel): programs there would see
/// nothing.
pub fn interfaces_of(addresses: &[std::net::SocketAddr]) -> io::Result<Vec<String>> {
    let wildcard = addresses.iter().any(|address| address.ip().is_unspecified());
    let mut first = std::ptr::null_mut();
    // SAFETY: the call writes a pointer to a list, freed below.
    if unsafe { libc::getifaddrs(&mut first) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let (mut names, mut ethernet): (Vec<String>, Vec<String>) = Default::default();
    let mut next = first;
    while !next.is_null() {
        // SAFETY: the list's entries are valid until it is freed.
        let entry = unsafe { &*next };
        next = entry.ifa_next;
        let up = entry.ifa_flags & libc::IFF_UP as u32 != 0;
        if !up || entry.ifa_flags & libc::IFF_LOOPBACK as u32 != 0 || entry.ifa_addr.is_null() {
            continue;
        }
        // SAFETY: a name is a terminated string.
        let name = unsafe { std::ffi::CStr::from_ptr(entry.ifa_name) }.to_string_lossy().into_owned();
        // SAFETY: an address that is there has a family, and the size that its family says.
        match unsafe { address_of(entry.ifa_addr) } {
            Some(Address::Ethernet) => ethernet.push(name),
            Some(Address::Ip(ip)) => {
                let is_meant = wildcard || addresses.iter().any(|wanted| wanted.ip().to_canonical() == ip);
                if is_meant && !names.contains(&name) {
                    names.push(name);
                }
            }
            None => {}
        }
    }
    // SAFETY: the list that the call gave, once.
    unsafe { libc::freeifaddrs(first) };
    match names.iter().find(|name| !ethernet.contains(name)) {
        Some(name) => Err(io::Error::other(format!("`{name}` carries no Ethernet frames"))),
        None => Ok(names),
    }
}

/// An address of an interface.
enum Address {
    Ip(std::net::IpAddr),
    Ethernet,
}

/// # Safety
///
/// `address` points to a socket address of the size that its family says.
unsafe fn address_of(address: *const libc::sockaddr) -> Option<Address> {
    // SAFETY: every socket address begins with its family.
    match i32::from(unsafe { (*address).sa_family }) {
        libc::AF_INET => {
            // SAFETY: the family says that it is one of these; they may lie anywhere.
            let v4 = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Address::Ip(std::net::Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes()).into()))
        }
        libc::AF_INET6 => {
            // SAFETY: the family says that it is one of these; they may lie anywhere.
            let v6 = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Address::Ip(std::net::Ipv6Addr::from(v6.sin6_addr.s6_addr).into()))
        }
        libc::AF_PACKET => {
            // SAFETY: the family says that it is one of these; they may lie anywhere.
            let link = unsafe { address.cast::<libc::sockaddr_ll>().read_unaligned() };
            (link.sll_hatype == libc::ARPHRD_ETHER).then_some(Address::Ethernet)
        }
        _ => None,
    }
}

/// A number that no other network namespace has, as long as the host runs.
pub(crate) fn namespace_cookie() -> Result<u64, GateError> {
    let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None)
        .map_err(GateError::io("opening a socket"))?;
    let mut cookie = MaybeUninit::<u64>::uninit();
    let mut length = size_of::<u64>() as libc::socklen_t;
    // SAFETY: `cookie` has room for the `length` bytes that the option has.
    let status = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_NETNS_COOKIE,
            cookie.as_mut_ptr().cast(),
            &mut length,
        )
    };
    if status != 0 {
        return Err(GateError::io("asking for the network namespace")(io::Error::last_os_error()));
    }
    // SAFETY: the call succeeded and wrote all of it.
    Ok(unsafe { cookie.assume_init() })
}

/// Whether this process has what loading programs needs; only to choose between error texts. Without CAP_PERFMON the
/// verifier allows nothing that could tell of the kernel's addresses, such as comparing pointers.
pub(crate) fn may_load_programs() -> bool {
    let needed = CapabilitySet::BPF | CapabilitySet::NET_ADMIN | CapabilitySet::PERFMON;
    may_open_by_number() || has(needed)
}

/// Whether the kernel opens programs, maps and links for this process that another has made.
pub(crate) fn may_open_by_number() -> bool {
    has(CapabilitySet::SYS_ADMIN)
}

fn has(needed: CapabilitySet) -> bool {
    rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(needed))
}

/// What the kernel knows of a program: instructions that the verifier went through, and bytes of the program.
pub(crate) fn program_size(program: BorrowedFd<'_>) -> Result<(u32, u32), GateError> {
    let mut info = libbpf_sys::bpf_prog_info::default();
    let mut length = size_of::<libbpf_sys::bpf_prog_info>() as u32;
    // SAFETY: the descriptor is open and `info` has the room that `length` says.
    let status = unsafe { libbpf_sys::bpf_prog_get_info_by_fd(program.as_raw_fd(), &mut info, &mut length) };
    check(status, "reading about a program")?;
    Ok((info.verified_insns, info.xlated_prog_len))
}

/// Opens a link by its number; `None` if its holder has let it go since the number was read.
pub(crate) fn open_link(id: u32) -> Result<Option<OwnedFd>, GateError> {
    // SAFETY: takes a number and gives a descriptor or an error.
    let fd = unsafe { libbpf_sys::bpf_link_get_fd_by_id(id) };
    if fd == -libc::ENOENT {
        return Ok(None);
    }
    check(fd.min(0), "opening a link")?;
    // SAFETY: the call gave a new descriptor that nothing else owns.
    Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// Every link of the host that is there and that the kernel tells of; those of other programs come and go meanwhile.
pub(crate) fn links() -> Vec<LinkInfo> {
    let mut found = Vec::new();
    let mut id = 0;
    // SAFETY: takes a number and writes another, for which there is room.
    while unsafe { libbpf_sys::bpf_link_get_next_id(id, &mut id) } == 0 {
        if let Ok(Some(link)) = open_link(id) {
            found.extend(LinkInfo::from_fd(link.as_fd()).ok());
        }
    }
    found
}

/// Attaches a program to an interface's first hook; the link detaches when it is closed.
pub(crate) fn link_xdp(program: BorrowedFd<'_>, interface: i32, flags: u32) -> io::Result<OwnedFd> {
    let options = libbpf_sys::bpf_link_create_opts {
        sz: size_of::<libbpf_sys::bpf_link_create_opts>() as libbpf_sys::size_t,
        flags,
        ..Default::default()
    };
    // SAFETY: the descriptor is open and the options outlive the call.
    let fd =
        unsafe { libbpf_sys::bpf_link_create(program.as_raw_fd(), interface, libbpf_sys::BPF_XDP, &options) };
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(-fd));
    }
    // SAFETY: the call gave a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Detaches a link, whoever holds it.
pub(crate) fn detach_link(link: &OwnedFd) -> Result<(), GateError> {
    // SAFETY: the descriptor is open for the duration of the call.
    check(unsafe { libbpf_sys::bpf_link_detach(link.as_raw_fd()) }, "detaching")
}

/// libbpf's calls give a negated error number.
pub(crate) fn check(status: i32, doing: &'static str) -> Result<(), GateError> {
    if status < 0 {
        return Err(GateError::io(doing)(io::Error::from_raw_os_error(-status)));
    }
    Ok(())
}

/// Whether the kernel has a function that programs may call. Names are visible to everybody, addresses are not needed.
pub(crate) fn kernel_has(function: &str) -> bool {
    let Ok(symbols) = std::fs::read_to_string("/proc/kallsyms") else { return false };
    symbols.lines().any(|line| line.split_ascii_whitespace().nth(2) == Some(function))
}

/// Calls `visit` with each key and value of a hash or a trie, in batches. (libbpf-rs takes a batch that the kernel
/// ended at the border of a hash bucket for the last one.)
pub(crate) fn each_entry(map: &MapHandle, mut visit: impl FnMut(&[u8], &[u8])) -> Result<(), GateError> {
    const BATCH: u32 = 16_384;
    let (key_bytes, value_bytes) = (map.key_size() as usize, map.value_size() as usize);
    let mut keys = vec![0u8; key_bytes * BATCH as usize];
    let mut values = vec![0u8; value_bytes * BATCH as usize];
    // A place in the map: a number for a hash, a key for a trie.
    let (mut place, mut next) = (vec![0u8; key_bytes.max(8)], vec![0u8; key_bytes.max(8)]);
    let options = libbpf_sys::bpf_map_batch_opts {
        sz: size_of::<libbpf_sys::bpf_map_batch_opts>() as libbpf_sys::size_t,
        ..Default::default()
    };
    let mut begun = false;
    loop {
        let mut count = BATCH;
        let from = if begun { place.as_mut_ptr() } else { std::ptr::null_mut() };
        // SAFETY: keys and values have room for `count` entries of the map's sizes, the places for a key; the
        // descriptor is open.
        let status = unsafe {
            libbpf_sys::bpf_map_lookup_batch(
                map.as_fd().as_raw_fd(),
                from.cast(),
                next.as_mut_ptr().cast(),
                keys.as_mut_ptr().cast(),
                values.as_mut_ptr().cast(),
                &mut count,
                &options,
            )
        };
        let last = status == -libc::ENOENT;
        match status {
            _ if status == -libc::EINTR => continue,
            _ if last => {}
            _ => check(status, "reading a map")?,
        }
        let entries = keys.chunks_exact(key_bytes).zip(values.chunks_exact(value_bytes));
        entries.take(count as usize).for_each(|(key, value)| visit(key, value));
        if last {
            return Ok(());
        }
        std::mem::swap(&mut place, &mut next);
        begun = true;
    }
}
