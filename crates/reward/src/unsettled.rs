//! Detects text around a value that leaves the value unsettled.
//!
//! Between a value and the end of its sentence, only these may stand: units, nouns, punctuation,
//! explanations ("because 3 times 4 is 12") and other statements ("and the change is 3 dollars").
//! Another number, a condition, a doubt or an operation means that the text states more than one
//! value, or a different value. The words are closed classes (numerals, conjunctions, prepositions,
//! auxiliary verbs) of English, German, French and Chinese.

use std::sync::LazyLock;

use regex::Regex;

use crate::pattern::pattern;
use crate::{bounds, words};

/// Maximum number of characters before or after a value that are examined for its meaning.
const REACH: usize = 300;

/// Words that introduce an explanation, separated by spaces. Numbers after one of these words are
/// not values.
const REASONS: &str = "because since as which that who whose where when i.e e.g namely see \
     rounded weil da denn wegen gerundet car puisque parce comme qui que dont arrondi";

/// Prepositions and verbs, separated by spaces. A number after one of these words in its clause
/// belongs to another statement.
const STATEMENT_WORDS: &str = "is are was were be has have had gives gave makes make gets get \
     leaves equals remain remains for after before from at on in with per each every until during \
     within between across among nearest correct accurate es son é è sind ist war waren hat haben \
     bleiben pro für nach vor aus bei mit im in am est sont était ont a reste restent pour après \
     avant dans avec en chez um given";

/// Nouns to which a comparison can be an attribute: 12 integers less than 20.
const COUNTED: &str = "integer integers number numbers prime primes multiple multiples divisor \
     divisors factor factors square squares cube cubes value values";

/// Words after the number of digits to which a value is rounded: the "decimal places" of "to 2
/// decimal places".
const DIGITS: &str = "decimal decimals significant places figures digits dp";

/// Words that start a contrast.
const CONTRASTS: &str = "but although though however yet whereas aber doch obwohl wobei jedoch \
     allerdings mais bien quoique cependant toutefois";

/// Words that negate the number after them: the "not" of "12, not 13".
const NEGATIONS: &str = "not rather instead than unlike never nothing no nicht kein statt \
     anstatt anstelle pas non lieu plutôt excluding";

/// Words that introduce another value, a condition or a doubt, so that the value before them is
/// unsettled.
const OPEN: &str = "otherwise else alternatively another guess if unless perhaps maybe probably \
     possibly presumably doubtful sonst andernfalls beziehungsweise bzw wenn falls sofern \
     vielleicht wahrscheinlich vermutlich möglicherweise sinon si peut-être probablement";

/// Words between alternative values: "or".
const ALTERNATIVES: &str = "or oder ou";

/// Words with which a contrast doubts the value before it: but I am not sure.
const DOUBTS: &str = "sure certain unsure uncertain possible might could may guess ignores \
     ignore forgot overlooks neglects wrong incorrect sicher möglich könnte falsch possible sûr \
     certain faux pourrait";

/// Words of an operation on a value, or of another notation of the value.
const CHANGES: &str = "squared cubed factorial doubled tripled halved hexadecimal binary octal";

/// Words after a number that make the number an addition to a value: 72, 5 more.
const ADDITIONS: &str = "more fewer less remaining each per left apiece";

/// Verbs after a number with which the number belongs to another statement: and 3 are left.
const VERBS: &str = "is are was were remain remains left have has sind ist bleiben sont est \
     restent es son";

/// Number words of German and French.
const NUMERALS: &str = "null zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn \
     vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn zwanzig dreißig vierzig fünfzig deux \
     trois quatre cinq sept huit neuf dix onze douze treize quatorze quinze seize vingt trente \
     quarante cinquante soixante";

/// Words between two numbers of one expression, after which "one" is a number.
const OPERATORS: &str = "plus minus times by over to or and mod modulo choose mal durch fois \
     moins sur";

