//! Prompts for requests, and a record of what came of them.

mod counts;
mod finish;
mod fitting;
mod raw;

use std::collections::HashMap;
use std::sync::Arc;

use levade_policy::{Completion, FinishReason, SamplingParams};
use levade_text::{Message, ShiftedSystems, TextError, ToolSpec};
use levade_tree::{Segment, SegmentId, Trajectory, TreeError};
use serde::{Deserialize, Serialize};

use crate::drift::Drift;
use crate::format::{CallIds, Format, History, Round};
use crate::index::{Asked, Index, NodeId, NodeKind, Party, Said, extended_by};
use crate::origin::{Fork, Origin, Reason};
use crate::reply::Reply;
use crate::said::{Form, Key, thought_key, tools_key};
use crate::tokens::{Given, Owner};
use crate::window::Cut;

pub use counts::Counts;
use fitting::Fitted;
pub use fitting::{Fitting, Judged};

/// Reasons why a request does not become a prompt.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConversationError {
    /// The messages cannot be written in the model's format.
    #[error("{0}")]
    Text(#[from] TextError),
    /// The template prints the past otherwise, and that is asked to be an error.
    #[error(
        "before turn {turn} the chat template prints {printed:?} where {recorded:?} was recorded; take a template that \
         keeps the past, set history = \"template\" to follow it, or let drift be counted"
    )]
    Drift {
        /// The turn that would have come next.
        turn: u32,
        /// The recorded text, from where the two differ.
        recorded: String,
        /// Text that the template prints there.
        printed: String,
    },
}

/// A request for a reply: all messages of a conversation, as every client sends them each time.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// The name of the agent that asks; empty where there is only one.
    pub agent: &'a str,
    /// The name of the policy that it asks; empty where there is only one.
    pub policy: &'a str,
    /// How conversations with this policy are written.
    pub format: &'a Arc<Format>,
    /// Everything said so far.
    pub messages: &'a [Message],
    /// Tools that can be called.
    pub tools: &'a [ToolSpec],
}

/// How well a request repeats what was recorded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Repeated {
    /// Messages that it repeats.
    pub messages: usize,
    /// Messages up to the last reply among them, whose tokens are continued.
    pub to_reply: usize,
    /// Replies that differ in white space around their content.
    pub trimmed: u32,
    /// Replies whose thought, or a part of it, was left out.
    pub unsaid: u32,
    /// Replies that came back without the text beside their calls, or with arguments that are written
    /// otherwise.
    pub altered: u32,
    /// Whether the client has appended text to the last reply.
    pub extended: bool,
}

/// A request, and the history that it repeats: all that is needed to write its prompt, away from the
/// conversation.
#[derive(Debug, Clone)]
pub struct Recognised {
    from: From,
    format: Arc<Format>,
    origin: Origin,
    repeated: Repeated,
    after: Option<After>,
    new: Vec<Message>,
    turn: u32,
}

/// Agent that asks, and its tools.
#[derive(Debug, Clone)]
struct From {
    agent: String,
    policy: String,
    tools: Arc<[ToolSpec]>,
    key: Key,
}

/// The recorded reply that a prompt continues.
#[derive(Debug, Clone)]
struct After {
    node: NodeId,
    segment: SegmentId,
    /// The tokens from the root down to the end of the reply, and how many of them are the reply's.
    path: Vec<u32>,
    sampled: usize,
    past: Vec<Arc<Message>>,
    said: Arc<Message>,
    /// Whether the beginning of the path was cut.
    cut: bool,
    drifted: Option<levade_tree::Drift>,
    /// Text that the client has appended to the reply; empty if it has not.
    rest: String,
}

/// A prompt, ready for a sampler. Nothing of it is recorded yet: a call that comes to nothing leaves no
/// trace.
#[derive(Debug, Clone)]
pub struct Prepared {
    /// The ids: those that were recorded, as they were, and what is new.
    pub prompt: Vec<u32>,
    /// Whether the prompt begins the reply's thought.
    pub in_thought: bool,
    /// How it came about.
    pub origin: Origin,
    /// The history that it repeats.
    pub repeated: Repeated,
    /// A place where the template prints the past otherwise than it was recorded.
    pub drift: Option<levade_tree::Drift>,
    /// System messages of its new part that are printed elsewhere than as they came.
    pub shifted: ShiftedSystems,
    from: From,
    format: Arc<Format>,
    after: Option<Continued>,
    /// How many tokens of the prompt are recorded, where it was not printed as a whole.
    recorded: Option<usize>,
    cut: bool,
    new: Vec<Message>,
    given: Option<GivenTurn>,
    /// Beginning of the ids of the reply's calls, where they were named.
    calls: Option<String>,
    /// The cut that its messages are under.
    fitted: Option<Box<Fitted>>,
}

