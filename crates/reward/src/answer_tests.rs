//! Tests of [`AnswerScorer`].

use serde_json::json;

use super::*;
use crate::short::normalize;
use crate::testing::{Dice, thousands};

/// Datasets such as BoolQ expect `true` or `false`.
#[test]
fn booleans_accept_yes_no_true_false() {
    for compare in [Comparison::Exact, Comparison::Contains, Comparison::F1] {
        let scorer =
            AnswerScorer { compare, location: AnswerLocation::Text, ..AnswerScorer::default() };
        let grade = |text: &str, expected: Value| scorer.grade(text, &expected).unwrap().value;
        for answer in ["yes", "Yes.", "True", "TRUE!", " true "] {
            assert_eq!(
                (grade(answer, json!(true)), grade(answer, json!(false))),
                (1.0, 0.0),
                "{answer}"
            );
        }
        for wrong in ["no", "False.", "not true", "I do not know", "yes and no", "truest", "1", ""]
        {
            assert_eq!(grade(wrong, json!(true)), 0.0, "{wrong}");
        }
        for wrong in ["I do not know", "not false", "nothing", "Norway", "no, yes"] {
            assert_eq!(grade(wrong, json!(false)), 0.0, "{wrong}");
        }
        assert_eq!(grade("no", json!([false, "nope"])), 1.0);
    }
}

#[test]
fn normalization_matches_squad_reference() {
    for (text, want) in [
        ("The  Arthur's Magazine!", "arthurs magazine"),
        ("a an the Anna", "anna"),
        ("U.S.A.", "usa"),
        ("1,844", "1844"),
        ("na\u{ef}ve\u{2014}Caf\u{e9}", "na\u{ef}ve\u{2014}caf\u{e9}"),
        ("A-level", "alevel"),
        ("\"Quoted\"", "quoted"),
        ("The", "the"),
        ("Vitamin A", "vitamin a"),
        ("Cafe\u{301}", "caf\u{e9}"),
    ] {
        assert_eq!(normalize(text), want);
    }
}

/// Reference values come from running verl's `search_r1_like_qa_em`.
#[test]
fn exact_and_contains_scores_match_verl() {
    let many = format!("<answer>Beijing{}", "</answer>".repeat(11));
    for (text, exact, with_format, contains) in [
        ("<answer> beijing. </answer>", 1.0, 1.0, 1.0),
        ("<answer>x</answer> ... <answer>The Beijing</answer>", 1.0, 1.0, 1.0),
        ("<answer>in Beijing</answer>", 0.0, 0.1, 1.0),
        ("no tag", 0.0, 0.0, 0.0),
        (&many, 0.25, 0.25, 1.0),
    ] {
        let expected = json!(["Beijing", "Peking"]);
        let of = |scorer: AnswerScorer| scorer.grade(text, &expected).unwrap().value;
        assert_eq!(of(AnswerScorer::default()), exact, "{text}");
        assert_eq!(
            of(AnswerScorer { wrong: 0.1, ..AnswerScorer::default() }),
            with_format,
            "{text}"
        );
        // In verl's contains mode, the number of tags has no effect.
        let compare = Comparison::Contains;
        assert_eq!(
            of(AnswerScorer { compare, max_tags: usize::MAX, ..AnswerScorer::default() }),
            contains,
            "{text}"
        );
    }
}

#[test]
fn exact_match_requires_equal_numbers() {
    let scorer = AnswerScorer { location: AnswerLocation::Text, ..AnswerScorer::default() };
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
        ("1.5", "1:5"),
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
    assert_eq!((value("5", "It is 5."), value("in 1990", "in 1990-1995")), (1.0, 0.0));
    assert_eq!((value("5", "It is 15."), value("5", "5,000"), value("5", "-5")), (0.0, 0.0, 0.0));
}

