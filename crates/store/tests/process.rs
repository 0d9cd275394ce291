//! Tests that need a process of their own: this binary starts itself anew with the job in an environment variable.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use support::{Random, put, verify};
use tidegate_store::{Config, Store, StoreError, Visit};

const JOB: &str = "TIDEGATE_STORE_TEST_JOB";
const KILLS: u64 = 40;
const KILL_BUDGET: u64 = 4 << 20;
const RSS_BUDGET: u64 = 64 << 20;
/// What the test process has without a store, in bytes, at most.
const RSS_BASE: u64 = 8 << 20;

fn child(test: &str, job: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(JOB, job)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Stores, replaces and removes until it is killed.
fn work_until_killed(path: &Path) -> ! {
    let (store, _) = Store::open(Config::new(KILL_BUDGET).with_path(path)).unwrap();
    println!("ready");
    let mut random = Random(u64::from(std::process::id()));
    loop {
        let key = random.below(400).to_le_bytes();
        let length = if random.below(20) == 0 { random.below(300_000) } else { random.below(4_000) };
        let object = match random.below(8) {
            0 => None,
            1 => store.get(&key),
            _ => put(&store, &key, random.next(), length as usize, random.below(2) == 0).ok(),
        };
        match object {
            Some(object) if random.below(3) == 0 => {
                let _ = store.replace_meta(&key, &object, object.meta(), object.head());
            }
            Some(_) => {}
            None => {
                store.remove(&key);
            }
        }
    }
}

#[test]
fn a_store_killed_at_any_instant_starts_again_without_a_wrong_byte() {
    if let Some(path) = std::env::var_os(JOB) {
        work_until_killed(Path::new(&path));
    }
    let directory = tempfile::tempdir().unwrap();
    let mut random = Random(11);
    let mut recovered = 0;
    for kill in 0..KILLS {
        let test = "a_store_killed_at_any_instant_starts_again_without_a_wrong_byte";
        let mut child = child(test, directory.path().to_str().unwrap());
        let mut seen = Vec::new();
        let mut out = child.stdout.take().unwrap();
        let mut byte = [0];
        while !seen.ends_with(b"ready") {
            assert_eq!(out.read(&mut byte).unwrap(), 1, "start {kill} failed");
            seen.push(byte[0]);
        }
        // The random instant is the point of the test; nothing is expected to be over by then.
        std::thread::sleep(Duration::from_micros(random.below(40_000)));
        child.kill().unwrap();
        child.wait().unwrap();
        let (store, report) = Store::open(Config::new(KILL_BUDGET).with_path(directory.path())).unwrap();
        assert!(report.set_aside.is_none());
        // At most the one object that was being switched may be there twice.
        assert!(report.torn_dropped + report.superseded <= 1, "{report:?}");
        store.check_invariants();
        store.for_each(|key, _| {
            verify(&store.get(key).unwrap());
            recovered += 1;
            Visit::Keep
        });
    }
    assert!(recovered > KILLS * 20, "only {recovered} objects recovered");
}

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

fn fill_three_times(path: Option<&Path>) {
    let base = resident_bytes();
    let config = Config { path: path.map(Into::into), ..Config::new(RSS_BUDGET) };
    let (store, _) = Store::open(config).unwrap();
    let mut random = Random(5);
    let mut written = 0;
    while written < 3 * RSS_BUDGET {
        let length = match random.below(100) {
            0 => random.below(2 << 20),
            1..=9 => random.below(100_000),
            _ => random.below(600),
        };
        put(&store, &random.next().to_le_bytes(), 1, length as usize, random.below(2) == 0).unwrap();
        written += length;
    }
    // As many of the smallest objects as there can be: the bookkeeping at its fullest.
    for n in 0..RSS_BUDGET / 512 {
        put(&store, &n.to_le_bytes(), 1, 0, true).unwrap();
    }
    let stats = store.stats();
    assert!(stats.index_bytes <= RSS_BUDGET / 100 * 8, "{stats:?}");
    println!("base={base} peak={} index={} ok", resident_bytes(), stats.index_bytes);
}

#[test]
fn resident_memory_stays_within_a_tenth_over_the_budget() {
    if let Some(path) = std::env::var_os(JOB) {
        return fill_three_times((path != "anonymous").then_some(Path::new(&path)));
    }
    let directory = tempfile::tempdir().unwrap();
    for job in ["anonymous", directory.path().to_str().unwrap()] {
        let child = child("resident_memory_stays_within_a_tenth_over_the_budget", job);
        let output = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
        let value = |name: &str| -> u64 {
            let rest =
                output.split(&format!("{name}=")).nth(1).unwrap_or_else(|| panic!("child failed: {output}"));
            rest.split_whitespace().next().unwrap().parse().unwrap()
        };
        let (base, peak) = (value("base"), value("peak"));
        println!("resident before {base}, at most {peak}, budget {RSS_BUDGET}, index {}", value("index"));
        assert!(base <= RSS_BASE, "{base}");
        assert!(
            peak <= RSS_BUDGET / 10 * 11 + RSS_BASE,
            "{peak} bytes resident for a budget of {RSS_BUDGET}"
        );
    }
}

/// Needs a user and a mount namespace (or root) for a file system that is smaller than the budget.
#[test]
fn a_full_disk_is_one_clear_error_at_open() {
    if let Some(path) = std::env::var_os(JOB) {
        let error = Store::open(Config::new(KILL_BUDGET).with_path(&path)).unwrap_err();
        assert!(matches!(error, StoreError::DiskFull { needed_bytes: KILL_BUDGET, .. }), "{error}");
        let left = std::fs::read_dir(&path).unwrap().count();
        assert_eq!(left, 1, "something but the lock is left");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mount = "mount -t tmpfs -o size=2m tmpfs \"$0\" && exec \"$@\"";
    let status = Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", mount])
        .arg(directory.path())
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "a_full_disk_is_one_clear_error_at_open"])
        .env(JOB, directory.path())
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success(), "{status}");
}
