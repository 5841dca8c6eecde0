//! Finds the option that a text names.
//!
//! The sources are tried in this order:
//!
//! - The last box or `<answer>` that names an option. Boxes and tags without an option are ignored.
//! - The last sentence that states an option ("the answer is B", "I choose B", "B is correct", or a
//!   line that consists of the letter).
//! - The last line, then the first line, if it starts with an option.
//! - The option in brackets at the end of the last sentence.
//! - The only option that the text calls true, or false if the question asks for the false one.
//!
//! A later sentence can retract what a box, a tag or a sentence states; then no option is named. No
//! option is named either if two options are given as one answer ("B or C"), or if the option is
//! negated.

use regex::Regex;

use super::called::find_option_called_right;
use super::options::{ChoiceOptions, LETTERED};
use super::patterns::{
    AGAINST, BEHIND, BEHIND_CAPITAL, BRACKETED, CLOSING_MARKS, CONDITION, COUNTERFACTUAL, DENIES,
    IGNORES, INSTEAD, IS_RIGHT, ITEM, ITEM_IN_BOX, ITEMS, JOINS, LABEL_BEHIND, LEAD, LETTER,
    OPENING_MARKS, SENTENCE, SENTENCE_END, SINGLE_LETTER, SURE, YES,
};
use super::plain::{last_200_chars, last_clause, last_sentence, strip_markup};
use super::words::{
    AFTER_ANOTHER, ALTERNATIVE, ANNOUNCED, ANNOUNCED_ELSEWHERE, ANOTHER, BEFORE_OPTION,
    CALLED_WRONG, CHOSEN, DENIED, ENDS_ELSEWHERE, IS_CORRECT, IS_CORRECT_ELSEWHERE, IS_DENIED,
    JOINED, LIMITED, NAMES_ANSWER, NUMBERED, OTHER, OWN, OWN_SUBJECTS, REPORTED, RULED_OUT, STATES,
    SUPPOSED, UNDONE,
};
use crate::boxed::last_box_with_range;
use crate::retraction::retracts_answer;
use crate::{bounds, doubts};

/// The index of an option, and the part of the text that names the option.
type NamedOption = (usize, String);

/// Returns the option that a completion's text names, with the part of the text that names it.
/// `count` is the number of options.
pub(super) fn find_named_option(
    text: &str,
    count: usize,
    options: &ChoiceOptions,
) -> Option<NamedOption> {
    let text = strip_markup(text);
    let reader = OptionReader { count, options };
    // Text after a statement may retract it.
    let unless_undone = |end: usize, found: NamedOption| {
        Some(found).filter(|found| !reader.is_option_retracted(&text[end..], found.0))
    };
    let behind = |offset: usize, found: &NamedOption| {
        offset + text[offset..].find(found.1.as_str()).map_or(0, |at| at + found.1.len())
    };
    if let Some((end, marked)) =
        reader.find_option_in_box(&text).or_else(|| reader.find_option_in_tag(&text))
    {
        let marked = marked?;
        // The following text may repeat the option ("Wait, I check: B is correct") or state another
        // one.
        return match reader.find_stated_option(&text[end..]) {
            None => unless_undone(end, marked),
            Some((_, later)) if later.0 != marked.0 => None,
            Some((offset, later)) => unless_undone(behind(end + offset, &later), marked),
        };
    }
    if let Some((offset, stated)) = reader.find_stated_option(&text) {
        return unless_undone(behind(offset, &stated), stated);
    }
    if let Some((offset, found)) = reader.find_option_on_outer_line(&text) {
        return unless_undone(behind(offset, &found), found);
    }
    reader.find_option_in_brackets(&text).or_else(|| {
        let letter = |name: &str| reader.option_with_letter(name);
        let (end, called) =
            find_option_called_right(&text, options, letter, |before| is_stated(before, ""))?;
        unless_undone(end, called)
    })
}

/// Whether a lower-case letter can name an option.
#[derive(Clone, Copy, PartialEq)]
enum LetterCase {
    Any,
    Capital,
}

