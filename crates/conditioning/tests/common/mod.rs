//! Chains in front of real servers, and a client that looks at every byte.
#![allow(dead_code, clippy::unwrap_used)]

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Bytes by which the head of a request with content is longer to the server, which is told to read no further one.
pub const TOLD: usize = "Connection: close\r\n".len();

pub const PATIENCE: Duration = Duration::from_secs(20);

pub fn program() -> PathBuf {
    env!("CARGO_BIN_EXE_tidegate-cc").into()
}

/// A library that was built beside the tests.
pub fn library(name: &str) -> PathBuf {
    let directory = program().parent().unwrap().to_owned();
    let beside_tests = std::env::current_exe().unwrap().parent().unwrap().join(name);
    [beside_tests, directory.join("deps").join(name), directory.join(name)]
        .into_iter()
        .find(|file| file.is_file())
        .unwrap_or_else(|| panic!("{name} was not built"))
}

/// A port that no other test is given.
pub fn free_port() -> u16 {
    tidegate_ports::free_port().unwrap()
}

pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "not so after {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A running `tidegate-cc condition`, and everything that it started.
pub struct Chain {
    pub child: Child,
    pub address: SocketAddr,
    /// What the chain and its server have said: a pipe that nobody reads would hold them up once it is full.
    said: File,
}

impl Chain {
    pub fn command(port: u16, filters: &[&str], command: &[&str]) -> Command {
        Self::listening(&[format!("127.0.0.1:{port}")], filters, command)
    }

    pub fn listening(addresses: &[String], filters: &[&str], command: &[&str]) -> Command {
        Self::with_options(&[], addresses, filters, command)
    }

    /// `options` are further ones of `condition`.
    pub fn with_options(
        options: &[&str],
        addresses: &[String],
        filters: &[&str],
        command: &[&str],
    ) -> Command {
        let mut launcher = Command::new(program());
        launcher.arg("condition").args(options);
        for address in addresses {
            launcher.args(["--listen", address]);
        }
        for filter in filters {
            launcher.args(["--filter", filter]);
        }
        launcher.arg("--").args(command);
        launcher.env("TIDEGATE_PRELOAD", library("libtidegate_preload.so"));
        // SAFETY: setsid is async-signal-safe.
        unsafe {
            launcher.pre_exec(|| {
                libc::setsid();
                Ok(())
            });
        }
        launcher.stdin(Stdio::null()).stdout(Stdio::null());
        launcher
    }

    fn spawn(command: &mut Command, port: u16) -> Self {
        let said = tempfile::tempfile().unwrap();
        let child = command.stderr(said.try_clone().unwrap()).spawn().unwrap();
        Self { child, address: ([127, 0, 0, 1], port).into(), said }
    }

    /// Starts a chain and waits until it serves.
    pub fn start(port: u16, filters: &[&str], command: &[&str]) -> Self {
        Self::once_it_serves(Self::command(port, filters, command), port)
    }

    /// Waits until what `command` starts serves.
    pub fn once_it_serves(mut command: Command, port: u16) -> Self {
        let mut chain = Self::spawn(&mut command, port);
        wait_until("the server answers", || {
            assert_eq!(chain.child.try_wait().unwrap(), None, "ended: {}", chain.errors());
            let Ok(mut probe) = Client::try_connect(chain.address) else { return false };
            probe.stream.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
            probe.stream.write_all(b"GET / HTTP/1.0\r\n\r\n").is_ok() && probe.stream.fill_buf_has_bytes()
        });
        chain
    }

    /// Waits until the chain accepts connections, of which the server learns nothing.
    pub fn once_it_listens(mut command: Command, port: u16) -> Self {
        let mut chain = Self::spawn(&mut command, port);
        wait_until("the chain listens", || {
            assert_eq!(chain.child.try_wait().unwrap(), None, "ended: {}", chain.errors());
            Client::try_connect(chain.address).is_ok()
        });
        chain
    }

