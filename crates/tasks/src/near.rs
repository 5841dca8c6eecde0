//! Finds near copies of held-out questions: texts that contain a held-out question, or that differ
//! from one only in few words, and in no number or operator.

use std::collections::{HashMap, HashSet};

use super::spelling::normalize_spelling;

/// Number of consecutive tokens in a shingle, by which candidate questions are looked up.
const SHINGLE_TOKENS: usize = 3;
/// Maximum number of questions that share a shingle. A shingle of more questions is not used for
/// the lookup.
const MAX_SHINGLE_QUESTIONS: usize = 64;
/// Minimum word overlap of near copies: the number of words in both texts, as a fraction of the
/// words in either text (Jaccard index).
const MIN_WORD_OVERLAP: f64 = 0.8;
/// Minimum number of words of a question that can be recognized by its words.
const MIN_WORDS: usize = 4;
/// Minimum number of questions for which common words are determined and ignored.
const MIN_QUESTIONS: usize = 10;
/// Fraction of questions above which a word counts as common and is ignored.
const COMMON_WORD_FRACTION: f64 = 0.3;

/// Index of held-out questions, by which near copies of them are found.
#[derive(Debug, Default)]
pub(super) struct NearCopies {
    questions: Vec<IndexedQuestion>,
    /// Indices of the questions that contain a shingle, keyed by shingle (consecutive tokens).
    by_shingle: HashMap<[Token; SHINGLE_TOKENS], Vec<usize>>,
    tokens: HashMap<String, Token>,
    /// Words that occur in many questions and are ignored.
    common: HashSet<Token>,
}

type Token = u32;

/// Token number of all words that occur in no question.
const UNKNOWN: Token = Token::MAX;

#[derive(Debug)]
struct IndexedQuestion {
    text: String,
    tokens: Vec<Token>,
    words: HashSet<Token>,
    numbers: Vec<String>,
    /// Tokens of the question that change its value: numbers and operators.
    counted: HashSet<Token>,
    /// Whether a number or a word distinguishes this question from the other questions.
    is_marked: bool,
}

/// English words for numbers, with their digits. "One" is omitted, because it is often a pronoun.
const NUMBERS: [(&str, &str); 11] = [
    ("two", "2"),
    ("three", "3"),
    ("four", "4"),
    ("five", "5"),
    ("six", "6"),
    ("seven", "7"),
    ("eight", "8"),
    ("nine", "9"),
    ("ten", "10"),
    ("eleven", "11"),
    ("twelve", "12"),
];

/// Splits a text into tokens: words, numbers (also within words) and operators.
fn tokenize(text: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut before = None;
    for c in normalize_spelling(text).chars() {
        let kind = c.is_alphanumeric().then(|| c.is_numeric());
        match (kind, found.last_mut()) {
            (Some(_), Some(last)) if kind == before => last.push(c),
            (Some(_), _) => found.push(c.into()),
            (None, _) if is_operator(c) => found.push(c.into()),
            (None, _) => {}
        }
        before = kind;
    }
    for token in &mut found {
        if let Some((_, digits)) = NUMBERS.iter().find(|(word, _)| *word == token.as_str()) {
            *token = (*digits).to_owned();
        }
    }
    found
}

fn is_operator(c: char) -> bool {
    "+-*/^=<>%√".contains(c)
}

/// Returns whether a token changes the value of a question: a number or an operator.
fn changes_value(token: &str) -> bool {
    token.chars().any(|c| c.is_numeric() || is_operator(c))
}

fn find_numbers(tokens: &[String]) -> Vec<String> {
    // A hyphen between words is not an operator.
    let counted = tokens.iter().enumerate().filter(|(at, token)| {
        changes_value(token)
            && (*token != "-"
                || is_value_at(tokens, at.checked_sub(1))
                || is_value_at(tokens, Some(at + 1)))
    });
    let mut found: Vec<String> = counted.map(|(_, token)| token.clone()).collect();
    found.sort_unstable();
    found
}

