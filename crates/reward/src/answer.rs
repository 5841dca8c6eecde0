//! Short answers in words, as question-answering sets score them.
//!
//! Normalisation and exact match are SQuAD's (Rajpurkar et al. 2016, evaluation script), and what Search-R1,
//! verl and Agent-R1 use. In addition, equal answers have equal numbers: the punctuation that normalization
//! removes may be a sign or a decimal point.

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::boxed::last_box;
use crate::scorer::{expected, of_answer, task_field};
use crate::{Component, Evidence, Score, ScoreError, Scorer};

/// Scores a short answer in words against one or several that are right.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AnswerScorer {
    /// When an answer is right.
    pub compare: Comparison,
    /// Where it stands.
    pub place: Place,
    /// Worth of an answer that stands in its place but is wrong.
    pub wrong: f64,
    /// More opening or closing tags than this in one text leave a quarter of the score: whoever writes tags
    /// at random is right by chance.
    pub most_tags: usize,
}

impl Default for AnswerScorer {
    fn default() -> Self {
        AnswerScorer { compare: Comparison::default(), place: Place::default(), wrong: 0.0, most_tags: 10 }
    }
}

/// When an answer is right.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Comparison {
    /// Equal, once both are normalised.
    #[default]
    Exact,
    /// The expected answer occurs in it.
    Contains,
    /// Compares by how far words agree: F1 over words.
    F1,
}

/// Where an answer stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// In the last `<answer>…</answer>`.
    #[default]
    Tag,
    /// The whole text is the answer.
    Text,
    /// Where the field `answer_schema` of the task's row says: `boxed` for the last box, any other name for
    /// the last pair of tags of that name.
    Schema,
}

const OPEN: &str = "<answer>";
const CLOSE: &str = "</answer>";

