//! Whatever is put into an envelope's place, neither end panics, and a server's answers stay within what was received.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidegate_trickles::keys::KeyRing;
use tidegate_trickles::sealed::{ClientSeal, Encryption, Incoming, ServerSeal, Unsealed, public_from_hex};
use tidegate_trickles::server::Counters;

fuzz_target!(|data: &[u8]| {
    if let Ok(text) = std::str::from_utf8(data) {
        let _ = public_from_hex(text);
    }
    let ring = KeyRing::new(1, &[1; 16]);
    let mut server = ServerSeal::new(&[2; 16], true);
    let counters = Counters::default();
    let pinned = Encryption::Pinned(ring.identity().public());
    let mut client = ClientSeal::new(pinned, &[3; 16]).expect("it encrypts");
    let mut asking = ClientSeal::new(Encryption::On, &[4; 16]).expect("it encrypts");
    // A first with this inside opens to the same; what answers it opens at the client, and nowhere else.
    let first = client.seal(data);
    match server.open(&first, &ring, &counters) {
        Ok(Unsealed::Request(inner, reply)) => {
            assert_eq!(inner, data);
            let answer = server.seal(&reply, data);
            assert!(asking.open(&answer).is_err());
            assert_eq!(client.open(&answer), Ok(Incoming::Packet(data.to_vec())));
        }
        other => panic!("{other:?}"),
    }
    // As it is, and behind the heads of all kinds.
    let sealed = client.seal(b"x");
    let hello = asking.seal(b"x");
    let told = match server.open(&hello, &ring, &counters) {
        Ok(Unsealed::Answer(told)) => told,
        other => panic!("{other:?}"),
    };
    for head in [
        &[][..],
        &first[..6],
        &first[..38],
        &sealed[..19],
        &hello[..10],
        &told[..10],
        &[0xd1, 0xc2],
        &[0xd1, 0xc3],
    ] {
        let datagram = [head, data].concat();
        if let Ok(Unsealed::Answer(answer)) = server.open(&datagram, &ring, &counters) {
            assert!(answer.len() <= datagram.len());
        }
        for client in [&mut client, &mut asking] {
            if let Ok(Incoming::Packet(packet)) = client.open(&datagram) {
                panic!("{packet:?} was forged");
            }
        }
    }
});
