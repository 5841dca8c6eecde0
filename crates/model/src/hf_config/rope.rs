//! The rotary embedding in a `config.json`, in both spellings.

use serde_json::{Map, Value};

use super::UNKNOWN;
use crate::keys::Keys;
use crate::{ModelError, Rope, RopeScaling};

/// Older files have `rope_theta` and `rope_scaling`, newer ones both in `rope_parameters`. Where a file has
/// both, transformers goes by the older one. `theta` is the base unless the file says another.
pub(super) fn rope(keys: &Keys, theta: f32, context: usize) -> Result<Rope, ModelError> {
    let theta = keys.float("rope_theta")?.unwrap_or(theta);
    let older = keys.object("rope_scaling")?.filter(|object| !object.is_empty());
    let newer = keys.object("rope_parameters")?;
    let inner =
        older.map(|object| ("rope_scaling.", object)).or(newer.map(|object| ("rope_parameters.", object)));
    let trained = keys.size("original_max_position_embeddings")?;
    let Some((outer, object)) = inner else {
        return Ok(Rope { theta, scaling: RopeScaling::None });
    };
    of_object(&Keys::new(keys.path, outer, object), theta, trained, context)
}

/// The rotary embeddings of families that have two: of layers that see their whole path, and of those with a
/// window. Newer files have an object for each kind of layer, older ones a base for each and one scaling, of
/// the former. `theta` and `local` are the bases unless the file says others.
pub(super) fn rope_by_kind(
    keys: &Keys,
    theta: f32,
    local: f32,
    context: usize,
) -> Result<[Rope; 2], ModelError> {
    let theta = keys.float("rope_theta")?.unwrap_or(theta);
    let local = keys.float("rope_local_base_freq")?.unwrap_or(local);
    let older = keys.object("rope_scaling")?.filter(|object| !object.is_empty());
    let newer = keys.object("rope_parameters")?;
    let none = Map::new();
    let kinds = Keys::new(keys.path, "rope_parameters.", newer.unwrap_or(&none));
    let read = |kind: &str, outer: &str, over: Option<&Map<String, Value>>, theta: f32| {
        let mut object = kinds.object(kind)?.cloned().unwrap_or_default();
        object.extend(over.cloned().unwrap_or_default());
        of_object(&Keys::new(keys.path, outer, &object), theta, None, context)
    };
    let ropes = [
        read("full_attention", "rope_parameters.full_attention.", older, theta)?,
        read("sliding_attention", "rope_parameters.sliding_attention.", None, local)?,
    ];
    kinds.settle_rest(|_| false, UNKNOWN)?;
    Ok(ropes)
}

/// One rotary embedding; `theta` is its base unless it says another.
fn of_object(inner: &Keys, theta: f32, trained: Option<usize>, context: usize) -> Result<Rope, ModelError> {
    let theta = inner.float("rope_theta")?.unwrap_or(theta);
    let scaling = scaling(inner, context)?;
    if let (Some(outer), Some(own)) = (trained, scaling.original_context())
        && outer != own
    {
        let what = format!("original_max_position_embeddings is {outer}");
        let way_out = format!("the rotary scaling says {own}: remove the one that is wrong from config.json");
        return Err(ModelError::unsupported(inner.path, what, &way_out));
    }
    // Said of all scalings by some writers; it counts for those above.
    inner.get("original_max_position_embeddings");
    // Of fine-tunes of a stretched model, a remark.
    inner.get("finetuned");
    inner.settle_rest(|_| false, UNKNOWN)?;
    Ok(Rope { theta, scaling })
}

fn scaling(keys: &Keys, context: usize) -> Result<RopeScaling, ModelError> {
    // `type` is the older spelling.
    let older = keys.text("type")?;
    let kind = keys.text("rope_type")?.or(older).unwrap_or("default");
    if keys.float("partial_rotary_factor")?.is_some_and(|factor| factor != 1.0) {
        return Err(keys.unsupported("partial_rotary_factor", "Levade rotates heads whole"));
    }
    match kind {
        "default" => {
            // Left over from a scaling that was switched off.
            for key in ["factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"] {
                keys.get(key);
            }
            Ok(RopeScaling::None)
        }
        "linear" => Ok(RopeScaling::Linear { factor: keys.needed_float("factor")? }),
        "llama3" => Ok(RopeScaling::Llama3 {
            factor: keys.needed_float("factor")?,
            low_freq_factor: keys.needed_float("low_freq_factor")?,
            high_freq_factor: keys.needed_float("high_freq_factor")?,
            original_context: keys.needed_size("original_max_position_embeddings")?,
        }),
        "yarn" => yarn(keys, context),
        _ => Err(keys.unsupported(
            if keys.get("rope_type").is_some() { "rope_type" } else { "type" },
            "Levade runs the rotary scalings default, linear, llama3 and yarn; for short contexts, removing the \
             entry from config.json gives the unscaled model",
        )),
    }
}

fn yarn(keys: &Keys, context: usize) -> Result<RopeScaling, ModelError> {
    if !keys.flag("truncate", true)? {
        return Err(keys.unsupported("truncate", "Levade runs YaRN with whole-numbered bounds only"));
    }
    let original_context = keys.size("original_max_position_embeddings")?.unwrap_or(context);
    let factor = match keys.float("factor")? {
        Some(factor) => factor,
        None if original_context > 0 && original_context < context => {
            context as f32 / original_context as f32
        }
        None => keys.need("factor", None)?,
    };
    let scales = (keys.float("mscale")?, keys.float("mscale_all_dim")?);
    let attention_factor = match keys.float("attention_factor")? {
        Some(factor) => Some(factor),
        None => match scales {
            (Some(scale), Some(all)) if scale != 0.0 && all != 0.0 => {
                let magnitude = |scale: f32| if factor > 1.0 { 0.1 * scale * factor.ln() + 1.0 } else { 1.0 };
                Some(magnitude(scale) / magnitude(all))
            }
            _ => None,
        },
    };
    Ok(RopeScaling::Yarn {
        factor,
        beta_fast: keys.float("beta_fast")?.unwrap_or(32.0),
        beta_slow: keys.float("beta_slow")?.unwrap_or(1.0),
        attention_factor,
        original_context,
    })
}

impl RopeScaling {
    /// The context before stretching, of the scalings that know it.
    fn original_context(&self) -> Option<usize> {
        match *self {
            Self::None | Self::Linear { .. } => None,
            Self::Llama3 { original_context, .. } | Self::Yarn { original_context, .. } => {
                Some(original_context)
            }
        }
    }
}
