//! Reads and writes safetensors files.
//!
//! Reading maps the file into memory and converts one tensor at a time to f32. Opening a file
//! checks its complete header against the file: afterwards, the bytes of every tensor lie at the
//! header's offsets, and no two tensors overlap. Writing streams f32 tensors to the disk and
//! flushes them. Writing is not atomic: the caller writes into a temporary directory and renames
//! it.

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

/// Maximum length of a safetensors header, in bytes. Headers of real models are far shorter, so a
/// longer header means that the file is damaged.
const MAX_HEADER_BYTES: u64 = 100 << 20;

/// Maps a file into memory, read-only.
///
/// # Errors
/// Returns an error if the file cannot be opened or mapped, is empty, or is a placeholder such as a
/// Git LFS pointer.
pub(crate) fn map_file(path: &Path) -> Result<Mmap, ModelError> {
    let file = File::open(path).map_err(ModelError::io_error("open", path))?;
    let facts = file.metadata().map_err(ModelError::io_error("read", path))?;
    if facts.len() == 0 {
        return Err(ModelError::damaged(path, "the file is empty"));
    }
    // SAFETY: the map is private and read-only. Nothing in Levade writes to a weight file in place:
    // files are written under another name and renamed. If another program shrinks the file while
    // it is mapped, a bus error ends the process, as in every program that maps its weights.
    let bytes = unsafe { Mmap::map(&file) }.map_err(ModelError::io_error("map", path))?;
    crate::placeholder::reject_placeholder(path, &bytes)?;
    Ok(bytes)
}

/// Entry of a safetensors header that describes one tensor.
#[derive(Deserialize)]
struct TensorHeader {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [usize; 2],
}

impl TensorHeader {
    /// Returns the size of one element in bytes, or `None` if the type is unknown or its elements
    /// are not a whole number of bytes.
    fn element_size(&self) -> Option<usize> {
        match self.dtype.as_str() {
            "F64" | "I64" | "U64" => Some(8),
            "F32" | "I32" | "U32" => Some(4),
            "F16" | "BF16" | "I16" | "U16" => Some(2),
            "I8" | "U8" | "BOOL" | "F8_E4M3" | "F8_E5M2" => Some(1),
            _ => None,
        }
    }
}

/// Open safetensors file whose layout has been checked.
pub struct SafetensorsFile {
    path: PathBuf,
    bytes: Mmap,
    data_start: usize,
    entries: HashMap<String, TensorHeader>,
}

impl SafetensorsFile {
    /// Opens a safetensors file and checks its complete header.
    ///
    /// # Errors
    /// Returns an error if the file cannot be opened, or if its header contradicts itself or the
    /// file's length.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let bytes = map_file(path)?;
        let damaged = |what: String| ModelError::damaged(path, what);
        let header_length = match bytes.first_chunk::<8>() {
            Some(length) => u64::from_le_bytes(*length),
            None => {
                return Err(damaged(format!(
                    "the file has {} bytes, fewer than the shortest header",
                    bytes.len()
                )));
            }
        };
        if header_length > MAX_HEADER_BYTES || header_length + 8 > bytes.len() as u64 {
            return Err(damaged(format!(
                "the header has {header_length} bytes according to its length field, but the file \
                 has {}",
                bytes.len()
            )));
        }
        let data_start = 8 + header_length as usize;
        let header: Map<String, Value> = serde_json::from_slice(&bytes[8..data_start])
            .map_err(|error| damaged(format!("the header is not a JSON object: {error}")))?;
        let mut entries = HashMap::with_capacity(header.len());
        for (name, value) in header {
            if name != "__metadata__" {
                let entry = TensorHeader::deserialize(value).map_err(|error| {
                    damaged(format!("the header's entry for tensor {name:?}: {error}"))
                })?;
                entries.insert(name, entry);
            }
        }
        check_layout(&entries, bytes.len() - data_start).map_err(damaged)?;
        Ok(Self { path: path.to_path_buf(), bytes, data_start, entries })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Renames each tensor for which `rename` returns a new name. Other tensors keep their names.
    pub(crate) fn rename(&mut self, rename: impl Fn(&str) -> Option<String>) {
        let entries = std::mem::take(&mut self.entries);
        let renamed =
            entries.into_iter().map(|(name, entry)| (rename(&name).unwrap_or(name), entry));
        self.entries = renamed.collect();
    }

