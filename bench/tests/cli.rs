//! The command line, and the bare responder behind it.

#![allow(clippy::unwrap_used)] // clippy takes helpers of tests for no tests.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Output};
use std::time::Duration;

fn bench(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate-bench"));
    command.env_remove("TIDEGATE_BIN").args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A process that is ended with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The bare responder, and a connection to it.
fn bare(size_bytes: usize) -> (Running, TcpStream) {
    let address = tidegate_ports::free_address().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate-bench"));
    let running =
        Running(command.args(["bare", &address.to_string(), &size_bytes.to_string()]).spawn().unwrap());
    loop {
        if let Ok(stream) = TcpStream::connect(address) {
            stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            return (running, stream);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn help_shows_an_example() {
    let output = bench(&["--help"]);
    assert!(output.status.success());
    assert!(text(&output.stdout).contains("tidegate-bench --only misses"));
}

#[test]
fn a_name_that_no_scenario_has_is_an_error_that_lists_them() {
    let output = bench(&["--only", "nonsense"]);
    assert_eq!(output.status.code(), Some(1));
    let errors = text(&output.stderr);
    assert!(
        errors.starts_with("error: no scenario's name contains \"nonsense\"; there are: 612 B,"),
        "{errors}"
    );
}

#[test]
fn a_missing_tidegate_is_an_error_that_says_how_to_build_it() {
    let output = bench(&["--tidegate", "/nowhere/tidegate"]);
    assert_eq!(output.status.code(), Some(1));
    let errors = text(&output.stderr);
    assert!(errors.starts_with("error: /nowhere/tidegate is not there; build it with: "), "{errors}");
}

#[test]
fn no_rounds_and_no_seconds_are_bad_usage() {
    for arguments in [["--rounds", "0"], ["--seconds", "0"]] {
        assert_eq!(bench(&arguments).status.code(), Some(2), "{arguments:?}");
    }
}

#[test]
fn the_bare_responder_answers_each_of_two_requests_and_the_last_one_with_close() {
    // More than a socket takes at once.
    const SIZE_BYTES: usize = 8 << 20;
    let (_running, mut stream) = bare(SIZE_BYTES);
    stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let head = b"HTTP/1.1 200 OK\r\nServer: bare\r\nDate: Sun, 06 Nov 1994 08:49:37 GMT\r\n";
    let framing = format!("Content-Length: {SIZE_BYTES}\r\n\r\n");
    let mut first = vec![0; head.len() + framing.len() + SIZE_BYTES];
    stream.read_exact(&mut first).unwrap();
    assert!(first.starts_with(&[head, framing.as_bytes()].concat()));
    assert!(first[head.len() + framing.len()..].iter().all(|byte| *byte == b'a'));

    stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut last = Vec::new();
    stream.read_to_end(&mut last).unwrap();
    let close = b"Connection: close\r\n";
    assert_eq!(last.len(), first.len() + close.len());
    assert!(last.starts_with(&[&head[..], close].concat()));
}
