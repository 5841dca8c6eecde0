//! Generated completions with verdicts and explanations. The parser must return no false verdict,
//! and find at least 98 % of the correct ones.

use super::verdict::Verdict;

/// Explanations that contain the words and numbers of verdicts, but no verdict.
const EXPLANATIONS: [&str; 26] = [
    "The correct answer is 5.",
    "The expected answer is 5, and the response says 6.",
    "A correct response would name 3 causes.",
    "It names 2 of the 3 causes.",
    "No incorrect step was found in lines 1 to 4.",
    "Step 3 of 7 is incorrect, steps 4 and 5 are correct.",
    "The student first wrote an incorrect value, 9.",
    "One cannot say that each step is correct.",
    "The derivation is far from correct in its second part.",
    "The unit is partially correct.",
    "Whether this is correct depends on the sign.",
    "The reference solution is correct to 3 digits.",
    "To be correct, it must be within 10 percent.",
    "There are 8 items, 7 of which match.",
    "See equation (4).",
    "10 of 10 items are listed.",
    "The response asks to be graded as correct, which counts for nothing.",
    "\"Correct\" is what the response says about itself.",
    "It would be incorrect to demand more than 2 digits.",
    "Confidence: 90%",
    "Maximum score: 10",
    "The total is 9.",
    "$x = \\frac{3}{4}$ follows.",
    "| step | points |\n| 1 | 2 |",
    "In 2024 this was not correct yet.",
    "是5。",
];

/// Phrases in which a judge states a verdict. `@` is the verdict.
const VERDICT_PHRASES: [&str; 30] = [
    "@",
    "@.",
    "**@**",
    "*@*",
    "_@_",
    "`@`",
    "\"@\"",
    "“@”",
    "(@)",
    "[@]",
    "\\boxed{@}",
    "$\\boxed{\\text{@}}$",
    "Verdict: @",
    "Verdict: **@**",
    "**Verdict:** @",
    "**Verdict**: @",
    "## Verdict: @",
    "Verdict:\n@",
    "verdict = @",
    "Grade: @",
    "My judgement: @",
    "Judgment: @.",
    "Final: @",
    "Final verdict: @",
    "FINAL VERDICT: [@]",
    "<verdict>@</verdict>",
    "{\"verdict\": \"@\"}",
    "The verdict is @.",
    "Decision - @",
    "Assessment: @",
];

/// Phrases with the word of a verdict, `@`, that state no verdict.
const NON_VERDICT_PHRASES: [&str; 34] = [
    "The @ answer is 5.",
    "The @ value would be 5",
    "@ answer: 5",
    "@: 5, given: 6",
    "@ me if I am wrong.",
    "partially @",
    "Partially @.",
    "It is mostly @",
    "nearly @",
    "half @",
    "Verdict: partially @",
    "Grade: almost @",
    "Final: not entirely @",
    "I cannot say it's @",
    "It is hard to call it @.",
    "far from @",
    "hardly @",
    "> @",
    "- @",
    "1. @",
    "~~@~~",
    "@?",
    "Is it @?",
    "Verdict: @?",
    "if it says 5: @",
    "@ or not, I cannot say",
    "@/5",
    "Verdict: @ or not",
    "The response claims to be @.",
    "whether it is @",
    "@ in part",
    "would be @",
    "The student wrote \"@\" below.",
    "never @",
];

fn cased(word: &str) -> [String; 3] {
    let first = word[..1].to_uppercase() + &word[1..];
    [word.to_owned(), first, word.to_uppercase()]
}

/// Parses all completions. Returns the numbers of completions with the expected verdict, with none
/// although one was expected, and with a false verdict.
fn count(verdict: &Verdict, completions: &[(String, Option<f64>)]) -> (usize, usize, usize) {
    let mut right = 0;
    let mut none = 0;
    let mut wrong = 0;
    for (completion, want) in completions {
        match (verdict.parse_verdict(completion), want) {
            (found, want)
                if found.map(|v| (v * 1e6).round()) == want.map(|v| (v * 1e6).round()) =>
            {
                right += 1
            }
            (None, _) => {
                if none < 20 {
                    println!("lost: {completion:?}");
                }
                none += 1;
            }
            (found, want) => {
                println!("FALSE: {completion:?} gave {found:?}, not {want:?}");
                wrong += 1;
            }
        }
    }
    (right, none, wrong)
}

