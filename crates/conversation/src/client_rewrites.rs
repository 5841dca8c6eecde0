//! Changes that a client can make to a completion so that it still counts as the same completion.
//!
//! A client that keeps the ids of calls, but not their text or the exact arguments, still repeats
//! the completion that made them. A client that appends text to a completion still repeats the text
//! before. This module compares messages; the [index](crate::index) selects the completions to
//! compare.
//!
//! # Guarantees
//! **Edits do not match.** Another value, another function, another number or order of calls, and
//! text that differs from the recorded text make another completion.

use levade_text::ToolCall;
use serde_json::{Map, Value};

/// Returns whether the tool calls that a client sends back equal the recorded tool calls except for
/// tolerated changes. The functions must be the same, in the same order, and the arguments must
/// have every recorded member with its value. Members can be added, `null` members can be missing,
/// and gaps in strings can be longer or shorter.
pub(crate) fn same_calls(recorded: &[ToolCall], sent: &[ToolCall]) -> bool {
    recorded.len() == sent.len()
        && recorded.iter().zip(sent).all(|(recorded, sent)| {
            recorded.name == sent.name && includes_members(&recorded.arguments, &sent.arguments)
        })
}

fn includes_members(recorded: &Map<String, Value>, sent: &Map<String, Value>) -> bool {
    recorded.iter().all(|(name, value)| match sent.get(name) {
        Some(sent) => same_value(value, sent),
        None => value.is_null(),
    })
}

/// Returns whether an argument that a client sends back equals the recorded value, by the rules of
/// [`same_calls`]. A number or a boolean can be written as a string, as some clients do that know
/// the schema.
fn same_value(recorded: &Value, sent: &Value) -> bool {
    match (recorded, sent) {
        (Value::Object(recorded), Value::Object(sent)) => includes_members(recorded, sent),
        (Value::Array(recorded), Value::Array(sent)) => {
            recorded.len() == sent.len() && recorded.iter().zip(sent).all(|(a, b)| same_value(a, b))
        }
        (Value::String(recorded), Value::String(sent)) => same_text(recorded, sent),
        (Value::Number(_), Value::Number(_)) => crate::canonical::same_number(recorded, sent),
        (Value::String(text), scalar @ (Value::Number(_) | Value::Bool(_)))
        | (scalar @ (Value::Number(_) | Value::Bool(_)), Value::String(text)) => {
            serde_json::from_str(text.trim()).is_ok_and(|read| match (&read, scalar) {
                (Value::Number(_), Value::Number(_)) => {
                    crate::canonical::same_number(&read, scalar)
                }
                (read, scalar) => read == scalar,
            })
        }
        (recorded, sent) => recorded == sent,
    }
}

/// Returns whether two texts differ only in white space around them and in the length of gaps
/// within their lines. Indentation must be equal, because programs depend on it. All white space
/// must be equal in a line with quotation marks, because it can be in a string. A gap can be
/// missing only in arithmetic: in a line without letters, next to a bracket or between a number and
/// an operator.
fn same_text(a: &str, b: &str) -> bool {
    canonical_lines(a) == canonical_lines(b)
}

fn canonical_lines(text: &str) -> Vec<String> {
    text.trim().lines().map(canonical_line).collect()
}

/// Normalizes the white space of a line: each significant gap becomes one space, and the
/// indentation is kept.
fn canonical_line(line: &str) -> String {
    let line = line.trim_end();
    if line.contains(['"', '\'', '`']) {
        return line.to_owned();
    }
    let is_sum = !line.contains(char::is_alphabetic);
    let rest = line.trim_start();
    let mut canonical = line[..line.len() - rest.len()].to_owned();
    for word in rest.split_whitespace() {
        let gap =
            canonical.chars().next_back().filter(|c| !c.is_whitespace()).zip(word.chars().next());
        let is_needed = |before: char, after: char| {
            let is_bracket = "()".contains(before) || "()".contains(after);
            !is_sum || (is_number(before) == is_number(after) && !is_bracket)
        };
        if gap.is_some_and(|(before, after)| is_needed(before, after)) {
            canonical.push(' ');
        }
        canonical.push_str(word);
    }
    canonical
}

