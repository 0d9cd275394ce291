//! An endpoint's socket, and those of its last connections once another process has that one.
//!
//! Of two processes with one UDP socket each gets some of the datagrams. So the one that ends reads from it no more:
//! its connections get sockets of their own at the same address, connected to their clients, which the kernel prefers.

use std::fmt;
use std::io::{self, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, Runtime, TokioRuntime, UdpPoller};

use crate::engine;

/// Where an endpoint's datagrams come from and go to.
pub(super) struct Sockets {
    shared: Arc<dyn AsyncUdpSocket>,
    reading: Mutex<Reading>,
}

/// Where they come from.
struct Reading {
    /// From the shared socket.
    shares: bool,
    own: Vec<Arc<dyn AsyncUdpSocket>>,
    waker: Option<Waker>,
}

impl Sockets {
    pub(super) fn new(socket: UdpSocket) -> io::Result<Arc<Self>> {
        let shared = TokioRuntime.wrap_udp_socket(socket)?;
        let reading = Reading { shares: true, own: Vec::new(), waker: None };
        Ok(Arc::new(Self { shared, reading: Mutex::new(reading) }))
    }

    /// Leaves the shared socket to another process.
    pub(super) fn part(&self) {
        self.reading().shares = false;
    }

    /// What comes on the connection with these ends is received all the same.
    pub(super) fn take_along(&self, local: SocketAddr, peer: SocketAddr) -> io::Result<()> {
        let socket = TokioRuntime.wrap_udp_socket(engine::connected(local, peer)?)?;
        let mut reading = self.reading();
        reading.own.push(socket);
        reading.waker.iter().for_each(Waker::wake_by_ref);
        Ok(())
    }

    /// The lists stay valid whatever panics.
    fn reading(&self) -> MutexGuard<'_, Reading> {
        self.reading.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Sockets {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.fmt(formatter)
    }
}

impl AsyncUdpSocket for Sockets {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Arc::clone(&self.shared).create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        self.shared.try_send(transmit)
    }

    fn poll_recv(
        &self,
        context: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let mut reading = self.reading();
        for socket in &reading.own {
            match socket.poll_recv(context, buffers, meta) {
                // The client's host has nobody there any more, which its connection will find out. There may be more.
                Poll::Ready(Err(_)) => context.waker().wake_by_ref(),
                Poll::Pending => {}
                received => return received,
            }
        }
        if reading.shares
            && let Poll::Ready(received) = self.shared.poll_recv(context, buffers, meta)
        {
            return Poll::Ready(received);
        }
        if !reading.waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
            reading.waker = Some(context.waker().clone());
        }
        Poll::Pending
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.shared.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.shared.max_transmit_segments()
    }

    fn max_receive_segments(&self) -> usize {
        self.shared.max_receive_segments()
    }

    fn may_fragment(&self) -> bool {
        self.shared.may_fragment()
    }
}
