//! From a model's name to a running engine.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use levade_engine::{Adapter, Engine, EngineOptions, PlannedAdapter, attention_shape};
use levade_model::{
    AdapterConfig, ModelConfig, ModelError, ModelFiles, Progress, Source, SpecialTokens, TokenizerSource,
    default_cache, fetch, write_tokenizer_config,
};
use levade_policy::{Learner, LoraOptions, Precision, TokenBytes};
use levade_recipe::Recipe;
use levade_text::{Chat, ChatOptions, TextError, Vocabulary};
use levade_trainer::Companions;

use crate::display;
use crate::failure::unusable;
use crate::host::{Event, Host};

/// Keys and values of sampling get this much memory, or a quarter of what may be used where that is less, but
/// at least what one whole context takes.
const KV_MEMORY_MB: u64 = 1024;

/// A model that was found: its files, and an adapter over it where the source was one.
pub struct Found {
    /// The model, or the base of the adapter.
    pub files: ModelFiles,
    /// Form of the adapter, and the name of its base; it lies at `path`.
    pub adapter: Option<(LoraOptions, String)>,
    /// Where it all lies.
    pub path: PathBuf,
}

impl Found {
    /// The files that decide what the model says: of a folder, those with weights, configurations and
    /// templates.
    ///
    /// # Errors
    /// When the folder cannot be listed.
    pub fn files_read(&self) -> anyhow::Result<Vec<PathBuf>> {
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
        let mut files: Vec<PathBuf> = entries.iter().map(std::fs::DirEntry::path).filter(is_read).collect();
        files.sort();
        Ok(files)
    }
}

/// Gets a model onto this machine, and opens it as [`open_at`] does.
///
/// # Errors
/// When it cannot be had or opened.
pub fn open(source: &str, base: Option<&str>, host: &Host) -> anyhow::Result<Found> {
    open_at(get(source, host)?, base, host)
}

/// Opens a model that is on this machine. Of an adapter, its base: `base`, or else the one that it names.
///
/// # Errors
/// When it cannot be opened, or its base not be had.
pub fn open_at(path: PathBuf, base: Option<&str>, host: &Host) -> anyhow::Result<Found> {
    if !path.join(AdapterConfig::FILE).exists() {
        return Ok(Found { files: tell(ModelFiles::open(&path)?, host), adapter: None, path });
    }
    let config = AdapterConfig::open(&path)?;
    note(&config.notes, host);
    let way_out = "name a base with --base SOURCE (in a recipe: model.base)";
    let Some(base) = base.or(config.base.as_deref()) else {
        return Err(unusable(format!(
            "{} does not say what its base is\n{way_out}",
            config.path().display()
        )));
    };
    let opened = get(base, host).and_then(|below| Ok(ModelFiles::open(&below)?));
    let files = tell(
        opened.map_err(|error| {
            let path = path.display();
            unusable(format!(
                "the adapter in {path} needs its base {base:?}, which cannot be had: {error}\n{way_out}"
            ))
        })?,
        host,
    );
    let options = Adapter::options_of(&config, &files.config)?;
    Ok(Found { files, adapter: Some((options, base.to_owned())), path })
}

/// Says what a model's files say that its user should know of.
fn tell(files: ModelFiles, host: &Host) -> ModelFiles {
    note(&files.notes, host);
    files
}

fn note(notes: &[String], host: &Host) {
    for note in notes {
        host.setup("note", note);
    }
}

/// Gets a model onto this machine, and returns where it is.
///
/// # Errors
/// When it cannot be had.
pub fn get(source: &str, host: &Host) -> anyhow::Result<PathBuf> {
    let source = Source::parse(source)?;
    if let Source::Folder(path) | Source::Gguf(path) = &source {
        return Ok(path.clone());
    }
    let path = fetch(&source, &default_cache()?, &mut |Progress { stage, done, total }| {
        host.send(Event::Fetching { stage: stage.to_owned(), done, total });
    });
    host.send(Event::Fetched);
    Ok(path?)
}

/// One line on what a model is.
pub fn describe(files: &ModelFiles) -> String {
    let ModelConfig { family, layers, hidden, vocabulary, context, .. } = &files.config;
    let parameters: usize = files.config.parameters().iter().map(|p| p.shape.iter().product::<usize>()).sum();
    let family = serde_json::to_value(family).ok();
    let family = family.as_ref().and_then(serde_json::Value::as_str).unwrap_or_default().to_owned();
    format!(
        "{family}, {} parameters, {layers} layers of {hidden}, {vocabulary} tokens, context {context}",
        display::count(parameters as u64)
    )
}

/// The chat of a model.
///
/// # Errors
/// When it has no tokenizer or template, or they cannot be used.
pub fn chat(files: &ModelFiles, options: ChatOptions) -> anyhow::Result<Chat> {
    match Chat::open(files, None, options) {
        Ok(chat) => Ok(chat),
        // A recipe has no place for a template: it belongs to the model.
        Err(TextError::NoTemplate) => Err(unusable(format!(
            "the model in {} has no chat template, so it cannot be talked to\nput the template it was trained with beside \
             it as chat_template.jinja, or take a model that was trained to chat (often named \"instruct\")",
            files.path().display()
        ))),
        Err(error) => Err(unusable(format!("{}: {error}", files.path().display()))),
    }
}

