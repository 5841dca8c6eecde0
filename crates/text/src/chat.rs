//! Conversations as tokens: prompts, demonstrations, and what a reply means. What comes between turns is in
//! `continuation.rs`.
//!
//! Guarantees:
//! - Text from messages and tools never becomes a special token. Only the template's own text does, and the
//!   tags around an assistant's thoughts and calls, for models that write them as special tokens.
//! - [`Chat::assistant`] gives a demonstrated turn as it would be sampled: the text alone, encoded by itself,
//!   then the token that ends a turn.
//! - Calls and answers are looked for outside of thoughts: a thought that is never closed reaches to the end,
//!   and one that is closed without having been opened began with the reply.
//!
//! How text is kept apart: strings from outside are printed with a *guard*, a private-use character that
//! occurs nowhere else, wherever a special token could begin in them. The tokenizer finds special tokens
//! around the guards and drops them before it encodes, so the text itself is encoded as if they had never
//! been there.

use std::collections::BTreeSet;

use levade_model::{ModelFiles, SpecialTokens};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::calls::{CallFormat, Parsed, RESPONSE, Syntax};
use crate::describe::ToolPrompt;
use crate::prepare::{CallForm, MessageForm, Preparation, Prepared};
use crate::protocol::ToolSupport;
use crate::reader::{Found, Part, Reader, Tags, thought_of};
use crate::systems::{LateSystem, ShiftedSystems};
use crate::template::Rendering;
use crate::thought::Thoughts;
use crate::{ChatTemplate, Message, Role, TextError, Tokenizer, ToolProtocol, ToolSpec, bare};

/// Choices that the model leaves open.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ChatOptions {
    /// How tools are called.
    pub tools: ToolProtocol,
    /// How tools are described, where the template does not do it.
    pub tool_prompt: ToolPrompt,
    /// Whether a JSON object that names a tool is a call also without tags.
    pub bare_calls: bool,
    /// What becomes of a late system message that the template does not print.
    pub late_system: LateSystem,
    /// Further variables of the template, such as `enable_thinking = false`.
    pub variables: Map<String, Value>,
    /// The moment that the template calls now, in seconds since 1970; where it is not given, that of the
    /// clock when the chat is made. Part of a run's record, not of what people write down.
    #[serde(skip)]
    pub now: Option<u64>,
}

/// A tokenizer, a chat template and a tool protocol that belong together.
#[derive(Debug, Clone)]
pub struct Chat {
    pub(crate) tokenizer: Tokenizer,
    pub(crate) template: ChatTemplate,
    tool_prompt: ToolPrompt,
    bare_calls: bool,
    variables: Map<String, Value>,
    pub(crate) tool_support: ToolSupport,
    pub(crate) format: CallFormat,
    /// Whether the template prints messages of role `tool`.
    tool_role: bool,
    pub(crate) form: MessageForm,
    /// Text that the template prints between the generation prompt and an assistant's text: white space,
    /// mostly nothing.
    pub(crate) opening: String,
    /// Text that it prints after the reply, up to and with the token that ends the turn.
    pub(crate) closing: String,
    /// The tags of the model's thoughts.
    thoughts: Thoughts,
    /// These tags, and those of its calls.
    tags: Tags,
    /// Special tokens that are part of what a reply says: tags of thoughts and calls.
    pub(crate) said: Vec<u32>,
    /// Why calls cannot be written in these tokens, where they cannot.
    unwritable: Option<TextError>,
    pub(crate) end_of_turn: u32,
    pub(crate) stop_ids: Vec<u32>,
}

impl ChatOptions {
    /// Adds the model's special tokens as variables by their names, where none has that name.
    pub(crate) fn with_names(mut self, special: &SpecialTokens) -> Self {
        for (name, text) in special.by_name().filter(|(name, _)| !ENDS.contains(name)) {
            self.variables.entry(name).or_insert_with(|| text.into());
        }
        self
    }
}

/// Names in templates of the tokens that begin and end a text; the tokenizer knows them.
const ENDS: [&str; 2] = ["bos_token", "eos_token"];

impl Chat {
    /// The chat of a model on disk, with `template` in place of its own where one is given.
    ///
    /// # Errors
    /// When the model has no tokenizer, and what [`Tokenizer::new`] and [`Chat::new`] say.
    pub fn open(model: &ModelFiles, template: Option<&str>, options: ChatOptions) -> Result<Self, TextError> {
        let source = model.tokenizer.as_ref().ok_or_else(|| {
            TextError::Tokenizer(format!(
                "{} has no tokenizer.json; put the one that the model was trained with there",
                model.path().display()
            ))
        })?;
        let (special, config) = (&model.special_tokens, &model.config);
        let tokenizer = Tokenizer::new(source)?.with_named_ends(special, config.bos, &config.eos);
        let options = options.with_names(special);
        Self::new(tokenizer, template.or(model.chat_template.as_deref()), options)
    }

