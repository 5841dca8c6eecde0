//! Parses the verdicts "correct" and "incorrect".
//!
//! A judge's explanation also contains these words: "the correct answer is 5". A word is therefore
//! the verdict only at certain positions:
//!
//! 1. on a line of its own, as the only word of the last sentence, after a label ("Verdict:"), or
//!    as the first word of the completion. The last of these counts;
//! 2. otherwise, in a sentence that only states "the answer is correct", if the sentence is the
//!    first or the last one and nothing in the completion contradicts it.
//!
//! Partial verdicts ("partially correct"), double negations ("not incorrect") and verdicts that a
//! later sentence retracts give no verdict.

use std::sync::LazyLock;

use regex::Regex;

use super::marks::{
    continues_on_next_line, introduces_quotation, is_own_verdict, lacks_words,
    only_mentions_verdict, retracts_verdict, strip_quotations, strip_verdict_markup,
};
use crate::pattern::pattern;

/// Returns whether a judge's completion calls the answer correct, or `None` if it has no verdict.
pub(super) fn parse_word_verdict(completion: &str) -> Option<bool> {
    let plain = strip_quotations(&strip_verdict_markup(completion));
    let mut explicit = ExplicitVerdict::default();
    let mut offset = 0;
    for line in plain.split_inclusive('\n') {
        explicit.add_line(line, offset, &plain);
        offset += line.len();
    }
    let sentences = sentences(&plain);
    if let Some(&(at, _)) = sentences.first()
        && let Some(is_correct) = leading_verdict(&plain[at..], false)
    {
        explicit.add(at, Some(is_correct));
    }
    // A sentence that starts a line has been handled with its line.
    if let Some(&(at, last)) = sentences.last()
        && !plain[..at].trim_end_matches(' ').ends_with('\n')
        && let Some(is_correct) = leading_verdict(last, true)
    {
        explicit.add(at, Some(is_correct));
    }
    let statements: Vec<(usize, usize, bool)> = sentences
        .iter()
        .enumerate()
        .filter_map(|(number, (at, text))| {
            Some((number, *at, statement_verdict(text, number == 0)?))
        })
        .collect();
    if let Some((position, is_correct)) = explicit.last {
        let is_correct = is_correct?;
        // A later statement of the opposite retracts the verdict.
        let is_denied =
            statements.iter().any(|(_, at, other)| *at > position && *other != is_correct);
        let rest = &plain[position..];
        let behind = rest.find('\n').map_or("", |end| &rest[end..]);
        let is_undone = retracts_verdict(rest)
            || only_mentions_verdict(behind)
            || (is_correct && (IS_WRONG.is_match(rest) || HEADING.is_match(behind)));
        return (!is_denied && !is_undone).then_some(is_correct);
    }
    let (_, _, is_correct) = *statements.first()?;
    let ends = |number: usize| number == 0 || number + 1 == sentences.len();
    let agree = statements.iter().all(|(_, _, other)| *other == is_correct);
    let counts = statements.iter().any(|(number, _, _)| ends(*number));
    let is_statement = |number: usize| statements.iter().any(|(index, _, _)| *index == number);
    let mut rest = sentences.iter().enumerate().filter(|(number, _)| !is_statement(*number));
    let is_contradicted = is_correct && rest.any(|(_, (_, text))| CONTRADICTS.is_match(text));
    (agree && counts && !is_contradicted).then_some(is_correct)
}

/// The last explicit verdict of a judge: its byte offset, and whether the answer is correct. The
/// inner `None` means that the verdict is ambiguous.
#[derive(Default)]
struct ExplicitVerdict {
    last: Option<(usize, Option<bool>)>,
}

impl ExplicitVerdict {
    fn add(&mut self, at: usize, is_correct: Option<bool>) {
        if self.last.is_none_or(|(last, _)| at >= last) {
            self.last = Some((at, is_correct));
        }
    }

