//! Normalizes the spelling of texts, to compare questions with held-out questions.
//!
//! The normalized texts are equal if two texts differ only in:
//! - Unicode compatibility forms (NFKC), case, quotes, dashes, signs of operators, digits of other
//!   scripts;
//! - white space, except between letters and digits; thousands separators; marks of emphasis and
//!   mathematics;
//! - LaTeX commands that have a sign; HTML character references; tags of HTML, turns and questions;
//! - a bullet or a label before or after the text (`Question:`, `Answer:`, also in other
//!   languages), and punctuation at its end.
//!
//! Operators, signs and digits count: `1 - 2?` differs from `1 + 2?`.

mod latex;
mod markup;

use unicode_normalization::UnicodeNormalization;

use self::markup::replace_markup;

/// Words that name a question in a label before the question, such as `Question 3:`.
const QUESTION_NAMES: &str = "calculate compute evaluate solve question questions q problem \
                              prompt query exercise example task input user human instruction \
                              answer a frage aufgabe pregunta problema ejercicio pergunta domanda \
                              esercizio exercice problème вопрос задача vraag pytanie soru 问 问题 \
                              题目 問 問題 質問 질문 문제 سؤال السؤال प्रश्न প্রশ্ন";
/// Words that name an answer in a label before or after the answer, such as `Final answer:`.
const ANSWER_NAMES: &str = "answer a ans solution response output assistant result final reply \
                            antwort lösung respuesta solución resposta solução risposta soluzione \
                            réponse ответ решение antwoord odpowiedź cevap 答 答案 回答 解答 답 답변 정답 \
                            جواب الجواب उत्तर উত্তর";
/// Words that a label may contain in addition to a name.
const FILLERS: &str = "of the this following please here is new now your next to so";
/// Names of the role whose turn a chat template opens at the end, without content.
const TURNS: [&str; 2] = ["assistant", "model"];
/// Digit zero in other scripts. The code points that follow each zero are the other digits.
const ZEROS: [char; 8] = ['٠', '۰', '०', '০', '੦', '૦', '๐', '೦'];
/// Returns a text in normalized spelling, so that different spellings of a question are equal.
/// Empty if nothing but labels and punctuation is left.
pub(super) fn normalize_spelling(text: &str) -> String {
    let lines: Vec<String> =
        normalize_unicode(text).lines().map(|line| line.trim().to_owned()).collect();
    let mut lines: Vec<&str> =
        lines.iter().map(String::as_str).filter(|line| !line.is_empty()).collect();
    while lines.last().is_some_and(|line| is_label(line, ANSWER_NAMES) || TURNS.contains(line)) {
        lines.pop();
    }
    if let Some(last) = lines.last_mut() {
        *last = strip_trailing_label(last);
    }
    // A heading is a label without a colon.
    let is_heading = |line: &str| line.len() > 3 && is_label_text(line, QUESTION_NAMES);
    while lines.len() > 1 && (is_label(lines[0], QUESTION_NAMES) || is_heading(lines[0])) {
        lines.remove(0);
    }
    if let Some(first) = lines.first_mut() {
        *first = strip_label(first);
    }
    remove_spaces(&lines.join(" "))
}

/// Removes bullets and labels such as `Question 3:`, `Q3.` and `3)` from the start of a line.
fn strip_label(mut line: &str) -> &str {
    // `- 3 + 5` starts with a sign.
    while let Some(item) = ["- ", "* ", "> "].iter().find_map(|mark| line.strip_prefix(mark))
        && item.starts_with(char::is_alphabetic)
    {
        line = item;
    }
    while let Some(at) = line.find([':', '.', ')']) {
        let label = line[..at].trim_start_matches('(');
        let rest = line[at + 1..].trim_start();
        let parted = rest.len() < line.len() - at - 1;
        let numbered = label.bytes().any(|byte| byte.is_ascii_digit());
        // `A:B = 2:3` and `A. Smith` start without a label.
        let is_label = is_label_text(label, QUESTION_NAMES)
            && if line[at..].starts_with(':') {
                parted || label != "a"
            } else {
                parted && label != "a"
            };
        let only_number =
            numbered && label.len() <= 3 && label.bytes().all(|byte| byte.is_ascii_digit());
        let is_number = only_number && parted && rest.starts_with(char::is_alphabetic);
        if rest.is_empty() || !(is_label || is_number) {
            break;
        }
        line = rest;
    }
    line
}

