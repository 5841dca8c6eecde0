//! Named tensors in one flat array: weights, their gradient and both moments of their optimiser are four
//! arrays of one layout.

use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;

use levade_model::{ModelError, Parameter, SafetensorsFile, write_safetensors_with};

/// A tensor's place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Name and shape in files.
    pub parameter: Parameter,
    /// Where it lies.
    pub range: Range<usize>,
}

impl Place {
    /// Whether it is a matrix, and not a norm or a bias.
    pub fn is_matrix(&self) -> bool {
        self.parameter.shape.len() > 1
    }
}

/// Where every tensor lies.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tensors {
    /// The tensors, in the order of the file.
    pub places: Vec<Place>,
    /// Length of the array.
    pub len: usize,
}

impl Tensors {
    /// Adds tensors that lie next to each other, the first of them aligned; returns where they lie.
    pub fn lay(&mut self, parameters: impl IntoIterator<Item = Parameter>) -> Range<usize> {
        let start = self.len;
        let mut end = start;
        for parameter in parameters {
            let range = end..end + parameter.shape.iter().product::<usize>();
            end = range.end;
            self.places.push(Place { parameter, range });
        }
        self.len = end.next_multiple_of(64);
        start..end
    }

    /// The place of the tensor of this name.
    pub fn find(&self, name: &str) -> Option<&Place> {
        self.places.iter().find(|place| place.parameter.name == name)
    }

    /// Number of parameters.
    pub fn parameters(&self) -> usize {
        self.places.iter().map(|place| place.range.len()).sum()
    }

    /// Writes an array of this layout as safetensors.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, path: &Path, array: &[f32]) -> Result<(), ModelError> {
        self.write_with(path, |place| Cow::Borrowed(&array[place.range.clone()]))
    }

    /// Writes tensors that are made as they are written.
    ///
    /// # Errors
    /// When the file cannot be written, or a tensor has not as many values as its place.
    pub fn write_with<'a>(
        &self,
        path: &Path,
        mut values: impl FnMut(&Place) -> Cow<'a, [f32]>,
    ) -> Result<(), ModelError> {
        let named = |Place { parameter, .. }: &Place| (parameter.name.clone(), parameter.shape.clone());
        let tensors: Vec<_> = self.places.iter().map(named).collect();
        write_safetensors_with(path, &tensors, |index| values(&self.places[index]))
    }

    /// Opens a file that [`Tensors::write`] wrote, or another program under the same names, to be read from:
    /// then nothing is missing that could be found missing while an array is being filled.
    ///
    /// # Errors
    /// When the file or a tensor is missing, damaged or of another shape, or when there are others.
    pub fn open(&self, path: &Path) -> Result<SafetensorsFile, ModelError> {
        let file = SafetensorsFile::open(path)?;
        for Place { parameter, .. } in &self.places {
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

    /// Fills an array of this layout from a file that [`Tensors::open`] has opened.
    ///
    /// # Errors
    /// When the file was opened for another layout.
    pub fn read(&self, file: &SafetensorsFile, array: &mut [f32]) -> Result<(), ModelError> {
        self.places
            .iter()
            .try_for_each(|place| file.read(&place.parameter.name, &mut array[place.range.clone()]))
    }
}
