//! Control in the kernel against the same control in nginx and HAProxy (§5, Figures 12 and 13).

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::ksd::{PAPER, client, text, time};
use crate::overload::{
    Asked, Clients, Flood, Greedy, Group, Guard, PORT, Pace, Program, SERVER, Sent, Template, Testbed,
    by_source, by_url, load, only, rules,
};
use crate::plot::{Plot, Point, Series};
use crate::table::Table;
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

const OFFERED: [f64; 3] = [5_000.0, 20_000.0, 50_000.0];
const QUICK: [f64; 1] = [5_000.0];
/// What good clients ask for, together.
const GOOD: f64 = 2000.0;
/// What greedy clients may have (the paper's 10 requests/s with a burst of 2).
const LIMIT: (f64, u32) = (10.0, 2);
/// How long after the last measurement a flood may go on at most.
const AT_MOST: Duration = Duration::from_secs(30);

pub(super) const SCENARIO: Scenario = Scenario {
    name: "ksd-fig12",
    paper: &PAPER,
    figure: "Figures 12 and 13",
    claim: "At 50,000 violating requests/s good clients keep at least 95 % of their throughput with the gate",
    published: "Good clients have 392 connections/s at 20 violating requests/s; at 650 they have 374 with SYN \
                policing, 261 with URL control in the kernel and 75 with an Apache module.",
    method: "Good clients ask nginx for 8 KB 2,000 times a second whatever comes back, and give up after a second. \
             Violators may have 10 requests/s. With the gate they are packets that end in the kernel: SYNs, or \
             segments with a request, from raw sockets. For the peers they are requests on connections of the kernel's \
             TCP, many at once on each, because before a program in user space nothing else costs anything: nginx with \
             limit_req and limit_conn, HAProxy with a stick table before nginx. Where a peer does not take what is \
             offered the rate that it takes is given. The senders share a core with the good clients.",
    run,
};

/// Who controls.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Control {
    Syn,
    Url,
    Nginx,
    HaProxy,
}

const CONTROLS: [Control; 4] = [Control::Syn, Control::Url, Control::Nginx, Control::HaProxy];

impl Control {
    fn label(self) -> &'static str {
        match self {
            Self::Syn => "gate, SYN policing",
            Self::Url => "gate, URL control",
            Self::Nginx => "nginx limit_req",
            Self::HaProxy => "HAProxy stick table",
        }
    }

    fn is_ours(self) -> bool {
        matches!(self, Self::Syn | Self::Url)
    }
}

struct Row {
    control: Control,
    offered: f64,
    sent: f64,
    good: Asked,
    alone: f64,
}

impl Row {
    /// The part of their throughput that good clients keep.
    fn kept(&self) -> f64 {
        self.good.rate() / self.alone
    }
}

fn run(lab: &Lab) -> Result<Outcome, Error> {
    tidegate_bench::peers::install("nginx", "nginx-light").map_err(Error::Server)?;
    tidegate_bench::peers::install("haproxy", "haproxy").map_err(Error::Server)?;
    let bed = Testbed::new()?;
    let time = time(lab, 500, 2500, 400);
    let offered = lab.choose(&OFFERED[..], &QUICK[..]);
    let folder = tempfile::tempdir().map_err(Error::file("write", &std::env::temp_dir()))?;
    let mut rows = Vec::new();
    for control in CONTROLS {
        let servers = start(&bed, folder.path(), control)?;
        let _guard = control.is_ours().then(|| guard(&bed, control)).transpose()?;
        let alone = measure(&bed, control, 0.0, time)?.0.rate();
        for per_s in offered {
            let (good, sent) = measure(&bed, control, *per_s, time)?;
            let row = Row { control, offered: *per_s, sent: sent.rate(), good, alone };
            let what = format!(
                "{} at {per_s:.0}/s (sent {:.0}/s): good {:.0}/s of {alone:.0}/s, {:.1} ms",
                control.label(),
                row.sent,
                row.good.rate(),
                row.good.median_ms()
            );
            rows.push(row);
            lab.progress(rows.len(), CONTROLS.len() * offered.len(), &what);
        }
        drop(servers);
    }
    let servers = [("nginx", "-v"), ("haproxy", "-v")]
        .into_iter()
        .filter_map(|(name, flag)| crate::server::version(name, flag));
    outcome(&rows, servers.collect())
}

