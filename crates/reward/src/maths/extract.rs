//! Locates the answer in a text.

use serde::{Deserialize, Serialize};

use super::statement::{extract_last_value, extract_statement};
use crate::answer::text_in_tag;
use crate::bounds::parse_bound;
use crate::box_context::{answer_in_context, is_boxed_answer_retracted};
use crate::boxed::last_box_with_range;
use crate::characters::normalize_characters;
use crate::chunks::strip_text_markup;
use crate::context::{is_one_of_several, without_latex};
use crate::retraction::starts_with_retraction;
use crate::unsettled::{is_unsettled_after, is_unsettled_before};
use crate::{doubts, numbers};

/// Location of a mathematical answer in the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MathsLocation {
    /// The last `\boxed{…}`, unless an `<answer>` tag follows it. If there is no such box, the
    /// first of these that exists: the content of the tag, the text after the last `####`, the text
    /// after the last "answer is" or "answer:", the last formula (`$…$`), the last number.
    #[default]
    Last,
    /// The last `\boxed{…}`. Adjacent boxes (`\boxed{2}` and `\boxed{3}`) form one list.
    Boxed,
    /// The complete text.
    Text,
}

/// Phrases that announce an answer, such as "answer is".
const ANNOUNCEMENTS: [&str; 26] = [
    "answer is",
    "answer:",
    "answer**:",
    "answer** is",
    "answer =",
    "answer equals",
    "answer would be",
    "answer will be",
    "answer must be",
    "respuesta es",
    "respuesta:",
    "réponse est",
    "réponse :",
    "réponse:",
    "antwort ist",
    "antwort lautet",
    "risposta è",
    "antwort:",
    "resposta é",
    "resposta:",
    "ответ:",
    "Ответ:",
    "答案是",
    "答案为",
    "答案:",
    "答えは",
];

/// Minimum number of words with which a text counts as prose.
const PROSE: usize = 3;

/// Opening and closing delimiters of a LaTeX formula on lines of its own.
const DISPLAYS: [(&str, &str); 2] = [("$$", "$$"), ("\\[", "\\]")];

/// LaTeX markup between two boxes that has no meaning.
const SPACES: [&str; 7] = ["\\text{", "\\mathrm{", "\\quad", "\\ ", "\\,", "\\;", "}"];

/// Maximum number of adjacent boxes that form one answer.
const BOXES: usize = 20;

impl MathsLocation {
    /// Returns the mathematical answer in a text, or `None` if the text states no answer.
    pub(super) fn extract_answer(self, text: &str) -> Option<String> {
        let spaced = space_full_width_punctuation(text);
        let text: &str = &normalize_characters(&spaced);
        match self {
            MathsLocation::Boxed => answer_in_boxes(text)?.ok(),
            MathsLocation::Text => Some(text.trim().to_owned()).filter(|text| !text.is_empty()),
            MathsLocation::Last => {
                let text: &str = &space_cjk_punctuation(text);
                // A box before the tag was a preliminary answer.
                let last = text.rfind("<answer>").map_or(text, |at| &text[at..]);
                let tagged = || text_in_tag(last, "answer").and_then(answer_in_tag);
                let boxed = |text| {
                    answer_in_boxes(text)
                        .map(|found| found.or_else(|rest| answer_without_box(rest).ok_or(())).ok())
                };
                match boxed(last) {
                    Some(found) => found,
                    None => match tagged() {
                        Some(found) => Some(found),
                        None => boxed(text).unwrap_or_else(|| answer_without_box(text)),
                    },
                }
            }
        }
    }
}

/// Returns the answer in the last `\boxed{…}` of a text and the boxes adjacent to it, together with
/// the surrounding text. Returns `Err` with the text that retracts the answer, or with an empty
/// text if the surrounding text shows that the box is not an answer.
fn answer_in_boxes(text: &str) -> Option<Result<String, &str>> {
    let inside = last_boxes_content(text)?;
    let (last, range) = last_box_with_range(text)?;
    if is_boxed_answer_retracted(text, &range) {
        return Some(Err(&text[range.end..]));
    }
    // Several boxes form a list.
    let stated =
        if inside == last.trim() { answer_in_context(text, &inside, &range) } else { Some(inside) };
    // Struck text is no answer.
    let stated = stated.filter(|stated| !strip_text_markup(stated).starts_with("~~"));
    Some(stated.ok_or(""))
}

