use std::collections::BTreeMap;

use super::*;

#[test]
fn edited_history_forks_with_reason() {
    // A conversation that continues, so that there is something to fork from.
    let full_talk = || {
        let mut talk = talk();
        let (mut messages, ..) = record_conversation(&mut talk);
        let (_, third) = talk.prepare_and_record(&messages, "11.");
        messages.extend([third.message(), Message::user("Bye.")]);
        (talk, messages)
    };
    let edits: Vec<(Reason, usize, usize, Change)> = vec![
        (Reason::Repeated, 7, 6, Box::new(|m| m.truncate(7))),
        (Reason::Repeated, 2, 0, Box::new(|m| m.truncate(2))),
        (
            Reason::Branched,
            6,
            6,
            Box::new(|m| {
                m.truncate(7);
                m[6].content = "Thanks. 8+9?".into();
            }),
        ),
        (
            Reason::System,
            0,
            0,
            Box::new(|m| m[0].content = format!("{} Be brief.", m[0].content.as_str()).into()),
        ),
        (Reason::Edited, 1, 0, Box::new(|m| m[1].content = "1.5+2, 3+5?".into())),
        (Reason::Edited, 4, 3, Box::new(|m| m[4].content = "7".into())),
        // White space that the model has seen.
        (
            Reason::Edited,
            1,
            0,
            Box::new(|m| m[1].content = format!("{} ", m[1].content.as_str()).into()),
        ),
        (
            Reason::Edited,
            4,
            3,
            Box::new(|m| m[4].content = format!("\n{}", m[4].content.as_str()).into()),
        ),
        (Reason::Shortened, 3, 3, Box::new(|m| drop(m.drain(3..5)))),
        (Reason::Shortened, 4, 3, Box::new(|m| m.truncate(4))),
        (Reason::Shortened, 2, 0, Box::new(|m| drop(m.drain(2..5)))),
        (Reason::Shortened, 5, 3, Box::new(|m| drop(m.remove(5)))),
        (
            Reason::CompletionEdited,
            5,
            3,
            Box::new(|m| m[5].content = "The answers are 3.5 and 7.".into()),
        ),
        (Reason::CompletionEdited, 2, 0, Box::new(|m| m[2].content = "Let us see.".into())),
        (
            Reason::CallsEdited,
            2,
            0,
            Box::new(|m| {
                m[2].tool_calls[0].arguments.insert("a".into(), json!(1.6));
            }),
        ),
        (
            Reason::CallsEdited,
            2,
            0,
            Box::new(|m| {
                for call in &mut m[2].tool_calls {
                    call.id.clear();
                }
                m[2].tool_calls[1].name = "sub".into();
            }),
        ),
        (
            Reason::ReasoningEdited,
            2,
            0,
            Box::new(|m| {
                m[2].content = "<think>two summs</think>Let me see.".into();
                m[2].tool_calls.iter_mut().for_each(|call| call.id.clear());
            }),
        ),
        (
            Reason::ReasoningEdited,
            2,
            0,
            Box::new(|m| {
                m[2].reasoning_content = Some("two summs".into());
                m[2].tool_calls.iter_mut().for_each(|call| call.id.clear());
            }),
        ),
        (
            Reason::TextLost,
            2,
            0,
            Box::new(|m| {
                m[2].content = "".into();
                m[2].tool_calls.iter_mut().for_each(|call| call.id.clear());
            }),
        ),
        (
            Reason::CompletionEdited,
            2,
            0,
            Box::new(|m| {
                m[2].content = "Let us see.".into();
                m[2].tool_calls.iter_mut().for_each(|call| call.id.clear());
            }),
        ),
        (
            Reason::CallsEdited,
            2,
            0,
            Box::new(|m| {
                m[2].content = "".into();
                m[2].tool_calls.truncate(1);
                m[2].tool_calls[0].id.clear();
            }),
        ),
        (
            Reason::CallsAsText,
            2,
            0,
            Box::new(|m| {
                m[2].tool_calls.clear();
                m[2].content = "Let me see. add(1.5, 2), add(3, 4)".into();
            }),
        ),
        (
            Reason::Unrecorded,
            1,
            0,
            Box::new(|m| m.insert(1, Message::assistant("How can I help?"))),
        ),
    ];
    for (reason, at, completion_end, edit) in edits {
        let (mut talk, mut messages) = full_talk();
        edit(&mut messages);
        let prepared = talk.prepare(&messages);
        assert_eq!(prepared.origin, fork_origin(at, reason), "{messages:#?}");
        assert_eq!(prepared.repeated.up_to_completion, completion_end, "{reason:?}");
        // The template renders everything that was not recorded.
        let format = &talk.format;
        let printed = format.chat().prompt(&messages, &talk.tools).unwrap();
        let printed = talk.text(&printed);
        let text = talk.text(&prepared.prompt);
        let last = format!("<|im_start|>{}", messages.last().unwrap().role.as_str());
        let last = printed.rfind(&last).unwrap();
        assert!(text.ends_with(&printed[last..]), "{reason:?}: {text}");
        if completion_end == 0 {
            assert_eq!(text, printed, "{reason:?}");
        }
        let kept = talk.record(prepared, "ok");
        assert_eq!(
            talk.text(&talk.conversation.trajectory().sequence_tokens(kept.segment)),
            text + "ok<|im_end|>"
        );
        assert_eq!(talk.conversation.counts().forked, BTreeMap::from([(reason, 1)]));
    }
    // A request that ends with a completion continues it, even if messages followed it.
    assert_eq!(full_talk().0.prepare(&full_talk().1[..6]).origin, Origin::Continued);
    // If its reasoning is edited, a completion still matches by the ids of its calls.
    let (talk, mut messages) = full_talk();
    messages[2].content = "<think>two summs</think>Let me see.".into();
    assert_eq!(talk.prepare(&messages).origin, Origin::Continued);
}