    /// Keeps only the tensors whose name satisfies `keep`; other tensors are hidden.
    pub(crate) fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        self.entries.retain(|name, _| keep(name));
    }

    /// Returns the name and shape of every tensor, in no particular order.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.entries.iter().map(|(name, entry)| (name.as_str(), entry.shape.as_slice()))
    }

    /// Returns the shape of a tensor, or `None` if the file does not contain the tensor.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.entries.get(name).map(|entry| entry.shape.as_slice())
    }

    /// Checks that the file contains a tensor with the shape `shape` and a readable type. Reads no
    /// data.
    ///
    /// # Errors
    /// Returns an error if the file does not contain the tensor, the shape differs, or the type is
    /// not F32, F16, BF16 or F64.
    pub fn check_shaped(&self, name: &str, shape: &[usize]) -> Result<(), ModelError> {
        if self.shape(name) != Some(shape) {
            return Err(ModelError::damaged(
                &self.path,
                format!("the file has no tensor {name} of shape {shape:?}"),
            ));
        }
        self.find_readable(name).map(drop)
    }

    /// Returns the header's entry for a tensor, or an error if the file does not contain the tensor
    /// or its type cannot be read.
    fn find_readable(&self, name: &str) -> Result<&TensorHeader, ModelError> {
        match self.entries.get(name) {
            None => Err(ModelError::damaged(&self.path, format!("the file has no tensor {name}"))),
            Some(entry) if matches!(entry.dtype.as_str(), "F32" | "F16" | "BF16" | "F64") => {
                Ok(entry)
            }
            Some(entry) => Err(ModelError::unsupported(
                &self.path,
                format!("tensor {name} is stored as {}", entry.dtype),
                "Levade reads F32, F16, BF16 and F64: use a version of the model that is not \
                 quantized",
            )),
        }
    }

    /// Returns the type of a tensor and its bytes in the file.
    pub(crate) fn bytes(&self, name: &str) -> Result<(&str, &[u8]), ModelError> {
        let entry = self.find_readable(name)?;
        let [from, to] = entry.data_offsets;
        // The range lies within the file: `open` has checked the offsets.
        Ok((&entry.dtype, &self.bytes[self.data_start + from..self.data_start + to]))
    }

    /// Converts a tensor to f32 and writes its values to `out`, row-major. The length of `out` must
    /// be the product of the tensor's shape.
    ///
    /// # Errors
    /// Returns an error if the file does not contain the tensor, or its type is not F32, F16, BF16
    /// or F64.
    pub fn read(&self, name: &str, out: &mut [f32]) -> Result<(), ModelError> {
        let (dtype, data) = self.bytes(name)?;
        match dtype {
            "F32" => convert_values(data, out, f32::from_le_bytes),
            "F16" => convert_values(data, out, |bytes| f16::from_le_bytes(bytes).to_f32()),
            "BF16" => convert_values(data, out, |bytes| bf16::from_le_bytes(bytes).to_f32()),
            _ => convert_values(data, out, |bytes| f64::from_le_bytes(bytes) as f32),
        }
        Ok(())
    }
}

/// Checks that the tensors tile `length` bytes of data without gaps or overlaps, and that each has
/// the number of bytes that its type and shape require. Returns a description of the first error.
fn check_layout(entries: &HashMap<String, TensorHeader>, length: usize) -> Result<(), String> {
    let mut ordered: Vec<_> = entries.iter().collect();
    ordered.sort_by_key(|(name, entry)| (entry.data_offsets, name.as_str()));
    let mut end = 0;
    for (name, entry) in ordered {
        let [from, to] = entry.data_offsets;
        if from != end || to < from {
            return Err(format!(
                "tensor {name} occupies bytes {from} to {to} of the data; it must start at byte \
                 {end}"
            ));
        }
        if to > length {
            return Err(format!(
                "tensor {name} ends at byte {to} of the data, which has {length} bytes"
            ));
        }
        let elements =
            entry.shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
        if let Some(width) = entry.element_size()
            && elements.and_then(|elements| elements.checked_mul(width)) != Some(to - from)
        {
            return Err(format!(
                "tensor {name} has {} bytes, which does not match its shape {:?} and type {}",
                to - from,
                entry.shape,
                entry.dtype
            ));
        }
        end = to;
    }
    if end != length {
        return Err(format!(
            "the tensors occupy {end} bytes, but the file has {length} bytes of tensor data"
        ));
    }
    Ok(())
}

