use levade_policy::{AllowedTokens, Grammar, SampleStream, SamplingParams, TopLogprobs, uniform};

use super::*;
use crate::Compute;
use crate::layout::attention_shape;
use crate::precision::Precision;
use crate::testing::{random_weights, tiny_config};

/// Maximum number of steps before a test fails.
const PATIENCE: usize = 5000;

fn model() -> Transformer {
    let compute = Compute::new(1);
    let weights = random_weights(&compute, &tiny_config(), 3);
    Transformer::new(compute, weights, 256)
}

fn scheduler(model: &Transformer, blocks: usize, running: usize) -> Scheduler {
    let config = &model.weights.config;
    let precision = model.compute.precision;
    let shape = attention_shape(config);
    let bytes = blocks * config.layers * shape.block(precision) * size_of::<f32>();
    let cache = KvCache::new(shape, config.layers, precision, bytes);
    assert_eq!(cache.capacity(), blocks * BLOCK);
    Scheduler::new(cache, SchedulerLimits { running, rows: 64 }, None)
}

fn tokens(stream: u64, len: usize) -> Vec<u32> {
    (0..len as u64).map(|i| 2 + (uniform(9, stream, i) * 250.0) as u32).collect()
}

fn submit(
    scheduler: &mut Scheduler,
    model: &Transformer,
    stream: u64,
    prompt: Vec<u32>,
    max_tokens: usize,
) -> SampleStream {
    submit_with(
        scheduler,
        model,
        stream,
        prompt,
        SamplingParams { max_tokens, ..SamplingParams::default() },
    )
}

fn submit_with(
    scheduler: &mut Scheduler,
    model: &Transformer,
    stream: u64,
    prompt: Vec<u32>,
    params: SamplingParams,
) -> SampleStream {
    let (events, completion) = SampleStream::channel();
    let request = SampleRequest { seed: 7, stream, prompt, params, ..SampleRequest::default() };
    scheduler.submit(model, 0, request, None, events).expect("it fits");
    completion
}

const FIRST: [PublishedWeights; 1] = [PublishedWeights { version: 0, current: true }];
const SECOND: [PublishedWeights; 1] = [PublishedWeights { version: 1, current: true }];

/// Runs batches until `until` returns true or no sequence can sample.
fn run(
    scheduler: &mut Scheduler,
    model: &Transformer,
    published: &[PublishedWeights],
    until: impl Fn(&Scheduler) -> bool,
) {
    for _ in 0..PATIENCE {
        if until(scheduler) || scheduler.count_ready(published) == 0 {
            return;
        }
        scheduler.step(model, published);
        assert!(
            scheduler.cache.occupancy().iter().all(|fraction| *fraction <= 1.0),
            "more than the memory given"
        );
    }
    panic!("{} still run and {} wait", scheduler.running.len(), scheduler.waiting.len());
}

/// Events of a stream: tokens, the bits of their log-probabilities and of the prompt's
/// log-probabilities, versions, and the finish reason.
#[derive(Debug, Default, PartialEq)]
struct Collected {
    tokens: Vec<u32>,
    logprobs: Vec<u32>,
    top: Vec<TopLogprobs>,
    prompt: Vec<u32>,
    prompt_top: Vec<TopLogprobs>,
    versions: Vec<u64>,
    end: Option<FinishReason>,
}

async fn collect(mut stream: SampleStream) -> Collected {
    let mut collected = Collected::default();
    while let Some(event) = stream.next().await {
        match event.expect("no errors") {
            SampleEvent::Tokens { tokens, logprobs, top, version } => {
                collected.top.extend(top);
                collected.versions.extend(tokens.iter().map(|_| version));
                collected.tokens.extend(tokens);
                collected.logprobs.extend(logprobs.iter().map(|p| p.to_bits()));
            }
            SampleEvent::Prompt { logprobs, top } => {
                assert!(collected.tokens.is_empty(), "the prompt comes first");
                collected.prompt.extend(logprobs.iter().map(|p| p.to_bits()));
                collected.prompt_top.extend(top);
            }
            SampleEvent::Finished(reason) => collected.end = Some(reason),
        }
    }
    collected
}

