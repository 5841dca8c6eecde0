//! Reads and writes the files of a policy: weights in the layout that other libraries read, with
//! the optimizer state in separate files.
//!
//! Before a policy changes, all files are opened and compared with it (shapes, types,
//! configuration, options of an adapter). Rejected files leave the policy as it was.

use std::borrow::Cow;
use std::path::Path;

use levade_model::{ModelConfig, ModelError, ModelFiles, SafetensorsFile, write_json};
use levade_policy::{Content, crash_point};

use crate::learning::TrainingState;
use crate::optimizer::Optimizer;
use crate::tensors::Tensors;
use crate::transformer::Transformer;
use crate::value_head;

const WEIGHTS: &str = "model.safetensors";
const CONFIG: &str = "config.json";
const MOMENTS: [&str; 2] = ["optimiser.first.safetensors", "optimiser.second.safetensors"];
const STEPS: &str = "optimiser.json";
const VALUE_MOMENTS: [&str; 2] = ["value_head.first.safetensors", "value_head.second.safetensors"];

/// Writes the base weights, or the adapter with index `adapter` in PEFT's layout, to `dir`. Returns
/// the kind of content and the names of all files.
///
/// # Errors
/// Returns an error if a file cannot be written.
pub fn save(
    model: &Transformer,
    learning: &TrainingState,
    adapter: Option<usize>,
    dir: &Path,
    with_optimizer: bool,
) -> Result<(Content, Vec<String>), ModelError> {
    let weights = &model.weights;
    let (optimizer, tensors, content, mut names) = match adapter {
        None => {
            write_json(&dir.join(CONFIG), &weights.config.to_hf_json())?;
            weights.layout.tensors.write(&dir.join(WEIGHTS), &weights.master)?;
            (
                Some(&learning.optimizer),
                &weights.layout.tensors,
                Content::Full,
                vec![CONFIG, WEIGHTS],
            )
        }
        Some(index) => {
            let adapter = &model.adapters[index];
            let names = adapter.save(dir)?.to_vec();
            let content = Content::Adapter { base: adapter.base().to_owned() };
            (learning.adapters.get(index), &adapter.layout.tensors, content, names)
        }
    };
    let write_moments = |tensors: &Tensors, names: [&str; 2], optimizer: &Optimizer| {
        let moments = names.into_iter().zip([&optimizer.first, &optimizer.second]);
        moments.into_iter().try_for_each(|(name, moment)| tensors.write(&dir.join(name), moment))
    };
    if let Some(head) = model.values.get(&adapter) {
        head.tensors.write(&dir.join(value_head::FILE), &head.master)?;
        names.push(value_head::FILE);
        let moments =
            learning.value_heads.get(&adapter).filter(|o| with_optimizer && !o.first.is_empty());
        if let Some(optimizer) = moments {
            write_moments(&head.tensors, VALUE_MOMENTS, optimizer)?;
            names.extend(VALUE_MOMENTS);
        }
    }
    crash_point("checkpoint_file");
    if let Some(optimizer) = optimizer.filter(|o| with_optimizer && !o.first.is_empty()) {
        write_moments(tensors, MOMENTS, optimizer)?;
        let steps = serde_json::json!({ "schema": 1, "steps": optimizer.steps });
        write_json(&dir.join(STEPS), &steps)?;
        names.extend(MOMENTS.into_iter().chain([STEPS]));
    }
    Ok((content, names.into_iter().map(str::to_owned).collect()))
}

/// Writes the base weights, merged with an adapter if one is given, in Hugging Face layout. Merges
/// one matrix at a time.
///
/// # Errors
/// Returns an error if a file cannot be written.
pub fn save_merged(
    model: &Transformer,
    adapter: Option<usize>,
    dir: &Path,
) -> Result<(), ModelError> {
    let weights = &model.weights;
    let adapter = adapter
        .map(|index| &model.adapters[index])
        .map(|adapter| (adapter, to_f64(&adapter.master)));
    write_json(&dir.join(CONFIG), &weights.config.to_hf_json())?;
    weights.layout.tensors.write_with(&dir.join(WEIGHTS), |entry| {
        let base = weights.parameters_at(&entry.range);
        match &adapter {
            Some((adapter, array)) if adapter.adapts_matrix(&entry.range) => {
                let mut merged = to_f64(base);
                adapter.merge_into(array, &entry.range, &mut merged);
                Cow::Owned(merged.into_iter().map(|v| v as f32).collect())
            }
            _ => Cow::Borrowed(base),
        }
    })
}

fn to_f64(array: &[f32]) -> Vec<f64> {
    array.iter().map(|v| f64::from(*v)).collect()
}

/// Files of a policy that [`save`] wrote, opened and checked against the policy.
pub struct OpenedFiles {
    adapter: Option<usize>,
    weights: OpenedWeights,
    value_head: Option<SafetensorsFile>,
    moments: Option<OptimizerMoments>,
}

enum OpenedWeights {
    Base(Box<ModelFiles>),
    Adapter(usize, SafetensorsFile),
}

/// Optimizer state: both moments of the weights, and of the value head.
struct OptimizerMoments {
    steps: u64,
    weights: [SafetensorsFile; 2],
    value_head: Option<[SafetensorsFile; 2]>,
}

