//! Tests of recipe files: paths in them, and the recipes of this repository.

use super::*;

#[test]
fn paths_resolve_from_recipe_or_working_directory() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("model")).unwrap();
    let file = dir.path().join("recipe.toml");
    let text = "[run]\nname = 'x'\nfolder = 'out'\n[model]\nsource = 'model'\n\
                [[tasks]]\nkind = 'jsonl'\npath = './rows.jsonl'";
    std::fs::write(&file, text).unwrap();
    let path = |recipe: &Recipe| match &recipe.tasks[0] {
        TaskSource::File(options) => options.path.as_slice().to_vec(),
        other => panic!("{other:?}"),
    };
    let recipe = Recipe::load(&file, &[]).unwrap();
    assert_eq!(recipe.run.folder, dir.path().join("out"));
    assert_eq!(Path::new(&recipe.model.source), dir.path().join("model"));
    assert_eq!(path(&recipe), [dir.path().join("rows.jsonl")]);

    let here = std::env::current_dir().unwrap();
    let command = |overrides: &[&str]| {
        let overrides: Vec<Override> = overrides.iter().map(|text| text.parse().unwrap()).collect();
        match Recipe::load(&file, &overrides).unwrap().reward.scorer {
            levade_reward::ScorerKind::Command(scorer) => scorer.folder,
            other => panic!("{other:?}"),
        }
    };
    let python = |python: &str| {
        let scorer =
            format!("[reward.scorer]\nkind = 'python'\nfile = 'score.py'\npython = '{python}'");
        std::fs::write(&file, format!("{text}\n{scorer}")).unwrap();
        let scorer = Recipe::load(&file, &[]).unwrap().reward.scorer;
        std::fs::write(&file, text).unwrap();
        match scorer {
            levade_reward::ScorerKind::Python(keys) => (keys.file, PathBuf::from(keys.python)),
            other => panic!("{other:?}"),
        }
    };
    let scored = dir.path().join("score.py");
    assert_eq!(python(".venv/bin/python"), (scored.clone(), dir.path().join(".venv/bin/python")));
    assert_eq!(python("python3.12"), (scored, "python3.12".into()));
    let scorer = "reward.scorer={kind='command', command=['true']}";
    assert_eq!(command(&[scorer]), here);
    assert_eq!(command(&[scorer, "reward.scorer.folder=scores"]), here.join("scores"));
    let overrides = ["run.folder=other", "tasks.0.path=rows", "model.source=org/model"]
        .map(|o| o.parse().unwrap());
    let recipe = Recipe::load(&file, &overrides).unwrap();
    assert_eq!(recipe.run.folder, here.join("other"));
    assert_eq!(path(&recipe), [here.join("rows")]);
    assert_eq!(recipe.model.source, "org/model");

    // Several files, each with its own path; and the old name of file sources.
    std::fs::write(
        &file,
        text.replace("'./rows.jsonl'", "['a.json', '/b/*.json']").replace("jsonl", "file"),
    )
    .unwrap();
    let recipe = Recipe::load(&file, &[]).unwrap();
    assert_eq!(path(&recipe), [dir.path().join("a.json"), "/b/*.json".into()]);
    let recipe = Recipe::load(&file, &["tasks.0.path=['c', '/d']".parse().unwrap()]).unwrap();
    assert_eq!(path(&recipe), [here.join("c"), "/d".into()]);
    let recipe = Recipe::load(&file, &["tasks.0.path.1=c".parse().unwrap()]).unwrap();
    assert_eq!(path(&recipe), [dir.path().join("a.json"), here.join("c")]);
}

#[test]
fn file_with_only_a_reward_gets_other_tables_from_a_run() {
    let dir = tempfile::tempdir().unwrap();
    for sub in ["run", "other"] {
        std::fs::create_dir(dir.path().join(sub)).unwrap();
    }
    let base = dir.path().join("run/recipe.toml");
    let text = "[run]\nname = 'x'\nfolder = '.'\n[model]\nsource = 'm'\n\
                [[tasks]]\nkind = 'jsonl'\npath = 'rows.jsonl'\n[reward]\nunfinished = 0.5\n";
    std::fs::write(&base, text).unwrap();
    let file = dir.path().join("other/reward.toml");
    let reward = "[reward]\nmalformed_call = -0.25\n\
                  [reward.scorer]\nkind = 'python'\nfile = 'score.py'\n";
    std::fs::write(&file, reward).unwrap();
    let failed: Override = "reward.failed_call=-0.5".parse().unwrap();
    let recipe = Recipe::load_reward(&file, &base, &[failed]).unwrap();
    assert_eq!((recipe.run.name.as_str(), recipe.run.folder), ("x", dir.path().join("run")));
    assert_eq!((recipe.reward.malformed_call, recipe.reward.unfinished), (-0.25, 0.0));
    assert_eq!(recipe.reward.failed_call, -0.5);
    match recipe.reward.scorer {
        levade_reward::ScorerKind::Python(keys) => {
            assert_eq!(keys.file, dir.path().join("other/score.py"));
        }
        other => panic!("{other:?}"),
    }
    // A complete recipe is read as it is, and an incomplete one is an error.
    let own = text.replace("name = 'x'", "name = 'y'");
    std::fs::write(&file, own).unwrap();
    assert_eq!(Recipe::load_reward(&file, &base, &[]).unwrap().run.name, "y");
    std::fs::write(&file, format!("[model]\nsource = 'm'\n{reward}")).unwrap();
    let error = Recipe::load_reward(&file, &base, &[]).unwrap_err().to_string();
    assert!(error.contains("`run` is missing"), "{error}");
}

#[test]
fn repository_and_documentation_recipes_load() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let files = |dir: &str| {
        let entries = std::fs::read_dir(root.join(dir)).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect::<Vec<_>>()
    };
    let recipes: Vec<PathBuf> = files("recipes").into_iter().filter(|path| path.is_dir()).collect();
    assert!(recipes.len() >= 2);
    for dir in recipes {
        assert!(dir.join("recipe.toml").is_file(), "{} has no recipe", dir.display());
        let own = std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path());
        for file in own.filter(|file| file.extension().is_some_and(|end| end == "toml")) {
            Recipe::load(&file, &[]).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        }
    }
    // A page shows only parts of a recipe; the remaining keys are those of a small recipe.
    let mut shown = 0;
    let pages =
        files("docs").into_iter().filter(|file| file.extension().is_some_and(|end| end == "md"));
    for page in pages.chain([root.join("README.md")]) {
        let text = std::fs::read_to_string(&page).unwrap();
        for block in text.split("```toml\n").skip(1) {
            let block = block.split("```").next().unwrap();
            let mut table: Table =
                block.parse().unwrap_or_else(|error| panic!("{}: {error}", page.display()));
            for (key, value) in SMALL.parse::<Table>().unwrap() {
                table.entry(key).or_insert(value);
            }
            load(&table.to_string(), &[])
                .unwrap_or_else(|error| panic!("{}: {error}\n{block}", page.display()));
            shown += 1;
        }
    }
    assert!(shown >= 10, "{shown} blocks");
}