fn is_number(c: char) -> bool {
    c.is_numeric() || c == '.'
}

/// Returns the length of the text that a client has appended to a completion, as the number of
/// bytes at the end of `sent`. Returns 0 if `sent` differs from the completion only in white space,
/// and `None` if `sent` does not start with the completion. `full` is the complete text of the
/// completion. `received` are the texts that the client can have received: without the stop string
/// that ended the completion, and without the text after it in the same token.
pub(crate) fn appended_length<'a>(
    full: &'a str,
    received: impl IntoIterator<Item = &'a str>,
    sent: &str,
) -> Option<usize> {
    let full = full.trim_start();
    let sent = sent.trim_start();
    let rests = std::iter::once(full).chain(received).filter_map(|known| {
        let known = known.trim();
        let tail = full.strip_prefix(known).filter(|_| !known.is_empty())?;
        let rest = sent.strip_prefix(known)?;
        // Sampled text that the client did not receive, has restored or has trimmed.
        let text = tail.trim_start();
        let put_back = rest.trim_start();
        let common = common_prefix_length(text, put_back);
        let rest = if common > 0 {
            &put_back[common..]
        } else {
            &rest[self::common_prefix_length(tail, rest)..]
        };
        Some(if rest.trim().is_empty() { 0 } else { rest.len() })
    });
    rests.min()
}