fn is_value_at(tokens: &[String], at: Option<usize>) -> bool {
    at.and_then(|at| tokens.get(at)).is_some_and(|token| changes_value(token))
}

impl NearCopies {
    /// Creates an index of the questions `texts`.
    pub fn new<'q>(texts: impl IntoIterator<Item = &'q str>) -> Self {
        let mut index = NearCopies::default();
        let mut questions_with: HashMap<Token, usize> = HashMap::new();
        for text in texts {
            let named = tokenize(text);
            let mut ids = Vec::with_capacity(named.len());
            for token in &named {
                let next = index.tokens.len() as Token;
                ids.push(*index.tokens.entry(token.clone()).or_insert(next));
            }
            let words = named
                .iter()
                .zip(&ids)
                .filter(|(token, _)| !changes_value(token))
                .map(|(_, id)| *id);
            let words: HashSet<Token> = words.collect();
            words.iter().for_each(|word| *questions_with.entry(*word).or_default() += 1);
            let counted = named
                .iter()
                .zip(&ids)
                .filter(|(token, _)| changes_value(token))
                .map(|(_, id)| *id)
                .collect();
            let numbers = find_numbers(&named);
            index.questions.push(IndexedQuestion {
                text: text.to_owned(),
                tokens: ids,
                words,
                numbers,
                counted,
                is_marked: false,
            });
        }
        if index.questions.len() >= MIN_QUESTIONS {
            let max_questions = index.questions.len() as f64 * COMMON_WORD_FRACTION;
            index.common = questions_with
                .into_iter()
                .filter(|(_, n)| *n as f64 > max_questions)
                .map(|(id, _)| id)
                .collect();
        }
        for (at, question) in index.questions.iter_mut().enumerate() {
            question.words.retain(|word| !index.common.contains(word));
            question.is_marked = !question.words.is_empty() || !question.numbers.is_empty();
            for shingle in question.tokens.windows(SHINGLE_TOKENS) {
                let shingle = <[Token; SHINGLE_TOKENS]>::try_from(shingle)
                    .unwrap_or([UNKNOWN; SHINGLE_TOKENS]);
                let among = index.by_shingle.entry(shingle).or_default();
                if among.last() != Some(&at) {
                    among.push(at);
                }
            }
        }
        index.by_shingle.retain(|_, among| among.len() <= MAX_SHINGLE_QUESTIONS);
        index
    }

    /// Returns the question that `text` contains or nearly copies, or `None` if there is no such
    /// question.
    pub fn find_near_copy(&self, text: &str) -> Option<&str> {
        if self.questions.is_empty() {
            return None;
        }
        let named = tokenize(text);
        let ids: Vec<Token> =
            named.iter().map(|token| self.tokens.get(token).copied().unwrap_or(UNKNOWN)).collect();
        let mut tried = HashSet::new();
        let mut own: Option<(HashSet<&str>, Vec<String>)> = None;
        for shingle in ids.windows(SHINGLE_TOKENS) {
            let Ok(shingle) = <[Token; SHINGLE_TOKENS]>::try_from(shingle) else { continue };
            for &at in self.by_shingle.get(&shingle).into_iter().flatten() {
                if !tried.insert(at) {
                    continue;
                }
                let question = &self.questions[at];
                let (words, numbers) = own.get_or_insert_with(|| {
                    let words = named
                        .iter()
                        .zip(&ids)
                        .filter(|(token, id)| !changes_value(token) && !self.common.contains(id));
                    (words.map(|(token, _)| token.as_str()).collect(), find_numbers(&named))
                });
                if question.is_within(&ids, &named)
                    || question.contains(&ids)
                    || self.is_like(question, words, numbers)
                {
                    return Some(&question.text);
                }
            }
        }
        None
    }

    fn is_like(
        &self,
        question: &IndexedQuestion,
        words: &HashSet<&str>,
        numbers: &[String],
    ) -> bool {
        let shared_words = words.iter().filter(|word| {
            self.tokens.get(**word).is_some_and(|word| question.words.contains(word))
        });
        let shared_words = shared_words.count();
        let all = question.words.len() + words.len() - shared_words;
        question.words.len() >= MIN_WORDS
            && question.numbers == numbers
            && shared_words as f64 >= MIN_WORD_OVERLAP * all as f64
    }
}

