//! Agents that toolboxes ask: `[[tool]] kind = "agent"`, and `condense` of any toolbox.

use std::time::Duration;

use levade_tools::{Condensing, HelperSlot, SubAgent};
use serde::{Deserialize, Serialize};

/// `[[tool]] kind = "agent"`: another agent as a tool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentToolKeys {
    /// The agent, by name.
    pub agent: String,
    /// Description for the model: what the agent can be asked.
    pub description: String,
}

impl AgentToolKeys {
    /// The toolbox, each call of which may take so many seconds.
    pub(super) fn toolbox(&self, name: String, seconds: Option<f64>) -> SubAgent {
        SubAgent {
            name,
            description: self.description.clone(),
            slot: HelperSlot::new(self.agent.as_str()),
            longest: seconds.map(Duration::from_secs_f64),
        }
    }
}

/// `condense`: long answers of a toolbox are condensed by another agent before they are read.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CondenseKeys {
    /// The agent, by name.
    pub agent: String,
    /// Answers of more characters than this are condensed.
    #[serde(default = "above")]
    pub above: usize,
    /// Words before the call and its answer.
    #[serde(default = "instruction")]
    pub instruction: String,
}

fn above() -> usize {
    2000
}

fn instruction() -> String {
    "Condense the answer of a tool for the one who called it. Keep every fact, number, name and address that the call \
     was after, in the words of the answer; compute and add nothing, and leave out the rest."
        .into()
}

impl CondenseKeys {
    /// Options of the toolbox around another one.
    pub fn options(&self) -> Condensing {
        let CondenseKeys { agent, above, instruction } = self.clone();
        Condensing { slot: HelperSlot::new(agent), above, instruction }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Outage, Recipe, RecipeError, ToolOptions};

    fn load(rest: &str) -> Result<Recipe, RecipeError> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("recipe.toml");
        let head = "run = { name = 'x' }\nmodel = { source = './m' }\n[[tasks]]\nkind = 'arithmetic'\n";
        std::fs::write(&file, format!("{head}{rest}")).unwrap();
        Recipe::load(&file, &[])
    }

    const CLERK: &str = "[[tool]]\nkind = 'agent'\nname = 'ask'\nagent = 'clerk'\ndescription = 'Sums.'\n";

    #[test]
    fn agents_may_be_tools_and_condense_what_tools_say() {
        let recipe = load(&format!(
            "[agent]\ntools = ['ask', 'calculator']\n[agent.clerk]\ntools = ['calculator']\n{CLERK}\
             [[tool]]\nkind = 'calculator'\noutage = 'retry'\ncondense = {{ agent = 'clerk', above = 5 }}\n"
        ));
        // The clerk would be asked about the answers of its own calculator.
        let error = recipe.unwrap_err().to_string();
        assert!(error.contains("`tool.0.agent` is \"clerk\""), "{error}");
        assert!(error.contains("does not ask itself"), "{error}");
        let recipe = load(&format!(
            "[agent]\ntools = ['ask', 'calculator']\n[agent.clerk]\ntools = []\n{CLERK}\
             [[tool]]\nkind = 'calculator'\noutage = 'retry'\ncondense = {{ agent = 'clerk', above = 5 }}\n"
        ))
        .unwrap();
        let [ask, calculator] = &recipe.tool[..] else { panic!("{:?}", recipe.tool) };
        assert!(matches!(&ask.options, ToolOptions::Agent(keys) if keys.agent == "clerk"));
        let condense = calculator.condense.as_ref().unwrap();
        assert_eq!((condense.agent.as_str(), condense.above, calculator.outage), ("clerk", 5, Outage::Retry));
        let text = recipe.to_toml().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("recipe.toml");
        std::fs::write(&file, &text).unwrap();
        assert_eq!(Recipe::load(&file, &[]).unwrap().tool, recipe.tool, "{text}");
    }

    #[test]
    fn whoever_cannot_be_asked_is_refused() {
        let own =
            load(&format!("[agent]\ntools = ['ask']\n[agent.clerk]\nsystem = 'x'\n{CLERK}")).unwrap_err();
        assert!(own.to_string().contains("[agent.clerk] has those of [agent]"), "{own}");
        let nobody = load(&format!("[agent]\ntools = ['ask']\n{CLERK}")).unwrap_err().to_string();
        assert!(nobody.contains("`tool.0.agent` is \"clerk\"") && nobody.contains("default"), "{nobody}");
        let program = load(&format!(
            "[agent]\ntools = ['ask']\n[agent.clerk]\nkind = 'program'\ncommand = ['x']\ntools = []\n{CLERK}"
        ));
        assert!(program.unwrap_err().to_string().contains("of kind \"tools\": default"));
        let unnamed = load("[[tool]]\nkind = 'agent'\nagent = 'default'\ndescription = 'x'\n").unwrap_err();
        assert!(unnamed.to_string().contains("it needs a `name`"), "{unnamed}");
    }
}