    /// Joins a tokenizer with the template of its model; `"chatml"` stands for plain ChatML.
    ///
    /// # Errors
    /// When there is no template, when it does not parse or fails on an ordinary conversation, or when no
    /// special token of the tokenizer ends an assistant turn in it.
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
        for (name, id) in ENDS.into_iter().zip([tokenizer.bos(), tokenizer.eos().first().copied()]) {
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
            form: MessageForm::default(),
            opening: String::new(),
            closing: String::new(),
            thoughts: Thoughts::default(),
            tags: Tags::new(&Thoughts::default(), CallFormat::default().syntax()),
            said: Vec::new(),
            unwritable: None,
            end_of_turn: 0,
            stop_ids: Vec::new(),
        };
        chat.form = chat.probe_messages();
        chat.form.systems = chat.probe_systems(options.late_system);
        chat.probe_turn()?;
        chat.probe_format(options.tools);
        let syntax = chat.format.syntax();
        chat.stop_ids = chat.stops(syntax);
        chat.tool_role = chat.prints_later(Role::Tool);
        chat.thoughts = match syntax.spelling().thought_tags {
            // Then the header of what is said is part of what is written.
            Some(tags) => {
                chat.opening.clear();
                chat.form.tight = true;
                Thoughts::only(tags)
            }
            None => Thoughts::find(&chat.template, &chat.tokenizer, &chat.variables),
        };
        let ends: Vec<String> = chat.stop_ids.iter().map(|&id| chat.tokenizer.token_text(id)).collect();
        chat.thoughts.remove(&ends);
        chat.form.tags = chat.thoughts.preferred(&chat.template, &chat.tokenizer).cloned();
        chat.tags = Tags::new(&chat.thoughts, syntax);
        chat.said = chat.tags_of_replies();
        chat.unwritable = chat.probe_call().err();
        chat.probe_unreadable();
        Ok(chat)
    }

    /// Tokens that end a reply: the template's first, then those that end a text or a call.
    fn stops(&self, syntax: &dyn Syntax) -> Vec<u32> {
        let special = |texts: &[&str]| -> Vec<u32> {
            texts.iter().filter_map(|text| self.tokenizer.special(text)).collect()
        };
        let goes_on = special(syntax.spelling().goes_on);
        let mut stops: Vec<u32> = Vec::new();
        let all = [self.end_of_turn].into_iter().chain(self.tokenizer.eos().iter().copied());
        for id in all.chain(special(syntax.spelling().stops)) {
            if !goes_on.contains(&id) && !stops.contains(&id) {
                stops.push(id);
            }
        }
        // A tokenizer without the tokens of its format: its turns end as they are printed.
        if stops.is_empty() { vec![self.end_of_turn] } else { stops }
    }

    /// Special tokens that are part of the tags of thoughts and calls, or hold one. The one that ends a turn
    /// says nothing.
    fn tags_of_replies(&self) -> Vec<u32> {
        let thoughts = self.thoughts.pairs().iter().flat_map(|tags| [tags.open.as_str(), &tags.close]);
        let calls = self.format.syntax().spelling().tags.iter().copied();
        let tags: Vec<&str> = thoughts.chain(calls).chain(RESPONSE).collect();
        let is_tag = |text: &str| tags.iter().any(|tag| tag.contains(text) || text.contains(tag));
        let ends = |id: u32, text: &str| {
            id == self.end_of_turn && !self.format.syntax().spelling().goes_on.contains(&text)
        };
        let specials = self.tokenizer.specials().filter(|(id, text)| is_tag(text) && !ends(*id, text));
        specials.map(|(id, _)| id).collect()
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The template.
    pub fn template(&self) -> &ChatTemplate {
        &self.template
    }

    /// Variables that the template has besides messages and tools.
    pub fn variables(&self) -> &Map<String, Value> {
        &self.variables
    }

    /// Tokens that end a turn: the template's first, then those that end a text.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// The tokens before a reply: the messages, and the beginning of the assistant's turn.
    ///
    /// # Errors
    /// What the template raises, or tools in a format that is not understood.
    pub fn prompt(&self, messages: &[Message], tools: &[ToolSpec]) -> Result<Vec<u32>, TextError> {
        self.prompt_within(messages, tools, usize::MAX)
    }

    /// Like [`prompt`](Self::prompt), but rejects a text whose bytes show that it has more than `max_tokens`
    /// tokens, before it is tokenized.
    ///
    /// # Errors
    /// Returns [`TextError::TooLong`] for such a text, and the errors of [`prompt`](Self::prompt).
    pub fn prompt_within(
        &self,
        messages: &[Message],
        tools: &[ToolSpec],
        max_tokens: usize,
    ) -> Result<Vec<u32>, TextError> {
        let [guard] = self.free_characters(messages, tools)?;
        let text = self.print(messages, tools, true, guard)?;
        self.tokenizer.check_length(&text, max_tokens)?;
        Ok(self.tokenizer.encode_guarded(&text, Some(guard)))
    }

    /// The text of a conversation, up to the beginning of a reply where one is to follow.
    pub(crate) fn print(
        &self,
        messages: &[Message],
        tools: &[ToolSpec],
        add_generation_prompt: bool,
        guard: char,
    ) -> Result<String, TextError> {
        let Prepared { messages, tools } = self.prepare(messages, tools, guard)?;
        self.render(&messages, tools.as_deref(), add_generation_prompt, Some(guard))
    }

    /// The tokens of a turn that somebody else wrote for the model, as the model would sample them after a
    /// prompt: its text and calls, and the token that ends the turn. Where the prompt has begun a thought
    /// ([`opened_thought`](Self::opened_thought)), a turn that thinks goes on with it, and one that does not
    /// closes it first.
    ///
    /// # Errors
    /// When every private-use character occurs in the text.
    pub fn assistant(&self, message: &Message, opened: Option<&str>) -> Result<Vec<u32>, TextError> {
        let [guard] = self.free_characters(std::slice::from_ref(message), &[])?;
        if let Some(ids) = self.printed_turn(message, guard) {
            return Ok(ids);
        }
        let preparation = self.preparation(guard);
        let message = &*self.form.written_out(message);
        let close = opened.or_else(|| self.thoughts.closed_in(&self.opening));
        let said = match close.filter(|close| message.content.contains(close)) {
            // It brings a thought of its own, of which the prompt may have written the first tag.
            Some(close) if opened.is_some() => {
                let content = self.thoughts.without_open(&message.content, close).into();
                preparation.written(&Message { content, ..message.clone() }, true)
            }
            Some(_) => preparation.written(message, false),
            None => {
                let opening = match opened {
                    Some(close) if !self.opening.contains(close) => format!("\n{close}\n\n"),
                    _ => self.opening.clone(),
                };
                format!("{opening}{}", preparation.written(message, false))
            }
        };
        let end = self.tags.syntax.end(!message.tool_calls.is_empty());
        let closing = end.filter(|end| self.tokenizer.special(end).is_some()).unwrap_or(&self.closing);
        Ok(self.tokenizer.encode_guarded(&format!("{said}{closing}"), Some(guard)))
    }

    /// The tokens of a turn that calls tools as the template prints it, where it prints it as it would be
    /// sampled after the beginning of a reply.
    fn printed_turn(&self, message: &Message, guard: char) -> Option<Vec<u32>> {
        self.form.calls.filter(|_| !message.tool_calls.is_empty())?;
        let question = Message::user("Hi");
        let before = self.print(std::slice::from_ref(&question), &[], true, guard).ok()?;
        let text = self.print(&[question, message.clone()], &[], false, guard).ok()?;
        let mut ids = self.tokenizer.encode_guarded(text.strip_prefix(&before)?, Some(guard));
        let end = ids.iter().position(|id| self.stop_ids.contains(id))?;
        ids.truncate(end + 1);
        let said = self.said(&ids);
        let parsed = self.parse(&said, false, &[]);
        let names = parsed.calls.iter().map(|call| call.as_ref().ok().map(|call| call.name.as_str()));
        let same_calls = names.eq(message.tool_calls.iter().map(|call| Some(call.name.as_str())));
        let thought = message.reasoning_content.as_deref().unwrap_or_default();
        let same_text =
            parsed.content == message.content.trim() && self.thought(&said, false) == thought.trim();
        (same_calls && same_text).then_some(ids)
    }

    /// The text of a reply, the tags of its thoughts and calls by their names where they are special tokens.
    pub fn said(&self, reply: &[u32]) -> String {
        self.tokenizer.decode_keeping(reply, &self.said)
    }

    /// The text of one token of a reply, as bytes.
    pub(crate) fn bytes_said(&self, id: u32) -> &[u8] {
        self.tokenizer.bytes_keeping(id, &self.said)
    }

    pub(crate) fn tags(&self) -> &Tags {
        &self.tags
    }

    fn read(&self, said: &str, in_thought: bool, tools: &[ToolSpec]) -> (Vec<Found>, bool) {
        Reader::read(&self.tags, said, in_thought, tools)
    }

    /// The content of a reply and the tools that it calls, without its thoughts. `in_thought` says that the
    /// prompt has begun one.
    pub fn parse(&self, said: &str, in_thought: bool, tools: &[ToolSpec]) -> Parsed {
        let parsed = Parsed::of(self.read(said, in_thought, tools).0);
        let is_bare = self.bare_calls && parsed.calls.is_empty();
        is_bare.then(|| bare::find(&parsed.content, tools)).flatten().unwrap_or(parsed)
    }

    /// Whether a JSON object that names a tool is a call also without tags.
    pub fn reads_bare_calls(&self) -> bool {
        self.bare_calls
    }

    /// The thoughts of a reply without their tags: each trimmed, joined by line breaks. `in_thought` says
    /// that the prompt has begun one.
    pub fn thought(&self, said: &str, in_thought: bool) -> String {
        thought_of(&self.read(said, in_thought, &[]).0)
    }

    /// Why no tool answered a call in a reply, in words for whoever looks at it.
    pub fn why_no_call(&self, said: &str, in_thought: bool, tools: &[ToolSpec]) -> String {
        let (found, unclosed) = self.read(said, in_thought, tools);
        let sign = self.tags.syntax.spelling().sign;
        let is_hidden =
            |found: &Found| matches!(found, Found::Text(Part::Thought, text) if text.contains(sign));
        let hidden = found.iter().any(is_hidden) || found.contains(&Found::Late);
        let parsed = self.parse(said, in_thought, tools);
        match parsed.calls.first() {
            Some(Err(malformed)) => return malformed.to_string(),
            Some(Ok(call)) if tools.iter().all(|tool| tool.name != call.name) => {
                return format!("it calls {:?}, which is no tool", call.name);
            }
            Some(Ok(call)) => return format!("it calls {:?}, which gave no answer", call.name),
            None if unclosed => {
                return "its thought is never closed, and calls are looked for outside of thoughts".into();
            }
            None => {}
        }
        if hidden && thought_of(&found).contains(sign) {
            "its call stands inside a thought, and calls are looked for outside of thoughts".into()
        } else if bare::find(&parsed.content, tools).is_some() {
            format!("it holds a call without {sign}; agent.bare_calls = true reads such calls")
        } else {
            format!("it has no {sign} in it")
        }
    }

    /// Counts the messages of instructions that are printed elsewhere than as they came. `opens` says that
    /// the messages begin a conversation, and do not follow a reply.
    pub fn shifted_systems(&self, messages: &[Message], opens: bool) -> ShiftedSystems {
        self.form.systems.shifted(messages, opens)
    }

    /// Returns the messages with late instructions in the first one, if they are to be merged and there are
    /// any.
    pub fn merged_systems(&self, messages: &[Message]) -> Option<Vec<Message>> {
        let systems = &self.form.systems;
        let merges = systems.unprinted == LateSystem::Merge && systems.shifted(messages, true).moved > 0;
        merges.then(|| systems.arranged(messages).into_owned())
    }

    pub(crate) fn thoughts(&self) -> &Thoughts {
        &self.thoughts
    }

    pub(crate) fn end_of_turn(&self) -> u32 {
        self.end_of_turn
    }

    /// The form in which the template takes calls, where it prints them itself.
    pub(crate) fn takes_calls(&self) -> Option<CallForm> {
        self.form.calls
    }

    fn preparation(&self, guard: char) -> Preparation<'_> {
        Preparation {
            tokenizer: &self.tokenizer,
            tags: &self.tags,
            tool_support: self.tool_support,
            tool_role: self.tool_role,
            form: &self.form,
            tool_prompt: self.tool_prompt,
            guard,
        }
    }

    fn prepare(&self, messages: &[Message], tools: &[ToolSpec], guard: char) -> Result<Prepared, TextError> {
        match &self.unwritable {
            Some(error) if !tools.is_empty() => Err(error.clone()),
            _ => self.preparation(guard).run(messages, tools),
        }
    }

    /// Private-use characters that nothing to be rendered contains.
    pub(crate) fn free_characters<const N: usize>(
        &self,
        messages: &[Message],
        tools: &[ToolSpec],
    ) -> Result<[char; N], TextError> {
        let given = serde_json::to_string(&(messages, tools, &self.variables))
            .map_err(|error| TextError::Template(format!("the messages cannot be given to it: {error}")))?;
        let used: BTreeSet<char> =
            given.chars().chain(self.template.source().chars()).filter(|&c| c >= '\u{E000}').collect();
        let candidates = ('\u{E000}'..='\u{F8FF}').chain('\u{F0000}'..='\u{FFFFD}');
        let free: Vec<char> = candidates.filter(|c| !used.contains(c)).take(N).collect();
        free.try_into().map_err(|_| {
            TextError::Template("the messages use every private-use character, but some must be free".into())
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
        self.template.render_guarded(Rendering { messages, tools, add_generation_prompt, variables }, guard)
    }
}
