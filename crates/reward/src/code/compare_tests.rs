use serde_json::Value;

use super::*;
use crate::testing::Dice;

const EXACT: Tolerance = Tolerance { absolute: 1e-6, relative: 0.0 };

fn read(json: &str) -> Value {
    serde_json::from_str(json).unwrap()
}

fn values(found: &str, want: &str) -> bool {
    values_match(&read(found), &read(want), EXACT)
}

fn outputs(found: &str, want: &str) -> bool {
    outputs_match(found, want, EXACT)
}

#[test]
fn program_outputs_are_compared_by_words_of_each_line() {
    for (found, want, same) in [
        ("3\n", "3", true),
        ("1  2 \n3\n\n", "1 2\n3", true),
        ("\n5", "5", true),
        ("\n\n 5\n", "\n5", true),
        ("1\n\n2", "1\n2", false),
        ("1 2 3", "1 2\n3", false),
        ("0.3333333", "0.33333333333", true),
        ("0.333", "0.33333333333", false),
        ("1.0", "1", true),
        ("1e9", "1000000000", true),
        ("1000000007", "1000000008", false),
        ("", "0", false),
        ("nan", "nan.", false),
        ("nan", "nan", true),
        ("007", "7", false),
        ("007", "7.0", false),
        ("7.0", "007", false),
        ("0", "000", false),
        ("00", "0", false),
        ("-00", "0", false),
        ("00 01", "0 01", false),
        ("00 01", "00 01", true),
        ("0.50", "0.5", true),
        ("-0.0", "0", true),
        ("-0", "0", true),
        ("5 apples", "5 pears", false),
    ] {
        assert_eq!(outputs(found, want), same, "{found:?} {want:?}");
    }
}

#[test]
fn expected_integers_must_match_exactly() {
    for (found, want, same) in [
        ("1000000008.0", "1000000007", false),
        ("1000000007.0", "1000000007", true),
        ("500000000.0", "499999999", false),
        ("9007199254740992.0", "9007199254740993", false),
        ("9007199254740993.0", "9007199254740993", true),
        ("2000001.5", "2000000", false),
        ("1e-7", "0", false),
        ("5.0000001", "5", false),
        ("4.999999999999999", "5", false),
        ("10000000000000000000000001", "10000000000000000000000000", false),
        ("-9223372036854775810", "-9223372036854775809", false),
    ] {
        assert_eq!(outputs(found, want), same, "{found:?} {want:?}");
        assert_eq!(
            values(found, want),
            same && found != "9007199254740993.0",
            "{found:?} {want:?}"
        );
    }
    // A Python float is not exactly the integer that its digits show.
    assert!(
        outputs("1e+25", "10000000000000000000000000")
            && !values("1e+25", "10000000000000000000000000")
    );
    assert!(
        values("1e+22", "10000000000000000000000")
            && values("18446744073709551616.0", "18446744073709551616")
    );
    assert!(!values("[18446744073709551617]", "[18446744073709551616]"));
}

#[test]
fn tolerance_is_absolute_unless_relative_is_set() {
    let relative = Tolerance { absolute: 0.0, relative: 1e-6 };
    for (found, want, absolute, by_ratio) in [
        ("123456790.0", "123456789.5", false, true),
        ("123456789012345678.4", "123456789012345678.5", false, true),
        ("0.3333333333333333", "0.3333333333", true, true),
        ("0.0000001", "0.0", true, false),
        ("2.0000005", "2.0", true, true),
        ("2.000002", "2.0", false, true),
        ("2.00001", "2.0", false, false),
        ("-2.0", "2.0", false, false),
        ("3", "3.0", true, true),
        ("1.5e3", "1500.0", true, true),
        ("0.1", "0.1000000000000000055511151231257827", true, true),
    ] {
        assert_eq!(outputs(found, want), absolute, "{found} {want}");
        assert_eq!(outputs_match(found, want, relative), by_ratio, "{found} {want}");
    }
    assert!(values("0.30000000000000004", "0.3") && values("3", "3.0") && !values("3.1", "3.0"));
    assert!(!values("123456790.0", "123456789.5"));
}

#[test]
fn outputs_with_long_numbers_are_compared_in_bounded_time() {
    let start = std::time::Instant::now();
    assert!(!outputs("1e2000000000", "0.5") && !outputs("0.5", "-1e2000000000"));
    assert!(start.elapsed().as_secs() < 1, "no power of ten is written out");
    let thirds = format!("0.{}", "3".repeat(100_002));
    assert!(outputs(&thirds, "0.3333333333") && !outputs(&thirds, "0.3333"));
}

