//! Probes a chat template: its message formats, how it ends a turn, and its tool-call format.

use serde_json::{Map, Value, json};

use crate::calls::CallFormat;
use crate::completion_parser::{CompletionParser, TagTables};
use crate::excerpt::excerpt;
use crate::prepare::{CallMessageFormat, MessageFormat, UnreadableCallFormat};
use crate::protocol::ToolSupport;
use crate::reasoning_tags::{REASONING, ReasoningTagSet};
use crate::systems::{LateSystem, SystemMessageSupport};
use crate::{Chat, Message, ParsedCompletion, Role, TextError, ToolCall, ToolProtocol, ToolSpec};

const PROBE_TOOL: &str = "levade_probe_tool";
const PROBE_TEXT: &str = "LevadeProbeText";
const PROBE_REASONING: &str = "LevadeProbeThought";

/// Returns a tool with a string parameter and an integer parameter, for probing a chat template.
fn probe_tool() -> ToolSpec {
    let properties = json!({ "text": { "type": "string" }, "count": { "type": "integer" } });
    ToolSpec {
        name: PROBE_TOOL.into(),
        description: "Probes.".into(),
        parameters: json!({ "type": "object", "properties": properties, "required": [] }),
    }
}

/// Returns arguments for a call of the tool that probes a chat template.
fn probe_arguments() -> Map<String, Value> {
    [("text".to_owned(), PROBE_REASONING.into()), ("count".to_owned(), 7.into())]
        .into_iter()
        .collect()
}

/// Returns an id for the probe call that templates of the tool-call format accept.
fn probe_id(format: CallFormat) -> String {
    format.syntax().call_id(PROBE_TOOL, 0).unwrap_or_else(|| "call_0".into())
}

/// The probe call as a chat template prints it, after the question.
struct PrintedCall {
    call_format: CallMessageFormat,
    id: String,
    text: String,
}

impl Chat {
    /// Determines the message formats that the chat template supports. A template that prints only
    /// content parts will receive parts.
    pub(crate) fn probe_messages(&mut self) -> MessageFormat {
        let parts = json!([{ "type": "text", "text": PROBE_TEXT }]);
        let text = self.render_probe("content", PROBE_TEXT.into());
        let listed = self.render_probe("content", parts);
        self.template.lists = !prints_probe(&text) && prints_probe(&listed);
        let knows_developer = self.template.source().contains("developer")
            && prints_probe(&self.render_probe("role", Role::Developer.as_str().into()));
        let reasoning: Value = PROBE_REASONING.into();
        MessageFormat {
            parts: self.template.lists || (prints_probe(&text) && text == listed),
            reasoning: REASONING.into_iter().find(|field| {
                self.render_probe(field, reasoning.clone())
                    .is_some_and(|text| text.contains(PROBE_REASONING))
            }),
            tags: None,
            tight: false,
            calls: None,
            unreadable: UnreadableCallFormat::default(),
            developer: knows_developer,
            systems: SystemMessageSupport::default(),
        }
    }

    /// Renders a short conversation whose user message has `value` in the field `name`. A reasoning
    /// field is set in the assistant message instead. Returns `None` if rendering fails.
    fn render_probe(&self, name: &str, value: Value) -> Option<String> {
        let mut user = json!({ "role": "user", "content": PROBE_TEXT });
        let mut assistant_message = json!({ "role": "assistant", "content": PROBE_TEXT });
        if REASONING.contains(&name) {
            assistant_message[name] = value;
            return self.render(&[user, assistant_message], None, false, None).ok();
        }
        user[name] = value;
        let question = json!({ "role": "user", "content": "Hi" });
        let messages = if name == "role" { vec![user, question] } else { vec![user] };
        self.render(&messages, None, true, None).ok()
    }

    /// Determines the text that the chat template prints around an assistant message.
    pub(crate) fn probe_turn(&mut self) -> Result<(), TextError> {
        let question = json!({ "role": "user", "content": "Hi" });
        let assistant_message = json!({ "role": "assistant", "content": PROBE_TEXT });
        let before = self.render(std::slice::from_ref(&question), None, true, None)?;
        let after =
            self.render(&[question.clone(), assistant_message, question], None, true, None)?;
        let (until, rest) = after
            .rsplit_once(PROBE_TEXT)
            .ok_or_else(|| TextError::NoTurn { found: excerpt(&after) })?;
        // The prompt may print more than the history keeps, such as empty reasoning. The completion
        // then starts directly after it.
        let opening = until.strip_prefix(&before).unwrap_or_default();
        let blank = rest.len() - rest.trim_start().len();
        let Some((id, len)) = self.tokenizer.leading_special(&rest[blank..]) else {
            return Err(TextError::NoEndOfTurn { found: excerpt(rest) });
        };
        self.opening = opening.to_string();
        self.closing = rest[..blank + len].to_string();
        self.end_of_turn = id;
        Ok(())
    }

