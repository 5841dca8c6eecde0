//! Detects whether a sentence states a number, or bounds, denies, supposes or doubts the number.
//!
//! Words before a number govern the number if only filler words are in between: "it can't be 5",
//! "at least about 5". A doubt or a supposition governs its complete clause: "maybe she has 5".
//! Words after a number can retract the number ("5 is wrong", "5. No, that is wrong"). A text that
//! states that the problem was not solved gives no answer ("I cannot compute it. Maybe 5.").

use crate::bounds::{parse_bound, unspaced_bound_before_number};
use crate::retraction::{self, starts_with_retraction};

/// Filler words that can stand between a bound and its number, separated by spaces.
const FILLERS: &str = "a an the about around roughly approximately exactly only just simply some \
                       of to be equal equals equal-to even quite precisely actually really das \
                       der die den dem le la les el los il lo o os een het etwa genau environ \
                       exactement exactamente circa около ровно";

/// Filler words that can stand between a denial and its number, in addition to [`FILLERS`]: not
/// true that the answer is 5.
const CARRIERS: &str = "is are was were been being that it this he she they we you i answer \
                        result value solution total sum number correct right true case possibly \
                        really necessarily say write conclude claim think believe possible way es \
                        ist sind est es son é são è sono jest это será";

/// Words that start another statement within a clause.
const RESETS: &str = "so then therefore hence thus but because since sondern sino mais mas ma а \
                      но while whereas which leaving giving making";

/// Verbs before "up to" with which the phrase is not a bound: `adds up to 5`.
const SUMS: &str = "add adds added adding sum sums summing";

/// Words before a "but" that excludes the number after it: all but 5.
const EXCEPTED: &str = "all anything everything any none nothing everyone every";

/// Characters after which a clause starts.
const STOPS: [char; 9] = ['.', ';', '!', '?', ',', ':', '=', '\n', '('];

/// Phrases, separated by `|`, that state that a problem was not solved.
const GIVING_UP: &str = "cannot be determined|can't be determined|cannot be computed|can't be \
                         computed|no idea|impossible to say|impossible to tell|impossible to \
                         know|impossible to determine|impossible to compute|hard to say|hard to \
                         tell|hard to compute|hard to know|is not known|is unknown|not enough \
                         information|insufficient information|just a guess|wild guess|random \
                         guess|can only guess|could only guess|have to guess|will guess|i'll \
                         guess|weiß nicht|weiß es nicht|keine ahnung|nicht berechnen|nicht \
                         bestimmen|ich rate|ne sais pas|aucune idée|no sé|no lo sé|ni idea|não \
                         sei|non lo so|не знаю|понятия не имею|nie \
                         wiem|bilmiyorum|hesaplayamıyorum|weet het niet|नहीं पता|पता नहीं|لا \
                         أعرف|لا أدري|不知道|无法计算|无法确定|无法求|无法得出|无法回答|无法解|不确定|我猜|猜测|わからない|分からない|わかりません|分かりません|모르|알 수 없";

/// Phrases that state that a problem was not solved only if their subject is the model: I cannot
/// find, but not "she cannot find".
const OWN_GIVING_UP: &str = "cannot compute|can't compute|could not compute|couldn't \
                             compute|cannot solve|can't solve|cannot determine|can't \
                             determine|cannot calculate|can't calculate|cannot find|can't \
                             find|cannot answer|can't answer|could not determine|couldn't \
                             determine|could not find|couldn't find|could not solve|couldn't \
                             solve|cannot work|can't work|cannot figure|can't figure|unable \
                             to|don't know|do not know|not sure|unsure|not certain|give up";

/// Words before a phrase of `OWN_GIVING_UP` that show that the phrase's subject is the model.
const OWN: &str = "i we i'm we're and but so";

/// Words that can stand between a word of `OWN` and a phrase of `OWN_GIVING_UP`.
const OWN_VERBS: &str = "am was were are honestly simply just really";

/// Words that call a statement wrong.
const WRONG: &str = "wrong incorrect false untrue mistaken mistake error impossible excluded \
                     eliminated rejected invalid out guess falsch inkorrekt faux fausse \
    incorrecte incorrecto incorrecta falso falsa errado errada sbagliato sbagliata fout onjuist \
    неверно неправильно błędne yanlış değil गलत नहीं خطأ";