/// Returns the length in bytes of the common prefix of two texts.
fn common_prefix_length(a: &str, b: &str) -> usize {
    let differs = a.char_indices().zip(b.chars()).find(|((_, a), b)| a != b);
    differs.map_or(a.len().min(b.len()), |((at, _), _)| at)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn call(arguments: &Value) -> [ToolCall; 1] {
        let arguments = arguments.as_object().unwrap().clone();
        [ToolCall { id: "a".into(), name: "run".into(), arguments: arguments.into() }]
    }

    /// Returns arguments with a number in this notation.
    fn number(written: &str) -> Value {
        serde_json::from_str(&format!("{{\"n\": {written}}}")).unwrap()
    }

    #[test]
    fn same_calls_accepts_rewritten_arguments() {
        for (recorded, sent) in [
            (json!({"e": "12 * 3"}), json!({"e": "12 * 3", "request": "calculator"})),
            (json!({"e": "12 * 3"}), json!({"e": "12*3"})),
            (json!({"e": "12*3"}), json!({"e": " 12 *  3\n"})),
            (json!({"e": "12*3", "unit": null}), json!({"e": "12*3"})),
            (
                json!({"e": {"a": [1, {"b": 2}]}}),
                json!({"e": {"a": [1.0, {"b": 2, "c": 3}], "d": 4}}),
            ),
            (json!({"n": 3}), json!({"n": "3"})),
            (json!({"n": "3.0"}), json!({"n": 3})),
            (json!({"n": "true"}), json!({"n": true})),
            (json!({"e": "(1 + 2) * 3 - 4 / 5"}), json!({"e": "(1+2)*3-4/5"})),
            (json!({"e": "a   b"}), json!({"e": "a b"})),
            (json!({"e": "say('a  b') \nend"}), json!({"e": "say('a  b')\nend"})),
            (number("1.8446744073709551616e19"), number("18446744073709551616")),
            (json!({"code": "if a:\n    b  = 1"}), json!({"code": "if a:\n    b = 1\n"})),
            (json!({}), json!({"request": "now"})),
        ] {
            assert!(same_calls(&call(&recorded), &call(&sent)), "{recorded} {sent}");
        }
    }

    #[test]
    fn same_calls_rejects_edited_arguments() {
        for (recorded, sent) in [
            (json!({"e": "12 * 3"}), json!({"e": "12 * 4"})),
            (json!({"e": "12 * 3"}), json!({"request": "calculator"})),
            (json!({"e": "12 * 3"}), json!({"E": "12 * 3"})),
            (json!({"e": "a"}), json!({"e": "A"})),
            (json!({"e": "a"}), json!({"e": null})),
            (json!({"e": "a"}), json!({"e": ""})),
            (json!({"e": [1, 2]}), json!({"e": [2, 1]})),
            (json!({"e": [1, 2]}), json!({"e": [1, 2, 3]})),
            (json!({"e": [1]}), json!({"e": 1})),
            (json!({"n": 3}), json!({"n": "three"})),
            (json!({"n": 3}), json!({"n": "3.1"})),
            (json!({"n": 9_007_199_254_740_993_u64}), json!({"n": 9_007_199_254_740_992_u64})),
            (json!({"n": false}), json!({"n": 0})),
            (json!({"n": true}), json!({"n": "True."})),
            (json!({"code": "if a:\n    b = 1"}), json!({"code": "if a:\nb = 1"})),
            (json!({"code": "a\nb"}), json!({"code": "a b"})),
            // White space that separates words or is inside a string.
            (json!({"e": "1 2"}), json!({"e": "12"})),
            (json!({"e": "rm a b"}), json!({"e": "rm ab"})),
            (json!({"e": "rm /tmp /a"}), json!({"e": "rm /tmp/a"})),
            (json!({"e": "1 - -2"}), json!({"e": "1--2"})),
            (json!({"e": "x = 1. 5"}), json!({"e": "x = 1.5"})),
            (json!({"e": "say('a , b')"}), json!({"e": "say('a,b')"})),
            (json!({"e": "say(\"a  b\")"}), json!({"e": "say(\"a b\")"})),
            (json!({"e": "a\n\nb"}), json!({"e": "a\nb"})),
            // Numbers that an `f64` cannot distinguish.
            (number("0.1000000000000000055511151231257827"), json!({"n": 0.1})),
            (number("18446744073709551616"), number("18446744073709551617")),
            (number("18446744073709551616"), json!({"n": "18446744073709551617"})),
            (number("18446744073709551616"), number("1.8446744073709552e19")),
        ] {
            assert!(!same_calls(&call(&recorded), &call(&sent)), "{recorded} {sent}");
        }
        let [one] = call(&json!({}));
        let other = ToolCall { name: "stop".into(), ..one.clone() };
        assert!(!same_calls(std::slice::from_ref(&one), std::slice::from_ref(&other)));
        assert!(!same_calls(&[one.clone(), other.clone()], std::slice::from_ref(&one)));
        assert!(!same_calls(&[one.clone(), other.clone()], &[other, one]));
    }

    #[test]
    fn appended_text_is_found_after_completion() {
        for (full, received, sent, rest) in [
            // A stop string that is restored, and more text.
            (
                "x = 1\n</code>",
                &["x = 1\n"][..],
                "x = 1\n</code>\nCalling tools:",
                "\nCalling tools:",
            ),
            // A stop string that ended within a token.
            ("x = 1\n</code>\n\n", &["x = 1\n"], "x = 1\n</code>\nCalling", "Calling"),
            ("1, 2, 3, 4,", &["1, 2, 3, "], "1, 2, 3, 4 five", " five"),
            ("1, 2, 3, 4,", &["1, 2, 3, "], "1, 2, 3, five", "five"),
            // A completion that ended by itself, trimmed or not.
            (" x = 1 \n", &[], "x = 1 \n</code>", "</code>"),
            (" x = 1 \n", &[], "x = 1</code>", "</code>"),
            ("é", &[], "éé", "é"),
            // The white space before the stop string is missing.
            ("x = 1\n</code>", &["x = 1\n"], "x = 1</code>\nCalling tools:", "\nCalling tools:"),
            ("1, 2, 3, 4", &["1, 2, 3, "], "1, 2, 3,4", ""),
            ("x = 1", &[], " x = 1 \n", ""),
        ] {
            let found = appended_length(full, received.iter().copied(), sent)
                .map(|length| &sent[sent.len() - length..]);
            assert_eq!(found, Some(rest), "{full:?} {sent:?}");
        }
        for (full, sent) in [
            ("x = 1", "x = 2</code>"),
            ("x = 1", "So x = 1</code>"),
            ("", "anything"),
            (" \n", "anything"),
            ("x = 1, y = 2", "x = 1"),
        ] {
            assert_eq!(appended_length(full, [], sent), None, "{full:?} {sent:?}");
        }
    }
}
