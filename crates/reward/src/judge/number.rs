//! Parses numeric verdicts.
//!
//! A judge's explanation also contains numbers: "it names 2 of 3 causes". A number is therefore the
//! score only if the completion marks it as such. The marks are, in descending strength:
//!
//! 1. a label that starts its sentence ("Score: 7", "the rating is 7", "I give it a 7"). A label
//!    for the total takes precedence over a plain label. Among labels of the same name, the last
//!    one counts;
//! 2. double brackets, `[[7]]`;
//! 3. a number with the end of the scale that starts its sentence, "7/10" or "so 7 out of 10";
//! 4. the first or last line, if it contains only the number, or the start of the completion ("7 -
//!    names all causes").
//!
//! Except for labels of one name, different numbers with marks of the same strength give no
//! verdict. The strongest mark decides: if its number cannot be parsed or is out of range, there is
//! no verdict.

use std::sync::LazyLock;

use regex::{Captures, Match, Regex};

use super::marks::{
    continues_on_next_line, is_foreign_or_hypothetical, is_own_verdict, only_mentions_verdict,
    retracts_verdict, strip_quotations, strip_verdict_markup, text_after_retraction,
};
use crate::pattern::pattern;
use crate::unsettled::is_marked_value_unsettled;

/// Maximum number of characters before a score in double brackets that are searched for the name of
/// a score.
const MAX_CLAUSE: usize = 200;

/// Returns the score in a judge's completion, mapped linearly from `min..=max` to 0..=1. Returns
/// `None` if the completion has no unambiguous score.
pub(super) fn parse_number_verdict(completion: &str, min: f64, max: f64) -> Option<f64> {
    let scale = ScoreScale { min, max };
    // A low score can be decorated with a cross.
    let completion = strip_verdict_markup(completion).replace(['❌', '✅', '✔', '✓', '👎'], " ");
    let text = scale.strip_scale_phrases(&strip_quotations(&completion))?;
    let text = text_after_retraction(&text);
    let bracketed = || {
        BRACKETS.find_iter(text).map(|found| {
            let behind = &text[found.end()..];
            let after = || behind.split_once("]]").map_or("", |(_, after)| after);
            scale.parse_score(behind).filter(|_| !is_marked_value_unsettled(after()))
        })
    };
    let number = scale
        .find_labeled_score(text)
        .or_else(|| single_distinct_value(bracketed()))
        .or_else(|| scale.leading_score_with_scale_end(text))
        .or_else(|| scale.find_standalone_score(text))
        .flatten()?;
    // "Rating: [[4]]. The other answer: [[2]]".
    let is_other = |found: Match<'_>| {
        let before = &text[..found.start()];
        let start = before.char_indices().rev().nth(MAX_CLAUSE).map_or(0, |(at, _)| at);
        let clause = before[start..].rsplit(['.', ',', ';', '\n']).next().unwrap_or_default();
        let other = scale.parse_score(&text[found.end()..]);
        !NAMES_SCORE.is_match(clause) && other.is_some_and(|other| other != number)
    };
    if BRACKETS.find_iter(text).any(is_other) {
        return None;
    }
    to_fraction(number, min, max)
}

/// Maps a number linearly from `min..=max` to 0..=1. Returns `None` if the number is out of range.
pub(super) fn to_fraction(number: f64, min: f64, max: f64) -> Option<f64> {
    (min..=max).contains(&number).then(|| (number - min) / (max - min))
}

/// The scale of a judge's scores, from `min` to `max`.
struct ScoreScale {
    min: f64,
    max: f64,
}

/// Returns the value that all candidates share. The outer `None` means that there are no
/// candidates, and the inner `None` that they differ or that one cannot be parsed.
fn single_distinct_value(mut found: impl Iterator<Item = Option<f64>>) -> Option<Option<f64>> {
    let first = found.next()?;
    Some(first.filter(|_| found.all(|other| other == first)))
}