#[test]
fn messages_are_stored_unchanged() {
    let mut talk = talk();
    for question in ["1+1?", " 1+1?\n", "1+1?"] {
        talk.prepare_and_record(&[Message::user(question)], "two");
    }
    // Two questions that differ in white space, and three completions, below the root.
    let kept = talk.conversation.index.nodes().filter_map(|(_, node)| node.message.as_deref());
    let kept: Vec<&str> = kept.map(|message| message.content.as_str()).collect();
    assert_eq!(kept, ["1+1?", "two", " 1+1?\n", "two", "two"]);
}

#[test]
fn moved_calls_are_merged_or_reordered() {
    let mut talk = talk();
    let mut messages = opening();
    let mut completions = Vec::new();
    for a in 0..3 {
        let call = format!(
            "<tool_call>\n{{\"name\": \"add\", \"arguments\": {{\"a\": {a}}}}}\n</tool_call>"
        );
        let (_, completion) = talk.prepare_and_record(&messages, &call);
        messages.push(completion.message());
        messages.extend(results(&completion));
        completions.push(completion);
    }
    let mut merged = messages.clone();
    let later = merged[4].tool_calls.clone();
    merged[2].tool_calls.extend(later);
    assert_eq!(talk.prepare(&merged).origin, fork_origin(2, Reason::Merged));
    let mut reordered = messages.clone();
    reordered.swap(2, 4);
    reordered.swap(3, 5);
    assert_eq!(talk.prepare(&reordered).origin, fork_origin(2, Reason::Reordered));
    assert_eq!(talk.prepare(&messages).origin, Origin::Continued);
    // A final answer before the call that led to it, and in place of that call.
    let (_, final_completion) = talk.prepare_and_record(&messages, "Three sums.");
    messages.push(final_completion.message());
    messages.push(Message::user("And then?"));
    let mut early = messages.clone();
    let final_completion = early.remove(8);
    early.insert(6, final_completion);
    assert_eq!(talk.prepare(&early).origin, fork_origin(6, Reason::Reordered));
    early.drain(7..9);
    assert_eq!(talk.prepare(&early).origin, fork_origin(6, Reason::Shortened));
}

