//! A policy's files: weights in the layout that others read, and the optimiser's state beside them.

use std::path::Path;

use dressage_model::{ModelError, ModelFiles, write_json};
use dressage_policy::crash_point;

use crate::learning::Learning;
use crate::optimiser::Optimiser;
use crate::tensors::Tensors;
use crate::transformer::Transformer;
use crate::value;
use crate::weights::Weights;

const WEIGHTS: &str = "model.safetensors";
const CONFIG: &str = "config.json";
const MOMENTS: [&str; 2] = ["optimiser.first.safetensors", "optimiser.second.safetensors"];
const STEPS: &str = "optimiser.json";
const VALUE_MOMENTS: [&str; 2] = ["value_head.first.safetensors", "value_head.second.safetensors"];

/// Writes the weights, or an adapter over them in PEFT's layout.
///
/// # Errors
/// When a file cannot be written.
pub fn save(
    model: &Transformer,
    learning: &Learning,
    adapter: Option<usize>,
    folder: &Path,
    with_optimiser: bool,
) -> Result<(), ModelError> {
    let weights = &model.weights;
    let (optimiser, tensors) = match adapter {
        None => {
            save_model(weights, &weights.master, folder)?;
            (Some(&learning.optimiser), &weights.layout.tensors)
        }
        Some(index) => {
            model.adapters[index].save(folder)?;
            (learning.adapters.get(index), &model.adapters[index].layout.tensors)
        }
    };
    let write_moments = |tensors: &Tensors, names: [&str; 2], optimiser: &Optimiser| {
        let moments = names.into_iter().zip([&optimiser.first, &optimiser.second]);
        moments.into_iter().try_for_each(|(name, moment)| tensors.write(&folder.join(name), moment))
    };
    if let Some(head) = model.values.get(&adapter) {
        head.tensors.write(&folder.join(value::FILE), &head.master)?;
        let moments = learning.value_heads.get(&adapter).filter(|o| with_optimiser && !o.first.is_empty());
        if let Some(optimiser) = moments {
            write_moments(&head.tensors, VALUE_MOMENTS, optimiser)?;
        }
    }
    crash_point("checkpoint_file");
    let Some(optimiser) = optimiser.filter(|o| with_optimiser && !o.first.is_empty()) else { return Ok(()) };
    write_moments(tensors, MOMENTS, optimiser)?;
    let steps = serde_json::json!({ "schema": 1, "steps": optimiser.steps });
    write_json(&folder.join(STEPS), &steps)
}

fn save_model(weights: &Weights, array: &[f32], folder: &Path) -> Result<(), ModelError> {
    write_json(&folder.join(CONFIG), &weights.config.to_hf_json())?;
    weights.layout.tensors.write(&folder.join(WEIGHTS), array)
}

/// Writes the weights with an adapter worked into them, in Hugging Face layout.
///
/// # Errors
/// When a file cannot be written.
pub fn save_merged(model: &Transformer, adapter: Option<usize>, folder: &Path) -> Result<(), ModelError> {
    let weights = &model.weights;
    let Some(index) = adapter else { return save_model(weights, &weights.master, folder) };
    let wide = |array: &[f32]| -> Vec<f64> { array.iter().map(|v| f64::from(*v)).collect() };
    let mut merged = wide(&weights.master);
    let adapter = &model.adapters[index];
    adapter.merge_into(&wide(&adapter.master), &mut merged);
    let merged: Vec<f32> = merged.into_iter().map(|v| v as f32).collect();
    save_model(weights, &merged, folder)
}

/// Reads what [`save`] wrote. Without the optimiser's state in the folder, or where it is not asked for, the optimiser starts
/// afresh.
///
/// # Errors
/// When a file is missing, damaged, or does not fit the model.
pub fn load(
    model: &mut Transformer,
    learning: &mut Learning,
    adapter: Option<usize>,
    folder: &Path,
    with_optimiser: bool,
) -> Result<(), ModelError> {
    let Transformer { compute, weights, adapters, values, .. } = model;
    let (optimiser, tensors) = match adapter {
        None => {
            weights.read(compute, &ModelFiles::open(folder)?)?;
            (&mut learning.optimiser, &weights.layout.tensors)
        }
        Some(index) => {
            adapters[index].load(compute, folder)?;
            learning.ensure_adapter(index);
            (&mut learning.adapters[index], &adapters[index].layout.tensors)
        }
    };
    *optimiser = Optimiser::default();
    learning.value_heads.remove(&adapter);
    let critic = match values.get_mut(&adapter) {
        Some(head) if folder.join(value::FILE).exists() => {
            head.load(&folder.join(value::FILE))?;
            Some(head)
        }
        _ => None,
    };
    let steps = folder.join(STEPS);
    if !with_optimiser || !steps.exists() {
        return Ok(());
    }
    let damaged = |what: String| ModelError::Damaged { path: steps.clone(), what };
    let text = std::fs::read_to_string(&steps).map_err(|error| damaged(error.to_string()))?;
    let value: serde_json::Value = serde_json::from_str(&text).map_err(|error| damaged(error.to_string()))?;
    let count = value["steps"].as_u64().ok_or_else(|| damaged("it has no number of steps".into()))?;
    let read = |tensors: &Tensors, names: [&str; 2]| {
        let mut optimiser = Optimiser::default();
        optimiser.steps = count;
        optimiser.ensure(tensors.len);
        for (name, moment) in names.into_iter().zip([&mut optimiser.first, &mut optimiser.second]) {
            tensors.read(&folder.join(name), moment)?;
        }
        Ok(optimiser)
    };
    *optimiser = read(tensors, MOMENTS)?;
    if let Some(head) = critic.filter(|_| folder.join(VALUE_MOMENTS[0]).exists()) {
        learning.value_heads.insert(adapter, read(&head.tensors, VALUE_MOMENTS)?);
    }
    Ok(())
}
