//! Connections that do not leave the host.

use std::net::IpAddr;

use socket2::Socket;

/// Within the host there is no path whose queues BBR's pacing would spare, only its timers (decision 0022). Where a
/// kernel has been built without Reno, the system's choice is as right.
pub(crate) fn leave_out_within_host(socket: &Socket, other_end: IpAddr) {
    if other_end.to_canonical().is_loopback() {
        let _ = socket.set_tcp_congestion(b"reno");
    }
}
