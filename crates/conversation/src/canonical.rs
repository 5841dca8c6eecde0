//! Canonical form of a message: equal for two messages with the same meaning, however a client
//! formats them.
//!
//! # Guarantees
//! - **Content** counts as one text; absent and empty content are equal.
//! - **Calls** count by name and arguments. Arguments count as JSON values: keys in any order,
//!   numbers by their exact value. `4.0` equals `4`, and numbers that differ only in their last
//!   digit differ.
//! - **Instructions** are equal under the roles `system` and `developer`.
//! - **Ignored:** call ids and other fields.
//!
//! A form is computed in one pass over the message, and compared as a 128-bit hash.

use levade_text::{Chat, Message, Role, ToolCall, ToolSpec, canonical_number};
use serde_json::{Number, Value};
use xxhash_rust::xxh3::Xxh3;

use crate::recorded_completion::parsed_content;

/// 128-bit hash of a text or a message.
pub(crate) type Key = u128;

/// A message in canonical form, by which differently written copies of it are recognized.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CanonicalForm {
    pub role: Role,
    /// Hash of the message that ignores white space around the content.
    pub loose: Key,
    /// Hash of the message that includes white space around the content.
    pub exact: Key,
    /// Reasoning that the client sent with the message. `None` if it sent none.
    pub reasoning: Option<String>,
    /// Ids of the message's tool calls.
    pub ids: Vec<String>,
    /// Hash of the message's tool calls alone. `None` if the message has no tool calls.
    pub calls: Option<Key>,
    /// Whether the content has any character other than white space.
    pub has_content: bool,
}

impl CanonicalForm {
    /// Returns the canonical form of a message as the client sent it.
    pub(crate) fn from_message(message: &Message) -> Self {
        let reasoning_text = reasoning(message).map(str::to_owned);
        let mut form =
            CanonicalForm::new(message.role, &message.content, &message.tool_calls, reasoning_text);
        // Parts other than text, such as images.
        for part in message.content.non_text_parts() {
            let part = serde_json::to_string(part).unwrap_or_default();
            let key = xxhash_rust::xxh3::xxh3_128(part.as_bytes());
            form.exact = form.exact.rotate_left(1) ^ key;
            form.loose = form.loose.rotate_left(1) ^ key;
            form.has_content = true;
        }
        form
    }

    /// Returns the canonical form of an assistant message whose content has reasoning or tool calls
    /// as text, in the tags of the model. Returns `None` if the content has neither, or if the
    /// message is not an assistant message.
    pub(crate) fn parse_content(
        message: &Message,
        chat: &Chat,
        tools: &[ToolSpec],
    ) -> Option<Self> {
        if message.role != Role::Assistant || message.content.is_empty() {
            return None;
        }
        let parsed = chat.parse(&message.content, false, tools);
        let reasoning_text = chat.reasoning(&message.content, false);
        let content = parsed_content(&parsed);
        if reasoning_text.is_empty() && content == message.content.trim() {
            return None;
        }
        let written = parsed.calls.into_iter().filter_map(Result::ok);
        let calls: Vec<ToolCall> = written.chain(message.tool_calls.iter().cloned()).collect();
        let sent = reasoning(message).map(str::to_owned);
        let reasoning_text = sent
            .or_else(|| Some(reasoning_text).filter(|reasoning_text| !reasoning_text.is_empty()));
        // The parser generates ids that the client does not know. Only the ids in the message
        // count.
        let ids = message.tool_calls.iter().map(|call| call.id.clone()).collect();
        Some(CanonicalForm {
            ids,
            ..CanonicalForm::new(Role::Assistant, &content, &calls, reasoning_text)
        })
    }

