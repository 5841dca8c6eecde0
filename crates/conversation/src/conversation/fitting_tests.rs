use std::sync::Arc;

use levade_text::testing::tiny_chat;
use levade_text::{Message, Role, ToolCall};
use proptest::prelude::*;

use super::*;
use crate::testing::Talk;
use crate::{Format, Options, Reason};

/// A conversation that a context policy keeps within a budget.
struct BoundedTalk {
    talk: Talk,
    budget: Budget,
    /// Transcripts for which a summary was requested.
    requested: Vec<String>,
    /// Number of messages that were rendered, over all prompts.
    printed: usize,
}

impl BoundedTalk {
    fn new(overflow: Overflow, max_tokens: usize, keep: usize) -> Self {
        thread_local! {
            static FORMAT: Arc<Format> = {
                let chat = Arc::new(tiny_chat().unwrap());
                Arc::new(Format::new(chat, Options::default()))
            };
        }
        let talk = Talk::with(FORMAT.with(Arc::clone));
        BoundedTalk {
            talk,
            budget: Budget { max_tokens, overflow, keep },
            requested: Vec::new(),
            printed: 0,
        }
    }

    /// Returns the remaining messages of a request, with their prompt. Returns `None` if it does
    /// not fit.
    fn fit(&mut self, messages: &[Message]) -> Option<(Vec<Message>, PreparedPrompt)> {
        let Talk { conversation, format, tools, agent, policy } = &self.talk;
        let request = Request { agent, policy, format, messages, tools };
        let mut fitting = conversation.start_fitting(&request, self.budget);
        for _ in 0..100 {
            let kept = fitting.messages().into_owned();
            let prepared = conversation.prepare(&Request { messages: &kept, ..request }).unwrap();
            self.printed += kept.len() - prepared.repeated.up_to_completion;
            match fitting.judge(prepared) {
                FitResult::Fits(prepared) => return Some((kept, *prepared)),
                FitResult::Rerender => {}
                FitResult::Summarize(text) => {
                    fitting.set_summary("It was said.");
                    self.requested.push(text);
                }
                FitResult::TooLong(_) => return None,
            }
        }
        panic!("a hundred cuts are not enough");
    }
}

const POLICIES: [Overflow; 3] =
    [Overflow::TruncateMiddle, Overflow::DropOldest, Overflow::Summarize];

/// Instructions, a task, and rounds of (number of calls, length of their results, whether a
/// question follows).
fn history(rounds: &[(usize, usize, bool)]) -> Vec<Message> {
    let mut messages = vec![Message::system("Be brief."), Message::user("The task.")];
    for (round, &(calls, length, has_question)) in rounds.iter().enumerate() {
        messages.push(Message::calls(
            format!("Reply {round}."),
            (0..calls)
                .map(|at: usize| ToolCall {
                    id: format!("{round}.{at}"),
                    name: "look".into(),
                    arguments: serde_json::from_str("{\"a\": 1}").unwrap(),
                })
                .collect(),
        ));
        for at in 0..calls {
            let id = Some(format!("{round}.{at}"));
            messages.push(Message { tool_call_id: id, ..Message::tool("x y ".repeat(length)) });
        }
        if has_question || calls == 0 {
            messages.push(Message::user(format!("Question {round}?")));
        }
    }
    messages
}

fn newest(messages: &[Message], keep: usize) -> usize {
    let completions: Vec<usize> =
        (0..messages.len()).filter(|&at| messages[at].role == Role::Assistant).collect();
    completions.len().checked_sub(keep).map_or(2, |at| completions[at])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn fitted_prompts_keep_calls_with_results(
        rounds in prop::collection::vec((0..3usize, 1..120usize, any::<bool>()), 0..9),
        max_tokens in 60..900usize, keep in 1..4usize, policy in 0..3usize,
    ) {
        let messages = history(&rounds);
        let mut bounded = BoundedTalk::new(POLICIES[policy], max_tokens, keep);
        let found = bounded.fit(&messages);
        let equal = BoundedTalk::new(POLICIES[policy], max_tokens, keep).fit(&messages);
        let prompt = |found: &Option<(Vec<Message>, PreparedPrompt)>| {
            found.as_ref().map(|(_, prepared)| prepared.prompt.clone())
        };
        prop_assert_eq!(prompt(&found), prompt(&equal));
        let newest = newest(&messages, keep);
        let Some((kept, prepared)) = found else {
            // In that case the messages that must stay are too long by themselves.
            let minimum = [&messages[..2], &messages[newest..]].concat();
            let summary = if POLICIES[policy] == Overflow::Summarize { 80 } else { 0 };
            prop_assert!(bounded.talk.prepare(&minimum).prompt.len() + summary > max_tokens);
            return Ok(());
        };
        prop_assert!(prepared.prompt.len() <= max_tokens, "{} > {max_tokens}", prepared.prompt.len());
        prop_assert_eq!(&kept[0], &messages[0]);
        prop_assert!(kept[1].content.starts_with("The task."));
        prop_assert!(kept.ends_with(&messages[newest..]));
        let mut open: Vec<String> = Vec::new();
        for message in &kept {
            match message.role {
                Role::Tool => {
                    let id = message.tool_call_id.clone().unwrap();
                    prop_assert!(open.contains(&id), "{id} has no call");
                    open.retain(|other| *other != id);
                }
                _ => {
                    prop_assert!(open.is_empty(), "{open:?} have no answers");
                    open = message.tool_calls.iter().map(|call| call.id.clone()).collect();
                }
            }
        }
        let whole = bounded.talk.prepare(&messages);
        let forked = matches!(prepared.origin, Origin::Forked(Fork { at: 2, reason }) if reason.is_truncation());
        prop_assert_eq!(forked, whole.prompt.len() > max_tokens);
        prop_assert_eq!(kept == messages, !forked);
    }
}

