//! The access log. A data core formats lines into a buffer of its own and hands full buffers to one writer thread;
//! when the writer cannot keep up, lines are dropped and counted, never waited for.

use std::cell::RefCell;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use tidegate_http::Version;

use crate::settings::{AccessLog, LogFormat};
use crate::telemetry::metrics::CoreMetrics;

/// The status of a request whose client left before any response to it had begun; nginx's.
pub(crate) const CLIENT_LEFT: u16 = 499;
/// The status of a request that a drain ended before any response to it had begun.
pub(crate) const CUT_OFF: u16 = 503;

/// Bytes a core gathers before it hands them on.
const BUFFER_BYTES: usize = 32 * 1024;
/// Buffers that may wait for the writer.
const QUEUE_BUFFERS: usize = 64;

/// A request as it is logged.
pub(crate) struct Record<'a> {
    pub client: IpAddr,
    pub unix_s: u64,
    /// From the request's head to the end of the response.
    pub duration: Duration,
    pub host: &'a [u8],
    pub method: &'a [u8],
    pub target: &'a [u8],
    pub version: Version,
    pub status: u16,
    pub bytes: u64,
    pub referer: &'a [u8],
    pub user_agent: &'a [u8],
    pub cache: &'static str,
}

/// Owns the writer thread; dropping it writes out what was handed over.
pub(crate) struct AccessLogWriter {
    sender: Option<LogSender>,
    thread: Option<JoinHandle<()>>,
    shared: Arc<Shared>,
}

/// What the writer thread shares with its owner.
#[derive(Default)]
struct Shared {
    /// The file may have been renamed: it is to be opened anew.
    reopen: AtomicBool,
    /// Lines that could not be written.
    lost: AtomicU64,
}

/// What a data core needs to hand lines to the writer.
#[derive(Clone)]
pub(crate) struct LogSender {
    sender: SyncSender<Vec<u8>>,
    format: LogFormat,
}

impl AccessLogWriter {
    pub(crate) fn open(settings: &AccessLog) -> io::Result<Self> {
        let output: Box<dyn Write + Send> = match &settings.path {
            Some(path) => append_to(path)?,
            None => Box::new(io::stdout()),
        };
        let (sender, receiver) = sync_channel(QUEUE_BUFFERS);
        let (shared, path) = (Arc::new(Shared::default()), settings.path.clone());
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("access-log".into())
            .spawn(move || write_lines(Output::new(output), path, &receiver, &of_thread))?;
        let sender = LogSender { sender, format: settings.format };
        Ok(Self { sender: Some(sender), thread: Some(thread), shared })
    }

    /// Opens the file anew before the next lines are written, since it may have been renamed.
    pub(crate) fn reopen(&self) {
        self.shared.reopen.store(true, Ordering::Relaxed);
    }

    /// Lines lost because they could not be written.
    pub(crate) fn lost(&self) -> u64 {
        self.shared.lost.load(Ordering::Relaxed)
    }

    pub(crate) fn sender(&self) -> LogSender {
        // `sender` is taken only by `drop`.
        self.sender
            .clone()
            .unwrap_or_else(|| LogSender { sender: sync_channel(0).0, format: LogFormat::Combined })
    }
}

