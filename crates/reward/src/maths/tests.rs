use std::time::{Duration, Instant};

use proptest::prelude::*;
use serde_json::json;

use super::*;

fn same(a: &str, b: &str) -> bool {
    let scorer = MathsScorer::default();
    let forward = scorer.is_same(a, b);
    assert_eq!(forward, scorer.is_same(b, a), "not symmetric: {a} and {b}");
    forward
}

#[test]
fn expected_scores_and_ranges_are_not_subtracted() {
    for (expected, stated, due) in [
        ("2-1", "1", 0.0),
        ("3-0", "3", 0.0),
        ("2-1", "3-2", 0.0),
        ("2-1", "1-2", 0.0),
        ("1-1", "0", 0.0),
        ("2–1", "1", 0.0),
        ("1914-1918", "-4", 0.0),
        ("555-1234", "-679", 0.0),
        ("2-1", "2-1", 1.0),
        ("2-1", "2–1", 1.0),
        ("2–1", "\\boxed{2-1}", 1.0),
        ("$2-1$", "1", 1.0),
        ("2 - 1", "1", 1.0),
        ("-3", "-3", 1.0),
        ("3", "5-2", 1.0),
    ] {
        let text = format!("The answer is {stated}.");
        let score = MathsScorer::default().grade(&text, &json!(expected)).unwrap();
        assert_eq!(score.value, due, "{expected}: {text}");
    }
}

