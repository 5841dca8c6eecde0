//! Reads model calls and rewards from the spans of a try.
//!
//! Tracers of Agent Lightning, AgentOps and OpenTelemetry report what an agent did as spans. A
//! [`Trace`] orders the spans of one try as a tree, in which it finds the model calls, the agent
//! that made each call, and the rewards. The rules are those of Agent Lightning 0.3:
//! `find_final_reward` and `TracerTraceToTriplet` with its defaults.
//!
//! # Guarantees
//! - **A reward is reported or absent.** If a value is not a finite number, the reward is an error.
//!   It is never replaced by 0 or by an earlier reward.
//! - **Each call counts once.** If several spans have the same response id, the outermost span
//!   counts.
//!
//! Tokens are never created from spans. If a gateway recorded a call with the same
//! [`response_id`](TracedCall::response_id), the recorded tokens are used, and the span adds the
//! agent and the reward.
//!
//! Out of scope: joining spans with the record.

mod span;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};

use serde::Serialize;
use serde_json::Value;

use super::Span;
pub use span::TRIPLET_REWARD;
use span::{SpanReward, TracedSpan};

/// Name of the spans in which the store keeps the model calls that a client of Agent Lightning 0.1
/// reported.
pub const TRIPLET_SPAN: &str = "agentlightning.triplet";

/// Prefix of the attributes in which Weave's tracer reports a model call.
const WEAVE: &str = "agentlightning.operation";

/// Text that the name of a span contains if the span is a model call.
const CALL_NAME: &str = "openai.chat.completion";

/// Error for a reported reward that cannot be read, for example because it is not a finite number.
/// The try then counts as unscored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("span {span_id}: {text}")]
pub struct UnreadableReward {
    /// Id of the span that reports the reward.
    pub span_id: String,
    /// Description of why the reported reward is unusable.
    text: String,
}

/// A model call that a trace reports.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TracedCall {
    /// Id of the span that reports the call.
    pub span_id: String,
    /// Name of the span that reports the call.
    pub name: String,
    /// Name of the innermost agent that encloses the call. `None` if no span names an agent.
    pub agent: Option<String>,
    /// Id of the response, under which a gateway recorded the call. `None` if the span has no
    /// response id.
    pub response_id: Option<String>,
    /// Token ids of the prompt. Empty if the tracer did not record them.
    pub prompt_token_ids: Vec<u32>,
    /// Token ids of the completion. Empty if the tracer did not record them.
    pub response_token_ids: Vec<u32>,
    /// Messages of the prompt as JSON, as the tracer reports them.
    pub prompt: Value,
    /// Messages of the completion as JSON, as the tracer reports them.
    pub completion: Value,
    /// Start of the call by the client's clock, as a Unix timestamp in seconds.
    pub start_time: f64,
    /// End of the call by the client's clock, as a Unix timestamp in seconds.
    pub end_time: f64,
    /// Reward that was reported for this call. `None` if no readable reward was reported.
    pub reward: Option<f64>,
}

/// A node in the tree of a trace: a span, or a placeholder for a parent that is missing from the
/// trace (`span` is `None`).
#[derive(Debug)]
struct TraceNode {
    span: Option<usize>,
    children: Vec<usize>,
    start_time: f64,
    end_time: f64,
}

/// The spans of one try, arranged as a tree.
#[derive(Debug)]
pub struct Trace {
    spans: Vec<TracedSpan>,
    nodes: Vec<TraceNode>,
    /// Indices of the nodes without a parent.
    roots: Vec<usize>,
}

/// Context of a node in the tree of a trace, which its enclosing spans determine.
#[derive(Clone, Copy)]
struct EnclosingSpans<'a> {
    /// Name of the innermost enclosing agent. `None` outside of agents.
    agent: Option<&'a str>,
    /// Whether model calls in this context are selected.
    is_selected: bool,
    is_in_reward: bool,
    is_in_call: bool,
}

