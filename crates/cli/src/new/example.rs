//! `levade new example`: writes one of the recipes of Levade's repository, which the binary
//! carries.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;

use crate::failure::unusable;
use crate::screen;

/// Write an example recipe of Levade's repository with its files
///
/// Without a name, lists the examples. Existing files are not overwritten.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade new example
  levade new example calculator
  levade new example sql agents/sql")]
pub struct ExampleArgs {
    /// Name of the example
    name: Option<String>,

    /// Directory to write [default: recipes/NAME]
    dir: Option<PathBuf>,
}

/// Example recipe that is embedded in the binary.
struct EmbeddedExample {
    name: &'static str,
    /// Names and contents of the example's files.
    files: &'static [(&'static str, &'static str)],
}

macro_rules! example {
    ($name:literal, $($file:literal),+) => {
        EmbeddedExample {
            name: $name,
            files: &[$(($file, include_str!(concat!("../../../../recipes/", $name, "/", $file)))),+],
        }
    };
}

const EXAMPLES: &[EmbeddedExample] = &[
    example!("agent-lightning", "README.md", "bridge.py", "recipe.toml", "train.py"),
    example!("apo", "README.md", "calls.toml", "editor.py", "recipe.toml"),
    example!("bring-your-own-agent", "README.md", "agent.py", "recipe.toml"),
    example!("calc-x", "README.md", "agent.py", "prepare.py", "recipe-7b.toml", "recipe.toml"),
    example!("calculator", "README.md", "recipe.toml"),
    example!("gsm8k", "README.md", "recipe.toml"),
    example!(
        "kuhn",
        "README.md",
        "legal.jsonl",
        "legal.py",
        "legal.toml",
        "past.toml",
        "recipe.toml"
    ),
    example!("langgraph-agent", "README.md", "agent.py", "recipe.toml"),
    example!("mcp", "README.md", "prepare.py", "recipe-7b.toml", "recipe.toml"),
    example!("nim", "README.md", "game.py", "recipe.toml"),
    example!("reasoning-gym", "README.md", "recipe-7b.toml", "recipe.toml"),
    example!("retail", "README.md", "desk.py", "prepare.py", "recipe.toml", "user.py"),
    example!("retool", "README.md", "prepare.py", "recipe-7b.toml", "recipe.toml"),
    example!("search-r1", "README.md", "prepare.py", "recipe-7b.toml", "recipe.toml"),
    example!("spider", "README.md", "agent.py", "prepare.py", "recipe-7b.toml", "recipe.toml"),
    example!("sql", "README.md", "agent.py", "prepare.py", "recipe-7b.toml", "recipe.toml"),
    example!("textarena", "README.md", "game.py", "recipe.toml"),
    example!("typescript-agent", "README.md", "agent.ts", "package.json", "recipe.toml"),
    example!("verifiers", "README.md", "recipe-7b.toml", "recipe.toml"),
    example!("werewolf", "README.md", "legal.py", "legal.toml", "recipe.toml"),
];

/// Writes the files of the named example. If no name is given, lists all examples.
///
/// # Errors
/// Returns an error if there is no example of this name, if a file exists already, or if a file
/// cannot be written.
pub fn main(args: ExampleArgs) -> anyhow::Result<ExitCode> {
    let Some(name) = args.name else {
        for example in EXAMPLES {
            screen::print_line(&format!("{:<22}{}", example.name, example.summary()));
        }
        return Ok(ExitCode::SUCCESS);
    };
    let example = find_example(&name).ok_or_else(|| {
        let names: Vec<_> = EXAMPLES.iter().map(|example| example.name).collect();
        unusable(format!("there is no example {name:?}; the examples are {}", names.join(", ")))
    })?;
    let dir = args.dir.unwrap_or_else(|| Path::new("recipes").join(example.name));
    let paths: Vec<_> = example.files.iter().map(|(file, _)| dir.join(file)).collect();
    if let Some(path) = paths.iter().find(|path| path.exists()) {
        return Err(unusable(format!("{} exists; name another directory", path.display())));
    }
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    for (path, (_, text)) in paths.iter().zip(example.files) {
        super::write_file(path, &adapt_to_installed_binary(text))?;
    }
    let shown = screen::quoted(&dir.display());
    screen::print_line(&format!("\nread      {shown}/README.md\ntrain     levade train {shown}"));
    Ok(ExitCode::SUCCESS)
}

