//! Tests of calls by the names of agents: opening limits, limits of the attempt, and what is
//! recorded.

use std::sync::Arc;
use std::time::Duration;

use levade_conversation::{Budget, Format, Options, Origin, Overflow};
use levade_policy::{SamplingParams, Simulator, SimulatorConfig};
use levade_text::{Message, testing};

use crate::{
    ApiError, Backend, Cast, ErrorKind, Input, OpeningLimit, Party, PartyLimits, PromptRecording,
    Reader, Recorder, RecorderOptions, Request, SamplingRule, ToolCallIds, Truncation,
};

const CONTEXT: usize = 4096;

fn party(agent: &str, context: usize, budget: Budget) -> Party {
    let config =
        SimulatorConfig { vocabulary: testing::VOCABULARY, context: CONTEXT, ..Default::default() };
    let chat = Arc::new(testing::tiny_chat().unwrap());
    let party = Party::new(
        "tiny",
        Backend::Tokens(Arc::new(Simulator::new(config))),
        Some(Arc::new(Format::without_probe(chat, Options::default()))),
        PartyLimits { context, timeout: Duration::from_secs(30) },
        SamplingRule::Default(SamplingParams { max_tokens: 4, ..SamplingParams::default() }),
    );
    Party { agent: agent.into(), budget, ..party }
}

fn recorder() -> Arc<Recorder> {
    Recorder::new(RecorderOptions {
        name: "a".into(),
        seed: 1,
        stream: 2,
        max_calls: 9,
        max_tokens: 100,
        grace: Duration::ZERO,
        tool_call_ids: ToolCallIds::FromTurn,
        prompt_recording: PromptRecording::WithCompletion,
        metrics: Arc::default(),
    })
}

fn question(text: &str) -> Request {
    Request::new(Input::Messages(vec![Message::user(text)]))
}

/// Starts the first call of an attempt.
async fn start_first_call(
    context: usize,
    budget: Budget,
    opening: Option<OpeningLimit>,
) -> Result<Reader, ApiError> {
    let cast = Cast::new([Arc::new(party("solver", context, budget))], recorder());
    cast.call("solver", Request { opening, ..question("What is 12 * 3?") }).await
}

/// Returns the prompt of the first call without any limit.
async fn full_prompt() -> Vec<u32> {
    start_first_call(CONTEXT, Budget::NONE, None).await.unwrap().head().prompt.clone()
}

fn limit(max_tokens: usize, truncation: Truncation) -> Option<OpeningLimit> {
    Some(OpeningLimit { max_tokens, truncation })
}

#[tokio::test]
async fn opening_limit_truncates_only_longer_prompts() {
    let full_prompt = full_prompt().await;
    let n = full_prompt.len();
    for (max_tokens, want, is_truncated) in [
        (n + 1, &full_prompt[..], false),
        (n, &full_prompt, false),
        (n - 1, &full_prompt[1..], true),
    ] {
        let reader = start_first_call(CONTEXT, Budget::NONE, limit(max_tokens, Truncation::Left))
            .await
            .unwrap();
        assert_eq!((&reader.head().prompt[..], reader.head().is_truncated), (want, is_truncated));
    }
    assert!(start_first_call(CONTEXT, Budget::NONE, limit(n, Truncation::Reject)).await.is_ok());
    let error = start_first_call(CONTEXT, Budget::NONE, limit(n - 1, Truncation::Reject))
        .await
        .unwrap_err();
    let limit = format!("{n} tokens, more than the {} of agent.max_prompt_tokens", n - 1);
    assert!(error.kind == ErrorKind::TooLong && error.message.contains(&limit), "{error}");
}

#[tokio::test]
async fn opening_limit_truncates_prompt_over_context_or_budget() {
    let n = full_prompt().await.len();
    let truncate_right = limit(10, Truncation::Right);
    for (context, max_tokens) in [(n - 1, usize::MAX), (CONTEXT, n - 1), (CONTEXT, 10)] {
        let reader =
            start_first_call(context, context_budget(max_tokens), truncate_right).await.unwrap();
        assert_eq!(reader.head().prompt.len(), 10, "{context} {max_tokens}");
    }
    // A long prompt, which is rendered only because of the opening limit.
    let cast = Cast::new([Arc::new(party("solver", CONTEXT, context_budget(20)))], recorder());
    let request = Request { opening: truncate_right, ..question(&"What? ".repeat(500)) };
    assert_eq!(cast.call("solver", request).await.unwrap().head().prompt.len(), 10);
    let error = start_first_call(CONTEXT, context_budget(9), truncate_right).await.unwrap_err();
    let message = "10 tokens, more than the 9 of agent.max_context_tokens";
    assert!(error.kind == ErrorKind::TooLong && error.message.contains(message), "{error}");
}

