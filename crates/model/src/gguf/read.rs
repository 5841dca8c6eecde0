//! Parses the GGUF container: metadata and tensor directory, versions 2 and 3, little-endian.
//!
//! The layout is: magic, version, number of tensors, number of metadata entries; the metadata
//! entries (key, type, value); the tensor directory (name, dimensions with the fastest first, type,
//! offset); padding to the alignment; the data. Every length is checked against the remaining bytes
//! of the file before memory is allocated. The memory for a damaged file is therefore at most a
//! small multiple of the file's size.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use super::quant::Encoding;
use crate::ModelError;

/// Metadata value of a GGUF file. Integers of all widths share one variant, because writers choose
/// different widths.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum MetadataValue {
    Integer(i128),
    Float(f64),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    Integers(Vec<i64>),
    Floats(Vec<f32>),
    /// List of another element type, whose elements are not needed. Contains the list's length.
    OtherList(usize),
}

impl MetadataValue {
    /// Returns whether the value is off: false, 0, an empty text or list, `"none"`, or a list of
    /// zeros.
    fn is_off(&self) -> bool {
        match self {
            Self::Integer(value) => *value == 0,
            Self::Float(value) => *value == 0.0,
            Self::Bool(flag) => !flag,
            Self::Text(text) => text.is_empty() || text.eq_ignore_ascii_case("none"),
            Self::Texts(texts) => texts.is_empty(),
            Self::Integers(values) => values.iter().all(|value| *value == 0),
            Self::Floats(values) => values.iter().all(|value| *value == 0.0),
            Self::OtherList(count) => *count == 0,
        }
    }

    /// Describes the value for error messages.
    fn describe(&self) -> String {
        match self {
            Self::Integer(value) => format!("the integer {value}"),
            Self::Float(value) => format!("the number {value}"),
            Self::Bool(value) => format!("{value}"),
            Self::Text(value) => {
                format!("the string {:?}", value.chars().take(40).collect::<String>())
            }
            Self::Texts(texts) => format!("a list of {} strings", texts.len()),
            Self::Integers(values) => format!("a list of {} integers", values.len()),
            Self::Floats(values) => format!("a list of {} numbers", values.len()),
            Self::OtherList(count) => format!("a list of {count}"),
        }
    }
}

/// Entry of a GGUF file's tensor directory.
#[derive(Debug, Clone)]
pub(super) struct TensorEntry {
    /// Row-major shape of the tensor, slowest dimension first: the reverse of the order in the
    /// file.
    pub(super) shape: Vec<usize>,
    pub(super) encoding: Encoding,
    /// Offset of the tensor's data from the start of the file, in bytes. `start + bytes` is at most
    /// the length of the file.
    pub(super) start: usize,
    pub(super) bytes: usize,
}

/// Metadata and tensor directory of a GGUF file, which precede the tensor data.
#[derive(Debug)]
pub(super) struct GgufHeader {
    pub(super) metadata: Metadata,
    pub(super) tensors: HashMap<String, TensorEntry>,
}

impl GgufHeader {
    /// Parses and checks the metadata and the tensor directory, which precede the data of a file.
    pub(super) fn read(path: &Path, bytes: &[u8]) -> Result<Self, ModelError> {
        let mut input = HeaderReader { path, bytes, at: 0 };
        let magic = input.read_bytes(4, "the magic number")?;
        if magic != b"GGUF" {
            return Err(
                input.damaged(format!("the file starts with {magic:?} instead of \"GGUF\""))
            );
        }
        let version = input.read_u32("the version")?;
        match version {
            2 | 3 => {}
            _ if version.swap_bytes() <= 3 => {
                return Err(ModelError::unsupported(
                    path,
                    "the file is a big-endian GGUF file",
                    "use the little-endian version of the model",
                ));
            }
            _ => {
                return Err(ModelError::unsupported(
                    path,
                    format!("the GGUF version is {version}; Levade reads versions 2 and 3"),
                    "convert the model again with a current converter",
                ));
            }
        }
        // The shortest directory entry has an empty name and one dimension. The shortest metadata
        // entry has an empty key and a one-byte value.
        let tensor_count = input.read_u64("the number of tensors")?;
        let tensor_count = input.check_count(tensor_count, 8 + 4 + 8 + 4 + 8, "tensors")?;
        let entry_count = input.read_u64("the number of metadata entries")?;
        let entry_count = input.check_count(entry_count, 8 + 4 + 1, "metadata entries")?;
        let mut entries = HashMap::with_capacity(entry_count);
        for index in 0..entry_count {
            let key = input.text(&format!("the key of metadata entry {index}"))?;
            let kind = input.read_u32(&key)?;
            let value = input.read_value(kind, &key)?;
            if entries.insert(key.clone(), value).is_some() {
                return Err(input.damaged(format!("metadata key {key} appears twice")));
            }
        }
        let metadata = Metadata { path: path.to_path_buf(), entries, read: RefCell::default() };
        let alignment = metadata.size("general.alignment")?.unwrap_or(32);
        if !alignment.is_power_of_two() || alignment > 1 << 20 {
            return Err(input.damaged(format!(
                "general.alignment is {alignment}, not a power of two up to 1048576"
            )));
        }
        let mut raw = Vec::with_capacity(tensor_count);
        for index in 0..tensor_count {
            raw.push(input.read_tensor(index)?);
        }
        let data = input.at.next_multiple_of(alignment);
        let tensors = locate_tensors(&input, raw, data, alignment)?;
        Ok(Self { metadata, tensors })
    }
}