impl IndexedQuestion {
    /// Returns whether this question contains the tokens `ids` of a text, with other text before or
    /// after them.
    fn contains(&self, ids: &[Token]) -> bool {
        let len = ids.len();
        let value =
            |at: usize| self.tokens.get(at).is_some_and(|token| self.counted.contains(token));
        len > SHINGLE_TOKENS
            && len < self.tokens.len()
            && self.is_marked
            && (0..=self.tokens.len() - len)
                .any(|at| self.tokens[at..at + len] == *ids && !value(at + len))
            && self.counted.iter().all(|token| ids.contains(token))
    }

    /// Returns whether the tokens `ids` of a text contain this question, without an operator or
    /// number right after it.
    fn is_within(&self, ids: &[Token], named: &[String]) -> bool {
        let len = self.tokens.len();
        if len <= SHINGLE_TOKENS || len >= ids.len() || !self.is_marked {
            return false;
        }
        ids.windows(len).enumerate().any(|(at, window)| {
            // A number before a question can be a list number.
            window == self.tokens && !is_value_at(named, Some(at + len))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_copies_include_contained_and_slightly_changed_questions() {
        let held_out = [
            "What is 2+2?",
            "A train leaves the station at noon and drives 120 km at 60 km/h. When does it arrive \
             in Bonn?",
            "Who wrote the play about the prince of Denmark?",
            "Janet has 3 apples and buys four more. How many apples does she have?",
        ];
        let near_copies = NearCopies::new(held_out);
        for (text, at) in [
            ("Please tell me: what is 2 + 2? Let's think step by step.", 0),
            ("1. What is 2+2?\nExplain.", 0),
            (
                "A train leaves a station at noon and drives 120km at 60 km/h. When does the \
                 train arrive in Bonn?",
                1,
            ),
            ("who wrote that play about the prince of Denmark", 2),
            ("Janet has three apples and buys 4 more. How many apples does she have?", 3),
        ] {
            assert_eq!(near_copies.find_near_copy(text), Some(held_out[at]), "{text}");
        }
        // A held-out question can contain a training question.
        let framed = NearCopies::new(["Please answer in one word: what is 2+2? Think first."]);
        assert!(
            framed.find_near_copy("What is 2+2?").is_some()
                && framed.find_near_copy("What is 2+3?").is_none()
        );
        for text in [
            "What is 2+2+5?",
            "What is 2+3?",
            "What is 2-2?",
            "Janet has three apples and buys five more. How many apples does she have?",
            "A train leaves the station at noon and drives 130 km at 60 km/h. When does it arrive \
             in Bonn?",
            "Who wrote the opera about the barber of Seville?",
            "",
        ] {
            assert_eq!(near_copies.find_near_copy(text), None, "{text}");
        }
    }

    #[test]
    fn near_copy_search_ignores_words_of_shared_template() {
        let held_out: Vec<String> =
            (0..20).map(|i| riddle(&format!("{0}{0} of {0}land", char::from(b'a' + i)))).collect();
        let near_copies = NearCopies::new(held_out.iter().map(String::as_str));
        assert_eq!(near_copies.find_near_copy(&riddle("zz of zland")), None);
        assert!(near_copies.find_near_copy(&format!("{} Think first.", held_out[3])).is_some());
    }

    fn riddle(name: &str) -> String {
        format!(
            "Please read every word of this riddle twice before you reply, solve the task \
                 below with care and answer in one word: who is {name}?"
        )
    }
}
