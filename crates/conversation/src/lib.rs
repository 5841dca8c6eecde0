//! Conversations: from a request in messages to token ids, and back.
//!
//! Clients send all messages of a conversation each time, and write them out again in ways of their own. A
//! [`Conversation`] recognises what was said before: [`prepare`](Conversation::prepare) finds the longest
//! recorded history that a request repeats, continues its exact tokens, and renders only what is new;
//! [`record`](Conversation::record) writes down what was sampled and reads it.
//!
//! ```
//! use std::sync::Arc;
//! use levade_conversation::{Conversation, Format, Options, Origin, Request};
//! use levade_policy::{Completion, SamplingParams};
//! use levade_text::{Message, testing};
//!
//! let format = Arc::new(Format::new(Arc::new(testing::tiny_chat()?), Options::default()));
//! let mut conversation = Conversation::new();
//! let mut messages = vec![Message::user("What is 2 + 3?")];
//! let request = Request { agent: "", policy: "", format: &format, messages: &messages, tools: &[] };
//! let prepared = conversation.prepare(&request)?;
//! assert_eq!(prepared.origin, Origin::Began);
//!
//! // A sampler draws a reply to `prepared.prompt`; its tokens stay as they are.
//! let mut completion = Completion::default();
//! let drawn = [format.chat().tokenizer().encode(" 5."), format.chat().stop_ids()[..1].to_vec()].concat();
//! completion.extend(&drawn, &vec![-0.1; drawn.len()], 0);
//! let reply = conversation.record(prepared, completion, &SamplingParams::default())?;
//!
//! // The client sends it back, trimmed, with a further question.
//! messages.extend([Message::assistant(reply.message().content.trim()), Message::user("And 2 + 4?")]);
//! let request = Request { agent: "", policy: "", format: &format, messages: &messages, tools: &[] };
//! let prepared = conversation.prepare(&request)?;
//! assert_eq!(prepared.origin, Origin::Continued);
//! assert!(prepared.prompt.starts_with(&conversation.trajectory().path_tokens(reply.segment)));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Guarantees:
//! - **Recorded tokens stay.** A prompt begins with the ids of the longest history that its request repeats,
//!   as they were given and sampled; no text is made into tokens a second time, except with
//!   [`History::Template`], on a branch that the template prints. Ids of segments never change.
//! - **A history is repeated** when it says the same: content as one text, `null` as `""`; calls by name and
//!   by arguments as JSON values; thoughts only where the client sent them, whole or in part; ids of calls
//!   tell apart replies that say the same. White space around content does not matter, which is counted. A
//!   reply may come back as its model wrote it or taken apart, its calls in messages of their own;
//!   instructions as the system's or a developer's.
//! - **System messages** that the template does not print as they come are joined or moved by one rule
//!   ([`LateSystem`](levade_text::LateSystem)), which changes nothing before a reply; they are counted.
//! - **A client that rewrites a reply still repeats it**, and is counted, unless [`Replies::Strict`] is set:
//!   a reply whose call ids are kept can lack its text, and its arguments can have further members or other
//!   spacing; a reply can have text appended, which is given after the sampled tokens. Another value is an
//!   edit.
//! - **All else forks**, at the first message that is not as recorded, for a [`Reason`] that has words. An
//!   assistant's message that was not sampled here is given, as the template prints it. The same prompt asked
//!   twice has two replies, side by side. Agents and policies share no histories.
//! - **Nothing is half recorded.** [`prepare`](Conversation::prepare) changes nothing, so calls can be
//!   prepared side by side and given up; [`record`](Conversation::record) writes prompt and reply at once.
//! - **Prompts fit.** [`Fitting`] makes a request that is longer than its [`Budget`] shorter by a policy: the
//!   conversation forks there, with that as the reason, and later requests go on from what the model saw.
//!
//! Cost: work and storage grow with what is new. Messages of a request are hashed, once each; the tokens of
//! the prompt are copied, once; the template renders an abridged past where a probe finds that it prints the
//! same after it ([`Format::abridges`]), the whole past elsewhere. Tokens and messages are stored once,
//! however many forks share them.
//!
//! Drift, where the template would print the past otherwise than it was recorded, is looked for around the
//! newest reply each turn, with an abridged past as well; a path that has drifted counts at every later turn,
//! unseen. At the [end](Conversation::finish) whole paths are compared once, and where that finds drift that
//! was not seen near a reply (thoughts that a template drops once a question follows, two turns later), the
//! turns are counted exactly. With [`History::Template`], and for templates that look at all of the past,
//! every turn renders and compares everything.
//!
//! Not here: sampling (`levade-policy`), templates and parsing (`levade-text`), tools and loops
//! (`levade-agent`), conversations of models whose tokens nobody sees.

mod conversation;
mod drift;
#[cfg(test)]
mod families_tests;
mod format;
mod index;
#[cfg(test)]
mod naive_tests;
mod origin;
mod reply;
mod rewritten;
mod said;
#[cfg(test)]
mod testing;
mod tokens;
mod window;

pub use conversation::{
    Conversation, ConversationError, Counts, Fitting, Judged, Prepared, Recognised, Repeated, Request,
};
pub use drift::Drift;
pub use format::{CallIds, Format, History, Options, Replies};
pub use origin::{Fork, Origin, Reason};
pub use reply::Reply;
pub use window::{Budget, Overflow};
