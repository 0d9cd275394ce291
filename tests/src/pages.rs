//! The project's documents, read as far as tests ask: code blocks, code spans, links, and what links may lead to.

use std::path::{Path, PathBuf};

/// The folder with README.md.
pub fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// One document.
#[derive(Debug)]
pub struct Page {
    /// Its path in the project.
    pub name: String,
    /// What it says, as Markdown.
    pub text: String,
}

/// What stands between two fences.
#[derive(Debug)]
pub struct Block {
    /// The opening fence's line in the page, from 1 on.
    pub line: usize,
    /// What the opening fence names: `toml`, `console`.
    pub language: String,
    /// The last line before that is not empty: a comment there says what the block is.
    pub before: String,
    /// The lines within.
    pub text: String,
}

/// Every document of the project, in the order of their names.
///
/// # Panics
/// When one cannot be read.
pub fn pages() -> Vec<Page> {
    let mut found = Vec::new();
    collect(&project(), "", &mut found);
    found.sort_by(|a: &Page, b| a.name.cmp(&b.name));
    found
}

/// Those below `folder`, whose path in the project is `prefix`; not what was built, installed or is hidden.
fn collect(folder: &Path, prefix: &str, found: &mut Vec<Page>) {
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let file = entry.file_name().into_string().unwrap();
        let name = format!("{prefix}{file}");
        if entry.file_type().unwrap().is_dir() {
            if !["target", "node_modules"].contains(&file.as_str()) && !file.starts_with('.') {
                collect(&entry.path(), &format!("{name}/"), found);
            }
        } else if file.ends_with(".md") {
            found.push(Page { name, text: std::fs::read_to_string(entry.path()).unwrap() });
        }
    }
}

impl Page {
    /// Its code blocks.
    pub fn blocks(&self) -> Vec<Block> {
        self.split().0
    }

    /// What it has in backticks outside of code blocks, line ends as spaces.
    pub fn spans(&self) -> Vec<String> {
        split_spans(&self.split().1).0
    }

    /// What it links to, pictures among it.
    pub fn links(&self) -> Vec<String> {
        let (_, prose) = split_spans(&self.split().1);
        let targets = prose.split("](").skip(1).filter_map(|rest| rest.split([')', ' ']).next());
        targets.map(str::to_owned).collect()
    }

    /// The names by which links lead to its headings, as GitHub forms them.
    pub fn anchors(&self) -> Vec<String> {
        let (_, prose) = self.split();
        let mut anchors: Vec<String> = Vec::new();
        for heading in prose.lines().filter(|line| line.starts_with('#')) {
            let plain = anchor(heading.trim_start_matches('#'));
            let mut name = plain.clone();
            for number in 1.. {
                if !anchors.contains(&name) {
                    break;
                }
                name = format!("{plain}-{number}");
            }
            anchors.push(name);
        }
        anchors
    }

    /// Its code blocks, and what is between them.
    fn split(&self) -> (Vec<Block>, String) {
        let (mut blocks, mut prose) = (Vec::new(), String::new());
        let mut open: Option<Block> = None;
        let mut before = "";
        for (index, line) in self.text.lines().enumerate() {
            match (&mut open, line.trim_start().strip_prefix("```")) {
                (None, Some(language)) => {
                    let (language, before) = (language.trim().to_owned(), before.to_owned());
                    open = Some(Block { line: index + 1, language, before, text: String::new() });
                }
                (Some(_), Some(_)) => blocks.extend(open.take()),
                (Some(block), None) => block.text.extend([line, "\n"]),
                (None, None) => {
                    prose.extend([line, "\n"]);
                    before = if line.trim().is_empty() { before } else { line.trim() };
                }
            }
        }
        assert!(open.is_none(), "{}: a code block without an end", self.name);
        (blocks, prose)
    }
}

impl Block {
    /// Whether the comment `<!-- WORDS -->` stands before it.
    pub fn is_marked(&self, words: &str) -> bool {
        self.before == format!("<!-- {words} -->")
    }

