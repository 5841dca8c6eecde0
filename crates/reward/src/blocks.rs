//! Finds fenced code blocks in completions, after section 4.5 of CommonMark 0.31.
//!
//! A fence consists of three or more backticks or tildes at the start of a line, either directly or
//! after list and quotation markers. The closing fence is the only text on its line, has the same
//! character, is at least as long, and is indented by at most three columns more than the text
//! around the block. Each line of the block loses the indentation of the opening fence.
//!
//! Completions are often imperfect Markdown, so this module is more lenient in three ways:
//!
//! - Tags next to a fence do not hide it.
//! - In a block that has a closing fence, a line with less indentation does not end the block.
//! - If the fences of the text make no sense otherwise, a closing fence may be missing or be
//!   followed by text.
//!
//! If a text has no such fence, code between three backticks within a line is used.

use std::borrow::Cow;

/// A fenced code block of a Markdown text.
#[derive(Debug, Clone, PartialEq, Eq)]
struct CodeBlock<'t> {
    /// Name of the block's programming language. Empty if the fence names no language.
    language: &'t str,
    code: Cow<'t, str>,
}

/// The opening fence of a Markdown code block.
#[derive(Debug, Clone, Copy)]
struct OpeningFence<'t> {
    mark: char,
    length: usize,
    /// Column of the first fence character, from 0.
    column: usize,
    /// Column of the text around the fence: the content column of the enclosing list item, or 0.
    outer_column: usize,
    /// Number of Markdown quotation markers (`>`) before the fence.
    quotes: usize,
    info: &'t str,
}

/// A position in a line of Markdown, with the rest of the line. A tab advances the column to the
/// next multiple of four.
#[derive(Debug, Clone, Copy)]
struct LineCursor<'t> {
    rest: &'t str,
    column: usize,
}

impl<'t> LineCursor<'t> {
    fn new(line: &'t str) -> Self {
        LineCursor { rest: line, column: 0 }
    }

    /// Skips white space up to column `max_column`; `usize::MAX` skips all leading white space.
    fn skip_blanks(&mut self, max_column: usize) {
        while self.column < max_column {
            self.column += match self.rest.as_bytes().first() {
                Some(b' ') => 1,
                Some(b'\t') => 4 - self.column % 4,
                _ => return,
            };
            self.rest = &self.rest[1..];
        }
    }

    /// Skips one Markdown quotation marker (`>`) and the space after it. Returns whether there was
    /// a marker.
    fn skip_quotation_marker(&mut self) -> bool {
        let mut after = *self;
        after.skip_blanks(usize::MAX);
        let Some(rest) = after.rest.strip_prefix('>') else { return false };
        *self = LineCursor { rest, column: after.column + 1 };
        self.skip_blanks(self.column + 1);
        true
    }

    /// Skips a Markdown list marker (`-`, `+`, `*`, `1.`, `1)`) and the white space after it.
    /// Returns whether there was a marker.
    fn skip_list_marker(&mut self) -> bool {
        let digits = self.rest.bytes().take_while(u8::is_ascii_digit).count();
        let mark = match self.rest.as_bytes().get(digits) {
            Some(b'-' | b'+' | b'*') if digits == 0 => 1,
            Some(b'.' | b')') if (1..=9).contains(&digits) => digits + 1,
            _ => return false,
        };
        let rest = &self.rest[mark..];
        if !rest.is_empty() && !rest.starts_with([' ', '\t']) {
            return false;
        }
        *self = LineCursor { rest, column: self.column + mark };
        let start = self.column;
        let mut after = *self;
        after.skip_blanks(usize::MAX);
        // If more than four columns of white space follow, all after the first column belong to the
        // content. If nothing follows, the content starts one column after the marker.
        let max_column =
            if after.rest.is_empty() || after.column > start + 4 { start + 1 } else { usize::MAX };
        self.skip_blanks(max_column);
        self.column = self.column.max(start + 1);
        true
    }
}

/// Returns the length of the code fence at the start of a text, which consists of at least three
/// `mark` characters. Returns 0 if the text does not start with a fence.
fn fence_length(text: &str, mark: char) -> usize {
    Some(text.len() - text.trim_start_matches(mark).len())
        .filter(|length| *length >= 3)
        .unwrap_or(0)
}