/// The end of the recorded path that a prompt continues.
#[derive(Debug, Clone)]
struct Continued {
    node: NodeId,
    segment: SegmentId,
    /// Number of tokens of the segment in the path: without the end of a turn that its client has extended.
    tokens: u32,
    /// The reply with the text that its client has appended, if it has.
    extended: Option<Message>,
}

/// A prompt that was recorded.
#[derive(Debug, Clone, Copy)]
struct GivenTurn {
    node: NodeId,
    end: Option<SegmentId>,
    turn: u32,
}

/// The conversations of one attempt: everything that was said, in tokens and in messages.
#[derive(Debug, Default)]
pub struct Conversation {
    trajectory: Trajectory,
    given: Given,
    index: Index,
    parties: HashMap<(String, String), Party>,
    turns: u32,
    counts: Counts,
    /// Cuts that prompts are under, by agent and by the messages that they were made for.
    cuts: HashMap<Party, HashMap<Key, Cut>>,
}

impl Recognised {
    /// Writes the prompt. It takes as long as the template does, so it belongs away from async workers; the
    /// conversation is not needed for it.
    ///
    /// # Errors
    /// Errors that the template raises; tools in a format that is not understood; with
    /// [`Options::strict`], drift.
    ///
    /// [`Options::strict`]: crate::Options::strict
    pub fn render(self) -> Result<Prepared, ConversationError> {
        self.render_within(usize::MAX)
    }

    /// Like [`render`](Self::render), but rejects a prompt whose bytes show that it has more than
    /// `max_tokens` tokens, before it is tokenized.
    ///
    /// # Errors
    /// Returns [`TextError::TooLong`] for such a prompt, and the errors of [`render`](Self::render).
    pub fn render_within(self, max_tokens: usize) -> Result<Prepared, ConversationError> {
        let Recognised { from, format, mut origin, repeated, after, new, turn } = self;
        let chat = format.chat();
        let shifted = chat.shifted_systems(&new, after.is_none());
        let Some(after) = after else {
            let prompt = chat.prompt_within(&new, &from.tools, max_tokens)?;
            let in_thought = chat.opened_thought(&new, &from.tools)?.is_some();
            return Ok(Prepared {
                prompt,
                in_thought,
                origin,
                repeated,
                drift: None,
                shifted,
                from,
                format,
                after: None,
                recorded: Some(0),
                cut: false,
                new,
                given: None,
                calls: None,
                fitted: None,
            });
        };
        let After { node, segment, mut path, mut sampled, past, said, cut, drifted, rest } = after;
        let extended = (!rest.is_empty()).then(|| extended_by(&said, &rest));
        if extended.is_some() && path.last().is_some_and(|last| chat.stop_ids().contains(last)) {
            // The turn goes on where it had ended.
            path.truncate(path.len() - 1);
            sampled -= 1;
        }
        let reply = path[path.len() - sampled..].to_vec();
        let said = &extended.as_ref().unwrap_or(&said).content;
        let (past, tools) = (&past, &from.tools);
        let round = Round { past, reply: &reply, said, rest: &rest, new: &new, tools };
        let following = format.following(round, max_tokens.saturating_sub(path.len()))?;
        let recorded = path.len();
        path.extend(&following.tokens);
        let options = format.options();
        let found = if cut {
            // A prompt that was cut is nothing that the template prints.
            None
        } else if options.history == History::Template || !format.abridges() {
            format.drift_of_all(&path, round)
        } else if let Some(levade_tree::Drift { recorded, printed, .. }) = drifted {
            // A path that is printed otherwise stays so, however it goes on.
            Some(Drift { recorded, printed, prompt: None })
        } else {
            format.drift_near(round, &following.tokens)
        };
        let (mut prompt, mut recorded, mut drift) = (path, Some(recorded), None);
        if let Some(found) = found {
            let printed = found.prompt.clone().filter(|_| options.history == History::Template);
            drift = Some(found.at(turn, printed.is_some()));
            match printed {
                Some(printed) => {
                    (prompt, recorded) = (printed, None);
                    origin = Origin::Forked(Fork { at: 0, reason: Reason::Reprinted });
                }
                None if options.strict => {
                    let Drift { recorded, printed, .. } = found;
                    return Err(ConversationError::Drift { turn, recorded, printed });
                }
                None => {}
            }
        }
        let in_thought = following.in_thought;
        let after = Some(Continued { node, segment, tokens: sampled as u32, extended });
        let given = None;
        Ok(Prepared {
            prompt,
            in_thought,
            origin,
            repeated,
            drift,
            shifted,
            from,
            format,
            after,
            recorded,
            cut,
            new,
            given,
            calls: None,
            fitted: None,
        })
    }
}

