//! Texts up to their spelling: the form in which a question is compared with held-out ones.
//!
//! Two texts of one spelling differ at most in Unicode compatibility forms (NFKC), case, quotes, dashes,
//! signs of operators, white space beside anything but letters and digits, separators of thousands, marks of
//! emphasis and mathematics, a label before or after them (`Question:`, `Answer:`) and punctuation at their
//! end. Operators, signs and digits count: `1 - 2?` is not `1 + 2?`.

use unicode_normalization::UnicodeNormalization;

/// Words of which labels before a question consist, besides numbers.
const BEFORE: [&str; 30] = [
    "calculate",
    "compute",
    "evaluate",
    "of",
    "question",
    "questions",
    "q",
    "problem",
    "prompt",
    "query",
    "exercise",
    "task",
    "input",
    "user",
    "human",
    "instruction",
    "answer",
    "a",
    "the",
    "this",
    "following",
    "please",
    "solve",
    "here",
    "is",
    "new",
    "now",
    "your",
    "next",
    "to",
];
/// Words of which labels after a question consist.
const AFTER: [&str; 14] = [
    "answer",
    "a",
    "ans",
    "solution",
    "response",
    "output",
    "assistant",
    "result",
    "the",
    "your",
    "final",
    "is",
    "reply",
    "so",
];
/// Words without which no label before a question is one.
const NAMES: [&str; 18] = [
    "calculate",
    "compute",
    "evaluate",
    "solve",
    "question",
    "questions",
    "q",
    "problem",
    "prompt",
    "query",
    "exercise",
    "task",
    "input",
    "user",
    "human",
    "instruction",
    "answer",
    "a",
];
/// Commands of LaTeX, with what they stand for.
const LATEX: [(&str, &str); 19] = [
    ("\\times", "*"),
    ("\\cdot", "*"),
    ("\\div", "/"),
    ("\\dfrac", "\\frac"),
    ("\\tfrac", "\\frac"),
    ("\\left", ""),
    ("\\right", ""),
    ("\\(", ""),
    ("\\)", ""),
    ("\\[", ""),
    ("\\]", ""),
    ("\\leq", "<="),
    ("\\geq", ">="),
    ("\\le", "<="),
    ("\\ge", ">="),
    ("\\,", ""),
    ("\\;", ""),
    ("\\!", ""),
    ("\\ ", " "),
];

/// Returns a text without what its spelling leaves open; empty if nothing else is in it.
pub(super) fn spelled(text: &str) -> String {
    let lines: Vec<String> = compatible(text).lines().map(|line| line.trim().to_owned()).collect();
    let mut lines: Vec<&str> = lines.iter().map(String::as_str).filter(|line| !line.is_empty()).collect();
    while lines.last().is_some_and(|line| is_label(line, &AFTER, &AFTER)) {
        lines.pop();
    }
    if let Some(last) = lines.last_mut() {
        *last = without_label_behind(last);
    }
    while lines.len() > 1 && is_label(lines[0], &BEFORE, &NAMES) {
        lines.remove(0);
    }
    if let Some(first) = lines.first_mut() {
        *first = without_label(first);
    }
    tight(&lines.join(" "))
}

/// Returns a line without labels before it, such as `Question 3:`, `Q3.` or `3)`.
fn without_label(mut line: &str) -> &str {
    while let Some(at) = line.find([':', '.', ')']) {
        let (label, rest) = (line[..at].trim_start_matches('('), line[at + 1..].trim_start());
        let parted = rest.len() < line.len() - at - 1;
        let numbered = label.bytes().any(|byte| byte.is_ascii_digit());
        // `A:B = 2:3` and `A. Smith` begin with no label.
        let is_label = is_label_text(label, &BEFORE, &NAMES)
            && if line[at..].starts_with(':') { parted || label != "a" } else { parted && label != "a" };
        let only_number = numbered && label.len() <= 3 && label.bytes().all(|byte| byte.is_ascii_digit());
        let is_number = only_number && parted && rest.starts_with(char::is_alphabetic);
        if rest.is_empty() || !(is_label || is_number) {
            break;
        }
        line = rest;
    }
    line
}

/// Role of a part of a text, by the label before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// No label.
    Plain,
    /// A label of a question: `Q:`.
    Question,
    /// A label of an answer: `A:`.
    Answer,
}

/// Returns the parts of a text: its lines, cut before each label within them, without blank ones. Parts that
/// consist of a label are empty.
pub(super) fn parts(text: &str) -> Vec<(Part, String)> {
    let text = compatible(text);
    let mut found = Vec::new();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let mut start = 0;
        for (at, _) in line.match_indices(char::is_whitespace) {
            let word = line[at..].trim_start();
            let word = &word[..word.find(char::is_whitespace).unwrap_or(word.len())];
            if word.strip_suffix(':').is_some_and(|word| label_of(word) != Part::Plain) && at > start {
                // `Question 3: Answer: 4` has two labels, `the answer is:` one.
                let begins = label_of(line[start..at].trim()) != Part::Plain;
                if !begins {
                    found.push(part(&line[start..at]));
                    start = at;
                }
            }
        }
        found.push(part(&line[start..]));
    }
    found
}

