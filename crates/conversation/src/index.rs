//! The messages of a conversation as a tree, and the search for the longest history that a request
//! repeats.
//!
//! # Guarantees
//! - **Storage.** A message is stored once for each history that it continues. A completion always
//!   has a node of its own, even if another completion is equal.
//! - **Cost.** A search looks up each message of a request once, by its hash, and visits only nodes
//!   that the request repeats.

mod search;

use std::collections::HashMap;
use std::sync::Arc;

use levade_text::{Message, Role, ToolSpec};
use levade_tree::{Drift, SegmentId};

use crate::canonical::{CanonicalForm, Key};
use crate::format::Format;

/// Index of a node in the message tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct NodeId(u32);

/// Number of a pair of agent and policy. Different pairs share no message histories.
pub(crate) type Party = u32;

/// Start of all message histories of one pair of agent and policy with the same tools.
#[derive(Debug)]
pub(crate) struct Root {
    pub party: Party,
    pub tools: Arc<[ToolSpec]>,
    pub format: Arc<Format>,
    pub node: NodeId,
}

/// Node of the message tree: a message that follows the messages of its parent nodes.
#[derive(Debug)]
pub(crate) struct Node {
    pub parent: Option<NodeId>,
    /// Index in [`Index::roots`] of the root that the node belongs to.
    pub root: usize,
    /// Number of nodes from the root to this node, excluding the root and including this node.
    pub depth: usize,
    /// Message of the node. `None` for a root.
    pub message: Option<Arc<Message>>,
    pub kind: NodeKind,
    /// Recorded prompt that ends with this node's message. `None` if no prompt ends here.
    pub prompt: Option<PromptRecord>,
    pub children: Vec<NodeId>,
}

#[derive(Debug)]
pub(crate) enum NodeKind {
    /// Start of a message history.
    Root,
    /// A message from the client that is no recorded completion.
    Context(CanonicalForm),
    /// A recorded completion, which was either sampled or demonstrated.
    RecordedCompletion(Box<CompletionRecord>),
    /// The completion in the parent node, with text that the client has appended. The node's
    /// message has the complete text.
    Extended,
}

/// Record of a completion in the message tree.
#[derive(Debug)]
pub(crate) struct CompletionRecord {
    pub segment: SegmentId,
    pub in_reasoning: bool,
    /// Canonical form of an assistant message whose content is the complete text.
    pub written: CanonicalForm,
    /// Canonical form of the assistant message with content and tool calls.
    pub shown: CanonicalForm,
    /// Hash of the reasoning. `None` if the completion has no reasoning.
    pub reasoning: Option<Key>,
    /// Other forms in which the client received the message: a completion that a stop string ended,
    /// with and without that string, or the first of several tool calls.
    pub received_forms: Vec<(CanonicalForm, Message)>,
}

/// Record of a rendered prompt in the message tree.
#[derive(Debug, Clone)]
pub(crate) struct PromptRecord {
    /// Segment with which the prompt ends. `None` if the prompt has no tokens.
    pub end: Option<SegmentId>,
    pub turn: u32,
    /// Whether the prompt was truncated, so that no chat template renders it.
    pub is_truncated: bool,
    pub drift: Option<Drift>,
}

impl PromptRecord {
    /// Returns the drift of this prompt that its completion, and everything after it, inherits.
    /// `None` if there is no drift or the conversation forked because of it.
    pub(crate) fn inherited_drift(&self) -> Option<&Drift> {
        self.drift.as_ref().filter(|drift| !drift.forked)
    }
}

/// Match of a request with a recorded history. The order of the fields determines which of two
/// matches is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct HistoryMatch {
    /// Number of messages up to and including the last repeated completion. 0 if no completion is
    /// repeated.
    pub up_to_completion: usize,
    /// Number of completions that were matched by the ids of their tool calls.
    pub by_id: u32,
    /// Number of recorded messages that the request repeats.
    pub messages: usize,
    /// Number of completions that differ in white space; fewer are better.
    pub trimmed: std::cmp::Reverse<u32>,
    /// Number of completions whose reasoning is missing, completely or in part, or is edited
    /// although their call ids are kept.
    pub unsaid: std::cmp::Reverse<u32>,
    /// Number of completions without their text, or with arguments that are written differently.
    pub altered: std::cmp::Reverse<u32>,
    /// Number of bytes that the client has appended to the last completion, at the end of its
    /// message.
    pub rest: std::cmp::Reverse<usize>,
    pub completion: Option<NodeId>,
    pub node: NodeId,
}

/// Tree of the recorded messages, with its lookup tables.
#[derive(Debug, Default)]
pub(crate) struct Index {
    nodes: Vec<Node>,
    pub roots: Vec<Root>,
    by_tools: HashMap<(Party, Key), usize>,
    /// Child messages of a node, by their hash that ignores white space around the content.
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

    /// Returns whether a node is a completion to which the client has appended text.
    pub(crate) fn is_extended(&self, id: NodeId) -> bool {
        matches!(self.node(id).kind, NodeKind::Extended)
    }

    /// Returns the nodes on the path from `id` up to its root, including both.
    pub(crate) fn ancestors(&self, id: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        std::iter::successors(Some(id), |&id| self.node(id).parent)
    }

