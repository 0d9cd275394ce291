//! What a chain costs of which the programs do nothing: a message and its descriptor are received and sent on, and that
//! is all. No filter can cost less than the kernel takes for that and for the switch of processes. And the least of any
//! way to pass something on to another process: to wake it, and nothing else.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use rustix::event::EventfdFlags;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use tidegate_bench::SERVER_CORE;
use tidegate_bench::peers::pinned;

use crate::Error;

/// As long as the bundle of a short request.
const MESSAGE: [u8; 100] = [0; 100];

/// What a process of a row passes on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Passes {
    /// A message with a descriptor.
    Descriptors,
    /// Nothing: it is woken, and wakes the next.
    Wakes,
}

/// A process that passes on until its input ends: one call to receive and one to send for each message, or for each
/// wake-up.
///
/// # Errors
/// When standard input and output are no links, or no event counters.
pub fn pass_on(wakes: bool) -> std::io::Result<()> {
    let (input, output) = (std::io::stdin(), std::io::stdout());
    if wakes {
        loop {
            await_wake(input.as_fd())?;
            wake(output.as_fd())?;
        }
    }
    while let Some(descriptor) = receive(input.as_fd())? {
        send(output.as_fd(), descriptor.as_fd())?;
    }
    Ok(())
}

fn wake(next: BorrowedFd<'_>) -> std::io::Result<()> {
    rustix::io::write(next, &1u64.to_ne_bytes())?;
    Ok(())
}

fn await_wake(own: BorrowedFd<'_>) -> std::io::Result<()> {
    rustix::io::read(own, &mut [0u8; 8][..])?;
    Ok(())
}

fn send(to: BorrowedFd<'_>, descriptor: BorrowedFd<'_>) -> std::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor];
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    rustix::net::sendmsg(to, &[IoSlice::new(&MESSAGE)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The descriptor of the next message; `None` at the end.
fn receive(from: BorrowedFd<'_>) -> std::io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut message = [0; MESSAGE.len()];
    let flags = RecvFlags::CMSG_CLOEXEC;
    rustix::net::recvmsg(from, &mut [IoSliceMut::new(&mut message)], &mut control, flags)?;
    let mut received = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    Ok(received.next())
}

/// Processes in a row on the server's core, and both ends of the row.
struct Row {
    passes: Passes,
    processes: Vec<Child>,
    first: OwnedFd,
    last: OwnedFd,
}

impl Row {
    fn start(length: usize, passes: Passes) -> Result<Self, Error> {
        let link = || match passes {
            Passes::Descriptors => {
                let (family, flags) = (AddressFamily::UNIX, SocketFlags::CLOEXEC);
                rustix::net::socketpair(family, SocketType::SEQPACKET, flags, None)
                    .map_err(|error| Error::Load(error.into()))
            }
            Passes::Wakes => {
                let counter = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)
                    .map_err(|error| Error::Load(error.into()))?;
                Ok((counter.try_clone().map_err(Error::Load)?, counter))
            }
        };
        let (first, mut input) = link()?;
        let mut processes = Vec::new();
        for _ in 0..length {
            let (output, next) = link()?;
            let mut command = Command::new(std::env::current_exe().map_err(Error::Load)?);
            command.arg("pass-on");
            if passes == Passes::Wakes {
                command.arg("--wakes");
            }
            let mut command = pinned(SERVER_CORE, &command);
            command.stdin(Stdio::from(input)).stdout(Stdio::from(output));
            processes.push(command.spawn().map_err(Error::Load)?);
            input = next;
        }
        Ok(Self { passes, processes, first, last: input })
    }

    fn cpu_s(&self) -> f64 {
        let of = |process: &Child| {
            let text = std::fs::read_to_string(format!("/proc/{}/schedstat", process.id()));
            text.ok()?.split(' ').next()?.parse::<f64>().ok()
        };
        self.processes.iter().filter_map(of).sum::<f64>() / 1e9
    }

    fn go_round(&self) -> Result<(), Error> {
        let gone = match self.passes {
            Passes::Descriptors => send(self.first.as_fd(), self.first.as_fd())
                .and_then(|()| receive(self.last.as_fd()).map(drop)),
            Passes::Wakes => wake(self.first.as_fd()).and_then(|()| await_wake(self.last.as_fd())),
        };
        gone.map_err(Error::Load)
    }
}

impl Drop for Row {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// Microseconds of latency and of processor time that each process of a row takes for a message, one message at a time.
///
/// # Errors
/// When a process cannot be started.
pub(super) fn measure(count: usize, passes: Passes) -> Result<(f64, f64), Error> {
    const LENGTH: usize = 10;
    let median = |length: usize| -> Result<(f64, f64), Error> {
        let row = Row::start(length, passes)?;
        for _ in 0..count / 10 + 1 {
            row.go_round()?;
        }
        let before_s = row.cpu_s();
        let mut latencies_us = Vec::with_capacity(count);
        for _ in 0..count {
            let began = Instant::now();
            row.go_round()?;
            latencies_us.push(began.elapsed().as_secs_f64() * 1e6);
        }
        latencies_us.sort_by(f64::total_cmp);
        let cpu_us = (row.cpu_s() - before_s) * 1e6 / count as f64;
        Ok((latencies_us[count / 2], cpu_us))
    };
    let (one, all) = (median(1)?, median(LENGTH)?);
    let further = (LENGTH - 1) as f64;
    Ok(((all.0 - one.0) / further, (all.1 - one.1) / further))
}
