//! Encryption over real sockets: through a relay that listens, forges, replays and strips.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

mod support;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use support::{byte_at, objects};
use tidegate_trickles::files::FileService;
use tidegate_trickles::keys::KeyRing;
use tidegate_trickles::sealed::{
    ClientSeal, Encryption, Incoming, SealError, ServerSeal, Unsealed, public_from_hex,
};
use tidegate_trickles::server::{self, Counters, Server};
use tidegate_trickles::udp::{self, Connection, Options, StreamError, UdpServer};
use tokio::io::AsyncReadExt;
use tokio::net::UdpSocket;
use tokio::sync::watch;

const LENGTH: u64 = 400_000;

struct Running {
    address: SocketAddr,
    counters: Arc<Counters>,
    keys: watch::Sender<KeyRing>,
}

fn start(keys: KeyRing, require_encryption: bool) -> Running {
    let socket = udp::bind("127.0.0.1:0".parse().unwrap(), false).unwrap();
    let now_ms =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as u64;
    let config = server::Config { require_encryption, ..server::Config::default() };
    let server = Server::new(config, keys.clone(), now_ms);
    let mut server = UdpServer::new(socket, server, FileService::new(objects(&[LENGTH]))).unwrap();
    let (address, counters) = (server.local_addr().unwrap(), server.counters());
    let (keys, rings) = watch::channel(keys);
    tokio::spawn(async move { server.run(rings, std::future::pending()).await });
    Running { address, counters, keys }
}

async fn read(server: SocketAddr, encryption: Encryption) -> std::io::Result<Vec<u8>> {
    let connection = Connection::new(&Options { encryption, ..Options::to(vec![server]) })?;
    let mut bytes = Vec::new();
    connection.request(b"/object/0").unwrap().read_to_end(&mut bytes).await?;
    Ok(bytes)
}

fn assert_object(bytes: &[u8]) {
    assert_eq!(bytes.len() as u64, LENGTH);
    assert!(bytes.iter().enumerate().all(|(at, &byte)| byte == byte_at(b"/object/0", at as u64)));
}

type Change = dyn FnMut(bool, &[u8]) -> Vec<Vec<u8>> + Send;

