//! Checks constraints between the values of a recipe. Ranges of single values are in
//! [`bounds`](super::bounds).

use std::fmt::Display;
use std::path::Path;

use levade_rl::correction::RatioLevel;
use levade_rl::{Alignment, Compare, Estimator, GroupBaseline, KlEstimator, PolicyLoss, RlError};
use levade_tasks::{Arithmetic, TaskError};
use levade_tree::DEFAULT;

use super::agent::AgentKind;
use super::bounds::{OutOfRange, first_out_of_range};
use super::keys::{EvalKeys, Phase, Recipe, SftKeys, TaskSource, TracesKeys};
use super::policy::PolicyKeys;
use super::rl::{
    Algorithm, CriticKeys, GroupBy, KlTarget, OverlongAttempts, ProximalPolicy, RlKeys,
    ZeroVarianceGroups,
};
use super::{RecipeError, write};

/// Returns whether a URL has the scheme http or https.
pub(super) fn is_http(url: &str) -> bool {
    url.starts_with("http://") || url.starts_with("https://")
}

/// Formats a URL for messages. A URL with a user name is hidden, because it may contain a password.
pub(super) fn display_url(url: &str) -> String {
    if url.contains('@') { "an address with a user name".into() } else { format!("\"{url}\"") }
}

/// Checks the values of one recipe file. Each check returns an error for the first invalid value.
pub(super) struct Checker<'a> {
    file: &'a Path,
}