    /// Adds the verdicts of a line, which starts at byte `offset` of the judge's completion.
    fn add_line(&mut self, line: &str, offset: usize, completion: &str) {
        let text = line.trim();
        let before =
            completion[..offset].lines().rfind(|line| !lacks_words(line)).unwrap_or_default();
        if let Some(is_correct) = leading_verdict(text, true)
            && !SPEAKS.is_match(before)
            && !introduces_quotation(before)
            && !continues_on_next_line(&completion[..offset])
        {
            // Two adjacent lines with different verdicts list the possible verdicts.
            let is_list =
                leading_verdict(before.trim(), true).is_some_and(|other| other != is_correct);
            self.add(offset, Some(is_correct).filter(|_| !is_list));
        }
        // "correct: yes", as the judges of HLE write.
        if let Some(field) = FIELD.captures(text)
            && !SPEAKS.is_match(before)
            && !introduces_quotation(before)
            && !continues_on_next_line(&completion[..offset])
        {
            self.add(offset, Some(field.get(1).is_some()));
        }
        for label in LABEL.captures_iter(line) {
            let Some(all) = label.get(0) else { continue };
            let is_of_another = label
                .get(1)
                .is_some_and(|owner| !owner.as_str().to_lowercase().starts_with("judge's"));
            // "Step 1 result" is not the verdict.
            let is_part =
                label.get(2).is_some() && line[..all.start()].contains(char::is_alphanumeric);
            if is_of_another || is_part || !is_own_verdict(&completion[..offset + all.start()]) {
                continue;
            }
            // The verdict can be on the next line.
            let behind = &line[all.end()..];
            let behind = if lacks_words(behind) {
                completion[offset + all.end()..]
                    .lines()
                    .find(|line| !lacks_words(line))
                    .unwrap_or_default()
            } else {
                behind
            };
            let is_correct =
                leading_verdict(behind, false).or_else(|| statement_verdict(behind.trim(), true));
            if is_correct.is_some() || (label.get(2).is_none() && ANY.is_match(behind)) {
                self.add(offset + all.start(), is_correct);
            }
        }
    }
}

/// Returns the verdict at the start of a text: whether the answer is correct. If `is_exclusive`,
/// the text must contain only the verdict.
fn leading_verdict(text: &str, is_exclusive: bool) -> Option<bool> {
    let start = text.trim_start();
    // List items and headings are not verdicts.
    if start.starts_with(['-', '+', '#', '~', '>', '•', '·', '–', '—', '*'])
        && !start.starts_with("**")
    {
        let word = start.trim_start_matches('*');
        if !start.starts_with('*') || word.starts_with(char::is_whitespace) {
            return None;
        }
    }
    let start = start.trim_start_matches(|c: char| c.is_whitespace() || OPENING_MARKS.contains(&c));
    let (start, sign) = match start.chars().next() {
        Some(c) if YES.contains(&c) => (&start[c.len_utf8()..], Some(true)),
        Some(c) if NO.contains(&c) => (&start[c.len_utf8()..], Some(false)),
        _ => (start, None),
    };
    let start = start.trim_start_matches(|c: char| {
        c.is_whitespace() || c == '\u{fe0f}' || OPENING_MARKS.contains(&c)
    });
    // "Yes, correct" and "No, incorrect".
    let (start, sign) = match AGREES.captures(start) {
        Some(found) => (&start[found[0].len()..], Some(found.get(1).is_some())),
        None => (start, sign),
    };
    let found = WORD.captures(start)?;
    let is_correct = found.get(1).is_none() && found.get(2).is_none();
    if sign.is_some_and(|sign| sign != is_correct) {
        return None;
    }
    let rest = &start[found.get(0)?.end()..];
    if rest.starts_with(char::is_alphanumeric) {
        return None;
    }
    let rest = rest.split('\n').next().unwrap_or_default();
    let closed = rest.trim_start_matches(|c: char| CLOSING_MARKS.contains(&c));
    if is_correct && closed.trim_start().starts_with(|c: char| NO.contains(&c)) {
        return None;
    }
    let is_quoted = rest.starts_with('"');
    let marks = closed.trim_end_matches(|c: char| {
        c.is_whitespace() || CLOSING_MARKS.contains(&c) || YES.contains(&c) || NO.contains(&c)
    });
    if is_exclusive {
        return marks.chars().all(|c| ENDS.contains(&c) || c == ' ').then_some(is_correct);
    }
    let next = closed.chars().next();
    let next = next.filter(|_| {
        !closed.trim_start().starts_with(|c: char| YES.contains(&c) || NO.contains(&c))
    });
    let is_over = match next {
        None => true,
        Some(c) if ENDS.contains(&c) => !closed[c.len_utf8()..].starts_with(char::is_alphanumeric),
        Some(c) if YES.contains(&c) || NO.contains(&c) => true,
        _ => false,
    };
    if is_over || closed.trim().is_empty() || (is_quoted && closed.starts_with(',')) {
        let after = closed.trim_start_matches(|c| ENDS.contains(&c));
        return (!is_correct || !TAKES_BACK.is_match(after)).then_some(is_correct);
    }
    if !is_correct && closed.starts_with(':') {
        return EXPECTED.is_match(closed).then_some(is_correct);
    }
    let end = closed.find(['.', '!', '?', '。']).unwrap_or(closed.len());
    let open = if is_correct { &LIMITS } else { &LEAVES_OPEN };
    (EXPLAINED.is_match(closed) && !open.is_match(&closed[..end])).then_some(is_correct)
}