/// Verbs between a number and the word that denies the number.
const COPULAS: &str = "is was be seems looks that's it's ist wäre est n'est es é è está jest это";

/// Negated verbs, such as "isn't", that deny a number.
const SHORT_DENIALS: &str =
    "isn't wasn't can't cannot couldn't doesn't won't wouldn't shouldn't isnt cant doesnt wont";

/// Words that can stand between a denial and the denied word.
const LIGHT: &str = "the a la le die be even really es quite est ist è é está";

/// Words that deny the number before them if they are negated: "is not right".
const HOLDS: &str = "right correct true possible valid answer exactly antwort réponse respuesta \
                     risposta resposta richtig möglich correcte juste exacte correcto correcta \
    posible certo certa correto correta corretto giusto juist верно правильно doğru सही";

/// Verbs that deny the number directly before them if they are negated: "doesn't work".
const ACTS: &str = "work fit match hold make satisfy count";

/// Auxiliary verbs before a separate "not": does not work.
const AUXILIARIES: &str = "does would can could will did";

/// Words that answer a yes-no question with no.
const NO: &str = "no nope not nein non não нет nee wrong";

/// Words that answer a yes-no question with yes.
const YES: &str =
    "yes yeah yep correct right indeed ja oui sí sim да tak evet 是 对 是的 对的 はい 네";

/// Clauses after a number that express doubt about the number: 5, I guess.
const DOUBTS: [&str; 4] = ["i guess", "i suppose", "perhaps", "maybe"];

/// Words for "too", as in `5 is too low`.
const TOO: [&str; 5] = ["too", "zu", "trop", "demasiado", "слишком"];

/// Maximum number of characters before or after a number that are inspected.
const REACH: usize = 300;

fn contains_word(list: &str, word: &str) -> bool {
    list.split_whitespace().any(|own| own == word)
}

/// Splits a text into lower-case words. Apostrophes belong to the word that contains them.
fn split_words(text: &str) -> Vec<String> {
    let word = |word: &str| word.trim_matches(['\'', '-']).replace('’', "'").to_lowercase();
    let parts = text.split(|c: char| {
        !(c.is_alphanumeric() || "'’-\u{93c}\u{64b}".contains(c) || is_combining_mark(c))
    });
    parts.map(word).filter(|word| !word.is_empty()).collect()
}

/// Returns whether a character is a vowel sign of Hindi, or a mark of Arabic or Thai. These are
/// parts of words.
fn is_combining_mark(c: char) -> bool {
    matches!(c, '\u{900}'..='\u{903}' | '\u{93a}'..='\u{94f}' | '\u{64b}'..='\u{65f}' | '\u{e31}'..='\u{e4e}')
}

fn last_chars(text: &str, count: usize) -> &str {
    let start = text.char_indices().rev().nth(count.saturating_sub(1)).map_or(0, |(at, _)| at);
    &text[start..]
}

fn first_chars(text: &str, count: usize) -> &str {
    &text[..text.char_indices().nth(count).map_or(text.len(), |(at, _)| at)]
}

