//! Tests of the tokens after a completion, with templates that treat the history like published
//! ones.

use proptest::prelude::*;

use crate::chat_tests::{DEFAULT_SYSTEM, WITH_TOOLS, calculator, chat, text};
use crate::testing::{
    ALWAYS_THINKS, IM_END, NUMBERED, STRICT, header_chat, sampled, thoughtful, tiny_chat,
};
use crate::{Chat, ChatOptions, Message};

/// Prints all system messages first, whatever their position.
const HOISTS: &str = "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}
{%- for m in messages if m.role != 'system' %}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

fn all() -> Vec<Chat> {
    let plain = ["chatml", DEFAULT_SYSTEM, WITH_TOOLS, ALWAYS_THINKS, NUMBERED, STRICT];
    let plain = plain.map(|template| chat(template, ChatOptions::default()));
    plain
        .into_iter()
        .chain([thoughtful(true).unwrap(), thoughtful(false).unwrap(), header_chat().unwrap()])
        .collect()
}

#[test]
fn continuation_ends_turn_unless_model_did() {
    let chat = tiny_chat().unwrap();
    let history = [Message::user("1+1?")];
    let new = [Message::user("2+2?")];
    let next = "\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n";
    let full = sampled(&chat, " two \n");
    assert_eq!(text(&chat, &chat.continuation(&history, &full, &new, &[]).unwrap()), next);
    let truncated = &full[..full.len() - 1];
    assert_eq!(
        text(&chat, &chat.continuation(&history, truncated, &new, &[]).unwrap()),
        format!("<|im_end|>{next}")
    );
    // A completion that ends with another token than the template's, and an empty one.
    let other = [truncated, &[256]].concat();
    assert_eq!(
        text(&chat, &chat.continuation(&history, &other, &new, &[]).unwrap()),
        format!("<|im_end|>{next}")
    );
    assert_eq!(text(&chat, &chat.continuation(&history, &[IM_END], &new, &[]).unwrap()), next);
    assert_eq!(
        text(&chat, &chat.continuation(&history, &[], &new, &[]).unwrap()),
        format!("<|im_end|>{next}")
    );
    // Invalid UTF-8 makes no difference either.
    assert_eq!(
        text(&chat, &chat.continuation(&history, &[0xFF, 0xC3, IM_END], &new, &[]).unwrap()),
        next
    );

    let chat = header_chat().unwrap();
    let completion = sampled(&chat, "  two ");
    let context_ids = chat.continuation(&history, &completion, &new, &[]).unwrap();
    assert!(
        text(&chat, &context_ids).starts_with("<|start_header_id|>user<|end_header_id|>\n\n2+2?")
    );
}

/// Returns the text between a completion and the next one.
fn continue_history(chat: &Chat, completion: &str, new: &[Message]) -> String {
    let history = [Message::user("1+1?")];
    text(chat, &chat.continuation(&history, &sampled(chat, completion), new, &[]).unwrap())
}

#[test]
fn continuation_tokens_do_not_depend_on_reasoning() {
    let tool = [Message::tool("2")];
    let user = [Message::user("2+2?")];
    assert_eq!(
        continue_history(&thoughtful(false).unwrap(), "<tool_call>…", &tool),
        "\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n\
         <|im_start|>assistant\n<think>\n\n</think>\n\n"
    );
    let chat = thoughtful(true).unwrap();
    for malformed in
        ["</think>two", "<think>two", "<think>hm</think></think> two", "<think>a<think>b</think>"]
    {
        assert_eq!(
            continue_history(&chat, malformed, &tool),
            continue_history(&chat, "two", &tool),
            "{malformed}"
        );
    }
    let chat = self::chat(ALWAYS_THINKS, ChatOptions::default());
    assert_eq!(
        continue_history(&chat, "hm</think>two", &user),
        "<|im_start|>user\n2+2?<|im_end|><|im_start|>assistant\n<think>\n"
    );
    assert_eq!(
        continue_history(&chat, "hm</think>two", &tool),
        "<|im_start|>tool\n2<|im_end|><|im_start|>assistant\n"
    );
    // A template that would reject the completion.
    let chat = self::chat(STRICT, ChatOptions::default());
    assert!(
        continue_history(&chat, "<think>", &user)
            .ends_with("2+2?<|im_end|>\n<|im_start|>assistant\n")
    );
}

#[test]
fn opened_reasoning_is_found_for_any_history() {
    let always = chat(ALWAYS_THINKS, ChatOptions::default());
    let close = Some("</think>".to_owned());
    let question = Message::user("What is <think>?");
    let completion = Message::assistant("<think> hm");
    assert_eq!(opened_reasoning(&always, std::slice::from_ref(&question)), close);
    assert_eq!(
        opened_reasoning(&always, &[question.clone(), completion.clone(), question.clone()]),
        close
    );
    assert_eq!(
        opened_reasoning(
            &always,
            &[question.clone(), completion.clone(), Message::tool("<think>")]
        ),
        None
    );
    for chat in [thoughtful(true).unwrap(), thoughtful(false).unwrap(), tiny_chat().unwrap()] {
        assert_eq!(
            opened_reasoning(&chat, &[question.clone(), completion.clone(), question.clone()]),
            None
        );
    }
    // The generation prompt is printed whether or not it is requested.
    let unasked = ALWAYS_THINKS.replace("if add_generation_prompt", "if true");
    let unasked = chat(&unasked, ChatOptions::default());
    assert_eq!(opened_reasoning(&unasked, &[question.clone(), completion, question]), close);
}

