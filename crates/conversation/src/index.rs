//! The messages of a conversation as a tree, and the search for the longest history that a request
//! repeats.
//!
//! # Guarantees
//! - **Storage.** A message is stored once for each history that it continues. A completion always
//!   has a node of its own, even if another completion is equal.
//! - **Cost.** A search looks up each message of a request once, by its hash, and visits only nodes
//!   that the request repeats.

use std::collections::HashMap;
use std::sync::Arc;

use levade_text::{Message, Role, ToolSpec};
use levade_tree::{Drift, SegmentId};

use crate::canonical::{CanonicalForm, Key, reasoning_key};
use crate::client_rewrites::{appended_length, same_calls};
use crate::format::{CompletionMatching, Format};
use crate::recorded_completion::parsed_message;

/// Index of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct NodeId(u32);

/// Number of a pair of agent and policy. Different pairs share no histories.
pub(crate) type Party = u32;

/// Start of all histories of one party with the same tools.
#[derive(Debug)]
pub(crate) struct Root {
    pub party: Party,
    pub tools: Arc<[ToolSpec]>,
    pub format: Arc<Format>,
    pub node: NodeId,
}

/// A message that follows those of the nodes above.
#[derive(Debug)]
pub(crate) struct Node {
    pub parent: Option<NodeId>,
    /// Index of the root in [`Index::roots`].
    pub root: usize,
    /// Number of nodes between the root and this node, this node included.
    pub depth: usize,
    /// The message. `None` for a root.
    pub message: Option<Arc<Message>>,
    pub kind: NodeKind,
    /// The recorded prompt that ends here, if any.
    pub prompt: Option<PromptRecord>,
    pub children: Vec<NodeId>,
}

#[derive(Debug)]
pub(crate) enum NodeKind {
    /// Start of a history.
    Root,
    /// A message from the client that was not sampled here.
    Context(CanonicalForm),
    /// A completion that was sampled here.
    RecordedCompletion(Box<CompletionRecord>),
    /// The completion in the parent node, with text that the client has appended. The node's
    /// message is the complete text.
    Extended,
}

/// A recorded completion.
#[derive(Debug)]
pub(crate) struct CompletionRecord {
    pub segment: SegmentId,
    pub in_reasoning: bool,
    /// Form of the complete text as content.
    pub written: CanonicalForm,
    /// Form of content and calls.
    pub shown: CanonicalForm,
    /// Hash of the reasoning, if there is any.
    pub reasoning: Option<Key>,
    /// Other forms in which the client received the message: a completion that a stop string ended,
    /// with and without that string, or the first of several calls.
    pub received_forms: Vec<(CanonicalForm, Message)>,
}

/// A recorded prompt.
#[derive(Debug, Clone)]
pub(crate) struct PromptRecord {
    /// Segment that the prompt ends with. `None` if the prompt has no tokens.
    pub end: Option<SegmentId>,
    pub turn: u32,
    /// Whether the prompt was shortened, so that no template renders it.
    pub is_truncated: bool,
    pub drift: Option<Drift>,
}

impl PromptRecord {
    /// Returns the drift that a completion of this prompt, and everything after it, inherits.
    pub(crate) fn inherited_drift(&self) -> Option<&Drift> {
        self.drift.as_ref().filter(|drift| !drift.forked)
    }
}

/// Match of a request with a history. The order of fields defines which of two matches is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Hit {
    /// Number of messages up to and including the last repeated completion. 0 if none is repeated.
    pub to_reply: usize,
    /// Number of completions matched by the ids of their calls.
    pub by_id: u32,
    /// Number of repeated messages.
    pub messages: usize,
    /// Number of completions that differ in white space; fewer are better.
    pub trimmed: std::cmp::Reverse<u32>,
    /// Number of completions whose reasoning is missing, completely or in part.
    pub unsaid: std::cmp::Reverse<u32>,
    /// Number of completions without their text, or with arguments that are written differently.
    pub altered: std::cmp::Reverse<u32>,
    /// Number of bytes that the client has appended to the last completion, at the end of its
    /// message.
    pub rest: std::cmp::Reverse<usize>,
    pub completion: Option<NodeId>,
    pub node: NodeId,
}

/// The tree of messages, with its lookup tables.
#[derive(Debug, Default)]
pub(crate) struct Index {
    nodes: Vec<Node>,
    pub roots: Vec<Root>,
    by_tools: HashMap<(Party, Key), usize>,
    /// Child messages of a node, by their hash without white space around the content.
    below: HashMap<(NodeId, Key), Vec<NodeId>>,
    /// All messages of a root by the same hash; `by_call` has completions by the ids of their
    /// calls.
    anywhere: HashMap<(usize, Key), Vec<NodeId>>,
    by_call: HashMap<(usize, String), Vec<NodeId>>,
}

