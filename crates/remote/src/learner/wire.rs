//! Bodies of requests and responses: a safetensors file, whose metadata contains the control part
//! as JSON.
//!
//! Arrays are one-dimensional: integers are I64, log-probabilities F32 (NaN if absent), flags U8.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};

use bytes::Bytes;
use safetensors::tensor::{Dtype, SafeTensors, View, serialize};
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Key of the safetensors metadata entry that contains the JSON part of a body.
const JSON: &str = "json";

/// One-dimensional array of a request or response body.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum BodyArray {
    /// Ids, indices or counts as `i64`.
    I64(Vec<i64>),
    /// Numbers per token as `f32`.
    F32(Vec<f32>),
    /// Flags as `u8`, 0 or 1.
    U8(Vec<u8>),
}

/// Body of a request or response of the learner protocol: a JSON part and named arrays.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Body {
    /// JSON part of the body.
    pub json: Value,
    arrays: BTreeMap<String, BodyArray>,
}

/// Raw bytes of an array, with its data type and shape.
struct RawArray<'a> {
    dtype: Dtype,
    shape: [usize; 1],
    bytes: Cow<'a, [u8]>,
}

impl View for RawArray<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

impl BodyArray {
    fn to_raw(&self) -> RawArray<'_> {
        let (dtype, len, bytes) = match self {
            BodyArray::I64(values) => {
                let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                (Dtype::I64, values.len(), Cow::Owned(bytes))
            }
            BodyArray::F32(values) => {
                let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                (Dtype::F32, values.len(), Cow::Owned(bytes))
            }
            BodyArray::U8(values) => (Dtype::U8, values.len(), Cow::Borrowed(&values[..])),
        };
        RawArray { dtype, shape: [len], bytes }
    }
}

impl Body {
    /// Creates a body with the JSON part `json` and without arrays.
    pub fn new(json: Value) -> Self {
        Body { json, arrays: BTreeMap::new() }
    }

    /// Adds an array of integers to the body.
    pub fn put_integers<T: Into<i64>>(&mut self, name: &str, values: impl IntoIterator<Item = T>) {
        self.arrays
            .insert(name.into(), BodyArray::I64(values.into_iter().map(Into::into).collect()));
    }

    /// Adds an array of `f32` to the body.
    pub fn put_numbers(&mut self, name: &str, values: impl IntoIterator<Item = f32>) {
        self.arrays.insert(name.into(), BodyArray::F32(values.into_iter().collect()));
    }

    /// Adds an array of flags to the body.
    pub fn put_flags(&mut self, name: &str, values: impl IntoIterator<Item = bool>) {
        self.arrays.insert(name.into(), BodyArray::U8(values.into_iter().map(u8::from).collect()));
    }

    /// Serializes the body in the safetensors format.
    ///
    /// # Errors
    /// Returns an error message if the body cannot be serialized.
    pub fn to_bytes(&self) -> Result<Bytes, String> {
        let metadata = HashMap::from([(JSON.to_owned(), self.json.to_string())]);
        let arrays = self.arrays.iter().map(|(name, array)| (name, array.to_raw()));
        serialize(arrays, Some(metadata)).map(Bytes::from).map_err(|error| error.to_string())
    }

    /// Parses a body in the safetensors format.
    ///
    /// # Errors
    /// Returns an error message if the bytes are invalid, or if an array is not one-dimensional or
    /// has another type than [`BodyArray`] permits.
    pub fn read(bytes: &[u8]) -> Result<Self, String> {
        let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(read_error)?;
        let file = SafeTensors::deserialize(bytes).map_err(read_error)?;
        let json = metadata.metadata().as_ref().and_then(|metadata| metadata.get(JSON));
        let json = json.map_or(Ok(Value::Null), |text| serde_json::from_str(text));
        let json =
            json.map_err(|error| format!("the JSON part of the body is not JSON: {error}"))?;
        let mut arrays = BTreeMap::new();
        for (name, view) in file.tensors() {
            if view.shape().len() != 1 {
                return Err(format!(
                    "the array {name} has the shape {:?}, but must be one-dimensional",
                    view.shape()
                ));
            }
            let array = match view.dtype() {
                Dtype::I64 => BodyArray::I64(convert_chunks(view.data(), i64::from_le_bytes)),
                Dtype::F32 => BodyArray::F32(convert_chunks(view.data(), f32::from_le_bytes)),
                Dtype::U8 => BodyArray::U8(view.data().to_vec()),
                other => {
                    return Err(format!(
                        "the array {name} is of type {other}, but must be I64, F32 or U8"
                    ));
                }
            };
            arrays.insert(name, array);
        }
        Ok(Body { json, arrays })
    }

