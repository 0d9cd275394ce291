//! Packets of one connection spread over servers (Trickles §6.1, Figure 17).

use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use tidegate_trickles::client::{Client, Config, Read};

use super::trickles::{Bench, PAPER, RATE, ROUND_TRIP, mbit_per_s, plot};
use crate::link::{Profile, SERVER, Side, client_address};
use crate::plot::Point;
use crate::table::Table;
use crate::transfer::{Replica, byte_at, request};
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "trickles-fig17",
    paper: &PAPER,
    figure: "Figure 17",
    claim: "Packets of one transfer, sent to 2 to 8 servers in turn, are served as evenly as Jain's index of 0.999, \
            and every byte is right",
    published: "Throughput of a client whose packets are spread over several servers packet by packet: what one server \
                gives.",
    method: "A 100 Mbit/s link with 10 ms round trip to servers that share nothing but keys and files. The client \
             sends each request to the next server; the answers are counted by the server that sent them. One transfer \
             for each number of servers.",
    run,
};

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let counts = lab.choose(vec![1_u16, 2, 3, 4, 6, 8], vec![2, 4]);
    let bytes = lab.choose(20_000_000, 2_000_000);
    let most = counts.iter().copied().max().unwrap_or(1);
    let bench = Bench::new(lab, &[bytes], vec![Profile::clean(RATE, ROUND_TRIP)])?;
    let others = (1..most)
        .map(|n| {
            Replica::start(lab, &bench.site, SERVER, n, |program| bench.hosts.command(Side::Server, program))
        })
        .collect::<Result<Vec<_>, _>>()?;
    let mut raw = Table::new(["servers", "server", "packets"]);
    let mut summary = Table::new(["servers", "Mbit/s", "packets of each", "Jain's index"]);
    let (mut points, mut checks) = (Vec::new(), Vec::new());
    for (step, &count) in counts.iter().enumerate() {
        lab.progress(step + 1, counts.len(), &format!("{count} servers"));
        let servers: Vec<SocketAddr> =
            std::iter::once(&bench.server).chain(&others).take(count.into()).map(Replica::address).collect();
        let (packets, time) = bench.hosts.run(Side::Client, || spray(&servers, bytes))?;
        for (server, packets) in packets.iter().enumerate() {
            raw.row([count.to_string(), (server + 1).to_string(), packets.to_string()]);
        }
        let rate = mbit_per_s(bytes, time);
        let index = jain(&packets);
        let range = format!("{}–{}", packets.iter().min().unwrap_or(&0), packets.iter().max().unwrap_or(&0));
        summary.row([count.to_string(), format!("{rate:.1}"), range, format!("{index:.5}")]);
        points.push(Point::exact(count.into(), rate));
        if count > 1 {
            checks.push(Check {
                what: format!("Jain's index of {count} servers"),
                ratio: index,
                at_least: 0.999,
            });
        }
    }
    let series = vec![("Trickles, packets in turn".to_owned(), points)];
    Ok(Outcome {
        raw,
        summary,
        plots: vec![(None, plot("One transfer from several servers", ("servers", false), "Mbit/s", series))],
        verdict: Verdict::of(&checks),
        servers: Vec::new(),
    })
}

/// Jain, Chiu, Hawe (1984): 1 where all get the same, 1/n where one gets all.
fn jain(packets: &[u64]) -> f64 {
    let (sum, squares) = packets.iter().fold((0.0, 0.0), |(sum, squares), packets| {
        let packets = *packets as f64;
        (sum + packets, squares + packets * packets)
    });
    sum * sum / (packets.len() as f64 * squares)
}

/// Fetches a file with each request sent to the next server; answers of each, and how long it took.
fn spray(servers: &[SocketAddr], bytes: u64) -> Result<(Vec<u64>, Duration), Error> {
    let socket = UdpSocket::bind((client_address(0), 0)).map_err(Error::Load)?;
    let began = Instant::now();
    let mut client = Client::new(Config::default(), &[3; 16], began);
    let failed = |error: tidegate_trickles::client::ClientError| Error::Server(error.to_string());
    let number = client.request(request(bytes, true).as_bytes(), began).map_err(failed)?;
    let mut packets = vec![0; servers.len()];
    let (mut turn, mut head, mut offset) = (0, Vec::new(), 0);
    let mut buffer = vec![0; 1 << 16];
    loop {
        while let Some(datagram) = client.poll_transmit(Instant::now()) {
            socket.send_to(&datagram, servers[turn % servers.len()]).map_err(Error::Load)?;
            turn += 1;
        }
        let timer = client.poll_timeout().map(|at| at.saturating_duration_since(Instant::now()));
        let wait = timer.unwrap_or(Duration::from_secs(1)).max(Duration::from_micros(100));
        socket.set_read_timeout(Some(wait)).map_err(Error::Load)?;
        match socket.recv_from(&mut buffer) {
            Ok((length, from)) => {
                if let Some(index) = servers.iter().position(|server| *server == from) {
                    packets[index] += 1;
                }
                // A late copy is nothing to the client.
                let _ = client.handle_datagram(&buffer[..length], Instant::now());
            }
            Err(_) => client.handle_timeout(Instant::now()),
        }
        loop {
            match client.read(number, &mut buffer).map_err(failed)? {
                Read::Data(count) => take(&buffer[..count], &mut head, &mut offset)?,
                Read::Pending => break,
                Read::End if offset == bytes => return Ok((packets, began.elapsed())),
                Read::End => return Err(Error::Server(format!("{offset} of {bytes} bytes arrived"))),
                Read::Reset(code) => return Err(Error::Server(format!("a server refused with code {code}"))),
            }
        }
    }
}

/// Skips the response's head and checks its content.
fn take(piece: &[u8], head: &mut Vec<u8>, offset: &mut u64) -> Result<(), Error> {
    let mut content = piece;
    if !head.ends_with(b"\r\n\r\n") {
        let known = head.len();
        head.extend_from_slice(piece);
        let Some(at) = memchr::memmem::find(head, b"\r\n\r\n") else { return Ok(()) };
        head.truncate(at + 4);
        content = &piece[at + 4 - known..];
    }
    let wrong = (*offset..).zip(content).find(|(at, byte)| byte_at(*at) != **byte);
    if let Some((at, _)) = wrong {
        return Err(Error::Server(format!("byte {at} arrived wrong")));
    }
    *offset += content.len() as u64;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_even_share_has_the_index_1_and_one_for_all_the_inverse_of_their_number() {
        assert!((jain(&[5, 5, 5]) - 1.0).abs() < 1e-12);
        assert!((jain(&[9, 0, 0]) - 1.0 / 3.0).abs() < 1e-12);
    }

    #[test]
    fn a_response_in_any_pieces_is_taken_apart() {
        let response: Vec<u8> =
            b"HTTP/1.1 200 OK\r\n\r\n".iter().copied().chain((0..50).map(byte_at)).collect();
        for piece in 1..response.len() {
            let (mut head, mut offset) = (Vec::new(), 0);
            response.chunks(piece).for_each(|piece| take(piece, &mut head, &mut offset).unwrap());
            assert_eq!(offset, 50, "pieces of {piece}");
        }
    }
}
