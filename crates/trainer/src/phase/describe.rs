//! Computes the metrics of a step's attempts and of how they were generated.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use levade_policy::{DeviceStats, PolicyError, Sampler};
use levade_store::{Attempt, HighEntropy};
use levade_tools::Usage;
use levade_tree::{Finish, Kind, MaskReason, Outcome};

use crate::batch::{Targets, TokenCensus};
use crate::metrics::Metrics;
use crate::scheduler::ExcludedAttempts;

/// Minimum mean wait for a toolbox's permits that is reported as a metric.
const MIN_REPORTED_WAIT: Duration = Duration::from_millis(1);

/// Adds the mean and maximum age of the trained tokens: the number of weight versions between
/// sampling and training.
pub(super) fn add_age_metrics(
    attempts: &[Attempt],
    targets: Targets<'_>,
    version: u64,
    metrics: &mut Metrics,
) {
    let segments = attempts
        .iter()
        .flat_map(|a| a.trajectory.segments())
        .filter(|s| targets.contains_targets(s));
    let runs = segments.flat_map(|s| s.versions.iter());
    let mut tokens = 0u64;
    let mut sum = 0u64;
    let mut oldest = 0u64;
    for run in runs {
        let age = version.saturating_sub(run.version);
        tokens += u64::from(run.len);
        sum += age * u64::from(run.len);
        oldest = oldest.max(age);
    }
    metrics.add("training/staleness/mean", sum as f64 / tokens.max(1) as f64);
    metrics.add("training/staleness/max", oldest as f64);
}

/// Adds the number of sampled tokens that are masked, by mask reason.
pub(super) fn add_mask_metrics(found: &TokenCensus, metrics: &mut Metrics) {
    for why in MaskReason::ALL {
        let tokens = found.masked.get(&why).map_or(0, |count| count.tokens);
        metrics.add(format!("training/masked_{}_tokens", why.name()), tokens as f64);
    }
}

/// Adds metrics about the tokens that keep their advantages because their entropy is high: their
/// number, their fraction and the mean threshold.
pub(super) fn add_high_entropy_metrics(found: &HighEntropy, metrics: &mut Metrics) {
    let HighEntropy { tokens, kept, thresholds } = found;
    metrics.add("actor/high_entropy_tokens", *kept as f64);
    metrics.add("actor/high_entropy_fraction", *kept as f64 / (*tokens).max(1) as f64);
    let mean = thresholds.iter().sum::<f64>() / thresholds.len().max(1) as f64;
    metrics.add("actor/entropy_threshold", mean);
}

/// Adds metrics of the greedy baseline attempts: rewards, number and tokens. `missing` is the
/// number of groups without a baseline.
pub(super) fn add_baseline_metrics(baselines: &[Attempt], missing: usize, metrics: &mut Metrics) {
    metrics.add_spread(
        "critic/baseline_rewards",
        baselines.iter().filter_map(|baseline| baseline.reward),
    );
    metrics.add("training/baselines", baselines.len() as f64);
    metrics.add("training/baselines_missing", missing as f64);
    let tokens: usize = baselines.iter().map(|baseline| baseline.trajectory.sampled_tokens()).sum();
    metrics.add("training/baseline_tokens", tokens as f64);
}

/// Adds the mean number of sampled tokens per attempt over the groups (`groups`), and over all
/// attempts that were started for them, if attempts were oversampled. A cancelled attempt is
/// counted with the length of the longest attempt in its group. The cancelled attempt was still
/// running when the group was complete, so the second mean is a lower bound.
pub(super) fn add_oversampling_metrics(
    groups: &[Vec<usize>],
    excluded: &[ExcludedAttempts],
    metrics: &mut Metrics,
) {
    let mut kept = Vec::new();
    let mut started = Vec::new();
    for (lengths, excluded) in groups.iter().zip(excluded) {
        let max_len = lengths.iter().copied().max().unwrap_or(0);
        kept.extend_from_slice(lengths);
        started.extend(lengths.iter().chain(&excluded.ended).copied());
        started.extend(std::iter::repeat_n(max_len, excluded.cancelled));
    }
    if started.len() > kept.len() {
        let mean =
            |lengths: &[usize]| lengths.iter().sum::<usize>() as f64 / lengths.len().max(1) as f64;
        metrics.add("oversample/kept_length_mean", mean(&kept));
        metrics.add("oversample/started_length_mean", mean(&started));
    }
}

