//! The search for the longest history of the index that a request repeats.

use levade_text::{Message, Role};

use super::{CompletionRecord, HistoryMatch, Index, Node, NodeId, NodeKind, Root, append_text};
use crate::canonical::{CanonicalForm, reasoning_key};
use crate::client_rewrites::{appended_length, same_calls};
use crate::format::CompletionMatching;
use crate::recorded_completion::parsed_message;

impl Index {
    /// Returns the longest recorded history below a root that the messages `requested` repeat. The
    /// longest history has the most messages up to a completion. Ties are resolved by the number of
    /// completions with matching tool call ids, then by the number of messages, then by exactness,
    /// then in favor of the latest history.
    pub(crate) fn search(
        &self,
        root: usize,
        requested: &[(&Message, CanonicalForm)],
    ) -> HistoryMatch {
        let Root { node, format, tools, .. } = &self.roots[root];
        let none = std::cmp::Reverse(0);
        let start = HistoryMatch {
            up_to_completion: 0,
            messages: 0,
            by_id: 0,
            trimmed: none,
            unsaid: none,
            altered: none,
            rest: std::cmp::Reverse(0),
            completion: None,
            node: *node,
        };
        let lenient = format.options().completion_matching == CompletionMatching::Lenient;
        let mut best = start;
        // Histories by the number of messages that they repeat.
        let mut fronts = vec![Vec::new(); requested.len() + 1];
        fronts[0].push(start);
        for (at, (message, form)) in requested.iter().enumerate() {
            for hit in std::mem::take(&mut fronts[at]) {
                let parsed_form =
                    |message: &Message| CanonicalForm::parse_content(message, format.chat(), tools);
                let repeated = |message: &Message, form: &CanonicalForm, length: usize| {
                    let found = self.match_repeated(&hit, form, length);
                    let parsed_form = if found.is_empty() { parsed_form(message) } else { None };
                    parsed_form.map_or(found, |parsed_form| {
                        self.match_repeated(&hit, &parsed_form, length)
                    })
                };
                let mut found = repeated(message, form, 1);
                let mut length = 1;
                let joined = if found.is_empty() {
                    CanonicalForm::merge(
                        requested[at..].iter().map(|(message, _)| *message),
                        |message| {
                            parsed_form(message)
                                .is_some_and(|form| !form.has_content && form.calls.is_none())
                        },
                    )
                } else {
                    None
                };
                if let Some((full_message, joined, count)) = &joined {
                    (found, length) = (repeated(full_message, joined, *count), *count);
                }
                if found.is_empty() && lenient {
                    (found, length) = match &joined {
                        Some((full_message, joined, count)) => {
                            (self.match_altered(&hit, full_message, joined, *count), *count)
                        }
                        None => (self.match_altered(&hit, message, form, 1), 1),
                    };
                }
                if found.is_empty() && lenient {
                    (found, length) = (self.match_appended(&hit, message, form), 1);
                }
                best = found.iter().copied().fold(best, HistoryMatch::max);
                // Children of a completion follow its recorded form, not its extended one.
                found.retain(|hit| hit.rest.0 == 0 || hit.completion != Some(hit.node));
                fronts[at + length].append(&mut found);
            }
        }
        best
    }

    /// Extends a match by a completion that came back without its text or with arguments that are
    /// written differently. The ids of the message's tool calls must belong to exactly one
    /// completion.
    fn match_altered(
        &self,
        hit: &HistoryMatch,
        message: &Message,
        form: &CanonicalForm,
        length: usize,
    ) -> Vec<HistoryMatch> {
        let root = self.node(hit.node).root;
        let has_ids = !form.ids.is_empty() && form.ids.len() == message.tool_calls.len();
        let callers = if has_ids { self.callers(root, &form.ids) } else { Vec::new() };
        let (&[caller], None) = (&callers[..], message.content.non_text_parts().next()) else {
            return Vec::new();
        };
        let Some(completion) =
            self.completion_record(caller).filter(|_| self.node(caller).parent == Some(hit.node))
        else {
            return Vec::new();
        };
        let shown = self.sent_message(caller, completion);
        let received = completion.received_forms.iter().map(|(form, message)| (&form.ids, message));
        let same = std::iter::once((&completion.shown.ids, &shown)).chain(received).any(
            |(ids, recorded)| {
                *ids == form.ids
                    && (!form.has_content || recorded.content.trim() == message.content.trim())
                    && same_calls(&recorded.tool_calls, &message.tool_calls)
            },
        );
        let found = same.then(|| self.extend_hit(hit, form, length, caller)).flatten();
        found
            .map(|hit| HistoryMatch { altered: std::cmp::Reverse(hit.altered.0 + 1), ..hit })
            .into_iter()
            .collect()
    }