/// Opens files that [`save`] wrote and checks that they fit the policy. Changes nothing.
///
/// # Errors
/// Returns an error if a file is missing, damaged or belongs to another model.
pub fn open(
    model: &Transformer,
    adapter: Option<usize>,
    dir: &Path,
    with_optimizer: bool,
) -> Result<OpenedFiles, ModelError> {
    let (weights, tensors) = match adapter {
        None => {
            let files = ModelFiles::open(dir)?;
            check_same_computation(files.path(), &model.weights.config, &files.config)?;
            (OpenedWeights::Base(Box::new(files)), &model.weights.layout.tensors)
        }
        Some(index) => {
            let adapter = &model.adapters[index];
            (
                OpenedWeights::Adapter(index, adapter.open(dir, &model.weights.config)?),
                &adapter.layout.tensors,
            )
        }
    };
    let head = model.values.get(&adapter).filter(|_| dir.join(value_head::FILE).exists());
    let value_head = head.map(|head| head.tensors.open(&dir.join(value_head::FILE))).transpose()?;
    let steps = dir.join(STEPS);
    if !with_optimizer || !steps.exists() {
        return Ok(OpenedFiles { adapter, weights, value_head, moments: None });
    }
    let damaged = |what: String| ModelError::Damaged { path: steps.clone(), what };
    let text = std::fs::read_to_string(&steps).map_err(|error| damaged(error.to_string()))?;
    let value: serde_json::Value =
        serde_json::from_str(&text).map_err(|error| damaged(error.to_string()))?;
    let steps =
        value["steps"].as_u64().ok_or_else(|| damaged("the file has no integer `steps`".into()))?;
    let open = |tensors: &Tensors, [first, second]: [&str; 2]| {
        Ok([tensors.open(&dir.join(first))?, tensors.open(&dir.join(second))?])
    };
    let weight_moments = open(tensors, MOMENTS)?;
    let head = head.filter(|_| dir.join(VALUE_MOMENTS[0]).exists());
    let head_moments = head.map(|head| open(&head.tensors, VALUE_MOMENTS)).transpose()?;
    let moments =
        Some(OptimizerMoments { steps, weights: weight_moments, value_head: head_moments });
    Ok(OpenedFiles { adapter, weights, value_head, moments })
}

/// Configuration keys in which two models may differ and still compute the same. `family` may
/// differ only between families with the same blocks.
const IGNORED_KEYS: [&str; 5] = ["family", "context", "bos", "eos", "pad"];

/// Checks that a model with configuration `found` computes the same as a model with configuration
/// `expected`, except for the [`IGNORED_KEYS`].
fn check_same_computation(
    path: &Path,
    expected: &ModelConfig,
    found: &ModelConfig,
) -> Result<(), ModelError> {
    let is_alike = expected.family.traits().blocks == found.family.traits().blocks;
    let free = |key: &str| IGNORED_KEYS.contains(&key) && (key != "family" || is_alike);
    let [expected, found] = [expected, found].map(|config| serde_json::json!(config));
    let mut keys = expected.as_object().into_iter().flatten().map(|(key, _)| key.as_str());
    match keys.find(|key| !free(key) && expected[*key] != found[*key]) {
        None => Ok(()),
        Some(key) => Err(ModelError::Unsupported {
            path: path.to_path_buf(),
            what: format!(
                "{key} is {}, but it is {} in the model that the engine runs",
                found[key], expected[key]
            ),
            way_out: "load weights that were saved from the engine's model, or start the engine \
                with the model of these weights"
                .into(),
        }),
    }
}

/// Loads the files that [`open`] has opened. If they contain no optimizer state, the optimizer
/// starts without moments.
///
/// # Errors
/// Returns an error if a file was opened for another policy; some of the weights may then have been
/// replaced.
pub fn load(
    model: &mut Transformer,
    learning: &mut TrainingState,
    saved: OpenedFiles,
) -> Result<(), ModelError> {
    let OpenedFiles { adapter, weights: files, value_head, moments } = saved;
    let Transformer { compute, weights, adapters, values, .. } = model;
    let optimizer = match adapter {
        None => &mut learning.optimizer,
        Some(index) => {
            learning.ensure_adapter(index);
            &mut learning.adapters[index]
        }
    };
    // The accumulated gradient belongs to the replaced weights.
    *optimizer = Optimizer::default();
    learning.value_heads.remove(&adapter);
    let tensors = match &files {
        OpenedWeights::Base(files) => {
            weights.read(compute, files)?;
            &weights.layout.tensors
        }
        OpenedWeights::Adapter(index, file) => {
            adapters[*index].load(compute, file)?;
            &adapters[*index].layout.tensors
        }
    };
    let mut head = values.get_mut(&adapter);
    if let (Some(head), Some(file)) = (&mut head, &value_head) {
        head.tensors.read(file, &mut head.master)?;
    }
    let Some(OptimizerMoments { steps, weights: weight_moments, value_head: head_moments }) =
        moments
    else {
        return Ok(());
    };
    *optimizer = read_optimizer(steps, tensors, &weight_moments)?;
    if let (Some(head), Some(files)) = (head, &head_moments) {
        let optimizer = read_optimizer(steps, &head.tensors, files)?;
        learning.value_heads.insert(adapter, optimizer);
    }
    Ok(())
}

/// Reads the moments of an optimizer that has made `steps` steps.
fn read_optimizer(
    steps: u64,
    tensors: &Tensors,
    [first, second]: &[SafetensorsFile; 2],
) -> Result<Optimizer, ModelError> {
    let mut optimizer = Optimizer::default();
    optimizer.steps = steps;
    optimizer.allocate(tensors.len);
    tensors.read(first, &mut optimizer.first)?;
    tensors.read(second, &mut optimizer.second)?;
    Ok(optimizer)
}
