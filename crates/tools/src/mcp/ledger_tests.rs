use rmcp::model::{
    CallToolRequest, CallToolRequestParams, DiscoverRequest, DiscoverRequestParams,
    InitializeRequest, InitializeRequestParams, ListToolsRequest,
};

use super::*;

/// Creates a ledger in which calls with these ids are pending.
fn ledger_with_calls(ids: &[i64]) -> RequestLedger {
    let ledger = RequestLedger::default();
    for id in ids {
        let call = CallToolRequest::new(CallToolRequestParams::new("x"));
        register(&ledger, ClientRequest::CallToolRequest(call), *id);
    }
    ledger
}

fn register(ledger: &RequestLedger, request: ClientRequest, id: i64) {
    ledger.register(&ClientJsonRpcMessage::request(request, RequestId::Number(id)));
}

/// Returns each response as its id with the result of the call, or with the error's message.
fn read(
    ledger: &RequestLedger,
    text: &[u8],
    request: Option<i64>,
) -> Vec<(i64, Result<Value, String>)> {
    let messages = ledger.read(text, request.map(RequestId::Number).as_ref());
    let each = messages.into_iter().filter_map(|message| match message {
        JsonRpcMessage::Response(response) => {
            let ServerResult::CallToolResult(result) = response.result else {
                panic!("{:?}", response.result)
            };
            Some((
                number(&response.id),
                Ok(result.structured_content.unwrap()[RAW_RESULT_KEY].clone()),
            ))
        }
        JsonRpcMessage::Error(error) => {
            Some((number(error.id.as_ref().unwrap()), Err(error_text(&error.error))))
        }
        _ => None,
    });
    each.collect()
}

fn number(id: &RequestId) -> i64 {
    match id {
        RequestId::Number(id) => *id,
        RequestId::String(id) => panic!("{id}"),
    }
}

