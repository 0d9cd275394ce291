//! Clients as the paper's: a connection for each request, from the address of their group.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, Type};

use super::Testbed;
use crate::Error;

/// Clients of one kind.
#[derive(Clone, Debug)]
pub struct Group {
    /// Where they connect from.
    pub from: Ipv4Addr,
    /// How many ask at once.
    pub clients: usize,
    /// What they ask for.
    pub path: &'static str,
    /// When they ask.
    pub pace: Pace,
    /// After so long a client gives up and tries anew.
    pub patience: Duration,
}

impl Group {
    /// When its client of this number begins, if clients do not begin together: the same in every run.
    fn begins_after(&self, number: u64) -> Duration {
        let part = mixed(number ^ u64::from(u32::from(self.from)) << 32) >> 32;
        self.patience.mul_f64(part as f64 / f64::from(u32::MAX))
    }
}

/// When clients ask.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pace {
    /// Each as soon as it has its answer; all begin at once.
    Closed,
    /// As `Closed`, but they begin at any time within their patience, as clients do that know nothing of each other. Those
    /// that begin at once, and give up after the same time, would come back at once for ever.
    Scattered,
    /// All together so many per second, evenly, whether or not answers come; as long as there are enough clients.
    PerSecond(f64),
    /// Bursts: for each of them so many at once, so often.
    Bursts {
        /// At once, at least and at most.
        size: (u64, u64),
        /// From one to the next.
        every: Duration,
    },
}

/// What became of one group's requests.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    /// Answered in time with 200.
    pub answered: u64,
    /// Refused, reset or late.
    pub failed: u64,
    /// How long the answers took, connecting included, ascending, in milliseconds.
    pub latencies_ms: Vec<f64>,
    /// When each was answered, in seconds after the start of what is measured, ascending.
    pub answered_at_s: Vec<f64>,
    /// How long was measured.
    pub seconds: f64,
}

impl Asked {
    /// Answers per second.
    pub fn rate(&self) -> f64 {
        self.answered as f64 / self.seconds
    }

    /// The same load once more, as if it had been measured for longer. Times of answers stay those of the first.
    pub fn add(&mut self, more: Self) {
        self.answered += more.answered;
        self.failed += more.failed;
        self.seconds += more.seconds;
        self.latencies_ms.extend(more.latencies_ms);
        self.latencies_ms.sort_by(f64::total_cmp);
    }

    /// The middle latency; infinite if nothing was answered.
    pub fn median_ms(&self) -> f64 {
        self.latencies_ms.get(self.latencies_ms.len() / 2).copied().unwrap_or(f64::INFINITY)
    }

    /// The mean latency.
    pub fn mean_ms(&self) -> f64 {
        self.latencies_ms.iter().sum::<f64>() / self.latencies_ms.len() as f64
    }
}

/// Between a refusal and the next attempt: a refusal costs next to nothing, and clients that were not to breathe would take
/// the machine for themselves.
const BREATH: Duration = Duration::from_millis(10);

/// When what is measured begins and ends, in time since all began.
#[derive(Clone, Copy, Debug)]
pub struct Clients {
    /// Not measured: queues fill.
    pub settle: Duration,
    /// Measured.
    pub measure: Duration,
}

/// Lets all groups ask; one result for each.
///
/// # Errors
/// When the clients' host cannot be entered.
pub fn load(bed: &Testbed, to: SocketAddr, groups: &[Group], time: Clients) -> Result<Vec<Asked>, Error> {
    let begun = Instant::now();
    let turns: Vec<AtomicU64> = groups.iter().map(|_| AtomicU64::new(0)).collect();
    std::thread::scope(|scope| {
        let mut groups_threads = Vec::new();
        for (group, turns) in groups.iter().zip(&turns) {
            let client = |_| bed.spawn_on_client(scope, move || ask_until_end(group, to, begun, time, turns));
            groups_threads.push((0..group.clients).map(client).collect::<Result<Vec<_>, Error>>()?);
        }
        let mut results = Vec::new();
        for threads in groups_threads {
            let mut all = Asked { seconds: time.measure.as_secs_f64(), ..Asked::default() };
            for thread in threads {
                let one = thread.join().map_err(|_| Error::Testbed("a client panicked".into()))??;
                all.answered += one.answered;
                all.failed += one.failed;
                all.latencies_ms.extend(one.latencies_ms);
                all.answered_at_s.extend(one.answered_at_s);
            }
            all.latencies_ms.sort_by(f64::total_cmp);
            all.answered_at_s.sort_by(f64::total_cmp);
            results.push(all);
        }
        Ok(results)
    })
}

