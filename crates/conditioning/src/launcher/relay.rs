//! Carries bytes between clients' sockets and the descriptors that a statically linked server was given in their place.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use crate::launcher::{asker::name_of, listeners};
use crate::server::{self, Awaited, Closing, Reading};

const KEY_QUESTIONS: u64 = u64::MAX;
const KEY_LINK: u64 = u64::MAX - 1;
/// From here on, listening sockets by their numbers.
const KEY_LISTENING: u64 = 1 << 63;
/// What a client's socket is registered for before anything is known of it.
const AT_FIRST: EventFlags = EventFlags::RDHUP;
/// What is under way in each direction of a connection at most.
const BUFFER_BYTES: usize = 64 * 1024;

/// Bytes under way in one direction.
#[derive(Default)]
struct Pipe {
    bytes: Vec<u8>,
    sent: usize,
    /// Nothing more comes in.
    has_ended: bool,
}

impl Pipe {
    fn is_empty(&self) -> bool {
        self.sent == self.bytes.len()
    }

    fn pending(&self) -> &[u8] {
        &self.bytes[self.sent..]
    }

    /// Puts `instead` in the place of the first of what is pending.
    fn replace(&mut self, instead: &[u8]) {
        for (byte, instead) in self.bytes[self.sent..].iter_mut().zip(instead) {
            *byte = *instead;
        }
    }

    fn took(&mut self, length: usize) {
        self.sent += length;
        if self.is_empty() {
            self.bytes.clear();
            self.sent = 0;
        }
    }
}

struct Connection {
    client: OwnedFd,
    server: OwnedFd,
    /// The name in /proc of the end that the server has.
    name: String,
    peer: SocketAddr,
    local: SocketAddr,
    request: Pipe,
    response: Pipe,
    /// The client has ended its side: all that it has sent is there.
    is_left: bool,
    /// And it reads no more, or is told no more: nothing further happens to its socket, which is not watched any
    /// longer.
    is_gone: bool,
    /// The server's side is registered while it is waited for, the client's always: its hang-up is of interest.
    watched: [EventFlags; 2],
}

/// Whether a connection goes on.
type Flow = std::ops::ControlFlow<()>;

/// What [`Relay::wait`] saw beside its own connections.
#[derive(Default)]
pub struct Ready {
    pub questions: bool,
    /// Nobody is left who could ask.
    pub is_over: bool,
    pub link: bool,
    /// Listening sockets that nobody has any more, by their numbers.
    pub closed: Vec<u64>,
}

/// What a connection's ends are called: the client's and the server's address.
pub type Addresses = (SocketAddr, SocketAddr);

/// Connections that are over, and that the server may have yet: it is to find what it knew them by. The kernel names no
/// other socket the same for long.
#[derive(Default)]
struct Ended {
    addresses: HashMap<String, Addresses>,
    in_order: VecDeque<String>,
}

/// A server closes what is over soon: those that it has not are a few, unless it is very busy.
const MOST_ENDED: usize = 4096;

impl Ended {
    fn add(&mut self, name: String, addresses: Addresses) {
        if self.in_order.len() >= MOST_ENDED
            && let Some(oldest) = self.in_order.pop_front()
        {
            self.addresses.remove(&oldest);
        }
        if self.addresses.insert(name.clone(), addresses).is_none() {
            self.in_order.push_back(name);
        }
    }
}

/// All connections of one server.
pub struct Relay {
    epoll: OwnedFd,
    connections: HashMap<u64, Connection>,
    by_name: HashMap<String, u64>,
    ended: Ended,
    next_key: u64,
    watches_questions: bool,
    watches_link: bool,
    awaits_link: bool,
}

impl Relay {
    pub fn new() -> Result<Self, Errno> {
        Ok(Self {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            connections: HashMap::new(),
            by_name: HashMap::new(),
            ended: Ended::default(),
            next_key: 0,
            watches_questions: false,
            watches_link: false,
            awaits_link: false,
        })
    }