impl Checker<'_> {
    /// Returns the path of the recipe file.
    pub(super) fn file(&self) -> &Path {
        self.file
    }

    pub(super) fn check(
        &self,
        ok: bool,
        key: impl Display,
        value: impl Display,
        range: impl Display,
    ) -> Result<(), RecipeError> {
        if ok {
            return Ok(());
        }
        Err(RecipeError::Value {
            file: self.file.to_owned(),
            key: key.to_string(),
            value: value.to_string(),
            range: range.to_string(),
        })
    }

    /// Checks the sampling filters of evaluations: their ranges, and that greedy sampling has no
    /// filter.
    fn check_eval_sampling(&self, eval: &EvalKeys) -> Result<(), RecipeError> {
        let EvalKeys { temperature, top_p, top_k, min_p, .. } = *eval;
        let greedy = temperature == 0.0;
        let greedy_note = "; leave it out if sampling is greedy (eval.temperature = 0)";
        let is_allowed = |untouched: bool| untouched || !greedy;
        let in_range = top_p > 0.0 && top_p <= 1.0 && is_allowed(top_p == 1.0);
        self.check(in_range, "eval.top_p", top_p, format!("in 0..=1, not 0{greedy_note}"))?;
        self.check(is_allowed(top_k == 0), "eval.top_k", top_k, format!("0{greedy_note}"))?;
        let in_range = (0.0..=1.0).contains(&min_p) && is_allowed(min_p == 0.0);
        self.check(in_range, "eval.min_p", min_p, format!("in 0..=1{greedy_note}"))
    }

    /// Checks that a phase with a success rate for early stopping is evaluated between its steps.
    fn check_early_stopping(
        &self,
        key: &str,
        phase: &Phase,
        eval: &EvalKeys,
    ) -> Result<(), RecipeError> {
        let Some(until) = phase.early_stop_success() else { return Ok(()) };
        let measured = eval.every > 0 && eval.tasks > 0;
        let range = "left out unless the phase is evaluated; set `eval.every` and `eval.tasks`";
        self.check(measured, key, until, range)
    }

    fn check_sft(&self, recipe: &Recipe, phase: usize, keys: &SftKeys) -> Result<(), RecipeError> {
        if let Some(source) = &keys.source {
            let key = |key: &str| format!("phase.{phase}.source.{key}");
            if source.sessions {
                self.check_session_source(recipe, phase, keys, source)?;
            } else if let Some(policy) = &source.policy {
                let external = matches!(recipe.policy.get(policy), Some(PolicyKeys::External(_)));
                let own = recipe.agents().iter().all(|(_, agent)| {
                    recipe.policy_names(agent) == [policy.as_str()]
                        && recipe.trained_policies().contains(policy)
                });
                let range = "a policy of kind \"external\", or the trained policy of all agents, \
                             whose completions are imitated";
                self.check(external || own, key("policy"), format!("\"{policy}\""), range)?;
                let range =
                    "left out if `policy` is set: only one of them supplies the demonstrations";
                let field = source.field.as_deref().unwrap_or_default();
                self.check(source.field.is_none(), key("field"), format!("\"{field}\""), range)?;
            } else {
                let field = source.field.as_deref().unwrap_or_default();
                let range = "the task field with the completions to imitate, unless `policy` or \
                             `sessions` is set";
                self.check(!field.is_empty(), key("field"), format!("\"{field}\""), range)?;
            }
            let tasks = source.max_tasks(keys.demonstrations);
            let min_tasks = keys.demonstrations;
            self.check(
                tasks >= min_tasks,
                key("tasks"),
                tasks,
                format!("at least {min_tasks}, the number of demonstrations, or 0"),
            )?;
        }
        if let Some(system) = &keys.system {
            let is_single_loop = recipe.agents.is_empty() && recipe.agent.kind == AgentKind::Tools;
            let range = "left out unless the phase has a `source` and the recipe has one agent, \
                         which uses the built-in loop";
            let key = format!("phase.{phase}.system");
            self.check(keys.source.is_some() && is_single_loop, key, format!("{system:?}"), range)?;
        }
        self.check_parameter(phase, keys.normalizer.check())
    }

    /// Converts an error about a loss or advantage parameter into an error about the recipe key
    /// that sets the parameter.
    fn check_parameter(&self, phase: usize, found: Result<(), RlError>) -> Result<(), RecipeError> {
        match found {
            Err(RlError::Parameter { name, value, range }) => self.check(
                false,
                format!("phase.{phase}.{}", recipe_key_of_parameter(name)),
                value,
                range,
            ),
            _ => Ok(()),
        }
    }

    /// Checks, if `high_entropy_fraction` is below 1, that the loss works with tokens whose
    /// advantages are set to 0.
    fn check_high_entropy(&self, phase: usize, keys: &RlKeys) -> Result<(), RecipeError> {
        let fraction = keys.high_entropy_fraction;
        let loss = match keys.loss().policy {
            PolicyLoss::GeometricMean { .. } => "gmpo",
            PolicyLoss::Direct { .. } => "direct",
            PolicyLoss::KlCov { .. } => "kl_cov",
            PolicyLoss::ClipCov { .. } => "clip_cov",
            _ => "",
        };
        self.check(
            fraction == 1.0 || loss.is_empty(),
            format!("phase.{phase}.high_entropy_fraction"),
            fraction,
            format!(
                "1 with the loss `{loss}`, which uses the advantages of other tokens, or no \
                 advantages"
            ),
        )
    }

    fn check_rl(&self, recipe: &Recipe, phase: usize, keys: &RlKeys) -> Result<(), RecipeError> {
        let key = |name: &str| format!("phase.{phase}.{name}");
        let allows_single_attempt =
            !keys.compares_attempts() || (keys.group_by == GroupBy::Step && keys.groups >= 2);
        self.check(
            keys.group_size >= if allows_single_attempt { 1 } else { 2 },
            key("group_size"),
            keys.group_size,
            "at least 2: an advantage compares an attempt with the other attempts at the same task",
        )?;
        self.check_seat_groups(phase, keys)?;
        self.check_curriculum(phase, keys.curriculum.as_ref())?;
        self.check_experience(recipe, phase, keys)?;
        self.check_step_attempts(phase, keys)?;
        let estimator = keys.estimator();
        let passes = keys.algorithm == Algorithm::PassK && keys.advantage.is_none();
        self.check(
            passes || keys.k.is_none(),
            key("k"),
            keys.k.unwrap_or_default(),
            "left out unless `algorithm` is \"pass_k\"; if you set `advantage`, set k in it",
        )?;
        if let Estimator::Group(GroupBaseline {
            compare: Compare::SecondBest { k: Some(k) }, ..
        }) = estimator
        {
            let tasks = if keys.group_by == GroupBy::Step { keys.groups } else { 1 };
            let max_k = tasks * keys.group_size;
            let name = if passes { "k" } else { "advantage.compare.k" };
            let range = format!(
                "at least 2, and at most the number of attempts that are compared, {max_k}"
            );
            self.check((2..=max_k).contains(&k), key(name), k, range)?;
        }
        let checks = [
            keys.loss().check_parameters(),
            keys.value_loss().check_parameters(),
            keys.normalizer.map_or(Ok(()), |normalizer| normalizer.check()),
            estimator.check(),
            keys.correction.map_or(Ok(()), |correction| correction.check()),
        ];
        for wrong in
            checks.into_iter().chain(keys.rejection.iter().map(|rejection| rejection.check()))
        {
            self.check_parameter(phase, wrong)?;
        }
        if let Estimator::OptimalToken { alignment, .. } = estimator {
            self.check(
                alignment == Alignment::ActionToken,
                key("advantage.alignment"),
                "\"position\"",
                "\"action_token\": \"position\" also counts the tokens of tool results, and exists \
                 only for comparisons with other programs",
            )?;
        }
        self.check_high_entropy(phase, keys)?;
        let parts =
            if let Estimator::Gdpo { weights, .. } = &estimator { weights.len() } else { 3 };
        self.check(
            parts == 3,
            key("advantage.weights"),
            format!("a list of {parts}"),
            "a list of three weights: of the answer's score, of the rest of the outcome, and of \
             the rewards of turns",
        )?;
        self.check(
            !matches!(keys.loss, Some(PolicyLoss::Value { .. })),
            key("loss"),
            "\"value\"",
            "another loss: \"value\" trains the critic, not the policy",
        )?;
        let clip_options = [
            ("clip_low", keys.clip_low),
            ("clip_high", keys.clip_high),
            ("clip_dual", keys.clip_dual),
        ];
        for (name, value) in clip_options {
            let used = keys.loss.is_none() && keys.algorithm.uses_key(name);
            let range = "left out: the algorithm's loss does not use it; if you set `loss`, set \
                         its options there";
            self.check(used || value.is_none(), key(name), value.unwrap_or_default(), range)?;
        }
        if let Some(kl) = keys.kl {
            self.check(
                kl.adaptive.is_none() || kl.apply_to == KlTarget::Reward,
                key("kl.adaptive"),
                "set",
                "left out unless kl.apply_to = \"reward\"",
            )?;
            self.check(
                !kl.importance_weighted || kl.apply_to == KlTarget::Loss,
                key("kl.importance_weighted"),
                true,
                "left out if kl.apply_to = \"reward\": the loss already weights every reward",
            )?;
            self.check(
                kl.apply_to != KlTarget::Loss
                    || kl.estimator != KlEstimator::K1
                    || kl.importance_weighted,
                key("kl.estimator"),
                "\"k1\"",
                "\"k2\", \"k1_with_k2_gradient\" or \"k3\" in the loss, where the gradient of k1 \
                 is 0 in expectation; or \"k1\" with kl.importance_weighted or kl.apply_to = \
                 \"reward\"",
            )?;
            if let Some(adaptive) = kl.adaptive {
                let lower = adaptive.min_horizon(keys.groups.saturating_mul(keys.group_size));
                let horizon = adaptive.horizon;
                let range = format!(
                    "finite and more than a fifth of groups × group_size, {lower}: it is a number \
                     of attempts, and a step of five horizons can set β to 0, where it stays"
                );
                let in_range = horizon.is_finite() && horizon > lower;
                self.check(in_range, key("kl.adaptive.horizon"), horizon, range)?;
            }
        }
        let corrects = keys.correction.is_some() || !keys.rejection.is_empty();
        self.check(
            !corrects || keys.proximal != ProximalPolicy::Behavior,
            key("proximal"),
            "\"behavior\"",
            "\"recompute\" or \"interpolate\" if `correction` or `rejection` is set: they compare \
             the proximal policy with the policy that sampled the tokens",
        )?;
        let of_tokens =
            keys.correction.is_none_or(|c| c.level == RatioLevel::Token && !c.normalize);
        self.check(
            keys.proximal != ProximalPolicy::Interpolate
                || (of_tokens && keys.rejection.is_empty()),
            key("proximal"),
            "\"interpolate\"",
            "\"recompute\" with `rejection`, or with a `correction` that is normalized or not of \
             level \"token\": the interpolation treats each token separately",
        )?;
        self.check(
            (1..=keys.groups).contains(&keys.mini_batches),
            key("mini_batches"),
            keys.mini_batches,
            format!("at least 1, and at most the number of groups, {}", keys.groups),
        )?;
        self.check(
            keys.needs_critic() || keys.critic == CriticKeys::default(),
            key("critic"),
            "set",
            "left out: this advantage needs no critic; `ppo` does",
        )?;
        self.check(
            keys.overlong != OverlongAttempts::Bootstrap || keys.needs_critic(),
            key("overlong"),
            "\"bootstrap\"",
            "another value: \"bootstrap\" needs a critic to estimate the remaining reward of a \
             truncated attempt, and this advantage has none; `ppo` has",
        )?;
        if let OverlongAttempts::Penalize { buffer, .. } = keys.overlong {
            // The agents that act are known only together with the tasks; see `check_tasks`.
            let max_buffer =
                recipe.agents().iter().map(|(_, agent)| agent.max_tokens).max().unwrap_or(0) as u64;
            let range = format!(
                "at least 1, and at most agent.max_tokens, {max_buffer}: the buffer is part of \
                 that limit"
            );
            self.check((1..=max_buffer).contains(&buffer), key("overlong.buffer"), buffer, range)?;
        }
        let from = keys.only.reward_from;
        let to = keys.only.reward_to;
        self.check(
            from.is_none_or(|from| to.is_none_or(|to| from <= to)),
            key("only.reward_from"),
            from.unwrap_or_default(),
            "at most `only.reward_to`, because otherwise no attempt is trained on",
        )?;
        let omits_groups = matches!(
            keys.zero_variance_groups,
            Some(ZeroVarianceGroups::Drop | ZeroVarianceGroups::Refill)
        );
        self.check(
            !omits_groups || keys.zero_variance_has_no_gradient(),
            key("zero_variance_groups"),
            "set",
            "left out: with this advantage, groups of equal rewards have a gradient too",
        )
    }
}

