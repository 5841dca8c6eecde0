use std::sync::Arc;

use levade_text::testing::{ALWAYS_THINKS, NUMBERED, STRICT, header_chat, thoughtful, tiny_chat};
use levade_text::{Chat, ChatOptions};

use crate::testing::{ROUNDS, chat};
use crate::{Format, Options};

fn abridges(chat: Chat) -> bool {
    Format::new(Arc::new(chat), Options::default()).can_abridge()
}

#[test]
fn unused_format_is_not_probed() {
    let format = Format::without_probe(Arc::new(tiny_chat().unwrap()), Options::default());
    assert_eq!(format.abridges.get(), None);
    assert!(format.can_abridge());
    assert_eq!(
        Format::new(Arc::clone(format.chat()), Options::default()).abridges.get(),
        Some(&true)
    );
}

#[test]
fn probe_detects_context_dependent_templates() {
    let plain = |template: &str| chat(template, ChatOptions::default());
    for (name, chat) in [
        ("chatml", tiny_chat().unwrap()),
        ("headers", header_chat().unwrap()),
        ("thinks", thoughtful(true).unwrap()),
        ("does not think", thoughtful(false).unwrap()),
        ("always thinks", plain(ALWAYS_THINKS)),
        ("strict", plain(STRICT)),
    ] {
        assert!(abridges(chat), "{name}");
    }
    assert!(!abridges(plain(NUMBERED)));
    assert!(!abridges(plain(ROUNDS)));
    // A template that counts calls, and one that names its tools after each result.
    let loops =
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}";
    let ends =
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
    assert!(abridges(plain(&format!("{loops}{ends}"))));
    // A template that rejects instructions anywhere but at the start.
    let rejects =
        "{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}";
    assert!(abridges(plain(&format!("{loops}{rejects}{ends}"))));
    let counts = "{% if m.role == 'tool' %}{{ messages | selectattr('role', 'equalto', 'tool') | \
                  list | length }}{% endif %}";
    assert!(!abridges(plain(&format!("{loops}{counts}{ends}"))));
    let names = "{% if m.role == 'tool' and tools %}{{ tools[0].function.name }}{% endif %}";
    let hermes = "{{ tools | tojson if tools }}{{ '<tool_call> \"arguments\"' if tools }}";
    assert!(!abridges(plain(&format!("{hermes}{loops}{names}{ends}"))));
    // A template that drops messages before the last two questions.
    let window = loops.replace("messages %}", "messages[-6:] %}");
    assert!(!abridges(plain(&format!("{window}{ends}"))));
}

#[test]
fn probe_compares_after_questions_and_results() {
    assert!(abridges(chat_that_drops_before("nobody")));
    assert!(!abridges(chat_that_drops_before("user")));
    assert!(!abridges(chat_that_drops_before("tool")));
}

/// Returns a chat whose template drops earlier messages once there were several questions, and
/// only if the last message has the role `role`.
fn chat_that_drops_before(role: &str) -> Chat {
    let requested = "messages | selectattr('role', 'equalto', 'user') | list | length";
    let drops =
        format!("messages[-1].role == '{role}' and m.role == 'assistant' and {requested} > 3");
    let loops = format!(
        "{{% for m in messages %}}{{{{ '<|im_start|>' + m.role + '\n\
             ' + ('' if {drops} else m.content) + '<|im_end|>' }}}}"
    );
    let ends =
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
    chat(&format!("{loops}{ends}"), ChatOptions::default())
}

#[test]
fn past_messages_alternate_tool_calls_with_answers() {
    assert_eq!(shape_of(false, 1, false), "u");
    assert_eq!(shape_of(false, 1, true), "uat");
    assert_eq!(shape_of(true, 3, true), "suatauauat");
    assert_eq!(shape_of(false, 4, false), "uatauauatau");
}

fn shape_of(with_system: bool, rounds: usize, ends_with_result: bool) -> String {
    let past = super::past_messages(with_system, rounds, ends_with_result);
    past.iter().map(|message| &message.role.as_str()[..1]).collect::<String>()
}
