//! From the reply of a judge to a number.

use regex::{Captures, Regex};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// How the reply of a judge is read. A reply that cannot be read so is no verdict.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Verdict {
    /// The last of the words "correct" and "incorrect", in any case: 1 or 0.
    #[default]
    Correct,
    /// Whichever of two regular expressions matches last: 1 or 0.
    Pattern {
        /// Matches a reply that says yes.
        right: String,
        /// Matches a reply that says no.
        wrong: String,
    },
    /// The last number of the reply, between `least` and `most`, which become 0 and 1. Of "8/10" and "8 out
    /// of 10" that is the 8, where 10 is the most; a scale ("from 1 to 10") counts for nothing.
    Number {
        /// The number that is worth 0.
        least: f64,
        /// The number that is worth 1.
        most: f64,
    },
    /// A field of the last JSON object in the reply: a number between `least` and `most`, also as a text, or
    /// true or false.
    Json {
        /// Name of the field.
        field: String,
        /// The number that is worth 0.
        #[serde(default)]
        least: f64,
        /// The number that is worth 1.
        #[serde(default = "one")]
        most: f64,
    },
}

fn one() -> f64 {
    1.0
}

impl Verdict {
    /// Checks the settings.
    ///
    /// # Errors
    /// Names the one that makes no sense.
    pub(super) fn check(&self) -> Result<(), String> {
        match self {
            Verdict::Correct => Ok(()),
            Verdict::Pattern { right, wrong } => expressions(right, wrong).map(drop),
            Verdict::Number { least, most } | Verdict::Json { least, most, .. } => {
                let is_range = least.is_finite() && most.is_finite() && least < most;
                if is_range {
                    Ok(())
                } else {
                    Err(format!("verdict: least = {least} and most = {most} are no range"))
                }
            }
        }
    }

    /// The verdict of a reply, from 0 to 1; `None` where it gives none.
    pub(super) fn read(&self, reply: &str) -> Option<f64> {
        match self {
            Verdict::Correct => {
                let (right, wrong) = expressions(r"(?i)\bcorrect\b", DENIED).ok()?;
                let more = Regex::new(r"(?i)\bnot\s+(only|just|merely)\b").ok()?;
                last_of(&more.replace_all(reply, ""), &right, &wrong)
            }
            Verdict::Pattern { right, wrong } => {
                let (right, wrong) = expressions(right, wrong).ok()?;
                last_of(reply, &right, &wrong)
            }
            Verdict::Number { least, most } => number(reply, *least, *most),
            Verdict::Json { field, least, most } => {
                let object = last_json(reply, '{', '}')?;
                match object.get(field)? {
                    Value::Bool(yes) => Some(f64::from(u8::from(*yes))),
                    Value::String(text) => match text.trim().to_ascii_lowercase().as_str() {
                        "true" | "yes" => Some(1.0),
                        "false" | "no" => Some(0.0),
                        text => number(text, *least, *most),
                    },
                    value => share(value.as_f64()?, *least, *most),
                }
            }
        }
    }
}

/// Replies that say of an answer that it is not correct. A few words may stand between, as in "is not
/// entirely correct", but no sign that ends what is denied.
const DENIED: &str =
    r"(?i)\b(?:incorrect|(?:not|cannot|never|neither|hardly|\w+n['’]t)\s+(?:[\w-]+\s+){0,3}?correct)\b";

/// The last number of a reply, apart from those that only say what its scale is.
fn number(reply: &str, least: f64, most: f64) -> Option<f64> {
    let is = |found: &Captures<'_>, group: usize, end: f64| {
        found.get(group).and_then(|text| text.as_str().parse().ok()) == Some(end)
    };
    let without = |text: &str, pattern: &str, is_scale: &dyn Fn(&Captures<'_>) -> bool| {
        let replace = |found: &Captures<'_>| match is_scale(found) {
            true => found[1].to_owned(),
            false => found[0].to_owned(),
        };
        Some(Regex::new(pattern).ok()?.replace_all(text, replace).into_owned())
    };
    // Between a number and its scale marks of Markdown, LaTeX and brackets may stand.
    let of = r"(?i)(\d[\s*_$)}\]]*)[\s(]*(?:/|\bout\s+of\b|\bof\b)[\s*_${\[(]*(\d+(?:\.\d+)?)";
    let range = r"(?i)()(-?\d+(?:\.\d+)?)\s*(?:-|–|—|\bto\b|\band\b)\s*(\d+(?:\.\d+)?)";
    let text = without(reply, of, &|found| is(found, 2, most))?;
    let text = without(&text, range, &|found| is(found, 2, least) && is(found, 3, most))?;
    share(crate::numbers::find(&text).pop()?.value?.to_f64(), least, most)
}

