//! Whether a sentence states the number in it, or bounds, denies, supposes or doubts it.
//!
//! The words before a number govern it if nothing but words that say nothing of their own stand between: "it
//! can't be 5", "at least about 5". A doubt or a supposition governs its clause: "maybe she has 5". What
//! follows a number takes it back ("5 is wrong", "5. No, that is wrong"), and whoever says that a problem was
//! not worked out has no answer ("I cannot compute it. Maybe 5.").

use crate::bounds::{bound, joined_before};
use crate::retraction::retracts;

/// Words between a bound and its number that say nothing.
const FILLERS: &str = "a an the about around roughly approximately exactly only just simply some of to be equal \
    equals equal-to even quite precisely actually really das der die den dem le la les el los il lo o os een het etwa \
    genau environ exactement exactamente circa около ровно";

/// Words between a denial and its number that say nothing: not true that the answer is 5.
const CARRIERS: &str = "is are was were been being that it this he she they we you i answer result value solution \
    total sum number correct right true case possibly really necessarily say write conclude claim think believe \
    possible way es ist sind est es son é são è sono jest это será";

/// Words that begin another statement within a clause.
const RESETS: &str = "so then therefore hence thus but because since sondern sino mais mas ma а но while whereas \
    which leaving giving making";

/// Verbs before "up to" that do not bound.
const SUMS: &str = "add adds added adding sum sums summing";

/// Words before a "but" that excepts a number: all but 5.
const EXCEPTED: &str = "all anything everything any none nothing everyone every";

/// Signs and words behind which a clause begins.
const STOPS: [char; 9] = ['.', ';', '!', '?', ',', ':', '=', '\n', '('];

/// Phrases that say that a problem was not worked out.
const GIVING_UP: &str = "cannot be determined|can't be determined|cannot be computed|can't be computed|\
    no idea|impossible to say|impossible to tell|impossible to know|impossible to determine|impossible to compute|\
    hard to say|hard to tell|hard to compute|hard to know|is not known|is unknown|not enough information|\
    insufficient information|just a guess|wild guess|random guess|can only guess|could only guess|\
    have to guess|will guess|i'll guess|weiß nicht|weiß es nicht|\
    keine ahnung|nicht berechnen|nicht bestimmen|ich rate|ne sais pas|aucune idée|no sé|\
    no lo sé|ni idea|não sei|non lo so|не знаю|понятия не имею|\
    nie wiem|bilmiyorum|hesaplayamıyorum|weet het niet|नहीं पता|पता नहीं|لا أعرف|لا أدري|不知道|\
    无法计算|无法确定|无法求|无法得出|无法回答|无法解|不确定|我猜|猜测|わからない|分からない|わかりません|分かりません|모르|알 수 없";

/// Phrases that say so of whoever replies: I cannot find, but not "she cannot find".
const OWN_GIVING_UP: &str = "cannot compute|can't compute|could not compute|couldn't compute|cannot solve|can't solve|\
    cannot determine|can't determine|cannot calculate|can't calculate|cannot find|can't find|cannot answer|\
    can't answer|could not determine|couldn't determine|could not find|couldn't find|could not solve|\
    couldn't solve|cannot work|can't work|cannot figure|can't figure|unable to|don't know|do not know|\
    not sure|unsure|not certain|give up";

/// Words before such a phrase.
const OWN: &str = "i we i'm we're and but so";

/// Words between these and such a phrase.
const OWN_VERBS: &str = "am was were are honestly simply just really";

/// Words that say that a statement does not hold.
const WRONG: &str = "wrong incorrect false untrue mistaken mistake error impossible excluded eliminated rejected invalid out guess falsch inkorrekt faux fausse \
    incorrecte incorrecto incorrecta falso falsa errado errada sbagliato sbagliata fout onjuist неверно неправильно \
    błędne yanlış değil गलत नहीं خطأ";

/// Verbs between a number and the word that denies it.
const COPULAS: &str = "is was be seems looks that's it's ist wäre est n'est es é è está jest это";

/// Verbs with a denial.
const SHORT_DENIALS: &str =
    "isn't wasn't can't cannot couldn't doesn't won't wouldn't shouldn't isnt cant doesnt wont";

/// Words between a denial and what it denies.
const LIGHT: &str = "the a la le die be even really es quite est ist è é está";

/// Words that a denial turns against the number before it: is not right.
const HOLDS: &str = "right correct true possible valid answer exactly antwort réponse respuesta risposta resposta richtig möglich correcte juste exacte correcto correcta \
    posible certo certa correto correta corretto giusto juist верно правильно doğru सही";

/// Verbs that a denial right behind a number turns against it: doesn't work.
const ACTS: &str = "work fit match hold make satisfy count";