#[test]
fn exact_match_requires_equal_symbols() {
    let scorer = AnswerScorer { location: AnswerLocation::Text, ..AnswerScorer::default() };
    let value = |expected: &str, text: &str| {
        scorer.grade(text, &expected.into()).map_or(0.0, |score| score.value)
    };
    for (expected, text) in [
        ("C++", "c++."),
        ("Paris", "**Paris**!"),
        ("Paris", "_Paris_"),
        ("foo_bar", "`foo_bar`"),
        ("A+", "an A+"),
        ("O-", "\"O-\""),
        ("New-York", "New-York"),
        ("Tokyo", "- Tokyo"),
        ("5", "+5"),
        ("The Who", "Who"),
        ("???", " ??? "),
        ("Cafe\u{301}", "caf\u{e9}"),
        // Punctuation of other scripts, and typographic minus signs.
        ("Paris", "\u{201c}Paris\u{201d}\u{2026}"),
        ("Paris", "«Paris»"),
        ("Paris", "\u{ff30}aris\u{3002}"),
        ("O'Brien", "O\u{2019}Brien"),
        ("-5", "\u{2212}5"),
        ("-5", "\u{2013}5."),
        ("and so on", "...and so on"),
        // Dashes, spaces, zeros and initials that do not change the value.
        ("1950–1955", "1950-1955"),
        ("1950 - 1955", "1950–1955"),
        ("4.50", "4.5"),
        ("$70.00", "$70"),
        ("3,000.00", "3000"),
        ("0.25", ".25"),
        ("30 °C", "30°C"),
        ("8 €", "€8"),
        ("C. S. Lewis", "C.S. Lewis"),
        ("U.S.A.", "USA"),
        ("5 p.m.", "5 pm"),
        ("'x'", "x"),
    ] {
        assert_eq!((value(expected, text), value(text, expected)), (1.0, 1.0), "{expected} {text}");
    }
    for (expected, text) in [
        ("C++", "C"),
        ("\\d", "d"),
        ("[0,1]", "[0,1)"),
        ("C#", "C"),
        ("A-", "A"),
        ("A-", "A+"),
        ("Na+", "Na-"),
        ("a<b", "a>b"),
        ("x > 5", "x < 5"),
        ("a & b", "a | b"),
        ("a*b", "a+b"),
        ("a / b", "a b"),
        ("~p", "p"),
        ("!p", "p"),
        ("\u{221e}", "-\u{221e}"),
        ("foo_bar", "foobar"),
        ("[1,2)", "(1,2]"),
        ("+", "-"),
        ("{}", "[]"),
        ("...", ""),
        ("A", "the"),
        ("A", ""),
        ("Hepatitis A", "Hepatitis"),
        ("The The", "a an"),
        (".NET", "NET"),
        ("--flag", "flag"),
        ("5 - 3", "5 3"),
        (",5", "5"),
        ("1e5", "1e-5"),
        ("\u{2212}5", "5"),
        // Punctuation between characters, and primes.
        ("p-q", "pq"),
        ("p.q", "pq"),
        ("(p,q)", "pq"),
        ("p:q", "pq"),
        ("h(t)", "ht"),
        ("h'(t)", "h(t)"),
        ("z'", "z"),
        ("7'", "7"),
        ("7\"", "7'"),
        ("mail.org", "mailorg"),
        // Names that look like an article.
        ("A flat", "flat"),
        ("A sharp", "The sharp"),
        ("A, D", "D"),
        ("A and D", "and D"),
        // Version numbers.
        ("release 4.10", "release 4.1"),
    ] {
        assert_eq!((value(expected, text), value(text, expected)), (0.0, 0.0), "{expected} {text}");
    }
}

#[test]
fn contains_matches_only_separate_words() {
    let scorer = AnswerScorer {
        compare: Comparison::Contains,
        location: AnswerLocation::Text,
        ..AnswerScorer::default()
    };
    let value = |expected: &str, text: &str| scorer.grade(text, &expected.into()).unwrap().value;
    for (expected, text) in [
        ("Paris", "It is Paris."),
        ("C++", "I use C++ daily"),
        ("New York", "in new york city"),
        ("\u{5df4}\u{9ece}", "\u{7b54}\u{6848}\u{662f}\u{5df4}\u{9ece}\u{3002}"),
    ] {
        assert_eq!(value(expected, text), 1.0, "{expected} {text}");
    }
    for (expected, text) in [
        ("Paris", "a comparison"),
        ("no", "I do not know"),
        ("ice", "nice"),
        ("he", "the"),
        ("A", "anything"),
        ("C++", "I use C daily"),
        ("???", "anything"),
    ] {
        assert_eq!(value(expected, text), 0.0, "{expected} {text}");
    }
}

#[test]
fn mentioned_tags_are_not_answers() {
    for text in [
        "<think>I write it in <answer> tags.</think><answer>Paris</answer>",
        "<answer>Paris</answer> as </answer> asks",
        "<answer>x</answer><answer> Paris </answer> and <answer>",
    ] {
        assert_eq!(
            AnswerScorer::default().grade(text, &"Paris".into()).unwrap().value,
            1.0,
            "{text}"
        );
    }
}

