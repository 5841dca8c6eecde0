//! Checks curricula: `[phase.curriculum]`.

use super::RecipeError;
use super::check::Checker;
use super::curriculum::CurriculumKeys;

impl Checker<'_> {
    /// Checks the curriculum of a phase.
    pub(super) fn check_curriculum(
        &self,
        phase: usize,
        keys: Option<&CurriculumKeys>,
    ) -> Result<(), RecipeError> {
        let Some(keys) = keys else { return Ok(()) };
        let key = |key: &str| format!("phase.{phase}.curriculum.{key}");
        let needs_pools = !keys.weights.is_empty() || !keys.stages.is_empty();
        let range = "set if `weights` or `stages` name pools: \"source\", \"kind\" or a field of \
                     the rows";
        self.check(!needs_pools || !keys.pool_by.is_empty(), key("pool_by"), "\"\"", range)?;
        for (name, weight) in &keys.weights {
            let ok = weight.is_finite() && *weight > 0.0;
            self.check(ok, key(&format!("weights.{name}")), weight, "more than 0 and finite")?;
        }
        for (at, name) in keys.stages.iter().enumerate() {
            let is_new = !keys.stages[..at].contains(name);
            self.check(is_new, key(&format!("stages.{at}")), format!("\"{name}\""), "listed once")?;
        }
        let range = format!("at most `gate`, {}", keys.gate);
        self.check(keys.back <= keys.gate, key("back"), keys.back, range)?;
        let Some([low, high]) = keys.band else { return Ok(()) };
        let ok = 0.0 <= low && low < high && high <= 1.0;
        let range = "two numbers in 0..=1, of which the first is lower";
        self.check(ok, key("band"), format!("[{low}, {high}]"), range)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Phase, Recipe};

    fn load(curriculum: &str) -> Result<Recipe, String> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("recipe.toml");
        let head = "run = { name = 'x' }\nmodel = { source = './m' }\n\
                    tasks = [{ kind = 'arithmetic' }]\n[[phase]]\nkind = 'rl'\nsteps = 1\n\
                    groups = 1\ngroup_size = 2\nlearning_rate = 1e-5\n[phase.curriculum]\n";
        std::fs::write(&file, format!("{head}{curriculum}")).unwrap();
        Recipe::load(&file, &[]).map_err(|error| error.to_string())
    }

    #[test]
    fn curriculum_loads_and_round_trips() {
        let text = "pool_by = 'kind'\nstages = ['easy', 'hard']\nweights = { easy = 1, hard = 3 }\n\
                    band = [0.2, 0.8]\n";
        let recipe = load(text).unwrap();
        let Phase::Rl(keys) = &recipe.phase[0] else { panic!() };
        let keys = keys.curriculum.as_ref().unwrap();
        assert_eq!((keys.weights["hard"], keys.band, keys.gate), (3.0, Some([0.2, 0.8]), 0.7));
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("recipe.toml");
        std::fs::write(&file, recipe.to_toml().unwrap()).unwrap();
        assert_eq!(Recipe::load(&file, &[]).unwrap(), recipe);
    }

    #[test]
    fn unsuitable_curricula_are_rejected_by_key() {
        for (text, wrong) in [
            ("stages = ['a']", "curriculum.pool_by`"),
            ("pool_by = 'kind'\nweights = { a = 0 }", "curriculum.weights.a` is 0"),
            ("pool_by = 'kind'\nstages = ['a', 'a']", "curriculum.stages.1`"),
            ("back = 0.8", "curriculum.back` is 0.8"),
            ("gate = 1.5", "curriculum.gate` is 1.5"),
            ("band = [0.8, 0.2]", "curriculum.band` is [0.8, 0.2]"),
            ("band = [0.1]", "curriculum.band"),
            ("retest = -0.1", "curriculum.retest` is -0.1"),
            ("memory = 1.0", "curriculum.memory` is 1"),
        ] {
            let error = load(text).unwrap_err();
            assert!(error.contains(wrong), "{text}: {error}");
        }
    }
}
