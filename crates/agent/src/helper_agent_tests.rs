use super::*;
use crate::HelperAgent;
use crate::roster::Roster;
use levade_tools::{HelperSlot, SubAgent, SummarizedToolbox, SummaryKeys};

/// Returns a helper that samples these completions and has a calculator, with the slot and the
/// roster that contain the helper.
fn helper(name: &str, completions: &[ScriptedCompletion]) -> (Bench, HelperSlot, Arc<Roster>) {
    let mut bench = bench(completions);
    bench.agent.name = name.into();
    bench.player().policy = format!("{name}'s");
    let boxes: Vec<Arc<dyn Toolbox>> = vec![Arc::new(Calculator::default())];
    bench.agent.tools = ToolSet::new(boxes, Duration::from_secs(5)).unwrap();
    let slot = HelperSlot::new(name);
    bench.agent.samples = Arc::new(|params| SamplingParams { temperature: 0.5, ..params });
    let roster = Arc::new(Roster::new(vec![bench.agent.clone()]));
    slot.set(Arc::new(HelperAgent {
        agent: name.into(),
        roster: Arc::downgrade(&roster),
        build_prompt: Arc::new(|task| {
            vec![Message::system("You help."), Message::user(task.question.as_str())]
        }),
    }));
    (bench, slot, roster)
}

fn helper_bench(
    completions: &[ScriptedCompletion],
    slot: &HelperSlot,
    timeout: Option<Duration>,
) -> Bench {
    let mut bench = bench(completions);
    let clerk = SubAgent {
        name: "clerk".into(),
        description: "Does sums.".into(),
        slot: slot.clone(),
        timeout,
    };
    bench.agent.tools = ToolSet::new(vec![Arc::new(clerk)], Duration::from_secs(5)).unwrap();
    bench
}

fn call(request: Value) -> String {
    format!(
        "<tool_call>{}</tool_call>",
        json!({ "name": "clerk", "arguments": { "request": request } })
    )
}

fn segments_of<'a>(attempt: &'a Attempt, name: &str) -> Vec<&'a Segment> {
    attempt.trajectory.segments().iter().filter(|segment| segment.agent == name).collect()
}

fn sampled_requests(bench: &Bench) -> Vec<SampleRequest> {
    bench.sampler.requests.lock().unwrap().clone()
}

#[tokio::test]
async fn helper_conversation_becomes_branch_of_attempt() {
    let (clerk, slot, _roster) = helper(
        "clerk",
        &[text_completion(CALL), text_completion("It is 5."), text_completion("No idea.")],
    );
    let both = format!("{}{}", call(json!("2+3?")), call(json!(7)));
    let solver = helper_bench(
        &[text_completion(&both), text_completion(&call(json!("Why?"))), text_completion("5")],
        &slot,
        None,
    );
    let attempt = solver.run().await;
    let outcome = &attempt.outcome;
    assert_eq!((outcome.error.as_deref(), outcome.final_text.as_str()), (None, "5"));
    // The attempt has three turns, and only their tokens count.
    assert_eq!(outcome.turns, 3);
    let own: usize = segments_of(&attempt, "solver")
        .iter()
        .filter(|s| s.kind == Kind::Sampled)
        .map(|s| s.tokens.len())
        .sum();
    assert_eq!(outcome.sampled_tokens, own);
    let helped = segments_of(&attempt, "clerk");
    assert!(helped.iter().all(|segment| segment.policy == "clerk's"));
    assert_eq!(helped.iter().filter(|segment| segment.kind == Kind::Sampled).count(), 3);
    assert_eq!(
        helped.iter().filter(|segment| segment.parent.is_none()).count(),
        2,
        "two conversations"
    );
    // Each turn belongs to one agent, and none is missing.
    let mut turns: Vec<u32> = attempt
        .trajectory
        .segments()
        .iter()
        .filter(|s| s.kind == Kind::Sampled)
        .map(|s| s.turn)
        .collect();
    turns.sort_unstable();
    assert_eq!(turns, [0, 1, 2, 3, 4, 5]);
    // The calls of both agents are counted, each by its turn.
    assert_eq!((outcome.calls.ok, outcome.calls.bad_arguments), (3, 1));
    for (turn, _) in &outcome.calls_by_turn {
        assert!(turns.contains(turn));
    }
    let clerks: Vec<u32> =
        helped.iter().filter(|s| s.kind == Kind::Sampled).map(|s| s.turn).collect();
    assert!(
        outcome.calls_by_turn.iter().any(|(turn, counts)| clerks.contains(turn) && counts.ok == 1)
    );
    let text = |request: &SampleRequest| solver.text(&request.prompt);
    let read = sampled_requests(&solver);
    assert!(
        text(&read[1]).contains("It is 5.") && text(&read[1]).contains("must be given, as a text")
    );
    assert!(text(&read[2]).contains("No idea."));
    let theirs = sampled_requests(&clerk);
    assert!(text(&theirs[0]).contains("You help.") && text(&theirs[0]).contains("2+3?"));
    assert!(!text(&theirs[2]).contains("2+3?"), "each request is for itself");
    assert!(theirs.iter().all(|request| request.params.temperature == 0.5));
    // No two requests share a random stream.
    let mut streams: Vec<u64> = read.iter().chain(&theirs).map(|request| request.stream).collect();
    streams.sort_unstable();
    streams.dedup();
    assert_eq!(streams.len(), 6);
    let known = &outcome.scorer_inputs["clerk"]["asked"];
    assert_eq!(
        (&known[0]["request"], &known[0]["answer"], &known[1]["answer"]),
        (&json!("2+3?"), &json!("It is 5."), &json!("No idea."))
    );
    // A repetition yields the same attempt.
    let (_, second_bench, _roster) = helper(
        "clerk",
        &[text_completion(CALL), text_completion("It is 5."), text_completion("No idea.")],
    );
    let other = helper_bench(
        &[text_completion(&both), text_completion(&call(json!("Why?"))), text_completion("5")],
        &second_bench,
        None,
    )
    .run()
    .await;
    assert_eq!(other, attempt);
}

