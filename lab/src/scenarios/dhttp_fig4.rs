//! Attacks with forged sources through servers (DHTTP §IV-C, Figure 4).

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};
use tidegate_dhttp::driver::{ClientOptions, DhttpClient};
use tidegate_dhttp::wire::{Once, Pieces, Request, RequestId};

use super::dhttp::PAPER;
use super::dhttp_site::{Content, DHTTP_PORT, Site, inside, runtime};
use crate::link::Random;
use crate::plot::{Plot, Point, Series};
use crate::table::{Table, thousands};
use crate::topology::Topology;
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

const VICTIM: Ipv4Addr = Ipv4Addr::new(10, 97, 2, 2);
/// Servers that the attack goes through.
const SERVERS: [Ipv4Addr; 3] =
    [Ipv4Addr::new(10, 97, 3, 2), Ipv4Addr::new(10, 97, 3, 3), Ipv4Addr::new(10, 97, 3, 4)];
const FILES: [(&str, usize); 3] = [("short", 300), ("middling", 5_000), ("long", 200_000)];
/// The port that the attack is aimed at.
const VICTIM_TCP_PORT: u16 = 40_000;
/// Bytes that a server may send an address that is not proved, for each that it received (RFC 9000 §8.1).
const MOST_AMPLIFICATION: f64 = 3.0;
/// Datagrams that are sent before the attacker pauses, so that they are counted and not lost in a queue.
const BURST: usize = 50;
const PAUSE: Duration = Duration::from_millis(5);
/// After the last datagram, and longer than a server tries to connect.
const SETTLE: Duration = Duration::from_millis(1500);

pub(super) const SCENARIO: Scenario = Scenario {
    name: "dhttp-fig4",
    paper: &PAPER,
    figure: "Figure 4",
    claim: "Requests with a forged source make servers send the victim at most 3 times their bytes and not one SYN",
    published: "An attacker sends requests that bear the victim's address; the servers open connections to the victim, \
                which drowns in SYNs that come from many places.",
    method: "An attacker on one network sends requests with the address of a victim on another one to three servers on \
             a third, in every form that the protocol has: as in the paper, with an empty, a forged and a malformed \
             token, sent again, asking for pieces; short, middling and long responses; short and long requests. \
             Counters in the kernel count the bytes of IP packets that the attacker sends and the victim receives, and \
             the SYNs that reach the victim. As a control the victim itself then asks for the long response, which \
             must bring it a SYN.",
    run,
};

/// A form of forged requests.
#[derive(Clone, Copy, Debug)]
struct Form {
    name: &'static str,
    token: Option<&'static [u8]>,
    resend: bool,
    pieces: Pieces<'static>,
    /// Bytes of a field that makes the request longer.
    filler_bytes: usize,
}

const PLAIN: Form =
    Form { name: "as in the paper", token: None, resend: false, pieces: Pieces::Unknown, filler_bytes: 0 };
const FORMS: [Form; 8] = [
    PLAIN,
    Form { name: "sent again", resend: true, ..PLAIN },
    Form { name: "without a token", token: Some(b""), ..PLAIN },
    Form { name: "with a forged token", token: Some(b"a forged token of 20"), ..PLAIN },
    Form { name: "with a malformed token", token: Some(b"x"), ..PLAIN },
    Form {
        name: "sent again, pieces taken",
        token: Some(b""),
        resend: true,
        pieces: Pieces::Accepted,
        ..PLAIN
    },
    Form { name: "as long as a short answer needs", token: Some(b""), filler_bytes: 130, ..PLAIN },
    Form { name: "long", token: Some(b""), pieces: Pieces::Accepted, filler_bytes: 900, ..PLAIN },
];

struct Attack {
    form: &'static str,
    file: &'static str,
    requests: u64,
    sent_bytes: u64,
    received_bytes: u64,
    syns: u64,
}

