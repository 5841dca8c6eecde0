//! Makes the paths of a recipe absolute. Paths in a file are relative to its directory, paths in
//! `--set` to the working directory.

use std::path::{Path, PathBuf};

use toml::{Table, Value};

use super::patterns::visit_matches;
use super::set::{Override, SetError};

/// Which values of a recipe key are paths.
#[derive(Clone, Copy)]
enum PathForm {
    /// Any string is a path.
    Path,
    /// A string is a path if it starts with a dot or names an existing file. Other strings are
    /// names of models, which can look like paths.
    Model,
    /// A string that is not a URL is a path.
    File,
    /// A string is a path if it contains a slash. A program without a slash is looked up in `PATH`.
    Program,
}

/// Recipe keys of files and directories that a run reads and writes. With `--set`, a path is
/// relative to the working directory only if the override sets the key itself.
const RUN_PATHS: [(&str, PathForm); 8] = [
    ("run.folder", PathForm::Path),
    ("runners.store", PathForm::File),
    ("model.source", PathForm::Model),
    ("model.base", PathForm::Model),
    ("policy.*.source", PathForm::Model),
    ("policy.*.base", PathForm::Model),
    ("tasks.*.path", PathForm::Path),
    ("tasks.*.path.*", PathForm::Path),
];

/// Recipe keys that name programs or files of single components, such as scorers and tools.
const PART_PATHS: [(&str, PathForm); 17] = [
    ("reward.scorer.file", PathForm::Path),
    ("reward.scorer.databases", PathForm::Path),
    ("reward.scorer.python", PathForm::Program),
    ("reward.scorers.*.file", PathForm::Path),
    ("reward.scorers.*.databases", PathForm::Path),
    ("reward.scorers.*.python", PathForm::Program),
    ("tool.*.file", PathForm::Path),
    ("tool.*.config", PathForm::Path),
    ("tool.*.index", PathForm::Path),
    ("tool.*.python", PathForm::Program),
    ("user.*.file", PathForm::Path),
    ("user.*.config", PathForm::Path),
    ("user.*.python", PathForm::Program),
    ("tasks.*.worker.python", PathForm::Program),
    ("cluster.learner.python", PathForm::Program),
    ("cluster.samplers.python", PathForm::Program),
    ("cluster.samplers.urls_file", PathForm::Path),
];

/// Recipe tables of components with a `command`, which runs in their `folder`. The default is the
/// directory of the recipe.
const PROGRAMS: [&str; 6] =
    ["agent", "agent.*", "game", "tool.*", "reward.scorer", "reward.scorers.*"];

/// Kinds of task sources that are environments. They run in the `folder` of their `worker`.
const ENVIRONMENTS: [&str; 4] = ["reasoning_gym", "verifiers", "gymnasium", "openenv"];

/// Makes all paths in a recipe's table absolute. Relative paths are relative to `dir`.
pub(super) fn resolve_paths(table: &mut Table, dir: &Path) {
    make_absolute(table, &RUN_PATHS, |path| dir.join(path).components().collect());
    resolve_component_paths(table, dir);
}

/// Makes the paths of components that are programs or have files absolute. Relative paths are
/// relative to `dir`.
pub(super) fn resolve_component_paths(table: &mut Table, dir: &Path) {
    let set_dir = |keys: &mut Table| {
        let relative_dir = keys.get("folder").and_then(Value::as_str).unwrap_or_default();
        keys.insert("folder".into(), Value::String(dir.join(relative_dir).display().to_string()));
    };
    for pattern in PROGRAMS {
        visit_matches(table, pattern, &mut |_, part| {
            let command = part.get("command").and_then(Value::as_array);
            let is_program = command.is_some_and(|command| !command.is_empty());
            part.as_table_mut().filter(|_| is_program).into_iter().for_each(set_dir);
        });
    }
    visit_matches(table, "runners", &mut |_, keys| {
        keys.as_table_mut().into_iter().for_each(set_dir);
    });
    for kind in ENVIRONMENTS {
        visit_matches(table, &format!("tasks.*:{kind}"), &mut |_, source| {
            let Value::Table(keys) = source else { return };
            let worker = keys.entry("worker").or_insert_with(|| Value::Table(Table::new()));
            // A worker that is not a table is rejected when it is read.
            worker.as_table_mut().into_iter().for_each(set_dir);
        });
    }
    make_absolute(table, &PART_PATHS, |path| dir.join(path));
}

/// Replaces the directory `from` by `to` in the paths of components.
pub(super) fn relocate_paths(table: &mut Table, from: &Path, to: &Path) {
    let mut patterns: Vec<String> = PART_PATHS.map(|(pattern, _)| pattern.to_owned()).into();
    patterns.extend(PROGRAMS.map(|part| format!("{part}.folder")));
    patterns.extend(ENVIRONMENTS.map(|kind| format!("tasks.*:{kind}.worker.folder")));
    patterns.push("runners.folder".to_owned());
    for pattern in patterns {
        visit_matches(table, &pattern, &mut |_, value| {
            let Value::String(text) = value else { return };
            if let Ok(rest) = Path::new(text.as_str()).strip_prefix(from) {
                *text = to.join(rest).components().collect::<PathBuf>().display().to_string();
            }
        });
    }
}

/// Applies an override to the recipe `table`. Relative paths in the override are relative to `dir`.
///
/// # Errors
/// Returns [`SetError`] with the part of the override's path that does not exist.
pub(super) fn apply_override(
    change: &Override,
    table: &mut Table,
    dir: &Path,
) -> Result<(), SetError> {
    let mut change_table = Table::new();
    change.apply(&mut change_table)?;
    make_absolute(&mut change_table, &RUN_PATHS, |path| dir.join(path).components().collect());
    let mut change = change.clone();
    visit_matches(&mut change_table, &change.key(), &mut |_, value| change.value = value.clone());
    change.apply(table)
}

/// Makes the values of the given recipe keys absolute if they are paths.
fn make_absolute(table: &mut Table, keys: &[(&str, PathForm)], absolute: impl Fn(&str) -> PathBuf) {
    for (pattern, form) in keys {
        visit_matches(table, pattern, &mut |_, value| {
            let Value::String(text) = value else { return };
            let joined = absolute(text);
            let is_path = match form {
                PathForm::Path => !text.is_empty(),
                PathForm::File => !text.is_empty() && !text.contains(':'),
                PathForm::Model => text.starts_with('.') || joined.exists(),
                PathForm::Program => text.contains('/'),
            };
            if is_path {
                *text = joined.display().to_string();
            }
        });
    }
}
