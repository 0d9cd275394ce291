//! Each scenario of the Trickles paper with few clients, short times and small files: it runs through, and its files are there.
//! Needs root for the emulated link; the tidegate binary must be built.

#![allow(clippy::unwrap_used)] // clippy takes helpers of tests for no tests.

use assert_cmd::Command;

fn runs_through(name: &str) {
    let root = rustix::process::geteuid().is_root();
    assert!(root, "the emulated link makes network namespaces and TUN devices and needs root");
    let lab = env!("CARGO_BIN_EXE_tidegate-lab");
    let tidegate = std::path::Path::new(lab).with_file_name("tidegate");
    assert!(tidegate.is_file(), "{} is missing; cargo build -p tidegate", tidegate.display());
    let directory = tempfile::tempdir().unwrap();
    let run = Command::new(lab)
        .args(["run", name, "--quick", "--out"])
        .arg(directory.path())
        .arg("--tidegate")
        .arg(&tidegate)
        .assert();
    let output = run.get_output();
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    // Whether the claim holds is not for a debug build to say; that there is a verdict is.
    let verdict = [format!("{name}: holds: "), format!("{name}: does not hold: ")];
    assert!(verdict.iter().any(|start| said.starts_with(start)), "{said}{errors}");
    for suffix in ["csv", "svg", "json"] {
        assert!(directory.path().join(format!("{name}.{suffix}")).is_file(), "{name}.{suffix}");
    }
    assert!(!errors.contains("stays behind"), "{errors}");
}

macro_rules! scenarios {
    ($($test:ident: $name:literal,)*) => {
        $(#[test]
        fn $test() {
            runs_through($name);
        })*
    };
}

scenarios! {
    many_clients_share_a_link: "trickles-fig9",
    one_client_fetches_objects_of_some_sizes: "trickles-fig10",
    memory_is_measured_while_connections_stay_open: "trickles-fig11",
    processor_time_is_measured_with_and_without_offload: "trickles-fig12",
    both_kinds_of_flows_share_a_link: "trickles-fig13",
    objects_are_asked_for_at_once: "trickles-fig14",
    links_lose_packets: "trickles-fig15",
    a_server_is_killed: "trickles-fig16",
    packets_are_spread_over_servers: "trickles-fig17",
    packets_are_forged: "trickles-forged",
}

/// Namespaces and processes that belong to the lab with this number.
fn left_of(lab: u32) -> Vec<String> {
    let namespaces = std::fs::read_dir("/run/netns").into_iter().flatten().flatten();
    let names = namespaces.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut left: Vec<String> = names
        .filter(|name| name.split(|c: char| !c.is_ascii_digit()).any(|part| part == lab.to_string()))
        .collect();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let environment = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        let mark = format!("INTERRUPTED_BY={}", std::process::id());
        if environment.split(|&byte| byte == 0).any(|variable| variable == mark.as_bytes()) {
            left.push(format!("process {}", entry.file_name().to_string_lossy()));
        }
    }
    left
}

#[test]
fn an_interrupted_run_leaves_neither_namespaces_nor_processes_behind() {
    assert!(rustix::process::geteuid().is_root(), "the emulated link needs root");
    let lab = env!("CARGO_BIN_EXE_tidegate-lab");
    let directory = tempfile::tempdir().unwrap();
    let mut run = std::process::Command::new(lab)
        .args(["run", "trickles-fig17", "--out"])
        .arg(directory.path())
        .arg("--tidegate")
        .arg(std::path::Path::new(lab).with_file_name("tidegate"))
        .env("INTERRUPTED_BY", std::process::id().to_string())
        .spawn()
        .unwrap();
    let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
    // Both hosts, the lab itself and a server.
    while left_of(run.id()).len() < 4 {
        assert!(run.try_wait().unwrap().is_none(), "it has ended too soon");
        assert!(std::time::Instant::now() < until, "only {:?}", left_of(run.id()));
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let pid = rustix::process::Pid::from_child(&run);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(run.wait().unwrap().code(), Some(130));
    while !left_of(run.id()).is_empty() {
        assert!(std::time::Instant::now() < until, "{:?} stays behind", left_of(run.id()));
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}
