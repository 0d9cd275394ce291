//! Clients of conditioned servers: wrk for rates, a mix of files, one client that waits for each answer.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::thread::{CpuSet, sched_setaffinity};
use tidegate_bench::LOAD_CORE;
use tidegate_bench::peers::{install, pinned};

use super::cc::Sample;
use super::cc_servers::{Server, object};
use crate::Error;

/// Bytes of the smallest file of each of SPECweb99's classes; a class has nine, of one to nine times as many.
const CLASS_BYTES: [usize; 4] = [102, 1_024, 10_240, 102_400];
/// How often each class is asked for, in percent (SPECweb99).
const CLASS_SHARES: [f64; 4] = [35.0, 50.0, 14.0, 1.0];
/// How often each file of a class is asked for, in percent (SPECweb99).
const FILE_SHARES: [f64; 9] = [3.9, 5.9, 8.8, 17.7, 35.3, 11.8, 7.1, 5.0, 4.5];
/// What wrk says when it gets no connection at all.
const NO_CONNECTION: &str = "unable to connect";
/// Requests after which the mix begins anew.
const MIX_REQUESTS: usize = 20_000;

/// A data set of the SPECweb99-like mix, and wrk's script that asks for it.
pub(super) struct Mix {
    script: PathBuf,
}

impl Mix {
    /// Writes `directories` directories of 36 files each, 5 MB, and the script to `site`.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub(super) fn write(site: &Path, directories: usize) -> Result<Self, Error> {
        for directory in 0..directories {
            let path = site.join(format!("dir{directory}"));
            std::fs::create_dir_all(&path).map_err(Error::file("write", &path))?;
            for (class, bytes) in CLASS_BYTES.iter().enumerate() {
                for file in 1..=9 {
                    object(site, &format!("dir{directory}/class{class}_{file}"), bytes * file)?;
                }
            }
        }
        // Zipf: the Nth directory is asked for one Nth as often as the first (paper §4.3.3).
        let zipf: Vec<f64> = (1..=directories).map(|rank| 1.0 / rank as f64).collect();
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        let paths: Vec<String> = (0..MIX_REQUESTS)
            .map(|_| {
                let directory = random.choose(&zipf);
                let (class, file) = (random.choose(&CLASS_SHARES), random.choose(&FILE_SHARES) + 1);
                format!("\"/dir{directory}/class{class}_{file}\"")
            })
            .collect();
        let script = site.join("mix.lua");
        let text = format!(
            "local paths = {{{}}}\nlocal requests, next = {{}}, 0\n\
             init = function() for i, path in ipairs(paths) do requests[i] = wrk.format(\"GET\", path) end end\n\
             request = function() next = next % #requests + 1 return requests[next] end\n",
            paths.join(",")
        );
        std::fs::write(&script, text).map_err(Error::file("write", &script))?;
        Ok(Self { script })
    }
}

/// xorshift64*: the same requests in every run.
struct Random(u64);

impl Random {
    /// An index, each as often as its weight says.
    fn choose(&mut self, weights: &[f64]) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let uniform = (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) as f64 / (1u64 << 53) as f64;
        let mut left = uniform * weights.iter().sum::<f64>();
        let found = weights.iter().position(|weight| {
            left -= weight;
            left < 0.0
        });
        found.unwrap_or(weights.len() - 1)
    }
}

/// What wrk asks a server for.
pub(super) struct Wrk<'m> {
    /// Connections at once, each kept open.
    pub(super) connections: usize,
    /// How long.
    pub(super) time: Duration,
    /// The path of one file, or a mix.
    pub(super) what: What<'m>,
}

