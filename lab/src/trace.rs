//! Traces of web servers: from a log in the common format, or made with published statistics.

use std::collections::HashMap;
use std::io::BufRead;
use std::path::Path;

use crate::Error;
use crate::link::Random;
use crate::surge::{active_off_s, embedded, exponential, inactive_off_s, unit};

/// Bytes of a response's head, added to what a log gives, which is the body: what servers of today send with a 200.
const HEAD_BYTES: u64 = 300;
/// Longest line of a log that is read; longer ones are no log lines.
const LINE_BYTES: usize = 64 * 1024;
/// Requests a second of the paper's trace: 100 million in three months.
const RATE_PER_S: f64 = 100e6 / (91.0 * 86_400.0);
/// Pages of one visit, on average.
const PAGES: f64 = 4.0;
/// The share of visits by a client that has been here before.
const RETURNING: f64 = 0.3;
/// The share of such a visit's responses that say that the client's copy is still good (304): browsers ask about what they
/// keep once in each session. The other responses make up for it, so that the shares of sizes are the paper's in all.
const STILL_GOOD: f64 = 0.5;
/// Longest answer that says so.
const STILL_GOOD_BYTES: f64 = 400.0;
/// Seconds between pages after which it is another visit.
const LONGEST_OFF_S: f64 = 600.0;
/// Bytes of an IP and a TCP header, which DHTTP §VI-A adds to sizes, are in these sizes already.
const SIZES: Sizes = Sizes { short: (1460.0, 0.40), middling: (4096.0, 0.18), mean: 13_000.0 };
/// Shortest and longest response of a made trace.
const BOUNDS: (f64, f64) = (150.0, 100e6);

/// One access.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Access {
    /// Seconds from any beginning, not less than those of the access before.
    pub at_s: f64,
    /// Which client.
    pub client: u32,
    /// Bytes of the response with its head.
    pub bytes: u64,
}

/// What DHTTP §VI-A says of its trace's response sizes.
struct Sizes {
    /// Bytes below which responses are short, and their share.
    short: (f64, f64),
    /// The same for those between short and long.
    middling: (f64, f64),
    mean: f64,
}

/// Draws sizes: uniform in the logarithm below the upper threshold, Pareto above it with the mean that is left.
struct Drawer {
    sizes: Sizes,
    alpha: f64,
}

impl Drawer {
    fn new(sizes: Sizes) -> Self {
        let log_uniform = |from: f64, to: f64| (to - from) / (to / from).ln();
        let still_good = RETURNING * STILL_GOOD;
        let below = still_good * log_uniform(BOUNDS.0, STILL_GOOD_BYTES)
            + (sizes.short.1 - still_good) * log_uniform(BOUNDS.0, sizes.short.0)
            + sizes.middling.1 * log_uniform(sizes.short.0, sizes.middling.0);
        let wanted = (sizes.mean - below) / (1.0 - sizes.short.1 - sizes.middling.1);
        // The mean of a bounded Pareto distribution falls with alpha.
        let (mut low, mut high) = (1.001, 10.0);
        for _ in 0..60 {
            let alpha = f64::midpoint(low, high);
            if bounded_mean(sizes.middling.0, BOUNDS.1, alpha) > wanted { low = alpha } else { high = alpha }
        }
        Self { sizes, alpha: low }
    }

    /// The size of a response to a client that may keep copies.
    fn draw(&self, random: &mut Random, returning: bool) -> u64 {
        let log_uniform = |random: &mut Random, from: f64, to: f64| from * (to / from).powf(unit(random));
        if returning && unit(random) < STILL_GOOD {
            return log_uniform(random, BOUNDS.0, STILL_GOOD_BYTES) as u64;
        }
        // Of all responses this share is drawn; the shares of short ones among them are fewer by those above.
        let drawn = 1.0 - RETURNING * STILL_GOOD;
        let share = 1.0 - drawn + unit(random) * drawn;
        let Sizes { short, middling, .. } = self.sizes;
        let bytes = if share < short.1 {
            log_uniform(random, BOUNDS.0, short.0)
        } else if share < short.1 + middling.1 {
            log_uniform(random, short.0, middling.0)
        } else {
            // The inverse of the bounded distribution.
            let ratio = (middling.0 / BOUNDS.1).powf(self.alpha);
            middling.0 * (1.0 - unit(random) * (1.0 - ratio)).powf(-1.0 / self.alpha)
        };
        bytes as u64
    }
}

