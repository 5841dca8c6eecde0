//! Renders prompts for requests, and records prompts and completions.

mod counts;
mod finish;
mod fitting;
mod raw;
mod render;

use std::collections::HashMap;
use std::sync::Arc;

use levade_policy::{Completion, FinishReason, SamplingParams};
use levade_text::{Message, ShiftedSystems, TextError, ToolSpec};
use levade_tree::{Segment, SegmentId, Trajectory, TreeError};
use serde::{Deserialize, Serialize};

use crate::canonical::{CanonicalForm, Key, reasoning_key, tools_key};
use crate::drift::Drift;
use crate::format::{CallIds, Format, History, Round};
use crate::index::{CompletionRecord, Index, NodeId, NodeKind, Party, PromptRecord, append_text};
use crate::origin::{Fork, Origin, Reason};
use crate::recorded_completion::RecordedCompletion;
use crate::tokens::{ContextTokens, Owner};
use crate::window::Truncation;

pub use counts::Counts;
use fitting::AppliedTruncation;
pub use fitting::{ContextFitter, FitResult};

/// Reasons why a request cannot be rendered as a prompt.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConversationError {
    /// The messages cannot be rendered in the model's format.
    #[error("{0}")]
    Text(#[from] TextError),
    /// The template renders recorded history differently, which is an error in strict mode.
    #[error(
        "before turn {turn}, the chat template renders {printed:?} instead of the recorded \
         {recorded:?}; use a template that preserves the history, set history = \"template\" to \
         follow the template, or allow drift, which is then counted"
    )]
    Drift {
        /// Number of the turn that would have been recorded next.
        turn: u32,
        /// Recorded text, from the first difference.
        recorded: String,
        /// Text that the template renders instead.
        printed: String,
    },
}

/// A request for a completion, with all messages of a conversation, as in the OpenAI API.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// Name of the agent that sends the request. Empty if there is only one.
    pub agent: &'a str,
    /// Name of the policy that the request is for. Empty if there is only one.
    pub policy: &'a str,
    /// Format of conversations with this policy.
    pub format: &'a Arc<Format>,
    /// All messages of the conversation so far.
    pub messages: &'a [Message],
    /// Tools that the model can call.
    pub tools: &'a [ToolSpec],
}

/// Part of the recorded history that a request repeats, and the differences that were accepted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepeatedHistory {
    /// Number of repeated messages.
    pub messages: usize,
    /// Number of messages up to the last repeated completion, included; the prompt continues its
    /// tokens.
    pub up_to_completion: usize,
    /// Number of completions that differ in white space around their content.
    pub trimmed: u32,
    /// Number of completions whose reasoning is missing, completely or in part.
    pub unsaid: u32,
    /// Number of completions that came back without the text next to their tool calls, or with
    /// arguments that are written differently.
    pub altered: u32,
    /// Whether the client has appended text to the last repeated completion.
    pub extended: bool,
}

/// A request, matched with the history that it repeats. It contains everything needed to render the
/// prompt without the conversation.
#[derive(Debug, Clone)]
pub struct MatchedRequest {
    from: PromptSource,
    format: Arc<Format>,
    origin: Origin,
    repeated: RepeatedHistory,
    continuation: Option<ContinuationPoint>,
    new: Vec<Message>,
    turn: u32,
}

#[derive(Debug, Clone)]
struct PromptSource {
    agent: String,
    policy: String,
    tools: Arc<[ToolSpec]>,
    key: Key,
}

/// The recorded completion that a prompt continues.
#[derive(Debug, Clone)]
struct ContinuationPoint {
    node: NodeId,
    segment: SegmentId,
    /// Tokens from the root to the end of the completion. The last `sampled` of them are the
    /// completion's.
    path: Vec<u32>,
    sampled: usize,
    past: Vec<Arc<Message>>,
    message: Arc<Message>,
    /// Whether the first prompt of the sequence was shortened.
    is_truncated: bool,
    drifted: Option<levade_tree::Drift>,
    /// Text that the client has appended to the completion. Empty if the client has appended none.
    rest: String,
}

