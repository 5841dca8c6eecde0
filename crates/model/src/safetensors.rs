//! Safetensors files, in and out.
//!
//! Reading maps the file into memory and converts one tensor at a time to f32. Everything that the header
//! says is checked against the file when it is opened: afterwards every tensor's bytes are where the header
//! puts them, and no two tensors share any. Writing streams f32 tensors to the disk and flushes them. It is
//! not atomic: the caller writes into a temporary folder and renames.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use memmap2::Mmap;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::ModelError;

/// No model's header comes near this; a longer one is damage.
const LONGEST_HEADER: u64 = 100 << 20;

/// A file mapped into memory.
///
/// # Errors
/// When it cannot be opened or mapped, is empty, or something else stands in its place.
pub(crate) fn map(path: &Path) -> Result<Mmap, ModelError> {
    let file = File::open(path).map_err(ModelError::io("open", path))?;
    let facts = file.metadata().map_err(ModelError::io("read", path))?;
    if facts.len() == 0 {
        return Err(ModelError::damaged(path, "it is empty"));
    }
    // SAFETY: the map is private and read-only. Nothing in Levade writes to a weight file in place (files
    // are written under another name and renamed); another program that shrinks the file meanwhile would end
    // the process with a bus error, as it would for every program that maps its weights.
    let bytes = unsafe { Mmap::map(&file) }.map_err(ModelError::io("map", path))?;
    crate::placeholder::refuse(path, &bytes)?;
    Ok(bytes)
}

/// Entry of a tensor in the header.
#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [usize; 2],
}

impl Entry {
    /// Bytes of an element; `None` for types that are not whole bytes or not known.
    fn width(&self) -> Option<usize> {
        match self.dtype.as_str() {
            "F64" | "I64" | "U64" => Some(8),
            "F32" | "I32" | "U32" => Some(4),
            "F16" | "BF16" | "I16" | "U16" => Some(2),
            "I8" | "U8" | "BOOL" | "F8_E4M3" | "F8_E5M2" => Some(1),
            _ => None,
        }
    }
}

/// One open file, its layout checked.
pub struct SafetensorsFile {
    path: PathBuf,
    bytes: Mmap,
    data_start: usize,
    entries: HashMap<String, Entry>,
}

impl SafetensorsFile {
    /// Opens a file and checks everything that its header says.
    ///
    /// # Errors
    /// When it cannot be opened, or its header contradicts itself or the file's length.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let bytes = map(path)?;
        let damaged = |what: String| ModelError::damaged(path, what);
        let header_length = match bytes.first_chunk::<8>() {
            Some(length) => u64::from_le_bytes(*length),
            None => {
                return Err(damaged(format!("it has {} bytes, less than the shortest header", bytes.len())));
            }
        };
        if header_length > LONGEST_HEADER || header_length + 8 > bytes.len() as u64 {
            return Err(damaged(format!(
                "its header should take {header_length} bytes, the file has {}",
                bytes.len()
            )));
        }
        let data_start = 8 + header_length as usize;
        let header: Map<String, Value> = serde_json::from_slice(&bytes[8..data_start])
            .map_err(|error| damaged(format!("its header is not a JSON object: {error}")))?;
        let mut entries = HashMap::with_capacity(header.len());
        for (name, value) in header {
            if name != "__metadata__" {
                let entry = Entry::deserialize(value)
                    .map_err(|error| damaged(format!("the header's entry for tensor {name:?}: {error}")))?;
                entries.insert(name, entry);
            }
        }
        check_layout(&entries, bytes.len() - data_start).map_err(damaged)?;
        Ok(Self { path: path.to_path_buf(), bytes, data_start, entries })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Gives tensors the names that `rename` answers, where it answers one.
    pub(crate) fn rename(&mut self, rename: impl Fn(&str) -> Option<String>) {
        let entries = std::mem::take(&mut self.entries);
        let renamed = entries.into_iter().map(|(name, entry)| (rename(&name).unwrap_or(name), entry));
        self.entries = renamed.collect();
    }

    /// Leaves out the tensors whose names `keep` does not hold of.
    pub(crate) fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        self.entries.retain(|name, _| keep(name));
    }

    /// Name and shape of every tensor, in no particular order.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.entries.iter().map(|(name, entry)| (name.as_str(), entry.shape.as_slice()))
    }

    /// The shape of a tensor, if the file has it.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.entries.get(name).map(|entry| entry.shape.as_slice())
    }

    /// Checks that a tensor is there with `shape` and can be read; reads nothing.
    ///
    /// # Errors
    /// When there is no such tensor, its shape is another, or its type is not a floating-point one that can
    /// be read.
    pub fn check_shaped(&self, name: &str, shape: &[usize]) -> Result<(), ModelError> {
        if self.shape(name) != Some(shape) {
            return Err(ModelError::damaged(&self.path, format!("it has no {name} of shape {shape:?}")));
        }
        self.readable(name).map(drop)
    }

    /// The header's entry for a tensor that is there, and of a type that can be read.
    fn readable(&self, name: &str) -> Result<&Entry, ModelError> {
        match self.entries.get(name) {
            None => Err(ModelError::damaged(&self.path, format!("it has no tensor {name}"))),
            Some(entry) if matches!(entry.dtype.as_str(), "F32" | "F16" | "BF16" | "F64") => Ok(entry),
            Some(entry) => Err(ModelError::unsupported(
                &self.path,
                format!("tensor {name} is stored as {}", entry.dtype),
                "Levade reads F32, F16, BF16 and F64: take a version of the model that is not quantised",
            )),
        }
    }

    /// The type and the bytes of a tensor, as they lie in the file.
    pub(crate) fn bytes(&self, name: &str) -> Result<(&str, &[u8]), ModelError> {
        let entry = self.readable(name)?;
        let [from, to] = entry.data_offsets;
        // Within the file: checked when it was opened.
        Ok((&entry.dtype, &self.bytes[self.data_start + from..self.data_start + to]))
    }

    /// Fills `out`, whose length is the product of the tensor's shape, row-major.
    ///
    /// # Errors
    /// When there is no such tensor, or its type is not a floating-point one that can be read.
    pub fn read(&self, name: &str, out: &mut [f32]) -> Result<(), ModelError> {
        let (dtype, data) = self.bytes(name)?;
        match dtype {
            "F32" => convert(data, out, f32::from_le_bytes),
            "F16" => convert(data, out, |bytes| f16::from_le_bytes(bytes).to_f32()),
            "BF16" => convert(data, out, |bytes| bf16::from_le_bytes(bytes).to_f32()),
            _ => convert(data, out, |bytes| f64::from_le_bytes(bytes) as f32),
        }
        Ok(())
    }
}