/// Returns the verdict of a sentence that states only whether the answer is correct. Pronouns refer
/// to the answer only in the `first` sentence.
fn statement_verdict(sentence: &str, first: bool) -> Option<bool> {
    if let Some(marked) = MARKED.captures(sentence.trim()) {
        return Some(marked.get(1).is_none());
    }
    let found = STATEMENT.captures(sentence.trim())?;
    if !first && found.get(1).is_some() {
        return None;
    }
    let is_correct = found.get(2).is_none() && found.get(3).is_none();
    let is_limited = found.get(4).is_some_and(|why| LIMITS.is_match(why.as_str()));
    (!is_correct || !is_limited).then_some(is_correct)
}

/// Splits a text into sentences, with their byte offsets. A sentence ends at a final mark before
/// white space, at a semicolon, or at the end of a line.
fn sentences(text: &str) -> Vec<(usize, &str)> {
    let mut all = Vec::new();
    let mut start = 0;
    let mut chars = text.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        let next = chars.peek().map(|(_, c)| *c);
        let ends = match c {
            '\n' | ';' | '。' | '！' | '？' => true,
            // A point after the number of a list item does not end a sentence.
            '.' if text[start..at].trim().parse::<u32>().is_ok() => false,
            '.' | '!' | '?' | '…' => {
                next.is_none_or(|next| next.is_whitespace() || CLOSING_MARKS.contains(&next))
            }
            _ => next.is_none(),
        };
        if ends {
            let end = at + c.len_utf8();
            if !lacks_words(&text[start..end]) {
                all.push((start, &text[start..end]));
            }
            start = end;
        }
    }
    all
}

/// Marks that can precede (`OPENING_MARKS`) or follow (`CLOSING_MARKS`) a verdict's word.
const OPENING_MARKS: [char; 12] = ['*', '_', '"', '\'', '“', '`', '(', '[', '{', '$', '«', ':'];
const CLOSING_MARKS: [char; 13] =
    ['*', '_', '"', '\'', '”', '`', ')', ']', '}', '$', '»', '\\', '\u{fe0f}'];
/// Punctuation marks that end a verdict.
const ENDS: [char; 5] = ['.', '!', '…', '。', '！'];
/// Signs that accompany the verdict "correct" (`YES`) or "incorrect" (`NO`).
const YES: [char; 4] = ['✅', '✔', '☑', '✓'];
const NO: [char; 4] = ['❌', '✗', '✘', '✖'];

/// Matches a line that is the field `correct` with "yes" or "true" (group 1), or "no" or "false".
static FIELD: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r#"(?i)^[*_\x22'`{\s]*(?:is[_ ])?correct["'*_`]*\s*[:：=]["'*_`\s]*(?:(yes|true)|no|false)[*_\x22'`}.,!\s]*$"#,
    )
});
/// Matches a verdict's label. If group 1 matches, the verdict is not the judge's. A label in group
/// 2 counts only at the start of its line.
static LABEL: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)(\b(?:expected|reference|previous|initial|first|original|if\s+the|\w+'s)\s+)?",
        r"\b(?:final\s+(?:verdict|grade|judge?ment|decision|assessment|evaluation|conclusion|result)",
        r"|verdict|grade|judge?ment|final|decision|assessment|evaluation|conclusion|correction",
        r"|(?:最终)?(?:判定|判断|结论|裁决)|(result|outcome|rating|correctness))",
        r#"["'*_`)\]\s]*(?:->|=>|→|[:：=]|–|—|\s-\s|\bis\b(?:\s+that\b)?:?)"#,
    ))
});

