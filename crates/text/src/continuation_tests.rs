//! Tokens after a reply, over templates that treat the past in every way that published ones do.

use proptest::prelude::*;

use crate::chat_tests::{DEFAULT_SYSTEM, WITH_TOOLS, calculator, chat, text};
use crate::testing::{ALWAYS_THINKS, IM_END, NUMBERED, STRICT, header_chat, sampled, thoughtful, tiny_chat};
use crate::{Chat, ChatOptions, Message};

/// Prints system messages before everything else, wherever they stand.
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
fn continuations_end_the_turn_only_where_the_model_did_not() {
    let chat = tiny_chat().unwrap();
    let history = [Message::user("1+1?")];
    let new = [Message::user("2+2?")];
    let next = "\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n";
    let whole = sampled(&chat, " two \n");
    assert_eq!(text(&chat, &chat.continuation(&history, &whole, &new, &[]).unwrap()), next);
    let cut = &whole[..whole.len() - 1];
    assert_eq!(
        text(&chat, &chat.continuation(&history, cut, &new, &[]).unwrap()),
        format!("<|im_end|>{next}")
    );
    // A reply that stops with another token than the template's, and one that says nothing.
    let other = [cut, &[256]].concat();
    assert_eq!(
        text(&chat, &chat.continuation(&history, &other, &new, &[]).unwrap()),
        format!("<|im_end|>{next}")
    );
    assert_eq!(text(&chat, &chat.continuation(&history, &[IM_END], &new, &[]).unwrap()), next);
    assert_eq!(
        text(&chat, &chat.continuation(&history, &[], &new, &[]).unwrap()),
        format!("<|im_end|>{next}")
    );
    // Bytes that are no text do not matter either.
    assert_eq!(text(&chat, &chat.continuation(&history, &[0xFF, 0xC3, IM_END], &new, &[]).unwrap()), next);

    let chat = header_chat().unwrap();
    let reply = sampled(&chat, "  two ");
    let given = chat.continuation(&history, &reply, &new, &[]).unwrap();
    assert!(text(&chat, &given).starts_with("<|start_header_id|>user<|end_header_id|>\n\n2+2?"));
}

/// The text between a reply and the next one.
fn after(chat: &Chat, reply: &str, new: &[Message]) -> String {
    let history = [Message::user("1+1?")];
    text(chat, &chat.continuation(&history, &sampled(chat, reply), new, &[]).unwrap())
}

#[test]
fn templates_that_treat_thoughts_in_their_own_ways_print_the_same_after_every_reply() {
    let (tool, user) = ([Message::tool("2")], [Message::user("2+2?")]);
    assert_eq!(
        after(&thoughtful(false).unwrap(), "<tool_call>…", &tool),
        "\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n\
         <|im_start|>assistant\n<think>\n\n</think>\n\n"
    );
    let chat = thoughtful(true).unwrap();
    for malformed in
        ["</think>two", "<think>two", "<think>hm</think></think> two", "<think>a<think>b</think>"]
    {
        assert_eq!(after(&chat, malformed, &tool), after(&chat, "two", &tool), "{malformed}");
    }
    let chat = self::chat(ALWAYS_THINKS, ChatOptions::default());
    assert_eq!(
        after(&chat, "hm</think>two", &user),
        "<|im_start|>user\n2+2?<|im_end|><|im_start|>assistant\n<think>\n"
    );
    assert_eq!(after(&chat, "hm</think>two", &tool), "<|im_start|>tool\n2<|im_end|><|im_start|>assistant\n");
    // A template that would refuse the reply.
    let chat = self::chat(STRICT, ChatOptions::default());
    assert!(after(&chat, "<think>", &user).ends_with("2+2?<|im_end|>\n<|im_start|>assistant\n"));
}

#[test]
fn a_thought_that_the_prompt_begins_is_found_whatever_was_said_before() {
    let opened =
        |chat: &Chat, messages: &[Message]| chat.opened_thought(messages, &[]).unwrap().map(str::to_owned);
    let always = chat(ALWAYS_THINKS, ChatOptions::default());
    let close = Some("</think>".to_owned());
    let (question, reply) = (Message::user("What is <think>?"), Message::assistant("<think> hm"));
    assert_eq!(opened(&always, std::slice::from_ref(&question)), close);
    assert_eq!(opened(&always, &[question.clone(), reply.clone(), question.clone()]), close);
    assert_eq!(opened(&always, &[question.clone(), reply.clone(), Message::tool("<think>")]), None);
    for chat in [thoughtful(true).unwrap(), thoughtful(false).unwrap(), tiny_chat().unwrap()] {
        assert_eq!(opened(&chat, &[question.clone(), reply.clone(), question.clone()]), None);
    }
    // The beginning of the reply is printed whether it is asked for or not.
    let unasked = ALWAYS_THINKS.replace("if add_generation_prompt", "if true");
    let unasked = chat(&unasked, ChatOptions::default());
    assert_eq!(opened(&unasked, &[question.clone(), reply, question]), close);
}

