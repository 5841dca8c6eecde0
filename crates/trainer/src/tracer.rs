//! Traces the attempts of a run: their times in a file of the run, and their spans to a collector.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use levade_recipe::{Recipe, TracesKeys};
use levade_store::Attempt;
use levade_traces::{
    Collector, CollectorError, CollectorOptions, Exporter, TimesFile, TraceBuilder, TraceOptions,
};
use levade_tree::Purpose;

use crate::agents::Agents;
use crate::error::TrainerError;
use crate::sink::mlflow_experiment;

/// Receives the attempts of a run that count, as they end. Clones share the file and the collector.
/// The default ignores all attempts.
#[derive(Clone, Default)]
pub struct Tracer {
    times: Option<TimesFile>,
    exporter: Option<Arc<Mutex<Exporter>>>,
}

impl Tracer {
    /// Opens the file of times in the directory of a run and, if the recipe names a collector,
    /// starts to send traces. `started_at` is the start of the run as a Unix timestamp, in seconds.
    ///
    /// # Errors
    /// Returns an error if the file cannot be opened, or if the variable with headers is malformed.
    pub(crate) fn open(
        recipe: &Recipe,
        dir: &Path,
        started_at: u64,
        agents: &Agents,
    ) -> Result<Self, TrainerError> {
        let failed =
            |source| TrainerError::File { action: "open", path: dir.join(TimesFile::NAME), source };
        let times = Some(TimesFile::open(dir).map_err(failed)?);
        if recipe.metrics.traces.otlp.is_empty() {
            return Ok(Tracer { times, exporter: None });
        }
        let connect = connect(recipe)?;
        let TracesKeys { text, max_text_chars, .. } = recipe.metrics.traces;
        let builder = TraceBuilder {
            run: recipe.run.name.clone(),
            started_at,
            chats: agents.chats(),
            options: TraceOptions { text, max_text_chars, mlflow_tags: has_mlflow(recipe) },
        };
        let exporter = Exporter::start(builder, connect).map_err(failed)?;
        Ok(Tracer { times, exporter: Some(Arc::new(Mutex::new(exporter))) })
    }

    /// Records the times of an attempt, and queues its trace unless the attempt is a demonstration.
    /// Does not wait for the collector.
    pub(crate) fn attempt_ended(&self, attempt: &Attempt) {
        if let Some(times) = &self.times {
            times.append(attempt.id, &attempt.outcome.timings);
        }
        if attempt.slot.purpose != Purpose::Demonstration {
            self.with_exporter(|exporter| exporter.send(attempt));
        }
    }

    /// Returns the first failure of the collector, once.
    pub(crate) fn take_failure(&self) -> Option<String> {
        self.with_exporter(Exporter::take_failure).flatten()
    }

    /// Waits until the collector has all traces, or until a timeout. Returns a description of the
    /// missing traces.
    pub(crate) fn close(&self) -> Option<String> {
        self.with_exporter(|exporter| exporter.close().loss()).flatten()
    }

    fn with_exporter<T>(&self, then: impl FnOnce(&mut Exporter) -> T) -> Option<T> {
        let exporter = self.exporter.as_ref()?;
        Some(then(&mut exporter.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

/// Header by which MLflow finds the experiment of a trace.
const MLFLOW_HEADER: &str = "x-mlflow-experiment-id";

/// Returns whether the collector is an MLflow server.
fn has_mlflow(recipe: &Recipe) -> bool {
    let TracesKeys { otlp, headers, .. } = &recipe.metrics.traces;
    otlp == TracesKeys::MLFLOW
        || headers.keys().any(|name| name.eq_ignore_ascii_case(MLFLOW_HEADER))
}

/// Returns a function that connects to the collector of a recipe. For the server of
/// `metrics.mlflow`, the function finds or creates the experiment.
///
/// # Errors
/// Returns an error if the variable with headers is malformed.
fn connect(
    recipe: &Recipe,
) -> Result<impl Fn() -> Result<Collector, CollectorError> + Send + 'static, TrainerError> {
    let TracesKeys { otlp, headers, headers_env, .. } = &recipe.metrics.traces;
    let mut headers: Vec<(String, String)> =
        headers.iter().map(|(name, value)| (name.clone(), value.clone())).collect();
    if let Ok(list) = std::env::var(headers_env) {
        let more = CollectorOptions::parse_headers(&list);
        headers.extend(
            more.map_err(|why| TrainerError::TraceHeaders { variable: headers_env.clone(), why })?,
        );
    }
    let server = recipe.metrics.mlflow.trim_end_matches('/').to_owned();
    let name = recipe.run.name.clone();
    let is_mlflow = otlp == TracesKeys::MLFLOW;
    let url = if is_mlflow { format!("{server}/v1/traces") } else { otlp.clone() };
    Ok(move || {
        let mut headers = headers.clone();
        if is_mlflow {
            let experiment = mlflow_experiment(&server, &name)?;
            headers.push((MLFLOW_HEADER.to_owned(), experiment));
        }
        Ok(Collector::new(CollectorOptions { url: url.clone(), headers }))
    })
}