/// Words that can stand between "to" and a number that is a value: the "about" of "12 to about 13".
const FILLERS: &str = "a an the about around roughly approximately nearly almost maybe perhaps";

/// Nouns after which "of" denotes an operation: 12 percent of 50, 12 to the power of 2.
const PARTS: &str = "percent power short half halves third thirds quarter quarters fourths fifths \
     tenths hundredths";

fn contains_word(list: &str, word: &str) -> bool {
    list.split_ascii_whitespace().any(|own| own == word)
}

/// Returns whether a word in lower case is a number word of English, German or French. "One" and
/// the words for a half or a third are not number words here.
fn is_number_word(word: &str) -> bool {
    word.split('-').all(|part| {
        (part != "one" && words::word_to_number(part).is_some()) || contains_word(NUMERALS, part)
    })
}

/// A word of a text, or a mark that separates clauses.
enum SentencePart<'t> {
    Word(&'t str),
    Stop,
    /// An opening bracket.
    Open,
    Colon,
    Sign,
}

/// Splits a text in lower case into words and marks. Signs of operations and relations are
/// [`SentencePart::Sign`].
fn split_into_parts(text: &str) -> Vec<SentencePart<'_>> {
    PART.find_iter(text)
        .map(|found| {
            let part = found.as_str().trim_end_matches(['.', '\'', '-']);
            match part.chars().next() {
                Some('^' | '_') => SentencePart::Word(""),
                Some('\\' | '=' | '≈' | '→' | '×' | '·' | '*' | '+' | '/') => {
                    SentencePart::Sign
                }
                Some(':') => SentencePart::Colon,
                Some('(' | '（') => SentencePart::Open,
                Some(c) if c.is_alphanumeric() => SentencePart::Word(part),
                _ => SentencePart::Stop,
            }
        })
        .collect()
}

/// Returns whether `after`, the text directly after a value, leaves the value unsettled: "12 but 13
/// also works", "12 times three", "12 if x is even", "12th", "12h30".
pub(crate) fn is_unsettled_after(after: &str) -> bool {
    let near = &after[..after.char_indices().nth(REACH).map_or(after.len(), |(at, _)| at)];
    let own = near.trim_start_matches(['*', '$', '`', '}', ')', '\\', '"', '_', '~']);
    let end = SENTENCE_END.find(own).map_or(own.len(), |end| end.start());
    if JOINED.is_match(own) || JOINED_CHINESE.is_match(own) {
        return true;
    }
    let lower = own[..end].to_lowercase().replace('’', "'");
    leave_value_unsettled(&split_into_parts(&lower))
}

fn is_operator(part: &SentencePart<'_>) -> bool {
    match part {
        SentencePart::Sign => true,
        SentencePart::Word(word) => word.starts_with(['乘', '加', '减', '除']),
        _ => false,
    }
}

/// Like [`is_unsettled_after`], for a value that a box or brackets mark as the answer. A total, or
/// one more number at the end of the sentence, does not unsettle such a value: `\boxed{12} of 99`,
/// "[[2]] out of 5", `\boxed{12} and 5`.
pub(crate) fn is_marked_value_unsettled(after: &str) -> bool {
    is_unsettled_after(&after[TOTAL_AFTER.find(after).map_or(0, |total| total.end())..])
}

/// Returns the word at index `at`, or an empty text if there is a mark at this index or the text
/// has ended.
fn word_at<'t>(parts: &[SentencePart<'t>], at: usize) -> &'t str {
    match parts.get(at) {
        Some(SentencePart::Word(word)) => word,
        _ => "",
    }
}

