//! Converts requests in messages to recorded token ids, and completions back to messages.
//!
//! Clients send all messages of a conversation with each request, often reformatted. A
//! [`Conversation`] finds the longest recorded history that a request repeats
//! ([`prepare`](Conversation::prepare)), continues its exact tokens, and renders only new messages.
//! [`record`](Conversation::record) stores the sampled tokens and parses them.
//!
//! # Example
//! ```
//! use std::sync::Arc;
//! use levade_conversation::{Conversation, Format, Options, Origin, Request};
//! use levade_policy::{Completion, SamplingParams};
//! use levade_text::{Message, testing};
//!
//! let format = Arc::new(Format::new(Arc::new(testing::tiny_chat()?), Options::default()));
//! let mut conversation = Conversation::new();
//! let mut messages = vec![Message::user("What is 2 + 3?")];
//! let request =
//!     Request { agent: "", policy: "", format: &format, messages: &messages, tools: &[] };
//! let prepared = conversation.prepare(&request)?;
//! assert_eq!(prepared.origin, Origin::Started);
//!
//! // A sampler generates a completion for `prepared.prompt`; its tokens are recorded unchanged.
//! let mut completion = Completion::default();
//! let sampled =
//!     [format.chat().tokenizer().encode(" 5."), format.chat().stop_ids()[..1].to_vec()]
//!         .concat();
//! completion.extend(&sampled, &vec![-0.1; sampled.len()], 0);
//! let recorded = conversation.record(prepared, completion, &SamplingParams::default())?;
//!
//! // The client sends the completion back, trimmed, with another question.
//! messages.extend([
//!     Message::assistant(recorded.message().content.trim()),
//!     Message::user("And 2 + 4?"),
//! ]);
//! let request =
//!     Request { agent: "", policy: "", format: &format, messages: &messages, tools: &[] };
//! let prepared = conversation.prepare(&request)?;
//! assert_eq!(prepared.origin, Origin::Continued);
//! let recorded_tokens = conversation.trajectory().sequence_tokens(recorded.segment);
//! assert!(prepared.prompt.starts_with(&recorded_tokens));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Guarantees
//! - **Recorded tokens stay.** A prompt starts with the ids of the longest history that its request
//!   repeats, up to its last completion. Messages after that completion are rendered and tokenized
//!   as context, even if they repeat completions of another branch. With [`History::Template`], the
//!   template can also render a repeated history again. Ids of segments never change. After a
//!   completion come only ids that depend on the template; the text of the completion does not
//!   change them ([`Chat::continuation`](levade_text::Chat::continuation)).
//! - **Reformatted history matches** if it has the same meaning. Content counts as one text, and
//!   `null` as `""`. Calls count by name, and by arguments as JSON values. Reasoning counts only if
//!   the client sent it, complete or in part, and if no call ids identify the completion.
//!   Differences in white space around a completion's content are accepted, and counted. A
//!   completion matches as the model wrote it or parsed, with its calls in separate messages.
//!   Instructions match under the roles `system` and `developer`. Call ids distinguish equal
//!   completions.
//! - **Rewritten completions match** and are counted, unless [`CompletionMatching::Strict`] is set.
//!   If its call ids are kept, a completion can lack its text, and its arguments can have other
//!   spacing or further members. Appended text becomes context after the sampled tokens. Another
//!   value is an edit.
//! - **Late system messages** are joined or moved by one rule
//!   ([`LateSystem`](levade_text::LateSystem)) if the template does not render them where they are.
//!   The rule depends on the messages only, changes nothing before a completion, and is counted.
//! - **Everything else forks**, at the first message that differs, for a [`Reason`] with a text. An
//!   assistant message that is no recorded completion becomes context, as the template renders it.
//!   Completions of equal requests become siblings. Agents and policies share no history.
//! - **Recording is atomic.** [`prepare`](Conversation::prepare) changes nothing, so calls can be
//!   prepared in parallel and dropped. [`record`](Conversation::record) writes prompt and
//!   completion together.
//! - **Prompts fit.** [`ContextFitter`] shortens a request that exceeds its [`Budget`] by a context
//!   policy (`window`).
//! - **Work and storage grow with new messages only.** Each message of a request is hashed once and
//!   stored once, even if several forks share it; the tokens of a prompt are copied once. `format`
//!   describes how much of the past a template must see, `drift` how differences are found.
//!
//! Out of scope: sampling (`levade-policy`), templates and parsing (`levade-text`), agent loops
//! (`levade-agent`), and chat APIs, whose tokens are unknown.

mod canonical;
mod client_rewrites;
mod conversation;
mod drift;
#[cfg(test)]
mod families_tests;
mod format;
mod index;
#[cfg(test)]
mod naive_tests;
mod origin;
mod recorded_completion;
#[cfg(test)]
mod testing;
mod tokens;
mod window;

pub use conversation::{
    ContextFitter, Conversation, ConversationError, Counts, FitResult, MatchedRequest,
    PreparedPrompt, RepeatedHistory, Request,
};
pub use drift::Drift;
pub use format::{CallIds, CompletionMatching, Format, History, Options};
pub use origin::{Fork, Origin, Reason};
pub use recorded_completion::RecordedCompletion;
pub use window::{Budget, Overflow};
