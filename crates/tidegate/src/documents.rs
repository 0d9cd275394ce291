//! What the documents say of the command line and of the configuration is so, and manual pages and completions have
//! all of it.

use std::collections::BTreeSet;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory, Parser};
use serde_json::Value;
use tidegate_conditioning::filters;
use tidegate_defence::{Action, Rule};
use tidegate_e2e::{Page, commands_of, pages};

use crate::cli::Cli;
use crate::{config, man};

/// What somebody reads who runs tidegate or works on it. Pages of decisions and papers say what was when they were
/// written.
fn living() -> Vec<Page> {
    let is_living =
        |page: &Page| !["docs/decisions/", "docs/papers/"].iter().any(|folder| page.name.starts_with(folder));
    let living: Vec<_> = pages().into_iter().filter(is_living).collect();
    assert!(living.len() > 10, "{living:?}");
    living
}

fn page(name: &str) -> Page {
    pages().into_iter().find(|page| page.name == name).unwrap_or_else(|| panic!("there is no {name}"))
}

/// What a command line is refused for, if it begins with `tidegate`. Neither help that is asked for nor a word in
/// capitals in the place of a value is a reason.
fn refusal(words: &[String]) -> Option<clap::Error> {
    let is_ours = words.first().is_some_and(|word| word == "tidegate");
    let error = Cli::try_parse_from(words).err().filter(|_| is_ours)?;
    let is_capital = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_uppercase());
    let is_reason = match (error.kind(), error.get(ContextKind::InvalidValue)) {
        (ErrorKind::DisplayHelp | ErrorKind::DisplayVersion, _) => false,
        (ErrorKind::ValueValidation, Some(ContextValue::String(value))) => !is_capital(value),
        _ => true,
    };
    is_reason.then_some(error)
}

/// Every command, and what leads to it.
fn commands() -> Vec<(Vec<String>, Command)> {
    fn add(above: &[String], command: &Command, found: &mut Vec<(Vec<String>, Command)>) {
        let path = [above, &[command.get_name().to_owned()]].concat();
        command.get_subcommands().for_each(|below| add(&path, below, found));
        found.push((path, command.clone()));
    }
    let mut program = Cli::command().disable_help_subcommand(true);
    program.build();
    let mut found = Vec::new();
    add(&[], &program, &mut found);
    found
}

/// The long options of a command that its help shows, with `--`.
fn options(command: &Command) -> impl Iterator<Item = String> {
    let shown = command.get_arguments().filter(|argument| !argument.is_hide_set());
    shown.filter_map(|argument| Some(format!("--{}", argument.get_long()?)))
}

