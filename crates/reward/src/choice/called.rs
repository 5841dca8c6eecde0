//! Finds the only option that a text calls right without announcing an answer: "B is true", "B
//! works", "Paris is the answer".

use std::sync::LazyLock;

use regex::Regex;

use super::options::ChoiceOptions;
use super::patterns::SENTENCE_END;
use super::words::{BEFORE_OPTION, FALSE_IS, IS_DENIED, IS_TRUE, WORKS};
use crate::pattern::pattern;

/// The index of an option, and the part of the text that names the option.
type NamedOption = (usize, String);

/// Returns the only option that a text calls right, false or true, depending on what the question
/// asks for, with the end of the statement. `letter` returns the option of a letter. `is_stated`
/// returns whether the text before a statement lets the statement count.
pub(super) fn find_option_called_right(
    text: &str,
    options: &ChoiceOptions,
    letter: impl Fn(&str) -> Option<NamedOption>,
    is_stated: impl Fn(&str) -> bool,
) -> Option<(usize, NamedOption)> {
    let only = |expression: &Regex, lead: Option<&Regex>| {
        let mut called = expression.captures_iter(text);
        let first = called.next()?;
        let only = first.get(1)?;
        // "B works, but so does C" has words after the verb.
        let is_limited = first.get(2).is_some_and(|rest| !rest.as_str().trim().is_empty());
        let is_only = called.all(|other| other.get(1).is_some_and(|o| o.as_str() == only.as_str()));
        let before = &text[..only.start()];
        let is_option = lead.is_none_or(|lead| lead.is_match(before));
        letter(only.as_str())
            .filter(|_| is_only && !is_limited && is_option && is_stated(before))
            .map(|found| (first.get(0).map_or(text.len(), |all| all.end()), found))
    };
    if options.wants_false_statement {
        let named = FALSE_IS
            .captures(text)
            .and_then(|found| Some((found.get(0)?.end(), letter(&found[1])?)));
        return named.or_else(|| only(&IS_DENIED, None));
    }
    if options.wants_wrong_option {
        return None;
    }
    // "Plan B works" names no option.
    only(&IS_TRUE, None)
        .or_else(|| only(&WORKS, Some(&BEFORE_OPTION)))
        .or_else(|| find_option_text_called_right(text, options))
}

/// Returns the only option whose text precedes "is the answer" or "is correct" in a sentence.
fn find_option_text_called_right(
    text: &str,
    options: &ChoiceOptions,
) -> Option<(usize, NamedOption)> {
    let mut called = SENTENCE_END.split(text).filter_map(|sentence| {
        let name = TEXT_IS_RIGHT.captures(sentence)?.get(1)?;
        let option = super::find_option_by_text(name.as_str(), &options.texts)?;
        let end = sentence.as_ptr() as usize - text.as_ptr() as usize + sentence.len();
        Some((end, (option, name.as_str().to_owned())))
    });
    let only = called.next()?;
    called.all(|(_, (other, _))| other == only.1.0).then_some(only)
}

/// Matches a sentence such as "Paris is the answer", with the text of the option in group 1.
static TEXT_IS_RIGHT: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)^[*_\x22\s]*(?:(?:so|thus|therefore|hence),?\s+)?([^,;:]{1,200}?)[*_\x22]*\s+is\s+",
        r"(?:the\s+(?:correct\s+|right\s+|best\s+)?(?:answer|option|choice)|correct|right)[*_\x22.!\s]*$",
    ))
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn judgment_must_name_one_option() {
        let options = ChoiceOptions {
            texts: ["London", "Paris", "Rome"].map(str::to_owned).to_vec(),
            ..ChoiceOptions::default()
        };
        let letter = |name: &str| {
            let at = "ABC".find(name)?;
            Some((at, name.to_owned()))
        };
        for (text, want) in [
            ("Only B works.", Some(1)),
            ("B fits!", Some(1)),
            ("B is true.", Some(1)),
            ("Paris is the answer.", Some(1)),
            ("So Paris is the right choice.", Some(1)),
            ("B works, but so does C.", None),
            ("A works. B works.", None),
            ("B works only if x is 0.", None),
            ("Plan B works.", None),
            ("By the way, plan B works.", None),
            ("Paris is the answer. Rome is correct.", None),
            ("Old Paris is the answer.", None),
            ("Paris is the wrong answer.", None),
        ] {
            let found = find_option_called_right(text, &options, letter, |_| true);
            assert_eq!(found.map(|(_, (option, _))| option), want, "{text}");
        }
    }
}
