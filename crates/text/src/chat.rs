//! Converts conversations to tokens, and parses completions.
//!
//! [`Chat`] renders prompts and demonstrations. The tokens between turns are in `continuation.rs`.
//!
//! # Guarantees
//! - **No injected special tokens**: text from messages and tools never becomes a special token.
//!   Only the template's own text does, and the tags around an assistant's reasoning and calls, for
//!   models that write these tags as special tokens.
//! - **Demonstrations look sampled**: [`Chat::assistant`] returns a demonstrated turn as the model
//!   would sample it: the turn's text, encoded separately, and then the end-of-turn token.
//! - **Calls inside reasoning do not count**: tool calls and final answers are searched only
//!   outside of reasoning. Unclosed reasoning extends to the end of the completion. If reasoning is
//!   closed but was never opened, it started at the beginning of the completion.
//!
//! # Approach
//! External strings are printed with a *guard* wherever a special token could start in them. A
//! guard is a private-use character that occurs nowhere else. The tokenizer matches special tokens
//! around the guards and removes the guards before it encodes. The text is therefore encoded as if
//! the guards had never been there.

use std::collections::BTreeSet;

use levade_model::{ModelFiles, SpecialTokens};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::calls::{CallFormat, ParsedCompletion, RESPONSE, Syntax};
use crate::completion_parser::{
    CompletionParser, ParserEvent, SpanKind, TagTables, collect_reasoning,
};
use crate::describe::ToolPrompt;
use crate::prepare::{CallMessageFormat, MessageFormat, Preparation, PreparedPrompt};
use crate::protocol::ToolSupport;
use crate::reasoning_tags::ReasoningTagSet;
use crate::systems::{LateSystem, ShiftedSystems};
use crate::template::TemplateInput;
use crate::{ChatTemplate, Message, Role, TextError, Tokenizer, ToolProtocol, ToolSpec, bare};

/// Settings of a chat that the model's files leave open.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ChatOptions {
    /// Protocol for describing and calling tools.
    pub tools: ToolProtocol,
    /// Format of the tool descriptions in the system prompt. Used only if the chat template does
    /// not describe tools.
    pub tool_prompt: ToolPrompt,
    /// Whether a JSON object that names a tool counts as a tool call even without tags.
    pub bare_calls: bool,
    /// Handling of a system message after the first turn that the chat template does not print
    /// there.
    pub late_system: LateSystem,
    /// Additional variables of the chat template, such as `enable_thinking = false`.
    pub variables: Map<String, Value>,
    /// Unix timestamp, in seconds, that the chat template sees as the current time. `None` uses the
    /// clock at the creation of the chat. Recorded with a run, but not part of a written
    /// configuration.
    #[serde(skip)]
    pub now: Option<u64>,
}

/// A model's tokenizer, with the chat template and the tool protocol that belong to it.
#[derive(Debug, Clone)]
pub struct Chat {
    pub(crate) tokenizer: Tokenizer,
    pub(crate) template: ChatTemplate,
    tool_prompt: ToolPrompt,
    bare_calls: bool,
    variables: Map<String, Value>,
    pub(crate) tool_support: ToolSupport,
    pub(crate) format: CallFormat,
    /// Whether the chat template prints messages of role `tool`.
    tool_role: bool,
    pub(crate) message_format: MessageFormat,
    /// White space that the chat template prints between the generation prompt and an assistant's
    /// text. Usually empty.
    pub(crate) opening: String,
    /// Text that the chat template prints after an assistant message, up to and including the
    /// end-of-turn token.
    pub(crate) closing: String,
    /// Tags around the model's reasoning.
    reasoning_tags: ReasoningTagSet,
    /// All tags of the model: its reasoning tags and the tags of its tool-call format.
    tags: TagTables,
    /// Ids of the special tokens that carry meaning in a completion: reasoning and call tags.
    pub(crate) tag_ids: Vec<u32>,
    /// The reason why tool calls cannot be written in this tokenizer's tokens, or `None` if they
    /// can.
    unwritable: Option<TextError>,
    pub(crate) end_of_turn: u32,
    pub(crate) stop_ids: Vec<u32>,
}

impl ChatOptions {
    /// Adds the model's special tokens to the template variables, under their names such as
    /// `pad_token`. Omits the names in [`ENDS`]. Existing variables are kept.
    pub(crate) fn with_token_names(mut self, special: &SpecialTokens) -> Self {
        for (name, text) in special.by_name().filter(|(name, _)| !ENDS.contains(name)) {
            self.variables.entry(name).or_insert_with(|| text.into());
        }
        self
    }
}

