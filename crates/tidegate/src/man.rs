//! `tidegate man`: a manual page for each command, from what `--help` says.

use std::io::{self, Write};
use std::path::Path;

use clap::Command;
use clap_mangen::Man;

/// Writes `tidegate.1`, `tidegate-run.1` and so on into the folder, which is made if only its parent is there.
/// Returns how many.
pub(crate) fn write_pages(program: Command, folder: &Path) -> io::Result<usize> {
    let mut program = program.disable_help_subcommand(true);
    program.build();
    match std::fs::create_dir(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    write_page(&program, folder)
}

fn write_page(command: &Command, folder: &Path) -> io::Result<usize> {
    let name = command.get_display_name().unwrap_or(command.get_name()).to_owned();
    let mut page = Vec::new();
    render(command.clone().display_name(&name), &name, &mut page)?;
    std::fs::write(folder.join(format!("{name}.1")), page)?;
    let below = command.get_subcommands().filter(|command| !command.is_hide_set());
    below.into_iter().try_fold(1, |written, command| Ok(written + write_page(command, folder)?))
}

fn render(mut command: Command, name: &str, page: &mut Vec<u8>) -> io::Result<()> {
    let usage = command.render_usage().to_string();
    let examples = command.get_after_help().map(ToString::to_string);
    let has_subcommands = command.has_subcommands();
    let man = Man::new(command)
        .title(name.to_uppercase())
        .source(concat!("tidegate ", env!("CARGO_PKG_VERSION")))
        .manual("Tidegate");
    man.render_title(page)?;
    man.render_name_section(page)?;
    writeln!(page, ".SH SYNOPSIS")?;
    for line in usage.trim_start_matches("Usage:").lines() {
        writeln!(page, "{}\n.br", escaped(line.trim()))?;
    }
    man.render_description_section(page)?;
    man.render_options_section(page)?;
    if has_subcommands {
        man.render_subcommands_section(page)?;
    }
    if let Some(text) = examples {
        write_examples(&text, page)?;
    }
    let done = match name {
        "tidegate-condition" => "That of COMMAND, or 128 and the number of the signal that ended it;",
        _ => "0 done,",
    };
    let errors = "1 an error while it ran, 2 a command line that cannot be understood.";
    writeln!(page, ".SH \"EXIT STATUS\"\n{done} {errors}")?;
    match name.rsplit_once('-') {
        Some((above, _)) => writeln!(page, ".SH \"SEE ALSO\"\n.BR {} (1)", escaped(above)),
        None => Ok(()),
    }
}

/// "Example(s):" and indented lines become a section; what follows them is text.
fn write_examples(text: &str, page: &mut Vec<u8>) -> io::Result<()> {
    writeln!(page, ".SH EXAMPLES")?;
    for line in text.lines().filter(|line| !matches!(line.trim(), "" | "Example:" | "Examples:")) {
        match line.strip_prefix("  ") {
            Some(example) => writeln!(page, ".nf\n{}\n.fi", escaped(example))?,
            None => writeln!(page, ".PP\n{}", escaped(line))?,
        }
    }
    Ok(())
}

/// A line of text for roff: its escape character and hyphens are escaped, and no line begins with a request's dot.
fn escaped(line: &str) -> String {
    let text = line.replace('\\', "\\e").replace('-', "\\-");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}
