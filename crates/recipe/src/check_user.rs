//! Creates and checks simulated users: `[user.NAME]`, and the agents that talk to them.

use std::time::Duration;

use levade_agent::user::{INSTRUCTION, STOP, SimulatedUser, UserAgent, UserSpeaker};
use levade_tools::{OptionError, PythonUserKeys, PythonUsers};
use levade_tree::DEFAULT;

use super::RecipeError;
use super::agent::{AgentKeys, AgentKind};
use super::check::Checker;
use super::check_agents::format_choices;
use super::keys::Recipe;
use super::read::ReadError;
use super::user::{UserAgentKeys, UserKeys, UserKind};

/// Name under which scorers get data about the simulated user. No toolbox may have this name.
const USER: &str = "user";

impl Recipe {
    /// Returns whether the agent called `agent` plays a simulated user. Its tokens are then never
    /// trained.
    pub fn plays_user(&self, agent: &str) -> bool {
        self.user.values().any(|keys| keys.agent() == Some(agent))
    }

    /// Creates the simulated user called `name`. Returns `None` if the recipe has no such user.
    /// `python` starts a user that is implemented as a Python class.
    pub fn simulated_user(
        &self,
        name: &str,
        python: impl FnOnce(&PythonUserKeys) -> PythonUsers,
    ) -> Option<SimulatedUser> {
        let UserKeys { opens, max_turns, stop, seconds, options } = self.user.get(name)?;
        let speaker = match options {
            UserKind::Python(keys) => UserSpeaker::Python(python(keys).into()),
            UserKind::Agent(UserAgentKeys { agent, prompt, greeting, instruction }) => {
                UserSpeaker::Agent(UserAgent {
                    agent: agent.clone(),
                    prompt: prompt.clone(),
                    greeting: greeting.clone(),
                    instruction: instruction.clone(),
                })
            }
        };
        Some(SimulatedUser {
            name: name.to_owned(),
            opens: *opens,
            max_turns: *max_turns,
            stop: stop.clone(),
            timeout: Duration::from_secs_f64(*seconds),
            speaker,
        })
    }
}

