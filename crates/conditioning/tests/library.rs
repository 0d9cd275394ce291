//! The C library: the paper's server, and a program of each style.
#![allow(clippy::unwrap_used)]

mod common;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use common::{Client, Site, free_port, library, program, wait_until};

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples")
}

/// Compiles an example as a user would.
fn compile(source: &str, directory: &Path) -> PathBuf {
    let shared = library("libtidegate_cc.so");
    let place = shared.parent().unwrap();
    let output = directory.join(Path::new(source).file_stem().unwrap());
    let status = Command::new("cc")
        .args(["-Wall", "-Wextra", "-Werror", "-O1", "-pthread", "-o"])
        .arg(&output)
        .arg(sources().join(source))
        .arg("-I")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("cc/include"))
        .arg(format!("-L{}", place.display()))
        .arg(format!("-Wl,-rpath,{}", place.display()))
        .arg("-ltidegate_cc")
        .status()
        .unwrap();
    assert!(status.success(), "{source} does not compile");
    output
}

/// pkg-config named a library that is there for dynamic linking only.
#[test]
fn a_server_is_linked_statically_with_what_pkg_config_names() {
    let directory = tempfile::tempdir().unwrap();
    let libraries =
        include_str!("../cc/tidegate-cc.pc.in").lines().find_map(|line| line.strip_prefix("Libs.private:"));
    let archive = library("libtidegate_cc.a");
    let mut link = Command::new("cc");
    link.args(["-static", "-o"]).arg(directory.path().join("ccserver")).arg(sources().join("ccserver.c"));
    link.arg("-I").arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("cc/include"));
    link.arg(archive).args(libraries.unwrap().split_whitespace());
    let output = link.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

struct Server {
    child: Child,
    port: u16,
}

impl Server {
    fn start(program_file: &Path, arguments: &[&str]) -> Self {
        let port = free_port();
        let child = Command::new(program_file)
            .arg(port.to_string())
            .args(arguments)
            .env("TIDEGATE_CC", program())
            // Cargo's would be asked before the path that was compiled in.
            .env_remove("LD_LIBRARY_PATH")
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let server = Self { child, port };
        wait_until("the server listens", || Client::try_connect(server.address()).is_ok());
        server
    }

    fn address(&self) -> std::net::SocketAddr {
        ([127, 0, 0, 1], self.port).into()
    }

    fn client(&self) -> Client {
        Client::try_connect(self.address()).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let address = self.address();
        // The chain follows its server, and with it the listening socket.
        wait_until("the filters have ended", || Client::try_connect(address).is_err());
    }
}

#[test]
fn the_papers_server_serves_files_one_request_at_a_time() {
    let site = Site::new();
    let lines = std::fs::read_to_string(sources().join("ccserver.c")).unwrap().lines().count();
    assert!(lines <= 236, "{lines} lines: the paper's has 236 (§4.1)");
    let root = site.path().join("html");
    std::fs::write(root.join("a b.txt"), "spaced\n").unwrap();
    std::os::unix::fs::symlink("/etc/passwd", root.join("way-out")).unwrap();
    let server = Server::start(&compile("ccserver.c", site.path()), &[root.to_str().unwrap()]);
    let mut client = server.client();
    for _ in 0..3 {
        assert_eq!(client.get("/small").body, b"small\n");
        assert!(client.get("/big").body == site.big);
        assert_eq!(client.get("/").body, b"index\n");
        client.send(b"HEAD /big HTTP/1.1\r\nHost: test\r\n\r\n");
        assert_eq!(client.response(true).field("content-length").unwrap(), "3000000");
    }
    assert_eq!(client.get("/").field("content-type").unwrap(), "text/html; charset=utf-8");
    assert_eq!(client.get("/a%20b.txt?query").body, b"spaced\n");
    for path in ["/missing", "/../nginx.conf", "/%2e%2e/x", "/way-out", "//etc/passwd", "/a%2f..%2f..%2fx"] {
        assert_eq!(client.get(path).status, 404, "{path}");
    }
    client.send(b"POST /small HTTP/1.1\r\nHost: test\r\nContent-Length: 5\r\n\r\nabcde");
    assert_eq!(client.response(false).status, 501);
    assert_eq!(client.get("/small").body, b"small\n");
    let mut idle: Vec<_> = (0..100).map(|_| server.client()).collect();
    assert_eq!(client.get("/small").body, b"small\n");
    for client in &mut idle {
        assert_eq!(client.get("/small").body, b"small\n");
    }
}

fn exercise(source: &str, arguments: &[&str], style: &str) {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(&compile(source, directory.path()), arguments);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let mut client = server.client();
                for round in 0..50 {
                    let body = String::from_utf8(client.get("/").body).unwrap();
                    assert!(body.starts_with(style), "{body}");
                    if round % 10 == 0 {
                        client = server.client();
                    }
                }
            });
        }
    });
    let mut client = server.client();
    client.send(b"HEAD / HTTP/1.1\r\nHost: test\r\n\r\n");
    assert!(client.response(true).field("content-length").is_some());
    let one = b"GET / HTTP/1.1\r\nHost: test\r\n\r\n";
    client.send(&one.repeat(5));
    for _ in 0..5 {
        assert_eq!(client.response(false).status, 200);
    }
    client.send(b"GET / HTTP/1.0\r\n\r\n");
    assert_eq!(client.response(false).status, 200);
    assert!(client.is_ended());
}

#[test]
fn a_process_for_each_request() {
    exercise("cc/process.c", &[], "process");
}

#[test]
fn processes_forked_before() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(&compile("cc/prefork.c", directory.path()), &[]);
    let mut processes = std::collections::HashSet::new();
    wait_until("more than one process has answered", || {
        processes.insert(server.client().get("/").body);
        processes.len() > 1
    });
    // The parent alone is killed in the end: the children must follow it for the filters to end.
}

#[test]
fn a_thread_for_each_request() {
    exercise("cc/threads.c", &[], "threads");
}

#[test]
fn events_by_select_poll_and_epoll() {
    for with in ["select", "poll", "epoll"] {
        exercise("cc/events.c", &[with], "events");
    }
}

#[test]
fn what_cannot_be_started_is_an_errno() {
    let site = Site::new();
    let server = compile("ccserver.c", site.path());
    let fails = |port: u16, filters: &[&str]| {
        let mut command = Command::new(&server);
        command.arg(port.to_string()).arg(site.path()).args(filters).env("TIDEGATE_CC", program());
        command.env_remove("LD_LIBRARY_PATH");
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(fails(free_port(), &["prsist"]).contains("cc_createlsock: Invalid argument"));
    assert!(fails(free_port(), &["/bin/false"]).contains("cc_createlsock: No child processes"));
    let taken = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    assert!(fails(port, &["package"]).contains("cc_createlsock: Address already in use"));
}