/// A prompt for a sampler. It is not recorded yet, so a call that fails leaves no trace.
#[derive(Debug, Clone)]
pub struct PreparedPrompt {
    /// Token ids of the prompt: the recorded ids, unchanged, and the ids of the new messages.
    pub prompt: Vec<u32>,
    /// Whether the prompt opens the reasoning of the completion.
    pub in_reasoning: bool,
    /// How the prompt relates to the recorded history.
    pub origin: Origin,
    /// Recorded history that the prompt repeats.
    pub repeated: RepeatedHistory,
    /// A position at which the template renders the recorded history differently. `None` if none
    /// was found.
    pub drift: Option<levade_tree::Drift>,
    /// Number of new system messages that are rendered at another position than in the request.
    pub shifted: ShiftedSystems,
    from: PromptSource,
    format: Arc<Format>,
    continuation: Option<SequenceEnd>,
    /// Number of recorded tokens at the start of the prompt. `None` if the template rendered the
    /// complete prompt.
    recorded: Option<usize>,
    is_truncated: bool,
    new: Vec<Message>,
    recorded_prompt: Option<RecordedPrompt>,
    /// Prefix of the ids of the completion's tool calls, if [`name_calls`](Self::name_calls) has
    /// set one.
    calls: Option<String>,
    /// The cut that was applied to the messages, if any.
    fitted: Option<Box<AppliedTruncation>>,
}

/// The end of the recorded sequence that a prompt continues.
#[derive(Debug, Clone)]
struct SequenceEnd {
    node: NodeId,
    segment: SegmentId,
    /// Number of tokens of the segment that the prompt repeats. Excludes the end-of-turn token if
    /// the client has extended the completion.
    tokens: u32,
    /// The completion with the text that the client has appended. `None` if the client has appended
    /// none.
    extended: Option<Message>,
}

#[derive(Debug, Clone, Copy)]
struct RecordedPrompt {
    node: NodeId,
    end: Option<SegmentId>,
    turn: u32,
}

/// The conversations of one attempt, as tokens and as messages.
#[derive(Debug, Default)]
pub struct Conversation {
    trajectory: Trajectory,
    context_tokens: ContextTokens,
    index: Index,
    parties: HashMap<(String, String), Party>,
    turns: u32,
    counts: Counts,
    /// Cuts of recorded prompts, by agent, policy, and the messages for which each cut was made.
    truncations: HashMap<Party, HashMap<Key, Truncation>>,
}

impl PreparedPrompt {
    /// Replaces a prompt that starts a conversation by a shorter prompt. No template renders the
    /// shorter prompt, so the search for drift skips it. Has no effect on a prompt that continues a
    /// completion.
    pub fn shorten(&mut self, prompt: Vec<u32>) {
        if self.continuation.is_none() && prompt != self.prompt {
            (self.prompt, self.is_truncated) = (prompt, true);
        }
    }

    /// Sets the ids of the completion's tool calls, `PREFIX0`, `PREFIX1` and so on, before the
    /// completion is sampled, so that calls can be streamed. The ids must be unique in the
    /// conversation, because requests are matched by them.
    pub fn name_calls(&mut self, prefix: impl Into<String>) {
        self.calls = Some(prefix.into());
    }
}

impl Conversation {
    /// Creates an empty conversation.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the recorded tokens.
    pub fn trajectory(&self) -> &Trajectory {
        &self.trajectory
    }

    /// Returns the recorded tokens, and drops everything else.
    pub fn into_trajectory(self) -> Trajectory {
        self.trajectory
    }

    /// Returns the number of the turn that the next recorded prompt starts.
    pub fn next_turn(&self) -> u32 {
        self.turns
    }

    /// Adds the tokens of another conversation as separate trees. Returns the offset that was added
    /// to the turn numbers, so that the turns follow those recorded before.
    ///
    /// # Errors
    /// Returns an error if the segments of `other` are inconsistent. Those of a conversation never
    /// are.
    pub fn append_trajectory(&mut self, other: &Trajectory) -> Result<u32, TreeError> {
        let segments = self.trajectory.segments().len() as u32;
        let first = self.turns;
        for segment in other.segments() {
            let parent = segment.parent.map(|SegmentId(parent)| SegmentId(segments + parent));
            self.turns = self.turns.max(first + segment.turn + 1);
            self.trajectory.push(Segment {
                parent,
                turn: first + segment.turn,
                ..segment.clone()
            })?;
        }
        Ok(first)
    }

