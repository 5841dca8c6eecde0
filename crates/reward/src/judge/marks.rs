//! Normalizes the markup of a judge's completion, and detects verdicts that are not the judge's
//! own: quoted, conditional or retracted ones.

use std::sync::LazyLock;

use regex::{Captures, Regex};

use crate::characters::is_decoration;
use crate::pattern::pattern;

/// Removes tags, LaTeX commands and decoration around the words of a judge's completion. An opening
/// tag that names a verdict becomes a label: `<score>7</score>` becomes the line "score: 7".
/// Full-width digits become ASCII digits. Other tags stay, such as `<del>`, so that deleted text is
/// not parsed as a verdict.
pub(super) fn strip_verdict_markup(completion: &str) -> String {
    let text = COMMAND.replace_all(completion, "{");
    let text = LABEL.replace_all(&text, "\n$1: ");
    let narrow = |c: char| match c {
        c if is_decoration(c) && !matches!(c, '✅' | '✔' | '☑' | '✓') => ' ',
        '０'..='９' | '／' => char::from_u32(c as u32 - 0xfee0).unwrap_or(c),
        '’' | '‘' => '\'',
        c => c,
    };
    TAG.replace_all(&text, "").chars().map(narrow).collect()
}

/// Removes quotations from a judge's completion: lines that start with ">", and text in quotation
/// marks that contains a label, as in "the student wrote 'Score: 10'".
pub(super) fn strip_quotations(completion: &str) -> String {
    let is_quoted = |line: &&str| line.trim_start().starts_with('>');
    let lines: String = completion.split_inclusive('\n').filter(|line| !is_quoted(line)).collect();
    let own = |found: &Captures<'_>| {
        if LABELLED.is_match(&found[0]) {
            format!("{}\"\"", found.get(1).map_or("", |before| before.as_str()))
        } else {
            found[0].to_owned()
        }
    };
    QUOTED.replace_all(&lines, own).into_owned()
}

/// Returns whether a label after the text `before` introduces the judge's own verdict. The label
/// must start its sentence or the clause after a comma, except for a few leading words ("so my"),
/// or be a JSON key.
pub(super) fn is_own_verdict(before: &str) -> bool {
    let (above, line) = before.split_at(before.rfind('\n').map_or(0, |at| at + 1));
    let start = SENTENCE.find_iter(line).last().map_or(0, |end| end.end());
    let sentence = &line[start..];
    let (clause, rest) = sentence.rsplit_once([',', '→']).unwrap_or(("", sentence));
    LEADS.is_match(rest)
        && (start > 0 || !continues_on_next_line(above))
        && !ends_with_example_phrase(before)
        && !is_foreign_or_hypothetical(clause)
        && !CONDITION.is_match(clause)
}

/// Returns whether a text ends with words that introduce an example, such as "e.g.".
pub(super) fn ends_with_example_phrase(before: &str) -> bool {
    EXAMPLE.is_match(before)
}

/// Returns whether the clause before a verdict makes the verdict hypothetical, denies it, or
/// attributes it to another person.
pub(super) fn is_foreign_or_hypothetical(clause: &str) -> bool {
    SUPPOSED.is_match(clause)
}

/// Returns whether the sentence at the end of `above` continues on the next line ("It is not") or
/// quotes the next line ("It claims:").
pub(super) fn continues_on_next_line(above: &str) -> bool {
    let last = above.lines().rfind(|line| !lacks_words(line)).unwrap_or_default();
    let is_adjacent = above.trim_end_matches([' ', '\n']).len() + 2 > above.len();
    DANGLES.is_match(last) || introduces_quotation(last) || (is_adjacent && MENTIONS.is_match(last))
}

/// Returns whether a line introduces the next line as a quotation. Such a line opens a tag such as
/// `<answer>`, or ends with a colon that belongs neither to a label nor to the judge's own words.
pub(super) fn introduces_quotation(line: &str) -> bool {
    QUOTES.is_match(line)
        || OPENING_TAG.is_match(line)
        || (COLON.is_match(line) && !LABEL_ABOVE.is_match(line))
}

/// Returns whether the text after a verdict makes the verdict a quotation or part of a sentence:
/// "is what the student wrote", or a line "if the sign were right".
pub(super) fn only_mentions_verdict(behind: &str) -> bool {
    MENTIONED.is_match(behind) || CONTINUES.is_match(behind)
}

/// Returns the part of a judge's completion after its last retraction, such as "I take that back.",
/// or the complete text if it retracts nothing.
pub(super) fn text_after_retraction(completion: &str) -> &str {
    RETRACTS.find_iter(completion).last().map_or(completion, |found| &completion[found.end()..])
}

/// Returns whether the text after a verdict retracts the verdict.
pub(super) fn retracts_verdict(behind: &str) -> bool {
    RETRACTS.is_match(behind) || RECONSIDERS.is_match(behind)
}

/// Returns whether a text contains no letters and no digits.
pub(super) fn lacks_words(text: &str) -> bool {
    !text.chars().any(char::is_alphanumeric)
}

