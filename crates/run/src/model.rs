//! Opens models by name and starts their engines.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use levade_engine::{Adapter, Engine, EngineOptions, PlannedAdapter, attention_shape};
use levade_model::{
    AdapterConfig, ModelConfig, ModelError, ModelFiles, Progress, Source, SpecialTokens,
    TokenizerSource, default_cache, fetch, write_tokenizer_config,
};
use levade_policy::{Learner, LoraOptions, Precision, TokenBytes};
use levade_recipe::Recipe;
use levade_text::{Chat, ChatOptions, TextError, Vocabulary};
use levade_trainer::ExtraFiles;

use crate::display;
use crate::failure::unusable;
use crate::host::{Event, Host};
use crate::source::{AgentScope, resolve_model};

/// Default maximum memory for the KV cache of a sampling engine, in MiB. If a quarter of the memory
/// budget is less, this quarter is the maximum. The cache always has room for one sequence of the
/// full context.
const KV_MEMORY_MB: u64 = 1024;

/// Model that was resolved from a source: its files, and its adapter if the source is an adapter.
pub struct ResolvedModel {
    /// Files of the model, or of the adapter's base model.
    pub files: ModelFiles,
    /// Options of the adapter, and the name of the adapter's base model. The adapter's files are at
    /// `path`. `None` if the source is not an adapter.
    pub adapter: Option<(LoraOptions, String)>,
    /// Path of the source on this machine.
    pub path: PathBuf,
}

impl ResolvedModel {
    /// Returns the paths of the files that determine the model's completions. For a directory,
    /// these are the files with weights, configurations and templates.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be listed.
    pub fn list_read_files(&self) -> anyhow::Result<Vec<PathBuf>> {
        let path = self.files.path();
        if path.is_file() {
            return Ok(vec![path.to_owned()]);
        }
        let is_read = |file: &PathBuf| {
            let kind = file.extension().and_then(|extension| extension.to_str());
            matches!(kind, Some("safetensors" | "json" | "jinja" | "model")) && file.is_file()
        };
        let entries = std::fs::read_dir(path).and_then(Iterator::collect::<io::Result<Vec<_>>>);
        let entries = entries.with_context(|| format!("cannot list {}", path.display()))?;
        let mut files: Vec<PathBuf> =
            entries.iter().map(std::fs::DirEntry::path).filter(is_read).collect();
        files.sort();
        Ok(files)
    }
}

/// Opens a model as [`open_at`] does, and downloads the model first if it is not on this machine.
///
/// # Errors
/// Returns an error if the model cannot be downloaded or opened.
pub fn open(source: &str, base: Option<&str>, host: &Host) -> anyhow::Result<ResolvedModel> {
    open_at(fetch_model(source, host)?, base, host)
}

/// Opens a model on this machine. If the model is an adapter, also opens the base model: `base`, or
/// the base that the adapter's files name if `base` is `None`.
///
/// # Errors
/// Returns an error if the model cannot be opened, or if the base model cannot be downloaded or
/// opened.
pub fn open_at(path: PathBuf, base: Option<&str>, host: &Host) -> anyhow::Result<ResolvedModel> {
    if !path.join(AdapterConfig::FILE).exists() {
        return Ok(ResolvedModel {
            files: report_notes(ModelFiles::open(&path)?, host),
            adapter: None,
            path,
        });
    }
    let config = AdapterConfig::open(&path)?;
    send_notes(&config.notes, host);
    let way_out = "name a base with --base SOURCE (in a recipe: model.base)";
    let Some(base) = base.or(config.base.as_deref()) else {
        return Err(unusable(format!(
            "{} does not name its base model\n{way_out}",
            config.path().display()
        )));
    };
    let opened = fetch_model(base, host).and_then(|below| Ok(ModelFiles::open(&below)?));
    let files = report_notes(
        opened.map_err(|error| {
            let path = path.display();
            unusable(format!(
                "the adapter in {path} needs its base {base:?}, which cannot be loaded: \
                 {error}\n{way_out}"
            ))
        })?,
        host,
    );
    let options = Adapter::options_of(&config, &files.config)?;
    Ok(ResolvedModel { files, adapter: Some((options, base.to_owned())), path })
}

