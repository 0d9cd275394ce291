//! Pictures over Trickles: valid, and each client's own.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

use jpeg_encoder::{ColorType, Encoder, SamplingFactor};
use std::net::SocketAddr;
use std::sync::Arc;
use tidegate_trickles::keys::KeyRing;
use tidegate_trickles::server::Config;
use tidegate_trickles::udp::{Connection, Options, UdpService};
use tidegate_watermark::{Jpeg, JpegError, Mark, Watermark};
use tokio::io::AsyncReadExt;
use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::bytestream::ZCursor;

const WIDTH: u16 = 701;
const HEIGHT: u16 = 467;

/// A picture with edges and noise, of a size that fills no unit.
fn picture(sampling: SamplingFactor, color: ColorType) -> Vec<u8> {
    let channels = if color == ColorType::Luma { 1 } else { 3 };
    let mut pixels = Vec::new();
    let mut noise = 1_u32;
    for y in 0..u32::from(HEIGHT) {
        for x in 0..u32::from(WIDTH) {
            noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            for channel in 0..channels {
                let wave = (x * (channel + 1) / 3 + y / 2) % 200;
                pixels.push((wave + (noise >> 28)) as u8);
            }
        }
    }
    let mut bytes = Vec::new();
    let mut encoder = Encoder::new(&mut bytes, 90);
    encoder.set_sampling_factor(sampling);
    encoder.encode(&pixels, WIDTH, HEIGHT, color).unwrap();
    bytes
}

fn decode(bytes: &[u8]) -> Vec<u8> {
    let mut decoder = JpegDecoder::new(ZCursor::new(bytes));
    let pixels = decoder.decode().unwrap();
    let info = decoder.info().unwrap();
    assert_eq!((info.width, info.height), (WIDTH, HEIGHT));
    pixels
}

/// Mean and greatest difference.
fn difference(a: &[u8], b: &[u8]) -> (f64, u8) {
    assert_eq!(a.len(), b.len());
    let each = a.iter().zip(b).map(|(a, b)| a.abs_diff(*b));
    (each.clone().map(f64::from).sum::<f64>() / a.len() as f64, each.max().unwrap())
}

fn start(picture: &Arc<Jpeg>) -> UdpService {
    let application = Watermark::new(Arc::clone(picture));
    let keys = KeyRing::new(1, &[7; 16]);
    let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
    UdpService::start(any, 1, &Config::default(), keys, || Ok(application.clone())).unwrap()
}

#[test]
fn a_marked_picture_when_decoded_then_it_looks_the_same_and_is_each_clients_own() {
    for (sampling, color) in [
        (SamplingFactor::F_1_1, ColorType::Rgb),
        (SamplingFactor::F_2_2, ColorType::Rgb),
        (SamplingFactor::F_2_1, ColorType::Rgb),
        (SamplingFactor::F_1_1, ColorType::Luma),
    ] {
        let original = picture(sampling, color);
        let jpeg = Jpeg::new(&original).unwrap();
        let (alice, bob) = (jpeg.marked(&Mark::of(b"alice")), jpeg.marked(&Mark::of(b"bob")));
        assert_ne!(alice, bob);
        let (plain, alice, bob) = (decode(&original), decode(&alice), decode(&bob));
        for marked in [&alice, &bob] {
            let (mean, greatest) = difference(&plain, marked);
            assert!(mean > 0.0 && mean < 2.0, "{sampling:?} {mean}");
            assert!(greatest <= 8, "{sampling:?} {greatest}");
        }
        assert_ne!(alice, bob, "not only coded differently");
    }
}

