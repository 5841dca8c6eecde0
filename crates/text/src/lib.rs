//! Tokenizers, chat templates and tool-call formats.
//!
//! A [`Tokenizer`] converts text to token ids and back. A [`ChatTemplate`] renders messages in the
//! format that the model was trained on. A [`Chat`] combines both with a tool protocol and converts
//! conversations to tokens.
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
//! // The model samples its own tokens, which are kept unchanged.
//! let call = r#"<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>"#;
//! let mut sampled = chat.tokenizer().encode(call);
//! sampled.push(chat.stop_ids()[0]);
//! let parsed = chat.parse(&chat.decode_completion(&sampled), false, &[]);
//! assert_eq!(parsed.calls[0].as_ref().map(|call| call.name.as_str()), Ok("add"));
//!
//! // The context tokens that follow: the end of the turn, the tool result, and the next
//! // generation prompt.
//! let given = chat.continuation(&question, &sampled, &[Message::tool("5")], &[])?;
//! let text = chat.tokenizer().decode_with_special(&given);
//! assert_eq!(text, "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n");
//! # Ok::<(), levade_text::TextError>(())
//! ```
//!
//! A [`Message`] is parsed from OpenAI API requests and serialized in the same format. A template
//! receives messages in the format that it supports: content as text or as parts ([`Content`]), and
//! reasoning in its own field or between the model's tags. Developer messages become system
//! messages if the template does not support the developer role. All of this is determined when a
//! chat is created.
//!
//! Tool calls are parsed and written in the format of the model family. This is the format in which
//! calls that the template renders can be parsed again, or one selected by name ([`ToolProtocol`]).
//! The same parser processes complete completions ([`Chat::parse`], [`Chat::reasoning`]) and
//! streamed ones ([`Chat::stream`]).
//!
//! A [`Vocabulary`] provides the byte strings of a tokenizer's tokens to a sampler, for stop
//! strings and for grammars that constrain the output format.
//!
//! # Guarantees
//! - **Message text never becomes a special token.**
//! - **Sampled tokens are never re-encoded from their text.**
//! - **Every completion can be parsed**, whatever it contains.
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
mod completion_parser;
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
mod reasoning_tags;
mod schema;
mod sentencepiece;
mod stream;
mod systems;
#[cfg(test)]
mod systems_tests;
mod template;
pub mod testing;
mod tokenizer;
mod vocabulary;

pub use calls::{MalformedCall, ParsedCompletion};
pub use chat::{Chat, ChatOptions};
pub use content::{Content, ContentPart};
pub use decimal::canonical_number;
pub use describe::ToolPrompt;
pub use encoder::EncoderTokenizer;
pub use error::TextError;
pub use grammar_schema::{OmittedKeyword, enforceable_schema};
pub use levade_model::TokenizerSource;
pub use message::{Arguments, Message, Role, ToolCall, ToolSpec};
pub use must_call::CallGrammar;
pub use protocol::ToolProtocol;
pub use stream::{CompletionDelta, CompletionStream, StreamDecoder};
pub use systems::{LateSystem, ShiftedSystems};
pub use template::{ChatTemplate, TemplateInput};
pub use tokenizer::Tokenizer;
pub use vocabulary::Vocabulary;