#[test]
fn a_demonstration_goes_on_with_the_thought_that_the_prompt_begins() {
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
fn system_message_that_would_get_lost_is_a_users_turn() {
    let chat = chat(HOISTS, ChatOptions::default());
    let (history, reply) = ([Message::user("1+1?")], sampled(&chat, "two"));
    let after = |chat: &Chat, message: Message| {
        text(chat, &chat.continuation(&history, &reply, &[message], &[]).unwrap())
    };
    let moved = after(&chat, Message::system("Be brief."));
    assert_eq!(moved, after(&chat, Message::user("Be brief.")));
    assert!(moved.contains("Be brief."));
    assert!(after(&tiny_chat().unwrap(), Message::system("Be brief.")).contains("system\nBe brief."));
}

/// Texts of the kind that templates and parsers stumble over.
fn reply() -> impl Strategy<Value = String> {
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

/// A conversation: what comes before each reply.
fn turns() -> impl Strategy<Value = Vec<Vec<Message>>> {
    proptest::collection::vec(new(), 1..4)
        .prop_map(|rest| std::iter::once(vec![Message::user("1+1?")]).chain(rest).collect())
}

/// The tokens between turns, the replies being `said`.
fn between(chat: &Chat, turns: &[Vec<Message>], said: &[Vec<u32>], with_tools: bool) -> Vec<Vec<u32>> {
    let tools = if with_tools { vec![calculator()] } else { vec![] };
    let mut history = turns[0].clone();
    let mut found = Vec::new();
    for (new, reply) in turns[1..].iter().zip(said) {
        found.push(chat.continuation(&history, reply, new, &tools).unwrap());
        history.push(Message::assistant(chat.said(reply)));
        history.extend(new.iter().cloned());
    }
    found
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn what_follows_a_reply_does_not_depend_on_it(
        turns in turns(),
        first in proptest::collection::vec(reply(), 3),
        second in proptest::collection::vec(reply(), 3),
        with_tools in any::<bool>(),
    ) {
        for chat in all() {
            let said = |texts: &[String]| texts.iter().map(|text| sampled(&chat, text)).collect::<Vec<_>>();
            let one = between(&chat, &turns, &said(&first), with_tools);
            prop_assert_eq!(&one, &between(&chat, &turns, &said(&second), with_tools));
            // A turn that was cut has its end given.
            let cut: Vec<Vec<u32>> = first.iter().map(|text| chat.tokenizer().encode(text)).collect();
            for (whole, cut) in one.iter().zip(between(&chat, &turns, &cut, with_tools)) {
                prop_assert!(cut.ends_with(whole) && cut.contains(&chat.stop_ids()[0]));
            }
        }
    }

    /// Where the template keeps the past, a conversation built turn by turn is the conversation rendered as a
    /// whole.
    #[test]
    fn turns_add_up_to_the_whole(
        turns in turns(), said in proptest::collection::vec(reply(), 3), with_tools in any::<bool>(),
    ) {
        let tools = if with_tools { vec![calculator()] } else { vec![] };
        for template in ["chatml", DEFAULT_SYSTEM, WITH_TOOLS] {
            let chat = chat(template, ChatOptions::default());
            let mut path = chat.prompt(&turns[0], &tools).unwrap();
            let mut messages = turns[0].clone();
            for (new, said) in turns[1..].iter().zip(&said) {
                let reply = chat.assistant(&Message::assistant(said), None).unwrap();
                prop_assert_eq!(&chat.said(&reply), said);
                path.extend(&reply);
                path.extend(chat.continuation(&messages, &reply, new, &tools).unwrap());
                messages.push(Message::assistant(said));
                messages.extend(new.iter().cloned());
            }
            prop_assert_eq!(path, chat.prompt(&messages, &tools).unwrap());
        }
    }
}
