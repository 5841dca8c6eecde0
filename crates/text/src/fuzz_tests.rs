//! Fuzz tests with damaged completions and templates.
//!
//! For every completion, however it is split, the stream and the complete parse agree. For every
//! template, rendering ends, with a text or an error. `conformance/fuzz.py` runs these tests for
//! any duration, one parser after the other.

use std::sync::{Arc, OnceLock};

use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::{Map, Value, json};

use crate::calls::tests::tool;
use crate::completion_parser::ParserEvent;
use crate::reasoning_tags::tests::StreamedCompletion;
use crate::testing::{family_chat, tiny_tokenizer};
use crate::{Chat, ChatOptions, ChatTemplate, Message, TemplateInput, ToolCall, ToolProtocol};

/// A piece of a completion: a tag or a call of its family, or text between them.
#[derive(Debug, Clone)]
enum Part {
    /// One of the texts that `known_texts` returns.
    Known(Index),
    Text(String),
    /// Ids of arbitrary tokens, whose bytes may be invalid UTF-8.
    Ids(Vec<u32>),
    /// The start of a known text.
    Prefix(Index, Index),
}

fn parts() -> impl Strategy<Value = Vec<Part>> {
    let part = prop_oneof![
        6 => any::<Index>().prop_map(Part::Known),
        2 => (any::<Index>(), any::<Index>()).prop_map(|(which, at)| Part::Prefix(which, at)),
        1 => any::<String>().prop_map(Part::Text),
        1 => "[a-z \n\"{}\\[\\]<>|/=,:.0-9]{0,12}".prop_map(Part::Text),
        1 => prop::collection::vec(0..300u32, 0..6).prop_map(Part::Ids),
    ];
    prop::collection::vec(part, 0..14)
}

/// Returns texts with a meaning in the completions of a family.
fn known_texts(chat: &Chat) -> Vec<String> {
    let syntax = chat.format.syntax();
    let tags = syntax
        .syntax_tags()
        .marks
        .iter()
        .map(|(tag, _)| *tag)
        .chain(syntax.syntax_tags().tags.iter().copied());
    let mut known: Vec<String> =
        tags.chain(syntax.syntax_tags().closes.iter().copied()).map(str::to_owned).collect();
    let arguments = json!({"string": "</tool_call> \
                                      é", "number": 1.5, "array": [1, "]"], "object": {"a": null}});
    for arguments in [Map::new(), arguments.as_object().cloned().unwrap()] {
        let call =
            ToolCall { id: "call_0".into(), name: "probe".into(), arguments: arguments.into() };
        known.extend([
            syntax.render_message("", std::slice::from_ref(&call)),
            syntax.render_message("Say", &[call.clone(), call]),
        ]);
    }
    let more = [
        "<think>",
        "</think>",
        "<thinking>",
        "</thinking>",
        "<|channel|>analysis<|message|>",
        "<|channel|>final<|message|>",
        "<|channel|>commentary to=functions.probe <|constrain|>json<|message|>",
        "<|start|>assistant",
        "<|end|>",
        "<|call|>",
        "[THINK]",
        "[/THINK]",
        "probe",
        "{\"name\": \"probe\", \"arguments\": {}}",
        "\"",
        "{",
        "}",
        "\n",
        " ",
        "\\",
        "```json\n",
        "```",
        "Hm.",
        "\u{FFFD}",
    ];
    known.extend(more.map(str::to_owned));
    known
}

fn ids(chat: &Chat, parts: &[Part]) -> Vec<u32> {
    let known = known_texts(chat);
    let tokenizer = chat.tokenizer();
    let mut ids = Vec::new();
    for part in parts {
        match part {
            // Tags become special tokens, as in a model's completion.
            Part::Known(at) => ids.extend(tokenizer.encode_template(&known[at.index(known.len())])),
            Part::Prefix(which, at) => {
                let text = &known[which.index(known.len())];
                let at = at.index(text.len() + 1);
                ids.extend(text.as_bytes()[..at].iter().map(|byte| u32::from(*byte)));
            }
            Part::Text(text) => ids.extend(tokenizer.encode(text)),
            Part::Ids(some) => ids.extend(some),
        }
    }
    ids
}

/// Checks that parsing a completion token by token equals parsing it at once.
fn reads_alike(chat: &Arc<Chat>, parts: &[Part], in_reasoning: bool) -> Result<(), TestCaseError> {
    let ids = ids(chat, parts);
    let tools = [tool()];
    let completion = chat.decode_completion(&ids);
    let streamed = StreamedCompletion::collect_with_tools(chat, &ids, in_reasoning, &tools);
    prop_assert_eq!(&streamed.raw, &completion);
    let (found, _) = crate::completion_parser::CompletionParser::parse_complete(
        chat.tags(),
        &completion,
        in_reasoning,
        &tools,
    );
    // Reasoning that was never opened has already been reported as content by then.
    if !found.contains(&ParserEvent::Late) {
        let parsed = chat.parse(&completion, in_reasoning, &tools);
        prop_assert_eq!(streamed.speech, parsed.content);
        prop_assert_eq!(&streamed.calls, &parsed.calls);
        prop_assert_eq!(streamed.reasoning, chat.reasoning(&completion, in_reasoning));
    }
    // The explanation for the user never fails, either.
    let _ = chat.why_no_call(&completion, in_reasoning, &tools);
    Ok(())
}

