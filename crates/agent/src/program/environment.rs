//! Environment variables of a program.

use levade_gateway::Session;
use levade_policy::environment::passed;
use serde_json::{Value, json};

use super::Program;
use crate::AttemptContext;

/// Longest value that a variable can have on Linux, with some to spare.
const LONGEST: usize = 100_000;

/// Variables that are the same in every attempt, those that are `passed` on among them.
pub(super) fn shared_environment(passes: &[String]) -> Vec<(String, String)> {
    // Clients go to the endpoint itself, whatever proxies this machine has.
    let direct = ["NO_PROXY", "no_proxy"].map(|name| (name.into(), "127.0.0.1,localhost,::1".into()));
    passed(passes).into_iter().chain(direct).collect()
}

impl Program {
    /// All variables of the program in an attempt.
    pub(super) fn environment(
        &self,
        session: &Session,
        context: &AttemptContext,
        model: &str,
    ) -> Vec<(String, String)> {
        let base = format!("{}{}", self.address, session.path());
        let (v1, key) = (format!("{base}/v1"), session.key());
        let mut variables = shared_environment(&self.passes);
        let task = task_of(context).to_string();
        let ours = [
            // Every client reads its own; those of Anthropic add /v1 themselves. Their SDKs take one key:
            // a client that finds ANTHROPIC_AUTH_TOKEN, too, passes both on, and fails.
            ("OPENAI_BASE_URL", v1.as_str()),
            ("OPENAI_API_BASE", &v1),
            ("OPENAI_API_KEY", key),
            ("OPENAI_MODEL", model),
            ("ANTHROPIC_BASE_URL", &base),
            ("ANTHROPIC_API_KEY", key),
            ("ANTHROPIC_MODEL", model),
            ("LEVADE_BASE_URL", &base),
            ("LEVADE_API_KEY", key),
            ("LEVADE_MODEL", model),
            ("LEVADE_ATTEMPT", &context.name),
            ("LEVADE_TASK", if task.len() <= LONGEST { &task } else { "" }),
        ];
        variables.extend(ours.map(|(name, value)| (name.to_owned(), value.to_owned())));
        if self.rewards {
            variables.push(("LEVADE_REWARD_URL".into(), format!("{base}/reward")));
            variables.push(("LEVADE_REWARD_KEY".into(), session.reward_key().to_owned()));
        }
        // Agents that were written before the project was called Levade read these.
        let earlier = |(name, value): &(String, String)| {
            Some((format!("DRESSAGE_{}", name.strip_prefix("LEVADE_")?), value.clone()))
        };
        let earlier: Vec<_> = variables.iter().filter_map(earlier).collect();
        variables.extend(earlier);
        variables
    }
}

/// The task as a program is told of it: its id, its question, all fields of its row, and the messages that a
/// recipe makes of it. The expected answer is not among them unless the row has it.
pub(super) fn task_of(context: &AttemptContext) -> Value {
    let task = &context.task;
    json!({
        "id": task.id,
        "question": task.question,
        "messages": context.messages,
        "row": *task.row,
    })
}
