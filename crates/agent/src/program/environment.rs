//! Environment variables of programs.

use levade_policy::environment::child_environment;
use serde_json::{Value, json};

use super::{Program, SessionEndpoint};
use crate::AttemptContext;

/// Maximum length of the value of an environment variable, in bytes. Linux limits the
/// variable with its name to 131,072.
const MAX_VARIABLE_BYTES: usize = 100_000;

/// Environment variables that make HTTP clients reach the endpoint directly, without the proxies of
/// this machine.
pub(super) const NO_PROXY_VARIABLES: [(&str, &str); 2] =
    [("NO_PROXY", "127.0.0.1,localhost,::1"), ("no_proxy", "127.0.0.1,localhost,::1")];

impl Program {
    /// Returns all environment variables that the program receives in an attempt, as names and
    /// values.
    pub(super) fn environment_variables(
        &self,
        endpoint: &SessionEndpoint,
        context: &AttemptContext,
    ) -> Vec<(String, String)> {
        let SessionEndpoint { base_url: base, key, reward_key, model, .. } = endpoint;
        let v1 = format!("{base}/v1");
        let mut variables = child_environment(&self.passes);
        variables
            .extend(NO_PROXY_VARIABLES.map(|(name, value)| (name.to_owned(), value.to_owned())));
        let task = task_to_json(context).to_string();
        let ours = [
            // Every client reads its own variables. Those of Anthropic append /v1 themselves, and
            // their SDKs accept only one key: a client that also finds ANTHROPIC_AUTH_TOKEN sends
            // both, and fails.
            ("OPENAI_BASE_URL", v1.as_str()),
            ("OPENAI_API_BASE", &v1),
            ("OPENAI_API_KEY", key),
            ("OPENAI_MODEL", model),
            ("ANTHROPIC_BASE_URL", base),
            ("ANTHROPIC_API_KEY", key),
            ("ANTHROPIC_MODEL", model),
            ("LEVADE_BASE_URL", base),
            ("LEVADE_API_KEY", key),
            ("LEVADE_MODEL", model),
            ("LEVADE_ATTEMPT", &context.name),
            ("LEVADE_TASK", if task.len() <= MAX_VARIABLE_BYTES { &task } else { "" }),
        ];
        variables.extend(ours.map(|(name, value)| (name.to_owned(), value.to_owned())));
        if let Some(reward_key) = reward_key {
            variables.push(("LEVADE_REWARD_URL".into(), format!("{base}/reward")));
            variables.push(("LEVADE_REWARD_KEY".into(), reward_key.clone()));
        }
        // Agents written before the project was named Levade read these variables.
        let earlier = |(name, value): &(String, String)| {
            Some((format!("DRESSAGE_{}", name.strip_prefix("LEVADE_")?), value.clone()))
        };
        let earlier: Vec<_> = variables.iter().filter_map(earlier).collect();
        variables.extend(earlier);
        variables
    }
}

/// Returns the task as a program receives it, in JSON: its id, its question, all fields of its row,
/// and the messages that the recipe creates from the task. The expected answer is included only if
/// the row contains it.
pub(crate) fn task_to_json(context: &AttemptContext) -> Value {
    let task = &context.task;
    json!({
        "id": task.id,
        "question": task.question,
        "messages": context.messages,
        "row": *task.row,
    })
}
