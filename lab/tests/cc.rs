//! Every scenario of the conditioning paper runs, small, to its verdict. Whether the claims hold is not asked here: the
//! tests share the machine, and are built without optimization.
//!
//! Needs the binaries and libraries of the workspace: `cargo build --workspace --bins --tests`, as `make test` does.

#![allow(clippy::unwrap_used)] // clippy takes helpers of tests for no tests.

use std::path::{Path, PathBuf};

use assert_cmd::Command;

fn tidegate() -> PathBuf {
    let beside = Path::new(env!("CARGO_BIN_EXE_tidegate-lab")).with_file_name("tidegate");
    let binary = std::env::var_os("TIDEGATE_BIN").map_or(beside, PathBuf::from);
    assert!(binary.is_file(), "{} is missing: cargo build --workspace --bins", binary.display());
    binary
}

fn runs(name: &str) {
    let directory = tempfile::tempdir().unwrap();
    let mut lab = Command::new(env!("CARGO_BIN_EXE_tidegate-lab"));
    lab.args(["run", name, "--quick", "--out"]).arg(directory.path()).arg("--tidegate").arg(tidegate());
    let output = lab.output().unwrap();
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(said.starts_with(&format!("{name}: ")) && !errors.contains("error: "), "{said}{errors}");
    for ending in ["csv", "svg", "json"] {
        let file = directory.path().join(format!("{name}.{ending}"));
        assert!(std::fs::read(&file).is_ok_and(|content| content.len() > 40), "{}", file.display());
    }
}

#[test]
fn one_file_and_a_mix_are_served_bare_and_conditioned() {
    runs("cc-fig4");
    runs("cc-fig6");
}

#[test]
fn chains_of_one_to_ten_filters_serve() {
    runs("cc-fig8");
    runs("cc-fig9");
}

#[test]
fn attackers_hold_their_connections_while_others_are_served() {
    runs("cc-fig10");
    runs("cc-fig12");
}

#[test]
fn an_infrequent_client_is_served_beside_downloads() {
    runs("cc-fig11");
}

#[test]
fn slashes_kills_and_lines_are_counted() {
    runs("cc-beck");
    runs("cc-kill");
    runs("cc-table1");
}