/// Verbs before a "not" of two words: does not work.
const AUXILIARIES: &str = "does would can could will did";

/// First words of a question.
const ASKS: &str =
    "is are was were could can does do did would should might may will isn't couldn't what who how why";

/// Words that answer a question with no.
const NO: &str = "no nope not nein non não нет nee wrong";

/// Words that say that a number is beyond what it can be: 5 is too low.
const TOO: [&str; 5] = ["too", "zu", "trop", "demasiado", "слишком"];

/// Maximum number of characters before or behind a number that are looked at.
const REACH: usize = 300;

fn has(list: &str, word: &str) -> bool {
    list.split_whitespace().any(|own| own == word)
}

/// Splits a text into lower-case words. Apostrophes belong to their word.
fn words(text: &str) -> Vec<String> {
    let word = |word: &str| word.trim_matches(['\'', '-']).replace('’', "'").to_lowercase();
    let parts = text.split(|c: char| !(c.is_alphanumeric() || "'’-\u{93c}\u{64b}".contains(c) || is_mark(c)));
    parts.map(word).filter(|word| !word.is_empty()).collect()
}

/// Whether a character is a vowel sign of Hindi or a mark of Arabic or Thai, which belong to their word.
fn is_mark(c: char) -> bool {
    matches!(c, '\u{900}'..='\u{903}' | '\u{93a}'..='\u{94f}' | '\u{64b}'..='\u{65f}' | '\u{e31}'..='\u{e4e}')
}

fn last_chars(text: &str, count: usize) -> &str {
    let start = text.char_indices().rev().nth(count.saturating_sub(1)).map_or(0, |(at, _)| at);
    &text[start..]
}

fn first_chars(text: &str, count: usize) -> &str {
    &text[..text.char_indices().nth(count).map_or(text.len(), |(at, _)| at)]
}

/// Returns what the words before a number make of it: the sign of a bound, "≠", "maybe" or "supposed".
pub(crate) fn governing(before: &str) -> Option<&'static str> {
    let before = last_chars(before, REACH);
    let clause = before.rsplit(STOPS).next().unwrap_or_default();
    let earlier = &before[..before.len() - clause.len()];
    // "max. 5" and "Wrong: 5": a stop behind the word that governs.
    let clause = match clause.trim().trim_matches(['*', '_', '$', '"', '`']).is_empty() {
        true => {
            let rest = before.trim_end().trim_end_matches(|c: char| "*_$\"` ".contains(c));
            let stop = rest.chars().next_back()?;
            let rest = &rest[..rest.len() - stop.len_utf8()];
            let label = rest.rsplit(STOPS).next().unwrap_or_default();
            let list = words(label);
            let is_label = match stop {
                '.' => list.last().is_some_and(|word| ["max", "min"].contains(&word.as_str())),
                ':' if list.last().is_some_and(|w| has(WRONG, w) || w == "not") => return Some("≠"),
                _ => false,
            };
            if !is_label {
                return None;
            }
            label
        }
        false if earlier.ends_with(',') && is_supposed(earlier) => return Some("supposed"),
        false => clause,
    };
    if let Some(sign) = joined_before(clause.trim_end_matches([' ', '*', '"', '\'', '「', '$'])) {
        return Some(sign);
    }
    let all = words(clause);
    // "mais de" is more than in Portuguese, "mais" but in French.
    let is_compared =
        |at: usize| all.get(at + 1).is_some_and(|next| ["de", "do", "que"].contains(&next.as_str()));
    let is_reset = |at: &usize| {
        (has(RESETS, &all[*at]) && !(all[*at] == "mais" && is_compared(*at)))
            || all[*at].starts_with(|c: char| c.is_ascii_digit())
    };
    let start = (0..all.len()).rev().find(is_reset).map_or(0, |at| at + 1);
    let words: Vec<&str> = all[start..].iter().map(String::as_str).collect();
    // "all but 5", "anything but 5"
    let is_exception = start > 1 && all[start - 1] == "but" && has(EXCEPTED, &all[start - 2]);
    if is_exception && words.iter().all(|word| has(FILLERS, word)) {
        return Some("≠");
    }
    for at in 0..words.len() {
        let Some((sign, length)) = bound(&words[at..], true) else { continue };
        let between = &words[at + length..];
        let is_near = match sign {
            "maybe" | "supposed" => true,
            "≠" => {
                let carries = |word: &&str| has(CARRIERS, word) || has(FILLERS, word);
                between.iter().all(carries)
            }
            _ => between.iter().all(|word| has(FILLERS, word)),
        };
        // "It adds up to 5" states 5.
        let is_sum = sign == "≤" && at.checked_sub(1).is_some_and(|at| has(SUMS, words[at]));
        if is_near && !is_sum {
            return Some(sign);
        }
    }
    None
}

