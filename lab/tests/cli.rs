//! The command line: what it prints, writes and exits with.

#![allow(clippy::unwrap_used)] // clippy takes helpers of tests for no tests.

use std::path::Path;

use assert_cmd::Command;

fn lab(arguments: &[&str]) -> assert_cmd::assert::Assert {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate-lab"));
    command.env_remove("TIDEGATE_BIN").args(arguments).assert()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn list_prints_a_name_and_a_claim_a_row() {
    let list = text(&lab(&["list"]).success().get_output().stdout);
    assert!(list.lines().all(|line| line.split_whitespace().count() > 3), "{list}");
    let json = text(&lab(&["list", "--json"]).success().get_output().stdout);
    let rows: Vec<serde_json::Value> = serde_json::from_str(&json).unwrap();
    assert_eq!(rows.len(), list.lines().count());
    for (row, line) in rows.iter().zip(list.lines()) {
        assert!(
            line.starts_with(row["name"].as_str().unwrap()) && line.ends_with(row["claim"].as_str().unwrap())
        );
    }
}

#[test]
fn help_shows_an_example_for_each_command() {
    for arguments in [&["--help"][..], &["list", "--help"], &["run", "--help"], &["report", "--help"]] {
        let help = text(&lab(arguments).success().get_output().stdout);
        assert!(help.contains("Example") && help.contains("tidegate-lab "), "{arguments:?}: {help}");
    }
}

#[test]
fn bad_usage_exits_with_2_and_says_what_is_wrong() {
    for (arguments, expected) in [
        (&["run"][..], "NAME"),
        (&["run", "tempesta-fig4x", "--quick"], "did you mean tempesta-fig4?"),
        (&["run", "tempesta-fig5", "--slow"], "--slow"),
        (&[], "Usage"),
    ] {
        let errors = text(&lab(arguments).code(2).get_output().stderr);
        assert!(errors.contains(expected), "{arguments:?}: {errors}");
    }
}

#[test]
fn a_missing_tidegate_is_one_clear_line_and_exit_code_1() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().to_str().unwrap();
    let run =
        lab(&["run", "tempesta-fig4", "--quick", "--out", out, "--tidegate", "/nowhere/tidegate"]).code(1);
    let errors = text(&run.get_output().stderr);
    let expected = "error: tempesta-fig4: /nowhere/tidegate is not there; build it with: ";
    assert!(errors.lines().any(|line| line.starts_with(expected)), "{errors}");
    assert!(run.get_output().stdout.is_empty(), "no verdict without a run");
}

#[test]
fn a_run_writes_figures_and_plot_its_exit_code_is_the_verdict_and_report_makes_a_page() {
    let directory = tempfile::tempdir().unwrap();
    let (results, pages) = (directory.path().join("results"), directory.path().join("pages"));
    let results_name = results.to_str().unwrap();
    let run = lab(&["run", "tempesta-fig5", "--quick", "--out", results_name]);
    let output = run.get_output();
    let verdict = text(&output.stdout);
    assert_eq!(verdict.lines().count(), 1, "{verdict}");
    let expected = if verdict.starts_with("tempesta-fig5: holds: ") { 0 } else { 1 };
    assert!(expected == 0 || verdict.starts_with("tempesta-fig5: does not hold: "), "{verdict}");
    assert_eq!(output.status.code(), Some(expected));
    assert!(text(&output.stderr).contains("tempesta-fig5 [5/5]"), "progress is on standard error");

    let csv = std::fs::read_to_string(results.join("tempesta-fig5.csv")).unwrap();
    assert!(csv.starts_with("bytes,round,parser,ns_per_request\n128,1,"), "{csv}");
    assert!(std::fs::read_to_string(results.join("tempesta-fig5.svg")).unwrap().contains("</svg>"));

    lab(&["report", "--results", results_name, "--pages", pages.to_str().unwrap()]).success();
    let page = std::fs::read_to_string(pages.join("tempesta.md")).unwrap();
    assert!(page.contains(verdict.trim_end().rsplit(": ").next().unwrap()), "{page}");
    assert!(pages.join("tempesta/tempesta-fig5.svg").is_file());
}

#[test]
fn a_directory_that_cannot_be_made_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, "").unwrap();
    let out = file.join("results");
    let run = lab(&["run", "tempesta-fig5", "--quick", "--out", out.to_str().unwrap()]).code(1);
    let errors = text(&run.get_output().stderr);
    assert!(errors.contains(&format!("cannot write {}", out.display())), "{errors}");
}

#[test]
fn a_report_without_results_says_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let name = |path: &Path| path.to_str().unwrap().to_owned();
    let results = name(directory.path());
    let errors =
        text(&lab(&["report", "--results", &results, "--pages", &results]).code(1).get_output().stderr);
    assert!(errors.contains("run a scenario first"), "{errors}");
}