impl Prepared {
    /// Puts a shorter prompt in the place of one that begins a conversation. That is nothing a template
    /// prints, so no drift is looked for on it. Without effect on a prompt that continues a reply.
    pub fn shorten(&mut self, prompt: Vec<u32>) {
        if self.after.is_none() && prompt != self.prompt {
            (self.prompt, self.cut) = (prompt, true);
        }
    }

    /// Names the calls of the reply to come before it is drawn, for who tells of them as they arrive:
    /// `PREFIX0`, `PREFIX1`. They must be unique in the conversation, and a client is recognised by them.
    pub fn name_calls(&mut self, prefix: impl Into<String>) {
        self.calls = Some(prefix.into());
    }
}

impl Conversation {
    /// One in which nothing was said yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The tokens.
    pub fn trajectory(&self) -> &Trajectory {
        &self.trajectory
    }

    /// The tokens, for good.
    pub fn into_trajectory(self) -> Trajectory {
        self.trajectory
    }

    /// Number of the turn that the next recorded prompt begins.
    pub fn next_turn(&self) -> u32 {
        self.turns
    }

    /// Takes the tokens of another conversation into the record, beside what is there. Returns by how much
    /// its turns were moved, to come after those that were given before.
    ///
    /// # Errors
    /// When its segments do not fit together, which those of a conversation do.
    pub fn adopt(&mut self, other: &Trajectory) -> Result<u32, TreeError> {
        let (segments, first) = (self.trajectory.segments().len() as u32, self.turns);
        for segment in other.segments() {
            let parent = segment.parent.map(|SegmentId(parent)| SegmentId(segments + parent));
            self.turns = self.turns.max(first + segment.turn + 1);
            self.trajectory.push(Segment { parent, turn: first + segment.turn, ..segment.clone() })?;
        }
        Ok(first)
    }

    /// Recorded prompts by how they came about.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Writes the prompt for a request: [`recognise`](Self::recognise) and [`Recognised::render`] in one.
    ///
    /// # Errors
    /// Errors of [`Recognised::render`].
    pub fn prepare(&self, request: &Request<'_>) -> Result<Prepared, ConversationError> {
        self.recognise(request).render()
    }

    /// Finds the longest recorded history that a request repeats. Quick: each message is hashed once.
    pub fn recognise(&self, request: &Request<'_>) -> Recognised {
        let Request { agent, policy, format, messages, tools } = *request;
        let key = tools_key(tools);
        let merged = format.chat().merged_systems(messages);
        let messages = merged.as_deref().unwrap_or(messages);
        let party = self.parties.get(&(agent.to_owned(), policy.to_owned())).copied();
        let root = party.and_then(|party| self.index.root(party, key));
        let gathered = root.and_then(|root| self.index.gathered(root, messages));
        let messages = gathered.as_deref().unwrap_or(messages);
        let asked: Vec<(&Message, Form)> =
            messages.iter().map(|message| (message, Form::of(message))).collect();
        let hit = root.map(|root| self.index.search(root, &asked));
        let origin = party.map_or(Origin::Began, |party| self.index.origin(party, root, hit, &asked));
        let after = hit.and_then(|hit| {
            let sent = hit.to_reply.checked_sub(1).map_or("", |at| messages[at].content.as_str());
            self.after(hit.reply?, &sent[sent.len() - hit.rest.0..])
        });
        let repeated = hit.map_or_else(Repeated::default, |hit| Repeated {
            messages: hit.messages,
            to_reply: hit.to_reply,
            trimmed: hit.trimmed.0,
            unsaid: hit.unsaid.0,
            altered: hit.altered.0,
            extended: hit.rest.0 > 0,
        });
        let tools = match root {
            Some(root) => Arc::clone(&self.index.roots[root].tools),
            None => tools.into(),
        };
        Recognised {
            from: From { agent: agent.to_owned(), policy: policy.to_owned(), tools, key },
            format: Arc::clone(format),
            origin,
            repeated,
            new: messages[after.as_ref().map_or(0, |_| repeated.to_reply)..].to_vec(),
            after,
            turn: self.turns,
        }
    }