/// Role of a part of a text, which the label of the part determines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PromptPart {
    /// The part has no label.
    Plain,
    /// The part has a label that names a question, such as `Q:`.
    Question,
    /// The part has a label that names an answer, such as `A:`.
    Answer,
}

/// Splits a text into parts: its lines, cells of tables and sides of arrows, which are also split
/// before each label. Bullets and blank parts are removed. A part that consists of a label has an
/// empty text.
pub(super) fn split_parts(text: &str) -> Vec<(PromptPart, String)> {
    let mut text = normalize_unicode(text);
    for mark in [" -> ", " => ", " → ", " ⇒ ", "\t", " | "] {
        text = text.replace(mark, "\n");
    }
    let mut found = Vec::new();
    for line in text.lines() {
        let line = line.trim_matches(|c: char| c.is_whitespace() || c == '|');
        let bullet = ["- ", "* ", "> "].iter().find_map(|bullet| line.strip_prefix(bullet));
        let line = bullet.unwrap_or(line).trim_start_matches(['#', ' ']);
        if line.is_empty() {
            continue;
        }
        let mut start = 0;
        for (at, _) in line.match_indices(char::is_whitespace) {
            let word = line[at..].trim_start();
            let word = &word[..word.find(char::is_whitespace).unwrap_or(word.len())];
            if word.strip_suffix(':').is_some_and(|word| classify_label(word) != PromptPart::Plain)
                && at > start
            {
                // `Question 3: Answer: 4` has two labels, `the answer is:` has one.
                let is_labeled = classify_label(line[start..at].trim()) != PromptPart::Plain;
                if !is_labeled {
                    found.push(classify_part(&line[start..at]));
                    start = at;
                }
            }
        }
        found.push(classify_part(&line[start..]));
    }
    found
}

/// Returns the questions in a text that have several lines. Each extends from its label to the next
/// label.
pub(super) fn collect_multiline_questions(parts: &[(PromptPart, String)]) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut is_open = false;
    for (kind, text) in parts {
        match kind {
            PromptPart::Question => {
                found.push(text.clone());
                is_open = true;
            }
            PromptPart::Plain if is_open => {
                found.last_mut().into_iter().for_each(|block| *block += &format!("\n{text}"));
            }
            _ => is_open = false,
        }
    }
    found.retain(|block| block.trim().contains('\n'));
    found
}

fn classify_part(text: &str) -> (PromptPart, String) {
    let text = text.trim();
    match text.split_once(':') {
        Some((label, rest)) if classify_label(label) != PromptPart::Plain => {
            (classify_label(label), rest.trim().to_owned())
        }
        _ => (PromptPart::Plain, text.to_owned()),
    }
}

fn classify_label(text: &str) -> PromptPart {
    if is_label_text(text, ANSWER_NAMES) {
        PromptPart::Answer
    } else if is_label_text(text, QUESTION_NAMES) {
        PromptPart::Question
    } else {
        PromptPart::Plain
    }
}

/// Removes a label such as `Answer:` after the last sentence of a line.
fn strip_trailing_label(line: &str) -> &str {
    let Some(label) = line.strip_suffix(':') else { return line };
    let end = label.rfind(['?', '.', '!']).map(|at| at + 1);
    match end.filter(|end| is_label_text(&label[*end..], ANSWER_NAMES)) {
        Some(end) => line[..end].trim_end(),
        None => line,
    }
}

fn is_label(line: &str, names: &str) -> bool {
    line.strip_suffix(':').is_some_and(|label| is_label_text(label, names))
}

/// Returns whether a text consists only of label words and numbers, and contains a word of `names`.
fn is_label_text(text: &str, names: &str) -> bool {
    let mut named = false;
    for word in text
        .split(|c: char| c.is_whitespace() || c.is_ascii_punctuation())
        .filter(|word| !word.is_empty())
    {
        // `Q3` is `Q` with a number.
        let word = word.trim_end_matches(|c: char| c.is_ascii_digit());
        let is_among =
            |known_words: &str| known_words.split_whitespace().any(|known| known == word);
        let is_name = is_among(names);
        if !(word.is_empty() || is_name || is_among(FILLERS)) {
            return false;
        }
        named |= is_name;
    }
    named && text.len() <= 60
}

