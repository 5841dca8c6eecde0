use super::*;
use levade_tools::DelayedToolbox;

fn calls(tool: &str, arguments: &[Value]) -> String {
    let call = |arguments| {
        format!("<tool_call>{}</tool_call>", json!({ "name": tool, "arguments": arguments }))
    };
    arguments.iter().map(call).collect()
}

#[tokio::test]
async fn tools_report_rewards_metrics_answers_and_scorer_inputs() {
    let rewarded_calls =
        calls("counted", &[json!({"reward": 0.5}), json!({"reward": -0.125}), json!({})]);
    let ends =
        calls("counted", &[json!({"reward": 1}), json!({"answer": "5"}), json!({"answer": "6"})]);
    let attempt =
        bench(&[text_completion(&rewarded_calls), text_completion(CALL), text_completion(&ends)])
            .run()
            .await;
    // No turn would read the results of the last turn, so its calls of this tool are not made: they
    // have no other effect.
    assert_eq!((attempt.outcome.finish, attempt.outcome.turns), (Finish::MaxTurns, 3));
    assert_eq!(attempt.outcome.rewards_by_turn, [(0, 0.375)]);

    let attempt = bench(&[text_completion(&rewarded_calls), text_completion(&ends)]).run().await;
    let Attempt { trajectory, outcome, .. } = attempt;
    assert_eq!((outcome.finish, outcome.final_text.as_str()), (Finish::Ended, "5"));
    assert_eq!((outcome.turns, outcome.calls.ok, trajectory.segments().len()), (2, 6, 4));
    assert_eq!(outcome.rewards_by_turn, [(0, 0.375), (1, 1.0)]);
    let measured = [("calls", 6.0), ("errors", 0.0), ("moves", 6.0)];
    let measured = measured.map(|(name, sum)| (format!("counted/{name}"), sum));
    assert_eq!(outcome.tool_metrics, measured.into());
    let known =
        json!({ "counted": { "attempt": "a", "question": "2+3?", "seed": 7, "stream": 11 } });
    assert_eq!(Value::Object(outcome.scorer_inputs), known);
}

/// Sampler that sends a scripted completion first, and then those of a simulated policy.
struct ScriptedThenSimulated(ScriptedSampler, Simulator);

#[async_trait]
impl Sampler for ScriptedThenSimulated {
    async fn sample(&self, request: SampleRequest) -> Result<SampleStream, PolicyError> {
        let scripted = self.0.next.load(Ordering::SeqCst) < self.0.completions.len();
        if scripted { self.0.sample(request).await } else { self.1.sample(request).await }
    }

    async fn abort(&self, stream: Option<u64>) -> Result<usize, PolicyError> {
        self.1.abort(stream).await
    }

    async fn workload(&self) -> Result<Load, PolicyError> {
        self.1.workload().await
    }

    async fn version(&self) -> Result<u64, PolicyError> {
        self.1.version().await
    }
}

#[tokio::test]
async fn concurrent_calls_match_sequential_calls() {
    let sums: Vec<Value> =
        ["2+3", "1/0", "7*6", "2^10"].map(|sum| json!({ "expression": sum })).to_vec();
    let mut attempts = Vec::new();
    for (parallel, max_parallel) in [(false, 0), (true, 0), (true, 20), (true, 20), (false, 5)] {
        let mut bench = bench(&[]);
        let completions = vec![
            text_completion(&calls("calculator", &sums)),
            text_completion(&calls("calculator", &sums[..2])),
        ];
        let scripted = ScriptedSampler { completions, ..ScriptedSampler::default() };
        let config =
            SimulatorConfig { vocabulary: VOCABULARY, context: 4096, ..SimulatorConfig::default() };
        let simulator = Simulator::new(config);
        // No turn is sampled with older weights than the previous turn.
        simulator.publish(4).await.unwrap();
        bench.player().backend =
            Backend::Tokens(Arc::new(ScriptedThenSimulated(scripted, simulator)));
        bench.agent.limits.max_tokens = 600;
        bench.agent.limits.completion_timeout = Duration::from_secs(10);
        let calculator = Arc::new(Calculator { parallel, ..Calculator::default() });
        let delayed =
            DelayedToolbox::new(calculator, Duration::ZERO..=Duration::from_millis(max_parallel));
        bench.agent.tools = ToolSet::new(vec![Arc::new(delayed)], Duration::from_secs(5)).unwrap();
        attempts.push(bench.run().await);
    }
    assert_eq!(attempts[0].outcome.calls_by_turn.len(), 2);
    assert_eq!((attempts[0].outcome.calls.ok, attempts[0].outcome.calls.bad_arguments), (4, 2));
    let counted = ["calls", "errors"]
        .map(|name| attempts[0].outcome.tool_metrics[&format!("calculator/{name}")]);
    assert_eq!(counted, [6.0, 2.0]);
    assert!(attempts[0].trajectory.segments()[4..].iter().any(|s| s.kind == Kind::Sampled));
    assert!(attempts.iter().all(|attempt| *attempt == attempts[0]));
}
