//! What the documents say is true: their commands exist, their configuration is accepted, their links lead somewhere.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tidegate_e2e::{Origin, Reply, Tidegate};

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

/// The pages that people read, by their names in the project.
fn pages() -> Vec<String> {
    let mut folders = vec![PathBuf::new(), "docs".into()];
    let mut pages = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(project().join(&folder)).unwrap() {
            let path = folder.join(entry.unwrap().file_name());
            if project().join(&path).is_dir() && folder.starts_with("docs") {
                folders.push(path);
            } else if path.extension().is_some_and(|ending| ending == "md") {
                pages.push(path.to_str().unwrap().to_owned());
            }
        }
    }
    assert!(pages.len() > 30, "{pages:?}");
    pages
}

/// What a page has between its fences.
fn blocks(page: &str) -> Vec<Vec<&str>> {
    let mut blocks = Vec::new();
    let mut lines = page.lines();
    while lines.any(|line| line.trim_start().starts_with("```")) {
        blocks
            .push(lines.by_ref().map(str::trim_start).take_while(|line| !line.starts_with("```")).collect());
    }
    blocks
}

/// The commands of this program in a page's examples: those behind a prompt, where there are prompts.
fn commands(page: &str) -> Vec<&str> {
    let behind_prompt = |line: &str| line.starts_with("$ ") || line.starts_with("# ");
    blocks(page)
        .into_iter()
        .flat_map(|block| {
            let has_prompts = block.iter().any(|line| behind_prompt(line));
            block
                .into_iter()
                .filter(move |line| behind_prompt(line) || !has_prompts)
                .map(|line| line.trim_start_matches(['$', '#', ' ']))
        })
        .filter_map(|line| line.strip_prefix("tidegate "))
        .collect()
}

#[test]
fn commands_in_documents_exist() {
    let mut count = 0;
    for page in pages().iter().filter(|page| !page.starts_with("docs/decisions")) {
        for line in commands(&read(page)) {
            // Commands and the names of options; what they are given is not looked at.
            let is_end = |word: &&str| matches!(*word, "#" | "--" | "|" | ">" | "&");
            let words: Vec<&str> = line.split_whitespace().take_while(|word| !is_end(word)).collect();
            if words[0].starts_with('-') {
                continue;
            }
            let help = |command: &[&str]| {
                let help = tidegate(&[command, &["--help"]].concat());
                assert!(help.status.success(), "{page}: {line}");
                String::from_utf8_lossy(&help.stdout).into_owned()
            };
            let mut text = help(&words[..1]);
            if text.contains("\nCommands:\n") && words.len() > 1 {
                text = help(&words[..2]);
            }
            for option in words.iter().filter(|word| word.starts_with('-')) {
                let name = option.split('=').next().unwrap();
                assert!(text.contains(name), "{page}: {line}: no {option} in\n{text}");
            }
            count += 1;
        }
    }
    assert!(count > 25, "only {count} commands were found");
}

/// How a heading is named in a link: in small letters, with hyphens for spaces, without what is no letter, digit or hyphen.
fn anchor(heading: &str) -> String {
    let heading = heading.trim_start_matches('#').trim().to_lowercase();
    heading
        .chars()
        .filter(|c| c.is_alphanumeric() || " -_".contains(*c))
        .map(|c| if c == ' ' { '-' } else { c })
        .collect()
}

#[test]
fn links_between_documents_lead_somewhere() {
    let mut count = 0;
    for page in pages() {
        let text = read(&page);
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            let (path, place) = link.split_once('#').unwrap_or((link, ""));
            let target = match path {
                "" => PathBuf::from(&page),
                path => Path::new(&page).parent().unwrap().join(path),
            };
            assert!(project().join(&target).exists(), "{page} links to {link}");
            if !place.is_empty() && target.extension().is_some_and(|ending| ending == "md") {
                let headings = read(target.to_str().unwrap());
                let is_there = headings.lines().any(|line| line.starts_with('#') && anchor(line) == place);
                assert!(is_there, "{page} links to {link}: no such heading");
            }
            count += 1;
        }
    }
    assert!(count > 100, "only {count} links were found");
}

#[test]
fn metrics_in_documents_exist() {
    let origin = Origin::start(|_| Reply::ok("x"));
    let listen = |protocol: &str| {
        let port = tidegate_e2e::free_port();
        format!("[[listen]]\naddress = \"127.0.0.1:{port}\"\nprotocol = \"{protocol}\"\n")
    };
    let listeners = ["https", "dhttp", "trickles"].map(listen).concat();
    let site = Tidegate::builder().origin(&origin).tables(&listeners).start();
    let metrics = site.ask_admin("/metrics").text();
    let pages = pages();
    let guides = pages.iter().filter(|page| page.starts_with("docs/guide") || !page.contains('/'));
    let unknown: Vec<(&String, String)> = guides
        .flat_map(|page| names(&read(page)).into_iter().map(move |name| (page, name)))
        .filter(|(_, name)| !metrics.contains(name.as_str()))
        .collect();
    assert!(unknown.is_empty(), "not among the metrics: {unknown:?}");
}

/// Names of metrics: not those of files or crates.
fn names(page: &str) -> Vec<String> {
    let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    page.split("tidegate_")
        .skip(1)
        .map(|rest| format!("tidegate_{}", rest.split(|c| !is_part(c)).next().unwrap()))
        .filter(|name| ["_total", "_seconds", "_bytes", "_open"].iter().any(|ending| name.ends_with(ending)))
        .collect()
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