fn convert_values<const N: usize>(data: &[u8], out: &mut [f32], decode: impl Fn([u8; N]) -> f32) {
    for (value, item) in out.iter_mut().zip(data.as_chunks::<N>().0) {
        *value = decode(*item);
    }
}

/// Writes f32 tensors (name, shape, row-major values) to a safetensors file in the given order. The
/// tensors are streamed, without a copy of the weights, and the file is flushed to the disk. If
/// writing fails, the incomplete file is removed.
///
/// # Errors
/// Returns an error with the path and the cause if the disk is full or the file cannot be written,
/// and an error if the number of a tensor's values does not match its shape.
pub fn write_safetensors<'a>(
    path: &Path,
    tensors: impl IntoIterator<Item = (String, Vec<usize>, &'a [f32])>,
) -> Result<(), ModelError> {
    let (shapes, values): (Vec<_>, Vec<_>) =
        tensors.into_iter().map(|(name, shape, data)| ((name, shape), data)).unzip();
    write_safetensors_with(path, &shapes, |index| Cow::Borrowed(values[index]))
}

/// Writes a file like [`write_safetensors`], with values that are computed during the write.
/// `values` is called once per tensor, in order, with the tensor's index.
///
/// # Errors
/// Returns an error in the same cases as [`write_safetensors`].
pub fn write_safetensors_with<'a>(
    path: &Path,
    tensors: &[(String, Vec<usize>)],
    mut values: impl FnMut(usize) -> Cow<'a, [f32]>,
) -> Result<(), ModelError> {
    let mut header = Map::new();
    // transformers rejects a file whose metadata does not name the framework of its layout.
    header.insert("__metadata__".into(), json!({ "format": "pt" }));
    let mut offset = 0usize;
    for (name, shape) in tensors {
        let end = offset + shape.iter().product::<usize>() * size_of::<f32>();
        header.insert(
            name.clone(),
            json!({ "dtype": "F32", "shape": shape, "data_offsets": [offset, end] }),
        );
        offset = end;
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    // Pad the header with spaces to a multiple of eight bytes, so that the data is aligned for
    // readers.
    header.resize(header.len().next_multiple_of(8), b' ');
    let needed = (8 + header.len() + offset) as u64;
    write_synced(path, needed, |out| {
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        for (index, (name, shape)) in tensors.iter().enumerate() {
            let data = values(index);
            if shape.iter().product::<usize>() != data.len() {
                let what = format!(
                    "tensor {name} of shape {shape:?} cannot be written with {} values",
                    data.len()
                );
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

/// Creates a file, calls `fill` to write its contents, and flushes it to the disk. Removes the file
/// if writing or flushing fails. `needed` is the size of the file in bytes, for the error message.
pub(crate) fn write_synced(
    path: &Path,
    needed: u64,
    fill: impl FnOnce(&mut BufWriter<File>) -> std::io::Result<()>,
) -> Result<(), ModelError> {
    let file = File::create(path).map_err(ModelError::io_error("create", path))?;
    let mut out = BufWriter::with_capacity(1 << 16, file);
    let written = fill(&mut out)
        .and_then(|()| out.flush())
        // Some file systems report a full disk only here.
        .and_then(|()| out.get_ref().sync_all());
    written.map_err(|cause| {
        // Report only the first failure: a file that cannot be removed is harmless.
        let _ = std::fs::remove_file(path);
        ModelError::write_error(path, needed)(cause)
    })
}
