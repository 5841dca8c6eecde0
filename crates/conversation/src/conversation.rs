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
use crate::format::{CallIds, CompletionRound, Format, History};
use crate::index::{CompletionRecord, Index, NodeId, NodeKind, Party, PromptRecord, append_text};
use crate::origin::{Fork, Origin, Reason};
use crate::recorded_completion::RecordedCompletion;
use crate::tokens::{ContextTokens, TokenOwner};
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
    /// The chat template renders recorded history differently (drift), which is an error in strict
    /// mode.
    #[error(
        "before turn {turn}, the chat template renders {printed:?} instead of the recorded \
         {recorded:?}; use a template that preserves the history, set history = \"template\" to \
         follow the template, or allow drift, which is then counted"
    )]
    Drift {
        /// Number of the turn whose prompt was to be rendered.
        turn: u32,
        /// Recorded text, starting at the first difference.
        recorded: String,
        /// Text that the chat template renders instead.
        printed: String,
    },
}

/// A client's request for a completion, with all messages of a conversation, as in the OpenAI API.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// Name of the agent that sends the request. Empty if the attempt has only one agent.
    pub agent: &'a str,
    /// Name of the policy that answers the request. Empty if the attempt has only one policy.
    pub policy: &'a str,
    /// Chat format of conversations with this policy.
    pub format: &'a Arc<Format>,
    /// All messages of the conversation so far.
    pub messages: &'a [Message],
    /// Tools that the model can call.
    pub tools: &'a [ToolSpec],
}

/// Part of the recorded history that a request repeats, and the differences from the recorded
/// messages that were tolerated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepeatedHistory {
    /// Number of messages that the request repeats.
    pub messages: usize,
    /// Number of messages up to and including the last repeated completion, whose tokens the prompt
    /// continues.
    pub up_to_completion: usize,
    /// Number of repeated completions that differ in white space around their content.
    pub trimmed: u32,
    /// Number of repeated completions whose reasoning is missing, completely or in part, or is
    /// edited although the completion's call ids are kept.
    pub unsaid: u32,
    /// Number of repeated completions that came back without the text next to their tool calls, or
    /// with arguments that are written differently.
    pub altered: u32,
    /// Whether the client has appended text to the last repeated completion.
    pub extended: bool,
}

/// A request, matched with the recorded history that it repeats. It contains everything that is
/// needed to render the prompt without the conversation.
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

/// The recorded completion whose tokens a prompt continues.
#[derive(Debug, Clone)]
struct ContinuationPoint {
    node: NodeId,
    segment: SegmentId,
    /// Token ids from the root to the end of the completion. The last `sampled` of them belong to
    /// the completion.
    path: Vec<u32>,
    sampled: usize,
    past: Vec<Arc<Message>>,
    message: Arc<Message>,
    /// Whether the first prompt of the sequence was truncated.
    is_truncated: bool,
    drifted: Option<levade_tree::Drift>,
    /// Text that the client has appended to the completion. Empty if the client has appended none.
    rest: String,
}

/// A rendered prompt for a sampler. It is not recorded yet, so a call that fails leaves no trace.
#[derive(Debug, Clone)]
pub struct PreparedPrompt {
    /// Token ids of the prompt: the recorded token ids, unchanged, and the token ids of the new
    /// messages.
    pub prompt: Vec<u32>,
    /// Whether the prompt opens the reasoning of the completion, so that the completion starts
    /// within it.
    pub in_reasoning: bool,
    /// Relation of the prompt to the recorded history.
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
    /// Number of recorded tokens with which the prompt starts. `None` if the chat template rendered
    /// the complete prompt.
    recorded: Option<usize>,
    is_truncated: bool,
    new: Vec<Message>,
    recorded_prompt: Option<RecordedPrompt>,
    /// Prefix of the ids of the completion's tool calls. `None` unless
    /// [`name_calls`](Self::name_calls) has set a prefix.
    calls: Option<String>,
    /// Truncation that the context policy has applied to the messages. `None` if it changed
    /// nothing.
    fitted: Option<Box<AppliedTruncation>>,
}