/// Template variables for the tokens at the start and the end of a text. The tokenizer provides
/// their ids.
const ENDS: [&str; 2] = ["bos_token", "eos_token"];

impl Chat {
    /// Creates the chat of a model on disk. If `template` is set, it replaces the model's own chat
    /// template.
    ///
    /// # Errors
    /// Returns an error if the model has no tokenizer, and the errors of [`Tokenizer::new`] and
    /// [`Chat::new`].
    pub fn open(
        model: &ModelFiles,
        template: Option<&str>,
        options: ChatOptions,
    ) -> Result<Self, TextError> {
        let source = model.tokenizer.as_ref().ok_or_else(|| {
            TextError::Tokenizer(format!(
                "{} has no tokenizer.json; copy the model's tokenizer.json into it",
                model.path().display()
            ))
        })?;
        let special = &model.special_tokens;
        let config = &model.config;
        let tokenizer = Tokenizer::new(source)?.with_named_ends(special, config.bos, &config.eos);
        let options = options.with_token_names(special);
        Self::new(tokenizer, template.or(model.chat_template.as_deref()), options)
    }

    /// Creates a chat from a tokenizer and the template of its model. `"chatml"` selects plain
    /// ChatML.
    ///
    /// # Errors
    /// Returns an error if `template` is `None`, if the template does not parse or fails on an
    /// ordinary conversation, or if it ends an assistant turn without a special token of the
    /// tokenizer.
    pub fn new(
        tokenizer: Tokenizer,
        template: Option<&str>,
        options: ChatOptions,
    ) -> Result<Self, TextError> {
        let source = template.ok_or(TextError::NoTemplate)?;
        let template = match options.now {
            Some(now) => ChatTemplate::at(source, now)?,
            None => ChatTemplate::new(source)?,
        };
        let mut variables = Map::new();
        for (name, id) in ENDS.into_iter().zip([tokenizer.bos(), tokenizer.eos().first().copied()])
        {
            if let Some(id) = id {
                variables.insert(name.into(), tokenizer.token_text(id).into());
            }
        }
        variables.extend(options.variables);
        let mut chat = Chat {
            tokenizer,
            template,
            tool_prompt: options.tool_prompt,
            bare_calls: options.bare_calls,
            variables,
            tool_support: ToolSupport::None,
            format: CallFormat::default(),
            tool_role: false,
            message_format: MessageFormat::default(),
            opening: String::new(),
            closing: String::new(),
            reasoning_tags: ReasoningTagSet::default(),
            tags: TagTables::new(&ReasoningTagSet::default(), CallFormat::default().syntax()),
            tag_ids: Vec::new(),
            unwritable: None,
            end_of_turn: 0,
            stop_ids: Vec::new(),
        };
        chat.message_format = chat.probe_messages();
        chat.message_format.systems = chat.probe_systems(options.late_system);
        chat.probe_turn()?;
        chat.probe_format(options.tools);
        let syntax = chat.format.syntax();
        chat.stop_ids = chat.collect_stop_ids(syntax);
        chat.tool_role = chat.prints_later(Role::Tool);
        chat.reasoning_tags = match syntax.syntax_tags().reasoning_tags {
            // The format's header, which names the channel, then belongs to the completion.
            Some(tags) => {
                chat.opening.clear();
                chat.message_format.tight = true;
                ReasoningTagSet::from_pair(tags)
            }
            None => ReasoningTagSet::find_pairs(&chat.template, &chat.tokenizer, &chat.variables),
        };
        let ends: Vec<String> =
            chat.stop_ids.iter().map(|&id| chat.tokenizer.token_text(id)).collect();
        chat.reasoning_tags.remove_pairs_with(&ends);
        chat.message_format.tags =
            chat.reasoning_tags.preferred_pair(&chat.template, &chat.tokenizer).cloned();
        chat.tags = TagTables::new(&chat.reasoning_tags, syntax);
        chat.tag_ids = chat.find_tag_ids();
        chat.unwritable = chat.probe_call().err();
        chat.probe_unreadable();
        Ok(chat)
    }

    /// Returns the tokens that end a completion: the template's end-of-turn token first, then the
    /// tokens that end a text or a call.
    fn collect_stop_ids(&self, syntax: &dyn Syntax) -> Vec<u32> {
        let message_ends = self.special_ids(syntax.syntax_tags().message_ends);
        let mut stops: Vec<u32> = Vec::new();
        let all = [self.end_of_turn].into_iter().chain(self.tokenizer.eos().iter().copied());
        for id in all.chain(self.special_ids(syntax.syntax_tags().stops)) {
            if !message_ends.contains(&id) && !stops.contains(&id) {
                stops.push(id);
            }
        }
        // If the tokenizer lacks the tokens of its format, turns end as the template prints them.
        if stops.is_empty() { vec![self.end_of_turn] } else { stops }
    }

