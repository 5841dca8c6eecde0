//! Parses the tokens of prompts back into messages.
//!
//! A run records tokens, not messages, because a chat template is a program that cannot be inverted
//! in general. The parser learns how the template of the model separates messages: it renders short
//! conversations whose contents are marks, and keeps the tokens between two marks as a separator
//! (for example `<|im_end|>\n<|im_start|>user\n`, between a system and a user message). A prompt is
//! parsed if it consists of separators and contents only. Special tokens are compared by id, so
//! text that merely spells a special token never separates messages.
//!
//! # Guarantees
//! - **Complete or not at all**: every token of a parsed prompt belongs to a separator or to the
//!   content of a message. A prompt that does not fit is not parsed; the caller keeps its text.
//! - **First fit**: if a message contains the text of a separator without special tokens, its
//!   content is the shortest one with which the rest of the prompt fits.
//!
//! White space around a message that the template removes is not recovered.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use levade_text::{Chat, Message, Role, ToolCall, ToolSpec};
use serde_json::Value;

/// Unit of text that the parser compares: a byte, or 256 + the id of a special token.
type Atom = u32;

/// Content of a probe message, followed by the index of the message.
const MARK: &str = "LevadeExportMark";

/// Position in a conversation, between two of its messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Position {
    /// The position is before the first message.
    Start,
    /// The position follows a message of this role. The value is an index into `ROLES`.
    After(usize),
    /// The position follows the generation prompt.
    Generation {
        /// Whether the generation prompt has opened the reasoning of the completion.
        in_reasoning: bool,
    },
}

/// Roles of the messages that a prompt can contain.
const ROLES: [Role; 5] = [Role::System, Role::Developer, Role::User, Role::Assistant, Role::Tool];

/// Position that follows a completion.
pub const AFTER_ASSISTANT: Position = Position::After(3);

/// Tokens that a template prints between two positions.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Separator {
    from: Position,
    to: Position,
    atoms: Vec<Atom>,
}

/// Parser of prompts that one chat format renders with one list of tools.
#[derive(Debug)]
pub struct PromptParser {
    chat: Arc<Chat>,
    tools: Vec<ToolSpec>,
    /// Separators of the chat template, the longest first.
    separators: Vec<Separator>,
}

/// Messages that were parsed from a stretch of context tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct ParsedContext {
    /// Messages of the stretch, in order. The text of an assistant message is the text that the
    /// model would have written.
    pub messages: Vec<Message>,
    /// Whether the stretch leaves the reasoning of the next completion open.
    pub in_reasoning: bool,
}

impl PromptParser {
    /// Creates a parser for the prompts of `chat` that describe `tools`.
    pub fn new(chat: &Arc<Chat>, tools: Vec<ToolSpec>) -> Self {
        let chat = Arc::clone(chat);
        let mut parser = PromptParser { chat, tools, separators: Vec::new() };
        let mut found = BTreeSet::new();
        for roles in prompt_probes() {
            found.extend(parser.probe_prompt(&roles));
        }
        for roles in continuation_probes() {
            let messages: Vec<Message> =
                roles.iter().enumerate().map(|(i, &role)| create_probe_message(role, i)).collect();
            found.extend(parser.probe_continuation(&messages));
        }
        parser.separators = sort_longest_first(found);
        parser
    }

    /// Returns the tools that the parser's prompts describe.
    pub fn tools(&self) -> &[ToolSpec] {
        &self.tools
    }

    /// Parses context tokens that start at the position `from`. `calls` are the tool calls of the
    /// preceding completion, because some templates print a call's name or id before the call's
    /// result. Returns `None` if the tokens do not match the template.
    pub fn parse(
        &self,
        tokens: &[u32],
        from: Position,
        calls: &[ToolCall],
    ) -> Option<ParsedContext> {
        let atoms = to_atoms(&self.chat, tokens);
        let split_by = |separators: &[Separator]| {
            let mut search = Search { atoms: &atoms, separators, misfits: HashSet::new() };
            search.split_from_separator(0, from)
        };
        let split = split_by(&self.separators).or_else(|| {
            let results: Vec<Message> = calls
                .iter()
                .enumerate()
                .map(|(i, call)| Message {
                    tool_call_id: Some(call.id.clone()),
                    name: Some(call.name.clone()),
                    ..create_probe_message(Role::Tool, i)
                })
                .collect();
            (from == AFTER_ASSISTANT && !results.is_empty())
                .then(|| {
                    sort_longest_first(self.probe_continuation(&results).into_iter().collect())
                })
                .and_then(|separators| split_by(&separators))
        })?;
        let messages = split.contents.iter().rev().map(|&(role, start, end)| {
            let text = to_text(&self.chat, &atoms[start..end]);
            Message { role: ROLES[role], ..Message::user(text) }
        });
        Some(ParsedContext { messages: messages.collect(), in_reasoning: split.in_reasoning })
    }

