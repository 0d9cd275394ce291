//! Attackers that ask again as soon as they are answered, or when their pause is over.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rustix::net::SocketFlags;

use super::{Attack, FIRST_GOOD, RETRY, Scene, Shared, open, request, spread};

/// One attacker's connection.
struct Bot {
    source: Ipv4Addr,
    stream: Option<TcpStream>,
    /// A request is under way.
    waits: bool,
    again: Instant,
    answered_late: bool,
    /// It has asked on this connection.
    asked: bool,
}

/// Every attacker asks again as soon as it is answered; how many had no answer in the last third.
pub(super) fn flood(shared: &Shared) -> u32 {
    let Scene { attack, server, good, .. } = shared.scene;
    let mut random = 0x9e37_79b9_u64;
    let mut bots: Vec<Bot> = (0..shared.scene.attackers)
        .map(|index| Bot {
            source: attack.source(index),
            stream: None,
            waits: false,
            again: Instant::now(),
            answered_late: false,
            asked: false,
        })
        .collect();
    let mut buffer = vec![0; 16 * 1024];
    while !shared.is_over() {
        let late = shared.last_third();
        let mut did_something = false;
        if let Attack::Pulses { on_s } = attack
            && (shared.began.elapsed() - shared.scene.before).as_secs() % 10 >= on_s
        {
            std::thread::sleep(Duration::from_millis(10));
            continue;
        }
        for bot in &mut bots {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let fields = match attack {
                Attack::Forged => {
                    let victim = spread(FIRST_GOOD, (random >> 40) as u32 % good.max(1));
                    format!("X-Forwarded-For: {victim}\r\nForwarded: for={victim}\r\nX-Real-IP: {victim}\r\n")
                }
                _ => String::new(),
            };
            let ask = || request(server, &attack.target(random >> 16), &fields);
            did_something |= step(bot, server, ask, (&mut buffer, attack.pause()), late);
        }
        if !did_something {
            std::thread::sleep(Duration::from_millis(1));
        } else {
            std::thread::yield_now();
        }
    }
    bots.iter().filter(|bot| !bot.answered_late).count() as u32
}

fn step(
    bot: &mut Bot,
    server: SocketAddr,
    request: impl FnOnce() -> String,
    (buffer, pause): (&mut [u8], Duration),
    late: bool,
) -> bool {
    if bot.stream.is_none() {
        if Instant::now() < bot.again {
            return false;
        }
        bot.stream = open(bot.source, server, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK).ok();
        (bot.waits, bot.asked) = (false, false);
        bot.again = Instant::now() + RETRY;
        return true;
    }
    let Some(stream) = &mut bot.stream else { return false };
    if !bot.waits {
        // After a connection was made it asks at once, and otherwise when its pause is over.
        if bot.asked && Instant::now() < bot.again {
            return false;
        }
        match stream.write(request().as_bytes()) {
            Ok(_) => (bot.waits, bot.asked) = (true, true),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected) => {
                return false;
            }
            Err(_) => bot.stream = None,
        }
        return true;
    }
    match stream.read(buffer) {
        Ok(0) => bot.stream = None,
        Ok(length) => {
            bot.waits = false;
            bot.again = Instant::now() + pause;
            bot.answered_late |= late && buffer[..length].starts_with(b"HTTP/1.1 200");
        }
        Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
        Err(_) => bot.stream = None,
    }
    true
}
