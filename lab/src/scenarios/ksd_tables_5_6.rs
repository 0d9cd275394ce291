//! What each mechanism costs a packet (§4.6, Tables 5 and 6).

use std::net::Ipv4Addr;

use tidegate_core::IpPrefix;
use tidegate_gate::{Gate, GateError, Mechanism, Options};
use tidegate_policy::{Action, ConnectionRule, CookiePattern, Profile, RequestRule, RuleSet};

use super::ksd::PAPER;
use crate::overload::{Established, Template, Testbed, by_source, by_url, only, rules};
use crate::plot::{Plot, Point, Series};
use crate::stats::Spread;
use crate::table::Table;
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

const RULES: [u32; 3] = [1, 3, 4000];
const SYN_NS: f64 = 150.0;
const URL_NS: f64 = 250.0;
const COOKIE_NS: f64 = 800.0;
/// All cases one after the other, so often: what disturbs the machine for a while does not hit one case alone.
const PASSES: usize = 5;
/// So few requests per second that all but the first are refused.
const RARE: f64 = 0.001;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "ksd-tables-5-6",
    paper: &PAPER,
    figure: "Tables 5 and 6",
    claim: "With 1, 3 and 4,000 rules SYN policing costs at most 0.15 µs a packet and matching a URL at most 0.25 \
            µs; matching a cookie costs at most 0.8 µs",
    published: "SYN policing costs 7.9 µs a connection with three rules, classification and priority 4.8 µs more, \
                parsing a URL 2.2 to 5.0 µs by its length.",
    method: "The kernel runs the programs on a frame (BPF_PROG_TEST_RUN) many times and gives the mean of a run, its \
             own cost included; so the first rows are what every packet of the kind costs. The \
             cases take turns five times, and the median of all runs counts. Every rule has a token bucket that \
             never runs out, but for requests that are refused: theirs is empty. Requests are the next segment of a \
             connection of the kernel's TCP: before one costs tokens, its socket is looked up. For each request that \
             is refused that is done anew, as for the first of a connection. A request policed, whose frame comes \
             again and again, is a retransmission four times of five, which takes no token, and the fifth time in the \
             window of one that fitted. The request has three cookies, of which one is that of a rule.",
    run,
};

struct Cost {
    what: &'static str,
    rules: u32,
    ns: Spread,
    at_most: Option<f64>,
}

/// What is measured: the cost of `frame` under `set`.
struct Case {
    what: &'static str,
    rules: u32,
    set: RuleSet,
    template: Template,
    at_most: Option<f64>,
}

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let bed = Testbed::new()?;
    let cases = cases()?;
    let connection = Established::open(&bed, Ipv4Addr::new(10, 77, 9, 9))?;
    // The programs look for the connection where the thread that runs them is.
    let taken = bed.on_server(|| measure(lab, &cases, &connection))??;
    let costs: Option<Vec<Cost>> = cases
        .iter()
        .zip(taken)
        .map(|(case, taken)| {
            let ns = Spread::of(taken)?;
            Some(Cost { what: case.what, rules: case.rules, ns, at_most: case.at_most })
        })
        .collect();
    Ok(outcome(&costs.ok_or(Error::Nothing("the kernel"))?))
}

/// Nanoseconds a run, of each case.
fn measure(lab: &Lab, cases: &[Case], connection: &Established) -> Result<Vec<Vec<f64>>, Error> {
    let (passes, rounds, repeat) = (lab.choose(PASSES, 1), lab.choose(5, 2), lab.choose(200_000, 1000));
    let gate = Gate::load(&rules(Vec::new(), Vec::new()), &Options::default()).map_err(failed)?;
    let mut taken: Vec<Vec<f64>> = vec![Vec::new(); cases.len()];
    for pass in 0..passes {
        for (index, (case, taken)) in cases.iter().zip(&mut taken).enumerate() {
            gate.replace_rules(&case.set).map_err(failed)?;
            let frame = connection.frame(case.template);
            let is_request = matches!(case.template, Template::Browser(..));
            let mechanism = if is_request { Mechanism::Tc } else { Mechanism::Xdp };
            for _ in 0..rounds {
                let trial = gate.try_frame(mechanism, &frame, repeat).map_err(failed)?;
                taken.push(trial.mean.as_nanos() as f64);
            }
            let ns = Spread::of(taken.clone()).ok_or(Error::Nothing("the kernel"))?;
            let (done, all) = (pass * cases.len() + index + 1, passes * cases.len());
            lab.progress(done, all, &format!("{}, {} rules: {} ns", case.what, case.rules, ns.text(0)));
        }
        strays(&gate)?;
    }
    Ok(taken)
}

/// A frame that fitted no connection would have cost less than a request does.
fn strays(gate: &Gate) -> Result<(), Error> {
    let totals = gate.show().map_err(failed)?.totals;
    match totals.iter().find(|total| total.name == "gate_requests_stray_total") {
        Some(total) if total.value == 0 => Ok(()),
        _ => Err(Error::Testbed("the requests that were measured fitted no connection".into())),
    }
}