impl ScoreScale {
    /// Removes phrases that only state the scale, such as "from 1 to 10". Returns `None` if the
    /// text explicitly states a different scale.
    fn strip_scale_phrases(&self, completion: &str) -> Option<String> {
        let mut is_other = false;
        let replaced = RANGE.replace_all(completion, |found: &Captures<'_>| {
            let end = |group| found.get(group).and_then(|end| end.as_str().parse::<f64>().ok());
            if (end(3), end(4)) == (Some(self.min), Some(self.max)) {
                return found.get(2).map_or("", |label| label.as_str()).to_owned();
            }
            is_other |= found.get(1).is_some();
            found[0].to_owned()
        });
        (!is_other).then(|| replaced.into_owned())
    }

    /// Returns the number after the label with the highest [`LabelRank`]. The outer `None` means
    /// that there is no label, and the inner `None` that the number is ambiguous.
    fn find_labeled_score(&self, text: &str) -> Option<Option<f64>> {
        let mut labels: Vec<(LabelRank, String, Option<f64>)> = Vec::new();
        for found in LABEL.captures_iter(text) {
            let (Some(all), Some(name)) = (found.get(0), found.get(2)) else { continue };
            let before = &text[..all.start()];
            let behind = &text[all.end()..];
            let sign = found.get(3).map(|sign| sign.as_str().trim());
            let has_colon = sign.is_some_and(|sign| !sign.starts_with(['i', 'I']));
            let name = name.as_str().to_lowercase();
            let is_weak = WEAK.contains(&&*name);
            let word = found.get(1).map_or("", |word| word.as_str());
            let Some(mut rank) = LabelRank::from_label(word, sign, has_colon) else { continue };
            if REVISED.is_match(&all.as_str().to_lowercase()) || name.starts_with(['总', '最']) {
                rank = LabelRank::Total;
            }
            // "Criterion 1 score".
            if word.is_empty()
                && before.trim_end_matches(' ').ends_with(|c: char| c.is_ascii_digit())
            {
                rank = LabelRank::Part;
            }
            let line = before.rsplit('\n').next().unwrap_or_default();
            // "Final: 6" after other sentences.
            if name == "final" && has_colon {
                rank = LabelRank::Total;
            }
            let is_label = match (rank, is_weak) {
                (LabelRank::Total, true) => has_colon,
                (LabelRank::Part, _) => has_colon && !is_weak,
                (_, true) => has_colon && !line.contains(char::is_alphanumeric),
                _ => true,
            };
            let is_score = SIGN_OF_NUMBER.is_match(behind)
                && ((has_colon && !is_weak) || is_standalone_score(behind));
            if is_label && is_score && !before.ends_with(['-', '_']) && is_own_verdict(before) {
                let value = self.parse_score(behind).filter(|_| is_standalone_score(behind));
                labels.push((rank, name, value.filter(|value| self.is_only_score(behind, *value))));
            }
        }
        for found in GIVES.find_iter(text) {
            let sentence =
                text[..found.start()].rsplit(['.', '!', '?', ';', '\n']).next().unwrap_or_default();
            let behind = &text[found.end()..];
            if SIGN_OF_NUMBER.is_match(behind)
                && is_standalone_score(behind)
                && !is_foreign_or_hypothetical(sentence)
            {
                labels.push((LabelRank::Phrase, String::new(), self.parse_score(behind)));
            }
        }
        let rank = labels.iter().map(|(rank, ..)| *rank).max()?;
        labels.retain(|(other_rank, ..)| *other_rank == rank);
        let is_same = labels.iter().all(|(_, name, _)| *name == labels[0].1);
        let mut values = labels.into_iter().map(|(.., value)| value);
        if is_same && rank != LabelRank::Part {
            values.next_back()
        } else {
            single_distinct_value(values)
        }
    }

    /// Returns whether the number at the start of `behind`, whose value is `value`, is the only
    /// score there:
    ///
    /// - its line contains no different number with the end of the scale ("10/10 for style, 2/10
    ///   for substance");
    /// - its sentence contains no number that can be a part, a sum or a revision of the score ("4
    ///   (content) + 3 (style)", "8, reduced to 3");
    /// - no later sentence, and no line that continues the sentence, retracts the score.
    fn is_only_score(&self, behind: &str, value: f64) -> bool {
        let line = behind.trim_start().lines().next().unwrap_or_default();
        let rest = trim_leading_marks(line);
        let rest = &rest[NUMBER.find(rest).map_or(0, |number| number.end())..];
        let sentence = &rest[..END.find(rest).map_or(rest.len(), |end| end.start())];
        let sentence =
            &sentence[..REASON.find(sentence).map_or(sentence.len(), |reason| reason.start())];
        let sentence = REMARK.replace_all(sentence, " ");
        let mut other_scores =
            OTHER_SCORE.captures_iter(&sentence).filter_map(|found| parse_decimal(&found[1]));
        let after = &behind[rest.as_ptr() as usize - behind.as_ptr() as usize..];
        other_scores.all(|other| other == value)
            && self.find_scores_with_scale_end(line).all(|(_, other)| other == Some(value))
            && !HEDGED.is_match(rest)
            && !DEDUCTS.is_match(rest)
            && !retracts_verdict(after)
            && !only_mentions_verdict(after)
            && !TOO.is_match(after)
    }

    /// Returns the numbers that are followed by the end of the scale, as in "7/10", and the byte
    /// offsets of these phrases.
    fn find_scores_with_scale_end(&self, text: &str) -> impl Iterator<Item = (usize, Option<f64>)> {
        OF.captures_iter(text).filter_map(|found| {
            let number = found.get(1)?;
            let end = found.get(2)?;
            let all = found.get(0)?;
            let is_scale = parse_decimal(end.as_str()) == Some(self.max);
            let is_part = PART.is_match(&text[..all.start()]);
            // "8/10 steps" is a count of steps.
            (is_scale && !is_part && AFTER_SCORE.is_match(&text[all.end()..]))
                .then(|| (all.start(), parse_decimal(number.as_str())))
        })
    }

    /// Returns the number that is followed by the end of the scale, as in "7/10", if such a phrase
    /// starts its sentence.
    fn leading_score_with_scale_end(&self, text: &str) -> Option<Option<f64>> {
        self.find_scores_with_scale_end(text)
            .find(|(at, _)| is_own_verdict(&text[..*at]) && !COUNT.is_match(text))?;
        single_distinct_value(self.find_scores_with_scale_end(text).map(|(_, number)| number))
    }

    /// Returns the number that is alone on the first or last line, or that starts the completion.
    fn find_standalone_score(&self, text: &str) -> Option<Option<f64>> {
        let mut lines = text.lines().filter(|line| line.contains(char::is_alphanumeric));
        let first = lines.next()?;
        let rest = |line: &str| {
            let line = trim_leading_marks(line);
            NUMBER.find(line).map(|number| line[number.end()..].to_owned())
        };
        // "3 of 10" can be a count of items.
        let is_count = |line: &str| COUNT.is_match(line);
        let is_only_number = |rest: String| rest.chars().all(|c| !c.is_alphanumeric() && c != '?');
        // "The expected answer is", "The student wrote:".
        let above = |line: &str| &text[..line.as_ptr() as usize - text.as_ptr() as usize];
        let is_of_problem = |line: &str| {
            let last = above(line).lines().rfind(|line| line.contains(char::is_alphanumeric));
            continues_on_next_line(above(line))
                || last.is_some_and(|last| PROBLEM.is_match(last) && !NAMES_SCORE.is_match(last))
        };
        let ends = [Some(first), lines.next_back()].into_iter().flatten();
        single_distinct_value(
            ends.filter(|line| {
                !is_count(line) && !is_of_problem(line) && rest(line).is_some_and(is_only_number)
            })
            .map(|line| self.parse_score(line)),
        )
        .or_else(|| {
            let is_explained = rest(first).is_some_and(|rest| {
                EXPLAINED.is_match(&rest)
                    && !LIMITED.is_match(&rest)
                    && !VALUE_OF_PROBLEM.is_match(&rest)
            });
            is_explained.then(|| self.parse_score(first))
        })
    }

    /// Parses the number at the start of a text, after optional marks, and converts it to this
    /// scale. Returns `None` if there is no number, if there are several numbers ("7-8", "7 or 8"),
    /// or if the number is on another scale and cannot be converted.
    fn parse_score(&self, text: &str) -> Option<f64> {
        let text = trim_leading_marks(text);
        let found = NUMBER.captures(text)?;
        let number = parse_decimal(found.get(1)?.as_str())?;
        if NOT_ONE.is_match(&text[found.get(0)?.end()..]) {
            return None;
        }
        let end = match (found.get(2), found.get(3)) {
            (Some(_), _) => 100.0,
            (None, Some(end)) => parse_decimal(end.as_str())?,
            (None, None) => return Some(number),
        };
        if end == self.max {
            return Some(number);
        }
        let is_within = end > 0.0 && (0.0..=end).contains(&number);
        (self.min == 0.0 && is_within).then(|| number / end * self.max)
    }
}