/// Leads one client to `server`; `change` makes of each datagram (upwards or not) what is passed on.
async fn relay(server: SocketAddr, mut change: Box<Change>) -> SocketAddr {
    let (front, back) =
        (UdpSocket::bind("127.0.0.1:0").await.unwrap(), UdpSocket::bind("127.0.0.1:0").await.unwrap());
    back.connect(server).await.unwrap();
    let address = front.local_addr().unwrap();
    tokio::spawn(async move {
        let (mut up, mut down, mut client) = ([0; 2048], [0; 2048], None);
        loop {
            tokio::select! {
                Ok((length, from)) = front.recv_from(&mut up) => {
                    client = Some(from);
                    for datagram in change(true, &up[..length]) {
                        let _ = back.send(&datagram).await;
                    }
                }
                Ok(length) = back.recv(&mut down) => {
                    for datagram in change(false, &down[..length]) {
                        let _ = front.send_to(&datagram, client.unwrap()).await;
                    }
                }
            }
        }
    });
    address
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

#[tokio::test]
async fn a_transfer_when_encrypted_then_the_wire_shows_neither_path_nor_content() {
    let ring = KeyRing::new(1, &[7; 16]);
    let server = start(ring.clone(), true);
    let object: Vec<u8> = (0..LENGTH).map(|at| byte_at(b"/object/0", at)).collect();
    for encryption in [Encryption::On, Encryption::Pinned(ring.identity().public())] {
        let seen = Arc::new(Mutex::new(Vec::<Vec<u8>>::new()));
        let record = Arc::clone(&seen);
        let change = move |_: bool, datagram: &[u8]| {
            record.lock().unwrap().push(datagram.to_vec());
            vec![datagram.to_vec()]
        };
        let address = relay(server.address, Box::new(change)).await;
        assert_object(&read(address, encryption).await.unwrap());
        let seen = seen.lock().unwrap();
        assert!(seen.len() > 100);
        assert!(seen.iter().all(|datagram| datagram.len() <= 1472), "within what the path carries");
        assert!(!seen.iter().any(|datagram| contains(datagram, b"/object")));
        // Pieces of 16 bytes of the object, from every part of it.
        for at in (0..object.len() - 16).step_by(997) {
            assert!(!seen.iter().any(|datagram| contains(datagram, &object[at..at + 16])), "at {at}");
        }
        // Half of the first byte after the head and so on: nothing repeats from packet to packet but the clear head.
        let hello = seen.iter().filter(|datagram| datagram[1] == 0x41).count();
        assert_eq!(
            hello,
            usize::from(encryption == Encryption::On),
            "a pinned key needs no further round trip"
        );
    }
    assert_eq!(server.counters.trickles_plaintext_refused_total.get(), 0);
}

#[tokio::test]
async fn the_same_relay_in_the_clear_when_it_listens_then_it_sees_the_path() {
    // What the test above would show if nothing were encrypted.
    let server = start(KeyRing::new(1, &[7; 16]), false);
    let seen = Arc::new(Mutex::new(false));
    let record = Arc::clone(&seen);
    let change = move |_: bool, datagram: &[u8]| {
        *record.lock().unwrap() |= contains(datagram, b"/object/0");
        vec![datagram.to_vec()]
    };
    let address = relay(server.address, Box::new(change)).await;
    assert_object(&read(address, Encryption::Off).await.unwrap());
    assert!(*seen.lock().unwrap());
}

#[tokio::test]
async fn forged_and_replayed_envelopes_when_they_arrive_then_the_transfer_is_exact_and_they_are_counted() {
    let ring = KeyRing::new(1, &[7; 16]);
    let server = start(ring.clone(), true);
    let mut count = 0_usize;
    let change = move |up: bool, datagram: &[u8]| {
        count += 1;
        let mut forged = datagram.to_vec();
        let at = 2 + count * 31 % (datagram.len() - 2);
        forged[at] ^= 1 << (count % 8);
        let mut out = vec![datagram.to_vec()];
        // The first ones establish the session: a forged id or hint would be another client's.
        if count > 8 {
            out = vec![forged, datagram.to_vec()];
            if up {
                out.push(datagram.to_vec());
            }
        }
        out
    };
    let address = relay(server.address, Box::new(change)).await;
    assert_object(&read(address, Encryption::Pinned(ring.identity().public())).await.unwrap());
    let counters = &server.counters;
    assert!(counters.trickles_seal_forged_total.get() > 20);
    assert!(counters.trickles_replayed_total.get() > 20, "a replayed envelope opens, its request is refused");
    assert_eq!(counters.trickles_forged_total.get(), 0, "nothing forged gets past the envelope");
}

#[tokio::test]
async fn a_server_without_the_pinned_key_when_asked_then_the_client_says_so_and_sends_nothing_in_the_clear() {
    let server = start(KeyRing::new(1, &[7; 16]), false);
    let other = KeyRing::new(1, &[8; 16]).identity().public();
    let error = read(server.address, Encryption::Pinned(other)).await.unwrap_err();
    let reason = error.get_ref().and_then(|source| source.downcast_ref::<StreamError>());
    assert_eq!(reason, Some(&StreamError::WrongKey));
    assert_eq!(server.counters.trickles_opens_total.get(), 0);
}

#[tokio::test]
async fn a_plain_client_when_encryption_is_required_then_it_is_refused() {
    let server = start(KeyRing::new(1, &[7; 16]), true);
    let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let mut plain =
        tidegate_trickles::client::Client::new(Default::default(), &[3; 16], std::time::Instant::now());
    plain.request(b"/object/0", std::time::Instant::now()).unwrap();
    let open = plain.poll_transmit(std::time::Instant::now()).unwrap();
    client.send_to(&open, server.address).await.unwrap();
    // A later datagram is answered: the first has been read by then.
    let mut hello = vec![0xd1, 0x41];
    hello.resize(64, 5);
    client.send_to(&hello, server.address).await.unwrap();
    let mut answer = [0; 2048];
    let length = client.recv(&mut answer).await.unwrap();
    assert_eq!((length, answer[1]), (42, 0xc1), "the key, and nothing before it");
    assert_eq!(server.counters.trickles_plaintext_refused_total.get(), 1);
    assert_eq!(server.counters.trickles_opens_total.get(), 0);
}

#[tokio::test]
async fn keys_when_rotated_and_retired_in_mid_transfer_then_the_session_goes_on() {
    let mut ring = KeyRing::new(1, &[7; 16]);
    let server = start(ring.clone(), true);
    for encryption in [Encryption::On, Encryption::Pinned(ring.identity().public())] {
        let connection =
            Connection::new(&Options { encryption, ..Options::to(vec![server.address]) }).unwrap();
        let mut stream = connection.request(b"/object/0").unwrap();
        let mut bytes = vec![0; 50_000];
        stream.read_exact(&mut bytes).await.unwrap();
        let epoch = ring.current().epoch;
        ring.rotate(epoch + 1, &[epoch + 1; 16]);
        server.keys.send_replace(ring.clone());
        let at = bytes.len();
        bytes.resize(100_000, 0);
        stream.read_exact(&mut bytes[at..]).await.unwrap();
        stream.read_to_end(&mut bytes).await.unwrap();
        assert_object(&bytes);
    }
    // The epoch of a session that was idle meanwhile is gone: it begins another one.
    let connection =
        Connection::new(&Options { encryption: Encryption::On, ..Options::to(vec![server.address]) })
            .unwrap();
    let mut bytes = Vec::new();
    connection.request(b"/object/0").unwrap().read_to_end(&mut bytes).await.unwrap();
    let epoch = ring.current().epoch;
    ring.rotate(epoch + 1, &[9; 16]);
    ring.retire(epoch);
    server.keys.send_replace(ring);
    bytes.clear();
    connection.request(b"/object/0").unwrap().read_to_end(&mut bytes).await.unwrap();
    assert_object(&bytes);
    assert!(server.counters.trickles_sessions_expired_total.get() > 0);
}

#[test]
fn an_envelope_when_any_bit_is_changed_then_it_is_not_opened() {
    let ring = KeyRing::new(1, &[7; 16]);
    let counters = Counters::default();
    let mut server = ServerSeal::new(&[1; 16], false);
    let mut client = ClientSeal::new(Encryption::Pinned(ring.identity().public()), &[2; 16]).unwrap();
    let first = client.seal(b"the first datagram");
    let Unsealed::Request(inner, reply) = server.open(&first, &ring, &counters).unwrap() else { panic!() };
    assert_eq!(inner, b"the first datagram");
    let answer = server.seal(&reply, b"an answer");
    for bit in 0..answer.len() * 8 {
        let mut forged = answer.clone();
        forged[bit / 8] ^= 1 << (bit % 8);
        assert!(!matches!(client.open(&forged), Ok(Incoming::Packet(_))), "bit {bit}");
    }
    assert_eq!(client.open(&answer).unwrap(), Incoming::Packet(b"an answer".to_vec()));
    let second = client.seal(b"the second datagram");
    assert_eq!(second[1], 0x43, "a session");
    for datagram in [&first, &second] {
        for bit in 16..datagram.len() * 8 {
            let mut forged = datagram.clone();
            forged[bit / 8] ^= 1 << (bit % 8);
            let opened = server.open(&forged, &ring, &counters);
            assert!(!matches!(opened, Ok(Unsealed::Request(..) | Unsealed::Plain)), "bit {bit}");
        }
        for length in 2..datagram.len() {
            let opened = server.open(&datagram[..length], &ring, &counters);
            assert!(!matches!(opened, Ok(Unsealed::Request(..) | Unsealed::Plain)), "{length} bytes");
        }
    }
    // An answer is not a request, and the other way about; another client cannot open it.
    assert!(client.open(&second).is_err());
    let mut other = ClientSeal::new(Encryption::Pinned(ring.identity().public()), &[3; 16]).unwrap();
    let _ = other.seal(b"x");
    assert_eq!(other.open(&answer), Err(SealError::Forged));
}

#[test]
fn a_stripped_envelope_when_it_arrives_then_the_client_ignores_it() {
    let ring = KeyRing::new(1, &[7; 16]);
    for encryption in [Encryption::On, Encryption::Pinned(ring.identity().public())] {
        let mut client = ClientSeal::new(encryption, &[2; 16]).unwrap();
        let _ = client.seal(b"open");
        assert_eq!(client.open(&[0xd1, 0x81, 0, 0]), Err(SealError::Plaintext));
        assert_eq!(client.open(&[0xd1, 0x82]), Err(SealError::Plaintext));
        // A key that nobody asked for is not taken.
        let mut key = vec![0xd1, 0xc1];
        key.resize(42, 9);
        assert_eq!(client.open(&key), Err(SealError::Forged));
    }
}

#[test]
fn a_key_file_when_it_names_an_identity_then_it_outlives_the_epochs() {
    let secret = "11".repeat(32);
    let text = |epoch: u8| format!("{epoch} {}\nidentity {secret}\n", format!("{epoch:02x}").repeat(16));
    let (old, new) = (KeyRing::from_text(&text(1)).unwrap(), KeyRing::from_text(&text(2)).unwrap());
    assert_eq!(old.identity().public(), new.identity().public());
    assert_ne!(old.identity().public(), KeyRing::new(1, &[1; 16]).identity().public());
    for wrong in
        ["identity 11", "identity", &format!("identity {secret}\nidentity {secret}\n1 {}", "00".repeat(16))]
    {
        assert!(KeyRing::from_text(wrong).is_err(), "{wrong}");
    }
    assert!(KeyRing::from_text(&format!("identity {secret}")).is_err(), "an identity alone signs nothing");
    assert_eq!(public_from_hex(&secret), Some([0x11; 32]));
    assert_eq!(public_from_hex(&"1".repeat(63)), None);
    assert_eq!(public_from_hex(&"é".repeat(32)), None);
}
