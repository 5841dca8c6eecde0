//! Tests of [`find_numbers`].

use proptest::prelude::*;

use super::*;

fn texts(text: &str) -> Vec<String> {
    find_numbers(text).into_iter().map(|f| f.text).collect()
}

#[test]
fn numbers_in_common_notations_are_found() {
    for (text, value) in [
        ("1,234.50", "1234.5"),
        ("-7.", "-7"),
        ("−7", "-7"),
        ("+7", "7"),
        ("$1,000", "1000"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("\\$18", "18"),
        ("£0.99", "0.99"),
        ("50%", "50"),
        ("5kg", "5"),
        ("3 / 4", "0.75"),
        ("-3/4", "-0.75"),
        ("1,000/4", "250"),
        ("\\frac{3}{4}", "0.75"),
        ("-\\dfrac{3}{4}", "-0.75"),
        ("\\frac{-1}{2}", "-0.5"),
        ("1.5e3", "1500"),
        ("2E-2", "0.02"),
        ("3 × 10^5", "300000"),
        ("1.2\\times 10^{-2}", "0.012"),
        (".5", "0.5"),
        ("**42**", "42"),
        ("1,234,567", "1234567"),
        ("x = - 7", "-7"),
        ("Rs.500", "500"),
        ("(12)", "12"),
        ("007", "7"),
        ("1{,}234", "1234"),
        ("$12{,}345{,}678.5$", "12345678.5"),
        ("1,\\!234", "1234"),
        ("10\\,000", "10000"),
        ("10~000 m", "10000"),
        ("5\\text{ cm}^2", "5"),
        ("5 cm$^{2}$", "5"),
        ("90^\\circ", "90"),
        ("90^{\\circ}", "90"),
        ("50\\%", "50"),
        ("-\\$1{,}000", "-1000"),
        ("\\frac12", "0.5"),
        ("\\tfrac 1{2}", "0.5"),
        ("-\\frac{ 1{,}000 }{-8}", "125"),
        ("\\cfrac{\\frac12}{4}", "0.125"),
        ("1\\frac12", "1.5"),
        ("-2 \\dfrac{3}{4}", "-2.75"),
        ("1.2 \\cdot 10^{3}", "1200"),
        ("1.2\\,\\times\\,{10}^{-3}kg", "0.0012"),
        ("10^6", "1000000"),
        ("2^{-2}", "0.25"),
        ("x_{1} = 5", "5"),
        ("a^{2n+1} = 5", "5"),
    ] {
        let found = find_numbers(text);
        assert_eq!(found.len(), 1, "{text}: {found:?}");
        assert_eq!(found[0].value, Rational::parse(value), "{text}");
    }
}

#[test]
fn adjacent_numbers_are_separated() {
    for (text, want) in [
        ("", &[][..]),
        ("none at all.", &[]),
        ("x25 and H2O and x_12", &[]),
        ("答案是72。", &["72"]),
        ("12x5", &["12"]),
        ("10-7", &["10", "7"]),
        ("5, 6", &["5", "6"]),
        ("1,23", &["1", "23"]),
        ("1,2345", &["1", "2345"]),
        ("1234,567", &["1234", "567"]),
        ("- 7 apples", &["7"]),
        ("1.2.3", &["1.2", "3"]),
        ("3/4/2024", &["3", "4", "2024"]),
        ("covid-19", &["19"]),
        ("5ex", &["5"]),
        ("48 + 24 = 72.", &["48", "24", "72"]),
        ("3 x 4", &["3", "4"]),
        ("٣ is read", &["3"]),
        ("(3,\\,456)", &["3", "456"]),
        ("3{,}14", &["3", "14"]),
        ("1,\\!2345", &["1", "2345"]),
        ("1.5\\frac12", &["1.5", "\\frac12"]),
        ("3\\times10 = 30", &["3", "10", "30"]),
        ("\\frac{x}{2}", &["2"]),
        ("2^x", &["2"]),
    ] {
        assert_eq!(texts(text), want, "{text}");
    }
    assert_eq!(find_numbers("5/0")[0].value, None);
    assert_eq!(find_numbers(&"9".repeat(2000))[0].value, None);
    assert_eq!(find_numbers("2^{20000}")[0].value, None);
    assert_eq!(find_numbers(&format!("2^{}", "9".repeat(30)))[0].value, None);
    // Parsing terminates for any nesting depth.
    find_numbers(&"\\frac{".repeat(100_000));
    find_numbers(&"x_{".repeat(10_000));
    assert_eq!(texts("5 \\"), ["5"]);
}

#[test]
fn numbers_of_pairs_and_sets_have_no_value() {
    for text in ["(5, 6)", "[5; 6)", "\\{5, 6\\}", "It is $\\{5, 6\\}$.", "{5, 6}"] {
        assert!(find_numbers(text).iter().all(|found| found.value.is_none()), "{text}");
    }
    // Braces directly after a letter are LaTeX groups rather than sets.
    for text in ["a{5, 6}", "x{5, 6}"] {
        assert_eq!(find_numbers(text)[0].value, Some(Rational::from(5)), "{text}");
    }
}

#[test]
fn letter_is_temperature_only_after_degrees() {
    for (text, want) in [
        ("It is 25 degrees C.", &[("celsius", 1)][..]),
        ("It is 77 degrees F.", &[("fahrenheit", 1)]),
        ("It is 77 degrees.", &[("degree", 1)]),
        ("He plays 5 F notes.", &[]),
        ("It has 5 C atoms.", &[]),
    ] {
        assert_eq!(find_numbers(text)[0].about.units, want, "{text}");
    }
}

proptest! {
    #[test]
    fn number_search_never_panics(text in "([-0-9.,/eE$%×^{} \
                                  _~\\\\a−]|\\\\\\\\frac|\\\\\\\\cdot|\\\\\\\\[,!]){0,40}") {
        for found in find_numbers(&text) {
            prop_assert!(crate::characters::normalize_characters(&text).contains(&found.text));
        }
        crate::boxed::parse_only_number(crate::boxed::last_box_content(&text).unwrap_or(&text));
    }

    #[test]
    fn any_decimal_is_found(whole in 0u64..10_000_000, cents in 0u32..100, negative: bool) {
        let sign = if negative { "-" } else { "" };
        let plain = format!("{sign}{whole}.{cents:02}");
        let mut grouped = whole.to_string();
        for at in (1..grouped.len()).rev().filter(|at| (grouped.len() - at).is_multiple_of(3)).collect::<Vec<_>>() {
            grouped.insert(at, ',');
        }
        for written in [plain.clone(), format!("{sign}{grouped}.{cents:02}"), format!("{sign}${grouped}.{cents:02}")] {
            let found = find_numbers(&format!("So it is {written}. Good"));
            prop_assert_eq!(found.len(), 1);
            prop_assert_eq!(found[0].value.clone(), Rational::parse(&plain));
            prop_assert_eq!(&found[0].text, &written);
            prop_assert_eq!(found[0].decimals, 2);
        }
    }
}
