//! What a process has registered with its epoll sets, as the kernel lists it (proc_pid_fdinfo(5)): a socket may be
//! registered before it listens, and what then takes its place is another file, of which no set knows.

use std::fs;
use std::os::fd::RawFd;
use std::path::Path;

use super::connection::Interest;
use super::{MOST_INTERESTS, add, listening};

/// The registrations of the socket `fd` of `process`, which is a directory of /proc.
pub fn registrations(process: &str, fd: RawFd) -> Vec<Interest> {
    let process = Path::new("/proc").join(process);
    let file = fs::read_link(process.join(format!("fd/{fd}"))).unwrap_or_default();
    let inode = file.to_str().and_then(|name| name.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok());
    let Some(inode) = inode else { return Vec::new() };
    let descriptors = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    let is_set = |file: &Path| file.to_str() == Some("anon_inode:[eventpoll]");
    let sets =
        descriptors.filter(|descriptor| fs::read_link(descriptor.path()).is_ok_and(|file| is_set(&file)));
    let of_set = |epoll: RawFd| {
        let text = fs::read_to_string(process.join(format!("fdinfo/{epoll}"))).unwrap_or_default();
        text.lines()
            .filter_map(|line| listed(epoll, line, inode))
            .filter(|one| one.fd == fd)
            .collect::<Vec<_>>()
    };
    let numbers = sets.filter_map(|descriptor| descriptor.file_name().to_str()?.parse().ok());
    numbers.flat_map(of_set).take(MOST_INTERESTS).collect()
}

/// A line of an epoll descriptor's fdinfo, if it is about the file of this inode:
/// `tfd: 5 events: 80000019 data: 7ffe5  pos:0 ino:d7 sdev:8`.
fn listed(epoll: RawFd, line: &str, inode: u64) -> Option<Interest> {
    let words = line.split([':', ' ', '\t']).filter(|word| !word.is_empty()).collect::<Vec<_>>();
    let value = |name| words.chunks_exact(2).find_map(|pair| (pair[0] == name).then_some(pair[1]));
    let hexadecimal = |name| u64::from_str_radix(value(name)?, 16).ok();
    Some(Interest {
        epoll,
        fd: value("tfd")?.parse().ok()?,
        events: u32::try_from(hexadecimal("events")?).ok()?,
        data: hexadecimal("data")?,
    })
    .filter(|_| hexadecimal("ino") == Some(inode))
}

/// The listening descriptor that they are of is another file now: registers it as the one before it.
pub fn carry_over(registrations: Vec<Interest>) {
    for interest in registrations {
        add(interest);
        listening::registered(interest, libc::EPOLL_CTL_ADD);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd};

    use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

    use super::*;

    #[test]
    fn registrations_are_those_of_the_file_that_has_the_number_now() {
        let (socket, other) = crate::link::pair().unwrap();
        let sets = [(); 2].map(|()| epoll::create(CreateFlags::CLOEXEC).unwrap());
        let data = u64::MAX - 5;
        let edge = EventFlags::IN | EventFlags::ET;
        epoll::add(&sets[0], &socket, EventData::new_u64(data), edge).unwrap();
        epoll::add(&sets[0], &other, EventData::new_u64(1), EventFlags::OUT).unwrap();
        let of = |fd: RawFd| registrations("self", fd);
        let found = of(socket.as_raw_fd());
        let [found] = found[..] else { panic!("{found:?}") };
        assert_eq!((found.epoll, found.fd, found.data), (sets[0].as_raw_fd(), socket.as_raw_fd(), data));
        assert!(EventFlags::from_bits_retain(found.events).contains(edge));
        epoll::add(&sets[1], &socket, EventData::new_u64(2), EventFlags::IN).unwrap();
        assert_eq!(of(socket.as_raw_fd()).len(), 2);
        // Its file lives on, and so do its registrations, but it has another number.
        let kept = socket.as_fd().try_clone_to_owned().unwrap();
        let number = socket.as_raw_fd();
        drop(socket);
        assert_eq!(of(number).len() + of(kept.as_raw_fd()).len(), 0);
    }
}
