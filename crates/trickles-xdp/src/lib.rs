//! AF_XDP for servers of Trickles in the format of TCP: an XDP program leads their segments, and nothing else, past the
//! kernel's stack to sockets of this process.
//!
//! Segments that it leaves alone (an interface without it, options that are not aligned) are taken by AF_PACKET as before.
//! With the last handle the program leaves the interface, also when the process is killed.

mod socket;

use libbpf_rs::{Link, MapCore, MapFlags, Object, ObjectBuilder};
use socket::XdpSocket;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Mutex;
use tidegate_trickles::tcp::PacketSource;

/// Queues that are served; segments of further ones go to AF_PACKET.
const MAX_QUEUES: u32 = 64;
/// Bytes of an Ethernet header.
const ETHERNET_BYTES: usize = 14;
static PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/trickles.bpf.o"));

/// The segments of one interface to one port.
pub struct XdpSource {
    sockets: Mutex<Vec<XdpSocket>>,
    /// Readable when one of the sockets is.
    poll: OwnedFd,
    _link: Link,
    _object: Object,
}

impl std::fmt::Debug for XdpSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("XdpSource").field("poll", &self.poll).finish_non_exhaustive()
    }
}

// SAFETY: libbpf's object and link are only kept to be dropped, which any thread may do; the sockets' rings are behind a
// mutex.
unsafe impl Send for XdpSource {}
// SAFETY: as above; nothing is reached through a shared reference but the mutex and a descriptor.
unsafe impl Sync for XdpSource {}

fn bpf(error: libbpf_rs::Error) -> io::Error {
    io::Error::new(error.kind().into_io(), error.to_string())
}

/// The kind of a libbpf error for those who match on it.
trait IntoIo {
    fn into_io(self) -> io::ErrorKind;
}

impl IntoIo for libbpf_rs::ErrorKind {
    fn into_io(self) -> io::ErrorKind {
        match self {
            libbpf_rs::ErrorKind::PermissionDenied => io::ErrorKind::PermissionDenied,
            libbpf_rs::ErrorKind::NotFound => io::ErrorKind::NotFound,
            _ => io::ErrorKind::Other,
        }
    }
}

impl XdpSource {
    /// Takes the segments to `port` that arrive on `interface`.
    ///
    /// # Errors
    /// There is no such interface, privileges are missing, or another XDP program has the interface.
    pub fn open(interface: &str, port: u16) -> io::Result<Self> {
        let name = CString::new(interface).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: `name` is a C string that outlives the call.
        let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
        if index == 0 {
            return Err(io::Error::last_os_error());
        }
        // What libbpf has to say comes back as an error; it need not print it.
        libbpf_rs::set_print(None);
        let object = ObjectBuilder::default().open_memory(PROGRAM).map_err(bpf)?.load().map_err(bpf)?;
        let wanted = u32::from(port).to_ne_bytes();
        map(&object, "port")?.update(&0_u32.to_ne_bytes(), &wanted, MapFlags::ANY).map_err(bpf)?;
        // SAFETY: epoll_create1 takes no pointers; a descriptor that it returns is ours.
        let poll = unsafe {
            let fd = libc::epoll_create1(libc::EPOLL_CLOEXEC);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(fd)
        };
        let mut sockets = Vec::new();
        for queue in 0..queues(interface) {
            let socket = XdpSocket::bind(index, queue)?;
            let descriptor = socket.as_raw_fd();
            let value = u32::try_from(descriptor).unwrap_or_default().to_ne_bytes();
            map(&object, "sockets")?.update(&queue.to_ne_bytes(), &value, MapFlags::ANY).map_err(bpf)?;
            let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: queue.into() };
            // SAFETY: both descriptors are open, and `event` outlives the call.
            if unsafe { libc::epoll_ctl(poll.as_raw_fd(), libc::EPOLL_CTL_ADD, descriptor, &raw mut event) }
                < 0
            {
                return Err(io::Error::last_os_error());
            }
            sockets.push(socket);
        }
        // Last: the program finds its sockets in place. The kernel takes the driver's own mode where it has one.
        let mut programs = object.progs_mut();
        let program = programs.find(|program| program.name() == "tidegate_trickles");
        let index = i32::try_from(index).map_err(|_| io::ErrorKind::InvalidInput)?;
        let link = program.ok_or(io::ErrorKind::NotFound)?.attach_xdp(index).map_err(bpf)?;
        drop(programs);
        Ok(Self { sockets: Mutex::new(sockets), poll, _link: link, _object: object })
    }
}

fn map<'o>(object: &'o Object, name: &str) -> io::Result<libbpf_rs::Map<'o>> {
    object.maps().find(|map| map.name() == name).ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// Receive queues of an interface.
fn queues(interface: &str) -> u32 {
    let listed = std::fs::read_dir(format!("/sys/class/net/{interface}/queues"));
    let receiving = listed.map_or(1, |entries| {
        entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with("rx-")).count()
    });
    u32::try_from(receiving).unwrap_or(1).clamp(1, MAX_QUEUES)
}

impl AsFd for XdpSource {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.poll.as_fd()
    }
}

impl PacketSource for XdpSource {
    fn poll_fd(&self) -> BorrowedFd<'_> {
        self.as_fd()
    }

    fn next(&self, packet: &mut [u8]) -> Option<usize> {
        let mut sockets = self.sockets.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        for socket in sockets.iter_mut() {
            let taken = socket.take(|frame| {
                let ip = frame.get(ETHERNET_BYTES..)?;
                packet.get_mut(..ip.len())?.copy_from_slice(ip);
                Some(ip.len())
            });
            match taken {
                // Longer than any segment of ours: nobody's loss.
                Some(None) => return Some(0),
                Some(length) => return length,
                None => {}
            }
        }
        None
    }
}
