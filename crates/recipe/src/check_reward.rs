//! Checks values of `[reward]`.

use levade_reward::ScorerKind;

use super::RecipeError;
use super::check::Checker;
use super::game::SeedKeys;
use super::keys::{Recipe, TaskSource};
use super::reward::{RewardKeys, ScorerKeys};

impl Checker<'_> {
    /// Checks that scorers have valid options, unique names and known task sources.
    pub(super) fn reward(&self, recipe: &Recipe) -> Result<(), RecipeError> {
        let reward: &RewardKeys = &recipe.reward;
        self.scorer("reward.scorer", &reward.scorer)?;
        for (i, scorer) in reward.scorers.iter().enumerate() {
            let key = |name: &str| format!("reward.scorers.{i}.{name}");
            let ScorerKeys { name, scorer: kind, .. } = scorer;
            let is_name = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
            let taken = reward.scorers[..i].iter().any(|earlier| earlier.name == *name);
            self.check(
                !name.is_empty() && name.chars().all(is_name) && !taken,
                key("name"),
                format!("{name:?}"),
                "a name that no other scorer has, of letters, digits, `_` and `-`",
            )?;
            self.sources(recipe, &key("when.source"), scorer)?;
            self.scorer(&format!("reward.scorers.{i}"), kind)?;
        }
        Ok(())
    }

    /// Checks that the task sources that a scorer names exist.
    fn sources(&self, recipe: &Recipe, key: &str, scorer: &ScorerKeys) -> Result<(), RecipeError> {
        let named = scorer.when.fields().find(|(field, _)| *field == "source");
        let known = names_of(recipe);
        for name in named.into_iter().flat_map(|(_, names)| names) {
            let is_known =
                known.iter().any(|(source, files)| source == name || files.contains(name));
            let likeness = |other: &str| strsim::normalized_damerau_levenshtein(name, other);
            let all = known.iter().flat_map(|(source, files)| files.iter().chain([source]));
            let nearest = all.max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
            let nearest = nearest.filter(|nearest| likeness(nearest) >= 0.5);
            let meant =
                nearest.map_or(String::new(), |nearest| format!("; did you mean \"{nearest}\"?"));
            let sources: Vec<&str> = known.iter().map(|(source, _)| source.as_str()).collect();
            let range = format!(
                "the name of a task source, or of one of its files; the sources are {}{meant}",
                sources.join(", ")
            );
            self.check(is_known, key, format!("{name:?}"), range)?;
        }
        Ok(())
    }

    fn scorer(&self, key: &str, kind: &ScorerKind) -> Result<(), RecipeError> {
        let Err(error) = kind.check() else { return Ok(()) };
        self.check(false, key, format!("not usable ({error})"), "a scorer with valid options")
    }
}

/// Returns the names of the sources of a recipe, each with the names of its files.
fn names_of(recipe: &Recipe) -> Vec<(String, Vec<String>)> {
    let name = |source: &TaskSource| match source {
        TaskSource::Arithmetic(_) => ("arithmetic".to_owned(), Vec::new()),
        TaskSource::File(options) => {
            let paths = options.path.as_slice().iter().filter_map(|path| path.file_name());
            (options.path.name(), paths.map(|name| name.to_string_lossy().into_owned()).collect())
        }
        TaskSource::Seeds(_) => (SeedKeys::SOURCE.to_owned(), Vec::new()),
        TaskSource::Sessions(_) => (levade_agent::SESSION_SOURCE.to_owned(), Vec::new()),
        environment => {
            let options = environment.environment();
            (
                options.map_or_else(String::new, |options| options.common().name.to_owned()),
                Vec::new(),
            )
        }
    };
    recipe.tasks.iter().map(name).collect()
}
