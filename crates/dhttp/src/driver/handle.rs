//! What is counted of a server core, and how it is stopped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tidegate_core::metric_set;
use tokio::sync::watch;

use crate::server::ServerMetrics;

metric_set! {
    /// What the driver of one server core counts. The core is the only writer.
    pub struct DriverMetrics {
        Counter dhttp_datagrams_received_total: "Datagrams received.",
        Counter dhttp_datagrams_overflowed_total:
            "Datagrams that the kernel dropped because those before them had not been read.",
        Counter dhttp_datagrams_sent_total: "Datagrams handed to the kernel.",
        Counter dhttp_datagrams_unsent_total: "Datagrams dropped because the socket stayed full.",
        Counter dhttp_accepted_total: "Connections that clients opened.",
        Gauge dhttp_accepted_open: "Connections that clients opened, open now.",
        Counter dhttp_accepted_refused_total:
            "Connections of clients closed at once because a limit was reached, in all or of one client.",
        Counter dhttp_accepted_policed_total:
            "Connections of clients closed at once because the site does not serve them.",
        Counter dhttp_datagrams_blocked_total: "Datagrams ignored because their source is blocked.",
        Counter dhttp_joined_total: "Sealed requests on connections that joined one by UDP in progress.",
        Counter dhttp_accept_errors_total: "Failed accepts, such as for want of file descriptors.",
        Counter dhttp_stream_requests_total: "Requests on connections that clients opened.",
        Counter dhttp_tls_total: "Connections of clients with TLS.",
        Counter dhttp_stream_errors_total: "Connections of clients ended by a malformed, slow or broken message.",
        Counter dhttp_response_timeouts_total: "Requests answered 504 because the service took too long.",
        Counter dhttp_responses_aborted_total: "Responses that broke off while they were made.",
    }
}

/// Watches and stops a server from any thread.
#[derive(Clone, Debug)]
pub struct ServerHandle {
    protocol: Arc<ServerMetrics>,
    pub(super) driver: Arc<DriverMetrics>,
    stressed: Arc<AtomicBool>,
    pub(super) ending: watch::Sender<Ending>,
}

/// How soon a server ends.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, PartialOrd)]
pub(super) enum Ending {
    #[default]
    NotYet,
    /// When everything that has been asked is answered.
    Drained,
    AtOnce,
}

impl ServerHandle {
    pub(super) fn new(protocol: Arc<ServerMetrics>) -> Self {
        Self { protocol, driver: Arc::default(), stressed: Arc::default(), ending: watch::Sender::default() }
    }

    pub(super) fn is_stressed(&self) -> bool {
        self.stressed.load(Ordering::Relaxed)
    }

    /// Counters of the protocol.
    pub fn metrics(&self) -> &ServerMetrics {
        &self.protocol
    }

    /// Counters of the driver.
    pub fn driver_metrics(&self) -> &DriverMetrics {
        &self.driver
    }

    /// Under stress no connections are opened; see [`Server::set_stressed`](crate::server::Server::set_stressed).
    pub fn set_stressed(&self, stressed: bool) {
        self.stressed.store(stressed, Ordering::Relaxed);
    }

    /// Ends the server's future; what is being answered is given up.
    pub fn stop(&self) {
        self.ending.send_replace(Ending::AtOnce);
    }

    /// Takes no more requests, and ends the server's future when those that have come are answered.
    pub fn drain(&self) {
        self.ending.send_if_modified(|ending| {
            let begins = *ending < Ending::Drained;
            if begins {
                *ending = Ending::Drained;
            }
            begins
        });
    }
}