/// Cumulative statistics of a sampler at one point in time.
pub(super) struct SamplerSnapshot {
    device: Option<DeviceStats>,
    paused: Duration,
}

impl SamplerSnapshot {
    /// Reads the current statistics of `sampler`.
    pub async fn take(sampler: &dyn Sampler) -> Result<Self, PolicyError> {
        Ok(SamplerSnapshot {
            device: sampler.device_stats().await?,
            paused: sampler.paused().await?,
        })
    }
}

/// Adds metrics of the sampler's work between two snapshots, `seconds` apart. Adds nothing if the
/// sampler reports no statistics.
pub(super) fn add_sampler_metrics(
    before: &SamplerSnapshot,
    now: &SamplerSnapshot,
    seconds: f64,
    metrics: &mut Metrics,
) {
    let learning = now.paused.saturating_sub(before.paused).as_secs_f64();
    let (Some(before), Some(after)) = (&before.device, &now.device) else { return };
    let hits = after.prefix_hits.saturating_sub(before.prefix_hits) as f64;
    let requested_tokens = hits + after.prefilled.saturating_sub(before.prefilled) as f64;
    if requested_tokens > 0.0 {
        metrics.add("sampler/prefix_hit_ratio", hits / requested_tokens);
    }
    let busy = after.busy_seconds - before.busy_seconds;
    metrics.add("perf/idle_fraction", (1.0 - (busy + learning) / seconds).max(0.0));
    if busy > 0.0 {
        let sampled_tokens = after.sampled.saturating_sub(before.sampled) as f64;
        metrics.add("sampler/generation_tokens_per_busy_s", sampled_tokens / busy);
        metrics.add("sampler/running", (after.running_seconds - before.running_seconds) / busy);
        metrics.add(
            "sampler/cache_in_use",
            (after.cache_in_use_seconds - before.cache_in_use_seconds) / busy,
        );
    }
}

/// Adds the mean duration, in seconds, of each toolbox's calls that ended between two snapshots of
/// tool usage. Also adds their mean wait for a permit if it is at least 1 ms.
pub(super) fn add_tool_metrics(
    before: &BTreeMap<String, Usage>,
    after: &BTreeMap<String, Usage>,
    metrics: &mut Metrics,
) {
    for (name, used) in after {
        let used = used.minus(before.get(name).copied().unwrap_or_default());
        if used.calls > 0 {
            let mean = |time: Duration| time.as_secs_f64() / used.calls as f64;
            metrics.add(format!("timing_s/tools/{name}"), mean(used.time));
            if used.waited >= MIN_REPORTED_WAIT * used.calls as u32 {
                metrics.add(format!("timing_s/tools/{name}/waiting"), mean(used.waited));
            }
        }
    }
}

/// Adds the memory of this process in GiB: the current and the peak resident set size. Adds nothing
/// if the system has no `/proc`.
pub(super) fn add_memory_metrics(metrics: &mut Metrics) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key))?;
        line.trim_end_matches("kB").trim().parse::<f64>().ok()
    };
    for (name, key) in
        [("perf/process_memory_gb", "VmRSS:"), ("perf/process_memory_peak_gb", "VmHWM:")]
    {
        if let Some(kib) = kib(key) {
            metrics.add(name, kib / f64::from(1 << 20));
        }
    }
}

