//! Texts of agents that phases have improved, such as system prompts.

use std::collections::BTreeMap;

use levade_recipe::PromptTarget;
use serde::{Deserialize, Serialize};

/// A version of one prompt text of an agent, such as its system prompt or a tool description.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptVersion {
    /// Name of the agent that reads the text.
    pub agent: String,
    /// Selects which of the agent's texts this is.
    pub target: PromptTarget,
    /// Number of the version within its phase. Version 0 is the text at the start of a prompt
    /// phase; in an SFT phase, it is the prompt of the recipe.
    pub version: u32,
    /// Text of this version.
    pub text: String,
}

/// The newest version of each prompt text that phases have improved.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(from = "StoredPromptVersions")]
pub struct ImprovedPrompts(Vec<PromptVersion>);

/// The stored form of improved prompts in a checkpoint.
#[derive(Deserialize)]
#[serde(untagged)]
enum StoredPromptVersions {
    Versions(Vec<PromptVersion>),
    /// Numbered system prompts by agent name, from builds that improved no other texts.
    Systems(BTreeMap<String, StoredSystemPrompt>),
}

#[derive(Deserialize)]
struct StoredSystemPrompt {
    version: u32,
    text: String,
}

impl From<StoredPromptVersions> for ImprovedPrompts {
    fn from(stored: StoredPromptVersions) -> Self {
        let system = |(agent, StoredSystemPrompt { version, text })| PromptVersion {
            agent,
            target: PromptTarget::System,
            version,
            text,
        };
        ImprovedPrompts(match stored {
            StoredPromptVersions::Versions(versions) => versions,
            StoredPromptVersions::Systems(systems) => systems.into_iter().map(system).collect(),
        })
    }
}

impl ImprovedPrompts {
    /// Returns whether no text has been improved.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the newest versions, in the order in which their texts were first improved.
    pub fn iter(&self) -> impl Iterator<Item = &PromptVersion> {
        self.0.iter()
    }

    /// Returns the newest version of the text that `target` selects, or `None` if no phase has
    /// improved that text.
    pub fn get(&self, agent: &str, target: &PromptTarget) -> Option<&PromptVersion> {
        self.iter().find(|known| known.agent == agent && known.target == *target)
    }

    /// Stores `version` as the newest version of its text, in place of an earlier version.
    pub(crate) fn set(&mut self, version: PromptVersion) {
        let is_same = |known: &&mut PromptVersion| {
            (&known.agent, &known.target) == (&version.agent, &version.target)
        };
        match self.0.iter_mut().find(is_same) {
            Some(known) => *known = version,
            None => self.0.push(version),
        }
    }
}

#[cfg(test)]
mod tests {
    use levade_recipe::ToolTarget;

    use super::*;

    #[test]
    fn prompts_of_older_checkpoints_are_system_prompts() {
        let stored = r#"{"default": {"version": 3, "text": "Think."}}"#;
        let mut prompts: ImprovedPrompts = serde_json::from_str(stored).unwrap();
        let system = PromptVersion {
            agent: "default".into(),
            target: PromptTarget::System,
            version: 3,
            text: "Think.".into(),
        };
        assert_eq!(prompts.iter().collect::<Vec<_>>(), [&system]);

        // Versions of other texts are stored beside them, one of each.
        let name = "calculator".to_owned();
        let tool = PromptTarget::Tool(ToolTarget { name, parameter: String::new() });
        for text in ["Computes.", "Computes sums."] {
            prompts.set(PromptVersion {
                target: tool.clone(),
                text: text.into(),
                ..system.clone()
            });
        }
        prompts.set(PromptVersion { version: 4, ..system.clone() });
        let stored = serde_json::to_string(&prompts).unwrap();
        assert_eq!(serde_json::from_str::<ImprovedPrompts>(&stored).unwrap(), prompts);
        assert_eq!(prompts.iter().count(), 2);
        assert_eq!(prompts.get("default", &tool).unwrap().text, "Computes sums.");
        assert_eq!(prompts.get("default", &PromptTarget::System).unwrap().version, 4);
        assert_eq!(prompts.get("writer", &PromptTarget::System), None);
        assert_eq!(
            serde_json::from_str::<ImprovedPrompts>("{}").unwrap(),
            ImprovedPrompts::default()
        );
    }
}
