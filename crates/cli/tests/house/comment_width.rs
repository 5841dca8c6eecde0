//! Checks that comments fit within a line width.

use std::fs;

/// Maximum number of columns of a line that is a comment.
const MAX_COLUMNS: usize = 100;

#[test]
fn comments_fit_within_max_columns() {
    let mut sources = Vec::new();
    super::sources(&super::root(), &mut sources);
    sources.retain(|path| path.extension().is_some_and(|extension| extension == "rs"));
    let mut too_wide = Vec::new();
    for path in sources {
        let text = fs::read_to_string(&path).unwrap();
        for (index, line) in text.lines().enumerate() {
            // A link cannot be broken over two lines.
            let is_comment = line.trim_start().starts_with("//") && !line.contains("://");
            if is_comment && line.chars().count() > MAX_COLUMNS {
                too_wide.push(format!("{}:{}", path.display(), index + 1));
            }
        }
    }
    assert!(too_wide.is_empty(), "comments of more than {MAX_COLUMNS} columns: {too_wide:?}");
}
