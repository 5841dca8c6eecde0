//! Tests of the tool loop with other chat templates, and with the simulated policy.

use super::*;

fn bench_with_template(
    template: &str,
    options: ChatOptions,
    requested: Options,
    completions: &[ScriptedCompletion],
) -> Bench {
    let mut bench = bench(completions);
    let chat = Chat::new(tiny_tokenizer().unwrap(), Some(template), options).unwrap();
    bench.player().format = Some(Arc::new(Format::new(Arc::new(chat), requested)));
    bench
}

#[tokio::test]
async fn calls_and_answers_in_reasoning_are_ignored() {
    let outcome = bench(&[text_completion(&format!("<think>{CALL}</think>5"))]).run().await.outcome;
    assert_eq!((outcome.final_text.as_str(), outcome.calls.total()), ("5", 0));
    let outcome = bench(&[
        text_completion(&format!("<think>{CALL}</think>{CALL}")),
        text_completion("<think>5"),
    ])
    .run()
    .await
    .outcome;
    assert_eq!((outcome.final_text.as_str(), outcome.calls.ok, outcome.turns), ("", 1, 2));
    // The prompt starts the reasoning, but not after a tool result.
    let options = ChatOptions::default;
    let outcome = bench_with_template(
        ALWAYS_THINKS,
        options(),
        Options::default(),
        &[text_completion(&format!("{CALL} 5"))],
    )
    .run()
    .await
    .outcome;
    assert_eq!((outcome.final_text.as_str(), outcome.calls.total()), ("", 0));
    let completions = [text_completion(&format!("hm</think>{CALL}")), text_completion("5")];
    let outcome = bench_with_template(ALWAYS_THINKS, options(), Options::default(), &completions)
        .run()
        .await
        .outcome;
    assert_eq!((outcome.final_text.as_str(), outcome.calls.ok), ("5", 1));
}

#[tokio::test]
async fn template_drift_is_counted_or_forks_conversation() {
    let completions = [
        text_completion(&format!("hm</think>{CALL}")),
        text_completion(CALL),
        text_completion("5"),
    ];
    let options = |history| Options { history, ..Options::default() };
    let bench = bench_with_template(
        ALWAYS_THINKS,
        ChatOptions::default(),
        options(History::Append),
        &completions,
    );
    let Attempt { trajectory, outcome, .. } = bench.run().await;
    assert_eq!((outcome.finish, outcome.calls.ok), (Finish::Answered, 2));
    let turns: Vec<_> = outcome.drift.iter().map(|drift| (drift.turn, drift.forked)).collect();
    assert_eq!(turns, [(1, false), (2, false)]);
    assert!(outcome.drift[0].recorded.starts_with("<think>\nhm</think>"), "{:?}", outcome.drift);
    assert!(outcome.drift[0].printed.starts_with("<tool_call>"), "{:?}", outcome.drift);
    assert_eq!(trajectory.leaves().len(), 1);
    let streams = |bench: &Bench| {
        bench.sampler.requests.lock().unwrap().iter().map(|r| r.stream).collect::<Vec<_>>()
    };

    let bench = bench_with_template(
        ALWAYS_THINKS,
        ChatOptions::default(),
        options(History::Template),
        &completions,
    );
    let Attempt { trajectory, outcome, .. } = bench.run().await;
    assert_eq!((outcome.finish, outcome.calls.ok), (Finish::Answered, 2));
    // The template renders the second completion unchanged, so the conversation continues without
    // another fork.
    let turns: Vec<_> = outcome.drift.iter().map(|drift| (drift.turn, drift.forked)).collect();
    assert_eq!(turns, [(1, true)]);
    let leaves = trajectory.leaves();
    let paths: Vec<String> =
        leaves.iter().map(|&leaf| bench.text(&trajectory.sequence_tokens(leaf))).collect();
    let [first, second] = &paths[..] else { panic!("{paths:?}") };
    assert!(first.ends_with(&format!("assistant\n<think>\nhm</think>{CALL}<|im_end|>")), "{first}");
    assert!(
        second.contains(&format!("assistant\n{CALL}<|im_end|>")) && second.ends_with("5<|im_end|>"),
        "{second}"
    );
    let kinds: Vec<_> = trajectory
        .sequence(leaves[1])
        .iter()
        .map(|part| (part.segment.kind, part.segment.turn))
        .collect();
    assert_eq!(
        kinds,
        [
            (Kind::Context, 0),
            (Kind::Context, 1),
            (Kind::Sampled, 1),
            (Kind::Context, 2),
            (Kind::Sampled, 2)
        ]
    );
    assert_eq!(outcome.sampled_tokens, trajectory.sampled_tokens());
    let streams = streams(&bench);
    assert!(
        streams[0] != streams[1] && streams[1] != streams[2] && streams[0] != streams[2],
        "{streams:?}"
    );
    // The recorded tokens are those that the sampler received.
    let prompt = bench.sampler.requests.lock().unwrap()[2].prompt.clone();
    assert!(trajectory.sequence_tokens(leaves[1]).starts_with(&prompt));
}

