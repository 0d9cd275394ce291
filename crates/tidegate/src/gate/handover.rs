//! Rules, blocks and kernel programs from one process to the one that takes its place.
//!
//! Kernel programs and the block list's file belong to one process at a time. The new process begins with the same rules
//! in user space; when there is no way back, the old one lets go of its programs and the new one attaches its own. In
//! between both have the rules in force, and the blocks.

use std::fs::File;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, memfd_create};
use tidegate_gate::{Gate, GateError, ListenQueue};

use super::{Gatekeeper, attach, in_force, lock, log};

/// What the process before hands over.
#[derive(Debug)]
pub(crate) struct Handed {
    /// Of each address the sockets of its priority classes, the highest first.
    pub classes: Vec<(SocketAddr, Vec<TcpListener>)>,
    /// What is blocked, as the block list's file has it.
    pub blocks: File,
}

impl Handed {
    /// The sockets of these listeners; none where a listener has one for each data core.
    pub(super) fn by_address(mut self, listen: &[SocketAddr]) -> Vec<Vec<TcpListener>> {
        let mut of = |address: &SocketAddr| {
            let at = self.classes.iter().position(|(of, _)| of == address)?;
            Some(self.classes.swap_remove(at).1)
        };
        listen.iter().map(|address| of(address).unwrap_or_default()).collect()
    }
}

impl Gatekeeper {
    /// What is blocked now, for another process; the block list's file has it too.
    pub(crate) fn blocks(&self) -> io::Result<File> {
        self.tick();
        let file = File::from(memfd_create("tidegate-blocks", MemfdFlags::CLOEXEC)?);
        lock(&self.keeper).hand_over(&self.gate(), &file).map_err(io::Error::other)?;
        Ok(file)
    }

    /// Lets go of kernel programs and of the block list's file. The same rules and blocks go on in user space.
    pub(crate) fn let_go(&self) -> Result<(), GateError> {
        self.has_handed_over.store(true, Ordering::Relaxed);
        // Whoever looks after the list just now is done with it after this.
        drop(lock(&self.keeper));
        let gate = self.gate();
        if gate.is_in_kernel() {
            self.leave_the_kernel(
                &gate,
                "the process that takes the place of this one has the kernel programs",
            )?;
            drop(gate);
        }
        // The sockets are the data cores' too.
        lock(&self.queues).clear();
        Ok(())
    }

    /// The process before has let go, or the one that was to take the place of this one has failed: what the kernel can
    /// enforce is enforced there. `blocks`: what was blocked since.
    pub(crate) fn attach(
        &self,
        listen: &[(SocketAddr, Vec<TcpListener>)],
        blocks: Option<&File>,
    ) -> Result<(), GateError> {
        let before = self.gate();
        let settings = self.settings();
        let rules = in_force(&settings, &lock(&self.ports));
        let addresses: Vec<SocketAddr> = listen.iter().map(|(address, _)| *address).collect();
        let gate = attach(&settings, &rules, &addresses, self.held > 0)?;
        let queues = if self.held > 0 { Vec::new() } else { steered(&gate, listen) };
        self.go_on_with(gate, &before)?;
        *lock(&self.queues) = queues;
        if let Some(blocks) = blocks {
            log(lock(&self.keeper).take_over(&self.gate(), blocks).into_iter().collect());
        }
        self.has_handed_over.store(false, Ordering::Relaxed);
        Ok(())
    }
}

/// Has the kernel steer connections to the sockets of their classes again.
fn steered(gate: &Gate, listen: &[(SocketAddr, Vec<TcpListener>)]) -> Vec<ListenQueue> {
    if !gate.is_in_kernel() {
        return Vec::new();
    }
    let mut queues = Vec::new();
    for (_, sockets) in listen.iter().filter(|(_, sockets)| sockets.len() > 1) {
        let adopted = sockets.iter().map(TcpListener::try_clone).collect::<io::Result<Vec<_>>>();
        match adopted.map(|sockets| ListenQueue::adopt(gate, sockets)) {
            Ok(Ok(Some(queue))) => queues.push(queue),
            Ok(Ok(None)) => {}
            Ok(Err(error)) => {
                tracing::warn!("connections are sorted by priority after they are accepted: {error}")
            }
            Err(error) => {
                tracing::warn!("connections are sorted by priority after they are accepted: {error}")
            }
        }
    }
    queues
}