/// An update during many attempts at one task. With memory for a few attempts they sample the same
/// tokens as with memory for all, stay within the memory, and compute their prompt once for each
/// version.
#[tokio::test]
async fn weight_update_respects_memory_and_recomputes_prompt_once() {
    const PROMPT: usize = 170;
    let model = model();
    let mut found = Vec::new();
    // A completion takes 2 blocks of its own, and temporarily a third for a copy.
    for blocks in [15, 200] {
        let mut scheduler = scheduler(&model, blocks, 16);
        let streams: Vec<SampleStream> =
            (0..12).map(|i| submit(&mut scheduler, &model, i, tokens(1, PROMPT), 30)).collect();
        run(&mut scheduler, &model, &FIRST, |s| s.sampled >= 40);
        let (running, order): (usize, Vec<u64>) =
            (scheduler.running.len(), scheduler.running.iter().map(|s| s.stream).collect());
        assert!(running == if blocks == 15 { 4 } else { 12 }, "{running}");
        let before = scheduler.prefilled;
        assert!(before <= (PROMPT + 11) as u64, "{before}");

        scheduler.weights_changed(0, false);
        assert_eq!((scheduler.running.len(), scheduler.waiting.len()), (0, 12));
        let again: Vec<u64> = scheduler.waiting.iter().map(|s| s.stream).take(running).collect();
        assert_eq!(again, order, "in their order, ahead of newcomers");
        let _late = submit(&mut scheduler, &model, 50, tokens(2, 20), 5);
        run(&mut scheduler, &model, &SECOND, |s| s.running.len() == running);
        assert_eq!(scheduler.running.iter().map(|s| s.stream).collect::<Vec<_>>(), order);
        run(&mut scheduler, &model, &SECOND, |_| false);
        let prefilled = scheduler.prefilled - before;
        assert!(prefilled <= (PROMPT + 11 + 20) as u64, "{prefilled} with {blocks} blocks");

        let mut tokens = Vec::new();
        let mut logprobs = Vec::new();
        for stream in streams {
            let collected = collect(stream).await;
            assert_eq!(collected.end, Some(FinishReason::Length));
            assert!(collected.versions.is_sorted() && collected.versions.contains(&1));
            tokens.push(collected.tokens);
            logprobs.push(collected.logprobs);
        }
        found.push((tokens, logprobs));
    }
    assert!(found[0] == found[1], "what is drawn does not depend on memory");
}

/// A completion that needs all memory continues after an update, and so do the sequences around it.
/// A sequence that queues again can be aborted, and disappears if its stream is dropped.
#[tokio::test]
async fn requeued_sequences_finish_or_abort() {
    let model = model();
    let mut scheduler = scheduler(&model, 8, 16);
    let large = submit(&mut scheduler, &model, 0, tokens(1, 40), 216);
    run(&mut scheduler, &model, &FIRST, |s| s.sampled >= 3);
    let small = submit(&mut scheduler, &model, 1, tokens(1, 40), 9);
    scheduler.weights_changed(0, false);
    run(&mut scheduler, &model, &SECOND, |s| s.sampled >= 6);
    assert_eq!((scheduler.running.len(), scheduler.waiting.len()), (1, 1));
    scheduler.weights_changed(0, false);
    run(&mut scheduler, &model, &SECOND, |_| false);
    for (stream, len) in [(large, 216), (small, 9)] {
        let collected = collect(stream).await;
        assert_eq!((collected.end, collected.tokens.len()), (Some(FinishReason::Length), len));
    }

    let [first, second, dropped] =
        [2, 3, 4].map(|stream| submit(&mut scheduler, &model, stream, tokens(3, 50), 30));
    let before = scheduler.sampled;
    run(&mut scheduler, &model, &SECOND, |s| s.sampled >= before + 9);
    assert_eq!(scheduler.running.len(), 3);
    scheduler.weights_changed(0, false);
    assert_eq!(scheduler.abort(0, Some(2)), 1);
    drop(dropped);
    run(&mut scheduler, &model, &SECOND, |_| false);
    let [first, second] = [collect(first).await, collect(second).await];
    assert_eq!((first.end, first.tokens.len() < 30), (Some(FinishReason::Aborted), true));
    assert_eq!((second.end, second.tokens.len()), (Some(FinishReason::Length), 30));
    assert_eq!(scheduler.cache.available_blocks(), 8);
}