/// Returns the recipe key that sets the `levade_rl` parameter `name`.
fn recipe_key_of_parameter(name: &str) -> String {
    let first = name.split(' ').next().unwrap_or(name);
    let nested_key = |table: &str, key: &str| format!("{table}.{key}");
    let bound = if first == "lower" { "low" } else { "high" };
    match name {
        "clip low" | "clip high" => name.replace(' ', "_"),
        "dual clip" => "clip_dual".into(),
        "value clip" => nested_key("critic", "clip"),
        "entropy coefficient" => "entropy".into(),
        "KL coefficient" => nested_key("kl", "coefficient"),
        "weight of a component" => nested_key("advantage", "weights"),
        _ if name.ends_with("of the advantage") => nested_key("advantage", first),
        _ if name.ends_with("of the normalizer") => nested_key("normalizer", first),
        _ if name.ends_with("of the correction") => nested_key("correction.bound", bound),
        _ if name.ends_with("of the rejection") => nested_key("rejection", bound),
        _ => nested_key("loss", &name.replace(' ', "_")),
    }
}

impl Recipe {
    /// Checks that the name of the run is valid as the name of a directory within `runs`.
    pub(super) fn check_name(&self, file: &Path) -> Result<(), RecipeError> {
        let name = &self.run.name;
        let is_path = name.contains(['/', '\\']) || [".", ".."].contains(&name.trim());
        let ok = !is_path && !name.chars().any(char::is_control);
        let range = "a name without slashes and control characters, other than `.` and `..`: it \
                     names the run's directory, unless `run.folder` is set";
        Checker { file }.check(ok, "run.name", format_args!("{name:?}"), range)
    }

