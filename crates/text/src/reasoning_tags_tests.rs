//! Tests of reasoning tags, and of completions with reasoning.

use std::sync::Arc;

use levade_model::TokenType;
use proptest::prelude::*;

use super::*;
use crate::completion_parser::{CompletionParser, ParserEvent, split_at_tags};
use crate::testing::{IM_END, tiny_chat, tiny_gguf, tiny_tokenizer};
use crate::{
    Chat, ChatOptions, CompletionDelta, MalformedCall, Message, TextError, TokenizerSource,
    ToolCall, ToolSpec,
};

const CALL: &str = "<tool_call>\n{\"name\": \"calculator\", \"arguments\": {\"expression\": \"1+1\"}}\n</tool_call>";

/// Creates a chat whose tokenizer has additional tokens, special or not.
fn chat_with(
    tokens: &[(&str, TokenType)],
    template: &str,
    options: ChatOptions,
) -> Result<Chat, TextError> {
    let mut source = tiny_gguf();
    for (token, kind) in tokens {
        source.tokens.push((*token).into());
        source.types.push(*kind);
    }
    Chat::new(Tokenizer::new(&TokenizerSource::Gguf(source))?, Some(template), options)
}

fn calculator() -> ToolSpec {
    ToolSpec {
        name: "calculator".into(),
        description: String::new(),
        parameters: json!({"type": "object"}),
    }
}

/// Returns the content of a completion and the number of its calls.
fn read(chat: &Chat, completion: &str, in_reasoning: bool) -> (String, usize) {
    let parsed = chat.parse(completion, in_reasoning, &[calculator()]);
    (parsed.content, parsed.calls.len())
}

#[test]
fn parse_ignores_calls_inside_reasoning() {
    let chat = tiny_chat().unwrap();
    let of = |completion: &str, in_reasoning| read(&chat, completion, in_reasoning);
    assert_eq!(
        of("<think>\n42\n</think>\n\nI do not know.", false),
        speech_and_calls("I do not know.", 0)
    );
    assert_eq!(of(&format!("<think>{CALL}</think>42"), false), speech_and_calls("42", 0));
    assert_eq!(of(&format!("<think>{CALL}</think>{CALL}"), false), speech_and_calls("", 1));
    assert_eq!(
        of(&format!("1 <think>a</think> {CALL} 2 <think>b</think> 3"), false),
        speech_and_calls("1\n2\n3", 1)
    );
    // Unclosed reasoning, opened by the completion or by the prompt.
    assert_eq!(of(&format!("<think>{CALL} 42"), false), speech_and_calls("", 0));
    assert_eq!(of(&format!("{CALL} 42"), true), speech_and_calls("", 0));
    assert_eq!(of("", true), speech_and_calls("", 0));
    assert_eq!(of("1 <think> 42", false), speech_and_calls("1", 0));
    assert_eq!(of(&format!("hm</think>{CALL}"), true), speech_and_calls("", 1));
    // Reasoning that is closed twice, or closed without being opened.
    assert_eq!(of("<think>a<think>b</think>c</think>d", false), speech_and_calls("d", 0));
    assert_eq!(of("a</think>b", false), speech_and_calls("b", 0));
    // Tags in the JSON of a call are text. In a malformed call, they are tags.
    let text = CALL.replace("1+1", "</think><think>");
    assert_eq!(of(&format!("hm</think>{text} 2"), true), speech_and_calls("2", 1));
    assert_eq!(of("<tool_call>{oops</think>42", false), speech_and_calls("42", 0));
    assert_eq!(of("<thinking>42</thinking>43", false), speech_and_calls("43", 0));
}

fn speech_and_calls(text: &str, calls: usize) -> (String, usize) {
    (text.to_owned(), calls)
}