/// Returns the content of the last `\boxed{…}` of a text, and of the boxes adjacent to it, as a
/// list.
pub(crate) fn last_boxes_content(text: &str) -> Option<String> {
    let (last, range) = last_box_with_range(text)?;
    // The name of a solution, as in x=.
    let is_name = |word: &str| {
        let name = word.strip_suffix('=').unwrap_or(word);
        name.len() == 1 && name.starts_with(|c: char| ('w'..='z').contains(&c))
    };
    let mut found = vec![last.trim()];
    let mut start = range.start;
    while found.len() < BOXES {
        let Some((inside, range)) = last_box_with_range(&text[..start]) else { break };
        let between = SPACES
            .iter()
            .fold(text[range.end..start].to_owned(), |text, space| text.replace(space, " "));
        let is_adjacent = between
            .split(|c: char| c.is_whitespace() || c == '$' || c == ',' || c == ';')
            .all(|word| matches!(word, "" | "and" | "or" | "=") || is_name(word));
        // Boxes with only white space between them are two versions of one answer.
        if !is_adjacent || !between.contains([',', ';', 'a', 'o']) {
            break;
        }
        found.push(inside.trim());
        start = range.start;
    }
    found.reverse();
    Some(found.join(", "))
}

/// Returns the answer in an `<answer>` tag: the text after "answer is", else a formula, else the
/// complete text, or the last number if the text is prose.
fn answer_in_tag(inside: &str) -> Option<String> {
    let is_word = |word: &&str| word.len() > 1 && word.chars().all(char::is_alphabetic);
    let rest = || {
        if inside.split_whitespace().filter(is_word).count() >= PROSE {
            find_last_value(inside)
        } else {
            Some(inside.trim().trim_end_matches('.').to_owned()).filter(|inside| !inside.is_empty())
        }
    };
    match find_announced_answer(inside) {
        Some(Ok(stated)) => Some(stated),
        Some(Err(rest)) => answer_without_box(rest),
        None => answer_in_last_formula(inside).unwrap_or_else(rest),
    }
}

fn answer_without_box(text: &str) -> Option<String> {
    if let Some(at) = text.rfind("####") {
        return answer_on_first_line(&text[at + "####".len()..]);
    }
    match find_announced_answer(text) {
        Some(Ok(stated)) => Some(stated),
        Some(Err(rest)) => answer_without_box(rest),
        None => answer_in_last_formula(text).unwrap_or_else(|| find_last_value(text)),
    }
}

/// Words that can precede an announcement of the answer in its clause. Any other word may negate or
/// suppose the answer.
const LEADS: &str = "the a an our my your final correct right exact required desired numerical \
                     numeric simplified complete full best only approximate closest total \
                     question's problem's overall so thus therefore hence then and \
    also because since as consequently accordingly finally lastly indeed now here here's again \
    just simply clearly actually confident certain am i'm pretty quite integer in conclusion \
    summary short to for of this that which it that's this's is was gives giving yields shows \
    means implies makes tells us me i we you i'd i'm think believe guess know see get got find \
    found have obtain obtained conclude concluded say can confirm confirmed verify compute \
    computed calculate determine determined deduce follows sure okay ok yes well part step \
    question problem output result solution ### answer die der das also daher somit deshalb \
    folglich dann und dass ist endgültige richtige korrekte la le les donc ainsi alors et que \
    finale bonne correcte el lo por tanto entonces así y es correcta \
    a o portanto logo assim então e resposta final итак значит правильный окончательный \
    следовательно ergo quindi dunque by up all these together adding combining simplifying";

/// Maximum number of characters before an announcement of the answer that are examined.
const MAX_LEAD: usize = 200;
/// Maximum number of announcements of an answer that are examined, from the last one.
const MAX_ANNOUNCEMENTS: usize = 50;

/// Parts of words that negate or suppose a statement, in scripts without spaces.
const DENIALS: [&str; 9] = ["不", "非", "假", "如果", "若", "误", "错", "仮", "もし"];

/// Words that start a phrase about how an answer was found, such as "by Vieta" and "from equation
/// 3". Participles do so as well.
const ADJUNCTS: &str = "by using from after with in for since because as without thanks due upon \
                        on to at given through via under counting following";

/// Participles that express a supposition or doubt, and words that attribute the answer to another
/// person or call it wrong.
const UNSTATED: &str = "assuming supposing pretending imagining guessing doubting denying saying \
                        claiming believing thinking hoping if unless were had would could might \
                        when whether wrong mistake mistaken mistakenly error claim \
    claims claimed says said believes believed thinks thought argues according someone people \
    students naive popular hypothetical another other every any most many few some";