fn context_budget(max_tokens: usize) -> Budget {
    Budget { max_tokens, ..Budget::NONE }
}

#[tokio::test]
async fn prompt_above_context_or_budget_is_rejected() {
    let n = full_prompt().await.len();
    for overflow in [Overflow::Fail, Overflow::DropOldest] {
        let budget = |max_tokens| Budget { max_tokens, overflow, keep: 1 };
        assert!(start_first_call(CONTEXT, budget(n), None).await.is_ok());
        for (context, max_tokens) in [(CONTEXT, n - 1), (n, usize::MAX)] {
            let error = start_first_call(context, budget(max_tokens), None).await.unwrap_err();
            assert_eq!(
                error.kind,
                ErrorKind::TooLong,
                "{overflow:?} {context} {max_tokens}: {error}"
            );
        }
    }
    // The completion is limited to the rest of the context.
    for (context, tokens) in [(n + 1, 1), (n + 3, 3), (CONTEXT, 4)] {
        let end = start_first_call(context, Budget::NONE, None)
            .await
            .unwrap()
            .completion()
            .await
            .unwrap();
        assert_eq!((end.prompt_tokens, end.tokens), (n, tokens), "{context}");
    }
}

#[tokio::test]
async fn cast_calls_agents_by_name() {
    let parties = ["solver", "critic"].map(|agent| Arc::new(party(agent, CONTEXT, Budget::NONE)));
    let cast = Cast::new(parties, recorder());
    let agents: Vec<&str> = cast.parties().iter().map(|party| party.agent.as_str()).collect();
    assert_eq!(agents, ["solver", "critic"]);
    for agent in ["critic", "solver"] {
        cast.call(agent, question(agent)).await.unwrap().completion().await.unwrap();
    }
    let error = cast.call("judge", question("?")).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotFound);
    assert_eq!(
        error.message,
        "this attempt has no agent \"judge\"; available agents: solver, critic"
    );
    let calls = cast.recorder().close(Duration::from_secs(5)).await.calls;
    let agents: Vec<&str> = calls.iter().map(|call| call.agent.as_str()).collect();
    assert_eq!(agents, ["critic", "solver"]);
}

#[tokio::test]
async fn recorder_reports_calls_and_remaining_limits() {
    let cast = Cast::new([Arc::new(party("solver", CONTEXT, Budget::NONE))], recorder());
    let recorder = cast.recorder();
    assert_eq!(
        (recorder.ended_calls(), recorder.remaining_calls(), recorder.remaining_tokens()),
        (0, 9, 100)
    );
    for calls in 1..=3 {
        cast.call("solver", question(&format!("{calls}?")))
            .await
            .unwrap()
            .completion()
            .await
            .unwrap();
        let remaining = (recorder.remaining_calls(), recorder.remaining_tokens());
        assert_eq!(
            (recorder.ended_calls(), remaining),
            (calls, (9 - calls as u32, 100 - 4 * calls))
        );
    }
    let turns: Vec<u32> = (0..9).filter(|turn| recorder.has_turn(*turn)).collect();
    assert_eq!(turns.len(), 3, "{turns:?}");
    assert_eq!(recorder.origins()[0], Some(Origin::Started));
    // Turns of a helper's conversation come after these.
    let helper = Cast::new([Arc::new(party("helper", CONTEXT, Budget::NONE))], self::recorder());
    helper.call("helper", question("Help?")).await.unwrap().completion().await.unwrap();
    let trajectory = helper.recorder().close(Duration::from_secs(5)).await.trajectory;
    assert_eq!(recorder.append_trajectory(&trajectory).unwrap(), turns[2] + 1);
    let recorded = recorder.close(Duration::from_secs(5)).await;
    assert!(recorded.trajectory.segments().iter().any(|segment| segment.agent == "helper"));
    assert!(recorder.is_closed());
    let error = cast.call("solver", question("?")).await.unwrap_err();
    assert_eq!((error.kind, recorder.check_open().unwrap_err()), (ErrorKind::AttemptEnded, error));
}

#[tokio::test]
async fn call_rejects_n_out_of_range() {
    let cast = Cast::new([Arc::new(party("solver", CONTEXT, Budget::NONE))], recorder());
    for (n, is_accepted) in [(0, false), (1, true), (128, true), (129, false)] {
        let called = cast.call("solver", Request { n, ..question("?") }).await;
        assert_eq!(called.is_ok(), is_accepted, "{n}");
        if let Err(error) = called {
            assert_eq!((error.kind, error.param.as_deref()), (ErrorKind::Invalid, Some("n")));
        }
    }
}
