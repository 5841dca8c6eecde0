//! Tests of system messages, with templates that accept them in different ways.

use crate::chat_tests::{chat, text};
use crate::testing::{FIRST_SYSTEM_ONLY, STRICT_TURNS, sampled, tiny_chat};
use crate::{Chat, ChatOptions, LateSystem, Message, Role, ShiftedSystems};

/// Prints all system messages at the start, as some templates do.
const COLLECTS: &str = "{{ '<|im_start|>system\n\
                        ' }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content \
                        }}{% endif %}{% endfor %}{{ '<|im_end|>\n\
                        ' }}{% for m in messages %}{% if m.role != 'system' %}{{ '<|im_start|>' + \
                        m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
/// Accepts no system message.
const NO_SYSTEM: &str = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no \
                         system') }}{% endif %}{{ '<|im_start|>' + m.role + '\n\
                         ' + m.content + '<|im_end|>\n\
                         ' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\
                         ' }}{% endif %}";
/// Supports the role `developer`, and drops all instructions except the first message.
const DEVELOPER: &str = "{% for m in messages %}{% if m.role in ['system', 'developer'] and not loop.first %}{% else %}\
    {{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n\
    ' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\
    ' }}{% endif %}";

fn developer(content: &str) -> Message {
    Message { role: Role::Developer, ..Message::system(content) }
}

/// Returns the turns of a prompt as `role:content`, without the generation prompt.
fn turns(chat: &Chat, messages: &[Message]) -> Vec<String> {
    let prompt = text(chat, &chat.prompt(messages, &[]).unwrap());
    let turns = prompt.split("<|im_start|>").filter_map(|turn| turn.split_once("<|im_end|>"));
    turns.map(|(turn, _)| turn.replacen('\n', ":", 1)).collect()
}

#[test]
fn leading_instructions_join_for_single_system_template() {
    for (template, messages, want) in [
        ("chatml", vec![system_a(), system_b(), user_q()], vec!["system:a", "system:b", "user:q"]),
        (
            FIRST_SYSTEM_ONLY,
            vec![system_a(), system_b(), user_q()],
            vec!["system:a\n\nb", "user:q"],
        ),
        (
            FIRST_SYSTEM_ONLY,
            vec![system_a(), developer("b"), user_q()],
            vec!["system:a\n\nb", "user:q"],
        ),
        (
            FIRST_SYSTEM_ONLY,
            vec![developer("a"), system_b(), user_q()],
            vec!["system:a\n\nb", "user:q"],
        ),
        (FIRST_SYSTEM_ONLY, vec![developer("a"), user_q()], vec!["system:a", "user:q"]),
        (
            FIRST_SYSTEM_ONLY,
            vec![system_a(), system_b(), system_a(), user_q()],
            vec!["system:a\n\nb\n\na", "user:q"],
        ),
        (FIRST_SYSTEM_ONLY, vec![system_a(), user_q()], vec!["system:a", "user:q"]),
        (
            FIRST_SYSTEM_ONLY,
            vec![Message::system(""), system_b(), user_q()],
            vec!["system:b", "user:q"],
        ),
        (
            FIRST_SYSTEM_ONLY,
            vec![system_a(), Message::system(" "), user_q(), Message::system("")],
            vec!["system:a", "user:q"],
        ),
        (FIRST_SYSTEM_ONLY, vec![user_q()], vec!["user:q"]),
        (STRICT_TURNS, vec![system_a(), system_b(), user_q()], vec!["system:a\n\nb", "user:q"]),
        (DEVELOPER, vec![system_a(), developer("b"), user_q()], vec!["system:a\n\nb", "user:q"]),
        (DEVELOPER, vec![developer("a"), system_b(), user_q()], vec!["developer:a\n\nb", "user:q"]),
        (NO_SYSTEM, vec![system_a(), system_b(), user_q()], vec!["user:a", "user:b", "user:q"]),
    ] {
        assert_eq!(turns(&chat(template, ChatOptions::default()), &messages), want, "{template}");
    }
}

fn system_a() -> Message {
    Message::system("a")
}

fn system_b() -> Message {
    Message::system("b")
}

fn user_q() -> Message {
    Message::user("q")
}

#[test]
fn dropped_late_instructions_become_user_messages() {
    for (template, messages, want) in [
        (
            "chatml",
            vec![Message::user("q"), assistant_r(), system_s(), Message::user("p")],
            vec!["user:q", "assistant:r", "system:s", "user:p"],
        ),
        (
            FIRST_SYSTEM_ONLY,
            vec![Message::user("q"), assistant_r(), system_s(), Message::user("p")],
            vec!["user:q", "assistant:r", "user:s", "user:p"],
        ),
        (
            FIRST_SYSTEM_ONLY,
            vec![Message::user("q"), assistant_r(), developer("s")],
            vec!["user:q", "assistant:r", "user:s"],
        ),
        (FIRST_SYSTEM_ONLY, vec![Message::user("q"), system_s()], vec!["user:q", "user:s"]),
        (
            FIRST_SYSTEM_ONLY,
            vec![system_s(), Message::user("q"), system_s()],
            vec!["system:s", "user:q", "user:s"],
        ),
        (
            COLLECTS,
            vec![Message::user("q"), assistant_r(), system_s(), Message::user("p")],
            vec!["system:", "user:q", "assistant:r", "user:s", "user:p"],
        ),
        (
            DEVELOPER,
            vec![Message::user("q"), assistant_r(), system_s(), Message::user("p")],
            vec!["user:q", "assistant:r", "user:s", "user:p"],
        ),
        // If turns must alternate, the instructions share a user message.
        (
            STRICT_TURNS,
            vec![Message::user("q"), assistant_r(), system_s(), Message::user("p")],
            vec!["user:q", "assistant:r", "user:s\n\np"],
        ),
        (STRICT_TURNS, vec![Message::user("q"), system_s()], vec!["user:q\n\ns"]),
        (
            STRICT_TURNS,
            vec![Message::user("q"), assistant_r(), system_s(), system_s(), Message::user("p")],
            vec!["user:q", "assistant:r", "user:s\n\ns\n\np"],
        ),
        (
            STRICT_TURNS,
            vec![Message::user("q"), system_s(), assistant_r(), Message::user("p")],
            vec!["user:q\n\ns", "assistant:r", "user:p"],
        ),
        (
            STRICT_TURNS,
            vec![system_s(), Message::user("q"), assistant_r(), system_s(), Message::user("p")],
            vec!["system:s", "user:q", "assistant:r", "user:s\n\np"],
        ),
    ] {
        assert_eq!(turns(&chat(template, ChatOptions::default()), &messages), want, "{template}");
    }
}