/// Returns whether the words before the announcement of an answer describe how the answer was
/// found: "by Vieta the", "solving for x our final".
fn is_how_found(words: &[String]) -> bool {
    let has = |list: &str, word: &str| list.split_whitespace().any(|own| own == word);
    let Some((head, rest)) = words.split_first() else { return false };
    let is_head = has(ADJUNCTS, head)
        || (head.len() > 4 && (head.ends_with("ing") || head.ends_with("ed")))
        || (head == "it" && rest.first().is_some_and(|word| word == "follows"));
    let article = rest
        .iter()
        .rposition(|word| ["the", "our", "my", "your", "die", "la"].contains(&word.as_str()));
    let Some(article) = article.filter(|_| is_head && !has(UNSTATED, head)) else { return false };
    let rest_words: Vec<&str> = rest.iter().map(String::as_str).collect();
    let doubts = |at: usize| {
        has(UNSTATED, rest_words[at])
            || parse_bound(&rest_words[at..], true)
                .is_some_and(|(sign, _)| ["≠", "maybe", "might", "supposed"].contains(&sign))
    };
    rest[article..].iter().all(|word| has(LEADS, word)) && !(0..rest.len()).any(doubts)
}

/// Returns the index of the word that draws a conclusion from the words before it: the "so" of "Bob
/// pays 12 dollars, so the". Returns `None` if a word before it supposes, doubts or negates.
fn conclusion_index(words: &[String]) -> Option<usize> {
    let is_joint =
        |word: &String| ["so", "and", "thus", "hence", "therefore"].contains(&word.as_str());
    let at = words.iter().rposition(is_joint)?;
    let before: Vec<&str> = words[..at].iter().map(String::as_str).collect();
    let is_open = |at: usize| {
        UNSTATED.split_whitespace().any(|word| word == before[at])
            || parse_bound(&before[at..], false)
                .is_some_and(|(sign, _)| ["≠", "maybe", "might", "supposed"].contains(&sign))
    };
    (!(0..before.len()).any(is_open)).then_some(at)
}

/// Returns whether the announcement of an answer states the answer, judging by the words before the
/// announcement.
fn announces_answer(before: &str) -> bool {
    let near = before.char_indices().rev().nth(MAX_LEAD).map_or(0, |(at, _)| at);
    let sentence = before[near..].rsplit(['.', ';', '!', '?', '\n']).next().unwrap_or_default();
    let clause = sentence.rsplit([',', ':']).next().unwrap_or_default();
    let clause = if clause.trim_start().starts_with("that ") { sentence } else { clause };
    // "Suppose, the answer is": words before the clause can make it hypothetical.
    if doubts::ends_with_supposition(&sentence[..sentence.len() - clause.len()]) {
        return false;
    }
    // Formulas do not negate.
    let words = clause.split('$').step_by(2);
    let words: Vec<String> = words
        .flat_map(|text| text.split(|c: char| !c.is_alphanumeric() && c != '\''))
        .filter(|word| !word.is_empty())
        .map(str::to_lowercase)
        .collect();
    if is_how_found(&words) {
        return true;
    }
    let words = match conclusion_index(&words) {
        Some(at) => &words[at..],
        None => &words,
    };
    words.iter().all(|word| {
        let word = word.trim_matches('\'');
        let is_letter = word.chars().nth(1).is_none();
        let is_joined = word.starts_with(|c| c >= '\u{3000}');
        if is_joined {
            !DENIALS.iter().any(|denial| word.contains(denial))
        } else {
            is_letter
                || word.starts_with(|c: char| c.is_ascii_digit())
                || LEADS.split_whitespace().any(|own| own == word)
        }
    })
}

/// Adds spaces at full-width punctuation, which is written without spaces.
fn space_full_width_punctuation(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '（' => out.push_str(" （"),
            '。' | '；' | '！' | '？' => {
                out.push(c);
                out.push(' ');
            }
            c => out.push(c),
        }
    }
    out
}

/// Returns a text in the spelling that the number parsers accept, with spaces between its sentences
/// in any script.
pub(crate) fn to_readable_text(text: &str) -> String {
    space_cjk_punctuation(&normalize_characters(&space_full_width_punctuation(text)))
}