/// A token whose embedding is NaN ends the sequences that contain it, with an error that names the
/// reason. Other sequences sample the same tokens as without them, including in reused blocks.
#[tokio::test]
async fn nonfinite_logits_end_only_their_sequence() {
    const BAD: u32 = 299;
    let config = levade_model::ModelConfig { tied: false, ..tiny_config() };
    for precision in [Precision::F32, Precision::Bf16] {
        let compute = Compute::with_isa(2, crate::Isa::detect(), precision);
        let mut weights = random_weights(&compute, &config, 3);
        let row = weights.layout.embedding.start + BAD as usize * config.hidden;
        weights.master[row..row + config.hidden].fill(f32::NAN);
        let model = Transformer::new(compute, weights, 256);
        let mut separate = scheduler(&model, 8, 16);
        let expected = submit(&mut separate, &model, 1, tokens(1, 40), 20);
        run(&mut separate, &model, &FIRST, |_| false);
        let expected = collect(expected).await;

        let mut scheduler = scheduler(&model, 8, 16);
        let mut bad =
            [0, 8].map(|stream| submit(&mut scheduler, &model, stream, vec![5, 6, BAD, 7], 90));
        let mut scored =
            submit_with(&mut scheduler, &model, 9, vec![5, 6, BAD, 7, 8, 9], scoring(0));
        let good = submit(&mut scheduler, &model, 1, tokens(1, 40), 20);
        run(&mut scheduler, &model, &FIRST, |_| false);
        for (stream, problem) in bad
            .iter_mut()
            .map(|stream| (stream, "after 4 tokens are not finite"))
            .chain([(&mut scored, "tokens are not finite")])
        {
            let error =
                stream.next().await.expect("an event").expect_err("it cannot be drawn from");
            assert!(error.to_string().contains(problem), "{error}");
            assert!(stream.next().await.is_none(), "it says so once");
        }
        assert_eq!(collect(good).await, expected);
        let again = submit(&mut scheduler, &model, 1, tokens(1, 40), 20);
        run(&mut scheduler, &model, &FIRST, |_| false);
        assert_eq!(collect(again).await, expected);
        assert_eq!(scheduler.cache.available_blocks(), 8);
    }
}

/// A policy whose weights are not published takes no room from other policies.
#[test]
fn unpublished_policy_is_not_admitted() {
    let model = model();
    let mut scheduler = scheduler(&model, 8, 16);
    let _completion = submit(&mut scheduler, &model, 0, tokens(1, 40), 30);
    scheduler.step(&model, &[PublishedWeights { version: 0, current: false }]);
    assert_eq!((scheduler.running.len(), scheduler.waiting.len()), (0, 1));
    scheduler.step(&model, &FIRST);
    assert_eq!((scheduler.running.len(), scheduler.waiting.len()), (1, 0));
}

/// Keys and values kept over an update serve only the sequences that computed them.
#[tokio::test]
async fn stale_keys_and_values_are_not_shared() {
    const PROMPT: usize = 100;
    let model = model();
    let mut scheduler = scheduler(&model, 200, 16);
    let streams = [0, 1].map(|i| submit(&mut scheduler, &model, i, tokens(1, PROMPT), 20));
    run(&mut scheduler, &model, &FIRST, |s| s.sampled >= 6);
    let before = scheduler.prefilled;
    scheduler.weights_changed(0, true);
    assert_eq!((scheduler.running.len(), scheduler.waiting.len()), (2, 0));
    // One sequence during the old ones, and one after their end.
    let concurrent = submit(&mut scheduler, &model, 2, tokens(1, PROMPT), 5);
    run(&mut scheduler, &model, &SECOND, |_| false);
    assert_eq!(scheduler.prefilled, before + PROMPT as u64, "the others were not computed again");
    let mut longer = tokens(1, PROMPT);
    for stream in streams {
        let collected = collect(stream).await;
        assert_eq!((collected.end, collected.tokens.len()), (Some(FinishReason::Length), 20));
        assert!(
            collected.versions.is_sorted()
                && collected.versions.first() == Some(&0)
                && collected.versions.last() == Some(&1)
        );
        longer.truncate(PROMPT);
        longer.extend(collected.tokens);
    }
    let prefilled = scheduler.prefilled;
    let after = submit(&mut scheduler, &model, 3, longer, 5);
    run(&mut scheduler, &model, &SECOND, |_| false);
    assert_eq!(
        scheduler.prefilled,
        prefilled + 20,
        "the prompt alone is known under these weights"
    );
    for stream in [concurrent, after] {
        assert_eq!(collect(stream).await.tokens.len(), 5);
    }
}

