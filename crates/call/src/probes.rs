//! Probes: calls with which a program checks that the model responds, before its task starts.
//!
//! Some frameworks send a short question without tools ("say hello") before the conversation of the
//! task. Its completion does not contribute to the attempt's success, so it must not be trained
//! with the attempt's reward. A call is a probe if all of the following hold:
//!
//! - Its request has no tools, and its messages are one user message and instructions.
//! - Its agent makes its first call with tools later. An agent that never uses tools has no probes.
//! - No later call continues it.
//! - Its question is unrelated to the task: no question of the agent's calls with tools contains
//!   it, is contained in it, or has all of its lines. A plan, a title or a summary that precedes
//!   the conversation quotes the task. A framework that writes the messages of all speakers into
//!   one question, between two marks, adds lines before the second mark.
//!
//! Segments of a probe are assigned to the agent [`probe_agent`], which is never trained. To train
//! such calls, a recipe assigns them to a separate agent, with `match = { has_tools = false }`.

use std::collections::BTreeSet;

use levade_text::{Message, Role, ToolSpec};
use levade_tree::{SegmentId, Trajectory};

/// Returns the name of the agent to which the probe calls of `agent` are assigned: `AGENT.probe`.
pub fn probe_agent(agent: &str) -> String {
    format!("{agent}.probe")
}

/// A recorded completion whose call may be a probe.
#[derive(Debug)]
struct ProbeCandidate {
    agent: String,
    question: String,
    segment: SegmentId,
    /// Whether the call belongs to the conversation and so is no probe. This holds if a later call
    /// of the agent with tools has a question that contains this question, is contained in it, or
    /// has all of its lines.
    belongs: bool,
}

/// Detector of probes among the calls of an attempt.
#[derive(Debug, Default)]
pub(crate) struct Probes {
    candidates: Vec<ProbeCandidate>,
    /// Names of the agents that have made a call with tools.
    with_tools: BTreeSet<String>,
}

impl Probes {
    /// Records the start of a call. Returns the call's only user message if the call may be a
    /// probe, otherwise `None`.
    pub(crate) fn probe_question(
        &mut self,
        agent: &str,
        messages: &[Message],
        tools: &[ToolSpec],
    ) -> Option<String> {
        let mut questions = messages.iter().filter(|message| message.role == Role::User);
        if !tools.is_empty() {
            self.with_tools.insert(agent.to_owned());
        }
        let candidates = self.candidates.iter_mut().filter(|candidate| candidate.agent == agent);
        let candidates = candidates.filter(|candidate| !tools.is_empty() && !candidate.belongs);
        for candidate in candidates {
            candidate.belongs = questions.clone().any(|question| {
                let question = question.content.trim();
                // Every text contains an empty question.
                !question.is_empty()
                    && (question.contains(&candidate.question)
                        || candidate.question.contains(question)
                        || has_lines(question, &candidate.question))
            });
        }
        let only = questions.next().filter(|_| questions.next().is_none())?;
        let is_bare =
            messages.iter().all(|message| message.role == Role::User || message.role.instructs());
        let question = only.content.trim();
        let may_be =
            tools.is_empty() && is_bare && !question.is_empty() && !self.with_tools.contains(agent);
        may_be.then(|| question.to_owned())
    }

    /// Records the completion of a call that may be a probe.
    pub(crate) fn record_completion(&mut self, agent: &str, question: String, segment: SegmentId) {
        self.candidates.push(ProbeCandidate {
            agent: agent.to_owned(),
            question,
            segment,
            belongs: false,
        });
    }

    /// Assigns the recorded segments of probes to separate agents. Returns the turns of the probes.
    pub(crate) fn separate(self, trajectory: &mut Trajectory) -> Vec<u32> {
        let continued: BTreeSet<SegmentId> =
            trajectory.segments().iter().filter_map(|segment| segment.parent).collect();
        let mut turns = Vec::new();
        for ProbeCandidate { agent, segment, belongs, .. } in self.candidates {
            if belongs || !self.with_tools.contains(&agent) || continued.contains(&segment) {
                continue;
            }
            trajectory.assign(segment, &probe_agent(&agent));
            turns.push(trajectory.segments()[segment.0 as usize].turn);
        }
        turns
    }
}

/// Returns whether all lines of `part` are lines of `text`.
fn has_lines(text: &str, part: &str) -> bool {
    let lines: BTreeSet<&str> = text.lines().collect();
    part.lines().all(|line| lines.contains(line))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn has_lines_requires_every_line() {
        let history = "<history>\nA: Hi.\nB: Hello.\n</history>";
        assert!(has_lines(history, "<history>\nA: Hi.\n</history>"));
        assert!(!has_lines(history, "<history>\nA: Hello.\n</history>"));
        assert!(!has_lines(history, "Hello"));
    }

    #[test]
    fn empty_question_leaves_probe_candidate() {
        let mut probes = Probes::default();
        probes.record_completion("a", "hello".to_owned(), SegmentId(0));
        probes.probe_question("a", &[Message::user(" ")], &[tool()]);
        assert!(!probes.candidates[0].belongs);
        probes.probe_question("a", &[Message::user("Say hello.")], &[tool()]);
        assert!(probes.candidates[0].belongs);
    }

    fn tool() -> ToolSpec {
        ToolSpec {
            name: "add".into(),
            description: String::new(),
            parameters: serde_json::Value::Null,
        }
    }

    #[test]
    fn probe_candidates_are_bare_questions_before_tool_calls() {
        let system = Message::system("Be brief.");
        let mut probes = Probes::default();
        for (messages, want) in [
            (vec![Message::user("hello")], hello()),
            (vec![system, Message::user(" hello\n")], hello()),
            (vec![Message::user("hello"), Message::assistant("Hi.")], None),
            (vec![Message::user("hello"), Message::user("hello")], None),
            (vec![Message::user(" \n")], None),
            (Vec::new(), None),
        ] {
            assert_eq!(probes.probe_question("a", &messages, &[]), want, "{messages:?}");
        }
        assert_eq!(probes.probe_question("a", &[Message::user("hello")], &[tool()]), None);
        assert_eq!(probes.probe_question("a", &[Message::user("hello")], &[]), None);
        assert_eq!(probes.probe_question("b", &[Message::user("hello")], &[]), hello());
    }

    fn hello() -> Option<String> {
        Some("hello".to_owned())
    }
}
