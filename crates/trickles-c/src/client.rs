//! The client's calls: one request at a time, waited for.

use crate::{lock, system};
use libc::c_int;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};
use tidegate_trickles::udp::{Connection, Options};
use tokio::io::AsyncReadExt;
use tokio::runtime::{Builder, Runtime};

struct Client {
    runtime: Runtime,
    connection: Connection,
    response: Vec<u8>,
    /// Gives the client a descriptor of its own.
    _descriptor: File,
}

static CLIENTS: Mutex<Option<HashMap<c_int, Arc<Mutex<Client>>>>> = Mutex::new(None);

fn find(fd: c_int) -> Result<Arc<Mutex<Client>>, c_int> {
    lock(&CLIENTS).as_ref().and_then(|clients| clients.get(&fd).cloned()).ok_or(libc::EBADF)
}

pub(crate) fn connect(address: &str) -> Result<c_int, c_int> {
    let server = address.parse().map_err(|_| libc::EINVAL)?;
    let made = || -> io::Result<(c_int, Client)> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let options = Options::to(vec![server]);
        let connection = {
            let _inside = runtime.enter();
            Connection::new(&options)?
        };
        let descriptor = File::open("/dev/null")?;
        let fd = descriptor.as_raw_fd();
        Ok((fd, Client { runtime, connection, response: Vec::new(), _descriptor: descriptor }))
    };
    let (fd, client) = made().map_err(|error| system(&error))?;
    lock(&CLIENTS).get_or_insert_with(HashMap::new).insert(fd, Arc::new(Mutex::new(client)));
    Ok(fd)
}

pub(crate) fn close(fd: c_int) -> bool {
    lock(&CLIENTS).as_mut().and_then(|clients| clients.remove(&fd)).is_some()
}

pub(crate) fn request(fd: c_int, request: &[u8], reserve: usize) -> Result<usize, c_int> {
    let client = find(fd)?;
    let mut client = lock(&client);
    let Client { runtime, connection, response, .. } = &mut *client;
    response.clear();
    let stream = runtime.block_on(async {
        let stream = connection.request(request).map_err(io::Error::from)?;
        stream.take(reserve as u64).read_to_end(response).await
    });
    stream.map_err(|error| system(&error))
}

pub(crate) fn response(fd: c_int, limit: usize) -> Result<Vec<u8>, c_int> {
    let client = find(fd)?;
    let mut client = lock(&client);
    let length = client.response.len().min(limit);
    Ok(client.response.drain(..length).collect())
}