/// Returns whether a text ends in a clause that is nothing but a supposition or a doubt: "Angenommen, ".
pub(crate) fn is_supposed(before: &str) -> bool {
    let before = last_chars(before, REACH).trim_end().trim_end_matches([',', ':']);
    let clause = words(before.rsplit(STOPS).next().unwrap_or_default());
    let clause: Vec<&str> = clause.iter().map(String::as_str).collect();
    clause.first() == Some(&"were")
        || bound(&clause, false)
            .is_some_and(|(sign, length)| ["supposed", "maybe"].contains(&sign) && length == clause.len())
}

/// Returns whether what stands before a number says that the problem was not worked out: in its sentence, or
/// in the one before if its own says nothing else.
pub(crate) fn gives_up(before: &str) -> bool {
    let before = last_chars(before, REACH).to_lowercase().replace('’', "'");
    let is_stop = |c: char| matches!(c, '.' | '!' | '?' | '\n');
    let (rest, own) = before.rsplit_once(is_stop).unwrap_or(("", before.as_str()));
    let has_phrase = |text: &str| {
        let is_own = |before: &str| {
            let words = words(before);
            let mut subject = words.iter().rev().skip_while(|word| has(OWN_VERBS, word));
            subject.next().is_none_or(|word| has(OWN, word))
        };
        let phrases = GIVING_UP.split('|').map(|phrase| (phrase, false));
        phrases.chain(OWN_GIVING_UP.split('|').map(|phrase| (phrase, true))).any(|(phrase, own)| {
            text.rfind(phrase).is_some_and(|at| {
                let behind = &text[at + phrase.len()..];
                (!own || is_own(&text[..at])) && !behind.contains(|c: char| c.is_ascii_digit() || c == '=')
            })
        })
    };
    if has_phrase(own) {
        return true;
    }
    let is_bare = !own.contains(|c: char| c.is_ascii_digit() || c == '=') && words(own).len() < 3;
    let previous = rest.trim_end_matches(|c: char| is_stop(c) || c == ' ').rsplit(is_stop).next();
    is_bare && previous.is_some_and(has_phrase)
}

/// Returns whether a sentence that starts so is a question: Is it, could she.
pub(crate) fn asks(before: &str) -> bool {
    let is_stop = |c: char| matches!(c, '.' | '!' | '?' | '\n' | ':');
    let own = last_chars(before, REACH).rsplit(is_stop).next().unwrap_or_default();
    words(own).first().is_some_and(|word| has(ASKS, word))
}

/// Returns whether what stands behind a number denies or takes back what it says; or asks, if the words
/// before it do.
pub(crate) fn is_taken_back(after: &str, asks: bool) -> bool {
    let after = first_chars(after, REACH);
    let end = sentence_end(after);
    let (own, next) = after.split_at(end);
    if let Some(reply) = next.strip_prefix('?') {
        let is_no = words(first_chars(reply, 30)).first().is_some_and(|word| has(NO, word));
        if is_no || (asks && !own.contains(|c: char| c.is_ascii_digit())) {
            return true;
        }
    }
    let cut = own.find(|c: char| c.is_ascii_digit());
    let is_cut = cut.is_some();
    let own = &own[..cut.unwrap_or(own.len())];
    if own.trim_start().starts_with("~~") {
        return true;
    }
    let clauses: Vec<&str> = own.split([',', ';', '(', '—', '-', ':']).collect();
    let is_wrong = |(at, clause): (usize, &&str)| {
        let list = words(clause);
        let reason = |word: &&str| !["because", "since", "as", "so"].contains(word);
        let list: Vec<&str> = list.iter().map(String::as_str).take_while(reason).collect();
        // 5 (wrong), but not 5, not 6
        let is_complete = !is_cut || at + 1 < clauses.len();
        // "12 wrong" may be a number of wrong answers, "12 неверно" is none.
        let is_beside = list.len() == 1
            && is_complete
            && (has(WRONG, list[0]) || list[0] == "not")
            && (at > 0 || !list[0].is_ascii());
        is_beside || (0..list.len()).any(|at| is_denial(&list, at))
    };
    let is_own_wrong = clauses.iter().enumerate().take(3).any(is_wrong);
    let no_wait = words(own).windows(2).any(|pair| pair[0] == "no" && pair[1] == "wait");
    is_own_wrong || no_wait || retracts(next.trim_start_matches(['.', '!', ')', '*', ' ', '$', '"', '\n']))
}