    /// Returns whether the chat template prints a message of this role after an assistant message,
    /// and in that order.
    pub(crate) fn prints_later(&self, role: Role) -> bool {
        const PROBE_COMPLETION_TEXT: &str = "LevadeProbeReply";
        let question = json!({ "role": "user", "content": "Hi" });
        let mut later_message = json!({ "role": role.as_str(), "content": PROBE_TEXT });
        let assistant_message = match self.call_message_format().filter(|_| role == Role::Tool) {
            None => json!({ "role": "assistant", "content": PROBE_COMPLETION_TEXT }),
            Some(call_format) => {
                let id = probe_id(self.format);
                (later_message["tool_call_id"], later_message["name"]) =
                    (id.as_str().into(), PROBE_TOOL.into());
                call_format.make_message(
                    "".into(),
                    vec![call_format.make_call(
                        &id,
                        PROBE_TOOL,
                        json!({ "text": PROBE_COMPLETION_TEXT }),
                    )],
                )
            }
        };
        let text = self.render(&[question, assistant_message, later_message], None, true, None);
        text.is_ok_and(|text| {
            text.rsplit_once(PROBE_COMPLETION_TEXT)
                .is_some_and(|(_, after)| after.contains(PROBE_TEXT))
        })
    }

    /// Checks that a tool call can be written and parsed again. Returns an error that names the
    /// special token that prevents it.
    pub(crate) fn probe_call(&self) -> Result<(), TextError> {
        let call =
            ToolCall { id: "call_0".into(), name: PROBE_TOOL.into(), arguments: Map::new().into() };
        let mut ids = self.assistant(&Message::calls("", vec![call.clone()]), None)?;
        ids.pop();
        let name = |id: &u32| self.tokenizer.token_text(*id);
        let last = ids.len().saturating_sub(1);
        if let Some(id) = ids[..last].iter().find(|&id| self.stop_ids.contains(id)) {
            let why = "ends a completion, so it would truncate a call".into();
            return Err(TextError::CallToken { token: name(id), why });
        }
        if self.parse(&self.decode_completion(&ids), false, &[probe_tool()]).calls == [Ok(call)] {
            return Ok(());
        }
        let foreign =
            ids.iter().find(|&id| self.tokenizer.is_special(*id) && !self.tag_ids.contains(id));
        let sign = self.tags().syntax.syntax_tags().sign;
        let token = foreign.or(ids.first()).map_or_else(|| sign.into(), name);
        let why = format!("is part of the syntax of a call ({sign}…), and has no text");
        Err(TextError::CallToken { token, why })
    }

