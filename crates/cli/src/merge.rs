//! Implements `levade merge`, which merges an adapter into its base model.

use std::path::PathBuf;
use std::process::ExitCode;

use levade_engine::EngineOptions;
use levade_run::model;
use levade_text::ChatOptions;
use levade_trainer::record_merge_source;

use crate::failure::unusable;
use crate::{host, run, screen};

/// Merge an adapter into its base, as a standalone model
///
/// The result is a directory in Hugging Face layout, which other programs can train or serve like
/// any model.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade merge runs/calculator merged
  levade merge runs/calculator/checkpoints/step-000050 merged")]
pub struct Args {
    /// Directory of an adapter, or of a run for its newest checkpoint
    source: String,

    /// Directory of the merged model, which must not exist yet
    dir: PathBuf,

    /// Base model of the adapter, instead of the base that the adapter's files name
    #[arg(long, value_name = "SOURCE")]
    base: Option<String>,
}

pub fn main(args: Args) -> anyhow::Result<ExitCode> {
    crate::create_runtime()?.block_on(merge(&args))?;
    screen::print_line(&args.dir.display().to_string());
    Ok(ExitCode::SUCCESS)
}

async fn merge(args: &Args) -> anyhow::Result<()> {
    let (source, run) = run::resolve_model(&args.source, run::AgentScope::All)?;
    let host = host::create_host()?;
    let found = model::open(&source, args.base.as_deref(), &host)?;
    if found.adapter.is_none() {
        return Err(unusable(format!(
            "{source} is a model without an adapter; there is nothing to merge"
        )));
    }
    if args.dir.exists() {
        return Err(unusable(format!(
            "{} exists already; name another directory",
            args.dir.display()
        )));
    }
    let chat = model::chat(&found.files, ChatOptions::default())?;
    let companions = model::create_extra_files(&found.files, &chat)?;
    let options = EngineOptions {
        batch_tokens: 0,
        trains: false,
        kv_memory_mb: 1,
        running: 1,
        step_rows: 1,
        ..EngineOptions::default()
    };
    let policy = model::start_sampling(&found, &options, None, &host).await?;
    // The model is written to a temporary directory next to the target and renamed, so that the
    // target never contains a partial model.
    let parent = std::path::absolute(&args.dir)?;
    let parent = parent.parent().ok_or_else(|| unusable("the directory has no parent"))?;
    std::fs::create_dir_all(parent)?;
    let temporary = tempfile::Builder::new().prefix(".merging-").tempdir_in(parent)?;
    policy.save_merged(temporary.path()).await?;
    companions(temporary.path())?;
    if let Some(run) = run {
        record_merge_source(temporary.path(), run.root())?;
    }
    std::fs::rename(temporary.keep(), &args.dir)?;
    Ok(())
}