impl Attack {
    fn amplification(&self) -> f64 {
        self.received_bytes as f64 / self.sent_bytes as f64
    }
}

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let requests = lab.choose(1000, 60);
    let directory = tempfile::tempdir().map_err(Error::file("write", &std::env::temp_dir()))?;
    for (name, size_bytes) in FILES {
        let path = directory.path().join(name);
        std::fs::write(&path, vec![b'f'; size_bytes]).map_err(Error::file("write", &path))?;
    }
    let network = network()?;
    let addresses = SERVERS.map(Into::into);
    let _site = Site::start(lab, network.namespace("s")?, &addresses, Content::Files(directory.path()))?;
    let mut attacks = Vec::new();
    for (index, form) in FORMS.iter().enumerate() {
        for (file, _) in FILES {
            let before = Counters::read(&network)?;
            inside(network.namespace("a")?, || send(form, file, requests))?;
            // The last form's last file is waited for longest: SYNs may come late.
            std::thread::sleep(if attacks.len() + 1 == FORMS.len() * FILES.len() {
                SETTLE
            } else {
                PAUSE * 20
            });
            let after = Counters::read(&network)?;
            attacks.push(Attack {
                form: form.name,
                file,
                requests: requests as u64,
                sent_bytes: after.sent_bytes - before.sent_bytes,
                received_bytes: after.received_bytes - before.received_bytes,
                syns: after.syns - before.syns,
            });
        }
        lab.progress(index + 1, FORMS.len() + 1, form.name);
    }
    let before = Counters::read(&network)?;
    let whole = inside(network.namespace("v")?, ask)?;
    let syns = Counters::read(&network)?.syns - before.syns;
    lab.progress(FORMS.len() + 1, FORMS.len() + 1, &format!("the victim asks itself: {syns} SYNs"));
    Ok(outcome(&attacks, if whole { syns } else { 0 }))
}

fn network() -> Result<Topology, Error> {
    let network = Topology::new(&["a", "v", "s", "r"])?;
    for (host, own, at_router, device) in [
        ("a", "10.97.1.2/24", "10.97.1.1/24", "to-a"),
        ("v", "10.97.2.2/24", "10.97.2.1/24", "to-v"),
        ("s", "10.97.3.2/24", "10.97.3.1/24", "to-s"),
    ] {
        network.join((host, "eth0", own), ("r", device, at_router))?;
        network.on(host, &format!("ip route add default via {}", at_router.trim_end_matches("/24")))?;
    }
    for server in &SERVERS[1..] {
        network.on("s", &format!("ip address add {server}/24 dev eth0"))?;
    }
    network.on("r", "nft add table ip lab")?;
    for counter in ["sent", "received", "syns"] {
        network.on("r", &format!("nft add counter ip lab {counter}"))?;
    }
    network.on("r", "nft add chain ip lab way { type filter hook forward priority filter; }")?;
    network.on("r", "nft add rule ip lab way iifname to-a counter name sent")?;
    network.on("r", "nft add rule ip lab way oifname to-v counter name received")?;
    network.on("r", "nft add rule ip lab way oifname to-v tcp flags & (syn|ack) == syn counter name syns")?;
    Ok(network)
}

/// What the router has counted.
struct Counters {
    sent_bytes: u64,
    received_bytes: u64,
    syns: u64,
}

impl Counters {
    fn read(network: &Topology) -> Result<Self, Error> {
        let listed = network.on("r", "nft -j list counters table ip lab")?;
        let unknown = || Error::Link("nft lists no counters".to_owned());
        let listed: serde_json::Value = serde_json::from_str(&listed).map_err(|_| unknown())?;
        let value = |name: &str, what: &str| {
            let items = listed["nftables"].as_array()?;
            let counter = items.iter().find(|item| item["counter"]["name"] == name)?;
            counter["counter"][what].as_u64()
        };
        Ok(Self {
            sent_bytes: value("sent", "bytes").ok_or_else(unknown)?,
            received_bytes: value("received", "bytes").ok_or_else(unknown)?,
            syns: value("syns", "packets").ok_or_else(unknown)?,
        })
    }
}

/// Sends requests that bear the victim's address.
fn send(form: &Form, file: &str, requests: usize) -> Result<(), Error> {
    let failed = |error: std::io::Error| Error::Link(format!("the attack failed: {error}"));
    let mut random = Random::new(4);
    // No address of this host: only a transparent socket may bind to it.
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP)).map_err(failed)?;
    socket.set_ip_transparent_v4(true).map_err(failed)?;
    socket.bind(&SocketAddrV4::new(VICTIM, 40_001).into()).map_err(failed)?;
    let mut datagram = Vec::new();
    for number in 0..requests {
        let server = SERVERS[number % SERVERS.len()];
        let filler = "f".repeat(form.filler_bytes);
        let http = format!("GET /{file} HTTP/1.1\r\nHost: {server}\r\nX-Filler: {filler}\r\n\r\n");
        datagram.clear();
        let request = Request {
            id: RequestId(random.draw().to_be_bytes()),
            other_port: VICTIM_TCP_PORT,
            resend: form.resend,
            token: form.token,
            pieces: form.pieces,
            once: Once::No,
            http: http.as_bytes(),
        };
        request.write(&mut datagram);
        socket.send_to(&datagram, &SocketAddrV4::new(server, DHTTP_PORT).into()).map_err(failed)?;
        if number % BURST == BURST - 1 {
            std::thread::sleep(PAUSE);
        }
    }
    Ok(())
}