/// Returns whether a character is invisible: a zero-width space or joiner, a soft hyphen, a
/// direction mark or a byte-order mark.
pub(super) fn is_invisible(c: char) -> bool {
    matches!(c, '\u{AD}' | '\u{200B}'..='\u{200F}' | '\u{202A}'..='\u{202E}' | '\u{2060}'..='\u{2064}' | '\u{FEFF}')
}

/// Converts a text to lower case and the Unicode form NFKC, with one character for each kind of
/// quote, dash and operator. Digits that NFKC would merge with other digits stay separate: `2²`
/// becomes `2^2`, and `3½` becomes `3 1/2`.
fn normalize_unicode(text: &str) -> String {
    let text = &replace_markup(text);
    if text.is_ascii() {
        return normalize_signs(&text.to_ascii_lowercase());
    }
    let mut plain = String::with_capacity(text.len());
    let mut raised = false;
    let mut lowered = false;
    for c in text.chars().filter(|c| !is_invisible(*c) && !matches!(*c, '\u{FE00}'..='\u{FE0F}')) {
        let is_raised = matches!(c, '²' | '³' | '¹' | '⁰' | '⁴'..='⁹' | '⁺' | '⁻');
        let is_lowered = matches!(c, '₀'..='₉');
        let is_fraction = matches!(c, '¼'..='¾' | '⅐'..='⅞' | '↉');
        if is_raised
            && !raised
            && plain.ends_with(|before: char| before.is_alphanumeric() || before == ')')
        {
            plain.push('^');
        } else if is_lowered && !lowered && plain.ends_with(char::is_alphanumeric) {
            plain.push('_');
        } else if is_fraction && plain.ends_with(|before: char| before.is_ascii_digit()) {
            plain.push(' ');
        }
        (raised, lowered) = (is_raised, is_lowered);
        let zero = ZEROS.iter().find(|zero| (**zero..=digit_of_script(**zero, 9)).contains(&c));
        plain.push(match c {
            // NFKC would convert it to a combining accent.
            '´' => '\'',
            // Spaces of fixed width group digits.
            '\u{A0}' | '\u{2009}' | '\u{202F}' if plain.ends_with(|c: char| c.is_ascii_digit()) => {
                '\u{202F}'
            }
            c => zero.map_or(c, |zero| digit_of_script('0', u32::from(c) - u32::from(*zero))),
        });
    }
    // Upper case first: ß and SS, and also σ and ς, differ in lower case but not in upper case.
    let folded: String = join_thousands(&plain)
        .nfkc()
        .collect::<String>()
        .to_uppercase()
        .to_lowercase()
        .nfkc()
        .collect();
    normalize_signs(&folded)
}

fn digit_of_script(zero: char, value: u32) -> char {
    char::from_u32(u32::from(zero) + value).unwrap_or(zero)
}

/// Replaces spaces between groups of three digits by commas: `1 000` becomes `1,000`.
fn join_thousands(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let commas: Vec<char> = chars.iter().map(|c| if *c == '\u{202F}' { ',' } else { *c }).collect();
    let mut number = None;
    let mut groups =
        |at: usize| chars[at] == '\u{202F}' && is_thousands_separator(&commas, at, &mut number);
    (0..chars.len()).map(|at| if groups(at) { ',' } else { chars[at] }).collect()
}

/// Replaces quotes, dashes and operators by one character for each kind.
fn normalize_signs(folded: &str) -> String {
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
            '¿' | '¡' => {}
            c if c.is_control() && c != '\n' && c != '\t' => found.push(' '),
            c => found.push(c),
        }
    }
    if found.contains(['\\', '{']) {
        found = latex::replace_commands(&found);
    }
    if found.contains(['^', '_']) {
        found = strip_braces(&found);
    }
    found.replace("''", "\"")
}

/// Removes braces around exponents and indices that consist of letters and digits: `x^{10}` becomes
/// `x^10`.
fn strip_braces(text: &str) -> String {
    let mut found = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(['^', '_']) {
        let (before, mark) = rest.split_at(at + 1);
        found.push_str(before);
        rest = mark;
        let inside = mark.strip_prefix('{').and_then(|mark| mark.split_once('}'));
        // `2^{3}4` is not `2^{34}`.
        if let Some((inside, after)) = inside.filter(|(inside, after)| {
            inside.chars().all(char::is_alphanumeric) && !after.starts_with(char::is_alphanumeric)
        }) {
            found.push_str(inside);
            rest = after;
        }
    }
    found.push_str(rest);
    found
}