/// Lower case, without ASCII punctuation, without the words a, an, the, with single spaces.
pub fn normalise(text: &str) -> String {
    let plain: String = text.to_lowercase().chars().filter(|c| !c.is_ascii_punctuation()).collect();
    let mut kept = String::with_capacity(plain.len());
    let mut word = String::new();
    for c in plain.chars().chain([' ']) {
        if c.is_alphanumeric() {
            word.push(c);
            continue;
        }
        if !matches!(word.as_str(), "a" | "an" | "the") {
            kept.push_str(&word);
        } else {
            kept.push(' ');
        }
        word.clear();
        kept.push(c);
    }
    kept.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns the numbers of a text, with signs, decimal points and without marks of thousands. Normalization
/// removes these: without a look at the numbers, `1.5` would be 15, `-3` be 3 and `1/2` be 12.
fn numbers(text: &str) -> Vec<String> {
    let chars: Vec<char> = text.chars().collect();
    let digits = |from: usize| chars[from..].iter().take_while(|c| c.is_ascii_digit()).count();
    let (mut found, mut at) = (Vec::new(), 0);
    while at < chars.len() {
        if !chars[at].is_ascii_digit() {
            at += 1;
            continue;
        }
        let before = |back: usize| at.checked_sub(back).map(|at| chars[at]);
        let after_value = |c: char| c.is_alphanumeric() || matches!(c, ')' | ']' | '-');
        let is_fraction = before(1) == Some('.') && !before(2).is_some_and(char::is_alphanumeric);
        let sign = if is_fraction { 2 } else { 1 };
        let is_negative = before(sign) == Some('-') && !before(sign + 1).is_some_and(after_value);
        let mut number = String::from(if is_negative { "-" } else { "" });
        number.extend(is_fraction.then_some('.'));
        loop {
            let end = at + digits(at);
            number.extend(&chars[at..end]);
            at = end;
            match chars.get(at) {
                Some(',') if digits(at + 1) == 3 && !number.contains('.') => at += 1,
                Some('.') if digits(at + 1) > 0 => {
                    number.push('.');
                    at += 1;
                }
                _ => break,
            }
        }
        found.push(number);
    }
    found
}

/// 2 · precision · recall / (precision + recall) over the words of two normalised texts. Answers that are
/// yes, no or noanswer must be equal: sharing words with them means nothing (as in HotpotQA's script).
pub fn f1(found: &str, expected: &str) -> f64 {
    let closed = |text: &str| matches!(text, "yes" | "no" | "noanswer");
    if closed(found) || closed(expected) {
        return f64::from(u8::from(found == expected));
    }
    let (found, mut expected): (Vec<&str>, Vec<&str>) =
        (found.split_whitespace().collect(), expected.split_whitespace().collect());
    let (given, wanted) = (found.len() as f64, expected.len() as f64);
    let mut common = 0.0;
    for word in found {
        if let Some(at) = expected.iter().position(|other| *other == word) {
            expected.swap_remove(at);
            common += 1.0;
        }
    }
    if common == 0.0 { 0.0 } else { 2.0 * common / (given + wanted) }
}

#[async_trait]
impl Scorer for AnswerScorer {
    fn check_task(&self, task: &Value) -> Result<(), ScoreError> {
        self.grade_of("", task).map(drop)
    }

    async fn score(&self, evidence: &Evidence) -> Result<Vec<Component>, ScoreError> {
        of_answer(evidence, self.grade_of(evidence.text(), &evidence.task))
    }
}

impl AnswerScorer {
    pub(crate) fn check(&self) -> Result<(), ScoreError> {
        if (0.0..=1.0).contains(&self.wrong) {
            Ok(())
        } else {
            Err(ScoreError::Range { name: "wrong", value: self.wrong })
        }
    }

    /// Grades a text as an answer to a task.
    fn grade_of(&self, text: &str, task: &Value) -> Result<Score, ScoreError> {
        let schema = match self.place {
            Place::Schema => Some(schema_of(task)?),
            _ => None,
        };
        self.graded(text, expected(task), schema.as_deref())
    }

    #[cfg(test)]
    fn grade(&self, text: &str, expected: &Value) -> Result<Score, ScoreError> {
        self.graded(text, expected, None)
    }

    fn graded(&self, text: &str, expected: &Value, schema: Option<&str>) -> Result<Score, ScoreError> {
        self.check()?;
        let expected = answers(expected)?;
        let found = match schema {
            Some("boxed") => last_box(text).map(str::trim),
            Some(tag) => in_tag(text, tag),
            None => self.place.find(text),
        };
        let Some(found) = found else { return Ok(Score { value: 0.0, extracted: None }) };
        let normal = normalise(found);
        let found_numbers = numbers(found);
        let agrees = |Expected { text, numbers, closed }: &Expected| {
            let same_numbers = found_numbers == *numbers;
            match self.compare {
                _ if normal == *text => f64::from(u8::from(same_numbers)),
                _ if *closed => 0.0,
                Comparison::Exact => 0.0,
                Comparison::Contains => {
                    let has_numbers = numbers.iter().all(|number| found_numbers.contains(number));
                    f64::from(u8::from(has_numbers && normal.contains(text.as_str())))
                }
                Comparison::F1 => f1(&normal, text),
            }
        };
        let best = expected.iter().map(agrees).fold(0.0, f64::max);
        let tags = text.matches(OPEN).count().max(text.matches(CLOSE).count());
        let scale = if self.place == Place::Tag && tags > self.most_tags { 0.25 } else { 1.0 };
        let value = if best > 0.0 { best * scale } else { self.wrong };
        Ok(Score { value, extracted: Some(found.to_owned()) })
    }
}

impl Place {
    fn find(self, text: &str) -> Option<&str> {
        match self {
            Place::Text => Some(text.trim()),
            Place::Tag | Place::Schema => {
                let mut last = None;
                let mut rest = text;
                while let Some((_, after)) = rest.split_once(OPEN) {
                    let Some((inside, after)) = after.split_once(CLOSE) else { break };
                    last = Some(inside.trim());
                    rest = after;
                }
                last
            }
        }
    }
}

/// Name of the schema that the answer to a task has, `answer` where its row names none.
pub(crate) fn schema_of(task: &Value) -> Result<String, ScoreError> {
    let is_name = |name: &str| !name.is_empty() && !name.contains(['<', '>', '/']);
    match task_field(task, "answer_schema") {
        None => Ok("answer".into()),
        Some(Value::String(name)) if is_name(name.trim()) => Ok(name.trim().to_owned()),
        Some(other) => Err(ScoreError::Unusable(format!(
            "the field answer_schema is {other}, but must be \"boxed\" or the name of a tag"
        ))),
    }
}

/// Content of the last closing tag and the nearest opening one before it.
pub(crate) fn in_tag<'t>(text: &'t str, tag: &str) -> Option<&'t str> {
    let (before, _) = text.rsplit_once(&format!("</{tag}>"))?;
    before.rsplit_once(&format!("<{tag}>")).map(|(_, inside)| inside.trim())
}