    /// Merges the assistant messages at the start of `messages` that are parts of one completion,
    /// because some clients send reasoning, text and tool calls separately, or each tool call in
    /// its own message. Returns the merged message, its canonical form, and the number of messages.
    /// Returns `None` if the first message is not split. `is_reasoning` returns whether a message
    /// has only reasoning.
    pub(crate) fn merge<'a>(
        messages: impl IntoIterator<Item = &'a Message>,
        is_reasoning: impl Fn(&Message) -> bool,
    ) -> Option<(Message, Self, usize)> {
        let mut messages =
            messages.into_iter().take_while(|message| message.role == Role::Assistant);
        let mut full_message = messages.next()?.clone();
        let is_silent = |message: &Message| {
            message.tool_calls.is_empty() && (message.content.is_empty() || is_reasoning(message))
        };
        let mut length = 1;
        let mut silent = None;
        for part in messages {
            let calls_only = part.content.is_empty() && !part.tool_calls.is_empty();
            if !calls_only && !*silent.get_or_insert_with(|| is_silent(&full_message)) {
                break;
            }
            silent = silent.map(|silent| silent && is_silent(part));
            full_message.append(part, "");
            length += 1;
        }
        (length > 1).then(|| {
            let form = CanonicalForm::from_message(&full_message);
            (full_message, form, length)
        })
    }

    fn new(role: Role, content: &str, calls: &[ToolCall], reasoning_text: Option<String>) -> Self {
        let mut of_calls = PartsHasher::default();
        for call in calls {
            of_calls.text(&call.name);
            if let Some(text) = call.arguments.unreadable() {
                // No object has this number of fields, so unreadable arguments never equal other
                // arguments.
                of_calls.number_of(usize::MAX);
                of_calls.text(text);
            }
            of_calls.number_of(call.arguments.len());
            of_calls.object(call.arguments.iter());
        }
        let calls_key = of_calls.0.digest128();
        let key = |content: &str| {
            let mut hash = PartsHasher::default();
            hash.text(if role.instructs() { Role::System } else { role }.as_str());
            hash.text(content);
            hash.number_of(calls.len());
            hash.bytes(&calls_key.to_le_bytes());
            hash.0.digest128()
        };
        let trimmed = content.trim();
        let loose = key(trimmed);
        CanonicalForm {
            role,
            loose,
            exact: if trimmed.len() == content.len() { loose } else { key(content) },
            reasoning: reasoning_text,
            ids: calls.iter().map(|call| call.id.clone()).filter(|id| !id.is_empty()).collect(),
            calls: (!calls.is_empty()).then_some(calls_key),
            has_content: !trimmed.is_empty(),
        }
    }
}

/// Returns the text of a message's reasoning field, or `None` if the field is absent.
fn reasoning(message: &Message) -> Option<&str> {
    message.reasoning_content.as_deref()
}

/// Returns whether two JSON values are numbers of equal value, whatever their notation.
pub(crate) fn same_number(a: &Value, b: &Value) -> bool {
    matches!((a, b), (Value::Number(a), Value::Number(b)) if canonical_number(a) == canonical_number(b))
}

/// Returns a hash of a reasoning text that ignores white space around it.
pub(crate) fn reasoning_key(reasoning_text: &str) -> Key {
    xxhash_rust::xxh3::xxh3_128(reasoning_text.trim().as_bytes())
}

/// Returns a hash of a list of tools, which depends on their order.
pub(crate) fn tools_key(tools: &[ToolSpec]) -> Key {
    let mut hash = PartsHasher::default();
    for tool in tools {
        hash.text(&tool.name);
        hash.text(&tool.description);
        hash.value(&tool.parameters);
    }
    hash.0.digest128()
}

/// Hasher that writes the length before each part, so that different lists of parts never yield the
/// same bytes.
#[derive(Default)]
struct PartsHasher(Xxh3);

impl PartsHasher {
    fn bytes(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    fn number_of(&mut self, count: usize) {
        self.bytes(&(count as u64).to_le_bytes());
    }

    fn text(&mut self, text: &str) {
        self.number_of(text.len());
        self.bytes(text.as_bytes());
    }

    fn object<'a>(&mut self, entries: impl Iterator<Item = (&'a String, &'a Value)>) {
        let mut entries: Vec<_> = entries.collect();
        entries.sort_unstable_by_key(|(key, _)| *key);
        for (key, value) in entries {
            self.text(key);
            self.value(value);
        }
    }