/// Everything that is wrong at once, so that one run shows all there is to mend.
#[track_caller]
fn assert_none(wrong: &[String]) {
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn code_blocks_say_what_is_in_them_so_that_it_is_checked() {
    const KNOWN: &[&str] = &["console", "sh", "toml", "text", "mermaid", "ini", "hex", "vectors"];
    let is_command = |line: &&str| line.trim_start_matches(['$', '#', ' ']).starts_with("tidegate ");
    let mut wrong = Vec::new();
    for page in pages() {
        for block in page.blocks() {
            let place = format!("{}:{}", page.name, block.line);
            let language = block.language.as_str();
            if !KNOWN.contains(&language) {
                wrong.push(format!("{place}: {language:?} is none of {KNOWN:?}"));
            }
            let command =
                block.text.lines().find(is_command).filter(|_| !["console", "sh"].contains(&language));
            wrong.extend(
                command.map(|line| format!("{place}: {line}: checked in blocks of console or sh only")),
            );
        }
    }
    assert_none(&wrong);
}

#[test]
fn commands_in_documents_are_understood() {
    let (mut checked, mut wrong) = (0, Vec::new());
    for page in living() {
        for block in page.blocks() {
            for words in block.commands() {
                checked += usize::from(words[0] == "tidegate");
                let place = format!("{}:{}", page.name, block.line);
                wrong.extend(refusal(&words).map(|error| format!("{place}: {words:?}: {error}")));
            }
        }
    }
    assert_none(&wrong);
    assert!(checked > 30, "only {checked}");
}

#[test]
fn commands_named_in_prose_exist() {
    // What is left out, and words in the place of values, are no errors there.
    let is_open = |error: &clap::Error| match error.kind() {
        ErrorKind::MissingRequiredArgument | ErrorKind::MissingSubcommand | ErrorKind::ValueValidation => {
            true
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => true,
        ErrorKind::InvalidValue => {
            error.get(ContextKind::InvalidValue) == Some(&ContextValue::String(String::new()))
        }
        _ => false,
    };
    // Labels that keys are derived with.
    let is_label = |page: &Page, span: &str| {
        page.name == "docs/protocol/trickles.md" && span.starts_with("tidegate trickles")
    };
    let (mut checked, mut wrong) = (0, Vec::new());
    for page in living() {
        for span in page.spans().iter().filter(|span| span.starts_with("tidegate ") && !is_label(&page, span))
        {
            checked += 1;
            let errors = commands_of(span).into_iter().filter_map(|words| refusal(&words));
            wrong.extend(
                errors
                    .filter(|error| !is_open(error))
                    .map(|error| format!("{}: `{span}`: {error}", page.name)),
            );
        }
    }
    assert_none(&wrong);
    assert!(checked > 50, "only {checked}");
}

#[test]
fn options_named_in_prose_exist() {
    // Of certbot.
    const FOREIGN: [&str; 1] = ["--deploy-hook"];
    let known: BTreeSet<String> = commands().iter().flat_map(|(_, command)| options(command)).collect();
    let mut wrong = Vec::new();
    for page in living() {
        for span in page.spans().iter().filter(|span| span.starts_with("--")) {
            for word in span.split(' ').filter(|word| word.starts_with("--")) {
                let name = word.split('=').next().unwrap_or(word);
                if !known.contains(name) && !FOREIGN.contains(&name) {
                    wrong.push(format!("{}: `{span}`: no {name}", page.name));
                }
            }
        }
    }
    assert_none(&wrong);
}

/// What is wrong with a text in backticks that names a table, as `[cache]`, or a key, as `cache.path`; `None` where it
/// names neither.
fn wrong_key(schema: &Value, span: &str) -> Option<&'static str> {
    let below = |section: &Value, key: &str| {
        let inner = if section["items"].is_object() { &section["items"] } else { section };
        inner["properties"][key].clone()
    };
    let find = |path: &str| path.split('.').fold(schema.clone(), |section, key| below(&section, key));
    let is_path = |text: &str| text.bytes().all(|byte| byte.is_ascii_lowercase() || b"._".contains(&byte));
    let (name, is_list) = match span.strip_prefix("[[").and_then(|rest| rest.strip_suffix("]]")) {
        Some(name) => (name, true),
        None => (span.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or_default(), false),
    };
    if !name.is_empty() && is_path(name) {
        let table = find(name);
        return match table["items"]["properties"].is_object() {
            _ if table.is_null() => Some("no such table"),
            lists if lists != is_list => Some("[[ ]] is for tables of which there may be several"),
            _ => None,
        };
    }
    let path = span.split(" = ").next().unwrap_or(span);
    let table = path.split_once('.').filter(|_| is_path(path)).map(|(table, _)| find(table));
    (table.is_some_and(|table| !table.is_null()) && find(path).is_null()).then_some("no such key")
}

#[test]
fn tables_and_keys_named_in_prose_exist() {
    let schema: Value = serde_json::from_str(&config::schema()).unwrap();
    let mut wrong = Vec::new();
    for page in living() {
        let found = page.spans().into_iter().filter_map(|span| Some((wrong_key(&schema, &span)?, span)));
        wrong.extend(found.map(|(why, span)| format!("{}: `{span}`: {why}", page.name)));
    }
    assert_none(&wrong);
    let judged =
        ["[cach]", "[[cache]]", "[listen]", "[[listen]]", "cache.memory = \"1MiB\"", "cache.memry", "a.b"];
    assert_eq!(
        judged.map(|span| wrong_key(&schema, span).is_some()),
        [true, true, true, false, false, true, false]
    );
}

#[test]
fn examples_of_help_are_understood() {
    for (path, command) in commands() {
        if command.has_subcommands() || command.is_hide_set() {
            continue;
        }
        let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        let examples: Vec<_> =
            help.lines().filter(|line| line.starts_with("  ")).flat_map(commands_of).collect();
        let own = |words: &&Vec<String>| words.starts_with(&path);
        assert!(examples.iter().any(|words| own(&words)), "{path:?} has no example");
        for words in examples {
            if let Some(error) = refusal(&words) {
                panic!("{words:?}: {error}");
            }
        }
    }
}

#[test]
fn manual_pages_have_every_command_and_option() {
    let folder = tempfile::tempdir().unwrap();
    let written = man::write_pages(Cli::command(), folder.path()).unwrap();
    let shown: Vec<_> = commands().into_iter().filter(|(_, command)| !command.is_hide_set()).collect();
    assert_eq!(written, shown.len());
    for (path, command) in shown {
        let name = format!("{}.1", path.join("-"));
        let text = std::fs::read_to_string(folder.path().join(&name))
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let text = text.replace("\\-", "-");
        for option in options(&command) {
            assert!(text.contains(&option), "{name}: no {option}");
        }
        for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
            assert!(
                text.contains(&format!("{}-{}", path.join("-"), below.get_name())),
                "{name}: no {}",
                below.get_name()
            );
        }
    }
}

