//! Where the answer stands in a text.

use serde::{Deserialize, Serialize};

use crate::boxed::last_box_and_place;
use crate::numbers;

/// Where in the text a mathematical answer stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MathsPlace {
    /// In the last `\boxed{…}`; or where there is none behind the last `####`, "answer is" or "answer:", in
    /// the last formula (`$…$`), or it is the last number.
    #[default]
    Last,
    /// In the last `\boxed{…}`. Boxes side by side (`\boxed{2}` and `\boxed{3}`) are one list.
    Boxed,
    /// The whole text is the answer, or the formula in it.
    Text,
}

/// Words that an answer stands behind.
const SAID: [&str; 4] = ["answer is", "answer:", "answer**:", "answer** is"];

/// Marks of LaTeX between boxes that say nothing.
const SPACES: [&str; 7] = ["\\text{", "\\mathrm{", "\\quad", "\\ ", "\\,", "\\;", "}"];

/// Most boxes side by side.
const BOXES: usize = 20;

impl MathsPlace {
    /// The answer in a text.
    pub(super) fn find(self, text: &str) -> Option<String> {
        match self {
            MathsPlace::Boxed => boxes(text),
            MathsPlace::Text => Some(text.trim().to_owned()).filter(|text| !text.is_empty()),
            MathsPlace::Last => boxes(text).or_else(|| unboxed(text)),
        }
    }
}

/// Content of the last box, and of those beside it.
pub(super) fn boxes(text: &str) -> Option<String> {
    let (last, place) = last_box_and_place(text)?;
    let mut found = vec![last.trim()];
    let mut start = place.start;
    while found.len() < BOXES {
        let Some((inside, place)) = last_box_and_place(&text[..start]) else { break };
        let between =
            SPACES.iter().fold(text[place.end..start].to_owned(), |text, space| text.replace(space, " "));
        let is_beside = between
            .split(|c: char| c.is_whitespace() || c == '$' || c == ',' || c == ';')
            .all(|word| matches!(word, "" | "and" | "or"));
        // White space alone parts two tries at one answer.
        if !is_beside || !between.contains([',', ';', 'a', 'o']) {
            break;
        }
        found.push(inside.trim());
        start = place.start;
    }
    found.reverse();
    Some(found.join(", "))
}

fn unboxed(text: &str) -> Option<String> {
    if let Some(at) = text.rfind("####") {
        return line(&text[at + "####".len()..]);
    }
    // Lower-casing ASCII alone moves no byte, so the place is the same in both.
    let lower = text.to_ascii_lowercase();
    let said = SAID.iter().filter_map(|said| Some(lower.rfind(said)? + said.len())).max();
    if let Some(found) = said.and_then(|end| line(&text[end..])) {
        return Some(found);
    }
    formula(text).or_else(|| numbers::find(text).pop().map(|number| number.text))
}

/// The answer in the first sentence of the first line of a text.
fn line(text: &str) -> Option<String> {
    let line = text.lines().next()?.trim_start_matches([':', ' ', '*']);
    let line = line.split_once(". ").map_or(line, |(sentence, _)| sentence);
    let line = line.trim().trim_end_matches('.').trim_matches('*').trim();
    let line = line.strip_suffix('.').unwrap_or(line);
    formula(line).or_else(|| Some(line.to_owned()).filter(|line| !line.is_empty()))
}

/// The last formula between marks.
fn formula(text: &str) -> Option<String> {
    let marked = |open: &str, close: &str| {
        let end = text.rfind(close)?;
        let start = text[..end].rfind(open)? + open.len();
        Some((end, text[start..end].trim()))
    };
    let all = [marked("$", "$"), marked("\\(", "\\)"), marked("\\[", "\\]")];
    let last = all.into_iter().flatten().filter(|(_, inside)| !inside.is_empty()).max_by_key(|(end, _)| *end);
    last.map(|(_, inside)| inside.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_is_found() {
        for (text, want) in [
            ("so \\boxed{\\frac{1}{2}} and 5", Some("\\frac{1}{2}")),
            ("$\\boxed{2}$ and $\\boxed{3}$.", Some("2, 3")),
            ("\\boxed{2} \\text{ or } \\boxed{3}", Some("2, 3")),
            ("\\boxed{2},\\quad\\boxed{3}", Some("2, 3")),
            ("\\boxed{1}, so it is \\boxed{3}", Some("3")),
            ("\\boxed{1} \\boxed{3}", Some("3")),
            ("The answer is $x^2$.", Some("x^2")),
            ("The final answer is: **1/2**. I hope so", Some("1/2")),
            ("The answer is 42. This means that 6 of 7 are left.", Some("42")),
            ("So the answer is $x^2$. At $x = 3$ it is 9.", Some("x^2")),
            ("The answer is 3.5.", Some("3.5")),
            ("Step 1.\nAnswer: 2\\sqrt{3}", Some("2\\sqrt{3}")),
            ("**Final Answer:** (0, 1)", Some("(0, 1)")),
            ("**Answer**: x + 1\n", Some("x + 1")),
            ("The **answer** is x + 1", Some("x + 1")),
            ("Answer:\n72", Some("72")),
            ("work\n#### 72", Some("72")),
            ("we get $a$, then $b + 1$", Some("b + 1")),
            ("we get \\(a\\), or 5", Some("a")),
            ("48 + 24 = 72 clips", Some("72")),
            ("nothing", None),
        ] {
            assert_eq!(MathsPlace::Last.find(text).as_deref(), want, "{text}");
        }
        assert_eq!(MathsPlace::Boxed.find("72"), None);
        assert_eq!(MathsPlace::Text.find(" x + 1 ").as_deref(), Some("x + 1"));
    }
}