/// Finds the opening fence of a code block on a line of Markdown. `items` contains the content
/// columns of the enclosing list items, and is updated.
fn parse_opening_fence<'t>(line: &'t str, items: &mut Vec<usize>) -> Option<OpeningFence<'t>> {
    let mut cursor = LineCursor::new(line);
    let mut quotes = 0;
    let mut is_first = true;
    // Quotations and list items can be nested in any order.
    loop {
        while cursor.skip_quotation_marker() {
            quotes += 1;
        }
        cursor.skip_blanks(usize::MAX);
        if cursor.rest.is_empty() {
            return None;
        }
        if std::mem::take(&mut is_first) {
            items.retain(|item| *item <= cursor.column);
        }
        if !cursor.skip_list_marker() {
            break;
        }
        items.push(cursor.column);
    }
    let mark = cursor.rest.chars().next().filter(|mark| matches!(mark, '`' | '~'))?;
    let length = Some(fence_length(cursor.rest, mark)).filter(|length| *length > 0)?;
    let info = cursor.rest[length..].trim();
    // Backticks that close on the same line are inline code rather than a block.
    if (mark == '`' && info.contains('`')) || info.starts_with("</") {
        return None;
    }
    let outer_column = items.last().copied().unwrap_or(0);
    // CommonMark would not accept a fence that is indented more deeply. Here it is accepted, and
    // its own column counts.
    let outer_column = if cursor.column > outer_column + 3 { cursor.column } else { outer_column };
    Some(OpeningFence { mark, length, column: cursor.column, outer_column, quotes, info })
}

impl<'t> OpeningFence<'t> {
    /// Returns a line of the code block without its quotation markers (`>`), or `None` if the
    /// quotation has ended.
    fn strip_quotation_markers(&self, line: &'t str) -> Option<LineCursor<'t>> {
        let mut cursor = LineCursor::new(line);
        (0..self.quotes).all(|_| cursor.skip_quotation_marker()).then_some(cursor)
    }

    /// Returns the text after the closing fence on a line, or `None` if the line has no closing
    /// fence.
    fn find_closing_fence(&self, mut cursor: LineCursor<'t>) -> Option<&'t str> {
        cursor.skip_blanks(usize::MAX);
        let length = fence_length(cursor.rest, self.mark);
        let fits = length >= self.length && cursor.column <= self.outer_column + 3;
        fits.then(|| cursor.rest[length..].trim_end())
    }

    /// Returns whether a line is outside of the list item that contains the code block.
    fn is_outside_list_item(&self, mut cursor: LineCursor<'t>) -> bool {
        cursor.skip_blanks(usize::MAX);
        !cursor.rest.trim_end().is_empty() && cursor.column < self.outer_column.min(self.column)
    }

    /// Appends a line of the code block to `code`, without the indentation of the opening fence.
    fn append_code_line(&self, cursor: LineCursor<'t>, code: &mut String) {
        let mut after = cursor;
        after.skip_blanks(self.column);
        // Keeps the columns of a tab that extends beyond the removed indentation.
        code.extend(std::iter::repeat_n(' ', after.column.saturating_sub(self.column)));
        code.push_str(after.rest);
    }
}

/// Returns the first word of a code fence's info string, without braces and dots, and whether this
/// word names a language. `python`, `{.python}`, `{python}` and `python title="x"` name a language,
/// but a line of code does not.
fn parse_info_string<'t>(info: &'t str, known: &[&str]) -> (&'t str, bool) {
    let mut words = info.split_whitespace();
    let name = words.next().unwrap_or_default().trim_matches(|c| matches!(c, '{' | '}' | '.'));
    let is_attribute = |word: &str| {
        let key = word.split('=').next().unwrap_or_default();
        word.starts_with(['{', '.', '#'])
            || (word.contains('=') && !key.is_empty() && word.len() > key.len() + 1)
    };
    (name, contains_ignoring_case(name, known) || words.all(is_attribute))
}

/// Returns the index of the first line whose fence is followed by text, if a later line has a fence
/// that can open a block. The model then meant to close its block at the first of these fences.
/// Each item of `lines` is the text after the fence on a line, or `None` for a line without a
/// fence.
fn find_intended_close<'t>(lines: impl Iterator<Item = Option<&'t str>>) -> Option<usize> {
    let is_name = |text: &str| text.chars().all(|c| c.is_alphanumeric() || "+-#_.{}".contains(c));
    let mut first = None;
    for (at, text) in lines.enumerate() {
        match text.map(|text| (is_name(text), first)) {
            Some((true, Some(first))) => return Some(first),
            Some((false, None)) => first = Some(at),
            _ => {}
        }
    }
    None
}

