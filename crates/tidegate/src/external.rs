//! Classifiers outside of this process: a Unix socket on which they are told what clients do, and say whom to block.
//! The protocol is in docs/protocol/classifier.md.

use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::net::IpAddr;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::Mode;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde_json::{Value, json};
use tidegate_defence::{Defence, Told, What};

/// Classifiers that may be connected at once; more are turned away.
const MAX_LISTENERS: usize = 4;
/// Classifiers that may wait to be let in.
const BACKLOG: i32 = 16;
/// A line of a classifier may be this long.
const LINE_BYTES: u64 = 4_096;
/// A classifier that takes nothing for so long is left.
const PATIENCE: Duration = Duration::from_secs(1);
/// The longest block that a classifier may ask for.
const LONGEST_S: u64 = 24 * 3600;

/// Those who listen.
pub(crate) struct Hub {
    defence: Arc<Defence>,
    one_of: u32,
    /// Those connected, each until its [`Hub::obey`] has ended.
    listeners: Mutex<Vec<Arc<UnixStream>>>,
}

/// A socket that is listened on, and is to take the place of another process's.
pub(crate) struct Door {
    beside: PathBuf,
    path: PathBuf,
}

impl Door {
    /// Whoever connects from now on comes here.
    pub(crate) fn open(&self) -> io::Result<()> {
        std::fs::rename(&self.beside, &self.path)
    }
}

/// As [`start`], beside the socket of the process before, which serves too.
pub(crate) fn start_beside(path: &Path, one_of: u32, defence: &Arc<Defence>) -> io::Result<Door> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let door = Door { beside: beside.into(), path: path.to_owned() };
    start(&door.beside, one_of, defence)?;
    Ok(door)
}

/// Listens at `path`, which nobody but this user may connect to.
pub(crate) fn start(path: &Path, one_of: u32, defence: &Arc<Defence>) -> io::Result<Option<Arc<Hub>>> {
    let Some(told) = defence.feed().take_receiver() else { return Ok(None) };
    let listener = bind(path)?;
    let hub = Arc::new(Hub { defence: Arc::clone(defence), one_of, listeners: Mutex::default() });
    let (teller, door) = (Arc::clone(&hub), Arc::clone(&hub));
    std::thread::Builder::new().name("classifiers".into()).spawn(move || teller.tell(&told))?;
    std::thread::Builder::new().name("classifiers-in".into()).spawn(move || door.accept(&listener))?;
    Ok(Some(hub))
}

fn bind(path: &Path) -> io::Result<UnixListener> {
    use std::os::unix::fs::FileTypeExt;
    // What a process that has ended left behind.
    if std::fs::symlink_metadata(path).is_ok_and(|data| data.file_type().is_socket())
        && UnixStream::connect(path).is_err()
    {
        std::fs::remove_file(path)?;
    }
    let named = |error: io::Error| {
        io::Error::new(error.kind(), format!("cannot listen for classifiers at {}: {error}", path.display()))
    };
    bind_for_owner(path).map_err(named)
}