fn expressions(right: &str, wrong: &str) -> Result<(Regex, Regex), String> {
    let of = |name: &str, pattern: &str| {
        Regex::new(pattern).map_err(|error| format!("verdict.{name} is no regular expression: {error}"))
    };
    Ok((of("right", right)?, of("wrong", wrong)?))
}

/// 1 where `right` matches last, 0 where `wrong` does, also where both end at the same place ("not correct").
fn last_of(reply: &str, right: &Regex, wrong: &Regex) -> Option<f64> {
    let end = |expression: &Regex| expression.find_iter(reply).last().map(|found| found.end());
    match (end(right), end(wrong)) {
        (None, None) => None,
        (right, wrong) => Some(f64::from(u8::from(right > wrong))),
    }
}

/// Where a number lies in its range; `None` outside of it.
pub(super) fn share(number: f64, least: f64, most: f64) -> Option<f64> {
    (least..=most).contains(&number).then(|| (number - least) / (most - least))
}

/// The last value of JSON between these brackets.
pub(super) fn last_json(reply: &str, open: char, close: char) -> Option<Value> {
    let end = reply.rfind(close)? + close.len_utf8();
    // The latest beginning from which it can be read would be inside of it: the earliest of the last few.
    let starts = reply[..end].char_indices().rev().filter(|(_, c)| *c == open).map(|(at, _)| at);
    let starts: Vec<usize> = starts.take(64).collect();
    starts.into_iter().rev().find_map(|start| serde_json::from_str(&reply[start..end]).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_read() {
        let pattern = Verdict::Pattern { right: r"\[正确\]".into(), wrong: r"\[错误\]".into() };
        let number = Verdict::Number { least: 1.0, most: 5.0 };
        let ten = Verdict::Number { least: 0.0, most: 10.0 };
        let json = Verdict::Json { field: "score".into(), least: 0.0, most: 10.0 };
        for (verdict, reply, want) in [
            (&Verdict::Correct, "Correct", Some(1.0)),
            (&Verdict::Correct, "The answer is **incorrect**.", Some(0.0)),
            (&Verdict::Correct, "It is not correct", Some(0.0)),
            (&Verdict::Correct, "Is it correct? No: incorrect", Some(0.0)),
            (&Verdict::Correct, "First I thought incorrect. Correct.", Some(1.0)),
            (&Verdict::Correct, "I cannot say", None),
            (&pattern, "想…[正确]", Some(1.0)),
            (&pattern, "[正确]? [错误]", Some(0.0)),
            (&number, "I give it 4 of 5: 3", Some(0.5)),
            (&Verdict::Correct, "The answer is not entirely correct.", Some(0.0)),
            (&Verdict::Correct, "It isn't correct", Some(0.0)),
            (&Verdict::Correct, "The final value cannot be correct.", Some(0.0)),
            (&Verdict::Correct, "That is not what I found, yet it is correct.", Some(1.0)),
            (&Verdict::Correct, "It is not wrong. Correct", Some(1.0)),
            (&Verdict::Correct, "Not only correct but complete.", Some(1.0)),
            (&number, "9", None),
            (&number, "Rating: 4/5", Some(0.75)),
            (&number, "**Score:** **3** / 5", Some(0.5)),
            (&number, "[[2]] out of 5", Some(0.25)),
            (&number, "I give it 3 of 5 points.", Some(0.5)),
            (&number, "4 (out of 5.0)", Some(0.75)),
            (&number, "4 on a scale from 1 to 5", Some(0.75)),
            (&number, "On a scale of 1-5: 2", Some(0.25)),
            (&number, "4/10", None),
            (&ten, "8/10", Some(0.8)),
            (&ten, "7.5 out of 10", Some(0.75)),
            (&ten, "0/10", Some(0.0)),
            (&ten, "10/10", Some(1.0)),
            (&number, "good", None),
            (&json, "So: ```json\n{\"why\": \"{x}\", \"score\": 5}\n```", Some(0.5)),
            (&json, "{\"score\": true}", Some(1.0)),
            (&json, "{\"score\": 11}", None),
            (&json, "{\"score\": \"5\"}", Some(0.5)),
            (&json, "{\"score\": \"7/10\"}", Some(0.7)),
            (&json, "{\"score\": \"No\"}", Some(0.0)),
            (&json, "{\"score\": \"high\"}", None),
            (&json, "{\"score\": null}", None),
            (&json, "{score: 5}", None),
            (&json, "", None),
        ] {
            assert_eq!(verdict.read(reply), want, "{reply}");
        }
        let wrong = Verdict::Number { least: 1.0, most: 1.0 };
        assert!(wrong.check().unwrap_err().contains("are no range"));
        let wrong = Verdict::Pattern { right: "(".into(), wrong: String::new() };
        assert!(wrong.check().unwrap_err().contains("verdict.right"));
    }
}