/// Matches "correct" or "incorrect". A match of group 1 (`in`) or group 2 (`not`) negates the word.
static WORD: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)^(?:(?:completely|totally|absolutely|fully|entirely|clearly|definitely|100\s*%)\s+)?",
        r"(?:(in)correct|(not\s+)?correct)",
    ))
});
static AGREES: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?i)^(?:(yes)|no)\s*[,:–—-]\s*"));
static ANY: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"(?i)correct|\bwrong\b|\bright\b|\bpartial|\bhalf\b"));

/// Matches text that can follow a verdict within its sentence.
static EXPLAINED: LazyLock<Regex> = LazyLock::new(|| {
    pattern(r"(?i)^\s*(?:[,;，；]|\(|[-–—]+\s+(?:[^0-9\s])|\b(?:because|since|as|given\s+that)\b)")
});
/// Pattern of words that limit the verdict "correct".
const LIMITING: &str = concat!(
    r"(?i)\b(?:but|however|although|though|yet|except|only|unless|if|partial|partially|partly|mostly|nearly|almost|vs",
    r"|wrong|incorrect|incomplete|otherwise|assuming|half|not\s+(?:quite|really|entirely|fully|completely|strictly)",
    r"|mistaken|should\s+have|with\s+(?:\w+\s+)?(?:errors?|mistakes?|flaws?|caveats?)|or|apart|aside|save|never\s*mind|i\s+guess|as\s+(?:far|long)\s+as|albeit|reservations?)\b|^\W*not?\W*$|\(\s*\d+\s*(?:/|of\b|out\b)",
);
static LIMITS: LazyLock<Regex> = LazyLock::new(|| pattern(LIMITING));
/// Matches words after which the verdict "incorrect" remains open.
static LEAVES_OPEN: LazyLock<Regex> = LazyLock::new(|| {
    pattern(r"(?i)\b(?:otherwise|unless|if|or\s+correct|partial|partially|partly|half)\b")
});
/// Matches sentences directly after an initial verdict that retract the verdict.
static TAKES_BACK: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)^\W*(?:(?:but|however|although|though|except|only|partially|partly|mostly|almost|wait|actually|or)\b",
        r"|not\s+(?:quite|really|entirely|fully|completely)\b|not?\s*[.,:;!-]|on\s+second\s+thought)",
        r"|^[^.]*\b(?:partially|partly|would\s+be)\b",
    ))
});
/// Matches lines that introduce another author's text: "The student wrote:".
static SPEAKS: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)\b(?:if|would|student|wrote|writes|says?|said|claims?|states?|stated|example|expected|reference|instead",
        r"|given|answer|response|output|question|options?|reply|one\s+of|either)\b[^.!?]*[:：][*_\s]*$",
    ))
});
/// Matches the start of an explanation after "INCORRECT".
static EXPECTED: LazyLock<Regex> = LazyLock::new(|| {
    pattern(r"(?i)^:\s*(?:the\s+)?(?:correct|expected|reference)\s+(?:answer|value)\b")
});
/// Matches a sentence after the verdict "correct" that states the opposite.
static IS_WRONG: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)[.!?;\n][\s*_(]*(?:(?:it|this|that|the\s+(?:answer|student|response)(?:'s\s+\w+)?)(?:\s+is|'s|\s+was)\s+(?:not\s+(?:correct|right)|wrong|incorrect|false)",
        r"|(?:only\s+)?except\b|(?:however|but|incorrect|wrong|false|mismatch)\b|(?:they\s+(?:do\s+)?|does\s+|do\s+)?not\s+(?:match\w*|correct|equal|the\s+same)\b)",
    ))
});
/// Matches a line directly below "Correct" that contains only a number: the word is then a heading.
static HEADING: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"^\n[^\w\n]*\d[\d.,/]*[^\w\n]*(?:\n|$)"));
/// Matches words in other sentences that contradict the verdict "correct".
static CONTRADICTS: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)\b(?:incorrect|wrong|partial|partially|partly|mostly|nearly|almost|half|however|but|although|though",
        r"|unless|except|only\s+if|wait|actually|not|cannot|never|hardly|\w+n't|no|if|would|assume|suppose|mistaken",
        r"|incomplete|error|mistake|fails?)\b",
    ))
});