/// Returns the fenced code blocks of a Markdown text in order, and whether the last block has no
/// closing fence. If `lenient`, any fence closes a block even if text follows it.
fn parse_fenced_blocks<'t>(
    text: &'t str,
    known: &[&str],
    lenient: bool,
) -> (Vec<CodeBlock<'t>>, bool) {
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    let mut blocks = Vec::new();
    let mut items = Vec::new();
    let mut at = 0;
    let mut is_open = false;
    // The last lines that can close a block. Searching beyond them is unnecessary.
    let last_closing_line = |mark: char| {
        let is_fence_line = |line: &&str| {
            let line = line.trim_matches(|c: char| c.is_whitespace() || c == '>');
            line.split("</")
                .next()
                .is_some_and(|fence| fence_length(fence, mark) == fence.len() && fence.len() > 2)
        };
        lines.iter().rposition(is_fence_line)
    };
    let backticks = last_closing_line('`');
    let tildes = last_closing_line('~');
    let last_closing = |mark: char| if mark == '`' { backticks } else { tildes };
    while at < lines.len() {
        let line = lines[at];
        at += 1;
        let Some(fence) = parse_opening_fence(line.trim_end_matches(['\n', '\r']), &mut items)
        else {
            continue;
        };
        let body = || {
            lines[at..].iter().copied().map_while(move |line| fence.strip_quotation_markers(line))
        };
        let is_closing = |after: &str| lenient || after.is_empty() || after.starts_with("</");
        let closed = |fits: &dyn Fn(&str) -> bool| {
            body().position(|line| fence.find_closing_fence(line).is_some_and(fits))
        };
        let is_last = !lenient && last_closing(fence.mark).is_none_or(|last| last < at);
        let end = if is_last { None } else { closed(&is_closing) }.or_else(|| closed(&|_| true));
        let end = end.map(|end| {
            find_intended_close(body().take(end).map(|line| fence.find_closing_fence(line)))
                .unwrap_or(end)
        });
        // A block without a closing fence ends with the list item that contains it.
        let length = end.unwrap_or_else(|| {
            body()
                .position(|line| fence.is_outside_list_item(line))
                .unwrap_or_else(|| body().count())
        });
        let mut code = String::new();
        let (name, is_name) = parse_info_string(fence.info, known);
        if !is_name {
            code.push_str(fence.info);
            code.push('\n');
        }
        body().take(length).for_each(|line| fence.append_code_line(line, &mut code));
        blocks.push(CodeBlock { language: if is_name { name } else { "" }, code: code.into() });
        at += length + usize::from(end.is_some());
        is_open = end.is_none();
    }
    (blocks, is_open)
}

/// Returns the code between three backticks within a line. Models write such code when they do not
/// use code blocks.
fn parse_inline_blocks<'t>(text: &'t str, known: &[&str]) -> Vec<CodeBlock<'t>> {
    let block = |inside: &'t str| {
        let (first, rest) =
            inside.split_once('\n').map_or((inside, None), |(first, rest)| (first, Some(rest)));
        let name = first.split_whitespace().next().unwrap_or_default();
        let names = contains_ignoring_case(name, known) || (rest.is_some() && name == first.trim());
        match rest {
            Some(rest) if names => CodeBlock { language: name, code: rest.into() },
            None if names => {
                CodeBlock { language: name, code: inside.trim_start()[name.len()..].into() }
            }
            _ => CodeBlock { language: "", code: inside.into() },
        }
    };
    text.split("```").skip(1).step_by(2).map(block).collect()
}

fn contains_ignoring_case(name: &str, known: &[&str]) -> bool {
    known.iter().any(|one| name.eq_ignore_ascii_case(one))
}

/// Returns whether a text has a code fence. If so, code outside of code blocks does not count.
pub(crate) fn has_code_fence(text: &str) -> bool {
    text.contains("```")
        || text.lines().any(|line| parse_opening_fence(line, &mut Vec::new()).is_some())
}