    fn special_ids(&self, texts: &[&str]) -> Vec<u32> {
        texts.iter().filter_map(|text| self.tokenizer.special(text)).collect()
    }

    /// Returns the special tokens that are part of a reasoning or call tag, or that contain such a
    /// tag. The end-of-turn token carries no meaning and is excluded.
    fn find_tag_ids(&self) -> Vec<u32> {
        let reasoning =
            self.reasoning_tags.pairs().iter().flat_map(|tags| [tags.open.as_str(), &tags.close]);
        let calls = self.format.syntax().syntax_tags().tags.iter().copied();
        let tags: Vec<&str> = reasoning.chain(calls).chain(RESPONSE).collect();
        let specials = self.tokenizer.specials().filter(|(id, text)| {
            tags.iter().any(|tag| tag.contains(text) || text.contains(tag))
                && (*id != self.end_of_turn
                    || self.format.syntax().syntax_tags().message_ends.contains(text))
        });
        specials.map(|(id, _)| id).collect()
    }

    /// Returns the tokenizer of the model.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Returns the compiled chat template.
    pub fn template(&self) -> &ChatTemplate {
        &self.template
    }

    /// Returns the variables of the chat template other than messages and tools.
    pub fn variables(&self) -> &Map<String, Value> {
        &self.variables
    }

    /// Returns the tokens that end a completion: the template's end-of-turn token first, then the
    /// tokens that end a text or a call.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// Returns the tokens of a prompt: the rendered messages, and the generation prompt that starts
    /// the assistant's turn.
    ///
    /// # Errors
    /// Returns an error if the template raises one, or if it describes tools in an unsupported call
    /// format.
    pub fn prompt(&self, messages: &[Message], tools: &[ToolSpec]) -> Result<Vec<u32>, TextError> {
        self.prompt_with_limit(messages, tools, usize::MAX)
    }

    /// Returns the tokens of [`prompt`](Self::prompt), but rejects an overlong text before
    /// tokenizing it. A text is rejected if its bytes alone show that it has more than `max_tokens`
    /// tokens.
    ///
    /// # Errors
    /// Returns [`TextError::TooLong`] if the text is rejected, and the errors of
    /// [`prompt`](Self::prompt).
    pub fn prompt_with_limit(
        &self,
        messages: &[Message],
        tools: &[ToolSpec],
        max_tokens: usize,
    ) -> Result<Vec<u32>, TextError> {
        let [guard] = self.find_unused_characters(messages, tools)?;
        let text = self.render_text(messages, tools, true, guard)?;
        self.tokenizer.check_length(&text, max_tokens)?;
        Ok(self.tokenizer.encode_guarded(&text, Some(guard)))
    }

    /// Renders a conversation to text with the chat template. The text ends with the generation
    /// prompt if `add_generation_prompt` is set.
    pub(crate) fn render_text(
        &self,
        messages: &[Message],
        tools: &[ToolSpec],
        add_generation_prompt: bool,
        guard: char,
    ) -> Result<String, TextError> {
        let PreparedPrompt { messages, tools } = self.prepare_prompt(messages, tools, guard)?;
        self.render(&messages, tools.as_deref(), add_generation_prompt, Some(guard))
    }

    /// Returns the tokens of a demonstrated turn as the model would sample them after a prompt: the
    /// turn's text and calls, and the end-of-turn token.
    ///
    /// `opened` is the closing tag of the reasoning that the prompt has opened
    /// ([`opened_reasoning`](Self::opened_reasoning)), or `None` if the prompt has not opened any.
    /// If `opened` is set, a turn with reasoning continues the opened reasoning, and a turn without
    /// reasoning closes it first.
    ///
    /// # Errors
    /// Returns an error if every private-use character occurs in the text.
    pub fn assistant(
        &self,
        message: &Message,
        opened: Option<&str>,
    ) -> Result<Vec<u32>, TextError> {
        let [guard] = self.find_unused_characters(std::slice::from_ref(message), &[])?;
        if let Some(ids) = self.print_turn(message, guard) {
            return Ok(ids);
        }
        let preparation = self.make_preparation(guard);
        let message = &*self.message_format.with_inline_reasoning(message);
        let close = opened.or_else(|| self.reasoning_tags.find_last_close(&self.opening));
        let body = match close.filter(|close| message.content.contains(close)) {
            // The message contains reasoning of its own, whose opening tag the prompt may already
            // contain.
            Some(close) if opened.is_some() => {
                let content = self.reasoning_tags.strip_open_tag(&message.content, close).into();
                preparation.write_assistant(&Message { content, ..message.clone() }, true)
            }
            Some(_) => preparation.write_assistant(message, false),
            None => {
                let opening = match opened {
                    Some(close) if !self.opening.contains(close) => format!("\n{close}\n\n"),
                    _ => self.opening.clone(),
                };
                format!("{opening}{}", preparation.write_assistant(message, false))
            }
        };
        let end = self.tags.syntax.turn_end_token(!message.tool_calls.is_empty());
        let closing =
            end.filter(|end| self.tokenizer.special(end).is_some()).unwrap_or(&self.closing);
        Ok(self.tokenizer.encode_guarded(&format!("{body}{closing}"), Some(guard)))
    }