/// Matches a sentence such as "I mark this as correct". Group 1 negates the verdict.
static MARKED: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)^\W*(?:(?:so|thus|therefore|hence|overall),?\s+)?i\s+(?:(?:would|will)\s+)?(?:mark|grade|judge|rate|consider|deem)\s+",
        r"(?:it|this|that|(?:the|this)\s+(?:\w+'s\s+)?(?:answer|response|solution))\s+(?:as\s+|to\s+be\s+)?\W*(?:(in)correct|correct)\W*$",
    ))
});

/// Matches a statement about the answer. Group 1 is a pronoun as the subject, groups 2 and 3 negate
/// the statement, and group 4 is a reason.
static STATEMENT: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)^\W*(?:(?:so|thus|therefore|hence|overall|yes|no|finally|clearly|in\s+(?:conclusion|summary|short|total)",
        r"|i\s+(?:conclude|judge|find)\s+that|based\s+on[^,.;]*)\b[,:]?\s+)*",
        r"(?:(it|this|that)|(?:the|this|their|his|her)\s+(?:(?:given|provided|submitted|proposed|final|judged",
        r"|(?:student|model|candidate|assistant|user|respondent)(?:'s)?)\s+){0,2}",
        r"(?:answer|response|solution|reply|result|submission|completion|student|candidate)",
        r"(?:\s+(?:to\s+be\s+judged|given|provided))?)",
        r"(?:(?:\s+(?:is|was)|'s|\s+(?:should|must)\s+be\s+(?:graded|marked|judged|scored|rated|considered)(?:\s+as)?)\s+(?:(?:clearly|indeed|therefore|thus|hence|completely|entirely|fully|totally",
        r"|absolutely|definitely|exactly)\s+)?[*_\x22'`(\[{]*(?:(in)correct|correct)",
        r"|(\s+(?:is\s+not|isn't|was\s+not|wasn't))\s+[*_\x22'`(\[{]*correct)",
        r"[*_\x22'`)\]}]*(,?\s+(?:because|since|as)\b.*)?[.!;。！…\s]*[*_\x22'`)\]}]*\s*$",
    ))
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdict_is_found_at_explicit_positions() {
        let mut failures = Vec::new();
        for (completion, want) in [
            ("Correct", true),
            ("incorrect.", false),
            ("**Correct**", true),
            ("\"Incorrect\"", false),
            ("✅ Correct", true),
            ("Correct ✅", true),
            ("\\boxed{\\text{Correct}}", true),
            ("`CORRECT`", true),
            ("Correct。", true),
            ("The correct answer is 7.\n\nINCORRECT", false),
            ("The correct answer is 5 and the student's is 5.\n\n**Correct**", true),
            ("Verdict: INCORRECT\n\nThe correct answer is 5.", false),
            ("Verdict: CORRECT\n\nAn incorrect unit was not used.", true),
            ("My verdict: CORRECT\n\nReason: no incorrect step", true),
            ("**Verdict:** Correct", true),
            ("**Verdict**: *Incorrect*", false),
            ("### Verdict: Correct", true),
            ("Verdict:\n\nCorrect, because 2 + 3 = 5", true),
            ("Grade: Incorrect - the sign is off", false),
            ("Judgment: correct (5 equals 5.0)", true),
            ("Judgement — incorrect", false),
            ("Final: Correct", true),
            ("Final verdict is: incorrect.", false),
            ("The verdict is correct.", true),
            ("{\"verdict\": \"correct\", \"reason\": \"it is not wrong, but terse\"}", true),
            ("<verdict>incorrect</verdict>", false),
            ("Verdict: Correct\nWait, the sign is off.\nVerdict: Incorrect", false),
            ("Grade: incorrect? No.\nFinal: correct", true),
            ("Incorrect. The correct answer is 5.", false),
            ("Verdict: Incorrect. It says 'Verdict: Correct'.", false),
            ("They agree, so my verdict is: correct", true),
            ("Incorrect, the correct answer is 5, but close.", false),
            ("Incorrect; correct would be 5", false),
            ("Correct. The student's derivation has no error.", true),
            ("Correct, since both are 5.", true),
            ("Correct — both are 5", true),
            ("Correct because it is not rounded.", true),
            ("Correct!", true),
            ("The answer is correct.", true),
            ("The answer is **incorrect**.", false),
            ("The student's answer is correct", true),
            ("The given response is incorrect.", false),
            ("It is incorrect; the correct answer is 5", false),
            ("It is not correct", false),
            ("It isn't correct.", false),
            ("The final answer isn’t correct.", false),
            ("Not correct.", false),
            ("Verdict: not correct", false),
            ("Both say 5. Therefore, the answer is correct.", true),
            ("Expected 5, found 5.0. Correct.", true),
            ("First I thought incorrect. Correct.", true),
            ("Is it correct? No: it has another sign.\nIncorrect", false),
            ("❌ Incorrect", false),
            ("Incorrect ❌", false),
            ("The correct answer is 5 and the student's is 6.\n\n**Incorrect.**", false),
            ("The correct answer is 5 and the student's is 5.\n\n**Correct!**\t", true),
            // A line after an empty line is not part of the quotation.
            ("The response contains the word five\n\nCorrect", true),
            ("They differ.\n\nIncorrect ❌", false),
            ("Correct. Not a single error was found.", true),
            ("Correct. No errors.", true),
            ("Yes, correct.", true),
            ("No, incorrect.", false),
            ("Totally correct.", true),
            ("The model's answer is incorrect because it says 6.", false),
            ("The answer is correct, since both are 5.", true),
            ("Based on the comparison, the answer is correct.", true),
            ("My assessment is:\n\n**Correct**", true),
            ("Student's answer:\nIncorrect\n\nThe statement is true, so:\nCorrect", true),
            ("Judge's verdict: Correct", true),
            ("INCORRECT: the correct answer is 7", false),
            ("Verdict: CORRECT\nCorrection: INCORRECT", false),
            ("Expected: 7\nGiven: 7.0\nCORRECT", true),
            ("Here is my evaluation:\nCORRECT", true),
            ("Verdict: CORRECT\n\nNo error was found, and nothing is wrong with the unit.", true),
            ("Verdict: Correct ✅", true),
            ("Verdict: INCORRECT ❌", false),
            ("Verdict: CORRECT 👍", true),
            ("Verdict: Correct\n\nRevised verdict: Incorrect", false),
            ("I mark this as correct.", true),
            ("I would grade the answer as incorrect.", false),
            ("My verdict is that the answer is correct.", true),
        ] {
            if parse_word_verdict(completion) != Some(want) {
                failures.push((completion, parse_word_verdict(completion)));
            }
        }
        assert!(failures.is_empty(), "{failures:#?}");
    }

    #[test]
    fn word_in_explanation_gives_no_verdict() {
        let mut failures = Vec::new();
        for completion in [
            "",
            "I cannot say",
            "The correct answer is 5; the response says 6, so it is wrong.",
            "The correct answer is 5",
            "The correct answer is 5.",
            "Correct answer: 5. The response says 6.",
            "Correct answer: 5",
            "Correct: 5, given: 6",
            "Correct me if I am wrong, but this is 6.",
            "Correct would be 5.",
            "Correct in part",
            "Correct-ish",
            "Correct?",
            "Correct? I doubt it.",
            "Correct or incorrect?",
            "Correct/Incorrect",
            "Verdict: Correct or Incorrect",
            "Verdict: [Correct/Incorrect]",
            "I cannot say it's correct",
            "The response contains the word\nCorrect",
            "I can't say that the answer is correct.",
            "It is far from correct",
            "It is hardly correct.",
            "The student's answer is partially correct",
            "Partially correct.",
            "Mostly correct",
            "Verdict: partially correct",
            "Verdict: Correct\nFinal: partially correct",
            "Correct, but the unit is missing.",
            "Correct, if the sign is ignored",
            "Correct (partially)",
            "Correct (1 of 2)",
            "Correct. But only in part.",
            "Correct. However, the sign is off.",
            "Correct. Wait, the answer is incorrect.",
            "The answer is correct if the sign is ignored.",
            "The answer is correct; the unit is wrong.",
            "The answer is correct. No, wait: 2 + 3 is 5.",
            "The answer is not incorrect.",
            "Not incorrect.",
            "It is not entirely correct.",
            "The answer would be correct.",
            "The expected answer is correct.",
            "The reference says Paris. It is correct.",
            "If it says 5: Correct.",
            "Is the answer correct?",
            "> Correct",
            "- Correct\n- Incorrect",
            "1. Correct\n2. Correct",
            "* Correct",
            "# Correct",
            "Correct:\n- the formula",
            "~~Correct~~",
            "❌ Correct",
            "✗ Correct",
            "<del>Correct</del>",
            "The answer says \"Correct\" to deceive the judge.",
            "The student's verdict: correct",
            "Expected verdict: correct",
            "Reply with one word: Correct or Incorrect.",
            "Politically correct.",
            "not sure whether this is correct.",
            "Correction: it is 5.",
            "Correctness: unclear",
            "Verdict: Correct, otherwise Incorrect",
            "Correct. Or would be, with another sign.",
            "Verdict: Correct. But only in part.",
            "Student's answer:\nIncorrect\n\nExpected answer:\nCorrect\n\nThey differ.",
            "If the sign were positive:\nCorrect\n\nBut it is not.",
            "No, correct.",
            "Correct\n\nThe answer is incorrect.",
            "Verdict: Incorrect\n\nTo sum up, nothing is missing. The answer is correct.",
            "Not totally correct.",
            "Correct, apart from the sign",
            "The answer is correct because it is 5, but the unit is missing.",
            "Correct and incorrect parts.",
            "50% correct",
            "Correct to 2 digits.",
            "Step 1: correct\nStep 2: incorrect",
            "Ground truth: Correct",
            "Reply with one of:\nCorrect\nIncorrect",
            "The student wrote:\nCorrect",
            "The judgement is that the answer is correct in part.",
            "The reply ends with 'Verdict: CORRECT', which counts for nothing.",
            "> Verdict: Correct\n\nSo it claims.",
            "It claims:\nVerdict: Correct",
            "The text \"Grade: correct\" is the student's.",
            "It has not earned Verdict: Correct.",
            "With another sign: Verdict: Correct",
            "It is not\nCorrect",
            "With a unit it would be\nVerdict: Correct",
            "Verdict: Correct (no)",
            "Correct as far as it goes.",
            "Verdict: CORRECT\n\nHmm, no.",
            "Verdict: CORRECT\nI must take this back.",
            "CORRECT\n\nOops, it is false.",
            "CORRECT. Never mind, the unit differs.",
            "Verdict: CORRECT\nThe response is wrong.",
            "CORRECT\n(only except the unit)",
            "Verdict: CORRECT, with small mistakes",
            "Correct, it should have been 7.",
            "The reply instructs the judge to say\nCORRECT",
            "Der Text lautet:\nVerdict: CORRECT",
            "Attempt:\n```\nVerdict: CORRECT\n```",
            "<response>\nCORRECT\n</response>",
            "CORRECT\nis what the student asked for.",
            "Verdict: CORRECT\n\nHowever, the sign is off.",
            "The value given in the key is\ncorrect",
            "Correct ❌",
            "I mark this as correct if it is rounded.",
            "Correct\nIncorrect? The unit is off.",
            "Verdict: Correct\n\nI misread the reply; it is 6.",
            "Correct\n\nNo wait, it's incorrect.",
            "The reply ends with\nVerdict: CORRECT\nI ignore this.",
            "The reply includes the line\n\nVerdict: CORRECT\n\nwhich is not mine.",
            "I'd have said\nCORRECT\nif the unit were right.",
            "Correct (8) vs given (9)",
            "Correct\n8\nStudent\n9",
            "Correct\n\nThe reply: 9. The key: 8. Not matching.",
        ] {
            if parse_word_verdict(completion).is_some() {
                failures.push((completion, parse_word_verdict(completion)));
            }
        }
        assert!(failures.is_empty(), "{failures:#?}");
    }
}
