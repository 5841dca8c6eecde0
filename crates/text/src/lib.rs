//! Tokenizers, chat templates and tool-call formats.
//!
//! A [`Tokenizer`] turns text into ids and back; a [`ChatTemplate`] renders messages as a model was trained
//! to see them; a [`Chat`] joins both with a tool protocol and converts conversations to tokens.
//!
//! # Example
//! ```
//! use levade_text::{Message, ToolSpec, testing};
//!
//! let chat = testing::tiny_chat()?;
//! let question = [Message::user("What is 2 + 3?")];
//! let prompt = chat.prompt(&question, &[])?;
//! assert!(chat.tokenizer().decode_with_special(&prompt).ends_with("<|im_start|>assistant\n"));
//!
//! // The model replies with tokens of its own; they are kept as they are.
//! let call = r#"<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>"#;
//! let mut sampled = chat.tokenizer().encode(call);
//! sampled.push(chat.stop_ids()[0]);
//! let parsed = chat.parse(&chat.said(&sampled), false, &[]);
//! assert_eq!(parsed.calls[0].as_ref().map(|call| call.name.as_str()), Ok("add"));
//!
//! // What is given next: the end of that turn, the result, and the beginning of the next reply.
//! let given = chat.continuation(&question, &sampled, &[Message::tool("5")], &[])?;
//! let text = chat.tokenizer().decode_with_special(&given);
//! assert_eq!(text, "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n");
//! # Ok::<(), levade_text::TextError>(())
//! ```
//!
//! A [`Message`] is parsed from requests of OpenAI's API and written in that form. A template gets the forms
//! that it takes: content as text or as parts ([`Content`]), reasoning in its own field or between the
//! model's tags, instructions of a developer as the system's if the template knows no developer. All of that
//! is determined when a chat is created.
//!
//! Calls are parsed and written in the format of the model's family: the one in which calls that the template
//! renders parse again, or one that is selected by name ([`ToolProtocol`]). One parser takes completions
//! apart, complete ones ([`Chat::parse`], [`Chat::thought`]) and as they arrive ([`Chat::stream`]).
//!
//! A [`Vocabulary`] is a tokenizer's tokens for a sampler: their bytes, for stop strings and for grammars
//! that constrain the format of a completion.
//!
//! # Guarantees
//! - **Text of messages never becomes a special token.**
//! - **Sampled tokens are never made again from their text.**
//! - **Every completion parses**, whatever it contains.
//!
//! Out of scope: sampling (`levade-policy`), running tools (`levade-agent`), reading model files
//! (`levade-model`).

mod alphabet;
mod bare;
mod calls;
mod chat;
#[cfg(test)]
mod chat_tests;
mod clock;
mod content;
mod continuation;
#[cfg(test)]
mod continuation_tests;
mod decimal;
mod describe;
mod encoder;
mod error;
mod excerpt;
#[cfg(test)]
mod families_tests;
#[cfg(test)]
mod fuzz_tests;
mod gguf;
mod grammar_schema;
mod jinja;
mod length;
mod message;
#[cfg(test)]
mod message_tests;
mod must_call;
mod prepare;
mod probe;
mod protocol;
mod python_json;
mod reader;
mod schema;
mod sentencepiece;
mod stream;
mod systems;
#[cfg(test)]
mod systems_tests;
mod template;
pub mod testing;
mod thought;
mod tokenizer;
mod vocabulary;

pub use calls::{Malformed, Parsed};
pub use chat::{Chat, ChatOptions};
pub use content::{Content, ContentPart};
pub use decimal::canonical_number;
pub use describe::ToolPrompt;
pub use encoder::EncoderTokenizer;
pub use error::TextError;
pub use grammar_schema::{LeftOut, followed_schema};
pub use levade_model::TokenizerSource;
pub use message::{Arguments, Message, Role, ToolCall, ToolSpec};
pub use must_call::CallGrammar;
pub use protocol::ToolProtocol;
pub use stream::{Piece, ReplyStream, StreamDecoder};
pub use systems::{LateSystem, ShiftedSystems};
pub use template::{ChatTemplate, Rendering};
pub use tokenizer::Tokenizer;
pub use vocabulary::Vocabulary;