fn opened_reasoning(chat: &Chat, messages: &[Message]) -> Option<String> {
    chat.opened_reasoning(messages, &[]).unwrap().map(str::to_owned)
}

#[test]
fn demonstration_continues_reasoning_of_prompt() {
    let chat = chat(ALWAYS_THINKS, ChatOptions::default());
    let shown = |content: &str, opened: Option<&str>| {
        text(&chat, &chat.assistant(&Message::assistant(content), opened).unwrap())
    };
    assert_eq!(shown("two", None), "two<|im_end|>");
    assert_eq!(shown("two", Some("</think>")), "\n</think>\n\ntwo<|im_end|>");
    assert_eq!(shown("<think>\nhm</think>two", Some("</think>")), "hm</think>two<|im_end|>");
    assert_eq!(shown("hm</think>two", Some("</think>")), "hm</think>two<|im_end|>");
}

#[test]
fn dropped_system_message_becomes_user_message() {
    let chat = chat(HOISTS, ChatOptions::default());
    let history = [Message::user("1+1?")];
    let completion = sampled(&chat, "two");
    let after = |chat: &Chat, message: Message| {
        text(chat, &chat.continuation(&history, &completion, &[message], &[]).unwrap())
    };
    let moved = after(&chat, Message::system("Be brief."));
    assert_eq!(moved, after(&chat, Message::user("Be brief.")));
    assert!(moved.contains("Be brief."));
    assert!(
        after(&tiny_chat().unwrap(), Message::system("Be brief.")).contains("system\nBe brief.")
    );
}

/// Generates texts that are difficult for templates and parsers.
fn completion_text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        Just("<think>".to_owned()),
        Just("</think>".to_owned()),
        Just("\n".to_owned()),
        Just("  ".to_owned()),
        Just("<tool_call>".to_owned()),
        Just("{\"name\": \"calculator\", \"arguments\": {\"expression\": \"1+1\"}}".to_owned()),
        Just("</tool_call>".to_owned()),
        Just("<tool_response>".to_owned()),
        Just("<|im_end|>".to_owned()),
        Just("{{ messages }}{% endfor %}".to_owned()),
        Just("Done.".to_owned()),
        any::<String>(),
    ];
    proptest::collection::vec(part, 0..6).prop_map(|parts| parts.concat())
}

fn new() -> impl Strategy<Value = Vec<Message>> {
    prop_oneof![
        any::<String>().prop_map(|text| vec![Message::user(text)]),
        proptest::collection::vec(any::<String>(), 1..3)
            .prop_map(|results| results.into_iter().map(Message::tool).collect()),
    ]
}

/// Generates a conversation: the messages before each completion.
fn turns() -> impl Strategy<Value = Vec<Vec<Message>>> {
    proptest::collection::vec(new(), 1..4)
        .prop_map(|rest| std::iter::once(vec![Message::user("1+1?")]).chain(rest).collect())
}

/// Returns the tokens between turns if the completions are `completions`.
fn between(
    chat: &Chat,
    turns: &[Vec<Message>],
    completions: &[Vec<u32>],
    with_tools: bool,
) -> Vec<Vec<u32>> {
    let tools = if with_tools { vec![calculator()] } else { vec![] };
    let mut history = turns[0].clone();
    let mut found = Vec::new();
    for (new, completion) in turns[1..].iter().zip(completions) {
        found.push(chat.continuation(&history, completion, new, &tools).unwrap());
        history.push(Message::assistant(chat.decode_completion(completion)));
        history.extend(new.iter().cloned());
    }
    found
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn continuation_does_not_depend_on_completion(
        turns in turns(),
        first in proptest::collection::vec(completion_text(), 3),
        second in proptest::collection::vec(completion_text(), 3),
        with_tools in any::<bool>(),
    ) {
        for chat in all() {
            let sample_all = |texts: &[String]| texts.iter().map(|text| sampled(&chat, text)).collect::<Vec<_>>();
            let one = between(&chat, &turns, &sample_all(&first), with_tools);
            prop_assert_eq!(&one, &between(&chat, &turns, &sample_all(&second), with_tools));
            // A truncated turn has its end in the context tokens.
            let truncated: Vec<Vec<u32>> = first.iter().map(|text| chat.tokenizer().encode(text)).collect();
            for (whole, truncated) in one.iter().zip(between(&chat, &turns, &truncated, with_tools)) {
                prop_assert!(truncated.ends_with(whole) && truncated.contains(&chat.stop_ids()[0]));
            }
        }
    }

    /// If the template keeps the history, a conversation built turn by turn equals the conversation
    /// rendered at once.
    #[test]
    fn prompt_and_continuations_equal_full_rendering(
        turns in turns(), texts in proptest::collection::vec(completion_text(), 3), with_tools in any::<bool>(),
    ) {
        let tools = if with_tools { vec![calculator()] } else { vec![] };
        for template in ["chatml", DEFAULT_SYSTEM, WITH_TOOLS] {
            let chat = chat(template, ChatOptions::default());
            let mut path = chat.prompt(&turns[0], &tools).unwrap();
            let mut messages = turns[0].clone();
            for (new, text) in turns[1..].iter().zip(&texts) {
                let completion = chat.assistant(&Message::assistant(text), None).unwrap();
                prop_assert_eq!(&chat.decode_completion(&completion), text);
                path.extend(&completion);
                path.extend(chat.continuation(&messages, &completion, new, &tools).unwrap());
                messages.push(Message::assistant(text));
                messages.extend(new.iter().cloned());
            }
            prop_assert_eq!(path, chat.prompt(&messages, &tools).unwrap());
        }
    }
}