impl Index {
    pub(crate) fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }

    pub(crate) fn node_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id.0 as usize]
    }

    pub(crate) fn nodes(&self) -> impl DoubleEndedIterator<Item = (NodeId, &Node)> {
        self.nodes.iter().enumerate().map(|(id, node)| (NodeId(id as u32), node))
    }

    pub(crate) fn completion_record(&self, id: NodeId) -> Option<&CompletionRecord> {
        match &self.node(id).kind {
            NodeKind::RecordedCompletion(completion) => Some(completion),
            NodeKind::Root | NodeKind::Context(_) | NodeKind::Extended => None,
        }
    }

    /// Returns whether a node is a completion that the client has extended.
    pub(crate) fn is_extended(&self, id: NodeId) -> bool {
        matches!(self.node(id).kind, NodeKind::Extended)
    }

    /// Returns the nodes from `id` up to its root, both included.
    pub(crate) fn ancestors(&self, id: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        std::iter::successors(Some(id), |&id| self.node(id).parent)
    }

    /// Returns the messages from the root to a node, included.
    pub(crate) fn messages(&self, id: NodeId) -> Vec<Arc<Message>> {
        let mut messages = Vec::new();
        let mut ancestors = self.ancestors(id);
        while let Some(id) = ancestors.next() {
            messages.extend(self.node(id).message.clone());
            if self.is_extended(id) {
                // The message includes that of the completion above.
                ancestors.next();
            }
        }
        messages.reverse();
        messages
    }

    pub(crate) fn root(&self, party: Party, tools: Key) -> Option<usize> {
        self.by_tools.get(&(party, tools)).copied()
    }

    /// Returns the root of a party with these tools, and creates it if it does not exist.
    pub(crate) fn root_or_new(
        &mut self,
        party: Party,
        key: Key,
        tools: &Arc<[ToolSpec]>,
        format: &Arc<Format>,
    ) -> usize {
        if let Some(root) = self.root(party, key) {
            return root;
        }
        let root = self.roots.len();
        let node = self.push(root, None, None, NodeKind::Root);
        let (tools, format) = (Arc::clone(tools), Arc::clone(format));
        self.roots.push(Root { party, tools, format, node });
        self.by_tools.insert((party, key), root);
        root
    }

    fn push(
        &mut self,
        root: usize,
        parent: Option<NodeId>,
        message: Option<Arc<Message>>,
        kind: NodeKind,
    ) -> NodeId {
        let id = NodeId(self.nodes.len() as u32);
        let depth = parent.map_or(0, |parent| self.node(parent).depth + 1);
        self.nodes.push(Node {
            parent,
            root,
            depth,
            message,
            kind,
            prompt: None,
            children: Vec::new(),
        });
        if let Some(parent) = parent {
            self.node_mut(parent).children.push(id);
        }
        id
    }

    fn index_node(&mut self, root: usize, parent: NodeId, key: Key, id: NodeId) {
        self.below.entry((parent, key)).or_default().push(id);
        self.anywhere.entry((root, key)).or_default().push(id);
    }

    /// Returns the node of a client's message below `parent`. Reuses a node only if its message is
    /// identical.
    pub(crate) fn context_node(
        &mut self,
        root: usize,
        parent: NodeId,
        message: &Message,
    ) -> NodeId {
        let form = CanonicalForm::from_message(message);
        let existing = self.below.get(&(parent, form.loose)).into_iter().flatten();
        let existing = existing.copied().find(|&id| {
            let node = self.node(id);
            matches!(node.kind, NodeKind::Context(_)) && node.message.as_deref() == Some(message)
        });
        existing.unwrap_or_else(|| {
            let key = form.loose;
            let id = self.push(
                root,
                Some(parent),
                Some(Arc::new(message.clone())),
                NodeKind::Context(form),
            );
            self.index_node(root, parent, key, id);
            id
        })
    }

    /// Returns the node of a completion that the client has extended to `message`, below the
    /// completion. Creates it if it does not exist.
    pub(crate) fn extended_node(
        &mut self,
        root: usize,
        completion_id: NodeId,
        message: Message,
    ) -> NodeId {
        let key = CanonicalForm::from_message(&message).loose;
        self.extension(completion_id, key).unwrap_or_else(|| {
            let id =
                self.push(root, Some(completion_id), Some(Arc::new(message)), NodeKind::Extended);
            self.below.entry((completion_id, key)).or_default().push(id);
            id
        })
    }

    /// Returns the node of a completion that the client has extended to a message with this hash,
    /// if it exists.
    fn extension(&self, completion_id: NodeId, key: Key) -> Option<NodeId> {
        self.matching_nodes(completion_id, key).iter().copied().find(|&id| self.is_extended(id))
    }

    /// Records another form in which the client received a completion. Requests match the
    /// completion by it, too.
    pub(crate) fn note_received(&mut self, id: NodeId, message: &Message) {
        let Node { root, parent: Some(parent), .. } = *self.node(id) else { return };
        let form = CanonicalForm::from_message(message);
        let NodeKind::RecordedCompletion(completion) = &mut self.node_mut(id).kind else { return };
        let known = |known: &CanonicalForm| known.loose == form.loose;
        if known(&completion.shown)
            || known(&completion.written)
            || completion.received_forms.iter().any(|(form, _)| known(form))
        {
            return;
        }
        let key = form.loose;
        completion.received_forms.push((form, message.clone()));
        self.index_node(root, parent, key, id);
    }

    /// Creates a node for a completion below `parent`. `unique` tells whether the ids of its calls
    /// are unique.
    pub(crate) fn completion_node(
        &mut self,
        root: usize,
        parent: NodeId,
        message: Message,
        completion: CompletionRecord,
        unique: bool,
    ) -> NodeId {
        let (written, shown) = (completion.written.loose, completion.shown.loose);
        let ids = if unique { completion.shown.ids.clone() } else { Vec::new() };
        let id = self.push(
            root,
            Some(parent),
            Some(Arc::new(message)),
            NodeKind::RecordedCompletion(Box::new(completion)),
        );
        self.index_node(root, parent, shown, id);
        if written != shown {
            self.index_node(root, parent, written, id);
        }
        for call in ids {
            self.by_call.entry((root, call)).or_default().push(id);
        }
        id
    }

    /// Returns the messages below `parent` with this loose hash.
    pub(crate) fn matching_nodes(&self, parent: NodeId, key: Key) -> &[NodeId] {
        self.below.get(&(parent, key)).map_or(&[], Vec::as_slice)
    }

    /// Returns whether a message with this loose hash is somewhere below `above`. Checks only the
    /// first 16 candidates.
    pub(crate) fn is_message_below(&self, root: usize, above: NodeId, key: Key) -> bool {
        const MAX_CANDIDATES: usize = 16;
        let depth = self.node(above).depth;
        let candidates = self.anywhere.get(&(root, key)).into_iter().flatten().take(MAX_CANDIDATES);
        candidates.copied().any(|position| {
            let ancestors = self.ancestors(position).take_while(|&id| self.node(id).depth >= depth);
            position != above && ancestors.last() == Some(above)
        })
    }

    /// Returns the completions that made these calls, sorted and without duplicates.
    pub(crate) fn callers(&self, root: usize, ids: &[String]) -> Vec<NodeId> {
        let found = ids.iter().filter_map(|id| self.by_call.get(&(root, id.clone())));
        let mut callers: Vec<NodeId> = found.flatten().copied().collect();
        callers.sort_unstable();
        callers.dedup();
        callers
    }

    /// Merges the calls of a recorded completion that a client sends in separate messages, each
    /// before its result, into one message before all results. Returns `None` if the messages have
    /// no such calls.
    pub(crate) fn merge_separate_calls(
        &self,
        root: usize,
        messages: &[Message],
    ) -> Option<Vec<Message>> {
        let (mut gathered, mut at) = (None::<Vec<Message>>, 0);
        while let Some(message) = messages.get(at) {
            if let Some((full_message, results, length)) =
                self.merge_calls_at(root, message, &messages[at + 1..])
            {
                let gathered = gathered.get_or_insert_with(|| messages[..at].to_vec());
                gathered.push(full_message);
                gathered.extend(results);
                at += length;
            } else {
                gathered.iter_mut().for_each(|gathered| gathered.push(message.clone()));
                at += 1;
            }
        }
        gathered
    }

    /// Merges the calls of the completion that `first` starts. Returns the message with all calls,
    /// their results, and the number of messages merged.
    fn merge_calls_at(
        &self,
        root: usize,
        first: &Message,
        rest: &[Message],
    ) -> Option<(Message, Vec<Message>, usize)> {
        let caller = |message: &Message| {
            let ids: Vec<String> = message.tool_calls.iter().map(|call| call.id.clone()).collect();
            let callers = self.callers(root, &ids);
            callers
                .first()
                .copied()
                .filter(|_| message.role == Role::Assistant && callers.len() == 1)
        };
        if first.tool_calls.is_empty() {
            return None;
        }
        let completion_id = caller(first)?;
        let ids = &self.completion_record(completion_id)?.shown.ids;
        if first.tool_calls.len() >= ids.len() {
            return None;
        }
        let (mut full_message, mut results, mut is_split, mut length) =
            (first.clone(), Vec::new(), false, 1);
        for message in rest {
            if message.role == Role::Tool {
                results.push(message);
            } else if full_message.tool_calls.len() < ids.len()
                && caller(message) == Some(completion_id)
            {
                is_split |= !results.is_empty();
                full_message.append(message, "\n");
            } else {
                break;
            }
            length += 1;
        }
        let is_complete = full_message.tool_calls.iter().map(|call| &call.id).eq(ids);
        (is_split && is_complete)
            .then(|| (full_message, results.into_iter().cloned().collect(), length))
    }

    /// Returns the longest history below a root that these messages repeat: the one with the most
    /// messages up to a completion. Ties are resolved by the number of completions with matching
    /// call ids, then by the number of messages, then by exactness, then in favor of the latest.
    pub(crate) fn search(&self, root: usize, requested: &[(&Message, CanonicalForm)]) -> Hit {
        let Root { node, format, tools, .. } = &self.roots[root];
        let none = std::cmp::Reverse(0);
        let start = Hit {
            to_reply: 0,
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
                let (mut found, mut length) = (repeated(message, form, 1), 1);
                let is_reasoning = |message: &Message| {
                    parsed_form(message)
                        .is_some_and(|form| !form.has_content && form.calls.is_none())
                };
                let joined = match found.is_empty() {
                    true => CanonicalForm::merge(
                        requested[at..].iter().map(|(message, _)| *message),
                        is_reasoning,
                    ),
                    false => None,
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
                best = found.iter().copied().fold(best, Hit::max);
                // Children of a completion follow its recorded form, not its extended one.
                found.retain(|hit| hit.rest.0 == 0 || hit.completion != Some(hit.node));
                fronts[at + length].append(&mut found);
            }
        }
        best
    }

    /// Extends a match by a message whose call ids belong to exactly one completion, if its text is
    /// missing or its arguments are written differently.
    fn match_altered(
        &self,
        hit: &Hit,
        message: &Message,
        form: &CanonicalForm,
        length: usize,
    ) -> Vec<Hit> {
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
        let altered = |hit: Hit| Hit { altered: std::cmp::Reverse(hit.altered.0 + 1), ..hit };
        found.map(altered).into_iter().collect()
    }

    /// Extends a match by a message that starts with a completion's text.
    fn match_appended(&self, hit: &Hit, message: &Message, form: &CanonicalForm) -> Vec<Hit> {
        let is_text =
            message.tool_calls.is_empty() && message.content.non_text_parts().next().is_none();
        if message.role != Role::Assistant || !is_text {
            return Vec::new();
        }
        let sent = message.content.as_str();
        let extended = |&completion_id: &NodeId| {
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
            let mut hit = Hit { completion: Some(completion_id), node, ..*hit };
            hit.messages += 1;
            hit.to_reply = hit.messages;
            hit.trimmed.0 += u32::from(rest == 0);
            hit.unsaid.0 += u32::from(reasoning != ReasoningMatch::Full);
            hit.rest.0 = rest;
            (reasoning != ReasoningMatch::Other).then_some(hit)
        };
        self.node(hit.node).children.iter().filter_map(extended).collect()
    }

    /// Returns the assistant message of a completion, as the client received it.
    fn sent_message(&self, completion_id: NodeId, completion: &CompletionRecord) -> Message {
        let Node { message: Some(written), root, .. } = self.node(completion_id) else {
            return Message::assistant("");
        };
        let Root { format, tools, .. } = &self.roots[*root];
        parsed_message(&format.chat().parse(&written.content, completion.in_reasoning, tools))
    }

    /// Extends a match by a form that stands for `length` messages, once for each matching node.
    fn match_repeated(&self, hit: &Hit, form: &CanonicalForm, length: usize) -> Vec<Hit> {
        let below = self.matching_nodes(hit.node, form.loose).iter();
        below.filter_map(|&node| self.extend_hit(hit, form, length, node)).collect()
    }

    fn extend_hit(
        &self,
        hit: &Hit,
        form: &CanonicalForm,
        length: usize,
        node: NodeId,
    ) -> Option<Hit> {
        let messages = hit.messages + length;
        let mut hit = Hit { messages, node, ..*hit };
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
                hit.to_reply = messages;
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

    /// Returns how much of a completion's reasoning a message has.
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

    /// Returns whether a message with this form differs from a completion below `parent` only in
    /// its reasoning.
    pub(crate) fn differs_in_reasoning(&self, parent: NodeId, form: &CanonicalForm) -> bool {
        self.matching_nodes(parent, form.loose)
            .iter()
            .any(|&id| self.completion_record(id).is_some())
            && form.role == Role::Assistant
    }
}

/// Returns a completion with the text that the client has appended.
pub(crate) fn append_text(written: &Message, rest: &str) -> Message {
    Message::assistant(format!("{}{rest}", written.content.as_str()))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReasoningMatch {
    Full,
    Part,
    Other,
}
