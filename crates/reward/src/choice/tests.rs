//! Tests of `choice`.

use proptest::prelude::*;
use serde_json::json;

use super::*;

fn texts(all: &[&str]) -> ChoiceOptions {
    ChoiceOptions {
        texts: all.iter().map(|text| (*text).to_owned()).collect(),
        ..ChoiceOptions::default()
    }
}

#[test]
fn chosen_option_is_found_by_letter_or_text() {
    let options = texts(&["a dog", "a cat", "the fish", "none"]);
    for (text, want) in [
        ("The answer is (B).", Some("B")),
        ("the answer is B", Some("B")),
        ("Answer: **C**", Some("C")),
        ("so \\boxed{D}, not A", Some("D")),
        ("so \\boxed{\\text{(D)}}", Some("D")),
        ("<answer> b </answer>", Some("B")),
        ("<answer>a cat</answer>", Some("a cat")),
        ("It cannot be (A), so it is (C), I think", Some("C")),
        ("Reasons.\nB) a cat", Some("B")),
        ("Reasons.\nB", Some("B")),
        ("The final answer is: the fish", Some("the fish")),
        ("A dog barks", None),
        ("The answer is option C.", Some("C")),
        ("The answer is (Z)", None),
        ("The correct answer is B because A is wrong.", Some("B")),
        ("The correct option is B.", Some("B")),
        ("Reasons.\nOption A is correct.", Some("A")),
        ("Reasons.\nOption D is not correct.", None),
        ("\\boxed{\\mathbf{B}}", Some("B")),
        ("Reasons.\nB - Paris", Some("B")),
        ("\\boxed{7}", None),
        ("", None),
    ] {
        let score = ChoiceScorer::default().grade(text, &json!("B"), &options).unwrap();
        assert_eq!(score.extracted.as_deref(), want, "{text}");
    }
}

