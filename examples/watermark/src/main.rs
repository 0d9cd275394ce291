//! `tidegate-watermark PICTURE.jpg [ADDRESS:PORT [KEYFILE]]`: serves the picture, marked for each client by the name it sends.

use std::sync::Arc;
use tidegate_trickles::keys::KeyRing;
use tidegate_trickles::server::Config;
use tidegate_trickles::udp::{UdpService, random_block};
use tidegate_watermark::{Jpeg, Watermark};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let picture = arguments.next().ok_or("usage: tidegate-watermark PICTURE.jpg [ADDRESS:PORT [KEYFILE]]")?;
    let address = arguments.next().unwrap_or_else(|| "127.0.0.1:4000".to_owned()).parse()?;
    let keys = match arguments.next() {
        Some(path) => KeyRing::from_text(&std::fs::read_to_string(path)?)?,
        // Replicas need a file.
        None => KeyRing::new(0, &random_block()?),
    };
    let application = Watermark::new(Arc::new(Jpeg::new(&std::fs::read(picture)?)?));
    let service = UdpService::start(address, 1, &Config::default(), keys, || Ok(application.clone()))?;
    println!("listening on {}", service.local_addr());
    loop {
        std::thread::park();
    }
}