fn guard(bed: &Testbed, control: Control) -> Result<Guard, Error> {
    let limit = only(LIMIT.0, LIMIT.1);
    let set = match control {
        Control::Syn => rules(vec![by_source(9, limit, None)], Vec::new()),
        _ => rules(Vec::new(), vec![by_url("/cgi-bin/*", limit, None, None)?]),
    };
    Guard::attach(bed, &set)
}

/// Good clients beside violators.
fn measure(bed: &Testbed, control: Control, per_s: f64, time: Clients) -> Result<(Asked, Sent), Error> {
    let patience = Duration::from_secs(1);
    let good =
        Group { from: client(1, 1), clients: 100, path: "/object", pace: Pace::PerSecond(GOOD), patience };
    let end = AtomicBool::new(false);
    let path = "/cgi-bin/search";
    let flood = |template| Flood { template, first: client(9, 1), sources: 10, per_s };
    std::thread::scope(|scope| {
        let violators = scope.spawn(|| match control {
            _ if per_s == 0.0 => Ok(Sent::default()),
            Control::Syn => flood(Template::Syn).run(bed, &end, AT_MOST),
            Control::Url => flood(Template::Request(path)).run(bed, &end, AT_MOST),
            Control::Nginx | Control::HaProxy => {
                Greedy { first: client(9, 1), connections: 10, path, per_s }.run(bed, &end, AT_MOST)
            }
        });
        let asked = load(bed, bed.address(), &[good], time);
        end.store(true, Ordering::Relaxed);
        let sent = violators.join().map_err(|_| Error::Testbed("a sender panicked".into()))??;
        Ok((asked?.remove(0), sent))
    })
}

/// nginx alone or, for HAProxy, behind it.
fn start(bed: &Testbed, folder: &Path, control: Control) -> Result<Vec<Program>, Error> {
    std::fs::write(folder.join("object"), vec![b'a'; 8192]).map_err(Error::file("write", folder))?;
    std::fs::create_dir_all(folder.join("cgi-bin")).map_err(Error::file("write", folder))?;
    std::fs::write(folder.join("cgi-bin/search"), vec![b'a'; 8192]).map_err(Error::file("write", folder))?;
    let write = |name: &str, text: String| {
        let path = folder.join(name);
        std::fs::write(&path, text).map_err(Error::file("write", &path)).map(|()| path)
    };
    let behind = control == Control::HaProxy;
    let (zones, limit) = match control {
        Control::Nginx => (
            format!(
                "limit_req_zone $binary_remote_addr zone=r:10m rate={}r/s; \
                 limit_conn_zone $binary_remote_addr zone=c:10m;",
                LIMIT.0
            ),
            format!("limit_req zone=r burst={} nodelay; limit_conn c 20;", LIMIT.1),
        ),
        _ => Default::default(),
    };
    let at = if behind { format!("127.0.0.1:{PORT}") } else { format!("{SERVER}:{PORT}") };
    let root = folder.display();
    let nginx = format!(
        "daemon off; master_process off; worker_processes 1; pid {root}/nginx.pid; error_log {root}/error.log crit;\n\
         events {{ worker_connections 10000; }}\n\
         http {{ access_log off; client_body_temp_path {root}/b; proxy_temp_path {root}/p; \
         fastcgi_temp_path {root}/f;\n\
         uwsgi_temp_path {root}/u; scgi_temp_path {root}/s; keepalive_requests 1000000000; {zones}\n\
         server {{ listen {at} backlog=4096; root {root}; location /cgi-bin/ {{ {limit} }} }} }}"
    );
    let config = write("nginx.conf", nginx)?;
    let mut command = Command::new("nginx");
    command.arg("-p").arg(folder).arg("-c").arg(config);
    let waits_for = if behind { ([127, 0, 0, 1], PORT).into() } else { bed.address() };
    let mut programs = vec![bed.start_at("nginx", &command, waits_for)?];
    if behind {
        let haproxy = format!(
            "global\n  nbthread 1\n  maxconn 10000\n  no strict-limits\n\
             defaults\n  mode http\n  timeout connect 5s\n  timeout client 30s\n  timeout server 30s\n\
             frontend f\n  bind {SERVER}:{PORT}\n  stick-table type ip size 100k expire 30s store http_req_rate(1s)\n  \
             acl cgi path_beg /cgi-bin/\n  http-request track-sc0 src if cgi\n  \
             http-request deny deny_status 429 if cgi {{ sc_http_req_rate(0) gt {} }}\n  default_backend b\n\
             backend b\n  server s 127.0.0.1:{PORT}\n",
            LIMIT.0
        );
        let config = write("haproxy.cfg", haproxy)?;
        let mut command = Command::new("haproxy");
        command.arg("-db").arg("-q").arg("-f").arg(config);
        // Dropped, and so ended, first.
        programs.insert(0, bed.start("haproxy", &command)?);
    }
    Ok(programs)
}