    /// Takes over an accepted client's socket, with the client's and the server's address. Returns what the server is
    /// to get in its place.
    pub fn add(&mut self, client: OwnedFd, (peer, local): Addresses) -> Result<OwnedFd, Errno> {
        let key = self.next_key;
        self.next_key = (self.next_key + 1) % (1 << 62);
        let (ours, theirs) = match self.pair(client.as_fd(), key) {
            Ok(pair) => pair,
            Err(error) => {
                // It would be the server's for ever.
                server::closing(client.as_raw_fd(), Closing::ForAll);
                return Err(error);
            }
        };
        let name = name_of(std::process::id(), theirs.as_raw_fd()).unwrap_or_default();
        self.by_name.insert(name.clone(), key);
        let (request, response) = (Pipe::default(), Pipe::default());
        let watched = [AT_FIRST, EventFlags::empty()];
        let connection = Connection {
            client,
            server: ours,
            name,
            peer,
            local,
            request,
            response,
            is_left: false,
            is_gone: false,
            watched,
        };
        self.connections.insert(key, connection);
        self.go_on(key);
        Ok(theirs)
    }

    /// Registers the client's socket, and opens this end and the one that the server is to get.
    fn pair(&self, client: BorrowedFd<'_>, key: u64) -> Result<(OwnedFd, OwnedFd), Errno> {
        let (ours, theirs) = listeners::pair()?;
        rustix::io::ioctl_fionbio(&ours, true)?;
        epoll::add(&self.epoll, client, EventData::new_u64(2 * key), AT_FIRST)?;
        // Filters hold the client's socket too: what is registered would outlive the close.
        let (epoll, fd) = (self.epoll.as_raw_fd(), client.as_raw_fd());
        let interest = server::connection::Interest { epoll, fd, events: 0, data: 2 * key };
        let _ = server::registering(epoll, libc::EPOLL_CTL_ADD, fd, || (interest, Ok(())));
        Ok((ours, theirs))
    }

    /// The client's and the server's address of the connection whose descriptor has that name, which may be over.
    pub fn addresses(&self, name: &str) -> Option<Addresses> {
        match self.by_name.get(name).and_then(|key| self.connections.get(key)) {
            Some(connection) => Some((connection.peer, connection.local)),
            None => self.ended.addresses.get(name).copied(),
        }
    }

    /// The client's socket of the connection whose descriptor has that name, unless it is over.
    pub fn client(&self, name: &str) -> Option<BorrowedFd<'_>> {
        let connection = self.connections.get(self.by_name.get(name)?)?;
        (!connection.is_over()).then(|| connection.client.as_fd())
    }

    /// From here on it is reported when nobody has the other end of `listening` any more, until it is closed.
    pub fn watch_listening(&self, listening: BorrowedFd<'_>, number: u64) -> Result<(), Errno> {
        let data = EventData::new_u64(KEY_LISTENING + number);
        epoll::add(&self.epoll, listening, data, EventFlags::empty())
    }

    /// Waits for events, but no longer than `limit`, moves what can be moved, and says what else is ready.
    pub fn wait(
        &mut self,
        questions: BorrowedFd<'_>,
        link: Option<BorrowedFd<'_>>,
        limit: Option<Duration>,
    ) -> Result<Ready, Errno> {
        if !self.watches_questions {
            epoll::add(&self.epoll, questions, EventData::new_u64(KEY_QUESTIONS), EventFlags::IN)?;
            self.watches_questions = true;
        }
        // What was asked for and has not come is asked for yet.
        if let Some(link) = link.filter(|_| !self.awaits_link) {
            let (data, once) = (EventData::new_u64(KEY_LINK), EventFlags::IN | EventFlags::ONESHOT);
            if self.watches_link {
                epoll::modify(&self.epoll, link, data, once)?;
            } else {
                epoll::add(&self.epoll, link, data, once)?;
            }
            self.watches_link = true;
            self.awaits_link = true;
        }
        let limit = limit.map(|limit| rustix::time::Timespec {
            tv_sec: limit.as_secs() as i64,
            tv_nsec: i64::from(limit.subsec_nanos()),
        });
        self.step(limit.as_ref())
    }

    fn step(&mut self, timeout: Option<&rustix::time::Timespec>) -> Result<Ready, Errno> {
        let mut events = Vec::with_capacity(256);
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), timeout) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        let mut ready = Ready::default();
        for event in &events {
            match event.data.u64() {
                KEY_QUESTIONS => {
                    let flags = event.flags;
                    ready.is_over = flags.contains(EventFlags::HUP);
                    ready.questions = !ready.is_over;
                }
                KEY_LINK => {
                    self.awaits_link = false;
                    ready.link = true;
                }
                key if key > KEY_LISTENING => ready.closed.push(key - KEY_LISTENING),
                key => self.happened(key / 2, key % 2 == 0, event.flags),
            }
        }
        Ok(ready)
    }

    /// The server has ended: what it wrote goes out, for a while.
    pub fn drain(mut self) {
        let deadline = Instant::now() + Duration::from_secs(2);
        let pause = rustix::time::Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
        while !self.connections.is_empty() && Instant::now() < deadline {
            // Nobody is left to ask: that descriptor would be reported again and again.
            match self.step(Some(&pause)) {
                Ok(ready) if ready.is_over => std::thread::sleep(Duration::from_millis(10)),
                Ok(_) => {}
                Err(_) => return,
            }
        }
    }

    fn happened(&mut self, key: u64, is_client: bool, flags: EventFlags) {
        if is_client
            && flags.intersects(EventFlags::ERR | EventFlags::HUP | EventFlags::RDHUP)
            && let Some(connection) = self.connections.get_mut(&key)
        {
            connection.is_left = true;
            // Its hang-up would be reported until the server has answered, whatever is asked for.
            if !connection.is_gone && flags.intersects(EventFlags::ERR | EventFlags::HUP) {
                connection.is_gone = true;
                let _ = epoll::delete(&self.epoll, &connection.client);
            }
        }
        self.go_on(key);
    }

    fn go_on(&mut self, key: u64) {
        let Some(connection) = self.connections.get_mut(&key) else { return };
        if connection.progress().is_continue() && connection.watch(&self.epoll, key).is_ok() {
            return;
        }
        self.end(key);
    }

    /// The connection is over on either side: the server reads the end, and what it still writes leads nowhere.
    fn end(&mut self, key: u64) {
        if let Some(connection) = self.connections.remove(&key) {
            self.by_name.remove(&connection.name);
            self.ended.add(connection.name, (connection.peer, connection.local));
            server::closing(connection.client.as_raw_fd(), Closing::AsFollowed);
        }
    }
}