#[test]
fn reasoning_tags_are_found_in_template_and_tokenizer() {
    let base = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n\
                ' + m.content + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ \
                '<|im_start|>assistant\n' }}{% endif %}";
    let plain = chat_with(&[], base, ChatOptions::default()).unwrap();
    for (open, close) in [
        ("[THINK]", "[/THINK]"),
        ("<seed:think>", "</seed:think>"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|begin_of_thought|>", "<|end_of_thought|>"),
        ("◁think▷", "◁/think▷"),
        ("<reasoning>", "</reasoning>"),
    ] {
        assert!(!hides_reasoning(&plain, open, close), "{open}");
        let named = format!("{base}{{# {open}…{close} #}}");
        assert!(
            hides_reasoning(&chat_with(&[], &named, ChatOptions::default()).unwrap(), open, close),
            "{open}"
        );
        for kind in [TokenType::Control, TokenType::UserDefined] {
            let chat =
                chat_with(&[(open, kind), (close, kind)], base, ChatOptions::default()).unwrap();
            assert!(hides_reasoning(&chat, open, close), "{open}");
        }
    }
    // Tags are also found by the template's behavior, whatever their names.
    let drops = base.replace("m.content", "m.content.split('</pad>')[-1]");
    let drops = format!("{drops}{{# <pad> #}}");
    assert!(hides_reasoning(
        &chat_with(&[], &drops, ChatOptions::default()).unwrap(),
        "<pad>",
        "</pad>"
    ));
    let prints = base.replace(
        "m.content",
        "('{{' + m.reasoning_content + '}}' if m.reasoning_content else '') + m.content",
    );
    let prints = prints.replace("'{{'", "'<notes>\n'").replace("'}}'", "'\n</notes>\n'");
    assert!(hides_reasoning(
        &chat_with(&[], &prints, ChatOptions::default()).unwrap(),
        "<notes>",
        "</notes>"
    ));
    assert!(
        !hides_reasoning(&plain, "<tool_call>", "</tool_call>")
            && !hides_reasoning(&plain, "<|im_start|>", "<|im_end|>")
    );
    let channels = ["<|channel|>", "<|message|>"].map(|token| (token, TokenType::Control));
    let chat = chat_with(&channels, base, ChatOptions::default()).unwrap();
    assert!(hides_reasoning(
        &chat,
        "<|channel|>analysis<|message|>",
        "<|channel|>final<|message|>"
    ));
}

fn hides_reasoning(chat: &Chat, open: &str, close: &str) -> bool {
    read(chat, &format!("{open}42{close}43"), false) == ("43".into(), 0)
        && read(chat, &format!("43{open}42"), false) == ("43".into(), 0)
}

#[test]
fn special_token_tags_round_trip() {
    let special = TokenType::Control;
    let text = TokenType::UserDefined;
    for (open, close) in [(special, special), (special, text), (text, special)] {
        let tokens = [
            ("<tool_call>", open),
            ("</tool_call>", close),
            ("<think>", close),
            ("</think>", open),
            ("<tool_response>", open),
        ];
        let chat = chat_with(&tokens, "chatml", ChatOptions::default()).unwrap();
        // As the model writes it.
        let mut completion_ids = vec![261];
        completion_ids.extend(chat.tokenizer().encode("hm"));
        completion_ids.push(262);
        completion_ids.push(259);
        completion_ids.extend(chat.tokenizer().encode("{\"name\": \"calculator\"}"));
        completion_ids.extend([260, IM_END]);
        let parsed = chat.parse(&chat.decode_completion(&completion_ids), false, &[calculator()]);
        assert_eq!(parsed.calls[0].as_ref().unwrap().name, "calculator");
        let chat = Arc::new(chat);
        let streamed = StreamedCompletion::collect(&chat, &completion_ids, false);
        assert_eq!(
            (streamed.raw, streamed.reasoning.as_str()),
            (chat.decode_completion(&completion_ids), "hm")
        );
        assert_eq!((streamed.speech.as_str(), &streamed.calls), ("", &parsed.calls));

        // As it is written for the model: in demonstrations, in the history, and in tool
        // descriptions.
        let call = parsed.calls[0].clone().unwrap();
        let shown =
            chat.assistant(&Message::calls("<think>hm</think>", vec![call.clone()]), None).unwrap();
        assert_eq!([259, 260, 261, 262].map(|id| count_token(&shown, id)), [1, 1, 1, 1]);
        let written = Message::assistant(format!("<think>hm</think>\n{CALL}"));
        let history = [Message::user(CALL), written, Message::tool("</tool_call>")];
        let prompt = chat.prompt(&history, &[calculator()]).unwrap();
        // Once in the description and once in the history. Never in external text, unless the
        // tokenizer treats the tag as text anyway.
        let outside = |kind| if kind == special { 0 } else { 1 };
        assert_eq!(count_token(&prompt, 259), 2 + outside(open));
        assert_eq!(count_token(&prompt, 260), 2 + 2 * outside(close));
    }
}

fn count_token(ids: &[u32], id: u32) -> usize {
    ids.iter().filter(|&&found| found == id).count()
}

#[test]
fn special_tokens_overlapping_tags_are_decoded() {
    let question = [Message::user("1+1?")];
    for token in ["<tool", "_call>", "</", "{\"name\": ", "\n<tool_call>\n"] {
        let chat =
            chat_with(&[(token, TokenType::Control)], "chatml", ChatOptions::default()).unwrap();
        assert!(chat.prompt(&question, &[calculator()]).is_ok(), "{token}");
        let shown = chat.assistant(&Message::assistant(CALL), None).unwrap();
        assert_eq!(
            read(&chat, &chat.decode_completion(&shown), false),
            (String::new(), 1),
            "{token}"
        );
    }
    let chat =
        chat_with(&[("\n<tool_call>\n", TokenType::Control)], "chatml", ChatOptions::default())
            .unwrap();
    let completion_ids =
        [&[259], &chat.tokenizer().encode("{\"name\": \"a\"}</tool_call>")[..]].concat();
    assert_eq!(read(&chat, &chat.decode_completion(&completion_ids), false).1, 1);
}

#[test]
fn unwritable_calls_are_rejected_naming_token() {
    let question = [Message::user("1+1?")];
    let ends = |token: &str, template: &str| {
        let mut source = tiny_gguf();
        source.tokens.push(token.into());
        source.types.push(TokenType::Control);
        source.eos = Some(259);
        let tokenizer = Tokenizer::new(&TokenizerSource::Gguf(source)).unwrap();
        let chat = Chat::new(tokenizer, Some(template), ChatOptions::default()).unwrap();
        assert!(chat.prompt(&question, &[]).is_ok());
        chat.prompt(&question, &[calculator()]).map_err(|error| error.to_string())
    };
    let error = ends("<tool_call>", "chatml").unwrap_err();
    assert!(error.contains("\"<tool_call>\"") && error.contains("ends a completion"), "{error}");
    // The closing tag of a call may end a completion, but not if it is the only end of a turn.
    assert!(ends("</tool_call>", "chatml").is_ok());
    let template = "{% for m in messages %}{{ m.role + ': ' + m.content + '</tool_call>' \
                    }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}";
    let error = ends("</tool_call>", template).unwrap_err();
    assert!(error.contains("\"</tool_call>\""), "{error}");
}

#[test]
fn why_no_call_explains_missing_result() {
    let chat = tiny_chat().unwrap();
    let why = |completion: &str, in_reasoning| {
        chat.why_no_call(completion, in_reasoning, &[calculator()])
    };
    for (completion, want) in [
        ("42", "the completion does not contain <tool_call>"),
        ("<think> hm", "never closed"),
        (&format!("<think>{CALL}</think>42"), "inside the reasoning"),
        ("```json\n{\"name\": \"calculator\", \"arguments\": {}}\n```", "agent.bare_calls"),
        ("<tool_call>{oops", "malformed"),
        ("<tool_call>{\"name\": \"abacus\"}</tool_call>", "\"abacus\", which is not a tool"),
        (CALL, "returned no result"),
    ] {
        assert!(why(completion, false).contains(want), "{completion}: {}", why(completion, false));
    }
    assert!(why(CALL, true).contains("never closed"));
}

#[test]
fn bare_calls_are_parsed_if_enabled() {
    let completion = "<think>{\"name\": \"calculator\"}</think>```json\n{\"name\": \"calculator\", \"arguments\": {}}\n```";
    let parsed = |bare_calls| {
        let chat = Chat::new(
            tiny_tokenizer().unwrap(),
            Some("chatml"),
            ChatOptions { bare_calls, ..ChatOptions::default() },
        );
        chat.unwrap().parse(completion, false, &[calculator()])
    };
    let found = parsed(true);
    assert!(found.bare && found.calls.len() == 1 && found.content.is_empty(), "{found:?}");
    assert!(!parsed(false).bare && parsed(false).calls.is_empty());
    // If there are tags, only they mark calls.
    let chat = chat_with(&[], "chatml", ChatOptions { bare_calls: true, ..ChatOptions::default() })
        .unwrap();
    let both = chat.parse(&format!("{{\"name\": \"calculator\"}}{CALL}"), false, &[calculator()]);
    assert!(!both.bare && both.calls.len() == 1);
}

/// Generates a completion of complete pieces: content, reasoning, calls.
fn well_formed() -> impl Strategy<Value = String> {
    let delta = prop_oneof![
        "[a-z <{\n]{0,8}".prop_map(|text| text),
        "[a-z <{\"\n]{0,8}".prop_map(|text| format!("<think>{text}</think>")),
        "[a-z<>/_]{0,12}".prop_map(|text| CALL.replace("1+1", &text)),
        Just(CALL.replace("1+1", "</tool_call>")),
    ];
    proptest::collection::vec(delta, 0..6).prop_map(|deltas| deltas.concat())
}

/// The concatenated output of a stream.
#[derive(Debug, Default)]
pub(crate) struct StreamedCompletion {
    pub speech: String,
    pub reasoning: String,
    pub calls: Vec<Result<ToolCall, MalformedCall>>,
    /// All text, without the line breaks that start later stretches.
    pub raw: String,
}

impl StreamedCompletion {
    pub(crate) fn collect(chat: &Arc<Chat>, completion_ids: &[u32], in_reasoning: bool) -> Self {
        Self::collect_with_tools(chat, completion_ids, in_reasoning, &[calculator()])
    }

    pub(crate) fn collect_with_tools(
        chat: &Arc<Chat>,
        completion_ids: &[u32],
        in_reasoning: bool,
        tools: &[ToolSpec],
    ) -> Self {
        let mut stream = chat.stream(in_reasoning, tools.into());
        let mut deltas: Vec<CompletionDelta> =
            completion_ids.iter().flat_map(|&id| stream.push(id)).collect();
        deltas.extend(stream.finish());
        let mut all = StreamedCompletion::default();
        let mut spoken = [false; 2];
        let mut last = 2;
        for delta in deltas {
            let stretch_kind = usize::from(matches!(delta, CompletionDelta::Reasoning(_)));
            match delta {
                CompletionDelta::Speech(text) | CompletionDelta::Reasoning(text) => {
                    let starts_stretch = spoken[stretch_kind] && last != stretch_kind;
                    all.raw.push_str(if starts_stretch {
                        text.strip_prefix('\n').unwrap()
                    } else {
                        &text
                    });
                    if stretch_kind == 0 {
                        all.speech.push_str(&text)
                    } else {
                        all.reasoning.push_str(&text)
                    }
                    (spoken[stretch_kind], last) = (true, stretch_kind);
                }
                CompletionDelta::Aside(text) => {
                    all.raw.push_str(&text);
                    last = 2;
                }
                CompletionDelta::Call(call) => all.calls.push(call),
            }
        }
        all
    }
}

proptest! {
    #[test]
    fn split_spans_concatenate_to_text(
        text in "(</?think>|</?tool_call>|\\{\"name\": \"a\"\\}|[a-z\"{}<>/ ]{0,5}){0,10}",
        in_reasoning: bool,
    ) {
        let chat = tiny_chat().unwrap();
        let spans = split_at_tags(chat.tags(), &text, in_reasoning);
        prop_assert_eq!(spans.into_iter().map(|(_, span)| span).collect::<String>(), text.as_str());
    }

    #[test]
    fn streamed_completion_matches_complete_parse(
        completion in prop_oneof![
            well_formed(),
            "(</?think>|</?tool_call>|\\{\"name\": \"a\"\\}|[a-z\"{}<>/ \n]{0,5}){0,10}",
        ],
        unclosed in "(<think>[a-z <]{0,8})?",
        in_reasoning: bool,
    ) {
        let chat = Arc::new(tiny_chat().unwrap());
        let opened = if in_reasoning { "hm</think>" } else { "" };
        let completion = format!("{opened}{completion}{unclosed}");
        let streamed = StreamedCompletion::collect(&chat, &chat.tokenizer().encode(&completion), in_reasoning);
        prop_assert_eq!(&streamed.raw, &completion);
        let (found, _) = CompletionParser::parse_complete(chat.tags(), &completion, in_reasoning, &[]);
        if !found.contains(&ParserEvent::Late) {
            let parsed = chat.parse(&completion, in_reasoning, &[]);
            prop_assert_eq!(streamed.speech, parsed.content);
            prop_assert_eq!(streamed.calls, parsed.calls);
            prop_assert_eq!(streamed.reasoning, chat.reasoning(&completion, in_reasoning));
        }
    }
}
