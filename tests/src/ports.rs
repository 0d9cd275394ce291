//! Ports that no other test of this machine is given: tidegate listens with SO_REUSEPORT, so that two tests with the
//! same port would share it without a word.

use std::fs::File;
use std::net::TcpListener;
use std::sync::Mutex;

/// Below the range from which the kernel takes the ports of outgoing connections.
const FIRST: u16 = 20_000;
const COUNT: u16 = 10_000;

/// Locks held until the process ends.
static HELD: Mutex<Vec<File>> = Mutex::new(Vec::new());

/// A port of 127.0.0.1 that stays this process's own until it ends.
///
/// # Panics
/// When there is none left.
pub fn free_port() -> u16 {
    let directory = std::env::temp_dir().join("tidegate-e2e-ports");
    std::fs::create_dir_all(&directory).unwrap();
    let mut held = HELD.lock().unwrap();
    let start = std::process::id() as u16 % COUNT;
    for step in 0..COUNT {
        // A stride that is prime to the count keeps processes with neighbouring ids apart.
        let port = FIRST + (start.wrapping_mul(7) % COUNT + step * 3 % COUNT) % COUNT;
        let lock = File::create(directory.join(port.to_string())).unwrap();
        if lock.try_lock().is_ok() && TcpListener::bind(("127.0.0.1", port)).is_ok() {
            held.push(lock);
            return port;
        }
    }
    panic!("no free port between {FIRST} and {}", FIRST + COUNT);
}