/// End of the recorded sequence that a prompt continues.
#[derive(Debug, Clone)]
struct SequenceEnd {
    node: NodeId,
    segment: SegmentId,
    /// Number of tokens of the segment that the prompt repeats. Excludes the end-of-turn token if
    /// the client has appended text to the completion.
    tokens: u32,
    /// Completion with the text that the client has appended. `None` if the client has appended no
    /// text.
    extended: Option<Message>,
}

#[derive(Debug, Clone, Copy)]
struct RecordedPrompt {
    node: NodeId,
    end: Option<SegmentId>,
    turn: u32,
}

/// The conversations of one attempt, recorded as tokens and as messages.
#[derive(Debug, Default)]
pub struct Conversation {
    trajectory: Trajectory,
    context_tokens: ContextTokens,
    index: Index,
    parties: HashMap<(String, String), Party>,
    turns: u32,
    counts: Counts,
    /// Truncations of recorded prompts, by agent and policy, and by the hash of the messages that
    /// were truncated.
    truncations: HashMap<Party, HashMap<Key, Truncation>>,
}

impl PreparedPrompt {
    /// Replaces a prompt that starts a conversation by a shorter prompt. No chat template renders
    /// the shorter prompt, so the search for drift skips it. Has no effect on a prompt that
    /// continues a completion.
    pub fn shorten(&mut self, prompt: Vec<u32>) {
        if self.continuation.is_none() && prompt != self.prompt {
            (self.prompt, self.is_truncated) = (prompt, true);
        }
    }

    /// Sets the ids of the completion's tool calls to `PREFIX0`, `PREFIX1` and so on, before the
    /// completion is sampled, so that tool calls can be streamed. The ids must be unique in the
    /// conversation, because requests are matched by them.
    pub fn name_calls(&mut self, prefix: impl Into<String>) {
        self.calls = Some(prefix.into());
    }
}

impl Conversation {
    /// Creates a conversation without any recorded prompt.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the recorded tokens of all conversations.
    pub fn trajectory(&self) -> &Trajectory {
        &self.trajectory
    }

    /// Returns the recorded tokens of all conversations, and drops everything else.
    pub fn into_trajectory(self) -> Trajectory {
        self.trajectory
    }

    /// Returns the turn number that the next recorded prompt will have.
    pub fn next_turn(&self) -> u32 {
        self.turns
    }

    /// Adds the tokens of another conversation as separate trees. Returns the offset that was added
    /// to its turn numbers, so that its turns follow the turns recorded before.
    ///
    /// # Errors
    /// Returns an error if the segments of `other` are inconsistent. The segments of a conversation
    /// never are.
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

    /// Returns the numbers of recorded prompts, by their origin.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Finds the recorded history that a request repeats, and renders the request's prompt.
    /// Combines [`match_request`](Self::match_request) and [`MatchedRequest::render`].
    ///
    /// # Errors
    /// Returns the errors of [`MatchedRequest::render`].
    pub fn prepare(&self, request: &Request<'_>) -> Result<PreparedPrompt, ConversationError> {
        self.match_request(request).render()
    }

    /// Finds the longest recorded history that a request repeats. This is fast, because each
    /// message is hashed only once.
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
    /// sampling fails. Without this call, [`record`](Self::record) records the prompt.
    ///
    /// # Errors
    /// Returns an error if the tokens do not fit the trajectory. The tokens of a prompt of this
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
        let owner = TokenOwner { party, agent: &from.agent, policy: &from.policy };
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

    /// Records a prompt and the completion that was sampled for it, which can be truncated, and
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

    /// Records a prompt and a completion that was not sampled but comes from another source, as a
    /// demonstration.
    ///
    /// # Errors
    /// Returns an error if the tokens do not fit the trajectory. The tokens of a prompt of this
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

    /// Records a message that the client received instead of the complete assistant message: the
    /// part before a stop string, or the first of several tool calls. Later requests are matched by
    /// this message, too.
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

    /// Checks that the trajectory will accept a completion, before anything is recorded.
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

    /// Returns the known drift: the positions at which the chat template renders a sequence
    /// differently from the recorded tokens, sorted by turn.
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
