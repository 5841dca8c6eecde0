//! Tests of leaks: held-out questions are found, and other questions are not.

use levade_text::Message;
use serde_json::json;

use super::*;

fn task(question: &str, answer: &str) -> Task {
    Task { question: question.into(), answer: answer.into(), ..Task::default() }
}

fn chat(turns: &[Message], answer: &str) -> Task {
    let question = turns.last().unwrap().content.to_string();
    Task { question, messages: turns.to_vec(), answer: answer.into(), ..Task::default() }
}

fn row(question: &str, answer: &str, row: serde_json::Value) -> Task {
    let serde_json::Value::Object(fields) = row else { panic!() };
    Task { row: fields.into(), ..task(question, answer) }
}

fn held_out_questions(held_tasks: &[Task], other_tasks: &[Task]) -> HeldOutQuestions {
    let held_tasks: Vec<&Task> = held_tasks.iter().collect();
    HeldOutQuestions::new(
        MatchingRule::ExactRows,
        &held_tasks,
        [held_tasks.clone(), other_tasks.iter().collect()],
    )
}

fn is_leak(held_tasks: &[Task], other: &Task) -> bool {
    held_out_questions(held_tasks, std::slice::from_ref(other)).leak(other)
}

/// A question with texts that spell it differently, and with similar texts that are other
/// questions.
const SPELLINGS: [(&str, &[&str], &[&str]); 45] = [
    (
        "What is 2+2?",
        &[
            "What is 2 + 2?",
            "what is 2+2",
            "WHAT IS 2+2 ?",
            "What is ２＋２？",
            "Ｗｈａｔ is 2+2?",
            "Calculate: What is 2+2?",
            "Question: What is 2+2?",
            "Q: What is 2+2?\nA:",
            "Q3: What is 2+2? Answer:",
            "Answer the following question:\nWhat is 2+2?",
            "Answer: What is 2+2?",
            "Problem 12. What is 2+2?",
            "3) What is 2+2?",
            "**What is 2+2?**",
            "What is $2+2$?",
            "What is \\(2 + 2\\)?",
            "\u{feff}What\u{a0}is 2\u{2009}+\u{2009}2?",
            "What is 2 + 2 =?",
            "What is 2+2?!",
            "Human: What is 2+2?\n\nAssistant:",
            "\u{ff31}: What is 2+2",
        ],
        &[
            "What is 2-2?",
            "What is 2*2?",
            "What is 22?",
            "What is 2+2+2?",
            "What is 2+3?",
            "What is -2+2?",
            "What is (2+2)^2?",
            "What is 2.2?",
            "What was 2+2?",
        ],
    ),
    (
        "Who's the king?",
        &["Who’s the king?", "who‘s the “king”", "Who's the 'king'?"],
        &["Who's the queen?"],
    ),
    (
        "What is 3 × 4?",
        &["What is 3 x 4?", "What is 3*4?", "What is 3 · 4?", "What is $3 \\times 4$?"],
        &["What is 3+4?"],
    ),
    (
        "What is ½ of 4?",
        &["What is 1/2 of 4?", "What is 1⁄2 of 4?"],
        &["What is 12 of 4?", "What is 1/3 of 4?"],
    ),
    ("What is 3½?", &["What is 3 1/2?"], &["What is 31/2?"]),
    (
        "What is 2²?",
        &["What is 2^2?", "What is 2**2?"],
        &["What is 22?", "What is 2*2?", "What is 2³?"],
    ),
    ("What is 10⁻³?", &["What is 10^-3?"], &["What is 10-3?", "What is 10^3?"]),
    (
        "Is 5 – 3 ≤ 2?",
        &["Is 5-3<=2?", "Is 5 − 3 ≤ 2 ?", "is 5 — 3 \\leq 2"],
        &["Is 5-3<2?", "Is 5-3>=2?"],
    ),
    (
        "What is 1,000 + 1?",
        &["What is 1000+1?"],
        &["What is 1,00 + 1?", "What is 1+1?", "What is 1.000+1?"],
    ),
    (
        "Who’s the king?",
        &["Who´s the king?", "Who`s the king?", "Who＇s the king"],
        &["Whos' the king?"],
    ),
    ("What is f'(x)?", &["What is f′(x)?", "what is f’(x)"], &["What is f(x)?", "What is f''(x)?"]),
    ("Where is the point A'?", &["where is the point A′"], &["Where is the point A?"]),
    (
        "Who wrote ‘Hamlet’?",
        &["Who wrote Hamlet?", "Who wrote \"Hamlet\"?", "“Who wrote «Hamlet»?”"],
        &["Who wrote Macbeth?"],
    ),
    ("What is x^{10}?", &["What is $x^{10}$?", "What is x^10?"], &["What is x10?", "What is x^1?"]),
    (
        "What is $\\frac{1}{2}$?",
        &["What is \\dfrac{1}{2}?"],
        &["What is \\frac{1}{3}?", "What is \\frac{12}{}?"],
    ),
    (
        "How far is 5 km?",
        &[
            "### Instruction:\nHow far is 5 km?\n\n### Response:",
            "**Question:** How far is 5 km?",
            "Question 1 of 9: How far is 5 km?",
        ],
        &["How far is 5 m?", "How far is 15 km?"],
    ),
    ("What happened?", &["1. What happened?", "(12) What happened?"], &["1984. What happened?"]),
    ("Is 0,123 small?", &["is 0,123 small"], &["Is 0123 small?"]),
    ("What is 5!?", &["what is 5!"], &["What is 5?"]),
    (
        "Ist das die Straße?",
        &["IST DAS DIE STRASSE?", "ist das die strasse"],
        &["Ist das die Strafe?"],
    ),
    ("How tall is 5'6\"?", &["how tall is 5′6″"], &["How tall is 5'6'?", "How tall is 56?"]),
    ("What is A:B if A = 2?", &["what is A : B if A=2"], &["What is B if A = 2?"]),
    (
        "What is 12000 + 1?",
        &[
            "What is 12\u{202f}000+1?",
            "What is 12’000 + 1?",
            "What is 12_000+1?",
            "What is $12{,}000 + 1$?",
        ],
        &["What is 12.000 + 1?", "What is 12 000 + 1?"],
    ),
    ("What is max(1,200)?", &["what is max(1, 200)"], &["What is max(1200)?"]),
    ("What is f(1,200 + 1)?", &["what is f(1200+1)"], &["What is f(1,2 + 1)?"]),
    ("What is f(2 + 1,200)?", &["what is f(2+1200)"], &["What is f(2 + 1,2)?"]),
    (
        "Who wrote Hamlet?",
        &["Who wrote _Hamlet_?", "__Who__ wrote Hamlet?"],
        &["Who wrote_Hamlet?"],
    ),
    ("What is 2 ** 3?", &["What is 2**3?", "What is 2^3?"], &["What is 2 3?", "What is 23?"]),
    ("Convert 101₂.", &["Convert 101_2.", "Convert $101_{2}$."], &["Convert 1012."]),
    ("What is $2^{34}$?", &["What is 2^34?"], &["What is $2^{3}4$?"]),
    ("What is $HOME?", &["what is $HOME"], &["What is HOME?"]),
    ("What is 3 - 5?", &["what is 3&minus;5"], &["- 3 - 5?"]),
    ("3 + 5?", &["3+5"], &["- 3 + 5?", "* 3 + 5?"]),
    ("كم يساوي ٢+٢؟", &["كم يساوي 2 + 2", "السؤال: كم يساوي ٢+٢؟\nالجواب:"], &["كم يساوي ٢+٣؟"]),
    (
        "Who's the king?",
        &[
            "<question>Who's the king?</question>",
            "[INST] Who&#39;s the king? [/INST]",
            "<|im_start|>user\nWho's the king?<|im_end|>",
            "[Question] Who's the king?",
            "Who&#x27;s the king?",
            "Who&rsquo;s the &#107;ing?",
            "- Who's the king?",
            "> Who's the king?",
            "• Who's the king?",
            "问题：Who's the king?\n答：",
            "Frage: Who's the king?\nAntwort:",
            "Вопрос: Who's the king?\nОтвет:",
        ],
        &["Who's the [king]?", "Who's the <king>?", "Who's the &#king;?", "Who's the &king;?"],
    ),
    (
        "What is the capital of Peru?",
        &[
            "<start_of_turn>user\nWhat is the capital of Peru?<end_of_turn>\n\
             <start_of_turn>model\n",
            "<bos><start_of_turn>user\nWhat is the capital of Peru?<end_of_turn>",
            "<｜User｜>What is the capital of Peru?<｜Assistant｜>",
            "<｜begin▁of▁sentence｜><｜User｜>What is the capital of Peru?<｜Assistant｜><think>\n",
            "<b>What is the capital of Peru?</b>",
            "<p class=\"q\">What is the capital of Peru?</p>",
            "<div>What is the <em>capital</em> of Peru?</div>",
            "<h1>What is the capital of Peru?</h1>",
            "<turn>What is the capital of Peru?</turn>",
            "What is the capital of Peru?<br/>",
            "What is the capital of Peru?<eos>",
            "What is the capital of Peru?<image>",
            "What is the capital of Peru? /no_think",
            "What is the capital of Peru? <think>",
            "What is the *capital* of Peru?",
            "What is the \\textbf{capital} of Peru?",
        ],
        &["What is the <capital> of Peru?", "What is the capital of <b>Chile</b>?"],
    ),
    (
        "Compute $\\frac{1}{2} + 1$.",
        &[
            "Compute $\\frac12 + 1$.",
            "Compute 1/2 + 1.",
            "Compute \\dfrac{1}{2}+1",
            "Compute ½ + 1.",
        ],
        &["Compute 12 + 1.", "Compute $\\frac{1}{2+1}$.", "Compute $\\frac{1}{21}$."],
    ),
    (
        "Simplify $3\\frac{1}{2} + \\frac{x+1}{2y}$.",
        &["Simplify 3 1/2 + (x+1)/(2y)."],
        &["Simplify 31/2 + (x+1)/(2y).", "Simplify 3 1/2 + x+1/2y."],
    ),
    (
        "What is $\\frac{x}{2}$ at 3?",
        &["What is x/2 at 3?"],
        &["What is x2 at 3?", "What is 2/x at 3?"],
    ),
    (
        "What is $\\frac{1}{2}x$?",
        &["What is 1/2 x?"],
        &["What is $\\frac{1}{2x}$?", "What is 1/2x?"],
    ),
    (
        "What is $90^\\circ$ in radians?",
        &[
            "What is 90° in radians?",
            "What is $90^{\\circ}$ in radians?",
            "What is $90\\degree$ in radians?",
        ],
        &["What is 90 in radians?"],
    ),
    (
        "What is $\\sqrt{16}$ by 2\\pi?",
        &["What is √16 by 2π?", "What is $\\sqrt{16}$ by $2 \\pi$?"],
        &["What is $\\sqrt{1}6$ by 2\\pi?", "What is 16 by 2π?", "What is $\\sqrt{16}$ by 2?"],
    ),
    ("What is 50% of 8?", &["What is $50\\%$ of 8?", "What is 50\\% of 8?"], &["What is 50 of 8?"]),
    ("Who was king — and when?", &["Who was king--and when?"], &["Who was kingand when?"]),
    (
        "What is x<sup>2</sup> for x<sub>1</sub>?",
        &["What is x^2 for x_1?", "What is x² for x₁?"],
        &["What is x2 for x1?"],
    ),
];