/// Removes white space from a line, except between letters and digits. Also removes thousands
/// separators, quotation marks, emphasis, and punctuation at the end.
fn remove_spaces(text: &str) -> String {
    // Pairs of dollar signs delimit mathematics.
    let is_paired = text.matches('$').count().is_multiple_of(2);
    let chars: Vec<char> = text.chars().filter(|c| *c != '$' || !is_paired).collect();
    let chars = strip_emphasis(&chars);
    let mut kept: Vec<char> = Vec::with_capacity(chars.len());
    let mut space = false;
    // Quotation mark that is currently open.
    let mut quote = None;
    let mut number = None;
    for (at, &c) in chars.iter().enumerate() {
        let before = at.checked_sub(1).map(|at| chars[at]);
        let next = chars.get(at + 1).copied();
        let test_neighbors = |test: fn(&char) -> bool| {
            (before.as_ref().is_some_and(test), next.as_ref().is_some_and(test))
        };
        match c {
            c if c.is_whitespace() => {
                space = true;
                continue;
            }
            // 1,000, 1'000, 1_000 and 1000 are equal.
            ',' | '\'' | '_'
                if test_neighbors(char::is_ascii_digit) == (true, true)
                    && is_thousands_separator(&chars, at, &mut number) =>
            {
                continue;
            }
            // Apostrophes within words, primes, feet and inches are kept; quotation marks are
            // removed.
            '\'' | '"' => {
                let (left, right) = test_neighbors(|c| c.is_alphanumeric());
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
            '_' if !(before.is_some_and(is_word_char) && next.is_some_and(is_word_char)) => {
                continue;
            }
            '*' if next == Some('*') => continue,
            '*' if before == Some('*') => {
                // Two stars are a power between operands, and emphasis elsewhere.
                let left = &chars[..at - 1];
                let right = &chars[at + 1..];
                let is_spaced = is_blank(left.last()) && is_blank(right.first());
                let outside = |c: &&char| !(is_spaced && c.is_whitespace());
                if is_operand(left.iter().rev().find(outside))
                    && is_operand(right.iter().find(outside))
                {
                    space = false;
                    kept.push('^');
                }
                continue;
            }
            _ => {}
        }
        let c = match c {
            // 3 x 4 and 3 * 4 are equal.
            'x' if is_multiplication_sign(&chars, at) => '*',
            c => c,
        };
        if space && kept.last().is_some_and(|last| is_word_char(*last)) && is_word_char(c) {
            kept.push(' ');
        }
        space = false;
        kept.push(c);
    }
    while let Some(&last) = kept.last() {
        let ends =
            matches!(last, '?' | '؟' | '।' | '۔' | '.' | '…' | ':' | ';' | ',' | '=' | ' ' | '*');
        // After a number, `!` is the factorial.
        let exclaimed = kept.iter().rev().find(|c| **c != '!');
        let exclaims = last == '!' && exclaimed.is_some_and(|c| c.is_alphabetic() || *c == '?');
        if !ends && !exclaims {
            break;
        }
        kept.pop();
    }
    shorten_dashes(&kept)
}

fn is_operand(c: Option<&char>) -> bool {
    c.is_some_and(|c| is_word_char(*c) || "()".contains(*c))
}

/// Returns whether a character belongs to a word. π does not count, because the space that LaTeX
/// needs after its name is not significant.
fn is_word_char(c: char) -> bool {
    c.is_alphanumeric() && c != 'π'
}

fn is_blank(c: Option<&char>) -> bool {
    c.is_some_and(|c| c.is_whitespace())
}

/// Removes single asterisks around words: `*first*` becomes `first`.
fn strip_emphasis(chars: &[char]) -> Vec<char> {
    let is_star = |at: usize| chars.get(at) == Some(&'*');
    let is_single = |at: usize| is_star(at) && !is_star(at + 1) && !(at > 0 && is_star(at - 1));
    let is_letter = |at: usize| chars.get(at).is_some_and(|c| c.is_alphabetic());
    let mut removed = vec![false; chars.len()];
    let mut open: Option<usize> = None;
    for at in (0..chars.len()).filter(|at| is_single(*at)) {
        let closes = at > 0
            && !chars[at - 1].is_whitespace()
            && chars.get(at + 1).is_none_or(|c| is_outside(*c));
        match open {
            // Stars around a single letter are multiplications.
            Some(start)
                if closes && (start + 1..at).any(|at| is_letter(at) && is_letter(at + 1)) =>
            {
                (removed[start], removed[at], open) = (true, true, None);
            }
            _ => {
                let opens_emphasis = (at == 0 || is_outside(chars[at - 1])) && is_letter(at + 1);
                open = opens_emphasis.then_some(at);
            }
        }
    }
    chars.iter().zip(removed).filter(|(_, is_out)| !is_out).map(|(c, _)| *c).collect()
}

fn is_outside(c: char) -> bool {
    c.is_whitespace() || ".,;:!?()[]\"'-".contains(c)
}

/// Replaces several dashes between words by one dash: `king--and` becomes `king-and`.
fn shorten_dashes(chars: &[char]) -> String {
    let mut found = String::with_capacity(chars.len());
    let mut at = 0;
    while at < chars.len() {
        let dashes = chars[at..].iter().take_while(|c| **c == '-').count();
        let before = at.checked_sub(2).and_then(|start| chars.get(start..at));
        let is_long = (2..=3).contains(&dashes)
            && are_letters(before)
            && are_letters(chars.get(at + dashes..at + dashes + 2));
        found.push(chars[at]);
        at += if is_long { dashes } else { 1 };
    }
    found
}

fn are_letters(pair: Option<&[char]>) -> bool {
    pair.is_some_and(|pair| pair.iter().all(|c| c.is_alphabetic()))
}

/// Splits a line after each sentence that is followed by a sign, such as an equals sign or a
/// bracket, as in `Who was it? = Ivanhoe` and `Who was it? [5 points]`. Returns an empty list if
/// there is no such position.
pub(super) fn split_sentences(line: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut start = 0;
    for (at, end) in line.match_indices(['?', '!', '.', '。']) {
        let rest = &line[at + end.len()..];
        let behind = rest.trim_start();
        // If a word or a formula follows, the text continues.
        if behind.len() < rest.len()
            && behind.starts_with(|c: char| !(c.is_alphanumeric() || "$\\\"'¿¡".contains(c)))
        {
            found.push(&line[start..at + end.len()]);
            start = line.len() - behind.len();
        }
    }
    if !found.is_empty() {
        found.push(&line[start..]);
    }
    found
}

/// Extent of consecutive digits and separators of one kind.
struct NumberSpan {
    separator: char,
    start: usize,
    /// Index after the last character of the span.
    end: usize,
}

/// Returns whether the character at index `at` is a thousands separator: exactly three digits
/// follow it. A number that fills its brackets, such as `(1,234)`, is a list of numbers instead.
/// `number` caches the span around the separator, so that each span is searched only once.
fn is_thousands_separator(chars: &[char], at: usize, number: &mut Option<NumberSpan>) -> bool {
    let separator = chars[at];
    if !number
        .as_ref()
        .is_some_and(|span| span.separator == separator && (span.start..span.end).contains(&at))
    {
        let in_number = |c: &&char| c.is_ascii_digit() || **c == separator;
        let start = at - chars[..at].iter().rev().take_while(in_number).count();
        let end = at + 1 + chars[at + 1..].iter().take_while(in_number).count();
        *number = Some(NumberSpan { separator, start, end });
    }
    let Some(NumberSpan { start, end, .. }) = *number else { return false };
    let is_list = start.checked_sub(1).is_some_and(|before| "([{".contains(chars[before]))
        && chars.get(end).is_some_and(|after| ")]}".contains(*after));
    let first = count_digits(&chars[start..at]);
    count_digits(&chars[at + 1..]) == 3
        && (1..=3).contains(&first)
        && chars[start] != '0'
        && !is_list
}

fn count_digits(from: &[char]) -> usize {
    from.iter().take(4).take_while(|c| c.is_ascii_digit()).count()
}

/// Returns whether the `x` at index `at` is a multiplication sign, with numbers on both sides.
fn is_multiplication_sign(chars: &[char], at: usize) -> bool {
    is_digit(chars[..at].iter().rev().find(|c| !c.is_whitespace()))
        && is_digit(chars[at + 1..].iter().find(|c| !c.is_whitespace()))
}

fn is_digit(c: Option<&char>) -> bool {
    c.is_some_and(char::is_ascii_digit)
}
