//! Checks values of `[reward]`.

use levade_reward::ScorerKind;

use super::RecipeError;
use super::check::Checker;
use super::game::SeedKeys;
use super::keys::{Phase, Recipe, TaskSource};
use super::reward::{RewardKeys, ScorerKeys, WhenKeys};

impl Checker<'_> {
    /// Checks that scorers have valid options, unique names and existing task sources.
    pub(super) fn check_reward(&self, recipe: &Recipe) -> Result<(), RecipeError> {
        let reward: &RewardKeys = &recipe.reward;
        self.check_scorer("reward.scorer", &reward.scorer)?;
        for (i, scorer) in reward.scorers.iter().enumerate() {
            let key = |name: &str| format!("reward.scorers.{i}.{name}");
            let ScorerKeys { name, scorer: kind, .. } = scorer;
            let is_name = !name.is_empty()
                && name.chars().all(|c| c.is_ascii_alphanumeric() || "_-".contains(c));
            let taken = reward.scorers[..i].iter().any(|earlier| earlier.name == *name);
            self.check(
                is_name && !taken,
                key("name"),
                format!("{name:?}"),
                "a name that no other scorer has, of letters, digits, `_` and `-`",
            )?;
            self.check_sources(recipe, &key("when.source"), scorer)?;
            self.check_moments(recipe, &|name| key(&format!("when.{name}")), &scorer.when)?;
            self.check_scorer(&format!("reward.scorers.{i}"), kind)?;
        }
        Ok(())
    }

    /// Checks the phases, steps and measured success rates to which a scorer is limited.
    fn check_moments(
        &self,
        recipe: &Recipe,
        key: &dyn Fn(&str) -> String,
        when: &WhenKeys,
    ) -> Result<(), RecipeError> {
        let phases = recipe.phase.len() as u32;
        let bounds = [("from_phase", when.from_phase), ("until_phase", when.until_phase)];
        for (name, phase) in bounds {
            let Some(phase) = phase else { continue };
            let range = format!("the index of a phase: at least 0, and less than {phases}");
            self.check(phase < phases, key(name), phase, range)?;
            let range = "left out if run.skip_phases is set, which changes the indices of phases";
            self.check(recipe.run.skip_phases == 0, key(name), phase, range)?;
        }
        let ranges = [
            ("phase", when.from_phase.map(f64::from), when.until_phase.map(f64::from)),
            ("step", when.from_step.map(f64::from), when.until_step.map(f64::from)),
            ("success", when.from_success, when.until_success),
        ];
        for (name, from, until) in ranges {
            let Some(until) = until else { continue };
            let (from_name, until_name) = (format!("from_{name}"), format!("until_{name}"));
            let start = from.unwrap_or(0.0);
            let range = format!("more than `{from_name}`, {start}: the range excludes its end");
            self.check(start < until, key(&until_name), until, range)?;
        }
        let bounds = [("from_success", when.from_success), ("until_success", when.until_success)];
        for (name, success) in bounds {
            let Some(success) = success else { continue };
            self.check((0.0..=1.0).contains(&success), key(name), success, "in 0..=1")?;
            let measures = recipe.phase.iter().zip(0..).any(|(phase, index)| {
                let starts = when.from_phase.is_none_or(|from| from <= index);
                let ends = when.until_phase.is_some_and(|until| until <= index);
                matches!(phase, Phase::Rl(keys) if keys.curriculum.is_some()) && starts && !ends
            });
            let range = "left out unless an RL phase in which the scorer applies measures the \
                         success at tasks; set its `curriculum`, at least `curriculum = {}`";
            self.check(measures, key(name), success, range)?;
        }
        Ok(())
    }

    /// Checks that the task sources in a scorer's condition `when` exist.
    fn check_sources(
        &self,
        recipe: &Recipe,
        key: &str,
        scorer: &ScorerKeys,
    ) -> Result<(), RecipeError> {
        let named = scorer.when.fields().find(|(field, _)| *field == "source");
        let known = source_names(recipe);
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

    fn check_scorer(&self, key: &str, kind: &ScorerKind) -> Result<(), RecipeError> {
        let Err(error) = kind.check() else { return Ok(()) };
        self.check(false, key, format!("not usable ({error})"), "a scorer with valid options")
    }
}