/// Entry of the tensor directory as stored in the file, with its dimensions reversed.
struct RawTensor {
    name: String,
    shape: Vec<usize>,
    encoding: Encoding,
    offset: u64,
}

/// Locates the bytes of every tensor, and checks that the bytes lie in the file and do not overlap.
fn locate_tensors(
    input: &HeaderReader,
    raw: Vec<RawTensor>,
    data: usize,
    alignment: usize,
) -> Result<HashMap<String, TensorEntry>, ModelError> {
    let mut tensors = HashMap::with_capacity(raw.len());
    let mut extents = Vec::with_capacity(raw.len());
    for RawTensor { name, shape, encoding, offset } in raw {
        let bytes = encoding
            .tensor_bytes(&shape)
            .map_err(|why| input.damaged(format!("tensor {name} of shape {shape:?}: {why}")))?;
        if !offset.is_multiple_of(alignment as u64) {
            return Err(input.damaged(format!(
                "tensor {name} starts at offset {offset}, which is not a multiple of the alignment \
                 {alignment}"
            )));
        }
        let start = usize::try_from(offset).ok().and_then(|offset| data.checked_add(offset));
        let end = start.and_then(|start| start.checked_add(bytes));
        let (Some(start), Some(end)) = (start, end) else {
            return Err(input.damaged(format!(
                "tensor {name} starts at offset {offset}, which exceeds the address space"
            )));
        };
        if end > input.bytes.len() {
            return Err(input.damaged(format!(
                "tensor {name} occupies bytes {start} to {end}, but the file has {} bytes",
                input.bytes.len()
            )));
        }
        extents.push((start, end, name.clone()));
        if tensors.insert(name.clone(), TensorEntry { shape, encoding, start, bytes }).is_some() {
            return Err(input.damaged(format!("tensor {name} appears twice")));
        }
    }
    extents.sort();
    for pair in extents.windows(2) {
        if pair[1].0 < pair[0].1 {
            return Err(input.damaged(format!("tensors {} and {} overlap", pair[0].2, pair[1].2)));
        }
    }
    Ok(tensors)
}