#[test]
fn shortened_conversation_continues_its_recorded_prompt() {
    for overflow in POLICIES {
        let mut bounded = BoundedTalk::new(overflow, 400, 1);
        let mut messages = vec![Message::system("Be brief."), Message::user("The task.")];
        let mut truncations = 0;
        let mut prints = Vec::new();
        let turns = 60;
        for turn in 0..turns {
            let before = bounded.printed;
            let (kept, prepared) = bounded.fit(&messages).unwrap();
            prints.push(bounded.printed - before);
            match prepared.origin {
                Origin::Started => assert_eq!(turn, 0),
                Origin::Continued => assert!(prepared.repeated.up_to_completion > 0),
                Origin::Forked(Fork { reason, .. }) => {
                    assert_eq!(reason, overflow.reason());
                    truncations += 1;
                }
            }
            let prompt = prepared.prompt.clone();
            let completion = bounded.talk.record(prepared, &format!("Reply {turn}."));
            let sequence =
                bounded.talk.conversation.trajectory().sequence_tokens(completion.segment);
            assert!(sequence.starts_with(&prompt), "what the model saw is what is recorded");
            assert!(bounded.talk.text(&sequence).contains(kept.last().unwrap().content.as_str()));
            messages.extend([
                completion.message(),
                Message::user(format!("{turn}: {}", "x y ".repeat(8))),
            ]);
        }
        // Every truncation makes space for several turns.
        assert!(truncations >= 3 && truncations * 3 <= turns, "{overflow:?}: {truncations}");
        let counted = bounded.talk.conversation.counts().forked.get(&overflow.reason());
        assert_eq!(counted, Some(&truncations));
        // No turn renders more than the window contains, independent of the number of turns.
        let early = &prints[..30];
        let late = &prints[30..];
        assert!(late.iter().max() <= early.iter().max(), "{overflow:?}: {prints:?}");
        assert_eq!(overflow == Overflow::Summarize, !bounded.requested.is_empty());
    }
}

#[test]
fn summary_covers_all_omitted_turns() {
    let mut bounded = BoundedTalk::new(Overflow::Summarize, 700, 1);
    let mut messages = history(&[(1, 40, false), (1, 40, false), (1, 40, false), (1, 40, false)]);
    let (kept, prepared) = bounded.fit(&messages).unwrap();
    assert!(kept[1].content.ends_with("left out:\nIt was said."), "{}", kept[1].content.as_str());
    let first = bounded.requested.concat();
    assert!(
        first.contains("assistant: Reply 0.\ncalls look({\"a\":1})\n\ntool: x y x y"),
        "{first}"
    );
    assert!(!first.contains("Reply 3"), "{first}");
    let completion = bounded.talk.record(prepared, "Reply 4.");
    messages.extend([completion.message(), Message::user("x y ".repeat(95))]);
    bounded.requested.clear();
    bounded.fit(&messages).unwrap();
    let then = bounded.requested.concat();
    assert!(then.starts_with("summary of what came before: It was said."), "{then}");
    assert!(!then.contains("Reply 0"), "{then}");
}

#[test]
fn unshortenable_prompt_is_too_long() {
    let messages = history(&[(1, 10, false), (1, 200, false)]);
    for overflow in POLICIES {
        assert!(BoundedTalk::new(overflow, 400, 1).fit(&messages).is_none(), "{overflow:?}");
    }
    let short = history(&[(1, 10, false)]);
    assert!(BoundedTalk::new(Overflow::Fail, 400, 1).fit(&short).is_some());
    assert!(BoundedTalk::new(Overflow::Fail, 400, 1).fit(&messages).is_none());
    assert_eq!(
        Reason::ContextDropped.description(),
        "the oldest turns were dropped to fit the context"
    );
}