    fn value(&mut self, value: &Value) {
        match value {
            Value::Null => self.bytes(b"n"),
            Value::Bool(value) => self.bytes(if *value { b"t" } else { b"f" }),
            Value::Number(number) => self.number(number),
            Value::String(text) => {
                self.bytes(b"s");
                self.text(text);
            }
            Value::Array(items) => {
                self.bytes(b"a");
                self.number_of(items.len());
                items.iter().for_each(|item| self.value(item));
            }
            Value::Object(map) => {
                self.bytes(b"o");
                self.number_of(map.len());
                self.object(map.iter());
            }
        }
    }

    /// Adds a number to the hash by its exact value, whatever its notation.
    fn number(&mut self, number: &Number) {
        self.bytes(b"d");
        self.text(&canonical_number(number));
    }
}

#[cfg(test)]
mod tests {
    use levade_text::testing::tiny_chat;
    use serde_json::json;

    use super::*;

    fn call(id: &str, arguments: &str) -> ToolCall {
        let Value::Object(arguments) = serde_json::from_str(arguments).unwrap() else { panic!() };
        ToolCall { id: id.into(), name: "add".into(), arguments: arguments.into() }
    }

    fn read(json: Value) -> CanonicalForm {
        CanonicalForm::from_message(&serde_json::from_value(json).unwrap())
    }