#[tokio::test]
async fn a_picture_when_fetched_by_two_clients_then_each_has_its_mark_whichever_replica_answers() {
    let jpeg = Arc::new(Jpeg::new(&picture(SamplingFactor::F_2_2, ColorType::Rgb)).unwrap());
    let (first, second) = (start(&jpeg), start(&jpeg));
    let mut fetched = Vec::new();
    for name in [&b"alice"[..], b"bob"] {
        let servers = vec![first.local_addr(), second.local_addr()];
        let mut stream = Connection::new(&Options::to(servers)).unwrap().request(name).unwrap();
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).await.unwrap();
        assert_eq!(bytes, jpeg.marked(&Mark::of(name)), "byte for byte what is coded at once");
        decode(&bytes);
        fetched.push(bytes);
    }
    assert!(fetched[0].len() > 50_000, "many parts: {}", fetched[0].len());
    assert_ne!(fetched[0], fetched[1]);
    // The first replica goes in the middle of a picture.
    let servers = vec![first.local_addr(), second.local_addr()];
    let mut stream = Connection::new(&Options::to(servers)).unwrap().request(b"alice").unwrap();
    let mut bytes = vec![0; 10_000];
    stream.read_exact(&mut bytes).await.unwrap();
    drop(first);
    stream.read_to_end(&mut bytes).await.unwrap();
    assert_eq!(bytes, fetched[0]);
    assert!(second.counters()[0].trickles_packets_sent_total.get() > 0);
}

#[tokio::test]
async fn a_request_without_a_name_when_sent_then_it_is_reset() {
    let jpeg = Arc::new(Jpeg::new(&picture(SamplingFactor::F_1_1, ColorType::Luma)).unwrap());
    let service = start(&jpeg);
    for name in [&b""[..], &[b'x'; 65]] {
        let connection = Connection::new(&Options::to(vec![service.local_addr()])).unwrap();
        let error = connection.request(name).unwrap().read_u8().await.unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    }
}

#[test]
fn pictures_that_cannot_be_marked_when_loaded_then_the_error_says_why() {
    let whole = picture(SamplingFactor::F_1_1, ColorType::Rgb);
    assert_eq!(Jpeg::new(b"GIF89a").err(), Some(JpegError::Malformed));
    assert_eq!(Jpeg::new(&whole[..whole.len() / 2]).err(), Some(JpegError::Truncated));
    for length in (0..700).step_by(7).chain([whole.len() - 200]) {
        assert!(Jpeg::new(&whole[..length]).is_err(), "{length} bytes");
    }
    // Whatever is damaged, it is an error or another picture, never a panic.
    for at in (2..whole.len()).step_by(2003) {
        let mut broken = whole.clone();
        broken[at] ^= 0x55;
        let _ = Jpeg::new(&broken);
    }
    let mut progressive = Vec::new();
    let mut encoder = Encoder::new(&mut progressive, 90);
    encoder.set_progressive(true);
    encoder.encode(&[0; 64 * 3], 8, 8, ColorType::Rgb).unwrap();
    assert_eq!(Jpeg::new(&progressive).err(), Some(JpegError::Unsupported));
}

#[test]
fn what_the_command_line_names_wrong_when_started_then_one_line_says_so() {
    let directory = std::env::temp_dir().join(format!("watermark-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let (good, bad, keys) = (directory.join("a.jpg"), directory.join("b.jpg"), directory.join("keys"));
    std::fs::write(&good, picture(SamplingFactor::F_1_1, ColorType::Rgb)).unwrap();
    std::fs::write(&bad, "no picture").unwrap();
    std::fs::write(&keys, "1 00\n").unwrap();
    let taken = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    let text = |path: &std::path::Path| path.display().to_string();
    let (good, bad, keys, none) = (text(&good), text(&bad), text(&keys), text(&directory.join("none")));
    for (arguments, code, says) in [
        (&[][..], 2, "usage: tidegate-watermark".to_owned()),
        (&[&good[..], "here"], 2, "error: here: expected an address and a port".to_owned()),
        (&[&good, "127.0.0.1:0", &none], 1, format!("error: cannot read the key file {none}: No such file")),
        (&[&good, "127.0.0.1:0", &keys], 1, format!("error: key file {keys}: line 1: expected an epoch")),
        (&[&none], 1, format!("error: cannot read {none}: No such file")),
        (&[&bad, "127.0.0.1:0"], 1, format!("error: cannot mark {bad}: not a JPEG")),
        (&[&good, &taken], 1, format!("error: cannot listen on {taken}: Address already in use")),
    ] {
        let ended =
            std::process::Command::new(env!("CARGO_BIN_EXE_tidegate-watermark")).args(arguments).output();
        let ended = ended.unwrap();
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert_eq!((ended.status.code(), said.lines().count()), (Some(code), 1), "{arguments:?}: {said}");
        assert!(said.starts_with(&says), "{said}");
    }
    std::fs::remove_dir_all(&directory).unwrap();
}