    /// Returns the separators that a prompt with one message of each of these roles contains.
    /// Returns an empty list if the template rejects the roles.
    fn probe_prompt(&self, roles: &[Role]) -> Vec<Separator> {
        let messages: Vec<Message> =
            roles.iter().enumerate().map(|(i, &role)| create_probe_message(role, i)).collect();
        let Ok(tokens) = self.chat.prompt(&messages, &self.tools) else { return Vec::new() };
        let opened = self.chat.opened_reasoning(&messages, &self.tools);
        let in_reasoning = opened.is_ok_and(|tag| tag.is_some());
        self.split_at_marks(&tokens, Position::Start, &messages, in_reasoning)
    }

    /// Returns the separators in the tokens between a completion and the next completion, when
    /// these messages are between them.
    fn probe_continuation(&self, messages: &[Message]) -> Vec<Separator> {
        let history = [Message::user("Hi")];
        let completion = self.chat.tokenizer().encode("Done");
        let ended = self.chat.stop_ids().iter().map(|&stop| [&completion[..], &[stop]].concat());
        let mut found = Vec::new();
        for sampled in [completion.clone()].into_iter().chain(ended) {
            let tokens = self.chat.continuation(&history, &sampled, messages, &self.tools);
            let Ok(tokens) = tokens else { continue };
            let all = [&history[..], &[Message::assistant("Done")], messages].concat();
            let opened = self.chat.opened_reasoning(&all, &self.tools);
            let in_reasoning = opened.is_ok_and(|tag| tag.is_some());
            found.extend(self.split_at_marks(&tokens, AFTER_ASSISTANT, messages, in_reasoning));
        }
        found
    }

    /// Splits rendered tokens at the contents of the probe `messages`, and returns the separators
    /// between them. Returns an empty list if a content is missing or out of order.
    fn split_at_marks(
        &self,
        tokens: &[u32],
        mut from: Position,
        messages: &[Message],
        in_reasoning: bool,
    ) -> Vec<Separator> {
        let atoms = to_atoms(&self.chat, tokens);
        let mut separators = Vec::new();
        let mut rest = &atoms[..];
        for (i, message) in messages.iter().enumerate() {
            let mark: Vec<Atom> = probe_mark(i).bytes().map(Atom::from).collect();
            let Some(at) = rest.windows(mark.len()).position(|window| window == mark) else {
                return Vec::new();
            };
            let role = ROLES.iter().position(|role| *role == message.role);
            let to = Position::After(role.unwrap_or_default());
            separators.push(Separator { from, to, atoms: rest[..at].to_vec() });
            rest = &rest[at + mark.len()..];
            from = to;
        }
        let to = Position::Generation { in_reasoning };
        separators.push(Separator { from, to, atoms: rest.to_vec() });
        separators
    }
}

/// Returns the roles of the probe conversations, which show how a template prints a prompt.
fn prompt_probes() -> Vec<Vec<Role>> {
    use Role::{Assistant as A, Developer as D, System as S, Tool as T, User as U};
    let tails: [&[Role]; 9] = [
        &[U],
        &[U, U],
        &[U, A, U],
        &[U, A, U, A, U],
        &[U, A, A, U],
        &[A, U],
        &[U, A, S, U],
        &[U, A, T],
        &[U, A, T, T, A, U],
    ];
    let heads: [&[Role]; 4] = [&[], &[S], &[D], &[S, S]];
    let probes = heads.iter().flat_map(|head| tails.iter().map(move |tail| [*head, tail].concat()));
    probes.chain([vec![S], vec![U, S], vec![U, A]]).collect()
}

/// Returns the roles of the probe messages between two completions.
fn continuation_probes() -> Vec<Vec<Role>> {
    use Role::{System as S, Tool as T, User as U};
    [&[U][..], &[U, U], &[T], &[T, T], &[T, T, T], &[T, U], &[U, T], &[S], &[S, U], &[T, S], &[]]
        .map(<[Role]>::to_vec)
        .into()
}

fn probe_mark(index: usize) -> String {
    format!("{MARK}{index}x")
}

fn create_probe_message(role: Role, index: usize) -> Message {
    Message { role, ..Message::user(probe_mark(index)) }
}

fn sort_longest_first(found: BTreeSet<Separator>) -> Vec<Separator> {
    let mut separators: Vec<Separator> = found.into_iter().collect();
    separators.sort_by_key(|separator| std::cmp::Reverse(separator.atoms.len()));
    separators
}

