//! A policy's files: weights in the layout that others read, and the optimiser's state beside them.

use std::path::Path;

use dressage_model::{ModelError, ModelFiles, SafetensorsFile, write_json};
use dressage_policy::crash_point;

use crate::buffer::Buffer;
use crate::learning::Learning;
use crate::optimiser::Optimiser;
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
    let optimiser = match adapter {
        None => {
            save_model(weights, &weights.master, folder)?;
            Some(&learning.optimiser)
        }
        Some(index) => {
            model.adapters[index].save(folder)?;
            learning.adapters.get(index)
        }
    };
    if let Some(head) = model.values.get(&adapter) {
        head.write(&folder.join(value::FILE), &head.master)?;
        let moments = learning.value_heads.get(&adapter).filter(|o| with_optimiser && !o.first.is_empty());
        if let Some(optimiser) = moments {
            for (name, moment) in VALUE_MOMENTS.iter().zip([&optimiser.first, &optimiser.second]) {
                head.write(&folder.join(name), moment)?;
            }
        }
    }
    crash_point("checkpoint_file");
    let Some(optimiser) = optimiser.filter(|o| with_optimiser && !o.first.is_empty()) else { return Ok(()) };
    for (name, moment) in MOMENTS.iter().zip([&optimiser.first, &optimiser.second]) {
        match adapter {
            None => weights.write(&folder.join(name), moment)?,
            Some(index) => model.adapters[index].write(&folder.join(name), moment)?,
        }
    }
    let steps = serde_json::json!({ "schema": 1, "steps": optimiser.steps });
    write_json(&folder.join(STEPS), &steps)
}

fn save_model(weights: &Weights, array: &[f32], folder: &Path) -> Result<(), ModelError> {
    write_json(&folder.join(CONFIG), &weights.config.to_hf_json())?;
    weights.write(&folder.join(WEIGHTS), array)
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
    let place =
        |name: &str| weights.layout.places.iter().find(|p| p.parameter.name == name).map(|p| p.range.clone());
    let adapter = &model.adapters[index];
    adapter.merge_into(place, &wide(&adapter.master), &mut merged);
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
    let (optimiser, len) = match adapter {
        None => {
            weights.read(compute, &ModelFiles::open(folder)?)?;
            (&mut learning.optimiser, weights.layout.len)
        }
        Some(index) => {
            adapters[index].load(compute, folder)?;
            learning.ensure_adapter(index);
            (&mut learning.adapters[index], adapters[index].layout.len)
        }
    };
    *optimiser = Optimiser::default();
    let critic = match values.get_mut(&adapter) {
        Some(head) if folder.join(value::FILE).exists() => {
            let mut master = Buffer::zeroed(head.master.len());
            head.read(&folder.join(value::FILE), &mut master)?;
            head.master = master;
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
    optimiser.ensure(len);
    for (name, moment) in MOMENTS.iter().zip([&mut optimiser.first, &mut optimiser.second]) {
        let path = folder.join(name);
        match adapter {
            None => read_moment(weights, &path, moment)?,
            Some(index) => adapters[index].read(&path, moment)?,
        }
    }
    optimiser.steps = count;
    if let Some(head) = critic.filter(|_| folder.join(VALUE_MOMENTS[0]).exists()) {
        let mut optimiser = Optimiser::default();
        optimiser.steps = count;
        optimiser.ensure(head.master.len());
        for (name, moment) in VALUE_MOMENTS.iter().zip([&mut optimiser.first, &mut optimiser.second]) {
            head.read(&folder.join(name), moment)?;
        }
        learning.value_heads.insert(adapter, optimiser);
    }
    Ok(())
}

fn read_moment(weights: &Weights, path: &Path, moment: &mut [f32]) -> Result<(), ModelError> {
    let file = SafetensorsFile::open(path)?;
    for place in &weights.layout.places {
        let parameter = &place.parameter;
        file.read_shaped(&parameter.name, &parameter.shape, &mut moment[place.range.clone()])?;
    }
    Ok(())
}