#[test]
fn leak_matches_held_out_questions_in_any_spelling() {
    for (question, same, other) in SPELLINGS {
        for same in same {
            assert!(is_leak(&[task(question, "1")], &task(same, "1")), "{same:?} is {question:?}");
            assert!(is_leak(&[task(same, "1")], &task(question, "1")), "{question:?} is {same:?}");
        }
        for other in other {
            assert!(
                !is_leak(&[task(question, "1")], &task(other, "1")),
                "{other:?} is not {question:?}"
            );
        }
    }
}

#[test]
fn questions_shown_in_prompts_leak() {
    let held_tasks = [task("What is 5+1?", "6"), task("What is the capital of France?", "Paris")];
    let user = Message::user;
    let assistant_message = Message::assistant;
    for shown in [
        chat(&[user("What is 900+1?"), assistant_message("901"), user("What is 5 + 1?")], "6"),
        chat(&[user("What is 5+1?"), assistant_message("6"), user("What is 705+1?")], "706"),
        chat(
            &[
                Message::system("Be brief."),
                user("what is 5+1"),
                assistant_message("6"),
                user("x + y?"),
            ],
            "?",
        ),
        chat(&[Message::system("Examples:\nQ: What is 5+1?\nA: 6"), user("What is 705+1?")], "706"),
        chat(
            &[Message::system("Q: What is 5+1? A: 6 Q: What is 7+1? A: 8"), user("What is 705+1?")],
            "706",
        ),
        task("Q: What is 5+1?\nA: 6\n\nQ: What is 7+1?\nA:", "8"),
        task("Q: What is 5+1? A: 6 Q: What is 7+1? A:", "8"),
        task("What is 9+1?\nWhat is 5+1?\nAnswer both.", "10 and 6"),
        task(
            "Question: What is the capital of France?\nAnswer: Paris\nQuestion: And of Spain?",
            "Madrid",
        ),
        task("What is the capital of France? -> Paris\nAnd of Spain? ->", "Madrid"),
        task("- What is the capital of France?\tParis\n- And of Spain?", "Madrid"),
        task(
            "| question | answer |\n| What is the capital of France? | Paris |\nAnd of Spain?",
            "Madrid",
        ),
        task(
            "[INST] What is the capital of France? [/INST] Paris [INST] And of Spain? [/INST]",
            "Madrid",
        ),
        task("Example 1: What is the capital of France?\nAnswer: Paris\nAnd of Spain?", "Madrid"),
        task("What is the capital of France? = Paris; And of Spain? =", "Madrid"),
        task("What is the capital of France? // Paris\nAnd of Spain? //", "Madrid"),
        task("What is the capital of France? [5 points]", "Paris"),
        task("What is the capital of France? + explain", "Paris"),
        task("What is the capital of France? * Note: briefly", "Paris"),
        task("What is the capital of France? ->", "Paris"),
        task("Be brief.\nWhat is the capital of France? /think", "Paris"),
        chat(
            &[user("x"), tool_question("What is the capital of France?"), user("And of Spain?")],
            "Madrid",
        ),
    ] {
        assert!(is_leak(&held_tasks, &shown), "{shown:?}");
    }
    for other in [
        chat(&[user("What is 900+1?"), assistant_message("901"), user("What is 15+1?")], "16"),
        task("Q: What is 15+1?\nA: 16\n\nQ: What is 7+1?\nA:", "8"),
        task("What is 5+1+2?", "8"),
        task("What is 5+1 + 2?", "8"),
        task("What is the capital of France in 1800?", "Paris"),
        task("Paris", "France"),
    ] {
        assert!(!is_leak(&held_tasks, &other), "{other:?}");
    }
    // A labeled question below a passage depends on the passage.
    assert!(!is_leak(
        &[passage_task("Three men sat in a boat.")],
        &passage_task("Five men sat in a car.")
    ));
    // A held-out few-shot row is identified by its last question; its examples are not held out.
    for few in [
        chat(&[user("What is 900+1?"), assistant_message("901"), user("What is 5+1?")], "6"),
        task("Q: What is 900+1?\nA: 901\nQ: What is 5+1?\nA:", "6"),
    ] {
        assert!(is_leak(std::slice::from_ref(&few), &task("What is 5+1?", "6")), "{few:?}");
        assert!(!is_leak(std::slice::from_ref(&few), &task("What is 900+1?", "901")), "{few:?}");
    }
}

