//! Replicas as processes, and networks of their own.
#![allow(dead_code, reason = "not every test file uses all of it")]

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};

/// A process that serves, and ends with the test.
pub struct Replica {
    /// What it has said before it listened, and what it says from then on.
    pub said: Vec<String>,
    pub later: Receiver<String>,
    pub process: Child,
    pub address: String,
}

impl Drop for Replica {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

pub fn tidegate() -> Command {
    Command::new(env!("CARGO_BIN_EXE_tidegate"))
}

/// Starts a replica and waits until it says where it listens.
pub fn start(directory: &Path, name: &str) -> Replica {
    start_with(directory, name, tidegate(), "")
}

pub fn start_with(directory: &Path, name: &str, program: Command, more: &str) -> Replica {
    let config = directory.join(format!("{name}.toml"));
    let text = format!(
        "workers = 1\n[[listen]]\naddress = \"127.0.0.1:0\"\nprotocol = \"trickles\"\n{more}keys = {:?}\n\
         [admin]\naddress = \"127.0.0.1:0\"\n[[route]]\nroot = {:?}\n[cache]\nmemory = \"0B\"\n",
        directory.join("keys"),
        directory.join("root"),
    );
    std::fs::write(&config, text).unwrap();
    run(program, &config)
}

pub fn run(mut program: Command, config: &Path) -> Replica {
    let mut process = program.arg("run").arg("--config").arg(config).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
    let mut said = Vec::new();
    let address = loop {
        let line = lines.next().unwrap_or_else(|| panic!("ended after {said:?}")).unwrap();
        if let Some((_, address)) = line.split_once("listening on trickles://") {
            break address.to_owned();
        }
        said.push(line);
    };
    let (sender, later) = mpsc::channel();
    // Whether or not somebody listens, the process must not be stopped.
    std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| drop(sender.send(line))));
    Replica { process, address, said, later }
}

/// Bytes that follow no short pattern.
pub fn noise(count: u32) -> Vec<u8> {
    (0..count).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

/// What a download writes that is in its middle as `lost` is killed; it has to end well. Each file that it is for has more bytes
/// than the pipe and the client's window hold: it stands still until it is read.
pub fn downloaded_without(lost: Replica, mut fetch: Command) -> Vec<u8> {
    let mut fetch = fetch.stdout(Stdio::piped()).spawn().unwrap();
    let mut output = fetch.stdout.take().unwrap();
    let mut content = vec![0; 1_000_000];
    output.read_exact(&mut content).unwrap();
    drop(lost);
    output.read_to_end(&mut content).unwrap();
    assert!(fetch.wait().unwrap().success());
    content
}

pub fn site(directory: &Path, bytes: &[u8]) {
    std::fs::create_dir(directory.join("root")).unwrap();
    std::fs::write(directory.join("root/large.bin"), bytes).unwrap();
    std::fs::write(directory.join("keys"), "7 000102030405060708090a0b0c0d0e0f\n").unwrap();
}

/// A network namespace for one test, which needs root.
pub struct Namespace(String);

impl Namespace {
    pub fn new() -> Self {
        let name = format!("trickles-t{}", std::process::id());
        let ip = |arguments: &[&str]| {
            let output = Command::new("ip").args(arguments).output();
            let output = output.expect("ip is missing; apt-get install iproute2");
            assert!(output.status.success(), "needs root: {}", String::from_utf8_lossy(&output.stderr));
        };
        ip(&["netns", "add", &name]);
        ip(&["-n", &name, "link", "set", "lo", "up"]);
        Self(name)
    }

    pub fn tidegate(&self) -> Command {
        self.program(env!("CARGO_BIN_EXE_tidegate"))
    }

    pub fn program(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}", self.0)).arg(program);
        command
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "delete", &self.0]).status();
    }
}