#[tokio::test]
async fn truncated_helper_fails_call_and_broken_helper_attempt() {
    let (_clerk, slot, _roster) =
        helper("clerk", &[text_completion(CALL), text_completion(CALL), text_completion(CALL)]);
    let solver = helper_bench(
        &[text_completion(&call(json!("2+3?"))), text_completion("Well.")],
        &slot,
        None,
    );
    let attempt = solver.run().await;
    assert_eq!((attempt.outcome.finish, attempt.outcome.calls.failed), (Finish::Answered, 1));
    assert!(
        solver
            .text(&sampled_requests(&solver)[1].prompt)
            .contains("clerk came to no answer: it was cut at a limit")
    );

    let (_clerk, slot, _roster) =
        helper("clerk", &[text_completion(CALL), ScriptedCompletion::Breaks]);
    let broken = helper_bench(
        &[text_completion(&call(json!("2+3?"))), text_completion("Well.")],
        &slot,
        None,
    )
    .run()
    .await;
    let error = broken.outcome.error.clone().unwrap();
    assert!(error.starts_with("the agent clerk failed: "), "{error}");
    assert_eq!(
        segments_of(&broken, "clerk")
            .iter()
            .filter(|segment| segment.kind == Kind::Sampled)
            .count(),
        1
    );

    // Without running agents, as when tools are inspected on their own, the call fails with a
    // message.
    let standalone = helper_bench(
        &[text_completion(&call(json!("2+3?"))), text_completion("Well.")],
        &HelperSlot::new("clerk"),
        None,
    );
    let attempt = standalone.run().await;
    assert_eq!((attempt.outcome.error, attempt.outcome.calls.failed), (None, 1));
    assert!(
        standalone
            .text(&sampled_requests(&standalone)[1].prompt)
            .contains("the agent clerk is not running in this process")
    );
}

#[tokio::test]
async fn only_long_tool_results_are_summarized() {
    let numbers: Vec<String> = (10..60).map(|number| number.to_string()).collect();
    let long = CALL.replace("2+3", &numbers.join("+"));
    let (browser, slot, _roster) = helper(
        "browser",
        &[
            text_completion("Five."),
            text_completion(CALL),
            text_completion(CALL),
            text_completion(CALL),
        ],
    );
    let keys = SummaryKeys { agent: "browser".into(), above: 2, instruction: "Condense.".into() };
    let condensed = SummarizedToolbox { toolbox: Arc::new(Calculator::default()), slot, keys };
    let mut solver = bench(&[
        text_completion(CALL),
        text_completion(&long),
        text_completion(&long),
        text_completion("Done."),
    ]);
    solver.agent.tools = ToolSet::new(vec![Arc::new(condensed)], Duration::from_secs(5)).unwrap();
    solver.agent.limits.max_turns = 9;
    solver.agent.limits.max_tokens = 4000;
    let attempt = solver.run().await;
    let outcome = &attempt.outcome;
    assert_eq!((outcome.error.as_deref(), outcome.final_text.as_str()), (None, "Done."));
    let read = sampled_requests(&solver);
    let text = |at: usize| solver.text(&read[at].prompt);
    // The sum is 1725, which has four characters.
    assert!(text(1).contains('5') && text(2).contains("Five.") && !text(2).contains("1725"));
    assert!(text(3).contains("[… 2 characters are left out here …]"), "{}", text(3));
    assert_eq!(outcome.tool_metrics["calculator/condensed"], 1.0);
    assert_eq!(outcome.tool_metrics["calculator/cut"], 1.0);
    let theirs = sampled_requests(&browser);
    let question = solver.text(&theirs[0].prompt);
    assert!(
        question.contains("Condense.\n\nThe call: calculator {\"expression\":\"10+11"),
        "{question}"
    );
    assert!(question.contains("The answer:\n1725"), "{question}");
    assert_eq!(
        segments_of(&attempt, "browser").iter().filter(|segment| segment.parent.is_none()).count(),
        2
    );
}
