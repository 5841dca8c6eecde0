//! The sequences of an attempt, as messages.
//!
//! A sequence is what the model saw in one call: the segments from a root of the attempt's tree to
//! a leaf. An attempt has one sequence per conversation and per fork. Completions are parsed to
//! assistant messages with the same parser as for agents, and context tokens are parsed to messages
//! with [`PromptParser`]. If a sequence cannot be parsed, the sequence contains its text and the
//! reason.

use std::collections::BTreeMap;
use std::sync::Arc;

use levade_call::ExternalCall;
use levade_store::Attempt;
use levade_text::{Chat, Message, Role, ToolCall, ToolSpec};
use levade_tree::{Kind, Part, SegmentId};

use crate::prompt_parser::{AFTER_ASSISTANT, Position, PromptParser, find_described_tools};

/// Function that returns the chat format of an agent and a policy, or the reason why there is none.
pub type FindChat<'a> = dyn Fn(&str, &str) -> Result<Arc<Chat>, String> + 'a;

/// Sequence of an attempt, converted to messages.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Sequence {
    /// Name of the agent that sampled the last completion.
    pub agent: String,
    /// Name of the policy that sampled the last completion.
    pub policy: String,
    /// Messages of the sequence, in order. `None` if the tokens cannot be parsed.
    pub messages: Option<Vec<Message>>,
    /// Tools that the prompt describes. Empty if the prompt describes no tools, or if a message
    /// contains the descriptions.
    pub tools: Vec<ToolSpec>,
    /// Text of all tokens of the sequence, with special tokens by name. `None` if `messages` is
    /// set.
    pub text: Option<String>,
    /// Reasons why `messages` is `None` or differs from what the model read and wrote.
    pub problems: Vec<String>,
    /// Completions in the sequence, in order.
    pub completions: Vec<Completion>,
    /// Tokens of the sequence. Empty if a chat API generated the completions.
    pub tokens: Tokens,
}

/// Completion in a sequence of an attempt.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    /// Index of the completion's message in [`Sequence::messages`].
    pub message: usize,
    /// Number of tokens that precede the completion in the sequence. For a chat API, the number
    /// that the API reported.
    pub prompt_tokens: usize,
    /// Number of tokens of the completion. For a chat API, the number that the API reported.
    pub completion_tokens: usize,
    /// Whether an earlier sequence of the attempt also contains the completion.
    pub is_repeated: bool,
    /// Last segment of the completion. `None` if a chat API generated the completion.
    pub segment: Option<SegmentId>,
}

/// Tokens of a sequence, with the values that are recorded for each token.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Tokens {
    /// Ids of the tokens.
    pub ids: Vec<u32>,
    /// Whether each token can be a training target: the token was demonstrated, or sampled from the
    /// distribution that its log-probability describes.
    pub is_target: Vec<bool>,
    /// Log-probability of each token. `None` for a token that was not sampled.
    pub logprobs: Vec<Option<f32>>,
    /// Version of the policy's weights that sampled each token. `None` for a token that was not
    /// sampled.
    pub versions: Vec<Option<u64>>,
}

impl Tokens {
    fn extend(&mut self, Part { segment, len }: &Part<'_>) {
        let fill = |given: usize| *len - given.min(*len);
        self.ids.extend(&segment.tokens[..*len]);
        self.is_target.extend(std::iter::repeat_n(segment.is_target(), *len));
        self.logprobs.extend(segment.logprobs.iter().take(*len).map(|&logprob| Some(logprob)));
        self.logprobs.extend(std::iter::repeat_n(None, fill(segment.logprobs.len())));
        self.versions.extend(segment.token_versions().take(*len).map(Some));
        self.versions.resize(self.ids.len(), None);
    }

    /// Returns the distinct versions of the weights, in the order of their first tokens.
    pub fn distinct_versions(&self) -> Vec<u64> {
        let mut versions = Vec::new();
        for version in self.versions.iter().flatten() {
            if !versions.contains(version) {
                versions.push(*version);
            }
        }
        versions
    }
}

/// Converter of attempts into sequences. It creates only one prompt parser per chat format and list
/// of tools.
pub struct SequenceReader<'a> {
    find_chat: &'a FindChat<'a>,
    raw: bool,
    chats: BTreeMap<(String, String), Result<ChatParsers, String>>,
}

/// Chat format with the parsers of its prompts. The first parser knows no tools.
struct ChatParsers {
    chat: Arc<Chat>,
    parsers: Vec<PromptParser>,
}

/// Adjacent tokens of a sequence, all context or all part of one completion.
struct TokenStretch {
    is_context: bool,
    tokens: Vec<u32>,
    /// Last segment that has tokens in the stretch.
    segment: SegmentId,
}

