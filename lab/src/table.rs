//! Rows of figures, as CSV for programs and as Markdown for people.

use serde::{Deserialize, Serialize};

/// A table whose rows all have as many cells as there are columns.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Table {
    columns: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table. Column names end with their units.
    pub fn new<const N: usize>(columns: [&str; N]) -> Self {
        Self { columns: columns.map(str::to_owned).into(), rows: Vec::new() }
    }

    /// Adds a row; missing cells are left empty, cells beyond the columns are dropped.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        let mut cells = Vec::from(cells);
        cells.resize(self.columns.len(), String::new());
        self.rows.push(cells);
    }

    /// Number of rows below the head.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there is nothing but the head.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// RFC 4180, with a head line; lines end with LF alone, as the tools that read it expect.
    pub fn csv(&self) -> String {
        let line =
            |cells: &Vec<String>| cells.iter().map(|cell| quoted(cell)).collect::<Vec<_>>().join(",") + "\n";
        std::iter::once(&self.columns).chain(&self.rows).map(line).collect()
    }

    /// A table of GitHub's Markdown.
    pub fn markdown(&self) -> String {
        let line = |cells: &Vec<String>| {
            format!(
                "| {} |\n",
                cells.iter().map(|cell| cell.replace('|', "\\|")).collect::<Vec<_>>().join(" | ")
            )
        };
        let rule = format!("|{}\n", "---|".repeat(self.columns.len()));
        line(&self.columns) + &rule + &self.rows.iter().map(line).collect::<String>()
    }
}

fn quoted(cell: &str) -> String {
    if cell.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", cell.replace('"', "\"\""))
    } else {
        cell.to_owned()
    }
}

/// 19800 as "19,800", for text and labels.
pub fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_with_commas_or_quotes_are_quoted_in_csv() {
        let mut table = Table::new(["server", "note"]);
        table.row(["nginx".into(), "a \"b\", c".into()]);
        assert_eq!(table.csv(), "server,note\nnginx,\"a \"\"b\"\", c\"\n");
    }

    #[test]
    fn a_short_row_is_filled_up() {
        let mut table = Table::new(["a", "b"]);
        table.row(["1".into()]);
        assert_eq!(table.csv(), "a,b\n1,\n");
        assert_eq!(table.markdown(), "| a | b |\n|---|---|\n| 1 |  |\n");
    }

    #[test]
    fn bars_within_cells_do_not_split_them_in_markdown() {
        let mut table = Table::new(["a"]);
        table.row(["x|y".into()]);
        assert!(table.markdown().ends_with("| x\\|y |\n"));
    }

    #[test]
    fn thousands_are_set_apart() {
        assert_eq!([0, 999, 1_000, 1_234_567].map(thousands), ["0", "999", "1,000", "1,234,567"]);
    }
}
