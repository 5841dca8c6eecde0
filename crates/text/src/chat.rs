//! Conversations as tokens: prompts, the boundaries between turns, demonstrations, and what a reply means.
//!
//! Guarantees:
//! - Text from messages and tools never becomes a special token; only the template's own text does.
//! - A sampled turn is never tokenised again: [`Chat::continuation`] returns only what follows it, and refuses where the
//!   template would now print the conversation before it, or the turn itself, in another way (white space apart).
//! - [`Chat::assistant`] gives a demonstrated turn as it would be sampled: the text alone, encoded by itself, then the
//!   token that ends a turn.
//!
//! How text is kept apart: strings from outside are printed with a *guard*, a private-use character that occurs nowhere
//! else, wherever a special token could begin in them. The tokenizer finds special tokens around the guards and drops
//! them before it encodes, so the text itself is encoded as if they had never been there.

use std::collections::BTreeSet;

use dressage_model::{ModelFiles, SpecialTokens};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::hermes::{self, Parsed, ToolPrompt};
use crate::prepare::{Preparation, Prepared};
use crate::template::Rendering;
use crate::{ChatTemplate, Message, TextError, Tokenizer, ToolCall, ToolSpec};

/// How a model is told of tools and calls them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolProtocol {
    /// As the chat template has it; where the template knows no tools, [`Hermes`](Self::Hermes).
    #[default]
    Auto,
    /// A section of the system prompt, whatever the template knows, and calls as JSON between `<tool_call>` tags.
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
    /// Further variables of the template, such as `enable_thinking = false`.
    pub variables: Map<String, Value>,
    /// The moment that the template calls now, in seconds since 1970; where it is not given, that of the clock
    /// when the chat is made. Part of a run's record, not of what people write down.
    #[serde(skip)]
    pub now: Option<u64>,
}

/// A tokenizer, a chat template and a tool protocol that belong together.
#[derive(Debug, Clone)]
pub struct Chat {
    tokenizer: Tokenizer,
    template: ChatTemplate,
    tool_prompt: ToolPrompt,
    variables: Map<String, Value>,
    tool_support: ToolSupport,
    /// Whether the template prints messages of role `tool`.
    tool_role: bool,
    /// What the template prints between the generation prompt and an assistant's text: white space, mostly nothing.
    opening: String,
    /// What it prints after the text, up to and with the token that ends the turn.
    closing: String,
    end_of_turn: u32,
    stop_ids: Vec<u32>,
}

/// What the template does with tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ToolSupport {
    /// It prints them and asks for Hermes calls.
    Hermes,
    /// It prints them and asks for calls in another format.
    Foreign,
    /// It ignores them, or is to be kept from printing them.
    None,
}

const PROBE_TOOL: &str = "dressage_probe_tool";
const PROBE_TEXT: &str = "DressageProbeText";

impl ChatOptions {
    /// These options with the model's special tokens as variables by their names, where none has that name.
    pub(crate) fn with_names(mut self, special: &SpecialTokens) -> Self {
        for (name, text) in special.by_name().filter(|(name, _)| !ENDS.contains(name)) {
            self.variables.entry(name).or_insert_with(|| text.into());
        }
        self
    }
}

