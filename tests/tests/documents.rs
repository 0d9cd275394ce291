//! What the documents say is true: their commands exist, their configuration is accepted, their links lead somewhere.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tidegate_e2e::Tidegate;

fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn read(name: &str) -> String {
    std::fs::read_to_string(project().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn tidegate(arguments: &[&str]) -> Output {
    Command::new(Tidegate::binary()).args(arguments).stdin(Stdio::null()).output().unwrap()
}

#[test]
fn configurations_in_documents_and_packaging_are_accepted() {
    let readme = read("README.md");
    let mut configurations: Vec<String> = readme
        .split("<!-- checked: config -->\n```toml\n")
        .skip(1)
        .map(|rest| rest.split("```").next().unwrap().to_owned())
        .collect();
    assert!(!configurations.is_empty(), "README.md has no checked configuration");
    configurations.push(read("packaging/tidegate.toml"));
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("tidegate.toml");
    for text in configurations {
        std::fs::write(&file, &text).unwrap();
        let output = tidegate(&["check", file.to_str().unwrap()]);
        assert!(output.status.success(), "{}\n{text}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn commands_in_the_readme_exist() {
    for line in read("README.md").lines().filter_map(|line| line.strip_prefix("$ tidegate ")) {
        let words: Vec<&str> = line.split_whitespace().take_while(|word| *word != "#").collect();
        // Commands and the names of options; what they are given is not looked at.
        let nested = usize::from(words[0] == "cache");
        let command = &words[..=nested];
        let help = tidegate(&[command, &["--help"]].concat());
        assert!(help.status.success(), "{line}");
        let help = String::from_utf8_lossy(&help.stdout).into_owned();
        for option in words.iter().filter(|word| word.starts_with("--")) {
            assert!(help.contains(option), "{line}: no {option} in\n{help}");
        }
    }
}

#[test]
fn links_between_documents_lead_somewhere() {
    for name in ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"] {
        for link in read(name).split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let path = link.split('#').next().unwrap();
            assert!(
                path.contains("://") || path.is_empty() || project().join(path).exists(),
                "{name} links to {link}"
            );
        }
    }
}

#[test]
fn numbers_in_documents_are_those_of_the_program() {
    let work = read("examples/demo-origin/src/pages.rs");
    assert!(work.contains("PAGE_WORK: Duration = Duration::from_millis(50)"));
    assert!(read("scripts/run").contains("50 ms of work"));
    assert!(read("scripts/run").contains("LISTEN:-127.0.0.1:8080"));
    assert!(read("README.md").contains("a slow demo site through tidegate on 127.0.0.1:8080"));
    let version = String::from_utf8(tidegate(&["--version"]).stdout).unwrap();
    assert!(
        read("Cargo.toml").contains(&format!("version = \"{}\"", version.trim().rsplit(' ').next().unwrap()))
    );
}

#[test]
fn manual_pages_and_completions_are_written() {
    let directory = tempfile::tempdir().unwrap();
    let output = tidegate(&["man", "--out", directory.path().to_str().unwrap()]);
    assert!(output.status.success(), "{output:?}");
    assert!(directory.path().join("tidegate.1").is_file());
    for shell in ["bash", "zsh", "fish"] {
        let output = tidegate(&["completions", shell]);
        assert!(output.status.success() && output.stdout.len() > 500, "{shell}: {output:?}");
    }
}