impl Connection {
    /// Moves what can be moved now. Breaks when the connection is over on either side.
    fn progress(&mut self) -> Flow {
        loop {
            while self.upload() {}
            if self.is_over() {
                // The server reads what is left of the request, and then the end.
                return if self.request.is_empty() { Flow::Break(()) } else { Flow::Continue(()) };
            }
            // A response may make more of what the client sent the server's.
            if !self.download()? {
                return Flow::Continue(());
            }
        }
    }

    /// Whether request and response are complete: the connection is the filters' again.
    fn is_over(&self) -> bool {
        server::is_ended(self.client.as_raw_fd())
    }

    /// From the client to the server; true if something moved.
    fn upload(&mut self) -> bool {
        if self.request.is_empty() && !self.request.has_ended && !self.is_over() {
            self.read_request();
        }
        if self.request.is_empty() {
            if self.request.has_ended {
                let _ = rustix::net::shutdown(&self.server, rustix::net::Shutdown::Write);
            }
            return false;
        }
        match rustix::net::send(
            &self.server,
            self.request.pending(),
            SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
        ) {
            Ok(sent) => {
                self.request.took(sent);
                true
            }
            Err(Errno::AGAIN | Errno::INTR) => false,
            Err(_) => {
                // The server reads no more; what it wrote still goes out.
                self.request = Pipe { has_ended: true, ..Pipe::default() };
                false
            }
        }
    }

    /// Whether the server, which writes no more, reads the rest of the request after its response.
    fn drains(&self) -> bool {
        let is_read = self.request.is_empty() && server::is_read(self.client.as_raw_fd());
        self.response.has_ended && !is_read && {
            let mut watched = [PollFd::new(&self.server, PollFlags::empty())];
            rustix::event::poll(&mut watched, Some(&rustix::time::Timespec::default())).is_ok()
                && !watched[0].revents().contains(PollFlags::HUP)
        }
    }

