//! Requests in the SYN (DHTTP §VI-B3, Figure 14): TCP Fast Open is what T/TCP has become.

use super::dhttp::PAPER;
use super::dhttp_bound::{Contender, Crowd, Goals, METHOD, Server, checks, measure, plots, table};
use super::dhttp_users::Protocol;
use crate::verdict::Verdict;
use crate::{Error, Lab, Outcome, Scenario};

const CONTENDERS: [Contender; 3] = [
    Contender { name: "DHTTP", server: Server::Tidegate, protocol: Protocol::Dhttp },
    Contender {
        name: "nginx, TCP Fast Open",
        server: Server::Nginx { keep_alive_s: 15, fast_open: true },
        protocol: Protocol::FastOpen,
    },
    Contender {
        name: "nginx, altruistic clients",
        server: Server::Nginx { keep_alive_s: 15, fast_open: false },
        protocol: Protocol::Http { connections: 1, altruistic: true },
    },
];

pub(super) const SCENARIO: Scenario = Scenario {
    name: "dhttp-fig14",
    paper: &PAPER,
    figure: "Figure 14",
    claim: "A full server has at least 20 % more throughput by DHTTP than by TCP Fast Open with all requests of a page \
            in the SYN and clients that close early",
    published: "DHTTP has much better throughput than Apache with T/TCP, which is no better than Apache with TCP and \
                altruistic clients.",
    method: METHOD,
    run,
};

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let crowds: &[Crowd] =
        lab.choose(&[(200, 0.7, 1.0), (600, 1.5, 1.5), (1000, 2.3, 2.0)], &[(50, 0.2, 0.4)]);
    let (runs, servers) = measure(lab, &CONTENDERS, crowds)?;
    Ok(Outcome {
        raw: table(&runs),
        summary: table(&runs),
        plots: plots(&runs, &CONTENDERS),
        verdict: Verdict::of(&checks(&runs, &Goals { throughput: 1.2, latency: None })),
        servers,
    })
}