/// Returns the options of an engine for a recipe, over whose model there will be `adapters`, before
/// [`with_cache`] decides on the memory for keys and values.
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
        running: recipe.engine.sequences(),
        keep_cache: recipe.engine.keep_cache,
        ..EngineOptions::default()
    }
}

/// Returns the options with memory for keys and values: next to none if servers sample in place of the
/// engine.
pub fn with_cache(recipe: &Recipe, config: &ModelConfig, options: EngineOptions) -> EngineOptions {
    if recipe.cluster.samplers.is_some() {
        return EngineOptions { kv_memory_mb: 1, running: 1, step_rows: 1, ..options };
    }
    EngineOptions { kv_memory_mb: kv_memory_mb(config, &options), ..options }
}

/// How a model is run that is only sampled from, `running` replies at once.
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
    EngineOptions { kv_memory_mb: kv_memory_mb(config, &options), ..options }
}

/// Returns the options with at most so much memory, in MiB; 0 for what is free.
pub fn within_memory(config: &ModelConfig, options: EngineOptions, memory_mb: usize) -> EngineOptions {
    let options = EngineOptions { memory_mb, ..options };
    EngineOptions { kv_memory_mb: kv_memory_mb(config, &options), ..options }
}

/// Returns the memory for keys and values, in MiB: a quarter of the budget up to [`KV_MEMORY_MB`], less if
/// the engine would not fit otherwise, and never less than one sequence of the whole context takes, so that
/// the scheduler never has to refuse one.
fn kv_memory_mb(config: &ModelConfig, options: &EngineOptions) -> usize {
    let one_sequence = attention_shape(config).path_bytes(config.layers, options.precision, options.context);
    let budget = options.budget();
    // The plan for a budget of 1 MiB is the smallest that there is.
    let without_cache = EngineOptions { kv_memory_mb: 0, memory_mb: 1, ..options.clone() };
    let rest = Engine::plan(config, &without_cache)
        .map_or(u64::MAX, |smallest| budget.saturating_sub(smallest.total()));
    let share = KV_MEMORY_MB.min((budget / 4) >> 20).min(rest >> 20);
    (share as usize).max(one_sequence.div_ceil(1 << 20))
}

/// Starts a model, or an adapter over it, to be sampled from.
///
/// # Errors
/// When the options do not fit the model, memory would not suffice, or the adapter does not fit its base.
pub async fn start_sampling(
    found: &Found,
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

/// Starts an engine that knows the tokens of `chat`, so that texts can end replies and grammars shape them;
/// says what memory it will take, `also` what others will.
///
/// # Errors
/// When the options do not fit the model, or memory would not suffice.
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

/// Files that complete a checkpoint to a model folder that others can open: the tokenizer and the chat
/// template.
///
/// # Errors
/// When the tokenizer cannot be written as `tokenizer.json`.
pub fn companions(files: &ModelFiles, chat: &Chat) -> anyhow::Result<Companions> {
    let tokenizer = match &files.tokenizer {
        Some(TokenizerSource::Json(bytes)) => bytes.clone(),
        _ => chat.tokenizer().to_json()?.into_bytes(),
    };
    let special: SpecialTokens = files.special_tokens.clone();
    let template = chat.template().source().to_owned();
    let context = files.config.context;
    Ok(Arc::new(move |folder: &Path| {
        std::fs::write(folder.join("tokenizer.json"), &tokenizer)?;
        let settings = folder.join("tokenizer_config.json");
        write_tokenizer_config(&settings, &special, Some(&template), context).map_err(|error| match error {
            ModelError::Io { cause, .. } => cause,
            ModelError::DiskFull { .. } => io::ErrorKind::StorageFull.into(),
            other => io::Error::other(other),
        })
    }))
}

#[cfg(test)]
mod tests {
    use levade_engine::testing::{Cache, tiny_config};

    use super::*;

    #[test]
    fn within_memory_bounds_the_cache_of_an_evaluation() {
        let config = tiny_config();
        let free = sampling_options(&config, 1, Some(64), 1, Precision::F32);
        let bound = within_memory(&config, free.clone(), 8);
        assert_eq!((free.memory_mb, bound.memory_mb), (0, 8));
        assert!(bound.kv_memory_mb <= 2 && free.kv_memory_mb >= bound.kv_memory_mb);
    }

    /// Heads of a width that is no multiple of a block's are padded: what is reckoned with is what the engine
    /// takes.
    #[test]
    fn one_reply_as_long_as_the_context_fits() {
        let config = ModelConfig { kv_heads: 32, heads: 32, layers: 64, head_dim: 40, ..tiny_config() };
        for precision in [Precision::F32, Precision::Bf16] {
            for (context, memory_mb) in [(100, 8), (100, 0), (9_000, 0), (20_000, 100)] {
                let options = EngineOptions { precision, context, memory_mb, ..EngineOptions::default() };
                let bytes = kv_memory_mb(&config, &options) << 20;
                let cache = Cache::new(attention_shape(&config), config.layers, precision, bytes);
                assert!(cache.capacity() >= context, "{precision}: {} of {context}", cache.capacity());
            }
        }
    }
}