/// What templates call the tokens that begin and end a text; the tokenizer knows them.
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
    /// When there is no template, when it does not parse or fails on an ordinary conversation, or when no special token
    /// of the tokenizer ends an assistant turn in it.
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
            variables,
            tool_support: ToolSupport::None,
            tool_role: false,
            opening: String::new(),
            closing: String::new(),
            end_of_turn: 0,
            stop_ids: Vec::new(),
        };
        chat.probe_turn()?;
        chat.tool_role = chat.prints_tool_role();
        if options.tools == ToolProtocol::Auto {
            chat.tool_support = chat.probe_tools();
        }
        Ok(chat)
    }

    /// Finds what the template prints around an assistant's text.
    fn probe_turn(&mut self) -> Result<(), TextError> {
        let question = json!({ "role": "user", "content": "Hi" });
        let reply = json!({ "role": "assistant", "content": PROBE_TEXT });
        let before = self.render(std::slice::from_ref(&question), None, true, None)?;
        let after = self.render(&[question.clone(), reply, question], None, true, None)?;
        let (until, rest) =
            after.split_once(PROBE_TEXT).ok_or_else(|| rewritten(PROBE_TEXT, &after, None))?;
        // Where the prompt prints more than the history keeps (an empty thought, say), a reply starts right after it.
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

    fn prints_tool_role(&self) -> bool {
        let messages = [
            json!({ "role": "user", "content": "Hi" }),
            json!({ "role": "assistant", "content": "Hi" }),
            json!({ "role": "tool", "content": PROBE_TEXT }),
        ];
        self.render(&messages, None, true, None).is_ok_and(|text| text.contains(PROBE_TEXT))
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
                if is_hermes { ToolSupport::Hermes } else { ToolSupport::Foreign }
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
        let guard = self.free_character(messages, tools)?;
        let prepared = self.prepare(messages, tools, guard)?;
        let text = self.render(&prepared.messages, prepared.tools.as_deref(), true, Some(guard))?;
        Ok(self.tokenizer.encode_guarded(&text, Some(guard)))
    }

    /// The tokens between a sampled turn and the next reply: the rest of the turn's end, `new`, and the beginning of the
    /// assistant's turn. `history` holds the messages before the sampled turn, and `sampled` the ids of the turn, with or
    /// without (when it was cut) the token that ends it.
    ///
    /// # Errors
    /// [`TextError::Rewritten`] where the template prints `history` or the turn differently once `new` follows; what the
    /// template raises; tools in a format that is not understood.
    pub fn continuation(
        &self,
        history: &[Message],
        sampled: &[u32],
        new: &[Message],
        tools: &[ToolSpec],
    ) -> Result<Vec<u32>, TextError> {
        let said = self.tokenizer.decode(sampled);
        let with_reply = |content: &str| {
            let reply = std::iter::once(Message::assistant(content));
            history.iter().cloned().chain(reply).chain(new.iter().cloned()).collect::<Vec<_>>()
        };
        let whole = with_reply(&said);
        let guard = self.free_character(&whole, tools)?;
        let render = |messages: &[Message]| {
            let prepared = self.prepare(messages, tools, guard)?;
            self.render(&prepared.messages, prepared.tools.as_deref(), true, Some(guard))
        };
        let before = render(history)?;
        let after = render(&whole)?;
        let turn_on = after.strip_prefix(&before).ok_or_else(|| rewritten(&before, &after, Some(guard)))?;

        // A mark at the end of the reply shows exactly where what follows it begins, white space included.
        let mut mark = PROBE_TEXT.to_string();
        while after.contains(&mark) {
            mark.push('x');
        }
        let marked = render(&with_reply(&format!("{said}{mark}")))?;
        let differs = || rewritten(&format!("{before}{said}"), &after, Some(guard));
        let (_, following) = marked.split_once(&mark).ok_or_else(differs)?;
        let turn = turn_on.strip_suffix(following).ok_or_else(differs)?;
        let solid =
            |text: &str| text.chars().filter(|&c| !c.is_whitespace() && c != guard).collect::<String>();
        if solid(turn) != solid(&said) {
            return Err(differs());
        }
        let given = match sampled.last() {
            Some(&last) if last == self.end_of_turn => following
                .strip_prefix(&self.closing)
                .ok_or_else(|| rewritten(&self.closing, following, Some(guard)))?,
            _ => following,
        };
        Ok(self.tokenizer.encode_guarded(given, Some(guard)))
    }

    /// The tokens of a turn that somebody else wrote for the model, as the model would sample them after a prompt: its
    /// text and calls, and the token that ends the turn.
    ///
    /// # Errors
    /// When every private-use character occurs in the text.
    pub fn assistant(&self, message: &Message) -> Result<Vec<u32>, TextError> {
        let guard = self.free_character(std::slice::from_ref(message), &[])?;
        let said =
            self.tokenizer.guard(&hermes::render_turn(&message.content, &message.tool_calls), guard, true);
        let text = format!("{}{said}{}", self.opening, self.closing);
        Ok(self.tokenizer.encode_guarded(&text, Some(guard)))
    }

    /// What a reply says and which tools it calls.
    pub fn parse(&self, text: &str) -> Parsed {
        hermes::parse(text)
    }

    /// A call as the model writes it.
    pub fn render_call(&self, call: &ToolCall) -> String {
        hermes::render_call(call)
    }

    fn prepare(&self, messages: &[Message], tools: &[ToolSpec], guard: char) -> Result<Prepared, TextError> {
        let prepare = Preparation {
            tokenizer: &self.tokenizer,
            tool_support: self.tool_support,
            tool_role: self.tool_role,
            tool_prompt: self.tool_prompt,
            guard,
        };
        prepare.run(messages, tools)
    }

    /// A private-use character that nothing to be rendered contains.
    fn free_character(&self, messages: &[Message], tools: &[ToolSpec]) -> Result<char, TextError> {
        let given = serde_json::to_string(&(messages, tools, &self.variables))
            .map_err(|error| TextError::Template(format!("the messages cannot be given to it: {error}")))?;
        let used: BTreeSet<char> =
            given.chars().chain(self.template.source().chars()).filter(|&c| c >= '\u{E000}').collect();
        let mut candidates = ('\u{E000}'..='\u{F8FF}').chain('\u{F0000}'..='\u{FFFFD}');
        candidates.find(|c| !used.contains(c)).ok_or_else(|| {
            TextError::Template("the messages use every private-use character, but one must be free".into())
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

/// Says where two texts begin to differ.
fn rewritten(before: &str, now: &str, guard: Option<char>) -> TextError {
    let clean = |text: &str| text.chars().filter(|&c| Some(c) != guard).collect::<String>();
    let (before, now) = (clean(before), clean(now));
    let same = before.char_indices().zip(now.chars()).find(|((_, a), b)| a != b).map(|((at, _), _)| at);
    let at = same.unwrap_or(before.len().min(now.len()));
    TextError::Rewritten { before: excerpt(&before[at..]), now: excerpt(&now[at..]) }
}

/// The first characters of a text, for a message.
fn excerpt(text: &str) -> String {
    const LENGTH: usize = 60;
    match text.char_indices().nth(LENGTH) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_string(),
    }
}