    /// Extends a match by a message that starts with the text of a completion, to which the client
    /// has appended text.
    fn match_appended(
        &self,
        hit: &HistoryMatch,
        message: &Message,
        form: &CanonicalForm,
    ) -> Vec<HistoryMatch> {
        let is_text =
            message.tool_calls.is_empty() && message.content.non_text_parts().next().is_none();
        if message.role != Role::Assistant || !is_text {
            return Vec::new();
        }
        let sent = message.content.as_str();
        self.node(hit.node)
            .children
            .iter()
            .filter_map(|&completion_id| {
                let completion = self.completion_record(completion_id)?;
                let written = self.node(completion_id).message.as_ref()?;
                let shown = self.sent_message(completion_id, completion);
                let texts = completion
                    .received_forms
                    .iter()
                    .filter(|(_, message)| message.tool_calls.is_empty());
                let texts: Vec<&str> = texts.map(|(_, message)| message.content.as_str()).collect();
                let rest_after = |full: &str| appended_length(full, texts.iter().copied(), sent);
                let of_shown = rest_after(&shown.content).filter(|_| shown.tool_calls.is_empty());
                let rest = of_shown.into_iter().chain(rest_after(&written.content)).min()?;
                let full_message = append_text(written, &sent[sent.len() - rest..]);
                let extension = self
                    .extension(completion_id, CanonicalForm::from_message(&full_message).loose)
                    .filter(|_| rest > 0);
                let node = extension.unwrap_or(completion_id);
                let reasoning = self.match_reasoning(completion_id, completion, form);
                let mut hit = HistoryMatch { completion: Some(completion_id), node, ..*hit };
                hit.messages += 1;
                hit.up_to_completion = hit.messages;
                hit.trimmed.0 += u32::from(rest == 0);
                hit.unsaid.0 += u32::from(reasoning != ReasoningMatch::Full);
                hit.rest.0 = rest;
                (reasoning != ReasoningMatch::Other).then_some(hit)
            })
            .collect()
    }

    /// Returns the assistant message of a completion as the client received it.
    fn sent_message(&self, completion_id: NodeId, completion: &CompletionRecord) -> Message {
        let Node { message: Some(written), root, .. } = self.node(completion_id) else {
            return Message::assistant("");
        };
        let Root { format, tools, .. } = &self.roots[*root];
        parsed_message(&format.chat().parse(&written.content, completion.in_reasoning, tools))
    }

    /// Extends a match by a canonical form that stands for `length` messages. Returns one match for
    /// each matching node.
    fn match_repeated(
        &self,
        hit: &HistoryMatch,
        form: &CanonicalForm,
        length: usize,
    ) -> Vec<HistoryMatch> {
        let below = self.matching_nodes(hit.node, form.loose).iter();
        below.filter_map(|&node| self.extend_hit(hit, form, length, node)).collect()
    }

    fn extend_hit(
        &self,
        hit: &HistoryMatch,
        form: &CanonicalForm,
        length: usize,
        node: NodeId,
    ) -> Option<HistoryMatch> {
        let messages = hit.messages + length;
        let mut hit = HistoryMatch { messages, node, ..*hit };
        let exact = match &self.node(node).kind {
            NodeKind::Root | NodeKind::Extended => return None,
            // The model has seen the white space of such a message, so it must be equal.
            NodeKind::Context(context) if context.exact != form.exact => return None,
            NodeKind::Context(_) => true,
            NodeKind::RecordedCompletion(completion) => {
                let mut known = completion
                    .received_forms
                    .iter()
                    .map(|(received, _)| &received.ids)
                    .chain([&completion.shown.ids]);
                let by_id = !form.ids.is_empty() && known.any(|ids| *ids == form.ids);
                let reasoning = self.match_reasoning(node, completion, form);
                if reasoning == ReasoningMatch::Other
                    && !(by_id && self.callers(self.node(node).root, &form.ids) == [node])
                {
                    return None;
                }
                hit.by_id += u32::from(by_id);
                hit.unsaid.0 += u32::from(reasoning != ReasoningMatch::Full);
                hit.up_to_completion = messages;
                hit.completion = Some(node);
                hit.rest.0 = 0;
                let received = completion.received_forms.iter().map(|(received, _)| received);
                received
                    .chain([&completion.shown, &completion.written])
                    .any(|known| known.exact == form.exact)
            }
        };
        hit.trimmed.0 += u32::from(!exact);
        Some(hit)
    }

    /// Returns how much of a completion's reasoning a message repeats.
    fn match_reasoning(
        &self,
        node: NodeId,
        completion: &CompletionRecord,
        form: &CanonicalForm,
    ) -> ReasoningMatch {
        let Some(sent) = &form.reasoning else {
            let is_written = form.loose == completion.written.loose;
            return if is_written || completion.reasoning.is_none() {
                ReasoningMatch::Full
            } else {
                ReasoningMatch::Part
            };
        };
        if completion.reasoning.unwrap_or(reasoning_key("")) == reasoning_key(sent) {
            return ReasoningMatch::Full;
        }
        let Node { message: Some(message), root, .. } = self.node(node) else {
            return ReasoningMatch::Other;
        };
        let full_message =
            self.roots[*root].format.chat().reasoning(&message.content, completion.in_reasoning);
        // Clients truncate reasoning, but do not change it.
        if full_message.contains(sent.trim()) {
            ReasoningMatch::Part
        } else {
            ReasoningMatch::Other
        }
    }

    /// Returns whether a message with the canonical form `form` differs from a completion below
    /// `parent` only in its reasoning.
    pub(crate) fn differs_in_reasoning(&self, parent: NodeId, form: &CanonicalForm) -> bool {
        self.matching_nodes(parent, form.loose)
            .iter()
            .any(|&id| self.completion_record(id).is_some())
            && form.role == Role::Assistant
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReasoningMatch {
    Full,
    Part,
    Other,
}
