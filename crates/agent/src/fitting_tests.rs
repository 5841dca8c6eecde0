use levade_conversation::{Budget, Overflow};
use levade_tree::{Kind, Segment};

use super::*;
use super::{CALL, bench, text_completion};
use crate::{Attempt, ContextPolicy, SummaryOptions};

fn policy(overflow: Overflow, budget_tokens: usize) -> ContextPolicy {
    let summary = SummaryOptions {
        tokens: 50,
        instruction: "Sum up.".into(),
        ..ContextPolicy::UNLIMITED.summary
    };
    ContextPolicy { budget: Budget { max_tokens: budget_tokens, overflow, keep: 1 }, summary }
}

async fn run_scripted(
    completions: &[&str],
    context: ContextPolicy,
    turns: u32,
) -> (Attempt, Vec<SampleRequest>) {
    let completions: Vec<_> =
        completions.iter().map(|completion| text_completion(completion)).collect();
    let mut bench = bench(&completions);
    bench.player().context_policy = context;
    bench.agent.limits.max_turns = turns;
    let attempt = bench.run().await;
    let requested = bench.sampler.requests.lock().unwrap().clone();
    (attempt, requested)
}

/// Returns the number of tokens of the first prompt. With two more turns it exceeds 1000 tokens,
/// most of which describe the tools.
async fn opening_tokens() -> usize {
    let (_, requested) = run_scripted(&["5"], ContextPolicy::UNLIMITED, 9).await;
    requested[0].prompt.len()
}

#[tokio::test]
async fn old_turns_are_dropped_and_actual_prompts_recorded() {
    let budget_tokens = opening_tokens().await + 500;
    // The calls differ, because equal calls could be continued from any of their positions.
    let calls: Vec<String> = (0..6).map(|at| CALL.replace('2', &at.to_string())).collect();
    let completions: Vec<&str> = calls.iter().map(String::as_str).chain(["It is 5."]).collect();
    let (Attempt { trajectory, outcome, .. }, requested) =
        run_scripted(&completions, policy(Overflow::DropOldest, budget_tokens), 9).await;
    assert_eq!((outcome.error.as_deref(), outcome.final_text.as_str()), (None, "It is 5."));
    assert!(
        !outcome.context_truncations.is_empty() && outcome.turns == 7,
        "{:?}",
        outcome.context_truncations
    );
    assert_eq!(
        outcome.context_truncations[0].message,
        "the oldest turns were dropped to fit the context"
    );
    let event = outcome.context_truncations[0].turn as usize;
    assert!(requested[event].prompt.len() < requested[event - 1].prompt.len());
    assert!(requested.iter().all(|request| request.prompt.len() <= budget_tokens));
    // Every completion follows the prompt from which it was sampled.
    let sampled: Vec<&Segment> =
        trajectory.segments().iter().filter(|segment| segment.kind == Kind::Sampled).collect();
    for (segment, request) in sampled.iter().zip(&requested) {
        assert!(trajectory.sequence_tokens(segment.id).starts_with(&request.prompt));
    }
    assert_eq!(
        (sampled.len(), trajectory.leaves().len()),
        (7, 1 + outcome.context_truncations.len())
    );
    assert_eq!(outcome.calls_by_turn.len(), 6);
    for (turn, _) in &outcome.calls_by_turn {
        assert!(sampled.iter().any(|segment| segment.turn == *turn));
    }
}

#[tokio::test]
async fn summary_is_requested_and_recorded_separately() {
    let budget_tokens = opening_tokens().await + 400;
    let completions = [CALL, CALL, CALL, CALL, "Two and three were added.", "It is 5."];
    let (Attempt { trajectory, outcome, .. }, requested) =
        run_scripted(&completions, policy(Overflow::Summarize, budget_tokens), 9).await;
    assert_eq!((outcome.error.as_deref(), outcome.turns), (None, 5));
    assert_eq!(outcome.final_text, "It is 5.");
    let by =
        |name: &str| trajectory.segments().iter().filter(|segment| segment.agent == name).count();
    assert_eq!(by("solver.summary"), 2, "a prompt and a reply");
    let chat = bench(&[]).format().chat().clone();
    let summary = &requested[4];
    let last = &requested[5];
    let text = |request: &SampleRequest| chat.tokenizer().decode_with_special(&request.prompt);
    assert!(text(summary).contains("Sum up.\n\nassistant: <tool_call>"), "{}", text(summary));
    assert_eq!(summary.params.max_tokens, 50);
    assert!(text(last).contains("2+3?\n\nSummary of the part"), "{}", text(last));
    assert!(
        text(last).contains("left out:\nTwo and three were added.<|im_end|>"),
        "{}",
        text(last)
    );
    // Tokens of summaries do not count as the attempt's own.
    let own: usize = completions.iter().map(|completion| completion.len() + 1).sum::<usize>()
        - (completions[4].len() + 1);
    assert_eq!(outcome.sampled_tokens, own);
    assert_eq!(outcome.context_truncations.len(), 1);
    assert_eq!(
        outcome.context_truncations[0].turn,
        trajectory.segments().iter().map(|s| s.turn).max().unwrap()
    );
}

#[tokio::test]
async fn budget_ends_attempt_without_context_policy() {
    let budget_tokens = opening_tokens().await + 300;
    let completions = [CALL, CALL, CALL, CALL, "It is 5."];
    let (Attempt { outcome, .. }, requested) =
        run_scripted(&completions, policy(Overflow::Fail, budget_tokens), 9).await;
    assert_eq!((outcome.finish, outcome.error), (levade_tree::Finish::Context, None));
    assert!(requested.len() < completions.len() && outcome.context_truncations.is_empty());
    let (Attempt { outcome, .. }, requested) =
        run_scripted(&["5"], policy(Overflow::DropOldest, 20), 9).await;
    let error = outcome.error.unwrap();
    assert!(error.contains("agent.max_context_tokens") && requested.is_empty(), "{error}");
}