    /// Returns the tokens of a turn with tool calls as the template prints it. Returns `None` if
    /// these tokens differ from a turn that the model would sample after the generation prompt.
    fn print_turn(&self, message: &Message, guard: char) -> Option<Vec<u32>> {
        self.message_format.calls.filter(|_| !message.tool_calls.is_empty())?;
        let question = Message::user("Hi");
        let before = self.render_text(std::slice::from_ref(&question), &[], true, guard).ok()?;
        let text = self.render_text(&[question, message.clone()], &[], false, guard).ok()?;
        let mut ids = self.tokenizer.encode_guarded(text.strip_prefix(&before)?, Some(guard));
        let end = ids.iter().position(|id| self.stop_ids.contains(id))?;
        ids.truncate(end + 1);
        let completion = self.decode_completion(&ids);
        let parsed = self.parse(&completion, false, &[]);
        let names =
            parsed.calls.iter().map(|call| call.as_ref().ok().map(|call| call.name.as_str()));
        let same_calls = names.eq(message.tool_calls.iter().map(|call| Some(call.name.as_str())));
        let reasoning = message.reasoning_content.as_deref().unwrap_or_default();
        let same_text = parsed.content == message.content.trim()
            && self.reasoning(&completion, false) == reasoning.trim();
        (same_calls && same_text).then_some(ids)
    }

    /// Decodes the token ids of a completion. Special tokens of reasoning and call tags appear
    /// under their names; other special tokens are omitted.
    pub fn decode_completion(&self, completion_ids: &[u32]) -> String {
        self.tokenizer.decode_keeping(completion_ids, &self.tag_ids)
    }

    /// Returns the bytes that one completion token contributes to
    /// [`decode_completion`](Self::decode_completion).
    pub(crate) fn completion_bytes(&self, id: u32) -> &[u8] {
        self.tokenizer.bytes_keeping(id, &self.tag_ids)
    }

    pub(crate) fn tags(&self) -> &TagTables {
        &self.tags
    }

    fn parse_events(
        &self,
        completion: &str,
        in_reasoning: bool,
        tools: &[ToolSpec],
    ) -> (Vec<ParserEvent>, bool) {
        CompletionParser::parse_complete(&self.tags, completion, in_reasoning, tools)
    }

    /// Parses the content and the tool calls of a completion, without its reasoning. `in_reasoning`
    /// is whether the prompt has already opened the reasoning.
    pub fn parse(
        &self,
        completion: &str,
        in_reasoning: bool,
        tools: &[ToolSpec],
    ) -> ParsedCompletion {
        let parsed =
            ParsedCompletion::from_events(self.parse_events(completion, in_reasoning, tools).0);
        let is_bare = self.bare_calls && parsed.calls.is_empty();
        is_bare.then(|| bare::find_bare_calls(&parsed.content, tools)).flatten().unwrap_or(parsed)
    }

    /// Returns whether a JSON object that names a tool counts as a tool call even without tags.
    pub fn reads_bare_calls(&self) -> bool {
        self.bare_calls
    }

    /// Returns the reasoning of a completion without its tags. Each stretch of reasoning is
    /// trimmed, and line breaks join the stretches. `in_reasoning` is whether the prompt has
    /// already opened the reasoning.
    pub fn reasoning(&self, completion: &str, in_reasoning: bool) -> String {
        collect_reasoning(&self.parse_events(completion, in_reasoning, &[]).0)
    }

