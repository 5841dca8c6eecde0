//! The rules of `levade inspect --alarms` that compare one metric with a threshold.

/// Alarm rule for one metric. The rule raises an alarm if the trailing mean of the metric exceeds
/// `warning`.
pub struct AlarmRule {
    /// Name of the alarm that the rule raises.
    pub name: &'static str,
    /// Name of the metric, without the prefix of a policy.
    pub metric: &'static str,
    /// Threshold above which the rule raises a warning.
    pub warning: f64,
    /// Threshold above which the alarm is critical. `None` if the alarm is never critical.
    pub critical: Option<f64>,
    /// Whether the metric must be exactly 0 because the embedded engine samples and trains. Such a
    /// rule needs no minimum number of steps. The rule does not apply to other engines.
    pub needs_exact: bool,
    /// Whether the rule ignores policies that solve their tasks.
    pub unless_solved: bool,
    /// Function that describes the measured value.
    pub message: fn(f64) -> String,
    /// Advice on what the user can do about the alarm.
    pub action: &'static str,
    /// Page of the documentation that explains the alarm.
    pub page: &'static str,
}

/// All rules that raise an alarm from one metric.
pub const RULES: &[AlarmRule] = &[
    AlarmRule {
        name: "zero_variance_groups",
        metric: "training/zero_variance_groups",
        warning: 0.5,
        critical: Some(0.9),
        needs_exact: false,
        unless_solved: true,
        message: |figure| {
            format!(
                "in {:.0} % of the groups all attempts have the same reward, so that these groups \
                 have no gradient",
                100.0 * figure
            )
        },
        action: "use tasks that the policy solves sometimes, raise group_size, or set \
                 `zero_variance_groups = \"refill\"`",
        page: "docs/train.md#groups-of-equal-rewards",
    },
    AlarmRule {
        name: "truncated_attempts",
        metric: "response_length/clip_ratio",
        warning: 0.25,
        critical: Some(0.75),
        needs_exact: false,
        unless_solved: false,
        message: |figure| {
            format!("{:.0} % of the attempts are truncated by a token limit", 100.0 * figure)
        },
        action: "raise agent.max_tokens or model.context, or choose their effect with `overlong`",
        page: "docs/train.md#truncated-attempts",
    },
    AlarmRule {
        name: "late_attempts",
        metric: "response/late_ratio",
        warning: 0.1,
        critical: Some(0.5),
        needs_exact: false,
        unless_solved: false,
        message: |figure| {
            format!("{:.0} % of the attempts exceed their time limit", 100.0 * figure)
        },
        action: "raise agent.attempt_seconds, or lower engine.concurrency",
        page: "docs/train.md#truncated-attempts",
    },
    AlarmRule {
        name: "broken_attempts",
        metric: "response/aborted_ratio",
        warning: 0.1,
        critical: Some(0.5),
        needs_exact: false,
        unless_solved: false,
        message: |figure| {
            format!("{:.0} % of the attempts break outside the model", 100.0 * figure)
        },
        action: "read the errors (`levade inspect RUN --failed`), and set agent.retries",
        page: "docs/train.md#failures-outside-the-model",
    },
    AlarmRule {
        name: "truncated_context",
        metric: "context/truncated_ratio",
        warning: 0.5,
        critical: None,
        needs_exact: false,
        unless_solved: false,
        message: |figure| {
            format!("in {:.0} % of the attempts a context policy shortens a prompt", 100.0 * figure)
        },
        action: "raise model.context, or shorten tool results",
        page: "docs/agents.md#context",
    },
    AlarmRule {
        name: "drift",
        metric: "conversation/drift",
        warning: 1.0,
        critical: None,
        needs_exact: false,
        unless_solved: false,
        message: |figure| {
            format!(
                "at {figure:.1} positions per step the chat template renders the history \
                 differently from the recorded tokens"
            )
        },
        action: "set `agent.history = \"template\"` if a server will run the model with this \
                 template",
        page: "docs/train.md#conversations",
    },
    AlarmRule {
        name: "mismatch",
        metric: "training/logprob_mismatch",
        warning: 0.0,
        critical: Some(0.0),
        needs_exact: true,
        unless_solved: false,
        message: |figure| {
            format!(
                "for {figure:.0} tokens per step, training computes another log-probability than \
                 sampling"
            )
        },
        action: "report a defect: the embedded engine must compute equal bits",
        page: "ARCHITECTURE.md#batch-invariance",
    },
    AlarmRule {
        name: "sampler_mismatch",
        metric: "rollout_corr/log_diff_mean",
        warning: 0.05,
        critical: Some(0.2),
        needs_exact: false,
        unless_solved: false,
        message: |figure| {
            format!(
                "log-probabilities of samplers and learner differ by {figure:.3} nats per token on \
                 average"
            )
        },
        action: "check that the samplers have the learner's weights and precision, and set \
                 `correction`",
        page: "docs/recipe.md#corrections",
    },
    AlarmRule {
        name: "beyond_bounds",
        metric: "rollout_corr/beyond_bounds",
        warning: 0.1,
        critical: Some(0.5),
        needs_exact: false,
        unless_solved: false,
        message: |figure| {
            format!(
                "{:.0} % of the tokens have probability ratios beyond the bounds of the \
                 correction",
                100.0 * figure
            )
        },
        action: "lower staleness, or check the samplers' weights",
        page: "docs/recipe.md#corrections",
    },
    AlarmRule {
        name: "stale_tokens",
        metric: "training/staleness/mean",
        warning: 4.0,
        critical: Some(16.0),
        needs_exact: false,
        unless_solved: false,
        message: |figure| format!("trained tokens are {figure:.1} weight versions old on average"),
        action: "lower staleness, add samplers, or set a correction",
        page: "docs/train.md#running-ahead",
    },
    AlarmRule {
        name: "kl_tail",
        metric: "actor/ppo_kl",
        warning: 0.1,
        critical: Some(1.0),
        needs_exact: false,
        unless_solved: false,
        message: |figure| {
            format!("updates move the policy by {figure:.3} nats of KL divergence per token")
        },
        action: "lower learning_rate, epochs or mini_batches",
        page: "docs/recipe.md",
    },
    AlarmRule {
        name: "clipped_ratios",
        metric: "actor/pg_clipfrac",
        warning: 0.3,
        critical: Some(0.6),
        needs_exact: false,
        unless_solved: false,
        message: |figure| {
            format!("{:.0} % of the tokens have clipped ratios and no gradient", 100.0 * figure)
        },
        action: "lower learning_rate, epochs or staleness",
        page: "docs/recipe.md",
    },
    AlarmRule {
        name: "skipped_updates",
        metric: "actor/skipped_updates",
        warning: 0.0,
        critical: Some(0.0),
        needs_exact: false,
        unless_solved: false,
        message: |figure| {
            format!("{figure:.1} updates per step are skipped: their gradient is not finite")
        },
        action: "lower learning_rate, or train in f32",
        page: "docs/recipe.md",
    },
    AlarmRule {
        name: "idle_engine",
        metric: "perf/idle_fraction",
        warning: 0.5,
        critical: None,
        needs_exact: false,
        unless_solved: false,
        message: |figure| {
            format!(
                "the engine neither samples nor trains in {:.0} % of the time: it waits for \
                 tools, scorers or programs",
                100.0 * figure
            )
        },
        action: "raise engine.concurrency, set staleness = 1, or make the tools faster \
                 (`timing_s/tools/…`)",
        page: "docs/train.md#running-ahead",
    },
];
