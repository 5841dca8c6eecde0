//! Tests of questions that combine several fields of a row.

use super::*;

#[test]
fn template_combines_several_fields() {
    let rows = concat!(
        "{\"Body\": \"Tom has 3 bags.\", \"Question\": \"How many?\", \"Answer\": 3}\n",
        "{\"Body\": \"Ann has 4 bags.\", \"Question\": \"How many?\", \"Answer\": 4}\n",
        "{\"Body\": null, \"Question\": \"Why?\", \"Answer\": 5}\n",
    );
    let (_dir, mut options) = file(rows);
    (options.question, options.answer) = ("{Body} {Question}".into(), "Answer".into());
    let tasks = options.load(0).unwrap();
    let questions: Vec<&str> = tasks.rest.iter().map(|task| task.question.as_str()).collect();
    assert_eq!(questions, ["Tom has 3 bags. How many?", "Ann has 4 bags. How many?", "Why?"]);
    assert_eq!((tasks.repeated, &tasks.rest[0].row["Body"]), (0, &json!("Tom has 3 bags.")));
    for (question, why) in [
        ("{Body} {Text}", "the row has no field \"Text\""),
        ("{Body", "an unmatched brace"),
        ("{} {Body}", "which is not a field name"),
    ] {
        options.question = question.into();
        let error = options.load(0).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    // Columns of a template must be readable; other columns can be left out.
    let (_dir, mut options) = write_file("sums.csv", "a,b,note,note\n1,2,x,y\n");
    (options.question, options.answer) = ("{a}+{b}?".into(), String::new());
    assert_eq!(options.load(0).unwrap().rest[0].question, "1+2?");
}

#[test]
fn unseen_choices_are_noted_without_template() {
    let row = json!({"question": "Which?", "choices": ["red", "green"], "answer": 1}).to_string();
    let (_dir, mut options) = file(&row);
    let notes = options.load(0).unwrap().notes;
    let note = "1 rows have a field \"choices\" that the model does not see; `question = \
                \"{question}\\n{choices}\"` shows it";
    assert!(notes.len() == 1 && notes[0].ends_with(note), "{notes:?}");
    options.question = "{question}\n{choices}".into();
    let tasks = options.load(0).unwrap();
    assert_eq!(tasks.rest[0].question, "Which?\nA. red\nB. green");
    assert_eq!(tasks.notes, Vec::<String>::new());
}