/// Returns whether the words at an index deny the number before them: is wrong, isn't right, doesn't work.
/// The verb is in the singular: 12 answers are wrong.
fn is_denial(words: &[&str], at: usize) -> bool {
    let word = words[at];
    let before = |by: usize| at.checked_sub(by).map(|at| words[at]);
    let is_verb = |word: &str| has(COPULAS, word) || has(SHORT_DENIALS, word);
    let next = |by: usize| words.get(at + by).copied().unwrap_or_default();
    let is_near = at < 3 || (words.first().is_some_and(|word| is_verb(word)) && at < 10);
    if !is_near {
        return false;
    }
    let follows_verb = before(1).is_some_and(is_verb)
        || (before(1).is_some_and(|word| ["a", "an", "the"].contains(&word))
            && before(2).is_some_and(is_verb));
    let is_short = has(SHORT_DENIALS, word);
    let denies = is_short
        || (["not", "nicht", "pas", "niet", "не"].contains(&word)
            && (at == 0 || follows_verb || before(1) == Some("but")))
        || (["no", "não", "non", "не"].contains(&word) && at == 0);
    let light = |word: &str| has(LIGHT, word);
    let skipped = (1..4).take_while(|by| light(next(*by))).count();
    let held = next(1 + skipped);
    let holds = has(HOLDS, held) && held != "answer" || (held == "answer" && skipped > 0);
    let is_long = word == "not" && at == 1 && before(1).is_some_and(|word| has(AUXILIARIES, word));
    let is_act = (is_short && at == 0 || is_long) && has(ACTS, next(1));
    (has(WRONG, word) && word != "out" && !["to", "that", "for"].contains(&next(1)) && follows_verb)
        || (denies && (holds || (next(1) == "be" && words.len() == at + 2)))
        || is_act
        || (is_short && words.len() == 1)
        || (word == "out" && before(1) == Some("ruled"))
        || (word == "fails" && at == 0)
        || (TOO.contains(&word) && before(1).is_some_and(is_verb))
}

/// Returns the index of the stop that ends the sentence that a text starts in.
fn sentence_end(text: &str) -> usize {
    let bytes = text.as_bytes();
    let ends = |at: &usize| match bytes[*at] {
        b'\n' | b'?' => true,
        b'.' | b'!' => bytes.get(at + 1).is_none_or(|next| b" \n*\"')$".contains(next)),
        _ => false,
    };
    (0..text.len()).find(ends).unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_before_a_number_govern_it() {
        for (before, want) in [
            ("It takes at least about ", Some("≥")),
            ("The answer can't be ", Some("≠")),
            ("It is not true that the answer is ", Some("≠")),
            ("The number of those who do not swim is ", None),
            ("He did not eat 3, so she has ", None),
            ("not 13 but ", None),
            ("Maybe she still has ", Some("maybe")),
            ("Angenommen es sind ", Some("supposed")),
            ("If x = 3 then y is ", None),
            ("max. ", Some("≤")),
            ("The maximum is ", None),
            ("It adds up to ", None),
            ("anything but ", Some("≠")),
            ("The most it could be is ", None),
            ("It could be ", Some("might")),
            ("答案至少", Some("≥")),
            ("Sie hat höchstens ", Some("≤")),
            ("The total is ", None),
        ] {
            assert_eq!(governing(before), want, "{before}");
        }
    }

    #[test]
    fn answers_that_were_not_worked_out_give_up() {
        for (before, want) in [
            ("I cannot compute it. Maybe ", true),
            ("I don't know, so I say ", true),
            ("We don't know x yet. Adding both sides gives us ", false),
            ("I don't know x, but 2x = 24 gives x = ", false),
            ("不知道，", true),
            ("The unknown number is ", false),
            ("He was unable to sell ", false),
            ("I was unable to solve it. ", true),
        ] {
            assert_eq!(gives_up(before), want, "{before}");
        }
    }

    #[test]
    fn words_behind_a_number_take_it_back() {
        for (after, want) in [
            (" is wrong", true),
            ("?", false),
            (". No, that is wrong.", true),
            (" (wrong)", true),
            (" doesn't work", true),
            (" isn't", true),
            (" can't be beaten", false),
            (" is too low", true),
            (" apples, which is not right", true),
            (" (not 13)", false),
            (" workers don't work", false),
            (" answers are wrong", false),
            (" wrong, 8 right", false),
            ("? No.", true),
            (" apples.", false),
            (" is the answer", false),
            (", not 13", false),
            (" because 3 is wrong", false),
            (" dollars. The rest is not spent.", false),
        ] {
            assert_eq!(is_taken_back(after, false), want, "{after}");
        }
    }
}
