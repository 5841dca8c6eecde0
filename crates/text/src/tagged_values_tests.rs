//! Tests of calls whose arguments are tagged values.

use super::*;

/// Returns a tool whose parameters have types behind references and combinators.
fn referring() -> [ToolSpec; 1] {
    let parameters = json!({
        "type": "object",
        "properties": {
            "code": { "$ref": "#/$defs/Code" },
            "maybe": { "anyOf": [{ "$ref": "#/$defs/Code" }, { "type": "null" }] },
            "every": { "allOf": [{ "$ref": "#/$defs/Code" }], "description": "d" },
            "count": { "$ref": "#/$defs/Count" },
            "days": { "anyOf": [{ "type": "integer" }, { "type": "null" }] },
            "list": { "type": "array", "items": { "$ref": "#/$defs/Code" } },
            "map": { "type": "object" },
            "share": { "type": "number" },
            "on": { "type": "boolean" },
            "free": {},
        },
        "$defs": { "Code": { "type": "string", "enum": ["1", "true"] }, "Count": { "type": "integer" } },
    });
    [ToolSpec { name: "search".into(), description: String::new(), parameters }]
}

#[test]
fn tagged_values_are_typed_by_schema() {
    let tools = referring();
    let written = [
        (
            ToolProtocol::QwenXml,
            "<tool_call>\n<function=search>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            ToolProtocol::Glm,
            "<tool_call>search\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
        ),
        (
            ToolProtocol::Minimax,
            "<minimax:tool_call>\n<invoke name=\"search\">\n\
             <parameter name=\"KEY\">VALUE</parameter>\n</invoke>\n</minimax:tool_call>",
        ),
    ];
    for (key, value, want) in [
        ("code", "1", Some(json!("1"))),
        ("code", "true", Some(json!("true"))),
        ("code", "", Some(json!(""))),
        ("maybe", "1", Some(json!("1"))),
        ("maybe", "null", Some(json!(null))),
        ("every", "1", Some(json!("1"))),
        ("count", "7", Some(json!(7))),
        ("count", "7.0", Some(json!(7))),
        ("count", "+7", Some(json!(7))),
        ("count", "", None),
        ("count", "NaN", Some(json!("NaN"))),
        ("days", "None", Some(json!(null))),
        ("days", "", None),
        ("list", "['1', 'true']", Some(json!(["1", "true"]))),
        ("list", "[\"1\"]", Some(json!(["1"]))),
        ("list", "", None),
        ("map", "{'a': True, 'b': None}", Some(json!({ "a": true, "b": null }))),
        ("map", "{'a': ", Some(json!("{'a': "))),
        ("share", ".5", Some(json!(0.5))),
        ("share", "1e3", Some(serde_json::from_str("1e3").unwrap())),
        ("on", "True", Some(json!(true))),
        ("on", "FALSE", Some(json!(false))),
        ("free", "42", Some(json!(42))),
        ("free", "['a']", Some(json!("['a']"))),
        ("other", "42", Some(json!(42))),
        ("other", "", Some(json!(""))),
    ] {
        for (protocol, text) in written {
            let completion = text.replace("KEY", key).replace("VALUE", value);
            let read = chat(protocol).parse(&completion, false, &tools).calls;
            let found = read[0].as_ref().unwrap().arguments.get(key).cloned();
            assert_eq!((read.len(), found), (1, want.clone()), "{protocol:?}: {completion}");
        }
    }
}

