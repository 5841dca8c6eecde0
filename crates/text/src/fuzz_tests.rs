//! Damaged replies and templates. Whatever a model says, in whatever pieces, its stream and the whole say the
//! same; whatever a template holds, rendering ends, with a text or an error.
//!
//! `conformance/fuzz.py` runs these for as long as one likes, one parser after the other.

use std::sync::{Arc, OnceLock};

use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::{Map, Value, json};

use crate::calls::tests::tool;
use crate::reader::Found;
use crate::testing::{family_chat, tiny_tokenizer};
use crate::thought::tests::Streamed;
use crate::{Chat, ChatOptions, ChatTemplate, Message, Rendering, ToolCall, ToolProtocol};

/// A piece of a reply: a tag or a call of its family, or what stands between them.
#[derive(Debug, Clone)]
enum Part {
    /// One of the texts that `parts_of` lists.
    Known(Index),
    Text(String),
    /// Bytes that may be no UTF-8, and ids of any token.
    Ids(Vec<u32>),
    /// The beginning of a known text.
    Cut(Index, Index),
}

fn parts() -> impl Strategy<Value = Vec<Part>> {
    let part = prop_oneof![
        6 => any::<Index>().prop_map(Part::Known),
        2 => (any::<Index>(), any::<Index>()).prop_map(|(which, at)| Part::Cut(which, at)),
        1 => any::<String>().prop_map(Part::Text),
        1 => "[a-z \n\"{}\\[\\]<>|/=,:.0-9]{0,12}".prop_map(Part::Text),
        1 => prop::collection::vec(0..300u32, 0..6).prop_map(Part::Ids),
    ];
    prop::collection::vec(part, 0..14)
}

