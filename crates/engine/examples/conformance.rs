//! Runs one job of the checks in `conformance/` on the engine: `conformance JOB.json`.
//!
//! `conformance/README.md` describes the format of a job. Results go to `result.json` and
//! `result.safetensors` in the job's directory. This program is for tests only: it shows to other
//! programs what the engine computes, including logits and gradients.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use levade_engine::testing::{
    BatchUnit, Blocks, Buffer, Compute, InferencePass, TokenRows, TrainingLimits, TrainingState,
    Transformer, UnitPacking, ValueHead, Weights, check,
};
use levade_engine::{Adapter, Engine, EngineOptions, Isa, attention_shape};
use levade_model::{
    AdapterConfig, ModelFiles, write_json, write_safetensors, write_tokenizer_config,
};
use levade_policy::{Learner, OptimParams, Precision};
use levade_rl::Loss;
use levade_text::{Chat, ChatOptions, Message, TemplateInput, Tokenizer};
use levade_tree::{SequenceInput, TreeBatch};
use serde::Deserialize;
use serde_json::{Value, json};

const FORMAT: u32 = 1;
const TENSORS: &str = "result.safetensors";
const VALUE_HEAD: &str = "value_head.safetensors";

#[derive(Deserialize)]
struct Request {
    format: u32,
    model: PathBuf,
    out: PathBuf,
    threads: usize,
    #[serde(default)]
    precision: Precision,
    /// Directory in PEFT's layout.
    adapter: Option<PathBuf>,
    /// File with `value_head.weight` and `value_head.bias`.
    value_head: Option<PathBuf>,
    mode: JobMode,
    /// Input of the mode `logits`.
    #[serde(default)]
    sequences: Vec<Vec<u32>>,
    /// Input of the mode `gradients`.
    #[serde(default)]
    batch: Vec<SequenceInput>,
    loss: Option<Loss>,
    /// Input of the mode `steps`.
    #[serde(default)]
    steps: Vec<Step>,
    /// Input of the mode `tokens`.
    #[serde(default)]
    texts: Vec<String>,
    #[serde(default)]
    chats: Vec<Conversation>,
}

/// Mode of a job. Fields of all modes are in one struct, because serde's tagged enums lose numbers
/// that keep their digits.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum JobMode {
    Logits,
    Gradients,
    Steps,
    Save,
    Tokens,
}

#[derive(Deserialize)]
struct Step {
    batches: Vec<Vec<SequenceInput>>,
    loss: Loss,
    optim: OptimParams,
}

#[derive(Deserialize)]
struct Conversation {
    messages: Vec<Value>,
    add_generation_prompt: bool,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let Some(path) = std::env::args_os().nth(1).map(PathBuf::from) else {
        bail!("usage: conformance JOB.json")
    };
    let text = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let request: Request = serde_json::from_slice(&text)
        .with_context(|| format!("{} is not a valid job", path.display()))?;
    ensure!(
        request.format == FORMAT,
        "the job has format {}, but this program reads format {FORMAT}",
        request.format
    );
    let files = ModelFiles::open(&request.model)?;
    let out = request.out.as_path();
    let result = match request.mode {
        JobMode::Logits => logits(&model(&files, &request)?, &request.sequences, out)?,
        JobMode::Gradients => {
            let loss = request.loss.as_ref().context("the job has no loss")?;
            gradients(&model(&files, &request)?, &request.batch, loss, out)?
        }
        JobMode::Steps => {
            let engine = engine(&files, &request).await?;
            let result = train(&engine, &request.steps).await?;
            save(&engine, &files, out).await?;
            result
        }
        JobMode::Save => {
            save(&engine(&files, &request).await?, &files, out).await?;
            json!({})
        }
        JobMode::Tokens => tokens(&files, &request.texts, &request.chats)?,
    };
    Ok(write_json(&out.join("result.json"), &result)?)
}

