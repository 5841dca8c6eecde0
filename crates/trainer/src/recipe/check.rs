//! Ranges of the values of a recipe, and what they must have to do with each other.

use std::fmt::Display;
use std::path::Path;

use dressage_agent::tasks::Arithmetic;
use dressage_rl::RlError;

use super::RecipeError;
use super::keys::{OptimiserKeys, Phase, QUESTION, Recipe, SftKeys, TaskSource};
use super::rl::{Charge, GroupBy, Proximal, RlKeys};

/// Collects the first value out of range.
struct Checker<'a> {
    file: &'a Path,
}

impl Checker<'_> {
    fn check(
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

    fn positive(&self, key: impl Display, value: f32) -> Result<(), RecipeError> {
        self.check(value > 0.0 && value.is_finite(), key, value, "finite and more than 0")
    }

    fn at_least_one(&self, key: impl Display, value: usize) -> Result<(), RecipeError> {
        self.check(value >= 1, key, value, "at least 1")
    }

    fn optimiser(&self, phase: usize, keys: &OptimiserKeys) -> Result<(), RecipeError> {
        let OptimiserKeys { final_share, beta1, beta2, epsilon, weight_decay, max_grad_norm, .. } = *keys;
        let key = |name| format!("phase.{phase}.optimiser.{name}");
        self.check((0.0..=1.0).contains(&final_share), key("final_share"), final_share, "in 0..=1")?;
        self.check((0.0..1.0).contains(&beta1), key("beta1"), beta1, "at least 0 and less than 1")?;
        self.check((0.0..1.0).contains(&beta2), key("beta2"), beta2, "at least 0 and less than 1")?;
        self.positive(key("epsilon"), epsilon)?;
        let finite = |value: f32| value >= 0.0 && value.is_finite();
        self.check(finite(weight_decay), key("weight_decay"), weight_decay, "finite and at least 0")?;
        self.check(finite(max_grad_norm), key("max_grad_norm"), max_grad_norm, "finite and at least 0")
    }

    fn sft(&self, phase: usize, keys: &SftKeys) -> Result<(), RecipeError> {
        self.at_least_one(format!("phase.{phase}.demonstrations"), keys.demonstrations)?;
        self.at_least_one(format!("phase.{phase}.batch"), keys.batch)?;
        self.at_least_one(format!("phase.{phase}.epochs"), keys.epochs as usize)
    }

    fn rl(&self, phase: usize, keys: &RlKeys) -> Result<(), RecipeError> {
        let key = |name: &str| format!("phase.{phase}.{name}");
        self.at_least_one(key("steps"), keys.steps as usize)?;
        self.at_least_one(key("groups"), keys.groups)?;
        let alone = !keys.compares() || (keys.group_by == GroupBy::Step && keys.groups >= 2);
        self.check(
            keys.group_size >= if alone { 1 } else { 2 },
            key("group_size"),
            keys.group_size,
            "at least 2: an attempt is measured against the others at the same task",
        )?;
        let t = keys.temperature;
        self.check(
            (0.01..=100.0).contains(&t),
            key("temperature"),
            t,
            "in 0.01..=100: greedy attempts are all the same, and cannot be trained on",
        )?;
        for loss in [keys.loss(), keys.value_loss()] {
            if let Err(RlError::Parameter { name, value, range }) = loss.check_parameters() {
                self.check(false, key(&name.replace(' ', "_")), value, range)?;
            }
        }
        if let Some(kl) = keys.kl {
            let value = kl.coefficient;
            self.check(
                value > 0.0 && value.is_finite(),
                key("kl.coefficient"),
                value,
                "finite and more than 0",
            )?;
            self.check(
                kl.adaptive.is_none() || kl.charge == Charge::Reward,
                key("kl.adaptive"),
                "set",
                "left out unless kl.charge = \"reward\"",
            )?;
            if let Some(adaptive) = kl.adaptive {
                self.positive(key("kl.adaptive.target"), adaptive.target as f32)?;
                self.positive(key("kl.adaptive.horizon"), adaptive.horizon as f32)?;
            }
        }
        let corrects = keys.correction.is_some() || !keys.rejection.is_empty();
        self.check(
            !corrects || keys.proximal != Proximal::Behaviour,
            key("proximal"),
            "\"behaviour\"",
            "\"recompute\" or \"interpolate\" where there is a correction or a rejection: they compare the two",
        )?;
        self.check(
            (1..=keys.groups).contains(&keys.mini_batches),
            key("mini_batches"),
            keys.mini_batches,
            format!("at least 1, and at most the number of groups, {}", keys.groups),
        )?;
        self.at_least_one(key("epochs"), keys.epochs as usize)?;
        if keys.needs_critic() {
            self.positive(key("critic.learning_rate"), keys.critic.learning_rate)?;
        }
        Ok(())
    }
}