fn cases() -> Result<Vec<Case>, Error> {
    let request = Template::Browser("/cgi-bin/search?q=x", "tier=gold");
    let none = || rules(Vec::new(), Vec::new());
    let mut cases = Vec::new();
    let mut add = |what, rules, set, template, at_most| {
        cases.push(Case { what, rules, set, template, at_most });
    };
    add("a segment that is no SYN", 0, none(), Template::Acknowledgement, None);
    add("a SYN", 0, none(), Template::Syn, None);
    for count in RULES {
        add("a SYN policed", count, rules(sources(count), Vec::new()), Template::Syn, Some(SYN_NS));
    }
    add("a request", 0, none(), request, None);
    for count in RULES {
        let policed = rules(Vec::new(), paths(count, plenty())?);
        let refused = rules(Vec::new(), paths(count, only(RARE, 1))?);
        add("a request policed by URL", count, policed, request, Some(URL_NS));
        add("a request refused by URL", count, refused, request, Some(URL_NS));
    }
    for count in RULES {
        let set = rules(Vec::new(), cookies(count)?);
        add("a request policed by cookie", count, set, request, Some(COOKIE_NS));
    }
    Ok(cases)
}

fn failed(error: GateError) -> Error {
    Error::Testbed(error.to_string())
}

/// Never runs out.
fn plenty() -> Option<Profile> {
    only(f64::from(Profile::MAX_RATE_PER_S), Profile::MAX_BURST)
}

/// The first about the frame's source, the others about other hosts.
fn sources(count: u32) -> Vec<ConnectionRule> {
    let one = |index: u32| {
        let host = Ipv4Addr::from(0x0a4d_0909_u32.wrapping_add(index << 4));
        ConnectionRule { source: IpPrefix::new(host.into(), 32).ok(), ..by_source(9, plenty(), None) }
    };
    (0..count).map(one).collect()
}

fn paths(count: u32, limit: Option<Profile>) -> Result<Vec<RequestRule>, Error> {
    let others = (1..count).map(|index| format!("/path-{index}/*"));
    std::iter::once("/cgi-bin/*".to_owned())
        .chain(others)
        .map(|path| by_url(&path, limit, None, Some(Action::Drop)))
        .collect()
}

fn cookies(count: u32) -> Result<Vec<RequestRule>, Error> {
    let names = (1..count).map(|index| format!("t{index}")).chain(["gold".to_owned()]);
    names
        .map(|value| {
            let cookie =
                CookiePattern::new("tier", &value).map_err(|error| Error::Testbed(error.to_string()))?;
            Ok(RequestRule { cookie: Some(cookie), ..by_url("*", plenty(), None, Some(Action::Drop))? })
        })
        .collect()
}

fn outcome(costs: &[Cost]) -> Outcome {
    let mut raw = Table::new(["packet", "rules", "median_ns", "least_ns", "most_ns"]);
    let mut summary = Table::new(["packet", "rules", "ns a packet", "at most"]);
    for cost in costs {
        let Spread { median, least, greatest } = cost.ns;
        raw.row([
            cost.what.into(),
            cost.rules.to_string(),
            median.to_string(),
            least.to_string(),
            greatest.to_string(),
        ]);
        summary.row([
            cost.what.into(),
            cost.rules.to_string(),
            cost.ns.text(0),
            cost.at_most.map_or(String::new(), |ns| format!("{ns:.0}")),
        ]);
    }
    let check = |cost: &Cost| {
        Some(Check {
            what: format!(
                "bound to the cost of {}, {} rules ({:.0} ns)",
                cost.what, cost.rules, cost.ns.median
            ),
            ratio: cost.at_most? / cost.ns.median,
            at_least: 1.0,
        })
    };
    let checks: Vec<Check> = costs.iter().filter_map(check).collect();
    let mut series: Vec<Series> = Vec::new();
    for cost in costs.iter().filter(|cost| cost.rules > 0) {
        let point = Point { x: f64::from(cost.rules), y: cost.ns };
        match series.iter_mut().find(|series| series.name == cost.what) {
            Some(series) => series.points.push(point),
            None => series.push(Series { name: cost.what.into(), points: vec![point] }),
        }
    }
    let plot = Plot {
        title: "Cost of each mechanism".into(),
        x: "rules".into(),
        x_log: true,
        y: "ns a packet".into(),
        series,
    };
    Outcome { raw, summary, plots: vec![(None, plot)], verdict: Verdict::of(&checks), servers: Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_mechanism_beyond_its_bound_breaks_the_claim() {
        let cost = |ns: f64| Cost {
            what: "a SYN policed",
            rules: 3,
            ns: Spread { median: ns, least: ns, greatest: ns },
            at_most: Some(SYN_NS),
        };
        assert!(outcome(&[cost(100.0), cost(150.0)]).verdict.holds);
        assert!(!outcome(&[cost(100.0), cost(151.0)]).verdict.holds);
    }

    #[test]
    fn rules_are_as_many_as_wanted_and_the_frames_is_among_them() {
        assert_eq!(
            (sources(4000).len(), paths(3, plenty()).unwrap().len(), cookies(32).unwrap().len()),
            (4000, 3, 32)
        );
        assert_eq!(cookies(3).unwrap()[2].to_string().split(" rate").next(), Some("* cookie tier=gold"));
    }
}
