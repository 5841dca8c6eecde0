//! Grammars for completions that must call a tool.

use std::cell::RefCell;

use crate::calls::GrammarContext;
use crate::vocabulary::with_large_stack;
use crate::{Chat, OmittedKeyword, ToolSpec};

/// A grammar of completions that consist of tool calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallGrammar {
    /// Text of the grammar, in the Lark dialect of llguidance.
    pub lark: String,
    /// Keywords of the tools' schemas that the grammar does not enforce.
    pub omitted: Vec<OmittedKeyword>,
}

impl Chat {
    /// Returns a grammar of completions that consist only of calls of these tools: one call, or
    /// several calls if `several` is set and the call format allows it. Returns `None` if `tools`
    /// is empty, if the call format has no grammar, or if the compilation fails.
    ///
    /// This function compiles the tools' schemas and should not run on async workers. If a format
    /// writes arguments separately and untyped, the grammar allows the arguments that the schema
    /// names, in its order.
    pub fn must_call(&self, tools: &[ToolSpec], several: bool) -> Option<CallGrammar> {
        if tools.is_empty() {
            return None;
        }
        let compiled = with_large_stack(|| {
            let syntax = self.format.syntax();
            let omitted = RefCell::default();
            let forms = GrammarContext {
                tools,
                several,
                special: &|text| self.tokenizer().special(text),
                tags: syntax.syntax_tags().tags,
                omitted: &omitted,
            };
            let lark = syntax.call_grammar(&forms)?;
            Some(CallGrammar { lark, omitted: omitted.into_inner() })
        });
        compiled.ok().flatten()
    }
}

#[cfg(test)]
mod tests {
    use levade_policy::{Grammar, Grammars};
    use serde_json::{Value, json};

    use crate::testing::{family_chat, protocols, tiny_chat};
    use crate::{Chat, ChatOptions, ToolCall, ToolProtocol, ToolSpec, Vocabulary};

    fn tool(name: &str, field: &str) -> ToolSpec {
        let parameters = json!({
            "type": "object",
            "properties": { field: { "type": "integer" } },
            "required": [field],
            "additionalProperties": false,
        });
        ToolSpec { name: name.into(), description: String::new(), parameters }
    }

    /// Returns whether a text follows a grammar and may end there.
    fn keeps(chat: &Chat, grammar: &str, text: &str) -> bool {
        let vocabulary = Vocabulary::new(chat.tokenizer());
        let mut constraint = vocabulary.start(&Grammar::Lark(grammar.to_owned())).unwrap();
        for id in chat.tokenizer().encode_template(text) {
            if !constraint.allowed().is_ok_and(|allowed| allowed.tokens.contains(id)) {
                return false;
            }
            constraint.push(id).unwrap();
        }
        constraint.allowed().is_ok_and(|allowed| allowed.may_end)
    }

    #[test]
    fn text_that_follows_grammar_parses_as_calls() {
        let chat = tiny_chat().unwrap();
        let tools = [tool("add", "a"), tool("wait", "seconds")];
        let several = chat.must_call(&tools, true).unwrap().lark;
        let one = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 12}}\n</tool_call>";
        let other =
            "<tool_call>\n{\"name\": \"wait\", \"arguments\": {\"seconds\": -1}}\n</tool_call>";
        let both = [one, other].join("\n");
        assert!(keeps(&chat, &several, one) && keeps(&chat, &several, &both));
        let read = chat.parse(&both, false, &tools).calls;
        let names: Vec<String> =
            read.into_iter().map(|call: Result<ToolCall, _>| call.unwrap().name).collect();
        assert_eq!(names, ["add", "wait"]);
        let single = chat.must_call(&tools[..1], false).unwrap().lark;
        let keeps = |grammar: &str, text: &str| keeps(&chat, grammar, text);
        assert!(keeps(&single, one) && !keeps(&single, other) && !keeps(&single, &both));
        for text in
            ["", "Hello", &one[..20], &one.replace("\"a\"", "\"b\""), &one.replace("12", "\"x\"")]
        {
            assert!(!keeps(&several, text), "{text}");
        }
        assert_eq!(chat.must_call(&[], true), None);
    }

    /// Returns two tools with arguments of many types.
    fn tools() -> [ToolSpec; 2] {
        let parameters = json!({
            "type": "object",
            "properties": {
                "text": { "type": "string" },
                "limit": { "type": "integer" },
                "order": { "enum": ["up", "down"] },
                "filters": {
                    "type": "object",
                    "properties": { "new": { "type": "boolean" } },
                    "required": ["new"],
                },
            },
            "required": ["text", "limit"],
        });
        [
            ToolSpec { name: "search".into(), description: "Finds.".into(), parameters },
            tool("wait", "seconds"),
        ]
    }

    fn call(index: usize, name: &str, arguments: Value) -> ToolCall {
        let arguments = arguments.as_object().cloned().unwrap();
        ToolCall { id: format!("call_{index}"), name: name.into(), arguments: arguments.into() }
    }

    #[test]
    fn call_grammar_accepts_calls_in_every_format() {
        let searches = [
            json!({ "text": "a \"b\"\n<c>", "limit": 3 }),
            json!({ "text": "", "limit": -1, "order": "down", "filters": { "new": true } }),
        ];
        for protocol in protocols() {
            let chat = family_chat(protocol, ChatOptions::default()).unwrap();
            let tools = tools();
            let syntax = chat.format.syntax();
            let any = chat.must_call(&tools, false).unwrap().lark;
            let wait = chat.must_call(&tools[1..], false).unwrap().lark;
            let several = chat.must_call(&tools, true).unwrap().lark;
            for arguments in &searches {
                let calls = [call(0, "search", arguments.clone())];
                let text = syntax.render_message("", &calls);
                assert!(keeps(&chat, &any, &text), "{protocol:?}: {text}\n{any}");
                assert!(!keeps(&chat, &wait, &text), "{protocol:?}: {text}\n{wait}");
                let read = chat.parse(&text, false, &tools).calls;
                assert_eq!(
                    read[0].as_ref().map(|call| &call.arguments),
                    Ok(&calls[0].arguments),
                    "{text}"
                );
                let truncated = text.char_indices().nth_back(1).map_or(0, |(at, _)| at);
                for wrong in [&text[..truncated], "Hello", &text.replace("search", "find")] {
                    assert!(!keeps(&chat, &any, wrong), "{protocol:?}: {wrong}");
                }
            }
            let tag = syntax.syntax_tags().tags.first().copied().unwrap_or_default();
            let tagged = json!({ "text": format!("a {tag} b"), "limit": 3 });
            let text = syntax.render_message("", &[call(0, "search", tagged.clone())]);
            let read = chat.parse(&text, false, &tools).calls;
            let reads =
                matches!(&read[..], [Ok(call)] if call.arguments == *tagged.as_object().unwrap());
            assert!(reads || !keeps(&chat, &any, &text), "{protocol:?}: {text}");
            let untyped =
                syntax.render_message("", &[call(0, "wait", json!({ "seconds": "soon" }))]);
            assert!(!keeps(&chat, &wait, &untyped), "{protocol:?}: {untyped}");
            let both =
                [call(0, "wait", json!({ "seconds": 1 })), call(1, "search", searches[0].clone())];
            let text = syntax.render_message("", &both);
            assert!(!keeps(&chat, &any, &text), "{protocol:?}: {text}");
            // A gpt-oss completion ends with its first call.
            assert_eq!(
                keeps(&chat, &several, &text),
                protocol != ToolProtocol::Harmony,
                "{protocol:?}: {text}"
            );
        }
    }
}
