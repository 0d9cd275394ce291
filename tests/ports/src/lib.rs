#![forbid(unsafe_code)]
//! Ports that no other test or experiment of this machine is given.
//!
//! A port that the kernel chose and that was closed again is free only until somebody's outgoing connection, or
//! somebody else's server, gets the same one. These lie below the range of outgoing connections, and each is one
//! process's own until it ends: some servers listen with SO_REUSEPORT, so that two of them would share a port without a
//! word.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as Name, UnixDatagram};
use std::sync::{Mutex, PoisonError};

/// Below the range from which Linux takes the ports of outgoing connections (`ip_local_port_range`).
const FIRST: u16 = 20_000;
const COUNT: u32 = 10_000;
/// Prime to the count, so that processes with neighbouring ids begin far from each other.
const STRIDE: u32 = 7;

/// What this process has reserved. A name in the abstract namespace has one holder, ends with it, and is seen exactly
/// where the port is: in one network namespace.
static HELD: Mutex<Vec<UnixDatagram>> = Mutex::new(Vec::new());

/// A port of TCP and UDP that nobody listens on and that stays this process's own until it ends.
///
/// # Errors
/// `AddrInUse` when there is none left, or what else keeps one from being reserved.
pub fn free_port() -> io::Result<u16> {
    let start = std::process::id() % COUNT * STRIDE;
    for step in 0..COUNT {
        let port = FIRST + ((start + step) % COUNT) as u16;
        let name = Name::from_abstract_name(format!("tidegate-port-{port}"))?;
        let holder = match UnixDatagram::bind_addr(&name) {
            Ok(holder) => holder,
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => continue,
            Err(error) => return Err(error),
        };
        // Every address of the machine, so that a server on one of them is seen too.
        let everywhere = (Ipv4Addr::UNSPECIFIED, port);
        if TcpListener::bind(everywhere).is_ok() && UdpSocket::bind(everywhere).is_ok() {
            HELD.lock().unwrap_or_else(PoisonError::into_inner).push(holder);
            return Ok(port);
        }
    }
    Err(io::Error::new(io::ErrorKind::AddrInUse, "every port for tests is taken"))
}

/// 127.0.0.1 with a [`free_port`].
///
/// # Errors
/// As [`free_port`].
pub fn free_address() -> io::Result<SocketAddr> {
    Ok(SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()?)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_port_is_given_twice_nor_to_another_process() {
        let ports: HashSet<u16> = (0..50).map(|_| free_port().unwrap()).collect();
        assert_eq!(ports.len(), 50);
        for port in &ports {
            let name = Name::from_abstract_name(format!("tidegate-port-{port}")).unwrap();
            assert_eq!(UnixDatagram::bind_addr(&name).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        }
    }

    #[test]
    fn a_port_that_a_server_of_one_address_has_is_passed_over() {
        let next = free_port().unwrap() + 1;
        // Somebody else's where this fails; it is not given either way.
        let _server = TcpListener::bind((Ipv4Addr::LOCALHOST, next));
        assert_ne!(free_port().unwrap(), next);
    }
}