    fn read_request(&mut self) {
        let fd = self.client.as_raw_fd();
        match server::reading(fd, BUFFER_BYTES) {
            Ok(Reading::Copy(bytes)) => {
                server::took(fd, bytes.len(), true, true);
                self.request.bytes = bytes;
            }
            Ok(Reading::Socket(most)) => {
                self.request.bytes.resize(most.min(BUFFER_BYTES), 0);
                match rustix::net::recv(&self.client, &mut self.request.bytes[..], RecvFlags::DONTWAIT) {
                    Ok((got, _)) => {
                        self.request.bytes.truncate(got);
                        self.request.has_ended = got == 0;
                        server::took(fd, got, false, true);
                    }
                    Err(error) => {
                        self.request.bytes.clear();
                        self.request.has_ended = !matches!(error, Errno::AGAIN | Errno::INTR);
                    }
                }
            }
            // Nothing of it is there, unless the client has ended.
            Err(awaited @ (Awaited::Content | Awaited::Rest)) => {
                let seen =
                    rustix::net::recv(&self.client, &mut [0u8][..], RecvFlags::PEEK | RecvFlags::DONTWAIT);
                self.request.has_ended = match seen {
                    // What came since is found now. What cannot be read although it is there would be reported for
                    // ever.
                    Ok((1.., _)) if awaited == Awaited::Content => {
                        matches!(server::reading(fd, BUFFER_BYTES), Err(Awaited::Content))
                    }
                    Ok((1.., _)) => false,
                    Err(Errno::AGAIN | Errno::INTR) => false,
                    _ => true,
                };
            }
            Ok(Reading::Ended) => self.request.has_ended = true,
            Ok(Reading::Fails(_) | Reading::AsUsual) => self.request.has_ended = self.is_left,
            // Not before the requests behind this one are answered, if anybody reads the answers.
            Err(Awaited::End) => {
                self.request.has_ended =
                    self.is_left && (self.is_gone || !server::brings_another(self.client.as_fd()));
            }
        }
    }

    /// From the server to the client; true if something moved.
    fn download(&mut self) -> std::ops::ControlFlow<(), bool> {
        use std::ops::ControlFlow::{Break, Continue};
        if self.response.is_empty() && !self.response.has_ended {
            self.response.bytes.resize(BUFFER_BYTES, 0);
            let got = rustix::net::recv(&self.server, &mut self.response.bytes[..], RecvFlags::DONTWAIT);
            self.response.bytes.truncate(got.map_or(0, |(got, _)| got));
            self.response.has_ended = !matches!(got, Ok((1.., _)) | Err(Errno::AGAIN | Errno::INTR));
        }
        if self.response.is_empty() {
            if self.response.has_ended && !self.drains() {
                return Break(());
            }
            // The client learns of the end as it would from the server itself.
            if self.response.has_ended && !server::shuts_down(self.client.as_raw_fd()) {
                let _ = rustix::net::shutdown(&self.client, rustix::net::Shutdown::Write);
            }
            return Continue(false);
        }
        let fd = self.client.as_raw_fd();
        let Ok(instead) = server::before_write(fd, Some(self.response.pending())) else { return Break(()) };
        if let Some(instead) = instead {
            self.response.replace(&instead);
        }
        let bytes = self.response.pending();
        match rustix::net::send(&self.client, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(sent) => {
                let written = bytes[..sent].to_vec();
                self.response.took(sent);
                server::wrote(fd, |tracker| tracker.wrote(&written));
                Continue(true)
            }
            Err(Errno::AGAIN | Errno::INTR) => Continue(false),
            Err(_) => Break(()),
        }
    }