/// Checks that the user named a base model only for an adapter.
///
/// # Errors
/// Returns an error that names `source` if a base model was named (`has_base`) although the model
/// has no adapter.
pub fn check_base(has_base: bool, found: &ResolvedModel, source: &str) -> anyhow::Result<()> {
    if has_base && found.adapter.is_none() {
        return Err(unusable(format!("{source} is a model without an adapter; leave out --base")));
    }
    Ok(())
}

/// Reports the notes about a model's files to the user. Returns the files.
fn report_notes(files: ModelFiles, host: &Host) -> ModelFiles {
    send_notes(&files.notes, host);
    files
}

fn send_notes(notes: &[String], host: &Host) {
    for note in notes {
        host.setup("note", note);
    }
}

/// Returns the path of a model on this machine, and downloads the model first if necessary. If
/// `source` is a run, returns the path of the run's newest checkpoint ([`resolve_model`]).
///
/// # Errors
/// Returns an error if the model cannot be downloaded. Also returns the errors of
/// [`resolve_model`].
pub fn fetch_model(source: &str, host: &Host) -> anyhow::Result<PathBuf> {
    let source = Source::parse(&resolve_model(source, AgentScope::All)?.source)?;
    if let Source::Dir(path) | Source::Gguf(path) = &source {
        return Ok(path.clone());
    }
    let path = fetch(&source, &default_cache()?, &mut |Progress { stage, done, total }| {
        host.send(Event::Fetching { stage: stage.to_owned(), done, total });
    });
    host.send(Event::Fetched);
    Ok(path?)
}

/// Describes a model in one line, for the user.
pub fn describe(files: &ModelFiles) -> String {
    let ModelConfig { family, layers, hidden, vocabulary, context, .. } = &files.config;
    let parameters: usize =
        files.config.parameters().iter().map(|p| p.shape.iter().product::<usize>()).sum();
    let family = serde_json::to_value(family).ok();
    let family = family.as_ref().and_then(serde_json::Value::as_str).unwrap_or_default().to_owned();
    format!(
        "{family}, {} parameters, {layers} layers of {hidden}, {vocabulary} tokens, context \
         {context}",
        display::count(parameters as u64)
    )
}

/// Creates the chat format of a model.
///
/// # Errors
/// Returns an error if the tokenizer or the chat template is missing or invalid.
pub fn chat(files: &ModelFiles, options: ChatOptions) -> anyhow::Result<Chat> {
    match Chat::open(files, None, options) {
        Ok(chat) => Ok(chat),
        // Recipes cannot set a template, because a template belongs to its model.
        Err(TextError::NoTemplate) => Err(unusable(format!(
            "the model in {} has no chat template, so it cannot be used for chat\nadd the \
             template it was trained with to its directory as chat_template.jinja, or use a model \
             that was trained for chat (often named \"instruct\")",
            files.path().display()
        ))),
        Err(error) => Err(unusable(format!("{}: {error}", files.path().display()))),
    }
}

/// Returns the engine options that a recipe sets for a model with `adapters`, without memory for
/// the KV cache. [`with_cache`] adds this memory.
pub fn options_without_cache(
    recipe: &Recipe,
    context: Option<usize>,
    adapters: Vec<PlannedAdapter>,
    config: &ModelConfig,
) -> EngineOptions {
    EngineOptions {
        threads: recipe.engine.threads,
        context: context.unwrap_or(config.context),
        batch_tokens: recipe.engine.micro_batch_tokens,
        memory_mb: recipe.engine.memory_mb,
        precision: recipe.engine.precision,
        adapters,
        running: recipe.engine.max_sequences(),
        keep_cache: recipe.engine.keep_cache,
        ..EngineOptions::default()
    }
}

