//! What the documents say is true: their configuration is accepted, their links lead somewhere, what they name is
//! there, and their numbers are those of the program. What they say of the command line and of keys is checked beside
//! those, in `crates/tidegate/src/documents.rs`.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tidegate_e2e::{Origin, Page, Reply, Tidegate, commands_of, free_port, pages, project};

fn read(name: &str) -> String {
    std::fs::read_to_string(project().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The same with single spaces for whatever separates words.
fn read_as_prose(name: &str) -> String {
    read(name).split_whitespace().collect::<Vec<_>>().join(" ")
}

fn tidegate(arguments: &[&str]) -> Output {
    Command::new(Tidegate::binary()).args(arguments).stdin(Stdio::null()).output().unwrap()
}

/// Everything that is wrong at once, so that one run shows all there is to mend.
#[track_caller]
fn assert_none(wrong: &[String]) {
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// What speaks of the project as it is. Decisions, papers and the changelog say what was when they were written.
fn of_today() -> impl Iterator<Item = Page> {
    let is_history = |page: &Page| {
        page.name == "CHANGELOG.md"
            || ["docs/decisions/", "docs/papers/"].iter().any(|folder| page.name.starts_with(folder))
    };
    pages().into_iter().filter(move |page| !is_history(page))
}

#[test]
fn complete_configurations_in_documents_and_packaging_are_accepted() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("tidegate.toml");
    let mut configurations = vec![("packaging/tidegate.toml".to_owned(), read("packaging/tidegate.toml"))];
    for page in pages() {
        let complete = page.blocks().into_iter().filter(|block| {
            block.language == "toml" && !block.is_marked("part") && !block.is_marked("other TOML")
        });
        configurations.extend(complete.map(|block| (format!("{}:{}", page.name, block.line), block.text)));
    }
    assert!(configurations.len() > 4, "{configurations:?}");
    for (place, text) in configurations {
        std::fs::write(&file, &text).unwrap();
        let output = tidegate(&["check", file.to_str().unwrap()]);
        assert!(output.status.success(), "{place}: {}\n{text}", String::from_utf8_lossy(&output.stderr));
    }
}

/// The path in the project to which `link` leads from a page.
fn target(page: &str, link: &str) -> PathBuf {
    let mut path = Path::new(page).parent().unwrap().to_owned();
    for part in Path::new(link).components() {
        match part {
            Component::ParentDir => assert!(path.pop(), "{page} links out of the project: {link}"),
            Component::Normal(name) => path.push(name),
            _ => {}
        }
    }
    path
}

#[test]
fn links_between_documents_lead_somewhere() {
    let anchors: BTreeMap<String, Vec<String>> =
        pages().iter().map(|page| (page.name.clone(), page.anchors())).collect();
    let (mut checked, mut wrong) = (0, Vec::new());
    for page in pages() {
        for link in
            page.links().into_iter().filter(|link| !link.contains("://") && !link.starts_with("mailto:"))
        {
            checked += 1;
            let (path, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let path = if path.is_empty() { PathBuf::from(&page.name) } else { target(&page.name, path) };
            let known = anchors
                .get(path.to_str().unwrap())
                .is_some_and(|known| known.iter().any(|name| name == anchor));
            if !project().join(&path).exists() || !(anchor.is_empty() || known) {
                wrong.push(format!("{}: {link}", page.name));
            }
        }
    }
    assert_none(&wrong);
    assert!(checked > 100, "only {checked}");
}

#[test]
fn files_and_folders_named_in_documents_are_there() {
    const FOLDERS: [&str; 10] = [
        "bench/",
        "bpf/",
        "crates/",
        "docs/",
        "examples/",
        "fuzz/",
        "lab/",
        "packaging/",
        "scripts/",
        "tests/",
    ];
    let (mut checked, mut wrong) = (0, Vec::new());
    for page in of_today() {
        for span in page.spans() {
            let path = span.split_once(' ').map_or(span.as_str(), |(path, _)| path);
            if FOLDERS.iter().any(|folder| path.starts_with(folder)) && !path.contains('*') {
                checked += 1;
                wrong.extend((!project().join(path).exists()).then(|| format!("{}: `{span}`", page.name)));
            }
        }
    }
    assert_none(&wrong);
    assert!(checked > 40, "only {checked}");
}

/// The commands that a page shows in its code blocks or names in its prose.
fn commands(page: &Page) -> Vec<Vec<String>> {
    let shown = page.blocks().into_iter().flat_map(|block| block.commands());
    shown.chain(page.spans().iter().flat_map(|span| commands_of(span))).collect()
}

#[test]
fn targets_steps_and_packages_named_in_documents_exist() {
    let (makefile, steps, lock) = (read("Makefile"), read("scripts/test"), read("Cargo.lock"));
    let exists = |words: &[String]| {
        let mut rest = words[1..].iter().filter(|word| !word.contains('='));
        match words[0].as_str() {
            "make" => rest.all(|target| makefile.contains(&format!("\n{target}: "))),
            "scripts/test" => rest.all(|step| steps.contains(&format!("\nstep_{step}()"))),
            "cargo" => words
                .windows(2)
                .filter(|pair| pair[0] == "-p" && pair[1] != "CRATE")
                .all(|pair| lock.contains(&format!("\nname = \"{}\"\n", pair[1]))),
            _ => true,
        }
    };
    let mut wrong = Vec::new();
    for page in of_today() {
        let unknown = commands(&page).into_iter().filter(|words| !exists(words));
        wrong.extend(unknown.map(|words| format!("{}: {words:?}", page.name)));
    }
    assert_none(&wrong);
    let words = |text: &str| commands_of(text).remove(0);
    assert!(exists(&words("make run PREFIX=/usr")) && !exists(&words("make rum")));
    assert!(exists(&words("scripts/test format clippy")) && !exists(&words("scripts/test format clipy")));
    assert!(exists(&words("cargo test -p tidegate-http")) && !exists(&words("cargo test -p tidegate-htp")));
}

/// The metrics that documents name in backticks, with `tidegate_` before them.
fn metrics_in(page: &Page) -> Vec<String> {
    let is_name =
        |span: &&String| span.bytes().all(|byte| byte.is_ascii_lowercase() || b"_0123456789".contains(&byte));
    let named = page.spans().iter().filter(is_name).cloned().collect::<Vec<_>>();
    let is_metric = |span: &String| span.starts_with("tidegate_") || span.ends_with("_total");
    // Crates and libraries have names of the same form.
    let is_other = |span: &String| ["tidegate_cc", "tidegate_core", "tidegate_http"].contains(&span.as_str());
    let metrics = named.into_iter().filter(|span| is_metric(span) && !is_other(span));
    metrics
        .map(|name| if name.starts_with("tidegate_") { name } else { format!("tidegate_{name}") })
        .collect()
}

#[test]
fn metrics_named_in_documents_are_there() {
    let origin = Origin::start(|_| Reply::ok("hello"));
    let listen = |protocol: &str| {
        format!("[[listen]]\naddress = \"127.0.0.1:{}\"\nprotocol = \"{protocol}\"\n", free_port())
    };
    let tables = ["https", "dhttp", "trickles"].map(listen).concat();
    let server = Tidegate::builder().origin(&origin).tables(&tables).start();
    let shown = server.ask_admin("/metrics").text();
    // Those of the gate are there where kernel programs are.
    let of_gate = ["crates/gate/src/report.rs", "crates/tidegate/src/admin.rs"].map(read).concat();
    let is_there = |name: &str| {
        shown
            .lines()
            .any(|line| line.strip_prefix("# TYPE ").is_some_and(|line| line.split(' ').next() == Some(name)))
            || name
                .strip_prefix("tidegate_")
                .is_some_and(|name| name.starts_with("gate_") && of_gate.contains(&format!("\"{name}\"")))
    };
    let (mut checked, mut wrong) = (0, Vec::new());
    for page in of_today() {
        for name in metrics_in(&page) {
            checked += 1;
            wrong.extend((!is_there(&name)).then(|| format!("{}: `{name}`", page.name)));
        }
    }
    assert_none(&wrong);
    assert!(checked > 20, "only {checked}");
}

#[test]
fn environment_variables_named_in_documents_are_read() {
    let places = ["Makefile", "scripts", "crates", "tests/src", "tests/tests", "lab", "bench"];
    let sources = places.map(sources).concat();
    let is_letter = |letter: char| letter.is_ascii_uppercase() || letter == '_';
    let (mut checked, mut wrong) = (0, Vec::new());
    for page in of_today() {
        for span in
            page.spans().iter().filter(|span| span.contains("TIDEGATE_") || span.contains("TRICKLES_"))
        {
            for name in span.split(|letter| !is_letter(letter)).filter(|word| word.contains('_')) {
                checked += 1;
                let is_read = [format!("\"{name}\""), format!("{{{name}:"), format!("\n{name} ")];
                let is_there = is_read.iter().any(|text| sources.contains(text));
                wrong.extend((!is_there).then(|| format!("{}: `{name}`", page.name)));
            }
        }
    }
    assert_none(&wrong);
    assert!(checked > 5, "only {checked}");
}

/// Numbers of prose that are constants of the program: the page, its words, the folder or file of the sources, and the
/// words there. Who changes one is told of the other.
const NUMBERS: &[(&str, &str, &str, &str)] = &[
    (
        "README.md",
        "takes some 5 to 15 minutes on two cores",
        "Makefile",
        "takes some 5 to 15 minutes on two cores",
    ),
    (
        "README.md",
        "a slow demo site through tidegate on 127.0.0.1:8080",
        "scripts/run",
        "LISTEN:-127.0.0.1:8080",
    ),
    (
        "scripts/run",
        "50 ms of work",
        "examples/demo-origin",
        "PAGE_WORK: Duration = Duration::from_millis(50)",
    ),
    (
        "docs/guide/operating.md",
        "they are more than 16,384",
        "crates/accelerator",
        "WATCHES: usize = 16_384;",
    ),
    (
        "docs/guide/operating.md",
        "one of 32 KiB or more is sent",
        "crates/accelerator",
        "LARGE_BYTES: u64 = 32 * 1024;",
    ),
    (
        "docs/guide/operating.md",
        "at most 100 requests are answered at once",
        "crates/accelerator",
        "STREAMS: u32 = 100;",
    ),
    (
        "docs/guide/operating.md",
        "a second one, a second later",
        "crates/tidegate",
        "SECOND_SIGNAL_AFTER: Duration = Duration::from_secs(1);",
    ),
    ("docs/guide/operating.md", "serves 64 clients at once", "crates/tidegate", "CONNECTIONS: usize = 64;"),
    ("docs/guide/operating.md", "five times in ten seconds", "crates/accelerator", "LINES: u32 = 5;"),
    (
        "docs/guide/operating.md",
        "five times in ten seconds",
        "crates/accelerator",
        "WINDOW_MS: u64 = 10_000;",
    ),
    (
        "docs/guide/operating.md",
        "three such writes in a row",
        "crates/accelerator",
        "MOST_FAULTS: u32 = 3 * FAULT;",
    ),
    ("docs/guide/operating.md", "fewer than four are answered well", "crates/accelerator", "FAULT: u32 = 4;"),
    ("docs/guide/operating.md", "at most 1,000 fields", "crates/accelerator", "RESPONSE_FIELDS: u16 = 1000;"),
    (
        "docs/guide/operating.md",
        "16 while the request's content is on its way",
        "crates/accelerator",
        "INTERIM_RESPONSES: usize = 16;",
    ),
    (
        "docs/guide/operating.md",
        "up to 1,000 interim responses",
        "crates/accelerator",
        "MOST_INTERIM_RESPONSES: usize = 1000;",
    ),
    (
        "docs/guide/operating.md",
        "as half of `cache.memory` holds",
        "crates/accelerator",
        "PRELOAD_SHARE: u64 = 2;",
    ),
    (
        "docs/guide/operating.md",
        "what is stored; at most 10,000",
        "crates/tidegate",
        "MAX_ENTRIES: usize = 10_000;",
    ),
    (
        "docs/guide/operating.md",
        "the block list; at most 100,000",
        "crates/tidegate",
        "MAX_BLOCKS: usize = 100_000;",
    ),
    ("docs/guide/operating.md", "who does most; at most 256", "crates/tidegate", "MAX_TOP: usize = 256;"),
    (
        "docs/guide/operating.md",
        "has no answer after 5 s",
        "crates/accelerator",
        "LEAD_AGE: Duration = Duration::from_secs(5);",
    ),
    ("docs/guide/operating.md", "remembered for 60 s", "crates/accelerator", "NOT_SHARED_S: u64 = 60;"),
    (
        "docs/guide/operating.md",
        "10 s without a word",
        "crates/tidegate",
        "HERE_TIMEOUT: Duration = Duration::from_secs(10);",
    ),
    (
        "docs/guide/operating.md",
        "60 s more in which it does not say",
        "crates/tidegate",
        "PREPARED_TIMEOUT: Duration = Duration::from_secs(60);",
    ),
    (
        "docs/guide/operating.md",
        "60 s and a second for each 100 MiB",
        "crates/tidegate",
        "SERVING_TIMEOUT: Duration = Duration::from_secs(60);",
    ),
    (
        "docs/guide/operating.md",
        "60 s and a second for each 100 MiB",
        "crates/tidegate",
        "CACHE_BYTES_PER_S: u64 = 100 << 20;",
    ),
    (
        "docs/guide/operating.md",
        "and 12 minutes of all that together",
        "crates/tidegate",
        "MOST: Duration = Duration::from_secs(12 * 60);",
    ),
    (
        "docs/guide/defence.md",
        "within a sliding window of 10 s",
        "crates/defence",
        "WINDOW: Duration = Duration::from_secs(10);",
    ),
    (
        "docs/guide/defence.md",
        "401 and 403 count as eight",
        "crates/defence",
        "FAILED_LOGIN_WEIGHT: u32 = 8;",
    ),
    ("docs/guide/site.md", "count eight times as much", "crates/defence", "FAILED_LOGIN_WEIGHT: u32 = 8;"),
    (
        "docs/guide/troubleshooting.md",
        "more than 16 names in `Connection`",
        "crates/http",
        "MOST_OPTIONS: usize = 16;",
    ),
    (
        "docs/guide/troubleshooting.md",
        "has come by five times",
        "crates/accelerator",
        "MOST_ROUNDS: usize = 5;",
    ),
    ("docs/guide/defence.md", "four what a client gives up", "crates/defence", "GIVEN_UP_WEIGHT: u32 = 4;"),
    ("docs/guide/defence.md", "of fewer than 1,024 bytes", "crates/defence", "FEW_BYTES: u64 = 1_024;"),
    ("docs/guide/defence.md", "its last 16 parts", "crates/defence", "PARTS: usize = 16;"),
    ("docs/guide/defence.md", "more than 500 of them", "crates/defence", "MASS_ADDRESSES: u32 = 500;"),
    ("docs/guide/defence.md", "kept up for two seconds", "crates/defence", "RAPID_MS: u64 = 2_000;"),
    (
        "docs/guide/defence.md",
        "at most 20 s before it was found",
        "crates/defence",
        "NEWCOMER_MS: u64 = 20_000;",
    ),
    ("docs/guide/defence.md", "unsolved in three windows", "crates/defence", "UNSOLVED: u32 = 3;"),
    (
        "docs/guide/defence.md",
        "held back for a second; at most 1,024",
        "crates/accelerator",
        "MAX_HELD: usize = 1_024;",
    ),
    (
        "docs/guide/defence.md",
        "held for 30 s without an answer",
        "crates/accelerator",
        "TARPIT: Duration = Duration::from_secs(30);",
    ),
    ("docs/guide/defence.md", "has up to 20 a second", "crates/tidegate", "LOGGED_PER_S: u32 = 20;"),
    ("docs/guide/defence.md", "up to four programs of yours", "crates/tidegate", "MAX_LISTENERS: usize = 4;"),
    ("docs/protocol/classifier.md", "up to 8,192 wait", "crates/defence", "MAX_WAITING: usize = 8_192;"),
    ("docs/protocol/classifier.md", "at most 120 bytes", "crates/defence", "TARGET_BYTES: usize = 120;"),
    (
        "docs/protocol/classifier.md",
        "a line of more than 4,096 bytes",
        "crates/tidegate",
        "LINE_BYTES: u64 = 4_096;",
    ),
    ("docs/guide/gate.md", "It holds 1,000,000 addresses", "bpf/include/abi.h", "TG_MAX_BLOCKED 1000000"),
    (
        "docs/guide/gate.md",
        "and 65,536 prefixes of each family",
        "bpf/include/abi.h",
        "TG_MAX_BLOCKED_PREFIXES 65536",
    ),
    ("docs/guide/gate.md", "a path is compared up to 120 bytes", "bpf/include/abi.h", "TG_PATH_BYTES 120"),
    ("docs/guide/gate.md", "and a cookie up to 96", "bpf/include/abi.h", "TG_COOKIE_BYTES 96"),
    ("docs/guide/gate.md", "8 priorities", "bpf/include/abi.h", "TG_MAX_CLASSES 8"),
    ("docs/guide/gate.md", "64 listening addresses", "bpf/include/abi.h", "TG_MAX_QUEUES 64"),
    ("docs/guide/gate.md", "32 rules with a suffix", "bpf/include/abi.h", "TG_MAX_PATTERNS 32"),
    ("docs/guide/gate.md", "at most eight such credits", "bpf/include/abi.h", "TG_CREDITS_MAX 8"),
    (
        "docs/guide/conditioning.md",
        "at most 131072 connections",
        "crates/conditioning",
        "SLOTS: u32 = 131_072;",
    ),
    ("docs/guide/conditioning.md", "and 16 `--listen`", "crates/conditioning", "MOST_LISTENERS: usize = 16;"),
    (
        "docs/guide/conditioning.md",
        "a head at most 32768 bytes",
        "crates/conditioning",
        "INLINE_BYTES: usize = 32 * 1024;",
    ),
    (
        "docs/guide/conditioning.md",
        "at most 65536 descriptors",
        "crates/conditioning",
        "DESCRIPTORS: usize = 65_536;",
    ),
    (
        "docs/guide/conditioning.md",
        "more than 8192 bytes in several vectors",
        "crates/conditioning",
        "HEAD_LOOKED_AT: usize = 8192;",
    ),
    (
        "docs/guide/conditioning.md",
        "with at most 4096 bytes",
        "crates/conditioning",
        "PEEKED_BYTES: usize = 4096;",
    ),
    (
        "docs/guide/conditioning.md",
        "or after 100 requests in a row",
        "crates/conditioning",
        "IN_A_ROW: u32 = 100;",
    ),
    ("docs/guide/dhttp.md", "the site works at 64 of its requests", "crates/dhttp", "per_client: 64,"),
    ("docs/guide/trickles.md", "and may have 8 MiB", "crates/tidegate", "MAX_WHOLE_BYTES: u64 = 8 << 20;"),
    (
        "docs/guide/trickles.md",
        "no more than 16,384 of them",
        "crates/tidegate",
        "KEPT_DEEDS: usize = 16_384;",
    ),
];

/// A file, or all sources below a folder.
fn files(path: &Path) -> Vec<PathBuf> {
    if path.is_dir() {
        return std::fs::read_dir(path).unwrap().flat_map(|entry| files(&entry.unwrap().path())).collect();
    }
    let name = path.file_name().unwrap().to_str().unwrap();
    let is_source = [".rs", ".h", ".c"].iter().any(|ending| name.ends_with(ending)) || !name.contains('.');
    if is_source { vec![path.to_owned()] } else { Vec::new() }
}

/// All of their text: a constant may move to another file.
fn sources(place: &str) -> String {
    files(&project().join(place)).iter().map(|file| std::fs::read_to_string(file).unwrap()).collect()
}

#[test]
fn numbers_in_documents_are_those_of_the_program() {
    let mut folders: BTreeMap<&str, String> = BTreeMap::new();
    let mut wrong = Vec::new();
    for (page, words, place, source) in NUMBERS {
        if !read_as_prose(page).contains(words) {
            wrong.push(format!("{page} does not say {words:?}, which is to be so by {source:?} in {place}"));
        }
        if !folders.entry(place).or_insert_with(|| sources(place)).contains(source) {
            wrong.push(format!("{place} has no {source:?}: is {words:?} in {page} still true?"));
        }
    }
    assert_none(&wrong);
    let version = String::from_utf8(tidegate(&["--version"]).stdout).unwrap();
    assert!(
        read("Cargo.toml").contains(&format!("version = \"{}\"", version.trim().rsplit(' ').next().unwrap()))
    );
}

/// One server's row in a scenario of docs/benchmarks.md: the medians of requests per second and of the ratio to nginx.
fn measured(scenario: &str, server: &str) -> (String, String) {
    let page = read("docs/benchmarks.md");
    let section = page.split(&format!("\n## {scenario}\n")).nth(1).unwrap_or_else(|| panic!("no {scenario}"));
    let row = section.lines().find_map(|line| line.strip_prefix(&format!("| {server} | ")));
    let median = |cell: &str| cell.trim().split(' ').next().unwrap().to_owned();
    let cells: Vec<String> =
        row.unwrap_or_else(|| panic!("{scenario}: no {server}")).split('|').map(median).collect();
    (cells[0].clone(), cells[2].clone())
}

/// As people write it: 12,345.
fn with_commas(number: &str) -> String {
    let (thousands, rest) = number.split_at(number.len().saturating_sub(3));
    if thousands.is_empty() { rest.to_owned() } else { format!("{},{rest}", with_commas(thousands)) }
}

#[test]
fn the_readme_says_of_speed_what_was_measured() {
    let cached = ["612 B, 32 connections", "612 B, 512 connections", "612 B, 10,000 connections"];
    let others = ["8 KiB, 32 connections", "100 KiB, 32 connections", "612 B, Connection: close"];
    let http2 = ["612 B over HTTP/2, 32 connections", "8 KiB over HTTP/2, 32 connections"];
    let misses = ["612 B misses, 32 connections", "612 B misses, 512 connections"];
    let ratios = |scenarios: &[&str], server| {
        scenarios.iter().map(|scenario| measured(scenario, server).1).collect::<Vec<_>>().join(" / ")
    };
    let mut cells = vec![ratios(&cached, "tidegate")];
    cells.extend(others.map(|scenario| measured(scenario, "tidegate").1));
    cells.extend([
        ratios(&http2, "tidegate"),
        ratios(&misses, "tidegate"),
        ratios(&misses, "tidegate, pipelining"),
    ]);
    let row = format!("| {} |", cells.join(" | "));
    let behind = [&cached[..], &others, &http2, &misses].concat().into_iter().filter_map(|scenario| {
        let [own, nginx] = ["tidegate", "nginx"].map(|server| measured(scenario, server).0);
        let is_behind = own.parse::<u64>().unwrap() < nginx.parse::<u64>().unwrap();
        is_behind.then(|| format!("{scenario} ({} to {})", with_commas(&own), with_commas(&nginx)))
    });
    let behind: Vec<String> = behind.collect();
    let sentence = format!("fewer requests per second than nginx in: {}.", behind.join("; "));
    let readme = read_as_prose("README.md");
    assert!(readme.contains(&row), "README.md has another row than docs/benchmarks.md gives:\n{row}");
    assert!(behind.is_empty() || readme.contains(&sentence), "README.md does not say:\n{sentence}");
}

/// Assertions that a time by the clock on the wall was short enough, which a busy machine makes untrue.
fn timed_assertions(text: &str) -> Vec<&str> {
    let timed = text.lines().filter_map(|line| line.trim().strip_prefix("let ")?.strip_suffix(".elapsed();"));
    let names: Vec<&str> = timed.filter_map(|timed| timed.split(" = ").next()).collect();
    let is_bounded = |line: &str| {
        line.contains(".elapsed() <") || names.iter().any(|name| line.contains(&format!("({name} <")))
    };
    text.lines().filter(|line| line.contains("assert!(") && is_bounded(line)).collect()
}

#[test]
fn nothing_is_asserted_to_be_fast() {
    let timed = "let (a, took) = (1, 2);\nlet took = began.elapsed();\nassert!(took < LIMIT);\nassert!(took >= LIMIT);";
    assert_eq!(timed_assertions(timed), ["assert!(took < LIMIT);"]);
    assert_eq!(timed_assertions("assert!(x.elapsed() < LIMIT);\nif x.elapsed() < LIMIT {").len(), 1);
    // An hour by a clock that is set by hand, in less than ten minutes.
    let is_known = |line: &&str| line.contains("nobody waited for an hour");
    for file in ["crates", "tests/src", "tests/tests", "tests/ports", "lab", "bench"]
        .iter()
        .flat_map(|folder| files(&project().join(folder)))
    {
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        let found: Vec<&str> = timed_assertions(&text).into_iter().filter(|line| !is_known(line)).collect();
        assert!(found.is_empty() || file.ends_with("documents.rs"), "{}: {found:?}", file.display());
    }
}
