//! Named tensors in one flat array. Weights, their gradient and both moments of the optimizer are
//! four arrays with the same layout.

use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;

use levade_model::{ModelError, Parameter, SafetensorsFile, write_safetensors_with};

/// Name, shape and range of a tensor in a parameter array.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry {
    /// Name and shape of the tensor in files.
    pub parameter: Parameter,
    /// Range of the tensor's values in the array.
    pub range: Range<usize>,
}

impl TensorEntry {
    /// Returns whether the tensor is a matrix, as opposed to a norm or a bias.
    pub fn is_matrix(&self) -> bool {
        self.parameter.shape.len() > 1
    }
}

/// Ranges of all tensors in a parameter array.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tensors {
    /// Tensors, in the order of the file.
    pub entries: Vec<TensorEntry>,
    /// Length of the array in values, including padding.
    pub len: usize,
}

impl Tensors {
    /// Appends adjacent tensors, the first of which is aligned to 64 values. Returns the range of
    /// all appended tensors.
    pub fn append(&mut self, parameters: impl IntoIterator<Item = Parameter>) -> Range<usize> {
        let start = self.len;
        let mut end = start;
        for parameter in parameters {
            let range = end..end + parameter.shape.iter().product::<usize>();
            end = range.end;
            self.entries.push(TensorEntry { parameter, range });
        }
        self.len = end.next_multiple_of(64);
        start..end
    }

    /// Returns the tensor with this name.
    pub fn find(&self, name: &str) -> Option<&TensorEntry> {
        self.entries.iter().find(|entry| entry.parameter.name == name)
    }

    /// Returns the number of parameters, without padding.
    pub fn parameters(&self) -> usize {
        self.entries.iter().map(|entry| entry.range.len()).sum()
    }

    /// Writes an array with this layout as safetensors.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn write(&self, path: &Path, array: &[f32]) -> Result<(), ModelError> {
        self.write_with(path, |entry| Cow::Borrowed(&array[entry.range.clone()]))
    }

    /// Writes an array with this layout as safetensors. `values` computes each tensor's values
    /// while the file is written.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written, or if a tensor does not have as many values
    /// as its range.
    pub fn write_with<'a>(
        &self,
        path: &Path,
        mut values: impl FnMut(&TensorEntry) -> Cow<'a, [f32]>,
    ) -> Result<(), ModelError> {
        let tensors: Vec<_> = self
            .entries
            .iter()
            .map(|TensorEntry { parameter, .. }| (parameter.name.clone(), parameter.shape.clone()))
            .collect();
        write_safetensors_with(path, &tensors, |index| values(&self.entries[index]))
    }

    /// Opens a file that [`Tensors::write`], or another program with the same names, wrote, and
    /// checks all tensors. So no tensor turns out to be missing while an array is being filled.
    ///
    /// # Errors
    /// Returns an error if the file or a tensor is missing, damaged or has another shape, or if
    /// there are other tensors.
    pub fn open(&self, path: &Path) -> Result<SafetensorsFile, ModelError> {
        let file = SafetensorsFile::open(path)?;
        for TensorEntry { parameter, .. } in &self.entries {
            file.check_shaped(&parameter.name, &parameter.shape)?;
        }
        match file.tensors().filter(|(name, _)| self.find(name).is_none()).min() {
            None => Ok(file),
            Some((tensor, found)) => Err(ModelError::UnexpectedTensor {
                path: path.to_path_buf(),
                tensor: tensor.to_owned(),
                found: found.to_vec(),
            }),
        }
    }

    /// Fills an array with this layout from a file that [`Tensors::open`] has opened.
    ///
    /// # Errors
    /// Returns an error if the file was opened for another layout.
    pub fn read(&self, file: &SafetensorsFile, array: &mut [f32]) -> Result<(), ModelError> {
        self.entries
            .iter()
            .try_for_each(|entry| file.read(&entry.parameter.name, &mut array[entry.range.clone()]))
    }
}