/// Returns the effect of the words before a number on the number: the sign of a bound, "≠",
/// "maybe", "supposed", or another effect of the table in [`bounds`](crate::bounds). Returns `None`
/// if the text states the number.
pub(crate) fn effect_of_preceding_words(before: &str) -> Option<&'static str> {
    let before = last_chars(before, REACH);
    let clause = before.rsplit(STOPS).next().unwrap_or_default();
    let earlier = &before[..before.len() - clause.len()];
    // In "max. 5" and "Wrong: 5", a stop follows the governing word.
    let clause = match clause.trim().trim_matches(['*', '_', '$', '"', '`']).is_empty() {
        true => {
            let rest = before.trim_end().trim_end_matches(|c: char| "*_$\"` ".contains(c));
            let stop = rest.chars().next_back()?;
            let rest = &rest[..rest.len() - stop.len_utf8()];
            let label = rest.rsplit(STOPS).next().unwrap_or_default();
            let list = split_words(label);
            let is_label = match stop {
                '.' => list.last().is_some_and(|word| ["max", "min"].contains(&word.as_str())),
                ':' if list.last().is_some_and(|w| contains_word(WRONG, w) || w == "not") => {
                    return Some("≠");
                }
                _ => false,
            };
            if !is_label {
                return None;
            }
            label
        }
        false if earlier.ends_with(',') && ends_with_supposition(earlier) => {
            return Some("supposed");
        }
        false => clause,
    };
    if let Some(sign) =
        unspaced_bound_before_number(clause.trim_end_matches([' ', '*', '"', '\'', '「', '$']))
    {
        return Some(sign);
    }
    let all = split_words(clause);
    // In Portuguese, "mais de" means `more than`; in French, "mais" means `but`.
    let is_compared = |at: usize| {
        all.get(at + 1).is_some_and(|next| ["de", "do", "que"].contains(&next.as_str()))
    };
    let is_reset = |at: &usize| {
        (contains_word(RESETS, &all[*at]) && !(all[*at] == "mais" && is_compared(*at)))
            || all[*at].starts_with(|c: char| c.is_ascii_digit())
    };
    let start = (0..all.len()).rev().find(is_reset).map_or(0, |at| at + 1);
    let words: Vec<&str> = all[start..].iter().map(String::as_str).collect();
    // "all but 5", "anything but 5"
    let is_exception =
        start > 1 && all[start - 1] == "but" && contains_word(EXCEPTED, &all[start - 2]);
    if is_exception && words.iter().all(|word| contains_word(FILLERS, word)) {
        return Some("≠");
    }
    for at in 0..words.len() {
        let Some((sign, length)) = parse_bound(&words[at..], true) else { continue };
        let between = &words[at + length..];
        let is_near = match sign {
            "maybe" | "supposed" => true,
            "≠" => {
                let carries =
                    |word: &&str| contains_word(CARRIERS, word) || contains_word(FILLERS, word);
                between.iter().all(carries)
            }
            _ => between.iter().all(|word| contains_word(FILLERS, word)),
        };
        // "It adds up to 5" states 5.
        let is_sum =
            sign == "≤" && at.checked_sub(1).is_some_and(|at| contains_word(SUMS, words[at]));
        if is_near && !is_sum {
            return Some(sign);
        }
    }
    None
}

/// Returns whether the last clause of a text consists only of a supposition or a doubt:
/// "Angenommen, " (suppose).
pub(crate) fn ends_with_supposition(before: &str) -> bool {
    let before = last_chars(before, REACH).trim_end().trim_end_matches([',', ':']);
    let clause = split_words(before.rsplit(STOPS).next().unwrap_or_default());
    let clause: Vec<&str> = clause.iter().map(String::as_str).collect();
    clause.first() == Some(&"were")
        || parse_bound(&clause, false).is_some_and(|(sign, length)| {
            ["supposed", "maybe"].contains(&sign) && length == clause.len()
        })
}

/// Words at the start of a clause that suppose the value of a variable, or try a single number: let
/// x = 5, try 5.
const SUPPOSES: &str = "if let let's suppose assume assuming supposing try test check consider \
                        when whenever say take wenn sei seien angenommen setze si soit soient \
                        supposons supongamos sea sean se sia supponiamo suponha seja als stel \
                        если пусть jeśli";

/// Words that suppose the value of a variable at the start of a clause, in scripts that are written
/// without spaces.
const JOINED_SUPPOSES: [&str; 11] =
    ["假设", "假如", "如果", "假定", "若", "设", "令", "当", "もし", "仮に", "만약"];

/// Words that start a condition (`CONDITIONS`), which ends with a comma or with a word of
/// `CONCLUDES`.
const CONDITIONS: &str = "if when wenn falls si quando se если jeśli eğer";
const CONCLUDES: &str = "then dann alors entonces então allora то wtedy 则 那么 就";

/// Words that can precede a word of `SUPPOSES` at the start of a clause.
const CLAUSE_STARTS: &str =
    "and so but now then also again next first finally und aber et mais y pero e ma";

