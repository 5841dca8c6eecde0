//! Probe of a template: whether an abridged past is enough to render the text after a completion.

use std::sync::Arc;

use levade_text::{Message, ToolSpec};
use serde_json::json;

use super::{CompletionRound, Format, abridge, to_messages};

/// Numbers of user messages before the completion in the probe's conversations.
const DEPTHS: [usize; 3] = [1, 2, 7];

/// Texts of completions that chat templates tend to render differently.
const COMPLETIONS: [&str; 3] = [
    "<think>\nhm\n</think>\n\nDone.",
    "\n Done. ",
    "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>",
];

/// Returns whether an abridged past gives the same tokens as the complete past. Compares them for
/// pasts of several depths and shapes, and for different messages after a completion.
pub(crate) fn probe_abridging(format: &Format) -> bool {
    let tools = tools();
    for tools in [&[], &tools[..]] {
        for with_system in [false, true] {
            for rounds in DEPTHS {
                for ends_with_result in [false, true] {
                    let past = past_messages(with_system, rounds, ends_with_result);
                    // No completion follows a past that the template rejects.
                    let Ok(prompt) = format.chat().prompt(&to_messages(&past), tools) else {
                        continue;
                    };
                    if !is_equivalent(format, &past, &prompt, tools) {
                        return false;
                    }
                }
            }
        }
    }
    true
}

/// Returns whether the abridged past can replace `past`, whose prompt has the tokens `prompt`.
fn is_equivalent(
    format: &Format,
    past: &[Arc<Message>],
    prompt: &[u32],
    tools: &[ToolSpec],
) -> bool {
    let chat = format.chat();
    let (short, stand_in) = abridge(past, tools);
    let news = [
        vec![Message::user("And then?")],
        vec![Message::tool("2")],
        vec![Message::tool("2"), Message::tool("{\"a\": 1}")],
        vec![Message::tool("2"), Message::user("And then?")],
        vec![Message::user("And then?"), Message::assistant("Nothing."), Message::user("No?")],
        vec![Message::system("Be brief.")],
    ];
    for (at, new) in news.iter().enumerate() {
        let completion = (&chat.stop_ids()[..1], "");
        let long = format.tokens_after(&to_messages(past), completion, new, tools, usize::MAX);
        let following =
            match (long, format.tokens_after(&short, completion, new, stand_in, usize::MAX)) {
                (Ok(long), Ok(short)) if long == short => long,
                (Err(_), Err(_)) => continue,
                _ => return false,
            };
        // Rendering of completions before a question or a result.
        if at > 1 {
            continue;
        }
        for text in COMPLETIONS {
            let mut completion = chat.tokenizer().encode(text);
            completion.extend(chat.stop_ids().first());
            let round =
                CompletionRound { past, completion: &completion, text, rest: "", new, tools };
            let path = [prompt, &completion, &following.tokens].concat();
            let all = format.full_drift(&path, round);
            let near = format.nearby_drift(round, &following.tokens);
            // The same result: drift or none, and rendered or rejected.
            if near.map(|near| near.prompt.is_some()) != all.map(|all| all.prompt.is_some()) {
                return false;
            }
        }
    }
    true
}

/// Creates the messages of a probe's conversation before the completion.
fn past_messages(with_system: bool, rounds: usize, ends_with_result: bool) -> Vec<Arc<Message>> {
    let mut messages = Vec::new();
    if with_system {
        messages.push(Message::system("You are a clerk.\nUse what you have."));
    }
    for round in 0..rounds {
        messages.push(Message::user(format!("Question {round}: what is 2 + {round}?")));
        let last = round + 1 == rounds;
        if (last && ends_with_result) || (!last && round % 2 == 0) {
            messages.extend([Message::assistant("Done."), Message::tool(format!("{}", round + 2))]);
        }
        if !last {
            messages.push(Message::assistant("Done."));
        }
    }
    messages.into_iter().map(Arc::new).collect()
}

fn tools() -> [ToolSpec; 2] {
    ["add", "look_up"].map(|name| ToolSpec {
        name: name.into(),
        description: format!("Does {name}."),
        parameters: json!({
            "type": "object",
            "properties": { "a": { "type": "number", "description": "A number." } },
            "required": ["a"],
        }),
    })
}

#[cfg(test)]
#[path = "probe_tests.rs"]
mod tests;
