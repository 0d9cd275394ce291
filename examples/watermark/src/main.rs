//! `tidegate-watermark PICTURE.jpg [ADDRESS:PORT [KEYFILE]]`: serves the picture, marked for each client by the name it sends.

use std::fmt::Display;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use tidegate_trickles::keys::KeyRing;
use tidegate_trickles::server::Config;
use tidegate_trickles::udp::{UdpService, random_block};
use tidegate_watermark::{Jpeg, Watermark};

const USAGE: &str = "usage: tidegate-watermark PICTURE.jpg [ADDRESS:PORT [KEYFILE]]";
const DEFAULT_ADDRESS: &str = "127.0.0.1:4000";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (picture, more) = match arguments.split_first() {
        Some((picture, more)) if more.len() <= 2 => (picture, more),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    let address = more.first().map_or(DEFAULT_ADDRESS, String::as_str);
    let Ok(address) = address.parse() else {
        eprintln!("error: {address}: expected an address and a port, such as {DEFAULT_ADDRESS}");
        return ExitCode::from(2);
    };
    match start(picture, address, more.get(1)) {
        Ok(service) => {
            println!("listening on {}", service.local_addr());
            loop {
                std::thread::park();
            }
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn start(picture: &str, address: SocketAddr, keys: Option<&String>) -> Result<UdpService, String> {
    let keys = match keys {
        Some(path) => {
            let text = std::fs::read_to_string(path).map_err(about("cannot read the key file", path))?;
            KeyRing::from_text(&text).map_err(about("key file", path))?
        }
        // Replicas need a file.
        None => KeyRing::new(0, &random_block().map_err(about("cannot make a key for", &address))?),
    };
    let bytes = std::fs::read(picture).map_err(about("cannot read", picture))?;
    let application = Watermark::new(Arc::new(Jpeg::new(&bytes).map_err(about("cannot mark", picture))?));
    UdpService::start(address, 1, &Config::default(), keys, || Ok(application.clone()))
        .map_err(about("cannot listen on", &address))
}

/// An error with what it is about.
fn about<E: Display>(what: &str, of: &(impl Display + ?Sized)) -> impl Fn(E) -> String {
    move |error| format!("{what} {of}: {error}")
}