    /// Its shell commands: in `console` what follows a prompt, in `sh` everything; each as its words.
    pub fn commands(&self) -> Vec<Vec<String>> {
        let has_prompts = self.language == "console";
        if !has_prompts && self.language != "sh" {
            return Vec::new();
        }
        let whole = self.text.replace("\\\n", " ");
        let lines = whole.lines().filter_map(|line| match has_prompts {
            true => line.strip_prefix("$ ").or_else(|| line.strip_prefix("# ")),
            false => Some(line),
        });
        lines.flat_map(commands_of).collect()
    }
}

/// The commands of a shell's line, each as its words. Quotes are taken off, comments left out, and a file to which a
/// command is redirected stands as a command of its own.
pub fn commands_of(line: &str) -> Vec<Vec<String>> {
    let (mut commands, mut words, mut word) = (Vec::new(), Vec::new(), None::<String>);
    let mut quote = None;
    for letter in line.chars() {
        match (quote, letter) {
            (Some(open), _) if letter == open => quote = None,
            (None, '\'' | '"') => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            (None, '#') if word.is_none() => break,
            (None, ' ' | '\t') => words.extend(word.take()),
            (None, '|' | ';' | '&' | '<' | '>' | '(' | ')') => {
                words.extend(word.take());
                commands.push(std::mem::take(&mut words));
            }
            _ => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    commands.push(words);
    commands.retain(|words| !words.is_empty());
    commands
}

/// What is in backticks, and the text with each such place left empty.
fn split_spans(prose: &str) -> (Vec<String>, String) {
    let (mut spans, mut rest) = (Vec::new(), String::new());
    let mut left = prose;
    while let Some(at) = left.find('`') {
        rest.push_str(&left[..at]);
        let ticks = left[at..].len() - left[at..].trim_start_matches('`').len();
        let (fence, inner) = left[at..].split_at(ticks);
        match inner.find(fence) {
            // Code spans do not go on in another paragraph.
            Some(end) if !inner[..end].contains("\n\n") => {
                spans.push(inner[..end].split_whitespace().collect::<Vec<_>>().join(" "));
                left = &inner[end + ticks..];
            }
            _ => left = inner,
        }
    }
    rest.push_str(left);
    (spans, rest)
}

/// The anchor of a heading: letters, digits, hyphens and underscores in lower case, spaces as hyphens.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().chars().filter_map(|letter| match letter {
        ' ' => Some('-'),
        '-' | '_' => Some(letter),
        _ => letter.is_alphanumeric().then_some(letter),
    });
    kept.collect::<String>().to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(text: &str) -> Page {
        Page { name: "page.md".into(), text: text.into() }
    }

    #[test]
    fn blocks_have_their_language_their_line_and_what_is_said_of_them() {
        let blocks = page("# Title\n\n<!-- part -->\n\n```toml\na = 1\n```\n```\n[no](link)\n```\n").blocks();
        assert_eq!(
            (blocks[0].line, blocks[0].language.as_str(), blocks[0].text.as_str()),
            (5, "toml", "a = 1\n")
        );
        assert!(blocks[0].is_marked("part") && !blocks[0].is_marked("other TOML"));
        assert_eq!((blocks[1].language.as_str(), blocks.len()), ("", 2));
    }

    #[test]
    fn spans_and_links_are_those_outside_of_blocks() {
        let page = page("`a\nb` [`x`](to.md#y) ![p](p.svg) `[no](no.md)`\n```\n[no](no.md) `no`\n```\n");
        assert_eq!(page.spans(), ["a b", "x", "[no](no.md)"]);
        assert_eq!(page.links(), ["to.md#y", "p.svg"]);
    }

    #[test]
    fn headings_have_the_anchors_that_github_gives_them() {
        let page =
            page("# What's *new*, 2.0?\n## `[[listen]]`\n```\n# no\n```\n## `[listen]`\n## a_b-c  d\n");
        assert_eq!(page.anchors(), ["whats-new-20", "listen", "listen-1", "a_b-c--d"]);
    }

    #[test]
    fn commands_are_split_as_a_shell_does() {
        let text = "```console\n$ a 'b c;' d=\"e\"   # no\nno\n# f \\\n  g > h && i\n```\n";
        let commands = page(text).blocks()[0].commands();
        assert_eq!(commands, [vec!["a", "b c;", "d=e"], vec!["f", "g"], vec!["h"], vec!["i"]]);
    }
}