impl Checker<'_> {
    /// Checks the simulated users, the agents that play them, and the agents that talk to them.
    pub(super) fn check_users(&self, recipe: &Recipe) -> Result<(), RecipeError> {
        for (name, keys) in &recipe.user {
            self.check_name("user", name)?;
            match &keys.options {
                UserKind::Agent(options) => {
                    self.check_user_agent(recipe, name, &keys.stop, options)?
                }
                UserKind::Python(options) => match options.check() {
                    Ok(()) => {}
                    Err(OptionError::Range { key, value, range }) => {
                        self.check(false, format!("user.{name}.{key}"), value, range)?;
                    }
                    Err(OptionError::Other(why)) => {
                        let source = ReadError::at_path([USER, name], why);
                        return Err(RecipeError::Key { file: self.file().to_owned(), source });
                    }
                },
            }
        }
        for (name, keys) in recipe.agents() {
            self.check_user_of_agent(recipe, name, keys)?;
        }
        let taken = recipe.tool.iter().position(|keys| keys.name() == USER);
        let key = format!("tool.{}.name", taken.unwrap_or_default());
        let range = "another name: scorers get the data of the simulated user under this name";
        self.check(taken.is_none() || recipe.user.is_empty(), key, "\"user\"", range)
    }

    /// Checks that an agent can play the simulated user `name`.
    fn check_user_agent(
        &self,
        recipe: &Recipe,
        name: &str,
        stop: &str,
        keys: &UserAgentKeys,
    ) -> Result<(), RecipeError> {
        let key = |key: &str| format!("user.{name}.{key}");
        let agents = recipe.agents();
        let can_play =
            |(name, keys): &&(&str, &AgentKeys)| *name != DEFAULT && keys.kind == AgentKind::Tools;
        let players: Vec<&str> = agents.iter().filter(can_play).map(|(name, _)| *name).collect();
        let range = match players.is_empty() {
            true => "the NAME of an [agent.NAME] of kind \"tools\"; the recipe has none".to_owned(),
            false => format!("an [agent.NAME] of kind \"tools\", {}", format_choices(&players)),
        };
        let agent = keys.agent.as_str();
        self.check(players.contains(&agent), key("agent"), format!("\"{agent}\""), range)?;
        let range = "another agent: this agent is called by a tool, and would never be trained";
        let is_called = recipe.is_called_by_tools(agent);
        self.check(!is_called, key("agent"), format!("\"{agent}\""), range)?;
        let range = format!("a text that contains {INSTRUCTION}");
        let prompt = format!("{:?}", keys.prompt);
        self.check(keys.prompt.contains(INSTRUCTION), key("prompt"), &prompt, range)?;
        let knows_stop =
            stop.is_empty() || keys.prompt.contains(STOP) || keys.prompt.contains(stop);
        let range = format!("a text that contains {STOP}, with which the user ends the attempt");
        self.check(knows_stop, key("prompt"), prompt, range)
    }

    /// Checks the key `user` of an agent, which names the simulated user with whom the agent talks.
    fn check_user_of_agent(
        &self,
        recipe: &Recipe,
        name: &str,
        keys: &AgentKeys,
    ) -> Result<(), RecipeError> {
        // An agent that plays a user inherits the key from `[agent]`.
        if keys.user.is_empty() || recipe.plays_user(name) {
            return Ok(());
        }
        let table = if name == DEFAULT { "agent".into() } else { format!("agent.{name}") };
        let key = format!("{table}.user");
        let value = format!("\"{}\"", keys.user);
        let known = recipe.user.contains_key(&keys.user);
        let range = match recipe.user.is_empty() {
            true => "left out, or the NAME of a [user.NAME]; the recipe has none".to_owned(),
            false => format!("left out, or {}", format_choices(recipe.user.keys())),
        };
        self.check(known, &key, &value, range)?;
        let range = "left out unless `kind` is \"tools\": programs, environments and games have \
                     users of their own";
        self.check(keys.kind == AgentKind::Tools, &key, &value, range)?;
        let range = "\"\": a tool calls this agent, and reads its first reply";
        self.check(!recipe.is_called_by_tools(name), &key, &value, range)?;
        let range = "left out with [runners]: users run in the trainer's process";
        self.check(recipe.runners.is_none(), key, value, range)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Recipe, UserKind};

    fn load(rest: &str) -> Result<Recipe, String> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("recipe.toml");
        let head = "run = { name = 'x' }\nmodel = { source = './m' }\n\
                    tasks = [{ kind = 'arithmetic' }]\n\
                    [policy.default]\nkind = 'trained'\n\
                    [policy.api]\nkind = 'external'\nurl = 'http://h/v1'\nmodel = 'm'\n";
        std::fs::write(&file, format!("{head}{rest}")).unwrap();
        Recipe::load(&file, &[]).map_err(|error| error.to_string())
    }

    const AGENT: &str = "[agent]\nuser = 'customer'\n[agent.shopper]\npolicy = 'api'\n";
    const USER: &str = "[user.customer]\nkind = 'agent'\nagent = 'shopper'\n";
    const PHASE: &str = "[[phase]]\nkind = 'rl'\nsteps = 1\ngroups = 1\ngroup_size = 2\n\
                         learning_rate = 1e-5\n";

    #[test]
    fn users_load_round_trip_and_are_never_trained() {
        let recipe = load(&format!("{AGENT}{USER}max_turns = 3\ninstruction = 'a.b'\n{PHASE}"));
        let recipe = recipe.unwrap();
        let keys = &recipe.user["customer"];
        assert_eq!((keys.max_turns, keys.opens, keys.agent()), (3, true, Some("shopper")));
        assert!(recipe.untrained_agents().contains(&"shopper".to_owned()));
        assert!(!recipe.untrained_agents().contains(&"default".to_owned()));
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("recipe.toml");
        std::fs::write(&file, recipe.to_toml().unwrap()).unwrap();
        assert_eq!(Recipe::load(&file, &[]).unwrap(), recipe);
        let only = format!("{AGENT}{USER}{PHASE}only = {{ agents = ['shopper'] }}\n");
        assert!(load(&only).unwrap_err().contains("`phase.0.only.agents`"));
    }

    #[test]
    fn python_user_takes_paths_from_recipe_dir() {
        let recipe = load(
            "[agent]\nuser = 'c'\n[user.c]\nkind = 'python'\nfile = 'user.py'\nopens = false\n",
        );
        let recipe = recipe.unwrap();
        let UserKind::Python(keys) = &recipe.user["c"].options else { panic!() };
        assert!(keys.file.is_absolute() && keys.file.ends_with("user.py"), "{keys:?}");
    }

    #[test]
    fn unsuitable_users_are_rejected_by_key() {
        for (rest, wrong) in [
            ("[agent]\nuser = 'nobody'\n".to_owned(), "`agent.user` is \"nobody\""),
            (format!("{AGENT}[user.customer]\nkind = 'agent'\nagent = 'default'\n"), "customer.agent`"),
            (format!("{AGENT}{USER}prompt = 'Buy.'\n"), "contains {instruction}"),
            (format!("{AGENT}{USER}prompt = 'Buy {{instruction}}'\n"), "contains {stop}"),
            (format!("{AGENT}{USER}max_turns = 0\n"), "`user.customer.max_turns` is 0"),
            (format!("{AGENT}{USER}seconds = 0\n"), "`user.customer.seconds`"),
            (format!("{AGENT}{USER}sconds = 1\n"), "did you mean `seconds`"),
            ("[agent]\nuser = 'c'\n[user.c]\nkind = 'python'\n".to_owned(), "`user.c.file`"),
            (
                format!("{AGENT}kind = 'program'\ncommand = ['x']\n{USER}"),
                "`user.customer.agent`",
            ),
            (
                "[agent]\nkind = 'program'\ncommand = ['x']\nuser = 'c'\n[user.c]\nkind = 'python'\n\
                 file = 'u.py'\n"
                    .to_owned(),
                "`agent.user`",
            ),
            (
                format!("{AGENT}{USER}[[tool]]\nkind = 'calculator'\nname = 'user'\n"),
                "`tool.0.name`",
            ),
            (format!("{AGENT}{USER}[runners]\nstore = 'r.db'\n"), "`agent.user`"),
            ("[agent]\npolicy = 'default'\n[agent.shopper]\npolicy = 'api'\n".to_owned(), "external"),
        ] {
            let error = load(&rest).unwrap_err();
            assert!(error.contains(wrong), "{rest}: {error}");
        }
    }
}