/// The file has the rights that the socket has when it is bound (unix(7)), so that there is no moment at which others
/// may connect.
fn bind_for_owner(path: &Path) -> io::Result<UnixListener> {
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

impl Hub {
    fn accept(self: &Arc<Self>, listener: &UnixListener) {
        loop {
            let Ok((stream, _)) = listener.accept() else {
                std::thread::sleep(PATIENCE);
                continue;
            };
            let mut listeners = self.listeners();
            if listeners.len() >= MAX_LISTENERS {
                tracing::warn!("a classifier was turned away: {MAX_LISTENERS} are connected");
                continue;
            }
            let stream = Arc::new(stream);
            let (hub, own) = (Arc::clone(self), Arc::clone(&stream));
            if std::thread::Builder::new().name("classifier".into()).spawn(move || hub.obey(&own)).is_ok() {
                tracing::info!("a classifier has connected");
                listeners.push(stream);
                self.defence.feed().set_listening(true, self.one_of);
            }
        }
    }

    fn tell(&self, told: &Receiver<Told>) {
        let mut lines = Vec::new();
        while let Ok(first) = told.recv() {
            write_line(&first, &mut lines);
            told.try_iter().take(256).for_each(|told| write_line(&told, &mut lines));
            // Nobody who comes or leaves waits for one that takes its time.
            let listeners = self.listeners().clone();
            for stream in listeners {
                if write_within(&stream, &lines, PATIENCE).is_err() {
                    // Which ends its `obey`, and that its place.
                    let _ = stream.shutdown(Shutdown::Both);
                }
            }
            lines.clear();
        }
    }

    /// Does what one classifier says, until it leaves or is left.
    fn obey(&self, stream: &Arc<UnixStream>) {
        let mut reader = BufReader::new(&**stream);
        loop {
            let mut line = Vec::new();
            match io::Read::take(&mut reader, LINE_BYTES).read_until(b'\n', &mut line) {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Ok(length) if length > 0 && line.ends_with(b"\n") => {}
                _ => break,
            }
            if let Err(error) = self.order(&line) {
                tracing::warn!("a classifier's order was not understood: {error}");
            }
        }
        let _ = stream.shutdown(Shutdown::Both);
        let mut listeners = self.listeners();
        listeners.retain(|other| !Arc::ptr_eq(other, stream));
        self.defence.feed().set_listening(!listeners.is_empty(), self.one_of);
        tracing::info!("a classifier has left, or was left because it took nothing any more");
    }

    /// Every change under the lock is one step, so that a panic elsewhere leaves nothing half done.
    fn listeners(&self) -> MutexGuard<'_, Vec<Arc<UnixStream>>> {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn order(&self, line: &[u8]) -> Result<(), String> {
        let Order { address, time, reason } = Order::parse(line)?;
        let decided = self.defence.block(address, time);
        if !decided {
            return Ok(());
        }
        tracing::info!(%address, "blocked for {} s: an external classifier said so: {reason}", time.as_secs());
        Ok(())
    }
}