/// Adds a space between punctuation and a following Chinese, Japanese or Korean character.
fn space_cjk_punctuation(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if ('\u{3000}'..'\u{e000}').contains(&c) && out.ends_with([',', '.', ';', ':', '!', '?']) {
            out.push(' ');
        }
        out.push(c);
    }
    out
}

/// Returns the answer after the last announcement that is not hypothetical. Returns `Err` with the
/// text that retracts the answer, or, if all announcements are hypothetical, with the text after
/// the last announcement.
fn find_announced_answer(text: &str) -> Option<Result<String, &str>> {
    // ASCII lower-casing keeps byte offsets, so they are valid in both texts.
    let lower = text.to_ascii_lowercase();
    let announcements = ANNOUNCEMENTS.iter().flat_map(|phrase| lower.match_indices(phrase));
    let mut announcements: Vec<(usize, usize)> =
        announcements.map(|(start, phrase)| (start, start + phrase.len())).collect();
    announcements.sort_unstable();
    let (_, last) = *announcements.last()?;
    let Some((_, end)) = announcements
        .into_iter()
        .rev()
        .take(MAX_ANNOUNCEMENTS)
        .find(|(start, end)| announces_answer(&text[..*start]) && !is_hypothetical(text, *end))
    else {
        // Only another clause can contain the answer.
        let rest = &text[last..];
        let is_stop = |pair: &[u8]| {
            matches!(pair, [b',' | b'.' | b';' | b'!' | b'?', b' ' | b'\n'] | [b'\n', _])
        };
        let stop = rest.as_bytes().windows(2).position(is_stop);
        return Some(Err(stop.map_or("", |stop| &rest[stop + 1..])));
    };
    let rest = &text[end..];
    let found = answer_on_first_line(rest)?;
    // A question followed by a value does not state the answer, and "wait" or "no" retracts it.
    let own = rest.trim_start_matches([':', ' ', '*', '_', '\n']);
    let sentence =
        own.lines().next().and_then(|line| split_sentences(line).next()).unwrap_or_default();
    let after = &own[sentence.len()..];
    let is_question = sentence.ends_with('?') && after.contains(|c: char| c.is_ascii_digit());
    let located = own.find(&found).map(|at| &own[at + found.len()..]);
    let behind = located.unwrap_or(after);
    let before = own.split(|c: char| c.is_ascii_digit()).next().unwrap_or_default();
    if located.is_some_and(|behind| is_unsettled_after(&without_latex(behind))) {
        return Some(Err(""));
    }
    if is_question
        || found.starts_with("~~")
        || starts_with_retraction(after)
        || doubts::is_retracted_after(behind, false)
        || doubts::is_doubted_after(behind)
        || doubts::states_failure_before(before)
    {
        Some(Err(after))
    } else {
        Some(Ok(found))
    }
}

/// Returns the text after the last "answer is" that states an answer, or `None` if there is none.
pub(crate) fn text_after_announcement(text: &str) -> Option<&str> {
    // ASCII lower-casing keeps byte offsets, so they are valid in both texts.
    let lower = text.to_ascii_lowercase();
    let is_verb = |phrase: &&&str| !phrase.contains([':', '*', '=']) || phrase.starts_with("答案");
    let matches =
        ANNOUNCEMENTS.iter().filter(is_verb).flat_map(|phrase| lower.match_indices(phrase));
    let mut matches: Vec<(usize, usize)> =
        matches.map(|(start, phrase)| (start, start + phrase.len())).collect();
    matches.sort_unstable();
    let mut last = matches.into_iter().rev().take(MAX_ANNOUNCEMENTS);
    last.find(|(start, end)| announces_answer(&text[..*start]) && !is_hypothetical(text, *end))
        .map(|(_, end)| &text[end..])
}

/// Returns whether the announcement that ends at `end` depends on a condition after the answer:
/// "The answer would be 5 if it rained".
fn is_hypothetical(text: &str, end: usize) -> bool {
    is_unsettled_before(&text[..end])
        || text[..end].to_ascii_lowercase().ends_with("would be")
            && doubts::is_number_supposed(&text[..end], &text[end..])
}

pub(crate) fn first_sentence_of_line(line: &str) -> &str {
    split_sentences(line).next().unwrap_or_default()
}