/// Returns parameters, by stream, that depend on the completion so far.
fn adjusting(stream: u64) -> SamplingParams {
    SamplingParams {
        max_tokens: 30,
        temperature: [1.0, 0.5, 0.0][stream as usize % 3],
        repetition_penalty: [1.0, 1.1][stream as usize % 2],
        presence_penalty: 0.5,
        frequency_penalty: 1.0,
        logit_bias: (0..40).map(|token| (token, 0.5)).collect(),
        top_logprobs: 1 + stream as usize % 3,
        min_tokens: 12,
        stop_ids: (0..20).collect(),
        ..SamplingParams::default()
    }
}

/// Penalties, biases, early stops and top tokens: a completion is the same when sampled separately,
/// with other sequences in little memory, and aborted and resumed.
#[tokio::test]
async fn adjusted_completions_are_independent_of_batch_and_aborts() {
    const STREAMS: u64 = 9;
    let model = model();
    let mut separate = Vec::new();
    for stream in 0..STREAMS {
        let mut scheduler = scheduler(&model, 200, 1);
        let completion =
            submit_with(&mut scheduler, &model, stream, grouped_prompt(stream), adjusting(stream));
        run(&mut scheduler, &model, &FIRST, |_| false);
        separate.push(collect(completion).await);
    }
    assert!(separate.iter().any(|completion| completion.end == Some(FinishReason::StopId)));
    assert!(
        separate.iter().all(|completion| completion.tokens[..12].iter().all(|token| *token >= 20))
    );
    for (stream, completion) in separate.iter().enumerate() {
        assert!(
            completion.top.len() == completion.tokens.len()
                && completion.top.iter().all(|t| t.len() == 1 + stream % 3)
        );
    }

    // Half of the requests are aborted midway and continue as new requests.
    let mut scheduler = scheduler(&model, 14, 6);
    let streams: Vec<SampleStream> = (0..STREAMS)
        .map(|stream| {
            submit_with(&mut scheduler, &model, stream, grouped_prompt(stream), adjusting(stream))
        })
        .collect();
    run(&mut scheduler, &model, &FIRST, |s| s.sampled >= 30);
    for stream in (0..STREAMS).step_by(2) {
        scheduler.abort(0, Some(stream));
    }
    let mut num_aborted = 0;
    for (stream, completion) in (0..STREAMS).zip(streams) {
        let mut rest = None;
        if stream % 2 == 1 {
            run(&mut scheduler, &model, &FIRST, |_| false);
        }
        let mut completion = collect(completion).await;
        if completion.end == Some(FinishReason::Aborted) {
            num_aborted += usize::from(!completion.tokens.is_empty());
            let num_sampled = completion.tokens.len();
            let params = SamplingParams {
                max_tokens: 30 - num_sampled,
                sampled_before: num_sampled,
                ..adjusting(stream)
            };
            let prompt_tokens = [grouped_prompt(stream), completion.tokens.clone()].concat();
            rest = Some(submit_with(&mut scheduler, &model, stream, prompt_tokens, params));
        }
        if let Some(rest) = rest {
            run(&mut scheduler, &model, &FIRST, |_| false);
            let rest = collect(rest).await;
            completion.tokens.extend(rest.tokens);
            completion.logprobs.extend(rest.logprobs);
            completion.top.extend(rest.top);
            completion.versions.extend(rest.versions);
            completion.end = rest.end;
        }
        assert_eq!(completion, separate[stream as usize], "stream {stream}");
    }
    assert!(num_aborted > 1, "{num_aborted}");
}

fn grouped_prompt(stream: u64) -> Vec<u32> {
    tokens(stream / 3, 20 + 9 * (stream as usize / 3))
}