fn outcome(rows: &[Row], servers: Vec<String>) -> Result<Outcome, Error> {
    let most = rows.iter().map(|row| row.offered).fold(0.0, f64::max);
    let (ours, peers): (Vec<&Row>, Vec<&Row>) =
        rows.iter().filter(|row| row.offered == most).partition(|row| row.control.is_ours());
    let checks: Vec<Check> = ours.into_iter().flat_map(checks).collect();
    if checks.is_empty() {
        return Err(Error::Nothing("the load"));
    }
    let peers: Vec<String> = peers
        .iter()
        .map(|row| format!("{} keeps {:.0} % at {:.0}/s", row.control.label(), row.kept() * 100.0, row.sent))
        .collect();
    let (raw, summary) = tables(rows);
    let plots = vec![
        (None, plot(rows, "good requests/s", |row| row.good.rate())),
        (Some("times"), plot(rows, "good clients' median response time, ms", |row| row.good.median_ms())),
    ];
    Ok(Outcome { raw, summary, plots, verdict: Verdict::of(&checks).noting(&peers.join("; ")), servers })
}

/// That good clients keep their throughput, and that the violations really come.
fn checks(row: &Row) -> [Check; 2] {
    let label = row.control.label();
    let kept = Check {
        what: format!("good clients' throughput with {label} to that without violators"),
        ratio: row.kept(),
        at_least: 0.95,
    };
    let sent = Check {
        what: format!("violations sent against {label} to those wanted"),
        ratio: row.sent / row.offered,
        at_least: 0.95,
    };
    [kept, sent]
}

fn tables(rows: &[Row]) -> (Table, Table) {
    let mut raw = Table::new([
        "control",
        "offered_per_s",
        "sent_per_s",
        "good_per_s",
        "good_alone_per_s",
        "good_median_ms",
    ]);
    let mut summary = Table::new([
        "control",
        "violations/s wanted",
        "sent",
        "good/s",
        "of those without violators",
        "good median ms",
    ]);
    for row in rows {
        raw.row([
            row.control.label().into(),
            text(row.offered),
            text(row.sent),
            text(row.good.rate()),
            text(row.alone),
            text(row.good.median_ms()),
        ]);
        summary.row([
            row.control.label().into(),
            format!("{:.0}", row.offered),
            format!("{:.0}", row.sent),
            text(row.good.rate()),
            format!("{:.1} %", row.kept() * 100.0),
            text(row.good.median_ms()),
        ]);
    }
    (raw, summary)
}

/// A figure of every control over the violations sent.
fn plot(rows: &[Row], y: &str, figure: fn(&Row) -> f64) -> Plot {
    let line = |control: &Control| Series {
        name: control.label().into(),
        points: rows
            .iter()
            .filter(|row| row.control == *control && figure(row).is_finite())
            .map(|row| Point::exact(row.sent, figure(row)))
            .collect(),
    };
    Plot {
        title: "Control in the kernel and in servers".into(),
        x: "violating requests/s".into(),
        x_log: false,
        y: y.into(),
        series: CONTROLS.iter().map(line).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn good_clients_must_keep_theirs_while_the_violations_really_come() {
        let holds = |good, sent| {
            let rows = [Control::Syn, Control::Url].map(|control| Row {
                control,
                offered: 50_000.0,
                sent,
                good: Asked { answered: good, latencies_ms: vec![1.0], seconds: 1.0, ..Asked::default() },
                alone: 400.0,
            });
            outcome(&rows, Vec::new()).unwrap().verdict.holds
        };
        assert!(holds(390, 50_000.0) && !holds(370, 50_000.0) && !holds(390, 30_000.0));
    }
}
