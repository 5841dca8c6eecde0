//! Checks tasks that are recorded sessions, demonstrations from them, and the gateway at which
//! agents start sessions.

use super::RecipeError;
use super::agent::AgentKind;
use super::check::Checker;
use super::check_agents::format_choices;
use super::keys::{Phase, Recipe, SftKeys, SourceKeys, TaskSource};
use super::sessions::{SessionGatewayKeys, SessionKeys};

impl Recipe {
    /// Returns whether the recipe has a task source of recorded sessions.
    pub fn has_sessions(&self) -> bool {
        self.tasks.iter().any(|source| matches!(source, TaskSource::Sessions(_)))
    }

    /// Returns whether an agent of the recipe runs elsewhere and makes its attempts as sessions.
    pub fn has_session_agents(&self) -> bool {
        self.agents().iter().any(|(_, keys)| keys.kind == AgentKind::Session)
    }

    /// Returns whether recorded sessions serve only as demonstrations, because all phases are SFT.
    /// Returns false if no task source consists of sessions.
    pub fn only_imitates_sessions(&self) -> bool {
        self.has_sessions()
            && !self.phase.is_empty()
            && self.phase.iter().all(|phase| matches!(phase, Phase::Sft(_)))
    }

    /// Returns the number of recorded sessions that form a group: the largest group size of an RL
    /// phase, or 1 if there is no RL phase.
    pub fn session_group(&self) -> usize {
        let size = |phase: &Phase| match phase {
            Phase::Rl(keys) => keys.group_size,
            Phase::Sft(_) | Phase::Prompt(_) => 1,
        };
        self.phase.iter().map(size).max().unwrap_or(1)
    }
}

