//! Environment variables of a program.

use dressage_gateway::Session;
use dressage_policy::environment::passed;
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
            ("DRESSAGE_BASE_URL", &base),
            ("DRESSAGE_API_KEY", key),
            ("DRESSAGE_MODEL", model),
            ("DRESSAGE_ATTEMPT", &context.name),
            ("DRESSAGE_TASK", if task.len() <= LONGEST { &task } else { "" }),
        ];
        variables.extend(ours.map(|(name, value)| (name.to_owned(), value.to_owned())));
        if self.rewards {
            variables.push(("DRESSAGE_REWARD_URL".into(), format!("{base}/reward")));
            variables.push(("DRESSAGE_REWARD_KEY".into(), session.reward_key().to_owned()));
        }
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
