//! Servers of several processes: what one accepts another may answer, and what one binds others may listen on.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Chain, Client, Site, free_port, needs};

/// With a filter that rewrites: what it wrote goes along with a connection that is passed on.
const CHAIN: &[&str] = &["package", "persist", "normalize", "prior"];

/// What `normalize` makes `/b` of.
const REWRITTEN: &str = "//a/../b";

/// The server answers each request with its method, its target, the bytes of its content and the process that answered.
/// `target` reaches it as `/b`.
fn asks(client: &mut Client, target: &str) -> Vec<String> {
    let mut processes = Vec::new();
    let mut expect = |response: common::Response, expected: &str| {
        assert_eq!(response.status, 200, "{expected}");
        let text = String::from_utf8(response.body).unwrap();
        let (answer, process) = text.trim_end().rsplit_once(' ').unwrap();
        assert_eq!(answer, expected);
        processes.push(process.to_owned());
    };
    for round in 0..4 {
        expect(client.get(target), "GET /b 0");
        client.send(b"POST /c HTTP/1.1\r\nHost: test\r\nContent-Length: 300000\r\n\r\n");
        client.send(&[b'x'; 300_000]);
        expect(client.response(false), "POST /c 300000");
        client
            .send(b"POST /d HTTP/1.1\r\nHost: test\r\nContent-Length: 70000\r\nExpect: 100-continue\r\n\r\n");
        assert_eq!(client.response(false).status, 100, "round {round}");
        client.send(&[b'x'; 70_000]);
        expect(client.response(false), "POST /d 70000");
        client.send(&b"GET /e HTTP/1.1\r\nHost: test\r\n\r\n".repeat(3));
        for _ in 0..3 {
            expect(client.response(false), "GET /e 0");
        }
    }
    processes.sort();
    processes.dedup();
    processes
}

/// Many clients at once, of whom some leave without waiting; then one that ends its connection itself.
fn serves(chain: &Chain, target: &str) -> Vec<String> {
    let mut processes: Vec<String> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..8).map(|_| scope.spawn(|| asks(&mut chain.client(), target))).collect();
        for _ in 0..20 {
            chain.client().send(b"GET /left HTTP/1.1\r\nHost: test\r\n\r\n");
        }
        clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
    });
    let mut client = chain.client();
    client.send(b"GET /f HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n");
    assert_eq!(client.response(false).status, 200);
    assert!(client.is_ended());
    processes.sort();
    processes.dedup();
    processes
}

const CLUSTER: &str = "
const cluster = require('cluster');
if (cluster.isPrimary) {
  cluster.fork();
  cluster.fork();
} else {
  require('http').createServer((request, response) => {
    let length = 0;
    request.on('data', data => length += data.length);
    request.on('end', () => response.end(`${request.method} ${request.url} ${length} ${process.pid}\\n`));
  }).listen(PORT, '127.0.0.1');
}
";

fn cluster(options: &[&str], filters: &[&str], target: &str) {
    let (site, port) = (Site::new(), free_port());
    let server = site.configuration("server.js", port, CLUSTER);
    let address = format!("127.0.0.1:{port}");
    let command = Chain::with_options(options, &[address], filters, &["node", &server]);
    let chain = Chain::once_it_serves(command, port);
    assert_eq!(serves(&chain, target).len(), 2, "both workers answer");
    chain.stop();
}

/// Node's primary process accepts, and passes each connection to a worker.
#[test]
fn a_cluster_of_nodes() {
    cluster(&[], CHAIN, REWRITTEN);
}

#[test]
fn a_cluster_of_nodes_that_keep_connections() {
    cluster(&["--linger", "1000"], &["package"], "/b");
}

/// A process that accepts, and another program that answers, started with every other descriptor closed. `early`: the
/// first reads nothing; `late`: it reads a part of the request, and passes that on too.
const PASSES: &str = "
import os, socket, subprocess, sys
def answer(client, head):
    while b'\\r\\n\\r\\n' not in head:
        more = client.recv(8192)
        if not more:
            return
        head += more
    head, content = head.split(b'\\r\\n\\r\\n', 1)
    lines = head.decode().split('\\r\\n')
    method, target, _ = lines[0].split(' ')
    fields = dict(line.lower().split(': ', 1) for line in lines[1:])
    if fields.get('expect') == '100-continue' and not content:
        client.sendall(b'HTTP/1.1 100 Continue\\r\\n\\r\\n')
    got, length = len(content), int(fields.get('content-length') or 0)
    while got < length:
        more = client.recv(65536)
        if not more:
            return
        got += len(more)
    body = f'{method} {target} {got} {os.getpid()}\\n'.encode()
    client.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n' % len(body) + body)
if sys.argv[1] == 'worker':
    link = socket.socket(fileno=int(sys.argv[2]))
    while True:
        message, descriptors, _, _ = socket.recv_fds(link, 65536, 1)
        if not message:
            sys.exit()
        with socket.socket(fileno=descriptors[0]) as client:
            try:
                answer(client, message[1:])
            except OSError:
                pass
links = []
for _ in range(2):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    subprocess.Popen([sys.executable, __file__, 'worker', str(theirs.fileno())], pass_fds=[theirs.fileno()])
    theirs.close()
    links.append(ours)
listener = socket.create_server(('127.0.0.1', PORT))
while True:
    client, _ = listener.accept()
    try:
        head = client.recv(20) if sys.argv[1] == 'late' else b''
    except OSError:
        head = b''
    links[0].sendmsg([b'x' + head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, client.fileno().to_bytes(4, sys.byteorder))])
    client.close()
    links.append(links.pop(0))
";

fn passes(when: &str) {
    needs("python3", "python3");
    let (site, port) = (Site::new(), free_port());
    let server = site.configuration("server.py", port, PASSES);
    let chain = Chain::start(port, CHAIN, &["python3", &server, when]);
    assert_eq!(serves(&chain, REWRITTEN).len(), 2, "both workers answer");
    chain.stop();
}

#[test]
fn a_process_that_passes_on_what_it_accepts() {
    passes("early");
}

#[test]
fn a_process_that_passes_on_what_it_has_begun_to_read() {
    passes("late");
}

/// As servers do that replace their workers: the first process binds, and new programs listen and accept.
const BINDS: &str = "
import http.server, os, socket, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def do_GET(self):
        length = int(self.headers.get('Content-Length') or 0)
        got = len(self.rfile.read(length))
        body = f'{self.command} {self.path} {got} {os.getpid()}\\n'.encode()
        self.send_response(200)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_POST = do_GET
if len(sys.argv) == 1:
    listener = socket.socket()
    listener.bind(('127.0.0.1', PORT))
    number = listener.fileno()
    workers = [subprocess.Popen([sys.executable, __file__, str(number)], pass_fds=[number]) for _ in range(2)]
    sys.exit(max(worker.wait() for worker in workers))
server = http.server.ThreadingHTTPServer(('127.0.0.1', PORT), Handler, bind_and_activate=False)
server.socket = socket.socket(fileno=int(sys.argv[1]))
assert server.socket.getsockname() == ('127.0.0.1', PORT), server.socket.getsockname()
server.server_activate()
server.serve_forever()
";

#[test]
fn programs_that_listen_on_what_another_has_bound() {
    needs("python3", "python3");
    let (site, port) = (Site::new(), free_port());
    let server = site.configuration("server.py", port, BINDS);
    let chain = Chain::start(port, CHAIN, &["python3", &server]);
    serves(&chain, REWRITTEN);
    chain.stop();
}