fn model(files: &ModelFiles, request: &Request) -> Result<Transformer> {
    let compute = Compute::with_isa(request.threads, Isa::detect(), request.precision);
    let weights = Weights::load(&compute, files)?;
    let mut model = Transformer::new(compute, weights, files.config.context);
    let policy = request.adapter.is_some().then_some(0);
    if let Some(dir) = &request.adapter {
        let config = AdapterConfig::open(dir)?;
        let options = Adapter::options_of(&config, &files.config)?;
        let base = config.base.unwrap_or_default();
        let mut adapter = Adapter::new(&model.compute, &model.weights.layout, options, 0, base)?;
        let file = adapter.open(dir, &files.config)?;
        adapter.load(&model.compute, &file)?;
        model.adapters.push(adapter);
    }
    if let Some(path) = &request.value_head {
        let mut head = ValueHead::new(files.config.hidden);
        head.tensors.read(&head.tensors.open(path)?, &mut head.master)?;
        model.values.insert(policy, head);
    }
    Ok(model)
}

async fn engine(files: &ModelFiles, request: &Request) -> Result<Engine> {
    let Request { threads, precision, .. } = *request;
    let options =
        EngineOptions { threads, precision, kv_memory_mb: 16, ..EngineOptions::default() };
    let engine = Engine::start(files, &options, None)?;
    let Some(dir) = &request.adapter else { return Ok(engine) };
    let config = AdapterConfig::open(dir)?;
    let options = Adapter::options_of(&config, &files.config)?;
    let policy = engine.lora(options, 0, &config.base.unwrap_or_default()).await?;
    policy.load(dir, false).await?;
    Ok(policy)
}

/// Writes the logits after every token of every sequence, with the sequences merged into one tree.
fn logits(model: &Transformer, sequences: &[Vec<u32>], out: &Path) -> Result<Value> {
    let config = &model.weights.config;
    let inputs: Vec<_> = sequences
        .iter()
        .map(|tokens| SequenceInput { tokens: tokens.clone().into(), targets: Vec::new() })
        .collect();
    let batch = TreeBatch::merge(&inputs)?;
    check(&batch, model.context, config.vocabulary)?;
    let packing = UnitPacking::new(&batch, &BatchUnit::from_batch(&batch), 0, false);
    let mut blocks = Blocks::new(attention_shape(config), config.layers, model.compute.precision());
    blocks.grow(packing.blocks);
    let adapters: Vec<_> = (0..model.adapters.len()).map(|i| (0..batch.tokens.len(), i)).collect();
    let rows = TokenRows {
        tokens: &batch.tokens,
        positions: &packing.positions,
        spans: &packing.spans,
        adapters: &adapters,
    };
    let mut inference = InferencePass::default();
    let mut all = Buffer::default();
    inference.run(model, rows, &mut blocks);
    inference.logits(model, 0..batch.tokens.len(), &mut all);

    let width = config.vocabulary;
    let gathered: Vec<Vec<f32>> = sequences
        .iter()
        .map(|tokens| {
            let rows = packed_rows(&batch, tokens);
            rows.into_iter().flat_map(|row| all[row * width..][..width].iter().copied()).collect()
        })
        .collect();
    let tensors = sequences.iter().zip(&gathered).enumerate().map(|(i, (tokens, values))| {
        (format!("logits.{i}"), vec![tokens.len(), width], values.as_slice())
    });
    write_safetensors(&out.join(TENSORS), tensors)?;
    Ok(json!({ "packed_tokens": batch.tokens.len(), "path_tokens": batch.sequence_tokens }))
}

/// Returns the rows, in the batch, of the tokens of a merged sequence.
fn packed_rows(batch: &TreeBatch, tokens: &[u32]) -> Vec<usize> {
    let mut rows: Vec<usize> = Vec::with_capacity(tokens.len());
    let mut at = None;
    while rows.len() < tokens.len() {
        let next = tokens[rows.len()];
        let child = (0u32..).zip(&batch.nodes).find(|(_, node)| {
            // Siblings differ in their first tokens.
            node.parent == at && batch.tokens[node.start as usize] == next
        });
        let Some((index, node)) = child else { break };
        rows.extend(
            (node.start as usize..).take((node.len as usize).min(tokens.len() - rows.len())),
        );
        at = Some(index);
    }
    rows
}

