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
use std::sync::Arc;

use dressage_model::{ModelFiles, SpecialTokens};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::calls::{CallFormat, Parsed, RESPONSE};
use crate::describe::ToolPrompt;
use crate::prepare::{MessageForm, Preparation, Prepared};
use crate::reader::{Found, Part, Reader, Tags, thought_of};
use crate::template::Rendering;
use crate::thought::{REASONING, Thoughts};
use crate::{ChatTemplate, Message, ReplyStream, Role, TextError, Tokenizer, ToolCall, ToolSpec, bare};

/// How a model is told of tools and calls them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolProtocol {
    /// Decides by the chat template; where the template knows no tools, [`Hermes`](Self::Hermes).
    #[default]
    Auto,
    /// A section of the system prompt, whatever the template knows, and calls as JSON between `<tool_call>`
    /// tags.
    Hermes,
}

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
    tokenizer: Tokenizer,
    template: ChatTemplate,
    tool_prompt: ToolPrompt,
    bare_calls: bool,
    variables: Map<String, Value>,
    tool_support: ToolSupport,
    format: CallFormat,
    /// Whether the template prints messages of role `tool`.
    tool_role: bool,
    form: MessageForm,
    /// Text that the template prints between the generation prompt and an assistant's text: white space,
    /// mostly nothing.
    opening: String,
    /// Text that it prints after the reply, up to and with the token that ends the turn.
    closing: String,
    /// The tags of the model's thoughts.
    thoughts: Thoughts,
    /// These tags, and those of its calls.
    tags: Tags,
    /// Special tokens that are part of what a reply says: tags of thoughts and calls.
    said: Vec<u32>,
    /// Why calls cannot be written in these tokens, where they cannot.
    unwritable: Option<TextError>,
    end_of_turn: u32,
    stop_ids: Vec<u32>,
}

/// Ways of a template with tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ToolSupport {
    /// Prints them and asks for calls in a format that is understood.
    Native,
    /// Prints them and asks for calls in another format.
    Foreign,
    /// Ignores them, or is to be kept from printing them.
    None,
}