/// Cursor over the bytes of a GGUF file. `at` is the offset of the next byte to read.
struct HeaderReader<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> HeaderReader<'a> {
    fn damaged(&self, what: String) -> ModelError {
        ModelError::damaged(self.path, what)
    }

    fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn read_bytes(&mut self, length: usize, what: &str) -> Result<&'a [u8], ModelError> {
        if length > self.remaining() {
            return Err(self.damaged(format!(
                "the file ends inside {what}: {length} bytes are needed at byte {}, but {} are \
                 left",
                self.at,
                self.remaining()
            )));
        }
        let taken = &self.bytes[self.at..self.at + length];
        self.at += length;
        Ok(taken)
    }

    fn read_array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], ModelError> {
        let mut array = [0; N];
        array.copy_from_slice(self.read_bytes(N, what)?);
        Ok(array)
    }

    fn read_u32(&mut self, what: &str) -> Result<u32, ModelError> {
        self.read_array(what).map(u32::from_le_bytes)
    }

    fn read_u64(&mut self, what: &str) -> Result<u64, ModelError> {
        self.read_array(what).map(u64::from_le_bytes)
    }

    /// Checks that `count` elements of at least `smallest` bytes each fit in the remaining bytes,
    /// and returns `count`.
    fn check_count(&self, count: u64, smallest: usize, what: &str) -> Result<usize, ModelError> {
        let max_items = self.remaining() / smallest;
        match usize::try_from(count) {
            Ok(count) if count <= max_items => Ok(count),
            _ => Err(self.damaged(format!(
                "the file declares {count} {what}, but the remaining {} bytes can hold at most \
                 {max_items}",
                self.remaining()
            ))),
        }
    }

    fn text(&mut self, what: &str) -> Result<String, ModelError> {
        let length = self.read_u64(what)?;
        let length = self.check_count(length, 1, &format!("bytes of text in {what}"))?;
        let bytes = self.read_bytes(length, what)?;
        match std::str::from_utf8(bytes) {
            Ok(text) => Ok(text.to_string()),
            Err(error) => Err(self.damaged(format!("{what} is not UTF-8: {error}"))),
        }
    }

    fn read_value(&mut self, kind: u32, key: &str) -> Result<MetadataValue, ModelError> {
        if kind != 9 {
            return self.read_scalar(kind, key);
        }
        let element = self.read_u32(key)?;
        let count = self.read_u64(key)?;
        let smallest = match element {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            other => {
                return Err(self.damaged(format!(
                    "metadata key {key} is a list of elements of the unknown type {other}"
                )));
            }
        };
        let count = self.check_count(count, smallest, &format!("elements in {key}"))?;
        // The integers of vocabularies take 4 bytes in the file and 8 in memory. Lists that are not
        // needed are skipped without an allocation.
        match element {
            8 => (0..count)
                .map(|_| self.text(key))
                .collect::<Result<_, _>>()
                .map(MetadataValue::Texts),
            0..=5 | 11 => {
                let mut values = Vec::with_capacity(count);
                for _ in 0..count {
                    if let MetadataValue::Integer(value) = self.read_scalar(element, key)? {
                        values.push(value as i64);
                    }
                }
                Ok(MetadataValue::Integers(values))
            }
            6 => {
                let bytes = self.read_bytes(count * smallest, key)?;
                let (values, _) = bytes.as_chunks();
                Ok(MetadataValue::Floats(
                    values.iter().map(|value| f32::from_le_bytes(*value)).collect(),
                ))
            }
            _ => self.read_bytes(count * smallest, key).map(|_| MetadataValue::OtherList(count)),
        }
    }

    fn read_scalar(&mut self, kind: u32, key: &str) -> Result<MetadataValue, ModelError> {
        Ok(match kind {
            0 => MetadataValue::Integer(i128::from(u8::from_le_bytes(self.read_array(key)?))),
            1 => MetadataValue::Integer(i128::from(i8::from_le_bytes(self.read_array(key)?))),
            2 => MetadataValue::Integer(i128::from(u16::from_le_bytes(self.read_array(key)?))),
            3 => MetadataValue::Integer(i128::from(i16::from_le_bytes(self.read_array(key)?))),
            4 => MetadataValue::Integer(i128::from(u32::from_le_bytes(self.read_array(key)?))),
            5 => MetadataValue::Integer(i128::from(i32::from_le_bytes(self.read_array(key)?))),
            6 => MetadataValue::Float(f64::from(f32::from_le_bytes(self.read_array(key)?))),
            7 => MetadataValue::Bool(u8::from_le_bytes(self.read_array(key)?) != 0),
            8 => MetadataValue::Text(self.text(key)?),
            10 => MetadataValue::Integer(i128::from(u64::from_le_bytes(self.read_array(key)?))),
            11 => MetadataValue::Integer(i128::from(i64::from_le_bytes(self.read_array(key)?))),
            12 => MetadataValue::Float(f64::from_le_bytes(self.read_array(key)?)),
            other => {
                return Err(
                    self.damaged(format!("metadata key {key} has the unknown type {other}"))
                );
            }
        })
    }

    fn read_tensor(&mut self, index: usize) -> Result<RawTensor, ModelError> {
        let name = self.text(&format!("the name of tensor {index}"))?;
        let dimensions = self.read_u32(&name)?;
        if dimensions == 0 || dimensions > 4 {
            return Err(self.damaged(format!(
                "tensor {name} has {dimensions} dimensions; it must have 1 to 4"
            )));
        }
        let mut shape = Vec::with_capacity(4);
        for _ in 0..dimensions {
            let size = self.read_u64(&name)?;
            let size = usize::try_from(size).map_err(|_| {
                self.damaged(format!(
                    "tensor {name} has a dimension of {size}, which exceeds the address space"
                ))
            })?;
            shape.push(size);
        }
        shape.reverse();
        let kind = self.read_u32(&name)?;
        let offset = self.read_u64(&name)?;
        let encoding = Encoding::from_type_number(kind).ok_or_else(|| {
            ModelError::unsupported(
                self.path,
                format!("tensor {name} is stored as {}", Encoding::unsupported_name(kind)),
                format!("use a version of the model in one of {}", Encoding::NAMES),
            )
        })?;
        Ok(RawTensor { name, shape, encoding, offset })
    }
}

