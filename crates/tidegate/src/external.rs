//! Classifiers outside of this process: a Unix socket on which they are told what clients do, and say whom to block.
//! The protocol is in docs/protocol/classifier.md.

use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::net::IpAddr;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use tidegate_defence::{Defence, Told, What};

/// Classifiers that may be connected at once; more are turned away.
const MAX_LISTENERS: usize = 4;
/// A line of a classifier may be this long.
const LINE_BYTES: u64 = 4_096;
/// A classifier that takes nothing for so long is left.
const PATIENCE: Duration = Duration::from_secs(1);
/// The longest block that a classifier may ask for.
const LONGEST_S: u64 = 24 * 3600;

struct Hub {
    defence: Arc<Defence>,
    one_of: u32,
    listeners: Mutex<Vec<UnixStream>>,
}

/// Listens at `path`, which nobody but this user may connect to.
pub(crate) fn start(path: &Path, one_of: u32, defence: &Arc<Defence>) -> io::Result<()> {
    let Some(told) = defence.feed().take_receiver() else { return Ok(()) };
    let listener = bind(path)?;
    let hub = Arc::new(Hub { defence: Arc::clone(defence), one_of, listeners: Mutex::default() });
    let teller = Arc::clone(&hub);
    std::thread::Builder::new().name("classifiers".into()).spawn(move || teller.tell(&told))?;
    std::thread::Builder::new().name("classifiers-in".into()).spawn(move || hub.accept(&listener))?;
    Ok(())
}

fn bind(path: &Path) -> io::Result<UnixListener> {
    use std::os::unix::fs::{FileTypeExt, PermissionsExt};
    // What a process that has ended left behind.
    if std::fs::symlink_metadata(path).is_ok_and(|data| data.file_type().is_socket())
        && UnixStream::connect(path).is_err()
    {
        std::fs::remove_file(path)?;
    }
    let named = |error: io::Error| {
        io::Error::new(error.kind(), format!("cannot listen for classifiers at {}: {error}", path.display()))
    };
    let listener = UnixListener::bind(path).map_err(named)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

impl Hub {
    fn accept(self: &Arc<Self>, listener: &UnixListener) {
        loop {
            let Ok((stream, _)) = listener.accept() else {
                std::thread::sleep(PATIENCE);
                continue;
            };
            let (Ok(()), Ok(copy)) = (stream.set_write_timeout(Some(PATIENCE)), stream.try_clone()) else {
                continue;
            };
            let mut listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
            if listeners.len() >= MAX_LISTENERS {
                tracing::warn!("a classifier was turned away: {MAX_LISTENERS} are connected");
                continue;
            }
            let hub = Arc::clone(self);
            if std::thread::Builder::new().name("classifier".into()).spawn(move || hub.obey(copy)).is_ok() {
                tracing::info!("a classifier has connected");
                listeners.push(stream);
                self.defence.feed().set_listening(true, self.one_of);
            }
        }
    }

    fn tell(&self, told: &Receiver<Told>) {
        let mut lines = Vec::new();
        loop {
            match told.recv_timeout(PATIENCE) {
                Ok(first) => write_line(&first, &mut lines),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            told.try_iter().take(256).for_each(|told| write_line(&told, &mut lines));
            let mut listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
            let before = listeners.len();
            listeners.retain_mut(|stream| stream.write_all(&lines).is_ok());
            if listeners.len() < before {
                tracing::info!("a classifier has left, or takes nothing any more");
                self.defence.feed().set_listening(!listeners.is_empty(), self.one_of);
            }
            drop(listeners);
            lines.clear();
        }
    }

    /// Does what one classifier says, until it leaves.
    fn obey(&self, stream: UnixStream) {
        let mut reader = BufReader::new(stream);
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
        let _ = reader.get_ref().shutdown(std::net::Shutdown::Both);
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
    use super::*;

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