#[test]
fn choice_grades_match_handwritten_pairs() {
    let scorer = ChoiceScorer { options: 10 };
    let mut wrong = Vec::new();
    for line in include_str!("../../tests/data/choice_pairs.jsonl").lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        let options = ChoiceOptions::from_task(&row);
        let score = scorer.grade(row["text"].as_str().unwrap(), &row["answer"], &options).unwrap();
        if Some(score.value) != row["right"].as_f64() {
            wrong.push(format!("{line}  got {} for {:?}", score.value, score.extracted));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn last_stated_option_is_graded() {
    let options = texts(&["11 cm", "cheesecake", "-84", "Paris"]);
    let mut failures = Vec::new();
    for (text, want) in [
        ("We get \\boxed{42}.\nAnswer: D", Some("D")),
        ("The answer is A. No: \\boxed{D}", Some("D")),
        ("\\boxed{A} is wrong. \\boxed{B}", Some("B")),
        ("\\boxed{A} or \\boxed{B}", None),
        ("It is not $\\boxed{A}$.\nAnswer: C", Some("C")),
        ("\\boxed{84}", None),
        ("\\boxed{-84}", Some("-84")),
        ("\\boxed{1.1\\text{ cm}}", None),
        ("\\boxed{11\\text{ cm}}", Some("11{ cm}")),
        ("<answer>\nIt fits.\nThe answer is B.\n</answer>", Some("B")),
        ("Answer: B\n\nThe answer is not A because it is too small.", Some("B")),
        ("B) cheesecake\n\nExplanation: A is too small.", Some("B")),
        ("A) 11 cm\nB) cheesecake\nC) -84\nD) Paris", None),
        ("A) 11 cm\nB) cheesecake\n\nThe correct answer is:\n\nB) cheesecake", Some("B")),
        ("Which option is:\nA) 11 cm\nB) cheesecake", None),
        ("(A) 11 cm (B) cheesecake (C) -84 (D) Paris", None),
        ("I was going to choose A, but the answer is B.", Some("B")),
        ("At first I thought the answer is A.", None),
        ("I would have said the answer is A.", None),
        ("Many students pick A.", None),
        ("The answer is not A but B.", Some("B")),
        ("The answer is B, not A.", Some("B")),
        ("The answer is A (not B).", Some("A")),
        ("The answer is B and it fits.", Some("B")),
        ("Answer: B C", None),
        ("Answer: (A), (C)", None),
        ("Answer: A, C, and D", None),
        ("Option B and C are correct.", None),
        ("(B) and (C) are correct.", None),
        ("The answer is c, the speed of light.", None),
        ("Statement B is correct.", None),
        ("Vitamin B is right.", None),
        ("Vitamin D is best taken daily.", None),
        ("The ball leaves A, and hits B.", None),
        ("**A**\ntoo small\n**B**\nfits\nso so", None),
        ("A\nB\nC\nD", None),
        ("The answer is Paris, since it fits.", Some("Paris")),
        ("The answer is not Paris.", None),
        ("The answer is Paris or cheesecake.", None),
        ("There is no doubt that the answer is B.", Some("B")),
        ("It is not A, so the answer is B.", Some("B")),
        ("None of A, B is correct.", None),
        ("I hope it is correct: the final answer is (B).", Some("B")),
        ("If A is correct, nothing fits.", None),
        ("Answer: B\nConfidence: 0.9", Some("B")),
        ("Wenn A stimmt, ist die Antwort nicht D. Die Antwort ist B.", Some("B")),
        ("La respuesta no es la A.", None),
        ("答案不是A。", None),
        ("不选A，选择B。", Some("B")),
        ("B是正确的。", Some("B")),
        ("A不是正确的。", None),
        ("La bonne réponse est donc B.", Some("B")),
        ("सही विकल्प B है।", Some("B")),
        ("{\"final_answer\": \"B\"}", Some("B")),
        ("{\"wrong_answer\": \"B\"}", None),
        ("The correct one is B.", Some("B")),
        ("I think B is correct", Some("B")),
        ("A would be the correct answer, but the sum is odd.", None),
        ("Answer => B", Some("B")),
        ("<answer>A or B</answer>\nAnswer: C", Some("C")),
        ("Answer: B (or C)", None),
        ("Answer: B?C", None),
        ("The answer is C, H and O.", None),
        ("The answer is B, I think.", Some("B")),
        ("\\boxed{A\\sin x}", None),
        ("不应选B。", None),
        ("Si la réponse est B, rien ne va.", None),
        ("I refuse to choose B.", None),
        ("(B) fails.", None),
        ("The answer is B. No, it should be C after all.", None),
        ("The answer is B. Wait, that's wrong.", None),
        ("Answer: B\n\nThis is incorrect.", None),
        ("Answer: B\n\nBut B is wrong.", None),
        ("Answer: B. Correction: C.", None),
        ("The answer is B, which is false.", None),
        ("The answer is B. No other option fits.", Some("B")),
        ("The answer is B. C is wrong. This is not about D.", Some("B")),
        ("The answer is B as well as C.", None),
        ("Had it been longer, the answer would be B.", None),
        ("Nobody thinks the answer is B.", None),
        ("Shall I choose B?", None),
        ("B. No.", None),
        ("B: false", None),
        ("B) cheesecake is wrong", None),
        ("The chance is P(B).", None),
        ("See figure (B).", None),
        ("We tried (B).", None),
        ("The capital is Paris (D).", Some("D")),
        ("The answer, then, is B.", Some("B")),
        ("Ans: B", Some("B")),
        ("It can only be B.", Some("B")),
        ("【答案】B", Some("B")),
        ("答案是B，不是A", Some("B")),
        ("The answer is −84.", Some("−84.")),
        // Retracted answers.
        ("\\boxed{B}\n\nOops, that is wrong.", None),
        ("\\boxed{B} cannot be right.", None),
        ("\\boxed{B}? Nope.", None),
        ("\\boxed{B}\n\nHold on: D.", None),
        ("<answer>B</answer>\nI was wrong; the answer is A.", None),
        ("\\boxed{B}\n\nSo the answer is B.", Some("B")),
        ("\\boxed{B}\n\nWait, I check: it is 5. B is correct.", Some("B")),
        ("\\boxed{B}\n\nThe answer is B. No, D.", None),
        ("The answer is B. Oh, D.", None),
        ("Answer: B. I now think D.", None),
        ("Answer: B\n\nRevision: D", None),
        ("Answer: B, no wait, D.", None),
        ("The answer is B. This can't be true.", None),
        ("Die Antwort ist B. Nein, D.", None),
        ("答案是B。不对，是D。", None),
        ("The answer is B. It boils at 5, and A is too low.", Some("B")),
        ("The answer is B, although A is too broad.", Some("B")),
        // Supposed or quoted answers.
        ("Suppose \\boxed{B}.", None),
        ("The template is \\boxed{B}", None),
        ("If x = 2, it fits, so \\boxed{B}", Some("B")),
        ("The popular answer is B.", None),
        ("The least plausible answer is B.", None),
        ("My friend says: the answer is B.", None),
        ("He picks B.", None),
        ("오답: B", None),
        // Two options.
        ("Answer: B (cheesecake) or D (Paris)", None),
        ("The answer is B for red and D for blue.", None),
        ("The answer is B. So is D.", None),
        ("Answer:\nB\nD", None),
        ("答案：B、D", None),
        ("The answer is B - D", None),
        // Labels that start a name, or are followed by the text of another option.
        ("The answer is B. Brown", None),
        ("Answer: B. Paris", None),
        ("The answer is Paris (B).", None),
        ("Answer: B. Cheesecake", Some("B")),
        ("The point is (B).", None),
        ("\\boxed{\\bf B}", Some("B")),
        ("\\boxed{\\text{ B }}", Some("B")),
        ("<ANSWER>B</ANSWER>", Some("B")),
        ("#### B", Some("B")),
        ("The answer is cheesecake, not Paris.", Some("cheesecake")),
        ("The answer is B; A and D are wrong.", Some("B")),
        ("B选项正确。", Some("B")),
        ("The answer is D*", Some("D")),
        ("(b) 3", None),
        ("選択肢Bが正解です。", Some("B")),
        ("B ist richtig.", Some("B")),
        ("Правильный вариант: B.", Some("B")),
    ] {
        let score = ChoiceScorer::default().grade(text, &json!("B"), &options).unwrap();
        if score.extracted.as_deref() != want {
            failures.push((text, score.extracted));
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn reported_and_conditional_options_are_not_graded() {
    let options = texts(&["iron", "gold", "zinc", "lead"]);
    let mut failures = Vec::new();
    for (text, want) in [
        ("A hasty student would say the answer is B.", None),
        ("You would think the answer is B.", None),
        ("The teacher suggests that the answer is B.", None),
        ("I would say that the answer is B.", Some("B")),
        ("This suggests that the answer is B.", Some("B")),
        ("The answer is D. One would think that the answer is B, but it is soft.", Some("D")),
        ("There is no evidence that the answer is B.", None),
        ("Imagine the answer is B.", None),
        ("We have to prove the answer is B.", None),
        ("The format is \"Answer: B\".", None),
        ("Without the oxide the answer would be B.", None),
        ("With another metal, the answer is B.", None),
        ("It looks like the answer is B, but this ignores the oxide.", None),
        ("The answer is B. Hmm, D is better.", None),
        ("The answer is B (60%), D (40%)", None),
        ("The answer is B, along with D.", None),
        ("\\boxed{B}\n\nThe correct answer is actually D.", None),
        ("<answer>B</answer> Sorry, I meant D.", None),
        ("I would not choose \\boxed{B}.", None),
        ("Answer: B\nLead", None),
        ("Answer: B\nGold", Some("B")),
        ("La respuesta es A o B.", None),
        ("La risposta è A o B.", None),
        ("La respuesta es B. Perdón, es D.", None),
        ("答案是B。等等，应该是D。", None),
        ("假设答案是B。", None),
        ("有人认为答案是B。", None),
        ("Angenommen, die Antwort ist B.", None),
        ("La respuesta no es D, sino B.", Some("B")),
        ("答案不是D，而是B。", Some("B")),
        ("La réponse est l'option B.", Some("B")),
        ("L'option correcte est B.", Some("B")),
        ("Antwort B ist richtig.", Some("B")),
        ("Die Lösung ist B.", Some("B")),
        ("正确答案是：**B. 金**", Some("B")),
        ("The answer is, I believe, B.", Some("B")),
        ("The answer is of course B.", Some("B")),
        ("The answer can only be B.", Some("B")),
        ("The answer (see above) is B.", Some("B")),
        ("The solution is B.", Some("B")),
        ("The correct statement is B.", Some("B")),
        ("Response: B", Some("B")),
        ("Clearly B.", Some("B")),
        ("So B it is.", Some("B")),
        ("Answer: B ✓", Some("B")),
        ("Answer: B 🙂", Some("B")),
        ("B is true.", Some("B")),
        ("A, C and D are false. B is true.", Some("B")),
        ("A is true. B is true.", None),
        ("<answer>Gold (B)</answer>", Some("B")),
        ("The answer is B. Is D possible? No, it is soft.", Some("B")),
        ("The answer is B. Is it certain? No.", None),
    ] {
        let score = ChoiceScorer::default().grade(text, &json!("B"), &options).unwrap();
        if score.extracted.as_deref() != want {
            failures.push((text, score.extracted));
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn option_called_false_answers_question_for_false() {
    let named = |question: &str, text: &str| {
        named::find_named_option(
            text,
            4,
            &ChoiceOptions::from_task(&json!({ "question": question, "row": {} })),
        )
        .is_some()
    };
    for (text, taken_back) in [
        ("Answer: B\n\nB is false, since iron is a metal.", false),
        ("The answer is B. This is incorrect because iron is a metal.", false),
        ("The answer is B. No, C.", true),
    ] {
        assert_eq!(named("Which statement is FALSE?", text), !taken_back, "{text}");
        assert!(!named("Which statement holds?", text), "{text}");
    }
    assert!(!named("Which claim is false?", "B is correct."));
    assert!(named("Which claim is false?", "B is the correct answer."));
    assert!(named("Which claim is false?", "A and C hold. B is false."));
    assert!(named("Which claim is false?", "The false claim is B."));
    assert!(named("Which claim is false?", "B is the false claim."));
    assert!(!named("Which claim holds?", "The false claim is B."));
    assert!(!named("Which of these is NOT true?", "B is true."));
}

#[test]
fn long_options_are_compared_in_full() {
    let lead = "the water in the pot boils at a lower temperature than it does at the level \
                    of the sea "
        .repeat(2);
    let options = texts(&[
        &format!("{lead}on the mountain that is named in the question"),
        &format!("{lead}in the valley that is named in the question"),
    ]);
    for (at, option) in options.texts.iter().enumerate() {
        for completion in [format!("**{option}**"), format!("The answer is **{option}**.")] {
            let score = ChoiceScorer::default().grade(&completion, &json!(at), &options).unwrap();
            assert_eq!(score.value, 1.0, "{completion}");
        }
    }
}

#[test]
fn option_text_is_not_read_as_letter() {
    let named = |all: &[&str], text: &str| {
        let choices = json!({ "row": { "choices": all } });
        named::find_named_option(text, all.len(), &ChoiceOptions::from_task(&choices))
            .map(|(number, _)| number)
    };
    for (all, text, want) in [
        (&["D. pulex", "C. elegans", "D. rerio", "yeast"][..], "The answer is D. rerio.", Some(2)),
        (&["D. pulex", "C. elegans", "D. rerio", "yeast"], "C. elegans", Some(1)),
        (&["C", "C++", "C#", "D"], "The answer is C++.", Some(1)),
        (&["B+", "A+", "B-", "O"], "The answer is B-.", Some(2)),
        (&["11/2", "3/2", "2", "1"], "The answer is 1 1/2.", None),
        (&["5 kg", "5 g"], "The answer is 5kg.", Some(0)),
        (&["4000", "400"], "The answer is 4,000.", Some(0)),
        (&["A) red", "B) green"], "The answer is green.", Some(1)),
    ] {
        assert_eq!(named(all, text), want, "{text}");
    }
    // Numeric labels.
    let choices = json!({ "text": ["red", "green", "blue"], "label": ["1", "2", "3"] });
    let options = ChoiceOptions::from_task(&json!({ "row": { "choices": choices } }));
    for (text, want) in [
        ("Answer: 2", Some(1)),
        ("(2) green", Some(1)),
        ("The answer is 2 or 3", None),
        ("The answer is 2.5", None),
        ("2. Then we add.", None),
        ("2 colors are left.", None),
    ] {
        assert_eq!(
            named::find_named_option(text, 3, &options).map(|(number, _)| number),
            want,
            "{text}"
        );
    }
}

#[test]
fn expected_option_accepts_letter_index_or_text() {
    let options = texts(&["red", "green", "blue"]);
    for expected in [json!("B"), json!("(b)"), json!(1), json!("1"), json!("Green")] {
        let grade =
            |text: &str| ChoiceScorer::default().grade(text, &expected, &options).unwrap().value;
        assert_eq!((grade("(B)"), grade("green"), grade("(C)")), (1.0, 1.0, 0.0), "{expected}");
    }
    for expected in [json!("D"), json!(3), json!("purple"), json!(null)] {
        let error = ChoiceScorer::default().grade("", &expected, &options).unwrap_err();
        assert!(error.to_string().contains("not one of the 3 options"), "{error}");
    }
    let wrong = ChoiceScorer { options: 1 };
    assert!(wrong.check().unwrap_err().to_string().contains("options = 1"));
}

#[test]
fn numeric_labels_select_expected_option() {
    let choices = json!({ "text": ["10 g", "2 kg", "3"], "label": ["1", "2", "3"] });
    let options = ChoiceOptions::from_task(&json!({ "row": { "choices": choices } }));
    for (text, want) in [
        ("The answer is (2)", 1.0),
        ("The answer is 2.", 1.0),
        // Only the labels name options.
        ("The answer is B", 0.0),
        // The text of the second option, rather than a label.
        ("The answer is 2 kg", 1.0),
        ("The answer is 1", 0.0),
        ("The answer is 4", 0.0),
    ] {
        assert_eq!(
            ChoiceScorer::default().grade(text, &json!(2), &options).unwrap().value,
            want,
            "{text}"
        );
    }
    // Letters are labels in any order.
    let letters = json!({ "row": { "choices": { "text": ["x", "y"], "label": ["A", "B"] } } });
    let score = ChoiceScorer::default()
        .grade("b", &json!("B"), &ChoiceOptions::from_task(&letters))
        .unwrap();
    assert_eq!(score.value, 1.0);
}

#[test]
fn options_parse_dataset_formats() {
    for task in [
        json!({"row": {"choices": ["x", "y"]}}),
        json!({"row": {"options": {"B": "y", "A": "x"}}}),
        json!({"row": {"choices": {"label": ["A", "B"], "text": ["x", "y"]}}}),
    ] {
        assert_eq!(ChoiceOptions::from_task(&task).texts, ["x", "y"], "{task}");
    }
}

#[test]
fn choice_grading_time_is_linear_in_line_length() {
    let options = texts(&["11 cm", "cheesecake", "-84", "Paris"]);
    let started = std::time::Instant::now();
    for text in [
        "answer ",
        "the answer is B ",
        "The answer is B. ",
        "\\boxed{42} ",
        "A is correct ",
        "I choose B ",
        "answer: ",
        "it would be if the answer would be B ",
        "<answer>5</answer>",
        "(B) ",
        "not B but ",
        "B or ",
        "B\n",
    ] {
        ChoiceScorer::default()
            .grade(&text.repeat(10_000 / text.len()), &json!("B"), &options)
            .unwrap();
    }
    assert!(started.elapsed() < std::time::Duration::from_secs(20), "{:?}", started.elapsed());
}

proptest! {
    #[test]
    fn choice_grading_never_panics(text: String) {
        ChoiceScorer::default().grade(&text, &json!("A"), &texts(&["é"])).unwrap();
    }
}