/// Returns the name of each task source, with the names of its files.
fn source_names(recipe: &Recipe) -> Vec<(String, Vec<String>)> {
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
                options
                    .map_or_else(String::new, |options| options.common_options().name.to_owned()),
                Vec::new(),
            )
        }
    };
    recipe.tasks.iter().map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{Override, Recipe};

    const TWO_PHASES: &str = "[[phase]]\nkind = 'rl'\nsteps = 9\ngroups = 1\ngroup_size = 2\n\
                              learning_rate = 1e-5\n[[phase]]\nkind = 'rl'\nsteps = 9\n\
                              groups = 1\ngroup_size = 2\nlearning_rate = 1e-5\n\
                              curriculum = {}\n";

    fn load(when: &str, overrides: &[&str]) -> Result<Recipe, String> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("recipe.toml");
        let text = format!(
            "run = {{ name = 'x' }}\nmodel = {{ source = './m' }}\n\
             tasks = [{{ kind = 'arithmetic' }}]\n[[reward.scorers]]\nname = 'a'\n\
             kind = 'numeric'\nwhen = {{ {when} }}\n{TWO_PHASES}"
        );
        std::fs::write(&file, text).unwrap();
        let overrides: Vec<Override> =
            overrides.iter().map(|change| change.parse().unwrap()).collect();
        Recipe::load(&file, &overrides).map_err(|error| error.to_string())
    }

    #[test]
    fn moments_of_scorers_round_trip() {
        let when = "row = { level = ['1', '2'] }, from_phase = 1, from_step = 3, until_step = 5, \
                    until_success = 0.5";
        let recipe = load(when, &[]).unwrap();
        let keys = &recipe.reward.scorers[0].when;
        assert!(keys.row["level"].contains("2") && !keys.row["level"].contains("3"));
        let applies = |phase, step, success| keys.includes(phase, step, success);
        assert!(applies(1, 3, 0.0) && applies(7, 4, 0.49));
        assert!(!applies(0, 3, 0.0) && !applies(1, 2, 0.0));
        assert!(!applies(1, 5, 0.0) && !applies(1, 3, 0.5));
        assert!(keys.depends_on_success() && !keys.is_constant());
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("recipe.toml");
        std::fs::write(&file, recipe.to_toml().unwrap()).unwrap();
        assert_eq!(Recipe::load(&file, &[]).unwrap(), recipe);
    }

    #[test]
    fn empty_and_unmeasured_moments_are_rejected_by_key() {
        let cases: [(&str, &[&str], &str); 8] = [
            ("from_phase = 2", &[], "from_phase` is 2, but must be the index of a phase"),
            ("from_phase = 1", &["run.skip_phases=1"], "left out if run.skip_phases is set"),
            ("from_step = 4, until_step = 4", &[], "until_step` is 4, but must be more than"),
            ("until_step = 0", &[], "until_step` is 0, but must be more than"),
            ("until_success = 1.5", &[], "until_success` is 1.5, but must be in 0..=1"),
            ("from_success = -0.1", &[], "from_success` is -0.1, but must be in 0..=1"),
            ("from_success = 0.5, until_phase = 1", &[], "measures the success at tasks"),
            ("row = { level = [] }", &[], "when.row.level` is a list"),
        ];
        for (when, overrides, wrong) in cases {
            let error = load(when, overrides).unwrap_err();
            assert!(error.contains("`reward.scorers.0.") && error.contains(wrong), "{error}");
        }
        load("from_success = 0.5", &[]).unwrap();
    }
}