/// Returns whether the number between `before` and `after` is only supposed: it is in a condition
/// ("if the answer is 5, then"), or it is a trial value ("let x = 5", "try 5").
pub(crate) fn is_number_supposed(before: &str, after: &str) -> bool {
    let before = last_chars(before, REACH);
    let clause = before
        .rsplit(['.', ';', '!', '?', ',', ':', '\n', '。', '，', '；'])
        .next()
        .unwrap_or_default();
    let trimmed = clause.trim_start_matches([' ', '$', '(', '*']);
    // For example `Angenommen, x = 5`.
    let earlier = &before[..before.len() - clause.len()];
    if earlier.ends_with(',') && is_variable_assignment(trimmed) && ends_with_supposition(earlier) {
        return true;
    }
    if let Some(rest) = JOINED_SUPPOSES.iter().find_map(|word| trimmed.strip_prefix(word))
        && is_variable_assignment(rest)
    {
        return true;
    }
    let list = split_words(clause);
    let list: Vec<&str> = list
        .iter()
        .map(String::as_str)
        .skip_while(|word| contains_word(CLAUSE_STARTS, word))
        .collect();
    let own = &after[..sentence_end(after)];
    // For example `It would be 5 if it rained`.
    let conditional =
        ["would", "wäre", "serait", "sería", "seria"].iter().any(|word| list.contains(word));
    if conditional {
        let rest = split_words(own);
        let is_perfect = list.ends_with(&["have", "been"]);
        return is_perfect || rest.iter().take(4).any(|word| contains_word("if wenn si se", word));
    }
    let Some((first, rest)) = list.split_first() else { return false };
    if !contains_word(SUPPOSES, first) {
        return false;
    }
    // The text after the word, with its punctuation.
    let lower = clause.to_lowercase().replace('’', "'");
    let behind = lower.find(first).map_or("", |at| &lower[at + first.len()..]);
    let behind = behind.trim_start();
    let behind = ["that ", "we ", "try "]
        .iter()
        .fold(behind, |text, word| text.strip_prefix(word).unwrap_or(text));
    if is_variable_assignment(behind) {
        return true;
    }
    // A single number is a trial value. In "check: 5", the clause starts only after the colon.
    if rest.is_empty() || (rest.len() == 1 && rest[0] == "try") {
        return !contains_word("say take se", first) && !clause.contains('{');
    }
    if !contains_word(CONDITIONS, first)
        || list.iter().any(|word| contains_word("get gets have gives give obtain equals", word))
    {
        return false;
    }
    if list.iter().any(|word| contains_word(CONCLUDES, word)) {
        return false;
    }
    let is_subjunctive = list.contains(&"were");
    let behind = own.split(|c: char| c.is_ascii_digit()).next().unwrap_or_default();
    is_subjunctive
        || behind.contains([',', '，'])
        || split_words(behind).iter().any(|word| contains_word(CONCLUDES, word))
}

/// Returns whether a text consists of the name of one variable and an equals sign, `be` or `is`: x
/// =, $x_1 =.
fn is_variable_assignment(text: &str) -> bool {
    let text = text.trim_matches([' ', '$', '\\', '(']);
    let name = text
        .strip_suffix('=')
        .or_else(|| text.strip_suffix(" be"))
        .or_else(|| text.strip_suffix(" is"));
    let name = name.map(|name| name.trim_end_matches([' ', ':', '$']));
    name.is_some_and(|name| {
        let letters = name.chars().filter(|c| c.is_alphabetic()).count();
        (1..=3).contains(&letters)
            && !name.contains(char::is_whitespace)
            && name.chars().next().is_some_and(char::is_alphabetic)
            && name
                .chars()
                .all(|c| c.is_alphanumeric() || matches!(c, '_' | '{' | '}' | '\'' | '(' | ')'))
    })
}

