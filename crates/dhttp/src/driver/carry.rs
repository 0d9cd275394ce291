//! Connections that the server opens, which carry the responses that are too long for datagrams.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::Instant;

use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::IpBindAddressNoPort;
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::{Notify, oneshot};
use tokio::task::{AbortHandle, spawn_local};

use super::server::Driver;
use super::service::{Body, Service};
use super::stream::{Reader, write_message};
use crate::server::{Carrier, ConnectionId, GlobalId, Route};

/// A connection that the server opened.
pub(super) struct Connection {
    /// There is a response to carry.
    called: Rc<Notify>,
    pub(super) task: AbortHandle,
}

impl<S: Service> Driver<S> {
    /// Where to put the response, if a connection is to carry it.
    pub(super) fn follow(
        self: &Rc<Self>,
        route: Route,
        id: GlobalId,
        local: Option<IpAddr>,
    ) -> Option<oneshot::Sender<Body>> {
        self.changed.notify_one();
        let Route::Connection(carrier) = route else { return None };
        let (sender, http) = oneshot::channel();
        self.to_carry.borrow_mut().insert(id, http);
        match carrier {
            Carrier::Busy => {}
            Carrier::Idle(connection) => {
                if let Some(connection) = self.connections.borrow().get(&connection) {
                    connection.called.notify_one();
                }
            }
            Carrier::New(connection, to) => {
                let called = Rc::new(Notify::new());
                let from = local.unwrap_or(self.local.ip());
                let run = Rc::clone(self).connection(connection, from, to, Rc::clone(&called));
                let task = spawn_local(run).abort_handle();
                self.connections.borrow_mut().insert(connection, Connection { called, task });
            }
        }
        Some(sender)
    }

    /// A connection that the server opens, to its end.
    async fn connection(
        self: Rc<Self>,
        connection: ConnectionId,
        from: IpAddr,
        to: SocketAddr,
        called: Rc<Notify>,
    ) {
        if let Err(error) = self.carry(connection, from, to, &called).await {
            tracing::debug!(%error, %to, "connection to a client ended");
        }
        self.connections.borrow_mut().remove(&connection);
        self.core.borrow_mut().on_connection_closed(connection, Instant::now());
        self.give_up();
        self.changed.notify_one();
    }

    async fn carry(
        &self,
        connection: ConnectionId,
        from: IpAddr,
        to: SocketAddr,
        called: &Notify,
    ) -> io::Result<()> {
        let mut stream = connect(from, to).await?;
        let (read, mut write) = stream.split();
        let mut reader = Reader::new(read, self.limits.clone());
        loop {
            let next = self.core.borrow_mut().next_response(connection, Instant::now());
            let Some(id) = next else {
                // It is idle, until when the core may want to know.
                self.changed.notify_one();
                tokio::select! {
                    biased;
                    // The client closes, or speaks, which is not for it to do here.
                    () = reader.closed() => return Ok(()),
                    () = called.notified() => continue,
                }
            };
            let http = self.to_carry.borrow_mut().remove(&id).ok_or(io::ErrorKind::NotFound)?;
            let http = http.await.map_err(|_| io::Error::from(io::ErrorKind::ConnectionAborted))?;
            write_message(&mut write, &id.1.0, http, &self.limits).await?;
        }
    }

    /// Forgets the responses that no connection will carry.
    pub(super) fn give_up(&self) {
        loop {
            let given_up = self.core.borrow_mut().poll_given_up();
            let Some(id) = given_up else { return };
            self.to_carry.borrow_mut().remove(&id);
        }
    }
}

/// A connection from the address that was asked, so that the client does not take it for a cache's.
async fn connect(from: IpAddr, to: SocketAddr) -> io::Result<TcpStream> {
    let socket = if to.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    bind_address(&socket, from)?;
    socket.set_nodelay(true)?;
    socket.connect(to).await
}

/// Binds to an address that is definite. The port is chosen by connecting, when it need only be new for that peer: a
/// port of its own for each connection would run out, and takes longer to find.
pub(super) fn bind_address(socket: &TcpSocket, address: IpAddr) -> io::Result<()> {
    if address.is_unspecified() {
        return Ok(());
    }
    setsockopt(socket, IpBindAddressNoPort, &true)?;
    socket.bind(SocketAddr::new(address, 0))
}