/// Strength with which a label marks its number as the score, in ascending order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum LabelRank {
    /// A label of a partial score: "Style score: 7".
    Part,
    /// A phrase that contains neither a colon nor "is": "a score of 7", "I give it a 7".
    Phrase,
    /// A statement that contains "is": "The score is 7".
    Is,
    /// A label with a colon or a similar sign: "Score: 7".
    Colon,
    /// A label of a total or revised score: "Final score: 7".
    Total,
}

impl LabelRank {
    /// Returns the rank of a label that follows `word` and precedes `sign`. Returns `None` if the
    /// label does not name the judge's score ("maximum score").
    fn from_label(word: &str, sign: Option<&str>, has_colon: bool) -> Option<LabelRank> {
        let word = word.trim().to_lowercase();
        let plain = match (sign, has_colon) {
            (None, _) => LabelRank::Phrase,
            (_, false) => LabelRank::Is,
            (_, true) => LabelRank::Colon,
        };
        match &*word {
            word if OTHER_LABELS.contains(&word) => None,
            // "The student's score".
            word if word.ends_with("'s") => None,
            "final" | "overall" | "total" if sign.is_some() => Some(LabelRank::Total),
            "" | "the" | "my" | "a" | "this" | "its" | "and" | "so" | "answer" | "response"
            | "quality" | "final" | "overall" | "total" => Some(plain),
            _ => Some(LabelRank::Part),
        }
    }
}

