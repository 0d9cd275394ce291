//! A quick run of each scenario of the DHTTP paper that needs hosts or servers. Needs root, and tidegate beside the lab or
//! named by TIDEGATE_BIN; without, a test fails and says so.

#![allow(clippy::unwrap_used)] // clippy takes helpers of tests for no tests.

use std::process::{Command, Stdio};

/// Runs a scenario; its verdict's line. Nothing of it may stay behind.
fn quick(name: &str) -> String {
    let lab = std::path::Path::new(env!("CARGO_BIN_EXE_tidegate-lab"));
    let beside = lab.with_file_name("tidegate");
    let tidegate = std::env::var_os("TIDEGATE_BIN").map_or(beside, Into::into);
    assert!(tidegate.is_file(), "{} is not there: cargo build -p tidegate", tidegate.display());
    assert!(rustix::process::geteuid().is_root(), "{name} needs root: it makes network namespaces");
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(lab);
    command.args(["run", name, "--quick", "--tidegate"]).arg(tidegate).arg("--out").arg(directory.path());
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let id = child.id().to_string();
    let output = child.wait_with_output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (verdict, errors) = (text(&output.stdout), text(&output.stderr));
    assert!(verdict.starts_with(&format!("{name}: ")), "no verdict: {verdict}{errors}");
    assert!(!errors.contains("stays behind"), "{errors}");
    let namespaces = text(&Command::new("ip").args(["netns", "list"]).output().unwrap().stdout);
    assert!(!namespaces.contains(&id), "a namespace of process {id} is left: {namespaces}");
    let csv = std::fs::read_to_string(directory.path().join(format!("{name}.csv"))).unwrap();
    assert!(csv.lines().count() > 2, "{csv}");
    assert!(directory.path().join(format!("{name}.svg")).is_file());
    verdict
}

/// For claims about what happens, and not how fast.
fn holds(name: &str) {
    let verdict = quick(name);
    assert!(verdict.starts_with(&format!("{name}: holds: ")), "{verdict}");
}

#[test]
fn two_routes_and_an_interception_cache_no_transfer_breaks() {
    holds("dhttp-fig3");
}

#[test]
fn forged_sources_no_syn_and_little_amplification() {
    holds("dhttp-fig4");
}

#[test]
fn lossy_link_each_request_answered_once_and_each_post_executed_once() {
    holds("dhttp-loss");
}

#[test]
fn lossy_link_pages_come_whole_by_dhttp_and_http3() {
    holds("dhttp-http3");
}

#[test]
fn congested_link_gives_a_verdict() {
    quick("dhttp-fig13");
}

#[test]
fn full_servers_give_verdicts() {
    // One after the other: they use the same core.
    for name in ["dhttp-fig14", "dhttp-fig10", "dhttp-peak"] {
        quick(name);
    }
}