fn tool_question(question: &str) -> Message {
    let arguments = json!({ "q": [question] });
    let arguments = arguments.as_object().unwrap().clone().into();
    let call = levade_text::ToolCall { id: "c".into(), name: "ask".into(), arguments };
    Message::calls("", vec![call])
}

fn passage_task(text: &str) -> Task {
    task(&format!("{text}\nQuestion: How many men were there?\nAnswer:"), "3")
}

/// Turns that only continue a conversation are not questions of their own.
#[test]
fn shared_last_turn_leaks_only_with_conversation() {
    let held_tasks = [sure_task("What is 2+2?"), sure_task("What is 1+3?")];
    assert!(!is_leak(&held_tasks, &sure_task("What is 7-3?")));
    assert!(is_leak(&held_tasks, &sure_task("what is 2 + 2")));
}

fn sure_task(question: &str) -> Task {
    let turns = [Message::user(question), Message::assistant("4"), Message::user("Are you sure?")];
    chat(&turns, "yes")
}

#[test]
fn shown_multiline_question_leaks() {
    let question = "Read this.\n\nThe lake lies in Africa.\n\nWhat is its name?";
    for shown in [
        format!("Q: {question}\nA: Victoria\n\nQ: And in Europe?\nA:"),
        format!(
            "### Instruction:\n{question}\n\n### Response:\nVictoria\n\n### Instruction:\n\
             And in Europe?"
        ),
    ] {
        assert!(is_leak(&[task(question, "Victoria")], &task(&shown, "Ladoga")), "{shown}");
    }
}

