//! Attackers that ask once and leave: none of them does anything that a good client would not do.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use rustix::net::SocketFlags;

use super::{PATIENCE, Shared, open, request};

/// Connections at once.
const AT_ONCE: u32 = 500;

/// Every attacker asks once on a connection of its own, one after the other; of those that
/// asked in the last third the share that had no answer, as so many of all.
pub(super) fn pass_by(shared: &Shared) -> u32 {
    let scene = shared.scene;
    let text = request(scene.server, "/object", "Connection: close\r\n");
    let mut places: Vec<(u32, Option<TcpStream>, bool, Instant)> =
        (0..AT_ONCE.min(scene.attackers)).map(|_| (0, None, false, Instant::now())).collect();
    let (mut asked_late, mut answered_late) = (0u32, 0u32);
    let mut next = 0;
    let mut buffer = [0; 4096];
    while !shared.is_over() {
        let late = shared.last_third();
        for (index, stream, asked, since) in &mut places {
            let Some(open_stream) = stream else {
                *index = next;
                next = (next + 1) % scene.attackers;
                let source = scene.attack.source(*index);
                *stream = open(source, scene.server, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK).ok();
                (*asked, *since) = (false, Instant::now());
                continue;
            };
            let done = if *asked {
                match open_stream.read(&mut buffer) {
                    Err(error) if error.kind() == ErrorKind::WouldBlock => false,
                    Ok(length) if buffer[..length].starts_with(b"HTTP/1.1 200") => {
                        answered_late += u32::from(late);
                        true
                    }
                    _ => true,
                }
            } else {
                match open_stream.write_all(text.as_bytes()) {
                    Ok(()) => {
                        *asked = true;
                        asked_late += u32::from(late);
                        false
                    }
                    Err(error) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected),
                }
            };
            if done || since.elapsed() > PATIENCE {
                *stream = None;
            }
        }
        std::thread::yield_now();
    }
    let refused = asked_late.saturating_sub(answered_late);
    (u64::from(refused) * u64::from(scene.attackers) / u64::from(asked_late.max(1))) as u32
}