/// One file or several.
pub(super) enum What<'m> {
    File(&'m str),
    Mix(&'m Mix),
}

impl Wrk<'_> {
    /// Loads `server`; no answer at all is a rate of 0.
    ///
    /// # Errors
    /// When wrk cannot be run, or an answer was wrong.
    pub(super) fn run(
        &self,
        server: &Server,
        label: &'static str,
        x: f64,
        round: usize,
    ) -> Result<Sample, Error> {
        install("wrk", "wrk").map_err(Error::Server)?;
        let mut wrk = Command::new("wrk");
        let seconds = self.time.as_secs().max(1);
        wrk.args(["-t1", &format!("-c{}", self.connections), &format!("-d{seconds}")]);
        let path = match self.what {
            What::File(path) => path,
            What::Mix(mix) => {
                wrk.arg("-s").arg(&mix.script);
                ""
            }
        };
        wrk.arg(format!("http://{}{path}", server.address()));
        let before = server.cpu_s();
        let output = pinned(LOAD_CORE, &wrk).output().map_err(Error::Load)?;
        let cpu_s = server.cpu_s() - before;
        let said = String::from_utf8_lossy(&output.stderr);
        let figures = match Figures::read(&String::from_utf8_lossy(&output.stdout)) {
            Some(figures) => figures,
            // A server whose queue of connections is full.
            None if said.starts_with(NO_CONNECTION) => Figures { rate: 0.0, requests: 0.0, wrong: 0 },
            None => return Err(Error::Server(format!("wrk: {said}"))),
        };
        if figures.wrong > 0 {
            return Err(Error::Server(format!("{label}: {} wrong answers", figures.wrong)));
        }
        let requests_per_cpu_s = if cpu_s > 0.0 { figures.requests / cpu_s } else { f64::NAN };
        Ok(Sample { label, x, round, requests_per_s: figures.rate, requests_per_cpu_s })
    }

    /// Loads two servers that are compared, each alone and on both sides of the other: a machine's speed changes by
    /// more than what is compared.
    ///
    /// # Errors
    /// As [`Wrk::run`].
    pub(super) fn in_turn(
        &self,
        (own, label): (&Server, &'static str),
        (other, other_label): (&Server, &'static str),
        x: f64,
        round: usize,
    ) -> Result<[Sample; 2], Error> {
        let before = self.run(other, other_label, x, round)?;
        let owns = [self.run(own, label, x, round)?, self.run(own, label, x, round)?];
        let after = self.run(other, other_label, x, round)?;
        Ok([mean(owns), mean([before, after])])
    }
}

fn mean([a, b]: [Sample; 2]) -> Sample {
    Sample {
        requests_per_s: f64::midpoint(a.requests_per_s, b.requests_per_s),
        requests_per_cpu_s: f64::midpoint(a.requests_per_cpu_s, b.requests_per_cpu_s),
        ..a
    }
}

/// What wrk printed.
#[derive(Debug, PartialEq)]
struct Figures {
    rate: f64,
    requests: f64,
    wrong: u64,
}

impl Figures {
    fn read(text: &str) -> Option<Self> {
        let after = |mark: &str| text.lines().find_map(|line| Some(line.split_once(mark)?.1.trim()));
        let before = |mark: &str| text.lines().find_map(|line| Some(line.split_once(mark)?.0.trim()));
        let wrong = after("Non-2xx or 3xx responses:").map_or(Some(0), |count| count.parse().ok())?;
        let requests = before(" requests in ")?.parse().ok()?;
        Some(Self { rate: after("Requests/sec:")?.parse().ok()?, requests, wrong })
    }
}

/// The calling thread runs on the load's core from now on.
pub(super) fn on_load_core() -> Result<(), Error> {
    let mut core = CpuSet::new();
    core.set(LOAD_CORE);
    sched_setaffinity(None, &core).map_err(|error| Error::Core { core: LOAD_CORE, source: error.into() })
}

/// A connection from `source`, or from wherever the kernel likes.
pub(super) fn connect(
    server: SocketAddr,
    source: Option<IpAddr>,
    timeout: Duration,
) -> std::io::Result<TcpStream> {
    let socket =
        rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    if let Some(source) = source {
        rustix::net::bind(&socket, &SocketAddr::new(source, 0))?;
    }
    // Before connect(2), which it bounds too (socket(7)).
    let stream = TcpStream::from(socket);
    stream.set_write_timeout(Some(timeout))?;
    stream.set_read_timeout(Some(timeout))?;
    rustix::net::connect(&stream, &server)?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Asks once, on a connection of its own: status and content.
pub(super) fn ask(
    server: SocketAddr,
    source: Option<IpAddr>,
    path: &str,
    timeout: Duration,
) -> std::io::Result<(u16, Vec<u8>)> {
    let mut client = Client::over(connect(server, source, timeout)?);
    client.ask(format!("GET {path} HTTP/1.1\r\nHost: lab\r\nConnection: close\r\n\r\n").as_bytes())
}

/// A client that waits for each answer before it asks again.
pub(super) struct Client {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Client {
    pub(super) fn over(stream: TcpStream) -> Self {
        Self { stream, buffer: Vec::with_capacity(4096) }
    }

    /// Sends `request` and reads the answer, which must have a `Content-Length`: status and content.
    ///
    /// # Errors
    /// When the connection ends, or what comes is no answer.
    pub(super) fn ask(&mut self, request: &[u8]) -> std::io::Result<(u16, Vec<u8>)> {
        self.stream.write_all(request)?;
        self.buffer.clear();
        let wrong = || std::io::Error::from(std::io::ErrorKind::InvalidData);
        loop {
            if let Some(head) = memchr::memmem::find(&self.buffer, b"\r\n\r\n") {
                let text = std::str::from_utf8(&self.buffer[..head]).map_err(|_| wrong())?;
                let status = text.get(9..12).and_then(|status| status.parse().ok()).ok_or_else(wrong)?;
                let length = text.lines().find_map(|line| {
                    let (name, value) = line.split_once(':')?;
                    name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok())?
                });
                let end = head + 4 + length.ok_or_else(wrong)?;
                while self.buffer.len() < end {
                    self.read_more()?;
                }
                if self.buffer.len() > end {
                    return Err(wrong());
                }
                return Ok((status, self.buffer.split_off(head + 4)));
            }
            self.read_more()?;
        }
    }

    fn read_more(&mut self) -> std::io::Result<()> {
        let mut block = [0; 16 * 1024];
        match self.stream.read(&mut block)? {
            0 => Err(std::io::ErrorKind::UnexpectedEof.into()),
            length => {
                self.buffer.extend_from_slice(&block[..length]);
                Ok(())
            }
        }
    }

    /// Microseconds that each of `count` requests took, or of as many as ended `within` a time, ascending.
    ///
    /// # Errors
    /// As [`Client::ask`], or when an answer was not 200.
    pub(super) fn latencies_us(
        &mut self,
        request: &[u8],
        count: usize,
        within: Duration,
    ) -> std::io::Result<Vec<f64>> {
        let mut latencies = Vec::with_capacity(count);
        let end = Instant::now() + within;
        while latencies.len() < count && (latencies.is_empty() || Instant::now() < end) {
            let began = Instant::now();
            let (status, _) = self.ask(request)?;
            latencies.push(began.elapsed().as_secs_f64() * 1e6);
            if status != 200 {
                return Err(std::io::Error::other(format!("status {status}")));
            }
        }
        latencies.sort_by(f64::total_cmp);
        Ok(latencies)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_wrk_prints_is_read_and_wrong_answers_are_counted() {
        let text = "  1000 requests in 2.00s, 1.0MB read\nRequests/sec:    500.25\nTransfer/sec: 1MB\n";
        assert_eq!(Figures::read(text), Some(Figures { rate: 500.25, requests: 1000.0, wrong: 0 }));
        let wrong = format!("{text}  Non-2xx or 3xx responses: 3\n");
        assert_eq!(Figures::read(&wrong).unwrap().wrong, 3);
        assert_eq!(Figures::read("unable to connect"), None);
    }

    #[test]
    fn files_are_chosen_as_often_as_their_weights_say() {
        let mut random = Random(7);
        let mut counts = [0; 4];
        (0..100_000).for_each(|_| counts[random.choose(&CLASS_SHARES)] += 1);
        for (count, share) in counts.iter().zip(CLASS_SHARES) {
            assert!((f64::from(*count) / 1000.0 - share).abs() < 1.0, "{counts:?}");
        }
    }
}