    pub fn errors(&self) -> String {
        let mut bytes = vec![0; self.said.metadata().unwrap().len() as usize];
        self.said.read_exact_at(&mut bytes, 0).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The processes that belong to this chain and whose command line contains `what`.
    pub fn processes(&self, what: &str) -> Vec<i32> {
        processes(self.child.id(), what)
    }

    /// One of them, once there is one: a chain answers before all of its processes have got their names.
    pub fn process(&self, what: &str) -> i32 {
        wait_until(&format!("there is {what}"), || !self.processes(what).is_empty());
        self.processes(what)[0]
    }

    pub fn client(&self) -> Client {
        Client::try_connect(self.address).unwrap()
    }

    pub fn get(&self, path: &str) -> Response {
        self.client().get(path)
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: a signal to a child that was not waited for.
        unsafe { libc::kill(self.child.id() as i32, signal) };
    }

    /// A filter's counter, as it writes it down when it is asked to.
    pub fn counted(&self, filter: &str, counter: &str) -> u64 {
        let start = format!("{filter}: ");
        let lines = || {
            let said = self.errors();
            said.split_inclusive('\n')
                .filter(|line| line.starts_with(&start))
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        let before = lines().len();
        self.signal(libc::SIGUSR1);
        wait_until("its counters are there", || {
            lines().len() > before && lines().last().is_some_and(|line| line.ends_with('\n'))
        });
        let last = lines().pop().unwrap();
        let mut values = last.split_whitespace().filter_map(|pair| pair.split_once('='));
        values.find(|(name, _)| *name == counter).unwrap().1.parse().unwrap()
    }

    /// Ends the chain and checks that nothing is left.
    pub fn stop(mut self) -> ExitStatus {
        self.signal(libc::SIGTERM);
        let status = self.child.wait().unwrap();
        assert_eq!(self.processes(""), [0i32; 0], "processes left behind");
        status
    }
}

impl Drop for Chain {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let said = self.errors();
            let last: Vec<&str> = said.lines().rev().take(40).collect();
            eprintln!("last said by the chain and its server, newest first:\n{}", last.join("\n"));
        }
        if self.child.try_wait().is_ok_and(|status| status.is_none()) {
            self.signal(libc::SIGTERM);
            let _ = self.child.wait();
        }
    }
}

/// The processes of a session whose command line contains `what`. Servers overwrite their environment, but stay in the
/// session that their launcher was put into.
pub fn processes(session: u32, what: &str) -> Vec<i32> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        let fields = stat.rsplit(')').next().unwrap_or("");
        let of_session = fields.split_whitespace().nth(3) == Some(&session.to_string());
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        if of_session && String::from_utf8_lossy(&line).replace('\0', " ").contains(what) {
            found.push(pid);
        }
    }
    found
}

trait HasBytes {
    fn fill_buf_has_bytes(&mut self) -> bool;
}

impl HasBytes for TcpStream {
    fn fill_buf_has_bytes(&mut self) -> bool {
        matches!(self.peek(&mut [0]), Ok(1))
    }
}

/// A client connection.
pub struct Client {
    pub stream: TcpStream,
    reader: BufReader<TcpStream>,
}

#[derive(Debug)]
pub struct Response {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
}

impl Response {
    pub fn field(&self, name: &str) -> Option<String> {
        let mut lines = self.head.lines().filter_map(|line| line.split_once(':'));
        lines.find(|(field, _)| field.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim().to_owned())
    }
}

impl Client {
    pub fn try_connect(address: SocketAddr) -> std::io::Result<Self> {
        Ok(Self::over(TcpStream::connect(address)?))
    }