#[tokio::test]
async fn tool_calls_without_markup_are_counted_separately() {
    let json = "{\"name\": \"calculator\", \"arguments\": {\"expression\": \"2+3\"}}";
    let completions = [text_completion(&format!("```json\n{json}\n```")), text_completion("5")];
    let outcome = bench(&completions).run().await.outcome;
    assert_eq!((outcome.calls.total(), outcome.turns), (0, 1));
    let options = ChatOptions { bare_calls: true, ..ChatOptions::default() };
    let outcome = bench_with_template("chatml", options, Options::default(), &completions)
        .run()
        .await
        .outcome;
    assert_eq!((outcome.calls.ok, outcome.calls.bare, outcome.calls.total()), (1, 1, 1));
    assert_eq!((outcome.calls_by_turn[0].1.bare, outcome.final_text.as_str()), (1, "5"));
}

/// Over several turns, the log-probabilities of a real policy equal those of a training forward
/// pass bit for bit, and an attempt does not depend on concurrent attempts.
#[tokio::test]
async fn real_policy_attempts_are_exact_and_independent() {
    let simulator = Arc::new(Simulator::new(SimulatorConfig {
        vocabulary: VOCABULARY,
        ..SimulatorConfig::default()
    }));
    let mut bench = bench(&[]);
    bench.player().backend = Backend::Tokens(simulator.clone());
    bench.agent.limits.max_tokens = 300;
    let standalone = bench.run().await;
    let context = bench.context();
    let concurrent =
        (0..8).map(|stream| BuiltInLoop.run(AttemptContext { stream, ..context.clone() }));
    let mut together = tokio::task::JoinSet::new();
    for stream in 0..8 {
        let context = AttemptContext { stream, ..context.clone() };
        together.spawn(async move { (stream, BuiltInLoop.run(context).await) });
    }
    let mut results = together.join_all().await;
    results.sort_by_key(|(stream, _)| *stream);
    for ((_, together), standalone) in results.into_iter().zip(concurrent) {
        assert_eq!(together, standalone.await);
    }

    let mut path = SequenceInput::default();
    for segment in standalone.trajectory.segments() {
        for (token, logprob) in segment
            .tokens
            .iter()
            .zip(segment.logprobs.iter().map(Some).chain(std::iter::repeat(None)))
        {
            if let Some(&logprob) = logprob {
                let term = Term {
                    weight: 1.0,
                    advantage: 1.0,
                    behavior: Some(logprob),
                    ..Term::default()
                };
                let index = path.tokens.len() as u32;
                path.targets.push(SequenceTarget { index, temperature: segment.temperature, term });
            }
            path.tokens.extend([*token]);
        }
    }
    let batch = Arc::new(TreeBatch::merge(&[path]).unwrap());
    let loss = Loss::clip(0.2, 0.2);
    let sums = simulator.forward_backward(batch, loss).await.unwrap();
    assert_eq!((sums.mismatched, sums.targets), (0, standalone.outcome.sampled_tokens as u64));
}