#[test]
fn tagged_values_may_contain_parameter_tags() {
    for value in [
        "code: </parameter> tag",
        "use <parameter=x> here",
        "use <parameter=count> here",
        "a\n<parameter=x>\n1\n</parameter>\nb",
        "return '</function>'",
        "</parameter>",
        "a < b && c > d",
        "&lt;x&gt;",
        "\n  indented\n",
        "call <function=search> then",
        "a\n<function=search>\nb",
        "a <tool_call> begins, a </tool_call> ends",
        "write `<function=search>\n<parameter=code>\n1\n</parameter> and\n</function> so`",
    ] {
        assert_eq!(
            parse_only_call(ToolProtocol::QwenXml, &qwen_call(value)),
            Ok(json!({ "code": value })),
            "{value}"
        );
    }
    for value in [
        "code: </parameter> tag",
        "use <parameter name=\"x\"> here",
        "</parameter>",
        "a\n",
        "use <invoke name=\"search\"> and </invoke> here",
    ] {
        assert_eq!(
            parse_only_call(ToolProtocol::Minimax, &minimax_call(value)),
            Ok(json!({ "code": value })),
            "{value}"
        );
    }
    for value in [
        "code: </arg_value> tag",
        "</arg_value>",
        "<arg_value>x",
        "see <arg_key> and <arg_key>x</arg_key>",
        "a\n",
        "a <tool_call> and a </tool_call> tag",
    ] {
        assert_eq!(
            parse_only_call(ToolProtocol::Glm, &glm_call(value)),
            Ok(json!({ "code": value })),
            "{value}"
        );
    }
    let inner = |body: &str| format!("<tool_call>\n{body}\n</tool_call>");
    for (body, want) in [
        (
            "<function=\"search\">\n<parameter=\"code\">\n1\n</parameter>\n</function>",
            Ok(json!({ "code": "1" })),
        ),
        ("<function='search'>\n</function>", Ok(json!({}))),
        // An unclosed parameter ends where a line starts with the next one.
        (
            "<function=search>\n<parameter=code>\n1\n<parameter=count>\n2\n</parameter>\n</function>",
            Ok(json!({ "code": "1", "count": 2 })),
        ),
        // An unclosed last parameter may be truncated.
        ("<function=search>\n<parameter=code>\n1\n</function>", Err(())),
        ("<function=search>\n<parameter=code>\n1", Err(())),
        ("<function=search>\n<parameter=code>\n1\n</parameter>", Ok(json!({ "code": "1" }))),
        ("{\"name\": \"search\", \"arguments\": {\"code\": \"1\"}}", Ok(json!({ "code": "1" }))),
        ("<function=search>\n<parameter=code>\n1\n</parameter> junk\n</function>", Err(())),
        ("<function=search>\njunk\n</function>", Err(())),
        ("<function=>\n</function>", Err(())),
        // A name that does not end before the ">" of the next tag.
        ("<function=search\n<parameter=code>\n1\n</parameter>\n</function>", Err(())),
        ("<function=search>\n<parameter=code\n1\n</parameter>\n</function>", Err(())),
        ("<function=search>\n<parameter=>\n1\n</parameter>\n</function>", Err(())),
        ("{\"name\": 7}", Err(())),
    ] {
        assert_eq!(
            parse_only_call(ToolProtocol::QwenXml, &inner(body)).map_err(drop),
            want,
            "{body}"
        );
    }
    // An unclosed call ends where the next one starts.
    for between in ["</parameter>\n</function>\n", "</parameter>\n", "</function>\n"] {
        let one = "<function=search>\n<parameter=code>\n1\n";
        let completion = format!("{one}{between}{one}</parameter>\n</function>");
        let calls = chat(ToolProtocol::QwenXml).parse(&completion, false, &referring()).calls;
        assert_eq!(calls.len(), 2, "{completion}");
        assert!(calls[1].is_ok(), "{completion}");
    }
    // A truncated completion is not a call.
    for truncated in [
        "<tool_call>\n<function=search>\n<parameter=code>\n1",
        "<tool_call>\n<function=search>\n<parameter=code>\n1\n</parameter>\n",
    ] {
        assert!(parse_only_call(ToolProtocol::QwenXml, truncated).is_err(), "{truncated}");
    }
    let spoken = glm_call("<arg_key>")
        .replace("</tool_call>", "<arg_key>count</arg_key>\n<arg_value>2</arg_value></tool_call>");
    assert_eq!(
        parse_only_call(ToolProtocol::Glm, &spoken),
        Ok(json!({ "code": "<arg_key>", "count": 2 }))
    );
    let named =
        "<tool_call>\"search\"\n<arg_key>'code'</arg_key>\n<arg_value>1</arg_value>\n</tool_call>";
    assert_eq!(parse_only_call(ToolProtocol::Glm, named), Ok(json!({ "code": "1" })));
    let json = "<tool_call>{\"name\": \"search\", \"arguments\": {\"code\": \"1\"}}</tool_call>";
    assert_eq!(parse_only_call(ToolProtocol::Glm, json), Ok(json!({ "code": "1" })));
    assert!(parse_only_call(ToolProtocol::Glm, "<tool_call>search\n<arg_key>a</arg_key>\n<arg_value>1</arg_value> junk <arg_key>b</arg_key>\n<arg_value>2</arg_value></tool_call>").is_err());
}

