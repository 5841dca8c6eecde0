//! Comments fit on a line, and doc comments begin with the thing that they document.

use std::fs;
use std::path::PathBuf;

/// Most columns of a line that is a comment.
const WIDEST: usize = 110;

/// Openings of sentences that point to a thing in place of naming it.
const POINTERS: [&str; 9] = ["What", "Those", "It", "Its", "They", "As", "Of", "And", "Who"];

/// Lines of Rust that are comments, with their numbers from 1. A doc comment's first line says so.
fn comments(text: &str) -> impl Iterator<Item = (usize, &str, bool)> {
    let mut before = None;
    text.lines().enumerate().filter_map(move |(i, line)| {
        let trimmed = line.trim_start();
        let doc = ["///", "//!"].into_iter().find(|mark| trimmed.starts_with(mark));
        let opens = doc.is_some() && doc != std::mem::replace(&mut before, doc);
        trimmed.starts_with("//").then_some((i + 1, line, opens))
    })
}

/// Whether a doc comment opens with a pointer.
fn points(line: &str) -> bool {
    let words = line.trim_start().trim_start_matches(['/', '!']);
    let first = words.split_whitespace().next().unwrap_or_default();
    POINTERS.contains(&first.trim_end_matches(['.', ',', ':', ';']))
        || words.trim_start().starts_with("The same")
}

fn rust(found: Vec<PathBuf>) -> Vec<(PathBuf, String)> {
    let rust = found.into_iter().filter(|path| path.extension().is_some_and(|extension| extension == "rs"));
    rust.map(|path| (path.clone(), fs::read_to_string(path).unwrap())).collect()
}

#[test]
fn comments_fit_on_a_line() {
    let mut found = Vec::new();
    super::sources(&super::root(), &mut found);
    let mut wide = Vec::new();
    for (path, text) in rust(found) {
        // A link cannot be broken.
        let too_wide = |line: &str| line.chars().count() > WIDEST && !line.contains("://");
        wide.extend(comments(&text).filter(|(_, line, _)| too_wide(line)).map(|(i, ..)| (path.clone(), i)));
    }
    assert!(wide.is_empty(), "comments of more than {WIDEST} columns: {wide:?}");
}

#[test]
fn doc_comments_begin_with_what_they_document() {
    let mut found = Vec::new();
    super::sources(&super::root(), &mut found);
    let (mut all, mut pointing) = (0, Vec::new());
    for (path, text) in rust(found) {
        for (i, line, _) in comments(&text).filter(|(_, _, opens)| *opens) {
            all += 1;
            if points(line) {
                pointing.push(format!("{}:{i}: {}", path.display(), line.trim()));
            }
        }
    }
    assert!(
        pointing.len() * 50 < all,
        "{} of {all} doc comments begin with none of a noun or a verb:\n{}",
        pointing.len(),
        pointing.join("\n")
    );
}

#[test]
fn pointers_are_seen_where_a_doc_comment_opens() {
    let text =
        "/// What it is.\n/// It goes on.\nfn a() {}\n//! Itself.\n// As plain.\n    /// The same again.\n";
    let seen: Vec<(usize, bool, bool)> =
        comments(text).map(|(i, line, opens)| (i, opens, points(line))).collect();
    let expected = [(1, true, true), (2, false, true), (4, true, false), (5, false, true), (6, true, true)];
    assert_eq!(seen, expected);
}