/// Writes gradients of the loss over the merged batch, by name: of the base weights or of the
/// adapter, and of the value head.
fn gradients(
    model: &Transformer,
    batch: &[SequenceInput],
    loss: &Loss,
    out: &Path,
) -> Result<Value> {
    let mut learning = TrainingState::new(model, TrainingLimits::NONE);
    let policy = (!model.adapters.is_empty()).then_some(0);
    let sums = learning.forward_backward(model, policy, &TreeBatch::merge(batch)?, loss)?;
    match policy {
        None => {
            model.weights.layout.tensors.write(&out.join(TENSORS), &learning.optimizer.gradient)?
        }
        Some(index) => {
            model.adapters[index]
                .layout
                .tensors
                .write(&out.join(TENSORS), &learning.adapters[index].gradient)?;
        }
    }
    if let (Some(head), Some(optimizer)) =
        (model.values.get(&policy), learning.value_heads.get(&policy))
    {
        head.tensors.write(&out.join(VALUE_HEAD), &optimizer.gradient)?;
    }
    Ok(serde_json::to_value(sums)?)
}

/// Runs optimizer steps, each over several batches.
async fn train(engine: &Engine, steps: &[Step]) -> Result<Value> {
    let mut reports = Vec::new();
    for step in steps {
        let mut loss = 0.0;
        for inputs in &step.batches {
            let batch = Arc::new(TreeBatch::merge(inputs)?);
            loss += engine.forward_backward(batch, step.loss).await?.loss;
        }
        let report = engine.optim_step(step.optim).await?;
        reports.push(
            json!({ "loss": loss, "grad_norm": report.grad_norm, "applied": report.applied }),
        );
    }
    Ok(json!({ "steps": reports }))
}

/// Writes weights, configuration and, if the model has one, tokenizer to the directory
/// `checkpoint`; with an adapter, also writes `merged`.
async fn save(engine: &Engine, files: &ModelFiles, out: &Path) -> Result<()> {
    let dir = out.join("checkpoint");
    std::fs::create_dir_all(&dir)?;
    engine.save(&dir, false).await?;
    if dir.join(AdapterConfig::FILE).exists() {
        let merged = out.join("merged");
        std::fs::create_dir_all(&merged)?;
        engine.save_merged(&merged).await?;
    }
    if let Some(source) = &files.tokenizer {
        std::fs::write(dir.join("tokenizer.json"), Tokenizer::new(source)?.to_json()?)?;
        let settings = dir.join("tokenizer_config.json");
        let template = files.chat_template.as_deref();
        write_tokenizer_config(&settings, &files.special_tokens, template, files.config.context)?;
    }
    Ok(())
}

/// Returns token ids of texts, in which special tokens are parsed, and of conversations.
fn tokens(files: &ModelFiles, texts: &[String], chats: &[Conversation]) -> Result<Value> {
    let source = files.tokenizer.as_ref().context("the model has no tokenizer")?;
    let tokenizer = Tokenizer::new(source)?.with_ends(files.config.bos, &files.config.eos);
    let texts: Vec<_> = texts.iter().map(|text| tokenizer.encode_template(text)).collect();
    if chats.is_empty() {
        // A base model may have no template.
        return Ok(json!({ "texts": texts, "chats": [] }));
    }
    let chat = Chat::new(tokenizer, files.chat_template.as_deref(), ChatOptions::default())?;
    let chats: Vec<_> = chats
        .iter()
        .map(|conversation| conversation_ids(files, &chat, conversation))
        .collect::<Result<_>>()?;
    Ok(json!({ "texts": texts, "chats": chats }))
}

fn conversation_ids(
    files: &ModelFiles,
    chat: &Chat,
    conversation: &Conversation,
) -> Result<Vec<u32>> {
    if conversation.add_generation_prompt {
        // The prompt that the agent loop sends to a sampler.
        let messages: Vec<Message> = serde_json::from_value(conversation.messages.clone().into())?;
        return Ok(chat.prompt(&messages, &[])?);
    }
    let names = files.special_tokens.by_name();
    let variables = names.map(|(name, text)| (name.to_owned(), Value::from(text))).collect();
    let text = chat.template().render(TemplateInput {
        messages: &conversation.messages,
        tools: None,
        add_generation_prompt: false,
        variables: &variables,
    })?;
    Ok(chat.tokenizer().encode_template(&text))
}