/// Returns the answer in the first sentence of the first line of a text, without the reasons for
/// it. If the text starts with a display formula, returns that formula.
fn answer_on_first_line(text: &str) -> Option<String> {
    let own = text.trim_start_matches([':', ' ', '*']).trim_start();
    if let Some((open, close)) = DISPLAYS.iter().find(|(open, _)| own.starts_with(open)) {
        let inside = own[open.len()..].split(close).next()?.trim();
        return Some(inside.to_owned()).filter(|inside| !inside.is_empty());
    }
    let line = text.lines().next()?.trim_start_matches([':', ' ', '*', '_']);
    let sentence = split_sentences(line).next()?;
    Some(extract_statement(sentence)).filter(|stated| !stated.is_empty())
}

/// Returns the last value of a text, from the last sentence that has a number and is not a
/// question.
fn find_last_value(text: &str) -> Option<String> {
    let sentences: Vec<&str> = text.lines().flat_map(split_sentences).collect();
    let mut stated = sentences.into_iter().rev().filter(|sentence| !sentence.ends_with('?'));
    let (sentence, value) =
        stated.find_map(|sentence| Some((sentence, extract_last_value(sentence)?)))?;
    if value.starts_with("~~") {
        return None;
    }
    // A plain number must be part of prose: neither bounded nor negated nor a part of a formula.
    let digits = value.split(|c: char| !c.is_ascii_digit()).rfind(|digits| !digits.is_empty())?;
    let is_bare =
        value.trim_start_matches(['$', '-', ' ', '\\']).starts_with(|c: char| c.is_ascii_digit());
    let start = sentence.as_ptr() as usize - text.as_ptr() as usize;
    let offset = sentence.rfind(&value).map(|at| at + value.rfind(digits).unwrap_or(0));
    let offset = offset.or_else(|| sentence.rfind(digits))?;
    if doubts::is_number_supposed(&text[..start + offset], &text[start + offset + digits.len()..]) {
        return None;
    }
    let found = numbers::stated_number_at(text, start + offset)
        .filter(|_| is_bare && numbers::count_numbers(&value) == 1);
    match found {
        Some(found) if found.value.is_none() => None,
        _ => Some(value),
    }
}

/// Splits a line of text into sentences. A period before the first digit may belong to an
/// abbreviation.
fn split_sentences(line: &str) -> impl Iterator<Item = &str> {
    let is_digit = |c: char| c.is_ascii_digit();
    let first = line.find(is_digit).unwrap_or(0);
    let last = line.rfind(is_digit).unwrap_or(0);
    let mut start = 0;
    let bytes = line.as_bytes();
    let ends = move |at: &usize| {
        matches!(bytes[*at], b'.' | b'!' | b'?')
            && bytes.get(at + 1) == Some(&b' ')
            && (*at > first || *at > last)
    };
    let stops = (0..line.len()).filter(ends).map(|at| at + 1).chain([line.len()]);
    stops.map(move |end| {
        let sentence = &line[start..end];
        start = end;
        sentence
    })
}

/// Returns the last formula between delimiters such as `$`, and the offset of the formula's end.
fn find_last_formula(text: &str) -> Option<(usize, &str)> {
    let marked = |open: &str, close: &str| {
        let end = text.rfind(close)?;
        let start = text[..end].rfind(open)? + open.len();
        Some((end, text[start..end].trim())).filter(|(_, inside)| !inside.is_empty())
    };
    let all = [find_last_dollar_formula(text), marked("\\(", "\\)"), marked("\\[", "\\]")];
    all.into_iter().flatten().max_by_key(|(end, _)| *end)
}

/// Returns the answer that the last formula of a text states together with the surrounding text.
/// Returns `Some(None)` if the formula is hypothetical, one of several answers, or an operand.
fn answer_in_last_formula(text: &str) -> Option<Option<String>> {
    let (_, inside) = find_last_formula(text)?;
    let start = inside.as_ptr() as usize - text.as_ptr() as usize;
    let end = start + inside.len();
    let name = inside.rfind('=').map_or(0, |at| at + 1);
    let marks = |c: char| "$\\()[] ".contains(c);
    let before = text[..start].trim_end_matches(marks);
    let after = text[end..].trim_start_matches(marks);
    let led = format!("{before} {}", &inside[..name]);
    if doubts::is_number_supposed(&led, after) || is_one_of_several(&led) {
        return Some(None);
    }
    let open = before.len();
    let close = text.len() - after.len();
    // Surrounding words can change a number. A formula with operators is complete in itself.
    let is_number = inside.chars().all(|c| c.is_ascii_digit() || ".,-{}\\$".contains(c));
    if !is_number {
        return Some(Some(inside.to_owned()));
    }
    let spaced = format!("{} {inside} {}", &text[..open], &text[close..]);
    let range = open + 1..open + 1 + inside.len();
    Some(answer_in_context(&spaced, inside, &range))
}