static COMMAND: LazyLock<Regex> = LazyLock::new(|| {
    pattern(r"\\(?:boxed|fbox|text|textbf|textit|mathrm|mathbf|emph|underline)\s*\{")
});
static LABEL: LazyLock<Regex> = LazyLock::new(|| {
    pattern(r"(?i)<(verdict|grade|judge?ment|final|decision|result|score|rating)>")
});
static TAG: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)</?(?:b|i|u|em|strong|p|span|verdict|grade|judge?ment|final|decision|result|score|rating)>",
        r"|<br\s*/?>",
    ))
});
static QUOTED: LazyLock<Regex> =
    LazyLock::new(|| pattern(r#"()"[^"\n]*"|“[^”\n]*”|`[^`\n]+`|(^|[\s(])'[^'\n]*'"#));
static LABELLED: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?i)\w[^\w\n]*[:：=]|\bis\b|\w/\d"));
static SENTENCE: LazyLock<Regex> =
    LazyLock::new(|| pattern(r#"[.!?;)]["'*_`)]*\s|[。！？；|]|[{,]\s*""#));
/// Matches words before a label in its sentence that do not attribute the verdict to another
/// person.
static LEADS: LazyLock<Regex> = LazyLock::new(|| {
    const ALLOWED_WORDS: &str = concat!(
        r"(?:(?:so|thus|therefore|hence|and|then|overall|finally|my|our|the|this|that|final|in|conclusion|summary|short",
        r"|total|revised|updated|adjusted|corrected|amended|new|i|we|would|will|d|ll|say|give|gave|rate|assign|award|conclude|it|is|a|an|as|with|answer|response",
        r"|evaluation|assessment|verdict|judge?ment|result|step|score|rating|criterion|here|for|to)\b[\W\d_]*)*$",
    );
    pattern(&format!(
        r"(?i)(?:^|[,:–—]\s*\b(?:so|thus|therefore|hence)\b|-\s)[\W\d_]*{ALLOWED_WORDS}"
    ))
});
static DANGLES: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)(?:\b(?:not|never|in|un|non|hardly|barely|almost|nearly|partially|mostly|be|been|is|are|was|than|if|says?|said|wrote|claims?)",
        r"|n't)[\s*_\x22'-]*$",
    ))
});
static QUOTES: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)\b(?:if|would|wrote|writes|says?|said|claims?|claimed|states?|stated|example|instead|contains?|asks?|like",
        r"|(?:ends|begins)\s+with)\b[^.!?]*[:：][*_\s]*$",
    ))
});
static COLON: LazyLock<Regex> = LazyLock::new(|| pattern(r"[:：][*_\s]*$"));
/// Matches lines with a colon that introduce the judge's own verdict on the next line.
static LABEL_ABOVE: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)(?:\b(?:so|thus|therefore|hence|verdict|grade|judge?ment|final|decision|assessment|evaluation|conclusion|result|score|rating",
        r"|summary|mine|follows|below|is)s?|评分|得分)[*_\s]*[:：][*_\s]*$|\b(?:my|i)\b",
    ))
});
static OPENING_TAG: LazyLock<Regex> = LazyLock::new(|| {
    pattern(r"(?i)<(?:answer|response|reply|student|submission|quote|text|output)\w*>\s*$")
});
/// Matches lines without final punctuation that refer to the next line: "The answer contains the
/// line".
static MENTIONS: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)\b(?:tells?|asks?|wants?|demands?|instructs?|contains?|has|tries|reads?|prints?|injects?|says?|said|writes?|wrote",
        r"|claims?|claimed|states?|stated|ignore|disregard|includes?|inserts?|(?:ends?|starts?|begins?|closes)\s+with)(?:\b[^.!?,]*[a-z])?[*_]*$|^\W*ignore\b",
    ))
});
static MENTIONED: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"^[\s.…*_`\x22'</>a-z]*?\b(?:is|was|were|as)\s+(?:what|in|the\s+student|written|asked)\b",
    )
});
/// Matches a line below a verdict that continues the verdict's sentence or rejects the verdict.
static CONTINUES: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"^[^\w\n]*\n\s*(?:(?:which|that|is|was|if|unless|but|and|as)\b",
        r"|I\s+(?:will\s+|do\s+not\s+|don't\s+)?(?:ignore|disregard|reject|follow|obey)\b)",
    ))
});
static RETRACTS: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?im)(?:^|[.!?;])[\s*_]*(?:but\s+|no,?\s+|sorry,?\s+)?(?:i\s+(?:retract|(?:must\s+)?take\s+(?:that|it|this)\s+back)|just\s+kidding|(?:scratch|strike|disregard|forget)\s+(?:that|this|it)",
        r"|never\s*mind)\b[\s.,:;!)]*",
    ))
});
static RECONSIDERS: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)[.!?;\n*][\s*_(]*(?:(?:actually|wait|hold\s+on|oops|hmm+|sorry|nope|correct(?:ion|ed)|edit|update|reconsider\w*|on\s+(?:second\s+thought|reflection)|except)\b|no\s*[,.!]|no\s+wait\b|i\s+mis\w+",
        r"|(?:i|let\s+me)(?:\s+would|\s+will|'ll|'d|\s+must|\s+should)?\s+(?:lower|raise|reduce|increase|change|adjust|revise|correct|reconsider|rethink)\b",
        r"|(?:i\s+meant|make\s+(?:that|it)|better\s*:|should\s+(?:be|have\s+been))\s+\d|(?:that|this|it)(?:'s|\s+(?:is|was))\s+a\s+typo\b",
        r"|not\s+(?:really|quite)\b|i\s+(?:was\s+(?:wrong|asked)|made\s+a|will\s+not|cannot\s+judge|refuse))",
    ))
});
static EXAMPLE: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?i)\b(?:e\.\s?g|i\.\s?e|ex)\.\W*$"));
static SUPPOSED: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)\b(?:if|had|were|unless|could|might|may|not|never|no|nobody|cannot|another|other|perfect|ideal|best|maximum",
        r"|says?|wrote|writes|claims?|demands?|asks?|wants?|tells?|begs?|requests?|example|\w+n't)\b|^\W*an?\s+(?:\w+\s+)?(?:answer|response|reply|solution)\b",
    ))
});
/// Matches words that turn a clause before a verdict into a condition.
static CONDITION: LazyLock<Regex> = LazyLock::new(|| {
    pattern(r"(?i)\b(?:with|without|for|once|when|would|should|others|asks?|demands?|must)\b")
});
