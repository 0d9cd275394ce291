//! Debian's Apache, lighttpd and gunicorn, unmodified, behind a chain: each is put through the same requests.
#![allow(clippy::unwrap_used)]

mod common;

use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

use common::{Chain, Site, free_port, wait_until};

const CHAIN: &[&str] = &["package", "persist", "normalize", "prior"];

/// Installs a Debian package if the program that it brings is missing; false, said aloud, if that cannot be done.
fn needs(program: &str, package: &str) -> bool {
    let is_there = || {
        let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin";
        std::env::split_paths(&path).any(|directory| directory.join(program).is_file())
    };
    if is_there() {
        return true;
    }
    for step in [&["update", "-qq"][..], &["install", "-y", "-qq", package]] {
        let mut apt = Command::new("apt-get");
        apt.args(step).env("DEBIAN_FRONTEND", "noninteractive").stdout(Stdio::null()).stderr(Stdio::null());
        let _ = apt.status();
    }
    let done = is_there();
    if !done {
        eprintln!("SKIPPED: {program} is missing and Debian's package {package} cannot be installed");
    }
    done
}

/// What every server must do behind a chain. `/cgi/echo` says the method and the length of the content that it read;
/// `/cgi/slow` takes a while.
fn exercise(chain: &Chain, site: &Site) {
    let mut client = chain.client();
    for _ in 0..20 {
        let response = client.get("/small");
        assert_eq!((response.status, &response.body[..]), (200, &b"small\n"[..]));
        assert_ne!(response.field("connection").unwrap_or_default().to_ascii_lowercase(), "close");
    }
    assert!(client.get("/big").body == site.big);
    client.send(b"HEAD /big HTTP/1.1\r\nHost: test\r\n\r\n");
    assert_eq!(client.response(true).field("content-length").unwrap(), "3000000");
    assert_eq!(client.get("/missing").status, 404);
    assert_eq!(client.get("/cgi/echo").body, b"GET 0\n");
    for length in [5, 100_000, 2_000_000] {
        let head = format!("POST /cgi/echo HTTP/1.1\r\nHost: test\r\nContent-Length: {length}\r\n\r\n");
        client.send(head.as_bytes());
        client.send(&site.big[..length]);
        assert_eq!(String::from_utf8_lossy(&client.response(false).body), format!("POST {length}\n"));
    }
    // The request is read to its end, and the answer takes a while: nobody may tell the server that its client left.
    assert_eq!(client.get("/cgi/slow").body, b"done\n");
    let one = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n");
    client.send(["/small", "/cgi/slow", "/small"].map(one).concat().as_bytes());
    assert_eq!(client.response(false).body, b"small\n");
    assert_eq!(client.response(false).body, b"done\n");
    assert_eq!(client.response(false).body, b"small\n");
    client.send(b"GET /small HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n");
    assert_eq!(client.response(false).body, b"small\n");
    assert!(client.is_ended());
    abort(chain);
    let mut many: Vec<_> = (0..100).map(|_| chain.client()).collect();
    for _ in 0..2 {
        for client in &mut many {
            assert_eq!(client.get("/small").body, b"small\n");
        }
    }
}

fn abort(chain: &Chain) {
    for _ in 0..20 {
        chain.client().send(b"GET /big HTTP/1.1\r\nHost: test\r\n\r\n");
        chain.client().send(b"POST /cgi/echo HTTP/1.1\r\nHost: test\r\nContent-Length: 1000000\r\n\r\nabc");
        chain.client().send(b"GET /cgi/slow HTTP/1.1\r\nHost: test\r\n\r\n");
    }
    assert_eq!(chain.get("/small").body, b"small\n");
}

fn run(site: &Site, environment: &[(&str, &str)], command: &dyn Fn(u16) -> Vec<String>) {
    let port = free_port();
    let command = command(port);
    let set = environment.iter().map(|(name, value)| format!("{name}={value}"));
    let words: Vec<String> = ["env".to_owned()].into_iter().chain(set).chain(command).collect();
    let chain = Chain::start(port, CHAIN, &common::strs(&words));
    exercise(&chain, site);
    chain.stop();
}

fn site_with_cgi() -> Site {
    let site = Site::new();
    let directory = site.path().join("html/cgi");
    std::fs::create_dir(&directory).unwrap();
    let scripts = [
        ("echo", "#!/bin/sh\nprintf 'Content-Type: text/plain\\n\\n'\necho \"$REQUEST_METHOD $(wc -c)\"\n"),
        ("slow", "#!/bin/sh\nprintf 'Content-Type: text/plain\\n\\n'\nsleep 0.3\necho done\n"),
    ];
    for (name, script) in scripts {
        let file = directory.join(name);
        std::fs::write(&file, script).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    site
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
    if !needs("apache2", "apache2") {
        return;
    }
    let site = site_with_cgi();
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
    if !needs("lighttpd", "lighttpd") {
        return;
    }
    let site = site_with_cgi();
    let configuration = "
server.document-root = \"DIR/html\"
server.port = PORT
server.modules = (\"mod_cgi\")
server.errorlog = \"DIR/lighttpd.log\"
index-file.names = (\"index.html\")
$HTTP[\"url\"] =~ \"^/cgi/\" { cgi.assign = (\"\" => \"\") }
";
    run(&site, &[], &|port| {
        let file = site.configuration("lighttpd.conf", port, configuration);
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
    if !needs("gunicorn", "gunicorn") {
        return;
    }
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