impl<'a> SequenceReader<'a> {
    /// Creates a reader of sequences. If `raw` is true, messages contain the text as the model read
    /// and wrote it: reasoning and tool calls stay in the text of assistant messages, and
    /// descriptions of tools stay in the prompt.
    pub fn new(find_chat: &'a FindChat<'a>, raw: bool) -> Self {
        SequenceReader { find_chat, raw, chats: BTreeMap::new() }
    }

    /// Returns the sequences of an attempt. Sequences with tokens come first, in the order of their
    /// leaves, and then the sequences that chat APIs answered.
    pub fn read_sequences(&mut self, attempt: &Attempt) -> Vec<Sequence> {
        let owners = attempt.trajectory.owners();
        let mut sequences = Vec::new();
        for leaf in attempt.trajectory.leaves() {
            let mut sequence = self.read_tokens(&attempt.trajectory.sequence(leaf));
            for completion in &mut sequence.completions {
                completion.is_repeated = completion.segment.is_some_and(|segment| {
                    owners.get(segment.0 as usize).is_some_and(|owner| *owner != leaf)
                });
            }
            sequences.push(sequence);
        }
        sequences.extend(read_external_sequences(attempt));
        sequences
    }

    fn read_tokens(&mut self, parts: &[Part<'_>]) -> Sequence {
        let mut sequence = Sequence::default();
        parts.iter().for_each(|part| sequence.tokens.extend(part));
        let last = parts.iter().rev().find(|part| part.segment.kind != Kind::Context);
        let Some(Part { segment, .. }) = last.or(parts.last()) else { return sequence };
        (sequence.agent, sequence.policy) = (segment.agent.clone(), segment.policy.clone());
        let key = (segment.agent.clone(), segment.policy.clone());
        let find_chat = self.find_chat;
        let found = self.chats.entry(key).or_insert_with_key(|(agent, policy)| {
            let chat = find_chat(agent, policy)?;
            Ok(ChatParsers { parsers: vec![PromptParser::new(&chat, Vec::new())], chat })
        });
        let ChatParsers { chat, parsers } = match found {
            Ok(found) => found,
            Err(problem) => {
                sequence.problems.push(problem.clone());
                return sequence;
            }
        };
        let stretches = to_stretches(parts);
        let prompt = stretches.first().map_or(&[][..], |stretch| &stretch.tokens);
        let tools = match self.raw {
            true => Vec::new(),
            false => find_described_tools(&chat.tokenizer().decode_with_special(prompt)),
        };
        let at = parsers.iter().position(|parser| parser.tools() == tools).unwrap_or_else(|| {
            parsers.push(PromptParser::new(chat, tools));
            parsers.len() - 1
        });
        let tools = parsers[at].tools().to_vec();
        let parsed = parse_messages(chat, &parsers[at], &stretches, self.raw)
            .map(|parsed| Sequence { tools, ..parsed })
            .or_else(|_| parse_messages(chat, &parsers[0], &stretches, self.raw));
        match parsed {
            Ok(parsed) => {
                let Sequence { agent, policy, tokens, .. } = sequence;
                Sequence { agent, policy, tokens, ..parsed }
            }
            Err(problem) => {
                let text = chat.tokenizer().decode_with_special(&sequence.tokens.ids);
                sequence.text = Some(text);
                sequence.problems.push(problem);
                sequence
            }
        }
    }
}

fn to_stretches(parts: &[Part<'_>]) -> Vec<TokenStretch> {
    let mut stretches: Vec<TokenStretch> = Vec::new();
    for part in parts.iter().filter(|part| part.len > 0) {
        let is_context = part.segment.kind == Kind::Context;
        let segment = part.segment.id;
        match stretches.last_mut() {
            Some(last) if last.is_context == is_context => {
                last.tokens.extend(part.tokens());
                last.segment = segment;
            }
            _ => {
                stretches.push(TokenStretch { is_context, tokens: part.tokens().to_vec(), segment })
            }
        }
    }
    stretches
}

/// Parses the messages of a sequence. The names and tokens of the sequence are added by the caller.
/// Returns the reason if the sequence cannot be parsed.
fn parse_messages(
    chat: &Chat,
    parser: &PromptParser,
    stretches: &[TokenStretch],
    raw: bool,
) -> Result<Sequence, String> {
    let mut messages: Vec<Message> = Vec::new();
    let mut sequence = Sequence::default();
    let mut position = Position::Start;
    let mut calls: Vec<ToolCall> = Vec::new();
    let mut offset = 0;
    for TokenStretch { is_context, tokens, segment } in stretches {
        if *is_context {
            let parsed = parser.parse(tokens, position, &calls).ok_or_else(|| {
                format!(
                    "the context tokens {offset} to {} do not fit the chat template, so the \
                     sequence has no messages",
                    offset + tokens.len()
                )
            })?;
            let mut results = tool_result_ids(&messages);
            for mut message in parsed.messages {
                match message.role {
                    Role::Assistant => {
                        let text = message.content.as_str().to_owned();
                        let number = messages.len();
                        (message, _) =
                            to_assistant_message(chat, &text, false, raw, number, &mut sequence);
                        results = tool_result_ids(std::slice::from_ref(&message));
                    }
                    Role::Tool => message.tool_call_id = results.next().flatten(),
                    _ => {}
                }
                messages.push(message);
            }
            position = Position::Generation { in_reasoning: parsed.in_reasoning };
        } else {
            let Position::Generation { in_reasoning } = position else {
                return Err(format!("no prompt precedes the completion at token {offset}"));
            };
            let text = chat.decode_completion(tokens);
            let number = messages.len();
            let (message, parsed) =
                to_assistant_message(chat, &text, in_reasoning, raw, number, &mut sequence);
            calls = parsed;
            sequence.completions.push(Completion {
                message: messages.len(),
                prompt_tokens: offset,
                completion_tokens: tokens.len(),
                is_repeated: false,
                segment: Some(*segment),
            });
            messages.push(message);
            position = AFTER_ASSISTANT;
        }
        offset += tokens.len();
    }
    let is_lossy = |message: &Message| message.content.contains(char::REPLACEMENT_CHARACTER);
    if let Some(at) = messages.iter().position(is_lossy) {
        sequence.problems.push(format!(
            "message {at} has bytes that are not UTF-8, or U+FFFD, which replaces them"
        ));
    }
    sequence.messages = Some(messages);
    Ok(sequence)
}

/// Converts a completion into an assistant message. Also returns the tool calls of the completion,
/// with the ids that the parser generated. In the message, the ids are unique within the
/// conversation: `call_M_N` is call `N` of message `M`.
fn to_assistant_message(
    chat: &Chat,
    text: &str,
    in_reasoning: bool,
    raw: bool,
    number: usize,
    sequence: &mut Sequence,
) -> (Message, Vec<ToolCall>) {
    let parsed = chat.parse(text, in_reasoning, &[]);
    let calls: Vec<ToolCall> = parsed.calls.iter().flatten().cloned().collect();
    if raw {
        return (Message::assistant(text), calls);
    }
    let mut content = parsed.content;
    let mut named = Vec::new();
    for (i, call) in parsed.calls.into_iter().enumerate() {
        match call {
            Ok(call) => named.push(ToolCall { id: format!("call_{number}_{i}"), ..call }),
            Err(call) => {
                content = format!("{content}\n{}", call.raw).trim_start().to_owned();
                let why = format!("message {number} has a malformed tool call: {}", call.why);
                sequence.problems.push(why);
            }
        }
    }
    let reasoning = chat.reasoning(text, in_reasoning);
    let message = Message {
        reasoning_content: Some(reasoning).filter(|reasoning| !reasoning.is_empty()),
        ..Message::calls(content, named)
    };
    (message, calls)
}

/// Returns the call ids of the tool results that follow the last message. The result of a malformed
/// call has no id.
fn tool_result_ids(messages: &[Message]) -> impl Iterator<Item = Option<String>> + use<> {
    let calls = messages.last().map(|message| message.tool_calls.clone()).unwrap_or_default();
    let index = |call: &ToolCall| -> Option<usize> { call.id.rsplit('_').next()?.parse().ok() };
    let mut ids = Vec::new();
    for call in calls {
        ids.resize(index(&call).unwrap_or(ids.len()), None);
        ids.push(Some(call.id));
    }
    ids.into_iter()
}

/// Returns the conversations in which chat APIs answered. A conversation is a history that no later
/// call continues.
fn read_external_sequences(attempt: &Attempt) -> Vec<Sequence> {
    let recorded = attempt.outcome.scorer_inputs.get("program").and_then(|all| all.get("external"));
    let calls = recorded.map(|calls| serde_json::from_value::<Vec<ExternalCall>>(calls.clone()));
    let calls = match calls {
        None => return Vec::new(),
        Some(Ok(calls)) => calls,
        Some(Err(error)) => {
            let problems = vec![format!("the calls of chat APIs cannot be read: {error}")];
            return vec![Sequence { problems, ..Sequence::default() }];
        }
    };
    let is_continued = |at: usize| calls.iter().any(|call| call.after == Some(at));
    let leaves = (0..calls.len()).filter(|&at| !is_continued(at));
    leaves
        .map(|at| {
            let ExternalCall { agent, policy, prompt_tokens, tokens, error, .. } = &calls[at];
            let messages = ExternalCall::history(&calls, at);
            let completion = Completion {
                message: messages.len().saturating_sub(1),
                prompt_tokens: *prompt_tokens,
                completion_tokens: *tokens,
                is_repeated: false,
                segment: None,
            };
            Sequence {
                agent: agent.clone(),
                policy: policy.clone(),
                messages: Some(messages),
                tools: ExternalCall::tools(&calls, at).to_vec(),
                problems: error.iter().cloned().collect(),
                completions: vec![completion],
                ..Sequence::default()
            }
        })
        .collect()
}