fn to_atoms(chat: &Chat, tokens: &[u32]) -> Vec<Atom> {
    let tokenizer = chat.tokenizer();
    let mut atoms = Vec::with_capacity(tokens.len() * 4);
    for &token in tokens {
        if tokenizer.is_special(token) {
            atoms.push(256 + token);
        } else {
            atoms.extend(tokenizer.bytes_with_special(token).iter().map(|&byte| Atom::from(byte)));
        }
    }
    atoms
}

/// Decodes atoms to text. A special token becomes its name. Invalid UTF-8 becomes U+FFFD.
fn to_text(chat: &Chat, atoms: &[Atom]) -> String {
    let mut bytes = Vec::with_capacity(atoms.len());
    for &atom in atoms {
        match u8::try_from(atom) {
            Ok(byte) => bytes.push(byte),
            Err(_) => bytes.extend(chat.tokenizer().bytes_with_special(atom - 256)),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Division of a prompt into messages. `contents` lists the messages from the last to the first,
/// each with its role, its first atom and its end.
struct PromptSplit {
    contents: Vec<(usize, usize, usize)>,
    in_reasoning: bool,
}

/// Search for the separators of a prompt.
struct Search<'a> {
    atoms: &'a [Atom],
    separators: &'a [Separator],
    /// Starts of message contents, each with its role, after which the rest of the prompt cannot be
    /// split. Each start is searched only once, so the work is at most the square of the prompt's
    /// length.
    misfits: HashSet<(usize, usize)>,
}

impl Search<'_> {
    /// Splits the atoms from the index `at` on, which start with a separator. Returns `None` if the
    /// atoms cannot be split.
    fn split_from_separator(&mut self, at: usize, from: Position) -> Option<PromptSplit> {
        let atoms = self.atoms;
        for separator in self.separators.iter().filter(|separator| separator.from == from) {
            let Some(rest) = atoms[at..].strip_prefix(&separator.atoms[..]) else { continue };
            let start = atoms.len() - rest.len();
            match separator.to {
                Position::Generation { in_reasoning } if rest.is_empty() => {
                    return Some(PromptSplit { contents: Vec::new(), in_reasoning });
                }
                Position::After(role) if self.misfits.insert((start, role)) => {
                    if let Some(split) = self.split_from_content(start, role) {
                        return Some(split);
                    }
                }
                _ => {}
            }
        }
        None
    }

    /// Splits the atoms from the index `start` on, which start with the content of a message.
    /// Returns `None` if the atoms cannot be split.
    fn split_from_content(&mut self, start: usize, role: usize) -> Option<PromptSplit> {
        let from = Position::After(role);
        let ends: HashSet<Option<Atom>> = self
            .separators
            .iter()
            .filter(|separator| separator.from == from)
            .map(|separator| separator.atoms.first().copied())
            .collect();
        for end in start..=self.atoms.len() {
            let next = self.atoms.get(end).copied();
            if !ends.contains(&next) && !ends.contains(&None) {
                continue;
            }
            if let Some(mut split) = self.split_from_separator(end, from) {
                split.contents.push((role, start, end));
                return Some(split);
            }
        }
        None
    }
}

/// Finds the tools that a prompt describes: JSON objects at the starts of lines that have the form
/// of tools in OpenAI's format, with or without the outer `{"type": "function", …}`.
pub fn find_described_tools(text: &str) -> Vec<ToolSpec> {
    let mut tools = Vec::new();
    for line in text.lines().map(str::trim_start).filter(|line| line.starts_with('{')) {
        let mut values = serde_json::Deserializer::from_str(line).into_iter::<Value>();
        let Some(Ok(value)) = values.next() else { continue };
        let spec = value.get("function").unwrap_or(&value);
        if spec.get("name").is_some_and(Value::is_string)
            && spec.get("parameters").is_some_and(Value::is_object)
            && let Ok(tool) = serde_json::from_value(spec.clone())
        {
            tools.push(tool);
        }
    }
    tools
}

#[cfg(test)]
mod tests {
    use levade_text::ChatOptions;
    use levade_text::testing::{IM_END, family_chat, protocols, tiny_chat};
    use proptest::prelude::*;

    use super::*;

    fn result(text: &str) -> Message {
        Message {
            tool_call_id: Some("call_0".into()),
            name: Some("add".into()),
            ..Message::tool(text)
        }
    }

    fn tool() -> ToolSpec {
        ToolSpec {
            name: "add".into(),
            description: "Adds.".into(),
            parameters: serde_json::json!({ "type": "object", "properties": {} }),
        }
    }

    #[test]
    fn parse_inverts_prompt_with_and_without_tools() {
        let chat = Arc::new(tiny_chat().unwrap());
        let messages = [
            Message::system("Be <|im_end|> brief.\n\nVery."),
            Message::user("What?\n<|im_start|>user\nreally"),
            Message::assistant("That."),
            Message::user(" ok "),
        ];
        for tools in [vec![], vec![tool()]] {
            let parser = PromptParser::new(&chat, tools.clone());
            let tokens = chat.prompt(&messages, &tools).unwrap();
            let parsed = parser.parse(&tokens, Position::Start, &[]).unwrap();
            assert_eq!(parsed.messages, messages);
            assert!(!parsed.in_reasoning);
        }
    }

    #[test]
    fn parse_rejects_tokens_outside_template() {
        let chat = Arc::new(tiny_chat().unwrap());
        let parser = PromptParser::new(&chat, Vec::new());
        let tokens = chat.prompt(&[Message::user("Hi")], &[]).unwrap();
        assert!(parser.parse(&tokens, Position::Start, &[]).is_some());
        assert!(parser.parse(&tokens[1..], Position::Start, &[]).is_none());
        assert!(parser.parse(&tokens[..tokens.len() - 1], Position::Start, &[]).is_none());
        let extra = [&tokens[..], &chat.tokenizer().encode("more")].concat();
        assert!(parser.parse(&extra, Position::Start, &[]).is_none());
    }

    #[test]
    fn described_tools_finds_specs_between_other_text() {
        let chat = Arc::new(tiny_chat().unwrap());
        let tokens =
            chat.prompt(&[Message::system("{\"name\": 1}"), Message::user("{")], &[tool()]);
        let text = chat.tokenizer().decode_with_special(&tokens.unwrap());
        assert_eq!(find_described_tools(&text), [tool()]);
    }

    /// Counts the families whose prompts and continuations are parsed; a family that is lost fails
    /// the test by name.
    #[test]
    fn parse_inverts_tool_results_of_every_family() {
        for protocol in protocols() {
            let chat = Arc::new(family_chat(protocol, ChatOptions::default()).unwrap());
            let parser = PromptParser::new(&chat, vec![tool()]);
            let question = [Message::user("Why?")];
            let prompt = chat.prompt(&question, &[tool()]).unwrap();
            let parsed = parser.parse(&prompt, Position::Start, &[]);
            assert_eq!(parsed.map(|p| p.messages), Some(question.to_vec()), "{protocol:?}");
            let call = ToolCall {
                id: "call_0".into(),
                name: "add".into(),
                arguments: serde_json::Map::new().into(),
            };
            let sampled = chat.assistant(&Message::calls("", vec![call.clone()]), None).unwrap();
            let given = chat.continuation(&question, &sampled, &[result("5")], &[tool()]).unwrap();
            let parsed = parser.parse(&given, AFTER_ASSISTANT, &[call]);
            let texts: Option<Vec<(Role, String)>> = parsed.map(|parsed| {
                let all = parsed.messages.iter();
                all.map(|m| (m.role, m.content.as_str().to_owned())).collect()
            });
            assert_eq!(texts, Some(vec![(Role::Tool, "5".to_owned())]), "{protocol:?}");
        }
    }

    proptest! {
        /// Any conversation that the template prints unchanged is parsed back.
        #[test]
        fn parse_inverts_any_contents(
            texts in proptest::collection::vec("[a-z<|>\n_ ]{0,12}|.{0,6}", 1..6),
            has_system: bool,
        ) {
            let chat = Arc::new(tiny_chat().unwrap());
            let parser = PromptParser::new(&chat, Vec::new());
            let mut messages: Vec<Message> = Vec::new();
            for (i, text) in texts.iter().enumerate() {
                messages.push(if i % 2 == 0 {
                    Message::user(text.as_str())
                } else {
                    Message::assistant(text.as_str())
                });
            }
            if has_system {
                messages.insert(0, Message::system("s"));
            }
            let tokens = chat.prompt(&messages, &[]).unwrap();
            let parsed = parser.parse(&tokens, Position::Start, &[]);
            prop_assert_eq!(parsed.map(|parsed| parsed.messages), Some(messages));
        }

        /// A user message that ends a turn by text, not by a special token, stays one message.
        #[test]
        fn parse_never_splits_at_spelled_tokens(text in "(<\\|im_end\\|>|\n|user|<\\|im_start\\|>){0,8}") {
            let chat = Arc::new(tiny_chat().unwrap());
            let parser = PromptParser::new(&chat, Vec::new());
            let sampled = [b'x'.into(), IM_END];
            let new = [Message::user(text.as_str())];
            let tokens = chat.continuation(&[Message::user("Hi")], &sampled, &new, &[]).unwrap();
            let parsed = parser.parse(&tokens, AFTER_ASSISTANT, &[]);
            prop_assert_eq!(parsed.map(|parsed| parsed.messages), Some(new.to_vec()));
        }
    }
}