    /// Removes and returns the array `name` of `len` `f32` values.
    ///
    /// # Errors
    /// Returns an error message if the array is missing or has another length.
    pub fn take_numbers(&mut self, name: &str, len: usize) -> Result<Vec<f32>, String> {
        match self.arrays.remove(name) {
            Some(BodyArray::F32(values)) if values.len() == len => Ok(values),
            Some(BodyArray::F32(values)) => {
                Err(format!("the array {name} has {} numbers, but must have {len}", values.len()))
            }
            Some(_) => Err(format!("the array {name} is not of type F32")),
            None => Err(format!("the array {name} is missing")),
        }
    }

    /// Removes and returns the value `name` of the JSON part.
    ///
    /// # Errors
    /// Returns an error message if the value is missing or has another type.
    pub fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<T, String> {
        let value = self
            .json
            .get_mut(name)
            .map(Value::take)
            .ok_or_else(|| format!("the value {name} is missing"))?;
        serde_json::from_value(value)
            .map_err(|error| format!("the value {name} cannot be read: {error}"))
    }

    /// Removes and returns the array of integers `name`.
    #[cfg(test)]
    pub fn take_integers<T: TryFrom<i64>>(&mut self, name: &str) -> Result<Vec<T>, String> {
        let Some(BodyArray::I64(values)) = self.arrays.remove(name) else {
            return Err(format!("the body has no array of integers {name}"));
        };
        values
            .into_iter()
            .map(|value: i64| {
                T::try_from(value).map_err(|_| format!("{name}: {value} is out of range"))
            })
            .collect()
    }

    /// Removes and returns the array of `f32` values `name`, whatever its length.
    #[cfg(test)]
    pub fn take_all(&mut self, name: &str) -> Result<Vec<f32>, String> {
        match self.arrays.remove(name) {
            Some(BodyArray::F32(values)) => Ok(values),
            _ => Err(format!("the body has no array of numbers {name}")),
        }
    }

    /// Removes and returns the array of flags `name`.
    #[cfg(test)]
    pub fn take_flags(&mut self, name: &str) -> Result<Vec<bool>, String> {
        match self.arrays.remove(name) {
            Some(BodyArray::U8(values)) => Ok(values.into_iter().map(|value| value != 0).collect()),
            _ => Err(format!("the body has no array of flags {name}")),
        }
    }
}

fn read_error(error: safetensors::SafeTensorError) -> String {
    format!("the body is not a safetensors file: {error}")
}

/// Converts each chunk of `N` little-endian bytes with `value`. The bytes need not be aligned.
fn convert_chunks<const N: usize, T>(bytes: &[u8], value: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.chunks_exact(N).filter_map(|chunk| chunk.try_into().ok()).map(value).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn bodies_round_trip_through_safetensors() {
        let mut body = Body::new(json!({ "step": { "applied": true }, "n": 3 }));
        body.put_integers("tokens", [1u32, u32::MAX]);
        body.put_numbers("logprobs", [-0.25, f32::MIN_POSITIVE, 0.0]);
        body.put_flags("marked", [true, false, true]);
        body.put_integers("none", [0u32; 0]);
        let bytes = body.to_bytes().unwrap();
        let mut read = Body::read(&bytes).unwrap();
        assert_eq!(read, body);
        assert_eq!(
            read.take_numbers("logprobs", 2).unwrap_err(),
            "the array logprobs has 3 numbers, but must have 2"
        );
        assert_eq!(read.take_numbers("logprobs", 3).unwrap_err(), "the array logprobs is missing");
        assert_eq!(read.take_integers::<u32>("tokens").unwrap(), [1, u32::MAX]);
        assert_eq!(read.take::<u32>("n"), Ok(3));
        assert_eq!(read.take::<u32>("m"), Err("the value m is missing".into()));
        assert!(read.take::<u32>("step").unwrap_err().starts_with("the value step cannot be read"));
        // NaN, which marks an absent number, is preserved.
        let mut body = Body::default();
        body.put_numbers("value", [f32::NAN]);
        let mut read = Body::read(&body.to_bytes().unwrap()).unwrap();
        assert!(read.take_numbers("value", 1).unwrap()[0].is_nan());
    }

    #[test]
    fn body_read_reports_invalid_safetensors() {
        assert!(Body::read(b"").unwrap_err().contains("not a safetensors file"));
        assert!(Body::read(b"{\"error\": 1}").unwrap_err().contains("not a safetensors file"));
        let complete = Body::new(json!({})).to_bytes().unwrap();
        assert!(Body::read(&complete[..complete.len() - 1]).is_err());
        let double = RawArray { dtype: Dtype::F64, shape: [1], bytes: Cow::Owned(vec![0; 8]) };
        let bytes = serialize([("x", double)], None).unwrap();
        assert_eq!(
            Body::read(&bytes).unwrap_err(),
            "the array x is of type F64, but must be I64, F32 or U8"
        );
    }
}