    /// Determines how the chat template receives tool calls whose arguments are not a JSON object.
    /// Chooses the first representation that the template prints with the text unchanged, or else
    /// the first representation with the text escaped.
    pub(crate) fn probe_unreadable(&mut self) {
        const TRUNCATED_ARGUMENTS: &str = "{\"text\": \"LevadeProbeThought";
        let id = probe_id(self.format);
        let call = ToolCall {
            id: id.clone(),
            name: PROBE_TOOL.into(),
            arguments: Value::from(TRUNCATED_ARGUMENTS).into(),
        };
        let result = Message {
            tool_call_id: Some(id),
            name: Some(PROBE_TOOL.into()),
            ..Message::tool(PROBE_TEXT)
        };
        let messages =
            [Message::user("Hi"), Message::calls("", vec![call]), result, Message::user("Hi")];
        let mut printed = |call_format: UnreadableCallFormat| {
            self.message_format.unreadable = call_format;
            let [guard] = self.find_unused_characters(&messages, &[]).ok()?;
            self.render_text(&messages, &[], true, guard).ok()
        };
        let forms = [
            UnreadableCallFormat::Text,
            UnreadableCallFormat::Written,
            UnreadableCallFormat::Entry,
        ];
        let forms = forms.map(|call_format| (call_format, printed(call_format)));
        let prints = |what: &'static str| {
            let mut forms = forms.iter();
            forms
                .find(|(_, text)| text.as_ref().is_some_and(|text| text.contains(what)))
                .map(|(call_format, _)| *call_format)
        };
        self.message_format.unreadable = prints(TRUNCATED_ARGUMENTS)
            .or_else(|| prints(PROBE_REASONING))
            .unwrap_or(UnreadableCallFormat::Empty);
    }

    /// Determines which instruction messages the chat template prints.
    pub(crate) fn probe_systems(&self, unprinted: LateSystem) -> SystemMessageSupport {
        const TEXTS: [&str; 2] = ["LevadeProbeFirst", "LevadeProbeSecond"];
        const PROBE_COMPLETION_TEXT: &str = "LevadeProbeReply";
        let [first, second] = TEXTS.map(|text| plain_message(Role::System, text));
        let user = plain_message(Role::User, "Hi");
        let assistant_message = plain_message(Role::Assistant, PROBE_COMPLETION_TEXT);
        let prints = |messages: &[&Value]| {
            let text = self.print_messages(messages);
            let all: Vec<Option<usize>> = TEXTS.iter().map(|part| text.find(part)).collect();
            all.iter().all(Option::is_some) && all.is_sorted()
        };
        let prints_late = |messages: &[&Value]| {
            self.print_messages(messages)
                .rsplit_once(PROBE_COMPLETION_TEXT)
                .is_some_and(|(_, after)| after.contains(TEXTS[0]))
        };
        let developers = TEXTS.map(|text| plain_message(Role::Developer, text));
        let pairs = [[&first, &second], [&first, &developers[1]], [&developers[0], &second]];
        let pairs = &pairs[..if self.message_format.developer { 3 } else { 1 }];
        let [one, other] = TEXTS.map(|text| plain_message(Role::User, text));
        SystemMessageSupport {
            leading: self.print_messages(&[&first, &user]).contains(TEXTS[0]),
            several: pairs.iter().all(|[first, second]| prints(&[first, second, &user])),
            late: prints_late(&[&user, &assistant_message, &first])
                && prints_late(&[&user, &assistant_message, &first, &user])
                && self.print_messages(&[&user, &first, &user]).contains(TEXTS[0]),
            users: prints(&[&one, &other]),
            unprinted,
        }
    }

    fn print_messages(&self, messages: &[&Value]) -> String {
        let messages: Vec<Value> = messages.iter().copied().cloned().collect();
        self.render(&messages, None, true, None).unwrap_or_default()
    }

    /// Determines the tool-call format of the chat template.
    ///
    /// Candidates, in order: the format in which a call that the template prints can be parsed; the
    /// format that the template's tool descriptions mention; the format that `protocol` selects. A
    /// selected protocol restricts the first two.
    pub(crate) fn probe_format(&mut self, protocol: ToolProtocol) {
        if protocol == ToolProtocol::Hermes {
            return;
        }
        let described = self.print_tools();
        let marked = described.as_deref().and_then(|text| self.find_marked_format(text));
        let is_of =
            |format: CallFormat| protocol == ToolProtocol::Auto || format.protocol() == protocol;
        let prints = self.print_calls();
        let printed =
            CallFormat::ALL.into_iter().filter(|format| is_of(*format)).find_map(|format| {
                Some((
                    format,
                    prints.iter().find(|print| self.reads_call(format, print))?.call_format,
                ))
            });
        let format = printed
            .map(|(format, _)| format)
            .or(marked.filter(|format| is_of(*format)))
            .or_else(|| CallFormat::ALL.into_iter().find(|format| format.protocol() == protocol));
        self.tool_support = match (&described, format) {
            (None, _) => ToolSupport::None,
            (Some(_), None) => ToolSupport::Foreign,
            (Some(_), Some(_)) => ToolSupport::Native,
        };
        self.format = format.unwrap_or_default();
        // Hermes calls have always been rendered as text, which every template prints.
        let is_text = self.format == CallFormat::Hermes;
        self.message_format.calls =
            printed.map(|(_, call_format)| call_format).filter(|_| !is_text);
    }

    /// Renders the start of a conversation with the probe tool. Returns `None` if the chat template
    /// does not print the tool.
    fn print_tools(&self) -> Option<String> {
        let messages = [
            json!({ "role": "system", "content": "Help." }),
            json!({ "role": "user", "content": "Hi" }),
        ];
        let tools = [probe_tool().to_openai()];
        // Some templates reject a system message.
        let print = |messages: &[Value]| self.render(messages, Some(&tools), true, None).ok();
        let text = print(&messages).or_else(|| print(&messages[1..]));
        text.filter(|text| text.contains(PROBE_TOOL))
    }

    /// Renders the probe call in each format in which a template takes calls, and with each kind of
    /// id. Omits renderings without the call.
    fn print_calls(&self) -> Vec<PrintedCall> {
        let mut ids: Vec<String> = CallFormat::ALL.into_iter().map(probe_id).collect();
        ids.sort();
        ids.dedup();
        let question = json!({ "role": "user", "content": PROBE_TEXT });
        let forms = CallMessageFormat::ALL
            .into_iter()
            .flat_map(|call_format| ids.iter().map(move |id| (call_format, id)));
        forms
            .filter_map(|(call_format, id)| {
                let call = call_format.make_call(id, PROBE_TOOL, probe_arguments().into());
                let assistant_message = call_format.make_message("".into(), vec![call]);
                let text =
                    self.render(&[question.clone(), assistant_message], None, false, None).ok()?;
                let (_, text) = text.rsplit_once(PROBE_TEXT)?;
                text.contains(PROBE_TOOL).then(|| PrintedCall {
                    call_format,
                    id: id.clone(),
                    text: text.into(),
                })
            })
            .collect()
    }

    /// Returns whether a tool call that the chat template printed can be parsed in a tool-call
    /// format.
    fn reads_call(&self, format: CallFormat, print: &PrintedCall) -> bool {
        let syntax = format.syntax();
        let text = print.text.as_str();
        if print.id != probe_id(format) {
            return false;
        }
        // A call without tags starts its completion.
        let mut start = 0;
        if format == CallFormat::Llama {
            let question = [json!({ "role": "user", "content": PROBE_TEXT })];
            let prompt = self.render(&question, None, true, None).unwrap_or_default();
            let header = prompt.rsplit_once(PROBE_TEXT).map(|(_, header)| header.trim_end());
            start = text.find('{').unwrap_or(0);
            if header != Some(text[..start].trim_end()) {
                return false;
            }
        }
        let tags = TagTables::new(&ReasoningTagSet::default(), syntax);
        let parsed = ParsedCompletion::from_events(
            CompletionParser::parse_complete(&tags, &text[start..], false, &[probe_tool()]).0,
        );
        syntax.is_variant_of(text) && matches!(&parsed.calls[..], [Ok(call)] if is_probe_call(call))
    }

    /// Returns the tool-call format that a chat template mentions, judged by the tags in its tool
    /// description, in its source and among the special tokens.
    fn find_marked_format(&self, described: &str) -> Option<CallFormat> {
        let source = self.template.source();
        let known = |tag: &str| source.contains(tag) || self.tokenizer.special(tag).is_some();
        Some(if described.contains("<minimax:tool_call>") {
            CallFormat::Minimax
        } else if described.contains("<arg_key>") {
            CallFormat::Glm { lines: described.contains("\n<arg_key>") }
        } else if described.contains("<function=") && described.contains("<parameter=") {
            CallFormat::QwenXml
        } else if described.contains("<tool_call>") && described.contains("\"arguments\"") {
            CallFormat::Hermes
        } else if known("<|tool_calls_section_begin|>") {
            CallFormat::Kimi
        } else if known("<｜tool▁calls▁begin｜>") {
            CallFormat::Deepseek { fenced: source.contains("```json") }
        } else if known("[TOOL_CALLS]") {
            CallFormat::Mistral { named: known("[ARGS]") }
        } else if source.contains("<|channel|>") && described.contains("functions") {
            CallFormat::Harmony
        } else if described.contains("\"parameters\": dictionary") {
            CallFormat::Llama
        } else {
            return None;
        })
    }
}

fn prints_probe(text: &Option<String>) -> bool {
    text.as_ref().is_some_and(|text| text.contains(PROBE_TEXT))
}

fn plain_message(role: Role, text: &str) -> Value {
    json!({ "role": role.as_str(), "content": text })
}

fn is_probe_call(call: &ToolCall) -> bool {
    call.name == PROBE_TOOL && call.arguments == probe_arguments()
}
