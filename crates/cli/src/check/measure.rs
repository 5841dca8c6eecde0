//! Measures the time of a training step with a step of one group, in a temporary directory that is
//! deleted.

use std::sync::{Arc, Mutex, PoisonError};

use levade_agent::environments::Environments;
use levade_recipe::{EvalKeys, MetricsKeys, Phase, Recipe};
use levade_run::policies::{self, StartedPolicies};
use levade_run::{Host, dir, scorers};
use levade_trainer::{Event, Metrics, Observer, RunParts, StartMode, StopFlag, Trainer};
use tokio::sync::Notify;

use super::report::CheckReport;
use crate::screen;

/// Runs a training step with one group of attempts, and reports the estimated time of a full step.
pub async fn check_step_time(
    recipe: &Recipe,
    environments: Environments,
    host: &Host,
    report: &mut CheckReport,
) {
    let Some((small, groups)) = reduce_recipe(recipe) else {
        report.note("time", "the recipe has no phase to measure");
        return;
    };
    let trained = small.phase.iter().flat_map(|phase| small.trained_policies_in(phase));
    let policies: Vec<String> = trained.collect();
    let measured = measure_step(small, environments, host).await;
    report.report_item("time", measured, |metrics| describe_time(metrics, groups, &policies));
}

/// Reduces a recipe to a single step of one group, and returns it with the number of groups of a
/// full step. The step belongs to the last RL phase, or to the first phase if none is RL. Returns
/// `None` if the recipe has no phase.
fn reduce_recipe(recipe: &Recipe) -> Option<(Recipe, usize)> {
    let mut small = recipe.clone();
    let attempts = recipe.phase.iter().rfind(|phase| matches!(phase, Phase::Rl(_)));
    let mut phase = attempts.or(recipe.phase.first())?.clone();
    let mut groups = 1;
    if let Phase::Rl(keys) = &mut phase {
        groups = keys.groups;
        (keys.steps, keys.groups, keys.mini_batches, keys.staleness) = (1, 1, 1, 0);
    }
    small.phase = vec![phase];
    small.eval =
        EvalKeys { tasks: 0, unseen_wordings: 0, every: 0, before: false, ..recipe.eval.clone() };
    small.metrics = MetricsKeys::default();
    small.run.checkpoint_every = 0;
    Some((small, groups))
}

/// Trains until the first step is complete, and returns the metrics of this step.
async fn measure_step(
    mut recipe: Recipe,
    environments: Environments,
    host: &Host,
) -> anyhow::Result<Metrics> {
    let temp_dir = tempfile::Builder::new().prefix("levade-check-").tempdir()?;
    recipe.run.folder = temp_dir.path().join("run");
    let started_at = dir::start_time_or_now(&recipe.run.folder)?;
    let StartedPolicies { policies, agents, model_files, teachers, .. } =
        policies::start(&recipe, started_at, &environments, host, &mut Vec::new()).await?;
    let scorers = scorers::custom_scorers(&recipe.reward, &environments, host)?;
    let parts =
        RunParts { policies, agents, scorers, environments, started_at, model_files, teachers };
    let mut trainer = Trainer::new(recipe, parts, StartMode::Fresh).await?;
    let first = FirstStepObserver::default();
    let mut watch = first.clone();
    let stop = StopFlag::default();
    // The run is cancelled when the step is done, because its checkpoint is not needed.
    let ended = tokio::select! {
        ended = trainer.run(&mut watch, &stop) => Some(ended),
        () = first.0.1.notified() => None,
    };
    ended.transpose()?;
    let found = first.0.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    found.ok_or_else(|| anyhow::anyhow!("the run ended before its measured step was complete"))
}

/// Observer of a run that stores the metrics of the first step, and notifies when this step is
/// complete.
#[derive(Clone, Default)]
struct FirstStepObserver(Arc<(Mutex<Option<Metrics>>, Notify)>);

impl Observer for FirstStepObserver {
    fn event(&mut self, event: &Event) {
        if let Event::Step { metrics, .. } = event {
            let mut found = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
            found.get_or_insert_with(|| metrics.clone());
            self.0.1.notify_one();
        }
    }
}