impl Checker<'_> {
    /// Checks that sources of recorded sessions have a directory and an agent, and that no phase
    /// samples more attempts per task than were recorded.
    pub(super) fn check_sessions(&self, recipe: &Recipe) -> Result<(), RecipeError> {
        let agents = recipe.agents();
        for (index, source) in recipe.tasks.iter().enumerate() {
            let TaskSource::Sessions(SessionKeys { path, agent }) = source else { continue };
            let range = "the directory that `levade serve --record` has written";
            self.check(!path.as_os_str().is_empty(), format!("tasks.{index}.path"), "\"\"", range)?;
            let found = agent.is_empty() || agents.iter().any(|(name, _)| *name == agent);
            let range = format_choices(agents.iter().map(|(name, _)| name));
            self.check(found, format!("tasks.{index}.agent"), format!("\"{agent}\""), range)?;
        }
        if !recipe.has_sessions() {
            return Ok(());
        }
        for (phase, keys) in recipe.phase.iter().enumerate() {
            let Phase::Rl(keys) = keys else { continue };
            self.check(
                keys.oversample == 0,
                format!("phase.{phase}.oversample"),
                keys.oversample,
                "0 with tasks of kind \"sessions\", whose attempts are recorded already",
            )?;
            self.check(
                !keys.needs_baseline(),
                format!("phase.{phase}.advantage"),
                "one with greedy attempts",
                "another one with tasks of kind \"sessions\", for which nothing is sampled",
            )?;
        }
        Ok(())
    }

    /// Checks that recorded sessions can serve as the demonstrations of a phase.
    pub(super) fn check_session_source(
        &self,
        recipe: &Recipe,
        phase: usize,
        keys: &SftKeys,
        source: &SourceKeys,
    ) -> Result<(), RecipeError> {
        let key = |key: &str| format!("phase.{phase}.{key}");
        let range = "left out unless a source of tasks has kind = \"sessions\"";
        self.check(recipe.has_sessions(), key("source.sessions"), true, range)?;
        let range = "left out if `sessions` is set: only one of them supplies the demonstrations";
        for (name, value) in [("policy", &source.policy), ("field", &source.field)] {
            let value = value.as_deref();
            let text = format!("\"{}\"", value.unwrap_or_default());
            self.check(value.is_none(), key(&format!("source.{name}")), text, range)?;
        }
        let range = "left out if `source.sessions` is set: the agent of a session has written its \
                     own instructions";
        self.check(keys.system.is_none(), key("system"), "set", range)
    }

    /// Checks the gateway at which agents that run elsewhere start sessions.
    pub(super) fn check_session_gateway(&self, recipe: &Recipe) -> Result<(), RecipeError> {
        let Some(keys) = &recipe.sessions else { return Ok(()) };
        let SessionGatewayKeys { listen, gateway, key_env, .. } = keys;
        let range = "left out unless an agent has kind = \"session\"";
        self.check(recipe.has_session_agents(), "sessions", "set", range)?;
        let key = |name: &str| format!("sessions.{name}");
        self.check_gateway_address(&key, (listen.as_str(), gateway.as_str()), "agents")?;
        let range = "the environment variable with the keys that start sessions";
        self.check(!key_env.is_empty(), key("key_env"), "\"\"", range)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::{AgentKind, Recipe, RecipeError};

    const RECIPE: &str = "run = { name = 'x' }\nmodel = { source = './m' }\n";
    const ARITHMETIC: &str = "tasks = [{ kind = 'arithmetic' }]\n";
    const SESSIONS: &str = "tasks = [{ kind = 'sessions', path = 's' }]\neval = { tasks = 0 }\n";

    fn load(dir: &Path, rest: &str) -> Result<Recipe, RecipeError> {
        let file = dir.join("recipe.toml");
        std::fs::write(&file, format!("{RECIPE}{rest}")).unwrap();
        Recipe::load(&file, &[])
    }

    #[test]
    fn session_gateway_is_checked_by_key() {
        let dir = tempfile::tempdir().unwrap();
        let agent = "[agent]\nkind = 'session'\n";
        let recipe = load(dir.path(), &format!("{ARITHMETIC}{agent}")).unwrap();
        assert_eq!((recipe.agent.kind, recipe.sessions.is_none()), (AgentKind::Session, true));
        let keys = "[sessions]\nlisten = '0.0.0.0:8700'\ngateway = 'http://h:8700'\n";
        let recipe = load(dir.path(), &format!("{ARITHMETIC}{agent}{keys}")).unwrap();
        let found = recipe.sessions.clone().unwrap();
        assert_eq!((found.wait_seconds, found.silence_seconds), (3600.0, 600.0));
        assert_eq!(found.key_env, "LEVADE_API_KEYS");
        let moved = format!("{ARITHMETIC}{agent}{}", keys.replace("8700", "8701"));
        let moved = load(dir.path(), &moved).unwrap();
        assert_eq!(moved.difference(&recipe).unwrap(), None, "a resumed run can move its gateway");
        for (rest, wrong) in [
            ("[sessions]\nlisten = '0.0.0.0:1'\n".to_owned(), "`sessions` is set"),
            (format!("{agent}[sessions]\nlisten = 'here'\n"), "`sessions.listen`"),
            (format!("{agent}[sessions]\nlisten = '0.0.0.0:1'\n"), "`sessions.gateway`"),
            (format!("{agent}[sessions]\nkey_env = ''\n"), "`sessions.key_env`"),
            (format!("{agent}[sessions]\nsilence_seconds = 0\n"), "`sessions.silence_seconds`"),
            (format!("{agent}[runners]\nstore = 'r.db'\n"), "without runners"),
        ] {
            let error = load(dir.path(), &format!("{ARITHMETIC}{rest}")).unwrap_err().to_string();
            assert!(error.contains(wrong), "{rest}: {error}");
        }
    }

    #[test]
    fn session_source_is_checked_by_key() {
        let dir = tempfile::tempdir().unwrap();
        let sft = |more: &str| {
            format!(
                "[[phase]]\nkind = 'sft'\ndemonstrations = 4\nbatch = 2\nlearning_rate = 1e-5\n\
                 {more}\n"
            )
        };
        let source = "source = { sessions = true, min_score = 0.5 }";
        let recipe = load(dir.path(), &format!("{SESSIONS}{}", sft(source))).unwrap();
        assert!(recipe.only_imitates_sessions());
        assert_eq!(recipe.phase[0].teacher(), None);
        for (tasks, more, wrong) in [
            (ARITHMETIC, source.to_owned(), "`phase.0.source.sessions`"),
            (
                SESSIONS,
                "source = { sessions = true, field = 'x' }".to_owned(),
                "`phase.0.source.field`",
            ),
            (
                SESSIONS,
                "source = { sessions = true, policy = 'default' }".to_owned(),
                "`phase.0.source.policy`",
            ),
            (SESSIONS, format!("{source}\nsystem = ''"), "`phase.0.system`"),
        ] {
            let error =
                load(dir.path(), &format!("{tasks}{}", sft(&more))).unwrap_err().to_string();
            assert!(error.contains(wrong), "{more}: {error}");
        }
    }
}