#[test]
fn shared_last_turn_of_source_uses_earlier_turns() {
    let rows: Vec<Task> = (0..5).map(numbered_sure_task).collect();
    let found =
        HeldOutQuestions::new(MatchingRule::ExactRows, &[&rows[0]], [rows.iter().collect()]);
    assert!(rows[1..].iter().all(|task| !found.leak(task)) && found.leak(&numbered_sure_task(0)));
}

fn numbered_sure_task(number: u32) -> Task {
    let turns = [
        Message::user(format!("What is {number}+1?")),
        Message::assistant("2"),
        Message::user("Are you sure?"),
    ];
    chat(&turns, &(number + 1).to_string())
}

#[test]
fn contextual_questions_leak_only_with_same_context() {
    let rows: Vec<Task> =
        (0..6).map(|i| database_task(&format!("db{i}"), &i.to_string())).collect();
    let (held_tasks, rest) = rows.split_at(2);
    let found = held_out_questions(held_tasks, rest);
    // All rows of the source ask the same question, so that the context counts.
    let all = HeldOutQuestions::new(
        MatchingRule::ExactRows,
        &held_tasks.iter().collect::<Vec<_>>(),
        [rows.iter().collect()],
    );
    assert!(rest.iter().all(|task| !all.leak(task)) && all.leak(&database_task("db1", "9")));
    assert!(rest.iter().all(|task| !found.leak(task)));
    let rows = [author_task("By A.", "A"), author_task("By B.", "B"), author_task("By C.", "C")];
    let found =
        HeldOutQuestions::new(MatchingRule::ExactRows, &[&rows[0]], [rows.iter().collect()]);
    assert!(!found.leak(&rows[1]) && found.leak(&author_task("by A.", "A")));
    // A context only distinguishes questions with different answers. A field that contains the
    // question is not a context.
    let same = [
        row("Who was it?", "A", json!({"db_id": "x"})),
        row("Who was it?", "A", json!({"db_id": "y"})),
    ];
    let found =
        HeldOutQuestions::new(MatchingRule::ExactRows, &[&same[0]], [same.iter().collect()]);
    assert!(found.leak(&same[1]));
    let same = ["What is 2+2?", "what is 2 + 2"]
        .map(|text| row(text, &text.len().to_string(), json!({"text": text})));
    let found =
        HeldOutQuestions::new(MatchingRule::ExactRows, &[&same[0]], [same.iter().collect()]);
    assert!(found.leak(&same[1]));
    // Instructions alone do not distinguish questions with the same answer.
    assert!(is_leak(&[author_task("Be brief.", "A")], &author_task("Be kind.", "A")));
    // Neither does a note in a row, or another answer without a context.
    assert!(is_leak(
        &[row("2+2?", "4", json!({"level": 1}))],
        &row("2 + 2?", "four", json!({"level": 2}))
    ));
}