impl Trace {
    /// Creates a trace from the spans of one try, in the order of their sequence numbers.
    ///
    /// # Errors
    /// Returns an error if a body is not a span.
    pub fn from_spans(spans: &[Span]) -> serde_json::Result<Self> {
        let spans = spans.iter().map(TracedSpan::parse).collect::<Result<Vec<_>, _>>()?;
        let mut nodes: Vec<TraceNode> = (0..spans.len())
            .map(|index| TraceNode {
                span: Some(index),
                children: Vec::new(),
                start_time: spans[index].start_time,
                end_time: spans[index].end_time,
            })
            .collect();
        let mut by_id: HashMap<&str, usize> = HashMap::new();
        for (index, span) in spans.iter().enumerate() {
            by_id.entry(&span.id).or_insert(index);
        }
        let mut roots = Vec::new();
        let mut lost_roots = Vec::new();
        for (index, span) in spans.iter().enumerate() {
            let Some(parent_id) = span.parent_id.as_deref() else {
                roots.push(index);
                continue;
            };
            let parent = *by_id.entry(parent_id).or_insert_with(|| {
                lost_roots.push(nodes.len());
                let (start_time, end_time) = (f64::INFINITY, f64::NEG_INFINITY);
                nodes.push(TraceNode { span: None, children: Vec::new(), start_time, end_time });
                nodes.len() - 1
            });
            if nodes[parent].span.is_none() {
                nodes[parent].start_time = nodes[parent].start_time.min(span.start_time);
                nodes[parent].end_time = nodes[parent].end_time.max(span.end_time);
            }
            nodes[parent].children.push(index);
        }
        // Spans whose parents form a cycle have no root, and stay outside.
        roots.append(&mut lost_roots);
        let mut trace = Trace { spans, nodes, roots };
        trace.restore_lost_parents();
        Ok(trace)
    }

    /// Moves each topmost sibling below the shortest node that encloses it in time. A framework
    /// that traces with several systems loses the parents of its model calls.
    fn restore_lost_parents(&mut self) {
        let mut parent = None;
        let mut siblings = self.roots.clone();
        while let [only] = siblings[..] {
            parent = Some(only);
            siblings = self.nodes[only].children.clone();
        }
        let everything = self.preorder_nodes(&siblings);
        let mut left = siblings.len();
        let mut moved = HashSet::new();
        for &node in &siblings {
            if left == 1 {
                break;
            }
            let own: HashSet<usize> = self.preorder_nodes(&[node]).into_iter().collect();
            let TraceNode { start_time, end_time, .. } = self.nodes[node];
            let excess = |&at: &usize| {
                let TraceNode { start_time: start, end_time: end, .. } = self.nodes[at];
                let excess = (end - start) - (end_time - start_time);
                (start <= start_time && end >= end_time && excess > 0.0 && !own.contains(&at))
                    .then_some((excess, at))
            };
            let closest = everything.iter().filter_map(excess).min_by(|a, b| a.0.total_cmp(&b.0));
            if let Some((_, closest)) = closest {
                self.nodes[closest].children.push(node);
                moved.insert(node);
                left -= 1;
            }
        }
        let siblings = match parent {
            Some(parent) => &mut self.nodes[parent].children,
            None => &mut self.roots,
        };
        siblings.retain(|node| !moved.contains(node));
    }

    /// Returns the indices of all nodes below `roots`, each parent before its children.
    fn preorder_nodes(&self, roots: &[usize]) -> Vec<usize> {
        let mut found = Vec::new();
        let mut open: Vec<usize> = roots.iter().rev().copied().collect();
        while let Some(node) = open.pop() {
            found.push(node);
            open.extend(self.nodes[node].children.iter().rev());
        }
        found
    }

    /// Returns the final reward of the try: the primary value of the last span that reports a
    /// reward. Returns `None` if no span reports a reward.
    ///
    /// # Errors
    /// Returns an error if the last reward is not a finite number.
    pub fn final_reward(&self) -> Result<Option<f64>, UnreadableReward> {
        Ok(self.final_rewards()?.first().map(|(_, value)| *value))
    }

    /// Returns all dimensions of the final reward as (name, value), the primary dimension first.
    /// Empty if no span reports a reward.
    ///
    /// # Errors
    /// Returns an error if a dimension of the last reward is not a finite number.
    pub fn final_rewards(&self) -> Result<&[(String, f64)], UnreadableReward> {
        for span in self.spans.iter().rev() {
            match &span.reward {
                SpanReward::Absent => {}
                SpanReward::Values(values) => return Ok(values),
                SpanReward::Malformed(text) => {
                    let span_id = span.id.clone();
                    return Err(UnreadableReward { span_id, text: text.clone() });
                }
            }
        }
        Ok(&[])
    }

