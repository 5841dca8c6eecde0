//! Names of tensors in checkpoints of trainers: a wrapper around the model adds to them, or the model's own
//! prefix is missing.

use std::path::Path;

use crate::ModelError;
use crate::safetensors::SafetensorsFile;

/// The embedding's name within the decoder, by which its tensors are found.
const EMBEDDING: &str = "embed_tokens.weight";

/// Parts of names that no model here has: what they show of the checkpoint, and the way out.
const FOREIGN: [(&[&str], &str, &str); 8] = [
    (
        &["base_model", "base_layer", "lora_A", "lora_B", "lora_embedding_A"],
        "it holds a model inside PEFT's wrapper",
        "in Python, save what `merge_and_unload()` returns, or save the adapter alone and give its folder",
    ),
    (&["_orig_mod"], "it was saved from a model inside torch.compile", "in Python, save `model._orig_mod`"),
    (
        &["module"],
        "it was saved from a model inside DistributedDataParallel, DataParallel or DeepSpeed",
        "in Python, save `model.module`",
    ),
    (
        &["_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_flat_param", "_forward_module"],
        "it was saved from a model inside FSDP's wrapper or that of its checkpointing",
        "in Python, save the full state dict of the model inside",
    ),
    (
        &["v_head", "value_head", "pretrained_model"],
        "it has the value head of a critic beside the model",
        "in Python, save the model without it: with TRL, `model.pretrained_model.save_pretrained(…)`",
    ),
    (
        &["score", "classifier"],
        "it is a classifier or a reward model",
        "take the model that it was made from",
    ),
    (
        &["language_model", "text_model", "vision_tower", "visual"],
        "it is a model of more than text",
        "save its language model alone, with the config.json of that",
    ),
    (
        &["qweight", "weight_packed", "weight_scale", "weight_scale_inv", "absmax", "quant_state"],
        "its weights are quantised",
        "take the version of the model that is not quantised, or a GGUF file",
    ),
];

/// Parts of names of what a model of text and images has beside the text model.
const IMAGES: [&str; 2] = ["vision_tower", "multi_modal_projector"];

/// The name within the text model of a tensor of a larger one. Older files have the head in the text model,
/// newer ones beside it.
fn of_part(name: &str) -> Option<String> {
    let decoder = name.strip_prefix("model.language_model.");
    decoder
        .map(|rest| format!("model.{rest}"))
        .or_else(|| name.strip_prefix("language_model.").map(str::to_owned))
}

/// Gives tensors their Hugging Face names: those of a decoder that was saved alone get `model.` put before
/// them, as transformers does. Where the text model `is_part` of a larger one, what belongs to the rest is
/// left out. Names that something around the model has changed are refused with what it was.
pub(crate) fn settle(files: &mut [SafetensorsFile], is_part: bool) -> Result<(), ModelError> {
    if is_part {
        for file in files.iter_mut() {
            file.retain(|name| !IMAGES.iter().any(|part| name.split('.').any(|found| found == *part)));
            file.rename(of_part);
        }
    }
    for file in files.iter() {
        let mut names: Vec<&str> = file.tensors().map(|(name, _)| name).collect();
        names.sort_unstable();
        for name in names {
            if let Some((part, shows, way_out)) = foreign(name) {
                return Err(refused(file.path(), name, part, shows, way_out));
            }
        }
    }
    let find = |name: &str| files.iter().any(|file| file.shape(name).is_some());
    if find(&format!("model.{EMBEDDING}")) {
        return Ok(());
    }
    if find(EMBEDDING) {
        for file in files {
            file.rename(|name| (name != "lm_head.weight").then(|| format!("model.{name}")));
        }
        return Ok(());
    }
    for file in files.iter() {
        if let Some(name) =
            file.tensors().map(|(name, _)| name).filter(|name| name.ends_with(EMBEDDING)).min()
        {
            let prefix = name.strip_suffix(EMBEDDING).unwrap_or_default();
            let prefix = prefix.strip_suffix("model.").filter(|rest| !rest.is_empty()).unwrap_or(prefix);
            return Err(refused(
                file.path(),
                name,
                prefix,
                "the model was saved inside something else",
                "in Python, save the model inside",
            ));
        }
    }
    Ok(())
}

fn refused(path: &Path, name: &str, part: &str, shows: &str, way_out: &str) -> ModelError {
    ModelError::unsupported(path, format!("{shows}: tensor {name} has {part:?} in its name"), way_out)
}

/// The first part of a name that no model here has, with what stands before it.
fn foreign(name: &str) -> Option<(&str, &'static str, &'static str)> {
    let mut at = 0;
    for part in name.split('.') {
        let end = (at + part.len() + 1).min(name.len());
        let known = FOREIGN.iter().find(|(parts, ..)| parts.contains(&part));
        if let Some((_, shows, way_out)) = known {
            // PEFT's wrapper is two deep.
            let whole =
                if name.starts_with("base_model.model.") { "base_model.model." } else { &name[..end] };
            return Some((whole, shows, way_out));
        }
        at = end;
    }
    None
}
