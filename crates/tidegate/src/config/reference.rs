//! The table of keys as the reference page docs/guide/configuration.md.

use std::fmt::Write;

use super::keys::{FILE, Fallback, Key, Section};
use super::kind::Kind;

const HEAD: &str = "\
# Configuration

<!-- Written from the table of keys in crates/tidegate/src/config/keys.rs: change that, then run
     TIDEGATE_WRITE_REFERENCE=1 cargo nextest run -p tidegate generated -->

A configuration file is [TOML](https://toml.io). `tidegate check FILE` reports everything that is wrong with it at
once: file, line, column, key, what was expected and the nearest valid key. `tidegate run --config FILE` starts from it;
what the command line says takes its place: `--listen` that of every listener, `--upstream` or `--root` that of every
route, `--admin` and `--workers` that of their keys. `tidegate reload` or SIGHUP puts a changed file in force; where a \
change needs a restart it is refused with a message and the old
configuration stays.

Durations are written `\"500ms\"`, `\"10s\"`, `\"10m\"`, `\"1h\"` or `\"2d\"`, sizes `\"500B\"`, `\"64KiB\"`, \
`\"256MiB\"` or `\"1GB\"`,
rates `\"500B/s\"`. An unknown key is an error. The same rules as a [JSON Schema](tidegate.schema.json), which
`tidegate check --schema` prints, let an editor complete keys.

A small site in front of one application:

```toml
[[listen]]
address = \":8080\"

[[upstream]]
name = \"app\"
servers = [\"127.0.0.1:9000\"]

[[route]]
upstream = \"app\"
```

Paths have one normal form: escapes of letters, digits and `-._~` are decoded, dot segments and empty segments removed,
as `personality` says; so have queries, as far as escapes go, and the application is asked for both in this form
([more](operating.md#routes-and-files)). Applications may read another path in it: one with `%2F` and `%5C` as slashes, and without what
follows a `;` in a segment. So that nobody comes by a rule in this way,

- the `path` of `[[request]]` and `[[filter]]` matches if either the normal form or that reading matches;
- a request whose two forms belong to different routes is answered with 404, and so is one that asks a `root` for a path
  with `%2F` or `%5C`;
- the personality `strict` answers dot segments beside `%2F` or `%5C`, and those followed by `;` as in `..;/`, with 400.
";

/// The reference page.
pub(super) fn page() -> String {
    let mut page = HEAD.to_owned();
    for section in FILE.walk() {
        write_section(section, &mut page);
    }
    page
}

fn write_section(section: &'static Section, page: &mut String) {
    let title =
        if section.name.is_empty() { "Top level".to_owned() } else { format!("`{}`", section.title()) };
    let _ = write!(page, "\n## {title}\n\n{}\n", section.doc);
    if !section.enforced {
        page.push_str(
            "\n**Accepted and checked, but not enforced by this version:** `check` and `run` warn of it.\n",
        );
    }
    page.push_str("\n| key | value | default | meaning |\n|---|---|---|---|\n");
    for key in section.keys.iter().filter(|key| {
        !matches!(key.kind, Kind::Tables(_) | Kind::Table(_)) || matches!(section.name, "upstream" | "route")
    }) {
        let _ = writeln!(page, "| `{}` | {} | {} | {} |", key.name, kind(key.kind), default(key), key.doc);
    }
}

fn kind(kind: Kind) -> String {
    match kind {
        Kind::Table(section) => format!("a table, see `{}`", section.title()),
        Kind::Choice(names) => {
            names.iter().map(|name| format!("`\"{name}\"`")).collect::<Vec<_>>().join(", ")
        }
        other => other.bounds(),
    }
}

fn default(key: &Key) -> String {
    match key.default {
        Fallback::Required => "required".into(),
        Fallback::Is(text) if key.kind.is_text() => format!("`\"{text}\"`"),
        Fallback::Is(text) => format!("`{text}`"),
        Fallback::Absent(words) => words.into(),
    }
}
