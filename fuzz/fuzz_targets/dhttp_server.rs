//! Any datagrams, responses and accidents leave the server's tables sound, and an address that is not proved gets at
//! most three times its bytes and no connection.
#![no_main]

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use tidegate_dhttp::server::{
    Carrier, ConnectionId, ConnectionLimits, Received, Route, Server, ServerConfig, Ticket,
};

const RESPONSE: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";

fuzz_target!(|data: &[u8]| {
    let config = ServerConfig {
        in_flight: 4,
        answered_ids: 4,
        connections: ConnectionLimits { total: 2, per_client: 1, ..ConnectionLimits::default() },
        ..ServerConfig::default()
    };
    let mut now = Instant::now();
    let mut server = Server::new(config, [7; 16], [7; 32], now, 1_700_000_000);
    let clients: [SocketAddr; 2] = [([192, 0, 2, 1], 40_000).into(), ([192, 0, 2, 2], 40_000).into()];
    let (mut received, mut sent, mut proved) = ([0; 2], [0; 2], [false; 2]);
    let mut tickets: Vec<(usize, Ticket)> = Vec::new();
    let mut connections: Vec<ConnectionId> = Vec::new();
    let mut token: Option<Vec<u8>> = None;
    let long = [b'x'; 5000];
    let mut rest = data;
    while let Some((&step, after)) = rest.split_first() {
        let length = usize::from(after.first().copied().unwrap_or(0)).min(after.len());
        let (argument, after) = after.split_at(length);
        rest = after;
        let which = usize::from(step >> 7);
        match step & 7 {
            0..=2 => {
                let mut datagram = argument.to_vec();
                if step & 7 == 2
                    && let Some(token) = &token
                {
                    // The field on pieces is the fuzzer's.
                    let pieces = if step & 32 == 0 { &[][..] } else { argument };
                    let http = &b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"[..];
                    datagram = [b"idididid\x9c\x40\x02\x14", token.as_slice(), pieces, http].concat();
                    datagram[0] = step;
                    datagram[10] |= (step & 32) >> 3;
                    proved[which] = true;
                }
                received[which] += datagram.len();
                if let Received::Request { ticket, .. } =
                    server.handle_datagram(clients[which], &datagram, now)
                {
                    tickets.push((which, ticket));
                }
            }
            3 | 4 => {
                if let Some((which, ticket)) = tickets.pop() {
                    let route = if step & 7 == 3 {
                        server.respond(ticket, if step & 16 == 0 { RESPONSE } else { &long }, now)
                    } else {
                        server.respond_long(ticket, now)
                    };
                    match route {
                        Route::Datagram | Route::UseTcp => {}
                        Route::Connection(Carrier::Busy) => {}
                        Route::Connection(Carrier::Idle(connection)) => {
                            server.next_response(connection, now);
                        }
                        Route::Connection(Carrier::New(connection, to)) => {
                            assert!(proved[which], "a connection to {to}, who proved nothing");
                            connections.push(connection);
                            if step & 16 == 0 {
                                server.next_response(connection, now);
                            }
                        }
                    }
                }
            }
            5 => match connections.last().copied() {
                Some(connection) if step & 16 == 0 => {
                    server.next_response(connection, now);
                }
                Some(connection) => {
                    connections.pop();
                    server.on_connection_closed(connection, now);
                }
                None => server.set_stressed(step & 16 == 0),
            },
            6 => {
                now += Duration::from_millis(u64::from(step) * 50);
                server.handle_timeout(now);
            }
            _ => {
                if let Some((_, ticket)) = tickets.pop() {
                    server.abandon(ticket);
                }
            }
        }
        while let Some(transmit) = server.poll_transmit() {
            let to = clients.iter().position(|client| *client == transmit.to).expect("one of ours");
            sent[to] += transmit.payload.len();
            if transmit.payload.get(8) == Some(&2) && to == 0 {
                token = Some(transmit.payload[10..].to_vec());
            }
            assert!(proved[to] || sent[to] <= 3 * received[to]);
        }
        while let Some(closed) = server.poll_close() {
            connections.retain(|connection| *connection != closed);
        }
        while server.poll_given_up().is_some() {}
        server.check_invariants();
    }
});