#[test]
fn equivalent_math_answers_are_accepted() {
    for (a, b) in [
        ("\\frac{1}{2}", "0.5"),
        ("\\frac12", "1/2"),
        ("\\dfrac{3}{4}", "3/4"),
        ("1\\frac{1}{2}", "1.5"),
        ("1 1/2", "3/2"),
        ("1,234", "1234"),
        ("1{,}234", "1234"),
        ("12{,}345{,}678", "12345678"),
        ("1.2\\times10^{3}", "1200"),
        ("1.5e3", "1500"),
        ("2^{10}", "1024"),
        ("2^100", "1267650600228229401496703205376"),
        ("0.333333", "\\frac{1}{3}"),
        ("0.\\overline{3}", "1/3"),
        ("0.1\\overline{6}", "1/6"),
        ("\\sqrt{12}", "2\\sqrt{3}"),
        ("\\frac{1}{\\sqrt2}", "\\frac{\\sqrt2}{2}"),
        ("\\frac{1}{1+\\sqrt{2}}", "\\sqrt2 - 1"),
        ("\\sqrt{2}\\sqrt3", "\\sqrt6"),
        ("\\sqrt{3+2\\sqrt2}", "1+\\sqrt2"),
        ("\\sqrt[3]{-8}", "-2"),
        ("\\sqrt[3]{16}", "2\\sqrt[3]{2}"),
        ("2\\pi", "\\pi \\cdot 2"),
        ("2π", "2\\pi"),
        ("\\frac{\\pi}{2}", "0.5\\pi"),
        ("3.141593", "\\pi"),
        ("e^{2}", "e \\cdot e"),
        ("(x+1)^2", "x^2+2x+1"),
        ("(x-1)(x+1)", "x^2-1"),
        ("\\frac{x^2-1}{x-1}", "x+1"),
        ("x_1 + x_2", "x_{2}+x_{1}"),
        ("\\sin^2 x + \\cos^2 x", "1"),
        ("\\sin 2x", "2\\sin x\\cos x"),
        ("\\log_2 8", "3"),
        ("\\ln(e^3)", "3"),
        ("\\sin 30^\\circ", "1/2"),
        ("2^{x+1}", "2\\cdot 2^x"),
        ("5!", "120"),
        ("\\binom{5}{2}", "10"),
        ("|-5|", "5"),
        ("\\lfloor 3.7 \\rfloor", "3"),
        ("3i+4", "4+3i"),
        ("(1+i)^2", "2i"),
        ("50\\%", "0.5"),
        ("50\\%", "50"),
        ("50 percent", "50%"),
        ("5\\text{ cm}", "5"),
        ("5 cm^2", "5"),
        ("9.8\\ \\frac{\\text{m}}{\\text{s}^2}", "9.8"),
        ("60 \\text{ miles}/\\text{hour}", "60"),
        ("90^\\circ", "90"),
        ("90^{\\circ}", "90 degrees"),
        ("\\$18.50", "18.5"),
        ("about 72 clips", "72"),
        ("2516_8", "2516_{8}"),
        ("1\\pm\\sqrt2", "1+\\sqrt2, 1-\\sqrt2"),
        ("\\pm 3", "3, -3"),
        ("x = \\pm 3", "x=-3 \\text{ or } x=3"),
        ("2, 1", "1,2"),
        ("1, 2, and 3", "3,2,1"),
        ("\\{1,2\\}", "\\{2, 1.0\\}"),
        ("\\{5\\}", "5"),
        ("\\{1,1,2\\}", "\\{1,2\\}"),
        ("90^\\circ\\text{C}", "90"),
        ("25°C", "25"),
        ("(1,2)", "( 1 , \\frac{4}{2} )"),
        ("\\left(1, \\frac{\\pi}{2}\\right)", "(1,\\pi/2)"),
        ("[0,1)", "\\left[0, 1\\right)"),
        ("x \\in [0,1)", "[0,1)"),
        ("0 \\le x < 1", "[0,1)"),
        ("x>3", "(3,\\infty)"),
        ("3<x", "x>3"),
        ("x<1 \\text{ or } x>3", "(-\\infty,1)\\cup(3,\\infty)"),
        ("(3,\\infty)\\cup(-\\infty,1)", "(-\\infty,1)\\cup(3,\\infty)"),
        ("x<1, x>3", "(-\\infty,1)\\cup(3,\\infty)"),
        ("x>1, x<3", "(1,3)"),
        ("x \\ne 2", "(-\\infty,2)\\cup(2,\\infty)"),
        (
            "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
            "\\begin{bmatrix} 1 & 2 \\\\ 3 & \\frac{8}{2} \\end{bmatrix}",
        ),
        ("x = 3", "3"),
        ("f(x) = 2x+1", "2x + 1"),
        ("f(2) = 3", "3"),
        ("f(-2) = 3", "3"),
        ("|AB| = 3", "3"),
        ("\\sqrt{2} \\approx 1.414", "\\sqrt{2}"),
        ("\\sqrt{2} \\approx 1.414", "1.414"),
        ("x = \\frac{1}{3} \\approx 0.333", "\\frac{1}{3}"),
        ("x = \\frac{2}{3} \\approx 0.667", "\\frac{2}{3}"),
        ("x \\approx 0.333", "0.333"),
        ("x = 2 + 1 = 3", "3"),
        ("2 + 3 = 5", "5"),
        ("y=2x+1", "2y=4x+2"),
        ("y = 2x + 1", "y - 2x - 1 = 0"),
        ("-2x<4", "x>-2"),
        ("(B)", "B"),
        ("\\text{(B)}", "B"),
        ("\\textbf{(B)}\\ 5", "B"),
        ("\\textbf{(B)}\\ 5", "5"),
        ("B.", "(B)"),
        ("\\text{even}", "even"),
        ("\\text{Monday}", "monday"),
        ("\\text{no}", "no"),
        ("all real numbers", "\\text{All real numbers}"),
        ("3:4", "\\frac34"),
        ("1,\\!000", "1000"),
        ("$5$", "5"),
        ("-\\frac{1}{2}", "\\frac{-1}{2}"),
        ("\\dfrac{-1}{-2}", ".5"),
        ("x^{-1}", "\\frac1x"),
        ("6\\tfrac{2}{3}", "20/3"),
        ("\\frac{9}{4}\\text{ square units}", "2.25"),
        ("12\\ \\mathrm{m/s}", "12"),
        ("9.8\\text{ m/s}^2", "9.8"),
        ("60\\text{ km/h}", "60"),
        ("\\text{5 m}", "5"),
        ("3\\text{ hours }20\\text{ minutes}", "3 hours 20 minutes"),
        ("1.5 x 10^3", "1500"),
        ("6.0 X 10^{-2}", "0.06"),
        ("]-1,1[", "(-1,1)"),
        ("\\left]0; 2\\right]", "(0,2]"),
        ("[0,2[", "[0,2)"),
        ("\\emptyset", "\\varnothing"),
        ("∅", "\\{\\}"),
        ("= \\frac34", "0.75"),
        ("\\approx 0.75", "3/4"),
        ("¹⁄₃", "\\frac13"),
        ("①②", "1, 2"),
        ("\\sum_{k=-2}^{3} k", "3"),
        ("[0,2]\\cap(1,3)", "(1,2]"),
        ("[0,2)\\cap[0,2]", "[0,2)"),
        ("|x-1|<3", "(-2,4)"),
        ("|x-1|\\ge 3", "(-\\infty,-2]\\cup[4,\\infty)"),
        ("\\langle 1, 2\\rangle", "(1,2)"),
        ("A = \\{1,2\\}", "\\{1,2\\}"),
        ("p = 50\\%", "\\frac12"),
        ("(a,b) = (1,2)", "(1,2)"),
        ("(b,a) = (1,2)", "a=2, b=1"),
        ("-(1\\pm\\sqrt2)", "-1-\\sqrt2, -1+\\sqrt2"),
        ("(1\\pm\\sqrt2)^2", "3+2\\sqrt2, 3-2\\sqrt2"),
        ("\\frac{1\\pm\\sqrt5}{2}", "\\frac{1+\\sqrt5}{2}, \\frac{1-\\sqrt5}{2}"),
    ] {
        assert!(
            same(a, b),
            "{a}   {b}\n{:?}\n{:?}",
            parse_interpretations(a),
            parse_interpretations(b)
        );
    }
}

