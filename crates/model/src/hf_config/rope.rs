//! Reads the rotary embedding from a `config.json`, in the older and the newer spelling.

use serde_json::{Map, Value};

use super::UNKNOWN;
use crate::keys::Keys;
use crate::{ModelError, Rope, RopeScaling};

/// Reads the rotary embedding of a model. Older files have `rope_theta` and `rope_scaling`; newer
/// files have both in `rope_parameters`. If a file has both spellings, the older spelling applies,
/// as in transformers. `theta` is the default base.
pub(super) fn read_rope(keys: &Keys, theta: f32, context: usize) -> Result<Rope, ModelError> {
    let theta = keys.float("rope_theta")?.unwrap_or(theta);
    let older = keys.object("rope_scaling")?.filter(|object| !object.is_empty());
    let newer = keys.object("rope_parameters")?;
    let inner = older
        .map(|object| ("rope_scaling.", object))
        .or(newer.map(|object| ("rope_parameters.", object)));
    let trained = keys.size("original_max_position_embeddings")?;
    let Some((outer, object)) = inner else {
        return Ok(Rope { theta, scaling: RopeScaling::None });
    };
    parse_rope_object(&Keys::new(keys.path, outer, object), theta, trained, context)
}

/// Reads two rotary embeddings, in this order: for layers with full attention, and for layers with
/// a sliding window. Newer files have an object for each kind of layer. Older files have a base for
/// each kind, and one scaling, which applies to full attention. `theta` and `local` are the default
/// bases.
pub(super) fn read_ropes_by_kind(
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
        parse_rope_object(&Keys::new(keys.path, outer, &object), theta, None, context)
    };
    let ropes = [
        read("full_attention", "rope_parameters.full_attention.", older, theta)?,
        read("sliding_attention", "rope_parameters.sliding_attention.", None, local)?,
    ];
    kinds.check_unread(|_| false, UNKNOWN)?;
    Ok(ropes)
}

/// Reads a rotary embedding from a JSON object. `theta` is the default base. `trained` is the
/// original context length, in tokens, that the file specifies outside of the object; `None` if it
/// specifies none.
fn parse_rope_object(
    inner: &Keys,
    theta: f32,
    trained: Option<usize>,
    context: usize,
) -> Result<Rope, ModelError> {
    let theta = inner.float("rope_theta")?.unwrap_or(theta);
    let scaling = parse_scaling(inner, context)?;
    if let (Some(outer), Some(own)) = (trained, scaling.original_context())
        && outer != own
    {
        let what = format!("original_max_position_embeddings is {outer}");
        let way_out =
            format!("the rotary scaling has {own}: remove the incorrect value from config.json");
        return Err(ModelError::unsupported(inner.path, what, &way_out));
    }
    // Some writers store this key for all scalings. It matters only for the scalings that read it
    // above.
    inner.get("original_max_position_embeddings");
    // A remark in the files of fine-tunes of a model with scaled rotary embedding.
    inner.get("finetuned");
    inner.check_unread(|_| false, UNKNOWN)?;
    Ok(Rope { theta, scaling })
}

fn parse_scaling(keys: &Keys, context: usize) -> Result<RopeScaling, ModelError> {
    // `type` is the older spelling.
    let older = keys.text("type")?;
    let kind = keys.text("rope_type")?.or(older).unwrap_or("default");
    if keys.float("partial_rotary_factor")?.is_some_and(|factor| factor != 1.0) {
        return Err(keys.unsupported(
            "partial_rotary_factor",
            "Levade applies the rotary embedding to the entire head dimension",
        ));
    }
    match kind {
        "default" => {
            // These keys may remain from a scaling that was switched off.
            for key in [
                "factor",
                "low_freq_factor",
                "high_freq_factor",
                "beta_fast",
                "beta_slow",
                "attention_factor",
            ] {
                keys.get(key);
            }
            Ok(RopeScaling::None)
        }
        "linear" => Ok(RopeScaling::Linear { factor: keys.required_float("factor")? }),
        "llama3" => Ok(RopeScaling::Llama3 {
            factor: keys.required_float("factor")?,
            low_freq_factor: keys.required_float("low_freq_factor")?,
            high_freq_factor: keys.required_float("high_freq_factor")?,
            original_context: keys.required_size("original_max_position_embeddings")?,
        }),
        "yarn" => parse_yarn(keys, context),
        _ => Err(keys.unsupported(
            if keys.get("rope_type").is_some() { "rope_type" } else { "type" },
            "Levade runs the rotary scalings default, linear, llama3 and yarn; for short contexts, \
             remove the entry from config.json to get the unscaled model",
        )),
    }
}

fn parse_yarn(keys: &Keys, context: usize) -> Result<RopeScaling, ModelError> {
    if !keys.flag("truncate", true)? {
        return Err(keys.unsupported("truncate", "Levade runs YaRN with integer bounds only"));
    }
    let original_context = keys.size("original_max_position_embeddings")?.unwrap_or(context);
    let factor = match keys.float("factor")? {
        Some(factor) => factor,
        None if original_context > 0 && original_context < context => {
            context as f32 / original_context as f32
        }
        None => keys.require("factor", None)?,
    };
    let scales = (keys.float("mscale")?, keys.float("mscale_all_dim")?);
    let attention_factor = match keys.float("attention_factor")? {
        Some(factor) => Some(factor),
        None => match scales {
            (Some(scale), Some(all)) if scale != 0.0 && all != 0.0 => {
                let magnitude =
                    |scale: f32| if factor > 1.0 { 0.1 * scale * factor.ln() + 1.0 } else { 1.0 };
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
    /// Returns the context length before scaling, in tokens, or `None` if this scaling does not
    /// depend on it.
    fn original_context(&self) -> Option<usize> {
        match *self {
            Self::None | Self::Linear { .. } => None,
            Self::Llama3 { original_context, .. } | Self::Yarn { original_context, .. } => {
                Some(original_context)
            }
        }
    }
}
