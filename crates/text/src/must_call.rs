//! Grammars of replies that must call a tool.

use serde_json::{Value, json};

use crate::{Chat, ToolProtocol, ToolSpec};

impl Chat {
    /// A grammar, in the Lark dialect of llguidance, of replies that are calls of these tools and nothing
    /// else: one call, or `several`. `None` where calls are in a format of which no grammar is known here, or
    /// where there is no tool.
    pub fn must_call(&self, tools: &[ToolSpec], several: bool) -> Option<String> {
        if self.format.protocol() != ToolProtocol::Hermes || tools.is_empty() {
            return None;
        }
        let call = |tool: &ToolSpec| {
            let arguments = match &tool.parameters {
                schema @ Value::Object(_) => schema.clone(),
                _ => json!({ "type": "object" }),
            };
            json!({
                "type": "object",
                "properties": { "name": { "const": tool.name }, "arguments": arguments },
                "required": ["name", "arguments"],
                "additionalProperties": false,
            })
        };
        // A model in doubt would write white space for ever.
        let schema = json!({
            "anyOf": tools.iter().map(call).collect::<Vec<_>>(),
            "x-guidance": { "whitespace_flexible": false, "item_separator": ", ", "key_separator": ": " },
        });
        let tag = |text: &str| match self.tokenizer().special(text) {
            Some(_) => text.to_owned(),
            None => format!("\"{text}\""),
        };
        let (open, close) = (tag("<tool_call>"), tag("</tool_call>"));
        let more = if several { "(\"\\n\" call)*" } else { "" };
        Some(format!(
            "start: call {more}\ncall: {open} \"\\n\" object \"\\n\" {close}\nobject: %json {schema}\n"
        ))
    }
}

#[cfg(test)]
mod tests {
    use dressage_policy::{Grammar, Grammars};

    use super::*;
    use crate::testing::tiny_chat;
    use crate::{ToolCall, Vocabulary};

    fn tool(name: &str, field: &str) -> ToolSpec {
        let parameters = json!({
            "type": "object",
            "properties": { field: { "type": "integer" } },
            "required": [field],
            "additionalProperties": false,
        });
        ToolSpec { name: name.into(), description: String::new(), parameters }
    }

    /// Whether a text keeps to a grammar, and may end where it ends.
    fn keeps(grammar: &str, text: &str) -> bool {
        let chat = tiny_chat().unwrap();
        let vocabulary = Vocabulary::new(chat.tokenizer());
        let mut constraint = vocabulary.start(&Grammar::Lark(grammar.to_owned())).unwrap();
        for id in chat.tokenizer().encode(text) {
            if !constraint.allowed().is_ok_and(|allowed| allowed.tokens.contains(id)) {
                return false;
            }
            constraint.push(id).unwrap();
        }
        constraint.allowed().is_ok_and(|allowed| allowed.may_end)
    }

    #[test]
    fn what_keeps_to_the_grammar_reads_as_calls() {
        let chat = tiny_chat().unwrap();
        let tools = [tool("add", "a"), tool("wait", "seconds")];
        let several = chat.must_call(&tools, true).unwrap();
        let one = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 12}}\n</tool_call>";
        let other = "<tool_call>\n{\"name\": \"wait\", \"arguments\": {\"seconds\": -1}}\n</tool_call>";
        let both = [one, other].join("\n");
        assert!(keeps(&several, one) && keeps(&several, &both));
        let read = chat.parse(&both, false, &tools).calls;
        let names: Vec<String> =
            read.into_iter().map(|call: Result<ToolCall, _>| call.unwrap().name).collect();
        assert_eq!(names, ["add", "wait"]);
        let single = chat.must_call(&tools[..1], false).unwrap();
        assert!(keeps(&single, one) && !keeps(&single, other) && !keeps(&single, &both));
        for text in ["", "Hello", &one[..20], &one.replace("\"a\"", "\"b\""), &one.replace("12", "\"x\"")] {
            assert!(!keeps(&several, text), "{text}");
        }
        assert_eq!(chat.must_call(&[], true), None);
    }
}