#[test]
fn different_math_answers_are_rejected() {
    for (a, b) in [
        ("1/2", "1/3"),
        ("0.33", "\\frac13"),
        ("2", "-2"),
        ("\\sqrt2", "1.41"),
        ("\\sqrt{2}", "\\sqrt{3}"),
        ("x+1", "y+1"),
        ("x^2+2x+1", "x^2+2x"),
        ("2^{100}", "1267650600228229401496703205377"),
        // The difference is a multiple of the prime of the field.
        ("72", "2305843009213693559"),
        ("\\sqrt{x^2}", "x"),
        ("\\sin x", "\\cos x"),
        ("(1,2)", "(2,1)"),
        ("(1,2)", "[1,2]"),
        ("(1,2)", "(1,2,3)"),
        ("\\{1,2\\}", "\\{1,2,3\\}"),
        ("1,1,2", "1,2,2"),
        ("1,2", "12"),
        ("[0,1)", "(0,1]"),
        ("x>3", "x<3"),
        ("x>3", "x\\ge3"),
        ("-2x<4", "x<-2"),
        ("x=1", "y=1"),
        ("x=1", "x=2"),
        ("y=2x+1", "y=2x-1"),
        ("3x = 9", "9"),
        ("x/3 = 9", "9"),
        ("x \\cdot 3 = 9", "9"),
        ("x = \\frac{1}{3} = 0.333", "0.333333"),
        ("\\frac{1}{3} = 0.333", "\\frac{1}{4}"),
        ("x \\approx 0.333", "x"),
        ("(-\\infty,1)\\cup(3,\\infty)", "(-\\infty,1)"),
        ("\\infty", "-\\infty"),
        ("\\begin{pmatrix}1&2\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
        ("(B)", "C"),
        ("\\text{even}", "odd"),
        ("6.02e-34", "1.05e-34"),
        ("5 feet 3 inches", "15"),
        ("]0,1[", "[0,1]"),
        ("|x-1|<3", "|x-1|>3"),
        ("|x|<-3", "(-3,3)"),
        ("(a,b) = (1,2)", "(a,b) = (2,1)"),
        ("(b,a) = (1,2)", "a=1, b=2"),
        ("(a,b) = (1,2,3)", "(1,2)"),
        // 5 thousand, or 5 kelvins.
        ("5\\text{K}", "5"),
        ("3 x", "3"),
        ("\\emptyset", "0"),
        ("", "0"),
        ("5", ""),
        ("9^{9^{9^9}}", "9^{9^{9^8}}"),
    ] {
        assert!(
            !same(a, b),
            "{a}   {b}\n{:?}\n{:?}",
            parse_interpretations(a),
            parse_interpretations(b)
        );
    }
}

#[test]
fn scorer_options_control_comparison() {
    let units = MathsScorer { units: Units::Compare, ..MathsScorer::default() };
    assert!(
        units.is_same("5\\text{ cm}", "5 cm")
            && !units.is_same("5 cm", "5 km")
            && !units.is_same("5 cm", "5")
            && units.is_same("9.8\\text{ m s}^{-2}", "9.8\\text{ m/s}^2")
            && !units.is_same("9.8\\text{ m s}^{-2}", "9.8\\text{ m s}^2")
    );
    let percent = MathsScorer { percent: Percent::Value, ..MathsScorer::default() };
    assert!(percent.is_same("50\\%", "1/2") && !percent.is_same("50\\%", "50"));
    let exact = MathsScorer { decimals: 0, ..MathsScorer::default() };
    assert!(exact.is_same("0.5", "1/2") && !exact.is_same("0.333333", "1/3"));
    let wrong = MathsScorer { decimals: 13, ..MathsScorer::default() };
    assert!(wrong.check().unwrap_err().to_string().contains("decimals = 13"));
}

#[test]
fn grade_extracts_and_compares_answer() {
    let scorer = MathsScorer::default();
    let of = |text: &str, expected: &Value| scorer.grade(text, expected).unwrap();
    assert_eq!(of("so \\boxed{\\frac{2}{4}}", &json!("$\\frac12$")).value, 1.0);
    assert_eq!(of("so \\boxed{72}", &json!("48+24 = 72\n#### 72")).value, 1.0);
    assert_eq!(of("it is 27", &json!(27.0)).value, 1.0);
    assert_eq!(of("\\boxed{3}", &json!(["2", "3"])).value, 1.0);
    assert_eq!(
        of("\\boxed{4}", &json!(["2", "3"])),
        Score { value: 0.0, extracted: Some("4".into()) }
    );
    for expected in [json!(null), json!(""), json!([]), json!({"a": 1})] {
        assert!(
            matches!(scorer.grade("1", &expected), Err(ScoreError::ExpectedText { .. })),
            "{expected}"
        );
    }
}

#[test]
fn math_answers_in_other_languages_are_compared() {
    for (expected, answer, want) in [
        ("7", "7万元", false),
        ("70000", "7万元", true),
        ("84", "7 Dutzend", true),
        ("7", "7的两倍", false),
        ("7", "über 7", false),
        ("7", "7以内", false),
        ("-7", "负7", true),
        ("7", "\\text{the 7th prime}", false),
        ("8:00 pm Friday", "8:00 am Friday", false),
        ("Friday 8:00 pm", "Sunday 8:00 pm", false),
        ("8:00 pm", "8 pm on Friday", true),
        ("7 Verlust", "7 Gewinn", false),
        ("向右7", "向左7", false),
        ("7^\\circ\\text{ north of west}", "7^\\circ\\text{ west of north}", false),
        ("6月8日", "8月6日", false),
        ("May 3", "5月3日", true),
        ("June 8", "6月8日", true),
        ("January 5", "Jan 5", true),
        ("May 3", "Mar 3", false),
        ("15:30", "15h30", true),
        ("15:30", "15.30 Uhr", true),
        ("15:30", "15.3 Uhr", false),
        ("15:75", "15h75", false),
        ("7\\text{ hours}", "7 Minuten", false),
        ("7\\text{ cm}^2", "7平方厘米", true),
        ("7\\text{ cm}^2", "7平方米", false),
        ("2 Hunde und 5 Katzen", "5 Hunde und 2 Katzen", false),
        ("\\vec{CD}", "\\vec{DC}", false),
        ("(3,4)", "y=3,x=4", false),
        ("(3,4)", "y=4,x=3", true),
        ("(-\\infty,-2)\\cup(2,\\infty)", "x<-2 \\text{ and } x>2", false),
    ] {
        assert_eq!(MathsScorer::default().is_same(expected, answer), want, "{expected} {answer}");
    }
}

#[test]
fn hostile_answers_are_graded_quickly() {
    let deep =
        |open: &str, close: &str, n: usize| format!("{}1{}", open.repeat(n), close.repeat(n));
    let started = Instant::now();
    for text in [
        deep("{", "}", 50_000),
        deep("{", "}", 1000),
        deep("(", ")", 1900),
        deep("\\{", "\\}", 900),
        deep("\\sqrt{", "}", 500),
        deep("\\frac{1}{", "}", 400),
        deep("\\text{", "}", 500),
        deep("|", "|", 1900),
        deep("\\boxed{", "}", 50_000),
        "\\boxed{".repeat(50_000),
        "\\begin{pmatrix}".repeat(200),
        "9^".repeat(1900) + "9",
        "-".repeat(3900) + "1",
        "1*-".repeat(1300) + "1",
        "\\pm 1".repeat(700),
        "1,".repeat(1900),
        "\\sin".repeat(900),
        "x!".to_owned() + &"!".repeat(3900),
        "x''".to_owned() + &"'".repeat(3900),
        "9^{9^{9^9}}".into(),
        "9^9^9^9".into(),
        "(10^{10^{10}})!".into(),
        "\\binom{10^{17}}{2000}".into(),
        "\\sqrt{170141183460469231731687303715884105727}".into(),
        "1e9999999999".into(),
        "9".repeat(4000),
        "0.".to_owned() + &"3".repeat(3900),
        "\u{202e}\u{0}\u{ffff}".into(),
        "\\".into(),
        "\\\\[".into(),
    ] {
        for other in ["1", "\\sqrt{2}+x", text.as_str()] {
            MathsScorer::default().is_same(&text, other);
            MathsScorer::default().grade(&text, &"1".into()).unwrap();
        }
    }
    // Long texts without a box.
    for part in [
        "<", "( ", "1. ", "a. ", "\\( ", "$ ", "$1 ", "1 ", "or 1 ", "x = ", "<b", "1 - ", "**",
        "(1, ",
    ] {
        let text = format!("The answer is {}", part.repeat(60_000));
        MathsScorer::default().grade(&text, &"1".into()).unwrap();
        MathsScorer::default().grade(&text[14..], &"1".into()).unwrap();
    }
    let took = started.elapsed();
    assert!(took < Duration::from_secs(20), "{took:?}");
}

proptest! {
    #[test]
    fn math_equivalence_is_symmetric_and_reflexive(
        a in "([-0-9.,/^{}()\\[\\]|!%$=<>+*_ \
              xyieAB±∞]|\\\\\\\\(frac|sqrt|pm|cup|in|pi|text|left|right|log|sin|infty|circ|\\{|\\}|\\\\\\\\)){0,30}",
        b in "([-0-9.,/^{}()|!%=<>+ xy]|\\\\\\\\(frac|sqrt|pi)){0,20}",
    ) {
        let scorer = MathsScorer::default();
        prop_assert_eq!(scorer.is_same(&a, &b), scorer.is_same(&b, &a));
        let empty = super::strip_formula_markup(&a).is_empty();
        prop_assert!(empty || scorer.is_same(&a, &a));
        scorer.grade(&a, &"1".into()).unwrap();
    }

    #[test]
    fn math_comparison_never_panics(text: String) {
        MathsScorer::default().is_same(&text, "1");
    }

    #[test]
    fn product_equals_its_expansion(a in -20i64..20, b in -20i64..20, c in 1i64..9) {
        let product = format!("{c}(x{a:+})(x{b:+})");
        let expanded = format!("{c}x^2 {:+}x {:+}", c * (a + b), c * a * b);
        prop_assert!(same(&product, &expanded), "{} {}", product, expanded);
        let other = format!("{c}x^2 {:+}x {:+}", c * (a + b), c * a * b + 1);
        prop_assert!(!same(&product, &other));
    }
}