/// Adds memory for the KV cache to engine options. The memory is `engine.kv_memory_mb` of the
/// recipe, or [`default_cache_mb`], but at least the memory of one sequence of the full context. If
/// servers sample instead of the engine, the memory has this minimum.
pub fn with_cache(recipe: &Recipe, config: &ModelConfig, options: EngineOptions) -> EngineOptions {
    if recipe.cluster.samplers.is_some() {
        return EngineOptions { kv_memory_mb: 1, running: 1, step_rows: 1, ..options };
    }
    let kv_memory_mb = match recipe.engine.kv_memory_mb {
        0 => default_cache_mb(config, &options),
        own => own.max(sequence_cache_mb(config, &options)),
    };
    EngineOptions { kv_memory_mb, ..options }
}

/// Returns the options of an engine that only samples, with at most `running` concurrent
/// completions.
pub fn sampling_options(
    config: &ModelConfig,
    threads: usize,
    context: Option<usize>,
    running: usize,
    precision: Precision,
) -> EngineOptions {
    let options = EngineOptions {
        threads,
        context: context.unwrap_or(config.context),
        batch_tokens: 0,
        trains: false,
        running,
        precision,
        ..EngineOptions::default()
    };
    EngineOptions { kv_memory_mb: default_cache_mb(config, &options), ..options }
}

/// Returns the default memory for the KV cache, in MiB: a quarter of the memory budget but at most
/// `KV_MEMORY_MB`, or less if the engine would not fit otherwise. The cache always has room for one
/// sequence of the full context, so the scheduler never has to reject a sequence.
pub fn default_cache_mb(config: &ModelConfig, options: &EngineOptions) -> usize {
    let budget = options.budget();
    // A budget of 1 MiB yields the smallest possible plan.
    let without_cache = EngineOptions { kv_memory_mb: 0, memory_mb: 1, ..options.clone() };
    let rest = Engine::plan(config, &without_cache)
        .map_or(u64::MAX, |smallest| budget.saturating_sub(smallest.total()));
    let cache_mb = KV_MEMORY_MB.min((budget / 4) >> 20).min(rest >> 20);
    (cache_mb as usize).max(sequence_cache_mb(config, options))
}

/// Returns the KV cache memory of one sequence of the full context, in MiB.
fn sequence_cache_mb(config: &ModelConfig, options: &EngineOptions) -> usize {
    let shape = attention_shape(config);
    shape.sequence_bytes(config.layers, options.precision, options.context).div_ceil(1 << 20)
}

/// Starts an engine that samples from a model or from an adapter.
///
/// # Errors
/// Returns an error if the options do not fit the model, if the memory is not sufficient, or if the
/// adapter does not fit its base model.
pub async fn start_sampling(
    found: &ResolvedModel,
    options: &EngineOptions,
    chat: Option<&Chat>,
    host: &Host,
) -> anyhow::Result<Engine> {
    let engine = start(&found.files, options, chat, "", host)?;
    let Some((lora, base)) = &found.adapter else { return Ok(engine) };
    let policy = engine.lora(lora.clone(), 0, base).await?;
    policy.load(&found.path, false).await?;
    policy.publish(0).await?;
    Ok(policy)
}