    /// Watches each side for what it is waited for.
    fn watch(&mut self, epoll: &OwnedFd, key: u64) -> Result<(), Errno> {
        let fd = self.client.as_raw_fd();
        let mut client = EventFlags::empty();
        let mut server = EventFlags::empty();
        if self.request.is_empty() && !self.request.has_ended && !server::is_read(fd) {
            client |= EventFlags::IN;
        }
        // A server that works, or has announced the end, may wait for the client's. It is told once: it would be
        // reported again and again.
        client.set(EventFlags::RDHUP, server::is_read(fd) && !self.is_left);
        server.set(EventFlags::OUT, !self.request.is_empty());
        server.set(EventFlags::IN, self.response.is_empty() && !self.response.has_ended);
        server.set(EventFlags::HUP, self.drains());
        client.set(EventFlags::OUT, !self.response.is_empty());
        if self.is_over() {
            // What stands in the client's place is at its end, and what else the server says leads nowhere.
            server = EventFlags::OUT;
        } else if self.watched[0] != client && !self.is_gone {
            epoll::modify(epoll, &self.client, EventData::new_u64(2 * key), client)?;
            self.watched[0] = client;
        }
        // A hang-up is reported of whatever is registered, and a server has ended long before a slow client has read.
        let data = EventData::new_u64(2 * key + 1);
        match (self.watched[1].is_empty(), server.is_empty()) {
            _ if self.watched[1] == server => {}
            (true, _) => epoll::add(epoll, &self.server, data, server)?,
            (_, true) => epoll::delete(epoll, &self.server)?,
            _ => epoll::modify(epoll, &self.server, data, server)?,
        }
        self.watched[1] = server;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::server::table::{self, Entry};
    use crate::wire::Bundle;

    #[test]
    fn what_takes_the_place_of_something_stays_there_however_little_is_sent() {
        let mut pipe = Pipe { bytes: b"Connection: close\n\nok".to_vec(), ..Pipe::default() };
        let instead = b"Connection:      \n\n";
        pipe.replace(instead);
        for sent in 0..instead.len() {
            assert_eq!(pipe.pending(), &b"Connection:      \n\nok"[sent..]);
            pipe.took(1);
        }
        assert_eq!(pipe.pending(), b"ok");
    }

    /// A relay of one connection by `client`, and what the server has.
    fn relay_of_one(client: OwnedFd) -> (Relay, OwnedFd) {
        let mut relay = Relay::new().unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], 80));
        let theirs = relay.add(client, (address, address)).unwrap();
        (relay, theirs)
    }

    /// A relay of one connection over TCP, of which the filters presented a request: its client, which has sent `sent`
    /// from there on, and what the server has.
    fn relay_of_a_request(sent: &[u8]) -> (Relay, TcpStream, OwnedFd) {
        let (ledger, file) = crate::ledger::Ledger::create().unwrap();
        assert!(ledger.take(1));
        let id = ledger.present(1).unwrap();
        assert!(ledger.claim(id));
        let chain = server::chain_without_children(listeners::pair().unwrap().0, &file).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (socket, peer) = listener.accept().unwrap();
        client.write_all(sent).unwrap();
        let (head_bytes, request) = (GET.len() as u32, GET.to_vec());
        let (flags, socket_bytes) = (crate::wire::flags::PERSISTENT, GET.len() as u64);
        let bundle =
            Bundle { id, flags, peer, socket_bytes, arrived_ns: 0, replaces: 0, head_bytes, request };
        let number = socket.as_raw_fd();
        let connection = server::connection::Connection::new(chain, bundle, number, true);
        assert!(table::set(number, Entry::Connection(Arc::new(Mutex::new(connection)))));
        let (relay, theirs) = relay_of_one(socket.into());
        assert_eq!(reads(&theirs), Ok(GET.to_vec()));
        (relay, client, theirs)
    }

    const GET: &[u8] = b"GET / HTTP/1.1\r\n\r\n";

    /// What the server reads without waiting.
    fn reads(theirs: &OwnedFd) -> Result<Vec<u8>, Errno> {
        let mut bytes = vec![0; 1 << 20];
        let (got, _) = rustix::net::recv(theirs, &mut bytes[..], RecvFlags::DONTWAIT)?;
        bytes.truncate(got);
        Ok(bytes)
    }

    /// Waits for what is to be reported next.
    fn step(relay: &mut Relay) {
        relay.step(Some(&rustix::time::Timespec { tv_sec: 10, tv_nsec: 0 })).unwrap();
    }

    fn has_news(relay: &Relay) -> bool {
        let mut watched = [PollFd::new(&relay.epoll, PollFlags::IN)];
        rustix::event::poll(&mut watched, Some(&rustix::time::Timespec::default())) == Ok(1)
    }

    /// Its end was reported again and again until the client had read everything: a core for each slow reader.
    #[test]
    fn nothing_is_reported_of_a_server_that_has_ended_while_its_client_reads_slowly() {
        let (client, reader) = listeners::pair().unwrap();
        let (mut relay, theirs) = relay_of_one(client);
        while relay.connections[&0].response.is_empty() {
            let _ = rustix::net::send(&theirs, &[b'x'; 4096], SendFlags::DONTWAIT);
            relay.go_on(0);
        }
        drop(theirs);
        assert!(!has_news(&relay));
        // The client reads on.
        let mut got = vec![0; 1 << 20];
        let (read, _) = rustix::net::recv(&reader, &mut got[..], RecvFlags::empty()).unwrap();
        assert!(read > 0 && has_news(&relay));
    }

    /// A server that worked or was silent never learned of it, and kept connection and descriptors. Where it did, that
    /// was reported again and again until the server had answered: a core for each such client.
    #[test]
    fn a_server_that_works_reads_the_end_of_its_client_and_nothing_is_reported_again() {
        for how in [Some(Shutdown::Write), None] {
            let (mut relay, client, theirs) = relay_of_a_request(GET);
            assert!(!has_news(&relay) && reads(&theirs) == Err(Errno::AGAIN));
            // Or it closes the connection.
            let client = how.map(|how| client.shutdown(how).map(|()| client).unwrap());
            step(&mut relay);
            assert_eq!(reads(&theirs), Ok(vec![]), "{how:?}");
            assert!(!has_news(&relay), "{how:?}");
            // The response goes to a client that reads.
            let response = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
            rustix::net::send(&theirs, response, SendFlags::NOSIGNAL).unwrap();
            step(&mut relay);
            if let Some(mut client) = client {
                let mut got = vec![0; response.len()];
                client.read_exact(&mut got).unwrap();
                assert_eq!(got, response);
            }
            while !relay.connections.is_empty() {
                step(&mut relay);
            }
        }
    }

    /// What it is sent does not fit into its socket at once, and it is watched for room there.
    #[test]
    fn a_client_that_has_ended_its_side_and_reads_slowly_gets_all_of_a_response() {
        const LENGTH: usize = 16 << 20;
        let (mut relay, mut client, theirs) = relay_of_a_request(GET);
        client.shutdown(Shutdown::Write).unwrap();
        step(&mut relay);
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {LENGTH}\r\n\r\n");
        let response = [head.as_bytes(), &vec![b'x'; LENGTH]].concat();
        let mut left = &response[..];
        while relay.connections[&0].response.is_empty() || has_news(&relay) {
            let sent = rustix::net::send(&theirs, left, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
            left = &left[sent.unwrap_or(0)..];
            relay.go_on(0);
        }
        let reader = std::thread::spawn(move || {
            let mut got = vec![0; head.len() + LENGTH];
            client.read_exact(&mut got).map(|()| client)
        });
        while !relay.connections.is_empty() {
            let sent = rustix::net::send(&theirs, left, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
            left = &left[sent.unwrap_or(0)..];
            step(&mut relay);
        }
        assert!(left.is_empty() && reader.join().unwrap().is_ok());
    }

    /// It is served next.
    #[test]
    fn a_server_reads_no_end_while_its_client_has_sent_a_further_request() {
        let (mut relay, client, theirs) = relay_of_a_request(&GET.repeat(2));
        client.shutdown(Shutdown::Write).unwrap();
        step(&mut relay);
        assert!(relay.connections[&0].is_left && !has_news(&relay));
        assert_eq!(reads(&theirs), Err(Errno::AGAIN));
    }

    /// It left the connection to a server that had never got it.
    #[test]
    fn a_connection_that_cannot_be_taken_over_is_closed() {
        let mut relay = Relay::new().unwrap();
        let (ledger, file) = crate::ledger::Ledger::create().unwrap();
        drop(ledger);
        let _chain = server::chain_without_children(listeners::pair().unwrap().0, &file).unwrap();
        // Nothing can be registered with a socket.
        relay.epoll = listeners::pair().unwrap().0;
        let client = listeners::pair().unwrap().0;
        let number = client.as_raw_fd();
        assert!(table::set(number, Entry::Ended(std::sync::Arc::default())));
        let address = SocketAddr::from(([127, 0, 0, 1], 80));
        assert_eq!(relay.add(client, (address, address)).unwrap_err(), Errno::INVAL);
        assert!(!table::is_ended(number));
    }
}