    fn after(&self, node: NodeId, rest: &str) -> Option<After> {
        let said = self.index.said(node)?;
        let entry = self.index.node(node);
        let above = entry.parent?;
        let asked = self.index.node(above).asked.as_ref();
        let mut path = Vec::new();
        for part in self.trajectory.path(said.segment) {
            path.extend_from_slice(part.tokens());
        }
        Some(After {
            node,
            segment: said.segment,
            path,
            sampled: self.tokens_of(said.segment),
            past: self.index.messages(above),
            said: entry.message.clone()?,
            cut: asked.is_some_and(|asked| asked.cut),
            drifted: asked.and_then(Asked::drifted).cloned(),
            rest: rest.to_owned(),
        })
    }

    fn tokens_of(&self, segment: SegmentId) -> usize {
        self.trajectory.segments()[segment.0 as usize].tokens.len()
    }

    /// Records a prompt before its reply is there, for who wants it in the record whatever comes of it. Done
    /// by [`record`](Self::record) otherwise.
    ///
    /// # Errors
    /// When the tokens do not fit the trajectory, which a prompt of this conversation always does.
    pub fn give(&mut self, prepared: &mut Prepared) -> Result<(), TreeError> {
        self.give_once(prepared).map(|_| ())
    }

    fn give_once(&mut self, prepared: &mut Prepared) -> Result<GivenTurn, TreeError> {
        if let Some(given) = prepared.given {
            return Ok(given);
        }
        let Prepared { prompt, from, format, after, recorded, cut, new, .. } = prepared;
        let count = self.parties.len() as Party;
        let party = *self.parties.entry((from.agent.clone(), from.policy.clone())).or_insert(count);
        let owner = Owner { party, agent: &from.agent, policy: &from.policy };
        let (turn, trajectory) = (self.turns, &mut self.trajectory);
        let end = match (&after, *recorded) {
            (Some(after), Some(recorded)) => {
                let place = (after.segment, after.tokens);
                self.given.give(trajectory, owner, Some(place), &prompt[recorded..], turn)?
            }
            (Some(after), None) => self.given.branch(trajectory, owner, after.segment, prompt, turn)?,
            (None, _) => self.given.give(trajectory, owner, None, prompt, turn)?,
        };
        let root = self.index.root_or_new(party, from.key, &from.tools, format);
        let start = match after {
            None => self.index.roots[root].node,
            Some(Continued { node, extended: None, .. }) => *node,
            Some(Continued { node, extended: Some(message), .. }) => {
                self.index.extended(root, *node, message.clone())
            }
        };
        let node = new.iter().fold(start, |node, message| self.index.given(root, node, message));
        let cut = *cut;
        let drift = prepared.drift.take().map(|drift| levade_tree::Drift { turn, ..drift });
        prepared.drift.clone_from(&drift);
        self.index.node_mut(node).asked.get_or_insert(Asked { end, turn, cut, drift });
        match prepared.origin {
            Origin::Began => self.counts.began += 1,
            Origin::Continued => self.counts.continued += 1,
            Origin::Forked(fork) => *self.counts.forked.entry(fork.reason).or_default() += 1,
        }
        self.counts.trimmed += u32::from(prepared.repeated.trimmed > 0);
        self.counts.joined_systems += prepared.shifted.joined;
        self.counts.moved_systems += prepared.shifted.moved;
        self.counts.altered += u32::from(prepared.repeated.altered > 0);
        self.counts.extended += u32::from(prepared.repeated.extended);
        if let Some(fitted) = prepared.fitted.take() {
            self.note_cut(party, *fitted);
        }
        self.turns += 1;
        let given = GivenTurn { node, end, turn };
        prepared.given = Some(given);
        Ok(given)
    }

