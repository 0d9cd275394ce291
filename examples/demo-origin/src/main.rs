#![forbid(unsafe_code)]
//! A small, deliberately slow web application: what `make run` puts tidegate in front of.
//!
//! `tidegate-demo-origin [ADDRESS]` listens on ADDRESS (127.0.0.1:9000 when absent). Every HTML page costs
//! [`pages::PAGE_WORK`] of processor time, and only as many pages are made at once as the machine has processors:
//! the usual shape of an application server that answers well until it is popular.

mod http;
mod pages;
mod slots;

use std::io;
use std::net::{TcpListener, TcpStream};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use slots::Slots;

/// Connections served at once; further ones wait in the kernel's accept queue.
const MAX_CONNECTIONS: usize = 512;
/// How long an idle or stalled connection is kept: longer than the accelerator keeps its own.
const IO_TIMEOUT: Duration = Duration::from_secs(90);
/// A thread needs little: the largest buffer on its stack is a few KiB.
const STACK_BYTES: usize = 128 << 10;

fn main() -> ExitCode {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:9000".to_owned());
    if address == "--help" || address == "-h" {
        println!("usage: tidegate-demo-origin [ADDRESS]\nexample: tidegate-demo-origin 127.0.0.1:9000");
        return ExitCode::SUCCESS;
    }
    match TcpListener::bind(&address).and_then(|listener| serve(&listener)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tidegate-demo-origin: cannot serve on {address}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Accepts connections for ever: one thread each, at most [`MAX_CONNECTIONS`].
fn serve(listener: &TcpListener) -> io::Result<()> {
    println!("demo origin listening on {}", listener.local_addr()?);
    let connections = Arc::new(Slots::new(MAX_CONNECTIONS));
    let processors = Arc::new(Slots::new(std::thread::available_parallelism().map_or(1, usize::from)));
    loop {
        let slot = Slots::take(&connections);
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, or a peer that left before it was accepted: neither ends the demo.
                eprintln!("tidegate-demo-origin: accept: {error}");
                std::thread::sleep(Duration::from_millis(20));
                continue;
            }
        };
        let processors = Arc::clone(&processors);
        let started = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(move || {
            let _slot = slot;
            // A client that leaves in the middle is everyday business.
            let _ = converse(&stream, &processors);
        });
        if let Err(error) = started {
            eprintln!("tidegate-demo-origin: no thread for a connection: {error}");
        }
    }
}

/// Answers the requests of one connection until either side ends it.
fn converse(stream: &TcpStream, processors: &Arc<Slots>) -> io::Result<()> {
    stream.set_read_timeout(Some(IO_TIMEOUT))?;
    stream.set_write_timeout(Some(IO_TIMEOUT))?;
    stream.set_nodelay(true)?;
    let mut connection = http::Connection::new(stream);
    while let Some(request) = connection.next_request()? {
        let keep = request.keep_alive;
        if request.method == "POST" && request.path == "/upload" {
            connection.echo(&request)?;
        } else {
            connection.discard_body(&request)?;
            let answer = pages::answer(&request, || {
                pages::work(&Slots::take(processors));
            });
            connection.send(&request, &answer)?;
        }
        if !keep {
            break;
        }
    }
    Ok(())
}