    /// Returns counts of the recorded prompts, by their origin.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Matches a request and renders its prompt: [`match_request`](Self::match_request), then
    /// [`MatchedRequest::render`].
    ///
    /// # Errors
    /// Returns the errors of [`MatchedRequest::render`].
    pub fn prepare(&self, request: &Request<'_>) -> Result<PreparedPrompt, ConversationError> {
        self.match_request(request).render()
    }

    /// Finds the longest recorded history that a request repeats. Fast: hashes each message once.
    pub fn match_request(&self, request: &Request<'_>) -> MatchedRequest {
        let Request { agent, policy, format, messages, tools } = *request;
        let key = tools_key(tools);
        let merged = format.chat().merge_systems(messages);
        let messages = merged.as_deref().unwrap_or(messages);
        let party = self.parties.get(&(agent.to_owned(), policy.to_owned())).copied();
        let root = party.and_then(|party| self.index.root(party, key));
        let gathered = root.and_then(|root| self.index.merge_separate_calls(root, messages));
        let messages = gathered.as_deref().unwrap_or(messages);
        let requested: Vec<(&Message, CanonicalForm)> = messages
            .iter()
            .map(|message| (message, CanonicalForm::from_message(message)))
            .collect();
        let hit = root.map(|root| self.index.search(root, &requested));
        let origin =
            party.map_or(Origin::Started, |party| self.index.origin(party, root, hit, &requested));
        let after = hit.and_then(|hit| {
            let sent =
                hit.up_to_completion.checked_sub(1).map_or("", |at| messages[at].content.as_str());
            self.continuation_point(hit.completion?, &sent[sent.len() - hit.rest.0..])
        });
        let repeated = hit.map_or_else(RepeatedHistory::default, |hit| RepeatedHistory {
            messages: hit.messages,
            up_to_completion: hit.up_to_completion,
            trimmed: hit.trimmed.0,
            unsaid: hit.unsaid.0,
            altered: hit.altered.0,
            extended: hit.rest.0 > 0,
        });
        let tools = match root {
            Some(root) => Arc::clone(&self.index.roots[root].tools),
            None => tools.into(),
        };
        MatchedRequest {
            from: PromptSource { agent: agent.to_owned(), policy: policy.to_owned(), tools, key },
            format: Arc::clone(format),
            origin,
            repeated,
            new: messages[after.as_ref().map_or(0, |_| repeated.up_to_completion)..].to_vec(),
            continuation: after,
            turn: self.turns,
        }
    }

    fn continuation_point(&self, node: NodeId, rest: &str) -> Option<ContinuationPoint> {
        let completion_record = self.index.completion_record(node)?;
        let entry = self.index.node(node);
        let above = entry.parent?;
        let requested = self.index.node(above).prompt.as_ref();
        let mut path = Vec::new();
        for part in self.trajectory.sequence(completion_record.segment) {
            path.extend_from_slice(part.tokens());
        }
        Some(ContinuationPoint {
            node,
            segment: completion_record.segment,
            path,
            sampled: self.tokens_of(completion_record.segment),
            past: self.index.messages(above),
            message: entry.message.clone()?,
            is_truncated: requested.is_some_and(|requested| requested.is_truncated),
            drifted: requested.and_then(PromptRecord::inherited_drift).cloned(),
            rest: rest.to_owned(),
        })
    }

    fn tokens_of(&self, segment: SegmentId) -> usize {
        self.trajectory.segments()[segment.0 as usize].tokens.len()
    }