fn bounded_mean(least: f64, most: f64, alpha: f64) -> f64 {
    let ratio = least / most;
    alpha / (alpha - 1.0) * least * (1.0 - ratio.powf(alpha - 1.0)) / (1.0 - ratio.powf(alpha))
}

/// A trace of `count` accesses with the rate and the response sizes of the paper's: visits come at random, each has pages
/// with embedded objects and off times as SURGE's.
pub fn synthetic(count: usize, seed: u64) -> Vec<Access> {
    let mut random = Random::new(seed);
    let sizes = Drawer::new(SIZES);
    let page_objects: f64 = (0..10_000).map(|_| 1.0 + embedded(&mut random) as f64).sum::<f64>() / 10_000.0;
    let between_visits_s = PAGES * page_objects / RATE_PER_S;
    let (mut accesses, mut clients, mut begins_s) = (Vec::with_capacity(count + 100), 0u32, 0.0);
    while accesses.len() < count {
        begins_s += exponential(&mut random, between_visits_s);
        let returning = clients > 0 && unit(&mut random) < RETURNING;
        let client = if returning {
            (unit(&mut random) * f64::from(clients)) as u32
        } else {
            clients += 1;
            clients - 1
        };
        let mut at_s = begins_s;
        loop {
            for _ in 0..=embedded(&mut random) {
                accesses.push(Access { at_s, client, bytes: sizes.draw(&mut random, returning) });
                at_s += active_off_s(&mut random);
            }
            // Geometric: the mean number of pages is PAGES.
            if unit(&mut random) < 1.0 / PAGES {
                break;
            }
            at_s += inactive_off_s(&mut random).min(LONGEST_OFF_S);
        }
    }
    accesses.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
    // The last visits are cut short rather than run alone at the end.
    accesses.truncate(count);
    accesses
}

/// The accesses of a log in the common or the combined format. Lines that are none are left out; their number is the
/// second result.
///
/// # Errors
/// When the file cannot be read.
pub fn read_log(path: &Path) -> Result<(Vec<Access>, usize), Error> {
    let file = std::fs::File::open(path).map_err(Error::file("read", path))?;
    let mut reader = std::io::BufReader::with_capacity(LINE_BYTES, file);
    let (mut accesses, mut others) = (Vec::new(), 0);
    let mut clients: HashMap<Vec<u8>, u32> = HashMap::new();
    let mut line = Vec::new();
    loop {
        line.clear();
        if reader.read_until(b'\n', &mut line).map_err(Error::file("read", path))? == 0 {
            break;
        }
        match std::str::from_utf8(&line).ok().filter(|_| line.len() <= LINE_BYTES).and_then(common_log_line) {
            Some((client, at_s, bytes)) => {
                let next = u32::try_from(clients.len()).unwrap_or(u32::MAX);
                let client = *clients.entry(client.as_bytes().to_vec()).or_insert(next);
                accesses.push(Access { at_s, client, bytes: bytes + HEAD_BYTES });
            }
            None => others += 1,
        }
    }
    accesses.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
    Ok((accesses, others))
}

/// `host ident user [day/month/year:hour:minute:second zone] "request" status bytes …`: client, time and bytes.
fn common_log_line(line: &str) -> Option<(&str, f64, u64)> {
    let client = line.split(' ').next().filter(|client| !client.is_empty())?;
    let (time, rest) = line.split_once('[')?.1.split_once(']')?;
    // A quote within the request is written with a backslash, so that the last one before two numbers ends it.
    let after = rest.match_indices("\" ").find_map(|(at, _)| {
        let mut words = rest[at + 2..].split_whitespace();
        let status: u16 = words.next()?.parse().ok()?;
        let bytes = words.next()?;
        let bytes = if bytes == "-" { 0 } else { bytes.parse().ok()? };
        (100..600).contains(&status).then_some(bytes)
    })?;
    Some((client, seconds(time)?, after))
}

