//! Tests of `context`.

use super::*;
use crate::numbers::last_number;

#[test]
fn surrounding_words_change_or_remove_number() {
    for (text, want) in [
        ("**42** million", Some("42000000")),
        ("<b>42</b> thousand", Some("42000")),
        ("总数是**42**万", Some("420000")),
        ("42 hundredths", Some("0.42")),
        ("__42__", Some("42")),
        ("1 hour and 42 minutes", None),
        ("1°42'", None),
        ("3 hours. 42 minutes", Some("42")),
        ("3 remainder 42", None),
        ("42 R3", None),
        ("f(42)", None),
        ("2(42)", None),
        ("the total (42)", Some("42")),
        ("the 42nd term", None),
        ("42 x", None),
        ("42 y después", Some("42")),
        ("log x = 42", None),
        ("y = 3x + 42", None),
        ("The solutions are 43 and 42.", None),
        ("He answers 30 of them, so 42", Some("42")),
        ("42 ten-thousands", None),
        ("{3, 42}", None),
        ("If x = 42, then", None),
        ("Let $x = 42$.", None),
        ("If we add 40 and 2 we get 42.", Some("42")),
        ("When all are counted, it is 42.", Some("42")),
        ("It would be 42 if it rained.", None),
        ("It would be 42.", Some("42")),
        ("设x=42.", None),
        ("42?", None),
        ("Is it 42? Yes.", Some("42")),
        ("42. No, wait.", None),
        ("42. That can't be right.", None),
    ] {
        let found = last_number(text).unwrap_or_else(|| panic!("{text}"));
        assert_eq!(found.value, want.and_then(Rational::parse), "{text}");
    }
}
