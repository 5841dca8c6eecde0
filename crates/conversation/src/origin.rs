//! Origin of a prompt: it starts a conversation, continues recorded history, or forks from it for a
//! reason.

use levade_text::{Message, Role};
use serde::{Deserialize, Serialize};

use crate::canonical::CanonicalForm;
use crate::index::{HistoryMatch, Index, NodeId, Party, Root};

/// Relation of a prompt to the recorded history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// The prompt repeats no completion, so it starts a conversation.
    #[serde(rename = "began")]
    Started,
    /// The prompt repeats a complete recorded history and continues it.
    Continued,
    /// The prompt repeats a part of the recorded history and then differs from it.
    Forked(Fork),
}

/// Position at which a request differs from the recorded history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fork {
    /// Index of the first message of the request that differs, from 0.
    pub at: usize,
    /// Reason for the fork.
    pub reason: Reason,
}

/// Reason why a request forks from the recorded history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The client has already sent the same prompt.
    #[serde(rename = "asked_again")]
    Repeated,
    /// The client has already sent another message after the same history.
    Branched,
    /// The instructions at the start of the conversation differ.
    System,
    /// The tools differ from the tools of the recorded history.
    Tools,
    /// A recorded message has changed.
    Edited,
    /// Recorded messages are missing, or the end of the recorded history.
    Shortened,
    /// An assistant message differs from the recorded completion.
    #[serde(rename = "reply_edited")]
    CompletionEdited,
    /// The tool calls of a recorded completion have changed.
    CallsEdited,
    /// The arguments of a tool call in a recorded completion are no longer a JSON object, for
    /// example because they were truncated.
    #[serde(rename = "calls_cut")]
    CallsTruncated,
    /// The reasoning of a recorded completion has changed.
    #[serde(rename = "thought_edited")]
    ReasoningEdited,
    /// The text next to the tool calls of a recorded completion is missing.
    TextLost,
    /// The client sent the tool calls of a recorded completion back as text.
    CallsAsText,
    /// The client merged several recorded completions into one message.
    Merged,
    /// A completion is at another position than in the recorded history.
    Reordered,
    /// An assistant message was not recorded as a completion.
    Unrecorded,
    /// The chat template renders recorded history differently, and with `history = "template"` the
    /// prompt follows the template.
    Reprinted,
    /// The context policy omitted the oldest turns.
    ContextDropped,
    /// The context policy truncated messages in the middle.
    ContextTruncated,
    /// The context policy replaced the oldest turns by a summary.
    #[serde(rename = "context_summarised")]
    ContextSummarized,
}

impl Reason {
    /// Returns a description of the reason for users.
    pub fn description(self) -> &'static str {
        match self {
            Reason::Repeated => "the same prompt was requested again",
            Reason::Branched => "another message follows the same history",
            Reason::System => "the system prompt was changed",
            Reason::Tools => "the tools were changed",
            Reason::Edited => "an earlier message was edited",
            Reason::Shortened => "earlier messages were left out",
            Reason::CompletionEdited => "a completion was edited",
            Reason::CallsEdited => "the tool calls of a completion were edited",
            Reason::CallsTruncated => "the arguments of a tool call are no longer a JSON object",
            Reason::ReasoningEdited => "the reasoning of a completion was edited",
            Reason::TextLost => "the text next to the tool calls of a completion was left out",
            Reason::CallsAsText => "tool calls were turned into text",
            Reason::Merged => "several completions were merged into one message",
            Reason::Reordered => "completions were reordered",
            Reason::Unrecorded => "an assistant message was not sampled here",
            Reason::Reprinted => "the chat template renders the history differently",
            Reason::ContextDropped => "the oldest turns were dropped to fit the context",
            Reason::ContextTruncated => "messages in the middle were shortened to fit the context",
            Reason::ContextSummarized => "the oldest turns were summarized to fit the context",
        }
    }
}

impl Reason {
    /// Returns whether a context policy caused the fork.
    pub fn is_truncation(self) -> bool {
        matches!(
            self,
            Reason::ContextDropped | Reason::ContextTruncated | Reason::ContextSummarized
        )
    }
}