    /// Checks every value of the recipe. `file` names the recipe in errors.
    pub(super) fn check(&self, file: &Path) -> Result<(), RecipeError> {
        let checker = Checker { file };
        let Recipe { run, model, tasks, eval, phase, .. } = self;
        if let Some(OutOfRange { key, value, range }) = first_out_of_range(&mut write::write(self)?)
        {
            checker.check(false, key, value, range)?;
        }
        checker.check(!run.name.trim().is_empty(), "run.name", "empty", "a name")?;
        let mlflow = &self.metrics.mlflow;
        checker.check(
            mlflow.is_empty() || is_http(mlflow),
            "metrics.mlflow",
            display_url(mlflow),
            "an address with http:// or https://",
        )?;
        let otlp = &self.metrics.traces.otlp;
        let is_mlflow = otlp == TracesKeys::MLFLOW;
        checker.check(
            otlp.is_empty() || is_http(otlp) || (is_mlflow && !mlflow.is_empty()),
            "metrics.traces.otlp",
            display_url(otlp),
            if is_mlflow {
                "set together with metrics.mlflow, the address of the server"
            } else {
                "an address with http:// or https://, or \"mlflow\""
            },
        )?;
        checker.check(
            run.skip_phases == 0 || run.skip_phases < phase.len(),
            "run.skip_phases",
            run.skip_phases,
            format_args!("less than {}, the number of phases", phase.len()),
        )?;
        checker.check(
            !model.source.is_empty(),
            "model.source",
            "empty",
            "a directory, a file or the name of a model",
        )?;
        checker.check(!tasks.is_empty(), "tasks", "empty", "at least one source")?;
        for (i, source) in tasks.iter().enumerate() {
            if let TaskSource::Arithmetic(keys) = source
                && let Err(TaskError::Option { name, value, range }) =
                    Arithmetic::new(keys.options(), run.seed)
            {
                checker.check(false, format!("tasks.{i}.{name}"), value, range)?;
            }
        }

        checker.check_environments(self)?;
        checker.check_game(self)?;
        checker.check_sessions(self)?;
        checker.check_policies(self)?;
        checker.check_learner(self)?;
        checker.check_samplers(self)?;
        checker.check_placement(self)?;
        checker.check_runners(self)?;
        checker.check_session_gateway(self)?;
        checker.check_tools(&self.tool)?;
        checker.check_helpers(self)?;
        checker.check_users(self)?;
        for (name, keys) in self.agents() {
            let table = if name == DEFAULT { "agent".into() } else { format!("agent.{name}") };
            checker.check_agent(self, &table, keys)?;
        }
        checker.check_eval_attempts(eval)?;
        let samples = (0.01..=100.0).contains(&eval.temperature);
        let several = eval.samples > 1;
        checker.check(
            samples || (eval.temperature == 0.0 && !several),
            "eval.temperature",
            eval.temperature,
            if several {
                "in 0.01..=100 if `eval.samples` is more than 1: greedy attempts are identical"
            } else {
                "0, for the most likely token, or in 0.01..=100"
            },
        )?;
        checker.check_eval_sampling(eval)?;
        checker.check_reward(self)?;

        for (i, phase) in phase.iter().enumerate() {
            checker.check_early_stopping(&format!("phase.{i}.until"), phase, eval)?;
            checker.check_phase_names(self, i, phase)?;
            match phase {
                Phase::Sft(keys) => checker.check_sft(self, i, keys)?,
                Phase::Rl(keys) => checker.check_rl(self, i, keys)?,
                Phase::Prompt(keys) => checker.check_prompt(self, i, keys)?,
            }
        }
        checker.check_steps(phase)
    }
}