impl Recipe {
    /// Checks every value.
    pub(super) fn check(&self, file: &Path) -> Result<(), RecipeError> {
        let checker = Checker { file };
        let Recipe { run, model, engine, tasks, metrics: _, agent, reward, eval, phase } = self;
        checker.check(!run.name.trim().is_empty(), "run.name", "empty", "a name")?;
        checker.check(
            run.seed <= i64::MAX as u64,
            "run.seed",
            run.seed,
            "at most 2^63 − 1, to be written down",
        )?;
        checker.at_least_one("run.keep", run.keep as usize)?;
        checker.check(
            !model.source.is_empty(),
            "model.source",
            "empty",
            "a folder, a file or the name of a model",
        )?;
        if let Some(context) = model.context {
            checker.check(context >= 2, "model.context", context, "at least 2")?;
        }
        checker.at_least_one("engine.concurrency", engine.concurrency)?;
        checker.at_least_one("engine.micro_batch_tokens", engine.micro_batch_tokens)?;

        checker.check(!tasks.is_empty(), "tasks", "empty", "at least one source")?;
        for (i, source) in tasks.iter().enumerate() {
            match source {
                TaskSource::Arithmetic(keys) => {
                    checker.at_least_one(format!("tasks.{i}.train"), keys.train as usize)?;
                    if let Err(dressage_agent::tasks::TaskError::Option { name, value, range }) =
                        Arithmetic::new(keys.options(), run.seed)
                    {
                        checker.check(false, format!("tasks.{i}.{name}"), value, range)?;
                    }
                }
                TaskSource::Jsonl(options) => {
                    checker.at_least_one(format!("tasks.{i}.repeat"), options.repeat)?;
                }
            }
        }

        checker.check(
            agent.prompt.contains(QUESTION),
            "agent.prompt",
            format!("\"{}\"", agent.prompt),
            format!("a text that contains {QUESTION}"),
        )?;
        checker.at_least_one("agent.max_turns", agent.max_turns as usize)?;
        checker.at_least_one("agent.max_tokens", agent.max_tokens)?;
        // The upper bound keeps them within what a duration can hold.
        let seconds = |value: f64| value > 0.0 && value <= 1e9;
        checker.check(
            seconds(agent.tool_seconds),
            "agent.tool_seconds",
            agent.tool_seconds,
            "in 0..=1e9, not 0",
        )?;
        checker.check(
            agent.tool_delay == 0.0 || seconds(agent.tool_delay),
            "agent.tool_delay",
            agent.tool_delay,
            "in 0..=1e9",
        )?;
        checker.check(
            seconds(agent.reply_seconds),
            "agent.reply_seconds",
            agent.reply_seconds,
            "in 0..=1e9, not 0",
        )?;
        checker.check(
            seconds(agent.attempt_seconds),
            "agent.attempt_seconds",
            agent.attempt_seconds,
            "in 0..=1e9, not 0",
        )?;
        checker.at_least_one("eval.samples", eval.samples as usize)?;
        let warm = (0.01..=100.0).contains(&eval.temperature);
        checker.check(
            warm || (eval.temperature == 0.0 && eval.samples == 1),
            "eval.temperature",
            eval.temperature,
            "0, for the most likely token, or in 0.01..=100; not 0 where eval.samples is more than 1: greedy attempts are all the same",
        )?;
        let shaping = [
            ("malformed_call", reward.malformed_call),
            ("failed_call", reward.failed_call),
            ("unfinished", reward.unfinished),
            ("broken", reward.broken.unwrap_or(0.0)),
        ];
        for (name, value) in shaping {
            checker.check(value.is_finite(), format!("reward.{name}"), value, "finite")?;
        }
        if let Err(error) = reward.scorer.check() {
            checker.check(
                false,
                "reward.scorer",
                format!("not usable ({error})"),
                "a scorer with sound settings",
            )?;
        }

        for (i, phase) in phase.iter().enumerate() {
            checker.positive(format!("phase.{i}.learning_rate"), phase.learning_rate())?;
            checker.optimiser(i, phase.optimiser())?;
            match phase {
                Phase::Sft(keys) => checker.sft(i, keys)?,
                Phase::Rl(keys) => checker.rl(i, keys)?,
            }
        }
        Ok(())
    }
}