/// Whether the victim gets what it asks for itself.
fn ask() -> Result<bool, Error> {
    let failed = |error| Error::Link(format!("no DHTTP client: {error}"));
    runtime().map_err(failed)?.block_on(async {
        let client = DhttpClient::new(ClientOptions::default()).map_err(failed)?;
        let (name, size_bytes) = FILES[2];
        let server = SocketAddr::new(SERVERS[0].into(), DHTTP_PORT);
        let fetched = client.get(&format!("dhttp://{server}/{name}")).await;
        let fetched =
            fetched.map_err(|error| Error::Link(format!("the victim's own request failed: {error}")))?;
        Ok(fetched.body.collect(1 << 20).await.is_ok_and(|body| body.len() == size_bytes))
    })
}

fn outcome(attacks: &[Attack], control_syns: u64) -> Outcome {
    let table = table(attacks);
    Outcome {
        raw: table.clone(),
        summary: table,
        plots: vec![(None, plot(attacks))],
        verdict: verdict(attacks, control_syns),
        servers: Vec::new(),
    }
}

fn verdict(attacks: &[Attack], control_syns: u64) -> Verdict {
    let worst = attacks.iter().max_by(|a, b| a.amplification().total_cmp(&b.amplification()));
    let requests: u64 = attacks.iter().map(|attack| attack.requests).sum();
    let syns: u64 = attacks.iter().map(|attack| attack.syns).sum();
    let answered = attacks.iter().filter(|attack| attack.received_bytes > 0).count();
    let checks = [
        Check {
            what: format!("{MOST_AMPLIFICATION} to the greatest amplification in bytes"),
            ratio: worst.map_or(f64::NAN, |worst| MOST_AMPLIFICATION / worst.amplification()),
            at_least: 1.0,
        },
        Check {
            what: "forged requests that bring the victim no SYN, as a share".to_owned(),
            ratio: 1.0 - syns as f64 / requests as f64,
            at_least: 1.0,
        },
        // Otherwise nothing was shown: neither servers that answer nor a counter that counts.
        Check {
            what: "SYNs when the victim itself asks".to_owned(),
            ratio: control_syns as f64,
            at_least: 1.0,
        },
        Check {
            what: "forms of attack that servers answered at all, as a share".to_owned(),
            ratio: answered as f64 / attacks.len() as f64,
            at_least: 0.5,
        },
    ];
    let note = worst.map_or(String::new(), |worst| {
        format!(
            "{} forged requests, {syns} SYNs; greatest amplification {:.2}, {} for the {} file",
            thousands(requests),
            worst.amplification(),
            worst.form,
            worst.file
        )
    });
    Verdict::of(&checks).noting(&note)
}

fn plot(attacks: &[Attack]) -> Plot {
    let series = FILES.map(|(file, size_bytes)| Series {
        name: format!("{} bytes", thousands(size_bytes as u64)),
        points: attacks
            .iter()
            .filter(|attack| attack.file == file)
            .enumerate()
            .map(|(form, attack)| Point::exact(form as f64 + 1.0, attack.amplification()))
            .collect(),
    });
    Plot {
        title: "Bytes that reach the victim for each that the attacker sends".to_owned(),
        x: "form of the request, in the order of the table".to_owned(),
        x_log: false,
        y: "amplification".to_owned(),
        series: series.into(),
    }
}

fn table(attacks: &[Attack]) -> Table {
    let mut table = Table::new([
        "requests",
        "file",
        "sent",
        "bytes sent",
        "bytes at the victim",
        "amplification",
        "SYNs",
    ]);
    for attack in attacks {
        table.row([
            attack.form.to_owned(),
            attack.file.to_owned(),
            attack.requests.to_string(),
            attack.sent_bytes.to_string(),
            attack.received_bytes.to_string(),
            format!("{:.2}", attack.amplification()),
            attack.syns.to_string(),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attack(received_bytes: u64, syns: u64) -> Vec<Attack> {
        vec![Attack { form: "x", file: "short", requests: 10, sent_bytes: 100, received_bytes, syns }]
    }

    #[test]
    fn too_many_bytes_a_syn_and_a_control_without_one_break_the_claim() {
        assert!(outcome(&attack(300, 0), 1).verdict.holds);
        assert!(!outcome(&attack(301, 0), 1).verdict.holds);
        assert!(!outcome(&attack(100, 1), 1).verdict.holds);
        assert!(!outcome(&attack(100, 0), 0).verdict.holds, "the counter may count nothing");
        assert!(!outcome(&attack(0, 0), 1).verdict.holds, "the servers may not have been reached");
    }
}
