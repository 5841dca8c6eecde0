//! Tests of conversations in common formats of tool calls, with templates that render calls
//! themselves.

use std::sync::Arc;

use levade_policy::SamplingParams;
use levade_text::testing::{family_chat, protocols};
use levade_text::{ChatOptions, Message, ToolCall};
use serde_json::json;

use crate::testing::{Talk, completion, tool};
use crate::{CallIds, Format, History, Options, Origin};

#[test]
fn all_call_formats_continue_as_rendered_by_template() {
    for protocol in protocols() {
        let chat = Arc::new(family_chat(protocol, ChatOptions::default()).unwrap());
        for (history, call_ids) in [
            (History::Append, CallIds::PerCompletion),
            (History::Append, CallIds::Unique),
            (History::Template, CallIds::Unique),
        ] {
            let options = Options { history, call_ids, ..Options::default() };
            let mut talk = Talk::with(Arc::new(Format::new(chat.clone(), options)));
            talk.tools = vec![tool("add")];
            let mut messages = vec![Message::user("1+1?")];
            for round in 0..2 {
                let prepared = talk.prepare(&messages);
                if round > 0 {
                    assert_eq!(prepared.origin, Origin::Continued, "{protocol:?}");
                }
                let arguments = json!({ "a": round }).as_object().cloned().unwrap();
                let call =
                    ToolCall { id: "x".into(), name: "add".into(), arguments: arguments.into() };
                let shown = chat.assistant(&Message::calls("", vec![call]), None).unwrap();
                // Models number the calls of the complete conversation in the ids that they write.
                let written = chat.tokenizer().decode_with_special(&shown);
                let written = written.replace("functions.add:0", &format!("functions.add:{round}"));
                let written = written.replace("call00000", &format!("call0000{round}"));
                let sampled_tokens = chat.tokenizer().encode_template(&written);
                let params = SamplingParams::default();
                let recorded_completion = talk
                    .conversation
                    .record(prepared, completion(sampled_tokens), &params)
                    .unwrap();
                assert_eq!(recorded_completion.message().tool_calls.len(), 1, "{protocol:?}");
                let id = recorded_completion.message().tool_calls[0].id.clone();
                let result = Message {
                    tool_call_id: Some(id),
                    name: Some("add".into()),
                    ..Message::tool("2")
                };
                messages.extend([recorded_completion.message(), result]);
            }
            let prepared = talk.prepare(&messages);
            assert_eq!(prepared.origin, Origin::Continued, "{protocol:?}");
            let printed = chat.prompt(&messages, &talk.tools).unwrap();
            let text = |ids: &[u32]| talk.text(ids);
            assert_eq!(text(&prepared.prompt), text(&printed), "{protocol:?}");
        }
    }
}
