//! Reads the attention pattern of a `config.json`: sliding windows, and layers without rotary
//! embedding.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::family::{FamilyTraits, Windows};
use crate::keys::Keys;
use crate::{AttentionPattern, ModelError};

const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

/// Reads the sliding windows and the layers without rotary embedding of a model with `layers`
/// layers. `local_rope` of the result is `None`.
pub(super) fn read(
    keys: &Keys,
    traits: &FamilyTraits,
    layers: usize,
) -> Result<AttentionPattern, ModelError> {
    let unrotated = read_unrotated(keys, traits, layers)?;
    let (window, windowed) = read_windows(keys, traits, layers, &unrotated)?;
    Ok(AttentionPattern { window, windowed, local_rope: None, unrotated })
}

/// Returns the indices of the layers without rotary embedding. These are the layers whose
/// `no_rope_layers` entry is 0: despite the key's name, SmolLM3 writes 1 for layers with the
/// embedding. If the key is absent, every n-th layer has no rotary embedding. The set is empty for
/// families in which all layers have a rotary embedding.
fn read_unrotated(
    keys: &Keys,
    traits: &FamilyTraits,
    layers: usize,
) -> Result<BTreeSet<usize>, ModelError> {
    let Some(interval) = traits.unrotated_interval else { return Ok(BTreeSet::new()) };
    let interval = keys.size("no_rope_layer_interval")?.unwrap_or(interval);
    match keys.read("no_rope_layers", "a list of 0 and 1", |value| {
        value.as_array()?.iter().map(Value::as_u64).collect::<Option<Vec<u64>>>()
    })? {
        Some(list) if list.len() < layers || list.iter().any(|flag| *flag > 1) => {
            let what = format!(
                "no_rope_layers has {} entries for {layers} layers; it must have one entry, 0 or \
                 1, per layer",
                list.len()
            );
            Err(ModelError::config(keys.path, what))
        }
        Some(list) => Ok((0..layers).filter(|layer| list[*layer] == 0).collect()),
        None if interval == 0 => {
            Err(ModelError::config(keys.path, "no_rope_layer_interval is 0; it must be at least 1"))
        }
        None => Ok((0..layers).filter(|layer| (layer + 1).is_multiple_of(interval)).collect()),
    }
}

/// Returns the size of the sliding window, in tokens, and the indices of the layers that have a
/// sliding window.
fn read_windows(
    keys: &Keys,
    traits: &FamilyTraits,
    layers: usize,
    unrotated: &BTreeSet<usize>,
) -> Result<(Option<usize>, BTreeSet<usize>), ModelError> {
    let types = read_layer_types(keys, layers)?;
    let slides = types.as_ref().is_some_and(|types| !types.is_empty());
    let switched = keys.read("use_sliding_window", "true or false", Value::as_bool)?;
    // `null` switches off a window even if the family has a default size.
    let size = match (keys.size("sliding_window")?, keys.has("sliding_window")) {
        (None, false) => traits.defaults.window,
        (size, _) => size.filter(|size| *size > 0),
    };
    let last = keys.size("max_window_layers")?.unwrap_or(28);
    let interval = match traits.windows {
        Windows::AllExceptEveryNth(interval) => {
            keys.size("sliding_window_pattern")?.unwrap_or(interval).max(1)
        }
        _ => 1,
    };
    let is_on = match traits.windows {
        Windows::Never => {
            let windows = format!(
                "Levade runs {} without sliding windows, as its class in transformers does",
                traits.title
            );
            if switched == Some(true) {
                return Err(keys.unsupported("use_sliding_window", &windows));
            }
            if switched.is_none() && size.is_some() {
                return Err(keys.unsupported("sliding_window", &windows));
            }
            false
        }
        windows => size.is_some() && (switched == Some(true) || !windows.need_switch()),
    };
    if !is_on {
        if slides {
            return Err(keys.unsupported(
                "layer_types",
                "layer_types has sliding windows, but other keys disable them: remove the \
                 incorrect key",
            ));
        }
        return Ok((None, BTreeSet::new()));
    }
    let by_rule = |layer: &usize| match traits.windows {
        Windows::Never | Windows::Every => true,
        Windows::AllExceptEveryNth(_) => !(layer + 1).is_multiple_of(interval),
        Windows::Last => *layer >= last,
        Windows::Unrotated => unrotated.contains(layer),
    };
    let windowed = match types {
        // In transformers, the class of such a family uses only the size of the window.
        Some(types) if traits.windows != Windows::Every => types,
        _ => (0..layers).filter(by_rule).collect(),
    };
    Ok((size.filter(|_| !windowed.is_empty()), windowed))
}

/// Returns the indices of the layers that have a sliding window according to `layer_types`, or
/// `None` if the key is absent.
fn read_layer_types(keys: &Keys, layers: usize) -> Result<Option<BTreeSet<usize>>, ModelError> {
    let Some(types) = keys.read("layer_types", "a list", Value::as_array)? else { return Ok(None) };
    if types.iter().any(|kind| kind != FULL && kind != SLIDING) {
        let way_out = "Levade runs only layers of the types full_attention and sliding_attention";
        return Err(keys.unsupported("layer_types", way_out));
    }
    if types.len() != layers {
        let what = format!("layer_types has {} entries for {layers} layers", types.len());
        return Err(ModelError::config(keys.path, what));
    }
    Ok(Some((0..layers).filter(|layer| types[*layer] == SLIDING).collect()))
}

/// Returns the value of `layer_types` that describes `pattern` in a model with `layers` layers.
pub(super) fn to_layer_types(pattern: &AttentionPattern, layers: usize) -> Vec<&'static str> {
    (0..layers)
        .map(|layer| if pattern.windowed.contains(&layer) { SLIDING } else { FULL })
        .collect()
}