fn part(text: &str) -> (Part, String) {
    let text = text.trim();
    match text.split_once(':') {
        Some((label, rest)) if label_of(label) != Part::Plain => (label_of(label), rest.trim().to_owned()),
        _ => (Part::Plain, text.to_owned()),
    }
}

fn label_of(text: &str) -> Part {
    if is_label_text(text, &AFTER, &AFTER) {
        Part::Answer
    } else if is_label_text(text, &BEFORE, &NAMES) {
        Part::Question
    } else {
        Part::Plain
    }
}

/// Returns a line without a label behind its last sentence, such as `Answer:`.
fn without_label_behind(line: &str) -> &str {
    let Some(label) = line.strip_suffix(':') else { return line };
    let end = label.rfind(['?', '.', '!']).map(|at| at + 1);
    match end.filter(|end| is_label_text(&label[*end..], &AFTER, &AFTER)) {
        Some(end) => line[..end].trim_end(),
        None => line,
    }
}

fn is_label(line: &str, words: &[&str], names: &[&str]) -> bool {
    line.strip_suffix(':').is_some_and(|label| is_label_text(label, words, names))
}

/// Whether a text consists of words of a label and numbers, with one of `names` among them.
fn is_label_text(text: &str, words: &[&str], names: &[&str]) -> bool {
    let mut named = false;
    for word in text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()) {
        // `Q3` is the third `Q`.
        let word = word.trim_end_matches(|c: char| c.is_ascii_digit());
        if !word.is_empty() && !words.contains(&word) {
            return false;
        }
        named |= names.contains(&word);
    }
    named && text.len() <= 60
}

/// Whether a character is never seen: zero-width spaces and joiners, soft hyphens, marks of direction and of
/// byte order.
pub(super) fn is_unseen(c: char) -> bool {
    matches!(c, '\u{AD}' | '\u{200B}'..='\u{200F}' | '\u{202A}'..='\u{202E}' | '\u{2060}'..='\u{2064}' | '\u{FEFF}')
}

/// Returns a text in one case, in NFKC, with one sign for each quote, dash and operator. What NFKC would
/// merge with other digits stays apart: `2²` becomes `2^2`, and `3½` becomes `3 1/2`.
fn compatible(text: &str) -> String {
    if text.is_ascii() {
        return signs(&text.to_ascii_lowercase());
    }
    let mut plain = String::with_capacity(text.len());
    let mut raised = false;
    let is_selector = |c: char| matches!(c, '\u{FE00}'..='\u{FE0F}');
    for c in text.chars().filter(|c| !is_unseen(*c) && !is_selector(*c)) {
        let is_raised = matches!(c, '²' | '³' | '¹' | '⁰' | '⁴'..='⁹' | '⁺' | '⁻');
        let is_fraction = matches!(c, '¼'..='¾' | '⅐'..='⅞' | '↉');
        if is_raised && !raised && plain.ends_with(|before: char| before.is_alphanumeric() || before == ')') {
            plain.push('^');
        } else if is_fraction && plain.ends_with(|before: char| before.is_ascii_digit()) {
            plain.push(' ');
        }
        raised = is_raised;
        // NFKC would make it a combining accent.
        plain.push(if c == '´' { '\'' } else { c });
    }
    // Upper case first: ß and SS, σ and ς have lower forms of their own, but one upper form.
    let folded: String = plain.nfkc().collect::<String>().to_uppercase().to_lowercase().nfkc().collect();
    signs(&folded)
}

/// Returns a text with one sign for each quote, dash and operator.
fn signs(folded: &str) -> String {
    let mut found = String::with_capacity(folded.len());
    for c in folded.chars() {
        match c {
            '‘' | '’' | '‚' | '‛' | 'ʼ' | 'ʻ' | 'ˈ' | '´' | '`' | '′' | '‹' | '›' => {
                found.push('\'')
            }
            '“' | '”' | '„' | '‟' | '«' | '»' | '″' | '「' | '」' | '『' | '』' => {
                found.push('"')
            }
            '‐'..='―' | '−' | '﹘' | '﹣' => found.push('-'),
            '×' | '·' | '⋅' | '∙' | '∗' | '•' | '✕' | '✖' => found.push('*'),
            '÷' | '⁄' | '∕' | '➗' => found.push('/'),
            '➕' => found.push('+'),
            '➖' => found.push('-'),
            '≤' | '⩽' => found.push_str("<="),
            '≥' | '⩾' => found.push_str(">="),
            '≠' => found.push_str("!="),
            '。' => found.push('.'),
            '、' => found.push(','),
            '¿' | '¡' | '$' => {}
            c if c.is_control() && c != '\n' => found.push(' '),
            c => found.push(c),
        }
    }
    if found.contains('\\') {
        for (command, sign) in LATEX {
            found = found.replace(command, sign);
        }
    }
    if found.contains(['^', '_']) {
        found = without_braces(&found);
    }
    found.replace("''", "\"")
}

