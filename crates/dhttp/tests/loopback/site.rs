use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use tidegate_dhttp::driver::{
    DhttpUrl, FetchRequest, Listener, Request, Response, ServerHandle, ServerOptions, Service, method_of,
    serve,
};
use tidegate_dhttp::ports::ClientPorts;
use tidegate_http::Method;
use tokio::net::{TcpListener, UdpSocket};
use tokio::sync::Notify;

/// A server with a site on threads of its own; stopped when dropped.
pub struct Site {
    pub address: SocketAddr,
    /// Of the first core.
    pub handle: ServerHandle,
    /// Lets one `/gated` response be made.
    pub gate: Arc<Notify>,
    executed: Arc<AtomicU64>,
    cores: Vec<(ServerHandle, Option<JoinHandle<()>>)>,
}

impl Site {
    pub fn start() -> Self {
        Self::start_cores(1)
    }

    pub fn start_cores(cores: usize) -> Self {
        Self::start_at("127.0.0.1".parse().unwrap(), cores)
    }

    pub fn start_at(ip: IpAddr, cores: usize) -> Self {
        Self::start_cores_with(ip, cores, ServerOptions::new().unwrap())
    }

    pub fn start_with(options: ServerOptions) -> Self {
        Self::start_cores_with("127.0.0.1".parse().unwrap(), 1, options)
    }

    /// Waits for what is soon true.
    pub async fn until(&self, what: &str, is_so: impl Fn(&ServerHandle) -> bool) {
        for _ in 0..6000 {
            if is_so(&self.handle) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("not within a minute: {what}");
    }

    fn start_cores_with(ip: IpAddr, cores: usize, options: ServerOptions) -> Self {
        let gate = Arc::new(Notify::new());
        let executed = Arc::new(AtomicU64::new(0));
        let first = listen(ip);
        let address = first.1;
        let mut listeners = vec![first.0];
        while listeners.len() < cores {
            listeners.push(Listener::bind(address, &ClientPorts::default()).unwrap());
        }
        let cores: Vec<_> = listeners
            .into_iter()
            .map(|listener| {
                let service = Pages { gate: Arc::clone(&gate), executed: Arc::clone(&executed) };
                let options = options.clone();
                let (sender, receiver) = std::sync::mpsc::channel();
                let thread = std::thread::spawn(move || {
                    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                    runtime.block_on(async {
                        let (handle, run) = serve(listener, service, options).unwrap();
                        sender.send(handle).unwrap();
                        run.await;
                    });
                });
                (receiver.recv().unwrap(), Some(thread))
            })
            .collect();
        Self { address, handle: cores[0].0.clone(), gate, executed, cores }
    }

    pub fn url(&self, path: &str) -> String {
        format!("dhttp://{}{path}", self.address)
    }

    /// Requests by UDP that were passed on to be answered, core by core.
    pub fn asked_of_cores(&self) -> Vec<u64> {
        self.cores.iter().map(|(handle, _)| handle.metrics().dhttp_requests_total.get()).collect()
    }

    pub fn executed(&self) -> u64 {
        self.executed.load(Ordering::Relaxed)
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        for (handle, thread) in &mut self.cores {
            handle.stop();
            if let Some(thread) = thread.take() {
                thread.join().expect("the server did not panic");
            }
        }
    }
}

/// A port below the clients' range that nobody has.
fn listen(ip: IpAddr) -> (Listener, SocketAddr) {
    let address = SocketAddr::new(ip, tidegate_ports::free_port().unwrap());
    (Listener::bind(address, &ClientPorts::default()).unwrap(), address)
}

pub async fn client_socket() -> UdpSocket {
    loop {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        if ClientPorts::default().contains(socket.local_addr().unwrap().port()) {
            return socket;
        }
    }
}

pub async fn client_listener() -> TcpListener {
    loop {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        if ClientPorts::default().contains(listener.local_addr().unwrap().port()) {
            return listener;
        }
    }
}

pub fn get(site: &Site, path: &str) -> FetchRequest {
    FetchRequest::get(&DhttpUrl::parse(&site.url(path)).unwrap(), site.address)
}

pub fn pattern(length: usize) -> Bytes {
    (0..length).map(|n| (n % 251) as u8).collect::<Vec<u8>>().into()
}

struct Pages {
    gate: Arc<Notify>,
    executed: Arc<AtomicU64>,
}

impl Service for Pages {
    fn call(&self, request: Request) -> impl Future<Output = Response> + 'static {
        let (gate, executed) = (Arc::clone(&self.gate), Arc::clone(&self.executed));
        async move { page(request, gate, executed).await }
    }
}

async fn page(request: Request, gate: Arc<Notify>, executed: Arc<AtomicU64>) -> Response {
    let times = executed.fetch_add(1, Ordering::Relaxed) + 1;
    let target = request.head.split(|byte| *byte == b' ').nth(1).unwrap();
    let target = std::str::from_utf8(target).unwrap().to_owned();
    let mut parts = target[1..].split('/');
    let (kind, length) = (parts.next().unwrap(), parts.next().and_then(|n| n.parse().ok()).unwrap_or(0));
    match kind {
        "bytes" if method_of(&request.head) == Method::Head => Response::head_only(200, &[], length as u64),
        // Nothing of it is there before the gate opens.
        "held" => {
            gate.notified().await;
            Response::full(200, &[], &pattern(length))
        }
        "bytes" => Response::full(200, &[], &pattern(length)),
        "gated" | "broken" => {
            let (mut sender, response) = Response::streamed(200, &[], Some(length as u64));
            let broken = kind == "broken";
            tokio::task::spawn_local(async move {
                if broken {
                    let _ = sender.send(pattern(length / 2)).await;
                } else {
                    gate.notified().await;
                    if sender.send(pattern(length)).await.is_ok() {
                        sender.end().await;
                    }
                }
            });
            response
        }
        "trickle" => {
            let (mut sender, response) = Response::streamed(200, &[], None);
            tokio::task::spawn_local(async move {
                if sender.send(pattern(length)).await.is_ok() {
                    gate.notified().await;
                    sender.end().await;
                }
            });
            response
        }
        "chunked" => {
            let (mut sender, response) = Response::streamed(200, &[], None);
            tokio::task::spawn_local(async move {
                for piece in pattern(length).chunks(7000) {
                    if sender.send(Bytes::copy_from_slice(piece)).await.is_err() {
                        return;
                    }
                }
                sender.end().await;
            });
            response
        }
        "count" => match request.body.collect(1 << 20).await {
            Ok(body) => Response::full(200, &[], format!("{times} {}", body.len()).as_bytes()),
            Err(_) => Response::full(400, &[], b""),
        },
        _ => Response::full(404, &[], b""),
    }
}