/// Texts that mean something in a family's replies.
fn known(chat: &Chat) -> Vec<String> {
    let syntax = chat.format.syntax();
    let tags =
        syntax.spelling().marks.iter().map(|(tag, _)| *tag).chain(syntax.spelling().tags.iter().copied());
    let mut known: Vec<String> =
        tags.chain(syntax.spelling().closes.iter().copied()).map(str::to_owned).collect();
    let arguments =
        json!({"string": "</tool_call> é", "number": 1.5, "array": [1, "]"], "object": {"a": null}});
    for arguments in [Map::new(), arguments.as_object().cloned().unwrap()] {
        let call = ToolCall { id: "call_0".into(), name: "probe".into(), arguments: arguments.into() };
        known.extend([
            syntax.render("", std::slice::from_ref(&call)),
            syntax.render("Say", &[call.clone(), call]),
        ]);
    }
    let others = [
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
    known.extend(others.map(str::to_owned));
    known
}

fn ids(chat: &Chat, parts: &[Part]) -> Vec<u32> {
    let (known, tokenizer) = (known(chat), chat.tokenizer());
    let mut ids = Vec::new();
    for part in parts {
        match part {
            // Tags become their special tokens, as a model says them.
            Part::Known(at) => ids.extend(tokenizer.encode_template(&known[at.index(known.len())])),
            Part::Cut(which, at) => {
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

/// A reply read token by token and as a whole.
fn reads_alike(chat: &Arc<Chat>, parts: &[Part], in_thought: bool) -> Result<(), TestCaseError> {
    let (ids, tools) = (ids(chat, parts), [tool()]);
    let said = chat.said(&ids);
    let streamed = Streamed::of_tools(chat, &ids, in_thought, &tools);
    prop_assert_eq!(&streamed.raw, &said);
    let (found, _) = crate::reader::Reader::read(chat.tags(), &said, in_thought, &tools);
    // A thought that nothing had begun is told as speech by then.
    if !found.contains(&Found::Late) {
        let parsed = chat.parse(&said, in_thought, &tools);
        prop_assert_eq!(streamed.speech, parsed.content);
        prop_assert_eq!(&streamed.calls, &parsed.calls);
        prop_assert_eq!(streamed.thought, chat.thought(&said, in_thought));
    }
    // What was said goes back into a prompt.
    let _ = chat.why_no_call(&said, in_thought, &tools);
    Ok(())
}

macro_rules! families {
    ($($name:ident: $protocol:ident,)*) => {
        proptest! {
            $(#[test]
            fn $name(parts in parts(), in_thought: bool) {
                static CHAT: OnceLock<Arc<Chat>> = OnceLock::new();
                let options = ChatOptions::default;
                let chat = CHAT.get_or_init(|| Arc::new(family_chat(ToolProtocol::$protocol, options()).unwrap()));
                reads_alike(chat, &parts, in_thought)?;
            })*
        }
    };
}

families! {
    any_reply_in_hermes_reads_alike: Hermes,
    any_reply_in_qwen_xml_reads_alike: QwenXml,
    any_reply_in_llama_reads_alike: Llama,
    any_reply_in_mistral_reads_alike: Mistral,
    any_reply_in_deepseek_reads_alike: Deepseek,
    any_reply_in_glm_reads_alike: Glm,
    any_reply_in_kimi_reads_alike: Kimi,
    any_reply_in_minimax_reads_alike: Minimax,
    any_reply_in_harmony_reads_alike: Harmony,
}

/// Templates to damage: the snippets of the conformance checks, and those of the families.
fn templates() -> &'static [String] {
    static ALL: OnceLock<Vec<String>> = OnceLock::new();
    ALL.get_or_init(|| {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../conformance/templates.json");
        let record: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let snippets = record["snippets"].as_object().unwrap().values();
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

/// Splices pieces of templates, and odd texts, into one of them.
fn spliced(first: Index, splices: &[(Index, Index, Index, Index, Index, String)]) -> String {
    let all = templates();
    let mut source: Vec<char> = all[first.index(all.len())].chars().collect();
    for (at, over, from, begin, length, odd) in splices {
        let at = at.index(source.len() + 1);
        let end = (at + over.index(12)).min(source.len());
        let other: Vec<char> = all[from.index(all.len())].chars().collect();
        let begin = begin.index(other.len() + 1);
        let piece = &other[begin..(begin + length.index(40)).min(other.len())];
        let piece: Vec<char> = piece.iter().copied().chain(odd.chars()).collect();
        source.splice(at..end, piece);
    }
    source.into_iter().collect()
}

fn odd_source() -> impl Strategy<Value = String> {
    const WORDS: &[&str] = &[
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
    prop_oneof![4 => prop::sample::select(WORDS).prop_map(str::to_owned), 1 => any::<String>()]
}

proptest! {
    #[test]
    fn any_template_renders_or_is_refused(
        first: Index,
        splices in prop::collection::vec((any::<Index>(), any::<Index>(), any::<Index>(), any::<Index>(), any::<Index>(), odd_source()), 0..5),
        as_chat in 0..10u8,
    ) {
        let source = spliced(first, &splices);
        let begun = std::time::Instant::now();
        if let Ok(template) = ChatTemplate::at(&source, 0) {
            let messages = [
                json!({"role": "system", "content": "Be brief."}),
                json!({"role": "user", "content": "Hi <|im_end|>"}),
                json!({"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "probe", "arguments": {"a": [1, null]}}}]}),
                json!({"role": "tool", "content": "5", "tool_call_id": "c"}),
            ];
            let variables = Map::from_iter([("bos_token".to_owned(), json!("<s>"))]);
            for messages in [&messages[..], &messages[1..2], &[]] {
                let rendering = Rendering { messages, tools: None, add_generation_prompt: true, variables: &variables };
                let _ = template.render(rendering);
            }
        }
        // A chat is made of it, which finds out what the template does, and then holds a conversation: that
        // takes longer.
        if as_chat == 0 && let Ok(chat) = Chat::new(tiny_tokenizer().unwrap(), Some(&source), ChatOptions::default()) {
            let asked = [Message::user("Hi")];
            let _ = chat.prompt(&asked, &[tool()]);
            let reply = [u32::from(b'x'), crate::testing::IM_END];
            let _ = chat.continuation(&asked, &reply, &[Message::user("More")], &[]);
        }
        prop_assert!(begun.elapsed().as_secs() < 60, "{:?} for {source}", begun.elapsed());
    }
}