/// An expected answer, normalised.
struct Expected {
    text: String,
    /// The numbers in it.
    numbers: Vec<String>,
    /// Whether an answer must equal it, however answers are compared: "no" is within "I do not know".
    closed: bool,
}

/// Returns one text or several. A truth value is expected as yes or true, or as no or false.
fn answers(expected: &Value) -> Result<Vec<Expected>, ScoreError> {
    let open = |text: &str| vec![Expected { text: normalise(text), numbers: numbers(text), closed: false }];
    let texts = |value: &Value| match value {
        Value::String(text) => Some(open(text)),
        Value::Number(number) => Some(open(number.as_str())),
        Value::Bool(truth) => {
            let names = if *truth { ["yes", "true"] } else { ["no", "false"] };
            let closed = |name: &str| Expected { text: name.to_owned(), numbers: Vec::new(), closed: true };
            Some(names.map(closed).into())
        }
        _ => None,
    };
    let found: Option<Vec<Expected>> = match expected {
        Value::Array(several) => several
            .iter()
            .map(texts)
            .collect::<Option<Vec<_>>>()
            .map(|all| all.into_iter().flatten().collect()),
        one => texts(one),
    };
    found
        .filter(|found| !found.is_empty())
        .ok_or_else(|| ScoreError::ExpectedText { expected: expected.to_string() })
}

/// Worth of form besides the answer, after Search-R1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FormScore {
    /// For a text of the right form whose answer is wrong.
    pub structure: f64,
    /// For an answer that is wrong, in a text of the wrong form.
    pub last: f64,
    /// More where what was retrieved holds the answer.
    pub retrieval: f64,
}