fn system_s() -> Message {
    Message::system("s")
}

fn assistant_r() -> Message {
    Message::assistant("r")
}

#[test]
fn late_instructions_merge_into_first_if_configured() {
    let strict = chat(FIRST_SYSTEM_ONLY, merging_options());
    let messages = [
        Message::system("a"),
        Message::system("b"),
        user_q(),
        Message::assistant("r"),
        Message::system("c"),
        user_q(),
    ];
    assert_eq!(
        turns(&strict, &messages),
        ["system:a\n\nb\n\nc", "user:q", "assistant:r", "user:q"]
    );
    assert_eq!(turns(&strict, &messages[2..]), ["system:c", "user:q", "assistant:r", "user:q"]);
    assert_eq!(strict.merge_systems(&messages).unwrap()[0].content, "a\n\nb\n\nc");
    assert_eq!(strict.merge_systems(&messages[..4]), None);
    // A template that prints late instructions is not affected.
    assert_eq!(chat("chatml", merging_options()).merge_systems(&messages), None);
    assert_eq!(tiny_chat().unwrap().merge_systems(&messages), None);
}

fn merging_options() -> ChatOptions {
    ChatOptions { late_system: LateSystem::Merge, ..ChatOptions::default() }
}

#[test]
fn prompts_continue_across_joined_and_moved_instructions() {
    for template in [FIRST_SYSTEM_ONLY, STRICT_TURNS, COLLECTS, DEVELOPER, "chatml"] {
        let chat = chat(template, ChatOptions::default());
        let mut messages = vec![Message::system("a"), developer("b"), Message::user("q")];
        let mut prompt = chat.prompt(&messages, &[]).unwrap();
        for turn in 0..3 {
            let completion_ids = sampled(&chat, "r");
            let new = match turn {
                0 => vec![Message::user("p")],
                1 => vec![Message::system("late"), Message::user("p")],
                _ => vec![Message::user("p"), developer("late"), Message::system("again")],
            };
            let more = chat.continuation(&messages, &completion_ids, &new, &[]).unwrap();
            messages.push(Message::assistant("r"));
            messages.extend(new);
            let next = chat.prompt(&messages, &[]).unwrap();
            assert_eq!([prompt, completion_ids, more].concat(), next, "{template}: turn {turn}");
            prompt = next;
        }
    }
}

#[test]
fn results_and_question_share_alternating_turn() {
    let loop_start = "{% for m in messages %}";
    let no_tools = "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}";
    let template = STRICT_TURNS.replace(loop_start, &format!("{loop_start}{no_tools}"));
    let strict = chat(&template, ChatOptions::default());
    let messages = [
        Message::user("q"),
        Message::assistant("r"),
        Message::tool("1"),
        Message::system("s"),
        Message::user("p"),
    ];
    let want = "user:<tool_response>\n1\n</tool_response>\n\ns\n\np";
    assert_eq!(turns(&strict, &messages), ["user:q", "assistant:r", want]);
    let loose = chat(FIRST_SYSTEM_ONLY, ChatOptions::default());
    assert_eq!(turns(&loose, &messages)[2..], ["tool:1", "user:s", "user:p"]);
}

#[test]
fn shifted_instructions_are_counted_once() {
    let strict = chat(FIRST_SYSTEM_ONLY, ChatOptions::default());
    let counts = |messages: &[Message], opens: bool| {
        let ShiftedSystems { joined, moved } = strict.count_shifted_systems(messages, opens);
        (joined, moved)
    };
    assert_eq!(counts(&[system_s(), system_s(), system_s(), user_q()], true), (2, 0));
    assert_eq!(counts(&[system_s(), user_q(), system_s(), user_q(), system_s()], true), (0, 2));
    assert_eq!(counts(&[system_s(), user_q()], false), (0, 1));
    assert_eq!(counts(&[user_q()], false), (0, 0));
    let plain = tiny_chat().unwrap();
    assert_eq!(
        plain.count_shifted_systems(&[system_s(), system_s(), user_q(), system_s()], true),
        ShiftedSystems::default()
    );
}

#[test]
fn tool_descriptions_join_leading_instructions() {
    let tool = crate::chat_tests::calculator();
    for (template, role) in
        [(FIRST_SYSTEM_ONLY, "system"), (STRICT_TURNS, "system"), (NO_SYSTEM, "user")]
    {
        let chat = chat(template, ChatOptions::default());
        let messages = [Message::system("a"), Message::system("b"), Message::user("q")];
        let prompt = text(&chat, &chat.prompt(&messages, std::slice::from_ref(&tool)).unwrap());
        assert!(prompt.starts_with(&format!("<|im_start|>{role}\na")), "{prompt}");
        assert!(
            prompt.contains("You can call tools.") && prompt.contains("q<|im_end|>"),
            "{prompt}"
        );
    }
}
