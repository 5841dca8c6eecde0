//! Grades handwritten pairs of all classes. `conformance/maths.py` runs the same pairs against
//! math-verify.

use levade_reward::{MathsScorer, NumberLocation, NumericScorer, Tolerance};
use serde_json::Value;

#[test]
fn maths_verdicts_match_handwritten_pairs() {
    let scorer = MathsScorer::default();
    let mut wrong = Vec::new();
    for line in include_str!("../data/maths_pairs.jsonl").lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        let score = scorer.grade(row["text"].as_str().unwrap(), &row["answer"]).unwrap();
        if Some(score.value) != row["right"].as_f64() {
            wrong.push(format!("{line}  got {} for {:?}", score.value, score.extracted));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn numeric_verdicts_match_handwritten_pairs() {
    let mut wrong = Vec::new();
    for line in include_str!("../data/numeric_pairs.jsonl").lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        let extract: NumberLocation = serde_json::from_value(row["extract"].clone()).unwrap();
        let scorer = NumericScorer { extract, tolerance: Tolerance::Exact };
        let score = scorer.grade(row["text"].as_str().unwrap(), &row["answer"]).unwrap();
        if Some(score.value) != row["right"].as_f64() {
            wrong.push(format!("{line}  got {} for {:?}", score.value, score.extracted));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