struct OptionReader<'o> {
    count: usize,
    options: &'o ChoiceOptions,
}

impl OptionReader<'_> {
    /// Returns whether `rest`, the text after a stated option, retracts the option. `rest` does so
    /// if one of its sentences negates the option or consists of another option's label, or if the
    /// rest of the option's own sentence adds another label ("or C"). Negations are ignored if the
    /// task asks for the wrong option.
    fn is_option_retracted(&self, rest: &str, number: usize) -> bool {
        let is_other =
            |label: &str| self.option_with_letter(label).is_some_and(|(other, _)| other != number);
        let names_other = |expression: &Regex, sentence: &str| {
            !DENIES.is_match(sentence)
                && expression.captures_iter(sentence).any(|found| {
                    found.iter().flatten().skip(1).any(|label| is_other(label.as_str()))
                })
        };
        let ends: Vec<_> = SENTENCE_END.find_iter(rest).collect();
        let own = ends.first().map_or(rest, |end| &rest[..end.start()]);
        // "B?", unless "yes" follows.
        let behind = rest.trim_start_matches(|c: char| CLOSING_MARKS.contains(&c));
        let is_question = behind.strip_prefix(['?', '？']).is_some_and(|next| !YES.is_match(next));
        if names_other(&JOINED, own) || LIMITED.is_match(own) || is_question {
            return true;
        }
        // "Answer: C", with the text of another option on the next line.
        let below = rest.split_once('\n').filter(|(line, _)| !line.contains(char::is_alphanumeric));
        let below = below.and_then(|(_, below)| self.find_option_with_text(below.lines().next()?));
        if below.is_some_and(|(other, how)| other != number && how.len() > 1) {
            return true;
        }
        let wants_wrong_option = self.options.wants_wrong_option;
        let starts = std::iter::once(0).chain(ends.iter().map(|end| end.end()));
        let mut question = "";
        let mut later = starts.map(|start| {
            let text = &rest[start..];
            let sentence = &text[..SENTENCE_END.find(text).map_or(text.len(), |end| end.end())];
            (text, sentence, std::mem::replace(&mut question, sentence))
        });
        // "Is C possible? No" is about C.
        let is_about_other = |question: &str| {
            question.trim_end().ends_with('?')
                && LETTER.find(question).is_some_and(|letter| is_other(letter.as_str()))
        };
        let is_denied = later.any(|(text, sentence, before)| {
            (retracts_answer(text) && !is_about_other(before))
                || IGNORES.is_match(sentence)
                || names_other(&ANOTHER, sentence)
                || (!wants_wrong_option && CALLED_WRONG.is_match(text))
        });
        let mut denied = IS_DENIED
            .captures_iter(rest)
            .filter_map(|found| self.options.index_of_letter(&found[1]));
        let closed = rest.trim_start_matches(|c: char| CLOSING_MARKS.contains(&c));
        let is_denied_here = closed.trim_start().starts_with(char::is_alphabetic)
            && closed.starts_with(' ')
            && !closed.trim_start().starts_with("not ")
            && DENIED.is_match(closed);
        is_denied
            || (!wants_wrong_option && (is_denied_here || denied.any(|denied| denied == number)))
    }

    /// Returns the option in the last `\boxed{…}` that names an option, with the end of the box.
    /// The option is `None` if the preceding box names another option and a word such as "or" joins
    /// the two boxes.
    fn find_option_in_box(&self, text: &str) -> Option<(usize, Option<NamedOption>)> {
        let mut boxes = Vec::new();
        let mut end = text.len();
        while let Some((inside, range)) = last_box_with_range(&text[..end]) {
            end = range.start;
            if let Some(found) = self.parse_marked_option(inside, &text[..range.start]) {
                boxes.push((found, range));
                if boxes.len() == 2 {
                    break;
                }
            }
        }
        let mut boxes = boxes.into_iter();
        let (last, range) = boxes.next()?;
        let before = boxes.next();
        let is_one = before.is_none_or(|(other, before)| {
            other.0 == last.0 || !JOINS.is_match(&text[before.end..range.start])
        });
        Some((range.end, is_one.then_some(last)))
    }

    /// Returns the option in the last `<answer>` tag that names an option, with the end of the tag.
    fn find_option_in_tag(&self, text: &str) -> Option<(usize, Option<NamedOption>)> {
        let mut end = text.len();
        while let Some(close) = text[..end].rfind("</answer>") {
            let open = text[..close].rfind("<answer>")?;
            if let Some(found) =
                self.parse_marked_option(&text[open + "<answer>".len()..close], &text[..open])
            {
                return Some((close + "</answer>".len(), Some(found)));
            }
            end = open;
        }
        None
    }

    /// Returns the option that the content of a box or tag names. Returns `None` if the text before
    /// the box or tag negates the option.
    fn parse_marked_option(&self, inside: &str, before: &str) -> Option<NamedOption> {
        let before = last_200_chars(before.trim_end_matches(['$', '(', '*', ' ', '\\', '[']));
        let line = before.rsplit('\n').next().unwrap_or_default();
        if RULED_OUT.is_match(&format!("{line} ")) || SUPPOSED.is_match(last_sentence(before)) {
            return None;
        }
        let inside = inside.trim().trim_start_matches(['{', '$', '*']).trim_end_matches('~');
        if inside.ends_with(['?', '？']) {
            return None;
        }
        let lines = inside.lines().filter(|line| !line.trim().is_empty()).count();
        let short = self.parse_leading_option(inside, LetterCase::Any);
        let short = short.or_else(|| {
            let found = super::find_option_by_number(inside, &self.options.texts)?;
            (found < self.count).then(|| (found, inside.trim().to_owned()))
        });
        // "D) 5", if the task does not list its options.
        let short = short.or_else(|| {
            let is_one = self.options.texts.is_empty() && ITEMS.find_iter(inside).count() == 1;
            let item = ITEM_IN_BOX.captures(inside).filter(|_| is_one)?;
            self.option_with_letter(&item[1])
        });
        // A tag with several lines is read like a complete text.
        short.or_else(|| {
            (lines > 1).then(|| self.find_stated_option(inside)).flatten().map(|(_, found)| found)
        })
    }

    /// Returns the option that the last statement of a text selects, with the statement's position.
    fn find_stated_option(&self, text: &str) -> Option<(usize, NamedOption)> {
        let mut last: Option<(usize, NamedOption)> = None;
        let mut take = |at: usize, found: Option<NamedOption>| {
            if let Some(found) = found
                && last.as_ref().is_none_or(|(offset, _)| at >= *offset)
            {
                last = Some((at, found));
            }
        };
        for found in ANNOUNCED.captures_iter(text) {
            let (Some(all), gap) = (found.get(0), found.get(1).map_or("", |gap| gap.as_str()))
            else {
                continue;
            };
            let is_list =
                all.as_str().contains('\n') && self.starts_with_option_list(&text[all.end()..]);
            let lead = last_sentence(last_200_chars(&text[..all.start()]));
            let is_supposed = CONDITION.is_match(lead)
                || all.as_str().to_lowercase().contains("would") && COUNTERFACTUAL.is_match(lead);
            let is_own = is_own_answer(&text[..all.start()]);
            if is_stated(&text[..all.start()], gap) && is_own && !is_list && !is_supposed {
                take(all.end(), self.parse_leading_option(&text[all.end()..], LetterCase::Any));
            }
        }
        for found in CHOSEN.find_iter(text).filter(|found| is_stated(&text[..found.start()], "")) {
            take(found.end(), self.parse_capital_option(&text[found.end()..]));
        }
        for found in ANNOUNCED_ELSEWHERE.captures_iter(text) {
            let option = found.get(1).or_else(|| found.get(2));
            let (Some(all), Some(option)) = (found.get(0), option) else { continue };
            if is_stated(&text[..all.start()], "") {
                take(option.start(), self.parse_capital_option(&text[option.start()..]));
            }
        }
        for found in IS_CORRECT.captures_iter(text).chain(IS_CORRECT_ELSEWHERE.captures_iter(text))
        {
            let Some(letter) = found.get(1) else { continue };
            let before =
                text[..letter.start()].trim_end_matches(['(', '[', '"', '\'', '*', '_', '`', ' ']);
            let before = last_200_chars(before);
            let is_true_statement =
                self.options.wants_false_statement && !NAMES_ANSWER.is_match(&found[0]);
            let is_one = !is_true_statement
                && !AFTER_ANOTHER.is_match(before)
                && BEFORE_OPTION.is_match(before)
                && is_stated(before, "");
            take(letter.start(), self.option_with_letter(letter.as_str()).filter(|_| is_one));
        }
        let mut line_options = Vec::new();
        let mut at = 0;
        for line in text.split_inclusive('\n') {
            if !line.trim().is_empty() {
                let letter = SINGLE_LETTER.captures(line.trim()).and_then(|found| found.get(1));
                line_options
                    .push((at, letter.and_then(|letter| self.option_with_letter(letter.as_str()))));
            }
            at += line.len();
        }
        // Headings and lists of options do not state an option.
        let mut distinct: Vec<usize> =
            line_options.iter().filter_map(|(_, found)| Some(found.as_ref()?.0)).collect();
        distinct.sort_unstable();
        distinct.dedup();
        let is_answer = match &line_options[..] {
            [.., (_, None), (_, Some(_))] => true,
            // "Answer:", B and C on separate lines.
            [.., (_, Some(_)), (_, Some(_))] => distinct.len() == 1,
            _ => distinct.len() == 1,
        };
        if let Some((at, found)) = line_options.into_iter().rev().find(|(_, found)| found.is_some())
            && is_answer
        {
            take(at, found);
        }
        last
    }

    /// Returns whether a text starts with a list of options, one per line.
    fn starts_with_option_list(&self, text: &str) -> bool {
        let mut lines = text.lines().filter(|line| !line.trim().is_empty());
        lines.next().is_some_and(|line| ITEM.is_match(line))
            && lines.next().is_some_and(|line| ITEM.is_match(line))
    }

    /// Returns the option that the last line starts with, or else the first line, with its
    /// position. Returns `None` if lines start with different options.
    fn find_option_on_outer_line(&self, text: &str) -> Option<(usize, NamedOption)> {
        let offset_of = |line: &str| line.as_ptr() as usize - text.as_ptr() as usize;
        let mut lines = text.lines().filter(|line| !line.trim().is_empty());
        let option_at_start = |line: &str| {
            let found =
                ITEM.captures(line.trim()).or_else(|| SINGLE_LETTER.captures(line.trim()))?;
            Some(self.option_with_letter(found.get(1)?.as_str())?.0)
        };
        let mut leading: Vec<usize> = lines.clone().filter_map(option_at_start).collect();
        leading.sort_unstable();
        leading.dedup();
        if leading.len() > 1 {
            return None;
        }
        let first = lines.next()?;
        let last = lines.next_back();
        let last = last.unwrap_or(first);
        // A line with several options does not state one.
        let is_one =
            |line: &&str| ITEMS.captures_iter(line).filter_map(|item| item.get(1)).count() < 2;
        // "B: wrong", "B. No", "2. Then we add".
        let holds = |line: &str, (number, how): &NamedOption| {
            let written = line.find(how.as_str()).or_else(|| line.find(&how.to_lowercase()));
            let Some(at) = written.filter(|_| how.chars().count() == 1) else { return true };
            let rest = line[at + how.len()..]
                .trim_start_matches([')', '.', ':', '?', '*', '_', ' ', '-', '–']);
            let option = self.options.texts.get(*number).filter(|option| !option.is_empty());
            let behind = option.and_then(|option| {
                rest.to_lowercase().strip_prefix(&option.to_lowercase()).map(str::to_owned)
            });
            let is_label = !how.starts_with(|c: char| c.is_ascii_digit())
                || rest.is_empty()
                || behind.is_some();
            // "(b) 3" names a part of the question, if the text of B is not 3.
            let is_number =
                !rest.is_empty() && rest.trim_end_matches('.').chars().all(|c| c.is_ascii_digit());
            let is_of_part = is_number && option.is_some() && behind.is_none();
            is_label
                && !is_of_part
                && !DENIED.is_match(behind.as_deref().unwrap_or(rest))
                && !retracts_answer(rest)
        };
        let short = Some(last).filter(is_one).and_then(|line| {
            self.parse_leading_option(line, LetterCase::Any).filter(|found| holds(line, found))
        });
        let capital = || {
            Some(first)
                .filter(is_one)
                .and_then(|line| self.parse_capital_option(line).filter(|found| holds(line, found)))
        };
        let short = short.map(|found| (offset_of(last), found));
        short.or_else(|| capital().map(|found| (offset_of(first), found)))
    }

    /// Returns the option in brackets at the end of the last sentence. Returns `None` if the
    /// sentence does not state the option or has other brackets.
    fn find_option_in_brackets(&self, text: &str) -> Option<NamedOption> {
        let text = text.trim_end();
        let start = SENTENCE_END.find_iter(text).filter(|end| end.end() < text.len()).last();
        let sentence = &text[start.map_or(0, |end| end.end())..];
        let mut found = BRACKETED.captures_iter(sentence);
        let (only, None) = (found.next()?, found.next()) else { return None };
        let all = only.get(0)?;
        let letter = only.get(1)?;
        let before = &sentence[..all.start()];
        let after = &sentence[all.end()..];
        let is_last =
            !after.contains(char::is_alphanumeric) && before.ends_with(char::is_whitespace);
        let is_denied = RULED_OUT.is_match(before)
            || UNDONE.is_match(last_clause(before))
            || NUMBERED.is_match(before);
        let before = before.trim_end().to_lowercase();
        let own = self.options.index_of_letter(letter.as_str());
        let mut texts =
            self.options.texts.iter().enumerate().filter(|(number, _)| Some(*number) != own);
        let is_of_another = texts.any(|(_, text)| {
            !text.is_empty() && before.ends_with(&format!(" {}", text.to_lowercase()))
        });
        self.option_with_letter(letter.as_str()).filter(|_| {
            is_last && !is_of_another && !is_denied && STATES.is_match(last_clause(&before))
        })
    }

    /// Returns the option that a letter names, or `None` if no option has this letter.
    fn option_with_letter(&self, letter: &str) -> Option<NamedOption> {
        let number = self.options.index_of_letter(letter).filter(|number| *number < self.count)?;
        Some((number, letter.to_ascii_uppercase()))
    }

    /// Returns the option at the start of a text: either its letter or label, with any marks around
    /// it, or its text, if that is a complete sentence.
    fn parse_leading_option(&self, text: &str, case: LetterCase) -> Option<NamedOption> {
        let max_length = self.options.texts.iter().map(String::len).max().unwrap_or(0);
        let mut line = text.lines().next()?;
        let (mut open, mut is_marked);
        loop {
            // A text longer than any option with marks around it does not name an option.
            line = line
                .char_indices()
                .nth(1000 + 4 * max_length)
                .map_or(line, |(end, _)| &line[..end]);
            is_marked = line.trim_start().starts_with(OPENING_MARKS);
            open = line.trim_start().trim_start_matches(OPENING_MARKS);
            match LEAD.find(open).or_else(|| INSTEAD.find(open)) {
                Some(lead) => line = &open[lead.end()..],
                None => break,
            }
        }
        let by_text = || self.find_option_with_text(line);
        let word = open.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
        // "E. coli" is not option E.
        if let Some(found) =
            by_text().filter(|(_, how)| how.chars().filter(|c| !c.is_whitespace()).count() > 1)
        {
            // "A. carbon dioxide", if carbon dioxide is the text of B.
            let label = |text: &str| {
                LETTERED.captures(text).and_then(|label| self.options.index_of_letter(&label[1]))
            };
            let own = self.options.texts.get(found.0).and_then(|text| label(text));
            return Some(found).filter(|(number, how)| {
                own.is_some() || label(how).is_none_or(|labeled| labeled == *number)
            });
        }
        if let Some(found) =
            self.options.index_of_non_letter_label(word).filter(|found| *found < self.count)
        {
            let rest = &open[word.len()..];
            let is_other = rest.starts_with(['.', ',', '-', '/'])
                && rest[1..].starts_with(|c: char| c.is_alphanumeric());
            let found = (found, word.to_owned());
            let is_one = !is_other
                && !self.starts_with_alternative(rest, true)
                && self.is_complete_name(&found, rest, '1', is_marked);
            return is_one.then_some(found);
        }
        let first = open.chars().next()?;
        let rest = &open[first.len_utf8()..];
        let is_letter =
            first.is_ascii_uppercase() || (case == LetterCase::Any && first.is_ascii_lowercase());
        let found = self.option_with_letter(&first.to_string()).filter(|_| is_letter);
        let Some(found) = found else { return by_text() };
        if self.starts_with_alternative(rest, false) || self.belongs_to_other_option(found.0, rest)
        {
            return None;
        }
        if self.is_complete_name(&found, rest, first, is_marked) { Some(found) } else { by_text() }
    }

    /// Returns the option whose capital letter is at the start of a text.
    fn parse_capital_option(&self, text: &str) -> Option<NamedOption> {
        self.parse_leading_option(text, LetterCase::Capital).filter(|(_, how)| how.len() == 1)
    }

    /// Returns whether another option follows as a part of the same answer: "B or C".
    fn starts_with_alternative(&self, rest: &str, is_number: bool) -> bool {
        let other = ALTERNATIVE.captures(rest).and_then(|found| found.get(1));
        let is_digit = |text: &str| text.starts_with(|c: char| c.is_ascii_digit());
        other.is_some_and(|other| other.as_str() != "I" && is_digit(other.as_str()) == is_number)
    }

    /// Returns whether the text after a label belongs to another option ("B. sand") or continues a
    /// name ("B. subtilis").
    fn belongs_to_other_option(&self, number: usize, rest: &str) -> bool {
        let line = rest.lines().next().unwrap_or_default();
        let behind = line
            .trim_start_matches(|c: char| CLOSING_MARKS.contains(&c) || "\\.,:-–—( ".contains(c));
        let text = behind
            .strip_prefix("i.e. ")
            .unwrap_or(behind)
            .trim_end_matches(|c| CLOSING_MARKS.contains(&c));
        if behind.len() == line.len() || self.options.texts.is_empty() {
            return false;
        }
        let own = self.options.texts.get(number).is_some_and(|own| {
            let own = own.to_lowercase();
            text.to_lowercase().starts_with(&own) && !own.is_empty()
        });
        let is_word =
            text.chars().count() > 1 && text.trim_end_matches('.').chars().all(char::is_alphabetic);
        // Chinese and Japanese have no capital letters; text that follows a label there is an
        // explanation.
        let is_name = line.starts_with(". ") && is_word && text.chars().all(|c| c < '\u{2e80}');
        !own && (is_name
            || self.find_option_with_text(text).is_some_and(|(other, _)| other != number))
    }

    /// Returns whether a letter is a complete name of an option, judging by the text after the
    /// letter.
    fn is_complete_name(
        &self,
        found: &NamedOption,
        rest: &str,
        letter: char,
        is_marked: bool,
    ) -> bool {
        let closed =
            rest.trim_start_matches(|c| CLOSING_MARKS.contains(&c) || (is_marked && c == '\''));
        let is_closed = closed.len() < rest.len();
        let Some(next) = closed.chars().next() else { return true };
        let behind = closed.trim_start();
        // "B cheesecake", "B.cheesecake".
        let text = behind.trim_start_matches(['.', ':', '-', ')', '–', '—', ' ']);
        if self.options.texts.get(found.0).is_some_and(|option| {
            !option.is_empty() && text.to_lowercase().starts_with(&option.to_lowercase())
        }) {
            return true;
        }
        let follows = closed[next.len_utf8()..].chars().next();
        match next {
            ',' if letter.is_ascii_lowercase() => false,
            ',' | ':' if letter == 'I' && !text.is_empty() => false,
            '.' | ':' | ',' => {
                !follows.is_some_and(|c| c.is_alphanumeric() && (next != ',' || c.is_ascii()))
            }
            '!' | '?' | ';' => !follows.is_some_and(char::is_alphanumeric),
            '\\' => !follows.is_some_and(char::is_alphabetic),
            '。' | '、' | '।' | '؟' | '،' | '؛' | '<' | '—' | '…' => true,
            '\'' => false,
            ' ' | '\t' if behind.trim_start_matches(CLOSING_MARKS).is_empty() => true,
            ' ' | '\t' => {
                if DENIED.is_match(behind) {
                    return false;
                }
                let is_capital = letter.is_ascii_uppercase();
                let continues = BEHIND.iter().any(|word| behind.to_lowercase().starts_with(word));
                // "A is correct" is not an answer if the question asks for the false statement.
                let continues =
                    continues && !(self.options.wants_false_statement && IS_RIGHT.is_match(behind));
                let is_word = letter == 'A' || letter == 'I';
                (is_marked && is_closed)
                    || (is_capital && continues)
                    || (is_capital && !is_word && BEHIND_CAPITAL.is_match(behind))
                    || ENDS_ELSEWHERE.is_match(behind)
            }
            _ => ENDS_ELSEWHERE.is_match(closed),
        }
    }

    /// Returns the only option whose text equals a line or the line's first sentence.
    fn find_option_with_text(&self, line: &str) -> Option<NamedOption> {
        let line = line.trim().trim_matches(['*', '"', '`', '$', ':', '_', ' ']);
        let sentence = SENTENCE.find(line).map_or(line, |end| &line[..end.start()]);
        // "ice, not sand".
        let against = AGAINST.find(line).filter(|at| {
            super::find_option_by_text(&line[at.end()..], &self.options.texts).is_some()
        });
        let chosen = against.map_or(line, |at| &line[..at.start()]);
        let named = [line, sentence, chosen].into_iter().find_map(|text| {
            let found = super::find_option_by_text(text, &self.options.texts)?;
            (found < self.count).then(|| (found, text.trim().to_owned()))
        });
        // "Paris (C)".
        named.or_else(|| {
            let label = LABEL_BEHIND.captures(line)?;
            let found =
                super::find_option_by_text(&line[..label.get(0)?.start()], &self.options.texts)?;
            self.option_with_letter(&label[1]).filter(|(number, _)| *number == found)
        })
    }
}