macro_rules! families {
    ($($name:ident: $protocol:ident,)*) => {
        proptest! {
            $(#[test]
            fn $name(parts in parts(), in_reasoning: bool) {
                static CHAT: OnceLock<Arc<Chat>> = OnceLock::new();
                let options = ChatOptions::default;
                let chat = CHAT.get_or_init(|| Arc::new(family_chat(ToolProtocol::$protocol, options()).unwrap()));
                reads_alike(chat, &parts, in_reasoning)?;
            })*
        }
    };
}

families! {
    hermes_stream_matches_complete_parse: Hermes,
    qwen_xml_stream_matches_complete_parse: QwenXml,
    llama_stream_matches_complete_parse: Llama,
    mistral_stream_matches_complete_parse: Mistral,
    deepseek_stream_matches_complete_parse: Deepseek,
    glm_stream_matches_complete_parse: Glm,
    kimi_stream_matches_complete_parse: Kimi,
    minimax_stream_matches_complete_parse: Minimax,
    harmony_stream_matches_complete_parse: Harmony,
}

/// Returns the templates to damage: the snippets of the conformance checks, and those of the
/// families.
fn templates() -> &'static [String] {
    static ALL: OnceLock<Vec<String>> = OnceLock::new();
    ALL.get_or_init(|| {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../conformance/templates.json");
        let recorded: Value =
            serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let snippets = recorded["snippets"].as_object().unwrap().values();
        let mut all: Vec<String> =
            snippets.map(|snippet| snippet["template"].as_str().unwrap().to_owned()).collect();
        for protocol in
            [ToolProtocol::Hermes, ToolProtocol::Glm, ToolProtocol::Harmony, ToolProtocol::Mistral]
        {
            let chat = family_chat(protocol, ChatOptions::default()).unwrap();
            all.push(chat.template().source().to_owned());
        }
        all.extend([crate::testing::THOUGHTFUL, crate::testing::NUMBERED].map(str::to_owned));
        all
    })
}

/// Splices pieces of templates, and odd texts, into a template.
fn splice(first: Index, splices: &[(Index, Index, Index, Index, Index, String)]) -> String {
    let all = templates();
    let mut source: Vec<char> = all[first.index(all.len())].chars().collect();
    for (at, over, from, start, length, odd) in splices {
        let at = at.index(source.len() + 1);
        let end = (at + over.index(12)).min(source.len());
        let other: Vec<char> = all[from.index(all.len())].chars().collect();
        let start = start.index(other.len() + 1);
        let chunk = &other[start..(start + length.index(40)).min(other.len())];
        let chunk: Vec<char> = chunk.iter().copied().chain(odd.chars()).collect();
        source.splice(at..end, chunk);
    }
    source.into_iter().collect()
}

fn odd_source() -> impl Strategy<Value = String> {
    const TEMPLATE_TEXTS: &[&str] = &[
        "",
        "",
        "{{",
        "}}",
        "{%",
        "%}",
        "{#",
        "#}",
        "-%}",
        "(",
        ")",
        "[",
        "]",
        "|",
        ".",
        "loop",
        "namespace()",
        "range(9)",
        "** 9",
        "~",
        "is",
        "not",
        "none",
        "else",
        "endif",
        "endfor",
        "recursive",
        "macro m() ",
        "tojson",
        "[::-1]",
        "[:0]",
        "0",
        "-1",
        "9223372036854775808",
        "1e400",
        "'\\ud800'",
        "'%c'",
        "strftime_now('%Q')",
        "\u{0}",
        "é",
    ];
    prop_oneof![4 => prop::sample::select(TEMPLATE_TEXTS).prop_map(str::to_owned), 1 => any::<String>()]
}

proptest! {
    #[test]
    fn damaged_template_never_panics(
        first: Index,
        splices in prop::collection::vec((any::<Index>(), any::<Index>(), any::<Index>(), any::<Index>(), any::<Index>(), odd_source()), 0..5),
        as_chat in 0..10u8,
    ) {
        let source = splice(first, &splices);
        let start = std::time::Instant::now();
        if let Ok(template) = ChatTemplate::at(&source, 0) {
            let messages = [
                json!({"role": "system", "content": "Be brief."}),
                json!({"role": "user", "content": "Hi <|im_end|>"}),
                json!({"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "probe", "arguments": {"a": [1, null]}}}]}),
                json!({"role": "tool", "content": "5", "tool_call_id": "c"}),
            ];
            let variables = Map::from_iter([("bos_token".to_owned(), json!("<s>"))]);
            for messages in [&messages[..], &messages[1..2], &[]] {
                let rendering = TemplateInput { messages, tools: None, add_generation_prompt: true, variables: &variables };
                let _ = template.render(rendering);
            }
        }
        // Creating a chat probes the template, and a conversation follows. This takes longer, so it
        // is done for one case in ten.
        if as_chat == 0 && let Ok(chat) = Chat::new(tiny_tokenizer().unwrap(), Some(&source), ChatOptions::default()) {
            let messages = [Message::user("Hi")];
            let _ = chat.prompt(&messages, &[tool()]);
            let completion = [u32::from(b'x'), crate::testing::IM_END];
            let _ = chat.continuation(&messages, &completion, &[Message::user("More")], &[]);
        }
        prop_assert!(start.elapsed().as_secs() < 60, "{:?} for {source}", start.elapsed());
    }
}