impl Index {
    /// Returns the origin of a request that repeats the history up to `hit`. `root` and `hit` are
    /// `None` if its agent and policy have no recorded history with these tools.
    pub(crate) fn origin(
        &self,
        party: Party,
        root: Option<usize>,
        hit: Option<HistoryMatch>,
        requested: &[(&Message, CanonicalForm)],
    ) -> Origin {
        if hit.is_none_or(|hit| hit.messages == 0)
            && self.knows_with_other_tools(party, root, requested)
        {
            return forked(0, Reason::Tools);
        }
        let (Some(root), Some(hit)) = (root, hit) else { return Origin::Started };
        let node = self.node(hit.node);
        let at = hit.messages;
        let Some((message, form)) = requested.get(at) else {
            return if node.prompt.is_some() {
                forked(at, Reason::Repeated)
            } else if self.completion_record(hit.node).is_some() || self.is_extended(hit.node) {
                Origin::Continued
            } else {
                forked(at, Reason::Shortened)
            };
        };
        if node.children.is_empty() {
            return if hit.completion.is_some() { Origin::Continued } else { Origin::Started };
        }
        let has_assistant = requested[at..].iter().any(|(_, form)| form.role == Role::Assistant);
        if form.role == Role::Assistant {
            let Root { format, tools, .. } = &self.roots[root];
            let parsed_form = CanonicalForm::parse_content(message, format.chat(), tools);
            let form = parsed_form.as_ref().unwrap_or(form);
            let reason = self.mismatch_reason(root, hit.node, form, &requested[at + 1..]);
            let is_truncated =
                message.tool_calls.iter().any(|call| call.arguments.unreadable().is_some());
            return forked(
                at,
                if is_truncated && reason == Reason::CallsEdited {
                    Reason::CallsTruncated
                } else {
                    reason
                },
            );
        }
        if at == 0 && self.other_system(hit.node, form, requested.get(1)) {
            return forked(at, Reason::System);
        }
        // The message differs in white space around its content.
        let is_spaced = has_assistant && !self.matching_nodes(hit.node, form.loose).is_empty();
        if !is_spaced && self.is_message_below(root, hit.node, form.loose) {
            return forked(at, Reason::Shortened);
        }
        if has_assistant {
            return forked(at, Reason::Edited);
        }
        if node.children.iter().all(|&child| self.completion_record(child).is_some()) {
            return forked(at, Reason::Shortened);
        }
        // Independent conversations often start with the same instructions.
        if hit.completion.is_none() { Origin::Started } else { forked(at, Reason::Branched) }
    }

    /// Returns whether the agent and policy have had the same conversation with other tools: the
    /// messages repeat a completion of this conversation, or all of them are recorded.
    fn knows_with_other_tools(
        &self,
        party: Party,
        root: Option<usize>,
        requested: &[(&Message, CanonicalForm)],
    ) -> bool {
        let other_roots = (0..self.roots.len())
            .filter(|&other| self.roots[other].party == party && Some(other) != root);
        other_roots
            .map(|other| self.search(other, requested))
            .any(|hit| hit.completion.is_some() || hit.messages == requested.len())
    }

    /// Returns whether a request differs from the recorded history only in its instructions: the
    /// message after them also follows the recorded instructions.
    fn other_system(
        &self,
        root: NodeId,
        form: &CanonicalForm,
        second: Option<&(&Message, CanonicalForm)>,
    ) -> bool {
        let recorded = self.node(root).children.iter().filter(|&&child| {
            self.node(child).message.as_ref().is_some_and(|message| is_instruction(message.role))
        });
        is_instruction(form.role)
            && second.is_some_and(|(_, second)| {
                recorded
                    .into_iter()
                    .any(|&child| !self.matching_nodes(child, second.loose).is_empty())
            })
    }

    /// Returns the reason why an assistant message does not match a completion recorded below
    /// `above`. `rest` are the messages after it.
    fn mismatch_reason(
        &self,
        root: usize,
        above: NodeId,
        form: &CanonicalForm,
        rest: &[(&Message, CanonicalForm)],
    ) -> Reason {
        let here: Vec<NodeId> = self
            .node(above)
            .children
            .iter()
            .copied()
            .filter(|&child| self.completion_record(child).is_some())
            .collect();
        let callers = self.callers(root, &form.ids);
        if callers.len() > 1 {
            return Reason::Merged;
        }
        if let Some(&caller) = callers.first() {
            let Some(completion) =
                self.completion_record(caller).filter(|_| here.contains(&caller))
            else {
                return Reason::Reordered;
            };
            return if completion.shown.calls != form.calls {
                Reason::CallsEdited
            } else if completion.shown.has_content && !form.has_content {
                Reason::TextLost
            } else {
                Reason::CompletionEdited
            };
        }
        let completion = || here.iter().filter_map(|&child| self.completion_record(child));
        if self.is_message_below(root, above, form.loose) && !self.differs_in_reasoning(above, form)
        {
            if completion()
                .any(|completion| rest.iter().any(|(_, form)| form.loose == completion.shown.loose))
            {
                Reason::Reordered
            } else {
                Reason::Shortened
            }
        } else if here.is_empty() {
            Reason::Unrecorded
        } else if self.differs_in_reasoning(above, form) {
            Reason::ReasoningEdited
        } else if form.calls.is_none()
            && completion().all(|completion| completion.shown.calls.is_some())
        {
            Reason::CallsAsText
        } else if form.calls.is_none() {
            Reason::CompletionEdited
        } else if !form.has_content
            && completion().any(|completion| completion.shown.calls == form.calls)
        {
            Reason::TextLost
        } else if completion().any(|completion| completion.shown.calls == form.calls) {
            Reason::CompletionEdited
        } else {
            Reason::CallsEdited
        }
    }
}

fn forked(at: usize, reason: Reason) -> Origin {
    Origin::Forked(Fork { at, reason })
}

fn is_instruction(role: Role) -> bool {
    !matches!(role, Role::User | Role::Assistant | Role::Tool)
}