/// Describes the estimated time of a step. Attempts of several groups are sampled concurrently, so
/// a step of n groups takes at most n times as long as a step of one group. `policies` are the
/// policies that the step trains. If the measured group left a policy nothing to learn, the policy
/// had no update, and the description says so.
fn describe_time(metrics: &Metrics, groups: usize, policies: &[String]) -> String {
    let step_seconds = metrics.get("timing_s/step").unwrap_or(0.0);
    let mut parts = Vec::new();
    if let Some(seconds) = metrics.get("timing_s/gen") {
        parts.push(format!("sampling {seconds:.1} s"));
    }
    let mut missing = Vec::new();
    for policy in policies {
        // With one policy, no metric has its name.
        let (prefix, update) = match policies {
            [_] => (String::new(), "update".to_owned()),
            _ => (format!("{policy}/"), format!("update of {policy}")),
        };
        let number = |name: &str| metrics.get(&format!("{prefix}{name}"));
        let updates = ["actor/updates", "actor/skipped_updates"];
        if updates.iter().all(|name| number(name) == Some(0.0)) {
            missing.push(format!("the {update}"));
        } else if let Some(seconds) = number("timing_s/update_actor") {
            parts.push(format!("{update} {seconds:.1} s"));
        }
    }
    let parts = parts.join(", ");
    let missing = describe_missing(&missing, policies.len() > 1);
    match groups {
        1 => format!("a step took {step_seconds:.1} s ({parts}){missing}"),
        _ => format!(
            "a step of {} may take {:.0} s or less: a step of one group took {step_seconds:.1} s \
             ({parts}){missing}",
            screen::plural(groups as u32, "group"),
            step_seconds * groups as f64
        ),
    }
}

/// Describes the updates that the measured step lacked. Returns an empty string if `updates` is
/// empty. `has_several` is whether the step trains several policies.
fn describe_missing(updates: &[String], has_several: bool) -> String {
    let verb = match updates.len() {
        0 => return String::new(),
        1 => "is",
        _ => "are",
    };
    let (policy, reason) = if has_several {
        ("the policy ", ", or with a task at which the policy does not act")
    } else {
        ("", "")
    };
    format!(
        "; {} {verb} not included, because the group left {policy}nothing to learn, as with equal \
         rewards{reason}: try another seed (--set run.seed=N), or a model that solves some of the \
         tasks",
        updates.join(" and ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn describe_time_reports_update_that_is_not_included() {
        let describe_time =
            |metrics: &Metrics, groups| describe_time(metrics, groups, &["default".to_owned()]);
        let metrics = |updates: f64, skipped: f64, seconds: f64| {
            let mut metrics = Metrics::default();
            metrics.add("timing_s/gen", 2.0);
            metrics.add("timing_s/update_actor", seconds);
            metrics.add("timing_s/step", 2.0 + seconds);
            metrics.add("actor/updates", updates);
            metrics.add("actor/skipped_updates", skipped);
            metrics
        };
        for (updates, skipped) in [(1.0, 0.0), (0.0, 1.0)] {
            let text = describe_time(&metrics(updates, skipped, 1.5), 4);
            assert!(text.contains("may take 14 s or less"), "{text}");
            assert!(text.ends_with("(sampling 2.0 s, update 1.5 s)"), "{text}");
        }
        let text = describe_time(&metrics(0.0, 0.0, 0.0), 4);
        assert!(text.contains("may take 8 s or less"), "{text}");
        assert!(text.contains("(sampling 2.0 s); the update is not included"), "{text}");
        assert!(text.contains("--set run.seed=N"), "{text}");
        let text = describe_time(&metrics(0.0, 0.0, 0.0), 1);
        assert!(text.starts_with("a step took 2.0 s (sampling 2.0 s); the update"), "{text}");
    }

    #[test]
    fn describe_time_reports_update_of_each_policy() {
        let policies = ["read", "write"].map(str::to_owned);
        let describe = |updates: [f64; 2]| {
            let mut metrics = Metrics::default();
            metrics.add("timing_s/gen", 2.0);
            metrics.add("timing_s/update_actor", 1.8);
            metrics.add("timing_s/step", 3.8);
            for (policy, (updates, seconds)) in
                policies.iter().zip(updates.into_iter().zip([0.5, 1.5]))
            {
                metrics.add(format!("{policy}/actor/updates"), updates);
                metrics.add(format!("{policy}/actor/skipped_updates"), 0.0);
                metrics.add(format!("{policy}/timing_s/update_actor"), seconds);
            }
            describe_time(&metrics, 1, &policies)
        };
        let text = describe([1.0, 2.0]);
        let parts = "(sampling 2.0 s, update of read 0.5 s, update of write 1.5 s)";
        assert!(text.ends_with(parts), "{text}");
        let text = describe([1.0, 0.0]);
        let parts = "(sampling 2.0 s, update of read 0.5 s); the update of write is not included";
        assert!(text.contains(parts) && text.contains("does not act"), "{text}");
        let text = describe([0.0, 0.0]);
        let parts = "(sampling 2.0 s); the update of read and the update of write are not included";
        assert!(text.contains(parts), "{text}");
    }
}