impl FormScore {
    /// The score of a text that gives an answer, `right` or not, in the right `form` or not, after the answer
    /// was `retrieved` or not.
    pub fn score(&self, right: bool, form: bool, retrieved: bool) -> f64 {
        match (right, form) {
            (true, true) => 1.0,
            (true, false) => 1.0 - self.structure,
            (false, true) if retrieved => self.structure + self.retrieval,
            (false, true) => self.structure,
            (false, false) => self.last,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::{Dice, thousands};

    /// Sets such as BoolQ expect true or false.
    #[test]
    fn truth_values_are_yes_or_no() {
        for compare in [Comparison::Exact, Comparison::Contains, Comparison::F1] {
            let scorer = AnswerScorer { compare, place: Place::Text, ..AnswerScorer::default() };
            let grade = |text: &str, expected: Value| scorer.grade(text, &expected).unwrap().value;
            for right in ["yes", "Yes.", "True", "TRUE!", " true "] {
                assert_eq!((grade(right, json!(true)), grade(right, json!(false))), (1.0, 0.0), "{right}");
            }
            for wrong in ["no", "False.", "not true", "I do not know", "yes and no", "truest", "1", ""] {
                assert_eq!(grade(wrong, json!(true)), 0.0, "{wrong}");
            }
            for wrong in ["I do not know", "not false", "nothing", "Norway", "no, yes"] {
                assert_eq!(grade(wrong, json!(false)), 0.0, "{wrong}");
            }
            assert_eq!(grade("no", json!([false, "nope"])), 1.0);
        }
    }

    #[test]
    fn normalisation_is_that_of_the_reference() {
        for (text, want) in [
            ("The  Arthur's Magazine!", "arthurs magazine"),
            ("a an the Anna", "anna"),
            ("U.S.A.", "usa"),
            ("1,844", "1844"),
            ("na\u{ef}ve\u{2014}Caf\u{e9}", "na\u{ef}ve\u{2014}caf\u{e9}"),
            ("A-level", "alevel"),
            ("\"Quoted\"", "quoted"),
            ("The", ""),
        ] {
            assert_eq!(normalise(text), want);
        }
    }

    /// verl's `search_r1_like_qa_em`, executed.
    #[test]
    fn exact_and_partial_matches() {
        let many = format!("<answer>Beijing{}", "</answer>".repeat(11));
        for (text, exact, with_form, contains) in [
            ("<answer> beijing. </answer>", 1.0, 1.0, 1.0),
            ("<answer>x</answer> ... <answer>The Beijing</answer>", 1.0, 1.0, 1.0),
            ("<answer>in Beijing</answer>", 0.0, 0.1, 1.0),
            ("no tag", 0.0, 0.0, 0.0),
            (&many, 0.25, 0.25, 1.0),
        ] {
            let expected = json!(["Beijing", "Peking"]);
            let of = |scorer: AnswerScorer| scorer.grade(text, &expected).unwrap().value;
            assert_eq!(of(AnswerScorer::default()), exact, "{text}");
            assert_eq!(of(AnswerScorer { wrong: 0.1, ..AnswerScorer::default() }), with_form, "{text}");
            // There the number of tags has no effect.
            let compare = Comparison::Contains;
            assert_eq!(
                of(AnswerScorer { compare, most_tags: usize::MAX, ..AnswerScorer::default() }),
                contains,
                "{text}"
            );
        }
    }

    #[test]
    fn equal_answers_have_equal_numbers() {
        let scorer = AnswerScorer { place: Place::Text, ..AnswerScorer::default() };
        let value = |expected: &str, text: &str| scorer.grade(text, &expected.into()).unwrap().value;
        for (expected, text) in [
            ("1,844", "1844"),
            ("1844", "1,844."),
            ("$5", "5"),
            ("-3", "-3."),
            ("3.5 million", "The 3.5 million!"),
            ("1990-1995", "1990-1995"),
            ("Apollo-11", "apollo-11"),
            ("12,345,678", "12345678"),
            ("(5)", "5"),
        ] {
            assert_eq!(value(expected, text), 1.0, "{expected} {text}");
        }
        for (expected, text) in [
            ("1.5", "15"),
            ("-3", "3"),
            ("3", "-3"),
            ("1/2", "12"),
            ("3:2", "32"),
            ("2-1", "21"),
            ("3.5 million", "35 million"),
            ("1.844", "1844"),
            ("1,5", "15"),
            (".5", "5"),
            ("-.5", ".5"),
            ("2^10", "210"),
            ("1,2,3", "123"),
        ] {
            assert_eq!(value(expected, text), 0.0, "{expected} {text}");
        }
        let contains = AnswerScorer { compare: Comparison::Contains, ..scorer };
        let value = |expected: &str, text: &str| contains.grade(text, &expected.into()).unwrap().value;
        assert_eq!((value("5", "It is 5."), value("in 1990", "in 1990-1995")), (1.0, 1.0));
        assert_eq!((value("5", "It is 15."), value("5", "5,000"), value("5", "-5")), (0.0, 0.0, 0.0));
    }

    /// Pairs that are the same, or differ in one respect that changes the value.
    #[test]
    fn generated_answers_are_told_apart() {
        let scorer = AnswerScorer { place: Place::Text, ..AnswerScorer::default() };
        let units = ["km", "metres", "dollars", "BC", "million", "°C", ""];
        let frames = [
            "{}", "{}.", " {} ", "the {}", "The {}!", "\"{}\"", "({})", "{}\n", "A {}", "'{}'", "{},", "{}?",
        ];
        let (mut dice, mut right, mut found, mut wrong) = (Dice::new(1), 0, 0, 0);
        for _ in 0..6_000 {
            let (number, at) = (dice.number(40), dice.below(units.len()));
            let frame = frames[dice.below(frames.len())];
            let say = |number: &str, at: usize| format!("{number} {}", units[at]).trim().to_owned();
            let expected = serde_json::Value::from(say(&number, at));
            let value =
                |answer: String| scorer.grade(&frame.replace("{}", &answer), &expected).unwrap().value;
            let same = if dice.below(2) == 0 { thousands(&number) } else { number.clone() };
            right += 1;
            found += usize::from(value(say(&same, at)) == 1.0);
            let other_unit = (at + 1 + dice.below(units.len() - 1)) % units.len();
            for answer in [say(&dice.changed(&number), at), say(&number, other_unit)] {
                wrong += 1;
                assert_eq!(value(answer.clone()), 0.0, "{expected} {answer}");
            }
        }
        println!("answer: {found} of {right} right, 0 of {wrong} wrong");
        assert!(found * 100 >= right * 98 && right + wrong > 10_000);
    }

    #[test]
    fn a_task_says_where_its_answer_stands() {
        let scorer = AnswerScorer { place: Place::Schema, ..AnswerScorer::default() };
        for (schema, text, value) in [
            (json!("boxed"), "so \\boxed{Beijing} <answer>x</answer>", 1.0),
            (json!("boxed"), "so \\boxed{Beijing", 0.0),
            (json!("solution"), "<solution>x</solution> <solution>Beijing</solution>", 1.0),
            (json!("solution"), "<solution>Beijing", 0.0),
        ] {
            let task = json!({ "answer": "Beijing", "row": { "answer_schema": schema } });
            assert_eq!(scorer.grade_of(text, &task).unwrap().value, value, "{text}");
        }
        let none = json!({ "answer": "Beijing" });
        assert_eq!(scorer.grade_of("<answer>Beijing</answer>", &none).unwrap().value, 1.0);
        let error = scorer.check_task(&json!({ "answer": "x", "row": { "answer_schema": 5 } })).unwrap_err();
        assert!(error.to_string().contains("answer_schema is 5"), "{error}");
    }

    #[test]
    fn words_in_common() {
        assert_eq!(f1("yes", "yes indeed"), 0.0);
        assert_eq!(f1("new york city", "new york"), 0.8);
        assert_eq!(f1("york york", "york"), 2.0 / 3.0);
        assert_eq!((f1("", "x"), f1("x", "y")), (0.0, 0.0));
        let scorer = AnswerScorer { compare: Comparison::F1, place: Place::Text, ..AnswerScorer::default() };
        assert_eq!(scorer.grade("The New York City.", &"New York".into()).unwrap().value, 0.8);
    }

    /// Search-R1's `qa_em_format` with 0.2, 0.1, 0.1, executed.
    #[test]
    fn form_counts() {
        let form = FormScore { structure: 0.2, last: 0.1, retrieval: 0.1 };
        let close = |got: f64, want: f64| assert!((got - want).abs() < 1e-12, "{got} {want}");
        close(form.score(true, true, false), 1.0);
        close(form.score(false, true, true), 0.3);
        close(form.score(false, true, false), 0.2);
        close(form.score(true, false, false), 0.8);
        close(form.score(false, false, false), 0.1);
    }

    #[test]
    fn bad_expectations_are_named() {
        for expected in [json!(null), json!([]), json!([["x"]])] {
            let error = AnswerScorer::default().grade("x", &expected).unwrap_err();
            assert!(matches!(error, ScoreError::ExpectedText { .. }), "{error}");
        }
        let scorer = AnswerScorer { wrong: 2.0, ..AnswerScorer::default() };
        assert!(scorer.check().unwrap_err().to_string().contains("wrong = 2"));
    }
}