/// Generates pairs that are equal, or differ in one respect that changes the value.
#[test]
fn exact_match_distinguishes_generated_answers() {
    let scorer = AnswerScorer { location: AnswerLocation::Text, ..AnswerScorer::default() };
    let units = ["km", "metres", "dollars", "BC", "million", "°C", ""];
    let frames = [
        "{}", "{}.", " {} ", "the {}", "The {}!", "\"{}\"", "({})", "{}\n", "A {}", "'{}'", "{},",
        "{}?",
    ];
    let mut dice = Dice::new(1);
    let mut right = 0;
    let mut found = 0;
    let mut wrong = 0;
    for _ in 0..6_000 {
        let number = dice.number(40);
        let at = dice.below(units.len());
        let frame = frames[dice.below(frames.len())];
        let phrase = |number: &str, at: usize| format!("{number} {}", units[at]).trim().to_owned();
        let expected = serde_json::Value::from(phrase(&number, at));
        let value =
            |answer: String| scorer.grade(&frame.replace("{}", &answer), &expected).unwrap().value;
        let same = if dice.below(2) == 0 { thousands(&number) } else { number.clone() };
        right += 1;
        found += usize::from(value(phrase(&same, at)) == 1.0);
        let other_unit = (at + 1 + dice.below(units.len() - 1)) % units.len();
        for answer in [phrase(&dice.changed(&number), at), phrase(&number, other_unit)] {
            wrong += 1;
            assert_eq!(value(answer.clone()), 0.0, "{expected} {answer}");
        }
    }
    println!("answer: {found} of {right} right, 0 of {wrong} wrong");
    assert!(found * 100 >= right * 98 && right + wrong > 10_000);
}

#[test]
fn answer_schema_selects_answer_location() {
    let scorer = AnswerScorer { location: AnswerLocation::Schema, ..AnswerScorer::default() };
    for (schema, text, value) in [
        (json!("boxed"), "so \\boxed{Beijing} <answer>x</answer>", 1.0),
        (json!("boxed"), "so \\boxed{Beijing", 0.0),
        (json!("boxed"), "so $\\boxed{\\text{Beijing}}$", 1.0),
        (json!("boxed"), "so \\boxed{\\textbf{Beijing}.}", 1.0),
        (json!("boxed"), "so \\boxed{\\text{Bei\\_jing}}", 0.0),
        (json!("solution"), "<solution>x</solution> <solution>Beijing</solution>", 1.0),
        (json!("solution"), "<solution>Beijing", 0.0),
    ] {
        let task = json!({ "answer": "Beijing", "row": { "answer_schema": schema } });
        assert_eq!(scorer.grade_for_task(text, &task).unwrap().value, value, "{text}");
    }
    let none = json!({ "answer": "Beijing" });
    assert_eq!(scorer.grade_for_task("<answer>Beijing</answer>", &none).unwrap().value, 1.0);
    let error =
        scorer.check_task(&json!({ "answer": "x", "row": { "answer_schema": 5 } })).unwrap_err();
    assert!(error.to_string().contains("answer_schema is 5"), "{error}");
}

#[test]
fn f1_counts_shared_words() {
    assert_eq!(word_f1("yes", "yes indeed"), 0.0);
    assert_eq!(word_f1("new york city", "new york"), 0.8);
    assert_eq!(word_f1("york york", "york"), 2.0 / 3.0);
    assert_eq!((word_f1("", "x"), word_f1("x", "y")), (0.0, 0.0));
    let scorer = AnswerScorer {
        compare: Comparison::F1,
        location: AnswerLocation::Text,
        ..AnswerScorer::default()
    };
    assert_eq!(scorer.grade("The New York City.", &"New York".into()).unwrap().value, 0.8);
}

/// Reference values come from running Search-R1's `qa_em_format` with 0.2, 0.1 and 0.1.
#[test]
fn format_score_matches_search_r1() {
    let format = FormatScore { structure: 0.2, last: 0.1, retrieval: 0.1 };
    let close = |got: f64, want: f64| assert!((got - want).abs() < 1e-12, "{got} {want}");
    close(format.score(true, true, false), 1.0);
    close(format.score(false, true, true), 0.3);
    close(format.score(false, true, false), 0.2);
    close(format.score(true, false, false), 0.8);
    close(format.score(false, false, false), 0.1);
}

#[test]
fn invalid_expected_answers_are_rejected() {
    for expected in [json!(null), json!([]), json!([["x"]]), json!(""), json!(["Paris", " "])] {
        let error = AnswerScorer::default().grade("x", &expected).unwrap_err();
        assert!(matches!(error, ScoreError::ExpectedText { .. }), "{error}");
    }
    let scorer = AnswerScorer { wrong: 2.0, ..AnswerScorer::default() };
    assert!(scorer.check().unwrap_err().to_string().contains("wrong = 2"));
}
