//! Debian's Apache, lighttpd and gunicorn, unmodified, behind a chain: each is put through the same requests.
#![allow(clippy::unwrap_used)]

mod common;

use std::os::unix::fs::PermissionsExt;

use common::{Chain, Site, exercise, free_port, needs, wait_until};

const CHAIN: &[&str] = &["package", "persist", "normalize", "prior"];

fn run(site: &Site, environment: &[(&str, &str)], command: &dyn Fn(u16) -> Vec<String>) {
    let port = free_port();
    let command = command(port);
    let set = environment.iter().map(|(name, value)| format!("{name}={value}"));
    let words: Vec<String> = ["env".to_owned()].into_iter().chain(set).chain(command).collect();
    let chain = Chain::start(port, CHAIN, &common::strs(&words));
    exercise(&chain, site);
    // A client that says that it sends no more is there for the answer: these servers do not take it for gone.
    let mut client = chain.client();
    client.send(b"GET /cgi/slow HTTP/1.1\r\nHost: test\r\n\r\n");
    client.stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(client.response(false).body, b"done\n");
    assert!(client.is_ended());
    chain.stop();
}

const APACHE: &str = "
ServerRoot DIR
ServerName localhost
PidFile DIR/apache.pid
DefaultRuntimeDir DIR
Listen PORT
LoadModule mpm_${MPM}_module /usr/lib/apache2/modules/mod_mpm_${MPM}.so
LoadModule authz_core_module /usr/lib/apache2/modules/mod_authz_core.so
LoadModule alias_module /usr/lib/apache2/modules/mod_alias.so
LoadModule cgi_module /usr/lib/apache2/modules/mod_cgi.so
ErrorLog DIR/apache.log
DocumentRoot DIR/html
KeepAlive On
KeepAliveTimeout 30
User www-data
Group www-data
ScriptAlias /cgi/ DIR/html/cgi/
<Directory DIR/html>
  Require all granted
  Options +ExecCGI
</Directory>
";

fn apache(mpm: &str) {
    needs("apache2", "apache2");
    let site = Site::with_cgi();
    run(&site, &[("MPM", mpm)], &|port| {
        let file = site.configuration("apache.conf", port, APACHE);
        ["apache2", "-DFOREGROUND", "-f", &file].map(str::to_owned).to_vec()
    });
    let log = std::fs::read_to_string(site.path().join("apache.log")).unwrap();
    assert!(!log.contains("exit signal"), "a process of Apache's died: {log}");
}

#[test]
fn apache_prefork() {
    apache("prefork");
}

#[test]
fn apache_event() {
    apache("event");
}

#[test]
fn lighttpd() {
    needs("lighttpd", "lighttpd");
    let site = Site::with_cgi();
    run(&site, &[], &|port| {
        let file = site.configuration("lighttpd.conf", port, common::LIGHTTPD);
        ["lighttpd", "-D", "-f", &file].map(str::to_owned).to_vec()
    });
}

const WSGI: &str = "
import os, time
def application(environ, start_response):
    path = environ['PATH_INFO']
    if path == '/cgi/slow':
        time.sleep(0.3)
        body = b'done\\n'
    elif path == '/cgi/echo':
        body = b'%s %d\\n' % (environ['REQUEST_METHOD'].encode(), len(environ['wsgi.input'].read()))
    else:
        try:
            body = open('DIR/html/' + (os.path.basename(path) or 'index.html'), 'rb').read()
        except OSError:
            start_response('404 Not Found', [('Content-Length', '0')])
            return []
    start_response('200 OK', [('Content-Type', 'text/plain'), ('Content-Length', str(len(body)))])
    return [body]
";

fn gunicorn(worker: &[&str]) {
    needs("gunicorn", "gunicorn");
    let site = Site::new();
    site.configuration("application.py", 0, WSGI);
    run(&site, &[("PYTHONDONTWRITEBYTECODE", "1")], &|port| {
        let (bind, directory) = (format!("127.0.0.1:{port}"), site.path().to_str().unwrap());
        let common =
            ["gunicorn", "--bind", &bind, "--chdir", directory, "--workers", "2", "--log-level", "error"];
        common.iter().chain(worker).chain(&["application"]).map(|word| word.to_string()).collect()
    });
}