/// Returns the last formula of a text between single or double dollar signs, and the offset of the
/// formula's end. A dollar sign is currency if it is escaped, or if it would end a formula directly
/// before a digit.
fn find_last_dollar_formula(text: &str) -> Option<(usize, &str)> {
    let signs = text.match_indices('$').map(|(at, _)| at).filter(|at| !text[..*at].ends_with('\\'));
    let signs: Vec<usize> = signs.collect();
    signs.windows(2).rev().find_map(|pair| {
        let inside = text[pair[0] + 1..pair[1]].trim();
        let after = &text[pair[1] + 1..];
        let is_amount = after.starts_with(|c: char| c.is_ascii_digit());
        (!inside.is_empty() && !is_amount).then_some((pair[1], inside))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stated_answer_is_located() {
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
            // Display formulas.
            ("Therefore,\n$$x = \\sqrt{2}$$", Some("x = \\sqrt{2}")),
            ("So we get\n$$\nx+1\n$$", Some("x+1")),
            ("The answer is:\n\n$$\\sqrt2$$\nwith 3", Some("\\sqrt2")),
            ("**Answer:**\n\n\\[\\sqrt2\\]", Some("\\sqrt2")),
            ("The answer is:\n\nx + 1", Some("x + 1")),
            // Amounts of money.
            ("Janet makes 9 * $2 = $18 every day", Some("$18")),
            ("$200,000 - $130,000 = $70,000", Some("$70,000")),
            ("He spent $5 and then $7, so he has 18 dollars left", Some("18 dollars left")),
            ("It costs \\$5 and then \\$7, so 18", Some("18")),
            ("It costs $5, so $x = 3$", Some("x = 3")),
            // Reasons.
            ("The answer is 5, because 3 + 2 = 5.", Some("5")),
            ("The answer is 5 apples, since he ate 3.", Some("5 apples")),
            ("The answer is: 42 (since 6*7=42).", Some("42")),
            ("The answer is $\\frac{1}{2}$ because $x = 3$ here.", Some("\\frac{1}{2}")),
            (
                "The answer is $\\{x \\text{ where } x > 3\\}$.",
                Some("\\{x \\text{ where } x > 3\\}"),
            ),
            // Suppositions, questions and retracted statements.
            ("If the answer is 12, then x = 4", Some("4")),
            ("Few believe that the answer is 7.", None),
            ("Suppose the answer is 7. That is absurd.", None),
            ("We conclude that the answer is 7.", Some("7")),
            ("The answer is 7. This is wrong.", None),
            ("The answer is 7. Nein, 8.", Some("8")),
            ("答案为:7.因为3+4=7", Some("7")),
            ("To sum up, the answer is 12", Some("12")),
            ("The answer is 12? No, it is 13.", Some("13")),
            ("The answer is 12. Wait, no, 13.", Some("13")),
            ("The answer is 12. Wait, let me check.", Some("12")),
            ("Is the answer 12?", None),
            ("La respuesta es 12, no 13.", Some("12")),
            // Tags.
            ("<think>$3$, \\boxed{4}</think><answer>2\\sqrt{3}</answer>", Some("2\\sqrt{3}")),
            ("<answer> (0, 1) </answer>", Some("(0, 1)")),
            ("<answer> The answer is 5 </answer>", Some("5")),
            ("<answer>so $x^2$</answer>", Some("x^2")),
            ("<answer>That makes 5 of them.</answer>", Some("5")),
            ("<answer>no solution.</answer>", Some("no solution")),
            ("<answer>\\boxed{7}</answer>", Some("7")),
            ("<answer>7</answer> or rather \\boxed{8}", Some("8")),
            ("\\boxed{7} <answer></answer>", Some("7")),
            ("\\boxed{7} <answer>", Some("7")),
        ] {
            assert_eq!(MathsLocation::Last.extract_answer(text).as_deref(), want, "{text}");
        }
        assert_eq!(MathsLocation::Boxed.extract_answer("72"), None);
        assert_eq!(MathsLocation::Text.extract_answer(" x + 1 ").as_deref(), Some("x + 1"));
    }
}