/// `10/Oct/2000:13:55:36 -0700` in seconds since 1970.
fn seconds(time: &str) -> Option<f64> {
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let (clock, zone) = time.split_once(' ')?;
    let mut parts = clock.split(['/', ':']);
    let day: i64 = parts.next()?.parse().ok()?;
    let month = parts.next()?;
    let month = MONTHS.iter().position(|name| *name == month)? as i64 + 1;
    let mut number = || parts.next()?.parse::<i64>().ok().filter(|number| (0..10_000).contains(number));
    let (year, hour, minute, second) = (number()?, number()?, number()?, number()?);
    let zone: i64 = zone.parse().ok()?;
    let offset_s = (zone / 100) * 3600 + (zone % 100) * 60;
    // Days since 1970 in a calendar whose year begins in March, so that the leap day is the last.
    let (year, month) = if month <= 2 { (year - 1, month + 9) } else { (year, month - 3) };
    let day_of_year = (153 * month + 2) / 5 + day - 1;
    let days = year * 365 + year / 4 - year / 100 + year / 400 + day_of_year - 719_468;
    Some((days * 86_400 + hour * 3600 + minute * 60 + second - offset_s) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_made_trace_has_the_published_statistics() {
        let trace = synthetic(400_000, 1);
        let share = |below: u64| {
            trace.iter().filter(|access| access.bytes < below).count() as f64 / trace.len() as f64
        };
        assert!((share(1460) - 0.40).abs() < 0.01, "{}", share(1460));
        assert!((share(4096) - 0.58).abs() < 0.01, "{}", share(4096));
        // The tail is heavy: the mean of a sample varies much.
        let mean = trace.iter().map(|access| access.bytes as f64).sum::<f64>() / trace.len() as f64;
        assert!((9_000.0..17_000.0).contains(&mean), "{mean}");
        assert!(trace.windows(2).all(|pair| pair[0].at_s <= pair[1].at_s));
        let rate = trace.len() as f64 / trace.last().unwrap().at_s;
        assert!((RATE_PER_S * 0.8..RATE_PER_S * 1.25).contains(&rate), "{rate}");
    }

    #[test]
    fn the_bounded_tail_has_the_mean_that_is_left() {
        assert!((bounded_mean(1.0, 1e9, 3.0) - 1.5).abs() < 1e-6);
        let drawer = Drawer::new(SIZES);
        assert!((1.05..1.4).contains(&drawer.alpha), "{}", drawer.alpha);
    }

    #[test]
    fn lines_of_a_log_give_client_time_and_bytes() {
        let line =
            r#"127.0.0.1 - frank [10/Oct/2000:13:55:36 -0700] "GET /a\" b HTTP/1.0" 200 2326 "-" "x" "#;
        assert_eq!(common_log_line(line), Some(("127.0.0.1", 971_211_336.0, 2326)));
        let empty = r#"::1 - - [29/Feb/2024:00:00:00 +0000] "HEAD / HTTP/1.1" 304 -"#;
        assert_eq!(common_log_line(empty), Some(("::1", 1_709_164_800.0, 0)));
        for bad in
            ["", "x", "a - - [no time] \"GET / HTTP/1.1\" 200 1", "a - - [10/Oct/2000:13:55:36 -0700] \"G"]
        {
            assert_eq!(common_log_line(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_log_is_read_in_the_order_of_time_and_other_lines_are_counted() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let line = |host: &str, second: u32| {
            format!("{host} - - [10/Oct/2000:13:55:{second:02} +0000] \"GET / HTTP/1.1\" 200 700\n")
        };
        let text = [line("a", 20), line("b", 10), "not a line\n".into(), line("a", 30)].concat();
        std::fs::write(file.path(), text).unwrap();
        let (accesses, others) = read_log(file.path()).unwrap();
        assert_eq!(others, 1);
        assert_eq!(accesses.iter().map(|access| access.client).collect::<Vec<_>>(), [1, 0, 0]);
        assert_eq!(accesses[0].bytes, 1000);
        assert!(read_log(Path::new("/nowhere/log")).is_err());
    }
}