fn database_task(db: &str, answer: &str) -> Task {
    row("How many singers do we have?", answer, json!({"db_id": db}))
}

fn author_task(text: &str, answer: &str) -> Task {
    chat(&[Message::system(text), Message::user("Who wrote it?")], answer)
}

/// Fields that contain sentences in some data sets, and only describe a row in others.
#[test]
fn fields_with_sentences_are_contexts() {
    for name in ["conversation", "source", "sql_schema", "reference", "notes", "table_id"] {
        let rows = [
            field_task(name, "There are three singers.", "3"),
            field_task(name, "We have eight singers here.", "8"),
            field_task(name, "Quite another text about five singers.", "5"),
        ];
        let found = HeldOutQuestions::new(
            MatchingRule::ExactRows,
            &[&rows[0], &rows[1]],
            [rows[..2].iter().collect(), rows[2..].iter().collect()],
        );
        assert!(
            !found.leak(&rows[2]) && found.leak(&field_task(name, "there are three singers", "3")),
            "{name}"
        );
    }
    // The name of a data set is not a context.
    let rows = [
        field_task("source", "web", "3"),
        field_task("source", "books", "8"),
        field_task("source", "tv", "5"),
    ];
    let found =
        HeldOutQuestions::new(MatchingRule::ExactRows, &[&rows[0]], [rows.iter().collect()]);
    assert!(found.leak(&rows[2]));
}