/// Metadata of a GGUF file by key. Records which keys have been read.
#[derive(Debug)]
pub(super) struct Metadata {
    path: PathBuf,
    entries: HashMap<String, MetadataValue>,
    read: RefCell<BTreeSet<String>>,
}

impl Metadata {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn wrong_value_error(&self, key: &str, value: &MetadataValue, wanted: &str) -> ModelError {
        ModelError::config(
            &self.path,
            format!("metadata key {key} is {}; it must be {wanted}", value.describe()),
        )
    }

    /// Creates the error for a required metadata key that is absent.
    pub(super) fn missing_key_error(&self, key: &str) -> ModelError {
        ModelError::config(&self.path, format!("metadata key {key} is missing"))
    }

    /// Rejects an unread key of the architecture unless its value is off or `changes_nothing`
    /// returns true, because the key may change what the model computes. `changes_nothing` receives
    /// the key without the architecture's prefix, and the value if it is a number.
    pub(super) fn check_unread(
        &self,
        architecture: &str,
        changes_nothing: impl Fn(&str, Option<f64>) -> bool,
    ) -> Result<(), ModelError> {
        let read = self.read.borrow();
        let is_unread = |(key, value): &(&String, &MetadataValue)| {
            let name = key.strip_prefix(architecture).and_then(|rest| rest.strip_prefix('.'));
            let number = match value {
                MetadataValue::Integer(value) => Some(*value as f64),
                MetadataValue::Float(value) => Some(*value),
                _ => None,
            };
            name.is_some_and(|name| {
                !read.contains(*key) && !value.is_off() && !changes_nothing(name, number)
            })
        };
        match self.entries.iter().filter(is_unread).min_by_key(|(key, _)| *key) {
            None => Ok(()),
            Some((key, value)) => Err(ModelError::unsupported(
                &self.path,
                format!("metadata key {key} is {}, which Levade does not know", value.describe()),
                "the key may change what the model computes: use the model's Hugging Face \
                 directory",
            )),
        }
    }

    /// Returns the value of a metadata key as an integer ≥ 0, or `None` if the key is absent.
    pub(super) fn size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        self.get(key, "an integer ≥ 0", |value| match value {
            MetadataValue::Integer(value) => usize::try_from(*value).ok(),
            _ => None,
        })
    }

    /// Returns the value of a metadata key as a token id, or `None` if the key is absent.
    pub(super) fn token(&self, key: &str) -> Result<Option<u32>, ModelError> {
        self.get(key, "a token id", |value| match value {
            MetadataValue::Integer(value) => u32::try_from(*value).ok(),
            _ => None,
        })
    }

    pub(super) fn float(&self, key: &str) -> Result<Option<f32>, ModelError> {
        self.get(key, "a number", |value| match value {
            MetadataValue::Float(value) => Some(*value as f32),
            _ => None,
        })
    }

    pub(super) fn bool(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.get(key, "true or false", |value| match value {
            MetadataValue::Bool(value) => Some(*value),
            _ => None,
        })
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&str>, ModelError> {
        self.get(key, "a string", |value| match value {
            MetadataValue::Text(value) => Some(value.as_str()),
            _ => None,
        })
    }

    pub(super) fn texts(&self, key: &str) -> Result<Option<&[String]>, ModelError> {
        self.get(key, "a list of strings", |value| match value {
            MetadataValue::Texts(texts) => Some(texts.as_slice()),
            _ => None,
        })
    }

    pub(super) fn integers(&self, key: &str) -> Result<Option<&[i64]>, ModelError> {
        self.get(key, "a list of integers", |value| match value {
            MetadataValue::Integers(values) => Some(values.as_slice()),
            _ => None,
        })
    }

    pub(super) fn floats(&self, key: &str) -> Result<Option<&[f32]>, ModelError> {
        self.get(key, "a list of numbers", |value| match value {
            MetadataValue::Floats(values) => Some(values.as_slice()),
            _ => None,
        })
    }

    fn get<'a, T>(
        &'a self,
        key: &str,
        wanted: &str,
        convert: impl FnOnce(&'a MetadataValue) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        self.read.borrow_mut().insert(key.to_owned());
        let Some(value) = self.entries.get(key) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| self.wrong_value_error(key, value, wanted))
    }
}