const PROBE_TOOL: &str = "dressage_probe_tool";
const PROBE_TEXT: &str = "DressageProbeText";
const PROBE_THOUGHT: &str = "DressageProbeThought";

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
        chat.probe_turn()?;
        chat.tool_role = chat.prints_later(Role::Tool);
        if options.tools == ToolProtocol::Auto {
            chat.tool_support = chat.probe_tools();
        }
        chat.thoughts = Thoughts::find(&chat.template, &chat.tokenizer, &chat.variables);
        let ends: Vec<String> = chat.stop_ids.iter().map(|&id| chat.tokenizer.token_text(id)).collect();
        chat.thoughts.remove(&ends);
        chat.form.tags = chat.thoughts.preferred(&chat.template, &chat.tokenizer).cloned();
        chat.tags = Tags::new(&chat.thoughts, chat.format.syntax());
        chat.said = chat.tags_of_replies();
        chat.unwritable = chat.probe_call().err();
        Ok(chat)
    }

    /// Finds out how the template takes what messages say. One that prints no texts, but parts, is given
    /// parts.
    fn probe_messages(&mut self) -> MessageForm {
        let parts = json!([{ "type": "text", "text": PROBE_TEXT }]);
        let (text, listed) = (self.print_of("content", PROBE_TEXT.into()), self.print_of("content", parts));
        let prints = |text: &Option<String>| text.as_ref().is_some_and(|text| text.contains(PROBE_TEXT));
        self.template.lists = !prints(&text) && prints(&listed);
        let knows_developer = self.template.source().contains("developer")
            && prints(&self.print_of("role", Role::Developer.as_str().into()));
        let thought: Value = PROBE_THOUGHT.into();
        let reads = |field: &&str| {
            self.print_of(field, thought.clone()).is_some_and(|text| text.contains(PROBE_THOUGHT))
        };
        MessageForm {
            parts: self.template.lists || (prints(&text) && text == listed),
            reasoning: REASONING.into_iter().find(reads),
            tags: None,
            developer: knows_developer,
        }
    }

    /// The print of a short conversation, with `value` in the field `name` of its user's message, or of its
    /// assistant's where it has to do with reasoning.
    fn print_of(&self, name: &str, value: Value) -> Option<String> {
        let mut user = json!({ "role": "user", "content": PROBE_TEXT });
        let mut reply = json!({ "role": "assistant", "content": PROBE_TEXT });
        if REASONING.contains(&name) {
            reply[name] = value;
            return self.render(&[user, reply], None, false, None).ok();
        }
        user[name] = value;
        let question = json!({ "role": "user", "content": "Hi" });
        let messages = if name == "role" { vec![user, question] } else { vec![user] };
        self.render(&messages, None, true, None).ok()
    }

    /// Finds what the template prints around an assistant's text.
    fn probe_turn(&mut self) -> Result<(), TextError> {
        let question = json!({ "role": "user", "content": "Hi" });
        let reply = json!({ "role": "assistant", "content": PROBE_TEXT });
        let before = self.render(std::slice::from_ref(&question), None, true, None)?;
        let after = self.render(&[question.clone(), reply, question], None, true, None)?;
        let no_turn = || TextError::NoTurn { found: excerpt(&after) };
        let (until, rest) = after.rsplit_once(PROBE_TEXT).ok_or_else(no_turn)?;
        // Where the prompt prints more than the history keeps (an empty thought, say), a reply starts right
        // after it.
        let opening = until.strip_prefix(&before).unwrap_or_default();
        let blank = rest.len() - rest.trim_start().len();
        let Some((id, len)) = self.tokenizer.leading_special(&rest[blank..]) else {
            return Err(TextError::NoEndOfTurn { found: excerpt(rest) });
        };
        self.opening = opening.to_string();
        self.closing = rest[..blank + len].to_string();
        self.end_of_turn = id;
        self.stop_ids = vec![id];
        self.stop_ids.extend(self.tokenizer.eos().iter().filter(|&&eos| eos != id));
        Ok(())
    }

    /// Whether the template prints what this role says after a reply, and behind it.
    pub(crate) fn prints_later(&self, role: Role) -> bool {
        const REPLY: &str = "DressageProbeReply";
        let messages = [
            json!({ "role": "user", "content": "Hi" }),
            json!({ "role": "assistant", "content": REPLY }),
            json!({ "role": role.as_str(), "content": PROBE_TEXT }),
        ];
        let text = self.render(&messages, None, true, None);
        text.is_ok_and(|text| text.rsplit_once(REPLY).is_some_and(|(_, after)| after.contains(PROBE_TEXT)))
    }

    /// Special tokens that are part of the tags of thoughts and calls, or hold one. The one that ends a turn
    /// says nothing.
    fn tags_of_replies(&self) -> Vec<u32> {
        let thoughts = self.thoughts.pairs().iter().flat_map(|tags| [tags.open.as_str(), &tags.close]);
        let calls = self.format.syntax().tags().iter().copied();
        let tags: Vec<&str> = thoughts.chain(calls).chain(RESPONSE).collect();
        let is_tag = |text: &str| tags.iter().any(|tag| tag.contains(text) || text.contains(tag));
        let specials = self.tokenizer.specials().filter(|(id, text)| is_tag(text) && *id != self.end_of_turn);
        specials.map(|(id, _)| id).collect()
    }

    /// Finds what keeps a call from being written and read back.
    fn probe_call(&self) -> Result<(), TextError> {
        let call = ToolCall { id: "call_0".into(), name: PROBE_TOOL.into(), arguments: Map::new() };
        let mut ids = self.assistant(&Message::calls("", vec![call.clone()]), None)?;
        ids.pop();
        let name = |id: &u32| self.tokenizer.token_text(*id);
        let last = ids.len().saturating_sub(1);
        if let Some(id) = ids[..last].iter().find(|&id| self.stop_ids.contains(id)) {
            let why = "ends a reply, so a call would be cut there".into();
            return Err(TextError::CallToken { token: name(id), why });
        }
        if self.parse(&self.said(&ids), false, &[]).calls == [Ok(call)] {
            return Ok(());
        }
        let foreign = ids.iter().find(|&id| self.tokenizer.is_special(*id) && !self.said.contains(id));
        let sign = self.tags.syntax.sign();
        let token = foreign.or(ids.first()).map_or_else(|| sign.into(), name);
        let why = format!("is part of how a call ({sign}…) is written, and leaves no text behind");
        Err(TextError::CallToken { token, why })
    }

    fn probe_tools(&self) -> ToolSupport {
        let messages =
            [json!({ "role": "system", "content": "Help." }), json!({ "role": "user", "content": "Hi" })];
        let tool = ToolSpec {
            name: PROBE_TOOL.into(),
            description: "Probes.".into(),
            parameters: json!({ "type": "object", "properties": {}, "required": [] }),
        };
        match self.render(&messages, Some(&[tool.to_openai()]), true, None) {
            // Others use the same tags around a syntax of their own, so the JSON key must be asked for, too.
            Ok(text) if text.contains(PROBE_TOOL) => {
                let is_hermes = text.contains("<tool_call>") && text.contains("\"arguments\"");
                if is_hermes { ToolSupport::Native } else { ToolSupport::Foreign }
            }
            _ => ToolSupport::None,
        }
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The template.
    pub fn template(&self) -> &ChatTemplate {
        &self.template
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
        let [guard] = self.free_characters(messages, tools)?;
        let text = self.print(messages, tools, true, guard)?;
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
        Ok(self.tokenizer.encode_guarded(&format!("{said}{}", self.closing), Some(guard)))
    }

    /// The text of a reply, the tags of its thoughts and calls by their names where they are special tokens.
    pub fn said(&self, reply: &[u32]) -> String {
        self.tokenizer.decode_keeping(reply, &self.said)
    }

    /// A reply as it arrives, taken apart. `in_thought` says that the prompt has begun a thought.
    pub fn stream(self: &Arc<Self>, in_thought: bool, tools: Arc<[ToolSpec]>) -> ReplyStream {
        ReplyStream::new(self.clone(), tools, in_thought)
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

    /// The thoughts of a reply without their tags: each trimmed, joined by line breaks. `in_thought` says that
    /// the prompt has begun one.
    pub fn thought(&self, said: &str, in_thought: bool) -> String {
        thought_of(self.read(said, in_thought, &[]).0)
    }

    /// Why no tool answered a call in a reply, in words for whoever looks at it.
    pub fn why_no_call(&self, said: &str, in_thought: bool, tools: &[ToolSpec]) -> String {
        let (found, unclosed) = self.read(said, in_thought, tools);
        let sign = self.tags.syntax.sign();
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
        if hidden && thought_of(found).contains(sign) {
            "its call stands inside a thought, and calls are looked for outside of thoughts".into()
        } else if bare::find(&parsed.content, tools).is_some() {
            format!("it holds a call without {sign}; agent.bare_calls = true reads such calls")
        } else {
            format!("it has no {sign} in it")
        }
    }

    pub(crate) fn thoughts(&self) -> &Thoughts {
        &self.thoughts
    }

    pub(crate) fn end_of_turn(&self) -> u32 {
        self.end_of_turn
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

    fn render(
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

/// The first characters of a text, for a message.
pub(crate) fn excerpt(text: &str) -> String {
    const LENGTH: usize = 60;
    match text.char_indices().nth(LENGTH) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_string(),
    }
}