fn field_task(name: &str, text: &str, answer: &str) -> Task {
    row("How many singers?", answer, json!({ name: text }))
}

/// The letter of an option is meaningless without the options.
#[test]
fn answer_letters_depend_on_options() {
    let rows = [
        choices_task(&["ant", "cow"], "B"),
        choices_task(&["sun", "moon"], "A"),
        choices_task(&["cow", "ant"], "A"),
    ];
    let found =
        HeldOutQuestions::new(MatchingRule::ExactRows, &[&rows[0]], [rows.iter().collect()]);
    assert!(!found.leak(&rows[1]));
    assert!(found.leak(&rows[2]), "the same options in another order");
    // Rows with the same options in several orders are the same question.
    let shuffled = [&rows[0], &rows[2]];
    let found = HeldOutQuestions::new(MatchingRule::ExactRows, &shuffled[..1], [shuffled.to_vec()]);
    assert!(found.leak(&rows[2]) && found.leak(&choices_task(&["Cow", "Ant."], "A")));
    let labelled = json!({"choices": {"text": ["cow", "ant"], "label": ["1", "2"]}});
    assert!(found.leak(&row("Which is largest?", "1", labelled)));
}

fn choices_task(choices: &[&str], answer: &str) -> Task {
    row("Which is largest?", answer, json!({"choices": choices}))
}

#[test]
fn question_context_comparison_ignores_spelling() {
    let rows = [context_task("By A, in 1900.", "A"), context_task("By B.", "B")];
    let found =
        HeldOutQuestions::new(MatchingRule::ExactRows, &[&rows[0]], [rows.iter().collect()]);
    assert!(found.leak(&context_task("by A,  in 1900", "A")));
    assert!(!found.leak(&context_task("By A, in 1901.", "A")) && !found.leak(&rows[1]));
}

fn context_task(text: &str, answer: &str) -> Task {
    row("Who wrote it?", answer, json!({"context": text}))
}

#[test]
fn questions_matching_compares_complete_questions() {
    let held_tasks = task("What is 2+2?", "4");
    let found = HeldOutQuestions::new(MatchingRule::Questions, &[&held_tasks], [vec![&held_tasks]]);
    assert!(found.leak(&task(" what is  2+2?", "4")));
    assert!(!found.leak(&task("What is 2 + 2?", "4")) && !found.leak(&task("What is 2+2", "4")));
    assert_eq!(found.near_copy(&task("Tell me: what is 2+2?", "4")), None);
}

#[test]
fn tasks_with_already_shown_questions_are_found() {
    let shown: HashSet<QuestionKey> = chat(
        &[Message::user("What is 1+1?"), Message::assistant("2"), Message::user("What is 1+2?")],
        "3",
    )
    .shown_keys()
    .into_iter()
    .collect();
    let tasks = [task("what is 1 + 1", "2"), task("What is 1+2?", "3"), task("What is 1+3?", "4")];
    assert_eq!(filter_seen(&tasks.iter().collect::<Vec<_>>(), &shown), [&tasks[0], &tasks[1]]);
}
