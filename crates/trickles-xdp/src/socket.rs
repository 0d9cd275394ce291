//! An AF_XDP socket that receives: its memory, the ring that gives frames to the kernel, and the one that brings them back.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

/// Frames of a socket, all with the kernel until a packet comes.
const FRAMES: u32 = 4096;
const FRAME_BYTES: usize = 2048;

/// Memory shared with the kernel.
#[derive(Debug)]
struct Mapping {
    start: *mut u8,
    bytes: usize,
}

impl Mapping {
    fn new(fd: RawFd, bytes: usize, offset: i64) -> io::Result<Self> {
        let private = fd < 0;
        let kind = if private { libc::MAP_PRIVATE | libc::MAP_ANONYMOUS } else { libc::MAP_SHARED };
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(ptr::null_mut(), bytes, access, kind | libc::MAP_POPULATE, fd, offset)
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { start: start.cast(), bytes })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: made by mmap with this length, and nobody has it after its owner.
        unsafe { libc::munmap(self.start.cast(), self.bytes) };
    }
}

/// A ring of `FRAMES` descriptors; this side either produces or consumes.
#[derive(Debug)]
struct Ring {
    memory: Mapping,
    producer: usize,
    consumer: usize,
    descriptors: usize,
    local: u32,
}

impl Ring {
    fn map(fd: RawFd, offsets: &libc::xdp_ring_offset, item: usize, page: i64) -> io::Result<Self> {
        let at =
            |offset: u64| usize::try_from(offset).map_err(|_| io::Error::from(io::ErrorKind::InvalidData));
        let descriptors = at(offsets.desc)?;
        let memory = Mapping::new(fd, descriptors + FRAMES as usize * item, page)?;
        let (producer, consumer) = (at(offsets.producer)?, at(offsets.consumer)?);
        Ok(Self { memory, producer, consumer, descriptors, local: 0 })
    }

    fn index(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: the kernel says that an aligned u32 lies there, within the mapping; it is shared, hence atomic.
        unsafe { &*self.memory.start.add(offset).cast::<AtomicU32>() }
    }

    /// Where descriptor `at`, modulo the ring, lies.
    fn slot<T>(&self, at: u32) -> *mut T {
        // SAFETY: the index is masked to the ring's length, whose bytes were mapped.
        unsafe { self.memory.start.add(self.descriptors).cast::<T>().add((at & (FRAMES - 1)) as usize) }
    }

    /// Gives a frame to the kernel. Its ring has as many places as there are frames.
    fn produce(&mut self, address: u64) {
        // SAFETY: `slot` points into the mapping; the kernel does not read the slot before the index below is stored.
        unsafe { self.slot::<u64>(self.local).write(address) };
        self.local = self.local.wrapping_add(1);
        self.index(self.producer).store(self.local, Ordering::Release);
    }

    fn peek(&self) -> Option<libc::xdp_desc> {
        if self.index(self.producer).load(Ordering::Acquire) == self.local {
            return None;
        }
        // SAFETY: the kernel has written the slot before it stored the index read above.
        Some(unsafe { self.slot::<libc::xdp_desc>(self.local).read() })
    }

    fn consume(&mut self) {
        self.local = self.local.wrapping_add(1);
        self.index(self.consumer).store(self.local, Ordering::Release);
    }
}

/// A socket on one queue of an interface.
#[derive(Debug)]
pub(crate) struct XdpSocket {
    fd: OwnedFd,
    received: Ring,
    fill: Ring,
    frames: Mapping,
}

impl AsRawFd for XdpSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl XdpSocket {
    pub(crate) fn bind(interface: u32, queue: u32) -> io::Result<Self> {
        // SAFETY: no pointers; a descriptor that is returned is ours.
        let fd = unsafe {
            let fd = libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(fd)
        };
        let raw = fd.as_raw_fd();
        let frames = Mapping::new(-1, FRAMES as usize * FRAME_BYTES, 0)?;
        // SAFETY: a plain C struct for which zeros are valid.
        let mut register: libc::xdp_umem_reg = unsafe { std::mem::zeroed() };
        (register.addr, register.len) = (frames.start as u64, frames.bytes as u64);
        register.chunk_size = FRAME_BYTES as u32;
        set(raw, libc::XDP_UMEM_REG, &register)?;
        // The kernel insists on a completion ring although nothing is sent here.
        for ring in [libc::XDP_UMEM_FILL_RING, libc::XDP_UMEM_COMPLETION_RING, libc::XDP_RX_RING] {
            set(raw, ring, &FRAMES)?;
        }
        // SAFETY: a plain C struct for which zeros are valid.
        let mut offsets: libc::xdp_mmap_offsets = unsafe { std::mem::zeroed() };
        let mut length = size_of_val(&offsets) as libc::socklen_t;
        // SAFETY: `offsets` has the length that is stated.
        let got = unsafe {
            let into = (&raw mut offsets).cast();
            libc::getsockopt(raw, libc::SOL_XDP, libc::XDP_MMAP_OFFSETS, into, &raw mut length)
        };
        if got < 0 {
            return Err(io::Error::last_os_error());
        }
        let page = libc::XDP_UMEM_PGOFF_FILL_RING as i64;
        let mut fill = Ring::map(raw, &offsets.fr, size_of::<u64>(), page)?;
        let received = Ring::map(raw, &offsets.rx, size_of::<libc::xdp_desc>(), libc::XDP_PGOFF_RX_RING)?;
        for frame in 0..FRAMES {
            fill.produce(u64::from(frame) * FRAME_BYTES as u64);
        }
        // SAFETY: a plain C struct for which zeros are valid.
        let mut address: libc::sockaddr_xdp = unsafe { std::mem::zeroed() };
        address.sxdp_family = libc::AF_XDP as u16;
        (address.sxdp_ifindex, address.sxdp_queue_id) = (interface, queue);
        // Every driver can copy.
        address.sxdp_flags = libc::XDP_COPY;
        // SAFETY: `address` has the length that is stated.
        let bound =
            unsafe { libc::bind(raw, (&raw const address).cast(), size_of_val(&address) as libc::socklen_t) };
        if bound < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { fd, received, fill, frames })
    }

    /// Shows the next frame to `each`, if there is one, and gives it back to the kernel.
    pub(crate) fn take<T>(&mut self, each: impl FnOnce(&[u8]) -> T) -> Option<T> {
        let descriptor = self.received.peek()?;
        let (at, length) = (usize::try_from(descriptor.addr).ok()?, descriptor.len as usize);
        let inside = at.checked_add(length).is_some_and(|end| end <= self.frames.bytes);
        let frame: &[u8] = match inside {
            // SAFETY: within the frames; the kernel does not write to one that it has handed over.
            true => unsafe { std::slice::from_raw_parts(self.frames.start.add(at), length) },
            false => &[],
        };
        let result = each(frame);
        self.received.consume();
        self.fill.produce((at / FRAME_BYTES * FRAME_BYTES) as u64);
        Some(result)
    }
}

fn set<T>(fd: RawFd, option: libc::c_int, value: &T) -> io::Result<()> {
    // SAFETY: `value` has the length that is stated.
    let done = unsafe {
        let length = size_of::<T>() as libc::socklen_t;
        libc::setsockopt(fd, libc::SOL_XDP, option, ptr::from_ref(value).cast(), length)
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