#[test]
fn completions_have_every_command_and_option() {
    use clap_complete::Shell;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut Cli::command(), "tidegate", &mut script);
        let script = String::from_utf8(script).unwrap();
        for (path, command) in commands().iter().filter(|(_, command)| !command.is_hide_set()) {
            assert!(script.contains(command.get_name()), "{shell}: no {path:?}");
            for option in options(command) {
                let written =
                    if shell == Shell::Fish { option.replacen("--", "-l ", 1) } else { option.clone() };
                assert!(script.contains(&written), "{shell}: {path:?}: no {option}");
            }
        }
    }
}

/// The cells of the rows of all tables of a page.
fn rows(page: &Page) -> Vec<Vec<String>> {
    let rows = page.text.lines().filter_map(|line| line.strip_prefix('|')?.strip_suffix('|'));
    rows.map(|row| row.split('|').map(|cell| cell.trim().replace('`', "")).collect()).collect()
}

#[test]
fn the_guide_names_every_classifier_with_its_limit_and_action() {
    let page = page("docs/guide/defence.md");
    for rule in Rule::DEFAULTS {
        let name = rule.reason.name();
        let row = rows(&page).into_iter().find(|row| row[0] == name).unwrap_or_else(|| panic!("no {name}"));
        let action = match rule.action {
            Action::Block => "block",
            Action::Drop => "drop",
            Action::Refuse => "refuse",
            other => panic!("{name}: {other:?} is not in the guide"),
        };
        assert_eq!((row[2].replace(',', ""), row[3].as_str()), (rule.limit.to_string(), action), "{name}");
    }
}

#[test]
fn the_guide_names_every_filter_of_a_chain_and_no_argument_that_is_not_there() {
    let page = page("docs/guide/conditioning.md");
    for kind in filters::KINDS {
        let row = rows(&page)
            .into_iter()
            .find(|row| row[0] == kind.name)
            .unwrap_or_else(|| panic!("no {}", kind.name));
        for key in row[2].split(", ").filter(|key| !key.is_empty()) {
            assert!(kind.arguments.iter().any(|argument| argument.key == key), "{}: no {key}", kind.name);
        }
    }
}