impl Drop for AccessLogWriter {
    fn drop(&mut self) {
        self.sender = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn append_to(path: &PathBuf) -> io::Result<Box<dyn Write + Send>> {
    // Without O_NONBLOCK, opening a pipe would wait for its reader.
    let options = &mut OpenOptions::new();
    Ok(Box::new(options.create(true).append(true).custom_flags(libc::O_NONBLOCK).open(path)?))
}

/// What lines are written to. A pipe that is full, or a disk, may take a part of what it is given.
struct Output {
    file: Box<dyn Write + Send>,
    /// The rest of a line of which a part is written: it comes before anything else.
    torn: Vec<u8>,
}

impl Output {
    fn new(file: Box<dyn Write + Send>) -> Self {
        Self { file, torn: Vec::new() }
    }

    /// Writes what can be written of `lines`; on an error also says how many are lost.
    fn write(&mut self, lines: &[u8]) -> Result<(), (u64, io::Error)> {
        let torn = std::mem::take(&mut self.torn);
        if let Err((rest, error)) = write_some(&mut self.file, &torn) {
            self.torn = rest.to_vec();
            return Err((lines_in(lines), error));
        }
        write_some(&mut self.file, lines).map_err(|(rest, error)| {
            let written = lines.len() - rest.len();
            let is_torn =
                lines.get(..written).is_some_and(|written| !written.is_empty() && !written.ends_with(b"\n"));
            let end = rest.iter().position(|byte| *byte == b'\n').map_or(rest.len(), |place| place + 1);
            let (torn, lost) = rest.split_at(if is_torn { end } else { 0 });
            self.torn = torn.to_vec();
            (lines_in(lost), error)
        })
    }
}

/// Writes all of `bytes`, or says what is left of them.
fn write_some<'b>(file: &mut impl Write, mut bytes: &'b [u8]) -> Result<(), (&'b [u8], io::Error)> {
    while !bytes.is_empty() {
        match file.write(bytes) {
            Ok(0) => return Err((bytes, io::ErrorKind::WriteZero.into())),
            Ok(written) => bytes = bytes.get(written..).unwrap_or(&[]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err((bytes, error)),
        }
    }
    file.flush().map_err(|error| (bytes, error))
}

fn write_lines(mut output: Output, path: Option<PathBuf>, receiver: &Receiver<Vec<u8>>, shared: &Shared) {
    let mut failing = false;
    for buffer in receiver {
        if let Some(path) = path.as_ref().filter(|_| shared.reopen.swap(false, Ordering::Relaxed)) {
            match append_to(path) {
                Ok(opened) => {
                    shared.lost.fetch_add(lines_in(&output.torn), Ordering::Relaxed);
                    output = Output::new(opened);
                }
                Err(error) => {
                    tracing::error!(%error, path = %path.display(), "the access log cannot be opened anew; the old file is used")
                }
            }
        }
        match output.write(&buffer) {
            Ok(()) => failing = false,
            Err((lost, error)) => {
                shared.lost.fetch_add(lost, Ordering::Relaxed);
                if !failing {
                    tracing::error!(%error, "access log lines are lost: the log cannot be written");
                }
                failing = true;
            }
        }
    }
}

fn lines_in(buffer: &[u8]) -> u64 {
    buffer.iter().filter(|byte| **byte == b'\n').count() as u64
}

/// One core's lines that are not handed over yet.
pub(crate) struct LogBuffer {
    sender: LogSender,
    buffer: RefCell<Vec<u8>>,
}

impl LogBuffer {
    pub(crate) fn new(sender: LogSender) -> Self {
        Self { sender, buffer: RefCell::new(Vec::with_capacity(BUFFER_BYTES)) }
    }

    /// Adds one line.
    pub(crate) fn record(&self, record: &Record<'_>, metrics: &CoreMetrics) {
        let mut buffer = self.buffer.borrow_mut();
        match self.sender.format {
            LogFormat::Combined => write_combined(record, &mut buffer),
            LogFormat::Json => write_json(record, &mut buffer),
        }
        if buffer.len() >= BUFFER_BYTES {
            self.hand_over(&mut buffer, metrics);
        }
    }

    /// Hands over what there is; called with each sweep, so that a quiet site's log is current.
    pub(crate) fn flush(&self, metrics: &CoreMetrics) {
        let mut buffer = self.buffer.borrow_mut();
        if !buffer.is_empty() {
            self.hand_over(&mut buffer, metrics);
        }
    }

    fn hand_over(&self, buffer: &mut Vec<u8>, metrics: &CoreMetrics) {
        let full = std::mem::replace(buffer, Vec::with_capacity(BUFFER_BYTES));
        if let Err(TrySendError::Full(lost) | TrySendError::Disconnected(lost)) =
            self.sender.sender.try_send(full)
        {
            metrics.access_log_dropped_total.add(lines_in(&lost));
        }
    }
}

const HEX: &[u8; 16] = b"0123456789abcdef";

/// Writes bytes that a client chose so that they can neither end the line nor the quoted string: as Apache does, what
/// is not printable ASCII is `\xhh`.
fn write_escaped(bytes: &[u8], out: &mut Vec<u8>) {
    for &byte in bytes {
        match byte {
            b'"' | b'\\' => out.extend_from_slice(&[b'\\', byte]),
            0x20..=0x7e => out.push(byte),
            _ => {
                out.extend_from_slice(b"\\x");
                write_hex(byte, out);
            }
        }
    }
}

/// Writes bytes that a client chose as the inside of a JSON string (RFC 8259 §7). What is UTF-8 is the same when it is
/// read; control characters, of Unicode's second half too, are escaped because lines are looked at on terminals. Of
/// what is no UTF-8 each byte becomes the four characters `\xhh`.
fn write_json_string(bytes: &[u8], out: &mut Vec<u8>) {
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            match character {
                '"' | '\\' => out.extend_from_slice(&[b'\\', character as u8]),
                ' '..='~' => out.push(character as u8),
                // All of them lie below U+00A0.
                _ if character.is_control() => {
                    out.extend_from_slice(b"\\u00");
                    write_hex(character as u8, out);
                }
                _ => out.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
        for &byte in chunk.invalid() {
            out.extend_from_slice(b"\\\\x");
            write_hex(byte, out);
        }
    }
}

fn write_hex(byte: u8, out: &mut Vec<u8>) {
    out.extend_from_slice(&[HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]]);
}

fn or_dash(bytes: &[u8]) -> &[u8] {
    if bytes.is_empty() { b"-" } else { bytes }
}

fn version(record: &Record<'_>) -> &'static str {
    match record.version {
        Version::Http10 => "1.0",
        Version::Http11 => "1.1",
        Version::Http2 => "2.0",
        Version::Http3 => "3.0",
    }
}

fn write_combined(record: &Record<'_>, out: &mut Vec<u8>) {
    let date = log_date(record.unix_s);
    let _ = write!(out, "{} - - [{date}] \"", record.client);
    write_escaped(record.method, out);
    out.push(b' ');
    write_escaped(record.target, out);
    let version = version(record);
    let _ = write!(out, " HTTP/{version}\" {} {} \"", record.status, record.bytes);
    write_escaped(or_dash(record.referer), out);
    out.extend_from_slice(b"\" \"");
    write_escaped(or_dash(record.user_agent), out);
    out.extend_from_slice(b"\"\n");
}

fn write_json(record: &Record<'_>, out: &mut Vec<u8>) {
    let _ = write!(out, "{{\"time\":{},\"client\":\"{}\",\"method\":\"", record.unix_s, record.client);
    write_json_string(record.method, out);
    out.extend_from_slice(b"\",\"target\":\"");
    write_json_string(record.target, out);
    out.extend_from_slice(b"\",\"host\":\"");
    write_json_string(record.host, out);
    let version = version(record);
    let _ = write!(
        out,
        "\",\"protocol\":\"HTTP/{version}\",\"status\":{},\"bytes\":{},\"duration_us\":{},\"cache\":\"{}\"",
        record.status,
        record.bytes,
        record.duration.as_micros(),
        record.cache
    );
    out.extend_from_slice(b",\"referer\":\"");
    write_json_string(record.referer, out);
    out.extend_from_slice(b"\",\"user_agent\":\"");
    write_json_string(record.user_agent, out);
    out.extend_from_slice(b"\"}\n");
}

/// `21/Nov/2026:03:04:05 +0000`, made from the IMF-fixdate `Sat, 21 Nov 2026 03:04:05 GMT`.
fn log_date(unix_s: u64) -> String {
    let date = tidegate_http::date::format(unix_s);
    let text = |range: std::ops::Range<usize>| std::str::from_utf8(&date[range]).unwrap_or("");
    format!("{}/{}/{}:{} +0000", text(5..7), text(8..11), text(12..16), text(17..25))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(user_agent: &[u8]) -> Record<'_> {
        Record {
            client: "192.0.2.7".parse().unwrap(),
            unix_s: 784_111_777,
            duration: Duration::from_micros(1234),
            host: b"a.example",
            method: b"GET",
            target: b"/a?b=\"c",
            version: Version::Http11,
            status: 200,
            bytes: 612,
            referer: b"",
            user_agent,
            cache: "hit",
        }
    }

    #[test]
    fn combined_lines_cannot_be_broken_by_what_a_client_sends() {
        let mut line = Vec::new();
        write_combined(&record(b"curl\n\"8\xff"), &mut line);
        assert_eq!(
            String::from_utf8(line).unwrap(),
            "192.0.2.7 - - [06/Nov/1994:08:49:37 +0000] \"GET /a?b=\\\"c HTTP/1.1\" 200 612 \"-\" \
             \"curl\\x0a\\\"8\\xff\"\n"
        );
    }

    #[test]
    fn json_lines_are_json() {
        let mut line = Vec::new();
        write_json(&record(b"x\\y"), &mut line);
        assert_eq!(
            String::from_utf8(line).unwrap(),
            "{\"time\":784111777,\"client\":\"192.0.2.7\",\"method\":\"GET\",\"target\":\"/a?b=\\\"c\",\
             \"host\":\"a.example\",\"protocol\":\"HTTP/1.1\",\"status\":200,\"bytes\":612,\
             \"duration_us\":1234,\"cache\":\"hit\",\"referer\":\"\",\"user_agent\":\"x\\\\y\"}\n"
        );
    }

    #[test]
    fn json_lines_say_utf_8_as_it_is_and_what_is_none_byte_by_byte() {
        for (bytes, expected) in [
            ("é 中 🦀".as_bytes(), "é 中 🦀"),
            (b"\"8\" c:\\", "\\\"8\\\" c:\\\\"),
            ("\t\u{0}\u{7f}\u{9b}\u{a0}".as_bytes(), "\\u0009\\u0000\\u007f\\u009b\u{a0}"),
            (b"\xff|\xe4\xb8|\xc3\xa9", "\\\\xff|\\\\xe4\\\\xb8|é"),
        ] {
            let mut out = Vec::new();
            write_json_string(bytes, &mut out);
            assert_eq!(String::from_utf8(out).unwrap(), expected);
        }
    }

    /// A pipe that takes so many bytes more.
    #[derive(Clone, Default)]
    struct Pipe(Arc<std::sync::Mutex<(usize, Vec<u8>)>>);

    impl Write for Pipe {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let (room, taken) = &mut *self.0.lock().unwrap();
            let length = bytes.len().min(*room);
            if length == 0 {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            *room -= length;
            taken.extend_from_slice(&bytes[..length]);
            Ok(length)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_pipe_that_fills_within_a_line_gets_its_rest_first_and_lines_are_lost_as_a_whole() {
        for room in 0..12 {
            let pipe = Pipe::default();
            let mut output = Output::new(Box::new(pipe.clone()));
            pipe.0.lock().unwrap().0 = room;
            let mut lost = output.write(b"one\ntwo\nthree\n").unwrap_err().0;
            // Room for less than the torn line's rest at most.
            pipe.0.lock().unwrap().0 = 1;
            lost += output.write(b"four\n").unwrap_err().0;
            pipe.0.lock().unwrap().0 = 100;
            output.write(b"five\n").unwrap();
            let text = String::from_utf8(std::mem::take(&mut pipe.0.lock().unwrap().1)).unwrap();
            let known = ["one", "two", "three", "four", "five"];
            assert!(text.lines().all(|line| known.contains(&line)), "{room}: {text:?}");
            assert_eq!(text.lines().count() as u64 + lost, 5, "{room}: {text:?}");
        }
    }

    #[test]
    fn lines_beyond_the_queue_are_counted() {
        let (sender, receiver) = sync_channel(1);
        let buffer = LogBuffer::new(LogSender { sender, format: LogFormat::Combined });
        let metrics = CoreMetrics::default();
        for _ in 0..3 {
            buffer.record(&record(b""), &metrics);
            buffer.flush(&metrics);
        }
        assert_eq!(metrics.access_log_dropped_total.get(), 2);
        assert_eq!(receiver.recv().unwrap().iter().filter(|byte| **byte == b'\n').count(), 1);
    }
}