/// Returns whether the word "answer" announces the speaker's own answer, judging by the words
/// before it. It does not after an unknown adjective ("the popular answer") or a report of another
/// person's statement ("the user says", "one would think").
fn is_own_answer(before: &str) -> bool {
    let line = last_200_chars(before).rsplit('\n').next().unwrap_or_default();
    if !OWN.is_match(line) {
        return false;
    }
    let subject = REPORTED.captures(line).and_then(|found| found.get(1).or_else(|| found.get(2)));
    let is_own = |subject: &str| OWN_SUBJECTS.contains(&&*subject.to_lowercase());
    subject.is_none_or(|subject| is_own(subject.as_str()))
}

/// Returns whether a statement holds, judging by the words before it and the words inside it
/// (`gap`).
fn is_stated(before: &str, gap: &str) -> bool {
    let before = last_200_chars(before);
    let clause = SURE.replace_all(last_clause(before), "");
    // "Angenommen, die Antwort ist" is hypothetical.
    let is_supposed = before.rsplit_once(',').is_some_and(|(lead, rest)| {
        rest.split_whitespace().count() < 2 && doubts::ends_with_supposition(lead)
    });
    !UNDONE.is_match(&clause)
        && !OTHER.is_match(&clause)
        && !UNDONE.is_match(gap)
        && !is_supposed
        && bounds::unspaced_bound_before_number(before.trim_end()).is_none()
}