/// Returns parameters, by stream, that request log-probabilities of the prompt.
fn scoring(stream: u64) -> SamplingParams {
    SamplingParams {
        max_tokens: [0, 1, 12][stream as usize % 3],
        temperature: [1.0, 0.5, 0.0][stream as usize % 3],
        prompt_logprobs: Some([0, 3][stream as usize % 2]),
        ..SamplingParams::default()
    }
}

/// Prompts longer and shorter than a step compute the same bits separately and with sequences that
/// share them, in little memory. They are computed completely, and other sequences can reuse them.
#[tokio::test]
async fn prompt_scores_are_independent_of_batch() {
    const STREAMS: u64 = 6;
    let model = model();
    let mut separate = Vec::new();
    for stream in 0..STREAMS {
        let mut scheduler = scheduler(&model, 200, 1);
        let completion =
            submit_with(&mut scheduler, &model, stream, scored_prompt(stream), scoring(stream));
        run(&mut scheduler, &model, &FIRST, |_| false);
        let completion = collect(completion).await;
        assert_eq!(completion.prompt.len(), scored_prompt(stream).len() - 1);
        let top = if stream % 2 == 1 { completion.prompt.len() } else { 0 };
        assert!(
            completion.prompt_top.len() == top
                && completion.prompt_top.iter().all(|top| top.len() == 3)
        );
        assert_eq!(completion.end, Some(FinishReason::Length));
        separate.push(completion);
    }
    let mut scheduler = scheduler(&model, 14, 6);
    // The prompt is cached, but scored prompts are computed completely all the same.
    let known = submit(&mut scheduler, &model, 0, scored_prompt(0), 12);
    run(&mut scheduler, &model, &FIRST, |_| false);
    let sampled: Vec<SampleStream> = (10..14)
        .map(|stream| submit(&mut scheduler, &model, stream, scored_prompt(1), 50))
        .collect();
    let scored: Vec<SampleStream> = (0..STREAMS)
        .map(|stream| {
            submit_with(&mut scheduler, &model, stream, scored_prompt(stream), scoring(stream))
        })
        .collect();
    let before = scheduler.prefilled;
    run(&mut scheduler, &model, &FIRST, |_| false);
    let prefilled = (scheduler.prefilled - before) as usize;
    assert!(
        prefilled >= (0..STREAMS).map(|stream| scored_prompt(stream).len()).sum(),
        "{prefilled}"
    );
    for (completion, separate) in scored.into_iter().zip(separate) {
        assert_eq!(collect(completion).await, separate);
    }
    for completion in sampled.into_iter().chain([known]) {
        let completion = collect(completion).await;
        assert!(completion.end == Some(FinishReason::Length) && completion.prompt.is_empty());
    }
    let before = scheduler.prefilled;
    let after = submit(&mut scheduler, &model, 20, scored_prompt(5), 1);
    run(&mut scheduler, &model, &FIRST, |_| false);
    assert_eq!(
        (collect(after).await.tokens.len(), scheduler.prefilled),
        (1, before + 1),
        "its prompt is known"
    );
    assert!(
        scheduler.logits.len() <= 64 * model.weights.config.vocabulary,
        "{}",
        scheduler.logits.len()
    );
    assert_eq!(scheduler.cache.available_blocks(), 14);
}

fn scored_prompt(stream: u64) -> Vec<u32> {
    tokens(stream / 3, [150, 40][stream as usize / 3])
}

/// An update in the middle of a scored prompt starts it again, whether caches are kept or not: all
/// its scores come from the new weights. A prompt whose scores have been sent is not scored again.
#[tokio::test]
async fn prompt_scores_use_one_version() {
    let mut models = [3, 4].map(|seed| {
        let compute = Compute::new(1);
        let weights = random_weights(&compute, &tiny_config(), seed);
        Transformer::new(compute, weights, 256)
    });
    let params = SamplingParams { max_tokens: 9, ..scoring(1) };
    for keep in [false, true] {
        let [old, new] = &mut models;
        let mut separate = scheduler(new, 200, 1);
        let expected = submit_with(&mut separate, new, 0, tokens(1, 150), params.clone());
        run(&mut separate, new, &FIRST, |_| false);
        let expected = collect(expected).await;

        let mut scheduler = scheduler(old, 200, 16);
        let early = submit_with(&mut scheduler, old, 1, tokens(2, 20), params.clone());
        run(&mut scheduler, old, &FIRST, |s| s.sampled > 1);
        let late = submit_with(&mut scheduler, old, 0, tokens(1, 150), params.clone());
        run(&mut scheduler, old, &FIRST, |s| {
            s.running.last().is_some_and(|last| last.computed > 60)
        });
        scheduler.weights_changed(0, keep);
        assert_eq!(scheduler.running.len(), usize::from(keep));
        run(&mut scheduler, new, &SECOND, |_| false);
        let late = collect(late).await;
        assert!(late.prompt == expected.prompt && late.prompt_top == expected.prompt_top);
        assert_eq!((late.tokens, late.logprobs), (expected.tokens, expected.logprobs));
        let early = collect(early).await;
        assert_eq!((early.prompt.len(), early.tokens.len()), (19, 9));
        assert!(early.versions.contains(&0) && early.versions.contains(&1));
    }
}