#[test]
fn value_comparison_matches_python_equality() {
    for (found, want, same) in [
        ("1", "true", true),
        ("true", "1", true),
        ("1.0", "true", true),
        ("0", "false", true),
        ("2", "true", false),
        ("null", "false", false),
        ("\"True\"", "true", false),
        ("\"1\"", "1", false),
        ("1", "\"1\"", false),
        ("[1, [2, 3]]", "[1, [2, 3.0]]", true),
        ("[1, 2]", "[1, 2, 3]", false),
        ("[2, 1]", "[1, 2]", false),
        ("{\"a\": 1, \"b\": [0.1]}", "{\"b\": [0.1], \"a\": 1}", true),
        ("{\"a\": 1}", "{\"a\": 1, \"b\": null}", false),
        ("[]", "{}", false),
        ("\"a\"", "\"a \"", false),
    ] {
        assert_eq!(values(found, want), same, "{found} {want}");
    }
}

#[test]
fn decimal_difference_is_exact() {
    for (one, other, want) in [
        ("1", "0.9999999", 1e-7),
        ("-1", "1", 2.0),
        ("1e3", "1", 999.0),
        ("0", "0", 0.0),
        ("10000000000000000000000000.5", "9999999999999999999999999.25", 1.25),
        ("-0.5", "-0.25", 0.25),
        ("123456789012345678901234567890", "123456789012345678901234567880", 10.0),
        ("1e300000", "0", f64::INFINITY),
    ] {
        let parse = |text: &str| Decimal::parse(text).unwrap();
        assert_eq!(parse(one).difference(&parse(other)), want, "{one} {other}");
        assert_eq!(parse(other).difference(&parse(one)), want, "{one} {other}");
    }
    for none in ["", "-", "1e", "e5", ".", "1.2.3", "0x1", "1_000", "inf", "--1"] {
        assert_eq!(Decimal::parse(none), None, "{none}");
    }
}

/// Compares pairs that are equal, or differ in one respect that changes the value.
#[test]
fn generated_outputs_and_values_are_distinguished() {
    let frames = [
        "{}",
        "{}\n",
        " {}",
        "\n{}\n",
        "Case #1: {}",
        "{} 7",
        "a\n{}\nb",
        "{}\t",
        "x = {}",
        "7\n{}",
        "[ {} ]",
        "{}\r\n",
    ];
    let nests = ["{}", "[{}]", "[1, {}]", "{\"a\": {}}", "[[{}], []]", "[true, \"x\", {}]"];
    let mut dice = Dice::new(2);
    let mut right = 0;
    let mut found = 0;
    let mut wrong = 0;
    // Numbers have at most six decimals, so the tolerance is below a change of the last digit.
    let tolerance = Tolerance { absolute: 1e-9, relative: 0.0 };
    let accepts = |found: &str, want: &str| outputs_match(found, want, tolerance);
    let valued = |found: &str, want: &str| values_match(&read(found), &read(want), tolerance);
    for _ in 0..6_000 {
        let number = dice.number(40);
        let frame = frames[dice.below(frames.len())];
        let nest = nests[dice.below(nests.len())];
        let is_float = number.contains('.');
        let same = match dice.below(3) {
            0 if is_float => format!("{number}0"),
            1 if !is_float => format!("{number}.0"),
            _ => number.clone(),
        };
        let output = |number: &str| frame.trim().replace("{}", number);
        let value = |number: &str| nest.replace("{}", number);
        right += 2;
        found += usize::from(accepts(&frame.replace("{}", &same), &output(&number)));
        // A float preserves 15 digits; an integer has any number of digits.
        let short = if is_float {
            format!("{}.5", &number[..number.find('.').unwrap().min(9)])
        } else {
            number.clone()
        };
        found += usize::from(valued(&value(&short), &value(&short)));
        for other in [dice.changed(&number), dice.changed(&number)] {
            wrong += 1;
            assert!(!accepts(&output(&other), &output(&number)), "{other} {number}");
        }
        for other in [dice.changed(&short), dice.changed(&short)] {
            wrong += 1;
            assert!(!valued(&value(&other), &value(&short)), "{other} {short}");
        }
        // Two lines in another order, and a missing line.
        wrong += 2;
        let two = |a: &str, b: &str| format!("{a}\n{b}");
        let other = dice.changed(&number);
        assert!(!accepts(&two(&other, &number), &two(&number, &other)));
        assert!(!accepts(&number, &two(&number, &other)));
    }
    println!("code: {found} of {right} right, 0 of {wrong} wrong");
    assert!(found * 100 >= right * 98 && right + wrong > 10_000);
}