/// Returns whether the number at the start of a text can be a score by itself: it is not a count
/// ("7 errors"), not conditional ("7 if complete"), not corrected ("7. No, 5"), and not the number
/// of a list item on a later line.
fn is_standalone_score(text: &str) -> bool {
    let number = trim_leading_marks(text);
    let lead = text.len() - text.trim_end().len() + number.len();
    let is_item = text[..text.len() - lead].contains('\n') && ITEM.is_match(number);
    !is_item
        && NUMBER.find(number).is_some_and(|found| {
            let after = &number[found.end()..];
            AFTER_SCORE.is_match(after) && !LIMITED.is_match(after)
        })
}

/// Removes leading marks such as `*` and `(` from a text, and white space at both ends.
fn trim_leading_marks(text: &str) -> &str {
    text.trim().trim_start_matches(|c: char| c.is_whitespace() || OPENING_MARKS.contains(&c))
}

/// Parses a number with a decimal point or a decimal comma.
fn parse_decimal(text: &str) -> Option<f64> {
    text.replace(',', ".").replace('−', "-").parse().ok()
}

/// Words before a label with which the label names something other than the judge's score: "maximum
/// score".
const OTHER_LABELS: [&str; 48] = [
    "max",
    "maximum",
    "min",
    "minimum",
    "perfect",
    "highest",
    "lowest",
    "possible",
    "full",
    "top",
    "passing",
    "best",
    "worst",
    "previous",
    "reference",
    "expected",
    "average",
    "mean",
    "threshold",
    "confidence",
    "no",
    "initial",
    "base",
    "baseline",
    "target",
    "sample",
    "example",
    "own",
    "claimed",
    "ideal",
    "potential",
    "possible",
    "required",
    "needed",
    "other",
    "human",
    "starting",
    "old",
    "first",
    "requested",
    "desired",
    "demanded",
    "wanted",
    "proposed",
    "suggested",
    "student",
    "candidate",
    "user",
];
/// Labels that mark a number as a score only at the start of a line.
const WEAK: [&str; 9] = [
    "verdict",
    "point",
    "total",
    "overall",
    "judgement",
    "judgment",
    "evaluation",
    "assessment",
    "final",
];
/// Marks that can precede a number in a judge's completion.
const OPENING_MARKS: [char; 11] = ['*', '_', '"', '\'', '“', '`', '(', '[', '{', '$', ':'];