/// Starts an engine. If `chat` is set, the engine knows the texts of its tokens, which stop strings
/// and grammars need. Reports the engine's memory plan to the user. The text `also`, which
/// describes the memory of other engines, follows the report.
///
/// # Errors
/// Returns an error if the options do not fit the model, or if the memory is not sufficient.
pub fn start(
    files: &ModelFiles,
    options: &EngineOptions,
    chat: Option<&Chat>,
    also: &str,
    host: &Host,
) -> anyhow::Result<Engine> {
    let vocabulary = chat.map(|chat| Arc::new(Vocabulary::new(chat.tokenizer())));
    let bytes = vocabulary.clone().map(|vocabulary| vocabulary as Arc<dyn TokenBytes>);
    let engine = Engine::start(files, options, bytes)?;
    let engine = match vocabulary {
        Some(vocabulary) => engine.with_grammars(vocabulary),
        None => engine,
    };
    host.setup("memory", format!("{}{also}", engine.memory_plan()));
    Ok(engine)
}

/// Creates a function that writes the tokenizer and the chat template into a checkpoint. Other
/// programs can then open the checkpoint as a model directory.
///
/// # Errors
/// Returns an error if the tokenizer cannot be written as `tokenizer.json`.
pub fn create_extra_files(files: &ModelFiles, chat: &Chat) -> anyhow::Result<ExtraFiles> {
    let tokenizer = match &files.tokenizer {
        Some(TokenizerSource::Json(bytes)) => bytes.clone(),
        _ => chat.tokenizer().to_json()?.into_bytes(),
    };
    let special: SpecialTokens = files.special_tokens.clone();
    let template = chat.template().source().to_owned();
    let context = files.config.context;
    Ok(Arc::new(move |dir: &Path| {
        std::fs::write(dir.join("tokenizer.json"), &tokenizer)?;
        let settings = dir.join("tokenizer_config.json");
        write_tokenizer_config(&settings, &special, Some(&template), context).map_err(|error| {
            match error {
                ModelError::Io { cause, .. } => cause,
                ModelError::DiskFull { .. } => io::ErrorKind::StorageFull.into(),
                other => io::Error::other(other),
            }
        })
    }))
}

#[cfg(test)]
mod tests {
    use levade_engine::testing::{KvCache, tiny_config};

    use super::*;

    fn recipe(engine: &str) -> Recipe {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("recipe.toml");
        let text = "run = { name = 'x' }\nmodel = { source = 'm' }\n\
                    tasks = [{ kind = 'arithmetic' }]\n[engine]\n";
        std::fs::write(&file, [text, engine].concat()).unwrap();
        Recipe::load(&file, &[]).unwrap()
    }

    #[test]
    fn kv_memory_mb_sets_cache_that_holds_a_sequence() {
        let config = tiny_config();
        let cache = |keys: &str| {
            let recipe = recipe(keys);
            let options = options_without_cache(&recipe, Some(20_000), Vec::new(), &config);
            with_cache(&recipe, &config, options).kv_memory_mb
        };
        let sequence = cache("kv_memory_mb = 1");
        assert!((2..100).contains(&sequence), "{sequence}");
        assert_eq!(cache("kv_memory_mb = 2000"), 2000);
        assert!(cache("") <= KV_MEMORY_MB as usize);
        // A small budget bounds the default only.
        assert_eq!(cache("memory_mb = 8"), sequence);
        assert_eq!(cache("memory_mb = 8\nkv_memory_mb = 2000"), 2000);
    }

    /// Heads whose width is not a multiple of the block width are padded. The estimate must equal
    /// the memory that the engine uses.
    #[test]
    fn cache_holds_sequence_of_full_context() {
        let config =
            ModelConfig { kv_heads: 32, heads: 32, layers: 64, head_dim: 40, ..tiny_config() };
        for precision in [Precision::F32, Precision::Bf16] {
            for (context, memory_mb) in [(100, 8), (100, 0), (9_000, 0), (20_000, 100)] {
                let options =
                    EngineOptions { precision, context, memory_mb, ..EngineOptions::default() };
                let bytes = default_cache_mb(&config, &options) << 20;
                let cache = KvCache::new(attention_shape(&config), config.layers, precision, bytes);
                assert!(
                    cache.capacity() >= context,
                    "{precision}: {} of {context}",
                    cache.capacity()
                );
            }
        }
    }
}