/// Returns whether the text before a number states that the problem was not solved. The number's
/// sentence counts. The previous sentence counts, too, if at most two words precede the number in
/// its own sentence.
pub(crate) fn states_failure_before(before: &str) -> bool {
    let before = last_chars(before, REACH).to_lowercase().replace('’', "'");
    let is_stop = |c: char| matches!(c, '.' | '!' | '?' | '\n');
    let (rest, own) = before.rsplit_once(is_stop).unwrap_or(("", before.as_str()));
    let has_phrase = |text: &str| {
        let is_own = |before: &str| {
            let words = split_words(before);
            let mut subject = words.iter().rev().skip_while(|word| contains_word(OWN_VERBS, word));
            subject.next().is_none_or(|word| contains_word(OWN, word))
        };
        let phrases = GIVING_UP.split('|').map(|phrase| (phrase, false));
        phrases.chain(OWN_GIVING_UP.split('|').map(|phrase| (phrase, true))).any(|(phrase, own)| {
            text.rfind(phrase).is_some_and(|at| {
                let behind = &text[at + phrase.len()..];
                (!own || is_own(&text[..at]))
                    && !behind.contains(|c: char| c.is_ascii_digit() || c == '=')
            })
        })
    };
    if has_phrase(own) {
        return true;
    }
    let is_bare =
        !own.contains(|c: char| c.is_ascii_digit() || c == '=') && split_words(own).len() < 3;
    let previous = rest.trim_end_matches(|c: char| is_stop(c) || c == ' ').rsplit(is_stop).next();
    is_bare && previous.is_some_and(has_phrase)
}

/// Returns whether the text after a number denies or retracts the number. If `question_denies`, a
/// question without another number also denies it, unless the answer to the question is yes.
pub(crate) fn is_retracted_after(after: &str, question_denies: bool) -> bool {
    let after = first_chars(after, REACH);
    let end = sentence_end(after);
    let (own, next) = after.split_at(end);
    if own.trim_start_matches([' ', '*', '$', '"']).starts_with(['吗', '么']) {
        return true;
    }
    if let Some(after_question) = next.strip_prefix('?') {
        let answer = split_words(first_chars(after_question, 30));
        // "Is it 5? Yes."
        if answer.first().is_some_and(|word| contains_word(YES, word)) {
            return false;
        }
        let is_no = answer.first().is_some_and(|word| contains_word(NO, word));
        // A tag question, as in "5, isn't it?", states 5.
        let question_denies = question_denies && !own.contains([',', '(']);
        if is_no || (question_denies && !own.contains(|c: char| c.is_ascii_digit())) {
            return true;
        }
    }
    let digit_at = own.find(|c: char| c.is_ascii_digit());
    let has_digit = digit_at.is_some();
    let own = &own[..digit_at.unwrap_or(own.len())];
    if own.trim_start().starts_with("~~") {
        return true;
    }
    let clauses: Vec<&str> = own.split([',', ';', '(', '—', '-', ':']).collect();
    let is_wrong = |(at, clause): (usize, &&str)| {
        let list = split_words(clause);
        let reason = |word: &&str| !["because", "since", "as", "so"].contains(word);
        let list: Vec<&str> = list.iter().map(String::as_str).take_while(reason).collect();
        // The clause `(wrong)` of `5 (wrong)` is complete; in `5, not 6`, another number truncates
        // the clause.
        let is_complete = !has_digit || at + 1 < clauses.len();
        // In English, "12 wrong" can be the number of wrong answers; "12 неверно" cannot.
        let is_bare_denial = list.len() == 1
            && is_complete
            && (contains_word(WRONG, list[0]) || list[0] == "not")
            && (at > 0 || !list[0].is_ascii());
        is_bare_denial || (0..list.len()).any(|at| denies_number(&list, at))
    };
    let is_own_wrong = clauses.iter().enumerate().take(3).any(is_wrong);
    let no_wait = split_words(own).windows(2).any(|pair| pair[0] == "no" && pair[1] == "wait");
    // Examples: "5 — no.", "5. No, wait.", "5. That can't be right."
    let is_no = clauses.len() > 1
        && !has_digit
        && clauses.last().is_some_and(|last| {
            matches!(&split_words(last)[..], [only] if contains_word("no nein non \
                                                                             nope", only))
        });
    let follows = next.trim_start_matches(['.', '!', ')', '*', ' ', '$', '"', '\n']);
    let follows = split_words(&follows[..sentence_end(follows)]);
    let follows: Vec<&str> = follows.iter().map(String::as_str).collect();
    let is_waiting = !follows.is_empty()
        && follows.len() < 4
        && follows.iter().all(|word| {
            contains_word(NO, word)
                || contains_word("wait hmm sorry oops actually moment warte", word)
        })
        && (contains_word(NO, follows[0]) || follows.len() > 1);
    let is_impossible = matches!(&follows[..], ["that" | "this" | "it", rest @ ..]
        if rest.first().is_some_and(|verb| contains_word(SHORT_DENIALS, verb) || *verb == "cannot") && denies_number(rest, 0));
    let next = next.trim_start_matches(['.', '!', ')', '*', ' ', '$', '"', '\n']);
    is_own_wrong
        || no_wait
        || is_no
        || is_waiting
        || is_impossible
        || retraction::gives_up_statement(next)
        || starts_with_retraction(next)
}

