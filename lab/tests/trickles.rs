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
