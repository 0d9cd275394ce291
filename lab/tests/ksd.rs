//! Every scenario of overload, with tiny parameters: it runs, leaves figures, plot and verdict, and nothing else.
//! Needs root, for network namespaces and kernel programs.

#![allow(clippy::unwrap_used)] // clippy takes helpers of tests for no tests.

use std::process::Command;

/// Processes with this environment variable: whatever a run has started, and what that started.
fn left_behind(marker: &str) -> Vec<String> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let marked = processes.filter(|process| {
        let environment = std::fs::read(process.path().join("environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|variable| variable == marker.as_bytes())
    });
    marked.map(|process| std::fs::read_to_string(process.path().join("comm")).unwrap_or_default()).collect()
}

fn runs(name: &str, columns: &str, plots: &[&str]) {
    assert!(rustix::process::geteuid().is_root(), "network namespaces need root: run the tests with sudo");
    let out = tempfile::tempdir().unwrap();
    let mut lab = Command::new(env!("CARGO_BIN_EXE_tidegate-lab"));
    lab.args(["run", name, "--quick", "--out"]).arg(out.path());
    let marker = format!("{name}-{}", std::process::id());
    let output = lab.env("TIDEGATE_LAB_TEST", &marker).output().unwrap();
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    // Whether the claim holds is not this test's business, on a machine that runs other tests beside it.
    let verdict = [format!("{name}: holds: "), format!("{name}: does not hold: ")];
    assert!(verdict.iter().any(|verdict| said.starts_with(verdict.as_str())), "{said}\n{errors}");
    assert_eq!(output.status.code(), Some(i32::from(!said.starts_with(&verdict[0]))), "{errors}");
    let csv = std::fs::read_to_string(out.path().join(format!("{name}.csv"))).unwrap();
    assert!(csv.starts_with(columns) && csv.lines().count() > 1, "{csv}");
    for plot in plots {
        let svg = std::fs::read_to_string(out.path().join(format!("{name}{plot}.svg"))).unwrap();
        assert!(svg.contains("</svg>"));
    }
    assert_eq!(left_behind(&format!("TIDEGATE_LAB_TEST={marker}")), [] as [String; 0]);
}

#[test]
fn fig5() {
    runs("ksd-fig5", "greedy_rate_per_host_per_s,preferred_per_s,", &[""]);
}

#[test]
fn fig6() {
    runs("ksd-fig6", "burst,policed_per_s,", &[""]);
}

#[test]
fn fig7() {
    runs("ksd-fig7", "clients_per_class,class,", &["", "-times"]);
}

#[test]
fn fig10() {
    runs("ksd-fig10", "clients_per_class,class,", &[""]);
}

#[test]
fn tables_3_4() {
    runs("ksd-tables-3-4", "table,limit,class,", &["", "-url"]);
}

#[test]
fn fig11() {
    runs("ksd-fig11", "part,x,", &["", "-fig9", "-agent"]);
}

#[test]
fn tables_5_6() {
    runs("ksd-tables-5-6", "packet,rules,median_ns,", &[""]);
}

#[test]
fn fig12() {
    runs("ksd-fig12", "control,offered_per_s,", &["", "-times"]);
}

#[test]
fn flood() {
    runs("ksd-flood", "phase,syns_per_s,", &[""]);
}

#[test]
fn blocks() {
    runs("ksd-blocks", "round,cold_ns,", &[""]);
}
