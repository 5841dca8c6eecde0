//! Checks attempts that learn from each other: `[phase.experience]`.

use super::RecipeError;
use super::agent::AgentKind;
use super::check::Checker;
use super::keys::{Recipe, TaskSource};
use super::rl::RlKeys;

impl Checker<'_> {
    /// Checks that the attempts of a group can run one after another, so that each reads the
    /// answers of earlier attempts.
    pub(super) fn check_experience(
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
                    "left out, because the agent {name} is of kind \"{}\": the recipe does not \
                     write its prompts",
                    agent.kind.name()
                ),
            )?;
            self.check(
                agent.user.is_empty(),
                key("experience"),
                "set",
                format!(
                    "left out, because the agent {name} has a simulated user, {}: the user would \
                     read the earlier attempts, or write the first message in their place",
                    agent.user
                ),
            )?;
        }
        let has_sessions =
            recipe.tasks.iter().any(|source| matches!(source, TaskSource::Sessions(_)));
        self.check(
            !has_sessions,
            key("experience"),
            "set",
            "left out with tasks of kind \"sessions\": their attempts are copies of sessions",
        )
    }
}

#[cfg(test)]
mod tests {
    use levade_tasks::Task;
    use levade_text::{Message, Role};

    use super::super::{Override, Phase, Recipe};

    fn load(changes: &[&str]) -> Result<Recipe, String> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("recipe.toml");
        let text = "run = { name = 'x' }\nmodel = { source = './m' }\n\
                    tasks = [{ kind = 'arithmetic' }]\n[[phase]]\nkind = 'rl'\nsteps = 1\n\
                    groups = 1\ngroup_size = 2\nlearning_rate = 1e-5\n[phase.experience]\n\
                    attempts = 2\n";
        std::fs::write(&file, text).unwrap();
        let changes: Vec<Override> = changes.iter().map(|change| change.parse().unwrap()).collect();
        Recipe::load(&file, &changes).map_err(|error| error.to_string())
    }

    #[test]
    fn experience_loads_and_round_trips() {
        let recipe = load(&["phase.0.experience.scores=false"]).unwrap();
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
        let user = ["agent.user='c'", "user.c={kind='python', file='user.py'}"];
        let sessions = ["tasks=[{kind='sessions', path='s'}]", "eval.tasks=0"];
        let cases: [(&[&str], &str); 5] = [
            (&["phase.0.oversample=1"], "`phase.0.oversample` is 1, but must be 0"),
            (&["phase.0.experience.attempts=0"], "`phase.0.experience.attempts` is 0"),
            (&["phase.0.experience.max_characters=0"], "`phase.0.experience.max_characters` is 0"),
            (&user, "because the agent default has a simulated user, c"),
            (&sessions, "left out with tasks of kind \"sessions\""),
        ];
        for (changes, wrong) in cases {
            let error = load(changes).unwrap_err();
            assert!(error.contains(wrong), "{changes:?}: {error}");
        }
    }

    #[test]
    fn prompt_ends_with_experience_of_task() {
        let recipe = load(&["agent.prompt='Q: {question}'"]).unwrap();
        let experience = Some("Attempt 1: 7".to_owned());
        let task = Task { question: "3 + 5?".into(), experience, ..Task::default() };
        let messages = recipe.agent.initial_messages(&task);
        assert_eq!(messages.last().unwrap().content.as_str(), "Q: 3 + 5?\n\nAttempt 1: 7");
        // A conversation that does not end with a message of the user gets one.
        let messages = vec![Message::user("3 + 5?"), Message::assistant("Let me see.")];
        let task = Task { messages, ..task };
        let messages = recipe.agent.initial_messages(&task);
        let [.., before, last] = &messages[..] else { panic!("{messages:?}") };
        assert_eq!(before.content.as_str(), "Let me see.");
        assert_eq!((last.role, last.content.as_str()), (Role::User, "Attempt 1: 7"));
    }
}