#[test]
fn other_tools_and_conversations_are_distinguished() {
    let mut talk = talk();
    let (messages, ..) = record_conversation(&mut talk);
    // A title is requested in parallel with the conversation.
    let title = [Message::system("Write a title."), Message::user("1.5+2, 3+4?")];
    let tools = std::mem::take(&mut talk.tools);
    assert_eq!(talk.prepare(&title).origin, Origin::Started);
    assert_eq!(talk.prepare(&messages).origin, fork_origin(0, Reason::Tools));
    assert_eq!(talk.prepare(&messages).repeated, RepeatedHistory::default());
    talk.tools = [tools.clone(), vec![tool("sub")]].concat();
    assert_eq!(talk.prepare(&messages).origin, fork_origin(0, Reason::Tools));
    assert_eq!(talk.prepare(&messages[..2]).origin, fork_origin(0, Reason::Tools));
    // With other tools: a different conversation exists, then the same one.
    talk.prepare_and_record(&[Message::user("7+8?")], "15");
    assert_eq!(talk.prepare(&messages).origin, fork_origin(0, Reason::Tools));
    talk.prepare_and_record(&messages[..2], "3.5 and 7");
    assert_eq!(talk.prepare(&messages[..2]).origin, fork_origin(2, Reason::Repeated));
    talk.tools = tools;
    // A second conversation with the same instructions.
    let second = [messages[0].clone(), Message::user("7+8?")];
    assert_eq!(talk.prepare(&second).origin, Origin::Started);
    assert_eq!(talk.prepare(&[Message::user("9+8?")]).origin, Origin::Started);
    // Different instructions start a conversation if no recorded question follows them.
    assert_eq!(talk.prepare(&[title[0].clone(), Message::user("9+8?")]).origin, Origin::Started);
    assert_eq!(
        talk.prepare(&[title[0].clone(), title[1].clone()]).origin,
        fork_origin(0, Reason::System)
    );
    // A conversation that ended with a prompt continues. After a completion is recorded, it counts
    // as missing.
    let more = [second.to_vec(), vec![Message::user("And 9+1?")]].concat();
    talk.conversation.add_context(&mut talk.prepare(&second)).unwrap();
    assert_eq!(talk.prepare(&second).origin, fork_origin(2, Reason::Repeated));
    assert_eq!(talk.prepare(&more).origin, Origin::Started);
    talk.prepare_and_record(&second, "15");
    assert_eq!(talk.prepare(&more).origin, fork_origin(2, Reason::Shortened));
    let (_, final_completion) = talk.prepare_and_record(&messages, "11");
    let next = Message::user("12+13?");
    let last = Message::user("Well?");
    let requested = [messages, vec![final_completion.message(), next]].concat();
    talk.prepare_and_record(&requested, "25");
    assert_eq!(
        talk.prepare(&[requested, vec![last]].concat()).origin,
        fork_origin(9, Reason::Shortened)
    );
}

#[test]
fn shortened_fork_requires_recorded_message_below() {
    let mut talk = talk();
    let system = Message::system("Use tools.");
    let first = Message::user("1+2?");
    let second = Message::user("3+4?");
    talk.prepare_and_record(&[system.clone(), first.clone()], "3");
    let (_, completion) = talk.prepare_and_record(&[system.clone(), second.clone()], "7");
    let mut messages = vec![system, second.clone(), completion.message()];
    talk.prepare_and_record(&[&messages[..], &[Message::user("And then?")]].concat(), "Nothing.");
    // The question exists in the other conversation, or is the message before.
    for question in [first, second] {
        messages.truncate(3);
        messages.push(question);
        assert_eq!(talk.prepare(&messages).origin, fork_origin(3, Reason::Branched));
    }
    messages.remove(2);
    assert_eq!(talk.prepare(&messages[..3]).origin, fork_origin(2, Reason::Shortened));
}
