//! Tests of the comparison of questions.

use serde_json::json;

use super::*;

fn question_task(question: &str) -> Task {
    Task { question: question.to_owned(), ..Task::default() }
}

fn conversation_task(messages: &[Message]) -> Task {
    let question = messages.last().unwrap().content.to_string();
    Task { question, messages: messages.to_vec(), ..Task::default() }
}

#[test]
fn question_key_ignores_invisible_differences() {
    let key = question_task("What is Café Σ\u{3a3} 1 - 2?").key();
    for same in [
        " What is Café ΣΣ 1 - 2?\t\n",
        "what  is\u{a0}CAFÉ σς 1 - 2?",
        "What is Cafe\u{301} ΣΣ 1 -\r\n2?",
        "\u{feff}What is Ca\u{ad}fé Σ\u{200b}Σ 1 - 2?",
    ] {
        assert_eq!(question_task(same).key(), key, "{same:?}");
    }
    for other in ["What is Café ΣΣ 1 + 2?", "What is Café ΣΣ 1 - 2", "What is Café ΣΣ 1 - 3?", ""]
    {
        assert_ne!(question_task(other).key(), key, "{other:?}");
    }
}

#[test]
fn conversation_key_ignores_instructions() {
    assert_eq!(key_with_system("Be brief."), key_with_system("Be kind."));
    assert_eq!(key_with_system("Be brief."), question_task("1 + 1?").key());
    assert_ne!(key_after("1 + 2?"), key_with_system("Be brief."));
    assert_ne!(key_after("1 + 2?"), key_after("2 + 1?"));
    assert_eq!(key_after("1 + 2?"), key_after(" 1 +  2?"));
}

fn key_with_system(system: &str) -> QuestionKey {
    conversation_task(&[Message::system(system), Message::user("1 + 1?")]).key()
}

fn key_after(first: &str) -> QuestionKey {
    conversation_task(&[Message::user(first), Message::assistant("3"), Message::user("1 + 1?")])
        .key()
}

#[test]
fn ranks_depend_on_split_and_are_uniform() {
    let one = ranks(1);
    let two = ranks(2);
    assert_eq!(one, ranks(1));
    let one = are_low(&one);
    let two = are_low(&two);
    let both = one.iter().zip(&two).filter(|(a, b)| **a && **b).count();
    for low in [one, two] {
        assert!((440..560).contains(&low.iter().filter(|low| **low).count()));
    }
    assert!((85..165).contains(&both), "{both}");
}

fn ranks(split: u64) -> Vec<u64> {
    (0..2000).map(|i| question_task(&format!("{i}?")).key().rank(split)).collect::<Vec<_>>()
}

fn are_low(ranks: &[u64]) -> Vec<bool> {
    ranks.iter().map(|rank| *rank < u64::MAX / 4).collect::<Vec<_>>()
}

#[test]
fn key_of_long_list_of_numbers_is_found_in_linear_time() {
    let started = std::time::Instant::now();
    for unit in ["5,", "5'", "123,", "0", "5\u{202f}", "5_5,"] {
        let long = unit.repeat(100_000 / unit.len());
        question_task(&long).key();
        question_task(&format!("1{long},5")).key();
    }
    assert!(started.elapsed() < std::time::Duration::from_secs(5), "{:?}", started.elapsed());
}

#[test]
fn row_key_by_words_ignores_case_and_white_space() {
    let first = row_keys("How many?", json!({"x": "a b", "index": [1]}));
    for row in [
        row_keys("how  many?", json!({"x": "a b", "index": [1]})),
        row_keys("How many?", json!({"x": "a  b", "index": [1]})),
        row_keys("How many?", json!({"x": "a b", "index": [2]})),
    ] {
        assert_eq!(first.0, row.0);
        assert_ne!(first.1, row.1);
    }
    assert_ne!(first.0, row_keys("How many?", json!({"x": "a b", "index": [1], "qid": "q"})).0);
}

fn row_keys(question: &str, row: serde_json::Value) -> (QuestionKey, QuestionKey) {
    let task = Task { question: question.into(), answer: "1".into(), ..Task::default() };
    let row = row.as_object().unwrap();
    (task.loose_row_key(row, &[]), task.row_key(row, &[]))
}