    /// Records a prompt and the reply that was sampled for it, whole or cut, and reads the reply. Prompts
    /// that were prepared side by side can be recorded in any order; a second reply to one prompt is a
    /// sibling of the first.
    ///
    /// # Errors
    /// When the numbers of tokens, log-probabilities and versions of the reply differ.
    pub fn record(
        &mut self,
        mut prepared: Prepared,
        completion: Completion,
        params: &SamplingParams,
    ) -> Result<Reply, TreeError> {
        self.check(&completion)?;
        let GivenTurn { end, turn, .. } = self.give_once(&mut prepared)?;
        let finish = completion.finish;
        self.replied(prepared, completion.into_segment(end, params, turn), finish)
    }

    /// Records a prompt and a reply that somebody else wrote to it in these tokens, as a demonstration.
    ///
    /// # Errors
    /// When the tokens do not fit the trajectory, which those of a prompt of this conversation always do.
    pub fn demonstrate(&mut self, mut prepared: Prepared, said: Vec<u32>) -> Result<Reply, TreeError> {
        let GivenTurn { end, turn, .. } = self.give_once(&mut prepared)?;
        self.replied(prepared, Segment::demonstrated(end, said, turn), FinishReason::StopId)
    }

    /// Records a reply to a prompt that was given, and reads it.
    fn replied(
        &mut self,
        mut prepared: Prepared,
        mut segment: Segment,
        finish: FinishReason,
    ) -> Result<Reply, TreeError> {
        let GivenTurn { node, turn, .. } = self.give_once(&mut prepared)?;
        let Prepared { from, format, in_thought, calls, .. } = prepared;
        let chat = format.chat();
        let said = chat.said(&segment.tokens);
        (segment.agent, segment.policy) = (from.agent, from.policy);
        let segment = self.trajectory.push(segment)?;

        let mut parsed = chat.parse(&said, in_thought, &from.tools);
        let counted = format.options().call_ids == CallIds::Unique;
        let prefix = calls.or_else(|| counted.then(|| format!("call_{turn}_")));
        for (place, call) in parsed.calls.iter_mut().enumerate() {
            if let (Ok(call), Some(prefix)) = (call, &prefix) {
                call.id = format!("{prefix}{place}");
            }
        }
        let thought = chat.thought(&said, in_thought);
        let reply = Reply { segment, turn, said, thought, parsed, finish };
        let said = Said {
            segment,
            in_thought,
            written: Form::of(&reply.written()),
            shown: Form::of(&reply.message()),
            thought: (!reply.thought.trim().is_empty()).then(|| thought_key(&reply.thought)),
            told: Vec::new(),
        };
        let root = self.index.node(node).root;
        self.index.reply(root, node, reply.written(), said, prefix.is_some());
        Ok(reply)
    }

    /// Notes a message that the client of a reply has received, if that is not the reply's own: the part
    /// before a stop string, or the first of several calls. The reply is then recognized by it, too.
    pub fn told(&mut self, segment: SegmentId, message: &Message) {
        let is_reply = |(_, node): &(NodeId, &crate::index::Node)| match &node.kind {
            NodeKind::Reply(said) => said.segment == segment,
            _ => false,
        };
        // That of the newest reply, most often.
        let node = self.index.nodes().rev().find(is_reply).map(|(node, _)| node);
        if let Some(node) = node {
            self.index.told(node, message);
        }
    }

    /// Refuses a reply that the trajectory would refuse, before anything is recorded.
    fn check(&self, completion: &Completion) -> Result<(), TreeError> {
        let (segment, tokens) = (self.trajectory.segments().len() as u32, completion.tokens.len());
        let versions = completion.versions.iter().map(|run| run.len as usize).sum();
        for (found, what) in [(completion.logprobs.len(), "log-probabilities"), (versions, "token versions")]
        {
            if found != tokens {
                return Err(TreeError::Length { segment, tokens, found, what });
            }
        }
        Ok(())
    }

    /// Places where the template prints a path otherwise than it was recorded, by turn, as far as they are
    /// known.
    pub fn drift(&self) -> Vec<levade_tree::Drift> {
        let asked = self.index.nodes().filter_map(|(_, node)| node.asked.as_ref());
        let mut found: Vec<_> = asked.filter_map(|asked| asked.drift.clone()).collect();
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
#[path = "rewritten_tests.rs"]
mod rewritten_tests;