    /// Describes for a human reader why no tool returned a result for a tool call in this
    /// completion.
    pub fn why_no_call(&self, completion: &str, in_reasoning: bool, tools: &[ToolSpec]) -> String {
        let (found, unclosed) = self.parse_events(completion, in_reasoning, tools);
        let sign = self.tags.syntax.syntax_tags().sign;
        let hidden = found.iter().any(|found| match found {
            ParserEvent::Text(SpanKind::Reasoning, text) => text.contains(sign),
            found => *found == ParserEvent::Late,
        });
        let parsed = self.parse(completion, in_reasoning, tools);
        match parsed.calls.first() {
            Some(Err(malformed)) => return malformed.to_string(),
            Some(Ok(call)) if tools.iter().all(|tool| tool.name != call.name) => {
                return format!("the completion calls {:?}, which is not a tool", call.name);
            }
            Some(Ok(call)) => {
                return format!("the completion calls {:?}, which returned no result", call.name);
            }
            None if unclosed => {
                return "the reasoning is never closed, and calls inside reasoning are ignored"
                    .into();
            }
            None => {}
        }
        if hidden && collect_reasoning(&found).contains(sign) {
            "the call is inside the reasoning, and calls inside reasoning are ignored".into()
        } else if bare::find_bare_calls(&parsed.content, tools).is_some() {
            format!(
                "the completion contains a call without {sign}; set agent.bare_calls = true to parse \
                 such calls"
            )
        } else {
            format!("the completion does not contain {sign}")
        }
    }

    /// Counts the instruction messages that the template prints in another position or role than
    /// they have in `messages`. `opens` is whether the messages start a conversation rather than
    /// follow an assistant message.
    pub fn count_shifted_systems(&self, messages: &[Message], opens: bool) -> ShiftedSystems {
        self.message_format.systems.count_shifted(messages, opens)
    }

    /// Merges late instruction messages into the first message. Returns `None` if the chat does not
    /// merge late instructions, or if `messages` has no late instructions.
    pub fn merge_systems(&self, messages: &[Message]) -> Option<Vec<Message>> {
        let systems = &self.message_format.systems;
        let merges = systems.unprinted == LateSystem::Merge
            && systems.count_shifted(messages, true).moved > 0;
        merges.then(|| systems.arrange(messages).into_owned())
    }

    pub(crate) fn reasoning_tags(&self) -> &ReasoningTagSet {
        &self.reasoning_tags
    }

    pub(crate) fn end_of_turn(&self) -> u32 {
        self.end_of_turn
    }

    /// Returns the format in which the chat template takes tool calls, or `None` if the template
    /// does not print calls itself.
    pub(crate) fn call_message_format(&self) -> Option<CallMessageFormat> {
        self.message_format.calls
    }

    fn make_preparation(&self, guard: char) -> Preparation<'_> {
        Preparation {
            tokenizer: &self.tokenizer,
            tags: &self.tags,
            tool_support: self.tool_support,
            tool_role: self.tool_role,
            message_format: &self.message_format,
            tool_prompt: self.tool_prompt,
            guard,
        }
    }

    fn prepare_prompt(
        &self,
        messages: &[Message],
        tools: &[ToolSpec],
        guard: char,
    ) -> Result<PreparedPrompt, TextError> {
        match &self.unwritable {
            Some(error) if !tools.is_empty() => Err(error.clone()),
            _ => self.make_preparation(guard).prepare(messages, tools),
        }
    }

    /// Returns `N` private-use characters that occur neither in the chat template nor in the
    /// messages and tools.
    pub(crate) fn find_unused_characters<const N: usize>(
        &self,
        messages: &[Message],
        tools: &[ToolSpec],
    ) -> Result<[char; N], TextError> {
        let serialized =
            serde_json::to_string(&(messages, tools, &self.variables)).map_err(|error| {
                TextError::Template(format!("the messages cannot be serialized: {error}"))
            })?;
        let used: BTreeSet<char> = serialized
            .chars()
            .chain(self.template.source().chars())
            .filter(|&c| c >= '\u{E000}')
            .collect();
        let candidates = ('\u{E000}'..='\u{F8FF}').chain('\u{F0000}'..='\u{FFFFD}');
        let free: Vec<char> = candidates.filter(|c| !used.contains(c)).take(N).collect();
        free.try_into().map_err(|_| {
            TextError::Template(
                "the messages use every private-use character, but some must be unused".into(),
            )
        })
    }

    pub(crate) fn render(
        &self,
        messages: &[Value],
        tools: Option<&[Value]>,
        add_generation_prompt: bool,
        guard: Option<char>,
    ) -> Result<String, TextError> {
        let variables = &self.variables;
        self.template.render_guarded(
            TemplateInput { messages, tools, add_generation_prompt, variables },
            guard,
        )
    }
}