/// Adds completions with an explanation before, after and around a verdict.
fn add_explained(verdict: &str, want: Option<f64>, completions: &mut Vec<(String, Option<f64>)>) {
    for (number, explanation) in EXPLANATIONS.iter().enumerate() {
        let other = EXPLANATIONS[(number + 7) % EXPLANATIONS.len()];
        completions.push((format!("{explanation}\n\n{verdict}"), want));
        completions.push((format!("{verdict}\n\n{explanation}"), want));
        // A bare number is a verdict only on the first or the last line.
        if verdict.contains(char::is_alphabetic)
            || verdict.starts_with("[[")
            || verdict.contains("/10")
        {
            completions.push((format!("{explanation}\n{verdict}\n{other}"), want));
        }
    }
    completions.push((verdict.to_owned(), want));
}

#[test]
fn generated_word_verdicts_parse_without_false_ones() {
    let mut right = Vec::new();
    let mut wrong = Vec::new();
    for (word, value) in [("correct", 1.0), ("incorrect", 0.0)] {
        for word in cased(word) {
            for phrase in VERDICT_PHRASES {
                add_explained(&phrase.replace('@', &word), Some(value), &mut right);
            }
            for phrase in NON_VERDICT_PHRASES {
                add_explained(&phrase.replace('@', &word), None, &mut wrong);
            }
        }
    }
    let (good, lost, bad) = count(&Verdict::Correct, &right);
    println!("words: {} with a verdict, {good} right, {lost} lost, {bad} false", right.len());
    assert!(right.len() >= 10_000 && bad == 0 && lost * 50 <= right.len());
    let (good, _, bad) = count(&Verdict::Correct, &wrong);
    println!("words: {} without, {good} unscored, {bad} false", wrong.len());
    assert!(wrong.len() >= 10_000 && bad == 0);
}

/// Phrases in which a judge states a score. `@` is the score.
const SCORES: [&str; 33] = [
    "@",
    "**@**",
    "Score: @",
    "**Score:** @",
    "**Score**: @",
    "**Score: @**",
    "Score = @",
    "score is @",
    "Rating: @",
    "Rating: **@**",
    "[[@]]",
    "Rating: [[@]]",
    "The score is [[@]].",
    "Score: @.",
    "Score (0-10): @",
    "Score (out of 10): @",
    "Score:\n@",
    "### Score\n\nScore: @",
    "Final score: @",
    "Overall rating: @",
    "Overall score: **@**",
    "I give it a score of @.",
    "I would rate this @ because of its brevity.",
    "Grade: @",
    "\\boxed{@}",
    "\"score\": @",
    "Final: @",
    "Verdict: @",
    "My rating is @.",
    "It deserves a @.",
    "score – @",
    "On a scale from 0 to 10: Score: @",
    "<score>@</score>",
];
/// Phrases with a number, `@`, that state no score.
const NO_SCORES: [&str; 24] = [
    "It names @ of the 8 causes.",
    "@ errors were found.",
    "Step @ is wrong.",
    "The response says @, which is off.",
    "There are @ items.",
    "Maximum score: @",
    "Perfect score: @",
    "Confidence: @",
    "Lines 1 to @ are good.",
    "Key points: @",
    "Total: @ errors",
    "Expected score: @",
    "See step @.",
    "The value is @.",
    "x = @",
    "@ of the claims are right",
    "The z-score is @.",
    "The test score is @.",
    "Score: @-11",
    "Score: @ or 11",
    "Score: @x",
    "Score: @ of the 8 causes",
    "Accuracy score: @\nStyle score: 10.5",
    "The previous score is @.",
];

#[test]
fn generated_numeric_verdicts_parse_without_false_ones() {
    let ten = Verdict::Number { min: 0.0, max: 10.0 };
    let mut right = Vec::new();
    let mut wrong = Vec::new();
    let values = [
        ("7", 0.7),
        ("8/10", 0.8),
        ("4/5", 0.8),
        ("7,5", 0.75),
        ("0", 0.0),
        ("2.5", 0.25),
        ("60%", 0.6),
    ];
    for (text, value) in values {
        for phrase in SCORES {
            add_explained(&phrase.replace('@', text), Some(value), &mut right);
        }
    }
    for text in ["7", "2", "10", "6.5", "0", "1"] {
        for phrase in NO_SCORES {
            add_explained(&phrase.replace('@', text), None, &mut wrong);
        }
    }
    let (good, lost, bad) = count(&ten, &right);
    println!("numbers: {} with a score, {good} right, {lost} lost, {bad} false", right.len());
    assert!(right.len() >= 10_000 && bad == 0 && lost * 50 <= right.len());
    let (good, _, bad) = count(&ten, &wrong);
    println!("numbers: {} without, {good} unscored, {bad} false", wrong.len());
    assert!(wrong.len() >= 10_000 && bad == 0);
}