/// This one ends each connection after its response; behind a chain its clients keep theirs.
#[test]
fn gunicorn_with_synchronous_workers() {
    gunicorn(&[]);
}

#[test]
fn gunicorn_with_threads() {
    gunicorn(&["--threads", "4"]);
}

/// A program for each connection, which has it as its input and output, as inetd(8) does; `vfork` as Python's
/// subprocess module and busybox do it, `fork` as others.
const INETD: &str = "
import os, signal, socket, subprocess, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
listener = socket.create_server(('127.0.0.1', PORT))
while True:
    connection, _ = listener.accept()
    if sys.argv[1] == 'vfork':
        subprocess.Popen(['DIR/answer'], stdin=connection, stdout=connection)
    elif os.fork() == 0:
        os.dup2(connection.fileno(), 0)
        os.dup2(connection.fileno(), 1)
        os.execv('DIR/answer', ['answer'])
    connection.close()
";

const ANSWER: &str = "#!/bin/sh
read -r method path version
while read -r field; do [ \"$field\" = \"$(printf '\\r')\" ] && break; done
printf 'HTTP/1.1 200 OK\\r\\nContent-Length: 6\\r\\n\\r\\n'
cat DIR/html/small
";

fn a_program_for_each_connection(style: &str) {
    needs("python3", "python3");
    let site = Site::new();
    let answer = site.configuration("answer", 0, ANSWER);
    std::fs::set_permissions(answer, std::fs::Permissions::from_mode(0o755)).unwrap();
    let port = free_port();
    let server = site.configuration("inetd.py", port, INETD);
    let chain = Chain::start(port, CHAIN, &["python3", &server, style]);
    for _ in 0..3 {
        let mut client = chain.client();
        assert_eq!(client.get("/small").body, b"small\n");
        assert!(client.is_ended(), "the program's end is the connection's");
    }
    chain.stop();
}

#[test]
fn a_server_that_forks_and_becomes_a_program_for_each_connection() {
    a_program_for_each_connection("fork");
}

#[test]
fn a_server_that_starts_a_program_for_each_connection_in_its_own_memory() {
    a_program_for_each_connection("vfork");
}

/// Closes by syscall(2), as libuv does, and reads files under the same number.
const CLOSES_BY_ITSELF: &str = "
import ctypes, os, platform, socket
CLOSE = {'x86_64': 3, 'aarch64': 57}[platform.machine()]
libc = ctypes.CDLL(None)
listener = socket.create_server(('127.0.0.1', PORT))
body = b'small\\n'
while True:
    fd = listener.accept()[0].detach()
    os.read(fd, 65536)
    os.write(fd, b'HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n' % len(body) + body)
    os.read(fd, 1)
    libc.syscall(CLOSE, fd)
    with open('DIR/html/small', 'rb', buffering=0) as file:
        assert file.fileno() == fd
        body = file.read()
";

#[test]
fn a_server_that_closes_without_libcs_close() {
    needs("python3", "python3");
    let site = Site::new();
    let port = free_port();
    let server = site.configuration("server.py", port, CLOSES_BY_ITSELF);
    let chain = Chain::start(port, CHAIN, &["python3", &server]);
    let mut client = chain.client();
    for _ in 0..20 {
        assert_eq!(client.get("/small").body, b"small\n");
    }
    chain.stop();
}

#[test]
fn a_server_that_goes_to_the_background_is_followed_there() {
    let site = Site::new();
    let port = free_port();
    let words = site.nginx(port);
    let file = words.last().unwrap();
    let text = std::fs::read_to_string(file).unwrap().replace("daemon off;", "daemon on;");
    std::fs::write(file, text).unwrap();
    let chain = Chain::start(port, CHAIN, &common::strs(&words));
    let mut client = chain.client();
    for _ in 0..5 {
        assert_eq!(client.get("/small").body, b"small\n");
    }
    // A hang-up is nginx's to understand: it reads its configuration again.
    chain.signal(libc::SIGHUP);
    let log = || std::fs::read_to_string(site.path().join("error.log")).unwrap();
    wait_until("nginx has replaced its workers", || log().matches("exited with code 0").count() == 2);
    assert_eq!(client.get("/small").body, b"small\n");
    chain.stop();
}