    /// Records a prompt before its completion exists, for callers that keep the prompt even if
    /// sampling fails. Otherwise [`record`](Self::record) records the prompt.
    ///
    /// # Errors
    /// Returns an error if the tokens do not fit the trajectory. Those of a prompt of this
    /// conversation always fit.
    pub fn add_context(&mut self, prepared: &mut PreparedPrompt) -> Result<(), TreeError> {
        self.add_context_once(prepared).map(|_| ())
    }

    fn add_context_once(
        &mut self,
        prepared: &mut PreparedPrompt,
    ) -> Result<RecordedPrompt, TreeError> {
        if let Some(recorded_prompt) = prepared.recorded_prompt {
            return Ok(recorded_prompt);
        }
        let PreparedPrompt {
            prompt,
            from,
            format,
            continuation: after,
            recorded,
            is_truncated: truncation,
            new,
            ..
        } = prepared;
        let count = self.parties.len() as Party;
        let party = *self.parties.entry((from.agent.clone(), from.policy.clone())).or_insert(count);
        let owner = Owner { party, agent: &from.agent, policy: &from.policy };
        let turn = self.turns;
        let trajectory = &mut self.trajectory;
        let end = match (&after, *recorded) {
            (Some(after), Some(recorded)) => {
                let position = (after.segment, after.tokens);
                self.context_tokens.add(
                    trajectory,
                    owner,
                    Some(position),
                    &prompt[recorded..],
                    turn,
                )?
            }
            (Some(after), None) => {
                self.context_tokens.branch(trajectory, owner, after.segment, prompt, turn)?
            }
            (None, _) => self.context_tokens.add(trajectory, owner, None, prompt, turn)?,
        };
        let root = self.index.root_or_new(party, from.key, &from.tools, format);
        let start = match after {
            None => self.index.roots[root].node,
            Some(SequenceEnd { node, extended: None, .. }) => *node,
            Some(SequenceEnd { node, extended: Some(message), .. }) => {
                self.index.extended_node(root, *node, message.clone())
            }
        };
        let node =
            new.iter().fold(start, |node, message| self.index.context_node(root, node, message));
        let is_truncated = *truncation;
        let drift = prepared.drift.take().map(|drift| levade_tree::Drift { turn, ..drift });
        prepared.drift.clone_from(&drift);
        self.index.node_mut(node).prompt.get_or_insert(PromptRecord {
            end,
            turn,
            is_truncated,
            drift,
        });
        match prepared.origin {
            Origin::Started => self.counts.started += 1,
            Origin::Continued => self.counts.continued += 1,
            Origin::Forked(fork) => *self.counts.forked.entry(fork.reason).or_default() += 1,
        }
        self.counts.trimmed += u32::from(prepared.repeated.trimmed > 0);
        self.counts.joined_systems += prepared.shifted.joined;
        self.counts.moved_systems += prepared.shifted.moved;
        self.counts.altered += u32::from(prepared.repeated.altered > 0);
        self.counts.extended += u32::from(prepared.repeated.extended);
        if let Some(fitted) = prepared.fitted.take() {
            self.store_truncation(party, *fitted);
        }
        self.turns += 1;
        let recorded_prompt = RecordedPrompt { node, end, turn };
        prepared.recorded_prompt = Some(recorded_prompt);
        Ok(recorded_prompt)
    }

    /// Records a prompt and the completion that was sampled for it, complete or truncated, and
    /// parses the completion. Prompts that were prepared in parallel can be recorded in any order.
    /// A second completion for a prompt becomes a sibling of the first.
    ///
    /// # Errors
    /// Returns an error if the completion's numbers of tokens, log-probabilities and versions
    /// differ.
    pub fn record(
        &mut self,
        mut prepared: PreparedPrompt,
        completion: Completion,
        params: &SamplingParams,
    ) -> Result<RecordedCompletion, TreeError> {
        self.check(&completion)?;
        let RecordedPrompt { end, turn, .. } = self.add_context_once(&mut prepared)?;
        let finish = completion.finish;
        self.record_segment(prepared, completion.into_segment(end, params, turn), finish)
    }