/// Adds the metrics of a step's attempts: scores, rewards, lengths, turns and tool calls.
pub(super) fn add_attempt_metrics(groups: &[&[Attempt]], metrics: &mut Metrics) {
    let attempts: Vec<&Attempt> = groups.iter().copied().flatten().collect();
    metrics.add_spread("critic/score", attempts.iter().filter_map(|attempt| attempt.score));
    let components = || attempts.iter().flat_map(|attempt| &attempt.outcome.components);
    for name in components().map(|component| component.name.as_str()).collect::<BTreeSet<_>>() {
        let values = components()
            .filter(|component| component.name == name)
            .map(|component| component.value);
        metrics.add_spread(&format!("reward/{name}"), values);
    }
    metrics.add_spread("critic/rewards", attempts.iter().filter_map(|attempt| attempt.reward));
    let rewards: Vec<Vec<f64>> = groups
        .iter()
        .map(|group| group.iter().filter_map(|attempt| attempt.reward).collect())
        .collect();
    let stats = levade_rl::GroupStats::new(&rewards);
    metrics.add("critic/rewards/std", stats.deviation);
    metrics.add("critic/rewards/best", stats.best);
    metrics.add("training/zero_variance_groups", stats.degenerate);

    let sampled = attempts.iter().map(|attempt| attempt.trajectory.sampled_tokens() as f64);
    metrics.add_spread("response_length", sampled);
    let prompts = attempts.iter().filter_map(|attempt| attempt.trajectory.segments().first());
    let prompts = prompts
        .filter(|segment| segment.kind == Kind::Context)
        .map(|segment| segment.tokens.len() as f64);
    metrics.add_spread("prompt_length", prompts);

    let outcomes: Vec<&Outcome> = attempts.iter().map(|attempt| &attempt.outcome).collect();
    let fraction = |wanted: &dyn Fn(&Outcome) -> bool| {
        outcomes.iter().filter(|outcome| wanted(outcome)).count() as f64
            / outcomes.len().max(1) as f64
    };
    metrics.add(
        "response_length/clip_ratio",
        fraction(&|o| matches!(o.finish, Finish::MaxTokens | Finish::Context)),
    );
    metrics.add("prompt_length/clip_ratio", fraction(&|o| o.prompt_truncated));
    metrics.add("response/late_ratio", fraction(&|o| o.finish == Finish::Deadline));
    metrics.add("response/aborted_ratio", fraction(&|o| o.finish == Finish::Failed));
    metrics.add("response/answered_ratio", fraction(&|o| o.finish.is_complete()));
    metrics.add_spread("num_turns", outcomes.iter().map(|o| f64::from(o.turns)));
    metrics.add_spread("tool_call_counts", outcomes.iter().map(|o| f64::from(o.calls.total())));
    let total =
        |count: &dyn Fn(&Outcome) -> u32| outcomes.iter().map(|o| f64::from(count(o))).sum();
    metrics.add("tool_calls/ok", total(&|o| o.calls.ok));
    metrics.add("tool_calls/malformed", total(&|o| o.calls.malformed));
    metrics.add("tool_calls/unknown_tool", total(&|o| o.calls.unknown_tool));
    metrics.add("tool_calls/bad_arguments", total(&|o| o.calls.bad_arguments));
    metrics.add("tool_calls/failed", total(&|o| o.calls.failed));
    metrics.add("tool_calls/timeout", total(&|o| o.calls.timeout));
    metrics.add("tool_calls/bare", total(&|o| o.calls.bare));
    let measured: BTreeSet<&String> = outcomes.iter().flat_map(|o| o.tool_metrics.keys()).collect();
    for name in measured {
        let sum: f64 = outcomes.iter().filter_map(|o| o.tool_metrics.get(name)).sum();
        metrics.add(format!("tools/{name}"), sum / outcomes.len() as f64);
    }
    metrics.add("context/truncated", total(&|o| o.context_truncations.len() as u32));
    metrics.add("context/truncated_ratio", fraction(&|o| !o.context_truncations.is_empty()));
    let turns = |forked: bool| {
        move |o: &Outcome| o.drift.iter().filter(|drift| drift.forked == forked).count() as u32
    };
    metrics.add("conversation/drift", total(&turns(false)));
    metrics.add("conversation/forks", total(&turns(true)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oversampling_metrics_report_kept_and_started_lengths() {
        let report = |excluded: ExcludedAttempts| {
            let mut metrics = Metrics::default();
            add_oversampling_metrics(&[vec![2, 4]], &[excluded], &mut metrics);
            let of = |name: &str| metrics.get(&format!("oversample/{name}_length_mean"));
            (of("kept"), of("started"))
        };
        assert_eq!(report(ExcludedAttempts::default()), (None, None));
        // The cancelled attempt counts as 4 tokens.
        assert_eq!(
            report(ExcludedAttempts { ended: vec![8], cancelled: 1 }),
            (Some(3.0), Some(4.5))
        );
    }
}