    pub fn over(stream: TcpStream) -> Self {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        let reader = BufReader::new(stream.try_clone().unwrap());
        Self { stream, reader }
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    pub fn get(&mut self, path: &str) -> Response {
        self.send(format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n").as_bytes());
        self.response(false)
    }

    pub fn response(&mut self, to_head: bool) -> Response {
        self.try_response(to_head).unwrap()
    }

    pub fn try_response(&mut self, to_head: bool) -> std::io::Result<Response> {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if self.reader.read_line(&mut head)? == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
        }
        let status = head.get(9..12).and_then(|status| status.parse().ok()).unwrap_or(0);
        let mut response = Response { status, head, body: Vec::new() };
        if to_head || matches!(status, 100 | 204 | 304) {
            return Ok(response);
        }
        if let Some(length) = response.field("content-length") {
            response.body.resize(length.parse().unwrap(), 0);
            self.reader.read_exact(&mut response.body)?;
        } else if response.field("transfer-encoding").is_some() {
            loop {
                let mut size = String::new();
                self.reader.read_line(&mut size)?;
                let size = usize::from_str_radix(size.trim(), 16).unwrap();
                let start = response.body.len();
                response.body.resize(start + size, 0);
                self.reader.read_exact(&mut response.body[start..])?;
                self.reader.read_line(&mut String::new())?;
                if size == 0 {
                    break;
                }
            }
        } else {
            self.reader.read_to_end(&mut response.body)?;
        }
        Ok(response)
    }

    /// What comes, for whoever reads something else than responses.
    pub fn reader(&mut self) -> &mut impl Read {
        &mut self.reader
    }

    /// Whether the server's side ends before anything else comes from it.
    pub fn is_ended(&mut self) -> bool {
        match self.reader.fill_buf() {
            Ok(bytes) => bytes.is_empty(),
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

/// Files that servers serve: `/small`, `/big` (3 MB) and an index.
pub struct Site {
    pub directory: tempfile::TempDir,
    pub big: Vec<u8>,
}

impl Site {
    pub fn new() -> Self {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        // Servers change to users of their own.
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        let root = directory.path().join("html");
        std::fs::create_dir(&root).unwrap();
        let big: Vec<u8> = (0..3_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        std::fs::write(root.join("index.html"), "index\n").unwrap();
        std::fs::write(root.join("small"), "small\n").unwrap();
        std::fs::write(root.join("big"), &big).unwrap();
        Self { directory, big }
    }

    /// With the programs that [`exercise`] asks for.
    pub fn with_cgi() -> Self {
        use std::os::unix::fs::PermissionsExt;
        let site = Self::new();
        let directory = site.path().join("html/cgi");
        std::fs::create_dir(&directory).unwrap();
        let scripts = [
            (
                "echo",
                "#!/bin/sh\nprintf 'Content-Type: text/plain\\n\\n'\necho \"$REQUEST_METHOD $(wc -c)\"\n",
            ),
            ("slow", "#!/bin/sh\nprintf 'Content-Type: text/plain\\n\\n'\nsleep 0.3\necho done\n"),
        ];
        for (name, script) in scripts {
            let file = directory.join(name);
            std::fs::write(&file, script).unwrap();
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        site
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Writes a configuration in which `DIR` and `PORT` are replaced.
    pub fn configuration(&self, name: &str, port: u16, text: &str) -> String {
        let text = text.replace("DIR", self.path().to_str().unwrap()).replace("PORT", &port.to_string());
        let file = self.path().join(name);
        std::fs::write(&file, text).unwrap();
        file.to_str().unwrap().to_owned()
    }

    pub fn nginx(&self, port: u16) -> Vec<String> {
        needs("nginx", "nginx-light");
        let file = self.configuration("nginx.conf", port, NGINX);
        ["nginx", "-e", "stderr", "-c", &file].map(str::to_owned).to_vec()
    }
}

pub const LIGHTTPD: &str = "
server.document-root = \"DIR/html\"
server.port = PORT
server.modules = (\"mod_cgi\")
server.errorlog = \"DIR/lighttpd.log\"
index-file.names = (\"index.html\")
$HTTP[\"url\"] =~ \"^/cgi/\" { cgi.assign = (\"\" => \"\") }
";

const NGINX: &str = "
worker_processes 2; daemon off; pid DIR/nginx.pid; error_log DIR/error.log info;
events { worker_connections 64; }
http {
  access_log DIR/access.log; root DIR/html; sendfile on; tcp_nopush on; keepalive_timeout 30s;
  client_body_temp_path DIR/body; proxy_temp_path DIR/proxy; fastcgi_temp_path DIR/fastcgi;
  uwsgi_temp_path DIR/uwsgi; scgi_temp_path DIR/scgi;
  server {
    listen PORT; client_max_body_size 50m;
    location / { add_header X-Peer $remote_addr; add_header X-Tag $http_x_tag; }
    location /upload { return 200 $content_length; }
  }
}
";

pub fn strs(words: &[String]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}

/// Fails, with one line that says how to get it, unless `program` is there.
pub fn needs(program: &str, package: &str) {
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin";
    let is_there = std::env::split_paths(&path).any(|directory| directory.join(program).is_file());
    assert!(is_there, "{program} is missing: run scripts/setup test, or apt-get install {package}");
}

/// What every server must do behind a chain. `/cgi/echo` says the method and the length of the content that it read;
/// `/cgi/slow` takes a while.
pub fn exercise(chain: &Chain, site: &Site) {
    let mut client = chain.client();
    for _ in 0..20 {
        let response = client.get("/small");
        assert_eq!((response.status, &response.body[..]), (200, &b"small\n"[..]));
        // RFC 9110 §5.6.1: nor may a list be empty.
        let connection = response.field("connection").map(|value| value.to_ascii_lowercase());
        assert!(!matches!(connection.as_deref(), Some("close" | "")), "{}", response.head);
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
    for length in [5, 100_000, 2_000_000] {
        upload_in_chunks(&mut client, &site.big[..length]);
    }
    // Nobody here speaks another protocol.
    client.send(b"GET /small HTTP/1.1\r\nHost: test\r\nConnection: upgrade\r\nUpgrade: other\r\n\r\n");
    assert_eq!(client.response(false).body, b"small\n");
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

/// Content whose length is not said before, in two ways: as it comes, and when the server has given leave; each with
/// the next request right behind it.
fn upload_in_chunks(client: &mut Client, content: &[u8]) {
    let coded: Vec<u8> = content
        .chunks(9000)
        .chain([&b""[..]])
        .flat_map(|chunk| [format!("{:x}\r\n", chunk.len()).as_bytes(), chunk, b"\r\n"].concat())
        .collect();
    for expects in [false, true] {
        let expect = if expects { "Expect: 100-continue\r\n" } else { "" };
        let head =
            format!("POST /cgi/echo HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n{expect}\r\n");
        client.send(head.as_bytes());
        if expects {
            assert_eq!(client.response(false).status, 100);
        }
        client.send(&[&coded[..], b"GET /small HTTP/1.1\r\nHost: test\r\n\r\n"].concat());
        let said = client.response(false);
        assert_eq!(String::from_utf8_lossy(&said.body), format!("POST {}\n", content.len()), "{}", said.head);
        assert_eq!(client.response(false).body, b"small\n");
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

/// A server compiled from a C program, behind a chain; `way` is the program's second argument.
pub fn compiled(program: &str, flags: &[&str], way: &str, filters: &[&str]) -> (Chain, Site) {
    let site = Site::new();
    let server = compile(&format!("programs/{program}"), flags, &site);
    let port = free_port();
    let command = Chain::command(port, filters, &[&server, &port.to_string(), way]);
    (Chain::once_it_listens(command, port), site)
}

/// A server compiled from a C program under `tests`.
pub fn compile(source: &str, flags: &[&str], site: &Site) -> String {
    needs("cc", "gcc");
    let server = site.path().join("server");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(source);
    let mut compile = Command::new("cc");
    compile.args(["-Wall", "-Wextra", "-Werror", "-O1"]).args(flags).arg("-o").arg(&server).arg(source);
    assert!(compile.status().unwrap().success());
    server.to_str().unwrap().to_owned()
}
