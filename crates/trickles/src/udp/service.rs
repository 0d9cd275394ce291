//! A service on threads of its own: one socket, runtime and server for each core.

use super::{UdpServer, bind, wall_clock_ms};
use crate::keys::KeyRing;
use crate::sealed::PublicBytes;
use crate::server::{Application, Config, Counters, Server};
use crate::tcp::PacketSource;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use tokio::sync::watch;

/// A running service. Dropping it stops it; clients notice nothing if another takes its place.
#[derive(Debug)]
pub struct UdpService {
    address: SocketAddr,
    counters: Vec<Arc<Counters>>,
    keys: watch::Sender<KeyRing>,
    stop: watch::Sender<bool>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Duplicates of the sockets, as long as the service runs.
    sockets: Mutex<Vec<UdpSocket>>,
}

impl UdpService {
    /// Serves `address` with `workers` threads; `application` makes what each of them answers with.
    ///
    /// # Errors
    /// The address cannot be had, or a thread not started.
    pub fn start<A: Application + Send + 'static>(
        address: SocketAddr,
        workers: usize,
        config: &Config,
        keys: KeyRing,
        application: impl FnMut() -> io::Result<A>,
    ) -> io::Result<Self> {
        // Another program's SO_REUSEPORT socket would let ours bind beside it: an exclusive bind first finds that out.
        drop(bind(address, false)?);
        Self::start_on(Vec::new(), address, workers, config, keys, application)
    }

    /// As [`Self::start`], on the sockets that another process hands over ([`Self::sockets`]), which may serve them too:
    /// with the same keys either can answer any packet. There are as many threads as sockets, at least `workers`.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_on<A: Application + Send + 'static>(
        sockets: Vec<UdpSocket>,
        address: SocketAddr,
        workers: usize,
        config: &Config,
        keys: KeyRing,
        mut application: impl FnMut() -> io::Result<A>,
    ) -> io::Result<Self> {
        let address = sockets.first().map_or(Ok(address), UdpSocket::local_addr)?;
        let mut service = Self::of(address, keys);
        let threads = workers.max(1).max(sockets.len());
        let mut sockets = sockets.into_iter();
        for index in 0..threads {
            let socket = sockets.next().map_or_else(|| bind(service.address, true), Ok)?;
            let application = application()?;
            service.sockets.get_mut().unwrap_or_else(PoisonError::into_inner).push(socket.try_clone()?);
            service.spawn(index, config.clone(), |server| UdpServer::new(socket, server, application))?;
        }
        Ok(service)
    }

    /// Serves `address` in the paper's format with one thread, see [`crate::tcp`]; segments come from `source` too.
    ///
    /// # Errors
    /// Privileges or `nft` are missing, or a thread could not be started.
    pub fn start_tcp_format<A: Application + Send + 'static>(
        address: SocketAddr,
        source: Option<Box<dyn PacketSource>>,
        config: &Config,
        keys: KeyRing,
        application: A,
    ) -> io::Result<Self> {
        let mut service = Self::of(address, keys);
        service.spawn(0, config.clone(), |server| match source {
            None => UdpServer::with_tcp_format(address, server, application),
            Some(source) => UdpServer::with_source(address, source, server, application),
        })?;
        Ok(service)
    }

    fn of(address: SocketAddr, keys: KeyRing) -> Self {
        Self {
            address,
            counters: Vec::new(),
            keys: watch::Sender::new(keys),
            stop: watch::Sender::new(false),
            threads: Mutex::default(),
            sockets: Mutex::default(),
        }
    }

    /// Duplicates of the sockets, for another process; none in the format of TCP.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn sockets(&self) -> io::Result<Vec<UdpSocket>> {
        let sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        sockets.iter().map(UdpSocket::try_clone).collect()
    }

    fn spawn<A: Application + Send + 'static>(
        &mut self,
        index: usize,
        config: Config,
        driver: impl FnOnce(Server) -> io::Result<UdpServer<A>>,
    ) -> io::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let keys = self.keys.subscribe();
        let server = Server::new(config, keys.borrow().clone(), wall_clock_ms());
        let mut driver = {
            let _inside = runtime.enter();
            driver(server)?
        };
        self.address = driver.local_addr()?;
        self.counters.push(driver.counters());
        let mut stop = self.stop.subscribe();
        let thread = std::thread::Builder::new().name(format!("trickles-{index}")).spawn(move || {
            let stopped = async {
                // A sender that is gone means the same.
                let _ = stop.wait_for(|stop| *stop).await;
            };
            if let Err(error) = runtime.block_on(driver.run(keys, stopped)) {
                tracing::error!(%error, "a Trickles server has failed");
            }
        })?;
        self.threads.get_mut().unwrap_or_else(PoisonError::into_inner).push(thread);
        Ok(())
    }

    /// Where the service listens, with the real port where 0 was asked for.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// What each thread did and refused.
    #[must_use]
    pub fn counters(&self) -> &[Arc<Counters>] {
        &self.counters
    }

    /// The public key that clients may pin.
    #[must_use]
    pub fn public_key(&self) -> PublicBytes {
        self.keys.borrow().identity().public()
    }

    /// Signs with another key ring from now on: after a rotation.
    pub fn set_keys(&self, keys: KeyRing) {
        self.keys.send_replace(keys);
    }

    /// Stops, and waits until everything that belongs to the service outside of this process is gone: firewall rules,
    /// and programs on interfaces.
    pub fn stop(&self) {
        self.stop.send_replace(true);
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner).clear();
        for thread in self.threads.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            if thread.join().is_err() {
                tracing::error!("a Trickles server has panicked");
            }
        }
    }
}

impl Drop for UdpService {
    fn drop(&mut self) {
        self.stop();
    }
}