fn ask_until_end(group: &Group, to: SocketAddr, begun: Instant, time: Clients, turns: &AtomicU64) -> Asked {
    let end = begun + time.settle + time.measure;
    let mut asked = Asked::default();
    let mut burst = Bursts::default();
    if group.pace == Pace::Scattered {
        std::thread::sleep(group.begins_after(turns.fetch_add(1, Ordering::Relaxed)));
    }
    loop {
        let wait_until = match group.pace {
            Pace::Closed | Pace::Scattered => None,
            Pace::PerSecond(rate) => {
                let turn = turns.fetch_add(1, Ordering::Relaxed);
                Some(begun + Duration::from_secs_f64(turn as f64 / rate))
            }
            Pace::Bursts { size, every } => Some(begun + burst.next(turns, size, every)),
        };
        let now = Instant::now();
        if let Some(at) = wait_until {
            std::thread::sleep(at.min(end).saturating_duration_since(now));
        }
        let asks = Instant::now();
        if asks >= end {
            return asked;
        }
        let answered = ask(group, to, end);
        let now = Instant::now();
        // What began before or ends after belongs to no measurement.
        if now < begun + time.settle || now > end {
            continue;
        }
        if answered && now - asks <= group.patience {
            asked.answered += 1;
            asked.latencies_ms.push((now - asks).as_secs_f64() * 1e3);
            asked.answered_at_s.push((now - begun - time.settle).as_secs_f64());
        } else {
            asked.failed += 1;
            if !answered && now - asks < BREATH {
                std::thread::sleep(BREATH);
            }
        }
    }
}

/// Times of the requests of a burst: the bursts' sizes depend on their number alone, so that all clients agree.
#[derive(Default)]
struct Bursts {
    number: u64,
    first: u64,
    size: u64,
}

impl Bursts {
    fn next(&mut self, turns: &AtomicU64, size: (u64, u64), every: Duration) -> Duration {
        let turn = turns.fetch_add(1, Ordering::Relaxed);
        while turn >= self.first + self.size {
            self.first += self.size;
            self.size = size.0 + mixed(self.number) % (size.1 - size.0 + 1);
            self.number += 1;
        }
        // Half a period of scatter.
        let scatter = mixed(self.number ^ 0x5555) % 1000;
        every.mul_f64(self.number as f64 + scatter as f64 / 2000.0 - 1.0)
    }
}

/// SplitMix64: the same numbers in every run.
fn mixed(number: u64) -> u64 {
    let mut z = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Whether the answer is 200 and whole.
fn ask(group: &Group, to: SocketAddr, end: Instant) -> bool {
    let patience =
        group.patience.min(end.saturating_duration_since(Instant::now())).max(Duration::from_millis(1));
    let deadline = Instant::now() + patience;
    let connect = || -> std::io::Result<TcpStream> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.bind(&SocketAddr::from((group.from, 0)).into())?;
        socket.connect_timeout(&to.into(), patience)?;
        Ok(socket.into())
    };
    let Ok(mut stream) = connect() else { return false };
    let request = format!("GET {} HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\n\r\n", group.path);
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    if stream.set_read_timeout(Some(left)).is_err() || stream.write_all(request.as_bytes()).is_err() {
        return false;
    }
    let mut answer = Vec::with_capacity(1 << 14);
    matches!(stream.read_to_end(&mut answer), Ok(1..)) && answer.starts_with(b"HTTP/1.1 200")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_share_bursts_of_the_sizes_that_are_wanted() {
        let turns = AtomicU64::new(0);
        let mut clients = [Bursts::default(), Bursts::default()];
        let every = Duration::from_millis(500);
        let times: Vec<Duration> = (0..400).map(|i| clients[i % 2].next(&turns, (50, 80), every)).collect();
        assert!(times.is_sorted());
        let mut sizes = Vec::new();
        for burst in times.chunk_by(|a, b| a == b) {
            sizes.push(burst.len());
        }
        sizes.pop();
        assert!(sizes.len() >= 4 && sizes.iter().all(|size| (50..=80).contains(size)), "{sizes:?}");
    }

    #[test]
    fn scattered_clients_begin_at_any_time_within_their_patience() {
        let patience = Duration::from_millis(400);
        let group = |host| Group {
            from: Ipv4Addr::new(10, 77, host, 1),
            clients: 50,
            path: "/",
            pace: Pace::Scattered,
            patience,
        };
        let begin: Vec<Duration> =
            (0..5).flat_map(|host| (0..50).map(move |n| group(host).begins_after(n))).collect();
        // 250 in eight eighths: about 31 in each.
        for eighth in 0..8 {
            let part = patience * eighth / 8..patience * (eighth + 1) / 8;
            let count = begin.iter().filter(|time| part.contains(*time)).count();
            assert!((16..=46).contains(&count), "{count} in {part:?}");
        }
    }

    #[test]
    fn nothing_answered_has_no_finite_latency() {
        let asked = Asked { seconds: 2.0, ..Asked::default() };
        assert_eq!((asked.rate(), asked.median_ms()), (0.0, f64::INFINITY));
    }
}
