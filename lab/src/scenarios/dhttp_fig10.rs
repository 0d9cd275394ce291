//! A server that is full (DHTTP §VI-B1, Figures 10 to 12).

use super::dhttp::PAPER;
use super::dhttp_bound::{Contender, Crowd, Goals, METHOD, Server, checks, measure, plots, table};
use super::dhttp_users::Protocol;
use crate::verdict::Verdict;
use crate::{Error, Lab, Outcome, Scenario};

const SELFISH: Protocol = Protocol::Http { connections: 3, altruistic: false };
const ALTRUISTIC: Protocol = Protocol::Http { connections: 3, altruistic: true };

const CONTENDERS: [Contender; 9] = [
    Contender { name: "DHTTP", server: Server::Tidegate, protocol: Protocol::Dhttp },
    nginx("nginx, 0 s", 0, SELFISH),
    nginx("nginx, 1 s", 1, SELFISH),
    nginx("nginx, 15 s", 15, SELFISH),
    nginx("nginx, altruistic clients", 15, ALTRUISTIC),
    apache("Apache, 0 s", 0, SELFISH),
    apache("Apache, 1 s", 1, SELFISH),
    apache("Apache, 15 s", 15, SELFISH),
    apache("Apache, altruistic clients", 15, ALTRUISTIC),
];

const fn nginx(name: &'static str, keep_alive_s: u32, protocol: Protocol) -> Contender {
    Contender { name, server: Server::Nginx { keep_alive_s, fast_open: false }, protocol }
}

const fn apache(name: &'static str, keep_alive_s: u32, protocol: Protocol) -> Contender {
    Contender { name, server: Server::Apache { keep_alive_s }, protocol }
}

pub(super) const SCENARIO: Scenario = Scenario {
    name: "dhttp-fig10",
    paper: &PAPER,
    figure: "Figures 10 to 12",
    claim: "With 1,000 users a full server has at least 20 % more throughput and half the latency by DHTTP than the \
            best of nginx and Apache with keep-alive of 0, 1 or 15 s or altruistic clients",
    published: "With up to 1,000 users DHTTP has around 20 % more throughput and half the latency of Apache with \
                altruistic clients, which close connections when a page is there, and they are far better than Apache \
                with any keep-alive.",
    method: METHOD,
    run,
};

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let crowds: &[Crowd] = lab.choose(&[(200, 0.5, 0.6), (1000, 2.0, 1.5)], &[(50, 0.2, 0.4)]);
    let (runs, servers) = measure(lab, &CONTENDERS, crowds)?;
    Ok(Outcome {
        raw: table(&runs),
        summary: table(&runs),
        plots: plots(&runs, &CONTENDERS),
        verdict: Verdict::of(&checks(&runs, &Goals { throughput: 1.2, latency: Some(2.0) })),
        servers,
    })
}
