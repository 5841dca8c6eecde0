//! Normalizes tensor names in checkpoints of trainers. A missing prefix `model.` is added. Names
//! that a wrapper around the model has changed are rejected.

use std::path::Path;

use crate::ModelError;
use crate::safetensors::SafetensorsFile;

/// Name of the embedding tensor within the decoder. It locates the decoder's tensors in a file.
const EMBEDDING: &str = "embed_tokens.weight";

/// Components of tensor names that no supported model has. Each row contains the components, what
/// they show about the checkpoint, and what the user can do.
const FOREIGN: [(&[&str], &str, &str); 8] = [
    (
        &["base_model", "base_layer", "lora_A", "lora_B", "lora_embedding_A"],
        "the checkpoint contains a model inside a PEFT wrapper",
        "in Python, save what `merge_and_unload()` returns, or save only the adapter and give its \
         directory",
    ),
    (
        &["_orig_mod"],
        "the checkpoint was saved from a model inside torch.compile",
        "in Python, save `model._orig_mod`",
    ),
    (
        &["module"],
        "the checkpoint was saved from a model inside DistributedDataParallel, DataParallel or \
         DeepSpeed",
        "in Python, save `model.module`",
    ),
    (
        &["_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_flat_param", "_forward_module"],
        "the checkpoint was saved from a model inside the wrapper of FSDP or of its activation \
         checkpointing",
        "in Python, save the full state dict of the wrapped model",
    ),
    (
        &["v_head", "value_head", "pretrained_model"],
        "the checkpoint contains the value head of a critic in addition to the model",
        "in Python, save the model without it: with TRL, \
         `model.pretrained_model.save_pretrained(…)`",
    ),
    (
        &["score", "classifier"],
        "the checkpoint is a classifier or a reward model",
        "use the model that it was trained from",
    ),
    (
        &["language_model", "text_model", "vision_tower", "visual"],
        "the checkpoint is a multimodal model",
        "save only its language model, with the config.json of the language model",
    ),
    (
        &["qweight", "weight_packed", "weight_scale", "weight_scale_inv", "absmax", "quant_state"],
        "the checkpoint's weights are quantized",
        "use the version of the model that is not quantized, or a GGUF file",
    ),
];

/// Components of the names of tensors that a multimodal model has in addition to the tensors of its
/// text model.
const IMAGES: [&str; 2] = ["vision_tower", "multi_modal_projector"];

/// Converts the name of a tensor of a multimodal model to the tensor's name in the text model
/// alone. Returns `None` if the name has no prefix to remove. Older files have the output head
/// inside the text model, newer files outside of it.
fn strip_part_prefix(name: &str) -> Option<String> {
    let decoder = name.strip_prefix("model.language_model.");
    decoder
        .map(|rest| format!("model.{rest}"))
        .or_else(|| name.strip_prefix("language_model.").map(str::to_owned))
}

/// Renames tensors to their Hugging Face names. If a decoder was saved without its surrounding
/// model, the names get the prefix `model.`, as in transformers. `is_part` means that the text
/// model is part of a multimodal model, whose remaining tensors are dropped.
///
/// # Errors
/// Returns an error if a wrapper around the model changed the names, or if the tensors belong to
/// another kind of model. The message names the wrapper or the kind.
pub(crate) fn normalize_names(
    files: &mut [SafetensorsFile],
    is_part: bool,
) -> Result<(), ModelError> {
    if is_part {
        for file in files.iter_mut() {
            file.retain(|name| {
                !IMAGES.iter().any(|part| name.split('.').any(|found| found == *part))
            });
            file.rename(strip_part_prefix);
        }
    }
    for file in files.iter() {
        let mut names: Vec<&str> = file.tensors().map(|(name, _)| name).collect();
        names.sort_unstable();
        for name in names {
            if let Some((part, shows, way_out)) = find_foreign_part(name) {
                return Err(unsupported_name_error(file.path(), name, part, shows, way_out));
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
            let prefix =
                prefix.strip_suffix("model.").filter(|rest| !rest.is_empty()).unwrap_or(prefix);
            return Err(unsupported_name_error(
                file.path(),
                name,
                prefix,
                "the model was saved inside another module",
                "in Python, save the inner model",
            ));
        }
    }
    Ok(())
}

/// Creates the error for the tensor `name`, whose component `part` shows that the model is
/// unsupported.
fn unsupported_name_error(
    path: &Path,
    name: &str,
    part: &str,
    shows: &str,
    way_out: &str,
) -> ModelError {
    ModelError::unsupported(
        path,
        format!("{shows}: tensor {name} has {part:?} in its name"),
        way_out,
    )
}

/// Returns the prefix of the tensor name `name` up to and including the first component that no
/// supported model has, with the last two fields of the component's row in [`FOREIGN`].
fn find_foreign_part(name: &str) -> Option<(&str, &'static str, &'static str)> {
    let mut at = 0;
    for part in name.split('.') {
        let end = (at + part.len() + 1).min(name.len());
        let known = FOREIGN.iter().find(|(parts, ..)| parts.contains(&part));
        if let Some((_, shows, way_out)) = known {
            // PEFT's wrapper adds two components.
            let reason = if name.starts_with("base_model.model.") {
                "base_model.model."
            } else {
                &name[..end]
            };
            return Some((reason, shows, way_out));
        }
        at = end;
    }
    None
}