/// Adapts the text of an example's file for a user without a clone of the repository: replaces
/// relative links, which would lead nowhere, and removes the steps that build the program.
fn adapt_to_installed_binary(text: &str) -> String {
    text.replace("](../../", concat!("](", env!("CARGO_PKG_REPOSITORY"), "/blob/main/"))
        .replace("](../", concat!("](", env!("CARGO_PKG_REPOSITORY"), "/blob/main/recipes/"))
        .replace("cargo build --release\n", "")
        .replace("cargo run --release -- ", "levade ")
        .replace("target/release/levade", "levade")
}

/// Returns whether an example has this name.
pub fn example_exists(name: &str) -> bool {
    find_example(name).is_some()
}

fn find_example(name: &str) -> Option<&'static EmbeddedExample> {
    EXAMPLES.iter().find(|example| example.name == name)
}

impl EmbeddedExample {
    /// Returns the comment at the start of the example's recipe, which summarizes the example.
    fn summary(&self) -> &'static str {
        let recipe = self.files.iter().find(|(file, _)| *file == "recipe.toml");
        let first = recipe.and_then(|(_, text)| text.lines().next());
        first.and_then(|line| line.strip_prefix("# ")).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files that git ignores may lie beside the recipes.
    const KINDS: [&str; 5] = ["md", "toml", "py", "ts", "json"];

    #[test]
    fn examples_are_all_files_of_the_recipes_directory() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes");
        let directories = std::fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().path());
        let names: Vec<_> = directories.filter(|path| path.is_dir()).collect();
        assert_eq!(names.len(), EXAMPLES.len());
        for directory in names {
            let example = find_example(directory.file_name().unwrap().to_str().unwrap()).unwrap();
            let files = std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path());
            let mut names: Vec<_> = files
                .filter(|path| {
                    path.extension().is_some_and(|kind| KINDS.contains(&kind.to_str().unwrap()))
                })
                .map(|path| path.file_name().unwrap().to_str().unwrap().to_owned())
                .collect();
            names.sort();
            let has_kind =
                |file: &&str| file.rsplit('.').next().is_some_and(|kind| KINDS.contains(&kind));
            let embedded: Vec<_> =
                example.files.iter().map(|(file, _)| *file).filter(has_kind).collect();
            assert_eq!(embedded, names);
        }
    }

    #[test]
    fn example_summary_is_one_sentence_in_every_recipe() {
        for example in EXAMPLES {
            assert!(example.summary().ends_with('.'), "{}: {:?}", example.name, example.summary());
        }
    }

    #[test]
    fn example_is_not_written_over_existing_files() {
        let dir = tempfile::tempdir().unwrap();
        let args = || ExampleArgs { name: Some("sql".into()), dir: Some(dir.path().into()) };
        main(args()).unwrap();
        let readme = std::fs::read_to_string(dir.path().join("README.md")).unwrap();
        assert!(!readme.contains("](../"), "a relative link leads nowhere: {readme}");
        assert!(readme.contains("levade train recipes/sql"), "{readme}");
        for example in EXAMPLES {
            for (file, text) in example.files {
                let text = adapt_to_installed_binary(text);
                let builds = ["cargo run", "cargo build", "target/release"];
                let found = builds.iter().find(|command| text.contains(*command));
                assert_eq!(found, None, "{}/{file}", example.name);
                assert!(!text.contains("](/blob"), "{}/{file}: no repository", example.name);
            }
        }
        let recipe = dir.path().join("recipe.toml");
        levade_recipe::Recipe::load(&recipe, &[]).unwrap();
        assert!(main(args()).unwrap_err().to_string().contains("exists; name another directory"));
    }
}
