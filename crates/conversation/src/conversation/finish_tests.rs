//! Tests of the sequences that the end of a conversation checks, and of the turns that it counts.

use std::sync::{Arc, LazyLock};

use levade_text::testing::thoughtful;
use levade_text::{ChatOptions, Message};

use super::*;
use crate::testing::{Talk, chat};
use crate::{Format, Options};

const THINKS: &str = "<think>\nhm\n</think>\n\nadd";

fn drift_turns(drift: &[levade_tree::Drift]) -> Vec<u32> {
    drift.iter().map(|drift| drift.turn).collect()
}

/// A question, and calls with results. The reasoning of the first call is dropped once a question
/// follows.
fn calls(rounds: usize) -> (Talk, Vec<Message>) {
    static FORMAT: LazyLock<Arc<Format>> = LazyLock::new(|| {
        Arc::new(Format::new(Arc::new(thoughtful(true).unwrap()), Options::default()))
    });
    let mut talk = Talk::with(Arc::clone(&FORMAT));
    let mut messages = vec![Message::user("1+1?")];
    for round in 0..rounds {
        let completion = if round == 0 { THINKS } else { "add" };
        talk.prepare_and_record(&messages, completion);
        messages.extend([Message::assistant(completion), Message::tool("2")]);
    }
    (talk, messages)
}

/// Records a prompt with one more question, without a completion.
fn request_completion(talk: &mut Talk, messages: &[Message], question: &str) {
    let messages = [messages, &[Message::user(question)]].concat();
    talk.conversation.add_context(&mut talk.prepare(&messages)).unwrap();
}

#[test]
fn number_of_checked_sequences_is_bounded() {
    assert_eq!(affordable(&[], 0), 0);
    assert_eq!(affordable(&[10], 10), 1);
    // To the message: four times 5, plus 10.
    assert_eq!(affordable(&[5; 8], 10), 6);
    assert_eq!(affordable(&[5; 8], 9), 5);
    assert_eq!(affordable(&[5, 5, 5, 5, 3, 2, 1], 4), 5);
    // Forks of a long sequence, and conversations with nothing in common.
    assert_eq!(affordable(&[100; 200], 300), 7);
    assert_eq!(affordable(&[3; 500], 1500), 500);
}

fn affordable(depths: &[usize], messages: usize) -> usize {
    super::affordable_count(depths.iter().copied(), messages)
}

#[test]
fn last_prompts_are_sorted_longest_first() {
    let (mut talk, messages) = calls(3);
    request_completion(&mut talk, &messages[..3], "short");
    request_completion(&mut talk, &messages, "long");
    request_completion(&mut talk, &messages[..5], "middle");
    request_completion(&mut talk, &[], "alone");
    request_completion(&mut talk, &messages[..3], "short as well");
    let index = &talk.conversation.index;
    let ends = last_prompts(index);
    let ends: Vec<String> = ends
        .iter()
        .map(|&id| index.node(id).message.as_ref().unwrap().content.as_str().to_owned())
        .collect();
    assert_eq!(ends, ["long", "middle", "short as well", "short", "alone"]);
}

#[test]
fn finish_checks_longest_of_many_forks() {
    // A sequence of 19 messages, 12 questions after it, and one elsewhere: 4 * 20 + 33 messages
    // allow five sequences of 20.
    let (mut talk, messages) = calls(9);
    for fork in 0..12 {
        request_completion(&mut talk, &messages, &format!("{fork}?"));
    }
    request_completion(&mut talk, &messages[..5], "A shorter one?");
    assert_eq!(talk.conversation.drift(), []);
    // Turns 9 to 20 are the questions, and the latest are checked first.
    assert_eq!(drift_turns(&talk.conversation.finish()), [16, 17, 18, 19, 20]);

    // A few sequences are all checked, including the shorter one.
    let (mut talk, messages) = calls(9);
    request_completion(&mut talk, &messages, "0?");
    request_completion(&mut talk, &messages[..5], "A shorter one?");
    assert_eq!(drift_turns(&talk.conversation.finish()), [9, 10]);
}

#[test]
fn finish_finds_first_drifted_turn() {
    for late in 1..7 {
        for after in 0..6 {
            let (mut talk, mut messages) = calls(late);
            // The question that drops the reasoning, and all messages after it.
            messages.pop();
            for turn in 0..=after {
                messages.push(Message::user(format!("{turn}?")));
                talk.prepare_and_record(&messages, "two");
                messages.push(Message::assistant("two"));
            }
            let want: Vec<u32> = (late as u32..=(late + after) as u32).collect();
            let seen = talk.conversation.drift();
            // Directly after the completion with the reasoning, drift is found at once.
            assert_eq!(drift_turns(&seen), if late == 1 { want.clone() } else { vec![] });
            let found = talk.conversation.finish();
            assert_eq!(drift_turns(&found), want);
            assert!(
                found.iter().all(|drift| drift.recorded.starts_with("<think>\nhm")),
                "{found:?}"
            );
            assert_eq!(talk.conversation.finish(), found);
        }
    }
}

#[test]
fn finish_drops_drift_of_abridged_past_only() {
    // Reasoning is kept if the first message asks for it, which an abridged past does not show.
    let template = "{% set keep = 'keep' in messages[0].content %}{% for m in messages %}
        {%- set said = m.content if keep or loop.last else m.content.split('</think>')[-1] %}
        {{- '<|im_start|>' + m.role + '\n' + said + '<|im_end|>' }}
    {%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
    let reasoning = "<think>hm</think>two";
    for (first, want) in [("keep", &[][..]), ("drop", &[1, 2])] {
        let mut talk = Talk::new(chat(template, ChatOptions::default()), Options::default());
        assert!(talk.format.can_abridge());
        let mut messages = vec![Message::user(first)];
        for _ in 0..3 {
            talk.prepare_and_record(&messages, reasoning);
            messages.extend([Message::assistant(reasoning), Message::user("And?")]);
        }
        assert_eq!(drift_turns(&talk.conversation.drift()), [1, 2]);
        assert_eq!(drift_turns(&talk.conversation.finish()), want, "{first}");
    }
}

#[test]
fn finish_keeps_drift_of_complete_renders() {
    // Marks the second message if there are exactly three.
    let template = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
        {{- '!' if loop.index0 == 1 and messages | length == 3 }}{{ m.content + '<|im_end|>' }}
    {%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
    let mut talk = Talk::new(chat(template, ChatOptions::default()), Options::default());
    assert!(!talk.format.can_abridge());
    let mut messages = vec![Message::user("1+1?")];
    for _ in 0..4 {
        talk.prepare_and_record(&messages, "two");
        messages.extend([Message::assistant("two"), Message::user("And?")]);
    }
    assert_eq!(drift_turns(&talk.conversation.drift()), [1]);
    assert_eq!(drift_turns(&talk.conversation.finish()), [1]);
}
