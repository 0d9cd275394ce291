//! A server of the paper's kind: a process accepts one connection at a time and is busy with it for as long as the
//! request takes. Time passes by sleeping, as if for a disk or a database, so that its capacity depends on nothing else.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Testbed;
use crate::Error;

/// How long a request occupies a worker.
#[derive(Clone, Copy, Debug)]
pub struct Costs {
    /// One below `/cgi-bin/`.
    pub dynamic: Duration,
    /// Any other.
    pub plain: Duration,
    /// Bytes of every body.
    pub body_bytes: usize,
}

/// How long an idle worker waits before it looks whether it is to end.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// How long a client may be silent.
const SILENCE: Duration = Duration::from_millis(500);

/// Workers that serve until this is dropped.
pub struct Server {
    end: Arc<AtomicBool>,
    served: Arc<AtomicU64>,
    workers: Vec<JoinHandle<()>>,
}

impl Server {
    /// Listens on the server's host with one accept queue.
    ///
    /// # Errors
    /// When the address cannot be had.
    pub fn start(bed: &Testbed, at: SocketAddr, workers: usize, costs: Costs) -> Result<Self, Error> {
        let failed = |error: std::io::Error| Error::Server(format!("cannot listen on {at}: {error}"));
        let listener = bed.on_server(|| TcpListener::bind(at))?.map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        Ok(Self::on(vec![listener], workers, costs))
    }

    /// Accepts from these sockets, strictly from the first that has a connection. They must not block.
    pub fn on(listeners: Vec<TcpListener>, workers: usize, costs: Costs) -> Self {
        let (end, served, listeners) = (Arc::default(), Arc::default(), Arc::new(listeners));
        let worker = |_| {
            let (end, served, listeners) = (Arc::clone(&end), Arc::clone(&served), Arc::clone(&listeners));
            std::thread::spawn(move || work(&listeners, costs, &end, &served))
        };
        let workers = (0..workers).map(worker).collect();
        Self { end, served, workers }
    }

    /// Requests that took their time, whether or not somebody still waited for the answer.
    pub fn served(&self) -> u64 {
        self.served.load(Ordering::Relaxed)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

fn work(listeners: &[TcpListener], costs: Costs, end: &AtomicBool, served: &AtomicU64) {
    while !end.load(Ordering::Relaxed) {
        let accepted = listeners.iter().find_map(|listener| listener.accept().ok());
        match accepted {
            Some((stream, _)) => {
                if serve(stream, costs).is_some() {
                    served.fetch_add(1, Ordering::Relaxed);
                }
            }
            None => {
                let mut ready: Vec<PollFd<'_>> =
                    listeners.iter().map(|listener| PollFd::new(listener, PollFlags::IN)).collect();
                let _ = poll(&mut ready, Some(&LOOK));
            }
        }
    }
}

fn serve(mut stream: TcpStream, costs: Costs) -> Option<()> {
    stream.set_nonblocking(false).ok()?;
    stream.set_read_timeout(Some(SILENCE)).ok()?;
    let mut head = Vec::new();
    let mut buffer = [0; 1024];
    while !head.windows(4).any(|window| window == b"\r\n\r\n") {
        match stream.read(&mut buffer) {
            Ok(length @ 1..) if head.len() < 8192 => head.extend_from_slice(&buffer[..length]),
            _ => return None,
        }
    }
    let is_dynamic =
        head.split(|byte| *byte == b' ').nth(1).is_some_and(|path| path.starts_with(b"/cgi-bin/"));
    std::thread::sleep(if is_dynamic { costs.dynamic } else { costs.plain });
    let length = costs.body_bytes;
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
    );
    let mut answer = head.into_bytes();
    answer.resize(answer.len() + length, b'a');
    stream.write_all(&answer).ok()
}