/// A prompt that fills the context can be scored, but not continued.
#[tokio::test]
async fn prompt_of_context_length_is_scored() {
    let model = model();
    let mut scheduler = scheduler(&model, 200, 1);
    let full = submit_with(&mut scheduler, &model, 0, tokens(1, 256), scoring(0));
    let single = submit_with(&mut scheduler, &model, 0, tokens(1, 1), scoring(0));
    run(&mut scheduler, &model, &FIRST, |_| false);
    for (stream, scores) in [(full, 255), (single, 0)] {
        let collected = collect(stream).await;
        assert_eq!(
            (collected.prompt.len(), collected.tokens.len(), collected.end),
            (scores, 0, Some(FinishReason::Length))
        );
    }
    let (events, _completion) = SampleStream::channel();
    let request =
        SampleRequest { prompt: tokens(1, 256), params: scoring(1), ..SampleRequest::default() };
    let rejected = scheduler.submit(&model, 0, request, None, events);
    assert_eq!(rejected, Err(PolicyError::PromptTooLong { prompt: 256, context: 256 }));
}

/// Constraint that counts up from 20 by one or two, and ends at 40.
struct Climb(u32);

impl Constraint for Climb {
    fn allowed(&mut self) -> Result<AllowedTokens, PolicyError> {
        let tokens = (self.0 + 1..=(self.0 + 2).min(40)).collect();
        Ok(AllowedTokens { tokens, may_end: self.0 == 40 })
    }

    fn push(&mut self, token: u32) -> Result<(), PolicyError> {
        assert!(token > self.0 && token <= self.0 + 2);
        self.0 = token;
        Ok(())
    }
}

/// An update in the middle of grammar-constrained completions: they continue under their
/// constraint, from their state before the update.
#[tokio::test]
async fn grammar_constraint_survives_update() {
    let model = model();
    for keep in [false, true] {
        let mut scheduler = scheduler(&model, 40, 4);
        let completions: Vec<SampleStream> = (0..6)
            .map(|stream| {
                let (events, completion) = SampleStream::channel();
                let params = SamplingParams {
                    grammar: Some(Grammar::JsonObject),
                    stop_ids: vec![7],
                    ..SamplingParams::default()
                };
                let prompt = tokens(stream % 2, 40);
                let request =
                    SampleRequest { seed: 7, stream, prompt, params, ..SampleRequest::default() };
                let constraint: Box<dyn Constraint> = Box::new(Climb(20));
                scheduler.submit(&model, 0, request, Some(constraint), events).expect("it fits");
                completion
            })
            .collect();
        run(&mut scheduler, &model, &FIRST, |s| s.sampled >= 20);
        scheduler.weights_changed(0, keep);
        run(&mut scheduler, &model, &SECOND, |_| false);
        let mut over = 0;
        for completion in completions {
            let collected = collect(completion).await;
            let (last, climb) = collected.tokens.split_last().expect("a reply");
            assert_eq!(
                (*last, climb.last(), collected.end),
                (7, Some(&40), Some(FinishReason::StopId))
            );
            assert!(
                [&[20], climb].concat().windows(2).all(|w| w[0] < w[1] && w[1] <= w[0] + 2),
                "{climb:?}"
            );
            over += usize::from(collected.versions.first() != collected.versions.last());
        }
        assert!(over > 1, "{over} were in the middle");
    }
}