/// Returns a text whose exponents and indices of letters and digits have no braces: `x^{10}` becomes `x^10`.
fn without_braces(text: &str) -> String {
    let mut found = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(['^', '_']) {
        let (before, mark) = rest.split_at(at + 1);
        found.push_str(before);
        rest = mark;
        let inside = mark.strip_prefix('{').and_then(|mark| mark.split_once('}'));
        if let Some((inside, after)) = inside.filter(|(inside, _)| inside.chars().all(char::is_alphanumeric))
        {
            found.push_str(inside);
            rest = after;
        }
    }
    found.push_str(rest);
    found
}

/// Returns a text of one line whose white space stands only between letters and digits, without separators of
/// thousands, quotation marks, emphasis and punctuation at its end.
fn tight(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let word = char::is_alphanumeric;
    let mut kept: Vec<char> = Vec::with_capacity(chars.len());
    let mut space = false;
    // The quotation mark that is open.
    let mut quote = None;
    for (at, &c) in chars.iter().enumerate() {
        let (before, next) = (at.checked_sub(1).map(|at| chars[at]), chars.get(at + 1).copied());
        let beside =
            |test: fn(&char) -> bool| (before.as_ref().is_some_and(test), next.as_ref().is_some_and(test));
        match c {
            c if c.is_whitespace() => {
                space = true;
                continue;
            }
            // 1,000 and 1000.
            ',' if beside(char::is_ascii_digit) == (true, true) && groups_thousands(&chars, at) => continue,
            // Apostrophes within words, primes, feet and inches stay; quotation marks go.
            '\'' | '"' => {
                let (left, right) = beside(|c| c.is_alphanumeric());
                let single = at.checked_sub(2).is_none_or(|at| !chars[at].is_alphanumeric());
                let prime = left
                    && !right
                    && quote != Some(c)
                    && (single || before.is_some_and(|c| c.is_numeric()) || next == Some('('));
                if !(c == '\'' && left && right || prime) {
                    quote = if !left && right { Some(c) } else { None };
                    continue;
                }
            }
            '#' if kept.is_empty() => continue,
            '_' if !(before.is_some_and(word) && next.is_some_and(word)) => continue,
            '*' if next == Some('*') => continue,
            '*' if before == Some('*') => {
                // A power between operands, emphasis elsewhere.
                let outer = at.checked_sub(2).map(|at| chars[at]);
                let operand = |c: Option<char>| c.is_some_and(|c| word(c) || "()".contains(c));
                if operand(outer) && operand(next) {
                    space = false;
                    kept.push('^');
                }
                continue;
            }
            _ => {}
        }
        let c = match c {
            // 3 x 4 and 3 * 4.
            'x' if is_sign(&chars, at) => '*',
            c => c,
        };
        if space && kept.last().is_some_and(|last| word(*last)) && word(c) {
            kept.push(' ');
        }
        space = false;
        kept.push(c);
    }
    while let Some(&last) = kept.last() {
        let ends = matches!(last, '?' | '.' | '…' | ':' | ';' | ',' | '=' | ' ' | '*');
        // Of a number it is the factorial.
        let exclaimed = kept.iter().rev().find(|c| **c != '!');
        let exclaims = last == '!' && exclaimed.is_some_and(|c| c.is_alphabetic() || *c == '?');
        if !ends && !exclaims {
            break;
        }
        kept.pop();
    }
    kept.into_iter().collect()
}

/// Whether a comma is one of a number's separators: three digits follow it, and no fourth.
fn groups_thousands(chars: &[char], at: usize) -> bool {
    let digits = chars[at + 1..].iter().take_while(|c| c.is_ascii_digit()).count();
    let mut start = at;
    while start > 0 && (chars[start - 1].is_ascii_digit() || chars[start - 1] == ',') {
        start -= 1;
    }
    let first = chars[start..at].iter().take_while(|c| c.is_ascii_digit()).count();
    digits == 3 && (1..=3).contains(&first) && chars[start] != '0'
}

/// Whether an `x` multiplies: numbers stand on both sides.
fn is_sign(chars: &[char], at: usize) -> bool {
    let blank = |c: &&char| c.is_whitespace();
    let digit = |c: Option<&char>| c.is_some_and(char::is_ascii_digit);
    digit(chars[..at].iter().rev().find(|c| !blank(c))) && digit(chars[at + 1..].iter().find(|c| !blank(c)))
}