/// Returns whether the words between a value and the end of its sentence leave the value unsettled.
fn leave_value_unsettled(parts: &[SentencePart<'_>]) -> bool {
    let word = |at: usize| word_at(parts, at);
    let previous = |at: usize, by: usize| at.checked_sub(by).map_or("", word);
    let start: Vec<&str> =
        (0..parts.len().min(6)).map(word).take_while(|word| !word.is_empty()).collect();
    if bounds::bound_phrase_after_number(&start).is_some() {
        return true;
    }
    // The words of the value itself, such as its unit, are in the first clause.
    let mut is_first = true;
    let mut is_explained = false;
    let mut is_counted = false;
    for (at, part) in parts.iter().enumerate() {
        let own = match part {
            SentencePart::Word(own) => *own,
            // In (see step 3), the number is not a value; in (13 with Bob), it is.
            SentencePart::Open => {
                let rest = &parts[at + 1..];
                let is_stop = |part: &SentencePart<'_>| matches!(part, SentencePart::Stop);
                let inside = &rest[..rest.iter().position(is_stop).unwrap_or(rest.len())];
                if lists_parts(inside) {
                    return false;
                }
                let is_derived = inside.iter().any(is_operator);
                (is_first, is_explained) = (false, is_derived || !is_value_word(word(at + 1)));
                continue;
            }
            // In (20 - 8 = 12), the numbers derive the value.
            SentencePart::Sign => return false,
            // A ratio, or an explanation.
            SentencePart::Colon => return at == 0 && is_value_word(word(1)),
            SentencePart::Stop => {
                (is_first, is_explained) = (false, false);
                continue;
            }
        };
        if own == "as" && word(at + 1) == "well" {
            return is_value_word(word(at + 3));
        }
        if contains_word(REASONS, own) || own.starts_with(['因', '由', '即']) {
            return false;
        }
        // In scripts without spaces, a part is a clause.
        if own.starts_with(|c| c >= '\u{3000}') {
            is_explained = !own.ends_with(['和', '或', '与', '至', '到', '者', '但', 'か']);
            continue;
        }
        is_counted |= contains_word(COUNTED, own);
        let is_compared = is_first
            && !is_counted
            && ["more", "less", "fewer", "greater"].contains(&own)
            && word(at + 1) == "than"
            && is_value_word(word(at + 2));
        if contains_word(CONTRASTS, own) {
            let rest: Vec<&str> = (at + 1..parts.len()).map(word).collect();
            let is_negated = rest.first().is_some_and(|next| contains_word(NEGATIONS, next));
            let is_open = |word: &&str| contains_word(DOUBTS, word) || is_value_word(word);
            return !is_negated && rest.iter().any(is_open);
        }
        if contains_word(NEGATIONS, own) && !["no", "than"].contains(&own) {
            return false;
        }
        let is_alternative = contains_word(ALTERNATIVES, own)
            && (at == 0 || (1..4).any(|by| is_value_word(word(at + by))));
        let is_change =
            is_first && contains_word(CHANGES, own) || own == "base" && is_value_word(word(at + 1));
        let is_sum = at == 0 && ["plus", "minus", "pi"].contains(&own);
        if contains_word(OPEN, own) || is_alternative || is_change || is_sum || is_compared {
            return true;
        }
        if own == "and" || own == "und" || own == "et" {
            let is_part = |at| ["half", "quarter", "third", "bit", "something"].contains(&word(at));
            if is_part(at + 1) || (["a", "an"].contains(&word(at + 1)) && is_part(at + 2)) {
                return true;
            }
            // In "between 10 and 20", both numbers belong to the same preposition.
            is_explained &= is_value_word(previous(at, 1));
        }
        is_explained |= contains_word(STATEMENT_WORDS, own) || starts_valueless_phrase(parts, at);
        let is_number = is_value_word(own)
            || (own == "one" && contains_word(OPERATORS, previous(at, 1)))
            || (is_first && ["third", "quarter", "quarters", "thirds"].contains(&own));
        if is_number && !is_explained {
            let is_negated = (1..3).any(|by| contains_word(NEGATIONS, previous(at, by)));
            let is_addition =
                contains_word(ADDITIONS, word(at + 1)) || contains_word(ADDITIONS, word(at + 2));
            let is_elsewhere = (1..4).any(|by| contains_word(VERBS, word(at + by)));
            let is_zero = own == "zero" && previous(at, 1) == "below";
            // In 12 (twelve), the words repeat the value.
            let is_repeated = at > 0
                && matches!(parts[at - 1], SentencePart::Open)
                && !matches!(parts.get(at + 1), Some(SentencePart::Word(_)))
                && !own.starts_with(|c: char| c.is_ascii_digit());
            // 12 of the 20 apples
            let is_total = previous(at, 1) == "the" && previous(at, 2) == "of";
            // 12 by theorem 3
            let is_reference = REFERENCE.is_match(previous(at, 1));
            let is_other = is_negated || is_addition || is_elsewhere || is_reference;
            if !is_other && !is_zero && !is_repeated && !is_total {
                return true;
            }
        }
    }
    false
}

/// Returns whether the brackets after a value list the parts of the value: 3 bolts (2 blue and 1
/// white).
fn lists_parts(inside: &[SentencePart<'_>]) -> bool {
    let words: Vec<&str> = (0..inside.len()).map(|at| word_at(inside, at)).collect();
    words.contains(&"and")
        && !words.iter().any(|word| contains_word(ALTERNATIVES, word))
        && words.iter().filter(|word| is_value_word(word)).count() > 1
}

/// Returns whether the word at index `at` starts a phrase whose numbers are not values: "to earn
/// 240 dollars", "leaving 8 dollars", "12 multiples of 8", "12 integers less than 20".
fn starts_valueless_phrase(parts: &[SentencePart<'_>], at: usize) -> bool {
    let previous = at.checked_sub(1).map_or("", |at| word_at(parts, at));
    let next = word_at(parts, at + 1);
    match word_at(parts, at) {
        "to" if is_value_word(next) || next == "one" => {
            contains_word(DIGITS, word_at(parts, at + 2))
        }
        "to" => !next.is_empty() && !contains_word(FILLERS, next),
        // Directly after the value, "of" is an operation: 12 of 20, 12 out of 20.
        "of" => at > 0 && !contains_word(PARTS, previous) && !(at == 1 && previous == "out"),
        "by" => next.ends_with("ing"),
        // Other comparisons have been handled.
        "than" => true,
        own => own.len() > 4 && own.ends_with("ing") && !contains_word(NEGATIONS, own),
    }
}

fn is_value_word(word: &str) -> bool {
    word.starts_with(|c: char| c.is_ascii_digit()) || is_number_word(word)
}

/// Returns whether `before`, the text directly before a value, leaves the value unsettled: "if she
/// had 16, it would be 12", "see page 12", "three times 12".
pub(crate) fn is_unsettled_before(before: &str) -> bool {
    let start = before.char_indices().rev().nth(REACH).map_or(0, |(at, _)| at);
    let text =
        before[start..].trim_end_matches([' ', '*', '$', '`', '{', '\\', '"', '_', '(', '[']);
    let lower = text.to_lowercase().replace('’', "'");
    let from = SENTENCE_END.find_iter(&lower).last().map_or(0, |end| end.end());
    let sentence = &lower[from..];
    REFERENCE.is_match(sentence)
        || OPERAND.captures(sentence).is_some_and(|found| {
            let is_rounding = found[0].ends_with(" to") && ROUNDS.is_match(sentence);
            !is_rounding && (&found[1] == "one" || is_value_word(&found[1]))
        })
        || (WOULD.is_match(sentence) && CONDITION.is_match(sentence))
        || LIMITED.is_match(sentence)
        || BEFORE_CHINESE.is_match(sentence)
}

static PART: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"\\(?:approx|equiv|implies|iff|[Rr]ightarrow|pmod)\b|[\^_]\s?\{?-?\d+\}?|\d[\d.,]*",
        r"|(?:[cdkm]?m|in|ft|yd|mi)[23]\b|\p{L}[\p{L}\p{M}'.-]*|[,;:()（）\[\]|—–]|[=≈→×·*+/]",
    ))
});
static TOTAL_AFTER: LazyLock<Regex> = LazyLock::new(|| {
    pattern(r"^[\s$`*)\]}]*(?:(?:out\s+)?of\s+\d[\d.,]*|and\s+\d+\s*(?:[.!?\n]|$))")
});
static SENTENCE_END: LazyLock<Regex> =
    LazyLock::new(|| pattern(r#"[.!?](?:["'*)}$\]]*(?:\s|$|\p{Han}))|[。！？\n]"#));
/// Matches text that is joined to a number, or an abbreviation after it, that changes the number:
/// 12h30, 12th, 12 K, 12 BC.
static JOINED: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"^(?:(?:st|nd|rd|th|ter|ten|tes|te|ème|ième|eme)\b|[a-z]{1,2}[04-9]|[a-z]{1,2}\d\d|[-–]ish\b",
        r"|\s?[KMBT](?:[\s.,;!)]|$)|\s*(?:BCE?\b|B\.\s?C\.|v\.\s?(?:Chr|u\.\s?Z)|av\.\s?J)",
        r"|\s*(?:✗|✘|❌)|\s*[½¼¾⅓⅔⅛]|!\s*(?:\s[a-z=]|\$|\\[)\]])|\s*(?:±|\+/-))",
    ))
});
static JOINED_CHINESE: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"^\s*(?:个?半|點?半|点半|(?:点|點|乘以?|加上?|减去?|除以|或者?|和|与|至|到|~|余)\s*[\d一二两三四五六七八九十百半])",
        r"|^[^。.\n因由即]{0,20}(?:但|不过|然而|也可能|可能|或者?|否则)[^。.\n不]{0,6}(?:[\d二两三四五六七八九十]|一[个元只块本天])",
    ))
});
/// Matches a noun before the number of a page, a step or a formula, or before a part or a root of a
/// value.
static REFERENCE: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?:^|[\s(])(?:page|step|line|figure|fig\.|table|equation|eq\.|section|chapter|question|problem|theorem|lemma|corollary",
        r"|example|exercise|row|column|item|paragraph|proposition|definition|appendix",
        r"|seite|schritt|gleichung|abbildung|tabelle|zeile|kapitel|satz|aufgabe",
        r"|(?:l')?étape|(?:l')?équation|tableau|ligne|chapitre|nr\.|n°|№)\s*\(?$",
        r"|\b(?:(?:drittel|viertel|hälfte|wurzel)\s+(?:von|aus)|(?:tiers|quart|moitié|racine\s+\w+)\s+de|(?:zwei|drei|vier)mal|one\s+of|next\s+to)$",
    ))
});
/// Matches a number and an operator before a value, with the number in group 1.
static OPERAND: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"([\p{L}-]+|\d+)\s+(?:times|plus|minus|over|to|or|divided\s+by|multiplied\s+by|(?:more|less|fewer)\s+than|out\s+of",
        r"|mal|durch|geteilt\s+durch|bis|oder|fois|moins|divisé\s+par|sur|ou|à)$",
    ))
});
/// Matches verbs whose result follows "to": we round 11.7 to 12.
static ROUNDS: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"\b(?:round|simplif|reduc|convert)\w*\b"));
static WOULD: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"\b(?:would|\w+'d\s+be|wäre|wären|würden?|hätten?|serait|seraient|aurait|sería|seria)\b",
    )
});
/// Matches a condition that does not hold: "if she had 16", unlike "if each costs $2".
static CONDITION: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"\bif\s+(?:[^\s,]+\s+){1,4}(?:had|were|was|did|hadn't|weren't|wasn't|didn't|ignored|forgot|omitted)\b",
        r"|\b(?:unless|otherwise|ohne|sonst|sans|sinon)\b|\b(?:wenn|falls)\b[^,]*\b(?:hätten?|wären?|würden?)\b",
        r"|\bs(?:i|'ils?)\b[^,]*(?:ait|aient)\b",
        r"|^\W*(?:had|were|without|in\s+that\s+case)\b",
    ))
});
static LIMITED: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"^\W*(?:unless|depending|alternatively|otherwise)\b"));
static BEFORE_CHINESE: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?:第|步骤|公式\(?|式\(?|乘以|除以|分之|一半的|[一二两三四五六七八九十百](?:或|到|至|加|减))$",
    )
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_after_value_leaves_it_unsettled() {
        for (after, want) in [
            ("", false),
            (" apples in total.", false),
            (", which is 3 times 4.", false),
            (" because 20 - 8 = 12.", false),
            (" (20 - 8 = 12).", false),
            (", not 13.", false),
            (" dollars and the change is 3 dollars", false),
            (" dollars and 3 are left", false),
            (" apples, 5 more than before", false),
            (" (twelve)", false),
            (" cm2.", false),
            (" hours to earn $240.", false),
            (" to 2 decimal places.", false),
            (" by Theorem 2.", false),
            (" ways to choose 2 of the 5 books.", false),
            (" multiples of 8 between 1 and 100.", false),
            (" integers less than 100", false),
            (", leaving 8 dollars", false),
            (" (2 blue and 1 white)", false),
            (" \\approx 3.46", false),
            (" \\pmod{7}", false),
            (" cm^ 2 ", false),
            ("（3乘以4）。", false),
            ("（13）", true),
            ("! Let us check.", false),
            (" but 13 also works", true),
            (" (min), 13 (max)", true),
            (" for men, 13 for women", true),
            (" if x is even", true),
            (" times three", true),
            (" divided by two", true),
            (" hours and thirty minutes", true),
            (" hours and a quarter", true),
            (" mal drei", true),
            (" fois trois", true),
            ("h30", true),
            ("th", true),
            (" to 13", true),
            (" to about 13", true),
            (" to one", true),
            (" percent of 50", true),
            (" R2", true),
            (" out of 20", true),
            (" dollars less than 20", true),
            (" for men and 13 for women", true),
            (" (13 with Bob)", true),
            (" (or 13 and 14)", true),
            (" K.", true),
            (" BC", true),
            (", but I am not sure", true),
            (", probably", true),
            ("! ways", true),
            ("乘以三", true),
            (",但13也可以", true),
            ("个苹果", false),
            ("元，但一般取整数", false),
        ] {
            assert_eq!(is_unsettled_after(after), want, "{after}");
        }
    }

    #[test]
    fn total_after_marked_value_leaves_it_settled() {
        for (after, want) in [
            ("$ of 99", false),
            (" out of 5", false),
            (" and 5", false),
            (" and 5 more if it rains", true),
            (" or 5", true),
            (" times three", true),
        ] {
            assert_eq!(is_marked_value_unsettled(after), want, "{after}");
        }
    }

    #[test]
    fn text_before_value_leaves_it_unsettled() {
        for (before, want) in [
            ("The answer is ", false),
            ("If each costs $2, the total is ", false),
            ("So the total would be ", false),
            ("If each costs $2, the total would be ", false),
            ("Wenn er 3 kauft, zahlt er ", false),
            ("We round 11.7 to ", false),
            ("from 11 to ", true),
            ("three times 4 is ", false),
            ("The page number is ", false),
            ("If she had 16 eggs, the answer would be ", true),
            ("Without Bob there would be ", true),
            ("die Wurzel aus ", true),
            ("Assuming 3 in a box, it is ", false),
            ("as shown on page ", true),
            ("by equation (", true),
            ("three times ", true),
            ("zehn oder ", true),
            ("dix ou ", true),
            ("第", true),
        ] {
            assert_eq!(is_unsettled_before(before), want, "{before}");
        }
    }
}
