//! Implements `levade traces`, which sends the recorded attempts of a run to a collector of traces.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use levade_run::dir::RunDir;
use levade_store::Store;
use levade_traces::{Collector, CollectorOptions, TimesFile, TraceBuilder, TraceOptions};
use levade_trainer::mlflow_experiment;
use levade_tree::{AttemptId, Purpose};

use crate::failure::unusable;
use crate::recorded::{self, open_run_chats, read_attempt_with_times};
use crate::screen;

/// Number of attempts that one request to the collector contains.
const BATCH: usize = 32;

/// Send the recorded attempts of a run to a collector of traces: OpenTelemetry or MLflow
///
/// An attempt is a trace: its model calls, tool calls and scores. Demonstrations are not sent. An
/// attempt that is sent twice is the same trace. To send traces while a run trains, set
/// metrics.traces.otlp in its recipe.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade traces runs/calculator --to http://127.0.0.1:4318/v1/traces
  levade traces runs/calculator --mlflow http://127.0.0.1:5000 --step 3
  levade traces runs/calculator --to http://127.0.0.1:4318/v1/traces --attempt train/1/3/0/2")]
pub struct Args {
    /// Run directory
    run: PathBuf,

    /// URL of the collector, for OTLP over HTTP
    #[arg(long, value_name = "URL", required_unless_present = "mlflow")]
    to: Option<String>,

    /// Address of an MLflow server; the traces belong to the experiment with the run's name
    #[arg(long, value_name = "URL", conflicts_with = "to")]
    mlflow: Option<String>,

    /// Additional header of the requests; can be repeated
    #[arg(long = "header", value_name = "NAME=VALUE")]
    headers: Vec<String>,

    /// Environment variable with additional headers, as NAME=VALUE,NAME=VALUE
    #[arg(long, value_name = "NAME", default_value = "OTEL_EXPORTER_OTLP_HEADERS")]
    headers_env: String,

    /// Send only this attempt, by its slot or its id
    #[arg(long, value_name = "ID", conflicts_with_all = ["phase", "step", "eval"])]
    attempt: Option<String>,

    /// Send only attempts of this phase, from 0
    #[arg(long)]
    phase: Option<u32>,

    /// Send only attempts that were started for this step of a phase, from 0
    #[arg(long)]
    step: Option<u32>,

    /// Send only attempts of evaluations
    #[arg(long)]
    eval: bool,

    /// Leave out the text of prompts, completions, tool calls and results
    #[arg(long)]
    no_text: bool,

    /// Maximum number of characters of each text
    #[arg(long, value_name = "N", default_value_t = 16_384)]
    max_text_chars: usize,
}

pub fn main(args: Args) -> anyhow::Result<ExitCode> {
    crate::create_runtime()?.block_on(send_traces(args))
}

async fn send_traces(args: Args) -> anyhow::Result<ExitCode> {
    let run = RunDir::open(&args.run)?;
    let store = run.open_store().await?;
    let ids = select_attempts(&args, &*store).await?;
    if ids.is_empty() {
        return Err(unusable(
            "these options select no attempt of the run; `levade inspect` lists its attempts",
        ));
    }
    let name = run.recipe()?.run.name;
    let mut collector = create_collector(&args, &name)?;
    let builder = TraceBuilder {
        run: name,
        started_at: run.started()?,
        chats: open_run_chats(&run)?,
        options: TraceOptions {
            text: !args.no_text,
            max_text_chars: args.max_text_chars,
            mlflow_tags: args.mlflow.is_some(),
        },
    };
    let times = TimesFile::read(run.root())
        .with_context(|| format!("cannot read {}", run.root().join(TimesFile::NAME).display()))?;
    let mut measured = 0;
    for batch in ids.chunks(BATCH) {
        let mut traces = Vec::with_capacity(batch.len());
        for id in batch {
            if let Some(attempt) = read_attempt_with_times(&*store, id, &times).await? {
                measured += usize::from(!attempt.outcome.timings.0.is_empty());
                traces.push(builder.trace(&attempt));
            }
        }
        let (returned, sent) = tokio::task::spawn_blocking(move || {
            let sent = collector.send_all(&traces);
            (collector, sent)
        })
        .await?;
        collector = returned;
        if let Some(dropped) = sent? {
            return Err(unusable(format!("the collector dropped a part of the traces: {dropped}")));
        }
    }
    screen::print_line(&format!(
        "sent {} as traces, {measured} of them with measured times",
        screen::plural(ids.len() as u32, "attempt")
    ));
    Ok(ExitCode::SUCCESS)
}

/// Returns the ids of the attempts that the options select, in the order of the store.
async fn select_attempts(args: &Args, store: &dyn Store) -> anyhow::Result<Vec<AttemptId>> {
    if let Some(name) = &args.attempt {
        let found = recorded::find_attempt(store, name).await?;
        return Ok(found.map(|attempt| attempt.id).into_iter().collect());
    }
    let all = [Purpose::Train, Purpose::Baseline, Purpose::Eval, Purpose::Prompt];
    let purposes = if args.eval { &[Purpose::Eval][..] } else { &all };
    let mut ids = Vec::new();
    for purpose in purposes {
        let summaries = store.summaries(*purpose).await?.into_iter().filter(|summary| {
            args.phase.is_none_or(|phase| summary.slot.phase == phase)
                && args.step.is_none_or(|step| summary.slot.step == step)
        });
        ids.extend(summaries.map(|summary| summary.id));
    }
    Ok(ids)
}

/// Creates the client for the collector that the options name.
fn create_collector(args: &Args, run: &str) -> anyhow::Result<Collector> {
    let mut headers = CollectorOptions::parse_headers(&args.headers.join(","))
        .map_err(|why| unusable(format!("--header: {why}")))?;
    if let Ok(list) = std::env::var(&args.headers_env) {
        let more = CollectorOptions::parse_headers(&list)
            .map_err(|why| unusable(format!("the variable {}: {why}", args.headers_env)))?;
        headers.extend(more);
    }
    let url = match &args.mlflow {
        Some(server) => {
            let experiment = mlflow_experiment(server, run)?;
            headers.push(("x-mlflow-experiment-id".to_owned(), experiment));
            format!("{}/v1/traces", server.trim_end_matches('/'))
        }
        None => args.to.clone().unwrap_or_default(),
    };
    if !url.starts_with("http://") && !url.starts_with("https://") {
        return Err(unusable(format!(
            "--to is {url:?}, but must be the URL of a collector with http:// or https://, such as \
             http://127.0.0.1:4318/v1/traces"
        )));
    }
    Ok(Collector::new(CollectorOptions { url, headers }))
}