#[test]
fn json_rpc_responses_are_accepted_in_all_formats() {
    let result = json!({ "content": [], "structuredContent": { "x": null } });
    for text in [
        r#"{"jsonrpc":"2.0","id":7,"result":{"content":[],"structuredContent":{"x":NaN}}}"#,
        r#"{"id":7,"result":{"content":[],"structuredContent":{"x":null}}}"#,
        r#"{"jsonrpc":"2.0","id":"7","result":{"content":[],"structuredContent":{"x":null}}}"#,
        r#"[{"jsonrpc":"2.0","id":7,"result":{"content":[],"structuredContent":{"x":null}}}]"#,
        r#"{"jsonrpc":"2.0","id":7.0,"result":{"content":[],"structuredContent":{"x":null}}}"#,
        r#"{"jsonrpc":"2.0","id":7,"result":{"content":[],"structuredContent":{"x":null}}}{"method":"x"}"#,
        r#"{"jsonrpc":"1.0","id":7,"error":null,"result":{"content":[],"structuredContent":{"x":-Infinity}}}"#,
    ] {
        let ledger = ledger_with_calls(&[6, 7]);
        assert_eq!(read(&ledger, text.as_bytes(), None), [(7, Ok(result.clone()))], "{text}");
        assert!(
            !ledger.is_pending(&RequestId::Number(7)) && ledger.is_pending(&RequestId::Number(6))
        );
    }
    let found = read(&ledger_with_calls(&[7]), br#"{"jsonrpc":"2.0","result":"no id"}"#, None);
    assert_eq!(found, [(7, Ok(json!("no id")))]);
    assert_eq!(
        read(&ledger_with_calls(&[6, 7]), br#"{"jsonrpc":"2.0","result":"no id"}"#, None),
        []
    );
    let ledger = ledger_with_calls(&[1]);
    let two = r#"{"jsonrpc":"2.0","id":1,"result":"one"}"#;
    assert_eq!(read(&ledger, two.as_bytes(), None), [(1, Ok(json!("one")))]);
    assert_eq!(read(&ledger, two.as_bytes(), None), [], "a second response is dropped");
}

#[test]
fn unreadable_response_fails_request() {
    let deep =
        format!(r#"{{"jsonrpc":"2.0","id":7,"result":{}1{}}}"#, "[".repeat(3000), "]".repeat(3000));
    let nested =
        format!(r#"{{"jsonrpc":"2.0","id":7,"result":{}1{}}}"#, "[".repeat(110), "]".repeat(110));
    for (text, why) in [
        (
            r#"{"jsonrpc":"2.0","id":7,"result":{"content":[{"#,
            "not JSON: EOF while parsing an object at column 46",
        ),
        (
            r#"{"jsonrpc":"2.0","id":7,"result":{"a":Nope}}"#,
            "not JSON: expected value at column 39",
        ),
        (
            r#"{"result":{"id":6,"a":},"jsonrpc":"2.0","id":7}"#,
            "not JSON: expected value at column 23",
        ),
        (deep.as_str(), "not JSON: recursion limit exceeded"),
        (nested.as_str(), "nested 110 deep"),
    ] {
        let ledger = ledger_with_calls(&[7]);
        let found = read(&ledger, text.as_bytes(), None);
        let [(7, Err(found))] = &found[..] else { panic!("{text}: {found:?}") };
        assert!(found.contains(why), "{found}");
    }
    let spread = "{\n  \"jsonrpc\": \"2.0\",\n  \"id\": 7,\n  \"result\": {}\n}";
    let ledger = ledger_with_calls(&[7]);
    let found: Vec<_> =
        spread.lines().flat_map(|line| read(&ledger, line.as_bytes(), None)).collect();
    let [(7, Err(why))] = &found[..] else { panic!("{found:?}") };
    assert!(why.contains("each message must be one line"), "{why}");
}

#[test]
fn json_rpc_errors_are_accepted_in_all_formats() {
    for (error, want) in [
        (r#"{"code":-1}"#, "an error without a message, code -1"),
        (
            r#"{"code":-1,"message":null,"data":{"a":1}}"#,
            "an error without a message, code -1 ({\"a\":1})",
        ),
        (r#""boom""#, "boom"),
        (r#"["a"]"#, "[\"a\"]"),
        (r#"{"message":{"text":"x"}}"#, "{\"text\":\"x\"}"),
        (
            r#"{"detail":"no key"}"#,
            "an error without a message, code null ({\"detail\":\"no key\"})",
        ),
        (r#"{"code":"-32602","message":"bad"}"#, "bad"),
        (r#"{"code":1e300,"message":"bad"}"#, "bad"),
        (
            r#"{"code":-32000,"message":"Rate limit","data":{"retry":5}}"#,
            "Rate limit ({\"retry\":5})",
        ),
        (r#"{"code":-32000,"message":"no city Rom","data":"Rom"}"#, "no city Rom"),
    ] {
        for id in ["7", "\"7\"", "null", "\"server-error\""] {
            let text = format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{error}}}"#);
            assert_eq!(
                read(&ledger_with_calls(&[7]), text.as_bytes(), None),
                [(7, Err(want.to_owned()))],
                "{text}"
            );
        }
        let text = format!(r#"{{"error":{error}}}"#);
        assert_eq!(
            read(&ledger_with_calls(&[6, 7]), text.as_bytes(), Some(7)),
            [(7, Err(want.to_owned()))]
        );
    }
}

#[test]
fn log_output_does_not_complete_pending_request() {
    for text in [
        "Server running on stdio",
        "",
        "[1,2]",
        "\"str\"",
        "42",
        "{}",
        "null",
        "Response: [",
        "{\"level\":\"info\",\"msg\":\"x\"}",
        "{\"level\":\"info\",\"msg\":",
        "{\"level\":\"error\",\"error\":\"cache miss\"}",
        "{\"result\":\"ok\"}",
        "{",
        "\u{1b}[32mReady\u{1b}[0m",
        r#"{"jsonrpc":"2.0","id":9999,"result":{}}"#,
        r#"{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":"x"}}"#,
        r#"{"jsonrpc":"2.0","method":"notifications/nonsense","params":5}"#,
    ] {
        let ledger = ledger_with_calls(&[7]);
        assert_eq!(read(&ledger, text.as_bytes(), None), [], "{text}");
        assert!(ledger.is_pending(&RequestId::Number(7)), "{text}");
    }
}

#[test]
fn defective_response_fails_only_pending_request() {
    for (text, why) in [
        (
            r#"{"jsonrpc":"2.0","id":9999,"result":{}}"#,
            "the server's response has the id 9999, which no request had",
        ),
        (r#"{"jsonrpc":"2.0","id":"abc","result":{}}"#, "the server's response has the id \"abc\""),
        (
            r#"answering: {"jsonrpc":"2.0","id":7,"result":{}}"#,
            "the server's response is not JSON: expected value",
        ),
        (
            "{'jsonrpc': '2.0', 'id': 7, 'result': {}}",
            "the server's response is not JSON: key must be a string",
        ),
        ("{\0\"\0j\0s\0o\0n\0r\0p\0c\0\"\0:\0", "the server's response is not JSON"),
    ] {
        let ledger = ledger_with_calls(&[7]);
        assert_eq!(read(&ledger, text.as_bytes(), None), [], "{text}");
        assert!(ledger.is_doubtful(), "{text}");
        let Some(JsonRpcMessage::Error(error)) = ledger.fail_doubtful() else { panic!("{text}") };
        assert_eq!(error.id, Some(RequestId::Number(7)));
        assert!(error.error.message.contains(why), "{}", error.error.message);
        assert!(!ledger.is_doubtful());
        let ledger = ledger_with_calls(&[7]);
        read(&ledger, text.as_bytes(), None);
        let responses = read(&ledger, br#"{"jsonrpc":"2.0","id":7,"result":"late"}"#, None);
        assert_eq!(
            (responses, ledger.is_doubtful()),
            (vec![(7, Ok(json!("late")))], false),
            "{text}"
        );
        let ledger = ledger_with_calls(&[6, 7]);
        read(&ledger, text.as_bytes(), None);
        assert!(
            ledger.fail_doubtful().is_none(),
            "of two requests neither is known to be meant: {text}"
        );
    }
    for text in [
        r#"{"jsonrpc":"2.0","id":6,"result":{}}"#,
        r#"got {"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"q":"error"}}"#,
        "an error",
    ] {
        let ledger = ledger_with_calls(&[7]);
        read(&ledger, text.as_bytes(), None);
        assert!(!ledger.is_doubtful(), "{text}");
    }
    let empty = read(&ledger_with_calls(&[7]), br#"{"jsonrpc":"2.0","id":7}"#, None);
    let [(7, Err(why))] = &empty[..] else { panic!("{empty:?}") };
    assert!(why.contains("the server's response has no result"), "{why}");
    let echoed = read(
        &ledger_with_calls(&[7]),
        br#"{"jsonrpc":"2.0","id":7,"method":"tools/call","result":1}"#,
        None,
    );
    assert_eq!(echoed, [(7, Ok(json!(1)))]);
}

#[test]
fn oversized_line_fails_request() {
    let ledger = ledger_with_calls(&[6, 7]);
    assert_eq!(ledger.fail_oversized(br#"{"jsonrpc":"2.0","id":7,"result":"zzz"#, 9).len(), 1);
    assert!(ledger.is_pending(&RequestId::Number(6)) && !ledger.is_pending(&RequestId::Number(7)));
    assert_eq!(ledger_with_calls(&[6, 7]).fail_oversized(b"zzzz", 9).len(), 2);
}

#[test]
fn tools_without_schema_take_no_arguments() {
    let ledger = RequestLedger::default();
    register(&ledger, ClientRequest::ListToolsRequest(ListToolsRequest::default()), 3);
    let tools = json!([
        { "name": "a", "inputSchema": null },
        { "name": "b", "description": 5, "title": "B", "annotations": "none", "outputSchema": [] },
        { "name": "c", "description": "C", "inputSchema": { "type": "object", "properties": { "q": {} } } },
        { "description": "no name" },
        { "name": "" },
        { "name": "d", "inputSchema": "text" },
    ]);
    let text = json!({ "id": 3, "result": { "tools": tools, "nextCursor": 2 } }).to_string();
    let [JsonRpcMessage::Response(response)] = &ledger.read(text.as_bytes(), None)[..] else {
        panic!()
    };
    let ServerResult::ListToolsResult(list) = &response.result else { panic!() };
    let seen: Vec<(&str, Option<&str>, usize)> = list
        .tools
        .iter()
        .map(|tool| {
            let properties = tool.input_schema["properties"].as_object().map_or(0, Map::len);
            (&*tool.name, tool.description.as_deref(), properties)
        })
        .collect();
    assert_eq!(seen, [("a", None, 0), ("b", Some("B"), 0), ("c", Some("C"), 1), ("d", None, 0)]);
    assert_eq!(list.next_cursor.as_deref(), Some("2"), "a cursor that is a number");
    for result in ["{}", "null", "[]", "\"a\"", "5", r#"{"tools":{"a":{}}}"#, r#"{"tools":null}"#] {
        register(&ledger, ClientRequest::ListToolsRequest(ListToolsRequest::default()), 4);
        let text = format!(r#"{{"jsonrpc":"2.0","id":4,"result":{result}}}"#);
        let [JsonRpcMessage::Error(error)] = &ledger.read(text.as_bytes(), None)[..] else {
            panic!()
        };
        assert!(error.error.message.contains("no list `tools`"), "{result}: {error:?}");
    }
}

#[test]
fn message_without_id_is_ignored_if_ambiguous() {
    for text in [
        r#"{"jsonrpc":"2.0","id":null,"result":"of whom"}"#,
        r#"{"jsonrpc":"2.0","result":"of whom"}"#,
        r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"of whom"}}"#,
    ] {
        let ledger = ledger_with_calls(&[6, 7]);
        assert_eq!(read(&ledger, text.as_bytes(), None), [], "{text}");
        assert!(ledger.fail_doubtful().is_none(), "{text}");
        // The response to a cancelled request may arrive late.
        let cancellation =
            rmcp::model::CancelledNotificationParam::new(Some(RequestId::Number(6)), None);
        let cancellation = rmcp::model::CancelledNotification::new(cancellation);
        ledger.register(&ClientJsonRpcMessage::notification(cancellation.into()));
        assert_eq!(read(&ledger, text.as_bytes(), None), [], "{text}");
        let Some(JsonRpcMessage::Error(error)) = ledger.fail_doubtful() else { panic!("{text}") };
        assert!(error.error.message.contains("the server's response has no id"), "{error:?}");
    }
}

#[test]
fn unreadable_server_request_gets_unknown_method() {
    for (text, id) in [
        (r#"{"jsonrpc":"2.0","id":5,"method":"sampling/createMessage","params":[1]}"#, Some(5)),
        (r#"{"jsonrpc":"2.0","id":5,"method":"elicitation/create","params":"x"}"#, Some(5)),
        (r#"{"jsonrpc":"2.0","id":null,"method":"sampling/createMessage","params":[1]}"#, None),
        (r#"{"jsonrpc":"2.0","method":"notifications/progress","params":[1]}"#, None),
    ] {
        let read = ledger_with_calls(&[7]).read(text.as_bytes(), None);
        let ids = read.iter().filter_map(|message| match message {
            JsonRpcMessage::Request(request) => Some(request.id.clone()),
            _ => None,
        });
        assert_eq!(
            ids.collect::<Vec<_>>(),
            Vec::from_iter(id.map(RequestId::Number)),
            "{text}: {read:?}"
        );
    }
}

#[test]
fn discovery_of_unsupported_version_leads_to_handshake() {
    for versions in [r#"["2025-06-18"]"#, "[]", r#"["2099-01-01"]"#] {
        let ledger = RequestLedger::default();
        let discovery = DiscoverRequest::new(DiscoverRequestParams {});
        register(&ledger, ClientRequest::DiscoverRequest(discovery), 0);
        let text = format!(
            r#"{{"jsonrpc":"2.0","id":0,"result":{{"supportedVersions":{versions},"capabilities":{{}},"serverInfo":{{"name":"s","version":"1"}},"resultType":"complete","ttlMs":0,"cacheScope":"private"}}}}"#
        );
        let [JsonRpcMessage::Error(error)] = &ledger.read(text.as_bytes(), None)[..] else {
            panic!()
        };
        assert_eq!(
            (error.error.code, ledger.rejection()),
            (ErrorCode::METHOD_NOT_FOUND, None),
            "{versions}"
        );
    }
}

#[test]
fn describe_activity_reports_noise_and_waits() {
    let ledger = RequestLedger::default();
    ledger.read(b"listening", None);
    let call = CallToolRequest::new(CallToolRequestParams::new("x"));
    register(&ledger, ClientRequest::CallToolRequest(call), 7);
    assert_eq!(ledger.describe_activity(), "");
    ledger.read(b"ValueError: it broke\n", None);
    assert_eq!(
        ledger.describe_activity(),
        "; the server's last output is not a response: \"ValueError: it broke\""
    );
    ledger.note_wait("the server responds with HTTP 503".into());
    assert_eq!(ledger.describe_activity(), "; the server responds with HTTP 503");
}

#[test]
fn rejected_handshake_keeps_reason() {
    for (answer, want) in [
        (
            r#"{"id":2,"error":{"code":-32602,"message":"Unsupported protocol version","data":{"supported":["2024-11-05"]}}}"#,
            Some("Unsupported protocol version ({\"supported\":[\"2024-11-05\"]})"),
        ),
        (r#"{"id":2,"result":{"capabilities":{}}}"#, Some("the result has no `protocolVersion`")),
        (r#"{"jsonrpc":"2.0","id":2,"result":"#, Some("the server's response is not JSON")),
        (
            r#"{"id":2,"result":{"protocolVersion":"2025-06-18","capabilities":{"tools":true}}}"#,
            None,
        ),
        (r#"{"id":2,"result":{"protocolVersion":"2025-06-18"}}"#, None),
    ] {
        let ledger = RequestLedger::default();
        register(&ledger, initialize_request(), 2);
        let read = ledger.read(answer.as_bytes(), None);
        match want {
            Some(want) => {
                assert!(ledger.rejection().unwrap().contains(want), "{:?}", ledger.rejection())
            }
            None => assert!(matches!(read[..], [JsonRpcMessage::Response(_)]), "{read:?}"),
        }
        register(&ledger, initialize_request(), 3);
        assert_eq!(ledger.rejection(), None, "a new handshake forgets it");
    }
}

fn initialize_request() -> ClientRequest {
    let params = InitializeRequestParams::new(
        Default::default(),
        rmcp::model::Implementation::new("x", "1"),
    );
    ClientRequest::InitializeRequest(InitializeRequest::new(params))
}

#[test]
fn late_discovery_response_does_not_complete_handshake() {
    let params = InitializeRequestParams::new(
        Default::default(),
        rmcp::model::Implementation::new("x", "1"),
    );
    for (late, is_newer) in [
        (r#"{"jsonrpc":"2.0","id":0,"result":{"supportedVersions":["2026-07-28"]}}"#, true),
        (r#"{"jsonrpc":"2.0","id":0,"error":{"code":-32601,"message":"no such method"}}"#, false),
    ] {
        let ledger = RequestLedger::default();
        register(&ledger, discovery_request(), 0);
        register(
            &ledger,
            ClientRequest::InitializeRequest(InitializeRequest::new(params.clone())),
            1,
        );
        assert!(ledger.read(late.as_bytes(), None).is_empty());
        assert!(ledger.is_pending(&RequestId::Number(1)) && !ledger.is_doubtful());
        assert_eq!(ledger.was_discovered_late(), is_newer);
    }
}

fn discovery_request() -> ClientRequest {
    ClientRequest::DiscoverRequest(DiscoverRequest::new(DiscoverRequestParams {}))
}

#[test]
fn tool_list_change_is_reported_once() {
    let ledger = RequestLedger::default();
    assert!(!ledger.take_list_changed());
    ledger.read(br#"{"method":"notifications/tools/list_changed"}"#, None);
    assert!(ledger.take_list_changed());
    assert!(!ledger.take_list_changed());
}