    /// Returns the model calls of the agents that `is_selected` accepts, in the order of the tree.
    /// `is_selected` receives the name of the innermost agent around a call, or `None` if no span
    /// names an agent. Calls of a reward computation are left out.
    pub fn calls(&self, is_selected: impl Fn(Option<&str>) -> bool) -> Vec<TracedCall> {
        let mut found = Vec::new();
        let mut response_ids = HashSet::new();
        let scope = EnclosingSpans {
            agent: None,
            is_selected: is_selected(None),
            is_in_reward: false,
            is_in_call: false,
        };
        let mut open: Vec<(usize, EnclosingSpans<'_>)> =
            self.roots.iter().rev().map(|root| (*root, scope)).collect();
        while let Some((node, mut scope)) = open.pop() {
            if let Some(index) = self.nodes[node].span {
                let span = &self.spans[index];
                let mut inner = scope;
                if let Some(agent) = span.agent_name() {
                    inner.agent = Some(agent);
                    inner.is_selected = is_selected(Some(agent));
                }
                // A reported call has no span of its agent around it, and names the agent itself.
                if span.name == TRIPLET_SPAN {
                    scope = inner;
                }
                if scope.is_selected && !scope.is_in_reward && is_model_call(span) {
                    let response_id = find_response_id(span);
                    let is_new =
                        response_id.map_or(!scope.is_in_call, |id| response_ids.insert(id));
                    if is_new {
                        found.push((node, scope.agent));
                        inner.is_in_call = true;
                    }
                }
                inner.is_in_reward |= span.is_reward_span();
                scope = inner;
            }
            open.extend(self.nodes[node].children.iter().rev().map(|child| (*child, scope)));
        }
        let rewards = self.assign_rewards(&found.iter().map(|(node, _)| *node).collect::<Vec<_>>());
        found
            .into_iter()
            .filter_map(|(node, agent)| self.build_traced_call(node, agent, &rewards))
            .collect()
    }

    /// Assigns the reported rewards to model calls, in the order of time. A reward belongs to the
    /// latest call that ended before the reward and has no reward yet.
    fn assign_rewards(&self, calls: &[usize]) -> HashMap<usize, Option<f64>> {
        let calls: HashSet<usize> = calls.iter().copied().collect();
        let mut by_time = self.preorder_nodes(&self.roots);
        by_time.sort_by(|a, b| self.nodes[*a].start_time.total_cmp(&self.nodes[*b].start_time));
        let mut rewards = HashMap::new();
        let mut earlier: Vec<usize> = Vec::new();
        for node in by_time {
            if calls.contains(&node) {
                earlier.push(node);
            }
            let reward = match self.nodes[node].span.map(|index| &self.spans[index].reward) {
                None | Some(SpanReward::Absent) => continue,
                Some(SpanReward::Values(values)) => values.first().map(|(_, value)| *value),
                Some(SpanReward::Malformed(_)) => None,
            };
            let start = self.nodes[node].start_time;
            let is_open = |call: &&usize| {
                self.nodes[**call].end_time <= start && !rewards.contains_key(*call)
            };
            if let Some(call) = earlier.iter().rev().find(is_open) {
                rewards.insert(*call, reward);
            }
        }
        rewards
    }

    fn build_traced_call(
        &self,
        node: usize,
        agent: Option<&str>,
        rewards: &HashMap<usize, Option<f64>>,
    ) -> Option<TracedCall> {
        let span = &self.spans[self.nodes[node].span?];
        let own = span.attributes.get(TRIPLET_REWARD).and_then(Value::as_f64);
        Some(TracedCall {
            span_id: span.id.clone(),
            name: span.name.clone(),
            agent: agent.map(str::to_owned),
            response_id: find_response_id(span).map(str::to_owned),
            prompt_token_ids: span.first_token_ids(&[
                "prompt_token_ids",
                &format!("{WEAVE}.output.prompt_token_ids"),
            ]),
            response_token_ids: span.first_token_ids(&[
                "response_token_ids",
                &format!("{WEAVE}.output.response_token_ids.0"),
                &format!("{WEAVE}.output.choices.0.token_ids"),
                &format!("{WEAVE}.output.choices.0.provider_specific_fields.token_ids"),
            ]),
            prompt: span.nest_attributes(&["gen_ai.prompt", &format!("{WEAVE}.input.messages")]),
            completion: span
                .nest_attributes(&["gen_ai.completion", &format!("{WEAVE}.output.choices")]),
            start_time: span.start_time,
            end_time: span.end_time,
            reward: own.or_else(|| rewards.get(&node).copied().flatten()),
        })
    }
}

fn is_model_call(span: &TracedSpan) -> bool {
    span.name.contains(CALL_NAME) || span.name == TRIPLET_SPAN
}

fn find_response_id(span: &TracedSpan) -> Option<&str> {
    span.first_text(&["gen_ai.response.id", "agentlightning.operation.output.id"])
}
