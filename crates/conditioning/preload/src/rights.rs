//! Descriptors that travel with messages (SCM_RIGHTS, unix(7)).

use std::os::fd::RawFd;

use libc::{c_int, msghdr};
use rustix::io::Errno;
use tidegate_conditioning::server::{self, Passing};

use crate::state;

/// The kernel takes no more in one message (SCM_MAX_FD).
const MOST: usize = 253;

/// The descriptors in the control data of `header`.
///
/// # Safety
/// It describes as much readable memory as it says.
unsafe fn descriptors(header: &msghdr) -> Vec<RawFd> {
    let mut found = Vec::new();
    let end = header.msg_control as usize + header.msg_controllen;
    // SAFETY: the caller's own control data, of which these give messages that lie in it.
    unsafe {
        let mut message = libc::CMSG_FIRSTHDR(header);
        while let Some(control) = message.as_ref() {
            if control.cmsg_level == libc::SOL_SOCKET && control.cmsg_type == libc::SCM_RIGHTS {
                let data = libc::CMSG_DATA(message).cast::<RawFd>();
                let bytes = control.cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
                // A length that leads out of the control data is the kernel's to refuse.
                let count = (bytes.min(end.saturating_sub(data as usize)) / size_of::<RawFd>()).min(MOST);
                found.extend((0..count).map(|index| data.add(index).read_unaligned()));
            }
            message = libc::CMSG_NXTHDR(header, message);
        }
    }
    found
}

fn has_control(header: &msghdr) -> bool {
    !header.msg_control.is_null() && header.msg_controllen >= size_of::<libc::cmsghdr>()
}

/// What a message takes along that is about to be sent.
pub(crate) struct Sending(Vec<Passing>);

impl Sending {
    /// Looks for connections among what `header` takes along.
    ///
    /// # Safety
    /// As for sendmsg(2).
    ///
    /// # Errors
    /// One of them cannot go.
    pub(crate) unsafe fn of(header: &msghdr) -> Result<Self, Errno> {
        let mut sending = Self(Vec::new());
        if !has_control(header) {
            return Ok(sending);
        }
        // SAFETY: as the caller promises.
        for fd in unsafe { descriptors(header) } {
            match server::pass(fd) {
                Ok(passing) => sending.0.extend(passing),
                Err(error) => {
                    sending.failed();
                    return Err(error);
                }
            }
        }
        Ok(sending)
    }

    /// The message was not sent.
    pub(crate) fn failed(self) {
        self.0.into_iter().for_each(Passing::failed);
    }
}

/// A message was received: connections among what came with it are known from now on.
///
/// # Safety
/// As for recvmsg(2), which has just filled `header`.
pub(crate) unsafe fn received(header: &msghdr, flags: c_int) {
    if flags & libc::MSG_PEEK == 0 && has_control(header) {
        // SAFETY: as the caller promises.
        for fd in unsafe { descriptors(header) } {
            state::received(fd, flags & libc::MSG_CMSG_CLOEXEC != 0);
        }
    }
}
