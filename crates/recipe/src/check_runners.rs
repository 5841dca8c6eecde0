//! Checks `[runners]`, and that runners can make the attempts of the agents.

use std::net::SocketAddr;

use levade_agent::Truncation;
use levade_tools::ToolKind;

use super::RecipeError;
use super::agent::{AgentKeys, AgentKind};
use super::check::{Checker, display_url, is_http};
use super::keys::Recipe;
use super::runners::RunnersKeys;
use super::tools::ToolKeys;

impl Checker<'_> {
    /// Checks the keys of `[runners]`.
    pub(super) fn check_runners(&self, recipe: &Recipe) -> Result<(), RecipeError> {
        let Some(keys) = &recipe.runners else { return Ok(()) };
        let RunnersKeys { store, listen, gateway, .. } = keys;
        let key = |name: &str| format!("runners.{name}");
        self.check(
            !store.is_empty() && store != "memory:" && !store.contains('@'),
            key("store"),
            display_url(store),
            "the path of an SQLite file, or the http:// URL of `levade store serve`, without a \
             user name: runners are other processes",
        )?;
        self.check_gateway_address(&key, (listen.as_str(), gateway.as_str()), "runners")?;
        recipe
            .agents()
            .into_iter()
            .try_for_each(|(name, keys)| self.check_leasable(recipe, name, keys))
    }

    /// Checks the address at which a gateway listens, and the URL by which it is reached. `clients`
    /// names the clients in the error.
    pub(super) fn check_gateway_address(
        &self,
        key: &dyn Fn(&str) -> String,
        (listen, gateway): (&str, &str),
        clients: &str,
    ) -> Result<(), RecipeError> {
        let address = listen.parse::<SocketAddr>();
        let range = "an IP address and a port, such as \"0.0.0.0:8700\"";
        self.check(address.is_ok(), key("listen"), format!("\"{listen}\""), range)?;
        let range = format!("the http:// URL by which {clients} reach the gateway");
        let is_url = gateway.is_empty() || (is_http(gateway) && !gateway.contains('@'));
        let without_user = format!("{range}, without a user name");
        self.check(is_url, key("gateway"), display_url(gateway), without_user)?;
        let is_everywhere = address.is_ok_and(|address| address.ip().is_unspecified());
        let is_known = !is_everywhere || !gateway.is_empty();
        let range = format!("{range}, because `listen` names no address");
        self.check(is_known, key("gateway"), "empty", range)
    }

    /// Checks that runners can make the attempts of an agent. A runner has no tokenizer, and cannot
    /// call other agents.
    fn check_leasable(
        &self,
        recipe: &Recipe,
        name: &str,
        keys: &AgentKeys,
    ) -> Result<(), RecipeError> {
        let range = "another kind with [runners]: games are played in the trainer's process";
        let is_game = keys.kind == AgentKind::Game;
        self.check(!is_game, format!("agent.{name}.kind"), keys.kind.name(), range)?;
        let range = "another kind with [runners]: agents start sessions at the trainer's gateway, \
                     without runners";
        let is_session = keys.kind == AgentKind::Session;
        self.check(!is_session, format!("agent.{name}.kind"), keys.kind.name(), range)?;
        if keys.kind != AgentKind::Tools {
            return Ok(());
        }
        let fits = keys.truncation == Truncation::Reject;
        let range = "\"reject\" with [runners]: prompts of runners are not shortened";
        let value = format!("{:?}", keys.truncation);
        self.check(fits, format!("agent.{name}.truncation"), value, range)?;
        for tool in keys.tools.iter().filter_map(|tool| ToolKeys::find(&recipe.tool, tool)) {
            let key = |key: &str| format!("tool.{}.{key}", tool.name());
            let tokens = tool.max_tokens.unwrap_or_default();
            let range = "left out with [runners], which have no tokenizer; set `max_characters`";
            self.check(tool.max_tokens.is_none(), key("max_tokens"), tokens, range)?;
            let range = "left out with [runners], whose tools call no agents";
            let calls_agent = matches!(tool.options, ToolKind::Agent(_));
            self.check(!calls_agent, key("kind"), "\"agent\"", range)?;
            self.check(tool.summarize.is_none(), key("summarize"), "set", range)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::{Recipe, RecipeError};

    const RECIPE: &str = "run = { name = 'x' }\nmodel = { source = './m' }\n\
                          tasks = [{ kind = 'arithmetic' }]\n";

    fn load(dir: &Path, rest: &str) -> Result<Recipe, RecipeError> {
        let file = dir.join("recipe.toml");
        std::fs::write(&file, format!("{RECIPE}{rest}")).unwrap();
        Recipe::load(&file, &[])
    }

    #[test]
    fn runners_are_checked_by_key() {
        let dir = tempfile::tempdir().unwrap();
        let keys = load(dir.path(), "runners = { store = 'http://h:4747' }").unwrap().runners;
        let keys = keys.unwrap();
        assert_eq!(keys.queue_name("x"), "run/x");
        assert_eq!((keys.lease_seconds, keys.wait_seconds), (60.0, 3600.0));
        assert_eq!(keys.folder, dir.path(), "files are found relative to the recipe");
        for (rest, wrong) in [
            ("runners = { store = '' }", "`runners.store`"),
            ("runners = { store = 'memory:' }", "`runners.store`"),
            ("runners = { store = 'http://me:secret@h' }", "`runners.store`"),
            ("runners = { store = 'r.db', listen = 'here' }", "`runners.listen`"),
            ("runners = { store = 'r.db', listen = '0.0.0.0:0' }", "`runners.gateway`"),
            ("runners = { store = 'r.db', gateway = 'host:1' }", "`runners.gateway`"),
            ("runners = { store = 'r.db', lease_seconds = 0 }", "`runners.lease_seconds`"),
            (
                "[runners]\nstore = 'r.db'\n[agent]\ntools = ['calculator']\n[[tool]]\n\
                 kind = 'calculator'\nmax_tokens = 9",
                "`tool.calculator.max_tokens`",
            ),
            ("[runners]\nstore = 'r.db'\n[agent]\ntruncation = 'left'", "truncation`"),
        ] {
            let error = load(dir.path(), rest).unwrap_err().to_string();
            assert!(error.contains(wrong) && !error.contains("secret"), "{rest}: {error}");
        }
    }

    #[test]
    fn recipe_of_other_host_finds_files_in_own_dir() {
        let dir = tempfile::tempdir().unwrap();
        let rest = "[runners]\nstore = 'r.db'\n[agent]\nkind = 'program'\n\
                    command = ['python3', 'solve.py']\n[[tool]]\nkind = 'python'\nname = 't'\n\
                    file = 'tools/t.py'";
        let recipe = load(dir.path(), rest).unwrap();
        let text = recipe.to_toml().unwrap();
        let other = Path::new("/srv/agent");
        let moved = Recipe::from_other_host(&text, Path::new("run/x"), other).unwrap();
        assert_eq!(moved.agent.folder, other);
        let text = moved.to_toml().unwrap();
        assert!(text.contains("\"/srv/agent/tools/t.py\""), "{text}");
    }
}
