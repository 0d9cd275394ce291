//! A server and a client in C, compiled against the header and the library.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

fn compile(directory: &Path, name: &str) -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let deps = std::env::current_exe().unwrap().parent().unwrap().to_path_buf();
    let library = "libtidegate_trickles_c.so";
    let library = [deps.join(library), deps.parent().unwrap().join(library)]
        .into_iter()
        .find(|path| path.exists())
        .unwrap_or_else(|| panic!("{library} beside {}", deps.display()));
    let compiler = Command::new("cc").arg("--version").stdout(Stdio::null()).status();
    assert!(compiler.is_ok(), "a C compiler is missing; apt-get install gcc libc6-dev");
    let program = directory.join(name);
    let output = Command::new("cc")
        .args(["-std=c11", "-D_POSIX_C_SOURCE=200809L", "-Wall", "-Wextra", "-Werror", "-O1", "-o"])
        .arg(&program)
        .arg(package.join("tests").join(format!("{name}.c")))
        .arg("-I")
        .arg(package.join("include"))
        .arg(&library)
        .arg(format!("-Wl,-rpath,{}", library.parent().unwrap().display()))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn programs_in_c_when_they_talk_then_every_byte_arrives() {
    let directory = tempfile::tempdir().unwrap();
    let keys = directory.path().join("keys");
    std::fs::write(&keys, "1 000102030405060708090a0b0c0d0e0f\n").unwrap();
    let (server, client) = (compile(directory.path(), "server"), compile(directory.path(), "client"));
    let spawned =
        Command::new(server).arg(&keys).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut server = Server(spawned);
    let mut port = String::new();
    BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut port).unwrap();
    let address = format!("127.0.0.1:{}", port.trim());
    for length in [0_u64, 1, 5000, 2_000_000] {
        let output = Command::new(&client).arg(&address).arg(length.to_string()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(output.stdout.len() as u64, length);
        let wrong = output.stdout.iter().zip(0_u64..).find(|&(&byte, at)| byte != (7 * at + at / 256) as u8);
        assert_eq!(wrong, None);
    }
    let refused = Command::new(&client).args([&address, "13"]).output().unwrap();
    assert!(!refused.status.success(), "a reset is an error");
    drop(server.0.stdin.take());
    assert!(server.0.wait().unwrap().success());
}

#[test]
fn a_program_in_c_when_its_arguments_are_wrong_then_each_call_says_so_and_the_client_is_answered() {
    let directory = tempfile::tempdir().unwrap();
    let keys = directory.path().join("keys");
    std::fs::write(&keys, "1 000102030405060708090a0b0c0d0e0f\n").unwrap();
    let output = Command::new(compile(directory.path(), "misuse")).arg(&keys).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
