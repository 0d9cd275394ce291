//! Whatever a client sends, the server neither panics nor answers with more than it may; what it reads it can write.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidegate_trickles::http::{Asked, HttpService, Lost, Missing, Resource, Site};
use tidegate_trickles::keys::KeyRing;
use tidegate_trickles::server::{Config, Server};
use tidegate_trickles::wire::{self, PADDED_BYTES, Request};

struct Zeros;

impl Site for Zeros {
    fn find(&mut self, asked: &Asked<'_>) -> Result<Resource, Missing> {
        match asked.target {
            b"/none" => Err(Missing::NotFound),
            _ => Ok(zeros()),
        }
    }

    fn known(&mut self, _: &[u8], _: &[u8], version: u64) -> Result<Resource, Lost> {
        if version == 1 { Ok(zeros()) } else { Err(Lost::Gone) }
    }

    fn read(&mut self, _: &[u8], _: &[u8], _: u64, offset: u64, buffer: &mut [u8]) -> Result<usize, Lost> {
        let count = buffer.len().min(100_000_u64.saturating_sub(offset) as usize);
        buffer[..count].fill(0);
        Ok(count)
    }
}

fn zeros() -> Resource {
    Resource {
        status: 200,
        length: 100_000,
        version: 1,
        modified_s: Some(1),
        etag: b"\"1\"".to_vec(),
        fields: Vec::new(),
    }
}

fuzz_target!(|data: &[u8]| {
    if let Ok(request) = Request::decode(data) {
        let mut written = Vec::new();
        Request::encode_head(request.connection, request.timestamp_us, &request.ask, &mut written);
        for input in &request.inputs {
            wire::write_input(input, &mut written);
        }
        let again = Request::decode(&written).expect("what was written is a request");
        assert_eq!((&again.ask, &again.inputs), (&request.ask, &request.inputs));
    }
    let config = Config { replay_entries: 16, ..Config::default() };
    let mut server = Server::new(config, KeyRing::new(1, &[1; 16]), 1_700_000_000_000);
    let mut service = HttpService::new(Zeros, || 1_700_000_000);
    let peer = ([192, 0, 2, 1], 1).into();
    // As it is, and as an open with this input: what no MAC keeps strangers from sending.
    let mut open = vec![wire::VERSION, 1];
    open.extend_from_slice(&[7; 12]);
    let flag = if data.first().is_some_and(|&byte| byte & 1 == 1) { wire::CUBIC_WANTED } else { 0 };
    open.extend_from_slice(&(1200 | flag).to_be_bytes());
    let data = &data[..data.len().min(1000)];
    wire::write_input(
        &wire::Input { request: 1, offset: 0, last: false, continuation: &[], data },
        &mut open,
    );
    wire::pad(PADDED_BYTES, &mut open);
    for datagram in [data, &open] {
        let mut answered = 0;
        let _ = server.handle(datagram, peer, 1_700_000_000_000, &mut service, &mut |packet: &[u8]| {
            answered += packet.len();
        });
        assert!(answered <= 3 * datagram.len());
    }
});
