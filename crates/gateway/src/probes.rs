//! Probes: calls by which a program finds out whether the model answers, before its task begins.
//!
//! Some frameworks send a short question without tools ("say hello") before the conversation of the task. Its
//! reply has no part in the attempt's success, and must not be trained with the attempt's reward. A call is a
//! probe if all of this holds:
//!
//! - It tells the model of no tool, and its messages are one user message and instructions.
//! - Its agent has called with tools since, for the first time. An agent that never uses tools has no probes.
//! - No later call continues it.
//! - Its question has nothing to do with the task: no question of the agent's calls with tools contains it,
//!   or is contained in it. A plan, a title or a summary that precedes the conversation quotes the task.
//!
//! Segments of a probe belong to the agent [`probe_agent`], which is never trained. To train such calls, a
//! recipe gives them an agent of their own, with `match = { has_tools = false }`.

use std::collections::BTreeSet;

use levade_text::{Message, Role, ToolSpec};
use levade_tree::{SegmentId, Trajectory};

/// Returns the name of the agent that the probes of an agent belong to.
pub fn probe_agent(agent: &str) -> String {
    format!("{agent}.probe")
}

/// A reply that may answer a probe.
#[derive(Debug)]
struct Candidate {
    agent: String,
    question: String,
    segment: SegmentId,
    /// Whether a call with tools of its agent has to do with the question.
    belongs: bool,
}

/// Calls of an attempt that may be probes.
#[derive(Debug, Default)]
pub(crate) struct Probes {
    candidates: Vec<Candidate>,
    /// Agents that have called with tools.
    with_tools: BTreeSet<String>,
}

impl Probes {
    /// Notes a call that begins. Returns its question if the call may be a probe.
    pub(crate) fn begins(&mut self, agent: &str, messages: &[Message], tools: &[ToolSpec]) -> Option<String> {
        let mut questions = messages.iter().filter(|message| message.role == Role::User);
        if !tools.is_empty() {
            self.with_tools.insert(agent.to_owned());
        }
        let candidates = self.candidates.iter_mut().filter(|candidate| candidate.agent == agent);
        for candidate in candidates.filter(|_| !tools.is_empty()) {
            candidate.belongs |= questions.clone().any(|question| {
                let question = question.content.trim();
                question.contains(&candidate.question) || candidate.question.contains(question)
            });
        }
        let only = questions.next().filter(|_| questions.next().is_none())?;
        let is_bare = messages.iter().all(|message| message.role == Role::User || message.role.instructs());
        let question = only.content.trim();
        let may_be = tools.is_empty() && is_bare && !question.is_empty() && !self.with_tools.contains(agent);
        may_be.then(|| question.to_owned())
    }

    /// Notes the reply to a call that may be a probe.
    pub(crate) fn replied(&mut self, agent: &str, question: String, segment: SegmentId) {
        self.candidates.push(Candidate { agent: agent.to_owned(), question, segment, belongs: false });
    }

    /// Gives the segments of probes to agents of their own. Returns the turns of their calls.
    pub(crate) fn set_apart(self, trajectory: &mut Trajectory) -> Vec<u32> {
        let continued: BTreeSet<SegmentId> =
            trajectory.segments().iter().filter_map(|segment| segment.parent).collect();
        let mut turns = Vec::new();
        for Candidate { agent, segment, belongs, .. } in self.candidates {
            if belongs || !self.with_tools.contains(&agent) || continued.contains(&segment) {
                continue;
            }
            trajectory.assign(segment, &probe_agent(&agent));
            turns.push(trajectory.segments()[segment.0 as usize].turn);
        }
        turns
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use levade_tree::Kind;
    use serde_json::{Value, json};

    use crate::testing::Served;

    const TASK: &str = "What is 12 * 3?";

    fn asks(question: &str, system: Option<&str>, tools: bool) -> Value {
        let system = system.map(|text| json!({ "role": "system", "content": text }));
        let user = json!({ "role": "user", "content": question });
        let messages: Vec<Value> = system.into_iter().chain([user]).collect();
        let mut body = json!({ "model": "tiny", "messages": messages });
        if tools {
            let function = json!({ "name": "add", "parameters": { "type": "object" } });
            body["tools"] = json!([{ "type": "function", "function": function }]);
        }
        body
    }

    /// Agents of the sampled segments after these calls.
    async fn agents(calls: &[Value]) -> Vec<String> {
        let served = Served::scripted(&["Hello.", "36."]);
        for call in calls {
            served.post("/v1/chat/completions", call).await.json();
        }
        let recorded = served.session.close(Duration::from_secs(5)).await;
        let sampled = recorded.trajectory.segments().iter().filter(|s| s.kind == Kind::Sampled);
        let agents: Vec<String> = sampled.map(|segment| segment.agent.clone()).collect();
        let probes = agents.iter().filter(|agent| agent.ends_with(".probe")).count();
        assert_eq!(recorded.calls.iter().filter(|call| call.probe).count(), probes);
        agents
    }

    #[tokio::test]
    async fn question_before_task_is_a_probe() {
        let task = asks(TASK, None, true);
        assert_eq!(
            agents(&[asks("say hello", None, false), task.clone()]).await,
            ["default.probe", "default"]
        );
        let instructed = asks("ping", Some("You are helpful."), false);
        assert_eq!(agents(&[instructed.clone(), task.clone()]).await, ["default.probe", "default"]);
        let twice = [instructed.clone(), instructed, task].to_vec();
        assert_eq!(agents(&twice).await, ["default.probe", "default.probe", "default"]);
    }

    #[tokio::test]
    async fn calls_of_the_task_are_no_probes() {
        let task = asks(TASK, None, true);
        let hello = asks("say hello", None, false);
        // An agent without tools; a plan that quotes the task; a question of the task; a call after the
        // first.
        assert_eq!(agents(std::slice::from_ref(&hello)).await, ["default"]);
        assert_eq!(agents(&[hello.clone(), asks("What now?", None, false)]).await, ["default", "default"]);
        let plan = asks(&format!("Plan this: {TASK}"), None, false);
        assert_eq!(agents(&[plan, task.clone()]).await, ["default", "default"]);
        let part = asks("12 * 3", None, false);
        assert_eq!(agents(&[part, task.clone()]).await, ["default", "default"]);
        assert_eq!(agents(&[task.clone(), hello.clone()]).await, ["default", "default"]);
        // A conversation that goes on.
        let mut more = hello.clone();
        more["messages"].as_array_mut().unwrap().extend([
            json!({ "role": "assistant", "content": "Hello." }),
            json!({ "role": "user", "content": "Well?" }),
        ]);
        assert_eq!(agents(&[hello, more, task]).await, ["default", "default", "default"]);
    }
}
