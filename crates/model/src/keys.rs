//! Reads a JSON object of a model's files key by key, and rejects unknown keys that may matter.
//!
//! [`Keys`] records which keys have been read. At the end, [`Keys::check_unread`] checks every
//! remaining key, so that no unknown key is silently ignored:
//!
//! - A key that is off (`null`, `false`, 0, empty, `"none"`) is accepted.
//! - A key that is known to have no effect on the computation is accepted.
//! - A string under a key that names no part of a model is taken for a remark by the file's author,
//!   and becomes a note for the user.
//! - Any other key is rejected by name, because it may change what the model computes.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Map, Value};

use crate::ModelError;

/// Substrings of keys that name a part of a model. An unknown string under such a key may change
/// what the model computes.
const PARTS: [&str; 31] = [
    "act",
    "adapter",
    "arch",
    "attn",
    "attention",
    "bias",
    "cap",
    "causal",
    "chunk",
    "conv",
    "embed",
    "expert",
    "ffn",
    "gate",
    "head",
    "hidden",
    "layer",
    "logit",
    "lora",
    "mask",
    "mixer",
    "mlp",
    "moe",
    "norm",
    "position",
    "quant",
    "residual",
    "rope",
    "rotary",
    "scal",
    "window",
];

/// JSON object of a file, which records the keys that have been read. Its errors name the file and
/// the key.
pub(crate) struct Keys<'a> {
    pub(crate) path: &'a Path,
    /// Prefix of the keys in messages: empty, or the key of the enclosing object and a dot.
    outer: &'a str,
    object: &'a Map<String, Value>,
    read: RefCell<BTreeSet<String>>,
}

impl<'a> Keys<'a> {
    pub(crate) fn new(path: &'a Path, outer: &'a str, object: &'a Map<String, Value>) -> Self {
        Self { path, outer, object, read: RefCell::default() }
    }

    /// Returns the value of a key and marks the key as read. Returns `None` if the key is absent or
    /// null.
    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.read.borrow_mut().insert(key.to_owned());
        self.object.get(key).filter(|value| !value.is_null())
    }

    /// Returns whether the object contains the key, even if its value is null.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.object.contains_key(key)
    }

    pub(crate) fn read<T>(
        &self,
        key: &str,
        wanted: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| {
            let what = format!("{}{key} is {}; it must be {wanted}", self.outer, shorten(value));
            ModelError::config(self.path, what)
        })
    }

    pub(crate) fn require<T>(&self, key: &str, value: Option<T>) -> Result<T, ModelError> {
        value
            .ok_or_else(|| ModelError::config(self.path, format!("{}{key} is missing", self.outer)))
    }

    pub(crate) fn size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        self.read(key, "an integer ≥ 0", |value| {
            value.as_u64().and_then(|value| value.try_into().ok())
        })
    }

    pub(crate) fn required_size(&self, key: &str) -> Result<usize, ModelError> {
        self.require(key, self.size(key)?)
    }

    pub(crate) fn float(&self, key: &str) -> Result<Option<f32>, ModelError> {
        self.read(key, "a number", |value| value.as_f64().map(|value| value as f32))
    }

    pub(crate) fn required_float(&self, key: &str) -> Result<f32, ModelError> {
        self.require(key, self.float(key)?)
    }

    pub(crate) fn flag(&self, key: &str, default: bool) -> Result<bool, ModelError> {
        Ok(self.read(key, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        self.read(key, "a string", Value::as_str)
    }

    pub(crate) fn token(&self, key: &str) -> Result<Option<u32>, ModelError> {
        self.read(key, "a token id", token_id)
    }

    pub(crate) fn object(&self, key: &str) -> Result<Option<&'a Map<String, Value>>, ModelError> {
        self.read(key, "an object", Value::as_object)
    }

    pub(crate) fn unsupported(&self, key: &str, way_out: &str) -> ModelError {
        let value = self.object.get(key).map_or_else(|| "absent".into(), shorten);
        ModelError::unsupported(self.path, format!("{}{key} is {value}", self.outer), way_out)
    }

    /// Rejects a key whose value is not off (see [`is_off`]).
    pub(crate) fn reject(&self, key: &str, way_out: &str) -> Result<(), ModelError> {
        match self.get(key) {
            Some(value) if !is_off(value) => Err(self.unsupported(key, way_out)),
            _ => Ok(()),
        }
    }

    /// Rejects a key whose value is not `neutral`, the value that has no effect. An absent or null
    /// key is accepted.
    pub(crate) fn reject_unless(
        &self,
        key: &str,
        neutral: &Value,
        way_out: &str,
    ) -> Result<(), ModelError> {
        let is_neutral = |value: &Value| {
            value == neutral || (value.is_number() && value.as_f64() == neutral.as_f64())
        };
        match self.get(key) {
            Some(value) if !is_neutral(value) => Err(self.unsupported(key, way_out)),
            _ => Ok(()),
        }
    }

    /// Checks the keys that have not been read, by the rules in the [module documentation](self),
    /// and returns notes for the user. `is_harmless` returns whether a key is known to have no
    /// effect.
    ///
    /// # Errors
    /// Returns [`ModelError::Unsupported`] with the key if a key may change what the model
    /// computes.
    pub(crate) fn check_unread(
        &self,
        is_harmless: impl Fn(&str) -> bool,
        way_out: &str,
    ) -> Result<Vec<String>, ModelError> {
        let mut notes = Vec::new();
        let read = self.read.borrow();
        for (key, value) in self.object {
            if read.contains(key) || is_off(value) || is_harmless(key) {
                continue;
            }
            let lower = key.to_ascii_lowercase();
            if !value.is_string() || PARTS.iter().any(|part| lower.contains(part)) {
                return Err(self.unsupported(key, way_out));
            }
            notes.push(format!(
                "{}: {}{key} is {}, which Levade does not know; the key is ignored",
                self.path.display(),
                self.outer,
                shorten(value)
            ));
        }
        Ok(notes)
    }
}

/// Returns whether a JSON value means "off": null, false, 0, empty, `"none"` in any case, or an
/// object whose values are all off.
pub(crate) fn is_off(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(flag) => !flag,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty() || text.eq_ignore_ascii_case("none"),
        Value::Array(list) => list.is_empty(),
        Value::Object(entries) => entries.values().all(is_off),
    }
}

/// Returns the first 60 characters of a JSON value, for messages.
fn shorten(value: &Value) -> String {
    value.to_string().chars().take(60).collect()
}

pub(crate) fn token_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

/// Parses a token id or a list of token ids, the formats of `eos_token_id`. Returns `None` if the
/// value is neither.
pub(crate) fn token_ids(value: &Value) -> Option<Vec<u32>> {
    match value {
        Value::Array(ids) => ids.iter().map(token_id).collect(),
        id => token_id(id).map(|id| vec![id]),
    }
}
