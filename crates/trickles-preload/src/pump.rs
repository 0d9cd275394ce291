//! Moves bytes between a program's socket and a Trickles stream, on one thread for the whole process.

use std::cell::Cell;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tidegate_trickles::http::refusal;
use tidegate_trickles::sealed::Encryption;
use tidegate_trickles::udp::{Connection, Options, RequestStream, StreamError, carry};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::mpsc;

/// How long servers may be silent before the connection is made by TCP (Trickles §2.6).
const FALLBACK_AFTER: Duration = Duration::from_secs(3);
/// Input that is kept for TCP while no server has answered. Where there is more, it waits until one has: the way back is
/// closed then.
const MAX_REPLAY_BYTES: usize = 256 * 1024;
/// How often it is looked whether one has.
const LOOK: Duration = Duration::from_millis(5);
/// How long a program may take to write the rest of a request whose answer has ended.
const LINGER: Duration = Duration::from_secs(2);
/// Bytes moved at once.
const PIECE_BYTES: usize = 64 * 1024;

/// A connection that a program has asked for.
pub(crate) struct Job {
    pub(crate) program: StdUnixStream,
    pub(crate) servers: Vec<SocketAddr>,
    pub(crate) destination: SocketAddr,
    pub(crate) encryption: Encryption,
}

/// The thread of this process. A child of fork has none of its parent's threads.
static WORKER: Mutex<Option<(u32, mpsc::UnboundedSender<Job>)>> = Mutex::new(None);

thread_local! {
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is ours: its connections are what they are.
pub(crate) fn is_worker() -> bool {
    IS_WORKER.try_with(Cell::get).unwrap_or(true)
}

/// Hands a connection to the thread, which is started first if there is none. Jobs are bounded by the program's own
/// descriptors.
pub(crate) fn start(job: Job) -> io::Result<()> {
    let mut worker = WORKER.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    let mut job = job;
    if let Some((owner, jobs)) = &*worker
        && *owner == process
    {
        match jobs.send(job) {
            Ok(()) => return Ok(()),
            Err(mpsc::error::SendError(unsent)) => job = unsent,
        }
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (jobs, mut arriving) = mpsc::unbounded_channel::<Job>();
    std::thread::Builder::new().name("trickles".into()).spawn(move || {
        IS_WORKER.with(|is_worker| is_worker.set(true));
        runtime.block_on(async move {
            while let Some(job) = arriving.recv().await {
                // An error ends the program's connection, which is how it learns of it.
                tokio::spawn(async move { drop(serve(job).await) });
            }
        });
    })?;
    let sent = jobs.send(job);
    *worker = Some((process, jobs));
    sent.map_err(|_| io::ErrorKind::ConnectionAborted.into())
}

async fn serve(job: Job) -> io::Result<()> {
    job.program.set_nonblocking(true)?;
    let mut program = UnixStream::from_std(job.program)?;
    let (mut sent, mut first) = (Vec::new(), Vec::with_capacity(PIECE_BYTES));
    let options = Options { encryption: job.encryption, ..Options::to(job.servers) };
    let opened = Connection::new(&options).and_then(|connection| Ok((connection.open()?, connection)));
    let answered = match opened {
        Ok((mut stream, connection)) => {
            let is_answered = || connection.is_answered();
            let ended = first_answer(&mut program, &mut stream, is_answered, &mut sent, &mut first).await;
            ended.map(|ended| (stream, ended))
        }
        Err(error) => Err(error),
    };
    match answered {
        Ok((_, true)) => {
            program.write_all(&first).await?;
            program.shutdown().await
        }
        Ok((stream, false)) => {
            program.write_all(&first).await?;
            let mut begun = !first.is_empty();
            let (reader, writer) = program.split();
            match carry(stream, reader, writer, || begun = true).await {
                Err(error) if !begun => return refuse(program, error).await,
                carried => carried?,
            }
            // An answer may come before the end of its request: what the program still writes would fail before it reads.
            let rest = async { tokio::io::copy(&mut program, &mut tokio::io::sink()).await };
            let _ = tokio::time::timeout(LINGER, rest).await;
            Ok(())
        }
        // Who names a key wants nobody else's answer.
        Err(error) if matches!(job.encryption, Encryption::Pinned(_)) => {
            tell_once(job.destination, &error, "TIDEGATE_TRICKLES_KEY rules TCP out");
            refuse(program, error).await
        }
        Err(error) => match TcpStream::connect(job.destination).await {
            Ok(mut server) => {
                server.write_all(&sent).await?;
                tokio::io::copy_bidirectional(&mut program, &mut server).await.map(drop)
            }
            Err(by_tcp) => {
                if !matches!(StreamError::of(&error), Some(StreamError::Reset(_))) {
                    tell_once(job.destination, &error, &format!("over TCP: {by_tcp}"));
                }
                refuse(program, error).await
            }
        },
    }
}

/// Why a connection came to nothing: programs see only that it ends. One line a process.
fn tell_once(destination: SocketAddr, error: &io::Error, by_tcp: &str) {
    static TOLD: AtomicBool = AtomicBool::new(false);
    if !TOLD.swap(true, Ordering::Relaxed) {
        // Nobody reads it: that is no reason to fail.
        let _ = writeln!(io::stderr(), "tidegate: {destination} over Trickles: {error}; {by_tcp}");
    }
}

/// A server that gave a status tells it as HTTP does; otherwise the program sees its connection end.
async fn refuse(mut program: UnixStream, error: io::Error) -> io::Result<()> {
    if let Some(StreamError::Reset(400..=599)) = StreamError::of(&error) {
        program.write_all(&refusal(&error)).await?;
        return program.shutdown().await;
    }
    Err(error)
}

/// Passes input on until output comes, or a server has answered with anything and there is more input than is kept; whether
/// the output ended with it. The clock starts with the first input.
async fn first_answer(
    program: &mut UnixStream,
    stream: &mut RequestStream,
    is_answered: impl Fn() -> bool,
    sent: &mut Vec<u8>,
    first: &mut Vec<u8>,
) -> io::Result<bool> {
    let mut buffer = vec![0; PIECE_BYTES];
    let mut open = true;
    let silence = tokio::time::sleep(Duration::from_secs(u32::MAX.into()));
    tokio::pin!(silence);
    loop {
        let is_full = sent.len() >= MAX_REPLAY_BYTES;
        if is_full && is_answered() {
            return Ok(false);
        }
        tokio::select! {
            read = stream.read_buf(first) => return Ok(read? == 0),
            () = tokio::time::sleep(LOOK), if is_full => {}
            read = program.read(&mut buffer), if open && !is_full => {
                let count = read?;
                open = count > 0;
                if !open {
                    stream.shutdown().await?;
                    continue;
                }
                if sent.is_empty() {
                    silence.as_mut().reset(tokio::time::Instant::now() + FALLBACK_AFTER);
                }
                sent.extend_from_slice(&buffer[..count]);
                stream.write_all(&buffer[..count]).await?;
            }
            // A server that has answered with anything is there, and may take its time.
            () = &mut silence, if !is_answered() => {
                if !is_answered() {
                    return Err(io::ErrorKind::TimedOut.into());
                }
            }
        }
    }
}
