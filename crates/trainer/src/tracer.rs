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

/// Records the times of a run's attempts as the attempts end, and sends traces of them to a
/// collector. Clones share the file and the collector. The default tracer ignores all attempts.
#[derive(Clone, Default)]
pub struct Tracer {
    times: Option<TimesFile>,
    exporter: Option<Arc<Mutex<Exporter>>>,
}

impl Tracer {
    /// Opens the file of attempt times in the run directory `dir`. If the recipe names a trace
    /// collector, starts to send traces. `started_at` is the start of the run as a Unix timestamp
    /// in seconds.
    ///
    /// # Errors
    /// Returns an error if the file cannot be opened, or if the environment variable with the
    /// headers is malformed.
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
        let connect = make_connector(recipe)?;
        let TracesKeys { text, max_text_chars, .. } = recipe.metrics.traces;
        let builder = TraceBuilder {
            run: recipe.run.name.clone(),
            started_at,
            chats: agents.chats(),
            options: TraceOptions { text, max_text_chars, mlflow_tags: sends_to_mlflow(recipe) },
        };
        let exporter = Exporter::start(builder, connect).map_err(failed)?;
        Ok(Tracer { times, exporter: Some(Arc::new(Mutex::new(exporter))) })
    }

    /// Records the times of an attempt that has ended and, unless the attempt is a demonstration,
    /// queues its trace. Does not wait for the collector.
    pub(crate) fn attempt_ended(&self, attempt: &Attempt) {
        if let Some(times) = &self.times {
            times.append(attempt.id, &attempt.outcome.timings);
        }
        if attempt.slot.purpose != Purpose::Demonstration {
            self.with_exporter(|exporter| exporter.send(attempt));
        }
    }

    /// Returns the collector's first failure. Later calls return `None`.
    pub(crate) fn take_failure(&self) -> Option<String> {
        self.with_exporter(Exporter::take_failure).flatten()
    }

    /// Waits until the collector has received all traces, or until a timeout. Returns a description
    /// of the traces that were not received, or `None` if there are none.
    pub(crate) fn close(&self) -> Option<String> {
        self.with_exporter(|exporter| exporter.close().loss()).flatten()
    }

    fn with_exporter<T>(&self, then: impl FnOnce(&mut Exporter) -> T) -> Option<T> {
        let exporter = self.exporter.as_ref()?;
        Some(then(&mut exporter.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

/// HTTP header that tells MLflow to which experiment a trace belongs.
const MLFLOW_HEADER: &str = "x-mlflow-experiment-id";

/// Returns whether the recipe's trace collector is an MLflow server.
fn sends_to_mlflow(recipe: &Recipe) -> bool {
    let TracesKeys { otlp, headers, .. } = &recipe.metrics.traces;
    otlp == TracesKeys::MLFLOW
        || headers.keys().any(|name| name.eq_ignore_ascii_case(MLFLOW_HEADER))
}

/// Returns a function that connects to the recipe's trace collector. For the server of
/// `metrics.mlflow`, the function finds or creates the experiment.
///
/// # Errors
/// Returns an error if the environment variable with the headers is malformed.
fn make_connector(
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
