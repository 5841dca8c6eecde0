//! Checks attempts that learn from each other: `[phase.experience]`.

use super::RecipeError;
use super::agent::AgentKind;
use super::check::Checker;
use super::keys::Recipe;
use super::rl::RlKeys;

impl Checker<'_> {
    /// Checks that the attempts of a phase can be made one after another.
    pub(super) fn experience(
        &self,
        recipe: &Recipe,
        phase: usize,
        keys: &RlKeys,
    ) -> Result<(), RecipeError> {
        if keys.experience.is_none() {
            return Ok(());
        }
        let key = |name: &str| format!("phase.{phase}.{name}");
        self.check(
            keys.oversample == 0,
            key("oversample"),
            keys.oversample,
            "0 with `experience`: attempts that are made one after another cannot be oversampled",
        )?;
        for (name, agent) in recipe.agents() {
            self.check(
                matches!(agent.kind, AgentKind::Tools | AgentKind::Program),
                key("experience"),
                "set",
                format!(
                    "left out, because the agent {name} is of kind \"{}\": the rules or the \
                     environment write its prompts",
                    agent.kind.name()
                ),
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use levade_tasks::Task;

    use super::super::{Override, Phase, Recipe};

    fn load(change: &str) -> Result<Recipe, String> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("recipe.toml");
        let text = "run = { name = 'x' }\nmodel = { source = './m' }\n\
                    tasks = [{ kind = 'arithmetic' }]\n[[phase]]\nkind = 'rl'\nsteps = 1\n\
                    groups = 1\ngroup_size = 2\nlearning_rate = 1e-5\n[phase.experience]\n\
                    attempts = 2\n";
        std::fs::write(&file, text).unwrap();
        let change: Override = change.parse().unwrap();
        Recipe::load(&file, &[change]).map_err(|error| error.to_string())
    }

    #[test]
    fn experience_loads_and_round_trips() {
        let recipe = load("phase.0.experience.scores=false").unwrap();
        let Phase::Rl(keys) = &recipe.phase[0] else { panic!() };
        let keys = keys.experience.as_ref().unwrap();
        assert_eq!((keys.attempts, keys.scores, keys.max_characters), (2, false, 2000));
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("recipe.toml");
        std::fs::write(&file, recipe.to_toml().unwrap()).unwrap();
        assert_eq!(Recipe::load(&file, &[]).unwrap(), recipe);
    }

    #[test]
    fn unsuitable_experience_is_rejected_by_key() {
        for (change, wrong) in [
            ("phase.0.oversample=1", "`phase.0.oversample` is 1, but must be 0"),
            ("phase.0.experience.attempts=0", "`phase.0.experience.attempts` is 0"),
            ("phase.0.experience.max_characters=0", "`phase.0.experience.max_characters` is 0"),
        ] {
            let error = load(change).unwrap_err();
            assert!(error.contains(wrong), "{change}: {error}");
        }
    }

    #[test]
    fn prompt_ends_with_experience_of_task() {
        let recipe = load("agent.prompt='Q: {question}'").unwrap();
        let experience = Some("Attempt 1: 7".to_owned());
        let task = Task { question: "3 + 5?".into(), experience, ..Task::default() };
        let messages = recipe.agent.initial_messages(&task);
        assert_eq!(messages.last().unwrap().content.as_str(), "Q: 3 + 5?\n\nAttempt 1: 7");
    }
}