/// Writes all of it in so much time: a classifier that takes a byte now and then must not keep others waiting.
fn write_within(mut stream: &UnixStream, mut bytes: &[u8], time: Duration) -> io::Result<()> {
    let end = Instant::now() + time;
    while !bytes.is_empty() {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_write_timeout(Some(left))?;
        match stream.write(bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// What a classifier wants.
#[derive(Debug, Eq, PartialEq)]
struct Order {
    address: IpAddr,
    time: Duration,
    reason: String,
}

impl Order {
    fn parse(line: &[u8]) -> Result<Self, String> {
        let value: Value = serde_json::from_slice(line).map_err(|error| error.to_string())?;
        let address = value["block"].as_str().ok_or("expected \"block\" with an address")?;
        let address = address.parse().map_err(|_| format!("{address:?} is no address"))?;
        let seconds = value["for_s"].as_u64().filter(|seconds| (1..=LONGEST_S).contains(seconds));
        let seconds = seconds.ok_or("expected \"for_s\" with 1 to 86400")?;
        let reason = value["reason"].as_str().unwrap_or_default();
        let reason = reason.chars().filter(|c| !c.is_control()).take(200).collect();
        Ok(Self { address, time: Duration::from_secs(seconds), reason })
    }
}

fn write_line(told: &Told, lines: &mut Vec<u8>) {
    let target = String::from_utf8_lossy(told.target());
    let event = match told.what {
        What::Request => {
            json!({"event": "request", "ms": told.now_ms, "client": told.address, "target": target})
        }
        What::Response { status, upstream_ms } => json!({
            "event": "response", "ms": told.now_ms, "client": told.address, "target": target,
            "status": status, "upstream_ms": upstream_ms,
        }),
    };
    // Writing to memory does not fail.
    let _ = writeln!(lines, "{event}");
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use tidegate_core::hooks::{Chain, ChainSource, Field, Fields, Peer, RequestView, Via};
    use tidegate_defence::Settings;

    use super::*;

    struct NoFields;

    impl Fields for NoFields {
        fn get(&self, _: Field) -> Option<&[u8]> {
            None
        }
    }

    struct Bench {
        hub: Arc<Hub>,
        path: std::path::PathBuf,
        chain: Chain,
        _directory: tempfile::TempDir,
    }

    impl Bench {
        fn start() -> Self {
            let settings = Settings { external: true, ..Settings::default() };
            let defence = Arc::new(Defence::new(settings, 1, [1; 32]));
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("classify");
            let chain = defence.chain(0, 1);
            let hub = start(&path, 1, &defence).unwrap().unwrap();
            Self { hub, path, chain, _directory: directory }
        }

        fn connect(&self) -> UnixStream {
            UnixStream::connect(&self.path).unwrap()
        }

        /// Waits until so many are connected.
        fn wait_for(&self, count: usize) {
            let end = Instant::now() + Duration::from_secs(60);
            while self.hub.listeners().len() != count {
                assert!(Instant::now() < end, "{} are connected, not {count}", self.hub.listeners().len());
                std::thread::sleep(Duration::from_millis(5));
            }
        }

        fn request(&self, address: [u8; 4]) {
            let peer = Peer { address: address.into(), via: Via::Direct };
            let client = self.chain.locate(peer.address, 0);
            let request = RequestView {
                method: b"GET",
                path: b"/a",
                reading: None,
                query: None,
                has_body: false,
                fields: &NoFields,
            };
            let _ = self.chain.request(client, peer, &request, 0);
        }
    }

    #[test]
    fn nobody_else_may_connect_from_the_first_moment_on() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("classify");
        // As it is bound, before anything could take rights away.
        let _listener = bind_for_owner(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn classifiers_that_leave_without_an_event_make_room_for_others() {
        let bench = Bench::start();
        for _ in 0..3 {
            let connected: Vec<UnixStream> = (0..MAX_LISTENERS).map(|_| bench.connect()).collect();
            bench.wait_for(MAX_LISTENERS);
            // One too many is turned away at once.
            assert_eq!(bench.connect().read(&mut [0]).unwrap(), 0);
            drop(connected);
            bench.wait_for(0);
        }
        let mut last = bench.connect();
        bench.wait_for(1);
        bench.request([10, 0, 0, 1]);
        let mut line = String::new();
        BufReader::new(&mut last).read_line(&mut line).unwrap();
        assert!(line.contains("\"client\":\"10.0.0.1\""), "{line}");
    }

    #[test]
    fn classifier_that_takes_nothing_is_left_and_its_connection_ends() {
        let bench = Bench::start();
        let mut idle = bench.connect();
        bench.wait_for(1);
        let end = Instant::now() + Duration::from_secs(60);
        // More than any socket's buffer holds.
        while !bench.hub.listeners().is_empty() {
            assert!(Instant::now() < end, "it is still connected");
            (0..1_000).for_each(|_| bench.request([10, 0, 0, 1]));
            std::thread::sleep(Duration::from_millis(5));
        }
        idle.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut buffer = vec![0; 1 << 16];
        while idle.read(&mut buffer).unwrap() > 0 {}
    }

    #[test]
    fn what_is_not_taken_in_time_is_an_error() {
        let (writer, mut reader) = UnixStream::pair().unwrap();
        let error = write_within(&writer, &vec![b'a'; 8 << 20], Duration::from_millis(50)).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock), "{error}");
        write_within(&writer, b"", Duration::ZERO).unwrap();
        assert!(reader.read(&mut [0; 8]).unwrap() > 0);
    }

    #[test]
    fn orders_are_read_and_others_are_refused_with_a_reason() {
        let order =
            Order::parse(b"{\"block\":\"2001:db8::7\",\"for_s\":60,\"reason\":\"odd\\n\"}\n").unwrap();
        assert_eq!((order.time, order.reason.as_str()), (Duration::from_secs(60), "odd"));
        for (line, part) in [
            ("[]", "expected \"block\""),
            ("{\"block\":\"x\",\"for_s\":1}", "no address"),
            ("{\"block\":\"1.2.3.4\",\"for_s\":0}", "1 to 86400"),
            ("{\"block\":\"1.2.3.4\"}", "1 to 86400"),
            ("{", "EOF"),
        ] {
            let error = Order::parse(line.as_bytes()).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}
