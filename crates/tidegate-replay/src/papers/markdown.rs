//! Parses the Markdown of docs/papers.md: headings, paragraphs, code and tables.

/// A block of the page.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Block {
    /// A second-level heading.
    Heading(String),
    /// A paragraph or a list item, in one line; code is a paragraph, too.
    Text(String),
    /// A table: headers and rows.
    Table(Vec<String>, Vec<Vec<String>>),
}

/// Returns the blocks of `page`, without its title and comments.
pub(crate) fn blocks(page: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut is_open = false;
    for line in page.lines().map(str::trim) {
        let is_text = !(line.is_empty() || line.starts_with("<!--") || line.starts_with('#'));
        if let Some(title) = line.strip_prefix("## ") {
            blocks.push(Block::Heading(title.to_owned()));
        } else if let Some(cells) = cells(line) {
            add_row(&mut blocks, cells, is_open);
        } else if is_text {
            add_text(&mut blocks, line, is_open);
        }
        is_open = is_text;
    }
    blocks
}

/// Returns the cells of a line of a table, or `None` for another line.
fn cells(line: &str) -> Option<Vec<String>> {
    let inner = line.strip_prefix('|')?.strip_suffix('|')?;
    Some(inner.split('|').map(|cell| cell.trim().to_owned()).collect())
}

/// Adds a row to the table in the last block if it `is_open`; otherwise begins a table.
fn add_row(blocks: &mut Vec<Block>, cells: Vec<String>, is_open: bool) {
    let is_rule = cells.iter().all(|cell| cell.chars().all(|c| "-:".contains(c)) && cell.len() > 2);
    match blocks.last_mut() {
        Some(Block::Table(..)) if is_open && is_rule => {}
        Some(Block::Table(headers, rows)) if is_open && cells.len() == headers.len() => {
            rows.push(cells);
        }
        _ => blocks.push(Block::Table(cells, Vec::new())),
    }
}

fn add_text(blocks: &mut Vec<Block>, line: &str, is_open: bool) {
    match blocks.last_mut() {
        Some(Block::Text(text)) if is_open && !line.starts_with("- ") => {
            text.push(' ');
            text.push_str(line);
        }
        _ => blocks.push(Block::Text(line.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn headings_paragraphs_and_tables_are_found() {
        let page = "# Title\n\n<!-- x:begin -->\n## Part\n\nOne\ntwo\n- item\n\n| a | b |\n|---|--:|\n\
                    | 1 | |\n\nafter\n";
        let text = |text: &str| Block::Text(text.to_owned());
        let row = |cells: [&str; 2]| cells.map(str::to_owned).to_vec();
        assert_eq!(
            blocks(page),
            [
                Block::Heading("Part".to_owned()),
                text("One two"),
                text("- item"),
                Block::Table(row(["a", "b"]), vec![row(["1", ""])]),
                text("after"),
            ]
        );
    }

    proptest! {
        /// Rows are as long as their headers, for any page.
        #[test]
        fn tables_have_one_width(page in "([|a#<! -]{0,8}\n){0,12}") {
            for block in blocks(&page) {
                if let Block::Table(headers, rows) = block {
                    prop_assert!(rows.iter().all(|row| row.len() == headers.len()));
                }
            }
        }
    }
}
