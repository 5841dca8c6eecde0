//! Blocks of code in replies, between fences of three backticks.

/// A block of code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Block<'t> {
    /// Name of its language; empty where there is none.
    language: &'t str,
    code: &'t str,
}

impl<'t> Block<'t> {
    /// A block from all that stands between its fences. `{python}` and `python title="x"` name a language,
    /// too; one on a line of its code only where it is a known one.
    fn new(inside: &'t str, known: &[&str]) -> Self {
        let name = |text: &'t str| text.trim_matches(|c| matches!(c, '{' | '}' | '.'));
        let lines = inside.split_once('\n');
        if let Some((line, rest)) = lines.filter(|(line, _)| !line.trim().contains(char::is_whitespace)) {
            return Block { language: name(line.trim()), code: rest };
        }
        let first = inside.split_whitespace().next().unwrap_or_default();
        if !is_one_of(name(first), known) {
            return Block { language: "", code: inside };
        }
        // In one line, code begins after the name; otherwise after the line of the name.
        let after = &inside.trim_start()[first.len()..];
        Block { language: name(first), code: lines.map_or(after, |(_, rest)| rest) }
    }
}

fn is_one_of(name: &str, known: &[&str]) -> bool {
    known.iter().any(|one| name.eq_ignore_ascii_case(one))
}

/// The code of the last block in one of these languages; where no block names one of them, of the last one
/// that names none, for an answer often ends with a block of what its program prints; and of the last one
/// where all name others. The last block need not be closed. Blocks without code count for nothing.
pub(crate) fn last_in<'t>(text: &'t str, languages: &[&str]) -> Option<&'t str> {
    let inside = text.split("```").skip(1).step_by(2);
    let blocks: Vec<Block> = inside
        .map(|inside| Block::new(inside, languages))
        .filter(|block| !block.code.trim().is_empty())
        .collect();
    let last = |fits: &dyn Fn(&Block) -> bool| blocks.iter().rev().find(|block| fits(block));
    last(&|block| is_one_of(block.language, languages))
        .or_else(|| last(&|block| block.language.is_empty()))
        .or_else(|| last(&|_| true))
        .map(|block| block.code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_block_of_the_language_is_taken() {
        for (text, want) in [
            ("no block", None),
            ("```x = 1```", Some("x = 1")),
            ("```Python x = 1```", Some(" x = 1")),
            ("```\nx\n```", Some("x\n")),
            ("```x\n```", None),
            ("``````", None),
            ("```py\nopen", Some("open")),
            // What is printed, and how it is started.
            ("```python\nx\n```\nOutput:\n```\n5\n```", Some("x\n")),
            ("```py\nx\n```\nRun it:\n```bash\npython x.py\n```", Some("x\n")),
            ("```\nx\n```\nOutput:\n```text\n5\n```", Some("x\n")),
            ("```python\na\n```\n```python\nb\n```", Some("b\n")),
            ("```python\na\n```\n```python\n\n```", Some("a\n")),
            ("```c\na\n```\n```go\nb\n```", Some("b\n")),
            ("```{python}\na\n```", Some("a\n")),
            ("```python title=\"x\"\na\n```", Some("a\n")),
            ("```x = 1\ny = 2\n```", Some("x = 1\ny = 2\n")),
            ("```python\r\na\r\n```", Some("a\r\n")),
        ] {
            assert_eq!(last_in(text, &["python", "py"]), want, "{text:?}");
        }
    }
}