/// Whether the tensors tile `length` bytes of data, each with the bytes that its type and shape take.
fn check_layout(entries: &HashMap<String, Entry>, length: usize) -> Result<(), String> {
    let mut ordered: Vec<_> = entries.iter().collect();
    ordered.sort_by_key(|(name, entry)| (entry.data_offsets, name.as_str()));
    let mut end = 0;
    for (name, entry) in ordered {
        let [from, to] = entry.data_offsets;
        if from != end || to < from {
            return Err(format!(
                "tensor {name} takes bytes {from} to {to} of the data; it should begin at {end}"
            ));
        }
        if to > length {
            return Err(format!("tensor {name} ends at byte {to} of the data, which has {length}"));
        }
        let elements = entry.shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
        if let Some(width) = entry.width()
            && elements.and_then(|elements| elements.checked_mul(width)) != Some(to - from)
        {
            return Err(format!(
                "tensor {name} has {} bytes, which its shape {:?} of {} does not take",
                to - from,
                entry.shape,
                entry.dtype
            ));
        }
        end = to;
    }
    if end != length {
        return Err(format!("its tensors take {end} bytes, the file has {length} for them"));
    }
    Ok(())
}

fn convert<const N: usize>(data: &[u8], out: &mut [f32], decode: impl Fn([u8; N]) -> f32) {
    for (value, item) in out.iter_mut().zip(data.as_chunks::<N>().0) {
        *value = decode(*item);
    }
}

/// Writes f32 tensors (name, shape, row-major values) as a safetensors file in the order given, streaming: no
/// copy of the weights is made. The file is flushed to the disk. A file that could not be completed is
/// removed.
///
/// # Errors
/// When the disk is full or the file cannot be written (which one, why), or a tensor's values do not fill its
/// shape.
pub fn write_safetensors<'a>(
    path: &Path,
    tensors: impl IntoIterator<Item = (String, Vec<usize>, &'a [f32])>,
) -> Result<(), ModelError> {
    let (shapes, values): (Vec<_>, Vec<_>) =
        tensors.into_iter().map(|(name, shape, data)| ((name, shape), data)).unzip();
    write_safetensors_with(path, &shapes, |index| Cow::Borrowed(values[index]))
}

/// Writes like [`write_safetensors`], of values that are made as they are written: `values` is asked for
/// those of each tensor once, in order.
///
/// # Errors
/// As [`write_safetensors`].
pub fn write_safetensors_with<'a>(
    path: &Path,
    tensors: &[(String, Vec<usize>)],
    mut values: impl FnMut(usize) -> Cow<'a, [f32]>,
) -> Result<(), ModelError> {
    let mut header = Map::new();
    // Transformers refuses a file that does not say which framework's layout it has.
    header.insert("__metadata__".into(), json!({ "format": "pt" }));
    let mut offset = 0usize;
    for (name, shape) in tensors {
        let end = offset + shape.iter().product::<usize>() * size_of::<f32>();
        header.insert(name.clone(), json!({ "dtype": "F32", "shape": shape, "data_offsets": [offset, end] }));
        offset = end;
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    // Spaces to a multiple of eight, so that readers find the data aligned.
    header.resize(header.len().next_multiple_of(8), b' ');
    let needed = (8 + header.len() + offset) as u64;
    write_whole(path, needed, |out| {
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        for (index, (name, shape)) in tensors.iter().enumerate() {
            let data = values(index);
            if shape.iter().product::<usize>() != data.len() {
                let what = format!("tensor {name} of shape {shape:?} was given {} values", data.len());
                return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, what));
            }
            for chunk in data.chunks(1 << 14) {
                let mut bytes = [0u8; 4 << 14];
                for (slot, value) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(chunk) {
                    *slot = value.to_le_bytes();
                }
                out.write_all(&bytes[..4 * chunk.len()])?;
            }
        }
        Ok(())
    })
}

/// Creates the file, lets `fill` write it, and flushes it to the disk; removes it where any of this fails.
pub(crate) fn write_whole(
    path: &Path,
    needed: u64,
    fill: impl FnOnce(&mut BufWriter<File>) -> std::io::Result<()>,
) -> Result<(), ModelError> {
    let file = File::create(path).map_err(ModelError::io("create", path))?;
    let mut out = BufWriter::with_capacity(1 << 16, file);
    let written = fill(&mut out)
        .and_then(|()| out.flush())
        // Some file systems report a full disk only here.
        .and_then(|()| out.get_ref().sync_all());
    written.map_err(|cause| {
        // The first failure is the one to report; a file that cannot be removed either is harmless.
        let _ = std::fs::remove_file(path);
        ModelError::writing(path, needed)(cause)
    })
}
