//! A tiny model with random weights, and a recipe that trains it in seconds.

use std::fs;
use std::path::Path;

use levade_engine::testing::{Compute, random_weights, tiny_config};
use levade_model::{ModelConfig, SpecialTokens, write_json, write_tokenizer_config};
use levade_recipe::Recipe;
use levade_text::testing::{END_OF_TEXT, IM_END, VOCABULARY, tiny_chat};

/// Recipe with one step of supervised fine-tuning and four steps of reinforcement learning.
const RECIPE: &str = r#"
[run]
name = "tiny"
folder = "run"

[model]
source = "./model"

[engine]
micro_batch_tokens = 600

[[tasks]]
kind = "arithmetic"
operands = 2
min_digits = 1
max_digits = 2
words = 0.0
train = 500

[agent]
tools = ["calculator"]
tool_prompt = "compact"
max_turns = 2
max_tokens = 60

[eval]
tasks = 2

[[phase]]
kind = "sft"
demonstrations = 4
batch = 4
learning_rate = 1e-4

[[phase]]
kind = "rl"
steps = 4
groups = 2
group_size = 3
learning_rate = 1e-3
"#;

/// Writes the model to `dir`/model, and returns the recipe of a run in `dir`/`name` with the
/// changed keys.
pub fn recipe(dir: &Path, name: &str, changes: &[&str]) -> anyhow::Result<Recipe> {
    write_model(&dir.join("model"))?;
    let file = dir.join("recipe.toml");
    fs::write(&file, RECIPE)?;
    let folder = format!("run.folder={}", dir.join(name).display());
    let changes = changes.iter().copied().chain([folder.as_str()]).map(str::parse);
    Ok(Recipe::load(&file, &changes.collect::<Result<Vec<_>, _>>()?)?)
}

/// Writes a model in the layout of Hugging Face, with one token per byte.
fn write_model(dir: &Path) -> anyhow::Result<()> {
    let eos = vec![IM_END, END_OF_TEXT];
    let config =
        ModelConfig { vocabulary: VOCABULARY, context: 640, bos: None, eos, ..tiny_config() };
    fs::create_dir_all(dir)?;
    let weights = random_weights(&Compute::new(1), &config, 7);
    write_json(&dir.join("config.json"), &config.to_hf_json())?;
    weights.layout.tensors.write(&dir.join("model.safetensors"), &weights.master)?;
    let chat = tiny_chat()?;
    fs::write(dir.join("tokenizer.json"), chat.tokenizer().to_json()?)?;
    let special = SpecialTokens { eos: Some("<|im_end|>".into()), ..SpecialTokens::default() };
    let template = Some(chat.template().source());
    Ok(write_tokenizer_config(
        &dir.join("tokenizer_config.json"),
        &special,
        template,
        config.context,
    )?)
}