fn qwen_call(value: &str) -> String {
    format!(
        "<tool_call>\n<function=search>\n<parameter=code>\n{value}\n</parameter>\n</function>\n</tool_call>"
    )
}

fn minimax_call(value: &str) -> String {
    format!(
        "<minimax:tool_call>\n<invoke name=\"search\">\n\
             <parameter name=\"code\">{value}</parameter>\n</invoke>\n</minimax:tool_call>"
    )
}

fn glm_call(value: &str) -> String {
    format!(
        "<tool_call>search\n<arg_key>code</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
    )
}

fn parse_only_call(protocol: ToolProtocol, completion: &str) -> Result<Value, String> {
    let calls = chat(protocol).parse(completion, false, &referring()).calls;
    assert_eq!(calls.len(), 1, "{completion}");
    calls
        .into_iter()
        .next()
        .unwrap()
        .map(|call| Value::from(call.arguments))
        .map_err(|call| call.why)
}

#[test]
fn call_grammar_enforces_schemas_with_references() {
    use levade_policy::{Grammar, Grammars};

    let parameters = json!({
        "type": "object",
        "properties": { "at": { "$ref": "#/$defs/Point" }, "other": { "anyOf": [{ "$ref": "#/$defs/Point" }, { "type": "null" }] },
                        "tags": { "type": "array", "items": { "type": "string" }, "uniqueItems": true } },
        "required": ["at"], "additionalProperties": false,
        "$defs": { "Point": { "type": "object", "properties": { "x": { "type": "integer" } }, "required": ["x"], "additionalProperties": false } },
    });
    let tools = [ToolSpec { name: "search".into(), description: String::new(), parameters }];
    for protocol in protocols() {
        let chat = chat(protocol);
        let grammar = chat.must_call(&tools, false).unwrap();
        let omitted: Vec<(&str, &str, &str)> = grammar
            .omitted
            .iter()
            .map(|found| (&*found.tool, &*found.path, &*found.keyword))
            .collect();
        assert_eq!(omitted, [("search", "/properties/tags", "uniqueItems")], "{protocol:?}");
        let vocabulary = crate::Vocabulary::new(chat.tokenizer());
        let keeps = |arguments: Value| {
            let completion = chat.format.syntax().render_message("", &[call(arguments)]);
            let mut constraint = vocabulary.start(&Grammar::Lark(grammar.lark.clone())).unwrap();
            let follows = chat.tokenizer().encode_template(&completion).into_iter().all(|id| {
                let allows = constraint.allowed().is_ok_and(|allowed| allowed.tokens.contains(id));
                allows && constraint.push(id).is_ok()
            });
            follows && constraint.allowed().is_ok_and(|allowed| allowed.may_end)
        };
        assert!(keeps(json!({ "at": { "x": 1 } })), "{protocol:?}: {}", grammar.lark);
        assert!(
            keeps(json!({ "at": { "x": 1 }, "other": null, "tags": ["a", "a"] })),
            "{protocol:?}"
        );
        assert!(!keeps(json!({ "at": { "y": 1 } })), "{protocol:?}");
        assert!(!keeps(json!({ "at": { "x": 1 }, "other": 2 })), "{protocol:?}");
    }
}