    #[test]
    fn tool_call_arguments_compare_by_value() {
        let first = call_form(
            r#"{"b":  2, "a": 1.50, "note":"caf\u00e9 — é\/x", "deep": {"x": [4.0, null], "y": 1}}"#,
        );
        for same in [
            r#"{"a": 1.5, "b": 2, "note": "café — é/x", "deep": {"y": 1, "x": [4, null]}}"#,
            r#"{"a":15e-1,"b":2.0,"deep":{"y":1.0,"x":[4,null]},"note":"caf\u00e9 \u2014 é/x"}"#,
        ] {
            assert_eq!(call_form(same), first, "{same}");
        }
        for other in [
            r#"{"b": 2, "a": 1.51, "note": "café — é/x", "deep": {"x": [4.0, null], "y": 1}}"#,
            r#"{"b": 2, "a": "1.5", "note": "café — é/x", "deep": {"x": [4.0, null], "y": 1}}"#,
            r#"{"b": 2, "a": 1.5, "note": "café — é/x", "deep": {"x": [null, 4], "y": 1}}"#,
            r#"{"b": 2, "a": 1.5, "note": "café — é/x", "deep": {"x": [4]}, "y": 1}"#,
            r#"{"b": 2, "a": 1.5, "note": " café — é/x", "deep": {"x": [4.0, null], "y": 1}}"#,
        ] {
            assert_ne!(call_form(other).loose, first.loose, "{other}");
        }
        // Numbers that an `f64`, and numbers that a 64-bit integer, cannot distinguish.
        assert_ne!(
            call_form(r#"{"a": 9007199254740993}"#).loose,
            call_form(r#"{"a": 9007199254740992}"#).loose
        );
        assert_ne!(
            call_form(r#"{"a": 18446744073709551615}"#).loose,
            call_form(r#"{"a": -1}"#).loose
        );
        assert_eq!(
            call_form(r#"{"a": 1e20}"#).loose,
            call_form(r#"{"a": 100000000000000000000}"#).loose
        );
        assert_ne!(call_form(r#"{"a": 1e300}"#).loose, call_form(r#"{"a": 2e300}"#).loose);
        for (one, other) in [
            ("12345678901234567890123", "12345678901234567890124"),
            ("18446744073709551616", "18446744073709551617"),
            ("-9223372036854775809", "-9223372036854775808"),
            (
                "1234567890123456789012345678901234567890",
                "1234567890123456789012345678901234567891",
            ),
            ("1e400", "2e400"),
            ("1e400", "0"),
        ] {
            let [one, other] =
                [one, other].map(|number| call_form(&format!("{{\"a\": {number}}}")).loose);
            assert_ne!(one, other);
        }
        // A client that parses numbers as `f64` has changed the value.
        assert_ne!(
            call_form(r#"{"a": 0.1000000000000000055511151231257827}"#).loose,
            call_form(r#"{"a": 0.1}"#).loose
        );
        assert_eq!(call_form(r#"{"a": 1E5}"#).loose, call_form(r#"{"a": 100000.0}"#).loose);
        assert_eq!(call_form(r#"{"a": -0.0}"#).loose, call_form(r#"{"a": 0}"#).loose);
        assert_ne!(call_form(r#"{"a": true}"#).loose, call_form(r#"{"a": false}"#).loose);
        assert_ne!(call_form(r#"{"a": null}"#).loose, call_form(r#"{"a": ""}"#).loose);
        assert_ne!(call_form(r#"{"a": {}}"#).loose, call_form(r#"{"a": []}"#).loose);
    }

    fn call_form(arguments: &str) -> CanonicalForm {
        CanonicalForm::from_message(&Message::calls("", vec![call("a", arguments)]))
    }

    #[test]
    fn hash_separates_adjacent_parts() {
        let one = |name: &str| ToolCall { name: name.into(), ..call("", "{}") };
        let calls = |names: &[&str]| {
            CanonicalForm::from_message(&Message::calls("", names.iter().map(|n| one(n)).collect()))
        };
        assert_ne!(calls(&["ab", "c"]).loose, calls(&["a", "bc"]).loose);
        assert_ne!(calls(&[]).loose, calls(&[""]).loose);
        assert_ne!(
            CanonicalForm::from_message(&Message::user("a")).loose,
            CanonicalForm::from_message(&Message::assistant("a")).loose
        );
        assert_ne!(tools_key(&[tool("a", "bc")]), tools_key(&[tool("ab", "c")]));
        let reordered = ToolSpec { parameters: json!({"a": 2.0, "b": 1}), ..tool("a", "") };
        assert_eq!(tools_key(&[tool("a", "")]), tools_key(&[reordered]));
        assert_ne!(
            tools_key(&[tool("a", ""), tool("b", "")]),
            tools_key(&[tool("b", ""), tool("a", "")])
        );
    }

    fn tool(name: &str, description: &str) -> ToolSpec {
        ToolSpec {
            name: name.into(),
            description: description.into(),
            parameters: json!({"b": 1, "a": 2}),
        }
    }

    #[test]
    fn canonical_form_ignores_null_content_and_extra_fields() {
        let bare = read(json!({"role": "assistant", "content": null}));
        assert_eq!(read(json!({"role": "assistant", "content": ""})), bare);
        assert_eq!(read(json!({"role": "assistant"})), bare);
        let more = json!({"role": "assistant", "refusal": null, "annotations": [], "function_call": null,
            "name": "calc", "parsed": null});
        assert_eq!(read(more), bare);
        // White space equals empty content only after trimming.
        let blank = read(json!({"role": "assistant", "content": "\n"}));
        assert!(blank.loose == bare.loose && blank.exact != bare.exact && !blank.has_content);
        let one = read(indexed_call("x"));
        let other = read(indexed_call("y"));
        assert_eq!((one.loose, one.exact), (other.loose, other.exact));
        assert_eq!(one.ids, ["x"]);
        let [trimmed, outer] =
            ["a  b", " a  b\n"].map(|text| CanonicalForm::from_message(&Message::user(text)));
        assert!(
            trimmed.loose == outer.loose && trimmed.exact != outer.exact && trimmed.has_content
        );
    }

    fn indexed_call(id: &str) -> Value {
        json!({"role": "assistant", "tool_calls": [
            {"id": id, "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}]})
    }

    #[test]
    fn system_and_developer_forms_are_equal() {
        let [system, developer, user] = ["system", "developer", "user"]
            .map(|role| read(json!({"role": role, "content": " Be brief."})));
        assert_eq!((system.loose, system.exact), (developer.loose, developer.exact));
        assert_ne!(system.loose, user.loose);
    }

    #[test]
    fn split_completion_is_joined() {
        let one = call("a", r#"{"a": 1}"#);
        let two = call("b", r#"{"a": 2}"#);
        let full_message = CanonicalForm::from_message(&with_reasoning(Message::calls(
            " So",
            vec![one.clone(), two.clone()],
        )));
        let text = Message::assistant(" So");
        let first = Message::calls("", vec![one.clone()]);
        let second = Message::calls("", vec![two]);
        for parts in [
            vec![with_reasoning(text.clone()), first.clone(), second.clone(), Message::tool("1")],
            vec![text.clone(), with_reasoning(first.clone()), second.clone(), text.clone()],
            vec![with_reasoning(Message::calls(" So", vec![one])), second, Message::user("?")],
        ] {
            let length = parts.len() - 1;
            let joined =
                CanonicalForm::merge(&parts, |_| false).map(|(_, form, length)| (form, length));
            assert_eq!(joined, Some((full_message.clone(), length)), "{parts:?}");
        }
        assert_eq!(CanonicalForm::merge(&[text.clone(), text.clone()], |_| false), None);
        assert_eq!(CanonicalForm::merge(&[Message::user(" So"), first.clone()], |_| false), None);
        assert_eq!(CanonicalForm::merge(&[text, Message::tool("1"), first], |_| false), None);
        assert_eq!(CanonicalForm::merge(&[], |_| false), None);
    }

    fn with_reasoning(message: Message) -> Message {
        Message { reasoning_content: Some("hm".into()), ..message }
    }

    #[test]
    fn non_text_parts_count_in_order() {
        let both = form_with_images("a", &["x", "y"]);
        assert_eq!((both.exact, form_with_images("a", &["x", "y"])), (both.loose, both.clone()));
        let other_forms = [
            form_with_images("a", &["y", "x"]),
            form_with_images("a", &["x"]),
            form_with_images("a", &[]),
            form_with_images("b", &["x", "y"]),
        ];
        assert!(
            other_forms.iter().all(|other| other.loose != both.loose && other.exact != both.exact)
        );
        let spaced = form_with_images(" a", &["x", "y"]);
        assert!(spaced.loose == both.loose && spaced.exact != both.exact);
        assert!(form_with_images("", &["x"]).has_content && !form_with_images("", &[]).has_content);
    }

    fn form_with_images(text: &str, urls: &[&str]) -> CanonicalForm {
        let text = json!({"type": "text", "text": text});
        let parts: Vec<Value> = std::iter::once(text)
            .chain(urls.iter().map(|url| json!({"type": "image_url", "image_url": {"url": url}})))
            .collect();
        read(json!({"role": "user", "content": parts}))
    }

    #[test]
    fn reasoning_and_calls_are_parsed_from_content() {
        let chat = tiny_chat().unwrap();
        let parse_form =
            |text: &str| CanonicalForm::parse_content(&Message::assistant(text), &chat, &[]);
        assert_eq!(parse_form("plain"), None);
        assert_eq!(parse_form(" plain\n"), None);
        let form = parse_form(
            "<think>hm</think>So \
             <tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 1}}</tool_call>",
        );
        let form = form.unwrap();
        let want =
            CanonicalForm::from_message(&Message::calls("So", vec![call("", r#"{"a": 1.0}"#)]));
        assert_eq!((form.loose, form.exact, form.calls), (want.loose, want.exact, want.calls));
        assert_eq!((form.reasoning.as_deref(), form.ids), (Some("hm"), vec![]));
        let calls =
            parse_form("So <tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 1}}</tool_call>")
                .unwrap();
        assert_eq!((calls.loose, calls.reasoning), (want.loose, None));
        assert_eq!(
            CanonicalForm::parse_content(&Message::user("<think>hm</think>"), &chat, &[]),
            None
        );
        let unclosed = parse_form("<think>hm").unwrap();
        assert!(unclosed.reasoning.as_deref() == Some("hm") && !unclosed.has_content);
    }
}