    /// Records a prompt and the tokens of a completion from another source, as a demonstration.
    ///
    /// # Errors
    /// Returns an error if the tokens do not fit the trajectory. Those of a prompt of this
    /// conversation always fit.
    pub fn demonstrate(
        &mut self,
        mut prepared: PreparedPrompt,
        tokens: Vec<u32>,
    ) -> Result<RecordedCompletion, TreeError> {
        let RecordedPrompt { end, turn, .. } = self.add_context_once(&mut prepared)?;
        self.record_segment(
            prepared,
            Segment::demonstrated(end, tokens, turn),
            FinishReason::StopId,
        )
    }

    fn record_segment(
        &mut self,
        mut prepared: PreparedPrompt,
        mut segment: Segment,
        finish: FinishReason,
    ) -> Result<RecordedCompletion, TreeError> {
        let RecordedPrompt { node, turn, .. } = self.add_context_once(&mut prepared)?;
        let PreparedPrompt { from, format, in_reasoning, calls, .. } = prepared;
        let chat = format.chat();
        let completion_text = chat.decode_completion(&segment.tokens);
        (segment.agent, segment.policy) = (from.agent, from.policy);
        let segment = self.trajectory.push(segment)?;

        let mut parsed = chat.parse(&completion_text, in_reasoning, &from.tools);
        let counted = format.options().call_ids == CallIds::Unique;
        let prefix = calls.or_else(|| counted.then(|| format!("call_{turn}_")));
        for (position, call) in parsed.calls.iter_mut().enumerate() {
            if let (Ok(call), Some(prefix)) = (call, &prefix) {
                call.id = format!("{prefix}{position}");
            }
        }
        let reasoning = chat.reasoning(&completion_text, in_reasoning);
        let completion =
            RecordedCompletion { segment, turn, text: completion_text, reasoning, parsed, finish };
        let completion_record = CompletionRecord {
            segment,
            in_reasoning,
            written: CanonicalForm::from_message(&completion.raw_message()),
            shown: CanonicalForm::from_message(&completion.message()),
            reasoning: (!completion.reasoning.trim().is_empty())
                .then(|| reasoning_key(&completion.reasoning)),
            received_forms: Vec::new(),
        };
        let root = self.index.node(node).root;
        self.index.completion_node(
            root,
            node,
            completion.raw_message(),
            completion_record,
            prefix.is_some(),
        );
        Ok(completion)
    }

    /// Records a message that the client received in place of the complete assistant message: the
    /// part before a stop string, or the first of several tool calls. Later requests match the
    /// completion by this message, too.
    pub fn note_received(&mut self, segment: SegmentId, message: &Message) {
        let is_completion = |(_, node): &(NodeId, &crate::index::Node)| match &node.kind {
            NodeKind::RecordedCompletion(completion_record) => completion_record.segment == segment,
            _ => false,
        };
        let node = self.index.nodes().rev().find(is_completion).map(|(node, _)| node);
        if let Some(node) = node {
            self.index.note_received(node, message);
        }
    }

    /// Rejects a completion that the trajectory would reject, before anything is recorded.
    fn check(&self, completion: &Completion) -> Result<(), TreeError> {
        let segment = self.trajectory.segments().len() as u32;
        let tokens = completion.tokens.len();
        let versions = completion.versions.iter().map(|run| run.len as usize).sum();
        for (found, what) in
            [(completion.logprobs.len(), "log-probabilities"), (versions, "token versions")]
        {
            if found != tokens {
                return Err(TreeError::Length { segment, tokens, found, what });
            }
        }
        Ok(())
    }

    /// Returns the known positions at which the template renders a sequence differently from the
    /// recorded tokens, sorted by turn.
    pub fn drift(&self) -> Vec<levade_tree::Drift> {
        let requested = self.index.nodes().filter_map(|(_, node)| node.prompt.as_ref());
        let mut found: Vec<_> = requested.filter_map(|requested| requested.drift.clone()).collect();
        found.sort_by_key(|drift| drift.turn);
        found
    }
}

#[cfg(test)]
#[path = "conversation_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "history_tests.rs"]
mod history_tests;

#[cfg(test)]
mod systems_tests;

#[cfg(test)]
#[path = "client_rewrites_tests.rs"]
mod rewritten_tests;
