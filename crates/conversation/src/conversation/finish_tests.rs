//! The paths that the end looks at, and the turns that it counts.

use std::sync::{Arc, LazyLock};

use levade_text::testing::thoughtful;
use levade_text::{ChatOptions, Message};

use super::*;
use crate::testing::{Talk, chat};
use crate::{Format, Options};

const THINKS: &str = "<think>\nhm\n</think>\n\nadd";

fn turns(drift: &[levade_tree::Drift]) -> Vec<u32> {
    drift.iter().map(|drift| drift.turn).collect()
}

/// A question, and calls with results; the thought of the first call is dropped once a question follows.
fn calls(rounds: usize) -> (Talk, Vec<Message>) {
    static FORMAT: LazyLock<Arc<Format>> =
        LazyLock::new(|| Arc::new(Format::new(Arc::new(thoughtful(true).unwrap()), Options::default())));
    let mut talk = Talk::with(Arc::clone(&FORMAT));
    let mut messages = vec![Message::user("1+1?")];
    for round in 0..rounds {
        let reply = if round == 0 { THINKS } else { "add" };
        talk.say(&messages, reply);
        messages.extend([Message::assistant(reply), Message::tool("2")]);
    }
    (talk, messages)
}

/// Asks one more question, of which no reply is recorded.
fn ask(talk: &mut Talk, messages: &[Message], question: &str) {
    let messages = [messages, &[Message::user(question)]].concat();
    talk.conversation.give(&mut talk.prepare(&messages)).unwrap();
}

#[test]
fn work_is_bounded_by_the_longest_path_and_by_all_messages() {
    let affordable = |depths: &[usize], messages| super::affordable(depths.iter().copied(), messages);
    assert_eq!(affordable(&[], 0), 0);
    assert_eq!(affordable(&[10], 10), 1);
    // To the message: four times 5, and 10.
    assert_eq!(affordable(&[5; 8], 10), 6);
    assert_eq!(affordable(&[5; 8], 9), 5);
    assert_eq!(affordable(&[5, 5, 5, 5, 3, 2, 1], 4), 5);
    // Forks of a long path, and conversations that share nothing.
    assert_eq!(affordable(&[100; 200], 300), 7);
    assert_eq!(affordable(&[3; 500], 1500), 500);
}

#[test]
fn paths_end_with_their_last_prompt_and_the_longest_comes_first() {
    let (mut talk, messages) = calls(3);
    ask(&mut talk, &messages[..3], "short");
    ask(&mut talk, &messages, "long");
    ask(&mut talk, &messages[..5], "middle");
    ask(&mut talk, &[], "alone");
    ask(&mut talk, &messages[..3], "short as well");
    let index = &talk.conversation.index;
    let ends = ends(index);
    let last = |&id: &NodeId| index.node(id).message.as_ref().unwrap().content.as_str().to_owned();
    let ends: Vec<String> = ends.iter().map(last).collect();
    assert_eq!(ends, ["long", "middle", "short as well", "short", "alone"]);
}

#[test]
fn of_many_forks_the_longest_are_looked_at() {
    // A path of 19 messages, 12 questions after it, one elsewhere: 4 * 20 + 33 messages are five paths of 20.
    let (mut talk, messages) = calls(9);
    for fork in 0..12 {
        ask(&mut talk, &messages, &format!("{fork}?"));
    }
    ask(&mut talk, &messages[..5], "A shorter one?");
    assert_eq!(talk.conversation.drift(), []);
    // Turns 9 to 20 are the questions, and the latest go first.
    assert_eq!(turns(&talk.conversation.finish()), [16, 17, 18, 19, 20]);

    // Few are all looked at, the shorter one too.
    let (mut talk, messages) = calls(9);
    ask(&mut talk, &messages, "0?");
    ask(&mut talk, &messages[..5], "A shorter one?");
    assert_eq!(turns(&talk.conversation.finish()), [9, 10]);
}

#[test]
fn the_first_turn_that_drifts_is_found_wherever_it_is() {
    for late in 1..7 {
        for after in 0..6 {
            let (mut talk, mut messages) = calls(late);
            // The question that drops the thought, and all after it.
            messages.pop();
            for turn in 0..=after {
                messages.push(Message::user(format!("{turn}?")));
                talk.say(&messages, "two");
                messages.push(Message::assistant("two"));
            }
            let want: Vec<u32> = (late as u32..=(late + after) as u32).collect();
            let seen = talk.conversation.drift();
            // Right after the reply that thought, it is seen at once.
            assert_eq!(turns(&seen), if late == 1 { want.clone() } else { vec![] });
            let found = talk.conversation.finish();
            assert_eq!(turns(&found), want);
            assert!(found.iter().all(|drift| drift.recorded.starts_with("<think>\nhm")), "{found:?}");
            assert_eq!(talk.conversation.finish(), found);
        }
    }
}

#[test]
fn drift_that_was_only_near_is_none() {
    // Thoughts are kept where the first message asks for it, which an abridged past does not show.
    let template = "{% set keep = 'keep' in messages[0].content %}{% for m in messages %}
        {%- set said = m.content if keep or loop.last else m.content.split('</think>')[-1] %}
        {{- '<|im_start|>' + m.role + '\n' + said + '<|im_end|>' }}
    {%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
    let thought = "<think>hm</think>two";
    for (first, want) in [("keep", &[][..]), ("drop", &[1, 2])] {
        let mut talk = Talk::new(chat(template, ChatOptions::default()), Options::default());
        assert!(talk.format.abridges());
        let mut messages = vec![Message::user(first)];
        for _ in 0..3 {
            talk.say(&messages, thought);
            messages.extend([Message::assistant(thought), Message::user("And?")]);
        }
        assert_eq!(turns(&talk.conversation.drift()), [1, 2]);
        assert_eq!(turns(&talk.conversation.finish()), want, "{first}");
    }
}

#[test]
fn turns_that_saw_the_whole_stay_as_they_were_seen() {
    // Marks the second message of three, and of no other number.
    let template = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
        {{- '!' if loop.index0 == 1 and messages | length == 3 }}{{ m.content + '<|im_end|>' }}
    {%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
    let mut talk = Talk::new(chat(template, ChatOptions::default()), Options::default());
    assert!(!talk.format.abridges());
    let mut messages = vec![Message::user("1+1?")];
    for _ in 0..4 {
        talk.say(&messages, "two");
        messages.extend([Message::assistant("two"), Message::user("And?")]);
    }
    assert_eq!(turns(&talk.conversation.drift()), [1]);
    assert_eq!(turns(&talk.conversation.finish()), [1]);
}
