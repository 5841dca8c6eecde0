//! Measures the time of a training step with a step of one group, in a temporary directory that is
//! deleted.

use std::sync::{Arc, Mutex, PoisonError};

use levade_agent::environments::Environments;
use levade_recipe::{EvalKeys, MetricsKeys, Phase, Recipe};
use levade_run::policies::{self, StartedPolicies};
use levade_run::{Host, dir, scorers};
use levade_trainer::{Event, Metrics, Observer, RunParts, StartMode, StopFlag, Trainer};
use tokio::sync::Notify;

use super::report::Report;
use crate::screen;

/// Runs a step of one group, and reports an estimate of the time of a full step.
pub async fn check(recipe: &Recipe, environments: Environments, host: &Host, report: &mut Report) {
    let Some((small, groups)) = reduce_recipe(recipe) else {
        report.note("time", "the recipe has no phase to measure");
        return;
    };
    let measured = measure_step(small, environments, host).await;
    report.item("time", measured, |metrics| describe_time(metrics, groups));
}

/// Returns the recipe with a single step of one group, and the number of groups of a full step. The
/// step is of the last RL phase, or of the first phase if there is none. Returns `None` if the
/// recipe has no phase.
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

/// Runs the trainer until its first step is done, and returns the metrics of that step.
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
    let first = FirstStep::default();
    let mut watch = first.clone();
    let stop = StopFlag::default();
    // The run is cancelled when the step is done, because its checkpoint is not needed.
    let ended = tokio::select! {
        ended = trainer.run(&mut watch, &stop) => Some(ended),
        () = first.0.1.notified() => None,
    };
    ended.transpose()?;
    let found = first.0.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    found.ok_or_else(|| anyhow::anyhow!("the measured step did not complete"))
}

/// An observer that stores the metrics of the first step, and notifies when that step is done.
#[derive(Clone, Default)]
struct FirstStep(Arc<(Mutex<Option<Metrics>>, Notify)>);

impl Observer for FirstStep {
    fn event(&mut self, event: &Event) {
        if let Event::Step { metrics, .. } = event {
            let mut found = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
            found.get_or_insert_with(|| metrics.clone());
            self.0.1.notify_one();
        }
    }
}

/// Describes the estimated time of a step. Attempts of several groups are sampled concurrently, so
/// a step of n groups takes at most n times as long as a step of one group. If the measured group
/// left nothing to learn, its step had no update, and the description says so.
fn describe_time(metrics: &Metrics, groups: usize) -> String {
    let seconds = |name: &str| metrics.get(name).unwrap_or(0.0);
    let step_seconds = seconds("timing_s/step");
    let updates = ["actor/updates", "actor/skipped_updates"];
    let lacks_update = updates.iter().all(|name| metrics.get(name) == Some(0.0));
    let parts: Vec<String> = [("sampling", "timing_s/gen"), ("update", "timing_s/update_actor")]
        .iter()
        .filter(|(name, key)| metrics.get(key).is_some() && !(lacks_update && *name == "update"))
        .map(|(name, key)| format!("{name} {:.1} s", seconds(key)))
        .collect();
    let parts = parts.join(", ");
    let missing = if lacks_update {
        "; the update is not included, because the group left nothing to learn, as with equal \
         rewards: try another seed (--set run.seed=N), or a model that solves some of the tasks"
    } else {
        ""
    };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn describe_time_reports_update_that_is_not_included() {
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
}