/// Returns the code of the last Markdown code block whose language is one of `languages`. If there
/// is no such block, returns the last block without a language, because an answer often ends with a
/// block of the program's output. If all blocks name other languages, returns the last block.
/// Blocks without code are ignored.
pub(crate) fn last_code_block<'t>(text: &'t str, languages: &[&str]) -> Option<Cow<'t, str>> {
    let filled = |blocks: Vec<CodeBlock<'t>>| -> Vec<CodeBlock<'t>> {
        blocks.into_iter().filter(|block| !block.code.trim().is_empty()).collect()
    };
    let (mut blocks, is_open) = parse_fenced_blocks(text, languages, false);
    // An empty block at the end means that its fence was meant as a closing fence, so earlier
    // closing fences had text after them.
    if is_open && blocks.last().is_some_and(|block| block.code.trim().is_empty()) {
        blocks = parse_fenced_blocks(text, languages, true).0;
    }
    let mut blocks = filled(blocks);
    if blocks.is_empty() {
        blocks = filled(parse_inline_blocks(text, languages));
    }
    let last = |fits: &dyn Fn(&CodeBlock) -> bool| blocks.iter().rposition(fits);
    let at = last(&|block| contains_ignoring_case(block.language, languages))
        .or_else(|| last(&|block| block.language.is_empty()))
        .or_else(|| last(&|_| true))?;
    Some(blocks.swap_remove(at).code)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn last(text: &str) -> Option<String> {
        last_code_block(text, &["python", "py"]).map(Cow::into_owned)
    }

    #[test]
    fn last_code_block_of_language_is_returned() {
        for (text, want) in [
            ("no block", None),
            ("```x = 1```", Some("x = 1")),
            ("```Python x = 1```", Some(" x = 1")),
            ("```\nx\n```", Some("x\n")),
            ("```x\n```", None),
            ("``````", None),
            ("```py\nopen", Some("open")),
            // Blocks with the program's output, or with the command that starts it.
            ("```python\nx\n```\nOutput:\n```\n5\n```", Some("x\n")),
            ("```py\nx\n```\nRun it:\n```bash\npython x.py\n```", Some("x\n")),
            ("```\nx\n```\nOutput:\n```text\n5\n```", Some("x\n")),
            ("```\nx\n```\nOutput:\n```text title=\"out\"\n5\n```", Some("x\n")),
            ("```python\na\n```\n```python\nb\n```", Some("b\n")),
            ("```python\na\n```\n```python\n\n```", Some("a\n")),
            ("```c\na\n```\n```go\nb\n```", Some("b\n")),
            ("```{python}\na\n```", Some("a\n")),
            ("```{.python .numberLines}\na\n```", Some("a\n")),
            ("``` python {.x}\na\n```", Some("a\n")),
            ("```python title=\"x\"\na\n```", Some("a\n")),
            ("```x = 1\ny = 2\n```", Some("x = 1\ny = 2\n")),
            ("```python\r\na\r\n```\r\n", Some("a\r\n")),
            ("a ```python\nx = 1\n``` b ```\ny = 2\n``` c", Some("x = 1\n")),
        ] {
            assert_eq!(last(text).as_deref(), want, "{text:?}");
        }
    }

    #[test]
    fn code_fences_are_parsed_like_commonmark() {
        for (text, want) in [
            // Tildes and longer fences. Fences of the other character and shorter fences are code.
            ("~~~python\na\n~~~", Some("a\n")),
            ("~~~ py\n```\na\n```\n~~~", Some("```\na\n```\n")),
            ("````python\n```\na\n````", Some("```\na\n")),
            ("```python\n~~~\na\n`````", Some("~~~\na\n")),
            // A tilde fence may have backticks in its info string.
            ("~~~python `x`\na\n~~~", Some("a\n")),
            // Fences inside string literals and comments of the code.
            ("```python\ns = '```'\n```", Some("s = '```'\n")),
            ("```python\n\"\"\"Use ```f(1)```.\"\"\"\n```", Some("\"\"\"Use ```f(1)```.\"\"\"\n")),
            ("```python\n# ``` no fence\na\n```", Some("# ``` no fence\na\n")),
            (
                "```python\ndef f():\n    \"\"\"\n    ```\n    x\n    ```\n    \"\"\"\n```",
                Some("def f():\n    \"\"\"\n    ```\n    x\n    ```\n    \"\"\"\n"),
            ),
            ("```python\na\n``` b\nc\n```", Some("a\n``` b\nc\n")),
            // Closing fences may be indented by three columns and have white space after them.
            ("```python\na\n   ```  \t\nb", Some("a\n")),
            ("  ```python\n  a\n ```\nb", Some("a\n")),
            ("   ```python\na\n     b\n```", Some("a\n  b\n")),
            // Nested list items, and quotations.
            (
                "1. Code:\n   ```python\n   def f():\n       return 1\n   ```\n",
                Some("def f():\n    return 1\n"),
            ),
            ("1. Code:\n\n   ```python\n   a\n\n   b\n   ```\n2. More", Some("a\n\nb\n")),
            (
                "- x\n  - y\n\n    ```python\n    if a:\n        b\n    ```\n",
                Some("if a:\n    b\n"),
            ),
            ("- ```python\n  a\n  ```\n- b", Some("a\n")),
            ("10) ~~~python\n    a\n    ~~~", Some("a\n")),
            ("* x\n\n\t```python\n\ta\n\t\tb\n\t```", Some("a\n\tb\n")),
            (
                "1. Code:\n   ```python\ndef f():\n    return 1\n   ```",
                Some("def f():\n return 1\n"),
            ),
            (
                "> ```python\n> def f():\n>     return 1\n> ```\nsaid",
                Some("def f():\n    return 1\n"),
            ),
            ("> ```python\n> a\nb", Some("a\n")),
            // Fences with only tags next to them.
            ("<solution>\n```python\na\n```\n</solution>", Some("a\n")),
            ("<solution>\n```python\na\n```</solution> and more", Some("a\n")),
            ("<solution>```python\na\n```</solution>", Some("a\n")),
            (
                "- > ```python\n  > def f():\n  >     return 1\n  > ```",
                Some("def f():\n    return 1\n"),
            ),
            ("> - ```python\n>   a\n>   ```\nsaid", Some("a\n")),
            // Blocks without a closing fence.
            ("- ```python\n  a\n\n  b\n\nSo it is.", Some("a\n\nb\n\n")),
            ("So:\n```python\na\n\nb", Some("a\n\nb")),
            ("1. x\n   ```python\n   a", Some("a")),
            // A fence with text after it closes its block if another block starts later.
            ("```python\na\n``` gives\n```text\n5\n```", Some("a\n")),
            ("```python\na\n``` b\n\"\"\"\nc\n```", Some("a\n``` b\n\"\"\"\nc\n")),
            // Inline code is not a fence.
            ("Call ```f(1)``` here:\n```python\na\n```", Some("a\n")),
            ("```f(1)``` is called here:\n```python\na\n```", Some("a\n")),
        ] {
            assert_eq!(last(text).as_deref(), want, "{text:?}");
        }
        assert!(
            has_code_fence("~~~python\na\n~~~")
                && has_code_fence("- ~~~\n  a")
                && !has_code_fence("x = ~~a\n# ~~~")
        );
    }

    proptest! {
        #[test]
        fn code_block_keeps_its_text_in_any_position(
            lines in prop::collection::vec("( {0,8}[a-z=~`\"']{0,9}|)", 1..8),
            indent in 0usize..4,
            position in 0usize..5,
            longer in 0usize..3,
            tilde: bool,
        ) {
            let code: String = lines.iter().map(|line| format!("{}\n", line.trim_end())).collect();
            prop_assume!(!code.trim().is_empty());
            let mark = if tilde { "~" } else { "`" };
            let longest = code.lines().map(|line| line.matches(mark).count()).max().unwrap_or(0);
            let fence = mark.repeat(longest.max(2) + 1 + longer);
            let (first, further) = match position {
                0 => (String::new(), String::new()),
                1 => ("1. ".to_owned(), "   ".to_owned()),
                2 => ("- x\n  - ".to_owned(), "    ".to_owned()),
                3 => ("> ".to_owned(), "> ".to_owned()),
                _ => ("x\n\n".to_owned(), String::new()),
            };
            let pad = " ".repeat(if matches!(position, 1 | 2) { 0 } else { indent });
            let body: String = code.lines().map(|line| format!("{further}{pad}{line}\n")).collect();
            let text = format!("{first}{pad}{fence}python\n{body}{further}{pad}{fence}\nEnd.\n");
            prop_assert_eq!(last(&text), Some(code), "{:?}", text);
        }
    }
}