/// Returns whether a clause after a number, in the same sentence, expresses doubt about the number:
/// "5, I guess".
pub(crate) fn is_doubted_after(after: &str) -> bool {
    let after = first_chars(after, REACH);
    let clauses = after[..sentence_end(after)].split([',', ';', '(', ')', '—', '-', ':']);
    clauses.skip(1).take(3).any(|clause| DOUBTS.contains(&split_words(clause).join(" ").as_str()))
}

/// Returns whether the words at index `at` deny the number before them: is wrong, isn't right,
/// doesn't work. Plural verbs do not count, because their subject is a noun: 12 answers are wrong.
fn denies_number(words: &[&str], at: usize) -> bool {
    let word = words[at];
    let before = |by: usize| at.checked_sub(by).map(|at| words[at]);
    let is_verb = |word: &str| contains_word(COPULAS, word) || contains_word(SHORT_DENIALS, word);
    let next = |by: usize| words.get(at + by).copied().unwrap_or_default();
    let is_near = at < 3 || (words.first().is_some_and(|word| is_verb(word)) && at < 10);
    if !is_near {
        return false;
    }
    let follows_verb = before(1).is_some_and(is_verb)
        || (before(1).is_some_and(|word| ["a", "an", "the"].contains(&word))
            && before(2).is_some_and(is_verb));
    let is_short = contains_word(SHORT_DENIALS, word);
    let denies = is_short
        || (["not", "nicht", "pas", "niet", "не"].contains(&word)
            && (at == 0 || follows_verb || before(1) == Some("but")))
        || (["no", "não", "non", "не"].contains(&word) && at == 0);
    let light = |word: &str| contains_word(LIGHT, word);
    let skipped = (1..4).take_while(|by| light(next(*by))).count();
    let next_word = next(1 + skipped);
    let holds = contains_word(HOLDS, next_word) && next_word != "answer"
        || (next_word == "answer" && skipped > 0);
    let is_long =
        word == "not" && at == 1 && before(1).is_some_and(|word| contains_word(AUXILIARIES, word));
    // For example `5 is not an integer solution`.
    let is_solution = word == "not"
        && follows_verb
        && (1..5).any(|by| ["solution", "answer", "root", "option"].contains(&next(by)))
        && ["a", "an", "the"].contains(&next(1));
    let is_act = (is_short && at == 0 || is_long) && contains_word(ACTS, next(1));
    (contains_word(WRONG, word)
        && word != "out"
        && !["to", "that", "for"].contains(&next(1))
        && follows_verb)
        || (denies && (holds || (next(1) == "be" && words.len() == at + 2)))
        || is_act
        || is_solution
        || (is_short && words.len() == 1)
        || (word == "out" && before(1) == Some("ruled"))
        || (word == "fails" && at == 0)
        || (TOO.contains(&word) && before(1).is_some_and(is_verb))
}

/// Returns the byte index of the punctuation mark that ends the first sentence of a text, or the
/// text's length if there is none.
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
    fn preceding_words_determine_effect_on_number() {
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
            assert_eq!(effect_of_preceding_words(before), want, "{before}");
        }
    }

    #[test]
    fn answer_that_gives_up_is_detected() {
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
            assert_eq!(states_failure_before(before), want, "{before}");
        }
    }

    #[test]
    fn doubt_after_number_is_detected() {
        for (after, want) in [
            (", I guess.", true),
            (" apples (perhaps)", true),
            (", I guess you know.", false),
            (". Perhaps 3 of them are red.", false),
            (" apples.", false),
        ] {
            assert_eq!(is_doubted_after(after), want, "{after}");
        }
    }

    #[test]
    fn retraction_after_number_is_detected() {
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
            assert_eq!(is_retracted_after(after, false), want, "{after}");
        }
    }
}