    /// Returns the messages on the path from the root to a node, including the node's message.
    pub(crate) fn messages(&self, id: NodeId) -> Vec<Arc<Message>> {
        let mut messages = Vec::new();
        let mut ancestors = self.ancestors(id);
        while let Some(id) = ancestors.next() {
            messages.extend(self.node(id).message.clone());
            if self.is_extended(id) {
                // The message includes the message of the completion in the parent node.
                ancestors.next();
            }
        }
        messages.reverse();
        messages
    }

    pub(crate) fn root(&self, party: Party, tools: Key) -> Option<usize> {
        self.by_tools.get(&(party, tools)).copied()
    }

    /// Returns the index of the root for a party and its tools. Creates the root if it does not
    /// exist.
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
        let tools = Arc::clone(tools);
        let format = Arc::clone(format);
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

    /// Returns the node of a client's message below `parent`. Creates the node unless one with an
    /// identical message exists.
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

    /// Returns the node of a completion to which the client has appended text. `message` has the
    /// complete text. The node is a child of the completion's node, and is created if it does not
    /// exist.
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

    /// Returns the node of a completion to which the client has appended text, by the hash `key` of
    /// the complete message. `None` if the node does not exist.
    fn extension(&self, completion_id: NodeId, key: Key) -> Option<NodeId> {
        self.matching_nodes(completion_id, key).iter().copied().find(|&id| self.is_extended(id))
    }

    /// Records another form in which the client received a completion. Later requests are matched
    /// by this form, too.
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

    /// Creates the node of a completion below `parent`. `unique` states whether the ids of the
    /// completion's tool calls are unique in the conversation.
    pub(crate) fn completion_node(
        &mut self,
        root: usize,
        parent: NodeId,
        message: Message,
        completion: CompletionRecord,
        unique: bool,
    ) -> NodeId {
        let written = completion.written.loose;
        let shown = completion.shown.loose;
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

    /// Returns the child nodes of `parent` whose message has the hash `key`, which ignores white
    /// space around the content.
    pub(crate) fn matching_nodes(&self, parent: NodeId, key: Key) -> &[NodeId] {
        self.below.get(&(parent, key)).map_or(&[], Vec::as_slice)
    }

    /// Returns whether a message with the hash `key`, which ignores white space around the content,
    /// is anywhere below `above`. Checks only the first 16 candidates.
    pub(crate) fn is_message_below(&self, root: usize, above: NodeId, key: Key) -> bool {
        const MAX_CANDIDATES: usize = 16;
        let depth = self.node(above).depth;
        let candidates = self.anywhere.get(&(root, key)).into_iter().flatten().take(MAX_CANDIDATES);
        candidates.copied().any(|position| {
            let ancestors = self.ancestors(position).take_while(|&id| self.node(id).depth >= depth);
            position != above && ancestors.last() == Some(above)
        })
    }

    /// Returns the nodes of the completions that made the tool calls `ids`, sorted and without
    /// duplicates.
    pub(crate) fn callers(&self, root: usize, ids: &[String]) -> Vec<NodeId> {
        let found = ids.iter().filter_map(|id| self.by_call.get(&(root, id.clone())));
        let mut callers: Vec<NodeId> = found.flatten().copied().collect();
        callers.sort_unstable();
        callers.dedup();
        callers
    }

    /// Merges tool calls of one recorded completion that a client sends in separate messages, each
    /// before its result, into one message before all results. Returns `None` if the messages have
    /// no such tool calls.
    pub(crate) fn merge_separate_calls(
        &self,
        root: usize,
        messages: &[Message],
    ) -> Option<Vec<Message>> {
        let mut gathered = None::<Vec<Message>>;
        let mut at = 0;
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

    /// Merges the tool calls of the completion that starts with the message `first`. Returns the
    /// message with all tool calls, their results, and the number of messages merged.
    fn merge_calls_at(
        &self,
        root: usize,
        first: &Message,
        rest: &[Message],
    ) -> Option<(Message, Vec<Message>, usize)> {
        if first.tool_calls.is_empty() {
            return None;
        }
        let completion_id = self.unique_caller(root, first)?;
        let ids = &self.completion_record(completion_id)?.shown.ids;
        if first.tool_calls.len() >= ids.len() {
            return None;
        }
        let mut full_message = first.clone();
        let mut results = Vec::new();
        let mut is_split = false;
        let mut length = 1;
        for message in rest {
            if message.role == Role::Tool {
                results.push(message);
            } else if full_message.tool_calls.len() < ids.len()
                && self.unique_caller(root, message) == Some(completion_id)
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

    fn unique_caller(&self, root: usize, message: &Message) -> Option<NodeId> {
        let ids: Vec<String> = message.tool_calls.iter().map(|call| call.id.clone()).collect();
        let callers = self.callers(root, &ids);
        callers.first().copied().filter(|_| message.role == Role::Assistant && callers.len() == 1)
    }
}

/// Returns the assistant message `written` with the text `rest`, which the client has appended.
pub(crate) fn append_text(written: &Message, rest: &str) -> Message {
    Message::assistant(format!("{}{rest}", written.content.as_str()))
}