/// Matches the number of a score, with a percent sign in group 2 or the end of its scale in group
/// 3.
static NUMBER: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)^([-−]?\d+(?:\.\d{1,15}|,\d{1,2})?)分?[*_$)}\]\x22'`]*",
        r"(?:\s*(%|\\%|percent\b)|[\s(]*(?:/|\bout\s+of\b|\bof\b)[\s*_${\[(]*(\d+(?:[.,]\d+)?)分?)?",
    ))
});
/// Matches text after a number that makes the number unusable as a score: more digits, a letter,
/// the end of a range, another number.
static NOT_ONE: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)^[*_)\]}\x22'`]*(?:[\p{L}\p{N}^/]|[.,]\d|\s*(?:[-–—~]|\bto\b|\bor\b|\band\b|[×*+/=])\s*\d|[ \t]+\d|\s*±|,\s*(?:maybe\s+|perhaps\s+|or\s+)?\d+(?:\.\d+)?[\])*\s.]*(?:$|\n)",
        r"|\s*(?:/|\bof\b)\s*(?:the|these|those|them|its|all)\b)",
    ))
});
/// Matches text before a number that makes it a part of another number, or one of several numbers.
static PART: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"(?i)[/.,−–-]$|\d\s*(?:\band|\bor|\bto|,)\s*$"));
static COUNT: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?i)^\W*\d+\s+of\s+\d+\W*$"));
static SIGN_OF_NUMBER: LazyLock<Regex> = LazyLock::new(|| pattern(r#"^[\s*_"'“`(\[{$:]*[-−]?\d"#));
static BRACKETS: LazyLock<Regex> = LazyLock::new(|| pattern(r"\[\[\s*(?:[A-Za-z]+\s*[:=]\s*)?"));
/// Matches a score with the end of its scale, as in "7/10". The number is in group 1, and the end
/// of the scale in group 2.
static OF: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)([-−]?\b\d+(?:[.,]\d+)?)[\s*_$)}\]\x22'`]*(?:/|[(\s]*\bout\s+of\b|\s+of\b)[\s*_${\[(]*",
        r"(\d+(?:[.,]\d+)?)\b",
    ))
});
/// Matches text that can follow a score.
static AFTER_SCORE: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)^[*_$)}\]\x22'`]*(?:\s+(?:points?|pts|marks|stars?))?(?:\s*$|[.,;!)}](?:\s|$)|\s*\n|\s*[–—(|]|\s+-+\s",
        r"|\s+(?:because|since|as|for\s+(?:\w+ing|its|the)|due\s+to|given|overall|in\s+total|based\s+on)\b|\s+(?-i:[A-Z]))",
    ))
});
/// Matches text after a score that limits or retracts the score.
static LIMITED: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)^[^\w.!;]*\b(?:if|unless|only|provided|assuming|when|at\s+(?:best|most|least)|minus",
        r"|(?:for|of)\s+(?:an?\s*other|other|the\s+(?:other|reference)))\b",
        r"|^[^\w\n.!;]*\(\s*(?:max(?:imum)?|possible|just\s+kidding|claimed|requested|demanded|desired)\b",
        r"|^,\s+(?:it|he|she|the\s+\w+)\s+(?:says?|said|claims?|claimed|asks?|demands?)\s*[.!]?\s*(?:$|\n)",
        r"|^\W*\b(?:no\s*[,.:;]|(?:wait|actually|rather|correction|make\s+that|or)\b)",
    ))
});
/// Matches labels of a score that replaces an earlier score: "revised score".
static REVISED: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"^(?:revised|updated|adjusted|corrected|amended|new|penalized|reduced|lowered)\b|\safter\s",
    )
});
/// Matches the end of a sentence or line.
static END: LazyLock<Regex> = LazyLock::new(|| pattern(r"[.!?](?:\s|$)|\n"));
/// Matches the start of an explanation, whose numbers are not scores.
static REASON: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"(?i)\b(?:because|since|as|given|due)\b|\s[-–—]+\s+[a-z]"));
static REMARK: LazyLock<Regex> = LazyLock::new(|| pattern(r"\([^()]*\)"));
/// Matches a further number that could be a score: it follows an operator, a comma or a
/// conjunction, and has no noun.
static OTHER_SCORE: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)(?:[+−=;,→]|\s[-–—]|\b(?:and|but|so|then|now|or|minus|plus|(?:reduced|lowered|raised|changed|adjusted|down|up)\s+to))",
        r"\s*(?:it\s+is\s+|only\s+)?([-−+]?\d+(?:[.,]\d+)?)[*_]*\s*(?:/\s*\d+\s*)?",
        r"(?:$|[.,;!=+]|(?:for|because|since|due|in\s+total|points?)\b)",
    ))
});
/// Matches a doubt, a condition or another score in the sentence of a score: "7, I guess", "7,
/// though 8 is possible", "7 (8 with the unit)".
static HEDGED: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)^[^.!?\n]*?(?:\b(?:though|although|but|yet)\s+(?:it\s+\w+\s+be\s+)?\d|[,(]\s*(?:maybe|perhaps|probably|possibly|i\s+guess|less\s+\d)",
        r"|\(\s*\d+\s+(?:with|if|when)\b|\breduced\s+by\s+\d)",
    ))
});
/// Matches a later sentence that changes the score: "However, deducting 2 points, 6".
static DEDUCTS: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)[.!;\n]\s+(?:(?:however|but|then|now|so)\b,?\s+)?(?:after\s+the\s+deduction|deduct(?:ing)?|subtract(?:ing)?|(?:less|minus)\s+\d+)\b",
    )
});
/// Matches a later sentence that calls the score too high or too low.
static TOO: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)\b(?:that|this|it)\s+(?:is|was|seems)\s+(?:too|overly)\s+(?:generous|high|low|harsh|strict|lenient)\b",
    )
});
/// Matches a line above a number that belongs to the problem: "The expected answer is:".
static PROBLEM: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)\b(?:expected|correct|right|reference|true|given|student|candidate|answer)\b[^.!?]*[:：][*_\s]*$",
    )
});
/// Matches words that name a judge's score, such as "rating".
static NAMES_SCORE: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"(?i)\b(?:score|rating|grade|points?|verdict|my|i)\b"));
/// Matches text after a number that belongs to the problem: "7: the student's answer".
static VALUE_OF_PROBLEM: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)^[^\w\n]*(?:(?:this|it)\s+(?:is|was)\s+)?(?:the\s+)?(?:(?:student|model|user|candidate)(?:'s)?|expected|correct|reference|right|true|given)",
        r"\s+(?:answer|one|number|value|result|solution)\s*(?:$|[-–—).,:;\n])",
    ))
});
static ITEM: LazyLock<Regex> = LazyLock::new(|| pattern(r"^\d+[.)]\s+\S"));
/// Matches text that can follow a score at the start of a completion.
static EXPLAINED: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)^[*_)\]\x22'`]*(?:\s*[–—(]|\s+-+\s|:\s|\s*,?\s*(?:because|since)\b|\s+(?:points?|stars?)\s*(?:[.,;:!()–—-]|$))",
    )
});
/// Matches a scale, such as `from 1 to 10`. Group 1 contains words that identify it as a scale. A
/// label in group 2, such as `score (`, is preserved.
static RANGE: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)((?:\bon\s+)?(?:\ba\s+)?\bscale\s*(?:of|from|:)?\s*|\brange\s*(?:of|from|:)?\s*",
        r"|(\b(?:score|rating|grade)\s*[(\[]\s*))?(?:\bfrom\s+|\bbetween\s+|\bon\s+an?\s+)?",
        r"(-?\b\d+(?:\.\d+)?)\s*(?:-|–|—|\.\.+|\bto\b|\band\b)\s*(\d+(?:\.\d+)?)\b(?:\s+scale\b)?",
    ))
});
/// Matches the label of a score: the word before the label (group 1), the label's name (2), and the
/// sign before the number (3).
static LABEL: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)(\b[a-z]+(?:['’]s)?[ \t]+)?(?:\b|\b(?:final|overall|total)_)(score|(?:最终|最后|综合|总)?(?:评分|得分|分数)|总分|punktzahl|rating|grade|mark|verdict|point|total|overall|judge?ment|evaluation",
        r"|assessment|final)s?\b(?:\s+after\s+[a-z]+(?:\s+[a-z]+)?)?(?:\s*[(\[]?\s*(?:out\s+of|max(?:imum)?|/)\s*\d+|\s*[(\[])?",
        r"(?:[*_\x22'`)\]\s]*([:：=–—]|-\s|\bis\b:?)|[*_\x22'`)\]]*\s+(?:of|would\s+be|should\s+be)\b)?",
        r"(?:\s+(?-i:an?|only|just|therefore|thus)\b)?",
    ))
});
/// Matches phrases that assign a score, such as `I give it` or `deserves`.
static GIVES: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)\b(?:(?:i|we)(?:\s+would|\s+will|['’]d|['’]ll)?\s+(?:give|rate|score|grade|assign|award)",
        r"|scores|deserves|earns|merits|gets|receives|rated|scored|graded)\b",
        r"(?:\s+(?:it|this|that|them|the|answer|response|reply|solution|an?|at|as|score|rating|of|only|with|grade|solid|strong)\b)*",
    ))
});

#[cfg(test)]
#[path = "number_tests.rs"]
mod tests;
